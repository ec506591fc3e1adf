//! The settings of a chunk that clients change, and their changes.

use tessera::WeightChange;
use tessera::admitted_settings::DEFAULT_STEP_LIST;
use tessera::stream_options::StreamOptions;
use tessera_report::record::ChunkRecord;

/// What the stream generates a chunk from.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Settings {
    pub(crate) prompt: String,
    pub(crate) seed: u64,
    /// Name of the list of denoise steps.
    pub(crate) steps: String,
    /// Attention bias on context keys; `None` for that of the plan.
    pub(crate) bias: Option<f32>,
    /// Source of the weights, as a record states it; `None` for those with which the server began.
    pub(crate) weights: Option<String>,
}

/// What the stream generates after a change.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum NewSetting {
    Prompt(String),
    Seed(u64),
    Steps(String),
    Bias(f32),
    /// Weights, which open a scene.
    Weights(String),
    Scene,
    /// The first request after a flush.
    FlushedScene,
}

impl Settings {
    /// Returns the settings of a stream that nobody has changed.
    pub(crate) fn from_options(options: &StreamOptions) -> Settings {
        Settings {
            prompt: options.prompt.clone(),
            seed: options.seed,
            steps: DEFAULT_STEP_LIST.to_string(),
            bias: None,
            weights: None,
        }
    }

    /// Returns the settings of a recorded chunk.
    pub(crate) fn from_record(chunk: &ChunkRecord) -> Settings {
        Settings {
            prompt: chunk.prompt.clone(),
            seed: chunk.seed,
            steps: chunk.step_list.clone().unwrap_or_else(|| DEFAULT_STEP_LIST.to_string()),
            bias: chunk.bias,
            weights: chunk.weights.clone(),
        }
    }

    /// Applies a change.
    pub(crate) fn apply(&mut self, change: &NewSetting) {
        match change {
            NewSetting::Prompt(prompt) => self.prompt.clone_from(prompt),
            NewSetting::Seed(seed) => self.seed = *seed,
            NewSetting::Steps(list) => self.steps.clone_from(list),
            NewSetting::Bias(bias) => self.bias = Some(*bias),
            NewSetting::Weights(source) => self.weights = Some(source.clone()),
            NewSetting::Scene | NewSetting::FlushedScene => {}
        }
    }

    /// Lets a run begin with these settings.
    pub(crate) fn schedule_first(&self, options: &mut StreamOptions) {
        options.prompt.clone_from(&self.prompt);
        options.seed = self.seed;
        let changes = [
            (self.steps != DEFAULT_STEP_LIST).then(|| NewSetting::Steps(self.steps.clone())),
            self.bias.map(NewSetting::Bias),
            self.weights.clone().map(NewSetting::Weights),
        ];
        changes.into_iter().flatten().for_each(|change| change.schedule(0, options));
    }
}

impl NewSetting {
    /// Lets a run change so at a chunk.
    pub(crate) fn schedule(&self, chunk: u32, options: &mut StreamOptions) {
        match self {
            NewSetting::Prompt(prompt) => options.prompts_at.push((chunk, prompt.clone())),
            NewSetting::Seed(seed) => options.seeds_at.push((chunk, *seed)),
            NewSetting::Steps(list) => options.step_lists_at.push((chunk, list.clone())),
            NewSetting::Bias(bias) => options.biases_at.push((chunk, *bias)),
            NewSetting::Weights(source) => options.weights_at.push((chunk, WeightChange::parse(source))),
            NewSetting::Scene | NewSetting::FlushedScene => options.cuts_at.push(chunk),
        }
    }
}
