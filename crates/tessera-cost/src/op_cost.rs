//! Cost of one layer op on the slowest rank: time, operations, traffic and weights, forward and
//! backward. Collectives belong to the resharding between ops; [`crate::layer`] adds them.

use std::ops::{Add, AddAssign, Mul};

use tessera_ir::analytic_model::{LayerOp, LayerOpKind, OpSharding};
use tessera_mesh::Precision;

use crate::collective_cost::GroupSpan;
use crate::layer_load::LayerLoad;
use crate::machine_model::{AttentionWork, MachineModel};
use crate::moe::ExpertLoad;
use crate::params::{LayerLayout, TpScheme};

/// Bytes of one activation value.
pub(crate) const ACTIVATION: f64 = 2.0;

/// Matmuls in the backward pass of fused attention over those in its forward pass: five over two.
const FUSED_BACKWARD_FACTOR: f64 = 2.5;

/// Cost of one pass through some ops on one rank. Times are summed: nothing overlaps except
/// transfers whose exposed time is given separately.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CostParts {
    /// Time of GEMMs and attention.
    pub compute_ns: f64,
    /// Time of memory-bound kernels.
    pub memory_ns: f64,
    /// Time of tp transfers, hidden or not.
    pub tp_ns: f64,
    /// Time that tp transfers add, including the slowdown of overlapped GEMMs.
    pub tp_exposed_ns: f64,
    /// Time of dispatch, combine and expert-tp transfers, hidden or not.
    pub ep_ns: f64,
    /// Time that dispatch, combine and expert-tp transfers add.
    pub ep_exposed_ns: f64,
    /// Additional time of the slowest rank over the mean rank, from uneven experts and causal
    /// rings.
    pub imbalance_ns: f64,
    /// Number of launched kernels and collectives.
    pub launches: f64,
    /// Floating-point operations; a multiply-add counts two.
    pub flops: f64,
    /// Bytes that a rank sends, by link class in the order of [`tessera_mesh::LinkClass::ALL`].
    pub sent_bytes: [f64; 3],
}

impl CostParts {
    /// Returns the total time without launch overhead.
    #[must_use]
    pub fn total_ns(&self) -> f64 {
        self.compute_ns + self.memory_ns + self.tp_exposed_ns + self.ep_exposed_ns + self.imbalance_ns
    }
}

impl CostParts {
    /// Combines the numbers of two costs, one by one.
    fn combine(self, b: CostParts, f: impl Fn(f64, f64) -> f64) -> CostParts {
        CostParts {
            compute_ns: f(self.compute_ns, b.compute_ns),
            memory_ns: f(self.memory_ns, b.memory_ns),
            tp_ns: f(self.tp_ns, b.tp_ns),
            tp_exposed_ns: f(self.tp_exposed_ns, b.tp_exposed_ns),
            ep_ns: f(self.ep_ns, b.ep_ns),
            ep_exposed_ns: f(self.ep_exposed_ns, b.ep_exposed_ns),
            imbalance_ns: f(self.imbalance_ns, b.imbalance_ns),
            launches: f(self.launches, b.launches),
            flops: f(self.flops, b.flops),
            sent_bytes: [0, 1, 2].map(|class| f(self.sent_bytes[class], b.sent_bytes[class])),
        }
    }
}

impl Add for CostParts {
    type Output = CostParts;
    fn add(self, b: CostParts) -> CostParts {
        self.combine(b, |x, y| x + y)
    }
}

impl AddAssign for CostParts {
    fn add_assign(&mut self, b: CostParts) {
        *self = *self + b;
    }
}

impl Mul<f64> for CostParts {
    type Output = CostParts;
    fn mul(self, factor: f64) -> CostParts {
        self.combine(self, |x, _| x * factor)
    }
}

