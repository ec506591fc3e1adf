//! Examines sealed plans: takes signs from a plan's estimate or from the records of its runs, and estimates mitigations
//! by lowering other mappings.

mod array_programs;
mod exposed;
mod texts;

use std::path::{Path, PathBuf};

use tessera::Model;
use tessera::opened_run::{self, RunDir, RunPlan};
use tessera::plan::Plan;
use tessera_base::{Bytes, Diagnostic, Diagnostics};
use tessera_cost::MachineModel;
use tessera_estimate::codes::T0051;
use tessera_estimate::{VideoQuery, load_machine, read_planned_machine, search_with_pins};
use tessera_ir::{DType, Op, Program};
use tessera_plan::search::mitigation::{FailureMode, SymptomThresholds, Symptoms};
use tessera_plan::video::{self, RankedMapping, VideoPins};
use tessera_plan::{Mapping, Numerics, Strategy};
use tessera_report::flight::FlightLog;
use tessera_report::record::{RunKind, RunRecord, RunStatus};
use tessera_verify::SealedPlan;

use exposed::add_exposed_observation;
#[cfg(test)]
use exposed::most_exposed_rank;

use super::{DoctorReport, FailureFinding, FolderKind, Mitigation};
use crate::codes::T0053;

/// Codes of runs that ended because ranks had different state.
const DRIFT_CODES: [&str; 3] = ["T0744", "T0754", "T0759"];
/// Default cluster and profile for estimates.
const DEFAULT_MACHINE: (&str, &str) = ("laptop", "tessera");

/// A sealed plan with its runs, if any.
#[derive(Debug)]
pub struct PlanWithRuns {
    pub(super) name: String,
    plan: RunPlan,
    pub(super) runs: Vec<RecordedRun>,
    /// The machine that the plan was made for, if its folder names one.
    planned_machine: Option<MachineModel>,
}

#[derive(Debug)]
pub(super) struct RecordedRun {
    name: String,
    record: RunRecord,
    pub(super) flights: Vec<FlightLog>,
}

/// Opens one folder of a plan, or folders of runs, oldest first; the plan of the last run is
/// examined.
///
/// # Errors
/// T0051, T0053.
pub fn open_folders(folders: &[PathBuf]) -> Result<PlanWithRuns, Diagnostics> {
    let mut ds = Vec::new();
    let mut last = None;
    let mut runs = Vec::new();
    for folder in folders {
        match FolderKind::from_folder(folder) {
            Ok(FolderKind::Run) => match open_run(folder) {
                Ok((plan, one)) => {
                    last = Some((one.name.clone(), plan, None));
                    runs.push(one);
                }
                Err(d) => ds.push(d),
            },
            Ok(FolderKind::Plan) if folders.len() == 1 => {
                let beside = read_planned_machine(folder).transpose()?;
                last = Some((folder.display().to_string(), RunPlan::read(folder)?, beside));
            }
            Ok(_) => ds.push(
                Diagnostic::error(&T0053, format!("{} is not a run folder", folder.display()))
                    .with_label(folder.display().to_string(), "a plan, an estimate or compile traces")
                    .with_hint("several folders must all be runs; examine this one separately"),
            ),
            Err(d) => ds.push(d),
        }
    }
    match last {
        Some((name, plan, beside)) if ds.is_empty() => {
            Ok(PlanWithRuns { name, plan, runs, planned_machine: beside })
        }
        None if ds.is_empty() => Err(vec![Diagnostic::error(&T0051, "no folder given")]),
        _ => Err(ds),
    }
}

fn open_run(folder: &Path) -> Result<(RunPlan, RecordedRun), Diagnostic> {
    let name = folder.display().to_string();
    let refuse = |why: String| {
        Diagnostic::error(&T0051, format!("{name} cannot be examined")).with_label(name.clone(), why)
    };
    let RunDir { plan, record, flight_records: flights } =
        opened_run::open_run_dir(folder).map_err(refuse)?;
    Ok((plan, RecordedRun { name: name.clone(), record, flights }))
}

