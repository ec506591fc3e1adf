//! The question that a search answers: a call, a machine, an objective, and decisions with a fixed value.

use tessera_cost::MachineModel;

use super::period::{DecodePlacement, MediaCosts};
use super::pixels::PixelModel;
use crate::search::Objective;
use crate::{DtypePolicy, LogicalModel, MediaPlacement, Strategy, Topology};

/// A call of a model, a machine and an objective, for which a search finds the best mapping.
#[derive(Debug, Clone)]
pub struct MappingQuery<'a> {
    /// Model whose calls are mapped, before it is divided among ranks.
    pub logical: &'a LogicalModel,
    /// Name in [`LogicalModel::calls`] of the call of a chunk in the middle of a stream.
    pub call: &'a str,
    /// Pixel frames per chunk.
    pub frames: u64,
    /// The cluster and the executor's profile.
    pub machine: &'a MachineModel,
    /// Maximum number of devices that a mapping may use, including those of ranks outside the mesh.
    pub devices: u32,
    /// Minimum number of devices to use; 1 for any number.
    pub min_devices: u32,
    /// What to optimise: the time to a chunk's last pixel, frames per second, memory, or the number
    /// of devices whose period meets a deadline.
    pub objective: Objective,
    /// Costs of decode and encode around the generator.
    pub media: MediaCosts,
    /// The model with the phases of pixels in its calls, if they are programs of the plan.
    pub pixels: Option<PixelModel<'a>>,
    /// Time of one message between leader and workers, in nanoseconds.
    pub message_ns: f64,
    /// Compute dtype policy (f32, bf16 or fp8), the same for all candidates.
    pub dtype: DtypePolicy,
    /// Parameters with a fixed value.
    pub pins: VideoPins,
    /// Maximum length of [`VideoSearchResult::best`]; 0 counts as 1.
    pub max_results: usize,
}

/// Parameters with a fixed value; `None` leaves a parameter free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VideoPins {
    /// Number of ranks over tp.
    pub tp: Option<u32>,
    /// Number of pipeline stages.
    pub pp: Option<u32>,
    /// Strategy that shards a transformer block over tp: `megatron` or `ulysses`.
    pub strategy: Option<Strategy>,
    /// Number of row chunks, whose all-reduces overlap compute; 1 means no overlap.
    pub overlap_chunks: Option<u32>,
    /// Placement of the leader: in the mesh, or outside it (`pp0`, `pp1`).
    pub topology: Option<Topology>,
    /// Which ranks decode, and when.
    pub decode: Option<DecodePlacement>,
    /// Where the phases of pixels run that are programs of the plan.
    pub media: Option<MediaPlacement>,
    /// Maximum calls that are sent and not done.
    pub outstanding: Option<u32>,
}
