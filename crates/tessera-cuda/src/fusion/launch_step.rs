//! The steps of a program: what the backend enqueues as one.

use std::sync::Arc;

/// One launch, or a few that belong together. Numbers are op indices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LaunchStep {
    /// One op that is not fused with others.
    Single(usize),
    /// A residual add, the norm of the sum, and its quantization to e4m3. At least two of them are
    /// present.
    ResidualNorm { add: Option<usize>, norm: usize, quantize: Option<usize> },
    /// RMS norm (or its scaling half), RoPE, and the write of the rows into a buffer. At least two
    /// of them are present.
    RmsRope { norm_or_scale: Option<usize>, rope: Option<usize>, write: Option<usize> },
    /// A matmul and the residual add of its result, fused as the epilogue.
    GemmResidual { matmul: usize, add: usize },
    /// A convolution and the addition of its result to another value, fused as the epilogue.
    ConvResidual { conv: usize, add: usize },
    /// A norm of the cells of frames, SiLU, and the cast of its result to e4m3.
    NormSilu { norm: usize, silu: usize, cast: Option<usize> },
    /// The write of some of a value's frames into a buffer, without a copy of them in between.
    FramesWrite { take: usize, write: usize },
    /// The addition of a value to the residual stream, the RMS norm of the sum, and casts from and to bf16 around
    /// them. The norm and at least one more are present.
    ResidualRms { widen: Option<usize>, add: Option<usize>, norm: usize, narrow: Option<usize> },
    /// Matmuls of one row with a common operand, and the op that multiplies the results of two if it alone reads them.
    RowMatmuls { matmuls: Vec<usize>, mul: Option<usize> },
    /// Norms, rotations and writes to pages of the heads of up to three values.
    PutHeads(Vec<HeadRows>),
    /// A horizontally fused group, which runs at the position of its first op. Its results lie in
    /// scratch memory.
    Fused(FusedGroup),
}

impl LaunchStep {
    /// Returns the ops of the step. A fused cache write comes last, wherever it is in the program.
    pub(crate) fn all_ops(&self) -> Vec<usize> {
        match *self {
            LaunchStep::Single(i) => vec![i],
            LaunchStep::ResidualNorm { add, norm, quantize } => {
                [add, Some(norm), quantize].into_iter().flatten().collect()
            }
            LaunchStep::RmsRope { norm_or_scale: scale, rope, write } => {
                [scale, rope, write].into_iter().flatten().collect()
            }
            LaunchStep::GemmResidual { matmul, add } => vec![matmul, add],
            LaunchStep::ConvResidual { conv, add } => vec![conv, add],
            LaunchStep::NormSilu { norm, silu, cast } => {
                [Some(norm), Some(silu), cast].into_iter().flatten().collect()
            }
            LaunchStep::FramesWrite { take, write } => vec![take, write],
            LaunchStep::ResidualRms { widen, add, norm, narrow } => {
                [widen, add, Some(norm), narrow].into_iter().flatten().collect()
            }
            LaunchStep::RowMatmuls { ref matmuls, mul } => matmuls.iter().copied().chain(mul).collect(),
            LaunchStep::PutHeads(ref parts) => {
                let mut ops: Vec<usize> = parts.iter().flat_map(HeadRows::ops).collect();
                ops.sort_unstable();
                ops
            }
            LaunchStep::Fused(ref joined) => joined.all_ops(),
        }
    }

    /// Returns the op whose position and stream the step uses.
    pub(crate) fn launch_op(&self) -> usize {
        match self {
            LaunchStep::Fused(joined) => joined.fused_ops()[0],
            _ => self.all_ops().last().copied().unwrap_or(0),
        }
    }
}

/// What happens to the rows of heads of one value; at least one op is present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeadRows {
    pub(crate) norm: Option<usize>,
    pub(crate) rotary: Option<usize>,
    /// A write to the pages of sequences.
    pub(crate) write: Option<usize>,
}

impl HeadRows {
    /// Returns the ops, each of which reads the result of the one before.
    pub(crate) fn ops(&self) -> impl Iterator<Item = usize> + use<> {
        [self.norm, self.rotary, self.write].into_iter().flatten()
    }
}

/// Ops that one launch computes, in program order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FusedGroup {
    Qkv {
        matmuls: Arc<[usize]>,
        /// The cache write that is fused as well: the only reader of one of the matmuls.
        cache_write: Option<usize>,
    },
    Modulations(Arc<[usize]>),
}

impl FusedGroup {
    /// Returns the ops that the launch computes, without the fused cache write.
    pub(crate) fn fused_ops(&self) -> &[usize] {
        match self {
            FusedGroup::Qkv { matmuls: made, .. } | FusedGroup::Modulations(made) => made,
        }
    }

    /// Returns all ops of the launch.
    pub(crate) fn all_ops(&self) -> Vec<usize> {
        let write = match self {
            FusedGroup::Qkv { cache_write: write, .. } => *write,
            FusedGroup::Modulations(_) => None,
        };
        self.fused_ops().iter().copied().chain(write).collect()
    }

    /// Returns whether the results of this group overwrite the scratch memory of `other`.
    pub(crate) fn reuses_scratch_of(&self, other: &FusedGroup) -> bool {
        matches!((self, other), (FusedGroup::Qkv { .. }, FusedGroup::Qkv { .. }))
    }
}
