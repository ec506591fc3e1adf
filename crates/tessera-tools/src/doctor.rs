//! Diagnoses plans and runs: describes this machine, recognises four failure modes in a plan or a
//! run, and estimates the effect of each mitigation. The report lists data that was not recorded
//! instead of guessing it.

mod estimates;
mod runs;

pub use estimates::examine_estimate;
pub use runs::{PlanWithRuns, examine_plan, open_folders};

use std::path::Path;

use tessera::cuda::readiness_line;
use tessera::gpus::GpuDiscovery;
use tessera::record::RECORD_FILE;
use tessera_base::{Code, Diagnostic};
use tessera_cost::Profile;
use tessera_cpu::kernels::vector_unit;
use tessera_estimate::codes::T0051;
use tessera_mesh::catalog;
use tessera_models::zoo;
use tessera_plan::search::mitigation::FailureMode;
use tessera_plan::search::recipe;

use crate::compile_traces::find_compile_traces;
use crate::measure::Host;

/// What a folder contains for the doctor, detected by the presence of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FolderKind {
    /// A run directory of `tessera stream`: the folder holds `record.jsonl`.
    Run,
    /// A sealed plan: the folder holds `seal.json` and no record of a run.
    Plan,
    /// An estimate from op rows: the folder holds `estimate.json` and neither a seal nor a record.
    Estimate,
    /// Compile traces of a PyTorch run: the folder holds `dedicated_log_torch_trace_*.log`.
    CompileTraces,
}

impl FolderKind {
    /// Detects the kind by the file that each variant names.
    ///
    /// # Errors
    /// T0051; T1425 if compile traces lie beside something else.
    pub fn from_folder(folder: &Path) -> Result<FolderKind, Diagnostic> {
        let has = |name: &str| folder.join(name).is_file();
        if find_compile_traces(folder)?.is_some() {
            Ok(FolderKind::CompileTraces)
        } else if has(RECORD_FILE) {
            Ok(FolderKind::Run)
        } else if has("seal.json") {
            Ok(FolderKind::Plan)
        } else if has("estimate.json") {
            Ok(FolderKind::Estimate)
        } else {
            Err(Diagnostic::error(&T0051, format!("{} contains nothing to examine", folder.display()))
                .with_label(
                    folder.display().to_string(),
                    format!("no {RECORD_FILE}, no seal.json, no estimate.json, no dedicated_log_torch_trace_*.log"),
                )
                .with_hint(
                    "name a folder that `tessera stream --out` or `tessera plan --out` wrote, or the folder of \
                     TORCH_TRACE",
                ))
        }
    }
}

/// Signs of a failure mode that a user saw in a run on another machine; `None` means unknown.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ReportedSigns {
    /// Burst bandwidth of the expert exchange, as a share of the links' peak.
    pub a2a_rate: Option<f64>,
    /// Maximum number of bytes used on one device.
    pub peak_bytes: Option<f64>,
    /// Infinities or NaN counted while fp8 was in use.
    pub overflows: Option<u64>,
    /// Number of reruns whose digest differs from the first run's.
    pub drifted: Option<u64>,
}

impl ReportedSigns {
    /// Returns whether the user reported any sign. Without signs or a model the doctor describes
    /// the machine.
    #[must_use]
    pub fn is_any_given(&self) -> bool {
        *self != ReportedSigns::default()
    }
}

/// A failure mode whose sign the doctor found, with the changes that may remove it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailureFinding {
    /// Code whose page describes the mode.
    pub code: &'static Code,
    /// The sign with its value and, where one exists, the limit for that value.
    pub sign: String,
    /// The estimate of the plan before any change.
    pub before: String,
    /// Changes that may remove the failure mode, each with a new estimate where one exists.
    pub mitigations: Vec<Mitigation>,
}

/// A change of the plan that may remove a failure mode, with its estimated effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mitigation {
    /// The mitigation in a few words, such as `use smaller tp groups`.
    pub action: String,
    /// The change of this plan, such as `tp=4, pp=2 instead of tp=8, pp=1`, or why it is
    /// impossible.
    pub how: String,
    /// The new estimate; `None` if the mitigation is impossible or changes no number.
    pub after: Option<String>,
}

/// What the doctor found in one plan, one estimate or a set of runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DoctorReport {
    /// Title of the examined plan or run.
    pub title: String,
    /// Observations as pairs of name and text.
    pub observations: Vec<(String, String)>,
    /// Failure modes whose signs the examination found.
    pub failures: Vec<FailureFinding>,
    /// Signs that are unknown, with the reason.
    pub not_recorded: Vec<String>,
}

/// The four failure modes, in display order.
pub const FAILURE_MODES: [FailureMode; 4] =
    [FailureMode::Congestion, FailureMode::Memory, FailureMode::Fp8, FailureMode::Drift];

/// Describes this machine and this build as pairs of name and text.
#[must_use]
pub fn describe_machine() -> Vec<(String, String)> {
    let host = Host::detect_host();
    let list = |names: Vec<&str>| names.join(", ");
    let memory = host
        .memory_bytes
        .map_or("not reported by the operating system".to_string(), |b| format!("{:.1} GB", b as f64 / 1e9));
    let fact = |name: &str, text: String| (name.to_string(), text);
    let mut out = vec![
        fact("processor", host.cpu),
        fact("cores", host.cores.to_string()),
        fact("memory", memory),
        fact("kernels", format!("{}, bit-identical on every vector unit", vector_unit())),
    ];
    let gpus = GpuDiscovery::discover();
    out.extend(gpus.to_rows());
    out.push(fact("--device cuda", readiness_line(&gpus)));
    let (version, arch, os) = (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH, std::env::consts::OS);
    out.extend([
        fact("tessera", format!("{version} for {arch} on {os}")),
        fact("clusters", list(catalog::cluster_names().collect())),
        fact("profiles", list(Profile::builtin_names().collect())),
        fact("models", list(zoo::model_names().into_iter().collect())),
        fact("recipes", list(recipe::recipe_names())),
    ]);
    out
}
