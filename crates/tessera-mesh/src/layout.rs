//! Layout of a tensor over the mesh: per axis replicated, sharded over a dim, or partial.

use std::fmt;

use crate::{Axis, Coord, Mesh, Shard};

/// Reduction that combines the partial values of several ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reduction {
    /// Addition in rank order, in f32.
    Sum,
    /// Addition along a binary tree over the ranks, neighbours first.
    Tree,
    /// Elementwise maximum; its result does not depend on the order of the ranks.
    Max,
}

impl Reduction {
    /// Returns the name used in IR text.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Tree => "tree",
            Reduction::Max => "max",
        }
    }

    /// Parses the name used in IR text.
    #[must_use]
    pub fn parse(name: &str) -> Option<Reduction> {
        [Reduction::Sum, Reduction::Tree, Reduction::Max].into_iter().find(|r| r.name() == name)
    }
}

/// Layout of a tensor on one mesh axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum AxisLayout {
    /// Every rank of the axis holds the same values.
    #[default]
    Replicated,
    /// Each rank holds a contiguous part of a dim.
    Shard(Shard),
    /// Each rank holds a term; the value is the reduction of all terms.
    Partial {
        /// Reduction that combines the terms; the collective that reduces them must name the same
        /// one.
        reduction: Reduction,
        /// Subgroup size, if the terms of each subgroup combine to the whole value; `None` if the
        /// terms of the whole axis do.
        subgroup_size: Option<u32>,
    },
}

impl AxisLayout {
    /// Creates a layout that is partial over the whole axis.
    #[must_use]
    pub fn new_partial(reduction: Reduction) -> AxisLayout {
        AxisLayout::Partial { reduction, subgroup_size: None }
    }

    /// Returns the subgroup size, if the layout applies to subgroups of the axis.
    #[must_use]
    pub fn subgroup_size(self) -> Option<u32> {
        match self {
            AxisLayout::Replicated => None,
            AxisLayout::Shard(Shard { subgroup_size, .. }) | AxisLayout::Partial { subgroup_size, .. } => {
                subgroup_size
            }
        }
    }
}

impl fmt::Display for AxisLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AxisLayout::Replicated => return f.write_str("replicated"),
            AxisLayout::Shard(Shard { dim, uneven: None, .. }) => write!(f, "shard({dim}")?,
            AxisLayout::Shard(Shard { dim, uneven: Some(u), .. }) => {
                write!(f, "shard({dim}, extent={}, unit={}", u.extent, u.unit)?;
            }
            AxisLayout::Partial { reduction, .. } => write!(f, "partial({}", reduction.name())?,
        }
        self.subgroup_size().map_or(Ok(()), |w| write!(f, ", group_size={w}"))?;
        f.write_str(")")
    }
}

/// Layout of a tensor on all four axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Layout {
    axes: [AxisLayout; 4],
}

impl Layout {
    /// The layout that is replicated on every axis.
    pub const REPLICATED: Layout = Layout { axes: [AxisLayout::Replicated; 4] };

    /// Returns whether the tensor is replicated, sharded or partial on an axis.
    #[must_use]
    pub fn on_axis(&self, axis: Axis) -> AxisLayout {
        self.axes[axis as usize]
    }

    /// Returns the same layout with `layout` on `axis`.
    #[must_use]
    pub fn with_axis(mut self, axis: Axis, layout: AxisLayout) -> Layout {
        self.axes[axis as usize] = layout;
        self
    }

    /// Returns whether every rank holds the same values.
    #[must_use]
    pub fn is_replicated(&self) -> bool {
        *self == Layout::REPLICATED
    }

    /// Returns the first axis over which the value is partial, with its reduction.
    #[must_use]
    pub fn partial_axis(&self) -> Option<(Axis, Reduction)> {
        Axis::ALL.into_iter().find_map(|a| match self.on_axis(a) {
            AxisLayout::Partial { reduction, .. } => Some((a, reduction)),
            _ => None,
        })
    }

    /// Returns the global shape of a tensor with this local shape.
    #[must_use]
    pub fn global_shape(&self, local: &[u64], mesh: &Mesh) -> Vec<u64> {
        let mut shape = local.to_vec();
        for axis in Axis::ALL {
            if let AxisLayout::Shard(s) = self.on_axis(axis)
                && let Some(extent) = shape.get_mut(s.dim)
            {
                *extent = s.global_extent(*extent, mesh.axis_size(axis));
            }
        }
        shape
    }

