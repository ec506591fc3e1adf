//! A test harness of ranks over the runtime's drivers: real processes, sockets and state machines
//! around programs that do nothing or follow a benchmark's script.
//!
//! The programs are those of a stream in the resident regime with one denoise step. Timestamps are
//! of the monotonic clock, which all processes of a host share.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;
use tessera_runtime::director::{ChunkRequest, DenoiseStep, Director, SceneCut, StreamSpec};
use tessera_runtime::driver::{
    ControlTopology, EngineFactory, JoinedRank, LaunchEvent, LaunchReport, LaunchSpec, LeaderParts,
    MeshLeaderParts, RecordEntry, StopHandle, StreamRequest, WorkerParts, exit_process, join_launch,
    launch_ranks, run_leader, run_mesh_leader, run_worker,
};
use tessera_runtime::engine::{AbortHandle, Engine, EngineFault, MediaPipeline, PhaseReport, ProgramCount};
use tessera_runtime::flight::{FlightEvent, FlightSink};
use tessera_runtime::kv_cache::{CacheRegime, CacheSpec};
use tessera_runtime::leader::LeaderConfig;
use tessera_runtime::mesh_leader::MeshLeaderConfig;
use tessera_runtime::program_index::{ArgKind, InputSpec, ProgramIndex, ProgramInfo};
use tessera_runtime::wire::{
    Commit, Dtype, Envelope, EnvelopeHeader, Message, PhaseCall, Ready, Tensor, Tensors, WIRE_VERSION, encode,
};
use tessera_runtime::worker::WorkerConfig;
use tessera_runtime::{Digest, Failure, Limits, Parity, Tripwires};

use crate::diagnostics_error;

/// The configuration of every rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HarnessConfig {
    /// Number of ranks; rank 0 is the leader.
    pub ranks: u32,
    /// Whether rank 0 is outside of the mesh, which rank 1 leads.
    pub leader_outside: bool,
    /// Number of chunks that the leader requests in the run.
    pub chunks: u32,
    /// Behaviour of the engines.
    pub engine_script: EngineScript,
    /// Whether each rank also keeps a core busy.
    pub burn_in_background: bool,
    /// Whether the leader exchanges a bare message with all ranks before each request.
    pub echo: bool,
    /// Folder to which ranks write their timestamps.
    pub dir: PathBuf,
}

/// The behaviour of an engine in the denoise phase of a chunk. It does nothing in the other phases.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum EngineScript {
    /// Computes nothing, so that a call costs only its agreement.
    Nothing,
    /// Computes for a fixed time.
    Compute {
        /// Time in nanoseconds for which the engine computes in each chunk.
        ns: u64,
    },
    /// Takes `step_ns` and reports progress. In one chunk one rank takes `times` times as long,
    /// while the others wait for it without progress, as inside a collective.
    SlowOnce {
        /// Duration of an ordinary step in nanoseconds.
        step_ns: u64,
        /// Factor by which the slow step takes longer.
        slow_factor: u32,
        /// Index of the chunk that contains the slow step.
        chunk: u32,
        /// The rank whose step is slow; the others wait for it.
        rank: u32,
        /// Whether the slow rank reports progress meanwhile.
        reports_progress: bool,
    },
}

impl EngineScript {
    /// Computes if the engine only computes.
    fn compute_only(self) {
        if let EngineScript::Compute { ns } = self {
            burn_cpu(Duration::from_nanos(ns));
        }
    }
}

impl HarnessConfig {
    fn control_topology(&self) -> ControlTopology {
        if self.leader_outside { ControlTopology::ExternalLeader } else { ControlTopology::Mesh }
    }

    /// Returns the ranks that run calls.
    pub fn mesh_ranks(&self) -> std::ops::Range<u32> {
        u32::from(self.leader_outside)..self.ranks
    }
}

/// Timestamps of one rank, in nanoseconds of the monotonic clock. Lists of one entry per chunk are
/// in chunk order.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RankTimestamps {
    /// Leader: just before it handed over a request, which is decided on arrival.
    pub requested: Vec<u64>,
    /// Leader: each finished chunk.
    pub calls: Vec<CallTimestamps>,
    /// Call id and time at which the leader committed a call or a rank received the commit.
    pub commits: Vec<(u64, u64)>,
    /// Times at which a committed call reached the engine.
    pub engine_started: Vec<u64>,
    /// Leader: before the first byte of an echo.
    pub echo_sent: Vec<u64>,
    /// Other ranks: after the last byte of an echo.
    pub echo_read: Vec<u64>,
}

