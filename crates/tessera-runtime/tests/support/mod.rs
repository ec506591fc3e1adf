//! A seal of made-up programs and an engine that computes something cheap and deterministic.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod latency;
pub mod net;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tessera_runtime::cache::{CacheSpec, Regime};
use tessera_runtime::census::{ArgKind, Census, InputFacts, ProgramFacts};
use tessera_runtime::decide::{Step, StreamSpec};
use tessera_runtime::engine::{
    AbortHandle, Engine, EngineFault, PhaseReport, ProgramCount, Rehash, Reloaded,
};
use tessera_runtime::leader::LeaderConfig;
use tessera_runtime::mesh_leader::MeshLeaderConfig;
use tessera_runtime::wire::{Dtype, PhaseCall, ShardPrint, Tensor, Tensors};
use tessera_runtime::worker::WorkerConfig;
use tessera_runtime::{Digest, Limits, Parity, ParityClass, Tripwires};

pub const CHUNK: u32 = 3;
pub const SESSION: u64 = 42;

pub fn trace_of(program: &str) -> Digest {
    Digest::of(format!("trace of {program}").as_bytes())
}

pub fn collectives_of(program: &str) -> u64 {
    program.len() as u64
}

pub fn census() -> Census {
    let place = vec![("start", ArgKind::I64), ("row", ArgKind::I64), ("t", ArgKind::F32s(CHUNK))];
    let with_sigma = [&place[..], &[("sigma", ArgKind::F32)]].concat();
    let draw = vec![
        ("sigma", ArgKind::F32),
        ("seed", ArgKind::I64),
        ("chunk", ArgKind::I64),
        ("draw", ArgKind::I64),
    ];
    let mut rows: Vec<(String, Vec<(&str, ArgKind)>)> = vec![
        ("text".into(), vec![]),
        ("rebase".into(), vec![("shift", ArgKind::I64)]),
        ("recompute".into(), place.clone()),
        ("renoise".into(), draw),
        ("emit".into(), vec![]),
    ];
    for fill in [0, 3, 6] {
        rows.push((format!("denoise.fill{fill}"), with_sigma.clone()));
        rows.push((format!("clean.fill{fill}"), place.clone()));
    }
    Census::new(rows.into_iter().map(|(name, scalars)| {
        let input = match name.as_str() {
            "text" => Some(("text", vec![4, 2])),
            "recompute" => Some(("context", vec![2, 2])),
            _ => None,
        };
        let facts = ProgramFacts {
            collectives: collectives_of(&name),
            trace: trace_of(&name),
            scalars: scalars.into_iter().map(|(n, k)| (n.to_string(), k)).collect(),
            inputs: input
                .into_iter()
                .map(|(n, shape)| InputFacts { name: n.into(), dtype: Dtype::F32, shape })
                .collect(),
        };
        (name, facts)
    }))
}

pub fn stream(regime: Regime) -> StreamSpec {
    let window_frames = if regime == Regime::Resident { 9 } else { 6 };
    StreamSpec {
        cache: CacheSpec {
            regime,
            chunk_frames: CHUNK,
            window_frames,
            table_frames: 1024,
            tokens_per_frame: 10,
        },
        bias: 0.3,
        steps: vec![Step { timestep: 1000.0, sigma: 1.0 }, Step { timestep: 500.0, sigma: 0.5 }],
    }
}

pub fn plan() -> Digest {
    Digest::of(b"the sealed plan")
}

pub fn parity() -> Parity {
    Parity::default().with("backend.matmul", ParityClass::AtInit, "naive")
}

/// Where the leader is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Rank 0 leads and computes.
    Mesh,
    /// Rank 0 leads, rank 1 computes and relays, the others are its members.
    Pp,
}

impl Shape {
    /// The first rank that computes.
    pub fn first(self) -> u32 {
        u32::from(self == Shape::Pp)
    }
}

