//! The address at which rank 0 listens: what the user set, or what the launcher states.

use tessera_base::Diagnostic;

use super::variables::Variables;
use super::{Launcher, ProcessPlace};
use crate::codes::T0034;

/// Port of rank 0 if neither the launcher nor the user states one: the default of torchrun.
pub const DEFAULT_PORT: u16 = 29_500;

/// Returns the host and the port of rank 0. MASTER_ADDR and MASTER_PORT count before what the
/// launcher states, because only a user sets them where the launcher does not.
pub(super) fn find_leader(
    launcher: Launcher,
    place: Option<&ProcessPlace>,
    leader_port: Option<u16>,
    variables: &mut Variables<'_>,
) -> Option<(String, u16)> {
    let must_be_set = matches!(launcher, Launcher::Torchrun | Launcher::Script);
    let host = variables.text("MASTER_ADDR").or_else(|| find_host(place?).filter(|_| !must_be_set));
    let stated_port = variables.text("MASTER_PORT").is_some();
    let port = match variables.number("MASTER_PORT", u32::from(u16::MAX)) {
        Some(port) if place.is_some_and(|p| p.port_is_taken) => Some(beside(port)),
        Some(port) => u16::try_from(port).ok(),
        None => (!stated_port && !must_be_set).then_some(DEFAULT_PORT),
    };
    let port = leader_port.or(port);
    let missing: Vec<&str> =
        [("MASTER_ADDR", host.is_none()), ("MASTER_PORT", port.is_none() && !stated_port)]
            .into_iter()
            .filter_map(|(name, missing)| missing.then_some(name))
            .collect();
    if !missing.is_empty() {
        let known = match launcher {
            Launcher::Torchrun | Launcher::Script => "RANK and WORLD_SIZE are set".to_string(),
            other => format!("{} does not state the host of rank 0", other.name()),
        };
        let are_not = if missing.len() > 1 { "are not set" } else { "is not set" };
        variables.reject(
            Diagnostic::error(&T0034, format!("{known}, and {} {are_not}", missing.join(" and "))).with_hint(
                "set MASTER_ADDR to the host name or address of the first process, the same on every \
                 process, and MASTER_PORT to a free port there; unset all of them to start all ranks on \
                 this host",
            ),
        );
    }
    host.zip(port)
}

/// Returns the host that the launcher states. Processes of one host meet at its loopback address,
/// which opens no port to other hosts.
fn find_host(place: &ProcessPlace) -> Option<String> {
    let one_host = place.host.is_some_and(|(_, hosts)| hosts == 1)
        || place.local_processes.is_some_and(|locals| locals == place.processes);
    if one_host { Some("127.0.0.1".to_string()) } else { place.leader_host.clone() }
}

/// Returns the port beside one where the launcher itself listens.
fn beside(port: u32) -> u16 {
    let next = port.checked_add(1).and_then(|next| u16::try_from(next).ok());
    next.unwrap_or(u16::MAX - 1)
}
