//! Ranks of the benchmark's own over the runtime's drivers: real processes, sockets and machines around programs that
//! do nothing, or what a benchmark wants to see.
//!
//! The programs are those of a resident stream with one denoise step. Instants are of the system's monotonic clock,
//! which is the same in every process of a host.

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
use tessera_runtime::cache::{CacheSpec, Regime};
use tessera_runtime::census::{ArgKind, Census, InputFacts, ProgramFacts};
use tessera_runtime::decide::{ChunkRequest, Cut, Director, Step, StreamSpec};
use tessera_runtime::driver::{
    EngineFactory, Interrupt, Joined, LaunchEvent, LaunchReport, LaunchSpec, LeaderParts, MeshLeaderParts,
    RecordEntry, StreamRequest, Topology, WorkerParts, exit, join, launch, run_leader, run_mesh_leader,
    run_worker,
};
use tessera_runtime::engine::{AbortHandle, Engine, EngineFault, PhaseReport, ProgramCount, Studio};
use tessera_runtime::flight::{Mark, Sink};
use tessera_runtime::leader::LeaderConfig;
use tessera_runtime::mesh_leader::MeshLeaderConfig;
use tessera_runtime::wire::{
    Commit, Dtype, Envelope, EnvelopeHeader, Message, PhaseCall, Ready, Tensor, Tensors, WIRE_VERSION, encode,
};
use tessera_runtime::worker::WorkerConfig;
use tessera_runtime::{Digest, Failure, Limits, Parity, Tripwires};

use crate::refused;

/// What every rank is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Orders {
    /// How many ranks; rank 0 leads.
    pub ranks: u32,
    /// Whether rank 0 stands outside the mesh, which rank 1 leads.
    pub outside: bool,
    /// Chunks.
    pub chunks: u32,
    /// What engines do.
    pub engine: EngineDoes,
    /// Whether each rank keeps a core busy beside all this.
    pub burn_beside: bool,
    /// Whether the leader passes a bare message around before each request.
    pub echo: bool,
    /// Where ranks leave their instants.
    pub dir: PathBuf,
}

/// What an engine does in the denoise phase of a chunk; in all others nothing.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum EngineDoes {
    /// Nothing.
    Nothing,
    /// Computes for so long.
    Compute {
        /// In nanoseconds.
        ns: u64,
    },
    /// Takes `step_ns` and tells its progress; once, one rank takes `times` as long, while the others wait for it
    /// as inside a collective, where nobody tells anything.
    SlowOnce {
        /// Of an ordinary step, in nanoseconds.
        step_ns: u64,
        /// How many times as long the slow one takes.
        times: u32,
        /// The chunk.
        chunk: u32,
        /// The rank.
        rank: u32,
        /// Whether the slow rank tells its progress meanwhile.
        tells: bool,
    },
}

impl EngineDoes {
    /// What it computes, where that is all it does.
    fn compute(self) {
        if let EngineDoes::Compute { ns } = self {
            burn(Duration::from_nanos(ns));
        }
    }
}

impl Orders {
    fn topology(&self) -> Topology {
        if self.outside { Topology::Outside } else { Topology::Mesh }
    }

    /// Ranks that run calls.
    pub fn mesh(&self) -> std::ops::Range<u32> {
        u32::from(self.outside)..self.ranks
    }
}

/// Instants of one rank, in nanoseconds of the monotonic clock. What belongs to a chunk is in order of chunks.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Stamps {
    /// The leader: a request was about to be handed over, which is decided as soon as it is there.
    pub asked: Vec<u64>,
    /// The leader: each finished chunk.
    pub calls: Vec<Call>,
    /// The leader committed a call, or a rank heard of it; with its id.
    pub commits: Vec<(u64, u64)>,
    /// The committed call has reached the engine.
    pub begun: Vec<u64>,
    /// The leader: before the first byte of an echo.
    pub echo_sent: Vec<u64>,
    /// Others: the last byte of an echo was read.
    pub echo_read: Vec<u64>,
}

/// A call by the leader's own clock, which began with its process.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Call {
    /// Its id.
    pub id: u64,
    /// When it was decided.
    pub decided_ns: u64,
    /// When the last rank was ready.
    pub ready_ns: u64,
    /// When it was committed.
    pub committed_ns: u64,
}

