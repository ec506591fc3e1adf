//! Which rank of a plan sits on which device, as a table for whoever starts the ranks.

use std::fmt::Write;

use tessera_mesh::{Cluster, Mesh, Rank};
use tessera_plan::search::Candidate;

/// Its file in a plan's folder.
pub(super) const FILE: &str = "ranks.txt";

/// Ranks of a candidate: within a stage tp is fastest, then what is left of the ranks that hold it together; stages follow
/// each other, copies of the model come last. None where the machine has no room.
pub(super) fn of_candidate(cluster: &Cluster, c: &Candidate) -> Option<String> {
    let (l, unit) = (c.layout, c.unit());
    let mesh = Mesh::new([unit, 1, c.pp, c.copies()]).ok()?;
    table(cluster, &mesh, &["dp", "pp", "tp", "expert_tp", "ep"], |rank| {
        let (within, stage) = (rank.0 % unit, rank.0 / unit);
        let experts = within / l.expert_tp;
        [stage / c.pp, stage % c.pp, within % l.tp, within % l.expert_tp, experts % l.ep]
            .map(|n| n.to_string())
    })
}

/// Ranks of a mapping's mesh, those outside of it first.
pub(super) fn of_mesh(cluster: &Cluster, mesh: &Mesh) -> Option<String> {
    table(cluster, mesh, &["place"], |rank| {
        let at = mesh.coord_of(rank);
        let axes: Vec<String> = mesh.axes().map(|a| format!("{a}={}", at.on(a))).collect();
        [match (mesh.contains(rank), axes.is_empty()) {
            (false, _) => "outside".to_string(),
            (true, true) => "alone".to_string(),
            (true, false) => axes.join(","),
        }]
    })
}

fn table<const N: usize>(
    cluster: &Cluster,
    mesh: &Mesh,
    names: &[&str; N],
    place: impl Fn(Rank) -> [String; N],
) -> Option<String> {
    let seats = cluster.rank_table(mesh).ok()?;
    let mut out = format!(
        "# Ranks on devices of {}, in the order of its wires: launch rank r on this host and device, near this socket's\n\
         # memory. Port is the place within a domain of {} devices. Columns are parted by tabs.\n\
         rank\track\thost\tsocket\tdevice\tdomain\tport\t{}\n",
        cluster.title,
        cluster.domain,
        names.join("\t")
    );
    for s in seats {
        let _ = writeln!(
            out,
            "{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}",
            s.rank,
            s.rack,
            s.host,
            s.socket,
            s.slot,
            s.domain,
            s.port,
            place(s.rank).join("\t")
        );
    }
    Some(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tessera_mesh::clusters;

    #[test]
    fn a_mesh_is_seated_in_the_order_of_the_wires() {
        let rack = clusters::named("gb200-nvl72").unwrap();
        let mesh: Mesh = "tp=2,pp=3".parse().unwrap();
        let text = of_mesh(&rack, &mesh.with_outside(1).unwrap()).unwrap();
        let rows: Vec<&str> = text.lines().filter(|l| !l.starts_with('#')).collect();
        assert_eq!(rows[0], "rank\track\thost\tsocket\tdevice\tdomain\tport\tplace");
        assert_eq!(rows[1], "0\t0\t0\t0\t0\t0\t0\toutside");
        assert_eq!(rows[6], "5\t0\t1\t0\t1\t0\t5\ttp=0,pp=2");
        assert_eq!(rows.len(), 8);
        assert!(of_mesh(&rack, &"tp=80".parse().unwrap()).is_none());
    }
}
