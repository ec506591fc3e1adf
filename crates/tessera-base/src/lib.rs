//! Diagnostics with stable codes, typed config fields, units and counter-based random numbers: the
//! foundation of every other crate.
//!
//! This library crate depends on no other crate of the workspace. It uses no files, clocks or
//! threads, so the same input gives the same bytes on every machine.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

mod code;
mod codes;
pub mod config;
mod counterexample;
mod diagnostic;
mod gate_status;
mod named_enum;
pub mod random;
pub mod record_keys;
mod render;
mod span;
mod suggest;
mod units;

pub use code::{Code, Registry};
pub use codes::CODES;
pub use counterexample::{Counterexample, Mismatch, RankCollective, WaitEdge};
pub use diagnostic::{Diagnostic, Diagnostics, Label, Severity};
pub use gate_status::GateStatus;
pub use render::{DiagnosticFormat, render, render_all};
pub use span::Span;
pub use suggest::{closest_name, format_choices};
pub use units::{Bytes, Flops, Nanoseconds};
