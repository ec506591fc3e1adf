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
    let flights = flights(folder, plan.sealed.mesh().ranks());
    Ok(Opened { plan, record, flights })
}

/// The flight records of a run's ranks, of those that left one.
pub(crate) fn flights(folder: &Path, ranks: u32) -> Vec<Flight> {
    let read = |rank: u32| {
        let path = folder.join(FLIGHT).join(format!("rank-{rank}.jsonl"));
        let length = std::fs::metadata(&path).ok()?.len();
        let bytes = (length <= MAX_FILE_BYTES).then(|| std::fs::read(&path).ok())??;
        Flight::parse(&path.display().to_string(), &bytes).ok()
    };
    (0..ranks).filter_map(read).collect()
}
