//! One row of a layer on the rank that takes longest: time, operations, traffic and weights, forward and backward.
//! Collectives are not of a row but of the cut between rows; [`crate::layer`] adds them.

use std::ops::{Add, AddAssign, Mul};

use tessera_ir::work::{Row, RowCut, RowOp};
use tessera_mesh::Precision;

use crate::knobs::{Layout, Scheme};
use crate::layer::Load;
use crate::machine::{AttentionWork, Machine};
use crate::moe::ExpertLoad;

/// Bytes of a number of activations.
pub(crate) const ACTIVATION: f64 = 2.0;

/// Products of a fused attention's backward pass over those of its forward pass: five over two.
const FUSED_BACKWARD: f64 = 2.5;

/// What one pass through some rows takes on one rank. Times add up: nothing within a part runs beside anything else
/// but where a transfer is said to be hidden.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Part {
    /// Products and attention.
    pub compute_ns: f64,
    /// Passes over memory.
    pub memory_ns: f64,
    /// Transfers over tp, hidden or not.
    pub tp_ns: f64,
    /// What they add to the time, slower products beside them included.
    pub tp_exposed_ns: f64,
    /// Dispatch, combine and transfers over the expert tp, hidden or not.
    pub ep_ns: f64,
    /// What they add to the time.
    pub ep_exposed_ns: f64,
    /// What the slowest rank takes longer than the mean one: uneven experts, causal rings.
    pub imbalance_ns: f64,
    /// Kernels and collectives launched.
    pub launches: f64,
    /// Operations; a multiply-add counts two.
    pub flops: f64,
    /// Bytes sent, by link class.
    pub sent: [f64; 3],
}

impl Part {
    /// Time of the part, without launches.
    #[must_use]
    pub fn ns(&self) -> f64 {
        self.compute_ns + self.memory_ns + self.tp_exposed_ns + self.ep_exposed_ns + self.imbalance_ns
    }
}

impl Add for Part {
    type Output = Part;
    fn add(self, b: Part) -> Part {
        Part {
            compute_ns: self.compute_ns + b.compute_ns,
            memory_ns: self.memory_ns + b.memory_ns,
            tp_ns: self.tp_ns + b.tp_ns,
            tp_exposed_ns: self.tp_exposed_ns + b.tp_exposed_ns,
            ep_ns: self.ep_ns + b.ep_ns,
            ep_exposed_ns: self.ep_exposed_ns + b.ep_exposed_ns,
            imbalance_ns: self.imbalance_ns + b.imbalance_ns,
            launches: self.launches + b.launches,
            flops: self.flops + b.flops,
            sent: [self.sent[0] + b.sent[0], self.sent[1] + b.sent[1], self.sent[2] + b.sent[2]],
        }
    }
}

impl AddAssign for Part {
    fn add_assign(&mut self, b: Part) {
        *self = *self + b;
    }
}

impl Mul<f64> for Part {
    type Output = Part;
    fn mul(self, x: f64) -> Part {
        Part {
            compute_ns: self.compute_ns * x,
            memory_ns: self.memory_ns * x,
            tp_ns: self.tp_ns * x,
            tp_exposed_ns: self.tp_exposed_ns * x,
            ep_ns: self.ep_ns * x,
            ep_exposed_ns: self.ep_exposed_ns * x,
            imbalance_ns: self.imbalance_ns * x,
            launches: self.launches * x,
            flops: self.flops * x,
            sent: self.sent.map(|b| b * x),
        }
    }
}

/// What the slowest rank has of the tokens and features of one layer. Uneven pieces are rounded up to whole tokens,
/// heads and features.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share {
    /// Tokens that meet a product cut by features.
    pub tokens: f64,
    /// Tokens of rows that every rank has all features of.
    pub whole_tokens: f64,
    /// Ranks over which features are cut.
    pub ways: u32,
    /// Ranks of one ring of context.
    pub ring: u32,
    /// Query heads, of how many.
    heads: (u64, u64),
    /// Heads of keys and values, of how many.
    kv_heads: (u64, u64),
    /// Experts that a token asks for.
    pub top_k: f64,
}

