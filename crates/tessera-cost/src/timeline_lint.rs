//! Lint of a timeline. It reports exposed collectives, compute that two intervals book at once,
//! intervals that start before their input ends, micro-batches that a stage never ran, and the
//! share of a pipeline that each stage idles.
//!
//! The lint assumes nothing about the origin of the intervals. Times are in the timeline's own
//! unit.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Diagnostic, Diagnostics};

use crate::codes::{T1116, T1117, T1118, T1119};
use crate::intervals::{Interval, IntervalKind, OverlapTotals, makespan_ns, measure_overlap, overlapped_ns};
use crate::params::PipelineSchedule;
use crate::schedule::{MicroBatchTimes, min_micro_batches};

/// Targets that a timeline should reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimelineGoals {
    /// Lower bound of the share of collective time that computation on the same rank hides.
    pub min_overlap: f64,
    /// Upper bound (exclusive) of the bubble of each stage, as a share of the makespan.
    pub max_bubble: f64,
}

impl Default for TimelineGoals {
    fn default() -> TimelineGoals {
        TimelineGoals { min_overlap: 0.6, max_bubble: 0.1 }
    }
}

/// The duration of a collective and its overlapped part.
#[derive(Debug, Clone, PartialEq)]
pub struct CollectiveExposure {
    /// Name of the collective's interval; several collectives may share a name.
    pub name: String,
    /// Time from the start to the end of the collective, overlapped or not.
    pub duration_ns: f64,
    /// Part of the duration that overlaps compute of the same rank.
    pub hidden_ns: f64,
}

/// Two intervals that use one resource at the same time.
#[derive(Debug, Clone, PartialEq)]
pub struct ResourceConflict {
    /// The interval that starts earlier; if both start together, the one that ends earlier.
    pub first: Interval,
    /// The other interval, which starts between the start and the end of `first`.
    pub second: Interval,
    /// Start of the common time, which is the start of `second`.
    pub start_ns: f64,
    /// End of the common time, which is the earlier of the two ends.
    pub end_ns: f64,
}

/// An interval that starts before its input ends.
#[derive(Debug, Clone, PartialEq)]
pub struct PrematureStart {
    /// The interval that starts too early.
    pub bar: Interval,
    /// The interval of the same rank whose output `bar` needs; it ends after `bar` starts.
    pub input: Interval,
}

/// Lint results for the timeline of a transformer block, with tracks of one or more ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockLint {
    /// Overlap of the collectives alone; the goal `min_overlap` applies to its ratio.
    pub overlap: OverlapTotals,
    /// Overlap of the collectives with packing counted as part of them.
    pub overlap_with_packing: OverlapTotals,
    /// Every collective, in order of start.
    pub collectives: Vec<CollectiveExposure>,
    /// Pairs of intervals that compute on one rank, or run on one track, at the same time.
    pub conflicts: Vec<ResourceConflict>,
    /// Intervals that start before their input ends.
    pub premature: Vec<PrematureStart>,
    /// The targets that the lint compared the timeline with.
    pub goals: TimelineGoals,
}

/// Dependencies of the intervals of a block with attention over tp and experts over ep: pairs of an
/// interval and its input, each given by the first words of its name.
pub const BLOCK_INPUTS: &[(&str, &str)] = &[
    ("softmax", "qk"),
    ("rs", "qk"),
    ("softmax", "rs"),
    ("ag", "softmax"),
    ("pack", "ag"),
    ("a2a", "pack"),
    ("unpack", "a2a"),
    ("unpack", "prefetch"),
];

/// Lints the timeline of a block. `inputs` lists pairs of an interval and its input by lower-case
/// name prefixes; [`BLOCK_INPUTS`] covers a block of the common form.
#[must_use]
pub fn lint_block(bars: &[Interval], inputs: &[(&str, &str)], goals: TimelineGoals) -> BlockLint {
    let mut sorted: Vec<&Interval> = bars.iter().collect();
    sorted.sort_by(|a, b| {
        (a.start_ns, a.end_ns).partial_cmp(&(b.start_ns, b.end_ns)).unwrap_or(std::cmp::Ordering::Equal)
    });
    let collectives = sorted.iter().filter(|b| b.kind == IntervalKind::Collective);
    BlockLint {
        overlap: measure_overlap(bars, false),
        overlap_with_packing: measure_overlap(bars, true),
        collectives: collectives
            .map(|b| CollectiveExposure {
                name: b.name.clone(),
                duration_ns: b.duration_ns(),
                hidden_ns: overlapped_ns(bars, b),
            })
            .collect(),
        conflicts: find_conflicts(&sorted),
        premature: find_premature_starts(&sorted, inputs),
        goals,
    }
}

