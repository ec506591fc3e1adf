//! The communicators that a plan's collectives need, and each rank's endpoints of them: arenas in
//! shared memory on one host, or streams between ranks that joined over the network.
//!
//! The communicators are a pure function of the sealed plan, so the launcher that creates the
//! arenas and the ranks that attach to them agree without exchanging messages.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Result as IoResult};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_cpu::arena::Arena;
use tessera_cpu::tcp::{PeerStream, TcpTransport};
use tessera_cpu::transport::{CommLayout, Transport, TransportError};
use tessera_cpu::{CommEndpoint, contribution_bytes};
use tessera_device::{CommRoute, Communicator};
use tessera_ir::{Opcode, Program};
use tessera_mesh::Rank;
use tessera_runtime::driver::ByteStream;
use tessera_runtime::tripwire::T0757;
use tessera_verify::SealedPlan;

use crate::codes::T0017;

/// A communicator and the arena that it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommunicatorSpec {
    /// The group of ranks, or the sender and receiver pair.
    pub communicator: Communicator,
    /// Number and size of the arena's slots.
    pub layout: CommLayout,
}

/// Returns the communicators that a rank shares with others.
pub(crate) fn shared_communicators(plan: &SealedPlan, rank: Rank) -> Vec<CommunicatorSpec> {
    let members =
        |s: &CommunicatorSpec| s.communicator.members.contains(&rank).then_some(s.communicator.members.len());
    communicator_specs(plan).into_iter().filter(|s| members(s).is_some_and(|n| n > 1)).collect()
}

/// Returns every communicator that a plan needs, in a fixed order.
#[must_use]
pub fn communicator_specs(plan: &SealedPlan) -> Vec<CommunicatorSpec> {
    let mesh = plan.mesh();
    let mut demands: BTreeMap<Communicator, ArenaDemand> = BTreeMap::new();
    for phase in plan.phase_names() {
        for role in plan.roles() {
            let Some(p) = role.ranks.first().and_then(|r| plan.rank_program(phase, *r)) else { continue };
            for (route, need) in program_demands(p) {
                for lane in route.communicators_of(mesh, &role.ranks) {
                    let demand = demands.entry(lane).or_default();
                    demand.contribution_bytes = demand.contribution_bytes.max(need.contribution_bytes);
                    demand.in_flight = demand.in_flight.max(need.in_flight);
                }
            }
        }
    }
    demands
        .into_iter()
        .map(|(lane, ArenaDemand { contribution_bytes: bytes, in_flight: flight })| CommunicatorSpec {
            // One slot more than the maximum in flight: a fast member may begin the next collective
            // while a slow member still reads the previous one.
            layout: CommLayout {
                members: lane.members.len(),
                slots: flight + 1,
                slot_bytes: bytes.max(4) as usize,
            },
            communicator: lane,
        })
        .collect()
}

/// The arena size that a program's collectives need.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ArenaDemand {
    /// Size in bytes of the largest operand that a member passes to one collective.
    contribution_bytes: u64,
    /// Maximum distance from the oldest open collective to the newest issued one, both included.
    /// Slots are assigned round robin, so a collective in between keeps its slot even after its
    /// wait.
    in_flight: usize,
}

/// The collectives issued on one communicator so far, and those without a wait yet.
#[derive(Debug, Default)]
struct OpenIssues {
    next_index: usize,
    open: BTreeSet<usize>,
}

/// Computes a program's needs for each communicator that its ops name.
fn program_demands(p: &Program) -> BTreeMap<CommRoute, ArenaDemand> {
    let mut demands: BTreeMap<CommRoute, ArenaDemand> = BTreeMap::new();
    let mut open_issues: BTreeMap<CommRoute, OpenIssues> = BTreeMap::new();
    let mut tickets = BTreeMap::new();
    for op in &p.ops {
        if op.opcode == Opcode::Wait
            && let Some((route, index)) = op.operands.first().and_then(|t| tickets.remove(t))
            && let Some(b) = open_issues.get_mut(&route)
        {
            b.open.remove(&index);
        }
        let Some(route) = CommRoute::from_op(op) else { continue };
        let b = open_issues.entry(route).or_default();
        let index = b.next_index;
        b.next_index += 1;
        let need = demands.entry(route).or_default();
        need.contribution_bytes = need.contribution_bytes.max(contribution_bytes(p, op));
        need.in_flight = need.in_flight.max(index + 1 - b.open.first().map_or(index, |oldest| *oldest));
        if let (true, Some(ticket)) = (op.issue, op.results.first()) {
            b.open.insert(index);
            tickets.insert(*ticket, (route, index));
        }
    }
    demands
}

