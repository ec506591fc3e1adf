//! The control thread of the leader's process: two machines, every socket, and no wait for engine or studio.

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};

use super::T0750;
use super::engine_thread::{EngineEvent, EngineFactory, EngineThread};
use super::exit::exit_within;
use super::fds::{Joined, failed};
use super::link::{self, LinkEnd, spawn_reader};
use super::studio_thread::{StreamRequest, StudioCommand, StudioEvent, StudioFactory, spawn_studio};
use super::worker_process::{EVENTS, TICK, broken};
use crate::decide::ChunkRequest;
use crate::engine::AbortHandle;
use crate::leader::{self, CallRecord, Leader, LeaderConfig, T0748};
use crate::wire::{self, Heartbeat, Message, Tensor};
use crate::worker::{self, Worker, WorkerConfig};
use crate::{Failure, FailureClass};

/// Longest time that closing the output may take.
const FINISH_LIMIT: Duration = Duration::from_secs(60);

/// What the door supplies.
pub struct LeaderParts {
    /// The leader's settings.
    pub config: LeaderConfig,
    /// Rank 0's own place in the mesh, if it has one.
    pub engine: Option<(WorkerConfig, EngineFactory)>,
    /// Makes the studio.
    pub studio: StudioFactory,
    /// What is wanted, chunk by chunk; asked for at most `d_in` ahead. May block.
    pub requests: Box<dyn Iterator<Item = StreamRequest> + Send>,
    /// Told of every finished call; must not block.
    pub record: Box<dyn FnMut(RecordEntry<'_>)>,
}

/// What goes into a run's record.
#[derive(Debug)]
pub enum RecordEntry<'a> {
    /// A call that every rank has finished.
    Call(&'a CallRecord),
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

enum Input {
    Leader(leader::Event),
    Local(worker::Event),
    Loaded(AbortHandle, worker::Event),
    Requested(Option<StreamRequest>),
    Studio(StudioEvent),
}

/// Runs the leader until the session ends; see [`super::run_worker`] for how it returns.
pub fn run_leader(joined: Joined, parts: LeaderParts) -> Result<Option<Failure>, Diagnostics> {
    Process::start(joined, parts)?.run()
}

struct Process {
    start: Instant,
    limits: crate::Limits,
    leader: Leader,
    local: Option<(Worker, EngineThread, u32)>,
    abort: Option<AbortHandle>,
    engine_busy: bool,
    peers: BTreeMap<u32, UnixStream>,
    launcher: UnixStream,
    inbox: Receiver<Input>,
    studio: SyncSender<StudioCommand>,
    /// Chunks of an epoch below this one are not written any more.
    fence: Arc<AtomicU32>,
    permits: SyncSender<()>,
    intake: Intake,
    record: Box<dyn FnMut(RecordEntry<'_>)>,
    /// Events for the machines that arose while acting on others.
    queue: VecDeque<Input>,
    outcome: Option<Option<Failure>>,
}

/// Requests on their way from the door to the leader: permits given out, and requests whose text is not made.
#[derive(Default)]
struct Intake {
    granted: usize,
    waiting: VecDeque<(StreamRequest, Option<Tensor>)>,
    over: bool,
}

impl Process {
    fn start(joined: Joined, parts: LeaderParts) -> Result<Process, Diagnostics> {
        let LeaderParts { config, engine, studio, requests, record } = parts;
        let limits = config.limits.clone();
        let io = |what: &str, e: &std::io::Error| vec![failed(what, e)];
        let leader = Leader::new(config.clone())?;
        let (events, inbox) = sync_channel::<Input>(EVENTS);
        let remote: Vec<u32> = (1..joined.welcome.world).collect();
        let mesh_is = config.ranks.iter().copied().filter(|r| *r != 0).eq(remote.iter().copied())
            && config.ranks.contains(&0) == engine.is_some();
        if !mesh_is || joined.sockets.len() != remote.len() {
            return Err(vec![
                Diagnostic::error(&T0750, "the mesh is not the processes that were launched")
                    .at("mesh", format!("ranks {:?}", config.ranks))
                    .at(
                        "launched",
                        format!("{} ranks, {} sockets", joined.welcome.world, joined.sockets.len()),
                    ),
            ]);
        }
        let mut peers = BTreeMap::new();
        for (rank, stream) in remote.into_iter().zip(joined.sockets) {
            link::set_write_limit(&stream, Duration::from_nanos(limits.ready_ns))
                .map_err(|e| io("control socket", &e))?;
            let reading = stream.try_clone().map_err(|e| io("control socket", &e))?;
            let events = events.clone();
            spawn_reader(format!("from rank {rank}"), reading, move |message| {
                let event = match message {
                    Ok((origin, message)) => leader::Event::Message { rank: origin, message },
                    Err(LinkEnd::Closed(how)) => leader::Event::Gone { rank, how },
                    Err(LinkEnd::Broken(d)) => {
                        leader::Event::Failed(Failure { rank: Some(rank), ..broken(&d) })
                    }
                };
                events.send(Input::Leader(event)).is_ok()
            })
            .map_err(|e| io("control socket", &e))?;
            peers.insert(rank, stream);
        }
        link::set_write_limit(&joined.launcher, Duration::from_nanos(limits.ready_ns))
            .map_err(|e| io("launcher socket", &e))?;
        let reading = joined.launcher.try_clone().map_err(|e| io("launcher socket", &e))?;
        let tell = events.clone();
        spawn_reader("from launcher".into(), reading, move |message| {
            let event = match message {
                Ok((_, Message::Stop)) => leader::Event::Stop,
                Ok(_) | Err(_) => leader::Event::LauncherGone,
            };
            tell.send(Input::Leader(event)).is_ok()
        })
        .map_err(|e| io("launcher socket", &e))?;
        let local = match engine {
            None => None,
            Some((config, factory)) => {
                let rank = config.rank;
                let machine = Worker::new(config.clone())?;
                let tell = events.clone();
                let thread = EngineThread::spawn(
                    rank,
                    factory,
                    config.census,
                    config.cache,
                    config.tripwires,
                    move |event| {
                        let _ = tell.send(match event {
                            EngineEvent::Loaded { abort, parity, fingerprints } => {
                                Input::Loaded(abort, worker::Event::EngineReady { parity, fingerprints })
                            }
                            EngineEvent::NotLoaded(f) => Input::Local(worker::Event::EngineFailed(f)),
                            EngineEvent::Ended(outcome) => Input::Local(worker::Event::CallEnded(outcome)),
                        });
                    },
                )
                .map_err(|e| io("engine thread", &e))?;
                Some((machine, thread, rank))
            }
        };
        let tell = events.clone();
        let fence = Arc::new(AtomicU32::new(0));
        let studio = spawn_studio(studio, Leader::studio_depth(&limits), Arc::clone(&fence), move |event| {
            let _ = tell.send(Input::Studio(event));
        })
        .map_err(|e| io("studio thread", &e))?;
        let permits = spawn_intake(requests, events).map_err(|e| io("intake thread", &e))?;
        Ok(Process {
            start: Instant::now(),
            limits,
            leader,
            local,
            abort: None,
            engine_busy: false,
            peers,
            launcher: joined.launcher,
            inbox,
            studio,
            fence,
            permits,
            intake: Intake::default(),
            record,
            queue: VecDeque::new(),
            outcome: None,
        })
    }

    fn run(mut self) -> Result<Option<Failure>, Diagnostics> {
        loop {
            match self.inbox.recv_timeout(TICK) {
                Ok(input) => self.queue.push_back(input),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    self.queue.push_back(Input::Leader(leader::Event::LauncherGone));
                }
            }
            // What has arrived comes before the clock: a peer is not late because its answer lies in the inbox.
            while let Ok(input) = self.inbox.try_recv() {
                self.queue.push_back(input);
            }
            self.queue.push_back(Input::Leader(leader::Event::Tick));
            if let Some((_, engine, _)) = &self.local {
                let mark = engine.mark();
                self.queue.push_back(Input::Local(worker::Event::Tick { mark }));
            }
            while let Some(input) = self.queue.pop_front() {
                self.take(input);
                if let Some(outcome) = self.outcome.take() {
                    return Ok(self.close(outcome));
                }
            }
            self.grant();
        }
    }

    fn take(&mut self, input: Input) {
        let now_ns = self.start.elapsed().as_nanos() as u64;
        match input {
            Input::Leader(event) => {
                for action in self.leader.step(now_ns, event) {
                    self.act(action);
                }
            }
            Input::Local(event) => self.local_step(now_ns, event),
            Input::Loaded(abort, event) => {
                self.abort = Some(abort);
                self.local_step(now_ns, event);
            }
            Input::Requested(request) => self.requested(request),
            Input::Studio(event) => self.studio_said(event),
        }
    }

    fn act(&mut self, action: leader::Action) {
        match action {
            leader::Action::Broadcast(message) => {
                match wire::encode(0, &message) {
                    Ok(frame) => {
                        for (rank, stream) in &self.peers {
                            if let Err(e) = link::send(stream, &frame) {
                                let gone = leader::Event::Gone { rank: *rank, how: e.to_string() };
                                self.queue.push_back(Input::Leader(gone));
                            }
                        }
                    }
                    Err(d) => {
                        let failure = Failure::from_diagnostic(FailureClass::Preflight, None, &d);
                        return self.queue.push_back(Input::Leader(leader::Event::Failed(failure)));
                    }
                }
                if self.local.is_some() {
                    self.queue.push_back(Input::Local(worker::Event::Message(message)));
                }
            }
            leader::Action::MakeContext { chunk, previous, opens_scene } => {
                self.command(StudioCommand::Context { chunk, previous, opens_scene });
            }
            leader::Action::Deliver { chunk, epoch, latents } => {
                self.command(StudioCommand::Deliver { chunk, epoch, latents });
            }
            leader::Action::Fence { epoch } => self.fence.store(epoch, Ordering::Release),
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
            leader::Action::Report(message) => self.report(&message),
            leader::Action::Exit(outcome) => self.outcome = Some(outcome),
        }
    }

    fn local_step(&mut self, now_ns: u64, event: worker::Event) {
        self.engine_busy &= !matches!(event, worker::Event::CallEnded(_));
        let Some((machine, engine, rank)) = &mut self.local else { return };
        for action in machine.step(now_ns, event) {
            match action {
                worker::Action::Send(message) => {
                    self.queue.push_back(Input::Leader(leader::Event::Message { rank: *rank, message }));
                }
                worker::Action::Run(call) => self.engine_busy = engine.run(call),
                worker::Action::AbortEngine => {
                    if let Some(abort) = &self.abort {
                        abort();
                    }
                }
                // The leader's machine decides when this process ends.
                worker::Action::Exit(_) => {}
            }
        }
    }

    fn requested(&mut self, request: Option<StreamRequest>) {
        let Some(request) = request else {
            self.intake.over = true;
            return self.hand_over();
        };
        if let Some(prompt) = request.prompt.clone() {
            self.command(StudioCommand::Text { prompt });
        }
        self.intake.waiting.push_back((request, None));
        self.hand_over();
    }

    /// Passes on, in order, the requests whose text is made.
    fn hand_over(&mut self) {
        while let Some((request, text)) = self.intake.waiting.pop_front() {
            if request.prompt.is_some() && text.is_none() {
                self.intake.waiting.push_front((request, text));
                return;
            }
            self.intake.granted -= 1;
            let StreamRequest { prompt, seed, cut } = request;
            let request = ChunkRequest { prompt_change: prompt.is_some(), seed, cut };
            self.queue.push_back(Input::Leader(leader::Event::Request { request, text }));
        }
        if self.intake.over {
            self.intake.over = false;
            self.queue.push_back(Input::Leader(leader::Event::NoMoreRequests));
        }
    }

    fn studio_said(&mut self, event: StudioEvent) {
        match event {
            StudioEvent::Text(tensor) => {
                let next = self.intake.waiting.iter_mut().find(|(r, t)| r.prompt.is_some() && t.is_none());
                if let Some((_, text)) = next {
                    *text = Some(tensor);
                }
                self.hand_over();
            }
            StudioEvent::Context { chunk, tensor } => {
                self.queue.push_back(Input::Leader(leader::Event::Context { chunk, tensor }));
            }
            StudioEvent::Delivered { chunk, frames } => {
                self.queue.push_back(Input::Leader(leader::Event::Delivered { chunk, frames }));
            }
            StudioEvent::Discarded { chunk } => {
                self.queue.push_back(Input::Leader(leader::Event::Discarded { chunk }));
            }
            StudioEvent::Finished => {}
            StudioEvent::Failed(failure) => {
                self.queue.push_back(Input::Leader(leader::Event::Failed(failure)));
            }
        }
    }

    /// Lets the door be asked for as many requests as the leader has room for.
    fn grant(&mut self) {
        while self.intake.granted < self.leader.wants() && self.permits.try_send(()).is_ok() {
            self.intake.granted += 1;
        }
    }

    fn command(&mut self, command: StudioCommand) {
        let why = match self.studio.try_send(command) {
            Ok(()) => return,
            Err(TrySendError::Full(_)) => "the studio's queue is full",
            Err(TrySendError::Disconnected(_)) => "the studio's thread has ended",
        };
        let failure = Failure::new(FailureClass::Output, Some(0), &T0748, why);
        self.queue.push_back(Input::Leader(leader::Event::Failed(failure)));
    }

    fn report(&self, message: &Message) {
        // A launcher that cannot be written to is one whose socket is about to report its end.
        drop(wire::encode(0, message).map(|frame| link::send(&self.launcher, &frame)));
    }

    fn close(mut self, outcome: Option<Failure>) -> Option<Failure> {
        let Some(failure) = outcome else { return self.finish_output() };
        let unwind = Duration::from_nanos(self.limits.unwind_ns);
        exit_within(unwind + Duration::from_nanos(self.limits.reap_ns) / 2, failure.class.exit_code());
        // The last broadcast went to the local rank through the queue; it aborts the engine there.
        while let Some(input) = self.queue.pop_front() {
            if let Input::Local(event) = input {
                self.local_step(self.start.elapsed().as_nanos() as u64, event);
            }
        }
        (self.record)(RecordEntry::Failed(&failure));
        let until = Instant::now() + unwind;
        while self.engine_busy {
            match self.inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Input::Local(worker::Event::CallEnded(_))) | Err(_) => self.engine_busy = false,
                Ok(_) => {}
            }
        }
        Some(failure)
    }

