//! Which experts the pools of a rank hold, and when they are fetched. Every backend with a second tier of memory decides
//! by these rules, so the counts of a run are the same on each.
//!
//! A decision follows from the routing and the policy alone, and not from the speed of a transfer: counts repeat from run
//! to run. No decision changes a value or a collective, so ranks may decide differently.

use std::collections::BTreeSet;

use tessera_ir::{CacheFetch, ExpertCache, ExpertTier, Type};

use crate::LayerTransfers;

/// The pools of all layers of a rank whose experts lie in two tiers. The weights of a layer have a pool each, with the
/// same experts in the same slots. Layers are numbered in the order of their first weights.
#[derive(Debug, Default)]
pub struct ExpertPools {
    layers: Vec<LayerPool>,
}

/// An expert, and the slot of the layer's pools in which it lies or will lie. Experts count from the first of the rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PooledExpert {
    /// The expert.
    pub expert: usize,
    /// The slot.
    pub slot: usize,
}

/// The experts that a run of a layer uses, each with its slot. A slot may have several experts, one after the other: that
/// of `held` first, and then those of `fetched` in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LayerStart {
    /// Experts that slots hold already, or that are on their way there, ascending.
    pub held: Vec<PooledExpert>,
    /// Experts that must be fetched, ascending.
    pub fetched: Vec<PooledExpert>,
}

/// Experts that are requested ahead of the next run of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AheadRequest {
    /// The layer.
    pub layer: usize,
    /// Its experts, in the order in which they are fetched.
    pub fetched: Vec<PooledExpert>,
}

#[derive(Debug)]
struct LayerPool {
    program: String,
    tier: ExpertTier,
    /// Number of the rank's first expert in the whole weights.
    first_expert: u64,
    /// Bytes of an expert, over all weights of the layer.
    expert_bytes: u64,
    cache: ExpertCache,
    /// The expert that each slot holds once its transfers have ended.
    holders: Vec<Option<usize>>,
    /// Experts that were requested ahead, until the layer begins.
    ahead: BTreeSet<usize>,
    /// Number of runs so far.
    step: usize,
    counts: LayerTransfers,
}

impl ExpertPools {
    /// Adds a weight of a program, of which a rank has the experts from `first_expert` on with the local type `ty`. Returns
    /// the number of its layer.
    pub fn add_weight(&mut self, program: &str, tier: ExpertTier, ty: &Type, first_expert: u64) -> usize {
        let experts = ty.shape.first().copied().unwrap_or(0);
        // The weights of a layer state the same tier, as the verifier checks.
        let is_layer = |own: &LayerPool| own.program == program && own.tier == tier;
        let layer = self.layers.iter().position(is_layer).unwrap_or_else(|| {
            let slots = tier.pool_size(experts) as usize;
            self.layers.push(LayerPool {
                program: program.to_string(),
                tier,
                first_expert,
                expert_bytes: 0,
                cache: ExpertCache::new(slots, tier.policy),
                holders: vec![None; slots],
                ahead: BTreeSet::new(),
                step: 0,
                counts: LayerTransfers::empty(tier.layer),
            });
            self.layers.len() - 1
        });
        self.layers[layer].expert_bytes += ty.byte_size().0.checked_div(experts).unwrap_or(0);
        layer
    }

    /// Returns the number of layers.
    #[must_use]
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Returns the expert that each slot of a layer holds once the transfers so far have ended.
    #[must_use]
    pub fn holders(&self, layer: usize) -> &[Option<usize>] {
        &self.layers[layer].holders
    }

    /// Returns the slot that holds an expert of a layer, or will hold it.
    #[must_use]
    pub fn find_slot(&self, layer: usize, expert: usize) -> Option<usize> {
        self.holders(layer).iter().position(|holder| *holder == Some(expert))
    }

    /// Returns the number of an expert of this rank in the whole weights of a layer.
    #[must_use]
    pub fn global_expert(&self, layer: usize, expert: usize) -> u64 {
        self.layers[layer].first_expert + expert as u64
    }

