//! The strength of an input video from chunk to chunk, which much motion lowers.
//!
//! A step with much noise generates the motion of its chunk anew, and fast motion then blurs. StreamDiffusionV2
//! therefore begins a chunk with much motion with less noise (arXiv 2511.07399, `compute_noise_scale_and_step`
//! of its code).

/// RMS difference of two frames, whose pixels are −1 to 1, from which on motion has its whole effect.
const FULL_MOTION: f64 = 0.2;
/// By how much motion can lower a strength. [`VideoStrength::lowest`] depends on it.
pub(crate) const MOTION_EFFECT: f64 = 0.1;
/// Share of a chunk's own motion in its strength; the rest is the strength of the chunk before.
const OWN_SHARE: f64 = 0.9;

/// The strengths of the chunks of a video: all the same, or lower for chunks with much motion.
#[derive(Debug)]
pub(crate) struct VideoStrength {
    base: f64,
    /// `None` if all chunks have the base.
    motion: Option<MotionState>,
}

/// What the strength of the next chunk depends on besides its frames.
#[derive(Debug, Default)]
struct MotionState {
    /// Strength of the chunk before.
    previous: f64,
    /// Last frame of the chunk before.
    frame: Vec<f32>,
}

impl VideoStrength {
    pub(crate) fn new(base: f64, follows_motion: bool) -> VideoStrength {
        VideoStrength { base, motion: follows_motion.then(MotionState::default) }
    }

    /// Returns the lowest strength that a chunk can have.
    pub(crate) fn lowest_possible(&self) -> f64 {
        if self.motion.is_some() { self.base - MOTION_EFFECT } else { self.base }
    }

    /// Returns the strength of the next chunk, of `pixels` [frames, `frame_len`]. The first chunk of a scene has
    /// the base: no frame precedes it, and no chunk's strength.
    pub(crate) fn next_strength(&mut self, pixels: &[f32], frame_len: usize, opens_scene: bool) -> f64 {
        let Some(state) = &mut self.motion else { return self.base };
        state.previous = if opens_scene {
            self.base
        } else {
            let motion = (largest_difference(&state.frame, pixels, frame_len) / FULL_MOTION).clamp(0.0, 1.0);
            (self.base - MOTION_EFFECT * motion) * OWN_SHARE + (1.0 - OWN_SHARE) * state.previous
        };
        state.frame = pixels[pixels.len().saturating_sub(frame_len)..].to_vec();
        state.previous
    }
}

/// Returns the largest RMS difference between a frame and the one before it. The first frame follows `before`.
fn largest_difference(before: &[f32], pixels: &[f32], frame_len: usize) -> f64 {
    let frames = || pixels.chunks_exact(frame_len.max(1));
    let pairs = std::iter::once(before).chain(frames()).zip(frames());
    let square = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).powi(2);
    let rms = |(a, b): (&[f32], &[f32])| (a.iter().zip(b).map(square).sum::<f64>() / b.len() as f64).sqrt();
    pairs.map(rms).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames of four values, each with one value everywhere.
    fn frames(values: &[f32]) -> Vec<f32> {
        values.iter().flat_map(|v| [*v; 4]).collect()
    }

    fn assert_close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found} for {expected}");
    }

    #[test]
    fn motion_lowers_the_strength_as_the_published_formula_does() {
        let mut strength = VideoStrength::new(0.8, true);
        // The first chunk of a scene moves and has the base.
        assert_eq!(strength.next_strength(&frames(&[-1.0, 1.0]), 4, true), 0.8);
        // (0.8 − 0.1 · 0) · 0.9 + 0.1 · 0.8
        assert_close(strength.next_strength(&frames(&[1.0, 1.0]), 4, false), 0.8);
        // A difference of 0.125 is d = 0.625: (0.8 − 0.0625) · 0.9 + 0.08
        assert_close(strength.next_strength(&frames(&[0.875, 0.875]), 4, false), 0.743_75);
        // From 0.2 on, d = 1: 0.7 · 0.9 + 0.1 · 0.74375, and then 0.1 of the strength before
        assert_close(strength.next_strength(&frames(&[0.875, -0.875]), 4, false), 0.704_375);
        assert_close(strength.next_strength(&frames(&[0.875, 0.625]), 4, false), 0.700_437_5);
        // A still chunk returns to the base but for a tenth.
        assert_close(strength.next_strength(&frames(&[0.625, 0.625]), 4, false), 0.790_043_75);
        assert_eq!(strength.next_strength(&frames(&[0.0, 0.5]), 4, true), 0.8, "a scene begins anew");
    }

    #[test]
    fn the_largest_difference_within_a_chunk_counts_and_the_frame_before_it() {
        let base = VideoStrength::new(0.5, true);
        assert_eq!((base.lowest_possible(), VideoStrength::new(0.5, false).lowest_possible()), (0.4, 0.5));
        // Half of the values differ by 0.25: the RMS difference is 0.25 / √2.
        let half = [0.0, 0.0, 0.25, 0.25];
        let moved = [frames(&[0.0]), half.to_vec(), half.to_vec()].concat();
        assert_close(largest_difference(&frames(&[0.0]), &moved, 4), 0.25 / 2.0f64.sqrt());
        assert_close(largest_difference(&frames(&[-0.5]), &moved, 4), 0.5);
    }

    #[test]
    fn without_motion_every_chunk_has_the_base() {
        let mut strength = VideoStrength::new(0.6, false);
        for opens_scene in [true, false, false] {
            assert_eq!(strength.next_strength(&frames(&[-1.0, 1.0]), 4, opens_scene), 0.6);
        }
    }
}
