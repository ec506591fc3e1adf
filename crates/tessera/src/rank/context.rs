//! What a rank derives from its plan and its configuration before it runs, and the engine that it
//! builds from them.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cpu::{CpuBackend, Pool};
use tessera_cuda::{CudaBackend, GpuCallArrays};
use tessera_device::{MeshRank, WeightSource};
use tessera_ir::{Op, Program};
use tessera_mesh::Rank;
use tessera_report::flight::{FlightEntry, FlightMark};
use tessera_runtime::call_state::SessionSpec;
use tessera_runtime::driver::{ControlTopology, EngineFactory, Interceptor, JoinedRank, StopHandle};
use tessera_runtime::engine::{Engine, T0737};
use tessera_runtime::flight::{FlightEvent, FlightSink};
use tessera_runtime::leader::LeaderConfig;
use tessera_runtime::mesh_leader::MeshLeaderConfig;
use tessera_runtime::program_index::ProgramIndex;
use tessera_runtime::tripwire::{T0751, T0757, T0773, T0785};
use tessera_runtime::wire::Progress;
use tessera_runtime::worker::WorkerConfig;
use tessera_runtime::{CheckSite, Digest, Failure, FailureClass, Limits, Parity, T0770, Tripwires};
use tessera_verify::SealedPlan;

use super::rank_plan::RankPlan;
use crate::clock::monotonic_ns;
use crate::codes::T0017;
use crate::collective_guard::ArmedGuards;
use crate::communicators::{self, EndpointSources, JoinOrder};
use crate::cuda::{GpuRankConfig, GpuThreadRanks};
use crate::engine::{EngineBackend, MeshEngine, build_program_index, mesh_phases};
use crate::environment::{environment_keys, process_environment};
use crate::faults::{DrillEngine, FaultInjector};
use crate::flight::FlightRecord;
use crate::kernel_probe::{is_unprobed, plan_probes, probe_placement, run_probes, single_ops};
use crate::parity::{ExecutorState, rank_parity};
use crate::rank_config::RankSettings;
use crate::run_settings::build_id;
use crate::stated_transports::check_transports;
use crate::synthetic_delays::{ForwardDelay, SyntheticDelays};
use crate::system::available_bytes;
use crate::transfer_log::{TransferLog, TransferPlace};
use crate::wire_dump::{dump_path, dump_sent_messages};

/// Maximum wait inside one collective. The lockstep detects stalls from progress and learned
/// limits; this timeout only ends a wait that no process monitors any more.
const COLLECTIVE_PATIENCE: Duration = Duration::from_secs(3600);

/// Maximum wait inside one collective of ranks on GPUs that are threads, which no other process monitors.
const THREAD_PATIENCE: Duration = Duration::from_secs(300);

/// The state of a rank before its run begins.
pub(crate) struct RankSetup<P> {
    /// Identity and links of the rank.
    pub(crate) joined: JoinedRank,
    /// Arenas or streams from which the rank builds its communicator endpoints.
    pub(crate) communicators: EndpointSources,
    /// Settings derived from the plan.
    pub(crate) context: RankContext<P>,
    /// Open destinations of uncompressed frames, in the order of the options, and behind them the socket on which calls
    /// of array programs or changes of a stream arrive; only on the leader.
    pub(crate) frame_pipes: Vec<OwnedFd>,
    /// Interrupt handle of a leader without a launcher.
    pub(crate) interrupt: Option<StopHandle>,
    /// Event handler of a leader without a launcher.
    pub(crate) on_event: Option<LeaderEventHandler>,
}

