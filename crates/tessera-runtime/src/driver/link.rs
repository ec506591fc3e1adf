//! One link of the reactor: it assembles incoming bytes into frames, writes outgoing frames, and
//! queues those that do not fit the socket.

use std::collections::{BTreeSet, VecDeque};
use std::io::ErrorKind;
use std::sync::Arc;

use tessera_base::Diagnostic;

use super::byte_stream::ByteStream;
use crate::codes::T0707;
use crate::wire::{self, FrameHeader, HEADER_BYTES, MAX_FRAME_BYTES, Message, decode_body, decode_header};

/// Maximum queued frames per peer.
pub const MAX_QUEUED_FRAMES: usize = 256;
/// Maximum queued bytes per peer: two frames of maximum size.
pub const MAX_QUEUED_BYTES: usize = 2 * MAX_FRAME_BYTES;
/// Maximum bytes read from one peer before the other peers are served.
const READ_TURN_BYTES: usize = 4 << 20;
/// Maximum bytes written to one peer before the other peers are served.
const WRITE_TURN_BYTES: usize = 4 << 20;
/// A frame's buffer grows with the bytes that arrived, not with the announced length: by this many
/// bytes, or to twice its size if that is more.
pub(super) const BUFFER_GROWTH_BYTES: usize = 1 << 20;

/// One complete frame, which can be forwarded unchanged or decoded. Clones share the bytes.
#[derive(Debug, Clone)]
pub struct Frame {
    header: FrameHeader,
    bytes: Arc<Vec<u8>>,
}

impl Frame {
    /// Encodes a message of `origin`.
    ///
    /// # Errors
    /// A wire limit, such as T0703.
    pub fn new(origin: u32, message: &Message) -> Result<Frame, Diagnostic> {
        let bytes = wire::encode(origin, message)?;
        let Some(head) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(Diagnostic::error(&T0707, "a frame without a header"));
        };
        Ok(Frame { header: decode_header(head)?, bytes: Arc::new(bytes) })
    }

    /// Returns the rank that created the frame.
    #[must_use]
    pub fn origin(&self) -> u32 {
        self.header.origin
    }

    /// Returns the frame's decoded header, which names the rank that created it.
    #[must_use]
    pub fn header(&self) -> &FrameHeader {
        &self.header
    }

    /// Returns the bytes of the frame, header first.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Decodes the message.
    ///
    /// # Errors
    /// T0704, T0705 or T0706 if the bytes contradict the header or are not canonical.
    pub fn decode_message(&self) -> Result<Message, Diagnostic> {
        decode_body(&self.header, self.bytes.get(HEADER_BYTES..).unwrap_or_default())
    }
}

/// Why a link ended. The texts have the peer as their subject, such as `its socket closed`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DisconnectReason {
    /// The peer closed the link, or its process ended.
    Closed(String),
    /// The peer sent bytes that are not a frame, or a frame that it must not send.
    Broken(Diagnostic),
    /// The peer does not read.
    Stalled(String),
}

/// One peer: its stream, the partly received frame, and the queued frames.
pub(super) struct PeerLink {
    pub(super) stream: Box<dyn ByteStream>,
    origins: BTreeSet<u32>,
    head: Vec<u8>,
    pub(super) partial: Option<(FrameHeader, Vec<u8>)>,
    pub(super) queue: VecDeque<Frame>,
    /// Bytes of the first queued frame that were already written.
    pub(super) written: usize,
    pub(super) queued_bytes: usize,
    /// Time since which no byte could be written although some are queued.
    pub(super) blocked_since_ns: Option<u64>,
    /// Why writing failed. Input that the peer sent before is still read.
    pub(super) write_error: Option<String>,
    /// Input was left in the stream when the read limit was reached.
    pub(super) has_more_input: bool,
    pub(super) best_effort: bool,
}

impl PeerLink {
    pub(super) fn new(stream: Box<dyn ByteStream>, origins: BTreeSet<u32>) -> PeerLink {
        PeerLink {
            has_more_input: stream.holds_input(),
            stream,
            origins,
            head: Vec::with_capacity(HEADER_BYTES),
            partial: None,
            queue: VecDeque::new(),
            written: 0,
            queued_bytes: 0,
            blocked_since_ns: None,
            write_error: None,
            best_effort: false,
        }
    }

