//! Break-it tests: a table of faults with their expected failures, and a runner for this machine.
//!
//! Every binary contains the faults. A fault is armed only by a parity key that all ranks announce.

mod outcome;
mod overlap_sweep;
mod processes;
mod run;
mod table;

pub use outcome::{DrillOutcome, Observation, ObservedFailure};
pub use overlap_sweep::{
    MeasuredGate, StreamMedians, coupling_gates, measure_coupling, sweep_depths, sweep_gates, sweep_markdown,
};
pub use run::{DrillRunner, DrillSetup, run_launcher};
pub use table::{DRILLS, Drill, DrillKind, DrillModel, FailureSignature, reference_page};
