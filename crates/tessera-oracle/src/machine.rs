//! Programs as devices see them: ops on streams, one queue of launches per device, and the steps possible in a state.

use std::collections::BTreeMap;

use tessera_ir::{Op, Opcode, Program, ValueId};
use tessera_mesh::Mesh;

use crate::call::Call;
use crate::group::{self, Group};
use crate::outcome::Field;

/// Everything that runs, fixed; what has run is a [`State`].
pub(crate) struct Machine<'a> {
    programs: &'a [&'a Program],
    pub(crate) nodes: Vec<Node>,
    pub(crate) launches: Vec<Launch>,
    /// Launches of each rank, in order.
    queues: Vec<Vec<usize>>,
    /// Ops of each stream of each rank, in order.
    streams: Vec<Vec<usize>>,
    groups: Vec<Group>,
    /// Pairs of ops of one rank that touch the same bytes of a buffer, one of them writing.
    pub(crate) conflicts: Vec<(usize, usize)>,
}

/// One op of one rank.
pub(crate) struct Node {
    pub(crate) rank: usize,
    pub(crate) op: usize,
    /// Stream over all ranks and place on it; `None` for what is there from the start.
    place: Option<(usize, usize)>,
    /// What must have finished besides the op before it on its stream; `None` for what never does.
    pub(crate) needs: Vec<Option<usize>>,
    /// Makers of the values it reads, with the value.
    pub(crate) reads: Vec<(usize, ValueId)>,
    pub(crate) launch: Option<usize>,
    call: Option<Call>,
}

/// One launch: a collective, or a batch of sends and receives.
pub(crate) struct Launch {
    pub(crate) members: Vec<usize>,
    /// The launch before it in its rank's queue.
    pub(crate) before: Option<usize>,
}

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// Finished ops of each stream.
    at: Vec<u16>,
    /// Launches of each rank so far.
    launched: Vec<u16>,
    /// Members of each rank's launch in flight that have met.
    met: Vec<u64>,
}

/// What can happen next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// An op runs on its stream.
    Run(usize),
    /// A launch begins.
    Launch(usize),
    /// These are all in flight and become one operation.
    Meet(Vec<usize>),
}

/// Two calls in flight that do not fit together.
pub(crate) type Clash = (usize, usize, Field);

/// The captured graph that a program is in while it is loaded.
#[derive(Default)]
struct Graph {
    name: Option<tessera_ir::Attr>,
    /// Stream of its first op.
    origin: usize,
    /// The op before it there.
    start: Option<usize>,
    /// Other streams, each with the lane it has inside.
    lanes: Vec<(usize, usize)>,
    /// What ended on lanes and holds the next op of a stream.
    tails: BTreeMap<usize, Vec<usize>>,
    holds: Vec<usize>,
}

struct Access {
    node: usize,
    buffer: u32,
    write: bool,
    rows: (u64, u64),
}

