//! Whether a rank skipped collectives or issued extra ones: what it issued later is then what a peer
//! issued, shifted by their number.

use super::dump::FlightEntry;
use super::sequence::MemberSequence;
use super::signature::MatchBy;

/// How many of the following collectives are compared.
const LOOK_AHEAD: usize = 3;
/// Maximum number of collectives that a rank skipped or issued in excess. Each number costs a comparison,
/// and the more are tried, the sooner one fits by chance.
const MAX_SHIFT: usize = 64;
/// Maximum number of collectives that distinguish two rounds of a program.
const MAX_CONTEXT: usize = 64;

/// By how much, and in which direction, a rank is out of step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shift {
    pub(super) kind: ShiftKind,
    /// How many collectives the rank skipped or issued in excess.
    pub(super) count: usize,
    /// Whether a rank waits before what shows the shift, so that its earlier rounds stand for that.
    pub(super) is_predicted: bool,
}

/// The direction of a shift.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ShiftKind {
    /// The rank did not issue collectives that its peers issued.
    Skipped,
    /// The rank issued collectives that its peers did not issue.
    Extra,
}

/// Returns by how much a rank is out of step with a peer, if both issued a collective of this number.
pub(super) fn find_shift(
    peer: &MemberSequence<'_>,
    rank: &MemberSequence<'_>,
    sequence: u64,
    by: MatchBy,
) -> Option<Shift> {
    let read_site = |s: &MemberSequence<'_>| s.calls.get(&sequence).map(|e| e.stack_hash);
    let is_same_site = read_site(rank) == read_site(peer);
    // One line that passed two sizes is more often a wrong size than a shift, so earlier rounds are no
    // evidence there. Where only call sites differ, a shift alone accuses the rank, so both ranks must have
    // issued all that shows it.
    let predicts = by == MatchBy::Signature && !is_same_site;
    let (peer, rank) = (&Window::read(peer, sequence, predicts), &Window::read(rank, sequence, predicts));
    let in_step = count_equal(rank, 1, peer, 1, by, Reach::Issued);
    // Two stacks that differ in one place alone, such as a branch on the rank, are no shift.
    if by == MatchBy::CallSite && in_step.is_none_or(|n| n > 0) {
        return None;
    }
    // The same call in another size, after which the ranks go on in step, is no shift either.
    let goes_on = || count_equal(rank, 1, peer, 1, MatchBy::CallSite, Reach::Issued);
    if is_same_site && read_site_of(rank) != 0 && goes_on().is_some_and(|n| n > 0) {
        return None;
    }
    find_single_shift(peer, rank, by).or_else(|| find_long_shift(peer, rank, by))
}

fn read_site_of(window: &Window<'_>) -> u64 {
    window.entries.first().map_or(0, |e| e.stack_hash)
}

/// Returns whether the rank is out of step by one collective.
///
/// The order of the four tests decides between two readings. Let a program issue A and B in every round,
/// and let a rank issue B, B, A while its peers wait in A after B: the rank issued B once too often, or it
/// skipped A. The first reading has one line run twice in a row, which no earlier round did, and in the
/// second the rank goes on as in every round. So what the peers' earlier rounds predict after A comes
/// before the first reading.
fn find_single_shift(peer: &Window<'_>, rank: &Window<'_>, by: MatchBy) -> Option<Shift> {
    let needed = if by == MatchBy::CallSite { 2 } else { 1 };
    for (kind, from_rank, from_peer) in [(ShiftKind::Skipped, 0, 1), (ShiftKind::Extra, 1, 0)] {
        let issued = count_equal(rank, from_rank, peer, from_peer, by, Reach::Issued);
        let predicted = || count_equal(rank, from_rank, peer, from_peer, by, Reach::Predicted);
        if issued.or_else(predicted).is_some_and(|n| n >= needed) {
            return Some(Shift { kind, count: 1, is_predicted: issued.is_none() });
        }
    }
    None
}

