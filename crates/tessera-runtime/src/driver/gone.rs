//! Peers whose sockets closed, kept back for a moment.

use std::time::{Duration, Instant};

/// A launcher that is killed takes its ranks along, and some of their sockets close before its own does.
const LAUNCHER_FIRST: Duration = Duration::from_millis(50);

/// Peers that are gone, in the order in which they were seen to be, until it is known that the launcher is not.
pub(super) struct Gone {
    wait: Duration,
    seen: Vec<(Instant, u32, String)>,
}

impl Gone {
    /// Nothing is kept back where nobody launched the ranks.
    pub(super) fn new(launched: bool) -> Gone {
        Gone { wait: if launched { LAUNCHER_FIRST } else { Duration::ZERO }, seen: Vec::new() }
    }

    /// From now on peers are kept back although nobody launched them.
    pub(super) fn keep_back(&mut self) {
        self.wait = LAUNCHER_FIRST;
    }

    pub(super) fn saw(&mut self, rank: u32, how: String) {
        self.seen.push((Instant::now(), rank, how));
    }

    /// Those that have waited.
    pub(super) fn due(&mut self) -> Vec<(u32, String)> {
        let waited = self.seen.iter().take_while(|(since, ..)| since.elapsed() >= self.wait).count();
        self.seen.drain(..waited).map(|(_, rank, how)| (rank, how)).collect()
    }

    /// All of them, because something else failed that may follow from it.
    pub(super) fn all(&mut self) -> Vec<(u32, String)> {
        self.seen.drain(..).map(|(_, rank, how)| (rank, how)).collect()
    }
}
