//! Soak test: checks whether memory, descriptors, threads, queues or bounded files grow in a long
//! run.
//!
//! All observations come from outside: from `/proc`, from the run's folder and from its record. The
//! first chunks fill caches, buffers and the allocator's pools; the slopes exclude them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Map, Value, json};

use tessera_tools::minimal_model::{self, PROMPT};

use crate::BenchResult;
use crate::diagnostics_error;
use crate::process_list::{Process, ProcessUsage};
use crate::stats::{max_value, regression_slope, round_to_millis};
use crate::stream_process::StreamArgs;

/// Stream many chunks, and check whether memory, file descriptors, threads, queues or bounded files
/// grow
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    stream: StreamArgs,

    /// Number of first chunks that the slopes leave out
    #[arg(long, value_name = "N", default_value_t = 1000)]
    warm_up: u32,

    /// Stream a generated model with a UMT5 text encoder and a causal VAE instead of --model; prompts and
    /// scenes change all the time, and raw frames are discarded
    #[arg(long)]
    media: bool,

    /// Growth of resident memory that exceeds noise, in KiB per 1,000 chunks
    #[arg(long, value_name = "KIB", default_value_t = LIMIT_KIB)]
    limit_kib: f64,

    /// Denoise steps instead of the model's, such as 1000,500
    #[arg(long, value_name = "LIST")]
    steps: Option<String>,
}

/// Interval between samples of the processes, the record and the file sizes during the stream.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Polling interval after the last chunk, while the launcher writes the files that it derives from
/// the record.
const CLOSING_POLL_INTERVAL: Duration = Duration::from_millis(3);
/// Default of `--limit-kib`: an allocator that keeps one page more for 60 chunks is noise.
const LIMIT_KIB: f64 = 64.0;
/// Maximum share of the period (the time from commit to commit) that digests may take.
const LIMIT_DIGEST_SHARE: f64 = 0.03;

/// Maximum requests and chunks that wait: the queue depths of a plan, unless a mapping states others.
const QUEUE_DEPTH: f64 = 2.0;
/// With `--media`, the chunks between two changes of the prompt, and between two cuts of the scene.
const PROMPT_CHUNKS: u32 = 50;
const SCENE_CHUNKS: u32 = 130;

/// Pairs of chunk number and value.
type SeriesPoints = Vec<(f64, f64)>;

/// Resource use of one process, sampled while the stream runs.
#[derive(Default)]
struct ProcessSeries {
    rss_kib: SeriesPoints,
    descriptors: SeriesPoints,
    threads: SeriesPoints,
    /// Resident memory in the last sample before the last chunk.
    before_close_kib: u64,
    /// Peak resident memory of the whole run.
    peak_kib: u64,
    cpu_s: f64,
}

/// Sums and series from the record, updated as it grows.
#[derive(Default)]
struct RecordSeries {
    chunks: u32,
    queue_in: SeriesPoints,
    queue_out: SeriesPoints,
    digest_ns: u64,
    period_ns: u64,
    idle_ns: u64,
    pipelines: u32,
}

/// Streams for a long time and checks from outside whether any resource grows.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    ensure!(
        args.warm_up + 10 <= args.stream.chunks,
        "--chunks {}: no chunks are left after a warm-up of {}",
        args.stream.chunks,
        args.warm_up
    );
    let mut flags: Vec<String> =
        args.steps.iter().flat_map(|steps| ["--steps".to_string(), steps.clone()]).collect();
    let mut shape = args.stream.clone();
    let media = tempfile::tempdir()?;
    if args.media {
        minimal_model::create_media_model(media.path()).map_err(diagnostics_error)?;
        (shape.target.model, shape.target.prompt) = (media.path().to_path_buf(), PROMPT.to_string());
        flags.extend(media_flags(args.stream.chunks));
    }
    let begun = Instant::now();
    let (dir, mut stream) = shape.start(&flags)?;
    let mut tail = stream.open_record();
    let mut record = RecordSeries::default();
    let mut processes: BTreeMap<String, Process> = BTreeMap::new();
    let mut process_series: BTreeMap<String, ProcessSeries> = BTreeMap::new();
    let mut files: BTreeMap<String, SeriesPoints> = BTreeMap::new();
    let mut streamed_s = 0.0;
    while stream.try_reap().is_none() {
        for line in tail.read()? {
            record.add_line(&line);
        }
        if processes.is_empty() && record.chunks > 0 {
            processes.extend(stream.list_processes("launcher"));
        }
        let closing = record.chunks >= args.stream.chunks;
        for (name, process) in &processes {
            if let Some(usage) = ProcessUsage::read(*process) {
                process_series.entry(name.clone()).or_default().add_usage(record.chunks, usage, closing);
            }
        }
        if !closing {
            streamed_s = begun.elapsed().as_secs_f64();
            for (name, bytes) in file_sizes(&dir.path().join("run")) {
                files.entry(name).or_default().push((f64::from(record.chunks), bytes as f64));
            }
        }
        std::thread::sleep(if closing { CLOSING_POLL_INTERVAL } else { POLL_INTERVAL });
    }
    for line in tail.read()? {
        record.add_line(&line);
    }
    let result = stream
        .printed_result()
        .with_context(|| format!("the stream printed no result: {}", stream.output_text()))?;
    if result["failure"] != Value::Null || record.chunks != args.stream.chunks {
        bail!("the stream ended with {} chunks: {}", record.chunks, stream.output_text());
    }
    for (name, bytes) in file_sizes(&dir.path().join("run")) {
        files.entry(name).or_default().push((f64::from(args.stream.chunks), bytes as f64));
    }
    let total_s = begun.elapsed().as_secs_f64();
    Ok(build_report(args, &Observations { record, processes: process_series, files, streamed_s, total_s }))
}

