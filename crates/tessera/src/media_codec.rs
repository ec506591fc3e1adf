//! The leader's codec: the rows of prompts, and the plan's decode and encode programs of pixels on a backend
//! of their own, outside the mesh: on the CPU, or on a GPU that no rank has. If the ranks decode in calls, it
//! takes pixels and anchors from the outputs of the calls instead.
//!
//! Chunks are decoded in order. In the recompute regime the first latent of a chunk is decoded before the
//! next chunk's call, which waits for the anchor; the other latents are decoded during that call.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_device::{Backend, CallData, MeshRank, NoObserver, ProgramHandle, WeightSource};
use tessera_ir::Type;
use tessera_mesh::Rank;
use tessera_models::{EXACT_DECODE_PHASE, EXACT_PIXELS, PixelDecoder, VideoModel};
use tessera_runtime::wire::{Tensor, Tensors};

use crate::codes::T0016;
use crate::cuda::open_leader_backend;
use crate::decoder_check::compare_with_exact;
use crate::leader_programs::{CoreUse, fault_text, open_cpu_backend, warm_up};
use crate::plan::{LeaderPart, Plan, is_phase_of_calls, leader_phases};
use crate::prompt_rows::PromptRows;
use crate::record::MediaInterval;
use crate::rgb::{PIXELS, PixelConverter, from_rgb};
use crate::synthetic_delays::{MediaDelays, sleep_until_elapsed};
use crate::vae_weights::VaeWeights;

/// Output of a chunk's call with the next chunk's anchor.
const ANCHOR: &str = "anchor";

/// Encodes prompts, decodes chunks and encodes anchors.
pub(crate) struct MediaCodec {
    video: VideoModel,
    text: PromptRows,
    backend: Box<dyn Backend>,
    converter: PixelConverter,
    loaded: BTreeMap<String, ProgramHandle>,
    /// The last chunk whose first latent was decoded, and what is left of it.
    first_latent: Option<FirstLatent>,
    /// Whether the calls decode their chunks and encode the anchors.
    decodes_in_calls: bool,
    delays: Option<MediaDelays>,
    intervals: Vec<MediaInterval>,
}

/// The decoded first latent of a chunk. A decoder with history decodes each latent exactly once.
struct FirstLatent {
    chunk: u32,
    /// The last pixel frame of the latent, from which the next chunk's anchor is encoded.
    anchor: Vec<f32>,
    /// All pixels of the latent, until the chunk is delivered.
    pixels: Option<Vec<f32>>,
}

impl MediaCodec {
    /// Loads the codec on the CPU.
    pub(crate) fn load(
        plan: &Plan,
        text: PromptRows,
        vae: Option<VaeWeights>,
        delays: Option<MediaDelays>,
    ) -> Result<MediaCodec, Diagnostic> {
        MediaCodec::load_at(plan, text, vae, None, delays)
    }

    /// As [`MediaCodec::load`], with the phases of pixels on a visible GPU of the host.
    pub(crate) fn load_at(
        plan: &Plan,
        text: PromptRows,
        vae: Option<VaeWeights>,
        gpu: Option<u32>,
        delays: Option<MediaDelays>,
    ) -> Result<MediaCodec, Diagnostic> {
        let (rank, sealed) = (Rank(0), &plan.sealed);
        let seat = MeshRank { mesh: *sealed.mesh(), rank };
        let decodes_in_calls = is_phase_of_calls(sealed, "decode.first");
        let convolves = plan.video.stream.decoder.is_causal() && !decodes_in_calls;
        let cores = if convolves { CoreUse::All } else { CoreUse::One };
        let mut backend: Box<dyn Backend> = match gpu {
            Some(gpu) => Box::new(open_leader_backend(seat, gpu)?),
            None => Box::new(open_cpu_backend(seat, cores)?),
        };
        let mut source: Box<dyn WeightSource> = match vae {
            Some(vae) => Box::new(vae),
            None => Box::new(NoWeights),
        };
        let mut loaded = BTreeMap::new();
        let is_own = |name: &&str| LeaderPart::from_phase(name) == LeaderPart::Pixels;
        for name in leader_phases(sealed).filter(is_own) {
            if let (Some(p), Some(s)) = (sealed.rank_program(name, rank), sealed.rank_slots(name, rank)) {
                let program = Arc::new((**p).clone());
                let handle = backend.load(&program, s, &mut *source)?;
                if gpu.is_some() {
                    warm_up(&mut *backend, handle, &program)?;
                }
                loaded.insert(name.to_string(), handle);
            }
        }
        backend.reset_buffers();
        Ok(MediaCodec {
            video: plan.video.clone(),
            text,
            backend,
            converter: PixelConverter::new()?,
            loaded,
            first_latent: None,
            decodes_in_calls,
            delays,
            intervals: Vec::new(),
        })
    }

    /// Fills temporaries with NaN before each run, so that a program that reads one without a value fails.
    pub(crate) fn poison_temporaries(&mut self) {
        self.backend.poison_temporaries();
    }

    pub(crate) fn decoder_kind(&self) -> PixelDecoder {
        self.video.stream.decoder
    }

