//! How one tensor lies over the mesh: per axis replicated, sharded over a dim, or partial.

use std::fmt;

use crate::{Axis, Coord, Mesh, Shard};

/// How partial values of several ranks combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reduction {
    /// Addition, in rank order in f32.
    Sum,
    /// Addition along one binary tree over the ranks: neighbours first.
    Tree,
    /// Maximum.
    Max,
}

impl Reduction {
    /// The spelling in IR text.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Tree => "tree",
            Reduction::Max => "max",
        }
    }

    /// The reduction of a name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Reduction> {
        [Reduction::Sum, Reduction::Tree, Reduction::Max].into_iter().find(|r| r.name() == name)
    }
}

/// A tensor's layout on one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum AxisLayout {
    /// Every rank of the axis holds the same values.
    #[default]
    Replicated,
    /// Each rank holds a contiguous piece of a dim.
    Shard(Shard),
    /// Each rank holds a term; the value is their reduction.
    Partial {
        /// How the terms combine.
        reduction: Reduction,
        /// Positions of a block where the terms of each block combine to the whole value; those of the whole axis
        /// where absent.
        ways: Option<u32>,
    },
}

impl AxisLayout {
    /// Terms over the whole axis.
    #[must_use]
    pub fn partial(reduction: Reduction) -> AxisLayout {
        AxisLayout::Partial { reduction, ways: None }
    }

    /// Positions of a block, where the layout is over blocks of the axis.
    #[must_use]
    pub fn ways(self) -> Option<u32> {
        match self {
            AxisLayout::Replicated => None,
            AxisLayout::Shard(Shard { ways, .. }) | AxisLayout::Partial { ways, .. } => ways,
        }
    }
}

impl fmt::Display for AxisLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AxisLayout::Replicated => return f.write_str("replicated"),
            AxisLayout::Shard(Shard { dim, uneven: None, .. }) => write!(f, "shard({dim}")?,
            AxisLayout::Shard(Shard { dim, uneven: Some(u), .. }) => {
                write!(f, "shard({dim}, of={}, unit={}", u.extent, u.unit)?;
            }
            AxisLayout::Partial { reduction, .. } => write!(f, "partial({}", reduction.name())?,
        }
        self.ways().map_or(Ok(()), |w| write!(f, ", ways={w}"))?;
        f.write_str(")")
    }
}

/// A tensor's layout on all four axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Layout {
    axes: [AxisLayout; 4],
}

impl Layout {
    /// Replicated everywhere.
    pub const REPLICATED: Layout = Layout { axes: [AxisLayout::Replicated; 4] };

    /// Layout on an axis.
    #[must_use]
    pub fn on(&self, axis: Axis) -> AxisLayout {
        self.axes[axis as usize]
    }

    /// The same layout with another one on `axis`.
    #[must_use]
    pub fn with(mut self, axis: Axis, layout: AxisLayout) -> Layout {
        self.axes[axis as usize] = layout;
        self
    }

    /// Whether every rank holds the same values.
    #[must_use]
    pub fn is_replicated(&self) -> bool {
        *self == Layout::REPLICATED
    }

    /// The first axis over which the value is partial, if any, and how its terms combine.
    #[must_use]
    pub fn partial(&self) -> Option<(Axis, Reduction)> {
        Axis::ALL.into_iter().find_map(|a| match self.on(a) {
            AxisLayout::Partial { reduction, .. } => Some((a, reduction)),
            _ => None,
        })
    }

    /// Global shape of a tensor with this local shape.
    #[must_use]
    pub fn global(&self, local: &[u64], mesh: &Mesh) -> Vec<u64> {
        let mut shape = local.to_vec();
        for axis in Axis::ALL {
            if let AxisLayout::Shard(s) = self.on(axis)
                && let Some(extent) = shape.get_mut(s.dim)
            {
                *extent = s.extent(*extent, mesh.size(axis));
            }
        }
        shape
    }

    /// Start and length of every dim of the piece at `coord`, in the global tensor. Exact for layouts that cut
    /// a dim over at most one axis.
    #[must_use]
    pub fn ranges(&self, local: &[u64], mesh: &Mesh, coord: Coord) -> Vec<(u64, u64)> {
        let mut out: Vec<(u64, u64)> = local.iter().map(|n| (0, *n)).collect();
        for axis in Axis::ALL {
            if let AxisLayout::Shard(s) = self.on(axis)
                && let Some(r) = out.get_mut(s.dim)
            {
                *r = s.range(r.1, mesh.size(axis), coord.on(axis));
            }
        }
        out
    }

