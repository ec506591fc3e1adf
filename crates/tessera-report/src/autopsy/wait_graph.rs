//! The wait graph of a run, its roots and its cycles.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::rank_view::{ObservedCollective, RankView};
use crate::flight::{CollectiveProgress, FlightCollective, PlanMatch};

/// A node of the wait graph: the host or the device of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum WaitNode {
    Host(u32),
    Device(u32),
}

impl WaitNode {
    pub(super) fn rank(self) -> u32 {
        match self {
            WaitNode::Host(r) | WaitNode::Device(r) => r,
        }
    }
}

/// The wait graph and the places where its waits end.
#[derive(Debug, Default)]
pub(super) struct WaitGraph {
    edges: BTreeMap<WaitNode, Vec<WaitNode>>,
    /// Ranks whose host is waited for and waits for no rank.
    pub(super) root_hosts: BTreeSet<u32>,
    /// Ranks whose device is waited for and waits for no rank.
    pub(super) root_devices: BTreeSet<u32>,
    /// Ranks in a collective that other members have completed.
    overtaken: BTreeSet<u32>,
    /// Cycles of ranks that wait for no rank outside the cycle.
    pub(super) cycles: Vec<Vec<u32>>,
    /// Members of each collective that all of its members have launched and none has completed,
    /// although no device lags behind the others.
    pub(super) stalled_groups: Vec<Vec<u32>>,
    /// Positions at which members issued different collectives, among those that were compared with
    /// no plan.
    pub(super) mismatches: Vec<CollectiveMismatch>,
}

/// Collectives at one position that do not match.
#[derive(Debug)]
pub(super) struct CollectiveMismatch {
    /// The largest group of ranks that agree, each with the index of its collective.
    pub(super) majority: Vec<(u32, usize)>,
    /// Ranks that issued another collective than the majority, each with the index of its own.
    pub(super) minority: Vec<(u32, usize)>,
    pub(super) field: &'static str,
}

