//! Compares what a run with a fault reported with the fault: terminal, record, autopsy and flight
//! records.

use std::path::Path;
use std::process::Command;

use anyhow::Context;
use serde_json::{Value, json};
use tessera::faults::flipped_place;
use tessera::run_dir::read_flight_records;
use tessera_report::flight::{FlightEntry, FlightLog};

use super::draw::{DrawnFault, FaultKind, Layout, Moment};
use super::run::FaultRun;
use crate::stats::round_to_millis;
use crate::stream_process::StreamProcess;

/// Longest time in seconds until a dead peer is known.
const DEATH_KNOWN_S: f64 = 1.0;
/// Longest time in seconds until a peer that does not answer is known.
const STALL_KNOWN_S: f64 = 5.0;
/// Longest time in seconds from a death on one host until all processes are gone.
const GONE_AFTER_DEATH_S: f64 = 2.0;
/// Longest time in seconds from the detection until all processes are gone, in every other case.
const GONE_AFTER_DETECTION_S: f64 = 5.0;

/// A way in which a run did not meet the expectations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Defect {
    /// A process was left.
    Orphan,
    /// A fault that must end nothing ended the run, or changed its result.
    FalseAlarm,
    /// A fault that a check covers was not found.
    Undetected,
    /// The terminal does not name the cause.
    WrongTerminal,
    /// The record does not name the cause.
    WrongRecord,
    /// The autopsy does not name the cause.
    WrongAutopsy,
    /// Detection or exit took longer than allowed.
    Late,
    /// The campaign could not run the fault.
    NotRun,
}

impl Defect {
    pub const ALL: [Defect; 8] = [
        Defect::Orphan,
        Defect::FalseAlarm,
        Defect::Undetected,
        Defect::WrongTerminal,
        Defect::WrongRecord,
        Defect::WrongAutopsy,
        Defect::Late,
        Defect::NotRun,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Defect::Orphan => "process left",
            Defect::FalseAlarm => "false alarm",
            Defect::Undetected => "undetected",
            Defect::WrongTerminal => "wrong terminal",
            Defect::WrongRecord => "wrong record",
            Defect::WrongAutopsy => "wrong autopsy",
            Defect::Late => "late",
            Defect::NotRun => "not run",
        }
    }
}

/// The result of one fault.
#[derive(Debug, Clone)]
pub struct FaultResult {
    pub fault: DrawnFault,
    /// When the fault hit: `start-up`, `within a call` or `between calls`.
    pub moment: &'static str,
    /// Time from the fault to the first report of a failure in a flight record, in seconds.
    pub seconds_to_detection: Option<f64>,
    /// Time from the fault until no process was left, in seconds.
    pub seconds_until_gone: f64,
    /// Number of calls that the run began after a flipped bit.
    pub calls_to_detection: Option<u64>,
    /// The reported failure or another result, in short.
    pub outcome: String,
    /// Name of the weight or cache in which a bit was flipped.
    pub place: Option<String>,
    /// What did not meet the expectations, each with its details.
    pub defects: Vec<(Defect, String)>,
}

impl FaultResult {
    /// Builds the result of a fault that could not be run.
    pub fn from_error(fault: DrawnFault, e: &anyhow::Error) -> FaultResult {
        FaultResult {
            fault,
            moment: "start-up",
            seconds_to_detection: None,
            seconds_until_gone: 0.0,
            calls_to_detection: None,
            outcome: "not run".to_string(),
            place: None,
            defects: vec![(Defect::NotRun, format!("{e:#}"))],
        }
    }

