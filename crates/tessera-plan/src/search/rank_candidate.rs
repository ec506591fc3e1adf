//! Ranks one candidate: its full estimate with error bar and gates, or the reasons why it is
//! rejected.

use tessera_base::Bytes;
use tessera_cost::MachineModel;
use tessera_mesh::{LinkClass, MemoryTier};

use super::budget::MemoryTotals;
use super::constraints::format_bytes;
use super::estimate::{Estimator, LayoutCost, PipelineCost};
use super::{Candidate, RankedCandidate, Reason, StageAssignment, StepEstimate};

impl Estimator<'_> {
    /// Returns a candidate with its full estimate, or every constraint that it violates.
    pub fn rank_candidate(&mut self, c: &Candidate) -> Result<RankedCandidate, Vec<(Reason, String)>> {
        let broken = self.constraints.all_violations(c);
        if !broken.is_empty() {
            return Err(broken.into_iter().map(|r| (r, self.constraints.explain(r, c))).collect());
        }
        let (mut node, mut pipe) = (LayoutCost::default(), PipelineCost::default());
        self.compute_layers(c, &mut node);
        self.compute_pipeline(c, &mut node, &mut pipe);
        let fit = self.fit_memory(c, &node, &pipe);
        if !fit.fits {
            return Err(vec![(Reason::Memory, explain_overflow(self, &self.peak_totals(c, &pipe, &fit)))]);
        }
        let sum = self.step_cost(c, &node, &mut pipe, fit);
        let stages = (0..c.pp)
            .map(|s| StageAssignment {
                chunks: self.stage_chunks(c, &pipe, s),
                has_embedding: s == 0,
                has_head: s + 1 == c.pp,
                micro_batch_ns: pipe.stage_ns[s as usize],
            })
            .collect();
        let estimate = StepEstimate {
            step_ns: sum.step_ns,
            times: sum.breakdown,
            tokens_per_s: self.step_tokens() / (sum.step_ns * 1e-9),
            mfu: self.mfu(c, sum.step_ns),
            budget: sum.memory.to_budget(),
            link_bytes: LinkClass::ALL.into_iter().zip(sum.link_bytes).filter(|(_, b)| *b > 0.0).collect(),
            error_share: error_bar(
                &self.q.machine,
                self.q.job.name(),
                sum.link_bytes[LinkClass::Network as usize] > 0.0,
            )
            .0,
        };
        let gates = self.evaluate_gates(c, &node, &pipe, &sum);
        Ok(RankedCandidate {
            candidate: *c,
            gates,
            stages,
            micro_batches: node.micro_batches,
            dropped_share: node.expert_load.map_or(0.0, |l| l.dropped),
            estimate,
        })
    }

    /// Returns whether an unpinned capacity drops more than the search space allows.
    pub(super) fn drops_too_many(&self, node: &LayoutCost) -> bool {
        let dropped = node.expert_load.map_or(0.0, |l| l.dropped);
        dropped > self.q.space.max_dropped && self.q.pins.capacity_pct.is_none()
    }

    pub(super) fn explain_drops(&self, c: &Candidate, node: &LayoutCost) -> String {
        format!(
            "a capacity of {} % drops {:.1} % of assignments under {} routing, more than {:.1} %",
            c.layout.capacity_pct,
            node.expert_load.map_or(0.0, |l| l.dropped) * 100.0,
            self.q.routing.name(),
            self.q.space.max_dropped * 100.0
        )
    }
}

/// Returns the half-width of the error bar and the reasons why it is wider than the profile's: it
/// doubles for a workload that no measurement validates, and doubles again on a cluster that was
/// not measured or over links that leave a domain.
///
/// `job` is a name of the cost model's jobs, such as `stream` for a call of a video model.
#[must_use]
pub fn error_bar(machine: &MachineModel, job: &str, leaves_domain: bool) -> (f64, Vec<String>) {
    let (profile, cluster) = (&machine.profile, &machine.cluster);
    if profile.error_share == 0.0 {
        return (0.0, vec![format!("the profile {} is a lower bound: it has no error bar", profile.name)]);
    }
    let (mut error, mut notes) = (profile.error_share, Vec::new());
    if !profile.is_validated_for(job) {
        error *= 2.0;
        notes.push(format!(
            "no measurement validates {job} under the profile {}: the error bar is doubled",
            profile.name
        ));
    }
    if !cluster.measured {
        error *= 2.0;
        notes.push(format!(
            "{} was not measured by this project: every figure is an estimate, and the error bar is doubled",
            cluster.title
        ));
    } else if leaves_domain {
        error *= 2.0;
        notes.push(
            "some groups cross domains, over links that were not measured: the error bar is doubled".into(),
        );
    }
    (error, notes)
}

/// Explains that even an even spread over all ranks needs too much memory.
pub(super) fn explain_lower_bound(prices: &Estimator, what: &str, min_bytes: f64) -> String {
    let device = &prices.q.machine.cluster.device;
    format!(
        "{what} are at least {} per rank if evenly spread; {} has {}",
        format_bytes(min_bytes),
        device.name,
        format_bytes(device.memory_bytes.value)
    )
}

pub(super) fn explain_overflow(prices: &Estimator, totals: &MemoryTotals) -> String {
    let cluster = &prices.q.machine.cluster;
    let (need, limit) = (totals.tier_bytes(MemoryTier::Hbm), cluster.device.memory_bytes.value);
    let host = totals.tier_bytes(MemoryTier::Host);
    let budget = totals.to_budget();
    let largest = budget.bytes.iter().filter(|((t, _), _)| *t == MemoryTier::Hbm).max_by_key(|(_, b)| **b);
    let term = largest.map_or(String::new(), |((_, what), b)| format!(", of which {} are {b}", what.name()));
    if need <= limit && host > cluster.host_bytes.value {
        return format!(
            "the host would hold {} and has {}",
            format_bytes(host),
            format_bytes(cluster.host_bytes.value)
        );
    }
    if need <= limit {
        return format!(
            "peers would hold {} in addition to their own data{term}",
            format_bytes(totals.tier_bytes(MemoryTier::Peer))
        );
    }
    format!("the fullest rank needs {} and has {}{term}", format_bytes(need), Bytes(limit as u64))
}
