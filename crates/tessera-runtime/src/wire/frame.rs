//! Frames: 28 bytes of header, meta bytes, tensor bytes.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..4 | magic |
//! | 4..6 | wire version, little-endian as all that follows |
//! | 6..8 | kind |
//! | 8..12 | origin: the rank that made the frame, whoever passes it on |
//! | 12..16 | length of meta |
//! | 16..20 | length of tensors |
//! | 20..28 | xxh3 of bytes 0..20, meta and tensors |

use serde::{Serialize, de::DeserializeOwned};
use tessera_base::{Code, Diagnostic};
use xxhash_rust::xxh3::Xxh3;

use super::message::Kind;
use super::tensor::{T0706, check_manifest};
use super::{
    CallMeta, Context, Done, Envelope, EnvelopeHeader, HEADER_BYTES, MAGIC, MAX_META_BYTES, MAX_TENSOR_BYTES,
    Message, Observed, Reload, ShardPrint, TensorSpec, Tensors, WIRE_VERSION,
};
use crate::digest::canonical_bytes;

/// The two ends speak different versions.
pub(crate) static T0701: Code = Code {
    id: "T0701",
    title: "the peer speaks another wire version",
    page: "Both processes must come from the same release: the wire version names every field, its order and its \
meaning, and nothing is guessed across versions. The frame was refused before anything was allocated for it.\n\n\
Install the same build on every host, and look for a rank that was started from an older path.",
};
/// Not a frame.
pub(crate) static T0702: Code = Code {
    id: "T0702",
    title: "the bytes are not a frame of this protocol",
    page: "The first bytes of a frame are a magic number and a known message kind. Something else arrived: a \
foreign process on the socket, or a sender that lost its place in the stream. The stream cannot be resynchronised; \
the run ends.",
};
/// Over a limit.
pub(crate) static T0703: Code = Code {
    id: "T0703",
    title: "a frame is over a limit",
    page: "Meta bytes, tensor bytes and the number of tensors of a frame each have a fixed limit, checked by the \
sender before the first byte and by the receiver before it allocates. Chunks, prompts and contexts stay far below. \
A frame over the limit is a plan with a wrong shape, or a length field that was damaged.",
};
/// Damaged.
pub(crate) static T0704: Code = Code {
    id: "T0704",
    title: "a frame's checksum does not match its bytes",
    page: "The header, meta and tensors are covered by one checksum. A mismatch means that bytes changed between \
the sender's memory and the receiver's: faulty memory, a faulty link, or two writers on one socket. The call is not \
run; the run ends rather than continue with inputs that may differ between ranks.",
};
/// Meta that does not read.
pub(crate) static T0705: Code = Code {
    id: "T0705",
    title: "a frame's meta does not read as its kind",
    page: "Meta bytes have one canonical form: fixed field order, shortest integers, floats by their bits with one \
NaN, nothing after the last field. Bytes that end early, go on, or could be written shorter are refused, so that \
equal content has equal bytes and digests can be compared.\n\nThis is a fault of the sending program, or a damaged \
frame whose checksum happens to match.",
};

/// A frame's header, read and within limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// What the frame is.
    pub kind: Kind,
    /// The rank that made it; [`LAUNCHER`](super::LAUNCHER) for the launching process.
    pub origin: u32,
    /// Length of the meta.
    pub meta_bytes: u32,
    /// Length of the tensors.
    pub tensor_bytes: u32,
    checksum: u64,
    head: [u8; HEAD_BYTES],
}

/// Header bytes before the checksum.
const HEAD_BYTES: usize = HEADER_BYTES - 8;

impl FrameHeader {
    /// Bytes that follow the header.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        self.meta_bytes as usize + self.tensor_bytes as usize
    }
}