    /// Returns the tensor that a call with this prompt carries: its rows, and below them those of the
    /// negative prompt under guidance.
    pub(crate) fn encode_text(&mut self, prompt: &str) -> Result<Tensor, Diagnostic> {
        let mut rows = self.text.encode(prompt)?.to_vec();
        if let Some(guidance) = &self.video.stream.guidance {
            rows.extend(self.text.encode_negative(&guidance.negative_prompt)?);
        }
        Tensor::from_f32("text", &[self.video.text_rows(), self.video.wan.text_dim], &rows)
    }

    /// Returns the bytes of a chunk's pixels, in the order of [`MediaCodec::decode_pixels`].
    pub(crate) fn decode_frames(
        &mut self,
        chunk: u32,
        outputs: &Tensors,
        opens_scene: bool,
    ) -> Result<Vec<u8>, Diagnostic> {
        if self.decodes_in_calls {
            self.intervals.clear();
            return Ok(delivered_pixels(outputs).map(Tensor::data).collect::<Vec<_>>().concat());
        }
        let pixels = self.decode_pixels(chunk, outputs, opens_scene)?;
        Ok(self.converter.to_rgb(&pixels))
    }

    /// Compares the first frame of a fast decoder with the exact one, where a scene opens, and returns their
    /// peak signal-to-noise ratio in decibels. `None` if there is nothing to compare.
    ///
    /// # Errors
    /// T0085 if they differ by more than a fast decoder may, or why the exact frame cannot be decoded.
    pub(crate) fn check_fast_decode(
        &mut self,
        chunk: u32,
        pixels: &[u8],
        outputs: &Tensors,
        opens_scene: bool,
    ) -> Result<Option<f64>, Diagnostic> {
        if let Some(exact) = outputs.get(EXACT_PIXELS) {
            return compare_with_exact(chunk, pixels, exact.data()).map(Some);
        }
        if !opens_scene || !self.loaded.contains_key(EXACT_DECODE_PHASE) {
            return Ok(None);
        }
        // The program reads and writes no history, so it may run after the decode of the chunk.
        let latents = f32_values(find_latents(outputs)?);
        let frame = &latents[..self.frame_len().min(latents.len())];
        let exact = self.run_program(EXACT_DECODE_PHASE, "latents", frame, "pixels")?;
        compare_with_exact(chunk, pixels, &self.converter.to_rgb(&exact)).map(Some)
    }

    /// Returns the pixels [frames, height, width, 3] of a chunk; empty for a model without a
    /// decoder. Latents that [`MediaCodec::build_context`] has already decoded are not decoded
    /// again.
    pub(crate) fn decode_pixels(
        &mut self,
        chunk: u32,
        outputs: &Tensors,
        opens_scene: bool,
    ) -> Result<Vec<f32>, Diagnostic> {
        self.intervals.clear();
        if self.decodes_in_calls {
            return Ok(delivered_pixels(outputs).flat_map(|t| from_rgb(t.data())).collect());
        }
        let latents = f32_values(find_latents(outputs)?);
        let whole = Instant::now();
        let name = if self.has_first_latent(chunk) { "decode.rest" } else { "decode" };
        self.decode_first(chunk, &latents, opens_scene)?;
        let mut pixels = self.first_latent.as_mut().and_then(|f| f.pixels.take()).unwrap_or_default();
        let begun = Instant::now();
        let rest = &latents[self.frame_len().min(latents.len())..];
        match self.decoder_kind() {
            PixelDecoder::SpaceTimeDepth => {
                for frame in rest.chunks_exact(self.frame_len()) {
                    pixels.extend(self.run_program("decode", "latents", frame, "pixels")?);
                }
            }
            PixelDecoder::WanVae | PixelDecoder::Tiny if !rest.is_empty() => {
                pixels.extend(self.run_program("decode.rest", "latents", rest, "pixels")?);
            }
            PixelDecoder::WanVae | PixelDecoder::Tiny | PixelDecoder::None => {}
        }
        self.apply_delay(begun, |m| m.rest_ns);
        self.end_interval(name, whole);
        Ok(pixels)
    }

    /// Builds the context [anchor, z₋₂, z₋₁] from chunk `before` for the chunk after it. The anchor
    /// is the encoding of one decoded frame: the last pixel frame of latent 0. After the first chunk of a
    /// scene the anchor is latent 0 itself. No other latent is decoded for the context.
    pub(crate) fn build_context(
        &mut self,
        before: u32,
        outputs: &Tensors,
        opens_scene: bool,
    ) -> Result<Tensor, Diagnostic> {
        self.intervals.clear();
        let mut context = f32_values(find_latents(outputs)?);
        if self.decodes_in_calls && !opens_scene {
            let anchor = f32_values(find_output(outputs, ANCHOR)?);
            context[..anchor.len()].copy_from_slice(&anchor);
        } else if !opens_scene {
            let begun = Instant::now();
            self.decode_first(before, &context, false)?;
            self.end_interval("decode.first", begun);
            let begun = Instant::now();
            let anchor = self.first_latent.as_ref().map(|f| f.anchor.clone()).unwrap_or_default();
            // The lossless encoder reads as many frames as a latent holds, so its one frame is repeated.
            let copies = match self.decoder_kind() {
                PixelDecoder::SpaceTimeDepth => self.video.stream.stride[0] as usize,
                PixelDecoder::WanVae | PixelDecoder::Tiny | PixelDecoder::None => 1,
            };
            let encoded = self.run_program("encode", "pixels", &anchor.repeat(copies), "latents")?;
            context[..encoded.len()].copy_from_slice(&encoded);
            self.apply_delay(begun, |m| m.encode_ns);
            self.end_interval("encode", begun);
        }
        Tensor::from_f32("context", &[self.video.chunk_tokens(), self.video.wan.token_width()], &context)
    }

