//! The leader's side of lockstep: plans calls ahead, lets no rank run before all are ready, compares what the
//! ranks saw, and turns the first thing that goes wrong into the one failure of the run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use tessera_base::{Code, Diagnostics, Severity};

use crate::cache::Cache;
use crate::census::Census;
use crate::check::{Local, check_context, check_envelope, input_digest};
use crate::decide::{CallPlan, ChunkRequest, Director, StreamSpec, T0721};
use crate::drift::{T0744, departs, outputs_differ};
use crate::limits::AwakeClock;
use crate::wire::{
    self, Abort, CallAction, Commit, Context, Done, Envelope, EnvelopeHeader, Heartbeat, HelloAck, Init,
    Message, Observed, Progress, Ready, Tensor, Tensors, WIRE_VERSION,
};
use crate::worker::{T0707, T0742, T0749, wants_context};
use crate::{Digest, Failure, FailureClass, Limits, Parity, parity};

/// No answer, or no progress.
pub(crate) static T0743: Code = Code {
    id: "T0743",
    title: "a rank stalled",
    page: "A rank is alive, or at least its sockets are, but it did not answer in time, showed no sign of life, or \
made no progress inside a call for longer than the limit. The rank named is the one that is furthest behind: ranks \
that wait for it inside a collective are not the cause.\n\nThe limit inside a call is five seconds or four times the \
longest quiet time seen so far, counted from the last mark. A stopped process, a stuck device and a kernel that is \
really that slow look alike from here; the marks in the message say how far each rank came.",
};
/// Chunks that could not be delivered.
pub(crate) static T0748: Code = Code {
    id: "T0748",
    title: "finished chunks could not be delivered",
    page: "The ranks did their part and the leader could not decode or write what they made: a full disk, a folder \
that is gone, or a decoder that failed. The text is the system's own. Chunks delivered before this one are complete.",
};

/// What the leader must know before its first message.
#[derive(Debug, Clone)]
pub struct LeaderConfig {
    /// Ranks that run calls, in ascending order; rank 0 is among them unless it stands outside the mesh.
    pub ranks: Vec<u32>,
    /// Digest of the sealed plan.
    pub plan: Digest,
    /// The session.
    pub session: u64,
    /// The leader's build.
    pub build: String,
    /// Ranks that put out no latents, because they are not of the first stage.
    pub silent: Vec<u32>,
    /// What every rank's table is compared with.
    pub parity: Parity,
    /// The seal's programs.
    pub census: Arc<Census>,
    /// The stream.
    pub stream: StreamSpec,
    /// Bounds.
    pub limits: Limits,
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// Time passed.
    Tick,
    /// A message from a rank.
    Message {
        /// The rank.
        rank: u32,
        /// What it sent.
        message: Message,
    },
    /// A rank's socket closed or broke.
    Gone {
        /// The rank.
        rank: u32,
        /// How, in words.
        how: String,
    },
    /// A chunk is wanted; never more than [`Leader::wants`] at a time.
    Request {
        /// What is wanted.
        request: ChunkRequest,
        /// The prompt's embedding, with a new prompt.
        text: Option<Tensor>,
    },
    /// No further chunk will be wanted.
    NoMoreRequests,
    /// The context for a chunk is made.
    Context {
        /// The chunk.
        chunk: u32,
        /// Its context.
        tensor: Tensor,
    },
    /// A chunk was decoded and written.
    Delivered {
        /// The chunk.
        chunk: u32,
        /// Frames it became.
        frames: u32,
    },
    /// Something beside the lockstep failed: the studio, a socket write, the engine's thread.
    Failed(Failure),
    /// End at the next chunk boundary.
    Stop,
    /// The launcher's socket closed.
    LauncherGone,
}

/// What to do.
#[derive(Debug)]
pub enum Action {
    /// Send to every rank of the mesh.
    Broadcast(Message),
    /// Have the studio make the context of a chunk from the output before it.
    MakeContext {
        /// The chunk that needs it.
        chunk: u32,
        /// Output of the chunk before.
        previous: Tensor,
    },
    /// Have the studio decode and write a chunk.
    Deliver {
        /// The chunk.
        chunk: u32,
        /// Its latents.
        latents: Tensor,
    },
    /// Write down a finished call.
    Record(Box<CallRecord>),
    /// Write down something worth knowing that stops nothing.
    Note(String),
    /// Send to the launcher.
    Report(Message),
    /// End the process; nothing follows.
    Exit(Option<Failure>),
}