/// The share of tokens and features of one layer on the slowest rank. Uneven shards are rounded up
/// to whole tokens, heads and features.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankShare {
    /// Tokens that enter a matmul sharded by features.
    pub tokens: f64,
    /// Tokens of ops for which every rank holds all features.
    pub whole_tokens: f64,
    /// Number of ranks over which features are sharded.
    pub feature_shards: u32,
    /// Number of ranks of one context ring; 1 without a ring.
    pub ring: u32,
    /// Query heads of the slowest rank, and of the layer.
    heads: (u64, u64),
    /// KV heads of the slowest rank, and of the layer.
    kv_heads: (u64, u64),
    /// Experts that a token selects.
    pub top_k: f64,
}

impl RankShare {
    /// Returns the slowest rank's share of a layer with the ops `rows` and a micro-batch of
    /// `tokens`.
    #[must_use]
    pub fn for_layer(rows: &[LayerOp], layout: &LayerLayout, tokens: f64) -> RankShare {
        let ring = layout.ring_ranks();
        let tp = layout.tp.max(1);
        let shard_tokens = |n: u32| (tokens / f64::from(n)).ceil();
        let (tokens, whole_tokens, shards, head_shards) = match layout.scheme {
            TpScheme::Megatron => (tokens, tokens, tp, tp),
            TpScheme::MegatronSequence => (tokens, shard_tokens(tp), tp, tp),
            TpScheme::RsMmAg => (tokens, tokens, tp, tp),
            TpScheme::Ulysses => (shard_tokens(tp), shard_tokens(tp), 1, tp),
            TpScheme::Ring | TpScheme::Striped => {
                (shard_tokens(ring), shard_tokens(tp), tp / ring, tp / ring)
            }
        };
        let largest_share = |heads: u64| (heads.div_ceil(u64::from(head_shards.max(1))), heads);
        let mut share = RankShare {
            tokens,
            whole_tokens,
            feature_shards: shards,
            ring,
            heads: (1, 1),
            kv_heads: (1, 1),
            top_k: 1.0,
        };
        for row in rows {
            match row.kind {
                LayerOpKind::Attention { heads, kv_heads, .. } => {
                    (share.heads, share.kv_heads) = (largest_share(heads), largest_share(kv_heads));
                }
                LayerOpKind::Experts { top_k, .. } => share.top_k = top_k.max(1) as f64,
                _ => {}
            }
        }
        share
    }

    /// Returns the span of the ranks that shard features, which are a part of the span of tp.
    #[must_use]
    pub fn feature_span(&self, tp: GroupSpan) -> GroupSpan {
        let rings = (tp.ranks / self.feature_shards.max(1)).max(1);
        GroupSpan { ranks: self.feature_shards, domains: tp.domains.div_ceil(rings).min(self.feature_shards) }
    }

    /// Returns the query heads of the slowest rank.
    fn head_count(&self) -> f64 {
        self.heads.0 as f64
    }

    /// Returns the KV heads of the slowest rank; a head that several ranks need lies on each.
    fn kv_head_count(&self) -> f64 {
        self.kv_heads.0 as f64
    }

    /// Returns the slowest rank's part of `features`: whole heads if the sharding is by heads.
    fn sharded_features(&self, features: u64, by_head: bool, attention: Option<&LayerOpKind>) -> f64 {
        if self.feature_shards == 1 {
            return features as f64;
        }
        if !by_head || self.heads.1 <= 1 {
            return features.div_ceil(u64::from(self.feature_shards)) as f64;
        }
        if let Some(LayerOpKind::Attention { heads, kv_heads, qk, v, .. }) = attention
            && features == heads * qk + kv_heads * (qk + v)
        {
            return self.head_count() * *qk as f64 + self.kv_head_count() * (qk + v) as f64;
        }
        features as f64 * self.heads.0 as f64 / self.heads.1 as f64
    }
}

/// Sizes of the attention of one rank, per sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RankAttention {
    /// Whether a ring gathers queries instead of passing keys around, because the queries are
    /// fewer.
    pub queries_travel: bool,
    pub sequences: f64,
    /// Queries of one sequence over all ranks.
    pub own: f64,
    pub heads: f64,
    pub kv_heads: f64,
    pub qk: f64,
    pub v: f64,
}

