//! Pixels as bytes. Ranks that decode send 8-bit pixels: the values of a chunk of 480 × 832 are 57 MB, its
//! bytes 14, and a rank cannot begin the next call before they have left.

/// Pixel values that one thread converts; more are shared among the cores.
const VALUES_PER_THREAD: usize = 1 << 19;

/// Converts values in [−1, 1] to bytes. A NaN becomes 0.
pub(crate) fn to_rgb(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len()];
    let convert = |to: &mut [u8], from: &[f32]| {
        // The sum is positive, so that the cast rounds it half up.
        to.iter_mut().zip(from).for_each(|(to, v)| *to = ((v.clamp(-1.0, 1.0) + 1.0) * 127.5).round() as u8);
    };
    let share = values_per_thread(values.len());
    if share >= values.len() {
        convert(&mut bytes, values);
        return bytes;
    }
    std::thread::scope(|s| {
        for (to, from) in bytes.chunks_mut(share).zip(values.chunks(share)) {
            s.spawn(move || convert(to, from));
        }
    });
    bytes
}

/// Returns values whose bytes are these.
pub(crate) fn from_rgb(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.iter().map(|b| f32::from(*b) / 127.5 - 1.0)
}

/// Returns the number of values that are NaN or infinite.
pub(crate) fn count_nonfinite(values: &[f32]) -> usize {
    let count = |part: &[f32]| part.iter().filter(|v| !v.is_finite()).count();
    let share = values_per_thread(values.len());
    if share >= values.len() {
        return count(values);
    }
    std::thread::scope(|s| {
        let parts: Vec<_> = values.chunks(share).map(|part| s.spawn(move || count(part))).collect();
        parts.into_iter().map(|part| part.join().unwrap_or(1)).sum()
    })
}

fn values_per_thread(values: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    values.div_ceil(cores).max(VALUES_PER_THREAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_the_way_through_values() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(to_rgb(&from_rgb(&all).collect::<Vec<_>>()), all);
        assert_eq!(to_rgb(&[-7.0, 7.0, f32::NAN, 0.0]), [0, 255, 0, 128]);
    }

    /// Enough values for several threads, on a machine with several cores.
    #[test]
    fn large_pictures_are_converted_in_order() {
        let mut values: Vec<f32> =
            (0..3 * VALUES_PER_THREAD + 1).map(|i| (i % 511) as f32 / 255.0 - 1.0).collect();
        let bytes = to_rgb(&values);
        assert!(values.iter().zip(&bytes).all(|(v, b)| to_rgb(&[*v]) == [*b]));
        assert_eq!(count_nonfinite(&values), 0);
        let last = values.len() - 1;
        values[last] = f32::INFINITY;
        assert_eq!(count_nonfinite(&values), 1);
    }
}
