//! Checks estimates of language-model training against published runs: errors stay below their
//! bounds, and docs/reference/calibration.md reports them. `TESSERA_BLESS=1` rewrites the page;
//! review the difference.

#![allow(clippy::disallowed_methods, reason = "it compares a page with the results")]

#[path = "calibration/page.rs"]
mod page;
#[path = "calibration/runs.rs"]
mod runs;

use runs::{Pair, mean_and_max_error, megatron_2021, recomputation, scaling};
use tessera_cost::Profile;

const ANY: u32 = u32::MAX;

#[test]
fn iteration_times_of_the_recomputation_paper() {
    let (trained, _) = recomputation();
    let all: Vec<Pair> = trained.iter().flat_map(|t| t.iteration).collect();
    assert_eq!(all.len(), 8);
    let (mean, most) = mean_and_max_error(&all);
    assert!(mean <= 0.0365 && most <= 0.0887, "mean {mean:.4}, largest {most:.4}");
    let held_out: Vec<Pair> = trained.iter().filter(|t| !t.fitted).flat_map(|t| t.iteration).collect();
    let (mean, most) = mean_and_max_error(&held_out);
    assert!(mean <= 0.0365 && most <= 0.0887, "held out: mean {mean:.4}, largest {most:.4}");
}

#[test]
fn stored_scores_make_computing_attention_again_pay() {
    let (trained, _) = recomputation();
    let [full, attention] = trained.iter().find(|t| t.model == "gpt-22b").expect("the model").iteration;
    assert_eq!((full.published, attention.published), (1.42, 1.10));
    assert!(
        full.error().abs() < 0.02 && attention.error().abs() < 0.02,
        "{} {}",
        full.error(),
        attention.error()
    );
    assert!(Profile::builtin("megatron").is_some_and(|p| p.base.attention.stores_scores));
    assert!(Profile::builtin("torch-2.11").is_some_and(|p| !p.base.attention.stores_scores));
}

#[test]
fn one_layer_in_five_variants_of_a_model_whose_whole_was_fitted() {
    let (_, layers) = recomputation();
    let all: Vec<Pair> = layers.iter().flat_map(|l| [l.forward, l.backward]).collect();
    assert_eq!(all.len(), 10);
    let (mean, most) = mean_and_max_error(&all);
    assert!(mean <= 0.03 && most <= 0.05, "mean {mean:.4}, largest {most:.4}");
}

#[test]
fn memory_of_the_recomputation_paper() {
    let (trained, _) = recomputation();
    let state: Vec<Pair> = trained.iter().map(|t| t.state).collect();
    assert!(mean_and_max_error(&state).0 <= 0.03, "{:?}", mean_and_max_error(&state));
    let kept: Vec<Pair> = trained.iter().flat_map(|t| t.activations).collect();
    assert!(mean_and_max_error(&kept).1 <= 0.01, "{:?}", mean_and_max_error(&kept));
    let shares: Vec<Pair> = trained.iter().flat_map(|t| t.shares).collect();
    assert_eq!(shares.len(), 16);
    assert!(mean_and_max_error(&shares).1 <= 0.08, "{:?}", mean_and_max_error(&shares));
}

#[test]
fn the_scaling_table_with_one_scalar() {
    let table = scaling(&Profile::builtin("megatron").expect("known profile"), ANY);
    assert_eq!(table.rows.len(), 10);
    let (mean, _) = mean_and_max_error(&table.rates());
    assert!(mean <= 0.04, "mean {mean:.4}");
    assert!(table.rank_correlation() >= 0.8, "{}", table.rank_correlation());
    // A constant rate does worse.
    let published: Vec<f64> = table.rows.iter().map(|r| r.rate.published).collect();
    let constant = published
        .iter()
        .map(|c| published.iter().map(|p| (c / p - 1.0).abs()).sum::<f64>() / published.len() as f64)
        .fold(f64::INFINITY, f64::min);
    assert!((0.05..0.056).contains(&constant) && mean < constant, "{constant}");
}

#[test]
fn the_page_says_what_the_tables_say() {
    let (trained, layers) = recomputation();
    let now = Profile::builtin("megatron").expect("known profile");
    let then = megatron_2021();
    let text = page::render_page(
        &trained,
        &layers,
        &scaling(&now, ANY),
        &[
            ("no interleaving", scaling(&now, 1)),
            ("at most three model chunks", scaling(&now, 3)),
            (
                "any number of chunks, the executor as of April 2021: no overlap, separate weight-gradient accumulation",
                scaling(&then, ANY),
            ),
            ("the same, no interleaving", scaling(&then, 1)),
        ],
    );
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/calibration.md");
    if std::env::var_os("TESSERA_BLESS").is_some() {
        std::fs::write(path, &text).expect("writable page");
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    assert!(kept == text, "run TESSERA_BLESS=1 cargo test -p tessera-plan --test calibration, and look");
}
