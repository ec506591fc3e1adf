//! Rearranges pixels into latent tokens and back (space-time to depth): a codec without weights.

/// The dimensions of a chunk of pixels and of its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PixelGeometry {
    /// Number of latent frames in the chunk.
    pub frames: usize,
    /// Latent height, even: a token covers 2 × 2 latents.
    pub height: usize,
    /// Latent width, even.
    pub width: usize,
    /// Number of pixels per latent in time, height and width.
    pub stride: [usize; 3],
}

impl PixelGeometry {
    /// Returns the number of channels of a latent: `stride` pixels of three colours.
    #[must_use]
    pub fn channel_count(&self) -> usize {
        self.stride.iter().product::<usize>() * 3
    }

    /// Returns (rows, row length) of the tokens: one row per frame and 2 × 2 latents.
    #[must_use]
    pub fn token_shape(&self) -> (usize, usize) {
        (self.frames * (self.height / 2) * (self.width / 2), 4 * self.channel_count())
    }

    /// Calls `f(pixel offset, token offset)` for every run of `stride[2] * 3` elements that is
    /// contiguous in both layouts.
    fn for_each_run(&self, mut f: impl FnMut(usize, usize)) {
        let [st, sh, sw] = self.stride;
        let (rows_high, row_wide) = (self.height * sh, self.width * sw * 3);
        let mut token = 0;
        for frame in 0..self.frames {
            for (h, w) in (0..self.height / 2).flat_map(|h| (0..self.width / 2).map(move |w| (h, w))) {
                for (ph, pw) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    for (dt, dy) in (0..st).flat_map(|t| (0..sh).map(move |y| (t, y))) {
                        let row = (frame * st + dt) * rows_high + (2 * h + ph) * sh + dy;
                        f(row * row_wide + (2 * w + pw) * sw * 3, token);
                        token += sw * 3;
                    }
                }
            }
        }
    }

    fn check(&self, pixels: usize, tokens: usize) {
        let (rows, length) = self.token_shape();
        assert!(self.height.is_multiple_of(2) && self.width.is_multiple_of(2));
        assert!(pixels == rows * length && tokens == pixels, "{pixels} pixels, {tokens} in tokens: {self:?}");
    }
}

/// Writes `tokens[F·(H/2)·(W/2), (ph, pw, C)]` from `pixels[F·st, H·sh, W·sw, 3]`; channel `((dt·sh
/// + dy)·sw + dx)·3 + colour` is the fastest.
pub fn space_time_to_depth(tokens: &mut [f32], pixels: &[f32], geometry: PixelGeometry) {
    geometry.check(pixels.len(), tokens.len());
    let run = geometry.stride[2] * 3;
    geometry.for_each_run(|p, t| tokens[t..t + run].copy_from_slice(&pixels[p..p + run]));
}

/// Inverts [`space_time_to_depth`] and clamps the pixels to −1..=1; NaN is kept.
pub fn depth_to_space_time(pixels: &mut [f32], tokens: &[f32], geometry: PixelGeometry) {
    geometry.check(pixels.len(), tokens.len());
    let run = geometry.stride[2] * 3;
    geometry.for_each_run(|p, t| {
        for (o, x) in pixels[p..p + run].iter_mut().zip(&tokens[t..t + run]) {
            *o = x.clamp(-1.0, 1.0);
        }
    });
}
