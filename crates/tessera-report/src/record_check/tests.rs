//! Tests of the checks and gates of a record.

use super::*;
use crate::flight::{FlightHeader, FlightLine};
use crate::record::{FailureCause, PipelineTimes};
use crate::timeline::tests::sample;

fn lines_of(r: &RunRecord) -> Vec<String> {
    let mut out = vec![RecordLine::Start(r.start.clone()).to_json()];
    out.extend(r.chunks.iter().map(|c| RecordLine::Chunk(c.clone()).to_json()));
    out.extend(r.events.iter().map(|e| RecordLine::Event(e.clone()).to_json()));
    out.extend(r.end.iter().map(|e| RecordLine::End(e.clone()).to_json()));
    out
}

fn codes(file: &str) -> Vec<&'static str> {
    check_record(file.as_bytes()).1.iter().map(|d| d.code.id).collect()
}

fn verdict(gates: &[RunGate], name: &str) -> GateVerdict {
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

#[test]
fn gates_follow_from_the_chunks_of_a_run() {
    let mut record = sample(4);
    let gates = run_gates(&record, &[]);
    assert_eq!(verdict(&gates, "decision to commit, p50"), GateVerdict::NotMeasured);
    assert_eq!(verdict(&gates, "refusal of a bad envelope"), GateVerdict::NotMeasured);
    for name in ["call ids", "cache epochs", "requests"] {
        assert_eq!(verdict(&gates, name), GateVerdict::Pass, "{name}");
    }
    // The third call waited for the call before it; that wait is not the control plane's.
    for (c, (since_decision, idle_ns)) in record.chunks.iter_mut().zip([
        (200_000, 0),
        (250_000, 300_000),
        (9_000_000, 100_000),
        (250_000, 900_000),
    ]) {
        let decided_ns = c.start_ns - since_decision;
        let (ready_ns, done_ns, period_ns) = (c.start_ns, c.start_ns + 1, u64::from(c.chunk));
        c.pipeline = Some(PipelineTimes {
            decided_ns,
            ready_ns,
            done_ns,
            period_ns,
            stage0_ns: 0,
            stage1_ns: 0,
            idle_ns,
            digest_ns: 0,
        });
    }
    let gates = run_gates(&record, &[]);
    assert_eq!(gates[0].value, "200.0 µs");
    assert_eq!((gates[0].verdict, gates[1].verdict), (GateVerdict::Pass, GateVerdict::Pass));
    record.chunks[3].pipeline = record.chunks[3].pipeline.map(|p| PipelineTimes {
        decided_ns: p.decided_ns - 2_000_000,
        idle_ns: 2_000_000,
        ..p
    });
    let gates = run_gates(&record, &[]);
    assert_eq!((gates[0].verdict, gates[1].verdict), (GateVerdict::Pass, GateVerdict::Fail));

    record.chunks[2].call_id = 2;
    record.chunks[1].cache_epoch = 1;
    record.chunks[3].request = Some(2);
    let gates = run_gates(&record, &[]);
    for name in ["call ids", "cache epochs", "requests"] {
        assert_eq!(verdict(&gates, name), GateVerdict::Fail, "{name}");
    }
    // A cut dropped request 3.
    record.chunks.pop();
    record.events[0].event = DROPPED_EVENT.into();
    record.events[0].detail = "request 3, of epoch 0: it waited".into();
    assert_eq!(verdict(&run_gates(&record, &[]), "requests"), GateVerdict::Pass);
}

#[test]
fn memory_that_differs_from_the_plan_by_more_than_its_limit_fails_its_gate() {
    let name = "allocated memory against the plan";
    let mut record = sample(3);
    assert_eq!(verdict(&run_gates(&record, &[]), name), GateVerdict::NotMeasured);
    for (allocated_bytes, expected) in [
        (1_050_000, GateVerdict::Pass),
        (950_000, GateVerdict::Pass),
        (1_051_000, GateVerdict::Fail),
        (900_000, GateVerdict::Fail),
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
    assert_eq!(gate(9_000_000, "T0706"), (GateVerdict::Pass, "4.0 ms, codes T0706".to_string()));
    assert_eq!(gate(1_005_000_000, "T0706").0, GateVerdict::Fail);
    assert_eq!(gate(9_000_000, "T0705"), (GateVerdict::Fail, "4.0 ms, codes T0705 T0706".to_string()));
    assert_eq!(verdict(&run_gates(&record, &[]), "refusal of a bad envelope"), GateVerdict::NotMeasured);
}
