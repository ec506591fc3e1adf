//! What an agreement costs: from the instant at which the leader decides a call to its commit at every rank, with
//! programs that do nothing; beside it a bare echo of the same shape over Unix sockets of the same processes. Where ranks
//! compute in a call they compute as much after the echo's commit: whoever has it first takes the core from the others.
//!
//! An agreement is three messages one after the other: envelope, ready, commit. By arithmetic, on C cores with R
//! ranks, each of the R - 1 others is woken twice and the leader once for each answer that does not find it awake:
//! between 2 (R - 1) + 1 and 3 (R - 1) wake-ups that share C cores. A wake-up is measured first.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use crate::rig::{self, EngineDoes, Orders, Ran, Sizes, Stamps};
use crate::stats::{median, quantile, round, spread};
use crate::{Measured, Output};

/// Time from the leader's decision to the commit at every rank, beside a bare echo
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Ranks, the leader's included
    #[arg(long, value_name = "N", default_value_t = 8)]
    ranks: u32,

    /// Calls for each condition
    #[arg(long, value_name = "N", default_value_t = 5000)]
    calls: u32,

    /// What a rank computes in each call where it computes
    #[arg(long, value_name = "MS", default_value_t = 3)]
    compute_ms: u64,

    #[command(flatten)]
    pub output: Output,
}

/// Bars on idle cores, in microseconds.
const BAR_P50_US: f64 = 300.0;
const BAR_P99_US: f64 = 1000.0;
/// Bar under compute, as a multiple of the echo.
const BAR_RATIO: f64 = 1.5;
/// Calls at the beginning that are left out: pages, buffers and caches are touched for the first time.
const FIRST: usize = 50;
/// Round trips from which a wake-up is taken.
const ROUND_TRIPS: u32 = 5000;

/// What goes on while ranks agree.
#[derive(Clone, Copy)]
enum Condition {
    Idle,
    Outside,
    ComputeInCalls,
    ComputeBeside,
}

impl Condition {
    const ALL: [Condition; 4] =
        [Condition::Idle, Condition::Outside, Condition::ComputeInCalls, Condition::ComputeBeside];

    fn name(self) -> &'static str {
        match self {
            Condition::Idle => "idle",
            Condition::Outside => "idle, leader outside",
            Condition::ComputeInCalls => "compute in each call",
            Condition::ComputeBeside => "compute beside",
        }
    }
}

/// Runs the benchmark.
pub fn run(args: &Args) -> anyhow::Result<Measured> {
    ensure!(args.ranks >= 2, "--ranks {}: an agreement needs two", args.ranks);
    ensure!(args.calls as usize > 2 * FIRST, "--calls {}: at least {}", args.calls, 2 * FIRST + 1);
    let wake_us = wake_up_us()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let others = f64::from(args.ranks - 1);
    let floor_us = (2.0 * others + 1.0) * wake_us / cores as f64;
    let mut text = format!(
        "a wake-up over a socket takes {wake_us:.1} µs; {} of them on {cores} cores are {floor_us:.0} µs\n",
        2 * (args.ranks - 1) + 1
    );
    let mut rows = Vec::new();
    let mut sizes = None;
    for condition in Condition::ALL {
        let dir = tempfile::tempdir()?;
        let orders = Orders {
            ranks: args.ranks,
            outside: matches!(condition, Condition::Outside),
            chunks: args.calls,
            engine: match condition {
                Condition::ComputeInCalls => EngineDoes::Compute { ns: args.compute_ms * 1_000_000 },
                _ => EngineDoes::Nothing,
            },
            burn_beside: matches!(condition, Condition::ComputeBeside),
            echo: true,
            dir: dir.path().to_path_buf(),
        };
        sizes = Some(Sizes::of(&orders)?);
        let ran = rig::run(&orders, &rig::limits())?;
        if let Some(failure) = &ran.report.failure {
            bail!("{}: {failure}", condition.name());
        }
        rows.push(row(condition, &orders, &ran, &mut text)?);
    }
    let frames = sizes.map(|s| json!({"envelope": s.envelope, "ready": s.ready, "commit": s.commit}));
    let numbers = json!({
        "bench": "lockstep",
        "ranks": args.ranks,
        "calls": args.calls,
        "compute_ms": args.compute_ms,
        "frame_bytes": frames,
        "wake_up_us": round(wake_us),
        "floor_us": round(floor_us),
        "bars": {"idle_p50_us": BAR_P50_US, "idle_p99_us": BAR_P99_US, "compute_ratio": BAR_RATIO},
        "conditions": rows,
    });
    Ok(Measured { text: text.trim_end().to_string(), numbers })
}

fn row(condition: Condition, orders: &Orders, ran: &Ran, text: &mut String) -> anyhow::Result<Value> {
    let times = Times::of(orders, &ran.stamps)?;
    let (lockstep, echo) = (&times.lockstep, &times.echo);
    let ratio = |q: f64| {
        let bare = quantile(echo, q);
        if bare > 0.0 { quantile(lockstep, q) / bare } else { 0.0 }
    };
    let within = match condition {
        Condition::Idle => {
            Some(quantile(lockstep, 0.5) <= BAR_P50_US && quantile(lockstep, 0.99) <= BAR_P99_US)
        }
        Condition::ComputeInCalls => Some(ratio(0.5) <= BAR_RATIO && ratio(0.99) <= BAR_RATIO),
        Condition::Outside | Condition::ComputeBeside => None,
    };
    let all = [
        ("lockstep", lockstep),
        ("ready", &times.ready),
        ("asked", &times.asked),
        ("begun", &times.begun),
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
        "lockstep_us": spread(lockstep),
        "to_ready_us": spread(&times.ready),
        "from_request_us": spread(&times.asked),
        "to_engines_us": spread(&times.begun),
        "echo_us": spread(echo),
        "ratio_p50": round(ratio(0.5)),
        "ratio_p99": round(ratio(0.99)),
        "within_bar": within,
        "seconds": round(ran.took.as_secs_f64()),
    }))
}

