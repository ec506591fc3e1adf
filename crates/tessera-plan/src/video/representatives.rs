//! Selects the representative ranks that a simulation follows: ranks of one role run one program,
//! and if their communication is isomorphic too, their timings are equal and one rank represents
//! all.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cost::GroupSpan;
use tessera_cost::program_cost::ranks_span;
use tessera_mesh::{Cluster, Mesh, Rank};

use super::schedule::{CallSchedule, CommPeers, StepEffect};

/// A class of ranks with equal timings and its representative.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankClass {
    /// The rank that the simulation follows.
    pub representative: Rank,
    /// Index of the role in the bundle or the schedule; several classes may have the same role.
    pub role: usize,
    /// All ranks of the class, the representative first.
    pub members: Vec<Rank>,
}

/// Returns the rank classes of a schedule on a cluster. A role is one class if, for every
/// collective, send and receive of every role, all its ranks communicate with ranks of the same
/// roles over the same links: by induction over events their timings are then equal. Otherwise
/// every rank is a class of its own.
pub(super) fn classify_ranks(schedule: &CallSchedule, cluster: &Cluster) -> Vec<RankClass> {
    let roles: Vec<&[Rank]> = schedule.roles.iter().map(|r| &r[..]).collect();
    let mut communications: Vec<BTreeSet<CommPeers>> = vec![BTreeSet::new(); roles.len()];
    for phase in &schedule.phases {
        for (part, communications) in phase.roles.iter().zip(&mut communications) {
            for step in part.steps.iter() {
                if let StepEffect::Communicate { peers: whom, .. } = step.effect {
                    communications.insert(whom);
                }
            }
        }
    }
    group_ranks(&schedule.mesh, &roles, &communications, cluster)
}

fn group_ranks(
    mesh: &Mesh,
    roles: &[&[Rank]],
    communications: &[BTreeSet<CommPeers>],
    cluster: &Cluster,
) -> Vec<RankClass> {
    let mut role_of = vec![None; mesh.world_size() as usize];
    for (role, rank) in roles.iter().enumerate().flat_map(|(i, r)| r.iter().map(move |rank| (i, *rank))) {
        if let Some(of) = role_of.get_mut(rank.0 as usize) {
            *of = Some(role);
        }
    }
    let neighbours = |rank: Rank, whom: CommPeers| -> (BTreeMap<Option<usize>, usize>, GroupSpan) {
        let participants = whom.participants(mesh, rank);
        let mut roles = BTreeMap::new();
        for other in &participants {
            *roles.entry(role_of.get(other.0 as usize).copied().flatten()).or_insert(0) += 1;
        }
        (roles, ranks_span(cluster, &participants))
    };
    let isomorphic = roles.iter().zip(communications).all(|(ranks, communications)| {
        communications.iter().all(|whom| {
            let first = ranks.first().map(|r| neighbours(*r, *whom));
            ranks.iter().all(|r| Some(neighbours(*r, *whom)) == first)
        })
    });
    let mut out = Vec::new();
    for (role, ranks) in roles.iter().enumerate() {
        if isomorphic {
            if let Some(first) = ranks.first() {
                out.push(RankClass { representative: *first, role, members: ranks.to_vec() });
            }
        } else {
            out.extend(ranks.iter().map(|rank| RankClass {
                representative: *rank,
                role,
                members: vec![*rank],
            }));
        }
    }
    out
}
