//! What things take: time of ops under an executor's curves, time and bytes of collectives by algorithm, load of
//! experts under a routing, pipelines under a schedule, streams that share a device.
//!
//! This room knows no mapping and searches nothing: it is asked about one arrangement at a time and answers with
//! numbers. Times are `f64` nanoseconds, because they are estimates and are divided.

pub mod audit;
pub mod bars;
pub mod habits;
pub mod knobs;
pub mod layer;
pub mod links;
mod machine;
pub mod measured;
pub mod moe;
pub mod pipeline;
pub mod profile;
pub mod program;
pub mod rows;
pub mod schedule;
pub mod streams;
pub mod tiers;

use tessera_base::Code;

pub use links::{Algorithm, CollectiveOp, Span, Transfer};
pub use machine::{AttentionWork, Machine};
pub use profile::Profile;

/// Codes this room raises.
pub const CODES: &[&Code] = &[
    &profile::T1105,
    &profile::T1106,
    &streams::T1115,
    &audit::T1116,
    &audit::T1117,
    &audit::T1118,
    &audit::T1119,
];
