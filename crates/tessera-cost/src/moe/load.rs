//! The load of one batch: expectations over ranks that hold alike, from the rows of few classes of experts.

use super::chance::{Alike, capped, expected_max, skewed};
use super::popularity::{Class, RankKind, Spread};
use super::{ExpertLoad, Routing};

/// What is asked of one group of ranks.
pub(super) struct Batch {
    pub experts: f64,
    pub top_k: f64,
    pub ep: f64,
    pub tokens: f64,
    pub capacity_pct: u32,
}

/// Ranks that hold alike, with the rows of their experts by class; where placement is mixed, classes of all experts.
struct Held {
    ranks: f64,
    experts: f64,
    rows: Vec<Rows>,
}

/// Experts of one class: how many, and one's rows.
#[derive(Clone, Copy)]
struct Rows {
    count: f64,
    /// Mean and variance before the capacity.
    asked: f64,
    noise: f64,
    /// Mean and variance of what is kept.
    mean: f64,
    variance: f64,
}

impl Batch {
    pub fn load(&self, spread: &Spread, routing: Routing) -> ExpertLoad {
        let varies = routing.varies();
        let even = self.tokens * self.top_k / self.experts;
        let capacity = match self.capacity_pct {
            0 => f64::INFINITY,
            pct => (even * f64::from(pct) / 100.0 - 1e-9).ceil().max(1.0),
        };
        let rows = |c: &Class| {
            let asked = self.tokens * c.asked;
            let noise = if varies { asked * (1.0 - c.asked) } else { 0.0 };
            let (mean, variance) = capped(asked, noise, capacity);
            Rows { count: c.count, asked, noise, mean, variance }
        };
        let mut kinds: Vec<Held> = Vec::with_capacity(spread.kinds.len());
        for k in &spread.kinds {
            // Mixed kinds list the same experts.
            let rows = match kinds.first() {
                Some(first) if spread.mixed => first.rows.clone(),
                _ => k.classes.iter().map(rows).collect(),
            };
            kinds.push(Held { ranks: k.ranks, experts: k.experts, rows });
        }

        // Over all experts: what is kept, and how uneven the demand is.
        let (mut kept, mut square) = (0.0, 0.0);
        for k in &kinds {
            let part = k.ranks * k.experts / k.listed().max(1e-12);
            for r in &k.rows {
                kept += part * r.count * r.mean;
                square += part * r.count * ((r.asked - even).powi(2) + r.noise);
            }
        }
        let mean = kept / self.ep;
        let dropped = (1.0 - kept / (self.tokens * self.top_k)).max(0.0);
        if mean <= 0.0 {
            return ExpertLoad { dropped, ..ExpertLoad::NONE };
        }

        let groups: Vec<Alike> = kinds.iter().map(|k| self.alike(k, spread.mixed, true)).collect();
        let calm: Vec<Alike> = kinds.iter().map(|k| self.alike(k, spread.mixed, false)).collect();
        let most = |groups: &[Alike]| {
            let most = expected_max(groups);
            if spread.mixed { most.max(self.floor_of_mixed(&kinds)) } else { most }
        };
        let (steady, slowest_rows) = (most(&calm), most(&groups));
        // Whole rows: somebody has the last one.
        let fullest = spread.kinds.iter().fold(0.0f64, |m, k| m.max(k.experts)) * capacity;
        let slowest_rows =
            if varies { slowest_rows } else { (slowest_rows - 1e-6).ceil() }.min(fullest).max(mean);
        let slowest = slowest_rows / mean;

        let variance = |g: &Alike| g.variance * (1.0 - 1.0 / self.ep) + (g.mean - mean).powi(2);
        let over_ranks: f64 = groups.iter().map(|g| g.ranks * variance(g)).sum::<f64>() / self.ep;
        let (copies, busiest_link) = self.copies(spread, &calm, slowest, dropped, routing);
        ExpertLoad {
            slowest,
            dropped,
            rows: mean,
            active: self.active(spread, &groups, steady, slowest_rows, varies),
            copies,
            busiest_link,
            std_over_mean: (square / self.experts).sqrt() / even,
            rank_std_over_mean: over_ranks.sqrt() / mean,
        }
    }

    /// Rows of one rank of a kind. With `noise`, what routers vary is counted beside what placement varies.
    fn alike(&self, k: &Held, mixed: bool, noise: bool) -> Alike {
        let listed = k.listed();
        if listed <= 0.0 {
            return Alike { ranks: k.ranks, mean: 0.0, variance: 0.0, skew: 0.0 };
        }
        let mean = k.rows.iter().map(|r| r.count * r.mean).sum::<f64>() / listed;
        // Experts are dealt, and chosen by a token, without replacement: as if from one more, ranks being taken as
        // independent.
        let apart_of = self.experts / (self.experts - 1.0).max(1.0);
        let (mut variance, mut third) = (0.0, 0.0);
        for r in &k.rows {
            let apart = if mixed { r.mean - mean } else { 0.0 };
            let own = if noise { r.variance * apart_of } else { 0.0 };
            variance += r.count * (apart * apart * apart_of + own);
            // Counts are nearly Poisson, whose third moment is their variance.
            third += r.count * (apart.powi(3) + 3.0 * apart * own + own);
        }
        let (variance, third) = (variance / listed * k.experts, third / listed * k.experts);
        let skew = if variance > 0.0 { (third / variance.powf(1.5)).max(0.0) } else { 0.0 };
        Alike { ranks: k.ranks, mean: mean * k.experts, variance, skew }
    }

