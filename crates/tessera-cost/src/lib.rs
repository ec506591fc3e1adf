//! The performance model: time of ops under an executor's efficiency curves, time and bytes of
//! collectives by algorithm, load of experts under a routing distribution, pipelines under a
//! schedule, and streams that share a device.
//!
//! This library crate knows no mapping and searches nothing. It prices one mapping at a time.
//! Times are `f64` nanoseconds because estimates are scaled and divided.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

mod codes;
pub mod collective_cost;
pub mod estimate_error;
pub mod executor_traits;
pub mod intervals;
pub mod layer;
mod layer_load;
mod machine_model;
pub mod moe;
pub mod op_class;
pub mod op_cost;
pub mod parallelism;
pub mod params;
pub mod profile;
pub mod program_cost;
pub mod schedule;
pub mod stream_sim;
pub mod tiers;
pub mod timeline_lint;

pub use codes::CODES;
pub use collective_cost::{Algorithm, CollectiveCost, CollectiveOp, GroupSpan};
pub use machine_model::{AttentionWork, MachineModel};
pub use profile::Profile;
