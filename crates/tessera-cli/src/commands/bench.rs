//! `tessera bench`: measures the DiT of a video model, its text encoder, or single phases of a plan on this
//! machine's GPUs.

mod phases;
mod text;

use std::io::BufRead;
use std::path::PathBuf;

use clap::Subcommand;
use tessera::gpus::GpuDiscovery;
use tessera::program_command::ProgramCommand;
use tessera::terminal::print_stderr;
use tessera::{DtypePolicy, Mapping, Strategy, Transport};
use tessera_tools::bench::{
    BenchConfig, BenchPoint, BenchRanks, ErrorRow, FORWARDS_PER_STEP, FRAMES_PER_STEP, LaunchTotal,
    MachineModel, RankForward, TracedForward, build_points, machine_for, median_and_deciles, rank_main,
    write_timeline,
};

use tessera_base::{Diagnostic, DiagnosticFormat, render_all};

use crate::flags::mapping::{DTYPES, STRATEGIES, TRANSPORTS, parse_mesh, require_axes};
use crate::flags::named_values;
use crate::output::{CliError, CliResult, OutputFormat, format_table, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera bench dit                                          one GPU: the 14B model in bf16 at 480x832
  tessera bench dit --dtype fp8                              the same with the matmuls of transformer blocks in fp8
  tessera bench dit --mesh tp=4 --size 480x832,320x576       four GPUs that share the tokens; two sizes, one after another
  tessera bench dit --mesh tp=4 --trace --trace-to t.json    time per kernel class, compared with the estimate
  tessera bench text                                         the text encoder UMT5-XXL for one prompt

Weights are random, so no download is needed. A step is five forwards of the DiT, which yield twelve frames. To compare with
PyTorch on the same GPUs in the same run, see tools/bench/README.md.";

/// Benchmark the denoising network (DiT) or the text encoder of a video model on GPUs
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    pub command: BenchCommand,
}

impl Args {
    /// Returns the format in which `main` prints the diagnostics of a failed benchmark.
    pub fn format(&self) -> OutputFormat {
        match &self.command {
            BenchCommand::Dit(dit) => dit.format,
            BenchCommand::Phases(phases) => phases.format,
            BenchCommand::Text(text) => text.format,
        }
    }
}

/// The benchmarks of `tessera bench`, one subcommand each.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    Dit(DitArgs),
    Phases(Box<phases::PhasesArgs>),
    Text(text::TextArgs),
}

