//! `bench text`: times the program of a UMT5 text encoder alone, on one GPU, with random weights.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use tessera::clock::monotonic_ns;
use tessera::gpus::GpuDiscovery;
use tessera::{DtypePolicy, Mapping, Model, Overrides, Plan, cuda, plan};
use tessera_base::Diagnostics;
use tessera_cuda::CudaBackend;
use tessera_device::{Backend, CallData, Observer, ProgramHandle, Scalar};
use tessera_ir::{Opcode, Program, op_workload};
use tessera_mesh::Rank;
use tessera_models::{TEXT_DEVICE_PHASE, TEXT_IDS, TEXT_LENGTH, TextEncoder, Umt5Config};

use super::device_timer::UnsynchronisedTimer;
use super::rank::fault_error;
use super::synthetic_weights::SyntheticWeights;
use super::{COLLECTIVE_TIMEOUT, bench_error};

/// What to time.
#[derive(Debug, Clone)]
pub struct TextBenchConfig {
    /// Folder of a video model, whose config states the number of rows.
    pub model: PathBuf,
    /// Dtypes of the program, as those of a plan.
    pub dtype: DtypePolicy,
    /// Number of layers to run; `None` for all.
    pub layers: Option<u64>,
    /// Number of ids before the padding; `None` for as many as there are rows.
    pub length: Option<u64>,
    /// Runs before the timed ones, and timed runs.
    pub runs: (usize, usize),
    /// Traced runs.
    pub traces: usize,
}

/// The measured times of an encoder, and the work of one run.
#[derive(Debug, Clone)]
pub struct TextTiming {
    /// Digest of the plan.
    pub plan: String,
    /// Number of rows, and of those before the padding.
    pub rows: (u64, u64),
    /// Milliseconds of each run, from the ids in host memory to the rows there.
    pub runs_ms: Vec<f64>,
    /// Floating-point operations of a run.
    pub flops: u64,
    /// Bytes of the weights that a run reads: all but the table of words.
    pub weight_bytes: u64,
    /// Bytes of weights, buffers and temporaries on the device.
    pub device_bytes: [u64; 3],
    /// Seconds until the program was loaded, and milliseconds of its first run, which captures it.
    pub load: (f64, f64),
    /// Mean microseconds per traced run of each kind of launch, named by its ops, and launches per run.
    pub launches: Vec<(String, f64, f64)>,
}

struct NoopObserver;
impl Observer for NoopObserver {
    fn on_issued(&mut self, _: usize) {}
    fn on_progress(&mut self, _: u32) {}
}

/// Loads the encoder of Wan on the first GPU and times it.
///
/// # Errors
/// T0061 if it cannot load or run, and diagnostics of the model, the plan or the GPU.
pub fn time_text_encoder(config: &TextBenchConfig) -> Result<TextTiming, Diagnostics> {
    let plan = plan_text_encoder(config)?;
    let (sealed, rank) = (&plan.sealed, Rank(0));
    let (Some(program), Some(slots)) =
        (sealed.rank_program(TEXT_DEVICE_PHASE, rank), sealed.rank_slots(TEXT_DEVICE_PHASE, rank))
    else {
        return Err(bench_error(format!("the plan has no phase {TEXT_DEVICE_PHASE}")));
    };
    let rows = plan.video.wan.text_len;
    let length = config.length.unwrap_or(rows).clamp(1, rows);
    let gpus = GpuDiscovery::discover();
    cuda::check_gpus(&gpus, 1)?;
    let begun = monotonic_ns();
    let mut backend =
        cuda::open_cuda(&gpus, sealed, rank, 0, &[], COLLECTIVE_TIMEOUT).map_err(|d| vec![d])?;
    let program = Arc::new((**program).clone());
    let loaded = backend.load(&program, slots, &mut SyntheticWeights::default()).map_err(|d| vec![d])?;
    let load_s = monotonic_ns().saturating_sub(begun) as f64 / 1e9;
    let ids = text_ids(&program, rows, length);
    let call = CallData {
        inputs: BTreeMap::from([(TEXT_IDS, &ids[..])]),
        scalars: BTreeMap::from([(TEXT_LENGTH, Scalar::I64(length as i64))]),
    };
    let first_ms = time_run(&mut backend, loaded, &call)?;
    let (warm, timed) = config.runs;
    for _ in 0..warm {
        time_run(&mut backend, loaded, &call)?;
    }
    let runs_ms = (0..timed).map(|_| time_run(&mut backend, loaded, &call)).collect::<Result<_, _>>()?;
    let launches = trace_launches(&mut backend, (loaded, &program), &call, config.traces)?;
    let (flops, weight_bytes) = program_work(&program);
    Ok(TextTiming {
        plan: sealed.digest_hex(),
        rows: (rows, length),
        runs_ms,
        flops,
        weight_bytes,
        device_bytes: backend.memory_bytes(),
        load: (load_s, first_ms),
        launches,
    })
}

