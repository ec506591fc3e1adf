//! Kernels as plain functions on f32 slices, row-major, last dim fastest. A value of a narrower dtype is a slice too,
//! of numbers that the dtype represents exactly.
//!
//! A verified program guarantees the shapes, so a wrong length is a bug of the caller and panics.
//! Every kernel propagates NaN: masking one would hide a fault.

mod attention;
mod bmm;
mod conv;
mod elementwise;
mod expert_features;
mod experts;
mod frames;
mod heads;
mod language;
mod matmul;
mod narrow;
mod norm;
mod page_table;
mod pixels;
mod rope;
mod row_span;

pub use crate::simd::{relu, silu, soft_clamp};
pub use attention::*;
pub use bmm::*;
pub use conv::*;
pub use elementwise::*;
pub use expert_features::*;
pub use experts::*;
pub use frames::*;
pub use heads::*;
pub use language::*;
pub use matmul::*;
pub use narrow::*;
pub use norm::*;
pub use page_table::PageTable;
pub use pixels::*;
pub use rope::*;
pub use row_span::RowSpan;
pub use tessera_ir::Activation;

/// Returns the name of the vector unit that kernels use on this machine: `avx512`, `avx2` or
/// `portable`. Results do not depend on it.
#[must_use]
pub fn vector_unit() -> &'static str {
    crate::simd::level().name()
}

use crate::simd::AlignedBuffer;
use std::sync::{Mutex, PoisonError};

/// Memory that kernels reuse from call to call. Each calling thread needs its own; it grows to the
/// largest call.
#[derive(Debug, Default)]
pub struct Scratch {
    packed: AlignedBuffer,
    staged: AlignedBuffer,
    spare: Mutex<Vec<AlignedBuffer>>,
}

impl Scratch {
    /// Creates empty scratch memory; the first calls grow it.
    #[must_use]
    pub fn new() -> Scratch {
        Scratch::default()
    }

    /// Returns the bytes that the scratch memory has grown to.
    #[must_use]
    pub fn allocated_bytes(&self) -> usize {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        [&self.packed, &self.staged].into_iter().chain(spare.iter()).map(AlignedBuffer::allocated_bytes).sum()
    }
}

/// Lends `f` a buffer of `len` elements with unspecified content.
fn borrow_buffer<R>(spare: &Mutex<Vec<AlignedBuffer>>, len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    // A poisoned lock means that another block panicked; the buffers remain usable because their
    // content is unspecified anyway.
    let mut buffer = spare.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
    let result = f(buffer.ensure_len(len));
    spare.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;
    use crate::simd::{levels, with_level};
    use tessera_base::random::{DrawKey, fill_normals};
    use tessera_ir::DType;

    fn random_values(n: usize, seed: u64) -> Vec<f32> {
        let mut out = vec![0.0; n];
        fill_normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut out);
        out
    }

    /// Returns the results of all kernels at odd sizes.
    fn run_all_kernels() -> Vec<Vec<f32>> {
        let (pool, mut scratch, mut results) = (Pool::single_thread(), Scratch::new(), Vec::new());
        let (rows, d) = (37, 3 * 44);
        let (x, y, m) = (random_values(rows * d, 1), random_values(rows * d, 2), random_values(3 * 2 * d, 3));
        let frames = FrameIndexing { first_row: 5, rows_per_frame: 17 };
        let mut keep = |len: usize, f: &mut dyn FnMut(&mut [f32])| {
            let mut out = vec![f32::NAN; len];
            f(&mut out);
            results.push(out);
        };
        for (n, k, segments) in [(70, 520, 1), (70, 520, 8), (33, 100, 2), (64, 300, 1)] {
            let (a, w, b) = (random_values(rows * k, 4), random_values(n * k, 5), random_values(n, 6));
            for act in [None, Some(Activation::Silu), Some(Activation::GeluTanh)] {
                let (w, mnk) = (MatmulWeight::Plain(&w), (rows, n, k));
                keep(rows * n, &mut |o| matmul(&pool, &mut scratch, o, &a, w, mnk, Some(&b), act, segments));
            }
        }
        let (k, v) = (random_values(301 * d, 7), random_values(301 * d, 8));
        let bias = KeyBias { log_b: -1.5, rows: 100..290 };
        keep(rows * d, &mut |o| attention(&pool, &mut scratch, o, &x, &k, &v, (d, 44), Some(&bias)));
        keep(rows * d, &mut |o| layer_norm(&pool, o, &x, &m[..d], &m[d..2 * d], 1e-6));
        keep(rows * d, &mut |o| norm_modulate(&pool, o, &x, d, &m, 2, (0, 1), frames, 1e-6));
        keep(rows * d, &mut |o| gate_residual(&pool, o, &x, &y, d, &m, 2, 1, frames));
        keep(rows * d, &mut |o| rms_norm(&pool, o, &x, &m[..d], 4, 1e-6));
        keep(rows * 2, &mut |o| row_square_sum(&pool, o, &[&x, &y], d, 2));
        keep(rows * d, &mut |o| add(&pool, o, &x, &y));
        keep(rows * d, &mut |o| bias_act(&pool, o, &x, &m[..d], Some(Activation::GeluTanh)));
        for dtype in [DType::Bf16, DType::E4m3] {
            keep(rows * d, &mut |o| {
                divide_rows_by_scales(&pool, o, &x, d);
                round_to_dtype(&pool, o, dtype);
            });
        }
        keep(rows, &mut |o| compute_row_scales(&pool, o, &x, d));
        keep(rows * d, &mut |o| {
            o.copy_from_slice(&x);
            let (scales, columns) = (Some(&y[..rows]), Some(&m[..d]));
            let act = Some(Activation::GeluTanh);
            scale_matmul(&pool, o, d, MatmulScales { rows: scales, columns, bias: columns, act });
        });
        keep(rows * d, &mut |o| map_elements(&pool, o, &x, silu));
        keep(rows * d, &mut |o| map_elements(&pool, o, &x, |x| soft_clamp(x, 0.7)));
        let key = DrawKey { seed: 9, chunk: 1, draw: 2 };
        keep(rows * d, &mut |o| renoise(&pool, o, &x, 0.3, key, 7));
        keep(rows * d, &mut |o| to_x0(&pool, o, &x, &y, 0.7));
        keep(rows * d, &mut |o| guide(&pool, o, &x, &y, 5.5));
        let spec = RopeSpec { head_dim: 44, grid: [1, 1, rows], start: 3, frame_stride: 1 };
        keep(rows * d, &mut |o| rope(&pool, o, &x, d, 0, &RopeTables::new(spec)));
        results
    }

    #[test]
    fn all_simd_levels_are_bit_identical() {
        let bits = |r: Vec<Vec<f32>>| -> Vec<Vec<u32>> {
            r.into_iter().map(|r| r.into_iter().map(f32::to_bits).collect()).collect()
        };
        let plain = bits(with_level(levels()[0], run_all_kernels));
        assert!(plain.iter().flatten().all(|b| f32::from_bits(*b).is_finite()));
        for level in levels() {
            for (i, (got, want)) in bits(with_level(level, run_all_kernels)).iter().zip(&plain).enumerate() {
                assert!(got == want, "result {i} on {level:?}");
            }
        }
    }
}
