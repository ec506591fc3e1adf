//! The bring-up checklist from the first run to production scale. Six ordered items are answered
//! from the files that runs leave behind; an item passes only if all items before it pass.

mod ship;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use tessera::opened_run::{self, RunDir, RunPlan};
use tessera_base::{Bytes, Diagnostic, Diagnostics, GateStatus};
use tessera_ir::{Op, OpView, Opcode, Program};
use tessera_mesh::Axis;
use tessera_plan::search::thresholds::Thresholds;
use tessera_report::flight::{FlightEntry, FlightLog, overlap_ratio};
use tessera_report::overlap::OverlapStats;
use tessera_report::record::{RunDevice, RunRecord, RunStatus};
use tessera_runtime::parity::KERNEL_KEY;
use tessera_verify::SealedPlan;

use crate::codes::T0045;

pub use ship::check_ship;

/// Number of runs of one request that must agree before their golden hash counts as stable.
const STABLE_RUNS: usize = 3;

/// The thresholds that a run must meet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BringupGoals {
    /// Minimum share of the collective time that is hidden.
    pub min_overlap_ratio: f64,
    /// Minimum OverlapScore with a leader outside the mesh.
    pub min_overlap_score: f64,
    /// Maximum share of a rank's time spent waiting for another pipeline stage.
    pub max_bubble: f64,
}

impl From<&Thresholds> for BringupGoals {
    fn from(t: &Thresholds) -> BringupGoals {
        BringupGoals {
            min_overlap_ratio: t.min_overlap,
            min_overlap_score: t.min_overlap_score,
            max_bubble: t.max_bubble,
        }
    }
}

impl Default for BringupGoals {
    fn default() -> BringupGoals {
        BringupGoals::from(&Thresholds::default())
    }
}

/// Whether an item of the checklist passes, and if not, why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemStatus {
    /// The item's requirement is met.
    Pass,
    /// The item does not apply to this plan.
    NotApplicable,
    /// The requirement is met, but an earlier item does not pass.
    Blocked,
    /// The runs recorded nothing that answers the item.
    Unanswered,
    /// The requirement is not met.
    Fail,
}

impl ItemStatus {
    /// Returns the name that the checklist shows, such as `pass` or `blocked`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ItemStatus::Pass => "pass",
            ItemStatus::NotApplicable => "n/a",
            ItemStatus::Blocked => "blocked",
            ItemStatus::Unanswered => "open",
            ItemStatus::Fail => "fail",
        }
    }
}

impl From<ItemStatus> for GateStatus {
    /// A blocked item counts as not measured: the runs meet it, but it does not pass.
    fn from(status: ItemStatus) -> GateStatus {
        match status {
            ItemStatus::Pass => GateStatus::Pass,
            ItemStatus::NotApplicable => GateStatus::NotApplicable,
            ItemStatus::Blocked | ItemStatus::Unanswered => GateStatus::NotMeasured,
            ItemStatus::Fail => GateStatus::Fail,
        }
    }
}

/// A requirement of the bring-up checklist, and whether the checked runs meet it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChecklistItem {
    /// The requirement in a few words.
    pub title: &'static str,
    /// Whether the runs meet the requirement, and whether an earlier item blocks this one.
    pub status: ItemStatus,
    /// The measured numbers, and what to do if the item does not pass.
    pub detail: String,
}

/// The contents of one run directory; `name` is the path of the folder as given.
struct CheckedRun {
    name: String,
    plan: RunPlan,
    record: RunRecord,
    flights: Vec<FlightLog>,
}

