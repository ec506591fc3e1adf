//! A layer on the rank that takes longest: its rows, and the collectives that a layout puts between them.
//!
//! Nothing is simulated here; transfers are hidden only behind the product that they belong to, and only as far as the
//! executor's profile says. So a layer is the sum of its rows, and layers may be counted once and multiplied.

use std::ops::Add;

use tessera_ir::work::{Row, RowCut, RowOp};
use tessera_mesh::Precision;

use crate::knobs::{Layout, Recompute, Scheme};
use crate::links::{CollectiveOp, Span};
use crate::machine::Machine;
use crate::moe::{self, ExpertLoad};
use crate::profile::Hides;
pub use crate::rows::Part;
use crate::rows::{ACTIVATION, RowCost, Share, row};

/// What one call or micro-batch brings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Tokens of one micro-batch of one replica, before any division.
    pub tokens: f64,
    /// Sequences that they belong to: a decoding step has as many as tokens.
    pub sequences: f64,
    /// Keys of one sequence at the end of the call, cached ones and the call's own.
    pub keys: f64,
    /// Keys that a query sees at most, itself and those just before it; all where absent.
    pub window: Option<f64>,
    /// Whether a backward pass follows.
    pub training: bool,
    /// What the backward pass computes again; nothing for rows before and after the layers.
    pub recompute: Recompute,
}

impl Load {
    /// Keys of one sequence that the last of its queries sees.
    #[must_use]
    pub fn near(&self) -> f64 {
        self.window.map_or(self.keys, |w| w.clamp(1.0, self.keys.max(1.0)))
    }

    /// Keys that one of the last `own` queries of a sequence sees, in the mean.
    #[must_use]
    pub fn seen(&self, own: f64, causal: bool) -> f64 {
        let (near, first) = (self.near(), self.keys - (own - 1.0).max(0.0));
        if !causal || first >= near {
            return near;
        }
        // One key more for each query, until the window is full.
        let rising = near - first;
        let full = self.keys - near + 1.0;
        (((rising * (first + near - 1.0) / 2.0) + full * near) / (rising + full)).max(1.0)
    }
}

/// Where the groups of a layout stand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spans {
    /// Ranks of tp.
    pub tp: Span,
    /// Ranks over which experts are dealt.
    pub ep: Span,
    /// Ranks of an expert.
    pub expert_tp: Span,
}

/// One layer, one micro-batch, one rank: the slowest.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerCost {
    /// Forward.
    pub forward: Part,
    /// Gradients of what went in.
    pub backward_input: Part,
    /// Gradients of weights.
    pub backward_weight: Part,
    /// What the backward pass computes again, before its own.
    pub recompute: Part,
    /// Bytes kept for the backward pass; 0 in inference.
    pub keep_bytes: f64,
    /// Bytes held only while the layer is at work: a recomputed layer's, or the widest row's input and output.
    pub working_bytes: f64,
    /// Weights outside of routed experts, in numbers.
    pub weights: f64,
    /// Weights of routed experts, in numbers.
    pub expert_weights: f64,
    /// Ranks of tp that hold the same weights outside of experts, and so reduce their gradients over tp too.
    pub weight_copies: f64,
    /// Bytes of scores that are written out, where tp cuts their contraction; 0 elsewhere.
    pub logits_bytes: f64,
}

impl LayerCost {
    /// Backward pass, recomputation included.
    #[must_use]
    pub fn backward(&self) -> Part {
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
            keep_bytes: self.keep_bytes + b.keep_bytes,
            working_bytes: self.working_bytes.max(b.working_bytes),
            weights: self.weights + b.weights,
            expert_weights: self.expert_weights + b.expert_weights,
            weight_copies: self.weight_copies.max(b.weight_copies),
            logits_bytes: self.logits_bytes.max(b.logits_bytes),
        }
    }
}

