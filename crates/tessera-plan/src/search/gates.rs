//! The gates of a plan: each compares one number with one limit and names the term that decides.
//!
//! A gate judges nothing by itself: what is illegal is refused elsewhere, and a plan that fails a gate may still be the
//! best there is. Facts come in as plain numbers, so that a run's record can be judged by the same lines as an estimate.

use tessera_base::{Bytes, Code, Diagnostic};

use super::thresholds::Thresholds;

/// A gate that a plan does not pass.
pub static T1241: Code = Code {
    id: "T1241",
    title: "a gate is not passed",
    page: "A gate is a rule of thumb of the mapping guide with a limit: how much of a device's memory activations and cache \
may take, how many experts a rank should hold, how much collective time should be hidden, how long a stage may wait, and \
so on. The message gives the number, the limit and the term that decides.\n\n\
Not passing is advice, not a refusal: the plan is legal and may be the best one for a machine that is too small or a batch \
that is too short. Change what the message names, or the limit: all of them are in one file (`gates.toml`) that yours may \
replace.\n\n\
A gate that does not apply says why with its arithmetic, for instance balance over experts for a decode batch that gives \
each expert a handful of rows: those vary by more than the limit with a perfect router.",
};

/// What a gate says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// Within the limit.
    Pass,
    /// Beyond what is recommended.
    Warn,
    /// Beyond the limit.
    Fail,
    /// Nothing to judge, or not judgeable at this size.
    NotApplicable,
}

impl Verdict {
    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["pass", "warn", "fail", "n/a"][self as usize]
    }
}

/// One number against one limit.
#[derive(Debug, Clone, PartialEq)]
pub struct Gate {
    /// Stable name, such as `memory.activations-and-cache`.
    pub id: &'static str,
    /// Title for people.
    pub title: &'static str,
    /// The number; 0 where nothing applies.
    pub value: f64,
    /// The limit that it is judged by.
    pub limit: f64,
    /// Unit of both.
    pub unit: &'static str,
    /// What follows.
    pub verdict: Verdict,
    /// The arithmetic, the term that decides, and what is left.
    pub says: String,
}

impl Gate {
    /// As a diagnostic, where it is not passed: a warning, since the plan stands.
    #[must_use]
    pub fn diagnostic(&self) -> Option<Diagnostic> {
        matches!(self.verdict, Verdict::Warn | Verdict::Fail).then(|| {
            Diagnostic::warning(&T1241, format!("gate `{}`: {}", self.id, self.title))
                .at("plan", format!("{:.3} {}", self.value, self.unit))
                .at("limit", format!("{} {}", self.limit, self.unit))
                .note(self.says.clone())
        })
    }
}

/// Bytes of the fullest rank in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MemoryFacts {
    /// Memory of a device.
    pub device: f64,
    /// Weights, experts included.
    pub parameters: f64,
    /// Gradients and optimizer.
    pub training: f64,
    /// Activations kept, all micro-batches in flight (A times tokens).
    pub activations: f64,
    /// What they would be if nothing were recomputed.
    pub activations_plain: f64,
    /// Keys and values (K times tokens).
    pub cache: f64,
    /// Buffers of sends and prefetch, and libraries.
    pub other: f64,
    /// Tokens whose activations are kept; A is their share of the bytes.
    pub activation_tokens: f64,
    /// Tokens whose keys and values are held.
    pub cache_tokens: f64,
}

/// Experts of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExpertFacts {
    /// Experts.
    pub experts: u64,
    /// Experts that a token asks for.
    pub top_k: u64,
    /// Ranks that they are dealt to.
    pub ep: u32,
    /// Tokens of one micro-batch over all ranks of the group.
    pub tokens: f64,
    /// Standard deviation of rows over experts, over their mean.
    pub std_over_mean: f64,
    /// The same over ranks.
    pub rank_std_over_mean: f64,
    /// Rows of the slowest rank over the mean.
    pub slowest: f64,
    /// Capacity in per cent of the even share; 0 without one.
    pub capacity_pct: u32,
    /// Share of assignments dropped.
    pub dropped: f64,
    /// Window of prefetch in layers (0 where nothing is fetched ahead) and the stall of a pass that is left; absent where all experts are in device memory.
    pub prefetch: Option<(u32, f64)>,
}

/// Dispatch of one layer: bytes that the busiest rank sends to others, how long that takes, and the line rate.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExchangeFacts {
    /// Bytes to other ranks, each token once per rank.
    pub bytes: f64,
    /// Time in nanoseconds.
    pub ns: f64,
    /// Line rate per device and direction.
    pub line_bytes_per_s: f64,
}

