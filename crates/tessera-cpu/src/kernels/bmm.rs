//! Softmax and the batched matmul, for programs that spell out attention. Each element is one chain
//! in a fixed order, so the kernels are row-invariant; `attention` and `matmul` are the fast
//! kernels.

use crate::Pool;
use crate::simd::{exp, vectorized};

/// Computes `out[.., d] = softmax(x[.., d])` row by row.
pub fn softmax(pool: &Pool, out: &mut [f32], x: &[f32], d: usize) {
    assert!(out.len() == x.len() && x.len().is_multiple_of(d));
    pool.for_each_block(out, d, 12 * x.len(), |i, o| softmax_row(o, &x[i * d..(i + 1) * d]));
}

/// Computes `out[batch, n, m] = scale · x[batch, n, k] · y`; y is `[batch, k, m]`, or `[batch, m,
/// k]` if `transposed`.
pub fn bmm(
    pool: &Pool,
    out: &mut [f32],
    x: &[f32],
    y: &[f32],
    [n, k, m]: [usize; 3],
    transposed: bool,
    scale: f32,
) {
    assert!(out.len() * k == x.len() * m && y.len() * n == x.len() * m);
    pool.for_each_block(out, m, 2 * out.len() * k, |i, o| {
        let (row, y) = (&x[i * k..(i + 1) * k], &y[i / n * k * m..][..k * m]);
        o.fill(0.0);
        for (j, a) in row.iter().enumerate() {
            if transposed {
                o.iter_mut().enumerate().for_each(|(c, o)| *o += a * y[c * k + j]);
            } else {
                o.iter_mut().zip(&y[j * m..]).for_each(|(o, b)| *o += a * b);
            }
        }
        o.iter_mut().for_each(|o| *o *= scale);
    });
}

vectorized! {
    fn softmax_row(out: &mut [f32], x: &[f32]) {
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for (o, x) in out.iter_mut().zip(x) {
            *o = exp(x - max);
        }
        let mut total = 0.0;
        for o in out.iter() {
            total += o;
        }
        for o in out.iter_mut() {
            *o /= total;
        }
    }
}
