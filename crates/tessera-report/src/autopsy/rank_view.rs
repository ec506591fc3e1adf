//! A view of one rank's flight record, prepared for the autopsy.

use std::collections::BTreeMap;

use super::AutopsyEvidence;
use crate::flight::{
    CollectiveProgress, FlightCollective, FlightEntry, FlightLog, FlightMark, FlightPhase, PlanMatch,
    read_ranks,
};

/// One rank's flight record, with the facts that findings derive from its lines.
#[derive(Debug)]
pub(super) struct RankView<'a> {
    pub(super) rank: u32,
    pub(super) flight: Option<&'a FlightLog>,
    /// Collectives in order, each with its communicator and its sequence number there.
    pub(super) collectives: Vec<ObservedCollective<'a>>,
    pub(super) divergence: Option<PlanDivergence<'a>>,
    /// The last phase that the rank began.
    pub(super) phase: Option<&'a FlightPhase>,
    /// The highest call id in any of its lines.
    pub(super) last_call: u64,
    /// Time of its last line, in nanoseconds since 1970.
    pub(super) last_wall_ns: u64,
    /// Time of the last line from its engine, in nanoseconds since 1970.
    pub(super) engine_wall_ns: u64,
    /// Longest time between two consecutive events of its engine.
    pub(super) longest_gap_ns: u64,
}

/// A collective in a rank's flight record.
#[derive(Debug, Clone)]
pub(super) struct ObservedCollective<'a> {
    pub(super) entry: &'a FlightCollective,
    pub(super) at_ns: u64,
    pub(super) communicator: ObservedCommunicator,
    /// Index among the phase's collectives over the communicator, from 0; collectives that the ring
    /// has overwritten do not count.
    pub(super) sequence_index: usize,
    /// Whether every earlier collective of the phase is still in the ring.
    pub(super) has_full_history: bool,
}

/// Identity of a communicator, over which collectives match in order: a group, or a sender and its
/// receiver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ObservedCommunicator {
    pub(super) group: String,
    pub(super) ranks: Vec<u32>,
    /// Sender and receiver of a transfer.
    pub(super) pair: Option<(u32, u32)>,
}

/// First difference between a rank's collectives and the plan.
#[derive(Debug, Clone, Copy)]
pub(super) enum PlanDivergence<'a> {
    /// The rank issued a different collective, or was about to.
    Different(&'a FlightCollective),
    /// The phase ended without a planned collective; `moved` is the first collective after the gap,
    /// if it is visible.
    Missing { phase: &'a FlightPhase, moved: Option<&'a FlightCollective> },
}

impl<'a> RankView<'a> {
    pub(super) fn new(rank: u32, flight: Option<&'a FlightLog>, evidence: &AutopsyEvidence) -> RankView<'a> {
        let mut view = RankView {
            rank,
            flight,
            collectives: Vec::new(),
            divergence: None,
            phase: None,
            last_call: 0,
            last_wall_ns: 0,
            engine_wall_ns: 0,
            longest_gap_ns: 0,
        };
        let Some(flight) = flight else { return view };
        view.last_wall_ns = view.wall_ns(flight.last_ns());
        let mut counted: BTreeMap<(u64, u32, ObservedCommunicator), usize> = BTreeMap::new();
        let mut first: BTreeMap<(u64, u32), u32> = BTreeMap::new();
        let mut engine = Vec::new();
        for line in &flight.lines {
            match &line.entry {
                FlightEntry::Collective(c) => {
                    view.last_call = view.last_call.max(c.call);
                    engine.extend([line.at_ns, line.last_ns()]);
                    let channel = observed_communicator(rank, c, &evidence.groups);
                    let whole = *first.entry((c.call, c.step)).or_insert(c.pos) == 0;
                    let nth = counted.entry((c.call, c.step, channel.clone())).or_default();
                    let call = ObservedCollective {
                        entry: c,
                        at_ns: line.at_ns,
                        communicator: channel,
                        sequence_index: *nth,
                        has_full_history: whole,
                    };
                    *nth += 1;
                    view.collectives.push(call);
                }
                FlightEntry::Phase(p) => {
                    view.last_call = view.last_call.max(p.call);
                    engine.extend([line.at_ns, line.last_ns()]);
                    view.phase = Some(p);
                }
                FlightEntry::Mark(m) => view.last_call = view.last_call.max(m.call.unwrap_or(0)),
            }
        }
        engine.sort_unstable();
        view.longest_gap_ns = engine.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        view.engine_wall_ns = view.wall_ns(engine.last().copied().unwrap_or(flight.header.mono_ns));
        view.divergence = find_divergence(flight);
        view
    }

    /// Converts an instant of this rank to nanoseconds since 1970.
    pub(super) fn wall_ns(&self, at_ns: u64) -> u64 {
        self.flight.map_or(0, |f| f.header.wall_ns.saturating_add(at_ns).saturating_sub(f.header.mono_ns))
    }

    pub(super) fn marks(&self) -> impl Iterator<Item = (u64, &'a FlightMark)> + use<'a> {
        let lines = self.flight.map_or(&[][..], |f| &f.lines);
        lines.iter().filter_map(|l| match &l.entry {
            FlightEntry::Mark(m) => Some((l.at_ns, m)),
            _ => None,
        })
    }

    /// Returns whether the process could still announce the end of the run, whichever rank caused
    /// it.
    pub(super) fn announced_end(&self) -> bool {
        self.marks().any(|(_, m)| m.event == "failed" || m.event == "exit")
    }

    /// Returns the collective in which the host waits.
    pub(super) fn waiting_collective(&self) -> Option<&ObservedCollective<'a>> {
        self.collectives.iter().rev().find(|c| c.entry.state == CollectiveProgress::Waiting)
    }

    /// Iterates over the collectives that are not complete, oldest first.
    pub(super) fn pending_collectives(&self) -> impl Iterator<Item = &ObservedCollective<'a>> {
        self.collectives
            .iter()
            .filter(|c| matches!(c.entry.state, CollectiveProgress::Issued | CollectiveProgress::Waiting))
    }

