//! Expected load of one batch, from few classes of experts and few kinds of ranks.

use super::distributions::{RankGroup, clipped_moments, expected_max, to_skewed};
use super::popularity::{ExpertClass, ExpertRankKind, ExpertSpread};
use super::{ExpertLoad, Routing};

/// Sizes of a batch: each of the `tokens` of an ep group selects `top_k` of `experts`.
pub(super) struct RoutedBatch {
    pub experts: f64,
    pub top_k: f64,
    pub ep: f64,
    pub tokens: f64,
    pub capacity_pct: u32,
}

/// Ranks with the same experts, and the rows of these experts by class. With mixed placement the
/// classes cover all experts.
struct KindRows {
    ranks: f64,
    experts: f64,
    rows: Vec<ClassRows>,
}

/// Experts of one class: their number, and the distribution of one expert's rows.
#[derive(Clone, Copy)]
struct ClassRows {
    count: f64,
    /// Mean and variance of the rows that tokens request from one expert, before drops.
    demand: f64,
    demand_variance: f64,
    /// Mean and variance of the rows that the capacity lets the expert keep.
    mean: f64,
    variance: f64,
}

impl RoutedBatch {
    pub fn expected_load(&self, spread: &ExpertSpread, routing: Routing) -> ExpertLoad {
        let varies = routing.is_random();
        let even = self.tokens * self.top_k / self.experts;
        let capacity = match self.capacity_pct {
            0 => f64::INFINITY,
            pct => (even * f64::from(pct) / 100.0 - 1e-9).ceil().max(1.0),
        };
        let rows = |c: &ExpertClass| {
            let demand = self.tokens * c.token_share;
            let noise = if varies { demand * (1.0 - c.token_share) } else { 0.0 };
            let (mean, variance) = clipped_moments(demand, noise, capacity);
            ClassRows { count: c.count, demand, demand_variance: noise, mean, variance }
        };
        let mut kinds: Vec<KindRows> = Vec::with_capacity(spread.kinds.len());
        for k in &spread.kinds {
            // Mixed kinds list the same experts.
            let rows = match kinds.first() {
                Some(first) if spread.mixed => first.rows.clone(),
                _ => k.classes.iter().map(rows).collect(),
            };
            kinds.push(KindRows { ranks: k.ranks, experts: k.experts, rows });
        }

        // Over all experts: the kept rows, and the unevenness of the demand.
        let (mut kept, mut square) = (0.0, 0.0);
        for k in &kinds {
            let part = k.ranks * k.experts / k.listed_experts().max(1e-12);
            for r in &k.rows {
                kept += part * r.count * r.mean;
                square += part * r.count * ((r.demand - even).powi(2) + r.demand_variance);
            }
        }
        let mean = kept / self.ep;
        let dropped = (1.0 - kept / (self.tokens * self.top_k)).max(0.0);
        if mean <= 0.0 {
            return ExpertLoad { dropped, ..ExpertLoad::NONE };
        }

        let groups: Vec<RankGroup> = kinds.iter().map(|k| self.rank_group(k, spread.mixed, true)).collect();
        let without_noise: Vec<RankGroup> =
            kinds.iter().map(|k| self.rank_group(k, spread.mixed, false)).collect();
        let max_rows = |groups: &[RankGroup]| {
            let max_rows = expected_max(groups);
            if spread.mixed { max_rows.max(self.mixed_lower_bound(&kinds)) } else { max_rows }
        };
        let (steady, slowest_rows) = (max_rows(&without_noise), max_rows(&groups));
        // Counts are whole: some rank has the last row.
        let fullest = spread.kinds.iter().fold(0.0f64, |m, k| m.max(k.experts)) * capacity;
        let slowest_rows =
            if varies { slowest_rows } else { (slowest_rows - 1e-6).ceil() }.min(fullest).max(mean);
        let slowest = slowest_rows / mean;

        let variance = |g: &RankGroup| g.variance * (1.0 - 1.0 / self.ep) + (g.mean - mean).powi(2);
        let over_ranks: f64 = groups.iter().map(|g| g.ranks * variance(g)).sum::<f64>() / self.ep;
        let (copies, busiest_link) = self.remote_copies(spread, &without_noise, slowest, dropped, routing);
        ExpertLoad {
            slowest_over_mean: slowest,
            dropped,
            mean_rows: mean,
            active_experts: self.active_experts(spread, &groups, steady, slowest_rows, varies),
            remote_copies: copies,
            busiest_over_mean: busiest_link,
            std_over_mean: (square / self.experts).sqrt() / even,
            rank_std_over_mean: over_ranks.sqrt() / mean,
        }
    }

    /// Returns the distribution of the rows of one rank of a kind. With `noise`, the variance
    /// includes that of the router beside that of the placement.
    fn rank_group(&self, k: &KindRows, mixed: bool, noise: bool) -> RankGroup {
        let listed = k.listed_experts();
        if listed <= 0.0 {
            return RankGroup { ranks: k.ranks, mean: 0.0, variance: 0.0, skew: 0.0 };
        }
        let mean = k.rows.iter().map(|r| r.count * r.mean).sum::<f64>() / listed;
        // Experts are dealt to ranks, and selected by a token, without replacement. With ranks
        // taken as independent this equals drawing from one expert more.
        let without_replacement = self.experts / (self.experts - 1.0).max(1.0);
        let (mut variance, mut third) = (0.0, 0.0);
        for r in &k.rows {
            let apart = if mixed { r.mean - mean } else { 0.0 };
            let own = if noise { r.variance * without_replacement } else { 0.0 };
            variance += r.count * (apart * apart * without_replacement + own);
            // Counts are nearly Poisson, whose third moment equals their variance.
            third += r.count * (apart.powi(3) + 3.0 * apart * own + own);
        }
        let (variance, third) = (variance / listed * k.experts, third / listed * k.experts);
        let skew = if variance > 0.0 { (third / variance.powf(1.5)).max(0.0) } else { 0.0 };
        RankGroup { ranks: k.ranks, mean: mean * k.experts, variance, skew }
    }

