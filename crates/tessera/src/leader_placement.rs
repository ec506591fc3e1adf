//! Where the leader runs its own programs: on its CPU, or on a GPU of its host that has the memory for them
//! beside what else runs there.
//!
//! The plan decides where pixels are decoded; the user decides for each encoder. An encoder of text or of an
//! input video has a program for the CPU and one for a GPU in the plan, and the leader loads one of them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tessera_base::{Bytes, Diagnostic, Diagnostics};
use tessera_cuda::{CudaBackend, free_bytes};
use tessera_device::T0804;
use tessera_mesh::Rank;
use tessera_models::{TEXT_DEVICE_PHASE, TextEncoder, VIDEO_DEVICE_PHASES};

use crate::codes::{T0018, T0078};
use crate::communicators::shared_communicators;
use crate::gpu_placement::find_gpu;
use crate::gpus::GpuDiscovery;
use crate::leader_memory::LeaderMemory;
use crate::model::Model;
use crate::pixel_placement::{find_free_gpu, outside_bytes, place_pixels};
use crate::plan::{LeaderPart, Plan};
use crate::stream_options::{EncoderDevice, StreamOptions};
use crate::weights_origin::WeightsBase;

/// Where the leader runs its own programs. A GPU is the index of a visible GPU of the leader's host, and
/// `None` is its CPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeaderPlaces {
    pub(crate) text: TextPlace,
    /// GPU that encodes an input video.
    pub(crate) video_gpu: Option<u32>,
    /// GPU that decodes beside the calls.
    pub(crate) pixels_gpu: Option<u32>,
}

impl LeaderPlaces {
    /// Returns the places of a leader that runs all of its programs on the CPU.
    pub(crate) fn on_cpu(options: &StreamOptions) -> LeaderPlaces {
        let text = TextPlace { gpu: None, unload: options.text.unload };
        LeaderPlaces { text, ..LeaderPlaces::default() }
    }
}

/// Where the leader runs the program of a text encoder, and whether it stays loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TextPlace {
    /// Index of a visible GPU of the leader's host; `None` for the CPU.
    pub(crate) gpu: Option<u32>,
    /// Whether the weights leave memory after each prompt.
    pub(crate) unload: bool,
}

/// Chooses the places of the leader's programs. `gpus` are those of the leader's host, with the first rank of
/// the host, if the ranks run on GPUs. Each note says why an encoder runs on the CPU where a GPU would be
/// faster.
///
/// # Errors
/// T0018 if a GPU is requested for ranks on CPUs, and T0804 or T0801 if it has no memory or no kernels.
pub(crate) fn place_leader_programs(
    plan: &Plan,
    model: &Model,
    options: &StreamOptions,
    gpus: Option<(&GpuDiscovery, u32)>,
) -> Result<(LeaderPlaces, Diagnostics), Diagnostics> {
    let pixels_gpu = place_pixels(plan, gpus).map_err(|d| vec![d])?;
    let mut places = LeaderPlaces { pixels_gpu, ..LeaderPlaces::on_cpu(options) };
    let mut encoders = Encoder::list_movable(plan, model, options);
    // A GPU that the user requests has memory before one that would only be faster.
    encoders.sort_by_key(|e| e.on != EncoderDevice::Gpu);
    let Some((gpus, first_rank_of_host)) = gpus else {
        let refused =
            encoders.iter().filter(|e| e.on == EncoderDevice::Gpu).map(Encoder::refuse_without_gpus);
        let refused: Diagnostics = refused.collect();
        return if refused.is_empty() { Ok((places, Vec::new())) } else { Err(refused) };
    };
    let mut leader_gpus = LeaderGpus::new(plan, gpus, first_rank_of_host, pixels_gpu).map_err(|d| vec![d])?;
    let (mut notes, mut refused) = (Vec::new(), Vec::new());
    for encoder in encoders {
        match encoder
            .check_programs(plan)
            .and_then(|()| leader_gpus.reserve_memory(&encoder, encoder.device_bytes(plan)))
        {
            Ok(gpu) if encoder.part == LeaderPart::Text => places.text.gpu = Some(gpu),
            Ok(gpu) => places.video_gpu = Some(gpu),
            Err(d) if encoder.on == EncoderDevice::Gpu => {
                let message = format!("{} cannot run on a GPU: {}", encoder.name, d.message);
                refused.push(Diagnostic { message, ..d });
            }
            Err(d) => {
                let what = format!("{} runs on the CPU: {}", encoder.name, d.message);
                notes.push(Diagnostic::warning(&T0078, what));
            }
        }
    }
    if refused.is_empty() { Ok((places, notes)) } else { Err(refused) }
}

/// An encoder of a run that may run on a GPU.
#[derive(Debug, Clone, Copy)]
struct Encoder {
    part: LeaderPart,
    /// What messages call it.
    name: &'static str,
    /// The option that chooses its device.
    flag: &'static str,
    /// Its phases for a GPU.
    phases: &'static [&'static str],
    on: EncoderDevice,
}

