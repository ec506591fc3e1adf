//! What every room may lean on: diagnostics with stable codes, units, ids and counter-based random numbers.
//!
//! This room knows nothing of meshes, tensors, files, clocks or threads. The same input gives the same
//! bytes on every machine.

mod code;
mod diagnostic;
mod nearest;
pub mod random;
mod render;
mod units;

pub use code::{Code, Registry};
pub use diagnostic::{Diagnostic, Diagnostics, Place, Severity, Span};
pub use nearest::{choices, nearest};
pub use render::{Format, render, render_all};
pub use units::{Bytes, Flops, Nanoseconds};

/// Codes this room raises itself: none, it only defines what a code is.
pub const CODES: &[&Code] = &[];