/// Plans the model with the encoder that Wan has.
fn plan_text_encoder(config: &TextBenchConfig) -> Result<Plan, Diagnostics> {
    let mut model = Model::open(&config.model, &Overrides::default())?;
    let mut encoder = Umt5Config::xxl();
    if let Some(layers) = config.layers {
        encoder.layers = layers.clamp(1, encoder.layers);
    }
    // One block of the generator, which does not run, makes planning fast.
    model.video.wan.layers = 1;
    model.video.stream.text = TextEncoder::Umt5;
    model.video.set_text_encoder("the encoder of Wan", encoder)?;
    let mapping = Mapping { dtype: config.dtype, ..Mapping::default() };
    plan::plan_model(&model.video, &model.name, "", &mapping)
}

/// Returns different ids, and zeros behind the prompt.
fn text_ids(program: &Program, rows: u64, length: u64) -> Vec<f32> {
    let tables = program.ops.iter().filter(|op| op.opcode == Opcode::Embed);
    let words = tables.map(|op| program.type_of(op.operands[1]).shape[0]).next().unwrap_or(1);
    // Steps of a large odd number spread the ids over the table.
    (0..rows).map(|i| if i < length { (i * 40_503 % words) as f32 } else { 0.0 }).collect()
}

/// Returns the operations of a run, and the bytes of the weights that it reads as a whole.
fn program_work(program: &Program) -> (u64, u64) {
    let flops = program.ops.iter().map(|op| op_workload(program, op).flops.0).sum();
    let tables: Vec<_> = program.ops.iter().filter(|op| op.opcode == Opcode::Embed).collect();
    let weights = program.ops.iter().filter(|op| op.opcode == Opcode::Weight).map(|op| op.results[0]);
    let read = weights.filter(|v| tables.iter().all(|op| op.operands[1] != *v));
    (flops, read.map(|v| program.type_of(v).byte_size().0).sum())
}

/// Runs the program once and returns its milliseconds.
fn time_run(
    backend: &mut CudaBackend,
    program: ProgramHandle,
    call: &CallData<'_>,
) -> Result<f64, Diagnostics> {
    // A run ends when the GPU has finished it.
    let timer = UnsynchronisedTimer::start(monotonic_ns);
    let time =
        timer.synchronise(|| backend.run(program, call, &mut NoopObserver).map_err(|f| fault_error(&f)))?;
    Ok(time.elapsed_ns() as f64 / 1e6)
}

/// Traces runs and adds up the time of launches with the same ops.
fn trace_launches(
    backend: &mut CudaBackend,
    (loaded, program): (ProgramHandle, &Program),
    call: &CallData<'_>,
    traces: usize,
) -> Result<Vec<(String, f64, f64)>, Diagnostics> {
    let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for _ in 0..traces {
        let spans = backend.trace_run(loaded, call, &mut NoopObserver).map_err(|f| fault_error(&f))?;
        for span in spans {
            let (time, count) = sums.entry(name_launch(program, &span.ops)).or_default();
            *time += (span.end_ns - span.begin_ns) / 1e3 / traces as f64;
            *count += 1.0 / traces as f64;
        }
    }
    let mut all: Vec<(String, f64, f64)> = sums.into_iter().map(|(name, (t, n))| (name, t, n)).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    Ok(all)
}

/// Names a launch by its ops, and by the shape of the last result.
fn name_launch(program: &Program, ops: &[usize]) -> String {
    let names: Vec<&str> = ops.iter().map(|i| program.ops[*i].opcode.name()).collect();
    let shape = ops.last().and_then(|i| program.ops[*i].results.first()).map(|v| program.type_of(*v));
    match shape {
        Some(ty) => format!("{} {}", names.join("+"), ty.display_on(&program.mesh)),
        None => names.join("+"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_of_the_encoder_of_wan_is_known() {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        let config = TextBenchConfig {
            model: root.join("models/wan2.1-14b"),
            dtype: DtypePolicy::Bf16,
            layers: None,
            length: None,
            runs: (0, 1),
            traces: 0,
        };
        let plan = plan_text_encoder(&config).unwrap();
        let program = plan.sealed.rank_program(TEXT_DEVICE_PHASE, Rank(0)).unwrap();
        let (flops, bytes) = program_work(program);
        // 24 layers of 4 · 4096² + 3 · 4096 · 10240 weights in bf16, used for 512 rows.
        let layer_weights = 4 * 4096_u64.pow(2) + 3 * 4096 * 10_240;
        let matmul_flops = 24 * 2 * 512 * layer_weights;
        assert!((matmul_flops..matmul_flops * 105 / 100).contains(&flops), "{flops}");
        assert!((48 * layer_weights..48 * layer_weights + (4 << 20)).contains(&bytes), "{bytes}");
        // It is captured as a graph, its matmuls are bf16, and the sum of its layers is f32.
        assert!(program.captured_graph().unwrap().is_some());
        let dtypes = |opcode: Opcode| -> Vec<&str> {
            let of = program.ops.iter().filter(|op| op.opcode == opcode);
            let mut all: Vec<&str> = of.map(|op| program.type_of(op.results[0]).dtype.name()).collect();
            all.dedup();
            all
        };
        assert_eq!(dtypes(Opcode::Matmul), ["bf16"]);
        assert_eq!(dtypes(Opcode::RelativeAttention), ["bf16"]);
        assert_eq!(dtypes(Opcode::Add), ["f32"]);
        assert_eq!(CudaBackend::find_unsupported(program), None);
        let ids = text_ids(program, 512, 40);
        assert!(ids[..40].iter().all(|id| *id < 256_384.0) && ids[40..] == [0.0; 472]);
    }
}
