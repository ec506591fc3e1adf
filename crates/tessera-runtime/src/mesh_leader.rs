//! The mesh leader: the rank that relays between a leader outside the mesh and the mesh's members.
//!
//! It forwards frames unchanged, down from the leader and up from the ranks, and makes no
//! decisions. It adds a preflight: it checks each envelope and context against its own cache state
//! before a member receives it, and holds back a commit until it has forwarded every rank's ready.
//! The worker in the same process counts as one of the ranks, the first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_base::{Code, Diagnostics};

use crate::call_state::{CallState, SessionSpec};
use crate::codes::{T0707, T0742, T0743, T0749, T0755};
use crate::envelope_check::{LocalState, check_context, check_envelope};
use crate::limits::{AwakeClock, format_ms};
use crate::program_index::ProgramIndex;
use crate::tripwire::{CheckSite, Tripwires};
use crate::wire::{CallAction, CallContext, CallMeta, Envelope, FaultReport, Heartbeat, Message, Refused};
use crate::worker::{failure_from_findings, needs_context};
use crate::{Digest, Failure, FailureClass, Limits};

/// The rank and members of a mesh leader, and the plan and limits against which it checks messages.
#[derive(Debug, Clone)]
pub struct MeshLeaderConfig {
    /// This rank, which also runs calls.
    pub rank: u32,
    /// The other ranks of the mesh, in ascending order; empty in a mesh of one rank.
    pub members: Vec<u32>,
    /// Digest of the sealed plan on this rank.
    pub plan: Digest,
    /// Programs of the sealed plan, against which envelopes and contexts are checked.
    pub programs: Arc<ProgramIndex>,
    /// The settings of the sealed plan that never change, against which envelopes are checked.
    pub session_spec: SessionSpec,
    /// The bounds of queues and waits.
    pub limits: Limits,
    /// Tripwires whose checks are skipped on the mesh leader; empty except in a self-test.
    pub tripwires: Tripwires,
}

/// An event that the driver reports to the mesh leader.
#[derive(Debug)]
pub enum Event {
    /// The driver's periodic wake-up, on which deadlines are checked.
    Tick,
    /// A frame arrived from the leader.
    Down(Message),
    /// A frame arrived from a member, or from this rank's own worker.
    Up {
        /// The rank that made the message; the driver has compared it with the link's rank.
        origin: u32,
        /// The decoded control message on its way to the leader.
        message: Message,
    },
    /// A member's socket closed or broke.
    Gone {
        /// Rank of the member whose link is lost.
        rank: u32,
        /// How the socket ended, for the failure's text, such as `its socket closed`.
        how: String,
    },
    /// The leader's socket closed or broke; the text describes how.
    LeaderGone(String),
    /// The launcher's socket closed.
    LauncherGone,
    /// Something other than the relay failed, for example a frame that does not decode.
    Failed(Failure),
}

/// An action that the driver executes for the mesh leader.
#[derive(Debug)]
pub enum Action {
    /// Sends this event's frame, byte for byte, to every member, and its message to the own worker.
    ForwardDown,
    /// Sends this event's frame, byte for byte, to the leader.
    ForwardUp,
    /// Sends a message of this rank to every member and to the own worker.
    Down(Message),
    /// Sends a message of this rank to the leader.
    Up(Message),
    /// Ends the process; no action follows.
    Exit(Option<Failure>),
}

/// The mesh leader as a state machine without I/O: it checks the messages between the leader and
/// the members, and returns those to relay.
#[derive(Debug)]
pub struct MeshLeader {
    config: MeshLeaderConfig,
    clock: AwakeClock,
    /// Time of the leader's last message, on `clock`; 0 before the first.
    last_message_ns: u64,
    session: Option<u64>,
    last_call_id: u64,
    /// The cache state after the last forwarded envelope.
    predicted: CallState,
    open_calls: BTreeMap<u64, RelayedCall>,
    peers: BTreeMap<u32, MemberStatus>,
    /// Id of the shutdown and the time at which it was forwarded.
    shutdown: Option<(u64, u64)>,
    /// The own worker's answer to the shutdown, which is held back until all members have answered.
    own_shutdown_answer: Option<Message>,
    /// Progress in the own worker's latest heartbeat, and the time at which that heartbeat was
    /// forwarded.
    own_heartbeat: (u64, u64),
    /// Actions that follow from the current event, in order.
    actions: Vec<Action>,
    ended: bool,
}

