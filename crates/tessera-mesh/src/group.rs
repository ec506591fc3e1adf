//! Groups: the ranks that take part in a collective. A group spans a mesh axis, a subgroup of an
//! axis, or the world.

use std::fmt;

use crate::{Axis, Mesh, Rank};

/// The kind of group that a collective runs over. Together with a rank it determines the members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    /// Ranks that differ only in their position on one axis. With `subgroup_size`, the positions of
    /// the axis are split into runs of that many consecutive positions, and each run is a group:
    /// `tp/2` on an axis of size 4 has the groups {0, 1} and {2, 3}.
    Axis {
        /// Mesh axis along which the members differ.
        axis: Axis,
        /// Number of positions per subgroup; `None` for the whole axis.
        subgroup_size: Option<u32>,
    },
    /// Every rank in rank order, including the ranks outside the mesh.
    World,
}

impl Group {
    /// Creates the group that spans a whole axis.
    #[must_use]
    pub fn whole_axis(axis: Axis) -> Group {
        Group::Axis { axis, subgroup_size: None }
    }

    /// Parses `tp`, `tp/2` or `world`, as [`Group`] is displayed.
    #[must_use]
    pub fn parse(text: &str) -> Option<Group> {
        if text == "world" {
            return Some(Group::World);
        }
        let (axis, size) = text.split_once('/').map_or((text, None), |(axis, size)| (axis, Some(size)));
        let axis = Axis::ALL.into_iter().find(|a| a.name() == axis)?;
        let subgroup_size = match size {
            Some(size) => Some(size.parse().ok()?),
            None => None,
        };
        Some(Group::Axis { axis, subgroup_size })
    }
}

impl fmt::Display for Group {
    /// Writes `tp`, `tp/2` or `world`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Group::Axis { axis, subgroup_size: None } => write!(f, "{axis}"),
            Group::Axis { axis, subgroup_size: Some(w) } => write!(f, "{axis}/{w}"),
            Group::World => f.write_str("world"),
        }
    }
}

impl Mesh {
    /// Returns whether subgroups of this size divide an axis into several groups of several ranks
    /// each.
    #[must_use]
    pub fn has_subgroups(&self, axis: Axis, subgroup_size: u32) -> bool {
        let size = self.axis_size(axis);
        subgroup_size >= 2 && subgroup_size < size && size.is_multiple_of(subgroup_size)
    }

    /// Returns the subgroup sizes that divide an axis (see [`Mesh::has_subgroups`]), in ascending
    /// order.
    #[must_use]
    pub fn subgroup_sizes(&self, axis: Axis) -> Vec<u32> {
        (2..self.axis_size(axis)).filter(|w| self.has_subgroups(axis, *w)).collect()
    }

    /// Returns the members of a rank's group, including the rank, ordered by position. Empty if the
    /// rank is in no group of this kind: a rank outside the mesh for an axis, a rank beyond the
    /// world, or a subgroup size that does not divide the axis.
    #[must_use]
    pub fn group_members(&self, rank: Rank, group: Group) -> Vec<Rank> {
        match (group, self.group_position(rank, group)) {
            (_, None) => Vec::new(),
            (Group::World, _) => self.iter().collect(),
            (Group::Axis { axis, .. }, Some(at)) => {
                let c = self.coord_of(rank);
                let first = c.on_axis(axis) - at;
                (first..first + self.group_size(group)).map(|i| self.rank_at(c.with_axis(axis, i))).collect()
            }
        }
    }

    /// Returns the position of a rank among the members of its group, or `None` if it is in no
    /// group of this kind.
    #[must_use]
    pub fn group_position(&self, rank: Rank, group: Group) -> Option<u32> {
        match group {
            Group::World => (rank.0 < self.world_size()).then_some(rank.0),
            _ if !self.contains(rank) => None,
            Group::Axis { axis, subgroup_size: None } => Some(self.coord_of(rank).on_axis(axis)),
            Group::Axis { axis, subgroup_size: Some(w) } => {
                self.has_subgroups(axis, w).then(|| self.coord_of(rank).on_axis(axis) % w)
            }
        }
    }

