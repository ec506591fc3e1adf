//! One peer of the hub: bytes into whole frames, frames into bytes, and what waits for it.

use std::collections::{BTreeSet, VecDeque};
use std::io::ErrorKind;
use std::sync::Arc;

use tessera_base::Diagnostic;

use super::stream::Stream;
use crate::wire::{self, FrameHeader, HEADER_BYTES, MAX_FRAME_BYTES, Message, decode_body, decode_header};
use crate::worker::T0707;

/// Frames that may wait for one peer.
pub const OUT_FRAMES: usize = 256;
/// Bytes that may wait for one peer: the largest frame behind another of its size.
pub const OUT_BYTES: usize = 2 * MAX_FRAME_BYTES;
/// Bytes taken from one peer before the others have their turn.
const IN_TURN: usize = 4 << 20;
/// Bytes given to one peer before the others have their turn.
const OUT_TURN: usize = 4 << 20;
/// A frame's memory grows with what has arrived of it, by at most so much at a time.
pub(super) const IN_STEP: usize = 1 << 20;

/// One frame, whole: forwarded as it came, or read. Clones share the bytes.
#[derive(Debug, Clone)]
pub struct Frame {
    header: FrameHeader,
    bytes: Arc<Vec<u8>>,
}

impl Frame {
    /// Writes a message of `origin`.
    ///
    /// # Errors
    /// When it is over a limit of the wire.
    pub fn new(origin: u32, message: &Message) -> Result<Frame, Diagnostic> {
        let bytes = wire::encode(origin, message)?;
        let Some(head) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(Diagnostic::error(&T0707, "a frame without a header"));
        };
        Ok(Frame { header: decode_header(head)?, bytes: Arc::new(bytes) })
    }

    /// The rank that made it.
    #[must_use]
    pub fn origin(&self) -> u32 {
        self.header.origin
    }

    /// Its header.
    #[must_use]
    pub fn header(&self) -> &FrameHeader {
        &self.header
    }

    /// Its bytes, header first.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Reads it.
    ///
    /// # Errors
    /// When its bytes are not what its header says, or not canonical.
    pub fn message(&self) -> Result<Message, Diagnostic> {
        decode_body(&self.header, self.bytes.get(HEADER_BYTES..).unwrap_or_default())
    }
}

/// How a link ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkEnd {
    /// The peer closed, or its process is gone.
    Closed(String),
    /// The peer sent something that is not a frame, or one that it may not send.
    Broken(Diagnostic),
    /// The peer reads nothing.
    Stuck(String),
}

/// One peer: its stream, the frame that arrives, and those that wait to leave.
pub(super) struct Link {
    pub(super) stream: Box<dyn Stream>,
    origins: BTreeSet<u32>,
    head: Vec<u8>,
    pub(super) part: Option<(FrameHeader, Vec<u8>)>,
    pub(super) queue: VecDeque<Frame>,
    /// Bytes of the first queued frame that left.
    pub(super) sent: usize,
    pub(super) queued_bytes: usize,
    /// Since when nothing left although something waits.
    pub(super) stuck_ns: Option<u64>,
    /// Why writing failed; what the peer said before is still read.
    pub(super) unwritable: Option<String>,
    /// Input was left in the stream when its turn was over.
    pub(super) more: bool,
    pub(super) patient: bool,
}

impl Link {
    pub(super) fn new(stream: Box<dyn Stream>, origins: BTreeSet<u32>) -> Link {
        Link {
            more: stream.holds_input(),
            stream,
            origins,
            head: Vec::with_capacity(HEADER_BYTES),
            part: None,
            queue: VecDeque::new(),
            sent: 0,
            queued_bytes: 0,
            stuck_ns: None,
            unwritable: None,
            patient: false,
        }
    }

    pub(super) fn wants_write(&self) -> bool {
        !self.queue.is_empty() || self.stream.wants_write()
    }

    pub(super) fn write_out(&mut self, now_ns: u64) {
        if self.unwritable.is_some() {
            return;
        }
        let mut turn = 0;
        while let Some(frame) = self.queue.front() {
            let rest = &frame.bytes[self.sent..];
            match self.stream.write(rest) {
                Ok(0) => return self.cannot_write("its socket takes nothing".into()),
                Ok(n) => {
                    self.sent += n;
                    self.stuck_ns = None;
                    turn += n;
                    if self.sent == frame.bytes.len() {
                        self.queued_bytes -= self.sent;
                        self.sent = 0;
                        self.queue.pop_front();
                    } else if turn >= OUT_TURN {
                        break;
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => return self.cannot_write(words(&e)),
            }
        }
        match self.stream.flush() {
            Ok(()) => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(e) => return self.cannot_write(words(&e)),
        }
        if self.wants_write() {
            self.stuck_ns.get_or_insert(now_ns);
        } else {
            self.stuck_ns = None;
        }
    }

    fn cannot_write(&mut self, why: String) {
        self.queue.clear();
        (self.sent, self.queued_bytes, self.stuck_ns) = (0, 0, None);
        self.unwritable = Some(why);
    }

    /// Takes what has arrived, for one turn.
    pub(super) fn read_in(&mut self, scratch: &mut [u8], mut whole: impl FnMut(Frame)) -> Option<LinkEnd> {
        let mut turn = 0;
        self.more = false;
        loop {
            match self.stream.read(scratch) {
                Ok(0) => {
                    return Some(LinkEnd::Closed(match (self.head.is_empty(), &self.part) {
                        (true, None) => "its socket closed".to_string(),
                        _ => "its socket closed inside a frame".to_string(),
                    }));
                }
                Ok(n) => {
                    if let Err(d) = self.assemble(&scratch[..n], &mut whole) {
                        return Some(LinkEnd::Broken(d));
                    }
                    turn += n;
                    if n < scratch.len() && !self.stream.holds_input() {
                        return None;
                    }
                    if turn >= IN_TURN {
                        self.more = true;
                        return None;
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return None,
                Err(e) => return Some(LinkEnd::Closed(words(&e))),
            }
        }
    }

    fn assemble(&mut self, mut bytes: &[u8], whole: &mut impl FnMut(Frame)) -> Result<(), Diagnostic> {
        while !bytes.is_empty() {
            let (header, mut frame) = match self.part.take() {
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
                            format!("a {:?} frame names an origin that this link may not carry", header.kind),
                        )
                        .at("frame", format!("rank {}", header.origin))
                        .at("link", format!("ranks {:?}", self.origins)));
                    }
                    (header, std::mem::take(&mut self.head))
                }
            };
            let total = HEADER_BYTES + header.body_bytes();
            let take = bytes.len().min(total - frame.len());
            if frame.capacity() < frame.len() + take {
                frame.reserve_exact((total - frame.len()).min(take.max(frame.len()).max(IN_STEP)));
            }
            frame.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if frame.len() == total {
                whole(Frame { header, bytes: Arc::new(frame) });
            } else {
                self.part = Some((header, frame));
            }
        }
        Ok(())
    }
}

/// An I/O error in the words of a report.
fn words(e: &std::io::Error) -> String {
    match e.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "its socket closed".to_string()
        }
        _ => e.to_string(),
    }
}
