//! y = act(x · wᵀ + bias), with an optional fixed cut of the contraction into segments.

use super::{Scratch, borrow_buffer};
use crate::Pool;
use crate::simd::{
    Aligned, BLOCK, Left, PANEL, Right, TILE_ROWS, Target, Tile, gelu_tanh, pack_panel, silu, tile,
    vectorized,
};

/// What follows a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Act {
    /// Nothing.
    #[default]
    None,
    /// x · sigmoid(x).
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
}

/// A weight `[N, K]`, rows contiguous, as it lies in a file or packed.
#[derive(Debug, Clone, Copy)]
pub enum Weight<'a> {
    /// `[N, K]`; packed anew by every call.
    Plain(&'a [f32]),
    /// Packed once; the same bits, faster.
    Packed(&'a PackedWeight),
}

/// A weight laid out for the inner loop: panels of 32 output columns, k-major.
#[derive(Debug, Clone)]
pub struct PackedWeight {
    n: usize,
    k: usize,
    panels: Aligned,
}

impl PackedWeight {
    /// Packs `w[n, k]`.
    ///
    /// # Panics
    /// If `w` does not hold n·k elements.
    #[must_use]
    pub fn new(pool: &Pool, w: &[f32], n: usize, k: usize) -> PackedWeight {
        let mut panels = Aligned::default();
        pack(pool, w, n, k, panels.take(n.div_ceil(PANEL) * PANEL * k));
        PackedWeight { n, k, panels }
    }

    /// (N, K) of the weight.
    #[must_use]
    pub fn shape(&self) -> (usize, usize) {
        (self.n, self.k)
    }

    /// The next rows from row `first` on, a multiple of [`ROWS_AT_ONCE`], as they were before packing: at most so
    /// many, row-major.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn unpack(&self, first: usize, out: &mut Vec<f32>) {
        let (rows, k) = (ROWS_AT_ONCE.min(self.n - first), self.k);
        let panel = &self.panels.get()[first / PANEL * PANEL * k..][..PANEL * k];
        let column = first % PANEL;
        out.clear();
        out.resize(rows * k, 0.0);
        // In tiles, so that lines of both sides stay at hand.
        for (at, tile) in panel.chunks(ROWS_AT_ONCE * PANEL).enumerate() {
            for (r, row) in out.chunks_exact_mut(k.max(1)).enumerate() {
                let row = &mut row[at * ROWS_AT_ONCE..];
                for (o, line) in row.iter_mut().zip(tile.chunks_exact(PANEL)) {
                    *o = line[column + r];
                }
            }
        }
    }

    /// Sets an element by its index in `[N, K]`; false beyond the end.
    pub fn set(&mut self, index: usize, value: f32) -> bool {
        let (row, k) = (index / self.k.max(1), index % self.k.max(1));
        if row >= self.n {
            return false;
        }
        self.panels.get_mut()[row / PANEL * PANEL * self.k + k * PANEL + row % PANEL] = value;
        true
    }
}

/// Rows that are unpacked together: half a panel.
pub const ROWS_AT_ONCE: usize = PANEL / 2;

/// Rows that share one pass over a panel.
const ROW_BLOCK: usize = 48;
/// Most segments of a contraction.
const MAX_SEGMENTS: usize = 8;
/// Partial sums of a tree of so many leaves that can wait at once, and the one in the making.
const LEVELS: usize = MAX_SEGMENTS.ilog2() as usize + 1;

