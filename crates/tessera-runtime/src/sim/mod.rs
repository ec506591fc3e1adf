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

mod fixture;
mod media_pipeline;
mod overlap;
mod process;

pub use fixture::{
    HashEngine, SharedConfig, collective_count, context_tensor, prompt_tensor, synthetic_programs,
    synthetic_stream,
};
pub use media_pipeline::MediaJob;
pub use overlap::{ChunkTimes, StageTimes, simulate_pipeline};

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::sync::Arc;

use tessera_base::Diagnostics;

use crate::director::ChunkRequest;
use crate::engine::{Engine, EngineFault, ReadyCall};
use crate::kv_cache::CacheState;
use crate::leader::{Action, CallRecord, Leader, LeaderConfig, T0743};
use crate::mesh_leader::{MeshLeader, MeshLeaderConfig};
use crate::program_index::ProgramIndex;
use crate::tripwire::Tripwires;
use crate::wire::{Message, Tensor};
use crate::worker::{T0742, Worker, WorkerConfig};
use crate::{Failure, FailureClass, Limits, Parity};

use media_pipeline::MediaQueue;
use process::{EngineBox, ProcessState, SimProcess, SimRank};

/// The default interval between two ticks of a process, in nanoseconds.
pub const TICK_NS: u64 = 50_000_000;
/// The duration of a phase that never ends and makes no progress.
pub const NEVER_ENDS: u64 = u64::MAX;
/// The duration of a phase that lasts until the world ends it, collectives included: see
/// [`World::advance_open_phases`].
pub const OPEN_ENDED: u64 = u64::MAX - 1;
/// Interval between two progress updates of an engine, in nanoseconds.
const PROGRESS_INTERVAL_NS: u64 = 20_000_000;

/// The configuration of a simulation.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// Number of ranks in the mesh.
    pub ranks: u32,
    /// Whether the leader is outside the mesh and a mesh leader relays.
    pub outside: bool,
    /// Whether a launcher started the processes. Without a launcher each process ends on its own.
    pub launcher: bool,
    /// The configuration that all ranks share.
    pub shared: SharedConfig,
    /// Interval between two ticks of a process, in nanoseconds.
    pub tick_ns: u64,
    /// The bounds of queues and waits.
    pub limits: Limits,
    /// Tripwires whose checks are skipped in every simulated process.
    pub tripwires: Tripwires,
    /// Requested chunks, in order, each with the number of its new prompt, if any.
    pub requests: Vec<(ChunkRequest, Option<u32>)>,
    /// External events with their times in nanoseconds.
    pub external_events: Vec<(u64, ExternalEvent)>,
}

/// An event that affects processes from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExternalEvent {
    /// A rank's process is killed.
    Kill(u32),
    /// A rank's process is stopped.
    Stop(u32),
    /// A stopped process continues.
    Continue(u32),
    /// The launcher is killed.
    KillLauncher,
    /// The user requests a stop.
    Interrupt,
    /// Nothing passes between these ranks and the others; sent frames are held back.
    Partition(BTreeSet<u32>),
    /// The partition ends, and the held frames pass.
    Heal,
}

/// A message on one link.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// Rank of the process at the sending end of the link.
    pub from: u32,
    /// The receiving process. It equals the sender if leader and rank share the process.
    pub to: u32,
    /// The rank that made the message.
    pub origin: u32,
    /// Whether the frame travels towards the leader.
    pub up: bool,
    /// The control message that the frame carries.
    pub message: Message,
}

