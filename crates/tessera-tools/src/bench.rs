//! `bench dit`: benchmarks the DiT alone on GPUs, with one process per GPU and random weights. `bench
//! phases` times single phases of a plan.
//!
//! A step is the work of one chunk: five denoising forwards over three frames of context, which
//! produce twelve frames of video. The coordinator starts a process for each rank, starts each step
//! on all ranks at once, and reports the time of the slowest rank.

mod device_timer;
mod forward_trace;
mod loaded_program;
mod phases;
mod rank;
mod synthetic_weights;
mod text;

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::estimate_error::{MeasuredStep, median_steps};
use tessera_mesh::Rank;
use tessera_verify::SealedPlan;

use tessera::gpus::GpuDiscovery;
use tessera::program_command::ProgramCommand;
use tessera::{Mapping, Model, Overrides, Plan, cuda, plan};

use crate::codes::T0061;
pub use device_timer::{SynchronisedTime, UnsynchronisedTimer};
pub use forward_trace::{RankForward, TracedForward, machine_for, write_timeline};
pub use loaded_program::LaunchTotal;
pub use phases::{PhaseBenchConfig, PhaseBenchReport, PhaseTimes, run_phase_rank, time_phases};
pub use rank::rank_main;
pub use synthetic_weights::SyntheticWeights;
pub use tessera_cost::MachineModel;
pub use tessera_cost::estimate_error::ErrorRow;
pub use tessera_cost::intervals::OverlapTotals;
pub use text::{TextBenchConfig, TextTiming, time_text_encoder};

/// The configuration of a benchmark, which the coordinator sends to each rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BenchConfig {
    /// Folder with the model's config and, for a reference case, its weights and inputs.
    pub model: PathBuf,
    /// Content of the mapping file, not its path. The mesh of the mapping determines the number of
    /// ranks.
    pub mapping: String,
    /// Height and width of each picture size in pixels, timed separately; if empty, the model's own
    /// size.
    pub sizes: Vec<(u64, u64)>,
    /// Number of blocks to run; `None` for all.
    pub layers: Option<u64>,
    /// Whether the folder is a reference case: it has its own weights and inputs, and the benchmark
    /// writes the outputs beside them.
    pub case: bool,
}

/// One picture size with its model and plan.
#[derive(Debug)]
pub struct BenchPoint {
    /// Height and width in pixels, for example `480x832`.
    pub size: String,
    /// The model with `size` as its picture size and with the blocks to run.
    pub model: Model,
    /// The sealed plan of `model` under the benchmark's mapping.
    pub plan: Plan,
}

/// The report of a rank that is ready for timing.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankReport {
    /// Plan digests, in the order of the sizes.
    pub plans: Vec<String>,
    /// Planned bytes of all sizes together: weights, buffers, temporaries, and the overhead of the
    /// CUDA context and the libraries.
    pub planned: [u64; 4],
    /// Bytes of device memory that the driver attributes to this process.
    pub measured: u64,
    /// One line per communicator of the rank: its transport and, if that is NCCL, why peer-to-peer
    /// memory is not used.
    pub transports: Vec<String>,
    /// Seconds from the start of the process to this report.
    pub load_s: f64,
    /// Numbers of compilations, captures and allocations before the timed steps.
    pub counts: (u32, u32, u32),
}

impl RankReport {
    /// Returns the planned device memory of the rank in bytes: the sum of [`RankReport::planned`].
    #[must_use]
    pub fn planned_bytes(&self) -> u64 {
        self.planned.iter().sum()
    }

    /// Returns the relative error of the planned memory against the measured memory, or `None` if
    /// nothing was measured.
    #[must_use]
    pub fn memory_error(&self) -> Option<f64> {
        (self.measured > 0).then(|| self.planned_bytes() as f64 / self.measured as f64 - 1.0)
    }
}

/// One interval of a traced forward as a rank reports it: op indices, stream, begin and end in
/// nanoseconds.
type TracedSpan = (Vec<usize>, String, f64, f64);

/// The rank processes that a benchmark has started, one per rank of its mapping, and their reports.
#[derive(Debug)]
pub struct BenchRanks {
    processes: Vec<BenchProcess>,
    /// The report of each rank, in rank order.
    pub reports: Vec<RankReport>,
}

#[derive(Debug)]
struct BenchProcess {
    child: Child,
    stdin: ChildStdin,
    stdout_lines: Receiver<String>,
    rank: u32,
}

/// Maximum time without output from a rank, which may be loading 28 GB of weights or running steps.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(180);

/// Maximum wait for a peer in one collective.
const COLLECTIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Number of denoising forwards in a timed step, which is the work of one chunk.
pub const FORWARDS_PER_STEP: usize = 5;

