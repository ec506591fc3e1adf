//! The stream to one peer: the frames to send to it and the frames received from it.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, ErrorKind};
use std::sync::Arc;

use rustix::fd::{AsFd, BorrowedFd};
use xxhash_rust::xxh3::Xxh3;

use super::frame::{CommFrameHeader, CommFrameKind, HASHED_BYTES, HEADER_BYTES};
use crate::transport::{CommLayout, REASON_BYTES};

/// An open stream to one peer: ordered, lossless and non-blocking. Small frames should leave at
/// once: over TCP, without Nagle's delay.
pub trait PeerStream: Send {
    /// Reads the available bytes; returns 0 at the end of the stream and `WouldBlock` if no byte is
    /// available yet.
    ///
    /// # Errors
    /// Returns the errors of the stream.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize>;
    /// Writes some of the bytes; returns `WouldBlock` if the stream accepts none yet.
    ///
    /// # Errors
    /// Returns the errors of the stream.
    fn write(&mut self, from: &[u8]) -> io::Result<usize>;
    /// Passes on the bytes that earlier writes left buffered inside; returns `false` while some
    /// remain.
    ///
    /// # Errors
    /// Returns the errors of the stream.
    fn flush(&mut self) -> io::Result<bool>;
    /// Closes the write direction, so that the peer sees the end of the stream. Reads stay
    /// possible.
    fn close(&mut self);
    /// Returns the descriptor to poll.
    fn as_fd(&self) -> BorrowedFd<'_>;
}

impl PeerStream for std::net::TcpStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        io::Read::read(self, into)
    }

    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        io::Write::write(self, from)
    }

    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    fn close(&mut self) {
        let _ = self.shutdown(std::net::Shutdown::Write);
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        AsFd::as_fd(self)
    }
}

/// Number of bytes per read call.
const READ_BYTES: usize = 64 << 10;
/// Maximum bytes read from one peer before the other peers get their share.
const QUOTA_BYTES: usize = 1 << 20;

/// Why this member can read nothing more from a peer.
#[derive(Debug)]
pub(super) enum StreamEnd {
    /// The stream closed or broke.
    Disconnected(String),
    /// The stream carried an invalid frame, described here; nothing after that frame is read.
    InvalidFrame(String),
}

/// The receive slot for a peer's contribution to one collective.
#[derive(Debug)]
pub(super) struct PeerSlot {
    /// The number of the last completely received collective plus one.
    pub(super) published: u64,
    pub(super) fingerprint: u64,
    pub(super) data: Vec<f32>,
    /// Whether this member has read the contribution, so that the next may arrive.
    pub(super) free: bool,
}

/// The stream to one peer, with the frames to send and the contributions received.
pub(super) struct PeerConnection {
    wire: Box<dyn PeerStream>,
    slot_bytes: usize,
    send_queue: VecDeque<(Arc<Vec<u8>>, usize)>,
    /// Whether `wire` may still hold written bytes in a buffer of its own, as a TLS stream does.
    wire_buffered: bool,
    /// Whether the stream rejects writes; bytes that the peer sent before may still be read.
    write_broken: bool,
    closed: bool,
    buffer: Box<[u8]>,
    /// The range of the buffer that is read but not yet parsed.
    unparsed: std::ops::Range<usize>,
    header: Option<CommFrameHeader>,
    /// Hash of the received part of the frame.
    hash: Box<Xxh3>,
    reason: Vec<u8>,
    /// Number of contributions that the peer has begun to send.
    next_seq: u64,
    /// The peer's contributions: that to collective number `s` is in slot `s % slots.len()`.
    pub(super) slots: Vec<PeerSlot>,
    /// By slot: the number of this member's last collective that the peer has read, plus one.
    pub(super) finished: Vec<u64>,
    /// Set once, when the stream ends.
    pub(super) stream_end: Option<StreamEnd>,
    /// Whether the last receive stopped before the stream was empty.
    pub(super) has_more: bool,
}