/// A finished call, for the run's record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallRecord {
    /// Its id.
    pub call_id: u64,
    /// The call as it was decided.
    pub plan: CallPlan,
    /// What each rank saw.
    pub observed: BTreeMap<u32, Observed>,
    /// From commit to the last rank's done, in nanoseconds of the leader's clock.
    pub run_ns: u64,
    /// Requests that waited when it finished.
    pub queued_in: u32,
    /// Finished chunks that waited for delivery when it finished, this one included.
    pub queued_out: u32,
}

/// The machine.
#[derive(Debug)]
pub struct Leader {
    config: LeaderConfig,
    director: Director,
    /// State after the last envelope, kept apart from the director's for the preflight.
    checked: Cache,
    clock: AwakeClock,
    stage: Stage,
    peers: BTreeMap<u32, Peer>,
    inbox: VecDeque<(ChunkRequest, Option<Tensor>)>,
    no_more: bool,
    stopping: bool,
    open: VecDeque<Open>,
    last_call_id: u64,
    text: Option<Tensor>,
    last_output: Option<Tensor>,
    /// Phase times of finished chunks that are not delivered, oldest first.
    undelivered: VecDeque<(u32, Vec<(String, u64)>)>,
    delivered: u64,
    longest_quiet_ns: u64,
    last_beat_ns: u64,
    /// An echo of a failure whose cause may still be on its way, and until when to wait for it.
    echo: Option<(Failure, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    New,
    Hello { since_ns: u64 },
    Running,
    Stopping { since_ns: u64, call_id: u64 },
    Ended,
}

#[derive(Debug, Default)]
struct Peer {
    greeted: bool,
    stopped: bool,
    faulted: bool,
    heard_ns: u64,
    mark: u64,
    marked_ns: u64,
}

/// A call whose envelope was sent.
#[derive(Debug)]
struct Open {
    plan: CallPlan,
    envelope: Envelope,
    after: Digest,
    context: Tensors,
    context_asked: bool,
    context_sent: bool,
    ready: BTreeSet<u32>,
    /// When the last thing that ready waits for was sent.
    sent_ns: u64,
    committed_ns: Option<u64>,
    done: BTreeMap<u32, Observed>,
    output: Option<Tensor>,
}

impl Open {
    fn call_id(&self) -> u64 {
        self.envelope.header.call_id
    }
}

impl Leader {
    /// Refuses limits without bounds, a stream that cannot be, and a mesh without ranks.
    pub fn new(config: LeaderConfig) -> Result<Leader, Diagnostics> {
        let mut found = config.limits.check();
        if config.ranks.is_empty() || !config.ranks.is_sorted_by(|a, b| a < b) {
            found.push(tessera_base::Diagnostic::error(
                &T0707,
                format!("{:?} are not ranks in ascending order", config.ranks),
            ));
        }
        if !found.is_empty() {
            return Err(found);
        }
        let director = Director::new(config.stream.clone())?;
        let checked = director.cache().clone();
        let peers = config.ranks.iter().map(|r| (*r, Peer::default())).collect();
        Ok(Leader {
            config,
            director,
            checked,
            clock: AwakeClock::default(),
            stage: Stage::New,
            peers,
            inbox: VecDeque::new(),
            no_more: false,
            stopping: false,
            open: VecDeque::new(),
            last_call_id: 0,
            text: None,
            last_output: None,
            undelivered: VecDeque::new(),
            delivered: 0,
            longest_quiet_ns: 0,
            last_beat_ns: 0,
            echo: None,
        })
    }

