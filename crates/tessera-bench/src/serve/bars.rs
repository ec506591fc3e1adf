//! What the clients saw, beside the bars of a served stream.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use super::client::{ClientLog, StreamFacts};
use super::server_process::{ChunkTimes, MemorySeries};
use super::{Args, last_frame};
use crate::BenchResult;
use crate::stats::{median, percentiles_json, quantile, round_to_millis};

/// Delivered frames per second of the slowest client, as a share of the raw run.
const DELIVERED_SHARE: f64 = 0.95;
/// p99 of the interval between shown frames, as a multiple of the median.
const SHOWN_SPREAD: f64 = 1.5;
/// Chunk periods from a prompt to its first frame, beside the time of the decoder.
const PROMPT_PERIODS: f64 = 3.0;
/// p99 of the chunk period with all clients, as a multiple of that without one.
const WATCHED_PERIOD: f64 = 1.1;

/// Figures of the unpaced runs.
#[derive(Debug, Default)]
pub struct Unpaced {
    /// Frames per second of `tessera stream --raw`, by round.
    pub raw_fps: Vec<f64>,
    /// Frames per second of the slowest client, by round.
    pub slowest_client_fps: Vec<f64>,
    /// Frames per second of every client in every round.
    pub client_fps: Vec<f64>,
    /// Chunk periods of a server that nobody watches.
    pub unwatched_periods_ms: Vec<f64>,
    /// Chunk periods of a server with all clients.
    pub watched_periods_ms: Vec<f64>,
    /// Frames that clients lost.
    pub lost_frames: u64,
}

/// Everything that was measured.
#[derive(Debug)]
pub struct Findings {
    /// Figures of the runs at the pace of the ranks.
    pub unpaced: Unpaced,
    /// What the server says of its stream.
    pub facts: StreamFacts,
    /// Frames that the ranks delivered in the paced run.
    pub generated: u64,
    /// Chunks of the paced run after the warm-up.
    pub chunks: Vec<ChunkTimes>,
    /// The clients of the paced run: first those that watch, then those that stalled.
    pub logs: Vec<ClientLog>,
    /// Number of the clients that watch.
    pub watching: usize,
    /// Resident memory by process.
    pub memory: BTreeMap<String, MemorySeries>,
}

/// A bar and what was measured.
#[derive(Debug, PartialEq)]
pub struct Bar {
    name: &'static str,
    measured: f64,
    limit: f64,
    /// Whether the measured value must not be above the limit; otherwise it must not be below.
    is_upper: bool,
}

impl Bar {
    fn is_met(&self) -> bool {
        if self.is_upper { self.measured <= self.limit } else { self.measured >= self.limit }
    }

    fn to_json(&self) -> Value {
        json!({
            "bar": self.name,
            "measured": round_to_millis(self.measured),
            "limit": round_to_millis(self.limit),
            "met": self.is_met(),
        })
    }

    fn to_line(&self) -> String {
        let relation = if self.is_upper { "at most" } else { "at least" };
        let verdict = if self.is_met() { "met" } else { "NOT MET" };
        format!("{:<72} {:>8.3} ({relation} {:.3}): {verdict}", self.name, self.measured, self.limit)
    }
}

impl Findings {
    /// Returns the clients that watched to the end.
    fn watchers(&self) -> &[ClientLog] {
        &self.logs[..self.watching]
    }

    /// Returns the longer one of the period of the video and of the ranks, in seconds: what a person waits for.
    fn period_s(&self) -> f64 {
        let periods: Vec<f64> = self.chunks.iter().map(|chunk| chunk.period_ms / 1e3).collect();
        median(&periods).max(f64::from(self.facts.chunk_frames) / self.facts.frame_rate)
    }

    fn prompt_s(&self) -> Vec<f64> {
        self.watchers().iter().flat_map(|log| log.prompt_s.iter().copied()).collect()
    }

    fn decode_s(&self) -> f64 {
        median(&self.chunks.iter().map(|chunk| chunk.decode_ms / 1e3).collect::<Vec<_>>())
    }

    /// Returns the frames that a client lost: up to its own last frame if it watched to the end, because clients do not end at
    /// the same frame, and up to the last one of all if it stalled.
    fn lost_frames(&self, at: usize) -> u64 {
        let log = &self.logs[at];
        if at < self.watching { log.lost_before_last() } else { log.lost_frames(last_frame(&self.logs)) }
    }

