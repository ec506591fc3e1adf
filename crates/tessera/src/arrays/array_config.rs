//! The configuration that the launcher of array programs sends to every rank.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::array_weights::ArrayWeightsPlace;
use crate::cuda::GpuRankConfig;
use crate::rank_config::RankSettings;

/// The configuration of every rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ArrayConfig {
    /// Folder of the sealed plan: `plan` in the run directory.
    pub(crate) plan: PathBuf,
    /// Digest of the sealed plan as hex digits; a rank that reads another plan fails with T0012.
    pub(crate) digest: String,
    /// Safetensors file with the weights, which every rank maps while it loads; the path is absolute.
    pub(crate) weights: PathBuf,
    /// Directory to which the run writes its record.
    pub(crate) out: PathBuf,
    /// Number of CPU threads per rank.
    pub(crate) threads: usize,
    /// Whether each rank writes the messages that it sends to a file.
    pub(crate) wire_dump: bool,
    /// Whether each rank reports the times of single ops with every call.
    pub(crate) times_single_ops: bool,
    /// GPU configuration of the ranks; `None` if they run on CPUs.
    pub(crate) gpus: Option<GpuRankConfig>,
}

impl ArrayConfig {
    /// Returns where a rank finds the weights.
    pub(crate) fn weights_place(&self) -> ArrayWeightsPlace {
        ArrayWeightsPlace::File(self.weights.clone())
    }

    /// Returns the settings that do not depend on the kind of the model.
    pub(crate) fn settings(&self) -> RankSettings<'_> {
        RankSettings {
            out: &self.out,
            threads: self.threads,
            wire_dump: self.wire_dump,
            poison: false,
            times_single_ops: self.times_single_ops,
            gpus: self.gpus.as_ref(),
            drill: None,
        }
    }
}
