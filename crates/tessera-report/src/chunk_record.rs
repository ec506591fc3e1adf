//! What a record says about a chunk: its settings, its output, and the phases of each rank.

use serde::{Deserialize, Serialize};

use crate::class_work::ClassWork;
use crate::memory_record::MemoryRecord;

/// The record line of one delivered chunk: its request, its digests and its times on every rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChunkRecord {
    /// Index in the stream, from 0.
    pub chunk: u32,
    /// Request that the chunk serves, from 0; it differs from the chunk's index after a cut that
    /// discarded requests.
    #[serde(default)]
    pub request: Option<u64>,
    /// Id of the call that produced the chunk; flight records use the same id.
    pub call_id: u64,
    /// Epoch of the KV caches in which the call ran.
    pub cache_epoch: u32,
    /// Index of the chunk's first frame in the clip.
    pub start_frame: u64,
    /// Text of the prompt in force at the chunk.
    pub prompt: String,
    /// Seed in force at the chunk; a stream may change its seed between chunks.
    pub seed: u64,
    /// Whether a hard cut precedes the chunk.
    pub cut: bool,
    /// Name of the list of denoise steps in force at the chunk. Absent for the model's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_list: Option<String>,
    /// Attention bias on context keys in force at the chunk. Absent for the plan's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bias: Option<f32>,
    /// Source of the weights in force at the chunk. Absent for those with which the run began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights: Option<String>,
    /// Latent frames that left the full window of the KV caches for this chunk; 0 after a cut, which
    /// clears the caches, and in the recompute regime.
    #[serde(default)]
    pub evicted_frames: u32,
    /// Digest of the chunk's latents, hex.
    pub latents_digest: String,
    /// Peak signal-to-noise ratio of a fast decoder's first frame to the exact one, in decibels, where the
    /// chunk opens a scene. Absent for an exact decoder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder_psnr_db: Option<f64>,
    /// Number of pixel frames to which the chunk's latents decode.
    pub frames: u32,
    /// Time at which the call was committed, in nanoseconds since the run's start.
    pub start_ns: u64,
    /// Time from commit to the chunk's last frame, in nanoseconds.
    pub wall_ns: u64,
    /// Number of requests that waited when the call finished.
    pub queue_in: u32,
    /// Number of queued results when the chunk was done.
    pub queue_out: u32,
    /// Phases and digests of each rank, in order of rank.
    pub ranks: Vec<RankChunk>,
    /// Times of the two pipeline stages, if the driver records them.
    #[serde(default)]
    pub pipeline: Option<PipelineTimes>,
}

/// Times of a chunk in the two stages of a stream: the leader's own work, and the generator on the
/// mesh. Instants are nanoseconds since the run's start on the leader's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipelineTimes {
    /// Time at which the leader had decided the call.
    pub decided_ns: u64,
    /// Time at which the last rank was ready for the call.
    pub ready_ns: u64,
    /// Time at which the last rank reported the chunk done.
    pub done_ns: u64,
    /// Time from the previous chunk's commit to this one's, in nanoseconds; 0 for the first chunk.
    pub period_ns: u64,
    /// Duration of the leader's own work for the chunk (context, decode, write), in nanoseconds.
    pub stage0_ns: u64,
    /// Time from commit to done in nanoseconds, less the time for which the leader's own work is
    /// known to have occupied a device of the mesh.
    pub stage1_ns: u64,
    /// Time for which the mesh had been idle when the call was committed, in nanoseconds.
    pub idle_ns: u64,
    /// Time spent on digests by the rank that spent the most on them, in nanoseconds. Digests that a
    /// rank makes while its device computes are not counted.
    pub digest_ns: u64,
}

/// Phases and digests of one rank in a chunk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankChunk {
    /// Rank that ran the phases and computed the digests.
    pub rank: u32,
    /// Phases in order of their start.
    pub phases: Vec<PhaseRecord>,
    /// Digest of the rank's KV caches after the chunk, hex.
    pub state_digest: String,
    /// Digest of the collectives that the rank issued, hex.
    pub trace_digest: String,
    /// Memory of the rank after the chunk; `None` if the rank allocates none, or in records of
    /// earlier builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryRecord>,
}

/// One phase on one stream of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PhaseRecord {
    /// Name of the phase; the part before the first dot is its kind, such as `denoise` of
    /// `denoise.1`.
    pub name: String,
    /// Stream on which the phase ran, such as `compute`.
    pub stream: String,
    /// Start in nanoseconds since the run's start.
    pub start_ns: u64,
    /// End in nanoseconds since the run's start.
    pub end_ns: u64,
    /// Number of collectives that the phase issued.
    pub collectives: u32,
    /// Times in which the phase's stream was idle; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<StreamWaits>,
    /// Work by class of op, in the order in which the classes first occur; empty if single ops were not timed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassWork>,
}

/// Idle times of a stream in a phase: it waited for other ranks, for data in transfer, for its host
/// or for its device.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StreamWaits {
    /// Total idle time, in nanoseconds.
    #[serde(rename = "ns")]
    pub total_ns: u64,
    /// Longest waits in order of time, each as start and end in nanoseconds since the run's start.
    pub longest: Vec<(u64, u64)>,
}

/// A wait shorter than the phase's duration divided by this number counts in the total but is not
/// listed.
const MIN_LISTED_DIVISOR: u64 = 50;

impl StreamWaits {
    /// Returns the parts of a phase that the `busy` intervals do not cover. The intervals are pairs
    /// of start and end, may be in any order and may overlap.
    #[must_use]
    pub fn from_busy_intervals(
        start_ns: u64,
        end_ns: u64,
        busy: impl IntoIterator<Item = (u64, u64)>,
    ) -> StreamWaits {
        let mut busy: Vec<(u64, u64)> = busy.into_iter().collect();
        busy.sort_unstable();
        let mut out = StreamWaits::default();
        let mut at = start_ns;
        for (from, to) in busy.into_iter().chain([(end_ns, end_ns)]) {
            let from = from.min(end_ns);
            if from > at {
                out.total_ns += from - at;
                if (from - at).saturating_mul(MIN_LISTED_DIVISOR) >= end_ns - start_ns {
                    out.longest.push((at, from));
                }
            }
            at = at.max(from).max(to);
        }
        out
    }
}
