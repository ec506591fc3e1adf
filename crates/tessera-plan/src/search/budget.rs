//! Bytes that one rank holds, by tier and by use. Nothing here that a search asks allocates.
//!
//! A parameter in training takes its precision's bytes as weight, 4 as gradient and 12 as optimizer state: an f32
//! master and two f32 moments. With bf16 weights that is 18 bytes; the f32 master is there for fp8 too, and an f32
//! weight is its own.

use std::collections::BTreeMap;

use tessera_base::Bytes;
use tessera_cost::Machine;
use tessera_cost::knobs::{CacheAt, ExpertsAt, Layout, Optimizer, Schedule, Scheme};
use tessera_mesh::{Precision, Tier};

use super::{Budget, Candidate, Use};

/// Bytes of a gradient, summed over micro-batches in f32.
pub const GRADIENT: f64 = 4.0;

/// Bytes of an f32 master.
pub const MASTER: f64 = 4.0;

/// Bytes of two f32 moments.
pub const MOMENTS: f64 = 8.0;

/// Traffic of one optimizer step per parameter: gradients checked and unscaled (8), their norm (4), clipped (8), moments,
/// master and gradient read (16), moments and master written (12), master copied to the weight (6), gradient zeroed (4).
pub const OPTIMIZER_TRAFFIC: f64 = 58.0;

/// Layers whose weights lie ready at once where weights are gathered or fetched layer by layer.
const AHEAD: f64 = 2.0;

/// What the fullest rank of one stage holds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Held {
    /// Weights outside of routed experts, in numbers.
    pub weights: f64,
    /// Weights of routed experts, in numbers.
    pub expert_weights: f64,
    /// Bytes that one micro-batch leaves for the backward pass in all layers of the stage.
    pub keep_bytes: f64,
    /// Micro-batches whose activations are held at once.
    pub in_flight: f64,
    /// Bytes that the widest layer holds while it is at work.
    pub working_bytes: f64,
    /// Keys and values.
    pub cache_bytes: f64,
    /// Share of them that is old, and so lies where [`Candidate::cache_at`] says.
    pub old_cache_share: f64,
    /// Bytes of one tensor sent to the next stage.
    pub send_bytes: f64,
    /// Numbers of the largest layer on this rank, experts included.
    pub layer_weights: f64,
    /// Share of routed experts that lie elsewhere under [`ExpertsAt::Host`].
    pub cold_share: f64,
    /// Ranks that hold the same weights outside of experts: a sharded optimizer cuts its state over them.
    pub weight_shards: f64,
    /// Ranks that hold the same experts.
    pub expert_shards: f64,
}

impl Held {
    /// The same with these shares of experts and of old keys and values elsewhere.
    #[must_use]
    pub fn away(&self, cold_share: f64, old_cache_share: f64) -> Held {
        Held { cold_share, old_cache_share, ..*self }
    }
}

/// Bytes of one rank by tier and use.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Totals {
    bytes: [[f64; USES.len()]; Tier::ALL.len()],
}

/// All uses, in the order of their declaration.
const USES: [Use; 8] = [
    Use::Weights,
    Use::Experts,
    Use::Gradients,
    Use::Optimizer,
    Use::Activations,
    Use::Cache,
    Use::Buffers,
    Use::Library,
];

/// Bytes of the rank that holds all this under the candidate.
#[must_use]
pub fn totals(m: &Machine, c: &Candidate, training: bool, held: &Held) -> Totals {
    let mut t = Totals::default();
    spread(m, c, training, held, |tier, what, bytes| t.bytes[tier as usize][what as usize] += bytes);
    t
}

/// The same, device memory alone: what a search asks most often.
#[must_use]
pub fn hbm_bytes(m: &Machine, c: &Candidate, training: bool, held: &Held) -> f64 {
    let mut sum = 0.0;
    spread(m, c, training, held, |tier, _, bytes| {
        if tier == Tier::Hbm {
            sum += bytes;
        }
    });
    sum
}

