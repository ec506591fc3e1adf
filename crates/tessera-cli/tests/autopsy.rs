//! Tests that kill or stop real ranks: the autopsy of their records names these ranks and no
//! others.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::Value;

use support::{TIMEOUT, send_signal, tessera_command, to_text, wait_for_end};

/// Returns the JSON report and the exit status.
fn autopsy_json(dir: &Path) -> (Value, i32) {
    let o = tessera_command(&["autopsy", dir.to_str().unwrap(), "--format", "json"]).output().unwrap();
    let json = serde_json::from_slice(&o.stdout).unwrap_or_else(|e| panic!("{e}: {}", to_text(&o.stderr)));
    (json, o.status.code().unwrap())
}

fn culprits(report: &Value) -> Vec<u64> {
    report["culprits"].as_array().unwrap().iter().map(|r| r.as_u64().unwrap()).collect()
}

/// Starts a stream that does not end by itself, waits for its first chunk, and returns the process
/// with the process ids of its ranks.
fn start_endless(out: &Path) -> (Child, Vec<u32>) {
    let args = ["stream", "fixtures/wan-odd", "--mesh", "tp=2", "--oversubscribe", "--chunks", "1000000"];
    let child = tessera_command(&[&args[..], &["--prompt", "red", "--out", out.to_str().unwrap()]].concat())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while fs::metadata(out.join("latents.safetensors")).map_or(0, |m| m.len()) <= 4096 {
        assert!(begun.elapsed() < TIMEOUT, "no chunk was written");
        std::thread::sleep(Duration::from_millis(20));
    }
    let pid = child.id();
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    (child, list.split_whitespace().filter_map(|p| p.parse().ok()).collect())
}

#[test]
fn a_live_or_successful_run_has_no_culprit() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let (child, _) = start_endless(&out);
    for _ in 0..5 {
        let (report, status) = autopsy_json(&out);
        assert_eq!((culprits(&report), status), (vec![], 0), "{report:#}");
        assert_eq!(report["state"], "running");
    }
    let sizes = || [0, 1].map(|r| fs::metadata(out.join(format!("flight/rank-{r}.jsonl"))).unwrap().len());
    send_signal(child.id(), "INT");
    wait_for_end(child);
    let (report, status) = autopsy_json(&out);
    assert_eq!((culprits(&report), status), (vec![], 0), "{report:#}");
    assert_eq!(report["state"], "interrupted");
    assert!(sizes().iter().all(|s| *s <= 640 + 4096 * 384), "{:?}", sizes());
}

// proves: R-08
#[test]
fn a_killed_rank_is_named_despite_missing_or_truncated_records() {
    for rank in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("run");
        let (child, pids) = start_endless(&out);
        send_signal(pids[rank], "KILL");
        wait_for_end(child);
        let named = |what: &str| {
            let (report, status) = autopsy_json(&out);
            assert_eq!((culprits(&report), status), (vec![rank as u64], 1), "{what}: {report:#}");
            report
        };
        let report = named("whole");
        assert_eq!(
            (&report["agreement"], &report["triage"]),
            (&"agrees".into(), &"crash".into()),
            "{report:#}"
        );
        assert!(report["findings"][0]["evidence"].to_string().contains("signal 9"), "{report:#}");
        // Half of the other rank's record is removed, then all of the killed rank's record.
        let file = |r: usize| out.join(format!("flight/rank-{r}.jsonl"));
        let other = fs::read(file(1 - rank)).unwrap();
        fs::write(file(1 - rank), &other[..other.len() / 2 + 7]).unwrap();
        named("the other's is cut");
        fs::write(file(1 - rank), other).unwrap();
        fs::remove_file(file(rank)).unwrap();
        let report = named("its own is missing");
        assert!(
            report["findings"][0]["evidence"].to_string().contains("left no flight record"),
            "{report:#}"
        );
    }
}

#[test]
fn a_stopped_rank_is_named_during_and_after_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let (child, pids) = start_endless(&out);
    send_signal(pids[1], "STOP");
    std::thread::sleep(Duration::from_millis(200));
    let (report, status) = autopsy_json(&out);
    assert_eq!((culprits(&report), status, &report["state"]), (vec![1], 1, &"running".into()), "{report:#}");
    assert!(report["findings"][0]["evidence"].to_string().contains("is stopped"), "{report:#}");
    wait_for_end(child);
    let why = dir.path().join("why");
    let o = tessera_command(&["autopsy", out.to_str().unwrap(), "--svg", why.to_str().unwrap()])
        .output()
        .unwrap();
    let said = to_text(&o.stdout);
    assert_eq!(o.status.code(), Some(1), "{said}");
    assert!(said.contains("cause: rank 1 ") && said.contains("the record agrees: T0743"), "{said}");
    let (report, _) = autopsy_json(&out);
    assert_eq!((culprits(&report), &report["triage"]), (vec![1], &"hang".into()), "{report:#}");
    // If a rank waits for the stopped one, the autopsy draws the wait.
    for f in fs::read_dir(&why).unwrap() {
        assert!(fs::read_to_string(f.unwrap().path()).unwrap().starts_with("<svg"));
    }
}

#[test]
fn a_folder_without_a_run_is_a_usage_error() {
    let dir = tempfile::tempdir().unwrap();
    let o = tessera_command(&["autopsy", dir.path().to_str().unwrap()]).output().unwrap();
    assert_eq!(o.status.code(), Some(2));
    assert!(to_text(&o.stderr).contains("T0036"), "{}", to_text(&o.stderr));
}
