//! The control thread of a rank that is led and leads nobody.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};

use super::engine_thread::EngineFactory;
use super::exit::Keeper;
use super::fds::{Joined, failed};
use super::gate::{Gate, Tap};
use super::hub::{Hub, HubEvent, LinkId};
use super::link::LinkEnd;
use super::local_rank::{LocalRank, Todo};
use super::{T0750, TICK, Topology};
use crate::flight::Sink;
use crate::leader::T0743;
use crate::tripwire::Place;
use crate::worker::{Event, WorkerConfig};
use crate::{Failure, FailureClass, Limits};

/// What the door supplies.
pub struct WorkerParts {
    /// The machine's settings.
    pub config: WorkerConfig,
    /// Makes the engine.
    pub engine: EngineFactory,
    /// Who speaks with whom.
    pub topology: Topology,
    /// Keeps the rank's flight record.
    pub flight: Option<Arc<dyn Sink>>,
    /// Meddles with messages in a drill.
    pub tap: Option<Tap>,
}

/// Runs a worker until the session ends. `Ok(None)` is a clean shutdown. After a failure the process lives only
/// as long as the limits allow; the caller closes its record and calls [`super::exit`].
pub fn run_worker(joined: Joined, parts: WorkerParts) -> Result<Option<Failure>, Diagnostics> {
    let WorkerParts { config, engine, topology, flight, tap } = parts;
    let start = Instant::now();
    let (limits, rank, tripwires) = (config.limits.clone(), config.rank, config.tripwires.clone());
    let keeper = Keeper::start(&limits).map_err(|e| vec![failed("keeper thread", &e)])?;
    let mut hub = Hub::new(&limits).map_err(|e| vec![failed("control sockets", &e)])?;
    let [leader] = <[_; 1]>::try_from(joined.links).map_err(|links| {
        vec![
            Diagnostic::error(&T0750, "a worker holds one socket to its leader")
                .at(format!("rank {rank}"), format!("{} sockets", links.len())),
        ]
    })?;
    let add = |e: std::io::Error| vec![failed("control socket", &e)];
    let above = topology.leads(rank).unwrap_or(0);
    let up = hub.add(leader, topology.origins_above(rank)).map_err(add)?;
    // The launcher tells a worker nothing; its socket exists to close.
    let launcher = joined.launcher.map(|l| hub.add(l, [])).transpose().map_err(add)?;
    let mut local = LocalRank::start(config, engine, &hub)?;
    let mut gate = Gate::new(rank, hub, flight, tap, tripwires);
    let mut events = Vec::new();
    let mut todo = Vec::new();
    loop {
        keeper.round();
        gate.hub.wait(TICK, &mut events);
        for event in events.drain(..) {
            let now_ns = start.elapsed().as_nanos() as u64;
            match event {
                HubEvent::Frame { frame, .. } => match gate.receive(&frame) {
                    Ok(messages) => {
                        for message in messages {
                            todo.extend(local.step(now_ns, Event::Message(message)));
                        }
                    }
                    Err(d) => {
                        todo.extend(local.step(now_ns, Event::EngineFailed(broken(&d).at(Place::Worker))))
                    }
                },
                HubEvent::Ended { link, .. } if Some(link) == launcher => {
                    todo.extend(local.step(now_ns, Event::LauncherGone));
                }
                HubEvent::Ended { end, .. } => todo.extend(local.step(now_ns, lost_leader(above, end))),
                HubEvent::Watched(_) => {}
            }
            // An answer does not wait for what else has arrived.
            if let Some(outcome) = act(&mut gate, up, above, &mut todo) {
                return Ok(leave(gate, Some(local), &keeper, &limits, outcome));
            }
        }
        while let Some(event) = local.heard() {
            todo.extend(local.step(start.elapsed().as_nanos() as u64, event));
        }
        todo.extend(local.step(start.elapsed().as_nanos() as u64, local.tick()));
        if let Some(outcome) = act(&mut gate, up, above, &mut todo) {
            return Ok(leave(gate, Some(local), &keeper, &limits, outcome));
        }
    }
}

/// Does what the machine asked for; the outcome once it has ended.
fn act(gate: &mut Gate, up: LinkId, above: u32, todo: &mut Vec<Todo>) -> Option<Option<Failure>> {
    for todo in todo.drain(..) {
        match todo {
            // A message over the wire's limits is one that this build never makes.
            Todo::Send(message) => drop(gate.send([(&above, &up)], &message)),
            Todo::Exit(outcome) => return Some(outcome),
        }
    }
    None
}

/// The last steps of a rank: what it said leaves, its engine comes back or not, and neither takes long.
pub(super) fn leave(
    mut gate: Gate,
    mut local: Option<LocalRank>,
    keeper: &Keeper,
    limits: &Limits,
    outcome: Option<Failure>,
) -> Option<Failure> {
    let unwind = Duration::from_nanos(limits.unwind_ns);
    if let Some(failure) = &outcome {
        keeper.exit_within(bound(limits), failure.class.exit_code());
    }
    gate.ends(outcome.as_ref());
    let until = Instant::now() + unwind;
    let mut ignored = Vec::new();
    while (local.as_mut().is_some_and(LocalRank::busy) || !gate.hub.flushed()) && Instant::now() < until {
        keeper.round();
        gate.hub.wait(TICK.min(until.saturating_duration_since(Instant::now())), &mut ignored);
        ignored.clear();
    }
    outcome
}

/// How long a process may live that has failed: its engine has its time, and the launcher still finds its status.
pub(super) fn bound(limits: &Limits) -> Duration {
    Duration::from_nanos(limits.unwind_ns + limits.reap_ns / 4)
}

/// How the rank above left, as the machine's event.
fn lost_leader(above: u32, end: LinkEnd) -> Event {
    match end {
        LinkEnd::Closed(how) => Event::LeaderGone(how),
        LinkEnd::Broken(d) => Event::EngineFailed(broken(&d).at(Place::Worker)),
        LinkEnd::Stuck(how) => Event::EngineFailed(stuck(above, &how).at(Place::Worker)),
    }
}

/// A frame that does not decode, as a failure.
pub(super) fn broken(d: &Diagnostic) -> Failure {
    Failure::from_diagnostic(FailureClass::Protocol, None, d)
}

/// A peer that does not read, as a failure of that peer.
pub(super) fn stuck(rank: u32, how: &str) -> Failure {
    Failure::new(FailureClass::Stall, Some(rank), &T0743, format!("rank {rank} takes no messages: {how}"))
}