/// Answers the checklist from run directories, oldest first.
///
/// # Errors
/// T0045 for every folder that is not a run directory or is named twice.
pub fn check_bringup(folders: &[PathBuf], goals: &BringupGoals) -> Result<Vec<ChecklistItem>, Diagnostics> {
    let runs = open_runs(folders)?;
    let Some(last) = runs.last() else {
        return Err(vec![
            Diagnostic::error(&T0045, "no run is named").with_hint("name run directories, oldest first"),
        ]);
    };
    let answers = [
        ("rank map stable; mesh axes verified", check_rank_map(&runs)),
        ("kernels tuned on a subset, then frozen", check_frozen_kernels(&runs)),
        (
            "experts' all-to-all fused; its FP8 wire format validated",
            check_expert_exchange(sealed_programs(last.plan.sealed())),
        ),
        ("KV cache residency reaches the required hit rate", check_cache_residency(last.plan.sealed())),
        ("overlap reached; pipeline bubbles small", check_overlap(last, goals)),
        ("golden hash stable across runs", check_golden_hash(&runs)),
    ];
    // A simulated run proves nothing: its times are estimates, and it computes no numbers.
    let simulated = runs.iter().find(|r| r.record.start.device == RunDevice::Sim);
    let mut items = Vec::new();
    let mut first_blocking: Option<usize> = None;
    for (i, (title, (mut standing, mut answer))) in answers.into_iter().enumerate() {
        if let Some(run) = simulated.filter(|_| standing != ItemStatus::NotApplicable) {
            (standing, answer) = (ItemStatus::Unanswered, format!("{} ran on a simulated machine", run.name));
        }
        match (standing, first_blocking) {
            (ItemStatus::Pass, Some(first)) => {
                standing = ItemStatus::Blocked;
                answer = format!("blocked by item {}: {answer}", first + 1);
            }
            (ItemStatus::Unanswered | ItemStatus::Fail, None) => first_blocking = Some(i),
            _ => {}
        }
        items.push(ChecklistItem { title, status: standing, detail: answer });
    }
    Ok(items)
}

/// Opens run directories.
///
/// # Errors
/// T0045 for every folder that is not a run directory or is named twice.
fn open_runs(folders: &[PathBuf]) -> Result<Vec<CheckedRun>, Diagnostics> {
    let (mut runs, mut diagnostics) = (Vec::new(), Vec::new());
    let mut known: Vec<PathBuf> = Vec::new();
    for folder in folders {
        let canonical = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        if known.contains(&canonical) {
            diagnostics.push(
                Diagnostic::error(&T0045, format!("{} is named twice", folder.display()))
                    .with_label(folder.display().to_string(), "a run always agrees with itself")
                    .with_hint("run the same request again with another --out folder"),
            );
            continue;
        }
        known.push(canonical);
        match open_run(folder) {
            Ok(run) => runs.push(run),
            Err(d) => diagnostics.push(d),
        }
    }
    if !diagnostics.is_empty() {
        return Err(diagnostics);
    }
    Ok(runs)
}

fn open_run(folder: &Path) -> Result<CheckedRun, Diagnostic> {
    let refuse = |why: String| {
        Diagnostic::error(&T0045, format!("{} holds no run to check", folder.display()))
            .with_label(folder.display().to_string(), why)
            .with_hint("name the folder that `tessera stream --out` or `tessera generate --out` wrote")
    };
    let RunDir { plan, record, flight_records: flights } =
        opened_run::open_run_dir(folder).map_err(refuse)?;
    Ok(CheckedRun { name: folder.display().to_string(), plan, record, flights })
}

type ItemAnswer = (ItemStatus, String);

fn check_rank_map(runs: &[CheckedRun]) -> ItemAnswer {
    let first = &runs[0];
    let map = |r: &CheckedRun| {
        let mut hash = blake3::Hasher::new();
        for (rank, device) in r.plan.sealed().rank_map().devices().iter().enumerate() {
            hash.update(format!("{rank} {device}\n").as_bytes());
        }
        hash.finalize().to_hex()[..16].to_string()
    };
    for r in runs {
        let sealed = r.plan.sealed().digest_hex();
        if r.record.start.plan != sealed {
            return (
                ItemStatus::Fail,
                format!("{} ran plan {} but contains plan {sealed}", r.name, r.record.start.plan),
            );
        }
        if map(r) != map(first) || r.record.start.mesh != first.record.start.mesh {
            return (
                ItemStatus::Fail,
                format!(
                    "{}: mesh {}, rank map {}; {}: mesh {}, rank map {}",
                    first.name,
                    first.record.start.mesh,
                    map(first),
                    r.name,
                    r.record.start.mesh,
                    map(r)
                ),
            );
        }
    }
    let text = format!("mesh {}, rank map {}", first.record.start.mesh, map(first));
    if runs.len() < 2 {
        return (
            ItemStatus::Unanswered,
            format!("{text} in one run; name a second run, made by newly started processes"),
        );
    }
    (
        ItemStatus::Pass,
        format!("{text}, the same in {} runs; every plan passed verification again", runs.len()),
    )
}

