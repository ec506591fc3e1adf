//! Which rank waits for which, from what each rank enqueued and its device did not complete.

use std::collections::{BTreeMap, BTreeSet};

use super::departure::{GroupFront, find_front};
use super::dump::{EntryState, FlightDump, FlightEntry};
use super::sequence::{GroupSequences, launch_states};

/// A collective, a send or a receive in which a rank waits.
#[derive(Debug, Clone)]
pub(crate) struct Wait<'a> {
    /// The entry in which the rank waits.
    pub(crate) entry: &'a FlightEntry,
    /// Name and description of the group.
    pub(crate) group: String,
    /// Ranks that have not enqueued their side of it.
    pub(crate) awaited: BTreeSet<u32>,
}

/// The waits of all ranks, and what else their dumps show.
#[derive(Debug, Default)]
pub(crate) struct Waits<'a> {
    /// The first wait of each rank.
    pub(crate) by_rank: BTreeMap<u32, Wait<'a>>,
    /// Ranks whose dump is older than those of ranks that wait for them.
    pub(crate) older: BTreeSet<u32>,
    /// Groups of which all members enqueued a collective that no device completed: members, those
    /// whose device started it, and one of the entries.
    pub(crate) stalled: Vec<(Vec<u32>, Vec<u32>, &'a FlightEntry)>,
}

impl<'a> Waits<'a> {
    pub(crate) fn from_groups(
        dumps: &'a BTreeMap<u32, FlightDump>,
        groups: &[GroupSequences<'a>],
    ) -> Waits<'a> {
        let mut waits = Waits::default();
        for group in groups {
            if let Some(front) = find_front(group) {
                waits.add_front(group, &front);
            }
        }
        waits.add_transfers(dumps, groups);
        waits
    }

    fn add_front(&mut self, group: &GroupSequences<'a>, front: &GroupFront) {
        let awaited: BTreeSet<u32> =
            front.behind.iter().chain(&front.missing).chain(&front.older).copied().collect();
        self.older.extend(&front.older);
        for rank in &front.waiting {
            let calls = group.sequences.get(rank).map(|s| s.calls.range(front.sequence..));
            let Some((_, call)) = calls.and_then(|mut c| c.next()) else { continue };
            self.add(*rank, Wait { entry: call.entry, group: group.label(), awaited: awaited.clone() });
        }
        let first = front.waiting.first().and_then(|r| group.sequences.get(r)?.calls.get(&front.sequence));
        if let (true, Some(call)) = (awaited.is_empty(), first) {
            self.stalled.push((front.waiting.clone(), front.started.clone(), call.entry));
        }
    }

    /// Adds sends and receives whose peer has not enqueued its side.
    fn add_transfers(&mut self, dumps: &'a BTreeMap<u32, FlightDump>, groups: &[GroupSequences<'a>]) {
        let transfers: BTreeMap<u32, Vec<Transfer<'a>>> =
            dumps.iter().map(|(rank, dump)| (*rank, list_transfers(dump, groups))).collect();
        for (rank, own) in &transfers {
            for t in own.iter().filter(|t| t.is_pending) {
                let back =
                    |m: &&Transfer<'_>| m.peer == *rank && m.is_send != t.is_send && m.group == t.group;
                let matched = transfers.get(&t.peer).is_some_and(|theirs| {
                    // Only transfers that are pending on both sides can belong together, and they
                    // complete in order.
                    let before = |own: &[Transfer<'_>]| {
                        own.iter()
                            .filter(|o| {
                                o.is_pending
                                    && o.peer == t.peer
                                    && o.is_send == t.is_send
                                    && o.group == t.group
                            })
                            .take_while(|o| o.entry.record_id < t.entry.record_id)
                            .count()
                    };
                    theirs.iter().filter(back).filter(|m| m.is_pending).count() > before(own)
                });
                if !matched {
                    let group = groups.iter().find(|g| g.name == t.group && g.members.contains(rank));
                    let group = group.map_or_else(|| t.group.clone(), GroupSequences::label);
                    self.add(*rank, Wait { entry: t.entry, group, awaited: BTreeSet::from([t.peer]) });
                }
            }
        }
    }

    /// Keeps a wait if it is the rank's first.
    fn add(&mut self, rank: u32, wait: Wait<'a>) {
        let known = self.by_rank.get(&rank);
        if known.is_none_or(|w| wait.entry.record_id < w.entry.record_id) {
            self.by_rank.insert(rank, wait);
        }
    }

    /// Returns the ranks that others wait for and that wait for no rank.
    pub(crate) fn roots(&self) -> BTreeSet<u32> {
        let awaited = self.by_rank.values().flat_map(|w| w.awaited.iter().copied());
        awaited.filter(|r| self.by_rank.get(r).is_none_or(|w| w.awaited.is_empty())).collect()
    }

    /// Returns the ranks of a cycle of waits, in the order in which each waits for the next.
    pub(crate) fn find_cycle(&self) -> Option<Vec<u32>> {
        for start in self.by_rank.keys() {
            let mut path: Vec<u32> = vec![*start];
            while let Some(next) =
                path.last().and_then(|r| self.by_rank.get(r)).and_then(|w| w.awaited.first().copied())
            {
                if let Some(at) = path.iter().position(|r| *r == next) {
                    return Some(path.split_off(at));
                }
                path.push(next);
            }
        }
        None
    }
}

struct Transfer<'a> {
    entry: &'a FlightEntry,
    group: String,
    peer: u32,
    is_send: bool,
    is_pending: bool,
}

/// Lists the sends and receives of a dump. PyTorch records them as `send 0->1` and `recv 1<-0`, with
/// ranks of the group.
fn list_transfers<'a>(dump: &'a FlightDump, groups: &[GroupSequences<'a>]) -> Vec<Transfer<'a>> {
    let states = launch_states(dump);
    let mut found = Vec::new();
    for (entry, state) in dump.entries.iter().zip(states).filter(|(e, _)| e.is_p2p) {
        let Some((verb, ends)) = entry.op.split_once(' ') else { continue };
        let peer = ends.split_once("->").or_else(|| ends.split_once("<-")).map(|(_, peer)| peer);
        let Some(index) = peer.and_then(|p| p.trim().parse::<usize>().ok()) else { continue };
        let members = groups.iter().find(|g| *g.name == *entry.group && g.members.contains(&dump.rank));
        let Some(peer) = members.and_then(|g| g.members.get(index).copied()) else { continue };
        let is_pending = state != EntryState::Completed;
        found.push(Transfer {
            entry,
            group: entry.group.to_string(),
            peer,
            is_send: verb == "send",
            is_pending,
        });
    }
    found
}
