//! The device model: ops on streams, one launch queue per device, and the possible steps of a
//! state.

use std::collections::BTreeMap;

use tessera_ir::{CommAxis, Op, OpView, Opcode, PeerPosition, Program, ValueId};
use tessera_mesh::Mesh;

use crate::call::WireCall;
use crate::group::{self, GroupMembers};
use crate::outcome::MismatchField;

/// The static part of a simulation; [`ExecutionState`] holds its progress.
pub(crate) struct DeviceModel<'a> {
    programs: &'a [&'a Program],
    pub(crate) nodes: Vec<OpInstance>,
    pub(crate) launches: Vec<QueuedLaunch>,
    /// Launches of each rank, in order.
    queues: Vec<Vec<usize>>,
    /// Ops of each stream of each rank, in order.
    streams: Vec<Vec<usize>>,
    groups: Vec<GroupMembers>,
    /// Pairs of ops of one rank that access the same bytes of a buffer, at least one of them
    /// writing.
    pub(crate) conflicts: Vec<(usize, usize)>,
}

/// One op in the program of one rank, with the ops that must finish before it.
pub(crate) struct OpInstance {
    pub(crate) rank: usize,
    pub(crate) op: usize,
    /// Index of the stream over all ranks, and position on it; `None` for values available from the
    /// start.
    stream_position: Option<(usize, usize)>,
    /// Dependencies besides the previous op of the stream; `None` for a dependency that never
    /// finishes.
    pub(crate) needs: Vec<Option<usize>>,
    /// For each value that the op reads, the index of its producer in `nodes`, and the value.
    pub(crate) reads: Vec<(usize, ValueId)>,
    pub(crate) launch: Option<usize>,
    call: Option<WireCall>,
}

/// One launch: a collective, or a batch of sends and receives.
pub(crate) struct QueuedLaunch {
    pub(crate) members: Vec<usize>,
    /// Previous launch in its rank's queue.
    pub(crate) before: Option<usize>,
}

/// The progress of a simulation; equal states have equal possible next steps.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ExecutionState {
    /// Number of finished ops of each stream.
    finished_ops: Vec<u16>,
    /// Number of launches of each rank.
    launched: Vec<u16>,
    /// Bit mask of the completed members of each rank's launch in flight.
    completed: Vec<u64>,
}

/// One transition from an [`ExecutionState`] to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ExecutionStep {
    /// The op with this index in [`DeviceModel::nodes`] runs and finishes on its stream.
    RunOp(usize),
    /// The launch with this index starts on its rank, which puts its member calls in flight.
    Launch(usize),
    /// These calls are all in flight and complete as one operation.
    CompleteCalls(Vec<usize>),
}

/// Two nodes whose calls in flight differ, and the first field in which they differ.
pub(crate) type CallMismatch = (usize, usize, MismatchField);

/// The captured graph that is open while a program is loaded.
#[derive(Default)]
struct OpenGraph {
    name: Option<String>,
    /// Stream of the graph's first op.
    origin: usize,
    /// Last op on that stream before the graph.
    start: Option<usize>,
    /// Other streams, each with its lane inside the graph.
    lanes: Vec<(usize, usize)>,
    /// Last ops of closed lanes that hold back the next op of a stream.
    tails: BTreeMap<usize, Vec<usize>>,
    held_by: Vec<usize>,
}

struct BufferAccess {
    node: usize,
    buffer: u32,
    write: bool,
    rows: (u64, u64),
}

