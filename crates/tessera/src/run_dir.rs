//! The record and the flight records of a run directory.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use tessera_base::Diagnostic;
use tessera_report::flight::FlightLog;
use tessera_report::record::{RecordReader, RunRecord};

use crate::files::{open_regular_file, read_file};
use crate::flight::{FLIGHT_DIR, MAX_FLIGHT_BYTES};

/// Maximum number of chunks that the report and the trace of a run cover: the first and the last
/// chunks.
const KEPT_CHUNKS: usize = 1_000;
/// Maximum length of a record line in bytes; the ranks of the largest mesh take a tenth of it.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// Reads the flight records of a run's ranks and skips those that are missing or invalid.
pub fn read_flight_records(folder: &Path, ranks: u32) -> Vec<FlightLog> {
    let read = |rank: u32| {
        let path = folder.join(FLIGHT_DIR).join(format!("rank-{rank}.jsonl"));
        let bytes = read_file(&path, MAX_FLIGHT_BYTES).ok()?;
        FlightLog::parse(&path.display().to_string(), &bytes).ok()
    };
    (0..ranks).filter_map(read).collect()
}

/// Reads a run's record, or returns what is wrong with it; `None` if there is no such file. For a
/// long run only the first and the last chunks are kept, so that reading takes no more memory than
/// running.
pub fn read_record(path: &Path) -> Option<Result<RunRecord, Diagnostic>> {
    let mut file = BufReader::new(open_regular_file(path).ok()?);
    let mut reader = RecordReader::new(KEPT_CHUNKS);
    let mut line = Vec::new();
    loop {
        line.clear();
        if file.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line).ok()? == 0 {
            return Some(reader.into_record());
        }
        if let Err(d) = reader.push_line(&line) {
            return Some(Err(d));
        }
    }
}
