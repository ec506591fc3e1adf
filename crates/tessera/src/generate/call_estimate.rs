//! Estimates the calls of a plan: one that reads a part of a prompt, and one that decodes an id of every text.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::MachineModel;
use tessera_cost::estimate_error::compare_by_class;
use tessera_mesh::Rank;
use tessera_models::{TokenBucket, token_phase_name};
use tessera_plan::video::estimate_call;
use tessera_report::call_comparison::{CallComparison, ClassComparison, EstimateComparison, LEADER_CLASS};

use super::LanguagePlan;
use crate::sim::to_bundle;

/// Time of the leader between two calls in nanoseconds: one lockstep message to the ranks and back between processes
/// of one host, measured on two cores.
pub const LEADER_NS: f64 = 150_000.0;

impl LanguagePlan {
    /// Estimates the calls of the plan on a machine, without a measurement beside them.
    ///
    /// # Errors
    /// T1115 if ranks form a wait cycle, which no sealed plan has.
    pub fn estimate_calls(&self, machine: &MachineModel) -> Result<EstimateComparison, Diagnostics> {
        let mut kinds = vec![("part of a prompt", self.prefill), ("decoding step", self.decode)];
        // A plan has one phase for both if a prompt is read row by row.
        kinds.dedup_by(|b, a| a.1 == b.1);
        let calls = kinds.into_iter().map(|(name, bucket)| self.estimate_bucket(name, bucket, machine));
        Ok(EstimateComparison {
            machine: format!("{}, executor {}", machine.cluster.title, machine.profile.name),
            calls: calls.collect::<Result<_, Diagnostic>>().map_err(|d| vec![d])?,
        })
    }

    /// Returns the kinds of calls without an estimate, for the reason that `why` states.
    #[must_use]
    pub fn calls_without_estimate(&self, why: &str) -> EstimateComparison {
        let call = |name: &str, bucket: TokenBucket| CallComparison {
            name: name.to_string(),
            phase: token_phase_name(bucket),
            rows: bucket.sequences * bucket.rows,
            ..CallComparison::default()
        };
        let mut calls = vec![call("part of a prompt", self.prefill), call("decoding step", self.decode)];
        calls.dedup_by(|b, a| a.phase == b.phase);
        EstimateComparison { machine: why.to_string(), calls }
    }

    fn estimate_bucket(
        &self,
        name: &str,
        bucket: TokenBucket,
        machine: &MachineModel,
    ) -> Result<CallComparison, Diagnostic> {
        let phase = token_phase_name(bucket);
        let bundle = to_bundle(&self.sealed);
        let estimate =
            estimate_call(&bundle, &phase, std::slice::from_ref(&phase), machine, true).map_err(|d| *d)?;
        let mut classes: Vec<ClassComparison> = Vec::new();
        let mesh = self.sealed.mesh();
        let ranks: Vec<Rank> = mesh.iter().filter(|r| mesh.contains(*r)).collect();
        for rank in &ranks {
            let Some(program) = self.sealed.rank_program(&phase, *rank) else { continue };
            let op_ns = estimate.op_times_ns(*rank, program.ops.len());
            for row in compare_by_class(program, &[], Some(&op_ns)) {
                let own = row.estimated_ns.unwrap_or(0.0) / ranks.len() as f64;
                match classes.iter_mut().find(|c| c.class == row.name) {
                    Some(class) => class.estimated_ns = class.estimated_ns.map(|ns| ns + own),
                    None => classes.push(ClassComparison {
                        class: row.name,
                        estimated_ns: Some(own),
                        ..ClassComparison::default()
                    }),
                }
            }
        }
        classes.push(ClassComparison {
            class: LEADER_CLASS.to_string(),
            estimated_ns: Some(LEADER_NS),
            ..ClassComparison::default()
        });
        Ok(CallComparison {
            name: name.to_string(),
            phase,
            rows: bucket.sequences * bucket.rows,
            estimated_ns: Some(estimate.ns + LEADER_NS),
            estimated_exposed_ns: Some(estimate.exposed_ns()),
            classes,
            ..CallComparison::default()
        })
    }
}
