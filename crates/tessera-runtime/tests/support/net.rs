//! Leader and ranks in one thread, joined by queues, on a clock that only the test moves.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tessera_runtime::cache::{Cache, Regime};
use tessera_runtime::decide::ChunkRequest;
use tessera_runtime::engine::{CallReport, EngineFault, ReadyCall, run_call};
use tessera_runtime::leader::{self, CallRecord, Leader, LeaderConfig};
use tessera_runtime::wire::{Message, Tensor, decode, encode};
use tessera_runtime::worker::{self, Worker, WorkerConfig};
use tessera_runtime::{Failure, Parity};

use super::{Bug, FakeEngine, census, context, leader_config, stream, text, worker_config};

/// What a test may do to a message on its way: nothing, change it, drop it, or send it more than once.
pub type Tamper = Box<dyn FnMut(Way, u64, Message) -> Vec<Message>>;
/// What a test may do to a committed call before a rank's engine receives it.
pub type Meddle = Box<dyn FnMut(u32, &mut ReadyCall, &mut Cache)>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    To(u32),
    From(u32),
}

pub struct Request {
    pub request: ChunkRequest,
    pub text: Option<Tensor>,
}

pub struct Net {
    pub regime: Regime,
    pub leader: Leader,
    pub ranks: Vec<Rank>,
    pub requests: VecDeque<Request>,
    pub tamper: Tamper,
    pub meddle: Meddle,
    /// Ranks whose process dies just before this message (counted over all) is carried.
    pub kill: Option<(u64, u32)>,
    /// A stop, or the launcher's end, just before this message is carried.
    pub stop_at: Option<u64>,
    pub launcher_gone_at: Option<u64>,
    /// Ranks whose engine never returns from this call.
    pub stuck: BTreeSet<(u32, u64)>,
    /// Ranks that stop being scheduled once they run this call.
    pub frozen: BTreeSet<(u32, u64)>,
    pub deliver: bool,
    pub now_ns: u64,
    pub carried: u64,
    pub outcome: Option<Option<Failure>>,
    pub delivered: Vec<(u32, Tensor)>,
    pub records: Vec<CallRecord>,
    pub trace: Vec<(Way, Message)>,
    pub most_undelivered: usize,
    undelivered: VecDeque<(u32, Tensor)>,
    wire: VecDeque<(Way, Message)>,
    ended: VecDeque<(u32, Result<CallReport, EngineFault>)>,
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

pub const FIRST: ChunkRequest = ChunkRequest { prompt_change: true, seed: 7, cut: false };
pub const NEXT: ChunkRequest = ChunkRequest { prompt_change: false, seed: 7, cut: false };

impl Net {
    pub fn new(ranks: u32, regime: Regime, chunks: u32) -> Net {
        Net::with(leader_config(ranks, regime), regime, chunks, |r| worker_config(r, regime))
    }

    pub fn with(
        config: LeaderConfig,
        regime: Regime,
        chunks: u32,
        worker: impl Fn(u32) -> WorkerConfig,
    ) -> Net {
        let ranks = config.ranks.len() as u32;
        let requests = (0..chunks)
            .map(|k| match k {
                0 => Request { request: FIRST, text: Some(text(1)) },
                _ => Request { request: NEXT, text: None },
            })
            .collect();
        Net {
            regime,
            leader: Leader::new(config).expect("legal"),
            ranks: (0..ranks)
                .map(|r| Rank {
                    machine: Worker::new(worker(r)).expect("legal"),
                    engine: FakeEngine::new(Bug::None),
                    cache: Cache::new(stream(regime).cache).expect("legal"),
                    alive: true,
                    frozen: false,
                    outcome: None,
                    runs: BTreeMap::new(),
                    gone_told: false,
                })
                .collect(),
            requests,
            tamper: Box::new(|_, _, m| vec![m]),
            meddle: Box::new(|_, _, _| {}),
            kill: None,
            stop_at: None,
            launcher_gone_at: None,
            stuck: BTreeSet::new(),
            frozen: BTreeSet::new(),
            deliver: true,
            now_ns: 0,
            carried: 0,
            outcome: None,
            delivered: Vec::new(),
            records: Vec::new(),
            trace: Vec::new(),
            most_undelivered: 0,
            undelivered: VecDeque::new(),
            wire: VecDeque::new(),
            ended: VecDeque::new(),
        }
    }

    /// Runs until everybody has ended, or `limit_s` of the clock have passed.
    pub fn run(&mut self, limit_s: u64) -> Option<Failure> {
        self.leader(leader::Event::Tick);
        for r in 0..self.ranks.len() {
            self.rank(r as u32, worker::Event::EngineReady(Parity::default()));
        }
        self.go_on(limit_s)
    }

