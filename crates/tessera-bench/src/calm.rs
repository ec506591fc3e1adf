//! Whether a run that is only slow is left alone: many chunks while every core is busy with something else, and one
//! step that takes many times longer than any before it but makes progress. The same step without progress must end
//! the run, or nothing was shown.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};
use tessera_runtime::Limits;

use crate::child::{Stream, Target};
use crate::rig::{self, EngineDoes, Orders, burn};
use crate::stats::round;
use crate::{Measured, Output};

/// Stream while all cores are busy, and with one very slow step: nobody may be killed
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

    /// Chunks to stream on busy cores
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    chunks: u32,

    /// Threads that keep cores busy; without it two for each core
    #[arg(long, value_name = "N")]
    busy: Option<usize>,

    /// An ordinary step of the slow run
    #[arg(long, value_name = "MS", default_value_t = 300)]
    step_ms: u64,

    /// How many times longer the slow step takes
    #[arg(long, value_name = "N", default_value_t = 20)]
    times: u32,

    #[command(flatten)]
    pub output: Output,
}

/// Ranks of the slow run, and the one that is slow.
const RANKS: u32 = 3;
const SLOW_RANK: u32 = 1;
/// Chunks of the slow run, and the slow one: after so many there is something learned.
const CHUNKS: u32 = 14;
const SLOW_CHUNK: u32 = 10;
/// A step without progress lasts so many times longer than one with it, well beyond any limit.
const STUCK: u32 = 4;

/// Runs the benchmark.
pub fn run(args: &Args) -> anyhow::Result<Measured> {
    ensure!(args.chunks > 0, "--chunks 0: nothing to stream");
    let mut text = String::new();
    let (loaded, loaded_ok) = loaded(args, &mut text)?;
    let (slow, slow_ok) = one_step(args, true, &mut text)?;
    let (stuck, stuck_ok) = one_step(args, false, &mut text)?;
    let false_kills = u32::from(!loaded_ok) + u32::from(!slow_ok);
    let _ = write!(
        text,
        "{false_kills} false kills; the step without progress {}",
        if stuck_ok { "ended the run" } else { "DID NOT END THE RUN as it should" }
    );
    let numbers = json!({
        "bench": "calm",
        "model": args.target.model,
        "mesh": args.mesh,
        "topology": args.topology,
        "loaded": loaded,
        "slow_step": slow,
        "stuck_step": stuck,
        "false_kills": false_kills,
        "stuck_step_found": stuck_ok,
    });
    Ok(Measured { text, numbers })
}

/// A stream on busy cores; whether it came to its end.
fn loaded(args: &Args, text: &mut String) -> anyhow::Result<(Value, bool)> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let busy = args.busy.unwrap_or(2 * cores);
    let stop = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (0..busy)
        .map(|_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    burn(Duration::from_millis(10));
                }
            })
        })
        .collect();
    let begun = Instant::now();
    let (_dir, mut stream) = Stream::fresh(&args.target, &args.mesh, &args.topology, args.chunks)?;
    let mut said = 0;
    while stream.collect().is_none() {
        std::thread::sleep(Duration::from_millis(50));
        let minutes = begun.elapsed().as_secs() / 60;
        if minutes > said {
            said = minutes;
            eprintln!("{minutes} minutes");
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    for t in threads {
        let _ = t.join();
    }
    let result = stream.result().unwrap_or_default();
    let chunks = result["chunks"].as_u64().unwrap_or(0);
    let ok = result["failure"].is_null() && chunks == u64::from(args.chunks) && stream.ended() == "exit 0";
    let notes = stream.record().read()?.iter().filter(|l| l["kind"] == "event").count();
    if !ok {
        eprintln!("{}", stream.said());
    }
    let _ = writeln!(
        text,
        "{chunks} chunks in {seconds:.0} s with {busy} busy threads on {cores} cores: {}",
        stream.ended()
    );
    let numbers = json!({
        "chunks": chunks,
        "seconds": round(seconds),
        "busy_threads": busy,
        "ended": stream.ended(),
        "failure": result["failure"],
        "events": notes,
    });
    Ok((numbers, ok))
}

/// The run with one slow step; whether it ended as it should.
fn one_step(args: &Args, tells: bool, text: &mut String) -> anyhow::Result<(Value, bool)> {
    let dir = tempfile::tempdir()?;
    let step_ns = args.step_ms * 1_000_000;
    let times = if tells { args.times } else { args.times * STUCK };
    let orders = Orders {
        ranks: RANKS,
        outside: false,
        chunks: CHUNKS,
        engine: EngineDoes::SlowOnce { step_ns, times, chunk: SLOW_CHUNK, rank: SLOW_RANK, tells },
        burn_beside: false,
        echo: false,
        dir: dir.path().to_path_buf(),
    };
    // The defaults, as a person's run has them.
    let ran = rig::run(&orders, &Limits::default())?;
    let failure = ran.report.failure.as_ref();
    let ok = match (tells, failure) {
        (true, f) => f.is_none(),
        (false, f) => f.is_some_and(|f| f.code == "T0743"),
    };
    let ended = failure.map_or("ended well".to_string(), ToString::to_string);
    let _ = writeln!(
        text,
        "a step of {} ms after steps of {} ms, {} progress: {:.1} s in all, {ended}",
        args.step_ms * u64::from(times),
        args.step_ms,
        if tells { "with" } else { "without" },
        ran.took.as_secs_f64()
    );
    let numbers = json!({
        "step_ms": args.step_ms,
        "times": times,
        "tells_progress": tells,
        "seconds": round(ran.took.as_secs_f64()),
        "failure": failure.map(|f| json!({"code": f.code, "rank": f.rank, "text": f.text})),
        "as_it_should": ok,
    });
    Ok((numbers, ok))
}