    pub fn to_json(&self) -> Value {
        let defects: Vec<String> = self.defects.iter().map(|(d, t)| format!("{}: {t}", d.name())).collect();
        json!({
            "number": self.fault.number,
            "layout": self.fault.layout.name(),
            "kind": self.fault.kind.name(),
            "rank": self.fault.rank,
            "moment": self.moment,
            "duration_ms": self.fault.duration.as_millis() as u64,
            "seconds_to_detection": self.seconds_to_detection.map(round_to_millis),
            "seconds_until_gone": round_to_millis(self.seconds_until_gone),
            "calls_to_detection": self.calls_to_detection,
            "outcome": self.outcome,
            "place": self.place,
            "defects": defects,
        })
    }
}

/// What a run reported about its end.
struct Reports {
    /// Code and rank that each started process printed.
    terminal: Vec<(Option<String>, Option<u64>)>,
    /// The last line of the record, if it is an end line.
    record_end: Option<Value>,
    autopsy: Value,
    flights: Vec<FlightLog>,
}

impl Reports {
    fn read(tessera: &Path, run: &FaultRun, world: u32) -> anyhow::Result<Reports> {
        let out = run.run_dir();
        let record = std::fs::read_to_string(out.join("record.jsonl")).unwrap_or_default();
        let last = record.lines().last().and_then(|l| serde_json::from_str::<Value>(l).ok());
        let autopsy = Command::new(tessera).arg("autopsy").arg(&out).args(["--format", "json"]).output();
        let autopsy = autopsy.context("cannot run the autopsy")?;
        Ok(Reports {
            terminal: run.processes.iter().map(read_terminal).collect(),
            record_end: last.filter(|l| l["kind"] == "end"),
            autopsy: serde_json::from_slice(&autopsy.stdout).unwrap_or_default(),
            flights: read_flight_records(&out, world),
        })
    }

    fn record_cause(&self) -> &Value {
        self.record_end.as_ref().map_or(&Value::Null, |end| &end["cause"])
    }

    fn is_complete(&self, golden: &str) -> bool {
        let end = self.record_end.as_ref();
        end.is_some_and(|e| {
            e["status"] == "complete" && e["output_complete"] == true && e["golden"] == *golden
        })
    }

    fn summarize_causes(&self) -> String {
        let terminal: Vec<String> =
            self.terminal.iter().map(|(code, rank)| format_cause(code.as_deref(), *rank)).collect();
        let cause = self.record_cause();
        let record = match &self.record_end {
            None => "no end".to_string(),
            Some(end) if cause.is_null() => end["status"].as_str().unwrap_or_default().to_string(),
            Some(_) => format_cause(cause["code"].as_str(), cause["rank"].as_u64()),
        };
        let finding = self.autopsy["findings"][0]["class"].as_str().unwrap_or("nothing");
        let culprits = &self.autopsy["culprits"];
        format!("terminal {}; record {record}; autopsy {finding} {culprits}", terminal.join(" and "))
    }

    /// Returns the times of all marks with this name, with their ranks.
    fn mark_times<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (u32, u64)> + 'a {
        self.flights.iter().flat_map(move |f| {
            f.lines.iter().filter_map(move |l| match &l.entry {
                FlightEntry::Mark(m) if m.event == name => Some((f.header.rank, l.at_ns)),
                _ => None,
            })
        })
    }
}

/// Returns the code and rank that a process printed: those of a failure, or of a diagnostic if the
/// process ended before the ranks had met.
fn read_terminal(process: &StreamProcess) -> (Option<String>, Option<u64>) {
    let failure = process.reported_failure();
    if failure != (None, None) {
        return failure;
    }
    let text = process.output_text();
    let diagnostic = text.lines().find_map(|l| serde_json::from_str::<Value>(l).ok());
    let diagnostic = diagnostic.filter(|d| d["severity"] == "error").unwrap_or_default();
    // The first label lists the ranks that are missing.
    let texts =
        [&diagnostic["message"], &diagnostic["labels"][0]["message"]].map(|t| t.as_str().unwrap_or_default());
    let after = |text: &str, word| text.split_once(word).map(|(_, rest)| rest.to_string());
    let rest = texts.iter().find_map(|t| after(t, "rank ").or_else(|| after(t, "ranks ")));
    let rank = rest.as_deref().map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    (diagnostic["code"].as_str().map(str::to_string), rank.flatten().and_then(|r| r.parse().ok()))
}

