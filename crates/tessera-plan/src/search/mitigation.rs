//! Diagnoses plans: detects four failure modes of a mapping, from an estimate or from the
//! measurements of a run, and offers the mitigations of the mapping guide, each with predicted
//! numbers.
//!
//! A mitigation that changes the plan is estimated like any other candidate. A mitigation that only
//! changes how the same plan is executed is costed by what it adds: bytes on the same links, passes
//! over the same memory. A mitigation that is free in this model states so.

mod planner;

use std::fmt::Write as _;

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_cost::MachineModel;
use tessera_mesh::MemoryTier;

use super::{Candidate, RankedCandidate, SearchQuery, estimate_candidate};
use crate::codes::{T1225, T1226, T1227, T1228};
use planner::MitigationPlanner;

/// A way in which a mapping fails, with a diagnostic code and mitigations of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FailureMode {
    /// Dispatch and combine are exposed for a large share of the step, or reach too little of the
    /// links' bandwidth.
    Congestion,
    /// Not enough device memory.
    Memory,
    /// Infinities or NaN while matmuls or messages use fp8.
    Fp8,
    /// Results that differ between reruns.
    Drift,
}

impl FailureMode {
    /// Returns the diagnostic code of the failure mode, T1225 to T1228.
    #[must_use]
    pub fn code(self) -> &'static Code {
        match self {
            FailureMode::Congestion => &T1225,
            FailureMode::Memory => &T1226,
            FailureMode::Fp8 => &T1227,
            FailureMode::Drift => &T1228,
        }
    }
}

/// The symptoms that a plan or a run shows. `None` means unknown.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Symptoms {
    /// Exposed dispatch and combine, as a share of the step.
    pub a2a_share: Option<f64>,
    /// Bandwidth of dispatch and combine in bursts, as a share of the links' peak.
    pub a2a_rate: Option<f64>,
    /// Device-memory bytes of the peak rank: estimated, planned or measured.
    pub peak_bytes: Option<f64>,
    /// Memory of one device in bytes.
    pub capacity_bytes: Option<f64>,
    /// Infinities or NaN counted while fp8 was in use.
    pub overflows: Option<u64>,
    /// Reruns, calls or ranks whose digest differs from the first.
    pub drifted: Option<u64>,
}

impl Symptoms {
    /// Derives the A2A share and the memory from an estimate; the other symptoms stay unknown.
    #[must_use]
    pub fn from_metrics(q: &SearchQuery, n: &CandidateMetrics) -> Symptoms {
        Symptoms {
            a2a_share: Some(n.a2a_ns / n.step_ns),
            peak_bytes: Some(n.peak_bytes),
            capacity_bytes: Some(q.machine.cluster.device.memory_bytes.value),
            ..Symptoms::default()
        }
    }
}

/// The thresholds at which a failure mode is diagnosed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SymptomThresholds {
    /// Maximum exposed share of the step for dispatch and combine. 0.2 is what Megatron-Core
    /// reports for DeepSeek-V3 inside one rack before any overlap.
    pub a2a_share: f64,
    /// Minimum share of the links' bandwidth in bursts: the guide's gate.
    pub a2a_rate: f64,
}

impl Default for SymptomThresholds {
    fn default() -> SymptomThresholds {
        SymptomThresholds { a2a_share: 0.2, a2a_rate: 0.8 }
    }
}

/// The key metrics of a candidate, whether it fits or not.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateMetrics {
    /// Time of one step in nanoseconds: a training step, a prefill, or the decode of one token per
    /// sequence.
    pub step_ns: f64,
    /// Exposed dispatch and combine in nanoseconds.
    pub a2a_ns: f64,
    /// Device-memory bytes of the peak rank.
    pub peak_bytes: f64,
    /// Share of the expert assignments that are dropped.
    pub dropped: f64,
    /// Whether the peak fits in device memory.
    pub fits: bool,
}

