//! Rearranges frames `[t, h, w, c]`: repeats rows and columns, moves channels to frames, and converts
//! between a grid and the tokens of its patches.

/// Writes each row of `x[t, h, w, c]` `scale[0]` times and each column `scale[1]` times; `frame` is w and c.
pub fn upsample_nearest(out: &mut [f32], x: &[f32], [width, c]: [usize; 2], scale: [usize; 2]) {
    let out_line = width * scale[1] * c;
    for (line, lines) in x.chunks_exact(width * c).zip(out.chunks_exact_mut(out_line * scale[0])) {
        let (first, others) = lines.split_at_mut(out_line);
        for (cell, copies) in line.chunks_exact(c).zip(first.chunks_exact_mut(c * scale[1])) {
            copies.chunks_exact_mut(c).for_each(|copy| copy.copy_from_slice(cell));
        }
        others.chunks_exact_mut(out_line).for_each(|copy| copy.copy_from_slice(first));
    }
}

/// Splits the channels of each frame of `cells` cells into `parts` frames.
pub fn channels_to_frames(out: &mut [f32], x: &[f32], cells: usize, parts: usize, c: usize) {
    for (frame, frames) in x.chunks_exact(cells * parts * c).zip(out.chunks_exact_mut(cells * parts * c)) {
        for (part, to) in frames.chunks_exact_mut(cells * c).enumerate() {
            for (from, to) in frame.chunks_exact(parts * c).zip(to.chunks_exact_mut(c)) {
                to.copy_from_slice(&from[part * c..(part + 1) * c]);
            }
        }
    }
}

/// Extents of a grid and of the patches into which it is split.
#[derive(Debug, Clone, Copy)]
pub struct PatchGrid {
    /// Rows and columns of the grid.
    pub extents: [usize; 2],
    /// Channels of a cell.
    pub channels: usize,
    /// Rows and columns of a patch, which divide those of the grid.
    pub patch: [usize; 2],
}

impl PatchGrid {
    /// Calls `f(offset in the grid, offset in the tokens)` for each line of `patch[1]` cells, which is
    /// contiguous in both.
    fn for_each_line(&self, elements: usize, mut f: impl FnMut(usize, usize)) {
        let ([h, w], c, [ph, pw]) = (self.extents, self.channels, self.patch);
        let mut token = 0;
        for frame in 0..elements / (h * w * c) {
            for (row, column) in (0..h / ph).flat_map(|y| (0..w / pw).map(move |x| (y, x))) {
                for line in 0..ph {
                    f(((frame * h + row * ph + line) * w + column * pw) * c, token);
                    token += pw * c;
                }
            }
        }
    }
}

/// Writes the tokens `[t·(h/ph)·(w/pw), ph·pw·c]` of a grid `[t, h, w, c]`.
pub fn patchify(tokens: &mut [f32], grid: &[f32], spec: PatchGrid) {
    let line = spec.patch[1] * spec.channels;
    spec.for_each_line(grid.len(), |g, t| tokens[t..t + line].copy_from_slice(&grid[g..g + line]));
}

/// Inverts [`patchify`].
pub fn unpatchify(grid: &mut [f32], tokens: &[f32], spec: PatchGrid) {
    let line = spec.patch[1] * spec.channels;
    spec.for_each_line(tokens.len(), |g, t| grid[g..g + line].copy_from_slice(&tokens[t..t + line]));
}

/// Computes `x · scale + shift` per channel, or `(x − shift) / scale` if `inverse`.
pub fn scale_shift(out: &mut [f32], x: &[f32], scale: &[f32], shift: &[f32], inverse: bool) {
    for (out, x) in out.chunks_exact_mut(scale.len()).zip(x.chunks_exact(scale.len())) {
        for (((out, x), scale), shift) in out.iter_mut().zip(x).zip(scale).zip(shift) {
            *out = if inverse { (x - shift) / scale } else { x * scale + shift };
        }
    }
}
