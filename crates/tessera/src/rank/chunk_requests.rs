//! The requests of a stream's chunks: what the leader decides about each, from the options of the run and from changes
//! that arrive while it runs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tessera_base::Diagnostic;
use tessera_runtime::director::SceneCut;
use tessera_runtime::driver::{CallRequest, StreamRequest};
use tessera_runtime::leader::ChunkStart;
use tessera_runtime::wire::F32Bits;

use crate::faults::FaultInjector;
use crate::noise_file::NoiseFile;
use crate::plan::Plan;
use crate::rank_config::{RankConfig, first_diagnostic};
use crate::record::ChunkSettings;
use crate::stream_control::{ChangeIntake, TakenChanges};
use crate::video_encoder::VideoEncoder;
use crate::video_feed::FeedReader;
use crate::video_input::VideoSource;

/// Decides the request of each chunk, in order.
pub(super) struct ChunkRequests {
    orders: RankConfig,
    next: u32,
    /// Prompt and seed in force.
    prompt: String,
    seed: u64,
    /// List of denoise steps, attention bias and source of the weights in force.
    step_list: u32,
    bias: Option<f32>,
    weights: Option<String>,
    noise: Option<NoiseFile>,
    video: LazyVideo,
    drill: Option<FaultInjector>,
    /// Where changes arrive; `None` if the launching process keeps no handle.
    changes: Option<ChangeIntake>,
    decided: DecidedSettings,
}

impl ChunkRequests {
    /// Begins before the first chunk of a run. `inputs` come from the launching process.
    ///
    /// # Errors
    /// What is wrong with the file of noise.
    pub(super) fn new(
        orders: &RankConfig,
        plan: &Arc<Plan>,
        drill: Option<FaultInjector>,
        inputs: LeaderInputs,
        decided: DecidedSettings,
    ) -> Result<ChunkRequests, Diagnostic> {
        let noise = orders.noise.as_deref().map(|path| NoiseFile::open(path, &plan.video)).transpose()?;
        Ok(ChunkRequests {
            orders: orders.clone(),
            next: 0,
            prompt: String::new(),
            seed: 0,
            step_list: 0,
            bias: None,
            weights: None,
            noise,
            video: LazyVideo {
                orders: orders.clone(),
                plan: Arc::clone(plan),
                feed: inputs.video,
                source: None,
            },
            drill,
            changes: inputs.changes,
            decided,
        })
    }

    /// Decides the settings of a chunk. A change that arrived takes precedence over one that was scheduled for
    /// the same chunk, because it was made later.
    fn decide_settings(&mut self, chunk: u32, taken: TakenChanges) -> (StreamRequest, ChunkSettings) {
        let scheduled = self.orders.stream_request(chunk);
        let prompt = taken.prompt.or(scheduled.prompt);
        self.prompt = prompt.clone().unwrap_or_else(|| std::mem::take(&mut self.prompt));
        self.seed = taken.seed.or_else(|| self.orders.seed_at(chunk)).unwrap_or(self.seed);
        self.step_list =
            taken.step_list.or_else(|| self.orders.step_list_at(chunk)).unwrap_or(self.step_list);
        self.bias = taken.bias.map(F32Bits::get).or_else(|| self.orders.bias_at(chunk)).or(self.bias);
        let reload = taken.weights.or(scheduled.reload);
        self.weights = reload.as_ref().map(|r| r.source.clone()).or_else(|| self.weights.take());
        // New weights open a scene by themselves.
        let cut = match (scheduled.cut, taken.cut) {
            (SceneCut::Flush, _) | (_, SceneCut::Flush) => SceneCut::Flush,
            (SceneCut::None, cut) if reload.is_none() => cut,
            (cut, _) => cut,
        };
        let settings = ChunkSettings {
            prompt: self.prompt.clone(),
            seed: self.seed,
            cut: cut.is_cut() || reload.is_some(),
            step_list: self.orders.step_list_name(self.step_list),
            bias: self.bias,
            weights: self.weights.clone(),
        };
        let request = StreamRequest {
            prompt,
            seed: self.seed,
            cut,
            step_list: self.step_list,
            bias: self.bias.map(F32Bits::new),
            reload,
            ..scheduled
        };
        (request, settings)
    }

