//! The part of the mesh that runs in this process: a worker state machine and its engine thread.

use std::sync::mpsc::{Receiver, TryRecvError};

use tessera_base::Diagnostics;

use super::engine_thread::{EngineEvent, EngineFactory, EngineThread};
use super::reactor::Reactor;
use super::welcome::io_diagnostic;
use crate::codes::T0745;
use crate::engine::AbortHandle;
use crate::wire::Message;
use crate::worker::{Action, Event, Worker, WorkerConfig};
use crate::{Failure, FailureClass};

/// Actions of the local rank that the control thread must carry out.
pub(super) enum RankAction {
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
    thread_end_reported: bool,
}

impl LocalRank {
    pub(super) fn start(
        config: WorkerConfig,
        factory: EngineFactory,
        reactor: &Reactor,
    ) -> Result<LocalRank, Diagnostics> {
        let rank = config.rank;
        let machine = Worker::new(config.clone())?;
        let (post, inbox) = reactor.new_inbox();
        let on_event = move |event| {
            post.send(event);
        };
        let engine = EngineThread::spawn(
            rank,
            factory,
            config.programs,
            config.session_spec.state_spec(),
            config.tripwires,
            on_event,
        )
        .map_err(|e| vec![io_diagnostic("engine thread", &e)])?;
        Ok(LocalRank { machine, engine, inbox, abort: None, busy: false, rank, thread_end_reported: false })
    }

    /// Returns the next event from the engine thread, if any.
    pub(super) fn next_event(&mut self) -> Option<Event> {
        let event = match self.inbox.try_recv() {
            Ok(event) => event,
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => return self.thread_ended_event(),
        };
        Some(match event {
            EngineEvent::Loaded { abort, parity, fingerprints } => {
                self.abort = Some(abort);
                Event::EngineReady { parity, fingerprints }
            }
            EngineEvent::NotLoaded(failure) => Event::EngineFailed(failure),
            EngineEvent::CallEnded(outcome) => {
                self.busy = false;
                Event::CallEnded(outcome)
            }
        })
    }

    /// Reports, once, that the engine thread ended without an event of its own.
    fn thread_ended_event(&mut self) -> Option<Event> {
        self.busy = false;
        if std::mem::replace(&mut self.thread_end_reported, true) {
            return None;
        }
        let text = "the engine's thread has ended";
        Some(Event::EngineFailed(Failure::new(FailureClass::Engine, Some(self.rank), &T0745, text)))
    }

    /// Returns the tick event, with the engine's progress counter.
    pub(super) fn tick_event(&self) -> Event {
        Event::Tick { progress: self.engine.progress_counter() }
    }

    pub(super) fn step_worker(&mut self, now_ns: u64, event: Event) -> Vec<RankAction> {
        let (mut actions, mut engine_lost) = (Vec::new(), None);
        for action in self.machine.handle_event(now_ns, event) {
            match action {
                Action::Send(message) => actions.push(RankAction::Send(message)),
                Action::Run(call) => {
                    self.busy = self.engine.start_call(call);
                    if !self.busy {
                        engine_lost = self.thread_ended_event();
                    }
                }
                Action::AbortEngine => self.abort_engine(),
                Action::Exit(outcome) => actions.push(RankAction::Exit(outcome)),
            }
        }
        if let Some(event) = engine_lost {
            actions.extend(self.step_worker(now_ns, event));
        }
        actions
    }

    pub(super) fn abort_engine(&self) {
        if let Some(abort) = &self.abort {
            abort();
        }
    }

    /// Whether a call is running. Discards events of the engine thread, so only a process that is
    /// ending may call it.
    pub(super) fn is_busy(&mut self) -> bool {
        while self.busy && self.next_event().is_some() {}
        self.busy
    }
}