    /// Takes one event. The first tick sends the hello.
    pub fn step(&mut self, now_ns: u64, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        if self.ended() {
            return out;
        }
        let now = self.clock.advance(now_ns, self.config.limits.heartbeat_ns);
        if self.stage == Stage::New {
            self.stage = Stage::Hello { since_ns: now };
            out.push(Action::Broadcast(Message::Init(Init {
                wire_version: WIRE_VERSION,
                build: self.config.build.clone(),
                plan: self.config.plan,
                session: self.config.session,
                parity: self.config.parity.clone(),
            })));
        }
        match event {
            Event::Tick => self.tick(now, &mut out),
            Event::Message { rank, message } => self.message(rank, message, &mut out),
            Event::Gone { rank, how } => self.gone(rank, &how, &mut out),
            Event::Request { request, text } => self.request(request, text, &mut out),
            Event::NoMoreRequests => self.no_more = true,
            Event::Context { chunk, tensor } => self.context(chunk, tensor, &mut out),
            Event::Delivered { chunk, frames } => self.delivered(chunk, frames, &mut out),
            Event::Failed(failure) => self.fail(failure, &mut out),
            Event::Stop => {
                self.stopping = true;
                self.inbox.clear();
            }
            Event::LauncherGone => {
                let text = "the launching process closed its socket";
                self.fail(Failure::new(FailureClass::LauncherGone, None, &T0749, text), &mut out);
            }
        }
        self.pump(&mut out);
        out
    }

    /// How many more requests may be handed over now.
    #[must_use]
    pub fn wants(&self) -> usize {
        if self.no_more || self.stopping || self.ended() {
            return 0;
        }
        (self.config.limits.d_in as usize).saturating_sub(self.inbox.len())
    }

    /// Whether nothing more will come out of this machine.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.stage == Stage::Ended
    }

    /// Most finished chunks that can wait for delivery, plus the context of the next.
    #[must_use]
    pub fn studio_depth(limits: &Limits) -> usize {
        limits.d_out as usize + limits.d_in as usize + 2
    }

    // Messages of ranks.

    fn message(&mut self, rank: u32, message: Message, out: &mut Vec<Action>) {
        let now = self.clock.now();
        let Some(peer) = self.peers.get_mut(&rank) else {
            return self.protocol(rank, "a message came from a rank outside the mesh".into(), out);
        };
        peer.heard_ns = now;
        match message {
            Message::HelloAck(ack) => self.hello_ack(rank, &ack, out),
            Message::Ready(r) => self.ready(rank, &r, out),
            Message::Refused(r) => {
                peer.faulted = true;
                self.fail(Failure { rank: Some(rank), ..r.failure }, out);
            }
            Message::Done(d) => self.done(rank, *d, out),
            Message::Fault(f) => {
                peer.faulted = true;
                let failure = Failure { class: f.class, rank: Some(rank), code: f.code, text: f.text };
                if f.secondary {
                    self.echo.get_or_insert((failure, now + self.config.limits.blame_ns));
                } else {
                    self.fail(failure, out);
                }
            }
            Message::Heartbeat(h) => {
                if h.mark != peer.mark {
                    let running = self.open.front().and_then(|o| o.committed_ns);
                    if let Some(since) = running {
                        let quiet = now - peer.marked_ns.max(since).min(now);
                        self.longest_quiet_ns = self.longest_quiet_ns.max(quiet);
                    }
                    peer.mark = h.mark;
                    peer.marked_ns = now;
                }
            }
            other => {
                let kind = other.kind();
                let text = format!("a {kind:?} message, which is a {:?}'s to send", kind.sender());
                self.protocol(rank, text, out);
            }
        }
    }

    fn hello_ack(&mut self, rank: u32, ack: &HelloAck, out: &mut Vec<Action>) {
        let identity = |build: &str, plan: Digest| {
            Parity::default().with("build", parity::ParityClass::AtInit, build).with(
                "plan digest",
                parity::ParityClass::AtInit,
                format!("{plan:?}"),
            )
        };
        let mut found =
            identity(&self.config.build, self.config.plan).compare(rank, &identity(&ack.build, ack.plan));
        found.extend(self.config.parity.compare(rank, &ack.parity));
        for d in &found {
            let failure = Failure::from_diagnostic(FailureClass::Parity, Some(rank), d);
            match d.severity {
                Severity::Error => return self.fail(failure, out),
                Severity::Warning => out.push(Action::Note(failure.text)),
            }
        }
        match (self.stage, self.peers.get_mut(&rank)) {
            (Stage::Hello { .. }, Some(peer)) if !peer.greeted => peer.greeted = true,
            // A rank that was loading when the stop came may still say hello.
            (Stage::Stopping { .. }, _) => return,
            _ => return self.protocol(rank, "a second hello".into(), out),
        }
        if self.peers.values().all(|p| p.greeted) {
            self.stage = Stage::Running;
        }
    }

