//! Captured graphs: `graph = "name"` marks ops that are captured together and launched as one
//! graph.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::{DType, Opcode, Program};
use tessera_mesh::Group;

use crate::happens_before::HappensBefore;
use crate::{display, structure};

/// Diagnostic for a graph that cannot be captured as written.
pub static T0335: Code = Code {
    id: "T0335",
    title: "graph cannot be captured as written",
    page: "The host launches a captured graph with one call, so the ops of one graph name must be consecutive in the program, \
with no other op between them. Synchronisation cannot cross the boundary of a graph: a collective issued inside and waited for \
outside (or the other way round) crashes or hangs when the graph is replayed, and so does an event recorded on one side and \
awaited on the other, since events captured into a graph are not events of the stream.\n\n\
Move the boundary of the graph, or wait before it. After the graph, ops on the stream of its first op run after the whole graph; \
other streams need an event recorded there.",
};
/// Diagnostic for a communicator that a graph and another launch may use concurrently.
pub static T0336: Code = Code {
    id: "T0336",
    title: "communicator is used concurrently by a graph and by another launch",
    page: "With graph mixing off (NCCL_GRAPH_MIXING_SUPPORT=0, or one graph per communicator) a communicator serves one \
graph at a time: no eager collective may be launched while a graph that uses the communicator is outstanding, on any stream, \
and no two graphs that use it may run in parallel. A program has no point at which the host waits, so an eager \
collective after a graph over the same group is always launched too early.\n\n\
Capture the collective as well, order the second graph after the first by an event, move it to a phase of its own, or leave \
graph mixing on.",
};

/// The ops `start..end` of one captured graph.
#[derive(Debug)]
pub(crate) struct CapturedGraph {
    pub(crate) name: String,
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Lanes of streams other than the launch stream, in the order of `streams`.
    pub(crate) lanes: Vec<u32>,
    /// Streams other than the launch stream that ops of the graph use.
    streams: Vec<u32>,
}

impl CapturedGraph {
    /// Returns the lane of a stream inside the graph.
    pub(crate) fn lane_of(&self, stream: u32) -> u32 {
        let at = self.streams.iter().position(|s| *s == stream);
        at.and_then(|i| self.lanes.get(i)).copied().unwrap_or(stream)
    }
}

/// Returns the captured graphs of a program in order. Source ops (inputs, call scalars, weights)
/// belong to no graph, since they run before the program.
pub(crate) fn captured_graphs(p: &Program) -> Vec<CapturedGraph> {
    let mut out: Vec<CapturedGraph> = Vec::new();
    let mut lane = p.streams.len() as u32;
    let mut open = false;
    for (i, op) in p.ops.iter().enumerate().filter(|(_, o)| !display::is_source(o)) {
        let Some(name) = op.str_attr("graph") else {
            open = false;
            continue;
        };
        match out.last_mut() {
            Some(run) if open && run.name == name => run.end = i + 1,
            _ => {
                let name = name.to_string();
                out.push(CapturedGraph {
                    name,
                    start: i,
                    end: i + 1,
                    lanes: Vec::new(),
                    streams: Vec::new(),
                });
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

/// Checks that each graph is contiguous and that no ticket or event crosses its boundary.
pub(crate) fn check(p: &Program, definitions: &[Option<usize>], graphs: &[CapturedGraph]) -> Diagnostics {
    let mut out = Vec::new();
    if graphs.is_empty() {
        return out;
    }
    let mut first: BTreeMap<&str, usize> = BTreeMap::new();
    for run in graphs {
        if let Some(earlier) = first.insert(&run.name, run.start) {
            let message = format!("graph {} is left and entered again", run.name);
            let d = display::error_at_op(&T0335, p, run.start, message);
            out.push(
                display::with_op_label(d, p, earlier, "the graph begins here")
                    .with_hint("rename the second part to a graph of its own"),
            );
        }
    }
    for (i, op) in p.ops.iter().enumerate() {
        let name = op.str_attr("graph");
        let ticket = if op.opcode == Opcode::Wait { op.operands.first() } else { None };
        for v in ticket.into_iter().chain(&op.after) {
            let Some(d) = definitions[v.0 as usize] else { continue };
            let there = p.ops[d].str_attr("graph");
            if there == name {
                continue;
            }
            let what = if p.type_of(*v).dtype == DType::Event { "event" } else { "ticket" };
            let side = |n: Option<&str>| n.map_or("no graph".to_string(), |n| format!("graph {n}"));
            let message = format!("{what} {} crosses the boundary of a graph", display::value_name(p, *v));
            let d2 = display::error_at_op(&T0335, p, i, message).with_note(format!(
                "the use is in {}, the definition in {}",
                side(name),
                side(there)
            ));
            out.push(display::with_op_label(d2, p, d, format!("defined in {}", side(there))));
        }
    }
    out
}

/// Checks one program for communicators that serve either one graph at a time or eager collectives
/// ([`crate::DeviceLimits::graph_mixing_off`]), in addition to the checks of
/// [`crate::check_program`].
#[must_use]
pub fn check_graph_mixing(program: &Program) -> Diagnostics {
    let malformed = structure::check(program);
    if !malformed.is_empty() {
        return malformed;
    }
    let runs = captured_graphs(program);
    if runs.is_empty() {
        return Vec::new();
    }
    let order = HappensBefore::new(program, &program.defining_ops(), &runs);
    let mut out = Vec::new();
    // The graphs that use a group so far, each with its collectives over the group.
    let mut used: BTreeMap<Group, Vec<(usize, Vec<usize>)>> = BTreeMap::new();
    let mut reported: BTreeSet<(Group, usize, Option<usize>)> = BTreeSet::new();
    for (i, op) in program.collective_ops() {
        let Some(group) = op.comm_group() else { continue };
        let here = runs.iter().position(|r| (r.start..r.end).contains(&i) && op.str_attr("graph").is_some());
        let earlier = used.entry(group).or_default();
        for (run, ops) in earlier.iter().filter(|(r, _)| Some(*r) != here) {
            let ordered = |y: usize| ops.iter().all(|x| order.finishes_before(*x, y));
            let (conflict, ordered_apart) = match here {
                None => ("is launched eagerly while", false),
                Some(h) => ("is captured in a graph that may run concurrently:", ordered(runs[h].start)),
            };
            if ordered_apart || !reported.insert((group, *run, here)) {
                continue;
            }
            let message = format!(
                "{} over {group} {conflict} graph {} may be using the communicator",
                op.opcode.name(),
                runs[*run].name
            );
            let d: Diagnostic = display::error_at_op(&T0336, program, i, message);
            out.push(match ops.last() {
                Some(x) => display::with_op_label(
                    d,
                    program,
                    *x,
                    format!("in graph {}: {}", runs[*run].name, display::describe_op(program, *x)),
                ),
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
