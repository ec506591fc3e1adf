//! Pixels as bytes. Ranks that decode send 8-bit pixels: the values of a chunk of 480 × 832 are 57 MB, its
//! bytes 14, and a rank cannot begin the next call before they have left.

use std::sync::atomic::{AtomicUsize, Ordering};

use tessera_base::Diagnostic;
use tessera_cpu::Pool;

use crate::codes::T0016;

/// Prefix of the outputs of a chunk's call with its pixels, in order.
pub(crate) const PIXELS: &str = "pixels.";

/// Pixel values that one thread converts at a time.
const VALUES_PER_BLOCK: usize = 1 << 18;
const MAX_THREADS: usize = 8;

/// Converts pixels to bytes, on threads of its own: the next call waits for the bytes, and starting threads
/// for each phase took longer than the conversion.
#[derive(Debug)]
pub(crate) struct PixelConverter {
    pool: Pool,
}

impl PixelConverter {
    /// Starts a thread per core, up to eight.
    ///
    /// # Errors
    /// T0016 if the operating system cannot start them.
    pub(crate) fn new() -> Result<PixelConverter, Diagnostic> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let pool = Pool::new(cores.min(MAX_THREADS));
        let pool =
            pool.map_err(|e| Diagnostic::error(&T0016, format!("threads that convert pixels: {e}")))?;
        Ok(PixelConverter { pool })
    }

    /// Returns a converter that uses the caller's thread alone.
    pub(crate) fn single_thread() -> PixelConverter {
        PixelConverter { pool: Pool::single_thread() }
    }

    /// Converts values in [−1, 1] to bytes. A NaN becomes 0.
    pub(crate) fn to_rgb(&self, values: &[f32]) -> Vec<u8> {
        self.convert_values(values).0
    }

    /// Converts values in [−1, 1] to bytes.
    ///
    /// # Errors
    /// The number of values that are NaN or infinite.
    pub(crate) fn to_finite_rgb(&self, values: &[f32]) -> Result<Vec<u8>, usize> {
        match self.convert_values(values) {
            (bytes, 0) => Ok(bytes),
            (_, count) => Err(count),
        }
    }

    /// Returns the bytes of values, and the number of values that are not finite.
    fn convert_values(&self, values: &[f32]) -> (Vec<u8>, usize) {
        let mut bytes = vec![0; values.len()];
        let nonfinite = AtomicUsize::new(0);
        self.pool.for_each_block(&mut bytes, VALUES_PER_BLOCK, values.len(), |i, to| {
            let from = &values[i * VALUES_PER_BLOCK..][..to.len()];
            nonfinite.fetch_add(convert_part(to, from), Ordering::Relaxed);
        });
        (bytes, nonfinite.into_inner())
    }
}

/// Values that are converted at a time, so that the compiler uses vector instructions.
const VALUES_PER_STEP: usize = 32;
/// A float of this size has no fraction: adding it rounds to a whole number.
const ROUND_TO_WHOLE: f32 = 8_388_608.0;

/// Converts values and returns how many are not finite.
fn convert_part(to: &mut [u8], from: &[f32]) -> usize {
    let (steps, rest) = from.as_chunks::<VALUES_PER_STEP>();
    let (to_steps, to_rest) = to.as_chunks_mut::<VALUES_PER_STEP>();
    let mut nonfinite = 0;
    for (to, from) in to_steps.iter_mut().zip(steps) {
        nonfinite += count_nonfinite(from);
        *to = from.map(to_byte);
    }
    to_rest.iter_mut().zip(rest).for_each(|(to, v)| *to = to_byte(*v));
    nonfinite + count_nonfinite(rest)
}

fn count_nonfinite(values: &[f32]) -> usize {
    values.iter().map(|v| u32::from(!v.is_finite())).sum::<u32>() as usize
}

/// Converts a value, rounded half up; a NaN becomes 0. The bits of a rounded float hold the byte, because the
/// conversion of a float to an integer has no fast vector instruction. Rounding a tie to an even number is
/// corrected: the difference is exact.
fn to_byte(v: f32) -> u8 {
    // `clamp` would keep a NaN.
    let v = if v >= -1.0 { v } else { -1.0 };
    let v = if v <= 1.0 { v } else { 1.0 };
    let level = (v + 1.0) * 127.5;
    let shifted = level + ROUND_TO_WHOLE;
    let is_rounded_down = level - (shifted - ROUND_TO_WHOLE) >= 0.5;
    (shifted.to_bits() + u32::from(is_rounded_down)) as u8
}

/// Returns values whose bytes are these.
pub(crate) fn from_rgb(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.iter().map(|b| f32::from(*b) / 127.5 - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_the_way_through_values() {
        let all: Vec<u8> = (0..=255).collect();
        let converter = PixelConverter::new().unwrap();
        let to_rgb = |values: &[f32]| converter.to_rgb(values);
        assert_eq!(to_rgb(&from_rgb(&all).collect::<Vec<_>>()), all);
        assert_eq!(to_rgb(&[-7.0, 7.0, f32::NAN, 0.0]), [0, 255, 0, 128]);
    }

    /// Enough values for several threads, on a machine with several cores.
    #[test]
    fn large_pictures_are_converted_in_order() {
        let mut values: Vec<f32> =
            (0..3 * VALUES_PER_BLOCK + 1).map(|i| (i % 511) as f32 / 255.0 - 1.0).collect();
        let converter = PixelConverter::new().unwrap();
        let bytes = converter.to_rgb(&values);
        assert_eq!(PixelConverter::single_thread().to_rgb(&values), bytes);
        assert!(values.iter().zip(&bytes).all(|(v, b)| to_byte(*v) == *b));
        assert!(values.iter().zip(&bytes).all(|(v, b)| ((v + 1.0) * 127.5).round() as u8 == *b));
        assert_eq!(converter.to_finite_rgb(&values), Ok(bytes));
        let last = values.len() - 1;
        values[last] = f32::INFINITY;
        assert_eq!(converter.to_finite_rgb(&values), Err(1));
    }
}
