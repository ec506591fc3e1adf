//! The control thread of the mesh leader: the relay's machine, its own place in the mesh, and a socket to the
//! leader and to every member.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use tessera_base::{Diagnostic, Diagnostics};

use super::engine_thread::EngineFactory;
use super::exit::Keeper;
use super::fds::{Joined, failed};
use super::gate::{Gate, Tap};
use super::gone::Gone;
use super::hub::{Hub, HubEvent, LinkId};
use super::link::{Frame, LinkEnd};
use super::local_rank::{LocalRank, Todo};
use super::worker_process::{broken, leave, stuck};
use super::{T0750, TICK};
use crate::flight::Sink;
use crate::mesh_leader::{Action, Event, MeshLeader, MeshLeaderConfig};
use crate::wire::Message;
use crate::worker::{self, WorkerConfig};
use crate::{Failure, FailureClass, Limits};

/// What the door supplies.
pub struct MeshLeaderParts {
    /// The relay's settings.
    pub config: MeshLeaderConfig,
    /// This rank's own settings and its engine.
    pub engine: (WorkerConfig, EngineFactory),
    /// Keeps the rank's flight record.
    pub flight: Option<Arc<dyn Sink>>,
    /// Meddles with messages in a drill.
    pub tap: Option<Tap>,
}

/// Runs the mesh leader until the session ends; see [`super::run_worker`] for how it returns.
pub fn run_mesh_leader(joined: Joined, parts: MeshLeaderParts) -> Result<Option<Failure>, Diagnostics> {
    Process::start(joined, parts)?.run()
}

/// What the machines of this process are told; a frame that may be passed on comes along.
enum Input {
    Relay(Event, Option<Frame>),
    Local(worker::Event),
}

struct Process {
    start: Instant,
    limits: Limits,
    rank: u32,
    relay: MeshLeader,
    local: LocalRank,
    gate: Gate,
    keeper: Keeper,
    up: LinkId,
    members: BTreeMap<u32, LinkId>,
    launcher: Option<LinkId>,
    gone: Gone,
    queue: VecDeque<Input>,
    outcome: Option<Option<Failure>>,
}

impl Process {
    fn start(joined: Joined, parts: MeshLeaderParts) -> Result<Process, Diagnostics> {
        let MeshLeaderParts { config, engine: (worker, factory), flight, tap } = parts;
        let (rank, limits) = (config.rank, config.limits.clone());
        let io = |what: &str, e: &std::io::Error| vec![failed(what, e)];
        let relay = MeshLeader::new(config.clone())?;
        let keeper = Keeper::start(&limits).map_err(|e| io("keeper thread", &e))?;
        let mut hub = Hub::new(&limits).map_err(|e| io("control sockets", &e))?;
        let found = joined.links.len();
        let mut links = joined.links.into_iter();
        let Some(leader) = links.next().filter(|_| found == config.members.len() + 1) else {
            return Err(vec![
                Diagnostic::error(&T0750, "the mesh is not the processes that were launched")
                    .at("mesh", format!("mesh leader {rank}, members {:?}", config.members))
                    .at("launched", format!("{} ranks, {found} sockets", joined.welcome.world)),
            ]);
        };
        let up = hub.add(leader, [0]).map_err(|e| io("control socket", &e))?;
        let mut members = BTreeMap::new();
        for (member, stream) in config.members.iter().zip(links) {
            members.insert(*member, hub.add(stream, [*member]).map_err(|e| io("control socket", &e))?);
        }
        // The launcher tells it nothing; its socket exists to close.
        let launcher = joined
            .launcher
            .map(|stream| hub.add(stream, []))
            .transpose()
            .map_err(|e| io("launcher socket", &e))?;
        let local = LocalRank::start(worker, factory, &hub)?;
        Ok(Process {
            start: Instant::now(),
            limits,
            rank,
            relay,
            local,
            gate: Gate::new(rank, hub, flight, tap, config.tripwires.clone()),
            keeper,
            up,
            members,
            launcher,
            gone: Gone::new(launcher.is_some()),
            queue: VecDeque::new(),
            outcome: None,
        })
    }

    fn run(mut self) -> Result<Option<Failure>, Diagnostics> {
        let mut events = Vec::new();
        loop {
            self.keeper.round();
            self.gate.hub.wait(TICK, &mut events);
            for event in events.drain(..) {
                self.arrived(event);
                self.settle();
            }
            while let Some(event) = self.local.heard() {
                self.queue.push_back(Input::Local(event));
            }
            for (rank, how) in self.gone.due() {
                self.tell(Event::Gone { rank, how });
            }
            self.settle();
            self.queue.push_back(Input::Relay(Event::Tick, None));
            self.queue.push_back(Input::Local(self.local.tick()));
            self.settle();
            if let Some(outcome) = self.outcome.take() {
                return Ok(self.close(outcome));
            }
        }
    }

