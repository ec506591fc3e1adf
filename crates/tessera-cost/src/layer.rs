//! Cost of a layer on the slowest rank: its ops, and the collectives that a layout puts between
//! them.
//!
//! This model is analytic. A transfer overlaps only the GEMM that it belongs to, and only as far as
//! the executor's profile allows. A layer is therefore the sum of its ops, and equal layers may be
//! priced once and multiplied.

use std::ops::Add;

use tessera_ir::analytic_model::{LayerOp, LayerOpKind, OpSharding};
use tessera_mesh::{Cluster, Precision};

use crate::collective_cost::{CollectiveOp, GroupSpan};
pub use crate::layer_load::LayerLoad;
use crate::machine_model::MachineModel;
use crate::moe::{self, ExpertLoad};
pub use crate::op_cost::CostParts;
use crate::op_cost::{ACTIVATION, OpCost, RankShare, op_cost};
use crate::params::{LayerLayout, Recompute, TpScheme};
use crate::profile::TpOverlap;

/// How many ranks and domains the groups of a [`LayerLayout`] span.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupSpans {
    /// Span of the ranks that share attention and dense ops.
    pub tp: GroupSpan,
    /// Span of the ranks that dispatch and combine tokens among themselves.
    pub ep: GroupSpan,
    /// Span of the group that shards one expert.
    pub expert_tp: GroupSpan,
}

impl GroupSpans {
    /// Returns the spans of a layout's groups on a cluster: ranks of tp are adjacent, then ep.
    #[must_use]
    pub fn from_layout(layout: &LayerLayout, cluster: &Cluster) -> GroupSpans {
        GroupSpans {
            tp: GroupSpan::from_stride(layout.tp, 1, cluster),
            ep: GroupSpan::from_stride(layout.ep, layout.expert_tp, cluster),
            expert_tp: GroupSpan::from_stride(layout.expert_tp, 1, cluster),
        }
    }
}

/// Cost of one layer for one micro-batch on the slowest rank.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerCost {
    /// Forward pass of one micro-batch; `recompute` counts its later repetition.
    pub forward: CostParts,
    /// Computation of the input gradients, with all of attention's backward pass; 0 in inference.
    pub backward_input: CostParts,
    /// Computation of the weight gradients, with the transfers that may overlap it; 0 in inference.
    pub backward_weight: CostParts,
    /// Recomputation before the backward pass.
    pub recompute: CostParts,
    /// Bytes kept for the backward pass; 0 in inference.
    pub kept_bytes: f64,
    /// Bytes held only while the layer runs: the activations of a recomputed layer, or the input
    /// and output of the widest op.
    pub working_bytes: f64,
    /// Number of weights outside routed experts.
    pub weights: f64,
    /// Number of weights of the routed experts that the rank holds.
    pub expert_weights: f64,
    /// Number of tp ranks that hold the same weights outside experts and therefore reduce their
    /// gradients over tp too.
    pub weight_replicas: f64,
    /// Bytes of scores written to memory where tp shards the contraction of the scores; 0
    /// elsewhere.
    pub written_score_bytes: f64,
}

impl LayerCost {
    /// Returns the cost of the backward pass, recomputation included.
    #[must_use]
    pub fn backward_total(&self) -> CostParts {
        self.recompute + self.backward_input + self.backward_weight
    }
}

impl Add for LayerCost {
    type Output = LayerCost;
    fn add(self, b: LayerCost) -> LayerCost {
        LayerCost {
            forward: self.forward + b.forward,
            backward_input: self.backward_input + b.backward_input,
            backward_weight: self.backward_weight + b.backward_weight,
            recompute: self.recompute + b.recompute,
            kept_bytes: self.kept_bytes + b.kept_bytes,
            working_bytes: self.working_bytes.max(b.working_bytes),
            weights: self.weights + b.weights,
            expert_weights: self.expert_weights + b.expert_weights,
            weight_replicas: self.weight_replicas.max(b.weight_replicas),
            written_score_bytes: self.written_score_bytes.max(b.written_score_bytes),
        }
    }
}

