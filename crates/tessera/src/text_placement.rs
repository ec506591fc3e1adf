//! Where the leader runs the program of a text encoder: on its CPU, or on a GPU that has the memory for
//! the weights beside the rank there.

use serde::{Deserialize, Serialize};
use tessera_base::{Bytes, Diagnostic, Diagnostics};
use tessera_cuda::{CudaBackend, free_bytes};
use tessera_device::T0804;
use tessera_ir::{Opcode, Program};
use tessera_mesh::Rank;
use tessera_models::{TEXT_DEVICE_PHASE, TextEncoder};

use crate::codes::{T0018, T0078};
use crate::communicators::shared_communicators;
use crate::gpu_placement::find_gpu;
use crate::gpus::GpuDiscovery;
use crate::model::Model;
use crate::pixel_placement::{find_free_gpu, outside_bytes};
use crate::plan::Plan;
use crate::stream_options::{TextDevice, TextOptions};
use crate::weights_origin::WeightsBase;

/// Where the leader runs the program of a text encoder, and whether it stays loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TextPlace {
    /// Index of a visible GPU of the leader's host; `None` for the CPU.
    pub(crate) gpu: Option<u32>,
    /// Whether the weights leave memory after each prompt.
    pub(crate) unload: bool,
}

/// Chooses the place of a run's text encoder. `gpus` are those of the leader's host, with the first rank of
/// the host, if the ranks run on GPUs. A note says why the CPU was chosen where a GPU would be faster.
///
/// # Errors
/// T0018 if a GPU is requested for ranks on CPUs, and T0804 or T0801 if it has no memory or no kernels.
pub(crate) fn place_text_encoder(
    plan: &Plan,
    model: &Model,
    options: TextOptions,
    gpus: Option<(&GpuDiscovery, u32)>,
) -> Result<(TextPlace, Option<Diagnostic>), Diagnostics> {
    let on_cpu = TextPlace { gpu: None, unload: options.unload };
    // Synthetic weights replace the encoder by a table.
    let has_program = plan.video.stream.text == TextEncoder::Umt5 && model.weights.base == WeightsBase::Files;
    if !has_program || options.on == TextDevice::Cpu {
        return Ok((on_cpu, None));
    }
    let Some((gpus, first_rank_of_host)) = gpus else {
        return match options.on {
            TextDevice::Gpu => Err(vec![
                Diagnostic::error(&T0018, "the text encoder is to run on a GPU, and the ranks run on CPUs")
                    .with_hint("add --device cuda, or leave out --text-on gpu"),
            ]),
            TextDevice::Auto | TextDevice::Cpu => Ok((on_cpu, None)),
        };
    };
    match find_text_gpu(plan, gpus, first_rank_of_host) {
        Ok(gpu) => Ok((TextPlace { gpu: Some(gpu), ..on_cpu }, None)),
        Err(d) if options.on == TextDevice::Gpu => Err(vec![d]),
        Err(d) => {
            let what = format!("the text encoder runs on the CPU: {}", d.message);
            Ok((on_cpu, Some(Diagnostic::warning(&T0078, what))))
        }
    }
}

/// Returns the GPU on which the leader can run the encoder: that of its own rank, or one that no rank has.
fn find_text_gpu(plan: &Plan, gpus: &GpuDiscovery, first_rank_of_host: u32) -> Result<u32, Diagnostic> {
    let (sealed, leader) = (&plan.sealed, Rank(0));
    let Some(program) = sealed.rank_program(TEXT_DEVICE_PHASE, leader) else {
        return Err(Diagnostic::error(&T0018, "the plan holds no program of it for a GPU")
            .with_hint("make the plan again with `tessera plan`"));
    };
    if let Some(refused) = CudaBackend::find_unsupported(program) {
        return Err(refused);
    }
    let visible = &gpus.devices.as_ref().map_err(Clone::clone)?.gpus;
    let gpu_of = |rank| find_gpu(visible, (sealed.mesh(), sealed.rank_map()), first_rank_of_host, rank);
    let is_rank = sealed.mesh().contains(leader);
    let gpu = if is_rank {
        gpu_of(leader)?
    } else {
        find_free_gpu(plan, gpus, first_rank_of_host).ok_or_else(|| {
            Diagnostic::error(&T0804, "each GPU of its host belongs to a rank, and the leader to none")
        })?
    };
    let total = visible.get(gpu as usize).map_or(0, |g| g.memory.0);
    let needs = MemoryNeeds {
        encoder: encoder_bytes(plan, program),
        others: if is_rank { rank_bytes(plan) } else { outside_bytes(plan) },
    };
    needs.check(gpu, free_bytes(&gpus.libraries, gpu).unwrap_or(total)).map(|()| gpu)
}

/// Bytes of a GPU that the encoder needs, and those that the rank or the decoder there will need.
#[derive(Debug, Clone, Copy)]
struct MemoryNeeds {
    encoder: u64,
    others: u64,
}

impl MemoryNeeds {
    fn check(self, gpu: u32, free: u64) -> Result<(), Diagnostic> {
        if self.encoder.saturating_add(self.others) <= free {
            return Ok(());
        }
        let others = match self.others {
            0 => String::new(),
            bytes => format!(" beside {} of what else runs there", Bytes(bytes)),
        };
        let what =
            format!("it needs {}{others}, and GPU {gpu} has {} free", Bytes(self.encoder), Bytes(free));
        Err(Diagnostic::error(&T0804, what)
            .with_hint("use --text-on cpu, or more GPUs, so that each rank holds less"))
    }
}

/// Returns the device memory of the encoder: weights, temporaries and what a backend uses beyond them.
fn encoder_bytes(plan: &Plan, program: &Program) -> u64 {
    let weights = program.ops.iter().filter(|op| op.opcode == Opcode::Weight);
    let weights = weights.flat_map(|op| &op.results).map(|v| program.type_of(*v).byte_size().0);
    let slots = plan.sealed.rank_slots(TEXT_DEVICE_PHASE, Rank(0));
    let temporaries = slots.iter().flat_map(|s| s.slot_bytes.iter().copied());
    weights.chain(temporaries).fold(CudaBackend::overhead_bytes(0), u64::saturating_add)
}

/// Returns the device memory of rank 0.
fn rank_bytes(plan: &Plan) -> u64 {
    let communicators = shared_communicators(&plan.sealed, Rank(0)).len();
    let planned = plan.memory_bytes(Rank(0)).map(|bytes| bytes.0);
    planned.into_iter().fold(CudaBackend::overhead_bytes(communicators), u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoder_must_fit_beside_what_else_runs_there() {
        let needs = MemoryNeeds { encoder: 12 << 30, others: 60 << 30 };
        assert!(needs.check(0, 72 << 30).is_ok());
        let refused = needs.check(3, (72 << 30) - 1).unwrap_err();
        assert_eq!(refused.code.id, "T0804");
        for part in ["12.00 GiB", "60.00 GiB of what else runs there", "GPU 3 has 72.00 GiB free"] {
            assert!(refused.message.contains(part), "{}", refused.message);
        }
        let alone = MemoryNeeds { others: 0, ..needs }.check(1, 0).unwrap_err();
        assert!(!alone.message.contains("beside"), "{}", alone.message);
    }
}