/// Creates every arena.
///
/// # Errors
/// T0017 if the operating system refuses to create an arena.
pub fn create_arenas(specs: &[CommunicatorSpec]) -> Result<Vec<OwnedFd>, Diagnostic> {
    specs
        .iter()
        .map(|s| {
            Arena::create_memfd(s.layout)
                .map_err(|e| Diagnostic::error(&T0017, format!("{}: {e}", describe_spec(s))))
        })
        .collect()
}

/// Creates the arenas of some communicators, and returns each rank's in the order of
/// [`indices_of_rank`].
///
/// # Errors
/// T0017.
pub fn create_arenas_of_ranks(
    specs: &[CommunicatorSpec],
    ranks: u32,
) -> Result<Vec<Vec<Arc<OwnedFd>>>, Diagnostic> {
    let arenas: Vec<Arc<OwnedFd>> = create_arenas(specs)?.into_iter().map(Arc::new).collect();
    let of_rank = |rank| indices_of_rank(specs, Rank(rank)).map(|i| Arc::clone(&arenas[i])).collect();
    Ok((0..ranks).map(of_rank).collect())
}

/// Returns the indices of the communicators that a rank is a member of, in order.
pub fn indices_of_rank(specs: &[CommunicatorSpec], rank: Rank) -> impl Iterator<Item = usize> + '_ {
    specs.iter().enumerate().filter(move |(_, s)| s.communicator.members.contains(&rank)).map(|(i, _)| i)
}

/// The resources from which a rank builds its endpoints.
pub enum EndpointSources {
    /// Arena descriptors, in the order of [`indices_of_rank`].
    Arenas(Vec<OwnedFd>),
    /// Communicator indices in that order, each with a stream to every other member in member
    /// order.
    Streams(Vec<(usize, Vec<Box<dyn ByteStream>>)>),
}

impl From<Vec<OwnedFd>> for EndpointSources {
    fn from(fds: Vec<OwnedFd>) -> EndpointSources {
        EndpointSources::Arenas(fds)
    }
}

/// Builds a rank's endpoints from arena descriptors in the order of [`indices_of_rank`].
///
/// # Errors
/// T0017 if the descriptors do not match the plan or cannot be mapped.
pub fn attach_arenas(
    plan: &SealedPlan,
    rank: Rank,
    fds: Vec<OwnedFd>,
) -> Result<Vec<CommEndpoint>, Diagnostic> {
    attach_endpoints(plan, rank, EndpointSources::Arenas(fds), JoinOrder::OfPlan)
}

/// The order in which a rank joins its communicators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinOrder {
    /// The order of the plan, which is the same on all ranks.
    OfPlan,
    /// The opposite order (for drills).
    Reversed,
}

/// Checks that a rank joins its communicators in the order of the plan, for transports that wait for
/// the other members: ranks with different orders would wait for each other.
///
/// # Errors
/// T0757 with the first communicator that differs.
pub(crate) fn check_join_order(
    plan: &SealedPlan,
    rank: Rank,
    routes: impl IntoIterator<Item = CommRoute>,
) -> Result<(), Diagnostic> {
    let specs = communicator_specs(plan);
    let planned = indices_of_rank(&specs, rank).map(|i| specs[i].communicator.clone());
    let joined = routes.into_iter().filter_map(|route| route.communicator_of(plan.mesh(), rank));
    let Some((at, (own, next))) = joined.zip(planned).enumerate().find(|(_, (own, next))| own != next) else {
        return Ok(());
    };
    let what = format!("rank {rank} was about to join {} as number {at}, where the plan has {}", own, next);
    Err(Diagnostic::error(&T0757, what))
}

