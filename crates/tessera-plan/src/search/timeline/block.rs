//! Simulates consecutive layers on the streams of a rank. A micro-batch is a chain of steps. If two
//! micro-batches overlap, their chains are queued alternately, switching at each expert all-to-all,
//! so that one computes while the other's tokens travel.

use std::collections::BTreeMap;

use tessera_cost::intervals::{Interval, IntervalKind};
use tessera_cost::moe::{buffer_bytes, dispatch_bytes};
use tessera_cost::op_cost::{OpCost, RankShare, op_cost};
use tessera_cost::params::TpScheme;
use tessera_cost::profile::TpOverlap;
use tessera_cost::stream_sim::{Contention, Task, TaskGraph, TaskId, TaskResource};
use tessera_cost::{CollectiveOp, GroupSpan};
use tessera_ir::StreamKind;
use tessera_ir::analytic_model::{LayerOp, LayerOpKind, OpSharding};
use tessera_mesh::{LinkClass, Precision};

use super::super::PREFETCH_WINDOW;
use super::{BLOCK_LAYERS, TimelineInputs};

const STREAMS: [StreamKind; 4] =
    [StreamKind::Compute, StreamKind::TpCollective, StreamKind::A2a, StreamKind::Io];
const COMPUTE: u8 = 0;
const TP: u8 = 1;
const A2A: u8 = 2;
const IO: u8 = 3;

/// Layers simulated before the drawn ones, to reach steady state.
const WARMUP_LAYERS: u32 = 4;

/// Bytes of an activation element in a collective: bf16, whatever the matmul precision. Dispatch
/// and combine have precisions of their own.
const ACTIVATION_BYTES: f64 = 2.0;

/// Simulates equal layers with these rows. Returns the intervals of [`BLOCK_LAYERS`] of them and a
/// description of each rank.
pub(super) fn simulate_block(scene: &TimelineInputs, rows: &[LayerOp]) -> (Vec<Interval>, Vec<String>) {
    let steps = LayerExpansion::new(scene, rows).expand_steps();
    if steps.is_empty() {
        return (Vec::new(), Vec::new());
    }
    let uneven = steps.iter().any(|s| s.slowest_ns > s.mean_ns * (1.0 + 1e-9));
    let exchanged = steps.iter().any(|s| s.lane == A2A);
    let ranks = match (uneven, exchanged) {
        (true, true) => vec!["a rank with the mean load".to_owned(), "the rank with the most".to_owned()],
        (true, false) => vec!["the rank with the most".to_owned()],
        _ => vec!["every rank".to_owned()],
    };
    let (tasks, labels, fetched) = (TaskGraph::default(), Vec::new(), BTreeMap::new());
    let mut play = BlockSimulation { scene, tasks, labels, next_rendezvous: 0, fetch_tasks: fetched };
    let slow: Vec<bool> = if ranks.len() == 2 { vec![false, true] } else { vec![uneven] };
    let starts = play.queue_layers(&steps, &slow);
    let contention = Contention { compute: scene.q.machine.contention_factor(), links: true };
    // Chains whose edges only lead to earlier tasks cannot deadlock.
    let windows = play.tasks.run(contention).unwrap_or_default();
    let at = |task: &TaskId| windows.get(task.0 as usize).map_or(0.0, |w| w.start_ns);
    let (from, to) =
        (at(&starts[WARMUP_LAYERS as usize]), at(&starts[(WARMUP_LAYERS + BLOCK_LAYERS) as usize]));
    let mut bars: Vec<Interval> = Vec::new();
    for (window, label) in windows.iter().zip(&play.labels) {
        let (start_ns, end_ns) = (window.start_ns.max(from) - from, window.end_ns.min(to) - from);
        if end_ns <= start_ns {
            continue;
        }
        let lane = STREAMS[label.lane as usize].name();
        let last = bars.iter_mut().rev().find(|b| b.rank == label.rank && b.track == lane);
        match last {
            // Merge consecutive chunks into one interval.
            Some(b) if b.name == label.name && start_ns - b.end_ns < 1e-6 => b.end_ns = end_ns,
            _ => bars.push(Interval {
                rank: label.rank,
                track: lane.to_owned(),
                name: label.name.clone(),
                kind: label.kind,
                start_ns,
                end_ns,
            }),
        }
    }
    bars.sort_by(|a, b| {
        (a.rank, stream_index(a)).cmp(&(b.rank, stream_index(b))).then(a.start_ns.total_cmp(&b.start_ns))
    });
    (bars, ranks)
}

