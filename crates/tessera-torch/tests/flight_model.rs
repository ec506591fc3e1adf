//! Faults and healthy runs that the recordings lack, written as programs of ranks.
//!
//! A rank is a list of words. `tp:ar64@7` is an all_reduce of 64 elements in the group `tp` from line 7 of
//! the program; `ag` is an all_gather, `a2a` an all-to-all, `s3` a send to rank 3 and `r3` a receive. A word
//! ends in `!` if the device did not complete it, and in `+` if it started it.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_torch::flight::{
    EntryState, FaultKind, FlightDump, FlightEntry, FlightGroup, FlightReport, StackFrame, examine_dumps,
};

/// Builds the dumps of a run from its groups and the words of each rank.
fn build_dumps(groups: &[(&str, &[u32])], programs: &[&str]) -> BTreeMap<u32, FlightDump> {
    let build = |(rank, program): (usize, &&str)| {
        let rank = rank as u32;
        let own = groups.iter().filter(|(_, ranks)| ranks.contains(&rank));
        let mut dump = FlightDump {
            rank,
            version: (2, 10),
            groups: own
                .map(|(name, ranks)| {
                    (name.to_string(), FlightGroup { description: String::new(), ranks: ranks.to_vec() })
                })
                .collect(),
            ..FlightDump::default()
        };
        let mut numbers: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for (at, word) in program.split_whitespace().enumerate() {
            let group = word.split_once(':').unwrap().0;
            let number = numbers.entry(group.to_string()).or_default();
            dump.entries.push(parse_word(word, rank, at as u64, number, groups));
        }
        (rank, dump)
    };
    programs.iter().enumerate().map(build).collect()
}

fn parse_word(
    word: &str,
    rank: u32,
    at: u64,
    number: &mut (u64, u64),
    groups: &[(&str, &[u32])],
) -> FlightEntry {
    let (group, call) = word.split_once(':').unwrap();
    let state = match call.chars().last() {
        Some('!') => EntryState::Scheduled,
        Some('+') => EntryState::Started,
        _ => EntryState::Completed,
    };
    let call = call.trim_end_matches(['!', '+']);
    let (call, line) = call.split_once('@').unwrap_or((call, "1"));
    let letters = call.trim_end_matches(|c: char| c.is_ascii_digit());
    let count: u64 = call[letters.len()..].parse().unwrap_or(64);
    let members = groups.iter().find(|(name, _)| *name == group).unwrap().1;
    let index = |r: u64| members.iter().position(|m| u64::from(*m) == r).unwrap();
    let own = index(u64::from(rank));
    let (op, is_p2p) = match letters {
        "s" => (format!("send {own}->{}", index(count)), true),
        "r" => (format!("recv {own}<-{}", index(count)), true),
        "a2a" => ("all_to_all".to_string(), false),
        "ag" => ("_all_gather_base".to_string(), false),
        _ => ("all_reduce".to_string(), false),
    };
    if is_p2p {
        number.1 += 1
    } else {
        number.0 += 1
    }
    let shape = if is_p2p { vec![512] } else { vec![count] };
    let frame =
        StackFrame { function: "step".into(), file: "train.py".into(), line: line.parse().unwrap_or(1) };
    let shapes: Arc<[Vec<u64>]> = Arc::from([shape]);
    FlightEntry {
        record_id: at,
        group: group.into(),
        sequence: if is_p2p { number.1 } else { number.0 },
        launch: *number,
        is_p2p,
        op: op.into(),
        input_shapes: shapes.clone(),
        output_shapes: shapes,
        input_dtypes: Arc::from(["Float".into()]),
        state,
        retired: state == EntryState::Completed,
        created_ns: 1000 * at,
        stack_hash: u64::from(frame.line),
        frames: Arc::from([frame]),
    }
}

fn examine(groups: &[(&str, &[u32])], programs: &[&str]) -> FlightReport {
    examine_dumps(&build_dumps(groups, programs))
}

#[track_caller]
fn assert_cause(report: &FlightReport, kind: FaultKind, ranks: &[u32]) {
    let found: Vec<(FaultKind, &[u32])> = report.findings.iter().map(|f| (f.kind, &f.ranks[..])).collect();
    assert_eq!(found, [(kind, ranks)], "{}", report.to_text("run"));
}

#[track_caller]
fn assert_healthy(report: &FlightReport) {
    assert!(report.findings.is_empty(), "{}", report.to_text("run"));
}

