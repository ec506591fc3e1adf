//! y = act(x · wᵀ + bias), with an optional fixed split of the contraction into segments.

use std::sync::Mutex;

use tessera_ir::Activation;

use super::{Scratch, borrow_buffer};
use crate::Pool;
use crate::simd::{
    AccumulatorTile, AlignedBuffer, BLOCK, LhsOperand, OutputTile, PANEL, RhsPanel, TILE_ROWS, gelu_tanh,
    multiply_tile, pack_panel, silu, vectorized,
};

/// A weight `[N, K]` with contiguous rows, either as stored in a file or packed.
#[derive(Debug, Clone, Copy)]
pub enum MatmulWeight<'a> {
    /// `[N, K]`; every call packs it again.
    Plain(&'a [f32]),
    /// Packed once; faster, with the same bits.
    Packed(&'a PackedWeight),
}

/// A weight laid out for the inner loop: panels of 32 output columns, k-major.
#[derive(Debug, Clone)]
pub struct PackedWeight {
    n: usize,
    k: usize,
    panels: Panels,
}

/// The elements of a packed weight. Half the bytes hold the same numbers if bf16 represents each of
/// them exactly; a matmul then widens a panel before it multiplies, and its bits do not change.
#[derive(Debug, Clone)]
enum Panels {
    F32(AlignedBuffer),
    Bf16(Vec<u16>),
}

impl PackedWeight {
    /// Packs `w[n, k]`.
    ///
    /// # Panics
    /// Panics if `w` does not have n·k elements.
    #[must_use]
    pub fn new(pool: &Pool, w: &[f32], n: usize, k: usize) -> PackedWeight {
        let mut panels = AlignedBuffer::default();
        pack_weight(pool, w, n, k, panels.ensure_len(n.div_ceil(PANEL) * PANEL * k));
        PackedWeight { n, k, panels: Panels::F32(panels) }
    }

    /// As [`PackedWeight::new`], in half the bytes. Returns `None` if an element is not exact in bf16.
    ///
    /// # Panics
    /// Panics if `w` does not have n·k elements.
    #[must_use]
    pub fn new_bf16(pool: &Pool, w: &[f32], n: usize, k: usize) -> Option<PackedWeight> {
        assert_eq!(w.len(), n * k, "weight [{n}, {k}]");
        if !w.iter().all(|x| is_exact_bf16(*x)) {
            return None;
        }
        let mut panels = Vec::with_capacity(n.div_ceil(PANEL) * PANEL * k);
        let mut panel = vec![0.0; PANEL * k];
        for rows in w.chunks(PANEL * k) {
            pack_weight(pool, rows, rows.len() / k, k, &mut panel);
            panels.extend(panel.iter().map(|x| narrow_to_bf16(*x)));
        }
        Some(PackedWeight { n, k, panels: Panels::Bf16(panels) })
    }

    /// Creates a weight `[n, k]` of zeros, whose elements [`PackedWeight::replace`] sets.
    #[must_use]
    pub fn zeros(n: usize, k: usize, is_bf16: bool) -> PackedWeight {
        let len = n.div_ceil(PANEL) * PANEL * k;
        let panels = match is_bf16 {
            true => Panels::Bf16(vec![0; len]),
            false => {
                let mut panels = AlignedBuffer::default();
                panels.ensure_len(len);
                Panels::F32(panels)
            }
        };
        PackedWeight { n, k, panels }
    }

    /// Packs `w[n, k]` into the memory of this weight. One that is stored in bf16 keeps the upper half of each number.
    ///
    /// # Panics
    /// Panics if `w` has another number of elements.
    pub fn replace(&mut self, pool: &Pool, w: &[f32]) {
        assert_eq!(w.len(), self.n * self.k, "weight [{}, {}]", self.n, self.k);
        match &mut self.panels {
            Panels::F32(panels) => pack_weight(pool, w, self.n, self.k, panels.get_mut()),
            Panels::Bf16(panels) => {
                let mut panel = vec![0.0; PANEL * self.k];
                for (rows, out) in w.chunks(PANEL * self.k).zip(panels.chunks_exact_mut(PANEL * self.k)) {
                    pack_weight(pool, rows, rows.len() / self.k, self.k, &mut panel);
                    out.iter_mut().zip(&panel).for_each(|(out, x)| *out = narrow_to_bf16(*x));
                }
            }
        }
    }

    /// Returns whether the weight is stored in bf16.
    #[must_use]
    pub fn is_bf16(&self) -> bool {
        matches!(self.panels, Panels::Bf16(_))
    }

    /// Returns the bytes of the packed weight in memory, padding included.
    #[must_use]
    pub fn allocated_bytes(&self) -> usize {
        match &self.panels {
            Panels::F32(panels) => panels.allocated_bytes(),
            Panels::Bf16(panels) => panels.capacity() * size_of::<u16>(),
        }
    }

    /// Returns (N, K) of the weight.
    #[must_use]
    pub fn shape(&self) -> (usize, usize) {
        (self.n, self.k)
    }

    /// Unpacks up to [`UNPACK_ROWS`] rows, starting at row `first`, a multiple of
    /// [`UNPACK_ROWS`]. `out` receives them row-major, as they were before packing.
    ///
    /// # Panics
    /// Panics if `first` is not below N.
    pub fn unpack_rows(&self, first: usize, out: &mut Vec<f32>) {
        let (rows, k) = (UNPACK_ROWS.min(self.n - first), self.k);
        let range = first / PANEL * PANEL * k..(first / PANEL + 1) * PANEL * k;
        let column = first % PANEL;
        out.clear();
        out.resize(rows * k, 0.0);
        match &self.panels {
            Panels::F32(panels) => unpack_columns(&panels.get()[range], column, k, out, |x| x),
            Panels::Bf16(panels) => unpack_columns(&panels[range], column, k, out, widen_to_f32),
        }
    }

    /// Sets an element by its index in `[N, K]`, rounded towards zero if the weight is stored in bf16;
    /// returns false if the index is out of range.
    pub fn set(&mut self, index: usize, value: f32) -> bool {
        let Some(at) = self.panel_index(index) else { return false };
        match &mut self.panels {
            Panels::F32(panels) => panels.get_mut()[at] = value,
            Panels::Bf16(panels) => panels[at] = narrow_to_bf16(value),
        }
        true
    }

    /// Returns an element by its index in `[N, K]`, or `None` if the index is out of range.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<f32> {
        self.panel_index(index).map(|at| match &self.panels {
            Panels::F32(panels) => panels.get()[at],
            Panels::Bf16(panels) => widen_to_f32(panels[at]),
        })
    }

    fn panel_index(&self, index: usize) -> Option<usize> {
        let (row, k) = (index / self.k.max(1), index % self.k.max(1));
        (row < self.n).then(|| row / PANEL * PANEL * self.k + k * PANEL + row % PANEL)
    }
}

