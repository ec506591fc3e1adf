//! The checklist from the first run to scale: six items in order, each answered from what runs left behind, none
//! green while one before it is not.

use std::path::{Path, PathBuf};

use tessera_base::{Bytes, Code, Diagnostic, Diagnostics};
use tessera_ir::Opcode;
use tessera_mesh::Axis;
use tessera_plan::search::thresholds::Thresholds;
use tessera_report::flight::{Entry, Flight, overlap_ratio};
use tessera_report::overlap::Overlap;
use tessera_report::record::{Device, Record, Status};

use crate::opened::{self, Opened};
use crate::plan::Plan;

/// A folder that no item can be answered from.
pub static T0045: Code = Code {
    id: "T0045",
    title: "folder holds no run to check",
    page: "Every item of the bring-up checklist is answered from runs: the record, the sealed plan and the flight records in \
the folder that `tessera stream --out` made. One of the folders that were named has no record.jsonl or no plan that can \
be judged again. Name folders of runs; three runs of one request let every item be answered.",
};

/// Runs of one request that must agree before their golden hash is called stable.
const STABLE_RUNS: usize = 3;

/// What is asked of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Goals {
    /// Least share of collective time that is hidden.
    pub overlap_ratio: f64,
    /// Least OverlapScore of a leader outside the mesh.
    pub overlap_score: f64,
    /// Largest share of a rank's time in which it waits for another stage.
    pub bubble: f64,
    /// Least share of cache reads that the device's own memory answers.
    pub cache_hit: f64,
}

impl From<&Thresholds> for Goals {
    fn from(t: &Thresholds) -> Goals {
        Goals {
            overlap_ratio: t.overlap_least,
            overlap_score: tessera_report::overlap::OVERLAP_GATE,
            bubble: t.bubble_most,
            cache_hit: t.hits_least,
        }
    }
}

impl Default for Goals {
    fn default() -> Goals {
        Goals::from(&Thresholds::default())
    }
}

/// How an item stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It holds.
    Pass,
    /// The question does not arise in this plan.
    Void,
    /// It would hold, and an item before it does not.
    Held,
    /// Nothing was recorded that answers it.
    Open,
    /// It does not hold.
    Fail,
}

impl Standing {
    /// One word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Standing::Pass => "pass",
            Standing::Void => "n/a",
            Standing::Held => "held",
            Standing::Open => "open",
            Standing::Fail => "fail",
        }
    }
}

/// One item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// What it asks.
    pub title: &'static str,
    /// How it stands.
    pub standing: Standing,
    /// The numbers, and what to do.
    pub says: String,
}

/// A run that is looked at.
struct Run {
    name: String,
    plan: Plan,
    record: Record,
    flights: Vec<Flight>,
}

/// Answers the checklist from the folders of runs.
///
/// # Errors
/// T0045 for every folder that is no run's.
pub fn bringup(folders: &[PathBuf], goals: &Goals) -> Result<Vec<Item>, Diagnostics> {
    let (mut runs, mut ds) = (Vec::new(), Vec::new());
    let mut known: Vec<PathBuf> = Vec::new();
    for folder in folders {
        let place = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        if known.contains(&place) {
            ds.push(
                Diagnostic::error(&T0045, format!("{} is named twice", folder.display()))
                    .at(folder.display().to_string(), "a run agrees with itself")
                    .hint("run the same request again, into another folder"),
            );
            continue;
        }
        known.push(place);
        match open(folder) {
            Ok(run) => runs.push(run),
            Err(d) => ds.push(d),
        }
    }
    if !ds.is_empty() {
        return Err(ds);
    }
    let Some(last) = runs.last() else {
        return Err(vec![
            Diagnostic::error(&T0045, "no run named").hint("name folders of runs, oldest first"),
        ]);
    };
    let answers = [
        ("rank map stable; mesh axes verified", rank_map(&runs)),
        ("kernels tuned on a subset, then frozen", frozen(&runs)),
        ("all-to-all of experts fused; its FP8 wire validated", experts(&last.plan)),
        ("cache residency meets its hit rate", residency(&last.plan, goals)),
        ("overlap reached; bubbles small", overlap(last, goals)),
        ("golden hash stable over runs", golden(&runs)),
    ];
    // Time that was modelled, and numbers that were not computed, are evidence of nothing.
    let modelled = runs.iter().find(|r| r.record.start.device == Device::Sim);
    let mut items = Vec::new();
    let mut behind: Option<usize> = None;
    for (i, (title, (mut standing, mut says))) in answers.into_iter().enumerate() {
        if let Some(run) = modelled.filter(|_| standing != Standing::Void) {
            (standing, says) = (Standing::Open, format!("{} ran on a modelled machine", run.name));
        }
        match (standing, behind) {
            (Standing::Pass, Some(first)) => {
                standing = Standing::Held;
                says = format!("held back by item {}: {says}", first + 1);
            }
            (Standing::Open | Standing::Fail, None) => behind = Some(i),
            _ => {}
        }
        items.push(Item { title, standing, says });
    }
    Ok(items)
}

