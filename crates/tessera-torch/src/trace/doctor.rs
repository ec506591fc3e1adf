//! Compares the activity of a run with a budget, and says when to change the structure.

use std::collections::BTreeMap;

use super::activity::{Activity, ActivityKind, RankCounts, list_activity};
use super::budget::{Budget, BudgetLine, StructureRule};
use super::compare::compare_ranks;
use super::log::{Compile, RankLog};
use super::reasons::GuardedValue;
use super::run_logs::RunLogs;
use crate::codes::T1412;
use crate::flight::list_ranks;

/// What a compile trace cannot show, as reports list it.
pub const UNRECORDED: &[&str] = &[
    "which call or step a compile belongs to: the warm-up ends by the clock",
    "what ran, how often, and every eager collective; replays of CUDA graphs",
    "guards that never failed: the first failed one of each recompile is shown",
];

/// What compile traces say about a run.
#[derive(Debug, Clone, Default)]
pub struct CompileReport {
    /// Numbers of each rank.
    pub counts: BTreeMap<u32, RankCounts>,
    /// What was found, by class and compile.
    pub activity: Vec<Activity>,
    /// The budget with the numbers of this run.
    pub budget: Vec<BudgetLine>,
    /// Signs that the structure has to change.
    pub structure: Vec<StructureRule>,
    /// What the reader should know of these logs.
    pub notes: Vec<String>,
}

/// Examines the compile activity of all ranks.
#[must_use]
pub fn examine_activity(run: &RunLogs, budget: &Budget) -> CompileReport {
    let counts: BTreeMap<u32, RankCounts> =
        run.logs.iter().map(|(rank, log)| (*rank, RankCounts::from_log(log))).collect();
    let activity = list_activity(run);
    let mut notes = run.notes.clone();
    let skips = run.logs.iter().flat_map(|(rank, log)| log.compiles.iter().map(move |c| (rank, c)));
    for (rank, compile) in skips {
        let skipped = compile
            .cudagraph_skip
            .iter()
            .map(|why| format!("rank {rank}: no CUDA graph for {} {}: {why}", compile.id, compile.function));
        notes.extend(skipped);
    }
    CompileReport {
        budget: list_budget(run, budget, &counts, &activity),
        structure: list_rules(run, budget),
        counts,
        activity,
        notes,
    }
}

fn list_budget(
    run: &RunLogs,
    budget: &Budget,
    counts: &BTreeMap<u32, RankCounts>,
    activity: &[Activity],
) -> Vec<BudgetLine> {
    let most = |key, title, limit, of: &dyn Fn(u32, &RankCounts) -> usize| {
        let all = counts.iter().map(|(rank, c)| (of(*rank, c), std::cmp::Reverse(*rank)));
        let (value, detail) = match all.max() {
            Some((n, std::cmp::Reverse(rank))) if n > 0 => (n, format!("on rank {rank}")),
            _ => (0, String::new()),
        };
        BudgetLine { key, title, value: value as f64, limit, detail }
    };
    let late = |rank: u32, _: &RankCounts| {
        run.logs.get(&rank).map_or(0, |log| {
            log.compiles.iter().filter(|c| c.id.is_recompile() && c.at_s > budget.warm_up_s).count()
        })
    };
    let total = |key, title, limit, value: usize, detail: String| BudgetLine {
        key,
        title,
        value: value as f64,
        limit,
        detail,
    };
    let caches = activity.iter().filter(|a| a.kind == ActivityKind::CacheAsymmetry).count();
    let divergences: Vec<_> = compare_ranks(run)
        .diagnostics
        .into_iter()
        .filter(|d| d.is_error() && d.code != &T1412)
        .map(|d| d.message)
        .collect();
    let (missing, differing) = (run.missing_ranks(), list_differing(counts));
    let listed = |ranks: &[u32]| if ranks.is_empty() { String::new() } else { list_ranks(ranks) };
    vec![
        total(
            "divergences",
            "collectives that differ between ranks",
            budget.divergences,
            divergences.len(),
            divergences.into_iter().next().unwrap_or_default(),
        ),
        total("missing_ranks", "ranks without a log", budget.missing_ranks, missing.len(), listed(&missing)),
        total(
            "differing_ranks",
            "ranks that compile other than most",
            budget.differing_ranks,
            differing.len(),
            listed(&differing),
        ),
        most("breaks", "graph breaks", budget.breaks, &|_, c| c.breaks),
        most("graphs", "compiled graphs", budget.graphs, &|_, c| c.graphs),
        most(
            "recompiles_after_warm_up",
            "recompiles after the warm-up",
            budget.recompiles_after_warm_up,
            &late,
        ),
        most("rerecords", "CUDA graphs recorded again", budget.rerecords, &|_, c| c.rerecords),
        total(
            "cache_asymmetries",
            "compiles cached on some ranks only",
            budget.cache_asymmetries,
            caches,
            String::new(),
        ),
        most("unlogged", "unlogged compiles", budget.unlogged, &|_, c| c.unlogged),
    ]
}

/// Returns the ranks whose counts are not those of most; of two equal halves, the one without the
/// lowest rank.
fn list_differing(counts: &BTreeMap<u32, RankCounts>) -> Vec<u32> {
    let mut sides: BTreeMap<[usize; 3], Vec<u32>> = BTreeMap::new();
    for (rank, c) in counts {
        sides.entry([c.breaks, c.recompiles, c.rerecords]).or_default().push(*rank);
    }
    let usual = sides.values().max_by_key(|ranks| (ranks.len(), std::cmp::Reverse(ranks.first().copied())));
    let usual = usual.cloned().unwrap_or_default();
    counts.keys().copied().filter(|r| !usual.contains(r)).collect()
}

