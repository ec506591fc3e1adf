//! Places the clocks of joined ranks on that of the calling process, from the times of a trace alone.
//!
//! Each host has its own monotonic clock. What must have happened before what bounds the difference of two clocks from
//! both sides: a rank runs a call after the caller has begun it and before the caller has its outputs, and a sum is complete
//! on one rank after every member has begun to issue it. The middle of the tightest bounds is taken, and half their distance
//! is the largest error. Messages for this purpose would bound the clocks no better: their time on the network is that of a
//! small collective.
//!
//! The times of a GPU are placed by its host, which notices the end of a call late. So bounds may contradict each other by
//! this delay. Then all of them are widened until they agree, and the error grows by as much.

use std::collections::BTreeMap;

use tessera_device::{CommRoute, Communicator};
use tessera_ir::{Op, Opcode, Program};
use tessera_mesh::{Mesh, Rank};
use tessera_runtime::wire::{CollectiveTimes, PhaseOpTimes};

use super::array_plan::ArrayPlan;
use super::array_program::PHASE_PREFIX;
use super::run_record::TimedCall;

/// Calls that begin within this time share their offsets.
const WINDOW_NS: u64 = 100_000_000;

/// The most by which two quartz clocks drift apart, as a part of the time that passes: 100 µs in a second.
const DRIFT_DIVISOR: u64 = 10_000;

/// By how much the clock of a rank is behind that of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ClockOffset {
    /// What is added to a time of the rank.
    pub(super) offset_ns: i64,
    /// The largest error of the offset.
    pub(super) error_ns: u64,
}

/// Returns the offset of each rank's clock in each call. `loaded_ns` is the time of the caller's clock from which the
/// records of calls count. Rank 0 runs on the host of the caller and has its clock.
pub(super) fn align_clocks(
    plan: &ArrayPlan,
    loaded_ns: u64,
    calls: &[TimedCall],
) -> Vec<BTreeMap<u32, ClockOffset>> {
    let mut offsets = Vec::new();
    let mut rest = calls;
    while let Some(first) = rest.first() {
        let begin = first.record.start_ns;
        let count = rest.iter().take_while(|call| call.record.start_ns <= begin + WINDOW_NS).count();
        let (window, later) = rest.split_at(count);
        let mut bounds = ClockBounds::default();
        window.iter().for_each(|call| bounds.add_call(plan, loaded_ns, call));
        let end = window.iter().map(|call| call.record.end_ns).max().unwrap_or(begin);
        let of_window = bounds.find_offsets(end.saturating_sub(begin) / DRIFT_DIVISOR);
        offsets.extend(std::iter::repeat_n(of_window, count));
        rest = later;
    }
    offsets
}

/// The rank on whose host the caller runs. Its clock is that of the caller.
const CALLER: u32 = 0;

/// For each pair (a, b) of ranks: the largest value that the offset of b less the offset of a may have.
#[derive(Debug, Default)]
struct ClockBounds {
    most: BTreeMap<(u32, u32), i64>,
}

/// The part of one rank in a collective, on the clock of the rank.
struct Part {
    rank: u32,
    begun_ns: u64,
    completed_ns: u64,
}

impl ClockBounds {
    fn add_call(&mut self, plan: &ArrayPlan, loaded_ns: u64, call: &TimedCall) {
        let phase = format!("{PHASE_PREFIX}{}", call.record.program);
        let (begun_ns, ended_ns) = (loaded_ns + call.record.start_ns, loaded_ns + call.record.end_ns);
        let mut collectives: BTreeMap<(Communicator, usize), Vec<Part>> = BTreeMap::new();
        for (rank, times) in &call.op_times {
            self.add_order((CALLER, begun_ns), (*rank, times.start_ns));
            self.add_order((*rank, times.start_ns + times.end_ns), (CALLER, ended_ns));
            let program = plan.sealed.rank_program(&phase, Rank(*rank));
            let parts = program.map(|program| list_parts(program, plan.sealed.mesh(), *rank, times));
            for (collective, part) in parts.into_iter().flatten() {
                collectives.entry(collective).or_default().push(part);
            }
        }
        for parts in collectives.values() {
            for part in parts {
                for other in parts.iter().filter(|other| other.rank != part.rank) {
                    self.add_order((part.rank, part.begun_ns), (other.rank, other.completed_ns));
                }
            }
        }
    }

