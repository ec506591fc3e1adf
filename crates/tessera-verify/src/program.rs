//! What one program must satisfy on its own, whatever the other ranks do.

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::rules::infer_with;
use tessera_ir::{DType, Kind, Opcode, Program, Type};
use tessera_mesh::{AxisLayout, Reduction};

use crate::{graph, order, say, structure};

/// A peer that is not there.
pub static T0309: Code = Code {
    id: "T0309",
    title: "send or receive names an impossible peer",
    page: "`to` and `from` are positions on the collective's mesh axis. The position must exist and must not be the \
rank's own: a rank that waits for itself waits for ever.\n\n\
One program can only serve ranks for which the peer makes sense; a stage that sends to the next one needs a role of \
its own.",
};
/// A group that is not there.
pub static T0310: Code = Code {
    id: "T0310",
    title: "collective over a group that does not exist",
    page: "A collective names a mesh axis with more than one rank; its group is the ranks that differ on that axis \
alone. Over an axis of one rank there is nobody to talk to, and a broadcast's root must be a position on the axis.\n\n\
Leave the collective out for meshes where its axis has size 1.",
};
/// An issue without a wait.
pub static T0313: Code = Code {
    id: "T0313",
    title: "issued collective is never waited for",
    page: "`collective.issue` starts an operation and gives a ticket; only `collective.wait` makes the result usable \
and the operand's memory free. An issue without a wait leaves an operation in flight when the program ends: the next \
program may overwrite its buffers, and a failure inside it shows up somewhere else.\n\n\
Every issue is waited for exactly once, before the program ends.",
};
/// Two waits for one issue.
pub static T0314: Code = Code {
    id: "T0314",
    title: "issued collective is waited for twice",
    page: "A ticket is used up by its wait. A second wait would define a second value for one operation, and on some \
backends block on work that no longer exists.\n\nUse the first wait's result in both places.",
};
/// Tickets or events where data belongs, or the other way round.
pub static T0315: Code = Code {
    id: "T0315",
    title: "ticket or event used as something else",
    page: "Tickets (of issued collectives) may only be waited for, events only stand in `after(…)`, and neither is \
data: it cannot be computed with, sent or written to a buffer. `wait` takes a ticket and `after` takes events recorded \
earlier, nothing else.",
};
/// Sends and receives that cannot be one launch.
pub static T0339: Code = Code {
    id: "T0339",
    title: "sends and receives cannot be issued as one",
    page: "`batch = 1` makes sends and receives one launch (ncclGroupStart and ncclGroupEnd): they are in flight together, so two \
neighbours may both send first. The members of a batch stand together in the program, with nothing but inputs, call scalars and \
weights between them, on one stream and in one graph or none, and the number (1 or more) is used once in a program.\n\n\
Wait for the tickets after the whole batch.",
};
/// A partial value leaves the program.
pub static T0317: Code = Code {
    id: "T0317",
    title: "partial value escapes",
    page: "A partial value is one rank's term of a reduction. It must be reduced before it leaves the program (output, \
send, cache.write), before another op reads it as a bias or row number. Sources are never partial: nothing outside a program holds terms.\n\n\
The symptom of letting it through is an answer that differs between ranks and no error at all. Insert an all_reduce \
or a reduce_scatter first.",
};
/// A written type that the rule does not give.
pub static T0321: Code = Code {
    id: "T0321",
    title: "written type is not the one the op gives",
    page: "The judge derives every type again from the op's rule. A value's written dtype, local shape or layout \
differs from what its op produces, so everything that trusted the annotation (memory, counts of collectives, other \
ranks) would be wrong.\n\nCorrect the annotation, or the operands if the annotation is what was meant.",
};
/// A call scalar decides what it must not.
pub static T0323: Code = Code {
    id: "T0323",
    title: "call scalar misused, or a value used in its place",
    page: "A call scalar is part of the request and the same on every rank. It feeds arithmetic, rope offsets, random \
keys and cache rows. It is never sent, gathered, cached or handed out, and it never decides a shape, a group, a branch \
or which op runs.\n\n\
The other way round, rope `start`, the keys of a draw, `sigma`, the bias of an attention and a cache row must be call \
scalars: a computed value there would let data decide where bytes land, and ranks could drift apart.",
};