/// A group of ranks that a collective runs over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupFacts {
    /// What it is for: `tp`, `ep`, `pp`, `dp`.
    pub axis: &'static str,
    /// Ranks.
    pub ranks: u32,
    /// Domains of switches that they stand in.
    pub domains: u32,
}

/// How one copy of the model stands on racks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReplicaFacts {
    /// Copies.
    pub copies: u32,
    /// Ranks of one.
    pub ranks: u32,
    /// Most racks that one copy touches.
    pub racks: u32,
    /// Devices of a rack.
    pub rack_devices: u32,
}

/// What is judged. What is absent gives gates that do not apply.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GateFacts {
    /// Whether this is training.
    pub training: bool,
    /// Whether anything is recomputed.
    pub recomputes: bool,
    /// Memory of the fullest rank.
    pub memory: MemoryFacts,
    /// Experts, of a model that has some.
    pub experts: Option<ExpertFacts>,
    /// Dispatch, where experts are on several ranks.
    pub exchange: Option<ExchangeFacts>,
    /// Collective time of a step that is hidden, and all of it, in nanoseconds.
    pub hidden_ns: f64,
    /// All collective time of a step.
    pub collective_ns: f64,
    /// Share of the step that each stage waits for others.
    pub bubbles: Vec<f64>,
    /// Share of reads that find keys and values in a hot tier; absent without a cache.
    pub cache_hits: Option<f64>,
    /// Groups with more than one rank.
    pub groups: Vec<GroupFacts>,
    /// Copies of the model.
    pub replica: ReplicaFacts,
}

/// Judges facts by limits; always the same gates in the same order.
#[must_use]
pub fn gates(facts: &GateFacts, limits: &Thresholds) -> Vec<Gate> {
    vec![
        fits(&facts.memory, limits),
        activations_and_cache(&facts.memory, limits),
        recomputation(facts, limits),
        density(facts.experts.as_ref(), limits),
        balance(facts.experts.as_ref(), limits),
        capacity(facts.experts.as_ref(), limits),
        prefetch(facts.experts.as_ref(), limits),
        exchange(facts.exchange.as_ref(), limits),
        overlap(facts, limits),
        bubble(facts, limits),
        hits(facts, limits),
        domains(&facts.groups),
        racks(&facts.replica),
    ]
}

/// Whether a plan should recompute: activations over the rank's parameters, and the reason in words.
#[must_use]
pub fn should_recompute(activations: f64, parameters: f64, limits: &Thresholds) -> (bool, String) {
    let ratio = activations / parameters.max(1.0);
    let over = ratio > limits.recompute_above;
    let says = format!(
        "activations {} are {ratio:.2} of the rank's parameters {}: {} than {}, so {}",
        bytes(activations),
        bytes(parameters),
        if over { "more" } else { "no more" },
        limits.recompute_above,
        if over { "recompute" } else { "nothing need be recomputed" }
    );
    (over, says)
}

fn fits(m: &MemoryFacts, t: &Thresholds) -> Gate {
    let terms = [
        ("parameters", m.parameters),
        ("gradients and optimizer", m.training),
        ("activations", m.activations),
        ("cache", m.cache),
        ("buffers and libraries", m.other),
    ];
    let used: f64 = terms.iter().map(|t| t.1).sum();
    let largest = terms.iter().fold(terms[0], |a, b| if b.1 > a.1 { *b } else { a });
    let (left, what) =
        if used <= m.device { (m.device - used, "left") } else { (used - m.device, "too much") };
    let says = format!(
        "{} of {}: {} {what}; the largest are {} with {}",
        bytes(used),
        bytes(m.device),
        bytes(left),
        largest.0,
        bytes(largest.1)
    );
    let share = used / m.device.max(1.0);
    let (verdict, limit) = match share {
        s if s > 1.0 => (Verdict::Fail, 1.0),
        s if s > t.device_warn => (Verdict::Warn, t.device_warn),
        _ => (Verdict::Pass, t.device_warn),
    };
    Gate {
        id: "memory.fits",
        title: "memory within the device",
        value: share,
        limit,
        unit: SHARE,
        verdict,
        says,
    }
}

