//! The faults that a drill injects into the ranks of a run. Every binary contains them; a fault is
//! armed only by a parity key that all ranks announce.

mod engine;
mod injector;
mod media_pipeline;
mod model_files;
mod program_changes;

pub(crate) use engine::DrillEngine;
pub(crate) use injector::FaultInjector;
pub use injector::{DrillConfig, fired_at_ns, flipped_place};
pub(crate) use media_pipeline::DrillMediaPipeline;
