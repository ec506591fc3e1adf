//! A run directory as the analysis commands read it: its record, its plan (verified again) and its flight records.

use std::path::Path;

use tessera_base::Diagnostics;
use tessera_plan::Mapping;
pub use tessera_report::call_comparison::EstimateComparison;
use tessera_report::flight::FlightLog;
use tessera_report::record::RunRecord;
use tessera_verify::{DeviceLimits, SealedPlan};

use crate::arrays::ArrayPlan;
use crate::generate::LanguagePlan;
use crate::plan::Plan;
use crate::record::RECORD_FILE;
use crate::run_dir::{read_flight_records, read_record};

/// The plan of a run, by the kind of its model.
#[derive(Debug)]
pub enum RunPlan {
    /// The plan of a video model.
    Video(Box<Plan>),
    /// The plan of a language model.
    Text(Box<LanguagePlan>),
    /// The plan of array programs.
    Arrays(Box<ArrayPlan>),
}

impl RunPlan {
    /// Reads a plan folder of any kind and verifies it again.
    ///
    /// # Errors
    /// T0011, T0012, or what the verifier rejects.
    pub fn read(dir: &Path) -> Result<RunPlan, Diagnostics> {
        RunPlan::read_with_limits(dir, &DeviceLimits::default())
    }

    /// Like [`RunPlan::read`], with the limits of the machine that will run the plan.
    ///
    /// # Errors
    /// T0011, T0012, or what the verifier rejects.
    pub fn read_with_limits(dir: &Path, limits: &DeviceLimits) -> Result<RunPlan, Diagnostics> {
        if LanguagePlan::is_in(dir) {
            return LanguagePlan::read_with_limits(dir, limits).map(|plan| RunPlan::Text(Box::new(plan)));
        }
        if ArrayPlan::is_in(dir) {
            return ArrayPlan::read_with_limits(dir, limits).map(|plan| RunPlan::Arrays(Box::new(plan)));
        }
        Plan::read_with_limits(dir, limits).map(|plan| RunPlan::Video(Box::new(plan)))
    }

    /// Returns the sealed programs.
    #[must_use]
    pub fn sealed(&self) -> &SealedPlan {
        match self {
            RunPlan::Video(plan) => &plan.sealed,
            RunPlan::Text(plan) => &plan.sealed,
            RunPlan::Arrays(plan) => &plan.sealed,
        }
    }

    /// Returns the mapping under which the plan was made.
    #[must_use]
    pub fn mapping(&self) -> &Mapping {
        match self {
            RunPlan::Video(plan) => &plan.mapping,
            RunPlan::Text(plan) => &plan.mapping,
            RunPlan::Arrays(plan) => &plan.mapping,
        }
    }
}

/// A run directory's sealed plan, record and flight records, read and parsed.
#[derive(Debug)]
pub struct RunDir {
    /// The plan that ran.
    pub plan: RunPlan,
    /// The record; of a long run it holds only the first and the last chunks.
    pub record: RunRecord,
    /// Flight records of the ranks that wrote one.
    pub flight_records: Vec<FlightLog>,
}

/// Opens a run directory.
///
/// # Errors
/// Returns a message that states what is missing or unusable.
pub fn open_run_dir(folder: &Path) -> Result<RunDir, String> {
    let record = read_record(&folder.join(RECORD_FILE))
        .ok_or_else(|| format!("no {RECORD_FILE}"))?
        .map_err(|d| format!("{RECORD_FILE}: {}", d.message))?;
    let plan = RunPlan::read(&folder.join("plan"))
        .map_err(|ds| ds.first().map_or("no plan".to_string(), |d| format!("plan: {}", d.message)))?;
    let flights = read_flight_records(folder, plan.sealed().mesh().world_size());
    Ok(RunDir { plan, record, flight_records: flights })
}