/// Copies the columns of a panel from `column` on to the rows of `out`, as many as it has.
fn unpack_columns<T: Copy>(panel: &[T], column: usize, k: usize, out: &mut [f32], widen: impl Fn(T) -> f32) {
    // Transposes in tiles, so that the cache lines of both sides stay in cache.
    for (at, tile) in panel.chunks(UNPACK_ROWS * PANEL).enumerate() {
        for (r, row) in out.chunks_exact_mut(k.max(1)).enumerate() {
            let row = &mut row[at * UNPACK_ROWS..];
            for (o, line) in row.iter_mut().zip(tile.chunks_exact(PANEL)) {
                *o = widen(line[column + r]);
            }
        }
    }
}

/// Returns whether bf16 represents a number exactly.
pub(crate) fn is_exact_bf16(x: f32) -> bool {
    x.to_bits() & 0xffff == 0
}

/// Returns the upper half of a number, which is the number in bf16 if that is exact.
pub(crate) fn narrow_to_bf16(x: f32) -> u16 {
    (x.to_bits() >> 16) as u16
}

/// Returns a number in bf16 as f32.
pub(crate) fn widen_to_f32(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Number of rows that are unpacked together: half a panel.
pub const UNPACK_ROWS: usize = PANEL / 2;

/// Number of rows that share one sweep over a panel.
const ROW_BLOCK: usize = 48;
/// Maximum number of segments into which [`matmul`] splits K.
const MAX_SEGMENTS: usize = 8;
/// Maximum number of partial sums of the binary tree that are pending at once, plus the current
/// one.
const TREE_LEVELS: usize = MAX_SEGMENTS.ilog2() as usize + 1;

/// Computes `out[M, N] = act(x[M, K] · w[N, K]ᵀ + bias[N])`.
///
/// `segments` (1, 2, 4 or 8, a divisor of K) splits K into equal contiguous segments. Each segment
/// is a matmul of its own, and one binary tree sums them, neighbours first. A rank that has one
/// subtree's columns of x and w gets that subtree's bits by passing its own share of the segments.
///
/// # Panics
/// Panics if a length does not match the shape, or `segments` does not divide K.
#[allow(clippy::too_many_arguments)]
pub fn matmul(
    pool: &Pool,
    scratch: &mut Scratch,
    out: &mut [f32],
    x: &[f32],
    w: MatmulWeight<'_>,
    (m, n, k): (usize, usize, usize),
    bias: Option<&[f32]>,
    act: Option<Activation>,
    segments: usize,
) {
    assert!(out.len() == m * n && x.len() == m * k, "matmul of [{m}, {k}] to [{m}, {n}]");
    assert!(bias.is_none_or(|b| b.len() == n), "bias of a matmul to {n} columns");
    assert!(segments.is_power_of_two() && segments <= MAX_SEGMENTS && k > 0 && k.is_multiple_of(segments));
    if out.is_empty() {
        return;
    }
    let panels = packed_panels(pool, &mut scratch.packed, w, (n, k));
    let packed_matmul = PackedMatmul { panels, n, k, bias: bias.unwrap_or(&[]), act, segments };
    let (work, spare) = (2 * m * n * k, &scratch.spare);
    if m >= ROW_BLOCK * pool.thread_count() || !pool.should_parallelize(work) {
        pool.for_each_block(out, ROW_BLOCK * n, work, |i, o| {
            let rows = o.len() / n;
            let x = &x[i * ROW_BLOCK * k..][..rows * k];
            packed_matmul.with_widened(spare, |w| packed_matmul.compute_rows(x, 0..n, o, w));
        });
        return;
    }
    // There are too few rows to distribute: distribute the columns, through a staging buffer whose
    // parts are contiguous.
    let columns = (n.div_ceil(PANEL).div_ceil(4 * pool.thread_count())).max(1) * PANEL;
    borrow_buffer(spare, m * n.next_multiple_of(columns), |staged| {
        pool.for_each_block(staged, m * columns, work, |i, o| {
            let first = i * columns;
            let last = (first + columns).min(n);
            let o = &mut o[..m * (last - first)];
            packed_matmul.with_widened(spare, |w| packed_matmul.compute_rows(x, first..last, o, w));
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

/// Returns the panels of a weight `[n, k]`, packed into `spare` if it is plain.
pub(super) fn packed_panels<'a>(
    pool: &Pool,
    spare: &'a mut AlignedBuffer,
    w: MatmulWeight<'a>,
    (n, k): (usize, usize),
) -> PanelElements<'a> {
    match w {
        MatmulWeight::Packed(p) => {
            assert_eq!(p.shape(), (n, k), "packed weight of a matmul");
            match &p.panels {
                Panels::F32(panels) => PanelElements::F32(panels.get()),
                Panels::Bf16(panels) => PanelElements::Bf16(panels),
            }
        }
        MatmulWeight::Plain(w) => {
            pack_weight(pool, w, n, k, spare.ensure_len(n.div_ceil(PANEL) * PANEL * k));
            PanelElements::F32(spare.get())
        }
    }
}

fn pack_weight(pool: &Pool, w: &[f32], n: usize, k: usize, out: &mut [f32]) {
    assert_eq!(w.len(), n * k, "weight [{n}, {k}]");
    pool.for_each_block(out, PANEL * k, 4 * n * k, |i, panel| {
        let columns = PANEL.min(n - i * PANEL);
        pack_panel(&w[i * PANEL * k..], k, columns, k, panel);
    });
}

/// The panels of a packed weight.
#[derive(Clone, Copy)]
pub(super) enum PanelElements<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
}

/// A matmul with a packed weight `[n, k]`.
pub(super) struct PackedMatmul<'a> {
    pub(super) panels: PanelElements<'a>,
    pub(super) n: usize,
    pub(super) k: usize,
    /// `[n]`, or empty.
    pub(super) bias: &'a [f32],
    pub(super) act: Option<Activation>,
    pub(super) segments: usize,
}

impl PackedMatmul<'_> {
    /// Lends `f` memory for one panel in f32 if the panels are stored in bf16, and none otherwise.
    pub(super) fn with_widened(&self, spare: &Mutex<Vec<AlignedBuffer>>, f: impl FnOnce(&mut [f32])) {
        match self.panels {
            PanelElements::F32(_) => f(&mut []),
            PanelElements::Bf16(_) => borrow_buffer(spare, PANEL * self.k, f),
        }
    }

    /// Multiplies some rows of x with the columns `range`, which starts on a panel; `out` has just
    /// those columns. `widened` is the memory of [`Self::with_widened`].
    pub(super) fn compute_rows(
        &self,
        x: &[f32],
        range: std::ops::Range<usize>,
        out: &mut [f32],
        widened: &mut [f32],
    ) {
        let k = self.k;
        let step = range.len();
        let mut sums: [AccumulatorTile; TREE_LEVELS] = [[0.0; TILE_ROWS * PANEL]; TREE_LEVELS];
        for row_block in 0..(x.len() / k).div_ceil(ROW_BLOCK) {
            let first_row = row_block * ROW_BLOCK;
            let last_row = (first_row + ROW_BLOCK).min(x.len() / k);
            for column in range.clone().step_by(PANEL) {
                let panel = match self.panels {
                    PanelElements::F32(panels) => &panels[column * k..][..PANEL * k],
                    PanelElements::Bf16(panels) => {
                        widen_panel(widened, &panels[column * k..][..PANEL * k]);
                        &*widened
                    }
                };
                let columns = PANEL.min(range.end - column);
                let mut bias = [0.0f32; PANEL];
                if !self.bias.is_empty() {
                    bias[..columns].copy_from_slice(&self.bias[column..column + columns]);
                }
                let at = |row: usize| row * step + column - range.start;
                if self.segments == 1 && columns == PANEL {
                    let (x, out) = (&x[first_row * k..last_row * k], &mut out[at(first_row)..]);
                    self.compute_full_panel(x, panel, &bias, out, step);
                    continue;
                }
                for row in (first_row..last_row).step_by(TILE_ROWS) {
                    let rows = TILE_ROWS.min(last_row - row);
                    self.compute_tile(rows, &x[row * k..], panel, &mut sums);
                    store_tile(&sums[0], rows, columns, &bias, self.act, &mut out[at(row)..], step);
                }
            }
        }
        debug_assert!(range.end <= self.n);
    }

    /// Multiplies the rows of one block with a full panel, straight into `out`. All rows finish a
    /// k-block before the next one starts, so that its part of the panel stays in the L1 cache.
    fn compute_full_panel(
        &self,
        x: &[f32],
        panel: &[f32],
        bias: &[f32; PANEL],
        out: &mut [f32],
        step: usize,
    ) {
        let k = self.k;
        let rows = x.len() / k;
        for k0 in (0..k).step_by(BLOCK) {
            let length = BLOCK.min(k - k0);
            let bias = (k0 + length == k).then_some(bias);
            for row in (0..rows).step_by(TILE_ROWS) {
                let left = LhsOperand { data: &x[row * k + k0..], row_stride: k, k_stride: 1 };
                let right = RhsPanel { data: &panel[k0 * PANEL..], k_stride: PANEL };
                let target =
                    OutputTile { data: &mut out[row * step..], row_stride: step, accumulate: k0 > 0, bias };
                multiply_tile(TILE_ROWS.min(rows - row), left, right, length, target);
            }
        }
        if self.act.is_some() {
            activate_rows(out, rows, step, self.act);
        }
    }

    /// Computes one tile into `pending_tiles[0]`; the other tiles are storage for the sums of the tree.
    fn compute_tile(
        &self,
        rows: usize,
        x: &[f32],
        panel: &[f32],
        pending_tiles: &mut [AccumulatorTile; TREE_LEVELS],
    ) {
        let k = self.k / self.segments;
        let segment = |s: usize, data: &mut AccumulatorTile, add: bool| {
            let left = LhsOperand { data: &x[s * k..], row_stride: self.k, k_stride: 1 };
            let right = RhsPanel { data: &panel[s * k * PANEL..][..k * PANEL], k_stride: PANEL };
            multiply_tile(
                rows,
                left,
                right,
                k,
                OutputTile { data, row_stride: PANEL, accumulate: add, bias: None },
            );
        };
        // A binary counter: the pending tiles are the sums that correspond to the set bits of the
        // number of segments so far.
        let mut depth = 0;
        for s in 0..self.segments {
            let mut count = s + 1;
            if count.is_multiple_of(2) && k <= BLOCK {
                depth -= 1;
                segment(s, &mut pending_tiles[depth], true);
                count /= 2;
            } else {
                segment(s, &mut pending_tiles[depth], false);
            }
            while count.is_multiple_of(2) {
                let (left, right) = pending_tiles.split_at_mut(depth);
                depth -= 1;
                add_tile(&mut left[depth], &right[0]);
                count /= 2;
            }
            depth += 1;
        }
    }
}

vectorized! {
    fn widen_panel(out: &mut [f32], panel: &[u16]) {
        for (o, x) in out.iter_mut().zip(panel) {
            *o = widen_to_f32(*x);
        }
    }
}

vectorized! {
    fn add_tile(left: &mut AccumulatorTile, right: &AccumulatorTile) {
        for (l, r) in left.iter_mut().zip(right) {
            *l += *r;
        }
    }
}

vectorized! {
    /// The epilogue of a tile: adds the bias, applies the activation and stores to `out`, whose
    /// rows are `step` apart.
    fn store_tile(
        sums: &AccumulatorTile,
        rows: usize,
        columns: usize,
        bias: &[f32; PANEL],
        act: Option<Activation>,
        out: &mut [f32],
        step: usize,
    ) {
        let (sums, _) = sums.as_chunks::<PANEL>();
        for (r, sums) in sums[..rows].iter().enumerate() {
            let mut y = [0.0f32; PANEL];
            for c in 0..PANEL {
                y[c] = sums[c] + bias[c];
            }
            apply_activation(&mut y, act);
            match out[r * step..].first_chunk_mut::<PANEL>() {
                Some(out) if columns == PANEL => *out = y,
                _ => out[r * step..][..columns].copy_from_slice(&y[..columns]),
            }
        }
    }
}

vectorized! {
    /// Applies the activation to a panel's columns of `out`, whose rows are `step` apart.
    fn activate_rows(out: &mut [f32], rows: usize, step: usize, act: Option<Activation>) {
        for r in 0..rows {
            if let Some(row) = out[r * step..].first_chunk_mut::<PANEL>() {
                apply_activation(row, act);
            }
        }
    }
}

#[inline(always)]
fn apply_activation(row: &mut [f32; PANEL], act: Option<Activation>) {
    match act {
        None => {}
        Some(Activation::Silu) => row.iter_mut().for_each(|v| *v = silu(*v)),
        Some(Activation::GeluTanh) => row.iter_mut().for_each(|v| *v = gelu_tanh(*v)),
    }
}
