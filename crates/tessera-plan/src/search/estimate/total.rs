//! Computes the totals of a candidate: whether its memory fits, and the step time.

use tessera_cost::CollectiveOp;
use tessera_cost::GroupSpan;
use tessera_cost::moe;
use tessera_cost::params::{ExpertStorage, KvCacheStorage, OptimizerSharding};
use tessera_cost::profile::TpOverlap;
use tessera_cost::schedule::parameter_copies;
use tessera_ir::analytic_model::LayerOp;
use tessera_mesh::{LinkClass, MemoryTier, Precision};

use super::super::budget::{
    GRADIENT_BYTES, MASTER_BYTES, MOMENTS_BYTES, MemoryTotals, compute_totals, hbm_bytes, optimizer_ns,
};
use super::super::{Candidate, PREFETCH_WINDOW, StepTimes};
use super::{Estimator, LayoutCost, MemoryFit, PipelineCost, StepCost, cache_element_bytes};

impl Estimator<'_> {
    /// Returns a lower bound of the step time: layers spread evenly over stages, and everything
    /// hidden that may be hidden.
    pub fn min_step_ns(&self, c: &Candidate, node: &LayoutCost) -> f64 {
        let (mut ns, mut ep) = (0.0, 0.0);
        let layers = self.kinds.layer_kinds.len() as u32;
        for (kind, cost) in node.layer_costs.iter().enumerate() {
            let n = self.kinds.count_layers(kind, 0, layers);
            ns += n * node.layer_ns[kind];
            ep += n * cost.total.ep_exposed_ns;
        }
        let micro_batch_ns = node.first_cost.total.total_ns() + node.last_cost.total.total_ns() + ns
            - if self.overlaps_exchange(c, node) { ep } else { 0.0 };
        f64::from(node.micro_batches) * micro_batch_ns / f64::from(c.pp) * (1.0 - 1e-9)
    }

    /// Computes the step time of a candidate that fits, with its breakdown, memory and sent bytes.
    pub fn step_cost(
        &mut self,
        c: &Candidate,
        node: &LayoutCost,
        pipe: &mut PipelineCost,
        fit: MemoryFit,
    ) -> StepCost {
        let n = f64::from(node.micro_batches);
        let totals = self.peak_totals(c, pipe, &fit);
        let MemoryFit { cold_expert_share: cold_share, old_cache_share: old_share, .. } = fit;
        if !pipe.is_timed {
            self.time_stages(c, node, pipe);
        }
        let pipe = &*pipe;
        let mut sent = pipe.slowest_part.sent_bytes.map(|x| x * n);
        let passes = if self.is_training() { 2.0 * f64::from(c.interleave.max(1)) } else { 1.0 };
        (0..3).for_each(|i| sent[i] += node.send_link_bytes[i] * n * passes);

        let (mut shared_ns, mut shared_all_ns, mut step_ns) = (0.0, 0.0, 0.0);
        if self.is_training() {
            let h = &pipe.heaviest;
            let copies = f64::from(parameter_copies(c.schedule, c.pp));
            for (numbers, shards) in
                [(h.dense_weights * copies, h.weight_shards), (h.expert_weights * copies, h.expert_shards)]
            {
                let own =
                    if c.optimizer == OptimizerSharding::Replicated { numbers } else { numbers / shards };
                step_ns += optimizer_ns(&self.q.machine, own);
                let span = self.gradient_span(c, (shards.round() as u32).max(1));
                if span.ranks > 1 && numbers > 0.0 {
                    let (all, exposed) = self.sync_replicas(c, pipe, numbers, span, n, &mut sent);
                    shared_all_ns += all;
                    shared_ns += exposed;
                }
            }
        }
        let steady = n * pipe.slowest_ns;
        let (fetch_ns, prefetch) = if self.is_training() {
            (0.0, None)
        } else {
            self.fetch_cost(c, node, pipe, (cold_share, old_share), steady, &mut sent)
        };
        let p = &pipe.slowest_part;
        let times = StepTimes {
            compute_ns: n * p.compute_ns,
            memory_ns: n * p.memory_ns,
            tp_ns: n * p.tp_exposed_ns,
            ep_ns: n * (p.ep_exposed_ns - pipe.overlapped_ns),
            pp_dp_ns: pipe.sends_ns + shared_ns,
            imbalance_ns: n * p.imbalance_ns,
            bubble_ns: pipe.bubble_ns,
            launch_ns: n * pipe.exposed_launch_ns,
            fetch_ns,
            optimizer_ns: step_ns,
            collective_ns: n * (p.tp_ns + p.ep_ns) + pipe.sends_ns + shared_all_ns,
        };
        let step_ns = steady + pipe.bubble_ns + pipe.sends_ns + shared_ns + fetch_ns + step_ns;
        StepCost {
            step_ns,
            breakdown: times,
            memory: totals,
            link_bytes: sent,
            old_cache_share: old_share,
            prefetch,
        }
    }

    /// Returns the time of synchronizing gradients (and sharded weights) over replicas: all of it,
    /// and the exposed part.
    fn sync_replicas(
        &mut self,
        c: &Candidate,
        pipe: &PipelineCost,
        numbers: f64,
        span: GroupSpan,
        n: f64,
        sent: &mut [f64; 3],
    ) -> (f64, f64) {
        let m = &self.q.machine;
        let contention = m.contention_factor();
        let overlaps_backward = m.device_curves().overlap.tp == TpOverlap::Chunks;
        let prefetches_weights = m.device_curves().overlap.overlaps_gathers;
        let weight = c.layout.precision.element_bytes().clamp(1.0, 2.0);
        let mut transfer_ns = |op, bytes, times: f64| {
            let t = self.transfer_cost(op, bytes, span);
            (0..3).for_each(|i| sent[i] += t.sent_bytes[i] * times);
            t.ns * times
        };
        // A transfer that overlaps compute slows it by the contention factor.
        let exposed_ns = |ns: f64, room: f64| {
            let hidden = ns.min(room);
            ns - hidden + hidden * (contention - 1.0)
        };
        let layers = pipe.max_layers.max(1.0);
        match c.optimizer {
            OptimizerSharding::Replicated | OptimizerSharding::Sharded => {
                let ns = if c.optimizer == OptimizerSharding::Replicated {
                    transfer_ns(CollectiveOp::AllReduce, 4.0 * numbers, 1.0)
                } else {
                    transfer_ns(CollectiveOp::ReduceScatter, 4.0 * numbers, 1.0)
                        + transfer_ns(CollectiveOp::AllGather, weight * numbers, 1.0)
                };
                // Layer by layer during the last backward pass, if the executor supports that.
                let backward = pipe.slowest_ns - pipe.slowest_forward_ns;
                let room = if overlaps_backward { backward * (1.0 - 1.0 / layers) } else { 0.0 };
                (ns, exposed_ns(ns, room))
            }
            OptimizerSharding::Full => {
                // Each layer gathers its weights before use, forward and backward, and reduces its
                // gradients after. All but the first overlap the neighbours' compute, if the
                // executor supports that.
                let each = numbers / layers;
                let ns = transfer_ns(CollectiveOp::AllGather, weight * each, 2.0 * layers * n)
                    + transfer_ns(CollectiveOp::ReduceScatter, 4.0 * each, layers * n);
                let room = if prefetches_weights { n * pipe.slowest_ns * (1.0 - 1.0 / layers) } else { 0.0 };
                (ns, exposed_ns(ns, room))
            }
        }
    }

    /// Returns a lower bound of the peak rank's bytes that holds for every choice below: weights
    /// and training state spread evenly over stages and ranks, and the KV cache.
    pub fn min_bytes(&self, c: &Candidate) -> f64 {
        let l = &c.layout;
        let train = self.is_training();
        let width = l.precision.element_bytes();
        let fully_sharded = train && c.optimizer == OptimizerSharding::Full;
        let state = train && c.optimizer != OptimizerSharding::Replicated;
        let master = if l.precision == Precision::F32 { 0.0 } else { MASTER_BYTES };
        let each = |ranks: u32, shards: u32| {
            let over = |on: bool| if on { f64::from(shards.max(1)) } else { 1.0 };
            let training = if train {
                GRADIENT_BYTES / over(fully_sharded) + (MOMENTS_BYTES + master) / over(state)
            } else {
                0.0
            };
            (width / over(fully_sharded) + training) / f64::from(ranks)
        };
        let tied = if c.pp == 1 {
            self.tied_head_rows.iter().map(LayerOp::weight_count).sum::<u64>() as f64
        } else {
            0.0
        };
        let dense = (self.weight_counts[0] - tied) * each(l.tp * c.pp, c.replicas);
        let experts = match c.experts_at {
            ExpertStorage::Hbm => self.weight_counts[1] * each(l.ep * l.expert_tp * c.pp, c.expert_replicas),
            ExpertStorage::Host => 0.0,
        };
        let cache = if train || c.cache_at != KvCacheStorage::Hbm {
            0.0
        } else {
            let sequences = self.q.job.batch_size().div_ceil(u64::from(c.replicas)) as f64;
            self.cache_elements_total
                * cache_element_bytes(l.precision)
                * sequences
                * self.q.cached_tokens() as f64
                / f64::from(l.tp * c.pp)
        };
        dense + experts + cache + self.q.machine.reserved_bytes()
    }

    /// Returns a lower bound of the peak rank's bytes on top of [`Estimator::min_bytes`], for every
    /// stage split: activations as if all stages kept as few micro-batches as the last, and one
    /// layer's workspace.
    pub fn min_activation_bytes(&self, c: &Candidate, node: &LayoutCost) -> f64 {
        let few = self.in_flight(c, node, c.pp - 1);
        (node.saved_bytes / f64::from(c.pp) * few + node.min_workspace_bytes) * (1.0 - 1e-9)
    }

    /// Computes the bytes of the peak stage, with the smallest shares of experts and old keys
    /// placed elsewhere that make it fit.
    pub fn fit_memory(&self, c: &Candidate, node: &LayoutCost, pipe: &PipelineCost) -> MemoryFit {
        let m = &self.q.machine;
        let limit = m.cluster.device.memory_bytes.value;
        let train = self.is_training();
        let fullest = |cold: f64, old: f64| {
            let (mut max_bytes, mut at) = (f64::NEG_INFINITY, 0);
            for (i, (_, h)) in pipe.footprints.iter().enumerate() {
                let bytes = hbm_bytes(m, c, train, &h.with_offload(cold, old));
                if bytes > max_bytes {
                    (max_bytes, at) = (bytes, i);
                }
            }
            (max_bytes, at)
        };
        // The smallest share that fits: bytes fall in proportion to it. A little more, so that
        // rounding cannot undo it.
        let min_share =
            |none: f64, all: f64| ((none - limit) / (none - all).max(1.0) * 1.001).clamp(0.0, 1.0);
        let (mut cold, mut old) = (0.0, 0.0);
        let (mut bytes, mut at) = fullest(0.0, 0.0);
        if bytes > limit && c.experts_at == ExpertStorage::Host {
            cold = min_share(bytes, fullest(1.0, 0.0).0);
            (bytes, at) = fullest(cold, 0.0);
        }
        // An explicit window stays as given.
        let fixed = c.cache_at == KvCacheStorage::Window && self.q.attention_window().is_some();
        if bytes > limit && c.cache_at != KvCacheStorage::Hbm && !fixed {
            old = min_share(bytes, fullest(cold, 1.0).0);
            (bytes, at) = fullest(cold, old);
        }
        let mut fit = MemoryFit {
            fits: bytes <= limit,
            hbm_bytes: bytes,
            peak_index: at,
            cold_expert_share: cold,
            old_cache_share: old,
        };
        if fit.fits && (cold > 0.0 || old > 0.0) {
            let t = self.peak_totals(c, pipe, &fit);
            fit.fits = t.tier_bytes(MemoryTier::Host) <= m.cluster.host_bytes.value;
            // Data held for peers must fit in addition to their own.
            if fit.fits && t.tier_bytes(MemoryTier::Peer) > 0.0 {
                let all: f64 = (0..c.pp)
                    .map(|stage| {
                        let footprint =
                            self.stage_footprint(c, node, pipe.split, stage).with_offload(cold, old);
                        let t = compute_totals(m, c, train, &footprint);
                        t.tier_bytes(MemoryTier::Hbm) + t.tier_bytes(MemoryTier::Peer)
                    })
                    .sum();
                fit.fits = all <= limit * f64::from(c.pp);
            }
        }
        fit
    }

    /// Returns the bytes of the peak stage, by tier and use.
    pub fn peak_totals(&self, c: &Candidate, pipe: &PipelineCost, fit: &MemoryFit) -> MemoryTotals {
        let held = pipe.footprints[fit.peak_index].1.with_offload(fit.cold_expert_share, fit.old_cache_share);
        compute_totals(&self.q.machine, c, self.is_training(), &held)
    }

    /// Returns the exposed time of fetches from other tiers, beyond what the previous layer hides,
    /// and for cold experts the prefetch window and the stall per forward pass. Only experts that a
    /// predictor names can be fetched before the router runs.
    fn fetch_cost(
        &self,
        c: &Candidate,
        node: &LayoutCost,
        pipe: &PipelineCost,
        (cold, old): (f64, f64),
        steady: f64,
        sent: &mut [f64; 3],
    ) -> (f64, Option<(u32, f64)>) {
        let m = &self.q.machine;
        let h = &pipe.heaviest;
        let (mut ns, mut prefetch) = (0.0, None);
        if let (true, Some(load), Some((experts, top_k))) =
            (cold > 0.0, &node.expert_load, self.experts_and_top_k)
        {
            let ep = f64::from(c.layout.ep);
            let local = (experts as f64 / ep).ceil();
            let expert_bytes = h.expert_weights / pipe.max_expert_layers.max(1.0) / local
                * c.layout.precision.element_bytes();
            let tokens = load.mean_rows * ep / top_k as f64 / (1.0 - load.dropped).max(1e-9);
            let cold_load =
                moe::count_cold_experts(experts, top_k, c.layout.ep, tokens, self.q.routing, 1.0 - cold);
            let bytes = cold_load.selected * expert_bytes;
            let times = pipe.max_expert_layers * f64::from(node.micro_batches);
            let layer_ns = pipe.slowest_ns / pipe.max_layers.max(1.0);
            let predicted_share = self.q.space.prefetch_hit_rate.clamp(0.0, 1.0);
            let ahead_ns = m.tier_fetch_ns(MemoryTier::Host, bytes * predicted_share);
            let late_ns = m.tier_fetch_ns(MemoryTier::Host, bytes * (1.0 - predicted_share));
            ns += times * ((ahead_ns - layer_ns).max(0.0) + late_ns);
            let window = if ahead_ns > 0.0 { PREFETCH_WINDOW } else { 0 };
            prefetch = Some((window, ns / f64::from(node.micro_batches.max(1))));
            sent[LinkClass::Host as usize] += times * bytes;
        }
        if old > 0.0 && c.cache_at != KvCacheStorage::Window {
            let (tier, class) = match c.cache_at {
                KvCacheStorage::Peer => (MemoryTier::Peer, LinkClass::Domain),
                _ => (MemoryTier::Host, LinkClass::Host),
            };
            let bytes = pipe.max_cache_bytes() * old;
            ns += (m.tier_fetch_ns(tier, bytes) - steady).max(0.0);
            sent[class as usize] += bytes;
        }
        (ns, prefetch)
    }
}

