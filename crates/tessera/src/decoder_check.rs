//! The comparison of a fast decoder with the exact one: the first frame of every scene is decoded by both.

use tessera_base::Diagnostic;

use crate::codes::T0085;

/// Lowest peak signal-to-noise ratio in decibels at which a fast decoder goes on. Half a percent of a frame's
/// range is 46 dB, three percent are 30 dB, where differences become visible.
pub(crate) const MIN_PSNR_DB: f64 = 30.0;

/// Returns the peak signal-to-noise ratio of 8-bit pixels in decibels: 10 · log₁₀(255² / mean square error).
/// Infinite if all are equal.
pub(crate) fn psnr_db(pixels: &[u8], exact: &[u8]) -> f64 {
    let square = |(a, b): (&u8, &u8)| u64::from(a.abs_diff(*b)).pow(2);
    let sum: u64 = pixels.iter().zip(exact).map(square).sum();
    10.0 * (255.0 * 255.0 * exact.len() as f64 / sum as f64).log10()
}

/// Compares the first frame of a scene with its exact decode, and returns the ratio in decibels.
///
/// # Errors
/// T0085 if the frames differ by more than a fast decoder may.
pub(crate) fn compare_with_exact(chunk: u32, pixels: &[u8], exact: &[u8]) -> Result<f64, Diagnostic> {
    let frame = pixels.get(..exact.len()).unwrap_or_default();
    let ratio = if frame.is_empty() { f64::NAN } else { psnr_db(frame, exact) };
    if ratio >= MIN_PSNR_DB {
        return Ok(ratio);
    }
    let message = format!(
        "the fast decoder's first frame of chunk {chunk} has a PSNR of {ratio:.1} dB to the exact one, and {MIN_PSNR_DB:.0} dB \
         is the least"
    );
    Err(Diagnostic::error(&T0085, message).with_hint("decode with --quality exact"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_that_of_the_mean_square_error() {
        assert_eq!(psnr_db(&[1, 2, 3], &[1, 2, 3]), f64::INFINITY);
        // Mean squares of 1 and of 255².
        assert!((psnr_db(&[0, 10], &[1, 11]) - 48.1308).abs() < 1e-4);
        assert_eq!(psnr_db(&[0, 255], &[255, 0]), 0.0);
    }

    #[test]
    fn a_frame_that_differs_too_much_ends_the_run() {
        let exact = [100; 12];
        // Only the first frame counts: the exact decode has no more.
        let pixels: Vec<u8> = [[105; 12], [0; 12]].concat();
        assert!((compare_with_exact(3, &pixels, &exact).unwrap() - 34.1514).abs() < 1e-4);
        let found = compare_with_exact(3, &[109; 24], &exact).unwrap_err();
        assert_eq!(found.code.id, "T0085");
        assert!(found.message.contains("chunk 3 has a PSNR of 29.0 dB"), "{}", found.message);
        assert!(compare_with_exact(0, &[], &exact).is_err(), "no frame was decoded");
    }
}
