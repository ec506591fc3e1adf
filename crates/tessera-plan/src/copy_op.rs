//! Copies single ops to a new logical program, for transformations that leave most ops as they are.

use tessera_ir::{Builder, Op, Opcode, Program, ValueId};

/// Adds a copy of an op, with other operands and with the attributes that the builder holds after the op's own ones:
/// `map` gives the counterpart of a value. Returns the counterparts of the op's results.
pub(crate) fn copy_op(
    p: &Program,
    op: &Op,
    b: &mut Builder,
    map: impl Fn(ValueId) -> ValueId,
    set_attrs: impl FnOnce(&mut Builder),
) -> Vec<ValueId> {
    let operands: Vec<ValueId> = op.operands.iter().map(|v| map(*v)).collect();
    let name = op.name.as_deref().unwrap_or_default();
    let ty = |r: ValueId| p.type_of(r).clone();
    b.set_attrs(op.attrs.clone());
    set_attrs(b);
    for (k, v) in &op.keyed {
        b.add_keyed(k, map(*v));
    }
    if let Some(r) = op.results.first() {
        b.set_label(&p.value(*r).name);
    }
    match (op.opcode, op.buffer) {
        (Opcode::Weight, _) => vec![b.add_weight(name, ty(op.results[0]))],
        (Opcode::Input, _) => vec![b.add_input(name, ty(op.results[0]))],
        (Opcode::Call, _) => vec![b.add_call_scalar(name, ty(op.results[0]))],
        (Opcode::CacheRead, Some(buffer)) => vec![b.read_buffer(buffer)],
        (Opcode::CacheWrite, Some(buffer)) => {
            b.write_buffer(buffer, operands[0]);
            Vec::new()
        }
        (Opcode::Output, _) => {
            b.add_output(name, operands[0]);
            Vec::new()
        }
        (Opcode::Quantize, _) => b.add_quantize(operands[0]).to_vec(),
        _ => vec![b.add_op(op.opcode, &operands)],
    }
}
