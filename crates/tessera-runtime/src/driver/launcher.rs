//! The launcher spawns the ranks, forwards the leader's progress, stops the ranks on request, and
//! leaves no process behind.

mod supervision;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tessera_base::{Diagnostic, Diagnostics};

use super::ControlTopology;
use super::reactor::{LinkId, Reactor, Waker};
use super::system::watch_process;
use super::welcome::{io_diagnostic, send_welcome};
use crate::codes::T0750;
use crate::wire::{Progress, Welcome};
use crate::{Failure, Limits, Tripwires};

/// The input of [`launch_ranks`]: command line, environment, links and limits of the ranks.
#[derive(Debug)]
pub struct LaunchSpec {
    /// Command line, the same for every rank.
    pub argv: Vec<String>,
    /// Number of ranks, each a process of its own.
    pub rank_count: u32,
    /// Control links between the ranks.
    pub topology: ControlTopology,
    /// Session id, which every envelope carries.
    pub session: u64,
    /// Extra descriptors per rank, such as the shared arenas of its groups: one list per rank, or
    /// no list at all.
    pub extra_fds: Vec<Vec<Arc<OwnedFd>>>,
    /// Opaque bytes that every rank receives in its welcome.
    pub payload: Vec<u8>,
    /// Environment variables that every rank gets in addition to the launcher's environment: name
    /// and value.
    pub env: Vec<(&'static str, &'static str)>,
    /// Queue depths and time limits of the run.
    pub limits: Limits,
    /// Disabled tripwires, which the launcher leaves out too.
    pub tripwires: Tripwires,
}

/// A handle to stop a launch from any thread, including a signal handler's thread. The first
/// request stops the run at a chunk boundary; the second kills the ranks.
#[derive(Debug, Clone, Default)]
pub struct StopHandle(Arc<StopState>);

#[derive(Debug, Default)]
struct StopState {
    count: AtomicU32,
    waker: OnceLock<Waker>,
}

impl StopHandle {
    /// Adds a request to stop and wakes the control loop; requests after the second have no effect.
    pub fn request_stop(&self) {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        if let Some(waker) = self.0.waker.get() {
            waker.wake_reactor();
        }
    }

    /// Whether [`StopHandle::request_stop`] was called on this handle or on a clone of it.
    #[must_use]
    pub fn is_stop_requested(&self) -> bool {
        self.request_count() > 0
    }

    /// Returns how often [`StopHandle::request_stop`] was called.
    #[must_use]
    pub fn request_count(&self) -> u32 {
        self.0.count.load(Ordering::Relaxed)
    }

    /// Makes later requests wake this reactor. The control loop also checks the request count
    /// regularly.
    pub(super) fn set_reactor(&self, reactor: &Reactor) {
        let _ = self.0.waker.set(reactor.waker());
    }
}

/// Events while the ranks run.
#[derive(Debug)]
pub enum LaunchEvent<'a> {
    /// Every rank was spawned; process ids in rank order.
    Started(&'a [u32]),
    /// A chunk was delivered.
    Progress(&'a Progress),
}

/// How one rank's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankExit {
    /// Rank whose process ended.
    pub rank: u32,
    /// Exit status; `None` if a signal killed the process.
    pub status: Option<i32>,
    /// Signal that killed the process, such as 9; `None` if the process exited with a status.
    pub signal: Option<i32>,
}

impl RankExit {
    pub(super) fn is_clean(&self) -> bool {
        self.status == Some(0)
    }

    /// Returns how the process ended, as the end of a sentence about it.
    #[must_use]
    pub fn to_sentence(self) -> String {
        match (self.status, self.signal) {
            (Some(status), _) => format!("its process exited with status {status}"),
            (None, Some(signal)) => format!("its process was killed by signal {signal}"),
            _ => "its process ended".to_string(),
        }
    }
}

/// The outcome of a launch, whose processes have all ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchReport {
    /// The failure that ended the run, if any.
    pub failure: Option<Failure>,
    /// How each rank's process ended, in rank order; empty if a stop was requested before the
    /// launch.
    pub exits: Vec<RankExit>,
    /// Whether a stop was requested.
    pub interrupted: bool,
}