impl<'a> DeviceModel<'a> {
    pub(crate) fn new(mesh: &Mesh, programs: &'a [&'a Program]) -> DeviceModel<'a> {
        let mut m = DeviceModel {
            programs,
            nodes: Vec::new(),
            launches: Vec::new(),
            queues: Vec::new(),
            streams: Vec::new(),
            groups: Vec::new(),
            conflicts: Vec::new(),
        };
        for (rank, p) in programs.iter().enumerate() {
            m.load_program(mesh, rank, p);
        }
        m
    }

    fn load_program(&mut self, mesh: &Mesh, rank: usize, p: &Program) {
        let (first, stream) = (self.nodes.len(), self.streams.len());
        self.streams.extend(p.streams.iter().map(|_| Vec::new()));
        let defs = p.defining_ops();
        let def = |v: &ValueId| defs.get(v.0 as usize).copied().flatten();
        let mut accesses = Vec::new();
        let mut queue: Vec<usize> = Vec::new();
        let mut graph = OpenGraph::default();
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
                // The result of a wait is available when the collective has finished.
                let maker = match (p.ops[d].opcode, p.ops[d].operands.first().and_then(def)) {
                    (Opcode::Wait, Some(issue)) => issue,
                    _ => d,
                };
                reads.push((first + maker, *v));
                if let (Opcode::CacheRead, Some(b)) = (p.ops[d].opcode, p.ops[d].buffer) {
                    accesses.push(BufferAccess {
                        node,
                        buffer: b.0,
                        write: false,
                        rows: accessed_rows(p, &p.ops[d]),
                    });
                }
            }
            if let Some(b) = op.buffer {
                let write = op.opcode == Opcode::CacheWrite;
                accesses.push(BufferAccess { node, buffer: b.0, write, rows: accessed_rows(p, op) });
            }
            let mut call = None;
            let mut launch = None;
            if op.opcode.is_collective() {
                let group = op.view().ok().and_then(|view| group::group_of(mesh, &view, rank));
                let group = group.map(|g| self.intern_group(g));
                let known = group.map(|g| (g, self.groups[g].members.as_slice()));
                call = Some(WireCall::from_op(p, op, rank, known));
                launch = Some(self.enqueue_launch(&mut queue, first, p, op, node));
            }
            self.nodes.push(OpInstance { rank, op: i, stream_position: place, needs, reads, launch, call });
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

    /// Returns the stream or lane of an op and adds the ops that hold it back: a captured graph is
    /// launched on the stream of its first op, forks to lanes of its own, and ends for that stream
    /// when all lanes end.
    fn stream_of(&mut self, first: usize, op: &Op, graph: &mut OpenGraph, held: &mut Vec<usize>) -> usize {
        let on = first + op.stream.0 as usize;
        let name = op.graph_name().map(str::to_string);
        if name != graph.name {
            let ends = graph.lanes.iter().filter_map(|(_, lane)| self.streams[*lane].last().copied());
            graph.tails.entry(graph.origin).or_default().extend(ends);
            let start = self.streams[on].last().copied();
            let tails = std::mem::take(&mut graph.tails);
            *graph = OpenGraph { name, origin: on, start, lanes: Vec::new(), tails, held_by: Vec::new() };
            // Open lanes of a previous graph on this stream hold back the whole graph.
            graph.held_by = graph.tails.get(&on).cloned().unwrap_or_default();
        }
        if graph.name.is_none() || on == graph.origin {
            held.extend(graph.tails.remove(&on).unwrap_or_default());
            return on;
        }
        if let Some((_, lane)) = graph.lanes.iter().find(|(s, _)| *s == on) {
            return *lane;
        }
        held.extend(graph.start.into_iter().chain(graph.held_by.iter().copied()));
        self.streams.push(Vec::new());
        graph.lanes.push((on, self.streams.len() - 1));
        self.streams.len() - 1
    }

    /// Appends a collective to its rank's queue: to the last launch if both belong to one batch and
    /// graph.
    fn enqueue_launch(
        &mut self,
        queue: &mut Vec<usize>,
        first: usize,
        p: &Program,
        op: &Op,
        node: usize,
    ) -> usize {
        let batch = |o: &Op| {
            // A batch never spans the boundary of a graph.
            o.batch_number().map(|n| (n, o.graph_name().map(str::to_string)))
        };
        let joins = queue.last().copied().filter(|l| {
            let last = self.launches[*l].members[0];
            batch(op).is_some() && batch(op) == batch(&p.ops[last - first])
        });
        if let Some(l) = joins {
            self.launches[l].members.push(node);
            return l;
        }
        self.launches.push(QueuedLaunch { members: vec![node], before: queue.last().copied() });
        queue.push(self.launches.len() - 1);
        self.launches.len() - 1
    }

    fn intern_group(&mut self, group: GroupMembers) -> usize {
        match self.groups.iter().position(|g| *g == group) {
            Some(i) => i,
            None => {
                self.groups.push(group);
                self.groups.len() - 1
            }
        }
    }

    pub(crate) fn start_state(&self) -> ExecutionState {
        let ranks = self.queues.len();
        ExecutionState {
            finished_ops: vec![0; self.streams.len()],
            launched: vec![0; ranks],
            completed: vec![0; ranks],
        }
    }

    pub(crate) fn is_done(&self, state: &ExecutionState, node: usize) -> bool {
        self.nodes[node].stream_position.is_none_or(|(s, i)| i < usize::from(state.finished_ops[s]))
    }

    /// Returns whether a node is a source, whose value is available from the start.
    pub(crate) fn is_given(&self, node: usize) -> bool {
        self.nodes[node].stream_position.is_none()
    }

    pub(crate) fn is_finished(&self, state: &ExecutionState) -> bool {
        state.finished_ops.iter().zip(&self.streams).all(|(at, s)| usize::from(*at) == s.len())
    }

    /// Returns the previous op on a node's stream.
    pub(crate) fn previous_op(&self, node: usize) -> Option<usize> {
        let (s, i) = self.nodes[node].stream_position?;
        i.checked_sub(1).map(|i| self.streams[s][i])
    }

    fn is_ready(&self, state: &ExecutionState, node: usize) -> bool {
        self.nodes[node].needs.iter().all(|n| n.is_some_and(|n| self.is_done(state, n)))
    }

    fn launch_in_flight(&self, state: &ExecutionState, rank: usize) -> Option<usize> {
        let last = usize::from(state.launched[rank]).checked_sub(1)?;
        let launch = *self.queues.get(rank)?.get(last)?;
        (!self.is_done(state, self.launches[launch].members[0])).then_some(launch)
    }

    /// Iterates over the incomplete members of a rank's launch in flight, with their calls.
    fn incomplete_calls(
        &self,
        state: &ExecutionState,
        rank: usize,
    ) -> impl Iterator<Item = (usize, &WireCall)> + '_ {
        let met = state.completed.get(rank).copied().unwrap_or(0);
        let members = match state.launched.get(rank).and_then(|_| self.launch_in_flight(state, rank)) {
            Some(l) => self.launches[l].members.as_slice(),
            None => &[],
        };
        let open = members.iter().enumerate().filter(move |(i, _)| met >> i & 1 == 0);
        open.filter_map(|(_, n)| Some((*n, self.nodes[*n].call.as_ref()?)))
    }

    /// Returns every possible step, and a pair of mismatched calls, if any.
    pub(crate) fn possible_steps(
        &self,
        state: &ExecutionState,
    ) -> (Vec<ExecutionStep>, Option<CallMismatch>) {
        let mut steps = Vec::new();
        let mut clash = None;
        for (s, on) in self.streams.iter().enumerate() {
            if let Some(n) = on.get(usize::from(state.finished_ops[s]))
                && self.nodes[*n].launch.is_none()
                && self.is_ready(state, *n)
            {
                steps.push(ExecutionStep::RunOp(*n));
            }
        }
        for (rank, queue) in self.queues.iter().enumerate() {
            if self.launch_in_flight(state, rank).is_some() {
                for (node, call) in self.incomplete_calls(state, rank) {
                    match self.matching_calls(state, rank, node, call) {
                        Ok(Some(all)) => steps.push(ExecutionStep::CompleteCalls(all)),
                        Ok(None) => {}
                        Err(c) => clash = clash.or(Some(c)),
                    }
                }
            } else if let Some(l) = queue.get(usize::from(state.launched[rank]))
                && self.can_launch(state, *l)
            {
                steps.push(ExecutionStep::Launch(*l));
            }
        }
        (steps, clash)
    }

    fn can_launch(&self, state: &ExecutionState, launch: usize) -> bool {
        self.launches[launch].members.iter().all(|m| {
            let first = self
                .previous_op(*m)
                .is_none_or(|b| self.nodes[b].launch == Some(launch) || self.is_done(state, b));
            first && self.is_ready(state, *m)
        })
    }

    /// Returns the calls that complete together with a call in flight; reports them once, for the
    /// sender or the group's first member.
    fn matching_calls(
        &self,
        state: &ExecutionState,
        rank: usize,
        node: usize,
        call: &WireCall,
    ) -> Result<Option<Vec<usize>>, CallMismatch> {
        let Some(group) = call.group else { return Ok(None) };
        if call.is_pair() {
            return self.matching_pair(state, rank, node, call);
        }
        let mut all = Vec::new();
        for member in &self.groups[group].members {
            let theirs =
                self.incomplete_calls(state, *member).find(|(_, c)| c.group == Some(group) && !c.is_pair());
            if let Some((other, c)) = theirs {
                if let Some(field) = call.first_difference(c) {
                    return Err((node, other, field));
                }
                all.push(other);
            }
        }
        let complete = all.len() == self.groups[group].members.len() && all.first() == Some(&node);
        Ok(complete.then_some(all))
    }

    fn matching_pair(
        &self,
        state: &ExecutionState,
        rank: usize,
        node: usize,
        call: &WireCall,
    ) -> Result<Option<Vec<usize>>, CallMismatch> {
        let (Opcode::Send, Some(peer)) = (call.opcode, call.peer) else { return Ok(None) };
        // Of several sends to one peer, the first in the batch goes first.
        let like = |c: &WireCall| c.opcode == Opcode::Send && c.group == call.group && c.peer == call.peer;
        if self.incomplete_calls(state, rank).find(|(_, c)| like(c)).is_some_and(|(n, _)| n != node) {
            return Ok(None);
        }
        let takes = |c: &WireCall| c.opcode == Opcode::Recv && c.group == call.group && c.peer == Some(rank);
        let Some((other, theirs)) = self.incomplete_calls(state, peer).find(|(_, c)| takes(c)) else {
            return Ok(None);
        };
        match call.first_difference(theirs) {
            Some(field) => Err((node, other, field)),
            None => Ok(Some(vec![node, other])),
        }
    }

    /// Applies one step to the state: finishes an op, starts a launch or completes matched calls.
    pub(crate) fn take_step(&self, state: &mut ExecutionState, step: &ExecutionStep) {
        match step {
            ExecutionStep::RunOp(n) => self.finish_op(state, *n),
            ExecutionStep::Launch(l) => {
                let rank = self.nodes[self.launches[*l].members[0]].rank;
                state.launched[rank] += 1;
                state.completed[rank] = 0;
            }
            ExecutionStep::CompleteCalls(all) => {
                for n in all {
                    let (rank, Some(l)) = (self.nodes[*n].rank, self.nodes[*n].launch) else { continue };
                    let members = &self.launches[l].members;
                    let at = members.iter().position(|m| m == n).unwrap_or(0);
                    state.completed[rank] |= 1 << at;
                    if state.completed[rank].count_ones() as usize == members.len() {
                        members.iter().for_each(|m| self.finish_op(state, *m));
                        state.completed[rank] = 0;
                    }
                }
            }
        }
    }

    fn finish_op(&self, state: &mut ExecutionState, node: usize) {
        if let Some((s, _)) = self.nodes[node].stream_position {
            state.finished_ops[s] += 1;
        }
    }

    /// Describes an op: `rank 1 op 7: issue all_reduce {axis = "tp"} on comm`.
    pub(crate) fn describe_op(&self, node: usize) -> String {
        let n = &self.nodes[node];
        let p = self.programs[n.rank];
        let op = &p.ops[n.op];
        let words = describe_attrs(op);
        let ty = op.operands.first().or(op.results.first()).map(|v| p.type_of(*v)).filter(|t| !t.is_token());
        let ty = ty.map_or(String::new(), |t| format!(" of {}", t.display_on(&p.mesh)));
        let issue = if op.issue { "issue " } else { "" };
        let stream = p.streams.get(op.stream.0 as usize).map_or("?", String::as_str);
        format!("rank {} op {}: {issue}{}{words}{ty} on {stream}", n.rank, n.op, op.opcode.name())
    }

    /// Returns the name of a value in the text form of a rank's program, such as `%y.1`.
    pub(crate) fn value_name(&self, rank: usize, v: ValueId) -> String {
        format!("%{}", self.programs[rank].value(v).name)
    }

    /// Lists the blocked op of each unfinished rank, one per line, and returns the first one's rank
    /// and op.
    pub(crate) fn blocked_ranks(&self, state: &ExecutionState) -> (String, (usize, usize)) {
        let mut lines = Vec::new();
        let mut at = None;
        for (rank, queue) in self.queues.iter().enumerate() {
            let (word, node) = match self.launch_in_flight(state, rank) {
                Some(l) => (
                    "waits inside",
                    self.incomplete_calls(state, rank)
                        .map(|(n, _)| n)
                        .next()
                        .or(self.launches[l].members.first().copied()),
                ),
                None => {
                    let head = queue.get(usize::from(state.launched[rank]));
                    let stuck = || {
                        let mine = self.streams.iter().enumerate();
                        mine.filter_map(|(s, on)| on.get(usize::from(state.finished_ops[s])).copied())
                            .find(|n| self.nodes[*n].rank == rank)
                    };
                    ("cannot start", head.map(|l| self.launches[*l].members[0]).or_else(stuck))
                }
            };
            let Some(node) = node else { continue };
            at = at.or(Some((rank, self.nodes[node].op)));
            lines.push(format!("  {word} {}", self.describe_op(node)));
        }
        (lines.join("\n"), at.unwrap_or((0, 0)))
    }
}