const WORLD: &[(&str, &[u32])] = &[("0", &[0, 1, 2, 3])];
const GRID: &[(&str, &[u32])] =
    &[("0", &[0, 1, 2, 3]), ("1", &[0, 1]), ("2", &[2, 3]), ("3", &[0, 2]), ("4", &[1, 3])];

#[test]
fn an_odd_rank_0_is_at_fault_by_majority() {
    let report = examine(WORLD, &["0:ar64 0:ar32!", "0:ar64 0:ar64!", "0:ar64 0:ar64!", "0:ar64 0:ar64!"]);
    assert_cause(&report, FaultKind::OtherShape, &[0]);
}

#[test]
fn collectives_of_equal_size_that_are_out_of_step_are_found_by_their_call_sites() {
    let whole = "0:ar64@1 0:ar64@2 0:ar64@3 0:ar64@4 0:ar64@5! 0:ar64@6!";
    let skipped = "0:ar64@1 0:ar64@2 0:ar64@4 0:ar64@5 0:ar64@6!";
    let report = examine(WORLD, &[whole, whole, skipped, whole]);
    assert_cause(&report, FaultKind::Skipped, &[2]);
    assert_eq!(report.findings[0].sequence, Some(3));
    assert_eq!(report.findings[0].certainty.name(), "likely");
    let extra = "0:ar64@1 0:ar64@2 0:ar64@9 0:ar64@3 0:ar64@4! 0:ar64@5! 0:ar64@6!";
    assert_cause(&examine(WORLD, &[whole, extra, whole, whole]), FaultKind::Extra, &[1]);
}

/// A branch on the rank that issues the same collective from another line is a program like any other.
#[test]
fn other_call_sites_alone_are_no_departure() {
    let whole = "0:ar64@1 0:ar64@2 0:ar64@3 0:ar64@4! 0:ar64@5!";
    let branch = "0:ar64@1 0:ar64@9 0:ar64@3 0:ar64@4! 0:ar64@5!";
    assert_healthy(&examine(WORLD, &[branch, whole, whole, whole]));
    let own_lines = ["0:ar64@1 0:ar64@2!", "0:ar64@3 0:ar64@4!", "0:ar64@5 0:ar64@6!", "0:ar64@7 0:ar64@8!"];
    assert_healthy(&examine(WORLD, &own_lines));
}

/// The sizes after it alone would fit a collective that one rank has in addition.
#[test]
fn one_odd_size_among_equal_ones_is_no_extra_collective() {
    let whole = "0:ar64@1 0:ar64@2 0:ar64@3 0:ar64@4!";
    let odd = "0:ar64@1 0:ar8@2 0:ar64@3 0:ar64@4!";
    assert_cause(&examine(WORLD, &[whole, odd, whole, whole]), FaultKind::OtherShape, &[1]);
    let extra = "0:ar64@1 0:ar8@9 0:ar64@2 0:ar64@3 0:ar64@4!";
    assert_cause(&examine(WORLD, &[whole, extra, whole, whole]), FaultKind::Extra, &[1]);
    let skipped = "0:ar64@1 0:ar64@3 0:ar64@4!";
    let with_small = "0:ar64@1 0:ar8@2 0:ar64@3 0:ar64@4!";
    assert_cause(&examine(WORLD, &[with_small, skipped, with_small, with_small]), FaultKind::Skipped, &[1]);
}

#[test]
fn one_rank_with_a_collective_more_than_all_others_is_the_one_at_fault() {
    let few = "0:ar64@1 0:ar64@1";
    let report = examine(WORLD, &[few, few, "0:ar64@1 0:ar64@1 0:ar64@1!", few]);
    assert_cause(&report, FaultKind::Extra, &[2]);
    assert_eq!(report.findings[0].certainty.name(), "likely");
}

#[test]
fn an_extra_collective_in_one_group_that_keeps_a_rank_from_another_group_is_found() {
    let groups: &[(&str, &[u32])] = &[("0", &[0, 1, 2, 3]), ("5", &[0, 1, 2, 3])];
    let others = "5:a2a64@1 0:ar64@2 5:a2a64@1 0:ar64@2 0:ar8@3!";
    let odd = "5:a2a64@1 0:ar64@2 5:a2a64@1 0:ar64@2 5:a2a64@9!";
    assert_cause(&examine(groups, &[others, others, odd, others]), FaultKind::Extra, &[2]);
    // The same collective as in every round before: the rank took another order.
    let round = "5:a2a64@1 0:ar64@2 5:a2a64@1 0:ar64@2 5:a2a64@1!";
    assert_cause(&examine(groups, &[others, others, round, others]), FaultKind::WaitCycle, &[2]);
}