#[cfg(test)]
mod tests {
    use tessera_cost::moe::Routing;
    use tessera_cost::params::{LayerLayout, PipelineSchedule, Recompute};
    use tessera_cost::{MachineModel, Profile};
    use tessera_mesh::catalog;
    use tessera_models::zoo;

    use super::super::super::budget::StageFootprint;
    use super::super::super::{Job, Objective, Pins, SearchQuery, SearchSpace};
    use super::*;

    /// Layers differ, the head outweighs them, and as many micro-batches are in flight as there are
    /// stages: any stage may have the peak.
    #[test]
    fn the_fullest_stage_is_found_wherever_it_lies() {
        let work = zoo::find_model("deepseek-v3").expect("known model").to_analytic_model(true);
        let cluster = catalog::get("gb200-nvl72").expect("known cluster").with_racks(4);
        let profile = Profile::builtin(&cluster.profile).expect("known profile");
        let job = Job::Train { batch: 18_432, sequence: 4096 };
        let space = SearchSpace::for_job(&work, job, &cluster);
        let machine = MachineModel::new(cluster, profile);
        let (objective, routing, pins) = (Objective::Throughput, Routing::Random, Pins::default());
        let q = SearchQuery { work, job, objective, machine, routing, pins, space };
        let mut p = Estimator::new(&q, 288);
        let (mut node, mut pipe) = (LayoutCost::default(), PipelineCost::default());
        let mut where_found = std::collections::BTreeSet::new();
        for pp in [1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 36, 48] {
            let stage = 288 / pp;
            for (schedule, interleave) in [
                (PipelineSchedule::OneFOneB, 1),
                (PipelineSchedule::Interleaved, 2),
                (PipelineSchedule::ZbH1, 1),
                (PipelineSchedule::ZbH2, 1),
                (PipelineSchedule::DualPipe, 1),
            ] {
                if pp * interleave > 61 {
                    continue;
                }
                for optimizer in
                    [OptimizerSharding::Replicated, OptimizerSharding::Sharded, OptimizerSharding::Full]
                {
                    let c = Candidate {
                        layout: LayerLayout { ep: stage, ..LayerLayout::SINGLE_RANK },
                        pp,
                        replicas: stage,
                        expert_replicas: 1,
                        schedule,
                        interleave,
                        micro_batch: 1,
                        recompute: Recompute::None,
                        optimizer,
                        experts_at: ExpertStorage::Hbm,
                        cache_at: KvCacheStorage::Hbm,
                    };
                    p.compute_layers(&c, &mut node);
                    p.compute_pipeline(&c, &mut node, &mut pipe);
                    let of = |stage: u32| {
                        let held = p.stage_footprint(&c, &node, pipe.split, stage);
                        let held = StageFootprint { in_flight: p.in_flight(&c, &node, stage), ..held };
                        hbm_bytes(&q.machine, &c, true, &held)
                    };
                    let fit = p.fit_memory(&c, &node, &pipe);
                    let most = (0..pp).map(of).fold(0.0, f64::max);
                    assert_eq!(fit.hbm_bytes, most, "{}", c.to_text());
                    assert!(p.min_bytes(&c) + p.min_activation_bytes(&c, &node) <= most, "{}", c.to_text());
                    where_found.insert(pipe.footprints[fit.peak_index].0.min(2));
                }
            }
        }
        assert_eq!(where_found.len(), 3, "the first stage, its neighbour and later ones: {where_found:?}");
    }
}
