//! The whole runtime on a clock that only arithmetic moves: the very machines of leader, workers and mesh leader,
//! with links, processes, a launcher, a studio and an engine that are made up.
//!
//! A [`World`] says how long things take, what becomes of a frame, and sees everything that happens; the same world
//! gives the same run, event by event. Nothing here sleeps, opens or spawns.
//!
//! What is modelled: a frame arrives in order and after some time, a socket closes after what was sent, a killed
//! process says nothing, a stopped one hears nothing until it goes on, a rank waits in a phase's collectives until
//! every rank of the mesh is there, an abort releases all that wait, and workers die with their launcher.

mod overlap;
mod process;
mod studio;
mod work;

pub use overlap::{ChunkTimes, Stages, pipeline};
pub use studio::Work;
pub use work::{Facts, FoldEngine, census, collectives, context, stream, text};

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::sync::Arc;

use tessera_base::Diagnostics;

use crate::cache::Cache;
use crate::census::Census;
use crate::decide::ChunkRequest;
use crate::engine::{Engine, EngineFault, ReadyCall};
use crate::leader::{Action, CallRecord, Leader, LeaderConfig, T0743};
use crate::mesh_leader::{MeshLeader, MeshLeaderConfig};
use crate::tripwire::Tripwires;
use crate::wire::{Message, Tensor};
use crate::worker::{T0742, Worker, WorkerConfig};
use crate::{Failure, FailureClass, Limits, Parity};

use process::{Fitted, Process, Seat, State};
use studio::Studio;

/// How often a process usually looks at the clock, in nanoseconds.
pub const TICK_NS: u64 = 50_000_000;
/// A phase of this length never ends and shows no progress.
pub const STUCK: u64 = u64::MAX;
/// A phase of this length lasts until the world says that it ended, collectives and all: see [`World::advance`].
pub const OPEN: u64 = u64::MAX - 1;
/// Interval of an engine's progress marks, in nanoseconds.
const MARK_NS: u64 = 20_000_000;

/// What is run.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Ranks of the mesh.
    pub ranks: u32,
    /// Whether the leader stands outside the mesh, before a mesh leader.
    pub outside: bool,
    /// Whether a launcher started the processes; without one each ends by itself.
    pub launcher: bool,
    /// What the ranks hold.
    pub facts: Facts,
    /// How often a process looks at the clock, in nanoseconds.
    pub tick_ns: u64,
    /// Bounds.
    pub limits: Limits,
    /// What is not checked.
    pub tripwires: Tripwires,
    /// Chunks that are wanted, in order; a number for a new prompt.
    pub requests: Vec<(ChunkRequest, Option<u32>)>,
    /// What strikes, and when, in nanoseconds.
    pub blows: Vec<(u64, Blow)>,
}

/// Something that happens to processes from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Blow {
    /// A rank's process is killed.
    Kill(u32),
    /// A rank's process is stopped.
    Stop(u32),
    /// A stopped process goes on.
    Continue(u32),
    /// The launcher is killed.
    KillLauncher,
    /// A person asks for the end.
    Interrupt,
    /// Nothing passes between these ranks and the others; what is sent waits.
    Partition(BTreeSet<u32>),
    /// What waited at a partition passes.
    Heal,
}

/// A message on one link.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// Process that sends it.
    pub from: u32,
    /// Process that receives it; the sender itself for what leader and rank of one process tell each other.
    pub to: u32,
    /// Rank that made the message.
    pub origin: u32,
    /// Whether it goes towards the leader.
    pub up: bool,
    /// The message.
    pub message: Message,
}

