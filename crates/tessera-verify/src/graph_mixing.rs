//! Communicators that cannot serve a captured graph while another graph or an eager collective uses
//! them.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::Program;
use tessera_mesh::Group;

use crate::captured_graph::captured_graphs;
use crate::codes::T0336;
use crate::happens_before::HappensBefore;
use crate::{display, structure};

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
        let here = runs.iter().position(|r| (r.start..r.end).contains(&i) && op.graph_name().is_some());
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
