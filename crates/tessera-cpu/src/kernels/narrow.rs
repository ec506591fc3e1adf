//! Values in dtypes narrower than f32. Kernels hold them as f32 numbers that the dtype represents exactly, so that
//! every kernel reads every dtype, and what an op computes in f32 is rounded once, at its end.

use tessera_base::random::{DrawKey, fill_words_inline};
use tessera_device::dtype::row_scale;
use tessera_ir::{Activation, DType};

use crate::Pool;
use crate::simd::{gelu_tanh, silu, vectorized};

/// Number of elements of one block of work.
const BLOCK_ELEMENTS: usize = 4096;

/// Rounds values to the nearest number of a dtype, ties to even: bf16 overflows to infinity, and e4m3 saturates at
/// ±448. NaN stays as it is, with its payload, by which poisoned memory is found. Other dtypes round nothing.
pub fn round_to_dtype(pool: &Pool, values: &mut [f32], dtype: DType) {
    let round: fn(&mut [f32]) = match dtype {
        DType::Bf16 => round_block_to_bf16,
        DType::E4m3 => round_block_to_e4m3,
        _ => return,
    };
    let work = 4 * values.len();
    pool.for_each_block(values, BLOCK_ELEMENTS, work, |_, block| round(block));
}

/// Rounds rows of `width` values to bf16 or e4m3 by the words of a draw: a number between two neighbours goes to the one
/// farther from 0 if its word is below ⌊f · 2³²⌋, where f is the fraction of their distance at which it lies. `first_of_row`
/// gives the index of a row's first element in the global tensor. Numbers that the dtype cannot hold are rounded as by
/// [`round_to_dtype`]. Other dtypes round nothing.
pub fn round_by_words(
    pool: &Pool,
    values: &mut [f32],
    width: usize,
    dtype: DType,
    key: DrawKey,
    first_of_row: impl Fn(usize) -> u64 + Sync,
) {
    let round: fn(&mut [f32], DrawKey, u64) = match dtype {
        DType::Bf16 => round_block_to_bf16_by_words,
        DType::E4m3 => round_block_to_e4m3_by_words,
        _ => return,
    };
    let work = 32 * values.len();
    pool.for_each_block(values, width.max(1), work, |row, block| round(block, key, first_of_row(row)));
}

/// Divides each row of `width` numbers by its scale (see [`compute_row_scales`]); [`round_to_dtype`] then gives the
/// numbers in e4m3.
pub fn divide_rows_by_scales(pool: &Pool, out: &mut [f32], x: &[f32], width: usize) {
    assert_eq!(out.len(), x.len());
    let width = width.max(1);
    pool.for_each_block(out, width, 4 * x.len(), |row, out| {
        let x = &x[row * width..][..out.len()];
        divide_row(out, x, row_scale(x));
    });
}

/// Computes the scale of each row of `width` numbers: its largest magnitude over 448, or 1 for a row of zeros.
pub fn compute_row_scales(pool: &Pool, out: &mut [f32], x: &[f32], width: usize) {
    let width = width.max(1);
    assert_eq!(out.len() * width, x.len());
    pool.for_each_block(out, 1, 2 * x.len(), |row, out| out[0] = row_scale(&x[row * width..][..width]));
}

/// Operand scales, bias and activation of a matmul of e4m3 numbers.
#[derive(Debug, Clone, Copy)]
pub struct MatmulScales<'a> {
    /// A scale per row of the result; 1 by default.
    pub rows: Option<&'a [f32]>,
    /// A scale per column of the result; 1 by default.
    pub columns: Option<&'a [f32]>,
    /// A term per column of the scaled result.
    pub bias: Option<&'a [f32]>,
    /// Activation of the sum.
    pub act: Option<Activation>,
}

