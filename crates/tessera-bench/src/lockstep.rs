//! The cost of an agreement: the time from the leader's decision of a call to its commit at every
//! rank, with programs that do nothing. The baseline is a bare echo of the same message sizes over
//! Unix sockets between the same processes. Ranks that compute in a call compute equally long after
//! the echo's commit, because the first rank to receive it takes a core from the others.
//!
//! An agreement is three messages in sequence: envelope, ready, commit. On C cores with R ranks,
//! each of the R - 1 other ranks is woken twice, and the leader once for each answer that arrives
//! while it sleeps. This makes between 2 (R - 1) + 1 and 3 (R - 1) wake-ups that share C cores. The
//! benchmark measures a wake-up first.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use crate::BenchResult;
use crate::harness::{self, EngineScript, FrameSizes, HarnessConfig, HarnessRun, RankTimestamps};
use crate::stats::{median, percentiles_json, quantile, round_to_millis};

/// Time from the leader's decision to the commit at every rank, compared with a bare echo
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Number of ranks, including the leader
    #[arg(long, value_name = "N", default_value_t = 8)]
    ranks: u32,

    /// Number of calls per condition
    #[arg(long, value_name = "N", default_value_t = 5000)]
    calls: u32,

    /// Time that a rank computes per call in conditions with compute
    #[arg(long, value_name = "MS", default_value_t = 3)]
    compute_ms: u64,
}

/// Limits of the time from the decision to the commit on idle cores, in microseconds.
const LIMIT_P50_US: f64 = 300.0;
const LIMIT_P99_US: f64 = 1000.0;
/// Largest allowed ratio of the lockstep time to the echo time while the ranks compute.
const LIMIT_RATIO: f64 = 1.5;
/// Number of initial calls to ignore: they touch pages, buffers and caches for the first time.
const IGNORED_CALLS: usize = 50;
/// Number of round trips in the measurement of a wake-up.
const ROUND_TRIPS: u32 = 5000;

/// The load on the machine while ranks agree.
#[derive(Clone, Copy)]
enum LoadCondition {
    Idle,
    LeaderOutside,
    ComputeInCalls,
    BackgroundCompute,
}

impl LoadCondition {
    const ALL: [LoadCondition; 4] = [
        LoadCondition::Idle,
        LoadCondition::LeaderOutside,
        LoadCondition::ComputeInCalls,
        LoadCondition::BackgroundCompute,
    ];

    fn name(self) -> &'static str {
        match self {
            LoadCondition::Idle => "idle",
            LoadCondition::LeaderOutside => "idle, leader outside",
            LoadCondition::ComputeInCalls => "compute in each call",
            LoadCondition::BackgroundCompute => "background compute",
        }
    }
}

/// Measures the time from the leader's decision to the commit, against a bare echo.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    ensure!(args.ranks >= 2, "--ranks {}: the minimum is 2", args.ranks);
    ensure!(
        args.calls as usize > 2 * IGNORED_CALLS,
        "--calls {}: the minimum is {}",
        args.calls,
        2 * IGNORED_CALLS + 1
    );
    let wake_us = measure_wake_up_us()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let others = f64::from(args.ranks - 1);
    let floor_us = (2.0 * others + 1.0) * wake_us / cores as f64;
    let mut text = format!(
        "a wake-up over a socket takes {wake_us:.1} µs; {} of them on {cores} cores are {floor_us:.0} µs\n",
        2 * (args.ranks - 1) + 1
    );
    let mut rows = Vec::new();
    let mut sizes = None;
    for condition in LoadCondition::ALL {
        let dir = tempfile::tempdir()?;
        let config = HarnessConfig {
            ranks: args.ranks,
            leader_outside: matches!(condition, LoadCondition::LeaderOutside),
            chunks: args.calls,
            engine_script: match condition {
                LoadCondition::ComputeInCalls => EngineScript::Compute { ns: args.compute_ms * 1_000_000 },
                _ => EngineScript::Nothing,
            },
            burn_in_background: matches!(condition, LoadCondition::BackgroundCompute),
            echo: true,
            dir: dir.path().to_path_buf(),
        };
        sizes = Some(FrameSizes::from_config(&config)?);
        let outcome = harness::run(&config, &harness::one_call_limits())?;
        if let Some(failure) = &outcome.report.failure {
            bail!("{}: {failure}", condition.name());
        }
        rows.push(condition_row(condition, &config, &outcome, &mut text)?);
    }
    let frames = sizes.map(|s| json!({"envelope": s.envelope, "ready": s.ready, "commit": s.commit}));
    let numbers = json!({
        "bench": "lockstep",
        "ranks": args.ranks,
        "calls": args.calls,
        "compute_ms": args.compute_ms,
        "frame_bytes": frames,
        "wake_up_us": round_to_millis(wake_us),
        "floor_us": round_to_millis(floor_us),
        "limits": {"idle_p50_us": LIMIT_P50_US, "idle_p99_us": LIMIT_P99_US, "compute_ratio": LIMIT_RATIO},
        "conditions": rows,
    });
    Ok(BenchResult { text: text.trim_end().to_string(), numbers })
}

