//! Test values: operands of the members, expected results, and conversion of both to bytes.

use std::ops::Range;

use tessera_ir::DType;
use tessera_mesh::Reduction;

/// Splits an extent among the members. Uneven parts grow, and the first is empty if there are more
/// than two.
pub fn split_extent(extent: usize, members: usize, even: bool) -> Vec<Range<usize>> {
    let total = members * (members - 1) / 2;
    let at = |m: usize| match even {
        true => extent * m / members,
        false if members < 3 => (extent / 3) * m,
        false => extent * (m * m.saturating_sub(1) / 2) / total,
    };
    (0..members).map(|m| at(m)..if m + 1 == members { extent } else { at(m + 1) }).collect()
}

/// Returns the elements that a range of a dim covers.
pub fn take_range(x: &[f32], (rows, columns): (usize, usize), dim: usize, part: &Range<usize>) -> Vec<f32> {
    if dim == 0 {
        return x[part.start * columns..part.end * columns].to_vec();
    }
    (0..rows).flat_map(|r| x[r * columns..][part.clone()].iter().copied()).collect()
}

/// Generates a member's elements, exact in the dtype. If `strange`, they include NaN and zeros of
/// both signs.
pub fn test_data(seed: usize, member: usize, len: usize, dtype: DType, strange: bool) -> Vec<f32> {
    let one = |i: usize| {
        let mut h = (seed as u64 * 1009 + member as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i as u64;
        h = (h ^ (h >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        h = (h ^ (h >> 29)).wrapping_mul(0x94d0_49bb_1331_11eb);
        h ^= h >> 32;
        match h % 16 {
            0 if strange => f32::NAN,
            1 if strange => 0.0,
            2 if strange => -0.0,
            _ => (h >> 40) as f32 / (1 << 23) as f32 - 1.0,
        }
    };
    let exact = |v: f32| if dtype == DType::Bf16 { round_bf16(v) } else { v };
    (0..len).map(|i| exact(one(i))).collect()
}

pub fn reference_reduce(all: &[Vec<f32>], reduction: Reduction, dtype: DType) -> Vec<f32> {
    fn tree(t: &[f32]) -> f32 {
        if let [one] = t {
            return *one;
        }
        let (left, right) = t.split_at(t.len().next_power_of_two() / 2);
        tree(left) + tree(right)
    }
    let one = |i: usize| {
        let terms: Vec<f32> = all.iter().map(|x| x[i]).collect();
        let wide = match reduction {
            Reduction::Sum => terms[1..].iter().fold(terms[0], |s, t| s + t),
            Reduction::Tree => tree(&terms),
            Reduction::Max => {
                terms[1..].iter().fold(terms[0], |s, t| if *t > s || s.is_nan() { *t } else { s })
            }
        };
        if dtype == DType::Bf16 { round_bf16(wide) } else { wide }
    };
    (0..all[0].len()).map(one).collect()
}

/// Rounds to the nearest bfloat16, ties to even.
pub fn round_bf16(v: f32) -> f32 {
    if v.is_nan() {
        return v;
    }
    let bits = v.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

pub fn to_bytes(x: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::Bf16 => x.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect(),
        _ => x.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

pub fn from_bytes(x: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::Bf16 => x
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16))
            .collect(),
        _ => x.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
    }
}
