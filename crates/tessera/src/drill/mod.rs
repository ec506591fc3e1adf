//! Break-it tests: a table of faults with their expected failures, and a runner for this machine.
//!
//! Every binary contains the faults. A fault is armed only by a parity key that all ranks announce.

mod engine;
mod injector;
mod media_pipeline;
mod minimal_model;
mod overlap_sweep;
mod program_faults;
mod run;
mod table;

pub use injector::DrillConfig;
pub(crate) use injector::FaultInjector;
pub use overlap_sweep::{
    MeasuredGate, StreamMedians, coupling_gates, measure_coupling, sweep_depths, sweep_gates, sweep_markdown,
};
pub(crate) use run::T0029;
pub use run::{DrillOutcome, DrillRunner, DrillSetup, Observation, ObservedFailure, run_launcher};
pub use table::{DRILLS, Drill, DrillKind, FailureSignature, reference_page};