impl BlockLint {
    /// Returns the problems as warnings that point at `at`, the name of the timeline.
    #[must_use]
    pub fn diagnostics(&self, at: &str) -> Diagnostics {
        let mut found = Vec::new();
        found.extend(self.low_overlap_warning(at));
        found.extend(self.conflicts.iter().map(|c| conflict_warning(c, at)));
        found.extend(self.premature.iter().map(|p| premature_start_warning(p, at)));
        found
    }

    /// Returns a warning that lists the exposed collectives, if the overlap ratio misses its goal.
    fn low_overlap_warning(&self, at: &str) -> Option<Diagnostic> {
        let (ratio, packed) = (self.overlap.ratio(), self.overlap_with_packing.ratio());
        if ratio >= self.goals.min_overlap {
            return None;
        }
        let message = format!("overlap ratio {ratio:.2} is below the goal of {:.2}", self.goals.min_overlap);
        let mut d =
            Diagnostic::warning(&T1116, message).with_label(at, format!("{packed:.2} with packing counted"));
        let exposed = self.count_exposed_collectives();
        for (message, times) in exposed.iter().take(MAX_LISTED) {
            d = d.with_note(if *times > 1 { format!("{message}, {times} times") } else { message.clone() });
        }
        if exposed.len() > MAX_LISTED {
            d = d.with_note(format!("and {} others", exposed.len() - MAX_LISTED));
        }
        Some(d.with_hint("split the GEMM before an exposed collective into row chunks, or overlap it with another micro-batch"))
    }

    /// Describes each collective that is not fully hidden, with the number of collectives that the
    /// description fits, in order of the first of them.
    fn count_exposed_collectives(&self) -> Vec<(String, u32)> {
        let mut exposed: Vec<(String, u32)> = Vec::new();
        for c in self.collectives.iter().filter(|c| c.hidden_ns < c.duration_ns) {
            let message = format!(
                "{} takes {}, of which {} is hidden",
                c.name,
                round_for_display(c.duration_ns),
                round_for_display(c.hidden_ns)
            );
            match exposed.iter_mut().find(|(known, _)| *known == message) {
                Some((_, times)) => *times += 1,
                None => exposed.push((message, 1)),
            }
        }
        exposed
    }
}

fn conflict_warning(c: &ResourceConflict, at: &str) -> Diagnostic {
    let label = |b: &Interval| format!("`{}` {}", b.track, display_window(b.start_ns, b.end_ns));
    let message = format!(
        "{} and {} are both drawn {}, and both need the compute of rank {}",
        c.first.name,
        c.second.name,
        display_window(c.start_ns, c.end_ns),
        c.first.rank
    );
    Diagnostic::warning(&T1117, message)
        .with_label(format!("{at}: {}", c.first.name), label(&c.first))
        .with_label(format!("{at}: {}", c.second.name), label(&c.second))
        .with_hint("run them one after the other, or state how the device is partitioned between them")
}

fn premature_start_warning(p: &PrematureStart, at: &str) -> Diagnostic {
    let (bar, input) = (&p.bar, &p.input);
    let (start, input_end) = (round_for_display(bar.start_ns), round_for_display(input.end_ns));
    let by = round_for_display(input.end_ns - bar.start_ns);
    let message = format!("{} starts {by} before its input {} ends", bar.name, input.name);
    Diagnostic::warning(&T1118, message)
        .with_label(format!("{at}: {}", bar.name), format!("starts at {start}"))
        .with_label(format!("{at}: {}", input.name), format!("ends at {input_end}"))
        .with_hint(format!(
            "valid only if {} produces its output in chunks; otherwise this interval starts at {input_end} at the earliest",
            input.name
        ))
}

/// Maximum number of exposed collectives that a diagnostic lists; timelines of whole plans have
/// hundreds.
const MAX_LISTED: usize = 12;

