//! The arguments of collectives: their signature, and the shards that the members of a group exchange.

use std::ops::Range;

use tessera_ir::{Op, Opcode, Program, Type};
use tessera_mesh::{Axis, AxisLayout};

/// Returns a text that must be equal on every member of a collective.
#[must_use]
pub fn collective_signature(p: &Program, op: &Op) -> String {
    let ty = match (op.opcode, op.operands.first()) {
        (_, Some(v)) => Some(p.type_of(*v)),
        (Opcode::Recv, None) => p.collective_result(op).or(op.results.first().copied()).map(|v| p.type_of(v)),
        _ => None,
    };
    let shape = ty.map(|t| (t.dtype, t.layout.global_shape(&t.shape, &p.mesh)));
    match op.opcode {
        // The communicator already determines the sender and the receiver.
        Opcode::Send | Opcode::Recv => format!("transfer {shape:?}"),
        other => format!("{} {:?} {shape:?} {:?}", other.name(), op.attrs, ty.map(|t| t.layout)),
    }
}

/// Returns the shape as a matrix [rows, columns] for copies of shards of `dim`. For dim 0 or 1, the
/// rows are those of dim 0; for a later dim, the rows span all dims in front of `dim`, and the
/// columns span `dim` and the dims behind it.
#[must_use]
pub fn as_matrix(shape: &[u64], dim: usize) -> (usize, usize) {
    let (rows, columns) = shape.split_at(dim.max(1).min(shape.len()));
    (rows.iter().product::<u64>() as usize, columns.iter().product::<u64>() as usize)
}

/// Returns the shape of the tensor of which a group exchanges shards: each dim is whole in the
/// operand x or in the result y. Axes that have no part in the exchange may shard it further.
#[must_use]
pub fn exchanged_shape(x: &Type, y: &Type) -> Vec<u64> {
    x.shape.iter().zip(&y.shape).map(|(before, after)| *before.max(after)).collect()
}

/// Returns the dim over which a type is sharded on an axis, and the range of every member's shard
/// along that dim in the matrix of [`as_matrix`]. Returns no ranges if the type is not sharded on
/// the axis.
#[must_use]
pub fn shard_ranges(ty: &Type, axis: Axis, members: u32) -> (usize, Vec<Range<usize>>) {
    let AxisLayout::Shard(shard) = ty.layout.on_axis(axis) else { return (0, Vec::new()) };
    let local = ty.shape[shard.dim];
    let run = if shard.dim == 0 { 1 } else { ty.shape[shard.dim + 1..].iter().product::<u64>() as usize };
    let piece = |at: u32| {
        let (start, len) = shard.global_range(local, members, at);
        start as usize * run..(start + len) as usize * run
    };
    (shard.dim, (0..members).map(piece).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_exchanges_shards_of_the_part_that_another_axis_leaves_it() {
        let shard = |dim| AxisLayout::Shard(tessera_mesh::Shard { dim, uneven: None, subgroup_size: None });
        let ty = |shape: [u64; 3], dim| {
            Type::new(tessera_ir::DType::F32, shape)
                .with_axis_layout(Axis::Ep, shard(dim))
                .with_axis_layout(Axis::Tp, shard(2))
        };
        assert_eq!(exchanged_shape(&ty([2, 6, 5], 0), &ty([4, 3, 5], 1)), [4, 6, 5]);
    }
}
