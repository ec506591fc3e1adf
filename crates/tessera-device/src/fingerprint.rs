//! Fingerprints of weights as a backend holds them, so that ranks can compare what they compute with.

use tessera_ir::{DType, Type};

use crate::Seat;
use crate::numbers::{bf16, e4m3, f16};

/// One piece of a tensor as a backend holds it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fingerprint {
    /// Name of the tensor, or of a table that the backend derives.
    pub tensor: String,
    /// Which piece, in the words of [`slice_words`]: equal words on two ranks mean equal bytes.
    pub slice: String,
    /// BLAKE3 of the elements in row-major order, little-endian, in the dtype in which they are held: what is computed
    /// with, whatever the layout in memory. A backend that digests otherwise says so in a parity key.
    pub digest: [u8; 32],
    /// Whether all elements are bit-equal: pieces of such a tensor have equal bytes by right.
    pub constant: bool,
    /// Bytes digested.
    pub bytes: u64,
}

/// What a look at part of the weights found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Audited {
    /// Bytes hashed.
    pub bytes: u64,
    /// Rounds over all weights that ended in this look.
    pub rounds: u32,
    /// A piece that is no longer what was loaded, by its fingerprint then, and its digest now.
    pub changed: Option<(Fingerprint, [u8; 32])>,
}

/// Digests elements as they come, piece by piece.
#[derive(Debug, Clone)]
pub struct Hasher {
    hash: blake3::Hasher,
    first: Option<u32>,
    /// Bits in which some element differs from the first: 0 where none does.
    differ: u32,
    bytes: u64,
}

impl Default for Hasher {
    fn default() -> Hasher {
        Hasher { hash: blake3::Hasher::new(), first: None, differ: 0, bytes: 0 }
    }
}

/// Bytes brought into file order at once: enough for a full-width hash, and on the stack.
const STAGE: usize = 16 << 10;

impl Hasher {
    /// The next elements.
    pub fn update(&mut self, values: &[f32]) {
        let Some(v) = values.first() else { return };
        let first = *self.first.get_or_insert(v.to_bits());
        let mut stage = [0u8; STAGE];
        for part in values.chunks(STAGE / 4) {
            let mut differ = 0;
            for (o, x) in stage.as_chunks_mut::<4>().0.iter_mut().zip(part) {
                *o = x.to_bits().to_le_bytes();
                differ |= x.to_bits() ^ first;
            }
            self.differ |= differ;
            self.hash.update(&stage[..part.len() * 4]);
        }
        self.bytes += values.len() as u64 * 4;
    }

    /// Elements as they are held, little-endian, of 1, 2 or 4 bytes each.
    pub fn update_held(&mut self, bytes: &[u8], width: usize) {
        let word = |e: &[u8]| e.iter().rev().fold(0_u32, |w, b| w << 8 | u32::from(*b));
        let Some(v) = bytes.get(..width) else { return };
        let first = *self.first.get_or_insert(word(v));
        // Two elements that differ are found early in nearly every tensor.
        if self.differ == 0 {
            let differ = |part: &[u8]| part.chunks_exact(width).fold(0, |d, e| d | (word(e) ^ first));
            self.differ = bytes.chunks(STAGE).map(differ).find(|d| *d != 0).unwrap_or(0);
        }
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
    }

    /// The next elements as a device holds them in a dtype: rounded to it, in as many bytes as it has.
    pub fn update_as(&mut self, values: &[f32], dtype: DType) {
        match dtype {
            DType::Bf16 => self.update_narrow(values, bf16),
            DType::F16 => self.update_narrow(values, f16),
            DType::E4m3 => self.update_bytes(values),
            _ => self.update(values),
        }
    }

    fn update_narrow(&mut self, values: &[f32], narrow: fn(f32) -> u16) {
        let Some(v) = values.first() else { return };
        let first = *self.first.get_or_insert(u32::from(narrow(*v)));
        let mut stage = [0u8; STAGE];
        for part in values.chunks(STAGE / 2) {
            for (o, x) in stage.as_chunks_mut::<2>().0.iter_mut().zip(part) {
                let bits = narrow(*x);
                *o = bits.to_le_bytes();
                self.differ |= u32::from(bits) ^ first;
            }
            self.hash.update(&stage[..part.len() * 2]);
        }
        self.bytes += values.len() as u64 * 2;
    }

    fn update_bytes(&mut self, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().map(|x| e4m3(*x)).collect();
        let Some(first) = bytes.first() else { return };
        let first = *self.first.get_or_insert(u32::from(*first));
        self.differ |= bytes.iter().fold(0, |differ, b| differ | (u32::from(*b) ^ first));
        self.hash.update(&bytes);
        self.bytes += bytes.len() as u64;
    }

    /// Elements of double width, such as a table of angles.
    pub fn update_wide(&mut self, values: impl IntoIterator<Item = f64>) {
        for v in values {
            self.hash.update(&v.to_bits().to_le_bytes());
            self.bytes += 8;
        }
    }