fn condition_row(
    condition: LoadCondition,
    config: &HarnessConfig,
    outcome: &HarnessRun,
    text: &mut String,
) -> anyhow::Result<Value> {
    let times = AgreementTimes::from_timestamps(config, &outcome.timestamps)?;
    let (lockstep, echo) = (&times.lockstep, &times.echo);
    let ratio = |q: f64| {
        let bare = quantile(echo, q);
        if bare > 0.0 { quantile(lockstep, q) / bare } else { 0.0 }
    };
    let within = match condition {
        LoadCondition::Idle => {
            Some(quantile(lockstep, 0.5) <= LIMIT_P50_US && quantile(lockstep, 0.99) <= LIMIT_P99_US)
        }
        LoadCondition::ComputeInCalls => Some(ratio(0.5) <= LIMIT_RATIO && ratio(0.99) <= LIMIT_RATIO),
        LoadCondition::LeaderOutside | LoadCondition::BackgroundCompute => None,
    };
    let all = [
        ("lockstep", lockstep),
        ("ready", &times.to_ready),
        ("request", &times.from_request),
        ("begun", &times.to_engines),
        ("echo", echo),
    ];
    for (name, values) in all {
        let _ = writeln!(
            text,
            "{:<22} {name:<9} p50 {:>8.1} µs, p99 {:>8.1} µs, max {:>8.1} µs",
            condition.name(),
            quantile(values, 0.5),
            quantile(values, 0.99),
            quantile(values, 1.0)
        );
    }
    let _ = writeln!(text, "{:<22} {:.2} of the echo at p50, {:.2} at p99", "", ratio(0.5), ratio(0.99));
    Ok(json!({
        "condition": condition.name(),
        "lockstep_us": percentiles_json(lockstep),
        "to_ready_us": percentiles_json(&times.to_ready),
        "from_request_us": percentiles_json(&times.from_request),
        "to_engines_us": percentiles_json(&times.to_engines),
        "echo_us": percentiles_json(echo),
        "ratio_p50": round_to_millis(ratio(0.5)),
        "ratio_p99": round_to_millis(ratio(0.99)),
        "within_limit": within,
        "seconds": round_to_millis(outcome.duration.as_secs_f64()),
    }))
}

/// Durations of each call up to the last rank, in microseconds.
#[derive(Default)]
struct AgreementTimes {
    /// From the decision to the commit.
    lockstep: Vec<f64>,
    /// From the decision until the leader has the last rank's ready.
    to_ready: Vec<f64>,
    /// From just before the leader receives the request until the last rank has the commit.
    from_request: Vec<f64>,
    /// From the decision until the engines begin.
    to_engines: Vec<f64>,
    /// From the leader's first byte of the echo before the call until the last rank has the echo's
    /// commit.
    echo: Vec<f64>,
}

