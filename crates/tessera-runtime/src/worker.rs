//! A rank's side of lockstep: checks what it is sent, answers, runs what is committed, and decides nothing.

use std::collections::VecDeque;
use std::sync::Arc;

use tessera_base::{Code, Diagnostics};

use crate::cache::{Cache, CacheSpec, T0710, T0712};
use crate::census::Census;
use crate::check::{Local, T0731, check_context, check_envelope, input_digest};
use crate::engine::{CallReport, EngineFault, FaultKind, ReadyCall};
use crate::leader::T0743;
use crate::limits::{AwakeClock, ms};
use crate::parity::identity;
use crate::tripwire::{Place, Tripwires};
use crate::wire::{
    CallAction, Context, Done, Envelope, Fault, Heartbeat, HelloAck, Init, Kind, Message, Observed, Ready,
    Refused, Role, ShardPrint, Tensors,
};
use crate::{Digest, Failure, FailureClass, Limits, Parity};

/// A message that may not come here now.
pub(crate) static T0707: Code = Code {
    id: "T0707",
    title: "a message came from the wrong role or at the wrong time",
    page: "Only the leader originates control messages; a worker replies and shows signs of life, and each message \
has its place: hello, envelope, context, commit. This one was sent by the wrong side, for a call that is not open, or \
before what must precede it. The peer is another program, another build, or has lost its place; the run ends.",
};
/// One call twice.
pub(crate) static T0746: Code = Code {
    id: "T0746",
    title: "a second run of a call was asked for",
    page: "A rank runs each call exactly once. A commit arrived for a call that this rank has run, is running, or \
never agreed to. Running it again would issue collectives that no peer joins, so it is refused and the run ends.",
};
/// The launcher is gone.
pub(crate) static T0749: Code = Code {
    id: "T0749",
    title: "the process that started the ranks is gone",
    page: "Every rank holds a socket to the process that spawned it. That socket closed without a stop, so nobody \
is left to receive output or to clean up, and the rank ended itself. The launching process was killed or crashed; \
start there.",
};
/// A peer died.
pub(crate) static T0742: Code = Code {
    id: "T0742",
    title: "a rank's process ended while it was needed",
    page: "The control socket of a rank closed before that rank had answered the shutdown, so its process is gone: \
killed, out of memory, or crashed. The launcher's report adds its exit status or signal. Signal 9 without anybody \
having sent it is usually the kernel's out-of-memory killer; the kernel log says so.",
};

/// What a worker must know before its first message.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// This rank.
    pub rank: u32,
    /// The rank that its socket leads to: 0, or the mesh leader of a member behind one.
    pub above: u32,
    /// Digest of the sealed plan it holds.
    pub plan: Digest,
    /// Its build.
    pub build: String,
    /// What it shows at the hello.
    pub parity: Parity,
    /// The seal's programs.
    pub census: Arc<Census>,
    /// Sizes of the caches, from the seal.
    pub cache: CacheSpec,
    /// Bounds.
    pub limits: Limits,
    /// Whether this rank sends the chunk's latents to the leader.
    pub delivers: bool,
    /// What is not checked.
    pub tripwires: Tripwires,
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// Time passed; `mark` is the engine's progress.
    Tick {
        /// See [`Heartbeat`].
        mark: u64,
    },
    /// A message from the leader.
    Message(Message),
    /// The engine is loaded.
    EngineReady {
        /// What it adds to the parity table.
        parity: Parity,
        /// What it holds of the weights.
        fingerprints: Vec<ShardPrint>,
    },
    /// The engine could not be loaded.
    EngineFailed(Failure),
    /// The committed call ended.
    CallEnded(Result<CallReport, EngineFault>),
    /// The socket to the rank above closed.
    LeaderGone(String),
    /// The launcher's socket closed.
    LauncherGone,
}

/// What to do.
#[derive(Debug)]
pub enum Action {
    /// Send to the leader.
    Send(Message),
    /// Hand to the engine's thread.
    Run(Box<ReadyCall>),
    /// Make blocked collectives return.
    AbortEngine,
    /// End the process; nothing follows.
    Exit(Option<Failure>),
}

/// The machine.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
    clock: AwakeClock,
    last_beat_ns: u64,
    /// When the leader was last heard of.
    heard_ns: u64,
    /// The leader's count of progress, over all ranks.
    progress: u64,
    init: Option<Init>,
    /// What the loaded engine holds of the weights.
    loaded: Option<Vec<ShardPrint>>,
    last_call_id: u64,
    last_commit: u64,
    /// State after the last accepted envelope.
    predicted: Cache,
    pending: VecDeque<Pending>,
    running: Option<Running>,
    ended: bool,
}