    /// The hottest expert lies somewhere, beside others of the mean: the slowest rank has no less, however few are
    /// dealt.
    fn floor_of_mixed(&self, kinds: &[Held]) -> f64 {
        let Some(k) = kinds.first() else { return 0.0 };
        let hottest = k.rows.iter().fold(0.0f64, |m, r| m.max(r.mean));
        let all: f64 = k.rows.iter().map(|r| r.count * r.mean).sum();
        hottest + (k.experts - 1.0).max(0.0) * (all - hottest) / (self.experts - 1.0).max(1.0)
    }

    /// Experts touched on the slowest rank, which has `steady` rows by popularity and `rows` with what varies.
    fn active(&self, spread: &Spread, groups: &[Alike], steady: f64, rows: f64, varies: bool) -> f64 {
        let slowest = groups.iter().zip(&spread.kinds).max_by(|a, b| a.0.mean.total_cmp(&b.0.mean));
        let Some((group, kind)) = slowest else { return 0.0 };
        let held: f64 = kind.classes.iter().map(|c| c.count).sum();
        let mean = kind.classes.iter().map(|c| c.count * c.asked).sum::<f64>() / held.max(1e-12);
        let square =
            kind.classes.iter().map(|c| c.count * (c.asked / mean - 1.0).powi(2)).sum::<f64>() / held;
        // The slowest rank of a mixed kind was dealt hot experts: part of its experts come by popularity.
        let excess = steady / group.mean - 1.0;
        let hot = if spread.mixed && square > 0.0 { (excess / square).clamp(0.0, 1.0) } else { 0.0 };
        let touched = |c: &Class| {
            let share = c.count / held * (1.0 - hot + hot * c.asked / mean);
            let asked = (c.asked * rows / steady.max(1e-12)).min(1.0 - 1e-9);
            share
                * if varies {
                    1.0 - (self.tokens * (-asked).ln_1p()).exp()
                } else {
                    (self.tokens * asked).min(1.0)
                }
        };
        let sum: f64 = kind.classes.iter().map(touched).sum();
        (sum * kind.experts).min(rows).min(kind.experts)
    }

    /// Remote ranks per token, and the busiest rank's bytes over the mean.
    fn copies(
        &self,
        spread: &Spread,
        calm: &[Alike],
        slowest: f64,
        dropped: f64,
        routing: Routing,
    ) -> (f64, f64) {
        let wanted = self.tokens * self.top_k * (1.0 - dropped);
        // As many equal experts as would vary so: choosing one leaves fewer to choose from.
        let squares: f64 = spread.kinds.iter().map(|k| k.share_squares()).sum();
        let effective = (1.0 / (squares / (self.top_k * self.top_k)).max(1e-12)).max(self.top_k);
        let reached = |share: f64| {
            let missed = |j: u32| {
                let left = effective / (effective - f64::from(j)).max(1.0);
                1.0 - (share.max(0.0) * (1.0 - dropped) * left).min(1.0)
            };
            1.0 - (0..self.top_k as u32).map(missed).product::<f64>()
        };
        // Gauss and Hermite's five points stand for the ranks of a mixed kind.
        const POINTS: [(f64, f64); 5] = [
            (-2.856_970_0, 0.011_257_4),
            (-1.355_626_2, 0.222_075_9),
            (0.0, 0.533_333_3),
            (1.355_626_2, 0.222_075_9),
            (2.856_970_0, 0.011_257_4),
        ];
        let ranks_reached = |g: &Alike| {
            if g.variance <= 0.0 {
                return g.ranks * reached(g.mean / wanted);
            }
            let rows = POINTS.map(|(z, w)| (w, (g.mean + g.variance.sqrt() * skewed(z, g.skew)).max(0.0)));
            let scale = g.mean / rows.iter().map(|(w, r)| w * r).sum::<f64>() / wanted;
            g.ranks * rows.iter().map(|(w, r)| w * reached(r * scale)).sum::<f64>()
        };
        let all: f64 = calm.iter().map(ranks_reached).sum();
        let remote = (self.ep - 1.0) / self.ep;
        let into = reached((slowest / self.ep).min(1.0)) * self.ep / all.max(1e-12);
        let out = if routing == Routing::W(4) { 2.0 * self.ep / (self.ep + 1.0) } else { 1.0 };
        (all.min(self.top_k) * remote, if self.ep > 1.0 { into.max(out).max(1.0) } else { 1.0 })
    }
}

impl Held {
    /// Experts that the classes list.
    fn listed(&self) -> f64 {
        self.rows.iter().map(|r| r.count).sum()
    }
}

impl RankKind {
    /// Sum of squares of what each expert is asked for, over the experts of all ranks of the kind.
    fn share_squares(&self) -> f64 {
        let held: f64 = self.classes.iter().map(|c| c.count).sum();
        let squares: f64 = self.classes.iter().map(|c| c.count * c.asked * c.asked).sum();
        if held > 0.0 { squares * self.ranks * self.experts / held } else { 0.0 }
    }
}
