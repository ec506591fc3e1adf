//! What the stream, its clients and the HTTP interface share.
//!
//! One lock guards the state. It is held for bookkeeping alone: encoding, disks and sockets are used without it, so no client
//! and no file can make the stream wait.

mod client_side;
mod stream_side;
#[cfg(test)]
mod tests;
mod video_side;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::Serialize;
use tessera::stream_control::StreamControl;
use tessera_base::Diagnostic;
use tokio::sync::Notify;

use crate::client_queue::ClientQueue;
use crate::codes::T1610;
use crate::control::ControlLease;
use crate::frames::Frame;
use crate::lora_table::LoraTable;
use crate::metrics::Metrics;
use crate::mp4::Mp4Encoder;
use crate::options::{ExplainCode, ServeLimits, ServeOptions};
use crate::otlp::ShowWarning;
use crate::otlp::exporter::SpanExporter;
use crate::otlp::stream_traces::{StreamTraces, describe_resource};
use crate::pacing::Pacer;
use crate::protocol::{
    Alarm, ControlState, FrameFormat, Refusal, ServerMessage, StreamFacts, StreamState, StreamStatus,
};
use crate::recent_chunks::ChunkTimeline;
use crate::recorder::Recorder;
use crate::settings::{NewSetting, Settings};
use crate::video_intake::VideoIntake;

pub(crate) use client_side::Joined;
pub(crate) use stream_side::{AfterRun, Continuation, EndedRun};

/// Alarms that the page shows when it is opened.
const KEPT_ALARMS: usize = 8;
/// Effects of changes that the HTTP interface can return.
const KEPT_EFFECTS: usize = 256;

/// The shared state of a server.
#[derive(Debug)]
pub(crate) struct ServerState {
    pub(crate) facts: StreamFacts,
    pub(crate) loras: LoraTable,
    pub(crate) metrics: Metrics,
    pub(crate) limits: ServeLimits,
    /// Traces for a collector, if there is one.
    pub(crate) traces: Option<StreamTraces>,
    /// Encodes chunks for clients that take MP4, if the program can.
    mp4: Option<Mp4Encoder>,
    /// Where frames of the input video wait, if clients send one. It is locked behind the state or alone.
    video: Option<VideoIntake>,
    recorder: Mutex<Recorder>,
    /// Whether a recording is open. The state is never locked together with the recorder, which waits for a disk.
    is_recording: AtomicBool,
    /// Returns the page of a code.
    explain: ExplainCode,
    /// Whether chunks are generated while nobody watches.
    keeps_running: bool,
    started: Instant,
    state: Mutex<GuardedState>,
    /// Something happened that may change which chunks are requested.
    pub(crate) pace_changed: Notify,
}

/// What a server is made of beside its options.
#[derive(Debug)]
pub(crate) struct ServerParts {
    pub(crate) facts: StreamFacts,
    pub(crate) loras: LoraTable,
    /// Encodes chunks for clients that take MP4, if the program can.
    pub(crate) mp4: Option<Mp4Encoder>,
    /// Where frames of the input video wait, if clients send one.
    pub(crate) video: Option<VideoIntake>,
    pub(crate) recorder: Recorder,
    /// Settings of the first chunk.
    pub(crate) settings: Settings,
    /// Returns the page of a code.
    pub(crate) explain: ExplainCode,
    /// Shows a warning to the person who started the server.
    pub(crate) warn: ShowWarning,
}

/// A change whose chunk the leader has not named.
#[derive(Debug)]
struct PendingChange {
    /// Number among the changes of the server.
    number: u64,
    /// Number among the changes of the run.
    number_in_run: u64,
    /// The client that is told, and its own number; `None` for the HTTP interface.
    owner: Option<(u64, u64)>,
    kind: &'static str,
    setting: NewSetting,
    since: Instant,
}

impl PendingChange {
    /// Returns the refusal of a change whose run has ended.
    fn refuse_after_run(&self) -> Refusal {
        let message = format!("the run ended before a chunk took the change `{}`", self.kind);
        Refusal::from_diagnostic(&Diagnostic::error(&T1610, message))
    }
}