/// Writes a message of `origin` as one frame. Refused before a byte exists if it is over a limit.
pub fn encode(origin: u32, message: &Message) -> Result<Vec<u8>, Diagnostic> {
    let none = Tensors::default();
    let (meta, tensors) = match message {
        Message::Welcome(m) => (canonical_bytes(m), &none),
        Message::Stop | Message::Finished => (Vec::new(), &none),
        Message::Init(m) => (canonical_bytes(m), &none),
        Message::Envelope(m) => {
            (canonical_bytes(&(&m.header, &m.meta, &m.reload, m.tensors.specs())), &m.tensors)
        }
        Message::Context(m) => (canonical_bytes(&(m.call_id, m.tensors.specs())), &m.tensors),
        Message::Commit(m) => (canonical_bytes(m), &none),
        Message::Abort(m) => (canonical_bytes(m), &none),
        Message::HelloAck(m) => (canonical_bytes(m), &none),
        Message::Ready(m) => (canonical_bytes(m), &none),
        Message::Refused(m) => (canonical_bytes(m), &none),
        Message::Done(m) => {
            let rest = (&m.observed, &m.fingerprints, m.output.specs());
            (canonical_bytes(&(m.call_id, m.cache_epoch, rest)), &m.output)
        }
        Message::Fault(m) => (canonical_bytes(m), &none),
        Message::Heartbeat(m) => (canonical_bytes(m), &none),
        Message::Progress(m) => (canonical_bytes(m), &none),
        Message::Failed(m) => (canonical_bytes(m), &none),
    };
    check_manifest(&tensors.specs())?;
    let meta_bytes = within("meta", meta.len() as u64, MAX_META_BYTES)?;
    let tensor_bytes = within("tensors", tensors.bytes(), MAX_TENSOR_BYTES)?;
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
    let checksum = checksum(&frame[..checksum_at], &frame[HEADER_BYTES..]);
    frame[checksum_at..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    Ok(frame)
}

/// The same frame with bytes behind its tensors that no manifest lists, and all lengths and checksums right: for a drill.
pub(crate) fn with_unlisted_bytes(mut frame: Vec<u8>, more: &[u8]) -> Vec<u8> {
    frame.extend_from_slice(more);
    let Some(length) = frame.get(16..20).and_then(|b| b.first_chunk::<4>()) else { return frame };
    let length = u32::from_le_bytes(*length) + more.len() as u32;
    frame[16..20].copy_from_slice(&length.to_le_bytes());
    let checksum = checksum(&frame[..HEAD_BYTES], &frame[HEADER_BYTES..]);
    frame[HEAD_BYTES..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    frame
}

/// Reads a header. Nothing of the frame's size has been allocated yet.
pub fn decode_header(bytes: &[u8; HEADER_BYTES]) -> Result<FrameHeader, Diagnostic> {
    let mut head = [0; HEAD_BYTES];
    head.copy_from_slice(&bytes[..HEAD_BYTES]);
    let u16_at = |i: usize| u16::from_le_bytes([bytes[i], bytes[i + 1]]);
    let u32_at = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
    if head[..4] != MAGIC {
        return Err(Diagnostic::error(&T0702, "a frame does not begin with the magic number")
            .at("received", format!("{:02x?}", &head[..4]))
            .at("expected", format!("{MAGIC:02x?}")));
    }
    let version = u16_at(4);
    if version != WIRE_VERSION {
        return Err(Diagnostic::error(
            &T0701,
            format!("the peer speaks wire version {version}, this process speaks {WIRE_VERSION}"),
        )
        .at("peer", format!("version {version}"))
        .at("here", format!("version {WIRE_VERSION}"))
        .hint("start every rank from the same build"));
    }
    let Some(kind) = Kind::from_u16(u16_at(6)) else {
        return Err(Diagnostic::error(&T0702, format!("unknown message kind {}", u16_at(6))));
    };
    let meta_bytes = within("meta", u64::from(u32_at(12)), MAX_META_BYTES)?;
    let tensor_bytes = within("tensors", u64::from(u32_at(16)), MAX_TENSOR_BYTES)?;
    let mut sum = [0; 8];
    sum.copy_from_slice(&bytes[HEAD_BYTES..]);
    let checksum = u64::from_le_bytes(sum);
    Ok(FrameHeader { kind, origin: u32_at(8), meta_bytes, tensor_bytes, checksum, head })
}

/// Reads what follows a header.
pub fn decode_body(header: &FrameHeader, body: &[u8]) -> Result<Message, Diagnostic> {
    if body.len() != header.body_bytes() {
        return Err(Diagnostic::error(&T0705, "a frame's body has another length than its header says")
            .at("header", format!("{} bytes", header.body_bytes()))
            .at("body", format!("{} bytes", body.len())));
    }
    let found = checksum(&header.head, body);
    if found != header.checksum {
        return Err(Diagnostic::error(&T0704, "a frame's bytes changed on the way")
            .at("header", format!("{:016x}", header.checksum))
            .at("computed", format!("{found:016x}")));
    }
    let (meta, tensors) = body.split_at(header.meta_bytes as usize);
    if !tensors.is_empty() && !matches!(header.kind, Kind::Envelope | Kind::Context | Kind::Done) {
        return Err(Diagnostic::error(&T0706, format!("a {:?} frame carries tensors", header.kind))
            .at("frame", format!("{} tensor bytes", tensors.len())));
    }
    let kind = header.kind;
    Ok(match kind {
        Kind::Welcome => Message::Welcome(read(kind, meta)?),
        Kind::Stop => empty(kind, meta, Message::Stop)?,
        Kind::Init => Message::Init(read(kind, meta)?),
        Kind::Envelope => {
            type Parts = (EnvelopeHeader, Option<CallMeta>, Option<Reload>, Vec<TensorSpec>);
            let (header, meta, reload, specs): Parts = read(kind, meta)?;
            let tensors = Tensors::cut(specs, tensors)?;
            Message::Envelope(Box::new(Envelope { header, meta, reload, tensors }))
        }
        Kind::Context => {
            let (call_id, specs): (u64, Vec<TensorSpec>) = read(kind, meta)?;
            Message::Context(Context { call_id, tensors: Tensors::cut(specs, tensors)? })
        }
        Kind::Commit => Message::Commit(read(kind, meta)?),
        Kind::Abort => Message::Abort(read(kind, meta)?),
        Kind::HelloAck => Message::HelloAck(read(kind, meta)?),
        Kind::Ready => Message::Ready(read(kind, meta)?),
        Kind::Refused => Message::Refused(read(kind, meta)?),
        Kind::Done => {
            type Parts = (u64, u32, (Observed, Vec<ShardPrint>, Vec<TensorSpec>));
            let (call_id, cache_epoch, (observed, fingerprints, specs)): Parts = read(kind, meta)?;
            let output = Tensors::cut(specs, tensors)?;
            Message::Done(Box::new(Done { call_id, cache_epoch, observed, fingerprints, output }))
        }
        Kind::Fault => Message::Fault(read(kind, meta)?),
        Kind::Heartbeat => Message::Heartbeat(read(kind, meta)?),
        Kind::Progress => Message::Progress(read(kind, meta)?),
        Kind::Finished => empty(kind, meta, Message::Finished)?,
        Kind::Failed => Message::Failed(read(kind, meta)?),
    })
}

/// Reads one whole frame and nothing after it: its origin and its message.
pub fn decode(bytes: &[u8]) -> Result<(u32, Message), Diagnostic> {
    let Some((head, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Err(Diagnostic::error(&T0702, "the bytes end inside a frame's header")
            .at("received", format!("{} bytes", bytes.len()))
            .at("header", format!("{HEADER_BYTES} bytes")));
    };
    let header = decode_header(head)?;
    Ok((header.origin, decode_body(&header, body)?))
}

fn within(what: &str, bytes: u64, limit: u32) -> Result<u32, Diagnostic> {
    if bytes <= u64::from(limit) {
        return Ok(bytes as u32);
    }
    Err(Diagnostic::error(&T0703, format!("a frame's {what} are over the limit"))
        .at("frame", format!("{bytes} bytes"))
        .at("limit", format!("{limit} bytes")))
}

fn checksum(head: &[u8], body: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(head);
    hash.update(body);
    hash.digest()
}

fn read<T: Serialize + DeserializeOwned>(kind: Kind, bytes: &[u8]) -> Result<T, Diagnostic> {
    let refuse = |why: String| {
        Diagnostic::error(&T0705, format!("the meta of a {kind:?} frame does not read: {why}"))
            .at("frame", format!("{} bytes of meta", bytes.len()))
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

fn empty(kind: Kind, meta: &[u8], message: Message) -> Result<Message, Diagnostic> {
    read::<()>(kind, meta).map(|()| message)
}
