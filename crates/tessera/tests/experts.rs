//! Experts over ranks: where tokens are routed, how results return, and how many tokens an expert accepts, on CPU
//! ranks and against one rank.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera::Mapping;
use tessera::generate::{LanguagePlan, LanguageSettings, TextModel, TokenRun};
use tessera_models::TokenOutput;

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/lm").join(family)
}

/// Plans a model whose tokens choose `top_k` experts.
fn plan(family: &str, top_k: u64, mapping: &str) -> LanguagePlan {
    let mut model = TextModel::open(&folder(family)).unwrap().decoder;
    model.end_ids.clear();
    model.experts.as_mut().unwrap().top_k = top_k;
    let mapping = Mapping::parse("mapping.toml", mapping).unwrap_or_else(|ds| panic!("{mapping}: {ds:#?}"));
    let settings =
        LanguageSettings { sequences: 2, positions: 64, prompt_rows: 7, output: TokenOutput::Logits };
    LanguagePlan::new(&model, &mapping, settings).unwrap_or_else(|ds| panic!("{mapping:?}: {ds:#?}"))
}

/// Returns the logits of a prompt, which calls of 7 rows read.
fn logits(family: &str, top_k: u64, mapping: &str) -> Vec<f32> {
    let plan = Arc::new(plan(family, top_k, mapping));
    let prompt: Vec<u32> = (0..17).map(|i| (i * 29 + 3) % 61).collect();
    TokenRun::load(&plan, &folder(family), 1).unwrap().compute_logits(&prompt).unwrap()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn largest_difference(x: &[f32], y: &[f32]) -> f32 {
    let largest = y.iter().fold(0.0_f32, |m, y| m.max(y.abs()));
    x.iter().zip(y).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max) / largest
}

#[test]
fn tokens_that_each_rank_routes_give_the_bits_of_one_rank() {
    for top_k in [1, 2, 4] {
        let alone = bits(&logits("qwen3-moe", top_k, ""));
        for mesh in ["ep = 1", "ep = 2", "ep = 3", "ep = 4", "ep = 2\npp = 2"] {
            for tokens in ["sharded", "replicated"] {
                let found = logits(
                    "qwen3-moe",
                    top_k,
                    &format!("[mesh]\n{mesh}\n[experts]\ntokens = \"{tokens}\"\n"),
                );
                assert!(bits(&found) == alone, "{top_k} experts, {mesh}, {tokens}");
            }
        }
    }
}