/// Microseconds of each call, to the last rank.
struct Times {
    /// From the decision to the commit.
    lockstep: Vec<f64>,
    /// From the decision until the leader knows that the last rank is ready.
    ready: Vec<f64>,
    /// From the request to the commit.
    asked: Vec<f64>,
    /// From the decision until engines begin.
    begun: Vec<f64>,
    /// Of the echo before the call.
    echo: Vec<f64>,
}

impl Times {
    fn of(orders: &Orders, stamps: &[Stamps]) -> anyhow::Result<Times> {
        let leader = stamps.first().context("no rank left its instants")?;
        let calls = orders.chunks as usize;
        ensure!(leader.calls.len() == calls && leader.asked.len() == calls, "{} calls", leader.calls.len());
        let mesh = || stamps.iter().enumerate().filter(|(r, _)| orders.mesh().contains(&(*r as u32)));
        let by_id: Vec<BTreeMap<u64, u64>> =
            mesh().map(|(_, s)| s.commits.iter().copied().collect()).collect();
        let own: BTreeMap<u64, u64> = leader.commits.iter().copied().collect();
        // The leader's clock began with its process. It tells the sink of a commit right after it has decided it, so
        // the least difference is that of the clocks.
        let apart = leader.calls.iter().filter_map(|c| own.get(&c.id)?.checked_sub(c.committed_ns)).min();
        let apart = apart.context("the leader told of no commit")?;
        let mut out = Times { lockstep: vec![], ready: vec![], asked: vec![], begun: vec![], echo: vec![] };
        let us = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
        for (k, call) in leader.calls.iter().enumerate().skip(FIRST) {
            let decided = call.decided_ns + apart;
            let heard: Option<Vec<u64>> = by_id.iter().map(|r| r.get(&call.id).copied()).collect();
            let heard = heard.with_context(|| format!("a rank did not hear of call {}", call.id))?;
            let last = heard.into_iter().max().unwrap_or(0);
            out.lockstep.push(us(decided, last));
            out.ready.push(us(call.decided_ns, call.ready_ns));
            out.asked.push(us(leader.asked[k], last));
            let begun: Option<Vec<u64>> = mesh().map(|(_, s)| s.begun.get(k).copied()).collect();
            let begun = begun.with_context(|| format!("an engine did not begin call {}", call.id))?;
            out.begun.push(us(decided, begun.into_iter().max().unwrap_or(0)));
            let read: Option<Vec<u64>> = stamps[1..].iter().map(|s| s.echo_read.get(k).copied()).collect();
            let read = read.with_context(|| format!("a rank did not read echo {k}"))?;
            let sent = leader.echo_sent.get(k).copied().with_context(|| format!("no echo {k}"))?;
            out.echo.push(us(sent, read.into_iter().max().unwrap_or(0)));
        }
        Ok(out)
    }
}

/// Half of a round trip of a small message between two threads, each of which sleeps until it comes.
fn wake_up_us() -> anyhow::Result<f64> {
    let (mut here, mut there) = UnixStream::pair()?;
    let echo = std::thread::spawn(move || {
        let mut byte = [0; 64];
        while there.read_exact(&mut byte).and_then(|()| there.write_all(&byte)).is_ok() {}
    });
    let mut halves = Vec::new();
    let mut bytes = [0; 64];
    for _ in 0..ROUND_TRIPS {
        let sent = rig::now_ns();
        here.write_all(&bytes)?;
        here.read_exact(&mut bytes)?;
        halves.push((rig::now_ns() - sent) as f64 / 2e3);
    }
    drop(here);
    let _ = echo.join();
    Ok(median(&halves))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig::Call;

    #[test]
    fn the_last_rank_counts() {
        let orders = Orders {
            ranks: 3,
            outside: false,
            chunks: FIRST as u32 + 1,
            engine: EngineDoes::Nothing,
            burn_beside: false,
            echo: true,
            dir: std::path::PathBuf::new(),
        };
        // The leader's clock is one second behind; the first commit is of the warm-up, with id 0.
        let at = |k: u64, us: u64| 1_000_000_000 + k * 100_000 + us * 1000;
        let n = u64::from(orders.chunks);
        let rank = |us: u64| Stamps {
            commits: (0..=n).map(|k| (k, at(k, us))).collect(),
            begun: (1..=n).map(|k| at(k, us + 1)).collect(),
            echo_read: (1..=n).map(|k| at(k, us - 4)).collect(),
            ..Stamps::default()
        };
        let leader = Stamps {
            asked: (1..=n).map(|k| at(k, 0)).collect(),
            calls: (1..=n)
                .map(|k| Call {
                    id: k,
                    decided_ns: k * 100_000,
                    ready_ns: k * 100_000 + 4000,
                    committed_ns: k * 100_000 + 5000,
                })
                .collect(),
            echo_sent: (1..=n).map(|k| at(k, 0)).collect(),
            ..rank(5)
        };
        let times = Times::of(&orders, &[leader, rank(9), rank(7)]).expect("whole");
        assert_eq!((&times.lockstep[..], &times.asked[..]), (&[9.0][..], &[9.0][..]));
        assert_eq!(times.ready, [4.0]);
        assert_eq!((&times.begun[..], &times.echo[..]), (&[10.0][..], &[5.0][..]));
    }
}