    /// Steps the machines until nothing is left to tell them, or the relay has ended.
    fn settle(&mut self) {
        while self.outcome.is_none()
            && let Some(input) = self.queue.pop_front()
        {
            let now_ns = self.now_ns();
            match input {
                Input::Relay(event, frame) => {
                    let message = match &event {
                        Event::Down(message) | Event::Up { message, .. } => Some(message.clone()),
                        _ => None,
                    };
                    for action in self.relay.step(now_ns, event) {
                        self.act(action, message.as_ref(), frame.as_ref());
                    }
                }
                Input::Local(event) => self.local_step(now_ns, event),
            }
        }
    }

    fn arrived(&mut self, event: HubEvent) {
        match event {
            HubEvent::Frame { link, frame } => match self.gate.receive(&frame) {
                Ok(messages) => {
                    for message in messages {
                        // What fails because a member is gone is not the cause.
                        if matches!(message, Message::Fault(_) | Message::Refused(_)) {
                            for (rank, how) in self.gone.all() {
                                self.tell(Event::Gone { rank, how });
                            }
                        }
                        let event = if link == self.up {
                            Event::Down(message)
                        } else {
                            Event::Up { origin: frame.origin(), message }
                        };
                        self.queue.push_back(Input::Relay(event, Some(frame.clone())));
                    }
                }
                Err(d) => self.fails(Failure { rank: Some(frame.origin()), ..broken(&d) }),
            },
            HubEvent::Ended { link, .. } if Some(link) == self.launcher => self.tell(Event::LauncherGone),
            HubEvent::Ended { link, end } => {
                let member = self.members.iter().find(|(_, l)| **l == link).map(|(r, _)| *r);
                let rank = member.unwrap_or(0);
                match (end, member) {
                    (LinkEnd::Closed(how), Some(rank)) => self.gone.saw(rank, how),
                    (LinkEnd::Closed(how), None) => self.tell(Event::LeaderGone(how)),
                    (LinkEnd::Broken(d), _) => self.fails(Failure { rank: Some(rank), ..broken(&d) }),
                    (LinkEnd::Stuck(how), _) => self.fails(stuck(rank, &how)),
                }
            }
            HubEvent::Watched(_) => {}
        }
    }

    /// `message` and `frame` are those of the event that is acted on.
    fn act(&mut self, action: Action, message: Option<&Message>, frame: Option<&Frame>) {
        match action {
            Action::ForwardDown => {
                if let Some(frame) = frame {
                    for link in self.members.values() {
                        self.gate.hub.send(*link, frame);
                    }
                }
                self.tell_local(message.cloned());
            }
            // What its own worker said has no frame yet.
            Action::ForwardUp => match (frame, message) {
                (Some(frame), _) => self.gate.hub.send(self.up, frame),
                (None, Some(message)) => self.send_up(message),
                (None, None) => {}
            },
            Action::Down(message) => {
                if let Err(d) = self.gate.send(&self.members, &message) {
                    self.fails(Failure::from_diagnostic(FailureClass::Preflight, None, &d));
                }
                self.tell_local(Some(message));
            }
            Action::Up(message) => self.send_up(&message),
            Action::Exit(outcome) => self.outcome = Some(outcome),
        }
    }

    fn send_up(&mut self, message: &Message) {
        // A message over the wire's limits is one that this build never makes.
        let _ = self.gate.send([(&0, &self.up)], message);
    }

    fn tell_local(&mut self, message: Option<Message>) {
        self.queue.extend(message.map(|m| Input::Local(worker::Event::Message(m))));
    }

    fn local_step(&mut self, now_ns: u64, event: worker::Event) {
        for todo in self.local.step(now_ns, event) {
            // The relay's machine decides when this process ends.
            let Todo::Send(message) = todo else { continue };
            self.tell(Event::Up { origin: self.rank, message });
        }
    }

    fn tell(&mut self, event: Event) {
        self.queue.push_back(Input::Relay(event, None));
    }

    fn fails(&mut self, failure: Failure) {
        self.tell(Event::Failed(failure));
    }

    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn close(mut self, outcome: Option<Failure>) -> Option<Failure> {
        // The end went to the local rank through the queue; it aborts the engine there.
        while let Some(input) = self.queue.pop_front() {
            if let Input::Local(event) = input {
                self.local_step(self.now_ns(), event);
            }
        }
        if outcome.is_some() {
            self.local.abort();
        }
        leave(self.gate, Some(self.local), &self.keeper, &self.limits, outcome)
    }
}
