//! The timestamps that ranks collect while they run and write into files.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tessera_runtime::flight::{FlightEvent, FlightSink};

/// Timestamps of one rank, in nanoseconds of the monotonic clock. Lists of one entry per chunk are
/// in chunk order.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RankTimestamps {
    /// Leader: just before it handed over a request, which is decided on arrival.
    pub requested: Vec<u64>,
    /// Leader: times of the call of each finished chunk.
    pub calls: Vec<CallTimestamps>,
    /// Call id and time at which the leader committed a call or a rank received the commit.
    pub commits: Vec<(u64, u64)>,
    /// Times at which a committed call reached the engine.
    pub engine_started: Vec<u64>,
    /// Leader: before it sent the first byte of an echo, the bare exchange before each request.
    pub echo_sent: Vec<u64>,
    /// Other ranks: after they read the last byte of an echo's commit.
    pub echo_read: Vec<u64>,
}

/// Times of a call by the leader's own clock, which started with its process.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct CallTimestamps {
    /// Id of the call, which the commit events of all ranks repeat.
    pub id: u64,
    /// Time at which the leader decided the call and sent its envelope.
    pub decided_ns: u64,
    /// Time at which the leader received the last rank's ready message.
    pub ready_ns: u64,
    /// Time at which the leader sent the commit.
    pub committed_ns: u64,
}

/// Timestamps that a rank collects while it runs.
#[derive(Default)]
pub(super) struct TimestampSink(Mutex<RankTimestamps>);

impl TimestampSink {
    pub(super) fn with_timestamps(&self, add: impl FnOnce(&mut RankTimestamps)) {
        // If a thread panicked, the run ends and nothing reads the timestamps.
        if let Ok(mut stamps) = self.0.lock() {
            add(&mut stamps);
        }
    }
}

impl FlightSink for TimestampSink {
    fn record_event(&self, mark: FlightEvent<'_>) {
        let now = now_ns();
        if let FlightEvent::Commit { call_id } = mark {
            self.with_timestamps(|s| s.commits.push((call_id, now)));
        }
    }
}

/// Returns the time of the monotonic clock in nanoseconds.
pub fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

pub(super) fn timestamps_file(dir: &Path, rank: u32) -> PathBuf {
    dir.join(format!("rank-{rank}.json"))
}
