//! Estimated and measured times of the calls of a run, by class of op.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::record::{ChunkRecord, RankChunk, RunRecord};

/// The estimate of every kind of call beside what a run measured.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct EstimateComparison {
    /// The machine and the executor of the estimate, or why there is none.
    pub machine: String,
    /// The kinds of calls, in order of their first occurrence.
    pub calls: Vec<CallComparison>,
}

/// One kind of call. Times are in nanoseconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct CallComparison {
    /// What the calls do, such as `decoding step`.
    pub name: String,
    /// Names of the phases that they run, in order.
    pub phases: Vec<String>,
    /// Rows that the plan gives a call, over all phases.
    pub rows: u64,
    /// Number of measured calls. The first call of each kind is left out if there are others.
    pub calls: u64,
    /// Estimated time from one commit to the next, with the work of the leader; `None` without an estimate.
    pub estimated_ns: Option<f64>,
    /// Estimated time of collectives that no work hides, as a mean over ranks; `None` without an estimate.
    pub estimated_exposed_ns: Option<f64>,
    /// Median of the measured times; `None` if no call was measured.
    pub measured_ns: Option<f64>,
    /// The classes of ops, and the leader as the last one.
    pub classes: Vec<ClassComparison>,
}

/// Time that the ops of a class take in one call, as a mean over ranks.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ClassComparison {
    /// Name of the class, such as `matmul` or `all_reduce tp`.
    pub class: String,
    /// Ops of a rank in a call; 0 for the leader.
    pub ops: f64,
    /// Estimated time in nanoseconds; a collective counts from the arrival of its last member.
    pub estimated_ns: Option<f64>,
    /// Median over calls, with waits for other ranks; `None` if single ops were not timed.
    pub measured_ns: Option<f64>,
    /// Median of the bytes that a rank passed to others in a call.
    pub sent_bytes: f64,
}

/// Class of the time between calls in which no rank runs a program.
pub const LEADER_CLASS: &str = "leader";

impl CallComparison {
    /// Adds what a run measured in the calls of these phases, to classes with estimates or to new ones.
    #[must_use]
    pub fn with_measurement(mut self, record: &RunRecord) -> CallComparison {
        let measured = measured_calls(record, &self.phases);
        self.calls = measured.len() as u64;
        if measured.is_empty() {
            return self;
        }
        self.measured_ns = Some(median(measured.iter().map(|call| call.period_ns)));
        let mut names: Vec<&String> = measured.iter().flat_map(|call| call.classes.keys()).collect();
        names.sort();
        names.dedup();
        for name in names {
            let of_calls = |of: fn(&ClassSums) -> f64| {
                median(measured.iter().map(|call| call.classes.get(name).map_or(0.0, of)))
            };
            let at = self.classes.iter().position(|c| c.class == *name).unwrap_or_else(|| {
                // The leader stays the last row.
                let at = self.classes.len()
                    - usize::from(self.classes.last().is_some_and(|c| c.class == LEADER_CLASS));
                self.classes
                    .insert(at, ClassComparison { class: name.clone(), ..ClassComparison::default() });
                at
            });
            let class = &mut self.classes[at];
            class.ops = of_calls(|sums| sums.ops);
            class.measured_ns = Some(of_calls(|sums| sums.ns));
            class.sent_bytes = of_calls(|sums| sums.sent_bytes);
        }
        self
    }
}

impl ClassComparison {
    /// Returns the relative error of the estimate as a share of the measured time; positive if it is too long.
    #[must_use]
    pub fn relative_error(&self) -> Option<f64> {
        relative_error(self.estimated_ns, self.measured_ns)
    }
}

/// Returns the relative error of an estimate; `None` without an estimate or a measured time.
#[must_use]
pub fn relative_error(estimated_ns: Option<f64>, measured_ns: Option<f64>) -> Option<f64> {
    estimated_ns
        .zip(measured_ns.filter(|ns| *ns > 0.0))
        .map(|(estimated, measured)| estimated / measured - 1.0)
}

/// Sums of one class in a call, as means over ranks.
#[derive(Debug, Clone, Copy, Default)]
struct ClassSums {
    ops: f64,
    ns: f64,
    sent_bytes: f64,
}

struct MeasuredCall {
    period_ns: f64,
    classes: BTreeMap<String, ClassSums>,
}

