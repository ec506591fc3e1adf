//! Ranks on the GPUs of this host, as threads of one process.

#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part of this file")]

use std::sync::Arc;
use std::time::Duration;

use tessera::gpus::{GpuDiscovery, KernelDir, masked_features};
use tessera_cuda::{
    CommunicatorMember, CudaBackend, CudaOptions, REQUIRE_GPUS, ThreadRank, ThreadRanks, assert_may_skip,
    unique_id,
};
use tessera_device::{CommRoute, Communicator};
use tessera_filetests::BackendFactory;
use tessera_ir::Program;
use tessera_mesh::Mesh;

/// Reason for skipping a file that needs more ranks than there are GPUs.
pub const TOO_FEW_GPUS: &str = "too few GPUs";

/// Longest wait for a peer in one collective.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the GPUs of this host and their number, or `None`, after it printed why, if there are
/// fewer than the test needs.
pub fn find_gpus(needed: u32) -> Option<(Arc<GpuDiscovery>, u32)> {
    let found = GpuDiscovery::discover();
    let why = match &found.devices {
        Ok(d) if d.gpus.len() >= needed as usize => {
            let count = d.gpus.len() as u32;
            return Some((Arc::new(found), count));
        }
        Ok(d) => format!("the driver reports {} GPU(s), the test needs {needed}", d.gpus.len()),
        Err(d) => d.message.clone(),
    };
    assert_may_skip(std::env::var(REQUIRE_GPUS).ok().as_deref(), needed as usize, &why);
    println!("not run: {why}");
    None
}

pub fn options(device: u32) -> CudaOptions {
    CudaOptions {
        device_index: device,
        kernel_cache: Some(Arc::new(KernelDir(std::env::temp_dir().join("tessera-kernels")))),
        peer_timeout: TIMEOUT,
        setup_timeout: Duration::from_secs(20),
        // Without a number the ranks exchange no memory handles, so they communicate through NCCL.
        host_id: 0,
        masked_features: masked_features().unwrap(),
        thread_rank: None,
    }
}

/// How the ranks of a test move data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    Nccl,
    /// The memory of each other's GPUs, as ranks that are threads of a session do.
    PeerMemory,
}

/// Returns what opens the backend of each rank, on the GPU of the same number.
///
/// # Errors
/// [`TOO_FEW_GPUS`], or what NCCL reports.
pub fn open_ranks(
    (found, count): (&Arc<GpuDiscovery>, u32),
    link: Link,
    mesh: &Mesh,
    programs: &[Vec<Arc<Program>>],
) -> Result<Vec<BackendFactory<CudaBackend>>, String> {
    let ranks = mesh.iter().count();
    if ranks > count as usize {
        return Err(format!("{TOO_FEW_GPUS}: {ranks} ranks, {count} GPUs"));
    }
    let ends = communicator_ends(found, mesh, programs)?;
    let threads = ThreadRanks::new(ranks);
    let maker = |(device, ends): (u32, Vec<CommunicatorMember>)| -> BackendFactory<CudaBackend> {
        let found = Arc::clone(found);
        let place = ThreadRank { ranks: Arc::clone(&threads), index: device as usize };
        let thread_rank = (link == Link::PeerMemory).then_some(place);
        Box::new(move |seat| {
            let options = CudaOptions { thread_rank, ..options(device) };
            CudaBackend::open(&found.libraries, seat, ends, options).map_err(|d| d.message)
        })
    };
    Ok(mesh.iter().map(|r| r.0).zip(ends).map(maker).collect())
}

/// Returns each rank's ends of the communicators that the programs use, by rank.
pub fn communicator_ends(
    found: &GpuDiscovery,
    mesh: &Mesh,
    programs: &[Vec<Arc<Program>>],
) -> Result<Vec<Vec<CommunicatorMember>>, String> {
    let mut lanes: Vec<Communicator> = mesh
        .iter()
        .zip(programs)
        .flat_map(|(rank, programs)| programs.iter().map(move |p| (rank, p)))
        .flat_map(|(rank, p)| p.collective_ops().map(move |(_, op)| (rank, op)))
        .filter_map(|(rank, op)| CommRoute::from_op(op)?.communicator_of(mesh, rank))
        .collect();
    lanes.sort();
    lanes.dedup();
    let mut ends: Vec<Vec<CommunicatorMember>> = mesh.iter().map(|_| Vec::new()).collect();
    for lane in lanes {
        let id = unique_id(&found.libraries).map_err(|d| d.message)?;
        for (me, rank) in lane.members.iter().enumerate() {
            let route = lane.member_route(mesh, me).ok_or("a communicator without a group")?;
            ends[rank.0 as usize].push(CommunicatorMember {
                route,
                id,
                member: me,
                member_count: lane.members.len(),
            });
        }
    }
    Ok(ends)
}
