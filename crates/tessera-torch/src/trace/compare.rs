//! Compares the collectives that the ranks compiled, group by group.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use tessera_base::{Diagnostic, Diagnostics};

use super::graph::Direction;
use super::log::Stage;
use super::order::check_group_order;
use super::run_logs::RunLogs;
use super::sequence::{PlacedCall, RankSequence, Side, is_equal, is_subsequence, split_sides};
use crate::codes::{T1413, T1414, T1416, T1417, T1418};
use crate::flight::list_ranks;

/// Name that PyTorch gives to the group of all ranks.
const DEFAULT_GROUP: &str = "0";
/// Maximum length of sequences that are compared in any order, which takes quadratic time.
const MAX_PERMUTED: usize = 4096;
/// What a comparison of compile traces cannot see.
pub const LIMITS: &str = "compared is what was compiled, in the order of the compiles: a log does not show what ran, how often, \
                          or any eager collective";

/// The result of comparing the ranks of a run.
#[derive(Debug, Clone, Default)]
pub struct RankComparison {
    /// Differences as errors; what lowers the certainty as warnings.
    pub diagnostics: Diagnostics,
    /// Number of ranks with a log.
    pub ranks: usize,
    /// Number of compiled collectives of the rank that has most of them.
    pub collectives: usize,
    /// Number of process groups.
    pub groups: usize,
    /// The stage at which graphs were compared; `None` if there are no collectives.
    pub stage: Option<Stage>,
}

/// The sequences of the members of one group, in one direction.
pub(crate) struct GroupSequences<'a> {
    pub(crate) name: Rc<str>,
    pub(crate) direction: Direction,
    pub(crate) members: BTreeMap<u32, RankSequence<'a>>,
}

/// Compares the sequences of all ranks.
#[must_use]
pub fn compare_ranks(run: &RunLogs) -> RankComparison {
    let mut out = RankComparison {
        diagnostics: run.check_missing(),
        ranks: run.logs.len(),
        stage: run.common_stage(Direction::Forward),
        ..RankComparison::default()
    };
    out.diagnostics.extend(run.notes.iter().map(|n| Diagnostic::warning(&T1417, n.clone())));
    out.diagnostics.extend(list_unknown(run));
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    let mut groups: BTreeSet<Rc<str>> = BTreeSet::new();
    for direction in [Direction::Forward, Direction::Backward] {
        let Some(stage) = run.common_stage(direction) else { continue };
        if direction == Direction::Backward && out.stage == Some(Stage::Traced) {
            // A rank that has the traced graph alone has no backward to compare.
            continue;
        }
        out.diagnostics.extend(warn_of_stage(run, stage, direction));
        out.stage = out.stage.map_or(Some(stage), |s| Some(s.min(stage)));
        let of_rank = |log| RankSequence::from_log(log, stage, direction);
        let ranks: BTreeMap<u32, RankSequence<'_>> =
            run.logs.iter().map(|(r, log)| (*r, of_rank(log))).collect();
        for (rank, s) in &ranks {
            *counts.entry(*rank).or_default() += s.first.len() + s.again.len();
        }
        let mut equal_groups = BTreeMap::new();
        let names: BTreeSet<Rc<str>> = ranks.values().flat_map(RankSequence::groups).collect();
        for name in &names {
            let group = GroupSequences::new(run, name, direction, &ranks);
            let found = group.compare(run);
            if found.is_empty() && !group.may_be_several() {
                equal_groups.insert(name.clone(), group.members.keys().copied().collect());
            }
            out.diagnostics.extend(found);
        }
        out.diagnostics.extend(check_group_order(&ranks, &equal_groups));
        groups.extend(names);
    }
    out.collectives = counts.into_values().max().unwrap_or(0);
    out.groups = groups.len();
    out
}

