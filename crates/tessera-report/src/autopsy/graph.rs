//! Who waits for whom, and where that ends.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::view::{Call, RankView};
use crate::flight::{Collective, Fit, State};

/// A rank's host, or its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Node {
    Host(u32),
    Device(u32),
}

impl Node {
    pub(super) fn rank(self) -> u32 {
        match self {
            Node::Host(r) | Node::Device(r) => r,
        }
    }
}

/// The graph of waits and its ends.
#[derive(Debug, Default)]
pub(super) struct Waits {
    edges: BTreeMap<Node, Vec<Node>>,
    /// Ranks whose host is waited for and waits for nobody.
    pub(super) hosts: BTreeSet<u32>,
    /// Ranks whose device is waited for and waits for nobody.
    pub(super) devices: BTreeSet<u32>,
    /// Ranks that are in a collective which others have left.
    late: BTreeSet<u32>,
    /// Circles that wait for nobody outside.
    pub(super) circles: Vec<Vec<u32>>,
    /// Members of a collective that all of them are in.
    pub(super) together: Vec<Vec<u32>>,
    /// Members that differ at one position, where no plan was compared: group, and each rank's call.
    pub(super) differences: Vec<Difference>,
}

/// Calls of one position that do not fit each other.
#[derive(Debug)]
pub(super) struct Difference {
    /// Rank and index of its call, of those that most agree with.
    pub(super) most: Vec<(u32, usize)>,
    /// The others.
    pub(super) odd: Vec<(u32, usize)>,
    pub(super) field: &'static str,
}

