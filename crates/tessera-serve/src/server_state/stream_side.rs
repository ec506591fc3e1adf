//! What the stream does: runs begin, chunks arrive, changes take effect, runs fail.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera::stream::LiveChunk;
use tessera::stream_control::StreamControl;
use tessera_base::{Diagnostic, Diagnostics};

use super::{
    ChangeOutcome, GuardedState, KEPT_ALARMS, KEPT_EFFECTS, NewSetting, PendingChange, ServerState, Settings,
};
use crate::control::RECONNECT_TIME;
use crate::frames::{Frame, frames_in_format};
use crate::metrics::{CodeLabels, PhaseLabels};
use crate::pacing::Pacer;
use crate::protocol::{Alarm, FrameFormat, FrameHeader, Pace, Refusal, ServerMessage, StreamState};
use crate::recent_chunks::RecentChunks;

/// Longest time between two looks at the state.
const TICK_INTERVAL: Duration = Duration::from_millis(250);
/// Time between two looks while the leader has not answered a change.
const ANSWER_INTERVAL: Duration = Duration::from_millis(10);

/// How a run continues a scene: with the chunk that follows those that its ranks generate again.
#[derive(Debug)]
pub(crate) struct Continuation {
    /// Number of chunks that are generated again, and not shown.
    pub(crate) unshown: u32,
    /// The first request with each change of the settings.
    pub(crate) settings: Vec<(u64, Settings)>,
}

/// What a run that has ended had delivered, and what it still should have.
#[derive(Debug)]
pub(crate) struct EndedRun {
    /// Number of its chunks up to the last one that clients got.
    pub(crate) chunks: u32,
    /// The first request that was not delivered.
    pub(crate) next_request: u64,
    /// What the leader had changed with requests that were not delivered, in order.
    pub(crate) undelivered: Vec<(u64, NewSetting)>,
}

/// What follows a run that has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterRun {
    /// No further run.
    Nothing,
    /// A run that begins a new scene.
    NewScene,
    /// A run that generates so many chunks again and continues the scene.
    Continued(u32),
}

impl ServerState {
    /// Begins a run and returns its number, the limit of its requested chunks, and the settings to begin with. Without a
    /// continuation, it begins a scene with the settings in force.
    pub(crate) fn begin_run(&self, continuation: Option<Continuation>) -> (u32, u32, Settings) {
        let mut state = self.lock();
        state.run += 1;
        state.phase = StreamState::Starting;
        let current = state.settings.last().map(|(_, settings)| settings.clone());
        let settings = current.unwrap_or_else(|| state.settings_of(0).clone());
        let is_continued = continuation.is_some();
        let begins = || Continuation { unshown: 0, settings: vec![(0, settings.clone())] };
        let Continuation { unshown, settings: of_requests } = continuation.unwrap_or_else(begins);
        state.settings = of_requests;
        state.pacer = Pacer::from_request(self.facts.lead, self.facts.frame_rate, unshown);
        state.undelivered.clear();
        state.last_delivery = None;
        let run = state.run;
        state.status.run = run;
        state.status.chunks = 0;
        // Frames that wait for a client come before those of a scene that continues, and are shown.
        for (_, client) in state.connected().filter(|_| !is_continued) {
            client.queue.fence(run, 0);
            client.send(&ServerMessage::Fence { run, request: 0 });
        }
        self.begin_video(&state);
        self.send_status(&state);
        self.metrics.runs.inc();
        self.traces.iter().for_each(|traces| traces.begin_run(run));
        (run, state.pacer.first_limit(), settings)
    }

    /// Notes that the ranks were started. Returns false if the server stops.
    pub(crate) fn set_control(&self, control: StreamControl) -> bool {
        let mut state = self.lock();
        state.control = Some(control);
        !state.stops
    }