/// Measure the step time of the DiT: a step is five denoising forwards with three latent frames of
/// context, without text encoder and decoder
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct DitArgs {
    /// Folder with the model's config; weights are not read
    #[arg(default_value = "models/wan2.1-14b")]
    pub model: PathBuf,

    /// Mesh axes and their sizes, for example tp=4; each rank uses one GPU
    #[arg(long, value_name = "MESH", value_parser = require_axes, default_value = "tp=1")]
    pub mesh: String,

    /// How tp shards a transformer block: tokens (ulysses) or weights (megatron)
    #[arg(long, value_parser = named_values(STRATEGIES), default_value = "ulysses")]
    pub strategy: Strategy,

    /// Compute dtype of matmuls, of the activations that they produce, and of KV caches
    #[arg(long, value_parser = named_values(DTYPES), default_value = "bf16")]
    pub dtype: DtypePolicy,

    /// Split the rows (tokens) of a block into N row chunks, so that the all-reduce of one overlaps
    /// the compute of another; megatron only
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub overlap_chunks: u32,

    /// Transport of collectives between GPUs
    #[arg(long, value_parser = named_values(TRANSPORTS), default_value = "best")]
    pub transport: Transport,

    /// Height and width of the picture in pixels [default: the model's]
    ///
    /// Several sizes, separated by commas or given by repeated options, share one load of the model
    /// and are measured one after another.
    #[arg(long, value_name = "HxW", value_delimiter = ',', value_parser = parse_size)]
    pub size: Vec<(u64, u64)>,

    /// Number of transformer blocks to run; few blocks make a quick test [default: all]
    #[arg(long, value_name = "N")]
    pub layers: Option<u64>,

    /// Number of steps to measure
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub steps: usize,

    /// Warm-up of each size before measuring, in seconds
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    pub warm: f64,

    /// Device that runs the ranks; there is no benchmark on CPU cores
    #[arg(long, default_value = "cuda")]
    pub device: BenchDevice,

    /// Run a reference case: MODEL is a folder with weights and inputs that
    /// tools/bench/dit_gpu.py --dump wrote; the outputs go to its subfolder `ours`
    #[arg(long)]
    pub case: bool,

    /// Print a digest of the latent that all ranks predict together; if two runs print the same
    /// digest, they computed the same bits
    #[arg(long)]
    pub digest: bool,

    /// After the steps, trace N forwards, and compare the median time of each kernel class with the
    /// estimate [default N: 5]
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "5", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub trace: Option<u32>,

    /// Write the trace of all ranks to this file (JSON for ui.perfetto.dev); implies --trace
    #[arg(long, value_name = "FILE")]
    pub trace_to: Option<PathBuf>,

    /// Cluster for the estimate with which --trace compares: a catalog name or a TOML file
    /// [default: the catalog entry with these GPUs]
    #[arg(long, value_name = "NAME|FILE")]
    pub cluster: Option<String>,

    /// Executor profile for the estimate with which --trace compares: a name or a TOML file
    /// [default: tessera]
    #[arg(long, value_name = "NAME|FILE")]
    pub profile: Option<String>,

    /// Let tools/bench control the benchmark: read lines `run SIZE STEPS` from standard input,
    /// answer each with one line of JSON, and end at `quit`
    #[arg(long, conflicts_with_all = ["trace", "trace_to"])]
    pub serve: bool,

    /// Format of the measurements and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Devices of the benchmark; the doc comment of a value is its help text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BenchDevice {
    /// NVIDIA GPUs of this machine
    Cuda,
}

/// Measures the DiT of a video model, its text encoder, or single phases of a plan on this machine's GPUs.
pub fn run(args: &Args, program: Result<ProgramCommand, Diagnostic>) -> CliResult {
    match &args.command {
        BenchCommand::Dit(dit) => run_dit(dit, &program?),
        BenchCommand::Phases(phases) => phases::run(phases, &program?),
        BenchCommand::Text(text) => text::run(text),
    }
}

