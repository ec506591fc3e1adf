//! What a launch of ranks on this host needs, whatever they generate: the check of its size, a session, limits, and
//! what its end means.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cpu::CpuBackend;
use tessera_cuda::CudaBackend;
use tessera_ir::RoleRanks;
use tessera_mesh::Mesh;
use tessera_report::record::{RankRole, RunDevice, RunHost, RunKind, RunStart, RunStatus, SCHEMA};
use tessera_runtime::driver::LaunchReport;
use tessera_runtime::{Failure, FailureClass, Limits, Tripwires};
use tessera_verify::SealedPlan;

use crate::clock::format_utc;
use crate::codes::{T0015, T0018};
use crate::cuda::{self, GpuRankConfig};
use crate::faults::DrillConfig;
use crate::flight;
use crate::gpus::GpuDiscovery;
use crate::machine_shape::describe_machine;
use crate::rank::RankPlan;
use crate::run_settings::build_id;

/// Returns the first line of the record of a run without a video. `model` is the name of what runs, and `cache` what its
/// calls keep for the next ones.
pub(crate) fn start_without_video(
    plan: &impl RankPlan,
    (model, generates, cache): (String, RunKind, &str),
    device: RunDevice,
    command: &[String],
) -> RunStart {
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (sealed, mapping) = (plan.sealed(), plan.mapping());
    let of_role = |r: &RoleRanks| -> Vec<RankRole> {
        r.ranks.iter().map(|rank| RankRole { rank: rank.0, role: r.role.clone() }).collect()
    };
    RunStart {
        schema: SCHEMA,
        tessera: env!("CARGO_PKG_VERSION").into(),
        host: Some(Box::new(RunHost { build: build_id(), machine_shape: describe_machine(device) })),
        plan: sealed.digest_hex(),
        model,
        generates,
        mesh: sealed.mesh().to_string(),
        strategy: mapping.strategy_label(),
        numerics: mapping.numerics.name().into(),
        weights: String::new(),
        dtype: mapping.dtype.name().into(),
        cache: cache.into(),
        topology: mapping.topology.name().into(),
        seed: 0,
        prompts: Vec::new(),
        chunks: None,
        fps: 0.0,
        width: 0,
        height: 0,
        steps: 0,
        command: command.to_vec(),
        started_at: format_utc(started),
        status: RunStatus::Running,
        ranks: sealed.roles().iter().flat_map(of_role).collect(),
        device,
        machine: None,
        outputs: Vec::new(),
    }
}

/// Returns T0015 if a mesh has more ranks than this host has cores.
pub(crate) fn check_cores(mesh: &Mesh, ranks: u32, cores: usize) -> Option<Diagnostic> {
    (ranks as usize > cores).then(|| {
        Diagnostic::error(&T0015, format!("{ranks} ranks on {cores} cores"))
            .with_label("mesh", mesh.to_string())
            .with_hint(format!("use a mesh of at most {cores} ranks, or --oversubscribe"))
    })
}

/// Returns the threads of each rank: as many as were asked for, or the cores of this host divided among the ranks.
///
/// # Errors
/// T0015 if `is_bound` and the mesh has more ranks than this host has cores.
pub(crate) fn choose_threads(
    mesh: &Mesh,
    threads: Option<usize>,
    is_bound: bool,
) -> Result<usize, Diagnostic> {
    let (ranks, cores) = (mesh.world_size(), std::thread::available_parallelism().map_or(1, usize::from));
    match check_cores(mesh, ranks, cores).filter(|_| is_bound) {
        Some(d) => Err(d),
        None => Ok(threads.unwrap_or((cores / ranks as usize).max(1))),
    }
}

/// Checks that the device runs every op of a plan, and that this host has devices for `ranks` ranks. Returns what ranks
/// on GPUs need to find each other, and `None` for CPUs.
pub(crate) fn prepare_device(
    sealed: &SealedPlan,
    device: RunDevice,
    ranks: u32,
) -> Result<Option<GpuRankConfig>, Diagnostics> {
    let Some(found) = check_device(sealed, device, ranks)? else { return Ok(None) };
    let communicator_ids = cuda::create_communicator_ids(&found, sealed).map_err(|d| vec![d])?;
    Ok(Some(GpuRankConfig { communicator_ids, first_rank_of_host: 0 }))
}

/// Checks that the device runs every op of a plan, and that this host has devices for `ranks` ranks. Returns the GPUs of
/// this host, and `None` for CPUs.
///
/// # Errors
/// T0801 for an op, or the first part of GPUs that this host lacks.
pub(crate) fn check_device(
    sealed: &SealedPlan,
    device: RunDevice,
    ranks: u32,
) -> Result<Option<GpuDiscovery>, Diagnostics> {
    check_supported_ops(sealed, device)?;
    match device {
        RunDevice::Cuda => {
            let found = GpuDiscovery::discover();
            cuda::check_plan(&found, sealed, ranks as usize)?;
            Ok(Some(found))
        }
        RunDevice::Cpu | RunDevice::Sim => Ok(None),
    }
}

/// Checks that the device runs every op of a plan.
///
/// # Errors
/// T0801 for the first op that it does not run.
pub(crate) fn check_supported_ops(sealed: &SealedPlan, device: RunDevice) -> Result<(), Diagnostics> {
    let find_unsupported = match device {
        RunDevice::Cuda => CudaBackend::find_unsupported,
        RunDevice::Cpu | RunDevice::Sim => CpuBackend::find_unsupported,
    };
    sealed.role_programs().find_map(|p| find_unsupported(p)).map_or(Ok(()), |d| Err(vec![d]))
}

/// Returns a session id from the plan and the current time. The id only separates the messages of
/// two runs.
pub(crate) fn new_session_id(plan: &SealedPlan) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let digest = plan.digest();
    let head = digest.first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
    head ^ now ^ (u64::from(std::process::id()) << 32)
}

/// Returns the limits of the launcher, and the tripwires that it leaves out: those of the drill, if there is one.
pub(crate) fn launcher_limits(drill: Option<&DrillConfig>) -> (Limits, Tripwires) {
    drill.map_or_else(Default::default, |d| (d.limits.clone(), d.disabled_tripwires.clone()))
}

/// Writes how the processes of a launch ended to the flight records in `out`. Returns the failure that ended the run,
/// if any, and whether a stop was requested.
pub(crate) fn settle_launch(
    launched: Result<LaunchReport, Diagnostics>,
    out: &Path,
) -> (Option<Failure>, bool) {
    match launched {
        Ok(report) => {
            let unwritten = flight::write_exits(out, &report.exits).err();
            let unwritten = unwritten.map(|d| Failure::from_diagnostic(FailureClass::Output, None, &d));
            (report.failure.or(unwritten), report.interrupted)
        }
        Err(ds) => {
            let refused = || Diagnostic::error(&T0018, "the launch was refused");
            let d = ds.into_iter().next().unwrap_or_else(refused);
            (Some(Failure::from_diagnostic(FailureClass::Preflight, None, &d)), false)
        }
    }
}

/// Returns the exit status of a command whose run ended so.
pub(crate) fn exit_status(failure: Option<&Failure>, interrupted: bool) -> u8 {
    match (failure, interrupted) {
        (Some(f), _) => u8::try_from(f.class.exit_code()).unwrap_or(1),
        (None, true) => 130,
        (None, false) => 0,
    }
}
