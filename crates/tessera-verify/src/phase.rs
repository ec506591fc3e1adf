//! Checks that the programs of all ranks fit together in one phase.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Opcode, PeerPosition, Phase, Program, RoleRanks, Type};
use tessera_mesh::{Axis, AxisLayout, Mesh, Rank, Shard};

use crate::codes::{T0309, T0310, T0329, T0331, T0332, T0337};
use crate::phase_programs::PhasePrograms;
use crate::{display, launch_order, program, sequence, structure, value_numbering};

/// Checks the programs of one phase across ranks: groups agree position by position, sends match
/// receives, no wait cycle exists, and one launch order serves all ranks. Each program must be
/// correct by itself ([`crate::check_program`]).
///
/// The cost grows with the number of roles; each further rank of a role costs one table entry.
#[must_use]
pub fn check_phase(mesh: &Mesh, roles: &[RoleRanks], phase: &Phase) -> Diagnostics {
    let malformed: Diagnostics = phase.programs.iter().flat_map(structure::check).collect();
    if malformed.is_empty() { check_together(mesh, roles, phase) } else { malformed }
}

/// Checks each program of a phase by itself and, if all are correct, all of them together.
#[must_use]
pub fn verify_phase(mesh: &Mesh, roles: &[RoleRanks], phase: &Phase) -> Diagnostics {
    let own: Diagnostics = phase.programs.iter().flat_map(program::check_program).collect();
    if own.is_empty() { check_together(mesh, roles, phase) } else { own }
}

/// Runs [`check_phase`] on programs that are known to be well-formed.
fn check_together(mesh: &Mesh, roles: &[RoleRanks], phase: &Phase) -> Diagnostics {
    let mut out = check_roles(mesh, roles);
    out.extend(check_programs(mesh, roles, phase));
    if !out.is_empty() {
        return out;
    }
    let ranks = PhasePrograms::new(mesh, roles, &phase.programs);
    out.extend(check_peers(&ranks));
    out.extend(check_shards(&ranks));
    out.extend(check_inputs(&phase.programs));
    if !out.is_empty() {
        return out;
    }
    let mut out = sequence::check(&ranks);
    if out.is_empty() {
        out = launch_order::check(&ranks, || ranks.held_launches());
    }
    if out.is_empty() { value_numbering::check(&ranks) } else { out }
}

/// Maximum number of diagnostics about the ranks of one role; more would repeat the same fact.
const MAX_DIAGNOSTICS_PER_ROLE: usize = 8;

/// Checks that every rank has exactly one role.
pub(crate) fn check_roles(mesh: &Mesh, roles: &[RoleRanks]) -> Diagnostics {
    let mut out = Vec::new();
    let mut owner: Vec<Option<&str>> = vec![None; mesh.world_size() as usize];
    let mut names = std::collections::BTreeSet::new();
    for role in roles {
        if !names.insert(&role.role) {
            out.push(Diagnostic::error(&T0329, format!("two roles are called {}", role.role)));
        }
        if role.ranks.is_empty() {
            out.push(Diagnostic::error(&T0329, format!("role {} has no ranks", role.role)));
        }
        if !role.ranks.windows(2).all(|w| w[0] < w[1]) {
            out.push(Diagnostic::error(&T0329, format!("ranks of role {} are not ascending", role.role)));
        }
        let is_outside = tessera_ir::rules::role_outside(&role.role).is_some();
        let on_wrong_side = |r: &&Rank| r.0 < mesh.world_size() && mesh.contains(**r) == is_outside;
        if let Some(r) = role.ranks.iter().find(on_wrong_side) {
            let location = if is_outside { "inside" } else { "outside" };
            out.push(
                Diagnostic::error(
                    &T0337,
                    format!("role {} is assigned to rank {r}, which lies {location} the mesh", role.role),
                )
                .with_label("mesh", mesh.to_string()),
            );
        }
        let reported = out.len();
        for r in &role.ranks {
            let error = match owner.get_mut(r.0 as usize) {
                None => {
                    let message =
                        format!("role {} names rank {r} of a mesh of {}", role.role, mesh.world_size());
                    Diagnostic::error(&T0329, message).with_label("mesh", mesh.to_string())
                }
                Some(Some(first)) if *first != role.role => {
                    Diagnostic::error(&T0329, format!("rank {r} has two roles, {first} and {}", role.role))
                }
                Some(slot) => {
                    *slot = Some(&role.role);
                    continue;
                }
            };
            if out.len() < reported + MAX_DIAGNOSTICS_PER_ROLE {
                out.push(error);
            }
        }
    }
    let missing: Vec<Rank> = mesh.iter().filter(|r| owner[r.0 as usize].is_none()).collect();
    if !missing.is_empty() {
        out.push(Diagnostic::error(&T0329, format!("no role for {}", display::list_ranks(&missing))));
    }
    out
}

