//! The identity of this host: its name and its boot. Processes with one identity share memory.

use std::hash::Hasher as _;

/// Returns the name of this host and the first digits of the id of its boot, such as `node01, boot
/// 3f2a91bc`. The processes of a host share it until the next boot. Two containers on one machine with
/// two host names have two, because their processes share no memory.
pub(crate) fn host_identity() -> String {
    let boot = read_line_or_unknown(BOOT_ID);
    format!("{}, boot {}", read_line_or_unknown(HOST_NAME), boot.get(..8).unwrap_or(&boot))
}

/// Returns a number that stands for the identity of this host; 0 if the boot id cannot be read.
pub(crate) fn host_number() -> u64 {
    let read = |path: &str| std::fs::read(path).ok();
    let Some(boot) = read(BOOT_ID) else { return 0 };
    let name = read(HOST_NAME).unwrap_or_default();
    let mut hash = std::hash::DefaultHasher::new();
    hash.write(&boot);
    hash.write(&name);
    hash.finish().max(1)
}

/// Returns the name of this host; empty if it cannot be read.
#[must_use]
pub fn host_name() -> String {
    read_line(HOST_NAME).unwrap_or_default()
}

/// Returns the trimmed contents of a file of one line, such as those below /proc; `unknown` if it cannot be
/// read.
pub(crate) fn read_line_or_unknown(path: &str) -> String {
    read_line(path).unwrap_or_else(|| "unknown".to_string())
}

fn read_line(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_string())
}

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
