//! The leader's side of lockstep: it plans calls ahead, lets no rank run a call before all ranks
//! are ready, compares the ranks' observations, and reports the first failure of the run.
//!
//! The leader addresses ranks, not sockets: a message carries the number of the rank that made it,
//! whichever process relayed it. The state machine is therefore the same if the leader's process
//! computes too, if it is outside the mesh beside a single rank, or if it reaches all other ranks
//! through a mesh leader.

mod calls;
mod failure;
mod hello;
mod inbox;
mod planner;
mod timeouts;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_mesh::HostMap;

use crate::array_director::ArrayRequest;
use crate::call_state::{CallState, SessionSpec};
use crate::codes::{T0707, T0748, T0749};
use crate::director::{CallPlan, ChunkRequest};
use crate::engine::{Delivery, MediaJob};
use crate::limits::AwakeClock;
use crate::program_index::ProgramIndex;
use crate::token_director::TokenRequest;
use crate::tripwire::Tripwires;
use crate::wire::{
    CallAction, CallObservation, Envelope, HelloAck, Init, Message, Progress, Reload, ShardFingerprint,
    Tensor, Tensors, WIRE_VERSION,
};
use crate::{Digest, Failure, FailureClass, Limits, Parity};

use inbox::InboxItem;
use planner::CallPlanner;
use timeouts::QuietHistory;

/// The settings of a leader, which are constant in a session.
#[derive(Debug, Clone)]
pub struct LeaderConfig {
    /// Ranks that run calls, in ascending order. Rank 0 is among them unless it is outside the
    /// mesh.
    pub ranks: Vec<u32>,
    /// Digest of the sealed plan, which every envelope carries and every rank compares with its
    /// own.
    pub plan: Digest,
    /// Session id, which every envelope carries.
    pub session: u64,
    /// Build of the leader's executable, with which those of all ranks are compared.
    pub build: String,
    /// Groups of ranks whose outputs must be equal. The first rank of each sends them, and a rank in no
    /// group returns none.
    pub output_groups: Vec<Vec<u32>>,
    /// The leader's own parity table, which is compared with those of all ranks.
    pub parity: Parity,
    /// The hosts that the plan states, which are compared with those that the ranks report.
    pub hosts: Option<HostMap>,
    /// Programs of the sealed plan, from which the leader plans the phases of each call.
    pub programs: Arc<ProgramIndex>,
    /// What the calls compute, with the settings that never change.
    pub session_spec: SessionSpec,
    /// The bounds of queues and waits.
    pub limits: Limits,
    /// Tripwires whose checks are skipped on the leader; empty except in a self-test.
    pub tripwires: Tripwires,
}

/// What the first denoising step of a chunk begins with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ChunkStart {
    /// Noise that every rank draws.
    #[default]
    Drawn,
    /// Given noise, for a plan that takes it.
    Noise(Tensor),
    /// The latents of an input video, for a plan that takes one.
    Video {
        /// The tensor `video`: tokens of the chunk.
        latents: Tensor,
        /// The denoising step whose noise is added to the latents; the steps before are left out.
        step: u32,
    },
    /// What the chunk should begin with cannot be had; the diagnostic ends the run.
    Unavailable(Box<Diagnostic>),
}

