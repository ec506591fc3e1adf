//! The model alone: all denoising forwards and the clean forward of one steady chunk, on one rank
//! in this process.
//!
//! The text K and V are computed once and not timed. Noise, scheduler arithmetic, decoding and
//! transport are excluded. `tools/bench` times the same forwards in PyTorch.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use tessera::{Mapping, Model, Overrides, Plan, plan};
use tessera_base::random::{DrawKey, fill_normals};
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::{Backend, CallData, Fault, MeshRank, NoObserver, ProgramHandle, Scalar};
use tessera_models::{SigmaStep, denoising_steps};

use crate::stats::{median, min_value, round_to_millis};
use crate::{BenchResult, diagnostics_error};

/// Number of untimed chunks. The first one touches the memory for the first time.
const WARM_UP_CHUNKS: u32 = 3;

/// Time the model's forwards of one steady chunk
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder of a video model: config.json, stream.toml and weights
    #[arg(long, value_name = "DIR", default_value = "models/demo")]
    model: PathBuf,

    /// Number of threads of the rank [default: one per core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,

    /// Number of chunks to time
    #[arg(long, value_name = "N", default_value_t = 40)]
    chunks: u32,
}

/// Times all forwards of one steady chunk on one rank in this process.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    ensure!(args.chunks > 0, "--chunks 0: nothing to time");
    let overrides = Overrides { recompute: Some(false), ..Overrides::default() };
    let model = Model::open(&args.model, &overrides).map_err(diagnostics_error)?;
    let plan =
        plan::plan_model(&model.video, &model.name, "", &Mapping::default()).map_err(diagnostics_error)?;
    let threads = args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let mut rank = BenchRank::load(&model, &plan, threads)?;
    rank.warm_up()?;
    for chunk in 0..WARM_UP_CHUNKS {
        rank.run_chunk(chunk)?;
    }
    let (mut chunks, mut denoise, mut clean) = (Vec::new(), Vec::new(), Vec::new());
    for chunk in 0..args.chunks {
        let times = rank.run_chunk(WARM_UP_CHUNKS + chunk)?;
        chunks.push(times.iter().sum());
        denoise.extend_from_slice(&times[..times.len() - 1]);
        clean.extend(times.last());
    }
    let forwards = rank.steps.len() + 1;
    let text = format!(
        "{}: {forwards} forwards of a steady chunk on {threads} threads: median {:.3} ms, min {:.3} ms over {} chunks \
(denoise {:.3} ms each, clean {:.3} ms)",
        model.name,
        median(&chunks),
        min_value(&chunks),
        args.chunks,
        median(&denoise),
        median(&clean),
    );
    let numbers = serde_json::json!({
        "bench": "dit",
        "model": model.name,
        "plan": plan.sealed.digest_hex(),
        "threads": threads,
        "chunks": args.chunks,
        "forwards": forwards,
        "median_ms": round_to_millis(median(&chunks)),
        "min_ms": round_to_millis(min_value(&chunks)),
        "denoise_ms": round_to_millis(median(&denoise)),
        "clean_ms": round_to_millis(median(&clean)),
    });
    Ok(BenchResult { text, numbers })
}

/// The single rank of the benchmark: a CPU backend with the plan's programs, and the inputs of a
/// chunk.
struct BenchRank {
    cpu: CpuBackend,
    loaded: BTreeMap<String, ProgramHandle>,
    steps: Vec<SigmaStep>,
    chunk_frames: u64,
    window_frames: u64,
    sink_frames: u64,
    frame_tokens: u64,
    text: Vec<f32>,
    /// Standard normals, one per latent value of a chunk; `warm_up` writes them to `x` and
    /// `latent`.
    noise: Vec<f32>,
}

impl BenchRank {
    fn load(model: &Model, plan: &Plan, threads: usize) -> anyhow::Result<BenchRank> {
        let mut weights = model.open_weights().map_err(diagnostics_error)?;
        let sealed = &plan.sealed;
        let rank = sealed.mesh().iter().next().context("a mesh has a rank")?;
        let placement = MeshRank { mesh: *sealed.mesh(), rank };
        let mut cpu = CpuBackend::new(placement, Pool::new(threads)?, Vec::new(), Duration::from_secs(1));
        let video = &model.video;
        let phase_prefixes = ["text", "denoise.", "clean."];
        let mut loaded = BTreeMap::new();
        for name in sealed.phase_names().iter().filter(|n| phase_prefixes.iter().any(|w| n.starts_with(w))) {
            let (Some(program), Some(slots)) =
                (sealed.rank_program(name, rank), sealed.rank_slots(name, rank))
            else {
                continue;
            };
            let program = Arc::new((**program).clone());
            loaded.insert(
                name.clone(),
                cpu.load(&program, slots, &mut weights).map_err(|d| diagnostics_error(vec![d]))?,
            );
        }
        let random_normals = |len: u64, random_normals| {
            let mut out = vec![0.0; len as usize];
            fill_normals(DrawKey { seed: 0, chunk: 0, draw: random_normals }, 0, &mut out);
            out
        };
        Ok(BenchRank {
            cpu,
            loaded,
            steps: denoising_steps(&video.stream),
            chunk_frames: video.stream.chunk_frames,
            window_frames: video.stream.window_frames,
            sink_frames: video.stream.sink_frames,
            frame_tokens: video.frame_tokens(),
            text: random_normals(video.text_rows() * video.wan.text_dim, 0),
            noise: random_normals(video.chunk_tokens() * video.wan.token_width(), 1),
        })
    }