impl Encoder {
    /// Lists the encoders of a run that have programs and are not pinned to the CPU. That of a video comes
    /// first: every chunk waits for it, and only a chunk with a new prompt for that of text.
    fn list_movable(plan: &Plan, model: &Model, options: &StreamOptions) -> Vec<Encoder> {
        let stream = &plan.video.stream;
        let video = Encoder {
            part: LeaderPart::Video,
            name: "the encoder of the input video",
            flag: "--video-on",
            phases: &VIDEO_DEVICE_PHASES,
            on: options.video_on,
        };
        let text = Encoder {
            part: LeaderPart::Text,
            name: "the text encoder",
            flag: "--text-on",
            phases: &[TEXT_DEVICE_PHASE],
            on: options.text.on,
        };
        // Synthetic weights replace a text encoder by a table.
        let has_text = stream.text == TextEncoder::Umt5 && model.weights.base == WeightsBase::Files;
        let runs = [(video, stream.takes_video && options.video.is_some()), (text, has_text)];
        let runs = runs.into_iter().filter(|(encoder, runs)| *runs && encoder.on != EncoderDevice::Cpu);
        runs.map(|(encoder, _)| encoder).collect()
    }

    fn refuse_without_gpus(&self) -> Diagnostic {
        let what = format!("{} is to run on a GPU, and the ranks run on CPUs", self.name);
        Diagnostic::error(&T0018, what)
            .with_hint(format!("add --device cuda, or leave out {} gpu", self.flag))
    }

    /// Checks that the plan has its programs for a GPU, and that GPUs have kernels for their ops.
    fn check_programs(&self, plan: &Plan) -> Result<(), Diagnostic> {
        self.phases.iter().try_for_each(|phase| {
            let program = plan.sealed.rank_program(phase, Rank(0)).ok_or_else(|| {
                Diagnostic::error(&T0018, "the plan holds no program of it for a GPU")
                    .with_hint("make the plan again with `tessera plan`")
            })?;
            CudaBackend::find_unsupported(program).map_or(Ok(()), Err)
        })
    }

    /// Returns the device memory that it needs: weights, histories, temporaries and what a backend uses beyond
    /// them.
    fn device_bytes(&self, plan: &Plan) -> u64 {
        let planned = LeaderMemory::from_phases(plan, |name| self.phases.contains(&name)).total_bytes();
        planned.saturating_add(CudaBackend::overhead_bytes(0))
    }
}

/// The GPUs on which encoders of the leader can run.
#[derive(Debug)]
struct LeaderGpus {
    /// GPU of the leader's rank, or one that no rank has for a leader outside of the mesh.
    own: Result<u32, Diagnostic>,
    /// GPU that decodes beside the calls.
    pixels: Option<u32>,
    memory: BTreeMap<u32, GpuMemory>,
}

/// Memory of one GPU in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct GpuMemory {
    /// What no process uses now.
    free: u64,
    /// What the rank, the decoder and the encoders there will need.
    taken: u64,
}

impl LeaderGpus {
    fn new(
        plan: &Plan,
        gpus: &GpuDiscovery,
        first_rank_of_host: u32,
        pixels: Option<u32>,
    ) -> Result<LeaderGpus, Diagnostic> {
        let (sealed, leader) = (&plan.sealed, Rank(0));
        let visible = &gpus.devices.as_ref().map_err(Clone::clone)?.gpus;
        let is_rank = sealed.mesh().contains(leader);
        let own = if is_rank {
            find_gpu(visible, (sealed.mesh(), sealed.rank_map()), first_rank_of_host, leader)
        } else {
            find_free_gpu(plan, gpus, first_rank_of_host).ok_or_else(|| {
                Diagnostic::error(&T0804, "each GPU of its host belongs to a rank, and the leader to none")
            })
        };
        let memory = own.iter().copied().chain(pixels).map(|gpu| {
            let total = visible.get(gpu as usize).map_or(0, |g| g.memory.0);
            let rank =
                if is_rank && own.as_ref().is_ok_and(|own| *own == gpu) { rank_bytes(plan) } else { 0 };
            let decoder = if pixels == Some(gpu) { outside_bytes(plan) } else { 0 };
            let free = free_bytes(&gpus.libraries, gpu).unwrap_or(total);
            (gpu, GpuMemory { free, taken: rank.saturating_add(decoder) })
        });
        Ok(LeaderGpus { memory: memory.collect(), own, pixels })
    }

    /// Returns the GPU of an encoder that needs `bytes`, and counts them there. The encoder of a video runs
    /// where pixels are decoded beside the calls, because the generator is busier than the decoder.
    fn reserve_memory(&mut self, encoder: &Encoder, bytes: u64) -> Result<u32, Diagnostic> {
        let shared = self.pixels.filter(|_| encoder.part == LeaderPart::Video);
        let gpu = shared.map_or_else(|| self.own.clone(), Ok)?;
        let memory = self.memory.entry(gpu).or_default();
        let needed = memory.taken.saturating_add(bytes);
        if needed > memory.free {
            let others = match memory.taken {
                0 => String::new(),
                taken => format!(" beside {} of what else runs there", Bytes(taken)),
            };
            let what =
                format!("it needs {}{others}, and GPU {gpu} has {} free", Bytes(bytes), Bytes(memory.free));
            let hint = format!("use {} cpu, or more GPUs, so that each rank holds less", encoder.flag);
            return Err(Diagnostic::error(&T0804, what).with_hint(hint));
        }
        memory.taken = needed;
        Ok(gpu)
    }
}

/// Returns the device memory of rank 0.
fn rank_bytes(plan: &Plan) -> u64 {
    let communicators = shared_communicators(&plan.sealed, Rank(0)).len();
    let planned = plan.memory_bytes(Rank(0)).map(|bytes| bytes.0);
    planned.into_iter().fold(CudaBackend::overhead_bytes(communicators), u64::saturating_add)
}

#[cfg(test)]
mod tests;
