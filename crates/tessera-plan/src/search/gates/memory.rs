//! The gates on the device memory of the peak rank.

use super::super::thresholds::Thresholds;
use super::{Gate, GateInputs, GateResult, GateStatus, MemoryGateInputs, SHARE, round_bytes};

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

pub(super) fn memory_gate(m: &MemoryGateInputs, t: &Thresholds) -> GateResult {
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
    Gate("memory.fits", "memory within the device", SHARE).result(share, limit, verdict, explanation)
}

pub(super) fn headroom_gate(m: &MemoryGateInputs, t: &Thresholds) -> GateResult {
    const GATE: Gate = Gate("memory.activations-and-cache", "activations and KV cache leave headroom", SHARE);
    let gate = |value, limit, verdict, explanation| GATE.result(value, limit, verdict, explanation);
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

pub(super) fn recompute_gate(facts: &GateInputs, t: &Thresholds) -> GateResult {
    let m = &facts.memory;
    const GATE: Gate = Gate(
        "memory.recompute",
        "recomputation if activations outgrow parameters",
        "of the rank's parameters",
    );
    let gate = |value, verdict, explanation| GATE.result(value, t.recompute_above, verdict, explanation);
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
