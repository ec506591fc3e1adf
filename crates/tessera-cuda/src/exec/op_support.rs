//! Decides which ops the kernels of this backend support. Unsupported programs are rejected before
//! anything runs.

use tessera_ir::{DType, Op, Opcode, Program, ValueId};
use tessera_mesh::AxisLayout;

/// Explains why no kernel here supports an op; `None` if it is supported.
pub(super) fn unsupported_reason(p: &Program, op: &Op) -> Option<String> {
    let ty = |v: &ValueId| p.type_of(*v);
    let all = || op.operands.iter().chain(&op.results);
    let has_supported_dtype = |v: &ValueId| {
        let t = ty(v);
        t.is_token() || t.shape.is_empty() || matches!(t.dtype, DType::F32 | DType::Bf16 | DType::E4m3)
    };
    if let Some(v) = all().find(|v| !has_supported_dtype(v)) {
        return Some(format!("dtype {} (this backend computes in f32, bf16 and e4m3)", ty(v).dtype));
    }
    let uses_bf16 = || all().any(|v| ty(v).dtype == DType::Bf16);
    let reject_bf16 = |what: &str| uses_bf16().then(|| format!("{what} in bf16"));
    let first_sharded_by_columns = || {
        let t = ty(&op.operands[0]);
        p.mesh.active_axes().any(|a| matches!(t.layout.on_axis(a), AxisLayout::Shard(s) if s.dim != 0))
    };
    if op.int_attr("segments").unwrap_or(1) > 1 {
        return Some("segmented sums: on GPUs plan with --numerics standard".into());
    }
    match op.opcode {
        Opcode::Input | Opcode::Output if uses_bf16() => Some("inputs and outputs other than f32".into()),
        Opcode::Renoise if first_sharded_by_columns() => Some("noise for a value sharded by columns".into()),
        Opcode::Renoise | Opcode::ToX0 | Opcode::TimeEmbed | Opcode::Modulation | Opcode::Bmm => {
            reject_bf16(op.opcode.name())
        }
        Opcode::SpaceTimeToDepth | Opcode::DepthToSpaceTime if uses_bf16() => reject_bf16("pixels"),
        Opcode::SpaceTimeToDepth | Opcode::DepthToSpaceTime if op.ints_attr("patch") != Some(&[2, 2]) => {
            Some("a patch other than 2 × 2".into())
        }
        Opcode::Softmax
            if op.int_attr("dim").is_some_and(|d| d + 1 != ty(&op.operands[0]).shape.len() as i64) =>
        {
            Some("a softmax over a dim other than the last".into())
        }
        Opcode::Attention if op.int_attr("head_dim").unwrap_or(0) > MAX_HEAD_DIM => {
            Some(format!("heads of {} elements, above {MAX_HEAD_DIM}", op.int_attr("head_dim").unwrap_or(0)))
        }
        Opcode::Attention if op.keyed_operand("bias").is_some() && op.ints_attr("bias_rows").is_none() => {
            Some("a bias without bias_rows".into())
        }
        Opcode::MoeRoute => Some("MoE routing as one op".into()),
        Opcode::AllToAll if ty(&op.operands[0]).shape.len() > 2 => {
            Some(format!("an all-to-all of a tensor of {} dims", ty(&op.operands[0]).shape.len()))
        }
        // Issues of a batch are in flight together. A blocking op would delay the rest of its batch
        // and could deadlock.
        Opcode::Send | Opcode::Recv if op.attrs.contains_key("batch") && !op.issue => {
            Some("a blocking send or receive in a batch".into())
        }
        _ => None,
    }
}

/// Maximum head size, in elements, of the fallback attention kernel.
const MAX_HEAD_DIM: i64 = 512;
