//! Synthetic delays: decode, encode and the generator's forwards last as long as they would on
//! another machine.
//!
//! They allow measuring overlap where the real decoder is cheap. The real work still runs and its
//! bits do not change; a stage that finishes early waits for the rest of its synthetic time. Every
//! rank announces the delays, so that a run with delays is never mistaken for a run without.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tessera_runtime::program_index::PhaseKind;

/// The synthetic delays of a run. A stage without a delay takes its real time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SyntheticDelays {
    /// Delays of the leader's decode and encode.
    pub media: Option<MediaDelays>,
    /// Total time of all generator forwards of a steady chunk in nanoseconds, divided evenly among
    /// them.
    pub generate_ns: Option<u64>,
}

impl SyntheticDelays {
    /// Returns the text that every rank announces: `none`, or the delays.
    #[must_use]
    pub fn announced_text(&self) -> String {
        let mut parts = Vec::new();
        if let Some(s) = self.media {
            parts.push(format!("decode {} + {} ns, encode {} ns", s.first_ns, s.rest_ns, s.encode_ns));
        }
        if let Some(ns) = self.generate_ns {
            parts.push(format!("generate {ns} ns"));
        }
        if parts.is_empty() { "none".to_string() } else { parts.join(", ") }
    }
}

/// Synthetic times of the leader's work on one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediaDelays {
    /// Decode of the chunk's first latent, in nanoseconds.
    pub first_ns: u64,
    /// Decode of its other latents, in nanoseconds.
    pub rest_ns: u64,
    /// Encode of the anchor, in nanoseconds.
    pub encode_ns: u64,
}

/// Sleeps until `ns` nanoseconds have passed since `begun`.
pub(crate) fn sleep_until_elapsed(begun: Instant, ns: u64) {
    std::thread::sleep(Duration::from_nanos(ns).saturating_sub(begun.elapsed()));
}

/// Maximum sleep between two progress reports and abort checks.
const MAX_SLEEP: Duration = Duration::from_millis(10);

/// First progress value during a wait; it is above the op count of any program.
const WAIT_PROGRESS_BASE: u32 = 1 << 31;

/// Makes the generator forwards of an engine last at least their synthetic time.
#[derive(Debug, Clone)]
pub(crate) struct ForwardDelay {
    forward_ns: u64,
    aborted: Arc<AtomicBool>,
}

impl ForwardDelay {
    /// Divides `generate_ns` among the `forwards` generator forwards of a steady chunk.
    pub(crate) fn new(generate_ns: u64, forwards: u64) -> ForwardDelay {
        ForwardDelay { forward_ns: generate_ns / forwards.max(1), aborted: Arc::default() }
    }

    /// Waits for the rest of the synthetic time of a program that began at `begun`, unless it is no
    /// generator forward or the run is aborted.
    pub(crate) fn wait_out(&self, program: &str, begun: Instant, progress: &(dyn Fn(u32) + Sync)) {
        if !PhaseKind::from_program(program).is_some_and(PhaseKind::is_generator) {
            return;
        }
        let delay = Duration::from_nanos(self.forward_ns);
        for progress_value in WAIT_PROGRESS_BASE.. {
            let left = delay.saturating_sub(begun.elapsed());
            if left.is_zero() || self.aborted.load(Ordering::Relaxed) {
                return;
            }
            progress(progress_value);
            std::thread::sleep(left.min(MAX_SLEEP));
        }
    }

    /// Ends the current wait and all later ones.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_are_announced_in_whole_nanoseconds() {
        assert_eq!(SyntheticDelays::default().announced_text(), "none");
        let media = Some(MediaDelays { first_ns: 1, rest_ns: 2, encode_ns: 3 });
        assert_eq!(
            SyntheticDelays { media, generate_ns: None }.announced_text(),
            "decode 1 + 2 ns, encode 3 ns"
        );
        let both = SyntheticDelays { media, generate_ns: Some(4) }.announced_text();
        assert_eq!(both, "decode 1 + 2 ns, encode 3 ns, generate 4 ns");
    }

    #[test]
    fn a_stage_lasts_its_time_and_not_twice() {
        let begun = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        sleep_until_elapsed(begun, 30_000_000);
        let lasted = begun.elapsed();
        assert!(lasted >= Duration::from_millis(30), "{lasted:?}");
        sleep_until_elapsed(begun, 1);
    }
}
