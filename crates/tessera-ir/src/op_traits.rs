//! What planner and cost model need to know of an op, beyond its rule. Each row of the op table states
//! it, so that an ordinary op needs no arm in the passes of the planner.

use crate::DType;

/// Properties of an op by which planner and cost model treat it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpTraits {
    /// Kind of kernel that executes the op.
    pub kernel: KernelClass,
    /// Floating-point operations.
    pub flops: FlopCount,
    /// What determines the dtype of the result under a dtype policy.
    pub result_dtype: ResultDtype,
    /// Whether the op works row by row.
    pub rows: RowAccess,
    /// How the planner lowers the op to the programs of roles.
    pub lowering: LoweringRule,
}

/// Kind of kernel that executes an op on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelClass {
    /// No kernel: the op names or orders values.
    None,
    /// One matrix multiply.
    Gemm,
    /// A batch of matrix multiplies, or one per expert.
    GroupedGemm,
    /// Attention.
    Attention,
    /// A memory-bound kernel that takes the time of moving its values.
    Copy,
    /// A memory-bound kernel that also computes.
    Elementwise,
    /// A collective, send or receive.
    Transfer,
}

/// Floating-point operations of an op. A multiply-add counts as two, an exponential or a sine as
/// eight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlopCount {
    /// The op only moves or names values.
    Zero,
    /// This many per element of the results.
    PerResult(u64),
    /// This many per element of the operands.
    PerOperand(u64),
    /// The operands' extents determine the number: see [`crate::op_workload`].
    FromExtents,
}

/// What determines the dtype of an op's result, and of its operands, under a dtype policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResultDtype {
    /// The first operand, whatever its dtype. Further operands are converted to it, except vectors,
    /// which stay f32.
    FirstOperand,
    /// The program states it.
    Stated,
    /// The buffer that the op accesses.
    Buffer,
    /// bf16 under a policy below f32, unless the op computes on call scalars alone.
    Matmul,
    /// The operands have one dtype, and the result is f32.
    Sums,
    /// Operands and result have this dtype.
    Fixed(DType),
}

/// Whether an op may run on a part of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowAccess {
    /// Row i of a result depends on row i of this many leading operands; the other operands are read
    /// whole.
    Aligned(usize),
    /// A row of a result may depend on all rows of an operand.
    Whole,
}

/// How the planner lowers an op of a logical program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoweringRule {
    /// The op works on the rows, or on the shard, that each rank holds.
    ByRow,
    /// The planner has a lowering for this op alone.
    Own,
    /// No strategy can shard the op, and the planner refuses it.
    Refused,
}
