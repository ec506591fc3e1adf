//! The hosts of a plan: which ranks each holds, and which hosts share a switch domain.

use std::collections::BTreeMap;
use std::fmt;

use crate::{Cluster, GroupPath, Mesh, Rank};

/// A host and its ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanHost {
    /// Number of the switch domain to which the host belongs.
    pub domain: u32,
    /// The ranks, in ascending order.
    pub ranks: Vec<Rank>,
}

/// The hosts of a plan, by number. Whoever reads such a map checks that every rank is on one host:
/// the type can state that a rank is on none or on two, as a file can.
///
/// Hosts have numbers and no names, because a scheduler names the hosts of a job only at its start,
/// and the transport between ranks depends on which of them share a host, not on which host it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMap {
    hosts: Vec<PlanHost>,
    /// The first host that states each rank, so that a loop over the ops of a plan need not scan the hosts.
    host_of: BTreeMap<Rank, u32>,
}

/// A rank that is not on the host of the other ranks that a plan states on its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MisplacedRank {
    /// The rank.
    pub rank: Rank,
    /// Number of the host on which the plan states it.
    pub stated_host: u32,
    /// The real host of the rank.
    pub real_host: String,
    /// The first rank of the stated host, and its real host.
    pub first: (Rank, String),
}

impl HostMap {
    /// Creates the map of these hosts; a host's number is its index.
    #[must_use]
    pub fn new(hosts: Vec<PlanHost>) -> HostMap {
        let mut host_of = BTreeMap::new();
        for (number, host) in (0u32..).zip(&hosts) {
            for rank in &host.ranks {
                host_of.entry(*rank).or_insert(number);
            }
        }
        HostMap { hosts, host_of }
    }

    /// Creates the map of hosts that hold consecutive ranks, each host in a switch domain of its own
    /// unless `domains` states the domain of each.
    #[must_use]
    pub fn from_counts(counts: &[u32], domains: &[u32]) -> HostMap {
        let mut next = 0u32;
        let hosts = (0u32..).zip(counts).map(|(number, count)| {
            let first = next;
            next = first.saturating_add(*count);
            PlanHost {
                domain: domains.get(number as usize).copied().unwrap_or(number),
                ranks: (first..next).map(Rank).collect(),
            }
        });
        HostMap::new(hosts.collect())
    }

    /// Creates the map of the ranks of a world on a cluster. The ranks of the mesh fill the devices in cabling
    /// order. Ranks outside of the mesh, which take no device, are on the first host besides, as launchers
    /// place them.
    #[must_use]
    pub fn from_cluster(cluster: &Cluster, world: &Mesh) -> HostMap {
        let mut hosts: BTreeMap<u32, PlanHost> = BTreeMap::new();
        for rank in world.iter() {
            let at = cluster.place_device(rank.0.saturating_sub(world.outside_count()));
            let host = hosts
                .entry(at.rack * cluster.hosts_per_rack + at.host)
                .or_insert_with(|| PlanHost { domain: at.domain, ranks: Vec::new() });
            host.ranks.push(rank);
        }
        HostMap::new(hosts.into_values().collect())
    }

    /// Returns the hosts in the order of their numbers.
    #[must_use]
    pub fn hosts(&self) -> &[PlanHost] {
        &self.hosts
    }

    /// Returns the number of the first host that states a rank.
    #[must_use]
    pub fn host_of(&self, rank: Rank) -> Option<u32> {
        self.host_of.get(&rank).copied()
    }

    /// Returns the path between these ranks; `None` if one of them is on no host.
    #[must_use]
    pub fn path_between(&self, members: &[Rank]) -> Option<GroupPath> {
        let place = |rank: &Rank| {
            let host = self.host_of(*rank)?;
            Some((host, self.hosts[host as usize].domain))
        };
        Some(GroupPath::from_places(&members.iter().map(place).collect::<Option<Vec<_>>>()?))
    }

    /// Returns, for each host whose ranks are really on several, the first rank that is not on the
    /// real host of the host's first rank. `real` is the real host of each rank; ranks without an
    /// entry are not compared.
    #[must_use]
    pub fn find_misplaced(&self, real: &BTreeMap<u32, String>) -> Vec<MisplacedRank> {
        let of_host = |(number, host): (u32, &PlanHost)| {
            let mut known = host.ranks.iter().filter_map(|r| Some((*r, real.get(&r.0)?)));
            let (first, first_host) = known.next()?;
            let (rank, real_host) = known.find(|(_, name)| *name != first_host)?;
            Some(MisplacedRank {
                rank,
                stated_host: number,
                real_host: real_host.clone(),
                first: (first, first_host.clone()),
            })
        };
        (0..).zip(&self.hosts).filter_map(of_host).collect()
    }

    /// Returns the first two hosts whose ranks are really on one host, as their numbers and its name.
    #[must_use]
    pub fn find_merged(&self, real: &BTreeMap<u32, String>) -> Option<(u32, u32, String)> {
        let mut seen: BTreeMap<&str, u32> = BTreeMap::new();
        for (number, host) in (0..).zip(&self.hosts) {
            for name in host.ranks.iter().filter_map(|r| real.get(&r.0)) {
                let earlier = *seen.entry(name).or_insert(number);
                if earlier != number {
                    return Some((earlier, number, name.clone()));
                }
            }
        }
        None
    }