/// An event that the driver reports to the leader.
#[derive(Debug)]
pub enum Event {
    /// The driver's periodic wake-up, on which deadlines are checked.
    Tick,
    /// A message arrived from a rank.
    Message {
        /// The rank that made the message, from the frame's header.
        rank: u32,
        /// The decoded message; a kind that only another process may send fails the run.
        message: Message,
    },
    /// A rank's socket closed or broke.
    Gone {
        /// The rank at the other end of the socket.
        rank: u32,
        /// How the socket ended, for the failure's text, such as `its socket closed`.
        how: String,
    },
    /// A chunk is requested. The application requests at most [`Leader::request_capacity`] chunks
    /// at a time, except for one with [`SceneCut::Flush`](crate::director::SceneCut::Flush).
    Request {
        /// Seed, prompt change and scene cut of the requested chunk.
        request: ChunkRequest,
        /// The prompt's embedding, if the request has a new prompt.
        text: Option<Tensor>,
        /// What the chunk's first step begins with.
        start: ChunkStart,
    },
    /// A call of a language model is requested, within the same [`Leader::request_capacity`].
    TokenRequest(Box<TokenRequest>),
    /// A call of an array program is requested, within the same [`Leader::request_capacity`].
    ArrayRequest(Box<ArrayRequest>),
    /// A call without a chunk is requested: NOOP, which tests the path to every rank and back, or
    /// RESET.
    Control(CallAction),
    /// A `RELOAD` call is requested, in which every rank loads other weights.
    Reload(Reload),
    /// No further chunk will be requested.
    NoMoreRequests,
    /// The media pipeline finished the context for a chunk.
    Context {
        /// Index of the chunk that the context is for.
        chunk: u32,
        /// Context frames that the call reads as its context tensor.
        tensor: Tensor,
    },
    /// A chunk was decoded and written.
    Delivered {
        /// Index of the chunk; it must be the oldest finished chunk that is not delivered.
        chunk: u32,
        /// What was made of the chunk.
        delivery: Delivery,
    },
    /// The media pipeline did not write a chunk because its epoch is below the minimum.
    Discarded {
        /// Index of the chunk that was not written.
        chunk: u32,
    },
    /// Something other than the lockstep failed: the media pipeline, a socket write, or the
    /// engine's thread.
    Failed(Failure),
    /// Stop at the next chunk boundary.
    Stop,
    /// The launcher's socket closed.
    LauncherGone,
}

/// An action that the driver executes for the leader.
#[derive(Debug)]
pub enum Action {
    /// Sends a message to every rank of the mesh.
    Broadcast(Message),
    /// Passes a job to the media pipeline.
    Media(MediaJob),
    /// Sets the minimum epoch: from now on the media pipeline does not write chunks of a lower
    /// epoch and answers `Discarded` for each.
    SetMinEpoch {
        /// The lowest epoch whose chunks are still written.
        epoch: u32,
    },
    /// Adds an entry to the run's record.
    Record(RecordEntry),
    /// Sends progress, a heartbeat or the outcome to the launcher, if there is one.
    Report(Message),
    /// Ends the process; no action follows.
    Exit(Option<Failure>),
}

/// An entry of the run's record.
#[derive(Debug)]
pub enum RecordEntry {
    /// A call that every rank has finished, even if its output is discarded.
    Call(Box<CallRecord>),
    /// A chunk was delivered.
    Progress(Progress),
    /// A remark for the reader of the record.
    Note(String),
    /// A rank is loaded; the table holds its effective settings, as it announced them.
    Startup {
        /// Rank that announced the settings.
        rank: u32,
        /// Every compared key of the rank with its value.
        settings: Parity,
        /// Codes of the tripwires that are armed on the rank.
        tripwires: Vec<&'static str>,
    },
    /// A request or a finished chunk is dropped because of a hard cut.
    Dropped {
        /// Number of the request, counted from 0 in order of arrival.
        request: u64,
        /// The chunk, if the request had become a call.
        chunk: Option<u32>,
        /// The cache epoch that is over.
        epoch: u32,
        /// The reason, which names how far the request had come.
        why: &'static str,
    },
    /// A call that was open when the run failed.
    Lost {
        /// Id from the call's envelope; ids count the calls of all actions, from 1.
        call_id: u64,
        /// Index of the chunk that the call generates; for a call without a chunk, of the next
        /// chunk.
        chunk: u32,
        /// Cache epoch in which the call ran or would have run.
        epoch: u32,
        /// Ranks that had answered ready, in ascending order; all of them if the call was
        /// committed.
        ready: Vec<u32>,
        /// Ranks that had finished.
        done: Vec<u32>,
    },
    /// The run failed; no entry follows.
    Failed(Failure),
}

