//! A stream whose frames go to the process that started it: chunk after chunk, while the ranks compute the next ones.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_report::raw_video::RawFormat;
use tessera_runtime::driver::StopHandle;

use super::{LeaderSockets, run_steered};
use crate::codes::{T0017, T0094};
use crate::files::RunFolder;
use crate::frame_pipe::{FrameDestination, FrameTarget};
use crate::model::Model;
use crate::plan::Plan;
use crate::run_failure::failure_diagnostic;
use crate::stream_control::StreamControl;
use crate::stream_options::{ChunkProgress, StreamEvent, StreamOptions, StreamReport};
use crate::video_feed::VideoSocket;

/// Bytes that one read of the pipe takes at most: what a pipe holds.
const READ_BYTES: usize = 64 << 10;

/// The frames of one chunk.
#[derive(Debug, Clone)]
pub struct LiveChunk {
    /// What the run reported with the chunk, such as its index and its request.
    pub progress: ChunkProgress,
    /// Number of frames, their height and their width in pixels.
    pub shape: [usize; 3],
    /// Bytes of RGB [frames, height, width, 3].
    pub rgb: Vec<u8>,
}

/// A running stream. A caller that takes no chunks slows the stream as a slow reader of a pipe does: one chunk waits here,
/// and the leader ends the run (T0042) if nobody takes its frames for too long.
///
/// Dropping the value kills the ranks and waits for their end.
#[derive(Debug)]
pub struct LiveStream {
    shared: Arc<SharedFrames>,
    control: StreamControl,
    stop: StopHandle,
    /// Returns after the last process.
    launch: Mutex<Option<JoinHandle<()>>>,
    /// Height and width of a frame.
    picture: [usize; 2],
}

impl LiveStream {
    /// Starts the ranks. The run writes to `folder`, whose path replaces that of the options. `argv` is the command line
    /// of a rank's process, which must call [`crate::rank_main`].
    ///
    /// # Errors
    /// Returns what is wrong before anything was started.
    pub fn start(
        plan: Arc<Plan>,
        model: Model,
        options: StreamOptions,
        argv: Vec<String>,
        folder: RunFolder,
    ) -> Result<LiveStream, Diagnostics> {
        LiveStream::start_limited(plan, model, options, argv, folder, None, None)
    }

    /// Like [`LiveStream::start`], with a limit of the requested chunks, which
    /// [`StreamControl::limit_requests`] replaces later, and with the leader's end of the socket of an input video that the
    /// caller hands over.
    ///
    /// # Errors
    /// As [`LiveStream::start`].
    pub fn start_limited(
        plan: Arc<Plan>,
        model: Model,
        options: StreamOptions,
        argv: Vec<String>,
        folder: RunFolder,
        limit: Option<u32>,
        video: Option<VideoSocket>,
    ) -> Result<LiveStream, Diagnostics> {
        let one = |what: &str, e: std::io::Error| vec![Diagnostic::error(&T0017, format!("{what}: {e}"))];
        let stop = StopHandle::default();
        let (control, socket) = StreamControl::new(&plan, &model, stop.clone())?;
        // It waits in the socket until the leader requests its first chunk.
        limit.map_or(Ok(()), |chunks| control.limit_requests(chunks)).map_err(|d| vec![d])?;
        // Programs that this process starts inherit neither end.
        let (reader, writer) = std::io::pipe().map_err(|e| one("the pipe of frames", e))?;
        let (reader, writer) = (OwnedFd::from(reader), OwnedFd::from(writer));
        let mut options = options;
        let number = u32::try_from(writer.as_raw_fd()).unwrap_or(0);
        let to = FrameDestination::Descriptor(number);
        options.outputs.pipes.push(FrameTarget { format: RawFormat::Rgb24, to });
        options.out = folder.path().to_path_buf();
        options.out_is_reserved = folder.is_temporary();
        let stream = &plan.video.stream;
        let picture = [stream.height as usize, stream.width as usize];
        let chunk_frames = stream.first_chunk_frames().max(stream.frames_per_chunk()) as usize;
        let shared = Arc::new(SharedFrames {
            state: Mutex::default(),
            changed: Condvar::new(),
            frame_bytes: picture[0] * picture[1] * 3,
            limit: chunk_frames * picture[0] * picture[1] * 3,
        });
        let frames = Arc::clone(&shared);
        // It ends with the last descriptor of the writing end, so nobody needs to wait for it.
        std::thread::Builder::new()
            .name("live frames".into())
            .spawn(move || frames.read_pipe(reader))
            .map_err(|e| one("the thread that reads frames", e))?;
        let (events, requests) = (Arc::clone(&shared), stop.clone());
        // The kernel ties the ranks to the thread that spawns them, and this thread waits for them.
        let launch = std::thread::Builder::new()
            .name("stream launch".into())
            .spawn(move || {
                let sockets = LeaderSockets { control: Some(socket), video };
                let outcome = run_steered(&plan, &model, &options, argv, &requests, sockets, &mut |e| {
                    events.record_event(&e);
                });
                folder.close(outcome.as_ref().is_ok_and(|report| report.failure.is_some()));
                drop(writer);
                events.end_run(outcome);
            })
            .map_err(|e| one("the thread that launches ranks", e))?;
        let live = LiveStream { shared, control, stop, launch: Mutex::new(Some(launch)), picture };
        live.shared.wait_for_start().map(|()| live)
    }

