//! Frames between members of a communicator: a header of 32 bytes, then a payload.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..4 | kind; all fields are little-endian |
//! | 4..8 | length of the payload |
//! | 8..16 | number of the collective |
//! | 16..24 | fingerprint |
//! | 24..32 | xxh3 of bytes 0..24 and the payload |

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Length of a header, which ends with the checksum of the frame.
pub(super) const HEADER_BYTES: usize = 32;
/// Number of header bytes that the checksum covers.
pub(super) const HASHED_BYTES: usize = 24;

/// The kind of a frame; its number is the first field of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CommFrameKind {
    /// The payload is the sender's contribution to a collective.
    Data = 1,
    /// The sender has read a collective: the receiver's slot is free.
    Finished = 2,
    /// The run is aborted, for the reason in the payload.
    Abort = 3,
}

/// The decoded header of a frame, without its payload.
#[derive(Debug, Clone, Copy)]
pub(super) struct CommFrameHeader {
    pub(super) kind: CommFrameKind,
    pub(super) bytes: usize,
    pub(super) seq: u64,
    pub(super) fingerprint: u64,
    pub(super) checksum: u64,
}

impl CommFrameHeader {
    /// Parses a header; returns `None` for an unknown kind.
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES]) -> Option<CommFrameHeader> {
        let u32_at = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
        let kind = [CommFrameKind::Data, CommFrameKind::Finished, CommFrameKind::Abort]
            .into_iter()
            .find(|k| *k as u32 == u32_at(0))?;
        let [seq, fingerprint, sum] = [8, 16, 24].map(u64_at);
        Some(CommFrameHeader { kind, bytes: u32_at(4) as usize, seq, fingerprint, checksum: sum })
    }
}

/// Overwrites `frame` with the frame of a contribution.
pub(super) fn write_data_frame(frame: &mut Vec<u8>, seq: u64, fingerprint: u64, data: &[f32]) {
    begin_frame(frame, CommFrameKind::Data, seq, fingerprint, data.len() * 4);
    frame.extend(data.iter().flat_map(|x| x.to_le_bytes()));
    write_checksum(frame);
}

/// Returns the frame which tells a peer that this member has read its contribution to `seq`.
pub(super) fn finished_frame(seq: u64) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEADER_BYTES);
    begin_frame(&mut frame, CommFrameKind::Finished, seq, 0, 0);
    write_checksum(&mut frame);
    frame
}

/// Returns the frame that aborts the run. Peers reject a reason of more than `REASON_BYTES` bytes.
pub(super) fn abort_frame(reason: &str) -> Vec<u8> {
    let mut frame = Vec::new();
    begin_frame(&mut frame, CommFrameKind::Abort, 0, 0, reason.len());
    frame.extend_from_slice(reason.as_bytes());
    write_checksum(&mut frame);
    frame
}

fn begin_frame(frame: &mut Vec<u8>, kind: CommFrameKind, seq: u64, fingerprint: u64, bytes: usize) {
    frame.clear();
    frame.reserve(HEADER_BYTES + bytes);
    frame.extend_from_slice(&(kind as u32).to_le_bytes());
    frame.extend_from_slice(&(bytes as u32).to_le_bytes());
    frame.extend_from_slice(&seq.to_le_bytes());
    frame.extend_from_slice(&fingerprint.to_le_bytes());
    frame.extend_from_slice(&[0; 8]);
}

fn write_checksum(frame: &mut [u8]) {
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