/// Returns the calls that ran these phases, without the first if there are others: it fills caches and connections.
fn measured_calls(record: &RunRecord, phases: &[String]) -> Vec<MeasuredCall> {
    let runs = |c: &ChunkRecord| c.ranks.iter().any(|r| runs_phases(r, phases));
    let calls = record.chunks.iter().enumerate().filter(|(_, c)| runs(c));
    let mut measured: Vec<MeasuredCall> =
        calls.map(|(i, call)| measure_call(call, record.chunks.get(i + 1), phases)).collect();
    if measured.len() > 1 {
        measured.remove(0);
    }
    measured
}

/// Whether a rank ran these phases and no others.
fn runs_phases(rank: &RankChunk, phases: &[String]) -> bool {
    rank.phases.iter().map(|phase| &phase.name).eq(phases)
}

fn measure_call(call: &ChunkRecord, next: Option<&ChunkRecord>, phases: &[String]) -> MeasuredCall {
    let next = next.filter(|next| next.chunk == call.chunk + 1);
    let period_ns = next.map_or(call.wall_ns, |next| next.start_ns.saturating_sub(call.start_ns)) as f64;
    let ranks = || call.ranks.iter().filter(|r| runs_phases(r, phases));
    let count = ranks().count().max(1) as f64;
    let mut classes: BTreeMap<String, ClassSums> = BTreeMap::new();
    for work in ranks().flat_map(|r| &r.phases).flat_map(|p| &p.classes) {
        let sums = classes.entry(work.class.clone()).or_default();
        sums.ops += f64::from(work.ops) / count;
        sums.ns += work.ns as f64 / count;
        sums.sent_bytes += work.sent_bytes as f64 / count;
    }
    let span = |r: &RankChunk| Some(r.phases.last()?.end_ns.saturating_sub(r.phases.first()?.start_ns));
    let longest_ns = ranks().filter_map(span).max().unwrap_or(0) as f64;
    let leader = ClassSums { ns: (period_ns - longest_ns).max(0.0), ..ClassSums::default() };
    classes.insert(LEADER_CLASS.to_string(), leader);
    MeasuredCall { period_ns, classes }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::ClassWork;
    use crate::timeline::tests::sample;

    /// A run of two ranks, of which the second runs `denoise.0` for 4 ms of every 10 ms.
    fn record(calls: u32) -> RunRecord {
        let mut record = sample(calls);
        for (i, chunk) in record.chunks.iter_mut().enumerate() {
            chunk.ranks[1].phases.truncate(1);
            let phase = &mut chunk.ranks[1].phases[0];
            let work =
                |class: &str, ns, sent_bytes| ClassWork { class: class.into(), ops: 2, ns, sent_bytes };
            // The first call is slower.
            let ns = if i == 0 { 4_000_000 } else { 3_000_000 + i as u64 };
            phase.classes = vec![work("matmul", ns, 0), work("all_reduce tp", 1000, 64)];
        }
        record
    }

    fn estimate() -> CallComparison {
        let class = |class: &str, ns| ClassComparison {
            class: class.into(),
            estimated_ns: Some(ns),
            ..ClassComparison::default()
        };
        CallComparison {
            phases: vec!["denoise.0".into()],
            estimated_ns: Some(5e6),
            classes: vec![class("matmul", 1.5e6), class(LEADER_CLASS, 1e6)],
            ..CallComparison::default()
        }
    }

    #[test]
    fn medians_leave_the_first_call_out_and_new_classes_stand_before_the_leader() {
        let found = estimate().with_measurement(&record(4));
        assert_eq!((found.calls, found.measured_ns), (3, Some(1e7)));
        let rows: Vec<_> =
            found.classes.iter().map(|c| (c.class.as_str(), c.ops, c.measured_ns, c.sent_bytes)).collect();
        assert_eq!(
            rows,
            [
                ("matmul", 2.0, Some(3_000_002.0), 0.0),
                ("all_reduce tp", 2.0, Some(1000.0), 64.0),
                ("leader", 0.0, Some(6e6), 0.0)
            ]
        );
        assert_eq!(relative_error(found.estimated_ns, found.measured_ns), Some(-0.5));
        assert_eq!(found.classes[1].relative_error(), None, "without an estimate there is no error");
    }

    #[test]
    fn phases_that_no_call_ran_have_no_measurement() {
        for phases in [vec!["tokens.b1.n1".into()], vec!["denoise.0".into(), "denoise.0".into()]] {
            let other = CallComparison { phases, ..estimate() };
            assert_eq!(other.clone().with_measurement(&record(4)), other);
        }
    }
}
