//! Frames between members of a lane: 32 bytes of header, then a payload.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..4 | kind, little-endian as all that follows |
//! | 4..8 | length of the payload |
//! | 8..16 | number of the collective |
//! | 16..24 | fingerprint |
//! | 24..32 | xxh3 of bytes 0..24 and the payload |

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Length of a header.
pub(super) const HEADER_BYTES: usize = 32;
/// How much of a header is hashed.
pub(super) const HASHED_BYTES: usize = 24;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A contribution.
    Data = 1,
    /// A collective has been read: its slot is free.
    Finished = 2,
    /// The run is over, for the reason in the payload.
    Abort = 3,
}

/// A header that was read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) bytes: usize,
    pub(super) seq: u64,
    pub(super) fingerprint: u64,
    pub(super) sum: u64,
}

impl Header {
    /// Reads a header; `None` for an unknown kind.
    pub(super) fn read(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let u32_at = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
        let kind = [Kind::Data, Kind::Finished, Kind::Abort].into_iter().find(|k| *k as u32 == u32_at(0))?;
        let [seq, fingerprint, sum] = [8, 16, 24].map(u64_at);
        Some(Header { kind, bytes: u32_at(4) as usize, seq, fingerprint, sum })
    }
}

/// Writes a contribution's frame over `frame`.
pub(super) fn data(frame: &mut Vec<u8>, seq: u64, fingerprint: u64, data: &[f32]) {
    begin(frame, Kind::Data, seq, fingerprint, data.len() * 4);
    frame.extend(data.iter().flat_map(|x| x.to_le_bytes()));
    end(frame);
}

/// The frame that frees a slot.
pub(super) fn finished(seq: u64) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEADER_BYTES);
    begin(&mut frame, Kind::Finished, seq, 0, 0);
    end(&mut frame);
    frame
}

/// The frame of an abort.
pub(super) fn abort(reason: &str) -> Vec<u8> {
    let mut frame = Vec::new();
    begin(&mut frame, Kind::Abort, 0, 0, reason.len());
    frame.extend_from_slice(reason.as_bytes());
    end(&mut frame);
    frame
}

fn begin(frame: &mut Vec<u8>, kind: Kind, seq: u64, fingerprint: u64, bytes: usize) {
    frame.clear();
    frame.reserve(HEADER_BYTES + bytes);
    frame.extend_from_slice(&(kind as u32).to_le_bytes());
    frame.extend_from_slice(&(bytes as u32).to_le_bytes());
    frame.extend_from_slice(&seq.to_le_bytes());
    frame.extend_from_slice(&fingerprint.to_le_bytes());
    frame.extend_from_slice(&[0; 8]);
}

fn end(frame: &mut [u8]) {
    let sum = if frame.len() == HEADER_BYTES {
        xxh3_64(&frame[..HASHED_BYTES])
    } else {
        let mut hash = Xxh3::new();
        hash.update(&frame[..HASHED_BYTES]);
        hash.update(&frame[HEADER_BYTES..]);
        hash.digest()
    };
    frame[HASHED_BYTES..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
}
