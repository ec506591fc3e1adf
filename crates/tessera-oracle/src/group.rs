//! Finds the members of a collective from the sizes of the mesh and the op's attributes alone.

use tessera_ir::{CommAxis, OpView};
use tessera_mesh::{Axis, Mesh};

/// The members of a collective's group in order of position, with the communicator's name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupMembers {
    /// Axis (`None` for the world) and subgroup size: two communicators over the same ranks do not match each other.
    name: (Option<Axis>, Option<i64>),
    pub(crate) members: Vec<usize>,
}

/// Returns the number of ranks outside the mesh, which precede its ranks and use collectives over
/// `world` only.
pub(crate) fn outside_ranks(mesh: &Mesh) -> usize {
    mesh.outside_count() as usize
}

/// Returns the number of ranks in the world: those outside the mesh and those of the mesh.
pub(crate) fn total_ranks(mesh: &Mesh) -> usize {
    outside_ranks(mesh) + axis_sizes(mesh).iter().product::<usize>()
}

/// Returns the ranks that an op names in its attributes and the size of its subgroups; `None` if the
/// op names no ranks.
pub(crate) fn stated_group(view: &OpView) -> Option<(CommAxis, Option<i64>)> {
    use OpView as V;
    match view {
        V::AllReduce(v) => Some((v.axis, v.group_size)),
        V::AllGather(v) => Some((v.axis, v.group_size)),
        V::ReduceScatter(v) => Some((v.axis, v.group_size)),
        V::AllToAll(v) => Some((v.axis, v.group_size)),
        V::HaloExchange(v) => Some((v.axis, v.group_size)),
        V::Broadcast(v) => Some((v.axis, v.group_size)),
        V::Send(v) => Some((v.axis, v.group_size)),
        V::Recv(v) => Some((v.axis, v.group_size)),
        V::TakeShard(v) => Some((v.axis, v.group_size)),
        V::Pad(v) => Some((v.axis, v.group_size)),
        _ => None,
    }
}

/// Returns the group that an op of `rank` uses; `None` if the attributes name none.
pub(crate) fn group_of(mesh: &Mesh, view: &OpView, rank: usize) -> Option<GroupMembers> {
    let (axis, subgroup_size) = stated_group(view)?;
    let axis = match axis {
        CommAxis::World => None,
        CommAxis::Axis(axis) => Some(axis),
    };
    let mut members: Vec<usize> = match axis {
        None => (0..total_ranks(mesh)).collect(),
        Some(axis) => {
            let at = Axis::ALL.iter().position(|a| *a == axis)?;
            let sizes = axis_sizes(mesh);
            let stride: usize = sizes[..at].iter().product();
            let inside = rank.checked_sub(outside_ranks(mesh))?;
            let first = inside - inside / stride % sizes[at] * stride;
            (0..sizes[at]).map(|i| outside_ranks(mesh) + first + i * stride).collect()
        }
    };
    if let Some(w) = subgroup_size {
        let w = usize::try_from(w).ok().filter(|w| *w > 0)?;
        let mine = members.iter().position(|m| *m == rank)? / w;
        members = members.chunks(w).nth(mine)?.to_vec();
    }
    Some(GroupMembers { name: (axis, subgroup_size), members })
}

/// Returns the sizes of the axes, fastest first.
fn axis_sizes(mesh: &Mesh) -> [usize; 4] {
    Axis::ALL.map(|a| mesh.axis_size(a) as usize)
}