fn check_programs(mesh: &Mesh, roles: &[RoleRanks], phase: &Phase) -> Diagnostics {
    let mut out = Vec::new();
    if phase.programs.len() != roles.len() {
        let message =
            format!("phase {} has {} programs for {} roles", phase.name, phase.programs.len(), roles.len());
        out.push(Diagnostic::error(&T0329, message));
    }
    for (role, p) in roles.iter().zip(&phase.programs) {
        let mut bad = |what: &str, has: String, wants: String| {
            let d = Diagnostic::error(
                &T0329,
                format!("a program of phase {} is written for another {what}", phase.name),
            );
            out.push(d.with_label(display::program_title(p), has).with_label("plan", wants));
        };
        if p.mesh != *mesh {
            bad("mesh", p.mesh.to_string(), mesh.to_string());
        }
        if p.role != role.role {
            bad("role", p.role.clone(), role.role.clone());
        }
        if p.name != phase.name {
            bad("phase", p.name.clone(), phase.name.clone());
        }
        if p.dialect != tessera_ir::Dialect::Role {
            bad("dialect", "toperator".to_string(), "ttile".to_string());
        }
    }
    out
}

/// Checks that no rank sends to itself or beyond its group, and that no group has a single rank.
fn check_peers(ranks: &PhasePrograms<'_>) -> Diagnostics {
    let mut out = Vec::new();
    for (role, p) in ranks.programs.iter().enumerate() {
        let mut seen = std::collections::BTreeSet::new();
        for (i, signature) in ranks.distinct_launches(role) {
            let (op, group) = (&p.ops[i], signature.group);
            let peer = op.peer_position();
            // Report one diagnostic per peer; further ones would repeat it.
            if !seen.insert((group, peer)) {
                continue;
            }
            let size = ranks.mesh.group_size(group);
            let non_member =
                ranks.roles[role].ranks.iter().find(|r| ranks.mesh.group_position(**r, group).is_none());
            if let Some(r) = non_member {
                let message = format!(
                    "{} over {group} by rank {r}, which is not a member of any such group",
                    op.opcode.name()
                );
                out.push(display::error_at_op(&T0337, p, i, message));
                continue;
            }
            if size < 2 {
                let message = format!("{} over {group}, which has only one rank", op.opcode.name());
                out.push(display::error_at_op(&T0310, p, i, message));
                continue;
            }
            let (key, at) = match peer {
                Some(PeerPosition::To(at)) => ("to", at),
                Some(PeerPosition::From(at)) => ("from", at),
                None => continue,
            };
            let peer = u32::try_from(at).unwrap_or(u32::MAX);
            let has_position = |r: &&Rank| ranks.mesh.group_position(**r, group) == Some(peer);
            let mine = ranks.roles[role].ranks.iter().find(has_position);
            if peer >= size || mine.is_some() {
                let who =
                    mine.map_or("no rank".to_string(), |r| format!("rank {r}, which runs this program,"));
                let message = format!("{} {key} {group} {peer}: {who} has this position", op.opcode.name());
                out.push(display::error_at_op(&T0309, p, i, message));
            }
        }
    }
    out
}

