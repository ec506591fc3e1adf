//! What a stream generates and how it runs, its events, and how it ended.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_report::overlap::OverlapStats;
pub use tessera_report::record::RunDevice;
use tessera_report::slow_rank::SlowRank;
use tessera_runtime::Failure;

use crate::codes::T0018;
use crate::faults::DrillConfig;
use crate::files::refuse_existing;
use crate::frame_pipe::{FrameDestination, FrameTarget};
use crate::synthetic_delays::SyntheticDelays;
use crate::video_input::VideoInput;
use crate::weights_origin::WeightChange;

/// The prompt of a stream for which its user gives none: one that the demo model knows.
pub const DEFAULT_PROMPT: &str = "a red circle moves right";

/// What a stream generates and how it runs. A change at a chunk takes effect when that chunk
/// begins.
#[derive(Debug, Clone, Default)]
pub struct StreamOptions {
    /// Number of chunks to generate; 0 is rejected (T0018).
    pub chunks: u32,
    /// Prompt from chunk 0 until the first of `prompts_at`.
    pub prompt: String,
    /// Seed from chunk 0 until the first of `seeds_at`.
    pub seed: u64,
    /// Prompts that replace `prompt`, each with the chunk from which it holds.
    pub prompts_at: Vec<(u32, String)>,
    /// Seeds that replace `seed`, each with the chunk from which it holds.
    pub seeds_at: Vec<(u32, u64)>,
    /// Names of the lists of denoise steps, each with the chunk from which it holds; the model's own until the first.
    pub step_lists_at: Vec<(u32, String)>,
    /// Attention biases on context keys, each with the chunk from which it holds; the plan's own until the first.
    pub biases_at: Vec<(u32, f32)>,
    /// Chunks before which the scene is cut.
    pub cuts_at: Vec<u32>,
    /// Chunks before which the scene is cut at once: undelivered earlier requests are discarded.
    pub flushes_at: Vec<u32>,
    /// Weight folders that every rank loads before a chunk; that chunk opens a scene.
    pub weights_at: Vec<(u32, WeightChange)>,
    /// File with the noise of each chunk's first step, for a plan whose calls carry it.
    pub noise: Option<PathBuf>,
    /// Input video from which each chunk begins, for a plan that takes one.
    pub video: Option<VideoInput>,
    /// Device of the programs that encode the input video.
    pub video_on: EncoderDevice,
    /// Run directory; it must not exist, unless it is reserved.
    pub out: PathBuf,
    /// Whether `out` is an empty folder of a [`ReservedFolder`](crate::files::ReservedFolder).
    pub out_is_reserved: bool,
    /// Outputs beside those that every run writes.
    pub outputs: OutputOptions,
    /// Whether every rank writes the messages that it sends to a file.
    pub wire_dump: bool,
    /// Whether every rank poisons temporaries that hold no value, to find accesses in the wrong order.
    pub poison: bool,
    /// Whether to run more ranks than cores.
    pub oversubscribe: bool,
    /// Where a text encoder's program runs, and whether it stays loaded.
    pub text: TextOptions,
    /// Synthetic delays, for measuring overlap.
    pub delays: SyntheticDelays,
    /// Device of the mesh ranks: CPUs or GPUs. A simulated run ignores it.
    pub device: RunDevice,
    /// Fault, limits and disabled tripwires of a drill; `None` in every other run.
    pub drill: Option<DrillConfig>,
    /// What allowed a run in performance mode, for the record; `None` outside of this mode.
    pub performance: Option<String>,
    /// The command line, for the record.
    pub command: Vec<String>,
}

/// Where the program of a text encoder runs, and whether it stays loaded. A table of words and a file of
/// encoded prompts need no program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextOptions {
    /// Device of the program.
    pub on: EncoderDevice,
    /// Whether its weights leave memory after each prompt and are loaded again for the next one.
    pub unload: bool,
}

/// The device of an encoder of the leader: of text, or of an input video.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EncoderDevice {
    /// A GPU if the ranks run on GPUs and the leader's has memory for the encoder, and the CPU otherwise.
    #[default]
    Auto,
    /// The CPU of the leader's host.
    Cpu,
    /// A GPU of the leader's host.
    Gpu,
}

/// Outputs that a run writes beside the clip of its model, or its latents if it has no decoder.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct OutputOptions {
    /// Whether to leave out the clip, which grows with the run.
    pub no_clip: bool,
    /// Whether to write every frame as a PNG.
    pub png: bool,
    /// Whether to write the latents of a model with a decoder too.
    pub latents: bool,
    /// Destinations of uncompressed frames.
    pub pipes: Vec<FrameTarget>,
}

impl OutputOptions {
    /// Returns whether frames go to standard output, where nothing else may go then.
    #[must_use]
    pub fn uses_stdout(&self) -> bool {
        self.pipes.iter().any(|p| p.to == FrameDestination::Stdout)
    }