impl AgreementTimes {
    fn from_timestamps(
        config: &HarnessConfig,
        timestamps: &[RankTimestamps],
    ) -> anyhow::Result<AgreementTimes> {
        let leader = timestamps.first().context("no rank wrote its timestamps")?;
        let calls = config.chunks as usize;
        ensure!(
            leader.calls.len() == calls && leader.requested.len() == calls,
            "{} calls",
            leader.calls.len()
        );
        let mesh =
            || timestamps.iter().enumerate().filter(|(r, _)| config.mesh_ranks().contains(&(*r as u32)));
        let commits_by_rank: Vec<BTreeMap<u64, u64>> =
            mesh().map(|(_, s)| s.commits.iter().copied().collect()).collect();
        let leader_commits: BTreeMap<u64, u64> = leader.commits.iter().copied().collect();
        // The leader's clock started with its process. The leader notifies the sink right after it
        // decides a commit, so the minimum difference is the offset between the clocks.
        let clock_offset =
            leader.calls.iter().filter_map(|c| leader_commits.get(&c.id)?.checked_sub(c.committed_ns)).min();
        let clock_offset = clock_offset.context("the leader recorded no commit")?;
        let mut out = AgreementTimes::default();
        let us = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
        for (k, call) in leader.calls.iter().enumerate().skip(IGNORED_CALLS) {
            let decided = call.decided_ns + clock_offset;
            let received: Option<Vec<u64>> =
                commits_by_rank.iter().map(|r| r.get(&call.id).copied()).collect();
            let received =
                received.with_context(|| format!("a rank did not receive the commit of call {}", call.id))?;
            let last = received.into_iter().max().unwrap_or(0);
            out.lockstep.push(us(decided, last));
            out.to_ready.push(us(call.decided_ns, call.ready_ns));
            out.from_request.push(us(leader.requested[k], last));
            let begun: Option<Vec<u64>> = mesh().map(|(_, s)| s.engine_started.get(k).copied()).collect();
            let begun = begun.with_context(|| format!("an engine did not begin call {}", call.id))?;
            out.to_engines.push(us(decided, begun.into_iter().max().unwrap_or(0)));
            let read: Option<Vec<u64>> =
                timestamps[1..].iter().map(|s| s.echo_read.get(k).copied()).collect();
            let read = read.with_context(|| format!("a rank did not read echo {k}"))?;
            let sent = leader.echo_sent.get(k).copied().with_context(|| format!("no echo {k}"))?;
            out.echo.push(us(sent, read.into_iter().max().unwrap_or(0)));
        }
        Ok(out)
    }
}

/// Returns half of a round trip of a small message between two threads that sleep until it arrives.
fn measure_wake_up_us() -> anyhow::Result<f64> {
    let (mut here, mut there) = UnixStream::pair()?;
    let echo = std::thread::spawn(move || {
        let mut byte = [0; 64];
        while there.read_exact(&mut byte).and_then(|()| there.write_all(&byte)).is_ok() {}
    });
    let mut halves = Vec::new();
    let mut bytes = [0; 64];
    for _ in 0..ROUND_TRIPS {
        let sent = harness::now_ns();
        here.write_all(&bytes)?;
        here.read_exact(&mut bytes)?;
        halves.push((harness::now_ns() - sent) as f64 / 2e3);
    }
    drop(here);
    let _ = echo.join();
    Ok(median(&halves))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::timestamps::CallTimestamps;

    #[test]
    fn the_last_rank_counts() {
        let orders = HarnessConfig {
            ranks: 3,
            chunks: IGNORED_CALLS as u32 + 1,
            echo: true,
            ..HarnessConfig::default()
        };
        // The leader's clock is one second behind. The first commit, with id 0, belongs to the
        // warm-up.
        let at = |k: u64, us: u64| 1_000_000_000 + k * 100_000 + us * 1000;
        let n = u64::from(orders.chunks);
        let rank = |us: u64| RankTimestamps {
            commits: (0..=n).map(|k| (k, at(k, us))).collect(),
            engine_started: (1..=n).map(|k| at(k, us + 1)).collect(),
            echo_read: (1..=n).map(|k| at(k, us - 4)).collect(),
            ..RankTimestamps::default()
        };
        let leader = RankTimestamps {
            requested: (1..=n).map(|k| at(k, 0)).collect(),
            calls: (1..=n)
                .map(|k| CallTimestamps {
                    id: k,
                    decided_ns: k * 100_000,
                    ready_ns: k * 100_000 + 4000,
                    committed_ns: k * 100_000 + 5000,
                })
                .collect(),
            echo_sent: (1..=n).map(|k| at(k, 0)).collect(),
            ..rank(5)
        };
        let times = AgreementTimes::from_timestamps(&orders, &[leader, rank(9), rank(7)])
            .expect("complete timestamps");
        assert_eq!((&times.lockstep[..], &times.from_request[..]), (&[9.0][..], &[9.0][..]));
        assert_eq!(times.to_ready, [4.0]);
        assert_eq!((&times.to_engines[..], &times.echo[..]), (&[10.0][..], &[5.0][..]));
    }
}
