//! The processes of one run as the system shows them: found by a mark in their environment, so that one which lost
//! its parent is found as well.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Variable whose value marks every process of one run; children inherit it.
pub const MARK: &str = "TESSERA_BENCH_RUN";

/// How often processes are looked at while somebody waits for their end.
const LOOK: Duration = Duration::from_millis(1);

/// A value of [`MARK`] that no other run has.
pub fn nonce() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{}-{}-{n}", std::process::id(), now.as_nanos())
}

/// A process by what names it for good: ids are given again, an id with its start is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// When it started, in ticks since the system did.
    pub started: u64,
}

impl Process {
    /// The process that has this id now.
    pub fn of(pid: u32) -> Option<Process> {
        Some(Process { pid, started: Stat::read(pid)?.started })
    }

    /// Whether it runs or could: a process that only waits to be collected by its parent is gone.
    pub fn lives(self) -> bool {
        Stat::read(self.pid).is_some_and(|s| s.started == self.started && !matches!(s.state, 'Z' | 'X'))
    }

    /// Sends a signal; false if it is gone.
    pub fn signal(self, signal: Signal) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        self.lives() && pid.is_some_and(|p| kill_process(p, signal).is_ok())
    }
}

/// What `/proc/PID/stat` holds, as far as anybody here asks.
struct Stat {
    state: char,
    parent: u32,
    threads: u64,
    started: u64,
    cpu_ticks: u64,
}

impl Stat {
    fn read(pid: u32) -> Option<Stat> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses and may hold anything; fields are counted from the state, which follows.
        let rest: Vec<&str> = text.rsplit_once(") ")?.1.split(' ').collect();
        let number = |i: usize| rest.get(i)?.trim().parse().ok();
        Some(Stat {
            state: rest.first()?.chars().next()?,
            parent: u32::try_from(number(1)?).ok()?,
            threads: number(17)?,
            started: number(19)?,
            cpu_ticks: number(11)? + number(12)?,
        })
    }
}

/// Every living process with this mark. One that just becomes another program has none for that moment.
pub fn marked(nonce: &str) -> Vec<Process> {
    let entry = format!("{MARK}={nonce}");
    let Ok(list) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = list.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|b| *b == 0).any(|v| v == entry.as_bytes())
    })
    .filter_map(Process::of)
    .filter(|p| p.lives())
    .collect()
}

/// The ranks that a launcher started, by number: as their command line tells it (`rank 2`), else in the order in
/// which they were started, which is that of ranks.
pub fn ranks(launcher: u32, nonce: &str) -> BTreeMap<u32, Process> {
    let mut children: Vec<Process> = marked(nonce)
        .into_iter()
        .filter(|p| Stat::read(p.pid).is_some_and(|s| s.parent == launcher))
        .collect();
    children.sort_by_key(|p| (p.started, p.pid));
    children.iter().enumerate().map(|(i, p)| (told_rank(p.pid).unwrap_or(i as u32), *p)).collect()
}

fn told_rank(pid: u32) -> Option<u32> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<&str> = line.split(|b| *b == 0).filter_map(|w| std::str::from_utf8(w).ok()).collect();
    let at = words.iter().position(|w| *w == "rank")?;
    words.get(at + 1)?.parse().ok()
}

/// Waits until every one of these is gone and nobody with the mark is left. The time since `from` and nobody, or
/// whoever is left at `limit`.
///
/// `collect` is called in between, for whoever must collect a child.
pub fn until_gone(
    nonce: &str,
    known: &[Process],
    from: Instant,
    limit: Duration,
    mut collect: impl FnMut(),
) -> (Duration, Vec<Process>) {
    loop {
        collect();
        let known_left = known.iter().any(|p| p.lives());
        let at = from.elapsed();
        // The whole list is long and read only when it can decide something.
        if !known_left || at > limit {
            let mut left = marked(nonce);
            left.extend(known.iter().filter(|p| p.lives()));
            left.sort();
            left.dedup();
            if left.is_empty() || at > limit {
                return (at, left);
            }
        }
        std::thread::sleep(LOOK);
    }
}

/// What a process holds at one instant.
#[derive(Debug, Clone, Copy, Default)]
pub struct Held {
    /// Resident memory of its own and shared, in KiB.
    pub rss_kib: u64,
    /// Most resident memory so far, in KiB.
    pub peak_kib: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// Threads.
    pub threads: u64,
    /// Time on cores so far, in seconds.
    pub cpu_s: f64,
}

impl Held {
    /// Now; none if it is gone.
    pub fn of(p: Process) -> Option<Held> {
        let pid = p.pid;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let kib = |key: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(key))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let stat = Stat::read(pid)?;
        Some(Held {
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

    fn until(seen: impl Fn() -> bool) {
        let since = Instant::now();
        while !seen() {
            assert!(since.elapsed() < Duration::from_secs(20), "they were not started");
            std::thread::sleep(LOOK);
        }
    }

    #[test]
    fn a_process_without_its_parent_is_found_and_waited_for() {
        let nonce = nonce();
        // The shell ends at once and leaves its child to whoever takes orphans.
        let script = "sleep 30 >/dev/null 2>&1 & echo $!";
        let shell = Command::new("sh").args(["-c", script]).env(MARK, &nonce).output().expect("a shell");
        let pid: u32 = String::from_utf8_lossy(&shell.stdout).trim().parse().expect("a process id");
        let orphan = Process::of(pid).expect("it lives");
        // The shell may be gone before its child is `sleep`.
        until(|| marked(&nonce) == [orphan]);
        assert!(marked("another").is_empty());
        let held = Held::of(orphan).expect("it lives");
        assert!(held.rss_kib > 0 && held.peak_kib >= held.rss_kib && held.threads == 1, "{held:?}");
        let limit = Duration::from_millis(30);
        let (_, left) = until_gone(&nonce, &[], Instant::now(), limit, || {});
        assert_eq!(left, [orphan], "nobody had told of it");
        assert!(orphan.signal(Signal::KILL));
        let (took, left) = until_gone(&nonce, &[orphan], Instant::now(), Duration::from_secs(20), || {});
        assert!(left.is_empty(), "{left:?} after {took:?}");
        assert!(!orphan.signal(Signal::KILL));
    }

    #[test]
    fn ranks_are_the_launchers_own_children_in_order() {
        let nonce = nonce();
        let script = "sleep 30 & sleep 31 & wait";
        let mut launcher = Command::new("sh")
            .args(["-c", script])
            .env(MARK, &nonce)
            .stdout(Stdio::null())
            .spawn()
            .expect("a shell");
        until(|| ranks(launcher.id(), &nonce).len() == 2);
        let both = ranks(launcher.id(), &nonce);
        assert!(both.keys().eq(&[0, 1]) && both[&0] < both[&1], "{both:?}");
        launcher.kill().expect("it lives");
        launcher.wait().expect("it ended");
        for p in marked(&nonce) {
            p.signal(Signal::KILL);
        }
    }
}
