//! The GPU on which a leader decodes beside the calls, if the plan puts the phases of pixels on a GPU that no
//! rank has.

use tessera_base::{Bytes, Diagnostic};
use tessera_cuda::{CudaBackend, free_bytes};
use tessera_device::T0804;
use tessera_mesh::Rank;
use tessera_plan::MediaPlacement;

use crate::gpu_placement::find_gpu;
use crate::gpus::GpuDiscovery;
use crate::leader_memory::LeaderMemory;
use crate::plan::{LeaderPart, Plan, is_leader_phase, leader_phases};

/// Returns whether a phase runs on the leader's own device of a plan with `media = "outside"`. An input
/// video is encoded on the CPU.
pub(crate) fn is_outside_phase(plan: &Plan, phase: &str) -> bool {
    plan.mapping.media == MediaPlacement::Outside
        && LeaderPart::from_phase(phase) == LeaderPart::Pixels
        && is_leader_phase(&plan.sealed, phase)
}

/// Returns the GPU of the leader's host that runs the phases of pixels, as an index of a visible GPU. `gpus`
/// are those of the host, with its first rank, if the ranks run on GPUs. `None` without such phases, and for
/// ranks on CPUs, where the leader runs them on its cores.
///
/// # Errors
/// T0804 if each GPU belongs to a rank or none has the memory, and T0801 without a kernel for an op.
pub(crate) fn place_pixels(
    plan: &Plan,
    gpus: Option<(&GpuDiscovery, u32)>,
) -> Result<Option<u32>, Diagnostic> {
    let (MediaPlacement::Outside, Some((gpus, first_rank_of_host))) = (plan.mapping.media, gpus) else {
        return Ok(None);
    };
    let programs = leader_phases(&plan.sealed).filter(|name| is_outside_phase(plan, name));
    let mut programs = programs.filter_map(|name| plan.sealed.rank_program(name, Rank(0)));
    if let Some(refused) = programs.find_map(|p| CudaBackend::find_unsupported(p)) {
        return Err(refused);
    }
    let gpu = find_free_gpu(plan, gpus, first_rank_of_host).ok_or_else(|| {
        Diagnostic::error(
            &T0804,
            "the plan decodes on a GPU that no rank has, and each GPU of its host belongs to one",
        )
        .with_label("plan", "media = \"outside\"")
        .with_hint("use fewer ranks, list more GPUs in CUDA_VISIBLE_DEVICES, or plan with --media mesh")
    })?;
    let visible = &gpus.devices.as_ref().map_err(Clone::clone)?.gpus;
    let total = visible.get(gpu as usize).map_or(0, |g| g.memory.0);
    let free = free_bytes(&gpus.libraries, gpu).unwrap_or(total);
    let needed = outside_bytes(plan);
    if needed > free {
        let what = format!("decode needs {}, and GPU {gpu} has {} free", Bytes(needed), Bytes(free));
        return Err(Diagnostic::error(&T0804, what).with_hint("use a smaller picture, or --media mesh"));
    }
    Ok(Some(gpu))
}

/// Returns the device memory of the phases of pixels on a GPU that no rank has; 0 if they run elsewhere.
pub(crate) fn outside_bytes(plan: &Plan) -> u64 {
    if plan.mapping.media != MediaPlacement::Outside {
        return 0;
    }
    let memory = LeaderMemory::from_phases(plan, |name| is_outside_phase(plan, name));
    memory.total_bytes().saturating_add(CudaBackend::overhead_bytes(0))
}

/// Returns the first visible GPU of the leader's host that no rank of the mesh has.
pub(crate) fn find_free_gpu(plan: &Plan, gpus: &GpuDiscovery, first_rank_of_host: u32) -> Option<u32> {
    let visible = &gpus.devices.as_ref().ok()?.gpus;
    let place = (plan.sealed.mesh(), plan.sealed.rank_map());
    let taken: Vec<u32> =
        plan.mesh_ranks().filter_map(|r| find_gpu(visible, place, first_rank_of_host, r).ok()).collect();
    (0..visible.len() as u32).find(|gpu| !taken.contains(gpu))
}
