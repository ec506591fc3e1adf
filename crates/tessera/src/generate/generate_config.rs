//! The configuration that the launcher of a language model sends to every rank.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::language_weights::LanguagePlace;
use super::scheduler::TextRequest;
use crate::cuda::GpuRankConfig;
use crate::faults::DrillConfig;
use crate::rank_config::RankSettings;

/// The configuration of every rank. The leader alone reads the requests.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct GenerateConfig {
    /// Folder of the sealed plan: `plan` in the run directory.
    pub(crate) plan: PathBuf,
    /// Digest of the sealed plan as hex digits; a rank that reads another plan fails with T0012.
    pub(crate) digest: String,
    /// Where every rank finds the weights; the path is absolute.
    pub(crate) weights: LanguagePlace,
    /// Directory to which the run writes its record.
    pub(crate) out: PathBuf,
    /// Number of CPU threads per rank.
    pub(crate) threads: usize,
    /// The texts to continue.
    pub(crate) requests: Vec<TextRequest>,
    /// Ids that end a text.
    pub(crate) end_ids: Vec<u32>,
    /// Whether each rank writes the messages that it sends to a file.
    pub(crate) wire_dump: bool,
    /// GPU configuration of the ranks; `None` if they run on CPUs.
    pub(crate) gpus: Option<GpuRankConfig>,
    /// Fault, limits and disabled tripwires of a drill; `None` in every other run.
    pub(crate) drill: Option<DrillConfig>,
}

impl GenerateConfig {
    /// Returns the settings that do not depend on the kind of the model.
    pub(crate) fn settings(&self) -> RankSettings<'_> {
        RankSettings {
            out: &self.out,
            threads: self.threads,
            wire_dump: self.wire_dump,
            poison: false,
            times_single_ops: false,
            gpus: self.gpus.as_ref(),
            drill: self.drill.as_ref(),
        }
    }
}
