//! The gates of a plan: each compares one number with one threshold and names the dominant term.
//!
//! A gate never rejects a plan: the constraints do that, and a plan that fails a gate may still be
//! the best one. The inputs are plain numbers, so that the same gates evaluate an estimate and the
//! record of a run.

use tessera_base::{Bytes, Code, Diagnostic};

use super::thresholds::Thresholds;

/// A plan fails a gate.
pub static T1241: Code = Code {
    id: "T1241",
    title: "plan fails a gate",
    page: "A gate is a rule of thumb of the mapping guide with a threshold: how much of a device's memory activations and KV \
cache may take, how many experts a rank should hold, how much collective time should be hidden, how long a stage may wait, \
and so on. The message gives the number, the threshold and the dominant term.\n\n\
A failed gate is advice, not an error: the plan is legal and may be the best one for a small machine or a small batch. \
Change what the message names, or the threshold: all of them are in one file (`gates.toml`), which your own file may \
override.\n\n\
A gate that does not apply gives the reason with its arithmetic. For example, expert balance does not apply to a decode batch \
that gives each expert a handful of rows: those vary by more than the threshold even with a perfect router.",
};

/// The status of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GateStatus {
    /// The value is within the threshold.
    Pass,
    /// The value exceeds the recommendation.
    Warn,
    /// The value exceeds the threshold.
    Fail,
    /// The gate has no input, or does not apply at this size.
    NotApplicable,
}

impl GateStatus {
    /// Returns the name used in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["pass", "warn", "fail", "n/a"][self as usize]
    }
}

/// The evaluation of one gate.
#[derive(Debug, Clone, PartialEq)]
pub struct GateResult {
    /// Stable identifier, such as `memory.activations-and-cache`.
    pub id: &'static str,
    /// What the gate checks, as reports and warnings print it.
    pub title: &'static str,
    /// The value; 0 if the gate does not apply.
    pub value: f64,
    /// The limit that `value` is compared with, in the same unit.
    pub threshold: f64,
    /// Unit of the value and the threshold.
    pub unit: &'static str,
    /// Whether the value passes, warns or fails, or the gate does not apply.
    pub status: GateStatus,
    /// The arithmetic, the dominant term and the remaining headroom.
    pub explanation: String,
}

impl GateResult {
    /// Returns a warning if the gate is not passed; the plan remains valid.
    #[must_use]
    pub fn to_diagnostic(&self) -> Option<Diagnostic> {
        matches!(self.status, GateStatus::Warn | GateStatus::Fail).then(|| {
            Diagnostic::warning(&T1241, format!("gate `{}` not passed: {}", self.id, self.title))
                .with_label("plan", format!("{:.3} {}", self.value, self.unit))
                .with_label("limit", format!("{} {}", self.threshold, self.unit))
                .with_note(self.explanation.clone())
        })
    }
}

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
    /// The activations without recomputation.
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

/// The experts of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExpertGateInputs {
    /// Number of routed experts in the layer, over all ranks.
    pub experts: u64,
    /// Routed experts that the router picks for each token.
    pub top_k: u64,
    /// Ranks that share the experts.
    pub ep: u32,
    /// Tokens of one micro-batch over all ranks of the group.
    pub tokens: f64,
    /// Standard deviation of rows over experts, relative to the mean.
    pub std_over_mean: f64,
    /// Standard deviation of rows over ranks, relative to the mean.
    pub rank_std_over_mean: f64,
    /// Rows of the slowest rank, relative to the mean.
    pub slowest_over_mean: f64,
    /// Capacity in per cent of the even share; 0 if unlimited.
    pub capacity_pct: u32,
    /// Share of assignments dropped.
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
    /// Line rate per device and direction.
    pub line_bytes_per_s: f64,
}

/// The rank groups of one axis.
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
    /// Whether the workload is training.
    pub training: bool,
    /// Whether any activations are recomputed.
    pub recomputes: bool,
    /// Memory of the peak rank.
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
    /// Share of KV reads that hit a hot tier; `None` without a KV cache.
    pub cache_hit_share: Option<f64>,
    /// The groups with more than one rank.
    pub axis_groups: Vec<GroupGateInputs>,
    /// How model replicas are placed on racks, for the gate on replicas that span racks.
    pub replicas: ReplicaGateInputs,
}

