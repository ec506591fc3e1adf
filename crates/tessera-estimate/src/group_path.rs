//! The path that the data of a group takes, from the hosts and switch domains of its members.

use std::collections::BTreeSet;

use tessera_base::named_enum;

use tessera_mesh::{Cluster, Rank};

named_enum! {
    /// The path of a group's data between its members.
    pub enum GroupPath {
        /// All members are on one host.
        PeerMemory = "peer memory",
        /// The members are on several hosts of one switch domain.
        Domain = "switch domain",
        /// Every member is on a host and in a domain of its own, so all data crosses the network.
        Network = "network",
        /// Some members share a host or a domain, and others are beyond the network.
        Hierarchical = "hierarchical",
    }
}

impl GroupPath {
    /// Returns the path between members at these places: the number of the host, and that of the
    /// switch domain. Without a switch between hosts, a host is a domain of its own.
    #[must_use]
    pub fn from_places(places: &[(u32, u32)]) -> GroupPath {
        let hosts: BTreeSet<u32> = places.iter().map(|(host, _)| *host).collect();
        let domains: BTreeSet<u32> = places.iter().map(|(_, domain)| *domain).collect();
        match (hosts.len(), domains.len()) {
            (0 | 1, _) => GroupPath::PeerMemory,
            (_, 1) => GroupPath::Domain,
            (_, domains) if domains == places.len() => GroupPath::Network,
            _ => GroupPath::Hierarchical,
        }
    }

    /// Returns whether any data of the group leaves a host.
    #[must_use]
    pub fn leaves_host(self) -> bool {
        self != GroupPath::PeerMemory
    }
}

/// Returns the path between these ranks, which run on the devices of the cluster in order.
#[must_use]
pub fn group_path(cluster: &Cluster, members: &[Rank]) -> GroupPath {
    let place = |rank: &Rank| {
        let at = cluster.place_rank(*rank);
        (at.rack * cluster.hosts_per_rack + at.host, at.domain)
    };
    GroupPath::from_places(&members.iter().map(place).collect::<Vec<_>>())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tessera_mesh::catalog;

    use super::*;

    #[test]
    fn a_path_follows_from_hosts_and_domains() {
        let rack = catalog::get("gb200-nvl72").unwrap().with_racks(2);
        let path = |ranks: &[u32]| group_path(&rack, &ranks.iter().copied().map(Rank).collect::<Vec<_>>());
        assert_eq!(path(&[0, 3]), GroupPath::PeerMemory);
        assert_eq!(path(&[3, 4, 71]), GroupPath::Domain);
        assert_eq!(path(&[5, 77]), GroupPath::Network);
        assert_eq!(path(&[4, 5, 77]), GroupPath::Hierarchical);
        let hgx = [(0, 0), (0, 0), (1, 1)];
        assert_eq!(GroupPath::from_places(&hgx), GroupPath::Hierarchical);
        assert_eq!(GroupPath::from_places(&hgx[1..]), GroupPath::Network);
        assert!(!GroupPath::from_places(&[]).leaves_host() && path(&[0, 4]).leaves_host());
    }
}