    /// Hands the frames of a chunk to every client.
    pub(crate) fn deliver(&self, chunk: &LiveChunk, recent: &mut RecentChunks) {
        let now = Instant::now();
        self.traces.iter().for_each(|traces| traces.note_delivery(chunk.progress.chunk));
        self.read_record(recent);
        let frames = self.make_frames(chunk, now);
        self.with_recorder(|recorder| frames.iter().for_each(|frame| recorder.add_frame(frame.rgb())));
        let mut state = self.lock();
        state.phase = StreamState::Running;
        self.take_effects(&mut state);
        self.update_status(&mut state, chunk, recent, now);
        state.pacer.schedule(now, chunk.progress.request, frames.len() as u32);
        if self.facts.pace == Pace::Free {
            state.pacer.mark_taken(chunk.progress.request);
        }
        state.latest = frames.last().cloned().or(state.latest.take());
        for (_, client) in state.connected() {
            let taken = frames_in_format(&frames, client.format);
            let dropped = taken.iter().map(|frame| client.queue.push_frame(Arc::clone(frame))).sum();
            self.metrics.frames_dropped.inc_by(dropped);
        }
        self.send_status(&state);
        drop(state);
        self.pace_changed.notify_one();
    }

    /// Reads what the record of the run says about chunks, and traces those.
    pub(crate) fn read_record(&self, recent: &mut RecentChunks) {
        let read = recent.read_new_lines();
        if let Some(traces) = &self.traces {
            recent.newest(read).for_each(|record| traces.add_chunk(record));
        }
    }

    /// Returns what the run has delivered that has just ended, after the last answers of its leader.
    pub(crate) fn close_run(&self) -> EndedRun {
        let mut state = self.lock();
        self.take_effects(&mut state);
        state.control = None;
        EndedRun {
            chunks: state.status.chunks,
            next_request: state.status.request.map_or(0, |request| request + 1),
            undelivered: std::mem::take(&mut state.undelivered),
        }
    }

    /// Ends a run with its failure.
    pub(crate) fn fail_run(&self, ds: &Diagnostics, next: AfterRun) {
        let mut state = self.lock();
        let ends = next == AfterRun::Nothing;
        state.phase = if ends { StreamState::Ended } else { StreamState::Restarting };
        self.refuse_pending(&mut state);
        if let Some(d) = ds.first() {
            let alarm = self.make_alarm(d, state.run, next);
            self.metrics.failures.get_or_create(&CodeLabels { code: alarm.code.clone() }).inc();
            self.traces.iter().for_each(|traces| traces.end_run(Some(&alarm)));
            self.show_alarm(&mut state, alarm);
        }
        self.send_status(&state);
    }

    /// Shows why the run that follows a failed one begins a new scene, although it should not.
    pub(crate) fn report_new_scene(&self, reason: &Diagnostic) {
        let mut state = self.lock();
        let alarm = self.make_alarm(reason, state.run, AfterRun::NewScene);
        self.show_alarm(&mut state, alarm);
    }

    /// Ends the last run.
    pub(crate) fn end_runs(&self) {
        let mut state = self.lock();
        state.control = None;
        state.phase = StreamState::Ended;
        self.refuse_pending(&mut state);
        self.traces.iter().for_each(|traces| traces.end_run(None));
        self.send_status(&state);
    }

    /// Stops the stream: the run ends after the chunks that are under way.
    pub(crate) fn stop(&self) {
        let control = {
            let mut state = self.lock();
            state.stops = true;
            state.control.clone()
        };
        self.end_video();
        control.inspect(StreamControl::stop);
    }

    /// Whether the server stops.
    pub(crate) fn is_stopping(&self) -> bool {
        self.lock().stops
    }

    /// Ends every connection with a reason.
    pub(crate) fn end_clients(&self, reason: &Refusal) {
        self.lock().clients.values().for_each(|client| client.queue.end(reason.clone()));
    }

    /// Lets the leader request what may be requested now, and returns when to ask again.
    pub(crate) fn tick(&self) -> Instant {
        let now = Instant::now();
        let mut state = self.lock();
        self.take_effects(&mut state);
        self.forget_lost_clients(&mut state, now);
        let is_waiting = self.is_waiting_for_video(now);
        if std::mem::replace(&mut state.is_waiting_for_video, is_waiting) != is_waiting {
            self.send_status(&state);
        }
        let is_held = state.is_paused || self.is_idle(&state);
        state.pacer.set_held(is_held);
        let (limit, next) = state.pacer.poll(now);
        let latest = if state.pending.is_empty() { now + TICK_INTERVAL } else { now + ANSWER_INTERVAL };
        let control = state.control.clone();
        drop(state);
        if let (Some(limit), Some(control)) = (limit, control)
            && let Err(d) = control.limit_requests(limit)
        {
            // The run has ended, and the supervisor learns why.
            tracing::debug!(code = d.code.id, "{}", d.message);
        }
        next.map_or(latest, |next| next.min(latest))
    }

