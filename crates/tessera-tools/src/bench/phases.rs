//! `bench phases`: times single phases of a plan on the GPUs of this host, with random weights and inputs.
//!
//! A phase is timed as a call runs it: its graph is replayed, and its inputs and outputs cross to and
//! from the host. Buffers keep the values of the run before, as in a stream. With several ranks, each has
//! a process of its own, and a run takes as long as on the slowest one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tessera::gpus::GpuDiscovery;
use tessera::program_command::ProgramCommand;
use tessera::{Mapping, Model, Overrides, Plan, cuda, plan};
use tessera_base::Diagnostics;
use tessera_cuda::CudaBackend;
use tessera_device::{Backend, MeshRank, Scalar};
use tessera_ir::{DType, Opcode};
use tessera_mesh::Rank;

use super::loaded_program::{LaunchTotal, LoadedProgram, count_flops};
use super::synthetic_weights::{SyntheticWeights, global_normals};
use super::{
    COLLECTIVE_TIMEOUT, bench_error, print_line, read_reports, set_picture_size, share_communicator_ids,
    start_processes,
};

/// What to time.
#[derive(Debug, Clone)]
pub struct PhaseBenchConfig {
    /// Folder of the model's config; weights are not read.
    pub model: std::path::PathBuf,
    /// Changes of the model's stream settings.
    pub overrides: Overrides,
    /// Height and width of the picture in pixels; `None` for the model's own.
    pub size: Option<(u64, u64)>,
    /// The mapping; its mesh gives the number of GPUs.
    pub mapping: Mapping,
    /// Names of the phases.
    pub phases: Vec<String>,
    /// Seconds for which each phase runs before it is timed. Several ranks run it as often as it is timed
    /// instead, because all must run it equally often.
    pub warm_s: f64,
    /// Number of timed runs.
    pub runs: usize,
    /// Whether to trace the kernels of a phase.
    pub trace: bool,
}

/// The times of all phases, and the memory of the device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PhaseBenchReport {
    /// Picture height and width, such as `480x832`.
    pub size: String,
    /// Digest of the sealed plan.
    pub plan: String,
    /// The phases in the requested order.
    pub phases: Vec<PhaseTimes>,
    /// Bytes of weights, buffers and temporaries of the loaded phases on one rank.
    pub planned: [u64; 3],
    /// Bytes that the driver attributes to this process, with its context and libraries.
    pub measured: u64,
}

/// The times of one phase.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PhaseTimes {
    /// Name of the phase.
    pub phase: String,
    /// Milliseconds of each run, on the slowest rank.
    pub runs_ms: Vec<f64>,
    /// Floating-point operations of a run on one rank.
    pub flops: u64,
    /// Launches of a run by kind on rank 0, the longest first; empty unless traced.
    pub launches: Vec<LaunchTotal>,
}

/// Plans the model, loads the phases on the GPUs of this host, and times them. `arguments` are those with
/// which `program` runs [`run_phase_rank`] for a rank.
///
/// # Errors
/// T0061 for a phase that the plan lacks or that fails, and diagnostics of model, plan or GPU.
pub fn time_phases(
    program: &ProgramCommand,
    config: &PhaseBenchConfig,
    arguments: impl Fn(u32) -> Vec<String>,
) -> Result<PhaseBenchReport, Diagnostics> {
    let world = config.mapping.world_mesh().map_err(|d| vec![*d])?.iter().count() as u32;
    if world == 1 {
        return time_on_rank(config, Rank(0));
    }
    // Missing libraries or GPUs are reported once here rather than by every process.
    cuda::check_gpus(&GpuDiscovery::discover(), world as usize)?;
    let mut ranks = start_processes(program, world, arguments)?;
    let mut reports: Vec<PhaseBenchReport> = read_reports(&mut ranks)?;
    let mut slowest = reports.remove(0);
    for report in reports {
        for (phase, other) in slowest.phases.iter_mut().zip(report.phases) {
            phase.runs_ms.iter_mut().zip(other.runs_ms).for_each(|(ms, other)| *ms = ms.max(other));
        }
    }
    Ok(slowest)
}

/// Runs one of several ranks, and prints its report as a line of JSON.
///
/// # Errors
/// As [`time_phases`].
pub fn run_phase_rank(config: &PhaseBenchConfig, rank: u32) -> Result<(), Diagnostics> {
    let report = time_on_rank(config, Rank(rank))?;
    let text = serde_json::to_string(&report).map_err(|e| bench_error(format!("report of a rank: {e}")))?;
    print_line(&text);
    Ok(())
}

