//! Runs a sealed plan inside this process: ranks are threads, and a callback receives each chunk
//! when it is finished.
//!
//! This is for tests that need the pixels rather than a run directory. Decisions, engines and checks are
//! those of a multi-process run. A leader outside the mesh runs on the calling thread.

#[cfg(test)]
mod clip;
#[cfg(test)]
mod demo;

use std::sync::Arc;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::director::{ChunkRequest, Director};
use tessera_runtime::driver::StreamRequest;
use tessera_runtime::engine::ReadyCall;
use tessera_runtime::leader::ChunkStart;
use tessera_runtime::wire::{CallMeta, Tensor, Tensors};

use crate::codes::T0087;
use crate::in_process_ranks::InProcessRanks;
use crate::media_codec::{MediaCodec, find_latents};
use crate::model::Model;
use crate::plan::Plan;
use crate::prompt_rows::PromptRows;
use crate::rank::RankContext;
use crate::run_settings::stream_spec;
use crate::synthetic_delays::SyntheticDelays;

/// A finished chunk, as the callback receives it.
#[derive(Debug, Clone, Copy)]
pub struct DeliveredChunk<'a> {
    /// Index of the chunk, from 0.
    pub chunk: u32,
    /// Decisions for the chunk: phases, scalars, seed.
    pub meta: &'a CallMeta,
    /// Context latents [tokens, width] that the call received; `None` in the first chunk of a scene
    /// and with resident caches.
    pub context: Option<&'a Tensor>,
    /// Latents [tokens, width], laid out as the model's patches.
    pub latents: &'a Tensor,
    /// Pixels [frames, height, width, 3] in [−1, 1]; empty for a model without a decoder.
    pub pixels: &'a [f32],
}

/// Streams one chunk per request with `threads` threads per rank. The next chunk computes while the
/// callback handles the previous one, so `requests` is polled one chunk ahead.
///
/// # Errors
/// Returns why a request is invalid, or how a rank failed. Weight reloads are not supported here.
pub fn run(
    plan: &Arc<Plan>,
    model: &Model,
    threads: usize,
    requests: impl IntoIterator<Item = StreamRequest>,
    mut on_chunk: impl FnMut(DeliveredChunk<'_>),
) -> Result<(), Diagnostics> {
    if plan.mapping.weights.is_some() {
        model.digest_weights(plan)?;
    }
    let parts =
        Model::open_for_plan(&model.dir, plan).map_err(|d| vec![d])?.with_weights(model.weights.clone());
    let (text, vae) = (parts.open_text_encoder()?, parts.open_vae_weights()?);
    let text = PromptRows::load(plan, text).map_err(|d| vec![d])?;
    let mut codec = MediaCodec::load(plan, text, vae, None).map_err(|d| vec![d])?;
    let common = RankContext::new(Arc::clone(plan), SyntheticDelays::default());
    let mut director = Director::new(stream_spec(plan))?;
    let mut ranks = InProcessRanks::start(&common, &(model.dir.clone(), model.weights.clone()), threads)
        .map_err(|d| vec![d])?;
    let mut text: Option<Tensor> = None;
    let mut last: Option<UndeliveredChunk> = None;
    for (request, call_id) in requests.into_iter().zip(1..) {
        let chunk_request = ChunkRequest {
            prompt_change: request.prompt.is_some(),
            seed: request.seed,
            cut: request.cut,
            step_list: request.step_list,
            bias: request.bias,
        };
        if request.reload.is_some() {
            return Err(vec![Diagnostic::error(&T0087, "an in-process run cannot reload weights")]);
        }
        let (given, video_step) = match request.start.clone() {
            ChunkStart::Drawn => (None, None),
            ChunkStart::Noise(noise) => (Some(noise), None),
            ChunkStart::Video { latents, step } => (Some(latents), Some(step)),
            ChunkStart::Unavailable(d) => return Err(vec![*d]),
        };
        if let Some(prompt) = &request.prompt {
            text = Some(codec.encode_text(prompt).map_err(|d| vec![d])?);
        }
        let call = director.plan_chunk_from(&chunk_request, video_step, &common.program_index)?;
        let Some(meta) = call.meta.clone() else { continue };
        let mut inputs = Vec::new();
        if meta.replaces_prompt() {
            inputs.extend(text.clone());
        }
        inputs.extend(given);
        let mut context = None;
        if let Some(last) = last.as_ref().filter(|_| meta.recomputes_context()) {
            let made =
                codec.build_context(last.chunk, &last.outputs, last.opens_scene).map_err(|d| vec![d])?;
            inputs.push(made.clone());
            context = Some(made);
        }
        let ready = ReadyCall::from_plan(call_id, &call, Tensors(inputs));
        ranks.begin_call(&ready).map_err(|d| vec![d])?;
        if let Some(last) = last.take() {
            last.deliver_to(&mut codec, &mut on_chunk).map_err(|d| vec![d])?;
        }
        let outputs = ranks.finish_call(&meta).map_err(|d| vec![d])?;
        last = Some(UndeliveredChunk {
            chunk: call.chunk,
            opens_scene: call.opens_scene,
            context,
            outputs,
            meta,
        });
    }
    match last {
        Some(last) => last.deliver_to(&mut codec, &mut on_chunk).map_err(|d| vec![d]),
        None => Ok(()),
    }
}

struct UndeliveredChunk {
    chunk: u32,
    opens_scene: bool,
    context: Option<Tensor>,
    outputs: Tensors,
    meta: CallMeta,
}

impl UndeliveredChunk {
    fn deliver_to(
        &self,
        codec: &mut MediaCodec,
        on: &mut impl FnMut(DeliveredChunk<'_>),
    ) -> Result<(), Diagnostic> {
        let pixels = codec.decode_pixels(self.chunk, &self.outputs, self.opens_scene)?;
        let latents = find_latents(&self.outputs)?;
        on(DeliveredChunk {
            chunk: self.chunk,
            meta: &self.meta,
            context: self.context.as_ref(),
            latents,
            pixels: &pixels,
        });
        Ok(())
    }
}
