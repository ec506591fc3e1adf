//! The network alone: every denoising forward and the clean pass of one steady chunk, on one rank in this process.
//!
//! Text keys and values are made once and not timed; noise, schedule arithmetic, decoding and transport are left
//! out. `tools/bench` times the same in PyTorch.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use tessera::{Mapping, Model, Overrides, Plan, plan};
use tessera_base::random::{DrawKey, normals};
use tessera_cpu::{Cpu, Pool};
use tessera_device::{Backend, CallData, Fault, Loaded, Observer, Scalar, Seat};
use tessera_models::{Step, steps};

use crate::stats::{least, median, round};
use crate::{Measured, Output, refused};

/// Chunks that are run and not timed: the first touches memory, the next learn nothing more.
const WARM_UP: u32 = 3;

/// Time the network's forwards of one steady chunk
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder of the model
    #[arg(long, value_name = "DIR", default_value = "models/demo")]
    model: PathBuf,

    /// Threads of the rank [default: one per core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,

    /// Chunks to time
    #[arg(long, value_name = "N", default_value_t = 40)]
    chunks: u32,

    #[command(flatten)]
    pub output: Output,
}

/// Runs the benchmark.
pub fn run(args: &Args) -> anyhow::Result<Measured> {
    ensure!(args.chunks > 0, "--chunks 0: nothing to time");
    let overrides = Overrides { recompute: Some(false), ..Overrides::default() };
    let model = Model::open(&args.model, &overrides).map_err(refused)?;
    let plan = plan::make(&model.video, &model.name, "", &Mapping::default()).map_err(refused)?;
    let threads = args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let mut rank = Rank::load(&model, &plan, threads)?;
    rank.warm()?;
    for chunk in 0..WARM_UP {
        rank.chunk(chunk)?;
    }
    let (mut chunks, mut denoise, mut clean) = (Vec::new(), Vec::new(), Vec::new());
    for chunk in 0..args.chunks {
        let times = rank.chunk(WARM_UP + chunk)?;
        chunks.push(times.iter().sum());
        denoise.extend_from_slice(&times[..times.len() - 1]);
        clean.extend(times.last());
    }
    let forwards = rank.steps.len() + 1;
    let text = format!(
        "{}: {forwards} forwards of a steady chunk on {threads} threads: median {:.3} ms, least {:.3} ms over {} chunks \
(denoise {:.3} ms each, clean {:.3} ms)",
        model.name,
        median(&chunks),
        least(&chunks),
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
        "median_ms": round(median(&chunks)),
        "min_ms": round(least(&chunks)),
        "denoise_ms": round(median(&denoise)),
        "clean_ms": round(median(&clean)),
    });
    Ok(Measured { text, numbers })
}

struct Unwatched;
impl Observer for Unwatched {
    fn issued(&mut self, _: usize) {}
    fn progress(&mut self, _: u32) {}
}

/// The only rank, with its programs loaded.
struct Rank {
    cpu: Cpu,
    loaded: BTreeMap<String, Loaded>,
    steps: Vec<Step>,
    chunk_frames: u64,
    window_frames: u64,
    frame_tokens: u64,
    text: Vec<f32>,
    /// Noisy latents of a chunk.
    noise: Vec<f32>,
}

impl Rank {
    fn load(model: &Model, plan: &Plan, threads: usize) -> anyhow::Result<Rank> {
        let mut weights = model.weights().map_err(refused)?;
        let sealed = &plan.sealed;
        let rank = sealed.mesh().iter().next().context("a mesh has a rank")?;
        let seat = Seat { mesh: *sealed.mesh(), rank };
        let mut cpu = Cpu::new(seat, Pool::new(threads)?, Vec::new(), Duration::from_secs(1));
        let video = &model.video;
        let wanted = ["text", "denoise.", "clean."];
        let mut loaded = BTreeMap::new();
        for name in sealed.phases().iter().filter(|n| wanted.iter().any(|w| n.starts_with(w))) {
            let (Some(program), Some(slots)) = (sealed.program(name, rank), sealed.slots(name, rank)) else {
                continue;
            };
            let program = Arc::new((**program).clone());
            loaded
                .insert(name.clone(), cpu.load(&program, slots, &mut weights).map_err(|d| refused(vec![d]))?);
        }
        let draw = |len: u64, draw| {
            let mut out = vec![0.0; len as usize];
            normals(DrawKey { seed: 0, chunk: 0, draw }, 0, &mut out);
            out
        };
        Ok(Rank {
            cpu,
            loaded,
            steps: steps(&video.stream),
            chunk_frames: video.stream.chunk_frames,
            window_frames: video.stream.window_frames,
            frame_tokens: video.frame_tokens(),
            text: draw(video.wan.text_len * video.wan.text_dim, 0),
            noise: draw(video.chunk_tokens() * video.wan.token_width(), 1),
        })
    }