impl RankShare {
    /// Returns the sizes of this rank's attention; `None` for other ops.
    pub(crate) fn rank_attention(&self, op: &LayerOpKind, load: &LayerLoad) -> Option<RankAttention> {
        let &LayerOpKind::Attention { qk, v, latent, .. } = op else { return None };
        let sequences = load.sequences.max(1.0);
        let own = load.tokens / sequences;
        let cached = !load.training && own < load.keys;
        let (heads, kv_heads) = (self.heads.0 as f64, self.kv_heads.0 as f64);
        let (qk, v, kv_heads) = match latent {
            // Otherwise every call would have to expand all cached tokens.
            Some(l) if cached => (l.qk, l.v, 1.0),
            _ => (qk, v, kv_heads),
        };
        let queries_travel = self.ring > 1 && cached && own * heads < load.visible_keys() * kv_heads;
        Some(RankAttention { queries_travel, sequences, own, heads, kv_heads, qk: qk as f64, v: v as f64 })
    }
}

/// Cost of one op on the slowest rank, without collectives.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OpCost {
    /// Forward pass; `layer_cost` adds the transfers, here and to the gradients.
    pub forward: CostParts,
    /// Gradient of the inputs, with all of attention's backward pass; 0 in inference.
    pub backward_input: CostParts,
    /// Gradient of the weights, added up in f32; 0 in inference.
    pub backward_weight: CostParts,
    /// Minimum traffic of the forward pass, with each value moved once.
    pub traffic_bytes: f64,
    /// Number of weights outside routed experts.
    pub weights: f64,
    /// Number of weights of the routed experts that the rank holds.
    pub expert_weights: f64,
    /// Bytes of inputs, masks and scores that are kept for the backward pass; 0 in inference.
    pub kept_bytes: f64,
    /// Part of the kept bytes that holds attention scores.
    pub scores_bytes: f64,
    /// Bytes of inputs and outputs together.
    pub working_bytes: f64,
}

/// Returns the cost of op `at` of `rows` on the slowest rank.
#[must_use]
pub fn op_cost(
    m: &MachineModel,
    rows: &[LayerOp],
    at: usize,
    share: &RankShare,
    layout: &LayerLayout,
    load: &LayerLoad,
    experts: &ExpertLoad,
) -> OpCost {
    let rank = OpPricer { machine: m, share, layout, load, experts };
    let row = &rows[at];
    let mut c = match row.kind {
        LayerOpKind::Matmul { k, n, bias } => rank.matmul_cost(rows, at, (k, n), bias),
        LayerOpKind::Attention { .. } => rank.attention_cost(&row.kind),
        LayerOpKind::Experts { experts, k, n, matrices, .. } => rank.experts_cost(experts, (k, n), matrices),
        LayerOpKind::Elementwise { reads, writes, weights } => {
            rank.elementwise_cost(row.sharding, reads, writes, weights)
        }
        LayerOpKind::Embedding { rows, width } => rank.embed_cost(row.sharding, rows, width),
    };
    c.kept_bytes += rank.kept_bytes(row);
    if !load.training {
        (c.backward_input, c.backward_weight) = (CostParts::default(), CostParts::default());
        (c.kept_bytes, c.scores_bytes) = (0.0, 0.0);
    }
    c
}

/// Returns the cost of one memory-bound kernel that moves `bytes`.
fn memory_bound_part(m: &MachineModel, bytes: f64) -> CostParts {
    CostParts { memory_ns: m.memory_bound_ns(bytes), launches: 1.0, ..CostParts::default() }
}

fn gemm_part(ns: f64, flops: f64) -> CostParts {
    CostParts { compute_ns: ns, launches: 1.0, flops, ..CostParts::default() }
}

/// The inputs for pricing the ops of one rank.
struct OpPricer<'a> {
    machine: &'a MachineModel,
    share: &'a RankShare,
    layout: &'a LayerLayout,
    load: &'a LayerLoad,
    experts: &'a ExpertLoad,
}