pub fn mesh_leader_config(ranks: u32, regime: Regime) -> MeshLeaderConfig {
    MeshLeaderConfig {
        rank: 1,
        members: (2..=ranks).collect(),
        plan: plan(),
        census: Arc::new(census()),
        cache: stream(regime).cache,
        limits: Limits::default(),
        tripwires: Tripwires::default(),
    }
}

pub fn leader_config(shape: Shape, ranks: u32, regime: Regime) -> LeaderConfig {
    LeaderConfig {
        ranks: (shape.first()..shape.first() + ranks).collect(),
        plan: plan(),
        session: SESSION,
        build: "test".into(),
        silent: Vec::new(),
        parity: parity(),
        census: Arc::new(census()),
        stream: stream(regime),
        limits: Limits { hello_ns: 5_000_000_000, ..Limits::default() },
        tripwires: Tripwires::default(),
    }
}

pub fn worker_config(shape: Shape, rank: u32, regime: Regime) -> WorkerConfig {
    WorkerConfig {
        rank,
        above: u32::from(shape.first() == 1 && rank > 1),
        plan: plan(),
        build: "test".into(),
        parity: parity(),
        census: Arc::new(census()),
        cache: stream(regime).cache,
        limits: Limits::default(),
        delivers: rank == shape.first(),
        tripwires: Tripwires::default(),
    }
}

pub fn text(seed: u32) -> Tensor {
    let values: Vec<f32> = (0..8).map(|i| (i * seed) as f32).collect();
    Tensor::from_f32("text", &[4, 2], &values).expect("fits")
}

pub fn context(previous: &Tensor) -> Tensor {
    let last = previous.to_f32().expect("floats");
    Tensor::from_f32("context", &[2, 2], &last[..4]).expect("fits")
}

/// What an engine should do wrong, and when: its life begins after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    None,
    /// The warm-up misses one program.
    WarmsLess,
    /// The nth phase of its life compiles something.
    CompilesAt(u32),
    /// The nth phase of its life finds weights changed.
    ForgetsAt(u32),
    /// A reload finds other weights than announced.
    ReloadsOthers,
    /// A reload loads other shards than the peers.
    ReloadsOtherShards,
    /// The nth phase of its life fails.
    FailAt(u32),
    /// The nth phase of its life panics.
    PanicAt(u32),
    /// The nth phase of its life never returns.
    HangAt(u32),
    /// The nth phase of its life issues one collective more.
    ExtraCollective(u32),
    /// The nth phase of its life follows another trace.
    OtherTrace(u32),
    /// The nth phase of its life computes something else.
    OtherNumbers(u32),
    /// The nth phase of its life is told that another rank aborted.
    EchoAt(u32),
}

/// Folds everything it is given into a few floats; equal on every rank when every rank gets the same.
pub struct FakeEngine {
    pub bug: Bug,
    pub phase_ns: u64,
    pub sleep: std::time::Duration,
    pub phases_run: u32,
    pub prints: Vec<ShardPrint>,
    count: ProgramCount,
    ran: std::collections::BTreeSet<String>,
    warm: bool,
    changed: bool,
    state: Vec<u8>,
    aborted: Arc<AtomicBool>,
}

/// Digest of the weights that a reload from `source` loads.
pub fn weights_at(source: &str) -> Digest {
    Digest::of(source.as_bytes())
}

impl FakeEngine {
    /// Holds a shard of its own and what all hold.
    pub fn of_rank(rank: u32, bug: Bug) -> FakeEngine {
        let print = |tensor: &str, slice: String, of: &str| ShardPrint {
            tensor: tensor.into(),
            digest: Digest::of(of.as_bytes()),
            slice,
            constant: false,
        };
        let own = print("ffn", format!("[{rank}]"), &format!("shard {rank}"));
        FakeEngine { prints: vec![own, print("norm", "all".into(), "norm")], ..FakeEngine::new(bug) }
    }

