//! A process that ends with the process that started it.
//!
//! * `ParentTie::tie_to_parent()` makes the system kill this process when its parent ends. The tie outlasts its value.
//! * `outlive_parent(self)` undoes it: from then on a parent's end lets this process go on, and on Linux continues it if it
//!   is stopped, so that it can see the socket of the parent close.

#[cfg(target_os = "linux")]
pub(in crate::driver) use linux::ParentTie;
#[cfg(target_os = "macos")]
pub(in crate::driver) use macos::ParentTie;

#[cfg(target_os = "linux")]
mod linux {
    use std::io::{Error, Result};

    use rustix::process::{Signal, set_parent_process_death_signal};

    /// The kernel sends a signal when the thread that started this process ends.
    #[derive(Debug)]
    pub(in crate::driver) struct ParentTie(());

    impl ParentTie {
        pub(in crate::driver) fn tie_to_parent() -> Result<ParentTie> {
            set_parent_process_death_signal(Some(Signal::KILL)).map_err(Error::from)?;
            Ok(ParentTie(()))
        }

        pub(in crate::driver) fn outlive_parent(self) {
            // If this call fails, the kernel still kills the process, which leaves none behind either.
            let _ = set_parent_process_death_signal(Some(Signal::CONT));
        }
    }
}

/// A thread that looks for another parent, because macOS sends no signal. It cannot end a process that is stopped: such a
/// process ends when someone continues it. A kqueue would notice the end at once, but needs `unsafe`, and the socket to the
/// parent closes at once, too.
#[cfg(any(target_os = "macos", test))]
mod macos {
    use std::io::Result;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use rustix::process::{Pid, Signal, getpid, getppid, kill_process};

    const LOOK_INTERVAL: Duration = Duration::from_millis(50);

    #[derive(Debug)]
    pub(in crate::driver) struct ParentTie {
        is_cut: Arc<AtomicBool>,
    }

    impl ParentTie {
        #[cfg_attr(not(target_os = "macos"), allow(dead_code))]
        pub(in crate::driver) fn tie_to_parent() -> Result<ParentTie> {
            ParentTie::watch_parent(getppid, || {
                let _ = kill_process(getpid(), Signal::KILL);
            })
        }

        pub(in crate::driver) fn outlive_parent(self) {
            self.is_cut.store(true, Ordering::Relaxed);
        }

        /// Calls `end` when `parent` has returned another process than now.
        pub(super) fn watch_parent(
            parent: impl Fn() -> Option<Pid> + Send + 'static,
            end: impl FnOnce() + Send + 'static,
        ) -> Result<ParentTie> {
            let is_cut = Arc::new(AtomicBool::new(false));
            let (cut, first) = (Arc::clone(&is_cut), parent());
            let watch = move || {
                while parent() == first {
                    if cut.load(Ordering::Relaxed) {
                        return;
                    }
                    std::thread::sleep(LOOK_INTERVAL);
                }
                if !cut.load(Ordering::Relaxed) {
                    end();
                }
            };
            std::thread::Builder::new().name("parent".into()).spawn(watch)?;
            Ok(ParentTie { is_cut })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicI32, Ordering};
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use rustix::process::Pid;

    use super::macos;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn a_watched_parent_ends_the_process_unless_the_tie_is_cut() {
        for is_cut in [false, true] {
            let id = Arc::new(AtomicI32::new(100));
            let (parent, (ended, ends)) = (Arc::clone(&id), channel());
            let tie = macos::ParentTie::watch_parent(
                move || Pid::from_raw(parent.load(Ordering::Relaxed)),
                move || ended.send(()).unwrap(),
            );
            if is_cut {
                tie.unwrap().outlive_parent();
            } else {
                drop(tie.unwrap());
            }
            id.store(1, Ordering::Relaxed);
            // The thread drops its end of the channel when it ends without a call.
            let expected = if is_cut { Err(RecvTimeoutError::Disconnected) } else { Ok(()) };
            assert_eq!(ends.recv_timeout(LIMIT), expected);
        }
    }
}
