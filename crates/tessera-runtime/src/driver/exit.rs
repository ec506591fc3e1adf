//! Leaving in bounded time, whatever the engine's libraries, a full pipe or a lock do on the way out.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::FailureClass;
use crate::limits::{AwakeClock, Limits};

/// How long the exit handlers of libraries may take.
const HANDLERS: Duration = Duration::from_millis(300);
/// How often the keeper looks.
const LOOK: Duration = Duration::from_millis(50);
/// A control thread that was not seen for so many times `stale_ns` is stuck; its peers have long given it up.
const STUCK_FACTOR: u64 = 2;

/// Ends the process with this status. If the exit handlers of a library hang, the process ends without them.
pub fn exit(status: i32) -> ! {
    let backstop = std::thread::Builder::new().name("backstop".into()).spawn(move || {
        std::thread::sleep(HANDLERS);
        at_once(status)
    });
    match backstop {
        Ok(_) => std::process::exit(status),
        Err(_) => at_once(status),
    }
}

/// Ends the process without exit handlers: no code of a library runs, and no lock or pipe is waited for. What is still
/// to be written must have been written.
pub fn exit_at_once(status: i32) -> ! {
    at_once(status)
}

fn at_once(status: i32) -> ! {
    signal_hook::low_level::exit(status)
}

/// A thread that ends the process when a deadline passes, or when the control thread is stuck. It is there from
/// the start, so that in need nothing has to be allocated or spawned.
#[derive(Debug)]
pub(crate) struct Keeper(Arc<Kept>);

#[derive(Debug)]
struct Kept {
    start: Instant,
    /// Nanoseconds from the start at which the process ends; zero for none.
    deadline_ns: AtomicU64,
    status: AtomicI64,
    /// Grows while the control thread goes round. `DISMISSED`: it need not any more.
    rounds: AtomicU64,
}

const DISMISSED: u64 = u64::MAX;

impl Keeper {
    /// # Errors
    /// When the system starts no thread.
    pub(crate) fn start(limits: &Limits) -> std::io::Result<Keeper> {
        let kept = Arc::new(Kept {
            start: Instant::now(),
            deadline_ns: AtomicU64::new(0),
            status: AtomicI64::new(0),
            rounds: AtomicU64::new(0),
        });
        let shared = Arc::clone(&kept);
        let (stuck_ns, beat_ns) = (limits.stale_ns.saturating_mul(STUCK_FACTOR), limits.heartbeat_ns);
        std::thread::Builder::new().name("keeper".into()).spawn(move || shared.keep(stuck_ns, beat_ns))?;
        Ok(Keeper(kept))
    }

    /// The control thread goes round.
    pub(crate) fn round(&self) {
        self.0.rounds.fetch_add(1, Ordering::Relaxed);
    }

    /// From now on the process lives at most `limit`, then exits with `status`.
    pub(crate) fn exit_within(&self, limit: Duration, status: i32) {
        self.0.status.store(i64::from(status), Ordering::Relaxed);
        let at = (self.0.start.elapsed() + limit).as_nanos() as u64;
        self.0.deadline_ns.store(at.max(1), Ordering::Release);
    }
}

impl Drop for Keeper {
    /// The control loop is over; a deadline stays.
    fn drop(&mut self) {
        self.0.rounds.store(DISMISSED, Ordering::Release);
    }
}

impl Kept {
    fn keep(&self, stuck_ns: u64, beat_ns: u64) {
        let mut clock = AwakeClock::default();
        let (mut seen, mut seen_ns) = (0, 0);
        loop {
            std::thread::sleep(LOOK);
            let now = self.start.elapsed().as_nanos() as u64;
            let awake_ns = clock.advance(now, beat_ns);
            let deadline = self.deadline_ns.load(Ordering::Acquire);
            if deadline != 0 {
                if now >= deadline {
                    at_once(self.status.load(Ordering::Relaxed) as i32);
                }
                continue;
            }
            let rounds = self.rounds.load(Ordering::Acquire);
            if rounds == DISMISSED {
                return;
            }
            if rounds != seen {
                (seen, seen_ns) = (rounds, awake_ns);
            } else if awake_ns - seen_ns > stuck_ns {
                at_once(FailureClass::Stall.exit_code());
            }
        }
    }
}
