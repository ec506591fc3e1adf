//! `tessera stream`: runs a plan as processes on this host.

use std::path::{Path, PathBuf};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tessera::Plan;
use tessera::StopHandle;
use tessera::sim::{self, ClusterPrices, SimMachine, T0040};
use tessera::stream::{StreamOptions, StreamReport};
use tessera::synthetic_delays::SyntheticDelays;
use tessera_base::Diagnostic;

use crate::options::{self, MappingArgs, StreamDevice, TargetArgs};
use crate::output::{CliError, CliResult, OutputFormat, write_stdout};
use crate::parse::{self, T0030};
use crate::progress::Progress;

const EXAMPLES: &str = "\
Examples:
  tessera stream models/demo
  tessera stream models/demo --mesh tp=2 --chunks 24 --prompt 'a blue square moves left'
  tessera stream models/demo --mesh tp=2 --topology pp1 --cache recompute
  tessera stream models/demo --chunks 12 --at 4:'a green circle moves up' --cut-at 8
  tessera stream --plan my-plan --out my-run
  tessera stream models/wan2.1-14b --mesh tp=8,pp=9 --device sim --cluster gb200-nvl72
  tessera stream models/demo --mesh tp=2 --device cuda      one GPU per rank

A stream is generated in chunks of a few frames each. Chunks count from 0. Ctrl-C stops after the current chunk and leaves a
complete run folder; a second Ctrl-C kills the ranks. Exit status 10 and above tells how a run failed; the message names a
code for `tessera explain`.";

/// Exit status after a stop request.
pub const EXIT_INTERRUPTED: u8 = 130;
/// The message for the first stop request while ranks stream.
pub const STOPPING_MESSAGE: &str = "stopping after the current chunk; interrupt again to kill the ranks";

/// Stream a video from a model over the ranks of one or several hosts
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, allow_negative_numbers = true)]
pub struct Args {
    /// Model folder, for example models/demo
    pub model: Option<PathBuf>,

    /// Run the plan in this folder (from `tessera plan --out`) instead of making a new one
    #[arg(long, value_name = "DIR")]
    pub plan: Option<PathBuf>,

    #[command(flatten)]
    pub mapping: MappingArgs,

    #[command(flatten)]
    pub target: TargetArgs,

    /// Number of chunks to generate; a chunk is a few latent frames
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub chunks: u32,

    /// Prompt of the first chunk
    #[arg(long, value_name = "TEXT", default_value = "a red circle moves right")]
    pub prompt: String,

    /// Random seed of the first chunk's noise
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Change the prompt from this chunk on; may be repeated
    #[arg(long, value_name = "CHUNK:TEXT", help_heading = CHANGES_HEADING)]
    pub at: Vec<String>,

    /// Change the seed from this chunk on; may be repeated
    #[arg(long, value_name = "CHUNK:SEED", help_heading = CHANGES_HEADING)]
    pub seed_at: Vec<String>,

    /// Start a new scene at this chunk: earlier chunks are completed, then their context is
    /// discarded; may be repeated
    #[arg(long, value_name = "CHUNK", help_heading = CHANGES_HEADING)]
    pub cut_at: Vec<u32>,

    /// As --cut-at, but at once: earlier chunks that are queued or in flight are dropped; may be
    /// repeated
    #[arg(long, value_name = "CHUNK", help_heading = CHANGES_HEADING)]
    pub flush_at: Vec<u32>,

    /// Load other weights of the same shapes on every rank before this chunk, which starts a new
    /// scene (as --cut-at does); may be repeated
    #[arg(long, value_name = "CHUNK:DIR", help_heading = CHANGES_HEADING)]
    pub weights_at: Vec<String>,

    /// New folder for the video, the record and the report [default: out/MODEL-1, or the next free
    /// number]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Also write every frame as a PNG
    #[arg(long)]
    pub png: bool,

    /// Allow more ranks than CPU cores
    #[arg(long)]
    pub oversubscribe: bool,

    /// Minimum times of decode and encode per chunk, in milliseconds: of the first latent, of the
    /// other latents together, and of the anchor
    ///
    /// Delays the leader's real work to these times, to measure how decoding overlaps generation.
    /// REST defaults to FIRST for each other latent, ENCODE to no delay. The anchor is the decoded
    /// frame that is encoded again as context of the next chunk; it exists with --cache recompute
    /// only.
    #[arg(long, value_name = "FIRST[,REST[,ENCODE]]", help_heading = DELAYS_HEADING)]
    pub min_decode_ms: Option<String>,

