//! The hellos and the proofs over them.

use std::fmt;
use std::io::{self, ErrorKind};
use std::time::Instant;

use super::{Side, Stopped, read_exact, write_all};
use crate::driver::stream::Stream;

/// Length of a hello:
///
/// | bytes | field |
/// | --- | --- |
/// | 0..8 | mark |
/// | 8..10 | version, little-endian as all that follows |
/// | 10..12 | purpose |
/// | 12..16 | rank |
/// | 16..20 | rank that is meant |
/// | 20..24 | ranks of the world |
/// | 24..28 | lane |
/// | 28..36 | session |
/// | 36..68 | nonce |
pub const HELLO_BYTES: usize = 68;
const MARK: [u8; 8] = *b"tessera\n";
const VERSION: u16 = 1;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// To meet the others at rank 0.
    Join = 1,
    /// Control messages.
    Control = 2,
    /// A lane of collectives.
    Lane = 3,
}

/// What a process says of itself and of what it wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    /// What the connection is for.
    pub purpose: Purpose,
    /// Who it is.
    pub rank: u32,
    /// Whom it means.
    pub to: u32,
    /// How many ranks it counts.
    pub world: u32,
    /// Which lane, of a connection for one.
    pub lane: u32,
    /// Which session; 0 before it is known.
    pub session: u64,
}

impl fmt::Display for Claim {
    /// `rank 1 of 2`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world)
    }
}

/// Reads a hello; `None` for what is none of this version.
#[must_use]
pub fn read_hello(bytes: &[u8; HELLO_BYTES]) -> Option<Claim> {
    let u16_at = |i: usize| u16::from_le_bytes([bytes[i], bytes[i + 1]]);
    let u32_at = |i: usize| u32::from(u16_at(i)) | u32::from(u16_at(i + 2)) << 16;
    if bytes[..8] != MARK || u16_at(8) != VERSION {
        return None;
    }
    let purpose = match u16_at(10) {
        1 => Purpose::Join,
        2 => Purpose::Control,
        3 => Purpose::Lane,
        _ => return None,
    };
    let [rank, to, world, lane] = [12, 16, 20, 24].map(u32_at);
    let session = u64::from(u32_at(28)) | u64::from(u32_at(32)) << 32;
    Some(Claim { purpose, rank, to, world, lane, session })
}

fn write_hello(claim: &Claim, nonce: &[u8; 32]) -> [u8; HELLO_BYTES] {
    let mut out = [0; HELLO_BYTES];
    out[..8].copy_from_slice(&MARK);
    out[8..10].copy_from_slice(&VERSION.to_le_bytes());
    out[10..12].copy_from_slice(&(claim.purpose as u16).to_le_bytes());
    for (at, value) in [(12, claim.rank), (16, claim.to), (20, claim.world), (24, claim.lane)] {
        out[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    out[28..36].copy_from_slice(&claim.session.to_le_bytes());
    out[36..].copy_from_slice(nonce);
    out
}

/// Keys of the records that follow, one for each direction.
#[derive(Clone)]
pub(super) struct Keys {
    pub(super) out: [u8; 32],
    pub(super) into: [u8; 32],
}

/// Hellos, then proofs; who connected proves itself first, so that a stranger learns nothing from asking.
pub(super) fn exchange(
    stream: &mut dyn Stream,
    mine: &Claim,
    side: Side,
    key: &[u8; 32],
    until: Instant,
) -> Result<(Claim, Keys), Stopped> {
    let unknown = |e: io::Error| (None, e);
    let mut nonce = [0; 32];
    fill_random(&mut nonce).map_err(unknown)?;
    let ours = write_hello(mine, &nonce);
    let mut theirs = [0; HELLO_BYTES];
    if side == Side::Connects {
        write_all(stream, &ours, until).map_err(unknown)?;
    }
    read_exact(stream, &mut theirs, until).map_err(unknown)?;
    let claim = read_hello(&theirs).ok_or_else(|| unknown(ErrorKind::InvalidData.into()))?;
    let known = |e: io::Error| (Some(claim), e);
    if side == Side::Accepts {
        write_all(stream, &ours, until).map_err(known)?;
    }
    let (connects, accepts) = if side == Side::Connects { (&ours, &theirs) } else { (&theirs, &ours) };
    let keyed = |label: &[u8]| {
        let mut hash = blake3::Hasher::new_keyed(key);
        hash.update(label).update(connects).update(accepts);
        hash.finalize()
    };
    let labels: [&[u8]; 2] = [b"who connected", b"who accepted"];
    let [connected, accepted] = labels.map(keyed);
    let (proof, expected) =
        if side == Side::Connects { (connected, accepted) } else { (accepted, connected) };
    if side == Side::Connects {
        write_all(stream, proof.as_bytes(), until).map_err(known)?;
    }
    let mut shown = [0; 32];
    read_exact(stream, &mut shown, until).map_err(known)?;
    // Hashes compare in constant time.
    if blake3::Hash::from_bytes(shown) != expected {
        return Err(known(ErrorKind::PermissionDenied.into()));
    }
    if side == Side::Accepts {
        write_all(stream, proof.as_bytes(), until).map_err(known)?;
    }
    let [forth, back] = [&b"records of who connected"[..], b"records of who accepted"].map(keyed);
    let (out, into) = if side == Side::Connects { (forth, back) } else { (back, forth) };
    Ok((claim, Keys { out: *out.as_bytes(), into: *into.as_bytes() }))
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
    fn a_hello_reads_back_and_another_version_does_not() {
        let claim =
            Claim { purpose: Purpose::Lane, rank: 1, to: 2, world: 70_000, lane: 9, session: u64::MAX - 3 };
        let mut bytes = write_hello(&claim, &[7; 32]);
        assert_eq!(read_hello(&bytes), Some(claim));
        for at in [0, 8, 11] {
            bytes[at] ^= 0x40;
            assert_eq!(read_hello(&bytes), None, "byte {at}");
            bytes[at] ^= 0x40;
        }
    }
}