fn activations_and_cache(m: &MemoryFacts, t: &Thresholds) -> Gate {
    let gate = |value, limit, verdict, says| Gate {
        id: "memory.activations-and-cache",
        title: "activations and cache leave headroom",
        value,
        limit,
        unit: SHARE,
        verdict,
        says,
    };
    if m.activation_tokens <= 0.0 && m.cache_tokens <= 0.0 {
        let says = "A and K are bytes per token: no tokens, nothing to judge".to_string();
        return gate(0.0, t.activations_and_cache_fail, Verdict::NotApplicable, says);
    }
    let (both, device) = (m.activations + m.cache, m.device.max(1.0));
    let share = both / device;
    let (verdict, limit) = match share {
        s if s > t.activations_and_cache_fail => (Verdict::Fail, t.activations_and_cache_fail),
        s if s > t.activations_and_cache_warn => (Verdict::Warn, t.activations_and_cache_warn),
        _ => (Verdict::Pass, t.activations_and_cache_warn),
    };
    let per_token = |all: f64, tokens: f64| {
        if tokens > 0.0 {
            format!("{} × {tokens:.0} tokens", bytes(all / tokens))
        } else {
            "no tokens".to_string()
        }
    };
    let says = format!(
        "A {} ({}) + K {} ({}) = {} of {}, of which {} decides; {} are left for parameters and temporaries",
        bytes(m.activations),
        per_token(m.activations, m.activation_tokens),
        bytes(m.cache),
        per_token(m.cache, m.cache_tokens),
        bytes(both),
        bytes(m.device),
        if m.activations >= m.cache { "A" } else { "K" },
        bytes((m.device - both).max(0.0))
    );
    gate(share, limit, verdict, says)
}

fn recomputation(facts: &GateFacts, t: &Thresholds) -> Gate {
    let m = &facts.memory;
    let gate = |value, verdict, says| Gate {
        id: "memory.recompute",
        title: "recomputation where activations outgrow parameters",
        value,
        limit: t.recompute_above,
        unit: "of the rank's parameters",
        verdict,
        says,
    };
    if !facts.training {
        return gate(0.0, Verdict::NotApplicable, "nothing is kept for a backward pass".to_string());
    }
    let plain = m.activations_plain.max(m.activations);
    let (advised, mut says) = should_recompute(plain, m.parameters, t);
    if advised && facts.recomputes {
        says = format!("{says}, and the plan does: {} are kept", bytes(m.activations));
    }
    let verdict = if advised && !facts.recomputes { Verdict::Warn } else { Verdict::Pass };
    gate(plain / m.parameters.max(1.0), verdict, says)
}

fn density(experts: Option<&ExpertFacts>, t: &Thresholds) -> Gate {
    let gate = |value, verdict, says| Gate {
        id: "experts.density",
        title: "enough experts on each rank",
        value,
        limit: t.per_rank_least,
        unit: "experts",
        verdict,
        says,
    };
    let Some(e) = experts else { return gate(0.0, Verdict::NotApplicable, NO_EXPERTS.to_string()) };
    let each = e.experts as f64 / f64::from(e.ep.max(1));
    if (e.experts as f64) < t.per_rank_least {
        let says = format!("the layer has {} experts in all, fewer than {}", e.experts, t.per_rank_least);
        return gate(each, Verdict::NotApplicable, says);
    }
    let says = format!("{} experts / ep {} = {each:.1}", e.experts, e.ep);
    if each >= t.per_rank_least {
        return gate(each, Verdict::Pass, says);
    }
    let most = (e.experts as f64 / t.per_rank_least) as u32;
    gate(
        each,
        Verdict::Fail,
        format!("{says}, of which ep is to blame: {most} is the most that keeps {}", t.per_rank_least),
    )
}

fn balance(experts: Option<&ExpertFacts>, t: &Thresholds) -> Gate {
    let gate = |value, verdict, says| Gate {
        id: "experts.balance",
        title: "rows are balanced over experts",
        value,
        limit: t.balance_most,
        unit: "std/mean",
        verdict,
        says,
    };
    let Some(e) = experts else { return gate(0.0, Verdict::NotApplicable, NO_EXPERTS.to_string()) };
    let rows = e.tokens * e.top_k as f64 / (e.experts as f64).max(1.0);
    let each = format!("{:.0} tokens × {} / {} experts = {rows:.1} rows each", e.tokens, e.top_k, e.experts);
    if rows < t.balance_rows_least {
        let says = format!(
            "{each}, below {}: a perfect router varies by {:.1} % there",
            t.balance_rows_least,
            100.0 / rows.max(1e-9).sqrt()
        );
        return gate(e.std_over_mean, Verdict::NotApplicable, says);
    }
    let verdict = if e.std_over_mean <= t.balance_most { Verdict::Pass } else { Verdict::Fail };
    let says = format!(
        "{each}; std/mean {:.1} % over experts, {:.1} % over ranks; the slowest rank has {:.2} times the mean",
        e.std_over_mean * 100.0,
        e.rank_std_over_mean * 100.0,
        e.slowest
    );
    gate(e.std_over_mean, verdict, says)
}