impl CandidateMetrics {
    /// Estimates a candidate, even if its memory does not fit.
    ///
    /// # Errors
    /// Every other reason why it cannot run.
    pub fn estimate(q: &SearchQuery, c: &Candidate) -> Result<CandidateMetrics, Diagnostics> {
        match estimate_candidate(q, c) {
            Ok(r) => Ok(CandidateMetrics::from_ranked(q, &r)),
            Err(_) => {
                let mut roomy = q.clone();
                let cluster = &mut roomy.machine.cluster;
                cluster.device.memory_bytes.value *= 1e4;
                roomy.machine = MachineModel::new(cluster.clone(), q.machine.profile.clone());
                estimate_candidate(&roomy, c).map(|r| CandidateMetrics::from_ranked(q, &r))
            }
        }
    }

    fn from_ranked(q: &SearchQuery, r: &RankedCandidate) -> CandidateMetrics {
        let bytes = &r.estimate.budget.bytes;
        let peak =
            bytes.iter().filter(|((tier, _), _)| *tier == MemoryTier::Hbm).map(|(_, b)| b.0 as f64).sum();
        CandidateMetrics {
            step_ns: r.estimate.step_ns,
            a2a_ns: r.estimate.times.ep_ns,
            peak_bytes: peak,
            dropped: r.dropped_share,
            fits: peak <= q.machine.cluster.device.memory_bytes.value,
        }
    }

    /// Interpolates linearly: `at` = 0 gives `self`, 1 gives `other`.
    fn interpolate(self, other: CandidateMetrics, at: f64) -> CandidateMetrics {
        let mix = |a: f64, b: f64| a + (b - a) * at;
        CandidateMetrics {
            step_ns: mix(self.step_ns, other.step_ns),
            a2a_ns: mix(self.a2a_ns, other.a2a_ns),
            peak_bytes: mix(self.peak_bytes, other.peak_bytes),
            dropped: mix(self.dropped, other.dropped),
            fits: self.fits,
        }
    }

    fn with_added_ns(self, ns: f64) -> CandidateMetrics {
        CandidateMetrics { step_ns: self.step_ns + ns, ..self }
    }
}

/// A failure mode that the symptoms indicate, with the predicted effect of each mitigation.
#[derive(Debug, Clone, PartialEq)]
pub struct Diagnosis {
    /// Which failure mode the symptoms indicate; it selects the code and the mitigations.
    pub mode: FailureMode,
    /// One sentence with the number that shows the failure mode and, if there is one, its
    /// threshold.
    pub symptom: String,
    /// The metrics of the candidate as it is.
    pub current: CandidateMetrics,
    /// The mitigations, in the guide's order.
    pub mitigations: Vec<MappingMitigation>,
}

/// A mitigation with its predicted effect.
#[derive(Debug, Clone, PartialEq)]
pub struct MappingMitigation {
    /// The action, in the guide's words.
    pub action: &'static str,
    /// The action in this case, and how its numbers were derived.
    pub details: String,
    /// The predicted metrics; `None` if the mitigation does not apply or cannot run, as `details`
    /// explains.
    pub predicted: Option<CandidateMetrics>,
}

impl MappingMitigation {
    fn new(
        action: &'static str,
        details: impl Into<String>,
        predicted: Option<CandidateMetrics>,
    ) -> MappingMitigation {
        MappingMitigation { action, details: details.into(), predicted }
    }
}

impl Diagnosis {
    /// Returns a warning with the symptom, and a note for each mitigation with its numbers.
    #[must_use]
    pub fn to_diagnostic(&self, plan: &str) -> Diagnostic {
        let mut d = Diagnostic::warning(self.mode.code(), self.symptom.clone())
            .with_label(plan, self.format_metrics(&self.current));
        for r in &self.mitigations {
            d = d.with_note(match &r.predicted {
                Some(n) => {
                    let (step, metrics) = (self.compare_step(n), self.format_metrics(n));
                    format!("{}: {}; {metrics}: {step}", r.action, r.details)
                }
                None => format!("{}: {}", r.action, r.details),
            });
        }
        d
    }

