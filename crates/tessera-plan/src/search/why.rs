//! Explains why a candidate is not chosen: compares one candidate, or all that some pins leave,
//! with the best.

use std::collections::{BTreeMap, BTreeSet};

use super::enumerate::Enumeration;
use super::estimate::Estimator;
use super::pareto::ScoredCandidate;
use super::space::{MeshFactors, factor_meshes};
use super::{Pins, RankedCandidate, Reason, Rejection, SearchQuery, StepTimes};

/// How the candidates that agree with given pins compare with all candidates of the query.
#[derive(Debug, Clone, PartialEq)]
pub struct WhyAnswer {
    /// The pins in effect, those of the query included.
    pub pins: Pins,
    /// Number of candidates that the pins leave.
    pub candidate_count: u64,
    /// Whether any of these candidates is legal: the best of them, or the reasons for the
    /// rejections.
    pub verdict: WhyVerdict,
}

/// The verdict on the candidates: all are rejected, or at least one is legal, with the rank of the
/// best.
#[derive(Debug, Clone, PartialEq)]
pub enum WhyVerdict {
    /// No candidate that the pins leave is legal.
    Refused {
        /// The rejected candidates by the first constraint that each violates.
        reasons: BTreeMap<Reason, Rejection>,
        /// Legal candidates that keep as many pins as possible, nearest first.
        neighbours: Vec<Neighbour>,
    },
    /// At least one candidate is legal.
    Legal {
        /// The best legal candidate that the pins leave.
        ranked: Box<RankedCandidate>,
        /// Number of candidates of the whole query that are better.
        better: u64,
        /// Number of legal candidates of the whole query.
        legal: u64,
        /// The best candidate of the whole query, or `ranked` if none is better.
        best: Box<RankedCandidate>,
        /// The parts of the step of `ranked` beside those of `best`, the largest excess of `ranked`
        /// first.
        terms: Vec<TermComparison>,
    },
}

/// A legal candidate near a rejected one.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbour {
    /// Name and value in `ranked` of each knob that differs from the query's pins.
    pub changed: Vec<(&'static str, String)>,
    /// The best legal candidate with these values and the other pins.
    pub ranked: RankedCandidate,
}

/// One part of a step, compared between two candidates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TermComparison {
    /// Name of the part, as [`StepTimes::named_parts`] gives it, such as `pp and dp`.
    pub name: &'static str,
    /// Time of the part in the best candidate that the pins leave.
    pub requested_ns: f64,
    /// Time of the part in the best candidate of the whole query.
    pub best_ns: f64,
}

/// Maximum number of neighbours from the nearest meshes; each other pin, if released, adds at most
/// one.
const MAX_NEIGHBOURS: usize = 6;

/// Maximum number of meshes to try for neighbours.
const MAX_MESHES_TRIED: usize = 96;

/// Compares the best candidate that agrees with `pins` with the best of the query. If none is
/// legal, collects the reasons and the nearest legal candidates.
#[must_use]
pub fn explain_pins(q: &SearchQuery, pins: &Pins) -> WhyAnswer {
    let asked = SearchQuery { pins: pins.or(&q.pins), ..q.clone() };
    let devices = q.space.devices;
    let mut walk = Enumeration::run(&asked, devices, None);
    let considered = walk.candidate_count;
    let point = walk.best.points.first().copied();
    let verdict = match point {
        None => WhyVerdict::Refused {
            reasons: std::mem::take(&mut walk.rejected),
            neighbours: find_neighbours(&asked),
        },
        Some(point) => match rank_among_all(q, devices, point) {
            Some(verdict) => verdict,
            None => {
                WhyVerdict::Refused { reasons: std::mem::take(&mut walk.rejected), neighbours: Vec::new() }
            }
        },
    };
    WhyAnswer { pins: asked.pins, candidate_count: considered, verdict }
}

/// Ranks a legal candidate among all candidates of the query.
fn rank_among_all(q: &SearchQuery, devices: u32, point: ScoredCandidate) -> Option<WhyVerdict> {
    let all = Enumeration::run(q, devices, Some(point));
    let mut prices = Estimator::new(q, devices);
    let ranked = prices.rank_candidate(&point.candidate).ok()?;
    // The query's own pins may exclude this candidate, or even all.
    let best = all.best.points.first().filter(|b| b.is_better_than(&point, q.objective)).unwrap_or(&point);
    let best = prices.rank_candidate(&best.candidate).ok()?;
    let terms = compare_terms(&ranked.estimate.times, &best.estimate.times);
    let (better, legal) = (all.better_count, all.legal_count.max(1));
    Some(WhyVerdict::Legal { ranked: Box::new(ranked), better, legal, best: Box::new(best), terms })
}