/// Builds a rank's communicator endpoints, one after another.
///
/// # Errors
/// T0017 if the resources do not match the plan or cannot be mapped.
pub fn attach_endpoints(
    plan: &SealedPlan,
    rank: Rank,
    sources: EndpointSources,
    order: JoinOrder,
) -> Result<Vec<CommEndpoint>, Diagnostic> {
    let specs = communicator_specs(plan);
    let mine: Vec<usize> = indices_of_rank(&specs, rank).collect();
    let sources: Vec<EndpointSource> = match sources {
        EndpointSources::Arenas(fds) => fds.into_iter().map(EndpointSource::Arena).collect(),
        EndpointSources::Streams(sources) => {
            let named: Vec<usize> = sources.iter().map(|(i, _)| *i).collect();
            if named != mine {
                return Err(Diagnostic::error(
                    &T0017,
                    format!("rank {rank} is in communicators {mine:?} and received communicators {named:?}"),
                ));
            }
            sources.into_iter().map(|(_, streams)| EndpointSource::Streams(streams)).collect()
        }
    };
    if mine.len() != sources.len() {
        return Err(Diagnostic::error(
            &T0017,
            format!("rank {rank} needs {} arenas and received {}", mine.len(), sources.len()),
        ));
    }
    let mut mine: Vec<(usize, EndpointSource)> = mine.into_iter().zip(sources).collect();
    if order == JoinOrder::Reversed {
        mine.reverse();
    }
    mine.into_iter()
        .map(|(i, sources)| {
            let spec = &specs[i];
            let failed =
                |why: &str| Diagnostic::error(&T0017, format!("rank {rank}, {}: {why}", describe_spec(spec)));
            let member = spec.communicator.members.iter().position(|m| *m == rank).unwrap_or(0);
            let route = spec
                .communicator
                .member_route(plan.mesh(), member)
                .ok_or_else(|| failed("the mesh has no such group"))?;
            let transport =
                sources.into_transport(spec.layout, member).map_err(|e| failed(&e.to_string()))?;
            Ok(CommEndpoint { route, transport })
        })
        .collect()
}

/// Returns the member ranks of every communicator, in the order of `specs`.
#[must_use]
pub fn member_ranks(specs: &[CommunicatorSpec]) -> Vec<Vec<u32>> {
    specs.iter().map(|s| s.communicator.members.iter().map(|m| m.0).collect()).collect()
}

enum EndpointSource {
    Arena(OwnedFd),
    Streams(Vec<Box<dyn ByteStream>>),
}

impl EndpointSource {
    fn into_transport(self, layout: CommLayout, member: usize) -> Result<Box<dyn Transport>, TransportError> {
        Ok(match self {
            EndpointSource::Arena(fd) => Box::new(Arena::attach(fd, layout, member)?),
            EndpointSource::Streams(streams) => {
                let wire = |s| Some(Box::new(StreamWire(s)) as Box<dyn PeerStream>);
                let mut wires: Vec<_> = streams.into_iter().map(wire).collect();
                wires.insert(member.min(wires.len()), None);
                Box::new(TcpTransport::new(layout, member, wires)?)
            }
        })
    }
}

/// Adapts a driver stream to the backend's wire trait.
struct StreamWire(Box<dyn ByteStream>);

impl PeerStream for StreamWire {
    fn read(&mut self, into: &mut [u8]) -> IoResult<usize> {
        self.0.read(into)
    }

    fn write(&mut self, from: &[u8]) -> IoResult<usize> {
        self.0.write(from)
    }

