//! Named language models, with dims from their releases, from planning guides or from papers.

use crate::LanguageModel;

/// Defines the list of models from the names of their files.
macro_rules! list_configs {
    ($($name:literal,)*) => {
        /// Name and config of each model.
        const CONFIGS: &[(&str, &str)] = &[$(($name, include_str!(concat!("../zoo/", $name, ".json")))),*];
    };
}

#[rustfmt::skip]
list_configs! {
    "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b",
    "mixtral-8x7b",
    "qwen3-235b-a22b",
    "deepseek-v3",
    "sr-moe", "sr-moe-wide",
    "gpt-1.7b", "gpt-3.6b", "gpt-7.5b", "gpt-18b", "gpt-22b", "gpt-39b", "gpt-76b", "gpt-146b", "gpt-175b", "gpt-310b", "gpt-530b", "gpt-1t",
}

/// Lists the names of all models, grouped by family.
#[must_use]
pub fn model_names() -> Vec<&'static str> {
    CONFIGS.iter().map(|(name, _)| *name).collect()
}

/// Returns the model with this name.
#[must_use]
pub fn find_model(name: &str) -> Option<LanguageModel> {
    let (name, text) = CONFIGS.iter().find(|(n, _)| *n == name)?;
    let model = LanguageModel::parse(name, text).ok()?;
    Some(LanguageModel { name: (*name).to_string(), ..model })
}