    /// Minimum time of all denoising forwards of a chunk together, in milliseconds
    #[arg(long, value_name = "MS", help_heading = DELAYS_HEADING)]
    pub min_generate_ms: Option<String>,

    #[command(flatten)]
    pub join: crate::join::JoinArgs,

    /// Do not show progress
    #[arg(long, short)]
    pub quiet: bool,

    /// Format of the result
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

const CHANGES_HEADING: &str = "Changes during the stream";
const DELAYS_HEADING: &str = "Synthetic delays (to measure overlap)";

/// Streams a plan on this host, or as one rank of a run that is started externally.
pub fn run(args: &Args) -> CliResult {
    let changes = parse_changes(args)?;
    args.target.check_sim_options()?;
    let (model, plan) = match &args.plan {
        None => args.mapping.open_and_plan(args.model.as_deref(), None)?,
        Some(folder) => {
            if let Some(option) = args.mapping.first_given() {
                return Err(plan_conflict_error(option));
            }
            match args.target.device {
                StreamDevice::Cpu | StreamDevice::Cuda => {
                    options::read_sealed_plan(folder, args.model.as_ref())?
                }
                StreamDevice::Sim => options::read_plan_without_model(folder)?,
            }
        }
    };
    let delays = parse_delays(args, plan.video.stream.chunk_frames.saturating_sub(1))?;
    let options = StreamOptions {
        chunks: args.chunks,
        prompt: args.prompt.clone(),
        seed: args.seed,
        prompts_at: changes.prompts,
        seeds_at: changes.seeds,
        cuts_at: args.cut_at.clone(),
        flushes_at: args.flush_at.clone(),
        weights_at: changes.weights,
        out: args.out.clone().unwrap_or_else(|| first_free_dir(Path::new("out"), &plan.model)),
        png: args.png,
        oversubscribe: args.oversubscribe,
        delays,
        device: args.target.device.to_rank_device(),
        drill: None,
        command: std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect(),
    };
    if args.target.device == StreamDevice::Sim {
        return run_simulated(args, &plan, &options);
    }
    if let Some(join_options) = args.join.options_from_env()? {
        return crate::join::run(plan, &model, &options, &join_options, args.quiet, args.format);
    }
    let rank = vec![current_exe_path()?, "rank".to_string()];
    let progress = Progress::new(args.quiet, args.chunks);
    let interrupt = StopHandle::default();
    let listener = handle_signals(&interrupt, &progress, || STOPPING_MESSAGE);
    let report =
        tessera::stream::run(&plan, &model, &options, rank, &interrupt, &mut |e| progress.show_event(&e));
    if let Some(listener) = listener {
        listener.close();
    }
    progress.clear_bar();
    print_report(&report?, args.format, false)
}

/// Simulates a plan on a cluster, in this process.
fn run_simulated(args: &Args, plan: &Plan, options: &StreamOptions) -> CliResult {
    if args.join.options_from_env()?.is_some() {
        return Err(CliError::usage(vec![
            Diagnostic::error(
                &T0040,
                "RANK and WORLD_SIZE are set, which makes this process one rank of several",
            )
            .with_label("--device sim", "all ranks are simulated in one process")
            .with_hint("unset RANK and WORLD_SIZE, and start one process"),
        ]));
    }
    let ranks = plan.sealed.mesh().world_size();
    let machine = sim::resolve_machine(
        args.target.cluster.as_deref(),
        args.target.profile.as_deref(),
        args.plan.as_deref(),
        ranks,
    )?;
    let prices = ClusterPrices::from_plan(plan, &machine)?;
    let machine = SimMachine { prices: &prices, name: prices.name() };
    let progress = Progress::new(args.quiet, args.chunks);
    let interrupt = StopHandle::default();
    let listener = handle_signals(&interrupt, &progress, || STOPPING_MESSAGE);
    let report = sim::run(plan, options, machine, &interrupt, &mut |e| progress.show_event(&e));
    if let Some(listener) = listener {
        listener.close();
    }
    progress.clear_bar();
    print_report(&report?, args.format, false)
}

struct StreamChanges {
    prompts: Vec<(u32, String)>,
    seeds: Vec<(u32, u64)>,
    weights: Vec<(u32, PathBuf)>,
}

/// Parses `--at`, `--seed-at` and `--weights-at`, and reports all errors at once.
fn parse_changes(args: &Args) -> Result<StreamChanges, CliError> {
    let mut errors = Vec::new();
    let mut out = StreamChanges { prompts: Vec::new(), seeds: Vec::new(), weights: Vec::new() };
    for text in &args.at {
        parse::parse_prompt_at(text).map_or_else(|d| errors.push(d), |p| out.prompts.push(p));
    }
    for text in &args.seed_at {
        parse::parse_seed_at(text).map_or_else(|d| errors.push(d), |s| out.seeds.push(s));
    }
    for text in &args.weights_at {
        parse::parse_weights_at(text).map_or_else(|d| errors.push(d), |w| out.weights.push(w));
    }
    errors.extend(repeated_chunk_error("--at", out.prompts.iter().map(|(c, _)| *c)));
    errors.extend(repeated_chunk_error("--seed-at", out.seeds.iter().map(|(c, _)| *c)));
    errors.extend(repeated_chunk_error("--cut-at", args.cut_at.iter().copied()));
    errors.extend(repeated_chunk_error("--flush-at", args.flush_at.iter().copied()));
    errors.extend(repeated_chunk_error("--weights-at", out.weights.iter().map(|(c, _)| *c)));
    if errors.is_empty() { Ok(out) } else { Err(CliError::usage(errors)) }
}

fn parse_delays(args: &Args, other_latents: u64) -> Result<SyntheticDelays, CliError> {
    let media =
        args.min_decode_ms.as_deref().map(|text| parse::parse_decode_delays(text, other_latents)).transpose();
    let generate = args.min_generate_ms.as_deref();
    let generate = generate.map(|text| parse::parse_milliseconds("--min-generate-ms", text)).transpose();
    match (media, generate) {
        (Ok(media), Ok(generate_ns)) => Ok(SyntheticDelays { media, generate_ns }),
        (a, b) => Err(CliError::usage([a.err(), b.err()].into_iter().flatten().collect::<Vec<_>>())),
    }
}

fn repeated_chunk_error(option: &str, chunks: impl Iterator<Item = u32>) -> Option<Diagnostic> {
    let mut seen = std::collections::BTreeSet::new();
    let again = chunks.into_iter().find(|c| !seen.insert(*c))?;
    Some(
        Diagnostic::error(&T0030, format!("{option} names chunk {again} twice"))
            .with_hint("leave one of them out"),
    )
}

fn plan_conflict_error(option: &str) -> CliError {
    CliError::usage(vec![
        Diagnostic::error(
            &T0030,
            format!("{option} cannot be given with --plan: a sealed plan is not changed"),
        )
        .with_hint(format!("leave out {option}, or plan again without --plan")),
    ])
}

/// Returns the first of `out/demo-1`, `out/demo-2`… that does not exist.
fn first_free_dir(parent: &Path, model: &str) -> PathBuf {
    let folder = |n: u32| parent.join(format!("{model}-{n}"));
    (1..u32::MAX).map(folder).find(|p| p.symlink_metadata().is_err()).unwrap_or_else(|| folder(u32::MAX))
}

/// Returns the path of this binary, which the rank processes run too.
pub fn current_exe_path() -> Result<String, Diagnostic> {
    let why =
        |why: String| Diagnostic::error(&T0030, format!("cannot determine the path of this binary: {why}"));
    let path = std::env::current_exe().map_err(|e| why(e.to_string()))?;
    path.to_str().map(str::to_string).ok_or_else(|| why("it is not UTF-8".to_string()))
}

/// Turns SIGINT and SIGTERM into stop requests; otherwise they would end the launcher at once, and
/// the ranks with it. `first_message` returns the message for the first request.
pub fn handle_signals(
    interrupt: &StopHandle,
    progress: &Progress,
    first_message: impl Fn() -> &'static str + Send + 'static,
) -> Option<signal_hook::iterator::Handle> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).ok()?;
    let handle = signals.handle();
    let (interrupt, progress) = (interrupt.clone(), progress.clone());
    let run_listener = move || {
        for (count, _) in signals.forever().enumerate() {
            interrupt.request_stop();
            match count {
                0 => progress.print_line(first_message()),
                1 => progress.print_line("killing the ranks"),
                // The ranks die with their launcher.
                _ => std::process::exit(EXIT_INTERRUPTED.into()),
            }
        }
    };
    std::thread::Builder::new().name("signals".to_string()).spawn(run_listener).ok()?;
    Some(handle)
}

