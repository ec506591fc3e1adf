//! Spawns the ranks, relays the leader's reports, stops them on request, and leaves nobody behind.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, waitid,
};
use tessera_base::{Diagnostic, Diagnostics};

use super::fds::{failed, send_welcome};
use super::hub::{Hub, HubEvent, LinkId, Waker};
use super::link::{Frame, LinkEnd};
use super::{T0750, TICK, Topology};
use crate::leader::T0743;
use crate::limits::AwakeClock;
use crate::tripwire::Place;
use crate::wire::{LAUNCHER, Message, Progress, Welcome};
use crate::worker::T0742;
use crate::{Failure, FailureClass, Limits};

/// Ranks that have finished get so many times `reap_ns` to unload their devices.
const FINISH_FACTOR: u32 = 3;

/// What the door supplies.
#[derive(Debug)]
pub struct LaunchSpec {
    /// Command line of every rank.
    pub argv: Vec<String>,
    /// How many ranks.
    pub ranks: u32,
    /// Who speaks with whom.
    pub topology: Topology,
    /// The session that every envelope names.
    pub session: u64,
    /// Descriptors for each rank, such as the arenas of its groups; one list per rank, or none at all.
    pub extras: Vec<Vec<Arc<OwnedFd>>>,
    /// Bytes for every rank, handed over untouched.
    pub payload: Vec<u8>,
    /// Environment of every rank beyond the launcher's own: name and value.
    pub env: Vec<(&'static str, &'static str)>,
    /// Bounds.
    pub limits: Limits,
}

/// Asks a launch to stop, from any thread or a signal handler's thread. The first request ends at a chunk
/// boundary, the second kills.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<Requests>);

#[derive(Debug, Default)]
struct Requests {
    count: AtomicU32,
    waker: OnceLock<Waker>,
}

impl Interrupt {
    /// One more request to stop.
    pub fn interrupt(&self) {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        if let Some(waker) = self.0.waker.get() {
            waker.wake();
        }
    }

    /// Whether a request has come.
    #[must_use]
    pub fn asked(&self) -> bool {
        self.count() > 0
    }

    pub(super) fn count(&self) -> u32 {
        self.0.count.load(Ordering::Relaxed)
    }

    /// From now on a request wakes this hub. It is looked at regularly as well.
    pub(super) fn wakes(&self, hub: &Hub) {
        let _ = self.0.waker.set(hub.waker());
    }
}

/// What happens while the ranks run.
#[derive(Debug)]
pub enum LaunchEvent<'a> {
    /// Every rank was spawned; process ids in order of rank.
    Started(&'a [u32]),
    /// A chunk was delivered.
    Progress(&'a Progress),
}

/// How one rank's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankExit {
    /// The rank.
    pub rank: u32,
    /// Its exit status.
    pub status: Option<i32>,
    /// The signal that killed it.
    pub signal: Option<i32>,
}

impl RankExit {
    fn clean(&self) -> bool {
        self.status == Some(0)
    }

    fn words(&self) -> String {
        match (self.status, self.signal) {
            (Some(status), _) => format!("its process exited with status {status}"),
            (None, Some(signal)) => format!("its process was killed by signal {signal}"),
            _ => "its process ended".to_string(),
        }
    }
}

/// How a launch ended. No process of it is left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchReport {
    /// The one failure, if it failed.
    pub failure: Option<Failure>,
    /// Every rank's end, in order of rank.
    pub exits: Vec<RankExit>,
    /// Whether it was asked to stop.
    pub interrupted: bool,
}

