//! States the hosts of a mapping in a bundle, with the path of every communicator of its programs.

use tessera_ir::{Bundle, GroupStatement, HostStatement};
use tessera_mesh::{Cluster, HostMap};

use crate::Mapping;

/// States hosts in a bundle, with the paths that follow from them; without hosts the bundle has no
/// statement. A group of which a member is on no host gets no path.
pub fn state_hosts(bundle: &mut Bundle, hosts: Option<HostMap>) {
    bundle.hosts = hosts.map(|hosts| {
        let groups = bundle.list_communicators().into_iter().filter_map(|communicator| {
            let path = hosts.path_between(&communicator.members)?;
            Some(GroupStatement { communicator, path })
        });
        HostStatement { groups: groups.collect(), hosts }
    });
}

impl Mapping {
    /// States the hosts of a cluster as [`HostMap::from_cluster`] gives ranks to them. A mapping whose ranks fit
    /// on one host states none.
    #[must_use]
    pub fn on_cluster(self, cluster: &Cluster) -> Mapping {
        let Ok(world) = self.world_mesh() else { return self };
        let map = HostMap::from_cluster(cluster, &world);
        if map.hosts().len() < 2 {
            return self;
        }
        let domains: Vec<u32> = map.hosts().iter().map(|h| h.domain).collect();
        // Cabling order keeps the hosts of a domain together.
        let has_switch = domains.windows(2).any(|pair| pair[0] == pair[1]);
        Mapping {
            hosts: map.hosts().iter().map(|h| h.ranks.len() as u32).collect(),
            host_domains: if has_switch { domains } else { Vec::new() },
            ..self
        }
    }

    /// Returns the hosts of the ranks; `None` if the mapping states none.
    #[must_use]
    pub fn host_map(&self) -> Option<HostMap> {
        (!self.hosts.is_empty()).then(|| HostMap::from_counts(&self.hosts, &self.host_domains))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tessera_mesh::{GroupPath, Rank, catalog};

    use super::*;
    use crate::Topology;

    #[test]
    fn a_mapping_takes_the_hosts_of_a_cluster_if_its_ranks_fill_several() {
        let mapping = |mesh: &str| Mapping { mesh: mesh.parse().unwrap(), ..Mapping::default() };
        let hgx = catalog::get("hgx-h100").unwrap().with_racks(2);
        assert_eq!(mapping("tp=8").on_cluster(&hgx), mapping("tp=8"));
        let two = mapping("tp=8,pp=2").on_cluster(&hgx);
        assert_eq!((&two.hosts[..], two.host_domains.len()), (&[8, 8][..], 0));
        let outside = Mapping { topology: Topology::Pp1, ..mapping("tp=8,pp=2") }.on_cluster(&hgx);
        assert_eq!(outside.hosts, [9, 8]);
        let rack = catalog::get("gb200-nvl72").unwrap();
        let switched = mapping("tp=2,pp=3").on_cluster(&rack);
        assert_eq!((&switched.hosts[..], &switched.host_domains[..]), (&[4, 2][..], &[0, 0][..]));
        let map = switched.host_map().unwrap();
        assert_eq!(map.path_between(&[Rank(3), Rank(4)]), Some(GroupPath::Domain));
        assert_eq!(Mapping::parse("m", &switched.to_toml()).unwrap(), switched);
    }
}
