//! Names ops, values and ranks in diagnostics.

use tessera_base::{Code, Diagnostic};
use tessera_ir::{Op, Program, ValueId};
use tessera_mesh::Rank;

/// Creates an error at an op of a program.
pub(crate) fn error_at_op(
    code: &'static Code,
    p: &Program,
    op: usize,
    message: impl Into<String>,
) -> Diagnostic {
    with_op_label(Diagnostic::error(code, message), p, op, describe_op(p, op))
}

/// Adds the label `says` at an op, with the position in the source text if the op has one.
pub(crate) fn with_op_label(d: Diagnostic, p: &Program, op: usize, says: impl Into<String>) -> Diagnostic {
    match p.ops.get(op).and_then(|o| o.span) {
        Some(span) => d.with_span_label(op_location(p, op), says, span),
        None => d.with_label(op_location(p, op), says),
    }
}

/// Returns the location of an op: `@denoise.fill3 role(stage0) op 12`.
pub(crate) fn op_location(p: &Program, op: usize) -> String {
    format!("{} op {op}", program_title(p))
}

/// Returns the title of a program: `@denoise.fill3 role(stage0)`.
pub(crate) fn program_title(p: &Program) -> String {
    if p.role.is_empty() { format!("@{}", p.name) } else { format!("@{} role({})", p.name, p.role) }
}

/// Describes an op: `%y = all_reduce on stream compute`.
pub(crate) fn describe_op(p: &Program, op: usize) -> String {
    let Some(o) = p.ops.get(op) else { return "no such op".to_string() };
    let result = o.results.first().and_then(|r| p.values.get(r.0 as usize));
    let left = result.map_or(String::new(), |v| format!("%{} = ", v.name));
    let name = o.name.as_ref().map_or(String::new(), |n| format!(" \"{n}\""));
    if o.is_source() {
        return format!("{left}{}{name}", o.opcode.name());
    }
    let issue = if o.issue { "issue " } else { "" };
    format!("{left}{issue}{}{name} on stream {}", o.opcode.name(), stream_name(p, o))
}

/// Returns the name of an op's stream, or `?` if the program does not declare the stream.
pub(crate) fn stream_name<'a>(p: &'a Program, op: &Op) -> &'a str {
    p.streams.get(op.stream.0 as usize).map_or("?", String::as_str)
}

/// Returns the name of a value: `%y`.
pub(crate) fn value_name(p: &Program, v: ValueId) -> String {
    p.values.get(v.0 as usize).map_or_else(|| format!("value {}", v.0), |x| format!("%{}", x.name))
}

/// Lists ranks given as numbers, like [`list_ranks`].
pub(crate) fn list_rank_numbers(members: &[u32]) -> String {
    list_ranks(&members.iter().copied().map(Rank).collect::<Vec<_>>())
}

/// Lists ranks, abbreviated beyond eight.
pub(crate) fn list_ranks(members: &[Rank]) -> String {
    const SHOWN: usize = 8;
    let names: Vec<String> = members.iter().take(SHOWN).map(Rank::to_string).collect();
    match members {
        [one] => format!("rank {one}"),
        _ if members.len() > SHOWN => format!("ranks {}, … ({} ranks)", names.join(", "), members.len()),
        _ => format!("ranks {}", names.join(", ")),
    }
}
