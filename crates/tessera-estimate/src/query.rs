//! The planning query for a language model, as the command line or a stored estimate gives it.

use std::path::PathBuf;

use tessera_cost::MachineModel;
use tessera_cost::moe::Routing;
use tessera_plan::search::thresholds::Thresholds;
use tessera_plan::search::{Job, Objective, Pins};

/// How a query names its model: by the zoo, a config file or a recipe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// The name of a model of the zoo.
    Zoo(String),
    /// The path of a config.json.
    Config(PathBuf),
    /// A recipe, which defines model, job and pins.
    Recipe(String),
}

/// A planning query for a language model. A field that is `None` takes the recipe's value, or a
/// default that the report names.
#[derive(Debug, Clone)]
pub struct LanguageQuery {
    /// The model to plan; a recipe also supplies values for the fields that are `None`.
    pub model_source: ModelSource,
    /// The cluster and the executor profile.
    pub machine: MachineModel,
    /// Number of devices to use; `None` means the recipe's devices or, without a recipe, all
    /// devices of the cluster.
    pub devices: Option<u32>,
    /// The workload: training, prefill or decode.
    pub job: Option<Job>,
    /// What the search optimises; `None` means the recipe's objective or, without a recipe,
    /// throughput.
    pub objective: Option<Objective>,
    /// Decisions that the search must keep.
    pub pins: Pins,
    /// Distribution of tokens over experts.
    pub routing: Option<Routing>,
    /// Share of the cold experts that a predictor names one layer ahead, from 0 to 1.
    pub prefetch_hit_rate: Option<f64>,
    /// Whether shards that differ by one unit are rejected.
    pub strict: bool,
    /// Limits against which the gates of the report are checked.
    pub limits: Thresholds,
    /// Command line to show on the page.
    pub command: String,
}
