//! One order of launches for all ranks, and no circle of waiting.
//!
//! Devices launch collectives first in, first out in host order, so there must be one total order of all
//! instances that every rank's program order follows. That also rules out a deadlock over streams and events, whose
//! edges all point forward in program order.

use tessera_base::{Code, Counterexample, Diagnostic, Diagnostics, Link};

use crate::meet::{Edges, Hold};
use crate::say;
use crate::sequence::Witness;

/// A circle of waits.
pub static T0311: Code = Code {
    id: "T0311",
    title: "deadlock: ranks wait for each other in a circle",
    page: "Each rank named is inside a collective that cannot finish before another rank joins, and that rank is \
itself held, by its stream, an event or a wait, in a collective that comes first for it. Nobody moves again: at run time \
this is a hang at full GPU utilisation.\n\n\
The message is the shortest such circle. Read it line by line: each rank waits in its first op for the rank on the \
line before it, and reaches its second op only afterwards. Swap the two ops on one of the ranks. For sends and receives let one side receive first: a send \
may not return before its receive is posted.",
};
/// No single order of launches.
pub static T0312: Code = Code {
    id: "T0312",
    title: "collectives have no common launch order",
    page: "The ranks' streams do not wait for each other, but the ranks launch collectives of several groups in orders that \
contradict each other. A device runs the operations of several communicators in the order of their launch (NCCL's default \
requires one global order per device), so two ranks that start with different ones wait for each other: usually only \
under load, when both operations no longer fit on the device together.\n\n\
Give the issues the same order on all ranks. Putting them on different streams does not help.",
};

/// Most ranks of a circle that are named in its order.
const RING_SHOWN: usize = 16;

/// Refuses what has no order. Expects sequences that match. `held` gives, per role, what streams, events and waits
/// hold back.
pub(crate) fn check(w: &impl Witness, held: impl FnOnce() -> Vec<Edges>) -> Diagnostics {
    let m = w.meetings();
    if m.complete() {
        return Vec::new();
    }
    if let Some(circle) = m.circle(&held()) {
        return vec![report(w, &T0311, &circle)];
    }
    match m.circle(&m.host_order()) {
        Some(circle) => vec![report(w, &T0312, &circle)],
        // Whoever does not complete is refused, even where nobody can be named.
        None => vec![Diagnostic::error(&T0311, "some collective never completes, and no circle explains it")],
    }
}

fn report(w: &impl Witness, code: &'static Code, circle: &[Hold]) -> Diagnostic {
    let members: Vec<u32> = circle.iter().map(|h| h.rank).collect();
    let message = if code == &T0311 {
        format!("{} wait for each other in a circle", say::numbers(&members))
    } else {
        format!("{} launch collectives in contradicting orders", say::numbers(&members))
    };
    let links: Vec<Link> = circle
        .iter()
        .map(|h| Link { rank: h.rank, holds: w.step(h.rank, h.holds), wants: w.step(h.rank, h.wants) })
        .collect();
    let name =
        |s: &tessera_base::Step| format!("{} with {} (op {})", s.what, say::numbers(&s.ranks), s.index);
    let mut d = Diagnostic::error(code, message);
    for (n, link) in links.iter().enumerate() {
        let before = links[(n + links.len() - 1) % links.len()].rank;
        let (holds, wants) = (name(&link.holds), name(&link.wants));
        let says = if code == &T0311 {
            format!("waits in {holds} for rank {before}, and reaches {wants} only after it")
        } else {
            format!("launches {holds} before {wants}")
        };
        d = w.at(d, link.rank, circle[n].holds, says);
    }
    let pair = |s: &tessera_base::Step| matches!(s.op.as_str(), "send" | "recv");
    // Against the order of the links, each waits for the one after it.
    let mut waits: Vec<u32> = members.iter().rev().copied().collect();
    let lowest = waits.iter().enumerate().min_by_key(|(_, r)| **r).map_or(0, |(i, _)| i);
    waits.rotate_left(lowest);
    let shown = waits.iter().chain(waits.first()).take(RING_SHOWN).map(u32::to_string).collect::<Vec<_>>();
    let rest = if waits.len() >= RING_SHOWN { " → …" } else { "" };
    d = d.note(format!("who waits for whom: {}{rest}", shown.join(" → ")));
    let hint = if links.iter().all(|l| pair(&l.holds) && pair(&l.wants)) {
        "let one side receive first, or issue each rank's send and receive as one launch (batch = 1)"
    } else {
        "give these collectives the same order on every rank named"
    };
    d.hint(hint).proof(Counterexample::Circle(links))
}