/// Judges one program: form, types, tokens, partial values, call scalars, groups, order and views.
///
/// An empty list means that the program is right by itself; whether it fits the other ranks' programs is for
/// [`crate::check_phase`] to say.
#[must_use]
pub fn check_program(p: &Program) -> Diagnostics {
    let form = structure::check(p);
    if !form.is_empty() {
        return form;
    }
    let definitions = p.definitions();
    let mut out = Vec::new();
    let mut refused = vec![false; p.ops.len()];
    for (i, op) in p.ops.iter().enumerate() {
        // What is wrong with an issue is wrong with its wait and is said once.
        let issue = op.operands.first().filter(|_| op.opcode == Opcode::Wait);
        if issue.and_then(|t| definitions[t.0 as usize]).is_some_and(|d| refused[d]) {
            continue;
        }
        let mut found = tokens(p, i);
        found.extend(partials(p, i));
        found.extend(groups(p, i));
        found.extend(scalars(p, i, &definitions));
        // The rule would repeat what these said in other words.
        if found.is_empty() {
            found.extend(types(p, i, &definitions));
        }
        refused[i] = !found.is_empty();
        out.extend(found);
    }
    out.extend(waits(p));
    out.extend(batches(p));
    if out.is_empty() {
        let runs = graph::runs(p);
        out.extend(graph::check(p, &definitions, &runs));
        out.extend(order::check(p, &definitions, &runs));
    }
    out
}

fn types(p: &Program, i: usize, definitions: &[Option<usize>]) -> Option<Diagnostic> {
    let op = &p.ops[i];
    let written = || op.results.iter().map(|r| p.ty(*r));
    // Only what comes from elsewhere is taken as it is written.
    let given = say::is_given(op) || matches!(op.opcode, Opcode::Recv | Opcode::Wait);
    let declared: Vec<Type> = written().filter(|_| given).cloned().collect();
    let derived = match infer_with(p, op, &declared, definitions) {
        Ok(t) => t,
        Err(e) => return Some(say::refuse(e.code, p, i, e.message)),
    };
    if derived.len() != op.results.len() {
        let message = format!("{} results written where the op gives {}", op.results.len(), derived.len());
        return Some(say::refuse(&T0321, p, i, message));
    }
    let (d, w) = derived.iter().zip(written()).find(|(d, w)| !same(p, d, w))?;
    let message = format!(
        "{} is written {}, derived {}",
        say::value(p, op.results[0]),
        w.display(&p.mesh),
        d.display(&p.mesh)
    );
    Some(say::refuse(&T0321, p, i, message))
}

/// Equal types on this mesh; an axis of one rank says nothing.
fn same(p: &Program, a: &Type, b: &Type) -> bool {
    a.dtype == b.dtype && a.shape == b.shape && p.mesh.axes().all(|x| a.layout.on(x) == b.layout.on(x))
}

fn tokens(p: &Program, i: usize) -> Diagnostics {
    let op = &p.ops[i];
    let mut out = Vec::new();
    let mut bad = |v, why: &str| {
        out.push(say::refuse(&T0315, p, i, format!("{} is a {}, {why}", say::value(p, v), p.ty(v).dtype)));
    };
    for v in &op.operands {
        match (op.opcode, p.ty(*v).dtype) {
            (Opcode::Wait, DType::Ticket) => {}
            (Opcode::Wait, _) => bad(*v, "and only tickets are waited for"),
            (_, DType::Ticket | DType::Event) => bad(*v, "which is not data"),
            _ => {}
        }
    }
    for (_, v) in op.keyed.iter().filter(|(_, v)| p.ty(*v).is_token()) {
        bad(*v, "which is not data");
    }
    for v in op.after.iter().filter(|v| p.ty(**v).dtype != DType::Event) {
        bad(*v, "and only events stand in after(…)");
    }
    out
}

fn waits(p: &Program) -> Diagnostics {
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
                let d =
                    say::refuse(&T0314, p, i, format!("{} is waited for a second time", say::value(p, *t)));
                out.push(say::at_op(d, p, first, "the first wait"));
            }
            None => waited[t.0 as usize] = Some(i),
        }
    }
    for i in issues {
        let op = &p.ops[i];
        if op.results.first().is_some_and(|t| waited[t.0 as usize].is_none()) {
            let message = format!("{} is issued and never waited for", op.opcode.name());
            out.push(say::refuse(&T0313, p, i, message).hint("wait for the ticket before the program ends"));
        }
    }
    out
}

