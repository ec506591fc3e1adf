//! Kernels that work on the columns of each head: a matmul per head, and the choice and joining of columns.

use super::language::dot;
use crate::Pool;
use crate::simd::vectorized;

/// The rows of a matrix that belong to each head, and how they are multiplied.
#[derive(Debug, Clone, Copy)]
pub struct HeadRows {
    /// Rows of the matrix per head.
    pub of: usize,
    /// First of the rows that count, from the head's first one.
    pub first: usize,
    /// Number of rows per head that the matmul reads.
    pub rows: usize,
    /// Columns of the matrix.
    pub columns: usize,
    /// Whether a head of x has one number per row, and not one per column.
    pub transposed: bool,
}

/// Multiplies each head of `x[n, heads · k]` with its own rows of `w`. The bits of a row depend on itself alone.
pub fn head_matmul(pool: &Pool, out: &mut [f32], x: &[f32], w: &[f32], heads: HeadRows) {
    let count = w.len() / (heads.of * heads.columns);
    let (k, width) = match heads.transposed {
        true => (heads.rows, heads.columns),
        false => (heads.columns, heads.rows),
    };
    pool.for_each_block(out, width, 2 * out.len() * k, |i, out| {
        let w = &w[(i % count * heads.of + heads.first) * heads.columns..][..heads.rows * heads.columns];
        multiply_head(out, &x[i * k..][..k], w, heads.transposed);
    });
}

vectorized! {
    fn multiply_head(out: &mut [f32], x: &[f32], w: &[f32], transposed: bool) {
        if transposed {
            out.fill(0.0);
            for (x, w) in x.iter().zip(w.chunks_exact(out.len())) {
                out.iter_mut().zip(w).for_each(|(out, w)| *out = x.mul_add(*w, *out));
            }
        } else {
            out.iter_mut().zip(w.chunks_exact(x.len())).for_each(|(out, w)| *out = dot(x, w));
        }
    }
}

/// Copies the columns from `first` on of each head of x, as many as `out` has per head.
pub fn head_columns(out: &mut [f32], x: &[f32], (head_dim, first, columns): (usize, usize, usize)) {
    for (out, x) in out.chunks_exact_mut(columns).zip(x.chunks_exact(head_dim)) {
        out.copy_from_slice(&x[first..][..columns]);
    }
}

/// Joins the columns of each head of x, `head_dim` each, and of y, `more` each.
pub fn head_join(out: &mut [f32], x: &[f32], y: &[f32], (head_dim, more): (usize, usize)) {
    let heads = x.chunks_exact(head_dim).zip(y.chunks_exact(more));
    for (out, (x, y)) in out.chunks_exact_mut(head_dim + more).zip(heads) {
        out[..head_dim].copy_from_slice(x);
        out[head_dim..].copy_from_slice(y);
    }
}