    /// Returns the call id and phase index of the last engine line.
    pub(super) fn engine_position(&self) -> (u64, u32) {
        let calls = self.collectives.iter().map(|c| (c.entry.call, c.entry.step));
        calls.chain(self.phase.map(|p| (p.call, p.step))).max().unwrap_or((0, 0))
    }

    /// Returns this rank's collective that matches another rank's.
    pub(super) fn matching_collective(
        &self,
        other: &ObservedCollective<'_>,
    ) -> Option<&ObservedCollective<'a>> {
        self.matching_index(other).map(|i| &self.collectives[i])
    }

    /// Returns the index of this rank's collective that matches another rank's.
    pub(super) fn matching_index(&self, other: &ObservedCollective<'_>) -> Option<usize> {
        self.collectives.iter().position(|c| {
            (c.entry.call, c.entry.step) == (other.entry.call, other.entry.step)
                && c.communicator == other.communicator
                && c.entry.state != CollectiveProgress::Refused
                && if c.has_full_history && other.has_full_history {
                    c.sequence_index == other.sequence_index
                } else {
                    c.entry.pos == other.entry.pos
                }
        })
    }

    /// Returns whether this rank has reached another rank's collective or is past it.
    pub(super) fn has_reached(&self, other: &ObservedCollective<'_>) -> bool {
        self.engine_position() > (other.entry.call, other.entry.step)
            || self.matching_collective(other).is_some()
    }
}

fn observed_communicator(
    rank: u32,
    c: &FlightCollective,
    groups: &BTreeMap<String, Vec<Vec<u32>>>,
) -> ObservedCommunicator {
    let mut ranks = read_ranks(&c.ranks);
    if ranks.is_empty() {
        let known = groups.get(&c.group).and_then(|g| g.iter().find(|m| m.contains(&rank)));
        ranks = known.cloned().unwrap_or_default();
    }
    let pair = match (c.op.as_str(), c.peer) {
        ("send", Some(peer)) => Some((rank, peer)),
        ("recv", Some(peer)) => Some((peer, rank)),
        _ => None,
    };
    if let Some((a, b)) = pair {
        ranks = vec![a.min(b), a.max(b)];
    }
    ObservedCommunicator { group: c.group.clone(), ranks, pair }
}

fn find_divergence(flight: &FlightLog) -> Option<PlanDivergence<'_>> {
    let first = flight.lines.iter().find_map(|l| match &l.entry {
        FlightEntry::Collective(c)
            if c.plan_match == PlanMatch::No || c.state == CollectiveProgress::Refused =>
        {
            Some((c.call, c.step, PlanDivergence::Different(c)))
        }
        FlightEntry::Phase(p) if p.end_ns > 0 && p.missing_line.is_some() => {
            let moved = flight.lines.iter().find_map(|l| match &l.entry {
                FlightEntry::Collective(c)
                    if (c.call, c.step) == (p.call, p.step) && c.plan_match == PlanMatch::Moved =>
                {
                    Some(c)
                }
                _ => None,
            });
            Some((p.call, p.step, PlanDivergence::Missing { phase: p, moved }))
        }
        _ => None,
    })?;
    // A phase's line precedes those of its collectives. If both are wrong, the collective came
    // first.
    let (call, step, found) = first;
    let other = flight.lines.iter().find_map(|l| match &l.entry {
        FlightEntry::Collective(c) if (c.call, c.step) == (call, step) && c.plan_match == PlanMatch::No => {
            Some(PlanDivergence::Different(c))
        }
        _ => None,
    });
    Some(if found.is_missing() { other.unwrap_or(found) } else { found })
}
