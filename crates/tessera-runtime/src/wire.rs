//! The wire protocol between processes: a closed set of messages, each sent as one frame.
//!
//! A frame is a fixed header ([`HEADER_BYTES`]), meta bytes in one canonical form, and the tensors
//! that the meta's manifest lists, in the order of that list. The decoder never panics, whatever
//! the bytes.

mod envelope;
mod envelope_fields;
mod frame;
mod message;
mod tensor;

pub use envelope::{
    CallAction, CallMeta, CallWork, ChunkWork, Envelope, EnvelopeHeader, F32Bits, NewSequence, PhaseCall,
    Reload, ScalarArg, SequenceRows, TokenWork,
};
pub use envelope_fields::{ENVELOPE_FIELDS, EnvelopeField, envelope_reference};
pub(crate) use frame::with_unlisted_bytes;
pub use frame::{FrameHeader, decode, decode_body, decode_header, encode};
pub use message::{
    ArrayCall, ArrayOutputs, CallContext, CallObservation, ChangeEffect, ChangedSetting, CollectiveTimes,
    Commit, Done, DuplicatePolicy, FaultReport, FinishReason, Heartbeat, HelloAck, Init, Message,
    MessageKind, OpClassWork, PhaseOpTimes, Progress, RankMemory, Ready, Refused, RequestLimit, SenderRole,
    ShardFingerprint, StreamChange, TokenEvent, Welcome,
};
pub use tensor::{Dtype, Tensor, TensorSpec, Tensors};

/// Version of everything in this module. Any change of a field, an order or a meaning must increase
/// it.
pub const WIRE_VERSION: u16 = 10;
/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"TSRA";
/// Origin of frames from the launching process; every other origin is a rank.
pub const LAUNCHER: u32 = u32::MAX;
/// Size of a header: magic, version, kind, origin, length of meta, length of tensors, checksum.
pub const HEADER_BYTES: usize = 28;
/// Maximum meta bytes of a frame: 4 MiB.
pub const MAX_META_BYTES: u32 = 4 << 20;
/// Maximum bytes of all tensors of a frame together: 256 MiB.
pub const MAX_TENSOR_BYTES: u32 = 256 << 20;
/// Maximum bytes of a frame whose meta and tensors are both at their limits.
pub const MAX_FRAME_BYTES: usize = HEADER_BYTES + MAX_META_BYTES as usize + MAX_TENSOR_BYTES as usize;
/// Maximum number of tensors in a manifest.
pub const MAX_TENSORS: usize = 256;
/// Maximum number of dims of a tensor.
pub const MAX_DIMS: usize = 8;
/// Maximum number of phases in a call.
pub const MAX_PHASES: usize = 512;
