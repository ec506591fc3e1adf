//! Compares the order of collectives over several groups.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use tessera_base::Diagnostic;

use super::sequence::{PlacedCall, RankSequence, split_sides};
use crate::codes::T1415;
use crate::flight::list_ranks;

/// A call with its number in its group, from 1.
type NumberedCall<'a> = (usize, PlacedCall<'a>);

/// Reports the first ranks that compiled the collectives of two groups in different orders, although
/// each group by itself has one sequence: one rank then waits in the first group and the other one in
/// the second.
pub(crate) fn check_group_order(
    ranks: &BTreeMap<u32, RankSequence<'_>>,
    equal_groups: &BTreeSet<Rc<str>>,
) -> Option<Diagnostic> {
    let merged: BTreeMap<u32, &[PlacedCall<'_>]> =
        ranks.iter().map(|(rank, s)| (*rank, s.first.as_slice())).collect();
    let sides = split_sides(&merged);
    for (at, a) in sides.iter().enumerate() {
        for b in &sides[at + 1..] {
            let groups = |calls: &[PlacedCall<'_>]| -> BTreeSet<Rc<str>> {
                calls.iter().map(|c| c.call.group.clone()).filter(|g| equal_groups.contains(g)).collect()
            };
            let common = groups(a.calls).intersection(&groups(b.calls)).cloned().collect();
            let (x, y) = (number_calls(a.calls, &common), number_calls(b.calls, &common));
            let Some((x, y)) = x.iter().zip(&y).find(|(x, y)| x.1.call.group != y.1.call.group) else {
                continue;
            };
            let side = |(number, call): &NumberedCall<'_>| {
                format!("number {number} of group {} first: {}", call.call.group, call.describe())
            };
            let message = format!(
                "{} and {} compiled groups {} and {} in different orders",
                list_ranks(&a.ranks),
                list_ranks(&b.ranks),
                x.1.call.group,
                y.1.call.group
            );
            return Some(
                Diagnostic::error(&T1415, message)
                    .with_label(list_ranks(&a.ranks), side(x))
                    .with_label(list_ranks(&b.ranks), side(y))
                    .with_hint("issue the collectives of the two groups in one order on all ranks"),
            );
        }
    }
    None
}

/// Returns the calls of these groups.
fn number_calls<'a>(calls: &[PlacedCall<'a>], groups: &BTreeSet<Rc<str>>) -> Vec<NumberedCall<'a>> {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    let mut out = Vec::new();
    for call in calls.iter().filter(|c| groups.contains(&c.call.group)) {
        let number = seen.entry(&call.call.group).or_default();
        *number += 1;
        out.push((*number, *call));
    }
    out
}