/// Lint results for the timeline of a pipeline with one interval per stage and micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct PipelineLint {
    /// Number of stages: the ranks that have intervals in the timeline.
    pub stages: u32,
    /// Number of micro-batches, taken from the stage that runs the most.
    pub micro_batches: u32,
    /// Intervals that the timeline lacks, at the times where they belong.
    pub missing: Vec<Interval>,
    /// Makespan with the missing intervals included.
    pub makespan_ns: f64,
    /// Share of the makespan that each stage idles.
    pub stage_bubbles: Vec<f64>,
    /// Minimum number of micro-batches with which the bubble of equal stages meets the goal.
    pub min_micro_batches: Option<u32>,
    /// The targets that the lint compared the timeline with.
    pub goals: TimelineGoals,
}

/// Lints the timeline of a pipeline. The `rank` of an interval is its stage and its name is the
/// micro-batch. A missing interval is inserted as soon as its stage is free and the previous stage
/// has finished the micro-batch, with the mean duration of the stage's other intervals.
#[must_use]
pub fn lint_pipeline(bars: &[Interval], goals: TimelineGoals) -> PipelineLint {
    let mut stages: BTreeMap<u32, Vec<Interval>> = BTreeMap::new();
    let mut names: Vec<&str> = Vec::new();
    for bar in bars {
        stages.entry(bar.rank).or_default().push(bar.clone());
        if !names.contains(&bar.name.as_str()) {
            names.push(&bar.name);
        }
    }
    let mut missing = Vec::new();
    let mut previous_end: BTreeMap<&str, f64> = BTreeMap::new();
    for (&rank, stage) in &mut stages {
        let mean = stage.iter().map(Interval::duration_ns).sum::<f64>() / stage.len() as f64;
        let (lane, kind) =
            stage.first().map_or((String::new(), IntervalKind::Compute), |b| (b.track.clone(), b.kind));
        for &name in &names {
            if stage.iter().all(|b| b.name != name) {
                let free = stage.iter().map(|b| b.end_ns).fold(0.0, f64::max);
                let start_ns = free.max(previous_end.get(name).copied().unwrap_or(0.0));
                let bar = Interval {
                    rank,
                    track: lane.clone(),
                    name: name.to_owned(),
                    kind,
                    start_ns,
                    end_ns: start_ns + mean,
                };
                missing.push(bar.clone());
                stage.push(bar);
            }
        }
        previous_end = names
            .iter()
            .filter_map(|&name| Some((name, stage.iter().find(|b| b.name == name)?.end_ns)))
            .collect();
    }
    let all: Vec<Interval> = stages.values().flatten().cloned().collect();
    let makespan = makespan_ns(&all);
    let waits = |stage: &Vec<Interval>| 1.0 - stage.iter().map(Interval::duration_ns).sum::<f64>() / makespan;
    let count = stages.len() as u32;
    let equal_stages = MicroBatchTimes { forward_ns: 1.0, ..MicroBatchTimes::default() };
    PipelineLint {
        stages: count,
        micro_batches: names.iter().map(|n| micro_batch_of(n)).collect::<BTreeSet<_>>().len() as u32,
        missing,
        makespan_ns: makespan,
        stage_bubbles: stages.values().map(waits).collect(),
        min_micro_batches: min_micro_batches(
            PipelineSchedule::OneFOneB,
            count,
            1,
            &equal_stages,
            goals.max_bubble,
        ),
        goals,
    }
}

/// Returns the micro-batch of an interval. The forward, backward and weight-gradient intervals of
/// one micro-batch (`F3`, `B3.1`, `W3`) map to the same number.
fn micro_batch_of(name: &str) -> &str {
    let digits = name.trim_start_matches(['F', 'B', 'W']);
    let number = digits.split('.').next().unwrap_or(digits);
    if !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) { number } else { name }
}