    /// Compares what was measured with the bars.
    fn compare_with_bars(&self) -> Vec<Bar> {
        let upper = |name, measured, limit| Bar { name, measured, limit, is_upper: true };
        let unpaced = &self.unpaced;
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        let p99 = |values: &[f64]| quantile(values, 0.99);
        let spread = |log: &ClientLog| ratio(p99(&log.shown_intervals_ms), median(&log.shown_intervals_ms));
        let lost: u64 = (0..self.watching).map(|at| self.lost_frames(at)).sum();
        vec![
            Bar {
                name: "delivered to the slowest client, unpaced, over `tessera stream --raw`",
                measured: ratio(median(&unpaced.slowest_client_fps), median(&unpaced.raw_fps)),
                limit: DELIVERED_SHARE,
                is_upper: false,
            },
            upper(
                "p99 of the interval between shown frames over its median, worst client",
                self.watchers().iter().map(spread).fold(0.0, f64::max),
                SHOWN_SPREAD,
            ),
            upper(
                "stalls of all watching clients",
                self.watchers().iter().map(|l| l.stalls as f64).sum(),
                0.0,
            ),
            upper(
                "p99 from a prompt to its first frame, in chunk periods; 3 and the decoder",
                ratio(p99(&self.prompt_s()), self.period_s()),
                PROMPT_PERIODS + ratio(self.decode_s(), self.period_s()),
            ),
            upper(
                "p99 of the chunk period, unpaced, watched over unwatched",
                ratio(p99(&unpaced.watched_periods_ms), p99(&unpaced.unwatched_periods_ms)),
                WATCHED_PERIOD,
            ),
            upper("frames lost by clients that read", (lost + unpaced.lost_frames) as f64, 0.0),
        ]
    }

    /// Builds the text and the numbers.
    pub fn report(&self, args: &Args) -> BenchResult {
        let bars = self.compare_with_bars();
        let mut text = format!(
            "{} on {} {}, {} clients and {} that stall, {} minutes\n",
            args.model.display(),
            args.device,
            args.mesh,
            args.clients,
            args.stalled,
            args.minutes
        );
        self.write_figures(&mut text);
        for bar in &bars {
            let _ = writeln!(text, "{}", bar.to_line());
        }
        let met = bars.iter().filter(|bar| bar.is_met()).count();
        let _ = write!(text, "{met} of {} bars met", bars.len());
        let unpaced = &self.unpaced;
        let shown: Vec<f64> = self.watchers().iter().flat_map(|l| l.shown_intervals_ms.clone()).collect();
        let prompt_periods: Vec<f64> = self.prompt_s().iter().map(|s| s / self.period_s()).collect();
        let paced: Vec<f64> = self.chunks.iter().map(|chunk| chunk.period_ms).collect();
        let numbers = json!({
            "bench": "serve",
            "model": args.model,
            "mesh": args.mesh,
            "device": args.device,
            "clients": args.clients,
            "stalled": args.stalled,
            "minutes": args.minutes,
            "bars": bars.iter().map(Bar::to_json).collect::<Vec<_>>(),
            "unpaced": {
                "raw_fps": unpaced.raw_fps,
                "slowest_client_fps": unpaced.slowest_client_fps,
                "client_fps": percentiles_json(&unpaced.client_fps),
                "unwatched_period_ms": percentiles_json(&unpaced.unwatched_periods_ms),
                "watched_period_ms": percentiles_json(&unpaced.watched_periods_ms),
                "lost_frames": unpaced.lost_frames,
            },
            "paced": {
                "generated_frames": self.generated,
                "period_ms": percentiles_json(&paced),
                "shown_interval_ms": percentiles_json(&shown),
                "prompt_periods": percentiles_json(&prompt_periods),
                "decode_ms": round_to_millis(self.decode_s() * 1e3),
                "refused_prompts": self.logs.iter().flat_map(|log| &log.refused).collect::<Vec<_>>(),
                "clients": (0..self.logs.len()).map(|at| self.client_json(at)).collect::<Vec<_>>(),
            },
            "memory": self.memory.iter().map(|(name, m)| (name.clone(), memory_json(m))).collect::<BTreeMap<_, _>>(),
        });
        BenchResult { text, numbers }
    }

