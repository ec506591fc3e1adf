//! The path that the data of a group takes, from the hosts and switch domains of its members.

use std::collections::BTreeSet;

use tessera_base::named_enum;

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

    /// Returns the transport of such a group between GPUs. No backend combines peer memory within a
    /// host with NCCL between hosts, so NCCL carries all data of a hierarchical group. Within a host
    /// `requests_nccl`, whether an op of the group requests NCCL, decides.
    #[must_use]
    pub fn gpu_transport(self, requests_nccl: bool) -> &'static str {
        match self {
            GroupPath::PeerMemory if !requests_nccl => "peer memory",
            GroupPath::PeerMemory | GroupPath::Domain | GroupPath::Network => "NCCL",
            GroupPath::Hierarchical => "NCCL for the whole group",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_follows_from_hosts_and_domains() {
        let hgx = [(0, 0), (0, 0), (1, 1)];
        assert_eq!(GroupPath::from_places(&hgx), GroupPath::Hierarchical);
        assert_eq!(GroupPath::from_places(&hgx[1..]), GroupPath::Network);
        assert_eq!(GroupPath::from_places(&hgx[..2]), GroupPath::PeerMemory);
        assert_eq!(GroupPath::from_places(&[(0, 0), (1, 0), (1, 0)]), GroupPath::Domain);
        assert!(!GroupPath::from_places(&[]).leaves_host());
    }
}
