//! Popularity of experts under a routing distribution, and the distribution of experts over ranks.

use tessera_base::random::philox4x32;
use tessera_mesh::split_units;

use super::Routing;

/// Experts with the same popularity.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertClass {
    /// Number of experts in the class.
    pub count: f64,
    /// Share of tokens that select each of them, 0 to 1.
    pub token_share: f64,
}

/// Ranks that hold the same number of experts of each class.
#[derive(Debug, Clone)]
pub(super) struct ExpertRankKind {
    /// Number of ranks of this kind in the group.
    pub ranks: f64,
    /// Number of experts that each of these ranks holds.
    pub experts: f64,
    /// Experts of one rank; with mixed placement all experts of the group, of which a rank holds
    /// any `experts`.
    pub classes: Vec<ExpertClass>,
}

/// Popularity of the experts on each rank of an ep group; equal ranks are listed once.
#[derive(Debug, Clone)]
pub(super) struct ExpertSpread {
    /// Whether each rank holds a random subset of all experts.
    pub mixed: bool,
    /// Groups of ranks, which differ in the number of experts that they hold of each class.
    pub kinds: Vec<ExpertRankKind>,
}

/// One expert in this many is hot.
const HOT_STRIDE: u64 = 32;

/// Returns the share of tokens that select each expert, in order of experts; the shares add up to
/// `top_k`. Placements and expert caches are computed from this list. `step` rotates the hotspot of
/// [`Routing::Workload`] 6 and selects the burst of 7, which is every eighth step starting with
/// step 7. Under a power law the order of experts is a fixed shuffle.
#[must_use]
pub fn expert_popularity(
    experts: u64,
    top_k: u64,
    ep: u32,
    tokens: f64,
    routing: Routing,
    step: u64,
) -> Vec<f64> {
    let top_k = top_k.min(experts);
    if experts == 0 {
        return Vec::new();
    }
    let mut asked: Vec<f64> = match routing {
        Routing::PowerLaw(alpha) => {
            let law = PowerLawQuantiles::new(alpha, tokens);
            let mut drawn: Vec<f64> =
                (0..experts).map(|i| law.popularity_at((i as f64 + 0.5) / experts as f64)).collect();
            fixed_shuffle(&mut drawn);
            drawn
        }
        Routing::Workload(n) => {
            (0..experts).map(|e| workload_weight(n, e, experts, ep.max(1), step)).collect()
        }
        Routing::Balanced | Routing::Random => vec![1.0; experts as usize],
    };
    let mut classes: Vec<ExpertClass> =
        asked.iter().map(|a| ExpertClass { count: 1.0, token_share: *a }).collect();
    normalize_shares(&mut classes, top_k as f64);
    for (a, c) in asked.iter_mut().zip(&classes) {
        *a = c.token_share;
    }
    asked
}

/// Returns the popularity as few classes of experts over few kinds of ranks.
pub(super) fn spread_experts(
    experts: u64,
    top_k: u64,
    ep: u32,
    tokens: f64,
    routing: Routing,
) -> ExpertSpread {
    match routing {
        Routing::PowerLaw(alpha) => {
            power_law_spread(experts, top_k, ep, &PowerLawQuantiles::new(alpha, tokens))
        }
        Routing::Workload(n @ 1..=7) if n != 4 => workload_spread(experts, top_k, ep, n),
        _ => {
            let mean_share = top_k as f64 / experts as f64;
            let kind = |(ranks, expert_count): (u32, u64)| ExpertRankKind {
                ranks: f64::from(ranks),
                experts: expert_count as f64,
                classes: vec![ExpertClass { count: expert_count as f64, token_share: mean_share }],
            };
            ExpertSpread {
                mixed: false,
                kinds: experts_per_rank(experts, ep).into_iter().map(kind).collect(),
            }
        }
    }
}

/// Returns how many ranks hold how many experts: the first ranks hold one more if the division
/// leaves a remainder.
fn experts_per_rank(experts: u64, ep: u32) -> Vec<(u32, u64)> {
    let (quotient, rest) = (experts / u64::from(ep), (experts % u64::from(ep)) as u32);
    [(rest, quotient + 1), (ep - rest, quotient)].into_iter().filter(|(ranks, _)| *ranks > 0).collect()
}

/// Quantiles of P(x) ~ x^-alpha for x from 1 to 0.8 of the tokens, and at least to 200.
struct PowerLawQuantiles {
    power: f64,
    slope: f64,
    log: f64,
}

impl PowerLawQuantiles {
    fn new(alpha: f64, tokens: f64) -> PowerLawQuantiles {
        let range = (0.8 * tokens).max(200.0);
        let power = 1.0 - alpha;
        PowerLawQuantiles { power, slope: range.powf(power) - 1.0, log: range.ln() }
    }

    /// Returns the popularity of the expert at quantile `u`, with the most popular expert at 0.
    fn popularity_at(&self, u: f64) -> f64 {
        let u = 1.0 - u;
        if self.power.abs() < 1e-9 {
            (self.log * u).exp()
        } else {
            (1.0 + self.slope * u).powf(1.0 / self.power)
        }
    }
}

