//! What the planner hands to the judge: every phase's programs, one per role, and which ranks play the role.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use tessera_mesh::{Axis, Mesh, Rank, RankMap};

use crate::Program;
use crate::rules::place;

/// The ranks that run one program of each phase.
#[derive(Debug, Clone, PartialEq)]
pub struct RoleRanks {
    /// Name, such as `stage0` or `stage1@tp2`.
    pub role: String,
    /// Its ranks, ascending.
    pub ranks: Vec<Rank>,
}

impl RoleRanks {
    /// The ranks that each of these roles plays by its name, in the order of `roles`. A coordinate `@tp1` begins at
    /// position 1 of tp and goes on to the next role that names tp; `@out0` begins at rank 0 of those outside the
    /// mesh likewise. A role without `@out…` plays ranks of the mesh alone, and one without coordinates all of
    /// them. A rank that two names fit plays the first; one that none fits is in no list.
    #[must_use]
    pub fn by_name(mesh: &Mesh, roles: &[&str]) -> Vec<RoleRanks> {
        RoleRanks::cast(mesh, roles, &BTreeMap::new())
    }

    /// The same where somebody wrote the ranks of some roles down: those stand as written, even where the mesh has
    /// no such rank, and names cast the rest of the ranks over the rest of the roles.
    #[must_use]
    pub fn cast(mesh: &Mesh, roles: &[&str], written: &BTreeMap<String, Vec<Rank>>) -> Vec<RoleRanks> {
        let of = |role: &str| written.get(role).cloned();
        let mut out: Vec<RoleRanks> = roles
            .iter()
            .map(|r| RoleRanks { role: (*r).to_string(), ranks: of(r).unwrap_or_default() })
            .collect();
        let taken: BTreeSet<Rank> = out.iter().flat_map(|r| &r.ranks).copied().collect();
        let by_name: Vec<Option<Reach>> =
            roles.iter().map(|r| (!written.contains_key(*r)).then(|| Reach::of(r, roles))).collect();
        for rank in mesh.iter().filter(|r| !taken.contains(r)) {
            if let Some(at) = by_name.iter().position(|r| r.as_ref().is_some_and(|r| r.holds(mesh, rank))) {
                out[at].ranks.push(rank);
            }
        }
        out
    }
}

/// From which position on, and up to which, a role's name reaches: outside the mesh, or on each axis.
struct Reach {
    outside: Option<Range<u32>>,
    axes: [Option<Range<u32>>; 4],
}

impl Reach {
    fn of(role: &str, roles: &[&str]) -> Reach {
        let range = |what: &str| {
            let from = place(role, what)?;
            let next = roles.iter().filter_map(|r| place(r, what)).filter(|k| *k > from).min();
            Some(from..next.unwrap_or(u32::MAX))
        };
        Reach { outside: range("out"), axes: Axis::ALL.map(|a| range(a.name())) }
    }

    fn holds(&self, mesh: &Mesh, rank: Rank) -> bool {
        if let Some(outside) = &self.outside {
            return rank.0 < mesh.outside() && outside.contains(&rank.0);
        }
        let c = mesh.coord_of(rank);
        mesh.contains(rank)
            && mesh.axes().all(|a| self.axes[a as usize].as_ref().is_none_or(|r| r.contains(&c.on(a))))
    }
}

/// One phase of a call: a program for each role, in the order of [`Bundle::roles`].
#[derive(Debug, Clone, PartialEq)]
pub struct Phase {
    /// Name and variant, such as `denoise.fill3`.
    pub name: String,
    /// A program per role; a role that has nothing to do in the phase has an empty program.
    pub programs: Vec<Program>,
    /// Where each program keeps its temporaries, in the order of `programs`.
    pub memory: Vec<Slots>,
}

/// Places for a program's temporaries: values whose lives do not meet share a slot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Slots {
    /// Size of each slot in bytes.
    pub bytes: Vec<u64>,
    /// Slot of each value, by value id. `None` for what needs no memory of its own: tokens, weights, inputs,
    /// call scalars, and views of buffers.
    pub of: Vec<Option<u32>>,
}

impl Slots {
    /// Bytes of all slots together: the peak of the program's temporaries.
    #[must_use]
    pub fn total(&self) -> tessera_base::Bytes {
        tessera_base::Bytes(self.bytes.iter().sum())
    }
}

/// Everything a run may execute, not yet judged.
#[derive(Debug, Clone, PartialEq)]
pub struct Bundle {
    /// Mesh.
    pub mesh: Mesh,
    /// Devices in rank order.
    pub rank_map: RankMap,
    /// Roles; together they cover every rank once.
    pub roles: Vec<RoleRanks>,
    /// Phases in a fixed order.
    pub phases: Vec<Phase>,
    /// Calls that may be made: lists of phase names, in order.
    pub calls: Vec<(String, Vec<String>)>,
    /// The mapping's canonical text: what a person reads and edits, without paths.
    pub mapping: String,
}

impl Bundle {
    /// Index of the role that a rank plays.
    #[must_use]
    pub fn role_of(&self, rank: Rank) -> Option<usize> {
        self.roles.iter().position(|r| r.ranks.contains(&rank))
    }

    /// A phase by name.
    #[must_use]
    pub fn phase(&self, name: &str) -> Option<&Phase> {
        self.phases.iter().find(|p| p.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cast(mesh: &str, roles: &[&str]) -> Vec<Vec<u32>> {
        let mesh: Mesh = mesh.parse().unwrap();
        RoleRanks::by_name(&mesh, roles)
            .into_iter()
            .map(|r| r.ranks.into_iter().map(|r| r.0).collect())
            .collect()
    }

    #[test]
    fn a_role_reaches_to_the_next_of_its_axis() {
        assert_eq!(cast("tp=4", &["r"]), [vec![0, 1, 2, 3]]);
        assert_eq!(cast("tp=4", &["r@tp0", "r@tp1"]), [vec![0], vec![1, 2, 3]]);
        assert_eq!(cast("tp=2, pp=2", &["a@pp0", "a@pp1@tp1", "a@pp1@tp0"]), [vec![0, 1], vec![3], vec![2]]);
        assert_eq!(cast("tp=2", &["r", "s"]), [vec![0, 1], vec![]]);
    }

    #[test]
    fn written_ranks_stand_and_names_share_the_rest() {
        let mesh: Mesh = "tp=4".parse().unwrap();
        let written = BTreeMap::from([("r".to_string(), vec![Rank(3), Rank(9)])]);
        let cast = RoleRanks::cast(&mesh, &["r", "s", "t@tp2"], &written);
        let ranks: Vec<Vec<u32>> = cast.iter().map(|r| r.ranks.iter().map(|r| r.0).collect()).collect();
        assert_eq!(ranks, [vec![3, 9], vec![0, 1, 2], vec![]]);
    }

    #[test]
    fn roles_outside_are_named_so() {
        assert_eq!(cast("tp=2, outside=1", &["leader@out0", "r"]), [vec![0], vec![1, 2]]);
        assert_eq!(
            cast("tp=2, outside=3", &["r@tp0", "a@out0", "b@out1", "r@tp1"]),
            [vec![3], vec![0], vec![1, 2], vec![4]]
        );
        assert_eq!(cast("tp=2, outside=1", &["r"]), [vec![1, 2]]);
        assert_eq!(cast("tp=2", &["r", "leader@out0"]), [vec![0, 1], vec![]]);
    }
}
