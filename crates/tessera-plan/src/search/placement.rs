//! Who meets whom over which links: the members of every group of a mesh against the domains and racks they sit in.

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_mesh::{Axis, Cluster, Mesh, Rank};

/// A group leaves a domain.
pub static T1223: Code = Code {
    id: "T1223",
    title: "group of ranks leaves a domain of switches",
    page: "Within one domain (72 devices of a rack, or 8 of a host) every pair of devices has the full bandwidth of \
its links. A collective with members in two domains runs at the speed of the network between them, about a tenth.\n\n\
It is refused where the whole mesh has room in one domain, so that only the order of ranks is to blame, or where the \
question forbids it. A mesh larger than a domain must cross somewhere: then this is a warning, and the estimate counts \
the slower links. Best cross with dp (once a step) or pp (one activation), not with tp or ep.",
};

/// A copy straddles racks.
pub static T1224: Code = Code {
    id: "T1224",
    title: "copy of the model straddles racks",
    page: "With dp > 1 every copy of the model has room in one rack, and must stay there: then only gradients cross, \
once a step. Here ranks of one copy sit in several racks, because the order of devices interleaves copies or because the \
size of a copy does not divide a rack.\n\n\
List devices rack by rack, tp fastest, dp slowest, or choose a copy of a size that divides the rack.",
};

/// Checks every group of a mesh whose rank r runs on device `devices[r]`, counted through the cluster rack by rack.
/// `inside` refuses any group of tp or ep that leaves a domain.
#[must_use]
pub fn placement(mesh: &Mesh, devices: &[u32], cluster: &Cluster, inside: bool) -> Diagnostics {
    let mut ds = Vec::new();
    let seat = |r: &Rank| devices.get(r.0 as usize).copied().unwrap_or(r.0);
    let domain = |r: &Rank| seat(r) / cluster.domain.max(1);
    let per_rack = (cluster.hosts_per_rack * cluster.devices_per_host).max(1);
    let rack = |r: &Rank| seat(r) / per_rack;
    for axis in mesh.axes() {
        let groups = mesh.groups(axis);
        let crossing: Vec<_> =
            groups.iter().filter(|g| g.iter().any(|r| domain(r) != domain(&g[0]))).collect();
        let Some(first) = crossing.first() else { continue };
        let message = format!(
            "{} of {} {axis} groups have members in several domains of {} devices",
            crossing.len(),
            groups.len(),
            cluster.domain
        );
        let avoidable = mesh.ranks() <= cluster.domain;
        let refused = avoidable || inside && matches!(axis, Axis::Tp | Axis::Ep);
        let d =
            if refused { Diagnostic::error(&T1223, message) } else { Diagnostic::warning(&T1223, message) };
        let other = first.iter().find(|r| domain(r) != domain(&first[0])).unwrap_or(&first[0]);
        let d = d
            .at(
                format!("rank {}", first[0]),
                format!("domain {} (rack {})", domain(&first[0]), rack(&first[0])),
            )
            .at(format!("rank {other}"), format!("domain {} (rack {})", domain(other), rack(other)));
        ds.push(if avoidable {
            d.hint(format!("{} ranks have room in one domain: list its devices first", mesh.ranks()))
        } else {
            d.hint(format!("a stage of tp · ep ranks that divides {} stays inside", cluster.domain))
        });
    }
    let copies = mesh.size(Axis::Dp);
    let of_copy = mesh.inside() / copies.max(1);
    if copies > 1 && of_copy <= per_rack {
        for copy in 0..copies {
            let first = Rank(mesh.outside() + copy * of_copy);
            let other = (0..of_copy).map(|i| Rank(first.0 + i)).find(|r| rack(r) != rack(&first));
            if let Some(other) = other {
                let message =
                    format!("copy {copy} of {of_copy} ranks sits in several racks of {per_rack} devices");
                ds.push(
                    Diagnostic::error(&T1224, message)
                        .at(format!("rank {first}"), format!("rack {}", rack(&first)))
                        .at(format!("rank {other}"), format!("rack {}", rack(&other)))
                        .hint(format!(
                            "order devices rack by rack, and let a copy have a number of ranks that divides {per_rack}"
                        )),
                );
            }
        }
    }
    ds
}