/// `out[M, N] = act(x[M, K] · w[N, K]ᵀ + bias[N])`.
///
/// `segments` (1, 2, 4 or 8, a divisor of K) cuts K into equal contiguous parts, each a product of its own,
/// summed in one binary tree, neighbours first; a rank that holds one subtree's columns of x and w gets that
/// subtree's bits by giving its own share of the segments.
///
/// # Panics
/// If a length does not fit the shape, or the segments do not divide K.
#[allow(clippy::too_many_arguments)]
pub fn matmul(
    pool: &Pool,
    scratch: &mut Scratch,
    out: &mut [f32],
    x: &[f32],
    w: Weight<'_>,
    (m, n, k): (usize, usize, usize),
    bias: Option<&[f32]>,
    act: Act,
    segments: usize,
) {
    assert!(out.len() == m * n && x.len() == m * k, "matmul of [{m}, {k}] to [{m}, {n}]");
    assert!(bias.is_none_or(|b| b.len() == n), "bias of a matmul to {n} columns");
    assert!(segments.is_power_of_two() && segments <= MAX_SEGMENTS && k > 0 && k.is_multiple_of(segments));
    if out.is_empty() {
        return;
    }
    let panels = match w {
        Weight::Packed(p) => {
            assert_eq!(p.shape(), (n, k), "packed weight of a matmul");
            p.panels.get()
        }
        Weight::Plain(w) => {
            let packed = scratch.packed.take(n.div_ceil(PANEL) * PANEL * k);
            pack(pool, w, n, k, packed);
            scratch.packed.get()
        }
    };
    let product = Product { panels, n, k, bias: bias.unwrap_or(&[]), act, segments };
    let work = 2 * m * n * k;
    if m >= ROW_BLOCK * pool.threads() || !pool.shares(work) {
        pool.blocks(out, ROW_BLOCK * n, work, |i, o| {
            let rows = o.len() / n;
            product.rows(&x[i * ROW_BLOCK * k..][..rows * k], 0..n, o);
        });
        return;
    }
    // Too few rows to share: share the columns, through a staging buffer whose parts are contiguous.
    let columns = (n.div_ceil(PANEL).div_ceil(4 * pool.threads())).max(1) * PANEL;
    borrow_buffer(&scratch.spare, m * n.next_multiple_of(columns), |staged| {
        pool.blocks(staged, m * columns, work, |i, o| {
            let first = i * columns;
            let last = (first + columns).min(n);
            product.rows(x, first..last, &mut o[..m * (last - first)]);
        });
        for (i, part) in staged.chunks(m * columns).enumerate() {
            let first = i * columns;
            let width = columns.min(n - first);
            for r in 0..m {
                out[r * n + first..][..width].copy_from_slice(&part[r * width..][..width]);
            }
        }
    });
}

fn pack(pool: &Pool, w: &[f32], n: usize, k: usize, out: &mut [f32]) {
    assert_eq!(w.len(), n * k, "weight [{n}, {k}]");
    pool.blocks(out, PANEL * k, 4 * n * k, |i, panel| {
        let columns = PANEL.min(n - i * PANEL);
        pack_panel(&w[i * PANEL * k..], k, columns, k, panel);
    });
}

struct Product<'a> {
    panels: &'a [f32],
    n: usize,
    k: usize,
    bias: &'a [f32],
    act: Act,
    segments: usize,
}

