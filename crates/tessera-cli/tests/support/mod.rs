//! The binary as tests run it, and what they read of it.

// Each test file uses its part.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for a process: it ends a wait for one that hangs, not one for a slow machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The project's folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The binary in the project's folder, not started, its output kept.
pub fn command(args: &[&str]) -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_tessera"));
    c.current_dir(root()).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    c
}

/// What became of it.
pub fn tessera(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

/// Bytes as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Both outputs as one text.
pub fn words(o: &Output) -> String {
    text(&o.stdout) + &text(&o.stderr)
}

/// The first value of a field in a JSON text.
pub fn field(json: &str, name: &str) -> String {
    let mark = format!("\"{name}\":");
    let rest = json.split(&mark).nth(1).unwrap_or_else(|| panic!("no {name} in {json}"));
    rest.split([',', '}']).next().unwrap().trim_matches('"').to_string()
}

/// Its exit status, and both outputs as one text.
pub fn ask(args: &[&str]) -> (Option<i32>, String) {
    let o = tessera(args);
    (o.status.code(), words(&o))
}

/// Sends a process a signal.
pub fn signal(pid: u32, name: &str) {
    assert!(Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap().success());
}

/// Waits for a process.
pub fn ended(mut child: Child) -> Output {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > PATIENCE {
            let _ = child.kill();
            panic!("it did not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}
