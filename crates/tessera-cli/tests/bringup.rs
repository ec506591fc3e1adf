//! Tests the bring-up checklist on real runs: items are in order, and none passes before all
//! earlier ones.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::path::Path;

use support::run_for_text;

fn run_stream(out: &Path, options: &[&str]) {
    let mut args = vec!["stream", "models/demo", "--chunks", "2", "--out", out.to_str().unwrap()];
    args.extend(options);
    let (status, said) = run_for_text(&args);
    assert_eq!(status, Some(0), "{said}");
}

/// Returns the status and the detail of each item.
fn checklist_items(runs: &[&Path]) -> Vec<(String, String)> {
    let mut args = vec!["bringup", "--format", "json"];
    args.extend(runs.iter().map(|r| r.to_str().unwrap()));
    let (status, said) = run_for_text(&args);
    let json: serde_json::Value = serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}"));
    let list: Vec<(String, String)> = json
        .as_array()
        .unwrap()
        .iter()
        .map(|i| (i["status"].as_str().unwrap().into(), i["detail"].as_str().unwrap().into()))
        .collect();
    let fine = list.iter().all(|(status, _)| status == "pass" || status == "n/a");
    assert_eq!(status, Some(if fine { 0 } else { 1 }), "{said}");
    list
}

#[test]
fn no_item_passes_before_all_earlier_items() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["a", "b", "c"] {
        run_stream(&at(name), &[]);
    }
    run_stream(&at("other"), &["--mesh", "tp=2"]);
    run_stream(&at("seed"), &["--seed", "9"]);

    let three = checklist_items(&[&at("a"), &at("b"), &at("c")]);
    let status: Vec<&str> = three.iter().map(|(s, _)| s.as_str()).collect();
    assert_eq!(status, ["pass", "pass", "n/a", "n/a", "n/a", "pass"], "{three:#?}");

    let one = checklist_items(&[&at("a")]);
    assert_eq!((one[0].0.as_str(), one[1].0.as_str()), ("open", "open"), "{one:#?}");
    assert!(one[5].1.contains("1 of 3 runs"));

    let meshes = checklist_items(&[&at("a"), &at("other"), &at("b")]);
    assert_eq!((meshes[0].0.as_str(), meshes[1].0.as_str()), ("fail", "fail"));
    assert!(meshes.iter().all(|(status, _)| status != "pass"), "{meshes:#?}");
    assert!(meshes[0].1.contains("tp=2"), "{meshes:#?}");

    let seeds = checklist_items(&[&at("a"), &at("b"), &at("seed")]);
    assert_eq!((seeds[0].0.as_str(), seeds[5].0.as_str()), ("pass", "fail"), "{seeds:#?}");
}

#[test]
fn kernels_are_frozen_only_if_every_run_probed_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["a", "b"] {
        run_stream(&at(name), &["--mesh", "tp=2"]);
    }
    let kernels = |runs: &[&Path]| checklist_items(runs).swap_remove(1);
    let (status, detail) = kernels(&[&at("a"), &at("b")]);
    assert_eq!(status, "pass", "{detail}");
    assert!(detail.contains("kernels probed") && !detail.starts_with("0 "), "{detail}");

    // A kernel of one rank computes other bits in the second run.
    let path = at("b").join("record.jsonl");
    let record = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = record.split_once("[\"kernel:").unwrap();
    let (key, rest) = rest.split_once("\",\"").unwrap();
    let (_, after) = rest.split_once('"').unwrap();
    std::fs::write(&path, format!("{before}[\"kernel:{key}\",\"other bits\"{after}")).unwrap();
    let (status, detail) = kernels(&[&at("a"), &at("b")]);
    assert_eq!(status, "fail", "{detail}");
    assert!(detail.contains(key) && detail.contains("other bits"), "{detail}");

    // A record without probes answers nothing.
    let unprobed = record.replace("[\"kernel:", "[\"other:");
    std::fs::write(&path, unprobed).unwrap();
    assert_eq!(kernels(&[&at("a"), &at("b")]).0, "open");
}

#[test]
fn a_folder_without_a_run_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let (status, said) = run_for_text(&["bringup", dir.path().to_str().unwrap()]);
    assert_eq!(status, Some(1));
    assert!(said.contains("T0045") && said.contains("record.jsonl"), "{said}");
    assert_eq!(run_for_text(&["bringup"]).0, Some(2));
    let run = dir.path().join("run");
    run_stream(&run, &[]);
    let (status, said) = run_for_text(&["bringup", run.to_str().unwrap(), run.to_str().unwrap()]);
    assert_eq!(status, Some(1));
    assert!(said.contains("named twice"), "{said}");
}

// proves: P-29
#[test]
fn the_ship_checklist_is_red_at_its_first_open_item() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    for name in ["a", "b", "c"] {
        run_stream(&dir.path().join(name), &[]);
    }
    // A run of two chunks shows no steady state, so that no drill is started.
    let (status, said) = run_for_text(&["bringup", &at("a"), &at("b"), &at("c"), "--ship", &at("c")]);
    assert_eq!(status, Some(1), "{said}");
    let fail = said.lines().position(|l| l.contains("fail") && l.contains("2 chunks, 10000 are needed"));
    assert_eq!(said.matches("  pass").count(), 4, "{said}");
    assert_eq!(said.matches("blocked").count(), 3, "{said}");
    assert!(fail.is_some() && said.contains("\nred\n"), "{said}");

    let (status, said) = run_for_text(&["bringup", &at("a"), &at("b"), "--ship", &at("c")]);
    assert!(status == Some(1) && said.contains("2 of 3 runs"), "{said}");
    let (status, said) = run_for_text(&["bringup", &at("a"), "--ship", &at("none")]);
    assert!(status == Some(1) && said.contains("T0045"), "{said}");
}
