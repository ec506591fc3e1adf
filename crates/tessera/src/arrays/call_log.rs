//! What a run of array programs keeps of its calls: their times, and the times of their ops if it is traced.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tessera_ir::StreamKind;
use tessera_report::record::RunDevice;
use tessera_runtime::wire::PhaseOpTimes;

use super::array_plan::ArrayPlan;
use super::array_trace::{ArrayTrace, expand_ops};
use super::clock_alignment::align_clocks;
use super::run_record::{ArrayCallRecord, ArrayRunRecord, RankPlace, TimedCall};
use super::stream_ids::StreamIds;
use crate::clock::monotonic_ns;

/// Maximum number of calls of which the times are kept; those of older calls are dropped.
pub const MAX_KEPT_CALLS: usize = 10_000;
/// Maximum number of ops, over all ranks, of which the times are kept; those of older calls are dropped.
pub const MAX_KEPT_OPS: usize = 500_000;

/// The log of a run, which stays readable after its end.
pub struct ArrayRunLog {
    plan: Arc<ArrayPlan>,
    place: RankPlace,
    device: RunDevice,
    /// Numbers of the streams in the trace; `None` if the run is not traced.
    stream_ids: Option<StreamIds>,
    /// Time of the monotonic clock at which every rank was loaded.
    loaded_ns: u64,
    calls: Mutex<KeptCalls>,
}

#[derive(Default)]
struct KeptCalls {
    newest: VecDeque<TimedCall>,
    kept_ops: usize,
}

impl ArrayRunLog {
    /// Begins the log of a run whose ranks are loaded.
    pub(super) fn begin(
        plan: &Arc<ArrayPlan>,
        (place, device): (RankPlace, RunDevice),
        mut stream_ids: Option<StreamIds>,
    ) -> Arc<ArrayRunLog> {
        if let Some(ids) = &mut stream_ids {
            let sealed = &plan.sealed;
            let ranks = || sealed.mesh().iter();
            let programs =
                sealed.phase_names().iter().flat_map(|phase| ranks().map(move |rank| (phase, rank)));
            let programs = programs.filter_map(|(phase, rank)| sealed.rank_program(phase, rank));
            let streams: BTreeSet<&str> =
                programs.flat_map(|p| p.streams.iter().map(String::as_str)).collect();
            ids.add_missing(StreamKind::ALL.map(StreamKind::name).into_iter().chain(streams));
        }
        let (plan, calls) = (Arc::clone(plan), Mutex::default());
        Arc::new(ArrayRunLog { plan, place, device, stream_ids, loaded_ns: monotonic_ns(), calls })
    }

    /// Adds a call that began at a time of the monotonic clock and ends now.
    pub(super) fn end_call(&self, program: &str, begun_ns: u64, op_times: Vec<(u32, PhaseOpTimes)>) {
        let since = |ns: u64| ns.saturating_sub(self.loaded_ns);
        let (start_ns, end_ns) = (since(begun_ns), since(monotonic_ns()));
        let mut calls = self.lock();
        let number = calls.count() + 1;
        let record = ArrayCallRecord { number, program: program.to_string(), start_ns, end_ns };
        calls.keep(TimedCall { record, op_times });
    }

    /// Returns whether the run is traced.
    #[must_use]
    pub fn is_traced(&self) -> bool {
        self.stream_ids.is_some()
    }

    /// Returns the record so far.
    #[must_use]
    pub fn record(&self) -> ArrayRunRecord {
        self.record_of(&self.lock())
    }

    /// Returns the trace so far; `None` if the run is not traced.
    #[must_use]
    pub fn trace(&self) -> Option<ArrayTrace> {
        let stream_ids = self.stream_ids.clone()?;
        // The ranks go on while the trace is made.
        let (record, timed) = {
            let calls = self.lock();
            (self.record_of(&calls), calls.newest.iter().cloned().collect::<Vec<TimedCall>>())
        };
        let offsets = match self.place {
            RankPlace::Joined => align_clocks(&self.plan, self.loaded_ns, &timed),
            // The ranks of one host share its clock.
            RankPlace::Threads | RankPlace::Processes => Vec::new(),
        };
        let events = expand_ops(&self.plan, &stream_ids, self.loaded_ns, &timed, &offsets);
        let mut clock_errors_ns = BTreeMap::new();
        for (rank, offset) in offsets.iter().flatten() {
            let largest: &mut u64 = clock_errors_ns.entry(*rank).or_default();
            *largest = offset.error_ns.max(*largest);
        }
        Some(ArrayTrace { record, stream_ids, events, clock_errors_ns })
    }

    fn record_of(&self, calls: &KeptCalls) -> ArrayRunRecord {
        let sealed = &self.plan.sealed;
        ArrayRunRecord {
            plan: sealed.digest_hex(),
            mesh: sealed.mesh().to_string(),
            ranks: sealed.mesh().mesh_size(),
            place: self.place,
            device: self.device,
            calls: calls.newest.iter().map(|call| call.record.clone()).collect(),
            call_count: calls.count(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, KeptCalls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeptCalls {
    /// Returns the number of all completed calls, which is that of the newest one.
    fn count(&self) -> u64 {
        self.newest.back().map_or(0, |call| call.record.number)
    }

    /// Keeps a call, and drops the oldest ones beyond the limits. The newest call stays, however large it is.
    fn keep(&mut self, call: TimedCall) {
        self.kept_ops += call.op_count();
        self.newest.push_back(call);
        while self.newest.len() > 1 && (self.newest.len() > MAX_KEPT_CALLS || self.kept_ops > MAX_KEPT_OPS) {
            let dropped = self.newest.pop_front();
            self.kept_ops -= dropped.map_or(0, |call| call.op_count());
        }
    }
}

impl TimedCall {
    fn op_count(&self) -> usize {
        self.op_times.iter().map(|(_, times)| times.begins_ns.len()).sum()
    }
}

impl fmt::Debug for ArrayRunLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArrayRunLog").field("record", &self.record()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(number: u64, ops: usize) -> TimedCall {
        let record = ArrayCallRecord { number, program: "f".to_string(), start_ns: 0, end_ns: 1 };
        let times = PhaseOpTimes { begins_ns: vec![0; ops], ..PhaseOpTimes::default() };
        TimedCall { record, op_times: vec![(0, times.clone()), (1, times)] }
    }

    #[test]
    fn the_newest_calls_are_kept_within_both_limits() {
        let mut kept = KeptCalls::default();
        (1..=MAX_KEPT_CALLS as u64 + 3).for_each(|number| kept.keep(call(number, 1)));
        let numbers =
            |kept: &KeptCalls| kept.newest.iter().map(|call| call.record.number).collect::<Vec<_>>();
        assert_eq!((numbers(&kept).len(), numbers(&kept)[0]), (MAX_KEPT_CALLS, 4));
        kept.keep(call(20_000, MAX_KEPT_OPS));
        assert_eq!(numbers(&kept), [20_000], "a call over the limit alone is kept");
        kept.keep(call(20_001, 5));
        assert_eq!((numbers(&kept), kept.kept_ops), (vec![20_001], 10));
    }
}