impl Waits {
    pub(super) fn of(views: &[RankView<'_>]) -> Waits {
        let mut waits = Waits::default();
        for v in views {
            if let Some(w) = v.waiting() {
                let to = waits_for(views, v, w);
                let done = |r: &u32| {
                    let theirs = views.get(*r as usize).and_then(|m| m.meets(w));
                    theirs.is_some_and(|t| t.c.state == State::Done)
                };
                if to.is_empty() && w.channel.ranks.iter().any(done) {
                    waits.late.insert(v.rank);
                } else if to.is_empty() {
                    waits.together.push(w.channel.ranks.clone());
                }
                waits.edges.insert(Node::Host(v.rank), to);
            }
            if let Some(d) = v.pending().next() {
                waits.edges.insert(Node::Device(v.rank), waits_for(views, v, d));
            }
        }
        waits.together.sort();
        waits.together.dedup();
        waits.ends(views);
        waits.differences = differences(views);
        waits
    }

    /// Ranks that are waited for and wait for nobody.
    pub(super) fn roots(&self) -> BTreeSet<u32> {
        self.hosts.union(&self.devices).copied().collect()
    }

    /// Ranks that a rank's host waits for.
    pub(super) fn direct(&self, rank: u32) -> Vec<u32> {
        let to = self.edges.get(&Node::Host(rank)).map_or(&[][..], |e| e);
        let ranks: BTreeSet<u32> = to.iter().map(|n| n.rank()).collect();
        ranks.into_iter().collect()
    }

    /// Ranks whose host or device waits for a rank.
    pub(super) fn waiters(&self, rank: u32) -> BTreeSet<u32> {
        let waits = |to: &[Node]| to.iter().any(|n| n.rank() == rank);
        self.edges.iter().filter(|(_, to)| waits(to)).map(|(from, _)| from.rank()).collect()
    }

    /// A chain of waits that ends at a rank, from as far away as there is one.
    pub(super) fn chain(&self, to: u32) -> Vec<Node> {
        let mut before: BTreeMap<Node, Node> = BTreeMap::new();
        let mut queue: VecDeque<Node> = [Node::Host(to), Node::Device(to)].into();
        let mut depth: BTreeMap<Node, usize> = BTreeMap::new();
        let mut last: Option<(Node, usize)> = None;
        let mut seen: BTreeSet<Node> = queue.iter().copied().collect();
        while let Some(node) = queue.pop_front() {
            for (from, _) in self.edges.iter().filter(|(_, e)| e.contains(&node)) {
                // A device's wait is shown only where its host does not wait.
                if from.rank() != to && seen.insert(*from) {
                    let far = depth.get(&node).map_or(1, |d| d + 1);
                    depth.insert(*from, far);
                    before.insert(*from, node);
                    queue.push_back(*from);
                    if matches!(from, Node::Host(_)) && last.is_none_or(|(_, most)| far > most) {
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

    fn ends(&mut self, views: &[RankView<'_>]) {
        let waited: BTreeSet<Node> = self.edges.values().flatten().copied().collect();
        for node in &waited {
            let out = self.edges.get(node).map_or(0, Vec::len);
            match node {
                // A host in a collective that all are in is not silent: their link may be.
                Node::Host(r) if out == 0 && (!self.edges.contains_key(node) || self.late.contains(r)) => {
                    self.hosts.insert(*r);
                }
                Node::Device(r) if out == 0 => {
                    self.devices.insert(*r);
                }
                _ => {}
            }
        }
        for v in views {
            let start = Node::Host(v.rank);
            let reach = self.reachable(start);
            let closed =
                reach.contains(&start) && !reach.iter().any(|n| self.edges.get(n).is_none_or(Vec::is_empty));
            if closed {
                // Those that wait for the circle without being in it are victims.
                let circle: BTreeSet<u32> =
                    reach.iter().filter(|n| self.reachable(**n).contains(&start)).map(|n| n.rank()).collect();
                let circle: Vec<u32> = circle.into_iter().collect();
                if circle.len() > 1 && !self.circles.contains(&circle) {
                    self.circles.push(circle);
                }
            }
        }
    }

    /// Nodes that are waited for from here, this one only where it waits for itself in the end.
    fn reachable(&self, from: Node) -> BTreeSet<Node> {
        let mut seen = BTreeSet::new();
        let mut stack: Vec<Node> = self.edges.get(&from).cloned().unwrap_or_default();
        while let Some(n) = stack.pop() {
            if seen.insert(n) {
                stack.extend(self.edges.get(&n).into_iter().flatten());
            }
        }
        seen
    }
}

/// For whom a collective of a rank waits: hosts that did not come to it; where all came, devices that are behind.
fn waits_for(views: &[RankView<'_>], v: &RankView<'_>, call: &Call<'_>) -> Vec<Node> {
    let members: Vec<&RankView<'_>> =
        call.channel.ranks.iter().filter(|r| **r != v.rank).filter_map(|r| views.get(*r as usize)).collect();
    let absent: Vec<Node> = members.iter().filter(|m| !m.reached(call)).map(|m| Node::Host(m.rank)).collect();
    if !absent.is_empty() {
        return absent;
    }
    let behind = |m: &&&RankView<'_>| {
        let Some(theirs) = m.meets(call).filter(|t| t.c.state != State::Done) else { return false };
        let oldest = m.pending().next();
        let older = oldest.is_some_and(|o| o.at_ns < theirs.at_ns && !std::ptr::eq(o.c, theirs.c));
        older || (call.c.started && !theirs.c.started)
    };
    members.iter().filter(behind).map(|m| Node::Device(m.rank)).collect()
}

/// Positions at which members differ, earliest first. Only calls that were compared with no plan can say it.
fn differences(views: &[RankView<'_>]) -> Vec<Difference> {
    let mut out: Vec<(u64, Difference)> = Vec::new();
    for v in views {
        for call in v.calls.iter().filter(|c| c.c.plan == Fit::Unknown && c.channel.pair.is_none()) {
            let members = || call.channel.ranks.iter().filter_map(|r| views.get(*r as usize));
            // Each position once: at its lowest member that came to it.
            if members().any(|m| m.rank < v.rank && m.meets(call).is_some()) {
                continue;
            }
            let mut sides: Vec<(u32, usize, &Call<'_>)> = Vec::new();
            for m in members() {
                if let Some(theirs) = m.meets(call) {
                    let index = m.calls.iter().position(|c| std::ptr::eq(c.c, theirs.c)).unwrap_or(0);
                    sides.push((m.rank, index, theirs));
                }
            }
            let like = |a: &Call<'_>| sides.iter().filter(|s| field(a.c, s.2.c).is_none()).count();
            let Some(most) = sides.iter().max_by_key(|s| (like(s.2), std::cmp::Reverse(s.0))) else {
                continue;
            };
            type Sides<'s, 'c> = Vec<&'s (u32, usize, &'c Call<'c>)>;
            let (fit, odd): (Sides<'_, '_>, Sides<'_, '_>) =
                sides.iter().partition(|s| field(most.2.c, s.2.c).is_none());
            if let Some(first) = odd.first() {
                let field = field(most.2.c, first.2.c).unwrap_or("op");
                let plain = |s: Sides<'_, '_>| s.iter().map(|s| (s.0, s.1)).collect();
                out.push((v.wall(call.at_ns), Difference { field, most: plain(fit), odd: plain(odd) }));
            }
        }
    }
    out.sort_by_key(|(at, _)| *at);
    out.into_iter().map(|(_, d)| d).collect()
}

/// The first thing in which two calls of one position may not differ. Shapes of one number of elements are equal.
fn field(a: &Collective, b: &Collective) -> Option<&'static str> {
    // In the others members may bring pieces of different sizes.
    let even = matches!(a.op.as_str(), "all_reduce" | "broadcast");
    if a.op != b.op {
        Some("op")
    } else if a.reduction != b.reduction {
        Some("reduction")
    } else if a.root != b.root {
        Some("root")
    } else if dtype(&a.ty) != dtype(&b.ty) {
        Some("dtype")
    } else if even && elements(&a.ty) != elements(&b.ty) {
        Some("count")
    } else {
        None
    }
}

pub(super) fn dtype(ty: &str) -> &str {
    ty.split('[').next().unwrap_or_default()
}

fn elements(ty: &str) -> Option<u64> {
    let dims = ty.split_once('[')?.1.strip_suffix(']')?;
    dims.split(',').map(|d| d.trim().parse::<u64>().ok()).try_fold(1u64, |n, d| n.checked_mul(d?))
}
