//! A whole stream as processes, up to frames on disk: what a viewer would get.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use tessera::stream::{StreamEvent, StreamOptions};
use tessera::{Interrupt, Mapping, Model, Overrides, Strategy, plan};

use crate::stats::{median, round};
use crate::{Measured, Output, refused};

/// Time a stream of processes up to frames on disk
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder of the model
    #[arg(long, value_name = "DIR", default_value = "models/demo")]
    model: PathBuf,

    /// Mesh, such as tp=2
    #[arg(long, default_value = "tp=1")]
    mesh: String,

    /// Cut by weights instead of tokens
    #[arg(long)]
    megatron: bool,

    /// Recompute the context before each chunk
    #[arg(long)]
    recompute: bool,

    /// Chunks to stream; the first is not timed
    #[arg(long, value_name = "N", default_value_t = 40)]
    chunks: u32,

    /// What to show
    #[arg(long, value_name = "TEXT", default_value = "a red circle moves right")]
    prompt: String,

    #[command(flatten)]
    pub output: Output,
}

/// Runs the benchmark.
pub fn run(args: &Args) -> anyhow::Result<Measured> {
    if args.chunks < 2 {
        bail!("--chunks {}: a rate needs two at least", args.chunks);
    }
    let overrides = Overrides { recompute: args.recompute.then_some(true), ..Overrides::default() };
    let model = Model::open(&args.model, &overrides).map_err(refused)?;
    let strategy = if args.megatron { Strategy::Megatron } else { Strategy::Ulysses };
    let mesh = args.mesh.parse().map_err(|d: Box<_>| refused(vec![*d]))?;
    let plan = plan::make(&model.video, &model.name, "", &Mapping { mesh, strategy, ..Mapping::default() });
    let plan = plan.map_err(refused)?;
    let dir = tempfile::tempdir()?;
    let options = StreamOptions {
        chunks: args.chunks,
        prompt: args.prompt.clone(),
        out: dir.path().join("run"),
        oversubscribe: true,
        command: std::env::args().collect(),
        ..StreamOptions::default()
    };
    let this = std::env::current_exe()?;
    let rank =
        vec![this.to_str().context("the path of this binary is not UTF-8")?.to_string(), "rank".to_string()];
    let mut arrivals = Vec::new();
    let mut on = |event| {
        if let StreamEvent::Chunk(_) = event {
            arrivals.push(Instant::now());
        }
    };
    let report = tessera::stream::run(&plan, &model, &options, rank, &Interrupt::default(), &mut on)
        .map_err(refused)?;
    if let Some(failure) = report.failure {
        bail!("the stream failed: {failure}");
    }
    let periods: Vec<f64> =
        arrivals.windows(2).map(|w| w[1].duration_since(w[0]).as_secs_f64() * 1e3).collect();
    let frames = plan.video.stream.frames_per_chunk() as f64;
    let total = periods.iter().sum::<f64>() / 1e3;
    let fps = if total > 0.0 { frames * periods.len() as f64 / total } else { 0.0 };
    let text = format!(
        "{} over {}: {fps:.1} frames per second delivered, a chunk of {frames} each {:.2} ms (median)",
        model.name,
        plan.sealed.mesh(),
        median(&periods),
    );
    let numbers = serde_json::json!({
        "bench": "stream",
        "model": model.name,
        "plan": plan.sealed.digest_hex(),
        "mesh": plan.sealed.mesh().to_string(),
        "strategy": strategy.name(),
        "recompute": plan.video.stream.recompute,
        "chunks": report.chunks,
        "frames_written": report.frames,
        "fps": round(fps),
        "median_ms": round(median(&periods)),
        "golden": report.golden,
    });
    Ok(Measured { text, numbers })
}