    fn write_figures(&self, text: &mut String) {
        let unpaced = &self.unpaced;
        let _ = writeln!(
            text,
            "unpaced: raw {:.1} frames/s, slowest client {:.1}; period p50 {:.1} ms and p99 {:.1} unwatched, {:.1} and {:.1} watched",
            median(&unpaced.raw_fps),
            median(&unpaced.slowest_client_fps),
            median(&unpaced.unwatched_periods_ms),
            quantile(&unpaced.unwatched_periods_ms, 0.99),
            median(&unpaced.watched_periods_ms),
            quantile(&unpaced.watched_periods_ms, 0.99),
        );
        let prompts = self.prompt_s();
        let _ = writeln!(
            text,
            "paced: {} frames; {} prompts seen after {:.2} s at p50 and {:.2} s at p99, the period is {:.2} s",
            self.generated,
            prompts.len(),
            median(&prompts),
            quantile(&prompts, 0.99),
            self.period_s()
        );
        for (at, log) in self.logs.iter().enumerate() {
            let _ = writeln!(
                text,
                "client {:>3}: {:>6} frames, {} lost{}",
                log.number,
                log.arrivals.len(),
                self.lost_frames(at),
                if at < self.watching {
                    format!(
                        ", shown every {:.1} ms at p50 and {:.1} at p99, {} stalls",
                        median(&log.shown_intervals_ms),
                        quantile(&log.shown_intervals_ms, 0.99),
                        log.stalls
                    )
                } else {
                    format!(", stalled; {}", log.ended.as_deref().unwrap_or("still connected at the end"))
                }
            );
        }
        for (name, memory) in &self.memory {
            let [start, middle, end] = memory.start_middle_end();
            let _ = writeln!(
                text,
                "memory of {name}: {start:.0} KiB, {middle:.0} in the middle, {end:.0} at the end, {:+.0} per minute: {}",
                memory.slope_per_minute(),
                if memory.is_flat() { "flat" } else { "GROWS" }
            );
        }
    }

    fn client_json(&self, at: usize) -> Value {
        let log = &self.logs[at];
        json!({
            "client": log.number,
            "stalled": at >= self.watching,
            "frames": log.arrivals.len(),
            "chunks": log.arrivals.iter().filter(|arrival| arrival.is_first).count(),
            "lost_frames": self.lost_frames(at),
            "shown_interval_ms": percentiles_json(&log.shown_intervals_ms),
            "stalls": log.stalls,
            "ended": log.ended,
        })
    }
}

fn memory_json(memory: &MemorySeries) -> Value {
    json!({
        "rss_kib": memory.start_middle_end(),
        "kib_per_minute": round_to_millis(memory.slope_per_minute()),
        "flat": memory.is_flat(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::client::Arrival;
    use super::*;

    fn findings() -> Findings {
        let arrival = |frame: u64| Arrival {
            at_s: 0.0,
            request: frame / 12,
            frame,
            is_first: frame.is_multiple_of(12),
        };
        let watcher = ClientLog {
            arrivals: (0..120).map(arrival).collect(),
            shown_intervals_ms: [vec![41.0; 99], vec![60.0]].concat(),
            prompt_s: vec![1.0, 1.5],
            ..ClientLog::default()
        };
        let stalled =
            ClientLog { arrivals: (0..30).map(arrival).collect(), stalls: 3, ..ClientLog::default() };
        Findings {
            unpaced: Unpaced {
                raw_fps: vec![100.0, 90.0, 110.0],
                slowest_client_fps: vec![96.0, 80.0, 97.0],
                unwatched_periods_ms: vec![100.0; 50],
                watched_periods_ms: vec![109.0; 50],
                ..Unpaced::default()
            },
            facts: StreamFacts { frame_rate: 24.0, chunk_frames: 12, examples: Vec::new() },
            generated: 120,
            chunks: vec![ChunkTimes { frames: 12, done_s: 0.0, period_ms: 480.0, decode_ms: 50.0 }; 9],
            logs: vec![watcher, stalled],
            watching: 1,
            memory: BTreeMap::new(),
        }
    }

    #[test]
    fn a_stalled_client_breaks_no_bar() {
        let findings = findings();
        let bars = findings.compare_with_bars();
        assert!(bars.iter().all(Bar::is_met), "{bars:#?}");
        assert_eq!((bars[0].measured, bars[3].measured, bars[3].limit), (0.96, 3.0, 3.1));
        assert_eq!((findings.lost_frames(0), findings.lost_frames(1)), (0, 90));
    }

    #[test]
    fn each_bar_can_be_missed() {
        let mut findings = findings();
        findings.unpaced.slowest_client_fps = vec![94.0];
        findings.unpaced.watched_periods_ms = vec![111.0; 50];
        findings.logs[0].shown_intervals_ms = [vec![40.0; 90], vec![61.0; 10]].concat();
        findings.logs[0].stalls = 1;
        findings.logs[0].prompt_s.push(1.6);
        findings.logs[0].arrivals.remove(50);
        let met: Vec<&str> =
            findings.compare_with_bars().iter().filter(|bar| bar.is_met()).map(|bar| bar.name).collect();
        assert_eq!(met, [""; 0]);
    }
}