fn capacity(experts: Option<&ExpertFacts>, t: &Thresholds) -> Gate {
    let gate = |value, limit, verdict, says| Gate {
        id: "experts.capacity",
        title: "capacity of experts in its range",
        value,
        limit,
        unit: "% of the even share",
        verdict,
        says,
    };
    let (low, high) = (t.capacity_least_pct, t.capacity_most_pct);
    let Some(e) = experts.filter(|e| e.capacity_pct > 0) else {
        let says = if experts.is_some() { "no capacity: nothing is dropped" } else { NO_EXPERTS };
        return gate(0.0, high, Verdict::NotApplicable, says.to_string());
    };
    let pct = f64::from(e.capacity_pct);
    let dropped = e.dropped * 100.0;
    let inside = (low..=high).contains(&pct) && dropped <= t.dropped_most_pct;
    let verdict = if inside { Verdict::Pass } else { Verdict::Warn };
    let says = format!(
        "{pct} % of {low} to {high} %; {dropped:.2} % of assignments are dropped, of {} % at most",
        t.dropped_most_pct
    );
    gate(pct, if pct < low { low } else { high }, verdict, says)
}

fn prefetch(experts: Option<&ExpertFacts>, t: &Thresholds) -> Gate {
    let gate = |value, limit, verdict, says| Gate {
        id: "experts.prefetch",
        title: "cold experts are fetched ahead",
        value,
        limit,
        unit: "layers",
        verdict,
        says,
    };
    let (low, high) = (t.prefetch_least, t.prefetch_most);
    let Some((window, stall_ns)) = experts.and_then(|e| e.prefetch) else {
        let says = if experts.is_some() { "all experts are in device memory" } else { NO_EXPERTS };
        return gate(0.0, low, Verdict::NotApplicable, says.to_string());
    };
    let (window, waits) = (f64::from(window), format!("waits {:.1} µs a pass", stall_ns / 1e3));
    let says = if window > 0.0 {
        format!("window of {window} layers, {low} to {high} advised; {waits}")
    } else {
        format!(
            "nothing is fetched before the router names it, {low} to {high} layers ahead advised; {waits}"
        )
    };
    let verdict = match (low..=high).contains(&window) || window > 0.0 && window < low && stall_ns <= 0.0 {
        false => Verdict::Fail,
        true if stall_ns > 0.0 => Verdict::Warn,
        true => Verdict::Pass,
    };
    gate(window, if window > high { high } else { low }, verdict, says)
}

fn exchange(exchange: Option<&ExchangeFacts>, t: &Thresholds) -> Gate {
    let gate = |value, verdict, says| Gate {
        id: "collectives.exchange",
        title: "dispatch and combine use the links",
        value,
        limit: t.exchange_least,
        unit: "of the line rate",
        verdict,
        says,
    };
    let Some(x) = exchange.filter(|x| x.ns > 0.0 && x.line_bytes_per_s > 0.0) else {
        return gate(0.0, Verdict::NotApplicable, "nothing is exchanged between ranks".to_string());
    };
    let rate = x.bytes / x.ns * 1e9;
    let share = rate / x.line_bytes_per_s;
    let says = format!(
        "{} to other ranks, each token once per rank, in {:.1} µs = {:.0} of {:.0} GB/s",
        bytes(x.bytes),
        x.ns / 1e3,
        rate / 1e9,
        x.line_bytes_per_s / 1e9
    );
    if x.bytes < t.exchange_burst_bytes {
        let says = format!("{says}; no burst: those have {} or more", bytes(t.exchange_burst_bytes));
        return gate(share, Verdict::NotApplicable, says);
    }
    gate(share, if share >= t.exchange_least { Verdict::Pass } else { Verdict::Fail }, says)
}

fn overlap(facts: &GateFacts, t: &Thresholds) -> Gate {
    let gate = |value, verdict, says| Gate {
        id: "collectives.overlap",
        title: "collectives hide behind computation",
        value,
        limit: t.overlap_least,
        unit: SHARE,
        verdict,
        says,
    };
    if facts.collective_ns <= 0.0 {
        return gate(0.0, Verdict::NotApplicable, "no collectives".to_string());
    }
    let share = facts.hidden_ns / facts.collective_ns;
    let says = format!(
        "{:.1} of {:.1} µs hidden, {:.1} µs exposed",
        facts.hidden_ns / 1e3,
        facts.collective_ns / 1e3,
        (facts.collective_ns - facts.hidden_ns) / 1e3
    );
    gate(share, if share >= t.overlap_least { Verdict::Pass } else { Verdict::Fail }, says)
}

