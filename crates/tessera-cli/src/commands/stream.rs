//! `tessera stream`: runs a plan as processes on this host, or as one process of a run that a launcher started.

mod changes;
mod host_ranks;
mod join;
mod performance;
mod report;

use std::path::{Path, PathBuf};

use tessera::codes::T0040;
use tessera::faults::DrillConfig;
use tessera::files::ReservedFolder;
use tessera::frame_pipe::{FrameDestination, FrameTarget, RawFormat};
use tessera::launchers::{Launcher, LauncherPlacement, share_ranks};
use tessera::program_command::ProgramCommand;
use tessera::sim::{self, ClusterPrices, SimMachine};
use tessera::stream_options::{DEFAULT_PROMPT, OutputOptions, RunDevice, StreamOptions};
use tessera::synthetic_delays::{MediaDelays, SyntheticDelays};
use tessera::terminal::print_stderr_line;
use tessera::{Model, Plan, WeightsBase, WeightsOrigin};
use tessera_base::Diagnostic;

use crate::codes::T0030;
use crate::flags::encoders::EncoderArgs;
use crate::flags::mapping::{MappingArgs, MappingUse};
use crate::flags::video::VideoArgs;
use crate::flags::{AppliesTo, flag_set, named_values};
use crate::output::{CliError, CliResult, OutputFormat};
use crate::parse::{invalid_argument, parse_milliseconds, parse_weights_base};
use crate::progress::run_watched;
use changes::{parse_changes, parse_lora};
use join::JoinArgs;
use performance::PerformanceArgs;
use report::{ReportPlace, print_report};

const EXAMPLES: &str = "\
Examples:
  tessera stream models/demo
  tessera stream models/demo --mesh tp=2 --chunks 24 --prompt 'a blue square moves left'
  tessera stream models/demo --mesh tp=2 --topology pp1 --cache recompute
  tessera stream models/demo --chunks 12 --at 4:'a green circle moves up' --cut-at 8
  tessera stream --plan my-plan --out my-run
  tessera stream models/demo --raw - | ffplay -f rawvideo -pixel_format rgb24 -video_size 128x128 -
  tessera stream models/wan2.1-1.3b --weights synthetic:1 --device cuda      without a checkpoint
  tessera stream models/wan2.1-14b --mesh tp=8,pp=9 --device sim --cluster gb200-nvl72
  tessera stream models/demo --mesh tp=2 --device cuda      one GPU per rank
  tessera stream models/demo --mesh tp=2 --performance --gate-record gates.json   only if the gates are green

