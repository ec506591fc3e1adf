//! The envelope of a call: everything the leader decided, so that no worker decides anything.

use serde::{Deserialize, Serialize};

use super::Tensors;
use crate::Digest;

/// What a call is for. Every action takes one call id; an id is never used twice, whatever the action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CallAction {
    /// Nothing but the protocol itself.
    Noop,
    /// Produce one chunk.
    Infer,
    /// A hard cut without producing a chunk.
    Reset,
    /// Exchange the weights on every rank, between the same two calls; a hard cut as well.
    Reload,
    /// Run every program once before the first request; the first id of a session.
    Warmup,
    /// End the session; the last id of it.
    Shutdown,
}

impl CallAction {
    /// Upper-case name, as in `INFER`.
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

/// What every envelope carries, with or without a payload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvelopeHeader {
    /// Version of the envelope's fields and their meaning.
    pub version: u16,
    /// What the call is for.
    pub action: CallAction,
    /// Digest of the sealed plan under which the call runs.
    pub plan: Digest,
    /// The session; drawn once by the launching process.
    pub session: u64,
    /// Grows by one with every envelope of the session, over all actions.
    pub call_id: u64,
    /// Chunk of the stream.
    pub chunk: u32,
    /// Life of the caches; grows by one at a hard cut and at nothing else.
    pub cache_epoch: u32,
    /// Time the leader allows for the call, in milliseconds; never 0.
    pub deadline_ms: u32,
}

/// The payload of an `INFER` or `WARMUP` envelope.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallMeta {
    /// Denoise steps.
    pub n_steps: u32,
    /// Generator forward passes: denoise steps, clean pass, recompute pass.
    pub expected_generator_calls: u32,
    /// Collectives that each rank issues in the call.
    pub expected_collectives: u64,
    /// Trace digests of the phases, joined in order.
    pub expected_trace_digest: Digest,
    /// Empty the caches before the first phase.
    pub reset_kv: bool,
    /// Replace the text keys and values.
    pub reset_cross: bool,
    /// Whether a recompute phase fills the cache from context frames.
    pub recompute: bool,
    /// Rotary position of the chunk's first frame.
    pub start_frame: u32,
    /// Seed of the random draws.
    pub seed: u64,
    /// Life of the text keys and values after the call.
    pub prompt_epoch: u32,
    /// Bias b on context keys, as given by the person; programs receive ln b.
    pub kv_bias: F32Bits,
    /// The phases, in the order in which they run.
    pub phases: Vec<PhaseCall>,
    /// Digest of the cache state after the call.
    pub predicted_state: Digest,
}

/// The payload of a `RELOAD` envelope.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reload {
    /// Where the weights are, in the words of the door; the same on every rank.
    pub source: String,
    /// Digest of the weights as a whole, which every rank must find there.
    pub weights: Digest,
}

/// One envelope. The context tensor of a recompute call follows in a message of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// Always there.
    pub header: EnvelopeHeader,
    /// There for `INFER` and `WARMUP` and for nothing else.
    pub meta: Option<CallMeta>,
    /// There for `RELOAD` and for nothing else.
    pub reload: Option<Reload>,
    /// What the manifest lists.
    pub tensors: Tensors,
}

/// One program of the seal with its scalars.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseCall {
    /// Name in the seal, such as `denoise.fill3`.
    pub program: String,
    /// Scalars by name, in ascending order of name, so that equal content has equal bytes.
    pub args: Vec<(String, Arg)>,
}

impl PhaseCall {
    /// Sorts the scalars by name.
    #[must_use]
    pub fn new(program: impl Into<String>, mut args: Vec<(String, Arg)>) -> PhaseCall {
        args.sort_by(|a, b| a.0.cmp(&b.0));
        PhaseCall { program: program.into(), args }
    }

    /// The scalar of this name.
    #[must_use]
    pub fn arg(&self, name: &str) -> Option<&Arg> {
        self.args.iter().find(|(n, _)| n == name).map(|(_, a)| a)
    }

    /// The integer of this name.
    #[must_use]
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.arg(name) {
            Some(Arg::I64(v)) => Some(*v),
            _ => None,
        }
    }
}

/// A scalar, or a short list of them, that a program takes per call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Arg {
    /// An integer.
    I64(i64),
    /// A float.
    F32(F32Bits),
    /// A float per frame.
    F32s(Vec<F32Bits>),
}

impl Arg {
    /// A float, by its bits.
    #[must_use]
    pub fn f32(v: f32) -> Arg {
        Arg::F32(F32Bits::new(v))
    }

    /// Floats, by their bits.
    #[must_use]
    pub fn f32s(v: &[f32]) -> Arg {
        Arg::F32s(v.iter().map(|x| F32Bits::new(*x)).collect())
    }
}

/// A float by its bits; every NaN is the one canonical NaN, so equal content has equal bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct F32Bits(u32);

const CANONICAL_NAN: u32 = 0x7fc0_0000;

impl F32Bits {
    /// The bits of `v`.
    #[must_use]
    pub fn new(v: f32) -> F32Bits {
        F32Bits(if v.is_nan() { CANONICAL_NAN } else { v.to_bits() })
    }

    /// The float.
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
            return Err("a NaN that is not the canonical one");
        }
        Ok(F32Bits(bits))
    }
}