    /// Local shape at `coord` of a global tensor under this layout.
    #[must_use]
    pub fn local(&self, global: &[u64], mesh: &Mesh, coord: Coord) -> Vec<u64> {
        let mut shape = global.to_vec();
        for axis in Axis::ALL {
            if let AxisLayout::Shard(s) = self.on(axis)
                && let Some(n) = shape.get_mut(s.dim)
            {
                let even = *n / u64::from(s.parts(mesh.size(axis)));
                *n = s.range(even, mesh.size(axis), coord.on(axis)).1;
            }
        }
        shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_and_global_shapes_agree() {
        let mesh: Mesh = "tp=2,pp=3".parse().unwrap();
        let col = AxisLayout::Shard(Shard::of(1, 60, 12, 2).unwrap());
        let row = AxisLayout::Shard(Shard::of(0, 7, 1, 3).unwrap());
        let layout = Layout::REPLICATED.with(Axis::Tp, col).with(Axis::Pp, row);
        let mut cells = std::collections::BTreeSet::new();
        for rank in mesh.iter() {
            let c = mesh.coord_of(rank);
            let local = layout.local(&[7, 60], &mesh, c);
            assert_eq!(layout.global(&local, &mesh), [7, 60]);
            let r = layout.ranges(&local, &mesh, c);
            for i in r[0].0..r[0].0 + r[0].1 {
                for j in r[1].0..r[1].0 + r[1].1 {
                    assert!(cells.insert((i, j)));
                }
            }
        }
        assert_eq!(cells.len(), 7 * 60);
    }

    #[test]
    fn every_block_holds_the_whole() {
        let mesh: Mesh = "tp=6,dp=2,outside=1".parse().unwrap();
        let layout = Layout::REPLICATED
            .with(Axis::Tp, AxisLayout::Shard(Shard::of(0, 7, 1, 3).unwrap().over(Some(3))))
            .with(Axis::Dp, AxisLayout::Shard(Shard::of(1, 4, 1, 2).unwrap()));
        for block in [0, 3] {
            let mut rows = Vec::new();
            for at in block..block + 3 {
                let c = Coord::default().with(Axis::Tp, at);
                let local = layout.local(&[7, 4], &mesh, c);
                assert_eq!(layout.global(&local, &mesh), [7, 4]);
                let (start, len) = layout.ranges(&local, &mesh, c)[0];
                rows.extend(start..start + len);
            }
            assert_eq!(rows, (0..7).collect::<Vec<_>>());
        }
        // A rank outside stands at the origin, and holds what is replicated whole.
        assert_eq!(
            Layout::REPLICATED.ranges(&[7, 4], &mesh, mesh.coord_of(crate::Rank(0))),
            [(0, 7), (0, 4)]
        );
    }

    #[test]
    fn layouts_in_words() {
        let words = |l: AxisLayout| l.to_string();
        let s = Shard::of(0, 7, 1, 2).unwrap();
        assert_eq!(words(AxisLayout::Shard(s)), "shard(0, of=7, unit=1)");
        assert_eq!(words(AxisLayout::Shard(s.over(Some(2)))), "shard(0, of=7, unit=1, ways=2)");
        assert_eq!(
            words(AxisLayout::Shard(Shard { dim: 0, uneven: None, ways: Some(2) })),
            "shard(0, ways=2)"
        );
        assert_eq!(words(AxisLayout::partial(Reduction::Sum)), "partial(sum)");
        let block = AxisLayout::Partial { reduction: Reduction::Max, ways: Some(4) };
        assert_eq!((words(block), block.ways()), ("partial(max, ways=4)".to_string(), Some(4)));
    }

    #[test]
    fn replicated_costs_every_rank_the_whole() {
        let mesh: Mesh = "tp=8,ep=9".parse().unwrap();
        for r in mesh.iter() {
            assert_eq!(Layout::REPLICATED.local(&[4, 6], &mesh, mesh.coord_of(r)), [4, 6]);
        }
    }
}