fn run_dit(dit: &DitArgs, program: &ProgramCommand) -> CliResult {
    let (strategy, dtype) = (dit.strategy, dit.dtype);
    let mesh = parse_mesh(&dit.mesh).map_err(CliError::usage)?;
    let (transport, overlap_chunks) = (dit.transport, dit.overlap_chunks);
    let mapping = Mapping { mesh, strategy, dtype, transport, overlap_chunks, ..Mapping::default() };
    let request = BenchConfig {
        model: dit.model.clone(),
        mapping: mapping.to_toml(),
        sizes: dit.size.clone(),
        layers: dit.layers,
        case: dit.case,
    };
    // Errors of the request are reported before any process starts.
    let points = build_points(&request)?;
    let trace_options = dit.trace.or(dit.trace_to.as_ref().map(|_| DEFAULT_TRACED_FORWARDS));
    let world = mapping.world_mesh().map_err(|d| vec![*d])?.iter().count() as u32;
    let machine =
        || machine_for(&GpuDiscovery::discover(), dit.cluster.as_deref(), dit.profile.as_deref(), world);
    let trace_options = trace_options.map(|count| machine().map(|m| (count, m))).transpose()?;
    let mut ranks = BenchRanks::start(program, &request)?;
    let facts = serde_json::json!({
        "mesh": dit.mesh, "strategy": strategy.name(), "dtype": dtype.name(), "overlap_chunks": overlap_chunks,
        "transport": mapping.transport.name(), "ranks": ranks.reports,
    });
    if dit.serve {
        ranks.warm_up(0, dit.warm)?;
        return serve_requests(&mut ranks, &points, &facts);
    }
    let mut timings = Vec::new();
    for (at, point) in points.iter().enumerate() {
        timings.push(time_size(dit, &mut ranks, (at, point), trace_options.as_ref())?);
    }
    write_stdout(&match dit.format {
        OutputFormat::Json => {
            let points: Vec<serde_json::Value> = timings.iter().map(SizeTiming::to_json).collect();
            format!("{}\n", serde_json::json!({"bench": "dit", "facts": facts, "points": points}))
        }
        OutputFormat::Text => {
            let what = format!(
                "{} on {}, {}, {}",
                dit.model.display(),
                dit.mesh,
                mapping.strategy_label(),
                dtype.name()
            );
            let mut text = format!("{what}\n");
            for (rank, r) in ranks.reports.iter().enumerate() {
                text += &format!(
                    "  rank {rank}: memory {:.2} GiB planned (with context and libraries), {:.2} GiB measured, error {}; ready after {:.1} s\n",
                    to_gib(r.planned_bytes()),
                    to_gib(r.measured),
                    format_percent(r.memory_error()),
                    r.load_s
                );
            }
            text + &timings.iter().map(SizeTiming::render_text).collect::<String>()
        }
    })?;
    if let Some(file) = &dit.trace_to {
        let all: Vec<TracedForward> = timings.into_iter().filter_map(|t| t.trace).collect();
        write_timeline(file, &all)?;
    }
    Ok(0)
}

/// Number of forwards to trace if `--trace-to` is given without `--trace`.
const DEFAULT_TRACED_FORWARDS: u32 = 5;

/// Results for one `--size`: step times, and the digest and the trace if they were requested.
struct SizeTiming {
    size: String,
    plan: String,
    steps_ms: Vec<f64>,
    latent_digest: Option<String>,
    trace: Option<TracedForward>,
}

/// Warms up and times the model at one picture size, and traces forwards of it if requested.
fn time_size(
    dit: &DitArgs,
    ranks: &mut BenchRanks,
    (at, point): (usize, &BenchPoint),
    traces: Option<&(u32, Result<MachineModel, String>)>,
) -> Result<SizeTiming, CliError> {
    ranks.warm_up(at, dit.warm)?;
    let steps_ms = ranks.time_steps(at, dit.steps)?;
    let latent = match dit.digest {
        true => Some(tessera_tools::bench::hash_parts(&ranks.latent_bits(at)?)),
        false => None,
    };
    let traced = match traces {
        None => None,
        Some((count, machine)) => {
            let traced_forwards = ranks.trace_forwards(at, *count as usize)?;
            let forward_ns = median_and_deciles(&steps_ms).0 * 1e6 / FORWARDS_PER_STEP as f64;
            Some(TracedForward::from_traces(
                point,
                &traced_forwards,
                forward_ns,
                machine.as_ref().map_err(Clone::clone),
            )?)
        }
    };
    Ok(SizeTiming {
        size: point.size.clone(),
        plan: point.plan.sealed.digest_hex(),
        steps_ms,
        latent_digest: latent,
        trace: traced,
    })
}

impl SizeTiming {
    fn to_json(&self) -> serde_json::Value {
        let (median, low, high) = median_and_deciles(&self.steps_ms);
        serde_json::json!({
            "size": self.size, "plan": self.plan, "median_ms": median, "p10_ms": low, "p90_ms": high, "fps": frames_per_second(median),
            "latent": self.latent_digest, "steps_ms": self.steps_ms, "trace": self.trace.as_ref().map(TracedForward::to_json),
        })
    }

