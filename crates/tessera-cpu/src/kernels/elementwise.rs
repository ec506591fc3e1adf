//! Elementwise kernels: sums, activations, noise, and the sinusoidal timestep embedding.

use tessera_base::random::{DrawKey, fill_normals_inline};
use tessera_ir::Activation;

use crate::Pool;
use crate::simd::{gelu_tanh, silu, vectorized};

/// Number of elements of one block of work.
const BLOCK_ELEMENTS: usize = 4096;

/// Computes `out = a + b`.
pub fn add(pool: &Pool, out: &mut [f32], a: &[f32], b: &[f32]) {
    assert!(out.len() == a.len() && a.len() == b.len());
    pool.for_each_block(out, BLOCK_ELEMENTS, 2 * a.len(), |i, o| {
        add_block(o, &a[i * BLOCK_ELEMENTS..], &b[i * BLOCK_ELEMENTS..]);
    });
}

/// Computes `out = a · b`, element by element.
pub fn multiply(pool: &Pool, out: &mut [f32], a: &[f32], b: &[f32]) {
    assert!(out.len() == a.len() && a.len() == b.len());
    pool.for_each_block(out, BLOCK_ELEMENTS, 2 * a.len(), |i, o| {
        multiply_block(o, &a[i * BLOCK_ELEMENTS..], &b[i * BLOCK_ELEMENTS..]);
    });
}

/// Computes `out[N, d] = act(x[N, d] + b[d])`.
pub fn bias_act(pool: &Pool, out: &mut [f32], x: &[f32], b: &[f32], act: Option<Activation>) {
    let d = b.len();
    assert!(out.len() == x.len() && x.len().is_multiple_of(d));
    pool.for_each_block(out, 16 * d, 12 * x.len(), |i, o| bias_act_rows(o, &x[i * 16 * d..], b, act));
}

/// Computes `out = f(x)` per element.
pub fn map_elements(pool: &Pool, out: &mut [f32], x: &[f32], f: impl Fn(f32) -> f32 + Sync) {
    assert_eq!(out.len(), x.len());
    pool.for_each_block(out, BLOCK_ELEMENTS, 12 * x.len(), |i, o| map_block(o, &x[i * BLOCK_ELEMENTS..], &f));
}

/// Computes `out = (1 − σ) · x0 + σ · noise`, where element i of `out` uses element `first_element
/// + i` of the draw.
pub fn renoise(pool: &Pool, out: &mut [f32], x0: &[f32], sigma: f32, key: DrawKey, first_element: u64) {
    assert_eq!(out.len(), x0.len());
    pool.for_each_block(out, BLOCK_ELEMENTS, 50 * x0.len(), |i, o| {
        renoise_block(o, &x0[i * BLOCK_ELEMENTS..], sigma, key, first_element + (i * BLOCK_ELEMENTS) as u64);
    });
}

/// Computes `out = x − σ · pred` in f64, rounded once.
pub fn to_x0(pool: &Pool, out: &mut [f32], x: &[f32], pred: &[f32], sigma: f64) {
    assert!(out.len() == x.len() && x.len() == pred.len());
    pool.for_each_block(out, BLOCK_ELEMENTS, 4 * x.len(), |i, o| {
        to_x0_block(o, &x[i * BLOCK_ELEMENTS..], &pred[i * BLOCK_ELEMENTS..], sigma);
    });
}

/// Computes `out = y + scale · (x − y)` in f64, rounded once.
pub fn guide(pool: &Pool, out: &mut [f32], x: &[f32], y: &[f32], scale: f64) {
    assert!(out.len() == x.len() && x.len() == y.len());
    pool.for_each_block(out, BLOCK_ELEMENTS, 4 * x.len(), |i, o| {
        guide_block(o, &x[i * BLOCK_ELEMENTS..], &y[i * BLOCK_ELEMENTS..], scale);
    });
}

/// Computes `out[F, width]`: for each timestep t, `width / 2` cosines, then as many sines, of `t ·
/// 10000^(−i / half)`, in f64.
///
/// # Panics
/// Panics if the width is odd.
pub fn time_embed(out: &mut [f32], t: &[f32]) {
    if t.is_empty() {
        return;
    }
    let width = out.len() / t.len();
    assert!(out.len() == width * t.len() && width.is_multiple_of(2));
    let half = width / 2;
    for (row, t) in out.chunks_exact_mut(width).zip(t) {
        for i in 0..half {
            let angle = f64::from(*t) * 10_000f64.powf(-(i as f64) / half as f64);
            row[i] = angle.cos() as f32;
            row[half + i] = angle.sin() as f32;
        }
    }
}

vectorized! {
    fn add_block(out: &mut [f32], a: &[f32], b: &[f32]) {
        for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
            *o = a + b;
        }
    }
}

vectorized! {
    fn multiply_block(out: &mut [f32], a: &[f32], b: &[f32]) {
        for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
            *o = a * b;
        }
    }
}

vectorized! {
    fn bias_act_rows(out: &mut [f32], x: &[f32], b: &[f32], act: Option<Activation>) {
        for (o, x) in out.chunks_exact_mut(b.len()).zip(x.chunks_exact(b.len())) {
            let sums = o.iter_mut().zip(x).zip(b);
            match act {
                None => sums.for_each(|((o, x), b)| *o = x + b),
                Some(Activation::Silu) => sums.for_each(|((o, x), b)| *o = silu(x + b)),
                Some(Activation::GeluTanh) => sums.for_each(|((o, x), b)| *o = gelu_tanh(x + b)),
            }
        }
    }
}

vectorized! {
    fn map_block<F: Fn(f32) -> f32>(out: &mut [f32], x: &[f32], f: &F) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = f(*x);
        }
    }
}

vectorized! {
    fn renoise_block(out: &mut [f32], x0: &[f32], sigma: f32, key: DrawKey, first: u64) {
        fill_normals_inline(key, first, out);
        for (o, x) in out.iter_mut().zip(x0) {
            *o = (1.0 - sigma) * x + sigma * *o;
        }
    }
}

vectorized! {
    fn to_x0_block(out: &mut [f32], x: &[f32], pred: &[f32], sigma: f64) {
        for ((o, x), p) in out.iter_mut().zip(x).zip(pred) {
            *o = (f64::from(*x) - sigma * f64::from(*p)) as f32;
        }
    }
}

vectorized! {
    fn guide_block(out: &mut [f32], x: &[f32], y: &[f32], scale: f64) {
        for ((o, x), y) in out.iter_mut().zip(x).zip(y) {
            let (x, y) = (f64::from(*x), f64::from(*y));
            *o = (y + scale * (x - y)) as f32;
        }
    }
}
