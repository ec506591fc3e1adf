//! Leader and ranks in one thread, connected by queues, on a clock that only the test advances.
//! With the placement `Pp` the leader is outside the mesh, and rank 1 relays through a mesh leader.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tessera_runtime::call_state::{CallState, CallStateSpec};
use tessera_runtime::director::{ChunkRequest, SceneCut};
use tessera_runtime::engine::{CallReport, Delivery, Engine, EngineFault, MediaJob, ReadyCall, run_call};
use tessera_runtime::kv_cache::CacheRegime;
use tessera_runtime::leader::{self, CallRecord, Leader, LeaderConfig, RecordEntry};
use tessera_runtime::mesh_leader::{self, MeshLeader};
use tessera_runtime::wire::{Message, Tensor, decode, encode};
use tessera_runtime::worker::{self, Worker, WorkerConfig};
use tessera_runtime::{Failure, Parity, Tripwires};

use super::{
    Bug, FakeEngine, LeaderPlacement, context_tensor, leader_config, mesh_leader_config, prompt_tensor,
    test_programs, test_stream, worker_config,
};

/// A test's manipulation of a message on its way: pass, change, drop or repeat it.
pub type Tamper = Box<dyn FnMut(Hop, u64, Message) -> Vec<Message>>;
/// A test's manipulation of a committed call before a rank's engine receives it.
pub type AlterCall = Box<dyn FnMut(u32, &mut ReadyCall, &mut CallState)>;

/// A hop of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hop {
    /// To a rank, over its own control link.
    To(u32),
    /// From a rank, over its own control link.
    From(u32),
    /// From a member, relayed by the mesh leader to the leader.
    Relay(u32),
}

pub struct Request {
    pub request: ChunkRequest,
    pub text: Option<Tensor>,
}

pub struct Net {
    pub regime: CacheRegime,
    pub leader: Leader,
    pub relay: Option<MeshLeader>,
    pub ranks: BTreeMap<u32, Rank>,
    pub requests: VecDeque<Request>,
    pub tamper: Tamper,
    pub alter_call: AlterCall,
    /// A rank whose process dies just before this message (counted over all messages) is carried; 0
    /// is a leader outside the mesh.
    pub kill: Option<(u64, u32)>,
    /// A rank that is no longer scheduled from just before this message on.
    pub freeze: Option<(u64, u32)>,
    /// Events for the leader just before these messages are carried.
    pub inject: BTreeMap<u64, leader::Event>,
    /// The message before which the launcher ends.
    pub launcher_gone_at: Option<u64>,
    /// Ranks whose engine never returns from this call.
    pub stuck: BTreeSet<(u32, u64)>,
    /// Calls of a rank that take this number of ticks, with progress every so many ticks: (ticks,
    /// interval).
    pub slow: BTreeMap<(u32, u64), (u32, u32)>,
    /// Ranks that are no longer scheduled once they run this call.
    pub frozen: BTreeSet<(u32, u64)>,
    pub leader_alive: bool,
    pub leader_frozen: bool,
    pub deliver: bool,
    pub tripwires: Tripwires,
    pub now_ns: u64,
    pub carried: u64,
    pub outcome: Option<Option<Failure>>,
    pub delivered: Vec<(u32, Tensor)>,
    /// Finished calls with a chunk.
    pub records: Vec<CallRecord>,
    pub controls: Vec<CallRecord>,
    pub dropped: Vec<(u64, Option<u32>, u32)>,
    pub lost: Vec<(u64, Vec<u32>, Vec<u32>)>,
    pub notes: Vec<String>,
    /// Settings and armed tripwires of each rank's start-up report.
    pub startups: BTreeMap<u32, (Parity, Vec<&'static str>)>,
    pub scenes: Vec<(u32, bool)>,
    pub trace: Vec<(Hop, Message)>,
    pub max_undelivered: usize,
    /// Number of delivered chunks when the last flush took effect.
    pub delivered_at_cut: Option<usize>,
    /// Whether requests come from `inject` alone.
    pub hold_requests: bool,
    pub keep_trace: bool,
    min_epoch: u32,
    undelivered: VecDeque<(u32, u32, Tensor)>,
    wire: VecDeque<(Hop, u32, Message)>,
    delayed: Vec<DelayedCall>,
    finished_calls: VecDeque<(u32, Result<CallReport, EngineFault>)>,
}

/// A call that takes several ticks.
struct DelayedCall {
    rank: u32,
    call: Box<ReadyCall>,
    passed: u32,
    ticks: u32,
    every: u32,
}

pub struct Rank {
    pub machine: Worker,
    pub engine: FakeEngine,
    pub state: CallState,
    pub alive: bool,
    pub frozen: bool,
    pub outcome: Option<Option<Failure>>,
    pub runs: BTreeMap<u64, u32>,
    gone_reported: bool,
}

pub const FIRST: ChunkRequest = ChunkRequest { prompt_change: true, ..NEXT };
pub const NEXT: ChunkRequest =
    ChunkRequest { prompt_change: false, seed: 7, cut: SceneCut::None, step_list: 0, bias: None };

impl Net {
    pub fn new(ranks: u32, regime: CacheRegime, chunks: u32) -> Net {
        Net::with_placement(LeaderPlacement::InMesh, ranks, regime, chunks)
    }

