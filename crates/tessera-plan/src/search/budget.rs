//! Computes the bytes that one rank holds, by tier and by use. The functions that the search calls
//! do not allocate.
//!
//! In training, a parameter takes its precision's bytes as weight, 4 bytes as gradient and 12 bytes
//! as optimizer state: an f32 master weight and two f32 moments. With bf16 weights that is 18
//! bytes. fp8 weights also have an f32 master; an f32 weight is its own master.

use std::collections::BTreeMap;

use tessera_base::Bytes;
use tessera_cost::MachineModel;
use tessera_cost::params::{ExpertStorage, KvCacheStorage, LayerLayout, OptimizerSharding, PipelineSchedule};
use tessera_mesh::{MemoryTier, Precision};

use super::{Candidate, MemoryBudget, MemoryUse};

/// Bytes of a gradient, accumulated over micro-batches in f32.
pub const GRADIENT_BYTES: f64 = 4.0;

/// Bytes of a parameter's f32 master weight; an f32 weight needs none.
pub const MASTER_BYTES: f64 = 4.0;

/// Bytes of a parameter's two f32 optimizer moments.
pub const MOMENTS_BYTES: f64 = 8.0;

/// Memory traffic of one optimizer step in bytes per parameter: gradients checked and unscaled (8),
/// their norm (4), clipped (8), moments, master and gradient read (16), moments and master written
/// (12), master copied to the weight (6), gradient zeroed (4).
pub const OPTIMIZER_TRAFFIC_BYTES: f64 = 58.0;

/// Layers whose weights are resident at once where weights are gathered or fetched layer by layer.
const RESIDENT_LAYERS: f64 = 2.0;

/// The memory footprint of a stage's peak rank, before placement.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StageFootprint {
    /// Number of weights other than routed experts.
    pub dense_weights: f64,
    /// Number of routed-expert weights on the rank, in all layers of the stage.
    pub expert_weights: f64,
    /// Bytes that one micro-batch saves for the backward pass in all layers of the stage.
    pub saved_bytes: f64,
    /// Micro-batches whose activations are held at once.
    pub in_flight: f64,
    /// Bytes of workspace of the layer that needs most.
    pub workspace_bytes: f64,
    /// Bytes of keys and values of all sequences on the rank; 0 in training.
    pub cache_bytes: f64,
    /// Share of the keys and values that is old, and so placed by [`Candidate::cache_at`].
    pub old_cache_share: f64,
    /// Bytes of one tensor sent to the next stage.
    pub send_bytes: f64,
    /// Number of weights of the largest layer on this rank, experts included.
    pub layer_weights: f64,
    /// Share of routed experts placed in host memory under [`ExpertStorage::Host`].
    pub cold_expert_share: f64,
    /// Number of ranks with the same dense weights; a sharded optimizer divides its state by it.
    pub weight_shards: f64,
    /// Number of ranks with the same experts.
    pub expert_shards: f64,
}

impl StageFootprint {
    /// Returns the footprint with these shares of experts and of old keys and values placed
    /// elsewhere.
    #[must_use]
    pub fn with_offload(&self, cold_share: f64, old_cache_share: f64) -> StageFootprint {
        StageFootprint { cold_expert_share: cold_share, old_cache_share, ..*self }
    }
}

/// Bytes of one rank by tier and use.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MemoryTotals {
    bytes: [[f64; MemoryUse::ALL.len()]; MemoryTier::ALL.len()],
}

/// Returns the bytes of the rank with this footprint under the candidate.
#[must_use]
pub fn compute_totals(
    m: &MachineModel,
    c: &Candidate,
    training: bool,
    footprint: &StageFootprint,
) -> MemoryTotals {
    let mut t = MemoryTotals::default();
    for_each_use(m, c, training, footprint, |tier, what, bytes| {
        t.bytes[tier as usize][what as usize] += bytes
    });
    t
}

/// Returns the device-memory bytes alone, the quantity that a search needs most often.
#[must_use]
pub fn hbm_bytes(m: &MachineModel, c: &Candidate, training: bool, footprint: &StageFootprint) -> f64 {
    let mut sum = 0.0;
    for_each_use(m, c, training, footprint, |tier, _, bytes| {
        if tier == MemoryTier::Hbm {
            sum += bytes;
        }
    });
    sum
}

