//! From the dumps of a run to the report.

use std::collections::{BTreeMap, BTreeSet};

use super::causes::{find_causes, find_device_causes};
use super::dump::{EntryState, FlightDump};
use super::findings::{FlightReport, RankWait, list_ranks};
use super::sequence::align_groups;
use super::transfer::Transfers;
use super::wait::Waits;

/// Finds the rank that departed first.
#[must_use]
pub fn examine_dumps(dumps: &BTreeMap<u32, FlightDump>) -> FlightReport {
    let groups = align_groups(dumps);
    let transfers = Transfers::from_dumps(dumps, &groups);
    let mut waits = Waits::from_hosts(&groups, &transfers);
    let members: BTreeSet<u32> = groups.iter().flat_map(|g| g.members.iter().copied()).collect();
    let missing: Vec<u32> = members.into_iter().filter(|r| !dumps.contains_key(r)).collect();
    let moving = find_moving_ranks(dumps, &transfers);
    let mut findings = find_causes(dumps, &groups, &transfers, &waits, &moving);
    let mut notes = list_notes(dumps, &waits, &missing, &moving);
    if findings.is_empty() {
        let devices = Waits::from_devices(dumps, &groups);
        findings = find_device_causes(&waits.stalled, &devices);
        findings.retain(|f| !f.ranks.iter().any(|r| moving.contains(r)));
        if findings.is_empty() && !waits.stalled.is_empty() {
            notes.push(STALLED_NOTE.to_string());
        } else if !findings.is_empty() {
            waits.by_rank = devices.by_rank;
        }
    }
    notes.push(NOT_RECORDED_NOTE.to_string());
    FlightReport {
        findings,
        waits: waits.by_rank.iter().map(|(rank, w)| RankWait::from_wait(*rank, w)).collect(),
        ranks: dumps.keys().copied().collect(),
        missing,
        notes,
    }
}

const STALLED_NOTE: &str = "all members enqueued a collective that no device completed: the dumps show no rank at fault; \
with TORCH_NCCL_ENABLE_TIMING=1 they show which device started it";
const NOT_RECORDED_NOTE: &str = "not recorded, so not compared: the reduction, the root, the splits of an all-to-all, the \
contents, and what a CUDA graph replays; dumps cannot show ranks that compute on different weights";

/// Returns the ranks that made progress when they wrote their dumps: the watchdog had yet to take the newest
/// completed collective off its list. It does so within a second, and a hang lasts longer. Dumps without
/// any collective that was taken off come from a recorder that does not write this, and show nothing.
fn find_moving_ranks(dumps: &BTreeMap<u32, FlightDump>, transfers: &Transfers<'_>) -> BTreeSet<u32> {
    let is_recorded = dumps.values().flat_map(|d| &d.entries).any(|e| e.retired);
    // What an abort ended is no progress.
    let newest = |d: &FlightDump| {
        let mut latest = d.entries.iter().rev();
        latest
            .find(|e| e.state == EntryState::Completed && !transfers.is_aborted(d.rank, e.record_id))
            .map(|e| e.retired)
    };
    let moving = dumps.values().filter(|d| is_recorded && newest(d) == Some(false));
    moving.map(|d| d.rank).collect()
}

fn list_notes(
    dumps: &BTreeMap<u32, FlightDump>,
    waits: &Waits<'_>,
    missing: &[u32],
    moving: &BTreeSet<u32>,
) -> Vec<String> {
    let mut notes = Vec::new();
    let lost: Vec<u32> = dumps.values().filter(|d| d.lost_head).map(|d| d.rank).collect();
    if !lost.is_empty() {
        notes.push(format!("the ring of {} lost its oldest entries", list_ranks(&lost)));
    }
    if !waits.older.is_empty() {
        let older: Vec<u32> = waits.older.iter().copied().collect();
        notes.push(format!(
            "the dump of {} is older than those of ranks that wait for it",
            list_ranks(&older)
        ));
    }
    let moving: Vec<u32> = waits.find_roots().intersection(moving).copied().collect();
    if !moving.is_empty() {
        notes.push(format!(
            "{} made progress when the dump was written, so it is not silent",
            list_ranks(&moving)
        ));
    }
    if !missing.is_empty() {
        notes.push(format!("{} left no dump", list_ranks(missing)));
    }
    notes
}
