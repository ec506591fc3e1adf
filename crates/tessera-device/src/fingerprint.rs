//! Fingerprints of weights in the form in which a backend stores them, so that ranks can verify
//! that they compute with the same values.

use std::ops::BitOr;

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
    /// Index of the first element that is NaN or infinite in the stored dtype, in row-major order.
    pub first_nonfinite: Option<u64>,
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
    /// Nanoseconds of the hashing that passed while the device computed, so that no call waited for them.
    pub hidden_ns: u64,
}

impl AuditResult {
    /// Adds the result of a later step.
    pub fn merge(&mut self, later: AuditResult) {
        self.bytes += later.bytes;
        self.rounds += later.rounds;
        self.hidden_ns += later.hidden_ns;
        self.changed = self.changed.take().or(later.changed);
    }
}

/// Incremental hasher of the elements of a shard.
#[derive(Debug, Clone)]
pub struct FingerprintHasher {
    hash: blake3::Hasher,
    first: Option<u32>,
    /// Bits in which any element differs from the first; 0 if all elements are equal.
    differing_bits: u32,
    bytes: u64,
    first_nonfinite: Option<u64>,
}

impl Default for FingerprintHasher {
    fn default() -> FingerprintHasher {
        FingerprintHasher {
            hash: blake3::Hasher::new(),
            first: None,
            differing_bits: 0,
            bytes: 0,
            first_nonfinite: None,
        }
    }
}

/// Bytes converted to little-endian at a time: enough for the full SIMD width of the hash, and
/// small enough for the stack.
const STAGING_BYTES: usize = 16 << 10;

impl FingerprintHasher {
    /// Hashes the next elements as f32.
    pub fn update(&mut self, values: &[f32]) {
        if cfg!(target_endian = "little") {
            self.update_raw(bytemuck::cast_slice(values), DType::F32);
        } else {
            self.update_staged(values, DType::F32, f32::to_le_bytes);
        }
    }

    /// Hashes the next elements in their stored form: little-endian, in a floating-point dtype of
    /// 1, 2 or 4 bytes.
    pub fn update_raw(&mut self, bytes: &[u8], dtype: DType) {
        let width = dtype.element_bytes() as usize;
        let word = |e: &[u8]| e.iter().rev().fold(0_u32, |w, b| w << 8 | u32::from(*b));
        let Some(v) = bytes.get(..width) else { return };
        let first = *self.first.get_or_insert(word(v));
        // In nearly every tensor, two elements that differ occur early.
        if self.differing_bits == 0 {
            let differ = |part: &[u8]| part.chunks_exact(width).fold(0, |d, e| d | (word(e) ^ first));
            self.differing_bits = bytes.chunks(STAGING_BYTES).map(differ).find(|d| *d != 0).unwrap_or(0);
        }
        // Each part is scanned while it is in the cache for the hash.
        for part in bytes.chunks(STAGING_BYTES) {
            if self.first_nonfinite.is_none()
                && let Some(at) = first_nonfinite(part, dtype)
            {
                self.first_nonfinite = Some(self.bytes / width as u64 + at as u64);
            }
            self.hash.update(part);
            self.bytes += part.len() as u64;
        }
    }

    /// Hashes the next elements in the form in which a device stores them: rounded to `dtype`.
    pub fn update_as(&mut self, values: &[f32], dtype: DType) {
        match dtype {
            DType::Bf16 => self.update_staged(values, dtype, |x| to_bf16_bits(x).to_le_bytes()),
            DType::F16 => self.update_staged(values, dtype, |x| to_f16_bits(x).to_le_bytes()),
            DType::E4m3 => self.update_staged(values, dtype, |x| [to_e4m3_bits(x)]),
            _ => self.update(values),
        }
    }

    fn update_staged<const WIDTH: usize>(
        &mut self,
        values: &[f32],
        dtype: DType,
        store: impl Fn(f32) -> [u8; WIDTH],
    ) {
        let mut stage = [0u8; STAGING_BYTES];
        for part in values.chunks(STAGING_BYTES / WIDTH) {
            for (stored, x) in stage.as_chunks_mut().0.iter_mut().zip(part) {
                *stored = store(*x);
            }
            self.update_raw(&stage[..part.len() * WIDTH], dtype);
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
            first_nonfinite: self.first_nonfinite,
        }
    }
}