/// Returns the index of a bar's stream.
fn stream_index(bar: &Interval) -> usize {
    STREAMS.iter().position(|l| l.name() == bar.track).unwrap_or(STREAMS.len())
}

/// A compute or transfer step of one micro-batch in a layer, on the stream `lane`.
#[derive(Debug, Clone, PartialEq)]
struct LayerStep {
    name: String,
    lane: u8,
    kind: IntervalKind,
    link: LinkClass,
    /// Duration on a rank with the mean load, and on the slowest rank.
    mean_ns: f64,
    slowest_ns: f64,
    /// Number of chunks; the next step may start on each separately.
    chunks: u32,
    /// Whether each chunk unblocks the same chunk of the next step, or only the last chunk unblocks
    /// the whole step.
    per_chunk: bool,
    /// Whether the step needs the layer's experts in device memory.
    needs_experts: bool,
}

/// The rows of one layer, expanded into compute and transfer steps.
struct LayerExpansion<'a> {
    scene: &'a TimelineInputs<'a>,
    rows: &'a [LayerOp],
    share: RankShare,
}

impl<'a> LayerExpansion<'a> {
    fn new(scene: &'a TimelineInputs<'a>, rows: &'a [LayerOp]) -> LayerExpansion<'a> {
        LayerExpansion { scene, rows, share: RankShare::for_layer(rows, &scene.c.layout, scene.load.tokens) }
    }

    fn expand_steps(&self) -> Vec<LayerStep> {
        let (s, l) = (self.scene, &self.scene.c.layout);
        let mut steps = Vec::new();
        let mut at = 0;
        while at < self.rows.len() {
            let r = &self.rows[at];
            let cost = op_cost(&s.q.machine, self.rows, at, &self.share, l, &s.load, &s.expert_load);
            match (r.kind, r.sharding) {
                (LayerOpKind::Attention { qk, v, stored_score_bytes: scores_bytes, .. }, _) => {
                    let split = scores_bytes > 0 || l.scheme == TpScheme::RsMmAg;
                    self.push_attention(
                        &r.kind,
                        &cost,
                        split.then(|| qk as f64 / (qk + v) as f64),
                        &mut steps,
                    );
                }
                (LayerOpKind::Matmul { k, .. }, OpSharding::Col) if self.share.feature_shards > 1 => {
                    self.push_column_parallel(r, k as f64, &cost, &mut steps)
                }
                (LayerOpKind::Matmul { n, .. }, OpSharding::Row) if self.share.feature_shards > 1 => {
                    self.push_row_parallel(r, n as f64, &cost, &mut steps)
                }
                (LayerOpKind::Experts { .. }, _) => {
                    // Kernels between the expert matmuls run on the expert ranks.
                    let mut here = vec![(r.name, cost)];
                    while self.rows.get(at + 1).is_some_and(|r| r.sharding == OpSharding::Experts) {
                        at += 1;
                        let cost =
                            op_cost(&s.q.machine, self.rows, at, &self.share, l, &s.load, &s.expert_load);
                        here.push((self.rows[at].name, cost));
                    }
                    self.push_experts(&r.kind, &here, &mut steps);
                }
                _ => steps.push(compute_step(r.name, &cost)),
            }
            at += 1;
        }
        steps.retain(|s| s.slowest_ns > 0.0);
        // Packing belongs to the exchange: on its stream it leaves the compute stream free.
        if steps.iter().any(|s| s.lane == A2A) {
            steps.iter_mut().filter(|s| s.kind == IntervalKind::Pack).for_each(|s| s.lane = A2A);
        }
        steps
    }

    /// Returns the number of chunks in which the executor overlaps a matmul with its transfer.
    fn chunk_count(&self) -> u32 {
        let overlap = &self.scene.q.machine.device_curves().overlap;
        if overlap.tp != TpOverlap::Chunks {
            return 1;
        }
        let most = (self.share.tokens / overlap.chunk_rows).floor();
        (most as u32).clamp(1, self.share.feature_shards.max(1))
    }

    fn transfer_step(
        &self,
        name: &str,
        lane: u8,
        op: CollectiveOp,
        bytes: f64,
        span: GroupSpan,
    ) -> LayerStep {
        let ns = self.scene.q.machine.collective_cost(op, bytes, span).ns;
        LayerStep {
            name: name.to_owned(),
            lane,
            kind: IntervalKind::Collective,
            link: if span.domains > 1 { LinkClass::Network } else { LinkClass::Domain },
            mean_ns: ns,
            slowest_ns: ns,
            chunks: 1,
            per_chunk: false,
            needs_experts: false,
        }
    }

    fn push_column_parallel(&self, r: &LayerOp, k: f64, cost: &OpCost, steps: &mut Vec<LayerStep>) {
        let pieces = self.chunk_count();
        if self.scene.c.layout.scheme.shards_tokens() {
            let bytes = ACTIVATION_BYTES * self.share.tokens * k;
            let gather = self.transfer_step(
                &format!("AG {}", row_prefix(r.name)),
                TP,
                CollectiveOp::AllGather,
                bytes,
                self.share.feature_span(self.scene.spans.tp),
            );
            steps.push(LayerStep { chunks: pieces, per_chunk: pieces > 1, ..gather });
            steps.push(LayerStep { chunks: pieces, ..compute_step(r.name, cost) });
        } else {
            steps.push(compute_step(r.name, cost));
        }
    }

    fn push_row_parallel(&self, r: &LayerOp, n: f64, cost: &OpCost, steps: &mut Vec<LayerStep>) {
        let pieces = self.chunk_count();
        let bytes = ACTIVATION_BYTES * self.share.tokens * n;
        let (name, op) = if self.scene.c.layout.scheme.shards_tokens() {
            ("RS", CollectiveOp::ReduceScatter)
        } else {
            ("AR", CollectiveOp::AllReduce)
        };
        steps.push(LayerStep { chunks: pieces, per_chunk: pieces > 1, ..compute_step(r.name, cost) });
        let after = self.transfer_step(
            &format!("{name} {}", row_prefix(r.name)),
            TP,
            op,
            bytes,
            self.share.feature_span(self.scene.spans.tp),
        );
        steps.push(LayerStep { chunks: pieces, ..after });
    }

    /// Adds attention with the transfers of its scheme. `scores` is the share of QK^T if it is a
    /// step of its own.
    fn push_attention(
        &self,
        op: &LayerOpKind,
        cost: &OpCost,
        scores: Option<f64>,
        steps: &mut Vec<LayerStep>,
    ) {
        let &LayerOpKind::Attention { heads, kv_heads, qk, v, .. } = op else { return };
        let (heads, kv_heads, qk, v) = (heads as f64, kv_heads as f64, qk as f64, v as f64);
        let (s, tp) = (self.scene, self.scene.spans.tp);
        let whole = compute_step("attention", cost);
        let (first, rest) = match scores {
            Some(x) => (vec![scale_step(&whole, "QK^T", x)], scale_step(&whole, "softmax + PV", 1.0 - x)),
            None => (Vec::new(), LayerStep { name: "QK^T, softmax + PV".to_owned(), ..whole.clone() }),
        };
        match s.c.layout.scheme {
            TpScheme::Ulysses if tp.ranks > 1 => {
                let kv = kv_heads.max(f64::from(tp.ranks).min(heads));
                let exchange = |name: &str, width: f64| {
                    self.transfer_step(
                        name,
                        TP,
                        CollectiveOp::AllToAll,
                        ACTIVATION_BYTES * self.share.tokens * width,
                        tp,
                    )
                };
                steps.push(exchange("A2A queries", heads * qk));
                steps.push(exchange("A2A keys", kv * qk));
                steps.push(exchange("A2A values", kv * v));
                steps.extend(first);
                steps.push(rest);
                steps.push(exchange("A2A outputs", heads * v));
            }
            TpScheme::RsMmAg if tp.ranks > 1 => {
                let logits = ACTIVATION_BYTES * s.load.tokens * s.load.keys * heads;
                let out = ACTIVATION_BYTES * self.share.tokens * heads * v;
                steps.extend(first);
                steps.push(self.transfer_step("RS logits", TP, CollectiveOp::ReduceScatter, logits, tp));
                steps.push(rest);
                steps.push(self.transfer_step("AG outputs", TP, CollectiveOp::AllGather, out, tp));
            }
            TpScheme::Ring | TpScheme::Striped if self.share.ring > 1 => {
                // The current block of keys and values is sent on during its use: one transfer
                // fewer than matmuls.
                let ring = self.share.ring;
                let span = GroupSpan { ranks: 2, domains: tp.domains.min(2) };
                let kv = (kv_heads / f64::from(self.share.feature_shards)).ceil();
                let bytes =
                    ACTIVATION_BYTES * s.load.sequences * s.load.keys / f64::from(ring) * kv * (qk + v);
                let send = self.transfer_step("send keys, values", TP, CollectiveOp::SendRecv, bytes, span);
                let sends = f64::from(ring - 1);
                let (mean_ns, slowest_ns) = (send.mean_ns * sends, send.slowest_ns * sends);
                steps.push(LayerStep { mean_ns, slowest_ns, chunks: ring - 1, per_chunk: true, ..send });
                steps.push(LayerStep { name: "QK^T, softmax + PV".to_owned(), chunks: ring, ..whole });
            }
            _ => {
                steps.extend(first);
                steps.push(rest);
            }
        }
    }

    /// Adds dispatch, the expert matmuls and combine.
    fn push_experts(&self, op: &LayerOpKind, here: &[(&str, OpCost)], steps: &mut Vec<LayerStep>) {
        let &LayerOpKind::Experts { top_k, k, .. } = op else { return };
        let (s, l, load) = (self.scene, &self.scene.c.layout, &self.scene.expert_load);
        let (ep, expert_tp) = (f64::from(l.ep.max(1)), f64::from(l.expert_tp.max(1)));
        // Tokens that each rank sends, without dropped ones.
        let sent_tokens = load.mean_rows / top_k as f64 / (1.0 - load.dropped).max(1e-9) / expert_tp;
        let dispatch_step = |name: &str, wire: Precision| {
            let remote = dispatch_bytes(sent_tokens, k, load.remote_copies * load.busiest_over_mean, wire);
            self.transfer_step(name, A2A, CollectiveOp::AllToAll, buffer_bytes(remote, l.ep), s.spans.ep)
        };
        let gather_step = |name: &str, op| {
            self.transfer_step(
                name,
                A2A,
                op,
                ACTIVATION_BYTES * load.mean_rows * load.slowest_over_mean * k as f64,
                s.spans.expert_tp,
            )
        };
        if ep > 1.0 {
            steps.push(dispatch_step(
                &format!("A2A dispatch ({})", l.wire_precision.name()),
                l.wire_precision,
            ));
        }
        if l.expert_tp > 1 {
            steps.push(gather_step("AG expert rows", CollectiveOp::AllGather));
        }
        steps.extend(
            here.iter().map(|(name, cost)| LayerStep { needs_experts: true, ..compute_step(name, cost) }),
        );
        if l.expert_tp > 1 {
            steps.push(gather_step("RS expert rows", CollectiveOp::ReduceScatter));
        }
        if ep > 1.0 {
            let back = if l.wire_precision == Precision::F32 { Precision::F32 } else { Precision::Bf16 };
            steps.push(dispatch_step(&format!("A2A combine ({})", back.name()), back));
        }
        if self.share.whole_tokens >= self.share.tokens && self.share.feature_shards > 1 {
            let bytes = ACTIVATION_BYTES * self.share.tokens * k as f64;
            steps.push(self.transfer_step("AG tokens", TP, CollectiveOp::AllGather, bytes, s.spans.tp));
        }
    }
}

fn compute_step(name: &str, cost: &OpCost) -> LayerStep {
    let mean_ns = cost.forward.compute_ns + cost.forward.memory_ns;
    LayerStep {
        name: name.to_owned(),
        lane: COMPUTE,
        kind: if matches!(name, "moe.pack" | "moe.unpack") {
            IntervalKind::Pack
        } else {
            IntervalKind::Compute
        },
        link: LinkClass::Domain,
        mean_ns,
        slowest_ns: mean_ns + cost.forward.imbalance_ns,
        chunks: 1,
        per_chunk: false,
        needs_experts: false,
    }
}

fn scale_step(step: &LayerStep, name: &str, share: f64) -> LayerStep {
    let (mean_ns, slowest_ns) = (step.mean_ns * share, step.slowest_ns * share);
    LayerStep { name: name.to_owned(), mean_ns, slowest_ns, ..step.clone() }
}

/// Returns the prefix of a row name: `attention` of `attention.qkv`.
fn row_prefix(row: &str) -> &str {
    row.split('.').next().unwrap_or(row)
}

/// Returns the suffix that marks the second of two overlapping micro-batches in interval names.
fn chain_suffix(chain: usize) -> &'static str {
    if chain > 0 { " (2)" } else { "" }
}

