//! Leader and ranks in one thread, joined by queues, on a clock that only the test moves. In the shape `Pp` the
//! leader stands outside the mesh, and rank 1 relays through a mesh leader.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tessera_runtime::cache::{Cache, Regime};
use tessera_runtime::decide::{ChunkRequest, Cut};
use tessera_runtime::engine::{CallReport, Engine, EngineFault, ReadyCall, run_call};
use tessera_runtime::leader::{self, CallRecord, Leader, LeaderConfig};
use tessera_runtime::mesh_leader::{self, MeshLeader};
use tessera_runtime::wire::{Message, Tensor, decode, encode};
use tessera_runtime::worker::{self, Worker, WorkerConfig};
use tessera_runtime::{Failure, Parity, Tripwires};

use super::{
    Bug, FakeEngine, Shape, census, context, leader_config, mesh_leader_config, stream, text, worker_config,
};

/// What a test may do to a message on its way: nothing, change it, drop it, or send it more than once.
pub type Tamper = Box<dyn FnMut(Way, u64, Message) -> Vec<Message>>;
/// What a test may do to a committed call before a rank's engine receives it.
pub type Meddle = Box<dyn FnMut(u32, &mut ReadyCall, &mut Cache)>;

/// A hop of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// To a rank, over its own control link.
    To(u32),
    /// From a rank, over its own control link.
    From(u32),
    /// Of a member, passed on by the mesh leader to the leader.
    Relay(u32),
}

pub struct Request {
    pub request: ChunkRequest,
    pub text: Option<Tensor>,
}

pub struct Net {
    pub regime: Regime,
    pub leader: Leader,
    pub relay: Option<MeshLeader>,
    pub ranks: BTreeMap<u32, Rank>,
    pub requests: VecDeque<Request>,
    pub tamper: Tamper,
    pub meddle: Meddle,
    /// Ranks whose process dies just before this message (counted over all) is carried; 0 is a leader outside.
    pub kill: Option<(u64, u32)>,
    /// The same for ranks that stop being scheduled.
    pub freeze: Option<(u64, u32)>,
    /// Events for the leader just before these messages are carried.
    pub inject: BTreeMap<u64, leader::Event>,
    /// The launcher's end, just before this message is carried.
    pub launcher_gone_at: Option<u64>,
    /// Ranks whose engine never returns from this call.
    pub stuck: BTreeSet<(u32, u64)>,
    /// Calls of a rank that take so many ticks, with a new mark each so many.
    pub slow: BTreeMap<(u32, u64), (u32, u32)>,
    /// Ranks that stop being scheduled once they run this call.
    pub frozen: BTreeSet<(u32, u64)>,
    pub leader_alive: bool,
    pub leader_frozen: bool,
    pub deliver: bool,
    pub tripwires: Tripwires,
    pub now_ns: u64,
    pub carried: u64,
    pub outcome: Option<Option<Failure>>,
    pub delivered: Vec<(u32, Tensor)>,
    /// Finished calls with a chunk, and those without.
    pub records: Vec<CallRecord>,
    pub controls: Vec<CallRecord>,
    pub dropped: Vec<(u64, Option<u32>, u32)>,
    pub lost: Vec<(u64, Vec<u32>, Vec<u32>)>,
    pub notes: Vec<String>,
    pub scenes: Vec<(u32, bool)>,
    pub trace: Vec<(Way, Message)>,
    pub most_undelivered: usize,
    /// How many chunks had been delivered when the last flush was taken.
    pub cut_taken: Option<usize>,
    /// Whether requests come from `inject` alone.
    pub hold_requests: bool,
    pub keep_trace: bool,
    fence: u32,
    undelivered: VecDeque<(u32, u32, Tensor)>,
    wire: VecDeque<(Way, u32, Message)>,
    later: Vec<Later>,
    ended: VecDeque<(u32, Result<CallReport, EngineFault>)>,
}

