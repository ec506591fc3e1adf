//! The events of the simulated devices, and their times.

use super::SimProgramId;
use crate::communicators::CommunicatorIndex;

/// Internal times are fractional nanoseconds; a time at most this far above a whole nanosecond
/// rounds down to it.
pub(super) const ROUNDING_NS: f64 = 1e-3;

/// A time in nanoseconds; never negative and never NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TimeNs(pub(super) f64);

impl Eq for TimeNs {}
impl PartialOrd for TimeNs {
    fn partial_cmp(&self, other: &TimeNs) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for TimeNs {
    fn cmp(&self, other: &TimeNs) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Debug)]
pub(super) enum EventKind {
    ProgramStart(usize, SimProgramId),
    WorkRequest { rank: usize, ns: u64 },
    HostLaunch(usize),
    WorkEnd { rank: usize, version: u64 },
    TransferEnd(CommunicatorIndex, u64),
}

/// Rounds a time up to whole nanoseconds.
pub(super) fn ceil_ns(ns: f64) -> u64 {
    (ns - ROUNDING_NS).ceil().max(0.0) as u64
}
