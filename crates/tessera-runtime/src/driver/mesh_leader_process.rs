//! The control thread of the mesh leader. It runs the relay's state machine, the local rank, and
//! one socket each to the leader and to every member.

use std::sync::Arc;

use tessera_base::Diagnostics;

use super::boundary::Interceptor;
use super::engine_thread::EngineFactory;
use super::event_loop::{EventLoop, Machine, RankProcess, SocketEvent, mesh_mismatch};
use super::link::Frame;
use super::local_rank::{LocalRank, RankAction};
use super::welcome::JoinedRank;
use crate::flight::FlightSink;
use crate::mesh_leader::{Action, Event, MeshLeader, MeshLeaderConfig};
use crate::wire::Message;
use crate::worker::{self, WorkerConfig};
use crate::{Failure, FailureClass};

/// The rank that leads the mesh leader. Only its link accepts frames of this origin.
const LEADER: u32 = 0;

/// Settings, engine, flight sink and drill interceptor that the application passes to
/// [`run_mesh_leader`].
pub struct MeshLeaderParts {
    /// Settings of the relay; this rank needs one control link per member and one to the leader.
    pub config: MeshLeaderConfig,
    /// Worker settings and engine of this rank, which runs calls besides relaying.
    pub local_rank: (WorkerConfig, EngineFactory),
    /// Stores the rank's flight record.
    pub flight: Option<Arc<dyn FlightSink>>,
    /// Alters messages in a drill.
    pub interceptor: Option<Interceptor>,
}

/// Runs the mesh leader until the session ends; [`super::run_worker`] describes the return values.
///
/// # Errors
/// The diagnostics of an invalid configuration, or T0750.
pub fn run_mesh_leader(joined: JoinedRank, parts: MeshLeaderParts) -> Result<Option<Failure>, Diagnostics> {
    let MeshLeaderParts { config, local_rank: (worker, factory), flight, interceptor: tap } = parts;
    let (rank, members) = (config.rank, config.members.clone());
    let relay = MeshLeader::new(config.clone())?;
    let mut process = RankProcess::start(rank, &config.limits, config.tripwires, flight, tap)?;
    let socket_count = joined.links.len();
    let mut links = joined.links.into_iter();
    let Some(leader) = links.next().filter(|_| socket_count == members.len() + 1) else {
        let mesh = format!("mesh leader {rank}, members {members:?}");
        return Err(mesh_mismatch(mesh, joined.welcome.world_size, socket_count));
    };
    process.upstream = Some((LEADER, process.add_link(leader, [LEADER])?));
    for (member, stream) in members.into_iter().zip(links) {
        let link = process.add_link(stream, [member])?;
        process.led.insert(member, link);
    }
    process.add_launcher(joined.launcher, [])?;
    process.local = Some(LocalRank::start(worker, factory, &process.boundary.reactor)?);
    Ok(EventLoop { machine: MeshLeaderProcess { relay }, process }.run())
}

/// An event of the relay, with the frame that the relay may forward.
type RelayEvent = (Event, Option<Frame>);

/// The mesh leader's process, as its state machine sees it.
type Process = RankProcess<RelayEvent>;

struct MeshLeaderProcess {
    relay: MeshLeader,
}

impl Machine for MeshLeaderProcess {
    type Event = RelayEvent;

    fn queue_socket_event(&mut self, process: &mut Process, event: SocketEvent) {
        process.queue_event(match event {
            SocketEvent::Message { frame, message } => match frame.origin() {
                LEADER => (Event::Down(message), Some(frame)),
                origin => (Event::Up { origin, message }, Some(frame)),
            },
            SocketEvent::Closed { rank: LEADER, how } => (Event::LeaderGone(how), None),
            SocketEvent::Closed { rank, how } => (Event::Gone { rank, how }, None),
            SocketEvent::Failed { rank, failure } => {
                (Event::Failed(Failure { rank: Some(rank), ..failure }), None)
            }
            SocketEvent::Launcher(_) => (Event::LauncherGone, None),
        });
    }

    fn tick_event(&self) -> Option<RelayEvent> {
        Some((Event::Tick, None))
    }

    fn handle_event(&mut self, process: &mut Process, now_ns: u64, (event, frame): RelayEvent) {
        let message = match &event {
            Event::Down(message) | Event::Up { message, .. } => Some(message.clone()),
            _ => None,
        };
        for action in self.relay.handle_event(now_ns, event) {
            apply_action(process, action, message.as_ref(), frame.as_ref());
        }
    }

    fn handle_rank_action(&mut self, process: &mut Process, action: RankAction) {
        // The relay's state machine decides when this process ends.
        if let RankAction::Send(message) = action {
            process.queue_event((Event::Up { origin: process.rank, message }, None));
        }
    }

    fn close_session(mut event_loop: EventLoop<Self>, outcome: Option<Failure>) -> Option<Failure> {
        event_loop.finish_local_rank();
        if outcome.is_some()
            && let Some(local) = &event_loop.process.local
        {
            local.abort_engine();
        }
        event_loop.process.wind_down(outcome)
    }
}

/// Carries out an action; `message` and `frame` belong to the event that caused it.
fn apply_action(process: &mut Process, action: Action, message: Option<&Message>, frame: Option<&Frame>) {
    match action {
        Action::ForwardDown => {
            if let Some(frame) = frame {
                for link in process.led.values() {
                    process.boundary.reactor.send(*link, frame);
                }
            }
            if let Some(message) = message {
                process.queue_local_event(worker::Event::Message(message.clone()));
            }
        }
        Action::ForwardUp => match (frame, message, process.upstream) {
            (Some(frame), _, Some((_, link))) => process.boundary.reactor.send(link, frame),
            // A message from the local worker has no frame yet.
            (None, Some(message), _) => process.send_upstream(message),
            _ => {}
        },
        Action::Down(message) => {
            if let Err(d) = process.boundary.send_to(&process.led, &message) {
                let failure = Failure::from_diagnostic(FailureClass::Preflight, None, &d);
                process.queue_event((Event::Failed(failure), None));
            }
            process.queue_local_event(worker::Event::Message(message));
        }
        Action::Up(message) => process.send_upstream(&message),
        Action::Exit(outcome) => process.outcome = Some(outcome),
    }
}