    /// Returns the handle that changes the stream.
    #[must_use]
    pub fn control(&self) -> &StreamControl {
        &self.control
    }

    /// Returns the process ids of the ranks, in rank order.
    #[must_use]
    pub fn process_ids(&self) -> Vec<u32> {
        self.shared.lock().pids.clone()
    }

    /// Waits for the next chunk; `None` after the last one, and after [`LiveStream::close`].
    ///
    /// # Errors
    /// The failure that ended the run, after the chunks that it delivered.
    pub fn next_chunk(&self) -> Result<Option<LiveChunk>, Diagnostics> {
        let Some((progress, frames, rgb)) = self.shared.take_chunk() else {
            return self.shared.result().map(|()| None);
        };
        Ok(Some(LiveChunk { progress, shape: [frames, self.picture[0], self.picture[1]], rgb }))
    }

    /// Ends the stream after the chunks that are under way, discards their frames, and waits for the last process.
    ///
    /// # Errors
    /// The failure that ended the run.
    pub fn close(&self) -> Result<(), Diagnostics> {
        self.stop.request_stop();
        self.discard_and_join();
        self.shared.result()
    }

    /// Kills the ranks. A call that waits returns soon.
    pub fn kill(&self) {
        self.stop.request_stop();
        self.stop.request_stop();
        self.shared.discard();
    }

    /// Returns how the run ended, once it has.
    #[must_use]
    pub fn report(&self) -> Option<StreamReport> {
        self.shared.lock().end.as_ref().and_then(|end| end.as_ref().ok().cloned())
    }

    fn discard_and_join(&self) {
        self.shared.discard();
        let launch = self.launch.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(launch) = launch {
            // A launch that panicked has ended its ranks: they are tied to its thread.
            let _ = launch.join();
        }
    }
}

impl Drop for LiveStream {
    fn drop(&mut self) {
        self.kill();
        self.discard_and_join();
    }
}

/// What the thread that launches, the one that reads frames and the caller share.
#[derive(Debug)]
struct SharedFrames {
    state: Mutex<LiveState>,
    changed: Condvar,
    frame_bytes: usize,
    /// Bytes of frames that wait here at most, before the last read: those of the largest chunk.
    limit: usize,
}

