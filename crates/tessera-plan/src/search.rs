//! Searches the mappings of a language model that is described by cost rows: the query, the search
//! space and the outcome.
//!
//! The search counts every candidate: a candidate is legal and has an estimate, or it is rejected
//! for a reason with an error code and a page. Candidates estimated from cost rows cannot be
//! executed; where a lowered program exists, the estimate is made from that program instead.

pub mod advice;
pub mod axes;
pub mod budget;
mod constraints;
mod enumerate;
mod estimate;
mod flops;
mod gate_inputs;
pub mod gates;
pub mod memory_table;
pub mod mitigation;
mod pareto;
pub mod placement;
mod rank_candidate;
mod reasons;
pub mod recipe;
mod space;
mod stage_balance;
pub mod thresholds;
pub mod timeline;
mod why;

use std::collections::BTreeMap;

use tessera_base::{Bytes, Nanoseconds, named_enum};
use tessera_cost::MachineModel;
use tessera_cost::moe::Routing;
use tessera_cost::params::{
    ExpertStorage, KvCacheStorage, LayerLayout, OptimizerSharding, PipelineSchedule, Recompute,
};
use tessera_ir::analytic_model::AnalyticModel;
use tessera_mesh::{LinkClass, MemoryTier};

pub use crate::codes::T1200;

pub use enumerate::{estimate_candidate, search};
pub use rank_candidate::error_bar;
pub use reasons::Reason;
pub use space::{Pins, SearchSpace};
pub use why::{Neighbour, TermComparison, WhyAnswer, WhyVerdict, explain_pins};

/// Layers whose fetched experts are in device memory at once: the one that computes, and the next
/// one. A predictor names experts one layer ahead, so that a larger window has nothing to fetch.
pub(crate) const PREFETCH_WINDOW: u32 = 2;

/// The input of a mapping search: model, workload, objective, machine, and the pinned and free
/// knobs.
#[derive(Debug, Clone)]
pub struct SearchQuery {
    /// The model as op rows, which state the cost of each op.
    pub work: AnalyticModel,
    /// Training, prefill or decode, with the batch over all replicas and the tokens per sequence.
    pub job: Job,
    /// The quantity by which the search ranks legal candidates, such as throughput per device.
    pub objective: Objective,
    /// The cluster and the executor profile.
    pub machine: MachineModel,
    /// The model of how tokens choose experts.
    pub routing: Routing,
    /// The knobs that are fixed in advance.
    pub pins: Pins,
    /// The values that the other knobs may take.
    pub space: SearchSpace,
}

impl SearchQuery {
    /// Returns the attention window in tokens, if old keys and values are dropped and the number of
    /// tokens to keep is given.
    #[must_use]
    pub fn attention_window(&self) -> Option<u64> {
        let dropped = match self.pins.cache_at {
            Some(at) => at == KvCacheStorage::Window,
            None => self.space.caches_at == [KvCacheStorage::Window],
        };
        self.pins.window.map(u64::from).or(self.space.window).filter(|_| dropped)
    }

    /// Returns the tokens per sequence in the KV cache.
    #[must_use]
    pub fn cached_tokens(&self) -> u64 {
        let context = self.job.context_tokens();
        self.attention_window().map_or(context, |w| w.clamp(1, context))
    }
}

/// The best candidates of a search, and the number of candidates rejected for each reason.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchOutcome {
    /// Devices that the candidates of this search occupy.
    pub used_devices: u32,
    /// Devices left idle because no candidate was legal on more.
    pub idle_devices: u32,
    /// Number of candidates counted, legal and rejected.
    pub candidate_count: u64,
    /// Number of candidates whose memory was computed individually; a rejected outer knob removed
    /// the others.
    pub costed_count: u64,
    /// Number of candidates that violate no constraint; `best_candidates` keeps only the best of
    /// them.
    pub legal_count: u64,
    /// The rejected candidates, grouped by the first constraint that each violates.
    pub rejected: BTreeMap<Reason, Rejection>,
    /// The best candidates by the objective, best first.
    pub best_candidates: Vec<RankedCandidate>,
    /// A sample of the Pareto front over step time, throughput and memory, ordered by step time.
    pub pareto_front: Vec<RankedCandidate>,
    /// Notes for the reader: idle devices, a deadline that no candidate meets, figures that were
    /// not measured.
    pub notes: Vec<String>,
}