A stream is generated in chunks of a few frames each. Chunks count from 0. Ctrl-C stops after the current chunk and leaves a
complete run folder; a second Ctrl-C kills the ranks. Exit status 10 and above tells how a run failed; the message names a
code for `tessera explain`.";

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

    /// Device that runs the plan
    #[arg(long, value_parser = named_values(DEVICES), default_value = "cpu")]
    pub device: RunDevice,

    #[command(flatten)]
    pub simulated: ClusterArgs,

    /// Number of chunks to generate; a chunk is a few latent frames
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub chunks: u32,

    /// Prompt of the first chunk
    #[arg(long, value_name = "TEXT", default_value = DEFAULT_PROMPT)]
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

    /// File with the noise of each chunk's first denoising step, instead of seeded noise: a tensor
    /// `noise` of [chunks, tokens, width] or [chunks, channels, frames, height, width] in a
    /// safetensors file
    ///
    /// The calls of such a run carry the noise, and so its plan is another one; with --plan, plan with
    /// --noise-source call. Later steps draw their noise from the seed.
    #[arg(long, value_name = "FILE")]
    pub noise: Option<PathBuf>,

    #[command(flatten)]
    pub video: VideoArgs,

    /// Start a new scene at this chunk: earlier chunks are completed, then their context is
    /// discarded; may be repeated
    #[arg(long, value_name = "CHUNK", help_heading = CHANGES_HEADING)]
    pub cut_at: Vec<u32>,

    /// As --cut-at, but at once: earlier chunks that are queued or in flight are dropped; may be
    /// repeated
    #[arg(long, value_name = "CHUNK", help_heading = CHANGES_HEADING)]
    pub flush_at: Vec<u32>,

    /// Denoise with another list of steps from this chunk on: one of [schedule.lists] in the model's stream.toml, or
    /// `default`; may be repeated
    #[arg(long, value_name = "CHUNK:LIST", help_heading = CHANGES_HEADING)]
    pub steps_at: Vec<String>,

    /// Weigh the keys of the recomputed context with another attention bias from this chunk on, above 0 and at most 1;
    /// may be repeated
    #[arg(long, value_name = "CHUNK:BIAS", help_heading = CHANGES_HEADING)]
    pub bias_at: Vec<String>,

    /// Load other weights of the same shapes on every rank before this chunk, which starts a new
    /// scene (as --cut-at does); may be repeated
    #[arg(long, value_name = "CHUNK:DIR", help_heading = CHANGES_HEADING)]
    pub weights_at: Vec<String>,

    /// Add a LoRA to the generator's weights, times a strength [default: 1]; may be repeated
    #[arg(long, value_name = "FILE[:STRENGTH]")]
    pub lora: Vec<String>,

    /// Replace the LoRAs on every rank before this chunk, which starts a new scene (as --cut-at does):
    /// by this one, or by none with `CHUNK:none`; may be repeated
    #[arg(long, value_name = "CHUNK:FILE[:STRENGTH]", help_heading = CHANGES_HEADING)]
    pub lora_at: Vec<String>,

    /// Compute all weights from a seed instead of reading files, so that a model runs without a
    /// checkpoint; its output shows nothing
    #[arg(long, value_name = "synthetic:SEED")]
    pub weights: Option<String>,

    /// New folder for the video, the record and the report [default: out/MODEL-1, or the next free
    /// number]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Write no clip.png, which grows with the run; frames go to --raw, --y4m or --png alone
    #[arg(long)]
    pub no_clip: bool,

    /// Also write every frame as a PNG
    #[arg(long)]
    pub png: bool,

    /// Also write the latents, as latents.safetensors in the run folder; a model without a decoder
    /// always writes them
    #[arg(long)]
    pub latents: bool,

    /// Also write every frame as bare RGB, 8 bits per channel: to a new file or a named pipe, to
    /// standard output (-) or to an open file descriptor (fd:N)
    ///
    /// The run waits while the reader takes its time, and ends if the reader closes the pipe. With -,
    /// the summary goes to standard error.
    #[arg(long, value_name = "FILE|-|fd:N")]
    pub raw: Option<String>,

    /// As --raw, as YUV4MPEG2 (4:4:4), whose header states size and frame rate
    #[arg(long, value_name = "FILE|-|fd:N")]
    pub y4m: Option<String>,

    /// Also write the messages that each rank sends, as wire/rank-N.bin in the run folder; `tessera
    /// wire dump` decodes them
    #[arg(long)]
    pub wire_dump: bool,

    /// Fill memory that holds no value with NaN, and stop at the first op that accesses such memory
    ///
    /// The run finds an op that reads a temporary before it is written, after it is freed, or without
    /// an event after another stream's write. It is slower, and its output has the same bits. On GPUs,
    /// temporaries are filled between programs only.
    #[arg(long)]
    pub poison: bool,

    #[command(flatten)]
    pub encoders: EncoderArgs,

    /// Allow more ranks than CPU cores
    #[arg(long)]
    pub oversubscribe: bool,

    /// Inject a fault, such as flipped-cache@1:7#42 (fault, rank, call, draw of the place), under the
    /// limits of an ordinary run. Internal: the campaign of faults starts runs with it.
    #[arg(long, hide = true, value_parser = DrillConfig::from_armed_text)]
    pub arm_fault: Option<DrillConfig>,

    /// Minimum times of the leader's work per chunk, in milliseconds: FIRST to decode the first
    /// latent frame, REST to decode the other latent frames together, ENCODE to encode the anchor
    /// (a decoded frame that is encoded again as context of the next chunk)
    ///
    /// The leader waits until these times have passed, so that you can measure how decoding overlaps
    /// generation. Without REST, each other latent frame takes at least FIRST. Without ENCODE, the
    /// encode is not delayed. The anchor exists with --cache recompute only.
    #[arg(long, value_name = "FIRST[,REST[,ENCODE]]", help_heading = DELAYS_HEADING)]
    pub min_decode_ms: Option<String>,

    /// Minimum time of all denoising forwards of a chunk together, in milliseconds
    #[arg(long, value_name = "MS", help_heading = DELAYS_HEADING)]
    pub min_generate_ms: Option<String>,

    #[command(flatten)]
    pub performance: PerformanceArgs,

    #[command(flatten)]
    pub join: JoinArgs,

    /// Do not show progress
    #[arg(long, short)]
    pub quiet: bool,

    /// Format of the result and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

