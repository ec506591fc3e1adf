//! What a launch of processes for array programs needs: options, the run directory, and the description of the launch.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::Program;
use tessera_report::record::{RecordLine, RunDevice, RunKind};
use tessera_runtime::driver::{ControlTopology, LaunchSpec, StopHandle};
use tessera_runtime::wire::{MAX_META_BYTES, MAX_TENSOR_BYTES, MAX_TENSORS};

use super::array_config::{ArrayConfig, ArrayRendezvous};
use super::array_plan::{ArrayPlan, PLAN_NAME};
use super::array_program::ArrayPort;
use super::array_weights::write_weights_file;
use super::host_array::HostArray;
use super::stream_ids::StreamIds;
use crate::codes::{T0018, T0090};
use crate::communicators;
use crate::cuda;
use crate::files::{StagedFolder, write_error};
use crate::host_memory::check_host_memory;
use crate::rank::RankPlan;
use crate::rank_launch::{
    choose_threads, launcher_limits, new_session_id, prepare_device, start_without_video,
};
use crate::rank_orders::RankOrders;
use crate::record::RECORD_FILE;

/// Where and how the processes of a run are started.
#[derive(Debug, Clone)]
pub struct ArrayProcessOptions {
    /// Command line of a rank's process, which must call [`crate::rank_main`].
    pub argv: Vec<String>,
    /// Folder for the plan, the record and the flight records; it must not exist, or be empty.
    pub out: PathBuf,
    /// Device of the ranks: CPUs or GPUs.
    pub device: RunDevice,
    /// Threads of each rank; by default the cores of this host, divided among the ranks.
    pub threads: Option<usize>,
    /// Whether more ranks than cores are wanted.
    pub oversubscribe: bool,
    /// Whether each rank writes the messages that it sends to a file.
    pub wire_dump: bool,
    /// Where rank 0, which is then the only rank that is started here, meets the others; `None` to start all ranks here.
    pub rendezvous: Option<ArrayRendezvous>,
    /// Command line of the launching process, for the record.
    pub command: Vec<String>,
    /// Numbers of the streams in the trace of the run; `None` to trace nothing.
    pub trace: Option<StreamIds>,
    /// Stops the run, also while it starts: the first request before the next call, the second at once.
    pub stop: StopHandle,
}

impl ArrayProcessOptions {
    /// Creates the options of a run on CPUs.
    #[must_use]
    pub fn new(argv: Vec<String>, out: PathBuf) -> ArrayProcessOptions {
        ArrayProcessOptions {
            argv,
            out,
            device: RunDevice::Cpu,
            threads: None,
            oversubscribe: false,
            wire_dump: false,
            rendezvous: None,
            command: Vec::new(),
            trace: None,
            stop: StopHandle::default(),
        }
    }
}

/// File of a run directory with the weights, until every rank has loaded them.
pub(super) const WEIGHTS_FILE: &str = "weights.safetensors";

/// Checks the plan and the options, writes the run directory and the weights, and describes the launch, whose leader
/// gets `socket`.
///
/// # Errors
/// What is wrong before anything was started.
pub(super) fn prepare_launch(
    plan: &ArrayPlan,
    weights: &BTreeMap<String, HostArray>,
    options: &ArrayProcessOptions,
    socket: OwnedFd,
) -> Result<LaunchSpec, Diagnostics> {
    let one = |d: Diagnostic| vec![d];
    check_message_sizes(plan)?;
    if options.trace.is_some() {
        check_trace(plan).map_err(one)?;
    }
    // The other hosts check the cores and the memory of their own ranks.
    let joins = options.rendezvous.is_some();
    let ranks = if joins { 1 } else { plan.sealed.mesh().world_size() };
    let is_bound = options.device == RunDevice::Cpu && !options.oversubscribe && !joins;
    let threads = choose_threads(plan.sealed.mesh(), options.threads, is_bound).map_err(one)?;
    let gpus = prepare_device(&plan.sealed, options.device, ranks)?;
    let uses_gpus = gpus.is_some();
    if !uses_gpus && !joins {
        check_host_memory(&plan.sealed, 0).map_err(one)?;
    }
    let out = std::path::absolute(&options.out).map_err(|e| one(write_error(&options.out, &e)))?;
    let config = ArrayConfig {
        plan: out.join("plan"),
        digest: plan.sealed.digest_hex(),
        weights: out.join(WEIGHTS_FILE),
        out,
        threads,
        wire_dump: options.wire_dump,
        times_single_ops: options.trace.is_some(),
        gpus,
        rendezvous: options.rendezvous.clone(),
    };
    write_run_dir(plan, options).map_err(one)?;
    write_weights_file(weights, &config.weights).map_err(one)?;
    // GPU ranks communicate on the GPUs and need no CPU communicators, and ranks that join others over streams.
    let specs = if uses_gpus || joins { Vec::new() } else { communicators::communicator_specs(&plan.sealed) };
    let mut extra_fds = communicators::create_arenas_of_ranks(&specs, ranks).map_err(one)?;
    if let Some(of_leader) = extra_fds.first_mut() {
        of_leader.push(Arc::new(socket));
    }
    let payload = serde_json::to_vec(&RankOrders::Arrays(Box::new(config))).map_err(|e| {
        one(Diagnostic::error(&T0018, format!("the rank configuration cannot be serialised: {e}")))
    })?;
    let (mut limits, tripwires) = launcher_limits(None);
    if let Some(rendezvous) = &options.rendezvous {
        // Rank 0 is silent until the others have joined.
        let wait_ns = u64::try_from(rendezvous.timeout.as_nanos()).unwrap_or(u64::MAX);
        limits.hello_ns = limits.hello_ns.saturating_add(wait_ns);
    }
    Ok(LaunchSpec {
        argv: options.argv.clone(),
        rank_count: ranks,
        topology: if joins { ControlTopology::Mesh } else { plan.control_topology() },
        session: new_session_id(&plan.sealed),
        extra_fds,
        payload,
        env: if uses_gpus { cuda::missing_env() } else { Vec::new() },
        limits,
        tripwires,
    })
}

