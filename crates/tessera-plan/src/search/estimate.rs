//! What one arrangement takes: layers priced once per kind, put together into stages, stages into a step.
//!
//! Three levels, so that a search computes each only once: a [`Node`] is the layers of one layout and micro-batch, a
//! [`Pipe`] those layers over stages under a schedule, and the rest (who holds the optimizer, where experts and old
//! keys lie) is arithmetic on that.

mod total;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::ops::Range;

use tessera_cost::knobs::{Layout, Recompute, Schedule, Scheme};
use tessera_cost::layer::{LayerCost, Load, Spans, layer};
use tessera_cost::moe::{ExpertLoad, experts};
use tessera_cost::rows::Part;
use tessera_cost::schedule::{Pace, bubble_ns, in_flight_on, parameter_copies};
use tessera_cost::{CollectiveOp, Span, Transfer};
use tessera_ir::work::{Row, RowCut, RowOp, Work};
use tessera_mesh::Precision;

use super::budget::{Held, Totals, cache_share};
use super::legal::Rules;
use super::stages::{Balance, Cut, Kinds};
use super::{Candidate, Job, Question, Times};

/// Prices under one question, each layer's kept.
pub(super) struct Prices<'a> {
    pub q: &'a Question,
    pub rules: Rules<'a>,
    pub kinds: Kinds,
    /// Rows of each kind outside of routed experts, and of routed experts.
    rows: Vec<(Vec<Row>, Vec<Row>)>,
    /// Numbers that a token leaves in the cache of one layer of each kind.
    cache: Vec<f64>,
    /// Routed experts of a layer, and how many a token asks for.
    routed: Option<(u64, u64)>,
    /// Operations of a step that are of use: no recomputation, no padding.
    flops: f64,
    /// Weights of the whole model outside of routed experts, and of those.
    numbers: [f64; 2],
    /// The head, where it reads the embedding's table.
    tied_row: Vec<Row>,
    /// Numbers that a token leaves in all caches.
    cached: f64,
    dense: Memo<DenseKey, Brief>,
    moe: Memo<MoeKey, Brief>,
    loads: Memo<(u32, u64, u32), ExpertLoad>,
    wires: Memo<(u32, u64, u32, u32), Transfer>,
    balance: Balance,
    /// Cuts for so many stages of so many pieces each: a range of `cut`.
    cuts: Memo<(u32, u32), Range<usize>>,
    cut: Vec<Cut>,
}

/// What is kept under keys. Looked up, never listed, so that its order is not seen; values lie apart, so that finding one
/// moves none.
#[derive(Debug)]
struct Memo<K, V> {
    at: HashMap<K, u32, BuildHasherDefault<Mix>>,
    values: Vec<V>,
}

impl<K, V> Default for Memo<K, V> {
    fn default() -> Memo<K, V> {
        Memo { at: HashMap::default(), values: Vec::new() }
    }
}

impl<K: Hash + Eq, V> Memo<K, V> {
    /// What is kept under a key, made where it is not.
    fn of(&mut self, key: K, make: impl FnOnce() -> V) -> &V {
        let at = match self.at.get(&key) {
            Some(at) => *at as usize,
            None => {
                self.values.push(make());
                self.at.insert(key, self.values.len() as u32 - 1);
                self.values.len() - 1
            }
        };
        &self.values[at]
    }
}

