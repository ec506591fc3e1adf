//! Writes the frames or latents of a run to the files of its directory.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_models::{PixelDecoder, VideoModel};
use tessera_report::apng::{ApngStream, png_frame};

use crate::files::{check_in_place, lost_output, write_error, write_file};
use crate::frame_pipe::FramePipe;
use crate::latents_file::LatentsFile;
use crate::plan::Plan;
use crate::stream_options::OutputOptions;

/// Name of the clip file in a run directory.
pub(crate) const CLIP_FILE: &str = "clip.png";
/// Name of the folder with every frame as a PNG.
pub(crate) const FRAMES_FOLDER: &str = "frames";

/// Writes the outputs of a run. Every growing file is valid after each chunk.
pub(crate) struct FrameWriter {
    size: (u32, u32),
    clip: Option<ClipFile>,
    latents: Option<LatentsFile>,
    /// Folder of one PNG per frame, if the frames are written as PNGs too.
    png_folder: Option<PathBuf>,
    pipes: Vec<FramePipe>,
    frames_written: u32,
}

impl FrameWriter {
    /// Creates the output files of a plan in `dir`: a clip if the model has a decoder and the options do
    /// not exclude it, and latents if it has none or the options request them.
    ///
    /// # Errors
    /// T0014, or T0903 for a size or rate that no clip can have.
    pub(crate) fn create(
        plan: &Plan,
        dir: &Path,
        outputs: &OutputOptions,
        pipes: OpenPipes,
    ) -> Result<FrameWriter, Diagnostic> {
        let stream = &plan.video.stream;
        let decodes = stream.decoder != PixelDecoder::None;
        let clip = (decodes && !outputs.no_clip).then(|| ClipFile::create(&plan.video, dir)).transpose()?;
        let writes_latents = outputs.latents || !decodes;
        let latents = writes_latents.then(|| LatentsFile::create(plan, dir)).transpose()?;
        let png_folder = outputs.png.then(|| dir.join(FRAMES_FOLDER));
        if let Some(folder) = &png_folder {
            std::fs::create_dir(folder).map_err(|e| write_error(folder, &e))?;
        }
        let size = (stream.width as u32, stream.height as u32);
        let fps = stream.frame_rate_fraction();
        let targets = outputs.pipes.iter().zip(pipes.fds);
        let pipes = targets.map(|(target, out)| FramePipe::start(target, out, (size, fps), pipes.patience));
        let pipes = pipes.collect::<Result<Vec<_>, Diagnostic>>()?;
        Ok(FrameWriter { size, clip, latents, png_folder, pipes, frames_written: 0 })
    }

    /// Writes a chunk, given as the bytes of pixels [frames, height, width, 3] and of its latents. Returns the number of frames.
    ///
    /// # Errors
    /// T0014, or an error of the encoder.
    pub(crate) fn write_chunk(&mut self, pixels: &[u8], latents: &[u8]) -> Result<u32, Diagnostic> {
        if let Some(file) = &mut self.latents {
            file.append_chunk(latents)?;
        }
        let frame = (self.size.0 * self.size.1 * 3) as usize;
        let frames = || pixels.chunks_exact(frame);
        for rgb in frames() {
            self.write_frame(rgb)?;
        }
        self.clip.as_ref().map_or(Ok(()), ClipFile::close_chunk)?;
        // Pipes come last: a reader that is gone leaves files that end with a whole chunk.
        for rgb in frames() {
            self.pipes.iter_mut().try_for_each(|pipe| pipe.write_frame(rgb))?;
        }
        Ok(frames().count() as u32)
    }

    fn write_frame(&mut self, rgb: &[u8]) -> Result<(), Diagnostic> {
        if let Some(folder) = &self.png_folder {
            write_file(&frame_path(folder, self.frames_written), &png_frame(rgb, self.size.0, self.size.1)?)?;
        }
        if let Some(clip) = &mut self.clip {
            clip.append_frame(rgb)?;
        }
        self.frames_written += 1;
        Ok(())
    }

    /// Checks that the growing files are in their place.
    ///
    /// # Errors
    /// T0765.
    pub(crate) fn check_in_place(&self) -> Result<(), Diagnostic> {
        if let Some(clip) = &self.clip {
            check_in_place(&clip.file, &clip.path)?;
        }
        self.latents.as_ref().map_or(Ok(()), |l| check_in_place(&l.file, &l.path))
    }

    /// Checks that every frame that was written as a PNG is still there.
    ///
    /// # Errors
    /// T0765.
    pub(crate) fn check_frames(&self) -> Result<(), Diagnostic> {
        let Some(folder) = &self.png_folder else { return Ok(()) };
        let mut paths = (0..self.frames_written).map(|n| frame_path(folder, n));
        let lost = paths.find_map(|path| Some((path.symlink_metadata().err()?, path)));
        lost.map_or(Ok(()), |(why, path)| Err(lost_output(&path, &why.to_string())))
    }

    /// Waits until the growing files are on the disk.
    ///
    /// # Errors
    /// T0014.
    pub(crate) fn sync(&mut self) -> Result<(), Diagnostic> {
        let clip = self.clip.as_ref().map(|c| (&c.file, &c.path));
        let latents = self.latents.as_ref().map(|l| (&l.file, &l.path));
        clip.into_iter()
            .chain(latents)
            .try_for_each(|(file, path)| file.sync_data().map_err(|e| write_error(path, &e)))
    }
}

/// Open destinations of uncompressed frames, in the order of the options.
pub(crate) struct OpenPipes {
    pub(crate) fds: Vec<OwnedFd>,
    /// Maximum time for which a reader may take nothing.
    pub(crate) patience: Duration,
}

fn frame_path(folder: &Path, frame: u32) -> PathBuf {
    folder.join(format!("{frame:06}.png"))
}

/// A growing animated PNG.
struct ClipFile {
    file: File,
    path: PathBuf,
    end_offset: u64,
    stream: ApngStream,
}

impl ClipFile {
    fn create(video: &VideoModel, dir: &Path) -> Result<ClipFile, Diagnostic> {
        let (stream, header) = new_clip_stream(video)?;
        let path = dir.join(CLIP_FILE);
        let file = File::create(&path).map_err(|e| write_error(&path, &e))?;
        file.write_all_at(&header, 0).map_err(|e| write_error(&path, &e))?;
        Ok(ClipFile { file, path, end_offset: header.len() as u64, stream })
    }

    fn append_frame(&mut self, rgb: &[u8]) -> Result<(), Diagnostic> {
        let bytes = self.stream.encode_frame(rgb)?;
        self.file.write_all_at(&bytes, self.end_offset).map_err(|e| write_error(&self.path, &e))?;
        self.end_offset += bytes.len() as u64;
        Ok(())
    }

    /// Makes the file a complete animation; the next frame overwrites the trailer.
    fn close_chunk(&self) -> Result<(), Diagnostic> {
        let ending = self.stream.current_ending();
        let refuse = |e: std::io::Error| write_error(&self.path, &e);
        self.file.write_all_at(&ending.trailer, self.end_offset).map_err(refuse)?;
        for patch in &ending.patch {
            self.file.write_all_at(&patch.bytes, patch.offset).map_err(refuse)?;
        }
        Ok(())
    }
}

/// Creates an APNG stream with the model's size and frame rate, and returns it with its header
/// bytes.
pub(crate) fn new_clip_stream(video: &VideoModel) -> Result<(ApngStream, Vec<u8>), Diagnostic> {
    let (fps, per) = video.stream.frame_rate_fraction();
    ApngStream::new(video.stream.width as u32, video.stream.height as u32, fps, per)
}
