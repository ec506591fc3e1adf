//! The encoder of an input video: the plan's encode programs with history, on a CPU backend of their own.
//!
//! Its buffers are cleared at the start of a scene while the decoder's still serve the scene before, so the
//! two cannot share a backend.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_cpu::CpuBackend;
use tessera_device::{Backend, CallData, MeshRank, ProgramHandle};
use tessera_mesh::Rank;

use crate::codes::T0016;
use crate::leader_programs::{CoreUse, NoObserver, fault_text, open_cpu_backend};
use crate::plan::{Plan, VIDEO_PHASES};
use crate::vae_weights::VaeWeights;

/// Encodes frames in order, each once, because an encoded frame changes the history.
pub(crate) struct VideoEncoder {
    cpu: CpuBackend,
    open: ProgramHandle,
    rest: ProgramHandle,
    /// Values of one pixel frame, and pixel frames of one latent after the first.
    frame_len: usize,
    frames_per_latent: usize,
}

impl VideoEncoder {
    /// Loads the encode programs of a plan that takes a video, with their weights.
    ///
    /// # Errors
    /// T0016 if the plan takes none, or why a weight cannot be read.
    pub(crate) fn load(plan: &Plan, vae: Option<VaeWeights>) -> Result<VideoEncoder, Diagnostic> {
        let mut vae = vae.ok_or_else(|| encode_error("the model has no VAE".into()))?;
        let (rank, sealed) = (Rank(0), &plan.sealed);
        let mut cpu = open_cpu_backend(MeshRank { mesh: *sealed.mesh(), rank }, CoreUse::All)?;
        let mut load = |name: &str| {
            let (Some(p), Some(s)) = (sealed.rank_program(name, rank), sealed.rank_slots(name, rank)) else {
                return Err(encode_error(format!("the plan has no program {name}")));
            };
            cpu.load(&Arc::new((**p).clone()), s, &mut vae)
        };
        let [open, rest] = VIDEO_PHASES;
        let (open, rest) = (load(open)?, load(rest)?);
        let s = &plan.video.stream;
        let (frame_len, frames_per_latent) = ((s.height * s.width * 3) as usize, s.stride[0] as usize);
        Ok(VideoEncoder { cpu, open, rest, frame_len, frames_per_latent })
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
            self.cpu.reset_buffers();
            self.run(self.open, first, &mut latents)?;
        }
        for frames in rest.chunks_exact(group) {
            self.run(self.rest, frames, &mut latents)?;
        }
        Ok(latents)
    }

    fn run(&mut self, program: ProgramHandle, pixels: &[f32], out: &mut Vec<f32>) -> Result<(), Diagnostic> {
        let call = CallData { inputs: BTreeMap::from([("pixels", pixels)]), ..CallData::default() };
        self.cpu.run(program, &call, &mut NoObserver).map_err(|f| encode_error(fault_text(f)))?;
        out.extend(self.cpu.output("latents").ok_or_else(|| encode_error("no latents".into()))?);
        Ok(())
    }
}

fn encode_error(why: String) -> Diagnostic {
    Diagnostic::error(&T0016, format!("encoding of an input video: {why}"))
}
