//! The control thread of the mesh leader. It runs the relay's state machine, the local rank, and
//! one socket each to the leader and to every member.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use tessera_base::{Diagnostic, Diagnostics};

use super::boundary::{Interceptor, MessageBoundary};
use super::closed_peers::ClosedPeers;
use super::engine_thread::EngineFactory;
use super::exit::Watchdog;
use super::link::{DisconnectReason, Frame};
use super::local_rank::{LocalRank, RankAction};
use super::reactor::{LinkId, Reactor, ReactorEvent};
use super::welcome::{JoinedRank, io_diagnostic};
use super::worker_process::{protocol_failure, stall_failure, wind_down};
use super::{T0750, TICK_INTERVAL};
use crate::flight::FlightSink;
use crate::mesh_leader::{Action, Event, MeshLeader, MeshLeaderConfig};
use crate::wire::Message;
use crate::worker::{self, WorkerConfig};
use crate::{Failure, FailureClass, Limits};

/// The application's parts of the mesh leader's process.
pub struct MeshLeaderParts {
    /// Settings of the relay.
    pub config: MeshLeaderConfig,
    /// Worker settings and engine of this rank.
    pub local_rank: (WorkerConfig, EngineFactory),
    /// Stores the rank's flight record.
    pub flight: Option<Arc<dyn FlightSink>>,
    /// Alters messages in a drill.
    pub interceptor: Option<Interceptor>,
}

/// Runs the mesh leader until the session ends; [`super::run_worker`] describes the return values.
///
/// # Errors
/// The diagnostics of an invalid configuration, or T0750.
pub fn run_mesh_leader(joined: JoinedRank, parts: MeshLeaderParts) -> Result<Option<Failure>, Diagnostics> {
    MeshLeaderProcess::start_process(joined, parts)?.run_loop()
}

/// An event for one of the state machines of this process; a relay event carries the frame that may
/// be forwarded.
enum MeshProcessEvent {
    Relay(Event, Option<Frame>),
    Local(worker::Event),
}

struct MeshLeaderProcess {
    start: Instant,
    limits: Limits,
    rank: u32,
    relay: MeshLeader,
    local: LocalRank,
    boundary: MessageBoundary,
    watchdog: Watchdog,
    upstream: LinkId,
    members: BTreeMap<u32, LinkId>,
    launcher: Option<LinkId>,
    closed_peers: ClosedPeers,
    queue: VecDeque<MeshProcessEvent>,
    outcome: Option<Option<Failure>>,
}

