//! A simulation of the whole runtime: the real state machines of leader, workers and mesh leader on
//! a simulated clock, with simulated links, processes, launcher, media pipeline and engines.
//!
//! A [`World`] determines how long operations take and what happens to each frame, and observes
//! every event. Equal worlds give equal runs, event by event. The simulation never sleeps and opens
//! no files, sockets or processes.
//!
//! Its model: frames arrive in order and after a delay; a socket closes after the data that was
//! sent on it; a killed process sends nothing more; a stopped one receives nothing until it
//! continues; a rank waits in a phase's collectives until every rank of the mesh has entered them;
//! an abort releases all waiting ranks; and workers die with their launcher.

mod external_events;
mod fixture;
mod launcher;
mod media_pipeline;
mod overlap;
mod process;
mod world;

pub use external_events::ExternalEvent;
pub use fixture::{HashEngine, synthetic_config};
pub use overlap::{ChunkTimes, StageTimes, simulate_pipeline};
pub use world::{Frame, NEVER_ENDS, OPEN_ENDED, SimEvent, World};

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tessera_base::Diagnostics;

use crate::Failure;
use crate::director::ChunkRequest;
use crate::engine::EngineFault;
use crate::leader::LeaderConfig;

use launcher::LauncherState;
use media_pipeline::MediaQueue;
use process::{ProcessState, SimProcess};

/// The default interval between two ticks of a process, in nanoseconds.
pub const TICK_NS: u64 = 50_000_000;
/// Interval between two progress updates of an engine, in nanoseconds.
const PROGRESS_INTERVAL_NS: u64 = 20_000_000;

/// The processes, settings, requests and external events of a simulated run.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// Settings of the leader. Every other process gets the same plan, limits and tripwires. If rank
    /// 0 is not among its ranks, the leader is outside the mesh and a mesh leader relays.
    pub leader: LeaderConfig,
    /// Whether a launcher started the processes. Without a launcher each process ends on its own.
    pub launcher: bool,
    /// Interval between two ticks of a process, in nanoseconds.
    pub tick_ns: u64,
    /// Requested chunks, in order, each with the number of its new prompt, if any.
    pub requests: VecDeque<(ChunkRequest, Option<u32>)>,
    /// External events with their times in nanoseconds.
    pub external_events: Vec<(u64, ExternalEvent)>,
}

impl SimConfig {
    /// Returns the ranks of the mesh.
    fn mesh(&self) -> &[u32] {
        &self.leader.ranks
    }

    fn is_leader_outside(&self) -> bool {
        !self.mesh().contains(&0)
    }
}

/// How a simulated run ended, and which processes had not exited by its time limit.
#[derive(Debug, Clone, PartialEq)]
pub struct SimOutcome {
    /// The failure that the run reports to the user, if any.
    pub failure: Option<Failure>,
    /// Time at which the last process had exited, in nanoseconds; `None` if processes remained at
    /// the limit.
    pub gone_ns: Option<u64>,
    /// Ranks of the processes that had not exited by the limit of [`Sim::run`].
    pub left: Vec<u32>,
    /// Whether every chunk was delivered and every rank answered the shutdown.
    pub finished: bool,
}

/// A simulated run of leader, ranks and media pipeline in simulated time.
#[derive(Debug)]
pub struct Sim<W> {
    /// Determines durations and the fate of frames, and observes events.
    pub world: W,
    /// The requests that the leader has not pulled yet are left in the configuration.
    config: SimConfig,
    now_ns: u64,
    /// Scheduled events by time in nanoseconds and, at equal times, by the order of scheduling.
    queue: BTreeMap<(u64, u64), QueuedEvent>,
    seq: u64,
    processes: BTreeMap<u32, SimProcess>,
    /// Arrival time of the last frame in nanoseconds, by sending and receiving process.
    arrivals: BTreeMap<(u32, u32), u64>,
    partition: Option<BTreeSet<u32>>,
    /// Ranks that wait in the collectives of a phase, by call id and index of the phase.
    barriers: BTreeMap<(u64, usize), BTreeSet<u32>>,
    launcher: Option<LauncherState>,
    media: MediaQueue,
    requests_ended: bool,
    finished: bool,
    failure: Option<Failure>,
}