    fn render_text(&self) -> String {
        let (median, low, high) = median_and_deciles(&self.steps_ms);
        let mut text = format!(
            "{}: a step of {FORWARDS_PER_STEP} forwards takes {median:.2} ms (p10 {low:.2}, p90 {high:.2}, {} steps): {:.2} frames per \
second\n",
            self.size,
            self.steps_ms.len(),
            frames_per_second(median)
        );
        text += &self.latent_digest.as_ref().map(|d| format!("  latent {d}\n")).unwrap_or_default();
        text + &self.trace.as_ref().map(render_trace).unwrap_or_default()
    }
}

fn frames_per_second(step_ms: f64) -> f64 {
    FRAMES_PER_STEP as f64 * 1e3 / step_ms
}

/// Returns bytes in GiB.
fn to_gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn format_ms(ns: f64) -> String {
    format!("{:.3}", ns / 1e6)
}

/// Formats the launches of a run by kind.
fn format_launches(heading: &str, launches: &[LaunchTotal]) -> String {
    let mut rows = vec![[heading, "count", "ms"].map(String::from)];
    rows.extend(
        launches.iter().map(|l| [l.launch.clone(), format!("{:.0}", l.count), format!("{:.3}", l.ms)]),
    );
    format_table(rows, [false, true, true])
}

/// Formats a share as a signed percentage, such as `+5.0 %`, and `None` as `-`.
fn format_percent(share: Option<f64>) -> String {
    share.map_or("-".to_string(), |s| format!("{:+.1} %", 100.0 * s))
}

/// Formats the errors of the estimate by class and by launch for the busiest rank, and the overlap
/// of the collectives for every rank.
fn render_trace(t: &TracedForward) -> String {
    let heading = match &t.estimate_source {
        Ok(on) => format!(
            "one forward on GPUs, compared with the estimate for {on}; error: estimate relative to measurement"
        ),
        Err(why) => format!("one forward on GPUs; no estimate: {why}"),
    };
    let mut text = format!("{}: {heading}\n", t.size);
    if let Some(r) = t.busiest_rank() {
        let sum = ErrorRow::sum_rows("sum of all launches", &r.classes);
        text += &format!("rank {} (the busiest), by class:\n", r.rank);
        text += &trace_table("class", r.classes.iter().chain([&sum, &t.forward]));
        text += &format!("rank {} by launch, with its ops and the input shapes of the first op:\n", r.rank);
        text += &trace_table("launch", &r.kinds);
    }
    if t.forward.measured_ns > 0.0 {
        text += &format!(
            "  with timing events around every launch, the forward takes {} ms, {} compared with one without\n",
            format_ms(t.traced_ns),
            format_percent(Some(t.traced_ns / t.forward.measured_ns - 1.0))
        );
    }
    if t.ranks.iter().all(|r| r.overlap.total_ns == 0.0) {
        return text;
    }
    text += "collectives (the time includes the wait for later ranks); exposed: no compute on the rank meanwhile; \
overlap ratio: share that compute hides:\n";
    text + &collectives_table(t)
}

fn trace_table<'a>(what: &str, all: impl IntoIterator<Item = &'a ErrorRow>) -> String {
    let mut rows = vec![[what, "count", "estimated ms", "measured ms", "error"].map(String::from)];
    rows.extend(all.into_iter().map(|l| {
        let estimated = l.estimated_ns.map_or("-".to_string(), format_ms);
        let (measured, error) = (format_ms(l.measured_ns), format_percent(l.relative_error()));
        [l.name.clone(), l.count.to_string(), estimated, measured, error]
    }));
    format_table(rows, [false, true, true, true, true])
}

