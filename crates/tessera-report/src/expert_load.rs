//! The load of the experts of a run, layer by layer.

use serde::{Serialize, Serializer};
use tessera_base::GateStatus;

use crate::markup::format_percent;

/// What the routers of one layer chose over the steps of a run, beside what chance alone would give.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExpertLoadRow {
    /// Number of the layer.
    pub layer: u64,
    /// Steps that were counted: parts of prompts, and ids.
    pub steps: u64,
    /// Choices of experts, over all steps.
    pub chosen: u64,
    /// Choices that moved to another expert because theirs was full.
    pub moved: u64,
    /// Choices that were dropped.
    pub dropped: u64,
    /// Standard deviation of the choices over experts, divided by their mean, before capacities.
    pub expert_std_over_mean: f64,
    /// The expected value of random choices.
    pub expert_chance: f64,
    /// Standard deviation of the computed rows over ranks of ep, divided by their mean, after capacities.
    pub rank_std_over_mean: f64,
    /// The expected value of random choices.
    pub rank_chance: f64,
    /// Rows of the busiest rank, divided by the mean.
    pub busiest_over_mean: f64,
    /// The gate on the balance over experts; it does not apply to few choices, which vary by chance.
    #[serde(serialize_with = "serialize_status")]
    pub balance: GateStatus,
    /// Limit of the gate.
    pub limit: f64,
}

fn serialize_status<S: Serializer>(status: &GateStatus, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(status.name())
}

/// Describes the load of a run in one line; `None` without layers.
#[must_use]
pub fn describe_expert_load(rows: &[ExpertLoadRow]) -> Option<String> {
    let most = rows.iter().max_by(|a, b| a.expert_std_over_mean.total_cmp(&b.expert_std_over_mean))?;
    let total = |of: fn(&ExpertLoadRow) -> u64| rows.iter().map(of).sum::<u64>();
    let count = |status: GateStatus| rows.iter().filter(|row| row.balance == status).count();
    let verdict = match (count(GateStatus::Fail), count(GateStatus::Pass)) {
        (0, 0) => "too few choices for the gate experts.balance".to_string(),
        (0, passed) => format!("gate experts.balance passed in {passed} of {} layers", rows.len()),
        (failed, _) => format!(
            "gate experts.balance failed in {failed} of {} layers, limit {}",
            rows.len(),
            format_percent(most.limit)
        ),
    };
    Some(format!(
        "{} choices of experts, {} moved, {} dropped; layer {} varies most: std/mean {} over experts ({} by chance), {} over \
         ranks ({} by chance); {verdict}",
        total(|row| row.chosen),
        total(|row| row.moved),
        total(|row| row.dropped),
        most.layer,
        format_percent(most.expert_std_over_mean),
        format_percent(most.expert_chance),
        format_percent(most.rank_std_over_mean),
        format_percent(most.rank_chance),
    ))
}