/// Number of video frames that a step produces.
pub const FRAMES_PER_STEP: usize = 12;

impl BenchRanks {
    /// Starts a process for each rank of the mapping and waits until all ranks have loaded and run
    /// every size.
    ///
    /// # Errors
    /// T0061 if a rank fails; a diagnostic of the mapping or of the GPUs before any process starts.
    pub fn start(program: &ProgramCommand, config: &BenchConfig) -> Result<BenchRanks, Diagnostics> {
        let mapping = Mapping::parse("mapping", &config.mapping)?;
        let world = mapping.world_mesh().map_err(|d| vec![*d])?.iter().count() as u32;
        // Missing libraries or GPUs are reported once here rather than by every process.
        cuda::check_gpus(&GpuDiscovery::discover(), world as usize)?;
        let config_json = serde_json::to_string(config)
            .map_err(|e| bench_error(format!("configuration of a rank: {e}")))?;
        let arguments = |rank: u32| vec!["bench-rank".to_string(), rank.to_string(), config_json.clone()];
        let mut bench =
            BenchRanks { processes: start_processes(program, world, arguments)?, reports: Vec::new() };
        bench.reports = read_reports(&mut bench.processes)?;
        Ok(bench)
    }

    /// Runs steps of one size for `seconds`, until the GPUs settle at their power limit.
    ///
    /// # Errors
    /// T0061 if a rank exits or stops responding.
    pub fn warm_up(&mut self, size_index: usize, seconds: f64) -> Result<(), Diagnostics> {
        // All ranks must run the same number of steps, so the coordinator decides when the warm-up
        // ends.
        let began = Instant::now();
        while began.elapsed().as_secs_f64() < seconds {
            self.time_steps(size_index, 1)?;
        }
        Ok(())
    }

    /// Runs `count` steps of one size on all ranks together and returns the milliseconds of each
    /// step on the slowest rank.
    ///
    /// # Errors
    /// T0061 if a rank exits or stops responding.
    pub fn time_steps(&mut self, size_index: usize, count: usize) -> Result<Vec<f64>, Diagnostics> {
        (0..count)
            .map(|_| {
                self.request_all(&format!("step {size_index}"))?
                    .into_iter()
                    .try_fold(0.0, |most: f64, line| parse_ms(&line).map(|v| most.max(v)))
            })
            .collect()
    }

    /// Traces `count` forwards of one size on all ranks together and returns each rank's intervals,
    /// with median times.
    ///
    /// # Errors
    /// T0061 if a rank exits or stops responding.
    pub fn trace_forwards(
        &mut self,
        size_index: usize,
        count: usize,
    ) -> Result<Vec<Vec<MeasuredStep>>, Diagnostics> {
        let to_ran =
            |(ops, stream, start_ns, end_ns): TracedSpan| MeasuredStep { ops, stream, start_ns, end_ns };
        self.request_all(&format!("trace {size_index} {count}"))?
            .iter()
            .map(|line| {
                let spans: Vec<Vec<TracedSpan>> = serde_json::from_str(line)
                    .map_err(|e| bench_error(format!("trace of a rank is unreadable: {e}")))?;
                Ok(median_steps(
                    &spans.into_iter().map(|t| t.into_iter().map(to_ran).collect()).collect::<Vec<_>>(),
                ))
            })
            .collect()
    }

    /// Returns, for each rank, the bits of the latent that the last forward of one size predicted,
    /// in hex.
    ///
    /// # Errors
    /// T0061 if a rank exits or stops responding.
    pub fn latent_bits(&mut self, size_index: usize) -> Result<Vec<String>, Diagnostics> {
        self.request_all(&format!("latent {size_index}"))
    }

    /// Sends a command to all ranks and collects their replies.
    fn request_all(&mut self, command: &str) -> Result<Vec<String>, Diagnostics> {
        for r in &mut self.processes {
            r.send_line(command)?;
        }
        self.processes.iter_mut().map(BenchProcess::read_reply).collect()
    }
}

/// Starts a program once per rank, with the arguments of that rank, and passes the communicator ids of
/// rank 0 to the others.
fn start_processes(
    program: &ProgramCommand,
    world: u32,
    arguments: impl Fn(u32) -> Vec<String>,
) -> Result<Vec<BenchProcess>, Diagnostics> {
    let mut ranks = Vec::new();
    for rank in 0..world {
        let mut child = program
            .to_command()
            .args(arguments(rank))
            .envs(cuda::missing_env())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| bench_error(format!("rank {rank} cannot be started: {e}")))?;
        let (stdin, stdout) = match (child.stdin.take(), child.stdout.take()) {
            (Some(stdin), Some(stdout)) => (stdin, stdout),
            _ => return Err(bench_error(format!("rank {rank} has no pipes"))),
        };
        let (sender, stdout_lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        ranks.push(BenchProcess { child, stdin, stdout_lines, rank });
    }
    if world > 1 {
        // Rank 0 creates the communicator ids through which the ranks find one another.
        let ids = ranks[0].read_reply()?;
        for r in &mut ranks[1..] {
            r.send_line(&ids)?;
        }
    }
    Ok(ranks)
}

