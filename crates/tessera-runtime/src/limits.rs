//! Every queue and wait of a session, by name.

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostic, Diagnostics};

/// A queue or wait without a bound.
pub(crate) static T0741: Code = Code {
    id: "T0741",
    title: "a queue or wait is zero or has no bound",
    page: "Requests waiting, finished chunks waiting and calls under way are all bounded, on both sides, so that a \
slow consumer stops the producer instead of filling memory; and every wait ends. A bound of zero would stop the \
stream, and a huge one is no bound.\n\nThe defaults are 2 requests, 2 chunks and 2 calls. More depth adds latency \
and hides nothing more.",
};

const SECOND: u64 = 1_000_000_000;

/// Bounds of a session. The defaults suit one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Requests that may wait at the leader.
    pub d_in: u32,
    /// Finished chunks that may wait for delivery.
    pub d_out: u32,
    /// Envelopes sent and not done.
    pub max_outstanding: u32,
    /// Longest load, from the start to the last rank's hello, in nanoseconds.
    pub hello_ns: u64,
    /// Longest answer to an envelope or a shutdown, in nanoseconds.
    pub ready_ns: u64,
    /// Longest time without progress inside a call before anything was learned, in nanoseconds.
    pub done_floor_ns: u64,
    /// The learned limit of a program is this many times the 99th percentile of the times without progress in it.
    pub done_factor: u32,
    /// Interval of heartbeats, in nanoseconds.
    pub heartbeat_ns: u64,
    /// A rank, or a leader, from which nothing was heard for so long has stopped, in nanoseconds.
    pub stale_ns: u64,
    /// How long the leader waits for the cause after hearing an echo of a failure, in nanoseconds.
    pub blame_ns: u64,
    /// Longest time in which the studio answers nothing that it was asked, in nanoseconds.
    pub studio_ns: u64,
    /// How long a failing process waits for its engine before it exits hard, in nanoseconds.
    pub unwind_ns: u64,
    /// How long the launcher waits for a leader's report and for ranks to go before it kills, in nanoseconds.
    pub reap_ns: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            d_in: 2,
            d_out: 2,
            max_outstanding: 2,
            hello_ns: 600 * SECOND,
            ready_ns: 5 * SECOND,
            done_floor_ns: 5 * SECOND,
            done_factor: 4,
            heartbeat_ns: SECOND / 4,
            stale_ns: 3 * SECOND,
            blame_ns: SECOND / 5,
            studio_ns: 60 * SECOND,
            unwind_ns: SECOND / 2,
            reap_ns: SECOND,
        }
    }
}

impl Limits {
    /// Deepest queue that still counts as bounded.
    pub const MAX_DEPTH: u32 = 64;
    /// Longest wait that still counts as bounded: a day.
    pub const MAX_WAIT_NS: u64 = 24 * 3600 * SECOND;

    /// Everything that is wrong with them.
    #[must_use]
    pub fn check(&self) -> Diagnostics {
        let depths = [
            ("d_in", u64::from(self.d_in)),
            ("d_out", u64::from(self.d_out)),
            ("max_outstanding", u64::from(self.max_outstanding)),
            ("done_factor", u64::from(self.done_factor)),
        ];
        let waits = [
            ("hello_ns", self.hello_ns),
            ("ready_ns", self.ready_ns),
            ("done_floor_ns", self.done_floor_ns),
            ("heartbeat_ns", self.heartbeat_ns),
            ("stale_ns", self.stale_ns),
            ("blame_ns", self.blame_ns),
            ("studio_ns", self.studio_ns),
            ("unwind_ns", self.unwind_ns),
            ("reap_ns", self.reap_ns),
        ];
        let mut found = Vec::new();
        for (most, list) in [(u64::from(Limits::MAX_DEPTH), &depths[..]), (Limits::MAX_WAIT_NS, &waits[..])] {
            for (name, value) in list {
                if *value == 0 || *value > most {
                    found.push(
                        Diagnostic::error(&T0741, format!("`{name}` is not a bound"))
                            .at("given", value.to_string())
                            .at("allowed", format!("1 to {most}")),
                    );
                }
            }
        }
        if self.stale_ns < self.heartbeat_ns.saturating_mul(2) {
            found.push(
                Diagnostic::error(&T0741, "`stale_ns` is shorter than two heartbeats")
                    .at("stale_ns", self.stale_ns.to_string())
                    .at("heartbeat_ns", self.heartbeat_ns.to_string()),
            );
        }
        found
    }
}

/// A clock that counts at most one heartbeat per step: time during which this process itself did not run is
/// not held against its peers.
#[derive(Debug, Clone, Default)]
pub(crate) struct AwakeClock {
    last_ns: Option<u64>,
    awake_ns: u64,
}

impl AwakeClock {
    pub(crate) fn advance(&mut self, now_ns: u64, most_ns: u64) -> u64 {
        let passed = self.last_ns.map_or(0, |last| now_ns.saturating_sub(last));
        self.last_ns = Some(now_ns.max(self.last_ns.unwrap_or(0)));
        self.awake_ns += passed.min(most_ns);
        self.awake_ns
    }

    pub(crate) fn now(&self) -> u64 {
        self.awake_ns
    }
}

/// Nanoseconds for a person.
pub(crate) fn ms(ns: u64) -> String {
    format!("{} ms", ns / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bound_must_be_one() {
        assert!(Limits::default().check().is_empty());
        let names = |l: Limits| l.check().iter().map(|d| d.message.clone()).collect::<Vec<_>>();
        assert_eq!(names(Limits { d_out: 0, ..Limits::default() }), ["`d_out` is not a bound"]);
        assert_eq!(names(Limits { d_in: u32::MAX, ..Limits::default() }), ["`d_in` is not a bound"]);
        assert_eq!(names(Limits { ready_ns: u64::MAX, ..Limits::default() }), ["`ready_ns` is not a bound"]);
        assert_eq!(
            names(Limits { stale_ns: 1, ..Limits::default() }),
            ["`stale_ns` is shorter than two heartbeats"]
        );
    }

    #[test]
    fn a_sleep_counts_as_one_step() {
        let mut clock = AwakeClock::default();
        assert_eq!(clock.advance(1_000_000, 10), 0);
        assert_eq!(clock.advance(1_000_007, 10), 7);
        assert_eq!(clock.advance(9_000_000, 10), 17);
        assert_eq!(clock.advance(3, 10), 17, "a clock that steps back stands still");
    }
}
