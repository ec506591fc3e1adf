//! Check of an op against its row of the op table.

use super::{RuleResult, rule_error};
use crate::codes::{T0203, T0215};
use crate::view_reader::invalid_attr;
use crate::{DType, Dialect, HINT_ATTRS, Op, OpKind, OpRow, Opcode, Program, ValueId};

/// Checks the operands, attributes, name and buffer of an op against its row of the op table, and
/// the kinds of its operand values.
pub(super) fn check_well_formed(program: &Program, op: &Op) -> RuleResult<()> {
    let row = op.opcode.table_row();
    check_operand_counts(row, op)?;
    check_attrs(row, op)?;
    let named = matches!(op.opcode, Opcode::Input | Opcode::Call | Opcode::Weight | Opcode::Output);
    if named != op.name.is_some() {
        return rule_error(&T0203, if named { "needs a quoted name" } else { "does not take a name" });
    }
    if op.opcode.takes_buffer() != op.buffer.is_some() {
        return rule_error(
            &T0203,
            if op.buffer.is_some() { "does not take a buffer" } else { "needs a buffer (`@name`)" },
        );
    }
    if op.issue && row.kind != OpKind::Collective {
        return rule_error(&T0203, "cannot be issued: it is not a collective");
    }
    if row.kind == OpKind::Collective && program.dialect == Dialect::Logical {
        return rule_error(&T0203, "is a collective: a logical program has no ranks");
    }
    check_operand_dtypes(program, row, op)?;
    check_keyed_types(program, op)
}

/// Checks the number of operands, and that each keyed operand is known and appears once.
fn check_operand_counts(row: &OpRow, op: &Op) -> RuleResult<()> {
    let (least, most) = row.operands;
    let n = op.operands.len();
    if n < least || n > most {
        let want = if least == most { least.to_string() } else { format!("{least} to {most}") };
        return rule_error(&T0203, format!("has {n} operands, expected {want}"));
    }
    for (i, (k, _)) in op.keyed.iter().enumerate() {
        if row.keyed_position(k).is_none() {
            return rule_error(&T0203, format!("has no operand `{k}`"));
        }
        if op.keyed[..i].iter().any(|(other, _)| other == k) {
            return rule_error(&T0203, format!("operand `{k}` appears twice"));
        }
    }
    match row.keyed.iter().find(|k| !k.optional && !op.keyed.iter().any(|(name, _)| *name == k.name)) {
        Some(k) => rule_error(&T0203, format!("operand `{}=%…` is missing", k.name)),
        None => Ok(()),
    }
}

/// Checks that each attribute is known, has a value that the row accepts, and is not missing.
fn check_attrs(row: &OpRow, op: &Op) -> RuleResult<()> {
    for a in op.attrs.keys() {
        if row.find_attr(a).is_none() && !HINT_ATTRS.contains(&a.as_str()) {
            let known: Vec<&str> = row.attrs.iter().map(|a| a.name).collect();
            let near = tessera_base::closest_name(a, known.iter().copied());
            let near = near
                .map_or(format!("its attributes: {}", tessera_base::format_choices(&known)), |n| {
                    format!("did you mean `{n}`?")
                });
            return rule_error(&T0203, format!("has no attribute `{a}`; {near}"));
        }
    }
    for a in row.attrs {
        match op.attrs.get(a.name) {
            None if !a.optional => return rule_error(&T0215, format!("attribute `{}` is missing", a.name)),
            Some(attr) if !(a.accepts)(attr) => {
                return rule_error(&T0215, invalid_attr(a.name, attr, a.expected));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Checks that operands hold data, tickets or events where the op takes them.
fn check_operand_dtypes(program: &Program, row: &OpRow, op: &Op) -> RuleResult<()> {
    let dtype = |v: &ValueId| program.type_of(*v).dtype;
    if let Some(v) = op.after.iter().find(|v| dtype(v) != DType::Event) {
        return rule_error(&T0203, format!("waits for %{}, which is not an event", program.value(*v).name));
    }
    let ticket = op.opcode == Opcode::Wait;
    for v in &op.operands {
        let d = dtype(v);
        if ticket != (d == DType::Ticket) || d == DType::Event {
            return rule_error(&T0203, format!("operand %{} has type {d}", program.value(*v).name));
        }
        if row.kind == OpKind::Compute && d == DType::I64 {
            let why = match program.type_of(*v).shape[..] {
                [] => "call scalars must be keyed operands",
                _ => "integer tensors can be passed on, but not computed with or sharded",
            };
            return rule_error(&T0203, format!("operand %{} has type {d}: {why}", program.value(*v).name));
        }
    }
    Ok(())
}

fn check_keyed_types(program: &Program, op: &Op) -> RuleResult<()> {
    for (k, v) in &op.keyed {
        let t = program.type_of(*v);
        // The rules of a matmul and of a convolution check their vectors and the history; every other
        // keyed operand is a call scalar.
        let fits = match (*k, op.opcode) {
            ("bias" | "x_scale" | "w_scale", Opcode::Matmul)
            | ("bias" | "halo" | "history" | "w_scale", Opcode::Conv3d) => is_float(t.dtype),
            // Their rules check the shapes of what a batch of sequences has per sequence.
            ("start", Opcode::Rotary | Opcode::ExpertDraw | Opcode::ExpertPlaces)
            | ("pages" | "start", Opcode::PagedAttention | Opcode::CacheWrite)
            | ("correction" | "last" | "start", Opcode::TopKExperts)
            | (_, Opcode::Sample) => t.dtype == DType::F32 && t.layout.is_replicated(),
            // Its rule compares it with the experts, whose tokens may be sharded.
            ("order", Opcode::ExpertCombine) => t.dtype == DType::F32,
            ("bias" | "sigma", _) => is_float(t.dtype) && t.shape.is_empty() && t.layout.is_replicated(),
            _ => t.dtype == DType::I64 && t.shape.is_empty() && t.layout.is_replicated(),
        };
        if !fits {
            let want = match *k {
                "bias" | "sigma" => "a float scalar",
                "x_scale" | "w_scale" => "a vector of f32",
                "history" => "frames",
                "pages" => "a replicated matrix of f32",
                "order" => "a matrix of f32",
                "correction" | "last" => "a replicated vector of f32",
                "start" if op.opcode != Opcode::Rope => "a replicated vector of f32",
                _ if op.opcode == Opcode::Sample => "a replicated vector of f32",
                _ => "an i64 scalar",
            };
            return rule_error(
                &T0203,
                format!("`{k}` is {}, but must be {want}", t.display_on(&program.mesh)),
            );
        }
    }
    Ok(())
}

fn is_float(d: DType) -> bool {
    !matches!(d, DType::I64 | DType::Ticket | DType::Event)
}
