//! Tests the doctor on this machine, on estimates and on real runs.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use serde_json::Value;

use support::{repo_root, run_for_text};

fn doctor_json(args: &[&str]) -> (Option<i32>, Value) {
    let (status, said) = run_for_text(&[&["doctor", "--format", "json"], args].concat());
    (status, serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}")))
}

fn found_codes(v: &Value) -> Vec<&str> {
    v["recognised"].as_array().unwrap().iter().map(|f| f["code"].as_str().unwrap()).collect()
}

#[test]
fn without_arguments_this_machine_is_described() {
    let (status, here) = doctor_json(&[]);
    assert_eq!(status, Some(0));
    for what in ["processor", "cores", "kernels", "GPUs", "--device cuda", "clusters", "recipes"] {
        assert!(here[what].as_str().is_some_and(|s| !s.is_empty()), "{what}: {here}");
    }
    assert!(here["clusters"].as_str().unwrap().contains("gb200-nvl72"));
}

#[test]
fn all_four_failure_modes_are_found_with_estimated_mitigations() {
    let signs = ["--a2a-rate", "0.4", "--peak-gb", "900", "--overflows", "3", "--drifted", "2"];
    let (status, v) = doctor_json(&[&["--recipe", "sr-moe"], &signs[..]].concat());
    assert_eq!(status, Some(1), "{v}");
    assert_eq!(found_codes(&v), ["T1225", "T1226", "T1227", "T1228"], "{v}");
    for f in v["recognised"].as_array().unwrap() {
        let mitigations = f["mitigations"].as_array().unwrap();
        assert!(mitigations.len() >= 3, "{f}");
        for r in mitigations {
            let numbers = r["after"].as_str().is_some_and(|a| a.contains(" ms") && a.contains(" GB"));
            assert!(numbers || r["how"].as_str().is_some_and(|h| !h.is_empty()), "{r}");
        }
        assert!(mitigations.iter().any(|r| r["after"].is_string()), "{f}");
    }
}

#[test]
fn an_estimate_folder_is_diagnosed_like_its_query() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("estimate").display().to_string();
    let asked = ["--model", "mixtral-8x7b", "--cluster", "hgx-h200", "--job", "decode", "--pin", "tp=8"];
    let (status, said) = run_for_text(&[&["plan"], &asked[..], &["--out", &folder]].concat());
    assert_eq!(status, Some(1), "a gate fails, and the folder is written: {said}");
    let (of_folder, from_folder) = doctor_json(&[&folder]);
    let (of_words, from_words) = doctor_json(&asked);
    assert_eq!((of_folder, &from_folder), (of_words, &from_words));
    assert!(from_folder["observed"].to_string().contains("tp=8"), "{from_folder}");
    assert!(from_folder["not_recorded"].to_string().contains("reruns that differ"), "{from_folder}");
    let (status, v) = doctor_json(&[&folder, "--drifted", "1"]);
    assert_eq!((status, found_codes(&v).contains(&"T1228")), (Some(1), true), "{v}");
}

#[test]
fn runs_are_diagnosed_from_their_records() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let stream = |out: &str, more: &[&str]| {
        let args =
            ["stream", "models/demo", "--mesh", "tp=2", "--oversubscribe", "--chunks", "2", "--out", out];
        let (status, said) = run_for_text(&[&args[..], more].concat());
        assert_eq!(status, Some(0), "{said}");
    };
    let (a, b, other) = (at("a"), at("b"), at("other"));
    stream(&a, &[]);
    stream(&b, &[]);
    stream(&other, &["--seed", "9"]);

    let (_, two) = doctor_json(&[&a, &b]);
    let observed = two["observed"].to_string();
    assert!(observed.contains("2 complete runs of one request gave one golden hash"), "{two}");
    assert!(observed.contains("exposed collectives") && observed.contains("memory"), "{two}");
    assert!(!found_codes(&two).contains(&"T1228"), "{two}");
    assert!(two["not_recorded"].to_string().contains("peak bytes of the processes"), "{two}");

    let (_, one) = doctor_json(&[&a]);
    assert!(one["not_recorded"].to_string().contains("name two complete runs"), "{one}");
    let (_, mixed) = doctor_json(&[&a, &other]);
    assert!(mixed["not_recorded"].to_string().contains("other plans or requests"), "{mixed}");

    // The golden hash of a run whose results drifted.
    let record = dir.path().join("b/record.jsonl");
    let text = std::fs::read_to_string(&record).unwrap();
    let end: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let golden = end["golden"].as_str().unwrap();
    std::fs::write(&record, text.replace(golden, &"0".repeat(golden.len()))).unwrap();
    let (status, drifted) = doctor_json(&[&a, &b]);
    assert_eq!((status, found_codes(&drifted).contains(&"T1228")), (Some(1), true), "{drifted}");
    let mitigations = drifted["recognised"].to_string();
    assert!(mitigations.contains("mesh-invariant") && mitigations.contains("frames/s"), "{drifted}");
}

#[test]
fn a_sealed_plan_too_large_for_its_device_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let plan = dir.path().join("plan").display().to_string();
    let (status, said) = run_for_text(&["plan", "models/demo", "--mesh", "tp=2", "--out", &plan]);
    assert_eq!(status, Some(0), "{said}");
    let (_, fine) = doctor_json(&[&plan, "--cluster", "hgx-h200"]);
    assert!(!found_codes(&fine).contains(&"T1226"), "{fine}");

    // A device with one megabyte of memory.
    let cluster = dir.path().join("small.toml");
    let text = std::fs::read_to_string(repo_root().join("crates/tessera-mesh/clusters/laptop.toml")).unwrap();
    std::fs::write(&cluster, text.replace("memory_bytes = { value = 4e9", "memory_bytes = { value = 1e6"))
        .unwrap();
    let (status, full) = doctor_json(&[&plan, "--cluster", &cluster.display().to_string()]);
    assert_eq!((status, found_codes(&full).contains(&"T1226")), (Some(1), true), "{full}");
    let mitigations = full["recognised"].to_string();
    assert!(mitigations.contains("megatron") && mitigations.contains("pp=2"), "{full}");
}

#[test]
fn an_invalid_request_is_a_usage_error() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().display().to_string();
    for (args, code) in [
        (vec!["doctor", empty.as_str()], "T0051"),
        (vec!["doctor", "--drifted", "1"], "T0053"),
        (vec!["doctor", empty.as_str(), "--recipe", "B"], "T0053"),
        (vec!["doctor", "--recipe", "no-such"], "T1229"),
    ] {
        let (status, said) = run_for_text(&args);
        assert_eq!(status, Some(2), "{args:?}: {said}");
        assert!(said.contains(code), "{args:?}: {said}");
    }
}
