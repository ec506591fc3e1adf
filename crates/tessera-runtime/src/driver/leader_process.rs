//! The control thread of the leader's process. It runs the leader's state machine, the local rank
//! if the leader is in the mesh, and every socket; it never blocks on the engine, the media
//! pipeline, the application or a peer.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};

use super::boundary::{Interceptor, MessageBoundary, MessageDirection};
use super::closed_peers::ClosedPeers;
use super::engine_thread::EngineFactory;
use super::exit::Watchdog;
use super::launcher::StopHandle;
use super::link::{DisconnectReason, Frame};
use super::local_rank::{LocalRank, RankAction};
use super::media_thread::{MediaCommand, MediaEvent, MediaPipelineFactory, MediaThread, StreamRequest};
use super::reactor::{LinkId, Reactor, ReactorEvent};
use super::request_intake::{IntakeEvent, RequestIntake};
use super::welcome::{JoinedRank, io_diagnostic, outlive_launcher};
use super::worker_process::{failed_process_lifetime, protocol_failure, stall_failure, wind_down};
use super::{ControlTopology, T0750, TICK_INTERVAL};
use crate::director::ChunkRequest;
use crate::flight::{FlightEvent, FlightSink};
use crate::leader::{self, CallRecord, Leader, LeaderConfig, T0748};
use crate::tripwire::CheckSite;
use crate::wire::{Heartbeat, LAUNCHER, Message, Progress, Reload};
use crate::worker::{self, T0749, WorkerConfig};
use crate::{Failure, FailureClass, Limits};

/// Exit status of a process that was stopped on request.
const INTERRUPTED: i32 = 130;
/// Time limit for closing the output.
const FINISH_LIMIT: Duration = Duration::from_secs(60);