    /// Waits until a chunk may be requested and its frames have arrived, and takes the changes that hold from it; `None` if the
    /// input video has ended. A change that arrives while frames do still holds from their chunk.
    fn take_changes(&mut self, chunk: u32) -> Result<Option<TakenChanges>, Diagnostic> {
        if let Some(changes) = &mut self.changes {
            changes.wait_for_limit(chunk)?;
        }
        let Some(begins_scene) = self.video.wait_for_frames()? else { return Ok(None) };
        let mut taken =
            self.changes.as_mut().map_or(Ok(TakenChanges::default()), |c| c.take_changes(chunk))?;
        if begins_scene && chunk > 0 && taken.cut == SceneCut::None {
            taken.cut = SceneCut::Ordered;
        }
        Ok(Some(taken))
    }

    /// Returns what a chunk begins with; `None` if the input video has ended.
    fn next_start(&mut self, chunk: u32, opens_scene: bool) -> Option<ChunkStart> {
        // The launcher checked the file. A chunk whose noise it lacks now is refused with its call.
        match self.noise.as_ref().and_then(|file| file.read_chunk(chunk).ok()) {
            Some(noise) => Some(ChunkStart::Noise(noise)),
            None => self.video.next_start(opens_scene),
        }
    }
}

impl Iterator for ChunkRequests {
    type Item = CallRequest;

    fn next(&mut self) -> Option<CallRequest> {
        let chunk = self.next;
        if chunk >= self.orders.chunks {
            return None;
        }
        let (taken, refusal) = match self.take_changes(chunk) {
            Ok(None) => return None,
            Ok(Some(taken)) => (taken, None),
            Err(d) => (TakenChanges::default(), Some(ChunkStart::Unavailable(Box::new(d)))),
        };
        let (request, settings) = self.decide_settings(chunk, taken);
        let start = match refusal {
            Some(refusal) => refusal,
            None => self.next_start(chunk, chunk == 0 || settings.cut)?,
        };
        self.decided.insert(u64::from(chunk), settings);
        self.next += 1;
        let request = StreamRequest { start, ..request };
        let request = self.drill.iter().fold(request, |request, hand| hand.modify_request(chunk, request));
        Some(CallRequest::Chunk(request))
    }
}

/// What the launching process has passed to the leader beside destinations of frames.
#[derive(Debug, Default)]
pub(super) struct LeaderInputs {
    pub(super) changes: Option<ChangeIntake>,
    pub(super) video: Option<FeedReader>,
}

/// The settings of requested chunks that the record does not have yet, by the number of their requests. The queues of the
/// leader bound their number.
#[derive(Debug, Clone, Default)]
pub(super) struct DecidedSettings(Arc<Mutex<BTreeMap<u64, ChunkSettings>>>);

impl DecidedSettings {
    /// Takes the settings of a request. Those of earlier requests, whose chunks were dropped, are forgotten.
    pub(super) fn take(&self, request: u64) -> Option<ChunkSettings> {
        let mut decided = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *decided = decided.split_off(&request);
        decided.remove(&request)
    }

    fn insert(&self, request: u64, settings: ChunkSettings) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(request, settings);
    }
}

/// The input video of a run, opened on the thread that asks for the first request: opening a named pipe
/// waits for its writer, and loading the encoder takes time.
struct LazyVideo {
    orders: RankConfig,
    plan: Arc<Plan>,
    /// The leader's end of the socket of a video that the launching process hands over, until the video is opened.
    feed: Option<FeedReader>,
    source: Option<VideoSource>,
}

impl LazyVideo {
    /// Returns what the next chunk begins with; `None` if its video has ended.
    fn next_start(&mut self, opens_scene: bool) -> Option<ChunkStart> {
        self.try_next(opens_scene).unwrap_or_else(|d| Some(ChunkStart::Unavailable(Box::new(d))))
    }

    /// Waits until the frames of the next chunk have arrived. Returns whether they begin a scene; `None` if the video has ended.
    fn wait_for_frames(&mut self) -> Result<Option<bool>, Diagnostic> {
        self.open()?.map_or(Ok(Some(false)), VideoSource::wait_for_frames)
    }

    fn try_next(&mut self, opens_scene: bool) -> Result<Option<ChunkStart>, Diagnostic> {
        self.open()?.map_or(Ok(Some(ChunkStart::Drawn)), |source| source.next_start(opens_scene))
    }

    /// Returns the open video; `None` if the run has none.
    fn open(&mut self) -> Result<Option<&mut VideoSource>, Diagnostic> {
        let (orders, plan) = (&self.orders, &self.plan);
        if let (Some(input), None) = (&orders.video, &self.source) {
            let vae = orders.open_model(plan)?.open_vae_weights().map_err(first_diagnostic)?;
            let encoder = VideoEncoder::load(plan, vae, orders.leader.video_gpu)?;
            self.source = Some(VideoSource::open(input, &plan.video, encoder, self.feed.take())?);
        }
        Ok(self.source.as_mut())
    }
}
