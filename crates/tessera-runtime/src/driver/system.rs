//! System calls that only Linux has. Elsewhere those without which no rank can be supervised are refused, and those that
//! only make a loss known sooner do nothing.

#[cfg(not(target_os = "linux"))]
pub(super) use elsewhere::{
    RECEIVE_FLAGS, SEND_FLAGS, create_wake_event, limit_unanswered, set_death_signal, watch_process,
};
#[cfg(target_os = "linux")]
pub(super) use linux::{
    RECEIVE_FLAGS, SEND_FLAGS, create_wake_event, limit_unanswered, set_death_signal, watch_process,
};

#[cfg(target_os = "linux")]
mod linux {
    use std::io::{Error, Result};
    use std::net::TcpStream;
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::net::{RecvFlags, SendFlags, sockopt};
    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, set_parent_process_death_signal};

    /// A message to a socket whose peer is gone is an error and no signal.
    pub(in crate::driver) const SEND_FLAGS: SendFlags = SendFlags::NOSIGNAL;
    /// No program that this process starts inherits the received descriptors.
    pub(in crate::driver) const RECEIVE_FLAGS: RecvFlags = RecvFlags::CMSG_CLOEXEC;

    /// Creates a descriptor that a write makes readable and a read resets.
    pub(in crate::driver) fn create_wake_event() -> Result<OwnedFd> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::from)
    }

    /// Sets the signal that this process gets when the thread that started it ends.
    pub(in crate::driver) fn set_death_signal(signal: Signal) -> Result<()> {
        set_parent_process_death_signal(Some(signal)).map_err(Error::from)
    }

    /// Returns a descriptor that becomes readable when a process ends.
    pub(in crate::driver) fn watch_process(pid: Pid) -> Option<OwnedFd> {
        pidfd_open(pid, PidfdFlags::empty()).ok()
    }

    /// Ends a connection whose peer acknowledges nothing for this time.
    pub(in crate::driver) fn limit_unanswered(stream: &TcpStream, limit: Duration) -> Result<()> {
        let ms = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(stream, ms).map_err(Error::from)
    }
}

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use std::io::{Error, ErrorKind, Result};
    use std::net::TcpStream;
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    use rustix::net::{RecvFlags, SendFlags};
    use rustix::process::{Pid, Signal};

    pub(in crate::driver) const SEND_FLAGS: SendFlags = SendFlags::empty();
    pub(in crate::driver) const RECEIVE_FLAGS: RecvFlags = RecvFlags::empty();

    fn refuse<T>() -> Result<T> {
        Err(Error::new(ErrorKind::Unsupported, "ranks that are processes run on Linux"))
    }

    pub(in crate::driver) fn create_wake_event() -> Result<OwnedFd> {
        refuse()
    }

    // A rank that outlives its launcher would hold the machine, so none is started.
    pub(in crate::driver) fn set_death_signal(_: Signal) -> Result<()> {
        refuse()
    }

    // The launcher looks for ended processes at every tick, too.
    pub(in crate::driver) fn watch_process(_: Pid) -> Option<OwnedFd> {
        None
    }

    // Keep-alive probes and missing heartbeats end such a connection, too.
    pub(in crate::driver) fn limit_unanswered(_: &TcpStream, _: Duration) -> Result<()> {
        Ok(())
    }
}
