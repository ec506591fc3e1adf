//! Redistributes a tensor from any layout to any other: the moves over single axes, the ops that
//! carry them out, and the bytes that travel.

use tessera_ir::{Attr, Builder, Opcode, ValueId};
use tessera_mesh::{Axis, AxisLayout, Coord, Layout, Mesh, Reduction, Shard};

/// Adds the ops that convert a value to another layout, each collective at once on the first stream.
/// Returns `None`, and adds nothing, if `to` is partial where the value is not, or shards a dim
/// over two axes.
pub fn emit_redistribution(b: &mut Builder, x: ValueId, to: &Layout) -> Option<ValueId> {
    let (mesh, ty) = (b.program().mesh, b.type_of(x).clone());
    let shape = ty.layout.global_shape(&ty.shape, &mesh);
    let moves = plan_moves(&mesh, &shape, ty.layout, *to)?;
    let ops = moves.iter().flat_map(|m| m.to_ops(&mesh, &shape));
    Some(ops.fold(x, |x, op| op.set_attrs(b).add_op(op.opcode, &[x])))
}

/// The last dim whose shards an all-to-all exchanges. No backend exchanges those of later dims, so
/// these are gathered, and a shard of another dim is taken.
const LAST_EXCHANGED_DIM: usize = 1;

/// A change of a tensor's layout on one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AxisMove {
    /// Each rank keeps its part of a replicated value.
    TakeShard { axis: Axis, shard: Shard },
    /// Every rank receives all shards.
    Gather { axis: Axis, shard: Shard },
    /// The shards of one dim become shards of another.
    AllToAll { axis: Axis, from: Shard, to: Shard },
    /// Every rank receives the sum of all terms.
    Reduce { axis: Axis, reduction: Reduction, subgroup_size: Option<u32> },
    /// Each rank receives its part of the sum of all terms.
    ReduceScatter { axis: Axis, reduction: Reduction, shard: Shard },
}

