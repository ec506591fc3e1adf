//! Runs the autopsy on small records of runs with known faults, and of healthy runs, and checks
//! which ranks it names.
//!
//! `autopsy.cases` holds the records as text. A case has a name, a line per rank with its events in
//! order, further evidence, and the expected results. Each event takes a millisecond.

#![allow(clippy::unwrap_used, reason = "a case that does not parse fails")]

use std::fmt::Write;

use tessera_report::autopsy::{
    Autopsy, AutopsyEvidence, AutopsyRunState, ProcessEnd, ProcessVitals, diagnose_run,
};
use tessera_report::flight::{
    CollectiveProgress, FlightCollective, FlightEntry, FlightHeader, FlightLine, FlightLog, FlightMark,
    FlightPhase, PlanMatch, SCHEMA,
};
use tessera_report::record::RunRecord;

const CASES: &str = include_str!("autopsy.cases");
const BASE_NS: u64 = 1_000_000_000_000;
const WALL_NS: u64 = 1_795_219_200_000_000_000;
const MS: u64 = 1_000_000;

#[test]
fn every_faulty_rank_is_named_and_no_healthy_one() {
    let mut wrong = String::new();
    let mut count = 0;
    for case in CASES.split("\ncase ").skip(1) {
        let (name, body) = case.split_once('\n').unwrap();
        let (evidence, expects) = parse_case(body);
        let a = diagnose_run(&evidence);
        count += 1;
        for e in expects {
            if let Err(why) = check_expectation(&a, &e) {
                let _ = writeln!(wrong, "{name}: expected {e}; {why}\n{a:#?}");
            }
        }
        // Every finding needs a sentence for its reader.
        assert!(a.findings.iter().all(|f| !f.summary.is_empty()), "{name}");
        assert!(!a.next_step.is_empty() && !a.to_text("run").is_empty() && a.to_json().is_object(), "{name}");
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(count >= 30, "{count} cases");
}

/// A truncated record must not make the autopsy name a rank in a run that ended well.
#[test]
fn a_healthy_run_stays_healthy_with_any_record_cut_or_missing() {
    let healthy = CASES.split("\ncase ").find(|c| c.starts_with("healthy-complete")).unwrap();
    let (evidence, _) = parse_case(healthy.split_once('\n').unwrap().1);
    for rank in 0..evidence.flight_records.len() {
        let mut missing = evidence.clone();
        missing.flight_records.remove(rank);
        assert_eq!(diagnose_run(&missing).culprits(), Vec::<u32>::new());
        for keep in 0..evidence.flight_records[rank].lines.len() {
            let mut cut = evidence.clone();
            cut.flight_records[rank].lines.truncate(keep);
            assert_eq!(diagnose_run(&cut).culprits(), Vec::<u32>::new(), "rank {rank}, {keep} lines");
        }
    }
}

/// A rank on another host whose record is not available is not at fault for that, whatever the
/// state of the others.
#[test]
fn a_missing_record_of_another_host_is_no_finding() {
    for name in ["healthy-and-running", "healthy-and-idle-between-calls"] {
        let healthy = CASES.split("\ncase ").find(|c| c.starts_with(name)).unwrap();
        let (evidence, _) = parse_case(healthy.split_once('\n').unwrap().1);
        for rank in 0..evidence.flight_records.len() {
            let mut missing = evidence.clone();
            missing.flight_records.remove(rank);
            missing.vitals.remove(&(rank as u32));
            let a = diagnose_run(&missing);
            assert_eq!(
                (a.culprits(), a.ranks.len()),
                (Vec::new(), evidence.flight_records.len()),
                "{name}, {rank}"
            );
            assert!(a.to_json()["ranks"][rank]["silent_ns"].is_null(), "{a:#?}");
        }
    }
}

#[test]
fn a_damaged_header_loses_only_its_own_record() {
    let (evidence, _) =
        parse_case("0: k1 [p tp.0-1.all_reduce=d ] !exit:0\n1: k1 [p tp.0-1.all_reduce=d ] !exit:0");
    for (rank, world) in [(u32::MAX, 2), (u32::MAX, u32::MAX), (2, 2), (65_536, 0), (0, u32::MAX)] {
        let mut damaged = evidence.clone();
        damaged.flight_records[1].header.rank = rank;
        damaged.flight_records[1].header.world_size = world;
        let a = diagnose_run(&damaged);
        assert_eq!(a.ranks.len(), 2, "{rank} of {world}");
        let why = format!("names rank {rank} of {world}: it is damaged");
        assert!(a.notes.iter().any(|n| n.contains(&why)), "{:?}", a.notes);
    }
    // Many missing records make a single note, and members beyond the number of ranks are ignored.
    let (mut wide, _) = parse_case("0: k1 [p tp.0-9.all_reduce=w\nvitals 0=alive\nnow 30000");
    wide.flight_records[0].header.world_size = 65_536;
    assert!(diagnose_run(&wide).notes.contains(&"ranks 10-65535 have no flight record".to_string()));
    wide.flight_records[0].header.world_size = 1;
    assert_eq!(diagnose_run(&wide).culprits(), Vec::<u32>::new());
}

#[test]
fn no_evidence_gives_no_finding() {
    let a = diagnose_run(&AutopsyEvidence::default());
    assert_eq!((a.state, a.culprits()), (AutopsyRunState::Unfinished, Vec::new()));
}

fn check_expectation(a: &Autopsy, expect: &str) -> Result<(), String> {
    let (what, value) = expect.split_once(' ').unwrap_or((expect, ""));
    let json = a.to_json();
    let found = match what {
        "culprits" => a.culprits().iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        "class" => a
            .findings
            .first()
            .map_or(String::new(), |f| serde_json::to_value(f.class).unwrap().as_str().unwrap().to_string()),
        "state" | "agreement" | "triage" => json[what].as_str().unwrap().to_string(),
        "says" => {
            let text = a.to_text("run");
            return if text.contains(value) { Ok(()) } else { Err(format!("the text is\n{text}")) };
        }
        "lacks" => {
            let text = a.to_text("run");
            return if text.contains(value) { Err(format!("the text is\n{text}")) } else { Ok(()) };
        }
        _ => panic!("{what}"),
    };
    if found == value { Ok(()) } else { Err(format!("found {found}")) }
}

fn parse_case(body: &str) -> (AutopsyEvidence, Vec<String>) {
    let mut e = AutopsyEvidence::default();
    let mut expects = Vec::new();
    for line in body.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with("--")) {
        let (head, rest) = line.split_once(' ').unwrap_or((line, ""));
        let pairs = || rest.split_whitespace().map(|p| p.split_once('=').unwrap());
        match head {
            "expect" => expects.push(rest.to_string()),
            "record" => e.record = Some(parse_record(rest)),
            "end" => e.process_ends.extend(pairs().map(|(r, n)| ProcessEnd {
                rank: r.parse().unwrap(),
                status: None,
                signal: Some(n.parse().unwrap()),
            })),
            "vitals" => e.vitals.extend(pairs().map(|(r, v)| {
                let v = match v {
                    "stopped" => ProcessVitals::Stopped,
                    "gone" => ProcessVitals::Gone,
                    _ => ProcessVitals::Alive,
                };
                (r.parse().unwrap(), v)
            })),
            "now" => e.now_ns = Some(WALL_NS + rest.parse::<u64>().unwrap() * MS),
            rank => e.flight_records.push(parse_flight(rank.trim_end_matches(':').parse().unwrap(), rest)),
        }
    }
    let world = e.flight_records.iter().map(|f| f.header.rank + 1).max().unwrap_or(0);
    e.flight_records.iter_mut().for_each(|f| f.header.world_size = f.header.world_size.max(world));
    (e, expects)
}