impl WaitGraph {
    pub(super) fn from_views(views: &[RankView<'_>]) -> WaitGraph {
        let mut waits = WaitGraph::default();
        for v in views {
            if let Some(w) = v.waiting_collective() {
                let to = awaited_nodes(views, v, w);
                let done = |r: &u32| {
                    let theirs = views.get(*r as usize).and_then(|m| m.matching_collective(w));
                    theirs.is_some_and(|t| t.entry.state == CollectiveProgress::Done)
                };
                if to.is_empty() && w.communicator.ranks.iter().any(done) {
                    waits.overtaken.insert(v.rank);
                } else if to.is_empty() {
                    waits.stalled_groups.push(w.communicator.ranks.clone());
                }
                waits.edges.insert(WaitNode::Host(v.rank), to);
            }
            if let Some(d) = v.pending_collectives().next() {
                waits.edges.insert(WaitNode::Device(v.rank), awaited_nodes(views, v, d));
            }
        }
        waits.stalled_groups.sort();
        waits.stalled_groups.dedup();
        waits.find_roots_and_cycles(views);
        waits.mismatches = find_mismatches(views);
        waits
    }

    /// Returns the ranks that are waited for and wait for no rank.
    pub(super) fn root_ranks(&self) -> BTreeSet<u32> {
        self.root_hosts.union(&self.root_devices).copied().collect()
    }

    /// Returns the ranks for which a rank's host waits.
    pub(super) fn awaited_ranks(&self, rank: u32) -> Vec<u32> {
        let to = self.edges.get(&WaitNode::Host(rank)).map_or(&[][..], |e| e);
        let ranks: BTreeSet<u32> = to.iter().map(|n| n.rank()).collect();
        ranks.into_iter().collect()
    }

    /// Returns the ranks whose host or device waits for a rank.
    pub(super) fn waiting_ranks(&self, rank: u32) -> BTreeSet<u32> {
        let waits = |to: &[WaitNode]| to.iter().any(|n| n.rank() == rank);
        self.edges.iter().filter(|(_, to)| waits(to)).map(|(from, _)| from.rank()).collect()
    }

    /// Returns the longest of the shortest chains of waits that end at a rank.
    pub(super) fn chain_to(&self, to: u32) -> Vec<WaitNode> {
        let mut before: BTreeMap<WaitNode, WaitNode> = BTreeMap::new();
        let mut queue: VecDeque<WaitNode> = [WaitNode::Host(to), WaitNode::Device(to)].into();
        let mut depth: BTreeMap<WaitNode, usize> = BTreeMap::new();
        let mut last: Option<(WaitNode, usize)> = None;
        let mut visited: BTreeSet<WaitNode> = queue.iter().copied().collect();
        while let Some(node) = queue.pop_front() {
            for (from, _) in self.edges.iter().filter(|(_, e)| e.contains(&node)) {
                // The wait of a device appears only if its host does not wait.
                if from.rank() != to && visited.insert(*from) {
                    let far = depth.get(&node).map_or(1, |d| d + 1);
                    depth.insert(*from, far);
                    before.insert(*from, node);
                    queue.push_back(*from);
                    if matches!(from, WaitNode::Host(_)) && last.is_none_or(|(_, max_depth)| far > max_depth)
                    {
                        last = Some((*from, far));
                    }
                }
            }
        }
        let mut chain = Vec::new();
        let mut at = last.map(|(node, _)| node);
        while let Some(node) = at {
            chain.push(node);
            at = before.get(&node).copied();
        }
        chain
    }

    fn find_roots_and_cycles(&mut self, views: &[RankView<'_>]) {
        let waited: BTreeSet<WaitNode> = self.edges.values().flatten().copied().collect();
        for node in &waited {
            let out = self.edges.get(node).map_or(0, Vec::len);
            match node {
                // A host in a collective that all members have reached is not silent; their link
                // may be at fault.
                WaitNode::Host(r)
                    if out == 0 && (!self.edges.contains_key(node) || self.overtaken.contains(r)) =>
                {
                    self.root_hosts.insert(*r);
                }
                WaitNode::Device(r) if out == 0 => {
                    self.root_devices.insert(*r);
                }
                _ => {}
            }
        }
        for v in views {
            let start = WaitNode::Host(v.rank);
            let reach = self.reachable_from(start);
            let closed =
                reach.contains(&start) && !reach.iter().any(|n| self.edges.get(n).is_none_or(Vec::is_empty));
            if closed {
                // Ranks that wait for the cycle without being in it are victims.
                let cycle: BTreeSet<u32> = reach
                    .iter()
                    .filter(|n| self.reachable_from(**n).contains(&start))
                    .map(|n| n.rank())
                    .collect();
                let cycle: Vec<u32> = cycle.into_iter().collect();
                if cycle.len() > 1 && !self.cycles.contains(&cycle) {
                    self.cycles.push(cycle);
                }
            }
        }
    }

    /// Returns the nodes that a node waits for, directly or indirectly; they include the node
    /// itself only if it is in a cycle.
    fn reachable_from(&self, from: WaitNode) -> BTreeSet<WaitNode> {
        let mut visited = BTreeSet::new();
        let mut stack: Vec<WaitNode> = self.edges.get(&from).cloned().unwrap_or_default();
        while let Some(n) = stack.pop() {
            if visited.insert(n) {
                stack.extend(self.edges.get(&n).into_iter().flatten());
            }
        }
        visited
    }
}

/// Returns the nodes for which a rank's collective waits: the hosts that have not reached it or, if
/// all have, the devices that lag behind.
fn awaited_nodes(views: &[RankView<'_>], v: &RankView<'_>, call: &ObservedCollective<'_>) -> Vec<WaitNode> {
    let members: Vec<&RankView<'_>> = call
        .communicator
        .ranks
        .iter()
        .filter(|r| **r != v.rank)
        .filter_map(|r| views.get(*r as usize))
        .collect();
    let absent: Vec<WaitNode> =
        members.iter().filter(|m| !m.has_reached(call)).map(|m| WaitNode::Host(m.rank)).collect();
    if !absent.is_empty() {
        return absent;
    }
    let behind = |m: &&&RankView<'_>| {
        let Some(theirs) = m.matching_collective(call).filter(|t| t.entry.state != CollectiveProgress::Done)
        else {
            return false;
        };
        let oldest = m.pending_collectives().next();
        let older = oldest.is_some_and(|o| o.at_ns < theirs.at_ns && !std::ptr::eq(o.entry, theirs.entry));
        older || (call.entry.started && !theirs.entry.started)
    };
    members.iter().filter(behind).map(|m| WaitNode::Device(m.rank)).collect()
}

/// Returns the positions at which members issued different collectives, earliest first. Only
/// collectives that were compared with no plan count.
fn find_mismatches(views: &[RankView<'_>]) -> Vec<CollectiveMismatch> {
    let mut out: Vec<(u64, CollectiveMismatch)> = Vec::new();
    for v in views {
        for call in v
            .collectives
            .iter()
            .filter(|c| c.entry.plan_match == PlanMatch::Unknown && c.communicator.pair.is_none())
        {
            let members = || call.communicator.ranks.iter().filter_map(|r| views.get(*r as usize));
            // The lowest member that reached a position reports it, so that each position counts
            // once.
            if members().any(|m| m.rank < v.rank && m.matching_collective(call).is_some()) {
                continue;
            }
            let sides: Vec<(u32, usize)> =
                members().filter_map(|m| Some((m.rank, m.matching_index(call)?))).collect();
            let entry = |side: (u32, usize)| views[side.0 as usize].collectives[side.1].entry;
            let field_between = |a, b| differing_field(entry(a), entry(b));
            let count_like = |a| sides.iter().filter(|b| field_between(a, **b).is_none()).count();
            let most_like = sides.iter().copied().max_by_key(|s| (count_like(*s), std::cmp::Reverse(s.0)));
            let Some(common) = most_like else { continue };
            let (majority, minority): (Vec<_>, Vec<_>) =
                sides.iter().copied().partition(|s| field_between(common, *s).is_none());
            if let Some(field) = minority.first().and_then(|odd| field_between(common, *odd)) {
                out.push((v.wall_ns(call.at_ns), CollectiveMismatch { field, majority, minority }));
            }
        }
    }
    out.sort_by_key(|(at, _)| *at);
    out.into_iter().map(|(_, d)| d).collect()
}

/// Returns the first property in which two collectives at one position must not differ. Shapes with
/// equal element counts are equal.
fn differing_field(a: &FlightCollective, b: &FlightCollective) -> Option<&'static str> {
    // For the other ops, members may contribute shards of different sizes.
    let even = matches!(a.op.as_str(), "all_reduce" | "broadcast");
    let fields = [
        (a.op != b.op, "op"),
        (a.reduction != b.reduction, "reduction"),
        (a.root != b.root, "root"),
        (type_dtype(&a.ty) != type_dtype(&b.ty), "dtype"),
        (even && element_count(&a.ty) != element_count(&b.ty), "count"),
    ];
    fields.into_iter().find(|(differs, _)| *differs).map(|(_, field)| field)
}

pub(super) fn type_dtype(ty: &str) -> &str {
    ty.split('[').next().unwrap_or_default()
}

fn element_count(ty: &str) -> Option<u64> {
    let dims = ty.split_once('[')?.1.strip_suffix(']')?;
    dims.split(',').map(|d| d.trim().parse::<u64>().ok()).try_fold(1u64, |n, d| n.checked_mul(d?))
}
