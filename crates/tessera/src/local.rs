//! Runs a sealed plan within this process: ranks are threads, and chunks are handed over as they come.
//!
//! For tests and for programs that want the pictures rather than a folder. Decisions, engines and the checks of what
//! a rank did are those of a run by processes; what is absent is what processes need: messages, heartbeats, deadlines
//! per call, a record. A leader outside the mesh is the calling thread.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_mesh::Rank;
use tessera_runtime::decide::{ChunkRequest, Director};
use tessera_runtime::driver::{EngineEvent, EngineThread, StreamRequest};
use tessera_runtime::engine::{AbortHandle, CallReport, ReadyCall};
use tessera_runtime::wire::{CallMeta, Tensor, Tensors};
use tessera_runtime::{Digest, Tripwires};

use crate::modelled::Modelled;
use crate::plan::Plan;
use crate::rank::Common;
use crate::studio::Codec;
use crate::{Model, comm};

/// A rank within this process failed.
pub static T0019: Code = Code {
    id: "T0019",
    title: "a rank within this process failed",
    page: "The plan ran with its ranks as threads of one process, and one of them failed or did something else than the \
plan holds. The text is that rank's own. Running the same plan with `tessera stream` gives each rank a process and leaves \
a record of what happened.",
};

/// Longest wait for one rank's next answer: it ends a wait for a rank that hangs, not one for a slow machine.
const PATIENCE: Duration = Duration::from_secs(3600);

/// A finished chunk.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// The chunk, from 0.
    pub chunk: u32,
    /// What was decided for it: phases, scalars, seed.
    pub meta: &'a CallMeta,
    /// Context latents [tokens, width] that its call was given; none in a scene's first chunk and where caches are
    /// resident.
    pub context: Option<&'a Tensor>,
    /// Latents [tokens, width] as the network's patches.
    pub latents: &'a Tensor,
    /// Pixels [frames, height, width, 3] in [−1, 1]; none for a model without a decoder.
    pub pixels: &'a [f32],
}

