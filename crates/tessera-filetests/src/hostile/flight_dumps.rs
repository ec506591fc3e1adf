//! Arbitrary bytes as the Flight Recorder dumps of a PyTorch run.

use std::collections::BTreeMap;

use tessera_torch::flight::{FaultKind, FlightDump, examine_dumps, read_dump};

use super::check_renders;

/// Reads the bytes as the dump of rank 0, or as those of ranks 0 and 1 where one dump follows another. A
/// dump beside a copy of itself must not differ from it.
pub(super) fn check_dumps(bytes: &[u8]) {
    let is_border = |pair: &[u8]| pair == b".\x80" || pair == b"}{";
    let border = bytes.windows(2).position(is_border).map_or(bytes.len(), |at| at + 1);
    let (first, second) = bytes.split_at(border);
    let dumps: Vec<FlightDump> = [first, second].into_iter().zip(0..).filter_map(read).collect();
    examine(dumps.iter());
    for dump in &dumps {
        let mut copies = [dump.clone(), dump.clone(), dump.clone()];
        for (copy, rank) in copies.iter_mut().zip(0..) {
            copy.rank = rank;
            // A copy of a send is a send to the same peer, and no receive.
            copy.entries.retain(|e| !e.is_p2p);
        }
        let kinds = examine(copies.iter());
        assert!(kinds.iter().all(|kind| *kind == FaultKind::NoDump), "a dump differs from itself: {kinds:?}");
    }
}

fn read((bytes, rank): (&[u8], u32)) -> Option<FlightDump> {
    let read = read_dump("dump", rank, bytes);
    read.map_err(|d| check_renders(&[d], "")).ok()
}

/// Examines dumps, formats the report, and returns the kinds of its findings.
fn examine<'a>(dumps: impl Iterator<Item = &'a FlightDump>) -> Vec<FaultKind> {
    let dumps: BTreeMap<u32, FlightDump> = dumps.map(|d| (d.rank, d.clone())).collect();
    let report = examine_dumps(&dumps);
    assert!(!report.to_text("dumps").is_empty() && report.to_json().is_object());
    report.findings.iter().map(|f| f.kind).collect()
}