/// A call whose envelope was forwarded.
#[derive(Debug, Default)]
struct RelayedCall {
    meta: Option<CallMeta>,
    waits_for_context: bool,
    committed: bool,
    ready: BTreeSet<u32>,
    done: BTreeSet<u32>,
}

#[derive(Debug, Default)]
struct MemberStatus {
    /// The rank has reported its failure or answered the shutdown.
    has_left: bool,
    answered_shutdown: bool,
}

impl MeshLeader {
    /// Creates a mesh leader. Refuses limits without bounds and invalid cache sizes.
    pub fn new(config: MeshLeaderConfig) -> Result<MeshLeader, Diagnostics> {
        config.tripwires.check_findings(config.limits.check())?;
        let predicted = CallState::new(config.session_spec.state_spec()).map_err(|d| vec![d])?;
        let ranks = config.members.iter().chain([&config.rank]);
        let peers = ranks.map(|r| (*r, MemberStatus::default())).collect();
        Ok(MeshLeader {
            config,
            clock: AwakeClock::default(),
            last_message_ns: 0,
            session: None,
            last_call_id: 0,
            predicted,
            open_calls: BTreeMap::new(),
            peers,
            shutdown: None,
            own_shutdown_answer: None,
            own_heartbeat: (0, 0),
            actions: Vec::new(),
            ended: false,
        })
    }

    /// Handles one event at time `now_ns` and returns the actions for the driver, in order. After
    /// the end of the run it returns none.
    pub fn handle_event(&mut self, now_ns: u64, event: Event) -> Vec<Action> {
        if self.ended {
            return Vec::new();
        }
        let now = self.clock.advance_to(now_ns, self.config.limits.heartbeat_ns);
        match event {
            Event::Tick => self.handle_tick(now),
            Event::Down(message) => {
                self.last_message_ns = now;
                self.handle_down(&message);
            }
            Event::Up { origin, message } => self.handle_up(origin, &message),
            Event::Gone { rank, how } => self.handle_member_gone(rank, &how),
            Event::LeaderGone(how) => {
                if self.is_armed(&T0742) && self.shutdown.is_none() {
                    let text = format!("the leader is gone: {how}");
                    self.end_run(self.relay_failure(FailureClass::RankDied, Some(0), &T0742, text));
                }
            }
            Event::LauncherGone => {
                if self.is_armed(&T0749) {
                    let text = "the launching process closed its socket";
                    self.end_run(self.relay_failure(FailureClass::LauncherGone, None, &T0749, text));
                }
            }
            Event::Failed(failure) => self.report_fault(failure.with_site(CheckSite::MeshLeader)),
        }
        std::mem::take(&mut self.actions)
    }

