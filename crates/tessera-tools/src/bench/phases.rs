//! `bench phases`: times single phases of a plan on one GPU, with random weights and inputs.
//!
//! A phase is timed as a call runs it: its graph is replayed, and its inputs and outputs cross to and
//! from the host. Buffers keep the values of the run before, as in a stream.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera::clock::monotonic_ns;
use tessera::gpus::GpuDiscovery;
use tessera::{Mapping, Model, Overrides, Plan, cuda, plan};
use tessera_base::Diagnostics;
use tessera_cuda::CudaBackend;
use tessera_device::{Backend, CallData, MeshRank, ProgramHandle, Scalar};
use tessera_ir::{DType, Opcode, Program, op_workload};
use tessera_mesh::Rank;

use super::device_timer::UnsynchronisedTimer;
use super::rank::{NoopObserver, fault_error};
use super::synthetic_weights::{SyntheticWeights, global_normals};
use super::{COLLECTIVE_TIMEOUT, bench_error, set_picture_size};

/// What to time.
#[derive(Debug, Clone)]
pub struct PhaseBenchConfig {
    /// Folder of the model's config; weights are not read.
    pub model: std::path::PathBuf,
    /// Changes of the model's stream settings.
    pub overrides: Overrides,
    /// Height and width of the picture in pixels; `None` for the model's own.
    pub size: Option<(u64, u64)>,
    /// The mapping, whose mesh has one rank.
    pub mapping: Mapping,
    /// Names of the phases.
    pub phases: Vec<String>,
    /// Seconds for which each phase runs before it is timed.
    pub warm_s: f64,
    /// Number of timed runs.
    pub runs: usize,
    /// Whether to trace the kernels of a phase.
    pub trace: bool,
}

/// The times of all phases, and the memory of the device.
#[derive(Debug)]
pub struct PhaseBenchReport {
    /// Picture height and width, such as `480x832`.
    pub size: String,
    /// Digest of the sealed plan.
    pub plan: String,
    /// The phases in the requested order.
    pub phases: Vec<PhaseTimes>,
    /// Bytes of weights, buffers and temporaries of the loaded phases.
    pub planned: [u64; 3],
    /// Bytes that the driver attributes to this process, with its context and libraries.
    pub measured: u64,
}

/// The times of one phase.
#[derive(Debug)]
pub struct PhaseTimes {
    /// Name of the phase.
    pub phase: String,
    /// Milliseconds of each run.
    pub runs_ms: Vec<f64>,
    /// Floating-point operations of a run.
    pub flops: u64,
    /// Launches with the same ops and shapes: description, number, and milliseconds of all together,
    /// the longest first; empty unless traced.
    pub launches: Vec<(String, usize, f64)>,
}

/// Plans the model, loads the phases on the first GPU, and times them.
///
/// # Errors
/// T0061 for a phase that the plan lacks or that fails, and diagnostics of model, plan or GPU.
pub fn time_phases(config: &PhaseBenchConfig) -> Result<PhaseBenchReport, Diagnostics> {
    let mut model = Model::open(&config.model, &config.overrides)?;
    if let Some(size) = config.size {
        set_picture_size(&mut model, size)?;
    }
    let plan = plan::plan_model(&model.video, &model.name, "", &config.mapping)?;
    if plan.sealed.mesh().iter().count() != 1 {
        return Err(bench_error("phases are timed on one GPU; give a mapping with one rank"));
    }
    let gpus = GpuDiscovery::discover();
    cuda::check_gpus(&gpus, 1)?;
    let mut backend =
        cuda::open_cuda(&gpus, &plan.sealed, Rank(0), 0, &[], COLLECTIVE_TIMEOUT).map_err(|d| vec![d])?;
    let mut weights = SyntheticWeights::default();
    // All phases are loaded before any of them runs, so that temporaries are allocated once.
    let mut loaded = Vec::new();
    for name in &config.phases {
        loaded.push(BenchPhase::load(&mut backend, &plan, name, &mut weights)?);
    }
    let mut phases = Vec::new();
    for phase in &loaded {
        phases.push(phase.time(&mut backend, config)?);
    }
    Ok(PhaseBenchReport {
        size: format!("{}x{}", model.video.stream.height, model.video.stream.width),
        plan: plan.sealed.digest_hex(),
        phases,
        planned: backend.memory_bytes(),
        measured: backend.process_memory().unwrap_or(0),
    })
}

/// A loaded phase with the inputs of its runs.
struct BenchPhase {
    name: String,
    program: Arc<Program>,
    handle: ProgramHandle,
    inputs: Vec<(String, Vec<f32>)>,
    scalars: Vec<(String, Scalar)>,
}

