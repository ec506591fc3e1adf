//! Where experts are: on which rank of their axis, and in which locality group of the machine.

use std::iter::repeat_n;

use tessera_base::Diagnostic;
use tessera_mesh::{Rank, split_units};

use crate::Mapping;
use crate::codes::T0612;

/// The rank of each expert on the axis of the experts, ep or tp, and the locality group of each of these ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertMap {
    /// The position of each expert's rank on the axis of the experts.
    pub expert_ranks: Vec<u64>,
    /// The locality group of each position on that axis, numbered by first appearance.
    pub rank_groups: Vec<u64>,
}

impl ExpertMap {
    /// Returns the map of a number of experts under a mapping: the first ranks have an expert more. Locality groups
    /// are `experts.locality_ranks` consecutive ranks or, without the key, the ranks of a host as `devices.order`
    /// names it (`HOST/GPU`).
    ///
    /// # Errors
    /// T0612 if the mapping names no groups, or if positions on the axis lie in one group for some ranks of the other axes
    /// and in several for others: then no position has a group.
    pub fn new(mapping: &Mapping, experts: u64) -> Result<ExpertMap, Diagnostic> {
        let (axis, ranks) = (mapping.experts.axis.mesh_axis(), mapping.expert_ranks());
        let expert_ranks = ExpertMap::ranks_of_experts(ranks, experts);
        let refuse = |message: String, hint: &str| {
            Diagnostic::error(&T0612, message).with_label("mesh", mapping.mesh.to_string()).with_hint(hint)
        };
        let world = mapping.world_mesh().map_err(|d| *d)?;
        let place = |rank: Rank| -> Option<String> {
            let index = rank.0 - world.outside_count();
            match mapping.experts.router.locality_ranks {
                Some(n) => Some((index / n).to_string()),
                None => Some(mapping.devices.get(rank.0 as usize)?.rsplit_once('/')?.0.to_string()),
            }
        };
        let mut found: Option<Vec<u64>> = None;
        let first_on_axis = |rank: &Rank| world.coord_of(*rank).on_axis(axis) == 0;
        for first in world.inner_ranks().filter(first_on_axis) {
            let mut names = Vec::new();
            let mut groups = Vec::new();
            for at in 0..ranks {
                let rank = world.rank_at(world.coord_of(first).with_axis(axis, at));
                let name = place(rank).ok_or_else(|| {
                    refuse(
                        format!("rank {rank} has no locality group"),
                        "state experts.locality_ranks, or HOST/GPU for every rank in [devices] order",
                    )
                })?;
                let group = names.iter().position(|n| *n == name).unwrap_or_else(|| {
                    names.push(name);
                    names.len() - 1
                });
                groups.push(group as u64);
            }
            match &found {
                Some(other) if *other != groups => {
                    return Err(refuse(
                        format!(
                            "ranks of {axis} from rank {first} lie in the groups {groups:?}, others in {other:?}"
                        ),
                        "choose locality_ranks, or the order of the devices, so that the axis of the experts crosses groups alike everywhere",
                    ));
                }
                _ => found = Some(groups),
            }
        }
        Ok(ExpertMap { expert_ranks, rank_groups: found.unwrap_or_default() })
    }

    /// Returns the position of each expert's rank: the first ranks have an expert more.
    #[must_use]
    pub fn ranks_of_experts(ranks: u32, experts: u64) -> Vec<u64> {
        let of_rank = |rank| repeat_n(u64::from(rank), split_units(experts, ranks, rank).1 as usize);
        (0..ranks).flat_map(of_rank).collect()
    }

    /// Returns 0 for an expert of a locality group, and 1 for any other.
    #[must_use]
    pub fn locality_cost(&self, expert: usize, group: u64) -> u64 {
        u64::from(self.expert_group(expert) != group)
    }

    /// Returns the locality group of each expert.
    #[must_use]
    pub fn expert_groups(&self) -> Vec<u64> {
        (0..self.expert_ranks.len()).map(|e| self.expert_group(e)).collect()
    }

    /// Returns the distances between positions, row by row: 0 to itself, 1 within a locality group, 2 between
    /// groups.
    #[must_use]
    pub fn distances(&self) -> Vec<u64> {
        let ranks = 0..self.rank_groups.len();
        let distance = |a: usize, b: usize| match self.rank_groups[a] == self.rank_groups[b] {
            _ if a == b => 0,
            true => 1,
            false => 2,
        };
        ranks.clone().flat_map(|a| ranks.clone().map(move |b| distance(a, b))).collect()
    }

    fn expert_group(&self, expert: usize) -> u64 {
        self.rank_groups[self.expert_ranks[expert] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(text: &str, experts: u64) -> Result<ExpertMap, Diagnostic> {
        ExpertMap::new(&Mapping::parse("m", text).unwrap(), experts)
    }

    #[test]
    fn the_map_covers_all_experts_and_costs_are_0_or_1() {
        let m = map("[mesh]\ntp = 2\nep = 4\n[experts]\nlocality_ranks = 4\n", 10).unwrap();
        assert_eq!(m.expert_ranks, [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]);
        assert_eq!(m.rank_groups, [0, 0, 1, 1]);
        let costs: Vec<u64> = (0..10).map(|e| m.locality_cost(e, 1)).collect();
        assert_eq!(costs, [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]);
        assert_eq!(m.distances(), [0, 1, 2, 2, 1, 0, 2, 2, 2, 2, 0, 1, 2, 2, 1, 0]);
    }

    #[test]
    fn groups_follow_the_hosts_of_devices_and_absent_or_ragged_ones_are_refused() {
        let hosts = "[mesh]\nep = 3\n[devices]\norder = [\"a/0\", \"b/0\", \"a/1\"]\n";
        assert_eq!(map(hosts, 3).unwrap().rank_groups, [0, 1, 0]);
        let none = map("[mesh]\nep = 2\n", 2).unwrap_err();
        assert!(none.code.id == "T0612" && none.message.contains("no locality group"), "{none:?}");
        let ragged = map("[mesh]\nep = 2\npp = 3\n[experts]\nlocality_ranks = 3\n", 2).unwrap_err();
        assert!(ragged.code.id == "T0612" && ragged.message.contains("[0, 1]"), "{ragged:?}");
    }
}