/// A call that takes its time.
struct Later {
    rank: u32,
    call: Box<ReadyCall>,
    passed: u32,
    ticks: u32,
    every: u32,
}

pub struct Rank {
    pub machine: Worker,
    pub engine: FakeEngine,
    pub cache: Cache,
    pub alive: bool,
    pub frozen: bool,
    pub outcome: Option<Option<Failure>>,
    pub runs: BTreeMap<u64, u32>,
    gone_told: bool,
}

pub const FIRST: ChunkRequest = ChunkRequest { prompt_change: true, seed: 7, cut: Cut::None };
pub const NEXT: ChunkRequest = ChunkRequest { prompt_change: false, seed: 7, cut: Cut::None };

impl Net {
    pub fn new(ranks: u32, regime: Regime, chunks: u32) -> Net {
        Net::shaped(Shape::Mesh, ranks, regime, chunks)
    }

    pub fn shaped(shape: Shape, ranks: u32, regime: Regime, chunks: u32) -> Net {
        Net::with(shape, leader_config(shape, ranks, regime), regime, chunks, |r| {
            worker_config(shape, r, regime)
        })
    }

    pub fn with(
        shape: Shape,
        config: LeaderConfig,
        regime: Regime,
        chunks: u32,
        worker: impl Fn(u32) -> WorkerConfig,
    ) -> Net {
        let numbers = config.ranks.clone();
        let tripwires = config.tripwires.clone();
        let requests = (0..chunks)
            .map(|k| match k {
                0 => Request { request: FIRST, text: Some(text(1)) },
                _ => Request { request: NEXT, text: None },
            })
            .collect();
        let relay = (shape == Shape::Pp).then(|| {
            let mut relay = mesh_leader_config(numbers.len() as u32, regime);
            (relay.tripwires, relay.limits) = (tripwires.clone(), config.limits.clone());
            MeshLeader::new(relay).expect("legal")
        });
        Net {
            regime,
            leader: Leader::new(config).expect("legal"),
            relay,
            ranks: numbers
                .into_iter()
                .map(|r| {
                    let rank = Rank {
                        machine: Worker::new(worker(r)).expect("legal"),
                        engine: FakeEngine::of_rank(r, Bug::None),
                        cache: Cache::new(stream(regime).cache).expect("legal"),
                        alive: true,
                        frozen: false,
                        outcome: None,
                        runs: BTreeMap::new(),
                        gone_told: false,
                    };
                    (r, rank)
                })
                .collect(),
            requests,
            tamper: Box::new(|_, _, m| vec![m]),
            meddle: Box::new(|_, _, _| {}),
            kill: None,
            freeze: None,
            inject: BTreeMap::new(),
            launcher_gone_at: None,
            stuck: BTreeSet::new(),
            slow: BTreeMap::new(),
            frozen: BTreeSet::new(),
            leader_alive: true,
            leader_frozen: false,
            deliver: true,
            tripwires,
            now_ns: 0,
            carried: 0,
            outcome: None,
            delivered: Vec::new(),
            records: Vec::new(),
            controls: Vec::new(),
            dropped: Vec::new(),
            lost: Vec::new(),
            notes: Vec::new(),
            scenes: Vec::new(),
            trace: Vec::new(),
            most_undelivered: 0,
            cut_taken: None,
            hold_requests: false,
            keep_trace: true,
            fence: 0,
            undelivered: VecDeque::new(),
            wire: VecDeque::new(),
            later: Vec::new(),
            ended: VecDeque::new(),
        }
    }

    pub fn rank(&mut self, r: u32) -> &mut Rank {
        self.ranks.get_mut(&r).expect("a rank of the mesh")
    }

    fn numbers(&self) -> Vec<u32> {
        self.ranks.keys().copied().collect()
    }

    /// Runs until everybody has ended, which must be before `limit_s` of the clock have passed.
    pub fn run(&mut self, limit_s: u64) -> Option<Failure> {
        self.run_for(limit_s).unwrap_or_else(|| self.blocked())
    }