fn open(folder: &Path) -> Result<Run, Diagnostic> {
    let refuse = |why: String| {
        Diagnostic::error(&T0045, format!("{} holds no run to check", folder.display()))
            .at(folder.display().to_string(), why)
            .hint("name the folder that `tessera stream --out` made")
    };
    let Opened { plan, record, flights } = opened::open(folder).map_err(refuse)?;
    Ok(Run { name: folder.display().to_string(), plan, record, flights })
}

type Answer = (Standing, String);

fn rank_map(runs: &[Run]) -> Answer {
    let first = &runs[0];
    let map = |r: &Run| {
        let mut hash = blake3::Hasher::new();
        for (rank, device) in r.plan.sealed.rank_map().devices().iter().enumerate() {
            hash.update(format!("{rank} {device}\n").as_bytes());
        }
        hash.finalize().to_hex()[..16].to_string()
    };
    for r in runs {
        let sealed = r.plan.sealed.digest_hex();
        if r.record.start.plan != sealed {
            return (
                Standing::Fail,
                format!("{} ran plan {} and holds {sealed}", r.name, r.record.start.plan),
            );
        }
        if map(r) != map(first) || r.record.start.mesh != first.record.start.mesh {
            return (
                Standing::Fail,
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
    let says = format!("mesh {}, rank map {}", first.record.start.mesh, map(first));
    if runs.len() < 2 {
        return (Standing::Open, format!("{says} in one run; name a second one of fresh processes"));
    }
    (Standing::Pass, format!("{says}, the same in {} runs; every plan judged again", runs.len()))
}

fn frozen(runs: &[Run]) -> Answer {
    let broken = runs.iter().find(|r| r.record.status() != Status::Complete);
    if let Some(r) = broken {
        return (Standing::Open, format!("{} did not run to its end", r.name));
    }
    let chunks: u32 = runs.iter().map(|r| r.record.chunk_count()).sum();
    // A program that runs for the first time after warm-up ends the run (T0752), so a complete run had none.
    (
        Standing::Pass,
        format!(
            "no program was compiled, captured or first run after warm-up in {chunks} chunks of {} complete runs; this \
             backend's kernels are fixed when it is built",
            runs.len()
        ),
    )
}

fn experts(plan: &Plan) -> Answer {
    let sealed = &plan.sealed;
    let routed = sealed.phases().iter().any(|phase| {
        sealed.mesh().iter().any(|rank| {
            sealed.program(phase, rank).is_some_and(|p| p.ops.iter().any(|o| o.opcode == Opcode::MoeRoute))
        })
    });
    if routed {
        (Standing::Open, "experts are routed and no error bound of the wire is recorded".to_string())
    } else {
        (Standing::Void, "no program of the plan routes experts, and nothing travels in FP8".to_string())
    }
}

fn residency(plan: &Plan, goals: &Goals) -> Answer {
    let (sealed, mut most, mut reads) = (&plan.sealed, 0u64, 0usize);
    for rank in plan.mesh_ranks() {
        let mut held = std::collections::BTreeMap::new();
        for phase in sealed.phases() {
            let Some(p) = sealed.program(phase, rank) else { continue };
            reads += p.ops.iter().filter(|o| o.opcode == Opcode::CacheRead).count();
            for b in p.buffers.iter().filter(|b| b.name.starts_with("kv.")) {
                held.insert(b.name.clone(), b.ty.bytes().0);
            }
        }
        most = most.max(held.values().sum());
    }
    if reads == 0 {
        return (Standing::Void, "no program reads a cache".to_string());
    }
    // A sealed program names one place for each buffer, and that place is the device.
    (
        Standing::Pass,
        format!(
            "hit rate 1.00 (goal {:.2}): the plan keeps every key and value in the device's memory, {} on the rank with \
             most",
            goals.cache_hit,
            Bytes(most)
        ),
    )
}

fn overlap(run: &Run, goals: &Goals) -> Answer {
    let (mut says, mut standing) = (Vec::new(), Standing::Void);
    let mut weigh = |held: bool, text: String| {
        standing = match (standing, held) {
            (Standing::Fail, _) | (_, false) => Standing::Fail,
            _ => Standing::Pass,
        };
        says.push(text);
    };
    if let Some(ratio) = overlap_ratio(&run.flights) {
        let text = format!("overlap ratio {ratio:.2} (goal {:.2})", goals.overlap_ratio);
        weigh(ratio >= goals.overlap_ratio, text);
    }
    if let Some(o) = Overlap::of(&run.record.chunks).filter(|_| run.plan.sealed.mesh().outside() > 0) {
        let text = format!("OverlapScore {:.2} (goal {:.2})", o.score, goals.overlap_score);
        weigh(o.score >= goals.overlap_score, text);
    }
    if run.plan.sealed.mesh().size(Axis::Pp) > 1
        && let Some((rank, share)) = bubble(&run.flights)
    {
        let text = format!(
            "largest bubble {:.0} % at rank {rank} (goal below {:.0} %)",
            share * 100.0,
            goals.bubble * 100.0
        );
        weigh(share < goals.bubble, text);
    }
    match says.is_empty() {
        true if run.plan.sealed.mesh().ranks() == 1 => {
            (Standing::Void, "one rank: no collective to hide, no stage to wait for".to_string())
        }
        true => (Standing::Open, format!("{} holds no flight record of a collective", run.name)),
        false => (standing, says.join("; ")),
    }
}

/// The rank that waits most for another stage, and the share of its time: from its first phase after warm-up to its
/// last, what is neither phase nor receive that was not waited for.
fn bubble(flights: &[Flight]) -> Option<(u32, f64)> {
    let of = |f: &Flight| {
        let first = f.lines.iter().filter_map(|l| match &l.entry {
            Entry::Phase(p) => Some(p.call),
            _ => None,
        });
        let warm_up = first.min()?;
        let (mut from, mut to, mut busy, mut waits) = (u64::MAX, 0u64, 0u64, 0u64);
        for l in &f.lines {
            match &l.entry {
                Entry::Phase(p) if p.call > warm_up && p.end_ns > 0 => {
                    (from, to) = (from.min(l.at_ns), to.max(p.end_ns));
                    busy += p.end_ns.saturating_sub(l.at_ns);
                }
                Entry::Collective(c) if c.call > warm_up && c.op == "recv" => waits += c.exposed_ns,
                _ => {}
            }
        }
        let whole = to.checked_sub(from).filter(|w| *w > 0)?;
        Some((f.header.rank, 1.0 - busy.saturating_sub(waits) as f64 / whole as f64))
    };
    flights.iter().filter_map(of).max_by(|a, b| a.1.total_cmp(&b.1))
}

fn golden(runs: &[Run]) -> Answer {
    let mut hashes = Vec::new();
    for r in runs {
        match r.record.end.as_ref().filter(|e| e.status == Status::Complete) {
            Some(end) => hashes.push((&r.name, &end.golden, r.record.chunk_count())),
            None => return (Standing::Open, format!("{} did not run to its end", r.name)),
        }
    }
    let (name, hash, chunks) = hashes[0];
    if let Some((other, theirs, n)) = hashes.iter().find(|(_, h, n)| *h != hash || *n != chunks) {
        return (
            Standing::Fail,
            format!(
                "{name}: {chunks} chunks, {hash}; {other}: {n} chunks, {theirs}: pin algorithms, rank order and seeds"
            ),
        );
    }
    let says = format!("{hash} over {chunks} chunks");
    if runs.len() < STABLE_RUNS {
        return (
            Standing::Open,
            format!("{says} in {} of {STABLE_RUNS} runs; run the same request again", runs.len()),
        );
    }
    (Standing::Pass, format!("{says}, the same in {} runs", runs.len()))
}
