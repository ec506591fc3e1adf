//! Checks one program by itself, independently of the other ranks.

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::rules::infer_types_with;
use tessera_ir::{DType, OpKind, Opcode, Program, Type};
use tessera_mesh::{AxisLayout, Reduction};

use crate::{captured_graph, display, happens_before, structure};

/// Diagnostic for a send or receive whose peer does not exist.
pub static T0309: Code = Code {
    id: "T0309",
    title: "send or receive names an impossible peer",
    page: "`to` and `from` are positions on the collective's mesh axis. The position must exist and must not be the \
rank's own: a rank that waits for itself hangs.\n\n\
One program can serve only ranks for which the peer is valid; a stage that sends to the next stage needs a role of \
its own.",
};
/// Diagnostic for a collective over a group that does not exist.
pub static T0310: Code = Code {
    id: "T0310",
    title: "collective over a group that does not exist",
    page: "A collective names a mesh axis with more than one rank; its group consists of the ranks that differ only in that \
coordinate. An axis of one rank has no peers, and a broadcast's root must be a position on the axis.\n\n\
Omit the collective for meshes in which its axis has size 1.",
};
/// Diagnostic for an issued collective without a wait.
pub static T0313: Code = Code {
    id: "T0313",
    title: "issued collective is never waited for",
    page: "`collective.issue` starts an operation and returns a ticket; only `collective.wait` makes the result usable \
and frees the operand's memory. An issue without a wait leaves an operation in flight when the program ends: the next \
program may overwrite its buffers, and a failure inside it surfaces elsewhere.\n\n\
Wait for every issue exactly once before the program ends.",
};
/// Diagnostic for a second wait on one ticket.
pub static T0314: Code = Code {
    id: "T0314",
    title: "issued collective is waited for twice",
    page: "A wait consumes its ticket. A second wait would define a second value for one operation, and on some \
backends would block on work that no longer exists.\n\nUse the first wait's result in both places.",
};
/// Diagnostic for a ticket or an event used as data, or data used as a ticket or an event.
pub static T0315: Code = Code {
    id: "T0315",
    title: "ticket or event used as something else",
    page: "A ticket (of an issued collective) may only be waited for, an event may only appear in `after(…)`, and neither is \
data: it cannot be an operand of arithmetic, be sent, or be written to a buffer. `wait` takes a ticket and `after` takes events \
recorded earlier, nothing else.",
};
/// Diagnostic for sends and receives that cannot form one batch.
pub static T0339: Code = Code {
    id: "T0339",
    title: "sends and receives cannot be issued as one batch",
    page: "`batch = 1` groups sends and receives into one launch (ncclGroupStart and ncclGroupEnd): they are in flight \
together, so two neighbours may both send first. The members of a batch are consecutive in the program, with nothing but \
inputs, call scalars and weights between them, on one stream and all in one graph or all in none, and the number (1 or more) is \
used once in a program.\n\n\
Wait for the tickets after the whole batch.",
};
/// Diagnostic for a partial value that leaves the program unreduced.
pub static T0317: Code = Code {
    id: "T0317",
    title: "partial value escapes",
    page: "A partial value is one rank's term of a reduction. It must be reduced before it leaves the program (output, \
send, cache.write) and before another op reads it as a bias or row number. Sources are never partial: no value from outside a \
program is a term.\n\n\
An unreduced value gives an answer that differs between ranks, without any error. Insert an all_reduce \
or a reduce_scatter first.",
};
/// Diagnostic for an annotated type that differs from the derived type.
pub static T0321: Code = Code {
    id: "T0321",
    title: "annotated type differs from the type of the op's result",
    page: "The verifier derives every type again from the op's rule. A value's annotated dtype, local shape or layout \
differs from its op's result, so everything that relied on the annotation (memory, counts of collectives, other \
ranks) would be wrong.\n\nCorrect the annotation, or the operands if the annotation is as intended.",
};
/// Diagnostic for a call scalar outside its permitted uses, or another value in its place.
pub static T0323: Code = Code {
    id: "T0323",
    title: "call scalar misused, or a value used in its place",
    page: "A call scalar is part of the request and equal on every rank. It may be used in arithmetic and for rope offsets, random \
keys and cache rows. It is never sent, gathered, cached or output, and it never determines a shape, a group, a branch \
or which op runs.\n\n\
Conversely, rope `start`, the keys of a random draw, `sigma`, the bias of an attention and a cache row must be call \
scalars: with a computed value, data would decide where bytes land, and ranks could drift apart.",
};

