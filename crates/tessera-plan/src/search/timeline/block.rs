//! One layer after another on a rank's streams. A micro-batch is a chain of steps; where two are under way at once,
//! their chains are queued in turns, changing at each exchange between experts, so that one computes while the
//! other's tokens travel.

use std::collections::BTreeMap;

use tessera_cost::bars::{Bar, Kind};
use tessera_cost::knobs::Scheme;
use tessera_cost::moe::{buffer_bytes, dispatch_bytes};
use tessera_cost::profile::Hides;
use tessera_cost::rows::{RowCost, Share, row};
use tessera_cost::streams::{Contention, Task, TaskId, Tasks, Uses};
use tessera_cost::{CollectiveOp, Span};
use tessera_ir::work::{Row, RowCut, RowOp};
use tessera_mesh::{LinkClass, Precision};

use super::{LAYERS, Scene};

const LANES: [&str; 4] = ["compute", "tp_collective", "a2a", "io"];
const COMPUTE: u8 = 0;
const TP: u8 = 1;
const A2A: u8 = 2;
const IO: u8 = 3;

/// Layers between a fetch that a predictor begins and its use.
const WINDOW: u32 = 1;

/// Layers played before those drawn, so that all streams are in their stride.
const LEAD: u32 = 4;

/// Bytes of a number of activations.
const ACTIVATION: f64 = 2.0;

/// Plays equal layers of these rows: the bars of [`LAYERS`] of them, and what the ranks stand for.
pub(super) fn play(scene: &Scene, rows: &[Row]) -> (Vec<Bar>, Vec<String>) {
    let steps = Layer::of(scene, rows).steps();
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
    let (tasks, labels, fetched) = (Tasks::default(), Vec::new(), BTreeMap::new());
    let mut play = Play { scene, tasks, labels, meets: 0, fetched };
    let slow: Vec<bool> = if ranks.len() == 2 { vec![false, true] } else { vec![uneven] };
    let starts = play.queue(&steps, &slow);
    let contention = Contention { compute: scene.q.machine.contention(), links: true };
    // Chains with edges to earlier tasks alone cannot stand still.
    let windows = play.tasks.run(contention).unwrap_or_default();
    let at = |task: &TaskId| windows.get(task.0 as usize).map_or(0.0, |w| w.start_ns);
    let (from, to) = (at(&starts[LEAD as usize]), at(&starts[(LEAD + LAYERS) as usize]));
    let mut bars: Vec<Bar> = Vec::new();
    for (window, label) in windows.iter().zip(&play.labels) {
        let (start_ns, end_ns) = (window.start_ns.max(from) - from, window.end_ns.min(to) - from);
        if end_ns <= start_ns {
            continue;
        }
        let lane = LANES[label.lane as usize];
        let last = bars.iter_mut().rev().find(|b| b.rank == label.rank && b.lane == lane);
        match last {
            // Chunks that follow each other are one bar.
            Some(b) if b.name == label.name && start_ns - b.end_ns < 1e-6 => b.end_ns = end_ns,
            _ => bars.push(Bar {
                rank: label.rank,
                lane: lane.to_owned(),
                name: label.name.clone(),
                kind: label.kind,
                start_ns,
                end_ns,
            }),
        }
    }
    bars.sort_by(|a, b| (a.rank, lane(a)).cmp(&(b.rank, lane(b))).then(a.start_ns.total_cmp(&b.start_ns)));
    (bars, ranks)
}

/// Place of a bar's lane among the streams.
fn lane(bar: &Bar) -> usize {
    LANES.iter().position(|l| *l == bar.lane).unwrap_or(LANES.len())
}

/// One thing that a micro-batch does in a layer.
#[derive(Debug, Clone, PartialEq)]
struct Step {
    name: String,
    lane: u8,
    kind: Kind,
    link: LinkClass,
    /// On a rank with the mean load, and on the slowest.
    mean_ns: f64,
    slowest_ns: f64,
    /// Pieces that the next step may start on one by one.
    pieces: u32,
    /// Whether it hands each piece to the same piece of the next step, or all of it to the whole.
    by_piece: bool,
    /// Whether it needs the layer's experts to be there.
    experts: bool,
}

