//! Renders what a run leaves behind as strings and bytes: the run record, flight records, the
//! autopsy, traces, charts, the clip and the HTML report.
//!
//! This library crate uses no files, clocks, threads, devices or plans. It turns records into
//! bytes, and the same input gives the same bytes on every machine. The application crates write
//! those bytes to files.

pub mod apng;
pub mod autopsy;
mod counterexample;
pub mod flight;
pub mod gantt;
pub mod html;
mod markup;
pub mod mermaid;
pub mod overlap;
pub mod perfetto;
pub mod record;
mod stats;
mod svg;
pub mod timeline;

pub use counterexample::{draw_counterexample, draw_counterexample_with_lines};

use tessera_base::Code;

/// Diagnostic codes of this crate.
pub const CODES: &[&Code] =
    &[&record::T0901, &record::T0902, &apng::T0903, &apng::T0904, &flight::T0905, &gantt::T0906];
