//! Diagnoses plans and runs: describes this machine, recognises four failure modes in a plan or a
//! run, and estimates the effect of each mitigation. The report lists data that was not recorded
//! instead of guessing it.

mod estimates;
mod query_json;
mod runs;

pub use estimates::{examine_estimate, read_query};
pub use runs::{PlanWithRuns, examine_plan, open_folders};

pub(crate) use query_json::{machine_from_json, machine_to_json, query_to_json};

use std::path::Path;

use tessera_base::{Code, Diagnostic};
use tessera_cost::Profile;
use tessera_cpu::kernels::vector_unit;
use tessera_mesh::catalog;
use tessera_models::zoo;
use tessera_plan::search::mitigation::FailureMode;
use tessera_plan::search::recipe;

use crate::cuda::readiness_line;
use crate::gpus::GpuDiscovery;
use crate::measure::Host;
use crate::record::RECORD_FILE;

/// A folder that contains nothing to examine.
pub static T0051: Code = Code {
    id: "T0051",
    title: "folder contains nothing to examine",
    page: "The doctor examines three kinds of folders: a run folder of `tessera stream --out` with record.jsonl and the plan that ran, \
a sealed plan with seal.json, and a folder of `tessera plan --out` whose estimate.json contains the query. This folder is none of \
them, or its content cannot be read. An estimate.json of an older build does not contain the query: plan again.",
};
/// A plan that fails for other reasons than memory.
pub static T0052: Code = Code {
    id: "T0052",
    title: "plan cannot be estimated",
    page: "The doctor first estimates the unchanged plan. None of the mappings that the query allows can \
run, and memory is not the only reason: axes, heads, experts or batch do not fit. `tessera plan --why` shows the \
arithmetic and the legal neighbours. Examine the plan again once one of its mappings is legal.",
};
/// Folders that cannot be examined together.
pub static T0053: Code = Code {
    id: "T0053",
    title: "folders cannot be examined together",
    page: "The doctor compares several runs with each other, so all of them must be folders of `tessera stream --out`. Examine a plan or an \
estimate separately. --overflows and the other signs describe a run elsewhere, and apply to a recipe, a \
model or an estimate.",
};

/// The kind of a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FolderKind {
    /// A folder of a run.
    Run,
    /// A folder of a sealed plan.
    Plan,
    /// An estimate from op rows.
    Estimate,
}

impl FolderKind {
    /// Detects the kind of a folder.
    ///
    /// # Errors
    /// T0051.
    pub fn from_folder(folder: &Path) -> Result<FolderKind, Diagnostic> {
        let has = |name: &str| folder.join(name).is_file();
        if has(RECORD_FILE) {
            Ok(FolderKind::Run)
        } else if has("seal.json") {
            Ok(FolderKind::Plan)
        } else if has("estimate.json") {
            Ok(FolderKind::Estimate)
        } else {
            Err(Diagnostic::error(&T0051, format!("{} contains nothing to examine", folder.display()))
                .with_label(
                    folder.display().to_string(),
                    format!("no {RECORD_FILE}, no seal.json, no estimate.json"),
                )
                .with_hint("name a folder that `tessera stream --out` or `tessera plan --out` wrote"))
        }
    }
}

/// Signs observed in a run elsewhere; `None` means unknown.
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
    /// Returns whether any sign is given.
    #[must_use]
    pub fn is_any_given(&self) -> bool {
        *self != ReportedSigns::default()
    }
}

/// A recognised failure mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailureFinding {
    /// Code whose page describes the mode.
    pub code: &'static Code,
    /// The sign with its numbers.
    pub sign: String,
    /// The estimate of the plan before any change.
    pub before: String,
    /// Changes that may remove the failure mode, each with a new estimate where one exists.
    pub mitigations: Vec<Mitigation>,
}

/// A change of the plan that may remove a failure mode, with its estimated effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mitigation {
    /// Name of the mitigation.
    pub action: String,
    /// How it applies to this plan.
    pub how: String,
    /// The new estimate; `None` if the mitigation is impossible or changes no number.
    pub after: Option<String>,
}

/// The result of an examination.
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
