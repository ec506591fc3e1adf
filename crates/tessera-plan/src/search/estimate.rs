//! Estimates one candidate: computes each kind of layer's cost once, assembles layers into stages
//! and stages into a step.
//!
//! There are three levels, so that a search computes each only once: a [`LayoutCost`] holds the
//! layers of one layout and micro-batch, a [`PipelineCost`] distributes them over stages under a
//! schedule, and the rest (optimizer sharding, placement of experts and old keys) is arithmetic on
//! the two.

mod total;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::ops::Range;

use tessera_cost::layer::{GroupSpans, LayerCost, LayerLoad, layer_cost};
use tessera_cost::moe::{ExpertLoad, expert_load};
use tessera_cost::op_cost::CostParts;
use tessera_cost::params::{LayerLayout, PipelineSchedule, Recompute, TpScheme};
use tessera_cost::schedule::{MicroBatchTimes, bubble_ns, parameter_copies, peak_in_flight_on};
use tessera_cost::{CollectiveCost, CollectiveOp, GroupSpan};
use tessera_ir::analytic_model::{AnalyticModel, LayerOp, LayerOpKind, OpSharding};
use tessera_mesh::Precision;

use super::budget::{MemoryTotals, StageFootprint, cache_share};
use super::constraints::Constraints;
use super::stage_balance::{LayerKinds, StageBalancer, StageSplit};
use super::{Candidate, Job, SearchQuery, StepTimes};

/// Estimates candidates of one query and caches the layer costs.
pub(super) struct Estimator<'a> {
    pub q: &'a SearchQuery,
    pub constraints: Constraints<'a>,
    pub kinds: LayerKinds,
    /// Cost rows of each kind of layer, dense rows and routed-expert rows apart.
    rows_by_kind: Vec<(Vec<LayerOp>, Vec<LayerOp>)>,
    /// Cache elements that a token leaves in one layer of each kind.
    cache_elements: Vec<f64>,
    /// Routed experts of a layer, and experts per token.
    experts_and_top_k: Option<(u64, u64)>,
    /// Useful operations of a step: no recomputation, no padding.
    useful_flops: f64,
    /// Weights of the whole model: dense, and of routed experts.
    weight_counts: [f64; 2],
    /// The rows of a head whose weight is tied to the embedding.
    tied_head_rows: Vec<LayerOp>,
    /// Cache elements that a token leaves in all layers.
    cache_elements_total: f64,
    dense_costs: Memo<DenseKey, CostSummary>,
    expert_costs: Memo<MoeKey, CostSummary>,
    expert_loads: Memo<(u32, u64, u32), ExpertLoad>,
    transfers: Memo<(u32, u64, u32, u32), CollectiveCost>,
    balancer: StageBalancer,
    /// Stage splits by number of stages and chunks per stage, as ranges of `splits`.
    split_ranges: Memo<(u32, u32), Range<usize>>,
    splits: Vec<StageSplit>,
}

/// A memo table. Lookups never iterate, so the map's order is not observable. Values live in a
/// separate vector, so that growing the map does not move them.
#[derive(Debug)]
struct Memo<K, V> {
    indices: HashMap<K, u32, BuildHasherDefault<MixHasher>>,
    values: Vec<V>,
}

impl<K, V> Default for Memo<K, V> {
    fn default() -> Memo<K, V> {
        Memo { indices: HashMap::default(), values: Vec::new() }
    }
}

impl<K: Hash + Eq, V> Memo<K, V> {
    /// Returns the value of a key, computing it on a miss.
    fn get_or_insert(&mut self, key: K, make: impl FnOnce() -> V) -> &V {
        let at = match self.indices.get(&key) {
            Some(at) => *at as usize,
            None => {
                self.values.push(make());
                self.indices.insert(key, self.values.len() as u32 - 1);
                self.values.len() - 1
            }
        };
        &self.values[at]
    }
}

/// A multiply-and-rotate hasher: keys are a few small numbers, and no adversary chooses them.
#[derive(Debug, Default, Clone, Copy)]
struct MixHasher(u64);