/// Evaluates all gates, always in the same order.
#[must_use]
pub fn evaluate_gates(inputs: &GateInputs, limits: &Thresholds) -> Vec<GateResult> {
    vec![
        memory_gate(&inputs.memory, limits),
        headroom_gate(&inputs.memory, limits),
        recompute_gate(inputs, limits),
        density_gate(inputs.experts.as_ref(), limits),
        balance_gate(inputs.experts.as_ref(), limits),
        capacity_gate(inputs.experts.as_ref(), limits),
        prefetch_gate(inputs.experts.as_ref(), limits),
        exchange_gate(inputs.dispatch.as_ref(), limits),
        overlap_gate(inputs, limits),
        bubble_gate(inputs, limits),
        cache_hit_gate(inputs, limits),
        domain_gate(&inputs.axis_groups),
        rack_gate(&inputs.replicas),
    ]
}

/// Returns whether a plan should recompute activations, by the ratio of activations to the rank's
/// parameters, and the reason in words.
#[must_use]
pub fn should_recompute(activations: f64, parameters: f64, thresholds: &Thresholds) -> (bool, String) {
    let ratio = activations / parameters.max(1.0);
    let over = ratio > thresholds.recompute_above;
    let explanation = format!(
        "activations {} are {ratio:.2} of the rank's parameters {}: {} than the threshold of {}, so {}",
        round_bytes(activations),
        round_bytes(parameters),
        if over { "more" } else { "no more" },
        thresholds.recompute_above,
        if over { "recompute" } else { "no recomputation is needed" }
    );
    (over, explanation)
}

fn memory_gate(m: &MemoryGateInputs, t: &Thresholds) -> GateResult {
    let terms = [
        ("parameters", m.parameter_bytes),
        ("gradients and optimizer", m.training_bytes),
        ("activations", m.activation_bytes),
        ("cache", m.cache_bytes),
        ("buffers and libraries", m.other_bytes),
    ];
    let used: f64 = terms.iter().map(|t| t.1).sum();
    let largest = terms.iter().fold(terms[0], |a, b| if b.1 > a.1 { *b } else { a });
    let (left, what) = if used <= m.device_bytes {
        (m.device_bytes - used, "left")
    } else {
        (used - m.device_bytes, "too much")
    };
    let explanation = format!(
        "{} of {}: {} {what}; the largest term is {} with {}",
        round_bytes(used),
        round_bytes(m.device_bytes),
        round_bytes(left),
        largest.0,
        round_bytes(largest.1)
    );
    let share = used / m.device_bytes.max(1.0);
    let (verdict, limit) = match share {
        s if s > 1.0 => (GateStatus::Fail, 1.0),
        s if s > t.device_warn => (GateStatus::Warn, t.device_warn),
        _ => (GateStatus::Pass, t.device_warn),
    };
    GateResult {
        id: "memory.fits",
        title: "memory within the device",
        value: share,
        threshold: limit,
        unit: SHARE,
        status: verdict,
        explanation,
    }
}

fn headroom_gate(m: &MemoryGateInputs, t: &Thresholds) -> GateResult {
    let gate = |value, limit, verdict, explanation| GateResult {
        id: "memory.activations-and-cache",
        title: "activations and KV cache leave headroom",
        value,
        threshold: limit,
        unit: SHARE,
        status: verdict,
        explanation,
    };
    if m.activation_tokens <= 0.0 && m.cache_tokens <= 0.0 {
        let explanation = "A and K are bytes per token, and there are no tokens".to_string();
        return gate(0.0, t.activations_and_cache_fail, GateStatus::NotApplicable, explanation);
    }
    let (both, device) = (m.activation_bytes + m.cache_bytes, m.device_bytes.max(1.0));
    let share = both / device;
    let (verdict, limit) = match share {
        s if s > t.activations_and_cache_fail => (GateStatus::Fail, t.activations_and_cache_fail),
        s if s > t.activations_and_cache_warn => (GateStatus::Warn, t.activations_and_cache_warn),
        _ => (GateStatus::Pass, t.activations_and_cache_warn),
    };
    let per_token = |all: f64, tokens: f64| {
        if tokens > 0.0 {
            format!("{} × {tokens:.0} tokens", round_bytes(all / tokens))
        } else {
            "no tokens".to_string()
        }
    };
    let explanation = format!(
        "A {} ({}) + K {} ({}) = {} of {}, dominated by {}; {} are left for parameters and temporaries",
        round_bytes(m.activation_bytes),
        per_token(m.activation_bytes, m.activation_tokens),
        round_bytes(m.cache_bytes),
        per_token(m.cache_bytes, m.cache_tokens),
        round_bytes(both),
        round_bytes(m.device_bytes),
        if m.activation_bytes >= m.cache_bytes { "A" } else { "K" },
        round_bytes((m.device_bytes - both).max(0.0))
    );
    gate(share, limit, verdict, explanation)
}