#[derive(Debug, Default)]
struct LiveState {
    pids: Vec<u32>,
    /// Bytes of frames that the caller has not taken.
    rgb: Vec<u8>,
    /// Each delivered chunk that the caller has not taken, and its number of frames. The limit of the bytes bounds their
    /// number.
    delivered: VecDeque<(ChunkProgress, usize)>,
    /// Number of frames of all delivered chunks.
    frames: u64,
    /// Whether the caller wants no further frame.
    discards: bool,
    /// How the run ended.
    end: Option<Result<StreamReport, Diagnostics>>,
}

impl SharedFrames {
    fn lock(&self) -> MutexGuard<'_, LiveState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a condition holds.
    fn wait_until(&self, holds: impl Fn(&LiveState) -> bool) -> MutexGuard<'_, LiveState> {
        let guard = self.lock();
        self.changed.wait_while(guard, |state| !holds(state)).unwrap_or_else(PoisonError::into_inner)
    }

    fn record_event(&self, event: &StreamEvent) {
        let mut state = self.lock();
        match event {
            StreamEvent::Started { pids } => state.pids.clone_from(pids),
            StreamEvent::Chunk(progress) => {
                let frames = progress.frames - state.frames;
                state.frames = progress.frames;
                state.delivered.push_back((progress.clone(), frames as usize));
            }
            StreamEvent::Note(_) | StreamEvent::Exited => {}
        }
        self.changed.notify_all();
    }

    fn end_run(&self, outcome: Result<StreamReport, Diagnostics>) {
        self.lock().end = Some(outcome);
        self.changed.notify_all();
    }

    /// Waits until the ranks were started, or for what is wrong before.
    fn wait_for_start(&self) -> Result<(), Diagnostics> {
        let state = self.wait_until(|state| !state.pids.is_empty() || state.end.is_some());
        match &state.end {
            Some(Err(ds)) => Err(ds.clone()),
            _ => Ok(()),
        }
    }

    /// Reads frames until the last descriptor of the writing end is closed, and waits while enough of them wait here.
    fn read_pipe(&self, reader: OwnedFd) {
        let (mut pipe, mut bytes) = (File::from(reader), vec![0; READ_BYTES]);
        loop {
            match pipe.read(&mut bytes) {
                Ok(0) => return,
                Ok(count) => {
                    let mut state = self.wait_until(|state| state.rgb.len() < self.limit || state.discards);
                    if !state.discards {
                        state.rgb.extend_from_slice(&bytes[..count]);
                        self.changed.notify_all();
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // The leader finds out that nobody reads.
                Err(_) => return,
            }
        }
    }

    /// Waits for a chunk and its frames; `None` if no chunk follows.
    fn take_chunk(&self) -> Option<(ChunkProgress, usize, Vec<u8>)> {
        let is_whole = |state: &LiveState| {
            state.delivered.front().map(|(_, frames)| state.rgb.len() >= frames * self.frame_bytes)
        };
        let mut state =
            self.wait_until(|state| state.discards || is_whole(state).unwrap_or_else(|| state.end.is_some()));
        if state.discards {
            return None;
        }
        let (progress, frames) = state.delivered.pop_front()?;
        let later = state.rgb.split_off(frames * self.frame_bytes);
        let rgb = std::mem::replace(&mut state.rgb, later);
        self.changed.notify_all();
        Some((progress, frames, rgb))
    }

    fn discard(&self) {
        let mut state = self.lock();
        state.discards = true;
        state.rgb = Vec::new();
        state.delivered.clear();
        self.changed.notify_all();
    }

    /// Waits for the end of the run unless the caller wants no further frame, and returns the failure that ended it.
    fn result(&self) -> Result<(), Diagnostics> {
        let state = self.wait_until(|state| state.end.is_some() || state.discards);
        match &state.end {
            None => Ok(()),
            Some(Err(ds)) => Err(ds.clone()),
            Some(Ok(report)) => match &report.failure {
                Some(failure) => {
                    let where_it_is = format!("the run is in {}", report.out.display());
                    Err(vec![failure_diagnostic(failure, &T0094).with_note(where_it_is)])
                }
                None => Ok(()),
            },
        }
    }
}