const CHANGES_HEADING: &str = "Changes during the stream";
const DELAYS_HEADING: &str = "Synthetic delays (to measure overlap)";

flag_set! {
    /// The simulated cluster.
    ClusterArgs by AppliesTo {
        [Simulation]
        /// Cluster to simulate: a catalog name, or a TOML file in the format that `tessera measure`
        /// writes [default: the cluster that the plan was estimated on; if none, hgx-h200 up to 8
        /// ranks, gb200-nvl72 above]
        #[arg(long, value_name = "NAME|FILE", help_heading = SIM_HEADING)]
        cluster: Option<String>,

        [Simulation]
        /// Executor profile: a runtime's efficiency curves, which set the time of each simulated op
        /// and collective; a name or a TOML file [default: the cluster's own]
        #[arg(long, value_name = "NAME|FILE", help_heading = SIM_HEADING)]
        profile: Option<String>,
    }
}

const SIM_HEADING: &str = "Simulated cluster (with --device sim)";

impl ClusterArgs {
    /// Rejects options of a simulated cluster without `--device sim`.
    ///
    /// # Errors
    /// T0040.
    fn check_device(&self, device: RunDevice) -> Result<(), CliError> {
        let given = self.given_flags(&[AppliesTo::Simulation]);
        let Some(option) = given.first().filter(|_| device != RunDevice::Sim) else { return Ok(()) };
        let name = DEVICES.iter().find(|(_, value, _)| *value == device).map_or("", |(name, ..)| name);
        let why = format!("{name}: runs on this machine, so there is no cluster to simulate");
        Err(CliError::usage(
            Diagnostic::error(&T0040, format!("{option} requires --device sim"))
                .with_label("--device", why)
                .with_hint(format!("add --device sim, or leave out {option}")),
        ))
    }
}

/// Values of `--device`, each with its help text.
const DEVICES: &[(&str, RunDevice, &str)] = &[
    ("cpu", RunDevice::Cpu, "CPU cores of this machine"),
    (
        "sim",
        RunDevice::Sim,
        "Simulated cluster: keeps simulated time and computes no values, so it needs no weights",
    ),
    ("cuda", RunDevice::Cuda, "NVIDIA GPUs of this machine, one per rank; `tessera doctor` lists them"),
];