    /// Returns a lower bound of the slowest rank's rows: the hottest expert lies on some rank
    /// beside experts of mean load, even if few experts are dealt.
    fn mixed_lower_bound(&self, kinds: &[KindRows]) -> f64 {
        let Some(k) = kinds.first() else { return 0.0 };
        let hottest = k.rows.iter().fold(0.0f64, |m, r| m.max(r.mean));
        let all: f64 = k.rows.iter().map(|r| r.count * r.mean).sum();
        hottest + (k.experts - 1.0).max(0.0) * (all - hottest) / (self.experts - 1.0).max(1.0)
    }

    /// Returns the number of active experts on the slowest rank, which has `steady` rows by
    /// popularity alone and `rows` rows with the router's variance.
    fn active_experts(
        &self,
        spread: &ExpertSpread,
        groups: &[RankGroup],
        steady: f64,
        rows: f64,
        varies: bool,
    ) -> f64 {
        let slowest = groups.iter().zip(&spread.kinds).max_by(|a, b| a.0.mean.total_cmp(&b.0.mean));
        let Some((group, kind)) = slowest else { return 0.0 };
        let expert_count: f64 = kind.classes.iter().map(|c| c.count).sum();
        let mean =
            kind.classes.iter().map(|c| c.count * c.token_share).sum::<f64>() / expert_count.max(1e-12);
        let square = kind.classes.iter().map(|c| c.count * (c.token_share / mean - 1.0).powi(2)).sum::<f64>()
            / expert_count;
        // The slowest rank of a mixed kind received hot experts, so part of its experts is weighted
        // by popularity.
        let excess = steady / group.mean - 1.0;
        let hot = if spread.mixed && square > 0.0 { (excess / square).clamp(0.0, 1.0) } else { 0.0 };
        let touched = |c: &ExpertClass| {
            let share = c.count / expert_count * (1.0 - hot + hot * c.token_share / mean);
            let hit_share = (c.token_share * rows / steady.max(1e-12)).min(1.0 - 1e-9);
            share
                * if varies {
                    1.0 - (self.tokens * (-hit_share).ln_1p()).exp()
                } else {
                    (self.tokens * hit_share).min(1.0)
                }
        };
        let sum: f64 = kind.classes.iter().map(touched).sum();
        (sum * kind.experts).min(rows).min(kind.experts)
    }

    /// Returns the remote ranks per token, and the busiest rank's bytes over the mean.
    fn remote_copies(
        &self,
        spread: &ExpertSpread,
        calm: &[RankGroup],
        slowest: f64,
        dropped: f64,
        routing: Routing,
    ) -> (f64, f64) {
        let wanted = self.tokens * self.top_k * (1.0 - dropped);
        // Number of equal experts with the same variation: each selection leaves fewer to select
        // from.
        let squares: f64 = spread.kinds.iter().map(|k| k.share_squares()).sum();
        let effective = (1.0 / (squares / (self.top_k * self.top_k)).max(1e-12)).max(self.top_k);
        let reached = |share: f64| {
            let missed = |j: u32| {
                let left = effective / (effective - f64::from(j)).max(1.0);
                1.0 - (share.max(0.0) * (1.0 - dropped) * left).min(1.0)
            };
            1.0 - (0..self.top_k as u32).map(missed).product::<f64>()
        };
        // Five-point Gauss-Hermite quadrature over the ranks of a mixed kind.
        const POINTS: [(f64, f64); 5] = [
            (-2.856_970_0, 0.011_257_4),
            (-1.355_626_2, 0.222_075_9),
            (0.0, 0.533_333_3),
            (1.355_626_2, 0.222_075_9),
            (2.856_970_0, 0.011_257_4),
        ];
        let ranks_reached = |g: &RankGroup| {
            if g.variance <= 0.0 {
                return g.ranks * reached(g.mean / wanted);
            }
            let rows = POINTS.map(|(z, w)| (w, (g.mean + g.variance.sqrt() * to_skewed(z, g.skew)).max(0.0)));
            let scale = g.mean / rows.iter().map(|(w, r)| w * r).sum::<f64>() / wanted;
            g.ranks * rows.iter().map(|(w, r)| w * reached(r * scale)).sum::<f64>()
        };
        let all: f64 = calm.iter().map(ranks_reached).sum();
        let remote = (self.ep - 1.0) / self.ep;
        let into = reached((slowest / self.ep).min(1.0)) * self.ep / all.max(1e-12);
        let out = if routing == Routing::Workload(4) { 2.0 * self.ep / (self.ep + 1.0) } else { 1.0 };
        (all.min(self.top_k) * remote, if self.ep > 1.0 { into.max(out).max(1.0) } else { 1.0 })
    }
}

impl KindRows {
    /// Returns the number of experts that the classes list.
    fn listed_experts(&self) -> f64 {
        self.rows.iter().map(|r| r.count).sum()
    }
}

impl ExpertRankKind {
    /// Returns the sum of squares of each expert's token share over the experts of all ranks of the
    /// kind.
    fn share_squares(&self) -> f64 {
        let expert_count: f64 = self.classes.iter().map(|c| c.count).sum();
        let squares: f64 = self.classes.iter().map(|c| c.count * c.token_share * c.token_share).sum();
        if expert_count > 0.0 { squares * self.ranks * self.experts / expert_count } else { 0.0 }
    }
}