#[derive(Debug)]
enum QueuedEvent {
    Tick(u32),
    LauncherTick,
    Frame(Frame),
    LinkClosed { from: u32, to: u32 },
    EngineLoaded(u32),
    PhaseEnds { rank: u32, call_id: u64, phase: usize },
    CallEnds { rank: u32, call_id: u64, fault: Option<EngineFault> },
    MediaJobEnds { begun_ns: u64 },
    ProcessExits(u32),
    External(ExternalEvent),
}

impl<W: World> Sim<W> {
    /// Creates a simulation.
    ///
    /// # Errors
    /// The diagnostics of the state machines, for example for limits without bounds.
    pub fn new(config: SimConfig, mut world: W) -> Result<Sim<W>, Diagnostics> {
        let mut processes = BTreeMap::new();
        for rank in config.mesh().iter().copied().chain(config.is_leader_outside().then_some(0)) {
            processes.insert(rank, SimProcess::from_config(&config, rank, &mut world)?);
        }
        let launcher = config.launcher.then(LauncherState::default);
        let mut sim = Sim {
            world,
            config,
            now_ns: 0,
            queue: BTreeMap::new(),
            seq: 0,
            processes,
            arrivals: BTreeMap::new(),
            partition: None,
            barriers: BTreeMap::new(),
            launcher,
            media: MediaQueue::default(),
            requests_ended: false,
            finished: false,
            failure: None,
        };
        sim.schedule_first_events();
        Ok(sim)
    }

    /// Schedules the first ticks, the end of the loading of the engines, and the external events.
    fn schedule_first_events(&mut self) {
        for (i, rank) in self.processes.keys().copied().collect::<Vec<_>>().into_iter().enumerate() {
            // The ticks of different processes are offset against each other.
            self.schedule_event(i as u64 * 7_000_000, QueuedEvent::Tick(rank));
            if self.config.mesh().contains(&rank) {
                self.schedule_event(1_000_000, QueuedEvent::EngineLoaded(rank));
            }
        }
        self.schedule_event(0, QueuedEvent::LauncherTick);
        for (at_ns, event) in std::mem::take(&mut self.config.external_events) {
            self.schedule_event(at_ns, QueuedEvent::External(event));
        }
    }

    /// Runs until every process has exited, or until no event is due by `limit_ns`. The caller may
    /// call it again with a later limit.
    pub fn run(&mut self, limit_ns: u64) -> SimOutcome {
        let mut gone_ns = None;
        while let Some(at_ns) = self.next_event_ns().filter(|at| *at <= limit_ns) {
            self.now_ns = at_ns;
            match self.queue.first_entry().filter(|due| due.key().0 <= at_ns) {
                Some(due) => {
                    let item = due.remove();
                    self.dispatch_event(item);
                }
                None => {
                    for rank in self.world.advance_open_phases(at_ns) {
                        self.end_open_phase(rank);
                    }
                    self.end_open_job();
                }
            }
            if self.processes.values().all(|p| p.state == ProcessState::Exited) {
                gone_ns = Some(self.now_ns);
                break;
            }
        }
        let left =
            self.processes.iter().filter(|(_, p)| p.state != ProcessState::Exited).map(|(r, _)| *r).collect();
        SimOutcome { failure: self.failure.clone(), gone_ns, left, finished: self.finished }
    }

    /// Schedules an external event for the current time, after all events that are already due.
    pub fn inject_event(&mut self, event: ExternalEvent) {
        self.schedule_event(0, QueuedEvent::External(event));
    }

    /// Returns the time of the next event, in the queue or in the world.
    fn next_event_ns(&mut self) -> Option<u64> {
        let own = self.queue.first_key_value().map(|((at_ns, _), _)| *at_ns);
        own.into_iter().chain(self.world.next_change_ns().map(|at| at.max(self.now_ns))).min()
    }

