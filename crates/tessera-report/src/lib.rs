//! Renders what a run leaves behind as strings and bytes: the run record, flight records, the
//! autopsy, traces, charts, the clip and the HTML report.
//!
//! This library crate uses no files, clocks, threads, devices or plans. It turns records into
//! bytes, and the same input gives the same bytes on every machine. The application crates write
//! those bytes to files.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

pub mod apng;
pub mod autopsy;
pub mod call_comparison;
mod canvas;
mod chunk_record;
mod class_work;
mod codes;
mod counterexample;
pub mod expert_load;
pub mod flight;
pub mod gantt;
pub mod html;
pub mod lane_chart;
mod markup;
mod memory_record;
pub mod mermaid;
pub mod overlap;
pub mod perfetto;
pub mod raw_video;
pub mod record;
pub mod record_check;
mod run_kind;
pub mod slow_rank;
mod stats;
mod svg;
pub mod timeline;
mod wait_graph;

pub use codes::CODES;
pub use counterexample::{draw_counterexample, draw_counterexample_with_lines};
pub use wait_graph::{WaitGraphDrawing, WaitGraphRow, draw_wait_graph};
