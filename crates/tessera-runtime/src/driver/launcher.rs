//! Spawns the ranks, relays the leader's reports, stops them on request, and leaves nobody behind.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use tessera_base::{Diagnostic, Diagnostics};

use super::T0750;
use super::fds::{failed, send_welcome};
use super::link::{self, LinkEnd, spawn_reader};
use crate::leader::T0743;
use crate::limits::AwakeClock;
use crate::wire::{self, LAUNCHER, Message, Progress, Welcome};
use crate::worker::T0742;
use crate::{Failure, FailureClass, Limits};

/// How often children are looked at.
const POLL: Duration = Duration::from_millis(10);
/// Ranks that have finished get so many times `reap_ns` to unload their devices.
const FINISH_FACTOR: u32 = 3;

/// What the door supplies.
#[derive(Debug)]
pub struct LaunchSpec {
    /// Command line of every rank.
    pub argv: Vec<String>,
    /// How many ranks.
    pub ranks: u32,
    /// The session that every envelope names.
    pub session: u64,
    /// Descriptors for each rank, such as the arenas of its groups; one list per rank, or none at all.
    pub extras: Vec<Vec<Arc<OwnedFd>>>,
    /// Bytes for every rank, handed over untouched.
    pub payload: Vec<u8>,
    /// Bounds.
    pub limits: Limits,
}

/// Asks a launch to stop, from any thread or a signal handler's thread. The first request ends at a chunk
/// boundary, the second kills.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicU32>);

