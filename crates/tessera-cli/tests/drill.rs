//! The break-it suite from the binary, in a directory that holds nothing of the project.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use support::text;

/// A laptop with two cores needs a tenth of it; a machine that builds something else meanwhile needs more.
const SUITE: Duration = Duration::from_secs(120);

fn drill(args: &[&str]) -> Output {
    let away = tempfile::tempdir().unwrap();
    Command::new(env!("CARGO_BIN_EXE_tessera")).arg("drill").args(args).current_dir(&away).output().unwrap()
}

#[test]
fn every_fault_ends_as_it_must_in_time_and_leaves_nobody() {
    let begun = Instant::now();
    let o = drill(&["--format", "json"]);
    let (lines, took) = (text(&o.stdout), begun.elapsed());
    let red: Vec<&str> = lines.lines().filter(|l| !l.contains("\"ok\":true")).collect();
    assert!(red.is_empty(), "{}\n{}", red.join("\n"), text(&o.stderr));
    assert_eq!(o.status.code(), Some(0), "{}", text(&o.stderr));
    assert!(lines.lines().count() > 40, "{lines}");
    assert!(lines.lines().all(|l| l.contains("\"left\":[]")), "{lines}");
    assert!(took < SUITE, "{took:?}");
}

#[test]
fn a_drill_without_its_check_turns_red() {
    let o = drill(&["--self-test", "wrong-group", "stale-result", "member-dies", "effective-backend"]);
    let said = text(&o.stdout);
    assert_eq!(o.status.code(), Some(0), "{said}{}", text(&o.stderr));
    assert_eq!(said.matches("turned red").count(), 4, "{said}");
    assert!(said.contains("each drill needs its check"), "{said}");
}

#[test]
fn a_slip_is_told_with_the_name_that_was_meant() {
    let o = drill(&["wrong-grop", "--keep", "kept"]);
    assert_eq!(o.status.code(), Some(2));
    assert!(
        text(&o.stderr).contains("T0038") && text(&o.stderr).contains("`wrong-group`?"),
        "{}",
        text(&o.stderr)
    );
    let list = text(&drill(&["--list"]).stdout);
    assert!(list.contains("stopped-rank") && list.contains("T0743 rank 1 leader preflight"), "{list}");
}
