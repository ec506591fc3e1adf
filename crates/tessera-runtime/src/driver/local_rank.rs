//! A rank's own place in the mesh: its machine and the thread of its engine.

use std::sync::mpsc::{Receiver, TryRecvError};

use tessera_base::Diagnostics;

use super::engine_thread::{EngineEvent, EngineFactory, EngineThread};
use super::fds::failed;
use super::hub::Hub;
use crate::engine::{AbortHandle, T0745};
use crate::wire::Message;
use crate::worker::{Action, Event, Worker, WorkerConfig};
use crate::{Failure, FailureClass};

/// What the control thread has to do for it.
pub(super) enum Todo {
    Send(Message),
    Exit(Option<Failure>),
}

pub(super) struct LocalRank {
    machine: Worker,
    engine: EngineThread,
    inbox: Receiver<EngineEvent>,
    abort: Option<AbortHandle>,
    busy: bool,
    rank: u32,
    /// Whether it was told that the engine's thread has ended.
    over: bool,
}

impl LocalRank {
    pub(super) fn start(
        config: WorkerConfig,
        factory: EngineFactory,
        hub: &Hub,
    ) -> Result<LocalRank, Diagnostics> {
        let rank = config.rank;
        let machine = Worker::new(config.clone())?;
        let (post, inbox) = hub.inbox();
        let tell = move |event| {
            post.send(event);
        };
        let engine = EngineThread::spawn(rank, factory, config.census, config.cache, config.tripwires, tell)
            .map_err(|e| vec![failed("engine thread", &e)])?;
        Ok(LocalRank { machine, engine, inbox, abort: None, busy: false, rank, over: false })
    }

    /// What the engine has said since it was last asked.
    pub(super) fn heard(&mut self) -> Option<Event> {
        let event = match self.inbox.try_recv() {
            Ok(event) => event,
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => return self.lost(),
        };
        Some(match event {
            EngineEvent::Loaded { abort, parity, fingerprints } => {
                self.abort = Some(abort);
                Event::EngineReady { parity, fingerprints }
            }
            EngineEvent::NotLoaded(failure) => Event::EngineFailed(failure),
            EngineEvent::Ended(outcome) => {
                self.busy = false;
                Event::CallEnded(*outcome)
            }
        })
    }

    /// The engine's thread has ended without a word; told once.
    fn lost(&mut self) -> Option<Event> {
        self.busy = false;
        if std::mem::replace(&mut self.over, true) {
            return None;
        }
        let text = "the engine's thread has ended";
        Some(Event::EngineFailed(Failure::new(FailureClass::Engine, Some(self.rank), &T0745, text)))
    }

    /// The clock's event, with the engine's progress.
    pub(super) fn tick(&self) -> Event {
        Event::Tick { mark: self.engine.mark() }
    }

    pub(super) fn step(&mut self, now_ns: u64, event: Event) -> Vec<Todo> {
        let (mut todo, mut lost) = (Vec::new(), None);
        for action in self.machine.step(now_ns, event) {
            match action {
                Action::Send(message) => todo.push(Todo::Send(message)),
                Action::Run(call) => {
                    self.busy = self.engine.run(call);
                    if !self.busy {
                        lost = self.lost();
                    }
                }
                Action::AbortEngine => self.abort(),
                Action::Exit(outcome) => todo.push(Todo::Exit(outcome)),
            }
        }
        if let Some(event) = lost {
            todo.extend(self.step(now_ns, event));
        }
        todo
    }

    pub(super) fn abort(&self) {
        if let Some(abort) = &self.abort {
            abort();
        }
    }

    /// Whether a call runs.
    pub(super) fn busy(&mut self) -> bool {
        while self.busy && self.heard().is_some() {}
        self.busy
    }
}
