//! The verifier: it proves that the ranks of a plan cannot hang or drift, or shows with a
//! counterexample how they could.
//!
//! The verifier derives every fact again from the programs and trusts no annotation. It issues no
//! collective, does no I/O, and does not depend on how a program was produced: neither the planner
//! nor a device is among its imports. A program has no branches, so no collective can be
//! conditional.
//!
//! [`check_program`] checks one role's program, [`check_phase`] checks the programs of all ranks
//! against each other, [`verify_phase`] does both, and [`seal`] verifies everything that a run may
//! execute. Only this crate creates a [`Verified`], which never crosses a wire: a process that
//! loads a plan verifies it again.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

mod captured_graph;
mod codes;
mod display;
mod expert_tiers;
mod graph_mixing;
mod happens_before;
mod hosts;
mod launch_order;
mod matching;
mod memory;
mod observed;
mod phase;
mod phase_programs;
mod program;
mod seal;
mod seal_contents;
mod sequence;
mod signature;
mod structure;
mod value_numbering;
mod verified;

pub use codes::CODES;
pub use graph_mixing::check_graph_mixing;
pub use memory::{DeviceLimits, RoleMemory, check_slots};
pub use observed::{GroupId, ObservedCall, Traces, check_traces};
pub use phase::{check_phase, verify_phase};
pub use program::check_program;
pub use seal::{SealedPlan, seal};
pub use seal_contents::ProvedProperty;
pub use signature::{CollectiveDigest, collective_lines};
pub use verified::Verified;
