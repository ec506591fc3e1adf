//! An oracle for the judge: it plays small sets of programs, one per rank, on devices as they are and says whether
//! they can fail. Beside it a generator of such sets, and a comparison of any judge with what was played.
//!
//! The library refuses to know the judge: it is handed in as a function, and nothing here matches sequences, draws
//! graphs or looks for cycles. It only executes. The binary and the tests bring `tessera-verify` along.
//!
//! **The machine.** A host runs its program in order, never blocks, and so has enqueued everything before the device
//! begins. Ops run on their streams, first in, first out, when what they come after has finished; inputs, call
//! scalars and weights are there from the start. Collectives launch from one queue per device in program order, one in
//! flight at a time: the head launches when everything before it on its stream and its events have finished, and
//! nothing behind it launches until it has retired. Consecutive sends and receives with one `batch` number, in one
//! graph or none, are one launch.
//! Ops in a row with one `graph` are launched on the stream of the first; other streams are lanes of the graph's own,
//! which begin with it and end before the next op there.
//! A symmetric collective is done when every member of its group has its own call to that group in flight; a send when
//! its receiver has the receive in flight, without buffers in between.
//!
//! **Why one run is enough.** Whether a step is possible depends only on steps that have happened, never on ones that
//! have not; a step that is possible stays so until it is taken, and happens once. So all orders end in one state, and
//! what had to happen before a step is the same in all of them. [`explore`] takes one order and notes those causes;
//! [`explore_all`] visits every state and believes none of this. A test compares the two.

mod call;
mod compare;
mod edit;
mod every;
mod group;
mod lower;
mod machine;
mod mutate;
mod outcome;
mod run;
mod set;
mod table;

pub use compare::{
    BESIDE, CONSERVATIVE, Compared, EXACT, Judge, Violation, compare, filetest, reason, shrink,
};
pub use edit::{Edit, EditKind};
pub use every::explore_all;
pub use mutate::{Mutation, MutationKind};
pub use outcome::{Field, Outcome};
pub use run::explore;
pub use set::{Case, Held, Meeting, What};
pub use table::Table;
pub use tessera_base::random::Dice;
