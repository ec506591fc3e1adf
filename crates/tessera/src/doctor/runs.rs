//! The doctor for video plans: signs from a sealed plan's estimate or from what runs of it recorded, and remedies priced by
//! lowering other mappings.

use std::path::{Path, PathBuf};

use tessera_base::{Bytes, Diagnostic, Diagnostics};
use tessera_cost::Machine;
use tessera_plan::search::remedy::{Limits, Mode, Signs};
use tessera_plan::video::{self, Pins, Ranked};
use tessera_plan::{Mapping, Numerics, Strategy};
use tessera_report::flight::{Entry, Flight, State};
use tessera_report::record::{Record, Status};

use super::estimates::machine_beside;
use super::{Action, Checkup, Found, Kind, T0051, T0053};
use crate::Model;
use crate::opened::{self, Opened};
use crate::plan::Plan;
use crate::search::{VideoAsked, machine, video_found};

/// Ends of a run that say that ranks held different things.
const DRIFT: [&str; 3] = ["T0744", "T0754", "T0759"];
/// Where a plan is priced when nobody says where.
const PRICED_AT: (&str, &str) = ("laptop", "tessera");

/// A sealed plan, and runs of it if any.
#[derive(Debug)]
pub struct Patient {
    name: String,
    plan: Plan,
    runs: Vec<Run>,
    /// The machine that the plan was made for, where its folder says.
    beside: Option<Machine>,
}

#[derive(Debug)]
struct Run {
    name: String,
    record: Record,
    flights: Vec<Flight>,
}

/// Reads a plan's folder, or runs' folders, oldest first: the plan of the last is examined.
///
/// # Errors
/// T0051, T0053.
pub fn open(folders: &[PathBuf]) -> Result<Patient, Diagnostics> {
    let mut ds = Vec::new();
    let mut last = None;
    let mut runs = Vec::new();
    for folder in folders {
        match Kind::of(folder) {
            Ok(Kind::Run) => match run(folder) {
                Ok((plan, one)) => {
                    last = Some((one.name.clone(), plan, None));
                    runs.push(one);
                }
                Err(d) => ds.push(d),
            },
            Ok(Kind::Plan) if folders.len() == 1 => {
                let beside = machine_beside(folder).transpose()?;
                last = Some((folder.display().to_string(), Plan::read(folder)?, beside));
            }
            Ok(_) => ds.push(
                Diagnostic::error(&T0053, format!("{} is no run", folder.display()))
                    .at(folder.display().to_string(), "a plan or an estimate")
                    .hint("several folders are several runs; examine this one by itself"),
            ),
            Err(d) => ds.push(d),
        }
    }
    match last {
        Some((name, plan, beside)) if ds.is_empty() => Ok(Patient { name, plan, runs, beside }),
        None if ds.is_empty() => Err(vec![Diagnostic::error(&T0051, "no folder named")]),
        _ => Err(ds),
    }
}

fn run(folder: &Path) -> Result<(Plan, Run), Diagnostic> {
    let name = folder.display().to_string();
    let refuse =
        |why: String| Diagnostic::error(&T0051, format!("{name} cannot be examined")).at(name.clone(), why);
    let Opened { plan, record, flights } = opened::open(folder).map_err(refuse)?;
    Ok((plan, Run { name: name.clone(), record, flights }))
}