impl MeshLeaderProcess {
    fn start_process(joined: JoinedRank, parts: MeshLeaderParts) -> Result<MeshLeaderProcess, Diagnostics> {
        let MeshLeaderParts { config, local_rank: (worker, factory), flight, interceptor: tap } = parts;
        let (rank, limits) = (config.rank, config.limits.clone());
        let io = |what: &str, e: &std::io::Error| vec![io_diagnostic(what, e)];
        let relay = MeshLeader::new(config.clone())?;
        let watchdog = Watchdog::start_thread(&limits).map_err(|e| io("watchdog thread", &e))?;
        let mut reactor = Reactor::new(&limits).map_err(|e| io("control sockets", &e))?;
        let socket_count = joined.links.len();
        let mut links = joined.links.into_iter();
        let Some(leader) = links.next().filter(|_| socket_count == config.members.len() + 1) else {
            return Err(vec![
                Diagnostic::error(&T0750, "the mesh does not match the launched processes")
                    .with_label("mesh", format!("mesh leader {rank}, members {:?}", config.members))
                    .with_label(
                        "launched",
                        format!("{} ranks, {socket_count} sockets", joined.welcome.world_size),
                    ),
            ]);
        };
        let upstream = reactor.add_link(leader, [0]).map_err(|e| io("control socket", &e))?;
        let mut members = BTreeMap::new();
        for (member, stream) in config.members.iter().zip(links) {
            members
                .insert(*member, reactor.add_link(stream, [*member]).map_err(|e| io("control socket", &e))?);
        }
        // The launcher sends nothing to the mesh leader; the socket only signals, by closing, that
        // the launcher ended.
        let launcher = joined
            .launcher
            .map(|stream| reactor.add_link(stream, []))
            .transpose()
            .map_err(|e| io("launcher socket", &e))?;
        let local = LocalRank::start(worker, factory, &reactor)?;
        Ok(MeshLeaderProcess {
            start: Instant::now(),
            limits,
            rank,
            relay,
            local,
            boundary: MessageBoundary::new(rank, reactor, flight, tap, config.tripwires.clone()),
            watchdog,
            upstream,
            members,
            launcher,
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
            while let Some(event) = self.local.next_event() {
                self.queue.push_back(MeshProcessEvent::Local(event));
            }
            for (rank, how) in self.closed_peers.take_due() {
                self.queue_relay_event(Event::Gone { rank, how });
            }
            self.drain_queue();
            self.queue.push_back(MeshProcessEvent::Relay(Event::Tick, None));
            self.queue.push_back(MeshProcessEvent::Local(self.local.tick_event()));
            self.drain_queue();
            if let Some(outcome) = self.outcome.take() {
                return Ok(self.close_session(outcome));
            }
        }
    }

    /// Steps the state machines until no event is queued, or the relay has ended.
    fn drain_queue(&mut self) {
        while self.outcome.is_none()
            && let Some(input) = self.queue.pop_front()
        {
            let now_ns = self.now_ns();
            match input {
                MeshProcessEvent::Relay(event, frame) => {
                    let message = match &event {
                        Event::Down(message) | Event::Up { message, .. } => Some(message.clone()),
                        _ => None,
                    };
                    for action in self.relay.handle_event(now_ns, event) {
                        self.apply_action(action, message.as_ref(), frame.as_ref());
                    }
                }
                MeshProcessEvent::Local(event) => self.step_local_rank(now_ns, event),
            }
        }
    }

    fn handle_reactor_event(&mut self, event: ReactorEvent) {
        match event {
            ReactorEvent::Frame { link, frame } => match self.boundary.receive_frame(&frame) {
                Ok(messages) => {
                    for message in messages {
                        // A failure that follows from the loss of a member is not the root cause.
                        if matches!(message, Message::Fault(_) | Message::Refused(_)) {
                            for (rank, how) in self.closed_peers.take_all() {
                                self.queue_relay_event(Event::Gone { rank, how });
                            }
                        }
                        let event = if link == self.upstream {
                            Event::Down(message)
                        } else {
                            Event::Up { origin: frame.origin(), message }
                        };
                        self.queue.push_back(MeshProcessEvent::Relay(event, Some(frame.clone())));
                    }
                }
                Err(d) => self.queue_failure(Failure { rank: Some(frame.origin()), ..protocol_failure(&d) }),
            },
            ReactorEvent::Disconnected { link, .. } if Some(link) == self.launcher => {
                self.queue_relay_event(Event::LauncherGone)
            }
            ReactorEvent::Disconnected { link, reason: end } => {
                let member = self.members.iter().find(|(_, l)| **l == link).map(|(r, _)| *r);
                let rank = member.unwrap_or(0);
                match (end, member) {
                    (DisconnectReason::Closed(how), Some(rank)) => self.closed_peers.add_closed(rank, how),
                    (DisconnectReason::Closed(how), None) => self.queue_relay_event(Event::LeaderGone(how)),
                    (DisconnectReason::Broken(d), _) => {
                        self.queue_failure(Failure { rank: Some(rank), ..protocol_failure(&d) })
                    }
                    (DisconnectReason::Stalled(how), _) => self.queue_failure(stall_failure(rank, &how)),
                }
            }
            ReactorEvent::FdReady(_) => {}
        }
    }

    /// Carries out an action; `message` and `frame` belong to the event that caused it.
    fn apply_action(&mut self, action: Action, message: Option<&Message>, frame: Option<&Frame>) {
        match action {
            Action::ForwardDown => {
                if let Some(frame) = frame {
                    for link in self.members.values() {
                        self.boundary.reactor.send(*link, frame);
                    }
                }
                self.queue_local_message(message.cloned());
            }
            // A message from the local worker has no frame yet.
            Action::ForwardUp => match (frame, message) {
                (Some(frame), _) => self.boundary.reactor.send(self.upstream, frame),
                (None, Some(message)) => self.send_upstream(message),
                (None, None) => {}
            },
            Action::Down(message) => {
                if let Err(d) = self.boundary.send_to(&self.members, &message) {
                    self.queue_failure(Failure::from_diagnostic(FailureClass::Preflight, None, &d));
                }
                self.queue_local_message(Some(message));
            }
            Action::Up(message) => self.send_upstream(&message),
            Action::Exit(outcome) => self.outcome = Some(outcome),
        }
    }

    fn send_upstream(&mut self, message: &Message) {
        // Sending fails only for a message over the wire's limits, and this build never creates
        // such a message.
        let _ = self.boundary.send_to([(&0, &self.upstream)], message);
    }

    fn queue_local_message(&mut self, message: Option<Message>) {
        self.queue.extend(message.map(|m| MeshProcessEvent::Local(worker::Event::Message(m))));
    }

    fn step_local_rank(&mut self, now_ns: u64, event: worker::Event) {
        for action in self.local.step_worker(now_ns, event) {
            // The relay's state machine decides when this process ends.
            let RankAction::Send(message) = action else { continue };
            self.queue_relay_event(Event::Up { origin: self.rank, message });
        }
    }

    fn queue_relay_event(&mut self, event: Event) {
        self.queue.push_back(MeshProcessEvent::Relay(event, None));
    }

    fn queue_failure(&mut self, failure: Failure) {
        self.queue_relay_event(Event::Failed(failure));
    }

    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn close_session(mut self, outcome: Option<Failure>) -> Option<Failure> {
        // The last message is still in the local rank's queue; that message aborts the engine.
        while let Some(input) = self.queue.pop_front() {
            if let MeshProcessEvent::Local(event) = input {
                self.step_local_rank(self.now_ns(), event);
            }
        }
        if outcome.is_some() {
            self.local.abort_engine();
        }
        wind_down(self.boundary, Some(self.local), &self.watchdog, &self.limits, outcome)
    }
}