struct TaskLabel {
    rank: u32,
    lane: u8,
    name: String,
    kind: IntervalKind,
}

struct BlockSimulation<'a> {
    scene: &'a TimelineInputs<'a>,
    tasks: TaskGraph,
    labels: Vec<TaskLabel>,
    next_rendezvous: u32,
    /// Fetch tasks that the experts of a chain's layer wait for, by rank.
    fetch_tasks: BTreeMap<(usize, u32), Vec<Vec<TaskId>>>,
}

impl BlockSimulation<'_> {
    /// Queues all layers on all ranks. Returns the first task of each layer of the first
    /// micro-batch.
    fn queue_layers(&mut self, steps: &[LayerStep], slow: &[bool]) -> Vec<TaskId> {
        let exchanges = steps.iter().any(|s| s.lane == A2A);
        let chains = if self.scene.overlaps_exchange && exchanges { 2 } else { 1 };
        let all: Vec<(u32, usize)> = (0..WARMUP_LAYERS + BLOCK_LAYERS + 1)
            .flat_map(|layer| (0..steps.len()).map(move |i| (layer, i)))
            .collect();
        let routed = steps.iter().position(|s| s.needs_experts);
        let mut starts = Vec::new();
        // For each chain and rank, the tasks that the next step waits for, chunk by chunk.
        let mut before: Vec<Vec<Vec<TaskId>>> = vec![vec![Vec::new(); slow.len()]; chains];
        // A turn ends with an expert all-to-all, even within a layer, and with the packing that
        // follows it.
        let ends_turn = |i: usize| {
            let next = &steps[(i + 1) % steps.len()];
            steps[i].lane == A2A && next.lane != A2A
        };
        for turn in all.split_inclusive(|(_, i)| ends_turn(*i)) {
            for (chain, before) in before.iter_mut().enumerate() {
                for &(layer, i) in turn {
                    let [ahead_ns, late_ns] = self.scene.fetch_ns;
                    if i == 0 {
                        let target = layer + PREFETCH_WINDOW - 1;
                        self.queue_fetch("prefetch", ahead_ns, chain, target, before);
                    }
                    // A rank learns which of its experts are needed when their tokens arrive.
                    if Some(i) == routed {
                        self.queue_fetch("fetch", late_ns, chain, layer, before);
                    }
                    let first = self.queue_step(&steps[i], chain, layer, slow, before);
                    if chain == 0 && i == 0 {
                        starts.push(first);
                    }
                }
            }
        }
        starts
    }

    /// Queues the fetch of a layer's experts on every rank.
    fn queue_fetch(&mut self, word: &str, work_ns: f64, chain: usize, layer: u32, before: &[Vec<TaskId>]) {
        if work_ns <= 0.0 {
            return;
        }
        for (rank, before) in (0..).zip(before) {
            let uses = TaskResource::Link(LinkClass::Host);
            let task = self.tasks.push(Task { rank, stream: IO, work_ns, resource: uses, collective: None });
            let of = i64::from(layer) - i64::from(WARMUP_LAYERS);
            let name = format!("{word} experts of layer {of}{}", chain_suffix(chain));
            self.labels.push(TaskLabel { rank, lane: IO, name, kind: IntervalKind::Fetch });
            before.iter().for_each(|b| self.tasks.add_dependency(task, *b));
            let all = self.fetch_tasks.entry((chain, layer)).or_default();
            all.resize(all.len().max(rank as usize + 1), Vec::new());
            all[rank as usize].push(task);
        }
    }

    /// Queues one step on all ranks and returns its first task. Replaces `before` by the tasks that
    /// the next step waits for.
    fn queue_step(
        &mut self,
        step: &LayerStep,
        chain: usize,
        layer: u32,
        slow: &[bool],
        before: &mut [Vec<TaskId>],
    ) -> TaskId {
        let rendezvous = self.next_rendezvous;
        self.next_rendezvous += step.chunks;
        let mut first = None;
        for (rank, slow) in slow.iter().enumerate() {
            let work_ns = if *slow { step.slowest_ns } else { step.mean_ns } / f64::from(step.chunks);
            let mut tasks = Vec::new();
            for piece in 0..step.chunks {
                let (uses, meets) = match step.kind {
                    IntervalKind::Collective => {
                        (TaskResource::Link(step.link), (step.lane == A2A).then_some(rendezvous + piece))
                    }
                    _ => (TaskResource::Compute, None),
                };
                let task = self.tasks.push(Task {
                    rank: rank as u32,
                    stream: step.lane,
                    work_ns,
                    resource: uses,
                    collective: meets,
                });
                let name = format!("{}{}", step.name, chain_suffix(chain));
                self.labels.push(TaskLabel { rank: rank as u32, lane: step.lane, name, kind: step.kind });
                // Connect chunk by chunk; if the step has one chunk more, its first waits for
                // nothing in the previous step.
                let upstream_chunks = before[rank].len() as u32;
                let per_chunk = step.chunks > 1 && (step.chunks - 1..=step.chunks).contains(&upstream_chunks);
                for (i, b) in before[rank].iter().enumerate() {
                    if !per_chunk || i as u32 + step.chunks - upstream_chunks == piece {
                        self.tasks.add_dependency(task, *b);
                    }
                }
                if let (true, Some(fetched)) = (step.needs_experts, self.fetch_tasks.get(&(chain, layer))) {
                    fetched[rank].iter().for_each(|f| self.tasks.add_dependency(task, *f));
                }
                first.get_or_insert(task);
                tasks.push(task);
            }
            before[rank] = if step.per_chunk { tasks } else { tasks.split_off(tasks.len() - 1) };
        }
        first.unwrap_or(TaskId(0))
    }
}