/// Rows of one layer with the transfers between them.
struct Layer<'a> {
    scene: &'a Scene<'a>,
    rows: &'a [Row],
    share: Share,
}

impl<'a> Layer<'a> {
    fn of(scene: &'a Scene<'a>, rows: &'a [Row]) -> Layer<'a> {
        Layer { scene, rows, share: Share::of(rows, &scene.c.layout, scene.load.tokens) }
    }

    fn steps(&self) -> Vec<Step> {
        let (s, l) = (self.scene, &self.scene.c.layout);
        let mut steps = Vec::new();
        let mut at = 0;
        while at < self.rows.len() {
            let r = &self.rows[at];
            let cost = row(&s.q.machine, self.rows, at, &self.share, l, &s.load, &s.experts);
            match (r.op, r.cut) {
                (RowOp::Attention { qk, v, scores_bytes, .. }, _) => {
                    let split = scores_bytes > 0 || l.scheme == Scheme::RsMmAg;
                    self.attention(&r.op, &cost, split.then(|| qk as f64 / (qk + v) as f64), &mut steps);
                }
                (RowOp::Matmul { k, .. }, RowCut::Col) if self.share.ways > 1 => {
                    self.column(r, k as f64, &cost, &mut steps)
                }
                (RowOp::Matmul { n, .. }, RowCut::Row) if self.share.ways > 1 => {
                    self.by_row(r, n as f64, &cost, &mut steps)
                }
                (RowOp::Experts { .. }, _) => {
                    // What stands between the products of experts is done where they are.
                    let mut here = vec![(r.name, cost)];
                    while self.rows.get(at + 1).is_some_and(|r| r.cut == RowCut::Experts) {
                        at += 1;
                        let cost = row(&s.q.machine, self.rows, at, &self.share, l, &s.load, &s.experts);
                        here.push((self.rows[at].name, cost));
                    }
                    self.experts(&r.op, &here, &mut steps);
                }
                _ => steps.push(compute(r.name, &cost)),
            }
            at += 1;
        }
        steps.retain(|s| s.slowest_ns > 0.0);
        steps
    }

    /// Tokens divided between products: gathered before those by column, scattered after those by row.
    fn divided(&self) -> bool {
        matches!(self.scene.c.layout.scheme, Scheme::MegatronSequence | Scheme::Ring | Scheme::Striped)
    }

    /// The ranks that cut features.
    fn ways(&self) -> Span {
        let tp = self.scene.spans.tp;
        let rings = (tp.ranks / self.share.ways.max(1)).max(1);
        Span { ranks: self.share.ways, domains: tp.domains.div_ceil(rings).min(self.share.ways) }
    }

    /// Chunks in which the executor runs a product beside its transfer.
    fn chunks(&self) -> u32 {
        let overlap = &self.scene.q.machine.curves().overlap;
        if overlap.tp != Hides::Chunks {
            return 1;
        }
        let most = (self.share.tokens / overlap.chunk_rows).floor();
        (most as u32).clamp(1, self.share.ways.max(1))
    }

    fn transfer(&self, name: &str, lane: u8, op: CollectiveOp, bytes: f64, span: Span) -> Step {
        let ns = self.scene.q.machine.collective(op, bytes, span).ns;
        Step {
            name: name.to_owned(),
            lane,
            kind: Kind::Collective,
            link: if span.domains > 1 { LinkClass::Out } else { LinkClass::Domain },
            mean_ns: ns,
            slowest_ns: ns,
            pieces: 1,
            by_piece: false,
            experts: false,
        }
    }

    fn column(&self, r: &Row, k: f64, cost: &RowCost, steps: &mut Vec<Step>) {
        let pieces = self.chunks();
        if self.divided() {
            let bytes = ACTIVATION * self.share.tokens * k;
            let gather = self.transfer(
                &format!("AG {}", part(r.name)),
                TP,
                CollectiveOp::AllGather,
                bytes,
                self.ways(),
            );
            steps.push(Step { pieces, by_piece: pieces > 1, ..gather });
            steps.push(Step { pieces, ..compute(r.name, cost) });
        } else {
            steps.push(compute(r.name, cost));
        }
    }

    fn by_row(&self, r: &Row, n: f64, cost: &RowCost, steps: &mut Vec<Step>) {
        let pieces = self.chunks();
        let bytes = ACTIVATION * self.share.tokens * n;
        let (name, op) = if self.divided() {
            ("RS", CollectiveOp::ReduceScatter)
        } else {
            ("AR", CollectiveOp::AllReduce)
        };
        steps.push(Step { pieces, by_piece: pieces > 1, ..compute(r.name, cost) });
        let after = self.transfer(&format!("{name} {}", part(r.name)), TP, op, bytes, self.ways());
        steps.push(Step { pieces, ..after });
    }

    /// Attention with what its scheme moves. `scores` is the share of the scores where they are a step of their own.
    fn attention(&self, op: &RowOp, cost: &RowCost, scores: Option<f64>, steps: &mut Vec<Step>) {
        let &RowOp::Attention { heads, kv_heads, qk, v, .. } = op else { return };
        let (heads, kv_heads, qk, v) = (heads as f64, kv_heads as f64, qk as f64, v as f64);
        let (s, tp) = (self.scene, self.scene.spans.tp);
        let whole = compute("attention", cost);
        let (first, rest) = match scores {
            Some(x) => (vec![scaled(&whole, "QK^T", x)], scaled(&whole, "softmax + PV", 1.0 - x)),
            None => (Vec::new(), Step { name: "QK^T, softmax + PV".to_owned(), ..whole.clone() }),
        };
        match s.c.layout.scheme {
            Scheme::Ulysses if tp.ranks > 1 => {
                let kv = kv_heads.max(f64::from(tp.ranks).min(heads));
                let exchange = |name: &str, width: f64| {
                    self.transfer(
                        name,
                        TP,
                        CollectiveOp::AllToAll,
                        ACTIVATION * self.share.tokens * width,
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
            Scheme::RsMmAg if tp.ranks > 1 => {
                let logits = ACTIVATION * s.load.tokens * s.load.keys * heads;
                let out = ACTIVATION * self.share.tokens * heads * v;
                steps.extend(first);
                steps.push(self.transfer("RS logits", TP, CollectiveOp::ReduceScatter, logits, tp));
                steps.push(rest);
                steps.push(self.transfer("AG outputs", TP, CollectiveOp::AllGather, out, tp));
            }
            Scheme::Ring | Scheme::Striped if self.share.ring > 1 => {
                // A block of keys and values goes on while it is used: one transfer fewer than products.
                let ring = self.share.ring;
                let span = Span { ranks: 2, domains: tp.domains.min(2) };
                let kv = (kv_heads / f64::from(self.share.ways)).ceil();
                let bytes = ACTIVATION * s.load.sequences * s.load.keys / f64::from(ring) * kv * (qk + v);
                let send = self.transfer("send keys, values", TP, CollectiveOp::SendRecv, bytes, span);
                let sends = f64::from(ring - 1);
                let (mean_ns, slowest_ns) = (send.mean_ns * sends, send.slowest_ns * sends);
                steps.push(Step { mean_ns, slowest_ns, pieces: ring - 1, by_piece: true, ..send });
                steps.push(Step { name: "QK^T, softmax + PV".to_owned(), pieces: ring, ..whole });
            }
            _ => {
                steps.extend(first);
                steps.push(rest);
            }
        }
    }

    /// Dispatch, the products of experts, combine.
    fn experts(&self, op: &RowOp, here: &[(&str, RowCost)], steps: &mut Vec<Step>) {
        let &RowOp::Experts { top_k, k, .. } = op else { return };
        let (s, l, load) = (self.scene, &self.scene.c.layout, &self.scene.experts);
        let (ep, expert_tp) = (f64::from(l.ep.max(1)), f64::from(l.expert_tp.max(1)));
        // Tokens that each rank sends off, dropped ones not.
        let own = load.rows / top_k as f64 / (1.0 - load.dropped).max(1e-9) / expert_tp;
        let travel = |name: &str, wire: Precision| {
            let remote = dispatch_bytes(own, k, load.copies * load.busiest_link, wire);
            self.transfer(name, A2A, CollectiveOp::AllToAll, buffer_bytes(remote, l.ep), s.spans.ep)
        };
        let joined = |name: &str, op| {
            self.transfer(name, A2A, op, ACTIVATION * load.rows * load.slowest * k as f64, s.spans.expert_tp)
        };
        if ep > 1.0 {
            steps.push(travel(&format!("A2A dispatch ({})", l.wire.name()), l.wire));
        }
        if l.expert_tp > 1 {
            steps.push(joined("AG expert rows", CollectiveOp::AllGather));
        }
        steps.extend(here.iter().map(|(name, cost)| Step { experts: true, ..compute(name, cost) }));
        if l.expert_tp > 1 {
            steps.push(joined("RS expert rows", CollectiveOp::ReduceScatter));
        }
        if ep > 1.0 {
            let back = if l.wire == Precision::F32 { Precision::F32 } else { Precision::Bf16 };
            steps.push(travel(&format!("A2A combine ({})", back.name()), back));
        }
        if self.share.whole_tokens >= self.share.tokens && self.share.ways > 1 {
            let bytes = ACTIVATION * self.share.tokens * k as f64;
            steps.push(self.transfer("AG tokens", TP, CollectiveOp::AllGather, bytes, s.spans.tp));
        }
    }
}

fn compute(name: &str, cost: &RowCost) -> Step {
    let mean_ns = cost.forward.compute_ns + cost.forward.memory_ns;
    Step {
        name: name.to_owned(),
        lane: COMPUTE,
        kind: if matches!(name, "moe.pack" | "moe.unpack") { Kind::Pack } else { Kind::Compute },
        link: LinkClass::Domain,
        mean_ns,
        slowest_ns: mean_ns + cost.forward.imbalance_ns,
        pieces: 1,
        by_piece: false,
        experts: false,
    }
}

fn scaled(step: &Step, name: &str, share: f64) -> Step {
    let (mean_ns, slowest_ns) = (step.mean_ns * share, step.slowest_ns * share);
    Step { name: name.to_owned(), mean_ns, slowest_ns, ..step.clone() }
}

/// `attention.qkv` belongs to attention.
fn part(row: &str) -> &str {
    row.split('.').next().unwrap_or(row)
}

/// Tells the second of two micro-batches from the first.
fn suffix(chain: usize) -> &'static str {
    if chain > 0 { " (2)" } else { "" }
}

struct Label {
    rank: u32,
    lane: u8,
    name: String,
    kind: Kind,
}

struct Play<'a> {
    scene: &'a Scene<'a>,
    tasks: Tasks,
    labels: Vec<Label>,
    meets: u32,
    /// What the experts of a chain's layer wait for besides their tokens, by rank.
    fetched: BTreeMap<(usize, u32), Vec<Vec<TaskId>>>,
}

impl Play<'_> {
    /// Queues all layers on all ranks; the first task of each layer of the first micro-batch.
    fn queue(&mut self, steps: &[Step], slow: &[bool]) -> Vec<TaskId> {
        let exchanges = steps.iter().any(|s| s.lane == A2A);
        let chains = if self.scene.beside && exchanges { 2 } else { 1 };
        let all: Vec<(u32, usize)> =
            (0..LEAD + LAYERS + 1).flat_map(|layer| (0..steps.len()).map(move |i| (layer, i))).collect();
        let routed = steps.iter().position(|s| s.experts);
        let mut starts = Vec::new();
        // For each chain and rank, what the next step waits for, piece by piece.
        let mut before: Vec<Vec<Vec<TaskId>>> = vec![vec![Vec::new(); slow.len()]; chains];
        // A turn ends with an exchange between experts, wherever the layer ends.
        for turn in all.split_inclusive(|(_, i)| steps[*i].lane == A2A) {
            for (chain, before) in before.iter_mut().enumerate() {
                for &(layer, i) in turn {
                    let [ahead_ns, late_ns] = self.scene.fetch_ns;
                    if i == 0 {
                        self.fetch("prefetch", ahead_ns, chain, layer + WINDOW, before);
                    }
                    // Which of its experts are asked for a rank learns with their tokens.
                    if Some(i) == routed {
                        self.fetch("fetch", late_ns, chain, layer, before);
                    }
                    let first = self.step(&steps[i], chain, layer, slow, before);
                    if chain == 0 && i == 0 {
                        starts.push(first);
                    }
                }
            }
        }
        starts
    }

    /// Begins to fetch what the experts of a layer need, on every rank.
    fn fetch(&mut self, word: &str, work_ns: f64, chain: usize, layer: u32, before: &[Vec<TaskId>]) {
        if work_ns <= 0.0 {
            return;
        }
        for (rank, before) in (0..).zip(before) {
            let uses = Uses::Link(LinkClass::Host);
            let task = self.tasks.push(Task { rank, stream: IO, work_ns, uses, meets: None });
            let of = i64::from(layer) - i64::from(LEAD);
            let name = format!("{word} experts of layer {of}{}", suffix(chain));
            self.labels.push(Label { rank, lane: IO, name, kind: Kind::Fetch });
            before.iter().for_each(|b| self.tasks.after(task, *b));
            let all = self.fetched.entry((chain, layer)).or_default();
            all.resize(all.len().max(rank as usize + 1), Vec::new());
            all[rank as usize].push(task);
        }
    }

    /// Queues one step on all ranks: its first task. `before` gets what the step after it waits for.
    fn step(
        &mut self,
        step: &Step,
        chain: usize,
        layer: u32,
        slow: &[bool],
        before: &mut [Vec<TaskId>],
    ) -> TaskId {
        let meet = self.meets;
        self.meets += step.pieces;
        let mut first = None;
        for (rank, slow) in slow.iter().enumerate() {
            let work_ns = if *slow { step.slowest_ns } else { step.mean_ns } / f64::from(step.pieces);
            let mut made = Vec::new();
            for piece in 0..step.pieces {
                let (uses, meets) = match step.kind {
                    Kind::Collective => (Uses::Link(step.link), (step.lane == A2A).then_some(meet + piece)),
                    _ => (Uses::Compute, None),
                };
                let task =
                    self.tasks.push(Task { rank: rank as u32, stream: step.lane, work_ns, uses, meets });
                let name = format!("{}{}", step.name, suffix(chain));
                self.labels.push(Label { rank: rank as u32, lane: step.lane, name, kind: step.kind });
                // Piece by piece; where the step has one piece more, its first needs nothing from the one before.
                let handed = before[rank].len() as u32;
                let by_piece = step.pieces > 1 && (step.pieces - 1..=step.pieces).contains(&handed);
                for (i, b) in before[rank].iter().enumerate() {
                    if !by_piece || i as u32 + step.pieces - handed == piece {
                        self.tasks.after(task, *b);
                    }
                }
                if let (true, Some(fetched)) = (step.experts, self.fetched.get(&(chain, layer))) {
                    fetched[rank].iter().for_each(|f| self.tasks.after(task, *f));
                }
                first.get_or_insert(task);
                made.push(task);
            }
            before[rank] = if step.by_piece { made } else { made.split_off(made.len() - 1) };
        }
        first.unwrap_or(TaskId(0))
    }
}
