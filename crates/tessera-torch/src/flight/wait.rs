//! Which rank waits for which, from what each rank enqueued and its device did not complete.

use std::collections::{BTreeMap, BTreeSet};

use super::dump::{COALESCED_LAUNCH, EntryState, FlightDump, FlightEntry};
use super::sequence::{GroupSequences, MemberSequence};
use super::transfer::{Transfers, UnmatchedTransfer, parse_transfer};

/// A collective, a send or a receive in which a rank waits.
#[derive(Debug, Clone)]
pub(super) struct Wait<'a> {
    /// The entry in which the rank waits.
    pub(super) entry: &'a FlightEntry,
    /// Name and description of the group.
    pub(super) group: String,
    /// Ranks for whose side it waits.
    pub(super) awaited: BTreeSet<u32>,
}

/// A collective that all members enqueued and no device completed.
#[derive(Debug, Clone)]
pub(super) struct StalledCollective<'a> {
    pub(super) group: String,
    pub(super) entry: &'a FlightEntry,
    /// Ranks whose device started it; known only with timing.
    pub(super) started: Vec<u32>,
    pub(super) members: Vec<u32>,
    /// Ranks whose device has yet to complete an earlier collective, which a peer's device completed.
    pub(super) behind: Vec<u32>,
}

/// The waits of all ranks, and what else their dumps show.
#[derive(Debug, Clone, Default)]
pub(super) struct Waits<'a> {
    /// The first wait of each rank.
    pub(super) by_rank: BTreeMap<u32, Wait<'a>>,
    /// Ranks whose dump is older than those of ranks that wait for them.
    pub(super) older: BTreeSet<u32>,
    pub(super) stalled: Vec<StalledCollective<'a>>,
}

impl<'a> Waits<'a> {
    /// Finds which ranks wait for a rank that has not enqueued its side.
    pub(super) fn from_hosts(groups: &[GroupSequences<'a>], transfers: &Transfers<'a>) -> Waits<'a> {
        let mut waits = Waits::default();
        for group in groups {
            if let Some(front) = GroupFront::find(group) {
                waits.add_front(group, &front);
            }
        }
        for UnmatchedTransfer { rank, peer, entry, group } in transfers.find_unmatched(groups) {
            waits.add(rank, Wait { entry, group, awaited: BTreeSet::from([peer]) });
        }
        waits
    }

    /// Finds which devices wait for a device that is still in an earlier collective. Each rank is taken
    /// to execute its collectives in the order of its program, as those of one stream are.
    pub(super) fn from_devices(
        dumps: &'a BTreeMap<u32, FlightDump>,
        groups: &[GroupSequences<'a>],
    ) -> Waits<'a> {
        let pending = list_pending(dumps, groups);
        let mut waits = Waits::default();
        for (rank, own) in &pending {
            let Some((head, entry)) = own.first() else { continue };
            let is_behind = |member: &u32| {
                let theirs = pending.get(member).map_or(&[][..], Vec::as_slice);
                theirs.first().is_some_and(|(h, _)| h != head) && theirs.iter().any(|(h, _)| h == head)
            };
            let group = &groups[head.0];
            let awaited = group.members.iter().copied().filter(is_behind).collect();
            waits.add(*rank, Wait { entry, group: group.label(), awaited });
        }
        waits
    }