/// Returns the index of the first element that is NaN or infinite, or `None` if all are finite.
/// The elements are little-endian in a floating-point dtype. A dtype with other elements has no
/// such value.
///
/// The scan adds one to the exponent of each magnitude and unites the carries into the sign bit, which
/// a compiler turns into three vector instructions; only a part that fails is searched element by
/// element.
#[must_use]
pub fn first_nonfinite(bytes: &[u8], dtype: DType) -> Option<usize> {
    match dtype {
        DType::F32 => first_carry(bytes, |e| {
            (u32::from_le_bytes(e) & 0x7fff_ffff).wrapping_add(0x0080_0000) & 0x8000_0000
        }),
        DType::Bf16 => first_carry(bytes, |e| (u16::from_le_bytes(e) & 0x7fff).wrapping_add(0x0080) & 0x8000),
        DType::F16 => first_carry(bytes, |e| (u16::from_le_bytes(e) & 0x7fff).wrapping_add(0x0400) & 0x8000),
        DType::E4m3 => first_carry(bytes, |[e]| (e & 0x7f).wrapping_add(1) & 0x80),
        _ => None,
    }
}

/// Returns the index of the first element with a carry that is not 0.
fn first_carry<const WIDTH: usize, T: BitOr<Output = T> + Default + PartialEq>(
    bytes: &[u8],
    carry: impl Fn([u8; WIDTH]) -> T,
) -> Option<usize> {
    let elements = bytes.as_chunks::<WIDTH>().0;
    let any = elements.iter().fold(T::default(), |any, e| any | carry(*e));
    if any == T::default() { None } else { elements.iter().position(|e| carry(*e) != T::default()) }
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
        bytes.chunks(1200).for_each(|part| held.update_raw(part, DType::F32));
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
        let held = |bytes: &[u8], dtype: DType| {
            let mut hash = FingerprintHasher::default();
            let parts = bytes.chunks(2 * dtype.element_bytes() as usize);
            parts.for_each(|part| hash.update_raw(part, dtype));
            hash.finish("w", "whole").constant
        };
        assert!(
            held(&[7, 8, 7, 8, 7, 8], DType::F16)
                && !held(&[7, 8, 7, 9], DType::Bf16)
                && held(&[3; 5], DType::E4m3)
        );
        assert!(constant(&[0.0; 5]) && constant(&[1.5]) && constant(&[f32::NAN; 3]));
        assert!(!constant(&[0.0, 0.0, -0.0]) && !constant(&[1.0, 1.0, 1.0, 1.0, 2.0]) && !constant(&[]));
    }

    #[test]
    fn the_first_element_that_is_not_finite_is_found_in_every_dtype() {
        for dtype in [DType::F32, DType::Bf16, DType::F16, DType::E4m3] {
            // e4m3 has no infinity: values beyond its range saturate.
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                if dtype == DType::E4m3 && !bad.is_nan() {
                    continue;
                }
                let mut values: Vec<f32> = (0..40_001).map(|i| i as f32 - 20_000.0).collect();
                let index_of = |values: &[f32]| {
                    let mut hash = FingerprintHasher::default();
                    values.chunks(999).for_each(|part| hash.update_as(part, dtype));
                    hash.finish("w", "whole").first_nonfinite
                };
                assert_eq!(index_of(&values), None, "{dtype} of finite values");
                values[40_000] = bad;
                assert_eq!(index_of(&values), Some(40_000), "{bad} as {dtype}");
                values[17_321] = bad;
                assert_eq!(index_of(&values), Some(17_321), "{bad} as {dtype}");
            }
        }
        let mut rounded = FingerprintHasher::default();
        rounded.update_as(&[1.0, f32::MAX], DType::Bf16);
        assert_eq!(rounded.finish("w", "whole, bf16").first_nonfinite, Some(1), "rounds to infinity");
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