    /// A prompt, and clean passes until the window is full.
    fn warm(&mut self) -> anyhow::Result<()> {
        let text = std::mem::take(&mut self.text);
        self.go("text", CallData { inputs: BTreeMap::from([("text", &text[..])]), ..CallData::default() })?;
        ensure!(self.cpu.write_buffer("x", &self.noise), "the plan has no buffer x of a chunk's latents");
        ensure!(
            self.cpu.write_buffer("latent", &self.noise),
            "the plan has no buffer latent of a chunk's latents"
        );
        for fill in (0..self.window_frames).step_by(self.chunk_frames as usize) {
            self.clean(fill, fill)?;
        }
        Ok(())
    }

    /// One steady chunk: milliseconds of each denoising forward and, last, of the clean pass.
    fn chunk(&mut self, chunk: u32) -> anyhow::Result<Vec<f64>> {
        let fill = self.window_frames - self.chunk_frames;
        // Chunks take the cache's rows in turn.
        let row = u64::from(chunk) * self.chunk_frames % self.window_frames;
        let mut times = Vec::new();
        for step in self.steps.clone() {
            let scalars = [
                ("t", Scalar::F32s(vec![step.timestep; self.chunk_frames as usize])),
                ("sigma", Scalar::F32(step.sigma)),
                ("start", Scalar::I64(fill as i64)),
                ("row", Scalar::I64((row * self.frame_tokens) as i64)),
            ];
            times.push(self.go(&format!("denoise.fill{fill}"), call(scalars))?);
        }
        times.push(self.clean(fill, row)?);
        Ok(times)
    }

    fn clean(&mut self, fill: u64, row: u64) -> anyhow::Result<f64> {
        let scalars = [
            ("t", Scalar::F32s(vec![0.0; self.chunk_frames as usize])),
            ("start", Scalar::I64(fill as i64)),
            ("row", Scalar::I64((row * self.frame_tokens) as i64)),
        ];
        // The last fill is also that of a full window.
        let fill = fill.min(self.window_frames - self.chunk_frames);
        self.go(&format!("clean.fill{fill}"), call(scalars))
    }

    /// Runs a phase; milliseconds.
    fn go(&mut self, phase: &str, call: CallData<'_>) -> anyhow::Result<f64> {
        let program = *self.loaded.get(phase).ok_or_else(|| anyhow!("the plan has no phase {phase}"))?;
        let begun = Instant::now();
        self.cpu.run(program, &call, &mut Unwatched).map_err(|f| match f {
            Fault::Failed(t) | Fault::Stalled(t) | Fault::Aborted(t) | Fault::Refused(t) => {
                anyhow!("{phase}: {t}")
            }
        })?;
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    }
}

fn call<const N: usize>(scalars: [(&'static str, Scalar); N]) -> CallData<'static> {
    CallData { scalars: scalars.into_iter().collect(), ..CallData::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_steady_chunk_is_four_denoise_forwards_and_a_clean_pass() {
        let args = Args {
            model: Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wan-odd"),
            threads: Some(2),
            chunks: 3,
            output: Output { json: true, save: false },
        };
        let result = run(&args).unwrap();
        assert_eq!(result.numbers["forwards"], 5);
        assert!(result.numbers["median_ms"].as_f64().unwrap() > 0.0);
        assert!(result.numbers["min_ms"].as_f64() <= result.numbers["median_ms"].as_f64());
    }
}
