//! The input video of a run: from its frames to what the calls of its chunks begin with.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;
use tessera_models::{VideoModel, denoising_steps};
use tessera_runtime::leader::ChunkStart;
use tessera_runtime::wire::Tensor;

use crate::codes::T0079;
use crate::video_encoder::VideoEncoder;
use crate::video_file::VideoFile;

/// Noise level at which a chunk of an input video begins unless the user states one: enough for another
/// style, with the motion of the video.
pub const DEFAULT_STRENGTH: f32 = 0.8;

/// An input video and how much of it a stream replaces.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VideoInput {
    /// Folder of PNGs, or a file or named pipe of raw RGB or YUV4MPEG2.
    pub path: PathBuf,
    /// Highest noise level of a chunk's first step; 1 replaces the video, and 0 keeps it.
    pub strength: f32,
}

impl VideoInput {
    /// Returns the step with which a chunk begins: the first whose noise level is at most the strength.
    ///
    /// # Errors
    /// T0079 if the plan has no such step.
    pub(crate) fn first_step(&self, video: &VideoModel) -> Result<u32, Diagnostic> {
        let steps = denoising_steps(&video.stream);
        let at = steps.iter().position(|s| s.sigma < 1.0 && s.sigma <= self.strength);
        at.and_then(|step| u32::try_from(step).ok()).ok_or_else(|| {
            let levels: Vec<String> = steps.iter().map(|s| format!("{:.3}", s.sigma)).collect();
            let message = format!("no denoising step has a noise level of at most {}", self.strength);
            let lowest = steps.last().map_or(0.0, |s| (s.sigma * 1000.0).ceil() / 1000.0);
            Diagnostic::error(&T0079, message)
                .with_label("schedule.steps", format!("noise levels {}", levels.join(", ")))
                .with_hint(format!("give --video-strength {lowest} or more, or plan with more --steps"))
        })
    }
}

/// Encodes the video of a run chunk by chunk, on the thread that asks for requests.
pub(crate) struct VideoSource {
    file: VideoFile,
    encoder: VideoEncoder,
    step: u32,
    first_frames: u64,
    frames: u64,
    shape: [u64; 2],
}

impl VideoSource {
    pub(crate) fn open(
        input: &VideoInput,
        video: &VideoModel,
        encoder: VideoEncoder,
    ) -> Result<VideoSource, Diagnostic> {
        Ok(VideoSource {
            file: VideoFile::open(&input.path, video)?,
            encoder,
            step: input.first_step(video)?,
            first_frames: video.stream.first_chunk_frames(),
            frames: video.stream.frames_per_chunk(),
            shape: [video.chunk_tokens(), video.wan.token_width()],
        })
    }

    /// Reads and encodes the frames of the next chunk. `None` if the video ends before its last frame.
    ///
    /// # Errors
    /// Why a frame cannot be read or encoded.
    pub(crate) fn next_start(&mut self, opens_scene: bool) -> Result<Option<ChunkStart>, Diagnostic> {
        let mut pixels = Vec::new();
        for _ in 0..if opens_scene { self.first_frames } else { self.frames } {
            match self.file.next_frame()? {
                Some(frame) => pixels.extend(frame),
                None => return Ok(None),
            }
        }
        let latents = self.encoder.encode_chunk(&pixels, opens_scene)?;
        let latents = Tensor::from_f32("video", &self.shape, &latents)?;
        Ok(Some(ChunkStart::Video { latents, step: self.step }))
    }
}
