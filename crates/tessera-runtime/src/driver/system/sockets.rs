//! Options of sockets and of their messages.
//!
//! * `SEND_FLAGS`: a message to a socket whose peer is gone is an error and no signal.
//! * `RECEIVE_FLAGS`, and `close_on_exec` for each descriptor that a message brings: no program that this process starts
//!   inherits them.
//! * `limit_unanswered(stream, limit)` ends a connection whose peer acknowledges nothing for this time.

#[cfg(target_os = "linux")]
pub(in crate::driver) use linux::{RECEIVE_FLAGS, SEND_FLAGS, close_on_exec, limit_unanswered};
#[cfg(target_os = "macos")]
pub(in crate::driver) use macos::{RECEIVE_FLAGS, SEND_FLAGS, close_on_exec, limit_unanswered};

#[cfg(target_os = "linux")]
mod linux {
    use std::io::{Error, Result};
    use std::net::TcpStream;
    use std::os::fd::BorrowedFd;
    use std::time::Duration;

    use rustix::net::{RecvFlags, SendFlags, sockopt};

    pub(in crate::driver) const SEND_FLAGS: SendFlags = SendFlags::NOSIGNAL;
    pub(in crate::driver) const RECEIVE_FLAGS: RecvFlags = RecvFlags::CMSG_CLOEXEC;

    /// Does nothing: the flags did it.
    pub(in crate::driver) fn close_on_exec(_: BorrowedFd<'_>) -> Result<()> {
        Ok(())
    }

    pub(in crate::driver) fn limit_unanswered(stream: &TcpStream, limit: Duration) -> Result<()> {
        let ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(stream, ms).map_err(Error::from)
    }
}

#[cfg(any(target_os = "macos", test))]
#[cfg_attr(not(target_os = "macos"), allow(dead_code))]
mod macos {
    use std::io::{Error, Result};
    use std::net::TcpStream;
    use std::os::fd::BorrowedFd;
    use std::time::Duration;

    use rustix::io::{FdFlags, fcntl_setfd};
    use rustix::net::{RecvFlags, SendFlags};

    /// The sockets of std have the option `SO_NOSIGPIPE` on macOS.
    pub(in crate::driver) const SEND_FLAGS: SendFlags = SendFlags::empty();
    pub(in crate::driver) const RECEIVE_FLAGS: RecvFlags = RecvFlags::empty();

    /// A program that another thread starts between the message and this call inherits the descriptor. A rank receives its
    /// descriptors before it has other threads that do so.
    pub(in crate::driver) fn close_on_exec(fd: BorrowedFd<'_>) -> Result<()> {
        fcntl_setfd(fd, FdFlags::CLOEXEC).map_err(Error::from)
    }

    /// Does nothing: keep-alive probes and missing heartbeats end such a connection later.
    pub(in crate::driver) fn limit_unanswered(_: &TcpStream, _: Duration) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    #[test]
    fn a_descriptor_without_the_flag_gets_it() {
        let (fd, _other) = UnixStream::pair().unwrap();
        fcntl_setfd(&fd, FdFlags::empty()).unwrap();
        super::macos::close_on_exec(fd.as_fd()).unwrap();
        assert_eq!(fcntl_getfd(&fd).unwrap(), FdFlags::CLOEXEC);
    }
}
