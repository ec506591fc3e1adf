//! The performance model: time of ops under an executor's efficiency curves, time and bytes of
//! collectives by algorithm, load of experts under a routing distribution, pipelines under a
//! schedule, and streams that share a device.
//!
//! This library crate knows no mapping and searches nothing. It prices one mapping at a time.
//! Times are `f64` nanoseconds because estimates are scaled and divided.

pub mod collective_cost;
pub mod estimate_error;
pub mod executor_traits;
pub mod intervals;
pub mod layer;
mod machine_model;
pub mod moe;
pub mod op_cost;
pub mod parallelism;
pub mod params;
pub mod profile;
pub mod program_cost;
pub mod schedule;
pub mod stream_sim;
pub mod tiers;
pub mod timeline_lint;

use tessera_base::Code;

pub use collective_cost::{Algorithm, CollectiveCost, CollectiveOp, GroupSpan};
pub use machine_model::{AttentionWork, MachineModel};
pub use profile::Profile;

/// Diagnostic codes that this crate raises.
pub const CODES: &[&Code] = &[
    &profile::T1105,
    &profile::T1106,
    &stream_sim::T1115,
    &timeline_lint::T1116,
    &timeline_lint::T1117,
    &timeline_lint::T1118,
    &timeline_lint::T1119,
];
