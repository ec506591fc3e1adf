//! Which ranks an estimate must follow one by one: ranks of one role run one program, and where they also meet alike,
//! one of them tells the times of all.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cost::Span;
use tessera_cost::program::span;
use tessera_ir::{Bundle, Op, Opcode};
use tessera_mesh::{Cluster, Rank};

/// A rank that is followed, and the ranks that have its times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Player {
    /// The rank that is followed.
    pub rank: Rank,
    /// Index of its role.
    pub role: usize,
    /// All ranks whose times are its times, itself first.
    pub stands_for: Vec<Rank>,
}

/// The players of a bundle on a cluster. One stands for all ranks of a role where, for every collective, send and receive
/// of every role, all its ranks meet ranks of the same roles over the same links: by induction over events their times
/// are then equal. Else every rank plays for itself.
#[must_use]
pub fn players(bundle: &Bundle, cluster: &Cluster) -> Vec<Player> {
    let alike = (0..bundle.roles.len()).all(|role| meet_alike(bundle, cluster, role));
    let mut out = Vec::new();
    for (role, r) in bundle.roles.iter().enumerate() {
        if alike {
            if let Some(first) = r.ranks.first() {
                out.push(Player { rank: *first, role, stands_for: r.ranks.clone() });
            }
        } else {
            out.extend(r.ranks.iter().map(|rank| Player { rank: *rank, role, stands_for: vec![*rank] }));
        }
    }
    out
}

/// The members that an op meets, seen from a rank: of a send or receive its two ends.
pub(crate) fn met(bundle: &Bundle, rank: Rank, op: &Op) -> Vec<Rank> {
    let members = op.group().map_or_else(Vec::new, |g| bundle.mesh.members(rank, g));
    match op.opcode {
        Opcode::Send | Opcode::Recv => {
            let key = if op.opcode == Opcode::Send { "to" } else { "from" };
            let other = op.int(key).and_then(|at| usize::try_from(at).ok()).and_then(|at| members.get(at));
            std::iter::once(rank).chain(other.copied()).collect()
        }
        _ => members,
    }
}

fn meet_alike(bundle: &Bundle, cluster: &Cluster, role: usize) -> bool {
    let ranks = &bundle.roles[role].ranks;
    let mut seen: BTreeSet<(String, Option<i64>, bool)> = BTreeSet::new();
    for program in bundle.phases.iter().map(|p| &p.programs[role]) {
        for (_, op) in program.collectives() {
            let group = op.group().map_or_else(String::new, |g| g.to_string());
            let key = (group, op.int("to").or(op.int("from")), op.opcode == Opcode::Send);
            if !seen.insert(key) {
                continue;
            }
            let whom = |rank: &Rank| -> (BTreeMap<Option<usize>, usize>, Span) {
                let mut roles = BTreeMap::new();
                for other in met(bundle, *rank, op) {
                    *roles.entry(bundle.role_of(other)).or_insert(0) += 1;
                }
                (roles, span(cluster, &bundle.mesh, *rank, op))
            };
            let first = ranks.first().map(whom);
            if ranks.iter().any(|r| Some(whom(r)) != first) {
                return false;
            }
        }
    }
    true
}