/// An op that takes one value to the next.
#[derive(Debug, Clone)]
pub(super) struct MoveOp {
    pub(super) opcode: Opcode,
    pub(super) axis: Axis,
    attrs: Vec<(&'static str, Attr)>,
}

/// Returns the moves that convert a tensor of this global shape, in order; `None` if no
/// moves do.
///
/// Moves that make the value smaller come first, so that the later ones move fewer bytes.
pub(super) fn plan_moves(mesh: &Mesh, shape: &[u64], from: Layout, to: Layout) -> Option<Vec<AxisMove>> {
    let shards_twice = |l: &Layout| {
        let dims: Vec<usize> = mesh.active_axes().filter_map(|a| sharded_dim(l.on_axis(a))).collect();
        dims.iter().enumerate().any(|(i, d)| dims[..i].contains(d) || *d >= shape.len())
    };
    if shards_twice(&from) || shards_twice(&to) {
        return None;
    }
    let (mut at, mut moves) = (from, Vec::new());
    while mesh.active_axes().any(|a| at.on_axis(a) != to.on_axis(a)) {
        let next = next_move(mesh, at, to)?;
        at = at.with_axis(next.axis(), next.result());
        moves.push(next);
    }
    Some(moves)
}

/// Returns the bytes that a rank receives in these moves, of elements of this size. Counts the rank
/// with the largest shards.
pub(super) fn moved_bytes(
    mesh: &Mesh,
    shape: &[u64],
    from: Layout,
    moves: &[AxisMove],
    element_bytes: u64,
) -> u64 {
    let mut at = from;
    let mut elements = 0u64;
    for m in moves {
        let before = local_elements(mesh, shape, &at);
        at = at.with_axis(m.axis(), m.result());
        let after = local_elements(mesh, shape, &at);
        let parts = m.group_size(mesh);
        let of_others = |n: u64| n - n / parts;
        elements = elements.saturating_add(match m {
            AxisMove::TakeShard { .. } => 0,
            AxisMove::Gather { .. } => of_others(after),
            AxisMove::AllToAll { .. } | AxisMove::ReduceScatter { .. } => of_others(before),
            AxisMove::Reduce { .. } => of_others(before).saturating_mul(2),
        });
    }
    elements.saturating_mul(element_bytes)
}

/// Returns the number of elements on the rank with the largest shards.
pub(super) fn local_elements(mesh: &Mesh, shape: &[u64], layout: &Layout) -> u64 {
    layout.local_shape(shape, mesh, Coord::default()).into_iter().fold(1, u64::saturating_mul)
}

/// Returns the dim that a layout shards on one axis.
pub(super) fn sharded_dim(on: AxisLayout) -> Option<usize> {
    match on {
        AxisLayout::Shard(s) => Some(s.dim),
        AxisLayout::Replicated | AxisLayout::Partial { .. } => None,
    }
}

fn next_move(mesh: &Mesh, at: Layout, to: Layout) -> Option<AxisMove> {
    let open = || mesh.active_axes().filter(|a| at.on_axis(*a) != to.on_axis(*a));
    let is_free = |axis: Axis, dim: usize| {
        mesh.active_axes().all(|a| a == axis || sharded_dim(at.on_axis(a)) != Some(dim))
    };
    let take_shard = open().find_map(|axis| match (at.on_axis(axis), to.on_axis(axis)) {
        (AxisLayout::Replicated, AxisLayout::Shard(shard)) if is_free(axis, shard.dim) => {
            Some(AxisMove::TakeShard { axis, shard })
        }
        _ => None,
    });
    let reduce = || {
        open().find_map(|axis| match (at.on_axis(axis), to.on_axis(axis)) {
            // A value that is still a partial sum cannot be padded.
            (AxisLayout::Partial { reduction, subgroup_size }, AxisLayout::Shard(shard))
                if shard.uneven.is_none()
                    && shard.subgroup_size == subgroup_size
                    && is_free(axis, shard.dim) =>
            {
                Some(AxisMove::ReduceScatter { axis, reduction, shard })
            }
            (AxisLayout::Partial { reduction, subgroup_size }, _) => {
                Some(AxisMove::Reduce { axis, reduction, subgroup_size })
            }
            _ => None,
        })
    };
    let exchange = || {
        open().find_map(|axis| match (at.on_axis(axis), to.on_axis(axis)) {
            (AxisLayout::Shard(from), AxisLayout::Shard(to))
                if from.dim != to.dim
                    && from.dim.max(to.dim) <= LAST_EXCHANGED_DIM
                    && from.subgroup_size == to.subgroup_size
                    && is_free(axis, to.dim) =>
            {
                Some(AxisMove::AllToAll { axis, from, to })
            }
            _ => None,
        })
    };
    let gather = |is_last_resort: bool| {
        open().find_map(|axis| match (at.on_axis(axis), to.on_axis(axis)) {
            (AxisLayout::Shard(shard), wanted) if is_last_resort || wanted == AxisLayout::Replicated => {
                Some(AxisMove::Gather { axis, shard })
            }
            _ => None,
        })
    };
    // If axes wait for each other's dims, or only the unit of a shard changes, one is gathered.
    take_shard.or_else(reduce).or_else(exchange).or_else(|| gather(false)).or_else(|| gather(true))
}

impl AxisMove {
    fn axis(&self) -> Axis {
        match *self {
            AxisMove::TakeShard { axis, .. }
            | AxisMove::Gather { axis, .. }
            | AxisMove::AllToAll { axis, .. }
            | AxisMove::Reduce { axis, .. }
            | AxisMove::ReduceScatter { axis, .. } => axis,
        }
    }

    /// Returns the layout on the axis after the move.
    fn result(&self) -> AxisLayout {
        match *self {
            AxisMove::TakeShard { shard, .. } | AxisMove::ReduceScatter { shard, .. } => {
                AxisLayout::Shard(shard)
            }
            AxisMove::AllToAll { to, .. } => AxisLayout::Shard(to),
            AxisMove::Gather { .. } | AxisMove::Reduce { .. } => AxisLayout::Replicated,
        }
    }

