//! Planning by estimate: given a model's config and a machine's name, searches the mappings, and
//! reports the best one, its estimated cost and why the others were rejected. Every search returns
//! an [`EstimateReport`], which can be printed, rendered as HTML or written to a folder.

mod advice;
mod attention_program;
mod defaults;
mod language;
mod library_env;
mod output_folder;
mod rank_table;
mod report;
mod video;

pub use defaults::{DEFAULT_HOST, DEFAULT_RACK, JobKind, job_with_defaults};
pub use language::{LanguageQuery, ModelSource, explain_language, search_language};
pub use library_env::{LibraryRequirements, render_env};
pub use report::EstimateReport;
pub(crate) use report::intervals_to_timeline;
pub use video::{VideoQuery, explain_video, parse_pins as video_pins, search_video};

pub(crate) use language::question_and_title;
pub(crate) use video::search_with_pins as video_found;

use std::path::Path;

pub use tessera_cost::MachineModel;
pub use tessera_cost::moe::Routing;
pub use tessera_plan::search::{Job, Objective};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_cost::Profile;
use tessera_mesh::{Cluster, catalog};
use tessera_plan::search::Pins;
use tessera_plan::search::thresholds::Thresholds;

use crate::model::T0010;

/// An input file of a plan by estimate cannot be read.
pub static T0046: Code = Code {
    id: "T0046",
    title: "cluster, profile or limits cannot be read",
    page: "A cluster, an executor profile or a set of gate limits is given by a catalog name or by the path of a TOML file. The \
argument is no catalog name, and no file can be read at that path. `tessera measure` writes a cluster and a profile for \
this machine. Both files may be edited: every figure names its source.",
};
/// The model to estimate is not known.
pub static T0047: Code = Code {
    id: "T0047",
    title: "unknown model",
    page: "A model is given by a folder with a config.json, by the path of that file, or by a name of the zoo, which the message \
lists. A language model needs only config.json; a video model also needs stream.toml, which defines how it is streamed.",
};

/// A prefetch hit rate was given for a model or a job that fetches no experts.
pub static T0056: Code = Code {
    id: "T0056",
    title: "prefetch hit rate does not apply",
    page: "A prefetch hit rate is the share of the host-memory experts that a predictor names one layer before the router selects \
them: 0 means no predictor, 1 a perfect one. Predicted experts are fetched while the previous layer computes; the others are \
fetched while their own layer waits.\n\nA prefetch hit rate only applies to a model with routed experts in prefill or decode: training keeps \
all experts in device memory, and a dense model fetches none. Omit it in these cases. The share must be from 0 to 1.",
};

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

/// Loads a machine from the names or files of its cluster and its profile, and adds racks until it
/// has at least `devices` devices.
///
/// # Errors
/// T0046 if a file cannot be read, T1101 and above if its content is invalid.
pub fn load_machine(
    cluster: &str,
    profile: Option<&str>,
    devices: Option<u32>,
) -> Result<MachineModel, Diagnostics> {
    let mut found: Cluster = match read_if_file(cluster)? {
        Some(text) => Cluster::parse(cluster, &text)?,
        None => catalog::find_cluster(cluster).map_err(|d| vec![*d])?,
    };
    if let Some(n) = devices.filter(|n| *n > found.device_count()) {
        let racks = n.div_ceil(found.devices_per_rack().max(1));
        found = found.with_racks(racks);
    }
    let profile = profile.unwrap_or(&found.profile).to_string();
    let profile = match read_if_file(&profile)? {
        Some(text) => Profile::parse(&profile, &text)?,
        None => Profile::find_builtin(&profile).map_err(|d| vec![*d])?,
    };
    Ok(MachineModel::new(found, profile))
}

/// Loads the gate limits from a file, or returns the defaults.
///
/// # Errors
/// T0046 if the file cannot be read, T1240 if a limit is invalid.
pub fn load_thresholds(path: Option<&Path>) -> Result<Thresholds, Diagnostics> {
    match path {
        None => Ok(Thresholds::default()),
        Some(path) => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).map_err(|e| vec![unreadable_file(&name, &e)])?;
            Thresholds::parse(&name, &text)
        }
    }
}

/// Parses the pins of a language model.
///
/// # Errors
/// T1200.
pub fn parse_language_pins(text: &str) -> Result<Pins, Diagnostics> {
    Pins::parse(text)
}

/// Reads a file if `name` looks like one, and returns `None` for a catalog name, which may contain
/// dots too.
fn read_if_file(name: &str) -> Result<Option<String>, Diagnostics> {
    let path = Path::new(name);
    if !name.ends_with(".toml") && !path.is_file() {
        return Ok(None);
    }
    std::fs::read_to_string(path).map(Some).map_err(|e| vec![unreadable_file(name, &e)])
}

fn unreadable_file(name: &str, why: &std::io::Error) -> Diagnostic {
    Diagnostic::error(&T0046, format!("{name} cannot be read: {why}"))
        .with_label(name.to_string(), "this file")
}
