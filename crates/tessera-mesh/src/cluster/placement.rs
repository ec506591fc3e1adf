//! Placement of ranks on devices in topology order, so that neighbouring ranks have short paths.

use tessera_base::Diagnostic;

use super::Cluster;
use crate::codes::T0103;
use crate::mesh::{Mesh, Rank};

/// Location of a device, on which one rank of the mesh runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DevicePlacement {
    /// Index of the rack in the cluster, from 0.
    pub rack: u32,
    /// Index of the host within its rack, from 0.
    pub host: u32,
    /// CPU socket within the host whose memory is closest to the device.
    pub socket: u32,
    /// Device within the host, in the order of PCIe bus addresses.
    pub slot: u32,
    /// Switch domain, numbered over the whole cluster.
    pub domain: u32,
    /// Position within the switch domain: the switch port.
    pub port: u32,
}

impl Cluster {
    /// Returns the place of the n-th device, counted by slot, then host, then rack. The n-th rank of a mesh
    /// runs there.
    #[must_use]
    pub fn place_device(&self, device: u32) -> DevicePlacement {
        let rack = self.devices_per_rack().max(1);
        let (within, host) = (device % rack, self.devices_per_host.max(1));
        let slot = within % host;
        let domain = self.domain_size.max(1);
        DevicePlacement {
            rack: device / rack,
            host: within / host,
            socket: slot / self.devices_per_socket.max(1),
            slot,
            domain: device / domain,
            port: device % domain,
        }
    }

    /// Returns the places of the ranks of a mesh in rank order. Ranks outside of the mesh take no device and
    /// have no place.
    ///
    /// # Errors
    /// T0103 if the mesh has more ranks than there are devices.
    pub fn rank_table(&self, mesh: &Mesh) -> Result<Vec<(Rank, DevicePlacement)>, Box<Diagnostic>> {
        if mesh.mesh_size() > self.device_count() {
            let racks = mesh.mesh_size().div_ceil(self.devices_per_rack().max(1));
            return Err(Box::new(
                Diagnostic::error(
                    &T0103,
                    format!("{} ranks do not fit {} devices", mesh.mesh_size(), self.device_count()),
                )
                .with_label(format!("mesh {mesh}"), format!("{} ranks", mesh.mesh_size()))
                .with_label(format!("cluster {}", self.name), format!("{} devices", self.device_count()))
                .with_hint(format!("{racks} racks have enough devices")),
            ));
        }
        Ok(mesh.inner_ranks().zip((0..).map(|n| self.place_device(n))).collect())
    }
}

#[cfg(test)]
mod tests {
    use crate::catalog;

    #[test]
    fn placements_follow_the_topology() {
        let c = catalog::get("gb200-nvl72").unwrap().with_racks(2);
        let table = c.rank_table(&"tp=8, pp=9, dp=2".parse().unwrap()).unwrap();
        assert_eq!(table.len(), 144);
        let place = |(_, s): &(_, super::DevicePlacement)| (s.rack, s.host, s.slot);
        assert!(table.windows(2).all(|w| place(&w[0]) < place(&w[1])));
        let (rank, s) = table[75];
        assert_eq!(rank.0, 75);
        assert_eq!((s.rack, s.host, s.socket, s.slot, s.domain, s.port), (1, 0, 1, 3, 1, 3));
        assert!(table[..72].iter().all(|(_, s)| s.domain == 0 && s.rack == 0));
    }

    #[test]
    fn a_mesh_larger_than_the_cluster_is_rejected() {
        let c = catalog::get("gb200-nvl72").unwrap();
        let d = c.rank_table(&"tp=12, ep=12".parse().unwrap()).unwrap_err();
        assert!(d.message.contains("144 ranks") && d.message.contains("72 devices"), "{d:?}");
        assert_eq!(d.hint.as_deref(), Some("2 racks have enough devices"));
    }
}
