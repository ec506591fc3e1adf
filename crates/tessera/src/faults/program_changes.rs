//! Changes one rank's copy of a sealed program after verification.

use tessera_ir::{Attr, DType, Op, Opcode, Program, Value, ValueId};
use tessera_mesh::Axis;
use tessera_runtime::drill::DrillFault;

/// Changes a program in place, or leaves a program without a suitable collective as it is.
pub(super) type ProgramChange = fn(&mut Program);

/// The faults that change a program, each with its function. No other list names them.
pub(super) const CHANGES: &[(DrillFault, ProgramChange)] = &[
    (DrillFault::ConditionalCollective, remove_collective),
    (DrillFault::AdHocBroadcast, insert_broadcast),
    (DrillFault::WrongGroup, change_group),
    (DrillFault::WrongShape, change_shape),
    (DrillFault::OtherKernel, change_epsilon),
    (DrillFault::CapturedOnOne, rename_graph),
    (DrillFault::EditedRouting, change_routing),
    (DrillFault::OtherSeed, change_seed),
];

/// Doubles the epsilon of every normalisation, as a kernel with another constant would.
pub(super) fn change_epsilon(p: &mut Program) {
    for (name, attr) in p.ops.iter_mut().flat_map(|op| &mut op.attrs) {
        if let Attr::Float(eps) = attr
            && name == "eps"
        {
            *eps *= 2.0;
        }
    }
}

/// Makes the last layer with experts score them with the router of the first one. Weights lie in no slot, so the
/// change depends on no other value being in memory still, as the scores of the first layer would.
fn change_routing(p: &mut Program) {
    let defs = p.defining_ops();
    let scoring =
        |gate: &Op| defs[gate.operands[0].0 as usize].filter(|i| p.ops[*i].opcode == Opcode::Matmul);
    let mut routers = p.ops.iter().filter(|op| op.opcode == Opcode::TopKExperts).filter_map(scoring);
    let (Some(first), Some(last)) = (routers.next(), routers.next_back()) else { return };
    p.ops[last].operands[1] = p.ops[first].operands[1];
}

/// Draws experts with another seed, as a rank would that took a seed of its own for tp.
fn change_seed(p: &mut Program) {
    for op in p.ops.iter_mut().filter(|op| op.opcode == Opcode::ExpertDraw) {
        if let Some(Attr::Ints(seeds)) = op.attrs.get_mut("seeds") {
            seeds.iter_mut().for_each(|seed| *seed += 1);
        }
    }
}

/// Removes the last collective whose result can be replaced by the result of another collective.
fn remove_collective(p: &mut Program) {
    let made: Vec<(usize, Option<usize>, ValueId)> = p
        .collective_ops()
        .filter_map(|(at, op)| Some((at, p.find_wait(op), p.collective_result(op)?)))
        .collect();
    let same = |a: ValueId, b: ValueId| a != b && p.type_of(a) == p.type_of(b);
    let found = made.iter().rev().find_map(|(at, wait, value)| {
        let other = made.iter().find(|(.., other)| same(*value, *other))?;
        Some((*at, *wait, *value, other.2))
    });
    let Some((at, wait, value, other)) = found else { return };
    for op in &mut p.ops {
        let keyed = op.keyed.iter_mut().map(|(_, v)| v);
        op.operands.iter_mut().chain(keyed).filter(|v| **v == value).for_each(|v| *v = other);
    }
    // The later op is removed first, so that the index of the earlier op stays valid.
    wait.into_iter().for_each(|wait| drop(p.ops.remove(wait)));
    p.ops.remove(at);
}

/// The last denoise program, which every call runs.
pub(super) const LAST_DENOISE: &str = "denoise.fill3";

/// Captures the last denoise program into another graph than the plan's.
fn rename_graph(p: &mut Program) {
    if p.name == LAST_DENOISE {
        p.capture_into("denoise.own");
    }
}

/// Inserts a broadcast of the first collective's operand before that collective, without a wait.
fn insert_broadcast(p: &mut Program) {
    let Some((at, like)) = p.collective_ops().next().map(|(at, op)| (at, op.clone())) else { return };
    let ticket = ValueId(u32::try_from(p.values.len()).unwrap_or(u32::MAX));
    let mut ty = p.type_of(like.operands[0]).clone();
    ty.dtype = DType::Ticket;
    ty.shape.clear();
    p.values.push(Value { name: "announcement".to_string(), ty });
    let axis = like.mesh_axis().map_or("world", Axis::name);
    let attrs = [("axis".to_string(), Attr::Str(axis.to_string())), ("root".to_string(), Attr::Int(0))];
    // The broadcast is captured with the program: a program captured in part would not load.
    let graph = like.graph_name().map(|name| ("graph".to_string(), Attr::Str(name.to_string())));
    let op = Op {
        opcode: Opcode::Broadcast,
        issue: true,
        attrs: attrs.into_iter().chain(graph).collect(),
        results: vec![ticket],
        after: Vec::new(),
        ..like
    };
    p.ops.insert(at, op);
}

/// Makes the first collective run over the world instead of its axis.
fn change_group(p: &mut Program) {
    let at = p.collective_ops().next().map(|(at, _)| at);
    if let Some(op) = at.map(|at| &mut p.ops[at]) {
        op.attrs.insert("axis".to_string(), Attr::Str("world".to_string()));
    }
}

/// Replaces the operand of a collective by an earlier value of another shape with the same dtype,
/// rank and layout. The last collective with a value of that kind is changed.
fn change_shape(p: &mut Program) {
    let is_compatible = |a: ValueId, b: ValueId| {
        let (a, b) = (p.type_of(a), p.type_of(b));
        let same = (a.dtype, a.shape.len(), &a.layout) == (b.dtype, b.shape.len(), &b.layout);
        same && a.shape != b.shape
    };
    let found = p.collective_ops().filter_map(|(at, op)| {
        let own = *op.operands.first()?;
        let mut made = p.ops[..at].iter().flat_map(|o| &o.results).copied();
        Some((at, made.rfind(|v| is_compatible(own, *v))?))
    });
    if let Some((at, other)) = found.last() {
        p.ops[at].operands[0] = other;
    }
}
