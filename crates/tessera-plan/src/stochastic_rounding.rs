//! Lets the conversions of a logical program round stochastically: a transformation behind that of the dtype policy, and
//! before the program is sharded.
//!
//! Every conversion of a value to bf16 or e4m3 gets the seed and a number of its own, which is its place among the
//! conversions of the program. With the place of an element in the whole tensor they determine how the element is rounded, so
//! no rank, mesh or thread does. A weight is rounded to nearest: it is rounded once and read in every call, so that no mean
//! over draws would make up for its error. Results that a kernel rounds at its end are rounded to nearest too.

use tessera_ir::{Attr, DType, Op, OpView, Opcode, Program, RoundingMode};

/// Rounds all values of a program that are converted to bf16 or e4m3 stochastically, except weights.
pub fn round_stochastically(p: &mut Program, seed: u64) {
    let defs = p.defining_ops();
    let maker = |op: &Op| op.operands.first().and_then(|x| defs[x.0 as usize]).map(|d| &p.ops[d]);
    let is_weight = |op: &Op| {
        let mut from = maker(op);
        while let Some(cast) = from.filter(|op| op.opcode == Opcode::Cast) {
            from = maker(cast);
        }
        from.is_some_and(|op| op.opcode == Opcode::Weight)
    };
    let is_rounded = |op: &Op| match op.view() {
        Ok(OpView::Cast(v)) => {
            let from = p.type_of(v.x).dtype;
            matches!(v.to, DType::Bf16 | DType::E4m3) && v.to.element_bytes() < from.element_bytes()
        }
        Ok(OpView::Quantize(_)) => true,
        _ => false,
    };
    let rounded: Vec<usize> =
        (0..p.ops.len()).filter(|i| is_rounded(&p.ops[*i]) && !is_weight(&p.ops[*i])).collect();
    for (draw, i) in rounded.into_iter().enumerate() {
        let attrs = [
            ("rounding", Attr::Str(RoundingMode::Stochastic.name().to_string())),
            ("seed", Attr::from(seed)),
            ("draw", Attr::from(draw as u64)),
        ];
        p.ops[i].attrs.extend(attrs.map(|(name, attr)| (name.to_string(), attr)));
    }
}
