//! What this host states about itself: its names, GPUs, NUMA nodes, cores and network device.

use std::collections::BTreeSet;
use std::fs::read_to_string;

use tessera::flight::host_name;
use tessera::gpus::GpuDiscovery;
use tessera::system;
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
        let gpus = if with_gpus {
            GpuDiscovery::discover().devices.map_or(Vec::new(), |d| d.gpus)
        } else {
            Vec::new()
        };
        let allowed = system::allowed_cores().unwrap_or_default();
        LocalHost {
            name: host_name(),
            gpus,
            nodes: read_nodes(&parse_core_list(&allowed).unwrap_or_default()),
            network: system::default_network_device(),
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
