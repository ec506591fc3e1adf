//! Runs a sealed plan inside this process: ranks are threads, and a callback receives each chunk
//! when it is finished.
//!
//! This is for tests that need the pixels rather than a run directory. Decisions, engines and checks are
//! those of a multi-process run. Messages, heartbeats, per-call deadlines
//! and the record are absent, because only processes need them. A leader outside the mesh runs on
//! the calling thread.

#[cfg(test)]
mod clip;
#[cfg(test)]
mod demo;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_mesh::Rank;
use tessera_runtime::director::{ChunkRequest, Director};
use tessera_runtime::driver::{EngineEvent, EngineThread, StreamRequest};
use tessera_runtime::engine::{AbortHandle, CallReport, ReadyCall};
use tessera_runtime::leader::ChunkStart;
use tessera_runtime::wire::{CallMeta, Tensor, Tensors};
use tessera_runtime::{Digest, Tripwires};

use crate::codes::T0017;
use crate::communicators;
use crate::media_codec::{MediaCodec, find_latents};
use crate::model::Model;
use crate::plan::Plan;
use crate::prompt_rows::PromptRows;
use crate::rank::RankContext;
use crate::run_settings::stream_spec;
use crate::synthetic_delays::SyntheticDelays;

/// Maximum wait for the next event of a rank. It only ends the wait for a hung rank; no slow
/// machine reaches it.
const EVENT_TIMEOUT: Duration = Duration::from_secs(3600);

/// The code of a failed rank. Only tests meet it, so it has no page.
static RANK_FAILED: Code = Code { id: "in-process", title: "a rank failed", page: "" };

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
    let mut ranks = InProcessRanks::start(plan, model, threads, &common).map_err(|d| vec![d])?;
    let mut text: Option<Tensor> = None;
    let mut last: Option<UndeliveredChunk> = None;
    for (request, call_id) in requests.into_iter().zip(1..) {
        let chunk_request =
            ChunkRequest { prompt_change: request.prompt.is_some(), seed: request.seed, cut: request.cut };
        if request.reload.is_some() {
            return Err(vec![Diagnostic::error(&RANK_FAILED, "an in-process run cannot reload weights")]);
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
        let Some(meta) = call.meta else { continue };
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
        let ready = ReadyCall {
            call_id,
            action: call.action,
            chunk: call.chunk,
            cache_epoch: call.cache_epoch,
            meta: Some(meta.clone()),
            reload: None,
            inputs: Tensors(inputs),
        };
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

/// The engine threads. Dropping this value ends them, even during a call.
struct InProcessRanks {
    threads: Vec<(Rank, EngineThread)>,
    aborts: Vec<AbortHandle>,
    events: Receiver<(u32, EngineEvent)>,
    /// Whether no rank runs a call.
    idle: bool,
}

impl InProcessRanks {
    fn start(
        plan: &Plan,
        model: &Model,
        threads: usize,
        common: &RankContext,
    ) -> Result<InProcessRanks, Diagnostic> {
        let specs = communicators::communicator_specs(&plan.sealed);
        let arenas = communicators::create_arenas(&specs)?;
        let share = |fd: &OwnedFd| {
            fd.try_clone().map_err(|e| Diagnostic::error(&T0017, format!("shared memory: {e}")))
        };
        let (sender, events) = channel();
        let mut ranks = InProcessRanks { threads: Vec::new(), aborts: Vec::new(), events, idle: false };
        for rank in plan.mesh_ranks() {
            let own_arenas = communicators::indices_of_rank(&specs, rank)
                .map(|i| share(&arenas[i]))
                .collect::<Result<Vec<_>, _>>()?;
            let factory =
                common.engine_factory(rank, (&model.dir, model.weights.clone()), threads, own_arenas);
            let sender = sender.clone();
            let forward = move |event| {
                let _ = sender.send((rank.0, event));
            };
            let programs = Arc::clone(&common.program_index);
            let thread = EngineThread::spawn(
                rank.0,
                factory,
                programs,
                common.session_spec.state_spec(),
                Tripwires::default(),
                forward,
            )
            .map_err(|e| rank_error(rank, format!("cannot start its thread: {e}")))?;
            ranks.threads.push((rank, thread));
        }
        while ranks.aborts.len() < ranks.threads.len() {
            match ranks.next_event()? {
                (_, EngineEvent::Loaded { abort, .. }) => ranks.aborts.push(abort),
                (rank, EngineEvent::NotLoaded(f)) => return Err(rank_error(rank, f.text).with_note(f.code)),
                (rank, EngineEvent::CallEnded(_)) => {
                    return Err(rank_error(rank, "it ended a call that was not started"));
                }
            }
        }
        ranks.idle = true;
        Ok(ranks)
    }

    fn next_event(&self) -> Result<(Rank, EngineEvent), Diagnostic> {
        let event = self.events.recv_timeout(EVENT_TIMEOUT);
        event
            .map(|(rank, event)| (Rank(rank), event))
            .map_err(|_| Diagnostic::error(&RANK_FAILED, format!("no rank answered for {EVENT_TIMEOUT:?}")))
    }

    /// Starts a call on every rank.
    fn begin_call(&mut self, call: &ReadyCall) -> Result<(), Diagnostic> {
        self.idle = false;
        match self.threads.iter().find(|(_, t)| !t.start_call(Box::new(call.clone()))) {
            Some((rank, _)) => Err(rank_error(*rank, "its thread does not accept calls")),
            None => Ok(()),
        }
    }

    /// Waits for every rank, checks each report against the call and against the other reports, and
    /// returns the outputs.
    fn finish_call(&mut self, meta: &CallMeta) -> Result<Tensors, Diagnostic> {
        let mut reports: BTreeMap<Rank, CallReport> = BTreeMap::new();
        while reports.len() < self.threads.len() {
            let (rank, event) = self.next_event()?;
            let EngineEvent::CallEnded(outcome) = event else {
                return Err(rank_error(rank, "it loaded twice"));
            };
            reports.insert(rank, outcome.map_err(|f| rank_error(rank, f.text).with_note(f.code))?);
        }
        self.idle = true;
        let mut outputs: Option<(Rank, Digest, Tensors)> = None;
        for (rank, report) in reports {
            let seen = report.observed;
            if (seen.state, seen.trace) != (meta.predicted_state, meta.expected_trace_digest) {
                return Err(rank_error(rank, "its trace or its cache state differs from the plan")
                    .with_label(
                        "planned",
                        format!("state {}, trace {}", meta.predicted_state, meta.expected_trace_digest),
                    )
                    .with_label("observed", format!("state {}, trace {}", seen.state, seen.trace)));
            }
            match &outputs {
                _ if report.outputs.0.is_empty() => {}
                Some((first, digest, _)) if *digest != seen.output => {
                    return Err(rank_error(rank, "its outputs differ from another rank's")
                        .with_label(format!("rank {first}"), digest.to_string())
                        .with_label(format!("rank {rank}"), seen.output.to_string()));
                }
                Some(_) => {}
                None => outputs = Some((rank, seen.output, report.outputs)),
            }
        }
        outputs
            .map(|(_, _, outputs)| outputs)
            .ok_or_else(|| Diagnostic::error(&RANK_FAILED, "no rank output the chunk's latents"))
    }
}

impl Drop for InProcessRanks {
    fn drop(&mut self) {
        if !self.idle {
            for abort in &self.aborts {
                abort();
            }
        }
    }
}

fn rank_error(rank: Rank, text: impl Into<String>) -> Diagnostic {
    Diagnostic::error(&RANK_FAILED, format!("rank {rank}: {}", text.into()))
}