/// Reads one line of JSON from each rank.
fn read_reports<R: serde::de::DeserializeOwned>(ranks: &mut [BenchProcess]) -> Result<Vec<R>, Diagnostics> {
    let read_report = |r: &mut BenchProcess| {
        let line = r.read_reply()?;
        serde_json::from_str(&line)
            .map_err(|e| bench_error(format!("rank {} sent an unreadable report {line:?}: {e}", r.rank)))
    };
    ranks.iter_mut().map(read_report).collect()
}

/// Returns the ids of the plan's communicators: rank 0 creates and prints them, and the coordinator
/// forwards them to the other ranks.
fn share_communicator_ids(
    gpus: &GpuDiscovery,
    plan: &SealedPlan,
    rank: Rank,
) -> Result<Vec<String>, Diagnostics> {
    match (plan.mesh().iter().count(), rank.0) {
        (1, _) => Ok(Vec::new()),
        (_, 0) => {
            let ids = cuda::create_communicator_ids(gpus, plan).map_err(|d| vec![d])?;
            print_line(&ids.join(" "));
            Ok(ids)
        }
        _ => {
            let mut line = String::new();
            std::io::stdin()
                .read_line(&mut line)
                .map_err(|e| bench_error(format!("no communicator ids received: {e}")))?;
            Ok(line.split_whitespace().map(str::to_string).collect())
        }
    }
}

fn print_line(line: &str) {
    // A parent that is gone reads no result, and this process may end too.
    let _ = writeln!(std::io::stdout(), "{line}");
}

impl Drop for BenchProcess {
    fn drop(&mut self) {
        // Killing a process that has already exited does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl BenchProcess {
    fn send_line(&mut self, line: &str) -> Result<(), Diagnostics> {
        let result = writeln!(self.stdin, "{line}").and_then(|()| self.stdin.flush());
        result.map_err(|e| bench_error(format!("rank {} does not read its commands: {e}", self.rank)))
    }

    fn read_reply(&mut self) -> Result<String, Diagnostics> {
        match self.stdout_lines.recv_timeout(SILENCE_TIMEOUT) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => Err(bench_error(format!(
                "rank {} wrote nothing for {} s",
                self.rank,
                SILENCE_TIMEOUT.as_secs()
            ))),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait().map(|s| s.to_string()).unwrap_or_default();
                Err(bench_error(format!("rank {} exited: {status}", self.rank)))
            }
        }
    }
}

fn bench_error(message: impl Into<String>) -> Diagnostics {
    vec![Diagnostic::error(&T0061, message)]
}

fn parse_ms(line: &str) -> Result<f64, Diagnostics> {
    line.parse().map_err(|_| bench_error(format!("a rank sent {line:?} instead of milliseconds")))
}

/// Opens the model and makes the plan for each size.
///
/// # Errors
/// T0061 for a size that is given twice or is not a whole number of tokens, and diagnostics of the
/// model or the plan.
pub fn build_points(config: &BenchConfig) -> Result<Vec<BenchPoint>, Diagnostics> {
    if config.case && config.sizes.len() > 1 {
        return Err(bench_error("a reference case has only one size"));
    }
    let named = config.sizes.iter().map(|s| BenchPoint::for_size(config, Some(*s)));
    let own = config.sizes.is_empty().then(|| BenchPoint::for_size(config, None));
    let points: Vec<BenchPoint> = named.chain(own).collect::<Result<_, _>>()?;
    for (i, p) in points.iter().enumerate() {
        if points[..i].iter().any(|q| q.size == p.size) {
            return Err(bench_error(format!("size {} is given twice", p.size)));
        }
    }
    Ok(points)
}

impl BenchPoint {
    fn for_size(config: &BenchConfig, size: Option<(u64, u64)>) -> Result<BenchPoint, Diagnostics> {
        let overrides = Overrides { recompute: Some(false), ..Overrides::default() };
        let mut model = Model::open(&config.model, &overrides)?;
        if let Some(size) = size {
            set_picture_size(&mut model, size)?;
        }
        let s = &model.video.stream;
        let size = format!("{}x{}", s.height, s.width);
        if let Some(layers) = config.layers {
            model.video.wan.layers = layers.clamp(1, model.video.wan.layers);
        }
        let mapping = Mapping::parse("mapping", &config.mapping)?;
        let plan = plan::plan_model(&model.video, &model.name, "", &mapping)?;
        Ok(BenchPoint { size, model, plan })
    }