/// Instants that a rank gathers while it runs.
#[derive(Default)]
struct Gathered(Mutex<Stamps>);

impl Gathered {
    fn with(&self, add: impl FnOnce(&mut Stamps)) {
        // A thread that panicked ends the run, and nobody asks any more.
        if let Ok(mut stamps) = self.0.lock() {
            add(&mut stamps);
        }
    }
}

impl Sink for Gathered {
    fn mark(&self, mark: Mark<'_>) {
        let now = now_ns();
        if let Mark::Commit { call_id } = mark {
            self.with(|s| s.commits.push((call_id, now)));
        }
    }
}

/// How a rig's run ended, with the instants of ranks that ended well.
pub struct Ran {
    /// The launcher's report.
    pub report: LaunchReport,
    /// From start to end.
    pub took: Duration,
    /// By rank; empty where a rank left none.
    pub stamps: Vec<Stamps>,
}

/// Nanoseconds of the monotonic clock.
pub fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Runs a rig to its end.
pub fn run(orders: &Orders, limits: &Limits) -> anyhow::Result<Ran> {
    let this = std::env::current_exe()?.to_str().context("the path of this binary is not UTF-8")?.to_string();
    let mut extras: Vec<Vec<Arc<OwnedFd>>> = vec![Vec::new(); orders.ranks as usize];
    if orders.echo {
        for rank in 1..orders.ranks as usize {
            let (leader, other) = UnixStream::pair()?;
            extras[0].push(Arc::new(leader.into()));
            extras[rank].push(Arc::new(other.into()));
        }
    }
    let spec = LaunchSpec {
        argv: vec![this, "rig-rank".into()],
        ranks: orders.ranks,
        topology: orders.topology(),
        session: now_ns(),
        extras,
        payload: serde_json::to_vec(orders)?,
        env: Vec::new(),
        limits: limits.clone(),
    };
    let begun = Instant::now();
    let report = launch(&spec, &Interrupt::default(), &mut |_: LaunchEvent<'_>| {}).map_err(refused)?;
    let took = begun.elapsed();
    let read = |rank| {
        let text = std::fs::read(stamps_file(&orders.dir, rank)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    };
    Ok(Ran { report, took, stamps: (0..orders.ranks).map(read).collect() })
}

fn stamps_file(dir: &Path, rank: u32) -> PathBuf {
    dir.join(format!("rank-{rank}.json"))
}

/// One rank's process, from its welcome to its end.
pub fn rank_main() -> i32 {
    match rank() {
        Ok(None) => 0,
        Ok(Some(f)) => exit(f.class.exit_code()),
        Err(e) => {
            eprintln!("{e:#}");
            1
        }
    }
}

fn rank() -> anyhow::Result<Option<Failure>> {
    let mut joined = join().map_err(|d| refused(vec![d]))?;
    let orders: Orders = serde_json::from_slice(&joined.welcome.payload)?;
    let rank = joined.welcome.rank;
    let echo: Vec<UnixStream> =
        std::mem::take(&mut joined.extras).into_iter().map(UnixStream::from).collect();
    let stamps = Arc::new(Gathered::default());
    if orders.burn_beside {
        std::thread::spawn(|| {
            loop {
                burn(Duration::from_millis(100));
            }
        });
    }
    let failure = if rank == 0 {
        lead(joined, &orders, echo, &stamps)
    } else {
        let mut answers = Vec::new();
        for stream in echo {
            let (sizes, does, stamps) = (Sizes::of(&orders)?, orders.engine, Arc::clone(&stamps));
            answers.push(std::thread::spawn(move || answer(stream, &sizes, does, &stamps)));
        }
        let failure = follow(joined, &orders, rank, &stamps)?;
        // The run ends beside the last echo. Its thread ends with it, or with the leader's end of the socket.
        for answer in answers {
            let _ = answer.join();
        }
        Ok(failure)
    }?;
    let mut written = Ok(());
    stamps.with(|s| {
        let text = serde_json::to_vec(s).unwrap_or_default();
        written = std::fs::write(stamps_file(&orders.dir, rank), text);
    });
    written?;
    Ok(failure)
}

fn follow(
    joined: Joined,
    orders: &Orders,
    rank: u32,
    stamps: &Arc<Gathered>,
) -> anyhow::Result<Option<Failure>> {
    let (config, engine) = (worker_config(orders, rank), engine(rank, orders, stamps));
    let flight: Option<Arc<dyn Sink>> = Some(Arc::<Gathered>::clone(stamps));
    let outcome = if orders.outside && rank == 1 {
        let relay = MeshLeaderConfig {
            rank,
            members: (2..orders.ranks).collect(),
            plan: config.plan,
            census: Arc::clone(&config.census),
            cache: config.cache,
            limits: config.limits.clone(),
            tripwires: Tripwires::default(),
        };
        run_mesh_leader(
            joined,
            MeshLeaderParts { config: relay, engine: (config, engine), flight, tap: None },
        )
    } else {
        let parts = WorkerParts { config, engine, topology: orders.topology(), flight, tap: None };
        run_worker(joined, parts)
    };
    outcome.map_err(refused)
}

fn lead(
    joined: Joined,
    orders: &Orders,
    echo: Vec<UnixStream>,
    stamps: &Arc<Gathered>,
) -> anyhow::Result<Option<Failure>> {
    let (finished, calls) = channel();
    let clock = Arc::clone(stamps);
    let requests = Requests {
        next: 0,
        chunks: orders.chunks,
        calls,
        echo,
        sizes: Sizes::of(orders)?,
        does: orders.engine,
        stamps: Arc::clone(stamps),
    };
    let mut config = leader_config(orders);
    config.session = joined.welcome.session;
    let parts = LeaderParts {
        config,
        engine: (!orders.outside).then(|| (worker_config(orders, 0), engine(0, orders, stamps))),
        topology: orders.topology(),
        studio: Box::new(|| Ok(Box::new(Desk))),
        requests: Box::new(requests),
        record: Box::new(move |entry| told(&finished, &clock, &entry)),
        interrupt: None,
        flight: Some(Arc::<Gathered>::clone(stamps)),
        tap: None,
    };
    run_leader(joined, parts).map_err(refused)
}

fn told(finished: &Sender<()>, stamps: &Gathered, entry: &RecordEntry<'_>) {
    let RecordEntry::Call(call) = entry else { return };
    if call.request.is_none() {
        return;
    }
    let of_leader = Call {
        id: call.call_id,
        decided_ns: call.decided_ns,
        ready_ns: call.ready_ns,
        committed_ns: call.committed_ns,
    };
    stamps.with(|s| s.calls.push(of_leader));
    // Whoever waits for it may have ended before.
    let _ = finished.send(());
}

/// One request after each finished call, and an echo in between.
struct Requests {
    next: u32,
    chunks: u32,
    calls: Receiver<()>,
    echo: Vec<UnixStream>,
    sizes: Sizes,
    does: EngineDoes,
    stamps: Arc<Gathered>,
}

impl Iterator for Requests {
    type Item = StreamRequest;

    fn next(&mut self) -> Option<StreamRequest> {
        if self.next > 0 {
            self.calls.recv().ok()?;
        }
        let last = self.next == self.chunks;
        let echo = (!self.echo.is_empty()).then(|| self.round(last));
        if last {
            return None;
        }
        let prompt = (self.next == 0).then(|| "nothing".to_string());
        self.next += 1;
        let asked = now_ns();
        self.stamps.with(|s| {
            s.echo_sent.extend(echo.flatten());
            s.asked.push(asked);
        });
        Some(StreamRequest { prompt, ..StreamRequest::default() })
    }
}

impl Requests {
    /// Passes bare messages of a call's shape around, with what ranks compute in it; when it began.
    fn round(&mut self, last: bool) -> Option<u64> {
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
        self.does.compute();
        let mut done = vec![0; self.sizes.ready];
        for stream in &mut self.echo {
            stream.read_exact(&mut done).ok()?;
        }
        Some(sent)
    }
}

/// The other end of an echo.
fn answer(mut stream: UnixStream, sizes: &Sizes, does: EngineDoes, stamps: &Gathered) {
    let (mut envelope, mut commit) = (vec![0; sizes.envelope], vec![0; sizes.commit]);
    let ready = vec![0; sizes.ready];
    let mut read = Vec::new();
    loop {
        let whole = stream.read_exact(&mut envelope).and_then(|()| stream.write_all(&ready));
        if whole.and_then(|()| stream.read_exact(&mut commit)).is_err() {
            return;
        }
        read.push(now_ns());
        does.compute();
        if stream.write_all(&ready).is_err() {
            return;
        }
        if envelope[0] == 1 {
            return stamps.with(|s| s.echo_read = read);
        }
    }
}

/// Bytes of the frames of a call.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Of an envelope with its payload.
    pub envelope: usize,
    /// Of an answer.
    pub ready: usize,
    /// Of a commit.
    pub commit: usize,
}

impl Sizes {
    /// As they are on the wire, for a chunk that brings no prompt.
    pub fn of(orders: &Orders) -> anyhow::Result<Sizes> {
        let config = leader_config(orders);
        let mut director = Director::new(config.stream).map_err(refused)?;
        let mut next = |prompt_change| {
            director
                .next(&ChunkRequest { prompt_change, seed: 0, cut: Cut::None }, &config.census)
                .map_err(refused)
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
        let bytes = |m: &Message| encode(0, m).map(|f| f.len()).map_err(|d| refused(vec![d]));
        Ok(Sizes {
            envelope: bytes(&Message::Envelope(Box::new(envelope)))?,
            ready: bytes(&Message::Ready(ready))?,
            commit: bytes(&Message::Commit(Commit { call_id: 1000 }))?,
        })
    }
}

fn plan_digest() -> Digest {
    Digest::of(b"programs that do nothing")
}

fn leader_config(orders: &Orders) -> LeaderConfig {
    LeaderConfig {
        ranks: orders.mesh().collect(),
        plan: plan_digest(),
        session: 0,
        build: build(),
        silent: Vec::new(),
        parity: Parity::default(),
        census: Arc::new(census()),
        stream: stream(),
        limits: limits(),
        tripwires: Tripwires::default(),
    }
}

fn worker_config(orders: &Orders, rank: u32) -> WorkerConfig {
    WorkerConfig {
        rank,
        above: u32::from(orders.mesh().start == 1 && rank > 1),
        plan: plan_digest(),
        build: build(),
        parity: Parity::default(),
        census: Arc::new(census()),
        cache: stream().cache,
        limits: limits(),
        delivers: orders.mesh().start == rank,
        tripwires: Tripwires::default(),
    }
}

/// The defaults, with one call at a time: the next one is decided when nothing else is under way.
pub fn limits() -> Limits {
    Limits { d_in: 1, max_outstanding: 1, ..Limits::default() }
}

fn build() -> String {
    format!("bench {}", env!("CARGO_PKG_VERSION"))
}

/// Frames of a chunk.
const CHUNK: u32 = 3;
/// Elements of the text and of an output.
const VALUES: usize = 8;

fn stream() -> StreamSpec {
    StreamSpec {
        cache: CacheSpec {
            regime: Regime::Resident,
            chunk_frames: CHUNK,
            window_frames: 2 * CHUNK,
            table_frames: 1024,
            tokens_per_frame: 16,
        },
        bias: 1.0,
        steps: vec![Step { timestep: 1000.0, sigma: 1.0 }],
    }
}

fn census() -> Census {
    let pass = [
        ("start", ArgKind::I64),
        ("row", ArgKind::I64),
        ("t", ArgKind::F32s(CHUNK)),
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
    for fill in [0, CHUNK] {
        rows.push((format!("denoise.fill{fill}"), &pass[..]));
        rows.push((format!("clean.fill{fill}"), &pass[..3]));
    }
    Census::new(rows.into_iter().map(|(name, scalars)| {
        let text = InputFacts { name: "text".into(), dtype: Dtype::F32, shape: vec![VALUES as u64] };
        let facts = ProgramFacts {
            collectives: 1,
            trace: Digest::of(name.as_bytes()),
            scalars: scalars.iter().map(|(n, k)| ((*n).to_string(), *k)).collect(),
            inputs: if name == "text" { vec![text] } else { Vec::new() },
        };
        (name, facts)
    }))
}

fn values(name: &str) -> Result<Tensor, Diagnostic> {
    Tensor::from_f32(name, &[VALUES as u64], &[1.0; VALUES])
}

fn engine(rank: u32, orders: &Orders, stamps: &Arc<Gathered>) -> EngineFactory {
    let rigged = Rigged {
        rank,
        does: orders.engine,
        programs: BTreeSet::new(),
        warm: false,
        chunk: 0,
        begun: false,
        stamps: Arc::clone(stamps),
    };
    Box::new(move || Ok((Box::new(rigged) as Box<dyn Engine>, Parity::default())))
}

struct Rigged {
    rank: u32,
    does: EngineDoes,
    programs: BTreeSet<String>,
    warm: bool,
    chunk: u32,
    begun: bool,
    stamps: Arc<Gathered>,
}

impl Engine for Rigged {
    fn run(
        &mut self,
        phase: &PhaseCall,
        _: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        if !self.warm {
            self.programs.insert(phase.program.clone());
        } else if !self.begun {
            self.begun = true;
            let now = now_ns();
            self.stamps.with(|s| s.begun.push(now));
        }
        let since = Instant::now();
        if self.warm && phase.program.starts_with("denoise") {
            self.denoise(progress);
        }
        Ok(PhaseReport {
            ns: since.elapsed().as_nanos() as u64,
            collectives: 1,
            trace: Digest::of(phase.program.as_bytes()),
            compensated: 0,
        })
    }

    fn programs(&self) -> ProgramCount {
        let programs = self.programs.len() as u32;
        ProgramCount { loaded: programs, warmed: programs, new_since_warmup: 0 }
    }

    fn warmed(&mut self) {
        self.warm = true;
    }

    fn reset(&mut self) {}

    fn output(&mut self) -> Result<Option<Tensor>, EngineFault> {
        self.begun = false;
        self.chunk += 1;
        values("output").map(Some).map_err(|d| EngineFault::failed(d.message))
    }

    fn abort_handle(&self) -> AbortHandle {
        Arc::new(|| {})
    }
}

impl Rigged {
    fn denoise(&self, progress: &(dyn Fn(u32) + Sync)) {
        match self.does {
            EngineDoes::Nothing | EngineDoes::Compute { .. } => self.does.compute(),
            EngineDoes::SlowOnce { step_ns, times, chunk, rank, tells } => {
                let slow = chunk == self.chunk;
                let take = Duration::from_nanos(step_ns) * if slow { times } else { 1 };
                let tells = !slow || (tells && rank == self.rank);
                let (since, beat) = (Instant::now(), Duration::from_nanos(step_ns) / MARKS);
                let mut mark = 0;
                while since.elapsed() < take {
                    if tells {
                        mark += 1;
                        progress(mark);
                    }
                    std::thread::sleep(beat.min(take.saturating_sub(since.elapsed())));
                }
            }
        }
    }
}

/// Marks of an ordinary step.
const MARKS: u32 = 20;

/// Keeps a core busy.
pub fn burn(time: Duration) {
    let since = Instant::now();
    let mut x = 1.0_f64;
    while since.elapsed() < time {
        for _ in 0..1000 {
            x = std::hint::black_box(x * 1.000_000_1);
        }
    }
}

/// A studio that delivers into nothing.
struct Desk;

impl Studio for Desk {
    fn text(&mut self, _: &str) -> Result<Tensor, Diagnostic> {
        values("text")
    }

    fn context(&mut self, _: u32, _: &Tensor, _: bool) -> Result<Tensor, Diagnostic> {
        values("context")
    }

    fn deliver(&mut self, _: u32, _: &Tensor) -> Result<u32, Diagnostic> {
        Ok(0)
    }

    fn finish(&mut self) -> Result<(), Diagnostic> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_the_sizes_of_a_call() {
        let orders = Orders {
            ranks: 8,
            outside: false,
            chunks: 1,
            engine: EngineDoes::Nothing,
            burn_beside: false,
            echo: true,
            dir: PathBuf::new(),
        };
        let s = Sizes::of(&orders).expect("a legal stream");
        assert!(s.envelope > 200 && s.envelope < 4096 && s.ready > s.commit && s.commit > 24, "{s:?}");
    }
}
