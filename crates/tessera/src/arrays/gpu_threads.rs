//! The ranks on GPUs that are threads of this process, and the arrays that their calls pass in GPU memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cuda::{AllocationPermit, ExclusiveCall, GpuArray, GpuCallArrays};
use tessera_ir::Transport;
use tessera_mesh::Rank;
use tessera_report::record::RunDevice;
use tessera_verify::SealedPlan;

use super::array_plan::ArrayPlan;
use super::array_program::ArrayProgram;
use super::device_array::{ArrayGpus, ArrayValues, DeviceArray};
use crate::codes::{T0087, T0098, T0099};
use crate::cuda::{GpuRankConfig, GpuThreadRanks, check_gpu_libraries, name_thread_communicators};
use crate::gpus::GpuDiscovery;
use crate::rank_launch::check_supported_ops;
use crate::shard_copy::ArrayShard;

/// The ranks of a plan, each on a GPU of its own.
pub(super) struct GpuThreads {
    gpus: ArrayGpus,
    config: GpuRankConfig,
    shared: GpuThreadRanks,
    /// The GPU of each rank, as index among the visible ones.
    devices: BTreeMap<Rank, u32>,
}

/// What a call holds while it runs. Other threads of this process wait for it before they use the GPUs.
pub(super) enum GpuUse {
    /// A call of several GPUs, during which nobody else may allocate or free.
    Several { _call: ExclusiveCall },
    /// A call of one GPU, whose rank may allocate.
    Single { _permit: AllocationPermit },
}

impl GpuThreads {
    /// Finds the GPUs of a plan's ranks.
    ///
    /// # Errors
    /// T0098 for ranks that cannot exchange data as threads, T0801 for an op that a GPU does not run, or what this host
    /// lacks.
    pub(super) fn prepare(plan: &ArrayPlan) -> Result<GpuThreads, Diagnostics> {
        let one = |d: Diagnostic| vec![d];
        let sealed = &plan.sealed;
        check_supported_ops(sealed, RunDevice::Cuda)?;
        let found = GpuDiscovery::discover();
        let ranks: Vec<Rank> = sealed.mesh().inner_ranks().collect();
        check_gpu_libraries(&found, ranks.len(), false)?;
        let communicator_ids = name_thread_communicators(sealed);
        let config = GpuRankConfig { communicator_ids, first_rank_of_host: 0 };
        let device_of = |rank: &Rank| Ok((*rank, config.find_device(&found, sealed, *rank)?));
        let devices: BTreeMap<Rank, u32> =
            ranks.iter().map(device_of).collect::<Result<_, _>>().map_err(one)?;
        let refused = find_nccl_request(sealed).or_else(|| find_missing_access(&found, &devices));
        if let Some(d) = refused {
            return Err(one(d.with_hint("start the ranks as processes: ranks=\"processes\"")));
        }
        let gpus = ArrayGpus::from_discovery(found).map_err(one)?;
        Ok(GpuThreads { gpus, config, shared: GpuThreadRanks::new(&ranks), devices })
    }

    /// Returns what the engines of the ranks need.
    pub(super) fn engine_config(&self) -> (GpuRankConfig, GpuThreadRanks) {
        (self.config.clone(), self.shared.clone())
    }

    /// Waits until a call may run; returns `None` once the caller no longer wants to wait. While a call of several GPUs runs,
    /// no other such call runs, because the kernels of the two could occupy the GPUs in different orders, and no thread
    /// allocates or frees GPU memory.
    pub(super) fn begin_call(&self, is_cancelled: &dyn Fn() -> bool) -> Option<GpuUse> {
        Some(match self.devices.len() {
            0 | 1 => GpuUse::Single { _permit: AllocationPermit::acquire_unless(is_cancelled)? },
            _ => GpuUse::Several { _call: ExclusiveCall::begin_unless(is_cancelled)? },
        })
    }

    /// Gives the ranks the inputs of a call that lie on GPUs.
    ///
    /// # Errors
    /// T0099 for an input of which a rank's GPU does not have what the rank reads, T1304 if a GPU cannot copy a part.
    pub(super) fn set_inputs(
        &self,
        program: &ArrayProgram,
        inputs: &BTreeMap<String, ArrayValues>,
    ) -> Result<(), Diagnostics> {
        let (mut found, mut by_rank) = (Vec::new(), BTreeMap::new());
        for (rank, device) in &self.devices {
            let mut own = BTreeMap::new();
            for (name, values) in inputs {
                let (ArrayValues::Device(array), Some(shard)) = (values, program.input_shard(name, *rank))
                else {
                    continue;
                };
                match self.take_part(array, shard, *device) {
                    Ok(Some(part)) => drop(own.insert(name.clone(), part)),
                    Ok(None) => found.push(describe_absent_part(name, *rank, *device, shard)),
                    Err(d) => found.push(d),
                }
            }
            by_rank.insert(*rank, own);
        }
        if !found.is_empty() {
            return Err(found);
        }
        for (rank, own) in by_rank {
            self.arrays_of(rank).iter().for_each(|arrays| arrays.set_inputs(own.clone()));
        }
        Ok(())
    }