    /// Runs the text program and then clean forwards until the KV cache window is full.
    fn warm_up(&mut self) -> anyhow::Result<()> {
        let text = std::mem::take(&mut self.text);
        self.run_phase(
            "text",
            CallData { inputs: BTreeMap::from([("text", &text[..])]), ..CallData::default() },
        )?;
        ensure!(
            self.cpu.write_buffer("x", &self.noise),
            "the plan has no buffer x of the size of a chunk's latents"
        );
        ensure!(
            self.cpu.write_buffer("latent", &self.noise),
            "the plan has no buffer latent of the size of a chunk's latents"
        );
        for fill in (0..self.window_frames).step_by(self.chunk_frames as usize) {
            self.run_clean_forward(fill, fill)?;
        }
        Ok(())
    }

    /// Runs one steady chunk and returns the milliseconds of each denoising forward and, last, of
    /// the clean forward.
    fn run_chunk(&mut self, chunk: u32) -> anyhow::Result<Vec<f64>> {
        let fill = self.window_frames - self.chunk_frames;
        // Chunks overwrite the rows of the KV cache behind the sink in round-robin order.
        let ring = self.window_frames - self.sink_frames;
        let row = self.sink_frames + u64::from(chunk) * self.chunk_frames % ring;
        let mut times = Vec::new();
        for step in self.steps.clone() {
            let scalars = [
                ("t", Scalar::F32s(vec![step.timestep; self.chunk_frames as usize])),
                ("sigma", Scalar::F32(step.sigma)),
                ("start", Scalar::I64(fill as i64)),
                ("row", Scalar::I64((row * self.frame_tokens) as i64)),
            ];
            times.push(self.run_phase(&format!("denoise.fill{fill}"), call_with_scalars(scalars))?);
        }
        times.push(self.run_clean_forward(fill, row)?);
        Ok(times)
    }

    fn run_clean_forward(&mut self, fill: u64, row: u64) -> anyhow::Result<f64> {
        let scalars = [
            ("t", Scalar::F32s(vec![0.0; self.chunk_frames as usize])),
            ("start", Scalar::I64(fill as i64)),
            ("row", Scalar::I64((row * self.frame_tokens) as i64)),
        ];
        // The last fill level also serves a full window.
        let fill = fill.min(self.window_frames - self.chunk_frames);
        self.run_phase(&format!("clean.fill{fill}"), call_with_scalars(scalars))
    }

    /// Runs a phase and returns its duration in milliseconds.
    fn run_phase(&mut self, phase: &str, call: CallData<'_>) -> anyhow::Result<f64> {
        let program = *self.loaded.get(phase).ok_or_else(|| anyhow!("the plan has no phase {phase}"))?;
        let begun = Instant::now();
        self.cpu.run(program, &call, &mut NoObserver).map_err(|f| match f {
            Fault::Failed(t)
            | Fault::Stalled(t)
            | Fault::Aborted(t)
            | Fault::Refused(t)
            | Fault::Poisoned(t) => {
                anyhow!("{phase}: {t}")
            }
        })?;
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    }
}

fn call_with_scalars<const N: usize>(scalars: [(&'static str, Scalar); N]) -> CallData<'static> {
    CallData { scalars: scalars.into_iter().collect(), ..CallData::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_steady_chunk_is_four_denoise_forwards_and_a_clean_forward() {
        let args = Args {
            model: Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wan-odd"),
            threads: Some(2),
            chunks: 3,
        };
        let result = run(&args).unwrap();
        assert_eq!(result.numbers["forwards"], 5);
        assert!(result.numbers["median_ms"].as_f64().unwrap() > 0.0);
        assert!(result.numbers["min_ms"].as_f64() <= result.numbers["median_ms"].as_f64());
    }
}
