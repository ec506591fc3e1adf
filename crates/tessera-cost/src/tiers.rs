//! What lies in which memory, what is fetched from a slower one, and what of that can be hidden: cold experts, old keys
//! and values.
//!
//! Nothing here knows a machine: bandwidths come in as times of fetches, capacities as counts.

mod cache;
mod experts;
mod prefetch;

pub use cache::{CacheHits, Reads, Residency, replay_cache, spill};
pub use experts::{HotSet, Keep, Trace, hit_rate, hot_experts, routing_trace};
pub use prefetch::{LayerTimes, Prefetch, choose_window, prefetch};
