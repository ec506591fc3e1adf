//! One peer of a lane: what is on its way to it, and what came from it.

use std::collections::VecDeque;
use std::fmt;
use std::io::ErrorKind;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::Wire;
use super::frame::{HASHED_BYTES, HEADER_BYTES, Header, Kind};
use crate::arena::ArenaLayout;
use crate::exchange::REASON_BYTES;

/// Bytes read at a time.
const READ_BYTES: usize = 64 << 10;
/// Most bytes read from one peer before the others are looked at.
const TURN_BYTES: usize = 1 << 20;

/// How a peer's stream ended.
#[derive(Debug)]
pub(super) enum End {
    /// It closed or broke.
    Gone(String),
    /// It carried what no member sends.
    Garbled(String),
}

/// A slot as the peer filled it.
#[derive(Debug)]
pub(super) struct Slot {
    /// One more than the number of the collective whose contribution is whole.
    pub(super) published: u64,
    pub(super) fingerprint: u64,
    pub(super) data: Vec<f32>,
    /// Whether the contribution was read here, so that the next may come.
    pub(super) free: bool,
}

/// A peer.
pub(super) struct Peer {
    wire: Box<dyn Wire>,
    slot_bytes: usize,
    out: VecDeque<(Arc<Vec<u8>>, usize)>,
    /// Whether something is left inside the stream.
    inside: bool,
    /// Whether it takes nothing any more; what it sent before may still be read.
    deaf: bool,
    closed: bool,
    buffer: Box<[u8]>,
    /// What of the buffer is read and not yet taken apart.
    held: std::ops::Range<usize>,
    header: Option<Header>,
    /// Of what has come of the frame.
    hash: Box<Xxh3>,
    reason: Vec<u8>,
    /// Contributions begun by the peer.
    next: u64,
    /// Slots of its contributions.
    pub(super) slots: Vec<Slot>,
    /// By slot: one more than the number of the last collective of ours that it has read.
    pub(super) finished: Vec<u64>,
    /// Set once.
    pub(super) end: Option<End>,
    /// Whether the last turn ended before the stream was empty.
    pub(super) more: bool,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer").field("next", &self.next).field("end", &self.end).finish_non_exhaustive()
    }
}

impl Peer {
    pub(super) fn new(wire: Box<dyn Wire>, layout: ArenaLayout) -> Peer {
        let slot = || Slot { published: 0, fingerprint: 0, data: Vec::new(), free: true };
        Peer {
            wire,
            slot_bytes: layout.slot_bytes,
            out: VecDeque::new(),
            inside: false,
            deaf: false,
            closed: false,
            buffer: vec![0; READ_BYTES].into(),
            held: 0..0,
            header: None,
            hash: Box::new(Xxh3::new()),
            reason: Vec::new(),
            next: 0,
            slots: (0..layout.slots).map(|_| slot()).collect(),
            finished: vec![0; layout.slots],
            end: None,
            more: false,
        }
    }

    /// Puts a frame behind those on their way. At most `slots` contributions, as many answers and an abort can be.
    pub(super) fn send(&mut self, frame: Arc<Vec<u8>>) {
        if !self.deaf {
            self.out.push_back((frame, 0));
        }
    }

    /// Whether something is still to be sent.
    pub(super) fn unsent(&self) -> bool {
        !self.out.is_empty() || self.inside
    }

