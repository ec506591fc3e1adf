//! The ranks of one host, started by the single process that a launcher started there. Unlike the
//! ranks of [`launch_ranks`](super::launch_ranks), they meet the ranks of other hosts over the
//! network, so this process has no link to them: it forwards stop requests, and leaves none behind.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getppid, kill_process, kill_process_group};
use tessera_base::Diagnostic;

use super::exit::exit_process;
use super::launcher::{RankExit, StopHandle, to_pid, to_rank_exit};
use super::system::ParentTie;
use super::welcome::io_diagnostic;
use crate::FailureClass;

/// Environment variable with the process id of the process that started the ranks of this host. A
/// rank that finds it there ends with that process.
pub const HOST_PROCESS_VARIABLE: &str = "TESSERA_HOST_PROCESS";

/// Time between two looks at the ranks.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long the other ranks of the host may continue after one has failed. They notice by
/// themselves much earlier; this limit ends those that do not.
const END_LIMIT: Duration = Duration::from_secs(30);

/// The processes to start on this host.
#[derive(Debug)]
pub struct HostRanksSpec {
    /// Command line, the same for every rank.
    pub argv: Vec<OsString>,
    /// Variables that the ranks do not inherit.
    pub removed_variables: Vec<&'static str>,
    /// The ranks, and the variables that each gets.
    pub ranks: Vec<(u32, Vec<(&'static str, String)>)>,
}

/// Starts the ranks of this host and waits until all have ended. Returns how each ended, in the
/// order in which they ended.
///
/// The kernel ties the ranks' parent-death signal to the calling thread, so that thread must
/// outlive them.
///
/// # Errors
/// T0750 if a process cannot be started; those that were started are killed.
pub fn run_host_ranks(spec: &HostRanksSpec, stop: &StopHandle) -> Result<Vec<RankExit>, Diagnostic> {
    let mut running: Vec<(u32, Child)> = Vec::new();
    for (rank, variables) in &spec.ranks {
        match spawn_rank(spec, variables) {
            Ok(child) => running.push((*rank, child)),
            Err(e) => {
                running.iter_mut().for_each(|(_, child)| kill_and_reap(child));
                return Err(io_diagnostic(&format!("starting rank {rank}"), &e));
            }
        }
    }
    let mut exits: Vec<RankExit> = Vec::new();
    let (mut forwarded, mut kill_at) = (0, None);
    while !running.is_empty() {
        running.retain_mut(|(rank, child)| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                exits.push(to_rank_exit(*rank, status));
                false
            }
            Err(_) => {
                kill_and_reap(child);
                exits.push(RankExit { rank: *rank, status: None, signal: None });
                false
            }
        });
        while forwarded < stop.request_count() {
            forwarded += 1;
            signal_all(&running, |pid| kill_process(pid, Signal::TERM));
        }
        if exits.iter().any(|exit| !exit.is_clean()) {
            let at = *kill_at.get_or_insert_with(|| Instant::now() + END_LIMIT);
            if Instant::now() >= at {
                signal_all(&running, |pid| kill_process_group(pid, Signal::KILL));
            }
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(exits)
}

/// Returns the exit status of a process whose ranks ended like this: that of the first rank that
/// failed. The ranks after it ended because of it.
#[must_use]
pub fn host_exit_status(exits: &[RankExit]) -> i32 {
    let failed = exits.iter().find(|exit| !exit.is_clean());
    failed.map_or(0, |exit| exit.status.unwrap_or(FailureClass::Peer.exit_code()))
}

/// Ties this process to the process that started it, if that is the process with this id: this one
/// then ends when that one dies.
pub fn end_with_host_process(host_process: u32) {
    // Without the tie, a rank still ends when the run ends.
    let _ = ParentTie::tie_to_parent();
    // The host process may have died before.
    if getppid() != to_pid(host_process) {
        exit_process(FailureClass::LauncherGone.exit_code());
    }
}

fn spawn_rank(spec: &HostRanksSpec, variables: &[(&'static str, String)]) -> std::io::Result<Child> {
    let Some((program, arguments)) = spec.argv.split_first() else {
        return Err(std::io::Error::from(std::io::ErrorKind::InvalidInput));
    };
    let mut command = Command::new(program);
    command.args(arguments);
    for name in &spec.removed_variables {
        command.env_remove(name);
    }
    command.env(HOST_PROCESS_VARIABLE, std::process::id().to_string());
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    // A terminal sends Ctrl-C to its whole group. The ranks get a group of their own, so that each
    // of them receives a stop request once.
    command.process_group(0).spawn()
}

fn signal_all(running: &[(u32, Child)], send: impl Fn(Pid) -> rustix::io::Result<()>) {
    for (_, child) in running {
        if let Some(pid) = to_pid(child.id()) {
            // The process may have ended; it is not reaped, so its id names no other process.
            let _ = send(pid);
        }
    }
}

fn kill_and_reap(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(script: &str, ranks: u32) -> HostRanksSpec {
        let argv = ["sh", "-c", script].map(OsString::from).to_vec();
        let ranks = (0..ranks).map(|rank| (rank, vec![("RANK", rank.to_string())])).collect();
        HostRanksSpec { argv, removed_variables: vec!["HOME"], ranks }
    }

    #[test]
    fn the_first_failure_decides_the_status() {
        let exits =
            run_host_ranks(&spec("test -z \"$HOME\" && exit $((RANK * 11))", 2), &StopHandle::default());
        let mut exits = exits.expect("started");
        exits.sort_by_key(|e| e.rank);
        assert_eq!(exits.iter().map(|e| e.status).collect::<Vec<_>>(), [Some(0), Some(11)]);
        assert_eq!(host_exit_status(&exits), 11);
        assert_eq!(host_exit_status(&exits[..1]), 0);
    }

    #[test]
    fn a_stop_request_reaches_every_rank_once() {
        let stop = StopHandle::default();
        stop.request_stop();
        let script = "trap 'exit 7' TERM; while :; do sleep 0.05; done";
        // A signal that arrives before the trap is set ends the shell, which the test accepts too.
        let exits = run_host_ranks(&spec(script, 2), &stop).expect("started");
        assert!(exits.iter().all(|e| e.status == Some(7) || e.signal == Some(15)), "{exits:?}");
        assert_eq!(exits.len(), 2);
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let mut missing = spec("", 1);
        missing.argv = vec!["/no/such/program".into()];
        let d = run_host_ranks(&missing, &StopHandle::default()).expect_err("refused");
        assert!(d.message.contains("starting rank 0"), "{d:?}");
    }
}