/// Checks one program: form, types, tokens, partial values, call scalars, groups, order and views.
///
/// An empty list means that the program is correct by itself; [`crate::check_phase`] checks whether
/// it fits the other ranks' programs.
#[must_use]
pub fn check_program(p: &Program) -> Diagnostics {
    let malformed = structure::check(p);
    if !malformed.is_empty() {
        return malformed;
    }
    let definitions = p.defining_ops();
    let mut out = Vec::new();
    let mut refused = vec![false; p.ops.len()];
    for (i, op) in p.ops.iter().enumerate() {
        // An error in an issue would recur at its wait, so report it only once.
        let issue = op.operands.first().filter(|_| op.opcode == Opcode::Wait);
        if issue.and_then(|t| definitions[t.0 as usize]).is_some_and(|d| refused[d]) {
            continue;
        }
        let mut found = check_tokens(p, i);
        found.extend(check_partials(p, i));
        found.extend(check_group(p, i));
        found.extend(check_call_scalars(p, i, &definitions));
        // The type rule would only repeat these errors in other words.
        if found.is_empty() {
            found.extend(check_types(p, i, &definitions));
        }
        refused[i] = !found.is_empty();
        out.extend(found);
    }
    out.extend(check_waits(p));
    out.extend(check_batches(p));
    if out.is_empty() {
        let runs = captured_graph::captured_graphs(p);
        out.extend(captured_graph::check(p, &definitions, &runs));
        out.extend(happens_before::check(p, &definitions, &runs));
    }
    out
}

fn check_types(p: &Program, i: usize, definitions: &[Option<usize>]) -> Option<Diagnostic> {
    let op = &p.ops[i];
    let written = || op.results.iter().map(|r| p.type_of(*r));
    // Types are taken as annotated only for values that come from outside the program.
    let given = display::is_source(op) || matches!(op.opcode, Opcode::Recv | Opcode::Wait);
    let declared: Vec<Type> = written().filter(|_| given).cloned().collect();
    let derived = match infer_types_with(p, op, &declared, definitions) {
        Ok(t) => t,
        Err(e) => return Some(display::error_at_op(e.code, p, i, e.message)),
    };
    if derived.len() != op.results.len() {
        let message = format!("{} results annotated, but the op returns {}", op.results.len(), derived.len());
        return Some(display::error_at_op(&T0321, p, i, message));
    }
    let (d, w) = derived.iter().zip(written()).find(|(d, w)| !types_equal(p, d, w))?;
    let message = format!(
        "{} is annotated {}, but the derived type is {}",
        display::value_name(p, op.results[0]),
        w.display_on(&p.mesh),
        d.display_on(&p.mesh)
    );
    Some(display::error_at_op(&T0321, p, i, message))
}

/// Returns whether two types are equal on this mesh; layouts on an axis of one rank are ignored.
fn types_equal(p: &Program, a: &Type, b: &Type) -> bool {
    a.dtype == b.dtype
        && a.shape == b.shape
        && p.mesh.active_axes().all(|x| a.layout.on_axis(x) == b.layout.on_axis(x))
}

