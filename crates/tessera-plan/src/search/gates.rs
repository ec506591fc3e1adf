//! The gates of a plan: each compares one number with one threshold and names the dominant term.
//!
//! A gate never rejects a plan: the constraints do that, and a plan that fails a gate may still be
//! the best one. The inputs are plain numbers, so that the same gates evaluate an estimate and the
//! record of a run.

mod experts;
mod inputs;
mod memory;

use tessera_base::{Bytes, Diagnostic, GateStatus};

use super::thresholds::Thresholds;
use crate::codes::T1241;
pub use experts::balance_gate;
use experts::{capacity_gate, density_gate, prefetch_gate};
pub use inputs::{
    ExchangeGateInputs, ExpertGateInputs, GateInputs, GroupGateInputs, MemoryGateInputs, ReplicaGateInputs,
};
pub use memory::should_recompute;
use memory::{headroom_gate, memory_gate, recompute_gate};

/// The value of one gate, its limit, and whether the value passes.
#[derive(Debug, Clone, PartialEq)]
pub struct GateResult {
    /// Stable identifier, such as `memory.activations-and-cache`.
    pub id: &'static str,
    /// What the gate checks, as reports and warnings print it.
    pub title: &'static str,
    /// The estimated or measured value, in `unit`; 0 if the gate does not apply.
    pub value: f64,
    /// The limit that `value` is compared with, in the same unit.
    pub threshold: f64,
    /// Unit of the value and the threshold, printed after both, such as `std/mean`.
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

/// The id, title and unit of a gate.
struct Gate(&'static str, &'static str, &'static str);

impl Gate {
    fn result(self, value: f64, threshold: f64, status: GateStatus, explanation: String) -> GateResult {
        let Gate(id, title, unit) = self;
        GateResult { id, title, value, threshold, unit, status, explanation }
    }
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

fn exchange_gate(exchange: Option<&ExchangeGateInputs>, t: &Thresholds) -> GateResult {
    const GATE: Gate =
        Gate("collectives.exchange", "dispatch and combine saturate the links", "of the line rate");
    let gate = |value, verdict, explanation| GATE.result(value, t.min_exchange, verdict, explanation);
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
    const GATE: Gate = Gate("collectives.overlap", "collectives overlap compute", SHARE);
    let gate = |value, verdict, explanation| GATE.result(value, t.min_overlap, verdict, explanation);
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
    const GATE: Gate = Gate("pipeline.bubble", "pipeline bubble is small", "of the step");
    let gate = |value, verdict, explanation| GATE.result(value, t.max_bubble, verdict, explanation);
    let worst = (0..facts.idle_shares.len())
        .reduce(|a, b| if facts.idle_shares[b] > facts.idle_shares[a] { b } else { a });
    match worst {
        Some(stage) if facts.idle_shares.len() > 1 => {
            let share = facts.idle_shares[stage];
            let verdict = if share < t.max_bubble { GateStatus::Pass } else { GateStatus::Fail };
            let over = facts.idle_shares.iter().filter(|b| **b >= t.max_bubble).count();
            let needed = match facts.micro_batches {
                Some((now, Some(needed))) => format!(
                    "; with {needed} micro-batches of this size instead of {now} none would be: the batch must be {:.1} times as large",
                    f64::from(needed) / f64::from(now.max(1))
                ),
                Some((_, None)) => {
                    "; more micro-batches are not enough, because the stages differ too much".to_string()
                }
                None => String::new(),
            };
            let explanation = format!(
                "stage {stage} waits {:.1} % of the step, the maximum of {} stages; {over} at or over the threshold{needed}",
                share * 100.0,
                facts.idle_shares.len()
            );
            gate(share, verdict, explanation)
        }
        _ => gate(0.0, GateStatus::NotApplicable, "one stage".to_string()),
    }
}

fn cache_hit_gate(facts: &GateInputs, t: &Thresholds) -> GateResult {
    const GATE: Gate = Gate("cache.hits", "KV reads hit hot tiers", "of reads");
    let gate = |value, verdict, explanation| GATE.result(value, t.min_hits, verdict, explanation);
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
    Gate("mesh.domain", "tp and ep collectives stay in one domain", "domains").result(
        f64::from(domains),
        1.0,
        verdict,
        explanation,
    )
}

fn rack_gate(r: &ReplicaGateInputs) -> GateResult {
    const GATE: Gate = Gate("mesh.rack", "each model replica stays in one rack", "racks");
    let gate = |verdict, explanation| GATE.result(f64::from(r.racks_per_replica), 1.0, verdict, explanation);
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

fn round_bytes(b: f64) -> Bytes {
    Bytes(b.max(0.0).round() as u64)
}
