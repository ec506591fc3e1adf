//! The gates on the experts of a layer: their density, balance, capacity and prefetch.

use super::super::thresholds::Thresholds;
use super::{ExpertGateInputs, Gate, GateResult, GateStatus};

const NO_EXPERTS: &str = "the model has no routed experts";

pub(super) fn density_gate(experts: Option<&ExpertGateInputs>, t: &Thresholds) -> GateResult {
    const GATE: Gate = Gate("experts.density", "enough experts on each rank", "experts");
    let gate = |value, verdict, explanation| GATE.result(value, t.min_per_rank, verdict, explanation);
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

/// Evaluates the gate on the balance of choices over experts, of an estimate or of what a run counted.
#[must_use]
pub fn balance_gate(experts: Option<&ExpertGateInputs>, t: &Thresholds) -> GateResult {
    const GATE: Gate = Gate("experts.balance", "rows are balanced over experts", "std/mean");
    let gate = |value, verdict, explanation| GATE.result(value, t.max_balance, verdict, explanation);
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

pub(super) fn capacity_gate(experts: Option<&ExpertGateInputs>, t: &Thresholds) -> GateResult {
    const GATE: Gate = Gate("experts.capacity", "expert capacity is within range", "% of the even share");
    let gate = |value, limit, verdict, explanation| GATE.result(value, limit, verdict, explanation);
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

pub(super) fn prefetch_gate(experts: Option<&ExpertGateInputs>, t: &Thresholds) -> GateResult {
    const GATE: Gate = Gate("experts.prefetch", "cold experts are prefetched", "layers");
    let gate = |value, limit, verdict, explanation| GATE.result(value, limit, verdict, explanation);
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