    /// Runs until everybody has ended; `None` if somebody is left after `limit_s` of the clock.
    pub fn run_for(&mut self, limit_s: u64) -> Option<Option<Failure>> {
        self.leader(leader::Event::Tick);
        for r in self.numbers() {
            let fingerprints = self.rank(r).engine.fingerprints();
            self.worker(r, worker::Event::EngineReady { parity: Parity::default(), fingerprints });
        }
        self.advance(limit_s)
    }

    /// Goes on with a run that the test had interrupted.
    pub fn go_on(&mut self, limit_s: u64) -> Option<Failure> {
        self.advance(limit_s).unwrap_or_else(|| self.blocked())
    }

    /// Begins or goes on with a run until the clock shows so many seconds; `None` if somebody is left.
    pub fn run_some(&mut self, until_s: u64) -> Option<Option<Failure>> {
        if self.now_ns == 0 { self.run_for(until_s) } else { self.advance(until_s) }
    }

    fn blocked(&self) -> ! {
        let left: Vec<_> =
            self.ranks.iter().filter(|(_, r)| r.alive && r.outcome.is_none()).map(|(r, _)| r).collect();
        panic!("blocked after {} ns: ranks {left:?}, leader {:?}", self.now_ns, self.outcome);
    }

    fn advance(&mut self, limit_s: u64) -> Option<Option<Failure>> {
        while self.now_ns < limit_s * 1_000_000_000 {
            self.settle();
            if (self.outcome.is_some() || !self.leader_alive || self.leader_frozen)
                && self.ranks.values().all(|r| !r.alive || r.frozen || r.outcome.is_some())
            {
                return Some(self.outcome.clone().flatten());
            }
            self.now_ns += 50_000_000;
            self.leader(leader::Event::Tick);
            self.relay(mesh_leader::Event::Tick);
            for r in self.numbers() {
                let slow = self.later.iter().find(|l| l.rank == r);
                let mark = match slow {
                    Some(l) => 1 << 32 | u64::from(l.passed / l.every),
                    None => u64::from(self.rank(r).engine.phases_run) << 32,
                };
                self.worker(r, worker::Event::Tick { mark });
            }
            for mut l in std::mem::take(&mut self.later) {
                l.passed += 1;
                if l.passed < l.ticks { self.later.push(l) } else { self.execute(l.rank, &l.call) }
            }
        }
        None
    }

    /// The outcome of a run in which every rank must have ended cleanly.
    pub fn run_clean(&mut self) {
        let failure = self.run(60);
        assert_eq!(failure, None);
        for r in self.ranks.values() {
            assert_eq!(r.outcome, Some(None));
        }
    }

    fn settle(&mut self) {
        loop {
            while !self.hold_requests
                && self.leader.wants() > 0
                && self.outcome.is_none()
                && self.leader_alive
            {
                let event = match self.requests.pop_front() {
                    Some(Request { request, text }) => leader::Event::Request { request, text },
                    None => leader::Event::NoMoreRequests,
                };
                self.leader(event);
            }
            if let Some((way, origin, message)) = self.wire.pop_front() {
                self.carry(way, origin, message);
            } else if let Some((rank, outcome)) = self.ended.pop_front() {
                self.worker(rank, worker::Event::CallEnded(outcome));
            } else if self.deliver && !self.undelivered.is_empty() {
                if let Some((chunk, epoch, latents)) = self.undelivered.pop_front() {
                    let event = if epoch < self.fence {
                        leader::Event::Discarded { chunk }
                    } else {
                        self.delivered.push((chunk, latents));
                        leader::Event::Delivered { chunk, frames: 12 }
                    };
                    self.leader(event);
                }
            } else if !self.sockets_close() {
                return;
            }
        }
    }

