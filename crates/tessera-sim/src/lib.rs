//! The simulated device: all ranks of a plan on one clock that only arithmetic advances. It
//! simulates time alone and computes no values, so it needs no weights, and a laptop can simulate a
//! rack.
//!
//! The caller starts programs on ranks of [`SimDevices`] and receives their ends. Within a rank,
//! each stream executes its ops in order, an op waits for its events and for its launch, and
//! compute ops share the device one at a time. Across ranks, the n-th launch on a communicator
//! matches the n-th launch of every other member, and no member completes before the last one has
//! arrived. A program that would hang therefore stalls here, and [`SimDevices::find_stall`] reports
//! the ranks and their waits. Work outside programs, such as a VAE decode, occupies the device like
//! an op and delays the ops behind it.
//!
//! This library crate knows no plan, no model, no call and no process; its only inputs are programs
//! and timing models. It shares no code with the estimator of the same programs, so that the two
//! can be compared.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

mod codes;
mod communicators;
mod devices;
mod timed_program;

pub use codes::CODES;
pub use devices::{BusyInterval, OutsideWork, ProgramEnd, SimDevices, SimProgramId};