/// Cost of a layer of these rows. Rows may be given in parts whose costs are added, if attention stays with the products
/// before and after it.
///
/// * megatron: an all-reduce after each product by row, and of the gradient before each product by column.
/// * megatron_sp: an all-gather before each product by column and a reduce-scatter after each by row; backward the
///   other way round, and the input of a product by column is gathered again.
/// * ulysses: tokens divided, weights whole; queries, keys, values and results change between tokens and heads.
/// * ring, striped: megatron_sp over `tp / ring` ranks; keys and values pass around `ring` ranks, or queries are gathered
///   where they are fewer.
/// * rs_mm_ag: as megatron, with attention cut by the features of a head: partial scores are reduced and scattered.
#[must_use]
pub fn layer(
    m: &Machine,
    rows: &[Row],
    layout: &Layout,
    load: &Load,
    spans: &Spans,
    experts: &ExpertLoad,
) -> LayerCost {
    let share = Share::of(rows, layout, load.tokens);
    let copies = f64::from(layout.tp.max(1)) / f64::from(share.ways);
    let mut sum = LayerCost { weight_copies: copies, ..LayerCost::default() };
    let (mut again, mut scores) = (Part::default(), 0.0_f64);
    for at in 0..rows.len() {
        let mut c = row(m, rows, at, &share, layout, load, experts);
        let attention = matches!(rows[at].op, RowOp::Attention { .. });
        let wires = Wires { m, layout, load, spans, share: &share, experts };
        wires.add(&rows[at], &mut c);
        if attention && load.recompute == Recompute::Attention && c.scores_bytes > 0.0 {
            // Keys and values travel a ring again; elsewhere what attention needs is still there.
            again += if share.ring > 1 { c.forward } else { without_transfers(c.forward) };
            scores += c.scores_bytes;
        }
        if attention && layout.scheme == Scheme::RsMmAg {
            sum.logits_bytes = wires.logits(&rows[at].op);
        }
        sum.forward += c.forward;
        sum.backward_input += c.backward_input;
        sum.backward_weight += c.backward_weight;
        sum.keep_bytes += c.keep_bytes;
        sum.weights += c.weights;
        sum.expert_weights += c.expert_weights;
        sum.working_bytes = sum.working_bytes.max(c.working_bytes);
    }
    if !load.training {
        return sum;
    }
    // Of a layer that is computed again only its input stays; the part with the experts has none of its own.
    let input = match rows.first() {
        Some(r) if r.cut != RowCut::Experts => ACTIVATION * share.whole_tokens * width(r),
        _ => 0.0,
    };
    let kept = sum.keep_bytes;
    match load.recompute {
        Recompute::None => {}
        Recompute::Attention => {
            (sum.recompute, sum.keep_bytes) = (again, kept - scores);
            sum.working_bytes = sum.working_bytes.max(scores);
        }
        Recompute::EveryOther => {
            (sum.recompute, sum.keep_bytes) = (sum.forward * 0.5, (kept + input) / 2.0);
            sum.working_bytes = sum.working_bytes.max(kept);
        }
        Recompute::Full => {
            (sum.recompute, sum.keep_bytes) = (sum.forward, input);
            sum.working_bytes = sum.working_bytes.max(kept);
        }
    }
    sum
}

fn without_transfers(part: Part) -> Part {
    Part { tp_ns: 0.0, tp_exposed_ns: 0.0, sent: [0.0; 3], ..part }
}

/// Numbers of a token that go into a row.
fn width(row: &Row) -> f64 {
    match row.op {
        RowOp::Pass { writes, .. } => writes as f64,
        RowOp::Matmul { k, .. } | RowOp::Experts { k, .. } => k as f64,
        RowOp::Embed { width, .. } => width as f64,
        RowOp::Attention { .. } => 0.0,
    }
}

/// The transfers of one row.
struct Wires<'a> {
    m: &'a Machine,
    layout: &'a Layout,
    load: &'a Load,
    spans: &'a Spans,
    share: &'a Share,
    experts: &'a ExpertLoad,
}

/// What may run beside a transfer.
#[derive(Clone, Copy)]
enum Beside {
    /// Nothing.
    Nothing,
    /// The row's own product of so many rows and so much time, cut into chunks.
    Chunks(f64, f64),
    /// Another product of the backward pass, of so much time.
    Product(f64),
}

