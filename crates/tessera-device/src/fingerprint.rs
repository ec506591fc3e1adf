//! Fingerprints of weights in the form in which a backend stores them, so that ranks can verify
//! that they compute with the same values.

use tessera_ir::{DType, Type};

use crate::MeshRank;
use crate::dtype::{to_bf16_bits, to_e4m3_bits, to_f16_bits};

/// Fingerprint of one shard of a tensor as a backend stores it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fingerprint {
    /// Name of the tensor, or of a table that the backend derives.
    pub tensor: String,
    /// Shard, as formatted by [`describe_slice`]: equal descriptions on two ranks imply equal
    /// bytes.
    pub slice: String,
    /// BLAKE3 of the elements in row-major order, little-endian, in the dtype in which they are
    /// stored. It covers the values used in compute, whatever their layout in memory. A backend
    /// that digests differently declares that in a parity key.
    pub digest: [u8; 32],
    /// Whether all elements are bit-equal. Different shards of a constant tensor legitimately have
    /// equal bytes.
    pub constant: bool,
    /// Number of bytes digested: the size of the shard in the stored dtype.
    pub bytes: u64,
}

/// Result of one audit step over the weights.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AuditResult {
    /// Number of bytes hashed in this step, at most as many as requested.
    pub bytes: u64,
    /// Number of rounds over all weights that were completed in this step.
    pub rounds: u32,
    /// A shard that changed since it was loaded: its fingerprint at load time and its digest now.
    pub changed: Option<(Fingerprint, [u8; 32])>,
}

/// Incremental hasher of the elements of a shard.
#[derive(Debug, Clone)]
pub struct FingerprintHasher {
    hash: blake3::Hasher,
    first: Option<u32>,
    /// Bits in which any element differs from the first; 0 if all elements are equal.
    differing_bits: u32,
    bytes: u64,
}

impl Default for FingerprintHasher {
    fn default() -> FingerprintHasher {
        FingerprintHasher { hash: blake3::Hasher::new(), first: None, differing_bits: 0, bytes: 0 }
    }
}

/// Bytes converted to little-endian at a time: enough for the full SIMD width of the hash, and
/// small enough for the stack.
const STAGING_BYTES: usize = 16 << 10;

impl FingerprintHasher {
    /// Hashes the next elements as f32.
    pub fn update(&mut self, values: &[f32]) {
        self.update_staged(values, f32::to_le_bytes);
    }

    /// Hashes the next elements in their stored form: little-endian, `width` bytes (1, 2 or 4) per
    /// element.
    pub fn update_raw(&mut self, bytes: &[u8], width: usize) {
        let word = |e: &[u8]| e.iter().rev().fold(0_u32, |w, b| w << 8 | u32::from(*b));
        let Some(v) = bytes.get(..width) else { return };
        let first = *self.first.get_or_insert(word(v));
        // In nearly every tensor, two elements that differ occur early.
        if self.differing_bits == 0 {
            let differ = |part: &[u8]| part.chunks_exact(width).fold(0, |d, e| d | (word(e) ^ first));
            self.differing_bits = bytes.chunks(STAGING_BYTES).map(differ).find(|d| *d != 0).unwrap_or(0);
        }
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
    }

    /// Hashes the next elements in the form in which a device stores them: rounded to `dtype`.
    pub fn update_as(&mut self, values: &[f32], dtype: DType) {
        match dtype {
            DType::Bf16 => self.update_staged(values, |x| to_bf16_bits(x).to_le_bytes()),
            DType::F16 => self.update_staged(values, |x| to_f16_bits(x).to_le_bytes()),
            DType::E4m3 => self.update_staged(values, |x| [to_e4m3_bits(x)]),
            _ => self.update(values),
        }
    }

    fn update_staged<const WIDTH: usize>(&mut self, values: &[f32], store: impl Fn(f32) -> [u8; WIDTH]) {
        let mut stage = [0u8; STAGING_BYTES];
        for part in values.chunks(STAGING_BYTES / WIDTH) {
            for (stored, x) in stage.as_chunks_mut().0.iter_mut().zip(part) {
                *stored = store(*x);
            }
            self.update_raw(&stage[..part.len() * WIDTH], WIDTH);
        }
    }

    /// Hashes the next elements as f64, such as a RoPE table.
    pub fn update_f64(&mut self, values: impl IntoIterator<Item = f64>) {
        for v in values {
            self.hash.update(&v.to_bits().to_le_bytes());
            self.bytes += 8;
        }
    }

