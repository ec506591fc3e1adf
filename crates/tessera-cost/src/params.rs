//! The parameters of a mapping: every choice that a planner may make, with the name of each
//! value.

use tessera_base::named_enum;
use tessera_mesh::Precision;

named_enum! {
    /// Sharding scheme of a layer over tp.
    pub enum TpScheme {
        /// Megatron: column-parallel, then row-parallel weights, with one all-reduce per pair.
        Megatron = "megatron",
        /// Megatron with sequence parallelism: norms and residuals are sharded over tokens, and a
        /// reduce-scatter and an all-gather replace each all-reduce.
        MegatronSequence = "megatron_sp",
        /// Ulysses: tokens are sharded and weights replicated; an all-to-all before and after
        /// attention switches to sharded heads.
        Ulysses = "ulysses",
        /// Megatron over part of tp and context parallelism over rings of the rest: keys and values
        /// travel, and each rank holds contiguous tokens.
        Ring = "ring",
        /// Ring attention with tokens dealt round robin, which balances a causal mask.
        Striped = "striped",
        /// Keys and values sharded by column: reduce-scatter of scores, local matmul, all-gather.
        RsMmAg = "rs_mm_ag",
    }
}

named_enum! {
    /// Order of micro-batches over pipeline stages.
    pub enum PipelineSchedule {
        /// 1F1B: after some warm-up forwards, a stage runs one forward and one backward
        /// alternately.
        OneFOneB = "1f1b",
        /// One forward, one backward over `interleave` model chunks per stage.
        Interleaved = "interleaved",
        /// Weight gradients fill the bubble, with the memory of 1F1B.
        ZbH1 = "zb-h1",
        /// Weight gradients fill the bubble, with twice the memory of 1F1B.
        ZbH2 = "zb-h2",
        /// Micro-batches enter from both ends at once, and each rank holds two sets of parameters.
        DualPipe = "dualpipe",
    }
}

named_enum! {
    /// Activations that the backward pass recomputes.
    pub enum Recompute {
        /// Recomputes nothing: all activations are kept until the backward pass.
        None = "none",
        /// Recomputes the attention op, so that its scores are not kept.
        Attention = "attention",
        /// Recomputes every second layer, of which only the input is kept.
        EveryOther = "every_other",
        /// Recomputes every layer: only its input is kept.
        Full = "full",
    }
}

named_enum! {
    /// Sharding of the optimizer state over replicas.
    pub enum OptimizerSharding {
        /// Every replica holds the full state.
        Replicated = "replicated",
        /// The state and the f32 master weights are sharded over replicas.
        Sharded = "sharded",
        /// Weights and gradients are sharded too, and gathered layer by layer.
        Full = "full_shard",
    }
}

named_enum! {
    /// Memory tier of routed experts.
    pub enum ExpertStorage {
        /// All experts in device memory.
        Hbm = "hbm",
        /// The hottest experts in device memory; the others in host memory, prefetched.
        Host = "host",
    }
}

named_enum! {
    /// Memory tier of the old part of the KV cache.
    pub enum KvCacheStorage {
        /// The whole cache in device memory.
        Hbm = "hbm",
        /// Old segments in the memory of other devices of the domain.
        Peer = "peer",
        /// Old segments in host memory.
        Host = "host",
        /// Old segments are dropped, which leaves a sliding window.
        Window = "window",
    }
}

impl TpScheme {
    /// Returns whether the scheme passes keys and values around rings of ranks.
    #[must_use]
    pub fn has_rings(self) -> bool {
        matches!(self, TpScheme::Ring | TpScheme::Striped)
    }

    /// Returns whether tokens are sharded between matmuls: gathered before column-parallel matmuls,
    /// scattered after row-parallel ones.
    #[must_use]
    pub fn shards_tokens(self) -> bool {
        self == TpScheme::MegatronSequence || self.has_rings()
    }
}

/// Placement of one layer over the ranks of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerLayout {
    /// Ranks that share attention and dense ops.
    pub tp: u32,
    /// Number of those ranks in one context ring; 1 except for [`TpScheme::Ring`] and
    /// [`TpScheme::Striped`]. Heads are sharded over `tp / ring` ranks.
    pub ring: u32,
    /// Scheme by which the `tp` ranks shard attention and dense ops.
    pub scheme: TpScheme,
    /// Ranks over which the inner dim of each expert is sharded.
    pub expert_tp: u32,
    /// Ranks over which experts are distributed.
    pub ep: u32,
    /// Number format of GEMM inputs, which selects the peak rate and the GEMM curve.
    pub precision: Precision,
    /// Precision of dispatched tokens. Combined results travel in bf16, or in f32 if this is f32.
    pub wire_precision: Precision,
    /// Capacity of an expert in per cent of the even share; 0 drops nothing.
    pub capacity_pct: u32,
}

impl LayerLayout {
    /// Returns the number of ranks of one context ring; 1 for a scheme without rings.
    #[must_use]
    pub fn ring_ranks(&self) -> u32 {
        if self.scheme.has_rings() { self.ring.max(1) } else { 1 }
    }

    /// One rank without sharding.
    pub const SINGLE_RANK: LayerLayout = LayerLayout {
        tp: 1,
        ring: 1,
        scheme: TpScheme::Megatron,
        expert_tp: 1,
        ep: 1,
        precision: Precision::Bf16,
        wire_precision: Precision::Bf16,
        capacity_pct: 0,
    };
}
