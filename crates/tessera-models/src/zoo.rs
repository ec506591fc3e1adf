//! Named language models, with dims from their releases, from planning guides or from papers.

use crate::LanguageModel;

/// Name and config of each model.
const CONFIGS: &[(&str, &str)] = &[
    ("llama-3.1-8b", include_str!("../zoo/llama-3.1-8b.json")),
    ("llama-3.1-70b", include_str!("../zoo/llama-3.1-70b.json")),
    ("llama-3.1-405b", include_str!("../zoo/llama-3.1-405b.json")),
    ("mixtral-8x7b", include_str!("../zoo/mixtral-8x7b.json")),
    ("qwen3-235b-a22b", include_str!("../zoo/qwen3-235b-a22b.json")),
    ("deepseek-v3", include_str!("../zoo/deepseek-v3.json")),
    ("sr-moe", include_str!("../zoo/sr-moe.json")),
    ("sr-moe-wide", include_str!("../zoo/sr-moe-wide.json")),
    ("gpt-1.7b", include_str!("../zoo/gpt-1.7b.json")),
    ("gpt-3.6b", include_str!("../zoo/gpt-3.6b.json")),
    ("gpt-7.5b", include_str!("../zoo/gpt-7.5b.json")),
    ("gpt-18b", include_str!("../zoo/gpt-18b.json")),
    ("gpt-22b", include_str!("../zoo/gpt-22b.json")),
    ("gpt-39b", include_str!("../zoo/gpt-39b.json")),
    ("gpt-76b", include_str!("../zoo/gpt-76b.json")),
    ("gpt-146b", include_str!("../zoo/gpt-146b.json")),
    ("gpt-175b", include_str!("../zoo/gpt-175b.json")),
    ("gpt-310b", include_str!("../zoo/gpt-310b.json")),
    ("gpt-530b", include_str!("../zoo/gpt-530b.json")),
    ("gpt-1t", include_str!("../zoo/gpt-1t.json")),
];

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
