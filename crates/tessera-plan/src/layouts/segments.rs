//! Sums whose bits do not depend on the mesh: a sum over the last dim is divided into equal segments, which one binary tree
//! adds on every mesh. A rank that has a shard of the dim adds its own segments, and a tree over the ranks the rest.

use tessera_ir::{DType, Op};
use tessera_mesh::{Axis, AxisLayout, Layout, Mesh, Reduction};

/// Largest number of segments of a sum. Kernels have trees of at most so many.
const MAX_SEGMENTS: u64 = 8;

/// Name of the attribute with the number of segments.
const SEGMENTS: &str = "segments";

/// Divides the sum of an op with f32 operands, of these dtypes and global shapes, into segments, if the op offers that. Sums
/// in narrower dtypes stay whole: the terms of ranks would be rounded before they are added.
pub(super) fn divide_sum(op: &mut Op, operands: &[(DType, &[u64])]) {
    let Some(extent) = operands.first().and_then(|(_, shape)| shape.last()) else { return };
    let is_f32 = operands.iter().all(|(dtype, _)| *dtype == DType::F32);
    if is_f32 && op.opcode.table_row().find_attr(SEGMENTS).is_some() {
        // The lowest set bit is the largest power of two that divides the extent.
        let segments = (extent & extent.wrapping_neg()).clamp(1, MAX_SEGMENTS);
        set_segments(op, segments);
    }
}

/// Sets the number of segments of a rank that reads the first operand in a layout. Returns false if they are not whole
/// segments.
pub(super) fn set_local_segments(op: &mut Op, (dim_count, layout): (usize, &Layout), mesh: &Mesh) -> bool {
    let Some(segments) = op.stated_segments() else { return true };
    let on_last_dim = |axis: &Axis| match layout.on_axis(*axis) {
        AxisLayout::Shard(shard) if shard.dim + 1 == dim_count => {
            Some(shard.part_count(mesh.axis_size(*axis)))
        }
        AxisLayout::Shard(_) | AxisLayout::Replicated | AxisLayout::Partial { .. } => None,
    };
    let parts: u64 = mesh.active_axes().filter_map(|axis| on_last_dim(&axis)).map(u64::from).product();
    set_segments(op, segments / parts.max(1));
    segments.is_multiple_of(parts.max(1))
}

/// Returns whether results in these layouts, of operands in these, have the same bits on every mesh: no op adds terms of a
/// sum that is not complete, and every sum of ranks is a tree.
pub(super) fn are_invariant(operands: &[Layout], results: &[Layout], mesh: &Mesh) -> bool {
    let reductions = |layout: &Layout| {
        let layout = *layout;
        mesh.active_axes().filter_map(move |axis| match layout.on_axis(axis) {
            AxisLayout::Partial { reduction, .. } => Some(reduction),
            AxisLayout::Replicated | AxisLayout::Shard(_) => None,
        })
    };
    operands.iter().flat_map(reductions).next().is_none()
        && results.iter().flat_map(reductions).all(|reduction| match reduction {
            Reduction::Tree | Reduction::Max => true,
            Reduction::Sum => false,
        })
}

fn set_segments(op: &mut Op, segments: u64) {
    let segments = i64::try_from(segments).unwrap_or(1);
    op.attrs.insert(SEGMENTS.to_string(), tessera_ir::Attr::Int(segments));
}
