//! Finds what keeps a run from a steady state: breaks, recompiles, recordings, caches, gaps.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Code, named_enum};

use super::compile_id::CompileId;
use super::log::{Compile, RankLog};
use super::run_logs::RunLogs;
use crate::codes::{T1420, T1421, T1422, T1423, T1424};
use crate::flight::list_ranks;

named_enum! {
    /// A class of compile activity.
    pub enum ActivityKind {
        /// Dynamo stopped tracing and returned to Python.
        GraphBreak = "graph break",
        /// No compiled version of a frame fitted a call.
        Recompile = "recompile",
        /// A CUDA graph was recorded again.
        Rerecord = "CUDA graph recorded again",
        /// Some ranks found a compiled graph in a cache and others did not.
        CacheAsymmetry = "cache asymmetry",
        /// Something compiled, and the log does not show what.
        Unlogged = "unlogged activity",
    }
}

impl ActivityKind {
    /// Returns the code whose page describes the class.
    #[must_use]
    pub fn code(self) -> &'static Code {
        match self {
            ActivityKind::GraphBreak => &T1420,
            ActivityKind::Recompile => &T1421,
            ActivityKind::Rerecord => &T1422,
            ActivityKind::CacheAsymmetry => &T1423,
            ActivityKind::Unlogged => &T1424,
        }
    }
}

/// Activity of one class, at one place of the program, on the ranks that show the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Activity {
    /// Class.
    pub kind: ActivityKind,
    /// Compile, such as `0/1`; empty if it belongs to none.
    pub compile: String,
    /// Function that was compiled.
    pub function: String,
    /// Line of the user's program, if the log names one.
    pub site: Option<String>,
    /// Reason.
    pub reason: String,
    /// How often, on each of the ranks.
    pub count: usize,
    /// Ranks.
    pub ranks: Vec<u32>,
}

/// Numbers of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct RankCounts {
    /// Compiles that recorded a graph.
    pub graphs: usize,
    /// Graph breaks.
    pub breaks: usize,
    /// Recompiles.
    pub recompiles: usize,
    /// Recordings of a CUDA graph beyond the first.
    pub rerecords: usize,
    /// Compiles that the log does not hold fully, and gaps.
    pub unlogged: usize,
}

impl RankCounts {
    pub(crate) fn from_log(log: &RankLog) -> RankCounts {
        let compiles = &log.compiles;
        RankCounts {
            graphs: compiles.iter().filter(|c| !c.graphs.is_empty()).count(),
            breaks: log.count_breaks(),
            recompiles: compiles.iter().filter(|c| c.id.is_recompile()).count(),
            rerecords: compiles.iter().map(Compile::count_rerecords).sum(),
            unlogged: list_unlogged(log).len(),
        }
    }
}

impl Compile {
    /// Returns how often a CUDA graph of this compile was recorded beyond the first time.
    #[must_use]
    pub fn count_rerecords(&self) -> usize {
        self.recordings.iter().map(|n| n.saturating_sub(1) as usize).sum()
    }

    /// Returns whether PyTorch runs the function eagerly, because it could not compile it.
    #[must_use]
    pub fn runs_eagerly(&self) -> bool {
        self.failure.is_some() || self.breaks.iter().any(|b| b.runs_eagerly)
    }

    fn activity(&self, kind: ActivityKind, site: Option<&str>, reason: String, count: usize) -> Activity {
        Activity {
            kind,
            compile: self.id.to_string(),
            function: self.function.clone(),
            site: site.or(self.user_site()).map(str::to_string),
            reason,
            count,
            ranks: Vec::new(),
        }
    }
}

/// Lists the activity of all ranks, by class and compile. Ranks that show the same share an entry.
#[must_use]
pub fn list_activity(run: &RunLogs) -> Vec<Activity> {
    let mut merged: BTreeMap<Activity, Vec<u32>> = BTreeMap::new();
    for (rank, log) in &run.logs {
        for found in list_of_rank(log) {
            merged.entry(found).or_default().push(*rank);
        }
    }
    let of_rank = merged.into_iter().map(|(a, ranks)| Activity { ranks, ..a });
    let mut out: Vec<Activity> = of_rank.chain(list_asymmetries(run)).collect();
    let missing = run.missing_ranks();
    if !missing.is_empty() {
        out.push(Activity {
            kind: ActivityKind::Unlogged,
            compile: String::new(),
            function: String::new(),
            site: None,
            reason: "left no log: nothing was compiled there, or TORCH_TRACE was not set".to_string(),
            count: 1,
            ranks: missing,
        });
    }
    out.sort_by_key(|a| a.kind);
    out
}