/// Says what lies where, in the order of [`USES`].
#[inline(always)]
fn spread(m: &Machine, c: &Candidate, training: bool, held: &Held, mut add: impl FnMut(Tier, Use, f64)) {
    let width = c.layout.precision.bytes();
    // Both directions of a bidirectional pipeline keep the layers of two stages.
    let twice = if c.schedule == Schedule::DualPipe { 2.0 } else { 1.0 };
    let (dense, experts) = (held.weights * twice, held.expert_weights * twice);
    let shards = |on: bool, ranks: f64| if on { ranks.max(1.0) } else { 1.0 };
    let whole = c.optimizer == Optimizer::Full && training;
    let state = c.optimizer != Optimizer::Replicated;

    add(Tier::Hbm, Use::Weights, dense * width / shards(whole, held.weight_shards));
    let experts_here = experts * width / shards(whole, held.expert_shards);
    let cold = if c.experts_at == ExpertsAt::Host { held.cold_share } else { 0.0 };
    add(Tier::Hbm, Use::Experts, experts_here * (1.0 - cold));
    add(Tier::Host, Use::Experts, experts_here * cold);
    if training {
        let each = |dense_bytes: f64, expert_bytes: f64, on: bool| {
            dense * dense_bytes / shards(on, held.weight_shards)
                + experts * expert_bytes / shards(on, held.expert_shards)
        };
        add(Tier::Hbm, Use::Gradients, each(GRADIENT, GRADIENT, whole));
        let master = if c.layout.precision == Precision::F32 { 0.0 } else { MASTER };
        add(Tier::Hbm, Use::Optimizer, each(MOMENTS + master, MOMENTS + master, state));
        add(Tier::Hbm, Use::Activations, held.keep_bytes * held.in_flight);
    }
    let old = match c.cache_at {
        CacheAt::Hbm => (Tier::Hbm, held.old_cache_share),
        CacheAt::Peer => (Tier::Peer, held.old_cache_share),
        CacheAt::Host => (Tier::Host, held.old_cache_share),
        // Dropped, not moved.
        CacheAt::Window => (Tier::Hbm, 0.0),
    };
    add(Tier::Hbm, Use::Cache, held.cache_bytes * (1.0 - held.old_cache_share));
    add(old.0, Use::Cache, held.cache_bytes * old.1);

    let sends = if c.pp > 1 { 2.0 * if training { 2.0 } else { 1.0 } } else { 0.0 };
    // Gathered weights, and the whole gradients of the layer that is being reduced.
    let gathered = if whole { (AHEAD * width + GRADIENT) * held.layer_weights } else { 0.0 };
    let fetched = if cold > 0.0 { AHEAD * held.layer_weights * width * cold } else { 0.0 };
    add(Tier::Hbm, Use::Buffers, held.working_bytes + sends * held.send_bytes + gathered + fetched);
    add(Tier::Hbm, Use::Library, m.reserved_bytes());
}

impl Totals {
    /// Bytes in a tier.
    #[must_use]
    pub fn tier(&self, tier: Tier) -> f64 {
        self.bytes[tier as usize].iter().sum()
    }

    /// Bytes for a use, in all tiers.
    #[must_use]
    pub fn of(&self, what: Use) -> f64 {
        self.bytes.iter().map(|tier| tier[what as usize]).sum()
    }

    /// The same as a table; uses of no bytes are left out.
    #[must_use]
    pub fn budget(&self) -> Budget {
        let mut bytes = BTreeMap::new();
        for tier in Tier::ALL {
            for what in USES {
                let b = self.bytes[tier as usize][what as usize];
                if b > 0.0 {
                    bytes.insert((tier, what), Bytes(b.ceil() as u64));
                }
            }
        }
        Budget { bytes }
    }
}

/// Share of one token's keys and values that lies on a rank: whole heads, so that a head which several ranks need lies on
/// each of them, and its part of a ring of context.
#[must_use]
pub fn cache_share(kv_heads: u64, layout: &Layout) -> f64 {
    let ring = match layout.scheme {
        Scheme::Ring | Scheme::Striped => layout.ring.max(1),
        _ => 1,
    };
    let ways = u64::from((layout.tp / ring).max(1));
    let kv = kv_heads.max(1);
    kv.div_ceil(ways) as f64 / kv as f64 / f64::from(ring)
}

