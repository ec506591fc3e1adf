//! The search over mappings of a model that is counted as rows: what is asked, what may be chosen, what comes out.
//!
//! Every arrangement is counted: it is legal and has an estimate, or it is refused for a reason that has a page. What is
//! made from rows cannot be run; where a lowered program exists, the estimate is made from that instead.

pub mod advice;
pub mod axes;
pub mod budget;
mod estimate;
mod facts;
mod front;
pub mod gates;
mod legal;
pub mod memory_table;
pub mod placement;
mod reasons;
pub mod recipe;
pub mod remedy;
mod space;
mod stages;
pub mod thresholds;
pub mod timeline;
mod walk;
mod why;

use std::collections::BTreeMap;

use tessera_base::{Bytes, Nanoseconds};
use tessera_cost::Machine;
use tessera_cost::knobs::{CacheAt, ExpertsAt, Layout, Optimizer, Recompute, Schedule};
use tessera_cost::moe::Routing;
use tessera_ir::work::Work;
use tessera_mesh::{LinkClass, Tier};

pub use reasons::{
    Reason, T1201, T1202, T1203, T1204, T1205, T1206, T1207, T1208, T1209, T1210, T1211, T1212, T1213, T1214,
    T1215, T1216, T1217, T1218,
};
pub use space::{Pins, Space, T1200};
pub use walk::{estimate, search};
pub use why::{Answer, Neighbour, Term, Verdict, why};

/// What is asked of a search.
#[derive(Debug, Clone)]
pub struct Question {
    /// The model.
    pub work: Work,
    /// What the ranks are to do.
    pub job: Job,
    /// What is wanted.
    pub objective: Objective,
    /// Where, and under which executor.
    pub machine: Machine,
    /// How tokens choose experts.
    pub routing: Routing,
    /// What is decided already.
    pub pins: Pins,
    /// What may be chosen.
    pub space: Space,
}

impl Question {
    /// Tokens that attention looks back at most, where old keys and values are dropped and it is said how many stay.
    #[must_use]
    pub fn window(&self) -> Option<u64> {
        let dropped = match self.pins.cache_at {
            Some(at) => at == CacheAt::Window,
            None => self.space.caches_at == [CacheAt::Window],
        };
        self.pins.window.map(u64::from).or(self.space.window).filter(|_| dropped)
    }

    /// Tokens of a sequence in the cache.
    #[must_use]
    pub fn cached_tokens(&self) -> u64 {
        let context = self.job.context();
        self.window().map_or(context, |w| w.clamp(1, context))
    }
}

/// What a search finds.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Devices used.
    pub devices: u32,
    /// Devices left idle, because nothing was legal on more.
    pub idle: u32,
    /// Arrangements counted: the legal ones and all that were refused.
    pub considered: u64,
    /// Of these, how many had their memory computed one by one; the others fell with a choice above them.
    pub priced: u64,
    /// Arrangements that may run.
    pub legal: u64,
    /// The others, by the first rule that each breaks.
    pub rejected: BTreeMap<Reason, Rejected>,
    /// The best by the objective, best first.
    pub best: Vec<Ranked>,
    /// Some of those that no other beats in step, rate and memory at once, in order of step.
    pub front: Vec<Ranked>,
    /// What a reader should know: idle devices, a deadline that nothing meets, figures that nobody measured.
    pub notes: Vec<String>,
}

/// Arrangements that break one rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Rejected {
    /// How many.
    pub count: u64,
    /// The first of them.
    pub example: Candidate,
    /// Its arithmetic.
    pub says: String,
}

/// A legal arrangement with its estimate.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranked {
    /// The arrangement.
    pub candidate: Candidate,
    /// What it comes to.
    pub estimate: Estimate,
    /// The gates and their numbers.
    pub gates: Vec<gates::Gate>,
    /// Layers of each stage.
    pub stages: Vec<StageShare>,
    /// Micro-batches of a step on each replica.
    pub micro_batches: u32,
    /// Share of the assignments to experts that are dropped.
    pub dropped: f64,
}

/// What one stage holds.
#[derive(Debug, Clone, PartialEq)]
pub struct StageShare {
    /// Layers, as ranges of one piece each.
    pub pieces: Vec<std::ops::Range<u64>>,
    /// Whether the embedding is here.
    pub first: bool,
    /// Whether the head is here.
    pub last: bool,
    /// One micro-batch, forward and backward.
    pub ns: f64,
}