    /// Begins a run of a layer with the experts `needed`, ascending: gives a slot to each that no slot holds.
    pub fn start_layer(&mut self, layer: usize, needed: &[usize]) -> LayerStart {
        let own = &mut self.layers[layer];
        let step = own.step;
        let ahead = std::mem::take(&mut own.ahead);
        let used_ahead = needed.iter().filter(|expert| ahead.contains(expert)).count() as u64;
        own.counts.prefetches_used += used_ahead;
        own.counts.prefetches_unused += ahead.len() as u64 - used_ahead;
        // Experts that slots hold come first, so that none of them is evicted before its use.
        let (held, missing): (Vec<usize>, Vec<usize>) = needed.iter().partition(|e| own.cache.holds(**e));
        own.counts.hits += held.len() as u64;
        own.counts.stalls += missing.len() as u64;
        let mut start = LayerStart::default();
        for expert in held {
            own.cache.count_request(expert, step);
            let slot = own.holders.iter().position(|holder| *holder == Some(expert)).unwrap_or(0);
            start.held.push(PooledExpert { expert, slot });
        }
        for expert in missing {
            start.fetched.extend(own.assign_slot(expert, &[]));
            own.cache.count_request(expert, step);
        }
        own.counts.moved_bytes += own.expert_bytes * start.fetched.len() as u64;
        start
    }

    /// Ends a run of a layer, and returns what it did.
    pub fn end_layer(&mut self, layer: usize) -> LayerTransfers {
        let own = &mut self.layers[layer];
        own.step += 1;
        let next = LayerTransfers::empty(own.tier.layer);
        std::mem::replace(&mut own.counts, next)
    }

    /// Adds to the time for which the current run of a layer waited.
    pub fn add_wait(&mut self, layer: usize, ns: u64) {
        self.layers[layer].counts.waited_ns += ns;
    }

    /// Requests the likely experts of the layers that `layer` announces: when it has begun, of those that stand a window
    /// behind it, in this run or in the next; when it has ended, its own, if its window spans all layers. Earlier requests
    /// would take slots from experts that this run still uses.
    pub fn request_ahead(&mut self, layer: usize, has_ended: bool) -> Vec<AheadRequest> {
        let targets = self.announced_layers(layer, has_ended);
        targets
            .into_iter()
            .map(|target| AheadRequest { layer: target, fetched: self.layers[target].request_likely() })
            .collect()
    }

    /// Returns the layers of which [`ExpertPools::request_ahead`] requests experts.
    #[must_use]
    pub fn announced_layers(&self, layer: usize, has_ended: bool) -> Vec<usize> {
        let own = &self.layers[layer];
        let of_program = |other: &&LayerPool| other.program == own.program;
        let count = self.layers.iter().filter(of_program).count() as u64;
        let is_announced = |(at, other): &(usize, &LayerPool)| match other.tier.window {
            window if window >= count => has_ended && *at == layer,
            window => !has_ended && (own.tier.layer + window) % count == other.tier.layer,
        };
        let layers = self.layers.iter().enumerate().filter(|(_, other)| of_program(other));
        layers.filter(is_announced).map(|(at, _)| at).collect()
    }

    /// Empties every slot and forgets which experts were used.
    pub fn reset(&mut self) {
        for own in &mut self.layers {
            own.cache = ExpertCache::new(own.holders.len(), own.tier.policy);
            own.holders.fill(None);
            own.ahead.clear();
            own.step = 0;
            own.counts = LayerTransfers::empty(own.tier.layer);
        }
    }
}

impl LayerPool {
    /// Requests the experts that the next run will likely use and that no slot holds.
    fn request_likely(&mut self) -> Vec<PooledExpert> {
        let likely = self.cache.list_likely_experts(self.step);
        let mut fetched = Vec::new();
        for expert in &likely {
            if let Some(pooled) = self.assign_slot(*expert, &likely) {
                self.ahead.insert(*expert);
                fetched.push(pooled);
            }
        }
        self.counts.prefetches += fetched.len() as u64;
        self.counts.moved_bytes += self.expert_bytes * fetched.len() as u64;
        fetched
    }