fn check_frozen_kernels(runs: &[CheckedRun]) -> ItemAnswer {
    let broken = runs.iter().find(|r| r.record.status() != RunStatus::Complete);
    if let Some(r) = broken {
        return (ItemStatus::Unanswered, format!("{} did not complete", r.name));
    }
    let first = &runs[0];
    let frozen = kernel_settings(first);
    for r in runs {
        let settings = kernel_settings(r);
        let probes = settings.keys().filter(|(_, key)| key.starts_with(KERNEL_KEY)).count();
        if probes == 0 {
            return (ItemStatus::Unanswered, format!("{} records no probe of its kernels", r.name));
        }
        // A run that differs in one of these chose its kernels anew.
        let different = frozen.keys().chain(settings.keys()).find(|at| frozen.get(at) != settings.get(at));
        if let Some(at @ (rank, key)) = different {
            let value = |of: &KernelSettings| of.get(at).map_or("absent".to_string(), Clone::clone);
            let (one, other) = (value(&frozen), value(&settings));
            return (
                ItemStatus::Fail,
                format!("rank {rank}, {key}: {one} in {}, {other} in {}", first.name, r.name),
            );
        }
    }
    let probed: BTreeSet<&str> =
        frozen.keys().map(|(_, key)| key.as_str()).filter(|key| key.starts_with(KERNEL_KEY)).collect();
    let chunks: u32 = runs.iter().map(|r| r.record.chunk_count()).sum();
    // A program that first runs after warm-up ends the run with T0752.
    let text = format!(
        "{} kernels probed; no program was first compiled, captured or run after warm-up in {chunks} chunks",
        probed.len()
    );
    if runs.len() < 2 {
        return (
            ItemStatus::Unanswered,
            format!("{text} of one run; name a second run of the same build, plan and device"),
        );
    }
    (ItemStatus::Pass, format!("{text}; the same kernels in {} runs", runs.len()))
}

/// Values of the start-up reports by rank and key.
type KernelSettings = BTreeMap<(u32, String), String>;

/// Returns what decides which kernels a run's ranks execute, with the probe of each kernel.
fn kernel_settings(run: &CheckedRun) -> KernelSettings {
    const KEYS: [&str; 7] =
        ["GPU", "GPU libraries", "backend", "build", "captured programs", "numerics", "plan digest"];
    let decides = |key: &str| KEYS.contains(&key) || key.starts_with(KERNEL_KEY);
    let startups = run.record.events.iter().filter_map(|e| e.startup.as_ref());
    startups
        .flat_map(|s| s.keys.iter().map(|(key, value)| ((s.rank, key.clone()), value.clone())))
        .filter(|((_, key), _)| decides(key))
        .collect()
}

/// Iterates over the programs of all phases and ranks of a plan.
fn sealed_programs(sealed: &SealedPlan) -> impl Iterator<Item = &Program> {
    sealed.phase_names().iter().flat_map(move |phase| {
        sealed.mesh().iter().filter_map(move |rank| sealed.rank_program(phase, rank).map(|p| &**p))
    })
}

