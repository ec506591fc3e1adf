//! Examines the plans of language models, and estimates other meshes of the same ranks.

use tessera::Mapping;
use tessera::generate::LanguagePlan;
use tessera_base::{Bytes, Diagnostics};
use tessera_cost::MachineModel;
use tessera_mesh::{Axis, Mesh};
use tessera_plan::search::mitigation::{FailureMode, Symptoms};
use tessera_report::call_comparison::{CallComparison, EstimateComparison};

use super::exposed::add_exposed_observation;
use super::{PlanWithRuns, add_fp8_observation, congestion_sign, count_drifted, memory_sign};
use crate::doctor::{DoctorReport, Mitigation};

/// Examines a plan of a language model, or the records of its runs.
pub(super) fn examine_text_plan(
    patient: &PlanWithRuns,
    plan: &LanguagePlan,
    machine: &MachineModel,
    machine_known: bool,
) -> Result<DoctorReport, Diagnostics> {
    let mut out = DoctorReport {
        title: format!("{} (a language model over {})", patient.name, plan.mapping.mesh),
        ..DoctorReport::default()
    };
    out.add_machine_observation(machine, machine_known);
    let estimate = plan.estimate_calls(machine)?;
    let before = format_estimate(&estimate);
    out.add_observation("estimate", before.clone());
    let (share, dominant, drifted) = if patient.runs.is_empty() {
        let share = estimate.calls.last().and_then(exposed_share);
        if let Some(share) = share {
            out.add_observation("exposed collectives", format!("{:.1} % of a decoding step", share * 100.0));
        }
        out.not_recorded
            .push("results that differ between reruns: only runs show them; name run folders".to_string());
        (share, None, None)
    } else {
        let open = add_exposed_observation(patient, &mut out);
        (open.as_ref().map(|o| o.share), open.map(|o| o.op), count_drifted(&patient.runs, &mut out))
    };
    let (peak, capacity) = (fullest_rank_bytes(plan), machine.cluster.device.memory_bytes.value);
    let memory = format!("{} of {} on the fullest rank", Bytes(peak as u64), Bytes(capacity as u64));
    out.add_observation("memory", memory);
    add_fp8_observation(&plan.sealed, &mut out);
    let signs = Symptoms {
        a2a_share: share,
        peak_bytes: Some(peak),
        capacity_bytes: Some(capacity),
        drifted,
        ..Symptoms::default()
    };
    if let Some(sign) = congestion_sign(&signs, dominant) {
        let mitigations = vec![best_other_mesh(plan, machine, &estimate)];
        out.add_finding(FailureMode::Congestion, sign, before.clone(), mitigations);
    }
    if let Some(sign) = memory_sign(&signs) {
        out.add_finding(FailureMode::Memory, sign, before.clone(), memory_mitigations(plan, machine));
    }
    if let Some(n) = drifted.filter(|n| *n > 0) {
        let sign = format!("{n} of {} runs drifted or have another golden hash", patient.runs.len());
        let how = "every draw is keyed by seed and position, and every sum has one order, so the cause of the drift is a \
                   device, its memory or the loaded data; `tessera autopsy` names the rank";
        let find = Mitigation { action: "find the rank".to_string(), how: how.to_string(), after: None };
        out.add_finding(FailureMode::Drift, sign, before, vec![find]);
    }
    Ok(out)
}

fn exposed_share(call: &CallComparison) -> Option<f64> {
    Some(call.estimated_exposed_ns? / call.estimated_ns?.max(f64::MIN_POSITIVE))
}

/// Returns the estimated time of each kind of call, and the ids per second of decoding.
fn format_estimate(estimate: &EstimateComparison) -> String {
    let time = |call: &CallComparison| {
        let ms = call.estimated_ns.unwrap_or(0.0) / 1e6;
        format!("{} of {} rows {ms:.2} ms", call.name, call.rows)
    };
    let calls: Vec<String> = estimate.calls.iter().map(time).collect();
    let rate = estimate.calls.last().and_then(|call| Some(call.rows as f64 * 1e9 / call.estimated_ns?));
    format!("{}, {:.1} ids/s", calls.join(", "), rate.unwrap_or(0.0))
}

