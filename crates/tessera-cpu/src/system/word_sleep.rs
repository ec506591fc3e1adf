//! Sleep until another thread, of this process or of another, changes a word of shared memory.
//!
//! * `sleep_while_equal(word, value, limit)` sleeps while a word has a value, until it is woken, or for this time, which is
//!   below a second. It may also return for no reason.
//! * `wake_sleepers(word)` wakes all threads of all processes that sleep on a word.

#[cfg(target_os = "linux")]
pub(crate) use linux::{sleep_while_equal, wake_sleepers};
#[cfg(target_os = "macos")]
pub(crate) use macos::{sleep_while_equal, wake_sleepers};

#[cfg(target_os = "linux")]
mod linux {
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    use rustix::thread::futex;

    pub(crate) fn sleep_while_equal(word: &AtomicU32, value: u32, limit: Duration) {
        let limit = futex::Timespec { tv_sec: 0, tv_nsec: limit.as_nanos() as _ };
        let _ = futex::wait(word, futex::Flags::empty(), value, Some(&limit));
    }

    pub(crate) fn wake_sleepers(word: &AtomicU32) {
        // The call can only fail for an address that is not mapped.
        let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
    }
}

/// Short naps. macOS has such a wait for memory of several processes since version 14.4 only; a nap adds its length to a
/// collective whose members come far apart, and needs no wake-up.
#[cfg(any(target_os = "macos", test))]
mod macos {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    const NAP: Duration = Duration::from_micros(100);

    pub(crate) fn sleep_while_equal(word: &AtomicU32, value: u32, limit: Duration) {
        if word.load(Ordering::SeqCst) == value {
            std::thread::sleep(limit.min(NAP));
        }
    }

    pub(crate) fn wake_sleepers(_: &AtomicU32) {}
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::macos;

    #[test]
    fn naps_end_after_a_word_has_changed_without_a_wake_up() {
        let word = AtomicU32::new(7);
        std::thread::scope(|s| {
            s.spawn(|| word.store(8, Ordering::SeqCst));
            while word.load(Ordering::SeqCst) == 7 {
                macos::sleep_while_equal(&word, 7, Duration::from_millis(50));
            }
        });
        macos::wake_sleepers(&word);
        assert_eq!(word.into_inner(), 8);
    }
}
