//! The leader's side of lockstep: plans calls ahead, lets no rank run before all are ready, compares what the
//! ranks saw, and turns the first thing that goes wrong into the one failure of the run.
//!
//! It speaks to ranks, not to sockets: a rank's message carries that rank's number whoever passed it on, so the
//! machine is the same whether the leader computes too, stands beside one rank, or hears of all but one through
//! a mesh leader.

mod calls;
mod failure;
mod hello;
mod inbox;
mod time;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use tessera_base::{Code, Diagnostics};

use crate::cache::Cache;
use crate::census::Census;
use crate::decide::{CallPlan, ChunkRequest, Director, StreamSpec};
use crate::limits::AwakeClock;
use crate::tripwire::Tripwires;
use crate::wire::{
    CallAction, Envelope, HelloAck, Init, Message, Observed, Progress, ShardPrint, Tensor, WIRE_VERSION,
};
use crate::worker::{T0707, T0749};
use crate::{Digest, Failure, FailureClass, Limits, Parity};

use inbox::Item;
use time::Learned;

/// A result that nobody waits for any more.
pub(crate) static T0736: Code = Code {
    id: "T0736",
    title: "a result belongs to an epoch that is over",
    page: "A hard cut begins a new life of the caches, and every call and every result names the one it belongs to. \
A rank sent a result of another epoch than its call's: it missed the cut, ran an old call again, or an old message was \
delivered late. The result was not used, because its picture belongs to a scene that is over.\n\nThe message gives \
both epochs. Calls that are under way at a cut are finished and discarded in order; they never look like this.",
};
/// No answer, or no progress.
pub(crate) static T0743: Code = Code {
    id: "T0743",
    title: "a rank stalled",
    page: "A process is alive, or at least its sockets are, but it did not answer in time, showed no sign of life, or \
made no progress inside a call for longer than the limit. The rank named is the one that is furthest behind: ranks \
that wait for it inside a collective are not the cause.\n\nThe limit inside a call is five seconds or four times the \
99th percentile of the quiet times seen in that program so far, counted from the last mark. A stopped process, a stuck \
device and a kernel that is really that slow look alike from here; the marks in the message say how far each rank came. \
Rank 0 is named by a worker that heard nothing of its leader.",
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
    /// What the leader's own process shows in the comparison over all ranks.
    pub parity: Parity,
    /// The seal's programs.
    pub census: Arc<Census>,
    /// The stream.
    pub stream: StreamSpec,
    /// Bounds.
    pub limits: Limits,
    /// What is not checked.
    pub tripwires: Tripwires,
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// Time passed.
    Tick,
    /// A message from a rank.
    Message {
        /// The rank that made it, from the frame's header.
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
    /// A chunk is wanted; never more than [`Leader::wants`] at a time, except for one that flushes.
    Request {
        /// What is wanted.
        request: ChunkRequest,
        /// The prompt's embedding, with a new prompt.
        text: Option<Tensor>,
    },
    /// A call without a chunk is wanted: NOOP, which proves the whole way to every rank and back, or RESET.
    Control(CallAction),
    /// Other weights are wanted, from the next call on.
    Reload {
        /// Where they are, in words that every rank's engine understands.
        source: String,
        /// Their digest as a whole.
        weights: Digest,
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
    /// A chunk was found below the fence and not written.
    Discarded {
        /// The chunk.
        chunk: u32,
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
        /// Whether the chunk before is the first of its scene.
        opens_scene: bool,
    },
    /// Have the studio decode and write a chunk, unless its epoch is below the fence by then.
    Deliver {
        /// The chunk.
        chunk: u32,
        /// Its life of the caches.
        epoch: u32,
        /// Its latents.
        latents: Tensor,
    },
    /// From now on chunks of an epoch below this one are not written; the studio answers `Discarded` for each.
    Fence {
        /// The first epoch that counts.
        epoch: u32,
    },
    /// Write down that a request or a finished chunk is given up for a hard cut.
    Dropped {
        /// The request, counted from 0 in the order in which they came.
        request: u64,
        /// Its chunk, if it had become one.
        chunk: Option<u32>,
        /// The life of the caches that is over.
        epoch: u32,
        /// Where it was.
        why: &'static str,
    },
    /// Write down a call that was open when the run failed.
    Lost {
        /// Its id.
        call_id: u64,
        /// Its chunk.
        chunk: u32,
        /// Its life of the caches.
        epoch: u32,
        /// Ranks that were ready.
        ready: Vec<u32>,
        /// Ranks that had finished.
        done: Vec<u32>,
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

/// A finished call, for the run's record. Times are those that were given to [`Leader::step`], in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallRecord {
    /// Its id.
    pub call_id: u64,
    /// The request that it serves, counted from 0; none for a call without a chunk.
    pub request: Option<u64>,
    /// The call as it was decided.
    pub plan: CallPlan,
    /// What each rank saw.
    pub observed: BTreeMap<u32, Observed>,
    /// When its envelope was sent.
    pub decided_ns: u64,
    /// When the last rank was ready.
    pub ready_ns: u64,
    /// When it was committed.
    pub committed_ns: u64,
    /// When the last rank had finished.
    pub done_ns: u64,
    /// From commit to the last rank's done, in nanoseconds of the leader's waking time.
    pub run_ns: u64,
    /// Requests that waited when it finished.
    pub queued_in: u32,
    /// Finished chunks that waited for delivery when it finished, this one included.
    pub queued_out: u32,
    /// Whether its output is given up for a hard cut.
    pub discarded: bool,
}

/// The machine.
#[derive(Debug)]
pub struct Leader {
    config: LeaderConfig,
    director: Director,
    /// State after the last envelope, kept apart from the director's for the preflight.
    checked: Cache,
    clock: AwakeClock,
    /// The time as it was given, for the record alone.
    now_ns: u64,
    stage: Stage,
    warmup: Warmup,
    peers: BTreeMap<u32, Peer>,
    hellos: BTreeMap<u32, HelloAck>,
    inbox: VecDeque<Item>,
    requests: u64,
    no_more: bool,
    stopping: bool,
    open: VecDeque<Open>,
    last_call_id: u64,
    text: Option<Tensor>,
    /// Latents of the last finished chunk, and whether it was its scene's first.
    last_output: Option<(Tensor, bool)>,
    /// Finished chunks that are not delivered, oldest first.
    undelivered: VecDeque<Finished>,
    /// Grows whenever any rank shows progress or a chunk is delivered; workers hear of it by the heartbeat.
    progress: u64,
    learned: Learned,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Warmup {
    Due,
    Sent,
    Over,
}

#[derive(Debug, Default)]
struct Peer {
    stopped: bool,
    faulted: bool,
    /// When it was last heard of; before its first message it may be loading.
    heard_ns: Option<u64>,
    mark: u64,
    marked_ns: u64,
}

/// A call whose envelope was sent.
#[derive(Debug)]
struct Open {
    plan: CallPlan,
    request: Option<u64>,
    envelope: Envelope,
    after: Digest,
    /// Digest of header, meta and tensors; the context's with it once there is one.
    inputs: Digest,
    context_asked: bool,
    context_sent: bool,
    /// Finished like any other, but its output goes nowhere.
    discard: bool,
    ready: BTreeSet<u32>,
    /// When the last thing that ready waits for was sent.
    sent_ns: u64,
    committed_ns: Option<u64>,
    times: Times,
    done: BTreeMap<u32, Observed>,
    fingerprints: BTreeMap<u32, Vec<ShardPrint>>,
    output: Option<Tensor>,
}

/// Instants of a call, as they were given.
#[derive(Debug, Clone, Copy, Default)]
struct Times {
    decided_ns: u64,
    ready_ns: u64,
    committed_ns: u64,
}

/// A chunk on its way to the studio.
#[derive(Debug)]
struct Finished {
    chunk: u32,
    epoch: u32,
    request: u64,
    /// Name of each phase and its duration on the first rank.
    phases: Vec<(String, u64)>,
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
        config.tripwires.filter(&mut found);
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
            now_ns: 0,
            stage: Stage::New,
            warmup: Warmup::Due,
            peers,
            hellos: BTreeMap::new(),
            inbox: VecDeque::new(),
            requests: 0,
            no_more: false,
            stopping: false,
            open: VecDeque::new(),
            last_call_id: 0,
            text: None,
            last_output: None,
            undelivered: VecDeque::new(),
            progress: 0,
            learned: Learned::default(),
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
        self.now_ns = now_ns;
        let now = self.clock.advance(now_ns, self.config.limits.heartbeat_ns);
        if self.stage == Stage::New {
            self.stage = Stage::Hello { since_ns: now };
            out.push(Action::Broadcast(Message::Init(Init {
                wire_version: WIRE_VERSION,
                build: self.config.build.clone(),
                plan: self.config.plan,
                session: self.config.session,
                parity: self.own_parity(),
            })));
        }
        match event {
            Event::Tick => self.tick(now, &mut out),
            Event::Message { rank, message } => self.message(rank, message, &mut out),
            Event::Gone { rank, how } => self.gone(rank, &how, &mut out),
            Event::Request { request, text } => self.request(request, text, &mut out),
            Event::Control(action) => self.control(action, &mut out),
            Event::Reload { source, weights } => self.reload(source, weights, &mut out),
            Event::NoMoreRequests => self.no_more = true,
            Event::Context { chunk, tensor } => self.context(chunk, tensor, &mut out),
            Event::Delivered { chunk, frames } => self.delivered(chunk, frames, &mut out),
            Event::Discarded { chunk } => self.discarded(chunk, &mut out),
            Event::Failed(failure) => self.fail(failure, &mut out),
            Event::Stop => {
                self.stopping = true;
                self.inbox.clear();
            }
            Event::LauncherGone => {
                if self.armed(&T0749) {
                    let text = "the launching process closed its socket";
                    self.fail(self.here(FailureClass::LauncherGone, None, &T0749, text), &mut out);
                }
            }
        }
        self.pump(&mut out);
        context_first(&mut out);
        out
    }

    /// How many more requests may be handed over now.
    #[must_use]
    pub fn wants(&self) -> usize {
        if self.no_more || self.stopping || self.ended() {
            return 0;
        }
        (self.config.limits.d_in as usize).saturating_sub(self.waiting())
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

    fn message(&mut self, rank: u32, message: Message, out: &mut Vec<Action>) {
        let now = self.clock.now();
        let Some(peer) = self.peers.get_mut(&rank) else {
            return self.protocol(rank, "a message came from a rank outside the mesh".into(), out);
        };
        peer.heard_ns = Some(now);
        match message {
            Message::HelloAck(ack) => self.hello_ack(rank, ack, out),
            Message::Ready(r) => self.ready(rank, &r, out),
            Message::Refused(r) => {
                peer.faulted = true;
                self.fail(blamed(r.failure, rank), out);
            }
            Message::Done(d) => self.done(rank, *d, out),
            Message::Fault(f) => {
                peer.faulted = true;
                let failure = blamed(f.failure, rank);
                if f.secondary {
                    self.echo.get_or_insert((failure, now + self.config.limits.blame_ns));
                } else {
                    self.fail(failure, out);
                }
            }
            Message::Heartbeat(h) => self.heartbeat(rank, h.mark),
            other => {
                let kind = other.kind();
                let text = format!("a {kind:?} message, which is a {:?}'s to send", kind.sender());
                self.protocol(rank, text, out);
            }
        }
    }

    fn delivered(&mut self, chunk: u32, frames: u32, out: &mut Vec<Action>) {
        let Some(finished) = self.leaves(chunk, out) else { return };
        self.progress += 1;
        out.push(Action::Report(Message::Progress(Progress {
            chunk,
            frames,
            phases: finished.phases,
            queued_in: self.waiting() as u32,
            queued_out: self.undelivered.len() as u32,
        })));
    }

    fn discarded(&mut self, chunk: u32, out: &mut Vec<Action>) {
        let Some(Finished { epoch, request, .. }) = self.leaves(chunk, out) else { return };
        let why = "a hard cut came while it waited for delivery";
        out.push(Action::Dropped { request, chunk: Some(chunk), epoch, why });
    }

    /// The oldest finished chunk, which must be this one.
    fn leaves(&mut self, chunk: u32, out: &mut Vec<Action>) -> Option<Finished> {
        match self.undelivered.pop_front() {
            Some(finished) if finished.chunk == chunk => Some(finished),
            other => {
                let next = other.map(|f| f.chunk);
                let text = format!("chunk {chunk} left the studio, {next:?} was next");
                self.fail(self.here(FailureClass::Output, None, &T0748, text), out);
                None
            }
        }
    }
}

/// Lets the context of the next chunk go before the delivery of this one, also where the next call was prepared last: the mesh
/// waits for the one and not for the other.
fn context_first(actions: &mut [Action]) {
    let at = |of: fn(&Action) -> bool| actions.iter().position(of);
    let deliver = at(|a| matches!(a, Action::Deliver { .. }));
    let context = at(|a| matches!(a, Action::MakeContext { .. }));
    if let (Some(deliver), Some(context)) = (deliver, context)
        && deliver < context
    {
        actions[deliver..=context].rotate_left(1);
    }
}

/// A rank's failure, on that rank unless it names another.
fn blamed(failure: Failure, rank: u32) -> Failure {
    Failure { rank: failure.rank.or(Some(rank)), ..failure }
}