    fn ready(&mut self, rank: u32, r: &Ready, out: &mut Vec<Action>) {
        let Some(open) = self.open.iter_mut().find(|o| o.call_id() == r.call_id) else {
            // The answer to a prepared call that a stop has since cancelled.
            if matches!(self.stage, Stage::Stopping { .. }) && r.call_id <= self.last_call_id {
                return;
            }
            return self.protocol(rank, format!("ready for call {}, which is not open", r.call_id), out);
        };
        if open.committed_ns.is_some() || open.ready.contains(&rank) {
            return self.protocol(rank, format!("a second ready for call {}", r.call_id), out);
        }
        let inputs = input_digest(&open.envelope, &open.context);
        for (key, sent, here) in
            [("inputs", r.inputs, inputs), ("predicted state", r.predicted_state, open.after)]
        {
            if sent != here {
                let text = format!(
                    "call {}, chunk {}: {key} of rank {rank} is {sent}, of the leader {here}",
                    r.call_id, open.plan.chunk
                );
                return self.fail(Failure::new(FailureClass::Drift, Some(rank), &T0744, text), out);
            }
        }
        open.ready.insert(rank);
    }

    fn done(&mut self, rank: u32, d: Done, out: &mut Vec<Action>) {
        if let Stage::Stopping { call_id, .. } = self.stage
            && d.call_id == call_id
        {
            if let Some(p) = self.peers.get_mut(&rank) {
                p.stopped = true;
            }
            return;
        }
        let ranks = self.config.ranks.len();
        let Some(open) =
            self.open.front_mut().filter(|o| o.call_id() == d.call_id && o.committed_ns.is_some())
        else {
            return self.protocol(rank, format!("done for call {}, which does not run", d.call_id), out);
        };
        if open.done.contains_key(&rank) {
            return self.protocol(rank, format!("call {} was run a second time", d.call_id), out);
        }
        let place = format!("call {}, chunk {}", d.call_id, open.plan.chunk);
        if let Some(text) = departs(open.envelope.meta.as_ref(), open.after, &d.observed) {
            let failure = Failure::new(
                FailureClass::Drift,
                Some(rank),
                &T0744,
                format!("{place}: rank {rank}: {text}"),
            );
            return self.fail(failure, out);
        }
        open.done.insert(rank, d.observed);
        if let Some(tensor) = d.output.0.into_iter().next() {
            open.output = Some(tensor);
        }
        if open.done.len() < ranks {
            return;
        }
        if let Some((odd, text)) = outputs_differ(&open.done, &self.config.silent) {
            let failure = Failure::new(FailureClass::Drift, Some(odd), &T0744, format!("{place}: {text}"));
            return self.fail(failure, out);
        }
        if let Some(finished) = self.open.pop_front() {
            self.finish(finished, out);
        }
    }

    fn finish(&mut self, open: Open, out: &mut Vec<Action>) {
        let run_ns = self.clock.now() - open.committed_ns.unwrap_or_default();
        let chunk = open.plan.chunk;
        let infer = open.plan.action == CallAction::Infer;
        if infer {
            let ns = open.done.values().next().map(|o| o.phase_ns.clone()).unwrap_or_default();
            let names = open.plan.meta.iter().flat_map(|m| m.phases.iter().map(|p| p.program.clone()));
            self.undelivered.push_back((chunk, names.zip(ns).collect()));
        }
        out.push(Action::Record(Box::new(CallRecord {
            call_id: open.call_id(),
            plan: open.plan,
            observed: open.done,
            run_ns,
            queued_in: self.inbox.len() as u32,
            queued_out: self.undelivered.len() as u32,
        })));
        if !infer {
            return;
        }
        let Some(latents) = open.output else {
            let text = format!("chunk {chunk} is done and no rank sent its latents");
            return self.fail(Failure::new(FailureClass::Protocol, None, &T0707, text), out);
        };
        self.last_output = Some(latents.clone());
        // The next chunk's context is on the critical path; delivery is not.
        self.ask_context(out);
        out.push(Action::Deliver { chunk, latents });
    }