fn fullest_rank_bytes(plan: &LanguagePlan) -> f64 {
    let bytes = plan.sealed.mesh().iter().filter_map(|r| Some(plan.sealed.rank_memory(r)?.total_bytes().0));
    bytes.max().unwrap_or(0) as f64
}

/// Plans the model over another mesh, with everything else as it is; `None` if the model does not allow it.
fn plan_over(plan: &LanguagePlan, mesh: Mesh) -> Option<LanguagePlan> {
    let m = &plan.mapping;
    let other = Mapping {
        mesh,
        numerics: m.numerics,
        dtype: m.dtype,
        token_numerics: m.token_numerics,
        experts: m.experts.clone(),
        ..Mapping::default()
    };
    LanguagePlan::new(&plan.model, &other, plan.settings).ok()
}

/// Returns the meshes of as many ranks, without the plan's own.
fn other_meshes(plan: &LanguagePlan) -> Vec<Mesh> {
    let ranks = plan.sealed.mesh().world_size();
    let divisors = |n: u32| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let meshes = divisors(ranks).flat_map(|tp| divisors(ranks / tp).map(move |ep| (tp, ep, ranks / tp / ep)));
    let meshes = meshes.filter_map(|(tp, ep, pp)| format!("tp={tp},ep={ep},pp={pp}").parse::<Mesh>().ok());
    meshes.filter(|mesh| *mesh != plan.mapping.mesh).collect()
}

/// Proposes the best other mesh of the same ranks if its decoding step is estimated faster than `now`, and says so if
/// none is.
fn best_other_mesh(plan: &LanguagePlan, machine: &MachineModel, now: &EstimateComparison) -> Mitigation {
    let price = |mesh: Mesh| {
        let estimate = plan_over(plan, mesh)?.estimate_calls(machine).ok()?;
        let ns = estimate.calls.last()?.estimated_ns?;
        Some((ns, mesh, estimate))
    };
    let best = other_meshes(plan).into_iter().filter_map(price).min_by(|a, b| a.0.total_cmp(&b.0));
    let now_ns = now.calls.last().and_then(|call| call.estimated_ns);
    let (action, how) = match &best {
        Some((ns, mesh, _)) if now_ns.is_none_or(|now| *ns < now) => {
            ("use another mesh of the same ranks", format!("{mesh} instead of {}", plan.mapping.mesh))
        }
        Some((_, mesh, _)) => {
            ("keep the mesh", format!("{mesh}, the best other one of the same ranks, is no faster"))
        }
        None => ("keep the mesh", "the model supports no other one of the same ranks".to_string()),
    };
    let after = best.as_ref().map(|(.., estimate)| format_estimate(estimate));
    Mitigation { action: action.to_string(), how, after }
}

fn memory_mitigations(plan: &LanguagePlan, machine: &MachineModel) -> Vec<Mitigation> {
    let sizes = [Axis::Tp, Axis::Ep, Axis::Pp].map(|axis| plan.mapping.mesh.axis_size(axis));
    let double = |at: usize, action: &str| {
        let mut sizes = sizes;
        sizes[at] *= 2;
        let [tp, ep, pp] = sizes;
        let how = format!("tp={tp}, ep={ep}, pp={pp} on twice as many ranks");
        let planned = format!("tp={tp},ep={ep},pp={pp}").parse().ok().and_then(|mesh| plan_over(plan, mesh));
        let after = planned.as_ref().and_then(|other| {
            let memory = Bytes(fullest_rank_bytes(other) as u64);
            Some(format!(
                "{}, {memory} on the fullest rank",
                format_estimate(&other.estimate_calls(machine).ok()?)
            ))
        });
        let how =
            if after.is_some() { how } else { format!("{how}: the model does not support this mapping") };
        Mitigation { action: action.to_string(), how, after }
    };
    vec![double(0, "shard the weights over more ranks"), double(2, "use more stages")]
}
