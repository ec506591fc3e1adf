//! Finds the members of a collective from the sizes of the mesh and the op's attributes alone.

use tessera_ir::Op;
use tessera_mesh::{Axis, Mesh};

/// The members of a collective's group in order of position, with the communicator's name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupMembers {
    /// Axis and subgroup size: two communicators over the same ranks do not match each other.
    name: (String, Option<i64>),
    pub(crate) members: Vec<usize>,
}

/// Returns the number of ranks outside the mesh, which precede its ranks and use collectives over
/// `world` only.
pub(crate) fn outside_ranks(mesh: &Mesh) -> usize {
    mesh.outside_count() as usize
}

/// Returns the number of all ranks.
pub(crate) fn total_ranks(mesh: &Mesh) -> usize {
    outside_ranks(mesh) + axis_sizes(mesh).iter().product::<usize>()
}

/// Returns the group that `op` of `rank` uses; `None` if the attributes name none.
pub(crate) fn group_of(mesh: &Mesh, op: &Op, rank: usize) -> Option<GroupMembers> {
    let axis = op.str_attr("axis")?;
    let mut members: Vec<usize> = if axis == "world" {
        (0..total_ranks(mesh)).collect()
    } else {
        let at = Axis::ALL.iter().position(|a| a.name() == axis)?;
        let sizes = axis_sizes(mesh);
        let stride: usize = sizes[..at].iter().product();
        let inside = rank.checked_sub(outside_ranks(mesh))?;
        let first = inside - inside / stride % sizes[at] * stride;
        (0..sizes[at]).map(|i| outside_ranks(mesh) + first + i * stride).collect()
    };
    let subgroup_size = op.int_attr("group_size");
    if let Some(w) = subgroup_size {
        let w = usize::try_from(w).ok().filter(|w| *w > 0)?;
        let mine = members.iter().position(|m| *m == rank)? / w;
        members = members.chunks(w).nth(mine)?.to_vec();
    }
    Some(GroupMembers { name: (axis.to_string(), subgroup_size), members })
}

/// Returns the sizes of the axes, fastest first.
fn axis_sizes(mesh: &Mesh) -> [usize; 4] {
    Axis::ALL.map(|a| mesh.axis_size(a) as usize)
}