impl Product<'_> {
    /// Some rows of x against the columns `range`, which begin on a panel; `out` has just those columns.
    fn rows(&self, x: &[f32], range: std::ops::Range<usize>, out: &mut [f32]) {
        let k = self.k;
        let step = range.len();
        let mut sums: [Tile; LEVELS] = [[0.0; TILE_ROWS * PANEL]; LEVELS];
        for row_block in 0..(x.len() / k).div_ceil(ROW_BLOCK) {
            let first_row = row_block * ROW_BLOCK;
            let last_row = (first_row + ROW_BLOCK).min(x.len() / k);
            for column in range.clone().step_by(PANEL) {
                let panel = &self.panels[column * k..][..PANEL * k];
                let columns = PANEL.min(range.end - column);
                let mut bias = [0.0f32; PANEL];
                if !self.bias.is_empty() {
                    bias[..columns].copy_from_slice(&self.bias[column..column + columns]);
                }
                let at = |row: usize| row * step + column - range.start;
                if self.segments == 1 && columns == PANEL {
                    let (x, out) = (&x[first_row * k..last_row * k], &mut out[at(first_row)..]);
                    self.whole(x, panel, &bias, out, step);
                    continue;
                }
                for row in (first_row..last_row).step_by(TILE_ROWS) {
                    let rows = TILE_ROWS.min(last_row - row);
                    self.tile(rows, &x[row * k..], panel, &mut sums);
                    finish(&sums[0], rows, columns, &bias, self.act, &mut out[at(row)..], step);
                }
            }
        }
        debug_assert!(range.end <= self.n);
    }

    /// Rows of one block against a full panel, straight to `out`. A block of k is done for all rows before the
    /// next, so that its part of the panel stays in the nearest cache.
    fn whole(&self, x: &[f32], panel: &[f32], bias: &[f32; PANEL], out: &mut [f32], step: usize) {
        let k = self.k;
        let rows = x.len() / k;
        for k0 in (0..k).step_by(BLOCK) {
            let length = BLOCK.min(k - k0);
            let bias = (k0 + length == k).then_some(bias);
            for row in (0..rows).step_by(TILE_ROWS) {
                let left = Left { data: &x[row * k + k0..], row_step: k, k_step: 1 };
                let right = Right { data: &panel[k0 * PANEL..], k_step: PANEL };
                let target = Target { data: &mut out[row * step..], row_step: step, add: k0 > 0, bias };
                tile(TILE_ROWS.min(rows - row), left, right, length, target);
            }
        }
        if self.act != Act::None {
            activate(out, rows, step, self.act);
        }
    }

    /// One tile into `waiting[0]`; the others are room for the sums of the tree.
    fn tile(&self, rows: usize, x: &[f32], panel: &[f32], waiting: &mut [Tile; LEVELS]) {
        let k = self.k / self.segments;
        let segment = |s: usize, data: &mut Tile, add: bool| {
            let left = Left { data: &x[s * k..], row_step: self.k, k_step: 1 };
            let right = Right { data: &panel[s * k * PANEL..][..k * PANEL], k_step: PANEL };
            tile(rows, left, right, k, Target { data, row_step: PANEL, add, bias: None });
        };
        // A binary counter: the tiles waiting are the sums of the set bits of the segments so far.
        let mut depth = 0;
        for s in 0..self.segments {
            let mut count = s + 1;
            if count.is_multiple_of(2) && k <= BLOCK {
                depth -= 1;
                segment(s, &mut waiting[depth], true);
                count /= 2;
            } else {
                segment(s, &mut waiting[depth], false);
            }
            while count.is_multiple_of(2) {
                let (left, right) = waiting.split_at_mut(depth);
                depth -= 1;
                add_tile(&mut left[depth], &right[0]);
                count /= 2;
            }
            depth += 1;
        }
    }
}

vectorized! {
    fn add_tile(left: &mut Tile, right: &Tile) {
        for (l, r) in left.iter_mut().zip(right) {
            *l += *r;
        }
    }
}

vectorized! {
    /// Bias and activation of a tile on its way to `out`, rows `step` apart.
    fn finish(
        sums: &Tile,
        rows: usize,
        columns: usize,
        bias: &[f32; PANEL],
        act: Act,
        out: &mut [f32],
        step: usize,
    ) {
        let (sums, _) = sums.as_chunks::<PANEL>();
        for (r, sums) in sums[..rows].iter().enumerate() {
            let mut y = [0.0f32; PANEL];
            for c in 0..PANEL {
                y[c] = sums[c] + bias[c];
            }
            apply(&mut y, act);
            match out[r * step..].first_chunk_mut::<PANEL>() {
                Some(out) if columns == PANEL => *out = y,
                _ => out[r * step..][..columns].copy_from_slice(&y[..columns]),
            }
        }
    }
}

vectorized! {
    /// Activation of a panel's columns of `out`, rows `step` apart.
    fn activate(out: &mut [f32], rows: usize, step: usize, act: Act) {
        for r in 0..rows {
            if let Some(row) = out[r * step..].first_chunk_mut::<PANEL>() {
                apply(row, act);
            }
        }
    }
}

#[inline(always)]
fn apply(row: &mut [f32; PANEL], act: Act) {
    match act {
        Act::None => {}
        Act::Silu => row.iter_mut().for_each(|v| *v = silu(*v)),
        Act::GeluTanh => row.iter_mut().for_each(|v| *v = gelu_tanh(*v)),
    }
}
