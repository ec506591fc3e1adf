//! The control thread of the leader's process. It runs the leader's state machine, the local rank
//! if the leader is in the mesh, and every socket; it never blocks on the engine, the media
//! pipeline, the application or a peer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_base::Diagnostics;

use super::boundary::{Interceptor, MessageDirection};
use super::engine_thread::EngineFactory;
use super::event_loop::{EventLoop, Machine, RankProcess, SocketEvent, mesh_mismatch, protocol_failure};
use super::launcher::StopHandle;
use super::link::Frame;
use super::local_rank::{LocalRank, RankAction};
use super::media_thread::{
    CallRequest, MediaCommand, MediaEvent, MediaPipelineFactory, MediaThread, StreamRequest,
};
use super::reactor::ReactorEvent;
use super::request_intake::{IntakeEvent, RequestIntake};
use super::system::ParentTie;
use super::welcome::{JoinedRank, io_diagnostic};
use super::{ControlTopology, TICK_INTERVAL};
use crate::codes::{T0748, T0749};
use crate::director::ChunkRequest;
use crate::engine::MediaJob;
use crate::flight::{FlightEvent, FlightSink};
use crate::leader::{self, Leader, LeaderConfig, RecordEntry};
use crate::limits::format_ms;
use crate::tripwire::CheckSite;
use crate::wire::{Heartbeat, LAUNCHER, Message};
use crate::worker::{self, WorkerConfig};
use crate::{Failure, FailureClass};

/// Exit status of a process that was stopped on request.
const INTERRUPTED: i32 = 130;
/// Time limit for closing the output.
const FINISH_LIMIT: Duration = Duration::from_secs(60);
/// A launcher that misses this many heartbeats is stopped, and not only slow.
const MISSED_HEARTBEATS: u64 = 4;

/// The application's part of the leader's process: settings, engine, media, requests and sinks.
pub struct LeaderParts {
    /// Settings of the leader's state machine; `ranks` must be the launched ranks of the mesh.
    pub config: LeaderConfig,
    /// Worker settings and engine of rank 0; `None` if the leader is outside the mesh.
    pub local_rank: Option<(WorkerConfig, EngineFactory)>,
    /// Control links between the ranks.
    pub topology: ControlTopology,
    /// Builds the text encoder and the VAE decoder, once, on the media thread.
    pub media: MediaPipelineFactory,
    /// Requests, chunk by chunk, pulled at most `d_in` ahead. The iterator may block.
    pub requests: Box<dyn Iterator<Item = CallRequest> + Send>,
    /// Receives the entries of the run's record as soon as they happen; must not block.
    pub record: Box<dyn FnMut(&RecordEntry)>,
    /// Stops a leader that no launcher started.
    pub stop: Option<StopHandle>,
    /// Stores the rank's flight record.
    pub flight: Option<Arc<dyn FlightSink>>,
    /// Alters messages in a drill.
    pub interceptor: Option<Interceptor>,
}

/// Runs the leader until the session ends; [`super::run_worker`] describes the return values.
///
/// # Errors
/// The diagnostics of an invalid configuration, or T0750.
pub fn run_leader(mut joined: JoinedRank, parts: LeaderParts) -> Result<Option<Failure>, Diagnostics> {
    match Leader::new(parts.config.clone()) {
        Ok(leader) => Ok(start_process(joined, leader, parts)?.run()),
        Err(found) => {
            let failure = found.first().map(|d| {
                Failure::from_diagnostic(FailureClass::Preflight, Some(0), d).with_site(CheckSite::Leader)
            });
            match failure {
                Some(failure) if joined.report_refusal(&failure) => Ok(Some(failure)),
                _ => Err(found),
            }
        }
    }
}

