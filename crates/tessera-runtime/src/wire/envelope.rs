//! The envelope of a call. It contains every decision of the leader, so that no worker decides
//! anything.

use serde::{Deserialize, Serialize};

use super::Tensors;
use crate::Digest;

/// The purpose of a call. Every action consumes one call id; an id is never reused, whatever the
/// action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallAction {
    /// Exercises the protocol only.
    Noop,
    /// Runs the phases that generate one chunk of a video or process rows of tokens, or an array program.
    Infer,
    /// Makes a hard cut without producing a chunk.
    Reset,
    /// Replaces the weights on every rank, between the same two calls; also a hard cut.
    Reload,
    /// Runs every program once before the first request; the first id of a session.
    Warmup,
    /// Ends the session; the last id of the session.
    Shutdown,
}

impl CallAction {
    /// Returns the upper-case name, as in `INFER`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            CallAction::Noop => "NOOP",
            CallAction::Infer => "INFER",
            CallAction::Reset => "RESET",
            CallAction::Reload => "RELOAD",
            CallAction::Warmup => "WARMUP",
            CallAction::Shutdown => "SHUTDOWN",
        }
    }
}

/// The fields that every envelope carries, with or without a payload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvelopeHeader {
    /// Version of the envelope's fields and their meaning.
    pub version: u16,
    /// What the call does; the action determines which payload the envelope carries.
    pub action: CallAction,
    /// Digest of the sealed plan under which the call runs.
    pub plan: Digest,
    /// Session id, drawn once by the launching process.
    pub session: u64,
    /// Call id, which grows by one with every envelope of the session, over all actions.
    pub call_id: u64,
    /// Index of the unit of output that the call generates, from 0: a chunk of a video, or the call's
    /// rows of tokens or arrays. For a call without output, the index of the next unit.
    pub chunk: u32,
    /// Cache epoch; grows by one at a hard cut, a `RESET` or a `RELOAD`, and never otherwise.
    pub cache_epoch: u32,
    /// Time limit of the call in milliseconds; never 0.
    pub deadline_ms: u32,
}

/// The payload of an `INFER` or `WARMUP` envelope.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallMeta {
    /// Forwards of the model: denoise steps, clean and recompute forwards of a video, rows of tokens, array programs.
    pub expected_generator_calls: u32,
    /// Collectives that each rank issues during the call.
    pub expected_collectives: u64,
    /// Trace digests of the phases, joined in order.
    pub expected_trace_digest: Digest,
    /// The phases, in the order in which they run.
    pub phases: Vec<PhaseCall>,
    /// Digest of the call state after the call.
    pub predicted_state: Digest,
    /// What the call computes.
    pub work: CallWork,
}

/// What a call computes, with the decisions that only its kind of work has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallWork {
    /// Every program once; the result is thrown away.
    Warmup,
    /// One chunk of a video.
    Chunk(ChunkWork),
    /// Rows of token sequences.
    Tokens(TokenWork),
    /// One array program, which the only phase names.
    Arrays,
}

impl CallWork {
    /// Returns the kind of work, for diagnostics.
    #[must_use]
    pub(crate) fn describe(&self) -> &'static str {
        match self {
            CallWork::Warmup => "a warm-up",
            CallWork::Chunk(_) => "a chunk of a video",
            CallWork::Tokens(_) => "rows of tokens",
            CallWork::Arrays => "an array program",
        }
    }
}

/// The decisions about one chunk of a video.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkWork {
    /// Index of the list of denoise steps among those that the plan admits.
    pub step_list: u32,
    /// Number of denoise steps, each with one phase of the call.
    pub n_steps: u32,
    /// Whether to clear the caches before the first phase.
    pub reset_kv: bool,
    /// Whether to replace the text keys and values.
    pub reset_cross: bool,
    /// Whether a recompute phase fills the cache from context frames.
    pub recompute: bool,
    /// RoPE position of the chunk's first frame.
    pub start_frame: u32,
    /// Seed of the chunk's random draws, from the chunk's request.
    pub seed: u64,
    /// Epoch of the text keys and values after the call.
    pub prompt_epoch: u32,
    /// Bias b on context keys, as the user gave it; programs receive ln b.
    pub kv_bias: F32Bits,
}

/// The decisions about rows of token sequences.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenWork {
    /// Sequences that ended before this call; their pages are free for those that begin with it.
    pub ended: Vec<u64>,
    /// Sequences that begin with this call.
    pub begun: Vec<NewSequence>,
    /// The rows that all phases of the call together bring, by the place of their sequence in the bucket; `None` is an
    /// absent sequence.
    pub rows: Vec<Option<SequenceRows>>,
}

/// A token sequence that begins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewSequence {
    /// Number of the sequence, which no other sequence of the session has.
    pub sequence: u64,
    /// Pages of the KV caches that the sequence has until it ends, in the order of its positions.
    pub pages: Vec<u32>,
}

/// Rows of a token sequence that a call brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceRows {
    /// Number of the sequence.
    pub sequence: u64,
    /// Position of the first row, which is the number of rows before it.
    pub first: u32,
    /// Number of rows that count; the program computes as many as its bucket has.
    pub count: u32,
}

