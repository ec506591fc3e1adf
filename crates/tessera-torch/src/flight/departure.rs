//! The first position of a group at which a rank departed from its peers.

use super::dump::{EntryState, FlightEntry};
use super::sequence::GroupSequences;
use super::shift::{Shift, ShiftKind, find_shift};
use super::signature::{MatchBy, SignatureField, find_difference};

/// Maximum number of sides of a position that are compared by call site. Ranks whose call sites all differ
/// run different programs, in which no site is the right one.
const MAX_SIDES: usize = 8;

/// How a rank departed from its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DepartureKind {
    /// The rank skipped collectives or issued extra ones.
    Shifted(Shift),
    /// The rank issued another collective, which differs first in this property.
    Other(SignatureField),
}

/// A position at which members issued different collectives.
#[derive(Debug, Clone)]
pub(super) struct Departure<'a> {
    /// Sequence number of the position.
    pub(super) sequence: u64,
    pub(super) kind: DepartureKind,
    /// Ranks that departed. If the dumps do not show which side did, the ranks of both.
    pub(super) ranks: Vec<u32>,
    /// What shows which side departed.
    pub(super) decision: Option<Decision>,
    /// Whether only the call sites differ here, because the collectives are of equal signature.
    pub(super) by_call_site: bool,
    /// What the ranks issued, each different collective once, with its ranks.
    pub(super) sides: Vec<(Vec<u32>, &'a FlightEntry)>,
    /// When the first rank issued its collective of this position, in nanoseconds since 1970.
    pub(super) created_ns: u64,
}

/// What shows which side departed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    /// More ranks are on the other side.
    Majority,
    /// Earlier in the run all ranks issued what the other side issued here.
    History,
}

/// Returns the first position at which members of a group issued different collectives.
pub(super) fn find_departure<'a>(group: &GroupSequences<'a>) -> Option<Departure<'a>> {
    let mut positions: Vec<u64> = group.sequences.values().flat_map(|s| s.calls.keys().copied()).collect();
    positions.sort_unstable();
    positions.dedup();
    let by_signature =
        positions.iter().find_map(|sequence| compare_position(group, *sequence, MatchBy::Signature));
    // Collectives of equal signature that are out of step differ in their call sites alone. A run that
    // does not wait has no reason to be examined so closely.
    let waits =
        group.sequences.values().flat_map(|s| s.calls.values()).any(|e| e.state != EntryState::Completed);
    // Before the first difference all signatures are equal, so the hashes of the call sites decide.
    let end = by_signature.as_ref().map_or(u64::MAX, |d| d.sequence);
    let mut before = positions.iter().take_while(|sequence| waits && **sequence < end);
    let by_call_site = before.find_map(|sequence| {
        let is_candidate = has_several_sites(group, *sequence);
        is_candidate.then(|| compare_position(group, *sequence, MatchBy::CallSite)).flatten()
    });
    by_call_site.or(by_signature)
}

/// Returns whether members issued their collectives of a position from different call sites.
fn has_several_sites(group: &GroupSequences<'_>, sequence: u64) -> bool {
    let mut sites = group.sequences.values().filter_map(|s| Some(s.calls.get(&sequence)?.stack_hash));
    sites.next().is_some_and(|first| sites.any(|site| site != first))
}

/// Ranks that issued the same collective at a position.
struct Side<'a> {
    ranks: Vec<u32>,
    entry: &'a FlightEntry,
}

