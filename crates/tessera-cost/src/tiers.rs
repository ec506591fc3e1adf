//! Memory tiers: placement of cold experts and of the old KV cache, fetches from slower tiers, and
//! the part of these fetches that computation hides.
//!
//! This module knows no hardware: callers pass bandwidths as fetch times and capacities as counts.

mod expert_cache;
mod kv_residency;
mod prefetch;

pub use expert_cache::{HotExperts, RoutingTrace, expert_hit_rate, sample_routing_trace, select_hot_experts};
pub use kv_residency::{KvResidency, SegmentReads, TierHits, replay_reads, spill_bytes};
pub use prefetch::{LayerTimes, PrefetchResult, choose_window, simulate_prefetch};
