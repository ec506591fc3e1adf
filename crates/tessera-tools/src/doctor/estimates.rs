//! Examines estimates from op rows: recipes, models of the zoo, and folders that contain a query.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_estimate::{LanguageQuery, question_and_title};
use tessera_plan::search::mitigation::{
    CandidateMetrics, Diagnosis, FailureMode, SymptomThresholds, Symptoms, diagnose,
};
use tessera_plan::search::{Candidate, Pins, Reason, SearchOutcome, SearchQuery, search};

use super::{DoctorReport, FailureFinding, Mitigation, ReportedSigns};
use crate::codes::T0052;

/// Examines the best mapping that a question allows. If only memory rules out every
/// mapping, examines one of those.
///
/// # Errors
/// Diagnostics of the query, and T0052.
pub fn examine_estimate(asked: &LanguageQuery, shown: &ReportedSigns) -> Result<DoctorReport, Diagnostics> {
    let (q, title) = question_and_title(asked)?;
    let outcome = search(&q);
    let candidate = choose_candidate(&q, &outcome)?;
    let numbers = CandidateMetrics::estimate(&q, &candidate)?;
    let estimated = Symptoms::from_metrics(&q, &numbers);
    let signs = Symptoms {
        a2a_rate: shown.a2a_rate,
        peak_bytes: shown.peak_bytes.or(estimated.peak_bytes),
        overflows: shown.overflows,
        drifted: shown.drifted,
        ..estimated
    };
    let found = diagnose(&q, &candidate, &signs, &SymptomThresholds::default())?;
    let or_zero = |x: Option<f64>| x.unwrap_or(0.0);
    let mut seen = vec![
        ("mapping".to_string(), Pins::from_candidate(&candidate).to_text()),
        ("estimate".to_string(), format_numbers(&numbers)),
        (
            "exchange of experts".to_string(),
            format!("{:.1} % of the step is exposed", or_zero(estimated.a2a_share) * 100.0),
        ),
        (
            "memory".to_string(),
            format!(
                "{:.1} GB of {:.1} on the fullest rank{}",
                or_zero(signs.peak_bytes) / 1e9,
                or_zero(signs.capacity_bytes) / 1e9,
                if shown.peak_bytes.is_some() { ", as given" } else { "" }
            ),
        ),
    ];
    let mut unknown = Vec::new();
    let mut add = |known: Option<String>, name: &str, absent: &str| match known {
        Some(value) => seen.push((name.to_string(), value)),
        None => unknown.push(format!("{name}: {absent}")),
    };
    let rate = shown.a2a_rate.map(|r| format!("{:.0} % of the links' peak, as given", r * 100.0));
    if q.work.routed_experts().is_some() {
        add(
            rate,
            "bandwidth of the exchange in bursts",
            "only a run measures it; give it with --a2a-rate SHARE",
        );
    }
    let count = |n: Option<u64>| n.map(|n| format!("{n}, as given"));
    add(
        count(shown.overflows),
        "infinities and NaN under fp8",
        "only a run measures them; give their number with --overflows N",
    );
    add(
        count(shown.drifted),
        "reruns that differ",
        "only runs show them; give their number with --drifted N",
    );
    Ok(DoctorReport {
        title,
        observations: seen,
        failures: found.iter().map(FailureFinding::from_finding).collect(),
        not_recorded: unknown,
    })
}

/// Returns the best mapping, or else an example of those that memory rules out; T0052 if there is
/// none.
fn choose_candidate(q: &SearchQuery, outcome: &SearchOutcome) -> Result<Candidate, Diagnostics> {
    if let Some(best) = outcome.best_candidates.first() {
        return Ok(best.candidate);
    }
    if let Some(full) = outcome.rejected.get(&Reason::Memory) {
        return Ok(full.example);
    }
    let mut d =
        Diagnostic::error(&T0052, format!("none of the {} mappings can run", outcome.candidate_count))
            .with_label(
                q.work.name.clone(),
                format!("{} devices of {}", q.space.devices, q.machine.cluster.title),
            );
    for (reason, r) in &outcome.rejected {
        d = d.with_note(format!(
            "{} ({}): {} mappings, for example {}",
            reason.title(),
            reason.code().id,
            r.count,
            r.explanation
        ));
    }
    Err(vec![d.with_hint("tessera plan --why shows the legal neighbours")])
}

impl FailureFinding {
    fn from_finding(f: &Diagnosis) -> FailureFinding {
        FailureFinding {
            code: f.mode.code(),
            sign: f.symptom.clone(),
            before: format_numbers(&f.current),
            mitigations: f
                .mitigations
                .iter()
                .map(|r| Mitigation {
                    action: r.action.to_string(),
                    how: r.details.clone(),
                    after: r.predicted.map(|n| compare_numbers(f, &n)),
                })
                .collect(),
        }
    }
}

fn format_numbers(n: &CandidateMetrics) -> String {
    format!(
        "step {:.2} ms, expert exchange {:.2} ms, {:.1} % dropped, peak {:.1} GB{}",
        n.step_ns / 1e6,
        n.a2a_ns / 1e6,
        n.dropped * 100.0,
        n.peak_bytes / 1e9,
        if n.fits { "" } else { ", which does not fit" }
    )
}

/// Formats the new numbers, whether the number that shows the failure mode improved, and what the
/// mitigation costs in step time.
fn compare_numbers(f: &Diagnosis, after: &CandidateMetrics) -> String {
    let relevant_number = |n: &CandidateMetrics| match f.mode {
        FailureMode::Congestion => Some(n.a2a_ns),
        FailureMode::Memory => Some(n.peak_bytes),
        FailureMode::Fp8 | FailureMode::Drift => None,
    };
    let helps = match (relevant_number(after), relevant_number(&f.current)) {
        (Some(a), Some(b)) if a < b => ": helps",
        (Some(a), Some(b)) if a > b => ": makes it worse",
        (Some(_), Some(_)) => ": changes nothing",
        _ => "",
    };
    format!("{}{helps}; {}", format_numbers(after), f.compare_step(after))
}
