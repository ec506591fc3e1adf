//! Captured graphs: `graph = "name"` marks ops that are captured together and launched as one
//! graph.

use std::collections::BTreeMap;

use tessera_base::Diagnostics;
use tessera_ir::{DType, Opcode, Program};

use crate::codes::T0335;
use crate::display;

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
    /// Returns the lane of a stream inside the graph: for the launch stream the stream itself, for
    /// any other stream a lane of this graph alone. The ops of a lane run in order.
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
    for (i, op) in p.ops.iter().enumerate().filter(|(_, o)| !o.is_source()) {
        let Some(name) = op.graph_name() else {
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
        let name = op.graph_name();
        let ticket = if op.opcode == Opcode::Wait { op.operands.first() } else { None };
        for v in ticket.into_iter().chain(&op.after) {
            let Some(d) = definitions[v.0 as usize] else { continue };
            let there = p.ops[d].graph_name();
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
