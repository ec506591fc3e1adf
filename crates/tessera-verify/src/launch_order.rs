//! Checks that all ranks follow one launch order and that no wait cycle exists.
//!
//! Devices launch collectives first in, first out in host order, so there must be one total order
//! of all collectives that every rank's program order follows. Such an order also rules out a
//! deadlock over streams and events, whose edges all point forward in program order.

use tessera_base::{Code, Counterexample, Diagnostic, Diagnostics, WaitEdge};

use crate::codes::{T0311, T0312};
use crate::display;
use crate::matching::{HeldLaunches, WaitLink};
use crate::sequence::SequenceSource;

/// Maximum number of ranks that the note on the wait cycle lists.
const CYCLE_RANKS_SHOWN: usize = 16;

/// Returns a diagnostic if no launch order serves all ranks. Expects matching sequences. `held`
/// computes, per role, the edges that streams, events and waits impose between launches.
pub(crate) fn check(source: &impl SequenceSource, held: impl FnOnce() -> Vec<HeldLaunches>) -> Diagnostics {
    let m = source.launch_sequences();
    if m.can_complete() {
        return Vec::new();
    }
    if let Some(cycle) = m.find_wait_cycle(&held()) {
        return vec![cycle_diagnostic(source, &T0311, &cycle)];
    }
    match m.find_wait_cycle(&m.host_order_edges()) {
        Some(cycle) => vec![cycle_diagnostic(source, &T0312, &cycle)],
        // Reject a plan that does not complete even if no cycle was found.
        None => {
            vec![Diagnostic::error(&T0311, "a collective never completes, and no wait cycle explains it")]
        }
    }
}

fn cycle_diagnostic(source: &impl SequenceSource, code: &'static Code, cycle: &[WaitLink]) -> Diagnostic {
    let members: Vec<u32> = cycle.iter().map(|h| h.rank).collect();
    let message = if code == &T0311 {
        format!("{} wait for each other in a cycle", display::list_rank_numbers(&members))
    } else {
        format!("collective launch orders form a cycle through {}", display::list_rank_numbers(&members))
    };
    let links: Vec<WaitEdge> = cycle
        .iter()
        .map(|h| WaitEdge {
            rank: h.rank,
            blocked_in: source.launch_step(h.rank, h.in_flight),
            not_reached: source.launch_step(h.rank, h.blocked),
        })
        .collect();
    let name = |s: &tessera_base::RankCollective| {
        format!("{} with {} (op {})", s.description, display::list_rank_numbers(&s.ranks), s.index)
    };
    let mut d = Diagnostic::error(code, message);
    for (n, link) in links.iter().enumerate() {
        let previous_rank = links[(n + links.len() - 1) % links.len()].rank;
        let (holds, wants) = (name(&link.blocked_in), name(&link.not_reached));
        let label = if code == &T0311 {
            format!("waits in {holds} for rank {previous_rank}; it reaches {wants} only afterwards")
        } else {
            format!("launches {holds} before {wants}")
        };
        d = source.with_launch_label(d, link.rank, cycle[n].in_flight, label);
    }
    let pair = |s: &tessera_base::RankCollective| matches!(s.op.as_str(), "send" | "recv");
    // Each rank waits for the rank of the link before it, so the note lists the links in reverse.
    let mut waits: Vec<u32> = members.iter().rev().copied().collect();
    let lowest = waits.iter().enumerate().min_by_key(|(_, r)| **r).map_or(0, |(i, _)| i);
    waits.rotate_left(lowest);
    let shown =
        waits.iter().chain(waits.first()).take(CYCLE_RANKS_SHOWN).map(u32::to_string).collect::<Vec<_>>();
    let rest = if waits.len() >= CYCLE_RANKS_SHOWN { " → …" } else { "" };
    d = d.with_note(format!("wait cycle: {}{rest}", shown.join(" → ")));
    let hint = if links.iter().all(|l| pair(&l.blocked_in) && pair(&l.not_reached)) {
        "let one side receive first, or issue each rank's send and receive as one batch (batch = 1)"
    } else {
        "issue these collectives in the same order on every rank named"
    };
    d.with_hint(hint).with_counterexample(Counterexample::WaitCycle(links))
}
