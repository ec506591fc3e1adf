//! What the launcher sends to every rank.

use serde::{Deserialize, Serialize};

use crate::arrays::ArrayConfig;
use crate::generate::GenerateConfig;
use crate::rank_config::RankConfig;

/// The configuration of a run, by what it generates.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum RankOrders {
    /// A stream of video.
    Stream(Box<RankConfig>),
    /// Texts of a language model.
    Generate(Box<GenerateConfig>),
    /// Calls of array programs.
    Arrays(Box<ArrayConfig>),
}
