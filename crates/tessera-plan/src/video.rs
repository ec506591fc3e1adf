//! The search over mappings of a video generator. For other models the estimate sums op costs; here
//! it simulates, as discrete events, one call of the programs that would be sealed, for every
//! candidate. Blocks are equivalent and so are stages, so the search lowers only a few of those
//! programs.

mod block_equivalence;
mod call;
mod lowering_cache;
mod memory;
mod period;
mod pixels;
mod query;
mod representatives;
mod schedule;
mod search;

pub use call::{CallEstimate, FetchTotals, PhaseSpan, estimate_call};
pub use memory::{RankMemory, host_expert_bytes, memory_by_role};
pub use period::{DecodePlacement, LeaderPixels, MediaCosts, MediaTimes, StreamPeriod, stream_period};
pub use pixels::{PixelModel, estimate_device_times};
pub use query::{MappingQuery, VideoPins};
pub use representatives::RankClass;
pub use search::{
    RankedMapping, RejectedMappings, VideoSearchResult, compare_places, estimate_mapping, search_mappings,
    search_with_progress,
};
