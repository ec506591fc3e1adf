//! The transports that a rank uses between its peers, beside the paths that its plan states.

use tessera_base::Diagnostic;
use tessera_device::{JoinedCommunicator, UsedTransport};
use tessera_ir::{CommRoute, Communicator, Op, Transport};
use tessera_mesh::{GroupPath, Rank};
use tessera_report::flight::{FlightEntry, FlightMark};
use tessera_verify::SealedPlan;

use crate::codes::T0069;

/// A communicator of a rank with the transport that carries its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TransportUse {
    communicator: Communicator,
    stated: Option<GroupPath>,
    used: UsedTransport,
}

impl TransportUse {
    /// Returns the stated path and the transport in use, which are equal on every member: `TCP, stated
    /// peer memory`. Why a backend chose a transport may differ between members and is no part of it.
    pub(crate) fn summary(&self) -> String {
        let stated = self.stated.map_or("no path is stated".to_string(), |p| format!("stated {}", p.name()));
        format!("{}, {stated}", self.used.name())
    }

    /// Returns the name of the communicator, such as `group over tp of ranks 0, 1`.
    pub(crate) fn communicator_name(&self) -> String {
        self.communicator.to_string()
    }

    /// Returns the entry of a flight record, with the reason why NCCL is in use.
    pub(crate) fn flight_entry(&self) -> FlightEntry {
        let reason = match &self.used {
            UsedTransport::Nccl(why) => format!(" ({why})"),
            UsedTransport::SharedMemory | UsedTransport::Tcp | UsedTransport::PeerMemory => String::new(),
        };
        let detail = Some(format!("{}: {}{reason}", self.communicator, self.summary()));
        FlightEntry::Mark(FlightMark { event: "transport".to_string(), detail, ..FlightMark::default() })
    }
}

/// Returns the transports of the communicators of two or more ranks that a rank has joined, in the order in which it joined
/// them.
pub(crate) fn list_transports(
    plan: &SealedPlan,
    rank: Rank,
    joined: &[JoinedCommunicator],
) -> Vec<TransportUse> {
    let of_communicator = |c: &JoinedCommunicator| {
        let communicator = c.route.communicator_of(plan.mesh(), rank)?;
        let stated = plan.hosts().and_then(|stated| stated.find_path(&communicator));
        // The backend learns what a program requests when the program first runs.
        let used = match c.transport.clone() {
            UsedTransport::PeerMemory if requests_nccl(plan, rank, &communicator) => {
                UsedTransport::Nccl("the plan requests NCCL".to_string())
            }
            used => used,
        };
        // A communicator of one rank moves no data.
        (communicator.members.len() > 1).then_some(TransportUse { communicator, stated, used })
    };
    joined.iter().filter_map(of_communicator).collect()
}

/// Checks that every group of GPUs for which the plan states peer memory uses it. A plan that requests
/// NCCL for a group expects no peer memory there. On CPUs the path is not compared: shared memory and
/// TCP differ little on one host, and nobody chooses a mapping by it.
///
/// # Errors
/// T0069, which names every group without it and the reason that the backend found.
pub(crate) fn check_transports(
    plan: &SealedPlan,
    rank: Rank,
    transports: &[TransportUse],
) -> Result<(), Diagnostic> {
    let find_reason = |t: &TransportUse| match &t.used {
        UsedTransport::Nccl(why) if t.stated == Some(GroupPath::PeerMemory) => Some(why.clone()),
        _ => None,
    };
    let refused: Vec<(&TransportUse, String)> = transports
        .iter()
        .filter_map(|t| Some((t, find_reason(t)?)))
        .filter(|(t, _)| !requests_nccl(plan, rank, &t.communicator))
        .collect();
    if refused.is_empty() {
        return Ok(());
    }
    let describe = |(t, why): &(&TransportUse, String)| {
        format!("{}: the plan states peer memory, and NCCL is in use because {why}", t.communicator)
    };
    let message = refused.iter().map(describe).collect::<Vec<_>>().join("; ");
    let d = Diagnostic::error(&T0069, message).with_label("stated", GroupPath::PeerMemory.name());
    let d = refused
        .iter()
        .fold(d, |d, (t, _)| d.with_label(format!("rank {rank}, {}", t.communicator), t.used.to_string()));
    Err(d.with_hint("remove the reason, plan with --transport nccl, or plan without --hosts"))
}