    /// Returns the digest of all elements so far.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        *self.hash.finalize().as_bytes()
    }

    /// Returns the fingerprint of all elements so far.
    #[must_use]
    pub fn finish(&self, tensor: impl Into<String>, slice: impl Into<String>) -> Fingerprint {
        Fingerprint {
            tensor: tensor.into(),
            slice: slice.into(),
            digest: self.digest(),
            constant: self.first.is_some() && self.differing_bits == 0,
            bytes: self.bytes,
        }
    }
}

/// Describes the shard of a tensor that a rank holds: `dim 0 [24..48) of 96`, or `whole` for a
/// replicated tensor. The load transformation and the dtype follow, unless they are the defaults:
/// `whole, as patch, bf16`.
#[must_use]
pub fn describe_slice(ty: &Type, load: Option<&str>, rank: &MeshRank) -> String {
    let whole = ty.layout.global_shape(&ty.shape, &rank.mesh);
    let ranges = ty.layout.global_ranges(&ty.shape, &rank.mesh, rank.coord());
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
    fn a_digest_does_not_depend_on_chunking() {
        let values: Vec<f32> = (0..10_000).map(|i| i as f32 * 0.5).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let (mut at_once, mut in_parts) = (FingerprintHasher::default(), FingerprintHasher::default());
        at_once.update(&values);
        values.chunks(333).for_each(|part| in_parts.update(part));
        assert_eq!(at_once.digest(), *blake3::hash(&bytes).as_bytes());
        assert_eq!(at_once.finish("w", "whole"), in_parts.finish("w", "whole"));
        let print = at_once.finish("w", "whole");
        assert!(!print.constant && print.bytes == 40_000);
        let mut held = FingerprintHasher::default();
        bytes.chunks(1200).for_each(|part| held.update_raw(part, 4));
        assert_eq!(held.finish("w", "whole"), print);
    }

    #[test]
    fn digests_cover_the_stored_dtype() {
        let values: Vec<f32> = (0..20_000).map(|i| 1.0 + i as f32 * 1e-4).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| to_bf16_bits(*v).to_le_bytes()).collect();
        let mut hash = FingerprintHasher::default();
        values.chunks(3333).for_each(|part| hash.update_as(part, DType::Bf16));
        let print = hash.finish("w", "whole, bf16");
        assert_eq!(print.digest, *blake3::hash(&bytes).as_bytes());
        assert!(!print.constant && print.bytes == 40_000);
        let mut alike = FingerprintHasher::default();
        alike.update_as(&[1.0, 1.0001, 0.9999], DType::Bf16);
        assert!(alike.finish("w", "whole, bf16").constant, "values are equal after rounding to bf16");
        let mut whole = FingerprintHasher::default();
        whole.update_as(&values, DType::F32);
        let mut same = FingerprintHasher::default();
        same.update(&values);
        assert_eq!(whole.digest(), same.digest());
    }

    #[test]
    fn only_equal_bits_are_constant() {
        let constant = |values: &[f32]| {
            let mut hash = FingerprintHasher::default();
            values.chunks(2).for_each(|part| hash.update(part));
            hash.finish("w", "whole").constant
        };
        let held = |bytes: &[u8], width| {
            let mut hash = FingerprintHasher::default();
            bytes.chunks(2 * width).for_each(|part| hash.update_raw(part, width));
            hash.finish("w", "whole").constant
        };
        assert!(held(&[7, 8, 7, 8, 7, 8], 2) && !held(&[7, 8, 7, 9], 2) && held(&[3; 5], 1));
        assert!(constant(&[0.0; 5]) && constant(&[1.5]) && constant(&[f32::NAN; 3]));
        assert!(!constant(&[0.0, 0.0, -0.0]) && !constant(&[1.0, 1.0, 1.0, 1.0, 2.0]) && !constant(&[]));
    }

    #[test]
    fn slices_are_described_by_dim_and_extent() {
        let mesh = Mesh::new([4, 1, 1, 1]).unwrap_or_default();
        let seat = |rank| MeshRank { mesh, rank: Rank(rank) };
        let whole = Type::new(DType::F32, [24, 8]);
        let shard = Shard { dim: 0, uneven: None, subgroup_size: None };
        let cut = whole.clone().with_axis_layout(Axis::Tp, AxisLayout::Shard(shard));
        assert_eq!(describe_slice(&whole, None, &seat(1)), "whole");
        assert_eq!(describe_slice(&cut, None, &seat(1)), "dim 0 [24..48) of 96");
        assert_eq!(describe_slice(&cut, Some("patch"), &seat(3)), "dim 0 [72..96) of 96, as patch");
        let half = Type { dtype: DType::Bf16, ..whole };
        assert_eq!(describe_slice(&half, None, &seat(0)), "whole, bf16");
    }
}
