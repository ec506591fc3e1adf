//! Flight records as files: each rank's own while it runs, all of them when somebody asks what happened.
//!
//! A line is one `pwrite` at its own place, so threads need no lock, a kill loses nothing that was written, and a disk
//! that takes no more costs the record and never the run.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use tessera_mesh::Rank;
use tessera_report::autopsy::{ProcessEnd, Vitals};
use tessera_report::flight::{Entry, Flight, HEADER_BYTES, Header, LINES, Mark, SCHEMA, offset, to_bytes};
use tessera_runtime::driver::RankExit;
use tessera_runtime::flight::{self, Sink};
use tessera_verify::SealedPlan;

/// Folder of the records in a run's folder.
pub(crate) const FLIGHT: &str = "flight";
/// How the processes ended, as their launcher saw it: one JSON object a line.
pub(crate) const EXITS: &str = "exits.jsonl";

/// The record of one rank.
#[derive(Debug)]
pub(crate) struct FlightRecord {
    file: File,
    path: PathBuf,
    rank: u32,
    next: AtomicU64,
    off: AtomicBool,
}

impl FlightRecord {
    /// Makes a rank's record in a run's folder. Without one the run goes on, and the reason is told once.
    pub(crate) fn open(out: &Path, session: u64, plan: &SealedPlan, rank: Rank) -> Option<FlightRecord> {
        let path = out.join(FLIGHT).join(format!("rank-{}.jsonl", rank.0));
        let header = header(session, plan, rank);
        let made = std::fs::create_dir_all(out.join(FLIGHT)).and_then(|()| {
            put_aside(&path, &header.session)?;
            let file = OpenOptions::new().create(true).write(true).truncate(true).open(&path)?;
            file.write_all_at(&header.to_bytes(), 0)?;
            Ok(file)
        });
        match made {
            Ok(file) => {
                let (next, off) = (AtomicU64::new(0), AtomicBool::new(false));
                Some(FlightRecord { file, path, rank: rank.0, next, off })
            }
            Err(e) => {
                eprintln!("tessera rank {rank}: no flight record: {}: {e}", path.display());
                None
            }
        }
    }

    /// Writes a new line and gives its number, for [`FlightRecord::again`].
    pub(crate) fn write(&self, at_ns: u64, entry: &Entry) -> u64 {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        self.put(n, at_ns, entry);
        n
    }

    /// Writes a line once more, unless the ring has moved on over it.
    pub(crate) fn again(&self, n: u64, at_ns: u64, entry: &Entry) {
        if self.next.load(Ordering::Relaxed) - n < LINES {
            self.put(n, at_ns, entry);
        }
    }

    fn put(&self, n: u64, at_ns: u64, entry: &Entry) {
        if self.off.load(Ordering::Relaxed) {
            return;
        }
        let failed = self.file.write_all_at(&to_bytes(n, at_ns, entry), offset(n)).err();
        if let Some(e) = failed.filter(|_| !self.off.swap(true, Ordering::Relaxed)) {
            let path = self.path.display();
            eprintln!("tessera rank {}: the flight record stops here: {path}: {e}", self.rank);
        }
    }
}

impl Sink for FlightRecord {
    fn mark(&self, mark: flight::Mark<'_>) {
        self.write(now_ns(), &Entry::Mark(words(mark)));
    }
}

/// Renames a record of another session to `rank-N.<session>.jsonl`: a rank that starts again must not take with it
/// what the one before it left to tell.
fn put_aside(path: &Path, session: &str) -> std::io::Result<()> {
    match std::fs::metadata(path) {
        Ok(m) if m.is_file() => {}
        Ok(_) => return Ok(()),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    }
    let mut head = Vec::new();
    File::open(path)?.take(HEADER_BYTES as u64).read_to_end(&mut head)?;
    if head.is_empty() {
        return Ok(());
    }
    let theirs = Flight::parse("", &head).map(|f| f.header.session).ok();
    let is_id = |s: &String| (1..=16).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_hexdigit());
    match theirs {
        Some(same) if same == session => Ok(()),
        theirs => {
            let name = theirs.filter(is_id).unwrap_or_else(|| "damaged".to_string());
            std::fs::rename(path, path.with_extension(format!("{name}.jsonl")))
        }
    }
}

/// Nanoseconds on the monotonic clock, which all processes of a host share.
pub(crate) fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}