fn start_process(
    joined: JoinedRank,
    leader: Leader,
    parts: LeaderParts,
) -> Result<EventLoop<LeaderProcess>, Diagnostics> {
    let LeaderParts { config, local_rank, topology, media, requests, record, stop, flight, interceptor } =
        parts;
    let (rank, world) = (joined.welcome.rank, joined.welcome.world_size);
    let tripwires = config.tripwires.clone();
    let mut process = RankProcess::start(rank, &config.limits, tripwires, flight, interceptor)?;
    let led_ranks: Vec<u32> =
        topology.control_links(world).iter().filter(|l| l.0 == rank).map(|l| l.1).collect();
    let leader_in_mesh = topology == ControlTopology::Mesh;
    let mesh_matches = config.ranks.iter().copied().eq(u32::from(!leader_in_mesh)..world)
        && leader_in_mesh == local_rank.is_some()
        && joined.links.len() == led_ranks.len();
    if !mesh_matches {
        let mesh = format!("ranks {:?}, {topology:?}", config.ranks);
        return Err(mesh_mismatch(mesh, world, joined.links.len()));
    }
    for (peer, stream) in led_ranks.into_iter().zip(joined.links) {
        // The mesh leader forwards its members' messages.
        let last_origin = if leader_in_mesh { peer } else { world - 1 };
        let link = process.add_link(stream, peer..=last_origin)?;
        process.led.insert(peer, link);
    }
    process.add_launcher(joined.launcher, [LAUNCHER])?;
    let reactor = &mut process.boundary.reactor;
    let start_rank = |(worker, factory)| LocalRank::start(worker, factory, reactor);
    process.local = local_rank.map(start_rank).transpose()?;
    // A launcher that a person suspended reads later.
    process.launcher.into_iter().for_each(|l| reactor.set_best_effort(l));
    let io = |what: &str, e: &std::io::Error| vec![io_diagnostic(what, e)];
    let media = MediaThread::spawn_thread(media, Leader::media_queue_depth(&config.limits), reactor)
        .map_err(|e| io("media thread", &e))?;
    let intake = RequestIntake::spawn_thread(requests, reactor).map_err(|e| io("intake thread", &e))?;
    stop.iter().for_each(|s| s.set_reactor(reactor));
    // The leader must survive its launcher to close its record.
    joined.tie.into_iter().for_each(ParentTie::outlive_parent);
    let launcher_seen = Instant::now();
    let machine = LeaderProcess { leader, media, intake, record, stop, stop_requests_seen: 0, launcher_seen };
    Ok(EventLoop { machine, process })
}

/// The leader's process, as its state machine sees it.
type Process = RankProcess<leader::Event>;

struct LeaderProcess {
    leader: Leader,
    media: MediaThread,
    intake: RequestIntake,
    record: Box<dyn FnMut(&RecordEntry)>,
    stop: Option<StopHandle>,
    stop_requests_seen: u32,
    /// Time of the launcher's last heartbeat, or of the start.
    launcher_seen: Instant,
}

impl Machine for LeaderProcess {
    type Event = leader::Event;

    fn queue_socket_event(&mut self, process: &mut Process, event: SocketEvent) {
        process.queue_event(match event {
            SocketEvent::Message { frame, message } => {
                leader::Event::Message { rank: frame.origin(), message }
            }
            SocketEvent::Closed { rank, how } => leader::Event::Gone { rank, how },
            SocketEvent::Failed { rank, failure } => {
                leader::Event::Failed(Failure { rank: Some(rank), ..failure })
            }
            SocketEvent::Launcher(Some(Message::Heartbeat(_))) => {
                self.launcher_seen = Instant::now();
                return;
            }
            SocketEvent::Launcher(Some(Message::Stop)) => leader::Event::Stop,
            SocketEvent::Launcher(_) => leader::Event::LauncherGone,
        });
    }

    fn poll_threads(&mut self, process: &mut Process) {
        let mut intake_events = Vec::new();
        while let Some(event) = self.media.next_event() {
            match event {
                MediaEvent::PromptEmbedded(tensor) => {
                    self.intake.attach_embedding(tensor, &mut intake_events)
                }
                MediaEvent::Leader(event) => process.queue_event(event),
                MediaEvent::Built | MediaEvent::Finished => {}
            }
        }
        if let Some(failure) = self.media.check_stalled(process.now_ns(), &process.limits) {
            queue_failure(process, failure);
        }
        self.intake.poll_events(&mut intake_events);
        for intake_events in intake_events {
            match intake_events {
                IntakeEvent::Prompt(prompt) => self.send_media_job(process, MediaJob::EncodePrompt(prompt)),
                IntakeEvent::Request(request, text) => match *request {
                    CallRequest::Chunk(StreamRequest {
                        prompt,
                        seed,
                        cut,
                        step_list,
                        bias,
                        reload,
                        start,
                    }) => {
                        if let Some(reload) = reload {
                            process.queue_event(leader::Event::Reload(reload));
                        }
                        let request =
                            ChunkRequest { prompt_change: prompt.is_some(), seed, cut, step_list, bias };
                        process.queue_event(leader::Event::Request { request, text, start });
                    }
                    CallRequest::Tokens(request) => {
                        process.queue_event(leader::Event::TokenRequest(request));
                    }
                    CallRequest::Arrays(request) => {
                        process.queue_event(leader::Event::ArrayRequest(request));
                    }
                },
                IntakeEvent::Finished => process.queue_event(leader::Event::NoMoreRequests),
            }
        }
        if let Some(interrupt) = &self.stop {
            let count = interrupt.request_count();
            if count > self.stop_requests_seen {
                self.stop_requests_seen = count;
                // A second stop signal that reaches every rank also reaches this process.
                process.closed_peers.enable_delay();
                if count == 1 {
                    process.queue_event(leader::Event::Stop);
                } else {
                    queue_failure(process, second_stop_failure());
                }
            }
        }
    }