/// Streams one chunk per request, each rank on `threads` threads of its own. The next chunk is computed while `on`
/// looks at the last, so `requests` is asked one chunk ahead.
///
/// # Errors
/// Why a request is refused, or how a rank failed (T0019). Weights cannot be loaded again here.
pub fn run(
    plan: &Arc<Plan>,
    model: &Model,
    threads: usize,
    requests: impl IntoIterator<Item = StreamRequest>,
    mut on: impl FnMut(Chunk<'_>),
) -> Result<(), Diagnostics> {
    let words = Model::under(&model.dir, plan).map_err(|d| vec![d])?.words()?;
    let mut codec = Codec::load(plan, words, None).map_err(|d| vec![d])?;
    let common = Common::new(Arc::clone(plan), Modelled::default());
    let mut director = Director::new(common.stream.clone())?;
    let mut ranks = Ranks::start(plan, model, threads, &common).map_err(|d| vec![d])?;
    let mut text: Option<Tensor> = None;
    let mut last: Option<Finished> = None;
    for (request, call_id) in requests.into_iter().zip(1..) {
        let asked =
            ChunkRequest { prompt_change: request.prompt.is_some(), seed: request.seed, cut: request.cut };
        if request.reload.is_some() {
            return Err(vec![Diagnostic::error(&T0019, "weights are not loaded again within one process")]);
        }
        if let Some(prompt) = &request.prompt {
            text = Some(codec.text(prompt).map_err(|d| vec![d])?);
        }
        let call = director.next(&asked, &common.census)?;
        let Some(meta) = call.meta else { continue };
        let mut inputs = Vec::new();
        if meta.reset_cross {
            inputs.extend(text.clone());
        }
        let mut context = None;
        if let Some(last) = last.as_ref().filter(|_| meta.recompute) {
            let made = codec.context(last.chunk, &last.latents, last.opens_scene).map_err(|d| vec![d])?;
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
        ranks.begin(&ready).map_err(|d| vec![d])?;
        if let Some(last) = last.take() {
            last.hand_over(&mut codec, &mut on).map_err(|d| vec![d])?;
        }
        let latents = ranks.end(&meta).map_err(|d| vec![d])?;
        last = Some(Finished { chunk: call.chunk, opens_scene: call.opens_scene, context, latents, meta });
    }
    match last {
        Some(last) => last.hand_over(&mut codec, &mut on).map_err(|d| vec![d]),
        None => Ok(()),
    }
}

struct Finished {
    chunk: u32,
    opens_scene: bool,
    context: Option<Tensor>,
    latents: Tensor,
    meta: CallMeta,
}

impl Finished {
    fn hand_over(&self, codec: &mut Codec, on: &mut impl FnMut(Chunk<'_>)) -> Result<(), Diagnostic> {
        let pixels = codec.pixels(self.chunk, &self.latents)?;
        on(Chunk {
            chunk: self.chunk,
            meta: &self.meta,
            context: self.context.as_ref(),
            latents: &self.latents,
            pixels: &pixels,
        });
        Ok(())
    }
}

/// Engines on threads of their own. Dropping it ends them, also when a call is under way.
struct Ranks {
    threads: Vec<(Rank, EngineThread)>,
    aborts: Vec<AbortHandle>,
    events: Receiver<(u32, EngineEvent)>,
    /// Whether every rank waits for a call.
    idle: bool,
}

impl Ranks {
    fn start(plan: &Plan, model: &Model, threads: usize, common: &Common) -> Result<Ranks, Diagnostic> {
        let specs = comm::groups(&plan.sealed);
        let arenas = comm::create(&specs)?;
        let share = |fd: &OwnedFd| {
            fd.try_clone().map_err(|e| Diagnostic::error(&comm::T0017, format!("shared memory: {e}")))
        };
        let (tell, events) = channel();
        let mut ranks = Ranks { threads: Vec::new(), aborts: Vec::new(), events, idle: false };
        for rank in plan.mesh_ranks() {
            let mine =
                comm::of_rank(&specs, rank).map(|i| share(&arenas[i])).collect::<Result<Vec<_>, _>>()?;
            let factory = common.engine(rank, &model.dir, threads, mine);
            let tell = tell.clone();
            let said = move |event| {
                let _ = tell.send((rank.0, event));
            };
            let census = Arc::clone(&common.census);
            let thread =
                EngineThread::spawn(rank.0, factory, census, common.stream.cache, Tripwires::default(), said)
                    .map_err(|e| failed(rank, format!("no thread for it: {e}")))?;
            ranks.threads.push((rank, thread));
        }
        while ranks.aborts.len() < ranks.threads.len() {
            match ranks.wait()? {
                (_, EngineEvent::Loaded { abort, .. }) => ranks.aborts.push(abort),
                (rank, EngineEvent::NotLoaded(f)) => return Err(failed(rank, f.text).note(f.code)),
                (rank, EngineEvent::Ended(_)) => return Err(failed(rank, "it ended a call too many")),
            }
        }
        ranks.idle = true;
        Ok(ranks)
    }

    fn wait(&self) -> Result<(Rank, EngineEvent), Diagnostic> {
        let said = self.events.recv_timeout(PATIENCE);
        said.map(|(rank, event)| (Rank(rank), event))
            .map_err(|_| Diagnostic::error(&T0019, format!("no rank answered for {PATIENCE:?}")))
    }

    /// Has every rank begin a call.
    fn begin(&mut self, call: &ReadyCall) -> Result<(), Diagnostic> {
        self.idle = false;
        match self.threads.iter().find(|(_, t)| !t.run(Box::new(call.clone()))) {
            Some((rank, _)) => Err(failed(*rank, "its thread takes no call")),
            None => Ok(()),
        }
    }

    /// Waits for every rank and compares what they did with the call and with each other; the latents.
    fn end(&mut self, meta: &CallMeta) -> Result<Tensor, Diagnostic> {
        let mut reports: BTreeMap<Rank, CallReport> = BTreeMap::new();
        while reports.len() < self.threads.len() {
            let (rank, event) = self.wait()?;
            let EngineEvent::Ended(outcome) = event else {
                return Err(failed(rank, "it loaded twice"));
            };
            reports.insert(rank, outcome.map_err(|f| failed(rank, f.text).note(f.code))?);
        }
        self.idle = true;
        let mut latents: Option<(Rank, Digest, Tensor)> = None;
        for (rank, report) in reports {
            let seen = report.observed;
            if (seen.state, seen.trace) != (meta.predicted_state, meta.expected_trace_digest) {
                return Err(failed(rank, "its trace or its cache state is not the call's")
                    .at(
                        "planned",
                        format!("state {}, trace {}", meta.predicted_state, meta.expected_trace_digest),
                    )
                    .at("observed", format!("state {}, trace {}", seen.state, seen.trace)));
            }
            match (&latents, report.output) {
                (Some((first, digest, _)), Some(_)) if *digest != seen.output => {
                    return Err(failed(rank, "its latents differ from another rank's")
                        .at(format!("rank {first}"), digest.to_string())
                        .at(format!("rank {rank}"), seen.output.to_string()));
                }
                (None, Some(tensor)) => latents = Some((rank, seen.output, tensor)),
                _ => {}
            }
        }
        latents
            .map(|(_, _, tensor)| tensor)
            .ok_or_else(|| Diagnostic::error(&T0019, "no rank put out the chunk's latents"))
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if !self.idle {
            for abort in &self.aborts {
                abort();
            }
        }
    }
}

fn failed(rank: Rank, text: impl Into<String>) -> Diagnostic {
    Diagnostic::error(&T0019, format!("rank {rank}: {}", text.into()))
}
