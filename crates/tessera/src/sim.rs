//! Runs a sealed plan on a simulated machine: the real leader, mesh leader and workers run over
//! simulated devices, in one process and without waiting for wall-clock time.
//!
//! Every envelope, ready, commit and done is a real message between the real state machines; every
//! rank's caches change as in a real run, and every rank's collectives are hashed and compared with
//! the trace digest in the seal. Only time is simulated: [`ClusterPrices`] gives the durations of
//! ops and transfers, [`HOP_LATENCY_NS`] the latency of control messages. Nothing of the model is
//! computed: latents are digests of a rank's inputs, prompts and contexts are placeholders of the
//! right shape, and weights are not read.
//!
//! The leader encodes and decodes on rank 0's device. If rank 0 is part of the mesh, decode and
//! phases alternate on its device and the other ranks wait in their next collective, as in the
//! planner's estimate.

mod op_trace;
mod prices;
mod sim_engine;
mod world;

pub use prices::{ClusterPrices, to_bundle};

use std::path::Path;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_device::TimingModel;
use tessera_mesh::Rank;
use tessera_report::record::{RunDevice, RunStart};
use tessera_runtime::call_state::SessionSpec;
use tessera_runtime::director::ChunkRequest;
use tessera_runtime::driver::StopHandle;
use tessera_runtime::driver::StreamRequest;
use tessera_runtime::leader::LeaderConfig;
use tessera_runtime::sim::{ExternalEvent, Sim, SimConfig, SimOutcome};
use tessera_runtime::{Digest, Failure, FailureClass, Parity, Tripwires};

use crate::engine::build_program_index;
use crate::model::Model;
use crate::plan::Plan;
use crate::rank_config::RankConfig;
use crate::record::RecordWriter;
use crate::run_dir_writer::{close_run_with_ops, start_line, write_run_dir_with};
use crate::run_settings::{build_id, ranks_with_latents, run_limits, stream_spec};
use crate::stream_options::{StreamEvent, StreamOptions, StreamReport};

use crate::codes::{T0016, T0018, T0040};
use world::SimWorld;

/// Latency of one control message between two processes, in nanoseconds. Messages within a process
/// take no time.
pub const HOP_LATENCY_NS: u64 = 50_000;
/// Maximum number of chunks of a simulated stream.
const MAX_SIMULATED_CHUNKS: u32 = 1_000_000;
/// Simulated time between two checks for an interrupt, in nanoseconds.
const INTERRUPT_POLL_NS: u64 = 1_000_000_000;

/// The machine on which [`run`] simulates a plan: its timing model and its name.
#[derive(Clone, Copy)]
pub struct SimMachine<'a> {
    /// Durations of ops and collectives on the machine.
    pub prices: &'a dyn TimingModel,
    /// The machine's name in the record, for example `gb200-nvl72, profile torch-2.11`.
    pub name: &'a str,
}

/// Runs a plan on a simulated machine and writes the run folder with record, trace and HTML report,
/// but no clip. The run needs only the plan; it reads neither the weights nor the model's folder.
///
/// # Errors
/// Problems found before anything is written. Later failures are part of the returned report.
pub fn run(
    plan: &Plan,
    options: &StreamOptions,
    machine: SimMachine<'_>,
    interrupt: &StopHandle,
    on_event: &mut dyn FnMut(StreamEvent),
) -> Result<StreamReport, Diagnostics> {
    validate_request(plan, options)?;
    // The simulation never reads this folder.
    let model = Model::from_plan(Path::new("."), plan);
    let orders = RankConfig::from_options(plan, &model, options, 1).map_err(|d| vec![d])?;
    let start = RunStart {
        // A simulated run has no start time, so that equal runs produce equal bytes.
        started_at: "on a simulated clock".into(),
        device: RunDevice::Sim,
        machine: Some(machine.name.to_string()),
        ..start_line(plan, &orders, options)
    };
    write_run_dir_with(plan, options, start).map_err(|d| vec![d])?;
    let record = RecordWriter::open_simulated(&options.out, plan.sealed.mesh().outside_count() == 0)
        .map_err(|d| vec![d])?;
    let rack = SimWorld::new(plan, &orders, machine.prices, record, on_event).map_err(|d| vec![d])?;
    let mut sim = Sim::new(sim_setup(plan, &orders), rack)?;
    let (ending, stopped) = run_to_end(&mut sim, interrupt);
    let (failure, ops) = sim.world.finish_record(&ending, options.chunks);
    on_event(StreamEvent::Exited);
    let interrupted = stopped && failure.is_none();
    Ok(close_run_with_ops(plan, options, failure, interrupted, ops))
}