fn recompute_gate(facts: &GateInputs, t: &Thresholds) -> GateResult {
    let m = &facts.memory;
    let gate = |value, verdict, explanation| GateResult {
        id: "memory.recompute",
        title: "recomputation if activations outgrow parameters",
        value,
        threshold: t.recompute_above,
        unit: "of the rank's parameters",
        status: verdict,
        explanation,
    };
    if !facts.training {
        return gate(
            0.0,
            GateStatus::NotApplicable,
            "no backward pass: no activations are saved".to_string(),
        );
    }
    let plain = m.unrecomputed_activation_bytes.max(m.activation_bytes);
    let (advised, mut explanation) = should_recompute(plain, m.parameter_bytes, t);
    if advised && facts.recomputes {
        explanation =
            format!("{explanation}, and the plan does: {} are saved", round_bytes(m.activation_bytes));
    }
    let verdict = if advised && !facts.recomputes { GateStatus::Warn } else { GateStatus::Pass };
    gate(plain / m.parameter_bytes.max(1.0), verdict, explanation)
}

fn density_gate(experts: Option<&ExpertGateInputs>, t: &Thresholds) -> GateResult {
    let gate = |value, verdict, explanation| GateResult {
        id: "experts.density",
        title: "enough experts on each rank",
        value,
        threshold: t.min_per_rank,
        unit: "experts",
        status: verdict,
        explanation,
    };
    let Some(e) = experts else { return gate(0.0, GateStatus::NotApplicable, NO_EXPERTS.to_string()) };
    let each = e.experts as f64 / f64::from(e.ep.max(1));
    if (e.experts as f64) < t.min_per_rank {
        let explanation = format!("the layer has only {} experts, fewer than {}", e.experts, t.min_per_rank);
        return gate(each, GateStatus::NotApplicable, explanation);
    }
    let explanation = format!("{} experts / ep {} = {each:.1}", e.experts, e.ep);
    if each >= t.min_per_rank {
        return gate(each, GateStatus::Pass, explanation);
    }
    let max_ep = (e.experts as f64 / t.min_per_rank) as u32;
    gate(
        each,
        GateStatus::Fail,
        format!(
            "{explanation}; ep is too large: {max_ep} is the maximum that keeps {} per rank",
            t.min_per_rank
        ),
    )
}

fn balance_gate(experts: Option<&ExpertGateInputs>, t: &Thresholds) -> GateResult {
    let gate = |value, verdict, explanation| GateResult {
        id: "experts.balance",
        title: "rows are balanced over experts",
        value,
        threshold: t.max_balance,
        unit: "std/mean",
        status: verdict,
        explanation,
    };
    let Some(e) = experts else { return gate(0.0, GateStatus::NotApplicable, NO_EXPERTS.to_string()) };
    let rows = e.tokens * e.top_k as f64 / (e.experts as f64).max(1.0);
    let each = format!("{:.0} tokens × {} / {} experts = {rows:.1} rows each", e.tokens, e.top_k, e.experts);
    if rows < t.min_balance_rows {
        let explanation = format!(
            "{each}, below {}: a perfect router varies by {:.1} % there",
            t.min_balance_rows,
            100.0 / rows.max(1e-9).sqrt()
        );
        return gate(e.std_over_mean, GateStatus::NotApplicable, explanation);
    }
    let verdict = if e.std_over_mean <= t.max_balance { GateStatus::Pass } else { GateStatus::Fail };
    let explanation = format!(
        "{each}; std/mean {:.1} % over experts, {:.1} % over ranks; the slowest rank has {:.2} times the mean load",
        e.std_over_mean * 100.0,
        e.rank_std_over_mean * 100.0,
        e.slowest_over_mean
    );
    gate(e.std_over_mean, verdict, explanation)
}

