//! Which ranks an estimate must follow one by one: ranks of one role run one program, and where they also meet alike,
//! one of them tells the times of all.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cost::Span;
use tessera_cost::program::span_of;
use tessera_ir::Bundle;
use tessera_mesh::{Cluster, Mesh, Rank};

use super::score::{Does, Score, Whom};

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
    let roles: Vec<&[Rank]> = bundle.roles.iter().map(|r| &r.ranks[..]).collect();
    let meets = |role: usize| {
        let programs = bundle.phases.iter().map(move |p| &p.programs[role]);
        programs.flat_map(|p| p.collectives().map(|(_, op)| Whom::of(op))).collect()
    };
    cast(&bundle.mesh, &roles, &(0..roles.len()).map(meets).collect::<Vec<_>>(), cluster)
}

/// The players of a score.
pub(super) fn players_of(score: &Score, cluster: &Cluster) -> Vec<Player> {
    let roles: Vec<&[Rank]> = score.roles.iter().map(|r| &r[..]).collect();
    let mut meets: Vec<BTreeSet<Whom>> = vec![BTreeSet::new(); roles.len()];
    for phase in &score.phases {
        for (part, meets) in phase.parts.iter().zip(&mut meets) {
            for step in part.steps.iter() {
                if let Does::Exchange { whom, .. } = step.does {
                    meets.insert(whom);
                }
            }
        }
    }
    cast(&score.mesh, &roles, &meets, cluster)
}

fn cast(mesh: &Mesh, roles: &[&[Rank]], meets: &[BTreeSet<Whom>], cluster: &Cluster) -> Vec<Player> {
    let mut role_of = vec![None; mesh.ranks() as usize];
    for (role, rank) in roles.iter().enumerate().flat_map(|(i, r)| r.iter().map(move |rank| (i, *rank))) {
        if let Some(of) = role_of.get_mut(rank.0 as usize) {
            *of = Some(role);
        }
    }
    let seen = |rank: Rank, whom: Whom| -> (BTreeMap<Option<usize>, usize>, Span) {
        let met = whom.met(mesh, rank);
        let mut roles = BTreeMap::new();
        for other in &met {
            *roles.entry(role_of.get(other.0 as usize).copied().flatten()).or_insert(0) += 1;
        }
        (roles, span_of(cluster, &met))
    };
    let alike = roles.iter().zip(meets).all(|(ranks, meets)| {
        meets.iter().all(|whom| {
            let first = ranks.first().map(|r| seen(*r, *whom));
            ranks.iter().all(|r| Some(seen(*r, *whom)) == first)
        })
    });
    let mut out = Vec::new();
    for (role, ranks) in roles.iter().enumerate() {
        if alike {
            if let Some(first) = ranks.first() {
                out.push(Player { rank: *first, role, stands_for: ranks.to_vec() });
            }
        } else {
            out.extend(ranks.iter().map(|rank| Player { rank: *rank, role, stands_for: vec![*rank] }));
        }
    }
    out
}
