//! Tests of the checks and gates of a record.

use super::*;
use crate::flight::{FlightHeader, FlightLine};
use crate::record::{FailureCause, PipelineTimes};
use crate::timeline::tests::sample;

fn lines_of(r: &RunRecord) -> Vec<String> {
    let mut out = vec![RecordLine::Start(Box::new(r.start.clone())).to_json()];
    out.extend(r.chunks.iter().map(|c| RecordLine::Chunk(c.clone()).to_json()));
    out.extend(r.events.iter().map(|e| RecordLine::Event(e.clone()).to_json()));
    out.extend(r.end.iter().map(|e| RecordLine::End(e.clone()).to_json()));
    out
}

fn codes(file: &str) -> Vec<&'static str> {
    check_record(file.as_bytes()).1.iter().map(|d| d.code.id).collect()
}

fn verdict(gates: &[RunGate], name: &str) -> GateStatus {
    gates.iter().find(|g| g.name == name).unwrap().verdict
}

#[test]
fn a_record_is_checked_against_its_schema_and_against_itself() {
    let record = sample(3);
    let lines = lines_of(&record);
    let whole = lines.concat();
    assert_eq!(check_record(whole.as_bytes()), (Some(record), Vec::new()));
    let with_key = whole.replacen("\"stream\":\"decode\"", "\"colour\":1,\"stream\":\"decode\"", 1);
    let (_, found) = check_record(with_key.as_bytes());
    assert_eq!((found[0].code, found.len()), (&T0907, 1));
    assert_eq!(found[0].labels[0].location, "record.jsonl:2");
    assert_eq!(found[0].labels[0].message, "ranks[0].phases[0].colour");
    assert_eq!(codes(&whole.replacen("\"machine\":null,", "", 1)), [] as [&str; 0]);
    // A missing field, a wrong type, a lost chunk, a swapped pair, a line after the end, no end.
    assert_eq!(codes(&whole.replacen("\"call_id\":2,", "", 1)), ["T0902", "T0908", "T0908"]);
    assert_eq!(codes(&whole.replacen("\"wall_ns\":10000000", "\"wall_ns\":\"x\"", 1))[0], "T0902");
    assert_eq!(codes(&[&lines[..2], &lines[3..]].concat().concat()), ["T0908", "T0908"]);
    let mut swapped = lines.clone();
    swapped.swap(1, 2);
    assert_eq!(codes(&swapped.concat()), ["T0908"]);
    assert_eq!(codes(&format!("{whole}{}", lines[4])), ["T0908"]);
    let (_, found) = check_record(lines[..4].concat().as_bytes());
    assert!(found.len() == 1 && !found[0].is_error(), "a run in progress has no end line yet: {found:?}");
    assert_eq!(codes(""), ["T0901"]);
    assert_eq!(codes("{}\n"), ["T0901"]);
}

/// Gives each chunk the times of a call of 10 ms whose ranks are ready `until_ready_ns` after the decision.
/// The call waits for the call before it, which is done 9 ms after the decision; it is committed
/// `until_commit_ns` later.
fn set_pipeline_times(chunk: &mut ChunkRecord, until_ready_ns: u64, until_commit_ns: u64) {
    let decided_ns = u64::from(chunk.chunk) * 10_000_000;
    chunk.start_ns = decided_ns + 9_000_000 + until_commit_ns;
    chunk.pipeline = Some(PipelineTimes {
        decided_ns,
        ready_ns: decided_ns + until_ready_ns,
        done_ns: chunk.start_ns + 9_000_000,
        period_ns: 10_000_000,
        stage0_ns: 0,
        stage1_ns: 9_000_000,
        idle_ns: until_commit_ns,
        digest_ns: 0,
    });
}

fn commit_gates_of(record: &RunRecord) -> [(GateStatus, String); 2] {
    let gates = run_gates(record, &[]);
    assert!(gates[0].name.starts_with("decision to commit, p50") && gates[1].name.ends_with("p99"));
    [0, 1].map(|i| (gates[i].verdict, gates[i].value.clone()))
}

#[test]
fn the_time_to_a_commit_is_that_of_the_control_plane_and_not_the_wait_for_the_previous_call() {
    let mut record = sample(101);
    for c in &mut record.chunks {
        set_pipeline_times(c, 150_000, 50_000);
    }
    let both = |status, value: &str| [(status, value.to_string()), (status, value.to_string())];
    assert_eq!(commit_gates_of(&record), both(GateStatus::Pass, "200.0 µs over 100 chunks"));
    // The mesh is never idle, and yet the ranks take too long to be ready.
    for c in &mut record.chunks {
        set_pipeline_times(c, 2_000_000, 0);
    }
    assert_eq!(commit_gates_of(&record), both(GateStatus::Fail, "2000.0 µs over 100 chunks"));
    // The ranks are ready at once, and the leader takes too long to commit.
    for c in &mut record.chunks {
        set_pipeline_times(c, 0, 2_000_000);
    }
    assert_eq!(commit_gates_of(&record), both(GateStatus::Fail, "2000.0 µs over 100 chunks"));
    // Ranks that are ready late, after the previous call, count once.
    for c in &mut record.chunks {
        set_pipeline_times(c, 9_150_000, 200_000);
    }
    assert_eq!(commit_gates_of(&record)[0].1, "9200.0 µs over 100 chunks");
}

