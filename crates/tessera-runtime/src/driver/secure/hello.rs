//! The hello of a rank: its claim in a fixed layout.

use std::fmt;

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
pub const HELLO_BYTES: usize = 36;
const MAGIC: [u8; 8] = *b"tessera\n";
/// Version 1 proved itself by a hash over both hellos and did not encrypt.
const VERSION: u16 = 2;

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
pub fn parse_hello(bytes: &[u8; HELLO_BYTES]) -> Option<Claim> {
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

pub(super) fn write_hello(claim: &Claim) -> [u8; HELLO_BYTES] {
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
    out
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
        let mut bytes = write_hello(&claim);
        assert_eq!(parse_hello(&bytes), Some(claim));
        for at in [0, 8, 11] {
            bytes[at] ^= 0x40;
            assert_eq!(parse_hello(&bytes), None, "byte {at}");
            bytes[at] ^= 0x40;
        }
    }
}
