//! A sample of the benchmarks that takes a minute or two: no process is left behind, and runs name
//! the right rank. The tests set no time limits except those that any working build meets with a
//! wide margin.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs a benchmark and returns its numbers.
fn run_bench(args: &[&str]) -> Value {
    let mut c = Command::new(env!("CARGO_BIN_EXE_tessera-bench"));
    let o = c.current_dir(workspace_root()).args(args).arg("--json").output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr));
    assert!(o.status.success(), "{out}{err}");
    let numbers = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    eprintln!("{out}{err}");
    numbers
}

/// Returns the path of the `tessera` binary next to the benchmarks' binary. A test run of the whole
/// workspace has built it; for a test run of this package alone, the function builds it if it does
/// not exist.
fn tessera_binary() -> String {
    let path = Path::new(env!("CARGO_BIN_EXE_tessera-bench")).with_file_name("tessera");
    if !path.is_file() {
        let mut c = Command::new(env!("CARGO"));
        c.current_dir(workspace_root()).args(["build", "--quiet", "-p", "tessera-cli", "--bin", "tessera"]);
        if !cfg!(debug_assertions) {
            c.arg("--release");
        }
        assert!(c.status().unwrap().success());
    }
    path.to_str().unwrap().to_string()
}

#[test]
fn killed_and_stopped_processes_are_named_and_none_is_left() {
    let tessera = tessera_binary();
    // Giving up on a stopped process takes seconds.
    for (signal, repetitions) in [("kill", "2"), ("stop", "1")] {
        let how = ["--signal", signal, "--repetitions", repetitions, "--limit-s", "60"];
        let numbers = run_bench(&[&["failover", "--tessera", &tessera][..], &how].concat());
        assert_eq!(numbers["orphans"], 0, "{numbers}");
        assert_eq!(numbers["named_correctly_share"], 1.0, "{numbers}");
        assert!(numbers["runs"].as_u64().unwrap() >= 7, "{numbers}");
    }
}

#[test]
fn drawn_faults_are_found_and_their_reports_agree() {
    let tessera = tessera_binary();
    let kinds = ["kill", "stop", "pause", "stop-launcher-and-rank", "cut-closed", "flipped-weight"];
    let kinds = kinds.iter().flat_map(|k| ["--kind", k]);
    let campaign = ["faults", "--tessera", &tessera, "--faults", "8", "--parallel", "4", "--seed", "5"];
    let numbers = run_bench(&campaign.into_iter().chain(kinds).collect::<Vec<_>>());
    assert_eq!(numbers["faults"], 8, "{numbers}");
    for (defect, count) in numbers["defects"].as_object().unwrap() {
        assert!(*count == 0 || defect == "late", "{defect}: {numbers}");
    }
}

#[test]
fn a_slow_run_is_not_ended() {
    let tessera = tessera_binary();
    let numbers = run_bench(&["false-positives", "--tessera", &tessera, "--chunks", "100"]);
    assert_eq!(numbers["false_kills"], 0, "{numbers}");
    assert_eq!(numbers["stuck_step_detected"], true, "{numbers}");
}

#[test]
fn queues_and_descriptors_do_not_grow() {
    let tessera = tessera_binary();
    // So few chunks do not show whether memory grows.
    let long = ["soak", "--tessera", &tessera, "--chunks", "600", "--warm-up", "200", "--limit-kib", "1e9"];
    for model in [&[][..], &["--media"]] {
        check_counts(&run_bench(&[&long[..], model].concat()));
    }
}

fn check_counts(numbers: &Value) {
    for (name, process) in numbers["processes"].as_object().unwrap() {
        for what in ["descriptors", "threads"] {
            assert_eq!(process[what]["max"], process[what]["after_warm_up"], "{name}: {what}: {numbers}");
        }
    }
    assert!(numbers["queue_in"]["max"].as_f64().unwrap() <= 2.0, "{numbers}");
    assert!(numbers["queue_out"]["max"].as_f64().unwrap() <= 2.0, "{numbers}");
}

#[test]
fn every_rank_records_every_call() {
    let numbers = run_bench(&["lockstep", "--ranks", "3", "--calls", "300", "--compute-ms", "1"]);
    for condition in numbers["conditions"].as_array().unwrap() {
        for what in ["lockstep_us", "echo_us"] {
            assert_eq!(condition[what]["n"], 250, "{numbers}");
            assert!(condition[what]["p50"].as_f64().unwrap() > 0.0, "{numbers}");
        }
    }
}

#[test]
fn a_cut_link_leaves_no_process_on_either_side() {
    let tessera = tessera_binary();
    let numbers = run_bench(&["partition", "--tessera", &tessera, "--repetitions", "1", "--limit-s", "60"]);
    // The benchmark is skipped on machines that cannot create network namespaces.
    if numbers["skipped"].is_null() {
        assert_eq!(numbers["orphans"], 0, "{numbers}");
    }
}