    fn gone(&mut self, rank: u32, how: &str, out: &mut Vec<Action>) {
        // A rank that said why it leaves, or answered the shutdown, may close its socket.
        if self.peers.get(&rank).is_none_or(|p| p.faulted || p.stopped) {
            return;
        }
        let place = match self.open.front() {
            Some(o) if o.committed_ns.is_some() => {
                format!("while call {} (chunk {}) ran", o.call_id(), o.plan.chunk)
            }
            Some(o) => format!("while call {} (chunk {}) was prepared", o.call_id(), o.plan.chunk),
            None => "between calls".to_string(),
        };
        let text = format!("rank {rank} is gone ({how}) {place}");
        self.fail(Failure::new(FailureClass::RankDied, Some(rank), &T0742, text), out);
    }

    // The leader's own side.

    fn request(&mut self, request: ChunkRequest, text: Option<Tensor>, out: &mut Vec<Action>) {
        if self.stopping {
            return;
        }
        if self.wants() == 0 {
            let why = format!("a request came while {} wait, the limit", self.inbox.len());
            return self.fail(Failure::new(FailureClass::Protocol, None, &T0707, why), out);
        }
        if request.prompt_change != text.is_some() {
            let why = "a new prompt and its embedding come together or not at all";
            return self.fail(Failure::new(FailureClass::Preflight, None, &T0721, why), out);
        }
        self.inbox.push_back((request, text));
    }

    fn context(&mut self, chunk: u32, tensor: Tensor, out: &mut Vec<Action>) {
        if self.stopping {
            return;
        }
        let now = self.clock.now();
        let Some(open) =
            self.open.iter_mut().find(|o| o.plan.chunk == chunk && o.context_asked && !o.context_sent)
        else {
            let text = format!("a context for chunk {chunk}, which does not wait for it");
            return self.fail(Failure::new(FailureClass::Protocol, None, &T0707, text), out);
        };
        let tensors = Tensors(vec![tensor]);
        if let Some(meta) = &open.envelope.meta
            && let Err(found) = check_context(meta, &tensors, &self.config.census)
        {
            return self.preflight_failed(&found, out);
        }
        open.context = tensors.clone();
        open.context_sent = true;
        open.sent_ns = now;
        let call_id = open.call_id();
        out.push(Action::Broadcast(Message::Context(Context { call_id, tensors })));
    }

    fn delivered(&mut self, chunk: u32, frames: u32, out: &mut Vec<Action>) {
        match self.undelivered.pop_front() {
            Some((k, phases)) if k == chunk => {
                self.delivered += 1;
                out.push(Action::Report(Message::Progress(Progress {
                    chunk,
                    frames,
                    phases,
                    queued_in: self.inbox.len() as u32,
                    queued_out: self.undelivered.len() as u32,
                })));
            }
            other => {
                let text = format!("chunk {chunk} was delivered, {:?} was next", other.map(|(k, _)| k));
                self.fail(Failure::new(FailureClass::Output, None, &T0748, text), out);
            }
        }
    }

    /// Prepares, commits and ends whatever may be now.
    fn pump(&mut self, out: &mut Vec<Action>) {
        if self.stage == Stage::Running && !self.stopping {
            while self.open.len() < self.config.limits.max_outstanding as usize && !self.ended() {
                let Some((request, text)) = self.inbox.pop_front() else { break };
                self.prepare(&request, text, out);
            }
            self.ask_context(out);
            self.commit(out);
        }
        let now = self.clock.now();
        let runs = self.open.front().is_some_and(|o| o.committed_ns.is_some());
        match self.stage {
            Stage::Hello { .. } if self.stopping => self.shutdown(now, out),
            Stage::Running if self.stopping && !runs => self.shutdown(now, out),
            Stage::Running if self.no_more && self.inbox.is_empty() && self.open.is_empty() => {
                self.shutdown(now, out);
            }
            _ => {}
        }
        if matches!(self.stage, Stage::Stopping { .. })
            && self.undelivered.is_empty()
            && self.peers.values().all(|p| p.stopped)
        {
            self.stage = Stage::Ended;
            out.push(Action::Report(Message::Finished));
            out.push(Action::Exit(None));
        }
    }