    /// Goes on with a run that the test had interrupted.
    pub fn go_on(&mut self, limit_s: u64) -> Option<Failure> {
        while self.now_ns < limit_s * 1_000_000_000 {
            self.settle();
            if self.outcome.is_some()
                && self.ranks.iter().all(|r| !r.alive || r.frozen || r.outcome.is_some())
            {
                return self.outcome.clone().flatten();
            }
            self.now_ns += 100_000_000;
            self.leader(leader::Event::Tick);
            for r in 0..self.ranks.len() {
                if !self.ranks[r].frozen {
                    let mark = u64::from(self.ranks[r].engine.phases_run) << 32;
                    self.rank(r as u32, worker::Event::Tick { mark });
                }
            }
        }
        let left: Vec<_> = (0..self.ranks.len())
            .filter(|r| self.ranks[*r].alive && self.ranks[*r].outcome.is_none())
            .collect();
        panic!("blocked after {limit_s} s: ranks {left:?}, leader {:?}", self.outcome);
    }

    /// The outcome of a run in which every rank must have ended cleanly.
    pub fn run_clean(&mut self) {
        let failure = self.run(60);
        assert_eq!(failure, None);
        for r in &self.ranks {
            assert_eq!(r.outcome, Some(None));
        }
    }

    fn settle(&mut self) {
        loop {
            while self.leader.wants() > 0 && self.outcome.is_none() {
                let event = match self.requests.pop_front() {
                    Some(Request { request, text }) => leader::Event::Request { request, text },
                    None => leader::Event::NoMoreRequests,
                };
                self.leader(event);
            }
            if let Some((way, message)) = self.wire.pop_front() {
                self.carry(way, message);
            } else if let Some((rank, outcome)) = self.ended.pop_front() {
                self.rank(rank, worker::Event::CallEnded(outcome));
            } else if self.deliver && !self.undelivered.is_empty() {
                if let Some((chunk, latents)) = self.undelivered.pop_front() {
                    self.delivered.push((chunk, latents));
                    self.leader(leader::Event::Delivered { chunk, frames: 12 });
                }
            } else if !self.sockets_close() {
                return;
            }
        }
    }

    /// Tells each side once that the other's process is gone, after all that it had sent.
    fn sockets_close(&mut self) -> bool {
        let mut told = false;
        for r in 0..self.ranks.len() {
            let gone = !self.ranks[r].alive || self.ranks[r].outcome.is_some();
            if gone && !self.ranks[r].gone_told {
                self.ranks[r].gone_told = true;
                told = true;
                self.leader(leader::Event::Gone { rank: r as u32, how: "its socket closed".into() });
            }
            if !gone && !self.ranks[r].frozen && self.outcome.is_some() {
                told = true;
                self.rank(r as u32, worker::Event::LeaderGone("its socket closed".into()));
            }
        }
        told
    }

    fn carry(&mut self, way: Way, message: Message) {
        let n = self.carried;
        self.carried += 1;
        if self.stop_at == Some(n) {
            self.leader(leader::Event::Stop);
        }
        if self.launcher_gone_at == Some(n) {
            self.leader(leader::Event::LauncherGone);
            for r in 0..self.ranks.len() {
                self.rank(r as u32, worker::Event::LauncherGone);
            }
        }
        if let Some((at, rank)) = self.kill
            && at == n
        {
            self.ranks[rank as usize].alive = false;
        }
        for message in (self.tamper)(way, n, message) {
            let frame = encode(&message).expect("within limits");
            let message = decode(&frame).expect("reads");
            self.trace.push((way, message.clone()));
            match way {
                Way::To(r) => self.rank(r, worker::Event::Message(message)),
                Way::From(rank) => self.leader(leader::Event::Message { rank, message }),
            }
        }
    }

    fn leader(&mut self, event: leader::Event) {
        if self.outcome.is_some() {
            return;
        }
        for action in self.leader.step(self.now_ns, event) {
            match action {
                leader::Action::Broadcast(m) => {
                    for r in 0..self.ranks.len() as u32 {
                        self.wire.push_back((Way::To(r), m.clone()));
                    }
                }
                leader::Action::MakeContext { chunk, previous } => {
                    let tensor = context(&previous);
                    self.leader(leader::Event::Context { chunk, tensor });
                }
                leader::Action::Deliver { chunk, latents } => {
                    self.undelivered.push_back((chunk, latents));
                    self.most_undelivered = self.most_undelivered.max(self.undelivered.len());
                }
                leader::Action::Record(record) => self.records.push(*record),
                leader::Action::Note(_) | leader::Action::Report(_) => {}
                leader::Action::Exit(outcome) => self.outcome = Some(outcome),
            }
        }
    }

    fn rank(&mut self, r: u32, event: worker::Event) {
        let rank = &mut self.ranks[r as usize];
        if !rank.alive || rank.frozen {
            return;
        }
        for action in rank.machine.step(self.now_ns, event) {
            match action {
                worker::Action::Send(m) => self.wire.push_back((Way::From(r), m)),
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
                    let outcome = run_call(&mut rank.engine, &call, &census(), &mut rank.cache, &|_| {});
                    self.ended.push_back((r, outcome));
                }
                worker::Action::AbortEngine => {}
                worker::Action::Exit(outcome) => rank.outcome = Some(outcome),
            }
        }
    }
}