impl OpPricer<'_> {
    fn expert_tp(&self) -> f64 {
        f64::from(self.layout.expert_tp.max(1))
    }

    /// Returns the tokens of an op, weighted by the rank's share of each token.
    fn op_tokens(&self, cut: OpSharding) -> f64 {
        match cut {
            // If tokens are sharded, the input of a column-parallel matmul is gathered again
            // instead of kept.
            OpSharding::Replicated | OpSharding::Col => self.share.whole_tokens,
            OpSharding::Row | OpSharding::Heads => self.share.tokens / f64::from(self.share.feature_shards),
            OpSharding::Experts => self.experts.mean_rows / self.share.top_k,
        }
    }

    /// Returns the bytes of an op's inputs and masks that the rank keeps for the backward pass.
    fn kept_bytes(&self, row: &LayerOp) -> f64 {
        let keep = row.activation_bytes as f64;
        if row.sharding != OpSharding::Experts {
            return keep * self.op_tokens(row.sharding);
        }
        let inputs = match row.kind {
            LayerOpKind::Experts { k, .. } => ACTIVATION * self.share.top_k * k as f64,
            _ => 0.0,
        };
        let inner = (keep - inputs).max(0.0) / self.expert_tp();
        self.op_tokens(row.sharding) * self.experts.slowest_over_mean * (inputs + inner)
    }

    fn matmul_cost(&self, rows: &[LayerOp], at: usize, (k, n): (u64, u64), bias: bool) -> OpCost {
        let (m, share, p) = (self.machine, self.share, self.layout.precision);
        let attention = rows.iter().position(|r| matches!(r.kind, LayerOpKind::Attention { .. }));
        let op = attention.map(|a| &rows[a].kind);
        // Before attention, columns are heads; the first row-parallel matmul after it contracts
        // them.
        let by_head =
            attention.is_some_and(|a| at < a || rows[a..at].iter().all(|r| r.sharding != OpSharding::Row));
        let (t, k, n) = match rows[at].sharding {
            OpSharding::Col | OpSharding::Heads => {
                (share.tokens, k as f64, share.sharded_features(n, by_head, op))
            }
            OpSharding::Row => (share.tokens, share.sharded_features(k, by_head, op), n as f64),
            OpSharding::Replicated | OpSharding::Experts => (share.whole_tokens, k as f64, n as f64),
        };
        let flops = 2.0 * t * n * k;
        let numbers = n * k;
        // Gradients accumulate in f32: in the GEMM epilogue, or in a kernel that reads the new
        // gradients at 2 bytes.
        let weight_ns = m.gemm_ns(k, n, t, p);
        let weight = if m.device_curves().overlap.fuses_weight_gradient {
            gemm_part(weight_ns.max(m.memory_bound_ns(ACTIVATION * t * (n + k) + 8.0 * numbers)), flops)
        } else {
            gemm_part(weight_ns, flops) + memory_bound_part(m, 10.0 * numbers)
        };
        OpCost {
            forward: gemm_part(m.gemm_ns(t, n, k, p), flops),
            backward_input: gemm_part(m.gemm_ns(t, k, n, p), flops),
            backward_weight: weight,
            traffic_bytes: p.element_bytes() * (t * k + numbers) + ACTIVATION * t * n,
            weights: numbers + if bias { n } else { 0.0 },
            working_bytes: ACTIVATION * t * (n + k),
            ..OpCost::default()
        }
    }

    fn elementwise_cost(&self, cut: OpSharding, reads: u64, writes: u64, weights: u64) -> OpCost {
        let (mut t, mut slowest) = (self.op_tokens(cut), 1.0);
        if cut == OpSharding::Experts {
            (t, slowest) = (t / self.expert_tp(), self.experts.slowest_over_mean);
        }
        let (reads, writes) = (ACTIVATION * t * reads as f64, ACTIVATION * t * writes as f64);
        let part = |bytes: f64| {
            let mean = memory_bound_part(self.machine, bytes);
            CostParts { imbalance_ns: self.machine.memory_bound_ns(bytes * slowest) - mean.memory_ns, ..mean }
        };
        OpCost {
            forward: part(reads + writes),
            // Reads the inputs and the output gradient, writes the input gradient.
            backward_input: part(2.0 * reads + writes),
            traffic_bytes: (reads + writes) * slowest,
            weights: weights as f64,
            working_bytes: (reads + writes) * slowest,
            ..OpCost::default()
        }
    }

    fn embed_cost(&self, cut: OpSharding, rows: u64, width: u64) -> OpCost {
        let (words, t) = match cut {
            OpSharding::Row => (rows.div_ceil(u64::from(self.share.feature_shards)), self.share.tokens),
            _ => (rows, self.share.whole_tokens),
        };
        let bytes = ACTIVATION * t * width as f64;
        OpCost {
            forward: memory_bound_part(self.machine, 2.0 * bytes),
            // Reads the gradient, reads and writes f32 sums.
            backward_weight: memory_bound_part(self.machine, 5.0 * bytes),
            traffic_bytes: 2.0 * bytes,
            weights: words as f64 * width as f64,
            working_bytes: bytes,
            ..OpCost::default()
        }
    }

    /// Returns the cost of the GEMMs of routed experts: the mean rank as compute, the additional
    /// time of the slowest rank as imbalance.
    fn experts_cost(&self, count: u64, (k, n): (u64, u64), matrices: u64) -> OpCost {
        let (m, load, p) = (self.machine, self.experts, self.layout.precision);
        let (k, n) = (k as f64, n.div_ceil(u64::from(self.layout.expert_tp.max(1))) as f64);
        let local = count.div_ceil(u64::from(self.layout.ep.max(1))) as f64;
        let ups = matrices.saturating_sub(1).max(1) as f64;
        let forward = |groups: f64, each: f64| {
            m.grouped_gemm_ns(groups, each, ups * n, k, p) + m.grouped_gemm_ns(groups, each, k, n, p)
        };
        let input = |groups: f64, each: f64| {
            m.grouped_gemm_ns(groups, each, k, ups * n, p) + m.grouped_gemm_ns(groups, each, n, k, p)
        };
        let weight = |groups: f64, each: f64| {
            m.grouped_gemm_ns(groups, k, ups * n, each, p) + m.grouped_gemm_ns(groups, n, k, each, p)
        };
        let part = |ns: &dyn Fn(f64, f64) -> f64| {
            let time_of = |groups: f64, rows: f64| if rows > 0.0 { ns(groups, rows / groups) } else { 0.0 };
            let mean = time_of(local.min(load.mean_rows.max(1.0)), load.mean_rows);
            let slowest = time_of(load.active_experts.max(1.0), load.mean_rows * load.slowest_over_mean);
            CostParts {
                compute_ns: mean,
                imbalance_ns: (slowest - mean).max(0.0),
                launches: 2.0,
                flops: 2.0 * load.mean_rows * k * n * (ups + 1.0),
                ..CostParts::default()
            }
        };
        let rows = load.mean_rows * load.slowest_over_mean;
        let weights = local * k * n * (ups + 1.0);
        let mut backward_weight = part(&weight);
        if !m.device_curves().overlap.fuses_weight_gradient {
            backward_weight += memory_bound_part(m, 10.0 * weights);
        }
        let read = load.active_experts * k * n * (ups + 1.0);
        OpCost {
            forward: part(&forward),
            backward_input: part(&input),
            backward_weight,
            traffic_bytes: p.element_bytes() * (rows * (k + ups * n) + read) + ACTIVATION * rows * (k + n),
            expert_weights: weights,
            working_bytes: ACTIVATION * rows * (2.0 * k + ups * n),
            ..OpCost::default()
        }
    }

    /// Returns the cost of attention over the heads and queries of the slowest rank.
    fn attention_cost(&self, op: &LayerOpKind) -> OpCost {
        let (&LayerOpKind::Attention { causal, stored_score_bytes: scores_bytes, latent, .. }, Some(meets)) =
            (op, self.share.rank_attention(op, self.load))
        else {
            return OpCost::default();
        };
        let (m, share, load) = (self.machine, self.share, self.load);
        let RankAttention { queries_travel, sequences, own, heads, kv_heads, qk, v } = meets;
        // Heads are sharded where features are, or by the all-to-all around attention; each head
        // processes all queries. In a ring, a rank has its shard of the queries, or all queries and
        // its shard of the keys.
        let ring = f64::from(share.ring);
        let queries = if queries_travel { own } else { (own / ring).max(1.0) };
        if scores_bytes > 0 {
            return self.unfused_attention_cost((heads * sequences, queries, qk, v), scores_bytes as f64);
        }
        // A cache stores values in the GEMM precision, at least one byte each. A latent serves as
        // key and value at once.
        let width = if load.training {
            ACTIVATION
        } else {
            self.layout.precision.element_bytes().clamp(1.0, ACTIVATION)
        };
        let latent = latent.is_some_and(|l| l.qk as f64 == qk);
        let key_bytes = width * if latent { qk } else { qk + v };
        let work = |keys: f64, causal: bool| AttentionWork {
            queries,
            keys,
            heads: heads * sequences,
            kv_heads: kv_heads * sequences,
            qk,
            v,
            causal,
            precision: Precision::Bf16,
            key_bytes,
        };
        let (near, seen) = (load.visible_keys(), load.mean_visible_keys(own, causal));
        let windowed = near < load.keys;
        let (mean, slowest) = if share.ring == 1 {
            let ns = m.attention_ns(&if windowed { work(seen, false) } else { work(load.keys, causal) });
            (ns, ns)
        } else if queries_travel {
            let ns = m.attention_ns(&work(near / ring, false));
            (ns, ns)
        } else {
            // One block of keys per step. With contiguous shards the last rank sees nearly all keys
            // and limits the ring; with round-robin shards each rank sees about half of every
            // block.
            let full = ring * m.attention_ns(&work(load.keys / ring, false));
            let mean = full * seen / load.keys;
            let last = if causal { full * (1.0 - queries / 2.0 / load.keys) } else { full };
            let last = last.min(full * near / load.keys);
            (mean, if self.layout.scheme == TpScheme::Ring { last.max(mean) } else { mean })
        };
        let part = |times: f64| CostParts {
            compute_ns: times * mean,
            imbalance_ns: times * (slowest - mean),
            launches: if queries_travel { 1.0 } else { ring },
            flops: times * 2.0 * own / ring * seen * heads * sequences * (qk + v),
            ..CostParts::default()
        };
        let tokens = sequences * queries;
        OpCost {
            forward: part(1.0),
            backward_input: part(FUSED_BACKWARD_FACTOR),
            traffic_bytes: ACTIVATION
                * (tokens * heads * (qk + v) + sequences * near / ring * kv_heads * (qk + v)),
            working_bytes: ACTIVATION * tokens * (heads + kv_heads) * (qk + v),
            ..OpCost::default()
        }
    }

    /// Returns the cost of unfused attention, which writes its scores: two matmuls, and
    /// memory-bound kernels over groups · queries · keys. Masked keys are computed too.
    fn unfused_attention_cost(&self, (groups, q, qk, v): (f64, f64, f64, f64), kept: f64) -> OpCost {
        let (m, p, k) = (self.machine, Precision::Bf16, self.load.keys);
        let scores = groups * q * k;
        let times = |rows: f64, n: f64, inner: f64, width: f64| {
            gemm_part(m.grouped_gemm_ns(groups, rows, n, inner, p), 2.0 * scores * width)
        };
        // The softmax reads and writes the scores. Bytes kept beyond its result belong to a
        // dropout, which reads, writes, and writes a mask.
        let dropout =
            if kept > ACTIVATION { memory_bound_part(m, 5.0 * scores) } else { CostParts::default() };
        OpCost {
            forward: times(q, k, qk, qk)
                + times(q, v, k, v)
                + memory_bound_part(m, 2.0 * ACTIVATION * scores)
                + dropout,
            backward_input: times(q, k, v, v)
                + times(k, v, q, v)
                + times(q, qk, k, qk)
                + times(k, qk, q, qk)
                + memory_bound_part(m, 3.0 * ACTIVATION * scores)
                + dropout,
            traffic_bytes: ACTIVATION * (groups * (q + k) * (qk + v) + 4.0 * scores),
            kept_bytes: kept * scores,
            scores_bytes: kept * scores,
            working_bytes: ACTIVATION * (groups * (q + k) * (qk + v) + 2.0 * scores),
            ..OpCost::default()
        }
    }
}
