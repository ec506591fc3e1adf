//! Sharding of a dim into contiguous parts whose lengths differ by at most one unit.

/// Returns the start and length, in units, of part `at` of `parts`. The first `units % parts` parts
/// get one extra unit.
#[must_use]
pub fn split_units(units: u64, parts: u32, at: u32) -> (u64, u64) {
    let (parts, at) = (u64::from(parts), u64::from(at));
    let (q, rem) = (units / parts, units % parts);
    (at * q + at.min(rem), q + u64::from(at < rem))
}

/// Sharding of a dim over one axis, or over each subgroup of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shard {
    /// Index of the sharded dim in the tensor's shape, from 0.
    pub dim: usize,
    /// Global extent and unit of an uneven shard. `None` for an even shard, which is determined by
    /// the local shape.
    pub uneven: Option<Uneven>,
    /// Subgroup size, if each subgroup holds the whole dim, sharded over its members; `None` if the
    /// dim is sharded over the whole axis.
    pub subgroup_size: Option<u32>,
}

/// Properties of an uneven shard that a local shape does not determine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uneven {
    /// Global extent of the dim, in elements.
    pub extent: u64,
    /// Number of consecutive elements that stay together (a head, a token).
    pub unit: u64,
}

impl Shard {
    /// Creates the shard of a dim of global `extent` over `parts` ranks of one axis, in whole
    /// multiples of `unit`. Returns `None` if the extent is not a multiple of the unit, or if a
    /// rank would get nothing.
    #[must_use]
    pub fn new(dim: usize, extent: u64, unit: u64, parts: u32) -> Option<Shard> {
        if unit == 0 || !extent.is_multiple_of(unit) || extent / unit < u64::from(parts) {
            return None;
        }
        let even = (extent / unit).is_multiple_of(u64::from(parts));
        Some(Shard { dim, uneven: (!even).then_some(Uneven { extent, unit }), subgroup_size: None })
    }

    /// Returns the same sharding, applied to each subgroup of the axis.
    #[must_use]
    pub fn with_subgroup_size(self, subgroup_size: Option<u32>) -> Shard {
        Shard { subgroup_size, ..self }
    }

    /// Returns the number of parts on an axis of this size: the subgroup size if there is one,
    /// otherwise the size of the axis.
    #[must_use]
    pub fn part_count(&self, size: u32) -> u32 {
        self.subgroup_size.unwrap_or(size).max(1)
    }

    /// Returns the start and length, in elements, of the part at position `at` of an axis of this
    /// size. `local` is the local extent at that position.
    #[must_use]
    pub fn global_range(&self, local: u64, size: u32, at: u32) -> (u64, u64) {
        let parts = self.part_count(size);
        let at = if self.subgroup_size.is_some() { at % parts } else { at };
        match self.uneven {
            None => (u64::from(at) * local, local),
            Some(u) => {
                let (start, len) = split_units(u.extent / u.unit, parts, at);
                (start * u.unit, len * u.unit)
            }
        }
    }

    /// Returns the global extent of the dim on an axis of this size, given the local extent of any
    /// rank.
    #[must_use]
    pub fn global_extent(&self, local: u64, size: u32) -> u64 {
        self.uneven.map_or(local * u64::from(self.part_count(size)), |u| u.extent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_cover_the_dim(units in 1u64..500, parts in 1u32..40) {
            let mut next = 0;
            for at in 0..parts {
                let (start, len) = split_units(units, parts, at);
                prop_assert_eq!(start, next);
                prop_assert!(len >= units / u64::from(parts) && len <= units / u64::from(parts) + 1);
                next = start + len;
            }
            prop_assert_eq!(next, units);
        }
    }

    #[test]
    fn heads_stay_whole() {
        // 5 heads of 12 over 2 ranks: 36 and 24.
        let s = Shard::new(1, 60, 12, 2).unwrap();
        assert_eq!([s.global_range(36, 2, 0), s.global_range(24, 2, 1)], [(0, 36), (36, 24)]);
        assert_eq!(Shard::new(1, 60, 12, 5), Some(Shard { dim: 1, uneven: None, subgroup_size: None }));
        assert_eq!(Shard::new(1, 60, 12, 6), None);
        assert_eq!(Shard::new(1, 61, 12, 2), None);
    }

    #[test]
    fn each_subgroup_holds_the_whole_dim() {
        // 7 rows over blocks of 2 of an axis of 6: 4 and 3, three times.
        let s = Shard::new(0, 7, 1, 2).unwrap().with_subgroup_size(Some(2));
        assert_eq!([0, 1, 2, 5].map(|at| s.global_range(0, 6, at)), [(0, 4), (4, 3), (0, 4), (4, 3)]);
        assert_eq!((s.part_count(6), s.global_extent(4, 6)), (2, 7));
        let even = Shard { dim: 0, uneven: None, subgroup_size: Some(3) };
        assert_eq!((even.global_range(5, 6, 4), even.global_extent(5, 6)), ((5, 5), 15));
    }
}
