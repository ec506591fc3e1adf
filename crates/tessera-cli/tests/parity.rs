//! `tessera parity` as a user runs it.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;

use support::{assert_ends_with, both_outputs, repo_root, run_tessera, to_text};

/// Runs a comparison whose gate passes, and returns its JSON.
#[track_caller]
fn run_parity(args: &[&str]) -> serde_json::Value {
    let output = run_tessera(&[&["parity"], args, &["--format", "json"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", both_outputs(&output));
    serde_json::from_str(&to_text(&output.stdout)).unwrap()
}

/// Writes the demo model's own tale to a file of prompts.
fn write_tale(dir: &std::path::Path) -> String {
    let golden = fs::read_to_string(repo_root().join("models/tales/golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&golden).unwrap();
    let file = dir.join("prompts.txt");
    let tale = ["prompt", "text"].map(|key| golden[key].as_str().unwrap()).concat();
    fs::write(&file, format!("{}\n\nOne day\n", tale.replace('\n', " "))).unwrap();
    file.display().to_string()
}

#[test]
fn a_trained_model_passes_the_gate_of_every_policy_and_fails_a_smaller_limit() {
    let dir = tempfile::tempdir().unwrap();
    let prompts = write_tale(dir.path());
    let tales = |more: &[&str]| run_parity(&[&["models/tales", "--prompts", &prompts], more].concat());
    let same = tales(&["--against", "f32"]);
    assert_eq!((same["mse"].as_f64(), same["cosine"].as_f64()), (Some(0.0), Some(1.0)));
    assert!(same["low_precision"].as_object().unwrap().is_empty(), "{same}");
    let (bf16, fp8) = (tales(&["--against", "bf16"]), tales(&["--against", "fp8", "--mesh", "tp=2"]));
    for found in [&bf16, &fp8] {
        let number = |key: &str| found[key].as_f64().unwrap();
        assert!(number("positions") > 50.0 && number("mse") > 0.0);
        let deviation = number("reference_deviation");
        let normalised = number("mse") / (deviation * deviation);
        assert!((number("normalised_mse") / normalised - 1.0).abs() < 1e-6, "{found}");
        assert!(found["plans"][0] != found["plans"][1], "{found}");
    }
    assert!(fp8["normalised_mse"].as_f64() > bf16["normalised_mse"].as_f64(), "{fp8} {bf16}");
    let layers = &fp8["low_precision"]["e4m3"];
    assert_eq!(layers["model.layers.*.self_attn.q_proj.weight"], 4, "{fp8}");
    assert_eq!(fp8["low_precision"]["bf16"]["model.layers.*.mlp.down_proj.weight"], 4, "{fp8}");
    let gates = dir.path().join("own.toml");
    fs::write(&gates, "[parity]\nmax_fp8_mse = 1e-9\n").unwrap();
    let strict = ["parity", "models/tales", "--prompts", &prompts, "--gates", gates.to_str().unwrap()];
    let failed = ["T0089", "gate parity.fp8 failed", "parity.max_fp8_mse = 1e-9", "normalised MSE"];
    assert_ends_with(&[&strict[..], &["--against", "fp8"]].concat(), 1, &failed);
}

// Random weights amplify the roundings of tokens, so this model has a limit of its own.
#[test]
fn tokens_in_e4m3_between_ranks_are_compared_under_the_limit_of_the_wire() {
    let dir = tempfile::tempdir().unwrap();
    let gates = dir.path().join("own.toml");
    fs::write(&gates, "[parity]\nmax_fp8_wire_mse = 0.1\n").unwrap();
    let moe = ["fixtures/lm/mixtral", "--prompt-ids", "17,4,96,33,5,60,71,8", "--mesh", "ep=2"];
    let moe = [&moe[..], &["--against", "fp8-wire"]].concat();
    let wire = run_parity(&[&moe[..], &["--gates", gates.to_str().unwrap()]].concat());
    assert!(wire["mse"].as_f64().unwrap() > 0.0, "{wire}");
    assert!(!wire["low_precision"]["e4m3 on the wire"].as_object().unwrap().is_empty(), "{wire}");
    assert_eq!(wire["low_precision"].as_object().unwrap().len(), 1, "no matmul is in low precision: {wire}");
    let failed = ["T0089", "parity.max_fp8_wire_mse = 1e-4"];
    assert_ends_with(&[&["parity"], &moe[..]].concat(), 1, &failed);
}

#[test]
fn policies_and_prompts_that_make_no_comparison_are_refused() {
    let wire = |folder: &'static str, mesh: &'static str| {
        ["parity", folder, "--prompt-ids", "1,2", "--against", "fp8-wire", "--mesh", mesh]
    };
    assert_ends_with(&wire("fixtures/lm/mixtral", "tp=2"), 1, &["T0088", "every expert is on one rank"]);
    assert_ends_with(&wire("fixtures/lm/llama", "tp=2"), 1, &["T0088", "has no experts"]);
    let unknown = ["parity", "models/tales", "--prompt", "x", "--against", "fp4"];
    assert_ends_with(&unknown, 2, &["fp4", "f32", "bf16", "fp8", "fp8-wire"]);
    assert_ends_with(&["parity", "models/tales"], 2, &["--prompt"]);
    assert_ends_with(&["parity", "models/tales", "--prompts", "no-file.txt"], 1, &["T0010", "no-file.txt"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mapping.toml");
    fs::write(&file, "[numerics]\ndtype = \"fp4\"\n").unwrap();
    let mapping = ["generate", "models/tales", "--prompt", "x", "--mapping", file.to_str().unwrap()];
    assert_ends_with(&mapping, 1, &["T0004", "fp4", "f32", "bf16", "fp8"]);
}
