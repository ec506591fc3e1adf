//! Captured graphs: `graph = "name"` marks the ops that are captured together and launched as one.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::{DType, Opcode, Program};
use tessera_mesh::Group;

use crate::order::Order;
use crate::{say, structure};

/// A graph that cannot be captured as it is written.
pub static T0335: Code = Code {
    id: "T0335",
    title: "graph cannot be captured so",
    page: "A captured graph is launched by one call of the host, so the ops of one name stand together in the program, with no \
other op between them. What crosses its edge is lost: a collective issued inside and waited for outside (or the other way \
round) crashes or hangs when the graph is replayed, and so does an event that is recorded on one side and awaited on the \
other, since captured events are not those of the stream.\n\n\
Move the edge of the graph, or wait before it. After the graph, ops on the stream of its first op come after all of it; \
other streams need an event recorded there.",
};
/// Two uses of a communicator at once.
pub static T0336: Code = Code {
    id: "T0336",
    title: "communicator is used by a graph and by something else at once",
    page: "With graph mixing off (NCCL_GRAPH_MIXING_SUPPORT=0, or one graph per communicator) a communicator serves one \
graph at a time: no eager collective may be launched while a graph that uses it is outstanding, whatever the streams, \
and no two graphs that use it may run in parallel. A program has no point at which the host waits, so an eager \
collective after a graph over the same group is always launched too early.\n\n\
Capture it as well, order the second graph after the first by an event, put it into a phase of its own, or leave mixing on.",
};

/// Ops `start..end` of one graph.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) name: String,
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Lanes of streams other than the one it is launched on.
    pub(crate) lanes: Vec<u32>,
    /// Those streams, in the order of `lanes`.
    streams: Vec<u32>,
}

impl Run {
    /// Lane of a stream inside the graph.
    pub(crate) fn lane_of(&self, stream: u32) -> u32 {
        let at = self.streams.iter().position(|s| *s == stream);
        at.and_then(|i| self.lanes.get(i)).copied().unwrap_or(stream)
    }
}

/// Graphs of a program in order. Sources belong to no graph: they are there before.
pub(crate) fn runs(p: &Program) -> Vec<Run> {
    let mut out: Vec<Run> = Vec::new();
    let mut lane = p.streams.len() as u32;
    let mut open = false;
    for (i, op) in p.ops.iter().enumerate().filter(|(_, o)| !say::is_given(o)) {
        let Some(name) = op.str("graph") else {
            open = false;
            continue;
        };
        match out.last_mut() {
            Some(run) if open && run.name == name => run.end = i + 1,
            _ => {
                let name = name.to_string();
                out.push(Run { name, start: i, end: i + 1, lanes: Vec::new(), streams: Vec::new() });
            }
        }
        open = true;
        let Some(run) = out.last_mut() else { continue };
        let stream = op.stream.0;
        if stream != p.ops[run.start].stream.0 && !run.streams.contains(&stream) {
            run.streams.push(stream);
            run.lanes.push(lane);
            lane += 1;
        }
    }
    out
}

/// Graphs that stand together and keep their tickets and events.
pub(crate) fn check(p: &Program, definitions: &[Option<usize>], runs: &[Run]) -> Diagnostics {
    let mut out = Vec::new();
    if runs.is_empty() {
        return out;
    }
    let mut first: BTreeMap<&str, usize> = BTreeMap::new();
    for run in runs {
        if let Some(earlier) = first.insert(&run.name, run.start) {
            let message = format!("graph {} is left and entered again", run.name);
            let d = say::refuse(&T0335, p, run.start, message);
            out.push(
                say::at_op(d, p, earlier, "it begins here").hint("give the second part a name of its own"),
            );
        }
    }
    for (i, op) in p.ops.iter().enumerate() {
        let name = op.str("graph");
        let ticket = if op.opcode == Opcode::Wait { op.operands.first() } else { None };
        for v in ticket.into_iter().chain(&op.after) {
            let Some(d) = definitions[v.0 as usize] else { continue };
            let there = p.ops[d].str("graph");
            if there == name {
                continue;
            }
            let what = if p.ty(*v).dtype == DType::Event { "event" } else { "ticket" };
            let side = |n: Option<&str>| n.map_or("no graph".to_string(), |n| format!("graph {n}"));
            let message = format!("{what} {} crosses the edge of a graph", say::value(p, *v));
            let d2 = say::refuse(&T0335, p, i, message).note(format!(
                "here {}, there {}",
                side(name),
                side(there)
            ));
            out.push(say::at_op(d2, p, d, format!("made in {}", side(there))));
        }
    }
    out
}

/// Judges one program for communicators that serve one graph at a time or eager collectives
/// ([`crate::Limits::graph_mixing_off`]), beyond what [`crate::check_program`] asks for.
#[must_use]
pub fn check_graph_mixing(p: &Program) -> Diagnostics {
    let malformed = structure::check(p);
    if !malformed.is_empty() {
        return malformed;
    }
    let runs = runs(p);
    if runs.is_empty() {
        return Vec::new();
    }
    let order = Order::of(p, &p.definitions(), &runs);
    let mut out = Vec::new();
    // Graphs that use a group so far, each with its collectives over it.
    let mut used: BTreeMap<Group, Vec<(usize, Vec<usize>)>> = BTreeMap::new();
    let mut told: BTreeSet<(Group, usize, Option<usize>)> = BTreeSet::new();
    for (i, op) in p.collectives() {
        let Some(group) = op.group() else { continue };
        let here = runs.iter().position(|r| (r.start..r.end).contains(&i) && op.str("graph").is_some());
        let earlier = used.entry(group).or_default();
        for (run, ops) in earlier.iter().filter(|(r, _)| Some(*r) != here) {
            let ordered = |y: usize| ops.iter().all(|x| order.before(*x, y));
            let (says, apart) = match here {
                None => ("is launched eagerly while", false),
                Some(h) => ("is captured in a graph that runs beside", ordered(runs[h].start)),
            };
            if apart || !told.insert((group, *run, here)) {
                continue;
            }
            let message = format!(
                "{} over {group} {says} graph {} may be using the communicator",
                op.opcode.name(),
                runs[*run].name
            );
            let d: Diagnostic = say::refuse(&T0336, p, i, message);
            out.push(match ops.last() {
                Some(x) => {
                    say::at_op(d, p, *x, format!("in graph {}: {}", runs[*run].name, say::describe(p, *x)))
                }
                None => d,
            });
        }
        if let Some(h) = here {
            match earlier.iter_mut().find(|(r, _)| *r == h) {
                Some((_, ops)) => ops.push(i),
                None => earlier.push((h, vec![i])),
            }
        }
    }
    out
}