#[test]
fn rows_and_columns_in_different_orders_are_a_cycle() {
    let rows_first = ["1:ar64 3:ar64", "4:ar64 1:ar64", "3:ar64 2:ar64", "2:ar64 4:ar64"];
    let host: Vec<String> = rows_first.iter().map(|p| format!("{}!", p.split(' ').next().unwrap())).collect();
    let host: Vec<&str> = host.iter().map(String::as_str).collect();
    let report = examine(GRID, &host);
    assert_eq!(report.findings[0].kind, FaultKind::WaitCycle);
    assert_eq!(report.findings[0].ranks, [0, 1, 3, 2]);
    assert_eq!(report.findings[0].sides.len(), 4);
    // All hosts ran ahead, and the devices wait for each other.
    let device: Vec<String> = rows_first.iter().map(|p| p.replace(' ', "! ") + "!").collect();
    let device: Vec<&str> = device.iter().map(String::as_str).collect();
    let report = examine(GRID, &device);
    assert_cause(&report, FaultKind::WaitCycle, &[0, 1, 3, 2]);
    assert_eq!(report.findings[0].certainty.name(), "likely");
    assert!(report.findings[0].doubts[0].contains("streams"));
}

#[test]
fn groups_in_one_order_that_are_all_pending_are_no_cycle() {
    assert_healthy(&examine(
        GRID,
        &["1:ar64! 3:ar64!", "1:ar64! 4:ar64!", "2:ar64! 3:ar64!", "2:ar64! 4:ar64!"],
    ));
    // One member completed the first collective, so the other's lag is no wait.
    assert_healthy(&examine(
        GRID,
        &["1:ar64! 3:ar64!", "1:ar64 4:ar64!", "2:ar64 3:ar64!", "2:ar64 4:ar64!"],
    ));
}

#[test]
fn a_device_that_did_not_complete_what_its_peers_did_is_behind() {
    let others = "0:ag64 0:ag64 0:ar64!";
    let report = examine(WORLD, &[others, others, "0:ag64 0:ag64! 0:ar64!", others]);
    assert_cause(&report, FaultKind::DeviceBehind, &[2]);
    let report = examine(WORLD, &["0:ar64 0:ar64+", "0:ar64 0:ar64+", "0:ar64 0:ar64!", "0:ar64 0:ar64+"]);
    assert_cause(&report, FaultKind::DeviceBehind, &[2]);
    // It has enqueued less than its peers: the dump may as well be of an earlier moment.
    let ahead = "0:ag64 0:ag64 0:ar64! 0:ar64!";
    assert_healthy(&examine(WORLD, &[ahead, ahead, "0:ag64 0:ag64! 0:ar64!", ahead]));
}

#[test]
fn a_missing_dump_is_suspect_only_if_ranks_wait_for_it() {
    let mut dumps = build_dumps(WORLD, &["0:ar64 0:ar64!", "0:ar64 0:ar64!", "0:ar64", "0:ar64 0:ar64!"]);
    assert_cause(&examine_dumps(&dumps), FaultKind::HostSilent, &[2]);
    dumps.remove(&2);
    assert_cause(&examine_dumps(&dumps), FaultKind::NoDump, &[2]);
    let mut done = build_dumps(WORLD, &["0:ar64"; 4]);
    done.remove(&2);
    let report = examine_dumps(&done);
    assert_healthy(&report);
    assert!(report.notes.iter().any(|n| n == "rank 2 left no dump"));
}

#[test]
fn a_rank_that_progressed_when_it_wrote_its_dump_is_not_silent() {
    let mut dumps =
        build_dumps(WORLD, &["0:ar64 0:ar64 0:ar64!", "0:ar64 0:ar64", "0:ar64 0:ar64", "0:ar64 0:ar64"]);
    for rank in 1..4 {
        dumps.get_mut(&rank).unwrap().entries.last_mut().unwrap().retired = false;
    }
    let report = examine_dumps(&dumps);
    assert_healthy(&report);
    assert!(report.notes.iter().any(|n| n.contains("made progress")), "{:?}", report.notes);
}

