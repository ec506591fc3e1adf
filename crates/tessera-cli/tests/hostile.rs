//! Hostile surroundings: output that disappears, terminals that are gone, inputs that are no files.
//! Every run must end in bounded time, without a panic, and never with status 0 and output missing.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

mod support;
use support::{TIMEOUT, both_outputs, repo_root, tessera_command, wait_for_end};

fn path_text(p: &Path) -> &str {
    p.to_str().unwrap()
}

/// Waits for a process, and checks that it neither hung nor panicked.
fn end_without_panic(child: Child) -> (Option<i32>, String) {
    let o = wait_for_end(child);
    assert_no_panic(&o);
    (o.status.code(), both_outputs(&o))
}

fn assert_no_panic(o: &Output) {
    let text = both_outputs(o);
    assert!(o.status.code() != Some(101) && !text.contains("panicked"), "{text}");
    // A signal would be an abort.
    assert!(o.status.code().is_some(), "{:?} {text}", o.status);
}

/// Runs a shell line in which `$T` is the binary and `$M` the demo model.
fn run_in_shell(dir: &Path, line: &str) -> (Option<i32>, String) {
    let child = Command::new("bash")
        .args(["-c", line])
        .env("T", env!("CARGO_BIN_EXE_tessera"))
        .env("M", repo_root().join("models/demo"))
        .current_dir(dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    end_without_panic(child)
}

/// Starts a stream, and waits until its record has a chunk.
fn start_stream(out: &Path, chunks: &str, more: &[&str]) -> Child {
    let args = ["stream", "models/demo", "--chunks", chunks, "-q", "--out", path_text(out)];
    let child = tessera_command(&[&args[..], more].concat()).spawn().unwrap();
    let begun = Instant::now();
    while !fs::read_to_string(out.join("record.jsonl")).is_ok_and(|r| r.lines().count() > 1) {
        assert!(begun.elapsed() < TIMEOUT, "no chunk");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child
}

// proves: S-15
#[test]
fn a_run_whose_output_disappears_fails_and_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    for lost in ["", "record.jsonl", "clip.png"] {
        let out = dir.path().join(format!("run-{lost}"));
        let child = start_stream(&out, "10000", &[]);
        if lost.is_empty() { fs::remove_dir_all(&out) } else { fs::remove_file(out.join(lost)) }.unwrap();
        let (status, text) = end_without_panic(child);
        assert!(status == Some(17) && text.contains("T0765"), "{lost}: {status:?} {text}");
        assert!(text.contains(path_text(&out.join(lost))), "{lost}: {text}");
    }
    // A frame is missed at the end. What was written stays usable.
    let out = dir.path().join("frames-lost");
    let child = start_stream(&out, "12", &["--png"]);
    fs::remove_file(out.join("frames/000003.png")).unwrap();
    let (status, text) = end_without_panic(child);
    assert!(status == Some(17) && text.contains("T0765") && text.contains("000003.png"), "{text}");
    assert!(fs::read_to_string(out.join("record.jsonl")).unwrap().contains("\"failed\""));
}

// proves: S-15
#[test]
fn a_report_that_cannot_be_written_fails_the_run() {
    let dir = tempfile::tempdir().unwrap();
    for file in ["report.html", "trace.json"] {
        let out = dir.path().join(file);
        let child = start_stream(&out, "8", &[]);
        fs::create_dir(out.join(file)).unwrap();
        let (status, text) = end_without_panic(child);
        assert!(status == Some(17) && text.contains("T0014") && text.contains(file), "{status:?} {text}");
        assert!(fs::metadata(out.join("clip.png")).unwrap().len() > 0);
    }
}

#[test]
fn a_broken_terminal_changes_no_exit_status() {
    let dir = tempfile::tempdir().unwrap();
    let stream = "$T stream $M --chunks 2 --out";
    for (n, (line, status)) in [
        (format!("{stream} a 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"), 0),
        (format!("{stream} b 2>/dev/full"), 0),
        (format!("{stream} c 2>&-"), 0),
        (format!("{stream} d >&- 2>&- <&-"), 0),
        // A message without a reader keeps the status of its cause.
        ("$T stream no/such 2>/dev/full".to_string(), 2),
        ("$T check no/such 2>&-".to_string(), 1),
        ("$T explain nonsense-nonsense 2>/dev/full".to_string(), 2),
    ]
    .into_iter()
    .enumerate()
    {
        let (found, text) = run_in_shell(dir.path(), &line);
        assert_eq!(found, Some(status), "{line}: {text}");
        if let Some(out) = ["a", "b", "c", "d"].get(n) {
            assert!(dir.path().join(out).join("report.html").is_file(), "{line}");
        }
    }
}

#[test]
fn a_broken_standard_output_does_not_hide_the_failure() {
    let dir = tempfile::tempdir().unwrap();
    for format in ["text", "json"] {
        let line = format!(
            "$T stream $M --chunks 10000 -q --format {format} --out {format} >/dev/full & P=$!
             until [ -s {format}/clip.png ]; do sleep 0.05; done; rm {format}/clip.png; wait $P"
        );
        let (status, text) = run_in_shell(dir.path(), &line);
        assert!(status == Some(17) && text.contains("T0765") && text.contains("T0033"), "{status:?} {text}");
    }
    let (status, text) = run_in_shell(dir.path(), "$T stream $M --chunks 1 -q --out ok >/dev/full");
    assert!(status == Some(1) && text.contains("T0033"), "{status:?} {text}");
}