/// Streams a plan on this host, or as one rank of a run that is started externally.
pub fn run(args: &Args, program: Result<ProgramCommand, Diagnostic>) -> CliResult {
    let changes = parse_changes(args)?;
    let outputs = parse_outputs(args)?;
    let place = if outputs.uses_stdout() { ReportPlace::StandardError } else { ReportPlace::StandardOutput };
    args.simulated.check_device(args.device)?;
    check_simulated_options(args)?;
    host_ranks::tie_to_host_process();
    let placement = args.join.find_placement()?;
    let (model, plan) = open_model_and_plan(args)?;
    let performance = args.performance.check_gates(&plan, args.device, args.format)?;
    let delays = parse_delays(args, plan.video.stream.chunk_frames.saturating_sub(1))?;
    // Joined ranks that share a disk must find the same name, so they reserve none.
    let reserved = match &args.out {
        None if placement.is_none() => Some(ReservedFolder::create(Path::new("out"), &plan.model)?),
        _ => None,
    };
    let free_dir = || first_free_dir(Path::new("out"), &plan.model);
    let options = StreamOptions {
        chunks: args.chunks,
        prompt: args.prompt.clone(),
        seed: args.seed,
        prompts_at: changes.prompts,
        seeds_at: changes.seeds,
        step_lists_at: changes.step_lists,
        biases_at: changes.biases,
        cuts_at: args.cut_at.clone(),
        flushes_at: args.flush_at.clone(),
        weights_at: changes.weights,
        noise: args.noise.clone(),
        video: args.video.to_input(),
        video_on: args.encoders.video_on,
        out: match &reserved {
            Some(folder) => folder.path().to_path_buf(),
            None => args.out.clone().unwrap_or_else(free_dir),
        },
        out_is_reserved: reserved.is_some(),
        outputs,
        wire_dump: args.wire_dump,
        poison: args.poison,
        oversubscribe: args.oversubscribe,
        text: args.encoders.to_text_options(),
        delays,
        device: args.device,
        drill: args.arm_fault.clone(),
        performance,
        command: std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect(),
    };
    if let Some(placement) = &placement
        && placement.process == 0
        && placement.launcher != Launcher::Script
        && !args.quiet
    {
        print_stderr_line(&placement.describe());
    }
    if args.device == RunDevice::Sim {
        return run_simulated(args, placement.as_ref(), &plan, &options);
    }
    if let Some(placement) = placement {
        let share = share_ranks(&placement, plan.sealed.mesh()).map_err(CliError::usage)?;
        let join_options = args.join.to_options(&placement, share)?;
        if share.count > 1 {
            return host_ranks::run(&program?, share, &placement);
        }
        let shown = (args.format, place);
        return join::run(plan, &model, &options, &join_options, args.quiet, shown)
            .map_err(|e| e.with_note(&placement.describe()));
    }
    let rank = program?.to_argv(&["rank"]);
    let report = run_watched(args.quiet, args.chunks, |interrupt, on_event| {
        tessera::stream::run(&plan, &model, &options, rank, interrupt, on_event)
    });
    print_report(&report?, (args.format, place), false)
}

/// Refuses options that only ranks of their own can follow, where all ranks are simulated.
fn check_simulated_options(args: &Args) -> Result<(), CliError> {
    let needs_ranks = [
        ("--wire-dump", args.wire_dump, "ranks that send messages"),
        ("--poison", args.poison, "ranks that compute values"),
        ("--weights", args.weights.is_some(), "ranks that load weights"),
        ("--lora", !args.lora.is_empty() || !args.lora_at.is_empty(), "ranks that load weights"),
    ];
    for (option, given, what) in needs_ranks {
        if given && args.device == RunDevice::Sim {
            return Err(CliError::usage(
                Diagnostic::error(&T0040, format!("{option} requires {what}"))
                    .with_label("--device sim", "all ranks are simulated in one process")
                    .with_hint(format!("leave out {option}, or run on another device")),
            ));
        }
    }
    Ok(())
}

/// Plans the model, or reads the plan that `--plan` names, and applies the origin of the weights.
fn open_model_and_plan(args: &Args) -> Result<(Model, Plan), CliError> {
    let weights = parse_weights_origin(args)?;
    let (model, plan) = match &args.plan {
        None => {
            let mut mapping = args.mapping.clone();
            if args.noise.is_some() {
                mapping.noise_source.get_or_insert(true);
            }
            if args.video.to_input().is_some() {
                mapping.video_input.get_or_insert(true);
            }
            let planned = mapping
                .open_and_plan(args.model.as_deref(), None, args.device == RunDevice::Cuda)
                .map_err(CliError::into_usage_if_invalid)?;
            if let Some(pixels) = planned.pixels.filter(|_| !args.quiet) {
                print_stderr_line(&format!("pixels {pixels}"));
            }
            (planned.model, planned.plan)
        }
        Some(folder) => {
            if let Some(option) = args.mapping.given_flags(&MappingUse::ALL).first() {
                return Err(plan_conflict_error(option));
            }
            match args.device {
                RunDevice::Cpu | RunDevice::Cuda => read_sealed_plan(folder, args.model.as_ref())?,
                RunDevice::Sim => read_plan_without_model(folder)?,
            }
        }
    };
    Ok((model.with_weights(weights), plan))
}

