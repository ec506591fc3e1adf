//! Checks one program by itself, independently of the other ranks.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::rules::infer_types;
use tessera_ir::{DType, OpKind, OpView, Opcode, Program, Type, views};
use tessera_mesh::{AxisLayout, Reduction};

use crate::codes::{T0309, T0310, T0313, T0314, T0315, T0317, T0321, T0323, T0339};
use crate::{captured_graph, display, expert_tiers, happens_before, structure};

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
        out.extend(expert_tiers::check(p));
    }
    out
}

fn check_types(p: &Program, i: usize, definitions: &[Option<usize>]) -> Option<Diagnostic> {
    let op = &p.ops[i];
    let written = || op.results.iter().map(|r| p.type_of(*r));
    // Types are taken as annotated only for values that come from outside the program.
    let given = op.is_source() || matches!(op.opcode, Opcode::Recv | Opcode::Wait);
    let declared: Vec<Type> = written().filter(|_| given).cloned().collect();
    let derived = match infer_types(p, op, &declared, definitions) {
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
    for (i, op) in p.ops.iter().enumerate().filter(|(_, o)| !o.is_source()) {
        let Some(n) = op.batch_number() else {
            if open.take().is_some() {
                between = Some(i);
            }
            continue;
        };
        if !(1..=i64::from(u32::MAX)).contains(&n) {
            let message =
                format!("batch {n} of {}: batch numbers of sends and receives start at 1", op.opcode.name());
            out.push(display::error_at_op(&T0339, p, i, message));
            continue;
        }
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
        } else if op.graph_name() != p.ops[begin].graph_name() {
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
    let source = op.is_source() || matches!(op.opcode, Opcode::CacheRead);
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
    match op.view().ok()? {
        OpView::Broadcast(v) if v.root >= u64::from(size) => {
            let message = format!("root {} of a group of {size} over {group}", v.root);
            Some(display::error_at_op(&T0310, p, i, message))
        }
        OpView::Send(views::Send { to: at, .. }) | OpView::Recv(views::Recv { from: at, .. })
            if at >= u64::from(size) =>
        {
            let key = if op.opcode == Opcode::Send { "to" } else { "from" };
            let message = format!("{name} {key} position {at} of {group}, which has {size}");
            Some(display::error_at_op(&T0309, p, i, message))
        }
        _ => None,
    }
}

fn check_call_scalars(p: &Program, i: usize, definitions: &[Option<usize>]) -> Option<Diagnostic> {
    let op = &p.ops[i];
    let is_call =
        |v: tessera_ir::ValueId| definitions[v.0 as usize].is_some_and(|d| p.ops[d].opcode == Opcode::Call);
    if op.opcode == Opcode::Call {
        let v = *op.results.first()?;
        let split =
            p.mesh.active_axes().find(|a| matches!(p.type_of(v).layout.on_axis(*a), AxisLayout::Shard(_)))?;
        let message = format!(
            "{} is annotated as sharded over {split}; call scalars are complete on every rank",
            display::value_name(p, v)
        );
        return Some(
            display::error_at_op(&T0321, p, i, message)
                .with_hint("declare it replicated and shard it with take_shard, or pass it as an input"),
        );
    }
    if matches!(op.opcode.table_row().kind, OpKind::Collective | OpKind::Sink)
        && let Some(v) = op.operands.iter().find(|v| is_call(**v))
    {
        let message =
            format!("call scalar {} is an operand of {}", display::value_name(p, *v), op.opcode.name());
        return Some(display::error_at_op(&T0323, p, i, message));
    }
    // Biases and corrections are vectors of the model, the scales of a matmul belong to its operands, a history is
    // frames, and the order of a sum over experts is that of the tokens' choices.
    let reads_value = |key: &str| match op.opcode {
        Opcode::Matmul | Opcode::Conv3d | Opcode::ExpertCombine => true,
        Opcode::TopKExperts => key == "correction",
        _ => false,
    };
    if let Some((key, v)) = op.keyed.iter().find(|(key, v)| !reads_value(key) && !is_call(*v)) {
        let message = format!("`{key}` is {}, which is not a call scalar", display::value_name(p, *v));
        return Some(display::error_at_op(&T0323, p, i, message));
    }
    None
}
