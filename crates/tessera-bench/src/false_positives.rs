//! False positives of the failure detectors: a run that is only slow must not be ended. One run
//! streams many chunks while all cores are busy; another has one step that takes many times longer
//! than the steps before but reports progress. As a control, the same step without progress must
//! end its run.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};
use tessera_runtime::Limits;

use crate::BenchResult;
use crate::harness::{self, EngineScript, HarnessConfig, burn_cpu};
use crate::stats::round_to_millis;
use crate::stream_process::StreamArgs;

/// Stream while all cores are busy, and with one very slow step; no run may be ended
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The stream on busy cores.
    #[command(flatten)]
    stream: StreamArgs,

    /// Number of threads that keep cores busy [default: two per core]
    #[arg(long, value_name = "N")]
    busy: Option<usize>,

    /// Duration of an ordinary step of the slow run
    #[arg(long, value_name = "MS", default_value_t = 300)]
    step_ms: u64,

    /// Factor by which the slow step takes longer
    #[arg(long, value_name = "N", default_value_t = 20)]
    slow_factor: u32,
}

/// Number of ranks of the slow run, and the rank that is slow.
const SLOW_RUN_RANKS: u32 = 3;
const SLOW_RANK: u32 = 1;
/// Number of chunks of the slow run, and the slow chunk. By then the detectors have learned the
/// usual duration.
const SLOW_RUN_CHUNKS: u32 = 14;
const SLOW_CHUNK: u32 = 10;
/// A step without progress lasts this many times longer than one with progress, well beyond any
/// limit.
const STUCK_FACTOR: u32 = 4;

/// Streams under load, with a slow step that reports progress, and with one that does not.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    ensure!(args.stream.chunks > 0, "--chunks 0: nothing to stream");
    let mut text = String::new();
    let (loaded, loaded_ok) = run_under_load(args, &mut text)?;
    let (slow, slow_ok) = run_slow_step(args, true, &mut text)?;
    let (stuck, stuck_ok) = run_slow_step(args, false, &mut text)?;
    let false_kills = u32::from(!loaded_ok) + u32::from(!slow_ok);
    let _ = write!(
        text,
        "{false_kills} false positives; the step without progress {}",
        if stuck_ok { "ended the run" } else { "DID NOT END THE RUN, as it should have" }
    );
    let numbers = json!({
        "bench": "false-positives",
        "model": args.stream.target.model,
        "mesh": args.stream.mesh,
        "topology": args.stream.topology,
        "loaded": loaded,
        "slow_step": slow,
        "stuck_step": stuck,
        "false_kills": false_kills,
        "stuck_step_detected": stuck_ok,
    });
    Ok(BenchResult { text, numbers })
}

/// Streams on busy cores. Returns the numbers and whether the stream completed.
fn run_under_load(args: &Args, text: &mut String) -> anyhow::Result<(Value, bool)> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let busy = args.busy.unwrap_or(2 * cores);
    let stop = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (0..busy)
        .map(|_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    burn_cpu(Duration::from_millis(10));
                }
            })
        })
        .collect();
    let begun = Instant::now();
    let (_dir, mut stream) = args.stream.start(&[])?;
    let mut reported_minutes = 0;
    while stream.try_reap().is_none() {
        std::thread::sleep(Duration::from_millis(50));
        let minutes = begun.elapsed().as_secs() / 60;
        if minutes > reported_minutes {
            reported_minutes = minutes;
            eprintln!("streaming for {minutes} minutes");
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    for t in threads {
        let _ = t.join();
    }
    let result = stream.printed_result().unwrap_or_default();
    let chunks = result["chunks"].as_u64().unwrap_or(0);
    let ok = result["failure"].is_null()
        && chunks == u64::from(args.stream.chunks)
        && stream.describe_end() == "exit 0";
    let event_count = stream.open_record().read()?.iter().filter(|l| l["kind"] == "event").count();
    if !ok {
        eprintln!("{}", stream.output_text());
    }
    let _ = writeln!(
        text,
        "{chunks} chunks in {seconds:.0} s with {busy} busy threads on {cores} cores: {}",
        stream.describe_end()
    );
    let numbers = json!({
        "chunks": chunks,
        "seconds": round_to_millis(seconds),
        "busy_threads": busy,
        "ended": stream.describe_end(),
        "failure": result["failure"],
        "events": event_count,
    });
    Ok((numbers, ok))
}

/// Runs the stream with one slow step. Returns the numbers and whether the run ended as it should.
fn run_slow_step(args: &Args, reports_progress: bool, text: &mut String) -> anyhow::Result<(Value, bool)> {
    let dir = tempfile::tempdir()?;
    let step_ns = args.step_ms * 1_000_000;
    let slow_factor = if reports_progress { args.slow_factor } else { args.slow_factor * STUCK_FACTOR };
    let config = HarnessConfig {
        ranks: SLOW_RUN_RANKS,
        chunks: SLOW_RUN_CHUNKS,
        engine_script: EngineScript::SlowOnce {
            step_ns,
            slow_factor,
            chunk: SLOW_CHUNK,
            rank: SLOW_RANK,
            reports_progress,
        },
        dir: dir.path().to_path_buf(),
        ..HarnessConfig::default()
    };
    // The default limits, as in a user's run.
    let outcome = harness::run(&config, &Limits::default())?;
    let failure = outcome.report.failure.as_ref();
    let ok = match (reports_progress, failure) {
        (true, f) => f.is_none(),
        (false, f) => f.is_some_and(|f| f.code == "T0743"),
    };
    let ended = failure.map_or("completed".to_string(), ToString::to_string);
    let _ = writeln!(
        text,
        "a step of {} ms after steps of {} ms, {} progress: {:.1} s in total, {ended}",
        args.step_ms * u64::from(slow_factor),
        args.step_ms,
        if reports_progress { "with" } else { "without" },
        outcome.duration.as_secs_f64()
    );
    let numbers = json!({
        "step_ms": args.step_ms,
        "slow_factor": slow_factor,
        "reports_progress": reports_progress,
        "seconds": round_to_millis(outcome.duration.as_secs_f64()),
        "failure": failure.map(|f| json!({"code": f.code, "rank": f.rank, "text": f.text})),
        "passed": ok,
    });
    Ok((numbers, ok))
}