    /// Compares the step under a mitigation with the step as it is, in words and per cent.
    #[must_use]
    pub fn compare_step(&self, after: &CandidateMetrics) -> String {
        let (new, old) = (after.step_ns / 1e6, self.current.step_ns / 1e6);
        let change = 100.0 * (new / old - 1.0);
        match change {
            c if c.abs() < 0.05 => format!("the step stays {old:.2} ms"),
            c if c > 0.0 => format!("the step takes {new:.2} ms instead of {old:.2} ms, {c:.1} % longer"),
            c => format!("the step takes {new:.2} ms instead of {old:.2} ms, {:.1} % shorter", -c),
        }
    }

    fn format_metrics(&self, n: &CandidateMetrics) -> String {
        let mut s = format!("step {:.2} ms", n.step_ns / 1e6);
        if self.mode == FailureMode::Congestion {
            let _ = write!(s, ", exchange {:.2} ms ({:.0} %)", n.a2a_ns / 1e6, 100.0 * n.a2a_ns / n.step_ns);
            let _ = write!(s, ", {:.1} % dropped", 100.0 * n.dropped);
        }
        let _ = write!(
            s,
            ", peak {:.1} GB{}",
            n.peak_bytes / 1e9,
            if n.fits { "" } else { ", which does not fit" }
        );
        s
    }
}

/// Diagnoses every failure mode that the symptoms show, with estimated mitigations. Symptoms may
/// come from a run and from an estimate at once.
///
/// # Errors
/// The reasons why the candidate cannot run at all, memory aside.
pub fn diagnose(
    q: &SearchQuery,
    c: &Candidate,
    symptoms: &Symptoms,
    thresholds: &SymptomThresholds,
) -> Result<Vec<Diagnosis>, Diagnostics> {
    let planner = MitigationPlanner { q, c, current: CandidateMetrics::estimate(q, c)? };
    let mut found = Vec::new();
    let mut add = |mode, symptom: String, mitigations| {
        found.push(Diagnosis { mode, symptom, current: planner.current, mitigations });
    };
    let slow = symptoms.a2a_rate.filter(|r| *r < thresholds.a2a_rate);
    match (symptoms.a2a_share.filter(|s| *s > thresholds.a2a_share), slow) {
        (Some(share), _) => {
            let (share, most) = (100.0 * share, 100.0 * thresholds.a2a_share);
            let sign =
                format!("dispatch and combine are exposed for {share:.0} % of the step, above {most:.0} %");
            add(FailureMode::Congestion, sign, planner.for_congestion());
        }
        (None, Some(rate)) => {
            let (rate, least) = (100.0 * rate, 100.0 * thresholds.a2a_rate);
            let sign = format!(
                "dispatch and combine reach {rate:.0} % of the link bandwidth in bursts, below {least:.0} %"
            );
            add(FailureMode::Congestion, sign, planner.for_congestion());
        }
        _ => {}
    }
    if let (Some(peak), Some(capacity)) = (symptoms.peak_bytes, symptoms.capacity_bytes)
        && peak > capacity
    {
        let sign = format!("the peak rank needs {:.1} GB, the device has {:.1}", peak / 1e9, capacity / 1e9);
        add(FailureMode::Memory, sign, planner.for_memory());
    }
    if let Some(n) = symptoms.overflows.filter(|n| *n > 0) {
        add(FailureMode::Fp8, format!("{n} infinities or NaN while fp8 was in use"), planner.for_fp8());
    }
    if let Some(n) = symptoms.drifted.filter(|n| *n > 0) {
        add(FailureMode::Drift, format!("{n} digests differ from the first"), planner.for_drift());
    }
    Ok(found)
}
