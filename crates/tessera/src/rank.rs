//! The process of one rank: it joins the run, verifies the plan again, loads and runs; the leader
//! also closes the record.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, DiagnosticFormat, Diagnostics, render_all};
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::MeshRank;
use tessera_ir::Program;
use tessera_mesh::{Axis, Rank};
use tessera_models::denoising_steps;
use tessera_runtime::director::{DenoiseStep, SceneCut, StreamSpec};
use tessera_runtime::driver::{
    ControlTopology, EngineFactory, Interceptor, JoinedRank, LeaderParts, MeshLeaderParts, RecordEntry,
    StopHandle, StreamRequest, WorkerParts, exit_process, exit_without_handlers, join_launch, run_leader,
    run_mesh_leader, run_worker,
};
use tessera_runtime::engine::{Engine, MediaPipeline, T0737};
use tessera_runtime::flight::{FlightEvent, FlightSink};
use tessera_runtime::kv_cache::{CacheRegime, CacheSpec};
use tessera_runtime::leader::LeaderConfig;
use tessera_runtime::mesh_leader::MeshLeaderConfig;
use tessera_runtime::program_index::ProgramIndex;
use tessera_runtime::tripwire::T0751;
use tessera_runtime::wire::{Progress, Reload};
use tessera_runtime::worker::WorkerConfig;
use tessera_runtime::{CheckSite, Digest, Failure, FailureClass, Limits, Parity, Tripwires};

use crate::communicators::EndpointSources;
use crate::cuda::GpuRankConfig;
use crate::drill::{DrillConfig, FaultInjector};
use crate::engine::{EngineBackend, MeshEngine, build_program_index, mesh_phases};
use crate::flight::FlightRecord;
use crate::media_pipeline::{RunMediaPipeline, lock_record};
use crate::parity::{add_peers_to_groups, rank_parity};
use crate::plan::Plan;
use crate::record::{ChunkSettings, RecordWriter};
use crate::shards::weight_opener;
use crate::synthetic_delays::{DelayedEngine, SyntheticDelays};
use crate::{Model, communicators};

/// Maximum wait inside one collective. The lockstep detects stalls from progress and learned
/// limits; this timeout only ends a wait that no process monitors any more.
const COLLECTIVE_PATIENCE: Duration = Duration::from_secs(3600);

/// The configuration that the launcher sends to every rank. The leader decides about the stream;
/// workers only read paths and digests.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RankConfig {
    /// Folder of the sealed plan.
    pub(crate) plan: PathBuf,
    /// Digest of the plan.
    pub(crate) digest: String,
    /// Folder of the model.
    pub(crate) model: PathBuf,
    /// Directory to which the run writes its output.
    pub(crate) out: PathBuf,
    /// Number of CPU threads per rank.
    pub(crate) threads: usize,
    /// Number of chunks to stream.
    pub(crate) chunks: u32,
    /// Prompts, each with the chunk from which it holds; the first holds from chunk 0.
    pub(crate) prompts: Vec<(u32, String)>,
    /// Seeds, in the same form as `prompts`.
    pub(crate) seeds: Vec<(u32, u64)>,
    /// Chunks before which the scene is cut.
    pub(crate) cuts: Vec<u32>,
    /// Chunks before which the scene is cut at once, which discards undelivered requests.
    pub(crate) flushes: Vec<u32>,
    /// Weight folders to load before a chunk, each with its expected digest.
    pub(crate) weights: Vec<(u32, String, Digest)>,
    /// Whether to write every frame as a PNG.
    pub(crate) png: bool,
    /// Synthetic delays of stages.
    pub(crate) delays: SyntheticDelays,
    /// GPU configuration of the mesh ranks; `None` if all ranks run on CPUs.
    pub(crate) gpus: Option<GpuRankConfig>,
    /// The fault that a drill injects.
    pub(crate) drill: Option<DrillConfig>,
}

impl RankConfig {
    /// Returns the number of CPU kernel threads; `None` if a GPU computes.
    fn cpu_threads(&self) -> Option<usize> {
        self.gpus.is_none().then_some(self.threads)
    }

