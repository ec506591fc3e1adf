//! Who sits where: ranks on devices in the order of the topology, so that neighbours in rank are neighbours in wire.

use tessera_base::Diagnostic;

use super::Cluster;
use crate::mesh::{Mesh, Rank, T0103};

/// The device that one rank runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seat {
    /// Who.
    pub rank: Rank,
    /// Rack, from 0.
    pub rack: u32,
    /// Host within the rack.
    pub host: u32,
    /// Socket within the host: the memory that is near.
    pub socket: u32,
    /// Device within the host, in the order of its bus addresses.
    pub slot: u32,
    /// Domain of switches over the whole cluster.
    pub domain: u32,
    /// Position within the domain: the port of its switches.
    pub port: u32,
}

impl Cluster {
    /// The seat of the n-th device, counted through slots, hosts, then racks.
    #[must_use]
    pub fn seat(&self, rank: Rank) -> Seat {
        let (device, rack) = (rank.0, self.devices_per_rack().max(1));
        let (within, host) = (device % rack, self.devices_per_host.max(1));
        let slot = within % host;
        let domain = self.domain.max(1);
        Seat {
            rank,
            rack: device / rack,
            host: within / host,
            socket: slot / self.devices_per_socket.max(1),
            slot,
            domain: device / domain,
            port: device % domain,
        }
    }

    /// Seats of all ranks of a world, ranks outside the mesh first, in rank order.
    ///
    /// # Errors
    /// T0103 for more ranks than devices.
    pub fn rank_table(&self, mesh: &Mesh) -> Result<Vec<Seat>, Box<Diagnostic>> {
        if mesh.ranks() > self.devices() {
            let racks = mesh.ranks().div_ceil(self.devices_per_rack().max(1));
            return Err(Box::new(
                Diagnostic::error(
                    &T0103,
                    format!("{} ranks do not fit {} devices", mesh.ranks(), self.devices()),
                )
                .at(format!("mesh {mesh}"), format!("{} ranks", mesh.ranks()))
                .at(format!("cluster {}", self.name), format!("{} devices", self.devices()))
                .hint(format!("{racks} racks have room for it")),
            ));
        }
        Ok(mesh.iter().map(|rank| self.seat(rank)).collect())
    }
}

#[cfg(test)]
mod tests {
    use crate::clusters;

    #[test]
    fn seats_follow_the_topology() {
        let c = clusters::named("gb200-nvl72").unwrap().with_racks(2);
        let table = c.rank_table(&"tp=8, pp=9, dp=2".parse().unwrap()).unwrap();
        assert_eq!(table.len(), 144);
        assert!(
            table.windows(2).all(|w| (w[0].rack, w[0].host, w[0].slot) < (w[1].rack, w[1].host, w[1].slot))
        );
        let s = table[75];
        assert_eq!((s.rack, s.host, s.socket, s.slot, s.domain, s.port), (1, 0, 1, 3, 1, 3));
        assert!(table[..72].iter().all(|s| s.domain == 0 && s.rack == 0));
    }

    #[test]
    fn a_mesh_larger_than_the_cluster_is_refused() {
        let c = clusters::named("gb200-nvl72").unwrap();
        let d = c.rank_table(&"tp=12, ep=12".parse().unwrap()).unwrap_err();
        assert!(d.message.contains("144 ranks") && d.message.contains("72 devices"), "{d:?}");
        assert_eq!(d.hint.as_deref(), Some("2 racks have room for it"));
    }
}