    /// States that what the first rank timed came before what the second one timed.
    fn add_order(&mut self, (first, before): (u32, u64), (second, after): (u32, u64)) {
        if first == second {
            return;
        }
        // before + offset of first ≤ after + offset of second
        let most = i64::try_from(i128::from(after) - i128::from(before)).unwrap_or(i64::MAX);
        let known = self.most.entry((second, first)).or_insert(most);
        *known = most.min(*known);
    }

    /// Returns the offsets in the middle of the tightest bounds, whose errors are larger by `drift_ns`. The bounds themselves are not
    /// widened by it: then an event could precede its cause in a trace whose clocks do not drift.
    fn find_offsets(&self, drift_ns: u64) -> BTreeMap<u32, ClockOffset> {
        let mut ranks: Vec<u32> = self.most.keys().flat_map(|(a, b)| [*a, *b]).chain([CALLER]).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let index_of = |rank: u32| ranks.binary_search(&rank).unwrap_or_default();
        let caller = index_of(CALLER);
        let (mut slack, mut paths) = (0_i64, Vec::new());
        // Twice the ranks bound how often a contradiction can be found; each time it becomes smaller.
        for _ in 0..2 * ranks.len() {
            paths = vec![vec![NO_BOUND; ranks.len()]; ranks.len()];
            for ((a, b), most) in &self.most {
                paths[index_of(*a)][index_of(*b)] = most.saturating_add(slack).min(NO_BOUND);
            }
            match shorten_paths(&mut paths) {
                0 => break,
                contradiction => slack = slack.saturating_add(contradiction),
            }
        }
        let of_rank = |(at, rank): (usize, &u32)| {
            let (upper, lower) = (paths[caller][at], paths[at][caller].saturating_neg());
            let is_bound = upper < NO_BOUND && lower > -NO_BOUND;
            let error_ns = upper.abs_diff(lower).div_ceil(2).saturating_add(drift_ns);
            is_bound.then(|| (*rank, ClockOffset { offset_ns: upper.midpoint(lower), error_ns }))
        };
        let mut offsets: BTreeMap<u32, ClockOffset> = ranks.iter().enumerate().filter_map(of_rank).collect();
        offsets.insert(CALLER, ClockOffset::default());
        offsets
    }
}

/// Stands for a difference without a bound.
const NO_BOUND: i64 = i64::MAX / 4;

/// Replaces each bound by the sum of the bounds along the shortest path. Returns how far the bounds contradict each other,
/// 0 if they do not.
fn shorten_paths(paths: &mut [Vec<i64>]) -> i64 {
    let count = paths.len();
    let mut contradiction = 0;
    for via in 0..count {
        for from in 0..count {
            for to in 0..count {
                let sum = paths[from][via].saturating_add(paths[via][to]);
                if from == to {
                    contradiction = contradiction.max(sum.saturating_neg());
                } else if paths[from][via] < NO_BOUND && paths[via][to] < NO_BOUND {
                    paths[from][to] = paths[from][to].min(sum);
                }
            }
        }
    }
    contradiction
}