/// Multiplies and rotates: keys are a few small numbers and no adversary chooses them.
#[derive(Debug, Default, Clone, Copy)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 29
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u64(&mut self, x: u64) {
        self.0 = (self.0.rotate_left(5) ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    fn write_u8(&mut self, x: u8) {
        self.write_u64(u64::from(x));
    }
    fn write_u32(&mut self, x: u32) {
        self.write_u64(u64::from(x));
    }
    fn write_isize(&mut self, x: isize) {
        self.write_u64(x as u64);
    }
}

type DenseKey = (u8, u32, u32, Scheme, Precision, u32, Recompute, u32);
type MoeKey = (u8, (u32, u32, u32, u32), (Precision, Precision, u32), u64, Recompute, (u32, u32));

/// Rows before all layers and after them, as kinds.
const FIRST: u8 = 254;
const LAST: u8 = 255;
/// The head alone, where it reads the embedding's table.
const TIED: u8 = 253;

/// What a search needs of a [`LayerCost`].
#[derive(Debug, Clone, Copy, Default)]
struct Brief {
    /// Forward, gradients of inputs with what is computed again for them, gradients of weights.
    ns: [f64; 3],
    /// Kernels of the same.
    launches: [f64; 3],
    keep_bytes: f64,
    working_bytes: f64,
    weights: f64,
    expert_weights: f64,
    weight_copies: f64,
    /// All of it.
    all: Part,
}

impl Brief {
    fn of(c: &LayerCost) -> Brief {
        let parts = [c.forward, c.backward_input + c.recompute, c.backward_weight];
        Brief {
            ns: parts.map(|p| p.ns()),
            launches: parts.map(|p| p.launches),
            keep_bytes: c.keep_bytes,
            working_bytes: c.working_bytes,
            weights: c.weights,
            expert_weights: c.expert_weights,
            weight_copies: c.weight_copies,
            all: c.forward + c.backward(),
        }
    }

    fn add(&mut self, b: &Brief) {
        for i in 0..3 {
            self.ns[i] += b.ns[i];
            self.launches[i] += b.launches[i];
        }
        self.keep_bytes += b.keep_bytes;
        self.working_bytes = self.working_bytes.max(b.working_bytes);
        self.weights += b.weights;
        self.expert_weights += b.expert_weights;
        self.weight_copies = self.weight_copies.max(b.weight_copies);
        self.all += b.all;
    }
}

/// The layers of one layout, micro-batch and recomputation.
#[derive(Debug, Clone, Default)]
pub(super) struct Node {
    /// Tells it from the nodes priced before it in the same place.
    serial: u64,
    /// One layer of each kind.
    layers: Vec<Brief>,
    first: Brief,
    last: Brief,
    /// Weights of a head that reads the embedding's table, in numbers of a rank.
    tied: f64,
    pub load: Option<ExpertLoad>,
    /// Cuts that were chosen, by stages and pieces.
    cuts: Vec<((u32, u32), usize)>,
    /// Bytes kept for the backward pass in all layers, and those that the narrowest layer works in.
    keep_bytes: f64,
    working_bytes: f64,
    /// Micro-batches of the fullest replica.
    pub micro_batches: u32,
    /// One boundary between stages, one direction.
    send_ns: f64,
    send_bytes: f64,
    sent: [f64; 3],
    /// Forward, backward and recomputation of one layer, by kind: what stages are balanced by.
    cost: Vec<f64>,
    /// Of that, what does not wait for routed experts.
    before: Vec<f64>,
}

/// Layers over stages.
#[derive(Debug, Clone, Default)]
pub(super) struct Pipe {
    /// Which cut of the layers.
    cut: usize,
    /// Time of one micro-batch on each stage, all directions.
    pub stages: Vec<f64>,
    /// Everything that the slowest stage does with one micro-batch.
    part: Part,
    /// Its time, launches and hidden transfers considered.
    work_ns: f64,
    /// Of that, the forward pass.
    forward_ns: f64,
    /// Of that, launches that nothing hides.
    launch_ns: f64,
    /// What overlap takes off dispatch and combine, contention paid.
    saved_ns: f64,
    /// Waiting over the whole step, and sends between stages.
    bubble_ns: f64,
    sends_ns: f64,
    /// Stages that may be the fullest, and what they hold.
    held: Vec<(u32, Held)>,
    /// Node and cut that those are of.
    held_of: (u64, usize),
    /// What the stage holds that has most weights.
    heavy: Held,
    /// Most bytes of keys and values on a stage.
    cache_bytes: f64,
    /// Layers with experts on the stage that has most, and layers.
    expert_layers: f64,
    layers: f64,
    /// Micro-batches whose activations the first stage holds.
    in_flight: f64,
    /// Whether times are those of what is held.
    timed: bool,
}

impl Pipe {
    /// Bytes of keys and values on the stage that has most.
    pub fn cache_bytes(&self) -> f64 {
        self.cache_bytes
    }

    /// Bytes kept for the backward pass on the stage that has most.
    pub fn kept_bytes(&self) -> f64 {
        self.held.iter().map(|(_, h)| h.keep_bytes * h.in_flight).fold(0.0, f64::max)
    }

    /// Micro-batches whose activations the first stage holds, of so many.
    pub fn in_flight(&self, micro_batches: u32) -> f64 {
        self.in_flight.min(f64::from(micro_batches))
    }
}

/// What the fullest rank holds, and which shares of experts and old keys lie elsewhere.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fit {
    /// Whether it fits.
    pub fits: bool,
    /// Bytes of the fullest stage in device memory.
    pub hbm_bytes: f64,
    /// Which of [`Pipe::held`] that is.
    at: usize,
    cold_share: f64,
    old_share: f64,
}