/// Checks that the inputs and the outputs of every call fit one message each.
fn check_message_sizes(plan: &ArrayPlan) -> Result<(), Diagnostics> {
    let find = |what: String, ports: &[ArrayPort]| {
        let bytes = ports.iter().map(ArrayPort::bytes).fold(0, u64::saturating_add);
        let count = ports.len();
        let is_large = count > MAX_TENSORS || bytes > u64::from(MAX_TENSOR_BYTES);
        is_large.then(|| {
            Diagnostic::error(&T0090, format!("{what} exceed the limit of a message between processes"))
                .with_label("the plan", format!("{count} arrays, {bytes} bytes"))
                .with_label("limit", format!("{MAX_TENSORS} arrays, {MAX_TENSOR_BYTES} bytes"))
                .with_hint(
                    "pass arrays that do not change as weights, split the program, or run it on threads",
                )
        })
    };
    let programs = plan.programs.by_name.iter();
    let found: Diagnostics = programs
        .flat_map(|(name, program)| {
            let inputs = find(format!("the inputs of `{name}`"), &program.inputs);
            inputs.into_iter().chain(find(format!("the outputs of `{name}`"), &program.outputs))
        })
        .collect();
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// Bytes of an op's time and of a collective's times in a message, for calls of less than a year.
const OP_TIME_BYTES: u64 = 8;
const COLLECTIVE_TIMES_BYTES: u64 = 3 * OP_TIME_BYTES + 5;

/// Checks that the times of a call fit one message.
fn check_trace(plan: &ArrayPlan) -> Result<(), Diagnostic> {
    let sealed = &plan.sealed;
    let bytes_of = |program: &Program| {
        let collectives = program.collective_ops().count() as u64;
        // A GPU reports the end of each op, too.
        OP_TIME_BYTES * (2 * program.ops.len() as u64 + 4) + COLLECTIVE_TIMES_BYTES * collectives
    };
    let bytes_of_call = |phase: &String| -> u64 {
        sealed.mesh().iter().filter_map(|rank| sealed.rank_program(phase, rank)).map(|p| bytes_of(p)).sum()
    };
    let bytes = sealed.phase_names().iter().map(bytes_of_call).max().unwrap_or(0);
    if bytes <= u64::from(MAX_META_BYTES) {
        return Ok(());
    }
    Err(Diagnostic::error(
        &T0090,
        "the times of the ops of a call exceed the limit of a message between processes",
    )
    .with_label("the plan", format!("up to {bytes} bytes"))
    .with_label("limit", format!("{MAX_META_BYTES} bytes"))
    .with_hint("trace the run on threads, or split the program"))
}

/// Writes the run directory with its plan and the first line of its record, atomically.
fn write_run_dir(plan: &ArrayPlan, options: &ArrayProcessOptions) -> Result<(), Diagnostic> {
    let what = (PLAN_NAME.to_string(), RunKind::Arrays, "none");
    let start = start_without_video(plan, what, options.device, &options.command);
    let mut folder = StagedFolder::create_over(&options.out)?;
    folder.write(RECORD_FILE, RecordLine::Start(Box::new(start)).to_json().as_bytes())?;
    plan.write_into(&mut folder, "plan/")?;
    folder.commit()
}

/// Removes the file of the weights. A file that is gone already is no error.
pub(super) fn remove_weights_file(out: &Path) {
    let _ = std::fs::remove_file(out.join(WEIGHTS_FILE));
}
