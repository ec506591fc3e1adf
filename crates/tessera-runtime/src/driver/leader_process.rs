//! The control thread of the leader's process: its machine, its own place in the mesh if it has one, every
//! socket, and no wait for engine, studio, door or peer.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};

use super::engine_thread::EngineFactory;
use super::exit::Keeper;
use super::fds::{Joined, failed, outlive_launcher};
use super::gate::{Gate, Tap, Way};
use super::gone::Gone;
use super::hub::{Hub, HubEvent, LinkId};
use super::intake::{Intake, Taken};
use super::launcher::Interrupt;
use super::link::{Frame, LinkEnd};
use super::local_rank::{LocalRank, Todo};
use super::studio_thread::{Desk, StreamRequest, StudioCommand, StudioEvent, StudioFactory};
use super::worker_process::{bound, broken, leave, stuck};
use super::{T0750, TICK, Topology};
use crate::decide::ChunkRequest;
use crate::flight::{Mark, Sink};
use crate::leader::{self, CallRecord, Leader, LeaderConfig, T0748};
use crate::tripwire::Place;
use crate::wire::{Heartbeat, LAUNCHER, Message, Progress, Reload};
use crate::worker::{self, T0749, WorkerConfig};
use crate::{Failure, FailureClass, Limits};

/// Exit status of a process that was asked to stop.
const INTERRUPTED: i32 = 130;
/// Longest time that closing the output may take.
const FINISH_LIMIT: Duration = Duration::from_secs(60);

