//! Planning by estimate: given a model's config and a machine's name, searches the mappings, and
//! reports the best one, its estimated cost and why the others were rejected. Every search returns
//! an [`EstimateReport`], which can be printed, rendered as HTML or written to a folder.
//!
//! This crate runs nothing and names no backend. It uses `tessera` for models, plans and folders.

#![forbid(unsafe_code)]
#![warn(clippy::print_stderr, clippy::print_stdout)]

mod advice;
mod arrays;
mod attention_program;
pub mod codes;
mod defaults;
mod format;
mod language;
mod library_env;
mod machine;
mod output_folder;
mod query;
mod query_json;
mod rank_table;
mod report;
mod video;

pub use arrays::{ArrayCost, ArrayQuery, ArraySearch, check_fit, estimate_arrays};
pub use codes::CODES;
pub use defaults::{CPU_HOST, DEFAULT_HOST, DEFAULT_RACK, JobKind, job_with_defaults};
pub use language::{explain_language, question_and_title, search_language};
pub use library_env::{LibraryRequirements, render_env};
pub use machine::{load_machine, load_thresholds, resolve_machine};
pub use query::{LanguageQuery, ModelSource};
pub use query_json::{read_planned_machine, read_query};
pub use report::{EstimateReport, intervals_to_timeline};
pub use tessera_cost::MachineModel;
pub use tessera_cost::moe::Routing;
pub use tessera_plan::search::{Job, Objective, Pins};
pub use video::{
    MediaDecision, VideoQuery, choose_media, explain_video, parse_video_pins, search_video, search_with_pins,
    usual_machine,
};

use tessera::codes::T0010;
use tessera_base::{Code, Diagnostic};
use tessera_mesh::catalog;

use codes::{T0046, T0047, T0056};

/// Returns whether a diagnostic rejects the query itself: it names an unknown catalog entry, an
/// unknown pin, or a file that cannot be read. Any other diagnostic means that the query was
/// understood and that its answer is negative.
#[must_use]
pub fn is_invalid_query(d: &Diagnostic) -> bool {
    let codes: [&Code; 8] = [
        &T0010,
        &T0046,
        &T0047,
        &T0056,
        &catalog::T1104,
        &tessera_cost::profile::T1105,
        &tessera_plan::search::T1200,
        &tessera_plan::search::recipe::T1229,
    ];
    codes.contains(&d.code)
}
