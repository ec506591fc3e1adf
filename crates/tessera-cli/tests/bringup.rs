//! The bring-up checklist over real runs: items in order, none green before the one above it.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::path::Path;

use support::ask;

fn stream(out: &Path, options: &[&str]) {
    let mut args = vec!["stream", "models/demo", "--chunks", "2", "--out", out.to_str().unwrap()];
    args.extend(options);
    let (status, said) = ask(&args);
    assert_eq!(status, Some(0), "{said}");
}

/// Items by number: how each stands, and what it says.
fn items(runs: &[&Path]) -> Vec<(String, String)> {
    let mut args = vec!["bringup", "--format", "json"];
    args.extend(runs.iter().map(|r| r.to_str().unwrap()));
    let (status, said) = ask(&args);
    let json: serde_json::Value = serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}"));
    let list: Vec<(String, String)> = json
        .as_array()
        .unwrap()
        .iter()
        .map(|i| (i["standing"].as_str().unwrap().into(), i["says"].as_str().unwrap().into()))
        .collect();
    let fine = list.iter().all(|(standing, _)| standing == "pass" || standing == "n/a");
    assert_eq!(status, Some(if fine { 0 } else { 1 }), "{said}");
    list
}

#[test]
fn no_item_is_green_before_the_one_above_it() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["a", "b", "c"] {
        stream(&at(name), &[]);
    }
    stream(&at("other"), &["--mesh", "tp=2"]);
    stream(&at("seed"), &["--seed", "9"]);

    let three = items(&[&at("a"), &at("b"), &at("c")]);
    let standing: Vec<&str> = three.iter().map(|(s, _)| s.as_str()).collect();
    assert_eq!(standing, ["pass", "pass", "n/a", "pass", "n/a", "pass"], "{three:#?}");

    let one = items(&[&at("a")]);
    assert_eq!((one[0].0.as_str(), one[1].0.as_str()), ("open", "held"), "{one:#?}");
    assert!(one[1].1.starts_with("held back by item 1: "));
    assert!(one[5].1.contains("1 of 3 runs"));

    let meshes = items(&[&at("a"), &at("other"), &at("b")]);
    assert_eq!(meshes[0].0, "fail");
    assert!(meshes[0].1.contains("tp=2"), "{meshes:#?}");

    let seeds = items(&[&at("a"), &at("b"), &at("seed")]);
    assert_eq!((seeds[0].0.as_str(), seeds[5].0.as_str()), ("pass", "fail"), "{seeds:#?}");
}

#[test]
fn a_folder_that_is_no_run_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (status, said) = ask(&["bringup", dir.path().to_str().unwrap()]);
    assert_eq!(status, Some(1));
    assert!(said.contains("T0045") && said.contains("record.jsonl"), "{said}");
    assert_eq!(ask(&["bringup"]).0, Some(2));
    let run = dir.path().join("run");
    stream(&run, &[]);
    let (status, said) = ask(&["bringup", run.to_str().unwrap(), run.to_str().unwrap()]);
    assert_eq!(status, Some(1));
    assert!(said.contains("named twice"), "{said}");
}
