//! What a run leaves behind, as pure strings and bytes: the record, the trace, the clip and the page.
//!
//! This room knows nothing of files, clocks, threads, devices or plans. It is handed what happened and hands
//! back bytes; the same input gives the same bytes on every machine. Doors write them where they belong.

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

pub use counterexample::{counterexample, counterexample_with_lines};

use tessera_base::Code;

/// Codes that this room raises.
pub const CODES: &[&Code] =
    &[&record::T0901, &record::T0902, &apng::T0903, &apng::T0904, &flight::T0905, &gantt::T0906];