    /// Returns every group of an axis. Together they partition the ranks of the mesh.
    #[must_use]
    pub fn axis_groups(&self, axis: Axis) -> Vec<Vec<Rank>> {
        let first = |r: &Rank| self.contains(*r) && self.coord_of(*r).on_axis(axis) == 0;
        self.iter().filter(first).map(|r| self.group_members(r, Group::whole_axis(axis))).collect()
    }

    /// Returns the number of members of each group of this kind.
    #[must_use]
    pub fn group_size(&self, group: Group) -> u32 {
        match group {
            Group::Axis { axis, subgroup_size } => subgroup_size.unwrap_or(self.axis_size(axis)),
            Group::World => self.world_size(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(of: &[u32]) -> Vec<Rank> {
        of.iter().copied().map(Rank).collect()
    }

    #[test]
    fn groups_print_in_ir_syntax() {
        let block = Group::Axis { axis: Axis::Tp, subgroup_size: Some(2) };
        assert_eq!(
            [Group::whole_axis(Axis::Pp), block, Group::World].map(|g| g.to_string()),
            ["pp", "tp/2", "world"]
        );
        for group in [Group::whole_axis(Axis::Pp), block, Group::World] {
            assert_eq!(Group::parse(&group.to_string()), Some(group));
        }
        assert_eq!(["tp/", "tp/x", "xp", ""].map(Group::parse), [None; 4]);
    }

    #[test]
    fn subgroups_partition_an_axis() {
        let mesh: Mesh = "tp=6, dp=2, outside=1".parse().unwrap();
        let thirds = Group::Axis { axis: Axis::Tp, subgroup_size: Some(2) };
        assert_eq!(mesh.group_members(Rank(1), thirds), ranks(&[1, 2]));
        assert_eq!(mesh.group_members(Rank(4), thirds), ranks(&[3, 4]));
        assert_eq!(mesh.group_members(Rank(11), thirds), ranks(&[11, 12]));
        assert_eq!((mesh.subgroup_sizes(Axis::Tp), mesh.subgroup_sizes(Axis::Dp)), (vec![2, 3], vec![]));
        for group in [thirds, Group::whole_axis(Axis::Tp), Group::whole_axis(Axis::Dp), Group::World] {
            for rank in mesh.iter() {
                let members = mesh.group_members(rank, group);
                let at = members.iter().position(|m| *m == rank).map(|i| i as u32);
                assert_eq!(mesh.group_position(rank, group), at, "{rank} in {group}");
                if !members.is_empty() {
                    assert_eq!(members.len(), mesh.group_size(group) as usize);
                }
                assert!(members.iter().all(|m| mesh.group_members(*m, group) == members));
            }
        }
    }

    #[test]
    fn ranks_outside_the_mesh_are_only_members_of_the_world() {
        let mesh: Mesh = "tp=2, outside=1".parse().unwrap();
        assert_eq!(mesh.group_members(Rank(0), Group::whole_axis(Axis::Tp)), []);
        assert_eq!(mesh.group_members(Rank(3), Group::whole_axis(Axis::Tp)), []);
        assert_eq!(mesh.group_members(Rank(2), Group::whole_axis(Axis::Tp)), ranks(&[1, 2]));
        assert_eq!(mesh.group_members(Rank(2), Group::World), ranks(&[0, 1, 2]));
        assert_eq!((mesh.group_position(Rank(3), Group::World), mesh.group_size(Group::World)), (None, 3));
    }

    #[test]
    fn invalid_subgroup_sizes_have_no_members() {
        let mesh: Mesh = "tp=6".parse().unwrap();
        for subgroup_size in [0, 1, 4, 6, 12, u32::MAX] {
            let group = Group::Axis { axis: Axis::Tp, subgroup_size: Some(subgroup_size) };
            assert!(
                !mesh.has_subgroups(Axis::Tp, subgroup_size) && mesh.group_members(Rank(0), group).is_empty(),
                "{subgroup_size}"
            );
        }
    }
}