fn time_on_rank(config: &PhaseBenchConfig, rank: Rank) -> Result<PhaseBenchReport, Diagnostics> {
    let mut model = Model::open(&config.model, &config.overrides)?;
    if let Some(size) = config.size {
        set_picture_size(&mut model, size)?;
    }
    let plan = plan::plan_model(&model.video, &model.name, "", &config.mapping)?;
    let (sealed, world) = (&plan.sealed, plan.sealed.mesh().iter().count());
    let gpus = GpuDiscovery::discover();
    cuda::check_gpus(&gpus, world)?;
    let ids = share_communicator_ids(&gpus, sealed, rank)?;
    let mut backend =
        cuda::open_cuda(&gpus, sealed, rank, rank.0, &ids, COLLECTIVE_TIMEOUT).map_err(|d| vec![d])?;
    let mut weights = SyntheticWeights::default();
    // All phases are loaded before any of them runs, so that temporaries are allocated once.
    let mut loaded = Vec::new();
    for name in &config.phases {
        loaded.push(load_phase(&mut backend, &plan, (name, rank), &mut weights)?);
    }
    let mut phases = Vec::new();
    for (phase, name) in loaded.iter().zip(&config.phases) {
        phases.push(time_phase(phase, name, &mut backend, (config, world))?);
    }
    Ok(PhaseBenchReport {
        size: format!("{}x{}", model.video.stream.height, model.video.stream.width),
        plan: sealed.digest_hex(),
        phases,
        planned: backend.memory_bytes(),
        measured: backend.process_memory().unwrap_or(0),
    })
}

/// Loads a phase with placeholders for the data of its calls.
fn load_phase(
    backend: &mut CudaBackend,
    plan: &Plan,
    (name, rank): (&str, Rank),
    weights: &mut SyntheticWeights,
) -> Result<LoadedProgram, Diagnostics> {
    let mut loaded = LoadedProgram::load(backend, plan, (name, rank), weights)?;
    let seat = MeshRank { mesh: *plan.sealed.mesh(), rank };
    let program = Arc::clone(&loaded.program);
    for op in &program.ops {
        let (Some(name), Some(v)) = (op.name.clone(), op.results.first()) else { continue };
        let ty = program.type_of(*v);
        match op.opcode {
            // Ids of tokens are whole numbers below the vocabulary.
            Opcode::Input if ty.shape.len() == 1 => {
                loaded.inputs.insert(name, (0..ty.element_count()).map(|i| (i % 256) as f32).collect());
            }
            Opcode::Input => {
                let values = global_normals(&format!("input {name}"), ty, &seat);
                loaded.inputs.insert(name, values);
            }
            Opcode::Call => {
                loaded.scalars.insert(name, placeholder_scalar(ty.dtype, &ty.shape));
            }
            _ => {}
        }
    }
    Ok(loaded)
}

fn time_phase(
    phase: &LoadedProgram,
    name: &str,
    backend: &mut CudaBackend,
    (config, world): (&PhaseBenchConfig, usize),
) -> Result<PhaseTimes, Diagnostics> {
    let (begun, warm) = (Instant::now(), Duration::from_secs_f64(config.warm_s));
    // The first run captures the graph.
    for _ in 0..if world == 1 { 2 } else { 2 + config.runs } {
        phase.time_run(backend)?;
    }
    while world == 1 && begun.elapsed() < warm {
        phase.time_run(backend)?;
    }
    let runs_ms = (0..config.runs).map(|_| phase.time_run(backend)).collect::<Result<_, Diagnostics>>()?;
    let launches = phase.trace_launches(backend, usize::from(config.trace))?;
    Ok(PhaseTimes { phase: name.to_string(), runs_ms, flops: count_flops(&phase.program), launches })
}

/// Returns a value that every phase accepts: index 0, or a number between 0 and 1.
fn placeholder_scalar(dtype: DType, shape: &[u64]) -> Scalar {
    match (dtype, shape) {
        (DType::I64, _) => Scalar::I64(0),
        (_, []) => Scalar::F32(0.5),
        (_, shape) => Scalar::F32s(vec![0.5; shape.iter().product::<u64>() as usize]),
    }
}