    pub fn new(bug: Bug) -> FakeEngine {
        FakeEngine {
            bug,
            phase_ns: 1_000_000,
            sleep: std::time::Duration::ZERO,
            phases_run: 0,
            prints: Vec::new(),
            count: ProgramCount::default(),
            ran: std::collections::BTreeSet::new(),
            warm: false,
            changed: false,
            state: Vec::new(),
            aborted: Arc::new(AtomicBool::new(false)),
        }
    }
}

impl Engine for FakeEngine {
    fn run(
        &mut self,
        phase: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        let n = if self.warm { self.phases_run } else { u32::MAX };
        self.phases_run += 1;
        if self.ran.insert(phase.program.clone()) {
            let warmed = &mut self.count.warmed;
            *if self.warm { &mut self.count.new_since_warmup } else { warmed } += 1;
        }
        progress(1);
        std::thread::sleep(self.sleep);
        let mut report = PhaseReport {
            ns: self.phase_ns,
            collectives: collectives_of(&phase.program),
            compensated: 0,
            trace: trace_of(&phase.program),
        };
        let mut bytes = std::mem::take(&mut self.state);
        bytes.extend(format!("{phase:?}").bytes());
        let read = match phase.program.as_str() {
            "text" => inputs.get("text"),
            "recompute" => inputs.get("context"),
            _ => None,
        };
        bytes.extend(read.iter().flat_map(|t| t.data()));
        match self.bug {
            Bug::FailAt(k) if k == n => return Err(EngineFault::failed("out of memory")),
            Bug::PanicAt(k) if k == n => panic!("index out of bounds"),
            Bug::EchoAt(k) if k == n => return Err(EngineFault::aborted("aborted by a peer")),
            Bug::HangAt(k) if k == n => {
                while !self.aborted.load(Ordering::Relaxed) {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                return Err(EngineFault::aborted("aborted while hanging"));
            }
            Bug::ExtraCollective(k) if k == n => report.collectives += 1,
            Bug::OtherTrace(k) if k == n => report.trace = Digest::of(b"another branch"),
            Bug::OtherNumbers(k) if k == n => bytes.push(1),
            Bug::CompilesAt(k) if k == n => self.count.new_since_warmup += 1,
            Bug::ForgetsAt(k) if k == n => self.changed = true,
            _ => {}
        }
        self.state = Digest::of(&bytes).0.to_vec();
        Ok(report)
    }

    fn reset(&mut self) {
        self.state.clear();
    }

    fn output(&mut self) -> Result<Option<Tensor>, EngineFault> {
        let values: Vec<f32> = self.state.iter().map(|b| f32::from(*b)).collect();
        Ok(Some(Tensor::from_f32("output", &[values.len() as u64], &values).expect("fits")))
    }

    fn fingerprints(&self) -> Vec<ShardPrint> {
        self.prints.clone()
    }

    fn programs(&self) -> ProgramCount {
        let less = u32::from(self.bug == Bug::WarmsLess);
        ProgramCount { warmed: self.count.warmed - less, ..self.count }
    }

    fn warmed(&mut self) {
        self.warm = true;
        self.phases_run = 0;
    }

    fn rehash(&mut self) -> Option<Rehash> {
        let (loaded, changed) = (Digest::of(b"loaded"), Digest::of(b"changed"));
        let now = if self.changed { changed } else { loaded };
        Some(Rehash { what: "`ffn` [0]".into(), loaded, now })
    }

    fn reload(&mut self, source: &str) -> Result<Reloaded, EngineFault> {
        let other = if self.bug == Bug::ReloadsOthers { "elsewhere" } else { source };
        for p in &mut self.prints {
            p.digest = Digest::of(format!("{} {} of {other}", p.tensor, p.slice).as_bytes());
        }
        if self.bug == Bug::ReloadsOtherShards {
            self.prints[1].digest = Digest::of(b"stale");
        }
        Ok(Reloaded { weights: weights_at(other), fingerprints: self.prints.clone() })
    }

    fn abort_handle(&self) -> AbortHandle {
        let aborted = Arc::clone(&self.aborted);
        Arc::new(move || aborted.store(true, Ordering::Relaxed))
    }
}
