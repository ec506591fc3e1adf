//! The first position of a group at which a rank departed from its peers.

use super::dump::EntryState;
use super::sequence::{Call, CallSignature, GroupSequences, MemberSequence};

/// How many of the following collectives must agree to call one skipped or extra.
const LOOK_AHEAD: usize = 3;

/// How a rank departed from its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DepartureKind {
    /// The rank did not issue a collective that its peers issued.
    Skipped,
    /// The rank issued a collective that its peers did not issue.
    Extra,
    /// The rank issued another collective, named by the first field that differs.
    Other(&'static str),
}

/// A position at which members issued different collectives.
#[derive(Debug, Clone)]
pub(crate) struct Departure<'a> {
    /// Sequence number of the position.
    pub(crate) sequence: u64,
    pub(crate) kind: DepartureKind,
    /// Ranks that departed. If nothing tells the sides apart, the ranks of both.
    pub(crate) ranks: Vec<u32>,
    /// Whether a majority, or the collectives before, tell which side departed.
    pub(crate) decided: Option<Decision>,
    /// What the ranks issued, each different collective once, with its ranks.
    pub(crate) sides: Vec<(Vec<u32>, Call<'a>)>,
    /// When the first rank issued its collective of this position, in nanoseconds since 1970.
    pub(crate) created_ns: u64,
}

/// What tells which side departed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// More ranks are on the other side.
    Majority,
    /// Earlier in the run all ranks issued what the other side issued here.
    History,
}

/// Returns the first position at which members of a group issued different collectives.
pub(crate) fn find_departure<'a>(group: &GroupSequences<'a>) -> Option<Departure<'a>> {
    let mut positions: Vec<u64> = group.sequences.values().flat_map(|s| s.calls.keys().copied()).collect();
    positions.sort_unstable();
    positions.dedup();
    positions.into_iter().find_map(|sequence| compare_position(group, sequence))
}

fn compare_position<'a>(group: &GroupSequences<'a>, sequence: u64) -> Option<Departure<'a>> {
    let mut sides: Vec<(CallSignature, Vec<u32>, Call<'a>)> = Vec::new();
    for (rank, member) in &group.sequences {
        let Some(call) = member.calls.get(&sequence) else { continue };
        let signature = CallSignature::from_entry(call.entry);
        match sides.iter_mut().find(|(s, ..)| s.find_difference(&signature).is_none()) {
            Some((_, ranks, _)) => ranks.push(*rank),
            None => sides.push((signature, vec![*rank], *call)),
        }
    }
    if sides.len() < 2 {
        return None;
    }
    sides.sort_by_key(|(_, ranks, _)| std::cmp::Reverse(ranks.len()));
    let created_ns = sides.iter().map(|(.., call)| call.entry.created_ns).min().unwrap_or(0);
    let is_majority = sides[0].1.len() > sides[1].1.len();
    let mut departure = Departure {
        sequence,
        kind: DepartureKind::Other(sides[0].0.find_difference(&sides[1].0).unwrap_or("op")),
        ranks: sides.iter().skip(usize::from(is_majority)).flat_map(|(_, ranks, _)| ranks.clone()).collect(),
        decided: is_majority.then_some(Decision::Majority),
        sides: sides.iter().map(|(_, ranks, call)| (ranks.clone(), *call)).collect(),
        created_ns,
    };
    if is_majority {
        if let Some(kind) = shift_kind(group, sequence, sides[0].1[0], sides[1].1[0]) {
            departure.kind = kind;
        }
    } else {
        decide_by_history(group, &mut departure, &sides);
    }
    departure.ranks.sort_unstable();
    Some(departure)
}

/// Returns whether a rank skipped a collective or issued an extra one, if its later collectives are
/// those of a peer, shifted by one.
fn shift_kind(group: &GroupSequences<'_>, sequence: u64, peer: u32, rank: u32) -> Option<DepartureKind> {
    let peer = group.sequences.get(&peer)?;
    let rank = group.sequences.get(&rank)?;
    if is_shifted(rank, sequence, peer, sequence + 1) {
        Some(DepartureKind::Skipped)
    } else if is_shifted(rank, sequence + 1, peer, sequence) {
        Some(DepartureKind::Extra)
    } else {
        None
    }
}