    fn make_frames(&self, chunk: &LiveChunk, now: Instant) -> Vec<Arc<Frame>> {
        let (run, first_number, is_jpeg_taken, is_mp4_taken) = {
            let state = self.lock();
            let is_taken = |format| state.connected().any(|(_, client)| client.format == format);
            (state.run, state.status.frames, is_taken(FrameFormat::Jpeg), is_taken(FrameFormat::Mp4))
        };
        let [count, height, width] = chunk.shape;
        let header = FrameHeader {
            format: FrameFormat::Raw,
            is_first: false,
            is_last: false,
            is_initialisation: false,
            run,
            epoch: chunk.progress.epoch,
            request: chunk.progress.request,
            frame: 0,
            delivered_us: (now - self.started).as_micros() as u64,
            width: width as u16,
            height: height as u16,
            picture_bytes: 0,
        };
        let pictures = || chunk.rgb.chunks_exact((height * width * 3).max(1));
        let mp4 = self.mp4.as_ref().filter(|_| is_mp4_taken);
        let fragment = mp4.and_then(|mp4| Some((mp4, mp4.encode_chunk(first_number, pictures())?)));
        let make = |(i, rgb): (usize, &[u8])| {
            let frame = first_number + i as u64;
            let header = FrameHeader { is_first: i == 0, is_last: i + 1 == count, frame, ..header };
            let mut frame = Frame::new(header, rgb);
            if let Some((mp4, fragment)) = fragment.as_ref().filter(|_| header.is_last) {
                frame = frame.with_fragment(first_number, mp4.initialisation(), fragment);
            }
            if is_jpeg_taken {
                // Here, so that no client's connection spends the time.
                frame.message(FrameFormat::Jpeg);
            }
            Arc::new(frame)
        };
        pictures().enumerate().map(make).collect()
    }

    fn update_status(
        &self,
        state: &mut GuardedState,
        chunk: &LiveChunk,
        recent: &mut RecentChunks,
        now: Instant,
    ) {
        let progress = &chunk.progress;
        let frames = chunk.shape[0] as u64;
        state.forget_settings_before(progress.request);
        let settings = state.settings_of(progress.request).clone();
        if let Some(last) = state.last_delivery.replace(now) {
            self.metrics.chunk_period.observe((now - last).as_secs_f64());
        }
        let call_seconds = progress.call_ns as f64 / 1e9;
        let score = recent.overlap_score();
        self.metrics.chunks.inc();
        self.metrics.frames.inc_by(frames);
        self.metrics.call_time.observe(call_seconds);
        self.metrics.queued_requests.set(i64::from(progress.queued_in));
        self.metrics.queued_results.set(i64::from(progress.queued_out));
        self.metrics.overlap_score.set(score.unwrap_or_default());
        for (name, ns) in &progress.phases {
            let labels = PhaseLabels { phase: name.clone() };
            self.metrics.phase_time.get_or_create(&labels).set(*ns as f64 / 1e9);
        }
        state.timeline = recent.timeline();
        state.undelivered.retain(|(request, _)| *request > progress.request);
        let status = &mut state.status;
        status.chunks = progress.chunk + 1;
        status.frames += frames;
        status.request = Some(progress.request);
        status.epoch = Some(progress.epoch);
        status.lora = settings.weights.as_deref().and_then(|source| self.loras.name_of(source));
        (status.prompt, status.seed) = (settings.prompt, settings.seed);
        (status.steps, status.bias) = (settings.steps, settings.bias);
        status.generated_fps = progress.fps;
        // The rate of the generator alone: waits between calls, and the leader's work beside it, are left out.
        let busy: u64 = progress.phases.iter().map(|(_, ns)| ns).sum();
        status.possible_fps = if busy > 0 { frames as f64 * 1e9 / busy as f64 } else { 0.0 };
        status.call_ms = call_seconds * 1e3;
        status.phases = progress.phases.iter().map(|(name, ns)| (name.clone(), *ns as f64 / 1e6)).collect();
        (status.queued_in, status.queued_out) = (progress.queued_in, progress.queued_out);
        status.overlap_score = score;
        tracing::info!(
            run = status.run,
            chunk = progress.chunk,
            request = progress.request,
            epoch = progress.epoch,
            rank = 0,
            call_ms = status.call_ms,
            "chunk delivered"
        );
    }

