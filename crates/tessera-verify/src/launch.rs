//! One order of launches for all ranks, and no circle of waiting.
//!
//! Devices launch collectives first in, first out in host order, so there must be one total order of all
//! instances that every rank's program order follows: the graph of "comes right before on some rank" has no
//! cycle. That also rules out a deadlock over streams and events, whose edges all point forward in program order.

use std::collections::{BTreeMap, HashMap, VecDeque};

use petgraph::algo::kosaraju_scc;
use petgraph::graph::DiGraph;
use petgraph::visit::EdgeRef;
use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::Opcode;
use tessera_mesh::{Axis, Rank};

use crate::order::Order;
use crate::phase::Ranks;
use crate::say;
use crate::sequence::Matched;

/// A circle of waits.
pub static T0311: Code = Code {
    id: "T0311",
    title: "deadlock: ranks wait for each other in a circle",
    page: "Each rank named is inside a collective that cannot finish before another rank joins, and that rank is \
itself held, by its stream, an event or a wait, in a collective that comes first for it. Nobody moves again: at run time \
this is a hang at full GPU utilisation.\n\n\
The message is the shortest such circle. Read it line by line: each rank waits in its first op for the rank on the \
line before it, and reaches its second op only afterwards. Swap the two ops on one of the ranks. For sends and receives let one side receive first: a send \
may not return before its receive is posted.",
};
/// No single order of launches.
pub static T0312: Code = Code {
    id: "T0312",
    title: "collectives have no common launch order",
    page: "The ranks' streams do not wait for each other, but the ranks launch collectives of several groups in orders that \
contradict each other. A device runs the operations of several communicators in the order of their launch (NCCL's default \
requires one global order per device), so two ranks that start with different ones wait for each other: usually only \
under load, when both operations no longer fit on the device together.\n\n\
Give the issues the same order on all ranks. Putting them on different streams does not help.",
};

/// Graph searches for a shorter circle stop after this many steps; the circle at hand is then shown.
const SEARCH_STEPS: usize = 2_000_000;

/// Refuses what has no order. Expects sequences that match.
pub(crate) fn check(ranks: &Ranks<'_>, matched: &Matched) -> Diagnostics {
    let consecutive: Vec<Edges> = ranks.traces.iter().map(|t| chain(t.len())).collect();
    if folded_is_acyclic(ranks, matched, &consecutive) {
        return Vec::new();
    }
    // Folding ranks of a role onto each other can close a circle that is none; unfold to be exact.
    let full = Unfolded::of(ranks);
    let Some(launch) = full.circle(&consecutive, &ranks.role_of) else { return Vec::new() };
    let held: Vec<Edges> = (0..ranks.roles.len()).map(|r| held_by(ranks, r)).collect();
    match full.circle(&held, &ranks.role_of) {
        Some(circle) => vec![report(ranks, &full, &T0311, &circle)],
        None => vec![report(ranks, &full, &T0312, &launch)],
    }
}

/// For each collective of a role, those that come directly after it.
type Edges = Vec<Vec<usize>>;

fn chain(n: usize) -> Edges {
    (0..n).map(|i| if i + 1 < n { vec![i + 1] } else { vec![] }).collect()
}

/// For each collective, those that cannot start before it has finished: by stream, event or wait.
fn held_by(ranks: &Ranks<'_>, role: usize) -> Edges {
    let (p, trace) = (&ranks.programs[role], &ranks.traces[role]);
    let order = Order::of(p, &p.definitions());
    let mut edges = vec![Vec::new(); trace.len()];
    // Collectives of each stream so far, in program order, which is the order in which they finish.
    let mut streams: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (i, item) in trace.iter().enumerate() {
        for earlier in streams.values() {
            let finished = earlier.partition_point(|e| order.before(trace[*e].op, item.op));
            if let Some(last) = finished.checked_sub(1) {
                edges[earlier[last]].push(i);
            }
        }
        streams.entry(p.ops[item.op].stream.0).or_default().push(i);
    }
    edges
}

