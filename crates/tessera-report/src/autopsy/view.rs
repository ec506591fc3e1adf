//! One rank's record, read for what an autopsy asks.

use std::collections::BTreeMap;

use super::Evidence;
use crate::flight::{Collective, Entry, Fit, Flight, Mark, Phase, State, read_ranks};

/// One rank.
#[derive(Debug)]
pub(super) struct RankView<'a> {
    pub(super) rank: u32,
    pub(super) flight: Option<&'a Flight>,
    /// Collectives in order, each with its channel and its number among those of the channel in its phase.
    pub(super) calls: Vec<Call<'a>>,
    pub(super) departure: Option<Departure<'a>>,
    /// Last phase that it began.
    pub(super) phase: Option<&'a Phase>,
    /// Highest call that any of its lines names.
    pub(super) last_call: u64,
    /// Its last line, in nanoseconds since 1970.
    pub(super) last_wall_ns: u64,
    /// The last line of its engine, likewise.
    pub(super) engine_wall_ns: u64,
    /// Longest time between two lines of its engine.
    pub(super) longest_gap_ns: u64,
}

/// A collective of a rank.
#[derive(Debug, Clone)]
pub(super) struct Call<'a> {
    pub(super) c: &'a Collective,
    pub(super) at_ns: u64,
    pub(super) channel: Channel,
    /// Its number among those of its channel in its phase, from 0; what of the phase the ring lost is not counted.
    pub(super) nth: usize,
    /// Whether every earlier collective of its phase is still in the ring.
    pub(super) whole: bool,
}

/// Where collectives meet in order: a group, or a sender and its receiver.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Channel {
    pub(super) group: String,
    pub(super) ranks: Vec<u32>,
    /// Sender and receiver, of a transfer.
    pub(super) pair: Option<(u32, u32)>,
}

/// Where a rank left the plan.
#[derive(Debug, Clone, Copy)]
pub(super) enum Departure<'a> {
    /// It issued another collective, or was about to.
    Other(&'a Collective),
    /// Its phase ended without one; with it the first collective after the gap, where that shows.
    Missing { phase: &'a Phase, moved: Option<&'a Collective> },
}

impl<'a> RankView<'a> {
    pub(super) fn new(rank: u32, flight: Option<&'a Flight>, evidence: &Evidence) -> RankView<'a> {
        let mut view = RankView {
            rank,
            flight,
            calls: Vec::new(),
            departure: None,
            phase: None,
            last_call: 0,
            last_wall_ns: 0,
            engine_wall_ns: 0,
            longest_gap_ns: 0,
        };
        let Some(flight) = flight else { return view };
        view.last_wall_ns = view.wall(flight.last_ns());
        let mut counted: BTreeMap<(u64, u32, Channel), usize> = BTreeMap::new();
        let mut first: BTreeMap<(u64, u32), u32> = BTreeMap::new();
        let mut engine = Vec::new();
        for line in &flight.lines {
            match &line.entry {
                Entry::Collective(c) => {
                    view.last_call = view.last_call.max(c.call);
                    engine.extend([line.at_ns, line.last_ns()]);
                    let channel = channel(rank, c, &evidence.groups);
                    let whole = *first.entry((c.call, c.step)).or_insert(c.pos) == 0;
                    let nth = counted.entry((c.call, c.step, channel.clone())).or_default();
                    let call = Call { c, at_ns: line.at_ns, channel, nth: *nth, whole };
                    *nth += 1;
                    view.calls.push(call);
                }
                Entry::Phase(p) => {
                    view.last_call = view.last_call.max(p.call);
                    engine.extend([line.at_ns, line.last_ns()]);
                    view.phase = Some(p);
                }
                Entry::Mark(m) => view.last_call = view.last_call.max(m.call.unwrap_or(0)),
            }
        }
        engine.sort_unstable();
        view.longest_gap_ns = engine.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0);
        view.engine_wall_ns = view.wall(engine.last().copied().unwrap_or(flight.header.mono_ns));
        view.departure = departure(flight);
        view
    }

    /// An instant of this rank in nanoseconds since 1970.
    pub(super) fn wall(&self, at_ns: u64) -> u64 {
        self.flight.map_or(0, |f| f.header.wall_ns.saturating_add(at_ns).saturating_sub(f.header.mono_ns))
    }

    pub(super) fn marks(&self) -> impl Iterator<Item = (u64, &'a Mark)> + use<'a> {
        let lines = self.flight.map_or(&[][..], |f| &f.lines);
        lines.iter().filter_map(|l| match &l.entry {
            Entry::Mark(m) => Some((l.at_ns, m)),
            _ => None,
        })
    }

    /// Whether its process could still say that the run ends, whoever's fault that is.
    pub(super) fn said_goodbye(&self) -> bool {
        self.marks().any(|(_, m)| m.mark == "failed" || m.mark == "exit")
    }

    /// The collective that its host waits in.
    pub(super) fn waiting(&self) -> Option<&Call<'a>> {
        self.calls.iter().rev().find(|c| c.c.state == State::Waiting)
    }

    /// Collectives that are not complete, oldest first.
    pub(super) fn pending(&self) -> impl Iterator<Item = &Call<'a>> {
        self.calls.iter().filter(|c| matches!(c.c.state, State::Issued | State::Waiting))
    }

    /// Where it is: call and phase of its last engine line.
    pub(super) fn place(&self) -> (u64, u32) {
        let calls = self.calls.iter().map(|c| (c.c.call, c.c.step));
        calls.chain(self.phase.map(|p| (p.call, p.step))).max().unwrap_or((0, 0))
    }

    /// This rank's side of another rank's collective.
    pub(super) fn meets(&self, other: &Call<'_>) -> Option<&Call<'a>> {
        self.calls.iter().find(|c| {
            (c.c.call, c.c.step) == (other.c.call, other.c.step)
                && c.channel == other.channel
                && c.c.state != State::Refused
                && if c.whole && other.whole { c.nth == other.nth } else { c.c.pos == other.c.pos }
        })
    }

    /// Whether this rank has come to another rank's collective, or beyond.
    pub(super) fn reached(&self, other: &Call<'_>) -> bool {
        self.place() > (other.c.call, other.c.step) || self.meets(other).is_some()
    }
}

fn channel(rank: u32, c: &Collective, groups: &BTreeMap<String, Vec<Vec<u32>>>) -> Channel {
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
    Channel { group: c.group.clone(), ranks, pair }
}

fn departure(flight: &Flight) -> Option<Departure<'_>> {
    let first = flight.lines.iter().find_map(|l| match &l.entry {
        Entry::Collective(c) if c.plan == Fit::No || c.state == State::Refused => {
            Some((c.call, c.step, Departure::Other(c)))
        }
        Entry::Phase(p) if p.end_ns > 0 && p.wants.is_some() => {
            let moved = flight.lines.iter().find_map(|l| match &l.entry {
                Entry::Collective(c) if (c.call, c.step) == (p.call, p.step) && c.plan == Fit::Moved => {
                    Some(c)
                }
                _ => None,
            });
            Some((p.call, p.step, Departure::Missing { phase: p, moved }))
        }
        _ => None,
    })?;
    // A phase's line stands before those of its collectives: where both are wrong, the collective came first.
    let (call, step, found) = first;
    let other = flight.lines.iter().find_map(|l| match &l.entry {
        Entry::Collective(c) if (c.call, c.step) == (call, step) && c.plan == Fit::No => {
            Some(Departure::Other(c))
        }
        _ => None,
    });
    Some(if found.is_missing() { other.unwrap_or(found) } else { found })
}