    fn tick_event(&self) -> Option<leader::Event> {
        Some(leader::Event::Tick)
    }

    fn handle_event(&mut self, process: &mut Process, now_ns: u64, event: leader::Event) {
        for action in self.leader.handle_event(now_ns, event) {
            self.apply_action(process, action);
        }
    }

    fn handle_rank_action(&mut self, process: &mut Process, action: RankAction) {
        // The leader's state machine decides when this process ends.
        let RankAction::Send(message) = action else { return };
        process.boundary.record_mark(FlightEvent::from_sent(process.rank, &message));
        for message in intercept_local_message(process, MessageDirection::Inbound, message) {
            process.queue_event(leader::Event::Message { rank: process.rank, message });
        }
    }

    fn end_turn(&mut self) {
        self.intake.grant_permits(self.leader.request_capacity());
    }

    fn close_session(mut event_loop: EventLoop<Self>, outcome: Option<Failure>) -> Option<Failure> {
        let EventLoop { machine, process } = &mut event_loop;
        let outcome = outcome.or_else(|| machine.close_output(process));
        let Some(mut failure) = outcome else {
            report_to_launcher(process, &Message::Finished);
            process.boundary.record_exit(None);
            // A suspended launcher reads later; until then, the watchdog must see progress.
            let flush_deadline = Instant::now() + FINISH_LIMIT;
            while !process.boundary.reactor.is_flushed() && Instant::now() < flush_deadline {
                process.watchdog.mark_alive();
                process.boundary.reactor.flush(TICK_INTERVAL);
            }
            return None;
        };
        // A second stop signal also ends other ranks, so their loss is no failure.
        let stopped_twice = machine.stop.as_ref().is_some_and(|i| i.request_count() > 1)
            && matches!(failure.class, FailureClass::LauncherGone | FailureClass::RankDied);
        let status = if stopped_twice { INTERRUPTED } else { failure.class.exit_code() };
        process.limit_lifetime(status);
        event_loop.finish_local_rank();
        let EventLoop { mut machine, mut process } = event_loop;
        if stopped_twice {
            // The other ranks got the abort; nothing failed.
            process.boundary.reactor.flush(TICK_INTERVAL);
            return process.wind_down(None);
        }
        machine.name_stopped_launcher(&process, &mut failure);
        process.boundary.record_mark(Some(FlightEvent::from_failure(&failure)));
        // Peers and launcher get the failure before the record is written, which may block.
        process.boundary.reactor.flush(TICK_INTERVAL);
        (machine.record)(&RecordEntry::Failed(failure.clone()));
        process.wind_down(Some(failure))
    }
}

impl LeaderProcess {
    /// Adds to a failure that the launcher was stopped, if it missed several heartbeats.
    fn name_stopped_launcher(&self, process: &Process, failure: &mut Failure) {
        let silence_ns = self.launcher_seen.elapsed().as_nanos() as u64;
        if process.launcher.is_some() && silence_ns > process.limits.heartbeat_ns * MISSED_HEARTBEATS {
            let silence = format_ms(silence_ns);
            failure.text +=
                &format!("; the launching process was stopped: it sent no heartbeat for {silence}");
        }
    }

