//! An event that ends the poll of a reactor.
//!
//! * `WakeEvent::new()` creates one that is not signalled.
//! * `signal()` makes its descriptor readable until the next `reset()`. Neither blocks, and several signals count as one.

#[cfg(target_os = "linux")]
pub(in crate::driver) use linux::WakeEvent;
#[cfg(target_os = "macos")]
pub(in crate::driver) use macos::WakeEvent;

#[cfg(target_os = "linux")]
mod linux {
    use std::io::{Error, Result};

    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

    #[derive(Debug)]
    pub(in crate::driver) struct WakeEvent(OwnedFd);

    impl WakeEvent {
        pub(in crate::driver) fn new() -> Result<WakeEvent> {
            let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::from)?;
            Ok(WakeEvent(fd))
        }

        pub(in crate::driver) fn signal(&self) {
            // The write can only fail after 2⁶⁴ unread notifications.
            let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
        }

        pub(in crate::driver) fn reset(&self) {
            let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
        }
    }

    impl AsFd for WakeEvent {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }
}

/// A pipe, because macOS has no eventfd.
#[cfg(any(target_os = "macos", test))]
mod macos {
    use std::io::{PipeReader, PipeWriter, Read, Result, Write, pipe};

    use rustix::io::ioctl_fionbio;
    use std::os::fd::{AsFd, BorrowedFd};

    #[derive(Debug)]
    pub(in crate::driver) struct WakeEvent {
        reader: PipeReader,
        writer: PipeWriter,
    }

    impl WakeEvent {
        pub(in crate::driver) fn new() -> Result<WakeEvent> {
            let (reader, writer) = pipe()?;
            ioctl_fionbio(&reader, true)?;
            ioctl_fionbio(&writer, true)?;
            Ok(WakeEvent { reader, writer })
        }

        pub(in crate::driver) fn signal(&self) {
            // A full pipe is readable, too.
            let _ = (&self.writer).write(&[1]);
        }

        pub(in crate::driver) fn reset(&self) {
            let mut bytes = [0; 256];
            while (&self.reader).read(&mut bytes).is_ok_and(|n| n == bytes.len()) {}
        }
    }

    impl AsFd for WakeEvent {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.reader.as_fd()
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::os::fd::AsFd;

    fn is_readable(event: &impl AsFd) -> bool {
        poll(&mut [PollFd::new(event, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap()
            == 1
    }

    macro_rules! check_event {
        ($event:expr) => {
            let event = $event.unwrap();
            assert!(!is_readable(&event));
            // More than a pipe can hold.
            (0..100_000).for_each(|_| event.signal());
            assert!(is_readable(&event));
            event.reset();
            assert!(!is_readable(&event));
            event.reset();
            event.signal();
            assert!(is_readable(&event));
        };
    }

    #[test]
    fn an_event_is_readable_from_a_signal_to_its_reset() {
        check_event!(super::WakeEvent::new());
        check_event!(super::macos::WakeEvent::new());
    }
}