impl PipelineLint {
    /// Returns the problems as warnings that point at `at`, the name of the timeline.
    #[must_use]
    pub fn diagnostics(&self, at: &str) -> Diagnostics {
        let mut found = Vec::new();
        if !self.missing.is_empty() {
            let d = Diagnostic::warning(
                &T1119,
                format!("{} bars are missing: not every stage runs every micro-batch", self.missing.len()),
            );
            let d = self.missing.iter().fold(d, |d, b| {
                d.with_label(
                    format!("{at}: {}", b.track),
                    format!("{} belongs {}", b.name, display_window(b.start_ns, b.end_ns)),
                )
            });
            found.push(d.with_hint("add the missing bars; the bubble reported below includes them"));
        }
        let worst = self.stage_bubbles.iter().copied().fold(0.0, f64::max);
        if worst >= self.goals.max_bubble {
            let (p, m) = (self.stages, self.micro_batches);
            let message = format!(
                "a stage idles for {:.0} % of the pipeline's time; the goal is less than {:.0} %",
                worst * 100.0,
                self.goals.max_bubble * 100.0
            );
            let d = Diagnostic::warning(&T1119, message).with_label(
                at,
                format!(
                    "{p} stages, {m} micro-batches: equal stages idle for (p-1)/(m+p-1) = {}/{}",
                    p - 1,
                    m + p - 1
                ),
            );
            found.push(match self.min_micro_batches {
                Some(needed) => d.with_hint(format!("use {needed} micro-batches or more")),
                None => d,
            });
        }
        found
    }
}

/// Returns a window of time for messages, such as `from 1 to 2.5`.
fn display_window(start_ns: f64, end_ns: f64) -> String {
    format!("from {} to {}", round_for_display(start_ns), round_for_display(end_ns))
}

/// Rounds a time to thousandths for messages.
fn round_for_display(x: f64) -> f64 {
    // Adding zero removes the sign of a negative zero.
    (x * 1000.0).round() / 1000.0 + 0.0
}

/// Returns the pairs of intervals that overlap on one track, or that both compute on one rank.
/// Expects intervals in order of start.
fn find_conflicts(sorted: &[&Interval]) -> Vec<ResourceConflict> {
    let mut found = Vec::new();
    for (i, first) in sorted.iter().enumerate() {
        for second in sorted[i + 1..].iter().take_while(|b| b.start_ns < first.end_ns) {
            let compute = first.kind == IntervalKind::Compute && second.kind == IntervalKind::Compute;
            let (start_ns, end_ns) = (second.start_ns, first.end_ns.min(second.end_ns));
            if first.rank == second.rank && (compute || first.track == second.track) && end_ns > start_ns {
                found.push(ResourceConflict {
                    first: (*first).clone(),
                    second: (*second).clone(),
                    start_ns,
                    end_ns,
                });
            }
        }
    }
    found
}