impl CallMeta {
    /// Returns the decisions about a chunk, if the call computes one.
    #[must_use]
    pub fn chunk_work(&self) -> Option<&ChunkWork> {
        match &self.work {
            CallWork::Chunk(work) => Some(work),
            CallWork::Warmup | CallWork::Tokens(_) | CallWork::Arrays => None,
        }
    }

    /// Returns the decisions about a chunk, if the call computes one.
    pub fn chunk_work_mut(&mut self) -> Option<&mut ChunkWork> {
        match &mut self.work {
            CallWork::Chunk(work) => Some(work),
            CallWork::Warmup | CallWork::Tokens(_) | CallWork::Arrays => None,
        }
    }

    /// Whether the call clears the caches before its first phase.
    #[must_use]
    pub fn resets_caches(&self) -> bool {
        self.chunk_work().is_some_and(|work| work.reset_kv)
    }

    /// Whether the call replaces the text keys and values.
    #[must_use]
    pub fn replaces_prompt(&self) -> bool {
        self.chunk_work().is_some_and(|work| work.reset_cross)
    }

    /// Whether a recompute phase of the call fills the caches from context frames.
    #[must_use]
    pub fn recomputes_context(&self) -> bool {
        self.chunk_work().is_some_and(|work| work.recompute)
    }

    /// Returns the RoPE position of the chunk's first frame; 0 without a chunk.
    #[must_use]
    pub fn start_frame(&self) -> u32 {
        self.chunk_work().map_or(0, |work| work.start_frame)
    }
}

/// The payload of a `RELOAD` envelope.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reload {
    /// Where the weights are, in the application's notation; the same on every rank.
    pub source: String,
    /// Digest of the complete weights; every rank must find this digest at the source.
    pub weights: Digest,
}

/// The leader's message that starts one call: a header, the metadata of its action, and tensors.
/// The context tensors of a recompute call follow in a separate message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    /// Identifies the call: action, plan, session, ids of call and chunk, epoch and deadline.
    pub header: EnvelopeHeader,
    /// The payload of `INFER` and `WARMUP`; `None` for any other action.
    pub meta: Option<CallMeta>,
    /// The payload of `RELOAD`; `None` for any other action.
    pub reload: Option<Reload>,
    /// Inputs of the call, in the order in which its phases first read them.
    pub tensors: Tensors,
}

/// One program of the sealed plan with its scalar arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseCall {
    /// Name in the sealed plan, such as `denoise.fill3`.
    pub program: String,
    /// Scalars in ascending order of name, so that equal content has equal bytes.
    pub args: Vec<(String, ScalarArg)>,
}

impl PhaseCall {
    /// Creates a phase call and sorts the scalars by name.
    #[must_use]
    pub fn new(program: impl Into<String>, mut args: Vec<(String, ScalarArg)>) -> PhaseCall {
        args.sort_by(|a, b| a.0.cmp(&b.0));
        PhaseCall { program: program.into(), args }
    }

    /// Returns the scalar named `name`.
    #[must_use]
    pub fn scalar_arg(&self, name: &str) -> Option<&ScalarArg> {
        self.args.iter().find(|(n, _)| n == name).map(|(_, a)| a)
    }

    /// Returns the integer named `name`, or `None` if the scalar is missing or has another type.
    #[must_use]
    pub fn int_arg(&self, name: &str) -> Option<i64> {
        match self.scalar_arg(name) {
            Some(ScalarArg::I64(v)) => Some(*v),
            _ => None,
        }
    }
}

/// A scalar, or a short list of scalars, that a program takes per call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScalarArg {
    /// A signed 64-bit integer.
    I64(i64),
    /// A single-precision float, sent as its bits with NaN made canonical.
    F32(F32Bits),
    /// One float per frame.
    F32s(Vec<F32Bits>),
}

impl ScalarArg {
    /// Creates a float argument.
    #[must_use]
    pub fn from_f32(v: f32) -> ScalarArg {
        ScalarArg::F32(F32Bits::new(v))
    }

    /// Creates an argument of one float per frame.
    #[must_use]
    pub fn from_f32s(v: &[f32]) -> ScalarArg {
        ScalarArg::F32s(v.iter().map(|x| F32Bits::new(*x)).collect())
    }
}

/// The bits of an `f32`. Every NaN is stored as the one canonical NaN, so that equal content has
/// equal bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct F32Bits(u32);

const CANONICAL_NAN: u32 = 0x7fc0_0000;

impl F32Bits {
    /// Stores the bits of `v`, with any NaN made canonical.
    #[must_use]
    pub fn new(v: f32) -> F32Bits {
        F32Bits(if v.is_nan() { CANONICAL_NAN } else { v.to_bits() })
    }

    /// Returns the stored bits as a float.
    #[must_use]
    pub fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl From<F32Bits> for u32 {
    fn from(b: F32Bits) -> u32 {
        b.0
    }
}

impl TryFrom<u32> for F32Bits {
    type Error = &'static str;
    fn try_from(bits: u32) -> Result<F32Bits, &'static str> {
        if f32::from_bits(bits).is_nan() && bits != CANONICAL_NAN {
            return Err("a NaN that is not canonical");
        }
        Ok(F32Bits(bits))
    }
}
