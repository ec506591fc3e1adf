//! Diagnostics with stable codes, typed config fields, units and counter-based random numbers: the
//! foundation of every other crate.
//!
//! This library crate depends on no other crate of the workspace. It uses no files, clocks or
//! threads, so the same input gives the same bytes on every machine.

mod code;
pub mod config;
mod counterexample;
mod diagnostic;
pub mod random;
mod render;
mod suggest;
mod units;

pub use code::{Code, Registry};
pub use counterexample::{Counterexample, Mismatch, RankCollective, WaitEdge};
pub use diagnostic::{Diagnostic, Diagnostics, Label, Severity, Span};
pub use render::{DiagnosticFormat, render, render_all};
pub use suggest::{closest_name, format_choices};
pub use units::{Bytes, Flops, Nanoseconds};

/// Diagnostic codes that this crate raises.
pub const CODES: &[&Code] = &[&config::T0001, &config::T0002, &config::T0003, &config::T0004];
