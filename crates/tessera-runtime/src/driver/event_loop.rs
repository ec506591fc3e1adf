//! The event loop of a rank's control thread, the same for the leader, the mesh leader and the
//! workers. A process supplies its state machine as a [`Machine`]; the loop owns everything that
//! such processes share, and feeds events one by one.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getppid, kill_process};
use tessera_base::{Diagnostic, Diagnostics};

use super::TICK_INTERVAL;
use super::boundary::{Interceptor, MessageBoundary};
use super::byte_stream::ByteStream;
use super::closed_peers::ClosedPeers;
use super::exit::Watchdog;
use super::link::{DisconnectReason, Frame};
use super::local_rank::{LocalRank, RankAction};
use super::reactor::{LinkId, Reactor, ReactorEvent};
use super::welcome::io_diagnostic;
use crate::codes::{T0743, T0750};
use crate::flight::FlightSink;
use crate::tripwire::{CheckSite, Tripwires};
use crate::wire::Message;
use crate::worker;
use crate::{Failure, FailureClass, Limits};

/// The state machine of a process, without the worker of its local rank, which the loop steps.
pub(super) trait Machine: Sized {
    /// An event of the state machine.
    type Event;

    /// Queues the events that follow from an event of a socket.
    fn queue_socket_event(&mut self, process: &mut RankProcess<Self::Event>, event: SocketEvent);

    /// Queues the events of the process's other threads, except for the engine's.
    fn poll_threads(&mut self, _process: &mut RankProcess<Self::Event>) {}

    /// Returns the clock event that ends every turn of the loop, if the state machine has a clock.
    fn tick_event(&self) -> Option<Self::Event> {
        None
    }

    /// Steps the state machine and carries out its actions.
    fn handle_event(&mut self, process: &mut RankProcess<Self::Event>, now_ns: u64, event: Self::Event);

    /// Carries out an action of the local rank.
    fn handle_rank_action(&mut self, process: &mut RankProcess<Self::Event>, action: RankAction);

    /// Runs at the end of every turn after which the session goes on.
    fn end_turn(&mut self) {}

    /// Ends the process's part in the session, in bounded time.
    fn close_session(event_loop: EventLoop<Self>, outcome: Option<Failure>) -> Option<Failure> {
        event_loop.process.wind_down(outcome)
    }
}

/// An event of a socket that the loop passes to the [`Machine`].
pub(super) enum SocketEvent {
    /// A message passed the boundary; `frame` is the one that carried it.
    Message { frame: Frame, message: Message },
    /// A rank's socket closed; the text describes how.
    Closed { rank: u32, how: String },
    /// A rank sent bytes that it must not send, or does not read.
    Failed { rank: u32, failure: Failure },
    /// The launcher sent a message, or its socket closed or carried no message.
    Launcher(Option<Message>),
}

/// An event for one of the state machines of a process.
enum QueuedEvent<E> {
    Machine(E),
    Local(worker::Event),
}

/// Everything that the processes of ranks have in common.
pub(super) struct RankProcess<E> {
    pub(super) rank: u32,
    pub(super) limits: Limits,
    pub(super) boundary: MessageBoundary,
    pub(super) watchdog: Watchdog,
    /// Links to the ranks that this process leads.
    pub(super) led: BTreeMap<u32, LinkId>,
    /// The rank that leads this process, and the link to it.
    pub(super) upstream: Option<(u32, LinkId)>,
    pub(super) launcher: Option<LinkId>,
    launcher_pid: Option<Pid>,
    pub(super) local: Option<LocalRank>,
    /// Led ranks whose sockets closed.
    pub(super) closed_peers: ClosedPeers,
    /// Set by a state machine that has ended: the failure, if any.
    pub(super) outcome: Option<Option<Failure>>,
    /// Events for the state machines, in order.
    queue: VecDeque<QueuedEvent<E>>,
    start: Instant,
}

impl<E> RankProcess<E> {
    /// Starts the watchdog. The process has no links and no local rank yet.
    ///
    /// # Errors
    /// T0750 if a thread or a descriptor is not available.
    pub(super) fn start(
        rank: u32,
        limits: &Limits,
        tripwires: Tripwires,
        flight: Option<Arc<dyn FlightSink>>,
        interceptor: Option<Interceptor>,
    ) -> Result<RankProcess<E>, Diagnostics> {
        let start = Instant::now();
        let watchdog =
            Watchdog::start_thread(limits).map_err(|e| vec![io_diagnostic("watchdog thread", &e)])?;
        let reactor = Reactor::new(limits).map_err(|e| vec![io_diagnostic("control sockets", &e)])?;
        Ok(RankProcess {
            rank,
            limits: limits.clone(),
            boundary: MessageBoundary { reactor, rank, flight, interceptor, tripwires },
            watchdog,
            led: BTreeMap::new(),
            upstream: None,
            launcher: None,
            launcher_pid: None,
            local: None,
            closed_peers: ClosedPeers::default(),
            outcome: None,
            queue: VecDeque::new(),
            start,
        })
    }