#[test]
fn a_ring_that_lost_a_whole_group_still_has_its_count() {
    let mut dumps =
        build_dumps(GRID, &["0:ar64 0:ar64!", "0:ar64 0:ar64!", "2:ar64 2:ar64", "0:ar64 0:ar64!"]);
    let silent = dumps.get_mut(&2).unwrap();
    silent.lost_head = true;
    // Without a count, the rank may have enqueued any number.
    let unknown = examine_dumps(&dumps);
    assert!(unknown.findings.iter().all(|f| f.ranks != [2]), "{}", unknown.to_text("run"));
    dumps.get_mut(&2).unwrap().last_enqueued.insert("0".to_string(), 1);
    assert_cause(&examine_dumps(&dumps), FaultKind::HostSilent, &[2]);
}

#[test]
fn rings_with_unequal_numbers_of_entries_are_no_departure() {
    let mut dumps = build_dumps(GRID, &["0:ar64 1:ar64 1:ar64 0:ar64"; 2]);
    dumps.extend(build_dumps(GRID, &["", "", "0:ar64 0:ar64", "0:ar64 0:ar64"]).split_off(&2));
    for (rank, lost) in [(0, 2), (1, 1)] {
        let dump = dumps.get_mut(&rank).unwrap();
        dump.entries.drain(..lost);
        dump.lost_head = true;
    }
    assert_healthy(&examine_dumps(&dumps));
}

#[test]
fn sends_and_receives_are_matched_by_pair() {
    let both_send = examine(WORLD, &["0:s1!", "0:s0!", "", ""]);
    assert_cause(&both_send, FaultKind::WaitCycle, &[0, 1]);
    assert_cause(&examine(WORLD, &["0:s1 0:s1!", "0:r0", "", ""]), FaultKind::HostSilent, &[1]);
    // NCCL completes a small send before the receive is posted.
    assert_healthy(&examine(WORLD, &["0:s1 0:s1", "0:r0 0:r0!", "", ""]));
    let mut dumps = build_dumps(WORLD, &["0:s1!", "0:r0!", "", ""]);
    dumps.get_mut(&1).unwrap().entries[0].input_shapes = Arc::from([vec![256]]);
    let report = examine_dumps(&dumps);
    assert_cause(&report, FaultKind::OtherShape, &[0, 1]);
    assert_eq!(report.findings[0].certainty.name(), "unclear");
}

#[test]
fn two_ranks_that_differ_without_a_history_are_both_named() {
    let report = examine(&[("0", &[0, 1])], &["0:ar64@1!", "0:ag64@2!"]);
    assert_cause(&report, FaultKind::OtherOp, &[0, 1]);
    assert_eq!(report.findings[0].certainty.name(), "unclear");
}

#[test]
fn one_size_in_another_shape_is_the_same_collective() {
    let mut dumps = build_dumps(WORLD, &["0:ar64!"; 4]);
    let entry = &mut dumps.get_mut(&0).unwrap().entries[0];
    (entry.input_shapes, entry.output_shapes) = (Arc::from([vec![8, 8]]), Arc::from([vec![4, 16]]));
    assert_healthy(&examine_dumps(&dumps));
}

#[test]
fn departures_in_groups_without_a_common_rank_at_fault_are_both_found() {
    let groups: &[(&str, &[u32])] = &[("0", &[0, 1, 2, 3, 4, 5]), ("1", &[0, 1, 2]), ("2", &[3, 4, 5])];
    let (first, second) = ("1:ar64@1 1:ar64@2!", "2:ar64@1 2:ag64@2!");
    let programs = ["1:ar64@1 1:ar32@2!", first, first, second, "2:ar64@1 2:ar64@3!", second];
    let report = examine(groups, &programs);
    let found: Vec<(FaultKind, &[u32])> = report.findings.iter().map(|f| (f.kind, &f.ranks[..])).collect();
    assert_eq!(found, [(FaultKind::OtherShape, &[0][..]), (FaultKind::OtherOp, &[4][..])]);
}

#[test]
fn what_a_departed_rank_does_in_its_other_groups_is_a_consequence() {
    let groups: &[(&str, &[u32])] = &[("0", &[0, 1, 2]), ("1", &[0, 1, 2])];
    let others = "0:ar64@1 0:ar64@2 1:ar8@3 1:ag16@4 0:ar64@5!";
    let report = examine(groups, &[others, "0:ar64@1 0:ar32@2 1:ag16@4 1:ar8@3 0:ar64@5!", others]);
    assert_cause(&report, FaultKind::OtherShape, &[1]);
}
