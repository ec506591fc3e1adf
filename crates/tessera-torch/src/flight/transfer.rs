//! Sends and receives, matched between two ranks.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::dump::{COALESCED_LAUNCH, EntryState, FlightDump, FlightEntry};
use super::sequence::GroupSequences;
use super::signature::SignatureField;

/// The direction of a transfer within a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Channel<'a> {
    group: &'a str,
    sender: u32,
    receiver: u32,
}

/// One side's transfers of a channel, in the order of the program.
#[derive(Debug, Default)]
struct ChannelSide<'a> {
    entries: Vec<&'a FlightEntry>,
    /// Whether the ring may have lost earlier ones.
    lost_head: bool,
}

impl<'a> ChannelSide<'a> {
    /// Lists the pending transfers that the other side has not enqueued. Those that an abort ended, by their
    /// record ids, are pending as well.
    fn list_unmatched(
        &self,
        theirs: Option<&ChannelSide<'_>>,
        aborted: &BTreeSet<u64>,
    ) -> Vec<&'a FlightEntry> {
        let is_pending =
            |e: &&&FlightEntry| e.state != EntryState::Completed || aborted.contains(&e.record_id);
        let pending = self.entries.iter().filter(is_pending).copied();
        match theirs {
            // A peer that lost the start of its ring may have enqueued all of them.
            Some(theirs) if self.lost_head || theirs.lost_head => {
                // Transfers of a channel complete in order, so those that are pending on both sides belong
                // together.
                let is_open = |e: &&&FlightEntry| e.state != EntryState::Completed;
                pending.skip(theirs.entries.iter().filter(is_open).count()).collect()
            }
            theirs => {
                let matched = theirs.map_or(0, |t| t.entries.len());
                let beyond = self.entries.iter().skip(matched);
                beyond.filter(is_pending).copied().collect()
            }
        }
    }
}

/// All sends and receives of a run.
#[derive(Debug, Default)]
pub(super) struct Transfers<'a> {
    sends: BTreeMap<Channel<'a>, ChannelSide<'a>>,
    receives: BTreeMap<Channel<'a>, ChannelSide<'a>>,
    /// Record ids of the receives that an abort ended, by rank.
    aborted: BTreeMap<u32, BTreeSet<u64>>,
}

/// A transfer whose peer has not enqueued its side.
#[derive(Debug)]
pub(super) struct UnmatchedTransfer<'a> {
    pub(super) rank: u32,
    pub(super) peer: u32,
    pub(super) entry: &'a FlightEntry,
    pub(super) group: String,
}

