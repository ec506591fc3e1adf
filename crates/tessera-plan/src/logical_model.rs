//! The planner's input: the logical programs of a model and the sizes that a mapping must fit.

use tessera_ir::Program;

use crate::DecoderPrecision;
use crate::mapping::ModelExtents;

/// The logical programs of a model and the sizes that the planner needs.
#[derive(Debug, Clone)]
pub struct LogicalModel {
    /// Logical programs, one per phase.
    pub phases: Vec<Program>,
    /// Legal calls: a name and its phases in order.
    pub calls: Vec<(String, Vec<String>)>,
    /// Number of attention heads per block that tp may divide: of KV heads, if fewer than query heads.
    pub heads: u64,
    /// Columns of a head.
    pub head_dim: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Width of the feed-forward layer.
    pub ffn_size: u64,
    /// The rows that a block processes in one call: the video tokens of a chunk, or the largest number of text
    /// tokens.
    pub tokens: u64,
    /// Number of transformer blocks, over all stages.
    pub blocks: u64,
    /// Number of experts of a block; 0 for a model without experts.
    pub experts: u64,
    /// Precision of the convolutions that decode pixels.
    pub decoder: DecoderPrecision,
}

impl LogicalModel {
    pub(crate) fn model_extents(&self) -> ModelExtents {
        ModelExtents {
            heads: self.heads,
            hidden_size: self.hidden_size,
            ffn_size: self.ffn_size,
            tokens: self.tokens,
            blocks: self.blocks,
            experts: self.experts,
        }
    }
}
