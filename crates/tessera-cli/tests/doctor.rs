//! The doctor over this machine, estimates and real runs.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use serde_json::Value;

use support::{ask, root};

fn doctor(args: &[&str]) -> (Option<i32>, Value) {
    let (status, said) = ask(&[&["doctor", "--format", "json"], args].concat());
    (status, serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}")))
}

fn codes(v: &Value) -> Vec<&str> {
    v["recognised"].as_array().unwrap().iter().map(|f| f["code"].as_str().unwrap()).collect()
}

#[test]
fn without_an_argument_it_is_this_machine() {
    let (status, here) = doctor(&[]);
    assert_eq!(status, Some(0));
    for what in ["processor", "cores", "kernels", "GPUs", "--device cuda", "clusters", "recipes"] {
        assert!(here[what].as_str().is_some_and(|s| !s.is_empty()), "{what}: {here}");
    }
    assert!(here["clusters"].as_str().unwrap().contains("gb200-nvl72"));
}

#[test]
fn all_four_ways_to_fail_are_recognised_and_each_remedy_has_numbers_or_a_reason() {
    let signs = ["--a2a-rate", "0.4", "--peak-gb", "900", "--overflows", "3", "--drifted", "2"];
    let (status, v) = doctor(&[&["--recipe", "sr-moe"], &signs[..]].concat());
    assert_eq!(status, Some(1), "{v}");
    assert_eq!(codes(&v), ["T1225", "T1226", "T1227", "T1228"], "{v}");
    for f in v["recognised"].as_array().unwrap() {
        let remedies = f["remedies"].as_array().unwrap();
        assert!(remedies.len() >= 3, "{f}");
        for r in remedies {
            let numbers = r["after"].as_str().is_some_and(|a| a.contains(" ms") && a.contains(" GB"));
            assert!(numbers || r["how"].as_str().is_some_and(|h| !h.is_empty()), "{r}");
        }
        assert!(remedies.iter().any(|r| r["after"].is_string()), "{f}");
    }
}

#[test]
fn an_estimate_is_examined_from_its_folder_as_it_was_asked() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("estimate").display().to_string();
    let asked = ["--model", "mixtral-8x7b", "--cluster", "hgx-h200", "--job", "decode", "--pin", "tp=8"];
    let (status, said) = ask(&[&["plan"], &asked[..], &["--out", &folder]].concat());
    assert_eq!(status, Some(0), "{said}");
    let (of_folder, from_folder) = doctor(&[&folder]);
    let (of_words, from_words) = doctor(&asked);
    assert_eq!((of_folder, &from_folder), (of_words, &from_words));
    assert!(from_folder["seen"].to_string().contains("tp=8"), "{from_folder}");
    assert!(from_folder["not_recorded"].to_string().contains("reruns that differ"), "{from_folder}");
    let (status, v) = doctor(&[&folder, "--drifted", "1"]);
    assert_eq!((status, codes(&v).contains(&"T1228")), (Some(1), true), "{v}");
}

#[test]
fn runs_are_examined_by_what_they_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let stream = |out: &str, more: &[&str]| {
        let args =
            ["stream", "models/demo", "--mesh", "tp=2", "--oversubscribe", "--chunks", "2", "--out", out];
        let (status, said) = ask(&[&args[..], more].concat());
        assert_eq!(status, Some(0), "{said}");
    };
    let (a, b, other) = (at("a"), at("b"), at("other"));
    stream(&a, &[]);
    stream(&b, &[]);
    stream(&other, &["--seed", "9"]);

    let (_, two) = doctor(&[&a, &b]);
    let seen = two["seen"].to_string();
    assert!(seen.contains("2 complete runs of one request gave one golden hash"), "{two}");
    assert!(seen.contains("collectives in the open") && seen.contains("memory"), "{two}");
    assert!(!codes(&two).contains(&"T1228"), "{two}");
    assert!(two["not_recorded"].to_string().contains("peak bytes of the processes"), "{two}");

    let (_, one) = doctor(&[&a]);
    assert!(one["not_recorded"].to_string().contains("name two complete runs"), "{one}");
    let (_, mixed) = doctor(&[&a, &other]);
    assert!(mixed["not_recorded"].to_string().contains("other plans or requests"), "{mixed}");

    // The golden hash of a run that drifted.
    let record = dir.path().join("b/record.jsonl");
    let text = std::fs::read_to_string(&record).unwrap();
    let end: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let golden = end["golden"].as_str().unwrap();
    std::fs::write(&record, text.replace(golden, &"0".repeat(golden.len()))).unwrap();
    let (status, drifted) = doctor(&[&a, &b]);
    assert_eq!((status, codes(&drifted).contains(&"T1228")), (Some(1), true), "{drifted}");
    let remedies = drifted["recognised"].to_string();
    assert!(remedies.contains("mesh-invariant") && remedies.contains("frames/s"), "{drifted}");
}

#[test]
fn a_sealed_plan_too_large_for_its_device_is_recognised() {
    let dir = tempfile::tempdir().unwrap();
    let plan = dir.path().join("plan").display().to_string();
    let (status, said) = ask(&["plan", "models/demo", "--mesh", "tp=2", "--out", &plan]);
    assert_eq!(status, Some(0), "{said}");
    let (_, fine) = doctor(&[&plan, "--cluster", "hgx-h200"]);
    assert!(!codes(&fine).contains(&"T1226"), "{fine}");

    // A device of one megabyte.
    let cluster = dir.path().join("small.toml");
    let text = std::fs::read_to_string(root().join("crates/tessera-mesh/clusters/laptop.toml")).unwrap();
    std::fs::write(&cluster, text.replace("memory_bytes = { value = 4e9", "memory_bytes = { value = 1e6"))
        .unwrap();
    let (status, full) = doctor(&[&plan, "--cluster", &cluster.display().to_string()]);
    assert_eq!((status, codes(&full).contains(&"T1226")), (Some(1), true), "{full}");
    let remedies = full["recognised"].to_string();
    assert!(remedies.contains("megatron") && remedies.contains("pp=2"), "{full}");
}

#[test]
fn what_cannot_be_examined_is_usage() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().display().to_string();
    for (args, code) in [
        (vec!["doctor", empty.as_str()], "T0051"),
        (vec!["doctor", "--drifted", "1"], "T0053"),
        (vec!["doctor", empty.as_str(), "--recipe", "B"], "T0053"),
        (vec!["doctor", "--recipe", "no-such"], "T1229"),
    ] {
        let (status, said) = ask(&args);
        assert_eq!(status, Some(2), "{args:?}: {said}");
        assert!(said.contains(code), "{args:?}: {said}");
    }
}
