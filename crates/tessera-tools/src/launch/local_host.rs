//! What this host states about itself: its names, GPUs, NUMA nodes, cores and network device.

use std::collections::BTreeSet;
use std::fs::read_to_string;

use tessera::flight::host_name;
use tessera::gpus::GpuDiscovery;
use tessera_cuda::Gpu;

/// Names by which every host knows itself.
const OWN_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// A NUMA node and those of its cores that this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    /// Number of the node.
    pub number: u32,
    /// The cores in ascending order.
    pub cores: Vec<u32>,
}

/// This host as its operating system and the GPU driver describe it.
#[derive(Debug, Clone, Default)]
pub struct LocalHost {
    /// Host name.
    pub name: String,
    /// The GPUs that the driver reports, in its order.
    pub gpus: Vec<Gpu>,
    /// The NUMA nodes with cores for this process.
    pub nodes: Vec<NumaNode>,
    /// Network device of the default route, or the only one that is up.
    pub network: Option<String>,
}

impl LocalHost {
    /// Reads this host. `with_gpus` loads the GPU libraries too.
    #[must_use]
    pub fn read(with_gpus: bool) -> LocalHost {
        let text = |path: &str| read_to_string(path).unwrap_or_default();
        let gpus = if with_gpus {
            GpuDiscovery::discover().devices.map_or(Vec::new(), |d| d.gpus)
        } else {
            Vec::new()
        };
        let status = text("/proc/self/status");
        let allowed = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
        LocalHost {
            name: host_name(),
            gpus,
            nodes: read_nodes(&parse_core_list(allowed.unwrap_or_default()).unwrap_or_default()),
            network: default_route_device(&text("/proc/net/route")),
        }
    }

    /// Returns whether a name of a list means this host.
    #[must_use]
    pub fn is_named(&self, name: &str) -> bool {
        let short = |name: &str| name.split('.').next().unwrap_or(name).to_string();
        LocalHost::is_loopback(name)
            || (!self.name.is_empty() && (name == self.name || name == short(&self.name)))
    }

    /// Returns whether every host means itself by a name.
    #[must_use]
    pub fn is_loopback(name: &str) -> bool {
        OWN_NAMES.contains(&name)
    }

    /// Returns the cores of one of `ranks` ranks of this host, and the NUMA node that holds all of
    /// them. Ranks get equal runs of cores; with more ranks than cores, ranks share all of them.
    #[must_use]
    pub fn share_cores(&self, local_rank: u32, ranks: u32) -> (String, Option<String>) {
        let cores: Vec<(u32, u32)> =
            self.nodes.iter().flat_map(|n| n.cores.iter().map(|core| (*core, n.number))).collect();
        let each = cores.len() / ranks.max(1) as usize;
        let own = if each == 0 { &cores[..] } else { &cores[local_rank as usize * each..][..each] };
        let nodes: BTreeSet<u32> = own.iter().map(|(_, node)| *node).collect();
        let node = match nodes.iter().collect::<Vec<_>>()[..] {
            [] => None,
            [one] => Some(one.to_string()),
            _ => Some("several".to_string()),
        };
        (format_core_list(&own.iter().map(|(core, _)| *core).collect::<Vec<_>>()), node)
    }
}

fn read_nodes(allowed: &[u32]) -> Vec<NumaNode> {
    let online = read_to_string("/sys/devices/system/node/online").unwrap_or_default();
    let cores_of = |number: u32| {
        let path = format!("/sys/devices/system/node/node{number}/cpulist");
        let mut cores = parse_core_list(&read_to_string(path).unwrap_or_default()).unwrap_or_default();
        cores.retain(|core| allowed.contains(core));
        NumaNode { number, cores }
    };
    let online = parse_core_list(&online).unwrap_or_default();
    let nodes: Vec<NumaNode> = online.into_iter().map(cores_of).filter(|n| !n.cores.is_empty()).collect();
    // A kernel without NUMA lists no nodes.
    if nodes.is_empty() { vec![NumaNode { number: 0, cores: allowed.to_vec() }] } else { nodes }
}

/// Parses a list of the kernel such as `0-3,8`, which may be empty; `None` for a text that is no list.
pub(super) fn parse_core_list(text: &str) -> Option<Vec<u32>> {
    let mut cores = Vec::new();
    for range in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        if first > last {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores)
}

fn format_core_list(cores: &[u32]) -> String {
    let runs = cores.chunk_by(|a, b| a.checked_add(1) == Some(*b)).map(|run| match run {
        [one] => one.to_string(),
        _ => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    runs.collect::<Vec<_>>().join(",")
}

/// Returns the device of the default route in the kernel's table, or the only device of all routes.
fn default_route_device(table: &str) -> Option<String> {
    let rows: Vec<Vec<&str>> = table.lines().skip(1).map(|l| l.split_whitespace().collect()).collect();
    let rows: Vec<(&str, &str)> = rows.iter().filter_map(|row| Some((*row.first()?, *row.get(1)?))).collect();
    let devices: BTreeSet<&str> = rows.iter().map(|(device, _)| *device).collect();
    let default = rows.iter().find(|(_, destination)| *destination == "00000000").map(|(device, _)| *device);
    default.or((devices.len() == 1).then(|| rows[0].0)).map(str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_cores_without_crossing_a_node_where_they_fit() {
        let host = LocalHost {
            name: "node01.example".into(),
            nodes: vec![
                NumaNode { number: 0, cores: vec![0, 1, 2, 8, 9, 10] },
                NumaNode { number: 1, cores: vec![3, 4, 5, 11, 12, 13] },
            ],
            ..LocalHost::default()
        };
        let share = |rank, ranks| host.share_cores(rank, ranks);
        assert_eq!(share(0, 2), ("0-2,8-10".into(), Some("0".into())));
        assert_eq!(share(2, 4), ("3-5".into(), Some("1".into())));
        assert_eq!(share(1, 3), ("9-10,3-4".into(), Some("several".into())));
        assert_eq!(share(40, 50).0, "0-2,8-10,3-5,11-13");
        assert!(host.is_named("node01") && host.is_named("localhost") && !host.is_named("node0"));
        assert!(!LocalHost::default().is_named(""));
    }

    #[test]
    fn the_network_device_is_that_of_the_default_route() {
        let table = "Iface Destination\neth1 000200C0\nib0 00000000\n";
        assert_eq!(default_route_device(table).as_deref(), Some("ib0"));
        assert_eq!(default_route_device("Iface Destination\neth1 000200C0\n").as_deref(), Some("eth1"));
        assert_eq!(default_route_device("Iface Destination\neth1 1\neth2 2\n"), None);
        assert_eq!(default_route_device(""), None);
    }

    #[test]
    fn a_list_of_cores_is_read_whole_or_not_at_all() {
        assert_eq!(parse_core_list(" 0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!((parse_core_list("5"), parse_core_list("\n")), (Some(vec![5]), Some(Vec::new())));
        for bad in [super::super::UNKNOWN, "0-", "3-1", "1,,2"] {
            assert_eq!(parse_core_list(bad), None, "{bad}");
        }
    }

    #[test]
    fn this_host_has_cores() {
        let host = LocalHost::read(false);
        assert!(!host.share_cores(0, 1).0.is_empty() && host.is_named(&host.name), "{host:?}");
    }
}