    /// Takes the answers of the leader to changes.
    fn take_effects(&self, state: &mut GuardedState) {
        let Some(control) = state.control.clone() else { return };
        let run = state.run;
        let answered = |change: &mut PendingChange| control.chunk_of(change.number_in_run).is_some();
        for change in state.pending.extract_if(.., answered).collect::<Vec<_>>() {
            let Some(request) = control.chunk_of(change.number_in_run).map(u64::from) else { continue };
            let waited = change.since.elapsed();
            self.metrics.change_wait.observe(waited.as_secs_f64());
            tracing::info!(run, request, change = change.kind, "change takes effect");
            self.traces.iter().for_each(|traces| traces.note_effect(change.kind, request, waited));
            state.record_outcome(ChangeOutcome { change: change.number, run, request });
            let mut settings = state.settings_of(u64::MAX).clone();
            settings.apply(&change.setting);
            state.settings.push((request, settings));
            if change.setting == NewSetting::FlushedScene {
                state.pacer.flush(Instant::now(), request);
                for (_, client) in state.connected() {
                    client.queue.fence(run, request);
                    client.send(&ServerMessage::Fence { run, request });
                }
            }
            state.undelivered.push((request, change.setting));
            if let Some((client, id)) = change.owner
                && let Some(client) = state.clients.get(&client)
            {
                client.send(&ServerMessage::Effect { id, change: change.kind, run, request });
            }
        }
    }

    /// Answers the changes that no chunk of an ended run has taken.
    fn refuse_pending(&self, state: &mut GuardedState) {
        for change in std::mem::take(&mut state.pending) {
            let Some((client, id)) = change.owner else { continue };
            if let Some(client) = state.clients.get(&client) {
                client.send(&ServerMessage::Refused(change.refuse_after_run().with_id(id)));
            }
        }
    }

    fn forget_lost_clients(&self, state: &mut GuardedState, now: Instant) {
        let holder = state.lease.holder(now);
        let is_kept = |lost: Option<Instant>| {
            lost.is_none_or(|lost| now.saturating_duration_since(lost) < RECONNECT_TIME)
        };
        state.clients.retain(|_, client| is_kept(client.lost));
        self.video.iter().for_each(|video| video.keep_clients(|client| state.clients.contains_key(&client)));
        // A holder that did not return has lost the control.
        if holder.is_none() && state.lease.forget_lost() {
            self.send_control(state, now);
        }
    }

    fn show_alarm(&self, state: &mut GuardedState, alarm: Alarm) {
        let Alarm { run, restarts, code, .. } = &alarm;
        tracing::error!(run, code, restarts, "{}", alarm.message);
        let message = ServerMessage::Alarm(alarm.clone());
        state.connected().for_each(|(_, client)| client.send(&message));
        state.alarms.push_back(alarm);
        if state.alarms.len() > KEPT_ALARMS {
            state.alarms.pop_front();
        }
    }

    fn make_alarm(&self, d: &Diagnostic, run: u32, next: AfterRun) -> Alarm {
        let labels = d.labels.iter().map(|label| format!("{}: {}", label.location, label.message));
        let details = labels.chain(d.notes.iter().cloned()).chain(d.hint.clone());
        Alarm {
            code: d.code.id.to_string(),
            title: d.code.title.to_string(),
            message: d.message.clone(),
            details: details.collect(),
            explanation: (self.explain)(d.code.id).unwrap_or(d.code.page).to_string(),
            restarts: next != AfterRun::Nothing,
            regenerates: match next {
                AfterRun::Continued(chunks) => Some(chunks),
                AfterRun::Nothing | AfterRun::NewScene => None,
            },
            run,
        }
    }
}

impl GuardedState {
    pub(super) fn record_outcome(&mut self, outcome: ChangeOutcome) {
        self.outcomes.push_back(outcome);
        if self.outcomes.len() > KEPT_EFFECTS {
            self.outcomes.pop_front();
        }
    }
}