/// Spawns the ranks and blocks until the last one has exited. The kernel ties the ranks'
/// parent-death signal to the calling thread, so that thread must outlive them.
///
/// # Errors
/// T0750 if the description is invalid or a rank cannot be spawned.
pub fn launch_ranks(
    spec: &LaunchSpec,
    stop: &StopHandle,
    on_event: &mut dyn FnMut(LaunchEvent<'_>),
) -> Result<LaunchReport, Diagnostics> {
    let found = check_spec(spec);
    if !found.is_empty() {
        return Err(found);
    }
    if stop.request_count() > 0 {
        return Ok(LaunchReport { failure: None, exits: Vec::new(), interrupted: true });
    }
    let reactor =
        Reactor::new(&spec.limits).map_err(|e| vec![io_diagnostic("the launcher's sockets", &e)])?;
    stop.set_reactor(&reactor);
    let mut ranks = RankProcesses { reactor, list: Vec::new() };
    if let Err(d) = ranks.spawn_all(spec) {
        ranks.kill_and_reap_all();
        return Err(vec![d]);
    }
    let pids: Vec<u32> = ranks.list.iter().map(|r| r.child.id()).collect();
    on_event(LaunchEvent::Started(&pids));
    Ok(supervision::supervise_ranks(spec, stop, on_event, ranks))
}

fn check_spec(spec: &LaunchSpec) -> Diagnostics {
    let mut found = spec.limits.check();
    let mut refuse = |what: String| found.push(Diagnostic::error(&T0750, what));
    if spec.rank_count == 0 {
        refuse("a launch needs at least one rank".into());
    }
    if spec.argv.is_empty() {
        refuse("a launch needs a command line".into());
    }
    if spec.topology == ControlTopology::ExternalLeader && spec.rank_count < 2 {
        refuse("a leader outside the mesh needs at least one rank in the mesh".into());
    }
    if !spec.extra_fds.is_empty() && spec.extra_fds.len() != spec.rank_count as usize {
        refuse(format!(
            "there are {} lists of descriptors for {} ranks",
            spec.extra_fds.len(),
            spec.rank_count
        ));
    }
    found
}

struct RankProcess {
    child: Child,
    /// Stays open as long as the launcher lives, so that its closing notifies the rank.
    link: LinkId,
    exit: Option<RankExit>,
    /// Time on the launcher's clock at which a signal stopped the process, in nanoseconds.
    stopped_ns: Option<u64>,
}

struct RankProcesses {
    reactor: Reactor,
    list: Vec<RankProcess>,
}

impl RankProcesses {
    fn spawn_all(&mut self, spec: &LaunchSpec) -> Result<(), Diagnostic> {
        let mut control_ends = control_sockets(spec)?;
        let mut streams = Vec::new();
        for rank in 0..spec.rank_count {
            let (here, there) = socket_pair()?;
            let stream = here.try_clone().map_err(|e| io_diagnostic("launcher socket", &e))?;
            let link = self
                .reactor
                .add_link(Box::new(here), [rank])
                .map_err(|e| io_diagnostic("launcher socket", &e))?;
            let child = Command::new(&spec.argv[0])
                .args(&spec.argv[1..])
                .envs(spec.env.iter().copied())
                .stdin(Stdio::from(OwnedFd::from(there)))
                .process_group(0)
                .spawn()
                .map_err(|e| {
                    io_diagnostic(&format!("starting rank {rank} as `{}`", spec.argv.join(" ")), &e)
                })?;
            let pid = child.id();
            self.list.push(RankProcess { child, link, exit: None, stopped_ns: None });
            streams.push(stream);
            // Without such a descriptor, the launcher notices a death only at the next tick.
            if let Some(fd) = to_pid(pid).and_then(watch_process) {
                self.reactor.watch_fd(rank as usize, fd);
            }
        }
        for (i, stream) in streams.iter().enumerate() {
            let sockets = std::mem::take(&mut control_ends[i]);
            let extras = spec.extra_fds.get(i).map_or(&[][..], |e| e);
            let mut fds: Vec<_> = sockets.iter().map(|s| s.as_fd()).collect();
            fds.extend(extras.iter().map(|e| e.as_fd()));
            let welcome = Welcome {
                rank: i as u32,
                world_size: spec.rank_count,
                session: spec.session,
                control_sockets: sockets.len() as u32,
                extra_fds: extras.len() as u32,
                payload: spec.payload.clone(),
            };
            send_welcome(&mut self.reactor, self.list[i].link, stream, welcome, &fds)?;
        }
        Ok(())
    }

    /// Reaps the ranks that ended and kills any process left in their groups; returns true when no
    /// rank is left.
    fn reap_exited(&mut self) -> bool {
        for (i, rank) in self.list.iter_mut().enumerate().filter(|(_, r)| r.exit.is_none()) {
            let Some(pid) = to_pid(rank.child.id()) else { continue };
            let wait_options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            if matches!(waitid(WaitId::Pid(pid), wait_options), Ok(Some(_))) {
                // The child is not reaped yet, so its process id still names its group.
                let _ = kill_process_group(pid, Signal::KILL);
            }
            if let Ok(Some(status)) = rank.child.try_wait() {
                rank.exit = Some(to_rank_exit(i as u32, status));
            }
        }
        self.list.iter().all(|r| r.exit.is_some())
    }

    /// Returns a rank whose process has been stopped by a signal for longer than `limit_ns`.
    fn find_stopped(&mut self, now_ns: u64, limit_ns: u64) -> Option<u32> {
        for rank in self.list.iter_mut().filter(|r| r.exit.is_none()) {
            let changes = WaitIdOptions::STOPPED | WaitIdOptions::CONTINUED | WaitIdOptions::NOHANG;
            let Some(pid) = to_pid(rank.child.id()) else { continue };
            if let Ok(Some(change)) = waitid(WaitId::Pid(pid), changes) {
                rank.stopped_ns = change.stopped().then_some(now_ns);
            }
        }
        let stopped =
            |r: &RankProcess| r.exit.is_none() && r.stopped_ns.is_some_and(|at| now_ns - at > limit_ns);
        self.list.iter().position(stopped).map(|rank| rank as u32)
    }

    /// Kills the process group of every rank that has not ended.
    fn kill_remaining(&self) {
        (0..self.list.len() as u32).for_each(|rank| self.kill_rank(rank));
    }

    /// Kills the process group of `rank` if it has not ended. An unreaped child's process id stays
    /// valid for it and its group.
    fn kill_rank(&self, rank: u32) {
        let left = self.list.get(rank as usize).filter(|r| r.exit.is_none());
        if let Some(pid) = left.and_then(|r| to_pid(r.child.id())) {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }

    fn kill_and_reap_all(&mut self) {
        self.kill_remaining();
        for rank in &mut self.list {
            let _ = rank.child.wait();
        }
    }

    /// Returns the first rank that did not exit with status 0. A rank killed by a signal takes
    /// precedence, because a signal explains more than a status that Tessera chose.
    fn first_abnormal_exit(&self) -> Option<RankExit> {
        let abnormal_exits = || self.list.iter().filter_map(|r| r.exit).filter(|e| !e.is_clean());
        abnormal_exits().find(|e| e.signal.is_some()).or_else(|| abnormal_exits().next())
    }
}

/// Creates the control sockets of each rank, in the order in which the rank expects them.
fn control_sockets(spec: &LaunchSpec) -> Result<Vec<Vec<UnixStream>>, Diagnostic> {
    let mut ends: Vec<Vec<UnixStream>> = (0..spec.rank_count).map(|_| Vec::new()).collect();
    for (upper, lower) in spec.topology.control_links(spec.rank_count) {
        let (up, down) = socket_pair()?;
        ends[upper as usize].push(up);
        ends[lower as usize].push(down);
    }
    Ok(ends)
}

fn socket_pair() -> Result<(UnixStream, UnixStream), Diagnostic> {
    UnixStream::pair().map_err(|e| io_diagnostic("a socket pair", &e))
}

pub(super) fn to_pid(id: u32) -> Option<Pid> {
    i32::try_from(id).ok().and_then(Pid::from_raw)
}

pub(super) fn to_rank_exit(rank: u32, status: ExitStatus) -> RankExit {
    RankExit { rank, status: status.code(), signal: status.signal() }
}