/// Prints the result of a run. `failure_printed` suppresses the failure, for callers that have
/// already printed it.
pub fn print_report(report: &StreamReport, format: OutputFormat, failure_printed: bool) -> CliResult {
    let text = match format {
        OutputFormat::Json => render_json(report),
        OutputFormat::Text => render_text(report),
    };
    write_stdout(&text)?;
    if let Some(f) = report.failure.as_ref().filter(|_| format == OutputFormat::Text && !failure_printed) {
        print_failure(f);
    }
    Ok(report.exit_code)
}

/// Prints the failure of a run.
pub fn print_failure(f: &tessera::Failure) {
    let rank = f.rank.map_or(String::new(), |r| format!(", rank {r}"));
    eprintln!(
        "failed[{}]: {}{rank}\n  {}\n\nmore: tessera explain {}",
        f.code,
        f.class.as_str(),
        f.text.replace("; ", "\n  "),
        f.code
    );
}

/// The files that a run folder may contain, with the most useful ones first.
const RUN_DIR_FILES: &[(&str, &str)] = &[
    ("clip.png", "the video, an animated PNG for any browser"),
    ("latents.f32", "the latents, because the model has no decoder"),
    ("frames", "every frame as a PNG"),
    ("report.html", "the report, for a browser"),
    ("trace.json", "a timeline for ui.perfetto.dev"),
    ("record.jsonl", "the record of every chunk, as JSON lines"),
];

