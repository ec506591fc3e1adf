//! Estimates the calls of a plan: one that reads a part of a prompt, and one that decodes ids of every text.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::MachineModel;
use tessera_cost::estimate_error::compare_by_class;
use tessera_mesh::Rank;
use tessera_models::TokenPhase;
use tessera_plan::video::{CallEstimate, estimate_call};
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
        let kinds = self.list_call_kinds();
        let calls = kinds.into_iter().map(|kind| self.estimate_kind(kind, machine));
        Ok(EstimateComparison {
            machine: format!("{}, executor {}", machine.cluster.title, machine.profile.name),
            calls: calls.collect::<Result<_, Diagnostic>>().map_err(|d| vec![d])?,
        })
    }

    /// Returns the kinds of calls without an estimate, for the reason that `why` states.
    #[must_use]
    pub fn calls_without_estimate(&self, why: &str) -> EstimateComparison {
        let calls = self.list_call_kinds();
        EstimateComparison { machine: why.to_string(), calls }
    }

    /// Returns the kinds of calls: one that reads a part of a prompt, and one that decodes as many ids as a call may.
    fn list_call_kinds(&self) -> Vec<CallComparison> {
        let kind = |name: String, phases: &[TokenPhase]| CallComparison {
            name,
            phases: phases.iter().map(TokenPhase::name).collect(),
            rows: phases.iter().map(|phase| phase.bucket.sequences * phase.bucket.rows).sum(),
            ..CallComparison::default()
        };
        let decoding = self.decoding_phases(usize::MAX);
        let name = match decoding.len() {
            1 => "decoding step".to_string(),
            ids => format!("{ids} decoding steps"),
        };
        let mut kinds = vec![
            kind("part of a prompt".to_string(), &[TokenPhase::from_call(self.prefill)]),
            kind(name, &decoding),
        ];
        // A plan has one phase for both if a prompt is read row by row.
        kinds.dedup_by(|b, a| a.phases == b.phases);
        kinds
    }

    fn estimate_kind(
        &self,
        kind: CallComparison,
        machine: &MachineModel,
    ) -> Result<CallComparison, Diagnostic> {
        let bundle = to_bundle(&self.sealed);
        let mut classes: Vec<ClassComparison> = Vec::new();
        let (mut total_ns, mut exposed_ns) = (LEADER_NS, 0.0);
        let mut runs_of_phase: BTreeMap<&String, f64> = BTreeMap::new();
        for phase in &kind.phases {
            *runs_of_phase.entry(phase).or_default() += 1.0;
        }
        for (phase, runs) in runs_of_phase {
            let estimate = estimate_call(&bundle, phase, std::slice::from_ref(phase), machine, true);
            let estimate = estimate.map_err(|d| *d)?;
            total_ns += runs * estimate.ns;
            exposed_ns += runs * estimate.exposed_ns();
            self.add_classes((phase, runs), &estimate, &mut classes);
        }
        classes.push(ClassComparison {
            class: LEADER_CLASS.to_string(),
            estimated_ns: Some(LEADER_NS),
            ..ClassComparison::default()
        });
        Ok(CallComparison {
            estimated_ns: Some(total_ns),
            estimated_exposed_ns: Some(exposed_ns),
            classes,
            ..kind
        })
    }

    /// Adds the estimated times of some runs of a phase by class of op, as means over ranks.
    fn add_classes(
        &self,
        (phase, runs): (&str, f64),
        estimate: &CallEstimate,
        classes: &mut Vec<ClassComparison>,
    ) {
        let mesh = self.sealed.mesh();
        let ranks: Vec<Rank> = mesh.inner_ranks().collect();
        for rank in &ranks {
            let Some(program) = self.sealed.rank_program(phase, *rank) else { continue };
            let op_ns = estimate.op_times_ns(*rank, program.ops.len());
            for row in compare_by_class(program, &[], Some(&op_ns)) {
                let own = runs * row.estimated_ns.unwrap_or(0.0) / ranks.len() as f64;
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
    }
}