fn format_cause(code: Option<&str>, rank: Option<u64>) -> String {
    match (code, rank) {
        (None, None) => "nothing".to_string(),
        (code, None) => code.unwrap_or("no code").to_string(),
        (code, Some(rank)) => format!("{} rank {rank}", code.unwrap_or("no code")),
    }
}

/// Compares the run with the fault. `golden` is the hash of the latents of a run without a fault.
pub fn compare_run(
    tessera: &Path,
    fault: &DrawnFault,
    run: &FaultRun,
    golden: &str,
) -> anyhow::Result<FaultResult> {
    let reports = Reports::read(tessera, run, fault.layout.rank_count())?;
    let fault_ns = run.fault_ns.context("the armed fault did not fire")?;
    let first_failure = reports.mark_times("failed").map(|(_, at)| at).filter(|at| *at >= fault_ns).min();
    let mut result = FaultResult {
        fault: *fault,
        moment: classify_moment(fault, &reports, fault_ns),
        seconds_to_detection: first_failure.map(|at| (at - fault_ns) as f64 / 1e9),
        seconds_until_gone: run.seconds_until_gone,
        calls_to_detection: None,
        outcome: reports.summarize_causes(),
        place: flipped_place(&run.run_dir()),
        defects: Vec::new(),
    };
    if run.left_behind > 0 {
        result.defects.push((Defect::Orphan, format!("{} processes", run.left_behind)));
    }
    match fault.kind {
        kind if kind.is_harmless() => {
            if reports.is_complete(golden) {
                result.outcome = "complete".to_string();
            } else {
                result.defects.push((Defect::FalseAlarm, reports.summarize_causes()));
            }
        }
        FaultKind::FlippedCache if reports.record_cause().is_null() => {
            result.outcome = if reports.is_complete(golden) { "no effect" } else { "undetected" }.to_string();
            result.defects.push((Defect::Undetected, result.outcome.clone()));
        }
        FaultKind::FlippedCache => {
            check_causes(fault, &reports, &mut result);
            result.outcome = "found".to_string();
        }
        _ => check_causes(fault, &reports, &mut result),
    }
    if fault.kind == FaultKind::FlippedWeight {
        let begun = reports.mark_times("commit").filter(|(rank, at)| *rank == fault.rank && *at > fault_ns);
        result.calls_to_detection = Some(begun.count() as u64);
    } else if !fault.kind.is_harmless() && !fault.kind.is_armed() {
        check_times(fault, &mut result);
    }
    Ok(result)
}

/// Returns when the fault hit, according to the last message of the lockstep that the rank had sent
/// or received.
fn classify_moment(fault: &DrawnFault, reports: &Reports, fault_ns: u64) -> &'static str {
    let last = |name| {
        let own = reports.mark_times(name).filter(|(rank, at)| *rank == fault.rank && *at <= fault_ns);
        own.map(|(_, at)| at).max()
    };
    match (last("commit"), last("done")) {
        _ if matches!(fault.moment, Moment::StartUp(_)) => "start-up",
        (None, _) => "start-up",
        (commit, done) if commit > done => "within a call",
        _ => "between calls",
    }
}