/// Returns the flags of a stream that encodes prompts and clears the history of the VAE again and again.
fn media_flags(chunks: u32) -> Vec<String> {
    // More prompts than the text encoder keeps.
    let words = ["a", "red", "blue", "circle", "square", "moves", "left", "right"];
    let prompt = |n: usize| [n % 8, n / 8 % 8, 7 - n % 5].map(|word| words[word]).join(" ");
    let prompts = (PROMPT_CHUNKS..chunks).step_by(PROMPT_CHUNKS as usize).zip(1..);
    let cuts = (SCENE_CHUNKS..chunks).step_by(SCENE_CHUNKS as usize);
    let prompts = prompts.flat_map(|(at, n)| ["--at".to_string(), format!("{at}:{}", prompt(n))]);
    let cuts = cuts.flat_map(|at| ["--cut-at".to_string(), at.to_string()]);
    prompts.chain(cuts).chain(["--raw", "/dev/null"].map(String::from)).collect()
}

/// Checks that no resource grew in a long stream; any other benchmark has no such numbers.
///
/// # Errors
/// The process or queue that grew.
pub fn check_growth(numbers: &Value) -> anyhow::Result<()> {
    let grown = numbers["processes"].as_object().into_iter().flatten().find(|(_, p)| p["grows"] == true);
    if let Some((name, figures)) = grown {
        bail!("the resources of the {name} grow: {figures}");
    }
    for queue in ["queue_in", "queue_out"] {
        let waiting = numbers[queue]["max"].as_f64().unwrap_or(0.0);
        ensure!(waiting <= QUEUE_DEPTH, "{queue}: {waiting} waiting, the depth is {QUEUE_DEPTH}");
    }
    Ok(())
}

impl RecordSeries {
    fn add_line(&mut self, line: &Value) {
        if line["kind"] != "chunk" {
            return;
        }
        self.chunks += 1;
        let at = f64::from(self.chunks);
        self.queue_in.push((at, line["queue_in"].as_f64().unwrap_or(0.0)));
        self.queue_out.push((at, line["queue_out"].as_f64().unwrap_or(0.0)));
        let pipeline = &line["pipeline"];
        if pipeline.is_object() {
            let ns = |key: &str| pipeline[key].as_u64().unwrap_or(0);
            self.pipelines += 1;
            self.digest_ns += ns("digest_ns");
            self.period_ns += ns("period_ns");
            self.idle_ns += ns("idle_ns");
        }
    }

    fn digest_share(&self) -> Option<f64> {
        (self.period_ns > 0).then(|| self.digest_ns as f64 / self.period_ns as f64)
    }

    /// Returns the mean per chunk of a sum of pipeline times, in milliseconds.
    fn mean_pipeline_ms(&self, sum_ns: u64) -> Option<f64> {
        (self.pipelines > 0).then(|| round_to_millis(sum_ns as f64 / f64::from(self.pipelines) / 1e6))
    }
}

impl ProcessSeries {
    fn add_usage(&mut self, chunks: u32, usage: ProcessUsage, closing: bool) {
        self.peak_kib = self.peak_kib.max(usage.peak_kib);
        self.cpu_s = usage.cpu_s;
        if closing {
            return;
        }
        let at = f64::from(chunks);
        self.rss_kib.push((at, usage.rss_kib as f64));
        self.descriptors.push((at, usage.descriptors as f64));
        self.threads.push((at, usage.threads as f64));
        self.before_close_kib = usage.rss_kib;
    }
}

/// Growth of a value after the warm-up: slope per 1,000 chunks, first value and maximum.
struct SeriesGrowth {
    slope: f64,
    first: f64,
    max: f64,
}

