//! From departures and waits to the ranks at fault, with how sure the dumps make it.

use std::collections::{BTreeMap, BTreeSet};

use super::departure::{Decision, Departure, DepartureKind, find_departure};
use super::dump::{EntryState, FlightDump, FlightEntry};
use super::findings::{CallSide, Certainty, FaultKind, FlightFinding, list_ranks};
use super::sequence::GroupSequences;
use super::shift::{Shift, ShiftKind};
use super::signature::SignatureField;
use super::transfer::{MismatchedTransfer, Transfers};
use super::wait::{StalledCollective, Wait, Waits};

/// Finds what the ranks' hosts did: a departure, a cycle of waits, or the ranks at which waits end.
pub(super) fn find_causes<'a>(
    dumps: &'a BTreeMap<u32, FlightDump>,
    groups: &[GroupSequences<'a>],
    transfers: &Transfers<'a>,
    waits: &Waits<'a>,
    moving: &BTreeSet<u32>,
) -> Vec<FlightFinding> {
    let departures = explain_departures(dumps, groups);
    if !departures.is_empty() {
        return departures;
    }
    if let Some(mismatch) = transfers.find_mismatch(groups) {
        return vec![explain_mismatch(&mismatch)];
    }
    // A rank that made progress when it wrote its dump waits no longer than any rank does in a run that goes
    // on. If its peer was killed, it wrote the dump at once.
    let is_short = |rank: u32, wait: &Wait<'_>| {
        moving.contains(&rank) && wait.awaited.iter().all(|r| dumps.contains_key(r))
    };
    let waits = &waits.without(is_short);
    if let Some(cycle) = waits.find_cycle() {
        let mut finding = explain_cycle(&cycle, waits, groups);
        finding.add_doubts_of_aborts(waits, transfers);
        return vec![finding];
    }
    explain_roots(dumps, waits, groups, moving)
}

impl FlightFinding {
    /// Adds the doubt that a wait of the finding rests on: its receive reads as completed.
    fn add_doubts_of_aborts(&mut self, waits: &Waits<'_>, transfers: &Transfers<'_>) {
        let is_aborted = |rank: &&u32| {
            let wait = waits.by_rank.get(*rank);
            wait.is_some_and(|w| transfers.is_aborted(**rank, w.entry.record_id))
        };
        let ended: Vec<u32> = self.ranks.iter().filter(is_aborted).copied().collect();
        if !ended.is_empty() {
            self.certainty = Certainty::Likely;
            self.doubts.push(format!(
                "a receive of {} reads as completed; its peer has no send for it, so an abort ended it",
                list_ranks(&ended)
            ));
        }
    }
}

