//! Which ranks of a plan a process of a launcher runs: one rank, or all ranks of its host.

use tessera_base::Diagnostic;
use tessera_mesh::Mesh;

use super::LauncherPlacement;
use crate::codes::T0068;

/// The ranks of a plan that a process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankShare {
    /// First rank of the process.
    pub first: u32,
    /// Number of ranks of the process. Their numbers are consecutive.
    pub count: u32,
    /// Number of ranks of the plan.
    pub world: u32,
}

/// Returns the ranks of one of equal hosts: ranks outside the mesh, which need no device, come first and run on the first
/// host. `None` if the hosts cannot share the mesh equally.
#[must_use]
pub fn share_of_host(mesh: &Mesh, host: u32, hosts: u32) -> Option<RankShare> {
    let (world, outside) = (mesh.world_size(), mesh.outside_count());
    let inside = world - outside;
    if hosts == 0 || !inside.is_multiple_of(hosts) {
        return None;
    }
    let each = inside / hosts;
    let (first, extra) = if host == 0 { (0, outside) } else { (outside + host * each, 0) };
    Some(RankShare { first, count: each + extra, world })
}

/// Divides the ranks of a plan among the processes of a launcher.
///
/// With as many processes as ranks, each process is one rank. With one process per host, each host
/// gets the same number of ranks of the mesh; ranks outside the mesh, which need no device, come
/// first and run on the first host.
///
/// # Errors
/// T0068 if neither is possible.
pub fn share_ranks(placement: &LauncherPlacement, mesh: &Mesh) -> Result<RankShare, Diagnostic> {
    let (process, processes, world) = (placement.process, placement.processes, mesh.world_size());
    if processes == world {
        return Ok(RankShare { first: process, count: 1, world });
    }
    let is_per_host = placement.local_processes == Some(1);
    if is_per_host && let Some(share) = share_of_host(mesh, process, processes) {
        return Ok(share);
    }
    let hint = match is_per_host {
        true => format!(
            "start one process per rank, or one on each of a number of hosts that divides {} ranks",
            world - mesh.outside_count()
        ),
        false => "start as many processes as the plan has ranks, or one process on each host".to_string(),
    };
    let name = placement.launcher.name();
    Err(Diagnostic::error(&T0068, format!("{world} ranks cannot be divided among {processes} processes"))
        .with_label("plan", format!("{mesh}, {world} ranks"))
        .with_label(
            name,
            match placement.local_processes {
                Some(1) => format!("{processes} processes, one on each host"),
                Some(local) => format!("{processes} processes, {local} on this host"),
                None => format!("{processes} processes"),
            },
        )
        .with_hint(hint))
}
