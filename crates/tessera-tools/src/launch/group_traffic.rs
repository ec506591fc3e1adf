//! Which groups of ranks send data between hosts, and how much, from the programs of a sealed plan.

use std::collections::BTreeMap;

use tessera_estimate::group_path::GroupPath;
use tessera_ir::{Op, Opcode, PeerPosition, Program};
use tessera_mesh::{Group, Rank};
use tessera_verify::SealedPlan;

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

/// Data of the groups of a row, before it is complete.
#[derive(Default)]
struct TrafficSum {
    members: BTreeMap<Vec<Rank>, GroupPath>,
    ops: usize,
    bytes: f64,
}

/// Lists the traffic of a plan whose ranks are on these hosts.
///
/// # Panics
/// Panics if `host_of_rank` has fewer entries than the plan has ranks.
#[must_use]
pub fn list_group_traffic(sealed: &SealedPlan, host_of_rank: &[u32]) -> Vec<GroupTraffic> {
    let mesh = sealed.mesh();
    let host = |rank: &Rank| host_of_rank[rank.0 as usize];
    let mut rows = Vec::new();
    for phase in sealed.phase_names() {
        let mut sums: BTreeMap<(&'static str, Group), TrafficSum> = BTreeMap::new();
        for role in sealed.roles() {
            let Some(p) = role.ranks.first().and_then(|r| sealed.rank_program(phase, *r)) else { continue };
            for (op, group) in p.ops.iter().filter_map(|op| Some((op, counted_group(op)?))) {
                let sum = sums.entry((op.opcode.name(), group)).or_default();
                for rank in &role.ranks {
                    let members = exchanging_ranks(op, *rank, mesh.group_members(*rank, group));
                    // Each op counts once, at the first rank that takes part in it.
                    if members.len() < 2 || members.first() != Some(rank) {
                        continue;
                    }
                    let hosts: Vec<u32> = members.iter().map(host).collect();
                    sum.bytes += bytes_between_hosts(p, op, &hosts);
                    let places: Vec<(u32, u32)> = hosts.iter().map(|host| (*host, *host)).collect();
                    sum.members.insert(members, GroupPath::from_places(&places));
                }
            }
            for (key, sum) in &mut sums {
                let own =
                    p.ops.iter().filter(|op| (op.opcode.name(), op.comm_group()) == (key.0, Some(key.1)));
                sum.ops = sum.ops.max(own.count());
            }
        }
        rows.extend(sums.into_iter().filter(|(_, sum)| !sum.members.is_empty()).map(|((op, group), sum)| {
            GroupTraffic {
                phase: phase.clone(),
                op,
                groups: describe_groups(op, group, sum.members.len()),
                ops: sum.ops,
                spanning: sum.members.values().filter(|path| path.leaves_host()).count(),
                path: sum.members.values().copied().max().unwrap_or(GroupPath::PeerMemory),
                bytes_between_hosts: sum.bytes.round() as u64,
            }
        }));
    }
    rows
}

/// Returns the kind of the groups and their number, such as `9 groups of tp`, or `8 pairs of pp` for an
/// op between two ranks.
fn describe_groups(op: &str, group: Group, count: usize) -> String {
    let what = if op == Opcode::Send.name() { "pair" } else { "group" };
    format!("{count} {what}{} of {group}", if count == 1 { "" } else { "s" })
}

/// Returns the group of an op that sends data. A receive is the other end of a send.
fn counted_group(op: &Op) -> Option<Group> {
    if op.opcode == Opcode::Recv { None } else { op.comm_group() }
}

/// Returns the ranks between which an op of a rank moves data: the sender and the receiver, or all
/// members of the group.
fn exchanging_ranks(op: &Op, rank: Rank, members: Vec<Rank>) -> Vec<Rank> {
    let Some(PeerPosition::To(at)) = op.peer_position() else { return members };
    let receiver = usize::try_from(at).ok().and_then(|at| members.get(at).copied());
    std::iter::once(rank).chain(receiver).collect()
}

fn bytes_between_hosts(p: &Program, op: &Op, hosts: &[u32]) -> f64 {
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