#[test]
fn the_first_chunk_is_warm_up_and_a_gate_of_too_few_chunks_is_withheld() {
    let mut record = sample(101);
    for c in &mut record.chunks {
        set_pipeline_times(c, 100_000, 0);
    }
    set_pipeline_times(&mut record.chunks[0], 8_000_000, 0);
    assert_eq!(commit_gates_of(&record).map(|(status, _)| status), [GateStatus::Pass; 2]);
    // Two of a hundred chunks decide the 99th percentile; one does not.
    set_pipeline_times(&mut record.chunks[7], 8_000_000, 0);
    assert_eq!(commit_gates_of(&record).map(|(status, _)| status), [GateStatus::Pass; 2]);
    set_pipeline_times(&mut record.chunks[8], 8_000_000, 0);
    assert_eq!(commit_gates_of(&record).map(|(status, _)| status), [GateStatus::Pass, GateStatus::Fail]);
    record.chunks.truncate(100);
    let [p50, p99] = commit_gates_of(&record);
    assert_eq!(p50.0, GateStatus::Pass);
    assert_eq!(p99, (GateStatus::NotMeasured, "99 chunks after the warm-up, 100 needed".to_string()));
    record.chunks.truncate(21);
    assert_eq!(commit_gates_of(&record)[0].0, GateStatus::Pass);
    record.chunks.truncate(20);
    assert_eq!(
        commit_gates_of(&record)[0],
        (GateStatus::NotMeasured, "19 chunks after the warm-up, 20 needed".to_string())
    );
}

#[test]
fn gates_follow_from_the_chunks_of_a_run() {
    let mut record = sample(4);
    let gates = run_gates(&record, &[]);
    assert_eq!(verdict(&gates, "decision to commit, p50"), GateStatus::NotMeasured);
    assert_eq!(verdict(&gates, "refusal of a bad envelope"), GateStatus::NotApplicable);
    assert_eq!(verdict(&gates, "collectives that the plan lacks"), GateStatus::NotMeasured);
    for name in ["call ids", "cache epochs", "requests"] {
        assert_eq!(verdict(&gates, name), GateStatus::Pass, "{name}");
    }
    record.chunks[2].call_id = 2;
    record.chunks[1].cache_epoch = 1;
    record.chunks[3].request = Some(2);
    let gates = run_gates(&record, &[]);
    for name in ["call ids", "cache epochs", "requests"] {
        assert_eq!(verdict(&gates, name), GateStatus::Fail, "{name}");
    }
    // A cut dropped request 3.
    record.chunks.pop();
    record.events[0].event = DROPPED_EVENT.into();
    record.events[0].detail = "request 3, of epoch 0: it waited".into();
    assert_eq!(verdict(&run_gates(&record, &[]), "requests"), GateStatus::Pass);
}

#[test]
fn memory_that_differs_from_the_plan_by_more_than_its_limit_fails_its_gate() {
    let name = "allocated memory against the plan";
    let mut record = sample(3);
    assert_eq!(verdict(&run_gates(&record, &[]), name), GateStatus::NotMeasured);
    for (allocated_bytes, expected) in [
        (1_050_000, GateStatus::Pass),
        (950_000, GateStatus::Pass),
        (1_051_000, GateStatus::Fail),
        (900_000, GateStatus::Fail),
    ] {
        let memory = MemoryRecord { planned_bytes: 1_000_000, allocated_bytes, ..MemoryRecord::default() };
        record.chunks[1].ranks[0].memory = Some(memory);
        assert_eq!(verdict(&run_gates(&record, &[]), name), expected, "{allocated_bytes}");
    }
}

#[test]
fn a_refusal_passes_with_one_code_within_its_limit() {
    let mut record = sample(1);
    record.end.as_mut().unwrap().cause = Some(FailureCause {
        class: "drift".into(),
        exit_code: 12,
        rank: Some(1),
        code: Some("T0706".into()),
        message: String::new(),
    });
    let mark = |at_ns, event: &str, code: Option<&str>| FlightLine {
        n: at_ns,
        at_ns,
        entry: FlightEntry::Mark(FlightMark {
            event: event.into(),
            code: code.map(Into::into),
            ..FlightMark::default()
        }),
    };
    let flight = |rank, lines| FlightLog {
        header: FlightHeader { rank, ..FlightHeader::default() },
        lines,
        ..FlightLog::default()
    };
    let gate = |failed_ns, other: &str| {
        let leader = vec![
            mark(1, "called", None),
            mark(5_000_000, "called", None),
            mark(failed_ns, "failed", Some("T0706")),
            mark(failed_ns + 9, "called", None),
        ];
        let flights = [flight(0, leader), flight(1, vec![mark(7, "failed", Some(other))])];
        let gate = run_gates(&record, &flights).into_iter().find(|g| g.name.starts_with("refusal")).unwrap();
        (gate.verdict, gate.value)
    };
    assert_eq!(gate(9_000_000, "T0706"), (GateStatus::Pass, "4.0 ms, codes T0706".to_string()));
    assert_eq!(gate(1_005_000_000, "T0706").0, GateStatus::Fail);
    assert_eq!(gate(9_000_000, "T0705"), (GateStatus::Fail, "4.0 ms, codes T0705 T0706".to_string()));
    assert_eq!(verdict(&run_gates(&record, &[]), "refusal of a bad envelope"), GateStatus::NotMeasured);
}