fn collectives_table(t: &TracedForward) -> String {
    let mut rows = vec![["", "collectives ms", "exposed ms", "overlap ratio"].map(String::from)];
    let row = |name: String, all_ns: f64, exposed_ns: f64, ratio: f64| {
        [name, format_ms(all_ns), format_ms(exposed_ns), format!("{ratio:.2}")]
    };
    let rank_row = |r: &RankForward| {
        row(format!("rank {}", r.rank), r.overlap.total_ns, r.overlap.exposed_ns(), r.overlap.ratio())
    };
    rows.extend(t.ranks.iter().map(rank_row));
    if let Some(o) = t.estimated_overlap {
        let ranks = t.ranks.len() as f64;
        rows.push(row("estimated per rank".into(), o.total_ns / ranks, o.exposed_ns() / ranks, o.ratio()));
    }
    format_table(rows, [false, true, true, true])
}

/// Prints the plans once the ranks are ready, then answers each line of standard input with a line
/// of JSON, until `quit` or the end of the input.
fn serve_requests(ranks: &mut BenchRanks, points: &[BenchPoint], facts: &serde_json::Value) -> CliResult {
    let plans: serde_json::Map<String, serde_json::Value> = points
        .iter()
        .map(|p| (p.size.clone(), serde_json::json!({"plan": p.plan.sealed.digest_hex()})))
        .collect();
    write_stdout(&format!("{}\n", serde_json::json!({"ready": true, "facts": facts, "points": plans})))?;
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let parse_request = |size: &str, count: &str| {
            Some((points.iter().position(|p| p.size == size)?, count.parse::<usize>().ok()?))
        };
        match words[..] {
            ["quit"] => break,
            ["run", size, count] if parse_request(size, count).is_some() => {
                let Some((at, count)) = parse_request(size, count) else { continue };
                let steps = ranks.time_steps(at, count)?;
                write_stdout(&format!("{}\n", serde_json::json!({"steps_ms": steps})))?;
            }
            _ => {
                let message = format!("not `run SIZE STEPS` or `quit`: {line:?}");
                write_stdout(&format!("{}\n", serde_json::json!({"error": message})))?;
            }
        }
    }
    Ok(0)
}

fn parse_size(text: &str) -> Result<(u64, u64), String> {
    let parts = text.split_once('x').and_then(|(h, w)| Some((h.parse().ok()?, w.parse().ok()?)));
    parts.ok_or_else(|| "must be HEIGHTxWIDTH, such as 480x832".to_string())
}

