//! Tests the drills of the binary in a folder that contains nothing of the repository.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::to_text;
use tessera_library::Library;

/// Time limit of the suite. An idle laptop with two cores needs a tenth of it; a machine that
/// compiles at the same time needs more.
const SUITE_TIMEOUT: Duration = Duration::from_secs(120);

fn run_drill(args: &[&str]) -> Output {
    let away = tempfile::tempdir().unwrap();
    Command::new(env!("CARGO_BIN_EXE_tessera")).arg("drill").args(args).current_dir(&away).output().unwrap()
}

#[test]
fn every_fault_ends_as_expected_in_time_and_leaves_no_process() {
    let begun = Instant::now();
    let o = run_drill(&["--format", "json"]);
    let (lines, took) = (to_text(&o.stdout), begun.elapsed());
    let red: Vec<&str> = lines.lines().filter(|l| !l.contains("\"ok\":true")).collect();
    assert!(red.is_empty(), "{}\n{}", red.join("\n"), to_text(&o.stderr));
    assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
    assert!(lines.lines().count() > 40, "{lines}");
    assert!(lines.lines().all(|l| l.contains("\"leftover_pids\":[]")), "{lines}");
    assert!(took < SUITE_TIMEOUT, "{took:?}");
    assert_executed_drills_are_those_of_the_back_map(&lines);
}

/// Every drill of the back map ran, and each ended with the code, the rank and the place that the map
/// states, so that the way from a rule over its drill to the check is executed and not only linked.
fn assert_executed_drills_are_those_of_the_back_map(lines: &str) {
    let library = Library::read().unwrap();
    let ran: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let ids: Vec<&str> = ran.iter().map(|r| r["drill"].as_str().unwrap()).collect();
    let mut listed: Vec<&str> = library.drills.iter().map(|d| d.id.as_str()).collect();
    listed.retain(|id| !ids.contains(id));
    assert!(listed.is_empty() && ids.len() == library.drills.len(), "not run: {listed:?}");
    for drill in &library.drills {
        let observed = &ran[ids.iter().position(|id| *id == drill.id).unwrap()]["observed"];
        if let Some(code) = &drill.code {
            let rank = observed["rank"].as_u64().map_or("no rank".to_string(), |r| format!("rank {r}"));
            let signature = (observed["code"].as_str(), rank.as_str(), observed["place"].as_str());
            assert_eq!(
                signature,
                (Some(code.as_str()), drill.rank.as_str(), Some(drill.place.as_str())),
                "{}",
                drill.id
            );
        }
        assert!(
            !drill.rules.is_empty() && drill.rules.iter().all(|r| library.find_rule(r).is_some()),
            "{}",
            drill.id
        );
    }
}

// proves: P-28
#[test]
fn a_drill_without_its_check_turns_red() {
    let effective = ["effective-backend", "group-order", "program-set", "unarmed-check"];
    let caches = ["caches-lost", "history-cleared", "swapped-halo"];
    let others = ["--self-test", "wrong-group", "stale-result", "member-dies"];
    let o = run_drill(&[&others[..], &effective[..], &caches[..]].concat());
    let said = to_text(&o.stdout);
    assert_eq!(o.status.code(), Some(0), "{said}{}", to_text(&o.stderr));
    assert_eq!(said.matches("turned red").count(), 10, "{said}");
    assert!(said.contains("every drill fails without its check"), "{said}");
}

#[test]
fn a_measurement_has_no_check_to_disable() {
    let o = run_drill(&["--self-test", "wrong-group", "depth-sweep"]);
    assert_eq!((o.status.code(), to_text(&o.stdout).as_str()), (Some(2), ""));
    let said = to_text(&o.stderr);
    assert!(said.contains("T0038") && said.contains("`depth-sweep`"), "{said}");
    assert!(!said.contains("wrong-group"), "{said}");
}

#[test]
fn a_misspelled_id_gets_a_suggestion() {
    let o = run_drill(&["wrong-grop", "--keep", "kept"]);
    assert_eq!(o.status.code(), Some(2));
    assert!(
        to_text(&o.stderr).contains("T0038") && to_text(&o.stderr).contains("`wrong-group`?"),
        "{}",
        to_text(&o.stderr)
    );
    let list = to_text(&run_drill(&["--list"]).stdout);
    assert!(list.contains("stopped-rank") && list.contains("T0743 rank 1 leader preflight"), "{list}");
}
