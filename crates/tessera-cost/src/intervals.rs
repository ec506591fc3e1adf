//! Intervals of a timeline (the bars of a Gantt chart), and measures on them: overlap, makespan,
//! idle share.
//!
//! Intervals come from the event simulator, a schedule, a drawing or a recorded run; the measures
//! are the same for all of them.

use std::collections::BTreeMap;

/// The kind of activity that an interval shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IntervalKind {
    /// Work that uses the device's compute units.
    Compute,
    /// A collective, or a send between ranks.
    Collective,
    /// Packing of data before a collective, or unpacking after one.
    Pack,
    /// A fetch from another memory tier.
    Fetch,
    /// Host work and everything else.
    Other,
}

impl IntervalKind {
    /// Guesses the kind from an interval's name. The first word identifies collectives and fetches;
    /// `pack` and `unpack` count as packing unless the name mentions experts; every other name
    /// counts as compute.
    #[must_use]
    pub fn from_name(name: &str) -> IntervalKind {
        let name = name.to_lowercase();
        let first = name.split(|c: char| !c.is_alphanumeric()).find(|w| !w.is_empty()).unwrap_or_default();
        match first {
            "rs" | "ag" | "ar" | "a2a" | "all" | "allreduce" | "allgather" | "alltoall" | "reduce"
            | "gather" | "scatter" | "broadcast" | "dispatch" | "combine" | "send" | "recv" | "tp"
            | "exchange" => IntervalKind::Collective,
            "prefetch" | "fetch" | "load" | "spill" => IntervalKind::Fetch,
            "pack" | "unpack" if !name.contains("expert") => IntervalKind::Pack,
            "host" | "launch" | "wait" => IntervalKind::Other,
            _ => IntervalKind::Compute,
        }
    }
}

/// A named activity on one track of a rank, with its start and end: a bar of a timeline.
#[derive(Debug, Clone, PartialEq)]
pub struct Interval {
    /// The rank, or the stage in a timeline of stages.
    pub rank: u32,
    /// The stream, or the row of the chart, for example `tp_collective`.
    pub track: String,
    /// Name of the activity, for example `QK^T GEMM`.
    pub name: String,
    /// Kind of the activity: measures of overlap compare compute with collectives.
    pub kind: IntervalKind,
    /// Start in nanoseconds, from the origin of the timeline.
    pub start_ns: f64,
    /// End time, not before the start.
    pub end_ns: f64,
}

impl Interval {
    /// Returns the duration of the interval.
    #[must_use]
    pub fn duration_ns(&self) -> f64 {
        self.end_ns - self.start_ns
    }
}

/// Total collective time, and the part that overlaps compute on the same rank.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OverlapTotals {
    /// Collective time, summed over ranks.
    pub total_ns: f64,
    /// Part of the collective time during which the same rank computes.
    pub hidden_ns: f64,
}

impl OverlapTotals {
    /// Returns the overlap ratio, 0 to 1: hidden collective time over collective time, or 1 without
    /// collectives.
    #[must_use]
    pub fn ratio(self) -> f64 {
        if self.total_ns > 0.0 { self.hidden_ns / self.total_ns } else { 1.0 }
    }

    /// Returns the collective time that no compute hides.
    #[must_use]
    pub fn exposed_ns(self) -> f64 {
        self.total_ns - self.hidden_ns
    }
}

/// Measures the overlap of the collectives of all ranks. With `packing`, intervals of
/// [`IntervalKind::Pack`] count as part of the collectives.
#[must_use]
pub fn measure_overlap(bars: &[Interval], packing: bool) -> OverlapTotals {
    let compute = compute_spans(bars, |b| b.kind == IntervalKind::Compute);
    let counts = |k: IntervalKind| k == IntervalKind::Collective || packing && k == IntervalKind::Pack;
    bars.iter().filter(|b| counts(b.kind)).fold(OverlapTotals::default(), |sum, b| OverlapTotals {
        total_ns: sum.total_ns + b.duration_ns(),
        hidden_ns: sum.hidden_ns + compute.get(&b.rank).map_or(0.0, |spans| covered_ns(spans, b)),
    })
}

/// Returns the part of one interval that overlaps compute of the same rank.
#[must_use]
pub fn overlapped_ns(bars: &[Interval], interval: &Interval) -> f64 {
    let compute = compute_spans(bars, |b| b.kind == IntervalKind::Compute && b.rank == interval.rank);
    compute.get(&interval.rank).map_or(0.0, |spans| covered_ns(spans, interval))
}

/// Returns the time from the first start to the last end, or 0 without intervals.
#[must_use]
pub fn makespan_ns(bars: &[Interval]) -> f64 {
    let start = bars.iter().map(|b| b.start_ns).fold(f64::INFINITY, f64::min);
    let end = bars.iter().map(|b| b.end_ns).fold(f64::NEG_INFINITY, f64::max);
    if bars.is_empty() { 0.0 } else { end - start }
}

/// Returns the union of the selected intervals as disjoint spans, by rank.
fn compute_spans(bars: &[Interval], selects: impl Fn(&Interval) -> bool) -> BTreeMap<u32, Vec<(f64, f64)>> {
    let mut by_rank: BTreeMap<u32, Vec<(f64, f64)>> = BTreeMap::new();
    for b in bars.iter().filter(|b| selects(b)) {
        by_rank.entry(b.rank).or_default().push((b.start_ns, b.end_ns));
    }
    by_rank.into_iter().map(|(rank, spans)| (rank, merge_spans(spans))).collect()
}

fn merge_spans(mut spans: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut joined: Vec<(f64, f64)> = Vec::new();
    for (start, end) in spans {
        match joined.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined
}

/// Returns the part of an interval that lies within disjoint, sorted spans.
fn covered_ns(spans: &[(f64, f64)], bar: &Interval) -> f64 {
    let first = spans.partition_point(|s| s.1 <= bar.start_ns);
    spans[first..]
        .iter()
        .take_while(|s| s.0 < bar.end_ns)
        .map(|s| s.1.min(bar.end_ns) - s.0.max(bar.start_ns))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_interval(rank: u32, lane: &str, kind: IntervalKind, start_ns: f64, end_ns: f64) -> Interval {
        Interval { rank, track: lane.into(), name: lane.into(), kind, start_ns, end_ns }
    }

    #[test]
    fn only_compute_of_the_same_rank_hides_a_collective() {
        let bars = [
            make_interval(0, "compute", IntervalKind::Compute, 0.0, 4.0),
            make_interval(0, "compute", IntervalKind::Compute, 3.0, 5.0),
            make_interval(1, "compute", IntervalKind::Compute, 0.0, 100.0),
            make_interval(0, "tp_collective", IntervalKind::Collective, 3.0, 8.0),
            make_interval(0, "io", IntervalKind::Fetch, 0.0, 9.0),
        ];
        assert_eq!(measure_overlap(&bars, false), OverlapTotals { total_ns: 5.0, hidden_ns: 2.0 });
        assert_eq!(measure_overlap(&bars, false).exposed_ns(), 3.0);
    }

    #[test]
    fn without_collectives_nothing_is_exposed() {
        assert_eq!(measure_overlap(&[], false).ratio(), 1.0);
        assert_eq!(makespan_ns(&[]), 0.0);
    }
}
