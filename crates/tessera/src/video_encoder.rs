//! The encoder of an input video: the plan's encode programs with history, on a backend of their own for the
//! leader's CPU or a GPU of its host.
//!
//! Its buffers are cleared at the start of a scene while the decoder's still serve the scene before, so the
//! two cannot share a backend.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::{Backend, CallData, MeshRank, NoObserver, ProgramHandle};
use tessera_mesh::Rank;
use tessera_models::{VIDEO_DEVICE_PHASES, VIDEO_PHASES};

use crate::codes::T0016;
use crate::cuda::open_leader_backend;
use crate::leader_programs::{CoreUse, fault_text, open_cpu_backend, warm_up};
use crate::plan::Plan;
use crate::vae_weights::VaeWeights;

/// Encodes frames in order, each once, because an encoded frame changes the history.
pub(crate) struct VideoEncoder {
    backend: Box<dyn Backend + Send>,
    open: ProgramHandle,
    rest: ProgramHandle,
    /// Values of one pixel frame, and pixel frames of one latent after the first.
    frame_len: usize,
    frames_per_latent: usize,
}

impl VideoEncoder {
    /// Loads the encode programs of a plan that takes a video, with their weights, on the CPU or on a visible
    /// GPU of the host.
    ///
    /// # Errors
    /// T0016 if the plan takes none, or why a weight cannot be read.
    pub(crate) fn load(
        plan: &Plan,
        vae: Option<VaeWeights>,
        gpu: Option<u32>,
    ) -> Result<VideoEncoder, Diagnostic> {
        let seat = MeshRank { mesh: *plan.sealed.mesh(), rank: Rank(0) };
        match gpu {
            Some(gpu) => {
                let backend = Box::new(open_leader_backend(seat, gpu)?);
                let mut encoder = VideoEncoder::load_into(backend, plan, VIDEO_DEVICE_PHASES, vae)?;
                encoder.warm_up(plan)?;
                Ok(encoder)
            }
            None => {
                let backend = Box::new(open_cpu_backend(seat, CoreUse::All)?);
                VideoEncoder::load_into(backend, plan, VIDEO_PHASES, vae)
            }
        }
    }

    /// Loads the phases for a scene's first frame and for each later latent into a backend.
    pub(crate) fn load_into(
        mut backend: Box<dyn Backend + Send>,
        plan: &Plan,
        phases: [&str; 2],
        vae: Option<VaeWeights>,
    ) -> Result<VideoEncoder, Diagnostic> {
        let mut vae = vae.ok_or_else(|| encode_error("the model has no VAE".into()))?;
        let (rank, sealed) = (Rank(0), &plan.sealed);
        let mut load = |name: &str| {
            let (Some(p), Some(s)) = (sealed.rank_program(name, rank), sealed.rank_slots(name, rank)) else {
                return Err(encode_error(format!("the plan has no program {name}")));
            };
            backend.load(&Arc::new((**p).clone()), s, &mut vae)
        };
        let [open, rest] = phases;
        let (open, rest) = (load(open)?, load(rest)?);
        let s = &plan.video.stream;
        let (frame_len, frames_per_latent) = ((s.height * s.width * 3) as usize, s.stride[0] as usize);
        Ok(VideoEncoder { backend, open, rest, frame_len, frames_per_latent })
    }

    /// Runs both programs of a GPU once, so that no chunk waits for the capture of a graph.
    pub(crate) fn warm_up(&mut self, plan: &Plan) -> Result<(), Diagnostic> {
        for (phase, handle) in VIDEO_DEVICE_PHASES.into_iter().zip([self.open, self.rest]) {
            if let Some(program) = plan.sealed.rank_program(phase, Rank(0)) {
                warm_up(&mut *self.backend, handle, program)?;
            }
        }
        Ok(())
    }

    /// Encodes the pixels [frames, height, width, 3] of a chunk to the generator's latents. The first frame
    /// of a scene is one latent, and the frames of every other latent follow one another.
    ///
    /// # Errors
    /// T0016 if the frames are not those of whole latents, or a program fails.
    pub(crate) fn encode_chunk(&mut self, pixels: &[f32], opens_scene: bool) -> Result<Vec<f32>, Diagnostic> {
        let (first, rest) = pixels.split_at(if opens_scene { self.frame_len.min(pixels.len()) } else { 0 });
        let group = self.frame_len * self.frames_per_latent;
        if !rest.len().is_multiple_of(group) || (opens_scene && first.len() < self.frame_len) {
            let frames = pixels.len() as f64 / self.frame_len as f64;
            return Err(encode_error(format!("{frames} frames are not those of whole latents")));
        }
        let mut latents = Vec::new();
        if opens_scene {
            self.backend.reset_buffers();
            self.run(self.open, first, &mut latents)?;
        }
        for frames in rest.chunks_exact(group) {
            self.run(self.rest, frames, &mut latents)?;
        }
        Ok(latents)
    }

    fn run(&mut self, program: ProgramHandle, pixels: &[f32], out: &mut Vec<f32>) -> Result<(), Diagnostic> {
        let call = CallData { inputs: BTreeMap::from([("pixels", pixels)]), ..CallData::default() };
        self.backend.run(program, &call, &mut NoObserver).map_err(|f| encode_error(fault_text(f)))?;
        out.extend(self.backend.output("latents").ok_or_else(|| encode_error("no latents".into()))?);
        Ok(())
    }
}

fn encode_error(why: String) -> Diagnostic {
    Diagnostic::error(&T0016, format!("encoding of an input video: {why}"))
}