impl SeriesGrowth {
    fn after_warm_up(points: &SeriesPoints, warm: u32) -> SeriesGrowth {
        let steady: SeriesPoints = points.iter().copied().filter(|(x, _)| *x >= f64::from(warm)).collect();
        let values: Vec<f64> = steady.iter().map(|(_, y)| *y).collect();
        SeriesGrowth {
            slope: regression_slope(&steady) * 1000.0,
            first: values.first().copied().unwrap_or(0.0),
            max: max_value(&values),
        }
    }

    /// Returns the last value at each tenth of the chunks.
    fn at_tenths(points: &SeriesPoints, chunks: u32) -> Vec<Option<f64>> {
        let until = |tenth: u32| f64::from(chunks) * f64::from(tenth) / 10.0;
        let last = |tenth| points.iter().rev().find(|(x, _)| *x <= until(tenth)).map(|(_, y)| *y);
        (1..=10).map(last).collect()
    }

    fn to_json(&self) -> Value {
        json!({"slope_per_1000": round_to_millis(self.slope), "after_warm_up": self.first, "max": self.max})
    }
}

/// Everything that was observed in a run.
struct Observations {
    record: RecordSeries,
    processes: BTreeMap<String, ProcessSeries>,
    files: BTreeMap<String, SeriesPoints>,
    /// Time from the start to the last sample before the last chunk.
    streamed_s: f64,
    total_s: f64,
}

fn build_report(args: &Args, seen: &Observations) -> BenchResult {
    let record = &seen.record;
    let mut text = format!(
        "{} chunks in {:.1} s, closed in {:.1} s; slopes over chunks {} to {}\n",
        record.chunks,
        seen.streamed_s,
        seen.total_s - seen.streamed_s,
        args.warm_up,
        args.stream.chunks
    );
    let (processes, flat) = report_processes(args, seen, &mut text);
    let [queue_in, queue_out] =
        [("in", &record.queue_in), ("out", &record.queue_out)].map(|(name, points)| {
            let g = SeriesGrowth::after_warm_up(points, args.warm_up);
            let _ = writeln!(text, "queue {name}: max {:.0}, slope {:+.3} per 1,000 chunks", g.max, g.slope);
            g.to_json()
        });
    let files = report_files(args, &seen.files, &mut text);
    let share = record.digest_share();
    let _ = match share {
        Some(s) => write!(
            text,
            "digests take {:.3} % of the period (limit {} %)",
            s * 100.0,
            LIMIT_DIGEST_SHARE * 100.0
        ),
        None => write!(text, "the record contains no digest times"),
    };
    let numbers = json!({
        "bench": "soak",
        "model": if args.media { "minimal model with media".into() } else { json!(args.stream.target.model) },
        "mesh": args.stream.mesh,
        "topology": args.stream.topology,
        "chunks": record.chunks,
        "warm_up": args.warm_up,
        "seconds": round_to_millis(seen.streamed_s),
        "closing_seconds": round_to_millis(seen.total_s - seen.streamed_s),
        "processes": processes,
        "no_growth_while_running": flat,
        "limit_kib_per_1000": args.limit_kib,
        "queue_in": queue_in,
        "queue_out": queue_out,
        "files": files,
        "digest_share": share,
        "digests_within_limit": share.map(|s| s <= LIMIT_DIGEST_SHARE),
        "period_ms": record.mean_pipeline_ms(record.period_ns),
        "idle_ms": record.mean_pipeline_ms(record.idle_ns),
    });
    BenchResult { text, numbers }
}

/// Adds a line per process to the text. Returns the figures of each process, and whether the
/// resources of none of them grow.
fn report_processes(args: &Args, seen: &Observations, text: &mut String) -> (Map<String, Value>, bool) {
    let _ = writeln!(
        text,
        "{:<10} {:>26} {:>17} {:>17} {:>22}",
        "", "memory KiB, per 1,000", "descriptors, max", "threads, max", "peak at the end KiB"
    );
    let mut figures = Map::new();
    let mut flat = true;
    for (name, s) in &seen.processes {
        let [rss, descriptors, threads] =
            [&s.rss_kib, &s.descriptors, &s.threads].map(|p| SeriesGrowth::after_warm_up(p, args.warm_up));
        let grows =
            rss.slope > args.limit_kib || descriptors.max > descriptors.first || threads.max > threads.first;
        flat &= !grows;
        let _ = writeln!(
            text,
            "{name:<10} {:>12.0} {:>+13.1} {:>10.0} {:>6.0} {:>10.0} {:>6.0} {:>22}{}",
            rss.first,
            rss.slope,
            descriptors.first,
            descriptors.max,
            threads.first,
            threads.max,
            s.peak_kib,
            if grows { "  grows" } else { "" }
        );
        figures.insert(
            name.clone(),
            json!({
                "rss_kib": rss.to_json(),
                "descriptors": descriptors.to_json(),
                "threads": threads.to_json(),
                "before_close_kib": s.before_close_kib,
                "peak_kib": s.peak_kib,
                "rss_kib_at_tenths": SeriesGrowth::at_tenths(&s.rss_kib, args.stream.chunks),
                "descriptors_at_tenths": SeriesGrowth::at_tenths(&s.descriptors, args.stream.chunks),
                "threads_at_tenths": SeriesGrowth::at_tenths(&s.threads, args.stream.chunks),
                "closing_kib_per_1000": round_to_millis(closing_kib_per_1000(s, seen.record.chunks)),
                "cpu_s": round_to_millis(s.cpu_s),
                "grows": grows,
            }),
        );
    }
    (figures, flat)
}

