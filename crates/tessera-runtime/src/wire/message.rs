//! Every message there is, and who may send it.

use serde::{Deserialize, Serialize};

use super::{Envelope, Tensors};
use crate::{Digest, Failure, Parity};

/// A message. The set is closed: an unknown kind is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Launcher to a rank: who it is. Descriptors ride along.
    Welcome(Welcome),
    /// Launcher to leader: end at the next chunk boundary.
    Stop,
    /// Leader to workers: what must be equal before anything runs.
    Init(Init),
    /// Leader to workers: one call, fully decided.
    Envelope(Box<Envelope>),
    /// Leader to workers: the context tensors of a recompute call.
    Context(Context),
    /// Leader to workers: every rank is ready; run.
    Commit(Commit),
    /// Leader to workers: the run is over, and why.
    Abort(Abort),
    /// Worker to leader: loaded, and what it holds.
    HelloAck(HelloAck),
    /// Worker to leader: the call is valid here.
    Ready(Ready),
    /// Worker to leader: the call is not valid here.
    Refused(Refused),
    /// Worker to leader: the call is finished, and what was seen.
    Done(Box<Done>),
    /// Worker to leader: this rank cannot go on.
    Fault(Fault),
    /// A sign of life: of a rank to the leader, of the leader to its workers and to the launcher.
    Heartbeat(Heartbeat),
    /// Leader to launcher: a chunk was delivered.
    Progress(Progress),
    /// Leader to launcher: everything was delivered and every rank has answered the shutdown.
    Finished,
    /// Leader to launcher: the run failed.
    Failed(Failure),
}

/// Who originates a message. A worker originates no control message: it replies and shows signs of life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The process that spawned the ranks.
    Launcher,
    /// Rank 0.
    Leader,
    /// A rank that runs calls.
    Worker,
    /// Leader or worker.
    AnyRank,
}

/// Number of a message kind in a frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
#[allow(missing_docs, reason = "each kind is the message of the same name")]
pub enum Kind {
    Welcome = 1,
    Stop = 2,
    Init = 16,
    Envelope = 17,
    Context = 18,
    Commit = 19,
    Abort = 20,
    HelloAck = 32,
    Ready = 33,
    Refused = 34,
    Done = 35,
    Fault = 36,
    Heartbeat = 48,
    Progress = 49,
    Finished = 50,
    Failed = 51,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 16] = [
        Kind::Welcome,
        Kind::Stop,
        Kind::Init,
        Kind::Envelope,
        Kind::Context,
        Kind::Commit,
        Kind::Abort,
        Kind::HelloAck,
        Kind::Ready,
        Kind::Refused,
        Kind::Done,
        Kind::Fault,
        Kind::Heartbeat,
        Kind::Progress,
        Kind::Finished,
        Kind::Failed,
    ];

    /// The kind of this number.
    #[must_use]
    pub fn from_u16(n: u16) -> Option<Kind> {
        Kind::ALL.into_iter().find(|k| *k as u16 == n)
    }

    /// Who may send it.
    #[must_use]
    pub fn sender(self) -> Role {
        match self as u16 {
            0..16 => Role::Launcher,
            16..32 => Role::Leader,
            32..48 => Role::Worker,
            48 => Role::AnyRank,
            _ => Role::Leader,
        }
    }
}

impl Message {
    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Message::Welcome(_) => Kind::Welcome,
            Message::Stop => Kind::Stop,
            Message::Init(_) => Kind::Init,
            Message::Envelope(_) => Kind::Envelope,
            Message::Context(_) => Kind::Context,
            Message::Commit(_) => Kind::Commit,
            Message::Abort(_) => Kind::Abort,
            Message::HelloAck(_) => Kind::HelloAck,
            Message::Ready(_) => Kind::Ready,
            Message::Refused(_) => Kind::Refused,
            Message::Done(_) => Kind::Done,
            Message::Fault(_) => Kind::Fault,
            Message::Heartbeat(_) => Kind::Heartbeat,
            Message::Progress(_) => Kind::Progress,
            Message::Finished => Kind::Finished,
            Message::Failed(_) => Kind::Failed,
        }
    }
}

