//! Clients of `tessera serve`: whether watching costs the stream anything, whether the video plays evenly, and how soon a prompt
//! is seen.
//!
//! The unpaced runs alternate: `tessera stream --raw`, a server that nobody watches, and a server with all clients. They show
//! what delivery costs, which a paced stream hides because its ranks wait. The paced run follows, with a client that steers and
//! one that stops to read. Clients and server share this machine, so the clients' own work is part of every figure.

mod bars;
mod client;
mod play_out;
mod server_process;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use self::bars::{Findings, Unpaced};
use self::client::{Client, ClientLog, Part, StreamFacts};
use self::server_process::{ChunkTimes, MemorySeries, ServerProcess, chunks_fps, path_text, stream_raw};
use crate::BenchResult;
use crate::stream_process::StreamTarget;

/// Watch a served stream with many clients, and compare it with one that nobody watches and with `tessera stream --raw`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folder
    #[arg(default_value = "models/demo")]
    model: PathBuf,

    /// The tessera binary [default: next to this binary]
    #[arg(long, value_name = "FILE")]
    tessera: Option<PathBuf>,

    /// Mesh of the stream
    #[arg(long, default_value = "tp=2")]
    mesh: String,

    /// Device that runs the plan: cpu or cuda
    #[arg(long, default_value = "cpu")]
    device: String,

    /// Compute all weights from a seed instead of reading files
    #[arg(long, value_name = "synthetic:SEED")]
    weights: Option<String>,

    /// Minutes of the paced run
    #[arg(long, value_name = "MINUTES", default_value_t = 3.0)]
    minutes: f64,

    /// Clients that watch; one of them steers the paced run
    #[arg(long, value_name = "N", default_value_t = 20)]
    clients: usize,

    /// Further clients of the paced run that stop to read after a third of it
    #[arg(long, value_name = "N", default_value_t = 1)]
    stalled: usize,

    /// Rounds of the unpaced runs
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,

    /// Measured chunks of an unpaced run
    #[arg(long, value_name = "N", default_value_t = 60)]
    chunks: u64,

    /// Seconds between two prompts of the client that steers
    #[arg(long, value_name = "S", default_value_t = 4.0)]
    prompt_every: f64,

    /// Prompt of the client that steers; may be repeated [default: those that the model suggests]
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,

    /// Further options of `tessera stream` and `tessera serve`, behind `--`, such as `-- --dtype bf16`
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// First chunks of a run that fill caches and buffers, and that no figure includes.
const WARM_UP_CHUNKS: u64 = 8;
/// Chunks of an unpaced run behind the measured ones, so that the last of these has arrived everywhere.
const SPARE_CHUNKS: u64 = 4;
/// Interval between samples of memory.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

impl Args {
    /// Builds the part of a command line that both commands share. The run's folder is `run` in `dir`.
    fn command(&self, name: &str, dir: &Path) -> anyhow::Result<Vec<String>> {
        let target =
            StreamTarget { tessera: self.tessera.clone(), model: self.model.clone(), prompt: String::new() };
        let (binary, model) = (path_text(&target.binary_path()?)?, path_text(&self.model)?);
        let mut argv = vec![binary, name.to_string(), model, "--oversubscribe".into()];
        argv.extend(["--mesh", &self.mesh, "--device", &self.device].map(String::from));
        argv.extend(self.weights.iter().flat_map(|weights| ["--weights".into(), weights.clone()]));
        // Commands may start with different prompts, so that they state one if there is one.
        argv.extend(self.prompt.first().iter().flat_map(|text| ["--prompt".into(), (*text).clone()]));
        argv.extend(["--out".into(), path_text(&dir.join("run"))?]);
        argv.extend(self.options.iter().cloned());
        Ok(argv)
    }

    /// Returns the numbers of the measured chunks of an unpaced run.
    fn measured(&self) -> std::ops::Range<u64> {
        WARM_UP_CHUNKS..WARM_UP_CHUNKS + self.chunks
    }
}

/// Measures everything and compares it with the bars.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    ensure!(
        args.clients > 0 && args.rounds > 0 && args.chunks > 1,
        "no clients, rounds or chunks to measure"
    );
    ensure!(args.minutes > 0.0 && args.prompt_every > 0.0, "the times must be positive");
    let mut unpaced = Unpaced::default();
    for round in 1..=args.rounds {
        eprintln!("round {round} of {}: raw, unwatched, watched", args.rounds);
        measure_round(args, &mut unpaced)?;
    }
    eprintln!("paced run of {} minutes", args.minutes);
    let findings = measure_paced(args, unpaced)?;
    Ok(findings.report(args))
}