/// Checks that every exchange of experts packs its rows in one kernel. Rows that travel as e4m3 need
/// an error bound, which runs do not record.
fn check_expert_exchange<'a>(programs: impl Iterator<Item = &'a Program>) -> ItemAnswer {
    let (mut exchanges, mut quantized) = (0usize, 0usize);
    for p in programs {
        // The programs of a language model spell the exchange out.
        let packs = |o: &Op| matches!(o.opcode, Opcode::ExpertPack | Opcode::ExpertPackFused);
        if p.ops.iter().any(packs) {
            let text = format!("@{} packs the rows of experts in kernels of their own", p.name);
            return (ItemStatus::Unanswered, text);
        }
        for op in &p.ops {
            let Ok(OpView::MoeRoute(route)) = op.view() else { continue };
            if !route.pack_fused {
                let text = format!("@{} packs its rows in kernels of their own: set pack_fused", p.name);
                return (ItemStatus::Fail, text);
            }
            exchanges += 1;
            quantized += usize::from(route.quantize_fp8);
        }
    }
    match (exchanges, quantized) {
        (0, _) => (ItemStatus::NotApplicable, "no program of the plan routes experts".to_string()),
        (_, 0) => (ItemStatus::Pass, format!("{exchanges} exchanges are fused; none of them sends e4m3")),
        _ => (
            ItemStatus::Unanswered,
            format!("{quantized} of {exchanges} exchanges send e4m3, and no run records their error"),
        ),
    }
}

/// Reports where the KV caches are. A sealed program assigns each buffer to the device's memory, so
/// no read can miss, and there is no hit rate to measure.
fn check_cache_residency(sealed: &SealedPlan) -> ItemAnswer {
    let (mut max_bytes, mut reads) = (0u64, 0usize);
    for rank in sealed.mesh().inner_ranks() {
        let mut buffer_bytes = BTreeMap::new();
        for phase in sealed.phase_names() {
            let Some(p) = sealed.rank_program(phase, rank) else { continue };
            let reads_cache = |o: &&Op| matches!(o.opcode, Opcode::CacheRead | Opcode::PagedAttention);
            reads += p.ops.iter().filter(reads_cache).count();
            for b in p.buffers.iter().filter(|b| b.name.starts_with("kv.")) {
                buffer_bytes.insert(b.name.clone(), b.ty.byte_size().0);
            }
        }
        max_bytes = max_bytes.max(buffer_bytes.values().sum());
    }
    let text = match reads {
        0 => "no program reads a KV cache".to_string(),
        _ => format!(
            "the plan uses one memory tier: all keys and values are in device memory, at most {} on one rank",
            Bytes(max_bytes)
        ),
    };
    (ItemStatus::NotApplicable, text)
}

fn check_overlap(run: &CheckedRun, goals: &BringupGoals) -> ItemAnswer {
    let (mut lines, mut standing) = (Vec::new(), ItemStatus::NotApplicable);
    let mut add_measurement = |passes: Option<bool>, text: String| {
        standing = match (standing, passes) {
            (ItemStatus::Fail, _) | (_, Some(false)) => ItemStatus::Fail,
            (ItemStatus::Unanswered, _) | (_, None) => ItemStatus::Unanswered,
            _ => ItemStatus::Pass,
        };
        lines.push(text);
    };
    if let Some(ratio) = overlap_ratio(&run.flights) {
        let text = format!("overlap ratio {ratio:.2} (goal {:.2})", goals.min_overlap_ratio);
        add_measurement(Some(ratio >= goals.min_overlap_ratio), text);
    }
    if let Some(o) =
        OverlapStats::from_chunks(&run.record.chunks).filter(|_| run.plan.sealed().mesh().outside_count() > 0)
    {
        let text = format!("{} (goal {:.2})", o.describe_score(), goals.min_overlap_score);
        add_measurement(o.passes_gate(goals.min_overlap_score), text);
    }
    if run.plan.sealed().mesh().axis_size(Axis::Pp) > 1
        && let Some((rank, share)) = largest_bubble(&run.flights)
    {
        let text = format!(
            "largest bubble {:.0} % at rank {rank} (goal below {:.0} %)",
            share * 100.0,
            goals.max_bubble * 100.0
        );
        add_measurement(Some(share < goals.max_bubble), text);
    }
    match lines.is_empty() {
        true if run.plan.sealed().mesh().world_size() == 1 => (
            ItemStatus::NotApplicable,
            "one rank: there is no collective to hide and no stage to wait for".to_string(),
        ),
        true => (ItemStatus::Unanswered, format!("{} has no flight record of a collective", run.name)),
        false => (standing, lines.join("; ")),
    }
}

