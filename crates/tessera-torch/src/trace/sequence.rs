//! The collectives of one rank's compiled graphs, in an order in which ranks compare.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::collective::CollectiveCall;
use super::graph::{Direction, Graph};
use super::log::{Compile, RankLog, Stage};

/// A collective with the compile that holds it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedCall<'a> {
    pub(crate) call: &'a CollectiveCall,
    pub(crate) compile: &'a Compile,
    pub(crate) direction: Direction,
}

impl PlacedCall<'_> {
    /// Returns whether two calls could be of one position.
    pub(crate) fn matches(&self, other: &PlacedCall<'_>) -> bool {
        self.call.group == other.call.group && self.call.find_difference(other.call).is_none()
    }
}

/// The collectives of a rank in one direction.
#[derive(Debug, Clone, Default)]
pub(crate) struct RankSequence<'a> {
    /// Those of the first compile of each frame. A frame that one rank split at a break gives the same
    /// sequence as the whole frame of another.
    pub(crate) first: Vec<PlacedCall<'a>>,
    /// Those of recompiles that differ from every earlier compile of the frame. A recompile with the
    /// same collectives replaces a graph and adds no collective to the run.
    pub(crate) again: Vec<PlacedCall<'a>>,
}

impl<'a> RankSequence<'a> {
    pub(crate) fn from_log(log: &'a RankLog, stage: Stage, direction: Direction) -> RankSequence<'a> {
        let mut out = RankSequence::default();
        let mut variants: BTreeMap<_, Vec<Vec<PlacedCall<'a>>>> = BTreeMap::new();
        for compile in &log.compiles {
            let calls = list_calls(compile, stage, direction);
            if !compile.id.is_recompile() {
                out.first.extend(&calls);
            }
            let known = variants.entry(compile.id.frame_key()).or_default();
            if !known.iter().any(|v| is_equal(v, &calls)) {
                if compile.id.is_recompile() {
                    out.again.extend(&calls);
                }
                known.push(calls);
            }
        }
        out
    }

    /// Returns the calls of one group.
    pub(crate) fn of_group(&self, group: &str) -> RankSequence<'a> {
        let of = |calls: &[PlacedCall<'a>]| {
            calls.iter().filter(|c| &*c.call.group == group).copied().collect::<Vec<_>>()
        };
        RankSequence { first: of(&self.first), again: of(&self.again) }
    }

    /// Returns the names of all groups.
    pub(crate) fn groups(&self) -> BTreeSet<Rc<str>> {
        self.first.iter().chain(&self.again).map(|c| c.call.group.clone()).collect()
    }
}

/// Returns the collectives of a compile. A backward runs in the order opposite to that of the forwards,
/// so its collectives are listed from the last to the first: then the backward of a frame that is split
/// lists the same sequence as that of the whole frame.
fn list_calls(compile: &Compile, stage: Stage, direction: Direction) -> Vec<PlacedCall<'_>> {
    let of_direction = |graphs: &Vec<Graph>| graphs.iter().any(|g| g.direction == direction);
    let mut stages = compile.graphs.iter().filter(|(_, graphs)| of_direction(graphs));
    let before = stages.clone().rfind(|(s, _)| **s <= stage);
    let graphs = before.or_else(|| stages.next()).map_or(&[][..], |(_, graphs)| graphs.as_slice());
    let calls = graphs.iter().filter(|g| g.direction == direction).flat_map(|g| &g.calls);
    let mut out: Vec<_> = calls.map(|call| PlacedCall { call, compile, direction }).collect();
    if direction == Direction::Backward {
        out.reverse();
    }
    out
}

/// Returns whether two sequences match call by call.
pub(crate) fn is_equal(a: &[PlacedCall<'_>], b: &[PlacedCall<'_>]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.matches(b))
}

/// Returns whether `part` is `whole` with calls left out.
pub(crate) fn is_subsequence(part: &[PlacedCall<'_>], whole: &[PlacedCall<'_>]) -> bool {
    let mut rest = whole.iter();
    part.iter().all(|p| rest.any(|w| w.matches(p)))
}

/// Ranks with the same calls.
pub(crate) struct Side<'a, 's> {
    pub(crate) ranks: Vec<u32>,
    pub(crate) calls: &'s [PlacedCall<'a>],
}

/// Splits ranks into those with matching calls, the largest side first.
pub(crate) fn split_sides<'a, 's>(ranks: &BTreeMap<u32, &'s [PlacedCall<'a>]>) -> Vec<Side<'a, 's>> {
    let mut sides: Vec<Side<'a, 's>> = Vec::new();
    for (rank, calls) in ranks {
        match sides.iter_mut().find(|s| is_equal(s.calls, calls)) {
            Some(side) => side.ranks.push(*rank),
            None => sides.push(Side { ranks: vec![*rank], calls }),
        }
    }
    sides.sort_by_key(|s| std::cmp::Reverse(s.ranks.len()));
    sides
}
