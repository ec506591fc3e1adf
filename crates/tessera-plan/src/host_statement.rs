//! States the hosts of a mapping in a bundle, with the path of every communicator of its programs.

use std::collections::BTreeSet;

use tessera_ir::{Bundle, CommRoute, Communicator, GroupStatement, HostStatement};
use tessera_mesh::{Cluster, HostMap, PlanHost};

use crate::Mapping;

/// States hosts in a bundle, with the paths that follow from them; without hosts the bundle has no
/// statement. A group of which a member is on no host gets no path.
pub fn state_hosts(bundle: &mut Bundle, hosts: Option<HostMap>) {
    bundle.hosts = hosts.map(|hosts| {
        let groups = list_communicators(bundle).into_iter().filter_map(|communicator| {
            let path = hosts.path_between(&communicator.members)?;
            Some(GroupStatement { communicator, path })
        });
        HostStatement { groups: groups.collect(), hosts }
    });
}

/// Returns every communicator of two or more ranks that the programs name.
fn list_communicators(bundle: &Bundle) -> BTreeSet<Communicator> {
    let mut out = BTreeSet::new();
    for (i, role) in bundle.roles.iter().enumerate() {
        let programs = bundle.phases.iter().filter_map(|phase| phase.programs.get(i));
        let routes: BTreeSet<CommRoute> =
            programs.flat_map(|p| p.ops.iter().filter_map(CommRoute::from_op)).collect();
        for rank in &role.ranks {
            let own = routes.iter().filter_map(|route| route.communicator_of(&bundle.mesh, *rank));
            out.extend(own.filter(|c| c.members.len() > 1));
        }
    }
    out
}

impl Mapping {
    /// States the hosts of a cluster, which the ranks of the mesh fill in cabling order. Ranks outside of the
    /// mesh, which need no device, are on the first host besides, as launchers place them. A mapping whose
    /// ranks fit on one host states none.
    #[must_use]
    pub fn on_cluster(self, cluster: &Cluster) -> Mapping {
        let Ok(world) = self.world_mesh() else { return self };
        let map = HostMap::from_cluster(cluster, world.mesh_size());
        if map.hosts.len() < 2 {
            return self;
        }
        let mut numbers: Vec<u32> = map.hosts.iter().map(|h| h.domain).collect();
        numbers.dedup();
        let own = |host: &PlanHost| numbers.iter().position(|d| *d == host.domain).map_or(0, |at| at as u32);
        let has_switch = numbers.len() < map.hosts.len();
        Mapping {
            hosts: (0..)
                .zip(&map.hosts)
                .map(|(number, host)| {
                    host.ranks.len() as u32 + if number == 0 { world.outside_count() } else { 0 }
                })
                .collect(),
            host_domains: if has_switch { map.hosts.iter().map(own).collect() } else { Vec::new() },
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
