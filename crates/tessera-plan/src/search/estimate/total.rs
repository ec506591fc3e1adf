//! What one arrangement takes as a whole: what fits where, and the step.

use tessera_cost::CollectiveOp;
use tessera_cost::Span;
use tessera_cost::knobs::{CacheAt, ExpertsAt, Optimizer};
use tessera_cost::moe;
use tessera_cost::profile::Hides;
use tessera_cost::schedule::parameter_copies;
use tessera_cost::tiers::{LayerTimes, choose_window};
use tessera_ir::work::Row;
use tessera_mesh::{LinkClass, Precision, Tier};

use super::super::budget::{GRADIENT, MASTER, MOMENTS, Totals, hbm_bytes, optimizer_ns, totals};
use super::super::{Candidate, Times};
use super::{Fit, Node, Pipe, Prices, Sum, cache_bytes};

/// Most layers whose fetched experts have room at once.
const MOST_WINDOW: usize = 8;

impl Prices<'_> {
    /// A step takes at least this: all layers evenly over stages, and whatever may be hidden hidden.
    pub fn least_ns(&self, c: &Candidate, node: &Node) -> f64 {
        let (mut ns, mut ep) = (0.0, 0.0);
        let layers = self.kinds.of.len() as u32;
        for (kind, cost) in node.layers.iter().enumerate() {
            let n = self.kinds.count(kind, 0, layers);
            ns += n * node.cost[kind];
            ep += n * cost.all.ep_exposed_ns;
        }
        let seen =
            node.first.all.ns() + node.last.all.ns() + ns - if self.beside(c, node) { ep } else { 0.0 };
        f64::from(node.micro_batches) * seen / f64::from(c.pp) * (1.0 - 1e-9)
    }

    /// The step of what fits.
    pub fn sum(&mut self, c: &Candidate, node: &Node, pipe: &mut Pipe, fit: Fit) -> Sum {
        let n = f64::from(node.micro_batches);
        let totals = self.totals(c, pipe, &fit);
        let Fit { cold_share, old_share, .. } = fit;
        if !pipe.timed {
            self.time(c, node, pipe);
        }
        let pipe = &*pipe;
        let mut sent = pipe.part.sent.map(|x| x * n);
        let passes = if self.train() { 2.0 * f64::from(c.interleave.max(1)) } else { 1.0 };
        (0..3).for_each(|i| sent[i] += node.sent[i] * n * passes);

        let (mut shared_ns, mut shared_all_ns, mut step_ns) = (0.0, 0.0, 0.0);
        if self.train() {
            let h = &pipe.heavy;
            let copies = f64::from(parameter_copies(c.schedule, c.pp));
            for (numbers, shards) in
                [(h.weights * copies, h.weight_shards), (h.expert_weights * copies, h.expert_shards)]
            {
                let own = if c.optimizer == Optimizer::Replicated { numbers } else { numbers / shards };
                step_ns += optimizer_ns(&self.q.machine, own);
                let span = self.gradients_span(c, (shards.round() as u32).max(1));
                if span.ranks > 1 && numbers > 0.0 {
                    let (all, exposed) = self.share(c, pipe, numbers, span, n, &mut sent);
                    shared_all_ns += all;
                    shared_ns += exposed;
                }
            }
        }
        let steady = n * pipe.work_ns;
        let (fetch_ns, prefetch) = if self.train() {
            (0.0, None)
        } else {
            self.fetch(c, node, pipe, (cold_share, old_share), steady, &mut sent)
        };
        let p = &pipe.part;
        let times = Times {
            compute_ns: n * p.compute_ns,
            memory_ns: n * p.memory_ns,
            tp_ns: n * p.tp_exposed_ns,
            ep_ns: n * (p.ep_exposed_ns - pipe.saved_ns),
            pp_dp_ns: pipe.sends_ns + shared_ns,
            imbalance_ns: n * p.imbalance_ns,
            bubble_ns: pipe.bubble_ns,
            launch_ns: n * pipe.launch_ns,
            fetch_ns,
            optimizer_ns: step_ns,
            collective_ns: n * (p.tp_ns + p.ep_ns) + pipe.sends_ns + shared_all_ns,
        };
        let step_ns = steady + pipe.bubble_ns + pipe.sends_ns + shared_ns + fetch_ns + step_ns;
        Sum { step_ns, times, totals, sent, old_share, prefetch }
    }

    /// Gradients (and weights, where they are shared) of so many numbers over replicas: all of it, and what is seen.
    fn share(
        &mut self,
        c: &Candidate,
        pipe: &Pipe,
        numbers: f64,
        span: Span,
        n: f64,
        sent: &mut [f64; 3],
    ) -> (f64, f64) {
        let m = &self.q.machine;
        let contention = m.contention();
        let behind = m.curves().overlap.tp == Hides::Chunks;
        let ahead = m.curves().overlap.gathers;
        let weight = c.layout.precision.bytes().clamp(1.0, 2.0);
        let mut go = |op, bytes, times: f64| {
            let t = self.wire(op, bytes, span);
            (0..3).for_each(|i| sent[i] += t.sent[i] * times);
            t.ns * times
        };
        // A transfer that runs beside compute slows it by the contention.
        let seen = |ns: f64, room: f64| {
            let hidden = ns.min(room);
            ns - hidden + hidden * (contention - 1.0)
        };
        let layers = pipe.layers.max(1.0);
        match c.optimizer {
            Optimizer::Replicated | Optimizer::Sharded => {
                let ns = if c.optimizer == Optimizer::Replicated {
                    go(CollectiveOp::AllReduce, 4.0 * numbers, 1.0)
                } else {
                    go(CollectiveOp::ReduceScatter, 4.0 * numbers, 1.0)
                        + go(CollectiveOp::AllGather, weight * numbers, 1.0)
                };
                // Layer by layer behind the last backward pass, where the executor does that.
                let backward = pipe.work_ns - pipe.forward_ns;
                let room = if behind { backward * (1.0 - 1.0 / layers) } else { 0.0 };
                (ns, seen(ns, room))
            }
            Optimizer::Full => {
                // Each layer's weights before it is used, forward and backward, and its gradients after; all but the first
                // behind the neighbours' work, where the executor does that.
                let each = numbers / layers;
                let ns = go(CollectiveOp::AllGather, weight * each, 2.0 * layers * n)
                    + go(CollectiveOp::ReduceScatter, 4.0 * each, layers * n);
                let room = if ahead { n * pipe.work_ns * (1.0 - 1.0 / layers) } else { 0.0 };
                (ns, seen(ns, room))
            }
        }
    }

    /// Bytes that the fullest rank has at least, whatever is chosen below: weights and what belongs to them evenly over
    /// stages and ranks, and what the job caches.
    pub fn least_bytes(&self, c: &Candidate) -> f64 {
        let l = &c.layout;
        let train = self.train();
        let width = l.precision.bytes();
        let whole = train && c.optimizer == Optimizer::Full;
        let state = train && c.optimizer != Optimizer::Replicated;
        let master = if l.precision == Precision::F32 { 0.0 } else { MASTER };
        let each = |ranks: u32, shards: u32| {
            let over = |on: bool| if on { f64::from(shards.max(1)) } else { 1.0 };
            let training =
                if train { GRADIENT / over(whole) + (MOMENTS + master) / over(state) } else { 0.0 };
            (width / over(whole) + training) / f64::from(ranks)
        };
        let tied = if c.pp == 1 { self.tied_row.iter().map(Row::weights).sum::<u64>() as f64 } else { 0.0 };
        let dense = (self.numbers[0] - tied) * each(l.tp * c.pp, c.replicas);
        let experts = match c.experts_at {
            ExpertsAt::Hbm => self.numbers[1] * each(l.ep * l.expert_tp * c.pp, c.expert_replicas),
            ExpertsAt::Host => 0.0,
        };
        let cache = if train || c.cache_at != CacheAt::Hbm {
            0.0
        } else {
            let sequences = self.q.job.batch().div_ceil(u64::from(c.replicas)) as f64;
            self.cached * cache_bytes(l.precision) * sequences * self.q.cached_tokens() as f64
                / f64::from(l.tp * c.pp)
        };
        dense + experts + cache + self.q.machine.reserved_bytes()
    }

    /// Bytes beside those of [`Prices::least_bytes`] that the fullest rank has at least, however layers are cut: what the
    /// backward pass needs, as if all stages kept as few micro-batches as the last, and what a layer works in.
    pub fn least_kept_bytes(&self, c: &Candidate, node: &Node) -> f64 {
        let few = self.in_flight(c, node, c.pp - 1);
        (node.keep_bytes / f64::from(c.pp) * few + node.working_bytes) * (1.0 - 1e-9)
    }

    /// Bytes of the fullest stage, with as many experts and old keys elsewhere as must be: shares of both.
    pub fn fit(&self, c: &Candidate, node: &Node, pipe: &Pipe) -> Fit {
        let m = &self.q.machine;
        let limit = m.cluster.device.memory_bytes.value;
        let train = self.train();
        let fullest = |cold: f64, old: f64| {
            let (mut most, mut at) = (f64::NEG_INFINITY, 0);
            for (i, (_, h)) in pipe.held.iter().enumerate() {
                let bytes = hbm_bytes(m, c, train, &h.away(cold, old));
                if bytes > most {
                    (most, at) = (bytes, i);
                }
            }
            (most, at)
        };
        // The least share that fits: bytes fall in proportion to it. A little more, so that rounding cannot undo it.
        let least = |none: f64, all: f64| ((none - limit) / (none - all).max(1.0) * 1.001).clamp(0.0, 1.0);
        let (mut cold, mut old) = (0.0, 0.0);
        let (mut bytes, mut at) = fullest(0.0, 0.0);
        if bytes > limit && c.experts_at == ExpertsAt::Host {
            cold = least(bytes, fullest(1.0, 0.0).0);
            (bytes, at) = fullest(cold, 0.0);
        }
        // A window that is given is not made narrower.
        let fixed = c.cache_at == CacheAt::Window && self.q.window().is_some();
        if bytes > limit && c.cache_at != CacheAt::Hbm && !fixed {
            old = least(bytes, fullest(cold, 1.0).0);
            (bytes, at) = fullest(cold, old);
        }
        let mut fit = Fit { fits: bytes <= limit, hbm_bytes: bytes, at, cold_share: cold, old_share: old };
        if fit.fits && (cold > 0.0 || old > 0.0) {
            let t = self.totals(c, pipe, &fit);
            fit.fits = t.tier(Tier::Host) <= m.cluster.host_bytes.value;
            // What peers hold for others must fit beside their own.
            if fit.fits && t.tier(Tier::Peer) > 0.0 {
                let all: f64 = (0..c.pp)
                    .map(|stage| {
                        let held = self.held(c, node, pipe.cut, stage).away(cold, old);
                        let t = totals(m, c, train, &held);
                        t.tier(Tier::Hbm) + t.tier(Tier::Peer)
                    })
                    .sum();
                fit.fits = all <= limit * f64::from(c.pp);
            }
        }
        fit
    }

    /// What the fullest stage holds, by tier and use.
    pub fn totals(&self, c: &Candidate, pipe: &Pipe, fit: &Fit) -> Totals {
        let held = pipe.held[fit.at].1.away(fit.cold_share, fit.old_share);
        totals(&self.q.machine, c, self.train(), &held)
    }

    /// What fetching from other tiers adds beyond what the layer before hides, and of that for cold experts the window and
    /// the wait of a pass. Only experts that a predictor names can be fetched before the router has.
    fn fetch(
        &self,
        c: &Candidate,
        node: &Node,
        pipe: &Pipe,
        (cold, old): (f64, f64),
        steady: f64,
        sent: &mut [f64; 3],
    ) -> (f64, Option<(u32, f64)>) {
        let m = &self.q.machine;
        let h = &pipe.heavy;
        let (mut ns, mut prefetch) = (0.0, None);
        if let (true, Some(load), Some((experts, top_k))) = (cold > 0.0, &node.load, self.routed) {
            let ep = f64::from(c.layout.ep);
            let local = (experts as f64 / ep).ceil();
            let one = h.expert_weights / pipe.expert_layers.max(1.0) / local * c.layout.precision.bytes();
            let tokens = load.rows * ep / top_k as f64 / (1.0 - load.dropped).max(1e-9);
            let asked = moe::cold(experts, top_k, c.layout.ep, tokens, self.q.routing, 1.0 - cold);
            let bytes = asked.touched * one;
            let times = pipe.expert_layers * f64::from(node.micro_batches);
            let layer_ns = pipe.work_ns / pipe.layers.max(1.0);
            let named = self.q.space.forecast.clamp(0.0, 1.0);
            let ahead_ns = m.tier_ns(Tier::Host, bytes * named);
            let late_ns = m.tier_ns(Tier::Host, bytes * (1.0 - named));
            ns += times * ((ahead_ns - layer_ns).max(0.0) + late_ns);
            prefetch =
                Some((self.window(c, node, pipe, ahead_ns), ns / f64::from(node.micro_batches.max(1))));
            sent[LinkClass::Host as usize] += times * bytes;
        }
        if old > 0.0 && c.cache_at != CacheAt::Window {
            let (tier, class) = match c.cache_at {
                CacheAt::Peer => (Tier::Peer, LinkClass::Domain),
                _ => (Tier::Host, LinkClass::Host),
            };
            let bytes = pipe.cache_bytes() * old;
            ns += (m.tier_ns(tier, bytes) - steady).max(0.0);
            sent[class as usize] += bytes;
        }
        (ns, prefetch)
    }

    /// Layers with room for what is fetched ahead, on the stage that has most layers with experts; 0 where nothing is.
    fn window(&self, c: &Candidate, node: &Node, pipe: &Pipe, fetch_ns: f64) -> u32 {
        if fetch_ns <= 0.0 {
            return 0;
        }
        let layers = |stage: u32| -> Vec<LayerTimes> {
            let all = self.pieces(c, pipe, stage).into_iter().flatten();
            all.map(|layer| {
                let kind = self.kinds.of[layer as usize] as usize;
                let (all_ns, before_ns) = (node.cost[kind], node.before[kind]);
                let fetch_ns = if self.rows[kind].1.is_empty() { 0.0 } else { fetch_ns };
                LayerTimes { before_ns, after_ns: (all_ns - before_ns).max(0.0), fetch_ns }
            })
            .collect()
        };
        let experts = |of: &Vec<LayerTimes>| of.iter().filter(|l| l.fetch_ns > 0.0).count();
        let fullest = (0..c.pp).map(layers).max_by_key(experts).unwrap_or_default();
        if fullest.is_empty() { 0 } else { choose_window(&fullest, MOST_WINDOW).window as u32 }
    }
}

