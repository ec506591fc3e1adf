//! The state of a process of this host.

#[cfg(target_os = "linux")]
pub use linux::read_process;
#[cfg(target_os = "macos")]
pub use macos::read_process;

/// The state of a process as the operating system reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessState {
    /// Letter of the state: `T` or `t` for a stopped process, `Z` or `X` for one that has ended.
    pub state: char,
    /// A number that follows from the time of its start; it distinguishes a process from a later one with the same pid.
    pub started: u64,
}

impl ProcessState {
    /// Returns whether the process has ended, and only its parent has not collected it yet.
    #[must_use]
    pub fn has_ended(self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// Returns whether a signal has stopped the process.
    #[must_use]
    pub fn is_stopped(self) -> bool {
        matches!(self.state, 'T' | 't')
    }
}

/// `/proc`, whose start times are clock ticks since the boot.
#[cfg(target_os = "linux")]
mod linux {
    use super::ProcessState;

    /// Returns the state of a process, or `None` if no process has this id.
    #[must_use]
    pub fn read_process(pid: u32) -> Option<ProcessState> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The process name is in parentheses and may contain any character.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?.chars().next()?;
        let started = fields.nth(18)?.parse().ok()?;
        Some(ProcessState { state, started })
    }
}

/// The program `ps`, which prints the start as a date.
#[cfg(any(target_os = "macos", test))]
mod macos {
    use super::ProcessState;
    use crate::system::run_program;

    /// Returns the state of a process, or `None` if no process has this id.
    #[must_use]
    pub fn read_process(pid: u32) -> Option<ProcessState> {
        let columns = ["-o", "state=", "-o", "lstart=", "-p", &pid.to_string()];
        let line = run_program("/bin/ps", &columns)?;
        let (state, start) = line.split_once(' ')?;
        let digest = blake3::hash(start.trim().as_bytes());
        let started = u64::from_le_bytes(*digest.as_bytes().first_chunk()?);
        Some(ProcessState { state: state.chars().next()?, started })
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn check_states(read: impl Fn(u32) -> Option<ProcessState>) {
        let me = read(std::process::id()).unwrap();
        assert!(!me.has_ended() && !me.is_stopped(), "{me:?}");
        assert_eq!(read(std::process::id()).unwrap().started, me.started);
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        assert!(!read(child.id()).unwrap().has_ended());
        drop(child.stdin.take());
        while !read(child.id()).unwrap().has_ended() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert_eq!(read(child.id()), None);
    }

    #[test]
    fn a_process_runs_until_it_ends() {
        check_states(read_process);
        // A Linux without `ps` cannot run this half.
        if std::path::Path::new("/bin/ps").exists() {
            check_states(macos::read_process);
        }
    }
}
