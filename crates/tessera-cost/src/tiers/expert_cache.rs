//! Experts in two memory tiers: pinning by popularity, and the hit rate of an expert cache on a
//! routing trace.

use tessera_base::random::Rng;
use tessera_ir::{EvictionPolicy, ExpertCache};

/// Experts that are pinned in device memory.
#[derive(Debug, Clone, PartialEq)]
pub struct HotExperts {
    /// Numbers of the pinned experts.
    pub hot: Vec<usize>,
    /// Share of assignments that select a cold expert.
    pub cold_share: f64,
}

/// Returns the most popular experts that fit into `budget_bytes`; ties go to the lower number.
#[must_use]
pub fn select_hot_experts(popularity: &[f64], bytes_each: f64, budget_bytes: f64) -> HotExperts {
    let mut order: Vec<usize> = (0..popularity.len()).collect();
    order.sort_by(|a, b| popularity[*b].total_cmp(&popularity[*a]).then(a.cmp(b)));
    let fit = if bytes_each > 0.0 { (budget_bytes.max(0.0) / bytes_each) as usize } else { order.len() };
    let cold = order.split_off(fit.min(order.len()));
    order.sort_unstable();
    let all: f64 = popularity.iter().sum();
    let asked: f64 = cold.iter().map(|e| popularity[*e]).sum();
    HotExperts { hot: order, cold_share: if all > 0.0 { asked / all } else { 0.0 } }
}

/// Experts requested in each step, and the prediction that the router of an earlier layer makes for
/// the step.
#[derive(Debug, Clone, PartialEq)]
pub struct RoutingTrace {
    /// By step: the numbers of the different experts that its tokens select.
    pub requested: Vec<Vec<usize>>,
    /// By step: the predicted experts, as many as requested.
    pub predicted: Vec<Vec<usize>>,
}

/// Samples a trace: `per_step` different experts per step with popularity 1 / (rank + 1)^exponent.
/// Ranks change by one position every `drift` steps. A share `accuracy` of the predicted experts
/// matches the requested ones; the rest is sampled from the same distribution.
#[must_use]
pub fn sample_routing_trace(
    seed: u64,
    (experts, per_step): (usize, usize),
    steps: usize,
    exponent: f64,
    drift: usize,
    accuracy: f64,
) -> RoutingTrace {
    let mut dice = Rng::new(seed, [0x7472_6163, 0]);
    let weights: Vec<f64> = (0..experts).map(|i| (i as f64 + 1.0).powf(-exponent)).collect();
    let mut place: Vec<usize> = (0..experts).collect();
    for i in (1..experts).rev() {
        place.swap(i, dice.next_below(i + 1));
    }
    let draw = |dice: &mut Rng, place: &[usize], without: &[usize]| -> Option<usize> {
        let free = |e: &usize| !without.contains(e);
        let total: f64 = place.iter().zip(&weights).filter(|(e, _)| free(e)).map(|(_, w)| w).sum();
        let mut left = f64::from(dice.next_u32()) / 4_294_967_296.0 * total;
        let mut last = None;
        for (e, w) in place.iter().zip(&weights).filter(|(e, _)| free(e)) {
            last = Some(*e);
            left -= w;
            if left < 0.0 {
                break;
            }
        }
        last
    };
    let mut trace = RoutingTrace { requested: Vec::new(), predicted: Vec::new() };
    for step in 0..steps {
        if drift > 0 && step % drift == drift - 1 && experts > 1 {
            let at = dice.next_below(experts - 1);
            place.swap(at, at + 1);
            place.rotate_right(usize::from(at == 0));
        }
        let mut asked = Vec::new();
        while asked.len() < per_step.min(experts) {
            asked.extend(draw(&mut dice, &place, &asked));
        }
        let mut foretold: Vec<usize> = Vec::new();
        for e in &asked {
            let known = dice.next_below(10_000) < (accuracy * 10_000.0) as usize;
            let guess = if known { Some(*e) } else { draw(&mut dice, &place, &foretold) };
            foretold.extend(guess.filter(|t| !foretold.contains(t)));
        }
        trace.requested.push(asked);
        trace.predicted.push(foretold);
    }
    trace
}

/// Returns the share of requests that hit a cache of `capacity` experts, on a trace. With `ahead`,
/// the predicted experts of a step are fetched before the step; they never evict each other.
#[must_use]
pub fn expert_hit_rate(trace: &RoutingTrace, capacity: usize, keep: EvictionPolicy, ahead: bool) -> f64 {
    let mut cache = ExpertCache::new(capacity, keep);
    let (mut hits, mut requests) = (0u64, 0u64);
    for (step, (asked, foretold)) in trace.requested.iter().zip(&trace.predicted).enumerate() {
        let foretold: &[usize] = if ahead { foretold } else { &[] };
        for e in foretold {
            cache.fetch_expert(*e, step, foretold);
        }
        for e in asked {
            requests += 1;
            hits += u64::from(cache.holds(*e));
            cache.fetch_expert(*e, step, foretold);
            cache.count_request(*e, step);
        }
    }
    if requests > 0 { hits as f64 / requests as f64 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_are_pinned_within_the_budget() {
        let zipf: Vec<f64> = (0..16).map(|i| 1.0 / f64::from((i * 5) % 16 + 1)).collect();
        let set = select_hot_experts(&zipf, 10.0, 45.0);
        // Ranks 1 to 4: i·5 mod 16 = 0, 1, 2, 3.
        assert_eq!(set.hot, [0, 7, 10, 13]);
        let all: f64 = (1..=16).map(|i| 1.0 / f64::from(i)).sum();
        assert!((set.cold_share - (all - 25.0 / 12.0) / all).abs() < 1e-12);
        assert_eq!(select_hot_experts(&zipf, 10.0, 1e9).hot.len(), 16);
    }

    #[test]
    fn prefetch_beats_lru() {
        let trace = sample_routing_trace(3, (64, 4), 800, 1.0, 4, 0.85);
        let rate = |keep, ahead| expert_hit_rate(&trace, 16, keep, ahead);
        let (lru, ahead) = (rate(EvictionPolicy::Lru, false), rate(EvictionPolicy::Lru, true));
        assert!(ahead > lru + 0.2, "{ahead} {lru}");
        assert!(rate(EvictionPolicy::LruHotness, true) >= 0.85);
        // A prediction that is never right does not help.
        let wrong = sample_routing_trace(3, (64, 4), 800, 1.0, 4, 0.0);
        assert!(expert_hit_rate(&wrong, 16, EvictionPolicy::Lru, true) < ahead - 0.2);
    }

    #[test]
    fn eviction_follows_its_rule() {
        let trace = |steps: &[usize]| RoutingTrace {
            requested: steps.iter().map(|e| vec![*e]).collect(),
            predicted: vec![Vec::new(); steps.len()],
        };
        // 0 often, 1 recently: LRU keeps 1 when 2 is requested, the count keeps 0.
        let t = trace(&[0, 0, 0, 1, 2, 0]);
        assert_eq!(expert_hit_rate(&t, 2, EvictionPolicy::Lru, false), 2.0 / 6.0);
        assert_eq!(expert_hit_rate(&t, 2, EvictionPolicy::LruHotness, false), 3.0 / 6.0);
        // Old requests count less: after 300 steps the three requests of 0 have no weight.
        let mut steps = vec![0, 0, 0];
        steps.extend(std::iter::repeat_n(1, 2));
        steps.extend((0..400).map(|i| 3 + i % 2));
        assert!(expert_hit_rate(&trace(&steps), 2, EvictionPolicy::LruHotness, false) > 0.9);
    }
}
