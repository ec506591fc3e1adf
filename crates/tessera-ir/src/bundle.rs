//! The bundle that the planner passes to the verifier: the programs of every phase, one per role,
//! and the ranks of each role.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use tessera_mesh::{Axis, Mesh, Rank, RankMap};

use crate::rules::role_coordinate;
use crate::{CommRoute, Communicator, HostStatement, Program};

/// The ranks of a role; they run the same program in each phase.
#[derive(Debug, Clone, PartialEq)]
pub struct RoleRanks {
    /// Name of the role, such as `stage0` or `stage1@tp2`.
    pub role: String,
    /// Ranks in ascending order.
    pub ranks: Vec<Rank>,
}

impl RoleRanks {
    /// Assigns ranks to roles by the coordinates in the role names; returns the roles in the order
    /// of `roles`. A role with the coordinate `@tp1` covers the positions of tp from 1 up to the
    /// next role that names tp; `@out0` covers the ranks outside the mesh from rank 0 in the same
    /// way. A role without `@out…` covers only ranks of the mesh, and a role without coordinates
    /// covers all of them. A rank that several roles cover goes to the first of these roles; a rank
    /// that no role covers is not assigned.
    #[must_use]
    pub fn assign_by_name(mesh: &Mesh, roles: &[&str]) -> Vec<RoleRanks> {
        RoleRanks::assign_ranks(mesh, roles, &BTreeMap::new())
    }

    /// Assigns ranks to roles like [`RoleRanks::assign_by_name`], but roles in `written` keep the
    /// ranks listed there, even if the mesh has no such rank. The remaining ranks are assigned to
    /// the remaining roles by name.
    #[must_use]
    pub fn assign_ranks(
        mesh: &Mesh,
        roles: &[&str],
        written: &BTreeMap<String, Vec<Rank>>,
    ) -> Vec<RoleRanks> {
        let written_ranks = |role: &str| written.get(role).cloned();
        let mut out: Vec<RoleRanks> = roles
            .iter()
            .map(|r| RoleRanks { role: (*r).to_string(), ranks: written_ranks(r).unwrap_or_default() })
            .collect();
        let taken: BTreeSet<Rank> = out.iter().flat_map(|r| &r.ranks).copied().collect();
        let by_name: Vec<Option<RoleCoverage>> = roles
            .iter()
            .map(|r| (!written.contains_key(*r)).then(|| RoleCoverage::from_role_name(r, roles)))
            .collect();
        for rank in mesh.iter().filter(|r| !taken.contains(r)) {
            if let Some(at) = by_name.iter().position(|r| r.as_ref().is_some_and(|r| r.covers(mesh, rank))) {
                out[at].ranks.push(rank);
            }
        }
        out
    }
}

/// The range of positions that a role name covers: outside the mesh, or on each axis.
struct RoleCoverage {
    outside: Option<Range<u32>>,
    axes: [Option<Range<u32>>; 4],
}

impl RoleCoverage {
    fn from_role_name(role: &str, roles: &[&str]) -> RoleCoverage {
        let range = |what: &str| {
            let from = role_coordinate(role, what)?;
            let next = roles.iter().filter_map(|r| role_coordinate(r, what)).filter(|k| *k > from).min();
            Some(from..next.unwrap_or(u32::MAX))
        };
        RoleCoverage { outside: range("out"), axes: Axis::ALL.map(|a| range(a.name())) }
    }

    fn covers(&self, mesh: &Mesh, rank: Rank) -> bool {
        if let Some(outside) = &self.outside {
            return rank.0 < mesh.outside_count() && outside.contains(&rank.0);
        }
        let c = mesh.coord_of(rank);
        mesh.contains(rank)
            && mesh
                .active_axes()
                .all(|a| self.axes[a as usize].as_ref().is_none_or(|r| r.contains(&c.on_axis(a))))
    }
}

/// One phase of a call: a program for each role, in the order of [`Bundle::roles`].
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// Name with variant, such as `denoise.fill3`.
    pub name: String,
    /// One program per role; a role without work in the phase has an empty program.
    pub programs: Vec<Program>,
    /// Slot assignment of the temporaries of each program, in the order of `programs`.
    pub slots: Vec<Slots>,
}

/// Memory slots of a program's temporaries. Values whose live ranges do not overlap share a slot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Slots {
    /// Size of each slot in bytes: that of the largest value assigned to it.
    pub slot_bytes: Vec<u64>,
    /// Slot of each value, indexed by value id. `None` for values without memory of their own:
    /// tokens, weights, inputs, call scalars, and views of buffers.
    pub value_slots: Vec<Option<u32>>,
}

