//! Convolution over frames, rows and columns, as one matmul per row of the result.

use super::matmul::{PackedMatmul, packed_panels};
use super::{MatmulWeight, Scratch, borrow_buffer};
use crate::Pool;

/// The frames that a convolution reads, and how its kernel moves over them.
#[derive(Debug, Clone, Copy)]
pub struct ConvSpec<'a> {
    /// Frames `[t, h, w, c]` that precede `x`; empty if there are none.
    pub history: &'a [f32],
    /// The rows above and below each frame of the history and of `x`; zeros if `None`.
    pub halo: Option<&'a [f32]>,
    /// Frames of zeros that precede `x`, where there is no history.
    pub pad_frames: usize,
    /// Height, width and channels of a frame.
    pub frame: [usize; 3],
    /// Extents of the kernel: frames, rows and columns.
    pub kernel: [usize; 3],
    /// Steps of the kernel: frames, rows and columns.
    pub stride: [usize; 3],
    /// Rows and columns of zeros before each frame; rows of the halo if there is one.
    pub pad_before: usize,
}

/// Computes `out[t', h', w', m]` from `x[t, h, w, c]` and `w[m, kt·kh·kw·c]`; `out_rows` are h' and w'.
///
/// The bits of a cell depend on the cells under its kernel alone, and neither on the extents of the frames
/// nor on threads.
///
/// # Panics
/// Panics if a length does not match.
#[allow(clippy::too_many_arguments, reason = "operands, extents and memory of one kernel")]
pub fn conv3d(
    pool: &Pool,
    scratch: &mut Scratch,
    out: &mut [f32],
    x: &[f32],
    w: MatmulWeight<'_>,
    bias: Option<&[f32]>,
    [out_rows, out_columns, m]: [usize; 3],
    spec: &ConvSpec<'_>,
) {
    let k = spec.kernel.iter().product::<usize>() * spec.frame[2];
    assert!(out.len().is_multiple_of(out_rows * out_columns * m) && bias.is_none_or(|b| b.len() == m));
    let work = 2 * out.len() * k;
    let panels = packed_panels(pool, &mut scratch.packed, w, (m, k));
    let matmul = PackedMatmul { panels, n: m, k, bias: bias.unwrap_or(&[]), act: None, segments: 1 };
    let spare = &scratch.spare;
    pool.for_each_block(out, out_columns * m, work, |i, o| {
        borrow_buffer(spare, out_columns * k, |cells| {
            spec.gather_cells(x, (i / out_rows, i % out_rows), cells);
            matmul.with_widened(spare, |widened| matmul.compute_rows(cells, 0..m, o, widened));
        });
    });
}

impl<'a> ConvSpec<'a> {
    /// Copies the cells under the kernel for each column of a row of the result.
    fn gather_cells(&self, x: &[f32], (out_frame, out_row): (usize, usize), cells: &mut [f32]) {
        let ([_, _, c], [kt, kh, kw]) = (self.frame, self.kernel);
        let k = kt * kh * kw * c;
        for (tap, (dt, dy)) in (0..kt).flat_map(|t| (0..kh).map(move |y| (t, y))).enumerate() {
            let line = self.find_line(
                x,
                out_frame * self.stride[0] + dt,
                (out_row * self.stride[1] + dy).checked_sub(self.pad_before),
            );
            for (column, cell) in cells.chunks_exact_mut(k).enumerate() {
                let to = &mut cell[tap * kw * c..(tap + 1) * kw * c];
                let first = column * self.stride[2];
                match line {
                    Some(line) => copy_window(to, line, first, self.pad_before, c),
                    None => to.fill(0.0),
                }
            }
        }
    }

    /// Returns a row of frame `at` of the history and x together, or of the frame's halo: `None` is the row
    /// above row 0. Returns `None` for a row of zeros.
    fn find_line<'x>(&self, x: &'x [f32], at: usize, row: Option<usize>) -> Option<&'x [f32]>
    where
        'a: 'x,
    {
        let [height, width, c] = self.frame;
        let beside = match row {
            Some(row) if row < height => {
                return self.find_frame(x, at).map(|f| &f[row * width * c..(row + 1) * width * c]);
            }
            Some(row) if row > height => return None,
            Some(_) => 1,
            None => 0,
        };
        let line = 2 * at.checked_sub(self.pad_frames)? + beside;
        self.halo?.get(line * width * c..(line + 1) * width * c)
    }

    /// Returns frame `at` of the history and x together; `None` for a frame of zeros.
    fn find_frame<'x>(&self, x: &'x [f32], at: usize) -> Option<&'x [f32]>
    where
        'a: 'x,
    {
        let size = self.frame.iter().product::<usize>();
        let before = self.pad_frames + self.history.len() / size;
        match at.checked_sub(before) {
            Some(at) => x.get(at * size..(at + 1) * size),
            None => self.history.get(at * size..(at + 1) * size),
        }
    }
}

/// Copies the window of a line that starts `pad` cells before cell `first`; cells outside are zeros.
fn copy_window(to: &mut [f32], line: &[f32], first: usize, pad: usize, c: usize) {
    let cells = to.len() / c;
    let skipped = pad.saturating_sub(first).min(cells);
    let start = (first + skipped - pad.min(first + skipped)) * c;
    let copied = line.len().saturating_sub(start).min((cells - skipped) * c);
    to[..skipped * c].fill(0.0);
    to[skipped * c..][..copied].copy_from_slice(&line[start.min(line.len())..][..copied]);
    to[skipped * c + copied..].fill(0.0);
}