    /// Gives an expert a slot: an empty one, or that of the expert which the policy evicts for it. Returns `None` if a
    /// slot holds it already, or holds only experts that are `spared`.
    fn assign_slot(&mut self, expert: usize, spared: &[usize]) -> Option<PooledExpert> {
        let fetch = self.cache.fetch_expert(expert, self.step, spared);
        let CacheFetch::Added { evicted } = fetch else { return None };
        let slot = self.holders.iter().position(|holder| *holder == evicted)?;
        self.holders[slot] = Some(expert);
        if let Some(evicted) = evicted {
            self.counts.evicted.push(self.first_expert + evicted as u64);
            self.counts.prefetches_unused += u64::from(self.ahead.remove(&evicted));
        }
        Some(PooledExpert { expert, slot })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::{DType, EvictionPolicy};

    /// Adds `layers` layers of two weights [6, 4, 2] in f32 each, with two slots.
    fn make_pools(layers: u64, window: u64) -> ExpertPools {
        let mut pools = ExpertPools::default();
        let ty = Type::new(DType::F32, [6, 4, 2]);
        for layer in 0..layers {
            let tier = ExpertTier { layer, resident: 2, window, policy: EvictionPolicy::LruHotness };
            let numbers = [(); 2].map(|()| pools.add_weight("p", tier, &ty, 6));
            assert_eq!(numbers, [layer as usize; 2]);
        }
        pools
    }

    fn pairs(pooled: &[PooledExpert]) -> Vec<(usize, usize)> {
        pooled.iter().map(|p| (p.expert, p.slot)).collect()
    }

    #[test]
    fn held_experts_come_before_those_that_take_their_slots() {
        let mut pools = make_pools(1, 1);
        assert_eq!(pairs(&pools.start_layer(0, &[0, 3]).fetched), [(0, 0), (3, 1)]);
        let first = pools.end_layer(0);
        assert_eq!((first.hits, first.stalls, first.moved_bytes), (0, 2, 2 * 2 * 32));
        // 3 is held, and both others take slots behind it: that of 0, which was used earlier, and then that of 3.
        let second = pools.start_layer(0, &[1, 2, 3]);
        assert_eq!((pairs(&second.held), pairs(&second.fetched)), (vec![(3, 1)], vec![(1, 0), (2, 0)]));
        assert_eq!(pools.holders(0), [Some(2), Some(3)]);
        assert_eq!(
            (pools.find_slot(0, 3), pools.find_slot(0, 1), pools.global_expert(0, 3)),
            (Some(1), None, 9)
        );
        pools.add_wait(0, 5);
        let counts = pools.end_layer(0);
        assert_eq!((counts.hits, counts.stalls, counts.waited_ns), (1, 2, 5));
        assert_eq!(counts.evicted, [6, 7]);
        pools.reset();
        assert_eq!(pools.holders(0), [None, None]);
        assert!(pools.start_layer(0, &[]).held.is_empty());
    }

    #[test]
    fn a_layer_announces_the_one_a_window_behind_it() {
        let pools = make_pools(3, 2);
        let announced = |layer| pools.announced_layers(layer, false);
        assert_eq!([announced(0), announced(1), announced(2)], [vec![2], vec![0], vec![1]]);
        assert!((0..3).all(|layer| pools.announced_layers(layer, true).is_empty()));
        let mut pools = make_pools(2, 2);
        assert!(pools.announced_layers(0, false).is_empty());
        assert_eq!(pools.announced_layers(1, true), [1]);
        // Both slots hold the experts of the run, so nothing is likelier.
        pools.start_layer(1, &[4, 5]);
        pools.end_layer(1);
        assert_eq!(pools.request_ahead(1, true), [AheadRequest { layer: 1, fetched: vec![] }]);
        // Expert 4 was used twice and lost its slot, so it is requested again.
        pools.start_layer(1, &[0, 4, 5]);
        assert_eq!(pools.holders(1), [Some(0), Some(5)]);
        pools.end_layer(1);
        assert_eq!(pairs(&pools.request_ahead(1, true)[0].fetched), [(4, 0)]);
        pools.start_layer(1, &[4]);
        let counts = pools.end_layer(1);
        assert_eq!((counts.prefetches, counts.prefetches_used, counts.hits), (1, 1, 1));
    }
}
