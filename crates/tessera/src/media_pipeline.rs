//! The media pipeline of the leader: encodes prompts, builds context from latents, and decodes
//! latents to frames on disk.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_models::{PixelDecoder, VideoModel, WordEncoder};
use tessera_report::apng::{ApngStream, png_frame};
use tessera_runtime::engine::MediaPipeline;
use tessera_runtime::wire::Tensor;

use crate::files::{check_in_place, lost_output, write_error, write_file};
use crate::media_codec::MediaCodec;
use crate::plan::Plan;
use crate::rank_config::RankConfig;
use crate::record::RecordWriter;
use crate::vae_weights::VaeWeights;

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
        words: WordEncoder,
        vae: Option<VaeWeights>,
        orders: &RankConfig,
        record: Arc<Mutex<RecordWriter>>,
    ) -> Result<RunMediaPipeline, Diagnostic> {
        let mut codec = MediaCodec::load(plan, words, vae, orders.delays.media)?;
        if orders.poison {
            codec.poison_temporaries();
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

    fn deliver_chunk(&mut self, chunk: u32, latents: &Tensor, opens_scene: bool) -> Result<u32, Diagnostic> {
        let pixels = self.codec.decode_pixels(chunk, latents, opens_scene)?;
        let written = Instant::now();
        let frames = match self.codec.decoder_kind() {
            PixelDecoder::SpaceTimeDepth | PixelDecoder::WanVae => self.writer.write_frames(&pixels)?,
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
            PixelDecoder::SpaceTimeDepth | PixelDecoder::WanVae => {
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
