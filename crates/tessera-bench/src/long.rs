//! Whether anything grows in a long run: memory, descriptors and threads of every process, queues, and files that
//! should be bounded.
//!
//! Everything is looked at from outside, in `/proc`, in the run's folder and in its record. The first chunks fill
//! caches, buffers and the allocator's pools and are left out of the slopes.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use crate::child::{Stream, Target};
use crate::procs::{Held, Process, nonce, ranks};
use crate::stats::{most, round, slope};
use crate::{Measured, Output};

/// Stream many chunks and tell what grows
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: Target,

    /// Mesh, such as tp=2
    #[arg(long, default_value = "tp=2")]
    mesh: String,

    /// Topology
    #[arg(long, default_value = "mesh")]
    topology: String,

    /// Chunks to stream
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    chunks: u32,

    /// Chunks before anything is compared
    #[arg(long, value_name = "N", default_value_t = 1000)]
    warm: u32,

    /// Stream a copy of the model with these denoise steps, such as 1000,500
    #[arg(long, value_name = "LIST")]
    steps: Option<String>,

    #[command(flatten)]
    pub output: Output,
}

/// How often processes are looked at.
const LOOK: Duration = Duration::from_millis(200);
/// How often once all chunks are there and the launcher writes what is made from the record.
const LOOK_CLOSING: Duration = Duration::from_millis(3);
/// Growth of resident memory that is told from noise, in KiB for 1,000 chunks.
const BAR_KIB: f64 = 64.0;
/// Share of the period that digests may take.
const BAR_DIGESTS: f64 = 0.01;

/// Values by the chunk at which they were seen.
type Points = Vec<(f64, f64)>;

/// What was seen of one process.
#[derive(Default)]
struct Seen {
    rss_kib: Points,
    descriptors: Points,
    threads: Points,
    /// Memory when the last chunk was on disk, and the most until its end.
    before_close_kib: u64,
    peak_kib: u64,
    cpu_s: f64,
}

/// What the record tells, added up as it grows.
#[derive(Default)]
struct Told {
    chunks: u32,
    queue_in: Points,
    queue_out: Points,
    digest_ns: u64,
    period_ns: u64,
    idle_ns: u64,
    pipelines: u32,
}

/// Runs the benchmark.
pub fn run(args: &Args) -> anyhow::Result<Measured> {
    ensure!(
        args.warm + 10 <= args.chunks,
        "--chunks {}: nothing is left to compare after {}",
        args.chunks,
        args.warm
    );
    let dir = tempfile::tempdir()?;
    let mut target = args.target.clone();
    if let Some(steps) = &args.steps {
        target.model = with_steps(&target.model, steps, &dir.path().join("model"))?;
    }
    let words = target.command(dir.path(), &args.mesh, &args.topology, args.chunks)?;
    let begun = Instant::now();
    let mut stream = Stream::start(&words, dir.path(), &nonce(), &[])?;
    let mut tail = stream.record();
    let mut told = Told::default();
    let mut processes: BTreeMap<String, Process> = BTreeMap::new();
    let mut seen: BTreeMap<String, Seen> = BTreeMap::new();
    let mut files: BTreeMap<String, Points> = BTreeMap::new();
    let mut streamed_s = 0.0;
    while stream.collect().is_none() {
        for line in tail.read()? {
            told.take(&line);
        }
        if processes.is_empty() && told.chunks > 0 {
            processes.extend(stream.launcher().map(|p| ("launcher".to_string(), p)));
            let ranks = ranks(stream.id(), &stream.nonce);
            processes.extend(ranks.into_iter().map(|(rank, p)| (format!("rank {rank}"), p)));
        }
        let closing = told.chunks >= args.chunks;
        for (name, process) in &processes {
            if let Some(held) = Held::of(*process) {
                seen.entry(name.clone()).or_default().take(told.chunks, held, closing);
            }
        }
        if !closing {
            streamed_s = begun.elapsed().as_secs_f64();
            for (name, bytes) in sizes(&dir.path().join("run")) {
                files.entry(name).or_default().push((f64::from(told.chunks), bytes as f64));
            }
        }
        std::thread::sleep(if closing { LOOK_CLOSING } else { LOOK });
    }
    for line in tail.read()? {
        told.take(&line);
    }
    let result = stream.result().with_context(|| format!("no result: {}", stream.said()))?;
    if result["failure"] != Value::Null || told.chunks != args.chunks {
        bail!("the stream ended with {} chunks: {}", told.chunks, stream.said());
    }
    for (name, bytes) in sizes(&dir.path().join("run")) {
        files.entry(name).or_default().push((f64::from(args.chunks), bytes as f64));
    }
    Ok(report(args, &told, &seen, &files, streamed_s, begun.elapsed().as_secs_f64()))
}