    /// Returns the outputs of the call that has ended, and forgets its arrays.
    ///
    /// # Errors
    /// T0087 if an output is missing or has another size than its shard.
    pub(super) fn take_outputs(
        &self,
        program: &ArrayProgram,
    ) -> Result<BTreeMap<String, ArrayValues>, Diagnostic> {
        let mut by_name: BTreeMap<String, Vec<(Rank, ArrayShard, GpuArray)>> = BTreeMap::new();
        for rank in self.devices.keys() {
            let Some(arrays) = self.arrays_of(*rank) else { continue };
            let mut outputs = arrays.outputs();
            arrays.clear();
            for port in &program.outputs {
                let shard = program.output_shard(&port.name, *rank);
                let values = outputs.remove(&port.name).map(|output| output.array);
                match (shard, values) {
                    (Some(shard), Some(values))
                        if values.len() as u64 == shard.shape().iter().product::<u64>() =>
                    {
                        let shards = by_name.entry(port.name.clone()).or_default();
                        shards.push((*rank, shard.clone(), values));
                    }
                    _ => {
                        let what = format!("rank {rank} did not return `{}`", port.name);
                        return Err(Diagnostic::error(&T0087, what));
                    }
                }
            }
        }
        let wrap = |(name, shards)| (name, ArrayValues::Device(DeviceArray::from_shards(shards)));
        Ok(by_name.into_iter().map(wrap).collect())
    }

    /// Forgets the inputs of a call that does not run.
    pub(super) fn forget_inputs(&self) {
        self.shared.arrays.values().for_each(|arrays| arrays.clear());
    }

    fn arrays_of(&self, rank: Rank) -> Option<&Arc<GpuCallArrays>> {
        self.shared.arrays.get(&rank)
    }

    /// Returns a part of an array that lies on a GPU, as it is or as a copy on the same GPU; `None` if the GPU has neither
    /// the part nor the whole array.
    fn take_part(
        &self,
        array: &DeviceArray,
        part: &ArrayShard,
        device: u32,
    ) -> Result<Option<GpuArray>, Diagnostic> {
        if let Some(values) = array.find_part(part, device) {
            return Ok(Some(values.clone()));
        }
        let whole = array.wholes().find(|whole| whole.device() == device);
        whole.map(|whole| self.gpus.copy_part(whole, part)).transpose()
    }
}

fn describe_absent_part(name: &str, rank: Rank, device: u32, shard: &ArrayShard) -> Diagnostic {
    let is_whole = shard.shape() == shard.whole;
    let what = match is_whole {
        true => format!("GPU {device} does not have the whole input `{name}`"),
        false => format!("GPU {device} has neither the whole input `{name}` nor the shard of rank {rank}"),
    };
    Diagnostic::error(&T0099, what)
        .with_hint("distribute it over the mesh of the plan with ReplicateSpec(), or pass gather()")
}

/// Returns why a plan needs NCCL, which connects processes.
fn find_nccl_request(sealed: &SealedPlan) -> Option<Diagnostic> {
    sealed.role_programs().find_map(|p| {
        let mut collectives = p.collective_ops();
        let (_, op) = collectives.find(|(_, op)| op.requested_transport() == Some(Transport::Nccl))?;
        let what = format!("{} in @{} of {} requests NCCL", op.opcode.name(), p.name, p.role);
        Some(Diagnostic::error(&T0098, what))
    })
}

/// Returns the first pair of GPUs of which one cannot access the memory of the other.
fn find_missing_access(found: &GpuDiscovery, devices: &BTreeMap<Rank, u32>) -> Option<Diagnostic> {
    let links = &found.devices.as_ref().ok()?.peer_links;
    let used = |gpu: usize| devices.values().any(|device| *device as usize == gpu);
    let missing = links.iter().find(|link| used(link.from) && used(link.to) && !link.access)?;
    let what = format!("GPU {} cannot access the memory of GPU {}", missing.from, missing.to);
    Some(Diagnostic::error(&T0098, what))
}

/// Refuses inputs in GPU memory, which ranks on CPUs and ranks of other processes do not read.
///
/// # Errors
/// T0099 for every one.
pub(super) fn refuse_device_inputs(inputs: &BTreeMap<String, ArrayValues>) -> Result<(), Diagnostics> {
    let on_device = inputs.iter().filter(|(_, values)| matches!(values, ArrayValues::Device(_)));
    let refused = on_device.map(|(name, _)| {
        let what = format!("the input `{name}` lies in GPU memory, which the ranks of this run do not read");
        Diagnostic::error(&T0099, what)
            .with_hint("pass gather(), or open the session with ranks=\"threads\" and device=\"gpu\"")
    });
    let refused: Diagnostics = refused.collect();
    if refused.is_empty() { Ok(()) } else { Err(refused) }
}
