//! Decides which ops the kernels of this backend support. Unsupported programs are rejected before
//! anything runs.

use tessera_ir::{DType, Op, OpView, Opcode, Program, ValueId};
use tessera_mesh::AxisLayout;

/// Returns the view of an op.
///
/// # Errors
/// The property of the op that the kernels here do not support, or why the op has no view.
pub(super) fn read_supported(p: &Program, op: &Op) -> Result<OpView, String> {
    let has_supported_dtype = |v: &&ValueId| {
        let t = p.type_of(**v);
        t.is_token() || t.shape.is_empty() || matches!(t.dtype, DType::F32 | DType::Bf16 | DType::E4m3)
    };
    if let Some(v) = op.operands.iter().chain(&op.results).find(|v| !has_supported_dtype(v)) {
        return Err(format!("dtype {} (this backend computes in f32, bf16 and e4m3)", p.type_of(*v).dtype));
    }
    let view = op.view().map_err(|e| e.message)?;
    match unsupported_reason(p, op, &view) {
        Some(why) => Err(why),
        None => Ok(view),
    }
}

fn unsupported_reason(p: &Program, op: &Op, view: &OpView) -> Option<String> {
    use OpView as V;
    let uses_bf16 = || op.operands.iter().chain(&op.results).any(|v| p.type_of(*v).dtype == DType::Bf16);
    let unsupported_bf16 = |what: &str| uses_bf16().then(|| format!("{what} in bf16"));
    let sharded_by_columns = |v: ValueId| {
        let layout = &p.type_of(v).layout;
        p.mesh.active_axes().any(|a| matches!(layout.on_axis(a), AxisLayout::Shard(s) if s.dim != 0))
    };
    match view {
        V::Input(_) | V::Output(_) => uses_bf16().then(|| "inputs and outputs other than f32".into()),
        V::Renoise(v) if sharded_by_columns(v.x) => Some("noise for a value sharded by columns".into()),
        V::Renoise(_) | V::ToX0(_) | V::TimeEmbed(_) | V::Modulation(_) | V::Bmm(_) => {
            unsupported_bf16(op.opcode.name())
        }
        V::Matmul(v) => unsupported_segments(v.segments),
        V::RmsNorm(v) => unsupported_segments(v.segments),
        V::RowSquareSum(v) => unsupported_segments(v.segments),
        V::SpaceTimeToDepth(v) => unsupported_bf16("pixels").or_else(|| unsupported_patch(v.patch)),
        V::DepthToSpaceTime(v) => unsupported_bf16("pixels").or_else(|| unsupported_patch(v.patch)),
        V::Softmax(v) => v
            .dim
            .is_some_and(|dim| dim + 1 != p.type_of(v.x).shape.len())
            .then(|| "a softmax over a dim other than the last".into()),
        V::Attention(v) if v.head_dim > MAX_HEAD_DIM => {
            Some(format!("heads of {} elements, above {MAX_HEAD_DIM}", v.head_dim))
        }
        V::Attention(v) => {
            (v.bias.is_some() && v.bias_rows.is_none()).then(|| "a bias without bias_rows".into())
        }
        V::MoeRoute(_) => Some("MoE routing as one op".into()),
        V::AllToAll(v) => {
            let dims = p.type_of(v.x).shape.len();
            (dims > 2).then(|| format!("an all-to-all of a tensor of {dims} dims"))
        }
        V::Send(v) => unsupported_batch(op, v.batch),
        V::Recv(v) => unsupported_batch(op, v.batch),
        #[rustfmt::skip]
        V::Call(_) | V::Weight(_) | V::CacheRead(_) | V::CacheWrite(_) | V::BiasAct(_) | V::Add(_)
        | V::Silu(_) | V::Cast(_) | V::Quantize(_) | V::LayerNorm(_) | V::NormModulate(_)
        | V::GateResidual(_) | V::RmsScale(_) | V::Rope(_) | V::TakeRows(_) | V::TakeShard(_) | V::Pad(_)
        | V::Compact(_) | V::AllReduce(_) | V::AllGather(_) | V::ReduceScatter(_) | V::Broadcast(_) | V::Wait(_) | V::EventRecord(_) => None,
    }
}

fn unsupported_segments(segments: u64) -> Option<String> {
    (segments > 1).then(|| "segmented sums: on GPUs plan with --numerics standard".into())
}

fn unsupported_patch(patch: [u64; 2]) -> Option<String> {
    (patch != [2, 2]).then(|| "a patch other than 2 × 2".into())
}

/// Issues of a batch are in flight together. A blocking op would delay the rest of its batch and
/// could deadlock.
fn unsupported_batch(op: &Op, batch: Option<i64>) -> Option<String> {
    let blocks = batch.is_some() && !op.issue;
    blocks.then(|| "a blocking send or receive in a batch".into())
}

/// Explains why this backend cannot run a program whose ops it supports one by one; `None` if it can.
/// GEMMs share a workspace, and so do cuDNN's attentions, so each must run on one stream.
pub(super) fn unsupported_streams(p: &Program) -> Option<String> {
    [Opcode::Matmul, Opcode::Attention].into_iter().find_map(|opcode| {
        let mut streams = p.ops.iter().filter(|op| op.opcode == opcode).map(|op| op.stream);
        let first = streams.next()?;
        let other = streams.find(|s| *s != first)?;
        let name = |i: u32| p.streams.get(i as usize).map_or("?", String::as_str);
        Some(format!("{} on the streams {} and {}", opcode.name(), name(first.0), name(other.0)))
    })
}

/// Maximum head size, in elements, of the fallback attention kernel.
const MAX_HEAD_DIM: u64 = 512;

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    #[test]
    fn ops_that_share_a_workspace_must_share_a_stream() {
        let reason = |stream: &str| {
            let text = format!(
                "program @p role(a) mesh(tp=2) streams(compute, aside) {{ %x = input : f32[4, 4] \
                 {{tp: replicated}} @compute %a = ttile.matmul %x, %x @compute %b = ttile.matmul %a, %x \
                 @{stream} output \"b\", %b }}"
            );
            let p = parse_all(&text, "test").expect("a program").remove(0);
            unsupported_streams(&p)
        };
        assert_eq!(reason("compute"), None);
        assert_eq!(reason("aside").as_deref(), Some("matmul on the streams compute and aside"));
    }
}