/// Handles the events of a leader, on the leader's thread.
pub(crate) type LeaderEventHandler = Box<dyn FnMut(LeaderEvent<'_>)>;

/// An event that a leader without a launcher passes to its [`LeaderEventHandler`].
pub(crate) enum LeaderEvent<'a> {
    /// The media pipeline delivered a chunk: its index, frames, phase times and queue lengths.
    Chunk(&'a Progress),
    /// The run failed; peers have the failure already, and this process ends soon.
    Failed(&'a Failure),
}

/// Settings that the leader and the workers derive from the seal alone.
pub(crate) struct RankContext<P> {
    pub(crate) plan: Arc<P>,
    pub(crate) digest: Digest,
    pub(crate) program_index: Arc<ProgramIndex>,
    pub(crate) session_spec: SessionSpec,
    pub(crate) limits: Limits,
    pub(super) build: String,
    pub(super) delays: SyntheticDelays,
    /// Whether the leader has a control link to every rank, or only to the mesh leader.
    pub(crate) topology: ControlTopology,
    /// Codes of the tripwires that this rank does not check; empty except in a self-test.
    pub(crate) tripwires: Tripwires,
    /// Flight record; `None` if the rank is not its own process.
    pub(super) flight: Option<Arc<FlightRecord>>,
    /// Digest of the peers, if the ranks joined by rendezvous.
    pub(crate) peers: Option<Digest>,
    /// GPU configuration, if the mesh runs on GPUs.
    pub(super) gpus: Option<GpuRankConfig>,
    /// What the ranks of an in-process run on GPUs share; `None` for ranks on CPUs and for ranks that are processes.
    pub(super) gpu_threads: Option<GpuThreadRanks>,
    /// File for the messages that this rank sends, if they are written at all.
    pub(super) wire_dump: Option<PathBuf>,
    /// Whether the backend poisons temporaries that hold no value.
    pub(super) poison: bool,
    /// Where this rank reports the transfers of experts, if its plan has any.
    pub(crate) transfers: Option<TransferPlace>,
    /// Whether each rank reports the times of single ops.
    pub(crate) times_single_ops: bool,
    /// Fault injector of this rank; `None` outside of drills.
    pub(crate) fault_injector: Option<FaultInjector>,
}

impl<P: RankPlan> RankContext<P> {
    pub(crate) fn new(plan: Arc<P>, delays: SyntheticDelays) -> RankContext<P> {
        RankContext {
            digest: Digest(plan.sealed().digest()),
            program_index: Arc::new(build_program_index(plan.sealed())),
            session_spec: plan.session_spec(),
            limits: plan.limits(),
            build: build_id(),
            delays,
            topology: plan.control_topology(),
            tripwires: Tripwires::default(),
            flight: None,
            peers: None,
            gpus: None,
            gpu_threads: None,
            wire_dump: None,
            poison: false,
            transfers: None,
            times_single_ops: false,
            fault_injector: None,
            plan,
        }
    }

    /// Sets the digest of the peers that joined by rendezvous.
    pub(crate) fn with_peers(self, peers: Digest) -> RankContext<P> {
        RankContext { peers: Some(peers), ..self }
    }

    /// Makes the ranks threads of this process on GPUs, with the arrays of their calls in GPU memory.
    pub(crate) fn with_gpu_threads(self, gpus: GpuRankConfig, threads: GpuThreadRanks) -> RankContext<P> {
        RankContext { gpus: Some(gpus), gpu_threads: Some(threads), ..self }
    }

    pub(crate) fn runs_on_gpus(&self) -> bool {
        self.gpus.is_some()
    }

    /// Ends all waits of loading ranks for each other, because one of them has failed to load.
    pub(crate) fn abort_loads(&self) {
        self.gpu_threads.iter().for_each(GpuThreadRanks::abort);
    }

    /// Applies the GPU configuration and the drill of a rank.
    pub(super) fn apply_settings(&mut self, settings: &RankSettings<'_>, rank: Rank) {
        self.gpus = settings.gpus.cloned();
        self.poison = settings.poison;
        self.transfers = Some(TransferPlace::Folder(settings.out.to_path_buf()));
        self.times_single_ops = settings.times_single_ops;
        self.wire_dump = settings.wire_dump.then(|| dump_path(settings.out, rank.0));
        let Some(arming) = settings.drill else { return };
        let hand = FaultInjector::new(arming, rank, settings.out);
        let Limits { d_in, d_out, max_outstanding, .. } = self.limits;
        self.limits = Limits { d_in, d_out, max_outstanding, ..hand.run_limits().clone() };
        self.tripwires = hand.disabled_tripwires().clone();
        self.fault_injector = Some(hand).filter(FaultInjector::is_armed_here);
    }

    pub(super) fn adjust_parity(&self, parity: Parity) -> Parity {
        self.fault_injector.iter().fold(parity, |parity, hand| hand.announced_parity(parity))
    }

    /// Returns the interceptor of a drill and of a wire dump, if there is one.
    ///
    /// # Errors
    /// T0014 if the file of the dump cannot be created.
    pub(crate) fn build_interceptor(&self, rank: Rank) -> Result<Option<Interceptor>, Diagnostic> {
        let injector = self.fault_injector.as_ref().and_then(FaultInjector::build_interceptor);
        match &self.wire_dump {
            None => Ok(injector),
            Some(path) => dump_sent_messages(path.clone(), rank.0, injector).map(Some),
        }
    }

    /// Opens the flight record of this process.
    pub(super) fn begin_flight(&mut self, out: &Path, session: u64, rank: Rank) {
        self.flight = FlightRecord::open(out, session, self.plan.sealed(), rank).map(Arc::new);
        self.write_mark(FlightEvent::Joined);
    }

    pub(crate) fn flight_sink(&self) -> Option<Arc<dyn FlightSink>> {
        self.flight.clone().map(|f| f as Arc<dyn FlightSink>)
    }

    pub(super) fn write_mark(&self, mark: FlightEvent<'_>) {
        if let Some(flight) = &self.flight {
            flight.record_event(mark);
        }
    }

    /// Writes the last flight-record entries of this process: the failure, if any, and the exit
    /// status.
    pub(super) fn end_flight(&self, outcome: &Result<Option<Failure>, Diagnostics>) {
        let failure = match outcome {
            Ok(failure) => failure.clone(),
            Err(ds) => ds.first().map(|d| Failure::from_diagnostic(FailureClass::Preflight, None, d)),
        };
        if let Some(f) = &failure {
            self.write_mark(FlightEvent::from_failure(f));
        }
        self.write_mark(FlightEvent::Exit { status: failure.map_or(0, |f| f.class.exit_code()) });
    }

    pub(crate) fn worker_config(&self, rank: Rank) -> WorkerConfig {
        WorkerConfig {
            rank: rank.0,
            upstream_rank: self.topology.leader_of(rank.0).unwrap_or(0),
            plan: self.fault_injector.iter().fold(self.digest, |plan, hand| hand.announced_plan(plan)),
            build: self.build.clone(),
            parity: Parity::default(),
            programs: Arc::clone(&self.program_index),
            session_spec: self.session_spec.clone(),
            limits: self.limits.clone(),
            sends_output: self.plan.output_groups().iter().any(|group| group.first() == Some(&rank.0)),
            tripwires: self.tripwires.clone(),
        }
    }

    pub(super) fn mesh_leader_config(&self, rank: Rank) -> MeshLeaderConfig {
        MeshLeaderConfig {
            rank: rank.0,
            members: self.plan.computing_ranks().into_iter().filter(|r| *r != rank).map(|r| r.0).collect(),
            plan: self.digest,
            programs: Arc::clone(&self.program_index),
            session_spec: self.session_spec.clone(),
            limits: self.limits.clone(),
            tripwires: self.tripwires.clone(),
        }
    }

    /// Returns the configuration of the leader of a session, whose own parity facts these are.
    pub(crate) fn leader_config(&self, session: u64, parity: Parity) -> LeaderConfig {
        let limits = self.limits.clone();
        LeaderConfig {
            ranks: self.plan.computing_ranks().iter().map(|r| r.0).collect(),
            plan: self.digest,
            session,
            build: self.build.clone(),
            output_groups: self.plan.output_groups(),
            parity: self.adjust_parity(parity),
            hosts: self.plan.sealed().hosts().map(|stated| stated.hosts.clone()),
            programs: Arc::clone(&self.program_index),
            session_spec: self.session_spec.clone(),
            limits: self.fault_injector.iter().fold(limits, |limits, hand| hand.leader_limits(limits)),
            tripwires: self.tripwires.clone(),
        }
    }

    /// Returns the worker and the engine of a leader that computes too.
    pub(crate) fn local_rank(
        &self,
        place: P::WeightsPlace,
        threads: usize,
        communicators: impl Into<EndpointSources>,
    ) -> Option<(WorkerConfig, EngineFactory)> {
        let computes = self.plan.computing_ranks().contains(&Rank(0));
        computes.then(|| {
            (self.worker_config(Rank(0)), self.engine_factory(Rank(0), place, threads, communicators))
        })
    }

    /// Returns the factory that loads programs and weights on the engine's thread.
    pub(crate) fn engine_factory(
        &self,
        rank: Rank,
        place: P::WeightsPlace,
        threads: usize,
        communicators: impl Into<EndpointSources>,
    ) -> EngineFactory {
        let (communicators, peers) = (communicators.into(), self.peers);
        let plan = Arc::clone(&self.plan);
        let (flight, tripwires) = (self.flight.clone(), self.tripwires.clone());
        // A steady chunk runs one forward per step and one that recomputes or caches the context.
        let (delays, forwards) = (self.delays, self.plan.forwards_per_call());
        let delay = delays.generate_ns.map(|ns| ForwardDelay::new(ns, forwards));
        let (drill, programs, gpus) =
            (self.fault_injector.clone(), Arc::clone(&self.program_index), self.gpus.clone());
        let (poison, transfers) = (self.poison, self.transfers.clone());
        let shared = self.gpu_threads.as_ref();
        let call_arrays = shared.and_then(|shared| shared.arrays.get(&rank).cloned());
        let thread_rank = shared.and_then(|shared| shared.place_of(rank));
        let times_single_ops = self.times_single_ops;
        Box::new(move || {
            let sealed = plan.sealed();
            let mut model = plan.open_model(place, drill.as_ref())?;
            let order = drill.as_ref().map_or(JoinOrder::OfPlan, FaultInjector::join_order);
            let mut backend = match &gpus {
                None => {
                    let joined = (communicators, order);
                    Box::new(build_cpu_backend(sealed, rank, threads, joined, COLLECTIVE_PATIENCE)?).into()
                }
                Some(on) => {
                    let check = tripwires.is_armed(&T0757);
                    let patience = if thread_rank.is_some() { THREAD_PATIENCE } else { COLLECTIVE_PATIENCE };
                    let cuda = on.open_backend(sealed, (rank, thread_rank), patience, (order, check))?;
                    keep_gpu_backend(cuda, call_arrays.as_ref())
                }
            };
            if poison {
                backend.poison_temporaries();
            }
            let engine = match &drill {
                None => MeshEngine::load(sealed, rank, backend, model.weights())?,
                Some(hand) => load_with_fault(sealed, rank, backend, model.weights(), (hand, &tripwires))?,
            };
            let (files, opener) = model.into_facts()?;
            let mut engine = opener.into_iter().fold(engine, MeshEngine::with_weight_opener);
            engine.set_flight_record(flight.clone());
            engine.time_single_ops(times_single_ops);
            engine.set_delay(delay);
            engine.set_call_arrays(call_arrays);
            let reported = transfers.filter(|_| has_expert_tiers(sealed, rank));
            engine.set_transfer_log(reported.map(|place| TransferLog::open(&place, rank)).transpose()?);
            arm_guards(&mut engine, drill.as_ref(), &tripwires);
            let state = ExecutorState::from_engine(sealed, rank, &engine);
            record_transports(sealed, rank, &state, flight.as_deref())?;
            let parity = rank_parity((sealed, plan.mapping()), &files, &delays, &state, peers);
            let modify = |p: &mut Program| drill.iter().for_each(|hand| hand.modify_probe(p));
            let begun_ns = monotonic_ns();
            let kernels = probe_kernels(sealed, rank, gpus.as_ref(), &mut engine, &modify)?;
            if let Some(flight) = &flight {
                flight.append_line(monotonic_ns(), &describe_probe(&kernels, begun_ns));
            }
            let parity = kernels
                .into_iter()
                .chain(environment_keys(process_environment()))
                .fold(parity, |parity, (key, value)| parity.with_known_key(&key, value));
            let parity = drill.iter().fold(parity, |parity, hand| hand.announced_parity(parity));
            let engine: Box<dyn Engine> = match &drill {
                None => Box::new(engine),
                Some(hand) => Box::new(DrillEngine::new(engine, hand.clone(), programs)),
            };
            Ok((engine, parity))
        })
    }
}

/// Arms the guards of an engine, except those that a drill disarms.
fn arm_guards(engine: &mut MeshEngine, drill: Option<&FaultInjector>, tripwires: &Tripwires) {
    let is_guarded = drill.is_none_or(FaultInjector::arms_collective_guard);
    engine.arm_guards(ArmedGuards {
        collectives: is_guarded && tripwires.is_armed(&T0751),
        captures: tripwires.is_armed(&T0785),
        halos: tripwires.is_armed(&T0773),
    });
    engine.arm_reload_guard(tripwires.is_armed(&T0737));
}

/// Decides how long the backend of a rank on a GPU lives. Dropping that of a process would wait for peers and for
/// the device, so it lives until the process exits. Ranks that are threads drop theirs together, and their process goes on
/// and needs the memory.
fn keep_gpu_backend(mut cuda: CudaBackend, call_arrays: Option<&Arc<GpuCallArrays>>) -> EngineBackend {
    match call_arrays {
        None => EngineBackend::Leaked(Box::leak(Box::new(cuda))),
        Some(arrays) => {
            cuda.set_call_arrays(Arc::clone(arrays));
            EngineBackend::Owned(Box::new(cuda))
        }
    }
}

/// Writes the transports of a rank into its flight record, and then checks them.
///
/// # Errors
/// T0069.
fn record_transports(
    plan: &SealedPlan,
    rank: Rank,
    state: &ExecutorState,
    flight: Option<&FlightRecord>,
) -> Result<(), Diagnostic> {
    let transports = state.transports(plan);
    for (flight, transport) in flight.iter().flat_map(|f| transports.iter().map(move |t| (f, t))) {
        flight.append_line(monotonic_ns(), &transport.flight_entry());
    }
    check_transports(plan, rank, &transports)
}

/// Returns whether experts of a rank lie in two tiers of memory.
fn has_expert_tiers(plan: &SealedPlan, rank: Rank) -> bool {
    let mut programs = mesh_phases(plan).filter_map(|phase| plan.rank_program(phase, rank));
    programs.any(|program| program.ops.iter().any(Op::states_tier))
}

/// Loads the engine of a rank with the changes of a drill.
fn load_with_fault(
    plan: &SealedPlan,
    rank: Rank,
    mut backend: EngineBackend,
    weights: &mut dyn WeightSource,
    (hand, tripwires): (&FaultInjector, &Tripwires),
) -> Result<MeshEngine, Diagnostic> {
    hand.modify_backend(&mut *backend);
    let mut source = hand.weight_source(weights, *plan.mesh());
    let modify = |p: &mut Program| hand.modify_program(p);
    let mut engine = MeshEngine::load_modified(plan, rank, backend, &mut *source, &modify)?;
    if tripwires.is_armed(&T0770) {
        engine.check_weights_finite()?;
    }
    Ok(engine)
}

/// Reports a problem found before the run begins. Returns the failure if a launcher or a leader
/// received it, and the diagnostics otherwise.
pub(crate) fn report_refusal(joined: &mut JoinedRank, ds: Diagnostics) -> Result<Failure, Diagnostics> {
    let Some(d) = ds.first() else { return Err(ds) };
    let rank = joined.welcome.rank;
    let place = if rank == 0 { CheckSite::Leader } else { CheckSite::Init };
    let failure = Failure::from_diagnostic(FailureClass::Preflight, Some(rank), d).with_site(place);
    if joined.report_refusal(&failure) { Ok(failure) } else { Err(ds) }
}

/// Runs every kernel of a rank's programs on fixed inputs, and returns parity keys with digests.
fn probe_kernels(
    plan: &SealedPlan,
    rank: Rank,
    gpus: Option<&GpuRankConfig>,
    engine: &mut MeshEngine,
    modify: &dyn Fn(&mut Program),
) -> Result<Vec<(String, String)>, Diagnostic> {
    let kernels = |phase| {
        let (program, slots) = (plan.rank_program(phase, rank)?, plan.rank_slots(phase, rank)?);
        let launched =
            if gpus.is_some() { tessera_cuda::launched_ops(program, slots) } else { single_ops(program) };
        Some((&**program, launched))
    };
    let probes = plan_probes(mesh_phases(plan).filter_map(kernels));
    let place = probe_placement();
    let mut keys = match gpus {
        None => {
            let pool = Pool::single_thread();
            let mut cpu = CpuBackend::new(place, pool, Vec::new(), COLLECTIVE_PATIENCE);
            run_probes(probes, &mut cpu, modify)
        }
        Some(on) => {
            let mut cuda = on.open_probe_backend(plan, rank, place, COLLECTIVE_PATIENCE)?;
            run_probes(probes, &mut cuda, modify)
        }
    }?;
    keys.extend(engine.probe_gemms()?);
    Ok(keys)
}

/// Describes a probe of kernels that began at a time of the monotonic clock.
fn describe_probe(keys: &[(String, String)], begun_ns: u64) -> FlightEntry {
    let unprobed = keys.iter().filter(|(_, value)| is_unprobed(value)).count();
    let ms = (monotonic_ns() - begun_ns) as f64 / 1e6;
    let detail = Some(format!("{} kernels, {unprobed} of them not probed, in {ms:.1} ms", keys.len()));
    FlightEntry::Mark(FlightMark { event: "probed".to_string(), detail, ..FlightMark::default() })
}

/// Opens the CPU backend of a rank, whose collectives wait at most `patience` for a peer.
///
/// # Errors
/// T0017 if its threads or its communicators cannot be set up.
pub(crate) fn build_cpu_backend(
    plan: &SealedPlan,
    rank: Rank,
    threads: usize,
    (communicators, order): (EndpointSources, JoinOrder),
    patience: Duration,
) -> Result<CpuBackend, Diagnostic> {
    let ends = communicators::attach_endpoints(plan, rank, communicators, order)?;
    let pool =
        Pool::new(threads).map_err(|e| Diagnostic::error(&T0017, format!("threads of rank {rank}: {e}")))?;
    let mesh_rank = MeshRank { mesh: *plan.mesh(), rank };
    let mut cpu = CpuBackend::new(mesh_rank, pool, ends, patience);
    available_bytes().into_iter().for_each(|bytes| cpu.limit_memory(bytes));
    Ok(cpu)
}
