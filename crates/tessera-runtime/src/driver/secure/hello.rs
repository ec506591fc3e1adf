//! The handshake of two ranks: each sends a hello with its claim and a nonce, and then a proof: a
//! hash of both hellos under a key that both ranks have.

use std::fmt;
use std::io::{self, ErrorKind};
use std::time::Instant;

use super::{HandshakeError, HandshakeSide, read_exact, write_all};
use crate::driver::byte_stream::ByteStream;

/// Length of a hello:
///
/// | bytes | field |
/// | --- | --- |
/// | 0..8 | magic |
/// | 8..10 | version, little-endian like every following field |
/// | 10..12 | purpose |
/// | 12..16 | rank of the sender |
/// | 16..20 | rank of the intended receiver |
/// | 20..24 | world size |
/// | 24..28 | communicator |
/// | 28..36 | session |
/// | 36..68 | nonce |
pub const HELLO_BYTES: usize = 68;
const MAGIC: [u8; 8] = *b"tessera\n";
const VERSION: u16 = 1;

/// What a connection is for; the number stands in the hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectionPurpose {
    /// The rendezvous with rank 0; a control link with rank 0 reuses the connection.
    Join = 1,
    /// Control messages between two ranks, for the whole run.
    Control = 2,
    /// The collectives of one communicator, between two of its members.
    Communicator = 3,
}

/// A process's claim about its identity and its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    /// What the connection is for. A rank that accepts links between ranks always claims `Control`.
    pub purpose: ConnectionPurpose,
    /// The rank that the claiming process has in the run.
    pub rank: u32,
    /// The rank that the process expects at the other end.
    pub expected_peer: u32,
    /// The world size that the process was started with.
    pub world_size: u32,
    /// Index of the communicator, if the connection belongs to one.
    pub communicator: u32,
    /// The session; 0 before it is known.
    pub session: u64,
}

impl fmt::Display for Claim {
    /// Formats as `rank 1 of 2`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world_size)
    }
}

/// Parses a hello; returns `None` if the magic, the version or the purpose is unknown.
#[must_use]
pub fn read_hello(bytes: &[u8; HELLO_BYTES]) -> Option<Claim> {
    let u16_at = |i: usize| u16::from_le_bytes([bytes[i], bytes[i + 1]]);
    let u32_at = |i: usize| u32::from(u16_at(i)) | u32::from(u16_at(i + 2)) << 16;
    if bytes[..8] != MAGIC || u16_at(8) != VERSION {
        return None;
    }
    let purpose = match u16_at(10) {
        1 => ConnectionPurpose::Join,
        2 => ConnectionPurpose::Control,
        3 => ConnectionPurpose::Communicator,
        _ => return None,
    };
    let [rank, to, world, communicator] = [12, 16, 20, 24].map(u32_at);
    let session = u64::from(u32_at(28)) | u64::from(u32_at(32)) << 32;
    Some(Claim { purpose, rank, expected_peer: to, world_size: world, communicator, session })
}

fn write_hello(claim: &Claim, nonce: &[u8; 32]) -> [u8; HELLO_BYTES] {
    let mut out = [0; HELLO_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..10].copy_from_slice(&VERSION.to_le_bytes());
    out[10..12].copy_from_slice(&(claim.purpose as u16).to_le_bytes());
    for (at, value) in
        [(12, claim.rank), (16, claim.expected_peer), (20, claim.world_size), (24, claim.communicator)]
    {
        out[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    out[28..36].copy_from_slice(&claim.session.to_le_bytes());
    out[36..].copy_from_slice(nonce);
    out
}

/// Keys of the records that follow, one per direction.
#[derive(Clone)]
pub(super) struct RecordKeys {
    pub(super) send: [u8; 32],
    pub(super) receive: [u8; 32],
}

/// Exchanges hellos and then proofs. The connecting side proves itself first, so that a stranger
/// that connects learns nothing.
pub(super) fn exchange_hellos(
    stream: &mut dyn ByteStream,
    own_claim: &Claim,
    side: HandshakeSide,
    key: &[u8; 32],
    deadline: Instant,
) -> Result<(Claim, RecordKeys), HandshakeError> {
    let without_claim = |e: io::Error| (None, e);
    let mut nonce = [0; 32];
    fill_random(&mut nonce).map_err(without_claim)?;
    let ours = write_hello(own_claim, &nonce);
    let mut theirs = [0; HELLO_BYTES];
    if side == HandshakeSide::Connector {
        write_all(stream, &ours, deadline).map_err(without_claim)?;
    }
    read_exact(stream, &mut theirs, deadline).map_err(without_claim)?;
    let claim = read_hello(&theirs).ok_or_else(|| without_claim(ErrorKind::InvalidData.into()))?;
    let with_claim = |e: io::Error| (Some(claim), e);
    if side == HandshakeSide::Acceptor {
        write_all(stream, &ours, deadline).map_err(with_claim)?;
    }
    let (connects, accepts) =
        if side == HandshakeSide::Connector { (&ours, &theirs) } else { (&theirs, &ours) };
    let keyed_hash = |label: &[u8]| {
        let mut hash = blake3::Hasher::new_keyed(key);
        hash.update(label).update(connects).update(accepts);
        hash.finalize()
    };
    let labels: [&[u8]; 2] = [b"who connected", b"who accepted"];
    let [connected, accepted] = labels.map(keyed_hash);
    let (proof, expected) =
        if side == HandshakeSide::Connector { (connected, accepted) } else { (accepted, connected) };
    if side == HandshakeSide::Connector {
        write_all(stream, proof.as_bytes(), deadline).map_err(with_claim)?;
    }
    let mut received_proof = [0; 32];
    read_exact(stream, &mut received_proof, deadline).map_err(with_claim)?;
    // Comparison of `blake3::Hash` takes constant time.
    if blake3::Hash::from_bytes(received_proof) != expected {
        return Err(with_claim(ErrorKind::PermissionDenied.into()));
    }
    if side == HandshakeSide::Acceptor {
        write_all(stream, proof.as_bytes(), deadline).map_err(with_claim)?;
    }
    let [connector_key, acceptor_key] =
        [&b"records of who connected"[..], b"records of who accepted"].map(keyed_hash);
    let (out, into) = if side == HandshakeSide::Connector {
        (connector_key, acceptor_key)
    } else {
        (acceptor_key, connector_key)
    };
    Ok((claim, RecordKeys { send: *out.as_bytes(), receive: *into.as_bytes() }))
}

fn fill_random(mut into: &mut [u8]) -> io::Result<()> {
    while !into.is_empty() {
        match rustix::rand::getrandom(&mut *into, rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => into = &mut into[n..],
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_round_trips_and_another_version_is_rejected() {
        let claim = Claim {
            purpose: ConnectionPurpose::Communicator,
            rank: 1,
            expected_peer: 2,
            world_size: 70_000,
            communicator: 9,
            session: u64::MAX - 3,
        };
        let mut bytes = write_hello(&claim, &[7; 32]);
        assert_eq!(read_hello(&bytes), Some(claim));
        for at in [0, 8, 11] {
            bytes[at] ^= 0x40;
            assert_eq!(read_hello(&bytes), None, "byte {at}");
            bytes[at] ^= 0x40;
        }
    }
}
