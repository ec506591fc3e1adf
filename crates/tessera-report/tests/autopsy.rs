//! Small records of runs that went wrong in known ways, and of healthy ones: who is named, and who is not.
//!
//! `autopsy.cases` holds them as text. A case is a name, a line per rank with its events in order, what else is known,
//! and what must come out. Each event takes a millisecond.

#![allow(clippy::unwrap_used, reason = "a case that cannot be read fails")]

use std::fmt::Write;

use tessera_report::autopsy::{Autopsy, Evidence, ProcessEnd, RunState, Vitals, autopsy};
use tessera_report::flight::{Collective, Entry, Fit, Flight, Header, Line, Mark, Phase, SCHEMA, State};
use tessera_report::record::Record;

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
        let (evidence, expects) = read(body);
        let a = autopsy(&evidence);
        count += 1;
        for e in expects {
            if let Err(why) = holds(&a, &e) {
                let _ = writeln!(wrong, "{name}: expected {e}; {why}\n{a:#?}");
            }
        }
        // Whoever reads it reads words: no finding without a sentence, no blame without a rank.
        assert!(a.findings.iter().all(|f| !f.says.is_empty()), "{name}");
        assert!(!a.next.is_empty() && !a.text("run").is_empty() && a.to_json().is_object(), "{name}");
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(count >= 30, "{count} cases");
}

/// Cutting any record short must not turn the blame on a rank that the whole evidence clears, in a run that ended well.
#[test]
fn a_healthy_run_stays_healthy_with_any_record_cut_or_missing() {
    let healthy = CASES.split("\ncase ").find(|c| c.starts_with("healthy-complete")).unwrap();
    let (evidence, _) = read(healthy.split_once('\n').unwrap().1);
    for rank in 0..evidence.flights.len() {
        let mut missing = evidence.clone();
        missing.flights.remove(rank);
        assert_eq!(autopsy(&missing).culprits(), Vec::<u32>::new());
        for keep in 0..evidence.flights[rank].lines.len() {
            let mut cut = evidence.clone();
            cut.flights[rank].lines.truncate(keep);
            assert_eq!(autopsy(&cut).culprits(), Vec::<u32>::new(), "rank {rank}, {keep} lines");
        }
    }
}

/// Ranks on hosts whose records are not at hand are not guilty of it, in whatever state the others are.
#[test]
fn nobody_is_blamed_for_a_record_that_lies_elsewhere() {
    for name in ["healthy-and-running", "healthy-and-idle-between-calls"] {
        let healthy = CASES.split("\ncase ").find(|c| c.starts_with(name)).unwrap();
        let (evidence, _) = read(healthy.split_once('\n').unwrap().1);
        for rank in 0..evidence.flights.len() {
            let mut missing = evidence.clone();
            missing.flights.remove(rank);
            missing.vitals.remove(&(rank as u32));
            let a = autopsy(&missing);
            assert_eq!((a.culprits(), a.ranks.len()), (Vec::new(), evidence.flights.len()), "{name}, {rank}");
            assert!(a.to_json()["ranks"][rank]["silent_ns"].is_null(), "{a:#?}");
        }
    }
}

#[test]
fn a_damaged_header_costs_its_own_record_and_no_other() {
    let (evidence, _) =
        read("0: k1 [p tp.0-1.all_reduce=d ] !exit:0\n1: k1 [p tp.0-1.all_reduce=d ] !exit:0");
    for (rank, world) in [(u32::MAX, 2), (u32::MAX, u32::MAX), (2, 2), (65_536, 0), (0, u32::MAX)] {
        let mut damaged = evidence.clone();
        damaged.flights[1].header.rank = rank;
        damaged.flights[1].header.world = world;
        let a = autopsy(&damaged);
        assert_eq!(a.ranks.len(), 2, "{rank} of {world}");
        let why = format!("of rank {rank} of {world}: it is damaged");
        assert!(a.notes.iter().any(|n| n.contains(&why)), "{:?}", a.notes);
    }
    // Many that are missing are one note, and members that there are not are nobody.
    let (mut wide, _) = read("0: k1 [p tp.0-9.all_reduce=w\nvitals 0=alive\nnow 30000");
    wide.flights[0].header.world = 65_536;
    assert!(autopsy(&wide).notes.contains(&"ranks 10-65535 have no flight record".to_string()));
    wide.flights[0].header.world = 1;
    assert_eq!(autopsy(&wide).culprits(), Vec::<u32>::new());
}

#[test]
fn nothing_is_an_answer_too() {
    let a = autopsy(&Evidence::default());
    assert_eq!((a.state, a.culprits()), (RunState::Unfinished, Vec::new()));
}

fn holds(a: &Autopsy, expect: &str) -> Result<(), String> {
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
            let text = a.text("run");
            return if text.contains(value) { Ok(()) } else { Err(format!("the text is\n{text}")) };
        }
        "lacks" => {
            let text = a.text("run");
            return if text.contains(value) { Err(format!("the text is\n{text}")) } else { Ok(()) };
        }
        _ => panic!("{what}"),
    };
    if found == value { Ok(()) } else { Err(format!("found {found}")) }
}

