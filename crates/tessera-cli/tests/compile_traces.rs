//! Tests `check` and `doctor` on folders of a PyTorch run's compile traces.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::path::Path;

use serde_json::Value;

use support::{repo_root, run_for_text};

fn recorded(case: &str) -> String {
    repo_root().join("crates/tessera-torch/tests/traces").join(case).display().to_string()
}

/// Copies the logs of a recorded case, so that a test can change the folder.
fn copy_case(case: &str, to: &Path) -> String {
    for entry in std::fs::read_dir(recorded(case)).unwrap().map(|e| e.unwrap()) {
        if entry.file_name().to_str().unwrap().ends_with(".log") {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
    to.display().to_string()
}

#[test]
fn check_accepts_equal_ranks_and_shows_both_sides_of_a_difference() {
    let (status, text) = run_for_text(&["check", &recorded("equal")]);
    assert_eq!(status, Some(0), "{text}");
    assert!(
        text.contains("2 ranks, 3 compiled collectives, 1 group: every rank compiled the same"),
        "{text}"
    );
    let (status, text) = run_for_text(&["check", &recorded("other_reduction")]);
    assert_eq!(status, Some(1), "{text}");
    for what in [
        "T1413",
        "another reduction at number 1 of group 0",
        "all_reduce sum",
        "all_reduce max",
        "record_trace.py:",
    ] {
        assert!(text.contains(what), "{what}: {text}");
    }
    let (status, text) = run_for_text(&["check", &recorded("break_on_one")]);
    assert_eq!(status, Some(0), "a break of one rank is no difference: {text}");
    let (status, text) = run_for_text(&["check", "--format", "json", &recorded("eager_on_one")]);
    let line: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!((status, line["code"].as_str()), (Some(1), Some("T1412")), "{text}");
}

#[test]
fn check_takes_the_number_of_ranks_and_refuses_it_for_anything_else() {
    let (status, text) = run_for_text(&["check", &recorded("equal"), "--ranks", "3"]);
    assert!(status == Some(1) && text.contains("there is no log of rank 2"), "{text}");
    let (status, text) = run_for_text(&["check", &recorded("equal"), "--ranks", "1"]);
    assert!(status == Some(1) && text.contains("T1411"), "{text}");
    let (status, text) = run_for_text(&["check", "filetests/check/pipeline.tir", "--ranks", "3"]);
    assert!(status == Some(2) && text.contains("T0053"), "{text}");
}

#[test]
fn doctor_reports_classes_budget_and_structure() {
    let (status, text) = run_for_text(&["doctor", &recorded("recompile_on_one")]);
    assert_eq!(status, Some(1), "{text}");
    for what in [
        "recompile (T1421)",
        "guard failed: scale == 1.5",
        "FAIL  ranks that compile other than most: 1 (limit 0), rank 1",
        "yes  a frame nears its recompile limit: 4 (from 4 on)",
        "not recorded",
    ] {
        assert!(text.contains(what), "{what}: {text}");
    }
    let (status, text) = run_for_text(&["doctor", "--format", "json", &recorded("equal")]);
    let report: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert_eq!((status, report["pass"].as_bool()), (Some(0), Some(true)), "{text}");
    assert_eq!(report["budget"].as_array().unwrap().len(), 9);
}

#[test]
fn doctor_takes_a_budget_and_refuses_an_unknown_key() {
    let dir = tempfile::tempdir().unwrap();
    let budget = dir.path().join("compile.toml");
    let file = budget.display().to_string();
    std::fs::write(&budget, "[compile]\nbreaks = 1\n").unwrap();
    let (status, text) = run_for_text(&["doctor", &recorded("breaks_on_both"), "--budget", &file]);
    assert!(status == Some(1) && text.contains("FAIL  graph breaks: 2 (limit 1)"), "{text}");
    std::fs::write(&budget, "[compile]\nbreak = 1\n").unwrap();
    let (status, text) = run_for_text(&["doctor", &recorded("breaks_on_both"), "--budget", &file]);
    assert!(status == Some(2) && text.contains("break"), "{text}");
    let (status, text) = run_for_text(&["doctor", "--budget", &file]);
    assert!(status == Some(2) && text.contains("T0053"), "{text}");
}

#[test]
fn a_folder_with_two_kinds_of_recordings_is_refused_and_a_killed_run_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let folder = copy_case("equal", dir.path());
    for log in std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path()) {
        let text = std::fs::read(&log).unwrap();
        std::fs::write(&log, &text[..text.len() - 300]).unwrap();
    }
    let (status, text) = run_for_text(&["check", &folder]);
    assert!(status == Some(0) && text.contains("cut off"), "{text}");
    std::fs::write(dir.path().join("seal.json"), "{}").unwrap();
    for verb in ["check", "doctor"] {
        let (status, text) = run_for_text(&[verb, &folder]);
        assert!(status == Some(2) && text.contains("T1425"), "{text}");
    }
}
