//! Names of kernels, by which ranks compare the results of their probes.

use tessera_ir::{Attr, HINT_ATTRS, Op, Opcode, Program, Type, ValueId};
use tessera_mesh::Mesh;

/// Returns the op with the types of its operands and its attributes, such as
/// `silu(f32[24, 96])` or `matmul(f32[24, 96], f32[96, 96]) {act = gelu}`. An operand that repeats another one is named
/// after it, as in `mul(f32[24, 96], operand 0)`: its probe draws numbers for one of them only.
pub(super) fn name_kernel<'a>(p: &'a Program, op: &Op, maker: &dyn Fn(ValueId) -> Option<&'a Op>) -> String {
    let text = |v: ValueId| {
        let ty = p.type_of(v);
        let is_weight = maker(v).is_some_and(|op| op.opcode == Opcode::Weight);
        let shown = Type::new(ty.dtype, ty.shape.clone()).display_on(&Mesh::default());
        if is_weight { format!("weight {shown}") } else { shown }
    };
    let text_or_first = |i: usize, v: ValueId| match op.operands.iter().position(|other| *other == v) {
        Some(first) if first < i => format!("operand {first}"),
        _ => text(v),
    };
    let keyed = op.keyed.iter().map(|(name, v)| format!("{name}={}", text_or_first(op.operands.len(), *v)));
    let positional = op.operands.iter().enumerate().map(|(i, v)| text_or_first(i, *v));
    let operands: Vec<String> = positional.chain(keyed).collect();
    let attrs: Vec<String> = stated_attrs(op).map(|(name, a)| format!("{name} = {}", attr_text(a))).collect();
    let attrs = if attrs.is_empty() { String::new() } else { format!(" {{{}}}", attrs.join(", ")) };
    format!("{}({}){attrs}", op.opcode.name(), operands.join(", "))
}

pub(super) fn stated_attrs(op: &Op) -> impl Iterator<Item = (&String, &Attr)> {
    op.attrs.iter().filter(|(name, _)| !HINT_ATTRS.contains(&name.as_str()))
}

fn attr_text(a: &Attr) -> String {
    match a {
        Attr::Int(i) => i.to_string(),
        Attr::Float(x) => format!("{x:?}"),
        Attr::Str(s) => s.clone(),
        Attr::Ints(v) => format!("{v:?}"),
        Attr::Bool(b) => b.to_string(),
    }
}
