//! Normalisations over the last dim, with the per-frame modulation.

use crate::Pool;
use crate::simd::{sum_lanes, vectorized};

/// Maps a token row to its latent frame: `(first_row + r) / rows_per_frame`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameIndexing {
    /// Global index of the first local row.
    pub first_row: usize,
    /// Number of token rows of one latent frame, at least 1.
    pub rows_per_frame: usize,
}

impl FrameIndexing {
    fn frame_of_row(&self, row: usize) -> usize {
        (self.first_row + row) / self.rows_per_frame
    }
}

/// Number of rows of one block of work.
const BLOCK_ROWS: usize = 16;

/// Computes `out[N, d]`: layer norm with weight and bias of length d.
pub fn layer_norm(pool: &Pool, out: &mut [f32], x: &[f32], w: &[f32], b: &[f32], eps: f32) {
    let d = w.len();
    assert!(out.len() == x.len() && b.len() == d && x.len().is_multiple_of(d));
    pool.for_each_block(out, BLOCK_ROWS * d, 12 * x.len(), |i, o| {
        layer_norm_rows(o, &x[i * BLOCK_ROWS * d..], w, b, eps)
    });
}

/// Computes `out[N, d]`: layer norm without affine parameters, then `· (1 + scale) + shift` of each
/// row's frame.
///
/// `m[F, parts · d]` contains the modulation of every frame; `shift` and `scale` are part indices.
#[allow(clippy::too_many_arguments)]
pub fn norm_modulate(
    pool: &Pool,
    out: &mut [f32],
    x: &[f32],
    d: usize,
    m: &[f32],
    parts: usize,
    (shift, scale): (usize, usize),
    frames: FrameIndexing,
    eps: f32,
) {
    assert!(out.len() == x.len() && x.len().is_multiple_of(d) && m.len().is_multiple_of(parts * d));
    assert!(shift < parts && scale < parts);
    pool.for_each_block(out, BLOCK_ROWS * d, 12 * x.len(), |i, o| {
        for (r, o) in o.chunks_mut(d).enumerate() {
            let row = i * BLOCK_ROWS + r;
            let m = &m[frames.frame_of_row(row) * parts * d..][..parts * d];
            modulate_row(o, &x[row * d..][..d], &m[shift * d..][..d], &m[scale * d..][..d], eps);
        }
    });
}

/// Computes `out[N, d] = x + y · gate`, where the gate of each row's frame is part `gate` of `m[F,
/// parts · d]`.
#[allow(clippy::too_many_arguments)]
pub fn gate_residual(
    pool: &Pool,
    out: &mut [f32],
    x: &[f32],
    y: &[f32],
    d: usize,
    m: &[f32],
    parts: usize,
    gate: usize,
    frames: FrameIndexing,
) {
    assert!(out.len() == x.len() && y.len() == x.len() && x.len().is_multiple_of(d));
    assert!(gate < parts && m.len().is_multiple_of(parts * d));
    pool.for_each_block(out, BLOCK_ROWS * d, 4 * x.len(), |i, o| {
        for (r, o) in o.chunks_mut(d).enumerate() {
            let row = i * BLOCK_ROWS + r;
            let g = &m[(frames.frame_of_row(row) * parts + gate) * d..][..d];
            gate_row(o, &x[row * d..][..d], &y[row * d..][..d], g);
        }
    });
}

/// Computes `out[N, k]`: column i is the sum of squares of each row of `xs[i][N, width]`.
///
/// As in [`super::matmul`], `segments` splits the row into equal parts, and one binary tree adds
/// their sums.
pub fn row_square_sum(pool: &Pool, out: &mut [f32], xs: &[&[f32]], width: usize, segments: usize) {
    let columns = xs.len();
    assert!(segments.is_power_of_two() && segments <= 8 && width.is_multiple_of(segments) && columns > 0);
    let rows = out.len() / columns;
    assert!(out.len() == rows * columns && xs.iter().all(|x| x.len() == rows * width));
    pool.for_each_block(out, BLOCK_ROWS * columns, 2 * rows * columns * width, |i, o| {
        for (r, o) in o.chunks_mut(columns).enumerate() {
            for (o, x) in o.iter_mut().zip(xs) {
                square_sum(o, &x[(i * BLOCK_ROWS + r) * width..][..width], segments);
            }
        }
    });
}