/// Calls `add` for each tier and use with bytes, in the order of [`MemoryUse::ALL`].
#[inline(always)]
fn for_each_use(
    m: &MachineModel,
    c: &Candidate,
    training: bool,
    footprint: &StageFootprint,
    mut add: impl FnMut(MemoryTier, MemoryUse, f64),
) {
    let width = c.layout.precision.element_bytes();
    // A bidirectional pipeline keeps the layers of two stages per rank.
    let twice = if c.schedule == PipelineSchedule::DualPipe { 2.0 } else { 1.0 };
    let (dense, experts) = (footprint.dense_weights * twice, footprint.expert_weights * twice);
    let shards = |on: bool, ranks: f64| if on { ranks.max(1.0) } else { 1.0 };
    let whole = c.optimizer == OptimizerSharding::Full && training;
    let state = c.optimizer != OptimizerSharding::Replicated;

    add(MemoryTier::Hbm, MemoryUse::Weights, dense * width / shards(whole, footprint.weight_shards));
    let experts_here = experts * width / shards(whole, footprint.expert_shards);
    let cold = if c.experts_at == ExpertStorage::Host { footprint.cold_expert_share } else { 0.0 };
    add(MemoryTier::Hbm, MemoryUse::Experts, experts_here * (1.0 - cold));
    add(MemoryTier::Host, MemoryUse::Experts, experts_here * cold);
    if training {
        let each = |dense_bytes: f64, expert_bytes: f64, on: bool| {
            dense * dense_bytes / shards(on, footprint.weight_shards)
                + experts * expert_bytes / shards(on, footprint.expert_shards)
        };
        add(MemoryTier::Hbm, MemoryUse::Gradients, each(GRADIENT_BYTES, GRADIENT_BYTES, whole));
        let master = if c.layout.precision == Precision::F32 { 0.0 } else { MASTER_BYTES };
        add(
            MemoryTier::Hbm,
            MemoryUse::OptimizerSharding,
            each(MOMENTS_BYTES + master, MOMENTS_BYTES + master, state),
        );
        add(MemoryTier::Hbm, MemoryUse::Activations, footprint.saved_bytes * footprint.in_flight);
    }
    let old = match c.cache_at {
        KvCacheStorage::Hbm => (MemoryTier::Hbm, footprint.old_cache_share),
        KvCacheStorage::Peer => (MemoryTier::Peer, footprint.old_cache_share),
        KvCacheStorage::Host => (MemoryTier::Host, footprint.old_cache_share),
        // The window drops old entries instead of moving them.
        KvCacheStorage::Window => (MemoryTier::Hbm, 0.0),
    };
    add(MemoryTier::Hbm, MemoryUse::Cache, footprint.cache_bytes * (1.0 - footprint.old_cache_share));
    add(old.0, MemoryUse::Cache, footprint.cache_bytes * old.1);

    let sends = if c.pp > 1 { 2.0 * if training { 2.0 } else { 1.0 } } else { 0.0 };
    // Gathered weights, and the unsharded gradients of the layer under reduction.
    let gathered =
        if whole { (RESIDENT_LAYERS * width + GRADIENT_BYTES) * footprint.layer_weights } else { 0.0 };
    let fetched = if cold > 0.0 { RESIDENT_LAYERS * footprint.layer_weights * width * cold } else { 0.0 };
    add(
        MemoryTier::Hbm,
        MemoryUse::Buffers,
        footprint.workspace_bytes + sends * footprint.send_bytes + gathered + fetched,
    );
    add(MemoryTier::Hbm, MemoryUse::Library, m.reserved_bytes());
}

impl MemoryTotals {
    /// Returns the bytes in a tier, over all uses.
    #[must_use]
    pub fn tier_bytes(&self, tier: MemoryTier) -> f64 {
        self.bytes[tier as usize].iter().sum()
    }

