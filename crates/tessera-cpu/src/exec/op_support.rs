//! The check that the kernels support every op of a program, made before anything runs.

use tessera_ir::{DType, Op, OpView, Program, ValueId};
use tessera_mesh::AxisLayout;

use crate::kernels::MAX_HEAD_DIM;

/// Returns the view of an op.
///
/// # Errors
/// The property of the op that the kernels here do not support, or why the op has no view.
pub(super) fn read_supported(p: &Program, op: &Op) -> Result<OpView, String> {
    let is_supported_dtype = |v: &ValueId| {
        let t = p.type_of(*v);
        t.is_token() || t.dtype == DType::F32 || t.shape.is_empty()
    };
    if let Some(v) = op.operands.iter().chain(&op.results).find(|v| !is_supported_dtype(v)) {
        return Err(format!("dtype {} (this backend computes in f32)", p.type_of(*v).dtype));
    }
    let view = op.view().map_err(|e| e.message)?;
    match unsupported_reason(p, op, &view) {
        Some(why) => Err(why),
        None => Ok(view),
    }
}

fn unsupported_reason(p: &Program, op: &Op, view: &OpView) -> Option<String> {
    use OpView as V;
    let sharded_by_columns = |v: ValueId| {
        let layout = &p.type_of(v).layout;
        p.mesh.active_axes().any(|a| matches!(layout.on_axis(a), AxisLayout::Shard(s) if s.dim != 0))
    };
    match view {
        V::Renoise(v) => sharded_by_columns(v.x).then(|| "noise for a value sharded by columns".into()),
        V::Matmul(v) => (!matches!(v.segments, 1 | 2 | 4 | 8))
            .then(|| "a number of segments other than 1, 2, 4 or 8".into()),
        V::Softmax(v) => v
            .dim
            .is_some_and(|dim| dim + 1 != p.type_of(v.x).shape.len())
            .then(|| "a softmax over a dim other than the last".into()),
        V::Cast(_) | V::Quantize(_) => Some("another dtype (this backend computes in f32)".into()),
        V::MoeRoute(_) => Some("MoE routing as one op".into()),
        V::Rope(v) => (v.head_dim > MAX_HEAD_DIM as u64)
            .then(|| format!("heads of {} elements, above {MAX_HEAD_DIM}", v.head_dim)),
        V::SpaceTimeToDepth(v) => unsupported_patch(v.patch),
        V::DepthToSpaceTime(v) => unsupported_patch(v.patch),
        V::Send(v) => unsupported_batch(op, v.batch),
        V::Recv(v) => unsupported_batch(op, v.batch),
        V::AllToAll(v) => {
            let dims = p.type_of(v.x).shape.len();
            (dims > 2).then(|| format!("sharding of a tensor of {dims} dims"))
        }
        #[rustfmt::skip]
        V::Input(_) | V::Call(_) | V::Weight(_) | V::Output(_) | V::CacheRead(_) | V::CacheWrite(_)
        | V::BiasAct(_) | V::Add(_) | V::Silu(_) | V::LayerNorm(_)
        | V::Modulation(_) | V::NormModulate(_) | V::GateResidual(_) | V::RmsNorm(_) | V::RowSquareSum(_)
        | V::RmsScale(_) | V::Attention(_) | V::Bmm(_) | V::TimeEmbed(_) | V::ToX0(_) | V::TakeRows(_)
        | V::TakeShard(_) | V::Pad(_) | V::Compact(_) | V::AllReduce(_) | V::AllGather(_)
        | V::ReduceScatter(_) | V::Broadcast(_) | V::Wait(_)
        | V::EventRecord(_) => None,
    }
}

fn unsupported_patch(patch: [u64; 2]) -> Option<String> {
    (patch != [2, 2]).then(|| "a patch other than 2 × 2".into())
}

/// An issue op does not wait, so the transfers of a batch are in flight together; a blocking one
/// would hold up the rest.
fn unsupported_batch(op: &Op, batch: Option<i64>) -> Option<String> {
    let blocks = batch.is_some() && !op.issue;
    blocks.then(|| "a blocking op in a batch of sends and receives that form one launch".into())
}
