//! Bars of a chart: what stood where from when to when, and what can be measured on them.
//!
//! Bars come from the event engine, from a schedule, from a drawing or from a run's record; the same measures hold for
//! all of them.

use std::collections::BTreeMap;

/// What a bar stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Work that needs the device's compute.
    Compute,
    /// A collective, or a send between ranks.
    Collective,
    /// Laying out what a collective sends or has brought.
    Pack,
    /// A fetch from another tier of memory.
    Fetch,
    /// Host work, and anything else.
    Other,
}

impl Kind {
    /// What a bar with this name most likely stands for: collectives and fetches by their first word, packing unless
    /// experts work in the same bar, compute else.
    #[must_use]
    pub fn of_name(name: &str) -> Kind {
        let name = name.to_lowercase();
        let first = name.split(|c: char| !c.is_alphanumeric()).find(|w| !w.is_empty()).unwrap_or_default();
        match first {
            "rs" | "ag" | "ar" | "a2a" | "all" | "allreduce" | "allgather" | "alltoall" | "reduce"
            | "gather" | "scatter" | "broadcast" | "dispatch" | "combine" | "send" | "recv" | "tp"
            | "exchange" => Kind::Collective,
            "prefetch" | "fetch" | "load" | "spill" => Kind::Fetch,
            "pack" | "unpack" if !name.contains("expert") => Kind::Pack,
            "host" | "launch" | "wait" => Kind::Other,
            _ => Kind::Compute,
        }
    }
}

/// One bar.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// The rank, or the stage in a chart of stages.
    pub rank: u32,
    /// The stream or row of the chart it is drawn on, such as `tp_collective`.
    pub lane: String,
    /// What it is, such as `QK^T GEMM`.
    pub name: String,
    /// What it stands for.
    pub kind: Kind,
    /// Start.
    pub start_ns: f64,
    /// End, not before the start.
    pub end_ns: f64,
}

impl Bar {
    /// How long it is.
    #[must_use]
    pub fn ns(&self) -> f64 {
        self.end_ns - self.start_ns
    }
}

/// Collective time, and how much of it work on the same rank hides.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Overlap {
    /// All collective time, summed over ranks.
    pub total_ns: f64,
    /// The part during which the same rank computes.
    pub hidden_ns: f64,
}

impl Overlap {
    /// The overlap ratio, 0 to 1: hidden collective time / collective time; 1 where there is no collective.
    #[must_use]
    pub fn ratio(self) -> f64 {
        if self.total_ns > 0.0 { self.hidden_ns / self.total_ns } else { 1.0 }
    }

    /// Collective time that nothing hides.
    #[must_use]
    pub fn exposed_ns(self) -> f64 {
        self.total_ns - self.hidden_ns
    }
}

/// Overlap of the collectives of all ranks; with `packing`, bars of [`Kind::Pack`] count as part of the collectives.
#[must_use]
pub fn overlap(bars: &[Bar], packing: bool) -> Overlap {
    let compute = unions(bars, |b| b.kind == Kind::Compute);
    let counts = |k: Kind| k == Kind::Collective || packing && k == Kind::Pack;
    bars.iter().filter(|b| counts(b.kind)).fold(Overlap::default(), |sum, b| Overlap {
        total_ns: sum.total_ns + b.ns(),
        hidden_ns: sum.hidden_ns + compute.get(&b.rank).map_or(0.0, |spans| covered(spans, b)),
    })
}

/// Overlap of one bar with what its rank computes meanwhile.
#[must_use]
pub fn hidden_ns(bars: &[Bar], of: &Bar) -> f64 {
    let compute = unions(bars, |b| b.kind == Kind::Compute && b.rank == of.rank);
    compute.get(&of.rank).map_or(0.0, |spans| covered(spans, of))
}

/// From the first start to the last end; 0 without bars.
#[must_use]
pub fn makespan_ns(bars: &[Bar]) -> f64 {
    let start = bars.iter().map(|b| b.start_ns).fold(f64::INFINITY, f64::min);
    let end = bars.iter().map(|b| b.end_ns).fold(f64::NEG_INFINITY, f64::max);
    if bars.is_empty() { 0.0 } else { end - start }
}

/// Share of the makespan in which a lane has no bar, by rank and lane.
#[must_use]
pub fn idle_share(bars: &[Bar]) -> BTreeMap<(u32, String), f64> {
    let span = makespan_ns(bars);
    let mut lanes: BTreeMap<(u32, String), Vec<(f64, f64)>> = BTreeMap::new();
    for b in bars {
        lanes.entry((b.rank, b.lane.clone())).or_default().push((b.start_ns, b.end_ns));
    }
    let idle = |spans: Vec<(f64, f64)>| {
        let busy: f64 = union(spans).iter().map(|s| s.1 - s.0).sum();
        if span > 0.0 { 1.0 - busy / span } else { 0.0 }
    };
    lanes.into_iter().map(|(lane, spans)| (lane, idle(spans))).collect()
}

/// The times of some bars, joined, by rank.
fn unions(bars: &[Bar], of: impl Fn(&Bar) -> bool) -> BTreeMap<u32, Vec<(f64, f64)>> {
    let mut by_rank: BTreeMap<u32, Vec<(f64, f64)>> = BTreeMap::new();
    for b in bars.iter().filter(|b| of(b)) {
        by_rank.entry(b.rank).or_default().push((b.start_ns, b.end_ns));
    }
    by_rank.into_iter().map(|(rank, spans)| (rank, union(spans))).collect()
}

fn union(mut spans: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
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

/// How much of a bar lies within joined spans.
fn covered(spans: &[(f64, f64)], bar: &Bar) -> f64 {
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

    fn bar(rank: u32, lane: &str, kind: Kind, start_ns: f64, end_ns: f64) -> Bar {
        Bar { rank, lane: lane.into(), name: lane.into(), kind, start_ns, end_ns }
    }

    #[test]
    fn only_compute_of_the_same_rank_hides_a_collective() {
        let bars = [
            bar(0, "compute", Kind::Compute, 0.0, 4.0),
            bar(0, "compute", Kind::Compute, 3.0, 5.0),
            bar(1, "compute", Kind::Compute, 0.0, 100.0),
            bar(0, "tp_collective", Kind::Collective, 3.0, 8.0),
            bar(0, "io", Kind::Fetch, 0.0, 9.0),
        ];
        assert_eq!(overlap(&bars, false), Overlap { total_ns: 5.0, hidden_ns: 2.0 });
        assert_eq!(overlap(&bars, false).exposed_ns(), 3.0);
        assert_eq!(idle_share(&bars)[&(0, "compute".to_owned())], 0.95);
    }

    #[test]
    fn without_collectives_nothing_is_exposed() {
        assert_eq!(overlap(&[], false).ratio(), 1.0);
        assert_eq!(makespan_ns(&[]), 0.0);
    }
}