impl<'a> Machine<'a> {
    pub(crate) fn new(mesh: &Mesh, programs: &'a [&'a Program]) -> Machine<'a> {
        let mut m = Machine {
            programs,
            nodes: Vec::new(),
            launches: Vec::new(),
            queues: Vec::new(),
            streams: Vec::new(),
            groups: Vec::new(),
            conflicts: Vec::new(),
        };
        for (rank, p) in programs.iter().enumerate() {
            m.load(mesh, rank, p);
        }
        m
    }

    fn load(&mut self, mesh: &Mesh, rank: usize, p: &Program) {
        let (first, stream) = (self.nodes.len(), self.streams.len());
        self.streams.extend(p.streams.iter().map(|_| Vec::new()));
        let defs = p.definitions();
        let def = |v: &ValueId| defs.get(v.0 as usize).copied().flatten();
        let mut accesses = Vec::new();
        let mut queue: Vec<usize> = Vec::new();
        let mut graph = Graph::default();
        for (i, op) in p.ops.iter().enumerate() {
            let node = self.nodes.len();
            let given = matches!(op.opcode, Opcode::Input | Opcode::Call | Opcode::Weight);
            let mut held = Vec::new();
            let place = (!given).then(|| {
                let on = self.stream_of(stream, op, &mut graph, &mut held);
                self.streams[on].push(node);
                (on, self.streams[on].len() - 1)
            });
            let ticket = op.operands.first().filter(|_| op.opcode == Opcode::Wait).map(|t| {
                def(t).filter(|d| p.ops[*d].issue && p.ops[*d].opcode.is_collective()).map(|d| first + d)
            });
            let events = op.after.iter().map(|e| def(e).map(|d| first + d));
            let mut needs: Vec<Option<usize>> =
                events.chain(ticket).chain(held.into_iter().map(Some)).collect();
            let mut reads = Vec::new();
            let data = op.operands.iter().filter(|_| op.opcode != Opcode::Wait);
            for v in data.chain(op.keyed.iter().map(|(_, v)| v)) {
                let Some(d) = def(v) else {
                    needs.push(None);
                    continue;
                };
                // What is waited for is there when the collective has finished.
                let maker = match (p.ops[d].opcode, p.ops[d].operands.first().and_then(def)) {
                    (Opcode::Wait, Some(issue)) => issue,
                    _ => d,
                };
                reads.push((first + maker, *v));
                if let (Opcode::CacheRead, Some(b)) = (p.ops[d].opcode, p.ops[d].buffer) {
                    accesses.push(Access { node, buffer: b.0, write: false, rows: rows(p, &p.ops[d]) });
                }
            }
            if let Some(b) = op.buffer {
                let write = op.opcode == Opcode::CacheWrite;
                accesses.push(Access { node, buffer: b.0, write, rows: rows(p, op) });
            }
            let mut call = None;
            let mut launch = None;
            if op.opcode.is_collective() {
                let group = group::of(mesh, op, rank).map(|g| self.intern(g));
                let known = group.map(|g| (g, self.groups[g].members.as_slice()));
                call = Some(Call::of(p, op, rank, known));
                launch = Some(self.enqueue(&mut queue, first, p, op, node));
            }
            self.nodes.push(Node { rank, op: i, place, needs, reads, launch, call });
        }
        self.queues.push(queue);
        for (i, a) in accesses.iter().enumerate() {
            for b in &accesses[..i] {
                let overlap = a.rows.0 < b.rows.1 && b.rows.0 < a.rows.1;
                if a.node != b.node && a.buffer == b.buffer && (a.write || b.write) && overlap {
                    self.conflicts.push((b.node, a.node));
                }
            }
        }
    }

    /// Where an op runs, and what holds it besides: a captured graph is launched on the stream of its first op, forks
    /// inside to lanes of its own, and is over for that stream when all lanes are.
    fn stream_of(&mut self, first: usize, op: &Op, graph: &mut Graph, held: &mut Vec<usize>) -> usize {
        let on = first + op.stream.0 as usize;
        let name = op.attrs.get("graph").cloned();
        if name != graph.name {
            let ends = graph.lanes.iter().filter_map(|(_, lane)| self.streams[*lane].last().copied());
            graph.tails.entry(graph.origin).or_default().extend(ends);
            let start = self.streams[on].last().copied();
            let tails = std::mem::take(&mut graph.tails);
            *graph = Graph { name, origin: on, start, lanes: Vec::new(), tails, holds: Vec::new() };
            // What a graph before it left open on this stream holds all of the graph.
            graph.holds = graph.tails.get(&on).cloned().unwrap_or_default();
        }
        if graph.name.is_none() || on == graph.origin {
            held.extend(graph.tails.remove(&on).unwrap_or_default());
            return on;
        }
        if let Some((_, lane)) = graph.lanes.iter().find(|(s, _)| *s == on) {
            return *lane;
        }
        held.extend(graph.start.into_iter().chain(graph.holds.iter().copied()));
        self.streams.push(Vec::new());
        graph.lanes.push((on, self.streams.len() - 1));
        self.streams.len() - 1
    }

    /// Puts a collective into its rank's queue: into the last launch if both belong to one batch and graph.
    fn enqueue(&mut self, queue: &mut Vec<usize>, first: usize, p: &Program, op: &Op, node: usize) -> usize {
        let batch = |o: &Op| {
            let number = o.attrs.get("batch").filter(|_| matches!(o.opcode, Opcode::Send | Opcode::Recv));
            // What a graph launches, nothing outside it does.
            number.map(|n| (n.clone(), o.attrs.get("graph").cloned()))
        };
        let joins = queue.last().copied().filter(|l| {
            let last = self.launches[*l].members[0];
            batch(op).is_some() && batch(op) == batch(&p.ops[last - first])
        });
        if let Some(l) = joins {
            self.launches[l].members.push(node);
            return l;
        }
        self.launches.push(Launch { members: vec![node], before: queue.last().copied() });
        queue.push(self.launches.len() - 1);
        self.launches.len() - 1
    }

    fn intern(&mut self, group: Group) -> usize {
        match self.groups.iter().position(|g| *g == group) {
            Some(i) => i,
            None => {
                self.groups.push(group);
                self.groups.len() - 1
            }
        }
    }

    pub(crate) fn start(&self) -> State {
        let ranks = self.queues.len();
        State { at: vec![0; self.streams.len()], launched: vec![0; ranks], met: vec![0; ranks] }
    }

    pub(crate) fn done(&self, state: &State, node: usize) -> bool {
        self.nodes[node].place.is_none_or(|(s, i)| i < usize::from(state.at[s]))
    }

    /// Whether it is there from the start.
    pub(crate) fn is_given(&self, node: usize) -> bool {
        self.nodes[node].place.is_none()
    }

    pub(crate) fn finished(&self, state: &State) -> bool {
        state.at.iter().zip(&self.streams).all(|(at, s)| usize::from(*at) == s.len())
    }

    /// The op before a node on its stream.
    pub(crate) fn before(&self, node: usize) -> Option<usize> {
        let (s, i) = self.nodes[node].place?;
        i.checked_sub(1).map(|i| self.streams[s][i])
    }

    fn ready(&self, state: &State, node: usize) -> bool {
        self.nodes[node].needs.iter().all(|n| n.is_some_and(|n| self.done(state, n)))
    }

    fn in_flight(&self, state: &State, rank: usize) -> Option<usize> {
        let last = usize::from(state.launched[rank]).checked_sub(1)?;
        let launch = *self.queues.get(rank)?.get(last)?;
        (!self.done(state, self.launches[launch].members[0])).then_some(launch)
    }

    /// Members of a rank's launch in flight that have not met, with their calls.
    fn waiting(&self, state: &State, rank: usize) -> impl Iterator<Item = (usize, &Call)> + '_ {
        let met = state.met.get(rank).copied().unwrap_or(0);
        let members = match state.launched.get(rank).and_then(|_| self.in_flight(state, rank)) {
            Some(l) => self.launches[l].members.as_slice(),
            None => &[],
        };
        let open = members.iter().enumerate().filter(move |(i, _)| met >> i & 1 == 0);
        open.filter_map(|(_, n)| Some((*n, self.nodes[*n].call.as_ref()?)))
    }

    /// Every step that is possible, and two calls that clash, if any do.
    pub(crate) fn steps(&self, state: &State) -> (Vec<Step>, Option<Clash>) {
        let mut steps = Vec::new();
        let mut clash = None;
        for (s, on) in self.streams.iter().enumerate() {
            if let Some(n) = on.get(usize::from(state.at[s]))
                && self.nodes[*n].launch.is_none()
                && self.ready(state, *n)
            {
                steps.push(Step::Run(*n));
            }
        }
        for (rank, queue) in self.queues.iter().enumerate() {
            if self.in_flight(state, rank).is_some() {
                for (node, call) in self.waiting(state, rank) {
                    match self.meets(state, rank, node, call) {
                        Ok(Some(all)) => steps.push(Step::Meet(all)),
                        Ok(None) => {}
                        Err(c) => clash = clash.or(Some(c)),
                    }
                }
            } else if let Some(l) = queue.get(usize::from(state.launched[rank]))
                && self.may_launch(state, *l)
            {
                steps.push(Step::Launch(*l));
            }
        }
        (steps, clash)
    }

    fn may_launch(&self, state: &State, launch: usize) -> bool {
        self.launches[launch].members.iter().all(|m| {
            let first =
                self.before(*m).is_none_or(|b| self.nodes[b].launch == Some(launch) || self.done(state, b));
            first && self.ready(state, *m)
        })
    }

    /// Who becomes one operation with a call in flight; told once, at the sender or the group's first member.
    fn meets(
        &self,
        state: &State,
        rank: usize,
        node: usize,
        call: &Call,
    ) -> Result<Option<Vec<usize>>, Clash> {
        let Some(group) = call.group else { return Ok(None) };
        if call.is_pair() {
            return self.pair(state, rank, node, call);
        }
        let mut all = Vec::new();
        for member in &self.groups[group].members {
            let theirs = self.waiting(state, *member).find(|(_, c)| c.group == Some(group) && !c.is_pair());
            if let Some((other, c)) = theirs {
                if let Some(field) = call.differs(c) {
                    return Err((node, other, field));
                }
                all.push(other);
            }
        }
        let complete = all.len() == self.groups[group].members.len() && all.first() == Some(&node);
        Ok(complete.then_some(all))
    }

    fn pair(
        &self,
        state: &State,
        rank: usize,
        node: usize,
        call: &Call,
    ) -> Result<Option<Vec<usize>>, Clash> {
        let (Opcode::Send, Some(peer)) = (call.opcode, call.peer) else { return Ok(None) };
        // Of several to one peer the first in the batch goes first.
        let like = |c: &Call| c.opcode == Opcode::Send && c.group == call.group && c.peer == call.peer;
        if self.waiting(state, rank).find(|(_, c)| like(c)).is_some_and(|(n, _)| n != node) {
            return Ok(None);
        }
        let takes = |c: &Call| c.opcode == Opcode::Recv && c.group == call.group && c.peer == Some(rank);
        let Some((other, theirs)) = self.waiting(state, peer).find(|(_, c)| takes(c)) else {
            return Ok(None);
        };
        match call.differs(theirs) {
            Some(field) => Err((node, other, field)),
            None => Ok(Some(vec![node, other])),
        }
    }

    /// Takes a step.
    pub(crate) fn take(&self, state: &mut State, step: &Step) {
        match step {
            Step::Run(n) => self.finish(state, *n),
            Step::Launch(l) => {
                let rank = self.nodes[self.launches[*l].members[0]].rank;
                state.launched[rank] += 1;
                state.met[rank] = 0;
            }
            Step::Meet(all) => {
                for n in all {
                    let (rank, Some(l)) = (self.nodes[*n].rank, self.nodes[*n].launch) else { continue };
                    let members = &self.launches[l].members;
                    let at = members.iter().position(|m| m == n).unwrap_or(0);
                    state.met[rank] |= 1 << at;
                    if state.met[rank].count_ones() as usize == members.len() {
                        members.iter().for_each(|m| self.finish(state, *m));
                        state.met[rank] = 0;
                    }
                }
            }
        }
    }

    fn finish(&self, state: &mut State, node: usize) {
        if let Some((s, _)) = self.nodes[node].place {
            state.at[s] += 1;
        }
    }

    /// `rank 1 op 7: issue all_reduce {axis = "tp"} on comm`.
    pub(crate) fn describe(&self, node: usize) -> String {
        let n = &self.nodes[node];
        let p = self.programs[n.rank];
        let op = &p.ops[n.op];
        let mut words = String::new();
        for name in ["axis", "ways", "to", "from", "root", "reduction", "batch", "graph"] {
            match op.attrs.get(name) {
                Some(tessera_ir::Attr::Int(i)) => words += &format!(" {name}={i}"),
                Some(tessera_ir::Attr::Str(s)) => words += &format!(" {name}={s}"),
                _ => {}
            }
        }
        let ty = op.operands.first().or(op.results.first()).map(|v| p.ty(*v)).filter(|t| !t.is_token());
        let ty = ty.map_or(String::new(), |t| format!(" of {}", t.display(&p.mesh)));
        let issue = if op.issue { "issue " } else { "" };
        let stream = p.streams.get(op.stream.0 as usize).map_or("?", String::as_str);
        format!("rank {} op {}: {issue}{}{words}{ty} on {stream}", n.rank, n.op, op.opcode.name())
    }

    /// Name of a value.
    pub(crate) fn value(&self, rank: usize, v: ValueId) -> String {
        format!("%{}", self.programs[rank].value(v).name)
    }

    /// Where each rank stands that has not finished, a line each, and the first one's op.
    pub(crate) fn held(&self, state: &State) -> (String, (usize, usize)) {
        let mut lines = Vec::new();
        let mut at = None;
        for (rank, queue) in self.queues.iter().enumerate() {
            let (word, node) = match self.in_flight(state, rank) {
                Some(l) => (
                    "waits inside",
                    self.waiting(state, rank)
                        .map(|(n, _)| n)
                        .next()
                        .or(self.launches[l].members.first().copied()),
                ),
                None => {
                    let head = queue.get(usize::from(state.launched[rank]));
                    let stuck = || {
                        let mine = self.streams.iter().enumerate();
                        mine.filter_map(|(s, on)| on.get(usize::from(state.at[s])).copied())
                            .find(|n| self.nodes[*n].rank == rank)
                    };
                    ("cannot start", head.map(|l| self.launches[*l].members[0]).or_else(stuck))
                }
            };
            let Some(node) = node else { continue };
            at = at.or(Some((rank, self.nodes[node].op)));
            lines.push(format!("  {word} {}", self.describe(node)));
        }
        (lines.join("\n"), at.unwrap_or((0, 0)))
    }
}

/// Rows of a buffer that an access touches; a row that is a scalar may be any.
fn rows(p: &Program, op: &Op) -> (u64, u64) {
    let Some(b) = op.buffer else { return (0, 0) };
    let all = p.buffer(b).ty.shape.first().copied().unwrap_or(1);
    let number = |name: &str| op.int(name).and_then(|i| u64::try_from(i).ok());
    if op.key("row").is_some() {
        return (0, all);
    }
    match op.opcode {
        Opcode::CacheRead => {
            let row = number("row").unwrap_or(0);
            (row, row + number("rows").unwrap_or(all))
        }
        _ => (0, op.operands.first().and_then(|v| p.ty(*v).shape.first().copied()).unwrap_or(all)),
    }
}