fn capacity_gate(experts: Option<&ExpertGateInputs>, t: &Thresholds) -> GateResult {
    let gate = |value, limit, verdict, explanation| GateResult {
        id: "experts.capacity",
        title: "expert capacity is within range",
        value,
        threshold: limit,
        unit: "% of the even share",
        status: verdict,
        explanation,
    };
    let (low, high) = (t.min_capacity_pct, t.max_capacity_pct);
    let Some(e) = experts.filter(|e| e.capacity_pct > 0) else {
        let explanation =
            if experts.is_some() { "unlimited capacity: nothing is dropped" } else { NO_EXPERTS };
        return gate(0.0, high, GateStatus::NotApplicable, explanation.to_string());
    };
    let pct = f64::from(e.capacity_pct);
    let dropped = e.dropped_share * 100.0;
    let inside = (low..=high).contains(&pct) && dropped <= t.max_dropped_pct;
    let verdict = if inside { GateStatus::Pass } else { GateStatus::Warn };
    let explanation = format!(
        "{pct} %, range {low} to {high} %; {dropped:.2} % of assignments are dropped, at most {} % advised",
        t.max_dropped_pct
    );
    gate(pct, if pct < low { low } else { high }, verdict, explanation)
}

fn prefetch_gate(experts: Option<&ExpertGateInputs>, t: &Thresholds) -> GateResult {
    let gate = |value, limit, verdict, explanation| GateResult {
        id: "experts.prefetch",
        title: "cold experts are prefetched",
        value,
        threshold: limit,
        unit: "layers",
        status: verdict,
        explanation,
    };
    let (low, high) = (t.min_prefetch, t.max_prefetch);
    let Some((window, stall_ns)) = experts.and_then(|e| e.prefetch) else {
        let explanation = if experts.is_some() { "all experts are in device memory" } else { NO_EXPERTS };
        return gate(0.0, low, GateStatus::NotApplicable, explanation.to_string());
    };
    let (window, waits) = (f64::from(window), format!("stalls {:.1} µs per forward pass", stall_ns / 1e3));
    let explanation = if window > 0.0 {
        format!("prefetch window of {window} layers, {low} to {high} advised; {waits}")
    } else {
        format!(
            "no prefetch: experts are fetched after the router runs, {low} to {high} layers ahead advised; {waits}"
        )
    };
    let verdict = match (low..=high).contains(&window) || window > 0.0 && window < low && stall_ns <= 0.0 {
        false => GateStatus::Fail,
        true if stall_ns > 0.0 => GateStatus::Warn,
        true => GateStatus::Pass,
    };
    gate(window, if window > high { high } else { low }, verdict, explanation)
}

fn exchange_gate(exchange: Option<&ExchangeGateInputs>, t: &Thresholds) -> GateResult {
    let gate = |value, verdict, explanation| GateResult {
        id: "collectives.exchange",
        title: "dispatch and combine saturate the links",
        value,
        threshold: t.min_exchange,
        unit: "of the line rate",
        status: verdict,
        explanation,
    };
    let Some(x) = exchange.filter(|x| x.ns > 0.0 && x.line_bytes_per_s > 0.0) else {
        return gate(0.0, GateStatus::NotApplicable, "no dispatch between ranks".to_string());
    };
    let rate = x.bytes / x.ns * 1e9;
    let share = rate / x.line_bytes_per_s;
    let explanation = format!(
        "{} to other ranks, each token once per rank, in {:.1} µs: {:.0} of {:.0} GB/s",
        round_bytes(x.bytes),
        x.ns / 1e3,
        rate / 1e9,
        x.line_bytes_per_s / 1e9
    );
    if x.bytes < t.exchange_burst_bytes {
        let explanation =
            format!("{explanation}; below the burst size of {}", round_bytes(t.exchange_burst_bytes));
        return gate(share, GateStatus::NotApplicable, explanation);
    }
    gate(share, if share >= t.min_exchange { GateStatus::Pass } else { GateStatus::Fail }, explanation)
}

fn overlap_gate(facts: &GateInputs, t: &Thresholds) -> GateResult {
    let gate = |value, verdict, explanation| GateResult {
        id: "collectives.overlap",
        title: "collectives overlap compute",
        value,
        threshold: t.min_overlap,
        unit: SHARE,
        status: verdict,
        explanation,
    };
    if facts.collective_ns <= 0.0 {
        return gate(0.0, GateStatus::NotApplicable, "no collectives".to_string());
    }
    let share = facts.hidden_ns / facts.collective_ns;
    let explanation = format!(
        "{:.1} of {:.1} µs hidden, {:.1} µs exposed",
        facts.hidden_ns / 1e3,
        facts.collective_ns / 1e3,
        (facts.collective_ns - facts.hidden_ns) / 1e3
    );
    gate(share, if share >= t.min_overlap { GateStatus::Pass } else { GateStatus::Fail }, explanation)
}