/// Examines a plan, or the records of its runs, and estimates mitigations on a machine.
///
/// # Errors
/// Only for a machine that cannot be read, never for a sealed plan.
pub fn examine_plan(
    patient: &PlanWithRuns,
    machine_override: Option<MachineModel>,
) -> Result<DoctorReport, Diagnostics> {
    let chosen = machine_override.or_else(|| patient.planned_machine.clone());
    let machine_known = chosen.is_some();
    let machine = match chosen {
        Some(m) => m,
        None => load_machine(DEFAULT_MACHINE.0, Some(DEFAULT_MACHINE.1), None)?,
    };
    let plan = match &patient.plan {
        RunPlan::Video(plan) => &**plan,
        RunPlan::Text(plan) => return texts::examine_text_plan(patient, plan, &machine, machine_known),
        RunPlan::Arrays(plan) => {
            return Ok(array_programs::examine_array_plan(patient, plan, &machine, machine_known));
        }
    };
    let model = Model::from_plan(Path::new(&plan.model_dir), plan);
    let ward = MitigationPricer::new(plan, &model, machine);
    let mut out = DoctorReport {
        title: format!("{} ({} over {})", patient.name, plan.model, plan.mapping.mesh),
        ..DoctorReport::default()
    };
    out.add_machine_observation(&ward.query.machine, machine_known);
    let before = ward.price_unchanged();
    match &before {
        Some(r) => out.add_observation("estimate", format_ranked(r)),
        None => {
            out.not_recorded.push("estimate of the plan: the search does not cover this mapping".to_string())
        }
    }
    let (signs, dominant) = if patient.runs.is_empty() {
        (estimated_signs(plan, &ward, before.as_ref(), &mut out), None)
    } else {
        recorded_signs(patient, plan, &ward, &mut out)
    };
    if let Some(sign) = congestion_sign(&signs, dominant) {
        let mitigations = ward.congestion_mitigations(before.as_ref());
        out.add_failure(FailureMode::Congestion, sign, before.as_ref(), mitigations);
    }
    if let Some(sign) = memory_sign(&signs) {
        out.add_failure(FailureMode::Memory, sign, before.as_ref(), ward.memory_mitigations());
    }
    if let Some(n) = signs.drifted.filter(|n| *n > 0) {
        let sign = format!("{n} of {} runs drifted or have another golden hash", patient.runs.len());
        out.add_failure(FailureMode::Drift, sign, before.as_ref(), ward.drift_mitigations(before.as_ref()));
    }
    Ok(out)
}

/// Describes exposed collectives above the limit. `dominant` is the op that most of their time is
/// in.
pub(super) fn congestion_sign(signs: &Symptoms, dominant: Option<String>) -> Option<String> {
    let limit = SymptomThresholds::default().a2a_share;
    let share = signs.a2a_share.filter(|s| *s > limit)?;
    let mostly = dominant.map_or(String::new(), |op| format!(", mostly in {op}"));
    Some(format!(
        "exposed collectives take {:.0} % of the time, above {:.0} %{mostly}",
        share * 100.0,
        limit * 100.0
    ))
}

/// Describes a peak of memory that exceeds the device.
pub(super) fn memory_sign(signs: &Symptoms) -> Option<String> {
    let (peak, capacity) = (signs.peak_bytes?, signs.capacity_bytes?);
    (peak > capacity).then(|| {
        format!("the fullest rank needs {}, the device has {}", Bytes(peak as u64), Bytes(capacity as u64))
    })
}

impl DoctorReport {
    pub(super) fn add_machine_observation(&mut self, machine: &MachineModel, is_known: bool) {
        let hint = if is_known { "" } else { "; choose another with --cluster" };
        self.add_observation(
            "estimated on",
            format!("{}, executor {}{hint}", machine.cluster.title, machine.profile.name),
        );
    }

    pub(super) fn add_observation(&mut self, name: &str, what: String) {
        self.observations.push((name.to_string(), what));
    }

    fn add_failure(
        &mut self,
        mode: FailureMode,
        sign: String,
        before: Option<&RankedMapping>,
        mitigations: Vec<Mitigation>,
    ) {
        let before = before.map_or("no estimate".to_string(), format_ranked);
        self.add_finding(mode, sign, before, mitigations);
    }

    pub(super) fn add_finding(
        &mut self,
        mode: FailureMode,
        sign: String,
        before: String,
        mitigations: Vec<Mitigation>,
    ) {
        self.failures.push(FailureFinding { code: mode.code(), sign, before, mitigations });
    }
}