/// Times of a call by the leader's own clock, which started with its process.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct CallTimestamps {
    /// Id of the call, which the commit events of all ranks repeat.
    pub id: u64,
    /// Time of the decision.
    pub decided_ns: u64,
    /// Time at which the last rank was ready.
    pub ready_ns: u64,
    /// Time of the commit.
    pub committed_ns: u64,
}

/// Timestamps that a rank collects while it runs.
#[derive(Default)]
struct TimestampSink(Mutex<RankTimestamps>);

impl TimestampSink {
    fn with_timestamps(&self, add: impl FnOnce(&mut RankTimestamps)) {
        // If a thread panicked, the run ends and nothing reads the timestamps.
        if let Ok(mut stamps) = self.0.lock() {
            add(&mut stamps);
        }
    }
}

impl FlightSink for TimestampSink {
    fn record_event(&self, mark: FlightEvent<'_>) {
        let now = now_ns();
        if let FlightEvent::Commit { call_id } = mark {
            self.with_timestamps(|s| s.commits.push((call_id, now)));
        }
    }
}

/// The outcome of a run, with the timestamps of the ranks that ended without an error.
pub struct HarnessRun {
    /// The launcher's account of how the run and its ranks ended.
    pub report: LaunchReport,
    /// Duration of the whole run.
    pub duration: Duration,
    /// Timestamps by rank; empty for a rank that wrote none.
    pub timestamps: Vec<RankTimestamps>,
}

