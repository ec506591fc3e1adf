//! The collectives of one process group, aligned over its members.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use super::dump::{COALESCED_LAUNCH, EntryState, FlightDump, FlightEntry};

/// One rank's collectives in one group.
#[derive(Debug, Clone, Default)]
pub(super) struct MemberSequence<'a> {
    /// Collectives by sequence number.
    pub(super) calls: BTreeMap<u64, &'a FlightEntry>,
    /// Whether the dump may have lost collectives before the first one.
    pub(super) lost_head: bool,
    /// Number of the last collective that the rank enqueued; 0 for none.
    pub(super) last_enqueued: u64,
}

impl<'a> MemberSequence<'a> {
    /// Returns the last number that the rank's device completed, or 0.
    pub(super) fn last_completed(&self) -> u64 {
        let done = self.calls.iter().rev().find(|(_, e)| e.state == EntryState::Completed);
        done.map_or(0, |(seq, _)| *seq)
    }

    /// Returns the collectives after this number.
    pub(super) fn list_after(&self, sequence: u64) -> impl Iterator<Item = &'a FlightEntry> {
        self.calls.range((Bound::Excluded(sequence), Bound::Unbounded)).map(|(_, e)| *e)
    }

    /// Returns the first collective after this number.
    pub(super) fn first_after(&self, sequence: u64) -> Option<&'a FlightEntry> {
        self.list_after(sequence).next()
    }
}

/// A process group with what each of its members did.
#[derive(Debug, Clone)]
pub(super) struct GroupSequences<'a> {
    /// Name, such as `0` for the default group.
    pub(super) name: String,
    /// Description, such as `default_pg`.
    pub(super) description: String,
    /// Members by global rank.
    pub(super) members: Vec<u32>,
    /// Sequences of the members that have a dump.
    pub(super) sequences: BTreeMap<u32, MemberSequence<'a>>,
}

impl GroupSequences<'_> {
    /// Returns the group as reports name it.
    pub(super) fn label(&self) -> String {
        match self.description.as_str() {
            "" | "undefined" => format!("group {}", self.name),
            description => format!("group {} ({description})", self.name),
        }
    }
}

/// Returns the groups of all dumps. Groups of one name with other members are different groups.
pub(super) fn align_groups(dumps: &BTreeMap<u32, FlightDump>) -> Vec<GroupSequences<'_>> {
    let mut groups: BTreeMap<(String, Vec<u32>), GroupSequences<'_>> = BTreeMap::new();
    for (rank, dump) in dumps {
        for (name, sequence) in read_sequences(dump) {
            let config = dump.groups.get(name).cloned().unwrap_or_default();
            let group =
                groups.entry((name.to_string(), config.ranks.clone())).or_insert_with(|| GroupSequences {
                    name: name.to_string(),
                    description: config.description,
                    members: config.ranks,
                    sequences: BTreeMap::new(),
                });
            group.sequences.insert(*rank, sequence);
        }
    }
    groups.into_values().collect()
}

/// Returns a rank's collectives by group, also of the groups without an entry.
fn read_sequences(dump: &FlightDump) -> HashMap<&str, MemberSequence<'_>> {
    let mut sequences: HashMap<&str, MemberSequence<'_>> =
        dump.groups.keys().map(|name| (name.as_str(), MemberSequence::default())).collect();
    for entry in &dump.entries {
        let sequence = sequences.entry(&entry.group).or_default();
        if !entry.is_p2p && &*entry.op != COALESCED_LAUNCH {
            sequence.calls.insert(entry.sequence, entry);
        }
    }
    for (name, sequence) in &mut sequences {
        let in_ring = sequence.calls.keys().next_back().copied().unwrap_or(0);
        let stated = dump.last_enqueued.get(*name).copied();
        sequence.last_enqueued = stated.unwrap_or(0).max(in_ring);
        // The count of a group without an entry shows whether the ring lost some.
        sequence.lost_head =
            if sequence.calls.is_empty() { stated.is_none() && dump.lost_head } else { dump.lost_head };
    }
    sequences
}
