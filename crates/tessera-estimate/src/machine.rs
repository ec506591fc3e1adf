//! Loads the machine and the gate limits of a planning query, from the catalogs or from files.

use std::path::Path;

use tessera::files::read_text_file;
use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::{MachineModel, Profile};
use tessera_mesh::{Cluster, catalog};
use tessera_plan::search::thresholds::Thresholds;

use crate::codes::T0046;
use crate::query_json::read_planned_machine;

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
    let mut found: Cluster = match read_if_file(cluster, catalog::get(cluster).is_some())? {
        Some(text) => Cluster::parse(cluster, &text)?,
        None => catalog::find_cluster(cluster).map_err(|d| vec![*d])?,
    };
    if let Some(n) = devices.filter(|n| *n > found.device_count()) {
        let racks = n.div_ceil(found.devices_per_rack().max(1));
        found = found.with_racks(racks);
    }
    let profile = profile.unwrap_or(&found.profile).to_string();
    let profile = match read_if_file(&profile, Profile::builtin(&profile).is_some())? {
        Some(text) => Profile::parse(&profile, &text)?,
        None => Profile::find_builtin(&profile).map_err(|d| vec![*d])?,
    };
    Ok(MachineModel::new(found, profile))
}

/// Returns the machine that the command line names, from the catalog or from files. Without a name,
/// returns the machine of the estimate in `folder`; without an estimate, a default for the number
/// of ranks: one host of eight devices, or racks of 72. The cluster gets as many racks as the ranks
/// need.
///
/// # Errors
/// T1104 or T1105 for a name that is in no catalog, T0046 or a parse error for a file.
pub fn resolve_machine(
    cluster: Option<&str>,
    profile: Option<&str>,
    folder: Option<&Path>,
    ranks: u32,
) -> Result<MachineModel, Diagnostics> {
    if let (None, None, Some(planned)) = (cluster, profile, folder.and_then(read_planned_machine)) {
        return planned;
    }
    let usual = if ranks <= 8 { "hgx-h200" } else { "gb200-nvl72" };
    load_machine(cluster.unwrap_or(usual), profile, Some(ranks))
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
            let text = read_text_file(path).map_err(|e| vec![unreadable_file(&name, &e)])?;
            Thresholds::parse(&name, &text)
        }
    }
}

/// Reads a file if `name` names one, and returns `None` for a catalog name, which may contain dots too. A file
/// in the current folder that has a name of the catalog is read only as `./name`, so that it cannot replace
/// what every other folder means by the name.
fn read_if_file(name: &str, is_in_catalog: bool) -> Result<Option<String>, Diagnostics> {
    let path = Path::new(name);
    let is_path = name.ends_with(".toml") || name.contains(std::path::MAIN_SEPARATOR);
    if !is_path && (is_in_catalog || !path.is_file()) {
        return Ok(None);
    }
    read_text_file(path).map(Some).map_err(|e| vec![unreadable_file(name, &e)])
}

fn unreadable_file(name: &str, why: &std::io::Error) -> Diagnostic {
    Diagnostic::error(&T0046, format!("{name} cannot be read: {why}"))
        .with_label(name.to_string(), "this file")
}
