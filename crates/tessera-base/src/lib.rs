//! What every room may lean on: diagnostics with stable codes, typed config fields, units and counter-based random
//! numbers.
//!
//! This room knows nothing of meshes, tensors, files, clocks or threads. The same input gives the same
//! bytes on every machine.

mod code;
mod counterexample;
mod diagnostic;
pub mod fields;
mod nearest;
pub mod random;
mod render;
mod units;

pub use code::{Code, Registry};
pub use counterexample::{Counterexample, Link, Mismatch, Step};
pub use diagnostic::{Diagnostic, Diagnostics, Place, Severity, Span};
pub use nearest::{choices, nearest};
pub use render::{Format, render, render_all};
pub use units::{Bytes, Flops, Nanoseconds};

/// Codes this room raises.
pub const CODES: &[&Code] = &[&fields::T0001, &fields::T0002, &fields::T0003, &fields::T0004];