/// The first chunk with a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct ChangeOutcome {
    pub(crate) change: u64,
    pub(crate) run: u32,
    pub(crate) request: u64,
}

#[derive(Debug)]
struct Client {
    queue: Arc<ClientQueue>,
    format: FrameFormat,
    secret: String,
    /// Number of its connection; a later one replaces it.
    connection: u64,
    /// When its connection was lost.
    lost: Option<Instant>,
}

#[derive(Debug)]
struct GuardedState {
    clients: BTreeMap<u64, Client>,
    next_client: u64,
    next_connection: u64,
    lease: ControlLease,
    /// What the supervisor does; pauses are in `is_paused`.
    phase: StreamState,
    is_paused: bool,
    /// Whether clients know that the stream waits for frames.
    is_waiting_for_video: bool,
    run: u32,
    control: Option<StreamControl>,
    pacer: Pacer,
    changes: u64,
    pending: Vec<PendingChange>,
    outcomes: VecDeque<ChangeOutcome>,
    /// What the leader has changed with requests of the run that are not delivered, in order.
    undelivered: Vec<(u64, NewSetting)>,
    /// The first request of the run with each change of its settings.
    settings: Vec<(u64, Settings)>,
    status: StreamStatus,
    last_delivery: Option<Instant>,
    latest: Option<Arc<Frame>>,
    timeline: ChunkTimeline,
    alarms: VecDeque<Alarm>,
    stops: bool,
}

impl ServerState {
    /// Creates the state of a server that has started no run.
    pub(crate) fn new(parts: ServerParts, options: &ServeOptions) -> ServerState {
        let ServerParts { facts, loras, mp4, video, recorder, settings, explain, warn } = parts;
        let status = StreamStatus {
            state: StreamState::Starting,
            run: 0,
            chunks: 0,
            frames: 0,
            request: None,
            epoch: None,
            prompt: settings.prompt.clone(),
            seed: settings.seed,
            steps: settings.steps.clone(),
            bias: settings.bias,
            lora: settings.weights.as_deref().and_then(|source| loras.name_of(source)),
            generated_fps: 0.0,
            possible_fps: 0.0,
            call_ms: 0.0,
            phases: Vec::new(),
            queued_in: 0,
            queued_out: 0,
            overlap_score: None,
            clients: 0,
            dropped: 0,
        };
        let state = GuardedState {
            clients: BTreeMap::new(),
            next_client: 1,
            next_connection: 1,
            lease: ControlLease::default(),
            phase: StreamState::Starting,
            is_paused: false,
            is_waiting_for_video: false,
            run: 0,
            control: None,
            pacer: Pacer::new(facts.lead, facts.frame_rate),
            changes: 0,
            pending: Vec::new(),
            outcomes: VecDeque::new(),
            undelivered: Vec::new(),
            settings: vec![(0, settings)],
            status,
            last_delivery: None,
            latest: None,
            timeline: ChunkTimeline::default(),
            alarms: VecDeque::new(),
            stops: false,
        };
        let metrics = Metrics::new(&facts);
        let traces = options.traces.as_ref().map(|traces| {
            let resource = describe_resource(traces, &facts);
            let exporter = SpanExporter::new(traces.clone(), resource, metrics.spans.clone(), warn);
            StreamTraces::new(Arc::new(exporter))
        });
        ServerState {
            metrics,
            traces,
            mp4,
            video,
            facts,
            loras,
            limits: options.limits,
            recorder: Mutex::new(recorder),
            is_recording: AtomicBool::new(false),
            explain,
            keeps_running: options.keeps_running,
            started: Instant::now(),
            state: Mutex::new(state),
            pace_changed: Notify::new(),
        }
    }

    /// Returns what the stream does now.
    pub(crate) fn status(&self) -> StreamStatus {
        let state = self.lock();
        self.status_of(&state, 0)
    }

