//! A memo table for costs that many candidates share.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// A memo table. Lookups never iterate, so the map's order is not observable. Values live in a
/// separate vector, so that growing the map does not move them.
#[derive(Debug)]
pub(super) struct Memo<K, V> {
    indices: HashMap<K, u32, BuildHasherDefault<MixHasher>>,
    values: Vec<V>,
}

impl<K, V> Default for Memo<K, V> {
    fn default() -> Memo<K, V> {
        Memo { indices: HashMap::default(), values: Vec::new() }
    }
}

impl<K: Hash + Eq, V> Memo<K, V> {
    /// Returns the value of a key, computing it on a miss.
    pub fn get_or_insert(&mut self, key: K, make: impl FnOnce() -> V) -> &V {
        let at = match self.indices.get(&key) {
            Some(at) => *at as usize,
            None => {
                self.values.push(make());
                self.indices.insert(key, self.values.len() as u32 - 1);
                self.values.len() - 1
            }
        };
        &self.values[at]
    }
}

/// A multiply-and-rotate hasher: keys are a few small numbers, and no adversary chooses them.
#[derive(Debug, Default, Clone, Copy)]
struct MixHasher(u64);

impl Hasher for MixHasher {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 29
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u64(&mut self, x: u64) {
        self.0 = (self.0.rotate_left(5) ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
