//! Every message of the protocol, and which process may send it.

use serde::{Deserialize, Serialize};

use tessera_base::Code;

use super::{Envelope, F32Bits, Reload, Tensors};
use crate::codes::{T0707, T0730, T0733, T0746, T0755};
use crate::{Digest, Failure, Parity};

macro_rules! messages {
    ($($(#[$doc:meta])* $kind:ident $(($body:ty))? = $number:literal,)*) => {
        /// A message. The set is closed: an unknown kind is rejected. It is serialized as its body
        /// alone; the frame's header carries the kind.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize)]
        #[serde(untagged)]
        pub enum Message {
            $($(#[$doc])* $kind $(($body))?,)*
        }

        /// Number of a message kind in a frame's header.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u16)]
        #[allow(missing_docs, reason = "each kind is the message of the same name")]
        pub enum MessageKind {
            $($kind = $number,)*
        }

        impl MessageKind {
            /// Every message kind that the wire format defines.
            pub const ALL: &[MessageKind] = &[$(MessageKind::$kind,)*];
        }

        impl Message {
            /// Returns the kind, whose number the frame's header carries.
            #[must_use]
            pub fn kind(&self) -> MessageKind {
                match self {
                    $(Message::$kind { .. } => MessageKind::$kind,)*
                }
            }
        }
    };
}

messages! {
    /// Launcher to a rank: the rank's identity, with its descriptors attached.
    Welcome(Welcome) = 1,
    /// Launcher to leader: end at the next chunk boundary.
    Stop = 2,
    /// Launcher to leader, on a socket of their own: the next call of an array program.
    ArrayCall(ArrayCall) = 3,
    /// Launcher to leader, on a socket of their own: a change of a stream that runs.
    StreamChange(StreamChange) = 4,
    /// Launcher to leader, on the socket of [`Message::StreamChange`]: how many chunks the leader may request.
    RequestLimit(RequestLimit) = 5,
    /// Leader to workers: the values that must be equal on every rank before any call.
    Init(Init) = 16,
    /// Leader to workers: one fully decided call.
    Envelope(Box<Envelope>) = 17,
    /// Leader to workers: the context tensors of a recompute call.
    Context(CallContext) = 18,
    /// Leader to workers: every rank is ready; run the call.
    Commit(Commit) = 19,
    /// Leader to workers: the run has ended, with the reason.
    Abort(Failure) = 20,
    /// Worker to leader: the rank is loaded, with its parity table and weight fingerprints.
    HelloAck(HelloAck) = 32,
    /// Worker to leader: the call is valid on this rank.
    Ready(Ready) = 33,
    /// Worker to leader: the call is invalid on this rank.
    Refused(Refused) = 34,
    /// Worker to leader: the call is finished, with the rank's observations.
    Done(Box<Done>) = 35,
    /// Worker to leader: this rank cannot continue.
    Fault(FaultReport) = 36,
    /// A sign of life: from a rank to the leader, and from the leader to its workers and the
    /// launcher.
    Heartbeat(Heartbeat) = 48,
    /// Leader to launcher: a chunk was delivered.
    Progress(Progress) = 49,
    /// Leader to launcher: every chunk was delivered and every rank has acknowledged the shutdown.
    Finished = 50,
    /// Leader to launcher: the run failed.
    Failed(Failure) = 51,
    /// Leader to launcher, on the socket of [`Message::ArrayCall`]: the outputs of a call of an array program.
    ArrayOutputs(ArrayOutputs) = 52,
    /// Leader to launcher, on the socket of [`Message::StreamChange`]: the chunk with which a change takes effect.
    ChangeEffect(ChangeEffect) = 53,
}

/// The process that originates a message. A worker originates no control message: it only replies
/// and sends signs of life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SenderRole {
    /// The process that spawned the ranks.
    Launcher,
    /// Rank 0, which plans and commits the calls.
    Leader,
    /// A rank that runs calls.
    Worker,
    /// Leader or worker, both of which send heartbeats.
    AnyRank,
}

impl MessageKind {
    /// Returns the kind with this number.
    #[must_use]
    pub fn from_u16(n: u16) -> Option<MessageKind> {
        MessageKind::ALL.iter().copied().find(|k| *k as u16 == n)
    }

    /// Returns the process that may send this kind.
    #[must_use]
    pub fn allowed_sender(self) -> SenderRole {
        match self as u16 {
            0..16 => SenderRole::Launcher,
            16..32 => SenderRole::Leader,
            32..48 => SenderRole::Worker,
            48 => SenderRole::AnyRank,
            _ => SenderRole::Leader,
        }
    }
}

/// What happens to a message that arrives a second time. There is no window of reordering: every
/// link is an ordered stream, so only a faulty sender repeats a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DuplicatePolicy {
    /// The second one ends the run with one of these codes; the first one has its effect once.
    Refused(&'static [&'static Code]),
    /// The second one has no effect of its own: it repeats a state, or the end of the run.
    Harmless,
}

impl MessageKind {
    /// Returns what happens to a second message of this kind that equals the first.
    #[must_use]
    pub fn duplicate_policy(self) -> DuplicatePolicy {
        use DuplicatePolicy::{Harmless, Refused};
        static ENVELOPE: [&Code; 4] = [&T0730, &T0733, &T0755, &T0707];
        static COMMIT: [&Code; 3] = [&T0746, &T0755, &T0707];
        static OTHER: [&Code; 2] = [&T0707, &T0755];
        match self {
            // A repeated warm-up contradicts its action as well as its id. A mesh leader refuses
            // whatever it would have to relay out of turn with T0755.
            MessageKind::Envelope => Refused(&ENVELOPE),
            MessageKind::Commit => Refused(&COMMIT),
            MessageKind::Welcome
            | MessageKind::Init
            | MessageKind::ArrayCall
            | MessageKind::ArrayOutputs
            | MessageKind::StreamChange
            | MessageKind::ChangeEffect
            | MessageKind::Context
            | MessageKind::HelloAck
            | MessageKind::Ready
            | MessageKind::Done => Refused(&OTHER),
            MessageKind::Stop
            | MessageKind::RequestLimit
            | MessageKind::Abort
            | MessageKind::Refused
            | MessageKind::Fault
            | MessageKind::Heartbeat
            | MessageKind::Progress
            | MessageKind::Finished
            | MessageKind::Failed => Harmless,
        }
    }
}

impl Message {
    /// Returns the tensors that follow the meta bytes; `None` for a kind that carries none.
    pub(super) fn tensors(&self) -> Option<&Tensors> {
        match self {
            Message::Envelope(e) => Some(&e.tensors),
            Message::Context(c) => Some(&c.tensors),
            Message::ArrayCall(c) => Some(&c.inputs),
            Message::ArrayOutputs(o) => Some(&o.outputs),
            Message::Done(d) => Some(&d.output),
            _ => None,
        }
    }

    /// Returns the tensors of [`Message::tensors`].
    pub(super) fn tensors_mut(&mut self) -> Option<&mut Tensors> {
        match self {
            Message::Envelope(e) => Some(&mut e.tensors),
            Message::Context(c) => Some(&mut c.tensors),
            Message::ArrayCall(c) => Some(&mut c.inputs),
            Message::ArrayOutputs(o) => Some(&mut o.outputs),
            Message::Done(d) => Some(&mut d.output),
            _ => None,
        }
    }
}

/// A rank's identity, sent by the process that spawned the rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Rank of the receiving process, from 0 to the world size less one.
    pub rank: u32,
    /// Number of ranks in the run.
    pub world_size: u32,
    /// Session id, which every envelope carries.
    pub session: u64,
    /// Control sockets among the attached descriptors: one per directly connected rank.
    pub control_sockets: u32,
    /// Additional descriptors after the sockets, in the application's order.
    pub extra_fds: u32,
    /// The application's opaque bytes.
    pub payload: Vec<u8>,
}

