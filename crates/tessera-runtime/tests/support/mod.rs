//! A synthetic plan, and an engine whose computation is cheap and deterministic.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod latency;
pub mod net;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tessera_runtime::call_state::SessionSpec;
use tessera_runtime::director::{DenoiseStep, StepList, StreamSpec};
use tessera_runtime::engine::{
    AbortHandle, CacheFault, Engine, EngineFault, PhaseReport, ProgramCount, ReadyCall, RehashResult,
    ReloadedWeights,
};
use tessera_runtime::kv_cache::{CacheRegime, CacheSpec};
use tessera_runtime::leader::LeaderConfig;
use tessera_runtime::mesh_leader::MeshLeaderConfig;
use tessera_runtime::program_index::{ArgKind, InputSpec, ProgramIndex, ProgramInfo};
use tessera_runtime::wire::{Dtype, MAX_TENSORS, PhaseCall, ShardFingerprint, Tensor, Tensors};
use tessera_runtime::worker::WorkerConfig;
use tessera_runtime::{Digest, Limits, Parity, ParityClass, Tripwires};

pub const CHUNK: u32 = 3;
pub const SESSION: u64 = 42;

pub fn trace_of(program: &str) -> Digest {
    Digest::hash_bytes(format!("trace of {program}").as_bytes())
}

pub fn collectives_of(program: &str) -> u64 {
    program.len() as u64
}

pub fn test_programs() -> ProgramIndex {
    list_programs(&[])
}

/// The programs of a plan whose calls carry the noise of the first step.
pub fn test_programs_with_noise() -> ProgramIndex {
    list_programs(&["noise"])
}

/// The programs of a plan whose calls may begin with an input video.
pub fn test_programs_with_video() -> ProgramIndex {
    list_programs(&["video"])
}

/// The programs of a plan that writes the cached chunks again when the prompt changes.
pub fn test_programs_with_recache() -> ProgramIndex {
    list_programs(&["recall.back1", "recall.back2", "recall.back3"])
}

fn list_programs(more: &[&str]) -> ProgramIndex {
    let place = vec![("start", ArgKind::I64), ("row", ArgKind::I64), ("t", ArgKind::F32s(CHUNK))];
    let of_a_step = [&place[..], &[("sigma", ArgKind::F32), ("bias", ArgKind::F32)]].concat();
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
    rows.extend(more.iter().map(|name| ((*name).to_string(), vec![])));
    for fill in [0, 3, 6] {
        rows.push((format!("denoise.fill{fill}"), of_a_step.clone()));
        rows.push((format!("clean.fill{fill}"), place.clone()));
    }
    ProgramIndex::new(rows.into_iter().map(|(name, scalars)| {
        let input = match name.as_str() {
            "text" => Some(("text", vec![4, 2])),
            "recompute" => Some(("context", vec![2, 2])),
            "noise" => Some(("noise", vec![2, 2])),
            "video" => Some(("video", vec![2, 2])),
            _ => None,
        };
        let facts = ProgramInfo {
            collectives: collectives_of(&name),
            trace: trace_of(&name),
            scalars: scalars.into_iter().map(|(n, k)| (n.to_string(), k)).collect(),
            inputs: input
                .into_iter()
                .map(|(n, shape)| InputSpec { name: n.into(), dtype: Dtype::F32, shape })
                .collect(),
        };
        (name, facts)
    }))
}

pub fn test_stream(regime: CacheRegime) -> StreamSpec {
    let window_frames = if regime == CacheRegime::Resident { 9 } else { 6 };
    StreamSpec {
        cache: CacheSpec {
            regime,
            chunk_frames: CHUNK,
            window_frames,
            sink_frames: 0,
            table_frames: 1024,
            tokens_per_frame: 10,
        },
        bias: 0.3,
        step_lists: vec![
            StepList {
                name: "default".into(),
                steps: vec![
                    DenoiseStep { timestep: 1000.0, sigma: 1.0 },
                    DenoiseStep { timestep: 500.0, sigma: 0.5 },
                ],
            },
            StepList { name: "fast".into(), steps: vec![DenoiseStep { timestep: 1000.0, sigma: 1.0 }] },
        ],
    }
}

pub fn plan_digest() -> Digest {
    Digest::hash_bytes(b"the sealed plan")
}

pub fn test_parity() -> Parity {
    Parity::default().with_key("backend.matmul", ParityClass::AtInit, "naive")
}

/// Placement of the leader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaderPlacement {
    /// Rank 0 leads and computes.
    InMesh,
    /// Rank 0 leads, rank 1 computes and relays, the others are members behind rank 1.
    Outside,
}

