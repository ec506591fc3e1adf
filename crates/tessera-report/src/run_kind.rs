//! What a run that a record describes generates, and on which kind of device.

use serde::{Deserialize, Serialize};

/// What a run generates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunKind {
    /// Chunks of a video.
    #[default]
    Video,
    /// Texts. A chunk of the record is a call, and its frames are the ids that the call generated.
    Text,
    /// Outputs of array programs. A chunk of the record is a call, and its frames are the arrays that it returned.
    Arrays,
}

impl RunKind {
    /// Whether the run generates a video.
    #[must_use]
    pub fn is_video(&self) -> bool {
        *self == RunKind::Video
    }

    /// Returns the name of a chunk of the record: a chunk of the video, or a call.
    pub(crate) fn chunk_name(self) -> &'static str {
        match self {
            RunKind::Video => "chunk",
            RunKind::Text | RunKind::Arrays => "call",
        }
    }

    /// Returns the name of what a chunk delivers: a frame, or an id.
    pub(crate) fn frame_name(self) -> &'static str {
        match self {
            RunKind::Video => "frame",
            RunKind::Text => "id",
            RunKind::Arrays => "array",
        }
    }
}

/// Kind of device that ran a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunDevice {
    /// CPUs of this machine; values and times are real.
    #[default]
    Cpu,
    /// A simulated machine; only times are estimated, and no values are computed.
    Sim,
    /// GPUs, one per rank of the mesh.
    Cuda,
}
