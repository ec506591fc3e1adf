//! Groups ranks into roles by program: the tp coordinates with shards of equal sizes, per stage.

use tessera_ir::{Program, RoleRanks, Type};
use tessera_mesh::{Axis, AxisLayout, Mesh, Rank, Uneven};

/// A class of tp coordinates whose uneven shards have equal sizes, with their programs by stage and
/// phase.
pub(crate) struct TpClass {
    pub(crate) shard_sizes: Vec<u64>,
    pub(crate) coordinates: Vec<u32>,
    pub(crate) per_stage: Vec<Vec<Program>>,
}

/// Returns the uneven shards over tp in a program's types, each with its group size.
pub(crate) fn uneven_shards(p: &Program) -> Vec<(Uneven, Option<u32>)> {
    let types = p.values.iter().map(|v| &v.ty).chain(p.buffers.iter().map(|b| &b.ty));
    let uneven_shard = |ty: &Type| match ty.layout.on_axis(Axis::Tp) {
        AxisLayout::Shard(s) => s.uneven.map(|u| (u, s.subgroup_size)),
        _ => None,
    };
    types.filter_map(uneven_shard).collect()
}

/// Groups coordinates with equal programs into roles: `stage0` if all of tp agree, `stage0@tp2` for
/// the class that begins at coordinate 2.
pub(crate) fn group_roles(mesh: &Mesh, tp_classes: Vec<TpClass>) -> (Vec<RoleRanks>, Vec<Vec<Program>>) {
    let (mut roles, mut role_programs) = (Vec::new(), Vec::new());
    let mut stages: Vec<Vec<(Vec<u32>, Vec<Program>)>> = Vec::new();
    for kind in tp_classes {
        stages.resize_with(kind.per_stage.len(), Vec::new);
        for (stage, ps) in kind.per_stage.into_iter().enumerate() {
            stages[stage].push((kind.coordinates.clone(), ps));
        }
    }
    for (stage, tp_classes) in stages.into_iter().enumerate() {
        let mut classes: Vec<(u32, Vec<u32>, Vec<Program>)> = Vec::new();
        for (coordinates, mut ps) in tp_classes {
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
                    mesh.contains(*r)
                        && c.on_axis(Axis::Pp) as usize == stage
                        && members.contains(&c.on_axis(Axis::Tp))
                })
                .collect();
            roles.push(RoleRanks { role, ranks });
            role_programs.push(ps);
        }
    }
    (roles, role_programs)
}
