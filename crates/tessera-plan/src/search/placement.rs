//! Checks the placement of a mesh: the members of every group against the scale-up domains and
//! racks of their devices.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_mesh::{Axis, Cluster, Mesh, Rank};

use crate::codes::{T1223, T1224};

/// Checks every group of a mesh whose rank r runs on device `devices[r]`, with devices numbered
/// rack by rack. `inside` rejects any tp or ep group that leaves a domain.
#[must_use]
pub fn check_placement(mesh: &Mesh, devices: &[u32], cluster: &Cluster, within_domain: bool) -> Diagnostics {
    let mut ds = Vec::new();
    let device_of = |r: &Rank| devices.get(r.0 as usize).copied().unwrap_or(r.0);
    let domain = |r: &Rank| device_of(r) / cluster.domain_size.max(1);
    let per_rack = (cluster.hosts_per_rack * cluster.devices_per_host).max(1);
    let rack = |r: &Rank| device_of(r) / per_rack;
    for axis in mesh.active_axes() {
        let groups = mesh.axis_groups(axis);
        let crossing: Vec<_> =
            groups.iter().filter(|g| g.iter().any(|r| domain(r) != domain(&g[0]))).collect();
        let Some(first) = crossing.first() else { continue };
        let message = format!(
            "{} of {} {axis} groups have members in several domains of {} devices",
            crossing.len(),
            groups.len(),
            cluster.domain_size
        );
        let avoidable = mesh.world_size() <= cluster.domain_size;
        let refused = avoidable || within_domain && matches!(axis, Axis::Tp | Axis::Ep);
        let d =
            if refused { Diagnostic::error(&T1223, message) } else { Diagnostic::warning(&T1223, message) };
        let other = first.iter().find(|r| domain(r) != domain(&first[0])).unwrap_or(&first[0]);
        let d = d
            .with_label(
                format!("rank {}", first[0]),
                format!("domain {} (rack {})", domain(&first[0]), rack(&first[0])),
            )
            .with_label(format!("rank {other}"), format!("domain {} (rack {})", domain(other), rack(other)));
        ds.push(if avoidable {
            d.with_hint(format!("{} ranks fit in one domain: list its devices first", mesh.world_size()))
        } else {
            d.with_hint(format!(
                "a stage of tp · ep ranks stays inside if its size divides {}",
                cluster.domain_size
            ))
        });
    }
    let copies = mesh.axis_size(Axis::Dp);
    let of_copy = mesh.mesh_size() / copies.max(1);
    if copies > 1 && of_copy <= per_rack {
        for copy in 0..copies {
            let first = Rank(mesh.outside_count() + copy * of_copy);
            let other = (0..of_copy).map(|i| Rank(first.0 + i)).find(|r| rack(r) != rack(&first));
            if let Some(other) = other {
                let message =
                    format!("replica {copy} of {of_copy} ranks spans several racks of {per_rack} devices");
                ds.push(
                    Diagnostic::error(&T1224, message)
                        .with_label(format!("rank {first}"), format!("rack {}", rack(&first)))
                        .with_label(format!("rank {other}"), format!("rack {}", rack(&other)))
                        .with_hint(format!(
                            "order devices rack by rack, and choose a number of ranks per replica that divides {per_rack}"
                        )),
                );
            }
        }
    }
    ds
}