    pub(super) fn wants_write(&self) -> bool {
        !self.queue.is_empty() || self.stream.wants_write()
    }

    pub(super) fn write_queued(&mut self, now_ns: u64) {
        if self.write_error.is_some() {
            return;
        }
        let mut bytes_written = 0;
        while let Some(frame) = self.queue.front() {
            let rest = &frame.bytes[self.written..];
            match self.stream.write(rest) {
                Ok(0) => return self.fail_writes("its socket accepts no bytes".into()),
                Ok(n) => {
                    self.written += n;
                    self.blocked_since_ns = None;
                    bytes_written += n;
                    if self.written == frame.bytes.len() {
                        self.queued_bytes -= self.written;
                        self.written = 0;
                        self.queue.pop_front();
                    } else if bytes_written >= WRITE_TURN_BYTES {
                        break;
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => return self.fail_writes(describe_io_error(&e)),
            }
        }
        match self.stream.flush() {
            Ok(()) => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => return self.fail_writes(describe_io_error(&e)),
        }
        if self.wants_write() {
            self.blocked_since_ns.get_or_insert(now_ns);
        } else {
            self.blocked_since_ns = None;
        }
    }

    fn fail_writes(&mut self, reason: String) {
        self.queue.clear();
        (self.written, self.queued_bytes, self.blocked_since_ns) = (0, 0, None);
        self.write_error = Some(reason);
    }

    /// Reads the bytes that have arrived, up to the limit per turn, and passes complete frames to
    /// `on_frame`.
    pub(super) fn read_available(
        &mut self,
        buffer: &mut [u8],
        mut on_frame: impl FnMut(Frame),
    ) -> Option<DisconnectReason> {
        let mut bytes_read = 0;
        self.has_more_input = false;
        loop {
            match self.stream.read(buffer) {
                Ok(0) => {
                    return Some(DisconnectReason::Closed(match (self.head.is_empty(), &self.partial) {
                        (true, None) => "its socket closed".to_string(),
                        _ => "its socket closed inside a frame".to_string(),
                    }));
                }
                Ok(n) => {
                    if let Err(d) = self.assemble_frames(&buffer[..n], &mut on_frame) {
                        return Some(DisconnectReason::Broken(d));
                    }
                    // A short read does not mean that nothing is left: an encrypted stream returns one
                    // record at a time.
                    bytes_read += n;
                    if bytes_read >= READ_TURN_BYTES {
                        self.has_more_input = true;
                        return None;
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return None,
                Err(e) => return Some(DisconnectReason::Closed(describe_io_error(&e))),
            }
        }
    }

    fn assemble_frames(
        &mut self,
        mut bytes: &[u8],
        on_frame: &mut impl FnMut(Frame),
    ) -> Result<(), Diagnostic> {
        while !bytes.is_empty() {
            let (header, mut frame) = match self.partial.take() {
                Some(part) => part,
                None => {
                    let take = bytes.len().min(HEADER_BYTES - self.head.len());
                    self.head.extend_from_slice(&bytes[..take]);
                    bytes = &bytes[take..];
                    let Some(head) = self.head.first_chunk::<HEADER_BYTES>() else { return Ok(()) };
                    let header = decode_header(head)?;
                    if !self.origins.contains(&header.origin) {
                        return Err(Diagnostic::error(
                            &T0707,
                            format!("the origin of a {:?} frame is not allowed on this link", header.kind),
                        )
                        .with_label("frame", format!("rank {}", header.origin))
                        .with_label("link", format!("ranks {:?}", self.origins)));
                    }
                    (header, std::mem::take(&mut self.head))
                }
            };
            let total = HEADER_BYTES + header.body_bytes();
            let take = bytes.len().min(total - frame.len());
            if frame.capacity() < frame.len() + take {
                frame
                    .reserve_exact((total - frame.len()).min(take.max(frame.len()).max(BUFFER_GROWTH_BYTES)));
            }
            frame.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if frame.len() == total {
                on_frame(Frame { header, bytes: Arc::new(frame) });
            } else {
                self.partial = Some((header, frame));
            }
        }
        Ok(())
    }
}

/// Returns `its socket closed` if the error means that the peer is gone, and otherwise the error's
/// own text.
fn describe_io_error(e: &std::io::Error) -> String {
    match e.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "its socket closed".to_string()
        }
        _ => e.to_string(),
    }
}