fn bubble(facts: &GateFacts, t: &Thresholds) -> Gate {
    let gate = |value, verdict, says| Gate {
        id: "pipeline.bubble",
        title: "stages do not wait",
        value,
        limit: t.bubble_most,
        unit: "of the step",
        verdict,
        says,
    };
    let worst =
        (0..facts.bubbles.len()).reduce(|a, b| if facts.bubbles[b] > facts.bubbles[a] { b } else { a });
    match worst {
        Some(stage) if facts.bubbles.len() > 1 => {
            let share = facts.bubbles[stage];
            let verdict = if share < t.bubble_most { Verdict::Pass } else { Verdict::Fail };
            let over = facts.bubbles.iter().filter(|b| **b >= t.bubble_most).count();
            let says = format!(
                "stage {stage} waits {:.1} % of the step, the longest of {}; {over} at or over the limit",
                share * 100.0,
                facts.bubbles.len()
            );
            gate(share, verdict, says)
        }
        _ => gate(0.0, Verdict::NotApplicable, "one stage".to_string()),
    }
}

fn hits(facts: &GateFacts, t: &Thresholds) -> Gate {
    let gate = |value, verdict, says| Gate {
        id: "cache.hits",
        title: "keys and values are read from hot tiers",
        value,
        limit: t.hits_least,
        unit: "of reads",
        verdict,
        says,
    };
    let Some(share) = facts.cache_hits else {
        return gate(0.0, Verdict::NotApplicable, "no cache of keys and values".to_string());
    };
    let says = format!("{:.1} % of reads hit", share * 100.0);
    gate(share, if share >= t.hits_least { Verdict::Pass } else { Verdict::Fail }, says)
}

fn domains(groups: &[GroupFacts]) -> Gate {
    let across: Vec<&GroupFacts> = groups.iter().filter(|g| g.domains > 1).collect();
    let names = |gs: &[&GroupFacts]| {
        let one = |g: &&GroupFacts| format!("{} ({} ranks over {} domains)", g.axis, g.ranks, g.domains);
        gs.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    // Stages and copies may stand apart: they send little and rarely.
    let chatty: Vec<&GroupFacts> =
        across.iter().copied().filter(|g| !matches!(g.axis, "pp" | "dp")).collect();
    let (verdict, says) = if !chatty.is_empty() {
        (Verdict::Fail, format!("leave their domain: {}", names(&chatty)))
    } else if groups.is_empty() {
        (Verdict::NotApplicable, "one rank".to_string())
    } else if across.is_empty() {
        (Verdict::Pass, format!("all {} kinds of groups stay in one domain", groups.len()))
    } else {
        (Verdict::Pass, format!("only {} leave theirs", names(&across)))
    };
    let most = groups.iter().filter(|g| !matches!(g.axis, "pp" | "dp")).map(|g| g.domains).max().unwrap_or(1);
    Gate {
        id: "mesh.domain",
        title: "collectives of tp and ep stay in one domain",
        value: f64::from(most),
        limit: 1.0,
        unit: "domains",
        verdict,
        says,
    }
}

fn racks(r: &ReplicaFacts) -> Gate {
    let gate = |verdict, says| Gate {
        id: "mesh.rack",
        title: "each copy stays in a rack",
        value: f64::from(r.racks),
        limit: 1.0,
        unit: "racks",
        verdict,
        says,
    };
    if r.copies <= 1 && r.racks <= 1 {
        return gate(Verdict::NotApplicable, "one copy in one rack".to_string());
    }
    let says = format!("a copy of {} ranks touches {} racks of {} devices", r.ranks, r.racks, r.rack_devices);
    match (r.racks <= 1, r.ranks <= r.rack_devices) {
        (true, _) => gate(Verdict::Pass, says),
        (false, true) => {
            gate(Verdict::Fail, format!("{says}, though it would fit one: the order of ranks is to blame"))
        }
        (false, false) => gate(Verdict::Warn, format!("{says}: it does not fit one")),
    }
}

const SHARE: &str = "of 1";
const NO_EXPERTS: &str = "a model without routed experts";

fn bytes(b: f64) -> Bytes {
    Bytes(b.max(0.0).round() as u64)
}