/// An accepted call that is not committed.
#[derive(Debug)]
struct Pending {
    envelope: Envelope,
    after: Digest,
    context: Tensors,
    ready: bool,
}

#[derive(Debug)]
struct Running {
    call_id: u64,
    cache_epoch: u32,
    deadline_ns: u64,
    mark: u64,
    marked_ns: u64,
}

impl Worker {
    /// Refuses limits without bounds and impossible caches.
    pub fn new(config: WorkerConfig) -> Result<Worker, Diagnostics> {
        let mut found = config.limits.check();
        config.tripwires.filter(&mut found);
        if !found.is_empty() {
            return Err(found);
        }
        let predicted = Cache::new(config.cache).map_err(|d| vec![d])?;
        Ok(Worker {
            config,
            clock: AwakeClock::default(),
            last_beat_ns: 0,
            heard_ns: 0,
            progress: 0,
            init: None,
            loaded: None,
            last_call_id: 0,
            last_commit: 0,
            predicted,
            pending: VecDeque::new(),
            running: None,
            ended: false,
        })
    }

    /// Takes one event.
    pub fn step(&mut self, now_ns: u64, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        if self.ended {
            return out;
        }
        self.clock.advance(now_ns, self.config.limits.heartbeat_ns);
        match event {
            Event::Tick { mark } => self.tick(mark, &mut out),
            Event::Message(message) => self.message(message, &mut out),
            Event::EngineReady { parity, fingerprints } => {
                self.config.parity = std::mem::take(&mut self.config.parity).join(&parity);
                self.loaded = Some(fingerprints);
                self.hello(&mut out);
            }
            Event::EngineFailed(failure) => self.fault(failure, false, &mut out),
            Event::CallEnded(Ok(report)) => self.call_ended(report, &mut out),
            Event::CallEnded(Err(fault)) => {
                let failure = Failure {
                    class: fault.class(),
                    rank: Some(self.config.rank),
                    place: Place::Worker,
                    code: fault.code,
                    text: fault.text,
                };
                self.fault(failure, fault.kind == FaultKind::Aborted, &mut out);
            }
            Event::LeaderGone(how) if self.armed(&T0742) => {
                let (above, who) = self.above();
                let text = format!("{who} is gone: {how}");
                self.end(self.here(FailureClass::RankDied, Some(above), &T0742, text), &mut out);
            }
            Event::LauncherGone if self.armed(&T0749) => {
                let text = "the launching process closed its socket".to_string();
                self.end(self.here(FailureClass::LauncherGone, None, &T0749, text), &mut out);
            }
            Event::LeaderGone(_) | Event::LauncherGone => {}
        }
        out
    }