    /// Tells each side once that the other's process is gone, after all that it had sent.
    fn sockets_close(&mut self) -> bool {
        let mut told = false;
        let leader_gone = self.outcome.is_some() || !self.leader_alive;
        let relays = self.relay.is_some();
        for r in self.numbers() {
            let upstream_gone = if relays && r != 1 {
                let one = &self.ranks[&1];
                !one.alive || one.outcome.is_some()
            } else {
                leader_gone
            };
            let rank = self.rank(r);
            let gone = !rank.alive || rank.outcome.is_some();
            let how = || "its socket closed".to_string();
            if gone && !rank.gone_told {
                rank.gone_told = true;
                told = true;
                if relays && r != 1 {
                    self.relay(mesh_leader::Event::Gone { rank: r, how: how() });
                } else {
                    self.leader(leader::Event::Gone { rank: r, how: how() });
                }
            }
            let rank = self.rank(r);
            if rank.alive && !rank.frozen && rank.outcome.is_none() && upstream_gone {
                told = true;
                if relays && r == 1 {
                    self.relay(mesh_leader::Event::LeaderGone(how()));
                    // What it says last arrives before its own sockets close.
                    return self.rank(1).outcome.is_some();
                } else {
                    self.worker(r, worker::Event::LeaderGone(how()));
                    if self.rank(r).outcome.is_none() {
                        return false;
                    }
                }
            }
        }
        told
    }

    fn carry(&mut self, way: Way, origin: u32, message: Message) {
        let n = self.carried;
        self.carried += 1;
        if let Some(event) = self.inject.remove(&n) {
            self.leader(event);
        }
        if self.launcher_gone_at == Some(n) {
            self.leader(leader::Event::LauncherGone);
            self.relay(mesh_leader::Event::LauncherGone);
            for r in self.numbers() {
                self.worker(r, worker::Event::LauncherGone);
            }
        }
        if let Some((at, rank)) = self.kill
            && at == n
        {
            match self.ranks.get_mut(&rank) {
                Some(rank) => rank.alive = false,
                None => self.leader_alive = false,
            }
        }
        if let Some((at, rank)) = self.freeze
            && at == n
        {
            self.rank(rank).frozen = true;
        }
        for message in (self.tamper)(way, n, message) {
            let frame = encode(origin, &message).expect("within limits");
            let (origin, message) = decode(&frame).expect("reads");
            if self.keep_trace {
                self.trace.push((way, message.clone()));
            }
            match way {
                Way::To(1) if self.relay.is_some() => self.relay(mesh_leader::Event::Down(message)),
                Way::To(r) => self.worker(r, worker::Event::Message(message)),
                Way::From(r) if self.relay.is_some() && r != 1 => {
                    self.relay(mesh_leader::Event::Up { origin, message });
                }
                Way::From(_) | Way::Relay(_) => {
                    self.leader(leader::Event::Message { rank: origin, message });
                }
            }
        }
    }

    fn leader(&mut self, event: leader::Event) {
        if self.outcome.is_some() || !self.leader_alive || self.leader_frozen {
            return;
        }
        for action in self.leader.step(self.now_ns, event) {
            match action {
                leader::Action::Broadcast(m) => {
                    let to = if self.relay.is_some() { vec![1] } else { self.numbers() };
                    for r in to {
                        self.wire.push_back((Way::To(r), 0, m.clone()));
                    }
                }
                leader::Action::MakeContext { chunk, previous, opens_scene } => {
                    self.scenes.push((chunk, opens_scene));
                    let tensor = context(&previous);
                    self.leader(leader::Event::Context { chunk, tensor });
                }
                leader::Action::Deliver { chunk, epoch, latents } => {
                    self.undelivered.push_back((chunk, epoch, latents));
                    self.most_undelivered = self.most_undelivered.max(self.undelivered.len());
                }
                leader::Action::Fence { epoch } => {
                    self.fence = epoch;
                    self.cut_taken = Some(self.delivered.len());
                }
                leader::Action::Dropped { request, chunk, epoch, .. } => {
                    self.dropped.push((request, chunk, epoch));
                }
                leader::Action::Lost { call_id, ready, done, .. } => self.lost.push((call_id, ready, done)),
                leader::Action::Record(record) if record.request.is_some() => self.records.push(*record),
                leader::Action::Record(record) => self.controls.push(*record),
                leader::Action::Note(note) => self.notes.push(note),
                leader::Action::Report(_) => {}
                leader::Action::Exit(outcome) => self.outcome = Some(outcome),
            }
        }
    }

