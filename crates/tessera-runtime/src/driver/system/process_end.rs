//! The end of another process.
//!
//! * `watch_process(pid)` returns a descriptor that becomes readable when a process ends, or `None`. The launcher looks for
//!   ended processes at every tick, too.

#[cfg(target_os = "linux")]
pub(in crate::driver) use linux::watch_process;
#[cfg(target_os = "macos")]
pub(in crate::driver) use macos::watch_process;

#[cfg(target_os = "linux")]
mod linux {
    use std::os::fd::OwnedFd;

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    pub(in crate::driver) fn watch_process(pid: Pid) -> Option<OwnedFd> {
        pidfd_open(pid, PidfdFlags::empty()).ok()
    }
}

/// Nothing: a kqueue could watch a process, but needs `unsafe`. The launcher learns of an end one tick later.
#[cfg(target_os = "macos")]
mod macos {
    use std::os::fd::OwnedFd;

    use rustix::process::Pid;

    pub(in crate::driver) fn watch_process(_: Pid) -> Option<OwnedFd> {
        None
    }
}