/// The candidates that violate one constraint.
#[derive(Debug, Clone, PartialEq)]
pub struct Rejection {
    /// Number of candidates for which this is the first violated constraint.
    pub count: u64,
    /// The first candidate rejected for this reason.
    pub example: Candidate,
    /// The arithmetic of the violation for the example.
    pub explanation: String,
}

/// A legal candidate with its estimate.
#[derive(Debug, Clone, PartialEq)]
pub struct RankedCandidate {
    /// The knob settings: layout, pipeline, micro-batch, recomputation and placements.
    pub candidate: Candidate,
    /// Predicted step time, throughput and memory of the candidate.
    pub estimate: StepEstimate,
    /// The result of every gate for this candidate, always in the same order; a failed gate rejects
    /// nothing.
    pub gates: Vec<gates::GateResult>,
    /// The layers assigned to each pipeline stage.
    pub stages: Vec<StageAssignment>,
    /// Micro-batches per step on each replica.
    pub micro_batches: u32,
    /// Share of the expert assignments that are dropped.
    pub dropped_share: f64,
}

/// The layers assigned to one pipeline stage.
#[derive(Debug, Clone, PartialEq)]
pub struct StageAssignment {
    /// One range of layers per model chunk.
    pub chunks: Vec<std::ops::Range<u64>>,
    /// Whether the stage holds the embedding.
    pub has_embedding: bool,
    /// Whether the stage holds the LM head.
    pub has_head: bool,
    /// Time of one micro-batch in nanoseconds, forward and backward.
    pub micro_batch_ns: f64,
}

/// The workload to plan for, such as training or prefill, with its batch and sequence sizes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Job {
    /// Training: a step runs forward, backward and the optimizer over one batch.
    Train {
        /// Sequences per step, over all replicas.
        batch: u64,
        /// Tokens per sequence.
        sequence: u64,
    },
    /// Prefill: processes prompts up to the first generated token.
    Prefill {
        /// Prompts processed at once, over all replicas.
        batch: u64,
        /// Tokens per prompt.
        sequence: u64,
    },
    /// Decode: generates one token for each of many sequences.
    Decode {
        /// Sequences decoded at once, over all replicas.
        batch: u64,
        /// Tokens already cached per sequence.
        context: u64,
    },
}

impl Job {
    /// Returns the name of the workload, as profiles list the workloads they were validated for.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Job::Train { .. } => "training",
            Job::Prefill { .. } => "prefill",
            Job::Decode { .. } => "decode",
        }
    }

    /// Returns the sequences over all replicas.
    #[must_use]
    pub fn batch_size(&self) -> u64 {
        match *self {
            Job::Train { batch, .. } | Job::Prefill { batch, .. } | Job::Decode { batch, .. } => batch,
        }
    }

    /// Returns the tokens per sequence that pass through the layers.
    #[must_use]
    pub fn query_tokens(&self) -> u64 {
        match *self {
            Job::Train { sequence, .. } | Job::Prefill { sequence, .. } => sequence,
            Job::Decode { .. } => 1,
        }
    }

    /// Returns the tokens per sequence that attention may attend to.
    #[must_use]
    pub fn context_tokens(&self) -> u64 {
        match *self {
            Job::Train { sequence, .. } | Job::Prefill { sequence, .. } => sequence,
            Job::Decode { context, .. } => context + 1,
        }
    }
}

/// The quantity that a search optimizes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Objective {
    /// The shortest step time in nanoseconds, whatever the throughput per device.
    Latency,
    /// The highest throughput in tokens per second per device.
    Throughput,
    /// The lowest peak memory of any rank.
    Memory,
    /// The highest throughput per device among the candidates whose step meets the deadline.
    Deadline(Nanoseconds),
}