    /// Plans and checks a call, then sends its envelope. Nothing leaves before the last check passed.
    fn prepare(&mut self, request: &ChunkRequest, text: Option<Tensor>, out: &mut Vec<Action>) {
        if text.is_some() {
            self.text = text;
        }
        let plan = match self.director.next(request, &self.config.census) {
            Ok(plan) => plan,
            Err(found) => return self.preflight_failed(&found, out),
        };
        let wants_text = plan.meta.as_ref().is_some_and(|m| m.reset_cross);
        let tensors = if wants_text { self.text.iter().cloned().collect() } else { Vec::new() };
        let envelope =
            Envelope { header: self.header(&plan), meta: plan.meta.clone(), tensors: Tensors(tensors) };
        let local = Local {
            plan: self.config.plan,
            session: self.config.session,
            last_call_id: self.last_call_id,
            cache: &self.checked,
            census: &self.config.census,
        };
        let after = match check_envelope(&envelope, &local) {
            Ok(after) => after,
            Err(found) => return self.preflight_failed(&found, out),
        };
        let message = Message::Envelope(Box::new(envelope.clone()));
        if let Err(d) = wire::encode(&message) {
            return self.preflight_failed(&vec![d], out);
        }
        self.last_call_id = envelope.header.call_id;
        let digest = after.digest();
        self.checked = after;
        self.open.push_back(Open {
            plan,
            envelope,
            after: digest,
            context: Tensors::default(),
            context_asked: false,
            context_sent: false,
            ready: BTreeSet::new(),
            sent_ns: self.clock.now(),
            committed_ns: None,
            done: BTreeMap::new(),
            output: None,
        });
        out.push(Action::Broadcast(message));
    }

    /// Asks for the front call's context once the output that it depends on exists.
    fn ask_context(&mut self, out: &mut Vec<Action>) {
        if let (Some(front), Some(previous)) = (self.open.front_mut(), &self.last_output)
            && wants_context(&front.envelope)
            && !front.context_asked
            && !self.stopping
        {
            front.context_asked = true;
            out.push(Action::MakeContext { chunk: front.plan.chunk, previous: previous.clone() });
        }
    }

    fn commit(&mut self, out: &mut Vec<Action>) {
        let room = self.undelivered.len() < self.config.limits.d_out as usize;
        let now = self.clock.now();
        let ranks = self.config.ranks.len();
        if let Some(front) = self.open.front_mut()
            && front.committed_ns.is_none()
            && front.ready.len() == ranks
            && room
        {
            front.committed_ns = Some(now);
            for p in self.peers.values_mut() {
                (p.mark, p.marked_ns) = (0, now);
            }
            out.push(Action::Broadcast(Message::Commit(Commit { call_id: front.call_id() })));
        }
    }

    /// Calls that were prepared and not committed are dropped here and by the ranks.
    fn shutdown(&mut self, now: u64, out: &mut Vec<Action>) {
        self.open.clear();
        let plan = match self.director.control(CallAction::Shutdown) {
            Ok(plan) => plan,
            Err(found) => return self.preflight_failed(&found, out),
        };
        let header = self.header(&plan);
        self.last_call_id = header.call_id;
        self.stage = Stage::Stopping { since_ns: now, call_id: header.call_id };
        let envelope = Envelope { header, meta: None, tensors: Tensors::default() };
        out.push(Action::Broadcast(Message::Envelope(Box::new(envelope))));
    }

    fn header(&self, plan: &CallPlan) -> EnvelopeHeader {
        EnvelopeHeader {
            version: WIRE_VERSION,
            action: plan.action,
            plan: self.config.plan,
            session: self.config.session,
            call_id: self.last_call_id + 1,
            chunk: plan.chunk,
            cache_epoch: plan.cache_epoch,
            deadline_ms: u32::try_from(self.quiet_limit_ns() / 1_000_000).unwrap_or(u32::MAX).max(1),
        }
    }

    // Time.

    fn tick(&mut self, now: u64, out: &mut Vec<Action>) {
        if now >= self.last_beat_ns + self.config.limits.heartbeat_ns {
            self.last_beat_ns = now;
            out.push(Action::Report(Message::Heartbeat(Heartbeat { mark: self.delivered })));
        }
        if let Some((failure, until)) = &self.echo
            && now >= *until
        {
            let failure = failure.clone();
            return self.fail(failure, out);
        }
        if let Some((rank, text)) = self.stalled(now) {
            self.fail(Failure::new(FailureClass::Stall, Some(rank), &T0743, text), out);
        }
    }