fn render_text(r: &StreamReport) -> String {
    let state = match (&r.failure, r.interrupted) {
        (Some(_), _) => ", failed",
        (None, true) => ", stopped on request",
        (None, false) => "",
    };
    let chunks = if r.chunks == 1 { "1 chunk".to_string() } else { format!("{} chunks", r.chunks) };
    let frames = if r.frames > 0 {
        format!(", {} frames, {:.1} frames per second", r.frames, r.fps)
    } else {
        String::new()
    };
    let dropped = if r.dropped > 0 { format!(", {} dropped", r.dropped) } else { String::new() };
    let mut out = format!("{}: {chunks}{dropped}{frames}{state}\n", r.out.display());
    if let Some(machine) = &r.machine {
        out += &format!("simulated time on {machine}; no values were computed, so there is no clip\n");
    }
    if let Some(golden) = &r.golden {
        out += &format!("golden {golden}\n");
    }
    if let Some(o) = &r.overlap {
        let ms = |ns: u64| ns as f64 / 1e6;
        let score = match o.stage0_ns {
            0 => "nothing to overlap".to_string(),
            _ => format!("OverlapScore {:.2}", o.score),
        };
        out += &format!(
            "period {:.1} ms: leader {:.1} ms, generator {:.1} ms, mesh idle {:.1} ms; {score}\n",
            ms(o.period_ns),
            ms(o.stage0_ns),
            ms(o.stage1_ns),
            ms(o.idle_ns),
        );
    }
    let files: Vec<Vec<String>> = RUN_DIR_FILES
        .iter()
        .map(|(name, what)| (r.out.join(name), what))
        .filter(|(path, _)| path.exists())
        .map(|(path, what)| vec![path.display().to_string(), what.to_string()])
        .collect();
    out + &crate::output::format_table(&files, &[false, false])
}

fn render_json(r: &StreamReport) -> String {
    let failure = r.failure.as_ref().map(
        |f| serde_json::json!({"class": f.class.as_str(), "rank": f.rank, "code": f.code, "text": f.text}),
    );
    let fields = serde_json::json!({
        "out": r.out.display().to_string(),
        "chunks": r.chunks,
        "dropped": r.dropped,
        "frames": r.frames,
        "fps": r.fps,
        "golden": r.golden,
        "machine": r.machine,
        "pipeline": r.overlap.as_ref().map(|o| serde_json::json!({
            "chunks": o.chunks,
            "overlap_score": o.score,
            "passes": o.passes_gate(),
            "period_ns": o.period_ns,
            "stage0_ns": o.stage0_ns,
            "stage1_ns": o.stage1_ns,
            "idle_ns": o.idle_ns,
            "queue_in": o.queue_in,
            "queue_out": o.queue_out,
            "digest_share": o.digest_share,
        })),
        "interrupted": r.interrupted,
        "exit_code": r.exit_code,
        "failure": failure,
    });
    fields.to_string() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_free_folder_is_used() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(first_free_dir(dir.path(), "demo"), dir.path().join("demo-1"));
        std::fs::create_dir(dir.path().join("demo-1")).unwrap();
        std::fs::write(dir.path().join("demo-2"), "").unwrap();
        assert_eq!(first_free_dir(dir.path(), "demo"), dir.path().join("demo-3"));
    }

    #[test]
    fn a_repeated_chunk_is_an_error() {
        assert!(
            repeated_chunk_error("--at", [3, 1, 3].into_iter()).unwrap().message.contains("chunk 3 twice")
        );
        assert!(repeated_chunk_error("--at", [3, 1].into_iter()).is_none());
    }
}