/// Returns by how many collectives the rank is out of step, two or more. Among so many numbers one fits
/// by chance sooner, so all pairs that are looked at must be of one line, and the ranks must not go on in
/// step.
fn find_long_shift(peer: &Window<'_>, rank: &Window<'_>, by: MatchBy) -> Option<Shift> {
    if count_equal(rank, 1, peer, 1, by, Reach::Predicted).is_some_and(|n| n > 0) {
        return None;
    }
    let fits = |from_rank, from_peer| {
        let equal = count_equal(rank, from_rank, peer, from_peer, MatchBy::CallSite, Reach::Predicted);
        equal == Some(LOOK_AHEAD)
    };
    let is_issued = |w: &Window<'_>, from: usize| from + LOOK_AHEAD <= w.issued;
    (2..=MAX_SHIFT).find_map(|count| {
        if fits(0, count) {
            let is_predicted = !is_issued(rank, 0) || !is_issued(peer, count);
            Some(Shift { kind: ShiftKind::Skipped, count, is_predicted })
        } else if count <= rank.issued && fits(count, 0) {
            let is_predicted = !is_issued(rank, count) || !is_issued(peer, 0);
            Some(Shift { kind: ShiftKind::Extra, count, is_predicted })
        } else {
            None
        }
    })
}

/// What a rank issued from one position on, and what its earlier rounds predict after that.
struct Window<'a> {
    entries: Vec<&'a FlightEntry>,
    /// How many of the entries the rank issued there.
    issued: usize,
}

impl<'a> Window<'a> {
    fn read(member: &MemberSequence<'a>, sequence: u64, predicts: bool) -> Window<'a> {
        let size = MAX_SHIFT + LOOK_AHEAD;
        let mut entries: Vec<&FlightEntry> =
            member.calls.range(sequence..).take(size).map(|(_, e)| *e).collect();
        let issued = entries.len();
        if predicts && issued < size {
            entries.extend(predict_next(member, size - issued));
        }
        Window { entries, issued }
    }
}

/// Predicts what a rank issues next: what followed in the round whose end resembles what it issued last the
/// longest, the latest such round first.
fn predict_next<'a>(member: &MemberSequence<'a>, wanted: usize) -> Vec<&'a FlightEntry> {
    let calls: Vec<&FlightEntry> = member.calls.values().copied().collect();
    let Some(last) = calls.len().checked_sub(1) else { return Vec::new() };
    let count_common = |end: usize| {
        let is_equal = |back: &usize| MatchBy::CallSite.are_equal(calls[end - back], calls[last - back]);
        (0..MAX_CONTEXT.min(end + 1)).take_while(is_equal).count()
    };
    let mut best = (0, 0);
    for end in (0..last).rev() {
        let common = count_common(end);
        if common > best.0 {
            best = (common, end);
        }
        if common == MAX_CONTEXT {
            break;
        }
    }
    let (common, end) = best;
    if common == 0 {
        return Vec::new();
    }
    // What followed ends where the rank waits, and from there the round begins again.
    let round = &calls[end + 1..];
    round.iter().cycle().take(wanted).copied().collect()
}

/// Which entries of two windows are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    /// What both ranks issued.
    Issued,
    /// What at least one rank issued. What the other is predicted to issue must be of the same line.
    Predicted,
}

/// Returns how many of the next collectives of two ranks were compared and are all equal, or `Some(0)` if
/// one differs, or `None` if there is nothing to compare.
fn count_equal(
    a: &Window<'_>,
    from_a: usize,
    b: &Window<'_>,
    from_b: usize,
    by: MatchBy,
    reach: Reach,
) -> Option<usize> {
    let mut count = 0;
    for i in 0..LOOK_AHEAD {
        let (at_a, at_b) = (from_a + i, from_b + i);
        let (has_a, has_b) = (at_a < a.issued, at_b < b.issued);
        let is_compared = has_a && has_b || reach == Reach::Predicted && (has_a || has_b);
        let (Some(a), Some(b), true) = (a.entries.get(at_a), b.entries.get(at_b), is_compared) else { break };
        let by = if has_a && has_b { by } else { MatchBy::CallSite };
        if !by.are_equal(a, b) {
            return Some(0);
        }
        count += 1;
    }
    (count > 0).then_some(count)
}
