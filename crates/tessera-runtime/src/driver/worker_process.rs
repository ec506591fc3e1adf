//! The control thread of a worker process: a rank that is led and leads no other rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};

use super::boundary::{Interceptor, MessageBoundary};
use super::engine_thread::EngineFactory;
use super::exit::Watchdog;
use super::link::DisconnectReason;
use super::local_rank::{LocalRank, RankAction};
use super::reactor::{LinkId, Reactor, ReactorEvent};
use super::welcome::{JoinedRank, io_diagnostic};
use super::{ControlTopology, T0750, TICK_INTERVAL};
use crate::flight::FlightSink;
use crate::leader::T0743;
use crate::tripwire::CheckSite;
use crate::worker::{Event, WorkerConfig};
use crate::{Failure, FailureClass, Limits};

/// The application's parts of a worker process.
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
    let start = Instant::now();
    let (limits, rank, tripwires) = (config.limits.clone(), config.rank, config.tripwires.clone());
    let watchdog = Watchdog::start_thread(&limits).map_err(|e| vec![io_diagnostic("watchdog thread", &e)])?;
    let mut reactor = Reactor::new(&limits).map_err(|e| vec![io_diagnostic("control sockets", &e)])?;
    let [leader] = <[_; 1]>::try_from(joined.links).map_err(|links| {
        vec![
            Diagnostic::error(&T0750, "a worker must have exactly one socket, to its leader")
                .with_label(format!("rank {rank}"), format!("{} sockets", links.len())),
        ]
    })?;
    let add = |e: std::io::Error| vec![io_diagnostic("control socket", &e)];
    let upstream_rank = topology.leader_of(rank).unwrap_or(0);
    let upstream = reactor.add_link(leader, topology.upstream_origins(rank)).map_err(add)?;
    // The launcher sends nothing to a worker; the socket only signals, by closing, that the
    // launcher ended.
    let launcher = joined.launcher.map(|l| reactor.add_link(l, [])).transpose().map_err(add)?;
    let mut local = LocalRank::start(config, engine, &reactor)?;
    let mut boundary = MessageBoundary::new(rank, reactor, flight, tap, tripwires);
    let mut events = Vec::new();
    let mut actions = Vec::new();
    loop {
        watchdog.mark_alive();
        boundary.reactor.wait_events(TICK_INTERVAL, &mut events);
        for event in events.drain(..) {
            let now_ns = start.elapsed().as_nanos() as u64;
            match event {
                ReactorEvent::Frame { frame, .. } => match boundary.receive_frame(&frame) {
                    Ok(messages) => {
                        for message in messages {
                            actions.extend(local.step_worker(now_ns, Event::Message(message)));
                        }
                    }
                    Err(d) => actions.extend(local.step_worker(
                        now_ns,
                        Event::EngineFailed(protocol_failure(&d).with_site(CheckSite::Worker)),
                    )),
                },
                ReactorEvent::Disconnected { link, .. } if Some(link) == launcher => {
                    actions.extend(local.step_worker(now_ns, Event::LauncherGone));
                }
                ReactorEvent::Disconnected { reason: end, .. } => {
                    actions.extend(local.step_worker(now_ns, leader_lost_event(upstream_rank, end)))
                }
                ReactorEvent::FdReady(_) => {}
            }
            // Answers are sent per event, so that one answer does not wait for the other events of
            // the batch.
            if let Some(outcome) = apply_actions(&mut boundary, upstream, upstream_rank, &mut actions) {
                return Ok(wind_down(boundary, Some(local), &watchdog, &limits, outcome));
            }
        }
        while let Some(event) = local.next_event() {
            actions.extend(local.step_worker(start.elapsed().as_nanos() as u64, event));
        }
        actions.extend(local.step_worker(start.elapsed().as_nanos() as u64, local.tick_event()));
        if let Some(outcome) = apply_actions(&mut boundary, upstream, upstream_rank, &mut actions) {
            return Ok(wind_down(boundary, Some(local), &watchdog, &limits, outcome));
        }
    }
}

/// Carries out the state machine's actions; returns the outcome once the machine has ended.
fn apply_actions(
    boundary: &mut MessageBoundary,
    upstream: LinkId,
    upstream_rank: u32,
    actions: &mut Vec<RankAction>,
) -> Option<Option<Failure>> {
    for actions in actions.drain(..) {
        match actions {
            // Sending fails only for a message over the wire's limits, and this build never creates
            // such a message.
            RankAction::Send(message) => drop(boundary.send_to([(&upstream_rank, &upstream)], &message)),
            RankAction::Exit(outcome) => return Some(outcome),
        }
    }
    None
}

/// Shuts a rank down in bounded time: sends what is queued and gives the engine time to return from
/// its call.
pub(super) fn wind_down(
    mut boundary: MessageBoundary,
    mut local: Option<LocalRank>,
    watchdog: &Watchdog,
    limits: &Limits,
    outcome: Option<Failure>,
) -> Option<Failure> {
    let unwind_limit = Duration::from_nanos(limits.unwind_ns);
    if let Some(failure) = &outcome {
        watchdog.exit_within(failed_process_lifetime(limits), failure.class.exit_code());
    }
    boundary.record_exit(outcome.as_ref());
    let until = Instant::now() + unwind_limit;
    let mut ignored_events = Vec::new();
    while (local.as_mut().is_some_and(LocalRank::is_busy) || !boundary.reactor.is_flushed())
        && Instant::now() < until
    {
        watchdog.mark_alive();
        boundary.reactor.wait_events(
            TICK_INTERVAL.min(until.saturating_duration_since(Instant::now())),
            &mut ignored_events,
        );
        ignored_events.clear();
    }
    outcome
}

/// Returns how long a failed process may live: long enough to unwind the engine, and short enough
/// that the launcher still collects the exit status.
pub(super) fn failed_process_lifetime(limits: &Limits) -> Duration {
    Duration::from_nanos(limits.unwind_ns + limits.reap_ns / 4)
}

/// Converts the end of the leader's link into the state machine's event.
fn leader_lost_event(upstream_rank: u32, end: DisconnectReason) -> Event {
    match end {
        DisconnectReason::Closed(how) => Event::UpstreamGone(how),
        DisconnectReason::Broken(d) => Event::EngineFailed(protocol_failure(&d).with_site(CheckSite::Worker)),
        DisconnectReason::Stalled(how) => {
            Event::EngineFailed(stall_failure(upstream_rank, &how).with_site(CheckSite::Worker))
        }
    }
}

/// Builds the failure for a frame that does not decode.
pub(super) fn protocol_failure(d: &Diagnostic) -> Failure {
    Failure::from_diagnostic(FailureClass::Protocol, None, d)
}

/// Builds the failure of a peer that does not read.
pub(super) fn stall_failure(rank: u32, how: &str) -> Failure {
    Failure::new(
        FailureClass::Stall,
        Some(rank),
        &T0743,
        format!("rank {rank} does not read its messages: {how}"),
    )
}