impl LeaderPlacement {
    /// The first rank that computes.
    pub fn first_compute_rank(self) -> u32 {
        u32::from(self == LeaderPlacement::Outside)
    }
}

pub fn mesh_leader_config(ranks: u32, regime: CacheRegime) -> MeshLeaderConfig {
    MeshLeaderConfig {
        rank: 1,
        members: (2..=ranks).collect(),
        plan: plan_digest(),
        programs: Arc::new(test_programs()),
        session_spec: SessionSpec::Video(test_stream(regime)),
        limits: Limits::default(),
        tripwires: Tripwires::default(),
    }
}

pub fn leader_config(shape: LeaderPlacement, ranks: u32, regime: CacheRegime) -> LeaderConfig {
    LeaderConfig {
        ranks: (shape.first_compute_rank()..shape.first_compute_rank() + ranks).collect(),
        plan: plan_digest(),
        session: SESSION,
        build: "test".into(),
        hosts: None,
        output_groups: vec![(shape.first_compute_rank()..shape.first_compute_rank() + ranks).collect()],
        parity: test_parity(),
        programs: Arc::new(test_programs()),
        session_spec: SessionSpec::Video(test_stream(regime)),
        limits: Limits { hello_ns: 5_000_000_000, ..Limits::default() },
        tripwires: Tripwires::default(),
    }
}

pub fn worker_config(shape: LeaderPlacement, rank: u32, regime: CacheRegime) -> WorkerConfig {
    WorkerConfig {
        rank,
        upstream_rank: u32::from(shape.first_compute_rank() == 1 && rank > 1),
        plan: plan_digest(),
        build: "test".into(),
        parity: test_parity(),
        programs: Arc::new(test_programs()),
        session_spec: SessionSpec::Video(test_stream(regime)),
        limits: Limits::default(),
        sends_output: rank == shape.first_compute_rank(),
        tripwires: Tripwires::default(),
    }
}

pub fn prompt_tensor(seed: u32) -> Tensor {
    let values: Vec<f32> = (0..8).map(|i| (i * seed) as f32).collect();
    Tensor::from_f32("text", &[4, 2], &values).expect("fits")
}

pub fn context_tensor(previous: &Tensor) -> Tensor {
    let last = previous.to_f32().expect("floats");
    Tensor::from_f32("context", &[2, 2], &last[..4]).expect("fits")
}

/// A bug of a test engine, and the phase at which it occurs, counted from the end of the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    None,
    /// The warm-up skips one program.
    IncompleteWarmup,
    /// The nth phase compiles something.
    CompilesAt(u32),
    /// The nth phase finds changed weights.
    WeightChangeAt(u32),
    /// A reload finds other weights than announced.
    WrongReload,
    /// A reload loads other shards than the peers.
    WrongShardReload,
    /// The nth phase fails.
    FailAt(u32),
    /// The nth phase panics.
    PanicAt(u32),
    /// The nth phase never returns.
    HangAt(u32),
    /// The nth phase issues one extra collective.
    ExtraCollective(u32),
    /// The nth phase has another trace.
    OtherTrace(u32),
    /// The nth phase computes another result.
    OtherResult(u32),
    /// The nth phase reports that another rank aborted.
    PeerAbortAt(u32),
    /// The latents of a call are not finite.
    NotFiniteAt(u32),
    /// A result has more outputs than a message may hold.
    ManyOutputs,
}

/// An engine that hashes all its inputs into a few floats. The result is equal on every rank if
/// every rank receives equal inputs.
pub struct FakeEngine {
    pub bug: Bug,
    pub phase_ns: u64,
    pub sleep: std::time::Duration,
    pub phases_run: u32,
    pub fingerprints: Vec<ShardFingerprint>,
    count: ProgramCount,
    ran: std::collections::BTreeSet<String>,
    warm: bool,
    changed: bool,
    /// The call before which the engine finds changed caches, and the finding.
    pub cache_fault: Option<(u64, CacheFault)>,
    state: Vec<u8>,
    aborted: Arc<AtomicBool>,
}

/// Digest of the weights that a reload from `source` loads.
pub fn weights_at(source: &str) -> Digest {
    Digest::hash_bytes(source.as_bytes())
}

