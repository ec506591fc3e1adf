//! Experts in two tiers of memory: where a backend fetches them, and what it reports of the transfers.

use std::fmt;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;

/// The experts of one weight in host memory, as far as they are this rank's. Several threads may read at once.
pub trait ExpertBank: fmt::Debug + Send + Sync {
    /// Copies consecutive rows of the matrix of an expert, from row `first_row` on, row-major as f32. `expert` counts
    /// from the first of the rank, and `rows` holds whole rows.
    ///
    /// # Errors
    /// Returns why the rows cannot be read.
    fn read_rows(&self, expert: u64, first_row: u64, rows: &mut [f32]) -> Result<(), Diagnostic>;
}

/// What the layers with tiers did in one run of a program, and the transfers that ended since the last report.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExpertReport {
    /// One entry per layer that the program used, in order.
    pub layers: Vec<LayerTransfers>,
    /// The transfers in the order in which they ended. A transfer may end after the run that requested it.
    pub transfers: Vec<ExpertTransfer>,
}

/// The experts that one layer used in one run, and those that it fetched. Experts are numbered as in the whole weight.
///
/// Every number but [`LayerTransfers::waited_ns`] follows from the routing and the policy alone, and not from the speed
/// of the transfers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LayerTransfers {
    /// Number of the layer among those of the program that have tiers.
    pub layer: u64,
    /// Used experts that lay in fast memory, or were on their way there, when the layer began.
    pub hits: u64,
    /// Used experts that nothing had requested when the layer began. The layer waits for their transfer.
    pub stalls: u64,
    /// Experts that were requested ahead of the next use of this layer.
    pub prefetches: u64,
    /// Used experts that had been requested ahead.
    pub prefetches_used: u64,
    /// Experts that had been requested ahead in vain: the layer did not use them, or they were evicted before it began.
    pub prefetches_unused: u64,
    /// Bytes of the matrices of all experts that were requested, in the dtype of the weight.
    pub moved_bytes: u64,
    /// Evicted experts in the order of their evictions.
    pub evicted: Vec<u64>,
    /// Time for which the layer waited for transfers, in nanoseconds.
    pub waited_ns: u64,
}

impl LayerTransfers {
    /// Returns the counts of a layer that has done nothing yet.
    #[must_use]
    pub fn empty(layer: u64) -> LayerTransfers {
        LayerTransfers { layer, ..LayerTransfers::default() }
    }
}

/// A transfer of one matrix of an expert into fast memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertTransfer {
    /// Name of the weight.
    pub weight: String,
    /// Number of the expert in the whole weight.
    pub expert: u64,
    /// Whether it was requested ahead of its use.
    pub is_prefetch: bool,
    /// When the transfer began.
    pub begin: Instant,
    /// When the transfer ended.
    pub end: Instant,
}