/// Examines a plan, or what runs of it showed, as priced on a machine.
///
/// # Errors
/// Never for a plan that was sealed, but for a machine that cannot be read.
pub fn video(patient: &Patient, on: Option<Machine>) -> Result<Checkup, Diagnostics> {
    let said = on.is_some() || patient.beside.is_some();
    let machine = match on.or_else(|| patient.beside.clone()) {
        Some(m) => m,
        None => machine(PRICED_AT.0, Some(PRICED_AT.1), None)?,
    };
    let plan = &patient.plan;
    let model =
        Model { name: plan.model.clone(), dir: PathBuf::from(&plan.model_dir), video: plan.video.clone() };
    let ranks = plan.sealed.mesh().ranks();
    let asked = VideoAsked {
        model: &model,
        machine: machine.clone(),
        devices: Some(ranks),
        objective: None,
        dtype: plan.mapping.dtype,
        pins: Pins::default(),
        decode_ns: None,
        encode_ns: None,
        whole_decode: true,
        command: String::new(),
    };
    let mut out = Checkup {
        title: format!("{} ({} over {})", patient.name, plan.model, plan.mapping.mesh),
        ..Checkup::default()
    };
    let ward = Ward { asked, mapping: &plan.mapping, capacity: machine.cluster.device.memory_bytes.value };
    out.see(
        "priced on",
        format!(
            "{}, executor {}{}",
            machine.cluster.title,
            machine.profile.name,
            if said { "" } else { "; --cluster names another" }
        ),
    );
    let before = ward.as_it_is();
    match &before {
        Some(r) => out.see("estimate", words(r)),
        None => {
            out.unknown.push("estimate of the plan: this mapping is none that the search prices".to_string())
        }
    }
    let (signs, dominant) = if patient.runs.is_empty() {
        (estimated(&ward, before.as_ref(), &mut out), None)
    } else {
        recorded(patient, &ward, &mut out)
    };
    let limits = Limits::default();
    if let Some(share) = signs.a2a_share.filter(|s| *s > limits.a2a_share) {
        let mostly = dominant.map_or(String::new(), |op| format!(", most of it in {op}"));
        let sign = format!(
            "collectives are {:.0} % of the time in the open, above {:.0} %{mostly}",
            share * 100.0,
            limits.a2a_share * 100.0
        );
        out.recognise(Mode::Congestion, sign, before.as_ref(), ward.congestion(before.as_ref()));
    }
    if let (Some(peak), Some(capacity)) = (signs.peak_bytes, signs.capacity_bytes)
        && peak > capacity
    {
        let sign = format!(
            "the fullest rank needs {}, the device has {}",
            Bytes(peak as u64),
            Bytes(capacity as u64)
        );
        out.recognise(Mode::Memory, sign, before.as_ref(), ward.memory());
    }
    if let Some(n) = signs.drifted.filter(|n| *n > 0) {
        let sign = format!("{n} of {} runs drifted or gave another golden hash", patient.runs.len());
        out.recognise(Mode::Drift, sign, before.as_ref(), ward.drift(before.as_ref()));
    }
    Ok(out)
}

impl Checkup {
    fn see(&mut self, name: &str, what: String) {
        self.seen.push((name.to_string(), what));
    }

    fn recognise(&mut self, mode: Mode, sign: String, before: Option<&Ranked>, remedies: Vec<Action>) {
        let before = before.map_or("no estimate".to_string(), words);
        self.found.push(Found { code: mode.code(), sign, before, remedies });
    }
}

/// Signs that the estimate of a plan shows.
fn estimated(ward: &Ward<'_>, before: Option<&Ranked>, out: &mut Checkup) -> Signs {
    let share = before.map(|r| r.call.exposed_ns() / r.call.ns.max(f64::MIN_POSITIVE));
    if let Some(share) = share {
        out.see("collectives in the open", format!("{:.1} % of a call", share * 100.0));
    }
    let peak = before.map(|r| ward.held(r));
    ward.fullness(peak, out);
    out.unknown
        .push("results that differ between reruns: only runs show them; name folders of runs".to_string());
    no_fp8(out);
    Signs { a2a_share: share, peak_bytes: peak, capacity_bytes: Some(ward.capacity), ..Signs::default() }
}

