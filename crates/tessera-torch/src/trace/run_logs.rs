//! The logs of all ranks of a run.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};

use super::graph::{Direction, Graph};
use super::log::{Compile, RankLog, Stage};
use super::reasons::GraphBreak;
use crate::codes::{T1411, T1412};
use crate::flight::list_ranks;

/// Maximum number of missing ranks that a diagnostic lists.
const MAX_LISTED: usize = 16;
/// Maximum number of ranks of a run.
const MAX_RANKS: u32 = 1 << 20;

/// The logs of a run, one per rank.
#[derive(Debug, Clone)]
pub struct RunLogs {
    /// Logs by rank.
    pub logs: BTreeMap<u32, RankLog>,
    /// Number of ranks of the run: given, or the smallest number that the logs allow.
    pub rank_count: u32,
    /// What the reader of a report should know.
    pub notes: Vec<String>,
}

impl RunLogs {
    /// Puts logs in order. `rank_count` is the number of ranks of the run, if the caller knows it. A log
    /// without a rank is rank 0 if it is the only one; otherwise a note names it, and it is left out.
    ///
    /// # Errors
    /// T1411 if two logs are of one rank, or a rank is not below `rank_count`.
    pub fn from_logs(logs: Vec<RankLog>, rank_count: Option<u32>) -> Result<RunLogs, Diagnostic> {
        let mut out = RunLogs { logs: BTreeMap::new(), rank_count: 0, notes: Vec::new() };
        let is_alone = logs.len() == 1;
        for log in logs {
            let Some(rank) = log.rank.or(is_alone.then_some(0)) else {
                out.notes.push(format!("{} names no rank and is left out", log.name));
                continue;
            };
            let bound = rank_count.unwrap_or(MAX_RANKS);
            if rank >= bound {
                let message = format!("{} is of rank {rank}, and the run has {bound} ranks", log.name);
                return Err(Diagnostic::error(&T1411, message).with_label(log.name, format!("rank {rank}")));
            }
            if let Some(other) = out.logs.get(&rank) {
                return Err(Diagnostic::error(&T1411, format!("two logs are of rank {rank}"))
                    .with_label(other.name.clone(), "this one")
                    .with_label(log.name, "and this one")
                    .with_hint("put the logs of one run in a folder of their own"));
            }
            out.logs.insert(rank, log);
        }
        out.rank_count = rank_count.unwrap_or_else(|| out.count_ranks());
        out.notes.extend(out.logs.iter().flat_map(|(rank, log)| list_doubts(*rank, log)));
        Ok(out)
    }

    /// Returns the smallest number of ranks that rank numbers and group sizes allow.
    fn count_ranks(&self) -> u32 {
        let last = self.logs.keys().next_back().map_or(0, |r| r + 1);
        let compiles = self.logs.values().flat_map(|l| &l.compiles);
        let calls = compiles.flat_map(|c| c.graphs.values().flatten()).flat_map(|g| &g.calls);
        calls.filter_map(|c| c.group_size).filter(|n| *n <= MAX_RANKS).fold(last, u32::max)
    }

    /// Returns the graph breaks of all ranks.
    pub fn breaks(&self) -> impl Iterator<Item = (u32, &GraphBreak)> {
        let compiles = self.logs.iter().flat_map(|(rank, log)| log.compiles.iter().map(|c| (*rank, c)));
        compiles.flat_map(|(rank, c)| c.breaks.iter().map(move |b| (rank, b)))
    }

    /// Returns the ranks without a log.
    #[must_use]
    pub fn missing_ranks(&self) -> Vec<u32> {
        (0..self.rank_count).filter(|r| !self.logs.contains_key(r)).collect()
    }

    /// Returns an error for the ranks without a log.
    pub(crate) fn check_missing(&self) -> Diagnostics {
        let missing = self.missing_ranks();
        if missing.is_empty() {
            return Vec::new();
        }
        let mut shown = list_ranks(&missing[..missing.len().min(MAX_LISTED)]);
        if missing.len() > MAX_LISTED {
            shown += &format!(" and {} more", missing.len() - MAX_LISTED);
        }
        let present: Vec<u32> = self.logs.keys().copied().collect();
        vec![
            Diagnostic::error(&T1412, format!("there is no log of {shown}"))
                .with_label(list_ranks(&present), "left a log")
                .with_note(format!("the run has {} ranks or more", self.rank_count))
                .with_hint("set TORCH_TRACE on every rank, and copy the logs of all hosts into one folder"),
        ]
    }

    /// Returns the last stage of which every rank has a graph for each compile with collectives in this
    /// direction; `None` if there are no collectives.
    #[must_use]
    pub fn common_stage(&self, direction: Direction) -> Option<Stage> {
        let has_calls = |g: &Graph| g.direction == direction && !g.calls.is_empty();
        let compiles = self.logs.values().flat_map(|l| &l.compiles);
        let with_calls = compiles.filter(|c| c.graphs.values().flatten().any(has_calls));
        with_calls.filter_map(|c| c.last_stage(direction)).min()
    }
}

fn list_doubts(rank: u32, log: &RankLog) -> Vec<String> {
    let mut out = Vec::new();
    if log.is_cut {
        out.push(format!("the log of rank {rank} is cut off: the run was killed, or the disk was full"));
    }
    if log.strange_lines > 0 {
        out.push(format!("the log of rank {rank} has {} lines of another form", log.strange_lines));
    }
    if !log.other_ranks.is_empty() {
        let others: Vec<u32> = log.other_ranks.iter().copied().collect();
        out.push(format!("the log of rank {rank} has records of {}", list_ranks(&others)));
    }
    out
}

impl RankLog {
    /// Returns the compiles whose end the log does not hold.
    pub fn unfinished_compiles(&self) -> impl Iterator<Item = &Compile> {
        self.compiles.iter().filter(|c| !c.is_finished)
    }

    /// Returns whether collectives may be missing at the end, because the log ends within a compile.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.is_cut || self.unfinished_compiles().next().is_some()
    }

    /// Returns the number of graph breaks: of the artifacts, as the counter in the metrics is
    /// cumulative for the process.
    #[must_use]
    pub fn count_breaks(&self) -> usize {
        self.compiles.iter().map(|c| c.breaks.len()).sum()
    }
}
