//! Runs the binary for the tests and reads its output.

// Each test file uses only some of these functions.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Maximum wait for a process. The limit ends a wait for a hanging process, so it is generous for
/// slow machines.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Returns the root folder of the repository.
pub fn repo_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns a command for the binary in the repository root, not yet started, with piped output.
pub fn tessera_command(args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_tessera"));
    c.current_dir(repo_root()).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    c
}

/// Runs the binary and returns its output.
pub fn run_tessera(args: &[&str]) -> Output {
    tessera_command(args).output().unwrap()
}

/// Converts bytes to text.
pub fn to_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns standard output and standard error as one text.
pub fn both_outputs(o: &Output) -> String {
    to_text(&o.stdout) + &to_text(&o.stderr)
}

/// Returns the first value of a field in a JSON text.
pub fn json_field(json: &str, name: &str) -> String {
    let mark = format!("\"{name}\":");
    let rest = json.split(&mark).nth(1).unwrap_or_else(|| panic!("no {name} in {json}"));
    rest.split([',', '}']).next().unwrap().trim_matches('"').to_string()
}

/// Runs the binary and returns its exit status and both outputs as one text.
pub fn run_for_text(args: &[&str]) -> (Option<i32>, String) {
    let o = run_tessera(args);
    (o.status.code(), both_outputs(&o))
}

/// Checks that the binary ends with a status and that its outputs contain all of these words.
#[track_caller]
pub fn assert_ends_with(args: &[&str], status: i32, words: &[&str]) {
    let output = run_tessera(args);
    let text = both_outputs(&output);
    assert_eq!(output.status.code(), Some(status), "{text}");
    for w in words {
        assert!(text.contains(w), "no `{w}` in:\n{text}");
    }
}

/// Sends a signal to a process.
pub fn send_signal(pid: u32, name: &str) {
    assert!(Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap().success());
}

/// Waits for a process and returns its output. Panics after [`TIMEOUT`].
pub fn wait_for_end(mut child: Child) -> Output {
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > TIMEOUT {
            let _ = child.kill();
            panic!("it did not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}