/// The graph over roles instead of ranks: collectives that meet on some group are one node. If it has no
/// cycle, neither has the graph over ranks, which maps onto it.
fn folded_is_acyclic(ranks: &Ranks<'_>, matched: &Matched, edges: &[Edges]) -> bool {
    let mut first = Vec::with_capacity(ranks.traces.len());
    let mut total = 0;
    for t in &ranks.traces {
        first.push(total);
        total += t.len();
    }
    let mut union = petgraph::unionfind::UnionFind::new(total);
    for [(r, i), (s, j)] in &matched.meets {
        union.union(first[*r] + i, first[*s] + j);
    }
    let node = union.into_labeling();
    let mut graph = DiGraph::<(), (), usize>::with_capacity(total, total);
    (0..total).for_each(|_| {
        graph.add_node(());
    });
    for (role, edges) in edges.iter().enumerate() {
        for (i, next) in edges.iter().enumerate() {
            for j in next {
                graph.add_edge(node[first[role] + i].into(), node[first[role] + j].into(), ());
            }
        }
    }
    !graph.edge_references().any(|e| e.source() == e.target())
        && kosaraju_scc(&graph).iter().all(|c| c.len() == 1)
}

/// All collectives of all ranks, each instance one number.
struct Unfolded {
    /// Instance of each rank's n-th collective.
    instance: Vec<Vec<usize>>,
    /// Who takes part: (rank, its n-th collective), per instance.
    members: Vec<Vec<(usize, usize)>>,
}

/// A rank and one of its collectives.
type State = (usize, usize);

/// Changes of rank to get to a state, and the state before it.
type Costs = HashMap<State, (usize, Option<State>)>;

/// A stretch of one rank's program between two collectives of a circle.
struct Segment {
    rank: usize,
    from: usize,
    to: usize,
}

impl Unfolded {
    fn of(ranks: &Ranks<'_>) -> Unfolded {
        /// Group (its lowest rank, or sender and receiver) and position in its sequence.
        type Key = (Axis, u32, Option<u32>, usize);
        let mut ids: HashMap<Key, usize> = HashMap::new();
        let mut full = Unfolded { instance: Vec::new(), members: Vec::new() };
        for rank in ranks.mesh.iter() {
            let coord = ranks.mesh.coord_of(rank);
            let mut position: HashMap<(Axis, u32, Option<u32>), usize> = HashMap::new();
            let mut mine = Vec::new();
            for (i, item) in ranks.traces[ranks.role_of[rank.0 as usize]].iter().enumerate() {
                let s = &item.signature;
                let at = |k: u32| ranks.mesh.rank_at(coord.with(s.axis, k)).0;
                let group = match (s.opcode, s.peer) {
                    (Opcode::Send, Some(k)) => (s.axis, rank.0, Some(at(k))),
                    (_, Some(k)) => (s.axis, at(k), Some(rank.0)),
                    (_, None) => (s.axis, at(0), None),
                };
                let n = position.entry(group).or_default();
                let next = full.members.len();
                let id = *ids.entry((group.0, group.1, group.2, *n)).or_insert(next);
                if id == next {
                    full.members.push(Vec::new());
                }
                full.members[id].push((rank.0 as usize, i));
                mine.push((id, rank.0 as usize));
                *n += 1;
            }
            full.instance.push(mine.into_iter().map(|(id, _)| id).collect());
        }
        full
    }

    /// The shortest circle that the search finds: fewest ranks, then earliest.
    fn circle(&self, edges: &[Edges], role_of: &[usize]) -> Option<Vec<Segment>> {
        let mut graph = DiGraph::<(), (), usize>::with_capacity(self.members.len(), self.members.len());
        (0..self.members.len()).for_each(|_| {
            graph.add_node(());
        });
        for (rank, instances) in self.instance.iter().enumerate() {
            for (i, next) in edges[role_of[rank]].iter().enumerate() {
                for j in next {
                    graph.add_edge(instances[i].into(), instances[*j].into(), ());
                }
            }
        }
        let mut component = vec![usize::MAX; self.members.len()];
        let mut starts = Vec::new();
        for (n, c) in kosaraju_scc(&graph).into_iter().filter(|c| c.len() > 1).enumerate() {
            for node in c {
                component[node.index()] = n;
                starts.push(node.index());
            }
        }
        starts.sort_unstable();
        let mut best: Option<Vec<Segment>> = None;
        let mut steps = 0;
        for start in starts {
            let found = self.through(start, edges, role_of, &component, &mut steps);
            if let Some(c) = found
                && best.as_ref().is_none_or(|b| c.len() < b.len())
            {
                best = Some(c);
            }
            // Two ranks are the fewest that can contradict each other.
            if best.as_ref().is_some_and(|b| b.len() <= 2 || steps > SEARCH_STEPS) {
                break;
            }
        }
        best
    }