    /// Adds a link, such as the one to the rank that leads this process.
    pub(super) fn add_link(
        &mut self,
        stream: Box<dyn ByteStream>,
        origins: impl IntoIterator<Item = u32>,
    ) -> Result<LinkId, Diagnostics> {
        self.boundary.reactor.add_link(stream, origins).map_err(|e| vec![io_diagnostic("control socket", &e)])
    }

    /// Adds the link to the launcher, the parent of this process, if one started it. Without
    /// `origins`, the launcher sends nothing: the socket only signals, by closing, that the launcher
    /// ended.
    pub(super) fn add_launcher(
        &mut self,
        stream: Option<Box<dyn ByteStream>>,
        origins: impl IntoIterator<Item = u32>,
    ) -> Result<(), Diagnostics> {
        if let Some(stream) = stream {
            self.launcher = Some(self.add_link(stream, origins)?);
            self.launcher_pid = getppid();
            self.closed_peers.enable_delay();
        }
        Ok(())
    }

    pub(super) fn queue_event(&mut self, event: E) {
        self.queue.push_back(QueuedEvent::Machine(event));
    }

    pub(super) fn queue_local_event(&mut self, event: worker::Event) {
        self.queue.push_back(QueuedEvent::Local(event));
    }

    pub(super) fn send_upstream(&mut self, message: &Message) {
        let Some((rank, link)) = &self.upstream else { return };
        if let Err(d) = self.boundary.send_to([(rank, link)], message) {
            // A plan decides how many outputs a result has, so a result may exceed the wire's limits. Whoever waits
            // for it must learn why none arrives.
            let failure = protocol_failure(&d);
            match message {
                Message::Fault(_) | Message::Refused(_) => self.outcome = Some(Some(failure)),
                _ => {
                    self.queue_local_event(worker::Event::EngineFailed(failure.with_site(CheckSite::Worker)))
                }
            }
        }
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Limits the remaining lifetime of a failed process: long enough to unwind the engine, and
    /// short enough that the launcher still collects the exit status.
    pub(super) fn limit_lifetime(&self, status: i32) {
        let lifetime = Duration::from_nanos(self.limits.unwind_ns + self.limits.reap_ns / 4);
        self.watchdog.exit_within(lifetime, status);
    }

    /// Continues the launcher in case it is stopped, as by Ctrl-Z. Only the launcher can kill a rank
    /// that is stopped too, so a run that fails must not wait for a person to continue it.
    fn continue_launcher(&self) {
        // After the launcher's death this process has another parent.
        if let Some(pid) = self.launcher_pid.filter(|pid| getppid() == Some(*pid)) {
            // The signal has no effect on a launcher that runs.
            let _ = kill_process(pid, Signal::CONT);
        }
    }

    /// Shuts the process down in bounded time: sends what is queued and gives the engine time to
    /// return from its call.
    pub(super) fn wind_down(mut self, outcome: Option<Failure>) -> Option<Failure> {
        if let Some(failure) = &outcome {
            self.limit_lifetime(failure.class.exit_code());
            self.continue_launcher();
        }
        self.boundary.record_exit(outcome.as_ref());
        let until = Instant::now() + Duration::from_nanos(self.limits.unwind_ns);
        let mut ignored_events = Vec::new();
        while (self.local.as_mut().is_some_and(LocalRank::is_busy) || !self.boundary.reactor.is_flushed())
            && Instant::now() < until
        {
            self.watchdog.mark_alive();
            let left = until.saturating_duration_since(Instant::now());
            self.boundary.reactor.wait_events(TICK_INTERVAL.min(left), &mut ignored_events);
            ignored_events.clear();
        }
        outcome
    }
}

/// A process and its state machine.
pub(super) struct EventLoop<M: Machine> {
    pub(super) machine: M,
    pub(super) process: RankProcess<M::Event>,
}

impl<M: Machine> EventLoop<M> {
    /// Runs the process until its session ends; [`super::run_worker`] describes the return value.
    pub(super) fn run(mut self) -> Option<Failure> {
        let mut events = Vec::new();
        loop {
            self.process.watchdog.mark_alive();
            self.handle_socket_events(TICK_INTERVAL, &mut events);
            while let Some(event) = self.process.local.as_mut().and_then(LocalRank::next_event) {
                // A message that arrived before the event explains it: the engine of a rank that was
                // suspended fails because its peers have ended, and they said why.
                self.handle_socket_events(Duration::ZERO, &mut events);
                self.process.queue_local_event(event);
            }
            let EventLoop { machine, process } = &mut self;
            machine.poll_threads(process);
            for (rank, how) in process.closed_peers.take_due() {
                machine.queue_socket_event(process, SocketEvent::Closed { rank, how });
            }
            self.drain_queue();
            // Messages are handled before the clock: a peer is not late if its answer is already in
            // the inbox.
            let process = &mut self.process;
            process.queue.extend(self.machine.tick_event().map(QueuedEvent::Machine));
            process.queue.extend(process.local.as_ref().map(|l| QueuedEvent::Local(l.tick_event())));
            self.drain_queue();
            if let Some(outcome) = self.process.outcome.take() {
                return M::close_session(self, outcome);
            }
            self.machine.end_turn();
        }
    }

