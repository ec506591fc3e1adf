//! A rank's own place in the mesh: its machine and the thread of its engine.

use std::sync::mpsc::Receiver;

use tessera_base::Diagnostics;

use super::engine_thread::{EngineEvent, EngineFactory, EngineThread};
use super::fds::failed;
use super::hub::Hub;
use crate::Failure;
use crate::engine::AbortHandle;
use crate::wire::Message;
use crate::worker::{Action, Event, Worker, WorkerConfig};

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
        Ok(LocalRank { machine, engine, inbox, abort: None, busy: false })
    }

    /// What the engine has said since it was last asked.
    pub(super) fn heard(&mut self) -> Option<Event> {
        Some(match self.inbox.try_recv().ok()? {
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

    /// The clock's event, with the engine's progress.
    pub(super) fn tick(&self) -> Event {
        Event::Tick { mark: self.engine.mark() }
    }

    pub(super) fn step(&mut self, now_ns: u64, event: Event) -> Vec<Todo> {
        let mut todo = Vec::new();
        for action in self.machine.step(now_ns, event) {
            match action {
                Action::Send(message) => todo.push(Todo::Send(message)),
                Action::Run(call) => self.busy = self.engine.run(call),
                Action::AbortEngine => self.abort(),
                Action::Exit(outcome) => todo.push(Todo::Exit(outcome)),
            }
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
