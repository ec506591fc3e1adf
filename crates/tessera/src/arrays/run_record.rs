//! The record of a run of array programs: its ranks, and when it ran which call.

use tessera_report::record::RunDevice;
use tessera_runtime::wire::PhaseOpTimes;

/// Where the ranks of a run are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankPlace {
    /// Threads of the calling process.
    Threads,
    /// Processes of this host.
    Processes,
    /// Processes of several hosts, of which rank 0 is one of this host.
    Joined,
}

/// The record of a run of array programs. Times are nanoseconds since the ranks were loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrayRunRecord {
    /// Digest of the sealed plan, as hex digits.
    pub plan: String,
    /// Mesh of the plan.
    pub mesh: String,
    /// Number of ranks.
    pub ranks: u32,
    /// Where the ranks are.
    pub place: RankPlace,
    /// Device of the ranks.
    pub device: RunDevice,
    /// The completed calls that the run keeps, oldest first.
    pub calls: Vec<ArrayCallRecord>,
    /// Number of all completed calls.
    pub call_count: u64,
}

/// A completed call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrayCallRecord {
    /// Number of the call among the completed ones, from 1.
    pub number: u64,
    /// Name of the program.
    pub program: String,
    /// Time at which the caller passed the inputs.
    pub start_ns: u64,
    /// Time at which the caller got the outputs.
    pub end_ns: u64,
}

/// A completed call with the times of the ops of each rank, on the monotonic clock.
#[derive(Clone)]
pub(super) struct TimedCall {
    pub(super) record: ArrayCallRecord,
    pub(super) op_times: Vec<(u32, PhaseOpTimes)>,
}

impl RankPlace {
    /// Returns the name of the place.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RankPlace::Threads => "threads",
            RankPlace::Processes => "processes",
            RankPlace::Joined => "joined",
        }
    }
}
