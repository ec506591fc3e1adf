//! The collectives of one process group, aligned over its members.

use std::collections::{BTreeMap, BTreeSet};

use super::dump::{EntryState, FlightDump, FlightEntry};

/// One rank's collectives in one group.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemberSequence<'a> {
    /// Collectives by sequence number.
    pub(crate) calls: BTreeMap<u64, Call<'a>>,
    /// Whether the dump may have lost collectives before the first one.
    pub(crate) lost_head: bool,
}

/// A collective of one rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'a> {
    /// The entry in the dump.
    pub(crate) entry: &'a FlightEntry,
    /// Progress, with that of the launch that the collective was part of.
    pub(crate) state: EntryState,
}

impl MemberSequence<'_> {
    /// Returns the last number that the rank enqueued.
    pub(crate) fn last_enqueued(&self) -> u64 {
        self.calls.keys().next_back().copied().unwrap_or(0)
    }

    /// Returns the last number that the rank's device completed.
    pub(crate) fn last_completed(&self) -> u64 {
        let done = self.calls.iter().rev().find(|(_, c)| c.state == EntryState::Completed);
        done.map_or(0, |(seq, _)| *seq)
    }
}

/// A process group with what each of its members did.
#[derive(Debug, Clone)]
pub(crate) struct GroupSequences<'a> {
    /// Name, such as `0` for the default group.
    pub(crate) name: String,
    /// Description, such as `default_pg`.
    pub(crate) description: String,
    /// Members by global rank.
    pub(crate) members: Vec<u32>,
    /// Sequences of the members that have a dump.
    pub(crate) sequences: BTreeMap<u32, MemberSequence<'a>>,
}

/// Returns the groups of all dumps. Groups of one name with other members are different groups.
pub(crate) fn align_groups(dumps: &BTreeMap<u32, FlightDump>) -> Vec<GroupSequences<'_>> {
    let mut groups: BTreeMap<(String, Vec<u32>), GroupSequences<'_>> = BTreeMap::new();
    for (rank, dump) in dumps {
        let mut used: BTreeSet<&str> = dump.groups.keys().map(String::as_str).collect();
        used.extend(dump.entries.iter().map(|e| &*e.group));
        for name in used {
            let config = dump.groups.get(name).cloned().unwrap_or_default();
            let group =
                groups.entry((name.to_string(), config.ranks.clone())).or_insert_with(|| GroupSequences {
                    name: name.to_string(),
                    description: config.description,
                    members: config.ranks,
                    sequences: BTreeMap::new(),
                });
            group.sequences.insert(*rank, read_sequence(dump, name));
        }
    }
    groups.into_values().collect()
}

fn read_sequence<'a>(dump: &'a FlightDump, group: &str) -> MemberSequence<'a> {
    let mut sequence = MemberSequence { lost_head: dump.lost_head, ..MemberSequence::default() };
    let states = launch_states(dump);
    for (entry, state) in dump.entries.iter().zip(states) {
        if &*entry.group == group && !entry.is_p2p && &*entry.op != LAUNCH {
            sequence.calls.insert(entry.sequence, Call { entry, state });
        }
    }
    sequence
}

/// Name of the entry that PyTorch adds at the end of a coalesced launch.
const LAUNCH: &str = "coalesced";

/// Returns the state of each entry. The parts of a coalesced launch never complete by themselves: they
/// have the state of the entry that ends the launch.
pub(crate) fn launch_states(dump: &FlightDump) -> Vec<EntryState> {
    let mut states: Vec<EntryState> = dump.entries.iter().map(|e| e.state).collect();
    for (at, launch) in dump.entries.iter().enumerate().filter(|(_, e)| &*e.op == LAUNCH) {
        for before in (0..at).rev() {
            let part = &dump.entries[before];
            if part.group != launch.group {
                continue;
            }
            if &*part.op == LAUNCH {
                break;
            }
            states[before] = states[before].max(launch.state);
        }
    }
    states
}

/// What the members of a group must agree on at one position.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CallSignature {
    pub(crate) op: String,
    pub(crate) dtypes: Vec<String>,
    /// Elements of inputs and outputs; `None` where members may differ, as in an uneven all-to-all.
    pub(crate) elements: Option<(u64, u64)>,
}

impl CallSignature {
    pub(crate) fn from_entry(entry: &FlightEntry) -> CallSignature {
        let op = normalise_op(&entry.op);
        let count = |shapes: &[Vec<u64>]| shapes.iter().map(|s| s.iter().product::<u64>()).sum::<u64>();
        // The same number of elements in another shape is the same collective.
        let uniform = !matches!(op, "gather" | "scatter" | "all_to_all" | "all_to_all_uneven")
            && !matches!(&*entry.op, "all_gather" | "reduce_scatter" | "all_gather_v");
        let elements = uniform.then(|| (count(&entry.input_shapes), count(&entry.output_shapes)));
        let mut dtypes: Vec<String> = entry.input_dtypes.iter().map(ToString::to_string).collect();
        // Only the root of a gather or a scatter passes the list.
        dtypes.dedup();
        CallSignature { op: op.to_string(), dtypes, elements }
    }

    /// Returns the first field in which two calls differ.
    pub(crate) fn find_difference(&self, other: &CallSignature) -> Option<&'static str> {
        if self.op != other.op {
            return Some("op");
        }
        if !self.dtypes.is_empty() && !other.dtypes.is_empty() && self.dtypes != other.dtypes {
            return Some("dtype");
        }
        matches!((self.elements, other.elements), (Some(a), Some(b)) if a != b).then_some("shape")
    }
}

/// Returns one name for the names under which versions of PyTorch record an op.
fn normalise_op(op: &str) -> &str {
    match op {
        "_all_gather_base" | "all_gather_single" | "all_gather_into_tensor" | "_allgather_base" => {
            "all_gather"
        }
        "_reduce_scatter_base" | "reduce_scatter_single" | "reduce_scatter_tensor" => "reduce_scatter",
        "allreduce" => "all_reduce",
        "allgather" => "all_gather",
        "alltoall_base" | "all_to_all_single" | "alltoall" => "all_to_all",
        _ => op,
    }
}

impl GroupSequences<'_> {
    /// Returns the group as reports name it.
    pub(crate) fn label(&self) -> String {
        match self.description.as_str() {
            "" | "undefined" => format!("group {}", self.name),
            description => format!("group {} ({description})", self.name),
        }
    }
}
