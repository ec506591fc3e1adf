//! The control thread of a worker process: a rank that is led and leads no other rank.

use std::convert::Infallible;
use std::sync::Arc;

use tessera_base::{Diagnostic, Diagnostics};

use super::ControlTopology;
use super::boundary::Interceptor;
use super::engine_thread::EngineFactory;
use super::event_loop::{EventLoop, Machine, RankProcess, SocketEvent};
use super::local_rank::{LocalRank, RankAction};
use super::welcome::JoinedRank;
use crate::Failure;
use crate::codes::T0750;
use crate::flight::FlightSink;
use crate::tripwire::CheckSite;
use crate::worker::{Event, WorkerConfig};

/// Settings, engine, flight sink and drill interceptor that the application passes to
/// [`run_worker`].
pub struct WorkerParts {
    /// Settings of the worker state machine.
    pub config: WorkerConfig,
    /// Builds the rank's engine; it is called once, on the engine thread.
    pub engine: EngineFactory,
    /// Control links between the ranks.
    pub topology: ControlTopology,
    /// Stores the rank's flight record.
    pub flight: Option<Arc<dyn FlightSink>>,
    /// Alters messages in a drill.
    pub interceptor: Option<Interceptor>,
}

/// Runs a worker until the session ends. `Ok(None)` is a clean shutdown. After a failure, the
/// watchdog limits the remaining lifetime of the process; the caller closes its record and calls
/// [`super::exit_process`].
///
/// # Errors
/// T0750 if the process cannot be set up.
pub fn run_worker(joined: JoinedRank, parts: WorkerParts) -> Result<Option<Failure>, Diagnostics> {
    let WorkerParts { config, engine, topology, flight, interceptor: tap } = parts;
    let rank = config.rank;
    let mut process = RankProcess::start(rank, &config.limits, config.tripwires.clone(), flight, tap)?;
    let [leader] = <[_; 1]>::try_from(joined.links).map_err(|links| {
        vec![
            Diagnostic::error(&T0750, "a worker must have exactly one socket, to its leader")
                .with_label(format!("rank {rank}"), format!("{} sockets", links.len())),
        ]
    })?;
    let upstream_rank = topology.leader_of(rank).unwrap_or(0);
    let link = process.add_link(leader, topology.upstream_origins(rank))?;
    process.upstream = Some((upstream_rank, link));
    process.add_launcher(joined.launcher, [])?;
    process.local = Some(LocalRank::start(config, engine, &process.boundary.reactor)?);
    Ok(EventLoop { machine: WorkerProcess, process }.run())
}

/// A process whose only state machine is the worker of its local rank.
struct WorkerProcess;

type Process = RankProcess<Infallible>;

impl Machine for WorkerProcess {
    type Event = Infallible;

    fn queue_socket_event(&mut self, process: &mut Process, event: SocketEvent) {
        process.queue_local_event(match event {
            SocketEvent::Message { message, .. } => Event::Message(message),
            SocketEvent::Closed { how, .. } => Event::UpstreamGone(how),
            SocketEvent::Failed { failure, .. } => Event::EngineFailed(failure.with_site(CheckSite::Worker)),
            SocketEvent::Launcher(_) => Event::LauncherGone,
        });
    }

    fn handle_event(&mut self, _: &mut Process, _: u64, event: Infallible) {
        match event {}
    }

    fn handle_rank_action(&mut self, process: &mut Process, action: RankAction) {
        match action {
            RankAction::Send(message) => process.send_upstream(&message),
            RankAction::Exit(outcome) => process.outcome = Some(outcome),
        }
    }
}
