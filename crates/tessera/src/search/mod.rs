//! Planning by estimate: a model's config and a machine's name in; which mapping, what it comes to, and why not the
//! others out. What a search finds becomes one [`Sheet`], which is printed, drawn and kept.

mod advice;
mod folder;
mod hints;
mod module;
mod ranks;
mod rows;
mod sheet;
mod usual;
mod video;

pub use hints::{Needs, hints};
pub use rows::{Asked, Subject, rows, rows_why};
pub use sheet::Sheet;
pub(crate) use sheet::timeline_of;
pub use usual::{HOST, JobKind, RACK, job};
pub use video::{VideoAsked, pins as video_pins, video, video_why};

pub(crate) use rows::question;
pub(crate) use video::found as video_found;

use std::path::Path;

pub use tessera_cost::Machine;
pub use tessera_cost::moe::Routing;
pub use tessera_plan::search::{Job, Objective};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_cost::Profile;
use tessera_mesh::{Cluster, clusters};
use tessera_plan::search::Pins;
use tessera_plan::search::thresholds::Thresholds;

use crate::model::T0010;

/// A file of a plan by estimate that cannot be read.
pub static T0046: Code = Code {
    id: "T0046",
    title: "cluster, profile or limits cannot be read",
    page: "A cluster, an executor profile and the limits of gates are given by a name of the catalog or by a file in TOML. \
What was given is no such name, and no file of that path can be read. `tessera measure` writes a cluster and a profile for \
the machine at hand, which may be edited: every figure names its source.",
};
/// A model that cannot be estimated.
pub static T0047: Code = Code {
    id: "T0047",
    title: "model is not known",
    page: "A model is named by a folder with its own config.json, by that file, or by a name of the zoo. The message lists \
the zoo. Language models need nothing but config.json; video models also need stream.toml, which says how they are streamed.",
};

/// A forecast that nothing could follow.
pub static T0056: Code = Code {
    id: "T0056",
    title: "forecast names no experts",
    page: "A forecast is the share of the experts on the host that a predictor names a layer before the router asks for \
them: 0 is no predictor, 1 one that is always right. What it names is fetched while the layer before computes; the rest is \
fetched while its own layer waits.\n\nIt says something only of a model with routed experts in prefill or decode: training keeps \
all experts in device memory, and a dense model fetches none. Leave it out there. The share must be from 0 to 1.",
};

/// Whether a refusal says that the question itself is not understood: a name, a pin or a file of it that is not known or not
/// there. Otherwise the question stands, and the answer is no.
#[must_use]
pub fn not_understood(d: &Diagnostic) -> bool {
    let codes: [&Code; 8] = [
        &T0010,
        &T0046,
        &T0047,
        &T0056,
        &clusters::T1104,
        &tessera_cost::profile::T1105,
        &tessera_plan::search::T1200,
        &tessera_plan::search::recipe::T1229,
    ];
    codes.contains(&d.code)
}

/// A machine by the names or files of its cluster and profile, with enough racks for so many devices.
///
/// # Errors
/// T0046, T1101 and on.
pub fn machine(cluster: &str, profile: Option<&str>, devices: Option<u32>) -> Result<Machine, Diagnostics> {
    let mut found: Cluster = match file(cluster)? {
        Some(text) => Cluster::parse(cluster, &text)?,
        None => clusters::find(cluster).map_err(|d| vec![*d])?,
    };
    if let Some(n) = devices.filter(|n| *n > found.devices()) {
        let racks = n.div_ceil(found.devices_per_rack().max(1));
        found = found.with_racks(racks);
    }
    let profile = profile.unwrap_or(&found.profile).to_string();
    let profile = match file(&profile)? {
        Some(text) => Profile::parse(&profile, &text)?,
        None => Profile::find(&profile).map_err(|d| vec![*d])?,
    };
    Ok(Machine::new(found, profile))
}

/// Limits of the gates: the defaults, or those of a file.
///
/// # Errors
/// T0046, T1240.
pub fn thresholds(path: Option<&Path>) -> Result<Thresholds, Diagnostics> {
    match path {
        None => Ok(Thresholds::default()),
        Some(path) => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).map_err(|e| vec![unreadable(&name, &e)])?;
            Thresholds::parse(&name, &text)
        }
    }
}

/// Pins of a language model.
///
/// # Errors
/// T1200.
pub fn row_pins(text: &str) -> Result<Pins, Diagnostics> {
    Pins::parse(text)
}

/// The text of a file, where a name looks like one. Names of the catalogs may hold dots.
fn file(name: &str) -> Result<Option<String>, Diagnostics> {
    let path = Path::new(name);
    if !name.ends_with(".toml") && !path.is_file() {
        return Ok(None);
    }
    std::fs::read_to_string(path).map(Some).map_err(|e| vec![unreadable(name, &e)])
}

fn unreadable(name: &str, why: &std::io::Error) -> Diagnostic {
    Diagnostic::error(&T0046, format!("{name} cannot be read: {why}")).at(name.to_string(), "this file")
}
