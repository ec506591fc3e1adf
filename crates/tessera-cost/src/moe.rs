//! Load of experts under a named routing distribution: rows of the slowest rank, rows that a
//! capacity drops, experts that a batch activates, and destinations of each token's copies.
//!
//! A layer of experts ends when its slowest rank does, so the mean is not enough. All values are
//! expectations over routings in closed form, because a search evaluates them thousands of times;
//! the tests sample real routings.

mod capacity;
mod cold_experts;
mod counted;
mod distributions;
mod load;
mod locality;
mod placement;
mod popularity;

pub use capacity::{CapacityPoint, CapacitySweep, buffer_bytes, dispatch_bytes, tune_capacity};
pub use cold_experts::{ColdExperts, count_cold_experts};
pub use counted::{CountedLoad, CountedPlace, LoadSpread};
pub use locality::{ExchangeItem, ExchangeRounds, remote_share};
pub use placement::{ExpertPlacement, placement_load, rebalance_experts};
pub use popularity::expert_popularity;

use load::RoutedBatch;
use popularity::spread_experts;

/// Distribution of tokens over experts. Experts are dealt to ranks in order, in contiguous ranges
/// whose sizes differ by at most one; a token selects `top_k` different experts.
///
/// `Balanced` and `Workload` have exact row counts; `Random` and `PowerLaw` are expectations over
/// random routings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Routing {
    /// Every expert gets the same number of rows, as far as whole rows allow. No router achieves
    /// this; it is the lower bound.
    Balanced,
    /// Every expert is equally likely: a router without preferences, whose counts still vary.
    Random,
    /// Popular experts: popularity is distributed as P(x) ~ x^-alpha between 1 row and 0.8 of the
    /// tokens (over a range of at least 1:200), scaled to all rows, and experts lie on ranks in an
    /// independent order. Published tables use the exponents 1.01 and 1.2.
    PowerLaw(f64),
    /// Imbalanced workloads, 0 to 7; any other number acts as 0. *Hot experts* are one in 32,
    /// rounded up.
    ///
    /// 0. *balanced*: as [`Routing::Balanced`].
    /// 1. *hot expert set*: the first experts are hot, 16 times as popular as any other.
    /// 2. *hot rank*: all experts of the first rank are 4 times as popular as any other.
    /// 3. *spread hot*: experts 0, 32, 64… are hot, 16 times as popular as any other.
    /// 4. *source ragged*: experts are even; source rank r of n holds 2(r + 1)/(n + 1) times the
    ///    mean of tokens.
    /// 5. *zero-load rank*: experts of the last rank are never selected, the others evenly.
    /// 6. *rotating hotspot*: as 2, with rank `step mod n` in place of the first; even over n
    ///    steps.
    /// 7. *burst*: seven steps are even, the eighth has the hot experts of 1 at 64 times the
    ///    popularity. Values are means over the eight steps.
    Workload(u8),
}

impl Routing {
    /// Parses a name: `balanced`, `random`, `power:1.2`, `w0` to `w7`. An exponent is above 0 and
    /// at most 5.
    #[must_use]
    pub fn from_name(word: &str) -> Option<Routing> {
        match word {
            "balanced" => Some(Routing::Balanced),
            "random" => Some(Routing::Random),
            _ => {
                if let Some(alpha) = word.strip_prefix("power:") {
                    let alpha = alpha.parse().ok().filter(|a| *a > 0.0 && *a <= 5.0)?;
                    return Some(Routing::PowerLaw(alpha));
                }
                let n = word.strip_prefix('w')?.parse().ok().filter(|n| *n < 8)?;
                Some(Routing::Workload(n))
            }
        }
    }

    /// Returns the name that [`Routing::from_name`] parses.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Routing::Balanced => "balanced".to_string(),
            Routing::Random => "random".to_string(),
            Routing::PowerLaw(alpha) => format!("power:{alpha}"),
            Routing::Workload(n) => format!("w{n}"),
        }
    }

    /// Returns whether row counts vary around their mean.
    fn is_random(self) -> bool {
        matches!(self, Routing::Random | Routing::PowerLaw(_))
    }
}

