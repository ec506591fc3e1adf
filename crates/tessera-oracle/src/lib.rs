//! An oracle for the verifier: it simulates small sets of programs, one per rank, on a model of
//! real devices and reports whether they can fail. The crate also contains a generator of such
//! sets, and a comparison of any verifier with the simulated outcome.
//!
//! The library does not depend on the verifier: it takes one as a function, and nothing here
//! matches sequences, builds graphs or searches for cycles. It only executes. The binary and the
//! tests supply `tessera-verify`.
//!
//! **The device model.** A host runs its program in order, never blocks, and so has enqueued
//! everything before the device begins. Ops run on their streams, first in, first out, when their
//! dependencies have finished; inputs, call scalars and weights are available from the start.
//! Collectives launch from one queue per device in program order, one in flight at a time: the head
//! launches when everything before it on its stream and its events have finished, and nothing
//! behind it launches until it has retired. Consecutive sends and receives with one `batch` number,
//! all in one graph or all in none, form one launch. Consecutive ops of one `graph` are launched on
//! the stream of the first op; other streams become lanes of the graph, which begin with it and end
//! before the next op on that stream. A collective of a group completes when every member has its
//! own call to that group in flight; a send completes when its receiver has the receive in flight,
//! without intermediate buffers.
//!
//! **Why one run is enough.** Whether a step is possible depends only on steps that have happened,
//! never on steps that have not; a possible step stays possible until it is taken, and happens
//! once. So all orders end in one state, and the set of steps that must precede a step is the same
//! in all of them. [`explore_one_order`] takes one order and records these causes;
//! [`explore_all_orders`] visits every state without relying on this argument. A test compares the
//! two.

#![forbid(unsafe_code)]

mod call;
mod compare;
mod device_model;
mod group;
mod interleavings;
mod lower;
mod mutate;
mod one_order;
mod outcome;
mod planned_call;
mod programs;
mod rewrite;
mod table;

pub use compare::{
    CONSERVATIVE, Comparison, Disagreement, EXACT, NOT_ABOUT_COMPLETION, Verifier, compare_set,
    conservative_reason, shrink_set, to_filetest,
};
pub use interleavings::explore_all_orders;
pub use mutate::{Mutation, MutationKind};
pub use one_order::explore_one_order;
pub use outcome::{ExecutionOutcome, MismatchField};
pub use planned_call::{CollectiveSpec, ValueSharding};
pub use programs::{JointOperation, ProgramSet};
pub use rewrite::{Rewrite, RewriteKind, apply_rewrite};
pub use table::ComparisonTable;
pub use tessera_base::random::Rng;
