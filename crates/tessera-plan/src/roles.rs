//! Groups ranks into roles by program: the tp coordinates with shards of equal sizes, per stage.

use std::ops::Range;

use tessera_ir::{Program, RoleRanks, Type};
use tessera_mesh::{Axis, AxisLayout, Mesh, Rank, Uneven};

/// A class of coordinates whose uneven shards have equal sizes, with their programs by stage and
/// phase.
pub(crate) struct RankClass {
    /// Sizes of the uneven shards over tp.
    pub(crate) shard_sizes: Vec<u64>,
    /// The coordinates on tp of the ranks that share these programs.
    pub(crate) coordinates: Vec<u32>,
    /// Coordinates on ep, if the numbers of experts of two classes differ.
    pub(crate) experts: Option<Range<u32>>,
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
/// the class that begins at coordinate 2, and `stage0@ep1` for ranks with another number of experts.
pub(crate) fn group_roles(mesh: &Mesh, rank_classes: Vec<RankClass>) -> (Vec<RoleRanks>, Vec<Vec<Program>>) {
    let (mut roles, mut role_programs) = (Vec::new(), Vec::new());
    let mut stages: Vec<Vec<StageClass>> = Vec::new();
    for kind in rank_classes {
        stages.resize_with(kind.per_stage.len(), Vec::new);
        for (stage, programs) in kind.per_stage.into_iter().enumerate() {
            let (coordinates, experts) = (kind.coordinates.clone(), kind.experts.clone());
            stages[stage].push(StageClass { coordinates, experts, programs });
        }
    }
    for (stage, of_stage) in stages.into_iter().enumerate() {
        let mut classes: Vec<StageClass> = Vec::new();
        for mut class in of_stage {
            class.programs.iter_mut().for_each(|p| p.role.clear());
            match classes.iter_mut().find(|c| c.experts == class.experts && c.programs == class.programs) {
                Some(c) => c.coordinates.extend(class.coordinates),
                None => classes.push(class),
            }
        }
        let even = classes.iter().all(|c| c.coordinates.len() == mesh.axis_size(Axis::Tp) as usize);
        for mut class in classes {
            let mut role = format!("stage{stage}");
            if !even {
                role += &format!("@tp{}", class.coordinates[0]);
            }
            if let Some(experts) = &class.experts {
                role += &format!("@ep{}", experts.start);
            }
            for p in &mut class.programs {
                p.role.clone_from(&role);
            }
            let has_rank = |r: &Rank| {
                let c = mesh.coord_of(*r);
                mesh.contains(*r)
                    && c.on_axis(Axis::Pp) as usize == stage
                    && class.coordinates.contains(&c.on_axis(Axis::Tp))
                    && class.experts.as_ref().is_none_or(|e| e.contains(&c.on_axis(Axis::Ep)))
            };
            let ranks: Vec<Rank> = mesh.iter().filter(has_rank).collect();
            roles.push(RoleRanks { role, ranks });
            role_programs.push(class.programs);
        }
    }
    (roles, role_programs)
}

/// The part of a class that belongs to one stage.
struct StageClass {
    coordinates: Vec<u32>,
    experts: Option<Range<u32>>,
    programs: Vec<Program>,
}
