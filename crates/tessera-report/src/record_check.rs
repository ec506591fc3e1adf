//! Checks of a run's record: its lines against the schema, and the gates of the operator's manual.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use tessera_base::{Diagnostic, Diagnostics, GateStatus};

use crate::codes::{T0907, T0908};
use crate::flight::{FlightEntry, FlightLog, FlightMark, PlanMatch};
use crate::record::{ChunkRecord, MemoryRecord, RecordLine, RecordReader, RunRecord, RunStatus};
use crate::stats::nearest_rank_quantile;

/// Event of a request that a cut dropped; its detail begins with `request N,`.
pub const DROPPED_EVENT: &str = "dropped";
/// Codes up to this one refuse a message before any rank runs its call.
const LAST_REFUSAL_CODE: &str = "T0735";
/// Chunks at the beginning of a run that the gates of the commit leave out: the first call waits for
/// pages, caches and connections that every later call finds.
pub const COMMIT_WARM_UP_CHUNKS: usize = 1;

/// A gate of the time from the decision to the commit.
struct CommitGate {
    name: &'static str,
    percent: usize,
    limit_ns: u64,
    limit: &'static str,
    /// Number of counted chunks below which the gate is withheld.
    min_chunks: usize,
}

/// The median needs a few chunks. Below 100 chunks, the 99th percentile is the maximum, and one chunk
/// would decide it.
const COMMIT_GATES: [CommitGate; 2] = [
    CommitGate {
        name: "decision to commit, p50",
        percent: 50,
        limit_ns: 300_000,
        limit: "at most 300 µs",
        min_chunks: 20,
    },
    CommitGate {
        name: "decision to commit, p99",
        percent: 99,
        limit_ns: 1_000_000,
        limit: "at most 1 ms",
        min_chunks: 100,
    },
];
/// Limit of the time from an envelope to the end of the run that it fails, in nanoseconds.
const REFUSAL_LIMIT_NS: u64 = 1_000_000_000;

/// Checks every line of a record against the schema, and the lines against each other. Returns the
/// record as far as it can be read, with every finding: T0901, T0902, T0907 or T0908.
#[must_use]
pub fn check_record(file: &[u8]) -> (Option<RunRecord>, Diagnostics) {
    let mut found = Diagnostics::new();
    let mut reader = RecordReader::new(usize::MAX);
    let mut end_line = None;
    for (i, line) in file.split_inclusive(|b| *b == b'\n').enumerate() {
        let place = format!("record.jsonl:{}", i + 1);
        if let Err(d) = reader.push_line(line) {
            let is_start = i == 0;
            found.push(d);
            if is_start {
                return (None, found);
            }
        }
        let Ok(given) = serde_json::from_slice::<Value>(line) else { continue };
        if let Some(end) = end_line {
            found.push(
                Diagnostic::error(&T0908, "a line follows the end line of the record")
                    .with_label(place.clone(), "written after the end of the run")
                    .with_label(format!("record.jsonl:{end}"), "the end line is here"),
            );
        }
        if given.get("kind").and_then(Value::as_str) == Some("end") {
            end_line = Some(i + 1);
        }
        let Ok(line) = serde_json::from_value::<RecordLine>(given.clone()) else { continue };
        let mut unknown = Vec::new();
        find_unknown_keys(&given, &serde_json::to_value(&line).unwrap_or_default(), "", &mut unknown);
        if !unknown.is_empty() {
            found.push(
                Diagnostic::error(&T0907, "a line of the record has keys that its schema lacks")
                    .with_label(place, unknown.join(", ")),
            );
        }
    }
    match reader.into_record() {
        Ok(record) => {
            check_totals(&record, &mut found);
            (Some(record), found)
        }
        Err(d) => {
            found.push(d);
            (None, found)
        }
    }
}

/// Lists the paths of the keys in `given` that its typed form does not write. A key whose value is
/// null may be left out.
fn find_unknown_keys(given: &Value, known: &Value, path: &str, out: &mut Vec<String>) {
    match (given, known) {
        (Value::Object(given), Value::Object(known)) => {
            for (key, value) in given {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                match known.get(key) {
                    Some(known) => find_unknown_keys(value, known, &path, out),
                    None if value.is_null() => {}
                    None => out.push(path),
                }
            }
        }
        (Value::Array(given), Value::Array(known)) => {
            for (i, (given, known)) in given.iter().zip(known).enumerate() {
                find_unknown_keys(given, known, &format!("{path}[{i}]"), out);
            }
        }
        _ => {}
    }
}