/// What the door supplies.
pub struct LeaderParts {
    /// The leader's settings.
    pub config: LeaderConfig,
    /// Rank 0's own place in the mesh; none where the leader stands outside.
    pub engine: Option<(WorkerConfig, EngineFactory)>,
    /// Who speaks with whom.
    pub topology: Topology,
    /// Makes the studio.
    pub studio: StudioFactory,
    /// What is wanted, chunk by chunk; asked for at most `d_in` ahead. May block.
    pub requests: Box<dyn Iterator<Item = StreamRequest> + Send>,
    /// Told what goes into the record; must not block.
    pub record: Box<dyn FnMut(RecordEntry<'_>)>,
    /// Stops a leader that nobody launched.
    pub interrupt: Option<Interrupt>,
    /// Keeps the rank's flight record.
    pub flight: Option<Arc<dyn Sink>>,
    /// Meddles with messages in a drill.
    pub tap: Option<Tap>,
}

/// What goes into a run's record.
#[derive(Debug)]
pub enum RecordEntry<'a> {
    /// A call that every rank has finished.
    Call(&'a CallRecord),
    /// A chunk was delivered.
    Progress(&'a Progress),
    /// Worth knowing.
    Note(&'a str),
    /// A request or a finished chunk was given up for a hard cut.
    Dropped {
        /// The request, counted from 0.
        request: u64,
        /// Its chunk, if it had become one.
        chunk: Option<u32>,
        /// The life of the caches that is over.
        epoch: u32,
        /// Where it was.
        why: &'static str,
    },
    /// A call was open when the run failed.
    Lost {
        /// Its id.
        call_id: u64,
        /// Its chunk.
        chunk: u32,
        /// Its life of the caches.
        epoch: u32,
        /// Ranks that were ready.
        ready: &'a [u32],
        /// Ranks that had finished.
        done: &'a [u32],
    },
    /// The run failed.
    Failed(&'a Failure),
}

/// Runs the leader until the session ends; see [`super::run_worker`] for how it returns.
pub fn run_leader(mut joined: Joined, parts: LeaderParts) -> Result<Option<Failure>, Diagnostics> {
    if let Err(found) = Leader::new(parts.config.clone()) {
        if let Some(d) = found.first() {
            let failure = Failure::from_diagnostic(FailureClass::Preflight, Some(0), d).at(Place::Leader);
            if joined.refuse(&failure) {
                return Ok(Some(failure));
            }
        }
        return Err(found);
    }
    Process::start(joined, parts)?.run()
}

/// What the machines of this process are told.
enum Input {
    Leader(leader::Event),
    Local(worker::Event),
}

struct Process {
    start: Instant,
    limits: Limits,
    leader: Leader,
    rank: u32,
    local: Option<LocalRank>,
    gate: Gate,
    keeper: Keeper,
    peers: BTreeMap<u32, LinkId>,
    launcher: Option<LinkId>,
    desk: Desk,
    intake: Intake,
    record: Box<dyn FnMut(RecordEntry<'_>)>,
    interrupt: Option<Interrupt>,
    interrupts: u32,
    gone: Gone,
    /// Events for the machines, in order.
    queue: VecDeque<Input>,
    outcome: Option<Option<Failure>>,
}

impl Process {
    fn start(joined: Joined, parts: LeaderParts) -> Result<Process, Diagnostics> {
        let LeaderParts { config, engine, topology, studio, requests, record, interrupt, flight, tap } =
            parts;
        let limits = config.limits.clone();
        let io = |what: &str, e: &std::io::Error| vec![failed(what, e)];
        let leader = Leader::new(config.clone())?;
        let keeper = Keeper::start(&limits).map_err(|e| io("keeper thread", &e))?;
        let mut hub = Hub::new(&limits).map_err(|e| io("control sockets", &e))?;
        let (rank, world) = (joined.welcome.rank, joined.welcome.world);
        let led: Vec<u32> = topology.links(world).iter().filter(|l| l.0 == rank).map(|l| l.1).collect();
        let inside = topology == Topology::Mesh;
        let mesh_is = config.ranks.iter().copied().eq(u32::from(!inside)..world)
            && inside == engine.is_some()
            && joined.links.len() == led.len();
        if !mesh_is {
            return Err(vec![
                Diagnostic::error(&T0750, "the mesh is not the processes that were launched")
                    .at("mesh", format!("ranks {:?}, {topology:?}", config.ranks))
                    .at("launched", format!("{world} ranks, {} sockets", joined.links.len())),
            ]);
        }
        let mut peers = BTreeMap::new();
        for (peer, stream) in led.into_iter().zip(joined.links) {
            // The mesh leader passes on what its members say.
            let origins = if inside { peer..=peer } else { peer..=world - 1 };
            let link = hub.add(stream, origins).map_err(|e| io("control socket", &e))?;
            peers.insert(peer, link);
        }
        let launcher = joined
            .launcher
            .map(|stream| hub.add(stream, [LAUNCHER]))
            .transpose()
            .map_err(|e| io("launcher socket", &e))?;
        // A launcher that is stopped by hand reads later.
        launcher.into_iter().for_each(|l| hub.set_patient(l));
        let local = engine.map(|(config, factory)| LocalRank::start(config, factory, &hub)).transpose()?;
        let desk =
            Desk::spawn(studio, Leader::studio_depth(&limits), &hub).map_err(|e| io("studio thread", &e))?;
        let intake = Intake::spawn(requests, &hub).map_err(|e| io("intake thread", &e))?;
        interrupt.iter().for_each(|i| i.wakes(&hub));
        if launcher.is_some() {
            outlive_launcher();
        }
        Ok(Process {
            start: Instant::now(),
            limits,
            leader,
            rank,
            local,
            gate: Gate::new(rank, hub, flight, tap, config.tripwires.clone()),
            keeper,
            peers,
            launcher,
            desk,
            intake,
            record,
            interrupt,
            interrupts: 0,
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
            self.threads();
            for (rank, how) in self.gone.due() {
                self.tell(leader::Event::Gone { rank, how });
            }
            self.settle();
            // What has arrived comes before the clock: a peer is not late because its answer lies in the inbox.
            self.queue.push_back(Input::Leader(leader::Event::Tick));
            if let Some(local) = &self.local {
                self.queue.push_back(Input::Local(local.tick()));
            }
            self.settle();
            if let Some(outcome) = self.outcome.take() {
                return Ok(self.close(outcome));
            }
            self.intake.grant(self.leader.wants());
        }
    }

    /// Steps the machines until nothing is left to tell them, or one has ended.
    fn settle(&mut self) {
        while self.outcome.is_none()
            && let Some(input) = self.queue.pop_front()
        {
            let now_ns = self.start.elapsed().as_nanos() as u64;
            match input {
                Input::Leader(event) => {
                    for action in self.leader.step(now_ns, event) {
                        self.act(action);
                    }
                }
                Input::Local(event) => self.local_step(now_ns, event),
            }
        }
    }

    fn arrived(&mut self, event: HubEvent) {
        match event {
            HubEvent::Frame { link, frame } if Some(link) == self.launcher => match frame.message() {
                Ok(Message::Stop) => self.tell(leader::Event::Stop),
                _ => self.tell(leader::Event::LauncherGone),
            },
            HubEvent::Ended { link, .. } if Some(link) == self.launcher => {
                self.tell(leader::Event::LauncherGone);
            }
            HubEvent::Frame { frame, .. } => match self.gate.receive(&frame) {
                Ok(messages) => {
                    for message in messages {
                        // What fails because a rank is gone is not the cause.
                        if matches!(message, Message::Fault(_) | Message::Refused(_)) {
                            for (rank, how) in self.gone.all() {
                                self.tell(leader::Event::Gone { rank, how });
                            }
                        }
                        self.tell(leader::Event::Message { rank: frame.origin(), message });
                    }
                }
                Err(d) => self.fails(Failure { rank: Some(frame.origin()), ..broken(&d) }),
            },
            HubEvent::Ended { link, end } => {
                let Some(rank) = self.peers.iter().find(|(_, l)| **l == link).map(|(r, _)| *r) else {
                    return;
                };
                match end {
                    LinkEnd::Closed(how) => self.gone.saw(rank, how),
                    LinkEnd::Broken(d) => self.fails(Failure { rank: Some(rank), ..broken(&d) }),
                    LinkEnd::Stuck(how) => self.fails(stuck(rank, &how)),
                }
            }
            HubEvent::Watched(_) => {}
        }
    }

    /// What the other threads of this process have said.
    fn threads(&mut self) {
        while let Some(event) = self.local.as_mut().and_then(LocalRank::heard) {
            self.queue.push_back(Input::Local(event));
        }
        let mut taken = Vec::new();
        while let Some(event) = self.desk.heard() {
            match event {
                StudioEvent::Text(tensor) => self.intake.text(tensor, &mut taken),
                StudioEvent::Context { chunk, tensor } => {
                    self.tell(leader::Event::Context { chunk, tensor });
                }
                StudioEvent::Delivered { chunk, frames } => {
                    self.tell(leader::Event::Delivered { chunk, frames });
                }
                StudioEvent::Discarded { chunk } => self.tell(leader::Event::Discarded { chunk }),
                StudioEvent::Made | StudioEvent::Finished => {}
                StudioEvent::Failed(failure) => self.fails(failure),
            }
        }
        let now_ns = self.start.elapsed().as_nanos() as u64;
        if let Some(failure) = self.desk.stuck(now_ns, &self.limits) {
            self.fails(failure);
        }
        self.intake.heard(&mut taken);
        for taken in taken {
            match taken {
                Taken::Text(prompt) => self.command(StudioCommand::Text { prompt }),
                Taken::Request(request, text) => {
                    let StreamRequest { prompt, seed, cut, reload } = request;
                    if let Some(Reload { source, weights }) = reload {
                        self.tell(leader::Event::Reload { source, weights });
                    }
                    let request = ChunkRequest { prompt_change: prompt.is_some(), seed, cut };
                    self.tell(leader::Event::Request { request, text });
                }
                Taken::Over => self.tell(leader::Event::NoMoreRequests),
            }
        }
        if let Some(interrupt) = &self.interrupt {
            let count = interrupt.count();
            if count > self.interrupts {
                self.interrupts = count;
                // A second one that reaches every rank reaches this one too.
                self.gone.keep_back();
                if count == 1 {
                    self.tell(leader::Event::Stop);
                } else {
                    self.fails(asked_twice());
                }
            }
        }
    }

    fn act(&mut self, action: leader::Action) {
        match action {
            leader::Action::Broadcast(message) => {
                if let Err(d) = self.gate.send(&self.peers, &message) {
                    return self.fails(Failure::from_diagnostic(FailureClass::Preflight, None, &d));
                }
                if self.local.is_some() {
                    match self.gate.pass(Way::Out, self.rank, message) {
                        Ok(messages) => self
                            .queue
                            .extend(messages.into_iter().map(|m| Input::Local(worker::Event::Message(m)))),
                        Err(d) => self.fails(Failure { rank: Some(self.rank), ..broken(&d) }),
                    }
                }
            }
            leader::Action::MakeContext { chunk, previous, opens_scene } => {
                self.command(StudioCommand::Context { chunk, previous, opens_scene });
            }
            leader::Action::Deliver { chunk, epoch, latents } => {
                self.command(StudioCommand::Deliver { chunk, epoch, latents });
            }
            leader::Action::Fence { epoch } => self.desk.fence(epoch),
            leader::Action::Dropped { request, chunk, epoch, why } => {
                (self.record)(RecordEntry::Dropped { request, chunk, epoch, why });
            }
            leader::Action::Lost { call_id, chunk, epoch, ready, done } => {
                (self.record)(RecordEntry::Lost { call_id, chunk, epoch, ready: &ready, done: &done });
            }
            leader::Action::Record(record) => (self.record)(RecordEntry::Call(&record)),
            leader::Action::Note(note) => (self.record)(RecordEntry::Note(&note)),
            // Told once the output is closed.
            leader::Action::Report(Message::Finished) => {}
            leader::Action::Report(message) => {
                if let Message::Progress(progress) = &message {
                    (self.record)(RecordEntry::Progress(progress));
                }
                self.report(&message);
            }
            leader::Action::Exit(outcome) => self.outcome = Some(outcome),
        }
    }

    fn local_step(&mut self, now_ns: u64, event: worker::Event) {
        let Some(local) = &mut self.local else { return };
        for todo in local.step(now_ns, event) {
            // The leader's machine decides when this process ends.
            let Todo::Send(message) = todo else { continue };
            self.gate.mark(Mark::sent(self.rank, &message));
            match self.gate.pass(Way::In, self.rank, message) {
                Ok(messages) => {
                    for message in messages {
                        self.tell(leader::Event::Message { rank: self.rank, message });
                    }
                }
                Err(d) => self.fails(Failure { rank: Some(self.rank), ..broken(&d) }),
            }
        }
    }

    fn tell(&mut self, event: leader::Event) {
        self.queue.push_back(Input::Leader(event));
    }

    fn fails(&mut self, failure: Failure) {
        self.tell(leader::Event::Failed(failure));
    }

    fn command(&mut self, command: StudioCommand) {
        if let Err(failure) = self.desk.command(command) {
            self.fails(failure);
        }
    }

    /// Tells the launcher. One that does not read now hears no sign of life, but hears how it ended.
    fn report(&mut self, message: &Message) {
        let (Some(launcher), Ok(frame)) = (self.launcher, Frame::new(self.rank, message)) else { return };
        match message {
            Message::Heartbeat(_) if !self.gate.hub.idle(launcher) => {}
            Message::Failed(_) | Message::Finished => self.gate.hub.send_last(launcher, &frame),
            _ => self.gate.hub.send(launcher, &frame),
        }
    }

    fn close(mut self, outcome: Option<Failure>) -> Option<Failure> {
        let outcome = outcome.or_else(|| self.finish_output());
        let Some(failure) = outcome else {
            self.report(&Message::Finished);
            self.gate.ends(None);
            // A launcher that is stopped reads later; until then this process shows that it goes round.
            let until = Instant::now() + FINISH_LIMIT;
            while !self.gate.hub.flushed() && Instant::now() < until {
                self.keeper.round();
                self.gate.hub.flush(TICK);
            }
            return None;
        };
        // Ranks that the second request reached too are gone because of it.
        let asked_twice = self.interrupt.as_ref().is_some_and(|i| i.count() > 1)
            && matches!(failure.class, FailureClass::LauncherGone | FailureClass::RankDied);
        let status = if asked_twice { INTERRUPTED } else { failure.class.exit_code() };
        self.keeper.exit_within(bound(&self.limits), status);
        // The last broadcast went to the local rank through the queue; it aborts the engine there.
        while let Some(input) = self.queue.pop_front() {
            if let Input::Local(event) = input {
                self.local_step(self.start.elapsed().as_nanos() as u64, event);
            }
        }
        if asked_twice {
            // The others were told to leave; nothing failed.
            self.gate.hub.flush(TICK);
            return leave(self.gate, self.local, &self.keeper, &self.limits, None);
        }
        self.gate.mark(Some(Mark::failed(&failure)));
        // Whatever the record waits for, peers and launcher hear of it first.
        self.gate.hub.flush(TICK);
        (self.record)(RecordEntry::Failed(&failure));
        leave(self.gate, self.local, &self.keeper, &self.limits, Some(failure))
    }

    /// Every rank has left; the output remains to be closed.
    fn finish_output(&mut self) -> Option<Failure> {
        let mut why = self.desk.command(StudioCommand::Finish).err();
        let (until, beat) = (Instant::now() + FINISH_LIMIT, Duration::from_nanos(self.limits.heartbeat_ns));
        let (mut beaten, mut events) = (Instant::now(), Vec::new());
        while why.is_none() {
            self.keeper.round();
            if self.interrupt.as_ref().is_some_and(|i| i.count() > 1) {
                return Some(asked_twice());
            }
            while let Some(event) = self.desk.heard() {
                match event {
                    StudioEvent::Finished => return None,
                    StudioEvent::Failed(failure) => why = Some(failure),
                    _ => {}
                }
            }
            if Instant::now() >= until {
                let text = "closing the output took too long";
                why.get_or_insert(Failure::new(FailureClass::Output, Some(0), &T0748, text));
            }
            if beaten.elapsed() >= beat {
                beaten = Instant::now();
                self.report(&Message::Heartbeat(Heartbeat { mark: 0 }));
            }
            self.gate.hub.wait(TICK, &mut events);
            if events
                .drain(..)
                .any(|e| matches!(e, HubEvent::Ended { link, .. } if Some(link) == self.launcher))
            {
                let text = "the launching process closed its socket while the output was closed";
                why = Some(Failure::new(FailureClass::LauncherGone, None, &T0749, text));
            }
        }
        if let Some(failure) = &why {
            self.report(&Message::Failed(failure.clone()));
        }
        why
    }
}

/// What ends a leader that nobody launched when it is asked to stop again; the other ranks hear it as a failure.
fn asked_twice() -> Failure {
    Failure::new(FailureClass::LauncherGone, None, &T0749, "a second request to stop came")
}
