//! A timer that cannot report the time of work that is only enqueued.

/// A started measurement of work on a device. Calls that enqueue work return before the device has
/// run it, so this type has no duration: only [`UnsynchronisedTimer::synchronise`] gives one.
///
/// ```compile_fail
/// let timer = tessera_tools::bench::UnsynchronisedTimer::start(|| 0);
/// timer.elapsed_ns();
/// ```
#[derive(Debug)]
#[must_use = "an unsynchronised timer has measured nothing"]
pub struct UnsynchronisedTimer<C> {
    clock: C,
    begin_ns: u64,
}

/// The time from a timer's start to the end of the device's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SynchronisedTime {
    elapsed_ns: u64,
}

impl<C: Fn() -> u64> UnsynchronisedTimer<C> {
    /// Starts a measurement on a clock that returns nanoseconds.
    pub fn start(clock: C) -> UnsynchronisedTimer<C> {
        UnsynchronisedTimer { begin_ns: clock(), clock }
    }

    /// Calls `wait`, which returns once the device has finished the measured work, and then reads
    /// the clock.
    ///
    /// # Errors
    /// The error of `wait`; there is no time then.
    pub fn synchronise<E>(self, wait: impl FnOnce() -> Result<(), E>) -> Result<SynchronisedTime, E> {
        wait()?;
        Ok(SynchronisedTime { elapsed_ns: (self.clock)().saturating_sub(self.begin_ns) })
    }
}

impl SynchronisedTime {
    /// Returns the time in nanoseconds.
    #[must_use]
    pub fn elapsed_ns(self) -> u64 {
        self.elapsed_ns
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    // proves: O-13
    #[test]
    fn a_time_includes_the_work_that_was_only_enqueued() {
        let (now_ns, enqueued_ns) = (Cell::new(5), Cell::new(0));
        let timer = UnsynchronisedTimer::start(|| now_ns.get());
        // The host returns after 1 ns; the device needs 700 ns.
        now_ns.set(now_ns.get() + 1);
        enqueued_ns.set(700);
        let time = timer.synchronise(|| {
            now_ns.set(now_ns.get() + enqueued_ns.take());
            Ok::<(), &str>(())
        });
        assert_eq!(time.map(SynchronisedTime::elapsed_ns), Ok(701));
        let failed = UnsynchronisedTimer::start(|| now_ns.get()).synchronise(|| Err("the device is lost"));
        assert_eq!(failed, Err("the device is lost"), "a failed wait gives no time");
    }
}
