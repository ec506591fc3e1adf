//! Experts in two memories: which are pinned by popularity, and what a cache of them hits on a trace of routings.

use std::collections::BTreeMap;

use tessera_base::random::Dice;

/// Experts by where they lie.
#[derive(Debug, Clone, PartialEq)]
pub struct HotSet {
    /// Pinned in device memory, by number.
    pub hot: Vec<usize>,
    /// Share of assignments that ask for a cold one.
    pub cold_share: f64,
}

/// The most popular experts that fit into `budget_bytes`; ties go to the lower number.
#[must_use]
pub fn hot_experts(popularity: &[f64], bytes_each: f64, budget_bytes: f64) -> HotSet {
    let mut order: Vec<usize> = (0..popularity.len()).collect();
    order.sort_by(|a, b| popularity[*b].total_cmp(&popularity[*a]).then(a.cmp(b)));
    let fit = if bytes_each > 0.0 { (budget_bytes.max(0.0) / bytes_each) as usize } else { order.len() };
    let cold = order.split_off(fit.min(order.len()));
    order.sort_unstable();
    let all: f64 = popularity.iter().sum();
    let asked: f64 = cold.iter().map(|e| popularity[*e]).sum();
    HotSet { hot: order, cold_share: if all > 0.0 { asked / all } else { 0.0 } }
}

/// Experts asked for step by step, and what the router of an earlier layer foretold of each.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// Different experts of each step.
    pub asked: Vec<Vec<usize>>,
    /// The same number of experts per step as foretold.
    pub foretold: Vec<Vec<usize>>,
}

/// Draws a trace: `per_step` different experts a step by popularity 1 / (place + 1)^exponent, whose places turn over by
/// one in every `drift` steps; of what is foretold a share `accuracy` is what is asked, the rest is drawn alike.
#[must_use]
pub fn routing_trace(
    seed: u64,
    (experts, per_step): (usize, usize),
    steps: usize,
    exponent: f64,
    drift: usize,
    accuracy: f64,
) -> Trace {
    let mut dice = Dice::new(seed, [0x7472_6163, 0]);
    let weights: Vec<f64> = (0..experts).map(|i| (i as f64 + 1.0).powf(-exponent)).collect();
    let mut place: Vec<usize> = (0..experts).collect();
    for i in (1..experts).rev() {
        place.swap(i, dice.below(i + 1));
    }
    let draw = |dice: &mut Dice, place: &[usize], without: &[usize]| -> Option<usize> {
        let free = |e: &usize| !without.contains(e);
        let total: f64 = place.iter().zip(&weights).filter(|(e, _)| free(e)).map(|(_, w)| w).sum();
        let mut left = f64::from(dice.word()) / 4_294_967_296.0 * total;
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
    let mut trace = Trace { asked: Vec::new(), foretold: Vec::new() };
    for step in 0..steps {
        if drift > 0 && step % drift == drift - 1 && experts > 1 {
            let at = dice.below(experts - 1);
            place.swap(at, at + 1);
            place.rotate_right(usize::from(at == 0));
        }
        let mut asked = Vec::new();
        while asked.len() < per_step.min(experts) {
            asked.extend(draw(&mut dice, &place, &asked));
        }
        let mut foretold: Vec<usize> = Vec::new();
        for e in &asked {
            let known = dice.below(10_000) < (accuracy * 10_000.0) as usize;
            let told = if known { Some(*e) } else { draw(&mut dice, &place, &foretold) };
            foretold.extend(told.filter(|t| !foretold.contains(t)));
        }
        trace.asked.push(asked);
        trace.foretold.push(foretold);
    }
    trace
}

/// Whom a full cache of experts lets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// The one that was asked for longest ago.
    Lru,
    /// The one with the lowest count, halved for every 64 steps since it was asked for.
    LruHotness,
}

/// Share of requests that find their expert in a cache of `capacity` experts, on a trace. With `ahead`, what is foretold of a step is fetched before the
/// step asks; never in place of another foretold one.
#[must_use]
pub fn hit_rate(trace: &Trace, capacity: usize, keep: Keep, ahead: bool) -> f64 {
    let mut cache = Cache { capacity, keep, held: BTreeMap::new(), heat: BTreeMap::new() };
    let (mut hits, mut requests) = (0u64, 0u64);
    for (step, (asked, foretold)) in trace.asked.iter().zip(&trace.foretold).enumerate() {
        let foretold: &[usize] = if ahead { foretold } else { &[] };
        for e in foretold {
            cache.bring(*e, step, foretold);
        }
        for e in asked {
            requests += 1;
            hits += u64::from(cache.held.contains_key(e));
            cache.bring(*e, step, foretold);
            cache.touch(*e, step);
        }
    }
    if requests > 0 { hits as f64 / requests as f64 } else { 0.0 }
}