    pub fn with_placement(shape: LeaderPlacement, ranks: u32, regime: CacheRegime, chunks: u32) -> Net {
        Net::with_configs(shape, leader_config(shape, ranks, regime), regime, chunks, |r| {
            worker_config(shape, r, regime)
        })
    }

    pub fn with_configs(
        shape: LeaderPlacement,
        config: LeaderConfig,
        regime: CacheRegime,
        chunks: u32,
        worker: impl Fn(u32) -> WorkerConfig,
    ) -> Net {
        let numbers = config.ranks.clone();
        let tripwires = config.tripwires.clone();
        let requests = (0..chunks)
            .map(|k| match k {
                0 => Request { request: FIRST, text: Some(prompt_tensor(1)) },
                _ => Request { request: NEXT, text: None },
            })
            .collect();
        let relay = (shape == LeaderPlacement::Outside).then(|| {
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
                        engine: FakeEngine::for_rank(r, Bug::None),
                        state: CallState::new(CallStateSpec::Video(test_stream(regime).cache))
                            .expect("legal"),
                        alive: true,
                        frozen: false,
                        outcome: None,
                        runs: BTreeMap::new(),
                        gone_reported: false,
                    };
                    (r, rank)
                })
                .collect(),
            requests,
            tamper: Box::new(|_, _, m| vec![m]),
            alter_call: Box::new(|_, _, _| {}),
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
            startups: BTreeMap::new(),
            scenes: Vec::new(),
            trace: Vec::new(),
            max_undelivered: 0,
            delivered_at_cut: None,
            hold_requests: false,
            keep_trace: true,
            min_epoch: 0,
            undelivered: VecDeque::new(),
            wire: VecDeque::new(),
            delayed: Vec::new(),
            finished_calls: VecDeque::new(),
        }
    }

    pub fn rank(&mut self, r: u32) -> &mut Rank {
        self.ranks.get_mut(&r).expect("a rank of the mesh")
    }

    fn rank_numbers(&self) -> Vec<u32> {
        self.ranks.keys().copied().collect()
    }

    /// Runs until every process has ended. Panics if one remains after `limit_s` seconds of
    /// simulated time.
    pub fn run(&mut self, limit_s: u64) -> Option<Failure> {
        self.run_for(limit_s).unwrap_or_else(|| self.blocked())
    }

    /// Runs until every process has ended; returns `None` if one remains after `limit_s` seconds of
    /// simulated time.
    pub fn run_for(&mut self, limit_s: u64) -> Option<Option<Failure>> {
        self.step_leader(leader::Event::Tick);
        for r in self.rank_numbers() {
            let fingerprints = self.rank(r).engine.weight_fingerprints();
            self.step_worker(r, worker::Event::EngineReady { parity: Parity::default(), fingerprints });
        }
        self.advance(limit_s)
    }

    /// Continues a run that the test had interrupted.
    pub fn resume(&mut self, limit_s: u64) -> Option<Failure> {
        self.advance(limit_s).unwrap_or_else(|| self.blocked())
    }

    /// Begins or continues a run until this many seconds of simulated time; returns `None` if a
    /// process remains.
    pub fn run_until(&mut self, until_s: u64) -> Option<Option<Failure>> {
        if self.now_ns == 0 { self.run_for(until_s) } else { self.advance(until_s) }
    }

    fn blocked(&self) -> ! {
        let left: Vec<_> =
            self.ranks.iter().filter(|(_, r)| r.alive && r.outcome.is_none()).map(|(r, _)| r).collect();
        panic!("blocked after {} ns: ranks {left:?}, leader {:?}", self.now_ns, self.outcome);
    }

    fn advance(&mut self, limit_s: u64) -> Option<Option<Failure>> {
        while self.now_ns < limit_s * 1_000_000_000 {
            self.process_messages();
            if (self.outcome.is_some() || !self.leader_alive || self.leader_frozen)
                && self.ranks.values().all(|r| !r.alive || r.frozen || r.outcome.is_some())
            {
                return Some(self.outcome.clone().flatten());
            }
            self.now_ns += 50_000_000;
            self.step_leader(leader::Event::Tick);
            self.step_relay(mesh_leader::Event::Tick);
            for r in self.rank_numbers() {
                let slow = self.delayed.iter().find(|l| l.rank == r);
                let mark = match slow {
                    Some(l) => 1 << 32 | u64::from(l.passed / l.every),
                    None => u64::from(self.rank(r).engine.phases_run) << 32,
                };
                self.step_worker(r, worker::Event::Tick { progress: mark });
            }
            for mut l in std::mem::take(&mut self.delayed) {
                l.passed += 1;
                if l.passed < l.ticks { self.delayed.push(l) } else { self.execute_call(l.rank, &l.call) }
            }
        }
        None
    }

    /// Runs and asserts that every rank ends cleanly.
    pub fn run_clean(&mut self) {
        let failure = self.run(60);
        assert_eq!(failure, None);
        for r in self.ranks.values() {
            assert_eq!(r.outcome, Some(None));
        }
    }

    fn process_messages(&mut self) {
        loop {
            while !self.hold_requests
                && self.leader.request_capacity() > 0
                && self.outcome.is_none()
                && self.leader_alive
            {
                let event = match self.requests.pop_front() {
                    Some(Request { request, text }) => {
                        leader::Event::Request { request, text, start: leader::ChunkStart::Drawn }
                    }
                    None => leader::Event::NoMoreRequests,
                };
                self.step_leader(event);
            }
            if let Some((way, origin, message)) = self.wire.pop_front() {
                self.carry_message(way, origin, message);
            } else if let Some((rank, outcome)) = self.finished_calls.pop_front() {
                self.step_worker(rank, worker::Event::CallEnded(Box::new(outcome)));
            } else if self.deliver && !self.undelivered.is_empty() {
                if let Some((chunk, epoch, latents)) = self.undelivered.pop_front() {
                    let event = if epoch < self.min_epoch {
                        leader::Event::Discarded { chunk }
                    } else {
                        self.delivered.push((chunk, latents));
                        leader::Event::Delivered { chunk, delivery: Delivery::from_frames(12) }
                    };
                    self.step_leader(event);
                }
            } else if !self.report_closed_sockets() {
                return;
            }
        }
    }

    /// Tells each side once that the other's process has ended, after its messages have arrived.
    fn report_closed_sockets(&mut self) -> bool {
        let mut any_reported = false;
        let leader_gone = self.outcome.is_some() || !self.leader_alive;
        let relays = self.relay.is_some();
        for r in self.rank_numbers() {
            let upstream_gone = if relays && r != 1 {
                let one = &self.ranks[&1];
                !one.alive || one.outcome.is_some()
            } else {
                leader_gone
            };
            let rank = self.rank(r);
            let gone = !rank.alive || rank.outcome.is_some();
            let how = || "its socket closed".to_string();
            if gone && !rank.gone_reported {
                rank.gone_reported = true;
                any_reported = true;
                if relays && r != 1 {
                    self.step_relay(mesh_leader::Event::Gone { rank: r, how: how() });
                } else {
                    self.step_leader(leader::Event::Gone { rank: r, how: how() });
                }
            }
            let rank = self.rank(r);
            if rank.alive && !rank.frozen && rank.outcome.is_none() && upstream_gone {
                any_reported = true;
                if relays && r == 1 {
                    self.step_relay(mesh_leader::Event::LeaderGone(how()));
                    // Its last message arrives before its own sockets close.
                    return self.rank(1).outcome.is_some();
                } else {
                    self.step_worker(r, worker::Event::UpstreamGone(how()));
                    if self.rank(r).outcome.is_none() {
                        return false;
                    }
                }
            }
        }
        any_reported
    }

    fn carry_message(&mut self, way: Hop, origin: u32, message: Message) {
        let n = self.carried;
        self.carried += 1;
        if let Some(event) = self.inject.remove(&n) {
            self.step_leader(event);
        }
        if self.launcher_gone_at == Some(n) {
            self.step_leader(leader::Event::LauncherGone);
            self.step_relay(mesh_leader::Event::LauncherGone);
            for r in self.rank_numbers() {
                self.step_worker(r, worker::Event::LauncherGone);
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
                Hop::To(1) if self.relay.is_some() => self.step_relay(mesh_leader::Event::Down(message)),
                Hop::To(r) => self.step_worker(r, worker::Event::Message(message)),
                Hop::From(r) if self.relay.is_some() && r != 1 => {
                    self.step_relay(mesh_leader::Event::Up { origin, message });
                }
                Hop::From(_) | Hop::Relay(_) => {
                    self.step_leader(leader::Event::Message { rank: origin, message });
                }
            }
        }
    }

    fn keep_entry(&mut self, entry: RecordEntry) {
        match entry {
            RecordEntry::Dropped { request, chunk, epoch, .. } => self.dropped.push((request, chunk, epoch)),
            RecordEntry::Lost { call_id, ready, done, .. } => self.lost.push((call_id, ready, done)),
            RecordEntry::Call(record) if record.request.is_some() => self.records.push(*record),
            RecordEntry::Call(record) => self.controls.push(*record),
            RecordEntry::Note(note) => self.notes.push(note),
            RecordEntry::Startup { rank, settings, tripwires } => {
                self.startups.insert(rank, (settings, tripwires));
            }
            RecordEntry::Progress(_) | RecordEntry::Failed(_) => {}
        }
    }

    fn step_leader(&mut self, event: leader::Event) {
        if self.outcome.is_some() || !self.leader_alive || self.leader_frozen {
            return;
        }
        for action in self.leader.handle_event(self.now_ns, event) {
            match action {
                leader::Action::Broadcast(m) => {
                    let to = if self.relay.is_some() { vec![1] } else { self.rank_numbers() };
                    for r in to {
                        self.wire.push_back((Hop::To(r), 0, m.clone()));
                    }
                }
                leader::Action::Media(MediaJob::EncodePrompt(_)) => {}
                leader::Action::Media(MediaJob::Context { chunk, previous, opens_scene }) => {
                    self.scenes.push((chunk, opens_scene));
                    let tensor = context_tensor(&previous.0[0]);
                    self.step_leader(leader::Event::Context { chunk, tensor });
                }
                leader::Action::Media(MediaJob::Deliver { chunk, epoch, outputs, .. }) => {
                    self.undelivered.push_back((chunk, epoch, outputs.0[0].clone()));
                    self.max_undelivered = self.max_undelivered.max(self.undelivered.len());
                }
                leader::Action::SetMinEpoch { epoch } => {
                    self.min_epoch = epoch;
                    self.delivered_at_cut = Some(self.delivered.len());
                }
                leader::Action::Record(entry) => self.keep_entry(entry),
                leader::Action::Report(_) => {}
                leader::Action::Exit(outcome) => self.outcome = Some(outcome),
            }
        }
    }

    /// Passes an event to the mesh leader beside rank 1's worker.
    fn step_relay(&mut self, event: mesh_leader::Event) {
        if self.relay.is_none() || !self.ranks.get(&1).is_some_and(|r| r.alive && !r.frozen) {
            return;
        }
        let (origin, message) = match &event {
            mesh_leader::Event::Down(m) => (0, Some(m.clone())),
            mesh_leader::Event::Up { origin, message } => (*origin, Some(message.clone())),
            _ => (1, None),
        };
        let now_ns = self.now_ns;
        let actions = self.relay.as_mut().map(|m| m.handle_event(now_ns, event)).unwrap_or_default();
        for action in actions {
            match (action, &message) {
                (mesh_leader::Action::ForwardDown, Some(m)) => self.forward_down(origin, m),
                (mesh_leader::Action::ForwardUp, Some(m)) => {
                    let way = if origin == 1 { Hop::From(1) } else { Hop::Relay(origin) };
                    self.wire.push_back((way, origin, m.clone()));
                }
                (mesh_leader::Action::Down(m), _) => self.forward_down(1, &m),
                (mesh_leader::Action::Up(m), _) => self.wire.push_back((Hop::From(1), 1, m)),
                (mesh_leader::Action::Exit(outcome), _) => self.rank(1).outcome = Some(outcome),
                (action, None) => panic!("{action:?} without a frame"),
            }
        }
    }

    fn forward_down(&mut self, origin: u32, m: &Message) {
        for r in self.rank_numbers().into_iter().filter(|r| *r != 1) {
            self.wire.push_back((Hop::To(r), origin, m.clone()));
        }
        self.step_worker(1, worker::Event::Message(m.clone()));
    }

    fn step_worker(&mut self, r: u32, event: worker::Event) {
        let rank = self.ranks.get_mut(&r).expect("a rank of the mesh");
        if !rank.alive || rank.frozen || rank.outcome.is_some() {
            return;
        }
        let relayed = r == 1 && self.relay.is_some();
        for action in rank.machine.handle_event(self.now_ns, event) {
            let rank = self.ranks.get_mut(&r).expect("a rank of the mesh");
            match action {
                worker::Action::Send(message) if relayed => {
                    self.step_relay(mesh_leader::Event::Up { origin: 1, message });
                }
                worker::Action::Send(m) => self.wire.push_back((Hop::From(r), r, m)),
                worker::Action::Run(mut call) => {
                    *rank.runs.entry(call.call_id).or_insert(0) += 1;
                    if self.stuck.contains(&(r, call.call_id)) {
                        continue;
                    }
                    if self.frozen.contains(&(r, call.call_id)) {
                        rank.frozen = true;
                        continue;
                    }
                    (self.alter_call)(r, &mut call, &mut rank.state);
                    match self.slow.get(&(r, call.call_id)) {
                        Some((ticks, every)) => {
                            let (ticks, every) = (*ticks, *every);
                            self.delayed.push(DelayedCall { rank: r, call, passed: 0, ticks, every });
                        }
                        None => self.execute_call(r, &call),
                    }
                }
                worker::Action::AbortEngine => {}
                // The process of a mesh leader ends when the relay ends.
                worker::Action::Exit(_) if relayed => {}
                worker::Action::Exit(outcome) => rank.outcome = Some(outcome),
            }
        }
    }

    fn execute_call(&mut self, r: u32, call: &ReadyCall) {
        let rank = self.ranks.get_mut(&r).expect("a rank of the mesh");
        let (engine, state) = (&mut rank.engine, &mut rank.state);
        let outcome = run_call(engine, call, &test_programs(), state, &self.tripwires, &|_| {});
        self.finished_calls.push_back((r, outcome));
    }
}
