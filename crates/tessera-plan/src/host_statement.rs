//! States the hosts of a mapping in a bundle, with the path of every communicator of its programs.

use std::collections::BTreeSet;

use tessera_ir::{Bundle, CommRoute, Communicator, GroupStatement, HostStatement};
use tessera_mesh::HostMap;

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
    /// Returns the hosts of the ranks; `None` if the mapping states none.
    #[must_use]
    pub fn host_map(&self) -> Option<HostMap> {
        (!self.hosts.is_empty()).then(|| HostMap::from_counts(&self.hosts, &self.host_domains))
    }
}