/// Steps after which a count is worth half.
const HALF_LIFE: f64 = 64.0;

struct Cache {
    capacity: usize,
    keep: Keep,
    /// Experts held, and the step of the last use.
    held: BTreeMap<usize, usize>,
    /// Requests of an expert so far, and the last one's step.
    heat: BTreeMap<usize, (f64, usize)>,
}

impl Cache {
    /// Fetches an expert that is not held, in place of the least worthy one that is not `spared`.
    fn bring(&mut self, e: usize, step: usize, spared: &[usize]) {
        if self.held.contains_key(&e) || self.capacity == 0 {
            return;
        }
        if self.held.len() >= self.capacity {
            let open = self.held.keys().copied().filter(|x| !spared.contains(x));
            let Some(least) = open.min_by(|a, b| self.worth(*a, step).total_cmp(&self.worth(*b, step)))
            else {
                return;
            };
            self.held.remove(&least);
        }
        self.held.insert(e, step);
    }

    /// Counts a request.
    fn touch(&mut self, e: usize, step: usize) {
        if let Some(held) = self.held.get_mut(&e) {
            *held = step;
        }
        let (count, last) = self.heat.get(&e).copied().unwrap_or((0.0, step));
        self.heat.insert(e, (faded(count, step - last) + 1.0, step));
    }

    fn worth(&self, e: usize, step: usize) -> f64 {
        let (count, last) = self.heat.get(&e).copied().unwrap_or((0.0, step));
        match self.keep {
            Keep::Lru => self.held.get(&e).map_or(0.0, |last| *last as f64),
            Keep::LruHotness => faded(count, step - last),
        }
    }
}

fn faded(count: f64, steps: usize) -> f64 {
    count * 0.5f64.powf(steps as f64 / HALF_LIFE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hottest_are_pinned_within_the_budget() {
        let zipf: Vec<f64> = (0..16).map(|i| 1.0 / f64::from((i * 5) % 16 + 1)).collect();
        let set = hot_experts(&zipf, 10.0, 45.0);
        // Places 1 to 4: i·5 mod 16 = 0, 1, 2, 3.
        assert_eq!(set.hot, [0, 7, 10, 13]);
        let all: f64 = (1..=16).map(|i| 1.0 / f64::from(i)).sum();
        assert!((set.cold_share - (all - 25.0 / 12.0) / all).abs() < 1e-12);
        assert_eq!(hot_experts(&zipf, 10.0, 1e9).hot.len(), 16);
    }

    #[test]
    fn looking_ahead_beats_recency() {
        let trace = routing_trace(3, (64, 4), 800, 1.0, 4, 0.85);
        let rate = |keep, ahead| hit_rate(&trace, 16, keep, ahead);
        let (lru, ahead) = (rate(Keep::Lru, false), rate(Keep::Lru, true));
        assert!(ahead > lru + 0.2, "{ahead} {lru}");
        assert!(rate(Keep::LruHotness, true) >= 0.85);
        // A prophecy that is never right does not help.
        let wrong = routing_trace(3, (64, 4), 800, 1.0, 4, 0.0);
        assert!(hit_rate(&wrong, 16, Keep::Lru, true) < ahead - 0.2);
    }

    #[test]
    fn eviction_follows_its_rule() {
        let trace = |steps: &[usize]| Trace {
            asked: steps.iter().map(|e| vec![*e]).collect(),
            foretold: vec![Vec::new(); steps.len()],
        };
        // 0 often, 1 lately: recency keeps 1 when 2 comes, hotness keeps 0.
        let t = trace(&[0, 0, 0, 1, 2, 0]);
        assert_eq!(hit_rate(&t, 2, Keep::Lru, false), 2.0 / 6.0);
        assert_eq!(hit_rate(&t, 2, Keep::LruHotness, false), 3.0 / 6.0);
        // Long ago counts less: after 300 steps of 1, 0's three are as nothing.
        let mut steps = vec![0, 0, 0];
        steps.extend(std::iter::repeat_n(1, 2));
        steps.extend((0..400).map(|i| 3 + i % 2));
        assert!(hit_rate(&trace(&steps), 2, Keep::LruHotness, false) > 0.9);
    }
}