impl Wires<'_> {
    fn add(&self, r: &Row, c: &mut RowCost) {
        let dense = self.share.ways > 1;
        match (r.op, r.cut) {
            (RowOp::Matmul { k, .. }, RowCut::Col) if dense => self.column(k as f64, c),
            (RowOp::Matmul { n, .. }, RowCut::Row) if dense => self.after_rows(n as f64, true, c),
            (RowOp::Embed { width, .. }, RowCut::Row) if dense => self.after_rows(width as f64, false, c),
            (RowOp::Attention { .. }, _) => self.attention(&r.op, c),
            (RowOp::Experts { top_k, k, .. }, _) => self.experts(top_k as f64, k as f64, c),
            _ => {}
        }
        if !self.load.training {
            (c.backward_input, c.backward_weight) = (Part::default(), Part::default());
        }
    }

    /// Whether tokens are divided between products, so that they are gathered and scattered.
    fn divided(&self) -> bool {
        matches!(self.layout.scheme, Scheme::MegatronSequence | Scheme::Ring | Scheme::Striped)
    }

    /// The ranks that cut features.
    fn ways(&self) -> Span {
        let (tp, ways) = (self.spans.tp, self.share.ways);
        let rings = (tp.ranks / ways.max(1)).max(1);
        Span { ranks: ways, domains: tp.domains.div_ceil(rings).min(ways) }
    }

    /// Before a product by column.
    fn column(&self, k: f64, c: &mut RowCost) {
        let (t, over) = (self.share.tokens, self.ways());
        let bytes = ACTIVATION * t * k;
        let (input_ns, weight_ns) = (c.backward_input.compute_ns, c.backward_weight.compute_ns);
        if self.divided() {
            let own = Beside::Chunks(t, c.forward.compute_ns);
            self.transfer(CollectiveOp::AllGather, bytes, over, own, &mut c.forward);
            self.transfer(
                CollectiveOp::AllGather,
                bytes,
                over,
                Beside::Product(input_ns),
                &mut c.backward_input,
            );
            let op = CollectiveOp::ReduceScatter;
            self.transfer(op, bytes, over, Beside::Product(weight_ns), &mut c.backward_weight);
        } else {
            let op = CollectiveOp::AllReduce;
            self.transfer(op, bytes, over, Beside::Product(weight_ns), &mut c.backward_weight);
        }
    }

    /// After a product by row, or a table cut by its rows.
    fn after_rows(&self, n: f64, product: bool, c: &mut RowCost) {
        let (t, over) = (self.share.tokens, self.ways());
        let bytes = ACTIVATION * t * n;
        let own = if product { Beside::Chunks(t, c.forward.compute_ns) } else { Beside::Nothing };
        if self.divided() {
            self.transfer(CollectiveOp::ReduceScatter, bytes, over, own, &mut c.forward);
            let own = if product { Beside::Chunks(t, c.backward_input.compute_ns) } else { Beside::Nothing };
            self.transfer(CollectiveOp::AllGather, bytes, over, own, &mut c.backward_input);
        } else {
            self.transfer(CollectiveOp::AllReduce, bytes, over, own, &mut c.forward);
        }
    }

    fn attention(&self, op: &RowOp, c: &mut RowCost) {
        let &RowOp::Attention { heads, kv_heads, qk, v, .. } = op else { return };
        let (heads, qk, v) = (heads as f64, qk as f64, v as f64);
        let tp = self.spans.tp;
        match self.layout.scheme {
            Scheme::Ulysses if tp.ranks > 1 => {
                // A head of keys and values goes to every rank that has queries for it.
                let kv = (kv_heads as f64).max(f64::from(tp.ranks).min(heads));
                for width in [heads * qk, kv * qk, kv * v, heads * v] {
                    let bytes = ACTIVATION * self.share.tokens * width;
                    let op = CollectiveOp::AllToAll;
                    self.transfer(op, bytes, tp, Beside::Nothing, &mut c.forward);
                    self.transfer(op, bytes, tp, Beside::Nothing, &mut c.backward_input);
                }
            }
            Scheme::Ring | Scheme::Striped if self.share.ring > 1 => self.ring(op, c),
            Scheme::RsMmAg if tp.ranks > 1 => {
                let scores = self.logits(op);
                let out = ACTIVATION * self.share.tokens * heads * v;
                for part in [&mut c.forward, &mut c.backward_input] {
                    self.transfer(CollectiveOp::ReduceScatter, scores, tp, Beside::Nothing, part);
                    self.transfer(CollectiveOp::AllGather, out, tp, Beside::Nothing, part);
                }
            }
            _ => {}
        }
    }

    /// Bytes of scores of all heads on one rank.
    fn logits(&self, op: &RowOp) -> f64 {
        match *op {
            RowOp::Attention { heads, .. } => ACTIVATION * self.load.tokens * self.load.keys * heads as f64,
            _ => 0.0,
        }
    }

    /// Keys and values go around, each block while the one before it is used; or queries are gathered, and what each rank
    /// finds for them is exchanged.
    fn ring(&self, op: &RowOp, c: &mut RowCost) {
        let Some(meets) = self.share.meets(op, self.load) else { return };
        let (ring, tp) = (self.share.ring, self.spans.tp);
        if meets.queries_travel {
            let span = Span { ranks: ring, domains: tp.domains.min(ring) };
            let queries = ACTIVATION * meets.sequences * meets.own * meets.heads;
            let part = &mut c.forward;
            self.transfer(CollectiveOp::AllGather, queries * meets.qk, span, Beside::Nothing, part);
            // With each value head go its maximum and its sum, four bytes each.
            self.transfer(CollectiveOp::AllToAll, queries * (meets.v + 4.0), span, Beside::Nothing, part);
            return;
        }
        let steps = f64::from(ring - 1);
        let span = Span { ranks: 2, domains: if tp.domains > 1 { 2 } else { 1 } };
        let cached = meets.own < self.load.keys;
        let keys = if cached { self.load.near() } else { self.load.keys };
        let block = meets.sequences * keys / f64::from(ring);
        let bytes = ACTIVATION * block * meets.kv_heads * (meets.qk + meets.v);
        // Backward their gradients go around with them.
        for (part, times) in [(&mut c.forward, 1.0), (&mut c.backward_input, 2.0)] {
            let t = self.m.collective(CollectiveOp::SendRecv, bytes * times, span);
            let step = (part.compute_ns + part.imbalance_ns) / f64::from(ring);
            part.tp_ns += steps * t.ns;
            part.tp_exposed_ns += steps * (t.ns - self.worth(t.ns.min(step)));
            part.launches += steps;
            add_sent(part, t.sent, steps);
        }
    }

    /// Dispatch, combine, and what the ranks of one expert exchange.
    fn experts(&self, top_k: f64, k: f64, c: &mut RowCost) {
        let (load, ep) = (self.experts, f64::from(self.layout.ep.max(1)));
        let ranks = ep * f64::from(self.layout.expert_tp.max(1));
        let kept = (1.0 - load.dropped).max(1e-9);
        let own = load.rows * ep / top_k / kept / ranks;
        let back = if self.layout.wire == Precision::F32 { Precision::F32 } else { Precision::Bf16 };
        // Gradients travel at two bytes whatever the wire of the forward pass is.
        let passes: [(&mut Part, [Precision; 2]); 2] = [
            (&mut c.forward, [self.layout.wire, back]),
            (&mut c.backward_input, [Precision::Bf16, Precision::Bf16]),
        ];
        for (part, precisions) in passes {
            for p in precisions {
                let remote = own * load.copies * load.busiest_link * k * p.wire_bytes();
                let t = if self.layout.ep > 1 {
                    self.m.collective(
                        CollectiveOp::AllToAll,
                        moe::buffer_bytes(remote, self.layout.ep),
                        self.spans.ep,
                    )
                } else {
                    continue;
                };
                part.ep_ns += t.ns;
                part.ep_exposed_ns += t.ns;
                part.launches += 1.0;
                add_sent(part, t.sent, 1.0);
            }
            if self.layout.expert_tp > 1 {
                let bytes = ACTIVATION * load.rows * load.slowest * k;
                for op in [CollectiveOp::AllGather, CollectiveOp::ReduceScatter] {
                    let t = self.m.collective(op, bytes, self.spans.expert_tp);
                    part.ep_ns += t.ns;
                    part.ep_exposed_ns += t.ns;
                    part.launches += 1.0;
                    add_sent(part, t.sent, 1.0);
                }
            }
            // Where tp keeps tokens whole, each of its ranks dispatched its piece and needs all results.
            if self.share.whole_tokens >= self.share.tokens && self.spans.tp.ranks > 1 && self.share.ways > 1
            {
                let bytes = ACTIVATION * self.share.tokens * k;
                let mut gathered = Part::default();
                self.transfer(CollectiveOp::AllGather, bytes, self.spans.tp, Beside::Nothing, &mut gathered);
                *part += gathered;
            }
        }
    }

    /// Adds one transfer to a part.
    fn transfer(&self, op: CollectiveOp, bytes: f64, span: Span, beside: Beside, part: &mut Part) {
        let t = self.m.collective(op, bytes, span);
        part.tp_ns += t.ns;
        part.tp_exposed_ns += t.ns - self.saved(t.ns, beside);
        part.launches += 1.0;
        add_sent(part, t.sent, 1.0);
    }

    /// What running beside a product saves of a transfer, the product's own slowing taken off.
    fn saved(&self, ns: f64, beside: Beside) -> f64 {
        let overlap = &self.m.curves().overlap;
        let hidden = match beside {
            Beside::Product(product) if overlap.tp != Hides::Nothing => ns.min(product),
            Beside::Chunks(rows, product) if overlap.tp == Hides::Chunks => {
                let chunks = (rows / overlap.chunk_rows).floor().min(f64::from(self.share.ways.max(1)));
                if chunks < 2.0 { 0.0 } else { ns.min(product) * (chunks - 1.0) / chunks }
            }
            _ => 0.0,
        };
        self.worth(hidden)
    }

    /// What so much hidden transfer saves: all of it but what it slows the product down by.
    fn worth(&self, hidden_ns: f64) -> f64 {
        (hidden_ns * (2.0 - self.m.contention())).max(0.0)
    }
}

fn add_sent(part: &mut Part, sent: [f64; 3], times: f64) {
    for (sum, bytes) in part.sent.iter_mut().zip(sent) {
        *sum += bytes * times;
    }
}