/// A mark in the record's words.
fn words(mark: flight::Mark<'_>) -> Mark {
    let named = |name: &str, call| Mark { mark: name.to_string(), call, ..Mark::default() };
    match mark {
        flight::Mark::Joined => named("joined", None),
        flight::Mark::Hello => named("hello", None),
        flight::Mark::Called { call_id, chunk, epoch } => {
            Mark { text: Some(format!("chunk {chunk}, epoch {epoch}")), ..named("called", Some(call_id)) }
        }
        flight::Mark::Ready { call_id } => named("ready", Some(call_id)),
        flight::Mark::Commit { call_id } => named("commit", Some(call_id)),
        flight::Mark::Done { call_id } => named("done", Some(call_id)),
        flight::Mark::Failed { class, rank, code, text, echo } => Mark {
            about: rank,
            code: Some(code.to_string()),
            class: Some(class.words().to_string()),
            echo,
            text: Some(text.to_string()),
            ..named("failed", None)
        },
        flight::Mark::Exit { status } => Mark { status: Some(status), ..named("exit", None) },
    }
}

fn header(session: u64, plan: &SealedPlan, rank: Rank) -> Header {
    let role = plan.role_of(rank).and_then(|at| plan.roles().get(at));
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    let pid = std::process::id();
    Header {
        schema: SCHEMA,
        kind: "flight".to_string(),
        rank: rank.0,
        world: plan.mesh().ranks(),
        session: format!("{session:016x}"),
        plan: plan.digest_hex(),
        mesh: plan.mesh().to_string(),
        role: role.map_or(String::new(), |r| r.role.clone()),
        pid,
        started: process(pid).map_or(0, |p| p.started),
        host: host(),
        mono_ns: now_ns(),
        wall_ns: u64::try_from(wall).unwrap_or(u64::MAX),
        tessera: env!("CARGO_PKG_VERSION").to_string(),
    }
}

/// Name of this host.
pub(crate) fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_string()
}

/// What the system says of a process.
struct Process {
    state: char,
    /// Ticks since the host started: tells it from a later process of the same number.
    started: u64,
}

fn process(pid: u32) -> Option<Process> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name stands in parentheses and may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    let started = fields.nth(18)?.parse().ok()?;
    Some(Process { state, started })
}

/// How the process that wrote a header is now; nothing where that cannot be known from this host.
pub(crate) fn vitals(header: &Header) -> Option<Vitals> {
    if header.host != host() {
        return None;
    }
    Some(match process(header.pid).filter(|p| p.started == header.started) {
        None => Vitals::Gone,
        Some(Process { state: 'T' | 't', .. }) => Vitals::Stopped,
        Some(Process { state: 'Z' | 'X', .. }) => Vitals::Gone,
        Some(_) => Vitals::Alive,
    })
}

/// Writes down how the processes of a run ended. Only an autopsy reads it, so a disk that takes none is no failure.
pub(crate) fn write_exits(out: &Path, exits: &[RankExit]) {
    let line = |e: &RankExit| {
        let end = ProcessEnd { rank: e.rank, status: e.status, signal: e.signal };
        serde_json::to_string(&end).unwrap_or_default() + "\n"
    };
    let text: String = exits.iter().map(line).collect();
    let _ = std::fs::write(out.join(FLIGHT).join(EXITS), text);
}

