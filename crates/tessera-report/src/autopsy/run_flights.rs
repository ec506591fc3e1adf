//! The flight records of the run under examination, among those of a folder.

use std::collections::BTreeMap;

use super::AutopsyEvidence;
use crate::flight::{FlightHeader, FlightLog};

/// Maximum number of ranks; a header with a larger number is damaged.
const MAX_RANKS: u32 = 65_536;

/// Selects the flight records of this run, by rank. The run is the session whose plan the run
/// record names, or else the session with the most files.
pub(super) fn select_run_flights<'a>(
    evidence: &'a AutopsyEvidence,
    notes: &mut Vec<String>,
) -> BTreeMap<u32, &'a FlightLog> {
    let mut sessions: BTreeMap<&str, (bool, usize, u64)> = BTreeMap::new();
    let planned = |f: &FlightLog| evidence.record.as_ref().is_none_or(|r| r.start.plan == f.header.plan);
    let (whole, damaged): (Vec<&FlightLog>, Vec<&FlightLog>) =
        evidence.flight_records.iter().partition(|f| is_possible(&f.header));
    for f in damaged {
        let (rank, world) = (f.header.rank, f.header.world_size);
        notes.push(format!("a flight record names rank {rank} of {world}: it is damaged and left out"));
    }
    for f in &whole {
        let s = sessions.entry(&f.header.session).or_default();
        *s = (s.0 || planned(f), s.1 + 1, s.2.max(f.header.wall_ns));
    }
    let run = sessions.iter().max_by_key(|(_, weight)| **weight).map(|(s, _)| *s);
    let mut own: BTreeMap<u32, &FlightLog> = BTreeMap::new();
    for f in whole {
        let rank = f.header.rank;
        if Some(f.header.session.as_str()) != run {
            notes.push(format!(
                "a flight record of rank {rank} is of another run (session {})",
                f.header.session
            ));
        } else if own.get(&rank).is_some_and(|other| other.last_ns() >= f.last_ns()) {
            notes.push(format!("a second flight record of rank {rank} is older and left out"));
        } else {
            own.insert(rank, f);
        }
    }
    own
}

/// Returns whether a header's rank and number of ranks are plausible.
fn is_possible(header: &FlightHeader) -> bool {
    let (rank, world) = (header.rank, header.world_size);
    // A world of 0 means that the rank did not know the number of ranks.
    rank < MAX_RANKS && world <= MAX_RANKS && (world == 0 || rank < world)
}

/// Returns the number of ranks of the run, at most [`MAX_RANKS`].
pub(super) fn world_size(evidence: &AutopsyEvidence, flights: &BTreeMap<u32, &FlightLog>) -> u32 {
    let recorded = evidence.record.iter().flat_map(|r| &r.start.ranks).map(|r| r.rank.saturating_add(1));
    let said = flights.values().map(|f| f.header.world_size.max(f.header.rank.saturating_add(1)));
    recorded.filter(|n| *n <= MAX_RANKS).chain(said).max().unwrap_or(0).min(MAX_RANKS)
}