    /// Describes the map, such as `2 hosts: 0 to 3, 4 to 7`.
    #[must_use]
    pub fn describe(&self) -> String {
        let hosts: Vec<String> = self.hosts.iter().map(|h| describe_ranks(&h.ranks)).collect();
        let plural = if hosts.len() == 1 { "" } else { "s" };
        format!("{} host{plural}: ranks {}", hosts.len(), hosts.join("; "))
    }
}

impl fmt::Display for MisplacedRank {
    /// Writes `rank 3 is on node02, but the plan states it on host 0 with rank 0, which is on node01`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MisplacedRank { rank, stated_host, real_host, first: (first, first_host) } = self;
        write!(f, "rank {rank} is on {real_host}, but the plan states it on host {stated_host} ")?;
        write!(f, "with rank {first}, which is on {first_host}")
    }
}

/// Describes ranks in ascending order by their runs, such as `0 to 3, 8`.
fn describe_ranks(ranks: &[Rank]) -> String {
    let runs = ranks.chunk_by(|a, b| a.0.checked_add(1) == Some(b.0)).map(|run| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first} to {last}"),
        [] => String::new(),
    });
    let text = runs.collect::<Vec<_>>().join(", ");
    if text.is_empty() { "none".to_string() } else { text }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::catalog;

    fn ranks(of: &[u32]) -> Vec<Rank> {
        of.iter().copied().map(Rank).collect()
    }

    #[test]
    fn ranks_fill_the_hosts_of_a_cluster_in_cabling_order() {
        let rack = catalog::get("gb200-nvl72").unwrap().with_racks(2);
        let map = HostMap::from_cluster(&rack, &"tp=80".parse().unwrap());
        let path = |of: &[u32]| map.path_between(&ranks(of)).unwrap();
        assert_eq!(path(&[0, 3]), GroupPath::PeerMemory);
        assert_eq!(path(&[3, 4, 71]), GroupPath::Domain);
        assert_eq!(path(&[5, 77]), GroupPath::Network);
        assert_eq!(path(&[4, 5, 77]), GroupPath::Hierarchical);
        assert_eq!((map.hosts.len(), map.path_between(&ranks(&[80]))), (20, None));
        let counted = HostMap::from_counts(&[4; 20], &[0; 18]);
        assert_eq!(counted.host_of(Rank(79)), Some(19));
        assert_eq!(map.hosts[19].ranks, counted.hosts[19].ranks);
    }

    #[test]
    fn ranks_outside_of_the_mesh_are_on_the_first_host_and_take_no_device() {
        let hgx = catalog::get("hgx-h100").unwrap().with_racks(2);
        let map = HostMap::from_cluster(&hgx, &"tp=16,outside=1".parse().unwrap());
        let counts: Vec<usize> = map.hosts().iter().map(|h| h.ranks.len()).collect();
        assert_eq!(counts, [9, 8]);
        assert_eq!(
            (map.host_of(Rank(0)), map.host_of(Rank(8)), map.host_of(Rank(9))),
            (Some(0), Some(0), Some(1))
        );
    }

    #[test]
    fn a_rank_on_two_hosts_counts_as_a_rank_of_the_first() {
        let host = |domain, of: &[u32]| PlanHost { domain, ranks: ranks(of) };
        let map = HostMap::new(vec![host(0, &[4, 0]), host(1, &[4, u32::MAX])]);
        assert_eq!(
            (map.host_of(Rank(4)), map.host_of(Rank(u32::MAX)), map.host_of(Rank(1))),
            (Some(0), Some(1), None)
        );
    }

    #[test]
    fn ranks_are_misplaced_if_a_host_is_split_and_only_merged_if_hosts_are_joined() {
        let map = HostMap::from_counts(&[3, 2], &[]);
        assert_eq!(map.describe(), "2 hosts: ranks 0 to 2; 3 to 4");
        let real = |names: &str| (0..).zip(names.chars().map(String::from)).collect::<BTreeMap<u32, _>>();
        assert!(map.find_misplaced(&real("aaabb")).is_empty());
        assert_eq!(map.find_merged(&real("aaabb")), None);
        assert!(map.find_misplaced(&real("aaaaa")).is_empty());
        assert_eq!(map.find_merged(&real("aaaaa")), Some((0, 1, "a".to_string())));
        let found = map.find_misplaced(&real("aabbb"));
        let expected = MisplacedRank {
            rank: Rank(2),
            stated_host: 0,
            real_host: "b".to_string(),
            first: (Rank(0), "a".to_string()),
        };
        assert_eq!(found, [expected]);
        let text = "rank 2 is on b, but the plan states it on host 0 with rank 0, which is on a";
        assert_eq!(found[0].to_string(), text);
        let mut known = real("aabbb");
        known.remove(&2);
        assert!(map.find_misplaced(&known).is_empty());
    }
}