    /// Returns the number of latent frames in the KV cache before the timed chunk.
    #[must_use]
    pub fn context_frames(&self) -> u64 {
        self.model.video.stream.window_frames - self.model.video.stream.chunk_frames
    }

    /// Returns the name of the timed phase: `denoise.fill` and the number of context frames.
    #[must_use]
    pub fn phase_name(&self) -> String {
        format!("denoise.fill{}", self.context_frames())
    }
}

/// Sets a model's picture size, in pixels.
fn set_picture_size(model: &mut Model, (height, width): (u64, u64)) -> Result<(), Diagnostics> {
    let (s, patch) = (&mut model.video.stream, model.video.wan.patch);
    let cell = [s.stride[1] * patch[0], s.stride[2] * patch[1]];
    if height % cell[0] != 0 || width % cell[1] != 0 || height * width == 0 {
        return Err(bench_error(format!(
            "{height}x{width} is not a whole number of tokens of {} × {}",
            cell[0], cell[1]
        )));
    }
    (s.height, s.width) = (height, width);
    Ok(())
}

/// Hashes one tensor from the hex bits that each rank holds. Different parts are concatenated in
/// rank order; identical parts are replicas and count once.
#[must_use]
pub fn hash_parts(parts: &[String]) -> String {
    let bits = match parts {
        [first, rest @ ..] if rest.iter().all(|r| r == first) => first.clone(),
        parts => parts.concat(),
    };
    blake3::hash(bits.as_bytes()).to_hex()[..16].to_string()
}

/// Returns the median, the 10th and the 90th percentile of `times`; zeros if there are none.
#[must_use]
pub fn median_and_deciles(times: &[f64]) -> (f64, f64, f64) {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let quantile = |share: f64| {
        sorted.get(((sorted.len() as f64 - 1.0) * share).round() as usize).copied().unwrap_or(0.0)
    };
    (quantile(0.5), quantile(0.1), quantile(0.9))
}

#[cfg(test)]
mod tests {
    use tessera_ir::Opcode;
    use tessera_mesh::Rank;

    use super::*;
    use tessera::{DtypePolicy, Strategy, communicators};

    /// The bf16 demo on two ranks.
    pub(crate) fn bench_config(sizes: &[(u64, u64)]) -> BenchConfig {
        let mapping = Mapping {
            mesh: "tp=2".parse().unwrap(),
            strategy: Strategy::Ulysses,
            dtype: DtypePolicy::Bf16,
            ..Mapping::default()
        };
        BenchConfig {
            model: std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo"),
            mapping: mapping.to_toml(),
            sizes: sizes.to_vec(),
            layers: None,
            case: false,
        }
    }

    #[test]
    fn duplicate_sizes_and_partial_tokens_are_rejected() {
        let message = |sizes| build_points(&bench_config(sizes)).unwrap_err()[0].message.clone();
        assert!(message(&[(96, 128), (96, 128)]).contains("twice"));
        assert!(message(&[(96, 128), (97, 128)]).contains("whole number of tokens"));
        let case = BenchConfig { case: true, ..bench_config(&[(96, 128), (48, 64)]) };
        assert!(build_points(&case).unwrap_err()[0].message.contains("one size"));
    }

    #[test]
    fn all_sizes_have_the_same_weights_and_communicators() {
        let points = build_points(&bench_config(&[(96, 128), (48, 64)])).unwrap();
        let [a, b] = [&points[0], &points[1]];
        let weights = |p: &BenchPoint| {
            let program = p.plan.sealed.rank_program(&p.phase_name(), Rank(1)).unwrap();
            let held = program.ops.iter().filter(|o| o.opcode == Opcode::Weight).map(|o| {
                (o.name.clone(), program.type_of(o.results[0]).display_on(&program.mesh), o.weight_load())
            });
            held.collect::<std::collections::BTreeSet<_>>()
        };
        assert!(weights(a).len() > 10 && weights(a) == weights(b));
        let lanes = |p: &BenchPoint| {
            communicators::communicator_specs(&p.plan.sealed)
                .into_iter()
                .map(|g| g.communicator)
                .collect::<Vec<_>>()
        };
        assert_eq!(lanes(a), lanes(b));
        assert_ne!(a.plan.sealed.digest(), b.plan.sealed.digest());
    }
}
