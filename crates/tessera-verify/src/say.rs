//! How the judge names ops, values and ranks.

use tessera_base::{Code, Diagnostic};
use tessera_ir::{Op, Opcode, Program, ValueId};
use tessera_mesh::Rank;

/// An error at an op of a program.
pub(crate) fn refuse(code: &'static Code, p: &Program, op: usize, message: impl Into<String>) -> Diagnostic {
    at_op(Diagnostic::error(code, message), p, op, describe(p, op))
}

/// Adds an op as a place.
pub(crate) fn at_op(d: Diagnostic, p: &Program, op: usize, says: impl Into<String>) -> Diagnostic {
    match p.ops.get(op).and_then(|o| o.span) {
        Some(span) => d.at_span(place(p, op), says, span),
        None => d.at(place(p, op), says),
    }
}

/// `@denoise.fill3 role(stage0) op 12`.
pub(crate) fn place(p: &Program, op: usize) -> String {
    format!("{} op {op}", title(p))
}

/// `@denoise.fill3 role(stage0)`.
pub(crate) fn title(p: &Program) -> String {
    if p.role.is_empty() { format!("@{}", p.name) } else { format!("@{} role({})", p.name, p.role) }
}

/// `%y = all_reduce on stream compute`.
pub(crate) fn describe(p: &Program, op: usize) -> String {
    let Some(o) = p.ops.get(op) else { return "no such op".to_string() };
    let result = o.results.first().and_then(|r| p.values.get(r.0 as usize));
    let left = result.map_or(String::new(), |v| format!("%{} = ", v.name));
    let name = o.name.as_ref().map_or(String::new(), |n| format!(" \"{n}\""));
    if is_given(o) {
        return format!("{left}{}{name}", o.opcode.name());
    }
    let issue = if o.issue { "issue " } else { "" };
    format!("{left}{issue}{}{name} on stream {}", o.opcode.name(), stream(p, o))
}

/// Name of an op's stream.
pub(crate) fn stream<'a>(p: &'a Program, op: &Op) -> &'a str {
    p.streams.get(op.stream.0 as usize).map_or("?", String::as_str)
}

/// `%y`.
pub(crate) fn value(p: &Program, v: ValueId) -> String {
    p.values.get(v.0 as usize).map_or_else(|| format!("value {}", v.0), |x| format!("%{}", x.name))
}

/// [`ranks`] of bare numbers.
pub(crate) fn numbers(members: &[u32]) -> String {
    ranks(&members.iter().copied().map(Rank).collect::<Vec<_>>())
}

/// A group's members, shortened where there are many.
pub(crate) fn ranks(members: &[Rank]) -> String {
    const SHOWN: usize = 8;
    let names: Vec<String> = members.iter().take(SHOWN).map(Rank::to_string).collect();
    match members {
        [one] => format!("rank {one}"),
        _ if members.len() > SHOWN => format!("ranks {}, … ({} ranks)", names.join(", "), members.len()),
        _ => format!("ranks {}", names.join(", ")),
    }
}

/// Number of the sends and receives that an op is issued as one with. Other ops have none.
pub(crate) fn batch(op: &Op) -> Option<i64> {
    if matches!(op.opcode, Opcode::Send | Opcode::Recv) { op.int("batch") } else { None }
}

/// Whether the op brings a value in before the program starts, and so has no place on a stream.
pub(crate) fn is_given(op: &Op) -> bool {
    matches!(op.opcode, Opcode::Input | Opcode::Call | Opcode::Weight)
}
