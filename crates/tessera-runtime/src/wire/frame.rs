//! Frames: 28 bytes of header, meta bytes, tensor bytes.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..4 | magic |
//! | 4..6 | wire version, little-endian like every following field |
//! | 6..8 | kind |
//! | 8..12 | origin: the rank that created the frame, even if another rank forwards it |
//! | 12..16 | length of meta |
//! | 16..20 | length of tensors |
//! | 20..28 | xxh3 of bytes 0..20, meta and tensors |

use serde::{Serialize, de::DeserializeOwned};
use tessera_base::Diagnostic;
use xxhash_rust::xxh3::Xxh3;

use super::message::MessageKind;
use super::{HEADER_BYTES, MAGIC, MAX_META_BYTES, MAX_TENSOR_BYTES, Message, Tensors, WIRE_VERSION};
use crate::codes::{T0701, T0702, T0703, T0704, T0705, T0706};
use crate::digest::canonical_bytes;

/// A decoded header, which is within the limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Kind of the message, which determines how the meta decodes and whether tensors are allowed.
    pub kind: MessageKind,
    /// The rank that created the frame; [`LAUNCHER`](super::LAUNCHER) for the launching process.
    pub origin: u32,
    /// Length of the meta in bytes, at most [`MAX_META_BYTES`].
    pub meta_bytes: u32,
    /// Length of all tensors together in bytes, at most [`MAX_TENSOR_BYTES`].
    pub tensor_bytes: u32,
    checksum: u64,
    head: [u8; HEAD_BYTES],
}

/// Number of header bytes before the checksum.
const HEAD_BYTES: usize = HEADER_BYTES - 8;

impl FrameHeader {
    /// Returns the number of bytes that follow the header.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.meta_bytes as usize + self.tensor_bytes as usize
    }
}