/// Builds a record from `complete`, `interrupted`, `running`, or `failed:rank:code:class`.
fn parse_record(text: &str) -> RunRecord {
    let start = r#"{"kind":"start","schema":2,"tessera":"0","plan":"p","model":"m","mesh":"tp=2","strategy":"s","numerics":"n","cache":"c","topology":"mesh","seed":0,"prompts":[],"chunks":9,"fps":1.0,"width":1,"height":1,"steps":1,"command":[],"started_at":"","status":"running"}"#;
    let parts: Vec<&str> = text.split(':').collect();
    let end = |status: &str, cause: String| {
        format!(
            "{{\"kind\":\"end\",\"status\":\"{status}\",\"cause\":{cause},\"chunks\":1,\"frames\":1,\"wall_ns\":1,\"fps\":1.0,\"output_complete\":true,\"golden\":\"\"}}\n"
        )
    };
    let end = match parts[0] {
        "running" => String::new(),
        "failed" => {
            let rank = if parts[1] == "-" { "null" } else { parts[1] };
            let class = parts[3].replace('_', " ");
            end(
                "failed",
                format!(
                    "{{\"class\":\"{class}\",\"exit_code\":10,\"rank\":{rank},\"code\":\"{}\",\"message\":\"it\"}}",
                    parts[2]
                ),
            )
        }
        status => end(status, "null".to_string()),
    };
    RunRecord::parse(format!("{start}\n{end}").as_bytes()).unwrap()
}

