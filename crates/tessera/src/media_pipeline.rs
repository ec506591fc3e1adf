//! The media pipeline of the leader: encodes prompts, builds context from latents, and decodes
//! latents to frames on disk.
//!
//! A chunk is decoded latent by latent, in order. In the recompute regime the first latent is
//! decoded before the next chunk's call, which waits for the anchor; the other latents are decoded
//! during that call.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::{Backend, CallData, Fault, MeshRank, Observer, ProgramHandle, WeightSource};
use tessera_ir::Type;
use tessera_mesh::Rank;
use tessera_models::{PixelDecoder, VideoModel, WordEncoder};
use tessera_runtime::engine::MediaPipeline;
use tessera_runtime::wire::Tensor;

use crate::codes::T0016;
use crate::frame_writer::{FrameWriter, OpenPipes};
use crate::host_memory::available_bytes;
use crate::plan::Plan;
use crate::rank_config::RankConfig;
use crate::record::{MediaInterval, RecordWriter};
use crate::synthetic_delays::{MediaDelays, sleep_until_elapsed};

/// The media pipeline of a run: codec, output files and record.
pub(crate) struct RunMediaPipeline {
    codec: MediaCodec,
    writer: FrameWriter,
    /// Number of requested chunks; the output is complete if the record has settled as many
    /// requests.
    chunks: u32,
    /// Whether removed output files end the run; only a self-test turns this off.
    checks_output: bool,
    record: Arc<Mutex<RecordWriter>>,
}

impl RunMediaPipeline {
    pub(crate) fn new(
        plan: &Plan,
        words: WordEncoder,
        orders: &RankConfig,
        pipes: OpenPipes,
        record: Arc<Mutex<RecordWriter>>,
    ) -> Result<RunMediaPipeline, Diagnostic> {
        let mut codec = MediaCodec::load(plan, words, orders.delays.media)?;
        if orders.poison {
            codec.cpu.poison_temporaries();
        }
        Ok(RunMediaPipeline {
            codec,
            writer: FrameWriter::create(plan, &orders.out, &orders.outputs, pipes)?,
            chunks: orders.chunks,
            checks_output: orders.checks_output(),
            record,
        })
    }

    /// Checks that the output files of the run are in its directory.
    fn check_output(&self, record: &RecordWriter) -> Result<(), Diagnostic> {
        if !self.checks_output {
            return Ok(());
        }
        self.writer.check_in_place()?;
        record.check_in_place()
    }
}

impl MediaPipeline for RunMediaPipeline {
    fn encode_prompt(&mut self, prompt: &str) -> Result<Tensor, Diagnostic> {
        self.codec.encode_text(prompt)
    }

    fn encode_context(
        &mut self,
        chunk: u32,
        previous: &Tensor,
        opens_scene: bool,
    ) -> Result<Tensor, Diagnostic> {
        let before = chunk.saturating_sub(1);
        let context = self.codec.build_context(before, previous, opens_scene)?;
        lock_record(&self.record).record_media_laps(before, self.codec.take_intervals());
        Ok(context)
    }

    fn deliver_chunk(&mut self, chunk: u32, latents: &Tensor) -> Result<u32, Diagnostic> {
        let pixels = self.codec.decode_pixels(chunk, latents)?;
        let written = Instant::now();
        let frames = self.writer.write_chunk(&pixels, latents.data())?;
        self.codec.end_interval("write", written);
        let mut record = lock_record(&self.record);
        record.record_media_laps(chunk, self.codec.take_intervals());
        self.check_output(&record)?;
        record.record_delivery(chunk, frames, latents.data())?;
        Ok(frames)
    }

    fn finish_output(&mut self) -> Result<(), Diagnostic> {
        self.writer.sync()?;
        // The record is closed before the run counts as finished: a record that cannot be closed is
        // a failed output.
        let mut record = lock_record(&self.record);
        self.check_output(&record)?;
        self.writer.check_frames()?;
        let complete = record.settled_requests() == self.chunks;
        record.write_end(None, complete)
    }
}

pub(crate) fn lock_record(record: &Mutex<RecordWriter>) -> std::sync::MutexGuard<'_, RecordWriter> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The text encoder, and the plan's decode and encode programs on a CPU backend of their own,
/// outside the mesh.
pub(crate) struct MediaCodec {
    video: VideoModel,
    words: WordEncoder,
    cpu: CpuBackend,
    loaded: BTreeMap<String, ProgramHandle>,
    /// The chunk of which only the first latent is decoded, with the pixels of that latent.
    decoded_first: Option<(u32, Vec<f32>)>,
    delays: Option<MediaDelays>,
    intervals: Vec<MediaInterval>,
}

fn f32_values(t: &Tensor) -> Vec<f32> {
    t.to_f32().unwrap_or_default()
}

struct NoWeights;
impl WeightSource for NoWeights {
    fn read(&mut self, name: &str, _: &Type, _: Option<&str>, _: &MeshRank) -> Result<Vec<f32>, Diagnostic> {
        Err(Diagnostic::error(&T0016, format!("the decoder requires a weight `{name}`")))
    }
}

struct NoopObserver;
impl Observer for NoopObserver {
    fn on_issued(&mut self, _: usize) {}
    fn on_progress(&mut self, _: u32) {}
}