    /// Returns the bytes of a use, over all tiers.
    #[must_use]
    pub fn use_bytes(&self, what: MemoryUse) -> f64 {
        self.bytes.iter().map(|tier| tier[what as usize]).sum()
    }

    /// Returns the bytes as a table without the empty entries.
    #[must_use]
    pub fn to_budget(&self) -> MemoryBudget {
        let mut bytes = BTreeMap::new();
        for tier in MemoryTier::ALL {
            for what in MemoryUse::ALL {
                let b = self.bytes[tier as usize][what as usize];
                if b > 0.0 {
                    bytes.insert((tier, what), Bytes(b.ceil() as u64));
                }
            }
        }
        MemoryBudget { bytes }
    }
}

/// Returns the share of one token's keys and values that a rank holds: whole heads, replicated on
/// every rank that needs them, divided by the ring of context parallelism.
#[must_use]
pub fn cache_share(kv_heads: u64, layout: &LayerLayout) -> f64 {
    let ring = layout.ring_ranks();
    let head_shards = u64::from((layout.tp / ring).max(1));
    let kv = kv_heads.max(1);
    kv.div_ceil(head_shards) as f64 / kv as f64 / f64::from(ring)
}

/// Returns the time of one optimizer step over `parameters` parameters of a rank.
#[must_use]
pub fn optimizer_ns(m: &MachineModel, parameters: f64) -> f64 {
    if parameters > 0.0 { m.memory_bound_ns(OPTIMIZER_TRAFFIC_BYTES * parameters) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use tessera_cost::Profile;
    use tessera_cost::params::{Recompute, TpScheme};
    use tessera_mesh::catalog;

    use super::*;

    fn machine() -> MachineModel {
        let profile = Profile::builtin("megatron").expect("known profile");
        MachineModel::new(catalog::get("gb200-nvl72").expect("known cluster"), profile)
    }

    const PLAIN: Candidate = Candidate {
        layout: LayerLayout::SINGLE_RANK,
        pp: 1,
        replicas: 8,
        expert_replicas: 2,
        schedule: PipelineSchedule::OneFOneB,
        interleave: 1,
        micro_batch: 1,
        recompute: Recompute::None,
        optimizer: OptimizerSharding::Replicated,
        experts_at: ExpertStorage::Hbm,
        cache_at: KvCacheStorage::Hbm,
    };

    fn held() -> StageFootprint {
        StageFootprint {
            dense_weights: 1e9,
            expert_weights: 4e9,
            saved_bytes: 1e8,
            in_flight: 4.0,
            workspace_bytes: 1e6,
            cache_bytes: 8e9,
            old_cache_share: 0.75,
            send_bytes: 1e7,
            layer_weights: 1e8,
            cold_expert_share: 0.5,
            weight_shards: 8.0,
            expert_shards: 2.0,
        }
    }

    fn parameters(c: &Candidate) -> f64 {
        let t = compute_totals(&machine(), c, true, &held());
        [MemoryUse::Weights, MemoryUse::Experts, MemoryUse::Gradients, MemoryUse::OptimizerSharding]
            .map(|u| t.use_bytes(u))
            .iter()
            .sum()
    }

    #[test]
    fn a_parameter_in_training_takes_eighteen_bytes_and_less_when_shared() {
        assert_eq!(parameters(&PLAIN), 18.0 * 5e9);
        let shared = Candidate { optimizer: OptimizerSharding::Sharded, ..PLAIN };
        assert_eq!(parameters(&shared), 6.0 * 5e9 + 12.0 * (1e9 / 8.0 + 4e9 / 2.0));
        let full = Candidate { optimizer: OptimizerSharding::Full, ..PLAIN };
        assert_eq!(parameters(&full), 18.0 * (1e9 / 8.0 + 4e9 / 2.0));
        // Gathered weights for two layers at a time, and one layer's gradients.
        let buffers = |c| compute_totals(&machine(), c, true, &held()).use_bytes(MemoryUse::Buffers);
        assert_eq!(buffers(&full) - buffers(&PLAIN), (2.0 * 2.0 + 4.0) * 1e8);
        let twice = Candidate { schedule: PipelineSchedule::DualPipe, ..PLAIN };
        assert_eq!(parameters(&twice), 2.0 * parameters(&PLAIN));
        for c in [PLAIN, shared, full, twice] {
            let all = compute_totals(&machine(), &c, true, &held()).tier_bytes(MemoryTier::Hbm);
            assert_eq!(hbm_bytes(&machine(), &c, true, &held()), all);
        }
    }

    #[test]
    fn narrow_weights_keep_wide_masters_and_wide_ones_are_their_own() {
        let with =
            |precision| Candidate { layout: LayerLayout { precision, ..LayerLayout::SINGLE_RANK }, ..PLAIN };
        let masters = |c: &Candidate| {
            compute_totals(&machine(), c, true, &held()).use_bytes(MemoryUse::OptimizerSharding) / 5e9
        };
        assert_eq!(parameters(&with(Precision::Fp8)), 17.0 * 5e9);
        assert_eq!(masters(&with(Precision::Fp8)), MASTER_BYTES + MOMENTS_BYTES);
        assert_eq!(parameters(&with(Precision::F32)), 16.0 * 5e9);
        assert_eq!(masters(&with(Precision::F32)), MOMENTS_BYTES);
    }

    #[test]
    fn what_lies_elsewhere_leaves_the_device_and_stays_in_the_sum() {
        let m = machine();
        let all = compute_totals(&m, &PLAIN, false, &held());
        assert_eq!(
            all.use_bytes(MemoryUse::Gradients)
                + all.use_bytes(MemoryUse::OptimizerSharding)
                + all.use_bytes(MemoryUse::Activations),
            0.0
        );
        assert_eq!((all.tier_bytes(MemoryTier::Peer), all.tier_bytes(MemoryTier::Host)), (0.0, 0.0));
        for (at, tier) in [(KvCacheStorage::Peer, MemoryTier::Peer), (KvCacheStorage::Host, MemoryTier::Host)]
        {
            let t = compute_totals(&m, &Candidate { cache_at: at, ..PLAIN }, false, &held());
            assert_eq!(
                (t.tier_bytes(tier), t.use_bytes(MemoryUse::Cache)),
                (6e9, all.use_bytes(MemoryUse::Cache))
            );
        }
        let window =
            compute_totals(&m, &Candidate { cache_at: KvCacheStorage::Window, ..PLAIN }, false, &held());
        assert_eq!(window.use_bytes(MemoryUse::Cache), 2e9);
        let cold =
            compute_totals(&m, &Candidate { experts_at: ExpertStorage::Host, ..PLAIN }, false, &held());
        assert_eq!(
            (cold.tier_bytes(MemoryTier::Host), cold.use_bytes(MemoryUse::Experts)),
            (4e9, all.use_bytes(MemoryUse::Experts))
        );

        let table = cold.to_budget();
        let sum: u64 = table.bytes.values().map(|b| b.0).sum();
        assert_eq!(sum as f64, MemoryTier::ALL.iter().map(|t| cold.tier_bytes(*t)).sum::<f64>().ceil());
        assert_eq!(table.bytes[&(MemoryTier::Host, MemoryUse::Experts)], Bytes(4_000_000_000));
        assert!(!table.bytes.contains_key(&(MemoryTier::Peer, MemoryUse::Cache)));
    }

    #[test]
    fn a_head_that_several_ranks_need_lies_on_each() {
        let at = |tp, scheme, ring| LayerLayout { tp, scheme, ring, ..LayerLayout::SINGLE_RANK };
        assert_eq!(cache_share(8, &at(4, TpScheme::Megatron, 1)), 0.25);
        assert_eq!(cache_share(8, &at(16, TpScheme::Ulysses, 1)), 0.125);
        assert_eq!(cache_share(128, &at(12, TpScheme::Megatron, 1)), 11.0 / 128.0);
        // A latent shared by all heads is replicated on every rank, except for its shard of a ring.
        assert_eq!(cache_share(1, &at(8, TpScheme::Megatron, 1)), 1.0);
        assert_eq!(cache_share(1, &at(8, TpScheme::Striped, 8)), 0.125);
    }
}