/// A call of an array program that the launching process requests. The next one follows only after the outputs of
/// this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArrayCall {
    /// Number of the call among those of the launching process, from 1.
    pub number: u64,
    /// Name of the program in the sealed plan.
    pub program: String,
    /// The whole arrays that the program reads, in the order of its inputs.
    pub inputs: Tensors,
}

/// The outputs of an [`ArrayCall`].
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ArrayOutputs {
    /// Number of the call; 0 reports that every rank is loaded and has run every program once.
    pub number: u64,
    /// Times of the ops of each rank, in rank order; empty unless the run times single ops.
    pub op_times: Vec<(u32, PhaseOpTimes)>,
    /// The whole arrays that the program returns.
    pub outputs: Tensors,
}

/// A change of a stream that runs. The leader decides with which chunk it takes effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamChange {
    /// Number of the change among those of the launching process, from 1.
    pub number: u64,
    /// What changes.
    pub setting: ChangedSetting,
}

/// What a [`StreamChange`] changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChangedSetting {
    /// The prompt from the next requested chunk on.
    Prompt(String),
    /// The seed from the next requested chunk on.
    Seed(u64),
    /// The scene: the next requested chunk opens a new one.
    Cut,
    /// As `Cut`, and requested chunks that are not delivered yet are discarded.
    Flush,
    /// The list of denoise steps from the next requested chunk on, by its index in the plan.
    StepList(u32),
    /// The attention bias on context keys from the next requested chunk on.
    Bias(F32Bits),
    /// The weights from the next requested chunk on, which opens a scene.
    Weights(Reload),
}

