//! Words for the ranks, collectives and times in an autopsy.

use super::rank_view::RankView;
use crate::flight::{CollectiveProgress, FlightCollective, FlightPhase, write_ranks};

/// Describes the last event of a rank's engine.
pub(super) fn describe_last_event(v: &RankView<'_>) -> String {
    let collective = v.collectives.iter().max_by_key(|c| c.at_ns.max(c.entry.end_ns));
    // A phase that has not ended is older than its own collectives.
    let is_older =
        |p: &FlightPhase, c: &FlightCollective| (p.call, p.step) <= (c.call, c.step) && p.end_ns == 0;
    let phase = v.phase.filter(|p| !collective.is_some_and(|c| is_older(p, c.entry)));
    match (phase, collective) {
        (Some(p), _) => {
            let verb = if p.end_ns > 0 { "ended" } else { "began" };
            format!("{verb} {}", describe_place(&p.phase, p.call, p.chunk))
        }
        (None, Some(c)) => format!("{} {}", state_label(c.entry.state), describe_collective(c.entry)),
        (None, None) => match v.marks().last() {
            Some((_, m)) => m.call.map_or(m.event.clone(), |k| format!("{} call {k}", m.event)),
            None => "nothing".to_string(),
        },
    }
}

pub(super) fn describe_oldest_pending(v: &RankView<'_>) -> String {
    v.pending_collectives().next().map_or(String::new(), |c| describe_collective(c.entry))
}

pub(super) fn state_label(s: CollectiveProgress) -> &'static str {
    match s {
        CollectiveProgress::Issued => "issued",
        CollectiveProgress::Waiting => "waits in",
        CollectiveProgress::Done => "completed",
        CollectiveProgress::Refused => "refused",
    }
}

/// Describes a collective, such as `tp all_reduce #14 of denoise.fill3 (call 7, chunk 6)`.
pub(super) fn describe_collective(c: &FlightCollective) -> String {
    let peer = match (c.op.as_str(), c.peer) {
        ("send", Some(p)) => format!(" to rank {p}"),
        ("recv", Some(p)) => format!(" from rank {p}"),
        _ => String::new(),
    };
    format!("{} {}{peer} #{} of {}", c.group, c.op, c.pos, describe_phase(c))
}

pub(super) fn describe_phase(c: &FlightCollective) -> String {
    describe_place(&c.phase, c.call, c.chunk)
}

pub(super) fn describe_place(phase: &str, call: u64, chunk: u32) -> String {
    format!("{phase} (call {call}, chunk {chunk})")
}

pub(super) fn describe_signature(c: &FlightCollective) -> String {
    let reduction = c.reduction.as_ref().map_or(String::new(), |r| format!(" reduction={r}"));
    let root = c.root.map_or(String::new(), |r| format!(" root={r}"));
    format!("{} {} {}{reduction}{root}", c.group, c.op, c.ty)
}

pub(super) fn group_with_members(group: &str, ranks: &[u32]) -> String {
    format!("{group} of ranks {}", write_ranks(ranks))
}

/// Formats ranks as `rank 1`, `ranks 1-3` or, if there are none, `no rank`.
pub(super) fn format_ranks(ranks: &[u32]) -> String {
    match ranks {
        [] => "no rank".to_string(),
        [one] => format!("rank {one}"),
        _ => format!("ranks {}", write_ranks(ranks)),
    }
}

pub(super) fn format_seconds(ns: u64) -> String {
    let s = ns as f64 / 1e9;
    if s < 10.0 { format!("{s:.2} s") } else { format!("{s:.0} s") }
}