/// Signs that runs recorded, and the op that most of the open time of collectives is in.
fn recorded(patient: &Patient, ward: &Ward<'_>, out: &mut Checkup) -> (Signs, Option<String>) {
    let open = patient.runs.last().and_then(|r| in_the_open(&r.flights));
    match &open {
        Some(o) => out.see(
            "collectives in the open",
            format!("{:.1} % of rank {}'s time, waits for others included", o.share * 100.0, o.rank),
        ),
        None if patient.plan.sealed.mesh().ranks() == 1 => {
            out.see("collectives in the open", "none: one rank".to_string())
        }
        None => out
            .unknown
            .push("collectives in the open: the run has no flight record of a collective".to_string()),
    }
    out.unknown.push("bandwidth of exchanges in bursts: a run does not record it".to_string());
    let planned =
        patient.plan.mesh_ranks().map(|r| patient.plan.memory(r).iter().map(|b| b.0).sum::<u64>()).max();
    let planned = planned.map(|b| b as f64);
    ward.fullness(planned, out);
    out.unknown.push("peak bytes of the processes: a run does not record them; what the sealed plan allocates stands for them".to_string());
    let drifted = drifted(&patient.runs, out);
    no_fp8(out);
    let signs = Signs {
        a2a_share: open.as_ref().map(|o| o.share),
        peak_bytes: planned,
        capacity_bytes: Some(ward.capacity),
        drifted,
        ..Signs::default()
    };
    (signs, open.map(|o| o.op))
}

fn no_fp8(out: &mut Checkup) {
    out.see("fp8", "no program of a sealed plan computes or sends at eight bits".to_string());
}

/// Runs that ended by drift, and complete runs of one request whose golden hash is not the first one's. None where
/// nothing could be compared.
fn drifted(runs: &[Run], out: &mut Checkup) -> Option<u64> {
    let code = |r: &Run| r.record.end.as_ref()?.cause.as_ref()?.code.clone();
    let broken: Vec<(&Run, String)> = runs
        .iter()
        .filter_map(|r| Some((r, code(r)?)))
        .filter(|(_, c)| DRIFT.contains(&c.as_str()))
        .collect();
    for (r, code) in &broken {
        out.see("drift", format!("{} ended with {code}", r.name));
    }
    let complete: Vec<(&Run, &str)> = runs
        .iter()
        .filter(|r| r.record.status() == Status::Complete)
        .filter_map(|r| Some((r, r.record.end.as_ref()?.golden.as_str())))
        .collect();
    let mut differ = 0;
    let mut compared = 0;
    if let Some((first, golden)) = complete.first() {
        for (r, hash) in &complete[1..] {
            if !same_request(&first.record, &r.record) {
                out.unknown.push(format!(
                    "drift of {} against {}: they ran other plans or requests",
                    r.name, first.name
                ));
                continue;
            }
            compared += 1;
            if hash != golden {
                differ += 1;
                out.see("drift", format!("{} gave {hash}, {} gave {golden}", r.name, first.name));
            }
        }
    }
    match (broken.len(), compared) {
        (0, 0) => {
            out.unknown.push(
                "results that differ between reruns: name two complete runs of one request at least"
                    .to_string(),
            );
            None
        }
        (0, n) if differ == 0 => {
            out.see("drift", format!("{} complete runs of one request gave one golden hash", n + 1));
            Some(0)
        }
        (broken, _) => Some(broken as u64 + differ),
    }
}

fn same_request(a: &Record, b: &Record) -> bool {
    let of = |r: &Record| {
        let s = &r.start;
        (s.plan.clone(), s.model.clone(), s.seed, s.prompts.clone(), s.chunks)
    };
    of(a) == of(b)
}

/// Time of collectives that nothing of their rank hid.
struct Open {
    rank: u32,
    share: f64,
    op: String,
}

