//! What is refused before anything runs: a program with an op beyond the kernels.

use tessera_ir::{DType, Op, Opcode, Program, ValueId};
use tessera_mesh::AxisLayout;

/// What the kernels here do not cover, in words.
pub(super) fn unsupported(p: &Program, op: &Op) -> Option<String> {
    let ty = |v: &ValueId| p.ty(*v);
    let all = || op.operands.iter().chain(&op.results);
    let numbers = |v: &ValueId| {
        let t = ty(v);
        t.is_token() || t.shape.is_empty() || matches!(t.dtype, DType::F32 | DType::Bf16 | DType::E4m3)
    };
    if let Some(v) = all().find(|v| !numbers(v)) {
        return Some(format!("dtype {} (this backend computes in f32, bf16 and e4m3)", ty(v).dtype));
    }
    let half = || all().any(|v| ty(v).dtype == DType::Bf16);
    let single = |what: &str| half().then(|| format!("{what} in bf16"));
    let first_sharded_by_columns = || {
        let t = ty(&op.operands[0]);
        p.mesh.axes().any(|a| matches!(t.layout.on(a), AxisLayout::Shard(s) if s.dim != 0))
    };
    if op.int("segments").unwrap_or(1) > 1 {
        return Some("sums in segments: on GPUs plan with --numerics standard".into());
    }
    match op.opcode {
        Opcode::Input | Opcode::Output if half() => Some("inputs and outputs other than f32".into()),
        Opcode::Renoise if first_sharded_by_columns() => Some("noise for a value cut by columns".into()),
        Opcode::Renoise | Opcode::ToX0 | Opcode::TimeEmbed | Opcode::Modulation | Opcode::Dot => {
            single(op.opcode.name())
        }
        Opcode::SpaceTimeToDepth | Opcode::DepthToSpaceTime if half() => single("pixels"),
        Opcode::SpaceTimeToDepth | Opcode::DepthToSpaceTime if op.ints("patch") != Some(&[2, 2]) => {
            Some("a patch other than 2 × 2".into())
        }
        Opcode::Softmax if op.int("dim").is_some_and(|d| d + 1 != ty(&op.operands[0]).shape.len() as i64) => {
            Some("a softmax over a dim other than the last".into())
        }
        Opcode::Attention if op.int("head_dim").unwrap_or(0) > MOST_HEAD => {
            Some(format!("heads of {} elements, above {MOST_HEAD}", op.int("head_dim").unwrap_or(0)))
        }
        Opcode::Attention if op.key("bias").is_some() && op.ints("bias_rows").is_none() => {
            Some("a bias for no rows".into())
        }
        Opcode::MoeRoute => Some("the route to experts as one op".into()),
        Opcode::AllToAll if ty(&op.operands[0]).shape.len() > 2 => {
            Some(format!("pieces of a tensor of {} dims", ty(&op.operands[0]).shape.len()))
        }
        // An issue does not wait, so those of a batch are in flight together; one that waits would hold up the rest.
        Opcode::Send | Opcode::Recv if op.attrs.contains_key("batch") && !op.issue => {
            Some("one of several sends and receives in one launch that waits for its end".into())
        }
        _ => None,
    }
}

/// Elements of the largest head that the attention kernel of this crate holds.
const MOST_HEAD: i64 = 512;