/// Compares the totals of the end line with the chunk lines, and the order of the chunk lines.
fn check_totals(record: &RunRecord, found: &mut Diagnostics) {
    for pair in record.chunks.windows(2) {
        let [a, b] = pair else { continue };
        if b.chunk <= a.chunk {
            found.push(
                Diagnostic::error(&T0908, "the chunk lines of the record are not in order")
                    .with_label("record.jsonl", format!("chunk {} follows chunk {}", b.chunk, a.chunk)),
            );
        }
    }
    let Some(end) = &record.end else {
        let why = if record.truncated { "the last line is incomplete" } else { "no line of kind \"end\"" };
        found.push(
            Diagnostic::warning(&T0908, "the record has no end line: the run is in progress or died")
                .with_label("record.jsonl", why),
        );
        return;
    };
    let totals = [
        ("chunks", u64::from(end.chunks), u64::from(record.chunk_count())),
        ("frames", end.frames, record.frame_count()),
    ];
    for (what, total, lines) in totals.into_iter().filter(|(_, total, lines)| total != lines) {
        found.push(
            Diagnostic::error(&T0908, format!("the record's end line counts other {what} than its lines"))
                .with_label("end line", total.to_string())
                .with_label("chunk lines", lines.to_string()),
        );
    }
}

/// One gate of the manual, computed from what a run left behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunGate {
    /// What the gate measures.
    pub name: &'static str,
    /// The value of this run, with its unit; the reason if there is none.
    pub value: String,
    /// The limit, in the words of the manual.
    pub limit: &'static str,
    /// Result of the comparison; `NotApplicable` or `NotMeasured` if there is no value.
    pub verdict: GateStatus,
}

/// Computes the gates of the pages *Control plane*, *Ids, epochs and replay* and *KV caches* from a record and
/// the flight records of its run.
#[must_use]
pub fn run_gates(record: &RunRecord, flights: &[FlightLog]) -> Vec<RunGate> {
    let mut gates = commit_gates(record);
    gates.push(refusal_gate(record, flights));
    gates.push(collective_gate(flights));
    let ids: Vec<u64> = record.chunks.iter().map(|c| c.call_id).collect();
    gates.push(order_gate("call ids", "grow over all chunks", &ids, |a, b| a < b));
    let epochs: Vec<u64> = record.chunks.iter().map(|c| u64::from(c.cache_epoch)).collect();
    gates.push(order_gate("cache epochs", "never fall", &epochs, |a, b| a <= b));
    gates.push(exactly_once_gate(record));
    gates.push(memory_gate(record));
    gates
}

fn new_gate(name: &'static str, limit: &'static str, value: String, passes: bool) -> RunGate {
    let verdict = if passes { GateStatus::Pass } else { GateStatus::Fail };
    RunGate { name, value, limit, verdict }
}

fn unmeasured_gate(name: &'static str, limit: &'static str, why: &str) -> RunGate {
    RunGate { name, value: why.to_string(), limit, verdict: GateStatus::NotMeasured }
}

/// The gates of the time from the decision to the commit. The first [`COMMIT_WARM_UP_CHUNKS`] chunks are
/// left out, and a gate is withheld below its number of chunks.
fn commit_gates(record: &RunRecord) -> Vec<RunGate> {
    let counted = record.chunks.iter().skip(COMMIT_WARM_UP_CHUNKS);
    let times: Vec<u64> = counted.filter_map(control_plane_ns).collect();
    let gate = |CommitGate { name, percent, limit_ns, limit, min_chunks }: &CommitGate| {
        let count = times.len();
        if count < *min_chunks {
            let why = format!("{count} chunks after the warm-up, {min_chunks} needed");
            return unmeasured_gate(name, limit, &why);
        }
        let ns = nearest_rank_quantile(&times, *percent);
        new_gate(name, limit, format!("{:.1} µs over {count} chunks", ns as f64 / 1e3), ns <= *limit_ns)
    };
    COMMIT_GATES.iter().map(gate).collect()
}

/// Returns the time that the control plane took for a call, in nanoseconds: from the decision until the
/// last rank was ready, and from the moment when the ranks were ready and the previous call was done
/// until the commit. The wait of ready ranks for the previous call is no part. `None` for a chunk
/// without pipeline times.
fn control_plane_ns(c: &ChunkRecord) -> Option<u64> {
    let p = c.pipeline?;
    let until_ready = p.ready_ns.saturating_sub(p.decided_ns);
    let after_ready = c.start_ns.saturating_sub(p.ready_ns);
    // The first call of a run has no previous call to wait for.
    let until_commit = if p.period_ns == 0 { after_ready } else { after_ready.min(p.idle_ns) };
    Some(until_ready + until_commit)
}