/// The rank with most of it: of its time from its first phase after warm-up to its last, what it waited for collectives.
fn in_the_open(flights: &[Flight]) -> Option<Open> {
    let of = |f: &Flight| {
        let phases = f.lines.iter().filter_map(|l| match &l.entry {
            Entry::Phase(p) => Some((l.at_ns, p)),
            _ => None,
        });
        let warm_up = phases.clone().map(|(_, p)| p.call).min()?;
        let (mut from, mut to) = (u64::MAX, 0);
        for (at, p) in phases.filter(|(_, p)| p.call > warm_up && p.end_ns > 0) {
            (from, to) = (from.min(at), to.max(p.end_ns));
        }
        let whole = to.checked_sub(from).filter(|w| *w > 0)?;
        let mut by_op = std::collections::BTreeMap::<&str, u64>::new();
        for l in &f.lines {
            if let Entry::Collective(c) = &l.entry
                && c.state == State::Done
                && (from..to).contains(&l.at_ns)
            {
                *by_op.entry(&c.op).or_default() += c.exposed_ns.min(c.end_ns.saturating_sub(l.at_ns));
            }
        }
        let (op, _) = by_op.iter().max_by_key(|(_, ns)| **ns)?;
        let open: u64 = by_op.values().sum();
        Some(Open { rank: f.header.rank, share: open as f64 / whole as f64, op: (*op).to_string() })
    };
    flights.iter().filter_map(of).max_by(|a, b| a.share.total_cmp(&b.share))
}

/// Where remedies are priced.
struct Ward<'a> {
    asked: VideoAsked<'a>,
    mapping: &'a Mapping,
    /// Bytes of a device.
    capacity: f64,
}

