//! The check that the backend supports every op of a program, made before anything runs.

use tessera_ir::{DType, Op, OpByKind, OpView, Program, ValueId};
use tessera_mesh::AxisLayout;

use super::dispatch::{Kernel, find_kernel};
use crate::kernels::MAX_HEAD_DIM;

/// Returns the view of an op, and the kernel of a compute op.
///
/// # Errors
/// The property of the op that this backend does not support, or why the op has no view.
pub(super) fn read_supported(p: &Program, op: &Op) -> Result<(OpView, Option<Kernel>), String> {
    let is_supported_dtype = |v: &ValueId| {
        let t = p.type_of(*v);
        match t.dtype {
            DType::F32 | DType::Bf16 | DType::E4m3 => true,
            DType::I64 => t.shape.is_empty(),
            DType::F64 | DType::F16 => false,
            DType::Ticket | DType::Event => true,
        }
    };
    if let Some(v) = op.operands.iter().chain(&op.results).find(|v| !is_supported_dtype(v)) {
        return Err(format!("dtype {} (this backend holds f32, bf16 and e4m3)", p.type_of(*v).dtype));
    }
    let view = op.view().map_err(|e| e.message)?;
    if let Some(why) = unsupported_variant(p, op, &view) {
        return Err(why);
    }
    let kernel = match view.by_kind() {
        OpByKind::Compute(compute) => Some(find_kernel(compute)?),
        _ => None,
    };
    Ok((view, kernel))
}

/// Returns why an op is not supported although other ops of its name are.
fn unsupported_variant(p: &Program, op: &Op, view: &OpView) -> Option<String> {
    use OpView as V;
    let sharded_by_columns = |v: ValueId| {
        let layout = &p.type_of(v).layout;
        p.mesh.active_axes().any(|a| matches!(layout.on_axis(a), AxisLayout::Shard(s) if s.dim != 0))
    };
    let (is_unsupported, why) = match view {
        V::Renoise(v) => (sharded_by_columns(v.x), "noise for a value sharded by columns"),
        V::Matmul(v) => {
            (!matches!(v.segments, 1 | 2 | 4 | 8), "a number of segments other than 1, 2, 4 or 8")
        }
        V::Cast(v) => (p.type_of(v.x).dtype == DType::I64, "a cast of an integer"),
        V::Softmax(v) => (
            v.dim.is_some_and(|dim| dim + 1 != p.type_of(v.x).shape.len()),
            "a softmax over a dim other than the last",
        ),
        V::Rope(v) if v.head_dim > MAX_HEAD_DIM as u64 => {
            return Some(format!("heads of {} elements, above {MAX_HEAD_DIM}", v.head_dim));
        }
        V::SpaceTimeToDepth(v) => (v.patch != [2, 2], "a patch other than 2 × 2"),
        V::DepthToSpaceTime(v) => (v.patch != [2, 2], "a patch other than 2 × 2"),
        // The dims behind these two are the columns of a matrix.
        V::AllToAll(v) => {
            (v.split > 1 || v.concat > 1, "an exchange of shards of another dim than the first two")
        }
        // An issue op does not wait, so the transfers of a batch are in flight together; a blocking
        // one would hold up the rest.
        V::Send(_) | V::Recv(_) => (
            op.batch_number().is_some() && !op.issue,
            "a blocking op in a batch of sends and receives that form one launch",
        ),
        _ => return None,
    };
    is_unsupported.then(|| why.to_string())
}