impl fmt::Debug for PeerConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer")
            .field("next", &self.next_seq)
            .field("end", &self.stream_end)
            .finish_non_exhaustive()
    }
}

impl PeerConnection {
    pub(super) fn new(wire: Box<dyn PeerStream>, layout: CommLayout) -> PeerConnection {
        let slot = || PeerSlot { published: 0, fingerprint: 0, data: Vec::new(), free: true };
        PeerConnection {
            wire,
            slot_bytes: layout.slot_bytes,
            send_queue: VecDeque::new(),
            wire_buffered: false,
            write_broken: false,
            closed: false,
            buffer: vec![0; READ_BYTES].into(),
            unparsed: 0..0,
            header: None,
            hash: Box::new(Xxh3::new()),
            reason: Vec::new(),
            next_seq: 0,
            slots: (0..layout.slots).map(|_| slot()).collect(),
            finished: vec![0; layout.slots],
            stream_end: None,
            has_more: false,
        }
    }

    /// Appends a frame to the send queue. The queue contains at most `slots` contributions, as many
    /// acknowledgements, and one abort.
    pub(super) fn send(&mut self, frame: Arc<Vec<u8>>) {
        if !self.write_broken {
            self.send_queue.push_back((frame, 0));
        }
    }

    /// Returns whether any bytes remain to be sent.
    pub(super) fn has_unsent(&self) -> bool {
        !self.send_queue.is_empty() || self.wire_buffered
    }