/// Computes `out = x / √(ss / width + eps) · w`, with `ss` column `column` of `ss[N, columns]`.
///
/// `x` is `[N, w.len()]`; `width` is the number of elements that `ss` sums over, some of which may
/// be on other ranks.
#[allow(clippy::too_many_arguments)]
pub fn rms_scale(
    pool: &Pool,
    out: &mut [f32],
    x: &[f32],
    ss: &[f32],
    (column, columns): (usize, usize),
    w: &[f32],
    width: usize,
    eps: f32,
) {
    let d = w.len();
    let rows = x.len() / d;
    assert!(out.len() == x.len() && x.len() == rows * d && ss.len() == rows * columns && column < columns);
    pool.for_each_block(out, BLOCK_ROWS * d, 4 * x.len(), |i, o| {
        for (r, o) in o.chunks_mut(d).enumerate() {
            let row = i * BLOCK_ROWS + r;
            let factor = rms_factor(ss[row * columns + column], width, eps);
            scale_row(o, &x[row * d..][..d], w, factor);
        }
    });
}

/// Computes the RMS norm over rows of length `w.len()`: one kernel with the bits of
/// [`row_square_sum`] followed by [`rms_scale`].
pub fn rms_norm(pool: &Pool, out: &mut [f32], x: &[f32], w: &[f32], segments: usize, eps: f32) {
    let d = w.len();
    assert!(out.len() == x.len() && x.len().is_multiple_of(d));
    assert!(segments.is_power_of_two() && segments <= 8 && d.is_multiple_of(segments));
    pool.for_each_block(out, BLOCK_ROWS * d, 6 * x.len(), |i, o| {
        for (r, o) in o.chunks_mut(d).enumerate() {
            let row = &x[(i * BLOCK_ROWS + r) * d..][..d];
            let mut ss = 0.0;
            square_sum(&mut ss, row, segments);
            scale_row(o, row, w, rms_factor(ss, d, eps));
        }
    });
}

fn rms_factor(ss: f32, width: usize, eps: f32) -> f32 {
    (ss / width as f32 + eps).sqrt().recip()
}

vectorized! {
    fn layer_norm_rows(out: &mut [f32], x: &[f32], w: &[f32], b: &[f32], eps: f32) {
        let d = w.len();
        for (o, x) in out.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
            let (mean, factor) = moments(x, eps);
            for i in 0..d {
                o[i] = ((x[i] - mean) * factor).mul_add(w[i], b[i]);
            }
        }
    }
}

vectorized! {
    fn modulate_row(out: &mut [f32], x: &[f32], shift: &[f32], scale: &[f32], eps: f32) {
        let (mean, factor) = moments(x, eps);
        for (((o, x), a), b) in out.iter_mut().zip(x).zip(scale).zip(shift) {
            *o = ((x - mean) * factor).mul_add(1.0 + a, *b);
        }
    }
}

vectorized! {
    fn gate_row(out: &mut [f32], x: &[f32], y: &[f32], gate: &[f32]) {
        for (((o, x), y), g) in out.iter_mut().zip(x).zip(y).zip(gate) {
            *o = y.mul_add(*g, *x);
        }
    }
}

vectorized! {
    fn scale_row(out: &mut [f32], x: &[f32], w: &[f32], factor: f32) {
        for ((o, x), w) in out.iter_mut().zip(x).zip(w) {
            *o = x * factor * w;
        }
    }
}

vectorized! {
    fn square_sum(out: &mut f32, x: &[f32], segments: usize) {
        let width = x.len() / segments;
        let mut sums = [0.0f32; 8];
        for (s, sum) in sums[..segments].iter_mut().enumerate() {
            *sum = sum_lanes(&x[s * width..][..width], |v| v * v);
        }
        let mut count = segments;
        while count > 1 {
            count /= 2;
            for i in 0..count {
                sums[i] = sums[2 * i] + sums[2 * i + 1];
            }
        }
        *out = sums[0];
    }
}

/// Returns the mean and 1 / √(variance + eps), in two sweeps: a one-sweep variance would lose its
/// bits to the square of a large mean.
#[inline(always)]
fn moments(x: &[f32], eps: f32) -> (f32, f32) {
    let n = x.len() as f32;
    let mean = sum_lanes(x, |v| v) / n;
    let variance = sum_lanes(x, |v| (v - mean) * (v - mean)) / n;
    (mean, (variance + eps).sqrt().recip())
}
