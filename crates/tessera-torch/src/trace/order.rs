//! Checks that collectives of several groups have an order that all ranks can keep.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use tessera_base::Diagnostic;

use super::sequence::{PlacedCall, RankSequence};
use crate::codes::T1415;
use crate::flight::list_ranks;

/// Maximum number of ranks of a wait cycle that a diagnostic shows.
const MAX_SHOWN: usize = 6;

/// The ranks, each at its next collective.
struct Positions<'a> {
    calls: BTreeMap<u32, Vec<PlacedCall<'a>>>,
    next: BTreeMap<u32, usize>,
}

/// Reports a wait cycle: ranks that reach groups in orders that wait for each other, although each
/// group by itself has one sequence. `groups` holds the members of each group; the collectives of
/// other groups are left out.
///
/// A rank here waits in one collective until all members have reached it. If some order of all
/// collectives agrees with every rank, then all ranks come to their end, whoever moves first.
pub(crate) fn check_group_order(
    ranks: &BTreeMap<u32, RankSequence<'_>>,
    groups: &BTreeMap<Rc<str>, BTreeSet<u32>>,
) -> Option<Diagnostic> {
    let calls = ranks.iter().map(|(rank, s)| {
        let of_groups = s.first.iter().filter(|c| groups.contains_key(&c.call.group));
        (*rank, of_groups.copied().collect())
    });
    let mut at = Positions { calls: calls.collect(), next: ranks.keys().map(|r| (*r, 0)).collect() };
    let mut reached: Vec<Rc<str>> = groups.keys().cloned().collect();
    while let Some(group) = reached.pop() {
        let Some(members) = groups.get(&group) else { continue };
        if members.iter().all(|r| at.group(*r) == Some(&group)) {
            for rank in members {
                at.next.entry(*rank).and_modify(|n| *n += 1);
                reached.extend(at.group(*rank).cloned());
            }
        }
    }
    let mut rank = *at.next.keys().find(|r| at.group(**r).is_some())?;
    let mut path = Vec::new();
    while !path.contains(&rank) {
        path.push(rank);
        let group = at.group(rank)?;
        rank = *groups.get(group)?.iter().find(|r| at.group(**r) != Some(group))?;
    }
    let cycle = &path[path.iter().position(|r| *r == rank)?..];
    let mut d = Diagnostic::error(
        &T1415,
        format!(
            "{} compiled collectives of several groups in orders that wait for each other",
            list_ranks(cycle)
        ),
    );
    for rank in cycle.iter().take(MAX_SHOWN) {
        let call = at.call(*rank)?;
        d = d.with_label(
            format!("rank {rank}"),
            format!("waits in group {}: {}", call.call.group, call.describe()),
        );
    }
    Some(d.with_hint("issue the collectives of the groups in one order on all ranks"))
}

impl<'a> Positions<'a> {
    fn call(&self, rank: u32) -> Option<&PlacedCall<'a>> {
        self.calls.get(&rank)?.get(*self.next.get(&rank)?)
    }

    /// Returns the group of the rank's next collective; `None` at its end.
    fn group(&self, rank: u32) -> Option<&Rc<str>> {
        self.call(rank).map(|c| &c.call.group)
    }
}
