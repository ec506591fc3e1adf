//! Saves a result together with facts about the machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};

/// Folder of saved results, relative to the workspace root.
pub const RUNS_DIR: &str = "bench/runs";
/// Maximum number of results of one benchmark per day. More indicate a mistake.
const MAX_RUNS_PER_DAY: u32 = 1000;

/// Writes `bench/runs/DATE-NAME-N/result.json` and returns the folder.
pub fn save_result(name: &str, numbers: &serde_json::Value) -> anyhow::Result<PathBuf> {
    if !Path::new("Cargo.lock").is_file() {
        bail!("--save: run the benchmark from the workspace root, which contains {RUNS_DIR}");
    }
    let days = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86_400;
    std::fs::create_dir_all(RUNS_DIR).with_context(|| format!("cannot create {RUNS_DIR}"))?;
    for n in 1..=MAX_RUNS_PER_DAY {
        let folder = Path::new(RUNS_DIR).join(format!("{}-{name}-{n}", format_date(days)));
        match std::fs::create_dir(&folder) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => continue,
            made => made.with_context(|| format!("cannot create {}", folder.display()))?,
        }
        let all = serde_json::json!({"host": host_facts(), "command": command_line(), "result": numbers});
        let text = serde_json::to_string_pretty(&all)? + "\n";
        std::fs::write(folder.join("result.json"), text)?;
        return Ok(folder);
    }
    bail!("{RUNS_DIR} already contains {MAX_RUNS_PER_DAY} results of {name} from today")
}

/// Returns the command line without the program's path.
fn command_line() -> Vec<String> {
    std::env::args().skip(1).collect()
}

fn host_facts() -> serde_json::Value {
    let read = |p: &str| std::fs::read_to_string(p).unwrap_or_default();
    let after = |text: &str, key: &str| {
        let line = text.lines().find(|l| l.starts_with(key)).unwrap_or_default();
        line.split_once(':').map_or(String::new(), |(_, v)| v.trim().to_string())
    };
    serde_json::json!({
        "cpu": after(&read("/proc/cpuinfo"), "model name"),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory": after(&read("/proc/meminfo"), "MemTotal"),
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
        "load": read("/proc/loadavg").split(' ').next(),
        "commit": git_output(&["rev-parse", "HEAD"]),
        "changed": git_output(&["status", "--porcelain", "--untracked-files=no"]).map(|s| !s.is_empty()),
        "optimised": !cfg!(debug_assertions),
        "rustc": command_output("rustc", &["--version"]),
    })
}

fn git_output(args: &[&str]) -> Option<String> {
    command_output("git", args)
}

fn command_output(program: &str, args: &[&str]) -> Option<String> {
    let o = Command::new(program).args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&o.stdout).trim().to_string())
}

/// Formats days since 1970 as a date such as `2026-11-20`.
fn format_date(days: u64) -> String {
    tessera::clock::format_utc(days * 86_400).chars().take_while(|c| *c != 'T').collect()
}

#[cfg(test)]
mod tests {
    use super::format_date;

    #[test]
    fn days_read_as_dates() {
        assert_eq!(
            [format_date(0), format_date(11_016), format_date(20_778)],
            ["1970-01-01", "2000-02-29", "2026-11-21"]
        );
    }
}