/// An event of the simulation, reported when it happens.
#[derive(Debug)]
pub enum SimEvent<'a> {
    /// A process sends a frame, also between two state machines of one process.
    FrameSent(&'a Frame),
    /// A rank starts a call.
    CallStarted {
        /// Rank whose engine starts the call.
        rank: u32,
        /// The committed call, as the engine receives it.
        call: &'a ReadyCall,
    },
    /// A rank enters the collectives of a phase.
    CollectivesEntered {
        /// Rank that enters the collectives.
        rank: u32,
        /// Id of the call that the rank runs.
        call_id: u64,
        /// Index of the phase within the call.
        phase: usize,
    },
    /// The leader finished a call.
    CallFinished(&'a CallRecord),
    /// The media pipeline no longer writes chunks of an epoch below this one.
    MinEpochSet(u32),
    /// The media pipeline finished a job.
    MediaJobFinished {
        /// The finished job: a prompt, a context or a delivery.
        work: &'a MediaJob,
        /// Start time, in nanoseconds.
        begun_ns: u64,
        /// Whether the job had a result: false for a chunk below the minimum epoch.
        emitted: bool,
        /// Number of jobs that wait behind it.
        waiting: usize,
    },
    /// A process begins to exit.
    Exiting {
        /// Rank of the exiting process.
        rank: u32,
        /// The reason; `None` for a clean exit.
        failure: Option<&'a Failure>,
    },
    /// A process has exited.
    Exited(u32),
}

/// Determines how long operations take and what happens to frames. The simulation calls the methods
/// in a deterministic order.
pub trait World {
    /// Returns what arrives for a sent frame: a delay in nanoseconds and a frame for each arrival,
    /// or nothing for a lost frame.
    fn deliver_frame(&mut self, now_ns: u64, frame: Frame) -> Vec<(u64, Frame)>;
    /// Returns the duration of a phase on a rank in nanoseconds, without collectives;
    /// [`NEVER_ENDS`] for a phase that never ends, [`OPEN_ENDED`] for a phase that the world ends.
    fn phase_ns(&mut self, now_ns: u64, rank: u32, call: &ReadyCall, phase: usize) -> u64;
    /// Returns the duration of a media job in nanoseconds; [`OPEN_ENDED`] for a job that the world
    /// ends.
    fn media_ns(&mut self, now_ns: u64, job: &MediaJob) -> u64;
    /// Returns the time that a process takes to exit, in nanoseconds.
    fn exit_ns(&mut self, rank: u32) -> u64;
    /// May change a committed call before a rank's engine runs it, after its start was observed.
    fn alter_call(&mut self, _rank: u32, _call: &mut ReadyCall) {}
    /// Returns whether the media pipeline writes a chunk of this epoch.
    fn should_write(&mut self, epoch: u32, min_epoch: u32) -> bool {
        epoch >= min_epoch
    }
    /// Creates the engine of a rank.
    fn make_engine(&mut self, _rank: u32, programs: &Arc<ProgramIndex>) -> Box<dyn Engine> {
        Box::new(HashEngine::new(Arc::clone(programs)))
    }
    /// Returns the earliest time at which an open-ended phase may change, in nanoseconds. The
    /// simulation raises a time in the past to now.
    fn next_change_ns(&mut self) -> Option<u64> {
        None
    }
    /// Advances open-ended phases to now and returns the ranks whose phase ended.
    fn advance_open_phases(&mut self, _now_ns: u64) -> Vec<u32> {
        Vec::new()
    }
    /// Returns whether the open-ended media job has ended by now. The simulation calls it after
    /// [`World::advance_open_phases`].
    fn media_job_ended(&mut self) -> bool {
        false
    }
    /// Returns the time of the last activity in a rank's open-ended phase, in nanoseconds.
    fn last_activity_ns(&mut self, now_ns: u64, _rank: u32) -> u64 {
        now_ns
    }
    /// Returns the embedding of the `n`th prompt.
    fn prompt_embedding(&mut self, n: u32) -> Option<Tensor> {
        prompt_tensor(n)
    }
    /// Returns the context that follows from a chunk's output.
    fn make_context(&mut self, previous: &Tensor) -> Option<Tensor> {
        context_tensor(previous)
    }
    /// Returns the number of frames of a chunk.
    fn frames_per_chunk(&mut self) -> u32 {
        12
    }
    /// Observes an action of the leader before it takes effect.
    fn observe_action(&mut self, _now_ns: u64, _action: &Action) {}
    /// Observes an event of the simulation at the simulated time `now_ns`.
    fn observe_event(&mut self, now_ns: u64, what: SimEvent<'_>);
}

/// The outcome of a simulated run.
#[derive(Debug, Clone, PartialEq)]
pub struct SimOutcome {
    /// The failure that the run reports to the user, if any.
    pub failure: Option<Failure>,
    /// Time at which the last process had exited, in nanoseconds; `None` if processes remained at
    /// the limit.
    pub gone_ns: Option<u64>,
    /// Processes that remained at the limit.
    pub left: Vec<u32>,
    /// Whether every chunk was delivered and every rank answered the shutdown.
    pub finished: bool,
}

/// A simulated run of leader, ranks and media pipeline in simulated time.
#[derive(Debug)]
pub struct Sim<W> {
    /// Determines durations and the fate of frames, and observes events.
    pub world: W,
    now_ns: u64,
    queue: BinaryHeap<Reverse<ScheduledEvent>>,
    seq: u64,
    processes: BTreeMap<u32, SimProcess>,
    mesh: Vec<u32>,
    outside: bool,
    parity: Parity,
    tick_ns: u64,
    limits: Limits,
    tripwires: Tripwires,
    /// Arrival time of the last frame of each link.
    arrivals: BTreeMap<(u32, u32), u64>,
    partition: Option<BTreeSet<u32>>,
    withheld: Vec<QueuedEvent>,
    /// Ranks inside the collectives of a call's phase.
    barriers: BTreeMap<(u64, usize), BTreeSet<u32>>,
    launcher: Option<LauncherState>,
    media: MediaQueue,
    pending_requests: VecDeque<(ChunkRequest, Option<u32>)>,
    requests_ended: bool,
    finished: bool,
    failure: Option<Failure>,
}

#[derive(Debug, Default)]
struct LauncherState {
    last_message_ns: u64,
    failed: bool,
    ending_ns: Option<u64>,
}

#[derive(Debug)]
struct ScheduledEvent {
    at_ns: u64,
    seq: u64,
    item: QueuedEvent,
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
    pub fn new(setup: SimConfig, mut world: W) -> Result<Sim<W>, Diagnostics> {
        let SimConfig {
            ranks,
            outside,
            launcher,
            shared: facts,
            tick_ns,
            limits,
            tripwires,
            requests,
            external_events: blows,
        } = setup;
        let mesh: Vec<u32> = (u32::from(outside)..u32::from(outside) + ranks).collect();
        let SharedConfig {
            plan,
            session,
            build,
            parity,
            programs: program_index,
            stream,
            ranks_without_output: silent,
        } = facts;
        let mut processes = BTreeMap::new();
        for rank in mesh.iter().copied().chain(outside.then_some(0)) {
            let rank_state = if mesh.contains(&rank) {
                Some(SimRank {
                    machine: Worker::new(WorkerConfig {
                        rank,
                        upstream_rank: u32::from(outside && rank > 1),
                        plan,
                        build: build.clone(),
                        parity: parity.clone(),
                        programs: Arc::clone(&program_index),
                        cache: stream.cache,
                        limits: limits.clone(),
                        sends_output: rank == mesh[0],
                        tripwires: tripwires.clone(),
                    })?,
                    engine: EngineBox(world.make_engine(rank, &program_index)),
                    cache: CacheState::new(stream.cache).map_err(|d| vec![d])?,
                    programs: Arc::clone(&program_index),
                    running: None,
                })
            } else {
                None
            };
            let relay = if outside && rank == 1 {
                Some(MeshLeader::new(MeshLeaderConfig {
                    rank,
                    members: mesh[1..].to_vec(),
                    plan,
                    programs: Arc::clone(&program_index),
                    cache: stream.cache,
                    limits: limits.clone(),
                    tripwires: tripwires.clone(),
                })?)
            } else {
                None
            };
            let leader = if rank == 0 {
                Some(Leader::new(LeaderConfig {
                    ranks: mesh.clone(),
                    plan,
                    session,
                    build: build.clone(),
                    ranks_without_output: silent.clone(),
                    parity: parity.clone(),
                    programs: Arc::clone(&program_index),
                    stream: stream.clone(),
                    limits: limits.clone(),
                    tripwires: tripwires.clone(),
                })?)
            } else {
                None
            };
            processes.insert(rank, SimProcess::new(leader, relay, rank_state));
        }
        let mut sim = Sim {
            world,
            now_ns: 0,
            queue: BinaryHeap::new(),
            seq: 0,
            processes,
            mesh,
            outside,
            parity,
            tick_ns,
            limits,
            tripwires,
            arrivals: BTreeMap::new(),
            partition: None,
            withheld: Vec::new(),
            barriers: BTreeMap::new(),
            launcher: launcher.then(LauncherState::default),
            media: MediaQueue::default(),
            pending_requests: requests.into(),
            requests_ended: false,
            finished: false,
            failure: None,
        };
        for (i, rank) in sim.processes.keys().copied().collect::<Vec<_>>().into_iter().enumerate() {
            // The ticks of different processes are offset against each other.
            sim.schedule_event(i as u64 * 7_000_000, QueuedEvent::Tick(rank));
            if sim.mesh.contains(&rank) {
                sim.schedule_event(1_000_000, QueuedEvent::EngineLoaded(rank));
            }
        }
        sim.schedule_event(0, QueuedEvent::LauncherTick);
        for (at_ns, blow) in blows {
            sim.schedule_event(at_ns, QueuedEvent::External(blow));
        }
        Ok(sim)
    }

    /// Runs until every process has exited, or until no event is due by `limit_ns`. The caller may
    /// call it again with a later limit.
    pub fn run(&mut self, limit_ns: u64) -> SimOutcome {
        let mut gone_ns = None;
        while let Some(at_ns) = self.next_event_ns().filter(|at| *at <= limit_ns) {
            self.now_ns = at_ns;
            match self.queue.peek() {
                Some(Reverse(due)) if due.at_ns <= at_ns => {
                    if let Some(Reverse(due)) = self.queue.pop() {
                        self.dispatch_event(due.item);
                    }
                }
                _ => {
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

    /// Applies an external event now.
    pub fn inject_event(&mut self, blow: ExternalEvent) {
        self.schedule_event(0, QueuedEvent::External(blow));
    }

    /// Returns the time of the next event, in the queue or in the world.
    fn next_event_ns(&mut self) -> Option<u64> {
        let own = self.queue.peek().map(|Reverse(due)| due.at_ns);
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
        self.queue.push(Reverse(ScheduledEvent { at_ns, seq: self.seq, item }));
    }

    fn dispatch_event(&mut self, item: QueuedEvent) {
        match item {
            QueuedEvent::Tick(rank) => self.tick_process(rank),
            QueuedEvent::LauncherTick => self.tick_launcher(),
            QueuedEvent::Frame(ref f) if self.crosses_partition(f.from, f.to) => self.withheld.push(item),
            QueuedEvent::LinkClosed { from, to } if self.crosses_partition(from, to) => {
                self.withheld.push(item)
            }
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
            QueuedEvent::External(blow) => self.apply_external_event(blow),
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
        u32::from(self.outside && rank != 0)
    }

    fn linked_processes(&self, rank: u32) -> Vec<u32> {
        let upstream = |r: u32| if self.outside && r == 1 { 0 } else { self.upstream_process(r) };
        self.processes
            .keys()
            .copied()
            .filter(|r| *r != rank && (upstream(*r) == rank || upstream(rank) == *r))
            .collect()
    }

    // External events.

    fn apply_external_event(&mut self, blow: ExternalEvent) {
        match blow {
            ExternalEvent::Kill(rank) => self.remove_process(rank),
            ExternalEvent::Stop(rank) => {
                if let Some(p) = self.processes.get_mut(&rank).filter(|p| p.state == ProcessState::Running) {
                    p.state = ProcessState::Stopped;
                }
            }
            ExternalEvent::Continue(rank) => {
                let Some(p) = self.processes.get_mut(&rank).filter(|p| p.state == ProcessState::Stopped)
                else {
                    return;
                };
                p.state = ProcessState::Running;
                for item in std::mem::take(&mut p.deferred) {
                    self.schedule_event(0, item);
                }
            }
            ExternalEvent::KillLauncher => {
                if self.launcher.take().is_some() {
                    for rank in self.processes.keys().copied().filter(|r| *r != 0).collect::<Vec<_>>() {
                        self.remove_process(rank);
                    }
                    // The parent-death signal wakes a stopped leader.
                    self.apply_external_event(ExternalEvent::Continue(0));
                    self.step_leader(crate::leader::Event::LauncherGone);
                }
            }
            ExternalEvent::Interrupt => self.step_leader(crate::leader::Event::Stop),
            ExternalEvent::Partition(side) => self.partition = Some(side),
            ExternalEvent::Heal => {
                self.partition = None;
                for item in std::mem::take(&mut self.withheld) {
                    self.schedule_event(0, item);
                }
            }
        }
    }

    /// Removes a process. Its sockets close after the data that it had sent.
    fn remove_process(&mut self, rank: u32) {
        let Some(p) = self.processes.get_mut(&rank).filter(|p| p.state != ProcessState::Exited) else {
            return;
        };
        p.state = ProcessState::Exited;
        p.deferred.clear();
        self.world.observe_event(self.now_ns, SimEvent::Exited(rank));
        for to in self.linked_processes(rank) {
            let last = self.arrivals.get(&(rank, to)).copied().unwrap_or(0);
            let at = last.max(self.now_ns);
            self.schedule_event(at - self.now_ns, QueuedEvent::LinkClosed { from: rank, to });
        }
    }

    /// Simulates the launcher's supervision of its processes, like the launcher's driver.
    fn tick_launcher(&mut self) {
        let now_ns = self.now_ns;
        self.schedule_event(TICK_NS, QueuedEvent::LauncherTick);
        let bad =
            self.processes.iter().find(|(_, p)| p.state == ProcessState::Exited && !p.clean).map(|(r, _)| *r);
        let leader_gone = self.processes.get(&0).is_none_or(|p| p.state == ProcessState::Exited);
        let (limits, finished) = (&self.limits, self.finished);
        let Some(l) = &mut self.launcher else { return };
        // Until its first message a leader may be loading.
        let patience = if l.last_message_ns == 0 { limits.hello_ns } else { limits.stale_ns };
        let silent = now_ns.saturating_sub(l.last_message_ns) > patience;
        let kills_now = silent && !l.failed && !finished && !leader_gone;
        if kills_now || l.failed || finished || bad.is_some() {
            l.ending_ns.get_or_insert(now_ns);
        }
        let patience = if finished { 3 * limits.reap_ns } else { limits.reap_ns };
        let late = l.ending_ns.is_some_and(|since| now_ns - since > patience);
        l.failed |= kills_now;
        if !kills_now && !late {
            return;
        }
        if self.failure.is_none() && !finished {
            let (class, rank, code) = match bad {
                Some(rank) if !kills_now => (FailureClass::RankDied, rank, &T0742),
                _ => (FailureClass::Stall, 0, &T0743),
            };
            self.failure = Some(Failure::new(class, Some(rank), code, "reported by the launcher"));
        }
        for rank in self.processes.keys().copied().collect::<Vec<_>>() {
            self.remove_process(rank);
        }
    }
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &ScheduledEvent) -> bool {
        (self.at_ns, self.seq) == (other.at_ns, other.seq)
    }
}
impl Eq for ScheduledEvent {}
impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &ScheduledEvent) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for ScheduledEvent {
    fn cmp(&self, other: &ScheduledEvent) -> std::cmp::Ordering {
        (self.at_ns, self.seq).cmp(&(other.at_ns, other.seq))
    }
}