/// Returns the cost of a layer with these ops. The ops may be priced in parts whose costs are
/// added, if attention stays in one part with the matmuls before and after it.
///
/// * megatron: an all-reduce after each row-parallel matmul, and of the gradient before each
///   column-parallel matmul.
/// * megatron_sp: an all-gather before each column-parallel matmul and a reduce-scatter after each
///   row-parallel one. The backward pass swaps the two and gathers the input of a column-parallel
///   matmul again.
/// * ulysses: tokens are sharded and weights replicated; queries, keys, values and results switch
///   between sharded tokens and sharded heads.
/// * ring, striped: megatron_sp over `tp / ring` ranks. Keys and values pass around `ring` ranks,
///   or queries are gathered if they are fewer.
/// * rs_mm_ag: as megatron, with attention sharded over the features of a head, so that partial
///   scores are reduce-scattered.
#[must_use]
pub fn layer_cost(
    m: &MachineModel,
    rows: &[LayerOp],
    layout: &LayerLayout,
    load: &LayerLoad,
    spans: &GroupSpans,
    experts: &ExpertLoad,
) -> LayerCost {
    let share = RankShare::for_layer(rows, layout, load.tokens);
    let copies = f64::from(layout.tp.max(1)) / f64::from(share.feature_shards);
    let mut sum = LayerCost { weight_replicas: copies, ..LayerCost::default() };
    let (mut recomputed, mut scores) = (CostParts::default(), 0.0_f64);
    for at in 0..rows.len() {
        let mut cost = op_cost(m, rows, at, &share, layout, load, experts);
        let attention = matches!(rows[at].kind, LayerOpKind::Attention { .. });
        let transfers = LayerTransfers { machine: m, layout, load, spans, share: &share, experts };
        transfers.add_op_transfers(&rows[at], &mut cost);
        if attention && load.recompute == Recompute::Attention && cost.scores_bytes > 0.0 {
            // A ring sends keys and values again; other schemes still hold the inputs of attention.
            recomputed += if share.ring > 1 { cost.forward } else { without_tp_transfers(cost.forward) };
            scores += cost.scores_bytes;
        }
        if attention && layout.scheme == TpScheme::RsMmAg {
            sum.written_score_bytes = transfers.score_bytes(&rows[at].kind);
        }
        sum.forward += cost.forward;
        sum.backward_input += cost.backward_input;
        sum.backward_weight += cost.backward_weight;
        sum.kept_bytes += cost.kept_bytes;
        sum.weights += cost.weights;
        sum.expert_weights += cost.expert_weights;
        sum.working_bytes = sum.working_bytes.max(cost.working_bytes);
    }
    if !load.training {
        return sum;
    }
    // A recomputed layer keeps only its input. The expert part of a layer has no input of its own.
    let input = match rows.first() {
        Some(r) if r.sharding != OpSharding::Experts => ACTIVATION * share.whole_tokens * input_width(r),
        _ => 0.0,
    };
    let kept = sum.kept_bytes;
    match load.recompute {
        Recompute::None => {}
        Recompute::Attention => {
            (sum.recompute, sum.kept_bytes) = (recomputed, kept - scores);
            sum.working_bytes = sum.working_bytes.max(scores);
        }
        Recompute::EveryOther => {
            (sum.recompute, sum.kept_bytes) = (sum.forward * 0.5, (kept + input) / 2.0);
            sum.working_bytes = sum.working_bytes.max(kept);
        }
        Recompute::Full => {
            (sum.recompute, sum.kept_bytes) = (sum.forward, input);
            sum.working_bytes = sum.working_bytes.max(kept);
        }
    }
    sum
}

fn without_tp_transfers(part: CostParts) -> CostParts {
    CostParts { tp_ns: 0.0, tp_exposed_ns: 0.0, sent_bytes: [0.0; 3], ..part }
}

/// Returns the number of values per token that enter an op.
fn input_width(row: &LayerOp) -> f64 {
    match row.kind {
        LayerOpKind::Elementwise { writes, .. } => writes as f64,
        LayerOpKind::Matmul { k, .. } | LayerOpKind::Experts { k, .. } => k as f64,
        LayerOpKind::Embedding { width, .. } => width as f64,
        LayerOpKind::Attention { .. } => 0.0,
    }
}

