//! `tessera serve` and `tessera stream` as child processes of the benchmark, and what their records say.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::Args;
use crate::process_list::{Process, ProcessUsage, new_run_tag};
use crate::stats::{median, regression_slope};
use crate::stream_process::{JsonTail, StreamProcess};

/// Longest wait for a server and for each chunk.
const PATIENCE: Duration = Duration::from_secs(300);
/// Interval between two looks at a file.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Growth of resident memory from the middle to the end that is noise: a share, and KiB.
const NOISE: (f64, f64) = (0.01, 1024.0);

/// A server, and the folder in which it writes.
pub struct ServerProcess {
    process: StreamProcess,
    dir: TempDir,
    /// Where it is reached.
    pub address: SocketAddr,
}

impl ServerProcess {
    /// Starts a server and waits until it can be reached.
    pub fn start(args: &Args, flags: &[&str]) -> anyhow::Result<ServerProcess> {
        let dir = tempfile::tempdir()?;
        let places = (args.clients + args.stalled + 2).to_string();
        let own = ["--listen", "127.0.0.1:0", "--max-clients", &places, "--restarts", "0"];
        let argv = [args.command("serve", dir.path())?, to_strings(&own), to_strings(flags)].concat();
        let mut process = StreamProcess::start(&argv, dir.path(), &new_run_tag(), &[])?;
        let since = Instant::now();
        loop {
            if let Some(address) = find_address(&process.output_text()) {
                return Ok(ServerProcess { process, dir, address });
            }
            if process.try_reap().is_some() || since.elapsed() > PATIENCE {
                bail!("the server did not start: {}", process.output_text());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns a reader of the record of its only run.
    pub fn open_record(&self) -> JsonTail {
        JsonTail::new(self.dir.path().join("run/run-1/record.jsonl"))
    }

    /// Waits until the record has so many chunks. A run may be long, so the patience is that for one chunk.
    pub fn wait_for_chunks(&mut self, chunks: u64) -> anyhow::Result<()> {
        let (mut record, mut seen, mut since) = (self.open_record(), 0, Instant::now());
        while seen < chunks {
            let lines = record.read()?;
            if !lines.is_empty() {
                since = Instant::now();
            }
            seen += lines.iter().filter(|line| line["kind"] == "chunk").count() as u64;
            ensure!(since.elapsed() < PATIENCE, "only {seen} chunks: {}", self.process.output_text());
            self.check_running()?;
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the server and its ranks, with names.
    pub fn list_processes(&self) -> Vec<(String, Process)> {
        self.process.list_processes("server")
    }

    /// Fails if the server has ended.
    pub fn check_running(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.process.try_reap() {
            bail!("the server ended early ({status}): {}", self.process.output_text());
        }
        Ok(())
    }

    /// Stops the server as Ctrl-C does, and returns the chunks of its record.
    pub fn stop(mut self) -> anyhow::Result<Vec<ChunkTimes>> {
        let launcher = self.process.launcher_process().context("the server is gone")?;
        launcher.send_signal(Signal::INT);
        let since = Instant::now();
        while self.process.try_reap().is_none() {
            ensure!(since.elapsed() < PATIENCE, "the server does not stop: {}", self.process.output_text());
            std::thread::sleep(POLL_INTERVAL);
        }
        ensure!(self.process.describe_end() == "exit 0", "{}", self.process.output_text());
        read_chunks(&mut self.open_record())
    }
}

/// Runs `tessera stream --raw` of so many chunks and returns those of its record.
pub fn stream_raw(args: &Args, chunks: u64) -> anyhow::Result<Vec<ChunkTimes>> {
    let dir = tempfile::tempdir()?;
    let count = chunks.to_string();
    let own = ["--quiet", "--no-clip", "--raw", "/dev/null", "--chunks", &count];
    let argv = [args.command("stream", dir.path())?, to_strings(&own)].concat();
    let mut process = StreamProcess::start(&argv, dir.path(), &new_run_tag(), &[])?;
    process.wait();
    ensure!(process.describe_end() == "exit 0", "{}", process.output_text());
    read_chunks(&mut process.open_record())
}

/// Times of one chunk from a record.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChunkTimes {
    /// Frames of the chunk.
    pub frames: u64,
    /// When its call was done, in seconds on the clock of the record.
    pub done_s: f64,
    /// Time from the commit of the chunk before to the commit of this one.
    pub period_ms: f64,
    /// Time of the slowest rank in the decoder.
    pub decode_ms: f64,
}

fn read_chunks(record: &mut JsonTail) -> anyhow::Result<Vec<ChunkTimes>> {
    let lines = record.read()?;
    Ok(lines.iter().filter(|line| line["kind"] == "chunk").map(ChunkTimes::from_line).collect())
}

impl ChunkTimes {
    /// Reads a line of a record.
    pub fn from_line(line: &Value) -> ChunkTimes {
        let ns = |value: &Value| value.as_u64().unwrap_or_default() as f64;
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let decode = |rank: &Value| -> f64 {
            let phases = list(&rank["phases"]);
            let phases =
                phases.iter().filter(|p| p["name"].as_str().is_some_and(|n| n.starts_with("decode")));
            phases.map(|p| ns(&p["end_ns"]) - ns(&p["start_ns"])).sum()
        };
        ChunkTimes {
            frames: line["frames"].as_u64().unwrap_or_default(),
            done_s: ns(&line["pipeline"]["done_ns"]) / 1e9,
            period_ms: ns(&line["pipeline"]["period_ns"]) / 1e6,
            decode_ms: list(&line["ranks"]).iter().map(decode).fold(0.0, f64::max) / 1e6,
        }
    }
}

/// Returns the frames per second between the ends of the first and the last chunk.
pub fn chunks_fps(chunks: &[ChunkTimes]) -> f64 {
    let (Some(first), Some(last)) = (chunks.first(), chunks.last()) else { return 0.0 };
    let frames: u64 = chunks[1..].iter().map(|chunk| chunk.frames).sum();
    let seconds = last.done_s - first.done_s;
    if seconds > 0.0 { frames as f64 / seconds } else { 0.0 }
}

/// Resident memory of one process while clients watch.
#[derive(Debug, Clone, Default)]
pub struct MemorySeries {
    /// Seconds and KiB.
    points: Vec<(f64, f64)>,
}

impl MemorySeries {
    /// Adds what a process uses now.
    pub fn sample(&mut self, at_s: f64, process: Process) {
        self.points.extend(ProcessUsage::read(process).map(|usage| (at_s, usage.rss_kib as f64)));
    }

    /// Returns KiB at the start, in the middle and at the end.
    pub fn start_middle_end(&self) -> [f64; 3] {
        let last = self.points.len().saturating_sub(1);
        [0, last / 2, last].map(|at| self.points.get(at).map_or(0.0, |(_, kib)| *kib))
    }

    /// Returns the slope of the second half in KiB per minute.
    pub fn slope_per_minute(&self) -> f64 {
        regression_slope(&self.points[self.points.len() / 2..]) * 60.0
    }

    /// Whether the memory did not grow in the second half beyond noise.
    pub fn is_flat(&self) -> bool {
        let later: Vec<f64> = self.points[self.points.len() / 2..].iter().map(|(_, kib)| *kib).collect();
        let quarter = later.len() / 4 + 1;
        let (begin, end) = (median(&later[..quarter.min(later.len())]), self.start_middle_end()[2]);
        end - begin <= (begin * NOISE.0).max(NOISE.1)
    }
}

/// Returns the address that a server prints.
fn find_address(text: &str) -> Option<SocketAddr> {
    let rest = text.lines().find(|line| line.starts_with("serving "))?.split(" at http://").nth(1)?;
    rest.split('/').next()?.parse().ok()
}

fn to_strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_string()).collect()
}

/// Returns a path as text that a command line can state.
pub fn path_text(path: &Path) -> anyhow::Result<String> {
    Ok(std::path::absolute(path)?.to_str().context("the path is not UTF-8")?.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_address_is_read_from_what_a_server_prints() {
        let text = "serving models/demo at http://127.0.0.1:7860/\nrecordings go to /tmp/x; Ctrl-C stops\n";
        assert_eq!(find_address(text), Some(SocketAddr::from(([127, 0, 0, 1], 7860))));
        assert_eq!(find_address("loading\n"), None);
    }

    #[test]
    fn a_chunk_has_the_times_of_its_line() {
        let phase =
            |name: &str, start: u64, end: u64| json!({"name": name, "start_ns": start, "end_ns": end});
        let slow = [phase("decode.first", 0, 3_000_000), phase("decode.rest", 4_000_000, 6_000_000)];
        let line = json!({
            "kind": "chunk",
            "frames": 12,
            "pipeline": {"done_ns": 2_500_000_000_u64, "period_ns": 40_000_000},
            "ranks": [{"phases": [phase("denoise", 0, 9), phase("decode", 0, 1_000_000)]}, {"phases": slow}],
        });
        let chunk = ChunkTimes::from_line(&line);
        assert_eq!(chunk, ChunkTimes { frames: 12, done_s: 2.5, period_ms: 40.0, decode_ms: 5.0 });
        let later = ChunkTimes { done_s: 3.0, ..chunk };
        assert_eq!((chunks_fps(&[chunk, later]), chunks_fps(&[chunk])), (24.0, 0.0));
    }

    #[test]
    fn memory_that_fills_up_is_flat_and_memory_that_grows_is_not() {
        let series = |kib: fn(f64) -> f64| MemorySeries {
            points: (0..120).map(f64::from).map(|at| (at, kib(at))).collect(),
        };
        let fills = series(|at| 50_000.0 + 1000.0 * at.min(30.0));
        assert!(fills.is_flat() && fills.slope_per_minute() == 0.0);
        assert_eq!(fills.start_middle_end(), [50_000.0, 80_000.0, 80_000.0]);
        let grows = series(|at| 50_000.0 + 100.0 * at);
        assert!(!grows.is_flat() && (grows.slope_per_minute() - 6000.0).abs() < 1e-6);
        assert!(MemorySeries::default().is_flat());
    }
}
