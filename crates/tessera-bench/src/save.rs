//! A result kept with what it was measured on.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};

/// Where results are kept, from the root of the project.
const RUNS: &str = "bench/runs";
/// More results of one kind on one day are taken for a slip.
const RUNS_A_DAY: u32 = 1000;

/// Writes `bench/runs/DATE-NAME-N/result.json`; the folder.
pub fn save(name: &str, numbers: &serde_json::Value) -> anyhow::Result<PathBuf> {
    if !Path::new("Cargo.lock").is_file() {
        bail!("--save: run it from the root of the project, where {RUNS} is");
    }
    let days = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86_400;
    std::fs::create_dir_all(RUNS).with_context(|| format!("{RUNS} cannot be made"))?;
    for n in 1..=RUNS_A_DAY {
        let folder = Path::new(RUNS).join(format!("{}-{name}-{n}", date(days)));
        match std::fs::create_dir(&folder) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => continue,
            made => made.with_context(|| format!("{} cannot be made", folder.display()))?,
        }
        let all = serde_json::json!({"host": host(), "command": command(), "result": numbers});
        let text = serde_json::to_string_pretty(&all)? + "\n";
        std::fs::write(folder.join("result.json"), text)?;
        return Ok(folder);
    }
    bail!("{RUNS} holds {RUNS_A_DAY} results of {name} of today")
}

/// The command without its path.
fn command() -> Vec<String> {
    std::env::args().skip(1).collect()
}

fn host() -> serde_json::Value {
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
        "commit": git(&["rev-parse", "HEAD"]),
        "changed": git(&["status", "--porcelain", "--untracked-files=no"]).map(|s| !s.is_empty()),
        "optimised": !cfg!(debug_assertions),
        "rustc": text_of("rustc", &["--version"]),
    })
}

fn git(args: &[&str]) -> Option<String> {
    text_of("git", args)
}

fn text_of(program: &str, args: &[&str]) -> Option<String> {
    let o = Command::new(program).args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&o.stdout).trim().to_string())
}

/// `2026-11-20` from days since 1970.
fn date(days: u64) -> String {
    tessera::stream::utc(days * 86_400).chars().take_while(|c| *c != 'T').collect()
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn days_read_as_dates() {
        assert_eq!([date(0), date(11_016), date(20_778)], ["1970-01-01", "2000-02-29", "2026-11-21"]);
    }
}
