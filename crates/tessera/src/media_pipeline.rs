//! The media pipeline of the leader: encodes prompts, builds context from latents, and decodes
//! latents to frames on disk.
//!
//! A chunk is decoded latent by latent, in order. In the recompute regime the first latent is
//! decoded before the next chunk's call, which waits for the anchor; the other latents are decoded
//! during that call.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::{Backend, CallData, Fault, MeshRank, Observer, ProgramHandle, WeightSource};
use tessera_ir::Type;
use tessera_mesh::Rank;
use tessera_models::{PixelDecoder, TEXT_PHASE, VideoModel};
use tessera_report::apng::{ApngStream, png_frame};
use tessera_runtime::engine::MediaPipeline;
use tessera_runtime::wire::Tensor;

use crate::codes::T0016;
use crate::files::{check_in_place, lost_output, write_error, write_file};
use crate::host_memory::available_bytes;
use crate::plan::Plan;
use crate::prompt_rows::PromptRows;
use crate::rank_config::RankConfig;
use crate::record::{MediaInterval, RecordWriter};
use crate::synthetic_delays::{MediaDelays, sleep_until_elapsed};
use crate::text_encoder::PromptEncoder;

/// Name of the clip file in a run directory.
pub(crate) const CLIP_FILE: &str = "clip.png";
/// Name of the file with the latents of a model without a decoder.
pub(crate) const LATENTS_FILE: &str = "latents.f32";

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
        text: PromptEncoder,
        orders: &RankConfig,
        record: Arc<Mutex<RecordWriter>>,
    ) -> Result<RunMediaPipeline, Diagnostic> {
        let mut codec = MediaCodec::load(plan, text, orders.delays.media)?;
        if orders.poison {
            codec.cpu.poison_temporaries();
        }
        Ok(RunMediaPipeline {
            codec,
            writer: FrameWriter::create(&plan.video, &orders.out, orders.png)?,
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
        check_in_place(&self.writer.file, &self.writer.path)?;
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
        let frames = match self.codec.decoder_kind() {
            PixelDecoder::SpaceTimeDepth => self.writer.write_frames(&pixels)?,
            PixelDecoder::None => {
                self.writer.write_latents(latents.data())?;
                0
            }
        };
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

/// The text encoder, and the plan's decode and encode programs of pixels on a CPU backend of their
/// own, outside the mesh.
pub(crate) struct MediaCodec {
    video: VideoModel,
    text: PromptRows,
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
        text: PromptEncoder,
        delays: Option<MediaDelays>,
    ) -> Result<MediaCodec, Diagnostic> {
        let (rank, sealed) = (Rank(0), &plan.sealed);
        let seat = MeshRank { mesh: *sealed.mesh(), rank };
        let mut cpu = CpuBackend::new(seat, Pool::single_thread(), Vec::new(), Duration::from_secs(1));
        available_bytes().into_iter().for_each(|bytes| cpu.limit_memory(bytes));
        let mut loaded = BTreeMap::new();
        for name in crate::plan::LEADER_PHASES.into_iter().filter(|name| *name != TEXT_PHASE) {
            if let (Some(p), Some(s)) = (sealed.rank_program(name, rank), sealed.rank_slots(name, rank)) {
                loaded.insert(name.to_string(), cpu.load(&Arc::new((**p).clone()), s, &mut NoWeights)?);
            }
        }
        Ok(MediaCodec {
            video: plan.video.clone(),
            text: PromptRows::load(plan, text)?,
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

    pub(crate) fn encode_text(&mut self, prompt: &str) -> Result<Tensor, Diagnostic> {
        let rows = self.text.encode(prompt)?;
        Tensor::from_f32("text", &[self.video.wan.text_len, self.video.wan.text_dim], rows)
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

/// Writes the growing output files of a run. Every file is valid after each chunk.
struct FrameWriter {
    dir: PathBuf,
    file: File,
    path: PathBuf,
    end_offset: u64,
    clip: Option<ApngStream>,
    size: (u32, u32),
    png: bool,
    frames_written: u32,
}

impl FrameWriter {
    fn create(video: &VideoModel, dir: &Path, png: bool) -> Result<FrameWriter, Diagnostic> {
        let size = (video.stream.width as u32, video.stream.height as u32);
        let (name, clip, header) = match video.stream.decoder {
            PixelDecoder::SpaceTimeDepth => {
                let (stream, header) = new_clip_stream(video)?;
                (CLIP_FILE, Some(stream), header)
            }
            PixelDecoder::None => (LATENTS_FILE, None, Vec::new()),
        };
        let path = dir.join(name);
        let file = File::create(&path).map_err(|e| write_error(&path, &e))?;
        file.write_all_at(&header, 0).map_err(|e| write_error(&path, &e))?;
        if png {
            let frames = dir.join("frames");
            std::fs::create_dir(&frames).map_err(|e| write_error(&frames, &e))?;
        }
        Ok(FrameWriter {
            dir: dir.to_path_buf(),
            file,
            path,
            end_offset: header.len() as u64,
            clip,
            size,
            png,
            frames_written: 0,
        })
    }

    fn append_bytes(&mut self, bytes: &[u8]) -> Result<(), Diagnostic> {
        self.file.write_all_at(bytes, self.end_offset).map_err(|e| write_error(&self.path, &e))?;
        self.end_offset += bytes.len() as u64;
        Ok(())
    }

    /// Writes pixels [frames, height, width, 3] in [−1, 1] and returns the number of frames.
    fn write_frames(&mut self, pixels: &[f32]) -> Result<u32, Diagnostic> {
        let frame = (self.size.0 * self.size.1 * 3) as usize;
        let mut count = 0;
        for values in pixels.chunks_exact(frame) {
            let rgb: Vec<u8> =
                values.iter().map(|v| ((v.clamp(-1.0, 1.0) + 1.0) * 127.5).round() as u8).collect();
            if self.png {
                write_file(
                    &self.frame_path(self.frames_written),
                    &png_frame(&rgb, self.size.0, self.size.1)?,
                )?;
            }
            if let Some(clip) = &mut self.clip {
                let bytes = clip.encode_frame(&rgb)?;
                self.append_bytes(&bytes)?;
            }
            self.frames_written += 1;
            count += 1;
        }
        self.close_chunk()?;
        Ok(count)
    }

    /// Makes the file a complete animation; the next frame overwrites the trailer.
    fn close_chunk(&mut self) -> Result<(), Diagnostic> {
        let Some(clip) = &self.clip else { return Ok(()) };
        let ending = clip.current_ending();
        let refuse = |e: std::io::Error| write_error(&self.path, &e);
        self.file.write_all_at(&ending.trailer, self.end_offset).map_err(refuse)?;
        for patch in &ending.patch {
            self.file.write_all_at(&patch.bytes, patch.offset).map_err(refuse)?;
        }
        Ok(())
    }

    fn write_latents(&mut self, bytes: &[u8]) -> Result<(), Diagnostic> {
        self.append_bytes(bytes)
    }

    /// Checks that every frame that was written as a PNG is still there.
    fn check_frames(&self) -> Result<(), Diagnostic> {
        let written = if self.png { self.frames_written } else { 0 };
        let mut paths = (0..written).map(|n| self.frame_path(n));
        let lost = paths.find_map(|path| Some((path.symlink_metadata().err()?, path)));
        lost.map_or(Ok(()), |(why, path)| Err(lost_output(&path, &why.to_string())))
    }

    fn frame_path(&self, frame: u32) -> PathBuf {
        self.dir.join("frames").join(format!("{frame:06}.png"))
    }

    fn sync(&mut self) -> Result<(), Diagnostic> {
        self.file.sync_data().map_err(|e| write_error(&self.path, &e))
    }
}

/// Creates an APNG stream with the model's size and frame rate, and returns it with its header
/// bytes.
pub(crate) fn new_clip_stream(video: &VideoModel) -> Result<(ApngStream, Vec<u8>), Diagnostic> {
    let (fps, per) = frame_rate_fraction(video.stream.fps);
    ApngStream::new(video.stream.width as u32, video.stream.height as u32, fps, per)
}

/// Converts a frame rate to a fraction of integers.
fn frame_rate_fraction(fps: f64) -> (u32, u32) {
    if fps.fract() == 0.0 { (fps as u32, 1) } else { ((fps * 100.0).round().min(65_000.0) as u32, 100) }
}
