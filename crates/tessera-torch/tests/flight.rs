//! Recorded dumps of runs with a planted fault, and of healthy runs: the right rank, or no accusation.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test reads its fixtures from files"
)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tessera_torch::flight::{FaultKind, FlightDump, FlightReport, examine_dumps, read_dump};

fn read_folder(folder: &Path) -> BTreeMap<u32, FlightDump> {
    let mut dumps = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        let Some(rank) = name.strip_prefix("rank_").and_then(|r| r.parse().ok()) else { continue };
        let dump = read_dump(&name, rank, BufReader::new(File::open(&path).unwrap())).unwrap();
        dumps.insert(rank, dump);
    }
    dumps
}

/// Returns the kind that a report must name for a planted fault, or `None` where the recorder shows
/// nothing of it.
fn expected_kind(fault: &str) -> Option<FaultKind> {
    Some(match fault {
        "healthy" | "invisible" => return None,
        "skipped" => FaultKind::Skipped,
        "extra" => FaultKind::Extra,
        "other op" => FaultKind::OtherOp,
        "shape" => FaultKind::OtherShape,
        "dtype" => FaultKind::OtherDtype,
        "wait cycle" => FaultKind::WaitCycle,
        "host silent" => FaultKind::HostSilent,
        "device behind" => FaultKind::DeviceBehind,
        "stopped" | "killed" => FaultKind::NoDump,
        other => panic!("unknown fault {other}"),
    })
}

/// Sorts ranks: those of a cycle stand in the order of the waits.
fn sort_ranks(ranks: &[u32]) -> Vec<u32> {
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    sorted
}

fn check_case(folder: &Path) -> Result<FlightReport, String> {
    let text = std::fs::read_to_string(folder.join("case.json")).unwrap();
    let planted: Value = serde_json::from_str(&text).unwrap();
    let report = examine_dumps(&read_folder(folder));
    let found: Vec<(FaultKind, Vec<u32>)> =
        report.findings.iter().map(|f| (f.kind, sort_ranks(&f.ranks))).collect();
    let ranks = match planted["rank"].as_u64() {
        Some(rank) => vec![rank as u32],
        None => (0..planted["ranks"].as_u64().unwrap() as u32).collect(),
    };
    let expected: Vec<(FaultKind, Vec<u32>)> =
        expected_kind(planted["fault"].as_str().unwrap()).map(|kind| (kind, ranks)).into_iter().collect();
    if found == expected { Ok(report) } else { Err(format!("{planted}: found {found:?}")) }
}

fn recorded(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/flight").join(case)
}

#[test]
fn every_planted_fault_is_found_and_no_healthy_rank_is_accused() {
    let mut cases: Vec<PathBuf> =
        std::fs::read_dir(recorded("")).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect();
    cases.sort();
    let wrong: Vec<String> = cases.iter().filter_map(|case| check_case(case).err()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(cases.len() >= 56, "{} cases", cases.len());
}

#[test]
fn a_finding_names_both_call_sites() {
    let report = check_case(&recorded("skip4")).unwrap();
    let finding = &report.findings[0];
    assert_eq!((finding.sequence, finding.certainty.name()), (Some(11), "certain"));
    let sites: Vec<&str> = finding.sides.iter().filter_map(|s| s.site.as_deref()).collect();
    assert_eq!(sites.len(), 2);
    assert!(sites.iter().all(|s| s.contains("record_flight.py:") && s.contains("in rounds")), "{sites:?}");
    assert_ne!(sites[0], sites[1]);
    let ranks: Vec<&[u32]> = finding.sides.iter().map(|s| &s.ranks[..]).collect();
    assert_eq!(ranks, [&[0, 1, 3][..], &[2][..]]);
}

#[test]
fn a_report_is_less_sure_when_the_rings_lost_entries() {
    let folder = recorded("skip4");
    let mut dumps = read_folder(&folder);
    assert_eq!(examine_dumps(&dumps).findings[0].certainty.name(), "certain");
    for dump in dumps.values_mut() {
        dump.entries.drain(..10);
        dump.lost_head = true;
    }
    let report = examine_dumps(&dumps);
    assert_eq!(report.findings[0].ranks, [2]);
    assert_eq!(report.findings[0].certainty.name(), "likely");
    assert!(report.findings[0].doubts[0].contains("lost what came before"));
}

/// The verdict does not depend on which rank is at fault: the ranks of a recording change places.
#[test]
fn the_lowest_rank_is_no_reference() {
    let mut dumps = read_folder(&recorded("skip4"));
    let (mut first, mut third) = (dumps.remove(&0).unwrap(), dumps.remove(&2).unwrap());
    (first.rank, third.rank) = (2, 0);
    dumps.extend([(2, first), (0, third)]);
    let report = examine_dumps(&dumps);
    assert_eq!((report.findings[0].kind, &report.findings[0].ranks[..]), (FaultKind::Skipped, &[0][..]));
}

#[test]
fn a_report_counts_the_collectives_of_a_forward_that_one_rank_ran_alone() {
    let report = check_case(&recorded("fsdp_extra_forward")).unwrap();
    let text = report.to_text("recorded");
    let cause =
        "cause: rank 1: issued 4 extra collectives, from collective 49 of group 0 (default_pg) on (certain)";
    assert!(text.contains(cause), "{text}");
    assert_eq!(report.to_json()["findings"][0]["count"], 4);
    let one = check_case(&recorded("saved_on_one")).unwrap();
    assert_eq!(one.to_json()["findings"][0]["count"], 1);
}

#[test]
fn text_and_json_say_the_same() {
    let report = check_case(&recorded("dtype")).unwrap();
    let text = report.to_text("recorded");
    assert!(
        text.contains("cause: rank 1: passed another dtype, at collective 10 of group 0 (default_pg)"),
        "{text}"
    );
    let json = report.to_json();
    assert_eq!(json["findings"][0]["kind"], "passed another dtype");
    assert_eq!(json["findings"][0]["ranks"], serde_json::json!([1]));
    assert!(text.contains(json["findings"][0]["next"].as_str().unwrap()));
}