impl MediaCodec {
    pub(crate) fn load(
        plan: &Plan,
        words: WordEncoder,
        delays: Option<MediaDelays>,
    ) -> Result<MediaCodec, Diagnostic> {
        let (rank, sealed) = (Rank(0), &plan.sealed);
        let seat = MeshRank { mesh: *sealed.mesh(), rank };
        let mut cpu = CpuBackend::new(seat, Pool::single_thread(), Vec::new(), Duration::from_secs(1));
        available_bytes().into_iter().for_each(|bytes| cpu.limit_memory(bytes));
        let mut loaded = BTreeMap::new();
        for name in crate::plan::LEADER_PHASES {
            if let (Some(p), Some(s)) = (sealed.rank_program(name, rank), sealed.rank_slots(name, rank)) {
                loaded.insert(name.to_string(), cpu.load(&Arc::new((**p).clone()), s, &mut NoWeights)?);
            }
        }
        Ok(MediaCodec {
            video: plan.video.clone(),
            words,
            cpu,
            loaded,
            decoded_first: None,
            delays,
            intervals: Vec::new(),
        })
    }

    pub(crate) fn decoder_kind(&self) -> PixelDecoder {
        self.video.stream.decoder
    }

    pub(crate) fn encode_text(&self, prompt: &str) -> Result<Tensor, Diagnostic> {
        let rows = self.words.encode(prompt).map_err(|d| *d)?;
        Tensor::from_f32("text", &[self.video.wan.text_len, self.video.wan.text_dim], &rows)
    }

    /// Returns the pixels [frames, height, width, 3] of a chunk; empty for a model without a
    /// decoder. Latents that [`MediaCodec::build_context`] has already decoded are not decoded
    /// again.
    pub(crate) fn decode_pixels(&mut self, chunk: u32, latents: &Tensor) -> Result<Vec<f32>, Diagnostic> {
        self.intervals.clear();
        let latents = f32_values(latents);
        let whole = Instant::now();
        let (mut pixels, name) = match self.decoded_first.take() {
            Some((c, first)) if c == chunk => (first, "decode.rest"),
            _ => (self.decode_first(&latents)?, "decode"),
        };
        let begun = Instant::now();
        for frame in latents.chunks_exact(self.frame_len()).skip(1) {
            pixels.extend(self.decode_frame(frame)?);
        }
        self.apply_delay(begun, |m| m.rest_ns);
        self.end_interval(name, whole);
        Ok(pixels)
    }

    /// Builds the context [anchor, z₋₂, z₋₁] from chunk `before` for the chunk after it. The anchor
    /// is the encoding of one decoded frame: the last pixel frame of latent 0, repeated over the
    /// temporal stride. After the first chunk of a scene the anchor is latent 0 itself. No other
    /// latent is decoded for the context.
    pub(crate) fn build_context(
        &mut self,
        before: u32,
        latents: &Tensor,
        opens_scene: bool,
    ) -> Result<Tensor, Diagnostic> {
        self.intervals.clear();
        let mut context = f32_values(latents);
        if !opens_scene {
            let begun = Instant::now();
            let first = self.decode_first(&context)?;
            self.end_interval("decode.first", begun);
            let begun = Instant::now();
            let stride = self.video.stream.stride[0] as usize;
            let anchor = &first[first.len() - first.len() / stride..];
            let encoded = self.run_program("encode", "pixels", &anchor.repeat(stride), "latents")?;
            context[..encoded.len()].copy_from_slice(&encoded);
            self.apply_delay(begun, |m| m.encode_ns);
            self.end_interval("encode", begun);
            self.decoded_first = Some((before, first));
        }
        Tensor::from_f32("context", &[self.video.chunk_tokens(), self.video.wan.token_width()], &context)
    }

    /// Ends an interval of work that began at `begun`.
    fn end_interval(&mut self, name: &'static str, begun: Instant) {
        self.intervals.push(MediaInterval { name, begun, ended: Instant::now() });
    }

    /// Takes the intervals of the last context or delivery.
    fn take_intervals(&mut self) -> Vec<MediaInterval> {
        std::mem::take(&mut self.intervals)
    }

    /// Returns the number of values in one latent frame.
    fn frame_len(&self) -> usize {
        (self.video.frame_tokens() * self.video.wan.token_width()) as usize
    }

    fn decode_first(&mut self, latents: &[f32]) -> Result<Vec<f32>, Diagnostic> {
        let begun = Instant::now();
        let pixels = self.decode_frame(&latents[..self.frame_len().min(latents.len())])?;
        self.apply_delay(begun, |m| m.first_ns);
        Ok(pixels)
    }

    /// Decodes the pixels of one latent frame.
    fn decode_frame(&mut self, frame: &[f32]) -> Result<Vec<f32>, Diagnostic> {
        match self.decoder_kind() {
            PixelDecoder::SpaceTimeDepth => self.run_program("decode", "latents", frame, "pixels"),
            PixelDecoder::None => Ok(Vec::new()),
        }
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
        self.cpu.run(program, &call, &mut NoopObserver).map_err(|f| match f {
            Fault::Failed(t)
            | Fault::Stalled(t)
            | Fault::Aborted(t)
            | Fault::Refused(t)
            | Fault::Poisoned(t) => failed(t),
        })?;
        self.cpu
            .output(output)
            .map(<[f32]>::to_vec)
            .ok_or_else(|| failed(format!("the program output no {output}")))
    }
}
