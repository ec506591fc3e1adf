//! The control thread of a worker process.

use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};

use super::T0750;
use super::engine_thread::{EngineEvent, EngineFactory, EngineThread};
use super::exit::exit_within;
use super::fds::{Joined, failed};
use super::link::{self, LinkEnd, spawn_reader};
use crate::engine::AbortHandle;
use crate::tripwire::Place;
use crate::wire;
use crate::worker::{Action, Event, Worker, WorkerConfig};
use crate::{Failure, FailureClass};

/// How often the machines are told that time passed.
pub(super) const TICK: Duration = Duration::from_millis(20);
/// Events that may wait for the control thread.
pub(super) const EVENTS: usize = 256;

/// What the door supplies.
pub struct WorkerParts {
    /// The machine's settings.
    pub config: WorkerConfig,
    /// Makes the engine.
    pub engine: EngineFactory,
}

enum Input {
    Machine(Event),
    Loaded { abort: AbortHandle, event: Event },
}

/// Runs a worker until the session ends. `Ok(None)` is a clean shutdown. After a failure the process lives only
/// as long as the limits allow; the caller closes its record and calls [`super::exit`].
pub fn run_worker(joined: Joined, parts: WorkerParts) -> Result<Option<Failure>, Diagnostics> {
    let start = Instant::now();
    let WorkerParts { config, engine } = parts;
    let limits = config.limits.clone();
    let rank = config.rank;
    let mut machine = Worker::new(config.clone())?;
    let (events, inbox) = sync_channel::<Input>(EVENTS);
    let io = |what: &str, e: &std::io::Error| vec![failed(what, e)];
    let [leader] = <[_; 1]>::try_from(joined.sockets).map_err(|sockets| {
        vec![
            Diagnostic::error(&T0750, "a worker holds one socket to its leader")
                .at(format!("rank {rank}"), format!("{} sockets", sockets.len())),
        ]
    })?;
    link::set_write_limit(&leader, Duration::from_nanos(limits.ready_ns))
        .map_err(|e| io("control socket", &e))?;
    let reading = leader.try_clone().map_err(|e| io("control socket", &e))?;
    read_leader(reading, events.clone()).map_err(|e| io("control socket", &e))?;
    read_launcher(joined.launcher, events.clone()).map_err(|e| io("launcher socket", &e))?;
    let tell = move |event| {
        let _ = events.send(match event {
            EngineEvent::Loaded { abort, parity, fingerprints } => {
                Input::Loaded { abort, event: Event::EngineReady { parity, fingerprints } }
            }
            EngineEvent::NotLoaded(failure) => Input::Machine(Event::EngineFailed(failure)),
            EngineEvent::Ended(outcome) => Input::Machine(Event::CallEnded(outcome)),
        });
    };
    let engine = EngineThread::spawn(rank, engine, config.census, config.cache, config.tripwires, tell)
        .map_err(|e| io("engine thread", &e))?;

    let mut abort: Option<AbortHandle> = None;
    let mut running = false;
    loop {
        let mark = engine.mark();
        let event = match inbox.recv_timeout(TICK) {
            Ok(Input::Machine(event)) => event,
            Ok(Input::Loaded { abort: handle, event }) => {
                abort = Some(handle);
                event
            }
            Err(RecvTimeoutError::Timeout) => Event::Tick { mark },
            Err(RecvTimeoutError::Disconnected) => Event::LauncherGone,
        };
        running &= !matches!(event, Event::CallEnded(_));
        let now_ns = start.elapsed().as_nanos() as u64;
        // A busy inbox must not keep the heartbeat from going out.
        let mut actions = machine.step(now_ns, Event::Tick { mark });
        actions.extend(machine.step(now_ns, event));
        for action in actions {
            match action {
                // A leader that cannot be written to is one whose socket is about to report its end.
                Action::Send(message) => drop(wire::encode(rank, &message).map(|f| link::send(&leader, &f))),
                Action::Run(call) => running = engine.run(call),
                Action::AbortEngine => {
                    if let Some(abort) = &abort {
                        abort();
                    }
                }
                Action::Exit(None) => return Ok(None),
                Action::Exit(Some(failure)) => {
                    let unwind = Duration::from_nanos(limits.unwind_ns);
                    exit_within(unwind + Duration::from_nanos(limits.reap_ns) / 2, failure.class.exit_code());
                    let until = Instant::now() + unwind;
                    while running {
                        let left = until.saturating_duration_since(Instant::now());
                        match inbox.recv_timeout(left) {
                            Ok(Input::Machine(Event::CallEnded(_))) | Err(_) => running = false,
                            Ok(_) => {}
                        }
                    }
                    return Ok(Some(failure));
                }
            }
        }
    }
}

fn read_leader(stream: std::os::unix::net::UnixStream, events: SyncSender<Input>) -> std::io::Result<()> {
    spawn_reader("from leader".into(), stream, move |message| {
        let event = match message {
            Ok((_, message)) => Event::Message(message),
            Err(LinkEnd::Closed(how)) => Event::LeaderGone(how),
            Err(LinkEnd::Broken(d)) => Event::EngineFailed(broken(&d).at(Place::Worker)),
        };
        events.send(Input::Machine(event)).is_ok()
    })
}

/// The launcher tells a worker nothing; its socket exists to close.
fn read_launcher(stream: std::os::unix::net::UnixStream, events: SyncSender<Input>) -> std::io::Result<()> {
    spawn_reader("from launcher".into(), stream, move |message| match message {
        Ok(_) => true,
        Err(_) => events.send(Input::Machine(Event::LauncherGone)).is_ok(),
    })
}

/// A frame that does not decode, as a failure.
pub(super) fn broken(d: &Diagnostic) -> Failure {
    Failure::from_diagnostic(FailureClass::Protocol, None, d)
}
