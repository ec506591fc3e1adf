//! `tessera autopsy` on the Flight Recorder dumps of a PyTorch run, as a process.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use support::{tessera_command, to_text};

fn run_autopsy(dir: &Path, more: &[&str]) -> Output {
    tessera_command(&[&["autopsy", dir.to_str().unwrap()], more].concat()).output().unwrap()
}

fn recorded(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tessera-torch/tests/flight").join(case)
}

/// Copies the dumps of a recording into a new folder.
fn copy_recording(case: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(recorded(case)).unwrap().map(|e| e.unwrap()) {
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

#[test]
fn the_exit_status_says_whether_a_rank_is_accused() {
    let o = run_autopsy(&recorded("skip4"), &[]);
    assert_eq!(o.status.code(), Some(1), "{}", to_text(&o.stderr));
    let text = to_text(&o.stdout);
    assert!(text.contains("cause: rank 2: skipped a collective, at collective 11 of group 0"), "{text}");
    let o = run_autopsy(&recorded("fsdp"), &[]);
    assert_eq!(o.status.code(), Some(0));
    assert!(to_text(&o.stdout).contains("no problem found"));
}

#[test]
fn json_and_a_drawing_name_the_same_rank() {
    let out = tempfile::tempdir().unwrap();
    let o = run_autopsy(&recorded("killed4"), &["--format", "json", "--svg", out.path().to_str().unwrap()]);
    let json: serde_json::Value = serde_json::from_slice(&o.stdout).unwrap();
    assert_eq!(json["findings"][0]["ranks"], serde_json::json!([3]));
    assert_eq!(json["missing"], serde_json::json!([3]));
    let svg = fs::read_to_string(out.path().join("flight.svg")).unwrap();
    assert!(svg.contains("rank 3: left no dump") && svg.contains("at fault"));
}

#[test]
fn a_dump_that_is_cut_off_counts_as_missing() {
    let dir = copy_recording("skip4");
    let path = dir.path().join("rank_2");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let o = run_autopsy(dir.path(), &[]);
    let text = to_text(&o.stdout);
    assert_eq!(o.status.code(), Some(1), "{text}");
    assert!(text.contains("rank 2: left no dump") && text.contains("rank_2 is no readable"), "{text}");
}

#[test]
fn what_cannot_be_examined_is_a_usage_error_with_a_code() {
    let check = |files: &[(&str, &[u8])], code: &str| {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        let o = run_autopsy(dir.path(), &[]);
        let err = to_text(&o.stderr);
        assert_eq!(o.status.code(), Some(2), "{err}");
        assert!(err.contains(&format!("error[{code}]")), "{code}: {err}");
    };
    let hostile: &[u8] = b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00truetR.";
    let healthy = fs::read(recorded("plain").join("rank_0")).unwrap();
    check(&[("rank_0", &healthy), ("rank_1", hostile)], "T1401");
    check(&[("rank_0", &healthy[..100]), ("rank_1", b"{")], "T1400");
    check(&[("rank_0", br#"{"version": "3.1", "entries": []}"#)], "T1402");
    check(&[("old_rank_0", &healthy), ("rank_0", &healthy)], "T1404");
}
