//! Copies shards out of whole row-major arrays, and back into them.

use std::ops::Range;

/// A shard of an array: the shape of the whole array, and start and length of the shard in each dim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ArrayShard {
    pub(crate) whole: Vec<u64>,
    pub(crate) ranges: Vec<(u64, u64)>,
}

impl ArrayShard {
    /// Returns the extents of the shard.
    pub(crate) fn shape(&self) -> Vec<u64> {
        self.ranges.iter().map(|(_, len)| *len).collect()
    }

    /// Copies the shard out of the elements of the whole array.
    ///
    /// # Panics
    /// If the array has another number of elements.
    pub(crate) fn copy_from<T: Copy>(&self, whole: &[T]) -> Vec<T> {
        let mut shard = Vec::with_capacity(self.ranges.iter().map(|(_, len)| *len as usize).product());
        self.for_each_run(|run| shard.extend_from_slice(&whole[run]));
        shard
    }

    /// Copies the elements of the shard to their places in the whole array.
    ///
    /// # Panics
    /// If the array or the shard has another number of elements.
    pub(crate) fn copy_into<T: Copy>(&self, whole: &mut [T], shard: &[T]) {
        let mut rest = shard;
        self.for_each_run(|run| {
            let (elements, behind) = rest.split_at(run.len());
            whole[run].copy_from_slice(elements);
            rest = behind;
        });
    }

    /// Visits the runs of neighbouring elements of the shard in row-major order, as ranges of the whole array.
    fn for_each_run(&self, mut visit: impl FnMut(Range<usize>)) {
        if self.ranges.iter().any(|(_, len)| *len == 0) {
            return;
        }
        // Dims that the shard has whole, at the end, lie in one run with the dim before them.
        let is_whole = |dim: &usize| self.ranges[*dim] == (0, self.whole[*dim]);
        let inner = (0..self.whole.len()).rev().take_while(is_whole).count();
        let first_inner = (self.whole.len() - inner).saturating_sub(1);
        let stride_of = |dim: usize| self.whole[dim + 1..].iter().product::<u64>();
        let run_len =
            self.ranges.get(first_inner).map_or(1, |(_, len)| len * stride_of(first_inner)) as usize;
        let base = self.ranges.get(first_inner).map_or(0, |(start, _)| start * stride_of(first_inner));
        let mut at = vec![0u64; first_inner];
        loop {
            let outer = (0..first_inner).map(|dim| (self.ranges[dim].0 + at[dim]) * stride_of(dim));
            let start = (base + outer.sum::<u64>()) as usize;
            visit(start..start + run_len);
            let Some(dim) = (0..first_inner).rev().find(|dim| at[*dim] + 1 < self.ranges[*dim].1) else {
                return;
            };
            at[dim] += 1;
            at[dim + 1..].fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(whole: &[u64], ranges: &[(u64, u64)]) -> ArrayShard {
        ArrayShard { whole: whole.to_vec(), ranges: ranges.to_vec() }
    }

    #[test]
    fn a_shard_holds_the_elements_of_its_ranges_in_order() {
        let values: Vec<u32> = (0..3 * 4 * 5).collect();
        let part = shard(&[3, 4, 5], &[(1, 2), (1, 2), (2, 3)]);
        assert_eq!(part.copy_from(&values), [27, 28, 29, 32, 33, 34, 47, 48, 49, 52, 53, 54]);
        assert_eq!(part.shape(), [2, 2, 3]);
        let rows = shard(&[3, 4, 5], &[(2, 1), (0, 4), (0, 5)]);
        assert_eq!(rows.copy_from(&values), (40..60).collect::<Vec<u32>>());
        assert_eq!(shard(&[], &[]).copy_from(&[7]), [7]);
        assert!(shard(&[3, 4], &[(1, 0), (0, 4)]).copy_from(&values[..12]).is_empty());
    }

    #[test]
    fn shards_that_cover_an_array_restore_it() {
        let values: Vec<u32> = (0..7 * 5).collect();
        let mut restored = vec![0; values.len()];
        for rows in [(0, 4), (4, 3)] {
            for columns in [(0, 2), (2, 2), (4, 1)] {
                let part = shard(&[7, 5], &[rows, columns]);
                part.copy_into(&mut restored, &part.copy_from(&values));
            }
        }
        assert_eq!(restored, values);
    }
}