fn list_of_rank(log: &RankLog) -> Vec<Activity> {
    let mut out = Vec::new();
    for compile in &log.compiles {
        let mut breaks: BTreeMap<(Option<&str>, &str), usize> = BTreeMap::new();
        for b in &compile.breaks {
            *breaks.entry((b.site.as_deref(), &b.reason)).or_default() += 1;
        }
        for ((site, reason), count) in breaks {
            out.push(compile.activity(ActivityKind::GraphBreak, site, reason.to_string(), count));
        }
        if compile.id.is_recompile() {
            let (site, reason) =
                compile.recompile.as_ref().map_or((None, "no reason is logged".into()), |r| {
                    (r.site.as_deref(), format!("guard failed: {}", r.guard))
                });
            out.push(compile.activity(ActivityKind::Recompile, site, reason, 1));
        }
        if compile.count_rerecords() > 0 {
            let n: u32 = compile.recordings.iter().sum();
            let reason = format!("recorded {n} times: an input that counts as static has a new address");
            out.push(compile.activity(ActivityKind::Rerecord, None, reason, compile.count_rerecords()));
        }
    }
    out.extend(list_unlogged(log));
    out
}

/// Lists compiles that the log does not hold fully, and gaps in the numbering.
fn list_unlogged(log: &RankLog) -> Vec<Activity> {
    let mut out = Vec::new();
    let mut numbers: BTreeMap<(Option<u32>, Option<u32>), BTreeSet<u32>> = BTreeMap::new();
    let mut frames: BTreeSet<u32> = BTreeSet::new();
    for compile in &log.compiles {
        let unlogged = |reason: String| compile.activity(ActivityKind::Unlogged, None, reason, 1);
        if !compile.is_finished {
            out.push(unlogged("the log holds no end of this compile".to_string()));
        } else if let Some(why) = compile.failure.as_ref().filter(|_| compile.breaks.is_empty()) {
            out.push(unlogged(format!("the function runs eagerly, which is not logged: {why}")));
        } else if compile.failure.is_none() && compile.ops > 0 && compile.graphs.is_empty() {
            out.push(unlogged(format!("{} ops were traced, and no graph is logged", compile.ops)));
        }
        if let CompileId { autograd: None, frame: Some(frame), compile: Some(number) } = compile.id {
            frames.insert(frame);
            numbers.entry(compile.id.frame_key()).or_default().insert(number);
        }
    }
    let gap = |text: String| Activity {
        kind: ActivityKind::Unlogged,
        compile: text,
        function: String::new(),
        site: None,
        reason: "the numbering goes on behind it, and it is not in the log".to_string(),
        count: 1,
        ranks: Vec::new(),
    };
    out.extend(find_gap(&frames).map(|frame| gap(format!("{frame}/0"))));
    for ((_, frame), compiles) in &numbers {
        let first = find_gap(compiles);
        out.extend(first.map(|n| gap(format!("{}/{n}", frame.unwrap_or(0)))));
    }
    out
}

/// Returns the first number that is missing below the last one.
fn find_gap(numbers: &BTreeSet<u32>) -> Option<u32> {
    numbers.iter().zip(0..).find(|(n, at)| *n != at).map(|(_, at)| at)
}

/// Lists compiles of one function for which some ranks hit a cache and others missed it.
fn list_asymmetries(run: &RunLogs) -> Vec<Activity> {
    type Key<'a> = (CompileId, &'a str, &'a str);
    let mut outcomes: BTreeMap<Key<'_>, BTreeMap<&str, Vec<u32>>> = BTreeMap::new();
    let mut compiles: BTreeMap<Key<'_>, &Compile> = BTreeMap::new();
    for (rank, log) in &run.logs {
        for compile in &log.compiles {
            // The first outcome of each cache; the backward may look up again.
            let mut seen: BTreeSet<&str> = BTreeSet::new();
            for (cache, outcome) in compile.lookups.iter().filter(|(cache, _)| seen.insert(cache)) {
                let key = (compile.id, compile.function.as_str(), cache.as_str());
                outcomes.entry(key).or_default().entry(outcome).or_default().push(*rank);
                compiles.entry(key).or_insert(compile);
            }
        }
    }
    let mut out: BTreeMap<(CompileId, &str), Activity> = BTreeMap::new();
    for (key, ranks) in outcomes.iter().filter(|(_, ranks)| ranks.len() > 1 && ranks.contains_key("hit")) {
        let others = ranks.iter().filter(|(outcome, _)| **outcome != "hit");
        let mut missed: Vec<u32> = others.flat_map(|(_, ranks)| ranks.clone()).collect();
        missed.sort_unstable();
        let hit = ranks.get("hit").cloned().unwrap_or_default();
        let Some(compile) = compiles.get(key) else { continue };
        let entry = out.entry((key.0, key.1)).or_insert_with(|| {
            let reason = format!("{} had a cached graph, and this rank did not:", list_ranks(&hit));
            Activity { ranks: missed, ..compile.activity(ActivityKind::CacheAsymmetry, None, reason, 1) }
        });
        entry.reason += &format!(" {}", key.2);
    }
    out.into_values().collect()
}