/// The effect of a [`StreamChange`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeEffect {
    /// Number of the change.
    pub number: u64,
    /// The first chunk with the change, as requests count them: from 0.
    pub chunk: u32,
}

/// A limit of the chunks that the leader requests. It holds until the next one arrives; a socket without any has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestLimit {
    /// The number of chunks that may be requested since the start of the run.
    pub chunks: u32,
}

/// The leader's first message to every rank: the build, plan, session and parity values of the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Init {
    /// Wire version of the leader's build, which the frame's header carries too.
    pub wire_version: u16,
    /// Build identifier of the leader's executable, which the leader compares with those of all
    /// ranks.
    pub build: String,
    /// Digest of the leader's sealed plan, which the leader compares with those of all ranks.
    pub plan: Digest,
    /// Session id, which every envelope carries.
    pub session: u64,
    /// The leader's own parity table, which the leader compares with those of all ranks.
    pub parity: Parity,
}

/// The context tensors of a recompute call, sent in a message after its envelope.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallContext {
    /// Id of the call that uses the tensors.
    pub call_id: u64,
    /// The input that the envelope lacks: the tensor `context`.
    pub tensors: Tensors,
}

/// The leader's permission to run a call; ranks issue collectives only after it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// Id of the oldest open call, for which every rank has answered ready.
    pub call_id: u64,
}

/// A loaded rank's answer to [`Init`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloAck {
    /// Build identifier of the rank's executable, compared as the parity key `build`.
    pub build: String,
    /// Digest of the sealed plan on the rank, compared as the parity key `plan digest`.
    pub plan: Digest,
    /// The rank's parity table, with the values that its loaded engine reported.
    pub parity: Parity,
    /// Fingerprints of the loaded weights, shard by shard.
    pub fingerprints: Vec<ShardFingerprint>,
}

/// Fingerprint of one rank's shard of a weight tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardFingerprint {
    /// Name of the weight tensor, or of several merged ones, such as `blocks.7.ffn.*`.
    pub tensor: String,
    /// Index range of the shard, such as `[0..64, ..]`; equal text means the same range.
    pub slice: String,
    /// Digest of the shard's bytes; for merged tensors, of their digests.
    pub digest: Digest,
    /// Whether all elements of the shard are equal, so that other shards may have the same digest.
    pub constant: bool,
}

/// A rank's confirmation that it can run a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Id of the accepted call, which this rank has not run yet.
    pub call_id: u64,
    /// Cache state that this rank predicts after the call.
    pub predicted_state: Digest,
    /// Digest of the header, meta and tensors as this rank received them.
    pub inputs: Digest,
}

/// A rank's refusal of a call, which ends the run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Id of the refused call; 0 if the refused message belongs to no call.
    pub call_id: u64,
    /// Class, code and text of the refusal.
    pub failure: Failure,
}

/// Counts, digests and durations of a call on one rank. The leader compares the digests and counts
/// that must be equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CallObservation {
    /// Number of generator forwards that this rank ran in the call.
    pub generator_calls: u32,
    /// Sum of the collectives that the engine reported for the phases, compared with the
    /// envelope's.
    pub collectives: u64,
    /// Trace digests of the phases, joined in order.
    pub trace: Digest,
    /// Digest of the cache state after the phases.
    pub state: Digest,
    /// Digest of the replicated output; zeros in a warm-up, which produces no output.
    pub output: Digest,
    /// Number of cross-rank sums whose terms cancelled and that were therefore computed with
    /// compensated summation.
    pub compensated: u64,
    /// Duration of each phase, in nanoseconds.
    pub phase_ns: Vec<u64>,
    /// Programs compiled, captured or run for the first time since the warm-up; in the warm-up
    /// itself, the programs that it ran.
    pub new_programs: u32,
    /// CPU time spent on digests, in nanoseconds, without that during which the device computed.
    pub digest_ns: u64,
    /// Digest of the weights that this call hashed again or loaded; zeros if none were due.
    pub weights: Digest,
    /// Memory of this rank at the end of the call.
    pub memory: RankMemory,
    /// Bytes of temporaries that each phase wrote, in order of the phases.
    pub phase_bytes: Vec<u64>,
    /// Work of each phase by class of op, in order of the phases; a phase whose ops were not timed has none.
    pub phase_classes: Vec<Vec<OpClassWork>>,
    /// Times of the ops of each phase; empty unless the run times single ops.
    pub phase_op_times: Vec<PhaseOpTimes>,
}