/// The inputs for pricing the transfers of a layer's ops.
struct LayerTransfers<'a> {
    machine: &'a MachineModel,
    layout: &'a LayerLayout,
    load: &'a LayerLoad,
    spans: &'a GroupSpans,
    share: &'a RankShare,
    experts: &'a ExpertLoad,
}

/// The computation that may overlap a transfer.
#[derive(Clone, Copy)]
enum OverlapWith {
    /// No computation: the whole transfer is exposed.
    Nothing,
    /// The op's own GEMM in row chunks: its rows and its time in ns.
    Chunks(f64, f64),
    /// Another GEMM of the backward pass: its time in ns.
    Gemm(f64),
}

impl LayerTransfers<'_> {
    fn add_op_transfers(&self, r: &LayerOp, c: &mut OpCost) {
        let dense = self.share.feature_shards > 1;
        match (r.kind, r.sharding) {
            (LayerOpKind::Matmul { k, .. }, OpSharding::Col) if dense => {
                self.add_column_transfers(k as f64, c)
            }
            (LayerOpKind::Matmul { n, .. }, OpSharding::Row) if dense => {
                self.add_row_transfers(n as f64, true, c)
            }
            (LayerOpKind::Embedding { width, .. }, OpSharding::Row) if dense => {
                self.add_row_transfers(width as f64, false, c)
            }
            (LayerOpKind::Attention { .. }, _) => self.add_attention_transfers(&r.kind, c),
            (LayerOpKind::Experts { top_k, k, .. }, _) => {
                self.add_expert_transfers(top_k as f64, k as f64, c)
            }
            _ => {}
        }
        if !self.load.training {
            (c.backward_input, c.backward_weight) = (CostParts::default(), CostParts::default());
        }
    }

    /// Adds the transfers before a column-parallel matmul.
    fn add_column_transfers(&self, k: f64, c: &mut OpCost) {
        let (t, over) = (self.share.tokens, self.share.feature_span(self.spans.tp));
        let bytes = ACTIVATION * t * k;
        let (input_ns, weight_ns) = (c.backward_input.compute_ns, c.backward_weight.compute_ns);
        if self.layout.scheme.shards_tokens() {
            let own = OverlapWith::Chunks(t, c.forward.compute_ns);
            self.add_transfer(CollectiveOp::AllGather, bytes, over, own, &mut c.forward);
            self.add_transfer(
                CollectiveOp::AllGather,
                bytes,
                over,
                OverlapWith::Gemm(input_ns),
                &mut c.backward_input,
            );
            let op = CollectiveOp::ReduceScatter;
            self.add_transfer(op, bytes, over, OverlapWith::Gemm(weight_ns), &mut c.backward_weight);
        } else {
            let op = CollectiveOp::AllReduce;
            self.add_transfer(op, bytes, over, OverlapWith::Gemm(weight_ns), &mut c.backward_weight);
        }
    }

    /// Adds the transfers after a row-parallel matmul, or after a table sharded by its rows.
    fn add_row_transfers(&self, n: f64, is_matmul: bool, c: &mut OpCost) {
        let (t, over) = (self.share.tokens, self.share.feature_span(self.spans.tp));
        let bytes = ACTIVATION * t * n;
        let own = if is_matmul { OverlapWith::Chunks(t, c.forward.compute_ns) } else { OverlapWith::Nothing };
        if self.layout.scheme.shards_tokens() {
            self.add_transfer(CollectiveOp::ReduceScatter, bytes, over, own, &mut c.forward);
            let own = if is_matmul {
                OverlapWith::Chunks(t, c.backward_input.compute_ns)
            } else {
                OverlapWith::Nothing
            };
            self.add_transfer(CollectiveOp::AllGather, bytes, over, own, &mut c.backward_input);
        } else {
            self.add_transfer(CollectiveOp::AllReduce, bytes, over, own, &mut c.forward);
        }
    }

    fn add_attention_transfers(&self, op: &LayerOpKind, c: &mut OpCost) {
        let &LayerOpKind::Attention { heads, kv_heads, qk, v, .. } = op else { return };
        let (heads, qk, v) = (heads as f64, qk as f64, v as f64);
        let tp = self.spans.tp;
        match self.layout.scheme {
            TpScheme::Ulysses if tp.ranks > 1 => {
                // Every rank that has queries for a KV head receives that head.
                let kv = (kv_heads as f64).max(f64::from(tp.ranks).min(heads));
                for width in [heads * qk, kv * qk, kv * v, heads * v] {
                    let bytes = ACTIVATION * self.share.tokens * width;
                    let op = CollectiveOp::AllToAll;
                    self.add_transfer(op, bytes, tp, OverlapWith::Nothing, &mut c.forward);
                    self.add_transfer(op, bytes, tp, OverlapWith::Nothing, &mut c.backward_input);
                }
            }
            TpScheme::Ring | TpScheme::Striped if self.share.ring > 1 => self.add_ring_transfers(op, c),
            TpScheme::RsMmAg if tp.ranks > 1 => {
                let scores = self.score_bytes(op);
                let out = ACTIVATION * self.share.tokens * heads * v;
                for part in [&mut c.forward, &mut c.backward_input] {
                    self.add_transfer(CollectiveOp::ReduceScatter, scores, tp, OverlapWith::Nothing, part);
                    self.add_transfer(CollectiveOp::AllGather, out, tp, OverlapWith::Nothing, part);
                }
            }
            _ => {}
        }
    }

    /// Returns the bytes of the partial scores, of all heads, that a rank holds under
    /// [`TpScheme::RsMmAg`]; 0 for ops other than attention.
    fn score_bytes(&self, op: &LayerOpKind) -> f64 {
        match *op {
            LayerOpKind::Attention { heads, .. } => {
                ACTIVATION * self.load.tokens * self.load.keys * heads as f64
            }
            _ => 0.0,
        }
    }

    /// Adds the transfers of ring attention. Keys and values pass around the ring, each block while
    /// the rank uses the previous one; or queries are gathered and the partial results of each rank
    /// are exchanged.
    fn add_ring_transfers(&self, op: &LayerOpKind, c: &mut OpCost) {
        let Some(attention) = self.share.rank_attention(op, self.load) else { return };
        let (ring, tp) = (self.share.ring, self.spans.tp);
        if attention.queries_travel {
            let span = GroupSpan { ranks: ring, domains: tp.domains.min(ring) };
            let queries = ACTIVATION * attention.sequences * attention.own * attention.heads;
            let part = &mut c.forward;
            self.add_transfer(
                CollectiveOp::AllGather,
                queries * attention.qk,
                span,
                OverlapWith::Nothing,
                part,
            );
            // Each value head carries its running max and its sum, four bytes each.
            self.add_transfer(
                CollectiveOp::AllToAll,
                queries * (attention.v + 4.0),
                span,
                OverlapWith::Nothing,
                part,
            );
            return;
        }
        let steps = f64::from(ring - 1);
        let span = GroupSpan { ranks: 2, domains: if tp.domains > 1 { 2 } else { 1 } };
        let cached = attention.own < self.load.keys;
        let keys = if cached { self.load.visible_keys() } else { self.load.keys };
        let block = attention.sequences * keys / f64::from(ring);
        let bytes = ACTIVATION * block * attention.kv_heads * (attention.qk + attention.v);
        // In the backward pass their gradients travel too.
        for (part, times) in [(&mut c.forward, 1.0), (&mut c.backward_input, 2.0)] {
            let t = self.machine.collective_cost(CollectiveOp::SendRecv, bytes * times, span);
            let step = (part.compute_ns + part.imbalance_ns) / f64::from(ring);
            part.tp_ns += steps * t.ns;
            part.tp_exposed_ns += steps * (t.ns - self.net_savings(t.ns.min(step)));
            part.launches += steps;
            add_sent(part, t.sent_bytes, steps);
        }
    }

    /// Adds dispatch, combine, and the transfers between the ranks that shard one expert.
    fn add_expert_transfers(&self, top_k: f64, k: f64, c: &mut OpCost) {
        let (load, ep) = (self.experts, f64::from(self.layout.ep.max(1)));
        let ranks = ep * f64::from(self.layout.expert_tp.max(1));
        let kept = (1.0 - load.dropped).max(1e-9);
        let own = load.mean_rows * ep / top_k / kept / ranks;
        let back =
            if self.layout.wire_precision == Precision::F32 { Precision::F32 } else { Precision::Bf16 };
        // Gradients travel at two bytes, independent of the forward wire precision.
        let passes: [(&mut CostParts, [Precision; 2]); 2] = [
            (&mut c.forward, [self.layout.wire_precision, back]),
            (&mut c.backward_input, [Precision::Bf16, Precision::Bf16]),
        ];
        for (part, precisions) in passes {
            for p in precisions {
                let remote = own * load.remote_copies * load.busiest_over_mean * k * p.wire_element_bytes();
                if self.layout.ep > 1 {
                    let bytes = moe::buffer_bytes(remote, self.layout.ep);
                    self.add_expert_transfer(CollectiveOp::AllToAll, bytes, self.spans.ep, part);
                }
            }
            if self.layout.expert_tp > 1 {
                let bytes = ACTIVATION * load.mean_rows * load.slowest_over_mean * k;
                for op in [CollectiveOp::AllGather, CollectiveOp::ReduceScatter] {
                    self.add_expert_transfer(op, bytes, self.spans.expert_tp, part);
                }
            }
            // Where tp replicates tokens, each of its ranks dispatched only its shard and needs all
            // results.
            if self.share.whole_tokens >= self.share.tokens
                && self.spans.tp.ranks > 1
                && self.share.feature_shards > 1
            {
                let bytes = ACTIVATION * self.share.tokens * k;
                self.add_transfer(CollectiveOp::AllGather, bytes, self.spans.tp, OverlapWith::Nothing, part);
            }
        }
    }

    /// Adds a transfer between the ranks that hold experts, which nothing hides.
    fn add_expert_transfer(&self, op: CollectiveOp, bytes: f64, span: GroupSpan, part: &mut CostParts) {
        let t = self.machine.collective_cost(op, bytes, span);
        part.ep_ns += t.ns;
        part.ep_exposed_ns += t.ns;
        part.launches += 1.0;
        add_sent(part, t.sent_bytes, 1.0);
    }

    /// Adds a transfer over tp to `part`: its time, and the time that `beside` does not hide.
    fn add_transfer(
        &self,
        op: CollectiveOp,
        bytes: f64,
        span: GroupSpan,
        beside: OverlapWith,
        part: &mut CostParts,
    ) {
        let t = self.machine.collective_cost(op, bytes, span);
        part.tp_ns += t.ns;
        part.tp_exposed_ns += t.ns - self.overlap_savings(t.ns, beside);
        part.launches += 1.0;
        add_sent(part, t.sent_bytes, 1.0);
    }

    /// Returns the time saved by overlapping a transfer with a GEMM, less the slowdown of that
    /// GEMM.
    fn overlap_savings(&self, ns: f64, beside: OverlapWith) -> f64 {
        let overlap = &self.machine.device_curves().overlap;
        let hidden = match beside {
            OverlapWith::Gemm(gemm_ns) if overlap.tp != TpOverlap::Nothing => ns.min(gemm_ns),
            OverlapWith::Chunks(rows, gemm_ns) if overlap.tp == TpOverlap::Chunks => {
                let chunks =
                    (rows / overlap.chunk_rows).floor().min(f64::from(self.share.feature_shards.max(1)));
                if chunks < 2.0 { 0.0 } else { ns.min(gemm_ns) * (chunks - 1.0) / chunks }
            }
            _ => 0.0,
        };
        self.net_savings(hidden)
    }

    /// Returns the time that this much hidden transfer saves: all of it except the contention that
    /// it causes.
    fn net_savings(&self, hidden_ns: f64) -> f64 {
        (hidden_ns * (2.0 - self.machine.contention_factor())).max(0.0)
    }
}

fn add_sent(part: &mut CostParts, sent: [f64; 3], times: f64) {
    for (sum, bytes) in part.sent_bytes.iter_mut().zip(sent) {
        *sum += bytes * times;
    }
}