impl Share {
    /// For a layer of these rows.
    #[must_use]
    pub fn of(rows: &[Row], layout: &Layout, tokens: f64) -> Share {
        let ring =
            if matches!(layout.scheme, Scheme::Ring | Scheme::Striped) { layout.ring.max(1) } else { 1 };
        let tp = layout.tp.max(1);
        let pieces = |n: u32| (tokens / f64::from(n)).ceil();
        let (tokens, whole_tokens, ways, head_ways) = match layout.scheme {
            Scheme::Megatron => (tokens, tokens, tp, tp),
            Scheme::MegatronSequence => (tokens, pieces(tp), tp, tp),
            Scheme::RsMmAg => (tokens, tokens, tp, tp),
            Scheme::Ulysses => (pieces(tp), pieces(tp), 1, tp),
            Scheme::Ring | Scheme::Striped => (pieces(ring), pieces(tp), tp / ring, tp / ring),
        };
        let most = |heads: u64| (heads.div_ceil(u64::from(head_ways.max(1))), heads);
        let mut share =
            Share { tokens, whole_tokens, ways, ring, heads: (1, 1), kv_heads: (1, 1), top_k: 1.0 };
        for row in rows {
            match row.op {
                RowOp::Attention { heads, kv_heads, .. } => {
                    (share.heads, share.kv_heads) = (most(heads), most(kv_heads));
                }
                RowOp::Experts { top_k, .. } => share.top_k = top_k.max(1) as f64,
                _ => {}
            }
        }
        share
    }

    /// Query heads of the slowest rank.
    fn heads(&self) -> f64 {
        self.heads.0 as f64
    }

    /// Heads of keys and values of the slowest rank: a head that several ranks need lies on each.
    fn kv_heads(&self) -> f64 {
        self.kv_heads.0 as f64
    }

    /// Part of `features` that the slowest rank has: whole heads where heads are what is cut.
    fn features(&self, features: u64, by_head: bool, attention: Option<&RowOp>) -> f64 {
        if self.ways == 1 {
            return features as f64;
        }
        if !by_head || self.heads.1 <= 1 {
            return features.div_ceil(u64::from(self.ways)) as f64;
        }
        if let Some(RowOp::Attention { heads, kv_heads, qk, v, .. }) = attention
            && features == heads * qk + kv_heads * (qk + v)
        {
            return self.heads() * *qk as f64 + self.kv_heads() * (qk + v) as f64;
        }
        features as f64 * self.heads.0 as f64 / self.heads.1 as f64
    }
}

/// What meets in the attention of one rank, per sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Meets {
    /// Whether a ring gathers its queries and leaves keys where they lie, because they are fewer.
    pub queries_travel: bool,
    pub sequences: f64,
    /// Queries of one sequence over all ranks.
    pub own: f64,
    pub heads: f64,
    pub kv_heads: f64,
    pub qk: f64,
    pub v: f64,
}

impl Share {
    /// None for a row that is no attention.
    pub(crate) fn meets(&self, op: &RowOp, load: &Load) -> Option<Meets> {
        let &RowOp::Attention { qk, v, latent, .. } = op else { return None };
        let sequences = load.sequences.max(1.0);
        let own = load.tokens / sequences;
        let cached = !load.training && own < load.keys;
        let (heads, kv_heads) = (self.heads.0 as f64, self.kv_heads.0 as f64);
        let (qk, v, kv_heads) = match latent {
            // Cached tokens would otherwise have to be expanded, every one for every call.
            Some(l) if cached => (l.qk, l.v, 1.0),
            _ => (qk, v, kv_heads),
        };
        let queries_travel = self.ring > 1 && cached && own * heads < load.near() * kv_heads;
        Some(Meets { queries_travel, sequences, own, heads, kv_heads, qk: qk as f64, v: v as f64 })
    }
}

/// A row on the slowest rank, collectives apart.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RowCost {
    /// Forward.
    pub forward: Part,
    /// Gradient of what goes in.
    pub backward_input: Part,
    /// Gradient of the weights.
    pub backward_weight: Part,
    /// Traffic of the forward pass at least: each number once.
    pub bytes: f64,
    /// Weights outside of routed experts, in numbers.
    pub weights: f64,
    /// Weights of routed experts, in numbers.
    pub expert_weights: f64,
    /// Bytes kept for the backward pass.
    pub keep_bytes: f64,
    /// Of these, the scores of attention.
    pub scores_bytes: f64,
    /// What goes in and what comes out, at once.
    pub working_bytes: f64,
}