/// Times of the ops of a phase on one rank, in nanoseconds since its start. Offsets instead of times of the clock keep
/// the message short.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PhaseOpTimes {
    /// Start of the first op on the monotonic clock of the rank's host, in nanoseconds. For a GPU, whose clock is its own,
    /// the host's time of the end less the time between the events of begin and end.
    pub start_ns: u64,
    /// Begin of each op, in program order.
    pub begins_ns: Vec<u64>,
    /// End of each op on a device that runs several streams at once; empty if each op ends where the next begins. An op
    /// that the kernel of another one runs has no time of its own: its end is its begin.
    pub ends_ns: Vec<u64>,
    /// End of the last op.
    pub end_ns: u64,
    /// The collectives, in the order of their issue.
    pub collectives: Vec<CollectiveTimes>,
}

/// Times of a collective on one rank, in nanoseconds since the start of its phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveTimes {
    /// Index of the issuing op in its program.
    pub op: u32,
    /// End of the issue.
    pub issued_ns: u64,
    /// Begin of the wait; that of a collective without a wait op begins with the end of its issue.
    pub waiting_ns: u64,
    /// End of the wait.
    pub completed_ns: u64,
}

/// Work of all ops of one class in a phase on one rank.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct OpClassWork {
    /// Name of the class, such as `matmul` or `all_reduce tp`.
    pub class: String,
    /// Number of ops of the class that the phase ran.
    pub ops: u32,
    /// Time of these ops on the host, with waits for other ranks, in nanoseconds.
    pub ns: u64,
    /// Bytes that the rank passed to other ranks.
    pub sent_bytes: u64,
}

/// Memory that a rank's backend has allocated, measured at its allocations. All values are 0 for an
/// engine that allocates none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RankMemory {
    /// Bytes of weights, buffers and temporaries, which the plan states too.
    pub allocated_bytes: u64,
    /// Bytes beyond the plan: scratch memory, tables and copies of outputs.
    pub workspace_bytes: u64,
    /// Largest sum of the two since the start of the rank.
    pub peak_bytes: u64,
    /// Bytes allocated for temporaries that no phase of the call wrote.
    pub unused_bytes: u64,
    /// Results since the start of the rank that reused the memory of an earlier result.
    pub slot_reuses: u64,
}

/// A rank's report that a call is finished.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// Id of the finished call, or of the shutdown that this rank answers.
    pub call_id: u64,
    /// Cache epoch from the call's envelope; the leader refuses a result of another epoch.
    pub cache_epoch: u32,
    /// Counters and digests of the call on this rank, which the leader compares across ranks.
    pub observed: CallObservation,
    /// Fingerprints of the weights that a `RELOAD` loaded, shard by shard; empty otherwise.
    pub fingerprints: Vec<ShardFingerprint>,
    /// The outputs of a chunk's call, from the one delivering rank: its latents, and its pixels and the
    /// next anchor if the ranks decode. Empty from the others.
    pub output: Tensors,
}

/// A rank's report that it cannot continue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultReport {
    /// Why the run should end.
    pub failure: Failure,
    /// Whether the failure only follows from another rank's failure, such as an aborted collective.
    pub secondary: bool,
}

/// A sign of life with a progress counter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// From a rank: grows as its engine advances; the upper half is the phase number, the lower
    /// half the engine's own counter. From the leader: how often any rank made progress.
    pub progress: u64,
}

/// Report on a delivered chunk: frames, phase durations and queue lengths.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Index of the delivered chunk, from 0.
    pub chunk: u32,
    /// Number of the request that the chunk serves, from 0. A flush discards requests, so it may be larger than the index.
    pub request: u64,
    /// Cache epoch of the chunk, which grows with each new scene.
    pub epoch: u32,
    /// Number of frames that the media pipeline wrote for the chunk, or of ids that were generated.
    pub frames: u32,
    /// Name of each phase and its duration on the first rank, in nanoseconds.
    pub phases: Vec<(String, u64)>,
    /// Number of requests that wait at the leader.
    pub queued_in: u32,
    /// Number of finished chunks that are not yet delivered.
    pub queued_out: u32,
    /// Time from the decision about the call to its delivery, in nanoseconds.
    pub call_ns: u64,
    /// The ids that a call of tokens generated; empty for a chunk of a video.
    pub ids: Vec<TokenEvent>,
}

/// An id that was generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenEvent {
    /// Index of the text among those that were requested.
    pub text: u32,
    /// The id that was chosen.
    pub id: u32,
    /// Why the text ends with it, if it does.
    pub finish: Option<FinishReason>,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// The model chose an id that ends texts.
    EndId,
    /// It has the largest number of ids.
    Length,
}