impl Hasher for MixHasher {
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

type DenseKey = (u8, u32, u32, TpScheme, Precision, u32, Recompute, u32);
type MoeKey = (u8, (u32, u32, u32, u32), (Precision, Precision, u32), u64, Recompute, (u32, u32));

/// Kinds of the rows before and after all layers.
const FIRST_ROWS: u8 = 254;
const LAST_ROWS: u8 = 255;
/// Kind of a tied head alone.
const TIED_HEAD: u8 = 253;

/// The fields of a [`LayerCost`] that the search needs.
#[derive(Debug, Clone, Copy, Default)]
struct CostSummary {
    /// Times of the forward pass, of the input gradients with recomputation, and of the weight
    /// gradients.
    pass_ns: [f64; 3],
    /// Kernel launches of the same three passes.
    launches: [f64; 3],
    saved_bytes: f64,
    workspace_bytes: f64,
    weights: f64,
    expert_weights: f64,
    weight_copies: f64,
    /// The sum of all passes.
    total: CostParts,
}

impl CostSummary {
    fn from_layer_cost(c: &LayerCost) -> CostSummary {
        let parts = [c.forward, c.backward_input + c.recompute, c.backward_weight];
        CostSummary {
            pass_ns: parts.map(|p| p.total_ns()),
            launches: parts.map(|p| p.launches),
            saved_bytes: c.kept_bytes,
            workspace_bytes: c.working_bytes,
            weights: c.weights,
            expert_weights: c.expert_weights,
            weight_copies: c.weight_replicas,
            total: c.forward + c.backward_total(),
        }
    }

    fn add(&mut self, b: &CostSummary) {
        for i in 0..3 {
            self.pass_ns[i] += b.pass_ns[i];
            self.launches[i] += b.launches[i];
        }
        self.saved_bytes += b.saved_bytes;
        self.workspace_bytes = self.workspace_bytes.max(b.workspace_bytes);
        self.weights += b.weights;
        self.expert_weights += b.expert_weights;
        self.weight_copies = self.weight_copies.max(b.weight_copies);
        self.total += b.total;
    }
}

/// The layer costs of one layout, micro-batch and recomputation policy.
#[derive(Debug, Clone, Default)]
pub(super) struct LayoutCost {
    /// Distinguishes this from earlier contents of the same buffer.
    serial: u64,
    /// The cost of one layer of each kind.
    layer_costs: Vec<CostSummary>,
    first_cost: CostSummary,
    last_cost: CostSummary,
    /// Weights of a tied head on one rank.
    tied_weights: f64,
    pub expert_load: Option<ExpertLoad>,
    /// Stage splits chosen so far, by stages and chunks per stage.
    chosen_splits: Vec<((u32, u32), usize)>,
    /// Bytes saved for the backward pass in all layers, and the smallest workspace of any layer.
    saved_bytes: f64,
    min_workspace_bytes: f64,
    /// Micro-batches of the replica with the most sequences.
    pub micro_batches: u32,
    /// One send across a stage boundary, in one direction.
    send_ns: f64,
    send_bytes: f64,
    send_link_bytes: [f64; 3],
    /// Forward, backward and recomputation time of one layer, by kind; the weight for balancing
    /// stages.
    layer_ns: Vec<f64>,
    /// The part of `layer_ns` that does not depend on routed experts.
    dense_ns: Vec<f64>,
}

/// The cost of the layers, distributed over stages.
#[derive(Debug, Clone, Default)]
pub(super) struct PipelineCost {
    /// Index of the stage split.
    split: usize,
    /// Time of one micro-batch on each stage, over all passes.
    pub stage_ns: Vec<f64>,
    /// All work of the slowest stage for one micro-batch.
    slowest_part: CostParts,
    /// Time of that work, including exposed launches and minus hidden transfers.
    slowest_ns: f64,
    /// The forward part of `slowest_ns`.
    slowest_forward_ns: f64,
    /// The exposed launches in `slowest_ns`.
    exposed_launch_ns: f64,
    /// Time that overlap removes from dispatch and combine, net of contention.
    overlapped_ns: f64,
    /// Bubble time of the whole step, and sends between stages.
    bubble_ns: f64,
    sends_ns: f64,
    /// Footprints of the stages that may have the peak memory.
    footprints: Vec<(u32, StageFootprint)>,
    /// Layout cost and split that `footprints` belongs to.
    footprints_key: (u64, usize),
    /// Footprint of the stage with the most weights.
    heaviest: StageFootprint,
    /// Maximum bytes of keys and values on any stage.
    max_cache_bytes: f64,
    /// Maximum numbers of expert layers and of layers on any stage.
    max_expert_layers: f64,
    max_layers: f64,
    /// Micro-batches whose activations the first stage holds.
    in_flight: f64,
    /// Whether the times belong to the current `footprints`.
    is_timed: bool,
}

impl PipelineCost {
    /// Returns the maximum bytes of keys and values on any stage.
    pub fn max_cache_bytes(&self) -> f64 {
        self.max_cache_bytes
    }

