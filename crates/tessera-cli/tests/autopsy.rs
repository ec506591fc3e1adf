//! Real ranks are killed and stopped, and the autopsy of what they left names them and nobody else.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::Value;

use support::{PATIENCE, command, ended, signal, text};

/// The report as JSON, and the exit status.
fn autopsy(dir: &Path) -> (Value, i32) {
    let o = command(&["autopsy", dir.to_str().unwrap(), "--format", "json"]).output().unwrap();
    let json = serde_json::from_slice(&o.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&o.stderr)));
    (json, o.status.code().unwrap())
}

fn culprits(report: &Value) -> Vec<u64> {
    report["culprits"].as_array().unwrap().iter().map(|r| r.as_u64().unwrap()).collect()
}

/// A stream that will not end by itself, in the middle of it, and its ranks' process ids.
fn endless(out: &Path) -> (Child, Vec<u32>) {
    let args = ["stream", "fixtures/wan-odd", "--mesh", "tp=2", "--oversubscribe", "--chunks", "1000000"];
    let child =
        command(&[&args[..], &["--prompt", "red", "--out", out.to_str().unwrap()]].concat()).spawn().unwrap();
    let begun = Instant::now();
    while fs::metadata(out.join("latents.f32")).map_or(0, |m| m.len()) == 0 {
        assert!(begun.elapsed() < PATIENCE, "no chunk was written");
        std::thread::sleep(Duration::from_millis(20));
    }
    let pid = child.id();
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    (child, list.split_whitespace().filter_map(|p| p.parse().ok()).collect())
}

#[test]
fn a_run_that_goes_on_or_ended_well_has_no_culprit() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let (child, _) = endless(&out);
    for _ in 0..5 {
        let (report, status) = autopsy(&out);
        assert_eq!((culprits(&report), status), (vec![], 0), "{report:#}");
        assert_eq!(report["state"], "running");
    }
    let sizes = || [0, 1].map(|r| fs::metadata(out.join(format!("flight/rank-{r}.jsonl"))).unwrap().len());
    signal(child.id(), "INT");
    ended(child);
    let (report, status) = autopsy(&out);
    assert_eq!((culprits(&report), status), (vec![], 0), "{report:#}");
    assert_eq!(report["state"], "interrupted");
    assert!(sizes().iter().all(|s| *s <= 640 + 4096 * 384), "{:?}", sizes());
}

#[test]
fn a_killed_rank_is_named_also_with_records_missing_and_cut() {
    for rank in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("run");
        let (child, pids) = endless(&out);
        signal(pids[rank], "KILL");
        ended(child);
        let named = |what: &str| {
            let (report, status) = autopsy(&out);
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
        // Half of the other's record, then none of its own.
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
fn a_stopped_rank_is_named_while_the_run_waits_and_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let (child, pids) = endless(&out);
    signal(pids[1], "STOP");
    std::thread::sleep(Duration::from_millis(200));
    let (report, status) = autopsy(&out);
    assert_eq!((culprits(&report), status, &report["state"]), (vec![1], 1, &"running".into()), "{report:#}");
    assert!(report["findings"][0]["evidence"].to_string().contains("is stopped"), "{report:#}");
    ended(child);
    let why = dir.path().join("why");
    let o = command(&["autopsy", out.to_str().unwrap(), "--svg", why.to_str().unwrap()]).output().unwrap();
    let said = text(&o.stdout);
    assert_eq!(o.status.code(), Some(1), "{said}");
    assert!(said.contains("cause: rank 1 ") && said.contains("the record agrees: T0743"), "{said}");
    let (report, _) = autopsy(&out);
    assert_eq!((culprits(&report), &report["triage"]), (vec![1], &"hang".into()), "{report:#}");
    // Where somebody waits for it there is something to draw.
    for f in fs::read_dir(&why).unwrap() {
        assert!(fs::read_to_string(f.unwrap().path()).unwrap().starts_with("<svg"));
    }
}

#[test]
fn a_folder_of_something_else_is_a_wrong_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let o = command(&["autopsy", dir.path().to_str().unwrap()]).output().unwrap();
    assert_eq!(o.status.code(), Some(2));
    assert!(text(&o.stderr).contains("T0036"), "{}", text(&o.stderr));
}
