//! Estimates one candidate: computes each kind of layer's cost once, assembles layers into stages
//! and stages into a step.
//!
//! There are three levels, so that a search computes each only once: a [`LayoutCost`] holds the
//! layers of one layout and micro-batch, a [`PipelineCost`] distributes them over stages under a
//! schedule, and the rest (optimizer sharding, placement of experts and old keys) is arithmetic on
//! the two.

mod footprints;
mod layers;
mod memo;
mod pipeline;
mod total;

use std::ops::Range;

use tessera_cost::layer::{GroupSpans, LayerCost};
use tessera_cost::moe::ExpertLoad;
use tessera_cost::op_cost::CostParts;
use tessera_cost::params::{Recompute, TpScheme};
use tessera_cost::schedule::parameter_copies;
use tessera_cost::{CollectiveCost, CollectiveOp, GroupSpan};
use tessera_ir::analytic_model::{AnalyticModel, LayerOp, LayerOpKind, OpSharding};
use tessera_mesh::Precision;

use super::budget::{MemoryTotals, StageFootprint};
use super::constraints::Constraints;
use super::flops::useful_flops;
use super::stage_balance::{LayerKinds, StageBalancer, StageSplit};
use super::{Candidate, Job, SearchQuery, StepTimes};
use memo::Memo;

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

type DenseKey = (u8, u32, u32, TpScheme, Precision, u32, Recompute, u32);
type MoeKey = (u8, (u32, u32, u32, u32), (Precision, Precision, u32), u64, Recompute, (u32, u32));

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
    /// Number of times that this struct has been filled; it tells its contents from earlier ones.
    serial: u64,
    /// The cost of one layer of each kind.
    layer_costs: Vec<CostSummary>,
    first_cost: CostSummary,
    last_cost: CostSummary,
    /// Weights of a tied head on one rank.
    tied_weights: f64,
    pub expert_load: Option<ExpertLoad>,
    /// Number of stages and chunks per stage of each split chosen so far, with its index in
    /// [`Estimator::splits`].
    chosen_splits: Vec<((u32, u32), usize)>,
    /// Bytes saved for the backward pass in all layers, and the smallest workspace of any layer.
    saved_bytes: f64,
    min_workspace_bytes: f64,
    /// Micro-batches of the replica with the most sequences.
    pub micro_batches: u32,
    /// One send across a stage boundary in one direction: its time, its bytes per rank, and its
    /// bytes by link class. Time and link bytes include a gather, if the scheme needs one.
    send_ns: f64,
    send_bytes: f64,
    send_link_bytes: [f64; 3],
    /// Forward, backward and recomputation time of one layer, by kind; the weight for balancing
    /// stages.
    layer_ns: Vec<f64>,
}

/// The cost of the layers, distributed over stages.
#[derive(Debug, Clone, Default)]
pub(super) struct PipelineCost {
    /// Index of the stage split in [`Estimator::splits`].
    split: usize,
    /// Time of one micro-batch on each stage, over all passes.
    pub stage_ns: Vec<f64>,
    /// All work of the slowest stage for one micro-batch.
    slowest_part: CostParts,
    /// Time of that work, including exposed launches and minus hidden transfers.
    slowest_ns: f64,
    /// The forward part of `slowest_ns`.
    slowest_forward_ns: f64,
    /// The part of `slowest_ns` in which the device waits for kernel launches.
    exposed_launch_ns: f64,
    /// Time that overlap removes from dispatch and combine, net of contention.
    overlapped_ns: f64,
    /// Bubble time of the whole step, and sends between stages.
    bubble_ns: f64,
    sends_ns: f64,
    /// Stages that may have the peak memory, each with its footprint.
    footprints: Vec<(u32, StageFootprint)>,
    /// Serial number of the layout cost, and index of the split, from which `footprints` was
    /// computed.
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
    /// Whether the device holds the peak stage, and host and peers hold what is placed there.
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

    fn is_training(&self) -> bool {
        matches!(self.q.job, Job::Train { .. })
    }

    /// Returns the topology spans of one layer's groups.
    pub fn group_spans(&self, c: &Candidate) -> GroupSpans {
        GroupSpans::from_layout(&c.layout, &self.q.machine.cluster)
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