    fn apply_action(&mut self, process: &mut Process, action: leader::Action) {
        match action {
            leader::Action::Broadcast(message) => broadcast(process, message),
            leader::Action::Media(job) => self.send_media_job(process, job),
            leader::Action::SetMinEpoch { epoch } => self.media.set_min_epoch(epoch),
            leader::Action::Record(entry) => (self.record)(&entry),
            // The launcher gets this report only after the output is closed.
            leader::Action::Report(Message::Finished) => {}
            leader::Action::Report(mut message) => {
                if let Message::Failed(failure) = &mut message {
                    self.name_stopped_launcher(process, failure);
                }
                if let Message::Progress(progress) = &message {
                    (self.record)(&RecordEntry::Progress(progress.clone()));
                }
                report_to_launcher(process, &message);
            }
            leader::Action::Exit(outcome) => process.outcome = Some(outcome),
        }
    }

    fn send_media_job(&mut self, process: &mut Process, job: MediaJob) {
        if let Err(failure) = self.media.send_command(MediaCommand::Run(job)) {
            queue_failure(process, failure);
        }
    }

    /// Closes the output after every rank has ended.
    fn close_output(&mut self, process: &mut Process) -> Option<Failure> {
        let mut failure = self.media.send_command(MediaCommand::Finish).err();
        let (until, heartbeat_interval) =
            (Instant::now() + FINISH_LIMIT, Duration::from_nanos(process.limits.heartbeat_ns));
        let (mut last_heartbeat, mut events) = (Instant::now(), Vec::new());
        while failure.is_none() {
            process.watchdog.mark_alive();
            if self.stop.as_ref().is_some_and(|i| i.request_count() > 1) {
                return Some(second_stop_failure());
            }
            while let Some(event) = self.media.next_event() {
                match event {
                    MediaEvent::Finished => return None,
                    MediaEvent::Leader(leader::Event::Failed(f)) => failure = Some(f),
                    _ => {}
                }
            }
            if Instant::now() >= until {
                let text = "closing the output exceeded its time limit";
                failure.get_or_insert(Failure::new(FailureClass::Output, Some(0), &T0748, text));
            }
            if last_heartbeat.elapsed() >= heartbeat_interval {
                last_heartbeat = Instant::now();
                report_to_launcher(process, &Message::Heartbeat(Heartbeat { progress: 0 }));
            }
            process.boundary.reactor.wait_events(TICK_INTERVAL, &mut events);
            if events.drain(..).any(
                |e| matches!(e, ReactorEvent::Disconnected { link, .. } if Some(link) == process.launcher),
            ) {
                let text = "the launching process closed its socket while the output was being closed";
                failure = Some(Failure::new(FailureClass::LauncherGone, None, &T0749, text));
            }
        }
        if let Some(failure) = &failure {
            report_to_launcher(process, &Message::Failed(failure.clone()));
        }
        failure
    }
}

/// Sends a message to every led rank and to the local rank.
fn broadcast(process: &mut Process, message: Message) {
    if let Err(d) = process.boundary.send_to(&process.led, &message) {
        return queue_failure(process, Failure::from_diagnostic(FailureClass::Preflight, None, &d));
    }
    if process.local.is_some() {
        for message in intercept_local_message(process, MessageDirection::Outbound, message) {
            process.queue_local_event(worker::Event::Message(message));
        }
    }
}

/// Applies the interceptor to a message between the leader and its local rank.
fn intercept_local_message(process: &mut Process, to: MessageDirection, message: Message) -> Vec<Message> {
    let rank = process.rank;
    process.boundary.intercept_message(to, rank, message).unwrap_or_else(|d| {
        queue_failure(process, Failure { rank: Some(rank), ..protocol_failure(&d) });
        Vec::new()
    })
}

/// Reports to the launcher. If the launcher does not read, heartbeats are skipped, but the final
/// message is still queued.
fn report_to_launcher(process: &mut Process, message: &Message) {
    let (Some(launcher), Ok(frame)) = (process.launcher, Frame::new(process.rank, message)) else { return };
    let reactor = &mut process.boundary.reactor;
    match message {
        Message::Heartbeat(_) if !reactor.is_idle(launcher) => {}
        Message::Failed(_) | Message::Finished => reactor.send_dropping_queued(launcher, &frame),
        _ => reactor.send(launcher, &frame),
    }
}

fn queue_failure(process: &mut Process, failure: Failure) {
    process.queue_event(leader::Event::Failed(failure));
}

/// Builds the failure that ends a leader without a launcher on the second stop request. The other
/// ranks receive it as an abort.
fn second_stop_failure() -> Failure {
    Failure::new(FailureClass::LauncherGone, None, &T0749, "a second stop was requested")
}