fn read(body: &str) -> (Evidence, Vec<String>) {
    let mut e = Evidence::default();
    let mut expects = Vec::new();
    for line in body.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with("--")) {
        let (head, rest) = line.split_once(' ').unwrap_or((line, ""));
        let pairs = || rest.split_whitespace().map(|p| p.split_once('=').unwrap());
        match head {
            "expect" => expects.push(rest.to_string()),
            "record" => e.record = Some(record(rest)),
            "end" => e.ends.extend(pairs().map(|(r, n)| ProcessEnd {
                rank: r.parse().unwrap(),
                status: None,
                signal: Some(n.parse().unwrap()),
            })),
            "vitals" => e.vitals.extend(pairs().map(|(r, v)| {
                let v = match v {
                    "stopped" => Vitals::Stopped,
                    "gone" => Vitals::Gone,
                    _ => Vitals::Alive,
                };
                (r.parse().unwrap(), v)
            })),
            "now" => e.now_ns = Some(WALL_NS + rest.parse::<u64>().unwrap() * MS),
            rank => e.flights.push(flight(rank.trim_end_matches(':').parse().unwrap(), rest)),
        }
    }
    let world = e.flights.iter().map(|f| f.header.rank + 1).max().unwrap_or(0);
    e.flights.iter_mut().for_each(|f| f.header.world = f.header.world.max(world));
    (e, expects)
}

/// `complete`, `interrupted`, `running`, or `failed:rank:code:class`.
fn record(text: &str) -> Record {
    let start = r#"{"kind":"start","schema":1,"tessera":"0","plan":"p","model":"m","mesh":"tp=2","strategy":"s","numerics":"n","cache":"c","topology":"mesh","seed":0,"prompts":[],"chunks":9,"fps":1.0,"width":1,"height":1,"steps":1,"command":[],"started_at":"","status":"running"}"#;
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
    Record::parse(format!("{start}\n{end}").as_bytes()).unwrap()
}

/// Events of a rank: `kN` begins a call, `[name` a phase, `]` ends it, `]?` ends it with a collective missing, `+N`
/// passes milliseconds, `ring:N` says that the ring lost N lines, `pos:N` at which collective the phase goes on,
/// `session:x` of which run it is, `world:N` how many ranks it knows, `!mark…` a mark, and everything else a collective.
fn flight(rank: u32, text: &str) -> Flight {
    let mut f = Flight {
        header: Header {
            schema: SCHEMA,
            kind: "flight".into(),
            rank,
            session: "1".into(),
            plan: "p".into(),
            pid: 100 + rank,
            mono_ns: BASE_NS,
            wall_ns: WALL_NS,
            ..Header::default()
        },
        ..Flight::default()
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
            (n, f.lost) = (lost, lost);
        } else if let Some(at) = number("pos:") {
            pos = at as u32;
        } else if let Some(world) = number("world:") {
            f.header.world = world as u32;
        } else if let Some(session) = word.strip_prefix("session:") {
            f.header.session = session.to_string();
        } else if let Some(name) = word.strip_prefix('[') {
            pos = 0;
            let p = Phase { call, chunk: call as u32, phase: name.into(), step, of: 9, ..Phase::default() };
            phase = Some(f.lines.len());
            f.lines.push(Line { n, at_ns: now, entry: Entry::Phase(p) });
            n += 1;
        } else if let Some(how) = word.strip_prefix(']') {
            if let Some(Entry::Phase(p)) = phase.and_then(|i| f.lines.get_mut(i)).map(|l| &mut l.entry) {
                (p.end_ns, p.issued) = (now, pos);
                p.wants = (how == "?").then(|| "tp all_reduce f32[4]".to_string());
            }
            (phase, step) = (None, step + 1);
        } else if let Some(m) = word.strip_prefix('!') {
            f.lines.push(Line { n, at_ns: now, entry: Entry::Mark(mark(m)) });
            n += 1;
        } else {
            let name = phase.and_then(|i| match &f.lines[i].entry {
                Entry::Phase(p) => Some(p.phase.clone()),
                _ => None,
            });
            let phase = name.unwrap_or_else(|| "p".to_string());
            let c = collective(word, now);
            let c = Collective { call, chunk: call as u32, step, pos, phase, of: 9, ..c };
            f.lines.push(Line { n, at_ns: now, entry: Entry::Collective(c) });
            (pos, n) = (pos + 1, n + 1);
        }
    }
    f
}

/// `group.ranks.op`, then `/type`, `%reduction`, `@root`, `>peer` as needed, `=` and a state: `d`one, `w`aits, `i`ssued,
/// `r`efused, with `!` another than the plan's, `~` moved, `?` compared with no plan, `*` begun by the device.
fn collective(word: &str, now: u64) -> Collective {
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
        "d" => State::Done,
        "w" => State::Waiting,
        "i" => State::Issued,
        _ => State::Refused,
    };
    let plan = match flags {
        f if f.contains('!') => Fit::No,
        f if f.contains('~') => Fit::Moved,
        f if f.contains('?') => Fit::Unknown,
        _ => Fit::Yes,
    };
    Collective {
        state,
        group,
        ranks,
        op,
        ty,
        reduction,
        root,
        peer,
        plan,
        started: flags.contains('*'),
        wants: (plan == Fit::No).then(|| "tp all_reduce f32[4] {replicated} reduction=sum".to_string()),
        end_ns: if state == State::Done { now } else { 0 },
        ..Collective::default()
    }
}

/// `exit:0`, `failed:rank:code:class` with `:echo` where it is one, or a mark with its call.
fn mark(text: &str) -> Mark {
    let parts: Vec<&str> = text.split(':').collect();
    match parts[0] {
        "failed" => Mark {
            mark: "failed".into(),
            about: parts[1].parse().ok(),
            code: Some(parts[2].into()),
            class: Some(parts[3].replace('_', " ")),
            echo: parts.get(4) == Some(&"echo"),
            text: Some("it".into()),
            ..Mark::default()
        },
        "exit" => Mark { mark: "exit".into(), status: parts[1].parse().ok(), ..Mark::default() },
        name => {
            Mark { mark: name.into(), call: parts.get(1).and_then(|k| k.parse().ok()), ..Mark::default() }
        }
    }
}