/// Compares the parts of a step, largest excess over the best first.
fn compare_terms(here: &StepTimes, best: &StepTimes) -> Vec<TermComparison> {
    let mut out: Vec<TermComparison> = here
        .named_parts()
        .into_iter()
        .zip(best.named_parts())
        .map(|((name, here_ns), (_, best_ns))| TermComparison { name, requested_ns: here_ns, best_ns })
        .collect();
    out.sort_by(|a, b| (b.requested_ns - b.best_ns).total_cmp(&(a.requested_ns - a.best_ns)));
    out
}

impl StepTimes {
    /// Returns the name and the nanoseconds of each part; the parts add up to the step.
    #[must_use]
    pub fn named_parts(&self) -> [(&'static str, f64); 10] {
        [
            ("compute", self.compute_ns),
            ("memory", self.memory_ns),
            ("tp", self.tp_ns),
            ("ep", self.ep_ns),
            ("pp and dp", self.pp_dp_ns),
            ("imbalance", self.imbalance_ns),
            ("bubble", self.bubble_ns),
            ("launch", self.launch_ns),
            ("fetch", self.fetch_ns),
            ("optimizer", self.optimizer_ns),
        ]
    }
}

/// Finds legal candidates that keep as many pins as possible.
fn find_neighbours(query: &SearchQuery) -> Vec<Neighbour> {
    let axes = query.pins.has_mesh_axes();
    let mut out: Vec<Neighbour> = Vec::new();
    let mut keep = |changed: &[&'static str], pins: Pins, axes: bool| -> bool {
        let q = SearchQuery { pins, ..query.clone() };
        let walk = Enumeration::run_with_axes(&q, q.space.devices, axes, None);
        let Some(best) = walk.best.points.first() else { return false };
        let Ok(ranked) = Estimator::new(&q, q.space.devices).rank_candidate(&best.candidate) else {
            return false;
        };
        let values = Pins::from_candidate(&ranked.candidate).values();
        let changed = values.into_iter().filter(|(k, _)| changed.contains(k)).collect::<Vec<_>>();
        out.push(Neighbour { changed, ranked });
        true
    };
    let mesh = ["tp", "ep", "pp", "dp", "expert_tp"];
    for (knob, _) in query.pins.values().into_iter().filter(|(k, _)| !mesh.contains(k)) {
        keep(&[knob], query.pins.without(knob), axes);
    }
    let mut found = 0;
    for (changed, pins) in nearest_meshes(query, axes).into_iter().take(MAX_MESHES_TRIED) {
        found += usize::from(keep(&changed, pins, axes));
        if found == MAX_NEIGHBOURS {
            break;
        }
    }
    if axes {
        // The same tp, ep and pp, with the experts folded over the attention ranks in another way.
        keep(&["expert_tp", "dp"], query.pins.without("dp"), false);
    }
    out.sort_by_key(|n| n.changed.len());
    out.dedup_by(|a, b| a.ranked.candidate == b.ranked.candidate);
    out
}

/// Returns the meshes that differ from the pinned one, nearest first: fewest axes changed, then
/// fewest of pp and dp, then the smallest ratios between old and new values.
fn nearest_meshes(query: &SearchQuery, axes: bool) -> Vec<(Vec<&'static str>, Pins)> {
    let moe = query.work.routed_experts().is_some();
    let pins = &query.pins;
    let mut seen = BTreeSet::new();
    let mut out = Vec::new();
    for f in factor_meshes(query.space.devices, moe, &Pins::default(), axes) {
        let mut near = *pins;
        let (mut changed, mut distance) = (Vec::new(), 0.0);
        for (name, slot, value) in [
            ("tp", &mut near.tp, f.tp),
            ("ep", &mut near.ep, f.ep),
            ("expert_tp", &mut near.expert_tp, f.expert_tp),
            ("pp", &mut near.pp, f.pp),
            ("dp", &mut near.dp, MeshFactors::model_replicas(&f)),
        ] {
            if let Some(old) = *slot
                && old != value
            {
                changed.push(name);
                distance += (f64::from(value) / f64::from(old)).ln().abs();
                *slot = Some(value);
            }
        }
        let key = (near.tp, near.ep, near.expert_tp, near.pp, near.dp);
        if !changed.is_empty() && seen.insert(key) {
            let stages = changed.iter().filter(|k| matches!(**k, "pp" | "dp")).count();
            // Thousandths, so that the sort key is an integer.
            out.push(((changed.len(), stages, (distance * 1000.0).round() as u64, key), changed, near));
        }
    }
    out.sort_by_key(|a| a.0);
    out.into_iter().map(|(_, changed, near)| (changed, near)).collect()
}
