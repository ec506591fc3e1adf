//! The identity of this host: its name and its boot. Processes with one identity share memory.

use std::hash::Hasher as _;

use crate::system;

/// Returns the name of this host and the first digits of the id of its boot, such as `node01, boot
/// 3f2a91bc`. The processes of a host share it until the next boot. Two containers on one machine with
/// two host names have two, because their processes share no memory.
pub(crate) fn host_identity() -> String {
    let boot = text_or_unknown(system::boot_id());
    format!("{}, boot {}", text_or_unknown(system::host_name()), boot.get(..8).unwrap_or(&boot))
}

/// Returns a number that stands for the identity of this host; 0 if the boot id cannot be read.
pub(crate) fn host_number() -> u64 {
    let Some(boot) = system::boot_id() else { return 0 };
    let mut hash = std::hash::DefaultHasher::new();
    hash.write(boot.as_bytes());
    hash.write(host_name().as_bytes());
    hash.finish().max(1)
}

/// Returns the name of this host; empty if it cannot be read.
#[must_use]
pub fn host_name() -> String {
    system::host_name().unwrap_or_default()
}

/// Returns a fact about this host, or `unknown`.
pub(crate) fn text_or_unknown(fact: Option<String>) -> String {
    fact.unwrap_or_else(|| "unknown".to_string())
}
