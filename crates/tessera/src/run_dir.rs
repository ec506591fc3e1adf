//! The run directory as the analysis commands read it: its record, its plan (verified again) and
//! its flight records.

use std::path::Path;

use tessera_report::flight::FlightLog;
use tessera_report::record::RunRecord;

use crate::flight::{FLIGHT_DIR, MAX_FLIGHT_BYTES};
use crate::plan::Plan;
use crate::record::RECORD_FILE;
use crate::stream;

/// The contents of a run directory.
#[derive(Debug)]
pub(crate) struct RunDir {
    pub(crate) plan: Plan,
    pub(crate) record: RunRecord,
    /// Flight records of the ranks that wrote one.
    pub(crate) flight_records: Vec<FlightLog>,
}

/// Opens a run directory.
///
/// # Errors
/// Returns a message that states what is missing or unusable.
pub(crate) fn open_run_dir(folder: &Path) -> Result<RunDir, String> {
    let record = stream::read_record(&folder.join(RECORD_FILE))
        .ok_or_else(|| format!("no {RECORD_FILE}"))?
        .map_err(|d| format!("{RECORD_FILE}: {}", d.message))?;
    let plan = Plan::read(&folder.join("plan"))
        .map_err(|ds| ds.first().map_or("no plan".to_string(), |d| format!("plan: {}", d.message)))?;
    let flights = read_flight_records(folder, plan.sealed.mesh().world_size());
    Ok(RunDir { plan, record, flight_records: flights })
}

/// Reads the flight records of a run's ranks and skips those that are missing or invalid.
pub(crate) fn read_flight_records(folder: &Path, ranks: u32) -> Vec<FlightLog> {
    let read = |rank: u32| {
        let path = folder.join(FLIGHT_DIR).join(format!("rank-{rank}.jsonl"));
        let length = std::fs::metadata(&path).ok()?.len();
        let bytes = (length <= MAX_FLIGHT_BYTES).then(|| std::fs::read(&path).ok())??;
        FlightLog::parse(&path.display().to_string(), &bytes).ok()
    };
    (0..ranks).filter_map(read).collect()
}
