//! Load of experts: how many rows the slowest rank has, what a capacity drops, how many experts a batch touches and
//! where a token's copies go, under a named distribution of routing.
//!
//! A layer of experts ends when its slowest rank does, so the mean is not enough. Everything here is an expectation
//! over routings, in closed form, because a search asks for it thousands of times; the tests draw real routings.

mod chance;
mod cold;
mod load;
mod locality;
mod place;
mod popularity;
mod wire;

pub use cold::{Cold, cold};
pub use locality::{Item, Rounds, remote_share};
pub use place::{Placement, placed, rebalance};
pub use popularity::popularity;
pub use wire::{Capacity, CapacityPoint, buffer_bytes, dispatch_bytes, tune_capacity};

use load::Batch;
use popularity::spread;

/// How tokens choose experts. Experts are dealt to ranks in order, contiguous pieces that differ by at most one; a
/// token asks for `top_k` different ones.
///
/// `Balanced` and `W` have exact row counts; `Random` and `PowerLaw` are expectations over what routers may do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Routing {
    /// Every expert gets the same number of rows, as far as whole rows allow. No router does this: the lower bound.
    Balanced,
    /// Every expert is as likely as any other: a router without preferences, whose counts still vary.
    Random,
    /// Popular experts: what experts draw is distributed as P(x) ~ x^-alpha between 1 row and 0.8 of the tokens (over
    /// a range of at least 1:200), scaled to all rows, and experts lie on ranks in an order that has nothing to do
    /// with it. 1.01 and 1.2 are the exponents of published tables.
    PowerLaw(f64),
    /// Workloads of imbalance, 0 to 7; any other number is 0. *Hot experts* are one in 32, rounded up.
    ///
    /// 0. *balanced*: as [`Routing::Balanced`].
    /// 1. *hot expert set*: the first experts are hot, 16 times as popular as any other.
    /// 2. *hot rank*: all experts of the first rank are 4 times as popular as any other.
    /// 3. *spread hot*: experts 0, 32, 64… are hot, 16 times as popular as any other.
    /// 4. *source ragged*: experts are even; source rank r of n holds 2(r + 1)/(n + 1) times the mean of tokens.
    /// 5. *zero-load rank*: experts of the last rank are never asked for, the others evenly.
    /// 6. *rotating hotspot*: as 2, with rank `step mod n` in place of the first; even over n steps.
    /// 7. *burst*: seven steps are even, the eighth has the hot experts of 1 at 64 times the popularity. Numbers are
    ///    means over the eight steps.
    W(u8),
}

impl Routing {
    /// By its spelling: `balanced`, `random`, `power:1.2`, `w0` to `w7`. An exponent is above 0 and at most 5.
    #[must_use]
    pub fn named(word: &str) -> Option<Routing> {
        match word {
            "balanced" => Some(Routing::Balanced),
            "random" => Some(Routing::Random),
            _ => {
                if let Some(alpha) = word.strip_prefix("power:") {
                    let alpha = alpha.parse().ok().filter(|a| *a > 0.0 && *a <= 5.0)?;
                    return Some(Routing::PowerLaw(alpha));
                }
                let n = word.strip_prefix('w')?.parse().ok().filter(|n| *n < 8)?;
                Some(Routing::W(n))
            }
        }
    }

    /// Spelling.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Routing::Balanced => "balanced".to_string(),
            Routing::Random => "random".to_string(),
            Routing::PowerLaw(alpha) => format!("power:{alpha}"),
            Routing::W(n) => format!("w{n}"),
        }
    }

    /// Whether counts vary about their mean.
    fn varies(self) -> bool {
        matches!(self, Routing::Random | Routing::PowerLaw(_))
    }
}

/// What the ranks of an ep group get of one batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertLoad {
    /// Rows on the slowest rank over the mean of ranks, after drops; at least 1.
    pub slowest: f64,
    /// Share of assignments that a capacity drops, 0 to 1.
    pub dropped: f64,
    /// Mean rows of a rank after drops.
    pub rows: f64,
    /// Experts with at least one row on the slowest rank.
    pub active: f64,
    /// Different remote ranks that a token is sent to: tokens travel once per rank, however many of its experts they
    /// ask for.
    pub copies: f64,
    /// Bytes into or out of the busiest rank over the mean of ranks; at least 1.
    pub busiest_link: f64,
    /// Standard deviation of rows over experts, over their mean, before drops.
    pub std_over_mean: f64,
    /// The same over ranks.
    pub rank_std_over_mean: f64,
}

impl ExpertLoad {
    /// A layer without experts.
    pub const NONE: ExpertLoad = ExpertLoad {
        slowest: 1.0,
        dropped: 0.0,
        rows: 0.0,
        active: 0.0,
        copies: 0.0,
        busiest_link: 1.0,
        std_over_mean: 0.0,
        rank_std_over_mean: 0.0,
    };

    /// Rows of the slowest rank.
    #[must_use]
    pub fn slowest_rows(&self) -> f64 {
        self.slowest * self.rows
    }

    /// Mean over several steps.
    fn mean_of(parts: &[(f64, ExpertLoad)]) -> ExpertLoad {
        let total: f64 = parts.iter().map(|p| p.0).sum();
        let mean = |f: fn(&ExpertLoad) -> f64| parts.iter().map(|(w, l)| w * f(l)).sum::<f64>() / total;
        ExpertLoad {
            slowest: mean(|l| l.slowest),
            dropped: mean(|l| l.dropped),
            rows: mean(|l| l.rows),
            active: mean(|l| l.active),
            copies: mean(|l| l.copies),
            busiest_link: mean(|l| l.busiest_link),
            std_over_mean: mean(|l| l.std_over_mean),
            rank_std_over_mean: mean(|l| l.rank_std_over_mean),
        }
    }
}

/// Load of `experts` experts over `ep` ranks, for `tokens` tokens of all ranks of the group that ask for `top_k` each.
/// An expert keeps at most `capacity_pct` per cent of the even share, rounded up to whole rows and counted over the
/// whole group; 0 keeps all.
#[must_use]
pub fn experts(
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
        Batch { experts: experts as f64, top_k: top_k as f64, ep: f64::from(ep), tokens, capacity_pct };
    if routing == Routing::W(7) {
        let calm = batch.load(&spread(experts, top_k, ep, tokens, Routing::W(0)), Routing::W(0));
        let burst = batch.load(&spread(experts, top_k, ep, tokens, routing), routing);
        return ExpertLoad::mean_of(&[(7.0, calm), (1.0, burst)]);
    }
    batch.load(&spread(experts, top_k, ep, tokens, routing), routing)
}
