//! The input video of a run: from its frames to what the calls of its chunks begin with. The leader decides at
//! which step each chunk begins, and its call states the step.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;
use tessera_models::{VideoModel, denoising_steps};
use tessera_runtime::leader::ChunkStart;
use tessera_runtime::wire::Tensor;

use crate::codes::T0079;
use crate::video_encoder::VideoEncoder;
use crate::video_feed::FeedReader;
use crate::video_file::VideoFile;
use crate::video_strength::{MOTION_EFFECT, VideoStrength};

/// Noise level at which a chunk of an input video begins unless the user states one: enough for another
/// style, with the motion of the video.
pub const DEFAULT_STRENGTH: f32 = 0.8;

/// An input video and how much of it a stream replaces.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VideoInput {
    /// Where its frames come from.
    pub from: VideoOrigin,
    /// Highest noise level of a chunk's first step; 1 replaces the video, and 0 keeps it.
    pub strength: f32,
    /// Whether the strength is lower for chunks with much motion.
    pub follows_motion: bool,
}

/// Where the frames of an input video come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum VideoOrigin {
    /// A folder of PNGs, or a file or named pipe of raw RGB or YUV4MPEG2.
    Path(PathBuf),
    /// The launching process, which has a [`VideoFeed`](crate::video_feed::VideoFeed).
    Feed,
}

impl VideoInput {
    /// Checks that the plan has a step with which each chunk can begin, however much it moves.
    ///
    /// # Errors
    /// T0079 if the plan has none.
    pub(crate) fn check_strength(&self, video: &VideoModel) -> Result<(), Diagnostic> {
        self.find_first_step(video, self.new_strength().lowest_possible()).map(drop)
    }

    fn new_strength(&self) -> VideoStrength {
        VideoStrength::new(f64::from(self.strength), self.follows_motion)
    }

    /// Returns the step with which a chunk of this strength begins: the first whose noise level is at most the
    /// strength.
    fn find_first_step(&self, video: &VideoModel, strength: f64) -> Result<u32, Diagnostic> {
        let steps = denoising_steps(&video.stream);
        let at = steps.iter().position(|s| s.sigma < 1.0 && f64::from(s.sigma) <= strength);
        at.and_then(|step| u32::try_from(step).ok()).ok_or_else(|| {
            let levels: Vec<String> = steps.iter().map(|s| format!("{:.3}", s.sigma)).collect();
            let message = format!("no denoising step has a noise level of at most {}", strength as f32);
            let effect = if self.follows_motion { MOTION_EFFECT as f32 } else { 0.0 };
            let lowest = steps.last().map_or(0.0, |s| ((s.sigma + effect) * 1000.0).ceil() / 1000.0);
            let refused = Diagnostic::error(&T0079, message)
                .with_label("schedule.steps", format!("noise levels {}", levels.join(", ")))
                .with_hint(format!("give --video-strength {lowest} or more, or plan with more --steps"));
            match self.follows_motion {
                true => refused.with_note(format!("--video-motion lowers the strength by up to {effect}")),
                false => refused,
            }
        })
    }
}

/// Encodes the video of a run chunk by chunk, on the thread that asks for requests.
pub(crate) struct VideoSource {
    frames: FrameSource,
    encoder: VideoEncoder,
    input: VideoInput,
    strength: VideoStrength,
    video: VideoModel,
}

/// The frames of a video.
pub(crate) enum FrameSource {
    File(VideoFile),
    Feed(FeedReader),
}

impl FrameSource {
    /// Reads the frames of a chunk. `None` if the video ends before the last one.
    fn read_chunk(&mut self, frames: u64) -> Result<Option<Vec<f32>>, Diagnostic> {
        let file = match self {
            FrameSource::Feed(feed) => return feed.take_frames(u32::try_from(frames).unwrap_or(u32::MAX)),
            FrameSource::File(file) => file,
        };
        let mut pixels = Vec::new();
        for _ in 0..frames {
            match file.next_frame()? {
                Some(frame) => pixels.extend(frame),
                None => return Ok(None),
            }
        }
        Ok(Some(pixels))
    }
}

impl VideoSource {
    /// Begins a video. `feed` is the leader's end of the socket of a video that the launching process hands over.
    ///
    /// # Errors
    /// T0079 if the file cannot be opened or the socket is missing.
    pub(crate) fn open(
        input: &VideoInput,
        video: &VideoModel,
        encoder: VideoEncoder,
        feed: Option<FeedReader>,
    ) -> Result<VideoSource, Diagnostic> {
        let frames = match &input.from {
            VideoOrigin::Path(path) => FrameSource::File(VideoFile::open(path, video)?),
            VideoOrigin::Feed => FrameSource::Feed(
                feed.ok_or_else(|| Diagnostic::error(&T0079, "nobody hands the video to the leader"))?,
            ),
        };
        Ok(VideoSource {
            frames,
            encoder,
            input: input.clone(),
            strength: input.new_strength(),
            video: video.clone(),
        })
    }

    /// Waits until the frames of the next chunk have arrived. Returns whether they begin a scene, which no file says; `None` if
    /// the video has ended.
    ///
    /// # Errors
    /// T0079 if the socket of the video fails.
    pub(crate) fn wait_for_frames(&mut self) -> Result<Option<bool>, Diagnostic> {
        match &mut self.frames {
            FrameSource::File(_) => Ok(Some(false)),
            FrameSource::Feed(feed) => feed.wait_for_chunk(),
        }
    }

    /// Reads and encodes the frames of the next chunk. `None` if the video ends before its last frame.
    ///
    /// # Errors
    /// Why a frame cannot be read or encoded.
    pub(crate) fn next_start(&mut self, opens_scene: bool) -> Result<Option<ChunkStart>, Diagnostic> {
        let stream = &self.video.stream;
        let frames = if opens_scene { stream.first_chunk_frames() } else { stream.frames_per_chunk() };
        let frame_len = (stream.height * stream.width * 3) as usize;
        let Some(pixels) = self.frames.read_chunk(frames)? else { return Ok(None) };
        let strength = self.strength.next_strength(&pixels, frame_len, opens_scene);
        let step = self.input.find_first_step(&self.video, strength)?;
        let latents = self.encoder.encode_chunk(&pixels, opens_scene)?;
        let shape = [self.video.chunk_tokens(), self.video.wan.token_width()];
        let latents = Tensor::from_f32("video", &shape, &latents)?;
        Ok(Some(ChunkStart::Video { latents, step }))
    }
}