    /// Returns the maximum bytes saved for the backward pass on any stage.
    pub fn max_saved_bytes(&self) -> f64 {
        self.footprints.iter().map(|(_, h)| h.saved_bytes * h.in_flight).fold(0.0, f64::max)
    }

    /// Returns how many of `micro_batches` have their activations on the first stage at once.
    pub fn in_flight_of(&self, micro_batches: u32) -> f64 {
        self.in_flight.min(f64::from(micro_batches))
    }
}

/// The peak memory of a candidate, and the shares of experts and old keys placed elsewhere.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryFit {
    /// Whether the candidate fits.
    pub fits: bool,
    /// Device-memory bytes of the peak stage.
    pub hbm_bytes: f64,
    /// Index of that stage in [`PipelineCost::footprints`].
    peak_index: usize,
    cold_expert_share: f64,
    old_cache_share: f64,
}

/// The step time and memory of one candidate.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepCost {
    pub step_ns: f64,
    pub breakdown: StepTimes,
    pub memory: MemoryTotals,
    pub link_bytes: [f64; 3],
    pub old_cache_share: f64,
    /// Prefetch window in layers and stall per forward pass for cold experts; `None` if no expert
    /// is cold.
    pub prefetch: Option<(u32, f64)>,
}

impl<'a> Estimator<'a> {
    pub fn new(q: &'a SearchQuery, devices: u32) -> Estimator<'a> {
        let constraints =
            Constraints { work: &q.work, job: q.job, cluster: &q.machine.cluster, space: &q.space, devices };
        let kinds = LayerKinds::from_query(q);
        let split = |i: &usize| {
            q.work.stacks[*i]
                .ops
                .iter()
                .cloned()
                .partition::<Vec<_>, _>(|r| r.sharding != OpSharding::Experts)
        };
        let cache = |i: &usize| {
            let of = |r: &LayerOp| match r.kind {
                LayerOpKind::Attention { cache_width: cache, .. } => cache,
                _ => 0,
            };
            q.work.stacks[*i].ops.iter().map(of).sum::<u64>() as f64
        };
        Estimator {
            q,
            constraints,
            rows_by_kind: kinds.example_stacks.iter().map(split).collect(),
            cache_elements: kinds.example_stacks.iter().map(cache).collect(),
            experts_and_top_k: q.work.routed_experts(),
            useful_flops: useful_flops(&q.work, q),
            weight_counts: weight_counts(&q.work),
            tied_head_rows: if q.work.tied_embeddings { head_rows(&q.work) } else { Vec::new() },
            cache_elements_total: q.work.kv_cache_bytes(1.0).0 as f64,
            dense_costs: Memo::default(),
            expert_costs: Memo::default(),
            expert_loads: Memo::default(),
            transfers: Memo::default(),
            balancer: StageBalancer::from_query(q, &kinds),
            split_ranges: Memo::default(),
            splits: Vec::new(),
            kinds,
        }
    }

    /// Computes the layer costs of a candidate's layout, micro-batch and recomputation policy.
    pub fn compute_layers(&mut self, c: &Candidate, out: &mut LayoutCost) {
        out.serial += 1;
        let (m, l) = (&self.q.machine, &c.layout);
        let share = self.q.job.batch_size().div_ceil(u64::from(c.replicas));
        out.micro_batches =
            u32::try_from(share.div_ceil(u64::from(c.micro_batch.max(1)))).unwrap_or(u32::MAX);
        let tokens = f64::from(c.micro_batch) * self.q.job.query_tokens() as f64;
        let spans = self.group_spans(c);

        let group = tokens * f64::from(l.expert_tp * l.ep) / f64::from(l.tp);
        out.expert_load = self.experts_and_top_k.map(|(n, k)| {
            let (routing, ep, cap) = (self.q.routing, l.ep, l.capacity_pct);
            *self
                .expert_loads
                .get_or_insert((ep, group.to_bits(), cap), || expert_load(n, k, ep, group, routing, cap))
        });
        let load = LayerLoad {
            tokens,
            sequences: f64::from(c.micro_batch),
            keys: self.q.job.context_tokens() as f64,
            window: self.q.attention_window().map(|w| w as f64),
            training: matches!(self.q.job, Job::Train { .. }),
            recompute: c.recompute,
        };
        // Reset the fields that only experts depend on, so that equal dense layers share a key.
        let plain =
            LayerLayout { expert_tp: 1, ep: 1, wire_precision: Precision::Bf16, capacity_pct: 0, ..*l };
        let key = |kind: u8, recompute: Recompute| {
            (kind, l.tp, l.ring, l.scheme, l.precision, c.micro_batch, recompute, spans.tp.domains)
        };
        out.layer_costs.clear();
        out.layer_ns.clear();
        out.dense_ns.clear();
        out.chosen_splits.clear();
        for (kind, (dense, moe)) in self.rows_by_kind.iter().enumerate() {
            let kind = kind as u8;
            let cost = self.dense_costs.get_or_insert(key(kind, c.recompute), || {
                CostSummary::from_layer_cost(&layer_cost(m, dense, &plain, &load, &spans, &ExpertLoad::NONE))
            });
            out.dense_ns.push(cost.total.total_ns());
            out.layer_costs.push(*cost);
            if let (false, Some(routed)) = (moe.is_empty(), &out.expert_load) {
                // Expert rows depend on tp only where tp keeps whole tokens: each rank then needs
                // all results.
                let keeps_whole_tokens = matches!(l.scheme, TpScheme::Megatron | TpScheme::RsMmAg);
                let (tp, micro_batch) = if keeps_whole_tokens { (l.tp, c.micro_batch) } else { (1, 0) };
                let layout = LayerLayout { tp, ring: 1, scheme: TpScheme::Megatron, ..*l };
                let key = (
                    kind,
                    (tp, micro_batch, l.expert_tp, l.ep),
                    (l.precision, l.wire_precision, l.capacity_pct),
                    group.to_bits(),
                    c.recompute,
                    (spans.ep.domains, spans.expert_tp.domains),
                );
                let routed = self.expert_costs.get_or_insert(key, || {
                    CostSummary::from_layer_cost(&layer_cost(m, moe, &layout, &load, &spans, routed))
                });
                out.layer_costs[usize::from(kind)].add(routed);
            }
            out.layer_ns.push(out.layer_costs[usize::from(kind)].total.total_ns());
        }
        let ends = LayerLoad { recompute: Recompute::None, ..load };
        let mut end_cost = |kind, rows: &[LayerOp]| {
            *self.dense_costs.get_or_insert(key(kind, Recompute::None), || {
                CostSummary::from_layer_cost(&layer_cost(m, rows, &plain, &ends, &spans, &ExpertLoad::NONE))
            })
        };
        out.first_cost = end_cost(FIRST_ROWS, &self.q.work.ops_before_layers);
        out.last_cost = end_cost(LAST_ROWS, &self.q.work.ops_after_layers);
        out.tied_weights = if self.tied_head_rows.is_empty() {
            0.0
        } else {
            end_cost(TIED_HEAD, &self.tied_head_rows).weights
        };

        let layers = self.kinds.layer_kinds.len() as u32;
        let saved_bytes =
            |(kind, c): (usize, &CostSummary)| self.kinds.count_layers(kind, 0, layers) * c.saved_bytes;
        out.saved_bytes = out.first_cost.saved_bytes + out.last_cost.saved_bytes;
        out.saved_bytes += out.layer_costs.iter().enumerate().map(saved_bytes).sum::<f64>();
        out.min_workspace_bytes =
            out.layer_costs.iter().map(|c| c.workspace_bytes).reduce(f64::min).unwrap_or(0.0);
        (out.send_ns, out.send_bytes, out.send_link_bytes) = (0.0, 0.0, [0.0; 3]);
        if c.pp > 1 {
            out.send_bytes = (tokens / f64::from(l.tp)).ceil() * self.q.work.hidden_size as f64 * 2.0;
            let domains = if self.crosses_domain(c.replica_stage_ranks() * c.pp) { 2 } else { 1 };
            let send =
                self.transfer_cost(CollectiveOp::SendRecv, out.send_bytes, GroupSpan { ranks: 2, domains });
            (out.send_ns, out.send_link_bytes) = (send.ns, send.sent_bytes);
            if matches!(l.scheme, TpScheme::Megatron | TpScheme::RsMmAg) && l.tp > 1 {
                // Each tp rank sends a shard, and the ranks of the next stage gather them.
                let keeps_whole_tokens = tokens * self.q.work.hidden_size as f64 * 2.0;
                let gather = self.transfer_cost(CollectiveOp::AllGather, keeps_whole_tokens, spans.tp);
                out.send_ns += gather.ns;
                (0..3).for_each(|i| out.send_link_bytes[i] += gather.sent_bytes[i]);
            }
        }
    }

    /// Distributes a layout's layers over stages under the candidate's schedule, and computes the
    /// memory footprints.
    pub fn compute_pipeline(&mut self, c: &Candidate, node: &mut LayoutCost, out: &mut PipelineCost) {
        let (pp, v) = (c.pp, c.interleave.max(1));
        out.split = match node.chosen_splits.iter().find(|(key, _)| *key == (pp, v)) {
            Some((_, cut)) => *cut,
            None => {
                let cut = self.choose_split(node, pp, v);
                node.chosen_splits.push(((pp, v), cut));
                cut
            }
        };
        self.update_footprints(c, node, out);
        out.is_timed = false;
    }

    /// Returns the split over `stages` stages of `chunks` chunks each whose slowest stage is
    /// fastest.
    fn choose_split(&mut self, node: &LayoutCost, stages: u32, chunks: u32) -> usize {
        let options = self.split_ranges.get_or_insert((stages, chunks), || {
            let begin = self.splits.len();
            self.splits.extend(self.balancer.candidate_splits(&self.kinds, stages, chunks));
            begin..self.splits.len()
        });
        let ends = (node.first_cost.total.total_ns(), node.last_cost.total.total_ns());
        let (mut least, mut best) = (f64::INFINITY, options.start);
        if options.len() > 1 {
            for option in options.clone() {
                let dearest = self.splits[option].slowest_stage_ns(&node.layer_ns, ends);
                if dearest < least {
                    (least, best) = (dearest, option);
                }
            }
        }
        best
    }

    /// Computes the stage times and the bubble.
    pub fn time_stages(&self, c: &Candidate, node: &LayoutCost, out: &mut PipelineCost) {
        let m = &self.q.machine;
        let (pp, v) = (c.pp, c.interleave.max(1));
        out.is_timed = true;
        out.stage_ns.clear();
        let launch = m.launch_ns();
        let (mut slowest, mut at, mut mean) = ((-1.0, [0.0; 3], 0.0), 0, [0.0; 3]);
        for stage in 0..pp {
            let (mut device, mut host) = ([0.0; 3], [0.0; 3]);
            self.for_each_layer(c, node, out.split, stage, |n, cost| {
                for i in 0..3 {
                    device[i] += n * cost.pass_ns[i];
                    host[i] += n * cost.launches[i] * launch;
                }
            });
            let pass_ns = [0, 1, 2].map(|i| f64::max(device[i], host[i]));
            let sum: f64 = pass_ns.iter().sum();
            (0..3).for_each(|i| mean[i] += pass_ns[i] / f64::from(pp));
            out.stage_ns.push(sum);
            if sum > slowest.0 {
                slowest = (sum, pass_ns, sum - device.iter().sum::<f64>());
                at = stage;
            }
        }
        let (work_ns, pass_ns, launch_ns) = slowest;
        let mut part = CostParts::default();
        self.for_each_layer(c, node, out.split, at, |n, cost| part += cost.total * n);
        out.slowest_part = part;

        let hidden = if self.overlaps_exchange(c, node) {
            part.ep_exposed_ns.min(part.compute_ns + part.memory_ns)
        } else {
            0.0
        };
        out.overlapped_ns = (hidden * (2.0 - m.contention_factor())).max(0.0);
        let keep = if work_ns > 0.0 { 1.0 - out.overlapped_ns / work_ns } else { 1.0 };
        out.stage_ns.iter_mut().for_each(|s| *s *= keep);
        out.slowest_ns = work_ns * keep;
        out.slowest_forward_ns = pass_ns[0] * keep;
        out.exposed_launch_ns = launch_ns;

        let n = f64::from(node.micro_batches);
        let send = node.send_ns;
        if pp == 1 {
            (out.bubble_ns, out.sends_ns) = (0.0, 0.0);
        } else if self.is_training() {
            let pace = MicroBatchTimes {
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
            // Inference runs in waves: all stages once, and the slowest stage for each further
            // micro-batch. A decoded token must leave the last stage before its sequence can enter
            // the first again.
            let fill_ns: f64 = out.stage_ns.iter().sum::<f64>();
            let step = match self.q.job {
                Job::Decode { .. } => f64::max(n * (out.slowest_ns + send), fill_ns + f64::from(pp) * send),
                _ => (n - 1.0) * (out.slowest_ns + send) + fill_ns + f64::from(pp - 1) * send,
            };
            out.sends_ns = n * send;
            out.bubble_ns = (step - n * out.slowest_ns - out.sends_ns).max(0.0);
        }
    }

    /// Updates the footprints of the stages that may have the peak memory.
    fn update_footprints(&self, c: &Candidate, node: &LayoutCost, out: &mut PipelineCost) {
        if out.footprints_key != (node.serial, out.split) {
            self.collect_footprints(c, node, out);
            out.footprints_key = (node.serial, out.split);
        }
        for (stage, h) in &mut out.footprints {
            h.in_flight = self.in_flight(c, node, *stage);
        }
        out.in_flight = self.in_flight(c, node, 0);
    }

    /// Collects the footprints of a split, independent of the schedule: one stage per distinct
    /// layer mix, without those that an earlier stage dominates. No schedule has more micro-batches
    /// in flight on a later stage.
    fn collect_footprints(&self, c: &Candidate, node: &LayoutCost, out: &mut PipelineCost) {
        let cut = &self.splits[out.split];
        (out.max_expert_layers, out.max_layers, out.max_cache_bytes) = (0.0, 0.0, 0.0);
        out.footprints.clear();
        let mut heaviest = -1.0;
        for &stage in &cut.distinct_stages {
            let h = self.stage_footprint(c, node, out.split, stage);
            let (mut moe, mut any) = (0.0, 0.0);
            for (kind, n) in cut.stage_layers(stage).iter().enumerate() {
                any += n;
                moe += if self.rows_by_kind[kind].1.is_empty() { 0.0 } else { *n };
            }
            out.max_expert_layers = out.max_expert_layers.max(moe);
            out.max_layers = out.max_layers.max(any);
            out.max_cache_bytes = out.max_cache_bytes.max(h.cache_bytes);
            if h.dense_weights + h.expert_weights > heaviest {
                (heaviest, out.heaviest) = (h.dense_weights + h.expert_weights, h);
            }
            if !out.footprints.iter().any(|(_, o)| dominates(o, &h)) {
                out.footprints.push((stage, h));
            }
        }
    }

    /// Returns the micro-batches whose activations a stage holds.
    fn in_flight(&self, c: &Candidate, node: &LayoutCost, stage: u32) -> f64 {
        match self.is_training() {
            true => peak_in_flight_on(c.schedule, c.pp, c.interleave, node.micro_batches, stage),
            false => 0.0,
        }
    }

    /// Returns the footprint of one stage with nothing in flight.
    fn stage_footprint(&self, c: &Candidate, node: &LayoutCost, cut: usize, stage: u32) -> StageFootprint {
        let mut h = StageFootprint {
            send_bytes: node.send_bytes,
            weight_shards: f64::from(c.replicas),
            expert_shards: f64::from(c.expert_replicas),
            ..StageFootprint::default()
        };
        self.for_each_layer(c, node, cut, stage, |n, cost| {
            h.dense_weights += n * cost.weights;
            h.expert_weights += n * cost.expert_weights;
            h.saved_bytes += n * cost.saved_bytes;
            h.workspace_bytes = h.workspace_bytes.max(cost.workspace_bytes);
            h.layer_weights = h.layer_weights.max(cost.weights + cost.expert_weights);
            h.weight_shards = h.weight_shards.max(f64::from(c.replicas) * cost.weight_copies);
        });
        // A single stage holds the tied table only once.
        if c.pp == 1 {
            h.dense_weights -= node.tied_weights;
        }
        let cached = self.cache_bytes_per_element(c);
        for (n, numbers) in self.splits[cut].stage_layers(stage).iter().zip(&self.cache_elements) {
            h.cache_bytes += n * numbers * cached;
        }
        h
    }

    /// Returns the bytes on a rank, over all its sequences, for one cache element per token.
    fn cache_bytes_per_element(&self, c: &Candidate) -> f64 {
        if self.is_training() {
            return 0.0;
        }
        let sequences = self.q.job.batch_size().div_ceil(u64::from(c.replicas)) as f64;
        let tokens = sequences * self.q.cached_tokens() as f64;
        tokens * cache_element_bytes(c.layout.precision) * cache_share(self.q.work.kv_heads, &c.layout)
    }

    /// Returns whether dispatch and combine of one micro-batch overlap the compute of another: two
    /// are in flight, and the executor supports it.
    fn overlaps_exchange(&self, c: &Candidate, node: &LayoutCost) -> bool {
        if !self.q.machine.device_curves().overlap.overlaps_dispatch {
            return false;
        }
        match self.is_training() {
            true => c.schedule == PipelineSchedule::DualPipe,
            false => node.micro_batches >= 2 * c.pp,
        }
    }

    /// Returns the cost of one transfer, memoized.
    fn transfer_cost(&mut self, op: CollectiveOp, bytes: f64, span: GroupSpan) -> CollectiveCost {
        let m = &self.q.machine;
        *self.transfers.get_or_insert((op as u32, bytes.to_bits(), span.ranks, span.domains), || {
            m.collective_cost(op, bytes, span)
        })
    }

    /// Returns the tokens that a step generates or reads.
    pub fn step_tokens(&self) -> f64 {
        self.q.job.batch_size() as f64 * self.q.job.query_tokens() as f64
    }

    /// Returns the model FLOPs utilization over all devices.
    pub fn mfu(&self, c: &Candidate, step_ns: f64) -> f64 {
        let peak = self.q.machine.cluster.flops_per_s(c.layout.precision).unwrap_or(f64::INFINITY);
        self.useful_flops / (step_ns * 1e-9 * peak * f64::from(c.rank_count()))
    }

    /// Returns the layers of one stage, one range per model chunk.
    pub fn stage_chunks(&self, c: &Candidate, pipe: &PipelineCost, stage: u32) -> Vec<Range<u64>> {
        let at = |i: u32| u64::from(self.splits[pipe.split].boundaries[i as usize]);
        (0..c.interleave.max(1)).map(|v| v * c.pp + stage).map(|i| at(i)..at(i + 1)).collect()
    }

    fn is_training(&self) -> bool {
        matches!(self.q.job, Job::Train { .. })
    }

    /// Calls `with` for everything that a stage runs: each kind's layer count and cost, embedding
    /// and head included.
    fn for_each_layer(
        &self,
        c: &Candidate,
        node: &LayoutCost,
        cut: usize,
        stage: u32,
        mut visit: impl FnMut(f64, &CostSummary),
    ) {
        for (n, cost) in self.splits[cut].stage_layers(stage).iter().zip(&node.layer_costs) {
            if *n > 0.0 {
                visit(*n, cost);
            }
        }
        if stage == 0 {
            visit(1.0, &node.first_cost);
        }
        if stage + 1 == c.pp {
            visit(1.0, &node.last_cost);
        }
    }

    /// Returns the topology spans of one layer's groups. Ranks of tp are adjacent, then ep.
    pub fn group_spans(&self, c: &Candidate) -> GroupSpans {
        let cluster = &self.q.machine.cluster;
        let l = &c.layout;
        GroupSpans {
            tp: GroupSpan::from_stride(l.tp, 1, cluster),
            expert_tp: GroupSpan::from_stride(l.expert_tp, 1, cluster),
            ep: GroupSpan::from_stride(l.ep, l.expert_tp, cluster),
        }
    }

    /// Returns the topology span of `ranks` holders of the same weights: adjacent within a unit,
    /// then one unit per model replica.
    pub fn replica_span(&self, c: &Candidate, ranks: u32) -> GroupSpan {
        let domain = self.q.machine.cluster.domain_size.max(1);
        let apart = c.replica_stage_ranks() * c.pp;
        let copies = c.model_replicas();
        let domains = if apart * copies <= domain {
            1
        } else if apart >= domain {
            copies * c.replica_stage_ranks().div_ceil(domain)
        } else {
            (apart * copies).div_ceil(domain)
        };
        GroupSpan { ranks, domains: domains.clamp(1, ranks) }
    }

    /// Returns the topology span of a gradient reduction over `shards` copies of the weights. A
    /// bidirectional pipeline has a copy per direction, on opposite stages.
    pub fn gradient_span(&self, c: &Candidate, shards: u32) -> GroupSpan {
        let once = self.replica_span(c, shards);
        let both = parameter_copies(c.schedule, c.pp);
        let apart = both > 1 && self.crosses_domain(c.replica_stage_ranks() * c.pp);
        let domains = if apart { once.domains * both } else { once.domains };
        let ranks = shards * both;
        GroupSpan { ranks, domains: domains.clamp(1, ranks) }
    }

    /// Returns whether aligned blocks of `ranks` ranks cross a domain boundary.
    pub fn crosses_domain(&self, ranks: u32) -> bool {
        let domain = self.q.machine.cluster.domain_size.max(1);
        self.constraints.devices > domain && !domain.is_multiple_of(ranks)
    }
}

/// Returns whether stage `a` holds at least as much of everything as stage `b`, at equal
/// micro-batches in flight.
fn dominates(a: &StageFootprint, b: &StageFootprint) -> bool {
    a.dense_weights >= b.dense_weights
        && a.expert_weights >= b.expert_weights
        && a.saved_bytes >= b.saved_bytes
        && a.workspace_bytes >= b.workspace_bytes
        && a.layer_weights >= b.layer_weights
        && a.cache_bytes >= b.cache_bytes
        && a.weight_shards <= b.weight_shards
}

/// Bytes of a cache element: the matmul precision, but at least one byte.
fn cache_element_bytes(p: Precision) -> f64 {
    p.element_bytes().clamp(1.0, 2.0)
}

/// Returns the number of dense weights and of routed-expert weights.
fn weight_counts(work: &AnalyticModel) -> [f64; 2] {
    let mut sum = [0.0; 2];
    let ends = [(1, &work.ops_before_layers), (1, &work.ops_after_layers)];
    let layers = work.stacks.iter().map(|s| (s.count, &s.ops));
    for (count, rows) in layers.chain(ends) {
        for r in rows {
            sum[usize::from(r.sharding == OpSharding::Experts)] += (count * r.weight_count()) as f64;
        }
    }
    sum
}

/// Returns the rows of the LM head: the matmul over the whole vocabulary after the layers.
fn head_rows(work: &AnalyticModel) -> Vec<LayerOp> {
    let reads = |r: &&LayerOp| matches!(r.kind, LayerOpKind::Matmul { n, .. } if n == work.vocab_size);
    work.ops_after_layers.iter().filter(reads).cloned().collect()
}

/// Returns the useful operations of a step: matmuls and attention without recomputation, times
/// three in training.
fn useful_flops(work: &AnalyticModel, q: &SearchQuery) -> f64 {
    let job = q.job;
    let rows = |rows: &[LayerOp]| row_flops_in_window(rows, job, q.attention_window());
    let layers: f64 = work.stacks.iter().map(|s| s.count as f64 * rows(&s.ops)).sum();
    let passes = if matches!(job, Job::Train { .. }) { 3.0 } else { 1.0 };
    passes
        * job.batch_size() as f64
        * job.query_tokens() as f64
        * (rows(&work.ops_before_layers) + layers + rows(&work.ops_after_layers))
}

/// Returns the forward operations of some rows for one token.
pub(super) fn row_flops(rows: &[LayerOp], job: Job) -> f64 {
    row_flops_in_window(rows, job, None)
}

fn row_flops_in_window(rows: &[LayerOp], job: Job, window: Option<u64>) -> f64 {
    let queries = job.query_tokens() as f64;
    let load = LayerLoad {
        tokens: queries,
        sequences: 1.0,
        keys: job.context_tokens() as f64,
        window: window.map(|w| w as f64),
        training: false,
        recompute: Recompute::None,
    };
    let row = |r: &LayerOp| match r.kind {
        LayerOpKind::Matmul { k, n, .. } => 2.0 * (k * n) as f64,
        LayerOpKind::Experts { top_k, k, n, matrices, .. } => 2.0 * (top_k * k * n * matrices) as f64,
        LayerOpKind::Attention { heads, qk, v, causal, .. } => {
            2.0 * (heads * (qk + v)) as f64 * load.mean_visible_keys(queries, causal)
        }
        LayerOpKind::Elementwise { .. } | LayerOpKind::Embedding { .. } => 0.0,
    };
    rows.iter().map(row).sum()
}
