//! The check that the kernels support every op of a program, made before anything runs.

use tessera_ir::{DType, Op, Opcode, Program, ValueId};
use tessera_mesh::AxisLayout;

use crate::kernels::MAX_HEAD_DIM;

/// Describes the property of an op that the kernels here do not support, or returns `None`.
pub(super) fn unsupported_reason(p: &Program, op: &Op) -> Option<String> {
    let is_supported_dtype = |v: &ValueId| {
        let t = p.type_of(*v);
        t.is_token() || t.dtype == DType::F32 || t.shape.is_empty()
    };
    if let Some(v) = op.operands.iter().chain(&op.results).find(|v| !is_supported_dtype(v)) {
        return Some(format!("dtype {} (this backend computes in f32)", p.type_of(*v).dtype));
    }
    let first_sharded_by_columns = || {
        let t = p.type_of(op.operands[0]);
        p.mesh.active_axes().any(|a| matches!(t.layout.on_axis(a), AxisLayout::Shard(s) if s.dim != 0))
    };
    let multi_dim_sharding = |operand: usize| {
        let dims = p.type_of(op.operands[operand]).shape.len();
        (dims > 2).then(|| format!("sharding of a tensor of {dims} dims"))
    };
    match op.opcode {
        Opcode::Renoise if first_sharded_by_columns() => Some("noise for a value sharded by columns".into()),
        Opcode::Matmul if !matches!(op.int_attr("segments").unwrap_or(1), 1 | 2 | 4 | 8) => {
            Some("a number of segments other than 1, 2, 4 or 8".into())
        }
        Opcode::Softmax
            if op.int_attr("dim").is_some_and(|d| d + 1 != p.type_of(op.operands[0]).shape.len() as i64) =>
        {
            Some("a softmax over a dim other than the last".into())
        }
        Opcode::MoeRoute => Some("MoE routing as one op".into()),
        Opcode::Rope if op.int_attr("head_dim").unwrap_or(0) > MAX_HEAD_DIM as i64 => {
            Some(format!("heads of {} elements, above {MAX_HEAD_DIM}", op.int_attr("head_dim").unwrap_or(0)))
        }
        Opcode::SpaceTimeToDepth | Opcode::DepthToSpaceTime if op.ints_attr("patch") != Some(&[2, 2]) => {
            Some("a patch other than 2 × 2".into())
        }
        // An issue op does not wait, so the transfers of a batch are in flight together; a blocking
        // one would hold up the rest.
        Opcode::Send | Opcode::Recv if op.attrs.contains_key("batch") && !op.issue => {
            Some("a blocking op in a batch of sends and receives that form one launch".into())
        }
        Opcode::AllToAll => multi_dim_sharding(0),
        _ => None,
    }
}
