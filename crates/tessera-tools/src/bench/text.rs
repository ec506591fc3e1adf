//! `bench text`: times the program of a UMT5 text encoder alone, on one GPU, with random weights.

use std::path::PathBuf;

use tessera::clock::monotonic_ns;
use tessera::gpus::GpuDiscovery;
use tessera::{DtypePolicy, Mapping, Model, Overrides, Plan, cuda, plan};
use tessera_base::Diagnostics;
use tessera_device::{Backend, Scalar};
use tessera_ir::{Opcode, Program};
use tessera_mesh::Rank;
use tessera_models::{TEXT_DEVICE_PHASE, TEXT_IDS, TEXT_LENGTH, TextEncoder, Umt5Config};

use super::COLLECTIVE_TIMEOUT;
use super::loaded_program::{LaunchTotal, LoadedProgram, count_flops};
use super::synthetic_weights::SyntheticWeights;

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
    /// Launches of a run by kind, the longest first; empty unless traced.
    pub launches: Vec<LaunchTotal>,
}

/// Loads the encoder of Wan on the first GPU and times it.
///
/// # Errors
/// T0061 if it cannot load or run, and diagnostics of the model, the plan or the GPU.
pub fn time_text_encoder(config: &TextBenchConfig) -> Result<TextTiming, Diagnostics> {
    let plan = plan_text_encoder(config)?;
    let rows = plan.video.wan.text_len;
    let length = config.length.unwrap_or(rows).clamp(1, rows);
    let gpus = GpuDiscovery::discover();
    cuda::check_gpus(&gpus, 1)?;
    let begun = monotonic_ns();
    let mut backend =
        cuda::open_cuda(&gpus, &plan.sealed, Rank(0), 0, &[], COLLECTIVE_TIMEOUT).map_err(|d| vec![d])?;
    let mut weights = SyntheticWeights::default();
    let mut text = LoadedProgram::load(&mut backend, &plan, (TEXT_DEVICE_PHASE, Rank(0)), &mut weights)?;
    let load_s = monotonic_ns().saturating_sub(begun) as f64 / 1e9;
    text.inputs.insert(TEXT_IDS.to_string(), text_ids(&text.program, rows, length));
    text.scalars.insert(TEXT_LENGTH.to_string(), Scalar::I64(length as i64));
    let first_ms = text.time_run(&mut backend)?;
    let (warm, timed) = config.runs;
    for _ in 0..warm {
        text.time_run(&mut backend)?;
    }
    let runs_ms = (0..timed).map(|_| text.time_run(&mut backend)).collect::<Result<_, _>>()?;
    let launches = text.trace_launches(&mut backend, config.traces)?;
    Ok(TextTiming {
        plan: plan.sealed.digest_hex(),
        rows: (rows, length),
        runs_ms,
        flops: count_flops(&text.program),
        weight_bytes: read_weight_bytes(&text.program),
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

/// Returns the bytes of the weights that a run reads as a whole: all but the table of words.
fn read_weight_bytes(program: &Program) -> u64 {
    let tables: Vec<_> = program.ops.iter().filter(|op| op.opcode == Opcode::Embed).collect();
    let weights = program.ops.iter().filter(|op| op.opcode == Opcode::Weight).map(|op| op.results[0]);
    let read = weights.filter(|v| tables.iter().all(|op| op.operands[1] != *v));
    read.map(|v| program.type_of(v).byte_size().0).sum()
}

#[cfg(test)]
mod tests {
    use tessera_cuda::CudaBackend;

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
        let (flops, bytes) = (count_flops(program), read_weight_bytes(program));
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