/// Runs the three unpaced streams once.
fn measure_round(args: &Args, unpaced: &mut Unpaced) -> anyhow::Result<()> {
    let chunks = args.measured().end + SPARE_CHUNKS;
    let raw = stream_raw(args, chunks)?;
    unpaced.raw_fps.push(chunks_fps(measured_chunks(args, &raw)?));
    // As many chunks wait as in the queues of `tessera stream`, so that ranks never wait for a request.
    let free = ["--pace", "free", "--lead", "4", "--keep-running"];
    let mut server = ServerProcess::start(args, &free)?;
    server.wait_for_chunks(chunks)?;
    let unwatched = server.stop()?;
    let periods = |chunks: &[ChunkTimes]| chunks.iter().map(|chunk| chunk.period_ms).collect::<Vec<_>>();
    unpaced.unwatched_periods_ms.extend(periods(measured_chunks(args, &unwatched)?));
    let mut server = ServerProcess::start(args, &free)?;
    let clients = join_all(&server, &vec![Part::Watch; args.clients])?;
    let logs = watch(clients, |_| server.wait_for_chunks(chunks))?;
    let watched = server.stop()?;
    unpaced.watched_periods_ms.extend(periods(measured_chunks(args, &watched)?));
    let mut slowest = f64::INFINITY;
    for log in &logs {
        let fps = log.delivered_fps(args.measured());
        ensure!(fps > 0.0, "client {} did not get chunk {}", log.number, args.measured().end - 1);
        unpaced.client_fps.push(fps);
        slowest = slowest.min(fps);
    }
    unpaced.slowest_client_fps.push(slowest);
    // The clients do not end at the same frame, so each is measured up to its own last one.
    unpaced.lost_frames += logs.iter().map(ClientLog::lost_before_last).sum::<u64>();
    Ok(())
}

/// Runs the paced stream with a client that steers and one that stalls.
fn measure_paced(args: &Args, unpaced: Unpaced) -> anyhow::Result<Findings> {
    let length = Duration::from_secs_f64(args.minutes * 60.0);
    let mut server = ServerProcess::start(args, &[])?;
    let facts = find_facts(&server)?;
    let prompts = if args.prompt.is_empty() { facts.examples.clone() } else { args.prompt.clone() };
    ensure!(prompts.len() > 1, "{} prompts to steer with: give two with --prompt", prompts.len());
    let steer = Part::Steer { prompts, every: Duration::from_secs_f64(args.prompt_every) };
    let mut parts = vec![steer];
    parts.resize(args.clients, Part::Watch);
    parts.resize(args.clients + args.stalled, Part::Stall { after: length / 3 });
    let clients = join_all(&server, &parts)?;
    let mut memory: BTreeMap<String, MemorySeries> = BTreeMap::new();
    let logs = watch(clients, |start| {
        server.wait_for_chunks(WARM_UP_CHUNKS)?;
        let processes = server.list_processes();
        while start.elapsed() < length {
            for (name, process) in &processes {
                memory.entry(name.clone()).or_default().sample(start.elapsed().as_secs_f64(), *process);
            }
            server.check_running()?;
            std::thread::sleep(SAMPLE_INTERVAL);
        }
        Ok(())
    })?;
    let chunks = server.stop()?;
    ensure!(chunks.len() as u64 > WARM_UP_CHUNKS, "only {} chunks: give more --minutes", chunks.len());
    let generated = chunks.iter().map(|chunk| chunk.frames).sum();
    let steady = chunks[WARM_UP_CHUNKS as usize..].to_vec();
    Ok(Findings { unpaced, facts, generated, chunks: steady, logs, watching: args.clients, memory })
}

/// Joins with a client for each part. The first one gets the control if it wants it.
fn join_all(server: &ServerProcess, parts: &[Part]) -> anyhow::Result<Vec<Client>> {
    parts.iter().map(|part| Client::join(server.address, part.clone())).collect()
}

fn find_facts(server: &ServerProcess) -> anyhow::Result<StreamFacts> {
    // The connection ends at once; it had no control.
    Client::join(server.address, Part::Watch)?.facts()
}

/// Lets the clients take frames while `until` runs, which gets the start, and returns what they saw.
fn watch(
    clients: Vec<Client>,
    until: impl FnOnce(Instant) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<ClientLog>> {
    let (start, stops) = (Instant::now(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let stops = &stops;
        let threads: Vec<_> =
            clients.into_iter().map(|client| scope.spawn(move || client.run(start, stops))).collect();
        let waited = until(start);
        stops.store(true, Ordering::Release);
        let join = |thread: ScopedJoinHandle<'_, anyhow::Result<ClientLog>>| {
            thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))?
        };
        let logs: anyhow::Result<Vec<ClientLog>> = threads.into_iter().map(join).collect();
        // What a client saw says more than what the wait missed.
        let logs = logs?;
        waited.map(|()| logs)
    })
}

fn measured_chunks<'a>(args: &Args, chunks: &'a [ChunkTimes]) -> anyhow::Result<&'a [ChunkTimes]> {
    let range = args.measured().start as usize..args.measured().end as usize;
    chunks.get(range).with_context(|| format!("a run has only {} chunks", chunks.len()))
}

/// Returns the number of the last frame that any client has got.
fn last_frame(logs: &[ClientLog]) -> u64 {
    logs.iter().filter_map(|log| log.arrivals.last()).map(|arrival| arrival.frame).max().unwrap_or(0)
}