/// The time in which a bad message ended the run, and the number of codes that the ranks raised.
fn refusal_gate(record: &RunRecord, flights: &[FlightLog]) -> RunGate {
    let (name, limit) = ("refusal of a bad envelope", "less than 1 s, with one code");
    let refused = record
        .cause()
        .and_then(|c| c.code.as_deref())
        .filter(|code| code.starts_with("T07") && *code <= LAST_REFUSAL_CODE);
    if refused.is_none() {
        let verdict = GateStatus::NotApplicable;
        return RunGate { name, value: "no message was refused".to_string(), limit, verdict };
    }
    let marks = |flight: &FlightLog| -> Vec<(u64, FlightMark)> {
        let marks = flight.lines.iter().filter_map(|l| match &l.entry {
            FlightEntry::Mark(mark) => Some((l.at_ns, mark.clone())),
            _ => None,
        });
        marks.collect()
    };
    let codes: BTreeSet<String> = flights
        .iter()
        .flat_map(marks)
        .filter(|(_, mark)| mark.event == "failed" && !mark.is_relayed)
        .filter_map(|(_, mark)| mark.code)
        .collect();
    let leader = flights.iter().find(|f| f.header.rank == 0).map(marks).unwrap_or_default();
    let failed = leader.iter().find(|(_, mark)| mark.event == "failed").map(|(at, _)| *at);
    let called = leader
        .iter()
        .filter(|(at, mark)| mark.event == "called" && failed.is_some_and(|failed| *at <= failed))
        .map(|(at, _)| *at)
        .max();
    let (Some(failed), Some(called)) = (failed, called) else {
        return unmeasured_gate(name, limit, "the leader's flight record lacks the call or its failure");
    };
    let ns = failed - called;
    let value = format!("{:.1} ms, codes {}", ns as f64 / 1e6, Vec::from_iter(codes.clone()).join(" "));
    new_gate(name, limit, value, ns < REFUSAL_LIMIT_NS && codes.len() == 1)
}

/// Collectives that a rank issued although the plan does not hold them at their position.
fn collective_gate(flights: &[FlightLog]) -> RunGate {
    let (name, limit) = ("collectives that the plan lacks", "0");
    let matches: Vec<PlanMatch> = flights
        .iter()
        .flat_map(|f| &f.lines)
        .filter_map(|l| match &l.entry {
            FlightEntry::Collective(c) => Some(c.plan_match),
            _ => None,
        })
        .collect();
    if flights.is_empty() {
        return unmeasured_gate(name, limit, "the run has no flight records");
    }
    let others = matches.iter().filter(|m| **m != PlanMatch::Yes).count();
    new_gate(name, limit, format!("{others} of {}", matches.len()), others == 0)
}

fn order_gate(
    name: &'static str,
    limit: &'static str,
    values: &[u64],
    is_ordered: fn(u64, u64) -> bool,
) -> RunGate {
    let broken = values.windows(2).find(|w| !is_ordered(w[0], w[1]));
    match (broken, values.first(), values.last()) {
        (Some(w), ..) => new_gate(name, limit, format!("{} follows {}", w[1], w[0]), false),
        (None, Some(first), Some(last)) => new_gate(name, limit, format!("{first} to {last}"), true),
        _ => unmeasured_gate(name, limit, "no chunk was delivered"),
    }
}

/// Each request has one chunk line or one `dropped` event; in a complete run none lacks both.
fn exactly_once_gate(record: &RunRecord) -> RunGate {
    let (name, limit) = ("requests", "each has one chunk or one `dropped` event");
    let dropped = record.events.iter().filter(|e| e.event == DROPPED_EVENT);
    let dropped =
        dropped.filter_map(|e| e.detail.strip_prefix("request ")?.split_once(',')?.0.parse::<u64>().ok());
    let mut counts: BTreeMap<u64, u32> = BTreeMap::new();
    for request in record.chunks.iter().filter_map(|c| c.request).chain(dropped) {
        *counts.entry(request).or_default() += 1;
    }
    let wanted = match (record.status(), record.start.chunks) {
        (RunStatus::Complete, Some(chunks)) => u64::from(chunks),
        _ => counts.keys().next_back().map_or(0, |last| last + 1),
    };
    let wrong: Vec<String> = (0..wanted)
        .map(|request| (request, counts.get(&request).copied().unwrap_or(0)))
        .filter(|(_, n)| *n != 1)
        .map(|(request, n)| format!("request {request} has {n}"))
        .collect();
    match (wanted, wrong.first()) {
        (0, _) => unmeasured_gate(name, limit, "no request was settled"),
        (_, Some(first)) => new_gate(name, limit, first.clone(), false),
        _ => new_gate(name, limit, format!("{wanted} requests"), true),
    }
}

/// The memory that ranks allocated, against the plan.
fn memory_gate(record: &RunRecord) -> RunGate {
    let (name, limit) = ("allocated memory against the plan", "within 5 % on every rank and chunk");
    let ranks = record.chunks.iter().flat_map(|c| c.ranks.iter().map(move |r| (c.chunk, r)));
    let measured = ranks.filter_map(|(chunk, r)| Some((chunk, r.rank, r.memory?)));
    let deviation = |m: &MemoryRecord| m.deviation_percent().abs();
    match measured.max_by(|a, b| deviation(&a.2).total_cmp(&deviation(&b.2))) {
        None => unmeasured_gate(name, limit, "no rank reported its memory"),
        Some((chunk, rank, m)) => {
            let value = format!("{:+.1} % on rank {rank} in chunk {chunk}", m.deviation_percent());
            new_gate(name, limit, value, m.agrees_with_plan())
        }
    }
}

#[cfg(test)]
mod tests;
