//! Cutting a dim into contiguous pieces that differ by at most one unit.

/// Start and length, in units, of piece `at` of `parts`: the first `units % parts` pieces get one unit more.
#[must_use]
pub fn split(units: u64, parts: u32, at: u32) -> (u64, u64) {
    let (parts, at) = (u64::from(parts), u64::from(at));
    let (q, rem) = (units / parts, units % parts);
    (at * q + at.min(rem), q + u64::from(at < rem))
}

/// A dim cut over one axis, or over each block of consecutive positions of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shard {
    /// Which dim of the tensor.
    pub dim: usize,
    /// Present where the pieces are not all equal; even shards need no more than the local shape.
    pub uneven: Option<Uneven>,
    /// Positions of a block where each block holds the whole dim, cut over its members; over the whole axis where
    /// absent.
    pub ways: Option<u32>,
}

/// What a local shape alone cannot tell about an uneven shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Uneven {
    /// Global extent of the dim, in elements.
    pub extent: u64,
    /// Elements that stay together (a head, a token).
    pub unit: u64,
}

impl Shard {
    /// The shard of a dim of global `extent`, in whole `unit`s, over `parts` ranks of one axis. `None` when the extent is
    /// not a whole number of units or some rank would get nothing.
    #[must_use]
    pub fn of(dim: usize, extent: u64, unit: u64, parts: u32) -> Option<Shard> {
        if unit == 0 || !extent.is_multiple_of(unit) || extent / unit < u64::from(parts) {
            return None;
        }
        let even = (extent / unit).is_multiple_of(u64::from(parts));
        Some(Shard { dim, uneven: (!even).then_some(Uneven { extent, unit }), ways: None })
    }

    /// The same pieces over each block of `ways` positions of the axis.
    #[must_use]
    pub fn over(self, ways: Option<u32>) -> Shard {
        Shard { ways, ..self }
    }

    /// Number of pieces on an axis of this size: that of a block's positions, or the size itself.
    #[must_use]
    pub fn parts(&self, size: u32) -> u32 {
        self.ways.unwrap_or(size).max(1)
    }

    /// Start and length, in elements, of the piece at position `at` of an axis of this size. `local` is the local
    /// extent there.
    #[must_use]
    pub fn range(&self, local: u64, size: u32, at: u32) -> (u64, u64) {
        let parts = self.parts(size);
        let at = if self.ways.is_some() { at % parts } else { at };
        match self.uneven {
            None => (u64::from(at) * local, local),
            Some(u) => {
                let (start, len) = split(u.extent / u.unit, parts, at);
                (start * u.unit, len * u.unit)
            }
        }
    }

    /// Global extent of the dim on an axis of this size, given the local one of any rank.
    #[must_use]
    pub fn extent(&self, local: u64, size: u32) -> u64 {
        self.uneven.map_or(local * u64::from(self.parts(size)), |u| u.extent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_tile_the_dim(units in 1u64..500, parts in 1u32..40) {
            let mut next = 0;
            for at in 0..parts {
                let (start, len) = split(units, parts, at);
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
        let s = Shard::of(1, 60, 12, 2).unwrap();
        assert_eq!([s.range(36, 2, 0), s.range(24, 2, 1)], [(0, 36), (36, 24)]);
        assert_eq!(Shard::of(1, 60, 12, 5), Some(Shard { dim: 1, uneven: None, ways: None }));
        assert_eq!(Shard::of(1, 60, 12, 6), None);
        assert_eq!(Shard::of(1, 61, 12, 2), None);
    }

    #[test]
    fn each_block_holds_the_whole() {
        // 7 rows over blocks of 2 of an axis of 6: 4 and 3, three times.
        let s = Shard::of(0, 7, 1, 2).unwrap().over(Some(2));
        assert_eq!([0, 1, 2, 5].map(|at| s.range(0, 6, at)), [(0, 4), (4, 3), (0, 4), (4, 3)]);
        assert_eq!((s.parts(6), s.extent(4, 6)), (2, 7));
        let even = Shard { dim: 0, uneven: None, ways: Some(3) };
        assert_eq!((even.range(5, 6, 4), even.extent(5, 6)), ((5, 5), 15));
    }
}