/// Computes `out[r, c] = act(out[r, c] · rows[r] · columns[c] + bias[c])` for rows of `width` numbers.
pub fn scale_matmul(pool: &Pool, out: &mut [f32], width: usize, scales: MatmulScales<'_>) {
    let MatmulScales { rows, columns, bias, act } = scales;
    assert!(out.len().is_multiple_of(width) && rows.is_none_or(|r| r.len() * width == out.len()));
    assert!([columns, bias].into_iter().flatten().all(|c| c.len() == width));
    let work = 4 * out.len();
    pool.for_each_block(out, width, work, |row, out| {
        scale_row(out, rows.map_or(1.0, |r| r[row]), columns, bias);
        match act {
            None => {}
            Some(Activation::Silu) => activate_row(out, &silu),
            Some(Activation::GeluTanh) => activate_row(out, &gelu_tanh),
        }
    });
}

#[inline(always)]
fn nearest_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = f32::from_bits(bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000);
    if x.is_nan() { x } else { rounded }
}

#[inline(always)]
fn nearest_e4m3(x: f32) -> f32 {
    const MAX: f32 = 448.0;
    const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
    // Numbers of f32 around 2^14 are multiples of 2^-9, as the subnormal numbers of e4m3 are.
    const SUBNORMAL_ROUNDER: f32 = 16384.0;
    let (size, bits) = (x.abs(), x.abs().to_bits());
    let subnormal = (size + SUBNORMAL_ROUNDER) - SUBNORMAL_ROUNDER;
    let normal = f32::from_bits((bits + 0x0007_ffff + (bits >> 20 & 1)) & 0xfff0_0000);
    let rounded = if size < SMALLEST_NORMAL { subnormal } else { normal };
    let limited = if rounded > MAX { MAX } else { rounded };
    if x.is_nan() { x } else { limited.copysign(x) }
}

#[inline(always)]
fn bf16_by_word(x: f32, word: u32) -> f32 {
    let bits = x.to_bits();
    // The fraction of the distance is the lower half of the bits, so its first 32 bits are these and 16 zeros.
    let up = u32::from(word < bits << 16) << 16;
    let rounded = f32::from_bits((bits & 0xffff_0000).wrapping_add(up));
    const MAX: f32 = f32::from_bits(0x7f7f_0000);
    // Beyond the largest number there is no second neighbour. NaN is in no range.
    if x.abs() <= MAX { rounded } else { nearest_bf16(x) }
}

#[inline(always)]
fn e4m3_by_word(x: f32, word: u32) -> f32 {
    const MAX: f32 = 448.0;
    const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
    const SUBNORMALS_PER_UNIT: f32 = 512.0;
    let (size, bits) = (x.abs(), x.abs().to_bits());
    let up = u32::from(word < bits << 12) << 20;
    let normal = f32::from_bits((bits & 0xfff0_0000).wrapping_add(up));
    // Multiples of 2^-9. Neither multiplying nor the difference rounds.
    let steps = size * SUBNORMALS_PER_UNIT;
    let floor = steps.trunc();
    let threshold = ((steps - floor) * 4_294_967_296.0) as u32;
    let subnormal = (floor + if word < threshold { 1.0 } else { 0.0 }) / SUBNORMALS_PER_UNIT;
    let rounded = if size < SMALLEST_NORMAL { subnormal } else { normal };
    if size <= MAX { rounded.copysign(x) } else { nearest_e4m3(x) }
}

/// Words that one loop draws.
const WORDS_PER_LOOP: usize = 256;

/// Rounds values by the words of the elements from `first` on.
#[inline(always)]
fn round_each_by_word(values: &mut [f32], key: DrawKey, first: u64, round: impl Fn(f32, u32) -> f32) {
    let mut words = [0u32; WORDS_PER_LOOP];
    for (i, values) in values.chunks_mut(WORDS_PER_LOOP).enumerate() {
        let words = &mut words[..values.len()];
        fill_words_inline(key, first + (i * WORDS_PER_LOOP) as u64, words);
        for (x, word) in values.iter_mut().zip(words) {
            *x = round(*x, *word);
        }
    }
}

vectorized! {
    fn round_block_to_bf16_by_words(values: &mut [f32], key: DrawKey, first: u64) {
        round_each_by_word(values, key, first, bf16_by_word);
    }
}