/// Load of the ranks of an ep group for one batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertLoad {
    /// Rows of the slowest rank divided by the mean rows per rank, after drops; at least 1.
    pub slowest_over_mean: f64,
    /// Share of assignments that a capacity drops, 0 to 1.
    pub dropped: f64,
    /// Mean rows of a rank after drops.
    pub mean_rows: f64,
    /// Experts with at least one row on the slowest rank.
    pub active_experts: f64,
    /// Different remote ranks that a token is sent to. A token travels once per rank, independent
    /// of how many of its experts lie there.
    pub remote_copies: f64,
    /// Bytes into or out of the busiest rank over the mean of ranks; at least 1.
    pub busiest_over_mean: f64,
    /// Standard deviation of the rows per expert, divided by their mean, before drops.
    pub std_over_mean: f64,
    /// Standard deviation of the rows per rank, divided by their mean.
    pub rank_std_over_mean: f64,
}

impl ExpertLoad {
    /// The load of a layer without experts or tokens: no rows, and no rank above the mean.
    pub const NONE: ExpertLoad = ExpertLoad {
        slowest_over_mean: 1.0,
        dropped: 0.0,
        mean_rows: 0.0,
        active_experts: 0.0,
        remote_copies: 0.0,
        busiest_over_mean: 1.0,
        std_over_mean: 0.0,
        rank_std_over_mean: 0.0,
    };

    /// Returns the rows that the slowest rank computes, after drops.
    #[must_use]
    pub fn slowest_rows(&self) -> f64 {
        self.slowest_over_mean * self.mean_rows
    }

    /// Returns the mean of the loads of several steps, given as pairs of a weight and a load.
    fn weighted_mean(parts: &[(f64, ExpertLoad)]) -> ExpertLoad {
        let total: f64 = parts.iter().map(|p| p.0).sum();
        let mean = |f: fn(&ExpertLoad) -> f64| parts.iter().map(|(w, l)| w * f(l)).sum::<f64>() / total;
        ExpertLoad {
            slowest_over_mean: mean(|l| l.slowest_over_mean),
            dropped: mean(|l| l.dropped),
            mean_rows: mean(|l| l.mean_rows),
            active_experts: mean(|l| l.active_experts),
            remote_copies: mean(|l| l.remote_copies),
            busiest_over_mean: mean(|l| l.busiest_over_mean),
            std_over_mean: mean(|l| l.std_over_mean),
            rank_std_over_mean: mean(|l| l.rank_std_over_mean),
        }
    }
}

/// Returns the load of `experts` experts over `ep` ranks, for `tokens` tokens of all ranks of the
/// group that select `top_k` experts each. An expert keeps at most `capacity_pct` per cent of the
/// even share, rounded up to whole rows and counted over the whole group; 0 keeps all.
#[must_use]
pub fn expert_load(
    experts: u64,
    top_k: u64,
    ep: u32,
    tokens: f64,
    routing: Routing,
    capacity_pct: u32,
) -> ExpertLoad {
    let top_k = top_k.min(experts);
    if top_k == 0 || ep == 0 || tokens.is_nan() || tokens <= 0.0 {
        return ExpertLoad::NONE;
    }
    let batch =
        RoutedBatch { experts: experts as f64, top_k: top_k as f64, ep: f64::from(ep), tokens, capacity_pct };
    if routing == Routing::Workload(7) {
        let even_load = batch.expected_load(
            &spread_experts(experts, top_k, ep, tokens, Routing::Workload(0)),
            Routing::Workload(0),
        );
        let burst_load = batch.expected_load(&spread_experts(experts, top_k, ep, tokens, routing), routing);
        return ExpertLoad::weighted_mean(&[(7.0, even_load), (1.0, burst_load)]);
    }
    batch.expected_load(&spread_experts(experts, top_k, ep, tokens, routing), routing)
}

/// Returns the standard deviation of some loads around their mean, divided by the mean.
fn divide_std_by_mean(loads: &[f64], mean: f64) -> f64 {
    (loads.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / loads.len() as f64).sqrt() / mean
}
