//! What travels between processes: a closed set of messages, each one frame of header, meta and tensors.
//!
//! A frame is a fixed header ([`HEADER_BYTES`]), meta bytes in one canonical form, and the tensors that the
//! meta's manifest lists, in its order. The decoder never panics, whatever the bytes.

mod envelope;
mod fields;
mod frame;
mod message;
mod tensor;

pub use envelope::{Arg, CallAction, CallMeta, Envelope, EnvelopeHeader, F32Bits, PhaseCall, Reload};
pub use fields::{FIELDS, Field, envelope_reference};
pub(crate) use frame::with_unlisted_bytes;
pub use frame::{FrameHeader, decode, decode_body, decode_header, encode};
pub use message::{
    Abort, Commit, Context, Done, Fault, Heartbeat, HelloAck, Init, Kind, Message, Observed, Progress, Ready,
    Refused, Role, ShardPrint, Welcome,
};
pub use tensor::{Dtype, Tensor, TensorSpec, Tensors};

pub(crate) use frame::{T0701, T0702, T0703, T0704, T0705};
pub(crate) use tensor::T0706;

/// Version of everything in this module. Any change of a field, an order or a meaning raises it.
pub const WIRE_VERSION: u16 = 2;
/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"TSRA";
/// Origin of frames that the launching process makes; every other origin is a rank.
pub const LAUNCHER: u32 = u32::MAX;
/// Magic, version, kind, origin, length of meta, length of tensors, checksum.
pub const HEADER_BYTES: usize = 28;
/// Most meta bytes of a frame.
pub const MAX_META_BYTES: u32 = 4 << 20;
/// Most tensor bytes of a frame.
pub const MAX_TENSOR_BYTES: u32 = 256 << 20;
/// Most bytes of a frame.
pub const MAX_FRAME_BYTES: usize = HEADER_BYTES + MAX_META_BYTES as usize + MAX_TENSOR_BYTES as usize;
/// Most tensors of a manifest.
pub const MAX_TENSORS: usize = 16;
/// Most dims of a tensor.
pub const MAX_DIMS: usize = 8;
/// Most phases of a call.
pub const MAX_PHASES: usize = 512;