fn compare_position<'a>(group: &GroupSequences<'a>, sequence: u64, by: MatchBy) -> Option<Departure<'a>> {
    let mut sides = split_position(group, sequence, by);
    if sides.len() < 2 || by == MatchBy::CallSite && sides.len() > MAX_SIDES {
        return None;
    }
    sides.sort_by_key(|side| std::cmp::Reverse(side.ranks.len()));
    let is_majority = sides[0].ranks.len() > sides[1].ranks.len();
    // Between equal sides, the one that runs a line twice in a row is taken for the one that departed, if
    // both readings fit.
    if !is_majority && repeats_call(group, sequence, &sides[0]) && !repeats_call(group, sequence, &sides[1]) {
        sides.swap(0, 1);
    }
    let [peer, rank] = [&sides[0], &sides[1]].map(|side| group.sequences.get(&side.ranks[0]));
    let shift = find_shift(peer?, rank?, sequence, by);
    if by == MatchBy::CallSite && shift.is_none() {
        return None;
    }
    let field = find_difference(sides[0].entry, sides[1].entry).unwrap_or(SignatureField::Op);
    let at_fault = sides.iter().skip(usize::from(is_majority));
    let mut departure = Departure {
        sequence,
        kind: DepartureKind::Other(field),
        ranks: at_fault.flat_map(|side| side.ranks.clone()).collect(),
        decision: is_majority.then_some(Decision::Majority),
        by_call_site: by == MatchBy::CallSite,
        sides: sides.iter().map(|side| (side.ranks.clone(), side.entry)).collect(),
        created_ns: sides.iter().map(|side| side.entry.created_ns).min().unwrap_or(0),
    };
    match shift {
        Some(shift) if is_majority => departure.kind = DepartureKind::Shifted(shift),
        None if is_majority => {}
        _ => decide_by_history(group, &mut departure, &sides, shift, by),
    }
    departure.ranks.sort_unstable();
    Some(departure)
}

fn split_position<'a>(group: &GroupSequences<'a>, sequence: u64, by: MatchBy) -> Vec<Side<'a>> {
    let mut sides: Vec<Side<'a>> = Vec::new();
    for (rank, member) in &group.sequences {
        let Some(entry) = member.calls.get(&sequence).copied() else { continue };
        match sides.iter_mut().find(|side| by.are_equal(side.entry, entry)) {
            Some(side) => side.ranks.push(*rank),
            None => sides.push(Side { ranks: vec![*rank], entry }),
        }
        if sides.len() > MAX_SIDES && by == MatchBy::CallSite {
            break;
        }
    }
    sides
}

/// Returns whether a side issued the same collective from the same line just before.
fn repeats_call(group: &GroupSequences<'_>, sequence: u64, side: &Side<'_>) -> bool {
    let member = side.ranks.first().and_then(|rank| group.sequences.get(rank));
    let before = member.and_then(|m| m.calls.range(..sequence).next_back());
    before.is_some_and(|(_, e)| MatchBy::CallSite.are_equal(e, side.entry))
}

/// Decides between two sides of equal size by what the ranks did before: a collective that all ranks
/// issued earlier, from the same line, belongs to the program.
fn decide_by_history(
    group: &GroupSequences<'_>,
    departure: &mut Departure<'_>,
    sides: &[Side<'_>],
    shift: Option<Shift>,
    by: MatchBy,
) {
    let seen_before: Vec<bool> =
        sides.iter().map(|side| was_issued_before(group, departure.sequence, side.entry, by)).collect();
    let Some(shift) = shift else {
        if sides.len() == 2 && seen_before[0] != seen_before[1] {
            departure.ranks.clone_from(&sides[usize::from(seen_before[0])].ranks);
            departure.decision = Some(Decision::History);
        }
        return;
    };
    // Which side issued the collectives that the other lacks.
    let holder = match shift.kind {
        ShiftKind::Skipped => 0,
        ShiftKind::Extra => 1,
    };
    let other = 1 - holder;
    let (kind, side) =
        if seen_before[holder] { (ShiftKind::Skipped, other) } else { (ShiftKind::Extra, holder) };
    departure.kind = DepartureKind::Shifted(Shift { kind, ..shift });
    // A collective that nobody issued before may as well be new on all ranks but one, unless the other
    // side went on as in earlier rounds.
    if seen_before[holder] || seen_before[other] {
        departure.ranks.clone_from(&sides[side].ranks);
        departure.decision = Some(Decision::History);
    }
}

/// Returns whether every rank issued this collective before, from the same line.
fn was_issued_before(group: &GroupSequences<'_>, sequence: u64, entry: &FlightEntry, by: MatchBy) -> bool {
    group.sequences.values().all(|member| {
        let mut before = member.calls.range(..sequence);
        before.any(|(_, e)| e.stack_hash == entry.stack_hash && by.are_equal(e, entry))
    })
}