/// Checks that all reports name the cause.
fn check_causes(fault: &DrawnFault, reports: &Reports, result: &mut FaultResult) {
    let rank = u64::from(fault.rank);
    let (code, culprit) = match fault.kind {
        FaultKind::Kill => ("T0742", Some(rank)),
        FaultKind::Stop | FaultKind::StopLauncherAndRank => ("T0743", Some(rank)),
        FaultKind::KillLauncher => ("T0749", None),
        // A difference between two ranks may show before the hashes; it has no majority.
        FaultKind::FlippedWeight if reports.record_cause()["code"] == "T0744" => ("T0744", None),
        FaultKind::FlippedWeight => ("T0754", Some(rank)),
        FaultKind::FlippedCache => ("T0772", Some(rank)),
        _ => return check_cut(reports, result),
    };
    let starting = matches!(fault.moment, Moment::StartUp(_));
    // Before the first call, other checks may see the loss of a rank first; the rank counts.
    let is_named = |found: Option<&str>, found_rank: Option<u64>| {
        found_rank == culprit && (found == Some(code) || starting && found.is_some())
    };
    let joined = fault.layout == Layout::Joined;
    for (n, (found, found_rank)) in reports.terminal.iter().enumerate() {
        let is_victim = joined && n as u32 == fault.rank;
        let speaks = fault.kind != FaultKind::KillLauncher && !is_victim;
        if speaks && !is_named(found.as_deref(), *found_rank) {
            result.defects.push((Defect::WrongTerminal, reports.summarize_causes()));
        }
    }
    // Rank 0 writes the record of joined ranks; without a launcher nobody closes it for rank 0.
    let unwritten = joined && fault.kind == FaultKind::Kill && fault.rank == 0
        || starting && (joined || fault.kind == FaultKind::KillLauncher);
    let cause = reports.record_cause();
    let is_missing = unwritten && cause.is_null();
    if !is_missing && !is_named(cause["code"].as_str(), cause["rank"].as_u64()) {
        result.defects.push((Defect::WrongRecord, reports.summarize_causes()));
    }
    if cause.is_null() && starting {
        // Nothing but flight records that ended before the first call.
        return;
    }
    let culprits: Vec<u64> = culprit.into_iter().collect();
    let finding = &reports.autopsy["findings"][0];
    let stall = code == "T0743";
    let named = reports.autopsy["culprits"] == json!(culprits)
        && (culprit.is_some() || finding["class"] == "launcher" || finding["class"] == "drifted")
        && (!stall || reports.autopsy["triage"] == "hang");
    if !named {
        let triage = reports.autopsy["triage"].as_str().unwrap_or("none");
        result
            .defects
            .push((Defect::WrongAutopsy, format!("{}, triage {triage}", reports.summarize_causes())));
    }
}

/// Checks that each end of a cut link names the other end, which is all that it can know.
fn check_cut(reports: &Reports, result: &mut FaultResult) {
    let other = |n: u64| Some(1 - n);
    if (0..).zip(&reports.terminal).any(|(n, (_, rank))| *rank != other(n)) {
        result.defects.push((Defect::WrongTerminal, reports.summarize_causes()));
    }
    if reports.record_cause()["rank"].as_u64() != other(0) {
        result.defects.push((Defect::WrongRecord, reports.summarize_causes()));
    }
    // The autopsy sees both ends, so it must find that no rank is at fault.
    if reports.autopsy["findings"][0]["class"] != "transport" || reports.autopsy["culprits"] != json!([]) {
        result.defects.push((Defect::WrongAutopsy, reports.summarize_causes()));
    }
}

fn check_times(fault: &DrawnFault, result: &mut FaultResult) {
    let gone = result.seconds_until_gone;
    let known = result.seconds_to_detection;
    let dies = matches!(fault.kind, FaultKind::Kill | FaultKind::KillLauncher | FaultKind::CutClosed);
    let known_limit = if dies { DEATH_KNOWN_S } else { STALL_KNOWN_S };
    let gone_limit = if dies && fault.layout != Layout::Joined {
        GONE_AFTER_DEATH_S
    } else {
        known.unwrap_or(known_limit) + GONE_AFTER_DETECTION_S
    };
    if known.is_some_and(|s| s > known_limit) || gone > gone_limit {
        let known = known.map_or("unknown".to_string(), |s| format!("{s:.3} s"));
        result.defects.push((Defect::Late, format!("detected after {known}, gone after {gone:.3} s")));
    }
}