/// Encodes a message of `origin` as one frame.
///
/// # Errors
/// T0703 or T0706 if the message exceeds a limit; no byte is encoded then.
pub fn encode(origin: u32, message: &Message) -> Result<Vec<u8>, Diagnostic> {
    let meta = canonical_bytes(message);
    let no_tensors = Tensors::default();
    let tensors = message.tensors().unwrap_or(&no_tensors);
    tensors.check_manifest()?;
    let meta_bytes = check_limit("meta", meta.len() as u64, MAX_META_BYTES)?;
    let tensor_bytes = check_limit("tensors", tensors.total_bytes(), MAX_TENSOR_BYTES)?;
    let mut frame = Vec::with_capacity(HEADER_BYTES + meta.len() + tensor_bytes as usize);
    frame.extend_from_slice(&MAGIC);
    frame.extend_from_slice(&WIRE_VERSION.to_le_bytes());
    frame.extend_from_slice(&(message.kind() as u16).to_le_bytes());
    frame.extend_from_slice(&origin.to_le_bytes());
    frame.extend_from_slice(&meta_bytes.to_le_bytes());
    frame.extend_from_slice(&tensor_bytes.to_le_bytes());
    let checksum_at = frame.len();
    frame.extend_from_slice(&[0; 8]);
    frame.extend_from_slice(&meta);
    for t in &tensors.0 {
        frame.extend_from_slice(t.data());
    }
    let checksum = frame_checksum(&frame[..checksum_at], &frame[HEADER_BYTES..]);
    frame[checksum_at..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    Ok(frame)
}

/// Appends bytes that no manifest lists to a frame's tensors, and corrects the length and the
/// checksum. For drills.
pub(crate) fn with_unlisted_bytes(mut frame: Vec<u8>, more: &[u8]) -> Vec<u8> {
    frame.extend_from_slice(more);
    let Some(length) = frame.get(16..20).and_then(|b| b.first_chunk::<4>()) else { return frame };
    let length = u32::from_le_bytes(*length) + more.len() as u32;
    frame[16..20].copy_from_slice(&length.to_le_bytes());
    let checksum = frame_checksum(&frame[..HEAD_BYTES], &frame[HEADER_BYTES..]);
    frame[HEAD_BYTES..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    frame
}

/// Decodes a header. At this point, no memory that depends on the frame's size has been allocated.
///
/// # Errors
/// T0701, T0702 or T0703.
pub fn decode_header(bytes: &[u8; HEADER_BYTES]) -> Result<FrameHeader, Diagnostic> {
    let mut head = [0; HEAD_BYTES];
    head.copy_from_slice(&bytes[..HEAD_BYTES]);
    let u16_at = |i: usize| u16::from_le_bytes([bytes[i], bytes[i + 1]]);
    let u32_at = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
    if head[..4] != MAGIC {
        return Err(Diagnostic::error(&T0702, "a frame does not begin with the magic number")
            .with_label("received", format!("{:02x?}", &head[..4]))
            .with_label("expected", format!("{MAGIC:02x?}")));
    }
    let version = u16_at(4);
    if version != WIRE_VERSION {
        return Err(Diagnostic::error(
            &T0701,
            format!("the peer uses wire version {version}, this process uses {WIRE_VERSION}"),
        )
        .with_label("peer", format!("version {version}"))
        .with_label("here", format!("version {WIRE_VERSION}"))
        .with_hint("start every rank from the same build"));
    }
    let Some(kind) = MessageKind::from_u16(u16_at(6)) else {
        return Err(Diagnostic::error(&T0702, format!("unknown message kind {}", u16_at(6))));
    };
    let meta_bytes = check_limit("meta", u64::from(u32_at(12)), MAX_META_BYTES)?;
    let tensor_bytes = check_limit("tensors", u64::from(u32_at(16)), MAX_TENSOR_BYTES)?;
    let mut sum = [0; 8];
    sum.copy_from_slice(&bytes[HEAD_BYTES..]);
    let checksum = u64::from_le_bytes(sum);
    Ok(FrameHeader { kind, origin: u32_at(8), meta_bytes, tensor_bytes, checksum, head })
}

/// Decodes the bytes that follow a header.
///
/// # Errors
/// T0704, T0705 or T0706.
pub fn decode_body(header: &FrameHeader, body: &[u8]) -> Result<Message, Diagnostic> {
    if body.len() != header.body_bytes() {
        return Err(Diagnostic::error(&T0705, "the length of a frame's body differs from its header")
            .with_label("header", format!("{} bytes", header.body_bytes()))
            .with_label("body", format!("{} bytes", body.len())));
    }
    let found = frame_checksum(&header.head, body);
    if found != header.checksum {
        return Err(Diagnostic::error(&T0704, "a frame's bytes changed in transit")
            .with_label("header", format!("{:016x}", header.checksum))
            .with_label("computed", format!("{found:016x}")));
    }
    let (meta, payload) = body.split_at(header.meta_bytes as usize);
    let kind = header.kind;
    let carries_tensors = matches!(
        kind,
        MessageKind::Envelope
            | MessageKind::Context
            | MessageKind::Done
            | MessageKind::ArrayCall
            | MessageKind::ArrayOutputs
    );
    if !payload.is_empty() && !carries_tensors {
        return Err(Diagnostic::error(&T0706, format!("a {kind:?} frame carries tensors"))
            .with_label("frame", format!("{} tensor bytes", payload.len())));
    }
    let mut message = match kind {
        MessageKind::Welcome => Message::Welcome(read_meta(kind, meta)?),
        MessageKind::Stop => read_meta::<()>(kind, meta).map(|()| Message::Stop)?,
        MessageKind::ArrayCall => Message::ArrayCall(read_meta(kind, meta)?),
        MessageKind::StreamChange => Message::StreamChange(read_meta(kind, meta)?),
        MessageKind::RequestLimit => Message::RequestLimit(read_meta(kind, meta)?),
        MessageKind::Init => Message::Init(read_meta(kind, meta)?),
        MessageKind::Envelope => Message::Envelope(read_meta(kind, meta)?),
        MessageKind::Context => Message::Context(read_meta(kind, meta)?),
        MessageKind::Commit => Message::Commit(read_meta(kind, meta)?),
        MessageKind::Abort => Message::Abort(read_meta(kind, meta)?),
        MessageKind::HelloAck => Message::HelloAck(read_meta(kind, meta)?),
        MessageKind::Ready => Message::Ready(read_meta(kind, meta)?),
        MessageKind::Refused => Message::Refused(read_meta(kind, meta)?),
        MessageKind::Done => Message::Done(read_meta(kind, meta)?),
        MessageKind::Fault => Message::Fault(read_meta(kind, meta)?),
        MessageKind::Heartbeat => Message::Heartbeat(read_meta(kind, meta)?),
        MessageKind::Progress => Message::Progress(read_meta(kind, meta)?),
        MessageKind::Finished => read_meta::<()>(kind, meta).map(|()| Message::Finished)?,
        MessageKind::Failed => Message::Failed(read_meta(kind, meta)?),
        MessageKind::ArrayOutputs => Message::ArrayOutputs(read_meta(kind, meta)?),
        MessageKind::ChangeEffect => Message::ChangeEffect(read_meta(kind, meta)?),
    };
    if let Some(tensors) = message.tensors_mut() {
        tensors.attach_payload(payload)?;
    }
    Ok(message)
}

/// Decodes exactly one frame, without trailing bytes, into its origin and its message.
///
/// # Errors
/// T0701 to T0706.
pub fn decode(bytes: &[u8]) -> Result<(u32, Message), Diagnostic> {
    let Some((head, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Err(Diagnostic::error(&T0702, "the bytes end inside a frame's header")
            .with_label("received", format!("{} bytes", bytes.len()))
            .with_label("header", format!("{HEADER_BYTES} bytes")));
    };
    let header = decode_header(head)?;
    Ok((header.origin, decode_body(&header, body)?))
}

fn check_limit(what: &str, bytes: u64, limit: u32) -> Result<u32, Diagnostic> {
    if bytes <= u64::from(limit) {
        return Ok(bytes as u32);
    }
    Err(Diagnostic::error(&T0703, format!("a frame's {what} exceed the limit"))
        .with_label("frame", format!("{bytes} bytes"))
        .with_label("limit", format!("{limit} bytes")))
}

fn frame_checksum(head: &[u8], body: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(head);
    hash.update(body);
    hash.digest()
}

fn read_meta<T: Serialize + DeserializeOwned>(kind: MessageKind, bytes: &[u8]) -> Result<T, Diagnostic> {
    let refuse = |why: String| {
        Diagnostic::error(&T0705, format!("the meta of a {kind:?} frame does not decode: {why}"))
            .with_label("frame", format!("{} bytes of meta", bytes.len()))
    };
    let (value, rest) = postcard::take_from_bytes::<T>(bytes).map_err(|e| refuse(e.to_string()))?;
    if !rest.is_empty() {
        return Err(refuse(format!("{} bytes follow the last field", rest.len())));
    }
    if canonical_bytes(&value) != bytes {
        return Err(refuse("the bytes are not in canonical form".to_string()));
    }
    Ok(value)
}