/// Returns the signs in a plan's estimate.
fn estimated_signs(
    plan: &Plan,
    ward: &MitigationPricer<'_>,
    before: Option<&RankedMapping>,
    out: &mut DoctorReport,
) -> Symptoms {
    let share = before.map(|r| r.call.exposed_ns() / r.call.ns.max(f64::MIN_POSITIVE));
    if let Some(share) = share {
        out.add_observation("exposed collectives", format!("{:.1} % of a call", share * 100.0));
    }
    let peak = before.map(|r| ward.rank_memory_bytes(r));
    ward.add_memory_observation(peak, out);
    out.not_recorded
        .push("results that differ between reruns: only runs show them; name run folders".to_string());
    add_fp8_observation(&plan.sealed, out);
    Symptoms {
        a2a_share: share,
        peak_bytes: peak,
        capacity_bytes: Some(ward.capacity_bytes),
        ..Symptoms::default()
    }
}

/// Returns the signs in the records of runs, and the op with the largest exposed communication
/// time.
fn recorded_signs(
    patient: &PlanWithRuns,
    plan: &Plan,
    ward: &MitigationPricer<'_>,
    out: &mut DoctorReport,
) -> (Symptoms, Option<String>) {
    let open = add_exposed_observation(patient, out);
    out.not_recorded.push("burst bandwidth of exchanges: runs do not record it".to_string());
    let planned = plan.mesh_ranks().map(|r| plan.memory_bytes(r).iter().map(|b| b.0).sum::<u64>()).max();
    let planned = planned.map(|b| b as f64);
    ward.add_memory_observation(planned, out);
    out.not_recorded.push("peak bytes of the processes: runs do not record them; the allocations of the sealed plan are used instead".to_string());
    let drifted = count_drifted(&patient.runs, out);
    add_fp8_observation(&plan.sealed, out);
    let signs = Symptoms {
        a2a_share: open.as_ref().map(|o| o.share),
        peak_bytes: planned,
        capacity_bytes: Some(ward.capacity_bytes),
        drifted,
        ..Symptoms::default()
    };
    (signs, open.map(|o| o.op))
}

/// Counts what the plan's programs compute and send in e4m3.
pub(super) fn add_fp8_observation(sealed: &SealedPlan, out: &mut DoctorReport) {
    let (mut ops, mut messages, mut programs) = (0usize, 0usize, 0usize);
    for phase in sealed.phase_names() {
        let of_rank = |rank| sealed.rank_program(phase, rank).map(|p| count_e4m3_ops(p));
        let busiest = sealed.mesh().iter().filter_map(of_rank).max().unwrap_or_default();
        programs += usize::from(busiest != (0, 0));
        (ops, messages) = (ops + busiest.0, messages + busiest.1);
    }
    let text = match programs {
        0 => "no program of the plan computes or communicates in fp8".to_string(),
        _ => format!("{programs} programs: {ops} ops read e4m3, {messages} of them collectives"),
    };
    out.add_observation("fp8", text);
}

/// Returns the number of ops with an e4m3 operand, and how many of them are collectives.
fn count_e4m3_ops(p: &Program) -> (usize, usize) {
    let reads_e4m3 = |op: &&Op| op.operands.iter().any(|v| p.type_of(*v).dtype == DType::E4m3);
    let ops = p.ops.iter().filter(reads_e4m3);
    (ops.clone().count(), ops.filter(|op| op.opcode.is_collective()).count())
}

/// Counts the runs that ended by drift, and the complete runs of one request whose golden hash
/// differs from the first run's. Returns `None` if there was nothing to compare.
pub(super) fn count_drifted(runs: &[RecordedRun], out: &mut DoctorReport) -> Option<u64> {
    let code = |r: &RecordedRun| r.record.end.as_ref()?.cause.as_ref()?.code.clone();
    let broken: Vec<(&RecordedRun, String)> = runs
        .iter()
        .filter_map(|r| Some((r, code(r)?)))
        .filter(|(_, c)| DRIFT_CODES.contains(&c.as_str()))
        .collect();
    for (r, code) in &broken {
        out.add_observation("drift", format!("{} ended with {code}", r.name));
    }
    let complete: Vec<(&RecordedRun, &str)> = runs
        .iter()
        .filter(|r| r.record.status() == RunStatus::Complete)
        .filter_map(|r| Some((r, r.record.end.as_ref()?.golden.as_str())))
        .collect();
    let mut differ = 0;
    let mut compared = 0;
    if let Some((first, golden)) = complete.first() {
        for (r, hash) in &complete[1..] {
            if !is_same_request(&first.record, &r.record) {
                out.not_recorded.push(format!(
                    "drift of {} against {}: they ran other plans or requests",
                    r.name, first.name
                ));
                continue;
            }
            compared += 1;
            if hash != golden {
                differ += 1;
                out.add_observation("drift", format!("{} has {hash}, {} has {golden}", r.name, first.name));
            }
        }
    }
    match (broken.len(), compared) {
        (0, 0) => {
            out.not_recorded.push(
                "results that differ between reruns: name two complete runs of one request or more"
                    .to_string(),
            );
            None
        }
        (0, n) if differ == 0 => {
            out.add_observation(
                "drift",
                format!("{} complete runs of one request gave one golden hash", n + 1),
            );
            Some(0)
        }
        (broken, _) => Some(broken as u64 + differ),
    }
}

