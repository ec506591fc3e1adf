//! Which experts a memory for a few of them keeps: the rule that a plan states by the name of a policy.
//!
//! The cost model prices it on routing traces, and a backend follows it with the experts of a run. Both would
//! otherwise have a rule of their own, and a run would stall where its estimate does not.

use std::collections::BTreeMap;

use tessera_base::named_enum;

named_enum! {
    /// Which expert a full cache evicts when it fetches another.
    pub enum EvictionPolicy {
        /// Evicts the least recently used expert.
        Lru = "lru",
        /// Evicts the expert with the lowest count, halved for every 64 steps since its last use.
        LruHotness = "lru_hotness",
    }
}

/// The experts of a memory with room for a fixed number, and how often each was requested. A step is one use of
/// the layer.
#[derive(Debug, Clone)]
pub struct ExpertCache {
    capacity: usize,
    policy: EvictionPolicy,
    /// Cached experts, with the step of the last use.
    last_use: BTreeMap<usize, usize>,
    /// Decayed request count of an expert, with the step of the last request.
    request_counts: BTreeMap<usize, (f64, usize)>,
}

/// What a fetch changed in a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheFetch {
    /// The cache holds the expert already.
    Held,
    /// The cache holds the expert from now on, in place of `evicted` if it was full.
    Added {
        /// The expert that the cache holds no longer.
        evicted: Option<usize>,
    },
    /// All experts that the cache holds are spared, so it does not take another one.
    Refused,
}

impl ExpertCache {
    /// Creates an empty cache with room for `capacity` experts.
    #[must_use]
    pub fn new(capacity: usize, policy: EvictionPolicy) -> ExpertCache {
        ExpertCache { capacity, policy, last_use: BTreeMap::new(), request_counts: BTreeMap::new() }
    }

    /// Returns whether the cache holds an expert.
    #[must_use]
    pub fn holds(&self, expert: usize) -> bool {
        self.last_use.contains_key(&expert)
    }

    /// Takes an expert that is not cached, and evicts the lowest-ranked one that is not in `spared` if there is no
    /// room; of equal ones, the expert with the lowest number.
    pub fn fetch_expert(&mut self, expert: usize, step: usize, spared: &[usize]) -> CacheFetch {
        if self.holds(expert) {
            return CacheFetch::Held;
        }
        let mut evicted = None;
        if self.last_use.len() >= self.capacity {
            let open = self.last_use.keys().copied().filter(|x| !spared.contains(x));
            let score = |expert: usize| self.retention_score(expert, step);
            let Some(least) = open.min_by(|a, b| score(*a).total_cmp(&score(*b))) else {
                return CacheFetch::Refused;
            };
            self.last_use.remove(&least);
            evicted = Some(least);
        }
        self.last_use.insert(expert, step);
        CacheFetch::Added { evicted }
    }

    /// Records a request for an expert at `step`: decays its earlier count, then adds 1.
    pub fn count_request(&mut self, expert: usize, step: usize) {
        if let Some(held) = self.last_use.get_mut(&expert) {
            *held = step;
        }
        let (count, last) = self.request_counts.get(&expert).copied().unwrap_or((0.0, step));
        self.request_counts.insert(expert, (decay_count(count, step - last) + 1.0, step));
    }

    /// Returns the experts that a step most likely requests, as many as the cache has room for, the likeliest first:
    /// those that the policy would evict last. None of them was never requested.
    #[must_use]
    pub fn list_likely_experts(&self, step: usize) -> Vec<usize> {
        let mut ranked: Vec<(f64, usize)> = (self.request_counts.iter())
            .map(|(expert, (count, last))| match self.policy {
                EvictionPolicy::Lru => (*last as f64, *expert),
                EvictionPolicy::LruHotness => (decay_count(*count, step - last), *expert),
            })
            .collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        ranked.into_iter().take(self.capacity).map(|(_, expert)| expert).collect()
    }

    fn retention_score(&self, expert: usize, step: usize) -> f64 {
        let (count, last) = self.request_counts.get(&expert).copied().unwrap_or((0.0, step));
        match self.policy {
            EvictionPolicy::Lru => self.last_use.get(&expert).map_or(0.0, |last| *last as f64),
            EvictionPolicy::LruHotness => decay_count(count, step - last),
        }
    }
}

/// Number of steps after which a count is halved.
const HALF_LIFE: f64 = 64.0;

fn decay_count(count: f64, steps: usize) -> f64 {
    count * 0.5f64.powf(steps as f64 / HALF_LIFE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests experts one after another, one per step, and returns what each fetch changed.
    fn request(cache: &mut ExpertCache, first: usize, experts: &[usize]) -> Vec<CacheFetch> {
        let request = |(i, expert): (usize, &usize)| {
            let fetch = cache.fetch_expert(*expert, first + i, &[]);
            cache.count_request(*expert, first + i);
            fetch
        };
        experts.iter().enumerate().map(request).collect()
    }

    fn added(evicted: Option<usize>) -> CacheFetch {
        CacheFetch::Added { evicted }
    }

    #[test]
    fn evictions_follow_recency_and_hotness() {
        use CacheFetch::Held;
        let script = [0, 0, 0, 1, 2, 0, 2, 2, 2, 2, 1, 3];
        let mut hot = ExpertCache::new(2, EvictionPolicy::LruHotness);
        let fetches = request(&mut hot, 0, &script);
        // 1 was used last and once, 0 three times: the count decides. Later 2 is hotter than 0.
        let expected = [added(None), Held, Held, added(None), added(Some(1)), Held, Held, Held, Held, Held];
        assert_eq!(fetches[..10], expected);
        assert_eq!(fetches[10..], [added(Some(0)), added(Some(1))]);
        let mut recent = ExpertCache::new(2, EvictionPolicy::Lru);
        let fetches = request(&mut recent, 0, &script);
        assert_eq!(fetches[4..6], [added(Some(0)), added(Some(1))]);
        // Old requests count less: after 300 steps three of them weigh less than two new ones.
        let mut hot = ExpertCache::new(2, EvictionPolicy::LruHotness);
        request(&mut hot, 0, &[0, 0, 0]);
        request(&mut hot, 300, &[1, 1]);
        assert_eq!(request(&mut hot, 302, &[2]), [added(Some(0))]);
    }

    #[test]
    fn likely_experts_are_those_that_stay_longest() {
        let mut cache = ExpertCache::new(3, EvictionPolicy::LruHotness);
        assert_eq!(cache.list_likely_experts(0), [0usize; 0]);
        request(&mut cache, 0, &[5, 5, 5, 1, 1, 4, 7, 7]);
        assert_eq!(cache.list_likely_experts(8), [5, 7, 1]);
        assert_eq!(cache.fetch_expert(4, 8, &[5, 7]), added(Some(1)));
        assert_eq!(cache.fetch_expert(1, 8, &[5, 7, 1]), added(Some(4)));
        assert_eq!(cache.fetch_expert(4, 8, &[5, 7, 1]), CacheFetch::Refused);
        let mut recent = ExpertCache::new(2, EvictionPolicy::Lru);
        request(&mut recent, 0, &[5, 5, 5, 1, 4]);
        assert_eq!(recent.list_likely_experts(5), [4, 1]);
    }
}
