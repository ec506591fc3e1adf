//! Reads what a PyTorch run leaves behind, and says which rank departed from its peers.
//!
//! * [`flight`]: the Flight Recorder dumps of a run that hangs.
//! * [`trace`]: the compile traces of a run that compiles too much, or differently on its ranks.
//! * [`lint`]: the sources of a program, before it runs.
//!
//! Nothing here needs Python or PyTorch, executes anything of what it reads, or issues a collective.
//! The crate knows no file system, no plan and no run of Tessera.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

pub mod codes;
pub mod flight;
pub mod lint;
pub mod trace;

pub use codes::CODES;