    /// Returns the settings of a request. Requests count from 0, like the chunks on the command
    /// line.
    pub(crate) fn chunk_settings(&self, request: u64) -> ChunkSettings {
        let chunk = u32::try_from(request).unwrap_or(u32::MAX);
        ChunkSettings {
            prompt: in_force(&self.prompts, chunk).cloned().unwrap_or_default(),
            seed: in_force(&self.seeds, chunk).copied().unwrap_or(0),
            cut: self.cut_at(chunk).is_cut() || self.reload_at(chunk).is_some(),
        }
    }

    fn stream_request(&self, chunk: u32) -> StreamRequest {
        let prompt = self.prompts.iter().rev().find(|(c, _)| *c == chunk).map(|(_, p)| p.clone());
        let seed = self.chunk_settings(u64::from(chunk)).seed;
        StreamRequest { prompt, seed, cut: self.cut_at(chunk), reload: self.reload_at(chunk) }
    }

    pub(crate) fn cut_at(&self, chunk: u32) -> SceneCut {
        match (self.flushes.contains(&chunk), self.cuts.contains(&chunk)) {
            (true, _) => SceneCut::Flush,
            (_, true) => SceneCut::Ordered,
            _ => SceneCut::None,
        }
    }

    fn reload_at(&self, chunk: u32) -> Option<Reload> {
        let found = self.weights.iter().find(|(c, ..)| *c == chunk);
        found.map(|(_, source, weights)| Reload { source: source.clone(), weights: *weights })
    }
}

/// Returns the value in force at a chunk: the last one set at or before it.
fn in_force<T>(changes: &[(u32, T)], chunk: u32) -> Option<&T> {
    changes.iter().filter(|(c, _)| *c <= chunk).max_by_key(|(c, _)| *c).map(|(_, v)| v)
}

/// Runs one rank to its end and returns the exit status of its process. `on_joined` is called once
/// the rank holds its links; from then on the launcher handles the first interrupt.
#[must_use]
pub fn rank_main(on_joined: impl FnOnce()) -> i32 {
    let joined = match join_launch() {
        Ok(j) => j,
        Err(d) => return print_diagnostics(&[d]),
    };
    on_joined();
    let orders: RankConfig = match serde_json::from_slice(&joined.welcome.payload) {
        Ok(o) => o,
        Err(e) => {
            eprintln!("tessera rank: the launcher's configuration cannot be parsed: {e}");
            return FailureClass::Parity.exit_code();
        }
    };
    let rank = Rank(joined.welcome.rank);
    let outcome = match RankSetup::from_launcher(joined, &orders) {
        Ok(arrival) if rank.0 == 0 => run_as_leader(|| Ok(arrival), &orders),
        Ok(arrival) => run_follower(|| Ok(arrival), &orders, rank),
        Err(refused) => refused.map(Some),
    };
    // Exit handlers of the GPU libraries would wait for work that never ends.
    let exit_process = if orders.gpus.is_some() { exit_without_handlers } else { exit_process };
    match outcome {
        // After a clean run the GPU libraries' exit handlers may run, however long they take.
        Ok(None) if orders.gpus.is_some() => exit_process(0),
        Ok(None) => 0,
        // The launcher prints the cause once. The leader prints it only if the launcher is gone.
        Ok(Some(f)) => {
            if rank.0 == 0 && f.class == FailureClass::LauncherGone {
                eprintln!("tessera: {}: {} ({})", f.class.as_str(), f.text, f.code);
            }
            exit_process(f.class.exit_code())
        }
        Err(ds) => print_diagnostics(&ds),
    }
}

fn print_diagnostics(ds: &[Diagnostic]) -> i32 {
    eprint!("{}", render_all(ds, DiagnosticFormat::Text, &|_| None));
    FailureClass::Preflight.exit_code()
}

