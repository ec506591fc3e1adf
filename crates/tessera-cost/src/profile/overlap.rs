//! What an executor lets run beside its transfers, and how it adds up gradients of weights.

/// How much of a layer's transfers an executor hides.
#[derive(Debug, Clone, PartialEq)]
pub struct Overlap {
    /// Transfers of tp.
    pub tp: Hides,
    /// Rows that a chunk of a product must keep to be worth it.
    pub chunk_rows: f64,
    /// Whether gradients of weights add up within the product that makes them, and not in a pass of their own.
    pub weight_gradient_fused: bool,
    /// Whether weights that ranks share are gathered a layer ahead, and gradients scattered while the next are made.
    pub gathers: bool,
    /// Whether another micro-batch runs beside dispatch and combine.
    pub exchanges: bool,
    /// Where this is known from.
    pub source: String,
}

/// What transfers of tp are hidden behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hides {
    /// Nothing.
    Nothing,
    /// In the backward pass, those around a product by column: behind the product of the other gradient.
    Backward,
    /// Those, and every other behind its own product, cut into chunks.
    Chunks,
}

impl Hides {
    /// All.
    pub const ALL: [Hides; 3] = [Hides::Nothing, Hides::Backward, Hides::Chunks];

    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["nothing", "backward", "chunks"][self as usize]
    }
}