/// Simulates a plan on a cluster, in this process.
fn run_simulated(
    args: &Args,
    placement: Option<&LauncherPlacement>,
    plan: &Plan,
    options: &StreamOptions,
) -> CliResult {
    if let Some(placement) = placement {
        let share = share_ranks(placement, plan.sealed.mesh()).map_err(CliError::usage)?;
        let join_options = args.join.to_options(placement, share)?;
        join::rehearse(plan, options, &join_options, share, args.quiet)
            .map_err(|e| e.with_note(&placement.describe()))?;
        if share.first != 0 {
            return Ok(0);
        }
    }
    let ranks = plan.sealed.mesh().world_size();
    let machine = tessera_estimate::resolve_machine(
        args.simulated.cluster.as_deref(),
        args.simulated.profile.as_deref(),
        args.plan.as_deref(),
        ranks,
    )?;
    let prices = ClusterPrices::from_plan(plan, &machine)?;
    let machine = SimMachine { prices: &prices, name: prices.name() };
    let report = run_watched(args.quiet, args.chunks, |interrupt, on_event| {
        sim::run(plan, options, machine, interrupt, on_event)
    });
    print_report(&report?, (args.format, ReportPlace::StandardOutput), false)
}

/// Parses `--weights` and `--lora`.
fn parse_weights_origin(args: &Args) -> Result<WeightsOrigin, CliError> {
    let base = args.weights.as_deref().map_or(Ok(WeightsBase::Files), parse_weights_base);
    let loras = args.lora.iter().map(|text| parse_lora("--lora", text, "--lora style.safetensors:0.8"));
    match (base, loras.collect::<Result<Vec<_>, _>>()) {
        (Ok(base), Ok(loras)) => Ok(WeightsOrigin { base, loras }),
        (base, loras) => Err(CliError::from_usage_errors([base.err(), loras.err()].into_iter().flatten())),
    }
}

/// Parses the options of outputs, and reports all errors at once.
fn parse_outputs(args: &Args) -> Result<OutputOptions, CliError> {
    let (mut pipes, mut errors) = (Vec::new(), Vec::new());
    let given = [("--raw", &args.raw, RawFormat::Rgb24), ("--y4m", &args.y4m, RawFormat::Y4m)];
    for (option, text, format) in given {
        let Some(text) = text else { continue };
        match FrameDestination::parse(text) {
            Some(to) => pipes.push(FrameTarget { format, to }),
            None => errors.push(invalid_argument(
                option,
                text,
                "neither a file, nor `-`, nor `fd:` and a number",
                &format!("{option} - | ffplay -"),
            )),
        }
    }
    let outputs = OutputOptions { no_clip: args.no_clip, png: args.png, latents: args.latents, pipes };
    if outputs.uses_stdout() && args.format == OutputFormat::Json {
        errors.push(
            Diagnostic::error(&T0030, "--format json and the frames both go to standard output").with_hint(
                "leave out --format json and read record.jsonl, or send the frames to a file or fd:3",
            ),
        );
    }
    if errors.is_empty() { Ok(outputs) } else { Err(CliError::from_usage_errors(errors)) }
}

fn parse_delays(args: &Args, other_latents: u64) -> Result<SyntheticDelays, CliError> {
    let media =
        args.min_decode_ms.as_deref().map(|text| parse_decode_delays(text, other_latents)).transpose();
    let generate = args.min_generate_ms.as_deref();
    let generate = generate.map(|text| parse_milliseconds("--min-generate-ms", text)).transpose();
    match (media, generate) {
        (Ok(media), Ok(generate_ns)) => Ok(SyntheticDelays { media, generate_ns }),
        (a, b) => Err(CliError::from_usage_errors([a.err(), b.err()].into_iter().flatten())),
    }
}

