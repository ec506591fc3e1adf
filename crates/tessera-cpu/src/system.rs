//! System calls that only Linux has. Elsewhere the ones that create something are refused, so that the others are not
//! reached: plans are made and verified there, and ranks that exchange data run on Linux.

#[cfg(not(target_os = "linux"))]
pub(crate) use elsewhere::{create_event, create_sealed_memory, is_sealed, sleep_while_equal, wake_sleepers};
#[cfg(target_os = "linux")]
pub(crate) use linux::{create_event, create_sealed_memory, is_sealed, sleep_while_equal, wake_sleepers};

#[cfg(target_os = "linux")]
mod linux {
    use std::io::{Error, Result};
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fd::{AsFd, OwnedFd};
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
    use rustix::thread::futex;

    /// Creates a descriptor that a write makes readable and a read resets.
    pub(crate) fn create_event() -> Result<OwnedFd> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::from)
    }

    /// Creates an anonymous file of zeros whose size never changes.
    pub(crate) fn create_sealed_memory(name: &str, bytes: u64) -> Result<OwnedFd> {
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, bytes)?;
        // A file that can shrink would turn a peer's mistake into a SIGBUS here.
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(fd)
    }

    /// Returns whether a file cannot shrink.
    pub(crate) fn is_sealed(fd: impl AsFd) -> Result<bool> {
        Ok(fcntl_get_seals(fd)?.contains(SealFlags::SHRINK))
    }

    /// Sleeps while a word has a value, until it is woken, or for this time, which is below a second. It may also return for
    /// no reason.
    pub(crate) fn sleep_while_equal(word: &AtomicU32, value: u32, limit: Duration) {
        let limit = futex::Timespec { tv_sec: 0, tv_nsec: limit.as_nanos() as _ };
        let _ = futex::wait(word, futex::Flags::empty(), value, Some(&limit));
    }

    /// Wakes all threads of all processes that sleep on a word.
    pub(crate) fn wake_sleepers(word: &AtomicU32) {
        // The call can only fail for an address that is not mapped.
        let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
    }
}

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use std::io::{Error, ErrorKind, Result};
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    use rustix::fd::{AsFd, OwnedFd};

    fn refuse<T>() -> Result<T> {
        Err(Error::new(ErrorKind::Unsupported, "ranks that exchange data run on Linux"))
    }

    pub(crate) fn create_event() -> Result<OwnedFd> {
        refuse()
    }

    pub(crate) fn create_sealed_memory(_: &str, _: u64) -> Result<OwnedFd> {
        refuse()
    }

    pub(crate) fn is_sealed(_: impl AsFd) -> Result<bool> {
        refuse()
    }

    pub(crate) fn sleep_while_equal(_: &AtomicU32, _: u32, limit: Duration) {
        std::thread::sleep(limit);
    }

    pub(crate) fn wake_sleepers(_: &AtomicU32) {}
}