#[cfg(test)]
mod tests {
    use tessera_cost::knobs::{Layout, Recompute, Schedule};
    use tessera_cost::moe::Routing;
    use tessera_cost::{Machine, Profile};
    use tessera_mesh::clusters;
    use tessera_models::zoo;

    use super::super::super::budget::Held;
    use super::super::super::{Job, Objective, Pins, Question, Space};
    use super::*;

    /// Layers that differ, a head that outweighs them, and as many micro-batches in flight as there are stages: any of the
    /// stages may be the fullest.
    #[test]
    fn the_fullest_stage_is_found_wherever_it_lies() {
        let work = zoo::named("deepseek-v3").expect("a model").work(true);
        let cluster = clusters::named("gb200-nvl72").expect("a cluster").with_racks(4);
        let profile = Profile::named(&cluster.profile).expect("a profile");
        let job = Job::Train { batch: 18_432, sequence: 4096 };
        let space = Space::of(&work, job, &cluster);
        let machine = Machine::new(cluster, profile);
        let (objective, routing, pins) = (Objective::Throughput, Routing::Random, Pins::default());
        let q = Question { work, job, objective, machine, routing, pins, space };
        let mut p = Prices::new(&q, 288);
        let (mut node, mut pipe) = (Node::default(), Pipe::default());
        let mut where_found = std::collections::BTreeSet::new();
        for pp in [1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 36, 48] {
            let stage = 288 / pp;
            for (schedule, interleave) in [
                (Schedule::OneFOneB, 1),
                (Schedule::Interleaved, 2),
                (Schedule::ZbH1, 1),
                (Schedule::ZbH2, 1),
                (Schedule::DualPipe, 1),
            ] {
                if pp * interleave > 61 {
                    continue;
                }
                for optimizer in [Optimizer::Replicated, Optimizer::Sharded, Optimizer::Full] {
                    let c = Candidate {
                        layout: Layout { ep: stage, ..Layout::WHOLE },
                        pp,
                        replicas: stage,
                        expert_replicas: 1,
                        schedule,
                        interleave,
                        micro_batch: 1,
                        recompute: Recompute::None,
                        optimizer,
                        experts_at: ExpertsAt::Hbm,
                        cache_at: CacheAt::Hbm,
                    };
                    p.node(&c, &mut node);
                    p.pipe(&c, &mut node, &mut pipe);
                    let of = |stage: u32| {
                        let held = p.held(&c, &node, pipe.cut, stage);
                        let held = Held { in_flight: p.in_flight(&c, &node, stage), ..held };
                        hbm_bytes(&q.machine, &c, true, &held)
                    };
                    let fit = p.fit(&c, &node, &pipe);
                    let most = (0..pp).map(of).fold(0.0, f64::max);
                    assert_eq!(fit.hbm_bytes, most, "{}", c.text());
                    assert!(p.least_bytes(&c) + p.least_kept_bytes(&c, &node) <= most, "{}", c.text());
                    where_found.insert(pipe.held[fit.at].0.min(2));
                }
            }
        }
        assert_eq!(where_found.len(), 3, "the first stage, its neighbour and later ones: {where_found:?}");
    }
}
