//! A sample of what the benchmarks measure, in a minute or two: nobody is left behind and the right one is named. Times
//! are not a condition here, only limits that no working build comes near.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs a benchmark and gives its numbers.
fn bench(args: &[&str]) -> Value {
    let mut c = Command::new(env!("CARGO_BIN_EXE_tessera-bench"));
    let o = c.current_dir(root()).args(args).arg("--json").output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr));
    assert!(o.status.success(), "{out}{err}");
    let numbers = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    eprintln!("{out}{err}");
    numbers
}

/// The binary that is streamed with, beside that of the benchmarks. A test of the whole workspace has built it; a test
/// of this package alone takes the one that is there, or has it built.
fn tessera() -> String {
    let path = Path::new(env!("CARGO_BIN_EXE_tessera-bench")).with_file_name("tessera");
    if !path.is_file() {
        let mut c = Command::new(env!("CARGO"));
        c.current_dir(root()).args(["build", "--quiet", "-p", "tessera-cli", "--bin", "tessera"]);
        if !cfg!(debug_assertions) {
            c.arg("--release");
        }
        assert!(c.status().unwrap().success());
    }
    path.to_str().unwrap().to_string()
}

#[test]
fn killed_and_stopped_processes_leave_nobody_and_are_named() {
    let tessera = tessera();
    // A stopped process takes seconds to be given up.
    for (signal, repetitions) in [("kill", "2"), ("stop", "1")] {
        let how = ["--signal", signal, "--repetitions", repetitions, "--limit-s", "60"];
        let numbers = bench(&[&["kills", "--tessera", &tessera][..], &how].concat());
        assert_eq!(numbers["orphans"], 0, "{numbers}");
        assert_eq!(numbers["named_right_share"], 1.0, "{numbers}");
        assert!(numbers["runs"].as_u64().unwrap() >= 7, "{numbers}");
    }
}

#[test]
fn a_run_that_is_only_slow_is_left_alone() {
    let tessera = tessera();
    let numbers = bench(&["calm", "--tessera", &tessera, "--chunks", "100"]);
    assert_eq!(numbers["false_kills"], 0, "{numbers}");
    assert_eq!(numbers["stuck_step_found"], true, "{numbers}");
}

#[test]
fn queues_and_descriptors_stay_as_they_are() {
    let tessera = tessera();
    let numbers = bench(&["long", "--tessera", &tessera, "--chunks", "600", "--warm", "200"]);
    for (name, process) in numbers["processes"].as_object().unwrap() {
        for what in ["descriptors", "threads"] {
            assert_eq!(process[what]["most"], process[what]["after_warm"], "{name}: {what}: {numbers}");
        }
    }
    assert!(numbers["queue_in"]["most"].as_f64().unwrap() <= 2.0, "{numbers}");
    assert!(numbers["queue_out"]["most"].as_f64().unwrap() <= 2.0, "{numbers}");
}

#[test]
fn every_call_of_an_agreement_is_seen_by_every_rank() {
    let numbers = bench(&["lockstep", "--ranks", "3", "--calls", "300", "--compute-ms", "1"]);
    for condition in numbers["conditions"].as_array().unwrap() {
        for what in ["lockstep_us", "echo_us"] {
            assert_eq!(condition[what]["n"], 250, "{numbers}");
            assert!(condition[what]["p50"].as_f64().unwrap() > 0.0, "{numbers}");
        }
    }
}

#[test]
fn a_cut_link_leaves_nobody_on_either_side() {
    let tessera = tessera();
    let numbers = bench(&["partition", "--tessera", &tessera, "--repetitions", "1", "--limit-s", "60"]);
    // Only where the machine makes network namespaces.
    if numbers["skipped"].is_null() {
        assert_eq!(numbers["orphans"], 0, "{numbers}");
    }
}