    /// Ends an interval of work that began at `begun`.
    pub(crate) fn end_interval(&mut self, name: &'static str, begun: Instant) {
        self.intervals.push(MediaInterval { name, begun, ended: Instant::now() });
    }

    /// Takes the intervals of the last context or delivery.
    pub(crate) fn take_intervals(&mut self) -> Vec<MediaInterval> {
        std::mem::take(&mut self.intervals)
    }

    /// Returns the number of values in one latent frame.
    fn frame_len(&self) -> usize {
        (self.video.frame_tokens() * self.video.wan.token_width()) as usize
    }

    fn has_first_latent(&self, chunk: u32) -> bool {
        self.first_latent.as_ref().is_some_and(|f| f.chunk == chunk)
    }

    /// Decodes the first latent of a chunk, unless that was done before. The first chunk of a scene clears
    /// the decoder's history.
    fn decode_first(&mut self, chunk: u32, latents: &[f32], opens_scene: bool) -> Result<(), Diagnostic> {
        if self.has_first_latent(chunk) {
            return Ok(());
        }
        let begun = Instant::now();
        let frame = &latents[..self.frame_len().min(latents.len())];
        let pixels = match self.decoder_kind() {
            PixelDecoder::SpaceTimeDepth => self.run_program("decode", "latents", frame, "pixels")?,
            PixelDecoder::WanVae | PixelDecoder::Tiny if opens_scene => {
                self.backend.reset_buffers();
                self.run_program("decode.open", "latents", frame, "pixels")?
            }
            PixelDecoder::WanVae | PixelDecoder::Tiny => {
                self.run_program("decode.first", "latents", frame, "pixels")?
            }
            PixelDecoder::None => Vec::new(),
        };
        self.apply_delay(begun, |m| m.first_ns);
        let picture = (self.video.stream.height * self.video.stream.width * 3) as usize;
        let anchor = pixels[pixels.len().saturating_sub(picture)..].to_vec();
        self.first_latent = Some(FirstLatent { chunk, anchor, pixels: Some(pixels) });
        Ok(())
    }

    fn apply_delay(&self, begun: Instant, ns: impl Fn(&MediaDelays) -> u64) {
        if let Some(m) = &self.delays {
            sleep_until_elapsed(begun, ns(m));
        }
    }

    fn run_program(
        &mut self,
        phase: &str,
        input: &str,
        data: &[f32],
        output: &str,
    ) -> Result<Vec<f32>, Diagnostic> {
        let failed = |why: String| Diagnostic::error(&T0016, format!("{phase} of a chunk: {why}"));
        let program =
            *self.loaded.get(phase).ok_or_else(|| failed("the plan holds no such program".into()))?;
        let call = CallData { inputs: BTreeMap::from([(input, data)]), ..CallData::default() };
        self.backend.run(program, &call, &mut NoObserver).map_err(|f| failed(fault_text(f)))?;
        self.backend
            .output(output)
            .map(<[f32]>::to_vec)
            .ok_or_else(|| failed(format!("the program outputs no {output}")))
    }
}

/// Returns the latents among the outputs of a chunk's call.
pub(crate) fn find_latents(outputs: &Tensors) -> Result<&Tensor, Diagnostic> {
    find_output(outputs, "latents")
}

/// Iterates over the frames of a chunk among the outputs of its call, in order.
fn delivered_pixels(outputs: &Tensors) -> impl Iterator<Item = &Tensor> {
    outputs.0.iter().filter(|t| t.name().starts_with(PIXELS) && t.name() != EXACT_PIXELS)
}

fn find_output<'a>(outputs: &'a Tensors, name: &str) -> Result<&'a Tensor, Diagnostic> {
    outputs
        .get(name)
        .ok_or_else(|| Diagnostic::error(&T0016, format!("a chunk's call returned no tensor `{name}`")))
}

fn f32_values(t: &Tensor) -> Vec<f32> {
    t.to_f32().unwrap_or_default()
}

/// The weights of a model whose decoder has none.
struct NoWeights;

impl WeightSource for NoWeights {
    fn read(&mut self, name: &str, _: &Type, _: Option<&str>, _: &MeshRank) -> Result<Vec<f32>, Diagnostic> {
        Err(Diagnostic::error(&T0016, format!("the decoder requires a weight `{name}`")))
    }
}

#[cfg(test)]
mod tests;
