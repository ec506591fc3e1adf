//! A rank's side of lockstep: it checks the calls that it receives, answers, and runs the committed
//! ones. It makes no decisions.

use std::collections::VecDeque;
use std::sync::Arc;

use tessera_base::{Code, Diagnostics};

use crate::call_state::{CallState, SessionSpec};
use crate::codes::{T0707, T0710, T0712, T0731, T0742, T0743, T0746, T0749, T0771};
use crate::engine::{CallReport, EngineFault, EngineFaultKind, ReadyCall};
use crate::envelope_check::{LocalState, check_context, check_envelope, input_digest};
use crate::limits::{AwakeClock, format_ms};
use crate::parity::identity_keys;
use crate::program_index::ProgramIndex;
use crate::tripwire::{CheckSite, Tripwires};
use crate::wire::{
    CallAction, CallContext, CallMeta, CallObservation, Done, Envelope, FaultReport, Heartbeat, HelloAck,
    Init, Message, MessageKind, Ready, Refused, SenderRole, ShardFingerprint, Tensors,
};
use crate::{Digest, Failure, FailureClass, Limits, Parity};

/// What [`Worker::new`] needs: this rank's identity, its sealed plan, and the bounds of its waits.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Rank of this worker in the world; its failures name this rank.
    pub rank: u32,
    /// The rank at the other end of this rank's control socket: 0, or the mesh leader for a member
    /// behind a mesh leader.
    pub upstream_rank: u32,
    /// Digest of the sealed plan on this rank.
    pub plan: Digest,
    /// Build identifier of this rank's binary.
    pub build: String,
    /// This rank's parity keys for the hello.
    pub parity: Parity,
    /// The programs of the sealed plan, against which the worker checks every envelope and context.
    pub programs: Arc<ProgramIndex>,
    /// The settings of the sealed plan that never change, against which the worker checks every envelope.
    pub session_spec: SessionSpec,
    /// The bounds of queues and waits.
    pub limits: Limits,
    /// Whether this rank sends the outputs of a chunk's call to the leader.
    pub sends_output: bool,
    /// Codes of the tripwires that this rank does not check; empty except in a self-test.
    pub tripwires: Tripwires,
}

/// An event that the driver reports to the worker.
#[derive(Debug)]
pub enum Event {
    /// Time passed; `progress` is the engine's progress counter.
    Tick {
        /// The counter that [`Heartbeat`] sends.
        progress: u64,
    },
    /// A message that arrived over the control socket to the upstream rank.
    Message(Message),
    /// The engine has loaded its weights and programs, so the worker can answer the leader's init.
    EngineReady {
        /// Parity keys of the loaded engine; the worker merges them into [`WorkerConfig::parity`].
        parity: Parity,
        /// Digests of the loaded weight shards.
        fingerprints: Vec<ShardFingerprint>,
    },
    /// The engine could not be loaded.
    EngineFailed(Failure),
    /// The engine finished the committed call, or failed in it.
    CallEnded(Box<Result<CallReport, EngineFault>>),
    /// The control socket to the upstream rank closed; the text describes how.
    UpstreamGone(String),
    /// The launching process closed its socket to this rank; the worker ends with T0749.
    LauncherGone,
}

/// An action that the driver executes for the worker.
#[derive(Debug)]
pub enum Action {
    /// Sends a message to the upstream rank: the leader or a mesh leader.
    Send(Message),
    /// Passes a call to the engine's thread.
    Run(Box<ReadyCall>),
    /// Makes blocked collectives return.
    AbortEngine,
    /// Ends the process; no action follows.
    Exit(Option<Failure>),
}

/// The worker as a state machine without I/O: it checks each envelope, answers ready, and passes
/// committed calls to the engine.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
    clock: AwakeClock,
    last_heartbeat_ns: u64,
    /// Time of the last message from the upstream rank, on `clock`; 0 before the first message.
    last_message_ns: u64,
    /// The leader's progress counter, over all ranks.
    leader_progress: u64,
    init: Option<Init>,
    /// Shard digests of the loaded engine; `None` before loading.
    loaded_fingerprints: Option<Vec<ShardFingerprint>>,
    last_call_id: u64,
    last_commit: u64,
    /// The cache state after the last accepted envelope.
    predicted: CallState,
    pending: VecDeque<PendingCall>,
    running: Option<RunningCall>,
    /// A failure that another rank caused, and the time until which its cause may be reported.
    secondary_failure: Option<(Failure, u64)>,
    /// Actions that follow from the current event, in order.
    actions: Vec<Action>,
    ended: bool,
}

