//! Rotary position embedding over (frame, height, width), on interleaved pairs.
//!
//! Angles, their cosines and sines and the complex multiplication are f64, rounded to f32 once at
//! the end. The tables are per axis and kept from call to call: in steady state no sine is
//! computed.

use crate::Pool;
use crate::simd::vectorized;

/// The parameters of a rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeSpec {
    /// Elements of one head, even. The frame index rotates `d − 4⌊d/6⌋` of them; the token's row
    /// and column rotate `2⌊d/6⌋` each.
    pub head_dim: usize,
    /// Token grid as (frames, height, width).
    pub grid: [usize; 3],
    /// Position of frame 0; may be negative.
    pub start: i64,
    /// Position difference between frames. With 0, all tokens rotate by the temporal position
    /// `start` alone: this shifts keys that are already rotated.
    pub frame_stride: i64,
}

/// The cosine and sine tables of one [`RopeSpec`].
#[derive(Debug)]
pub struct RopeTables {
    spec: RopeSpec,
    /// (cos, sin) pairs of each axis, `[extent, pairs]`.
    axes: [Vec<(f64, f64)>; 3],
    pairs: [usize; 3],
}

impl RopeTables {
    /// Computes the tables.
    ///
    /// # Panics
    /// Panics if the head size is odd.
    #[must_use]
    pub fn new(spec: RopeSpec) -> RopeTables {
        let RopeSpec { head_dim, grid, start, frame_stride } = spec;
        assert!(head_dim % 2 == 0, "the head size {head_dim} is odd");
        let side = head_dim / 6;
        let pairs = [head_dim / 2 - 2 * side, side, side];
        let has_frame_stride = frame_stride != 0;
        let axes = std::array::from_fn(|axis| {
            let extent = if has_frame_stride { grid[axis] } else { 1 };
            let position = |i: usize| match axis {
                0 => start as f64 + frame_stride as f64 * i as f64,
                _ => i as f64,
            };
            let cos_sin = |p: f64, j: usize| {
                let angle = p * 10_000f64.powf(-(j as f64) / pairs[axis] as f64);
                (angle.cos(), angle.sin())
            };
            (0..extent).flat_map(|i| (0..pairs[axis]).map(move |j| cos_sin(position(i), j))).collect()
        });
        RopeTables { spec, axes, pairs }
    }

    /// Iterates over every cosine and sine.
    pub(crate) fn cos_sin_values(&self) -> impl Iterator<Item = f64> + '_ {
        self.axes.iter().flatten().flat_map(|(c, s)| [*c, *s])
    }

    /// Writes the `head_dim / 2` (cos, sin) pairs of a token as one interleaved row.
    fn fill_row(&self, token: usize, out: &mut [f64]) {
        let [_, h, w] = self.spec.grid;
        let at =
            if self.spec.frame_stride == 0 { [0; 3] } else { [token / (h * w), token / w % h, token % w] };
        let pairs = (0..3).flat_map(|a| &self.axes[a][at[a] * self.pairs[a]..][..self.pairs[a]]);
        for (o, (c, s)) in out.chunks_exact_mut(2).zip(pairs) {
            o[0] = *c;
            o[1] = *s;
        }
    }
}

/// A cache of the tables of the last few specs.
#[derive(Debug, Default)]
pub struct RopeCache {
    tables: Vec<RopeTables>,
}

impl RopeCache {
    /// Maximum number of cached specs; a program uses a handful.
    const LIMIT: usize = 16;

    /// Creates an empty cache.
    #[must_use]
    pub fn new() -> RopeCache {
        RopeCache::default()
    }

    /// Returns the bytes of all cached tables.
    #[must_use]
    pub fn allocated_bytes(&self) -> usize {
        let pairs = self.tables.iter().flat_map(|t| &t.axes).map(Vec::capacity).sum::<usize>();
        pairs * size_of::<(f64, f64)>()
    }

    /// Returns the tables of `spec`, computed on first use.
    pub fn get(&mut self, spec: RopeSpec) -> &RopeTables {
        match self.tables.iter().position(|t| t.spec == spec) {
            Some(at) => self.tables[..=at].rotate_right(1),
            None => {
                self.tables.truncate(Self::LIMIT - 1);
                self.tables.insert(0, RopeTables::new(spec));
            }
        }
        &self.tables[0]
    }
}

/// Number of rows of one block of work.
const BLOCK_ROWS: usize = 16;
/// Maximum head size of [`rope`], in elements.
pub const MAX_HEAD_DIM: usize = 512;

/// Computes `out[N, dl]`: rotates each head of each row by its token's position; row r is token
/// `first_row + r`.
///
/// # Panics
/// Panics if dl is not a multiple of the head size, or a token is outside the grid.
pub fn rope(pool: &Pool, out: &mut [f32], x: &[f32], dl: usize, first_row: usize, tables: &RopeTables) {
    let head = tables.spec.head_dim;
    assert!(
        out.len() == x.len() && x.len().is_multiple_of(dl) && dl.is_multiple_of(head) && head <= MAX_HEAD_DIM
    );
    let tokens: usize = tables.spec.grid.iter().product();
    assert!(tables.spec.frame_stride == 0 || first_row + x.len() / dl <= tokens, "rows beyond the grid");
    pool.for_each_block(out, BLOCK_ROWS * dl, 8 * x.len(), |i, o| {
        let mut cos_sin_row = [0.0f64; MAX_HEAD_DIM];
        for (r, o) in o.chunks_mut(dl).enumerate() {
            let row = i * BLOCK_ROWS + r;
            tables.fill_row(first_row + row, &mut cos_sin_row[..head]);
            rotate_row(o, &x[row * dl..][..dl], &cos_sin_row[..head]);
        }
    });
}

vectorized! {
    fn rotate_row(out: &mut [f32], x: &[f32], turns: &[f64]) {
        for (o, x) in out.chunks_exact_mut(turns.len()).zip(x.chunks_exact(turns.len())) {
            for ((o, x), t) in o.chunks_exact_mut(2).zip(x.chunks_exact(2)).zip(turns.chunks_exact(2)) {
                let (a, b) = (f64::from(x[0]), f64::from(x[1]));
                o[0] = (a * t[0] - b * t[1]) as f32;
                o[1] = (a * t[1] + b * t[0]) as f32;
            }
        }
    }
}
