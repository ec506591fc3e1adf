//! The bounds of every queue and every wait of a session.

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, Diagnostics};

use crate::codes::T0741;

const SECOND: u64 = 1_000_000_000;
/// Finished ranks get this many times `reap_ns` to release their devices.
const FINISH_REAP_FACTOR: u64 = 3;

/// The bounds of a session. The defaults suit a single host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Maximum requests that wait at the leader.
    pub d_in: u32,
    /// Maximum finished chunks that wait for delivery.
    pub d_out: u32,
    /// Maximum calls whose envelope is sent and whose results are not complete.
    pub max_outstanding: u32,
    /// Maximum load time, from the start to the last rank's hello, in nanoseconds.
    pub hello_ns: u64,
    /// Maximum time to answer an envelope or a shutdown, in nanoseconds.
    pub ready_ns: u64,
    /// Maximum time without progress inside a call before a limit is learned, in nanoseconds.
    pub done_floor_ns: u64,
    /// Factor of a program's learned limit over the 99th percentile of its times without progress.
    pub done_factor: u32,
    /// Interval at which leader and ranks send heartbeats, in nanoseconds; at most half of
    /// `stale_ns`.
    pub heartbeat_ns: u64,
    /// Time after which a rank or leader without any message counts as stopped, in nanoseconds.
    pub stale_ns: u64,
    /// Time that the leader waits for the cause after a secondary failure, in nanoseconds.
    pub blame_ns: u64,
    /// Maximum time in which the media pipeline leaves every request unanswered, in nanoseconds.
    pub media_ns: u64,
    /// Time that a failing process waits for its engine before it exits without cleanup, in
    /// nanoseconds.
    pub unwind_ns: u64,
    /// Time that the launcher waits for the leader's report and for ranks to exit before it kills
    /// them, in nanoseconds.
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
            media_ns: 60 * SECOND,
            unwind_ns: SECOND / 2,
            reap_ns: SECOND,
        }
    }
}

impl Limits {
    /// Highest allowed value of `d_in`, `d_out`, `max_outstanding` and `done_factor`.
    pub const MAX_DEPTH: u32 = 64;
    /// Maximum length of a wait: a day.
    pub const MAX_WAIT_NS: u64 = 24 * 3600 * SECOND;

    /// Returns a diagnostic for every invalid bound.
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
            ("media_ns", self.media_ns),
            ("unwind_ns", self.unwind_ns),
            ("reap_ns", self.reap_ns),
        ];
        let mut found = Vec::new();
        for (max_value, list) in
            [(u64::from(Limits::MAX_DEPTH), &depths[..]), (Limits::MAX_WAIT_NS, &waits[..])]
        {
            for (name, value) in list {
                if *value == 0 || *value > max_value {
                    found.push(
                        Diagnostic::error(&T0741, format!("`{name}` is out of range"))
                            .with_label("given", value.to_string())
                            .with_label("allowed", format!("1 to {max_value}")),
                    );
                }
            }
        }
        if self.stale_ns < self.heartbeat_ns.saturating_mul(2) {
            found.push(
                Diagnostic::error(&T0741, "`stale_ns` is shorter than two heartbeats")
                    .with_label("stale_ns", self.stale_ns.to_string())
                    .with_label("heartbeat_ns", self.heartbeat_ns.to_string()),
            );
        }
        found
    }

    /// Returns every bound with its name, in one line.
    #[must_use]
    pub fn describe(&self) -> String {
        let Limits { d_in, d_out, max_outstanding, hello_ns, ready_ns, done_floor_ns, done_factor, .. } =
            self;
        let Limits { heartbeat_ns, stale_ns, blame_ns, media_ns, unwind_ns, reap_ns, .. } = self;
        format!(
            "d_in={d_in} d_out={d_out} max_outstanding={max_outstanding} hello_ns={hello_ns} ready_ns={ready_ns} \
             done_floor_ns={done_floor_ns} done_factor={done_factor} heartbeat_ns={heartbeat_ns} stale_ns={stale_ns} \
             blame_ns={blame_ns} media_ns={media_ns} unwind_ns={unwind_ns} reap_ns={reap_ns}"
        )
    }

    /// Returns the limit that the leader's silence towards its launcher exceeds, in nanoseconds. A
    /// running leader sends one message per heartbeat interval; until its first message it may be
    /// loading.
    pub(crate) fn exceeded_silence_ns(&self, last_message_ns: Option<u64>, now_ns: u64) -> Option<u64> {
        let (since, limit) = last_message_ns.map_or((0, self.hello_ns), |at| (at, self.stale_ns));
        (now_ns.saturating_sub(since) > limit).then_some(limit)
    }

    /// Returns the time that the launcher gives the ranks to exit once the run ends, in
    /// nanoseconds.
    pub(crate) fn exit_limit_ns(&self, finished: bool) -> u64 {
        if finished { self.reap_ns.saturating_mul(FINISH_REAP_FACTOR) } else { self.reap_ns }
    }
}

/// A clock that advances by at most one heartbeat per update. Time in which this process was not
/// scheduled therefore does not count against its peers.
#[derive(Debug, Clone, Default)]
pub(crate) struct AwakeClock {
    last_ns: Option<u64>,
    awake_ns: u64,
}

impl AwakeClock {
    pub(crate) fn advance_to(&mut self, now_ns: u64, max_step_ns: u64) -> u64 {
        let passed = self.last_ns.map_or(0, |last| now_ns.saturating_sub(last));
        self.last_ns = Some(now_ns.max(self.last_ns.unwrap_or(0)));
        self.awake_ns += passed.min(max_step_ns);
        self.awake_ns
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.awake_ns
    }
}

/// Formats nanoseconds as whole milliseconds, rounded down, such as `250 ms`.
pub(crate) fn format_ms(ns: u64) -> String {
    format!("{} ms", ns / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: C-11, O-01, S-09
    #[test]
    fn every_bound_must_be_in_range() {
        assert!(Limits::default().check().is_empty());
        let names = |l: Limits| l.check().iter().map(|d| d.message.clone()).collect::<Vec<_>>();
        assert_eq!(names(Limits { d_out: 0, ..Limits::default() }), ["`d_out` is out of range"]);
        assert_eq!(names(Limits { d_in: u32::MAX, ..Limits::default() }), ["`d_in` is out of range"]);
        assert_eq!(names(Limits { ready_ns: u64::MAX, ..Limits::default() }), ["`ready_ns` is out of range"]);
        assert_eq!(
            names(Limits { stale_ns: 1, ..Limits::default() }),
            ["`stale_ns` is shorter than two heartbeats"]
        );
    }

    #[test]
    fn a_sleep_advances_the_clock_by_one_step() {
        let mut clock = AwakeClock::default();
        assert_eq!(clock.advance_to(1_000_000, 10), 0);
        assert_eq!(clock.advance_to(1_000_007, 10), 7);
        assert_eq!(clock.advance_to(9_000_000, 10), 17);
        assert_eq!(clock.advance_to(3, 10), 17, "a time that goes back changes nothing");
    }
}