    fn subgroup_size(&self) -> Option<u32> {
        match *self {
            AxisMove::TakeShard { shard, .. }
            | AxisMove::Gather { shard, .. }
            | AxisMove::ReduceScatter { shard, .. } => shard.subgroup_size,
            AxisMove::AllToAll { to, .. } => to.subgroup_size,
            AxisMove::Reduce { subgroup_size, .. } => subgroup_size,
        }
    }

    fn group_size(&self, mesh: &Mesh) -> u64 {
        u64::from(self.subgroup_size().unwrap_or(mesh.axis_size(self.axis())).max(1))
    }

    /// Returns the ops of the move, for a tensor of this global shape. Uneven shards are padded to
    /// equal counts before they are gathered, as NCCL requires.
    pub(super) fn to_ops(self, mesh: &Mesh, shape: &[u64]) -> Vec<MoveOp> {
        let parts = self.group_size(mesh);
        let op = |opcode: Opcode, attrs: &[(&'static str, Attr)]| self.to_op(opcode, attrs);
        let dim = |s: Shard| ("dim", Attr::from(s.dim as u64));
        let unit = |s: Shard| ("unit", Attr::from(s.uneven.map_or(1, |u| u.unit)));
        match self {
            AxisMove::TakeShard { shard, .. } => vec![op(Opcode::TakeShard, &[dim(shard), unit(shard)])],
            AxisMove::Gather { shard, .. } => match shard.uneven {
                None => vec![op(Opcode::AllGather, &[dim(shard)])],
                Some(u) => {
                    let rows = (u.extent / u.unit).div_ceil(parts) * u.unit;
                    let extent = ("extent", Attr::from(shape[shard.dim]));
                    let mut compact = vec![extent, ("parts", Attr::from(parts)), unit(shard)];
                    if shard.dim > 0 {
                        compact.push(dim(shard));
                    }
                    vec![
                        op(Opcode::Pad, &[dim(shard), ("rows", Attr::from(rows))]),
                        op(Opcode::AllGather, &[dim(shard)]),
                        MoveOp { opcode: Opcode::Compact, axis: self.axis(), attrs: compact },
                    ]
                }
            },
            AxisMove::AllToAll { from, to, .. } => {
                let dims = [("concat", Attr::from(from.dim as u64)), ("split", Attr::from(to.dim as u64))];
                vec![op(Opcode::AllToAll, &[dims[0].clone(), dims[1].clone(), unit(to)])]
            }
            AxisMove::Reduce { reduction, .. } => {
                vec![op(Opcode::AllReduce, &[("reduction", Attr::from(reduction.name()))])]
            }
            AxisMove::ReduceScatter { reduction, shard, .. } => {
                let reduction = ("reduction", Attr::from(reduction.name()));
                vec![op(Opcode::ReduceScatter, &[dim(shard), reduction])]
            }
        }
    }

    /// Returns an op over the groups of the move.
    fn to_op(self, opcode: Opcode, attrs: &[(&'static str, Attr)]) -> MoveOp {
        let mut attrs = attrs.to_vec();
        attrs.push(("axis", Attr::from(self.axis().name())));
        if let Some(size) = self.subgroup_size() {
            attrs.push(("group_size", Attr::from(u64::from(size))));
        }
        // A unit of one element is the default.
        attrs.retain(|a| *a != ("unit", Attr::Int(1)));
        MoveOp { opcode, axis: self.axis(), attrs }
    }
}

impl MoveOp {
    /// Gives the next op of a builder the attributes of this one.
    pub(super) fn set_attrs<'b>(&self, b: &'b mut Builder) -> &'b mut Builder {
        for (name, value) in &self.attrs {
            b.set_attr(name, value.clone());
        }
        b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moves(shape: &[u64], from: &[(Axis, AxisLayout)], to: &[(Axis, AxisLayout)]) -> Vec<&'static str> {
        let mesh: Mesh = "tp=2, ep=3".parse().unwrap();
        let layout = |of: &[(Axis, AxisLayout)]| {
            of.iter().fold(Layout::REPLICATED, |l, (axis, on)| l.with_axis(*axis, *on))
        };
        let moves = plan_moves(&mesh, shape, layout(from), layout(to)).unwrap();
        moves.iter().flat_map(|m| m.to_ops(&mesh, shape)).map(|op| op.opcode.name()).collect()
    }

    fn shard(shape: &[u64], dim: usize, parts: u32) -> AxisLayout {
        AxisLayout::Shard(Shard::new(dim, shape[dim], 1, parts).unwrap())
    }

    #[test]
    fn moves_that_make_a_value_smaller_come_first() {
        let shape = [6, 12, 7];
        let [rows, columns] = [0, 1].map(|dim| shard(&shape, dim, 2));
        let sum = AxisLayout::new_partial(Reduction::Sum);
        assert_eq!(moves(&shape, &[(Axis::Tp, sum)], &[(Axis::Tp, rows)]), ["reduce_scatter"]);
        let uneven = shard(&shape, 2, 2);
        assert_eq!(moves(&shape, &[(Axis::Tp, sum)], &[(Axis::Tp, uneven)]), ["all_reduce", "take_shard"]);
        let (from, to) = ([(Axis::Tp, sum)], [(Axis::Ep, shard(&shape, 0, 3))]);
        assert_eq!(moves(&shape, &from, &to), ["take_shard", "all_reduce"]);
        assert_eq!(moves(&shape, &[(Axis::Tp, rows)], &[(Axis::Tp, columns)]), ["all_to_all"]);
        // No backend exchanges shards of the last dim of three.
        let gathered = ["pad", "all_gather", "compact", "take_shard"];
        assert_eq!(moves(&shape, &[(Axis::Tp, uneven)], &[(Axis::Tp, columns)]), gathered);
    }

    #[test]
    fn axes_that_wait_for_each_other_are_gathered_one_at_a_time() {
        let shape = [6, 12];
        let swap = |a: usize, b: usize| [(Axis::Tp, shard(&shape, a, 2)), (Axis::Ep, shard(&shape, b, 3))];
        assert_eq!(moves(&shape, &swap(0, 1), &swap(1, 0)), ["all_gather", "all_to_all", "take_shard"]);
        assert_eq!(moves(&shape, &swap(0, 1), &swap(0, 1)), Vec::<&str>::new());
    }

    #[test]
    fn a_value_does_not_become_partial_and_no_dim_is_sharded_twice() {
        let mesh: Mesh = "tp=2, ep=2".parse().unwrap();
        let sum = Layout::REPLICATED.with_axis(Axis::Tp, AxisLayout::new_partial(Reduction::Sum));
        assert_eq!(plan_moves(&mesh, &[4], Layout::REPLICATED, sum), None);
        let half = shard(&[4], 0, 2);
        let twice = Layout::REPLICATED.with_axis(Axis::Tp, half).with_axis(Axis::Ep, half);
        assert_eq!(plan_moves(&mesh, &[4], Layout::REPLICATED, twice), None);
        assert_eq!(plan_moves(&mesh, &[], Layout::REPLICATED, twice), None);
    }

    #[test]
    fn bytes_are_those_that_the_other_ranks_hold() {
        let mesh: Mesh = "tp=4".parse().unwrap();
        let shape = [8, 12];
        let on = |l| Layout::REPLICATED.with_axis(Axis::Tp, l);
        let sum = on(AxisLayout::new_partial(Reduction::Sum));
        let [rows, columns] = [0, 1].map(|dim| on(shard(&shape, dim, 4)));
        let bytes =
            |from, to| moved_bytes(&mesh, &shape, from, &plan_moves(&mesh, &shape, from, to).unwrap(), 4);
        assert_eq!(bytes(rows, Layout::REPLICATED), 4 * 72);
        assert_eq!(bytes(rows, columns), 4 * 18);
        assert_eq!(bytes(sum, rows), 4 * 72);
        assert_eq!(bytes(sum, Layout::REPLICATED), 4 * 144);
        assert_eq!(bytes(Layout::REPLICATED, rows), 0);
    }
}
