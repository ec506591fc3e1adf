//! BLAKE3 digests of canonical bytes: what ranks compare instead of the things themselves.

use std::fmt;

use serde::{Deserialize, Serialize};

/// 32 bytes of BLAKE3. Displays as its first 16 hex digits, debugs as all 64.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of raw bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Digest {
        Digest(*blake3::hash(bytes).as_bytes())
    }

    /// The digest of a value's canonical bytes. `label` keeps values of different types apart.
    #[must_use]
    pub fn of_value<T: Serialize>(label: &str, value: &T) -> Digest {
        let mut hash = blake3::Hasher::new();
        hash.update(label.as_bytes());
        hash.update(&[0]);
        hash.update(&canonical_bytes(value));
        Digest(*hash.finalize().as_bytes())
    }

    /// Joins the trace digests of phases in the order in which they run: (program, digest) pairs.
    #[must_use]
    pub fn of_trace<'a>(phases: impl IntoIterator<Item = (&'a str, Digest)>) -> Digest {
        let mut hash = blake3::Hasher::new();
        for (program, digest) in phases {
            hash.update(&(program.len() as u64).to_le_bytes());
            hash.update(program.as_bytes());
            hash.update(&digest.0);
        }
        Digest(*hash.finalize().as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// The one byte string of a fixed-order struct of integers, strings and lists.
pub(crate) fn canonical_bytes<T: Serialize>(value: &T) -> Vec<u8> {
    // Room for an envelope's meta: growing it step by step costs more than writing it.
    postcard::to_extend(value, Vec::with_capacity(1024))
        .unwrap_or_else(|e| unreachable!("structs of integers, strings and sized lists always encode: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_depend_on_order_and_on_where_a_name_ends() {
        let (x, y) = (Digest::of(b"x"), Digest::of(b"y"));
        let a = Digest::of_trace([("a", x), ("b", y)]);
        assert_ne!(a, Digest::of_trace([("b", y), ("a", x)]));
        assert_ne!(a, Digest::of_trace([("ab", x), ("", y)]));
        assert_eq!(a, Digest::of_trace([("a", x), ("b", y)]));
    }
}
