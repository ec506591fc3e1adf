//! A whole stream as processes, up to frames on disk: the rate that a viewer would see.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, bail};
use tessera::stream_options::{StreamEvent, StreamOptions};
use tessera::{Mapping, Model, Overrides, StopHandle, Strategy, plan};

use crate::stats::{median, round_to_millis};
use crate::{BenchResult, OutputArgs, diagnostics_error};

/// Time a stream of processes up to frames on disk
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder of a video model: config.json, stream.toml and weights
    #[arg(long, value_name = "DIR", default_value = "models/demo")]
    model: PathBuf,

    /// Mesh of the stream, such as tp=2; each rank is a process
    #[arg(long, default_value = "tp=1")]
    mesh: String,

    /// Shard weights instead of tokens
    #[arg(long)]
    megatron: bool,

    /// Recompute the context before each chunk
    #[arg(long)]
    recompute: bool,

    /// Number of chunks to stream; the first is not timed
    #[arg(long, value_name = "N", default_value_t = 40)]
    chunks: u32,

    /// Text prompt of all chunks
    #[arg(long, value_name = "TEXT", default_value = "a red circle moves right")]
    prompt: String,

    #[command(flatten)]
    pub output: OutputArgs,
}

/// Streams with one process per rank and measures the rate of frames on disk.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    if args.chunks < 2 {
        bail!("--chunks {}: the minimum is 2", args.chunks);
    }
    let overrides = Overrides { recompute: args.recompute.then_some(true), ..Overrides::default() };
    let model = Model::open(&args.model, &overrides).map_err(diagnostics_error)?;
    let strategy = if args.megatron { Strategy::Megatron } else { Strategy::Ulysses };
    let mesh = args.mesh.parse().map_err(|d: Box<_>| diagnostics_error(vec![*d]))?;
    let plan =
        plan::plan_model(&model.video, &model.name, "", &Mapping { mesh, strategy, ..Mapping::default() });
    let plan = plan.map_err(diagnostics_error)?;
    let dir = tempfile::tempdir()?;
    let options = StreamOptions {
        chunks: args.chunks,
        prompt: args.prompt.clone(),
        out: dir.path().join("run"),
        oversubscribe: true,
        command: std::env::args().collect(),
        ..StreamOptions::default()
    };
    let binary = std::env::current_exe()?;
    let rank_argv = vec![
        binary.to_str().context("the path of this binary is not UTF-8")?.to_string(),
        "rank".to_string(),
    ];
    let mut arrivals = Vec::new();
    let mut on_event = |event| {
        if let StreamEvent::Chunk(_) = event {
            arrivals.push(Instant::now());
        }
    };
    let report =
        tessera::stream::run(&plan, &model, &options, rank_argv, &StopHandle::default(), &mut on_event)
            .map_err(diagnostics_error)?;
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
        "fps": round_to_millis(fps),
        "median_ms": round_to_millis(median(&periods)),
        "golden": report.golden,
    });
    Ok(BenchResult { text, numbers })
}