vectorized! {
    fn round_block_to_e4m3_by_words(values: &mut [f32], key: DrawKey, first: u64) {
        round_each_by_word(values, key, first, e4m3_by_word);
    }
}

vectorized! {
    fn round_block_to_bf16(values: &mut [f32]) {
        for x in values.iter_mut() {
            *x = nearest_bf16(*x);
        }
    }
}

vectorized! {
    fn round_block_to_e4m3(values: &mut [f32]) {
        for x in values.iter_mut() {
            *x = nearest_e4m3(*x);
        }
    }
}

vectorized! {
    fn divide_row(out: &mut [f32], x: &[f32], scale: f32) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = x / scale;
        }
    }
}

vectorized! {
    fn scale_row(out: &mut [f32], row: f32, columns: Option<&[f32]>, bias: Option<&[f32]>) {
        if let Some(columns) = columns {
            for (o, column) in out.iter_mut().zip(columns) {
                *o = *o * row * column;
            }
        } else {
            for o in out.iter_mut() {
                *o *= row;
            }
        }
        if let Some(bias) = bias {
            for (o, bias) in out.iter_mut().zip(bias) {
                *o += bias;
            }
        }
    }
}

vectorized! {
    fn activate_row<F: Fn(f32) -> f32>(out: &mut [f32], f: &F) {
        for o in out.iter_mut() {
            *o = f(*o);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_device::dtype::{from_e4m3_bits, to_bf16_bits, to_e4m3_bits};

    /// Numbers of every exponent and of odd mantissas, both signs of zero, and infinities.
    fn sample_numbers() -> impl Iterator<Item = f32> {
        (0..=u32::MAX).step_by(40_961).chain([0x8000_0000, 0x7f80_0000, 0xff80_0000]).map(f32::from_bits)
    }

    /// Numbers between two neighbours of a dtype, whose last bits are below `shift`.
    fn ties(shift: u32) -> impl Iterator<Item = f32> {
        let half = 1u32 << (shift - 1);
        (0..=u32::MAX >> shift).step_by(7).flat_map(move |upper| {
            [half - 1, half, half + 1].map(|lower| f32::from_bits(upper << shift | lower))
        })
    }

    #[test]
    fn numbers_round_as_devices_store_them() {
        for x in sample_numbers().chain(ties(16)).filter(|x| !x.is_nan()) {
            let stored = f32::from_bits(u32::from(to_bf16_bits(x)) << 16);
            assert_eq!(nearest_bf16(x).to_bits(), stored.to_bits(), "{x:e}");
        }
        for x in sample_numbers().chain(ties(20)).filter(|x| !x.is_nan()) {
            let stored = from_e4m3_bits(to_e4m3_bits(x));
            assert_eq!(nearest_e4m3(x).to_bits(), stored.to_bits(), "{x:e}");
        }
    }

    const KEY: DrawKey = DrawKey { seed: 7, chunk: u32::MAX, draw: 2 };

    #[test]
    fn nan_keeps_its_payload() {
        for bits in [0x7fa5_dead, 0xffc0_0001] {
            for dtype in [DType::Bf16, DType::E4m3] {
                let mut values = [f32::from_bits(bits)];
                round_to_dtype(&Pool::single_thread(), &mut values, dtype);
                assert_eq!(values[0].to_bits(), bits, "{dtype}");
                round_by_words(&Pool::single_thread(), &mut values, 1, dtype, KEY, |_| 0);
                assert_eq!(values[0].to_bits(), bits, "{dtype}");
            }
        }
    }

    /// Rounds one number a million times by words of one draw, and returns the mean error in units of the distance between
    /// its two neighbours.
    fn mean_error(x: f32, dtype: DType) -> f64 {
        const DRAWS: usize = 1_000_000;
        let mut values = vec![x; DRAWS];
        round_by_words(&Pool::single_thread(), &mut values, DRAWS, dtype, KEY, |_| 0);
        let (least, most) = values.iter().fold((f32::MAX, f32::MIN), |(a, b), x| (a.min(*x), b.max(*x)));
        assert!(least < x && x < most, "{least} and {most} are the neighbours of {x}");
        let sum: f64 = values.iter().map(|v| f64::from(*v) - f64::from(x)).sum();
        sum / DRAWS as f64 / (f64::from(most) - f64::from(least))
    }

    #[test]
    fn the_mean_of_a_million_stochastic_roundings_is_the_number() {
        // The standard deviation of such a mean is at most 0.5 / 1000 of the distance, at half of it.
        for x in [1.003, -2.5e-3, 447.0, 0.3, 5.0e-4, -17.01] {
            for dtype in [DType::Bf16, DType::E4m3] {
                let error = mean_error(x, dtype);
                assert!(error.abs() < 1e-3, "{x} in {dtype}: {error}");
            }
        }
    }

    #[test]
    fn stochastic_rounding_depends_on_the_place_alone() {
        let x: Vec<f32> = (0..7 * 301).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        for dtype in [DType::Bf16, DType::E4m3] {
            let mut whole = x.clone();
            round_by_words(&Pool::single_thread(), &mut whole, 301, dtype, KEY, |row| 301 * row as u64);
            for (row, from, to) in [(0, 0, 301), (3, 5, 290), (6, 150, 151)] {
                let mut part = x[row * 301..][from..to].to_vec();
                let first = (301 * row + from) as u64;
                round_by_words(&Pool::single_thread(), &mut part, to - from, dtype, KEY, |_| first);
                assert_eq!(part, whole[row * 301..][from..to]);
            }
        }
    }

    #[test]
    fn numbers_of_a_dtype_stay_and_too_large_ones_round_to_nearest() {
        for dtype in [DType::Bf16, DType::E4m3] {
            let mut exact: Vec<f32> = sample_numbers().filter(|x| !x.is_nan()).collect();
            let mut nearest = exact.clone();
            round_to_dtype(&Pool::single_thread(), &mut nearest, dtype);
            exact.copy_from_slice(&nearest);
            round_by_words(&Pool::single_thread(), &mut exact, 64, dtype, KEY, |row| 64 * row as u64);
            assert!(exact.iter().zip(&nearest).all(|(a, b)| a.to_bits() == b.to_bits()), "{dtype}");
            let largest = if dtype == DType::Bf16 { f32::MAX } else { 449.0 };
            let mut large = [largest, f32::INFINITY, -f32::INFINITY];
            let mut rounded = large;
            round_by_words(&Pool::single_thread(), &mut large, 3, dtype, KEY, |_| 0);
            round_to_dtype(&Pool::single_thread(), &mut rounded, dtype);
            assert_eq!(large, rounded, "{dtype}");
        }
    }

    #[test]
    fn an_e4m3_matmul_is_scaled_before_its_bias_and_activation() {
        let pool = Pool::single_thread();
        let x = [3.0, -6.0, 1.5, 0.0, 0.0, 0.0];
        let (mut scales, mut rows) = ([0.0; 2], [0.0; 6]);
        compute_row_scales(&pool, &mut scales, &x, 3);
        divide_rows_by_scales(&pool, &mut rows, &x, 3);
        round_to_dtype(&pool, &mut rows, DType::E4m3);
        assert_eq!((scales, rows), ([6.0 / 448.0, 1.0], [224.0, -448.0, 112.0, 0.0, 0.0, 0.0]));
        let mut out = [10.0, 20.0, 30.0, 40.0];
        let scales = MatmulScales {
            rows: Some(&[2.0, 0.5]),
            columns: Some(&[0.5, 4.0]),
            bias: Some(&[-10.0, 1.0]),
            act: None,
        };
        scale_matmul(&pool, &mut out, 2, scales);
        assert_eq!(out, [0.0, 161.0, -2.5, 81.0]);
        let act = Some(Activation::Silu);
        scale_matmul(&pool, &mut out, 2, MatmulScales { rows: None, columns: None, bias: None, act });
        assert_eq!(out.map(|x| x.round()), [0.0, 161.0, 0.0, 81.0]);
    }
}
