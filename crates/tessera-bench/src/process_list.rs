//! The processes of one run in the system's process list. A tag in the environment identifies them,
//! which also finds processes that lost their parent.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Environment variable whose value tags every process of one run. Children inherit it.
pub const RUN_TAG_VARIABLE: &str = "TESSERA_BENCH_RUN";

/// Polling interval of a wait for processes to end.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Returns a unique value of [`RUN_TAG_VARIABLE`].
pub fn new_run_tag() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{}-{}-{n}", std::process::id(), now.as_nanos())
}

/// A process with a permanent identity: the system reuses ids, but not an id with the same start
/// time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// Process id, which the system may reuse after the process ends.
    pub pid: u32,
    /// Start time in ticks since the system booted.
    pub started: u64,
}

impl Process {
    /// Returns the process that currently has this id, or `None` if no process has it.
    pub fn from_pid(pid: u32) -> Option<Process> {
        Some(Process { pid, started: ProcStat::read(pid)?.started })
    }

    /// Returns whether the process is alive. A zombie, which only waits for its parent, is not.
    pub fn is_alive(self) -> bool {
        ProcStat::read(self.pid).is_some_and(|s| s.started == self.started && !matches!(s.state, 'Z' | 'X'))
    }

    /// Sends a signal and returns whether the process was alive.
    pub fn send_signal(self, signal: Signal) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        self.is_alive() && pid.is_some_and(|p| kill_process(p, signal).is_ok())
    }
}

/// The fields of `/proc/PID/stat` that the benchmarks use.
struct ProcStat {
    state: char,
    parent: u32,
    threads: u64,
    started: u64,
    cpu_ticks: u64,
}

impl ProcStat {
    fn read(pid: u32) -> Option<ProcStat> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses and may contain any character. Fields are counted from the
        // state, which follows it.
        let rest: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
        let number = |i: usize| rest.get(i)?.trim().parse().ok();
        Some(ProcStat {
            state: rest.first()?.chars().next()?,
            parent: u32::try_from(number(1)?).ok()?,
            threads: number(17)?,
            started: number(19)?,
            cpu_ticks: number(11)? + number(12)?,
        })
    }
}

/// Returns every living process with this tag. A process has no tag for a moment while it executes
/// another program.
pub fn find_tagged(tag: &str) -> Vec<Process> {
    let entry = format!("{RUN_TAG_VARIABLE}={tag}");
    let Ok(list) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = list.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|b| *b == 0).any(|v| v == entry.as_bytes())
    })
    .filter_map(Process::from_pid)
    .filter(|p| p.is_alive())
    .collect()
}

/// Returns the ranks that a launcher started, by number. The number comes from the command line
/// (`rank 2`) or else from the start order, which is the order of ranks.
pub fn find_ranks(launcher: u32, tag: &str) -> BTreeMap<u32, Process> {
    let mut children: Vec<Process> = find_tagged(tag)
        .into_iter()
        .filter(|p| ProcStat::read(p.pid).is_some_and(|s| s.parent == launcher))
        .collect();
    children.sort_by_key(|p| (p.started, p.pid));
    children.iter().enumerate().map(|(i, p)| (rank_argument(p.pid).unwrap_or(i as u32), *p)).collect()
}

fn rank_argument(pid: u32) -> Option<u32> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<&str> = line.split(|b| *b == 0).filter_map(|w| std::str::from_utf8(w).ok()).collect();
    let at = words.iter().position(|w| *w == "rank")?;
    words.get(at + 1)?.parse().ok()
}

