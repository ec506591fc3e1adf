//! Rotary position embedding over (frame, height, width), interleaved pairs.
//!
//! Angles, their sines and the complex product are f64, rounded to f32 once at the end. Tables are per axis
//! and kept from call to call: in steady state no sine is computed.

use crate::Pool;
use crate::simd::vectorized;

/// Positions and split of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeSpec {
    /// Elements of one head, even. `d − 4⌊d/6⌋` of them turn with the frame, `2⌊d/6⌋` with each of the row
    /// and the column of the token.
    pub head_dim: usize,
    /// Tokens as (frames, height, width).
    pub grid: [usize; 3],
    /// Position of frame 0; may be negative.
    pub start: i64,
    /// Positions between frames. With 0 every token turns alike, by `start` in time: a shift of keys that
    /// were turned before.
    pub frame_stride: i64,
}

/// Cosines and sines of one [`RopeSpec`].
#[derive(Debug)]
pub struct RopeTables {
    spec: RopeSpec,
    /// For each axis `[extent, pairs]` of (cos, sin).
    axes: [Vec<(f64, f64)>; 3],
    pairs: [usize; 3],
}

impl RopeTables {
    /// Computes the tables.
    ///
    /// # Panics
    /// If the head's size is odd.
    #[must_use]
    pub fn new(spec: RopeSpec) -> RopeTables {
        let RopeSpec { head_dim, grid, start, frame_stride } = spec;
        assert!(head_dim % 2 == 0, "a head of {head_dim} elements has no pairs");
        let side = head_dim / 6;
        let pairs = [head_dim / 2 - 2 * side, side, side];
        let moves = frame_stride != 0;
        let axes = std::array::from_fn(|axis| {
            let extent = if moves { grid[axis] } else { 1 };
            let position = |i: usize| match axis {
                0 => start as f64 + frame_stride as f64 * i as f64,
                _ => i as f64,
            };
            let turn = |p: f64, j: usize| {
                let angle = p * 10_000f64.powf(-(j as f64) / pairs[axis] as f64);
                (angle.cos(), angle.sin())
            };
            (0..extent).flat_map(|i| (0..pairs[axis]).map(move |j| turn(position(i), j))).collect()
        });
        RopeTables { spec, axes, pairs }
    }

    /// Every cosine and sine.
    pub(crate) fn turns(&self) -> impl Iterator<Item = f64> + '_ {
        self.axes.iter().flatten().flat_map(|(c, s)| [*c, *s])
    }

    /// The (cos, sin) of a token's pairs, `head_dim / 2` of them, as one interleaved row.
    fn row(&self, token: usize, out: &mut [f64]) {
        let [_, h, w] = self.spec.grid;
        let at =
            if self.spec.frame_stride == 0 { [0; 3] } else { [token / (h * w), token / w % h, token % w] };
        let turns = (0..3).flat_map(|a| &self.axes[a][at[a] * self.pairs[a]..][..self.pairs[a]]);
        for (o, (c, s)) in out.chunks_exact_mut(2).zip(turns) {
            o[0] = *c;
            o[1] = *s;
        }
    }
}

/// The tables of the last few specs.
#[derive(Debug, Default)]
pub struct RopeCache {
    tables: Vec<RopeTables>,
}

impl RopeCache {
    /// Specs kept; a program uses a handful.
    const LIMIT: usize = 16;

    /// Empty.
    #[must_use]
    pub fn new() -> RopeCache {
        RopeCache::default()
    }

    /// The tables of `spec`, computed on first use.
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

/// Rows of one block of work.
const ROWS: usize = 16;
/// Largest head that [`rope`] turns, in elements.
pub const MAX_HEAD: usize = 512;

/// `out[N, dl]`: each head of each row turned to its token's position; row r is token `first_row + r`.
///
/// # Panics
/// If dl is no multiple of the head's size, or a token lies outside the grid.
pub fn rope(pool: &Pool, out: &mut [f32], x: &[f32], dl: usize, first_row: usize, tables: &RopeTables) {
    let head = tables.spec.head_dim;
    assert!(
        out.len() == x.len() && x.len().is_multiple_of(dl) && dl.is_multiple_of(head) && head <= MAX_HEAD
    );
    let tokens: usize = tables.spec.grid.iter().product();
    assert!(tables.spec.frame_stride == 0 || first_row + x.len() / dl <= tokens, "rows beyond the grid");
    pool.blocks(out, ROWS * dl, 8 * x.len(), |i, o| {
        let mut turns = [0.0f64; MAX_HEAD];
        for (r, o) in o.chunks_mut(dl).enumerate() {
            let row = i * ROWS + r;
            tables.row(first_row + row, &mut turns[..head]);
            turn_row(o, &x[row * dl..][..dl], &turns[..head]);
        }
    });
}

vectorized! {
    fn turn_row(out: &mut [f32], x: &[f32], turns: &[f64]) {
        for (o, x) in out.chunks_exact_mut(turns.len()).zip(x.chunks_exact(turns.len())) {
            for ((o, x), t) in o.chunks_exact_mut(2).zip(x.chunks_exact(2)).zip(turns.chunks_exact(2)) {
                let (a, b) = (f64::from(x[0]), f64::from(x[1]));
                o[0] = (a * t[0] - b * t[1]) as f32;
                o[1] = (a * t[1] + b * t[0]) as f32;
            }
        }
    }
}