/// A finished call, for the run's record. Times are those that the driver passed to
/// [`Leader::handle_event`], in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallRecord {
    /// Id from the call's envelope; ids count the calls of all actions, from 1.
    pub call_id: u64,
    /// The request that the call serves, counted from 0; `None` for a call without a chunk.
    pub request: Option<u64>,
    /// Action, chunk, epoch and phases, as planned before the envelope was sent.
    pub plan: CallPlan,
    /// Counters, durations and digests that each rank of the mesh reported for the call.
    pub observed: BTreeMap<u32, CallObservation>,
    /// Time at which the envelope was sent.
    pub decided_ns: u64,
    /// Time at which the leader received the last rank's ready message.
    pub ready_ns: u64,
    /// Time of the commit, which waits for the previous call and for room in the output queue.
    pub committed_ns: u64,
    /// Time at which the last rank had finished.
    pub done_ns: u64,
    /// Time from the commit to the last rank's done, in nanoseconds of the leader's awake clock.
    pub run_ns: u64,
    /// Requests that waited when the call finished.
    pub queued_in: u32,
    /// Finished chunks that waited for delivery when the call finished, including this one.
    pub queued_out: u32,
    /// Whether the output is discarded because of a hard cut.
    pub discarded: bool,
}

/// The leader as a state machine without I/O: it takes events and returns actions for the driver.
#[derive(Debug)]
pub struct Leader {
    config: LeaderConfig,
    planner: CallPlanner,
    /// The call state after the last envelope. The preflight uses its own copy, apart from the
    /// planner's.
    preflight_state: CallState,
    clock: AwakeClock,
    /// The driver's time at the latest event, in nanoseconds. Only records use it; waits use
    /// `clock`.
    now_ns: u64,
    stage: LeaderStage,
    warmup: WarmupStage,
    peers: BTreeMap<u32, PeerStatus>,
    hellos: BTreeMap<u32, HelloAck>,
    inbox: VecDeque<InboxItem>,
    requests: u64,
    no_more_requests: bool,
    stopping: bool,
    open_calls: VecDeque<OpenCall>,
    last_call_id: u64,
    prompt_embedding: Option<Tensor>,
    /// Outputs of the last finished chunk, and whether that chunk was the first of its scene.
    last_outputs: Option<(Tensors, bool)>,
    /// Finished chunks that are not delivered, oldest first.
    undelivered: VecDeque<FinishedChunk>,
    /// A counter that grows when any rank makes progress or a chunk is delivered. Heartbeats send
    /// it to the workers.
    progress: u64,
    quiet_history: QuietHistory,
    last_heartbeat_ns: u64,
    /// A secondary failure whose cause may still arrive, and the time until which the leader waits
    /// for the cause.
    secondary_failure: Option<(Failure, u64)>,
    /// Actions that follow from the current event, in order.
    actions: Vec<Action>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeaderStage {
    New,
    Hello { since_ns: u64 },
    Running,
    Stopping { since_ns: u64, call_id: u64 },
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WarmupStage {
    Due,
    Sent,
    Finished,
}

#[derive(Debug, Default)]
struct PeerStatus {
    answered_shutdown: bool,
    reported_failure: bool,
    /// Time of the last message. A rank that has sent none may still be loading.
    last_message_ns: Option<u64>,
    progress: u64,
    last_progress_ns: u64,
}

/// A call whose envelope was sent.
#[derive(Debug)]
struct OpenCall {
    plan: CallPlan,
    request: Option<u64>,
    envelope: Envelope,
    predicted_state: Digest,
    /// Digest of header, meta and tensors; it includes the context once that was sent.
    inputs: Digest,
    context_requested: bool,
    context_sent: bool,
    /// The call finishes like any other, but its output is discarded.
    discard: bool,
    ready: BTreeSet<u32>,
    /// Time at which the last message that a ready depends on was sent.
    sent_ns: u64,
    committed_ns: Option<u64>,
    times: CallTimes,
    done: BTreeMap<u32, CallObservation>,
    fingerprints: BTreeMap<u32, Vec<ShardFingerprint>>,
    /// The outputs by the rank that sent them.
    outputs: BTreeMap<u32, Tensors>,
}

/// Times at which a call reached each step, in nanoseconds on the driver's clock; 0 before the
/// step.
#[derive(Debug, Clone, Copy, Default)]
struct CallTimes {
    decided_ns: u64,
    ready_ns: u64,
    committed_ns: u64,
}

/// A finished chunk that waits for the media pipeline.
#[derive(Debug)]
struct FinishedChunk {
    chunk: u32,
    epoch: u32,
    request: u64,
    /// Time at which the call was decided, in nanoseconds on the driver's clock.
    decided_ns: u64,
    /// Name of each phase and its duration on the first rank.
    phases: Vec<(String, u64)>,
}

impl OpenCall {
    fn call_id(&self) -> u64 {
        self.envelope.header.call_id
    }
}

impl Leader {
    /// Creates a leader. Refuses limits without bounds, an invalid stream, and ranks that are empty
    /// or not in ascending order.
    pub fn new(config: LeaderConfig) -> Result<Leader, Diagnostics> {
        let mut found = config.limits.check();
        if config.ranks.is_empty() || !config.ranks.is_sorted_by(|a, b| a < b) {
            found.push(tessera_base::Diagnostic::error(
                &T0707,
                format!("ranks {:?} are empty or not in ascending order", config.ranks),
            ));
        }
        config.tripwires.check_findings(found)?;
        let planner = CallPlanner::new(&config.session_spec)?;
        let preflight_state = planner.state();
        let peers = config.ranks.iter().map(|r| (*r, PeerStatus::default())).collect();
        Ok(Leader {
            config,
            planner,
            preflight_state,
            clock: AwakeClock::default(),
            now_ns: 0,
            stage: LeaderStage::New,
            warmup: WarmupStage::Due,
            peers,
            hellos: BTreeMap::new(),
            inbox: VecDeque::new(),
            requests: 0,
            no_more_requests: false,
            stopping: false,
            open_calls: VecDeque::new(),
            last_call_id: 0,
            prompt_embedding: None,
            last_outputs: None,
            undelivered: VecDeque::new(),
            progress: 0,
            quiet_history: QuietHistory::default(),
            last_heartbeat_ns: 0,
            secondary_failure: None,
            actions: Vec::new(),
        })
    }

    /// Handles one event and returns the resulting actions. The first event also sends the hello.
    pub fn handle_event(&mut self, now_ns: u64, event: Event) -> Vec<Action> {
        if self.has_ended() {
            return Vec::new();
        }
        self.now_ns = now_ns;
        let now = self.clock.advance_to(now_ns, self.config.limits.heartbeat_ns);
        if self.stage == LeaderStage::New {
            self.stage = LeaderStage::Hello { since_ns: now };
            self.actions.push(Action::Broadcast(Message::Init(Init {
                wire_version: WIRE_VERSION,
                build: self.config.build.clone(),
                plan: self.config.plan,
                session: self.config.session,
                parity: self.own_parity(),
            })));
        }
        match event {
            Event::Tick => self.handle_tick(now),
            Event::Message { rank, message } => self.handle_message(rank, message),
            Event::Gone { rank, how } => self.handle_rank_gone(rank, &how),
            Event::Request { request, text, start } => self.handle_request(request, text, start),
            Event::TokenRequest(request) => self.handle_token_request(*request),
            Event::ArrayRequest(request) => self.handle_array_request(*request),
            Event::Control(action) => self.enqueue_control(action),
            Event::Reload(reload) => self.enqueue_item(InboxItem::Reload(reload)),
            Event::NoMoreRequests => self.no_more_requests = true,
            Event::Context { chunk, tensor } => self.handle_context(chunk, tensor),
            Event::Delivered { chunk, delivery } => self.handle_delivered(chunk, delivery),
            Event::Discarded { chunk } => self.handle_discarded(chunk),
            Event::Failed(failure) => self.fail_run(failure),
            Event::Stop => {
                self.stopping = true;
                self.inbox.clear();
            }
            Event::LauncherGone => {
                let text = "the launching process closed its socket";
                self.trip_if_armed(FailureClass::LauncherGone, None, &T0749, text);
            }
        }
        self.advance_calls();
        move_context_first(&mut self.actions);
        std::mem::take(&mut self.actions)
    }

    /// Returns how many more requests the leader accepts now.
    #[must_use]
    pub fn request_capacity(&self) -> usize {
        if self.no_more_requests || self.stopping || self.has_ended() {
            return 0;
        }
        (self.config.limits.d_in as usize).saturating_sub(self.waiting_chunks())
    }

    /// Whether the run has ended, so that no further action follows.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.stage == LeaderStage::Ended
    }

    /// Returns the maximum number of jobs that can wait for the media pipeline: finished chunks,
    /// and the context of the next chunk.
    #[must_use]
    pub fn media_queue_depth(limits: &Limits) -> usize {
        limits.d_out as usize + limits.d_in as usize + 2
    }

    fn handle_message(&mut self, rank: u32, message: Message) {
        let now = self.clock.now_ns();
        let Some(peer) = self.peers.get_mut(&rank) else {
            return self.protocol_violation(rank, "a message arrived from a rank outside the mesh");
        };
        peer.last_message_ns = Some(now);
        match message {
            Message::HelloAck(ack) => self.handle_hello(rank, ack),
            Message::Ready(r) => self.handle_ready(rank, &r),
            Message::Refused(r) => {
                peer.reported_failure = true;
                self.fail_run(with_default_rank(r.failure, rank));
            }
            Message::Done(d) => self.handle_done(rank, *d),
            Message::Fault(f) => {
                peer.reported_failure = true;
                if f.secondary {
                    // A rank that names nobody lost a link or waited in vain: it is no culprit itself.
                    self.add_secondary(f.failure, now);
                } else {
                    self.fail_run(with_default_rank(f.failure, rank));
                }
            }
            Message::Heartbeat(h) => self.handle_heartbeat(rank, h.progress),
            other => {
                let kind = other.kind();
                let text = format!("a {kind:?} message, which only a {:?} may send", kind.allowed_sender());
                self.protocol_violation(rank, text);
            }
        }
    }

    fn handle_delivered(&mut self, chunk: u32, delivery: Delivery) {
        let Some(finished) = self.pop_undelivered(chunk) else { return };
        self.progress += 1;
        self.actions.push(Action::Report(Message::Progress(Progress {
            chunk,
            request: finished.request,
            epoch: finished.epoch,
            frames: delivery.frames,
            call_ns: self.now_ns.saturating_sub(finished.decided_ns),
            ids: delivery.ids,
            phases: finished.phases,
            queued_in: self.waiting_chunks() as u32,
            queued_out: self.undelivered.len() as u32,
        })));
    }

    fn handle_discarded(&mut self, chunk: u32) {
        let Some(FinishedChunk { epoch, request, .. }) = self.pop_undelivered(chunk) else { return };
        let why = "a hard cut came while the chunk waited for delivery";
        self.add_entry(RecordEntry::Dropped { request, chunk: Some(chunk), epoch, why });
    }

    fn add_entry(&mut self, entry: RecordEntry) {
        self.actions.push(Action::Record(entry));
    }

    /// Removes the oldest finished chunk, which must be `chunk`; otherwise the run fails.
    fn pop_undelivered(&mut self, chunk: u32) -> Option<FinishedChunk> {
        match self.undelivered.pop_front() {
            Some(finished) if finished.chunk == chunk => Some(finished),
            other => {
                let next = other.map(|f| f.chunk);
                let text = format!("the media pipeline finished chunk {chunk}, but {next:?} was next");
                self.fail_run(self.leader_failure(FailureClass::Output, None, &T0748, text));
                None
            }
        }
    }
}

/// Moves the context of the next chunk before the delivery of this one, even if the next call was
/// prepared last. The mesh waits for the context, but not for the delivery.
fn move_context_first(actions: &mut [Action]) {
    let at = |matches_action: fn(&Action) -> bool| actions.iter().position(matches_action);
    let deliver = at(|a| matches!(a, Action::Media(MediaJob::Deliver { .. })));
    let context = at(|a| matches!(a, Action::Media(MediaJob::Context { .. })));
    if let (Some(deliver), Some(context)) = (deliver, context)
        && deliver < context
    {
        actions[deliver..=context].rotate_left(1);
    }
}

/// Sets the failure's rank to the sender unless the failure names a rank, or is a wait in vain, which
/// is no fault of the rank that waited.
fn with_default_rank(failure: Failure, rank: u32) -> Failure {
    if failure.class == FailureClass::Stall {
        return failure;
    }
    Failure { rank: failure.rank.or(Some(rank)), ..failure }
}
