//! Which ranks share a program: coordinates of tp that hold pieces of the same sizes, by stage.

use tessera_ir::{Program, RoleRanks, Type};
use tessera_mesh::{Axis, AxisLayout, Mesh, Rank, Uneven};

/// Coordinates of tp whose uneven pieces are of the same sizes, and their programs by stage and phase.
pub(crate) struct Kinds {
    pub(crate) sizes: Vec<u64>,
    pub(crate) coordinates: Vec<u32>,
    pub(crate) per_stage: Vec<Vec<Program>>,
}

/// What a program holds pieces of whose sizes differ over tp.
pub(crate) fn uneven_pieces(p: &Program) -> Vec<(Uneven, Option<u32>)> {
    let types = p.values.iter().map(|v| &v.ty).chain(p.buffers.iter().map(|b| &b.ty));
    let piece = |ty: &Type| match ty.layout.on(Axis::Tp) {
        AxisLayout::Shard(s) => s.uneven.map(|u| (u, s.ways)),
        _ => None,
    };
    types.filter_map(piece).collect()
}

/// Joins coordinates whose programs are equal into roles: `stage0` when all of tp agree, `stage0@tp2` for the
/// class that begins at coordinate 2.
pub(crate) fn group_roles(mesh: &Mesh, kinds: Vec<Kinds>) -> (Vec<RoleRanks>, Vec<Vec<Program>>) {
    let (mut roles, mut of_role) = (Vec::new(), Vec::new());
    let mut stages: Vec<Vec<(Vec<u32>, Vec<Program>)>> = Vec::new();
    for kind in kinds {
        stages.resize_with(kind.per_stage.len(), Vec::new);
        for (stage, ps) in kind.per_stage.into_iter().enumerate() {
            stages[stage].push((kind.coordinates.clone(), ps));
        }
    }
    for (stage, kinds) in stages.into_iter().enumerate() {
        let mut classes: Vec<(u32, Vec<u32>, Vec<Program>)> = Vec::new();
        for (coordinates, mut ps) in kinds {
            ps.iter_mut().for_each(|p| p.role.clear());
            match classes.iter_mut().find(|c| c.2 == ps) {
                Some(c) => c.1.extend(coordinates),
                None => classes.push((coordinates[0], coordinates, ps)),
            }
        }
        let even = classes.len() == 1;
        for (first, members, mut ps) in classes {
            let role = if even { format!("stage{stage}") } else { format!("stage{stage}@tp{first}") };
            for p in &mut ps {
                p.role.clone_from(&role);
            }
            let ranks: Vec<Rank> = mesh
                .iter()
                .filter(|r| {
                    let c = mesh.coord_of(*r);
                    mesh.contains(*r) && c.on(Axis::Pp) as usize == stage && members.contains(&c.on(Axis::Tp))
                })
                .collect();
            roles.push(RoleRanks { role, ranks });
            of_role.push(ps);
        }
    }
    (roles, of_role)
}
