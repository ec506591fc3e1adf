//! The folder of a run, opened for whoever asks what it shows: its record, its plan judged anew, its flight records.

use std::path::Path;

use tessera_report::flight::Flight;
use tessera_report::record::Record;

use crate::flight::{FLIGHT, MAX_FILE_BYTES};
use crate::plan::Plan;
use crate::record::RECORD;
use crate::stream;

/// A run.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) plan: Plan,
    pub(crate) record: Record,
    /// Of the ranks that left one.
    pub(crate) flights: Vec<Flight>,
}

/// Opens a run's folder.
///
/// # Errors
/// What is missing or cannot be used, in words.
pub(crate) fn open(folder: &Path) -> Result<Opened, String> {
    let record = stream::read(&folder.join(RECORD))
        .ok_or_else(|| format!("no {RECORD}"))?
        .map_err(|d| format!("{RECORD}: {}", d.message))?;
    let plan = Plan::read(&folder.join("plan"))
        .map_err(|ds| ds.first().map_or("no plan".to_string(), |d| format!("plan: {}", d.message)))?;
    let flights = (0..plan.sealed.mesh().ranks())
        .filter_map(|rank| {
            let path = folder.join(FLIGHT).join(format!("rank-{rank}.jsonl"));
            let length = std::fs::metadata(&path).ok()?.len();
            let bytes = (length <= MAX_FILE_BYTES).then(|| std::fs::read(&path).ok())??;
            Flight::parse(&path.display().to_string(), &bytes).ok()
        })
        .collect();
    Ok(Opened { plan, record, flights })
}
