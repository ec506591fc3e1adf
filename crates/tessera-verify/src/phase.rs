//! Whether the programs of all ranks fit together in one phase.

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::{Opcode, Phase, Program, RoleRanks};
use tessera_mesh::{Axis, AxisLayout, Mesh, Rank, Shard};

use crate::ranks::Ranks;
use crate::{launch, program, same, say, sequence, structure};

/// Roles, ranks or programs that do not line up.
pub static T0329: Code = Code {
    id: "T0329",
    title: "roles and programs do not cover the ranks",
    page: "A plan gives every rank of the mesh exactly one role, and every phase has one program per role, in the \
order of the roles, written for the plan's mesh and for that role. Names of roles, phases and calls are each used \
once. A rank without a role would never join its groups' collectives, and everyone else would wait.\n\n\
A role with nothing to do in a phase has an empty program.",
};
/// A local extent that is not the rank's piece.
pub static T0331: Code = Code {
    id: "T0331",
    title: "uneven shard is not the rank's piece",
    page: "Where a dim is cut unevenly, the first positions of the axis hold one unit more. All ranks of a role run one \
program, so they must all hold pieces of the same size, the one that the program's local shape says. Otherwise counts \
of an exchange differ between peers, and bytes land in the wrong rows.\n\nSplit the role into one per piece size.",
};
/// Roles that read one input differently.
pub static T0332: Code = Code {
    id: "T0332",
    title: "roles disagree about an input",
    page: "The tensors and scalars of a call are sent to every rank as they are, so all roles of a phase must declare \
an input of one name with one dtype and shape. Correct the role whose declaration differs; the message shows both.",
};

/// A rank outside the mesh in the mesh's affairs.
pub static T0337: Code = Code {
    id: "T0337",
    title: "rank outside the mesh plays a part of the mesh",
    page: "With `mesh(tp=2, outside=1)` rank 0 stands outside the mesh: it may encode, decode and lead, and it talks to the mesh \
over the world. It is in no group of an axis and holds no piece of a cut value, so a role that it plays is named `…@out0`, \
calls collectives over `world` alone, and nobody in the mesh plays that role. Called over a mesh axis by such a rank, a \
collective would either hang in a group that does not expect it or complete on the wrong one.\n\n\
Send over the world to a rank of the mesh, and broadcast from there over the axis.",
};

/// Judges the programs of one phase across ranks: groups agree position by position, sends meet receives, no
/// cycle of waits, one order of launches. Each program is taken to be right by itself ([`crate::check_program`]).
///
/// The work is by roles; ranks of one role cost only their place in a table.
#[must_use]
pub fn check_phase(mesh: &Mesh, roles: &[RoleRanks], phase: &Phase) -> Diagnostics {
    let malformed: Diagnostics = phase.programs.iter().flat_map(structure::check).collect();
    if malformed.is_empty() { together(mesh, roles, phase) } else { malformed }
}

/// Judges each program of a phase by itself and, where all are right, all of them together.
#[must_use]
pub fn judge(mesh: &Mesh, roles: &[RoleRanks], phase: &Phase) -> Diagnostics {
    let own: Diagnostics = phase.programs.iter().flat_map(program::check_program).collect();
    if own.is_empty() { together(mesh, roles, phase) } else { own }
}

/// [`check_phase`] of programs that are known to be well-formed.
fn together(mesh: &Mesh, roles: &[RoleRanks], phase: &Phase) -> Diagnostics {
    let mut out = check_roles(mesh, roles);
    out.extend(check_programs(mesh, roles, phase));
    if !out.is_empty() {
        return out;
    }
    let ranks = Ranks::of(mesh, roles, &phase.programs);
    out.extend(peers(&ranks));
    out.extend(pieces(&ranks));
    out.extend(inputs(&phase.programs));
    if !out.is_empty() {
        return out;
    }
    let mut out = sequence::check(&ranks);
    if out.is_empty() {
        out = launch::check(&ranks, || ranks.held());
    }
    if out.is_empty() { same::check(&ranks) } else { out }
}

/// Most ranks of one role that are told of; more would say the same.
const SLIPS_MAX: usize = 8;

