//! shim
use tessera_ir::Op;
use tessera_mesh::{Axis, Mesh, Rank};
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Group {
    Axis { axis: Axis, ways: Option<u32> },
    World,
}
impl std::fmt::Display for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Group::Axis { axis, ways: None } => write!(f, "{axis}"),
            Group::Axis { axis, ways: Some(w) } => write!(f, "{axis}/{w}"),
            Group::World => f.write_str("world"),
        }
    }
}
pub(crate) trait OpGroup {
    fn group(&self) -> Option<Group>;
}
impl OpGroup for Op {
    fn group(&self) -> Option<Group> {
        Some(Group::Axis { axis: self.axis()?, ways: None })
    }
}
pub(crate) trait MeshGroup {
    fn members(&self, rank: Rank, group: Group) -> Vec<Rank>;
    fn position(&self, rank: Rank, group: Group) -> Option<u32>;
    fn group_size(&self, g: Group) -> u32;
}
impl MeshGroup for Mesh {
    fn members(&self, rank: Rank, group: Group) -> Vec<Rank> {
        match group {
            Group::Axis { axis, .. } => self.group_of(rank, axis),
            Group::World => self.iter().collect(),
        }
    }
    fn position(&self, rank: Rank, group: Group) -> Option<u32> {
        match group {
            Group::Axis { axis, .. } => Some(self.coord_of(rank).on(axis)),
            Group::World => Some(rank.0),
        }
    }
    fn group_size(&self, g: Group) -> u32 {
        match g {
            Group::Axis { axis, .. } => self.size(axis),
            Group::World => self.ranks(),
        }
    }
}
