//! The ranks that meet in one collective: those of an axis, of a block of it, or all.

use std::fmt;

use crate::{Axis, Mesh, Rank};

/// Which ranks a collective is over, seen from each of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Group {
    /// Ranks that differ on one axis alone. With `ways`, the axis's positions are cut into blocks of so many
    /// consecutive ones, and each block is a group: `tp/2` on an axis of 4 has positions 0, 1 and 2, 3.
    Axis {
        /// The axis.
        axis: Axis,
        /// Positions of a block; all of the axis where absent.
        ways: Option<u32>,
    },
    /// Every rank, those outside the mesh included, by rank.
    World,
}

impl Group {
    /// All positions of an axis.
    #[must_use]
    pub fn of(axis: Axis) -> Group {
        Group::Axis { axis, ways: None }
    }
}

impl fmt::Display for Group {
    /// `tp`, `tp/2` or `world`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Group::Axis { axis, ways: None } => write!(f, "{axis}"),
            Group::Axis { axis, ways: Some(w) } => write!(f, "{axis}/{w}"),
            Group::World => f.write_str("world"),
        }
    }
}

impl Mesh {
    /// Whether blocks of so many positions cut an axis into more than one group of more than one rank.
    #[must_use]
    pub fn cuts(&self, axis: Axis, ways: u32) -> bool {
        let size = self.size(axis);
        ways >= 2 && ways < size && size.is_multiple_of(ways)
    }

    /// The blocks that [`Mesh::cuts`] an axis, smallest first.
    #[must_use]
    pub fn cuts_of(&self, axis: Axis) -> Vec<u32> {
        (2..self.size(axis)).filter(|w| self.cuts(axis, *w)).collect()
    }

    /// The members of a rank's group, itself included, in order of their position. Empty where the rank is no
    /// member: outside the mesh for an axis, beyond the world, or where blocks do not cut the axis.
    #[must_use]
    pub fn members(&self, rank: Rank, group: Group) -> Vec<Rank> {
        match (group, self.position(rank, group)) {
            (_, None) => Vec::new(),
            (Group::World, _) => self.iter().collect(),
            (Group::Axis { axis, .. }, Some(at)) => {
                let c = self.coord_of(rank);
                let first = c.on(axis) - at;
                (first..first + self.group_size(group)).map(|i| self.rank_at(c.with(axis, i))).collect()
            }
        }
    }

    /// A rank's position among its group's members, if it is one.
    #[must_use]
    pub fn position(&self, rank: Rank, group: Group) -> Option<u32> {
        match group {
            Group::World => (rank.0 < self.ranks()).then_some(rank.0),
            _ if !self.contains(rank) => None,
            Group::Axis { axis, ways: None } => Some(self.coord_of(rank).on(axis)),
            Group::Axis { axis, ways: Some(w) } => {
                self.cuts(axis, w).then(|| self.coord_of(rank).on(axis) % w)
            }
        }
    }

    /// Number of members of each group of this kind.
    #[must_use]
    pub fn group_size(&self, group: Group) -> u32 {
        match group {
            Group::Axis { axis, ways } => ways.unwrap_or(self.size(axis)),
            Group::World => self.ranks(),
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
    fn groups_in_words() {
        let block = Group::Axis { axis: Axis::Tp, ways: Some(2) };
        assert_eq!(
            [Group::of(Axis::Pp), block, Group::World].map(|g| g.to_string()),
            ["pp", "tp/2", "world"]
        );
    }

    #[test]
    fn blocks_partition_an_axis() {
        let mesh: Mesh = "tp=6, dp=2, outside=1".parse().unwrap();
        let thirds = Group::Axis { axis: Axis::Tp, ways: Some(2) };
        assert_eq!(mesh.members(Rank(1), thirds), ranks(&[1, 2]));
        assert_eq!(mesh.members(Rank(4), thirds), ranks(&[3, 4]));
        assert_eq!(mesh.members(Rank(11), thirds), ranks(&[11, 12]));
        assert_eq!((mesh.cuts_of(Axis::Tp), mesh.cuts_of(Axis::Dp)), (vec![2, 3], vec![]));
        for group in [thirds, Group::of(Axis::Tp), Group::of(Axis::Dp), Group::World] {
            for rank in mesh.iter() {
                let members = mesh.members(rank, group);
                let at = members.iter().position(|m| *m == rank).map(|i| i as u32);
                assert_eq!(mesh.position(rank, group), at, "{rank} in {group}");
                if !members.is_empty() {
                    assert_eq!(members.len(), mesh.group_size(group) as usize);
                }
                assert!(members.iter().all(|m| mesh.members(*m, group) == members));
            }
        }
    }

    #[test]
    fn ranks_outside_are_members_of_the_world_alone() {
        let mesh: Mesh = "tp=2, outside=1".parse().unwrap();
        assert_eq!(mesh.members(Rank(0), Group::of(Axis::Tp)), []);
        assert_eq!(mesh.members(Rank(2), Group::of(Axis::Tp)), ranks(&[1, 2]));
        assert_eq!(mesh.members(Rank(2), Group::World), ranks(&[0, 1, 2]));
        assert_eq!((mesh.position(Rank(3), Group::World), mesh.group_size(Group::World)), (None, 3));
    }

    #[test]
    fn blocks_that_do_not_cut_have_no_members() {
        let mesh: Mesh = "tp=6".parse().unwrap();
        for ways in [0, 1, 4, 6, 12, u32::MAX] {
            let group = Group::Axis { axis: Axis::Tp, ways: Some(ways) };
            assert!(!mesh.cuts(Axis::Tp, ways) && mesh.members(Rank(0), group).is_empty(), "{ways}");
        }
    }
}
