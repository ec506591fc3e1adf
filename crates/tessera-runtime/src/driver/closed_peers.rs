//! Delays the reports of peers whose sockets closed.

use std::time::{Duration, Instant};

/// When a launcher is killed, its ranks die with it, and some of their sockets close before the
/// launcher's socket does.
const LAUNCHER_GRACE: Duration = Duration::from_millis(50);

/// Peers whose sockets closed, in the order of detection. They are reported only after a delay, in
/// which a dead launcher would be detected first.
#[derive(Default)]
pub(super) struct ClosedPeers {
    delay: Duration,
    closed: Vec<(Instant, u32, String)>,
}

impl ClosedPeers {
    /// Delays later reports: this process has a launcher, or a signal has reached every rank.
    pub(super) fn enable_delay(&mut self) {
        self.delay = LAUNCHER_GRACE;
    }

    pub(super) fn add_closed(&mut self, rank: u32, reason: String) {
        self.closed.push((Instant::now(), rank, reason));
    }

    /// Removes and returns the peers whose delay has passed.
    pub(super) fn take_due(&mut self) -> Vec<(u32, String)> {
        let due_count = self.closed.iter().take_while(|(since, ..)| since.elapsed() >= self.delay).count();
        self.closed.drain(..due_count).map(|(_, rank, how)| (rank, how)).collect()
    }

    /// Removes and returns all peers, because another failure arrived that they may have caused.
    pub(super) fn take_all(&mut self) -> Vec<(u32, String)> {
        self.closed.drain(..).map(|(_, rank, how)| (rank, how)).collect()
    }
}