impl Told {
    fn take(&mut self, line: &Value) {
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
}

impl Seen {
    fn take(&mut self, chunks: u32, held: Held, closing: bool) {
        self.peak_kib = self.peak_kib.max(held.peak_kib);
        self.cpu_s = held.cpu_s;
        if closing {
            return;
        }
        let at = f64::from(chunks);
        self.rss_kib.push((at, held.rss_kib as f64));
        self.descriptors.push((at, held.descriptors as f64));
        self.threads.push((at, held.threads as f64));
        self.before_close_kib = held.rss_kib;
    }
}

/// How a value went after the first chunks: its slope for 1,000 chunks, what it was at first, and the most.
struct Growth {
    slope: f64,
    first: f64,
    most: f64,
}

impl Growth {
    fn of(points: &Points, warm: u32) -> Growth {
        let steady: Points = points.iter().copied().filter(|(x, _)| *x >= f64::from(warm)).collect();
        let values: Vec<f64> = steady.iter().map(|(_, y)| *y).collect();
        Growth {
            slope: slope(&steady) * 1000.0,
            first: values.first().copied().unwrap_or(0.0),
            most: most(&values),
        }
    }

    fn json(&self) -> Value {
        json!({"slope_per_1000": round(self.slope), "after_warm": self.first, "most": self.most})
    }
}

fn report(
    args: &Args,
    told: &Told,
    seen: &BTreeMap<String, Seen>,
    files: &BTreeMap<String, Points>,
    streamed_s: f64,
    all_s: f64,
) -> Measured {
    let mut text = format!(
        "{} chunks in {streamed_s:.1} s, closed in {:.1} s; slopes over chunks {} to {}\n",
        told.chunks,
        all_s - streamed_s,
        args.warm,
        args.chunks
    );
    let _ = writeln!(
        text,
        "{:<10} {:>26} {:>17} {:>17} {:>22}",
        "", "memory KiB, per 1,000", "descriptors, most", "threads, most", "peak at the end KiB"
    );
    let mut processes = serde_json::Map::new();
    let mut flat = true;
    for (name, s) in seen {
        let [rss, descriptors, threads] =
            [&s.rss_kib, &s.descriptors, &s.threads].map(|p| Growth::of(p, args.warm));
        let grows =
            rss.slope > BAR_KIB || descriptors.most > descriptors.first || threads.most > threads.first;
        flat &= !grows;
        let _ = writeln!(
            text,
            "{name:<10} {:>12.0} {:>+13.1} {:>10.0} {:>6.0} {:>10.0} {:>6.0} {:>22}{}",
            rss.first,
            rss.slope,
            descriptors.first,
            descriptors.most,
            threads.first,
            threads.most,
            s.peak_kib,
            if grows { "  grows" } else { "" }
        );
        processes.insert(
            name.clone(),
            json!({
                "rss_kib": rss.json(),
                "descriptors": descriptors.json(),
                "threads": threads.json(),
                "before_close_kib": s.before_close_kib,
                "peak_kib": s.peak_kib,
                "closing_kib_per_1000": round(closing(s, told.chunks)),
                "cpu_s": round(s.cpu_s),
                "grows": grows,
            }),
        );
    }
    let queues = [("in", &told.queue_in), ("out", &told.queue_out)].map(|(name, points)| {
        let g = Growth::of(points, args.warm);
        let _ = writeln!(text, "queue {name}: at most {:.0}, slope {:+.3} for 1,000 chunks", g.most, g.slope);
        g.json()
    });
    let mut sizes = serde_json::Map::new();
    for (name, points) in files {
        let g = Growth::of(points, args.warm);
        let end = points.last().map_or(0.0, |(_, y)| *y);
        let _ = writeln!(
            text,
            "{name}: {:.0} kB at the end, {:+.1} kB for 1,000 chunks",
            end / 1e3,
            g.slope / 1e3
        );
        let fields = json!({"bytes": end, "bytes_per_1000_chunks": round(g.slope)});
        sizes.insert(name.clone(), fields);
    }
    let share = told.digest_share();
    let _ = match share {
        Some(s) => {
            write!(text, "digests take {:.3} % of the period (bar {} %)", s * 100.0, BAR_DIGESTS * 100.0)
        }
        None => write!(text, "the record tells no digest times"),
    };
    let [queue_in, queue_out] = queues;
    let numbers = json!({
        "bench": "long",
        "model": args.target.model,
        "mesh": args.mesh,
        "topology": args.topology,
        "chunks": told.chunks,
        "warm": args.warm,
        "seconds": round(streamed_s),
        "closing_seconds": round(all_s - streamed_s),
        "processes": processes,
        "nothing_grows_while_it_runs": flat,
        "bar_kib_per_1000": BAR_KIB,
        "queue_in": queue_in,
        "queue_out": queue_out,
        "files": sizes,
        "digest_share": share,
        "digests_within_bar": share.map(|s| s <= BAR_DIGESTS),
        "period_ms": (told.pipelines > 0).then(|| round(told.period_ns as f64 / f64::from(told.pipelines) / 1e6)),
        "idle_ms": (told.pipelines > 0).then(|| round(told.idle_ns as f64 / f64::from(told.pipelines) / 1e6)),
    });
    Measured { text, numbers }
}

/// Memory that a process took once all chunks were there, for each 1,000 of them.
fn closing(s: &Seen, chunks: u32) -> f64 {
    s.peak_kib.saturating_sub(s.before_close_kib) as f64 / (f64::from(chunks) / 1000.0)
}

/// Bytes of each file of a run; its plan was written before it began.
fn sizes(run: &Path) -> Vec<(String, u64)> {
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

/// A folder like the model's with other denoise steps: links to its files, and a stream.toml of its own.
fn with_steps(model: &Path, steps: &str, to: &Path) -> anyhow::Result<std::path::PathBuf> {
    std::fs::create_dir(to)?;
    for entry in std::fs::read_dir(model).with_context(|| format!("{} cannot be read", model.display()))? {
        let entry = entry?;
        if entry.file_name() != "stream.toml" {
            std::os::unix::fs::symlink(std::path::absolute(entry.path())?, to.join(entry.file_name()))?;
        }
    }
    let text = std::fs::read_to_string(model.join("stream.toml")).context("the model has no stream.toml")?;
    let lines = text.lines().map(|l| match l.strip_prefix("steps = ") {
        Some(_) => format!("steps = [{steps}]\n"),
        None => format!("{l}\n"),
    });
    std::fs::write(to.join("stream.toml"), lines.collect::<String>())?;
    Ok(to.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_grows_is_told_from_what_filled_up() {
        let fills: Points = (0..100).map(|i| (f64::from(i), f64::from(i.min(20)))).collect();
        let g = Growth::of(&fills, 20);
        assert_eq!((g.slope, g.first, g.most), (0.0, 20.0, 20.0));
        let grows: Points = (0..100).map(|i| (f64::from(i), f64::from(2 * i))).collect();
        let g = Growth::of(&grows, 20);
        assert!((g.slope - 2000.0).abs() < 1e-6 && g.most == 198.0, "{}", g.slope);
    }

    #[test]
    fn the_records_pipeline_adds_up() {
        let mut told = Told::default();
        told.take(&json!({"kind": "start"}));
        told.take(&json!({"kind": "chunk", "queue_in": 2, "queue_out": 1}));
        assert_eq!((told.chunks, told.digest_share()), (1, None));
        let pipeline = json!({"digest_ns": 3, "period_ns": 400, "idle_ns": 0});
        told.take(&json!({"kind": "chunk", "queue_in": 2, "queue_out": 1, "pipeline": pipeline}));
        assert_eq!((told.chunks, told.digest_share()), (2, Some(0.0075)));
    }
}