fn check_tokens(p: &Program, i: usize) -> Diagnostics {
    let op = &p.ops[i];
    let mut out = Vec::new();
    let mut bad = |v, why: &str| {
        out.push(display::error_at_op(
            &T0315,
            p,
            i,
            format!("{} is a {}, {why}", display::value_name(p, v), p.type_of(v).dtype),
        ));
    };
    for v in &op.operands {
        match (op.opcode, p.type_of(*v).dtype) {
            (Opcode::Wait, DType::Ticket) => {}
            (Opcode::Wait, _) => bad(*v, "but only tickets can be waited for"),
            (_, DType::Ticket | DType::Event) => bad(*v, "which is not data"),
            _ => {}
        }
    }
    for (_, v) in op.keyed.iter().filter(|(_, v)| p.type_of(*v).is_token()) {
        bad(*v, "which is not data");
    }
    for v in op.after.iter().filter(|v| p.type_of(**v).dtype != DType::Event) {
        bad(*v, "but only events may appear in after(…)");
    }
    out
}

fn check_waits(p: &Program) -> Diagnostics {
    let mut out = Vec::new();
    let mut waited: Vec<Option<usize>> = vec![None; p.values.len()];
    let mut issues = Vec::new();
    for (i, op) in p.ops.iter().enumerate() {
        if op.issue {
            issues.push(i);
        }
        let Some(t) = op.operands.first().filter(|_| op.opcode == Opcode::Wait) else { continue };
        match waited[t.0 as usize] {
            Some(first) => {
                let d = display::error_at_op(
                    &T0314,
                    p,
                    i,
                    format!("{} is waited for a second time", display::value_name(p, *t)),
                );
                out.push(display::with_op_label(d, p, first, "the first wait"));
            }
            None => waited[t.0 as usize] = Some(i),
        }
    }
    for i in issues {
        let op = &p.ops[i];
        if op.results.first().is_some_and(|t| waited[t.0 as usize].is_none()) {
            let message = format!("{} is issued but never waited for", op.opcode.name());
            out.push(
                display::error_at_op(&T0313, p, i, message)
                    .with_hint("wait for the ticket before the program ends"),
            );
        }
    }
    out
}

fn check_batches(p: &Program) -> Diagnostics {
    let mut out = Vec::new();
    let mut first: std::collections::BTreeMap<i64, usize> = std::collections::BTreeMap::new();
    let mut open: Option<i64> = None;
    let mut between: Option<usize> = None;
    for (i, op) in p.ops.iter().enumerate().filter(|(_, o)| !display::is_source(o)) {
        // No other op has a `batch` attribute.
        let pair = Some(op).filter(|o| matches!(o.opcode, Opcode::Send | Opcode::Recv));
        let Some(attr) = pair.and_then(|o| o.attrs.get("batch")) else {
            if open.take().is_some() {
                between = Some(i);
            }
            continue;
        };
        let Some(n) = display::batch_number(op).filter(|n| (1..=i64::from(u32::MAX)).contains(n)) else {
            let message = format!(
                "batch {attr:?} of {}: batch numbers of sends and receives start at 1",
                op.opcode.name()
            );
            out.push(display::error_at_op(&T0339, p, i, message));
            continue;
        };
        let begin = *first.entry(n).or_insert(i);
        if begin != i && open != Some(n) {
            let d = display::error_at_op(&T0339, p, i, format!("batch {n} is left and entered again"));
            let d = display::with_op_label(d, p, begin, "the batch begins here");
            out.push(match between {
                Some(b) => {
                    display::with_op_label(d, p, b, format!("interrupted by: {}", display::describe_op(p, b)))
                }
                None => d,
            });
        } else if op.stream != p.ops[begin].stream {
            let d = display::error_at_op(&T0339, p, i, format!("batch {n} uses two streams"));
            out.push(display::with_op_label(d, p, begin, "the batch begins here"));
        } else if op.attrs.get("graph") != p.ops[begin].attrs.get("graph") {
            let d = display::error_at_op(&T0339, p, i, format!("batch {n} crosses the boundary of a graph"));
            out.push(display::with_op_label(d, p, begin, "the batch begins here"));
        }
        open = Some(n);
    }
    out
}