/// Time of one optimizer step over so many parameters of a rank.
#[must_use]
pub fn optimizer_ns(m: &Machine, parameters: f64) -> f64 {
    if parameters > 0.0 { m.pass_ns(OPTIMIZER_TRAFFIC * parameters) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use tessera_cost::Profile;
    use tessera_cost::knobs::Recompute;
    use tessera_mesh::clusters;

    use super::*;

    fn machine() -> Machine {
        let profile = Profile::named("megatron").expect("a profile");
        Machine::new(clusters::named("gb200-nvl72").expect("a cluster"), profile)
    }

    const PLAIN: Candidate = Candidate {
        layout: Layout::WHOLE,
        pp: 1,
        replicas: 8,
        expert_replicas: 2,
        schedule: Schedule::OneFOneB,
        interleave: 1,
        micro_batch: 1,
        recompute: Recompute::None,
        optimizer: Optimizer::Replicated,
        experts_at: ExpertsAt::Hbm,
        cache_at: CacheAt::Hbm,
    };

    fn held() -> Held {
        Held {
            weights: 1e9,
            expert_weights: 4e9,
            keep_bytes: 1e8,
            in_flight: 4.0,
            working_bytes: 1e6,
            cache_bytes: 8e9,
            old_cache_share: 0.75,
            send_bytes: 1e7,
            layer_weights: 1e8,
            cold_share: 0.5,
            weight_shards: 8.0,
            expert_shards: 2.0,
        }
    }

    fn parameters(c: &Candidate) -> f64 {
        let t = totals(&machine(), c, true, &held());
        [Use::Weights, Use::Experts, Use::Gradients, Use::Optimizer].map(|u| t.of(u)).iter().sum()
    }

    #[test]
    fn a_parameter_in_training_takes_eighteen_bytes_and_less_when_shared() {
        assert_eq!(parameters(&PLAIN), 18.0 * 5e9);
        let shared = Candidate { optimizer: Optimizer::Sharded, ..PLAIN };
        assert_eq!(parameters(&shared), 6.0 * 5e9 + 12.0 * (1e9 / 8.0 + 4e9 / 2.0));
        let full = Candidate { optimizer: Optimizer::Full, ..PLAIN };
        assert_eq!(parameters(&full), 18.0 * (1e9 / 8.0 + 4e9 / 2.0));
        // What is gathered for two layers at a time, and one layer's gradients.
        let buffers = |c| totals(&machine(), c, true, &held()).of(Use::Buffers);
        assert_eq!(buffers(&full) - buffers(&PLAIN), (2.0 * 2.0 + 4.0) * 1e8);
        let twice = Candidate { schedule: Schedule::DualPipe, ..PLAIN };
        assert_eq!(parameters(&twice), 2.0 * parameters(&PLAIN));
        for c in [PLAIN, shared, full, twice] {
            let all = totals(&machine(), &c, true, &held()).tier(Tier::Hbm);
            assert_eq!(hbm_bytes(&machine(), &c, true, &held()), all);
        }
    }

    #[test]
    fn narrow_weights_keep_wide_masters_and_wide_ones_are_their_own() {
        let with = |precision| Candidate { layout: Layout { precision, ..Layout::WHOLE }, ..PLAIN };
        let masters = |c: &Candidate| totals(&machine(), c, true, &held()).of(Use::Optimizer) / 5e9;
        assert_eq!(parameters(&with(Precision::Fp8)), 17.0 * 5e9);
        assert_eq!(masters(&with(Precision::Fp8)), MASTER + MOMENTS);
        assert_eq!(parameters(&with(Precision::F32)), 16.0 * 5e9);
        assert_eq!(masters(&with(Precision::F32)), MOMENTS);
    }

    #[test]
    fn what_lies_elsewhere_leaves_the_device_and_stays_in_the_sum() {
        let m = machine();
        let all = totals(&m, &PLAIN, false, &held());
        assert_eq!(all.of(Use::Gradients) + all.of(Use::Optimizer) + all.of(Use::Activations), 0.0);
        assert_eq!((all.tier(Tier::Peer), all.tier(Tier::Host)), (0.0, 0.0));
        for (at, tier) in [(CacheAt::Peer, Tier::Peer), (CacheAt::Host, Tier::Host)] {
            let t = totals(&m, &Candidate { cache_at: at, ..PLAIN }, false, &held());
            assert_eq!((t.tier(tier), t.of(Use::Cache)), (6e9, all.of(Use::Cache)));
        }
        let window = totals(&m, &Candidate { cache_at: CacheAt::Window, ..PLAIN }, false, &held());
        assert_eq!(window.of(Use::Cache), 2e9);
        let cold = totals(&m, &Candidate { experts_at: ExpertsAt::Host, ..PLAIN }, false, &held());
        assert_eq!((cold.tier(Tier::Host), cold.of(Use::Experts)), (4e9, all.of(Use::Experts)));

        let table = cold.budget();
        let sum: u64 = table.bytes.values().map(|b| b.0).sum();
        assert_eq!(sum as f64, Tier::ALL.iter().map(|t| cold.tier(*t)).sum::<f64>().ceil());
        assert_eq!(table.bytes[&(Tier::Host, Use::Experts)], Bytes(4_000_000_000));
        assert!(!table.bytes.contains_key(&(Tier::Peer, Use::Cache)));
    }

    #[test]
    fn a_head_that_several_ranks_need_lies_on_each() {
        let at = |tp, scheme, ring| Layout { tp, scheme, ring, ..Layout::WHOLE };
        assert_eq!(cache_share(8, &at(4, Scheme::Megatron, 1)), 0.25);
        assert_eq!(cache_share(8, &at(16, Scheme::Ulysses, 1)), 0.125);
        assert_eq!(cache_share(128, &at(12, Scheme::Megatron, 1)), 11.0 / 128.0);
        // One latent for all heads is whole on every rank, but for its part of a ring.
        assert_eq!(cache_share(1, &at(8, Scheme::Megatron, 1)), 1.0);
        assert_eq!(cache_share(1, &at(8, Scheme::Striped, 8)), 0.125);
    }
}