fn batches(p: &Program) -> Diagnostics {
    let mut out = Vec::new();
    let mut first: std::collections::BTreeMap<i64, usize> = std::collections::BTreeMap::new();
    let mut open: Option<i64> = None;
    let mut between: Option<usize> = None;
    for (i, op) in p.ops.iter().enumerate().filter(|(_, o)| !say::is_given(o)) {
        // No other op has such a constant.
        let pair = Some(op).filter(|o| matches!(o.opcode, Opcode::Send | Opcode::Recv));
        let Some(attr) = pair.and_then(|o| o.attrs.get("batch")) else {
            if open.take().is_some() {
                between = Some(i);
            }
            continue;
        };
        let Some(n) = say::batch(op).filter(|n| (1..=i64::from(u32::MAX)).contains(n)) else {
            let message =
                format!("batch {attr:?} of {}: sends and receives have numbers from 1 on", op.opcode.name());
            out.push(say::refuse(&T0339, p, i, message));
            continue;
        };
        let begin = *first.entry(n).or_insert(i);
        if begin != i && open != Some(n) {
            let d = say::refuse(&T0339, p, i, format!("batch {n} is left and entered again"));
            let d = say::at_op(d, p, begin, "it begins here");
            out.push(match between {
                Some(b) => say::at_op(d, p, b, format!("stands between: {}", say::describe(p, b))),
                None => d,
            });
        } else if op.stream != p.ops[begin].stream {
            let d = say::refuse(&T0339, p, i, format!("batch {n} is on two streams"));
            out.push(say::at_op(d, p, begin, "it begins here"));
        } else if op.attrs.get("graph") != p.ops[begin].attrs.get("graph") {
            let d = say::refuse(&T0339, p, i, format!("batch {n} crosses the edge of a graph"));
            out.push(say::at_op(d, p, begin, "it begins here"));
        }
        open = Some(n);
    }
    out
}

fn partials(p: &Program, i: usize) -> Option<Diagnostic> {
    let op = &p.ops[i];
    let partial = |v: &tessera_ir::ValueId| p.ty(*v).layout.partial();
    let escape = |v, axis: tessera_mesh::Axis, r: Reduction, how: &str| {
        let message = format!("{} is partial({}) over {axis} and {how}", say::value(p, v), r.name());
        Some(say::refuse(&T0317, p, i, message).hint(format!("all_reduce it over {axis} first")))
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
    let source = say::is_given(op) || matches!(op.opcode, Opcode::CacheRead);
    let made = op.results.iter().find(|r| source && partial(r).is_some());
    made.and_then(|v| partial(v).and_then(|(axis, r)| escape(*v, axis, r, "comes from outside the program")))
}

fn groups(p: &Program, i: usize) -> Option<Diagnostic> {
    let op = &p.ops[i];
    if op.opcode.row().kind != Kind::Collective {
        return None;
    }
    let name = op.opcode.name();
    // A missing or unknown group is the rule's to refuse.
    let group = op.group()?;
    let size = p.mesh.group_size(group);
    if size < 2 {
        let message = format!("{name} over {group}, which has {size} rank in mesh {}", p.mesh);
        return Some(say::refuse(&T0310, p, i, message));
    }
    let position = |key: &str| op.int(key).filter(|at| (0..i64::from(size)).contains(at));
    match op.opcode {
        Opcode::Broadcast if position("root").is_none() => {
            let message = format!("root {:?} of a group of {size} over {group}", op.int("root"));
            Some(say::refuse(&T0310, p, i, message))
        }
        Opcode::Send | Opcode::Recv => {
            let key = if op.opcode == Opcode::Send { "to" } else { "from" };
            let message = || format!("{name} {key} position {:?} of {group}, which has {size}", op.int(key));
            position(key).is_none().then(|| say::refuse(&T0309, p, i, message()))
        }
        _ => None,
    }
}

fn scalars(p: &Program, i: usize, definitions: &[Option<usize>]) -> Option<Diagnostic> {
    let op = &p.ops[i];
    let is_call =
        |v: tessera_ir::ValueId| definitions[v.0 as usize].is_some_and(|d| p.ops[d].opcode == Opcode::Call);
    if op.opcode == Opcode::Input || op.opcode == Opcode::Call {
        let v = *op.results.first()?;
        let split = p.mesh.axes().find(|a| matches!(p.ty(v).layout.on(*a), AxisLayout::Shard(_)))?;
        let message = format!(
            "{} is written sharded over {split}; what a call brings is whole on every rank",
            say::value(p, v)
        );
        return Some(
            say::refuse(&T0321, p, i, message).hint("declare it replicated and cut it with take_shard"),
        );
    }
    if matches!(op.opcode.row().kind, Kind::Collective | Kind::Sink)
        && let Some(v) = op.operands.iter().find(|v| is_call(**v))
    {
        let message = format!("call scalar {} is an operand of {}", say::value(p, *v), op.opcode.name());
        return Some(say::refuse(&T0323, p, i, message));
    }
    // A matmul's bias is a vector of the model, and its scales go with its operands.
    let keyed = op.keyed.iter().filter(|_| op.opcode != Opcode::Matmul);
    if let Some((key, v)) = keyed.into_iter().find(|(_, v)| !is_call(*v)) {
        let message = format!("`{key}` is {}, which is not a call scalar", say::value(p, *v));
        return Some(say::refuse(&T0323, p, i, message));
    }
    None
}
