//! A rectangular slice of a row-major tensor as runs of contiguous bytes.

use std::ops::Range;

/// Explains why ranges do not fit a shape; returns `None` if they fit.
pub(crate) fn range_mismatch(shape: &[u64], ranges: &[Range<u64>]) -> Option<String> {
    if shape.len() != ranges.len() {
        return Some(format!("{} ranges for {} dims", ranges.len(), shape.len()));
    }
    let (dim, (extent, r)) =
        shape.iter().zip(ranges).enumerate().find(|(_, (n, r))| r.start > r.end || r.end > **n)?;
    Some(format!("range {}..{} of dim {dim}, whose extent is {extent}", r.start, r.end))
}

/// Returns the number of elements in the slice. The ranges must fit an existing tensor, so the
/// multiplication cannot overflow.
pub(crate) fn element_count(ranges: &[Range<u64>]) -> u64 {
    if ranges.iter().any(Range::is_empty) { 0 } else { ranges.iter().map(|r| r.end - r.start).product() }
}

/// Iterates over the byte ranges of a slice in row-major order, relative to the tensor's first
/// byte. Trailing dims that are taken completely are merged, so a slice of rows is one run.
pub(crate) struct ByteRuns {
    /// Dims to iterate over: first index, extent of the range, stride in bytes.
    outer: Vec<(u64, u64, u64)>,
    /// For each entry of `outer`, the index of the next run, counted from the first index of the
    /// range.
    indices: Vec<u64>,
    /// Offset of the run's first byte within one step of the innermost outer dim.
    base: u64,
    /// Length of a run in bytes, equal for all runs of the slice.
    run_bytes: u64,
    remaining: u64,
}

impl ByteRuns {
    /// Creates the iterator. `ranges` must fit `shape`, and the tensor's size in bytes must fit
    /// `u64`.
    pub(crate) fn new(shape: &[u64], ranges: &[Range<u64>], item_bytes: u64) -> ByteRuns {
        if element_count(ranges) == 0 {
            return ByteRuns { outer: Vec::new(), indices: Vec::new(), base: 0, run_bytes: 0, remaining: 0 };
        }
        // From here on, every extent is at least 1, so strides are at most the tensor's size.
        let mut stride = item_bytes;
        let mut run = item_bytes;
        let mut dims = shape.iter().zip(ranges).rev();
        let mut base = 0;
        for (extent, r) in dims.by_ref() {
            base = r.start * stride;
            run = (r.end - r.start) * stride;
            stride *= extent;
            if r.end - r.start != *extent {
                break;
            }
        }
        let mut outer = Vec::new();
        for (extent, r) in dims {
            outer.push((r.start, r.end - r.start, stride));
            stride *= extent;
        }
        outer.reverse();
        let left = outer.iter().map(|(_, n, _)| n).product();
        ByteRuns { indices: vec![0; outer.len()], outer, base, run_bytes: run, remaining: left }
    }
}

impl Iterator for ByteRuns {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        self.remaining = self.remaining.checked_sub(1)?;
        let steps =
            self.outer.iter().zip(&self.indices).map(|((first, _, stride), at)| (first + at) * stride);
        let start = self.base + steps.sum::<u64>();
        for ((_, extent, _), at) in self.outer.iter().zip(&mut self.indices).rev() {
            *at += 1;
            if *at < *extent {
                break;
            }
            *at = 0;
        }
        Some(start as usize..(start + self.run_bytes) as usize)
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn whole_trailing_dims_merge() {
        let runs = |s: &[u64], r: &[Range<u64>]| ByteRuns::new(s, r, 2).collect::<Vec<_>>();
        assert_eq!(runs(&[4, 3, 5], &[1..3, 0..3, 0..5]), [30..90]);
        assert_eq!(runs(&[4, 3, 5], &[1..2, 1..3, 0..5]), [40..60]);
        assert_eq!(runs(&[4, 3], &[2..4, 1..2]), [14..16, 20..22]);
        assert_eq!(runs(&[], &[]), [0..2]);
        assert_eq!(runs(&[4, 3], &[2..2, 1..2]), []);
        assert_eq!(runs(&[u64::MAX, 0], &[0..u64::MAX, 0..0]), []);
    }

    #[test]
    fn ranges_that_do_not_fit_are_explained() {
        assert_eq!(range_mismatch(&[4, 3], &[0..4, 3..3]), None);
        assert_eq!(range_mismatch(&[4, 3], &[0..4]).unwrap(), "1 ranges for 2 dims");
        assert_eq!(range_mismatch(&[4, 3], &[0..4, 1..4]).unwrap(), "range 1..4 of dim 1, whose extent is 3");
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = 3..2;
        assert!(range_mismatch(&[4], &[reversed]).is_some());
    }
}