impl Interrupt {
    /// One more request to stop.
    pub fn interrupt(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
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
/// the kernel ties the workers' parent-death signal to it.
pub fn launch(
    spec: &LaunchSpec,
    interrupt: &Interrupt,
    on_event: &mut dyn FnMut(LaunchEvent<'_>),
) -> Result<LaunchReport, Diagnostics> {
    let found = check(spec);
    if !found.is_empty() {
        return Err(found);
    }
    let mut ranks = Ranks { list: Vec::new() };
    if let Err(d) = ranks.spawn(spec) {
        ranks.kill_all();
        return Err(vec![d]);
    }
    let pids: Vec<u32> = ranks.list.iter().map(|r| r.child.id()).collect();
    let reading = ranks.list[0].socket.try_clone();
    let reports = match reading.and_then(read_leader) {
        Ok(reports) => reports,
        Err(e) => {
            ranks.kill_all();
            return Err(vec![failed("launcher socket", &e)]);
        }
    };
    on_event(LaunchEvent::Started(&pids));
    Ok(watch(spec, interrupt, on_event, ranks, &reports))
}

enum Report {
    Message(Message),
    Ended(LinkEnd),
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
    if !spec.extras.is_empty() && spec.extras.len() != spec.ranks as usize {
        refuse(format!("{} lists of descriptors for {} ranks", spec.extras.len(), spec.ranks));
    }
    found
}

struct Rank {
    child: Child,
    /// Open as long as the launcher lives; its closing tells the rank.
    socket: UnixStream,
    exit: Option<RankExit>,
}

struct Ranks {
    list: Vec<Rank>,
}

impl Ranks {
    fn spawn(&mut self, spec: &LaunchSpec) -> Result<(), Diagnostic> {
        let pair = || UnixStream::pair().map_err(|e| failed("a socket pair", &e));
        let mut leader_ends = Vec::new();
        let mut worker_ends = Vec::new();
        for _ in 1..spec.ranks {
            let (a, b) = pair()?;
            leader_ends.push(a);
            worker_ends.push(b);
        }
        for rank in 0..spec.ranks {
            let (here, there) = pair()?;
            let child = Command::new(&spec.argv[0])
                .args(&spec.argv[1..])
                .stdin(Stdio::from(OwnedFd::from(there)))
                .process_group(0)
                .spawn()
                .map_err(|e| failed(&format!("starting rank {rank} as `{}`", spec.argv.join(" ")), &e))?;
            self.list.push(Rank { child, socket: here, exit: None });
        }
        for (i, rank) in self.list.iter().enumerate() {
            link::set_write_limit(&rank.socket, Duration::from_nanos(spec.limits.ready_ns))
                .map_err(|e| failed("launcher socket", &e))?;
            let sockets: Vec<_> =
                if i == 0 { leader_ends.iter().collect() } else { vec![&worker_ends[i - 1]] };
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
            send_welcome(&rank.socket, welcome, &fds)?;
        }
        Ok(())
    }

    /// Collects the ranks that ended; true when none is left.
    fn reap(&mut self) -> bool {
        for (i, rank) in self.list.iter_mut().enumerate() {
            if rank.exit.is_none()
                && let Ok(Some(status)) = rank.child.try_wait()
            {
                rank.exit = Some(ended(i as u32, status));
            }
        }
        self.list.iter().all(|r| r.exit.is_some())
    }

    /// Kills the process group of every rank that is left.
    fn kill_left(&self) {
        for rank in self.list.iter().filter(|r| r.exit.is_none()) {
            // The child is not reaped, so its id still names it and its group.
            if let Some(pid) = i32::try_from(rank.child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process_group(pid, Signal::KILL);
            }
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

fn watch(
    spec: &LaunchSpec,
    interrupt: &Interrupt,
    on_event: &mut dyn FnMut(LaunchEvent<'_>),
    mut ranks: Ranks,
    reports: &Receiver<Report>,
) -> LaunchReport {
    let start = Instant::now();
    let reap = Duration::from_nanos(spec.limits.reap_ns);
    let mut clock = AwakeClock::default();
    let mut failure: Option<Failure> = None;
    let (mut finished, mut leader_closed, mut stop_sent, mut killed) = (false, false, false, false);
    let mut first_bad: Option<RankExit> = None;
    let mut heard_ns: Option<u64> = None;
    let mut ending: Option<Instant> = None;
    loop {
        let mut report = if leader_closed {
            std::thread::sleep(POLL);
            None
        } else {
            reports.recv_timeout(POLL).ok()
        };
        let now_ns = clock.advance(start.elapsed().as_nanos() as u64, spec.limits.heartbeat_ns);
        while let Some(r) = report {
            heard_ns = Some(now_ns);
            match r {
                Report::Message(Message::Progress(p)) => on_event(LaunchEvent::Progress(&p)),
                Report::Message(Message::Finished) => finished = true,
                Report::Message(Message::Failed(f)) => {
                    failure.get_or_insert(f);
                }
                Report::Message(_) => {}
                Report::Ended(LinkEnd::Closed(_)) => leader_closed = true,
                Report::Ended(LinkEnd::Broken(d)) => {
                    leader_closed = true;
                    failure.get_or_insert(Failure::from_diagnostic(FailureClass::Protocol, Some(0), &d));
                }
            }
            report = reports.try_recv().ok();
        }
        let all_gone = ranks.reap();
        if first_bad.is_none() {
            first_bad = ranks.first_bad();
        }
        if interrupt.count() > 0 && !stop_sent {
            stop_sent = true;
            drop(
                wire::encode(LAUNCHER, &Message::Stop).map(|frame| link::send(&ranks.list[0].socket, &frame)),
            );
        }
        let silent = heard_ns.is_some_and(|h| now_ns.saturating_sub(h) > spec.limits.stale_ns);
        if silent && failure.is_none() && !finished && !leader_closed {
            let text =
                format!("no sign of life of the leader for {} s", spec.limits.stale_ns / 1_000_000_000);
            failure = Some(Failure::new(FailureClass::Stall, Some(0), &T0743, text));
            ranks.kill_left();
        }
        if interrupt.count() > 1 && !killed {
            killed = true;
            ranks.kill_left();
        }
        if failure.is_some() || finished || leader_closed || first_bad.is_some() || all_gone {
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
    if failure.is_none() && !finished && !killed {
        failure = Some(unreported(first_bad));
    }
    if let Some(f) = &mut failure
        && let Some(exit) = exits.iter().find(|e| Some(e.rank) == f.rank)
    {
        f.text += &format!("; {}", exit.words());
    }
    LaunchReport { failure, exits, interrupted: interrupt.count() > 0 }
}

/// The failure of a run whose leader did not live to name one. A rank that chose its status chose its class.
fn unreported(bad: Option<RankExit>) -> Failure {
    match bad {
        Some(exit) => {
            let class = exit.status.and_then(FailureClass::from_exit_code).unwrap_or(FailureClass::RankDied);
            let text = format!("rank {} is gone and the leader reported nothing", exit.rank);
            Failure::new(class, Some(exit.rank), &T0742, text)
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

fn read_leader(stream: UnixStream) -> std::io::Result<Receiver<Report>> {
    let (tx, rx) = sync_channel(super::worker_process::EVENTS);
    spawn_reader("from leader".into(), stream, move |message| {
        tx.send(match message {
            Ok((_, message)) => Report::Message(message),
            Err(end) => Report::Ended(end),
        })
        .is_ok()
    })?;
    Ok(rx)
}