    /// Returns the latest frame.
    pub(crate) fn latest_frame(&self) -> Option<Arc<Frame>> {
        self.lock().latest.clone()
    }

    /// Returns the times of the latest chunks.
    pub(crate) fn timeline(&self) -> ChunkTimeline {
        self.lock().timeline.clone()
    }

    /// Returns the alarms, oldest first.
    pub(crate) fn alarms(&self) -> Vec<Alarm> {
        self.lock().alarms.iter().cloned().collect()
    }

    /// Returns the effect of a change, once the leader has named its chunk.
    pub(crate) fn outcome(&self, change: u64) -> Option<ChangeOutcome> {
        self.lock().outcomes.iter().find(|outcome| outcome.change == change).copied()
    }

    /// Calls a function with the recorder, which may wait for a disk.
    pub(crate) fn with_recorder<T>(&self, use_it: impl FnOnce(&mut Recorder) -> T) -> T {
        let mut recorder = self.recorder.lock().unwrap_or_else(PoisonError::into_inner);
        let result = use_it(&mut recorder);
        self.is_recording.store(recorder.is_recording(), Ordering::Release);
        drop(recorder);
        self.pace_changed.notify_one();
        result
    }

    fn lock(&self) -> MutexGuard<'_, GuardedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn status_of(&self, state: &GuardedState, dropped: u64) -> StreamStatus {
        let clients = state.connected().count();
        StreamStatus { state: self.state_of(state), clients, dropped, ..state.status.clone() }
    }

    fn state_of(&self, state: &GuardedState) -> StreamState {
        match state.phase {
            StreamState::Running if state.is_paused => StreamState::Paused,
            StreamState::Running if self.is_idle(state) => StreamState::Idle,
            StreamState::Running if state.is_waiting_for_video => StreamState::WaitingForVideo,
            phase => phase,
        }
    }

    /// Whether nothing is requested because nobody watches or records.
    fn is_idle(&self, state: &GuardedState) -> bool {
        !self.keeps_running
            && state.connected().next().is_none()
            && !self.is_recording.load(Ordering::Acquire)
    }

    fn send_status(&self, state: &GuardedState) {
        self.metrics.set_state(self.state_of(state));
        for (_, client) in state.connected() {
            let status = self.status_of(state, client.queue.dropped());
            client.send(&ServerMessage::Status(Box::new(status)));
        }
    }

    /// Tells every client who is in control.
    fn send_control(&self, state: &GuardedState, now: Instant) {
        for (id, client) in state.connected() {
            client.send(&ServerMessage::Control(state.control_of(now, *id)));
        }
        self.update_video_sender(state, now);
    }
}

impl GuardedState {
    fn connected(&self) -> impl Iterator<Item = (&u64, &Client)> {
        self.clients.iter().filter(|(_, client)| client.lost.is_none())
    }

    fn find_client(&self, secret: &str) -> Option<u64> {
        self.clients.iter().find(|(_, client)| client.secret == secret).map(|(id, _)| *id)
    }

    fn control_of(&self, now: Instant, client: u64) -> ControlState {
        let holder = self.lease.holder(now);
        ControlState { holder, is_you: holder == Some(client) }
    }

    /// Forgets the settings that no later request has, so that a long run with many changes keeps few.
    fn forget_settings_before(&mut self, request: u64) {
        let in_force = self.settings.iter().rposition(|(from, _)| *from <= request).unwrap_or(0);
        self.settings.drain(..in_force);
    }

    /// Returns the settings of a request of this run.
    fn settings_of(&self, request: u64) -> &Settings {
        let behind = self.settings.iter().rposition(|(from, _)| *from <= request);
        &self.settings[behind.unwrap_or(0)].1
    }
}

impl Client {
    fn send(&self, message: &ServerMessage) {
        self.queue.push_message(to_text(message));
    }
}

/// Returns a message as text.
pub(crate) fn to_text(message: &ServerMessage) -> String {
    // The types contain only strings, numbers and lists, and no maps.
    serde_json::to_string(message).unwrap_or_default()
}
