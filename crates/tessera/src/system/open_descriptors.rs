//! The path by which a process opens a descriptor that it inherited.

/// Returns the path. The system opens the pipe or file behind the number once more.
#[cfg(target_os = "linux")]
pub(crate) fn descriptor_path(number: u32) -> String {
    format!("/proc/self/fd/{number}")
}

/// Returns the path. macOS duplicates the descriptor, so both share one position in a file.
#[cfg(target_os = "macos")]
pub(crate) fn descriptor_path(number: u32) -> String {
    format!("/dev/fd/{number}")
}
