//! The judge: proves that the ranks of a plan cannot hang or drift, or says with a counterexample why they could.
//!
//! It derives everything again from the programs and trusts no annotation. It issues no collective, does no
//! I/O, and refuses to know how a program came to be: the planner is not among its imports, nor is any device.
//! A program has no branches, so "no collective under a condition" holds by construction.
//!
//! [`check_program`] judges one role's program, [`check_phase`] the programs of all ranks together, [`judge`] both, [`seal`]
//! everything a run may execute. Only here is a [`Verified`] made, and it never crosses a wire: whoever loads a
//! plan judges it again.

mod graph;
mod launch;
mod meet;
mod memory;
mod observed;
mod order;
mod phase;
mod program;
mod ranks;
mod same;
mod say;
mod seal;
mod sequence;
mod structure;
mod trace;
mod verified;

pub use graph::check_graph_mixing;
pub use memory::{Limits, RoleMemory, check_slots};
pub use observed::{Call, GroupId, Traces, check_traces};
pub use phase::{check_phase, judge};
pub use program::check_program;
pub use seal::{SealedPlan, seal};
pub use trace::{Census, collective_line, collective_lines};
pub use verified::Verified;

use tessera_base::Code;

/// Codes this room raises.
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
    &launch::T0311,
    &launch::T0312,
    &program::T0313,
    &program::T0314,
    &program::T0315,
    &order::T0316,
    &program::T0317,
    &order::T0318,
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
    &graph::T0335,
    &graph::T0336,
    &phase::T0337,
    &observed::T0338,
    &program::T0339,
    &memory::T0340,
    &observed::T0341,
    &observed::T0342,
    &same::T0343,
    &sequence::T0344,
];
