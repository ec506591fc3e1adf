//! The launch of a plan on named hosts, before anything is started: which rank runs where, with
//! which variables, and which groups of ranks send data between hosts.
//!
//! Nothing here starts a process on another host. The result is for a person who checks it, or for
//! the scripts of a launcher.

mod host_assignment;
mod local_host;
mod rank_variables;

use std::collections::BTreeMap;
use std::path::PathBuf;

use tessera::gpu_placement::{find_gpu, numa_node, position_on_host};
use tessera::group_traffic::list_group_traffic;
use tessera::nccl_algorithms::NcclTags;
use tessera::stream_options::RunDevice;
use tessera::{Mesh, Plan};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_mesh::{HostMap, Rank, RankMap};
use tessera_runtime::tripwire::T0777;
use tessera_verify::SealedPlan;

use crate::codes::T0066;

pub use host_assignment::{
    HostRanks, HostSlots, assign_ranks, parse_host_count_or_list, parse_host_file, parse_host_list,
};
pub use local_host::{LocalHost, NumaNode};
pub use rank_variables::{RankVariable, VariableSource};
pub use tessera::group_traffic::GroupTraffic;

/// Text of a fact that only the host itself knows.
pub const UNKNOWN: &str = "unknown until the host is asked";

/// What to launch, and where.
#[derive(Debug)]
pub struct LaunchRequest<'a> {
    /// The plan whose ranks are placed.
    pub plan: &'a Plan,
    /// The hosts, in the order in which they get ranks.
    pub hosts: Vec<HostSlots>,
    /// Device of the ranks.
    pub device: RunDevice,
    /// Port at which rank 0 listens.
    pub leader_port: u16,
    /// File with the run's secret on every host, if the user named it.
    pub secret: Option<PathBuf>,
    /// Environment of the user, whose values are kept.
    pub environment: BTreeMap<String, String>,
}

/// The place of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlace {
    /// The rank.
    pub rank: u32,
    /// Its coordinates in the mesh, such as `tp=1,pp=0`.
    pub coordinates: String,
    /// Name of its host.
    pub host: String,
    /// Index among the ranks of its host.
    pub local_rank: u32,
    /// Device: an index or a UUID for GPUs, `-` for a rank without a device of its own.
    pub device: String,
    /// NUMA node of the device or the cores.
    pub numa_node: String,
    /// Cores that the rank may use.
    pub cores: String,
    /// Network device of the host.
    pub network: String,
    /// The variables of the rank.
    pub variables: Vec<RankVariable>,
}

/// A launch that was worked out and not started.
#[derive(Debug, Clone, PartialEq)]
pub struct LaunchPlan {
    /// The ranks in order.
    pub ranks: Vec<RankPlace>,
    /// The groups of ranks that communicate, by program.
    pub groups: Vec<GroupTraffic>,
    /// Why NCCL cannot follow the tags of algorithms, if ranks use NCCL and it cannot.
    pub algorithm_conflict: Option<String>,
}

/// Works out the launch of a plan. `local` describes this host, if it is one of the hosts.
///
/// # Errors
/// T0066 if the hosts do not fit the plan, T0777 if they split a host that the plan states.
pub fn plan_launch(request: &LaunchRequest<'_>, local: &LocalHost) -> Result<LaunchPlan, Diagnostics> {
    let (sealed, mesh) = (&request.plan.sealed, request.plan.sealed.mesh());
    let hosts = assign_ranks(&request.hosts, mesh).map_err(|d| vec![d])?;
    if hosts.len() > 1 && LocalHost::is_loopback(&hosts[0].name) {
        let what = format!("other hosts do not reach rank 0 at {}", hosts[0].name);
        return Err(vec![
            Diagnostic::error(&T0066, what)
                .with_label("first host", hosts[0].name.clone())
                .with_hint("name the first host as the others know it"),
        ]);
    }
    check_stated_hosts(sealed, &hosts)?;
    let counts: Vec<u32> = hosts.iter().map(|host| host.count).collect();
    let host_map = HostMap::from_counts(&counts, &[]);
    let groups = list_group_traffic(sealed, &host_map);
    let tags = match request.device {
        RunDevice::Cuda => NcclTags::from_plan(sealed, &host_map),
        _ => NcclTags::default(),
    };
    let uses_all_to_all = groups.iter().any(|g| g.op == "all_to_all");
    let mut ranks = Vec::new();
    for host in &hosts {
        let known = local.is_named(&host.name).then_some(local);
        for rank in (host.first..host.first + host.count).map(Rank) {
            let mut place = place_rank(request, host, rank, known);
            let facts = rank_variables::LaunchFacts {
                leader_host: &hosts[0].name,
                world: mesh.world_size(),
                local_world: host.count,
                uses_all_to_all,
                tags,
                network: known.and_then(|l| l.network.as_deref()),
                spans_hosts: hosts.len() > 1,
            };
            place.variables = rank_variables::list_variables(request, &place, &facts);
            ranks.push(place);
        }
    }
    Ok(LaunchPlan { ranks, groups, algorithm_conflict: tags.describe_conflict() })
}