/// Returns the time of the monotonic clock in nanoseconds.
pub fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Runs the ranks until the run ends.
pub fn run(config: &HarnessConfig, limits: &Limits) -> anyhow::Result<HarnessRun> {
    let this = std::env::current_exe()?.to_str().context("the path of this binary is not UTF-8")?.to_string();
    let mut extras: Vec<Vec<Arc<OwnedFd>>> = vec![Vec::new(); config.ranks as usize];
    if config.echo {
        for rank in 1..config.ranks as usize {
            let (leader, other) = UnixStream::pair()?;
            extras[0].push(Arc::new(leader.into()));
            extras[rank].push(Arc::new(other.into()));
        }
    }
    let spec = LaunchSpec {
        argv: vec![this, "harness-rank".into()],
        rank_count: config.ranks,
        topology: config.control_topology(),
        session: now_ns(),
        extra_fds: extras,
        payload: serde_json::to_vec(config)?,
        env: Vec::new(),
        limits: limits.clone(),
    };
    let begun = Instant::now();
    let report = launch_ranks(&spec, &StopHandle::default(), &mut |_: LaunchEvent<'_>| {})
        .map_err(diagnostics_error)?;
    let took = begun.elapsed();
    let read = |rank| {
        let text = std::fs::read(timestamps_file(&config.dir, rank)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    };
    Ok(HarnessRun { report, duration: took, timestamps: (0..config.ranks).map(read).collect() })
}

fn timestamps_file(dir: &Path, rank: u32) -> PathBuf {
    dir.join(format!("rank-{rank}.json"))
}

/// Runs the process of one rank and returns its exit code.
pub fn rank_main() -> i32 {
    match run_rank() {
        Ok(None) => 0,
        Ok(Some(f)) => exit_process(f.class.exit_code()),
        Err(e) => {
            eprintln!("{e:#}");
            1
        }
    }
}

fn run_rank() -> anyhow::Result<Option<Failure>> {
    let mut joined = join_launch().map_err(|d| diagnostics_error(vec![d]))?;
    let harness: HarnessConfig = serde_json::from_slice(&joined.welcome.payload)?;
    let rank = joined.welcome.rank;
    let echo: Vec<UnixStream> =
        std::mem::take(&mut joined.extra_fds).into_iter().map(UnixStream::from).collect();
    let timestamps = Arc::new(TimestampSink::default());
    if harness.burn_in_background {
        std::thread::spawn(|| {
            loop {
                burn_cpu(Duration::from_millis(100));
            }
        });
    }
    let failure = if rank == 0 {
        run_as_leader(joined, &harness, echo, &timestamps)
    } else {
        let mut echo_threads = Vec::new();
        for stream in echo {
            let (sizes, does, timestamps) =
                (FrameSizes::from_config(&harness)?, harness.engine_script, Arc::clone(&timestamps));
            echo_threads.push(std::thread::spawn(move || answer_echoes(stream, &sizes, does, &timestamps)));
        }
        let failure = run_as_worker(joined, &harness, rank, &timestamps)?;
        // The run ends at the same time as the last echo. The echo thread ends then, or when the
        // leader closes the socket.
        for answer in echo_threads {
            let _ = answer.join();
        }
        Ok(failure)
    }?;
    let mut written = Ok(());
    timestamps.with_timestamps(|s| {
        let text = serde_json::to_vec(s).unwrap_or_default();
        written = std::fs::write(timestamps_file(&harness.dir, rank), text);
    });
    written?;
    Ok(failure)
}

fn run_as_worker(
    joined: JoinedRank,
    harness: &HarnessConfig,
    rank: u32,
    stamps: &Arc<TimestampSink>,
) -> anyhow::Result<Option<Failure>> {
    let (config, engine) = (worker_config(harness, rank), engine_factory(rank, harness, stamps));
    let flight: Option<Arc<dyn FlightSink>> = Some(Arc::<TimestampSink>::clone(stamps));
    let outcome = if harness.leader_outside && rank == 1 {
        let relay = MeshLeaderConfig {
            rank,
            members: (2..harness.ranks).collect(),
            plan: config.plan,
            programs: Arc::clone(&config.programs),
            cache: config.cache,
            limits: config.limits.clone(),
            tripwires: Tripwires::default(),
        };
        run_mesh_leader(
            joined,
            MeshLeaderParts { config: relay, local_rank: (config, engine), flight, interceptor: None },
        )
    } else {
        let parts =
            WorkerParts { config, engine, topology: harness.control_topology(), flight, interceptor: None };
        run_worker(joined, parts)
    };
    outcome.map_err(diagnostics_error)
}

fn run_as_leader(
    joined: JoinedRank,
    harness: &HarnessConfig,
    echo: Vec<UnixStream>,
    stamps: &Arc<TimestampSink>,
) -> anyhow::Result<Option<Failure>> {
    let (finished, calls) = channel();
    let clock = Arc::clone(stamps);
    let requests = EchoingRequests {
        next: 0,
        chunks: harness.chunks,
        calls,
        echo,
        sizes: FrameSizes::from_config(harness)?,
        script: harness.engine_script,
        timestamps: Arc::clone(stamps),
    };
    let mut config = leader_config(harness);
    config.session = joined.welcome.session;
    let parts = LeaderParts {
        config,
        local_rank: (!harness.leader_outside)
            .then(|| (worker_config(harness, 0), engine_factory(0, harness, stamps))),
        topology: harness.control_topology(),
        media: Box::new(|| Ok(Box::new(DiscardingMedia))),
        requests: Box::new(requests),
        record: Box::new(move |entry| on_record_entry(&finished, &clock, &entry)),
        stop: None,
        flight: Some(Arc::<TimestampSink>::clone(stamps)),
        interceptor: None,
    };
    run_leader(joined, parts).map_err(diagnostics_error)
}

fn on_record_entry(finished: &Sender<()>, stamps: &TimestampSink, entry: &RecordEntry<'_>) {
    let RecordEntry::Call(call) = entry else { return };
    if call.request.is_none() {
        return;
    }
    let of_leader = CallTimestamps {
        id: call.call_id,
        decided_ns: call.decided_ns,
        ready_ns: call.ready_ns,
        committed_ns: call.committed_ns,
    };
    stamps.with_timestamps(|s| s.calls.push(of_leader));
    // The receiver may have ended already.
    let _ = finished.send(());
}

/// Issues one request after each finished call, with an echo in between.
struct EchoingRequests {
    next: u32,
    chunks: u32,
    calls: Receiver<()>,
    echo: Vec<UnixStream>,
    sizes: FrameSizes,
    script: EngineScript,
    timestamps: Arc<TimestampSink>,
}

impl Iterator for EchoingRequests {
    type Item = StreamRequest;

    fn next(&mut self) -> Option<StreamRequest> {
        if self.next > 0 {
            self.calls.recv().ok()?;
        }
        let last = self.next == self.chunks;
        let echo = (!self.echo.is_empty()).then(|| self.exchange_echo(last));
        if last {
            return None;
        }
        let prompt = (self.next == 0).then(|| "nothing".to_string());
        self.next += 1;
        let asked = now_ns();
        self.timestamps.with_timestamps(|s| {
            s.echo_sent.extend(echo.flatten());
            s.requested.push(asked);
        });
        Some(StreamRequest { prompt, ..StreamRequest::default() })
    }
}

impl EchoingRequests {
    /// Exchanges bare messages with the sizes of a call's messages, including the computation, and
    /// returns the start time.
    fn exchange_echo(&mut self, last: bool) -> Option<u64> {
        let mut envelope = vec![0; self.sizes.envelope];
        envelope[0] = u8::from(last);
        let mut ready = vec![0; self.sizes.ready];
        let commit = vec![0; self.sizes.commit];
        let sent = now_ns();
        for stream in &mut self.echo {
            stream.write_all(&envelope).ok()?;
        }
        for stream in &mut self.echo {
            stream.read_exact(&mut ready).ok()?;
        }
        for stream in &mut self.echo {
            stream.write_all(&commit).ok()?;
        }
        self.script.compute_only();
        let mut done = vec![0; self.sizes.ready];
        for stream in &mut self.echo {
            stream.read_exact(&mut done).ok()?;
        }
        Some(sent)
    }
}

/// Answers the echo on the other ranks.
fn answer_echoes(mut stream: UnixStream, sizes: &FrameSizes, does: EngineScript, stamps: &TimestampSink) {
    let (mut envelope, mut commit) = (vec![0; sizes.envelope], vec![0; sizes.commit]);
    let ready = vec![0; sizes.ready];
    let mut read = Vec::new();
    loop {
        let whole = stream.read_exact(&mut envelope).and_then(|()| stream.write_all(&ready));
        if whole.and_then(|()| stream.read_exact(&mut commit)).is_err() {
            return;
        }
        read.push(now_ns());
        does.compute_only();
        if stream.write_all(&ready).is_err() {
            return;
        }
        if envelope[0] == 1 {
            return stamps.with_timestamps(|s| s.echo_read = read);
        }
    }
}

/// Sizes of the frames of a call in bytes.
#[derive(Debug, Clone, Copy)]
pub struct FrameSizes {
    /// Envelope with its payload.
    pub envelope: usize,
    /// A rank's answer that it is ready, with digests of its predicted state and its inputs.
    pub ready: usize,
    /// The leader's commit, which carries only the call id.
    pub commit: usize,
}

impl FrameSizes {
    /// Encodes the frames of a chunk without a prompt and returns their sizes.
    pub fn from_config(harness: &HarnessConfig) -> anyhow::Result<FrameSizes> {
        let config = leader_config(harness);
        let mut director = Director::new(config.stream).map_err(diagnostics_error)?;
        let mut next = |prompt_change| {
            director
                .plan_chunk(&ChunkRequest { prompt_change, seed: 0, cut: SceneCut::None }, &config.programs)
                .map_err(diagnostics_error)
        };
        next(true)?;
        let plan = next(false)?;
        let envelope = Envelope {
            header: EnvelopeHeader {
                version: WIRE_VERSION,
                action: plan.action,
                plan: config.plan,
                session: u64::MAX,
                call_id: 1000,
                chunk: plan.chunk,
                cache_epoch: plan.cache_epoch,
                deadline_ms: 5000,
            },
            meta: plan.meta,
            reload: None,
            tensors: Tensors::default(),
        };
        let ready = Ready { call_id: 1000, predicted_state: plan_digest(), inputs: plan_digest() };
        let bytes = |m: &Message| encode(0, m).map(|f| f.len()).map_err(|d| diagnostics_error(vec![d]));
        Ok(FrameSizes {
            envelope: bytes(&Message::Envelope(Box::new(envelope)))?,
            ready: bytes(&Message::Ready(ready))?,
            commit: bytes(&Message::Commit(Commit { call_id: 1000 }))?,
        })
    }
}

fn plan_digest() -> Digest {
    Digest::hash_bytes(b"programs that do nothing")
}

fn leader_config(harness: &HarnessConfig) -> LeaderConfig {
    LeaderConfig {
        ranks: harness.mesh_ranks().collect(),
        plan: plan_digest(),
        session: 0,
        build: build_label(),
        ranks_without_output: Vec::new(),
        parity: Parity::default(),
        programs: Arc::new(program_index()),
        stream: stream_spec(),
        limits: one_call_limits(),
        tripwires: Tripwires::default(),
    }
}

fn worker_config(harness: &HarnessConfig, rank: u32) -> WorkerConfig {
    WorkerConfig {
        rank,
        upstream_rank: u32::from(harness.mesh_ranks().start == 1 && rank > 1),
        plan: plan_digest(),
        build: build_label(),
        parity: Parity::default(),
        programs: Arc::new(program_index()),
        cache: stream_spec().cache,
        limits: one_call_limits(),
        sends_output: harness.mesh_ranks().start == rank,
        tripwires: Tripwires::default(),
    }
}

/// Returns the default limits, with one call at a time: the next call is decided when no other is
/// in flight.
pub fn one_call_limits() -> Limits {
    Limits { d_in: 1, max_outstanding: 1, ..Limits::default() }
}

fn build_label() -> String {
    format!("bench {}", env!("CARGO_PKG_VERSION"))
}

/// Frames per chunk of the harness's small model; its window holds two chunks.
const CHUNK_FRAMES: u32 = 3;
/// Number of elements of the text embedding and of an output.
const TENSOR_ELEMENTS: usize = 8;

fn stream_spec() -> StreamSpec {
    StreamSpec {
        cache: CacheSpec {
            regime: CacheRegime::Resident,
            chunk_frames: CHUNK_FRAMES,
            window_frames: 2 * CHUNK_FRAMES,
            table_frames: 1024,
            tokens_per_frame: 16,
        },
        bias: 1.0,
        steps: vec![DenoiseStep { timestep: 1000.0, sigma: 1.0 }],
    }
}

fn program_index() -> ProgramIndex {
    let pass = [
        ("start", ArgKind::I64),
        ("row", ArgKind::I64),
        ("t", ArgKind::F32s(CHUNK_FRAMES)),
        ("sigma", ArgKind::F32),
    ];
    let draw =
        [("sigma", ArgKind::F32), ("seed", ArgKind::I64), ("chunk", ArgKind::I64), ("draw", ArgKind::I64)];
    let mut rows = vec![
        ("text".to_string(), &[][..]),
        ("rebase".to_string(), &[("shift", ArgKind::I64)][..]),
        ("renoise".to_string(), &draw[..]),
        ("emit".to_string(), &[][..]),
    ];
    for fill in [0, CHUNK_FRAMES] {
        rows.push((format!("denoise.fill{fill}"), &pass[..]));
        rows.push((format!("clean.fill{fill}"), &pass[..3]));
    }
    ProgramIndex::new(rows.into_iter().map(|(name, scalars)| {
        let text = InputSpec { name: "text".into(), dtype: Dtype::F32, shape: vec![TENSOR_ELEMENTS as u64] };
        let facts = ProgramInfo {
            collectives: 1,
            trace: Digest::hash_bytes(name.as_bytes()),
            scalars: scalars.iter().map(|(n, k)| ((*n).to_string(), *k)).collect(),
            inputs: if name == "text" { vec![text] } else { Vec::new() },
        };
        (name, facts)
    }))
}

fn constant_tensor(name: &str) -> Result<Tensor, Diagnostic> {
    Tensor::from_f32(name, &[TENSOR_ELEMENTS as u64], &[1.0; TENSOR_ELEMENTS])
}

fn engine_factory(rank: u32, harness: &HarnessConfig, stamps: &Arc<TimestampSink>) -> EngineFactory {
    let scripted = ScriptedEngine {
        rank,
        script: harness.engine_script,
        programs: BTreeSet::new(),
        is_warm: false,
        chunk: 0,
        has_started: false,
        timestamps: Arc::clone(stamps),
    };
    Box::new(move || Ok((Box::new(scripted) as Box<dyn Engine>, Parity::default())))
}

struct ScriptedEngine {
    rank: u32,
    script: EngineScript,
    programs: BTreeSet<String>,
    is_warm: bool,
    chunk: u32,
    has_started: bool,
    timestamps: Arc<TimestampSink>,
}

impl Engine for ScriptedEngine {
    fn run(
        &mut self,
        phase: &PhaseCall,
        _: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        if !self.is_warm {
            self.programs.insert(phase.program.clone());
        } else if !self.has_started {
            self.has_started = true;
            let now = now_ns();
            self.timestamps.with_timestamps(|s| s.engine_started.push(now));
        }
        let since = Instant::now();
        if self.is_warm && phase.program.starts_with("denoise") {
            self.run_denoise(progress);
        }
        Ok(PhaseReport {
            ns: since.elapsed().as_nanos() as u64,
            collectives: 1,
            trace: Digest::hash_bytes(phase.program.as_bytes()),
            compensated: 0,
        })
    }

    fn program_count(&self) -> ProgramCount {
        let programs = self.programs.len() as u32;
        ProgramCount { loaded: programs, warmed: programs, new_since_warmup: 0 }
    }

    fn finish_warmup(&mut self) {
        self.is_warm = true;
    }

    fn reset(&mut self) {}

    fn chunk_output(&mut self) -> Result<Option<Tensor>, EngineFault> {
        self.has_started = false;
        self.chunk += 1;
        constant_tensor("output").map(Some).map_err(|d| EngineFault::local_failure(d.message))
    }

    fn abort_handle(&self) -> AbortHandle {
        Arc::new(|| {})
    }
}

impl ScriptedEngine {
    fn run_denoise(&self, progress: &(dyn Fn(u32) + Sync)) {
        match self.script {
            EngineScript::Nothing | EngineScript::Compute { .. } => self.script.compute_only(),
            EngineScript::SlowOnce { step_ns, slow_factor: times, chunk, rank, reports_progress: tells } => {
                let slow = chunk == self.chunk;
                let duration = Duration::from_nanos(step_ns) * if slow { times } else { 1 };
                let tells = !slow || (tells && rank == self.rank);
                let (since, interval) = (Instant::now(), Duration::from_nanos(step_ns) / PROGRESS_REPORTS);
                let mut mark = 0;
                while since.elapsed() < duration {
                    if tells {
                        mark += 1;
                        progress(mark);
                    }
                    std::thread::sleep(interval.min(duration.saturating_sub(since.elapsed())));
                }
            }
        }
    }
}

/// Number of progress reports of an ordinary step.
const PROGRESS_REPORTS: u32 = 20;

/// Keeps a core busy for a time.
pub fn burn_cpu(time: Duration) {
    let since = Instant::now();
    let mut x = 1.0_f64;
    while since.elapsed() < time {
        for _ in 0..1000 {
            x = std::hint::black_box(x * 1.000_000_1);
        }
    }
}

/// A media pipeline that discards its frames.
struct DiscardingMedia;

impl MediaPipeline for DiscardingMedia {
    fn encode_prompt(&mut self, _: &str) -> Result<Tensor, Diagnostic> {
        constant_tensor("text")
    }

    fn encode_context(&mut self, _: u32, _: &Tensor, _: bool) -> Result<Tensor, Diagnostic> {
        constant_tensor("context")
    }

    fn deliver_chunk(&mut self, _: u32, _: &Tensor) -> Result<u32, Diagnostic> {
        Ok(0)
    }

    fn finish_output(&mut self) -> Result<(), Diagnostic> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_the_sizes_of_a_call() {
        let orders = HarnessConfig {
            ranks: 8,
            leader_outside: false,
            chunks: 1,
            engine_script: EngineScript::Nothing,
            burn_in_background: false,
            echo: true,
            dir: PathBuf::new(),
        };
        let s = FrameSizes::from_config(&orders).expect("a valid stream");
        assert!(s.envelope > 200 && s.envelope < 4096 && s.ready > s.commit && s.commit > 24, "{s:?}");
    }
}