/// What the ranks are to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Job {
    /// Training steps.
    Train {
        /// Sequences of a step, over all replicas.
        batch: u64,
        /// Tokens of a sequence.
        sequence: u64,
    },
    /// Prompts in, first token out.
    Prefill {
        /// Prompts at once, over all replicas.
        batch: u64,
        /// Tokens of a prompt.
        sequence: u64,
    },
    /// One token for each of many sequences.
    Decode {
        /// Sequences at once, over all replicas.
        batch: u64,
        /// Tokens already in the cache of each.
        context: u64,
    },
}

impl Job {
    /// Name, as profiles say for which jobs they were validated.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Job::Train { .. } => "training",
            Job::Prefill { .. } => "prefill",
            Job::Decode { .. } => "decode",
        }
    }

    /// Sequences over all replicas.
    #[must_use]
    pub fn batch(&self) -> u64 {
        match *self {
            Job::Train { batch, .. } | Job::Prefill { batch, .. } | Job::Decode { batch, .. } => batch,
        }
    }

    /// Tokens of a sequence that go through the layers.
    #[must_use]
    pub fn queries(&self) -> u64 {
        match *self {
            Job::Train { sequence, .. } | Job::Prefill { sequence, .. } => sequence,
            Job::Decode { .. } => 1,
        }
    }

    /// Tokens of a sequence that attention may look at.
    #[must_use]
    pub fn context(&self) -> u64 {
        match *self {
            Job::Train { sequence, .. } | Job::Prefill { sequence, .. } => sequence,
            Job::Decode { context, .. } => context + 1,
        }
    }
}

/// What is wanted of a mapping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Objective {
    /// The shortest step.
    Latency,
    /// The most tokens per second and device.
    Throughput,
    /// The least memory on the fullest rank.
    Memory,
    /// The most tokens per second and device among those whose step ends in time.
    Deadline(Nanoseconds),
}

/// One arrangement of a model over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Candidate {
    /// How each layer is laid out within a stage.
    pub layout: Layout,
    /// Stages.
    pub pp: u32,
    /// Copies of the attention ranks within a stage: `tp · replicas = expert_tp · ep · expert_replicas`.
    pub replicas: u32,
    /// Copies of the expert ranks within a stage.
    pub expert_replicas: u32,
    /// Order of micro-batches.
    pub schedule: Schedule,
    /// Pieces of layers per stage; 1 but for [`Schedule::Interleaved`].
    pub interleave: u32,
    /// Sequences of one micro-batch of one replica.
    pub micro_batch: u32,
    /// What is computed again.
    pub recompute: Recompute,
    /// Who holds optimizer state.
    pub optimizer: Optimizer,
    /// Where experts lie.
    pub experts_at: ExpertsAt,
    /// Where old keys and values lie.
    pub cache_at: CacheAt,
}

/// What a byte of memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Use {
    /// Weights outside of routed experts.
    Weights,
    /// Routed experts.
    Experts,
    /// Gradients.
    Gradients,
    /// Optimizer state and f32 masters.
    Optimizer,
    /// What the backward pass needs.
    Activations,
    /// Keys and values.
    Cache,
    /// Buffers of sends and prefetch.
    Buffers,
    /// What runtime and libraries take.
    Library,
}

/// Bytes of the fullest rank, by use and tier.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Budget {
    /// Bytes by use and tier; absent is none.
    pub bytes: BTreeMap<(Tier, Use), Bytes>,
}

/// Times of one step in nanoseconds, on the ranks that take longest; they add up to the step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Times {
    /// Products and attention.
    pub compute_ns: f64,
    /// Passes over memory.
    pub memory_ns: f64,
    /// Collectives over tp that nothing hides.
    pub tp_ns: f64,
    /// Dispatch and combine that nothing hides.
    pub ep_ns: f64,
    /// Sends between stages and gradients over replicas that nothing hides.
    pub pp_dp_ns: f64,
    /// Waiting for the slowest rank of the experts.
    pub imbalance_ns: f64,
    /// Waiting for other stages.
    pub bubble_ns: f64,
    /// The host's launches that nothing hides.
    pub launch_ns: f64,
    /// Fetches from other tiers that nothing hides.
    pub fetch_ns: f64,
    /// Optimizer.
    pub optimizer_ns: f64,
    /// Collective time, hidden or not: what the overlap ratio is measured against.
    pub collective_ns: f64,
}

/// What one candidate comes to.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// One step.
    pub step_ns: f64,
    /// Where it goes.
    pub times: Times,
    /// Tokens per second over all devices.
    pub tokens_per_s: f64,
    /// Share of the peak that useful operations make, 0 to 1.
    pub mfu: f64,
    /// Memory of the fullest rank.
    pub budget: Budget,
    /// Bytes that the busiest rank sends in a step, by link class.
    pub link_bytes: BTreeMap<LinkClass, f64>,
    /// Half-width of the error bar, as a share of the step.
    pub error: f64,
}
