//! Writes the frames or latents of a run to the files of its directory.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use tessera_base::Diagnostic;
use tessera_models::{PixelDecoder, VideoModel};
use tessera_report::apng::{ApngStream, png_frame};

use crate::files::{lost_output, write_error, write_file};

/// Name of the clip file in a run directory.
pub(crate) const CLIP_FILE: &str = "clip.png";
/// Name of the file with the latents of a model without a decoder.
pub(crate) const LATENTS_FILE: &str = "latents.f32";

/// Writes the growing output files of a run. Every file is valid after each chunk.
pub(crate) struct FrameWriter {
    dir: PathBuf,
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    end_offset: u64,
    clip: Option<ApngStream>,
    size: (u32, u32),
    png: bool,
    frames_written: u32,
}

impl FrameWriter {
    pub(crate) fn create(video: &VideoModel, dir: &Path, png: bool) -> Result<FrameWriter, Diagnostic> {
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
    pub(crate) fn write_frames(&mut self, pixels: &[f32]) -> Result<u32, Diagnostic> {
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

    pub(crate) fn write_latents(&mut self, bytes: &[u8]) -> Result<(), Diagnostic> {
        self.append_bytes(bytes)
    }

    /// Checks that every frame that was written as a PNG is still there.
    pub(crate) fn check_frames(&self) -> Result<(), Diagnostic> {
        let written = if self.png { self.frames_written } else { 0 };
        let mut paths = (0..written).map(|n| self.frame_path(n));
        let lost = paths.find_map(|path| Some((path.symlink_metadata().err()?, path)));
        lost.map_or(Ok(()), |(why, path)| Err(lost_output(&path, &why.to_string())))
    }

    fn frame_path(&self, frame: u32) -> PathBuf {
        self.dir.join("frames").join(format!("{frame:06}.png"))
    }

    pub(crate) fn sync(&mut self) -> Result<(), Diagnostic> {
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