/// Waits until every known process has ended and no process with the tag is left. Returns the time
/// since `from` and the processes that are left, if any, at `limit`.
///
/// `collect` is called on every poll, so that the caller can reap its children.
pub fn wait_until_gone(
    tag: &str,
    known: &[Process],
    from: Instant,
    limit: Duration,
    mut collect: impl FnMut(),
) -> (Duration, Vec<Process>) {
    loop {
        collect();
        let known_left = known.iter().any(|p| p.is_alive());
        let at = from.elapsed();
        // The whole list is long, so it is read only if it can end the wait.
        if !known_left || at > limit {
            let mut left = find_tagged(tag);
            left.extend(known.iter().filter(|p| p.is_alive()));
            left.sort();
            left.dedup();
            if left.is_empty() || at > limit {
                return (at, left);
            }
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Resources that a process uses at one time.
#[derive(Debug, Clone, Copy, Default)]
pub struct ProcessUsage {
    /// Resident memory, own and shared, in KiB.
    pub rss_kib: u64,
    /// Peak resident memory so far, in KiB.
    pub peak_kib: u64,
    /// Number of open file descriptors, from `/proc/PID/fd`.
    pub descriptors: u64,
    /// Number of threads, from `/proc/PID/stat`.
    pub threads: u64,
    /// CPU time so far, in seconds.
    pub cpu_s: f64,
}

impl ProcessUsage {
    /// Reads the current values, or returns `None` if the process has ended.
    pub fn read(p: Process) -> Option<ProcessUsage> {
        let pid = p.pid;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let kib = |key: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(key))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let stat = ProcStat::read(pid)?;
        Some(ProcessUsage {
            rss_kib: kib("VmRSS:")?,
            peak_kib: kib("VmHWM:")?,
            descriptors: fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64,
            threads: stat.threads,
            cpu_s: stat.cpu_ticks as f64 / rustix::param::clock_ticks_per_second() as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn wait_until(seen: impl Fn() -> bool) {
        let since = Instant::now();
        while !seen() {
            assert!(since.elapsed() < Duration::from_secs(20), "the processes did not start");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    #[test]
    fn a_process_without_its_parent_is_found_and_waited_for() {
        let nonce = new_run_tag();
        // The shell exits at once, which makes its child an orphan.
        let script = "sleep 30 >/dev/null 2>&1 & echo $!";
        let shell =
            Command::new("sh").args(["-c", script]).env(RUN_TAG_VARIABLE, &nonce).output().expect("a shell");
        let pid: u32 = String::from_utf8_lossy(&shell.stdout).trim().parse().expect("a process id");
        let orphan = Process::from_pid(pid).expect("it lives");
        // The shell may exit before its child runs `sleep`.
        wait_until(|| find_tagged(&nonce) == [orphan]);
        assert!(find_tagged("another").is_empty());
        let held = ProcessUsage::read(orphan).expect("it lives");
        assert!(held.rss_kib > 0 && held.peak_kib >= held.rss_kib && held.threads == 1, "{held:?}");
        let limit = Duration::from_millis(30);
        let (_, left) = wait_until_gone(&nonce, &[], Instant::now(), limit, || {});
        assert_eq!(left, [orphan], "the orphan was not found by its tag");
        assert!(orphan.send_signal(Signal::KILL));
        let (took, left) = wait_until_gone(&nonce, &[orphan], Instant::now(), Duration::from_secs(20), || {});
        assert!(left.is_empty(), "{left:?} after {took:?}");
        assert!(!orphan.send_signal(Signal::KILL));
    }

    #[test]
    fn ranks_are_the_launchers_own_children_in_order() {
        let nonce = new_run_tag();
        let script = "sleep 30 & sleep 31 & wait";
        let mut launcher = Command::new("sh")
            .args(["-c", script])
            .env(RUN_TAG_VARIABLE, &nonce)
            .stdout(Stdio::null())
            .spawn()
            .expect("a shell");
        wait_until(|| find_ranks(launcher.id(), &nonce).len() == 2);
        let both = find_ranks(launcher.id(), &nonce);
        assert!(both.keys().eq(&[0, 1]) && both[&0] < both[&1], "{both:?}");
        launcher.kill().expect("it lives");
        launcher.wait().expect("it ended");
        for p in find_tagged(&nonce) {
            p.send_signal(Signal::KILL);
        }
    }
}
