//! The inputs of the gates as plain numbers, of an estimate or of the record of a run.

/// Device memory of the peak rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MemoryGateInputs {
    /// Memory capacity of one device.
    pub device_bytes: f64,
    /// Weights, experts included.
    pub parameter_bytes: f64,
    /// Gradients and optimizer state.
    pub training_bytes: f64,
    /// Saved activations of all micro-batches in flight (A times tokens).
    pub activation_bytes: f64,
    /// Saved activations as they would be without recomputation; at least `activation_bytes`.
    pub unrecomputed_activation_bytes: f64,
    /// Keys and values (K times tokens).
    pub cache_bytes: f64,
    /// Workspace, send and prefetch buffers, and libraries.
    pub other_bytes: f64,
    /// Tokens whose activations are saved; A is `activation_bytes` divided by this.
    pub activation_tokens: f64,
    /// Tokens whose keys and values are cached.
    pub cache_tokens: f64,
}

/// Sizes, load and prefetch of one expert layer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExpertGateInputs {
    /// Number of routed experts in the layer, over all ranks.
    pub experts: u64,
    /// Routed experts that the router picks for each token.
    pub top_k: u64,
    /// Ranks that share the experts.
    pub ep: u32,
    /// Tokens of one micro-batch over all ranks of the ep group.
    pub tokens: f64,
    /// Standard deviation of rows over experts, relative to the mean.
    pub std_over_mean: f64,
    /// Standard deviation of rows over ranks, relative to the mean.
    pub rank_std_over_mean: f64,
    /// Rows of the slowest rank, relative to the mean.
    pub slowest_over_mean: f64,
    /// Capacity in per cent of the even share; 0 if unlimited.
    pub capacity_pct: u32,
    /// Share of token-to-expert assignments dropped beyond the capacity, 0 to 1.
    pub dropped_share: f64,
    /// Prefetch window in layers (0 if nothing is fetched ahead) and remaining stall per forward
    /// pass in nanoseconds; `None` if all experts are in device memory.
    pub prefetch: Option<(u32, f64)>,
}

/// The dispatch of one layer, as the busiest rank sends it to others.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExchangeGateInputs {
    /// Bytes to other ranks; each token counts once per destination rank.
    pub bytes: f64,
    /// Duration of the dispatch in nanoseconds.
    pub ns: f64,
    /// Line rate of the slowest links that the dispatch crosses, per device and direction.
    pub line_bytes_per_s: f64,
}

/// The size of the groups along one axis, and the domains that each group spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupGateInputs {
    /// The axis: `tp`, `ep`, `pp` or `dp`.
    pub axis: &'static str,
    /// Ranks in each group: the size of the axis.
    pub ranks: u32,
    /// Scale-up domains that a group spans.
    pub domains: u32,
}

/// The placement of model replicas on racks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReplicaGateInputs {
    /// Number of complete copies of the model.
    pub replica_count: u32,
    /// Ranks that together hold one copy of the model.
    pub ranks_per_replica: u32,
    /// Maximum number of racks that a replica spans.
    pub racks_per_replica: u32,
    /// Number of devices in one rack of the cluster.
    pub rack_devices: u32,
}

/// The inputs of all gates. Gates with absent inputs do not apply.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GateInputs {
    /// Whether the workload is training; the gate on recomputation applies to no other.
    pub training: bool,
    /// Whether any activations are recomputed.
    pub recomputes: bool,
    /// Device memory of the peak rank, for the gates on fit, headroom and recomputation.
    pub memory: MemoryGateInputs,
    /// Experts, if the model has any.
    pub experts: Option<ExpertGateInputs>,
    /// Dispatch, if the experts span several ranks.
    pub dispatch: Option<ExchangeGateInputs>,
    /// Hidden collective time of a step, in nanoseconds.
    pub hidden_ns: f64,
    /// All collective time of a step, in nanoseconds.
    pub collective_ns: f64,
    /// Share of the step that each stage waits for others.
    pub idle_shares: Vec<f64>,
    /// Micro-batches of a step, and the fewest of the same size for which no stage waits for more
    /// than the limit; `None` for the second if no number is enough. Absent if unknown, or if no
    /// stage waits for more.
    pub micro_batches: Option<(u32, Option<u32>)>,
    /// Share of KV reads that hit a hot tier; `None` without a KV cache.
    pub cache_hit_share: Option<f64>,
    /// The groups with more than one rank.
    pub axis_groups: Vec<GroupGateInputs>,
    /// How model replicas are placed on racks, for the gate on replicas that span racks.
    pub replicas: ReplicaGateInputs,
}
