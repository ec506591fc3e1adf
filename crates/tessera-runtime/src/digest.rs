//! BLAKE3 digests of canonical bytes, which ranks compare instead of the values themselves.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A BLAKE3 digest of 32 bytes. `Display` prints its first 16 hex digits, `Debug` all 64.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Hashes bytes as they are, without the label that [`Digest::hash_value`] adds.
    #[must_use]
    pub fn hash_bytes(bytes: &[u8]) -> Digest {
        Digest(*blake3::hash(bytes).as_bytes())
    }

    /// Hashes the canonical bytes of a value. `label` separates values of different types.
    #[must_use]
    pub fn hash_value<T: Serialize>(label: &str, value: &T) -> Digest {
        let mut hash = blake3::Hasher::new();
        hash.update(label.as_bytes());
        hash.update(&[0]);
        hash.update(&canonical_bytes(value));
        Digest(*hash.finalize().as_bytes())
    }

    /// Hashes the trace digests of phases in execution order, given as (program, digest) pairs.
    #[must_use]
    pub fn hash_trace<'a>(phases: impl IntoIterator<Item = (&'a str, Digest)>) -> Digest {
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

/// Encodes a struct of integers, strings and lists in its only byte representation.
pub(crate) fn canonical_bytes<T: Serialize>(value: &T) -> Vec<u8> {
    // The capacity fits an envelope's meta: repeated growth costs more than the encoding.
    postcard::to_extend(value, Vec::with_capacity(1024))
        .unwrap_or_else(|e| unreachable!("structs of integers, strings and sized lists always encode: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_depend_on_order_and_on_where_a_name_ends() {
        let (x, y) = (Digest::hash_bytes(b"x"), Digest::hash_bytes(b"y"));
        let a = Digest::hash_trace([("a", x), ("b", y)]);
        assert_ne!(a, Digest::hash_trace([("b", y), ("a", x)]));
        assert_ne!(a, Digest::hash_trace([("ab", x), ("", y)]));
        assert_eq!(a, Digest::hash_trace([("a", x), ("b", y)]));
    }
}