    /// Opens the destinations of uncompressed frames, in order.
    pub(crate) fn open_pipes(&self) -> Result<Vec<OwnedFd>, Diagnostic> {
        self.pipes.iter().map(|p| p.to.open()).collect()
    }
}

impl StreamOptions {
    /// Returns T0013 if the run directory is taken.
    pub(crate) fn check_out(&self) -> Result<(), Diagnostic> {
        if self.out_is_reserved { Ok(()) } else { refuse_existing(&self.out) }
    }

    /// Checks the options independently of plan and model (T0018).
    pub(crate) fn check(&self) -> Diagnostics {
        let mut ds = Vec::new();
        let changes = self.prompts_at.iter().map(|(c, _)| *c).chain(self.seeds_at.iter().map(|(c, _)| *c));
        let cuts = self.cuts_at.iter().chain(&self.flushes_at).copied();
        let values = self.step_lists_at.iter().map(|(c, _)| *c).chain(self.biases_at.iter().map(|(c, _)| *c));
        let weights = self.weights_at.iter().map(|(c, _)| *c);
        for c in changes.chain(cuts).chain(values).chain(weights) {
            if c >= self.chunks {
                ds.push(Diagnostic::error(
                    &T0018,
                    format!("a change at chunk {c} of a stream of {} chunks", self.chunks),
                ));
            }
        }
        for c in self.flushes_at.iter().filter(|c| self.cuts_at.contains(c)) {
            ds.push(Diagnostic::error(&T0018, format!("chunk {c} is both cut and flushed")).with_hint(
                "a flush is a cut that takes effect at once: give the chunk to only one of the two options",
            ));
        }
        let pipes = &self.outputs.pipes;
        if let Some(twice) = (1..pipes.len()).find(|i| pipes[..*i].iter().any(|p| p.to == pipes[*i].to)) {
            let message = format!("two streams of frames go to {}", pipes[twice].to.to_text());
            ds.push(Diagnostic::error(&T0018, message).with_hint("name another destination for one of them"));
        }
        if self.chunks == 0 {
            ds.push(Diagnostic::error(&T0018, "a stream of no chunks"));
        }
        ds
    }
}

/// What a stream reports to its caller's `on_event` while it runs.
#[derive(Debug, Clone)]
pub enum StreamEvent {
    /// All ranks were started.
    Started {
        /// Process ids in order of rank.
        pids: Vec<u32>,
    },
    /// A choice of the run that its user may want to change; it precedes the start.
    Note(Diagnostic),
    /// A chunk is on disk.
    Chunk(ChunkProgress),
    /// No process of the run is left; the run directory is closed next.
    Exited,
}

/// The progress of a stream after a delivered chunk.
#[derive(Debug, Clone)]
pub struct ChunkProgress {
    /// Index of the chunk, from 0.
    pub chunk: u32,
    /// Number of the request that the chunk serves, from 0: the number that the handle of a running stream states for
    /// its changes. A flush discards requests, so it may be larger than the index.
    pub request: u64,
    /// Cache epoch of the chunk, which grows with each new scene.
    pub epoch: u32,
    /// Number of chunks that the stream requests in total, delivered or not.
    pub chunks: u32,
    /// Frames on disk so far.
    pub frames: u64,
    /// Frames per second since the first delivery; for the first chunk, since the ranks started.
    pub fps: f64,
    /// Name and duration in nanoseconds of each phase on the first rank.
    pub phases: Vec<(String, u64)>,
    /// Requests queued at the leader.
    pub queued_in: u32,
    /// Finished chunks queued for delivery.
    pub queued_out: u32,
    /// Time from the decision about the call to its delivery, in nanoseconds.
    pub call_ns: u64,
}

/// How a started stream ended, with the totals from its record.
#[derive(Debug, Clone)]
pub struct StreamReport {
    /// Exit status of the command: that of the failure's class, else 130 after an interrupt, or 0.
    pub exit_code: u8,
    /// The failure that ended the run, if any; a first stop request is no failure.
    pub failure: Option<Failure>,
    /// Whether a stop was requested during the run.
    pub interrupted: bool,
    /// Number of chunks written to disk.
    pub chunks: u32,
    /// Requested chunks that were dropped for a cut.
    pub dropped: u32,
    /// Number of pixel frames written to disk.
    pub frames: u64,
    /// Frames per second from the first call to the last delivery.
    pub fps: f64,
    /// Hash of all latents, if any chunk was delivered.
    pub golden: Option<String>,
    /// Digest of all weights at the start of the run; `None` if the run loads none.
    pub weights: Option<String>,
    /// Lowest peak signal-to-noise ratio of a fast decoder to the exact one, in decibels, of all scenes.
    pub decoder_psnr_db: Option<f64>,
    /// Overlap of the run's stages; `None` for a run of one chunk.
    pub overlap: Option<OverlapStats>,
    /// The rank for which the others wait, if one is slow.
    pub slow_rank: Option<SlowRank>,
    /// Description of the simulated machine; `None` if the ranks ran on this host.
    pub machine: Option<String>,
    /// Directory that holds the output of the run.
    pub out: PathBuf,
}