    fn flush(&mut self) -> IoResult<bool> {
        match self.0.flush() {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn close(&mut self) {
        // Layers above the socket may need no shutdown of their own; only the socket is shut down.
        let _ = rustix::net::shutdown(self.0.fd(), rustix::net::Shutdown::Write);
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }
}

fn describe_spec(spec: &CommunicatorSpec) -> String {
    spec.communicator.to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tessera_device::TransferPeer;
    use tessera_ir::{Bundle, Phase, RoleRanks, Slots};
    use tessera_mesh::{Axis, Group, RankMap};
    use tessera_verify::{DeviceLimits, seal};

    #[test]
    fn slots_are_counted_from_the_oldest_open_collective_of_a_communicator() {
        let text = "program @p role(r) mesh(tp=2, pp=2) streams(compute, tp_collective) {
            %x = input : f32[4, 4] {tp: partial(sum)}
            %z = input : f32[2, 4]
            %a = ttile.collective.issue all_reduce %x {axis = \"tp\", reduction = \"sum\"} @tp_collective
            %s = ttile.collective.issue send %z {axis = \"pp\", to = 1} @tp_collective
            %b = ttile.collective.issue all_reduce %x {axis = \"tp\", reduction = \"sum\"} @tp_collective
            %u = ttile.collective.wait %b : f32[4, 4] @compute
            %c = ttile.collective.issue all_reduce %x {axis = \"tp\", reduction = \"sum\"} @tp_collective
            %v = ttile.collective.wait %a : f32[4, 4] @compute
            %w = ttile.collective.wait %c : f32[4, 4] @compute
            ttile.collective.wait %s @compute
        }";
        let p = tessera_ir::parse_all(text, "p").unwrap_or_else(|d| panic!("{d:#?}")).remove(0);
        let needs: Vec<_> = program_demands(&p).into_iter().collect();
        let route = |axis, peer| CommRoute { group: Group::whole_axis(axis), peer };
        let tp = (route(Axis::Tp, None), ArenaDemand { contribution_bytes: 64, in_flight: 3 });
        let pp = (
            route(Axis::Pp, Some(TransferPeer::To(1))),
            ArenaDemand { contribution_bytes: 32, in_flight: 1 },
        );
        assert!(needs.len() == 2 && needs.contains(&tp) && needs.contains(&pp), "{needs:?}");
    }
    /// Seals a plan of one phase in which every value has its own slot.
    fn seal_phase(text: &str) -> SealedPlan {
        let programs = tessera_ir::parse_all(text, "p").unwrap_or_else(|d| panic!("{d:#?}"));
        let mesh = programs[0].mesh;
        let names: Vec<&str> = programs.iter().map(|p| p.role.as_str()).collect();
        let slots = |p: &Program| Slots {
            slot_bytes: p
                .values
                .iter()
                .map(|v| if v.ty.is_token() { 4 } else { v.ty.byte_size().0 })
                .collect(),
            value_slots: (0..p.values.len() as u32).map(Some).collect(),
        };
        let bundle = Bundle {
            mesh,
            rank_map: RankMap::from_device_kind(&mesh, "cpu"),
            hosts: None,
            roles: RoleRanks::assign_by_name(&mesh, &names),
            phases: vec![Phase {
                name: programs[0].name.clone(),
                slots: programs.iter().map(slots).collect(),
                programs,
            }],
            calls: vec![("call".to_string(), vec!["p".to_string()])],
            mapping: String::new(),
        };
        seal(bundle, &DeviceLimits::default()).unwrap_or_else(|d| panic!("{d:#?}"))
    }

    #[test]
    fn world_subgroups_and_transfers_have_separate_communicators() {
        let head = "mesh(tp=4, outside=1)";
        let given = "ttile.collective.broadcast %x {axis = \"world\", root = 0}";
        let mut text = format!(
            "program @p role(leader@out0) {head} {{
                %x = input : f32[4, 4]
                %given = {given}
                output \"given\", %given
            }}\n"
        );
        for at in 0..4 {
            let beside = 1 - at % 2;
            text += &format!(
                "program @p role(r@tp{at}) {head} {{
                    %x = input : f32[4, 4]
                    %given = {given}
                    %own = ttile.take_shard %given {{axis = \"tp\", dim = 0, group_size = 2}}
                    %s = ttile.collective.issue send %own {{axis = \"tp\", batch = 1, to = {beside}, group_size = 2}}
                    %r = ttile.collective.issue recv {{axis = \"tp\", batch = 1, from = {beside}, group_size = 2}}
                    ttile.collective.wait %s
                    %theirs = ttile.collective.wait %r : f32[2, 4] {{tp: shard(0, group_size=2)}}
                    %all = ttile.collective.all_gather %theirs {{axis = \"tp\", dim = 0, group_size = 2}}
                    output \"all\", %all
                }}\n"
            );
        }
        let plan = seal_phase(&text);
        let specs = communicator_specs(&plan);
        let lanes: Vec<String> = specs.iter().map(describe_spec).collect();
        assert_eq!(
            lanes,
            [
                "group over tp/2 of ranks 1, 2",
                "group over tp/2 of ranks 3, 4",
                "transfers over tp/2 of ranks 1, 2",
                "transfers over tp/2 of ranks 2, 1",
                "transfers over tp/2 of ranks 3, 4",
                "transfers over tp/2 of ranks 4, 3",
                "group over world of ranks 0, 1, 2, 3, 4",
            ]
        );
        let bytes: Vec<usize> = specs.iter().map(|s| s.layout.slot_bytes).collect();
        assert_eq!(bytes, [32, 32, 32, 32, 32, 32, 64]);
        let fds = create_arenas(&specs).unwrap();
        for rank in plan.mesh().iter() {
            let mine = indices_of_rank(&specs, rank).map(|i| fds[i].try_clone().unwrap()).collect();
            let ends = attach_arenas(&plan, rank, mine).unwrap();
            let program = plan.rank_program("p", rank).unwrap();
            let named: BTreeSet<CommRoute> = program.ops.iter().filter_map(CommRoute::from_op).collect();
            assert_eq!(ends.iter().map(|e| e.route).collect::<BTreeSet<_>>(), named);
            assert_eq!(ends.len(), if rank == Rank(0) { 1 } else { 4 });
            let mut routes: Vec<CommRoute> = ends.iter().map(|e| e.route).collect();
            assert!(check_join_order(&plan, rank, routes.clone()).is_ok());
            routes.swap(0, ends.len() - 1);
            let refused = check_join_order(&plan, rank, routes).err();
            assert_eq!(refused.map(|d| d.code.id), (rank != Rank(0)).then_some("T0757"));
        }
    }
}