/// Finds what the ranks' devices did, once every host enqueued its side.
pub(super) fn find_device_causes(
    stalled: &[StalledCollective<'_>],
    devices: &Waits<'_>,
) -> Vec<FlightFinding> {
    if let Some(cycle) = devices.find_cycle() {
        return vec![explain_device_cycle(&cycle, devices, &[])];
    }
    stalled.iter().find_map(explain_stall).into_iter().collect()
}

/// Explains where ranks departed. A rank that departed is out of step in its other groups too, so what
/// differs there later is a consequence.
fn explain_departures(
    dumps: &BTreeMap<u32, FlightDump>,
    groups: &[GroupSequences<'_>],
) -> Vec<FlightFinding> {
    let mut departures: Vec<_> = groups.iter().filter_map(|g| Some((g, find_departure(g)?))).collect();
    departures.sort_by_key(|(_, d)| d.created_ns);
    let mut findings: Vec<FlightFinding> = Vec::new();
    for (group, departure) in departures {
        let is_consequence =
            findings.iter().flat_map(|f| &f.ranks).any(|rank| group.sequences.contains_key(rank));
        if !is_consequence {
            findings.push(explain_departure(dumps, group, &departure));
        }
    }
    findings
}

fn explain_departure(
    dumps: &BTreeMap<u32, FlightDump>,
    group: &GroupSequences<'_>,
    departure: &Departure<'_>,
) -> FlightFinding {
    let shift = match departure.kind {
        DepartureKind::Shifted(shift) => Some(shift),
        DepartureKind::Other(_) => None,
    };
    let mut doubts = Vec::new();
    let lost = group.sequences.values().filter(|s| s.lost_head);
    let first_known = lost.filter_map(|s| s.calls.keys().next()).max();
    if first_known.is_some_and(|first| *first >= departure.sequence) {
        doubts.push("the rings lost what came before, so an earlier departure may be lost too".to_string());
    }
    if group.members.iter().any(|r| !dumps.contains_key(r)) {
        doubts.push("a member of the group left no dump".to_string());
    }
    if departure.by_call_site {
        doubts.push(
            "the collectives are of equal size here; their call sites alone show the shift".to_string(),
        );
    }
    if shift.is_some_and(|s| s.is_predicted) {
        doubts.push(
            "ranks wait before what shows the shift; earlier rounds show what they issue next".to_string(),
        );
    }
    doubts.extend(match departure.decision {
        Some(Decision::Majority) => None,
        Some(Decision::History) => Some(
            "the sides have equally many ranks; earlier rounds of the program show which one departed".into(),
        ),
        None => {
            Some("the sides have equally many ranks, and no earlier round shows which one departed".into())
        }
    });
    let certainty = match (departure.decision, doubts.len()) {
        (None, _) => Certainty::Unclear,
        (_, 0) => Certainty::Certain,
        _ => Certainty::Likely,
    };
    let sides = departure.sides.iter();
    FlightFinding {
        kind: kind_of_departure(departure.kind),
        ranks: departure.ranks.clone(),
        certainty,
        doubts,
        group: group.label(),
        sequence: Some(departure.sequence),
        count: shift.map(|s| s.count),
        sides: sides.map(|(ranks, e)| CallSide::from_entry(ranks.clone(), e, group.label())).collect(),
    }
}

fn kind_of_departure(kind: DepartureKind) -> FaultKind {
    match kind {
        DepartureKind::Shifted(Shift { kind: ShiftKind::Skipped, .. }) => FaultKind::Skipped,
        DepartureKind::Shifted(Shift { kind: ShiftKind::Extra, .. }) => FaultKind::Extra,
        DepartureKind::Other(field) => kind_of_field(field),
    }
}

fn kind_of_field(field: SignatureField) -> FaultKind {
    match field {
        SignatureField::Op => FaultKind::OtherOp,
        SignatureField::Dtype => FaultKind::OtherDtype,
        SignatureField::Shape => FaultKind::OtherShape,
    }
}

fn explain_mismatch(mismatch: &MismatchedTransfer<'_>) -> FlightFinding {
    let side =
        |(rank, entry): (u32, &FlightEntry)| CallSide::from_entry(vec![rank], entry, mismatch.group.clone());
    FlightFinding {
        kind: kind_of_field(mismatch.field),
        ranks: BTreeSet::from([mismatch.sender.0, mismatch.receiver.0]).into_iter().collect(),
        certainty: Certainty::Unclear,
        doubts: vec!["nothing shows which of sender and receiver is right".to_string()],
        group: mismatch.group.clone(),
        sequence: None,
        count: None,
        sides: vec![side(mismatch.sender), side(mismatch.receiver)],
    }
}

/// Explains a cycle in which devices wait.
fn explain_device_cycle(cycle: &[u32], waits: &Waits<'_>, groups: &[GroupSequences<'_>]) -> FlightFinding {
    let mut finding = explain_cycle(cycle, waits, groups);
    if let Some((rank, skipped)) = find_skipping_rank(cycle, waits, groups) {
        finding.kind = FaultKind::Skipped;
        finding.ranks = vec![rank];
        finding.group.clone_from(&skipped.group);
        finding.sequence = Some(skipped.entry.sequence);
        finding.doubts = vec!["the rank may have been about to issue it later".to_string()];
    }
    finding.certainty = Certainty::Likely;
    finding.doubts.push(
        "dumps do not record streams: two collectives on streams of their own do not wait for each other"
            .to_string(),
    );
    finding
}

/// Returns the one rank of a cycle that went on to a collective which a peer issued after another one, and
/// the wait of that peer in the other one, which most of its members issued.
fn find_skipping_rank<'w, 'a>(
    cycle: &[u32],
    waits: &'w Waits<'a>,
    groups: &[GroupSequences<'a>],
) -> Option<(u32, &'w Wait<'a>)> {
    let find_skipped = |rank: u32| {
        let own = waits.by_rank.get(&rank).filter(|w| !w.entry.is_p2p)?;
        let group = groups.iter().find(|g| *g.name == *own.entry.group && g.sequences.contains_key(&rank))?;
        let is_skipped = |(peer, theirs): &(&u32, &Wait<'_>)| {
            let issued = waits.by_rank.values().filter(|w| w.is_same_collective(theirs)).count();
            let after = group.sequences.get(*peer).and_then(|s| s.calls.get(&own.entry.sequence));
            !theirs.entry.is_p2p
                && theirs.awaited.contains(&rank)
                && theirs.awaited.len() < issued
                && after.is_some_and(|e| e.record_id > theirs.entry.record_id)
        };
        waits.by_rank.iter().find(is_skipped).map(|(_, theirs)| (rank, theirs))
    };
    let mut found = cycle.iter().filter_map(|rank| find_skipped(*rank));
    found.next().filter(|_| found.next().is_none())
}

/// Explains ranks that wait for each other. If the ranks wait in two collectives alone, and fewer of them
/// in one, those departed.
fn explain_cycle(cycle: &[u32], waits: &Waits<'_>, groups: &[GroupSequences<'_>]) -> FlightFinding {
    let in_cycle: Vec<(u32, &Wait<'_>)> =
        cycle.iter().filter_map(|r| Some((*r, waits.by_rank.get(r)?))).collect();
    let mut sides: Vec<(Vec<u32>, &Wait<'_>)> = Vec::new();
    for (rank, wait) in in_cycle {
        // All ranks that wait in the same collective stand on the same side.
        let same = waits.by_rank.iter().filter(|(_, w)| w.is_same_collective(wait)).map(|(r, _)| *r);
        if !sides.iter().any(|(ranks, _)| ranks.contains(&rank)) {
            sides.push((same.collect(), wait));
        }
    }
    // A rank without which no chain of waits closes is the one that others have in common.
    let is_common = |rank: &&u32| waits.without(|r, _| r == **rank).find_cycle().is_none();
    let common: Vec<u32> = cycle.iter().filter(is_common).copied().collect();
    let mut finding = FlightFinding {
        kind: FaultKind::WaitCycle,
        ranks: if common.len() == 1 { common } else { cycle.to_vec() },
        certainty: Certainty::Certain,
        doubts: Vec::new(),
        group: sides.first().map_or(String::new(), |(_, w)| w.group.clone()),
        sequence: None,
        count: None,
        sides: sides
            .iter()
            .map(|(ranks, w)| CallSide::from_entry(ranks.clone(), w.entry, w.group.clone()))
            .collect(),
    };
    if let [(few, wait), (many, other)] = &mut sides[..] {
        // A rank of one group alone could not have waited in the other's collective.
        let is_member = |r: &u32, ranks: &[u32], w: &Wait<'_>| ranks.contains(r) || w.awaited.contains(r);
        let mut in_both = (few.clone(), many.clone());
        in_both.0.retain(|r| is_member(r, many, other));
        in_both.1.retain(|r| is_member(r, few, wait));
        if in_both.0.len() > in_both.1.len() {
            (in_both, *wait) = ((in_both.1, in_both.0), other);
        }
        if in_both.0.len() == in_both.1.len() {
            return finding;
        }
        finding.ranks.clone_from(&in_both.0);
        if !was_issued_before(groups, wait.entry) {
            finding.kind = FaultKind::Extra;
            finding.group.clone_from(&wait.group);
            finding.sequence = (!wait.entry.is_p2p).then_some(wait.entry.sequence);
            finding.certainty = Certainty::Likely;
            finding.doubts.push("the others may have been about to issue it later".to_string());
        }
    }
    finding
}

/// Returns whether all members issued the same collective from the same line before.
fn was_issued_before(groups: &[GroupSequences<'_>], entry: &FlightEntry) -> bool {
    let own = groups.iter().filter(|g| *g.name == *entry.group);
    let mut members = own.flat_map(|g| g.sequences.values());
    entry.stack_hash != 0
        && members.all(|m| {
            let mut before = m.calls.range(..entry.sequence);
            before.any(|(_, e)| e.stack_hash == entry.stack_hash)
        })
}

/// Explains the ranks at which chains of waits end.
fn explain_roots<'a>(
    dumps: &'a BTreeMap<u32, FlightDump>,
    waits: &Waits<'a>,
    groups: &[GroupSequences<'a>],
    moving: &BTreeSet<u32>,
) -> Vec<FlightFinding> {
    let is_suspect = |r: &u32| !waits.older.contains(r) && !moving.contains(r);
    let mut roots: Vec<u32> = waits.find_roots().into_iter().filter(is_suspect).collect();
    // A host that issued as much as it may before its device goes on is not at fault for what the device
    // waits for.
    let mut with_devices = waits.clone();
    roots.retain(|root| match Waits::find_held(*root, dumps, groups) {
        Some(held) => {
            with_devices.by_rank.insert(*root, held);
            false
        }
        None => true,
    });
    if let Some(cycle) = roots.is_empty().then(|| with_devices.find_cycle()).flatten() {
        return vec![explain_device_cycle(&cycle, &with_devices, groups)];
    }
    if let Some(finding) = explain_minority(dumps, waits, &roots) {
        return vec![finding];
    }
    // Ranks that are awaited in the same collective for the same reason make one finding.
    let mut findings: Vec<FlightFinding> = Vec::new();
    for root in roots {
        let Some(finding) = explain_root(dumps, waits, root) else { continue };
        let same = |f: &&mut FlightFinding| {
            f.kind == finding.kind && f.group == finding.group && f.sequence == finding.sequence
        };
        match findings.iter_mut().find(same) {
            Some(known) => known.ranks.push(root),
            None => findings.push(finding),
        }
    }
    findings
}

fn explain_root(dumps: &BTreeMap<u32, FlightDump>, waits: &Waits<'_>, root: u32) -> Option<FlightFinding> {
    let waiting: Vec<(&u32, &Wait<'_>)> =
        waits.by_rank.iter().filter(|(_, w)| w.awaited.contains(&root)).collect();
    let (_, wait) = waiting.first()?;
    let (kind, doubt) = match dumps.get(&root) {
        None => (
            FaultKind::NoDump,
            "a rank that was killed or stopped leaves no dump, and neither does one whose host is gone",
        ),
        Some(dump) if dump.entries.iter().any(|e| e.state != EntryState::Completed) => (
            FaultKind::DeviceBehind,
            "the host may be behind as well: it has not issued the collective in which the others wait",
        ),
        Some(_) => (FaultKind::HostSilent, "dumps do not say when they were written, nor what the host does"),
    };
    let mut sides: Vec<(Vec<u32>, &Wait<'_>)> = Vec::new();
    for (rank, wait) in &waiting {
        match sides.iter_mut().find(|(_, w)| w.is_same_collective(wait)) {
            Some((ranks, _)) => ranks.push(**rank),
            None => sides.push((vec![**rank], wait)),
        }
    }
    let sides = sides.into_iter();
    Some(FlightFinding {
        kind,
        ranks: vec![root],
        certainty: Certainty::Likely,
        doubts: vec![doubt.to_string()],
        group: wait.group.clone(),
        sequence: (!wait.entry.is_p2p).then_some(wait.entry.sequence),
        count: None,
        sides: sides.map(|(ranks, w)| CallSide::from_entry(ranks, w.entry, w.group.clone())).collect(),
    })
}

/// Accuses the ranks that wait, if fewer ranks wait than are awaited: most ranks then ended before a
/// collective that those few issued.
fn explain_minority(
    dumps: &BTreeMap<u32, FlightDump>,
    waits: &Waits<'_>,
    roots: &[u32],
) -> Option<FlightFinding> {
    let waiting: Vec<u32> =
        waits.by_rank.iter().filter(|(_, w)| !w.awaited.is_empty()).map(|(r, _)| *r).collect();
    let wait = waits.by_rank.get(waiting.first()?)?;
    let in_one_collective =
        waits.by_rank.values().all(|w| w.awaited.is_empty() || w.is_same_collective(wait));
    let has_dumps = roots.iter().all(|r| dumps.contains_key(r));
    if waiting.len() >= roots.len() || wait.entry.is_p2p || !in_one_collective || !has_dumps {
        return None;
    }
    Some(FlightFinding {
        kind: FaultKind::Extra,
        ranks: waiting.clone(),
        certainty: Certainty::Likely,
        doubts: vec!["the hosts of the others may be silent, all before the same collective".to_string()],
        group: wait.group.clone(),
        sequence: Some(wait.entry.sequence),
        count: None,
        sides: vec![CallSide::from_entry(waiting, wait.entry, wait.group.clone())],
    })
}

/// Explains a collective that all members enqueued: which devices did not start or complete what others did.
fn explain_stall(stalled: &StalledCollective<'_>) -> Option<FlightFinding> {
    let members = stalled.members.iter().copied();
    let late: Vec<u32> = members.filter(|r| !stalled.started.contains(r)).collect();
    let is_split = |ranks: &[u32]| !ranks.is_empty() && ranks.len() < stalled.members.len();
    let ranks = if is_split(&stalled.behind) {
        stalled.behind.clone()
    } else if is_split(&late) {
        late
    } else {
        return None;
    };
    let others = stalled.members.iter().copied().filter(|r| !ranks.contains(r)).collect();
    Some(FlightFinding {
        kind: FaultKind::DeviceBehind,
        ranks,
        certainty: Certainty::Likely,
        doubts: vec!["dumps do not say what the device runs instead".to_string()],
        group: stalled.group.clone(),
        sequence: Some(stalled.entry.sequence),
        count: None,
        sides: vec![CallSide::from_entry(others, stalled.entry, stalled.group.clone())],
    })
}

impl Wait<'_> {
    /// Returns whether both ranks wait in one collective. A send or a receive is the same as itself alone.
    fn is_same_collective(&self, other: &Wait<'_>) -> bool {
        let (own, other) = (self.entry, other.entry);
        let same_number = own.group == other.group && own.sequence == other.sequence;
        std::ptr::eq(own, other) || !own.is_p2p && !other.is_p2p && same_number
    }
}