/// What a rank learns from the process that spawned it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// This process's rank.
    pub rank: u32,
    /// How many ranks there are.
    pub world: u32,
    /// The session id that every envelope carries.
    pub session: u64,
    /// Control sockets among the descriptors: one per rank that this one speaks with.
    pub sockets: u32,
    /// Further descriptors, after the sockets, in the order in which the door gave them.
    pub extras: u32,
    /// Opaque bytes from the door.
    pub payload: Vec<u8>,
}

/// The leader's first message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Init {
    /// Wire version of the leader.
    pub wire_version: u16,
    /// Build of the leader.
    pub build: String,
    /// Digest of the sealed plan.
    pub plan: Digest,
    /// The session.
    pub session: u64,
    /// The leader's parity table.
    pub parity: Parity,
}

/// Tensors that follow an envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context {
    /// The call they belong to.
    pub call_id: u64,
    /// What the manifest lists.
    pub tensors: Tensors,
}

/// The point after which ranks issue collectives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// The call to run.
    pub call_id: u64,
}

/// The end of the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abort {
    /// Why.
    pub failure: Failure,
}

/// A loaded rank's answer to [`Init`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloAck {
    /// Build of the worker.
    pub build: String,
    /// Digest of the plan that the worker holds.
    pub plan: Digest,
    /// The worker's parity table.
    pub parity: Parity,
    /// What it loaded, shard by shard.
    pub fingerprints: Vec<ShardPrint>,
}

/// What a rank holds of one weight tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardPrint {
    /// Name of the tensor.
    pub tensor: String,
    /// Which part of it, such as `[0..64, ..]`; equal text is the same part.
    pub slice: String,
    /// Digest of the part's bytes.
    pub digest: Digest,
    /// Whether all its elements are equal, so that other parts may have the same digest.
    pub constant: bool,
}

/// A rank's consent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// The call.
    pub call_id: u64,
    /// Cache state that this rank predicts after the call.
    pub predicted_state: Digest,
    /// Digest of the header, meta and tensors as they arrived here.
    pub inputs: Digest,
}

/// A rank's refusal; ends the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// The call.
    pub call_id: u64,
    /// Class, code and text.
    pub failure: Failure,
}

/// What a rank saw while it ran a call.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Observed {
    /// Generator forward passes.
    pub generator_calls: u32,
    /// Collectives issued.
    pub collectives: u64,
    /// Trace digests of the phases, joined in order.
    pub trace: Digest,
    /// Cache state that the phases led to.
    pub state: Digest,
    /// Digest of the replicated output; of zeros in a warm-up, which puts nothing out.
    pub output: Digest,
    /// Sums over ranks whose terms cancelled and were added with compensation.
    pub compensated: u64,
    /// Duration of each phase, in nanoseconds.
    pub phase_ns: Vec<u64>,
    /// Programs compiled, captured or first run since the warm-up; in the warm-up itself, those that it ran.
    pub new_programs: u32,
    /// CPU time spent on digests, in nanoseconds.
    pub digest_ns: u64,
    /// Of weights that were hashed again in this call, or loaded by it; zeros when none were due.
    pub weights: Digest,
}

/// The close of a call on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// The call.
    pub call_id: u64,
    /// Life of the caches in which it ran.
    pub cache_epoch: u32,
    /// What was seen.
    pub observed: Observed,
    /// What a `RELOAD` loaded, shard by shard; empty otherwise.
    pub fingerprints: Vec<ShardPrint>,
    /// The chunk's latents, from the one rank that delivers; empty from the others.
    pub output: Tensors,
}

/// A rank that cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Why the run should end.
    pub failure: Failure,
    /// Whether this is only the echo of another rank's failure, such as an aborted collective.
    pub secondary: bool,
}

/// A sign of life with a progress mark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Of a rank, grows as its engine advances: phase number in the upper half, the engine's own mark in the lower.
    /// Of the leader, how often anybody made progress.
    pub mark: u64,
}

/// A chunk that left the pipeline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The chunk.
    pub chunk: u32,
    /// Frames delivered for it.
    pub frames: u32,
    /// Name of each phase and its duration on the first rank, in nanoseconds.
    pub phases: Vec<(String, u64)>,
    /// Requests waiting.
    pub queued_in: u32,
    /// Finished chunks not yet delivered.
    pub queued_out: u32,
}
