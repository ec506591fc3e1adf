//! An op against its row of the table.

use super::{Rule, T0215, refuse};
use crate::parse::T0203;
use crate::{DType, Dialect, HINTS, Kind, Op, Opcode, Program};

/// Compares an op with its row of the table: operands, constants, name, buffer and what kind of value goes where.
pub(super) fn well_formed(program: &Program, op: &Op) -> Rule<()> {
    let row = op.opcode.row();
    let (least, most) = row.operands;
    let n = op.operands.len();
    if n < least || n > most {
        let want = if least == most { least.to_string() } else { format!("{least} to {most}") };
        return refuse(&T0203, format!("{n} operands, takes {want}"));
    }
    let stem = |k: &&'static str| k.strip_suffix('?').unwrap_or(k);
    for (i, (k, _)) in op.keyed.iter().enumerate() {
        if !row.keyed.iter().any(|known| stem(known) == *k) {
            return refuse(&T0203, format!("has no operand `{k}`"));
        }
        if op.keyed[..i].iter().any(|(other, _)| other == k) {
            return refuse(&T0203, format!("operand `{k}` is given twice"));
        }
    }
    if let Some(k) = row.keyed.iter().find(|k| !k.ends_with('?') && op.key(k).is_none()) {
        return refuse(&T0203, format!("operand `{k}=%…` is missing"));
    }
    for a in op.attrs.keys() {
        if !row.attrs.iter().any(|known| stem(known) == a) && !HINTS.contains(&a.as_str()) {
            let known: Vec<&str> = row.attrs.iter().map(|a| a.trim_end_matches('?')).collect();
            let near = tessera_base::nearest(a, known.iter().copied());
            let near = near.map_or(format!("its constants: {}", tessera_base::choices(&known)), |n| {
                format!("did you mean `{n}`?")
            });
            return refuse(&T0203, format!("has no constant `{a}`; {near}"));
        }
    }
    if let Some(a) = row.attrs.iter().find(|a| !a.ends_with('?') && !op.attrs.contains_key(**a)) {
        return refuse(&T0215, format!("constant `{a}` is missing"));
    }
    let named = matches!(op.opcode, Opcode::Input | Opcode::Call | Opcode::Weight | Opcode::Output);
    if named != op.name.is_some() {
        return refuse(&T0203, if named { "needs a name in quotes" } else { "takes no name" });
    }
    if op.opcode.takes_buffer() != op.buffer.is_some() {
        return refuse(
            &T0203,
            if op.buffer.is_some() { "takes no buffer" } else { "needs a buffer (`@name`)" },
        );
    }
    if op.issue && row.kind != Kind::Collective {
        return refuse(&T0203, "is no collective: it cannot be issued");
    }
    if row.kind == Kind::Collective && program.dialect == Dialect::Logical {
        return refuse(&T0203, "is a collective: a logical program has no ranks");
    }
    let dtype = |v: &crate::ValueId| program.ty(*v).dtype;
    if let Some(v) = op.after.iter().find(|v| dtype(v) != DType::Event) {
        return refuse(&T0203, format!("comes after %{}, which is no event", program.value(*v).name));
    }
    let ticket = op.opcode == Opcode::Wait;
    for v in &op.operands {
        let d = dtype(v);
        if ticket != (d == DType::Ticket) || d == DType::Event {
            return refuse(&T0203, format!("operand %{} is {d}", program.value(*v).name));
        }
        if row.kind == Kind::Compute && d == DType::I64 {
            let why = match program.ty(*v).shape[..] {
                [] => "call scalars go to keyed operands",
                _ => "whole numbers are handed on, not computed with or cut",
            };
            return refuse(&T0203, format!("operand %{} is {d}: {why}", program.value(*v).name));
        }
    }
    for (k, v) in &op.keyed {
        let t = program.ty(*v);
        // A matmul's bias and scales are vectors, checked by its rule; every other keyed operand is a scalar of the call.
        let fits = match (*k, op.opcode) {
            ("bias" | "x_scale" | "w_scale", Opcode::Matmul) => is_float(t.dtype),
            ("bias" | "sigma", _) => is_float(t.dtype) && t.shape.is_empty() && t.layout.is_replicated(),
            _ => t.dtype == DType::I64 && t.shape.is_empty() && t.layout.is_replicated(),
        };
        if !fits {
            let want = match *k {
                "bias" | "sigma" => "a float scalar",
                "x_scale" | "w_scale" => "a vector of f32",
                _ => "an i64 scalar",
            };
            return refuse(&T0203, format!("`{k}` is {}, must be {want}", t.display(&program.mesh)));
        }
    }
    Ok(())
}

fn is_float(d: DType) -> bool {
    !matches!(d, DType::I64 | DType::Ticket | DType::Event)
}