    /// The circle through one instance with the fewest changes of rank: moving on within a rank is free,
    /// changing to another member of an instance costs one.
    fn through(
        &self,
        start: usize,
        edges: &[Edges],
        role_of: &[usize],
        component: &[usize],
        steps: &mut usize,
    ) -> Option<Vec<Segment>> {
        let mut cost = Costs::new();
        let mut done = std::collections::HashSet::new();
        let mut queue: VecDeque<State> = VecDeque::new();
        for m in &self.members[start] {
            cost.insert(*m, (1, None));
            queue.push_back(*m);
        }
        while let Some(state) = queue.pop_front() {
            if !done.insert(state) {
                continue;
            }
            *steps += 1;
            let (rank, i) = state;
            let here = cost[&state].0;
            let reach = |next: State, price: usize, cost: &mut Costs| {
                let better = cost.get(&next).is_none_or(|(c, _)| here + price < *c);
                if better {
                    cost.insert(next, (here + price, Some(state)));
                }
                better
            };
            for j in &edges[role_of[rank]][i] {
                let instance = self.instance[rank][*j];
                if instance == start {
                    return Some(self.segments(state, *j, &cost));
                }
                if component[instance] == component[start] && reach((rank, *j), 0, &mut cost) {
                    queue.push_front((rank, *j));
                }
            }
            for m in &self.members[self.instance[rank][i]] {
                if *m != state && reach(*m, 1, &mut cost) {
                    queue.push_back(*m);
                }
            }
        }
        None
    }

    fn segments(&self, last: State, end: usize, cost: &Costs) -> Vec<Segment> {
        let mut out = Vec::new();
        let mut segment = Segment { rank: last.0, from: last.1, to: end };
        let mut at = last;
        while let Some((_, Some(before))) = cost.get(&at) {
            if before.0 == segment.rank {
                segment.from = before.1;
            } else {
                out.push(segment);
                segment = Segment { rank: before.0, from: before.1, to: before.1 };
            }
            at = *before;
        }
        out.push(segment);
        out.reverse();
        out
    }
}

fn report(ranks: &Ranks<'_>, full: &Unfolded, code: &'static Code, circle: &[Segment]) -> Diagnostic {
    let members: Vec<Rank> = circle.iter().map(|s| Rank(s.rank as u32)).collect();
    let message = if code == &T0311 {
        format!("{} wait for each other in a circle", say::ranks(&members))
    } else {
        format!("{} launch collectives in contradicting orders", say::ranks(&members))
    };
    let name = |s: &Segment, i: usize| {
        let item = &ranks.traces[ranks.role_of[s.rank]][i];
        let group: Vec<Rank> =
            full.members[full.instance[s.rank][i]].iter().map(|m| Rank(m.0 as u32)).collect();
        format!("{} with {} (op {})", item.signature.short(), say::ranks(&group), item.op)
    };
    let mut d = Diagnostic::error(code, message);
    for (n, s) in circle.iter().enumerate() {
        let before = circle[(n + circle.len() - 1) % circle.len()].rank;
        let says = if code == &T0311 {
            format!(
                "waits in {} for rank {before}, and reaches {} only after it",
                name(s, s.from),
                name(s, s.to)
            )
        } else {
            format!("launches {} before {}", name(s, s.from), name(s, s.to))
        };
        d = ranks.at(d, Rank(s.rank as u32), s.from, says);
    }
    d.hint("give these collectives the same order on every rank named")
}