/// What happens, as it happens.
#[derive(Debug)]
pub enum Seen<'a> {
    /// A process sends a frame, or one of its machines tells the other something.
    Sends(&'a Frame),
    /// A rank begins to run a call.
    Run {
        /// The rank.
        rank: u32,
        /// The call.
        call: &'a ReadyCall,
    },
    /// A rank enters the collectives of a phase.
    Collectives {
        /// The rank.
        rank: u32,
        /// The call.
        call_id: u64,
        /// The phase.
        phase: usize,
    },
    /// The leader closed a call.
    Call(&'a CallRecord),
    /// Chunks of an epoch below this one are not to be written any more.
    Fence(u32),
    /// The studio ended a piece of work.
    Studio {
        /// The work.
        work: &'a Work,
        /// When it began, in nanoseconds.
        begun_ns: u64,
        /// Whether something came out of it: false for a chunk below the fence.
        emitted: bool,
        /// What waits behind it.
        waiting: usize,
    },
    /// A process decided to end, and why.
    Leaves {
        /// Its rank.
        rank: u32,
        /// Why; none for a clean end.
        failure: Option<&'a Failure>,
    },
    /// A process is gone.
    Gone(u32),
}

/// How long things take and what becomes of them. Called in one fixed order.
pub trait World {
    /// What arrives of a frame: delays in nanoseconds, each with what comes then. Nothing for a lost one.
    fn carry(&mut self, now_ns: u64, frame: Frame) -> Vec<(u64, Frame)>;
    /// Length of a phase on a rank in nanoseconds, collectives apart; [`STUCK`] for one that never ends, [`OPEN`] for one
    /// of which the world says when it ended.
    fn phase_ns(&mut self, now_ns: u64, rank: u32, call: &ReadyCall, phase: usize) -> u64;
    /// Length of a piece of the studio's work in nanoseconds; [`OPEN`] for one of which the world says when it ended.
    fn studio_ns(&mut self, now_ns: u64, work: &Work) -> u64;
    /// How long a process takes to end once it has decided to, in nanoseconds.
    fn exit_ns(&mut self, rank: u32) -> u64;
    /// A committed call on its way to a rank's engine, after it was seen to begin.
    fn meddle(&mut self, _rank: u32, _call: &mut ReadyCall) {}
    /// Whether the studio writes a chunk of this epoch.
    fn writes(&mut self, epoch: u32, fence: u32) -> bool {
        epoch >= fence
    }
    /// The engine of a rank.
    fn engine(&mut self, _rank: u32, census: &Arc<Census>) -> Box<dyn Engine> {
        Box::new(FoldEngine::new(Arc::clone(census)))
    }
    /// When an open phase may next come to something, in nanoseconds, no earlier than now.
    fn next_ns(&mut self) -> Option<u64> {
        None
    }
    /// Takes open phases up to now, and tells the ranks whose phase ended.
    fn advance(&mut self, _now_ns: u64) -> Vec<u32> {
        Vec::new()
    }
    /// Whether the studio's open piece of work has ended by now. Asked after [`World::advance`].
    fn studio_ended(&mut self) -> bool {
        false
    }
    /// Until when something went on in a rank's open phase, in nanoseconds.
    fn active_ns(&mut self, now_ns: u64, _rank: u32) -> u64 {
        now_ns
    }
    /// The embedding of the `n`th prompt.
    fn text(&mut self, n: u32) -> Option<Tensor> {
        text(n)
    }
    /// The context that follows from a chunk's output.
    fn context(&mut self, previous: &Tensor) -> Option<Tensor> {
        context(previous)
    }
    /// Frames of a chunk.
    fn frames(&mut self) -> u32 {
        12
    }
    /// What the leader decided, before it takes effect.
    fn leads(&mut self, _now_ns: u64, _action: &Action) {}
    /// What happens.
    fn seen(&mut self, now_ns: u64, what: Seen<'_>);
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Ending {
    /// The failure that a person is told, if one was named.
    pub failure: Option<Failure>,
    /// When the last process was gone, in nanoseconds; none if some were still there at the limit.
    pub gone_ns: Option<u64>,
    /// Processes that were left at the limit.
    pub left: Vec<u32>,
    /// Whether every chunk came out and every rank answered the shutdown.
    pub finished: bool,
}

/// A run under way.
#[derive(Debug)]
pub struct Sim<W> {
    /// The world.
    pub world: W,
    now_ns: u64,
    queue: BinaryHeap<Reverse<Due>>,
    seq: u64,
    processes: BTreeMap<u32, Process>,
    mesh: Vec<u32>,
    outside: bool,
    parity: Parity,
    tick_ns: u64,
    limits: Limits,
    tripwires: Tripwires,
    /// When the last frame of a link arrives.
    arrivals: BTreeMap<(u32, u32), u64>,
    parted: Option<BTreeSet<u32>>,
    held: Vec<Item>,
    /// Ranks in the collectives of a phase of a call.
    barriers: BTreeMap<(u64, usize), BTreeSet<u32>>,
    launcher: Option<Launcher>,
    studio: Studio,
    asked: VecDeque<(ChunkRequest, Option<u32>)>,
    over: bool,
    finished: bool,
    failure: Option<Failure>,
}

#[derive(Debug, Default)]
struct Launcher {
    heard_ns: u64,
    failed: bool,
    ending_ns: Option<u64>,
}

#[derive(Debug)]
struct Due {
    at_ns: u64,
    seq: u64,
    item: Item,
}

#[derive(Debug)]
enum Item {
    Tick(u32),
    Watch,
    Frame(Frame),
    Closed { from: u32, to: u32 },
    Loaded(u32),
    PhaseEnds { rank: u32, call_id: u64, phase: usize },
    CallEnds { rank: u32, call_id: u64, fault: Option<EngineFault> },
    StudioEnds { begun_ns: u64 },
    Ends(u32),
    Strikes(Blow),
}

impl<W: World> Sim<W> {
    /// Refuses what the machines refuse.
    ///
    /// # Errors
    /// Limits without bounds.
    pub fn new(setup: Setup, mut world: W) -> Result<Sim<W>, Diagnostics> {
        let Setup { ranks, outside, launcher, facts, tick_ns, limits, tripwires, requests, blows } = setup;
        let mesh: Vec<u32> = (u32::from(outside)..u32::from(outside) + ranks).collect();
        let Facts { plan, session, build, parity, census, stream, silent } = facts;
        let mut processes = BTreeMap::new();
        for rank in mesh.iter().copied().chain(outside.then_some(0)) {
            let seat = if mesh.contains(&rank) {
                Some(Seat {
                    machine: Worker::new(WorkerConfig {
                        rank,
                        above: u32::from(outside && rank > 1),
                        plan,
                        build: build.clone(),
                        parity: parity.clone(),
                        census: Arc::clone(&census),
                        cache: stream.cache,
                        limits: limits.clone(),
                        delivers: rank == mesh[0],
                        tripwires: tripwires.clone(),
                    })?,
                    engine: Fitted(world.engine(rank, &census)),
                    cache: Cache::new(stream.cache).map_err(|d| vec![d])?,
                    census: Arc::clone(&census),
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
                    census: Arc::clone(&census),
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
                    silent: silent.clone(),
                    parity: parity.clone(),
                    census: Arc::clone(&census),
                    stream: stream.clone(),
                    limits: limits.clone(),
                    tripwires: tripwires.clone(),
                })?)
            } else {
                None
            };
            processes.insert(rank, Process::new(leader, relay, seat));
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
            parted: None,
            held: Vec::new(),
            barriers: BTreeMap::new(),
            launcher: launcher.then(Launcher::default),
            studio: Studio::default(),
            asked: requests.into(),
            over: false,
            finished: false,
            failure: None,
        };
        for (i, rank) in sim.processes.keys().copied().collect::<Vec<_>>().into_iter().enumerate() {
            // Processes do not tick in step.
            sim.push(i as u64 * 7_000_000, Item::Tick(rank));
            if sim.mesh.contains(&rank) {
                sim.push(1_000_000, Item::Loaded(rank));
            }
        }
        sim.push(0, Item::Watch);
        for (at_ns, blow) in blows {
            sim.push(at_ns, Item::Strikes(blow));
        }
        Ok(sim)
    }

    /// Runs until every process is gone, or to the end of what comes by `limit_ns`; it may be called again with a later one.
    pub fn run(&mut self, limit_ns: u64) -> Ending {
        let mut gone_ns = None;
        while let Some(at_ns) = self.next_ns().filter(|at| *at <= limit_ns) {
            self.now_ns = at_ns;
            match self.queue.peek() {
                Some(Reverse(due)) if due.at_ns <= at_ns => {
                    if let Some(Reverse(due)) = self.queue.pop() {
                        self.take(due.item);
                    }
                }
                _ => {
                    for rank in self.world.advance(at_ns) {
                        self.open_ends(rank);
                    }
                    self.open_studio_ends();
                }
            }
            if self.processes.values().all(|p| p.state == State::Gone) {
                gone_ns = Some(self.now_ns);
                break;
            }
        }
        let left = self.processes.iter().filter(|(_, p)| p.state != State::Gone).map(|(r, _)| *r).collect();
        Ending { failure: self.failure.clone(), gone_ns, left, finished: self.finished }
    }

    /// Something happens to processes from outside, now.
    pub fn strikes(&mut self, blow: Blow) {
        self.push(0, Item::Strikes(blow));
    }

    /// When something next happens, in the queue or in the world.
    fn next_ns(&mut self) -> Option<u64> {
        let own = self.queue.peek().map(|Reverse(due)| due.at_ns);
        own.into_iter().chain(self.world.next_ns().map(|at| at.max(self.now_ns))).min()
    }

    /// Time on the clock, in nanoseconds.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    fn push(&mut self, after_ns: u64, item: Item) {
        self.seq += 1;
        let at_ns = self.now_ns.saturating_add(after_ns);
        self.queue.push(Reverse(Due { at_ns, seq: self.seq, item }));
    }

    fn take(&mut self, item: Item) {
        match item {
            Item::Tick(rank) => self.tick(rank),
            Item::Watch => self.watch(),
            Item::Frame(ref f) if self.parts(f.from, f.to) => self.held.push(item),
            Item::Closed { from, to } if self.parts(from, to) => self.held.push(item),
            Item::Frame(ref f) if self.stopped(f.to) => self.store(f.to, item),
            Item::Closed { to, .. } if self.stopped(to) => self.store(to, item),
            Item::PhaseEnds { rank, .. } | Item::CallEnds { rank, .. } if self.stopped(rank) => {
                self.store(rank, item);
            }
            Item::StudioEnds { .. } if self.stopped(0) => self.store(0, item),
            Item::Loaded(rank) if self.stopped(rank) => self.store(rank, item),
            Item::Frame(frame) => self.arrives(frame),
            Item::Closed { from, to } => self.closed(from, to),
            Item::Loaded(rank) => self.loaded(rank),
            Item::PhaseEnds { rank, call_id, phase } => self.phase_ends(rank, call_id, phase),
            Item::CallEnds { rank, call_id, fault } => self.call_ends(rank, call_id, fault),
            Item::StudioEnds { begun_ns } => self.studio_ends(begun_ns),
            Item::Ends(rank) => self.gone(rank),
            Item::Strikes(blow) => self.strike(blow),
        }
    }

    fn stopped(&self, rank: u32) -> bool {
        self.processes.get(&rank).is_some_and(|p| p.state == State::Stopped)
    }

    fn store(&mut self, rank: u32, item: Item) {
        if let Some(p) = self.processes.get_mut(&rank) {
            p.stored.push(item);
        }
    }

    fn parts(&self, from: u32, to: u32) -> bool {
        self.parted.as_ref().is_some_and(|side| side.contains(&from) != side.contains(&to))
    }

    // Links.

    fn send(&mut self, frame: Frame) {
        let link = (frame.from, frame.to);
        self.world.seen(self.now_ns, Seen::Sends(&frame));
        if link.0 == link.1 {
            return self.push(0, Item::Frame(frame));
        }
        for (delay_ns, frame) in self.world.carry(self.now_ns, frame) {
            // A link keeps the order of what is sent on it.
            let last = self.arrivals.get(&link).copied().unwrap_or(0);
            let at = (self.now_ns + delay_ns).max(last);
            self.arrivals.insert(link, at);
            self.push(at - self.now_ns, Item::Frame(frame));
        }
    }

    /// The process to which a rank's messages go first.
    fn parent(&self, rank: u32) -> u32 {
        u32::from(self.outside && rank != 0)
    }

    fn links(&self, rank: u32) -> Vec<u32> {
        let above = |r: u32| if self.outside && r == 1 { 0 } else { self.parent(r) };
        self.processes
            .keys()
            .copied()
            .filter(|r| *r != rank && (above(*r) == rank || above(rank) == *r))
            .collect()
    }

    // Processes from outside.

    fn strike(&mut self, blow: Blow) {
        match blow {
            Blow::Kill(rank) => self.gone(rank),
            Blow::Stop(rank) => {
                if let Some(p) = self.processes.get_mut(&rank).filter(|p| p.state == State::Runs) {
                    p.state = State::Stopped;
                }
            }
            Blow::Continue(rank) => {
                let Some(p) = self.processes.get_mut(&rank).filter(|p| p.state == State::Stopped) else {
                    return;
                };
                p.state = State::Runs;
                for item in std::mem::take(&mut p.stored) {
                    self.push(0, item);
                }
            }
            Blow::KillLauncher => {
                if self.launcher.take().is_some() {
                    for rank in self.processes.keys().copied().filter(|r| *r != 0).collect::<Vec<_>>() {
                        self.gone(rank);
                    }
                    // Its parent-death signal wakes a leader that is stopped.
                    self.strike(Blow::Continue(0));
                    self.leader(crate::leader::Event::LauncherGone);
                }
            }
            Blow::Interrupt => self.leader(crate::leader::Event::Stop),
            Blow::Partition(side) => self.parted = Some(side),
            Blow::Heal => {
                self.parted = None;
                for item in std::mem::take(&mut self.held) {
                    self.push(0, item);
                }
            }
        }
    }

    /// A process is gone: its sockets close after all that it had sent.
    fn gone(&mut self, rank: u32) {
        let Some(p) = self.processes.get_mut(&rank).filter(|p| p.state != State::Gone) else { return };
        p.state = State::Gone;
        p.stored.clear();
        self.world.seen(self.now_ns, Seen::Gone(rank));
        for to in self.links(rank) {
            let last = self.arrivals.get(&(rank, to)).copied().unwrap_or(0);
            let at = last.max(self.now_ns);
            self.push(at - self.now_ns, Item::Closed { from: rank, to });
        }
    }

    /// The launcher's own watch over its processes, as its driver keeps it.
    fn watch(&mut self) {
        let now_ns = self.now_ns;
        self.push(TICK_NS, Item::Watch);
        let bad = self.processes.iter().find(|(_, p)| p.state == State::Gone && !p.clean).map(|(r, _)| *r);
        let leader_gone = self.processes.get(&0).is_none_or(|p| p.state == State::Gone);
        let (limits, finished) = (&self.limits, self.finished);
        let Some(l) = &mut self.launcher else { return };
        // Until it first speaks a leader may be loading.
        let patience = if l.heard_ns == 0 { limits.hello_ns } else { limits.stale_ns };
        let silent = now_ns.saturating_sub(l.heard_ns) > patience;
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
            self.failure = Some(Failure::new(class, Some(rank), code, "told by the launcher"));
        }
        for rank in self.processes.keys().copied().collect::<Vec<_>>() {
            self.gone(rank);
        }
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        (self.at_ns, self.seq) == (other.at_ns, other.seq)
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    fn cmp(&self, other: &Due) -> std::cmp::Ordering {
        (self.at_ns, self.seq).cmp(&(other.at_ns, other.seq))
    }
}
