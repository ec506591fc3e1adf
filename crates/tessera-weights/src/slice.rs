//! A rectangular slice of a row-major tensor as runs of contiguous bytes.

use std::ops::Range;

/// Why ranges do not fit a shape, or nothing if they do.
pub(crate) fn misfit(shape: &[u64], ranges: &[Range<u64>]) -> Option<String> {
    if shape.len() != ranges.len() {
        return Some(format!("{} ranges for {} dims", ranges.len(), shape.len()));
    }
    let (dim, (extent, r)) =
        shape.iter().zip(ranges).enumerate().find(|(_, (n, r))| r.start > r.end || r.end > **n)?;
    Some(format!("range {}..{} of dim {dim}, whose extent is {extent}", r.start, r.end))
}

/// Number of elements in the slice. The ranges must fit a tensor that exists, so the product cannot overflow.
pub(crate) fn elements(ranges: &[Range<u64>]) -> u64 {
    if ranges.iter().any(Range::is_empty) { 0 } else { ranges.iter().map(|r| r.end - r.start).product() }
}

/// The byte ranges of a slice in row-major order, relative to the tensor's first byte. Trailing dims that are
/// taken whole are merged, so a slice of rows is one run.
pub(crate) struct Runs {
    /// Dims that must be walked: first index, extent of the range, stride in bytes.
    outer: Vec<(u64, u64, u64)>,
    /// Position within each outer range.
    at: Vec<u64>,
    /// Offset of the run's first byte within the innermost walked step.
    base: u64,
    /// Bytes of one run.
    run: u64,
    left: u64,
}

impl Runs {
    /// `ranges` fit `shape` and the tensor's bytes fit `u64`.
    pub(crate) fn new(shape: &[u64], ranges: &[Range<u64>], item_bytes: u64) -> Runs {
        if elements(ranges) == 0 {
            return Runs { outer: Vec::new(), at: Vec::new(), base: 0, run: 0, left: 0 };
        }
        // From here every extent is at least 1, so strides are at most the tensor's size.
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
        Runs { at: vec![0; outer.len()], outer, base, run, left }
    }

    /// How many runs are left.
    pub(crate) fn left(&self) -> u64 {
        self.left
    }
}

impl Iterator for Runs {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        self.left = self.left.checked_sub(1)?;
        let steps = self.outer.iter().zip(&self.at).map(|((first, _, stride), at)| (first + at) * stride);
        let start = self.base + steps.sum::<u64>();
        for ((_, extent, _), at) in self.outer.iter().zip(&mut self.at).rev() {
            *at += 1;
            if *at < *extent {
                break;
            }
            *at = 0;
        }
        Some(start as usize..(start + self.run) as usize)
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn whole_trailing_dims_merge() {
        let runs = |s: &[u64], r: &[Range<u64>]| Runs::new(s, r, 2).collect::<Vec<_>>();
        assert_eq!(runs(&[4, 3, 5], &[1..3, 0..3, 0..5]), [30..90]);
        assert_eq!(runs(&[4, 3, 5], &[1..2, 1..3, 0..5]), [40..60]);
        assert_eq!(runs(&[4, 3], &[2..4, 1..2]), [14..16, 20..22]);
        assert_eq!(runs(&[], &[]), [0..2]);
        assert_eq!(runs(&[4, 3], &[2..2, 1..2]), []);
        assert_eq!(runs(&[u64::MAX, 0], &[0..u64::MAX, 0..0]), []);
    }

    #[test]
    fn ranges_that_do_not_fit_are_explained() {
        assert_eq!(misfit(&[4, 3], &[0..4, 3..3]), None);
        assert_eq!(misfit(&[4, 3], &[0..4]).unwrap(), "1 ranges for 2 dims");
        assert_eq!(misfit(&[4, 3], &[0..4, 1..4]).unwrap(), "range 1..4 of dim 1, whose extent is 3");
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = 3..2;
        assert!(misfit(&[4], &[reversed]).is_some());
    }
}