/// Row `at` of `rows` on the slowest rank.
#[must_use]
pub fn row(
    m: &Machine,
    rows: &[Row],
    at: usize,
    share: &Share,
    layout: &Layout,
    load: &Load,
    experts: &ExpertLoad,
) -> RowCost {
    let rank = Rank { m, share, layout, load, experts };
    let row = &rows[at];
    let mut c = match row.op {
        RowOp::Matmul { k, n, bias } => rank.matmul(rows, at, (k, n), bias),
        RowOp::Attention { .. } => rank.attention(&row.op),
        RowOp::Experts { experts, k, n, matrices, .. } => rank.grouped(experts, (k, n), matrices),
        RowOp::Pass { reads, writes, weights } => rank.pass(row.cut, reads, writes, weights),
        RowOp::Embed { rows, width } => rank.embed(row.cut, rows, width),
    };
    c.keep_bytes += rank.kept(row);
    if !load.training {
        (c.backward_input, c.backward_weight) = (Part::default(), Part::default());
        (c.keep_bytes, c.scores_bytes) = (0.0, 0.0);
    }
    c
}

/// Kernel by kernel: a pass over so many bytes.
fn passed(m: &Machine, bytes: f64) -> Part {
    Part { memory_ns: m.pass_ns(bytes), launches: 1.0, ..Part::default() }
}

fn product(ns: f64, flops: f64) -> Part {
    Part { compute_ns: ns, launches: 1.0, flops, ..Part::default() }
}

/// A rank and what it is asked for.
struct Rank<'a> {
    m: &'a Machine,
    share: &'a Share,
    layout: &'a Layout,
    load: &'a Load,
    experts: &'a ExpertLoad,
}

