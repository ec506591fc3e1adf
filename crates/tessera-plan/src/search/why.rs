//! Why not this one: the answer for one arrangement, or for all that some pins leave.

use std::collections::{BTreeMap, BTreeSet};

use super::estimate::Prices;
use super::front::Point;
use super::space::{Factors, factors};
use super::walk::Walk;
use super::{Pins, Question, Ranked, Reason, Rejected, Times};

/// What is said of the arrangements that some pins leave.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The pins, those of the question included.
    pub asked: Pins,
    /// Arrangements that they leave.
    pub considered: u64,
    /// What became of them.
    pub verdict: Verdict,
}

/// Refused, or legal and where it stands.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// None is legal.
    Refused {
        /// By the first rule that each breaks.
        reasons: BTreeMap<Reason, Rejected>,
        /// Legal arrangements that keep as many of the pins as can be, nearest first.
        neighbours: Vec<Neighbour>,
    },
    /// Some are.
    Legal {
        /// The best of them.
        ranked: Box<Ranked>,
        /// Arrangements of the whole question that are better than it.
        better: u64,
        /// Legal arrangements of the whole question.
        legal: u64,
        /// The best of the whole question.
        best: Box<Ranked>,
        /// Where the step goes, here and there.
        terms: Vec<Term>,
    },
}

/// A legal arrangement near a refused one.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbour {
    /// Knobs that differ from what was asked, with the value here.
    pub changed: Vec<(&'static str, String)>,
    /// The best of those.
    pub ranked: Ranked,
}

/// One part of a step, compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Term {
    /// What it is.
    pub name: &'static str,
    /// In the arrangement that was asked for.
    pub here_ns: f64,
    /// In the best.
    pub best_ns: f64,
}

/// Neighbours that are given.
const NEIGHBOURS: usize = 6;

/// Meshes that are tried for neighbours.
const TRIES: usize = 96;

/// Answers for what `pins` leave of the question.
#[must_use]
pub fn why(q: &Question, pins: &Pins) -> Answer {
    let asked = Question { pins: pins.or(&q.pins), ..q.clone() };
    let devices = q.space.devices;
    let mut walk = Walk::over(&asked, devices, None);
    let considered = walk.considered;
    let point = walk.best.points.first().copied();
    let verdict = match point {
        None => {
            Verdict::Refused { reasons: std::mem::take(&mut walk.rejected), neighbours: neighbours(&asked) }
        }
        Some(point) => match stands(q, devices, point) {
            Some(verdict) => verdict,
            None => Verdict::Refused { reasons: std::mem::take(&mut walk.rejected), neighbours: Vec::new() },
        },
    };
    Answer { asked: asked.pins, considered, verdict }
}

/// Where a legal arrangement stands among all.
fn stands(q: &Question, devices: u32, point: Point) -> Option<Verdict> {
    let all = Walk::over(q, devices, Some(point));
    let mut prices = Prices::new(q, devices);
    let ranked = prices.ranked(&point.candidate).ok()?;
    // Pins of the question itself may leave this one out, and even everything.
    let best = all.best.points.first().filter(|b| b.beats(&point, q.objective)).unwrap_or(&point);
    let best = prices.ranked(&best.candidate).ok()?;
    let terms = terms(&ranked.estimate.times, &best.estimate.times);
    let (better, legal) = (all.better, all.legal.max(1));
    Some(Verdict::Legal { ranked: Box::new(ranked), better, legal, best: Box::new(best), terms })
}

/// Parts of a step side by side, what costs most against the best first.
fn terms(here: &Times, best: &Times) -> Vec<Term> {
    let mut out: Vec<Term> = here
        .parts()
        .into_iter()
        .zip(best.parts())
        .map(|((name, here_ns), (_, best_ns))| Term { name, here_ns, best_ns })
        .collect();
    out.sort_by(|a, b| (b.here_ns - b.best_ns).total_cmp(&(a.here_ns - a.best_ns)));
    out
}

impl Times {
    /// Parts that add up to the step, with their names.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, f64); 10] {
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

/// Legal arrangements that keep as many pins as can be.
fn neighbours(asked: &Question) -> Vec<Neighbour> {
    let axes = asked.pins.four_axes();
    let mut out: Vec<Neighbour> = Vec::new();
    let mut keep = |changed: &[&'static str], pins: Pins, axes: bool| -> bool {
        let q = Question { pins, ..asked.clone() };
        let walk = Walk::with(&q, q.space.devices, axes, None);
        let Some(best) = walk.best.points.first() else { return false };
        let Ok(ranked) = Prices::new(&q, q.space.devices).ranked(&best.candidate) else { return false };
        let values = Pins::of(&ranked.candidate).values();
        let changed = values.into_iter().filter(|(k, _)| changed.contains(k)).collect::<Vec<_>>();
        out.push(Neighbour { changed, ranked });
        true
    };
    let mesh = ["tp", "ep", "pp", "dp", "expert_tp"];
    for (knob, _) in asked.pins.values().into_iter().filter(|(k, _)| !mesh.contains(k)) {
        keep(&[knob], asked.pins.without(knob), axes);
    }
    let mut found = 0;
    for (changed, pins) in near_meshes(asked, axes).into_iter().take(TRIES) {
        found += usize::from(keep(&changed, pins, axes));
        if found == NEIGHBOURS {
            break;
        }
    }
    if axes {
        // The same tp, ep and pp with experts over the ranks of attention in another way.
        keep(&["expert_tp", "dp"], asked.pins.without("dp"), false);
    }
    out.sort_by_key(|n| n.changed.len());
    out.dedup_by(|a, b| a.ranked.candidate == b.ranked.candidate);
    out
}

/// Meshes that differ from the pinned one, nearest first: fewest axes changed, pp and dp kept where that is possible, then
/// the smallest factors between old and new.
fn near_meshes(asked: &Question, axes: bool) -> Vec<(Vec<&'static str>, Pins)> {
    let moe = asked.work.experts().is_some();
    let pins = &asked.pins;
    let mut seen = BTreeSet::new();
    let mut out = Vec::new();
    for f in factors(asked.space.devices, moe, &Pins::default(), axes) {
        let mut near = *pins;
        let (mut changed, mut distance) = (Vec::new(), 0.0);
        for (name, slot, value) in [
            ("tp", &mut near.tp, f.tp),
            ("ep", &mut near.ep, f.ep),
            ("expert_tp", &mut near.expert_tp, f.expert_tp),
            ("pp", &mut near.pp, f.pp),
            ("dp", &mut near.dp, Factors::copies(&f)),
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
            // Thousandths, so that the order is one of whole numbers.
            out.push(((changed.len(), stages, (distance * 1000.0).round() as u64, key), changed, near));
        }
    }
    out.sort_by_key(|a| a.0);
    out.into_iter().map(|(_, changed, near)| (changed, near)).collect()
}