impl Slots {
    /// Returns the total bytes of all slots: the peak memory of the program's temporaries.
    #[must_use]
    pub fn total_bytes(&self) -> tessera_base::Bytes {
        tessera_base::Bytes(self.slot_bytes.iter().sum())
    }
}

/// Everything that a run may execute, before verification.
#[derive(Debug, Clone, PartialEq)]
pub struct Bundle {
    /// Mesh over which the programs of all roles run.
    pub mesh: Mesh,
    /// Device of each rank of the world, ranks outside the mesh first.
    pub rank_map: RankMap,
    /// The hosts of the ranks and the paths between them, if the plan states any. The digest of a plan
    /// without this statement does not depend on it.
    pub hosts: Option<HostStatement>,
    /// Roles, which together cover every rank exactly once.
    pub roles: Vec<RoleRanks>,
    /// All phases, in the order of the model's logical programs. The plan's digest does not depend
    /// on this order.
    pub phases: Vec<Phase>,
    /// Permitted calls: name and phase sequence of each.
    pub calls: Vec<(String, Vec<String>)>,
    /// Canonical text of the mapping in its editable form, without paths.
    pub mapping: String,
}

impl Bundle {
    /// Returns the index of a rank's role.
    #[must_use]
    pub fn role_index(&self, rank: Rank) -> Option<usize> {
        self.roles.iter().position(|r| r.ranks.contains(&rank))
    }

    /// Returns every communicator of two or more ranks that the ops of the programs name.
    #[must_use]
    pub fn list_communicators(&self) -> BTreeSet<Communicator> {
        let mut out = BTreeSet::new();
        for (i, role) in self.roles.iter().enumerate() {
            let ops = self.phases.iter().filter_map(|p| p.programs.get(i)).flat_map(|p| &p.ops);
            let routes: BTreeSet<CommRoute> = ops.filter_map(CommRoute::from_op).collect();
            let named = routes.iter().flat_map(|route| route.communicators_of(&self.mesh, &role.ranks));
            out.extend(named.filter(|communicator| communicator.members.len() > 1));
        }
        out
    }

    /// Returns the phase with this name.
    #[must_use]
    pub fn find_phase(&self, name: &str) -> Option<&Phase> {
        self.phases.iter().find(|p| p.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assigned(mesh: &str, roles: &[&str]) -> Vec<Vec<u32>> {
        let mesh: Mesh = mesh.parse().unwrap();
        RoleRanks::assign_by_name(&mesh, roles)
            .into_iter()
            .map(|r| r.ranks.into_iter().map(|r| r.0).collect())
            .collect()
    }

    #[test]
    fn a_role_covers_positions_up_to_the_next_role() {
        assert_eq!(assigned("tp=4", &["r"]), [vec![0, 1, 2, 3]]);
        assert_eq!(assigned("tp=4", &["r@tp0", "r@tp1"]), [vec![0], vec![1, 2, 3]]);
        assert_eq!(
            assigned("tp=2, pp=2", &["a@pp0", "a@pp1@tp1", "a@pp1@tp0"]),
            [vec![0, 1], vec![3], vec![2]]
        );
        assert_eq!(assigned("tp=2", &["r", "s"]), [vec![0, 1], vec![]]);
    }

    #[test]
    fn written_ranks_are_kept_and_names_assign_the_rest() {
        let mesh: Mesh = "tp=4".parse().unwrap();
        let written = BTreeMap::from([("r".to_string(), vec![Rank(3), Rank(9)])]);
        let cast = RoleRanks::assign_ranks(&mesh, &["r", "s", "t@tp2"], &written);
        let ranks: Vec<Vec<u32>> = cast.iter().map(|r| r.ranks.iter().map(|r| r.0).collect()).collect();
        assert_eq!(ranks, [vec![3, 9], vec![0, 1, 2], vec![]]);
    }

    #[test]
    fn out_coordinates_assign_ranks_outside_the_mesh() {
        assert_eq!(assigned("tp=2, outside=1", &["leader@out0", "r"]), [vec![0], vec![1, 2]]);
        assert_eq!(
            assigned("tp=2, outside=3", &["r@tp0", "a@out0", "b@out1", "r@tp1"]),
            [vec![3], vec![0], vec![1, 2], vec![4]]
        );
        assert_eq!(assigned("tp=2, outside=1", &["r"]), [vec![1, 2]]);
        assert_eq!(assigned("tp=2", &["r", "leader@out0"]), [vec![0, 1], vec![]]);
    }
}