/// Builds a flight record from the events of a rank: `kN` begins a call, `[name` a phase, `]` ends
/// it, `]?` ends it with a collective missing, `+N` advances N milliseconds, `ring:N` marks N lines
/// as overwritten by the ring, `pos:N` sets the position at which the phase continues, `session:x`
/// sets the run, `world:N` the number of ranks that the rank knows, `!mark…` is a mark, and any
/// other word a collective.
fn parse_flight(rank: u32, text: &str) -> FlightLog {
    let mut f = FlightLog {
        header: FlightHeader {
            schema: SCHEMA,
            kind: "flight".into(),
            rank,
            session: "1".into(),
            plan: "p".into(),
            pid: 100 + rank,
            mono_ns: BASE_NS,
            wall_ns: WALL_NS,
            ..FlightHeader::default()
        },
        ..FlightLog::default()
    };
    let (mut now, mut call, mut step, mut pos, mut n) = (BASE_NS, 1, 0, 0, 0);
    let mut phase: Option<usize> = None;
    for word in text.split_whitespace() {
        now += MS;
        let number = |prefix: &str| word.strip_prefix(prefix).and_then(|w| w.parse::<u64>().ok());
        if let Some(ms) = number("+") {
            now += ms * MS;
        } else if let Some(k) = number("k") {
            (call, step) = (k, 0);
        } else if let Some(lost) = number("ring:") {
            (n, f.overwritten_lines) = (lost, lost);
        } else if let Some(at) = number("pos:") {
            pos = at as u32;
        } else if let Some(world) = number("world:") {
            f.header.world_size = world as u32;
        } else if let Some(session) = word.strip_prefix("session:") {
            f.header.session = session.to_string();
        } else if let Some(name) = word.strip_prefix('[') {
            pos = 0;
            let p = FlightPhase {
                call,
                chunk: call as u32,
                phase: name.into(),
                step,
                planned_count: 9,
                ..FlightPhase::default()
            };
            phase = Some(f.lines.len());
            f.lines.push(FlightLine { n, at_ns: now, entry: FlightEntry::Phase(p) });
            n += 1;
        } else if let Some(how) = word.strip_prefix(']') {
            if let Some(FlightEntry::Phase(p)) = phase.and_then(|i| f.lines.get_mut(i)).map(|l| &mut l.entry)
            {
                (p.end_ns, p.issued) = (now, pos);
                p.missing_line = (how == "?").then(|| "tp all_reduce f32[4]".to_string());
            }
            (phase, step) = (None, step + 1);
        } else if let Some(m) = word.strip_prefix('!') {
            f.lines.push(FlightLine { n, at_ns: now, entry: FlightEntry::Mark(parse_mark(m)) });
            n += 1;
        } else {
            let name = phase.and_then(|i| match &f.lines[i].entry {
                FlightEntry::Phase(p) => Some(p.phase.clone()),
                _ => None,
            });
            let phase = name.unwrap_or_else(|| "p".to_string());
            let c = parse_collective(word, now);
            let c = FlightCollective { call, chunk: call as u32, step, pos, phase, planned_count: 9, ..c };
            f.lines.push(FlightLine { n, at_ns: now, entry: FlightEntry::Collective(c) });
            (pos, n) = (pos + 1, n + 1);
        }
    }
    f
}

/// Parses a collective: `group.ranks.op`, then `/type`, `%reduction`, `@root`, `>peer` as needed,
/// `=` and a state: `d`one, `w`aits, `i`ssued, `r`efused. Flags after the state: `!` differs from
/// the plan, `~` is moved, `?` was compared with no plan, `*` was started by the device.
fn parse_collective(word: &str, now: u64) -> FlightCollective {
    let (what, state) = word.rsplit_once('=').unwrap();
    let mut end = what.len();
    let mut field = |mark: char| {
        let at = what[..end].rfind(mark)?;
        let value = what[at + 1..end].to_string();
        end = at;
        Some(value)
    };
    let peer = field('>').map(|p| p.parse().unwrap());
    let root = field('@').map(|r| r.parse().unwrap());
    let reduction = field('%');
    let ty = field('/').unwrap_or_else(|| "f32[4]".to_string());
    let mut parts = what[..end].split('.');
    let mut part = || parts.next().unwrap().to_string();
    let (group, ranks, op) = (part(), part(), part());
    let flags = &state[1..];
    let state = match &state[..1] {
        "d" => CollectiveProgress::Done,
        "w" => CollectiveProgress::Waiting,
        "i" => CollectiveProgress::Issued,
        _ => CollectiveProgress::Refused,
    };
    let plan = match flags {
        f if f.contains('!') => PlanMatch::No,
        f if f.contains('~') => PlanMatch::Moved,
        f if f.contains('?') => PlanMatch::Unknown,
        _ => PlanMatch::Yes,
    };
    FlightCollective {
        state,
        group,
        ranks,
        op,
        ty,
        reduction,
        root,
        peer,
        plan_match: plan,
        started: flags.contains('*'),
        planned_line: (plan == PlanMatch::No)
            .then(|| "tp all_reduce f32[4] {replicated} reduction=sum".to_string()),
        end_ns: if state == CollectiveProgress::Done { now } else { 0 },
        ..FlightCollective::default()
    }
}

/// Parses a mark: `exit:0`, `failed:rank:code:class`, with `:echo` for a relayed failure, or a mark
/// with its call.
fn parse_mark(text: &str) -> FlightMark {
    let parts: Vec<&str> = text.split(':').collect();
    match parts[0] {
        "failed" => FlightMark {
            event: "failed".into(),
            blamed_rank: parts[1].parse().ok(),
            code: Some(parts[2].into()),
            class: Some(parts[3].replace('_', " ")),
            is_relayed: parts.get(4) == Some(&"echo"),
            detail: Some("it".into()),
            ..FlightMark::default()
        },
        "exit" => FlightMark { event: "exit".into(), status: parts[1].parse().ok(), ..FlightMark::default() },
        name => FlightMark {
            event: name.into(),
            call: parts.get(1).and_then(|k| k.parse().ok()),
            ..FlightMark::default()
        },
    }
}
