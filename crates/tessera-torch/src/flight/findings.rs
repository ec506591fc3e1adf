//! What the dumps of a run show: causes, waits and notes.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::named_enum;

use super::causes::find_causes;
use super::dump::{EntryState, FlightDump, FlightEntry};
use super::sequence::align_groups;
use super::transfer::Transfers;
use super::wait::{Wait, Waits};

named_enum! {
    /// How a rank departed from its peers.
    pub enum FaultKind {
        /// The rank did not issue a collective that its peers issued.
        Skipped = "skipped a collective",
        /// The rank issued a collective that its peers did not issue.
        Extra = "issued an extra collective",
        /// The rank issued another operation.
        OtherOp = "issued another op",
        /// The rank passed another number of elements.
        OtherShape = "passed another shape",
        /// The rank passed another dtype.
        OtherDtype = "passed another dtype",
        /// The ranks wait for each other in a cycle.
        WaitCycle = "wait for each other",
        /// The rank's host issued nothing more, although its device was idle.
        HostSilent = "host is silent",
        /// The rank's device did not start or complete what its peers' devices did.
        DeviceBehind = "device is behind",
        /// The rank left no dump, and others wait for it.
        NoDump = "left no dump",
    }
}

named_enum! {
    /// How sure a finding is.
    pub enum Certainty {
        /// The dumps leave no other explanation.
        Certain = "certain",
        /// Something is missing that could show another explanation.
        Likely = "likely",
        /// The dumps show that ranks departed from each other, and not which side did.
        Unclear = "unclear",
    }
}

/// A cause of the hang.
#[derive(Debug, Clone)]
pub struct FlightFinding {
    /// How the ranks departed.
    pub kind: FaultKind,
    /// Ranks at fault; both sides if the dumps do not show which side departed, and the ranks of a cycle.
    pub ranks: Vec<u32>,
    /// How sure this is.
    pub certainty: Certainty,
    /// Why it is no more certain than that.
    pub doubts: Vec<String>,
    /// The group, such as `group 0 (default_pg)`.
    pub group: String,
    /// Number of the collective in its group, from 1; `None` for a send, a receive or a cycle.
    pub sequence: Option<u64>,
    /// What each side issued there.
    pub sides: Vec<CallSide>,
}

/// What some ranks issued.
#[derive(Debug, Clone)]
pub struct CallSide {
    /// The ranks.
    pub ranks: Vec<u32>,
    /// Op, number, dtype and shapes, such as `all_reduce 7 of Float [2048]`.
    pub call: String,
    /// Group of the collective.
    pub group: String,
    /// The innermost line of the user's program, such as `train.py:72 in step`.
    pub site: Option<String>,
}

/// A rank that waits, for the wait graph.
#[derive(Debug, Clone)]
pub struct RankWait {
    /// The rank.
    pub rank: u32,
    /// The ranks for which it waits.
    pub awaited: Vec<u32>,
    /// What it waits in.
    pub call: String,
    /// Group of the collective.
    pub group: String,
    /// Where the program issued it.
    pub site: Option<String>,
}

/// What the dumps of a run show.
#[derive(Debug, Clone, Default)]
pub struct FlightReport {
    /// Causes, the first one first. Empty if no rank is accused.
    pub findings: Vec<FlightFinding>,
    /// The wait graph at the time of the dumps.
    pub waits: Vec<RankWait>,
    /// Ranks with a dump.
    pub ranks: Vec<u32>,
    /// Ranks that a group names and that left no dump.
    pub missing: Vec<u32>,
    /// What the reader of the report should know.
    pub notes: Vec<String>,
}

/// Finds the rank that departed first.
#[must_use]
pub fn examine_dumps(dumps: &BTreeMap<u32, FlightDump>) -> FlightReport {
    let groups = align_groups(dumps);
    let transfers = Transfers::from_dumps(dumps, &groups);
    let mut waits = Waits::from_hosts(&groups, &transfers);
    let members: BTreeSet<u32> = groups.iter().flat_map(|g| g.members.iter().copied()).collect();
    let missing: Vec<u32> = members.into_iter().filter(|r| !dumps.contains_key(r)).collect();
    let mut findings = find_causes(dumps, &groups, &transfers, &waits);
    let mut notes = list_notes(dumps, &waits, &missing);
    if findings.is_empty() {
        let devices = Waits::from_devices(dumps, &groups);
        findings = super::causes::find_device_causes(&waits.stalled, &devices);
        findings.retain(|f| !f.ranks.iter().any(|r| dumps.get(r).is_some_and(FlightDump::is_moving)));
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

impl FlightDump {
    /// Returns whether the rank made progress when it wrote the dump: the watchdog had yet to take the
    /// newest completed collective off its list. It does so within a second, and a hang lasts longer.
    pub(super) fn is_moving(&self) -> bool {
        self.entries.iter().rfind(|e| e.state == EntryState::Completed).is_some_and(|e| !e.retired)
    }
}

fn list_notes(dumps: &BTreeMap<u32, FlightDump>, waits: &Waits<'_>, missing: &[u32]) -> Vec<String> {
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
    let moving: Vec<u32> =
        waits.find_roots().into_iter().filter(|r| dumps.get(r).is_some_and(FlightDump::is_moving)).collect();
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

impl RankWait {
    fn from_wait(rank: u32, wait: &Wait<'_>) -> RankWait {
        RankWait {
            rank,
            awaited: wait.awaited.iter().copied().collect(),
            call: describe_call(wait.entry),
            group: wait.group.clone(),
            site: find_user_site(wait.entry),
        }
    }
}

impl CallSide {
    pub(super) fn from_entry(ranks: Vec<u32>, entry: &FlightEntry, group: String) -> CallSide {
        CallSide { ranks, call: describe_call(entry), group, site: find_user_site(entry) }
    }
}

/// Describes a collective: op, number, dtype, shapes.
fn describe_call(entry: &FlightEntry) -> String {
    let shapes: Vec<String> = entry.input_shapes.iter().take(3).map(|s| format!("{s:?}")).collect();
    let more = if entry.input_shapes.len() > 3 { ", …" } else { "" };
    let number = if entry.is_p2p { String::new() } else { format!(" {}", entry.sequence) };
    match entry.input_dtypes.first() {
        None => format!("{}{number}", entry.op),
        Some(dtype) => format!("{}{number} of {dtype} {}{more}", entry.op, shapes.join(", ")),
    }
}

/// Returns the innermost line that is not of PyTorch itself.
fn find_user_site(entry: &FlightEntry) -> Option<String> {
    let is_own = |file: &str| !file.contains("/torch/") && !file.starts_with("??");
    let frame = entry.frames.iter().find(|f| is_own(&f.file)).or(entry.frames.first())?;
    Some(format!("{}:{} in {}", frame.file, frame.line, frame.function))
}

/// Lists ranks: `rank 3`, `ranks 0, 2`. A long list of consecutive ranks is shortened: `ranks 0 to 1022`.
#[must_use]
pub fn list_ranks(ranks: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, end)) if end.checked_add(1) == Some(*rank) => *end = *rank,
            _ => runs.push((*rank, *rank)),
        }
    }
    let texts: Vec<String> = runs
        .iter()
        .map(|(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first} to {last}"),
        })
        .collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, texts.join(", "))
}
