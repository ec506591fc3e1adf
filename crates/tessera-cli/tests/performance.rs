//! Tests that a run in performance mode starts only behind green gates of its plan, build and machine.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::Value;
use support::{tessera_command, to_text};

fn run(args: &[&str]) -> Output {
    tessera_command(args).output().unwrap()
}

/// Streams two chunks of a fixture into a new folder.
fn run_stream(mesh: &str, out: &Path, more: &[&str]) -> Output {
    let (mesh, out) = (["--mesh", mesh], ["--out", out.to_str().unwrap()]);
    let words = ["--prompt", "a red square", "--chunks", "2", "--quiet", "--oversubscribe"];
    run(&[&["stream", "fixtures/wan-even"], &mesh[..], &out, &words, more].concat())
}

/// Writes a gate record with one change of its JSON.
fn write_changed(path: &Path, from: &Value, change: impl Fn(&mut Value)) {
    let mut record = from.clone();
    change(&mut record);
    fs::write(path, record.to_string()).unwrap();
}

fn set_verdicts(record: &mut Value, verdict: &str) {
    for gate in record["gates"].as_array_mut().unwrap() {
        gate["verdict"] = verdict.into();
    }
}

// One test, because each gate record needs a run.
#[test]
fn performance_mode_starts_only_behind_green_gates_of_this_plan() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (measured, gates) = (path("measured"), path("gates.json"));
    let gates_text = gates.to_str().unwrap();
    let o = run_stream("tp=1", &measured, &[]);
    assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
    let o = run(&["record", "gates", measured.to_str().unwrap(), "--gate-record", gates_text]);
    assert_eq!(o.status.code(), Some(0), "{}{}", to_text(&o.stdout), to_text(&o.stderr));
    let written: Value = serde_json::from_slice(&fs::read(&gates).unwrap()).unwrap();

    let refuse = |mesh: &str, more: &[&str], parts: &[&str]| {
        let out = path("refused");
        let o = run_stream(mesh, &out, &[&["--performance"], more].concat());
        let err = to_text(&o.stderr);
        assert_eq!(o.status.code(), Some(1), "{err}");
        assert!(err.contains("error[T0063]") && parts.iter().all(|p| err.contains(p)), "{parts:?}: {err}");
        assert!(!out.exists(), "a refused run leaves nothing");
    };
    let named = ["--gate-record", gates_text];
    // Two chunks are too few for the gates of the commit.
    refuse("tp=1", &named, &["gate `decision to commit, p50`", "not measured: 1 chunks"]);
    refuse("tp=1", &[], &["--gate-record names no file"]);
    refuse("tp=1", &["--gate-record", "no-such-file"], &["no-such-file cannot be read"]);
    write_changed(&gates, &written, |r| set_verdicts(r, "pass"));
    refuse("tp=2", &named, &["the gates are of plan `"]);
    write_changed(&gates, &written, |r| {
        set_verdicts(r, "pass");
        r["runs"][0]["started_at"] = "2026-01-01T00:00:00Z".into();
    });
    refuse("tp=1", &named, &["the maximum age is 24 h"]);
    write_changed(&gates, &written, |r| set_verdicts(r, "fail"));
    refuse("tp=1", &named, &["gate `call ids`: fail"]);

    let overridden = path("overridden");
    let o = run_stream(
        "tp=1",
        &overridden,
        &[&["--performance", "--override-gates", "a demo"], &named[..]].concat(),
    );
    let err = to_text(&o.stderr);
    assert_eq!(o.status.code(), Some(0), "{err}");
    assert!(err.contains("warning[T0063]") && err.contains("the gates are overridden: a demo"), "{err}");
    for file in ["record.jsonl", "report.html"] {
        let text = fs::read_to_string(overridden.join(file)).unwrap();
        assert!(text.contains("gates overridden: a demo") && text.contains("call ids"), "{file}");
    }

    write_changed(&gates, &written, |r| set_verdicts(r, "pass"));
    let green = path("green");
    let o = run_stream("tp=1", &green, &[&["--performance"], &named[..]].concat());
    assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
    let record = fs::read_to_string(green.join("record.jsonl")).unwrap();
    assert!(record.contains("allow this run") && !record.contains("overridden"));
    let check = run(&["record", "check", green.to_str().unwrap()]);
    assert_eq!(check.status.code(), Some(0), "{}", to_text(&check.stderr));
}

#[test]
fn the_options_of_performance_mode_need_it_and_a_real_machine() {
    let o = run(&["stream", "models/demo", "--override-gates", "why"]);
    assert_eq!(o.status.code(), Some(2));
    assert!(to_text(&o.stderr).contains("--performance"), "{}", to_text(&o.stderr));
    let o = run(&["stream", "models/demo", "--performance", "--override-gates", ""]);
    assert_eq!(o.status.code(), Some(2), "an override has a reason");
    let o = run(&["stream", "models/demo", "--performance", "--device", "sim"]);
    assert_eq!(o.status.code(), Some(2));
    assert!(to_text(&o.stderr).contains("T0040"), "{}", to_text(&o.stderr));
}