/// A send and its receive that do not fit together.
#[derive(Debug)]
pub(super) struct MismatchedTransfer<'a> {
    pub(super) field: SignatureField,
    pub(super) sender: (u32, &'a FlightEntry),
    pub(super) receiver: (u32, &'a FlightEntry),
    pub(super) group: String,
}

impl<'a> Transfers<'a> {
    /// Lists the transfers of all dumps. PyTorch records them as `send 0->1` and `recv 1<-0`, with
    /// ranks of the group.
    pub(super) fn from_dumps(
        dumps: &'a BTreeMap<u32, FlightDump>,
        groups: &[GroupSequences<'a>],
    ) -> Transfers<'a> {
        let mut transfers = Transfers::default();
        let members: HashMap<(&str, u32), &[u32]> = groups
            .iter()
            .flat_map(|g| g.sequences.keys().map(|rank| ((g.name.as_str(), *rank), g.members.as_slice())))
            .collect();
        for (rank, dump) in dumps {
            for entry in dump.entries.iter().filter(|e| e.is_p2p) {
                let Some((is_send, peer)) = parse_transfer(&entry.op) else { continue };
                let ranks = members.get(&(&*entry.group, *rank)).copied().unwrap_or_default();
                let Some(peer) = ranks.get(peer).copied() else { continue };
                let (sender, receiver) = if is_send { (*rank, peer) } else { (peer, *rank) };
                let sides = if is_send { &mut transfers.sends } else { &mut transfers.receives };
                let side = sides.entry(Channel { group: &entry.group, sender, receiver }).or_default();
                side.entries.push(entry);
                side.lost_head = dump.lost_head;
            }
        }
        transfers.aborted = transfers.find_aborted(dumps);
        transfers
    }

    /// Returns whether an abort of the peer ended this receive, which reads as completed.
    pub(super) fn is_aborted(&self, rank: u32, record_id: u64) -> bool {
        self.aborted.get(&rank).is_some_and(|ids| ids.contains(&record_id))
    }

    /// Finds receives that completed although the peer never sent, while the peer waits in a receive from
    /// this rank that this rank never sent. When the watchdog of a rank aborts its communicators, the
    /// receives of its peers end, and a peer that writes its dump afterwards records them as completed.
    ///
    /// No rank of a run that goes on has such a receive, at whatever moments the dumps were written. Let
    /// rank 0 have completed it. If rank 1 had sent after its dump, its send would come after its own
    /// pending receive in the same communicator, which executes one operation after the other. So rank 0
    /// must have sent what rank 1 waited for before it completed its receive, and the dump of rank 0 would
    /// hold that send. This needs all entries of both ranks. It also needs transfers that are not launched
    /// together, because those execute at once and in any order: groups with a coalesced launch are left
    /// out, and so is a receive of a batch that a dump cut in two before the launch.
    /// A collective in which the peer waits shows nothing, because it has a communicator of its own, which a
    /// later send may overtake.
    fn find_aborted(&self, dumps: &BTreeMap<u32, FlightDump>) -> BTreeMap<u32, BTreeSet<u64>> {
        let mut found: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        for (channel, own) in &self.receives {
            let back = Channel { group: channel.group, sender: channel.receiver, receiver: channel.sender };
            let Some(theirs) = self.receives.get(&back) else { continue };
            let count_sends = |c: &Channel<'a>| self.sends.get(c).map_or(0, |s| s.entries.len());
            let is_pending = |e: &&FlightEntry| e.state != EntryState::Completed;
            let peer_waits = theirs
                .entries
                .iter()
                .copied()
                .skip(count_sends(&back))
                .any(|e| is_pending(&e) && !is_batched(e));
            let unsent = own.entries.iter().skip(count_sends(channel));
            let ended: Vec<u64> =
                unsent.filter(|e| !is_pending(e) && !e.retired).map(|e| e.record_id).collect();
            let is_whole = |rank: &u32| {
                dumps.get(rank).is_some_and(|d| !d.lost_head && !d.has_coalesced_launch(channel.group))
            };
            if peer_waits && !ended.is_empty() && [channel.sender, channel.receiver].iter().all(is_whole) {
                found.entry(channel.receiver).or_default().extend(ended);
            }
        }
        found
    }

    /// Returns the pending transfers whose peer has not enqueued its side.
    pub(super) fn find_unmatched(&self, groups: &[GroupSequences<'a>]) -> Vec<UnmatchedTransfer<'a>> {
        let (mut found, none) = (Vec::new(), BTreeSet::new());
        let sends = self.sends.iter().map(|(c, side)| (c, side, self.receives.get(c), c.sender, c.receiver));
        let receives =
            self.receives.iter().map(|(c, side)| (c, side, self.sends.get(c), c.receiver, c.sender));
        for (channel, own, theirs, rank, peer) in sends.chain(receives) {
            let group = find_label(groups, channel.group, rank);
            let aborted = self.aborted.get(&rank).unwrap_or(&none);
            let unmatched = own.list_unmatched(theirs, aborted).into_iter();
            found.extend(unmatched.map(|entry| UnmatchedTransfer {
                rank,
                peer,
                entry,
                group: group.clone(),
            }));
        }
        found
    }

    /// Returns the first send whose receive has another number of elements or another dtype. Pairs are
    /// counted from the start, so a ring that lost its head leaves nothing to compare.
    pub(super) fn find_mismatch(&self, groups: &[GroupSequences<'a>]) -> Option<MismatchedTransfer<'a>> {
        let mut found: Vec<MismatchedTransfer<'a>> = Vec::new();
        for (channel, sends) in &self.sends {
            let Some(receives) = self.receives.get(channel) else { continue };
            if sends.lost_head || receives.lost_head {
                continue;
            }
            let mut pairs = sends.entries.iter().zip(&receives.entries);
            let differing =
                pairs.find_map(|(send, receive)| Some((compare(send, receive)?, *send, *receive)));
            if let Some((field, send, receive)) = differing {
                found.push(MismatchedTransfer {
                    field,
                    sender: (channel.sender, send),
                    receiver: (channel.receiver, receive),
                    group: find_label(groups, channel.group, channel.sender),
                });
            }
        }
        found.into_iter().min_by_key(|m| m.sender.1.created_ns.min(m.receiver.1.created_ns))
    }
}

impl FlightDump {
    fn has_coalesced_launch(&self, group: &str) -> bool {
        self.entries.iter().any(|e| &*e.op == COALESCED_LAUNCH && &*e.group == group)
    }
}

fn is_batched(entry: &FlightEntry) -> bool {
    entry.frames.iter().any(|f| &*f.function == "batch_isend_irecv")
}

fn compare(send: &FlightEntry, receive: &FlightEntry) -> Option<SignatureField> {
    let volume = |e: &FlightEntry| {
        let extents = e.input_shapes.iter().flatten();
        extents.fold(1u64, |n, extent| n.saturating_mul(*extent))
    };
    if send.input_dtypes != receive.input_dtypes {
        return Some(SignatureField::Dtype);
    }
    (volume(send) != volume(receive)).then_some(SignatureField::Shape)
}

fn find_label(groups: &[GroupSequences<'_>], name: &str, rank: u32) -> String {
    let group = groups.iter().find(|g| g.name == name && g.sequences.contains_key(&rank));
    group.map_or_else(|| name.to_string(), GroupSequences::label)
}

/// Returns whether an op sends, and the peer's rank in the group.
pub(super) fn parse_transfer(op: &str) -> Option<(bool, usize)> {
    let (verb, ends) = op.split_once(' ')?;
    let (_, peer) = ends.split_once("->").or_else(|| ends.split_once("<-"))?;
    Some((verb == "send", peer.trim().parse().ok()?))
}