/// Runs one rank's process and returns its exit status.
pub fn run_rank(rank: u32, config: &str) -> u8 {
    match rank_main(rank, config) {
        Ok(()) => 0,
        Err(ds) => {
            print_stderr(&render_all(&ds, DiagnosticFormat::Text, &|_| None));
            1
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tessera_tools::bench::OverlapTotals;

    use super::*;

    #[derive(Debug, Parser)]
    struct Bench {
        #[command(flatten)]
        args: Args,
    }

    fn parse_args(words: &[&str]) -> Result<DitArgs, clap::Error> {
        match Bench::try_parse_from([&["bench", "dit"], words].concat())?.args.command {
            BenchCommand::Dit(dit) => Ok(dit),
            BenchCommand::Phases(_) | BenchCommand::Text(_) => panic!("`bench dit` is no other command"),
        }
    }

    #[test]
    fn sizes_are_repeated_or_separated_by_commas() {
        let sizes = |words: &[&str]| parse_args(words).map(|d| d.size);
        assert_eq!(sizes(&[]).unwrap(), []);
        assert_eq!(sizes(&["--size", "480x832"]).unwrap(), [(480, 832)]);
        let want = [(480, 832), (320, 576), (128, 256)];
        assert_eq!(sizes(&["--size", "480x832", "--size", "320x576,128x256"]).unwrap(), want);
        for wrong in ["480", "480x", "480x832x3", "480x832,"] {
            assert!(sizes(&["--size", wrong]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_trace_defaults_to_five_forwards() {
        let of = |words: &[&str]| parse_args(words).map(|d| d.trace);
        assert_eq!((of(&[]).unwrap(), of(&["--trace"]).unwrap()), (None, Some(5)));
        assert_eq!(of(&["--trace", "9", "models/demo"]).unwrap(), Some(9));
        assert!(of(&["--trace", "0"]).is_err() && of(&["--trace", "--serve"]).is_err());
    }

    fn line(name: &str, count: usize, estimated_ms: f64, measured_ms: f64) -> ErrorRow {
        ErrorRow {
            name: name.into(),
            count,
            estimated_ns: Some(estimated_ms * 1e6),
            measured_ns: measured_ms * 1e6,
        }
    }

    fn sample_trace(classes: Vec<ErrorRow>, forward: ErrorRow, overlap: OverlapTotals) -> TracedForward {
        let kinds = vec![line("matmul+gate_residual [4680, 13824] [5120, 13824]", 40, 40.0, 50.0)];
        TracedForward {
            size: "480x832".into(),
            estimate_source: Ok("hgx-h200 under profile tessera".into()),
            forward,
            traced_ns: 105e6,
            estimated_overlap: Some(OverlapTotals { total_ns: 16e6, hidden_ns: 4e6 }),
            ranks: vec![
                RankForward { rank: 0, classes: Vec::new(), kinds: Vec::new(), overlap, compute_ns: 80e6 },
                RankForward { rank: 1, classes, kinds, overlap, compute_ns: 90e6 },
            ],
            intervals: Vec::new(),
        }
    }

    #[test]
    fn a_trace_shows_estimated_measured_and_exposed_times() {
        let classes = vec![line("matmul", 400, 63.0, 60.0), line("all_to_all", 160, 8.0, 10.0)];
        let overlap = OverlapTotals { total_ns: 10e6, hidden_ns: 7.4e6 };
        let text = render_trace(&sample_trace(classes, line("whole forward", 1, 95.0, 100.0), overlap));
        let want = "\
480x832: one forward on GPUs, compared with the estimate for hgx-h200 under profile tessera; error: estimate relative to measurement
rank 1 (the busiest), by class:
  class                     count  estimated ms  measured ms    error
  matmul                      400        63.000       60.000   +5.0 %
  all_to_all                  160         8.000       10.000  -20.0 %
  sum of all launches         560        71.000       70.000   +1.4 %
  whole forward                 1        95.000      100.000   -5.0 %
rank 1 by launch, with its ops and the input shapes of the first op:
  launch                                           count  estimated ms  measured ms    error
  matmul+gate_residual [4680, 13824] [5120, 13824]    40        40.000       50.000  -20.0 %
  with timing events around every launch, the forward takes 105.000 ms, +5.0 % compared with one without
collectives (the time includes the wait for later ranks); exposed: no compute on the rank meanwhile; overlap ratio: share that compute hides:
                     collectives ms  exposed ms  overlap ratio
  rank 0                     10.000       2.600           0.74
  rank 1                     10.000       2.600           0.74
  estimated per rank          8.000       6.000           0.25
";
        let plain: Vec<String> =
            text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        let wanted: Vec<String> =
            want.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(plain, wanted, "{text}");
    }

    #[test]
    fn one_gpu_without_an_estimate_explains_why_and_lists_no_collectives() {
        let none = |l: ErrorRow| ErrorRow { estimated_ns: None, ..l };
        let classes = vec![none(line("matmul", 400, 0.0, 60.0))];
        let made =
            sample_trace(classes, none(line("whole forward", 1, 0.0, 100.0)), OverlapTotals::default());
        let text = render_trace(&TracedForward { estimate_source: Err("no cluster has it".into()), ..made });
        assert!(text.starts_with("480x832: one forward on GPUs; no estimate: no cluster has it\n"), "{text}");
        assert!(!text.contains("overlap ratio"), "{text}");
        let row = text.lines().find(|l| l.trim_start().starts_with("matmul ")).unwrap();
        assert_eq!(row.split_whitespace().collect::<Vec<_>>(), ["matmul", "400", "-", "60.000", "-"]);
    }
}
