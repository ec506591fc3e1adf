//! Who takes part in a collective, from the sizes of the mesh and the op's constants alone.

use tessera_ir::Op;
use tessera_mesh::{Axis, Mesh};

/// The members of a collective's group in order of position, and the name of its communicator.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Group {
    /// Axis and ways: two communicators over the same ranks do not meet.
    name: (String, Option<i64>),
    pub(crate) members: Vec<usize>,
}

/// Ranks before those of the mesh, which take part in collectives over `world` alone.
pub(crate) fn outside(mesh: &Mesh) -> usize {
    mesh.outside() as usize
}

/// All ranks of a run.
pub(crate) fn ranks(mesh: &Mesh) -> usize {
    outside(mesh) + sizes(mesh).iter().product::<usize>()
}

/// The group that `op` of `rank` calls; `None` where the constants name none.
pub(crate) fn of(mesh: &Mesh, op: &Op, rank: usize) -> Option<Group> {
    let axis = op.str("axis")?;
    let mut members: Vec<usize> = if axis == "world" {
        (0..ranks(mesh)).collect()
    } else {
        let at = Axis::ALL.iter().position(|a| a.name() == axis)?;
        let sizes = sizes(mesh);
        let stride: usize = sizes[..at].iter().product();
        let inside = rank.checked_sub(outside(mesh))?;
        let first = inside - inside / stride % sizes[at] * stride;
        (0..sizes[at]).map(|i| outside(mesh) + first + i * stride).collect()
    };
    let ways = op.int("ways");
    if let Some(w) = ways {
        let w = usize::try_from(w).ok().filter(|w| *w > 0)?;
        let mine = members.iter().position(|m| *m == rank)? / w;
        members = members.chunks(w).nth(mine)?.to_vec();
    }
    Some(Group { name: (axis.to_string(), ways), members })
}

/// Sizes of the axes, fastest first.
fn sizes(mesh: &Mesh) -> [usize; 4] {
    Axis::ALL.map(|a| mesh.size(a) as usize)
}