/// Checks that local extents of uneven shards hold for every rank of the role.
fn check_shards(ranks: &PhasePrograms<'_>) -> Diagnostics {
    let mut out = Vec::new();
    let has_uneven_shard = |p: &&Program| {
        let types = p.values.iter().map(|v| &v.ty).chain(p.buffers.iter().map(|b| &b.ty));
        let uneven = |l: AxisLayout| matches!(l, AxisLayout::Shard(Shard { uneven: Some(_), .. }));
        types.into_iter().any(|t| Axis::ALL.into_iter().any(|a| uneven(t.layout.on_axis(a))))
    };
    for (role, p) in ranks.programs.iter().enumerate().filter(|(_, p)| has_uneven_shard(p)) {
        for axis in ranks.mesh.active_axes() {
            let found = uneven_shards(p, axis);
            if found.is_empty() {
                continue;
            }
            let mut positions = std::collections::BTreeMap::new();
            for r in &ranks.roles[role].ranks {
                positions.entry(ranks.mesh.coord_of(*r).on_axis(axis)).or_insert(*r);
            }
            for (name, shard, local) in found {
                let shard_size = |at: u32| shard.global_range(local, ranks.mesh.axis_size(axis), at).1;
                let Some((at, rank)) = positions.iter().find(|(at, _)| shard_size(**at) != local) else {
                    continue;
                };
                let global_extent = shard.uneven.map_or(0, |u| u.extent);
                let message = format!(
                    "{name} has local extent {local} of {global_extent} along dim {} over {axis}",
                    shard.dim
                );
                out.push(
                    Diagnostic::error(&T0331, message)
                        .with_label(display::program_title(p), format!("local extent {local}"))
                        .with_label(
                            format!("rank {rank}, position {at} of {axis}"),
                            format!("holds {}", shard_size(*at)),
                        ),
                );
            }
        }
    }
    out
}

/// Returns the distinct uneven shards over an axis: name for messages, shard, and local extent.
fn uneven_shards(p: &Program, axis: Axis) -> Vec<(String, Shard, u64)> {
    let mut seen = std::collections::BTreeSet::new();
    let values = p.values.iter().map(|v| ('%', &v.name, &v.ty));
    let buffers = p.buffers.iter().map(|b| ('@', &b.name, &b.ty));
    values
        .chain(buffers)
        .filter_map(|(sigil, name, ty)| match ty.layout.on_axis(axis) {
            AxisLayout::Shard(s) if s.uneven.is_some() => {
                Some((format!("{sigil}{name}"), s, *ty.shape.get(s.dim)?))
            }
            _ => None,
        })
        .filter(|(_, s, local)| seen.insert((*s, *local)))
        .collect()
}

fn check_inputs(programs: &[Program]) -> Diagnostics {
    let mut out = Vec::new();
    let mut known = std::collections::BTreeMap::new();
    for p in programs {
        for (i, op) in p.ops.iter().enumerate() {
            let (Opcode::Input | Opcode::Call, Some(name)) = (op.opcode, &op.name) else { continue };
            let ty = p.type_of(op.results[0]);
            let (first, at) = *known.entry((op.opcode, name)).or_insert((p, i));
            let other = first.type_of(first.ops[at].results[0]);
            // Roles may hold shards of different sizes of one tensor.
            let whole = |ty: &Type, p: &Program| (ty.dtype, ty.layout.global_shape(&ty.shape, &p.mesh));
            if whole(ty, p) != whole(other, first) {
                let d = Diagnostic::error(&T0332, format!("\"{name}\" has two types"));
                let d = display::with_op_label(d, first, at, other.display_on(&first.mesh));
                out.push(display::with_op_label(d, p, i, ty.display_on(&p.mesh)));
            }
        }
    }
    out
}