impl FakeEngine {
    /// Creates an engine with a shard of its own and a shard that every rank holds.
    pub fn for_rank(rank: u32, bug: Bug) -> FakeEngine {
        let print = |tensor: &str, slice: String, of: &str| ShardFingerprint {
            tensor: tensor.into(),
            digest: Digest::hash_bytes(of.as_bytes()),
            slice,
            constant: false,
        };
        let own = print("ffn", format!("[{rank}]"), &format!("shard {rank}"));
        FakeEngine { fingerprints: vec![own, print("norm", "all".into(), "norm")], ..FakeEngine::new(bug) }
    }

    pub fn new(bug: Bug) -> FakeEngine {
        FakeEngine {
            bug,
            phase_ns: 1_000_000,
            sleep: std::time::Duration::ZERO,
            phases_run: 0,
            fingerprints: Vec::new(),
            count: ProgramCount::default(),
            ran: std::collections::BTreeSet::new(),
            warm: false,
            changed: false,
            cache_fault: None,
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
            temporary_bytes: 0,
            classes: Vec::new(),
            op_times: None,
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
            Bug::FailAt(k) if k == n => return Err(EngineFault::local_failure("out of memory")),
            Bug::PanicAt(k) if k == n => panic!("index out of bounds"),
            Bug::PeerAbortAt(k) if k == n => return Err(EngineFault::peer_abort("aborted by a peer")),
            Bug::NotFiniteAt(k) if k == n => {
                return Err(EngineFault { code: "T0771".into(), ..EngineFault::local_failure("NaN") });
            }
            Bug::HangAt(k) if k == n => {
                while !self.aborted.load(Ordering::Relaxed) {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                return Err(EngineFault::peer_abort("aborted while hanging"));
            }
            Bug::ExtraCollective(k) if k == n => report.collectives += 1,
            Bug::OtherTrace(k) if k == n => report.trace = Digest::hash_bytes(b"another branch"),
            Bug::OtherResult(k) if k == n => bytes.push(1),
            Bug::CompilesAt(k) if k == n => self.count.new_since_warmup += 1,
            Bug::WeightChangeAt(k) if k == n => self.changed = true,
            _ => {}
        }
        self.state = Digest::hash_bytes(&bytes).0.to_vec();
        Ok(report)
    }

    fn reset(&mut self) {
        self.state.clear();
    }

    fn call_outputs(&mut self) -> Result<Tensors, EngineFault> {
        let values: Vec<f32> = self.state.iter().map(|b| f32::from(*b)).collect();
        let output = |name: &str| Tensor::from_f32(name, &[values.len() as u64], &values).expect("fits");
        let more = if self.bug == Bug::ManyOutputs { MAX_TENSORS } else { 0 };
        let more = (0..more).map(|i| output(&i.to_string()));
        Ok(Tensors(std::iter::once(output("output")).chain(more).collect()))
    }

    fn weight_fingerprints(&self) -> Vec<ShardFingerprint> {
        self.fingerprints.clone()
    }

    fn program_count(&self) -> ProgramCount {
        let less = u32::from(self.bug == Bug::IncompleteWarmup);
        ProgramCount { warmed: self.count.warmed - less, ..self.count }
    }

    fn finish_warmup(&mut self) {
        self.warm = true;
        self.phases_run = 0;
    }

    fn rehash_weights(&mut self) -> Option<RehashResult> {
        let (loaded, changed) = (Digest::hash_bytes(b"loaded"), Digest::hash_bytes(b"changed"));
        let now = if self.changed { changed } else { loaded };
        Some(RehashResult { label: "`ffn` [0]".into(), digest_at_load: loaded, digest_now: now })
    }

    fn reload_weights(&mut self, source: &str) -> Result<ReloadedWeights, EngineFault> {
        let other = if self.bug == Bug::WrongReload { "elsewhere" } else { source };
        for p in &mut self.fingerprints {
            p.digest = Digest::hash_bytes(format!("{} {} of {other}", p.tensor, p.slice).as_bytes());
        }
        if self.bug == Bug::WrongShardReload {
            self.fingerprints[1].digest = Digest::hash_bytes(b"stale");
        }
        Ok(ReloadedWeights { weights: weights_at(other), fingerprints: self.fingerprints.clone() })
    }

    fn audit_weights(&mut self) -> Option<RehashResult> {
        None
    }

    fn audit_caches(&mut self, call: &ReadyCall) -> Vec<CacheFault> {
        let due = self.cache_fault.take_if(|(call_id, _)| *call_id == call.call_id);
        due.into_iter().map(|(_, fault)| fault).collect()
    }

    fn abort_handle(&self) -> AbortHandle {
        let aborted = Arc::clone(&self.aborted);
        Arc::new(move || aborted.store(true, Ordering::Relaxed))
    }
}