/// Spawns the ranks and stays until the last is gone. Blocks the calling thread, which must live as long:
/// the kernel ties the ranks' parent-death signal to it.
pub fn launch(
    spec: &LaunchSpec,
    interrupt: &Interrupt,
    on_event: &mut dyn FnMut(LaunchEvent<'_>),
) -> Result<LaunchReport, Diagnostics> {
    let found = check(spec);
    if !found.is_empty() {
        return Err(found);
    }
    if interrupt.count() > 0 {
        return Ok(LaunchReport { failure: None, exits: Vec::new(), interrupted: true });
    }
    let hub = Hub::new(&spec.limits).map_err(|e| vec![failed("the launcher's sockets", &e)])?;
    interrupt.wakes(&hub);
    let mut ranks = Ranks { hub, list: Vec::new() };
    if let Err(d) = ranks.spawn(spec) {
        ranks.kill_all();
        return Err(vec![d]);
    }
    let pids: Vec<u32> = ranks.list.iter().map(|r| r.child.id()).collect();
    on_event(LaunchEvent::Started(&pids));
    Ok(watch(spec, interrupt, on_event, ranks))
}

fn check(spec: &LaunchSpec) -> Diagnostics {
    let mut found = spec.limits.check();
    let mut refuse = |what: String| found.push(Diagnostic::error(&T0750, what));
    if spec.ranks == 0 {
        refuse("a launch needs at least one rank".into());
    }
    if spec.argv.is_empty() {
        refuse("a launch needs a command line".into());
    }
    if spec.topology == Topology::Outside && spec.ranks < 2 {
        refuse("a leader outside the mesh needs a rank inside".into());
    }
    if !spec.extras.is_empty() && spec.extras.len() != spec.ranks as usize {
        refuse(format!("{} lists of descriptors for {} ranks", spec.extras.len(), spec.ranks));
    }
    found
}

struct Rank {
    child: Child,
    /// Open as long as the launcher lives; its closing tells the rank.
    link: LinkId,
    exit: Option<RankExit>,
}

struct Ranks {
    hub: Hub,
    list: Vec<Rank>,
}

impl Ranks {
    fn spawn(&mut self, spec: &LaunchSpec) -> Result<(), Diagnostic> {
        let mut ends = control_sockets(spec)?;
        let mut streams = Vec::new();
        for rank in 0..spec.ranks {
            let (here, there) = pair()?;
            let stream = here.try_clone().map_err(|e| failed("launcher socket", &e))?;
            let link = self.hub.add(Box::new(here), [rank]).map_err(|e| failed("launcher socket", &e))?;
            let child = Command::new(&spec.argv[0])
                .args(&spec.argv[1..])
                .envs(spec.env.iter().copied())
                .stdin(Stdio::from(OwnedFd::from(there)))
                .process_group(0)
                .spawn()
                .map_err(|e| failed(&format!("starting rank {rank} as `{}`", spec.argv.join(" ")), &e))?;
            let pid = child.id();
            self.list.push(Rank { child, link, exit: None });
            streams.push(stream);
            // Without it a death is seen at the next tick.
            if let Some(fd) = pid_of(pid).and_then(|p| pidfd_open(p, PidfdFlags::empty()).ok()) {
                self.hub.watch(rank as usize, fd);
            }
        }
        for (i, stream) in streams.iter().enumerate() {
            let sockets = std::mem::take(&mut ends[i]);
            let extras = spec.extras.get(i).map_or(&[][..], |e| e);
            let mut fds: Vec<_> = sockets.iter().map(|s| s.as_fd()).collect();
            fds.extend(extras.iter().map(|e| e.as_fd()));
            let welcome = Welcome {
                rank: i as u32,
                world: spec.ranks,
                session: spec.session,
                sockets: sockets.len() as u32,
                extras: extras.len() as u32,
                payload: spec.payload.clone(),
            };
            send_welcome(&mut self.hub, self.list[i].link, stream, welcome, &fds)?;
        }
        Ok(())
    }

    /// Collects the ranks that ended, with whatever they left running in their groups; true when none is left.
    fn reap(&mut self) -> bool {
        for (i, rank) in self.list.iter_mut().enumerate().filter(|(_, r)| r.exit.is_none()) {
            let Some(pid) = pid_of(rank.child.id()) else { continue };
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            if matches!(waitid(WaitId::Pid(pid), look), Ok(Some(_))) {
                // Not collected yet, so the id still names its group.
                let _ = kill_process_group(pid, Signal::KILL);
            }
            if let Ok(Some(status)) = rank.child.try_wait() {
                rank.exit = Some(ended(i as u32, status));
            }
        }
        self.list.iter().all(|r| r.exit.is_some())
    }

    /// Kills the process group of every rank that is left.
    fn kill_left(&self) {
        (0..self.list.len() as u32).for_each(|rank| self.kill(rank));
    }

    /// Kills a rank's process group, if it is left. The child is not reaped, so its id still names it and its group.
    fn kill(&self, rank: u32) {
        let left = self.list.get(rank as usize).filter(|r| r.exit.is_none());
        if let Some(pid) = left.and_then(|r| pid_of(r.child.id())) {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }

    fn kill_all(&mut self) {
        self.kill_left();
        for rank in &mut self.list {
            let _ = rank.child.wait();
        }
    }

    /// The first rank that ended other than by status 0; a signal explains more than a status that we chose.
    fn first_bad(&self) -> Option<RankExit> {
        let bad = || self.list.iter().filter_map(|r| r.exit).filter(|e| !e.clean());
        bad().find(|e| e.signal.is_some()).or_else(|| bad().next())
    }
}

/// Each rank's control sockets, in the order in which it expects them.
fn control_sockets(spec: &LaunchSpec) -> Result<Vec<Vec<UnixStream>>, Diagnostic> {
    let mut ends: Vec<Vec<UnixStream>> = (0..spec.ranks).map(|_| Vec::new()).collect();
    for (upper, lower) in spec.topology.links(spec.ranks) {
        let (up, down) = pair()?;
        ends[upper as usize].push(up);
        ends[lower as usize].push(down);
    }
    Ok(ends)
}

fn pair() -> Result<(UnixStream, UnixStream), Diagnostic> {
    UnixStream::pair().map_err(|e| failed("a socket pair", &e))
}

fn pid_of(id: u32) -> Option<Pid> {
    i32::try_from(id).ok().and_then(Pid::from_raw)
}

fn watch(
    spec: &LaunchSpec,
    interrupt: &Interrupt,
    on_event: &mut dyn FnMut(LaunchEvent<'_>),
    mut ranks: Ranks,
) -> LaunchReport {
    let start = Instant::now();
    let reap = Duration::from_nanos(spec.limits.reap_ns);
    let leader = ranks.list[0].link;
    let mut clock = AwakeClock::default();
    let mut failure: Option<Failure> = None;
    let (mut finished, mut leader_closed, mut stop_sent, mut killed) = (false, false, false, false);
    let mut first_bad: Option<RankExit> = None;
    let mut heard_ns: Option<u64> = None;
    let mut ending: Option<Instant> = None;
    let (mut all_gone, mut reaped) = (false, start);
    let mut events = Vec::new();
    loop {
        ranks.hub.wait(TICK, &mut events);
        // Progress alone is no reason to look at every child.
        let mut look = reaped.elapsed() >= TICK;
        let now_ns = clock.advance(start.elapsed().as_nanos() as u64, spec.limits.heartbeat_ns);
        for event in events.drain(..) {
            let message = match event {
                HubEvent::Frame { link, frame } if link == leader => frame.message(),
                HubEvent::Ended { link, end } if link == leader => {
                    (leader_closed, look) = (true, true);
                    match end {
                        LinkEnd::Broken(d) => Err(d),
                        _ => continue,
                    }
                }
                HubEvent::Frame { .. } => continue,
                HubEvent::Watched(_) | HubEvent::Ended { .. } => {
                    look = true;
                    continue;
                }
            };
            heard_ns = Some(now_ns);
            match message {
                Ok(Message::Progress(p)) => on_event(LaunchEvent::Progress(&p)),
                Ok(Message::Finished) => finished = true,
                Ok(Message::Failed(f)) => {
                    // A rank that stands still will not go by itself.
                    if let (FailureClass::Stall, Some(rank)) = (f.class, f.rank)
                        && rank > 0
                    {
                        ranks.kill(rank);
                    }
                    failure.get_or_insert(f);
                }
                Ok(_) => {}
                Err(d) => {
                    leader_closed = true;
                    failure.get_or_insert(Failure::from_diagnostic(FailureClass::Protocol, Some(0), &d));
                }
            }
        }
        if look {
            all_gone = ranks.reap();
            reaped = Instant::now();
        }
        if first_bad.is_none_or(|b| b.signal.is_none()) {
            first_bad = ranks.first_bad();
        }
        if interrupt.count() > 0 && !stop_sent {
            stop_sent = true;
            if let Ok(frame) = Frame::new(LAUNCHER, &Message::Stop) {
                ranks.hub.send(leader, &frame);
            }
        }
        if failure.is_none() && !finished && !leader_closed {
            failure = silence(heard_ns, now_ns, &spec.limits);
            if failure.is_some() {
                ranks.kill_left();
            }
        }
        if interrupt.count() > 1 && !killed {
            killed = true;
            ranks.kill_left();
        }
        // The end of any other rank is the leader's to report: it may have answered the shutdown.
        let leader_bad = first_bad.is_some_and(|b| b.rank == 0);
        if failure.is_some() || finished || leader_closed || leader_bad || all_gone {
            ending.get_or_insert_with(Instant::now);
        }
        let patience = if finished { reap * FINISH_FACTOR } else { reap };
        let late = ending.is_some_and(|since| since.elapsed() > patience);
        // A socket that outlives its process was inherited by somebody else; it is not waited for.
        if all_gone && (leader_closed || late) {
            break;
        }
        if late {
            ranks.kill_left();
        }
    }
    let exits: Vec<RankExit> = ranks.list.iter().filter_map(|r| r.exit).collect();
    // A second request that reaches every process takes ranks away before they are killed.
    if interrupt.count() > 1 && failure.as_ref().is_some_and(|f| f.class == FailureClass::RankDied) {
        failure = None;
    }
    if failure.is_none() && !finished && interrupt.count() < 2 {
        failure = Some(unreported(first_bad, &exits));
    }
    if let Some(f) = &mut failure
        && let Some(exit) = exits.iter().find(|e| Some(e.rank) == f.rank)
    {
        f.text += &format!("; {}", exit.words());
    }
    LaunchReport { failure, exits, interrupted: interrupt.count() > 0 }
}

/// A leader that says nothing, although it shows a sign of life every heartbeat once it is up.
fn silence(heard_ns: Option<u64>, now_ns: u64, limits: &Limits) -> Option<Failure> {
    let (since, limit) = heard_ns.map_or((0, limits.hello_ns), |heard| (heard, limits.stale_ns));
    (now_ns.saturating_sub(since) > limit).then(|| {
        let text = format!("no sign of life of the leader for {} ms", limit / 1_000_000);
        Failure::new(FailureClass::Stall, Some(0), &T0743, text)
    })
}

/// The failure of a run whose leader did not live to name one. A rank that chose its status chose its class. The place
/// is that of the check which found it: the ranks', where they say that their leader died; else nobody's but the rank's
/// own, unless it is the leader's.
fn unreported(bad: Option<RankExit>, exits: &[RankExit]) -> Failure {
    let died = Some(FailureClass::RankDied.exit_code());
    match bad {
        Some(exit) => {
            let class = exit.status.and_then(FailureClass::from_exit_code).unwrap_or(FailureClass::RankDied);
            let text = format!("rank {} is gone and the leader reported nothing", exit.rank);
            let seen = exit.rank != 0 || exits.iter().any(|e| e.rank != 0 && e.status == died);
            let place = if seen { Place::Worker } else { Place::Leader };
            Failure::new(class, Some(exit.rank), &T0742, text).at(place)
        }
        None => {
            let text = "every rank exited with status 0 and the leader never said that it finished";
            Failure::new(FailureClass::RankDied, Some(0), &T0742, text)
        }
    }
}

fn ended(rank: u32, status: ExitStatus) -> RankExit {
    RankExit { rank, status: status.code(), signal: status.signal() }
}