fn power_law_spread(experts: u64, top_k: u64, ep: u32, law: &PowerLawQuantiles) -> ExpertSpread {
    // The most popular experts are classes of one, because each matters; the others form classes
    // that grow by an eighth.
    let mut classes = Vec::with_capacity(80);
    let mut at = 0;
    while at < experts {
        let next = (at + 1 + if at < 16 { 0 } else { at / 8 }).min(experts);
        let middle = (at + next) as f64 / 2.0 / experts as f64;
        classes.push(ExpertClass { count: (next - at) as f64, token_share: law.popularity_at(middle) });
        at = next;
    }
    normalize_shares(&mut classes, top_k as f64);
    let kind = |(ranks, expert_count): (u32, u64)| ExpertRankKind {
        ranks: f64::from(ranks),
        experts: expert_count as f64,
        classes: classes.clone(),
    };
    ExpertSpread { mixed: true, kinds: experts_per_rank(experts, ep).into_iter().map(kind).collect() }
}

/// Returns the distribution of a workload: the burst step of workload 7, the first step of the
/// others.
fn workload_spread(experts: u64, top_k: u64, ep: u32, n: u8) -> ExpertSpread {
    // The number of experts and the number of unusual ones among them identify the kind of a rank.
    let mut kinds: Vec<(u64, u64, f64)> = Vec::new();
    for rank in 0..ep {
        let (start, expert_count) = split_units(experts, ep, rank);
        let odd = match n {
            1 | 7 => hot_count(experts).saturating_sub(start).min(expert_count),
            3 => (start + expert_count).div_ceil(HOT_STRIDE) - start.div_ceil(HOT_STRIDE),
            2 | 6 => expert_count * u64::from(rank == 0),
            _ => expert_count * u64::from(ep > 1 && rank + 1 == ep),
        };
        match kinds.iter_mut().find(|k| (k.0, k.1) == (expert_count, odd)) {
            Some(k) => k.2 += 1.0,
            None => kinds.push((expert_count, odd, 1.0)),
        }
    }
    let odd: f64 = kinds.iter().map(|k| k.1 as f64 * k.2).sum();
    let mut both = [
        ExpertClass { count: odd, token_share: odd_weight(n) },
        ExpertClass { count: experts as f64 - odd, token_share: 1.0 },
    ];
    normalize_shares(&mut both, top_k as f64);
    let kind = |(expert_count, odd, ranks): (u64, u64, f64)| ExpertRankKind {
        ranks,
        experts: expert_count as f64,
        classes: vec![
            ExpertClass { count: odd as f64, token_share: both[0].token_share },
            ExpertClass { count: (expert_count - odd) as f64, token_share: both[1].token_share },
        ],
    };
    ExpertSpread { mixed: false, kinds: kinds.into_iter().map(kind).collect() }
}

/// Returns the popularity of an expert under workload W`n`, relative to an ordinary expert.
fn workload_weight(n: u8, expert: u64, experts: u64, ep: u32, step: u64) -> f64 {
    let of_rank = |rank: u32| {
        let (start, expert_count) = split_units(experts, ep, rank);
        (start..start + expert_count).contains(&expert)
    };
    let odd = match n {
        1 => expert < hot_count(experts),
        2 => of_rank(0),
        3 => expert.is_multiple_of(HOT_STRIDE),
        5 => ep > 1 && of_rank(ep - 1),
        6 => of_rank((step % u64::from(ep)) as u32),
        7 => step % 8 == 7 && expert < hot_count(experts),
        _ => false,
    };
    if odd { odd_weight(n) } else { 1.0 }
}

/// Returns the relative popularity of the experts that a workload makes popular or unpopular.
fn odd_weight(n: u8) -> f64 {
    match n {
        1 | 3 => 16.0,
        2 | 6 => 4.0,
        5 => 0.0,
        7 => 64.0,
        _ => 1.0,
    }
}

fn hot_count(experts: u64) -> u64 {
    experts.div_ceil(HOT_STRIDE)
}

/// Scales popularities so that they add up to `top_k` and none exceeds 1. A token selects an expert
/// at most once; demand beyond that goes to the other experts.
fn normalize_shares(classes: &mut [ExpertClass], top_k: f64) {
    let total: f64 = classes.iter().map(|c| c.count * c.token_share).sum();
    let factor = top_k / total.max(1e-300);
    classes.iter_mut().for_each(|c| c.token_share *= factor);
    while classes.iter().any(|c| c.token_share > 1.0 + 1e-9) {
        let (mut full, mut open) = (0.0, 0.0);
        for c in classes.iter_mut() {
            c.token_share = c.token_share.min(1.0);
            *(if c.token_share < 1.0 { &mut open } else { &mut full }) += c.count * c.token_share;
        }
        if open <= 0.0 {
            return;
        }
        let factor = (top_k - full) / open;
        classes.iter_mut().filter(|c| c.token_share < 1.0).for_each(|c| c.token_share *= factor);
    }
}

/// Shuffles with a constant Philox key: the order depends on the length only.
fn fixed_shuffle(list: &mut [f64]) {
    for i in (1..list.len()).rev() {
        let word = philox4x32([i as u32, 0, 0, 0], [0x7465_7373, 0x6572_6121])[0];
        list.swap(i, ((u64::from(word) * (i as u64 + 1)) >> 32) as usize);
    }
}