impl Ward<'_> {
    fn pins(&self) -> Pins {
        use tessera_mesh::Axis;
        let m = self.mapping;
        Pins {
            tp: Some(m.mesh.size(Axis::Tp)),
            pp: Some(m.mesh.size(Axis::Pp)),
            strategy: Some(m.strategy),
            pieces: Some(m.pieces),
            topology: Some(m.topology),
            decode: None,
            outstanding: Some(m.max_outstanding),
        }
    }

    /// The best of some pins, also where only memory forbids it.
    fn priced(&self, pins: &Pins) -> Option<Ranked> {
        let mut roomy = self.asked.clone();
        let mut cluster = roomy.machine.cluster.clone();
        cluster.device.memory_bytes.value *= 1e4;
        roomy.machine = Machine::new(cluster, roomy.machine.profile.clone());
        video_found(&roomy, pins, |_, outcome| outcome.best.into_iter().next())
    }

    fn as_it_is(&self) -> Option<Ranked> {
        self.priced(&self.pins())
    }

    fn held(&self, r: &Ranked) -> f64 {
        r.memory.total().0 as f64 + self.asked.machine.reserved_bytes()
    }

    fn fullness(&self, peak: Option<f64>, out: &mut Checkup) {
        if let Some(peak) = peak {
            let text =
                format!("{} of {} on the fullest rank", Bytes(peak as u64), Bytes(self.capacity as u64));
            out.see("memory", text);
        }
    }

    /// One other mapping, in numbers.
    fn action(&self, action: &str, how: String, pins: Pins) -> Action {
        match self.priced(&pins) {
            Some(r) => {
                let fits = if self.held(&r) > self.capacity { ", which does not fit" } else { "" };
                Action { action: action.to_string(), how, after: Some(words(&r) + fits) }
            }
            None => Action {
                action: action.to_string(),
                how: format!("{how}: no such mapping fits the model"),
                after: None,
            },
        }
    }

    fn other_strategy(&self) -> Strategy {
        match self.mapping.strategy {
            Strategy::Ulysses => Strategy::Megatron,
            Strategy::Megatron => Strategy::Ulysses,
        }
    }

    fn congestion(&self, before: Option<&Ranked>) -> Vec<Action> {
        let own = self.pins();
        let (tp, pp) = (own.tp.unwrap_or(1), own.pp.unwrap_or(1));
        let other = self.other_strategy();
        let mut out = Vec::new();
        if tp > 1 {
            let how =
                format!("{} in place of {} over the same mesh", other.name(), self.mapping.strategy.name());
            let pins = Pins { strategy: Some(other), pieces: None, ..own };
            out.push(self.action("cut blocks another way", how, pins));
        }
        if tp.is_multiple_of(2) {
            let how = format!("tp={}, pp={} in place of tp={tp}, pp={pp}", tp / 2, pp * 2);
            let pins = Pins { tp: Some(tp / 2), pp: Some(pp * 2), pieces: None, ..own };
            out.push(self.action("smaller groups", how, pins));
        }
        let best = self.priced(&Pins::default());
        let same = |r: &Ranked| before.is_some_and(|b| b.mapping == r.mapping && b.decode == r.decode);
        out.push(match best {
            Some(r) if same(&r) => Action {
                action: "best mapping of as many devices".to_string(),
                how: "it is this one".to_string(),
                after: None,
            },
            Some(r) => Action {
                action: "best mapping of as many devices".to_string(),
                how: format!(
                    "{} {} {} {}",
                    r.mapping.mesh,
                    r.mapping.cut(),
                    r.mapping.topology.name(),
                    r.decode
                ),
                after: Some(words(&r)),
            },
            None => Action {
                action: "best mapping of as many devices".to_string(),
                how: "none fits".to_string(),
                after: None,
            },
        });
        out
    }

    fn memory(&self) -> Vec<Action> {
        let own = self.pins();
        let (tp, pp) = (own.tp.unwrap_or(1), own.pp.unwrap_or(1));
        let mut out = Vec::new();
        if tp > 1 && self.mapping.strategy == Strategy::Ulysses {
            let how = "megatron, which divides weights over tp".to_string();
            out.push(self.action(
                "divide the weights",
                how,
                Pins { strategy: Some(Strategy::Megatron), pieces: None, ..own },
            ));
        }
        let mut wider = Ward { asked: self.asked.clone(), mapping: self.mapping, capacity: self.capacity };
        wider.asked.devices = wider.asked.devices.map(|d| d.saturating_mul(2));
        let how = format!("pp={} in place of {pp}, on more devices", pp * 2);
        out.push(wider.action("more stages", how, Pins { pp: Some(pp * 2), ..own }));
        if tp.is_multiple_of(2) {
            let how = format!("tp={}, pp={} on as many devices", tp / 2, pp * 2);
            out.push(self.action(
                "stages in place of tp",
                how,
                Pins { tp: Some(tp / 2), pp: Some(pp * 2), pieces: None, ..own },
            ));
        }
        let video = &self.asked.model.video;
        if !video.stream.recompute {
            let mut model = self.asked.model.clone();
            model.video.stream.recompute = true;
            let lean = Ward { asked: VideoAsked { model: &model, ..self.asked.clone() }, ..*self };
            let how = "the context is computed again before each chunk, --cache recompute".to_string();
            out.push(lean.action("keep no cache between chunks", how, own));
        }
        out
    }

    fn drift(&self, before: Option<&Ranked>) -> Vec<Action> {
        let free = |action: &str, how: &str| Action {
            action: action.to_string(),
            how: how.to_string(),
            after: before.map(words),
        };
        let mut out = Vec::new();
        if self.mapping.numerics == Numerics::Standard {
            let fixed = Mapping { numerics: Numerics::MeshInvariant, ..self.mapping.clone() };
            let after = before.and_then(|b| {
                video_found(&self.asked, &self.pins(), |q, _| video::estimate(q, &fixed, b.decode).ok())
            });
            out.push(Action {
                action: "pin algorithms".to_string(),
                how: "numerics mesh-invariant: every sum is one tree of eight segments, whatever the mesh"
                    .to_string(),
                after: after.as_ref().map(words),
            });
        } else {
            out.push(free("pin algorithms", "every sum is one fixed tree already"));
        }
        out.push(free(
            "fix the order of ranks",
            "the list of devices is part of the plan's digest already: costs nothing",
        ));
        out.push(free(
            "deterministic draws",
            "every draw is keyed by seed, chunk and the element's place, whatever the mesh: what drifts is a device, its \
memory or what was loaded; `tessera autopsy` names the rank",
        ));
        out
    }
}