fn check_partials(p: &Program, i: usize) -> Option<Diagnostic> {
    let op = &p.ops[i];
    let partial = |v: &tessera_ir::ValueId| p.type_of(*v).layout.partial_axis();
    let escape = |v, axis: tessera_mesh::Axis, r: Reduction, how: &str| {
        let message = format!("{} is partial({}) over {axis} and {how}", display::value_name(p, v), r.name());
        Some(
            display::error_at_op(&T0317, p, i, message).with_hint(format!("all_reduce it over {axis} first")),
        )
    };
    let how = match op.opcode {
        Opcode::Output => Some("leaves the program"),
        Opcode::CacheWrite => Some("is written to a buffer"),
        Opcode::Send => Some("is sent"),
        _ => None,
    };
    for v in &op.operands {
        if let (Some((axis, r)), Some(how)) = (partial(v), how) {
            return escape(*v, axis, r, how);
        }
    }
    for (key, v) in &op.keyed {
        if let Some((axis, r)) = partial(v) {
            return escape(*v, axis, r, &format!("is read as `{key}`"));
        }
    }
    let source = display::is_source(op) || matches!(op.opcode, Opcode::CacheRead);
    let made = op.results.iter().find(|r| source && partial(r).is_some());
    made.and_then(|v| partial(v).and_then(|(axis, r)| escape(*v, axis, r, "comes from outside the program")))
}

fn check_group(p: &Program, i: usize) -> Option<Diagnostic> {
    let op = &p.ops[i];
    if op.opcode.table_row().kind != OpKind::Collective {
        return None;
    }
    let name = op.opcode.name();
    // The type rule rejects a missing or unknown group.
    let group = op.comm_group()?;
    let size = p.mesh.group_size(group);
    if size < 2 {
        let message = format!("{name} over {group}, which has {size} rank in mesh {}", p.mesh);
        return Some(display::error_at_op(&T0310, p, i, message));
    }
    let position = |key: &str| op.int_attr(key).filter(|at| (0..i64::from(size)).contains(at));
    match op.opcode {
        Opcode::Broadcast if position("root").is_none() => {
            let message = format!("root {:?} of a group of {size} over {group}", op.int_attr("root"));
            Some(display::error_at_op(&T0310, p, i, message))
        }
        Opcode::Send | Opcode::Recv => {
            let key = if op.opcode == Opcode::Send { "to" } else { "from" };
            let message =
                || format!("{name} {key} position {:?} of {group}, which has {size}", op.int_attr(key));
            position(key).is_none().then(|| display::error_at_op(&T0309, p, i, message()))
        }
        _ => None,
    }
}

fn check_call_scalars(p: &Program, i: usize, definitions: &[Option<usize>]) -> Option<Diagnostic> {
    let op = &p.ops[i];
    let is_call =
        |v: tessera_ir::ValueId| definitions[v.0 as usize].is_some_and(|d| p.ops[d].opcode == Opcode::Call);
    if op.opcode == Opcode::Input || op.opcode == Opcode::Call {
        let v = *op.results.first()?;
        let split =
            p.mesh.active_axes().find(|a| matches!(p.type_of(v).layout.on_axis(*a), AxisLayout::Shard(_)))?;
        let message = format!(
            "{} is annotated as sharded over {split}; inputs and call scalars are complete on every rank",
            display::value_name(p, v)
        );
        return Some(
            display::error_at_op(&T0321, p, i, message)
                .with_hint("declare it replicated and shard it with take_shard"),
        );
    }
    if matches!(op.opcode.table_row().kind, OpKind::Collective | OpKind::Sink)
        && let Some(v) = op.operands.iter().find(|v| is_call(**v))
    {
        let message =
            format!("call scalar {} is an operand of {}", display::value_name(p, *v), op.opcode.name());
        return Some(display::error_at_op(&T0323, p, i, message));
    }
    // A matmul's bias is a vector of the model, and its scales belong to its operands.
    let keyed = op.keyed.iter().filter(|_| op.opcode != Opcode::Matmul);
    if let Some((key, v)) = keyed.into_iter().find(|(_, v)| !is_call(*v)) {
        let message = format!("`{key}` is {}, which is not a call scalar", display::value_name(p, *v));
        return Some(display::error_at_op(&T0323, p, i, message));
    }
    None
}
