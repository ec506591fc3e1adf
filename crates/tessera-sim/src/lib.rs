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

mod communicators;
mod devices;
mod timed_program;

pub use devices::{BusyInterval, OutsideWork, ProgramEnd, SimDevices, SimProgramId};

use tessera_base::Code;

/// A program that cannot be timed.
pub static T0810: Code = Code {
    id: "T0810",
    title: "program cannot be run on a simulated device",
    page: "The simulated device executes a program of one role unchanged: each op on its stream, each wait after its issue, \
each collective over a group that the rank is a member of. One op of this program violates this. Programs of a sealed \
plan never do, because the verifier has checked them; if this error occurs, the program was changed after verification \
or was never sealed. Run `tessera check` on the program to see the violation.",
};
/// Ranks that wait for each other.
pub static T0811: Code = Code {
    id: "T0811",
    title: "ranks of a simulated run wait for each other",
    page: "No device is busy and no event is pending, but some ranks have unfinished ops: each waits in a collective \
that other members of its group never join, or join with a different collective. On real devices this is a hang.\n\nThe \
message lists the waiting ranks and the ranks that each one waits for. A sealed plan cannot stall; a rank that runs \
another program, or fewer programs than its peers, can cause a stall.",
};

/// The diagnostic codes of this crate.
pub const CODES: &[&Code] = &[&T0810, &T0811];
