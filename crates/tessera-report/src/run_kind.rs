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
}

impl RunKind {
    /// Whether the run generates a video.
    #[must_use]
    pub fn is_video(&self) -> bool {
        *self == RunKind::Video
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