pub(super) fn plan_conflict_error(option: &str) -> CliError {
    CliError::usage(
        Diagnostic::error(
            &T0030,
            format!("{option} cannot be given with --plan: a sealed plan is not changed"),
        )
        .with_hint(format!("leave out {option}, or plan again without --plan")),
    )
}

/// Returns the first of `out/demo-1`, `out/demo-2`… that does not exist.
fn first_free_dir(parent: &Path, model: &str) -> PathBuf {
    let folder = |n: u32| parent.join(format!("{model}-{n}"));
    (1..u32::MAX).map(folder).find(|p| p.symlink_metadata().is_err()).unwrap_or_else(|| folder(u32::MAX))
}

/// Reads a plan folder, and opens its model from `dir` or from the path that the plan records.
pub(super) fn read_sealed_plan(folder: &Path, dir: Option<&PathBuf>) -> Result<(Model, Plan), CliError> {
    let plan = Plan::read(folder)?;
    let model_dir = dir.cloned().unwrap_or_else(|| PathBuf::from(&plan.model_dir));
    let model = Model::open_for_plan(&model_dir, &plan).map_err(|mut d| {
        if dir.is_none() {
            d.notes.push(describe_recorded_model(folder, &model_dir));
            d.hint = Some("give the model's folder too: tessera stream MODEL --plan PLAN".to_string());
        }
        vec![d]
    })?;
    Ok((model, plan))
}

/// Says where a plan names the folder of its model, and for a relative path, where it was looked for.
fn describe_recorded_model(plan: &Path, model_dir: &Path) -> String {
    let recorded = format!("{} records the model folder {}", plan.display(), model_dir.display());
    match std::env::current_dir() {
        Ok(here) if model_dir.is_relative() => format!(
            "{recorded}, a path relative to the folder in which the plan was made; relative to the current folder {}, it is {}",
            here.display(),
            here.join(model_dir).display()
        ),
        _ => format!("{recorded}, as it was where the plan was made"),
    }
}

/// Reads a plan folder for a simulated run, which takes everything about the model from the plan.
fn read_plan_without_model(folder: &Path) -> Result<(Model, Plan), CliError> {
    let plan = Plan::read(folder)?;
    Ok((Model::from_plan(Path::new(&plan.model_dir), &plan), plan))
}

/// Parses minimum times of the decoder and encoder, such as `60,120,15` in milliseconds: for the
/// first latent of a chunk, for its other latents together, and for the encode of the anchor.
///
/// Without the second number each of the `other_latents` takes as long as the first. Without the
/// third the encode is not delayed.
fn parse_decode_delays(text: &str, other_latents: u64) -> Result<MediaDelays, Diagnostic> {
    let option = "--min-decode-ms";
    let words: Vec<&str> = text.split(',').collect();
    if words.len() > 3 {
        return Err(invalid_argument(option, text, "more than three numbers", "--min-decode-ms 60,120,15"));
    }
    let ns: Vec<u64> = words.iter().map(|w| parse_milliseconds(option, w)).collect::<Result<_, _>>()?;
    Ok(MediaDelays {
        first_ns: ns[0],
        rest_ns: ns.get(1).copied().unwrap_or(other_latents * ns[0]),
        encode_ns: ns.get(2).copied().unwrap_or(0),
    })
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
    fn modelled_times_are_filled_in() {
        let model = |text| parse_decode_delays(text, 2).map(|m| [m.first_ns, m.rest_ns, m.encode_ns]);
        assert_eq!(model("60").unwrap(), [60_000_000, 120_000_000, 0]);
        assert_eq!(model("0.5, 7 ,1").unwrap(), [500_000, 7_000_000, 1_000_000]);
        for bad in ["", "60,", "-1", "1e9", "NaN", "1,2,3,4"] {
            assert_eq!(model(bad).unwrap_err().code, &T0030, "{bad}");
        }
    }
}