/// One candidate mapping of a model onto the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Candidate {
    /// How the ranks of a stage divide each layer: tp, ep, scheme, precisions and expert capacity.
    pub layout: LayerLayout,
    /// Number of pipeline stages.
    pub pp: u32,
    /// Attention replicas within a stage: `tp · replicas = expert_tp · ep · expert_replicas`.
    pub replicas: u32,
    /// Copies of each routed expert within a stage: the stage's ranks divided by `expert_tp · ep`.
    pub expert_replicas: u32,
    /// The order in which a stage runs micro-batches forward and backward.
    pub schedule: PipelineSchedule,
    /// Model chunks per stage; 1 except under [`PipelineSchedule::Interleaved`].
    pub interleave: u32,
    /// Sequences per micro-batch of one replica.
    pub micro_batch: u32,
    /// Which activations the backward pass recomputes; [`Recompute::None`] for inference.
    pub recompute: Recompute,
    /// Which training state the replicas shard: none, the optimizer state, or weights and gradients
    /// too.
    pub optimizer: OptimizerSharding,
    /// Where the routed experts lie: all in device memory, or the cold ones in host memory.
    pub experts_at: ExpertStorage,
    /// Where old keys and values lie: on the device, on peers, on the host, or dropped (a window).
    pub cache_at: KvCacheStorage,
}

named_enum! {
    /// A use of memory, by which a [`MemoryBudget`] divides the bytes of a rank.
    pub enum MemoryUse {
        /// Weights other than routed experts.
        Weights = "weights",
        /// Weights of routed experts.
        Experts = "experts",
        /// Weight gradients accumulated over the micro-batches of a step.
        Gradients = "gradients",
        /// Optimizer state and f32 master weights.
        OptimizerSharding = "optimizer",
        /// Activations saved for the backward pass.
        Activations = "activations",
        /// Keys and values of earlier tokens, kept for attention at inference.
        Cache = "cache",
        /// Workspace, send buffers and prefetch buffers.
        Buffers = "buffers",
        /// Memory reserved by the runtime and the libraries.
        Library = "library",
    }
}

/// Peak memory of any rank, by use and tier.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryBudget {
    /// Bytes by tier and use; an absent entry means zero bytes.
    pub bytes: BTreeMap<(MemoryTier, MemoryUse), Bytes>,
}

/// A breakdown of one step in nanoseconds, on the slowest ranks. The parts other than
/// `collective_ns` add up to the step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepTimes {
    /// Time in matmuls and attention.
    pub compute_ns: f64,
    /// Time in kernels that memory bandwidth limits.
    pub memory_ns: f64,
    /// Exposed collectives over tp.
    pub tp_ns: f64,
    /// Exposed dispatch and combine.
    pub ep_ns: f64,
    /// Exposed sends between stages and gradient reductions over replicas.
    pub pp_dp_ns: f64,
    /// Time lost waiting for the slowest expert rank.
    pub imbalance_ns: f64,
    /// Pipeline bubble: time spent waiting for other stages.
    pub bubble_ns: f64,
    /// Exposed kernel launch overhead of the host.
    pub launch_ns: f64,
    /// Exposed fetches from other memory tiers.
    pub fetch_ns: f64,
    /// Time of the weight update after the last micro-batch; 0 for inference.
    pub optimizer_ns: f64,
    /// All collective time, hidden or exposed: the denominator of the overlap ratio.
    pub collective_ns: f64,
}

/// Predicted time, throughput, memory and traffic of one step under a candidate.
#[derive(Debug, Clone, PartialEq)]
pub struct StepEstimate {
    /// Time of one step in nanoseconds, on the slowest ranks.
    pub step_ns: f64,
    /// The parts that add up to `step_ns`, and the time of all collectives.
    pub times: StepTimes,
    /// Tokens per second over all devices.
    pub tokens_per_s: f64,
    /// Model FLOPs utilization, 0 to 1.
    pub mfu: f64,
    /// Peak memory of any rank.
    pub budget: MemoryBudget,
    /// Bytes that the busiest rank sends in a step, by link class.
    pub link_bytes: BTreeMap<LinkClass, f64>,
    /// Half-width of the error bar, as a share of the step time.
    pub error_share: f64,
}
