//! One rank's copy of a sealed program, changed behind the judge's back.

use tessera_ir::{Attr, DType, Op, Opcode, Program, Value, ValueId};
use tessera_runtime::drill::Fault;

/// How a program is changed.
pub(super) type Change = fn(&mut Program);

/// Which fault changes a program how.
pub(super) const CHANGES: &[(Fault, Change)] = &[
    (Fault::ConditionalCollective, skip_one),
    (Fault::AdHocBroadcast, broadcast_too),
    (Fault::WrongGroup, other_group),
    (Fault::WrongShape, other_shape),
];

/// Leaves out the last collective whose result another one's can stand for.
fn skip_one(p: &mut Program) {
    let made: Vec<(usize, Option<usize>, ValueId)> =
        p.collectives().filter_map(|(at, op)| Some((at, p.wait_of(op), p.given(op)?))).collect();
    let same = |a: ValueId, b: ValueId| a != b && p.ty(a) == p.ty(b);
    let found = made.iter().rev().find_map(|(at, wait, value)| {
        let other = made.iter().find(|(.., other)| same(*value, *other))?;
        Some((*at, *wait, *value, other.2))
    });
    let Some((at, wait, value, other)) = found else { return };
    for op in &mut p.ops {
        let keyed = op.keyed.iter_mut().map(|(_, v)| v);
        op.operands.iter_mut().chain(keyed).filter(|v| **v == value).for_each(|v| *v = other);
    }
    // From the back, so that the first index still holds.
    wait.into_iter().for_each(|wait| drop(p.ops.remove(wait)));
    p.ops.remove(at);
}

/// Issues a broadcast of the first collective's operand before it, and waits for nothing.
fn broadcast_too(p: &mut Program) {
    let Some((at, like)) = p.collectives().next().map(|(at, op)| (at, op.clone())) else { return };
    let ticket = ValueId(u32::try_from(p.values.len()).unwrap_or(u32::MAX));
    let mut ty = p.ty(like.operands[0]).clone();
    ty.dtype = DType::Ticket;
    ty.shape.clear();
    p.values.push(Value { name: "announcement".to_string(), ty });
    let axis = like.attrs.get("axis").cloned().unwrap_or(Attr::Str("tp".to_string()));
    let attrs = [("axis".to_string(), axis), ("root".to_string(), Attr::Int(0))];
    let op = Op {
        opcode: Opcode::Broadcast,
        issue: true,
        attrs: attrs.into_iter().collect(),
        results: vec![ticket],
        after: Vec::new(),
        ..like
    };
    p.ops.insert(at, op);
}

/// Has the first collective run over the world instead of its axis.
fn other_group(p: &mut Program) {
    let at = p.collectives().next().map(|(at, _)| at);
    if let Some(op) = at.map(|at| &mut p.ops[at]) {
        op.attrs.insert("axis".to_string(), Attr::Str("world".to_string()));
    }
}

/// Has the last collective for which there is such a value bring one of another shape, made before it and cut likewise.
fn other_shape(p: &mut Program) {
    let like = |a: ValueId, b: ValueId| {
        let (a, b) = (p.ty(a), p.ty(b));
        let same = (a.dtype, a.shape.len(), &a.layout) == (b.dtype, b.shape.len(), &b.layout);
        same && a.shape != b.shape
    };
    let found = p.collectives().filter_map(|(at, op)| {
        let own = *op.operands.first()?;
        let mut made = p.ops[..at].iter().flat_map(|o| &o.results).copied();
        Some((at, made.rfind(|v| like(own, *v))?))
    });
    if let Some((at, other)) = found.last() {
        p.ops[at].operands[0] = other;
    }
}
