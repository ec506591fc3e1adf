//! Ends the process in bounded time, even if a library's exit handler, a full pipe or a lock would
//! block it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::FailureClass;
use crate::limits::{AwakeClock, Limits};

/// Time limit of the libraries' exit handlers.
const HANDLER_TIMEOUT: Duration = Duration::from_millis(300);
/// Interval at which the watchdog checks the process.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The control thread counts as stuck after `STUCK_FACTOR * stale_ns` without progress. Its peers
/// have declared it stalled long before.
const STUCK_FACTOR: u64 = 2;

/// Ends the process with `status`. If a library's exit handler hangs, the process ends without it.
pub fn exit_process(status: i32) -> ! {
    let backstop = std::thread::Builder::new().name("backstop".into()).spawn(move || {
        std::thread::sleep(HANDLER_TIMEOUT);
        exit_without_handlers(status)
    });
    match backstop {
        Ok(_) => std::process::exit(status),
        Err(_) => exit_without_handlers(status),
    }
}

/// Ends the process without exit handlers: no library code runs, and no lock or pipe can block. The
/// caller must have written its output before.
pub fn exit_without_handlers(status: i32) -> ! {
    signal_hook::low_level::exit(status)
}

/// A thread that ends the process when a deadline passes or when the control thread is stuck. It
/// runs from the start, so that an emergency exit needs no allocation and no new thread.
#[derive(Debug)]
pub(crate) struct Watchdog(Arc<WatchdogState>);

#[derive(Debug)]
struct WatchdogState {
    start: Instant,
    /// Time since `start` at which the process must end, in nanoseconds; 0 means no deadline.
    deadline_ns: AtomicU64,
    status: AtomicI64,
    /// Iterations of the control loop; `LOOP_ENDED` once the loop has ended.
    iterations: AtomicU64,
}

const LOOP_ENDED: u64 = u64::MAX;

impl Watchdog {
    /// Starts the watchdog thread.
    ///
    /// # Errors
    /// Returns the operating system's error if no thread can be started.
    pub(crate) fn start_thread(limits: &Limits) -> std::io::Result<Watchdog> {
        let state = Arc::new(WatchdogState {
            start: Instant::now(),
            deadline_ns: AtomicU64::new(0),
            status: AtomicI64::new(0),
            iterations: AtomicU64::new(0),
        });
        let shared = Arc::clone(&state);
        let (stuck_ns, heartbeat_ns) = (limits.stale_ns.saturating_mul(STUCK_FACTOR), limits.heartbeat_ns);
        std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(move || shared.watch_process(stuck_ns, heartbeat_ns))?;
        Ok(Watchdog(state))
    }

    /// Records that the control thread makes progress.
    pub(crate) fn mark_alive(&self) {
        self.0.iterations.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the process with `status` after `limit`, unless it exits before.
    pub(crate) fn exit_within(&self, limit: Duration, status: i32) {
        self.0.status.store(i64::from(status), Ordering::Relaxed);
        let at = (self.0.start.elapsed() + limit).as_nanos() as u64;
        self.0.deadline_ns.store(at.max(1), Ordering::Release);
    }
}

impl Drop for Watchdog {
    /// Stops watching the control loop, which has ended. A deadline stays in force.
    fn drop(&mut self) {
        self.0.iterations.store(LOOP_ENDED, Ordering::Release);
    }
}

impl WatchdogState {
    fn watch_process(&self, stuck_ns: u64, heartbeat_ns: u64) {
        let mut clock = AwakeClock::default();
        let (mut last_iterations, mut last_progress_ns) = (0, 0);
        loop {
            std::thread::sleep(CHECK_INTERVAL);
            let now = self.start.elapsed().as_nanos() as u64;
            let awake_ns = clock.advance_to(now, heartbeat_ns);
            let deadline = self.deadline_ns.load(Ordering::Acquire);
            if deadline != 0 {
                if now >= deadline {
                    exit_without_handlers(self.status.load(Ordering::Relaxed) as i32);
                }
                continue;
            }
            let rounds = self.iterations.load(Ordering::Acquire);
            if rounds == LOOP_ENDED {
                return;
            }
            if rounds != last_iterations {
                (last_iterations, last_progress_ns) = (rounds, awake_ns);
            } else if awake_ns - last_progress_ns > stuck_ns {
                exit_without_handlers(FailureClass::Stall.exit_code());
            }
        }
    }
}
