//! Overlap of an executor's transfers with computation, and its accumulation of weight gradients.

use tessera_base::named_enum;

/// Overlap of a layer's transfers with computation.
#[derive(Debug, Clone, PartialEq)]
pub struct OverlapTraits {
    /// Computation that hides tp transfers; a profile without an `[overlap]` table hides none.
    pub tp: TpOverlap,
    /// Minimum rows of a row chunk; a GEMM of fewer than two such chunks is not split.
    pub chunk_rows: f64,
    /// Whether weight gradients are accumulated in the epilogue of the GEMM that computes them,
    /// without a separate kernel.
    pub fuses_weight_gradient: bool,
    /// Whether sharded weights are gathered one layer ahead, and gradients are scattered while the
    /// next ones are computed.
    pub overlaps_gathers: bool,
    /// Whether another micro-batch overlaps dispatch and combine.
    pub overlaps_dispatch: bool,
    /// Origin of the settings, as free text that each `[overlap]` table of a file must state.
    pub source: String,
}

named_enum! {
    /// The computation that hides tp transfers.
    pub enum TpOverlap {
        /// No computation hides tp transfers: their whole time is exposed.
        Nothing = "nothing",
        /// In the backward pass, transfers around a column-parallel matmul overlap the GEMM of the
        /// other gradient.
        Backward = "backward",
        /// As `Backward`, and every other transfer overlaps its own GEMM, split into row chunks.
        Chunks = "chunks",
    }
}