    /// Whether nothing more will come out of this machine.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended
    }

    fn tick(&mut self, mark: u64, out: &mut Vec<Action>) {
        let now = self.clock.now();
        if now >= self.last_beat_ns + self.config.limits.heartbeat_ns {
            self.last_beat_ns = now;
            // The mark of a finished call must not be taken for progress of the next one.
            let mark = if self.running.is_some() { mark } else { 0 };
            out.push(Action::Send(Message::Heartbeat(Heartbeat { mark })));
        }
        if let Some(running) = &mut self.running
            && running.mark != mark
        {
            (running.mark, running.marked_ns) = (mark, now);
        }
        if !self.armed(&T0743) {
            return;
        }
        // Before its first message a leader may be loading, as long as anybody may.
        let limits = &self.config.limits;
        let patience = if self.init.is_some() { limits.stale_ns } else { limits.hello_ns };
        // A mesh leader misses a silent leader first, and says so.
        let patience = patience + if self.config.above == 0 { 0 } else { limits.heartbeat_ns };
        let quiet = now.saturating_sub(self.heard_ns);
        if quiet > patience {
            let (above, who) = self.above();
            let text = format!("nothing was heard of {who} for {}, limit {}", ms(quiet), ms(patience));
            return self.end(self.here(FailureClass::Stall, Some(above), &T0743, text), out);
        }
        if let Some(r) = &self.running
            && now.saturating_sub(r.marked_ns) > r.deadline_ns
        {
            let (quiet, limit) = (ms(now - r.marked_ns), ms(r.deadline_ns));
            let text = format!("call {}: no progress here for {quiet}, deadline {limit}", r.call_id);
            // It may be waiting for another rank: only the leader sees all marks.
            let failure = self.here(FailureClass::Stall, Some(self.config.rank), &T0743, text);
            self.fault(failure, true, out);
        }
    }

    fn message(&mut self, message: Message, out: &mut Vec<Action>) {
        self.heard_ns = self.clock.now();
        let kind = message.kind();
        if kind.sender() != Role::Leader && kind != Kind::Heartbeat {
            return self.broken(0, format!("a {kind:?} message arrived at a worker"), out);
        }
        match message {
            Message::Init(init) if self.init.is_none() => {
                self.init = Some(init);
                self.hello(out);
            }
            Message::Envelope(e) => self.envelope(*e, out),
            Message::Context(c) => self.context(c, out),
            Message::Commit(c) => self.commit(c.call_id, out),
            Message::Abort(a) => self.end(a.failure, out),
            Message::Heartbeat(h) => self.leader_beats(h.mark),
            _ => self.broken(0, format!("a {kind:?} message arrived out of place"), out),
        }
    }

    /// Progress anywhere is progress here: this rank may wait in a collective for a peer that is slow and goes on.
    fn leader_beats(&mut self, progress: u64) {
        if progress != self.progress {
            self.progress = progress;
            if let Some(running) = &mut self.running {
                running.marked_ns = self.clock.now();
            }
        }
    }

    fn hello(&mut self, out: &mut Vec<Action>) {
        let (Some(_), Some(fingerprints)) = (&self.init, &self.loaded) else { return };
        let c = &self.config;
        out.push(Action::Send(Message::HelloAck(HelloAck {
            build: c.build.clone(),
            plan: c.plan,
            parity: identity(&c.build, c.plan, &c.census, &c.tripwires).join(&c.parity),
            fingerprints: fingerprints.clone(),
        })));
    }

    fn envelope(&mut self, e: Envelope, out: &mut Vec<Action>) {
        let call_id = e.header.call_id;
        let Some(init) = &self.init else {
            return self.broken(call_id, "an envelope came before the hello".into(), out);
        };
        let shutdown = e.header.action == CallAction::Shutdown;
        if !shutdown && self.loaded.is_none() {
            let text = "an envelope came before this rank was loaded".into();
            return self.broken(call_id, text, out);
        }
        let open = self.pending.len() + usize::from(self.running.is_some());
        let local = Local {
            plan: self.config.plan,
            session: init.session,
            last_call_id: self.last_call_id,
            cache: &self.predicted,
            census: &self.config.census,
            open,
            tripwires: &self.config.tripwires,
        };
        let after = match check_envelope(&e, &local) {
            Ok(after) => after,
            Err(found) => return self.refuse(call_id, self.failure(&found), out),
        };
        if shutdown {
            return self.shutdown(&e, out);
        }
        if open >= self.config.limits.max_outstanding as usize {
            let text = format!("envelope {call_id} came while {open} calls are open, the limit");
            return self.broken(call_id, text, out);
        }
        self.last_call_id = call_id;
        let digest = after.digest();
        self.predicted = after;
        self.pending.push_back(Pending {
            envelope: e,
            after: digest,
            context: Tensors::default(),
            ready: false,
        });
        let newest = self.pending.len() - 1;
        if !wants_context(&self.pending[newest].envelope) {
            self.ready(newest, out);
        }
    }

    fn context(&mut self, c: Context, out: &mut Vec<Action>) {
        let at = self
            .pending
            .iter()
            .position(|p| p.envelope.header.call_id == c.call_id && !p.ready && wants_context(&p.envelope));
        let Some(at) = at else {
            let text = format!("context came for call {}, which does not wait for it", c.call_id);
            return self.broken(c.call_id, text, out);
        };
        if let Some(meta) = &self.pending[at].envelope.meta
            && let Err(found) = check_context(meta, &c.tensors, &self.config.census, &self.config.tripwires)
        {
            return self.refuse(c.call_id, self.failure(&found), out);
        }
        self.pending[at].context = c.tensors;
        self.ready(at, out);
    }

    fn ready(&mut self, at: usize, out: &mut Vec<Action>) {
        let p = &mut self.pending[at];
        p.ready = true;
        out.push(Action::Send(Message::Ready(Ready {
            call_id: p.envelope.header.call_id,
            predicted_state: p.after,
            inputs: input_digest(&p.envelope, &p.context),
        })));
    }

    fn commit(&mut self, call_id: u64, out: &mut Vec<Action>) {
        let front = self.pending.front();
        let open = front.is_some_and(|p| p.envelope.header.call_id == call_id && p.ready);
        if self.running.is_some() || !open {
            let code = if call_id <= self.last_commit { &T0746 } else { &T0707 };
            if !self.armed(code) {
                return;
            }
            let text = format!(
                "commit of call {call_id}; running {:?}, next {:?}, last committed {}",
                self.running.as_ref().map(|r| r.call_id),
                front.map(|p| p.envelope.header.call_id),
                self.last_commit
            );
            let failure = self.here(FailureClass::Protocol, Some(self.config.rank), code, text);
            return self.refuse(call_id, failure, out);
        }
        let Some(p) = self.pending.pop_front() else { return };
        self.running = Some(Running {
            call_id,
            cache_epoch: p.envelope.header.cache_epoch,
            deadline_ns: u64::from(p.envelope.header.deadline_ms) * 1_000_000,
            mark: 0,
            marked_ns: self.clock.now(),
        });
        self.last_commit = call_id;
        let mut inputs = p.envelope.tensors;
        inputs.0.extend(p.context.0);
        out.push(Action::Run(Box::new(ReadyCall {
            call_id,
            action: p.envelope.header.action,
            chunk: p.envelope.header.chunk,
            cache_epoch: p.envelope.header.cache_epoch,
            meta: p.envelope.meta,
            reload: p.envelope.reload,
            inputs,
        })));
    }

    fn call_ended(&mut self, report: CallReport, out: &mut Vec<Action>) {
        let Some(Running { call_id, cache_epoch, .. }) = self.running.take() else {
            return self.broken(0, "the engine ended a call that was not running".into(), out);
        };
        let output = if self.config.delivers { report.output.into_iter().collect() } else { Vec::new() };
        out.push(Action::Send(Message::Done(Box::new(Done {
            call_id,
            cache_epoch,
            observed: report.observed,
            fingerprints: report.fingerprints,
            output: Tensors(output),
        }))));
    }

    fn shutdown(&mut self, e: &Envelope, out: &mut Vec<Action>) {
        let call_id = e.header.call_id;
        if let Some(running) = &self.running {
            let text = format!("shutdown came while call {} runs", running.call_id);
            return self.broken(call_id, text, out);
        }
        let observed =
            Observed { trace: Digest::of_trace([]), state: self.predicted.digest(), ..Observed::default() };
        let done = Done {
            call_id,
            cache_epoch: e.header.cache_epoch,
            observed,
            fingerprints: Vec::new(),
            output: Tensors::default(),
        };
        out.push(Action::Send(Message::Done(Box::new(done))));
        out.push(Action::Exit(None));
        self.ended = true;
    }

    /// A message that may not come here now: the end, unless nobody checks.
    fn broken(&mut self, call_id: u64, text: String, out: &mut Vec<Action>) {
        if self.armed(&T0707) {
            let failure = self.here(FailureClass::Protocol, Some(self.config.rank), &T0707, text);
            self.refuse(call_id, failure, out);
        }
    }

    /// Says why a call is not run here, then leaves.
    fn refuse(&mut self, call_id: u64, failure: Failure, out: &mut Vec<Action>) {
        out.push(Action::Send(Message::Refused(Refused { call_id, failure: failure.clone() })));
        self.end(failure, out);
    }

    /// Says why this rank cannot go on, then leaves.
    fn fault(&mut self, failure: Failure, secondary: bool, out: &mut Vec<Action>) {
        out.push(Action::Send(Message::Fault(Fault { failure: failure.clone(), secondary })));
        self.end(failure, out);
    }

    fn end(&mut self, failure: Failure, out: &mut Vec<Action>) {
        out.push(Action::AbortEngine);
        out.push(Action::Exit(Some(failure)));
        self.ended = true;
    }

    fn armed(&self, code: &Code) -> bool {
        self.config.tripwires.armed(code)
    }

    /// Who leads this rank directly, and what it is called.
    fn above(&self) -> (u32, &'static str) {
        let above = self.config.above;
        (above, if above == 0 { "the leader" } else { "the mesh leader" })
    }

    fn here(&self, class: FailureClass, rank: Option<u32>, code: &Code, text: String) -> Failure {
        Failure::new(class, rank, code, text).at(Place::Worker)
    }

    fn failure(&self, found: &Diagnostics) -> Failure {
        refusal(Some(self.config.rank), Place::Worker, found)
    }
}

/// The first finding about an envelope as a failure: the rest follow from it or stand beside it in the text.
pub(crate) fn refusal(rank: Option<u32>, place: Place, found: &Diagnostics) -> Failure {
    let class = match found.first() {
        Some(d) if d.code == &T0731 => FailureClass::Parity,
        Some(d) if d.code == &T0712 || d.code == &T0710 => FailureClass::Drift,
        _ => FailureClass::Protocol,
    };
    Failure::from_diagnostics(class, rank, found)
        .unwrap_or_else(|| Failure::new(class, rank, &T0707, "refused without a reason"))
        .at(place)
}

/// An engine that could not be loaded, as a failure of this rank.
#[must_use]
pub fn load_failure(rank: u32, d: &tessera_base::Diagnostic) -> Failure {
    Failure::from_diagnostic(FailureClass::Engine, Some(rank), d).at(Place::Init)
}

pub(crate) fn wants_context(e: &Envelope) -> bool {
    e.header.action == CallAction::Infer && e.meta.as_ref().is_some_and(|m| m.recompute)
}
