//! What is refused before anything runs: a program with an op beyond the kernels.

use tessera_ir::{DType, Op, Opcode, Program, ValueId};
use tessera_mesh::AxisLayout;

use crate::kernels::MAX_HEAD;

/// What the kernels here do not cover, in words.
pub(super) fn unsupported(p: &Program, op: &Op) -> Option<String> {
    let floats = |v: &ValueId| {
        let t = p.ty(*v);
        t.is_token() || t.dtype == DType::F32 || t.shape.is_empty()
    };
    if let Some(v) = op.operands.iter().chain(&op.results).find(|v| !floats(v)) {
        return Some(format!("dtype {} (this backend computes in f32)", p.ty(*v).dtype));
    }
    let first_sharded_by_columns = || {
        let t = p.ty(op.operands[0]);
        p.mesh.axes().any(|a| matches!(t.layout.on(a), AxisLayout::Shard(s) if s.dim != 0))
    };
    let deep = |operand: usize| {
        let dims = p.ty(op.operands[operand]).shape.len();
        (dims > 2).then(|| format!("pieces of a tensor of {dims} dims"))
    };
    match op.opcode {
        Opcode::Renoise if first_sharded_by_columns() => Some("noise for a value cut by columns".into()),
        Opcode::Matmul if !matches!(op.int("segments").unwrap_or(1), 1 | 2 | 4 | 8) => {
            Some("segments above 8".into())
        }
        Opcode::Softmax
            if op.int("dim").is_some_and(|d| d + 1 != p.ty(op.operands[0]).shape.len() as i64) =>
        {
            Some("a softmax over a dim other than the last".into())
        }
        Opcode::MoeRoute => Some("the route to experts as one op".into()),
        Opcode::Rope if op.int("head_dim").unwrap_or(0) > MAX_HEAD as i64 => {
            Some(format!("heads of {} elements, above {MAX_HEAD}", op.int("head_dim").unwrap_or(0)))
        }
        Opcode::SpaceTimeToDepth | Opcode::DepthToSpaceTime if op.ints("patch") != Some(&[2, 2]) => {
            Some("a patch other than 2 × 2".into())
        }
        // An issue does not wait, so those of a batch are in flight together; one that waits would hold up the rest.
        Opcode::Send | Opcode::Recv if op.attrs.contains_key("batch") && !op.issue => {
            Some("one of several sends and receives in one launch that waits for its end".into())
        }
        Opcode::AllToAll => deep(0),
        _ => None,
    }
}