/// Returns whether two runs were asked for the same output. A record does not hold the inputs of array programs.
fn is_same_request(a: &RunRecord, b: &RunRecord) -> bool {
    let of = |r: &RunRecord| {
        let s = &r.start;
        (s.plan.clone(), s.model.clone(), s.weights.clone(), s.seed, s.prompts.clone(), s.chunks)
    };
    a.start.generates != RunKind::Arrays && of(a) == of(b)
}

/// Estimates mitigations for one mapping.
struct MitigationPricer<'a> {
    query: VideoQuery<'a>,
    mapping: &'a Mapping,
    /// Memory of one device of the query's cluster in bytes; what exceeds it does not fit.
    capacity_bytes: f64,
}

impl MitigationPricer<'_> {
    fn new<'a>(plan: &'a Plan, model: &'a Model, machine: MachineModel) -> MitigationPricer<'a> {
        let capacity_bytes = machine.cluster.device.memory_bytes.value;
        let query = VideoQuery {
            model,
            machine,
            devices: Some(plan.sealed.mesh().world_size()),
            objective: None,
            dtype: Some(plan.mapping.dtype),
            pins: VideoPins::default(),
            decode_ns: None,
            encode_ns: None,
            whole_decode: true,
            command: String::new(),
        };
        MitigationPricer { query, mapping: &plan.mapping, capacity_bytes }
    }

    fn own_pins(&self) -> VideoPins {
        use tessera_mesh::Axis;
        let m = self.mapping;
        VideoPins {
            tp: Some(m.mesh.axis_size(Axis::Tp)),
            pp: Some(m.mesh.axis_size(Axis::Pp)),
            strategy: Some(m.strategy),
            overlap_chunks: Some(m.overlap_chunks),
            topology: Some(m.topology),
            decode: None,
            media: Some(m.media),
            outstanding: Some(m.max_outstanding),
        }
    }

    /// Returns the best mapping for some pins, even if it exceeds the device memory.
    fn best_for_pins(&self, pins: &VideoPins) -> Option<RankedMapping> {
        let mut roomy = self.query.clone();
        let mut cluster = roomy.machine.cluster.clone();
        cluster.device.memory_bytes.value *= 1e4;
        roomy.machine = MachineModel::new(cluster, roomy.machine.profile.clone());
        search_with_pins(&roomy, pins, |_, outcome| outcome.best.into_iter().next()).ok().flatten()
    }

    fn price_unchanged(&self) -> Option<RankedMapping> {
        self.best_for_pins(&self.own_pins())
    }

    fn rank_memory_bytes(&self, r: &RankedMapping) -> f64 {
        r.memory.total_bytes().0 as f64 + self.query.machine.reserved_bytes()
    }

    fn add_memory_observation(&self, peak: Option<f64>, out: &mut DoctorReport) {
        if let Some(peak) = peak {
            let text = format!(
                "{} of {} on the fullest rank",
                Bytes(peak as u64),
                Bytes(self.capacity_bytes as u64)
            );
            out.add_observation("memory", text);
        }
    }

    /// Estimates one other mapping.
    fn price_mitigation(&self, action: &str, how: String, pins: VideoPins) -> Mitigation {
        match self.best_for_pins(&pins) {
            Some(r) => {
                let fits = if self.rank_memory_bytes(&r) > self.capacity_bytes {
                    ", which does not fit"
                } else {
                    ""
                };
                Mitigation { action: action.to_string(), how, after: Some(format_ranked(&r) + fits) }
            }
            None => Mitigation {
                action: action.to_string(),
                how: format!("{how}: the model does not support this mapping"),
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

    fn congestion_mitigations(&self, before: Option<&RankedMapping>) -> Vec<Mitigation> {
        let own = self.own_pins();
        let (tp, pp) = (own.tp.unwrap_or(1), own.pp.unwrap_or(1));
        let other = self.other_strategy();
        let mut out = Vec::new();
        if tp > 1 {
            let how =
                format!("{} instead of {} on the same mesh", other.name(), self.mapping.strategy.name());
            let pins = VideoPins { strategy: Some(other), overlap_chunks: None, ..own };
            out.push(self.price_mitigation("use the other strategy", how, pins));
        }
        if tp.is_multiple_of(2) {
            let how = format!("tp={}, pp={} instead of tp={tp}, pp={pp}", tp / 2, pp * 2);
            let pins = VideoPins { tp: Some(tp / 2), pp: Some(pp * 2), overlap_chunks: None, ..own };
            out.push(self.price_mitigation("use smaller tp groups", how, pins));
        }
        let best = self.best_for_pins(&VideoPins::default());
        let same = |r: &RankedMapping| before.is_some_and(|b| b.mapping == r.mapping && b.decode == r.decode);
        out.push(match best {
            Some(r) if same(&r) => Mitigation {
                action: "use the best mapping for the same number of devices".to_string(),
                how: "the plan already uses it".to_string(),
                after: None,
            },
            Some(r) => Mitigation {
                action: "use the best mapping for the same number of devices".to_string(),
                how: format!(
                    "{} {} {} {}",
                    r.mapping.mesh,
                    r.mapping.strategy_label(),
                    r.mapping.topology.name(),
                    r.decode
                ),
                after: Some(format_ranked(&r)),
            },
            None => Mitigation {
                action: "use the best mapping for the same number of devices".to_string(),
                how: "no mapping fits".to_string(),
                after: None,
            },
        });
        out
    }

    fn memory_mitigations(&self) -> Vec<Mitigation> {
        let own = self.own_pins();
        let (tp, pp) = (own.tp.unwrap_or(1), own.pp.unwrap_or(1));
        let mut out = Vec::new();
        if tp > 1 && self.mapping.strategy == Strategy::Ulysses {
            let how = "megatron, which shards weights over tp".to_string();
            out.push(self.price_mitigation(
                "shard the weights",
                how,
                VideoPins { strategy: Some(Strategy::Megatron), overlap_chunks: None, ..own },
            ));
        }
        let mut wider = MitigationPricer {
            query: self.query.clone(),
            mapping: self.mapping,
            capacity_bytes: self.capacity_bytes,
        };
        wider.query.devices = wider.query.devices.map(|d| d.saturating_mul(2));
        let how = format!("pp={} instead of {pp}, on more devices", pp * 2);
        out.push(wider.price_mitigation("use more stages", how, VideoPins { pp: Some(pp * 2), ..own }));
        if tp.is_multiple_of(2) {
            let how = format!("tp={}, pp={} on the same number of devices", tp / 2, pp * 2);
            out.push(self.price_mitigation(
                "use stages instead of tp",
                how,
                VideoPins { tp: Some(tp / 2), pp: Some(pp * 2), overlap_chunks: None, ..own },
            ));
        }
        let video = &self.query.model.video;
        if !video.stream.recompute {
            let mut model = self.query.model.clone();
            let stream = &mut model.video.stream;
            (stream.recompute, stream.sink_frames, stream.positions, stream.recache) = (true, 0, 0, false);
            let lean =
                MitigationPricer { query: VideoQuery { model: &model, ..self.query.clone() }, ..*self };
            let how = "recompute the context before each chunk: --cache recompute".to_string();
            out.push(lean.price_mitigation("keep no cache between chunks", how, own));
        }
        out
    }

    fn drift_mitigations(&self, before: Option<&RankedMapping>) -> Vec<Mitigation> {
        let free = |action: &str, how: &str| Mitigation {
            action: action.to_string(),
            how: how.to_string(),
            after: before.map(format_ranked),
        };
        let mut out = Vec::new();
        if self.mapping.numerics == Numerics::Standard {
            let fixed = Mapping { numerics: Numerics::MeshInvariant, ..self.mapping.clone() };
            let after = before.and_then(|b| {
                let found = search_with_pins(&self.query, &self.own_pins(), |q, _| {
                    video::estimate_mapping(q, &fixed, b.decode).ok()
                });
                found.ok().flatten()
            });
            out.push(Mitigation {
                action: "pin algorithms".to_string(),
                how: "numerics mesh-invariant: every sum is one tree of eight segments on every mesh"
                    .to_string(),
                after: after.as_ref().map(format_ranked),
            });
        } else {
            out.push(free("pin algorithms", "every sum already is one fixed tree"));
        }
        out.push(free(
            "fix the order of ranks",
            "the list of devices already is part of the plan's digest; no cost",
        ));
        out.push(free(
            "deterministic random numbers",
            "every random number is keyed by seed, chunk and element position on every mesh, so the cause of the drift is a device, its \
memory or the loaded data; `tessera autopsy` names the rank",
        ));
        out
    }
}

fn format_ranked(r: &RankedMapping) -> String {
    format!(
        "{:.1} frames/s, a chunk every {:.2} ms, {:.1} % of a call is exposed communication, {}",
        r.fps,
        r.period.ns / 1e6,
        r.call.exposed_ns() / r.call.ns.max(f64::MIN_POSITIVE) * 100.0,
        r.memory.total_bytes()
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tessera_report::flight::{
        CollectiveProgress, FlightCollective, FlightEntry, FlightHeader, FlightLine, FlightPhase,
    };

    fn sample_flight(rank: u32, exposed_ns: u64) -> FlightLog {
        let phase = |n, call, at_ns, end_ns| FlightLine {
            n,
            at_ns,
            entry: FlightEntry::Phase(FlightPhase { call, end_ns, ..FlightPhase::default() }),
        };
        let meeting = |n, call, at_ns: u64, op: &str, exposed_ns| FlightLine {
            n,
            at_ns,
            entry: FlightEntry::Collective(FlightCollective {
                state: CollectiveProgress::Done,
                call,
                op: op.into(),
                end_ns: at_ns + 400,
                exposed_ns,
                ..FlightCollective::default()
            }),
        };
        FlightLog {
            header: FlightHeader { rank, ..FlightHeader::default() },
            lines: vec![
                // A warm-up phase, which does not count.
                phase(0, 0, 0, 5_000),
                meeting(1, 0, 100, "all_to_all", 400),
                phase(2, 1, 10_000, 11_000),
                meeting(3, 1, 10_100, "all_to_all", exposed_ns),
                meeting(4, 1, 10_600, "all_reduce", 10),
            ],
            ..FlightLog::default()
        }
    }

    #[test]
    fn exposed_share_is_of_the_most_exposed_rank_after_warm_up() {
        let open = most_exposed_rank(&[sample_flight(0, 90), sample_flight(1, 290)]).unwrap();
        assert_eq!((open.rank, open.op.as_str()), (1, "all_to_all"));
        assert!((open.share - 0.3).abs() < 1e-9, "{}", open.share);
        assert!(most_exposed_rank(&[]).is_none());
        // A record with only the warm-up gives no result.
        let mut short = sample_flight(0, 90);
        short.lines.truncate(2);
        assert!(most_exposed_rank(&[short]).is_none());
    }

    fn sample_run(name: &str, golden: &str, code: Option<&str>) -> RecordedRun {
        let start = r#"{"kind":"start","schema":2,"tessera":"0","plan":"p","model":"m","mesh":"tp=2","strategy":"s","numerics":"n","cache":"c","topology":"mesh","seed":0,"prompts":[],"chunks":1,"fps":1.0,"width":1,"height":1,"steps":1,"command":[],"started_at":"","status":"running"}"#;
        let (status, cause) = match code {
            None => ("complete", "null".to_string()),
            Some(c) => {
                ("failed", format!(r#"{{"class":"x","exit_code":10,"rank":null,"code":"{c}","message":""}}"#))
            }
        };
        let end = format!(
            r#"{{"kind":"end","status":"{status}","cause":{cause},"chunks":1,"frames":1,"wall_ns":1,"fps":1.0,"output_complete":true,"golden":"{golden}"}}"#
        );
        let record = RunRecord::parse(format!("{start}\n{end}\n").as_bytes()).unwrap();
        RecordedRun { name: name.into(), record, flights: Vec::new() }
    }

    #[test]
    fn drift_is_counted_only_between_comparable_runs() {
        let mut out = DoctorReport::default();
        let mut count = |runs: &[RecordedRun]| count_drifted(runs, &mut out);
        assert_eq!(count(&[sample_run("a", "1", None)]), None);
        assert_eq!(count(&[sample_run("a", "1", None), sample_run("b", "1", None)]), Some(0));
        assert_eq!(
            count(&[sample_run("a", "1", None), sample_run("b", "2", None), sample_run("c", "1", None)]),
            Some(1)
        );
        assert_eq!(count(&[sample_run("a", "", Some("T0744"))]), Some(1));
        assert_eq!(count(&[sample_run("a", "", Some("T0712"))]), None, "another failure is not drift");
        let mut other = sample_run("b", "2", None);
        other.record.start.seed = 9;
        assert_eq!(count(&[sample_run("a", "1", None), other]), None, "another request gives another hash");
    }
}
