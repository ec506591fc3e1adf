//! The flags of an input video: of a file for `tessera stream`, and of clients for `tessera serve`.

use std::path::PathBuf;

use tessera::video_input::{DEFAULT_STRENGTH, VideoInput, VideoOrigin};

/// The input video of a stream.
#[derive(Debug, Clone, clap::Args)]
pub struct VideoArgs {
    /// Begin each chunk with the frames of this video: a folder of PNGs, or a file or named pipe of
    /// 8-bit RGB without a header or of YUV4MPEG2, in the size and frame rate of the stream
    ///
    /// The calls of such a run carry encoded frames, and so its plan is another one; with --plan, plan
    /// with --video-input frames. A stream from a named pipe ends with the last whole chunk of the video.
    #[arg(long, value_name = "PATH")]
    video: Option<PathBuf>,

    #[command(flatten)]
    noise: VideoNoiseArgs,
}

impl VideoArgs {
    /// Returns the video, if one is given.
    #[must_use]
    pub fn to_input(&self) -> Option<VideoInput> {
        self.video.clone().map(|path| self.noise.to_input(VideoOrigin::Path(path)))
    }
}

/// The input video that the client in control of a server sends.
#[derive(Debug, Clone, clap::Args)]
pub struct SentVideoArgs {
    /// Begin each chunk with frames that the client in control sends, in the size and frame rate of the stream
    ///
    /// The calls of such a stream carry encoded frames, and so its plan is another one; with --plan, plan with
    /// --video-input frames.
    // The flags of the noise need a video, wherever it comes from.
    #[arg(long = "video-in", id = "video")]
    video_in: bool,

    #[command(flatten)]
    noise: VideoNoiseArgs,
}

impl SentVideoArgs {
    /// Returns the video, if clients send one.
    #[must_use]
    pub fn to_input(&self) -> Option<VideoInput> {
        self.video_in.then(|| self.noise.to_input(VideoOrigin::Feed))
    }
}

/// How much noise covers an input video.
#[derive(Debug, Clone, clap::Args)]
struct VideoNoiseArgs {
    /// How much of the video a chunk replaces: it begins at the first denoising step whose noise level
    /// is at most this, above 0 and at most 1 [default: 0.8]
    #[arg(long, value_name = "LEVEL", requires = "video", value_parser = parse_strength)]
    video_strength: Option<f32>,

    /// Begin chunks with much motion with less noise, as StreamDiffusionV2 does: up to 0.1 below
    /// --video-strength
    #[arg(long, requires = "video")]
    video_motion: bool,
}

impl VideoNoiseArgs {
    fn to_input(&self, from: VideoOrigin) -> VideoInput {
        let strength = self.video_strength.unwrap_or(DEFAULT_STRENGTH);
        VideoInput { from, strength, follows_motion: self.video_motion }
    }
}

fn parse_strength(text: &str) -> Result<f32, String> {
    let level = text.parse().ok().filter(|level| *level > 0.0 && *level <= 1.0);
    level.ok_or_else(|| format!("`{text}` is no noise level above 0 and at most 1"))
}
