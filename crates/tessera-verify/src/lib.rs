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

mod captured_graph;
mod display;
mod happens_before;
mod launch_order;
mod matching;
mod memory;
mod observed;
mod phase;
mod phase_programs;
mod program;
mod seal;
mod sequence;
mod signature;
mod structure;
mod value_numbering;
mod verified;

pub use captured_graph::check_graph_mixing;
pub use memory::{DeviceLimits, RoleMemory, check_slots};
pub use observed::{GroupId, ObservedCall, Traces, check_traces};
pub use phase::{check_phase, verify_phase};
pub use program::check_program;
pub use seal::{SealedPlan, seal};
pub use signature::{CollectiveDigest, collective_line, collective_lines};
pub use verified::Verified;

use tessera_base::Code;

/// Diagnostic codes that this crate raises.
pub const CODES: &[&Code] = &[
    &sequence::T0301,
    &sequence::T0302,
    &sequence::T0303,
    &sequence::T0304,
    &sequence::T0305,
    &sequence::T0306,
    &sequence::T0307,
    &sequence::T0308,
    &program::T0309,
    &program::T0310,
    &launch_order::T0311,
    &launch_order::T0312,
    &program::T0313,
    &program::T0314,
    &program::T0315,
    &happens_before::T0316,
    &program::T0317,
    &happens_before::T0318,
    &structure::T0319,
    &structure::T0320,
    &program::T0321,
    &structure::T0322,
    &program::T0323,
    &memory::T0324,
    &memory::T0325,
    &memory::T0326,
    &memory::T0327,
    &memory::T0328,
    &phase::T0329,
    &seal::T0330,
    &phase::T0331,
    &phase::T0332,
    &sequence::T0333,
    &sequence::T0334,
    &captured_graph::T0335,
    &captured_graph::T0336,
    &phase::T0337,
    &observed::T0338,
    &program::T0339,
    &memory::T0340,
    &observed::T0341,
    &observed::T0342,
    &value_numbering::T0343,
    &sequence::T0344,
];