    /// Returns the start and length of every dim of the shard at `coord`, in the global tensor.
    /// Exact for layouts that shard each dim over at most one axis.
    #[must_use]
    pub fn global_ranges(&self, local: &[u64], mesh: &Mesh, coord: Coord) -> Vec<(u64, u64)> {
        let mut out: Vec<(u64, u64)> = local.iter().map(|n| (0, *n)).collect();
        for axis in Axis::ALL {
            if let AxisLayout::Shard(s) = self.on_axis(axis)
                && let Some(r) = out.get_mut(s.dim)
            {
                *r = s.global_range(r.1, mesh.axis_size(axis), coord.on_axis(axis));
            }
        }
        out
    }

    /// Returns the local shape at `coord` of a global tensor with this layout.
    #[must_use]
    pub fn local_shape(&self, global: &[u64], mesh: &Mesh, coord: Coord) -> Vec<u64> {
        let mut shape = global.to_vec();
        for axis in Axis::ALL {
            if let AxisLayout::Shard(s) = self.on_axis(axis)
                && let Some(n) = shape.get_mut(s.dim)
            {
                let even = *n / u64::from(s.part_count(mesh.axis_size(axis)));
                *n = s.global_range(even, mesh.axis_size(axis), coord.on_axis(axis)).1;
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
        let col = AxisLayout::Shard(Shard::new(1, 60, 12, 2).unwrap());
        let row = AxisLayout::Shard(Shard::new(0, 7, 1, 3).unwrap());
        let layout = Layout::REPLICATED.with_axis(Axis::Tp, col).with_axis(Axis::Pp, row);
        let mut cells = std::collections::BTreeSet::new();
        for rank in mesh.iter() {
            let c = mesh.coord_of(rank);
            let local = layout.local_shape(&[7, 60], &mesh, c);
            assert_eq!(layout.global_shape(&local, &mesh), [7, 60]);
            let r = layout.global_ranges(&local, &mesh, c);
            for i in r[0].0..r[0].0 + r[0].1 {
                for j in r[1].0..r[1].0 + r[1].1 {
                    assert!(cells.insert((i, j)));
                }
            }
        }
        assert_eq!(cells.len(), 7 * 60);
    }

    #[test]
    fn every_subgroup_holds_the_whole_tensor() {
        let mesh: Mesh = "tp=6,dp=2,outside=1".parse().unwrap();
        let layout = Layout::REPLICATED
            .with_axis(
                Axis::Tp,
                AxisLayout::Shard(Shard::new(0, 7, 1, 3).unwrap().with_subgroup_size(Some(3))),
            )
            .with_axis(Axis::Dp, AxisLayout::Shard(Shard::new(1, 4, 1, 2).unwrap()));
        for block in [0, 3] {
            let mut rows = Vec::new();
            for at in block..block + 3 {
                let c = Coord::default().with_axis(Axis::Tp, at);
                let local = layout.local_shape(&[7, 4], &mesh, c);
                assert_eq!(layout.global_shape(&local, &mesh), [7, 4]);
                let (start, len) = layout.global_ranges(&local, &mesh, c)[0];
                rows.extend(start..start + len);
            }
            assert_eq!(rows, (0..7).collect::<Vec<_>>());
        }
        // A rank outside the mesh gets the origin as its coordinate, and holds all of a replicated
        // tensor.
        assert_eq!(
            Layout::REPLICATED.global_ranges(&[7, 4], &mesh, mesh.coord_of(crate::Rank(0))),
            [(0, 7), (0, 4)]
        );
    }

    #[test]
    fn layouts_print_in_ir_syntax() {
        let words = |l: AxisLayout| l.to_string();
        let s = Shard::new(0, 7, 1, 2).unwrap();
        assert_eq!(words(AxisLayout::Shard(s)), "shard(0, extent=7, unit=1)");
        assert_eq!(
            words(AxisLayout::Shard(s.with_subgroup_size(Some(2)))),
            "shard(0, extent=7, unit=1, group_size=2)"
        );
        assert_eq!(
            words(AxisLayout::Shard(Shard { dim: 0, uneven: None, subgroup_size: Some(2) })),
            "shard(0, group_size=2)"
        );
        assert_eq!(words(AxisLayout::new_partial(Reduction::Sum)), "partial(sum)");
        let block = AxisLayout::Partial { reduction: Reduction::Max, subgroup_size: Some(4) };
        assert_eq!(
            (words(block), block.subgroup_size()),
            ("partial(max, group_size=4)".to_string(), Some(4))
        );
    }

    #[test]
    fn a_replicated_tensor_is_whole_on_every_rank() {
        let mesh: Mesh = "tp=8,ep=9".parse().unwrap();
        for r in mesh.iter() {
            assert_eq!(Layout::REPLICATED.local_shape(&[4, 6], &mesh, mesh.coord_of(r)), [4, 6]);
        }
    }
}
