//! The memory budget of a model: planned bytes of the fullest rank by use, for several sizes of tp, with the
//! leader's own programs, the memory of exchanges and what libraries reserve.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_base::{Bytes, Diagnostics};
use tessera_cuda::CudaBackend;
use tessera_mesh::{Axis, Mesh, Rank};
use tessera_models::VideoModel;
use tessera_plan::Mapping;

use crate::communicators::{CommunicatorSpec, shared_communicators};
use crate::leader_memory::LeaderMemory;
use crate::plan::{Plan, is_leader_phase, plan_model};

/// Prefix of the buffers that hold the histories of a VAE.
const VAE_BUFFERS: &str = "vae.";

/// Planned bytes of the fullest rank under one size of tp; the field names are the keys in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BudgetRow {
    /// Ranks over tp.
    pub tp: u32,
    /// Number of the fullest rank.
    pub rank: u32,
    /// Bytes of distinct weight shards.
    pub weights_bytes: u64,
    /// Bytes of KV caches and latents.
    pub caches_bytes: u64,
    /// Bytes of the histories of a VAE whose phases are in the calls.
    pub histories_bytes: u64,
    /// Bytes of inputs in the phase with the most.
    pub inputs_bytes: u64,
    /// Bytes of the largest phase's slots.
    pub temporaries_bytes: u64,
    /// Bytes that the rank shares with others for collectives: its part of the arenas of ranks on CPUs. Those
    /// of GPUs are part of what libraries reserve.
    pub exchange_bytes: u64,
    /// Bytes that a driver and its libraries reserve beside the plan; 0 for ranks on CPUs.
    pub libraries_bytes: u64,
    /// Sum of the bytes above.
    pub total_bytes: u64,
    /// Bytes of the leader's own programs beside the calls, in its process: text encoder, and phases of
    /// pixels that no call contains.
    pub leader_bytes: u64,
}

/// Plans a model for each size of tp, and returns the budget of its fullest rank. The other axes and the
/// strategy are those of `mapping`.
///
/// # Errors
/// Why the model cannot be planned with one of the sizes.
pub fn memory_budget(
    video: &VideoModel,
    mapping: &Mapping,
    sizes: &[u32],
    on_gpus: bool,
) -> Result<Vec<BudgetRow>, Diagnostics> {
    let plan_size = |tp: &u32| {
        let mut axes = Axis::ALL.map(|axis| mapping.mesh.axis_size(axis));
        axes[Axis::Tp as usize] = *tp;
        let mesh = Mesh::new(axes).map_err(|d| vec![*d])?;
        // Devices and blocks belong to the mesh of the mapping.
        let mapping = Mapping { mesh, devices: Vec::new(), blocks: Vec::new(), ..mapping.clone() };
        Ok(BudgetRow::from_plan(&plan_model(video, "", "", &mapping)?, on_gpus))
    };
    sizes.iter().map(plan_size).collect()
}

impl BudgetRow {
    /// Returns the budget of a plan's fullest rank of the mesh.
    #[must_use]
    pub fn from_plan(plan: &Plan, on_gpus: bool) -> BudgetRow {
        let rows = plan.mesh_ranks().map(|rank| BudgetRow::from_rank(plan, rank, on_gpus));
        let fullest = rows.reduce(|a, b| if b.total_bytes > a.total_bytes { b } else { a });
        fullest.unwrap_or_else(|| BudgetRow::from_rank(plan, Rank(0), on_gpus))
    }

    /// Returns the budget of one rank.
    #[must_use]
    pub fn from_rank(plan: &Plan, rank: Rank, on_gpus: bool) -> BudgetRow {
        let sealed = &plan.sealed;
        let memory = sealed.rank_memory(rank).unwrap_or_default();
        let histories = sum_history_bytes(plan, rank).min(memory.buffers.0);
        let joined = shared_communicators(sealed, rank);
        let arena = |s: &CommunicatorSpec| (s.layout.slots as u64).saturating_mul(s.layout.slot_bytes as u64);
        let (exchange, libraries) = match on_gpus {
            true => (0, CudaBackend::overhead_bytes(joined.len())),
            false => (joined.iter().map(arena).fold(0, u64::saturating_add), 0),
        };
        let mut row = BudgetRow {
            tp: sealed.mesh().axis_size(Axis::Tp),
            rank: rank.0,
            weights_bytes: memory.weights.0,
            caches_bytes: memory.buffers.0 - histories,
            histories_bytes: histories,
            inputs_bytes: memory.inputs.0,
            temporaries_bytes: memory.temporaries.0,
            exchange_bytes: exchange,
            libraries_bytes: libraries,
            total_bytes: 0,
            leader_bytes: LeaderMemory::from_plan(plan).total_bytes(),
        };
        row.total_bytes =
            row.list_memory_uses().iter().map(|(_, bytes)| bytes.0).fold(0, u64::saturating_add);
        row
    }

    /// Returns the uses of a rank's memory, each with its column heading.
    #[must_use]
    pub fn list_memory_uses(&self) -> [(&'static str, Bytes); 7] {
        [
            ("weights", Bytes(self.weights_bytes)),
            ("KV caches", Bytes(self.caches_bytes)),
            ("VAE histories", Bytes(self.histories_bytes)),
            ("inputs", Bytes(self.inputs_bytes)),
            ("temporaries", Bytes(self.temporaries_bytes)),
            ("exchange", Bytes(self.exchange_bytes)),
            ("libraries", Bytes(self.libraries_bytes)),
        ]
    }
}

/// Returns the bytes of the buffers of a VAE in the calls of a rank.
fn sum_history_bytes(plan: &Plan, rank: Rank) -> u64 {
    let phases = plan.sealed.phase_names().iter().filter(|name| !is_leader_phase(&plan.sealed, name));
    let buffers = phases.filter_map(|name| plan.sealed.rank_program(name, rank)).flat_map(|p| &p.buffers);
    let own = buffers.filter(|b| b.name.starts_with(VAE_BUFFERS));
    let distinct: BTreeMap<&str, u64> = own.map(|b| (b.name.as_str(), b.ty.byte_size().0)).collect();
    distinct.into_values().fold(0, u64::saturating_add)
}