/// Returns whether the collectives of two ranks agree from these positions on, as far as both go.
fn is_shifted(a: &MemberSequence<'_>, from_a: u64, b: &MemberSequence<'_>, from_b: u64) -> bool {
    let calls = |m: &MemberSequence<'_>, from: u64| -> Vec<CallSignature> {
        m.calls.range(from..).take(LOOK_AHEAD).map(|(_, c)| CallSignature::from_entry(c.entry)).collect()
    };
    let (a, b) = (calls(a, from_a), calls(b, from_b));
    !a.is_empty() && !b.is_empty() && a.iter().zip(&b).all(|(a, b)| a.find_difference(b).is_none())
}

/// Decides between two sides of equal size by what the ranks did before: a collective that all ranks
/// issued earlier, from the same line, belongs to the program.
fn decide_by_history(
    group: &GroupSequences<'_>,
    departure: &mut Departure<'_>,
    sides: &[(CallSignature, Vec<u32>, Call<'_>)],
) {
    let seen_before: Vec<bool> =
        sides.iter().map(|side| was_issued_before(group, departure.sequence, side)).collect();
    let shift = shift_kind(group, departure.sequence, sides[0].1[0], sides[1].1[0]);
    // Which side issued the collective that the other lacks, if the rest is shifted by one.
    let holder = match shift {
        Some(DepartureKind::Skipped) => Some(0),
        Some(DepartureKind::Extra) => Some(1),
        _ => None,
    };
    if let Some(holder) = holder {
        let other = 1 - holder;
        let (kind, side) = if seen_before[holder] {
            (DepartureKind::Skipped, other)
        } else {
            (DepartureKind::Extra, holder)
        };
        departure.kind = kind;
        // A collective that nobody issued before may as well be new on all ranks but one, unless the
        // other side went on as in earlier rounds.
        if seen_before[holder] || seen_before[other] {
            departure.ranks.clone_from(&sides[side].1);
            departure.decided = Some(Decision::History);
        }
        return;
    }
    if sides.len() == 2 && seen_before[0] != seen_before[1] {
        departure.ranks.clone_from(&sides[usize::from(seen_before[0])].1);
        departure.decided = Some(Decision::History);
    }
}

/// Returns whether every rank issued a side's collective before, from the same line.
fn was_issued_before(
    group: &GroupSequences<'_>,
    sequence: u64,
    side: &(CallSignature, Vec<u32>, Call<'_>),
) -> bool {
    let (signature, _, call) = side;
    group.sequences.values().all(|member| {
        member.calls.range(..sequence).any(|(_, c)| {
            CallSignature::from_entry(c.entry).find_difference(signature).is_none()
                && c.entry.frames == call.entry.frames
        })
    })
}

/// The members of a group by how far they came.
#[derive(Debug, Default)]
pub(crate) struct GroupFront {
    /// Number of the first collective that no member completed although one enqueued it.
    pub(crate) sequence: u64,
    /// Ranks that enqueued it.
    pub(crate) waiting: Vec<u32>,
    /// Ranks that did not enqueue it.
    pub(crate) behind: Vec<u32>,
    /// Ranks without a dump.
    pub(crate) missing: Vec<u32>,
    /// Ranks whose dump is older than another's: that one completed what this one had not enqueued.
    pub(crate) older: Vec<u32>,
    /// Ranks whose device started it, if the recorder shows that.
    pub(crate) started: Vec<u32>,
}

/// Returns the front of a group, if a member waits there.
pub(crate) fn find_front(group: &GroupSequences<'_>) -> Option<GroupFront> {
    let completed = group.sequences.values().map(MemberSequence::last_completed).max()?;
    let pending = |m: &MemberSequence<'_>| m.calls.range(completed + 1..).next().map(|(seq, _)| *seq);
    let mut front = GroupFront {
        sequence: group.sequences.values().filter_map(pending).min()?,
        missing: group.members.iter().copied().filter(|r| !group.sequences.contains_key(r)).collect(),
        ..GroupFront::default()
    };
    for (rank, member) in &group.sequences {
        let side = match member.last_enqueued() {
            n if n >= front.sequence => &mut front.waiting,
            // A ring that lost the group's head may have lost all of it.
            n if n < completed && (n > 0 || !member.lost_head) => &mut front.older,
            0 if member.lost_head => &mut front.older,
            _ => &mut front.behind,
        };
        side.push(*rank);
        let call = member.calls.get(&front.sequence);
        if call.is_some_and(|c| c.state == EntryState::Started) {
            front.started.push(*rank);
        }
    }
    Some(front)
}