    fn add_front(&mut self, group: &GroupSequences<'a>, front: &GroupFront) {
        let absent = front.behind.iter().chain(&front.missing).chain(&front.older);
        let awaited: BTreeSet<u32> = absent.copied().collect();
        self.older.extend(&front.older);
        for rank in &front.waiting {
            let sequence = group.sequences.get(rank);
            let Some(entry) = sequence.and_then(|s| s.first_after(front.completed)) else { continue };
            self.add(*rank, Wait { entry, group: group.label(), awaited: awaited.clone() });
        }
        let first = front.waiting.first().and_then(|r| group.sequences.get(r)?.first_after(front.completed));
        if let (true, Some(entry)) = (awaited.is_empty(), first) {
            self.stalled.push(StalledCollective {
                group: group.label(),
                entry,
                started: front.started.clone(),
                members: front.waiting.clone(),
                behind: front.device_behind.clone(),
            });
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
    pub(super) fn find_roots(&self) -> BTreeSet<u32> {
        let awaited = self.by_rank.values().flat_map(|w| w.awaited.iter().copied());
        awaited.filter(|r| self.by_rank.get(r).is_none_or(|w| w.awaited.is_empty())).collect()
    }

    /// Returns in what the device of a rank waits together with all peers, whose hosts enqueued their sides,
    /// and for which devices. Returns `None` if the device is idle, or behind a device that completed its
    /// side.
    pub(super) fn find_held(
        rank: u32,
        dumps: &'a BTreeMap<u32, FlightDump>,
        groups: &[GroupSequences<'a>],
    ) -> Option<Wait<'a>> {
        let head = dumps.get(&rank)?.list_pending().next()?;
        let group = groups.iter().find(|g| *g.name == *head.group && g.sequences.contains_key(&rank))?;
        let peers: Vec<u32> = match parse_transfer(&head.op).filter(|_| head.is_p2p) {
            Some((_, peer)) => vec![*group.members.get(peer)?],
            None => group.members.iter().copied().filter(|r| *r != rank).collect(),
        };
        let own_index = group.members.iter().position(|r| *r == rank);
        let is_side = |e: &FlightEntry| {
            e.group == head.group
                && e.is_p2p == head.is_p2p
                && if head.is_p2p {
                    parse_transfer(&e.op).is_some_and(|(_, peer)| Some(peer) == own_index)
                } else {
                    e.sequence == head.sequence
                }
        };
        let mut awaited = BTreeSet::new();
        for peer in peers {
            let mut pending = dumps.get(&peer)?.list_pending().peekable();
            if !pending.peek().is_some_and(|first| is_side(first)) {
                awaited.insert(peer);
            }
            pending.find(|e| is_side(e))?;
        }
        Some(Wait { entry: head, group: group.label(), awaited })
    }

    /// Returns the waits without those of some ranks.
    pub(super) fn without(&self, is_left_out: impl Fn(u32, &Wait<'a>) -> bool) -> Waits<'a> {
        let mut others = self.clone();
        others.by_rank.retain(|rank, wait| !is_left_out(*rank, wait));
        others
    }

    /// Returns the ranks of a cycle of waits, in the order in which each waits for the next.
    pub(super) fn find_cycle(&self) -> Option<Vec<u32>> {
        let awaited_by = |rank: &u32| self.by_rank.get(rank).map(|w| w.awaited.iter());
        // Ranks from which every chain of waits ends.
        let mut ended: BTreeSet<u32> = BTreeSet::new();
        for start in self.by_rank.keys() {
            let mut path = vec![(*start, awaited_by(start))];
            let mut on_path = BTreeSet::from([*start]);
            while let Some((rank, awaited)) = path.last_mut() {
                let next = awaited.as_mut().and_then(|a| a.find(|next| !ended.contains(next)));
                match next {
                    None => {
                        ended.insert(*rank);
                        on_path.remove(rank);
                        path.pop();
                    }
                    Some(next) if on_path.insert(*next) => path.push((*next, awaited_by(next))),
                    Some(next) => {
                        let cycle = path.iter().map(|(rank, _)| *rank);
                        return Some(cycle.skip_while(|rank| rank != next).collect());
                    }
                }
            }
        }
        None
    }
}

/// A position of a group: index of the group, and the collective's number.
type Position = (usize, u64);

/// Lists the collectives of each rank that no member's device completed, in the order of the program.
fn list_pending<'a>(
    dumps: &'a BTreeMap<u32, FlightDump>,
    groups: &[GroupSequences<'a>],
) -> BTreeMap<u32, Vec<(Position, &'a FlightEntry)>> {
    let mut pending: BTreeMap<u32, Vec<(Position, &FlightEntry)>> =
        dumps.keys().map(|rank| (*rank, Vec::new())).collect();
    for (at, group) in groups.iter().enumerate() {
        let completed = group.last_completed();
        for (rank, sequence) in &group.sequences {
            let waiting = sequence.list_after(completed).map(|e| ((at, e.sequence), e));
            pending.entry(*rank).or_default().extend(waiting);
        }
    }
    pending.values_mut().for_each(|own| own.sort_by_key(|(_, e)| e.record_id));
    pending
}

/// The members of a group by how far they came.
#[derive(Debug, Default)]
struct GroupFront {
    /// Number of the last collective that some member completed.
    completed: u64,
    /// Ranks that enqueued the next one.
    waiting: Vec<u32>,
    /// Ranks that did not enqueue it.
    behind: Vec<u32>,
    /// Ranks without a dump.
    missing: Vec<u32>,
    /// Ranks whose dump is older than another's: that one completed what this one had not enqueued.
    older: Vec<u32>,
    /// Ranks whose device started it, if the recorder shows that.
    started: Vec<u32>,
    /// Ranks that enqueued as much as any member, and whose device did not complete what another did.
    device_behind: Vec<u32>,
}

impl GroupFront {
    /// Returns the front of a group, if a member waits there.
    fn find(group: &GroupSequences<'_>) -> Option<GroupFront> {
        let completed = group.last_completed();
        let sequences = group.sequences.values();
        let next = sequences.filter_map(|m| m.first_after(completed)).map(|e| e.sequence).min()?;
        let newest = group.sequences.values().map(|m| m.last_enqueued).max().unwrap_or(0);
        let missing = group.members.iter().copied().filter(|r| !group.sequences.contains_key(r));
        let mut front = GroupFront { completed, missing: missing.collect(), ..GroupFront::default() };
        for (rank, member) in &group.sequences {
            let side = match member.last_enqueued {
                n if n >= next => &mut front.waiting,
                // A ring that lost the group's head may have lost all of it.
                n if n < completed && (n > 0 || !member.lost_head) => &mut front.older,
                0 if member.lost_head => &mut front.older,
                // Peers completed with it what is pending here: its dump may be of an earlier moment.
                n if n == completed && member.is_pending(n) => &mut front.older,
                _ => &mut front.behind,
            };
            side.push(*rank);
            let is_started = |e: &&FlightEntry| e.state == EntryState::Started;
            if member.calls.get(&next).is_some_and(is_started) {
                front.started.push(*rank);
            }
            // A dump of an earlier moment would hold fewer collectives.
            if member.is_pending(completed) && member.last_enqueued == newest {
                front.device_behind.push(*rank);
            }
        }
        Some(front)
    }
}

impl FlightDump {
    /// Lists what the rank's device did not complete, in the order of the program.
    fn list_pending(&self) -> impl Iterator<Item = &FlightEntry> {
        self.entries.iter().filter(|e| e.state != EntryState::Completed && &*e.op != COALESCED_LAUNCH)
    }
}

impl GroupSequences<'_> {
    /// Returns the last number that the device of some member completed, or 0.
    fn last_completed(&self) -> u64 {
        self.sequences.values().map(MemberSequence::last_completed).max().unwrap_or(0)
    }
}

impl MemberSequence<'_> {
    /// Returns whether the rank enqueued this collective and its device did not complete it.
    pub(super) fn is_pending(&self, sequence: u64) -> bool {
        self.calls.get(&sequence).is_some_and(|e| e.state != EntryState::Completed)
    }
}