    /// Sends as much as the stream accepts now.
    pub(super) fn flush(&mut self) {
        while let Some((frame, at)) = self.send_queue.front_mut() {
            match self.wire.write(&frame[*at..]) {
                Ok(0) => return,
                Ok(n) => {
                    *at += n;
                    self.wire_buffered = true;
                    if *at == frame.len() {
                        self.send_queue.pop_front();
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // The peer's last frames may still be readable.
                Err(_) => return self.stop_sending(),
            }
        }
        if self.wire_buffered {
            match self.wire.flush() {
                Ok(done) => self.wire_buffered = !done,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.stop_sending(),
            }
        }
    }

    /// Closes the write direction, so that the peer sees the end of the stream.
    pub(super) fn close(&mut self) {
        if !self.closed {
            self.closed = true;
            self.wire.close();
        }
    }

    /// Reads the available bytes. `published` is the number of this member's published
    /// contributions; `progressed` is set when a frame is complete. Returns the reason of an abort.
    pub(super) fn receive_available(&mut self, published: u64, progressed: &mut bool) -> Option<String> {
        let mut read = 0;
        self.has_more = true;
        while self.stream_end.is_none() && read < QUOTA_BYTES {
            if self.unparsed.start > 0 {
                self.buffer.copy_within(self.unparsed.clone(), 0);
                self.unparsed = 0..self.unparsed.len();
            }
            match self.wire.read(&mut self.buffer[self.unparsed.end..]) {
                Ok(0) => self.mark_ended(progressed, StreamEnd::Disconnected("its stream closed".into())),
                Ok(n) => {
                    read += n;
                    self.unparsed.end += n;
                    match self.parse_frames(published, progressed) {
                        Ok(None) => {}
                        Ok(reason) => return reason,
                        Err(what) => self.mark_ended(progressed, StreamEnd::InvalidFrame(what)),
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    self.has_more = false;
                    break;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => self.mark_ended(progressed, StreamEnd::Disconnected(e.to_string())),
            }
        }
        self.has_more &= self.stream_end.is_none();
        None
    }

    fn mark_ended(&mut self, progressed: &mut bool, end: StreamEnd) {
        *progressed = true;
        self.stop_sending();
        self.stream_end = Some(end);
    }

    fn stop_sending(&mut self) {
        self.write_broken = true;
        self.wire_buffered = false;
        self.send_queue.clear();
    }

    /// Parses complete frames, and the available part of a contribution, out of the buffer.
    fn parse_frames(&mut self, published: u64, progressed: &mut bool) -> Result<Option<String>, String> {
        loop {
            let header = match self.header.take() {
                Some(h) => h,
                None => {
                    let Some(bytes) = self.buffer[self.unparsed.clone()].first_chunk::<HEADER_BYTES>() else {
                        return Ok(None);
                    };
                    let header = CommFrameHeader::parse(bytes).ok_or("an unknown frame kind")?;
                    self.hash.reset();
                    self.hash.update(&bytes[..HASHED_BYTES]);
                    self.unparsed.start += HEADER_BYTES;
                    self.begin_frame(&header, published)?;
                    header
                }
            };
            match self.read_payload(header)? {
                PayloadProgress::Incomplete(header) => {
                    self.header = Some(header);
                    return Ok(None);
                }
                PayloadProgress::Complete(CommFrameKind::Abort) => {
                    *progressed = true;
                    return Ok(Some(String::from_utf8_lossy(&self.reason).into_owned()));
                }
                PayloadProgress::Complete(_) => *progressed = true,
            }
        }
    }

    /// Checks that a frame may come now and that its length is valid.
    fn begin_frame(&mut self, h: &CommFrameHeader, published: u64) -> Result<(), String> {
        let slots = self.slots.len() as u64;
        let slot = (h.seq % slots) as usize;
        match h.kind {
            CommFrameKind::Data => {
                if h.seq != self.next_seq || !self.slots[slot].free {
                    return Err(format!(
                        "contribution {} out of order or too early: {} expected, at most {slots} ahead",
                        h.seq, self.next_seq
                    ));
                }
                if h.bytes > self.slot_bytes || !h.bytes.is_multiple_of(4) {
                    return Err(format!("{} bytes for a slot of {}", h.bytes, self.slot_bytes));
                }
                self.next_seq += 1;
                let into = &mut self.slots[slot];
                into.free = false;
                into.fingerprint = h.fingerprint;
                into.data.clear();
                into.data.reserve_exact(h.bytes / 4);
            }
            CommFrameKind::Finished => {
                if h.bytes != 0 || h.seq >= published || self.finished[slot] > h.seq {
                    return Err(format!("collective {} finished, of {published} published", h.seq));
                }
            }
            CommFrameKind::Abort => {
                if h.bytes > REASON_BYTES {
                    return Err(format!("an abort reason of {} bytes", h.bytes));
                }
                self.reason.clear();
            }
        }
        Ok(())
    }

    /// Consumes the available part of a payload.
    fn read_payload(&mut self, h: CommFrameHeader) -> Result<PayloadProgress, String> {
        let slot = (h.seq % self.slots.len() as u64) as usize;
        let (had, unit) = match h.kind {
            CommFrameKind::Data => (self.slots[slot].data.len() * 4, 4),
            _ => (self.reason.len(), 1),
        };
        let here = self.unparsed.len().min(h.bytes - had.min(h.bytes)) / unit * unit;
        let part = &self.buffer[self.unparsed.start..self.unparsed.start + here];
        self.hash.update(part);
        match h.kind {
            CommFrameKind::Data => {
                let numbers = part.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                self.slots[slot].data.extend(numbers);
            }
            CommFrameKind::Abort => self.reason.extend_from_slice(part),
            CommFrameKind::Finished => {}
        }
        self.unparsed.start += here;
        if had + here < h.bytes {
            return Ok(PayloadProgress::Incomplete(h));
        }
        if self.hash.digest() != h.checksum {
            return Err(format!("a wrong checksum on a frame of {} bytes", h.bytes));
        }
        match h.kind {
            CommFrameKind::Data => self.slots[slot].published = h.seq + 1,
            CommFrameKind::Finished => self.finished[slot] = h.seq + 1,
            CommFrameKind::Abort => {}
        }
        Ok(PayloadProgress::Complete(h.kind))
    }
}

enum PayloadProgress {
    /// More bytes of the payload must arrive; contains the header, to continue with.
    Incomplete(CommFrameHeader),
    Complete(CommFrameKind),
}