/// The state of a rank before its run begins.
pub(crate) struct RankSetup {
    /// Identity and links of the rank.
    pub(crate) joined: JoinedRank,
    /// Communicator endpoints of the rank.
    pub(crate) communicators: EndpointSources,
    /// Settings derived from the plan.
    pub(crate) context: RankContext,
    /// Interrupt handle of a leader without a launcher.
    pub(crate) interrupt: Option<StopHandle>,
    /// Event handler of a leader without a launcher.
    pub(crate) on_event: Option<LeaderEventHandler>,
}

/// Handles the events of a leader, on the leader's thread.
pub(crate) type LeaderEventHandler = Box<dyn FnMut(LeaderEvent<'_>)>;

/// An event that a leader with a launcher reports to that launcher.
pub(crate) enum LeaderEvent<'a> {
    /// A chunk was delivered.
    Chunk(&'a Progress),
    /// The run ended with this failure.
    Failed(&'a Failure),
}

impl RankSetup {
    /// Builds the setup of a launched rank. `Err(Ok(failure))` means that the launcher or the
    /// leader has already received the failure.
    fn from_launcher(
        mut joined: JoinedRank,
        orders: &RankConfig,
    ) -> Result<RankSetup, Result<Failure, Diagnostics>> {
        let plan = load_plan(orders).map_err(|ds| report_refusal(&mut joined, ds))?;
        let common = RankContext::new(plan, orders.delays);
        let lanes = std::mem::take(&mut joined.extra_fds).into();
        Ok(RankSetup { joined, communicators: lanes, context: common, interrupt: None, on_event: None })
    }
}

/// Reports a problem found before the run begins. Returns the failure if a launcher or a leader
/// received it, and the diagnostics otherwise.
fn report_refusal(joined: &mut JoinedRank, ds: Diagnostics) -> Result<Failure, Diagnostics> {
    let Some(d) = ds.first() else { return Err(ds) };
    let rank = joined.welcome.rank;
    let place = if rank == 0 { CheckSite::Leader } else { CheckSite::Init };
    let failure = Failure::from_diagnostic(FailureClass::Preflight, Some(rank), d).with_site(place);
    if joined.report_refusal(&failure) { Ok(failure) } else { Err(ds) }
}

/// Reads and verifies the plan, and checks that its digest is the configured one.
fn load_plan(orders: &RankConfig) -> Result<Arc<Plan>, Diagnostics> {
    let plan = Plan::read(&orders.plan)?;
    let found = plan.sealed.digest_hex();
    if found != orders.digest {
        return Err(vec![
            Diagnostic::error(&crate::plan::T0012, "this rank reads another plan than the launcher")
                .with_label("launcher", format!("digest {}", orders.digest))
                .with_label(orders.plan.display().to_string(), format!("digest {found}")),
        ]);
    }
    Ok(Arc::new(plan))
}

/// Settings that the leader and the workers derive from the seal alone.
pub(crate) struct RankContext {
    plan: Arc<Plan>,
    digest: Digest,
    pub(crate) program_index: Arc<ProgramIndex>,
    pub(crate) stream: StreamSpec,
    limits: Limits,
    build: String,
    delays: SyntheticDelays,
    /// Topology of the control links.
    topology: ControlTopology,
    /// Codes of the tripwires that this rank does not check; empty except in a self-test.
    tripwires: Tripwires,
    /// Flight record; `None` if the rank is not its own process.
    flight: Option<Arc<FlightRecord>>,
    /// Digest of the peers, if the ranks joined by rendezvous.
    peers: Option<Digest>,
    /// GPU configuration, if the mesh runs on GPUs.
    gpus: Option<GpuRankConfig>,
    /// Fault injector of a drill.
    fault_injector: Option<FaultInjector>,
}

impl RankContext {
    pub(crate) fn new(plan: Arc<Plan>, delays: SyntheticDelays) -> RankContext {
        RankContext {
            digest: Digest(plan.sealed.digest()),
            program_index: Arc::new(build_program_index(&plan.sealed)),
            stream: stream_spec(&plan),
            limits: run_limits(&plan),
            build: build_id(),
            delays,
            topology: control_topology(&plan),
            tripwires: Tripwires::default(),
            flight: None,
            peers: None,
            gpus: None,
            fault_injector: None,
            plan,
        }
    }

    /// Sets the digest of the peers that joined by rendezvous.
    pub(crate) fn with_peers(self, peers: Digest) -> RankContext {
        RankContext { peers: Some(peers), ..self }
    }

    /// Applies the GPU configuration and the drill of a rank.
    fn apply_config(&mut self, orders: &RankConfig, rank: Rank) {
        self.gpus.clone_from(&orders.gpus);
        let Some(arming) = &orders.drill else { return };
        let hand = FaultInjector::new(arming, rank, &orders.out);
        let Limits { d_in, d_out, max_outstanding, .. } = self.limits;
        self.limits = Limits { d_in, d_out, max_outstanding, ..hand.run_limits().clone() };
        self.tripwires = hand.disabled_tripwires().clone();
        self.fault_injector = Some(hand);
    }

    fn adjust_parity(&self, parity: Parity) -> Parity {
        self.fault_injector.iter().fold(parity, |parity, hand| hand.announced_parity(parity))
    }

    fn build_interceptor(&self) -> Option<Interceptor> {
        self.fault_injector.as_ref().and_then(FaultInjector::build_interceptor)
    }

    /// Opens the flight record of this process.
    fn begin_flight(&mut self, orders: &RankConfig, session: u64, rank: Rank) {
        self.flight = FlightRecord::open(&orders.out, session, &self.plan.sealed, rank).map(Arc::new);
        self.write_mark(FlightEvent::Joined);
    }

    fn flight_sink(&self) -> Option<Arc<dyn FlightSink>> {
        self.flight.clone().map(|f| f as Arc<dyn FlightSink>)
    }

    fn write_mark(&self, mark: FlightEvent<'_>) {
        if let Some(flight) = &self.flight {
            flight.record_event(mark);
        }
    }

    /// Writes the last flight-record entries of this process: the failure, if any, and the exit
    /// status.
    fn end_flight(&self, outcome: &Result<Option<Failure>, Diagnostics>) {
        let failure = match outcome {
            Ok(failure) => failure.clone(),
            Err(ds) => ds.first().map(|d| Failure::from_diagnostic(FailureClass::Preflight, None, d)),
        };
        if let Some(f) = &failure {
            self.write_mark(FlightEvent::from_failure(f));
        }
        self.write_mark(FlightEvent::Exit { status: failure.map_or(0, |f| f.class.exit_code()) });
    }

    fn worker_config(&self, rank: Rank) -> WorkerConfig {
        WorkerConfig {
            rank: rank.0,
            upstream_rank: self.topology.leader_of(rank.0).unwrap_or(0),
            plan: self.fault_injector.iter().fold(self.digest, |plan, hand| hand.announced_plan(plan)),
            build: self.build.clone(),
            parity: Parity::default(),
            programs: Arc::clone(&self.program_index),
            cache: self.stream.cache,
            limits: self.limits.clone(),
            sends_output: self.plan.mesh_ranks().next() == Some(rank),
            tripwires: self.tripwires.clone(),
        }
    }

    fn mesh_leader_config(&self, rank: Rank) -> MeshLeaderConfig {
        MeshLeaderConfig {
            rank: rank.0,
            members: self.plan.mesh_ranks().filter(|r| *r != rank).map(|r| r.0).collect(),
            plan: self.digest,
            programs: Arc::clone(&self.program_index),
            cache: self.stream.cache,
            limits: self.limits.clone(),
            tripwires: self.tripwires.clone(),
        }
    }

    /// Returns the factory that loads programs and weights on the engine's thread.
    pub(crate) fn engine_factory(
        &self,
        rank: Rank,
        model: &Path,
        threads: usize,
        communicators: impl Into<EndpointSources>,
    ) -> EngineFactory {
        let (communicators, peers) = (communicators.into(), self.peers);
        let (plan, model) = (Arc::clone(&self.plan), model.to_path_buf());
        let (flight, tripwires) = (self.flight.clone(), self.tripwires.clone());
        let (delays, forwards) = (self.delays, self.stream.steps.len() as u64 + 1);
        let (drill, programs, gpus) =
            (self.fault_injector.clone(), Arc::clone(&self.program_index), self.gpus.clone());
        Box::new(move || {
            let mut weights =
                Model::open_for_plan(&model, &plan)?.open_weights().map_err(first_diagnostic)?;
            let (backend, device) = match &gpus {
                None => (build_cpu_backend(&plan, rank, threads, communicators)?, Vec::new()),
                Some(on) => {
                    let (cuda, device) = on.open_backend(&plan.sealed, rank, COLLECTIVE_PATIENCE)?;
                    // Dropping the backend would wait for peers and for the device, so it lives
                    // until the process exits.
                    (EngineBackend::Leaked(Box::leak(Box::new(cuda))), device)
                }
            };
            let engine = match &drill {
                None => MeshEngine::load(&plan.sealed, rank, backend, &mut weights)?,
                Some(hand) => {
                    let mut source = hand.weight_source(&mut weights, *plan.sealed.mesh());
                    let modify = |p: &mut Program| hand.modify_program(p);
                    MeshEngine::load_modified(&plan.sealed, rank, backend, &mut *source, &modify)?
                }
            };
            let weights_digest = weights.sample_digest();
            let mut engine = engine.with_weight_opener(weight_opener(Arc::clone(&plan), weights));
            engine.set_flight_record(flight);
            engine.arm_guard(tripwires.is_armed(&T0751));
            engine.arm_reload_guard(tripwires.is_armed(&T0737));
            let threads = gpus.is_none().then_some(threads);
            let placement = (gpus.is_some(), threads);
            let parity = rank_parity(&plan, weights_digest, &delays, engine.program_names(), placement);
            let parity =
                device.into_iter().fold(parity, |parity, (key, value)| parity.with_known_key(key, value));
            let parity = add_peers_to_groups(parity, &plan, peers);
            let parity = drill.iter().fold(parity, |parity, hand| hand.announced_parity(parity));
            let engine: Box<dyn Engine> = match &drill {
                None => Box::new(engine),
                Some(hand) => hand.wrap_engine(engine, &programs),
            };
            let engine = match delays.generate_ns {
                // A steady chunk runs one forward per step and one that recomputes or caches the
                // context.
                Some(ns) => Box::new(DelayedEngine::new(engine, ns, forwards)),
                None => engine,
            };
            Ok((engine, parity))
        })
    }
}

/// Creates the CPU backend of a rank.
fn build_cpu_backend(
    plan: &Plan,
    rank: Rank,
    threads: usize,
    communicators: EndpointSources,
) -> Result<EngineBackend, Diagnostic> {
    let ends = communicators::attach_endpoints(&plan.sealed, rank, communicators)?;
    let pool = Pool::new(threads)
        .map_err(|e| Diagnostic::error(&communicators::T0017, format!("threads of rank {rank}: {e}")))?;
    let mesh_rank = MeshRank { mesh: *plan.sealed.mesh(), rank };
    Ok(Box::new(CpuBackend::new(mesh_rank, pool, ends, COLLECTIVE_PATIENCE)).into())
}

/// Returns the build identification that every rank reports.
pub(crate) fn build_id() -> String {
    format!("tessera {}", env!("CARGO_PKG_VERSION"))
}

/// Returns the topology of a plan's control links.
pub(crate) fn control_topology(plan: &Plan) -> ControlTopology {
    if plan.mapping.topology.outside_ranks() == 0 {
        ControlTopology::Mesh
    } else {
        ControlTopology::ExternalLeader
    }
}

/// Returns the limits of a plan's runs.
pub(crate) fn run_limits(plan: &Plan) -> Limits {
    Limits {
        d_in: plan.mapping.d_in,
        d_out: plan.mapping.d_out,
        max_outstanding: plan.mapping.max_outstanding,
        ..Limits::default()
    }
}

pub(crate) fn stream_spec(plan: &Plan) -> StreamSpec {
    let (s, wan) = (&plan.video.stream, &plan.video.wan);
    StreamSpec {
        cache: CacheSpec {
            regime: if s.recompute { CacheRegime::Recompute } else { CacheRegime::Resident },
            chunk_frames: s.chunk_frames as u32,
            window_frames: s.window_frames as u32,
            table_frames: wan.rope_frames as u32,
            tokens_per_frame: plan.video.frame_tokens() as u32,
        },
        bias: s.bias as f32,
        steps: denoising_steps(s)
            .into_iter()
            .map(|s| DenoiseStep { timestep: s.timestep, sigma: s.sigma })
            .collect(),
    }
}

/// Runs a rank other than the leader.
pub(crate) fn run_follower(
    arrive: impl FnOnce() -> Result<RankSetup, Diagnostics>,
    orders: &RankConfig,
    rank: Rank,
) -> Result<Option<Failure>, Diagnostics> {
    let RankSetup { joined, communicators: lanes, context: mut common, .. } = arrive()?;
    common.apply_config(orders, rank);
    common.begin_flight(orders, joined.welcome.session, rank);
    let engine = common.engine_factory(rank, &orders.model, orders.threads, lanes);
    let (config, flight, tap) =
        (common.worker_config(rank), common.flight_sink(), common.build_interceptor());
    // If the leader is outside the mesh, the first mesh rank relays its messages to the others.
    let outcome = if common.topology == ControlTopology::ExternalLeader
        && common.plan.mesh_ranks().next() == Some(rank)
    {
        let (relay, engine) = (common.mesh_leader_config(rank), (config, engine));
        run_mesh_leader(
            joined,
            MeshLeaderParts { config: relay, local_rank: engine, flight, interceptor: tap },
        )
    } else {
        run_worker(
            joined,
            WorkerParts { config, engine, topology: common.topology, flight, interceptor: tap },
        )
    };
    common.end_flight(&outcome);
    outcome
}

/// Runs the leader, which writes the record.
pub(crate) fn run_as_leader(
    arrive: impl FnOnce() -> Result<RankSetup, Diagnostics>,
    orders: &RankConfig,
) -> Result<Option<Failure>, Diagnostics> {
    let record = Arc::new(Mutex::new(RecordWriter::open(&orders.out).map_err(|d| vec![d])?));
    let setup = arrive().map(|arrival| {
        let RankSetup { joined, communicators: lanes, context: mut common, interrupt, on_event: tell } =
            arrival;
        let session = joined.welcome.session;
        common.apply_config(orders, Rank(0));
        common.begin_flight(orders, session, Rank(0));
        let parts = build_leader_parts(session, lanes, orders, &common, &record, tell);
        (joined, common, parts.map(|parts| LeaderParts { stop: interrupt, ..parts }))
    });
    let outcome = match setup {
        Ok((joined, common, Ok(parts))) => {
            let outcome = run_leader(joined, parts);
            common.end_flight(&outcome);
            outcome
        }
        Ok((mut joined, common, Err(ds))) => {
            let outcome = report_refusal(&mut joined, ds).map(Some);
            common.end_flight(&outcome);
            outcome
        }
        Err(ds) => Err(ds),
    };
    let failure = match &outcome {
        Ok(f) => f.clone(),
        Err(ds) => ds.first().map(|d| Failure::from_diagnostic(FailureClass::Preflight, Some(0), d)),
    };
    let mut record = lock_record(&record);
    let complete = record.settled_requests() == orders.chunks;
    // A successful run closed the record together with its output. If closing fails here, the
    // launcher finds a record without an end and closes it.
    let _ = record.write_end(failure.as_ref(), complete);
    outcome
}

/// Returns the ranks that output no latents: those after the first stage.
pub(crate) fn ranks_without_latents(plan: &Plan) -> Vec<u32> {
    let mesh = plan.sealed.mesh();
    plan.mesh_ranks().filter(|r| mesh.coord_of(*r).on_axis(Axis::Pp) > 0).map(|r| r.0).collect()
}

fn build_leader_parts(
    session: u64,
    communicators: EndpointSources,
    orders: &RankConfig,
    context: &RankContext,
    record: &Arc<Mutex<RecordWriter>>,
    mut on_event: Option<LeaderEventHandler>,
) -> Result<LeaderParts, Diagnostics> {
    lock_record(record).set_collective_counts(&context.plan.sealed);
    let ranks: Vec<Rank> = context.plan.mesh_ranks().collect();
    let parity = rank_parity(
        &context.plan,
        Model::open_for_plan(&orders.model, &context.plan)
            .map_err(|d| vec![d])?
            .open_weights()?
            .sample_digest(),
        &orders.delays,
        mesh_phases(&context.plan.sealed),
        (orders.gpus.is_some(), orders.cpu_threads().filter(|_| ranks.contains(&Rank(0)))),
    );
    let config = LeaderConfig {
        ranks: ranks.iter().map(|r| r.0).collect(),
        plan: context.digest,
        session,
        build: context.build.clone(),
        ranks_without_output: ranks_without_latents(&context.plan),
        parity: context.adjust_parity(add_peers_to_groups(parity, &context.plan, context.peers)),
        programs: Arc::clone(&context.program_index),
        stream: context.stream.clone(),
        limits: context
            .fault_injector
            .iter()
            .fold(context.limits.clone(), |limits, hand| hand.leader_limits(limits)),
        tripwires: context.tripwires.clone(),
    };
    let own_engine = ranks.contains(&Rank(0)).then(|| {
        let engine = context.engine_factory(Rank(0), &orders.model, orders.threads, communicators);
        (context.worker_config(Rank(0)), engine)
    });
    let media_pipeline = {
        let (plan, orders, record) = (Arc::clone(&context.plan), orders.clone(), Arc::clone(record));
        let drill = context.fault_injector.clone();
        Box::new(move || {
            let words =
                Model::open_for_plan(&orders.model, &plan)?.open_text_encoder().map_err(first_diagnostic)?;
            let pipeline = RunMediaPipeline::new(&plan, words, &orders, record)?;
            let pipeline: Box<dyn MediaPipeline> = Box::new(pipeline);
            Ok(drill.iter().fold(pipeline, |pipeline, hand| hand.wrap_media_pipeline(pipeline)))
        })
    };
    let requests = {
        let chunks = orders.chunks;
        let (orders, drill) = (orders.clone(), context.fault_injector.clone());
        let chunk_request = move |c| {
            drill
                .iter()
                .fold(orders.stream_request(c), |chunk_request, hand| hand.modify_request(c, chunk_request))
        };
        Box::new((0..chunks).map(chunk_request))
    };
    let on_record_entry = {
        let (orders, record) = (orders.clone(), Arc::clone(record));
        Box::new(move |entry: RecordEntry<'_>| {
            if let Some(on_event) = &mut on_event {
                match &entry {
                    RecordEntry::Progress(p) => on_event(LeaderEvent::Chunk(p)),
                    RecordEntry::Failed(f) => on_event(LeaderEvent::Failed(f)),
                    _ => {}
                }
            }
            let mut record = lock_record(&record);
            // An error here also makes the delivery fail, and the media pipeline reports it there.
            let _ = match entry {
                RecordEntry::Call(call) => {
                    let chunk_request =
                        call.request.filter(|_| !call.discarded).map(|r| orders.chunk_settings(r));
                    record.record_call(call, chunk_request.as_ref(), None);
                    Ok(())
                }
                // The media pipeline records the delivery itself.
                RecordEntry::Progress(_) => Ok(()),
                RecordEntry::Note(note) => record.write_event("note", note),
                RecordEntry::Failed(f) => record.write_event("failed", &f.text),
                RecordEntry::Dropped { request, epoch, why, .. } => {
                    record.record_dropped(request, epoch, why)
                }
                RecordEntry::Lost { call_id, chunk, epoch, ready, done } => record.write_event(
                    "lost",
                    &format!("call {call_id}, chunk {chunk}, epoch {epoch}: ready {ready:?}, done {done:?}"),
                ),
            };
        })
    };
    Ok(LeaderParts {
        config,
        local_rank: own_engine,
        topology: context.topology,
        media: media_pipeline,
        requests,
        record: on_record_entry,
        stop: None,
        flight: context.flight_sink(),
        interceptor: context.build_interceptor(),
    })
}

/// Returns the first of several diagnostics, because an engine thread reports only one.
pub(crate) fn first_diagnostic(ds: Diagnostics) -> Diagnostic {
    ds.into_iter()
        .next()
        .unwrap_or_else(|| Diagnostic::error(&crate::model::T0010, "no diagnostic was given"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_that_cannot_begin_marks_it() {
        let dir = tempfile::tempdir().unwrap();
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let model = Model::open(&demo, &crate::Overrides::default()).unwrap();
        let plan =
            crate::plan::plan_model(&model.video, &model.name, "", &crate::Mapping::default()).unwrap();
        let options = crate::stream::StreamOptions {
            chunks: 1,
            out: dir.path().join("out"),
            ..crate::stream::StreamOptions::default()
        };
        let mut orders = crate::stream::build_rank_config(&plan, &model, &options, 1).unwrap();
        crate::stream::write_run_dir(&plan, &orders, &options).unwrap();
        // The model folder disappears after the ranks have connected.
        orders.model = dir.path().join("gone");
        let welcome = tessera_runtime::wire::Welcome {
            rank: 0,
            world_size: 1,
            session: 7,
            control_sockets: 0,
            extra_fds: 0,
            payload: Vec::new(),
        };
        let arrival = RankSetup {
            joined: JoinedRank::from_links(welcome, Vec::new(), Vec::new()),
            communicators: Vec::new().into(),
            context: RankContext::new(Arc::new(plan), orders.delays),
            interrupt: None,
            on_event: None,
        };
        let refused = run_as_leader(|| Ok(arrival), &orders).unwrap_err();
        assert_eq!(refused[0].code.id, "T0010");
        let flight = std::fs::read_to_string(options.out.join("flight/rank-0.jsonl")).unwrap();
        assert!(flight.contains("failed") && flight.contains("T0010") && flight.contains("exit"), "{flight}");
    }

    #[test]
    fn rank_config_survives_serialisation() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let model = Model::open(&demo, &crate::Overrides::default()).unwrap();
        let plan =
            crate::plan::plan_model(&model.video, &model.name, "", &crate::Mapping::default()).unwrap();
        let options = crate::stream::StreamOptions {
            chunks: 3,
            seed: 7,
            out: "run".into(),
            ..crate::stream::StreamOptions::default()
        };
        let orders = crate::stream::build_rank_config(&plan, &model, &options, 2).unwrap();
        assert_eq!(orders.cpu_threads(), Some(2));
        let on =
            GpuRankConfig { communicator_ids: vec!["ab".repeat(128), String::new()], first_rank_of_host: 0 };
        let orders = RankConfig { gpus: Some(on.clone()), ..orders };
        let payload = serde_json::to_vec(&orders).unwrap();
        let read: RankConfig = serde_json::from_slice(&payload).unwrap();
        assert_eq!((read.gpus.as_ref(), read.cpu_threads()), (Some(&on), None));
        assert_eq!(serde_json::to_vec(&read).unwrap(), payload);
    }

    #[test]
    fn changes_hold_from_their_chunk_on() {
        let changes = [(0, "a"), (4, "b"), (2, "c")];
        let at = |c| in_force(&changes, c).copied();
        assert_eq!(
            [at(0), at(1), at(2), at(3), at(4), at(99)].map(Option::unwrap),
            ["a", "a", "c", "c", "b", "b"]
        );
    }
}