    /// Sends what the stream takes now.
    pub(super) fn flush(&mut self) {
        while let Some((frame, at)) = self.out.front_mut() {
            match self.wire.write(&frame[*at..]) {
                Ok(0) => return,
                Ok(n) => {
                    *at += n;
                    self.inside = true;
                    if *at == frame.len() {
                        self.out.pop_front();
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // Its last words may still be there to read.
                Err(_) => return self.deafen(),
            }
        }
        if self.inside {
            match self.wire.flush() {
                Ok(done) => self.inside = !done,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.deafen(),
            }
        }
    }

    /// Says that nothing more will be sent.
    pub(super) fn close(&mut self) {
        if !self.closed {
            self.closed = true;
            self.wire.close();
        }
    }

    /// Reads what is there. `published` is how many contributions of ours are on their way; `moved` is set when
    /// something came whole. An abort's reason is handed over.
    pub(super) fn receive(&mut self, published: u64, moved: &mut bool) -> Option<String> {
        let mut read = 0;
        self.more = true;
        while self.end.is_none() && read < TURN_BYTES {
            if self.held.start > 0 {
                self.buffer.copy_within(self.held.clone(), 0);
                self.held = 0..self.held.len();
            }
            match self.wire.read(&mut self.buffer[self.held.end..]) {
                Ok(0) => self.ended(moved, End::Gone("its stream closed".into())),
                Ok(n) => {
                    read += n;
                    self.held.end += n;
                    match self.take_apart(published, moved) {
                        Ok(None) => {}
                        Ok(reason) => return reason,
                        Err(what) => self.ended(moved, End::Garbled(what)),
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    self.more = false;
                    break;
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => self.ended(moved, End::Gone(e.to_string())),
            }
        }
        self.more &= self.end.is_none();
        None
    }

    fn ended(&mut self, moved: &mut bool, end: End) {
        *moved = true;
        self.deafen();
        self.end = Some(end);
    }

    fn deafen(&mut self) {
        self.deaf = true;
        self.inside = false;
        self.out.clear();
    }

    /// Takes whole frames, and as much of a contribution as there is, out of the buffer.
    fn take_apart(&mut self, published: u64, moved: &mut bool) -> Result<Option<String>, String> {
        loop {
            let header = match self.header.take() {
                Some(h) => h,
                None => {
                    let Some(bytes) = self.buffer[self.held.clone()].first_chunk::<HEADER_BYTES>() else {
                        return Ok(None);
                    };
                    let header = Header::read(bytes).ok_or("an unknown kind of frame")?;
                    self.hash.reset();
                    self.hash.update(&bytes[..HASHED_BYTES]);
                    self.held.start += HEADER_BYTES;
                    self.begin(&header, published)?;
                    header
                }
            };
            match self.payload(header)? {
                Progress::Wants(header) => {
                    self.header = Some(header);
                    return Ok(None);
                }
                Progress::Whole(Kind::Abort) => {
                    *moved = true;
                    return Ok(Some(String::from_utf8_lossy(&self.reason).into_owned()));
                }
                Progress::Whole(_) => *moved = true,
            }
        }
    }

    /// Whether a frame may come now and be so long.
    fn begin(&mut self, h: &Header, published: u64) -> Result<(), String> {
        let slots = self.slots.len() as u64;
        let slot = (h.seq % slots) as usize;
        match h.kind {
            Kind::Data => {
                if h.seq != self.next || !self.slots[slot].free {
                    return Err(format!(
                        "contribution {} where {} of {slots} ahead is due",
                        h.seq, self.next
                    ));
                }
                if h.bytes > self.slot_bytes || !h.bytes.is_multiple_of(4) {
                    return Err(format!("{} bytes for a slot of {}", h.bytes, self.slot_bytes));
                }
                self.next += 1;
                let into = &mut self.slots[slot];
                into.free = false;
                into.fingerprint = h.fingerprint;
                into.data.clear();
                into.data.reserve_exact(h.bytes / 4);
            }
            Kind::Finished => {
                if h.bytes != 0 || h.seq >= published || self.finished[slot] > h.seq {
                    return Err(format!("collective {} read, of {published} brought", h.seq));
                }
            }
            Kind::Abort => {
                if h.bytes > REASON_BYTES {
                    return Err(format!("a reason of {} bytes", h.bytes));
                }
                self.reason.clear();
            }
        }
        Ok(())
    }

    /// Takes what is there of a payload.
    fn payload(&mut self, h: Header) -> Result<Progress, String> {
        let slot = (h.seq % self.slots.len() as u64) as usize;
        let (had, unit) = match h.kind {
            Kind::Data => (self.slots[slot].data.len() * 4, 4),
            _ => (self.reason.len(), 1),
        };
        let here = self.held.len().min(h.bytes - had.min(h.bytes)) / unit * unit;
        let part = &self.buffer[self.held.start..self.held.start + here];
        self.hash.update(part);
        match h.kind {
            Kind::Data => {
                let numbers = part.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                self.slots[slot].data.extend(numbers);
            }
            Kind::Abort => self.reason.extend_from_slice(part),
            Kind::Finished => {}
        }
        self.held.start += here;
        if had + here < h.bytes {
            return Ok(Progress::Wants(h));
        }
        if self.hash.digest() != h.sum {
            return Err(format!("a frame of {} bytes changed on the way", h.bytes));
        }
        match h.kind {
            Kind::Data => self.slots[slot].published = h.seq + 1,
            Kind::Finished => self.finished[slot] = h.seq + 1,
            Kind::Abort => {}
        }
        Ok(Progress::Whole(h.kind))
    }
}

enum Progress {
    /// The frame is not whole.
    Wants(Header),
    Whole(Kind),
}
