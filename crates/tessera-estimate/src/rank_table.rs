//! The rank table: assigns every rank of a plan to a device, for the launcher.

use std::fmt::Write;

use tessera_mesh::{Cluster, DevicePlacement, GroupPath, HostMap, Mesh, Rank};
use tessera_plan::search::Candidate;

/// File name of the table in a plan's folder.
pub(crate) const RANK_TABLE_FILE: &str = "ranks.txt";

/// Places the ranks of a candidate. Within a stage tp varies fastest, then the remaining ranks of
/// the stage; stages follow each other, and replicas of the model come last. Returns `None` if the
/// cluster is too small.
pub(crate) fn candidate_table(cluster: &Cluster, c: &Candidate) -> Option<String> {
    let (l, unit) = (c.layout, c.replica_stage_ranks());
    let mesh = Mesh::new([unit, 1, c.pp, c.model_replicas()]).ok()?;
    render_table(cluster, &mesh, &["dp", "pp", "tp", "expert_tp", "ep"], |rank| {
        let (within, stage) = (rank.0 % unit, rank.0 / unit);
        let experts = within / l.expert_tp;
        [stage / c.pp, stage % c.pp, within % l.tp, within % l.expert_tp, experts % l.ep]
            .map(|n| n.to_string())
    })
}

/// Places the ranks of a mapping's world on the hosts that [`HostMap::from_cluster`] gives them, which a plan
/// of the mapping states. Ranks outside of the mesh come first, without a device. Returns `None` if the cluster
/// is too small.
pub(crate) fn mesh_table(cluster: &Cluster, mesh: &Mesh) -> Option<String> {
    let table = render_table(cluster, mesh, &["place"], |rank| {
        let at = mesh.coord_of(rank);
        let axes: Vec<String> = mesh.active_axes().map(|a| format!("{a}={}", at.on_axis(a))).collect();
        [match (mesh.contains(rank), axes.is_empty()) {
            (false, _) => "outside".to_string(),
            (true, true) => "alone".to_string(),
            (true, false) => axes.join(","),
        }]
    })?;
    Some(describe_paths(cluster, mesh) + &table)
}

/// Returns a comment line for each axis: the longest path that the data of its groups takes.
fn describe_paths(cluster: &Cluster, mesh: &Mesh) -> String {
    let hosts = HostMap::from_cluster(cluster, mesh);
    let mut out = String::new();
    for axis in mesh.active_axes() {
        let groups = mesh.axis_groups(axis);
        let paths: Vec<GroupPath> = groups.iter().filter_map(|members| hosts.path_between(members)).collect();
        let longest = paths.iter().copied().max().unwrap_or(GroupPath::PeerMemory);
        let leaving = paths.iter().filter(|path| path.leaves_host()).count();
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "# Data of {axis}: {}; {leaving} of {} groups have members on several hosts.",
            longest.name(),
            groups.len()
        );
    }
    out
}

fn render_table<const N: usize>(
    cluster: &Cluster,
    mesh: &Mesh,
    names: &[&str; N],
    coordinates: impl Fn(Rank) -> [String; N],
) -> Option<String> {
    let placements = cluster.rank_table(mesh).ok()?;
    let mut out = format!(
        "# Ranks on devices of {}, in cabling order: launch rank r on this host and device, with memory of this\n\
         # socket. Port is the position within a domain of {} devices. Columns are separated by tabs.\n",
        cluster.title, cluster.domain_size,
    );
    if mesh.outside_count() > 0 {
        out += "# A rank outside of the mesh runs on the first host, beside its other ranks, and takes no device of the mesh.\n";
    }
    out += &format!("rank\track\thost\tsocket\tdevice\tdomain\tport\t{}\n", names.join("\t"));
    let mut add_row = |rank: Rank, at: DevicePlacement, of_device: [String; 3]| {
        let [socket, device, port] = of_device;
        let (rack, host, domain) = (at.rack, at.host, at.domain);
        let coordinates = coordinates(rank).join("\t");
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{rank}\t{rack}\t{host}\t{socket}\t{device}\t{domain}\t{port}\t{coordinates}");
    };
    for rank in (0..mesh.outside_count()).map(Rank) {
        add_row(rank, cluster.place_device(0), [(); 3].map(|()| "-".to_string()));
    }
    for (rank, at) in placements {
        add_row(rank, at, [at.socket, at.slot, at.port].map(|n| n.to_string()));
    }
    Some(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tessera_mesh::catalog;

    #[test]
    fn ranks_are_placed_in_cabling_order() {
        let rack = catalog::get("gb200-nvl72").unwrap();
        let text = mesh_table(&rack, &"tp=2,pp=3,outside=1".parse().unwrap()).unwrap();
        let rows: Vec<&str> = text.lines().filter(|l| !l.starts_with('#')).collect();
        assert_eq!(rows[0], "rank\track\thost\tsocket\tdevice\tdomain\tport\tplace");
        assert_eq!(rows[1], "0\t0\t0\t-\t-\t0\t-\toutside");
        assert_eq!(rows[2], "1\t0\t0\t0\t0\t0\t0\ttp=0,pp=0");
        assert_eq!(rows[6], "5\t0\t1\t0\t0\t0\t4\ttp=0,pp=2");
        assert_eq!(rows.len(), 8);
        assert!(mesh_table(&rack, &"tp=80".parse().unwrap()).is_none());
    }

    #[test]
    fn the_table_says_by_which_path_the_groups_of_an_axis_exchange_data() {
        let two = catalog::get("hgx-h100").unwrap().with_racks(2);
        let text = mesh_table(&two, &"tp=8,dp=2".parse().unwrap()).unwrap();
        assert!(
            text.contains("# Data of tp: peer memory; 0 of 2 groups have members on several hosts.\n"),
            "{text}"
        );
        assert!(text.contains("# Data of dp: network; 8 of 8 groups"), "{text}");
        let rack = catalog::get("gb200-nvl72").unwrap();
        let text = mesh_table(&rack, &"tp=8,pp=9".parse().unwrap()).unwrap();
        assert!(text.contains("# Data of tp: switch domain; 9 of 9 groups"), "{text}");
    }
}
