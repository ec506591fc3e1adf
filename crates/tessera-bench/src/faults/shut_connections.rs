//! Resets the TCP connections of another process, whose descriptors only Linux hands out.

#[cfg(not(target_os = "linux"))]
pub(super) use elsewhere::shut_connections;
#[cfg(target_os = "linux")]
pub(super) use linux::shut_connections;

#[cfg(target_os = "linux")]
mod linux {
    use std::fs;
    use std::os::fd::{AsFd, OwnedFd};
    use std::path::Path;

    use anyhow::{Context, ensure};
    use rustix::net::{AddressFamily, Shutdown, getpeername, shutdown};
    use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

    use crate::process_list::Process;

    /// Shuts down every TCP connection of a process, as a device between the hosts does that resets
    /// them.
    pub(in crate::faults) fn shut_connections(process: Process) -> anyhow::Result<()> {
        let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw).context("no process id")?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let mut count = 0;
        for fd in open_fds(process.pid)? {
            // A descriptor that was closed since it was listed is not a connection.
            let Ok(socket) = pidfd_getfd(&pidfd, fd, PidfdGetfdFlags::empty()) else { continue };
            if is_tcp_connection(&socket) {
                shutdown(&socket, Shutdown::Both)?;
                count += 1;
            }
        }
        ensure!(count > 0, "the rank has no TCP connection");
        Ok(())
    }

    fn open_fds(pid: u32) -> anyhow::Result<Vec<i32>> {
        let list = fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd"))?;
        Ok(list.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect())
    }

    fn is_tcp_connection(fd: &OwnedFd) -> bool {
        let peer = getpeername(fd.as_fd()).ok().flatten();
        peer.is_some_and(|a| matches!(a.address_family(), AddressFamily::INET | AddressFamily::INET6))
    }
}

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use crate::process_list::Process;

    pub(in crate::faults) fn shut_connections(_: Process) -> anyhow::Result<()> {
        anyhow::bail!("the connections of another process can be shut down on Linux only")
    }
}
