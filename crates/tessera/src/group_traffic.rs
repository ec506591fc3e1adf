//! Which groups of ranks send data between hosts, and how much, from the programs of a sealed plan.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_ir::{CommRoute, Communicator, Op, Opcode, Program};
use tessera_mesh::{Group, GroupPath, HostMap, Rank};
use tessera_verify::SealedPlan;

use crate::stated_transports::requests_nccl;

/// The collectives of one kind in one program, over the groups of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupTraffic {
    /// Name of the program, such as `denoise`.
    pub phase: String,
    /// Name of the op, such as `all_reduce`.
    pub op: &'static str,
    /// The groups, such as `9 groups of tp`; senders and receivers are pairs.
    pub groups: String,
    /// Number of these ops that a member executes in one run of the program.
    pub ops: usize,
    /// Number of groups or pairs with members on several hosts.
    pub spanning: usize,
    /// The longest path of any of the groups.
    pub path: GroupPath,
    /// Bytes that all groups together send from host to host in one run of the program: with a ring
    /// in rank order, and for all-to-all and point-to-point ops, between each sender and receiver.
    pub bytes_between_hosts: u64,
}

/// A group of a plan with its path, and what it sends between hosts in one call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupPathSummary {
    /// Kind of group: a mesh axis, a subgroup of an axis (`tp/2`) or `world`.
    pub group: String,
    /// Whether the members are the sender and the receiver of point-to-point transfers.
    pub is_transfer: bool,
    /// The ranks, by position.
    pub members: Vec<u32>,
    /// The path of the data, such as `network`.
    pub path: &'static str,
    /// The transport between GPUs, such as `NCCL for the whole group`.
    pub gpu_transport: &'static str,
    /// Bytes from host to host in one call, as in [`GroupTraffic`].
    pub bytes_between_hosts: u64,
}

/// Data of the groups of a row, before it is complete.
#[derive(Default)]
struct TrafficSum {
    members: BTreeMap<Vec<Rank>, GroupPath>,
    ops: usize,
    bytes: f64,
}

/// Lists the traffic of a plan whose ranks are on these hosts.
#[must_use]
pub fn list_group_traffic(sealed: &SealedPlan, hosts: &HostMap) -> Vec<GroupTraffic> {
    let mut rows = Vec::new();
    for phase in sealed.phase_names() {
        let mut sums: BTreeMap<(&'static str, Group), TrafficSum> = BTreeMap::new();
        visit_exchanges(sealed, hosts, phase, |p, op, communicator, bytes| {
            let key = (op.opcode.name(), communicator.group);
            let sum = sums.entry(key).or_default();
            let path = hosts.path_between(&communicator.members).unwrap_or(GroupPath::Network);
            sum.bytes += bytes;
            if sum.members.insert(communicator.members, path).is_none() {
                let same = |o: &&Op| o.opcode == op.opcode && o.comm_group() == Some(key.1);
                sum.ops = sum.ops.max(p.ops.iter().filter(same).count());
            }
        });
        rows.extend(sums.into_iter().map(|((op, group), sum)| GroupTraffic {
            phase: phase.clone(),
            op,
            groups: describe_groups(sum.members.len(), op == Opcode::Send.name(), &group.to_string()),
            ops: sum.ops,
            spanning: sum.members.values().filter(|path| path.leaves_host()).count(),
            path: sum.members.values().copied().max().unwrap_or(GroupPath::PeerMemory),
            bytes_between_hosts: sum.bytes.round() as u64,
        }));
    }
    rows
}

/// Returns the number of groups and their kind, such as `9 groups of tp`, or `8 pairs of pp` for transfers
/// between two ranks.
#[must_use]
pub fn describe_groups(count: usize, are_transfers: bool, group: &str) -> String {
    let what = if are_transfers { "pair" } else { "group" };
    format!("{count} {what}{} of {group}", if count == 1 { "" } else { "s" })
}

/// Returns the groups whose paths a plan states, with the bytes that each sends between hosts in a
/// call of these phases. Empty if the plan states no hosts.
#[must_use]
pub fn summarize_group_paths(sealed: &SealedPlan, phases: &[String]) -> Vec<GroupPathSummary> {
    let Some(stated) = sealed.hosts() else { return Vec::new() };
    let mut bytes: BTreeMap<Communicator, f64> = BTreeMap::new();
    for phase in phases {
        visit_exchanges(sealed, &stated.hosts, phase, |_, _, communicator, sent| {
            *bytes.entry(communicator).or_default() += sent;
        });
    }
    let requests = |c: &Communicator| c.members.first().is_some_and(|rank| requests_nccl(sealed, *rank, c));
    let of_group = |g: &tessera_ir::GroupStatement| GroupPathSummary {
        group: g.communicator.group.to_string(),
        is_transfer: g.communicator.is_transfer,
        members: g.communicator.members.iter().map(|r| r.0).collect(),
        path: g.path.name(),
        gpu_transport: g.path.gpu_transport(requests(&g.communicator)),
        bytes_between_hosts: bytes.get(&g.communicator).map_or(0, |b| b.round() as u64),
    };
    stated.groups.iter().map(of_group).collect()
}

/// Calls `visit` for each exchange of data between ranks in a phase, once for each op and group, with
/// the bytes that it sends between hosts. A receive is the other end of a send and does not count.
pub(crate) fn visit_exchanges(
    sealed: &SealedPlan,
    hosts: &HostMap,
    phase: &str,
    mut visit: impl FnMut(&Program, &Op, Communicator, f64),
) {
    for role in sealed.roles() {
        let Some(p) = role.ranks.first().and_then(|r| sealed.rank_program(phase, *r)) else { continue };
        for op in p.ops.iter().filter(|op| op.opcode != Opcode::Recv) {
            let Some(route) = CommRoute::from_op(op) else { continue };
            for rank in &role.ranks {
                let Some(communicator) = route.communicator_of(sealed.mesh(), *rank) else { continue };
                // Each op counts once, at the first rank that takes part in it.
                if communicator.members.len() < 2 || communicator.members.first() != Some(rank) {
                    continue;
                }
                let places: Vec<Option<u32>> =
                    communicator.members.iter().map(|r| hosts.host_of(*r)).collect();
                let bytes = bytes_between_hosts(p, op, &places);
                visit(p, op, communicator, bytes);
            }
        }
    }
}

fn bytes_between_hosts(p: &Program, op: &Op, hosts: &[Option<u32>]) -> f64 {
    let n = hosts.len() as f64;
    let operand = op.operands.first().map_or(0.0, |v| p.type_of(*v).byte_size().0 as f64);
    let received = p.collective_result(op).map_or(0.0, |v| p.type_of(v).byte_size().0 as f64);
    let chain = hosts.windows(2).filter(|w| w[0] != w[1]).count() as f64;
    let ring = chain + f64::from(u8::from(hosts.first() != hosts.last()));
    match op.opcode {
        Opcode::AllReduce => ring * 2.0 * (n - 1.0) / n * operand,
        // The operand is one shard; each link of the ring passes all shards but one.
        Opcode::AllGather => ring * (n - 1.0) * operand,
        Opcode::ReduceScatter => ring * (n - 1.0) / n * operand,
        Opcode::AllToAll => {
            let pairs = hosts.iter().flat_map(|a| hosts.iter().map(move |b| a != b)).filter(|c| *c).count();
            pairs as f64 * operand / n
        }
        // Neighbours exchange half of what a rank with two neighbours receives, in both directions.
        Opcode::HaloExchange => chain * received,
        Opcode::Broadcast | Opcode::Send => chain * operand,
        _ => 0.0,
    }
}