impl<'a> GroupSequences<'a> {
    fn new(
        run: &RunLogs,
        name: &Rc<str>,
        direction: Direction,
        ranks: &BTreeMap<u32, RankSequence<'a>>,
    ) -> GroupSequences<'a> {
        let mut members: BTreeMap<u32, RankSequence<'a>> =
            ranks.iter().map(|(rank, sequence)| (*rank, sequence.of_group(name))).collect();
        let size =
            members.values().flat_map(|m| m.first.iter().chain(&m.again)).find_map(|c| c.call.group_size);
        // A group of all ranks has every rank as a member; of another, the log names no members.
        if &**name != DEFAULT_GROUP && size != Some(run.rank_count) {
            members.retain(|_, m| !m.first.is_empty() || !m.again.is_empty());
        }
        GroupSequences { name: name.clone(), direction, members }
    }

    fn compare(&self, run: &RunLogs) -> Diagnostics {
        let first: BTreeMap<u32, &[PlacedCall<'_>]> =
            self.members.iter().map(|(rank, m)| (*rank, m.first.as_slice())).collect();
        let sides = split_sides(&first);
        if sides.len() > 1 && !self.is_split_by_size(&sides) {
            return vec![self.report_departure(run, &first, &sides)];
        }
        let mut out = Vec::from_iter(self.report_few_members(run));
        out.extend(self.compare_recompiles(run));
        out
    }

    fn group_size(&self) -> Option<usize> {
        let calls = self.members.values().flat_map(|m| m.first.iter().chain(&m.again));
        calls.filter_map(|c| c.call.group_size).next().map(|n| n as usize)
    }

    /// Returns whether one name stands for several groups, each with one sequence: PyTorch gives
    /// disjoint groups of one split the same name.
    fn is_split_by_size(&self, sides: &[Side<'_, '_>]) -> bool {
        let size = self.group_size().filter(|n| *n > 0 && self.members.len() > *n);
        size.is_some_and(|n| sides.iter().all(|s| s.ranks.len() % n == 0 && !s.calls.is_empty()))
    }

    /// Returns whether the name may stand for several groups, whose members the log does not tell apart.
    fn may_be_several(&self) -> bool {
        let n = self.members.len();
        &*self.name != DEFAULT_GROUP && self.group_size().map_or(n > 3, |size| n > size)
    }

    fn describe_group(&self) -> String {
        let direction = if self.direction == Direction::Backward { " in the backward" } else { "" };
        format!("group {}{direction}", self.name)
    }

    fn report_few_members(&self, run: &RunLogs) -> Option<Diagnostic> {
        let size = self.group_size()?;
        if self.members.len() >= size || !run.missing_ranks().is_empty() {
            return None;
        }
        let ranks: Vec<u32> = self.members.keys().copied().collect();
        let message = format!(
            "{} has {size} members, and only {} compiled its collectives",
            self.describe_group(),
            list_ranks(&ranks)
        );
        let call = self.members.values().flat_map(|m| m.first.iter().chain(&m.again)).next()?;
        Some(Diagnostic::error(&T1414, message).with_label(list_ranks(&ranks), call.describe()).with_hint(
            "find the rank that skips the call, or runs it eagerly: tessera doctor on the same folder",
        ))
    }

    /// Reports the first position at which the sequences differ.
    fn report_departure(
        &self,
        run: &RunLogs,
        first: &BTreeMap<u32, &[PlacedCall<'_>]>,
        sides: &[Side<'_, '_>],
    ) -> Diagnostic {
        let longest = sides.iter().map(|s| s.calls.len()).max().unwrap_or(0);
        let differs = |at: &usize| {
            let mut calls = sides.iter().map(|s| s.calls.get(*at));
            let head = calls.next().flatten();
            calls.any(|c| !matches!((head, c), (Some(a), Some(b)) if a.matches(b)))
        };
        let at = (0..longest).find(differs).unwrap_or(0);
        let here: BTreeMap<u32, &[PlacedCall<'_>]> =
            first.iter().map(|(rank, calls)| (*rank, calls.get(at..=at).unwrap_or(&[]))).collect();
        let at_index = split_sides(&here);
        let [a, b] = [&at_index[0], &at_index[at_index.len() - 1]];
        let rest = |side: &Side<'_, '_>| {
            let rank = side.ranks.first().copied().unwrap_or(0);
            first.get(&rank).and_then(|calls| calls.get(at..)).unwrap_or(&[]).to_vec()
        };
        let kind = name_difference(&rest(a), &rest(b));
        let who = match at_index.iter().map(|s| s.ranks.len()).collect::<Vec<_>>()[..] {
            [big, .., small] if big > small => {
                let departed: Vec<u32> = at_index[1..].iter().flat_map(|s| s.ranks.clone()).collect();
                format!("{} compiled another sequence of collectives than most", list_ranks(&departed))
            }
            _ => {
                let all: Vec<u32> = first.keys().copied().collect();
                format!("{} compiled different sequences of collectives", list_ranks(&all))
            }
        };
        let message = format!("{who}: {kind} at number {} of {}", at + 1, self.describe_group());
        let fewer = at_index.iter().any(|s| s.calls.is_empty());
        let doubt = self.explain_shorter(run, first, sides).or_else(|| self.explain_shared_name(sides));
        let code = match (&doubt, fewer || kind.starts_with("an extra")) {
            (Some(_), _) => &T1417,
            (None, true) => &T1414,
            (None, false) => &T1413,
        };
        let mut d = match &doubt {
            Some(_) => Diagnostic::warning(code, message),
            None => Diagnostic::error(code, message),
        };
        for side in &at_index {
            let text = side.calls.first().map_or_else(
                || format!("no collective: the sequence ends after {}", count_calls(at)),
                PlacedCall::describe,
            );
            d = d.with_label(list_ranks(&side.ranks), text);
        }
        for call in at_index.iter().filter_map(|s| s.calls.first()) {
            let stack = call.compile.stack.iter().rev().take(4).cloned().collect::<Vec<_>>();
            if !stack.is_empty() {
                d = d.with_note(format!("graph {} is called by {}", call.compile.id, stack.join(", by ")));
            }
        }
        d.notes.dedup();
        d.notes.extend(doubt);
        d.with_hint("make the ranks trace the same code: tessera doctor on this folder lists breaks and recompiles of each")
    }

    /// Returns why the sides may be groups of their own: the log names no members, and no op takes the
    /// size of the group.
    fn explain_shared_name(&self, sides: &[Side<'_, '_>]) -> Option<String> {
        let may_share = self.may_be_several() && self.group_size().is_none();
        (may_share && sides.iter().all(|s| s.ranks.len() > 1 && !s.calls.is_empty())).then(|| {
            "PyTorch may give disjoint groups one name, and no collective here shows the size of the group: each \
             side may be a group of its own"
                .to_string()
        })
    }

    /// Returns why a shorter sequence may be no difference: its log ends early, or it broke the graph
    /// at the collective, which then ran eagerly and is not in the log.
    fn explain_shorter(
        &self,
        run: &RunLogs,
        first: &BTreeMap<u32, &[PlacedCall<'_>]>,
        sides: &[Side<'_, '_>],
    ) -> Option<String> {
        let longest = sides.iter().max_by_key(|s| s.calls.len())?;
        let eager = |rank: u32| {
            run.logs
                .get(&rank)
                .map_or(0, |l| l.count_breaks() + l.compiles.iter().filter(|c| c.runs_eagerly()).count())
        };
        let most_breaks = longest.ranks.iter().map(|r| eager(*r)).max().unwrap_or(0);
        let mut reasons = BTreeSet::new();
        for (rank, calls) in first.iter().filter(|(rank, _)| !longest.ranks.contains(rank)) {
            let is_prefix = longest.calls.get(..calls.len()).is_some_and(|head| is_equal(head, calls));
            if is_prefix && run.logs.get(rank).is_some_and(super::log::RankLog::is_open) {
                reasons.insert(format!(
                    "the log of rank {rank} ends within a compile, so its sequence may go on"
                ));
            } else if eager(*rank) > most_breaks && is_subsequence(calls, longest.calls) {
                reasons.insert(format!(
                    "rank {rank} has more graph breaks: a collective between graphs runs eagerly, and a part of a \
                     graph may run several times; the log shows neither"
                ));
            } else {
                return None;
            }
        }
        Some(reasons.into_iter().collect::<Vec<_>>().join("; "))
    }

    /// Compares what recompiles added. Frames that ranks split differently cannot be aligned compile
    /// by compile; then each collective must have a match on every member.
    fn compare_recompiles(&self, run: &RunLogs) -> Diagnostics {
        let again: BTreeMap<u32, &[PlacedCall<'_>]> =
            self.members.iter().map(|(rank, m)| (*rank, m.again.as_slice())).collect();
        let sides = split_sides(&again);
        if sides.len() < 2 || self.is_split_by_size(&sides) {
            return Vec::new();
        }
        let mut unmatched = Vec::new();
        for call in sides.iter().flat_map(|s| s.calls) {
            let has = |m: &RankSequence<'_>| m.first.iter().chain(&m.again).any(|c| c.matches(call));
            let (with, without): (Vec<_>, Vec<_>) = self.members.iter().partition(|(_, m)| has(m));
            if !without.is_empty() {
                unmatched.push((call, with, without));
            }
        }
        let Some((call, with, without)) = unmatched.first() else {
            return vec![
                Diagnostic::warning(
                    &T1417,
                    format!(
                        "recompiled graphs of {} are split differently on the ranks",
                        self.describe_group()
                    ),
                )
                .with_note("each collective has a match on every member; their order is not compared"),
            ];
        };
        let ranks = |list: &[(&u32, &RankSequence<'_>)]| list.iter().map(|(r, _)| **r).collect::<Vec<u32>>();
        let (with, without) = (ranks(with), ranks(without));
        let message = format!(
            "{} recompiled collectives of {} that others lack",
            list_ranks(&with),
            self.describe_group()
        );
        let is_open = without.iter().any(|r| run.logs.get(r).is_some_and(super::log::RankLog::is_open));
        let mut d = match is_open {
            true => Diagnostic::warning(&T1417, message)
                .with_note(format!("a log of {} ends within a compile", list_ranks(&without))),
            false => Diagnostic::error(&T1416, message),
        };
        d = d.with_label(list_ranks(&with), call.describe());
        d = d.with_label(list_ranks(&without), "no compile with this collective");
        if let Some(recompile) = &call.compile.recompile {
            d = d.with_note(format!("recompiled because of the guard {}", recompile.guard));
        }
        vec![d.with_hint("take the value of the guard from one rank, and give it to all of them")]
    }
}

/// Names the difference at the head of two sequences.
fn name_difference(a: &[PlacedCall<'_>], b: &[PlacedCall<'_>]) -> String {
    let (Some(x), Some(y)) = (a.first(), b.first()) else { return "an extra collective".to_string() };
    if a.len() != b.len() && (is_equal(&a[1..], b) || is_equal(a, &b[1..])) {
        return "an extra collective".to_string();
    }
    let mut rest: Vec<&PlacedCall<'_>> = b.iter().collect();
    let is_permuted = a.len() == b.len()
        && a.len() <= MAX_PERMUTED
        && a.iter().all(|x| rest.iter().position(|y| y.matches(x)).map(|at| rest.swap_remove(at)).is_some());
    if is_permuted {
        return "another order".to_string();
    }
    format!("another {}", x.call.find_difference(y.call).unwrap_or("group"))
}

fn count_calls(n: usize) -> String {
    format!("{n} collective{}", if n == 1 { "" } else { "s" })
}

impl PlacedCall<'_> {
    /// Describes the call, the graph and the place in the program.
    pub(crate) fn describe(&self) -> String {
        let direction = if self.direction == Direction::Backward { "backward " } else { "" };
        let site = self.compile.user_site().map_or(String::new(), |s| format!(" ({s})"));
        let function = &self.compile.function;
        format!(
            "{} in {direction}graph {} of {function}{site}, {}",
            self.call, self.compile.id, self.call.site
        )
    }
}

fn warn_of_stage(run: &RunLogs, stage: Stage, direction: Direction) -> Option<Diagnostic> {
    if stage == Stage::Compiled {
        return None;
    }
    let lacks =
        |log: &super::log::RankLog| log.compiles.iter().any(|c| c.last_stage(direction) == Some(stage));
    let ranks: Vec<u32> = run.logs.iter().filter(|(_, l)| lacks(l)).map(|(r, _)| *r).collect();
    let d = Diagnostic::warning(
        &T1417,
        format!("{} graphs are compared as {}, before the last stage", direction.name(), stage.record_name()),
    )
    .with_label(
        list_ranks(&ranks),
        "has no later graph: a cache hit records none, and a log that ends early has none",
    )
    .with_note("what the compiler changes later, such as bucketing of collectives, is not compared");
    Some(match stage {
        Stage::Traced => d.with_note("collectives of the backward are not compared"),
        _ => d,
    })
}

fn list_unknown(run: &RunLogs) -> Diagnostics {
    let mut by_op: BTreeMap<&str, BTreeMap<u32, usize>> = BTreeMap::new();
    for (rank, log) in &run.logs {
        for compile in &log.compiles {
            let Some(graphs) = compile.graphs.values().next_back() else { continue };
            for (op, n) in graphs.iter().flat_map(|g| &g.unknown) {
                *by_op.entry(op).or_default().entry(*rank).or_default() += n;
            }
        }
    }
    let warn = |(op, ranks): (&str, BTreeMap<u32, usize>)| {
        let mut d = Diagnostic::warning(&T1418, format!("the op {op} is not compared"));
        for (rank, n) in ranks {
            d = d.with_label(format!("rank {rank}"), format!("{n} in compiled graphs"));
        }
        d
    };
    by_op.into_iter().map(warn).collect()
}