/// One candidate's sums.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sum {
    pub step_ns: f64,
    pub times: Times,
    pub totals: Totals,
    pub sent: [f64; 3],
    pub old_share: f64,
    /// Layers with room for fetched experts and the wait of a pass for cold ones; absent where none are cold.
    pub prefetch: Option<(u32, f64)>,
}

impl<'a> Prices<'a> {
    pub fn new(q: &'a Question, devices: u32) -> Prices<'a> {
        let rules =
            Rules { work: &q.work, job: q.job, cluster: &q.machine.cluster, space: &q.space, devices };
        let kinds = Kinds::of(q);
        let split = |i: &usize| {
            q.work.stacks[*i].rows.iter().cloned().partition::<Vec<_>, _>(|r| r.cut != RowCut::Experts)
        };
        let cache = |i: &usize| {
            let of = |r: &Row| match r.op {
                RowOp::Attention { cache, .. } => cache,
                _ => 0,
            };
            q.work.stacks[*i].rows.iter().map(of).sum::<u64>() as f64
        };
        Prices {
            q,
            rules,
            rows: kinds.stacks.iter().map(split).collect(),
            cache: kinds.stacks.iter().map(cache).collect(),
            routed: q.work.experts(),
            flops: useful_flops(&q.work, q),
            numbers: numbers(&q.work),
            tied_row: if q.work.tied { head(&q.work) } else { Vec::new() },
            cached: q.work.cache_bytes(1.0).0 as f64,
            dense: Memo::default(),
            moe: Memo::default(),
            loads: Memo::default(),
            wires: Memo::default(),
            balance: Balance::of(q, &kinds),
            cuts: Memo::default(),
            cut: Vec::new(),
            kinds,
        }
    }

    /// Prices the layers of a candidate's layout, micro-batch and recomputation.
    pub fn node(&mut self, c: &Candidate, out: &mut Node) {
        out.serial += 1;
        let (m, l) = (&self.q.machine, &c.layout);
        let share = self.q.job.batch().div_ceil(u64::from(c.replicas));
        out.micro_batches =
            u32::try_from(share.div_ceil(u64::from(c.micro_batch.max(1)))).unwrap_or(u32::MAX);
        let tokens = f64::from(c.micro_batch) * self.q.job.queries() as f64;
        let spans = self.spans(c);

        let group = tokens * f64::from(l.expert_tp * l.ep) / f64::from(l.tp);
        out.load = self.routed.map(|(n, k)| {
            let (routing, ep, cap) = (self.q.routing, l.ep, l.capacity_pct);
            *self.loads.of((ep, group.to_bits(), cap), || experts(n, k, ep, group, routing, cap))
        });
        let load = Load {
            tokens,
            sequences: f64::from(c.micro_batch),
            keys: self.q.job.context() as f64,
            window: self.q.window().map(|w| w as f64),
            training: matches!(self.q.job, Job::Train { .. }),
            recompute: c.recompute,
        };
        // What experts do not see is set aside, so that it does not tell equal layers apart.
        let plain = Layout { expert_tp: 1, ep: 1, wire: Precision::Bf16, capacity_pct: 0, ..*l };
        let key = |kind: u8, recompute: Recompute| {
            (kind, l.tp, l.ring, l.scheme, l.precision, c.micro_batch, recompute, spans.tp.domains)
        };
        out.layers.clear();
        out.cost.clear();
        out.before.clear();
        out.cuts.clear();
        for (kind, (dense, moe)) in self.rows.iter().enumerate() {
            let kind = kind as u8;
            let cost = self.dense.of(key(kind, c.recompute), || {
                Brief::of(&layer(m, dense, &plain, &load, &spans, &ExpertLoad::NONE))
            });
            out.before.push(cost.all.ns());
            out.layers.push(*cost);
            if let (false, Some(routed)) = (moe.is_empty(), &out.load) {
                // Only where tp keeps tokens whole do experts see it: each rank then needs all results.
                let whole = matches!(l.scheme, Scheme::Megatron | Scheme::RsMmAg);
                let (tp, micro_batch) = if whole { (l.tp, c.micro_batch) } else { (1, 0) };
                let layout = Layout { tp, ring: 1, scheme: Scheme::Megatron, ..*l };
                let key = (
                    kind,
                    (tp, micro_batch, l.expert_tp, l.ep),
                    (l.precision, l.wire, l.capacity_pct),
                    group.to_bits(),
                    c.recompute,
                    (spans.ep.domains, spans.expert_tp.domains),
                );
                let routed = self.moe.of(key, || Brief::of(&layer(m, moe, &layout, &load, &spans, routed)));
                out.layers[usize::from(kind)].add(routed);
            }
            out.cost.push(out.layers[usize::from(kind)].all.ns());
        }
        let ends = Load { recompute: Recompute::None, ..load };
        let mut end = |kind, rows: &[Row]| {
            *self.dense.of(key(kind, Recompute::None), || {
                Brief::of(&layer(m, rows, &plain, &ends, &spans, &ExpertLoad::NONE))
            })
        };
        out.first = end(FIRST, &self.q.work.first);
        out.last = end(LAST, &self.q.work.last);
        out.tied = if self.tied_row.is_empty() { 0.0 } else { end(TIED, &self.tied_row).weights };

        let layers = self.kinds.of.len() as u32;
        let kept = |(kind, c): (usize, &Brief)| self.kinds.count(kind, 0, layers) * c.keep_bytes;
        out.keep_bytes = out.first.keep_bytes + out.last.keep_bytes;
        out.keep_bytes += out.layers.iter().enumerate().map(kept).sum::<f64>();
        out.working_bytes = out.layers.iter().map(|c| c.working_bytes).reduce(f64::min).unwrap_or(0.0);
        (out.send_ns, out.send_bytes, out.sent) = (0.0, 0.0, [0.0; 3]);
        if c.pp > 1 {
            out.send_bytes = (tokens / f64::from(l.tp)).ceil() * self.q.work.width as f64 * 2.0;
            let domains = if self.crosses(c.unit() * c.pp) { 2 } else { 1 };
            let send = self.wire(CollectiveOp::SendRecv, out.send_bytes, Span { ranks: 2, domains });
            (out.send_ns, out.sent) = (send.ns, send.sent);
            if matches!(l.scheme, Scheme::Megatron | Scheme::RsMmAg) && l.tp > 1 {
                // Each rank of tp sends a piece, and the next stage's ranks put them together.
                let whole = tokens * self.q.work.width as f64 * 2.0;
                let gather = self.wire(CollectiveOp::AllGather, whole, spans.tp);
                out.send_ns += gather.ns;
                (0..3).for_each(|i| out.sent[i] += gather.sent[i]);
            }
        }
    }

    /// Puts a node's layers into stages under the candidate's schedule: who holds what.
    pub fn pipe(&mut self, c: &Candidate, node: &mut Node, out: &mut Pipe) {
        let (pp, v) = (c.pp, c.interleave.max(1));
        out.cut = match node.cuts.iter().find(|(key, _)| *key == (pp, v)) {
            Some((_, cut)) => *cut,
            None => {
                let cut = self.choose(node, pp, v);
                node.cuts.push(((pp, v), cut));
                cut
            }
        };
        self.hold(c, node, out);
        out.timed = false;
    }

    /// The cut over so many stages of so many pieces whose dearest stage takes least.
    fn choose(&mut self, node: &Node, stages: u32, pieces: u32) -> usize {
        let options = self.cuts.of((stages, pieces), || {
            let begin = self.cut.len();
            self.cut.extend(self.balance.cuts(&self.kinds, stages, pieces));
            begin..self.cut.len()
        });
        let ends = (node.first.all.ns(), node.last.all.ns());
        let (mut least, mut best) = (f64::INFINITY, options.start);
        if options.len() > 1 {
            for option in options.clone() {
                let dearest = self.cut[option].dearest(&node.cost, ends);
                if dearest < least {
                    (least, best) = (dearest, option);
                }
            }
        }
        best
    }

    /// Times of the stages, and what they wait.
    pub fn time(&self, c: &Candidate, node: &Node, out: &mut Pipe) {
        let m = &self.q.machine;
        let (pp, v) = (c.pp, c.interleave.max(1));
        out.timed = true;
        out.stages.clear();
        let launch = m.launch_ns();
        let (mut slowest, mut at, mut mean) = ((-1.0, [0.0; 3], 0.0), 0, [0.0; 3]);
        for stage in 0..pp {
            let (mut device, mut host) = ([0.0; 3], [0.0; 3]);
            self.each(c, node, out.cut, stage, |n, cost| {
                for i in 0..3 {
                    device[i] += n * cost.ns[i];
                    host[i] += n * cost.launches[i] * launch;
                }
            });
            let took = [0, 1, 2].map(|i| f64::max(device[i], host[i]));
            let sum: f64 = took.iter().sum();
            (0..3).for_each(|i| mean[i] += took[i] / f64::from(pp));
            out.stages.push(sum);
            if sum > slowest.0 {
                slowest = (sum, took, sum - device.iter().sum::<f64>());
                at = stage;
            }
        }
        let (work_ns, took, launch_ns) = slowest;
        let mut part = Part::default();
        self.each(c, node, out.cut, at, |n, cost| part += cost.all * n);
        out.part = part;

        let hidden =
            if self.beside(c, node) { part.ep_exposed_ns.min(part.compute_ns + part.memory_ns) } else { 0.0 };
        out.saved_ns = (hidden * (2.0 - m.contention())).max(0.0);
        let keep = if work_ns > 0.0 { 1.0 - out.saved_ns / work_ns } else { 1.0 };
        out.stages.iter_mut().for_each(|s| *s *= keep);
        out.work_ns = work_ns * keep;
        out.forward_ns = took[0] * keep;
        out.launch_ns = launch_ns;

        let n = f64::from(node.micro_batches);
        let send = node.send_ns;
        if pp == 1 {
            (out.bubble_ns, out.sends_ns) = (0.0, 0.0);
        } else if self.train() {
            let pace = Pace {
                forward_ns: mean[0] * keep,
                backward_input_ns: mean[1] * keep,
                backward_weight_ns: mean[2] * keep,
                send_ns: 0.0,
            };
            let passes = 2.0 * f64::from(v);
            let fill = passes * f64::from(pp - 1) * send;
            out.bubble_ns = bubble_ns(c.schedule, pp, v, node.micro_batches, &pace).max(0.0);
            out.sends_ns = n * passes * send + fill;
        } else {
            // A wave: all stages once, and the slowest for each further micro-batch. A decoded token must leave the last
            // stage before its sequence can enter the first again.
            let through: f64 = out.stages.iter().sum::<f64>();
            let step = match self.q.job {
                Job::Decode { .. } => f64::max(n * (out.work_ns + send), through + f64::from(pp) * send),
                _ => (n - 1.0) * (out.work_ns + send) + through + f64::from(pp - 1) * send,
            };
            out.sends_ns = n * send;
            out.bubble_ns = (step - n * out.work_ns - out.sends_ns).max(0.0);
        }
    }

    /// What the stages hold that may be the fullest.
    fn hold(&self, c: &Candidate, node: &Node, out: &mut Pipe) {
        if out.held_of != (node.serial, out.cut) {
            self.lay(c, node, out);
            out.held_of = (node.serial, out.cut);
        }
        for (stage, h) in &mut out.held {
            h.in_flight = self.in_flight(c, node, *stage);
        }
        out.in_flight = self.in_flight(c, node, 0);
    }

    /// Of a cut, whatever the schedule: the first stage of each that are unlike, but for those that an earlier one covers. No
    /// schedule has more in flight on a later stage.
    fn lay(&self, c: &Candidate, node: &Node, out: &mut Pipe) {
        let cut = &self.cut[out.cut];
        (out.expert_layers, out.layers, out.cache_bytes) = (0.0, 0.0, 0.0);
        out.held.clear();
        let mut heaviest = -1.0;
        for &stage in &cut.unlike {
            let h = self.held(c, node, out.cut, stage);
            let (mut moe, mut any) = (0.0, 0.0);
            for (kind, n) in cut.layers(stage).iter().enumerate() {
                any += n;
                moe += if self.rows[kind].1.is_empty() { 0.0 } else { *n };
            }
            out.expert_layers = out.expert_layers.max(moe);
            out.layers = out.layers.max(any);
            out.cache_bytes = out.cache_bytes.max(h.cache_bytes);
            if h.weights + h.expert_weights > heaviest {
                (heaviest, out.heavy) = (h.weights + h.expert_weights, h);
            }
            if !out.held.iter().any(|(_, o)| covers(o, &h)) {
                out.held.push((stage, h));
            }
        }
    }

    /// Micro-batches whose activations a stage holds.
    fn in_flight(&self, c: &Candidate, node: &Node, stage: u32) -> f64 {
        match self.train() {
            true => in_flight_on(c.schedule, c.pp, c.interleave, node.micro_batches, stage),
            false => 0.0,
        }
    }

    /// What one stage holds, with nothing in flight.
    fn held(&self, c: &Candidate, node: &Node, cut: usize, stage: u32) -> Held {
        let mut h = Held {
            send_bytes: node.send_bytes,
            weight_shards: f64::from(c.replicas),
            expert_shards: f64::from(c.expert_replicas),
            ..Held::default()
        };
        self.each(c, node, cut, stage, |n, cost| {
            h.weights += n * cost.weights;
            h.expert_weights += n * cost.expert_weights;
            h.keep_bytes += n * cost.keep_bytes;
            h.working_bytes = h.working_bytes.max(cost.working_bytes);
            h.layer_weights = h.layer_weights.max(cost.weights + cost.expert_weights);
            h.weight_shards = h.weight_shards.max(f64::from(c.replicas) * cost.weight_copies);
        });
        // One stage has the table once where the head reads it too.
        if c.pp == 1 {
            h.weights -= node.tied;
        }
        let cached = self.cache_of(c);
        for (n, numbers) in self.cut[cut].layers(stage).iter().zip(&self.cache) {
            h.cache_bytes += n * numbers * cached;
        }
        h
    }

    /// Bytes that one number of one token's keys and values comes to on a rank, over all its sequences.
    fn cache_of(&self, c: &Candidate) -> f64 {
        if self.train() {
            return 0.0;
        }
        let sequences = self.q.job.batch().div_ceil(u64::from(c.replicas)) as f64;
        let tokens = sequences * self.q.cached_tokens() as f64;
        tokens * cache_bytes(c.layout.precision) * cache_share(self.q.work.kv_heads, &c.layout)
    }

    /// Whether dispatch and combine of one micro-batch run beside another's products: two are under way at once, and the
    /// executor does that.
    fn beside(&self, c: &Candidate, node: &Node) -> bool {
        if !self.q.machine.curves().overlap.exchanges {
            return false;
        }
        match self.train() {
            true => c.schedule == Schedule::DualPipe,
            false => node.micro_batches >= 2 * c.pp,
        }
    }

    /// One transfer, kept.
    fn wire(&mut self, op: CollectiveOp, bytes: f64, span: Span) -> Transfer {
        let m = &self.q.machine;
        *self
            .wires
            .of((op as u32, bytes.to_bits(), span.ranks, span.domains), || m.collective(op, bytes, span))
    }

    /// Tokens that a step makes or reads.
    pub fn tokens(&self) -> f64 {
        self.q.job.batch() as f64 * self.q.job.queries() as f64
    }

    /// Share of the peak of all devices that useful operations make.
    pub fn mfu(&self, c: &Candidate, step_ns: f64) -> f64 {
        let peak = self.q.machine.cluster.flops_per_s(c.layout.precision).unwrap_or(f64::INFINITY);
        self.flops / (step_ns * 1e-9 * peak * f64::from(c.ranks()))
    }

    /// Layers of one stage, as ranges of one piece each.
    pub fn pieces(&self, c: &Candidate, pipe: &Pipe, stage: u32) -> Vec<Range<u64>> {
        let at = |i: u32| u64::from(self.cut[pipe.cut].borders[i as usize]);
        (0..c.interleave.max(1)).map(|v| v * c.pp + stage).map(|i| at(i)..at(i + 1)).collect()
    }

    fn train(&self) -> bool {
        matches!(self.q.job, Job::Train { .. })
    }

    /// What a stage runs: each layer's cost and how many there are, the ends included.
    fn each(&self, c: &Candidate, node: &Node, cut: usize, stage: u32, mut with: impl FnMut(f64, &Brief)) {
        for (n, cost) in self.cut[cut].layers(stage).iter().zip(&node.layers) {
            if *n > 0.0 {
                with(*n, cost);
            }
        }
        if stage == 0 {
            with(1.0, &node.first);
        }
        if stage + 1 == c.pp {
            with(1.0, &node.last);
        }
    }

    /// Where the groups of one layer stand: tp fastest, then ep.
    pub fn spans(&self, c: &Candidate) -> Spans {
        let cluster = &self.q.machine.cluster;
        let l = &c.layout;
        Spans {
            tp: Span::of(l.tp, 1, cluster),
            expert_tp: Span::of(l.expert_tp, 1, cluster),
            ep: Span::of(l.ep, l.expert_tp, cluster),
        }
    }

    /// Where `ranks` holders of the same weights stand: side by side within a unit, then one unit per copy of the model.
    pub fn copies_span(&self, c: &Candidate, ranks: u32) -> Span {
        let domain = self.q.machine.cluster.domain.max(1);
        let apart = c.unit() * c.pp;
        let copies = c.copies();
        let domains = if apart * copies <= domain {
            1
        } else if apart >= domain {
            copies * c.unit().div_ceil(domain)
        } else {
            (apart * copies).div_ceil(domain)
        };
        Span { ranks, domains: domains.clamp(1, ranks) }
    }

    /// Where the ranks stand that add up gradients, of so many copies of the weights: both directions of a bidirectional
    /// pipeline have one, on stages that lie opposite.
    pub fn gradients_span(&self, c: &Candidate, shards: u32) -> Span {
        let once = self.copies_span(c, shards);
        let both = parameter_copies(c.schedule, c.pp);
        let apart = both > 1 && self.crosses(c.unit() * c.pp);
        let domains = if apart { once.domains * both } else { once.domains };
        let ranks = shards * both;
        Span { ranks, domains: domains.clamp(1, ranks) }
    }

    /// Whether aligned blocks of so many ranks cross a border between domains.
    pub fn crosses(&self, ranks: u32) -> bool {
        let domain = self.q.machine.cluster.domain.max(1);
        self.rules.devices > domain && !domain.is_multiple_of(ranks)
    }
}

/// Whether one stage holds at least as much as another of everything, with as many micro-batches in flight.
fn covers(a: &Held, b: &Held) -> bool {
    a.weights >= b.weights
        && a.expert_weights >= b.expert_weights
        && a.keep_bytes >= b.keep_bytes
        && a.working_bytes >= b.working_bytes
        && a.layer_weights >= b.layer_weights
        && a.cache_bytes >= b.cache_bytes
        && a.weight_shards <= b.weight_shards
}

/// Bytes of a number in the cache: at the products' precision, but not below one.
fn cache_bytes(p: Precision) -> f64 {
    p.bytes().clamp(1.0, 2.0)
}

/// Weights outside of routed experts, and of those.
fn numbers(work: &Work) -> [f64; 2] {
    let mut sum = [0.0; 2];
    let ends = [(1, &work.first), (1, &work.last)];
    let layers = work.stacks.iter().map(|s| (s.count, &s.rows));
    for (count, rows) in layers.chain(ends) {
        for r in rows {
            sum[usize::from(r.cut == RowCut::Experts)] += (count * r.weights()) as f64;
        }
    }
    sum
}

/// The product over the whole vocabulary after the layers.
fn head(work: &Work) -> Vec<Row> {
    let reads = |r: &&Row| matches!(r.op, RowOp::Matmul { n, .. } if n == work.vocab);
    work.last.iter().filter(reads).cloned().collect()
}

/// Operations of a step without any that are done twice: products and attention, three times over in training.
fn useful_flops(work: &Work, q: &Question) -> f64 {
    let job = q.job;
    let rows = |rows: &[Row]| flops_seeing(rows, job, q.window());
    let layers: f64 = work.stacks.iter().map(|s| s.count as f64 * rows(&s.rows)).sum();
    let passes = if matches!(job, Job::Train { .. }) { 3.0 } else { 1.0 };
    passes * job.batch() as f64 * job.queries() as f64 * (rows(&work.first) + layers + rows(&work.last))
}

/// Operations of some rows for one token, forward.
pub(super) fn row_flops(rows: &[Row], job: Job) -> f64 {
    flops_seeing(rows, job, None)
}

fn flops_seeing(rows: &[Row], job: Job, window: Option<u64>) -> f64 {
    let queries = job.queries() as f64;
    let load = Load {
        tokens: queries,
        sequences: 1.0,
        keys: job.context() as f64,
        window: window.map(|w| w as f64),
        training: false,
        recompute: Recompute::None,
    };
    let row = |r: &Row| match r.op {
        RowOp::Matmul { k, n, .. } => 2.0 * (k * n) as f64,
        RowOp::Experts { top_k, k, n, matrices, .. } => 2.0 * (top_k * k * n * matrices) as f64,
        RowOp::Attention { heads, qk, v, causal, .. } => {
            2.0 * (heads * (qk + v)) as f64 * load.seen(queries, causal)
        }
        RowOp::Pass { .. } | RowOp::Embed { .. } => 0.0,
    };
    rows.iter().map(row).sum()
}
