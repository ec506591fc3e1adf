//! The search over mappings of a model that is counted as rows: what is asked, what may be chosen, what comes out.

use std::collections::BTreeMap;

use tessera_base::{Bytes, Nanoseconds};
use tessera_cost::knobs::{CacheAt, ExpertsAt, Layout, Optimizer, Recompute, Schedule};
use tessera_mesh::{LinkClass, Tier};

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