/// The application's parts of the leader's process.
pub struct LeaderParts {
    /// The leader's settings.
    pub config: LeaderConfig,
    /// Worker settings and engine of rank 0; `None` if the leader is outside the mesh.
    pub local_rank: Option<(WorkerConfig, EngineFactory)>,
    /// Control links between the ranks.
    pub topology: ControlTopology,
    /// Builds the media pipeline.
    pub media: MediaPipelineFactory,
    /// Requests, chunk by chunk, pulled at most `d_in` ahead. The iterator may block.
    pub requests: Box<dyn Iterator<Item = StreamRequest> + Send>,
    /// Receives the entries of the run's record; must not block.
    pub record: Box<dyn FnMut(RecordEntry<'_>)>,
    /// Stops a leader that no launcher started.
    pub stop: Option<StopHandle>,
    /// Stores the rank's flight record.
    pub flight: Option<Arc<dyn FlightSink>>,
    /// Alters messages in a drill.
    pub interceptor: Option<Interceptor>,
}

/// An entry of a run's record.
#[derive(Debug)]
pub enum RecordEntry<'a> {
    /// A call that every rank has finished.
    Call(&'a CallRecord),
    /// A chunk was delivered.
    Progress(&'a Progress),
    /// A remark for the reader of the record.
    Note(&'a str),
    /// A request or a finished chunk was dropped for a hard cut.
    Dropped {
        /// Index of the request, from 0.
        request: u64,
        /// Its chunk, if one was already assigned.
        chunk: Option<u32>,
        /// The cache epoch that ended.
        epoch: u32,
        /// The stage in which it was dropped.
        why: &'static str,
    },
    /// A call was open when the run failed.
    Lost {
        /// Id of the call.
        call_id: u64,
        /// Chunk of the call.
        chunk: u32,
        /// Cache epoch of the call.
        epoch: u32,
        /// Ranks that had answered ready.
        ready: &'a [u32],
        /// Ranks that had finished.
        done: &'a [u32],
    },
    /// The run failed.
    Failed(&'a Failure),
}

/// Runs the leader until the session ends; [`super::run_worker`] describes the return values.
///
/// # Errors
/// The diagnostics of an invalid configuration, or T0750.
pub fn run_leader(mut joined: JoinedRank, parts: LeaderParts) -> Result<Option<Failure>, Diagnostics> {
    if let Err(found) = Leader::new(parts.config.clone()) {
        if let Some(d) = found.first() {
            let failure =
                Failure::from_diagnostic(FailureClass::Preflight, Some(0), d).with_site(CheckSite::Leader);
            if joined.report_refusal(&failure) {
                return Ok(Some(failure));
            }
        }
        return Err(found);
    }
    LeaderProcess::start_process(joined, parts)?.run_loop()
}

/// An event for one of the state machines of this process.
enum LeaderProcessEvent {
    Leader(leader::Event),
    Local(worker::Event),
}

struct LeaderProcess {
    start: Instant,
    limits: Limits,
    leader: Leader,
    rank: u32,
    local: Option<LocalRank>,
    boundary: MessageBoundary,
    watchdog: Watchdog,
    peers: BTreeMap<u32, LinkId>,
    launcher: Option<LinkId>,
    media: MediaThread,
    intake: RequestIntake,
    record: Box<dyn FnMut(RecordEntry<'_>)>,
    stop: Option<StopHandle>,
    stop_requests_seen: u32,
    closed_peers: ClosedPeers,
    /// Events for the state machines, in order.
    queue: VecDeque<LeaderProcessEvent>,
    outcome: Option<Option<Failure>>,
}

impl LeaderProcess {
    fn start_process(joined: JoinedRank, parts: LeaderParts) -> Result<LeaderProcess, Diagnostics> {
        let LeaderParts {
            config,
            local_rank: engine,
            topology,
            media: media_pipeline,
            requests,
            record,
            stop: interrupt,
            flight,
            interceptor: tap,
        } = parts;
        let limits = config.limits.clone();
        let io = |what: &str, e: &std::io::Error| vec![io_diagnostic(what, e)];
        let leader = Leader::new(config.clone())?;
        let watchdog = Watchdog::start_thread(&limits).map_err(|e| io("watchdog thread", &e))?;
        let mut reactor = Reactor::new(&limits).map_err(|e| io("control sockets", &e))?;
        let (rank, world) = (joined.welcome.rank, joined.welcome.world_size);
        let led_ranks: Vec<u32> =
            topology.control_links(world).iter().filter(|l| l.0 == rank).map(|l| l.1).collect();
        let leader_in_mesh = topology == ControlTopology::Mesh;
        let mesh_matches = config.ranks.iter().copied().eq(u32::from(!leader_in_mesh)..world)
            && leader_in_mesh == engine.is_some()
            && joined.links.len() == led_ranks.len();
        if !mesh_matches {
            return Err(vec![
                Diagnostic::error(&T0750, "the mesh does not match the launched processes")
                    .with_label("mesh", format!("ranks {:?}, {topology:?}", config.ranks))
                    .with_label("launched", format!("{world} ranks, {} sockets", joined.links.len())),
            ]);
        }
        let mut peers = BTreeMap::new();
        for (peer, stream) in led_ranks.into_iter().zip(joined.links) {
            // The mesh leader forwards its members' messages.
            let origins = if leader_in_mesh { peer..=peer } else { peer..=world - 1 };
            let link = reactor.add_link(stream, origins).map_err(|e| io("control socket", &e))?;
            peers.insert(peer, link);
        }
        let launcher = joined
            .launcher
            .map(|stream| reactor.add_link(stream, [LAUNCHER]))
            .transpose()
            .map_err(|e| io("launcher socket", &e))?;
        // A launcher that a person suspended reads later.
        launcher.into_iter().for_each(|l| reactor.set_best_effort(l));
        let local =
            engine.map(|(config, factory)| LocalRank::start(config, factory, &reactor)).transpose()?;
        let media = MediaThread::spawn_thread(media_pipeline, Leader::media_queue_depth(&limits), &reactor)
            .map_err(|e| io("media thread", &e))?;
        let intake = RequestIntake::spawn_thread(requests, &reactor).map_err(|e| io("intake thread", &e))?;
        interrupt.iter().for_each(|i| i.set_reactor(&reactor));
        if launcher.is_some() {
            outlive_launcher();
        }
        Ok(LeaderProcess {
            start: Instant::now(),
            limits,
            leader,
            rank,
            local,
            boundary: MessageBoundary::new(rank, reactor, flight, tap, config.tripwires.clone()),
            watchdog,
            peers,
            launcher,
            media,
            intake,
            record,
            stop: interrupt,
            stop_requests_seen: 0,
            closed_peers: ClosedPeers::new(launcher.is_some()),
            queue: VecDeque::new(),
            outcome: None,
        })
    }

    fn run_loop(mut self) -> Result<Option<Failure>, Diagnostics> {
        let mut events = Vec::new();
        loop {
            self.watchdog.mark_alive();
            self.boundary.reactor.wait_events(TICK_INTERVAL, &mut events);
            for event in events.drain(..) {
                self.handle_reactor_event(event);
                self.drain_queue();
            }
            self.poll_threads();
            for (rank, how) in self.closed_peers.take_due() {
                self.queue_leader_event(leader::Event::Gone { rank, how });
            }
            self.drain_queue();
            // Messages are handled before the clock: a peer is not late if its answer is already in
            // the inbox.
            self.queue.push_back(LeaderProcessEvent::Leader(leader::Event::Tick));
            if let Some(local) = &self.local {
                self.queue.push_back(LeaderProcessEvent::Local(local.tick_event()));
            }
            self.drain_queue();
            if let Some(outcome) = self.outcome.take() {
                return Ok(self.close_session(outcome));
            }
            self.intake.grant_permits(self.leader.request_capacity());
        }
    }

    /// Steps the state machines until no event is queued, or one of them has ended.
    fn drain_queue(&mut self) {
        while self.outcome.is_none()
            && let Some(input) = self.queue.pop_front()
        {
            let now_ns = self.start.elapsed().as_nanos() as u64;
            match input {
                LeaderProcessEvent::Leader(event) => {
                    for action in self.leader.handle_event(now_ns, event) {
                        self.apply_action(action);
                    }
                }
                LeaderProcessEvent::Local(event) => self.step_local_rank(now_ns, event),
            }
        }
    }

    fn handle_reactor_event(&mut self, event: ReactorEvent) {
        match event {
            ReactorEvent::Frame { link, frame } if Some(link) == self.launcher => {
                match frame.decode_message() {
                    Ok(Message::Stop) => self.queue_leader_event(leader::Event::Stop),
                    _ => self.queue_leader_event(leader::Event::LauncherGone),
                }
            }
            ReactorEvent::Disconnected { link, .. } if Some(link) == self.launcher => {
                self.queue_leader_event(leader::Event::LauncherGone);
            }
            ReactorEvent::Frame { frame, .. } => match self.boundary.receive_frame(&frame) {
                Ok(messages) => {
                    for message in messages {
                        // A failure that follows from the loss of a rank is not the root cause.
                        if matches!(message, Message::Fault(_) | Message::Refused(_)) {
                            for (rank, how) in self.closed_peers.take_all() {
                                self.queue_leader_event(leader::Event::Gone { rank, how });
                            }
                        }
                        self.queue_leader_event(leader::Event::Message { rank: frame.origin(), message });
                    }
                }
                Err(d) => self.queue_failure(Failure { rank: Some(frame.origin()), ..protocol_failure(&d) }),
            },
            ReactorEvent::Disconnected { link, reason: end } => {
                let Some(rank) = self.peers.iter().find(|(_, l)| **l == link).map(|(r, _)| *r) else {
                    return;
                };
                match end {
                    DisconnectReason::Closed(how) => self.closed_peers.add_closed(rank, how),
                    DisconnectReason::Broken(d) => {
                        self.queue_failure(Failure { rank: Some(rank), ..protocol_failure(&d) })
                    }
                    DisconnectReason::Stalled(how) => self.queue_failure(stall_failure(rank, &how)),
                }
            }
            ReactorEvent::FdReady(_) => {}
        }
    }

    /// Handles the events of the other threads of this process.
    fn poll_threads(&mut self) {
        while let Some(event) = self.local.as_mut().and_then(LocalRank::next_event) {
            self.queue.push_back(LeaderProcessEvent::Local(event));
        }
        let mut intake_events = Vec::new();
        while let Some(event) = self.media.next_event() {
            match event {
                MediaEvent::PromptEmbedded(tensor) => {
                    self.intake.attach_embedding(tensor, &mut intake_events)
                }
                MediaEvent::ContextReady { chunk, tensor } => {
                    self.queue_leader_event(leader::Event::Context { chunk, tensor });
                }
                MediaEvent::Delivered { chunk, frames } => {
                    self.queue_leader_event(leader::Event::Delivered { chunk, frames });
                }
                MediaEvent::Discarded { chunk } => {
                    self.queue_leader_event(leader::Event::Discarded { chunk })
                }
                MediaEvent::Built | MediaEvent::Finished => {}
                MediaEvent::Failed(failure) => self.queue_failure(failure),
            }
        }
        let now_ns = self.start.elapsed().as_nanos() as u64;
        if let Some(failure) = self.media.check_stalled(now_ns, &self.limits) {
            self.queue_failure(failure);
        }
        self.intake.poll_events(&mut intake_events);
        for intake_events in intake_events {
            match intake_events {
                IntakeEvent::Prompt(prompt) => self.send_media_command(MediaCommand::EmbedPrompt { prompt }),
                IntakeEvent::Request(request, text) => {
                    let StreamRequest { prompt, seed, cut, reload } = request;
                    if let Some(Reload { source, weights }) = reload {
                        self.queue_leader_event(leader::Event::Reload { source, weights });
                    }
                    let request = ChunkRequest { prompt_change: prompt.is_some(), seed, cut };
                    self.queue_leader_event(leader::Event::Request { request, text });
                }
                IntakeEvent::Finished => self.queue_leader_event(leader::Event::NoMoreRequests),
            }
        }
        if let Some(interrupt) = &self.stop {
            let count = interrupt.request_count();
            if count > self.stop_requests_seen {
                self.stop_requests_seen = count;
                // A second stop signal that reaches every rank also reaches this process.
                self.closed_peers.enable_delay();
                if count == 1 {
                    self.queue_leader_event(leader::Event::Stop);
                } else {
                    self.queue_failure(second_stop_failure());
                }
            }
        }
    }

    fn apply_action(&mut self, action: leader::Action) {
        match action {
            leader::Action::Broadcast(message) => {
                if let Err(d) = self.boundary.send_to(&self.peers, &message) {
                    return self.queue_failure(Failure::from_diagnostic(FailureClass::Preflight, None, &d));
                }
                if self.local.is_some() {
                    match self.boundary.intercept_message(MessageDirection::Outbound, self.rank, message) {
                        Ok(messages) => self.queue.extend(
                            messages
                                .into_iter()
                                .map(|m| LeaderProcessEvent::Local(worker::Event::Message(m))),
                        ),
                        Err(d) => {
                            self.queue_failure(Failure { rank: Some(self.rank), ..protocol_failure(&d) })
                        }
                    }
                }
            }
            leader::Action::MakeContext { chunk, previous, opens_scene } => {
                self.send_media_command(MediaCommand::MakeContext { chunk, previous, opens_scene });
            }
            leader::Action::Deliver { chunk, epoch, latents } => {
                self.send_media_command(MediaCommand::Deliver { chunk, epoch, latents });
            }
            leader::Action::SetMinEpoch { epoch } => self.media.set_min_epoch(epoch),
            leader::Action::Dropped { request, chunk, epoch, why } => {
                (self.record)(RecordEntry::Dropped { request, chunk, epoch, why });
            }
            leader::Action::Lost { call_id, chunk, epoch, ready, done } => {
                (self.record)(RecordEntry::Lost { call_id, chunk, epoch, ready: &ready, done: &done });
            }
            leader::Action::Record(record) => (self.record)(RecordEntry::Call(&record)),
            leader::Action::Note(note) => (self.record)(RecordEntry::Note(&note)),
            // The launcher gets this report only after the output is closed.
            leader::Action::Report(Message::Finished) => {}
            leader::Action::Report(message) => {
                if let Message::Progress(progress) = &message {
                    (self.record)(RecordEntry::Progress(progress));
                }
                self.report_to_launcher(&message);
            }
            leader::Action::Exit(outcome) => self.outcome = Some(outcome),
        }
    }

    fn step_local_rank(&mut self, now_ns: u64, event: worker::Event) {
        let Some(local) = &mut self.local else { return };
        for action in local.step_worker(now_ns, event) {
            // The leader's state machine decides when this process ends.
            let RankAction::Send(message) = action else { continue };
            self.boundary.record_mark(FlightEvent::from_sent(self.rank, &message));
            match self.boundary.intercept_message(MessageDirection::Inbound, self.rank, message) {
                Ok(messages) => {
                    for message in messages {
                        self.queue_leader_event(leader::Event::Message { rank: self.rank, message });
                    }
                }
                Err(d) => self.queue_failure(Failure { rank: Some(self.rank), ..protocol_failure(&d) }),
            }
        }
    }

    fn queue_leader_event(&mut self, event: leader::Event) {
        self.queue.push_back(LeaderProcessEvent::Leader(event));
    }

    fn queue_failure(&mut self, failure: Failure) {
        self.queue_leader_event(leader::Event::Failed(failure));
    }

    fn send_media_command(&mut self, command: MediaCommand) {
        if let Err(failure) = self.media.send_command(command) {
            self.queue_failure(failure);
        }
    }

    /// Reports to the launcher. If the launcher does not read, heartbeats are skipped, but the
    /// final message is still queued.
    fn report_to_launcher(&mut self, message: &Message) {
        let (Some(launcher), Ok(frame)) = (self.launcher, Frame::new(self.rank, message)) else { return };
        match message {
            Message::Heartbeat(_) if !self.boundary.reactor.is_idle(launcher) => {}
            Message::Failed(_) | Message::Finished => {
                self.boundary.reactor.send_dropping_queued(launcher, &frame)
            }
            _ => self.boundary.reactor.send(launcher, &frame),
        }
    }

    fn close_session(mut self, outcome: Option<Failure>) -> Option<Failure> {
        let outcome = outcome.or_else(|| self.close_output());
        let Some(failure) = outcome else {
            self.report_to_launcher(&Message::Finished);
            self.boundary.record_exit(None);
            // A suspended launcher reads later; until then, the watchdog must see progress.
            let flush_deadline = Instant::now() + FINISH_LIMIT;
            while !self.boundary.reactor.is_flushed() && Instant::now() < flush_deadline {
                self.watchdog.mark_alive();
                self.boundary.reactor.flush(TICK_INTERVAL);
            }
            return None;
        };
        // A second stop signal also ends other ranks, so their loss is no failure.
        let stopped_twice = self.stop.as_ref().is_some_and(|i| i.request_count() > 1)
            && matches!(failure.class, FailureClass::LauncherGone | FailureClass::RankDied);
        let status = if stopped_twice { INTERRUPTED } else { failure.class.exit_code() };
        self.watchdog.exit_within(failed_process_lifetime(&self.limits), status);
        // The last broadcast is still in the local rank's queue; that message aborts the engine.
        while let Some(input) = self.queue.pop_front() {
            if let LeaderProcessEvent::Local(event) = input {
                self.step_local_rank(self.start.elapsed().as_nanos() as u64, event);
            }
        }
        if stopped_twice {
            // The other ranks got the abort; nothing failed.
            self.boundary.reactor.flush(TICK_INTERVAL);
            return wind_down(self.boundary, self.local, &self.watchdog, &self.limits, None);
        }
        self.boundary.record_mark(Some(FlightEvent::from_failure(&failure)));
        // Peers and launcher get the failure before the record is written, which may block.
        self.boundary.reactor.flush(TICK_INTERVAL);
        (self.record)(RecordEntry::Failed(&failure));
        wind_down(self.boundary, self.local, &self.watchdog, &self.limits, Some(failure))
    }

    /// Closes the output after every rank has ended.
    fn close_output(&mut self) -> Option<Failure> {
        let mut failure = self.media.send_command(MediaCommand::Finish).err();
        let (until, heartbeat_interval) =
            (Instant::now() + FINISH_LIMIT, Duration::from_nanos(self.limits.heartbeat_ns));
        let (mut last_heartbeat, mut events) = (Instant::now(), Vec::new());
        while failure.is_none() {
            self.watchdog.mark_alive();
            if self.stop.as_ref().is_some_and(|i| i.request_count() > 1) {
                return Some(second_stop_failure());
            }
            while let Some(event) = self.media.next_event() {
                match event {
                    MediaEvent::Finished => return None,
                    MediaEvent::Failed(f) => failure = Some(f),
                    _ => {}
                }
            }
            if Instant::now() >= until {
                let text = "closing the output exceeded its time limit";
                failure.get_or_insert(Failure::new(FailureClass::Output, Some(0), &T0748, text));
            }
            if last_heartbeat.elapsed() >= heartbeat_interval {
                last_heartbeat = Instant::now();
                self.report_to_launcher(&Message::Heartbeat(Heartbeat { progress: 0 }));
            }
            self.boundary.reactor.wait_events(TICK_INTERVAL, &mut events);
            if events
                .drain(..)
                .any(|e| matches!(e, ReactorEvent::Disconnected { link, .. } if Some(link) == self.launcher))
            {
                let text = "the launching process closed its socket while the output was being closed";
                failure = Some(Failure::new(FailureClass::LauncherGone, None, &T0749, text));
            }
        }
        if let Some(failure) = &failure {
            self.report_to_launcher(&Message::Failed(failure.clone()));
        }
        failure
    }
}

/// Builds the failure that ends a leader without a launcher on the second stop request. The other
/// ranks receive it as an abort.
fn second_stop_failure() -> Failure {
    Failure::new(FailureClass::LauncherGone, None, &T0749, "a second stop was requested")
}