    /// An event of the mesh leader beside rank 1's worker.
    fn relay(&mut self, event: mesh_leader::Event) {
        if self.relay.is_none() || !self.ranks.get(&1).is_some_and(|r| r.alive && !r.frozen) {
            return;
        }
        let (origin, message) = match &event {
            mesh_leader::Event::Down(m) => (0, Some(m.clone())),
            mesh_leader::Event::Up { origin, message } => (*origin, Some(message.clone())),
            _ => (1, None),
        };
        let now_ns = self.now_ns;
        let actions = self.relay.as_mut().map(|m| m.step(now_ns, event)).unwrap_or_default();
        for action in actions {
            match (action, &message) {
                (mesh_leader::Action::ForwardDown, Some(m)) => self.down(origin, m),
                (mesh_leader::Action::ForwardUp, Some(m)) => {
                    let way = if origin == 1 { Way::From(1) } else { Way::Relay(origin) };
                    self.wire.push_back((way, origin, m.clone()));
                }
                (mesh_leader::Action::Down(m), _) => self.down(1, &m),
                (mesh_leader::Action::Up(m), _) => self.wire.push_back((Way::From(1), 1, m)),
                (mesh_leader::Action::Exit(outcome), _) => self.rank(1).outcome = Some(outcome),
                (action, None) => panic!("{action:?} without a frame"),
            }
        }
    }

    fn down(&mut self, origin: u32, m: &Message) {
        for r in self.numbers().into_iter().filter(|r| *r != 1) {
            self.wire.push_back((Way::To(r), origin, m.clone()));
        }
        self.worker(1, worker::Event::Message(m.clone()));
    }

    fn worker(&mut self, r: u32, event: worker::Event) {
        let rank = self.ranks.get_mut(&r).expect("a rank of the mesh");
        if !rank.alive || rank.frozen || rank.outcome.is_some() {
            return;
        }
        let relayed = r == 1 && self.relay.is_some();
        for action in rank.machine.step(self.now_ns, event) {
            let rank = self.ranks.get_mut(&r).expect("a rank of the mesh");
            match action {
                worker::Action::Send(message) if relayed => {
                    self.relay(mesh_leader::Event::Up { origin: 1, message });
                }
                worker::Action::Send(m) => self.wire.push_back((Way::From(r), r, m)),
                worker::Action::Run(mut call) => {
                    *rank.runs.entry(call.call_id).or_insert(0) += 1;
                    if self.stuck.contains(&(r, call.call_id)) {
                        continue;
                    }
                    if self.frozen.contains(&(r, call.call_id)) {
                        rank.frozen = true;
                        continue;
                    }
                    (self.meddle)(r, &mut call, &mut rank.cache);
                    match self.slow.get(&(r, call.call_id)) {
                        Some((ticks, every)) => {
                            let (ticks, every) = (*ticks, *every);
                            self.later.push(Later { rank: r, call, passed: 0, ticks, every });
                        }
                        None => self.execute(r, &call),
                    }
                }
                worker::Action::AbortEngine => {}
                // The process of a mesh leader ends when the relay does.
                worker::Action::Exit(_) if relayed => {}
                worker::Action::Exit(outcome) => rank.outcome = Some(outcome),
            }
        }
    }

    fn execute(&mut self, r: u32, call: &ReadyCall) {
        let rank = self.ranks.get_mut(&r).expect("a rank of the mesh");
        let (engine, cache) = (&mut rank.engine, &mut rank.cache);
        let outcome = run_call(engine, call, &census(), cache, &self.tripwires, &|_| {});
        self.ended.push_back((r, outcome));
    }
}