fn find_premature_starts(sorted: &[&Interval], inputs: &[(&str, &str)]) -> Vec<PrematureStart> {
    let named = |bar: &Interval, word: &str| bar.name.to_lowercase().starts_with(word);
    let mut found = Vec::new();
    for (word, input_word) in inputs {
        for bar in sorted.iter().filter(|b| named(b, word)) {
            let input = sorted.iter().find(|b| b.rank == bar.rank && named(b, input_word));
            if let Some(input) = input.filter(|input| bar.start_ns < input.end_ns) {
                found.push(PrematureStart { bar: (*bar).clone(), input: (*input).clone() });
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bars(list: &[(u32, &str, &str, f64, f64)]) -> Vec<Interval> {
        list.iter()
            .map(|&(rank, lane, name, start_ns, ns)| Interval {
                rank,
                track: lane.into(),
                name: name.into(),
                kind: IntervalKind::from_name(name),
                start_ns,
                end_ns: start_ns + ns,
            })
            .collect()
    }

    /// Returns the timeline of a block with tensor and expert parallelism, as a published guide
    /// draws it.
    fn drawn_block() -> Vec<Interval> {
        bars(&[
            (0, "Compute", "QK^T GEMM", 0.0, 3.0),
            (0, "Compute", "Softmax + PV", 3.0, 2.0),
            (0, "Compute", "FFN GEMM", 8.0, 4.0),
            (0, "TP Collectives", "RS logits", 2.0, 1.0),
            (0, "TP Collectives", "AG outputs", 5.0, 1.0),
            (0, "MoE Routing", "Pack tokens", 6.0, 1.0),
            (0, "MoE Routing", "A2A (FP8)", 7.0, 2.0),
            (0, "MoE Routing", "Unpack + Experts", 9.0, 3.0),
            (0, "IO", "Prefetch experts", 4.0, 3.0),
        ])
    }

    #[test]
    fn drawn_block_overlaps_half_of_its_collectives() {
        let audit = lint_block(&drawn_block(), BLOCK_INPUTS, TimelineGoals::default());
        assert_eq!((audit.overlap.ratio(), audit.overlap_with_packing.ratio()), (0.5, 0.4));
        let exposed: Vec<(&str, f64)> =
            audit.collectives.iter().map(|c| (c.name.as_str(), c.duration_ns - c.hidden_ns)).collect();
        assert_eq!(exposed, [("RS logits", 0.0), ("AG outputs", 1.0), ("A2A (FP8)", 1.0)]);
        let clash = &audit.conflicts[0];
        assert_eq!((audit.conflicts.len(), clash.start_ns, clash.end_ns), (1, 9.0, 12.0));
        assert_eq!((clash.first.name.as_str(), clash.second.name.as_str()), ("FFN GEMM", "Unpack + Experts"));
        assert_eq!(audit.premature.len(), 1);
        assert_eq!(
            (audit.premature[0].bar.name.as_str(), audit.premature[0].input.name.as_str()),
            ("RS logits", "QK^T GEMM")
        );
        let codes: Vec<&str> = audit.diagnostics("chart").iter().map(|d| d.code.id).collect();
        assert_eq!(codes, ["T1116", "T1117", "T1118"]);
    }

    /// Returns a pipeline of three stages and four micro-batches, drawn until the first stage is
    /// done.
    fn drawn_pipeline() -> Vec<Interval> {
        let mut list = Vec::new();
        for (stage, count) in [(0u32, 4), (1, 3), (2, 2)] {
            for (micro_batch, name) in ["MB0", "MB1", "MB2", "MB3"].iter().enumerate().take(count) {
                list.push((
                    stage,
                    ["Stage 0", "Stage 1", "Stage 2"][stage as usize],
                    *name,
                    3.0 * (f64::from(stage) + micro_batch as f64),
                    3.0,
                ));
            }
        }
        bars(&list)
    }

    #[test]
    fn truncated_pipeline_has_a_third_bubble_and_three_missing_intervals() {
        let audit = lint_pipeline(&drawn_pipeline(), TimelineGoals::default());
        let missing: Vec<(u32, &str, f64)> =
            audit.missing.iter().map(|b| (b.rank, b.name.as_str(), b.start_ns)).collect();
        assert_eq!(missing, [(1, "MB3", 12.0), (2, "MB2", 12.0), (2, "MB3", 15.0)]);
        assert_eq!(audit.makespan_ns, 18.0);
        assert!(audit.stage_bubbles.iter().all(|b| (b - 1.0 / 3.0).abs() < 1e-12));
        assert_eq!((audit.stages, audit.micro_batches, audit.min_micro_batches), (3, 4, Some(19)));
        let two: Vec<Interval> = drawn_pipeline().into_iter().filter(|b| b.rank < 2).collect();
        assert_eq!(lint_pipeline(&two, TimelineGoals::default()).min_micro_batches, Some(10));
        let said = audit.diagnostics("wave");
        assert_eq!(said.len(), 2);
        assert!(said[1].hint.as_ref().is_some_and(|h| h.contains("19")));
    }

    #[test]
    fn training_intervals_are_counted_by_micro_batch() {
        let named = ["F0.0", "F0.1", "B0.0", "B0.1", "W0", "F12", "B12", "MB0", "B", "Bx3"];
        let of: Vec<&str> = named.iter().map(|n| micro_batch_of(n)).collect();
        assert_eq!(of, ["0", "0", "0", "0", "0", "12", "12", "MB0", "B", "Bx3"]);
        let step = bars(&[
            (0, "Stage 0", "F0", 0.0, 1.0),
            (0, "Stage 0", "F1", 1.0, 1.0),
            (0, "Stage 0", "B0", 4.0, 2.0),
            (0, "Stage 0", "B1", 6.0, 2.0),
        ]);
        assert_eq!(lint_pipeline(&step, TimelineGoals::default()).micro_batches, 2);
    }

    #[test]
    fn full_pipeline_with_a_small_bubble_has_no_findings() {
        let mut list = Vec::new();
        let names: Vec<String> = (0..19).map(|m| format!("MB{m}")).collect();
        for stage in 0..3u32 {
            list.extend(
                names
                    .iter()
                    .enumerate()
                    .map(|(m, n)| (stage, "s", n.as_str(), f64::from(stage) + m as f64, 1.0)),
            );
        }
        let audit = lint_pipeline(&bars(&list), TimelineGoals::default());
        assert!(audit.missing.is_empty() && audit.diagnostics("wave").is_empty());
    }
}