    /// Whether the run has ended, so that no further action follows.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    fn handle_tick(&mut self, now: u64) {
        // The own worker has ended and sends no heartbeats, but this rank still waits for its
        // members and must count as alive.
        if self.own_shutdown_answer.is_some() && now >= self.own_heartbeat.1 + self.config.limits.heartbeat_ns
        {
            self.own_heartbeat.1 = now;
            self.actions.push(Action::Up(Message::Heartbeat(Heartbeat { progress: self.own_heartbeat.0 })));
        }
        if !self.is_armed(&T0743) {
            return;
        }
        let limits = &self.config.limits;
        // The limit is half of the leader's, because only the mesh leader knows which member is
        // missing.
        if let Some((_, since)) = self.shutdown
            && now.saturating_sub(since) > limits.ready_ns / 2
        {
            let missing = |r: &&u32| self.peers.get(r).is_some_and(|p| !p.answered_shutdown);
            let missing: Vec<u32> = self.peers.keys().filter(missing).copied().collect();
            let text = format!("no answer to the shutdown from ranks {missing:?} within the limit");
            let rank = missing.first().copied();
            return self.report_fault(self.relay_failure(FailureClass::Stall, rank, &T0743, text));
        }
        let patience_ns = if self.session.is_some() { limits.stale_ns } else { limits.hello_ns };
        let quiet_ns = now.saturating_sub(self.last_message_ns);
        if quiet_ns > patience_ns {
            let text = format!(
                "no message from the leader for {}, limit {}",
                format_ms(quiet_ns),
                format_ms(patience_ns)
            );
            // As in a worker: a suspended leader reads the reason before it sees the socket close.
            self.report_fault(self.relay_failure(FailureClass::Stall, Some(0), &T0743, text));
        }
    }

    fn handle_down(&mut self, message: &Message) {
        let blocked = match message {
            Message::Init(init) => {
                self.session = Some(init.session);
                None
            }
            Message::Envelope(e) => self.admit_envelope(e).map(|f| (e.header.call_id, f)),
            Message::Context(c) => self.admit_context(c).map(|f| (c.call_id, f)),
            Message::Commit(c) => self.admit_commit(c.call_id).map(|f| (c.call_id, f)),
            Message::Heartbeat(_) => None,
            Message::Abort(failure) => {
                self.actions.push(Action::ForwardDown);
                self.actions.push(Action::Exit(Some(failure.clone())));
                self.ended = true;
                return;
            }
            other => {
                let text = format!("a {:?} message arrived from the leader", other.kind());
                self.is_armed(&T0707)
                    .then(|| (0, self.relay_failure(FailureClass::Protocol, Some(0), &T0707, text)))
            }
        };
        match blocked {
            None => self.actions.push(Action::ForwardDown),
            Some((call_id, failure)) => {
                self.actions
                    .push(Action::Up(Message::Refused(Refused { call_id, failure: failure.clone() })));
                self.end_run(failure);
            }
        }
    }

    fn admit_envelope(&mut self, e: &Envelope) -> Option<Failure> {
        let id = e.header.call_id;
        let max_open = self.config.limits.max_outstanding as usize;
        if self.open_calls.len() >= max_open && e.header.action != CallAction::Shutdown {
            let text = format!(
                "envelope {id} arrived while {} calls are open, the limit is {max_open}",
                self.open_calls.len()
            );
            if let Some(failure) = self.block_message(FailureClass::Protocol, text) {
                return Some(failure);
            }
        }
        let local = LocalState {
            plan: self.config.plan,
            session: self.session.unwrap_or_default(),
            last_call_id: self.last_call_id,
            state: &self.predicted,
            session_spec: &self.config.session_spec,
            programs: &self.config.programs,
            open_calls: self.open_calls.len(),
            tripwires: &self.config.tripwires,
        };
        match check_envelope(e, &local) {
            Ok(after) => self.predicted = after,
            Err(found) => {
                if let Some(failure) = self.block_on_findings(&found) {
                    return Some(failure);
                }
            }
        }
        self.last_call_id = id;
        if e.header.action == CallAction::Shutdown {
            self.shutdown = Some((id, self.clock.now_ns()));
        } else {
            let open = RelayedCall {
                meta: e.meta.clone(),
                waits_for_context: needs_context(e),
                ..RelayedCall::default()
            };
            self.open_calls.insert(id, open);
        }
        None
    }

    fn admit_context(&mut self, c: &CallContext) -> Option<Failure> {
        let open = self.open_calls.get_mut(&c.call_id).filter(|o| o.waits_for_context);
        let Some(open) = open else {
            let text = format!("context arrived for call {}, which does not wait for one", c.call_id);
            return self.block_message(FailureClass::Protocol, text);
        };
        open.waits_for_context = false;
        let (programs, tripwires) = (&self.config.programs, &self.config.tripwires);
        let found = open.meta.as_ref().and_then(|m| check_context(m, &c.tensors, programs, tripwires).err());
        found.and_then(|found| self.block_on_findings(&found))
    }

    fn admit_commit(&mut self, call_id: u64) -> Option<Failure> {
        let first = self.open_calls.keys().next().copied();
        let text = match self.open_calls.get(&call_id) {
            None => format!("commit of call {call_id}, which is not open"),
            Some(o) if o.committed => format!("a second commit of call {call_id}"),
            Some(_) if first != Some(call_id) => {
                format!("commit of call {call_id} before call {} is done", first.unwrap_or_default())
            }
            Some(o) => {
                let missing: Vec<u32> = self.peers.keys().copied().filter(|r| !o.ready.contains(r)).collect();
                if missing.is_empty() {
                    String::new()
                } else {
                    format!("commit of call {call_id} before ranks {missing:?} were ready")
                }
            }
        };
        let failure = if text.is_empty() { None } else { self.block_message(FailureClass::Protocol, text) };
        if let Some(open) = self.open_calls.get_mut(&call_id) {
            open.committed = true;
        }
        failure
    }

    fn handle_up(&mut self, origin: u32, message: &Message) {
        let Some(peer) = self.peers.get_mut(&origin) else {
            let text = format!("a message arrived from rank {origin}, which is not in this mesh");
            if self.is_armed(&T0707) {
                self.report_fault(self.relay_failure(FailureClass::Protocol, Some(origin), &T0707, text));
            }
            return;
        };
        if let Message::Done(d) = message
            && self.shutdown.is_some_and(|(id, _)| id == d.call_id)
        {
            (peer.answered_shutdown, peer.has_left) = (true, true);
            return self.handle_shutdown_answer(origin, message);
        }
        self.actions.push(Action::ForwardUp);
        match message {
            Message::Ready(r) => {
                if let Some(open) = self.open_calls.get_mut(&r.call_id) {
                    open.ready.insert(origin);
                }
            }
            Message::Done(d) => {
                if let Some(open) = self.open_calls.get_mut(&d.call_id) {
                    open.done.insert(origin);
                    if open.done.len() == self.peers.len() {
                        self.open_calls.remove(&d.call_id);
                    }
                }
            }
            Message::Refused(_) | Message::Fault(_) => peer.has_left = true,
            Message::Heartbeat(h) if origin == self.config.rank => {
                self.own_heartbeat = (h.progress, self.clock.now_ns())
            }
            _ => {}
        }
    }

    /// Handles a rank's answer to the shutdown. This rank's own answer is sent last, because the
    /// leader counts on this rank until it has relayed all other answers.
    fn handle_shutdown_answer(&mut self, origin: u32, message: &Message) {
        if origin == self.config.rank {
            self.own_shutdown_answer = Some(message.clone());
        } else {
            self.actions.push(Action::ForwardUp);
        }
        if self.peers.values().all(|p| p.answered_shutdown) {
            self.actions.extend(self.own_shutdown_answer.take().map(Action::Up));
            self.actions.push(Action::Exit(None));
            self.ended = true;
        }
    }

    /// Reports that a member's socket closed. The leader has no socket to a member, so only this
    /// rank notices.
    fn handle_member_gone(&mut self, rank: u32, how: &str) {
        if !self.is_armed(&T0742) || self.peers.get(&rank).is_none_or(|p| p.has_left) {
            return;
        }
        let call = self.open_calls.iter().next();
        let stage_text = match call {
            Some((id, o)) if o.committed => format!("while call {id} ran"),
            Some((id, _)) => format!("while call {id} was prepared"),
            None => "between calls".to_string(),
        };
        let text = format!("rank {rank} is gone ({how}) {stage_text}");
        self.report_fault(self.relay_failure(FailureClass::RankDied, Some(rank), &T0742, text));
    }

    /// Returns the failure that blocks a message with these findings, unless the tripwire is
    /// disabled.
    fn block_on_findings(&self, found: &Diagnostics) -> Option<Failure> {
        let finding = failure_from_findings(Some(self.config.rank), CheckSite::MeshLeader, found);
        self.block_message(finding.class, format!("[{}] {}", finding.code, finding.text))
    }

    fn block_message(&self, class: FailureClass, text: String) -> Option<Failure> {
        self.is_armed(&T0755).then(|| self.relay_failure(class, Some(self.config.rank), &T0755, text))
    }

    /// Reports a failure to the leader, then ends with the members.
    fn report_fault(&mut self, failure: Failure) {
        self.actions
            .push(Action::Up(Message::Fault(FaultReport { failure: failure.clone(), secondary: false })));
        self.end_run(failure);
    }

    fn end_run(&mut self, failure: Failure) {
        self.actions.push(Action::Down(Message::Abort(failure.clone())));
        self.actions.push(Action::Exit(Some(failure)));
        self.ended = true;
    }

    fn is_armed(&self, code: &Code) -> bool {
        self.config.tripwires.is_armed(code)
    }

    fn relay_failure(
        &self,
        class: FailureClass,
        rank: Option<u32>,
        code: &Code,
        text: impl Into<String>,
    ) -> Failure {
        Failure::new(class, rank, code, text).with_site(CheckSite::MeshLeader)
    }
}
