//! The runs of the stream, one after the other, on a thread that waits for their chunks.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera::files::RunFolder;
use tessera::record::RECORD_FILE;
use tessera::stream::LiveStream;
use tessera::stream_options::{OutputOptions, StreamOptions};
use tessera::{Model, Plan};
use tessera_base::Diagnostics;

use crate::recent_chunks::RecentChunks;
use crate::recorded_session::RecordedSession;
use crate::server_state::ServerState;

/// Wait before the first restart; each further one waits twice as long.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Longest wait before a restart.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// What every run of a server has in common.
pub(crate) struct RunTemplate {
    pub(crate) plan: Arc<Plan>,
    pub(crate) model: Model,
    /// Prompt, seed, length and folder are replaced for each run.
    pub(crate) options: StreamOptions,
    /// Command line of a rank's process.
    pub(crate) argv: Vec<String>,
    /// Folder of the runs; `None` for temporary ones.
    pub(crate) out: Option<PathBuf>,
    pub(crate) max_restarts: u32,
    /// What the first run continues.
    pub(crate) session: Option<RecordedSession>,
}

/// Runs the stream until the server stops or too many runs have failed.
///
/// # Errors
/// What is wrong with the first run before its ranks were started.
pub(crate) fn run_streams(server: &ServerState, template: &RunTemplate) -> Result<(), Diagnostics> {
    let mut failures = 0;
    let mut session = template.session.as_ref();
    loop {
        // Only the first run continues a session: a restart opens a scene.
        let (run, ended) = start_run(server, template, session.take());
        let Err(failure) = ended else { break };
        if server.is_stopping() {
            break;
        }
        failures = if failure.has_delivered { 1 } else { failures + 1 };
        let restarts = failures <= template.max_restarts && (run > 1 || failure.has_started);
        server.fail_run(&failure.diagnostics, restarts);
        if !restarts {
            return if failure.has_started || run > 1 {
                wait_for_stop(server)
            } else {
                Err(failure.diagnostics)
            };
        }
        wait_before_restart(server, failures);
        if server.is_stopping() {
            break;
        }
    }
    server.end_runs();
    Ok(())
}

/// How a run failed.
struct RunFailure {
    diagnostics: Diagnostics,
    /// Whether the ranks were started.
    has_started: bool,
    /// Whether a chunk was delivered.
    has_delivered: bool,
}

/// Starts a run and hands its chunks over until it ends. Returns its number, and how it failed.
fn start_run(
    server: &ServerState,
    template: &RunTemplate,
    session: Option<&RecordedSession>,
) -> (u32, Result<(), RunFailure>) {
    let unshown = session.map_or(0, RecordedSession::chunks);
    let (run, limit, settings) = server.begin_run(unshown);
    let mut options = StreamOptions {
        // A stream without an end runs until it is closed.
        chunks: u32::MAX,
        prompt: settings.prompt,
        seed: settings.seed,
        outputs: OutputOptions { no_clip: true, ..OutputOptions::default() },
        ..template.options.clone()
    };
    session.inspect(|session| session.apply_to(&mut options));
    let folder = run_folder(template.out.as_deref(), run);
    let started = folder.and_then(|folder| {
        let record = folder.path().join(RECORD_FILE);
        let (plan, model) = (Arc::clone(&template.plan), template.model.clone());
        let argv = template.argv.clone();
        let live = LiveStream::start_limited(plan, model, options, argv, folder, Some(limit))?;
        let expected = session.map_or_else(Vec::new, |session| session.digests.clone());
        Ok((live, RecentChunks::new(&record, expected)))
    });
    let (live, mut recent) = match started {
        Ok(started) => started,
        Err(diagnostics) => {
            return (run, Err(RunFailure { diagnostics, has_started: false, has_delivered: false }));
        }
    };
    if !server.set_control(live.control().clone()) {
        live.control().stop();
    }
    tracing::info!(run, processes = ?live.process_ids(), "ranks started");
    if let Some(session) = session
        && let Err(ds) = skip_recorded(&live, &mut recent, session)
    {
        live.kill();
        return (run, Err(RunFailure { diagnostics: ds, has_started: false, has_delivered: false }));
    }
    let mut has_delivered = false;
    let ended = loop {
        match live.next_chunk() {
            Ok(Some(chunk)) => {
                server.deliver(&chunk, &mut recent);
                has_delivered = true;
            }
            Ok(None) => break live.close(),
            Err(ds) => break Err(ds),
        }
    };
    // The lines of the last chunks may stand behind their frames.
    server.read_record(&mut recent);
    let failed = ended.map_err(|diagnostics| RunFailure { diagnostics, has_started: true, has_delivered });
    (run, failed)
}

/// Takes the chunks of a session, which are not shown, and compares them with their record.
fn skip_recorded(
    live: &LiveStream,
    recent: &mut RecentChunks,
    session: &RecordedSession,
) -> Result<(), Diagnostics> {
    for chunk in 0..session.chunks() {
        if live.next_chunk()?.is_none() {
            // The server stops.
            return Ok(());
        }
        recent.read_new_lines();
        if let Some(other) = recent.first_difference(chunk + 1) {
            return Err(vec![session.differs(other)]);
        }
        tracing::info!(chunk, "chunk of the session generated again");
    }
    Ok(())
}

fn run_folder(out: Option<&Path>, run: u32) -> Result<RunFolder, Diagnostics> {
    let named = out.map(|out| out.join(format!("run-{run}")));
    RunFolder::new(named.as_deref(), "tessera-serve").map_err(|d| vec![d])
}

fn wait_before_restart(server: &ServerState, failures: u32) {
    let wait = (FIRST_WAIT * 2_u32.saturating_pow(failures.saturating_sub(1))).min(LONGEST_WAIT);
    let until = Instant::now() + wait;
    while Instant::now() < until && !server.is_stopping() {
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Keeps the page with the alarm until a person stops the server.
fn wait_for_stop(server: &ServerState) -> Result<(), Diagnostics> {
    while !server.is_stopping() {
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