fn list_rules(run: &RunLogs, budget: &Budget) -> Vec<StructureRule> {
    vec![
        find_repeated_break(run, budget),
        find_eager_frame(run),
        find_full_frame(run, budget),
        find_growth(run, budget),
        find_leader_value(run),
    ]
}

/// A break at one line that repeats.
fn find_repeated_break(run: &RunLogs, budget: &Budget) -> StructureRule {
    let mut sites: BTreeMap<(u32, &str), usize> = BTreeMap::new();
    for (rank, b) in run.breaks() {
        *sites.entry((rank, b.site.as_deref().unwrap_or("an unknown line"))).or_default() += 1;
    }
    let most = sites.iter().max_by_key(|(key, n)| (**n, std::cmp::Reverse(**key)));
    let detail = most.map(|((rank, site), _)| format!("{site} on rank {rank}: move it out of the layer"));
    build_rule("a break repeats with the layers", most.map_or(0, |(_, n)| *n), budget.break_repeats, detail)
}

/// A function that PyTorch gave up compiling: after a break within a loop, an error, or at the
/// recompile limit.
fn find_eager_frame(run: &RunLogs) -> StructureRule {
    let mut most: (usize, Option<String>) = (0, None);
    for (rank, log) in &run.logs {
        let eager: Vec<&Compile> = log.compiles.iter().filter(|c| c.runs_eagerly()).collect();
        let Some(first) = eager.first().filter(|_| eager.len() > most.0) else { continue };
        let detail = match first.breaks.iter().find(|b| b.runs_eagerly) {
            Some(b) => {
                let site = b.site.as_deref().unwrap_or("an unknown line");
                format!("a break within a loop comes with every pass of it; move {site} out of the loop")
            }
            None => first.failure.clone().unwrap_or_default(),
        };
        most = (eager.len(), Some(format!("{} {} on rank {rank}: {detail}", first.id, first.function)));
    }
    build_rule("a whole function runs eagerly", most.0, 1.0, most.1)
}

/// A frame that nears the limit at which PyTorch runs it eagerly.
fn find_full_frame(run: &RunLogs, budget: &Budget) -> StructureRule {
    let mut frames: BTreeMap<_, (usize, &Compile, &RankLog)> = BTreeMap::new();
    for (rank, log) in &run.logs {
        for compile in &log.compiles {
            let key = (*rank, compile.id.frame_key());
            frames.entry(key).or_insert((0, compile, log)).0 += 1;
        }
    }
    let share = |(n, _, log): &(usize, &Compile, &RankLog)| *n as f64 / f64::from(log.recompile_limit.max(1));
    let fullest = frames.iter().rev().max_by(|a, b| share(a.1).total_cmp(&share(b.1)));
    let limit =
        fullest.map_or(1.0, |(_, f)| (budget.recompile_limit_share * f64::from(f.2.recompile_limit)).ceil());
    let detail = fullest.map(|((rank, _), (n, compile, log))| {
        let (id, function) = (compile.id.frame.unwrap_or(0), &compile.function);
        let at = log.recompile_limit;
        format!("frame {id} ({function}) on rank {rank} has {n} compiles, and at {at} runs eagerly")
    });
    build_rule("a frame nears its recompile limit", fullest.map_or(0, |(_, f)| f.0), limit, detail)
}

/// New graphs in each of the last windows.
fn find_growth(run: &RunLogs, budget: &Budget) -> StructureRule {
    let window = budget.window_s.max(1.0);
    let mut most = (0, 0);
    for (rank, log) in &run.logs {
        let windows = ((log.span_s - budget.warm_up_s) / window).floor().clamp(0.0, 1e6) as usize;
        let mut growing = 0;
        for at in (0..windows).rev() {
            let from = budget.warm_up_s + at as f64 * window;
            let is_new = |c: &Compile| c.at_s >= from && c.at_s < from + window && !c.graphs.is_empty();
            if !log.compiles.iter().any(is_new) {
                break;
            }
            growing += 1;
        }
        if growing > most.0 {
            most = (growing, *rank);
        }
    }
    let detail = format!("rank {} compiles new graphs in each of the last {} windows", most.1, most.0);
    build_rule("unique graphs keep growing", most.0, budget.growth_window, Some(detail))
}

/// Guards on a number, a flag or a size: a value that one rank can decide for all.
fn find_leader_value(run: &RunLogs) -> StructureRule {
    let mut most: (usize, Option<String>) = (0, None);
    for (rank, log) in &run.logs {
        let failed = log.compiles.iter().filter_map(|c| c.recompile.as_ref());
        let decided: Vec<_> = failed.filter(|r| r.guarded_value() != GuardedValue::Other).collect();
        let Some(first) = decided.first().filter(|_| decided.len() > most.0) else { continue };
        let advice = match first.guarded_value() {
            GuardedValue::Size => "pad the sizes to buckets, and let the leader choose the bucket",
            _ => "pass it as a tensor, or let the leader send it with each call",
        };
        most = (decided.len(), Some(format!("`{}` on rank {rank}: {advice}", first.guard)));
    }
    build_rule("a guard names a value that the leader decides", most.0, 1.0, most.1)
}

fn build_rule(title: &'static str, value: usize, limit: f64, detail: Option<String>) -> StructureRule {
    let mut rule = StructureRule { title, value: value as f64, limit, detail: String::new() };
    if rule.applies() {
        rule.detail = detail.unwrap_or_default();
    }
    rule
}