fn bubble_gate(facts: &GateInputs, t: &Thresholds) -> GateResult {
    let gate = |value, verdict, explanation| GateResult {
        id: "pipeline.bubble",
        title: "pipeline bubble is small",
        value,
        threshold: t.max_bubble,
        unit: "of the step",
        status: verdict,
        explanation,
    };
    let worst = (0..facts.idle_shares.len())
        .reduce(|a, b| if facts.idle_shares[b] > facts.idle_shares[a] { b } else { a });
    match worst {
        Some(stage) if facts.idle_shares.len() > 1 => {
            let share = facts.idle_shares[stage];
            let verdict = if share < t.max_bubble { GateStatus::Pass } else { GateStatus::Fail };
            let over = facts.idle_shares.iter().filter(|b| **b >= t.max_bubble).count();
            let explanation = format!(
                "stage {stage} waits {:.1} % of the step, the maximum of {} stages; {over} at or over the threshold",
                share * 100.0,
                facts.idle_shares.len()
            );
            gate(share, verdict, explanation)
        }
        _ => gate(0.0, GateStatus::NotApplicable, "one stage".to_string()),
    }
}

fn cache_hit_gate(facts: &GateInputs, t: &Thresholds) -> GateResult {
    let gate = |value, verdict, explanation| GateResult {
        id: "cache.hits",
        title: "KV reads hit hot tiers",
        value,
        threshold: t.min_hits,
        unit: "of reads",
        status: verdict,
        explanation,
    };
    let Some(share) = facts.cache_hit_share else {
        return gate(0.0, GateStatus::NotApplicable, "no KV cache".to_string());
    };
    let explanation = format!("{:.1} % of reads hit a hot tier", share * 100.0);
    gate(share, if share >= t.min_hits { GateStatus::Pass } else { GateStatus::Fail }, explanation)
}

fn domain_gate(groups: &[GroupGateInputs]) -> GateResult {
    let across: Vec<&GroupGateInputs> = groups.iter().filter(|g| g.domains > 1).collect();
    let names = |gs: &[&GroupGateInputs]| {
        let one = |g: &&GroupGateInputs| format!("{} ({} ranks over {} domains)", g.axis, g.ranks, g.domains);
        gs.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    // Stages and replicas may be far apart: they send little and rarely.
    let chatty: Vec<&GroupGateInputs> =
        across.iter().copied().filter(|g| !matches!(g.axis, "pp" | "dp")).collect();
    let (verdict, explanation) = if !chatty.is_empty() {
        (GateStatus::Fail, format!("groups that leave their domain: {}", names(&chatty)))
    } else if groups.is_empty() {
        (GateStatus::NotApplicable, "one rank".to_string())
    } else if across.is_empty() {
        (GateStatus::Pass, format!("the groups of all {} axes stay in one domain", groups.len()))
    } else {
        (GateStatus::Pass, format!("only these leave their domain: {}", names(&across)))
    };
    let domains =
        groups.iter().filter(|g| !matches!(g.axis, "pp" | "dp")).map(|g| g.domains).max().unwrap_or(1);
    GateResult {
        id: "mesh.domain",
        title: "tp and ep collectives stay in one domain",
        value: f64::from(domains),
        threshold: 1.0,
        unit: "domains",
        status: verdict,
        explanation,
    }
}

fn rack_gate(r: &ReplicaGateInputs) -> GateResult {
    let gate = |verdict, explanation| GateResult {
        id: "mesh.rack",
        title: "each model replica stays in one rack",
        value: f64::from(r.racks_per_replica),
        threshold: 1.0,
        unit: "racks",
        status: verdict,
        explanation,
    };
    if r.replica_count <= 1 && r.racks_per_replica <= 1 {
        return gate(GateStatus::NotApplicable, "one replica in one rack".to_string());
    }
    let explanation = format!(
        "a replica of {} ranks spans {} racks of {} devices",
        r.ranks_per_replica, r.racks_per_replica, r.rack_devices
    );
    match (r.racks_per_replica <= 1, r.ranks_per_replica <= r.rack_devices) {
        (true, _) => gate(GateStatus::Pass, explanation),
        (false, true) => gate(GateStatus::Fail, format!("{explanation}, but fits in one: reorder the ranks")),
        (false, false) => gate(GateStatus::Warn, format!("{explanation}: it is larger than a rack")),
    }
}

const SHARE: &str = "of 1";
const NO_EXPERTS: &str = "the model has no routed experts";

fn round_bytes(b: f64) -> Bytes {
    Bytes(b.max(0.0).round() as u64)
}