/// Adds a line per file to the text and returns the sizes and slopes of the files.
fn report_files(
    args: &Args,
    files: &BTreeMap<String, SeriesPoints>,
    text: &mut String,
) -> Map<String, Value> {
    let mut figures = Map::new();
    for (name, points) in files {
        let g = SeriesGrowth::after_warm_up(points, args.warm_up);
        let end = points.last().map_or(0.0, |(_, y)| *y);
        let _ = writeln!(
            text,
            "{name}: {:.0} kB at the end, {:+.1} kB per 1,000 chunks",
            end / 1e3,
            g.slope / 1e3
        );
        let fields = json!({"bytes": end, "bytes_per_1000_chunks": round_to_millis(g.slope)});
        figures.insert(name.clone(), fields);
    }
    figures
}

/// Returns the memory growth of a process after the last chunk, per 1,000 chunks.
fn closing_kib_per_1000(s: &ProcessSeries, chunks: u32) -> f64 {
    s.peak_kib.saturating_sub(s.before_close_kib) as f64 / (f64::from(chunks) / 1000.0)
}

/// Returns the size of each file of a run, except the plan, which does not grow.
fn file_sizes(run: &Path) -> Vec<(String, u64)> {
    let mut out = Vec::new();
    let mut folders = vec![run.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(about) = entry.metadata() else { continue };
            if about.is_dir() {
                if entry.file_name() != "plan" {
                    folders.push(entry.path());
                }
            } else if let Some(name) = entry.path().strip_prefix(run).ok().and_then(Path::to_str) {
                out.push((name.to_string(), about.len()));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_distinguished_from_filling_up() {
        let fills: SeriesPoints = (0..100).map(|i| (f64::from(i), f64::from(i.min(20)))).collect();
        let g = SeriesGrowth::after_warm_up(&fills, 20);
        assert_eq!((g.slope, g.first, g.max), (0.0, 20.0, 20.0));
        let grows: SeriesPoints = (0..100).map(|i| (f64::from(i), f64::from(2 * i))).collect();
        let g = SeriesGrowth::after_warm_up(&grows, 20);
        assert!((g.slope - 2000.0).abs() < 1e-6 && g.max == 198.0, "{}", g.slope);
        let tenths = SeriesGrowth::at_tenths(&grows, 100);
        assert_eq!((tenths[0], tenths[9]), (Some(20.0), Some(198.0)));
        assert_eq!(
            SeriesGrowth::at_tenths(&vec![(50.0, 1.0)], 100)[..5],
            [None, None, None, None, Some(1.0)]
        );
    }

    #[test]
    fn growth_fails_the_benchmark() {
        let numbers = |grows: bool, waiting: f64| json!({"processes": {"rank 1": {"grows": grows}}, "queue_in": {"max": waiting}});
        assert!(check_growth(&numbers(false, 2.0)).is_ok());
        assert!(check_growth(&numbers(true, 2.0)).is_err_and(|e| e.to_string().contains("rank 1")));
        assert!(check_growth(&numbers(false, 3.0)).is_err_and(|e| e.to_string().contains("queue_in")));
        assert!(check_growth(&json!({"bench": "verifier"})).is_ok());
    }

    #[test]
    fn the_records_pipeline_adds_up() {
        let mut told = RecordSeries::default();
        told.add_line(&json!({"kind": "start"}));
        told.add_line(&json!({"kind": "chunk", "queue_in": 2, "queue_out": 1}));
        assert_eq!((told.chunks, told.digest_share()), (1, None));
        let pipeline = json!({"digest_ns": 3, "period_ns": 400, "idle_ns": 0});
        told.add_line(&json!({"kind": "chunk", "queue_in": 2, "queue_out": 1, "pipeline": pipeline}));
        assert_eq!((told.chunks, told.digest_share()), (2, Some(0.0075)));
    }
}