/// Every rank has one role.
pub(crate) fn check_roles(mesh: &Mesh, roles: &[RoleRanks]) -> Diagnostics {
    let mut out = Vec::new();
    let mut owner: Vec<Option<&str>> = vec![None; mesh.ranks() as usize];
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
        let leads = tessera_ir::rules::role_outside(&role.role).is_some();
        let astray = |r: &&Rank| r.0 < mesh.ranks() && mesh.contains(**r) == leads;
        if let Some(r) = role.ranks.iter().find(astray) {
            let stands = if leads { "in" } else { "outside" };
            out.push(
                Diagnostic::error(
                    &T0337,
                    format!("role {} is played by rank {r}, {stands} the mesh", role.role),
                )
                .at("mesh", mesh.to_string()),
            );
        }
        let told = out.len();
        for r in &role.ranks {
            let slip = match owner.get_mut(r.0 as usize) {
                None => {
                    let message = format!("role {} names rank {r} of a mesh of {}", role.role, mesh.ranks());
                    Diagnostic::error(&T0329, message).at("mesh", mesh.to_string())
                }
                Some(Some(first)) if *first != role.role => {
                    Diagnostic::error(&T0329, format!("rank {r} plays both {first} and {}", role.role))
                }
                Some(slot) => {
                    *slot = Some(&role.role);
                    continue;
                }
            };
            if out.len() < told + SLIPS_MAX {
                out.push(slip);
            }
        }
    }
    let missing: Vec<Rank> = mesh.iter().filter(|r| owner[r.0 as usize].is_none()).collect();
    if !missing.is_empty() {
        out.push(Diagnostic::error(&T0329, format!("no role for {}", say::ranks(&missing))));
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
            let d =
                Diagnostic::error(&T0329, format!("a program of phase {} is for another {what}", phase.name));
            out.push(d.at(say::title(p), has).at("plan", wants));
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

/// No rank sends to itself or beyond its group, and no group is of one rank.
fn peers(ranks: &Ranks<'_>) -> Diagnostics {
    let mut out = Vec::new();
    for (role, p) in ranks.programs.iter().enumerate() {
        let mut seen = std::collections::BTreeSet::new();
        for (i, signature) in ranks.kinds(role) {
            let (op, group) = (&p.ops[i], signature.group);
            let key = match op.opcode {
                Opcode::Send => "to",
                Opcode::Recv => "from",
                _ => "",
            };
            let peer = op.int(key);
            // One refusal per peer is enough: the others say the same.
            if !seen.insert((group, peer)) {
                continue;
            }
            let size = ranks.mesh.group_size(group);
            let astray = ranks.roles[role].ranks.iter().find(|r| ranks.mesh.position(**r, group).is_none());
            if let Some(r) = astray {
                let message =
                    format!("{} over {group} by rank {r}, which is in no such group", op.opcode.name());
                out.push(say::refuse(&T0337, p, i, message));
                continue;
            }
            if size < 2 {
                let message = format!("{} over {group} of one rank", op.opcode.name());
                out.push(say::refuse(&program::T0310, p, i, message));
                continue;
            }
            if key.is_empty() {
                continue;
            }
            let peer = peer.and_then(|k| u32::try_from(k).ok()).unwrap_or(u32::MAX);
            let stands = |r: &&Rank| ranks.mesh.position(**r, group) == Some(peer);
            let mine = ranks.roles[role].ranks.iter().find(stands);
            if peer >= size || mine.is_some() {
                let who =
                    mine.map_or("no rank".to_string(), |r| format!("rank {r}, which runs the program,"));
                let message = format!("{} {key} {group} {peer}: {who} stands there", op.opcode.name());
                out.push(say::refuse(&program::T0309, p, i, message));
            }
        }
    }
    out
}

/// Local extents of uneven shards are those of every rank of the role.
fn pieces(ranks: &Ranks<'_>) -> Diagnostics {
    let mut out = Vec::new();
    let cut = |p: &&Program| {
        let types = p.values.iter().map(|v| &v.ty).chain(p.buffers.iter().map(|b| &b.ty));
        let uneven = |l: AxisLayout| matches!(l, AxisLayout::Shard(Shard { uneven: Some(_), .. }));
        types.into_iter().any(|t| Axis::ALL.into_iter().any(|a| uneven(t.layout.on(a))))
    };
    for (role, p) in ranks.programs.iter().enumerate().filter(|(_, p)| cut(p)) {
        for axis in ranks.mesh.axes() {
            let found = uneven(p, axis);
            if found.is_empty() {
                continue;
            }
            let mut positions = std::collections::BTreeMap::new();
            for r in &ranks.roles[role].ranks {
                positions.entry(ranks.mesh.coord_of(*r).on(axis)).or_insert(*r);
            }
            for (name, shard, local) in found {
                let piece = |at: u32| shard.range(local, ranks.mesh.size(axis), at).1;
                let Some((at, rank)) = positions.iter().find(|(at, _)| piece(**at) != local) else {
                    continue;
                };
                let of = shard.uneven.map_or(0, |u| u.extent);
                let message = format!("{name} has {local} of {of} along dim {} over {axis}", shard.dim);
                out.push(
                    Diagnostic::error(&T0331, message)
                        .at(say::title(p), format!("local extent {local}"))
                        .at(format!("rank {rank}, position {at} of {axis}"), format!("holds {}", piece(*at))),
                );
            }
        }
    }
    out
}

/// Distinct uneven shards over an axis: a name to show, the shard, the local extent.
fn uneven(p: &Program, axis: Axis) -> Vec<(String, Shard, u64)> {
    let mut seen = std::collections::BTreeSet::new();
    let values = p.values.iter().map(|v| ('%', &v.name, &v.ty));
    let buffers = p.buffers.iter().map(|b| ('@', &b.name, &b.ty));
    values
        .chain(buffers)
        .filter_map(|(sigil, name, ty)| match ty.layout.on(axis) {
            AxisLayout::Shard(s) if s.uneven.is_some() => {
                Some((format!("{sigil}{name}"), s, *ty.shape.get(s.dim)?))
            }
            _ => None,
        })
        .filter(|(_, s, local)| seen.insert((*s, *local)))
        .collect()
}

fn inputs(programs: &[Program]) -> Diagnostics {
    let mut out = Vec::new();
    let mut known = std::collections::BTreeMap::new();
    for p in programs {
        for (i, op) in p.ops.iter().enumerate() {
            let (Opcode::Input | Opcode::Call, Some(name)) = (op.opcode, &op.name) else { continue };
            let ty = p.ty(op.results[0]);
            let (first, at) = *known.entry((op.opcode, name)).or_insert((p, i));
            let other = first.ty(first.ops[at].results[0]);
            if (ty.dtype, &ty.shape) != (other.dtype, &other.shape) {
                let d = Diagnostic::error(&T0332, format!("\"{name}\" has two types"));
                let d = say::at_op(d, first, at, other.display(&first.mesh));
                out.push(say::at_op(d, p, i, ty.display(&p.mesh)));
            }
        }
    }
    out
}