    /// The digest of all elements so far.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        *self.hash.finalize().as_bytes()
    }

    /// The fingerprint of all elements so far.
    #[must_use]
    pub fn finish(&self, tensor: impl Into<String>, slice: impl Into<String>) -> Fingerprint {
        Fingerprint {
            tensor: tensor.into(),
            slice: slice.into(),
            digest: self.digest(),
            constant: self.first.is_some() && self.differ == 0,
            bytes: self.bytes,
        }
    }
}

/// Which piece of a tensor a seat holds: `dim 0 [24..48) of 96`, `whole` if all of it; then the reordering and the
/// dtype, where they are not the usual ones: `whole, as patch, bf16`.
#[must_use]
pub fn slice_words(ty: &Type, load: Option<&str>, seat: &Seat) -> String {
    let whole = ty.layout.global(&ty.shape, &seat.mesh);
    let ranges = ty.layout.ranges(&ty.shape, &seat.mesh, seat.coord());
    let mut words: Vec<String> = ranges
        .iter()
        .zip(&whole)
        .enumerate()
        .filter(|(_, ((start, len), n))| (*start, *len) != (0, **n))
        .map(|(dim, ((start, len), n))| format!("dim {dim} [{start}..{}) of {n}", start + len))
        .collect();
    if words.is_empty() {
        words.push("whole".to_string());
    }
    words.extend(load.map(|l| format!("as {l}")));
    words.extend((ty.dtype != DType::F32).then(|| ty.dtype.to_string()));
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_mesh::{Axis, AxisLayout, Mesh, Rank, Shard};

    #[test]
    fn a_digest_is_that_of_the_bytes_however_they_come() {
        let values: Vec<f32> = (0..10_000).map(|i| i as f32 * 0.5).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let (mut at_once, mut in_parts) = (Hasher::default(), Hasher::default());
        at_once.update(&values);
        values.chunks(333).for_each(|part| in_parts.update(part));
        assert_eq!(at_once.digest(), *blake3::hash(&bytes).as_bytes());
        assert_eq!(at_once.finish("w", "whole"), in_parts.finish("w", "whole"));
        let print = at_once.finish("w", "whole");
        assert!(!print.constant && print.bytes == 40_000);
        let mut held = Hasher::default();
        bytes.chunks(1200).for_each(|part| held.update_held(part, 4));
        assert_eq!(held.finish("w", "whole"), print);
    }

    #[test]
    fn what_is_held_in_another_dtype_is_digested_in_it() {
        let values: Vec<f32> = (0..20_000).map(|i| 1.0 + i as f32 * 1e-4).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| bf16(*v).to_le_bytes()).collect();
        let mut hash = Hasher::default();
        values.chunks(3333).for_each(|part| hash.update_as(part, DType::Bf16));
        let print = hash.finish("w", "whole, bf16");
        assert_eq!(print.digest, *blake3::hash(&bytes).as_bytes());
        assert!(!print.constant && print.bytes == 40_000);
        let mut alike = Hasher::default();
        alike.update_as(&[1.0, 1.0001, 0.9999], DType::Bf16);
        assert!(alike.finish("w", "whole, bf16").constant, "equal where they are held");
        let mut whole = Hasher::default();
        whole.update_as(&values, DType::F32);
        let mut same = Hasher::default();
        same.update(&values);
        assert_eq!(whole.digest(), same.digest());
    }

    #[test]
    fn only_equal_bits_are_constant() {
        let constant = |values: &[f32]| {
            let mut hash = Hasher::default();
            values.chunks(2).for_each(|part| hash.update(part));
            hash.finish("w", "whole").constant
        };
        let held = |bytes: &[u8], width| {
            let mut hash = Hasher::default();
            bytes.chunks(2 * width).for_each(|part| hash.update_held(part, width));
            hash.finish("w", "whole").constant
        };
        assert!(held(&[7, 8, 7, 8, 7, 8], 2) && !held(&[7, 8, 7, 9], 2) && held(&[3; 5], 1));
        assert!(constant(&[0.0; 5]) && constant(&[1.5]) && constant(&[f32::NAN; 3]));
        assert!(!constant(&[0.0, 0.0, -0.0]) && !constant(&[1.0, 1.0, 1.0, 1.0, 2.0]) && !constant(&[]));
    }

    #[test]
    fn slices_are_told_by_dim_and_extent() {
        let mesh = Mesh::new([4, 1, 1, 1]).unwrap_or_default();
        let seat = |rank| Seat { mesh, rank: Rank(rank) };
        let whole = Type::new(DType::F32, [24, 8]);
        let shard = Shard { dim: 0, uneven: None, ways: None };
        let cut = whole.clone().on(Axis::Tp, AxisLayout::Shard(shard));
        assert_eq!(slice_words(&whole, None, &seat(1)), "whole");
        assert_eq!(slice_words(&cut, None, &seat(1)), "dim 0 [24..48) of 96");
        assert_eq!(slice_words(&cut, Some("patch"), &seat(3)), "dim 0 [72..96) of 96, as patch");
        let half = Type { dtype: DType::Bf16, ..whole };
        assert_eq!(slice_words(&half, None, &seat(0)), "whole, bf16");
    }
}