/// An accepted call that is not committed.
#[derive(Debug)]
struct PendingCall {
    envelope: Envelope,
    predicted_state: Digest,
    context: Tensors,
    ready: bool,
}

#[derive(Debug)]
struct RunningCall {
    call_id: u64,
    cache_epoch: u32,
    deadline_ns: u64,
    progress: u64,
    last_progress_ns: u64,
}

impl Worker {
    /// Creates a worker. Refuses limits without bounds and invalid cache sizes.
    pub fn new(config: WorkerConfig) -> Result<Worker, Diagnostics> {
        config.tripwires.check_findings(config.limits.check())?;
        let predicted = CallState::new(config.session_spec.state_spec()).map_err(|d| vec![d])?;
        Ok(Worker {
            config,
            clock: AwakeClock::default(),
            last_heartbeat_ns: 0,
            last_message_ns: 0,
            leader_progress: 0,
            init: None,
            loaded_fingerprints: None,
            last_call_id: 0,
            last_commit: 0,
            predicted,
            pending: VecDeque::new(),
            running: None,
            secondary_failure: None,
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
        self.clock.advance_to(now_ns, self.config.limits.heartbeat_ns);
        match event {
            Event::Tick { progress: mark } => self.handle_tick(mark),
            Event::Message(message) => self.handle_message(message),
            Event::EngineReady { parity, fingerprints } => {
                self.config.parity = std::mem::take(&mut self.config.parity).merge(&parity);
                self.loaded_fingerprints = Some(fingerprints);
                self.send_hello();
            }
            Event::EngineFailed(failure) => self.report_fault(failure),
            Event::CallEnded(outcome) => match *outcome {
                Ok(report) => self.finish_call(report),
                Err(fault) => self.report_engine_fault(fault),
            },
            Event::UpstreamGone(how) if self.is_armed(&T0742) => {
                let (above, who) = self.upstream_name();
                let text = format!("{who} is gone: {how}");
                self.end_run(self.local_failure(FailureClass::RankDied, Some(above), &T0742, text));
            }
            Event::LauncherGone if self.is_armed(&T0749) => {
                let text = "the launching process closed its socket";
                self.end_run(self.local_failure(FailureClass::LauncherGone, None, &T0749, text));
            }
            Event::UpstreamGone(_) | Event::LauncherGone => {}
        }
        std::mem::take(&mut self.actions)
    }

    /// Whether the run has ended, so that no further action follows.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    fn handle_tick(&mut self, progress: u64) {
        let now = self.clock.now_ns();
        if now >= self.last_heartbeat_ns + self.config.limits.heartbeat_ns {
            self.last_heartbeat_ns = now;
            // The progress of a finished call must not count as progress of the next one.
            let progress = if self.running.is_some() { progress } else { 0 };
            self.actions.push(Action::Send(Message::Heartbeat(Heartbeat { progress })));
        }
        if let Some((failure, _)) = self.secondary_failure.take_if(|(_, until)| now >= *until) {
            return self.end_run(failure);
        }
        if let Some(running) = &mut self.running
            && running.progress != progress
        {
            (running.progress, running.last_progress_ns) = (progress, now);
        }
        if !self.is_armed(&T0743) {
            return;
        }
        // Before its first message a leader may be loading, for as long as any rank may take to
        // load.
        let limits = &self.config.limits;
        let patience_ns = if self.init.is_some() { limits.stale_ns } else { limits.hello_ns };
        // A mesh leader detects a silent leader first and reports it, so the ranks behind it wait
        // longer.
        let patience_ns = patience_ns + if self.config.upstream_rank == 0 { 0 } else { limits.heartbeat_ns };
        let quiet_ns = now.saturating_sub(self.last_message_ns);
        if quiet_ns > patience_ns {
            let (above, who) = self.upstream_name();
            let text = format!(
                "no message from {who} for {}, limit {}",
                format_ms(quiet_ns),
                format_ms(patience_ns)
            );
            // A process that was suspended reads this report first when it continues. Without it,
            // the closed socket would look like the death of this rank.
            return self.report_fault(self.local_failure(FailureClass::Stall, Some(above), &T0743, text));
        }
        if let Some(r) = &self.running
            && now.saturating_sub(r.last_progress_ns) > r.deadline_ns
        {
            let (quiet_ns, limit) = (format_ms(now - r.last_progress_ns), format_ms(r.deadline_ns));
            let text =
                format!("call {}: this rank made no progress for {quiet_ns}, deadline {limit}", r.call_id);
            // This rank may be waiting for another one; only the leader sees the progress of all
            // ranks. The failure is therefore secondary.
            let failure = self.local_failure(FailureClass::Stall, Some(self.config.rank), &T0743, text);
            self.report_secondary(failure);
        }
    }

    fn handle_message(&mut self, message: Message) {
        self.last_message_ns = self.clock.now_ns();
        let kind = message.kind();
        if kind.allowed_sender() != SenderRole::Leader && kind != MessageKind::Heartbeat {
            return self.protocol_violation(0, format!("a {kind:?} message arrived at a worker"));
        }
        match message {
            Message::Init(init) if self.init.is_none() => {
                self.init = Some(init);
                self.send_hello();
            }
            Message::Envelope(e) => self.handle_envelope(*e),
            Message::Context(c) => self.handle_context(c),
            Message::Commit(c) => self.handle_commit(c.call_id),
            Message::Abort(failure) => self.end_run(failure),
            Message::Heartbeat(h) => self.handle_leader_heartbeat(h.progress),
            _ => self.protocol_violation(0, format!("a {kind:?} message arrived at the wrong time")),
        }
    }

    /// Counts progress of any rank as progress of this one, which may wait inside a collective for
    /// a slow peer that still advances.
    fn handle_leader_heartbeat(&mut self, progress: u64) {
        if progress != self.leader_progress {
            self.leader_progress = progress;
            if let Some(running) = &mut self.running {
                running.last_progress_ns = self.clock.now_ns();
            }
        }
    }

    fn send_hello(&mut self) {
        let (Some(_), Some(fingerprints)) = (&self.init, &self.loaded_fingerprints) else { return };
        let c = &self.config;
        self.actions.push(Action::Send(Message::HelloAck(HelloAck {
            build: c.build.clone(),
            plan: c.plan,
            parity: identity_keys(&c.build, c.plan, &c.programs, &c.tripwires)
                .with_known_key("watchdogs", c.limits.describe())
                .merge(&c.parity),
            fingerprints: fingerprints.clone(),
        })));
    }

    fn handle_envelope(&mut self, e: Envelope) {
        let call_id = e.header.call_id;
        let Some(init) = &self.init else {
            return self.protocol_violation(call_id, "an envelope came before the hello");
        };
        let shutdown = e.header.action == CallAction::Shutdown;
        if !shutdown && self.loaded_fingerprints.is_none() {
            return self.protocol_violation(call_id, "an envelope came before this rank had loaded");
        }
        let open = self.pending.len() + usize::from(self.running.is_some());
        let local = LocalState {
            plan: self.config.plan,
            session: init.session,
            last_call_id: self.last_call_id,
            state: &self.predicted,
            session_spec: &self.config.session_spec,
            programs: &self.config.programs,
            open_calls: open,
            tripwires: &self.config.tripwires,
        };
        let after = match check_envelope(&e, &local) {
            Ok(after) => after,
            Err(found) => return self.refuse_call(call_id, self.refusal_of_findings(&found)),
        };
        if shutdown {
            return self.answer_shutdown(&e);
        }
        if open >= self.config.limits.max_outstanding as usize {
            let text = format!("envelope {call_id} came while {open} calls are open, the limit");
            return self.protocol_violation(call_id, text);
        }
        self.last_call_id = call_id;
        let digest = after.state_digest();
        self.predicted = after;
        self.pending.push_back(PendingCall {
            envelope: e,
            predicted_state: digest,
            context: Tensors::default(),
            ready: false,
        });
        let newest = self.pending.len() - 1;
        if !needs_context(&self.pending[newest].envelope) {
            self.send_ready(newest);
        }
    }

    fn handle_context(&mut self, c: CallContext) {
        let at = self
            .pending
            .iter()
            .position(|p| p.envelope.header.call_id == c.call_id && !p.ready && needs_context(&p.envelope));
        let Some(at) = at else {
            let text = format!("context arrived for call {}, which does not wait for one", c.call_id);
            return self.protocol_violation(c.call_id, text);
        };
        if let Some(meta) = &self.pending[at].envelope.meta
            && let Err(found) = check_context(meta, &c.tensors, &self.config.programs, &self.config.tripwires)
        {
            return self.refuse_call(c.call_id, self.refusal_of_findings(&found));
        }
        self.pending[at].context = c.tensors;
        self.send_ready(at);
    }

    fn send_ready(&mut self, at: usize) {
        let p = &mut self.pending[at];
        p.ready = true;
        self.actions.push(Action::Send(Message::Ready(Ready {
            call_id: p.envelope.header.call_id,
            predicted_state: p.predicted_state,
            inputs: input_digest(&p.envelope, &p.context),
        })));
    }

    fn handle_commit(&mut self, call_id: u64) {
        let front = self.pending.front();
        let open = front.is_some_and(|p| p.envelope.header.call_id == call_id && p.ready);
        if self.running.is_some() || !open {
            let code = if call_id <= self.last_commit { &T0746 } else { &T0707 };
            if !self.is_armed(code) {
                return;
            }
            let text = format!(
                "commit of call {call_id}; running {:?}, next {:?}, last committed {}",
                self.running.as_ref().map(|r| r.call_id),
                front.map(|p| p.envelope.header.call_id),
                self.last_commit
            );
            let failure = self.local_failure(FailureClass::Protocol, Some(self.config.rank), code, text);
            return self.refuse_call(call_id, failure);
        }
        let Some(p) = self.pending.pop_front() else { return };
        self.running = Some(RunningCall {
            call_id,
            cache_epoch: p.envelope.header.cache_epoch,
            deadline_ns: u64::from(p.envelope.header.deadline_ms) * 1_000_000,
            progress: 0,
            last_progress_ns: self.clock.now_ns(),
        });
        self.last_commit = call_id;
        let mut inputs = p.envelope.tensors;
        inputs.0.extend(p.context.0);
        self.actions.push(Action::Run(Box::new(ReadyCall {
            call_id,
            action: p.envelope.header.action,
            chunk: p.envelope.header.chunk,
            cache_epoch: p.envelope.header.cache_epoch,
            meta: p.envelope.meta,
            reload: p.envelope.reload,
            inputs,
        })));
    }

    fn report_engine_fault(&mut self, fault: EngineFault) {
        // A rank that waited in vain, or lost a link to another one, is not at fault: only the leader sees
        // all ranks. If no cause arrives, the failure names no rank, and its text both ends of the link.
        let is_at_fault = fault.kind == EngineFaultKind::Failed;
        let failure = Failure {
            class: fault.failure_class(),
            rank: is_at_fault.then_some(self.config.rank),
            site: CheckSite::Worker,
            code: fault.code,
            text: fault.text,
        };
        // A collective brings values that are not finite to every member, so a peer may know the cause.
        let is_spread = failure.code == T0771.id;
        if is_spread || !is_at_fault {
            self.report_secondary(failure);
        } else {
            self.report_fault(failure);
        }
    }

    fn finish_call(&mut self, report: CallReport) {
        let Some(RunningCall { call_id, cache_epoch, .. }) = self.running.take() else {
            return self.protocol_violation(0, "the engine ended a call that was not running");
        };
        let output = if self.config.sends_output { report.outputs } else { Tensors::default() };
        self.actions.push(Action::Send(Message::Done(Box::new(Done {
            call_id,
            cache_epoch,
            observed: report.observed,
            fingerprints: report.fingerprints,
            output,
        }))));
    }

    fn answer_shutdown(&mut self, e: &Envelope) {
        let call_id = e.header.call_id;
        if let Some(running) = &self.running {
            let text = format!("shutdown came while call {} runs", running.call_id);
            return self.protocol_violation(call_id, text);
        }
        let observed = CallObservation {
            trace: Digest::hash_trace([]),
            state: self.predicted.state_digest(),
            ..CallObservation::default()
        };
        let done = Done {
            call_id,
            cache_epoch: e.header.cache_epoch,
            observed,
            fingerprints: Vec::new(),
            output: Tensors::default(),
        };
        self.actions.push(Action::Send(Message::Done(Box::new(done))));
        self.actions.push(Action::Exit(None));
        self.ended = true;
    }

    /// Refuses a message that is illegal at this time and ends the run, unless the tripwire is
    /// disabled.
    fn protocol_violation(&mut self, call_id: u64, text: impl Into<String>) {
        if self.is_armed(&T0707) {
            let failure = self.local_failure(FailureClass::Protocol, Some(self.config.rank), &T0707, text);
            self.refuse_call(call_id, failure);
        }
    }

    /// Reports why this rank refuses a call, then ends.
    fn refuse_call(&mut self, call_id: u64, failure: Failure) {
        self.actions.push(Action::Send(Message::Refused(Refused { call_id, failure: failure.clone() })));
        self.end_run(failure);
    }

    /// Reports why this rank cannot continue, then ends.
    fn report_fault(&mut self, failure: Failure) {
        let report = FaultReport { failure: failure.clone(), secondary: false };
        self.actions.push(Action::Send(Message::Fault(report)));
        self.end_run(failure);
    }

    /// Reports a failure whose cause is elsewhere, and waits for the report of the cause.
    fn report_secondary(&mut self, failure: Failure) {
        if self.secondary_failure.is_none() {
            let report = FaultReport { failure: failure.clone(), secondary: true };
            self.actions.push(Action::Send(Message::Fault(report)));
            self.actions.push(Action::AbortEngine);
            // The leader waits for the cause, too, and then sends what it found. This rank waits longer,
            // so that it ends with the leader's finding and not with its own view.
            let patience_ns = self.config.limits.blame_ns.saturating_mul(2);
            self.secondary_failure = Some((failure, self.clock.now_ns() + patience_ns));
        }
    }

    fn end_run(&mut self, failure: Failure) {
        self.actions.push(Action::AbortEngine);
        self.actions.push(Action::Exit(Some(failure)));
        self.ended = true;
    }

    fn is_armed(&self, code: &Code) -> bool {
        self.config.tripwires.is_armed(code)
    }

    /// Returns the upstream rank and its name in messages.
    fn upstream_name(&self) -> (u32, &'static str) {
        let above = self.config.upstream_rank;
        (above, if above == 0 { "the leader" } else { "the mesh leader" })
    }

    fn local_failure(
        &self,
        class: FailureClass,
        rank: Option<u32>,
        code: &Code,
        text: impl Into<String>,
    ) -> Failure {
        Failure::new(class, rank, code, text).with_site(CheckSite::Worker)
    }

    fn refusal_of_findings(&self, found: &Diagnostics) -> Failure {
        failure_from_findings(Some(self.config.rank), CheckSite::Worker, found)
    }
}

/// Converts findings about an envelope into one failure. The first finding determines its class and
/// code, because the others often follow from it; the text contains all of them.
pub(crate) fn failure_from_findings(rank: Option<u32>, place: CheckSite, found: &Diagnostics) -> Failure {
    let class = match found.first() {
        Some(d) if d.code == &T0731 => FailureClass::Parity,
        Some(d) if d.code == &T0712 || d.code == &T0710 => FailureClass::Drift,
        _ => FailureClass::Protocol,
    };
    Failure::from_diagnostics(class, rank, found)
        .unwrap_or_else(|| Failure::new(class, rank, &T0707, "refused without a finding"))
        .with_site(place)
}

/// Converts the diagnostic of an engine that failed to load into a failure of this rank.
#[must_use]
pub fn load_failure(rank: u32, d: &tessera_base::Diagnostic) -> Failure {
    Failure::from_diagnostic(FailureClass::Engine, Some(rank), d).with_site(CheckSite::Init)
}

pub(crate) fn needs_context(e: &Envelope) -> bool {
    e.header.action == CallAction::Infer && e.meta.as_ref().is_some_and(CallMeta::recomputes_context)
}