/// Returns the rank with the largest bubble, and the bubble's share of the rank's time. The time
/// runs from the first phase after warm-up to the end of the last phase; time outside phases and
/// exposed time of receives are bubble.
fn largest_bubble(flights: &[FlightLog]) -> Option<(u32, f64)> {
    let bubble_of = |f: &FlightLog| {
        let first = f.lines.iter().filter_map(|l| match &l.entry {
            FlightEntry::Phase(p) => Some(p.call),
            _ => None,
        });
        let warm_up = first.min()?;
        let (mut from, mut to, mut busy, mut waits) = (u64::MAX, 0u64, 0u64, 0u64);
        for l in &f.lines {
            match &l.entry {
                FlightEntry::Phase(p) if p.call > warm_up && p.end_ns > 0 => {
                    (from, to) = (from.min(l.at_ns), to.max(p.end_ns));
                    busy += p.end_ns.saturating_sub(l.at_ns);
                }
                FlightEntry::Collective(c) if c.call > warm_up && c.op == "recv" => waits += c.exposed_ns,
                _ => {}
            }
        }
        let span_ns = to.checked_sub(from).filter(|w| *w > 0)?;
        Some((f.header.rank, 1.0 - busy.saturating_sub(waits) as f64 / span_ns as f64))
    };
    flights.iter().filter_map(bubble_of).max_by(|a, b| a.1.total_cmp(&b.1))
}

fn check_golden_hash(runs: &[CheckedRun]) -> ItemAnswer {
    let mut hashes = Vec::new();
    for r in runs {
        match r.record.end.as_ref().filter(|e| e.status == RunStatus::Complete) {
            Some(end) => hashes.push((&r.name, &end.golden, r.record.chunk_count())),
            None => return (ItemStatus::Unanswered, format!("{} did not complete", r.name)),
        }
    }
    let (name, hash, chunks) = hashes[0];
    if let Some((other, theirs, n)) = hashes.iter().find(|(_, h, n)| *h != hash || *n != chunks) {
        return (
            ItemStatus::Fail,
            format!(
                "{name}: {chunks} chunks, {hash}; {other}: {n} chunks, {theirs}: pin algorithms, rank order and seeds"
            ),
        );
    }
    let says = format!("{hash} over {chunks} chunks");
    if runs.len() < STABLE_RUNS {
        return (
            ItemStatus::Unanswered,
            format!("{says} in {} of {STABLE_RUNS} runs; run the same request again", runs.len()),
        );
    }
    (ItemStatus::Pass, format!("{says}, the same in {} runs", runs.len()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn check_route(attrs: &str) -> ItemStatus {
        let text = format!(
            "program @p {{\n  buffer @E : f32[4, 2, 3]\n  %X = input : f32[6, 3]\n  %G = input : f32[6, 4]\n  \
             %y = toperator.moe_route %X, %G, @E {{a2a_axis = \"ep\", capacity_factor = 1.25{attrs}}}\n  \
             output \"y\", %y\n}}\n"
        );
        let programs = [tessera_ir::parse(&text, "route.tir").unwrap()];
        check_expert_exchange(programs.iter()).0
    }

    #[test]
    fn the_exchange_of_experts_follows_from_the_plans_programs() {
        assert_eq!(check_expert_exchange(std::iter::empty()).0, ItemStatus::NotApplicable);
        assert_eq!(check_route(""), ItemStatus::Fail);
        assert_eq!(check_route(", pack_fused = true"), ItemStatus::Pass);
        assert_eq!(
            check_route(", pack_fused = true, policy = \"fp8_e4m3\", quantize_fp8 = true"),
            ItemStatus::Unanswered
        );
    }

    #[test]
    fn the_goals_are_those_of_the_report() {
        assert_eq!(BringupGoals::default().min_overlap_score, tessera_report::overlap::OVERLAP_GATE);
    }
}