/// Largest flight record that is read; a longer file is none.
pub(crate) const MAX_FILE_BYTES: u64 = offset(LINES - 1) + 2 * HEADER_BYTES as u64;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use tessera_report::flight::Collective;

    use super::*;

    fn record(dir: &Path) -> FlightRecord {
        let path = dir.join("rank-0.jsonl");
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(&path).unwrap();
        let header = Header { schema: SCHEMA, kind: "flight".into(), host: host(), ..Header::default() };
        file.write_all_at(&header.to_bytes(), 0).unwrap();
        FlightRecord { file, path, rank: 0, next: AtomicU64::new(0), off: AtomicBool::new(false) }
    }

    #[test]
    fn two_threads_write_and_every_line_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let record = Arc::new(record(dir.path()));
        let other = Arc::clone(&record);
        let marks = std::thread::spawn(move || {
            for call_id in 0..3000 {
                other.mark(flight::Mark::Ready { call_id });
            }
        });
        for pos in 0..3000 {
            let entry =
                Entry::Collective(Collective { pos, op: "all_reduce".into(), ..Collective::default() });
            let n = record.write(now_ns(), &entry);
            record.again(n, now_ns(), &entry);
        }
        marks.join().unwrap();
        let flight = Flight::parse("f", &std::fs::read(&record.path).unwrap()).unwrap();
        assert_eq!((flight.lines.len() as u64, flight.torn), (LINES, 0));
        assert_eq!(flight.lost, 6000 - LINES);
        // A line that the ring has moved over is not written again.
        record.again(0, 0, &Entry::Mark(Mark { mark: "late".into(), ..Mark::default() }));
        let flight = Flight::parse("f", &std::fs::read(&record.path).unwrap()).unwrap();
        assert!(flight.lines.iter().all(|l| l.n >= 6000 - LINES));
    }

    /// Bar: a collective is three writes, and a chunk of the demo 80 collectives in some 200 ms. 1 % of that is 8 µs a
    /// write. Unoptimised builds have the room that they need.
    #[test]
    fn a_line_costs_microseconds() {
        let dir = tempfile::tempdir().unwrap();
        let record = record(dir.path());
        let mut entry = Collective { op: "all_to_all".into(), group: "tp".into(), ..Collective::default() };
        entry.ty = "f32[2160, 5120]".into();
        // What this thread computed, whatever else the machine does.
        let cpu = || {
            let t = clock_gettime(ClockId::ThreadCPUTime);
            t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
        };
        let begun = cpu();
        const WRITES: u32 = 20_000;
        for pos in 0..WRITES {
            entry.pos = pos;
            record.write(now_ns(), &Entry::Collective(entry.clone()));
        }
        let each_ns = (cpu() - begun) / u64::from(WRITES);
        assert!(each_ns < 20_000, "{each_ns} ns a line");
        println!("{each_ns} ns a line");
    }

    #[test]
    fn a_restart_puts_the_record_of_the_crash_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank-1.jsonl");
        let kept = |name: &str| std::fs::read(dir.path().join(name)).ok();
        let whole = |session: &str| {
            let header = Header {
                schema: SCHEMA,
                kind: "flight".into(),
                session: session.into(),
                ..Header::default()
            };
            let mark = Entry::Mark(Mark { mark: "joined".into(), ..Mark::default() });
            [header.to_bytes(), to_bytes(0, 1, &mark)].concat()
        };
        // Nothing there, an empty file, and the same session again are no evidence of another.
        put_aside(&path, "ab").unwrap();
        for same in [Vec::new(), whole("ab")] {
            std::fs::write(&path, &same).unwrap();
            put_aside(&path, "ab").unwrap();
            assert_eq!(kept("rank-1.jsonl"), Some(same));
        }
        put_aside(&path, "cd").unwrap();
        assert_eq!((kept("rank-1.jsonl"), kept("rank-1.ab.jsonl")), (None, Some(whole("ab"))));
        // What cannot be read, and what is no id, leaves no name of its own choice.
        for odd in [b"not a header\n".to_vec(), whole("../../x")] {
            std::fs::write(&path, &odd).unwrap();
            put_aside(&path, "cd").unwrap();
            assert_eq!(kept("rank-1.damaged.jsonl"), Some(odd));
        }
        assert_eq!(kept("rank-1.ab.jsonl"), Some(whole("ab")));
    }

    #[test]
    fn a_disk_that_takes_nothing_switches_it_off() {
        let path = PathBuf::from("/dev/full");
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let record =
            FlightRecord { file, path, rank: 0, next: AtomicU64::new(0), off: AtomicBool::new(false) };
        record.mark(flight::Mark::Joined);
        assert!(record.off.load(Ordering::Relaxed));
        record.mark(flight::Mark::Hello);
    }

    #[test]
    fn this_process_is_alive_and_another_of_its_number_is_not() {
        let me = std::process::id();
        let started = process(me).unwrap().started;
        let header = Header { pid: me, started, host: host(), ..Header::default() };
        assert_eq!(vitals(&header), Some(Vitals::Alive));
        assert_eq!(vitals(&Header { started: started + 1, ..header.clone() }), Some(Vitals::Gone));
        assert_eq!(vitals(&Header { host: "elsewhere".into(), ..header }), None);
    }
}