/// Returns whether an op of a rank requests NCCL for a communicator.
pub(crate) fn requests_nccl(plan: &SealedPlan, rank: Rank, communicator: &Communicator) -> bool {
    let mut programs = plan.phase_names().iter().filter_map(|phase| plan.rank_program(phase, rank));
    let requests = |op: &Op| {
        op.requested_transport() == Some(Transport::Nccl)
            && CommRoute::from_op(op).and_then(|route| route.communicator_of(plan.mesh(), rank)).as_ref()
                == Some(communicator)
    };
    programs.any(|p| p.ops.iter().any(requests))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use tessera_device::TransferPeer;
    use tessera_ir::Attr;
    use tessera_mesh::{Axis, Group};
    use tessera_plan::Mapping;
    use tessera_verify::{DeviceLimits, seal};

    use super::*;
    use crate::model::{Model, Overrides};
    use crate::plan::{Plan, plan_model};
    use crate::sim::to_bundle;

    fn plan_demo(mapping: &Mapping) -> Plan {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let model = Model::open(&demo, &Overrides::default()).unwrap();
        plan_model(&model.video, &model.name, "", mapping).unwrap()
    }

    fn joined(axis: Axis, peer: Option<TransferPeer>, transport: UsedTransport) -> JoinedCommunicator {
        let route = CommRoute { group: Group::whole_axis(axis), peer };
        JoinedCommunicator { route, shared: None, transport }
    }

    #[test]
    fn nccl_in_place_of_stated_peer_memory_is_refused_with_the_reason_of_the_backend() {
        let nccl = || UsedTransport::Nccl("GPU 1 has no peer access to GPU 0".to_string());
        let groups = [joined(Axis::Tp, None, nccl()), joined(Axis::Pp, Some(TransferPeer::To(1)), nccl())];
        let check = |mapping: &Mapping, rank: u32| {
            let plan = plan_demo(mapping);
            let found = list_transports(&plan.sealed, Rank(rank), &groups);
            (check_transports(&plan.sealed, Rank(rank), &found), found)
        };
        let bare = Mapping { mesh: "tp=2,pp=2".parse().unwrap(), ..Mapping::default() };
        let (checked, found) = check(&bare, 0);
        assert!(checked.is_ok());
        assert_eq!(found[0].summary(), "NCCL, no path is stated");
        let two_hosts = Mapping { hosts: vec![2, 2], ..bare.clone() };
        let (checked, found) = check(&two_hosts, 1);
        let d = checked.unwrap_err();
        assert_eq!(d.code.id, "T0069");
        assert_eq!(
            d.message,
            "group over tp of ranks 0, 1: the plan states peer memory, and NCCL is in use because GPU 1 has no peer access to GPU 0"
        );
        let summaries: Vec<String> = found.iter().map(TransportUse::summary).collect();
        assert_eq!(summaries, ["NCCL, stated peer memory", "NCCL, stated network"]);
        // NCCL between hosts is what the plan states, and what a request of NCCL means.
        let four_hosts = Mapping { hosts: vec![1; 4], ..bare.clone() };
        assert!(check(&four_hosts, 1).0.is_ok());
        let requested = Mapping { transport: tessera_plan::Transport::Nccl, ..two_hosts };
        assert!(check(&requested, 1).0.is_ok());
        let plan = plan_demo(&requested);
        let mapped = [joined(Axis::Tp, None, UsedTransport::PeerMemory)];
        let [found] = &list_transports(&plan.sealed, Rank(1), &mapped)[..] else { panic!("one group") };
        assert_eq!(found.summary(), "NCCL, stated peer memory");
    }

    #[test]
    fn every_group_without_its_stated_peer_memory_is_reported() {
        let mapping = Mapping { mesh: "tp=2,pp=2".parse().unwrap(), hosts: vec![4], ..Mapping::default() };
        let mut bundle = to_bundle(&plan_demo(&mapping).sealed);
        let programs = bundle.phases.iter_mut().flat_map(|phase| &mut phase.programs);
        let of_tp = programs.flat_map(|p| &mut p.ops).filter(|op| {
            CommRoute::from_op(op).is_some_and(|r| r.group == Group::whole_axis(Axis::Tp) && r.peer.is_none())
        });
        of_tp.for_each(|op| drop(op.attrs.insert("transport".into(), Attr::Str("nccl".into()))));
        let sealed = seal(bundle, &DeviceLimits::default()).unwrap();
        let nccl = |why: &str| UsedTransport::Nccl(why.to_string());
        // The first group asked for NCCL, the second has peer memory, and the other two lack it.
        let groups = [
            joined(Axis::Tp, None, nccl("a program requests NCCL")),
            joined(Axis::Pp, Some(TransferPeer::From(1)), UsedTransport::PeerMemory),
            joined(Axis::Pp, Some(TransferPeer::To(1)), nccl("GPU 2 has no peer access to GPU 0")),
            joined(Axis::Pp, Some(TransferPeer::From(1)), nccl("GPU 0 is hidden")),
        ];
        let found = list_transports(&sealed, Rank(0), &groups);
        let d = check_transports(&sealed, Rank(0), &found).unwrap_err();
        let broken = ["transfers over pp of ranks 0, 2", "transfers over pp of ranks 2, 0"];
        let reasons = ["GPU 2 has no peer access to GPU 0", "GPU 0 is hidden"];
        let parts = broken.iter().zip(reasons).map(|(group, why)| {
            format!("{group}: the plan states peer memory, and NCCL is in use because {why}")
        });
        assert_eq!(d.message, parts.collect::<Vec<_>>().join("; "));
        let labels: Vec<(String, String)> =
            d.labels[1..].iter().map(|l| (l.location.clone(), l.message.clone())).collect();
        let expected = broken.iter().zip(reasons);
        let expected =
            expected.map(|(group, why)| (format!("rank 0, {group}"), format!("NCCL, because {why}")));
        assert_eq!(labels, expected.collect::<Vec<_>>());
    }

    #[test]
    fn only_gpus_are_held_to_peer_memory() {
        let plan =
            plan_demo(&Mapping { mesh: "tp=2".parse().unwrap(), hosts: vec![2], ..Mapping::default() });
        for used in [UsedTransport::Tcp, UsedTransport::SharedMemory, UsedTransport::PeerMemory] {
            let found = list_transports(&plan.sealed, Rank(0), &[joined(Axis::Tp, None, used.clone())]);
            assert!(check_transports(&plan.sealed, Rank(0), &found).is_ok());
            assert_eq!(found[0].summary(), format!("{}, stated peer memory", used.name()));
        }
        let alone = joined(Axis::Pp, None, UsedTransport::Nccl("it is alone".to_string()));
        assert!(list_transports(&plan.sealed, Rank(0), &[alone]).is_empty());
    }
}