    /// Every rank has left; the output remains to be closed.
    fn finish_output(mut self) -> Option<Failure> {
        let _ = self.studio.try_send(StudioCommand::Finish);
        let until = Instant::now() + FINISH_LIMIT;
        let beat = Duration::from_nanos(self.limits.heartbeat_ns);
        let text = loop {
            if Instant::now() >= until {
                break "closing the output took too long".to_string();
            }
            match self.inbox.recv_timeout(beat) {
                Ok(Input::Studio(StudioEvent::Finished)) => {
                    self.report(&Message::Finished);
                    return None;
                }
                Ok(Input::Studio(StudioEvent::Failed(failure))) => break failure.text,
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => self.report(&Message::Heartbeat(Heartbeat { mark: 0 })),
                Err(RecvTimeoutError::Disconnected) => break "the studio's thread has ended".to_string(),
            }
        };
        let failure = Failure::new(FailureClass::Output, Some(0), &T0748, text);
        (self.record)(RecordEntry::Failed(&failure));
        self.report(&Message::Failed(failure.clone()));
        Some(failure)
    }
}

/// Asks the door for one request per permit, on a thread of its own because the door may block.
fn spawn_intake(
    mut requests: Box<dyn Iterator<Item = StreamRequest> + Send>,
    events: SyncSender<Input>,
) -> std::io::Result<SyncSender<()>> {
    let (permits, granted) = sync_channel::<()>(crate::Limits::MAX_DEPTH as usize);
    std::thread::Builder::new().name("intake".into()).spawn(move || {
        while granted.recv().is_ok() {
            let request = requests.next();
            let last = request.is_none();
            if events.send(Input::Requested(request)).is_err() || last {
                return;
            }
        }
    })?;
    Ok(permits)
}