    /// The rank that is furthest behind a deadline, with words.
    fn stalled(&self, now: u64) -> Option<(u32, String)> {
        let limits = &self.config.limits;
        let late = |since: u64, limit: u64| now.saturating_sub(since) > limit;
        let silent = self.peers.iter().find(|(_, p)| !p.stopped && late(p.heard_ns, limits.stale_ns));
        if let Some((rank, p)) = silent {
            return Some((*rank, format!("no sign of life of rank {rank} for {}", ms(now - p.heard_ns))));
        }
        let missing = |has: &dyn Fn(u32, &Peer) -> bool| -> Vec<u32> {
            self.peers.iter().filter(|(r, p)| !has(**r, p)).map(|(r, _)| *r).collect()
        };
        let blame = |ranks: Vec<u32>, what: String| {
            ranks.first().map(|r| (*r, format!("no {what} of ranks {ranks:?} within the limit")))
        };
        match self.stage {
            Stage::Hello { since_ns } if late(since_ns, limits.hello_ns) => {
                return blame(missing(&|_, p| p.greeted), "hello".into());
            }
            Stage::Stopping { since_ns, .. } if late(since_ns, limits.ready_ns) => {
                return blame(missing(&|_, p| p.stopped), "answer to the shutdown".into());
            }
            _ => {}
        }
        for open in &self.open {
            let waits = wants_context(&open.envelope) && !open.context_sent;
            if open.committed_ns.is_none() && !waits && late(open.sent_ns, limits.ready_ns) {
                let behind = missing(&|r, _| open.ready.contains(&r));
                if !behind.is_empty() {
                    return blame(behind, format!("ready for call {}", open.call_id()));
                }
            }
        }
        let running = self.open.front().filter(|o| o.committed_ns.is_some())?;
        let limit = self.quiet_limit_ns();
        let busy = || self.peers.iter().filter(|(r, _)| !running.done.contains_key(r));
        // Ranks that wait inside a collective for a slower one are quiet as well: all must be, and the one
        // that came least far is named.
        if !busy().all(|(_, p)| late(p.marked_ns, limit)) {
            return None;
        }
        let (rank, p) = busy().min_by_key(|(r, p)| (p.mark, **r))?;
        let marks: Vec<String> = busy().map(|(r, p)| format!("rank {r} in {}", place(p.mark))).collect();
        Some((
            *rank,
            format!(
                "call {}, chunk {}: no progress of rank {rank} for {}, limit {}; {}",
                running.call_id(),
                running.plan.chunk,
                ms(now - p.marked_ns),
                ms(limit),
                marks.join(", ")
            ),
        ))
    }

    fn quiet_limit_ns(&self) -> u64 {
        let learned = self.longest_quiet_ns.saturating_mul(u64::from(self.config.limits.done_factor));
        learned.max(self.config.limits.done_floor_ns)
    }

    // Failure.

    fn protocol(&mut self, rank: u32, text: String, out: &mut Vec<Action>) {
        self.fail(Failure::new(FailureClass::Protocol, Some(rank), &T0707, text), out);
    }

    fn preflight_failed(&mut self, found: &Diagnostics, out: &mut Vec<Action>) {
        if let Some(first) = found.first() {
            let mut failure = Failure::from_diagnostic(FailureClass::Preflight, None, first);
            for d in &found[1..] {
                failure.text += &format!("; also [{}] {}", d.code.id, d.message);
            }
            self.fail(failure, out);
        }
    }

    /// The first failure ends the run; what comes after it is not looked at.
    fn fail(&mut self, failure: Failure, out: &mut Vec<Action>) {
        if self.ended() {
            return;
        }
        self.stage = Stage::Ended;
        out.push(Action::Broadcast(Message::Abort(Abort { failure: failure.clone() })));
        out.push(Action::Report(Message::Failed(failure.clone())));
        out.push(Action::Exit(Some(failure)));
    }
}

fn ms(ns: u64) -> String {
    format!("{} ms", ns / 1_000_000)
}

/// A mark in words.
fn place(mark: u64) -> String {
    match mark >> 32 {
        0 => "no phase".to_string(),
        phase => format!("phase {} at mark {}", phase - 1, mark & u64::from(u32::MAX)),
    }
}