/// Checks that no two ranks that the plan states on one host get two, as the leader does before the first
/// call.
fn check_stated_hosts(sealed: &SealedPlan, hosts: &[HostRanks]) -> Result<(), Diagnostics> {
    let Some(stated) = sealed.hosts() else { return Ok(()) };
    let names =
        |h: &HostRanks| (h.first..h.first + h.count).map(|rank| (rank, h.name.clone())).collect::<Vec<_>>();
    let real: BTreeMap<u32, String> = hosts.iter().flat_map(names).collect();
    let refused = stated.hosts.find_misplaced(&real).into_iter().map(|m| {
        Diagnostic::error(&T0777, m.to_string())
            .with_label("plan", stated.hosts.describe())
            .with_hint("name as many hosts as the plan states, or plan again with --hosts")
    });
    let refused: Diagnostics = refused.collect();
    if refused.is_empty() { Ok(()) } else { Err(refused) }
}

fn place_rank(
    request: &LaunchRequest<'_>,
    host: &HostRanks,
    rank: Rank,
    known: Option<&LocalHost>,
) -> RankPlace {
    let (sealed, mesh): (&SealedPlan, &Mesh) = (&request.plan.sealed, request.plan.sealed.mesh());
    let local_rank = rank.0 - host.first;
    let (device, numa_node) = match (request.device, mesh.contains(rank)) {
        (RunDevice::Cuda, true) => place_gpu((mesh, sealed.rank_map()), host.first, rank, known),
        _ => ("-".to_string(), None),
    };
    let (cores, node_of_cores) = match known {
        Some(local) => local.share_cores(local_rank, host.count),
        None => (UNKNOWN.to_string(), None),
    };
    let numa_node = numa_node.or(node_of_cores);
    RankPlace {
        rank: rank.0,
        coordinates: describe_coordinates(mesh, rank),
        host: host.name.clone(),
        local_rank,
        device,
        numa_node: numa_node.unwrap_or_else(|| UNKNOWN.to_string()),
        cores,
        network: match known {
            Some(local) => local.network.clone().unwrap_or_else(|| "none is up".to_string()),
            None => UNKNOWN.to_string(),
        },
        variables: Vec::new(),
    }
}

/// Returns the GPU of a rank and its NUMA node. The index follows from the plan alone; the UUID is
/// known if the plan names it, or if the host is this one.
fn place_gpu(
    (mesh, map): (&Mesh, &RankMap),
    first: u32,
    rank: Rank,
    known: Option<&LocalHost>,
) -> (String, Option<String>) {
    let named = map.device_of(rank).unwrap_or_default();
    let index = position_on_host(mesh, first, rank);
    let Some(local) = known else {
        let is_position = named == format!("rank{rank}");
        return (if is_position { format!("GPU {index}") } else { named.to_string() }, None);
    };
    let found = find_gpu(&local.gpus, (mesh, map), first, rank).ok();
    match found.and_then(|i| Some((i, local.gpus.get(i as usize)?))) {
        Some((i, gpu)) => {
            (format!("GPU {i}, {}", gpu.uuid), numa_node(&gpu.pci_bus_id).filter(|node| node != "-1"))
        }
        None => (format!("GPU {index}, which this host does not show"), None),
    }
}

fn describe_coordinates(mesh: &Mesh, rank: Rank) -> String {
    if !mesh.contains(rank) {
        return "outside the mesh".to_string();
    }
    let at = mesh.coord_of(rank);
    let axes: Vec<String> = mesh.active_axes().map(|a| format!("{a}={}", at.on_axis(a))).collect();
    if axes.is_empty() { "alone".to_string() } else { axes.join(",") }
}
