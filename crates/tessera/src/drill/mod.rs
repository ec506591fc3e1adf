//! Break-it tests: a table of faults with what must be seen of each, and what runs them on this machine.
//!
//! The faults themselves are compiled into every binary and armed by nothing but a key that all ranks announce.

mod engine;
mod hand;
mod minimal;
mod overlap;
mod programs;
mod run;
mod studio;
mod table;

pub use hand::Arming;
pub(crate) use hand::Hand;
pub use overlap::{Gate, Measured, coupling, coupling_gates, sweep, sweep_gates, sweep_markdown};
pub(crate) use run::T0029;
pub use run::{Bench, Outcome, Range, Seal, Seen, launch};
pub use table::{DRILLS, Drill, Signature, Way, reference};
