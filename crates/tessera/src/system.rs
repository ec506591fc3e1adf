//! What a run reads from the operating system, one file for each need. A file states what its functions return, and has an
//! implementation for Linux and one for macOS. Those for macOS compile and were never run.

mod host_facts;
mod host_memory_use;
mod object_file;
mod open_descriptors;
mod processes;

pub use host_facts::{
    allowed_cores, boot_id, cpu_model, default_network_device, host_name, kernel_release, load_average,
};
pub use host_memory_use::{available_bytes, resident_bytes, usable_bytes};
pub(crate) use object_file::open_object_file;
pub(crate) use open_descriptors::descriptor_path;
pub use processes::{ProcessState, read_process};

/// Runs a program of macOS that prints a fact, and returns its trimmed output. `None` if it fails or prints nothing. The
/// library functions behind these programs need `unsafe`.
#[cfg(any(target_os = "macos", test))]
fn run_program(path: &str, arguments: &[&str]) -> Option<String> {
    use std::process::{Command, Stdio};
    // The output depends on the language and the time zone of the user otherwise.
    let mut command = Command::new(path);
    command.args(arguments).env("LC_ALL", "C").env("TZ", "UTC").stdin(Stdio::null()).stderr(Stdio::null());
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_string();
    (!text.is_empty()).then_some(text)
}