fn words(r: &Ranked) -> String {
    format!(
        "{:.1} frames/s, a chunk every {:.2} ms, {:.1} % of a call in the open, {}",
        r.fps,
        r.period.ns / 1e6,
        r.call.exposed_ns() / r.call.ns.max(f64::MIN_POSITIVE) * 100.0,
        r.memory.total()
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tessera_report::flight::{Collective, Header, Line, Phase};

    fn flight(rank: u32, exposed_ns: u64) -> Flight {
        let phase = |n, call, at_ns, end_ns| Line {
            n,
            at_ns,
            entry: Entry::Phase(Phase { call, end_ns, ..Phase::default() }),
        };
        let meeting = |n, call, at_ns: u64, op: &str, exposed_ns| Line {
            n,
            at_ns,
            entry: Entry::Collective(Collective {
                state: State::Done,
                call,
                op: op.into(),
                end_ns: at_ns + 400,
                exposed_ns,
                ..Collective::default()
            }),
        };
        Flight {
            header: Header { rank, ..Header::default() },
            lines: vec![
                // Warm-up, which does not count.
                phase(0, 0, 0, 5_000),
                meeting(1, 0, 100, "all_to_all", 400),
                phase(2, 1, 10_000, 11_000),
                meeting(3, 1, 10_100, "all_to_all", exposed_ns),
                meeting(4, 1, 10_600, "all_reduce", 10),
            ],
            ..Flight::default()
        }
    }

    #[test]
    fn the_open_share_is_of_the_rank_that_waits_most_after_warm_up() {
        let open = in_the_open(&[flight(0, 90), flight(1, 290)]).unwrap();
        assert_eq!((open.rank, open.op.as_str()), (1, "all_to_all"));
        assert!((open.share - 0.3).abs() < 1e-9, "{}", open.share);
        assert!(in_the_open(&[]).is_none());
        // A warm-up alone tells nothing.
        let mut short = flight(0, 90);
        short.lines.truncate(2);
        assert!(in_the_open(&[short]).is_none());
    }

    fn run(name: &str, golden: &str, code: Option<&str>) -> Run {
        let start = r#"{"kind":"start","schema":1,"tessera":"0","plan":"p","model":"m","mesh":"tp=2","strategy":"s","numerics":"n","cache":"c","topology":"mesh","seed":0,"prompts":[],"chunks":1,"fps":1.0,"width":1,"height":1,"steps":1,"command":[],"started_at":"","status":"running"}"#;
        let (status, cause) = match code {
            None => ("complete", "null".to_string()),
            Some(c) => {
                ("failed", format!(r#"{{"class":"x","exit_code":10,"rank":null,"code":"{c}","message":""}}"#))
            }
        };
        let end = format!(
            r#"{{"kind":"end","status":"{status}","cause":{cause},"chunks":1,"frames":1,"wall_ns":1,"fps":1.0,"output_complete":true,"golden":"{golden}"}}"#
        );
        let record = Record::parse(format!("{start}\n{end}\n").as_bytes()).unwrap();
        Run { name: name.into(), record, flights: Vec::new() }
    }

    #[test]
    fn drift_is_counted_where_it_can_be_seen_and_nowhere_else() {
        let mut out = Checkup::default();
        let mut count = |runs: &[Run]| drifted(runs, &mut out);
        assert_eq!(count(&[run("a", "1", None)]), None);
        assert_eq!(count(&[run("a", "1", None), run("b", "1", None)]), Some(0));
        assert_eq!(count(&[run("a", "1", None), run("b", "2", None), run("c", "1", None)]), Some(1));
        assert_eq!(count(&[run("a", "", Some("T0744"))]), Some(1));
        assert_eq!(count(&[run("a", "", Some("T0712"))]), None, "another failure is no drift");
        let mut other = run("b", "2", None);
        other.record.start.seed = 9;
        assert_eq!(count(&[run("a", "1", None), other]), None, "another request gives another hash");
    }
}
