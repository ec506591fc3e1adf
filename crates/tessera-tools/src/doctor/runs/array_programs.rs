//! Examines plans of array programs, of which no estimate knows a cheaper mapping.

use tessera::arrays::ArrayPlan;
use tessera_base::Bytes;
use tessera_cost::MachineModel;
use tessera_plan::search::mitigation::{FailureMode, Symptoms};

use super::exposed::add_exposed_observation;
use super::{PlanWithRuns, add_fp8_observation, congestion_sign, count_drifted, memory_sign};
use crate::doctor::DoctorReport;

/// Examines a plan of array programs, or the records of its runs.
pub(super) fn examine_array_plan(
    patient: &PlanWithRuns,
    plan: &ArrayPlan,
    machine: &MachineModel,
    machine_known: bool,
) -> DoctorReport {
    let mut out = DoctorReport {
        title: format!("{} (array programs over {})", patient.name, plan.mapping.mesh),
        ..DoctorReport::default()
    };
    out.add_machine_observation(machine, machine_known);
    out.not_recorded
        .push("estimate of the plan: the search covers models, and no array programs".to_string());
    let sealed = &plan.sealed;
    let bytes = sealed.mesh().iter().filter_map(|rank| Some(sealed.rank_memory(rank)?.total_bytes().0));
    let peak = bytes.max().unwrap_or(0);
    let capacity = machine.cluster.device.memory_bytes.value;
    let memory = format!("{} of {} on the fullest rank", Bytes(peak), Bytes(capacity as u64));
    out.add_observation("memory", memory);
    add_fp8_observation(sealed, &mut out);
    let (exposed, drifted) = match patient.runs.is_empty() {
        true => (None, None),
        false => (add_exposed_observation(patient, &mut out), count_drifted(&patient.runs, &mut out)),
    };
    let signs = Symptoms {
        a2a_share: exposed.as_ref().map(|open| open.share),
        peak_bytes: Some(peak as f64),
        capacity_bytes: Some(capacity),
        drifted,
        ..Symptoms::default()
    };
    let before = || "no estimate".to_string();
    if let Some(sign) = congestion_sign(&signs, exposed.map(|open| open.op)) {
        out.add_finding(FailureMode::Congestion, sign, before(), Vec::new());
    }
    if let Some(sign) = memory_sign(&signs) {
        out.add_finding(FailureMode::Memory, sign, before(), Vec::new());
    }
    if let Some(n) = drifted.filter(|n| *n > 0) {
        let sign = format!("{n} of {} runs drifted or have another golden hash", patient.runs.len());
        out.add_finding(FailureMode::Drift, sign, before(), Vec::new());
    }
    out
}