    /// Waits at most `limit` for events of sockets and handles them. `events` is empty before and
    /// after.
    fn handle_socket_events(&mut self, limit: Duration, events: &mut Vec<ReactorEvent>) {
        self.process.boundary.reactor.wait_events(limit, events);
        for event in events.drain(..) {
            // Each event is answered before the next one, so that no answer waits for the rest of
            // the batch.
            self.handle_reactor_event(event);
            self.drain_queue();
            if self.process.outcome.is_some() {
                break;
            }
        }
    }

    /// Steps the local rank through its queued events after the other state machine has ended: the
    /// last message aborts the engine.
    pub(super) fn finish_local_rank(&mut self) {
        while let Some(event) = self.process.queue.pop_front() {
            if let QueuedEvent::Local(event) = event {
                self.step_local_rank(event);
            }
        }
    }

    fn handle_reactor_event(&mut self, event: ReactorEvent) {
        let EventLoop { machine, process } = self;
        let event = match event {
            ReactorEvent::Frame { link, frame } if Some(link) == process.launcher => {
                SocketEvent::Launcher(frame.decode_message().ok())
            }
            ReactorEvent::Disconnected { link, .. } if Some(link) == process.launcher => {
                SocketEvent::Launcher(None)
            }
            ReactorEvent::Frame { frame, .. } => match process.boundary.receive_frame(&frame) {
                Ok(messages) => return self.handle_messages(&frame, messages),
                Err(d) => SocketEvent::Failed { rank: frame.origin(), failure: protocol_failure(&d) },
            },
            ReactorEvent::Disconnected { link, reason } => {
                let led = process.led.iter().find(|(_, l)| **l == link).map(|(rank, _)| *rank);
                let Some(rank) = led.or(process.upstream.map(|(rank, _)| rank)) else { return };
                match reason {
                    DisconnectReason::Closed(how) if led.is_some() => {
                        return process.closed_peers.add_closed(rank, how);
                    }
                    DisconnectReason::Closed(how) => SocketEvent::Closed { rank, how },
                    DisconnectReason::Broken(d) => {
                        SocketEvent::Failed { rank, failure: protocol_failure(&d) }
                    }
                    DisconnectReason::Stalled(how) => {
                        SocketEvent::Failed { rank, failure: stall_failure(rank, &how) }
                    }
                }
            }
            ReactorEvent::FdReady(_) => return,
        };
        machine.queue_socket_event(process, event);
    }

    fn handle_messages(&mut self, frame: &Frame, messages: Vec<Message>) {
        let EventLoop { machine, process } = self;
        for message in messages {
            // A failure that follows from the loss of a rank is not the root cause.
            if matches!(message, Message::Fault(_) | Message::Refused(_)) {
                for (rank, how) in process.closed_peers.take_all() {
                    machine.queue_socket_event(process, SocketEvent::Closed { rank, how });
                }
            }
            machine.queue_socket_event(process, SocketEvent::Message { frame: frame.clone(), message });
        }
    }

    /// Steps the state machines until no event is queued, or one of them has ended the process.
    fn drain_queue(&mut self) {
        while self.process.outcome.is_none()
            && let Some(event) = self.process.queue.pop_front()
        {
            match event {
                QueuedEvent::Machine(event) => {
                    let now_ns = self.process.now_ns();
                    self.machine.handle_event(&mut self.process, now_ns, event);
                }
                QueuedEvent::Local(event) => self.step_local_rank(event),
            }
        }
    }

    fn step_local_rank(&mut self, event: worker::Event) {
        let now_ns = self.process.now_ns();
        let Some(local) = &mut self.process.local else { return };
        for action in local.step_worker(now_ns, event) {
            self.machine.handle_rank_action(&mut self.process, action);
        }
    }
}

/// Builds the diagnostic of a mesh that needs other links than those of the launched processes.
pub(super) fn mesh_mismatch(mesh: String, world_size: u32, socket_count: usize) -> Diagnostics {
    let launched = format!("{world_size} ranks, {socket_count} sockets");
    let d = Diagnostic::error(&T0750, "the mesh does not match the launched processes");
    vec![d.with_label("mesh", mesh).with_label("launched", launched)]
}

/// Builds the failure for a frame that does not decode.
pub(super) fn protocol_failure(d: &Diagnostic) -> Failure {
    Failure::from_diagnostic(FailureClass::Protocol, None, d)
}

/// Builds the failure of a peer that does not read.
fn stall_failure(rank: u32, how: &str) -> Failure {
    Failure::new(
        FailureClass::Stall,
        Some(rank),
        &T0743,
        format!("rank {rank} does not read its messages: {how}"),
    )
}