/// Lists the parts of a rank in the collectives of a call. A collective is named by its communicator and its number among those of
/// the communicator.
fn list_parts(
    program: &Program,
    mesh: &Mesh,
    rank: u32,
    times: &PhaseOpTimes,
) -> Vec<((Communicator, usize), Part)> {
    let mut counts: BTreeMap<Communicator, usize> = BTreeMap::new();
    let part = |of_op: &CollectiveTimes| {
        let op = program.ops.get(of_op.op as usize).filter(|op| waits_for_all_members(op))?;
        let communicator = CommRoute::from_op(op)?.communicator_of(mesh, Rank(rank))?;
        let count = counts.entry(communicator.clone()).or_default();
        let number = *count;
        *count += 1;
        let begun_ns = times.start_ns + times.begins_ns.get(of_op.op as usize).copied()?;
        let completed_ns = times.start_ns + of_op.completed_ns;
        Some(((communicator, number), Part { rank, begun_ns, completed_ns }))
    };
    times.collectives.iter().filter_map(part).collect()
}

/// Returns whether no member completes a collective before every member has begun to issue it. Of gathers and all-to-alls that
/// is not certain: a member may have nothing to send.
fn waits_for_all_members(op: &Op) -> bool {
    matches!(op.opcode, Opcode::AllReduce | Opcode::ReduceScatter)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock of rank 1 began an hour before that of the caller.
    const HOUR_NS: u64 = 3_600_000_000_000;

    /// An event of a rank, with its time on the clock of the caller.
    type Timed = (u32, u64);

    fn align(orders: &[[Timed; 2]], drift_ns: u64) -> BTreeMap<u32, ClockOffset> {
        let shown = |(rank, ns): Timed| (rank, if rank == 1 { ns + HOUR_NS } else { ns });
        let mut bounds = ClockBounds::default();
        orders.iter().for_each(|[before, after]| bounds.add_order(shown(*before), shown(*after)));
        bounds.find_offsets(drift_ns)
    }

    const RIGHT: i64 = -(HOUR_NS as i64);
    const CALL: [[Timed; 2]; 2] = [[(CALLER, 1000), (1, 3000)], [(1, 6000), (CALLER, 9000)]];

    #[test]
    fn a_call_bounds_the_clock_of_a_rank_and_a_collective_more_so() {
        let found = align(&CALL, 0);
        assert_eq!(found[&0], ClockOffset::default());
        assert_eq!(found[&1], ClockOffset { offset_ns: RIGHT + 500, error_ns: 2500 });
        assert_eq!(align(&CALL, 7)[&1], ClockOffset { offset_ns: RIGHT + 500, error_ns: 2507 });
        // Each rank completes a sum after the other has begun to send its part.
        let sum = [[(0, 3500), (1, 3700)], [(1, 3600), (0, 3900)]];
        let found = align(&[CALL, sum].concat(), 0);
        assert_eq!(found[&1], ClockOffset { offset_ns: RIGHT + 50, error_ns: 250 });
    }

    #[test]
    fn a_rank_that_meets_rank_0_through_another_is_bounded_by_both() {
        let pairs = [(0, 1), (1, 0), (1, 2), (2, 1)];
        let orders = pairs.map(|(a, b)| [(a, 5000), (b, 5040)]);
        let found = align(&orders, 0);
        assert_eq!(found[&1], ClockOffset { offset_ns: RIGHT, error_ns: 40 });
        assert_eq!(found[&2], ClockOffset { offset_ns: 0, error_ns: 80 });
    }

    #[test]
    fn bounds_that_contradict_each_other_are_widened_and_the_error_says_so() {
        // Rank 1 seems to complete a sum 300 ns before rank 0 begins it.
        let wrong = [[(0, 4000), (1, 3700)], [(1, 3600), (0, 3650)]];
        let found = align(&[CALL, wrong].concat(), 0);
        let error = found[&1].error_ns;
        assert!((100..=600).contains(&error), "{found:?}");
        assert!(found[&1].offset_ns.abs_diff(RIGHT) <= 600, "{found:?}");
    }

    #[test]
    fn a_rank_without_any_order_has_no_offset() {
        assert_eq!(align(&[[(1, 10), (2, 20)]], 0).keys().copied().collect::<Vec<_>>(), [0]);
    }
}