/// Describes the attributes that decide with which ops of other ranks an op matches.
fn describe_attrs(op: &Op) -> String {
    let view = op.view().ok();
    let (axis, subgroup_size) = match view.as_ref().and_then(group::stated_group) {
        Some((CommAxis::World, size)) => (Some("world"), size),
        Some((CommAxis::Axis(axis), size)) => (Some(axis.name()), size),
        None => (None, None),
    };
    let (to, from) = match op.peer_position() {
        Some(PeerPosition::To(at)) => (Some(at), None),
        Some(PeerPosition::From(at)) => (None, Some(at)),
        None => (None, None),
    };
    let root = match &view {
        Some(OpView::Broadcast(v)) => Some(v.root),
        _ => None,
    };
    let words = [
        axis.map(|a| format!(" axis={a}")),
        subgroup_size.map(|n| format!(" group_size={n}")),
        to.map(|at| format!(" to={at}")),
        from.map(|at| format!(" from={at}")),
        root.map(|at| format!(" root={at}")),
        op.reduction().map(|r| format!(" reduction={}", r.name())),
        op.batch_number().map(|n| format!(" batch={n}")),
        op.graph_name().map(|g| format!(" graph={g}")),
    ];
    words.into_iter().flatten().collect()
}

/// Returns the rows of a buffer that an access covers; a row given by a scalar may be any row.
fn accessed_rows(p: &Program, op: &Op) -> (u64, u64) {
    let Some(b) = op.buffer else { return (0, 0) };
    let all = p.buffer(b).ty.shape.first().copied().unwrap_or(1);
    match op.view() {
        Ok(OpView::CacheRead(v)) => (v.row, v.row + v.rows.unwrap_or(all)),
        Ok(OpView::CacheWrite(v)) if v.row.is_none() && v.pages.is_none() => {
            let rows = p.type_of(v.x).shape.first().copied().unwrap_or(all);
            (v.first_row, v.first_row + rows)
        }
        _ => (0, all),
    }
}
