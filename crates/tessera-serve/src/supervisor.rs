//! The runs of the stream, one after the other, on a thread that waits for their chunks.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tessera::files::RunFolder;
use tessera::record::RECORD_FILE;
use tessera::stream::LiveStream;
use tessera::stream_options::{OutputOptions, StreamOptions};
use tessera::video_feed::{VideoFeed, VideoSocket};
use tessera::{Model, Plan};
use tessera_base::{Diagnostic, Diagnostics};

use crate::backoff::wait_after;
use crate::codes::{T1601, T1611, T1614};
use crate::options::AfterFailure;
use crate::recent_chunks::RecentChunks;
use crate::recorded_session::RecordedSession;
use crate::server_state::{AfterRun, EndedRun, ServerState};

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
    pub(crate) after_failure: AfterFailure,
    /// What the first run continues.
    pub(crate) session: Option<RecordedSession>,
}

/// Runs the stream until the server stops or too many runs have failed.
///
/// # Errors
/// What is wrong with the first run before its ranks were started.
pub(crate) fn run_streams(server: &Arc<ServerState>, template: &RunTemplate) -> Result<(), Diagnostics> {
    let mut failures = 0;
    let mut session = template.session.clone();
    loop {
        let (run, ended) = start_run(server, template, session.as_ref());
        let Err(failure) = ended else { break };
        if server.is_stopping() {
            break;
        }
        failures = if failure.has_delivered { 1 } else { failures + 1 };
        let restarts = failures <= template.max_restarts && (run > 1 || failure.has_started);
        let ended = server.close_run();
        let next = if restarts { plan_next(template, session, &failure, ended) } else { Ok(None) };
        let after = match &next {
            _ if !restarts => AfterRun::Nothing,
            Ok(Some(session)) => AfterRun::Continued(session.chunks()),
            Ok(None) | Err(_) => AfterRun::NewScene,
        };
        server.fail_run(&failure.diagnostics, after);
        session = next.unwrap_or_else(|reason| {
            server.report_new_scene(&reason);
            None
        });
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
    /// Folder of the run, unless it could not be made.
    folder: Option<PathBuf>,
    /// Whether the ranks were started.
    has_started: bool,
    /// Whether a chunk was delivered.
    has_delivered: bool,
}

/// Returns what the next run continues; `None` for a new scene.
///
/// # Errors
/// T1614 with the reason why the next run cannot continue the scene.
fn plan_next(
    template: &RunTemplate,
    session: Option<RecordedSession>,
    failure: &RunFailure,
    ended: EndedRun,
) -> Result<Option<RecordedSession>, Diagnostic> {
    let AfterFailure::Continue { max_chunks } = template.after_failure else { return Ok(None) };
    if !failure.has_delivered {
        // Chunks that came out differently would do so again, and the alarm says that they did.
        let differs = failure.diagnostics.iter().any(|d| d.code.id == T1611.id);
        return Ok(session.filter(|_| !differs));
    }
    if ended.chunks > max_chunks {
        let message = format!(
            "{} chunks were shown and would be generated again; the limit is {max_chunks}",
            ended.chunks
        );
        return Err(Diagnostic::error(&T1614, message)
            .with_hint("raise the limit with --continue-after-failure=CHUNKS if the wait is acceptable"));
    }
    let Some(folder) = &failure.folder else { return Ok(None) };
    let read = RecordedSession::read(folder, &template.plan, Some(ended.chunks));
    let mut session = read.map_err(|d| Diagnostic::error(&T1614, d.message))?;
    session.add_changes(ended);
    Ok(Some(session))
}

/// Starts a run and hands its chunks over until it ends. Returns its number, and how it failed.
fn start_run(
    server: &Arc<ServerState>,
    template: &RunTemplate,
    session: Option<&RecordedSession>,
) -> (u32, Result<(), RunFailure>) {
    let (run, limit, settings) = server.begin_run(session.map(RecordedSession::to_continuation));
    let mut options = StreamOptions {
        // A stream without an end runs until it is closed.
        chunks: u32::MAX,
        outputs: OutputOptions { no_clip: true, ..OutputOptions::default() },
        ..template.options.clone()
    };
    match session {
        Some(session) => session.apply_to(&mut options),
        None => settings.schedule_first(&mut options),
    }
    let folder = run_folder(template.out.as_deref(), run);
    let path = folder.as_ref().ok().map(|folder| folder.path().to_path_buf());
    let fail = |diagnostics, has_started, has_delivered| {
        Err(RunFailure { diagnostics, folder: path.clone(), has_started, has_delivered })
    };
    // It is dropped after the ranks have ended, which ends the thread that feeds them.
    let mut feeder = VideoFeeder::new(server);
    let started = folder.and_then(|folder| {
        let record = folder.path().join(RECORD_FILE);
        let (plan, model) = (Arc::clone(&template.plan), template.model.clone());
        let argv = template.argv.clone();
        let video = feeder.open().map_err(|d| vec![d])?;
        let live = LiveStream::start_limited(plan, model, options, argv, folder, Some(limit), video)?;
        let expected = session.map_or_else(Vec::new, |session| session.digests.clone());
        Ok((live, RecentChunks::new(&record, expected)))
    });
    let (live, mut recent) = match started {
        Ok(started) => started,
        Err(ds) => return (run, fail(ds, false, false)),
    };
    if !server.set_control(live.control().clone()) {
        live.control().stop();
        server.end_video();
    }
    if let Err(d) = feeder.start(run) {
        live.kill();
        return (run, fail(vec![d], false, false));
    }
    tracing::info!(run, processes = ?live.process_ids(), "ranks started");
    if let Some(session) = session
        && let Err(ds) = skip_recorded(&live, &mut recent, session)
    {
        live.kill();
        return (run, fail(ds, false, false));
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
    (run, ended.or_else(|ds| fail(ds, true, has_delivered)))
}

/// The thread that hands frames of clients to the leader of a run, if the stream has such an input video. Dropping it ends the
/// video and waits for the thread.
struct VideoFeeder {
    server: Arc<ServerState>,
    feed: Option<VideoFeed>,
    thread: Option<JoinHandle<()>>,
}

impl VideoFeeder {
    fn new(server: &Arc<ServerState>) -> VideoFeeder {
        VideoFeeder { server: Arc::clone(server), feed: None, thread: None }
    }

    /// Creates the socket of the video, and returns the leader's end.
    fn open(&mut self) -> Result<Option<VideoSocket>, Diagnostic> {
        if self.server.facts.video_in.is_none() {
            return Ok(None);
        }
        let (feed, socket) = VideoFeed::new()?;
        self.feed = Some(feed);
        Ok(Some(socket))
    }

    /// Starts the thread. A change that a client sends when its first frame is taken finds the control of the run.
    fn start(&mut self, run: u32) -> Result<(), Diagnostic> {
        let Some(feed) = self.feed.take() else { return Ok(()) };
        let server = Arc::clone(&self.server);
        let thread = std::thread::Builder::new()
            .name("video feed".into())
            .spawn(move || server.feed_video(run, feed))
            .map_err(|e| Diagnostic::error(&T1601, format!("the thread of the input video: {e}")))?;
        self.thread = Some(thread);
        Ok(())
    }
}

impl Drop for VideoFeeder {
    fn drop(&mut self) {
        self.server.end_video();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has closed its end of the socket.
            let _ = thread.join();
        }
    }
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
    let until = Instant::now() + wait_after(failures);
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