impl Rank<'_> {
    fn expert_tp(&self) -> f64 {
        f64::from(self.layout.expert_tp.max(1))
    }

    /// Tokens of the row, by how much of each the rank has.
    fn tokens(&self, cut: RowCut) -> f64 {
        match cut {
            // What goes into a product by column is gathered again rather than kept where tokens are divided.
            RowCut::Whole | RowCut::Col => self.share.whole_tokens,
            RowCut::Row | RowCut::Heads => self.share.tokens / f64::from(self.share.ways),
            RowCut::Experts => self.experts.rows / self.share.top_k,
        }
    }

    /// Bytes kept of a row's inputs and masks.
    fn kept(&self, row: &Row) -> f64 {
        let keep = row.keep_bytes as f64;
        if row.cut != RowCut::Experts {
            return keep * self.tokens(row.cut);
        }
        let inputs = match row.op {
            RowOp::Experts { k, .. } => ACTIVATION * self.share.top_k * k as f64,
            _ => 0.0,
        };
        let inner = (keep - inputs).max(0.0) / self.expert_tp();
        self.tokens(row.cut) * self.experts.slowest * (inputs + inner)
    }

    fn matmul(&self, rows: &[Row], at: usize, (k, n): (u64, u64), bias: bool) -> RowCost {
        let (m, share, p) = (self.m, self.share, self.layout.precision);
        let attention = rows.iter().position(|r| matches!(r.op, RowOp::Attention { .. }));
        let op = attention.map(|a| &rows[a].op);
        // Before attention columns are heads; the first product by row after it takes them in.
        let by_head = attention.is_some_and(|a| at < a || rows[a..at].iter().all(|r| r.cut != RowCut::Row));
        let (t, k, n) = match rows[at].cut {
            RowCut::Col | RowCut::Heads => (share.tokens, k as f64, share.features(n, by_head, op)),
            RowCut::Row => (share.tokens, share.features(k, by_head, op), n as f64),
            RowCut::Whole | RowCut::Experts => (share.whole_tokens, k as f64, n as f64),
        };
        let flops = 2.0 * t * n * k;
        let numbers = n * k;
        // Gradients add up in f32: within the product, or in a pass that reads the new ones at 2 bytes.
        let weight_ns = m.matmul_ns(k, n, t, p);
        let weight = if m.curves().overlap.weight_gradient_fused {
            product(weight_ns.max(m.pass_ns(ACTIVATION * t * (n + k) + 8.0 * numbers)), flops)
        } else {
            product(weight_ns, flops) + passed(m, 10.0 * numbers)
        };
        RowCost {
            forward: product(m.matmul_ns(t, n, k, p), flops),
            backward_input: product(m.matmul_ns(t, k, n, p), flops),
            backward_weight: weight,
            bytes: p.bytes() * (t * k + numbers) + ACTIVATION * t * n,
            weights: numbers + if bias { n } else { 0.0 },
            working_bytes: ACTIVATION * t * (n + k),
            ..RowCost::default()
        }
    }

    fn pass(&self, cut: RowCut, reads: u64, writes: u64, weights: u64) -> RowCost {
        let (mut t, mut slowest) = (self.tokens(cut), 1.0);
        if cut == RowCut::Experts {
            (t, slowest) = (t / self.expert_tp(), self.experts.slowest);
        }
        let (reads, writes) = (ACTIVATION * t * reads as f64, ACTIVATION * t * writes as f64);
        let part = |bytes: f64| {
            let mean = passed(self.m, bytes);
            Part { imbalance_ns: self.m.pass_ns(bytes * slowest) - mean.memory_ns, ..mean }
        };
        RowCost {
            forward: part(reads + writes),
            // Reads what was read and the gradient of what was written, writes the gradient of what was read.
            backward_input: part(2.0 * reads + writes),
            bytes: (reads + writes) * slowest,
            weights: weights as f64,
            working_bytes: (reads + writes) * slowest,
            ..RowCost::default()
        }
    }

    fn embed(&self, cut: RowCut, rows: u64, width: u64) -> RowCost {
        let (words, t) = match cut {
            RowCut::Row => (rows.div_ceil(u64::from(self.share.ways)), self.share.tokens),
            _ => (rows, self.share.whole_tokens),
        };
        let bytes = ACTIVATION * t * width as f64;
        RowCost {
            forward: passed(self.m, 2.0 * bytes),
            // Reads the gradient, reads and writes f32 sums.
            backward_weight: passed(self.m, 5.0 * bytes),
            bytes: 2.0 * bytes,
            weights: words as f64 * width as f64,
            working_bytes: bytes,
            ..RowCost::default()
        }
    }

    /// Products of routed experts: the mean rank as compute, what the slowest takes longer as imbalance.
    fn grouped(&self, count: u64, (k, n): (u64, u64), matrices: u64) -> RowCost {
        let (m, load, p) = (self.m, self.experts, self.layout.precision);
        let (k, n) = (k as f64, n.div_ceil(u64::from(self.layout.expert_tp.max(1))) as f64);
        let local = count.div_ceil(u64::from(self.layout.ep.max(1))) as f64;
        let ups = matrices.saturating_sub(1).max(1) as f64;
        let forward = |groups: f64, each: f64| {
            m.grouped_ns(groups, each, ups * n, k, p) + m.grouped_ns(groups, each, k, n, p)
        };
        let input = |groups: f64, each: f64| {
            m.grouped_ns(groups, each, k, ups * n, p) + m.grouped_ns(groups, each, n, k, p)
        };
        let weight = |groups: f64, each: f64| {
            m.grouped_ns(groups, k, ups * n, each, p) + m.grouped_ns(groups, n, k, each, p)
        };
        let part = |ns: &dyn Fn(f64, f64) -> f64| {
            let of = |groups: f64, rows: f64| if rows > 0.0 { ns(groups, rows / groups) } else { 0.0 };
            let mean = of(local.min(load.rows.max(1.0)), load.rows);
            let slowest = of(load.active.max(1.0), load.rows * load.slowest);
            Part {
                compute_ns: mean,
                imbalance_ns: (slowest - mean).max(0.0),
                launches: 2.0,
                flops: 2.0 * load.rows * k * n * (ups + 1.0),
                ..Part::default()
            }
        };
        let rows = load.rows * load.slowest;
        let weights = local * k * n * (ups + 1.0);
        let mut backward_weight = part(&weight);
        if !m.curves().overlap.weight_gradient_fused {
            backward_weight += passed(m, 10.0 * weights);
        }
        let read = load.active * k * n * (ups + 1.0);
        RowCost {
            forward: part(&forward),
            backward_input: part(&input),
            backward_weight,
            bytes: p.bytes() * (rows * (k + ups * n) + read) + ACTIVATION * rows * (k + n),
            expert_weights: weights,
            working_bytes: ACTIVATION * rows * (2.0 * k + ups * n),
            ..RowCost::default()
        }
    }

    /// Attention over the heads and queries of the slowest rank.
    fn attention(&self, op: &RowOp) -> RowCost {
        let (&RowOp::Attention { causal, scores_bytes, latent, .. }, Some(meets)) =
            (op, self.share.meets(op, self.load))
        else {
            return RowCost::default();
        };
        let (m, share, load) = (self.m, self.share, self.load);
        let Meets { queries_travel, sequences, own, heads, kv_heads, qk, v } = meets;
        // Heads are cut where features are, or by the exchange around attention: all queries meet these heads. Around a
        // ring a rank has its piece of the queries, or all of them and its piece of the keys.
        let ring = f64::from(share.ring);
        let queries = if queries_travel { own } else { (own / ring).max(1.0) };
        if scores_bytes > 0 {
            return self.stored_scores((heads * sequences, queries, qk, v), scores_bytes as f64);
        }
        // A cache holds numbers as narrow as the products', a byte at least; one latent is key and value at once.
        let width =
            if load.training { ACTIVATION } else { self.layout.precision.bytes().clamp(1.0, ACTIVATION) };
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
        let (near, seen) = (load.near(), load.seen(own, causal));
        let windowed = near < load.keys;
        let (mean, slowest) = if share.ring == 1 {
            let ns = m.attention_ns(&if windowed { work(seen, false) } else { work(load.keys, causal) });
            (ns, ns)
        } else if queries_travel {
            let ns = m.attention_ns(&work(near / ring, false));
            (ns, ns)
        } else {
            // One block of keys per step. The last piece of a contiguous cut sees nearly all keys, and the ring goes
            // at its pace; pieces dealt out in turn see about half of every block.
            let full = ring * m.attention_ns(&work(load.keys / ring, false));
            let mean = full * seen / load.keys;
            let last = if causal { full * (1.0 - queries / 2.0 / load.keys) } else { full };
            let last = last.min(full * near / load.keys);
            (mean, if self.layout.scheme == Scheme::Ring { last.max(mean) } else { mean })
        };
        let part = |times: f64| Part {
            compute_ns: times * mean,
            imbalance_ns: times * (slowest - mean),
            launches: if queries_travel { 1.0 } else { ring },
            flops: times * 2.0 * own / ring * seen * heads * sequences * (qk + v),
            ..Part::default()
        };
        let tokens = sequences * queries;
        RowCost {
            forward: part(1.0),
            backward_input: part(FUSED_BACKWARD),
            bytes: ACTIVATION * (tokens * heads * (qk + v) + sequences * near / ring * kv_heads * (qk + v)),
            working_bytes: ACTIVATION * tokens * (heads + kv_heads) * (qk + v),
            ..RowCost::default()
        }
    }

    /// Attention that writes its scores: two products and passes over groups · queries · keys. Masked keys are
    /// computed too.
    fn stored_scores(&self, (groups, q, qk, v): (f64, f64, f64, f64), kept: f64) -> RowCost {
        let (m, p, k) = (self.m, Precision::Bf16, self.load.keys);
        let scores = groups * q * k;
        let times = |rows: f64, n: f64, inner: f64, width: f64| {
            product(m.grouped_ns(groups, rows, n, inner, p), 2.0 * scores * width)
        };
        // The softmax reads and writes; what is kept beyond its result is a dropout's, which reads, writes, and
        // writes a mask.
        let dropout = if kept > ACTIVATION { passed(m, 5.0 * scores) } else { Part::default() };
        RowCost {
            forward: times(q, k, qk, qk) + times(q, v, k, v) + passed(m, 2.0 * ACTIVATION * scores) + dropout,
            backward_input: times(q, k, v, v)
                + times(k, v, q, v)
                + times(q, qk, k, qk)
                + times(k, qk, q, qk)
                + passed(m, 3.0 * ACTIVATION * scores)
                + dropout,
            bytes: ACTIVATION * (groups * (q + k) * (qk + v) + 4.0 * scores),
            keep_bytes: kept * scores,
            scores_bytes: kept * scores,
            working_bytes: ACTIVATION * (groups * (q + k) * (qk + v) + 2.0 * scores),
            ..RowCost::default()
        }
    }
}