/// Reports all problems that can be found before anything is written.
fn validate_request(plan: &Plan, options: &StreamOptions) -> Result<(), Diagnostics> {
    let mut ds = options.check();
    let mut reject = |option: &str, why: &str| {
        ds.push(
            Diagnostic::error(&T0040, format!("{option} does not go with --device sim"))
                .with_label("--device sim", why)
                .with_hint(format!("omit {option}")),
        );
    };
    if plan.video.stream.given_noise {
        reject("--noise", "no values are computed, so the calls carry none");
    }
    if options.video.is_some() {
        reject("--video", "no values are computed, so no frame is encoded");
    }
    if options.outputs.png {
        reject("--png", "no pixels are computed");
    }
    if !options.outputs.pipes.is_empty() {
        reject("--raw or --y4m", "no pixels are computed");
    }
    if options.outputs.latents {
        reject("--latents", "no latents are computed");
    }
    if !options.weights_at.is_empty() {
        reject("--weights-at", "no weights are loaded");
    }
    if options.delays.generate_ns.is_some() {
        reject("--min-generate-ms", "the simulated machine determines the duration of a forward");
    }
    if options.drill.is_some() {
        reject("a drill", "there are no processes to inject faults into");
    }
    let decode_time_unknown =
        plan.sealed.rank_program("encode", Rank(0)).is_none() && options.delays.media.is_none();
    if plan.video.stream.recompute && decode_time_unknown {
        ds.push(
            Diagnostic::error(&T0016, "the recompute regime needs a decoder for its anchor")
                .with_hint("use --cache resident, or give the decode and encode times with --min-decode-ms"),
        );
    }
    if options.chunks > MAX_SIMULATED_CHUNKS {
        ds.push(
            Diagnostic::error(&T0018, format!("a simulated stream of {} chunks", options.chunks))
                .with_label(
                    "limit",
                    format!("{MAX_SIMULATED_CHUNKS} chunks, because all requests are held in memory"),
                )
                .with_hint("give fewer --chunks"),
        );
    }
    ds.extend(options.check_out().err());
    ds.extend(stream_spec(plan).check_settings());
    if ds.is_empty() { Ok(()) } else { Err(ds) }
}

/// Builds the state machines of a plan's ranks and their requests.
fn sim_setup(plan: &Plan, orders: &RankConfig) -> SimConfig {
    let limits = run_limits(plan);
    let digest = plan.sealed.digest();
    let prompt = |chunk: u32| orders.prompts.iter().rposition(|(at, _)| *at == chunk);
    let request = |chunk: u32| {
        let prompt = prompt(chunk).and_then(|n| u32::try_from(n).ok());
        let StreamRequest { seed, cut, step_list, bias, .. } = orders.stream_request(chunk);
        (ChunkRequest { prompt_change: prompt.is_some(), seed, cut, step_list, bias }, prompt)
    };
    SimConfig {
        // The state machines count their own timeouts in heartbeats.
        tick_ns: limits.heartbeat_ns,
        launcher: false,
        leader: LeaderConfig {
            ranks: plan.mesh_ranks().map(|r| r.0).collect(),
            plan: Digest(digest),
            // Two runs of one plan share a session id, because no other run can receive their
            // messages.
            session: digest.first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b)),
            build: build_id(),
            parity: Parity::default()
                .with_known_key("backend", "sim")
                .with_known_key("numerics", plan.mapping.numerics.name())
                .with_known_key("topology", plan.mapping.topology.name()),
            programs: build_program_index(&plan.sealed).into(),
            session_spec: SessionSpec::Video(stream_spec(plan)),
            // Simulated ranks are on no host.
            hosts: None,
            output_groups: vec![ranks_with_latents(plan)],
            limits,
            tripwires: Tripwires::default(),
        },
        requests: (0..orders.chunks).map(request).collect(),
        external_events: Vec::new(),
    }
}

/// Runs the simulation to its end, and returns whether the user interrupted it.
fn run_to_end(sim: &mut Sim<SimWorld<'_>>, interrupt: &StopHandle) -> (SimOutcome, bool) {
    let mut stopped = false;
    loop {
        let ending = sim.run(sim.now_ns().saturating_add(INTERRUPT_POLL_NS));
        if ending.left.is_empty() {
            return (ending, stopped);
        }
        if interrupt.is_stop_requested() && !stopped {
            stopped = true;
            sim.inject_event(ExternalEvent::Interrupt);
        }
    }
}

/// Converts a diagnostic of this process to a run failure.
fn to_failure(d: &Diagnostic) -> Failure {
    Failure::from_diagnostic(FailureClass::Output, None, d)
}