    /// Returns the simulated time, in nanoseconds.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    fn schedule_event(&mut self, after_ns: u64, item: QueuedEvent) {
        self.seq += 1;
        let at_ns = self.now_ns.saturating_add(after_ns);
        self.queue.insert((at_ns, self.seq), item);
    }

    fn dispatch_event(&mut self, item: QueuedEvent) {
        match item {
            QueuedEvent::Tick(rank) => self.tick_process(rank),
            QueuedEvent::LauncherTick => self.tick_launcher(),
            QueuedEvent::Frame(Frame { from, to, .. }) | QueuedEvent::LinkClosed { from, to }
                if self.crosses_partition(from, to) => {}
            QueuedEvent::Frame(ref f) if self.is_stopped(f.to) => self.defer_event(f.to, item),
            QueuedEvent::LinkClosed { to, .. } if self.is_stopped(to) => self.defer_event(to, item),
            QueuedEvent::PhaseEnds { rank, .. } | QueuedEvent::CallEnds { rank, .. }
                if self.is_stopped(rank) =>
            {
                self.defer_event(rank, item);
            }
            QueuedEvent::MediaJobEnds { .. } if self.is_stopped(0) => self.defer_event(0, item),
            QueuedEvent::EngineLoaded(rank) if self.is_stopped(rank) => self.defer_event(rank, item),
            QueuedEvent::Frame(frame) => self.receive_frame(frame),
            QueuedEvent::LinkClosed { from, to } => self.handle_closed_link(from, to),
            QueuedEvent::EngineLoaded(rank) => self.finish_loading(rank),
            QueuedEvent::PhaseEnds { rank, call_id, phase } => self.end_phase(rank, call_id, phase),
            QueuedEvent::CallEnds { rank, call_id, fault } => self.end_call(rank, call_id, fault),
            QueuedEvent::MediaJobEnds { begun_ns } => self.end_job(begun_ns),
            QueuedEvent::ProcessExits(rank) => self.remove_process(rank),
            QueuedEvent::External(event) => self.apply_external_event(event),
        }
    }

    fn is_stopped(&self, rank: u32) -> bool {
        self.processes.get(&rank).is_some_and(|p| p.state == ProcessState::Stopped)
    }

    fn defer_event(&mut self, rank: u32, item: QueuedEvent) {
        if let Some(p) = self.processes.get_mut(&rank) {
            p.deferred.push(item);
        }
    }

    fn crosses_partition(&self, from: u32, to: u32) -> bool {
        self.partition.as_ref().is_some_and(|side| side.contains(&from) != side.contains(&to))
    }

    // Links.

    fn send_frame(&mut self, frame: Frame) {
        let link = (frame.from, frame.to);
        self.world.observe_event(self.now_ns, SimEvent::FrameSent(&frame));
        if link.0 == link.1 {
            return self.schedule_event(0, QueuedEvent::Frame(frame));
        }
        for (delay_ns, frame) in self.world.deliver_frame(self.now_ns, frame) {
            // A link keeps the order of its frames.
            let last = self.arrivals.get(&link).copied().unwrap_or(0);
            let at = (self.now_ns + delay_ns).max(last);
            self.arrivals.insert(link, at);
            self.schedule_event(at - self.now_ns, QueuedEvent::Frame(frame));
        }
    }

    /// Returns the process that receives a rank's messages first.
    fn upstream_process(&self, rank: u32) -> u32 {
        u32::from(self.config.is_leader_outside() && rank != 0)
    }

    fn linked_processes(&self, rank: u32) -> Vec<u32> {
        let outside = self.config.is_leader_outside();
        let upstream = |r: u32| if outside && r == 1 { 0 } else { self.upstream_process(r) };
        self.processes
            .keys()
            .copied()
            .filter(|r| *r != rank && (upstream(*r) == rank || upstream(rank) == *r))
            .collect()
    }
}