impl BenchPhase {
    fn load(
        backend: &mut CudaBackend,
        plan: &Plan,
        name: &str,
        weights: &mut SyntheticWeights,
    ) -> Result<BenchPhase, Diagnostics> {
        let sealed = &plan.sealed;
        let found = sealed.rank_program(name, Rank(0)).zip(sealed.rank_slots(name, Rank(0)));
        let Some((program, slots)) = found else {
            let known = sealed.phase_names().join(", ");
            return Err(bench_error(format!("the plan has no phase `{name}`; it has {known}")));
        };
        let program = Arc::new((**program).clone());
        let handle = backend.load(&program, slots, weights).map_err(|d| vec![d])?;
        let seat = MeshRank { mesh: *sealed.mesh(), rank: Rank(0) };
        let (mut inputs, mut scalars) = (Vec::new(), Vec::new());
        for op in &program.ops {
            let (Some(name), Some(v)) = (op.name.clone(), op.results.first()) else { continue };
            let ty = program.type_of(*v);
            match op.opcode {
                // Ids of tokens are whole numbers below the vocabulary.
                Opcode::Input if ty.shape.len() == 1 => {
                    inputs.push((name, (0..ty.element_count()).map(|i| (i % 256) as f32).collect()));
                }
                Opcode::Input => {
                    let values = global_normals(&format!("input {name}"), ty, &seat);
                    inputs.push((name, values));
                }
                Opcode::Call => scalars.push((name, placeholder_scalar(ty.dtype, &ty.shape))),
                _ => {}
            }
        }
        Ok(BenchPhase { name: name.to_string(), program, handle, inputs, scalars })
    }

    fn call(&self) -> CallData<'_> {
        CallData {
            inputs: self.inputs.iter().map(|(n, x)| (n.as_str(), &x[..])).collect(),
            scalars: self.scalars.iter().map(|(n, x)| (n.as_str(), x.clone())).collect(),
        }
    }

    fn time(&self, backend: &mut CudaBackend, config: &PhaseBenchConfig) -> Result<PhaseTimes, Diagnostics> {
        let call = self.call();
        let mut run = || {
            // A run ends when the GPU has finished it.
            let time = UnsynchronisedTimer::start(monotonic_ns).synchronise(|| {
                backend.run(self.handle, &call, &mut NoopObserver).map_err(|f| fault_error(&f))
            })?;
            Ok(time.elapsed_ns() as f64 / 1e6)
        };
        let (begun, warm) = (Instant::now(), Duration::from_secs_f64(config.warm_s));
        // The first run captures the graph.
        for _ in 0..2 {
            run()?;
        }
        while begun.elapsed() < warm {
            run()?;
        }
        let runs_ms = (0..config.runs).map(|_| run()).collect::<Result<_, Diagnostics>>()?;
        let flops = self.program.ops.iter().map(|op| op_workload(&self.program, op).flops.0).sum();
        let launches = if config.trace { self.trace(backend)? } else { Vec::new() };
        Ok(PhaseTimes { phase: self.name.clone(), runs_ms, flops, launches })
    }

    /// Traces one run, and sums the launches with the same ops and shapes.
    fn trace(&self, backend: &mut CudaBackend) -> Result<Vec<(String, usize, f64)>, Diagnostics> {
        let mut sums: BTreeMap<String, (usize, f64)> = BTreeMap::new();
        backend.trace_run(self.handle, &self.call(), &mut NoopObserver).map_err(|f| fault_error(&f))?;
        let spans =
            backend.trace_run(self.handle, &self.call(), &mut NoopObserver).map_err(|f| fault_error(&f))?;
        for span in spans {
            let ops: Vec<&str> = span.ops.iter().map(|i| self.program.ops[*i].opcode.name()).collect();
            let operands = span.ops.first().map_or(&[][..], |i| &self.program.ops[*i].operands);
            let shapes: Vec<String> =
                operands.iter().map(|v| format!("{:?}", self.program.type_of(*v).shape)).collect();
            let entry = sums.entry(format!("{} {}", ops.join(" + "), shapes.join(" "))).or_default();
            entry.0 += 1;
            entry.1 += (span.end_ns - span.begin_ns) / 1e6;
        }
        let mut all: Vec<_> = sums.into_iter().map(|(what, (count, ms))| (what, count, ms)).collect();
        all.sort_by(|a, b| b.2.total_cmp(&a.2));
        Ok(all)
    }
}

/// Returns a value that every phase accepts: index 0, or a number between 0 and 1.
fn placeholder_scalar(dtype: DType, shape: &[u64]) -> Scalar {
    match (dtype, shape) {
        (DType::I64, _) => Scalar::I64(0),
        (_, []) => Scalar::F32(0.5),
        (_, shape) => Scalar::F32s(vec![0.5; shape.iter().product::<u64>() as usize]),
    }
}
