//! Writes flight records: the record of each rank, the exit statuses of the processes, and whether
//! a process is still alive.
//!
//! Each line is one `pwrite` at its own offset, so threads need no lock, a kill loses nothing that
//! was already written, and a full disk costs the record but never the run.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use tessera_base::Diagnostic;
use tessera_mesh::Rank;
use tessera_report::autopsy::{ProcessEnd, ProcessVitals};
use tessera_report::flight::{
    FlightEntry, FlightHeader, FlightLog, FlightMark, HEADER_BYTES, RING_LINES, SCHEMA, encode_line,
    line_offset,
};
use tessera_runtime::driver::RankExit;
use tessera_runtime::flight::{self, FlightSink};
use tessera_verify::SealedPlan;

use crate::clock::monotonic_ns;
use crate::files::{write_error, write_file};
pub use crate::host_identity::host_name;
use crate::system::read_process;
use crate::terminal::print_stderr_line;

/// Name of the folder in a run directory that holds the flight records.
pub const FLIGHT_DIR: &str = "flight";
/// Name of the file with the exit status of each process as the launcher observed it: one JSON
/// object per line.
pub const EXITS_FILE: &str = "exits.jsonl";

/// Writes the flight record of one rank: a file with a header and a ring of lines of fixed length.
#[derive(Debug)]
pub(crate) struct FlightRecord {
    file: File,
    path: PathBuf,
    rank: u32,
    next_line: AtomicU64,
    disabled: AtomicBool,
}

impl FlightRecord {
    /// Creates the flight record of a rank in a run directory. On failure the run continues without
    /// a record, and the reason is printed once.
    pub(crate) fn open(out: &Path, session: u64, plan: &SealedPlan, rank: Rank) -> Option<FlightRecord> {
        let path = out.join(FLIGHT_DIR).join(format!("rank-{}.jsonl", rank.0));
        let header = build_header(session, plan, rank);
        let created = std::fs::create_dir_all(out.join(FLIGHT_DIR)).and_then(|()| {
            set_aside_record(&path, &header.session)?;
            let file = OpenOptions::new().create(true).write(true).truncate(true).open(&path)?;
            file.write_all_at(&header.encode_line(), 0)?;
            Ok(file)
        });
        match created {
            Ok(file) => {
                let (next, off) = (AtomicU64::new(0), AtomicBool::new(false));
                Some(FlightRecord { file, path, rank: rank.0, next_line: next, disabled: off })
            }
            Err(e) => {
                print_stderr_line(&format!("tessera rank {rank}: no flight record: {}: {e}", path.display()));
                None
            }
        }
    }

    /// Appends a line and returns its number for [`FlightRecord::rewrite_line`].
    pub(crate) fn append_line(&self, at_ns: u64, entry: &FlightEntry) -> u64 {
        let n = self.next_line.fetch_add(1, Ordering::Relaxed);
        self.write_line_at(n, at_ns, entry);
        n
    }

    /// Rewrites a line in place unless the ring has already overwritten it.
    pub(crate) fn rewrite_line(&self, line: u64, at_ns: u64, entry: &FlightEntry) {
        if self.next_line.load(Ordering::Relaxed) - line < RING_LINES {
            self.write_line_at(line, at_ns, entry);
        }
    }

    fn write_line_at(&self, line: u64, at_ns: u64, entry: &FlightEntry) {
        if self.disabled.load(Ordering::Relaxed) {
            return;
        }
        let failed = self.file.write_all_at(&encode_line(line, at_ns, entry), line_offset(line)).err();
        if let Some(e) = failed.filter(|_| !self.disabled.swap(true, Ordering::Relaxed)) {
            let path = self.path.display();
            let rank = self.rank;
            print_stderr_line(&format!("tessera rank {rank}: the flight record stops here: {path}: {e}"));
        }
    }
}

impl FlightSink for FlightRecord {
    fn record_event(&self, mark: flight::FlightEvent<'_>) {
        self.append_line(monotonic_ns(), &FlightEntry::Mark(to_record_mark(mark)));
    }
}

/// Renames a record of another session to `rank-N.<session>.jsonl`, so that a restarted rank does
/// not destroy the evidence of the crashed one.
fn set_aside_record(path: &Path, session: &str) -> std::io::Result<()> {
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
    let found_session = FlightLog::parse("", &head).map(|f| f.header.session).ok();
    let is_id = |s: &String| (1..=16).contains(&s.len()) && s.bytes().all(|b| b.is_ascii_hexdigit());
    match found_session {
        Some(same) if same == session => Ok(()),
        found_session => {
            let name = found_session.filter(is_id).unwrap_or_else(|| "damaged".to_string());
            std::fs::rename(path, path.with_extension(format!("{name}.jsonl")))
        }
    }
}

/// Converts a runtime mark to its form in the flight record.
fn to_record_mark(mark: flight::FlightEvent<'_>) -> FlightMark {
    let new_mark = |name: &str, call| FlightMark { event: name.to_string(), call, ..FlightMark::default() };
    match mark {
        flight::FlightEvent::Joined => new_mark("joined", None),
        flight::FlightEvent::Hello => new_mark("hello", None),
        flight::FlightEvent::CallIssued { call_id, chunk, epoch } => FlightMark {
            detail: Some(format!("chunk {chunk}, epoch {epoch}")),
            ..new_mark("called", Some(call_id))
        },
        flight::FlightEvent::Ready { call_id } => new_mark("ready", Some(call_id)),
        flight::FlightEvent::Commit { call_id } => new_mark("commit", Some(call_id)),
        flight::FlightEvent::Done { call_id } => new_mark("done", Some(call_id)),
        flight::FlightEvent::Failed { class, rank, code, text, secondary: echo } => FlightMark {
            blamed_rank: rank,
            code: Some(code.to_string()),
            class: Some(class.as_str().to_string()),
            is_relayed: echo,
            detail: Some(text.to_string()),
            ..new_mark("failed", None)
        },
        flight::FlightEvent::Exit { status } => FlightMark { status: Some(status), ..new_mark("exit", None) },
    }
}

fn build_header(session: u64, plan: &SealedPlan, rank: Rank) -> FlightHeader {
    let role = plan.role_of(rank).and_then(|at| plan.roles().get(at));
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    let pid = std::process::id();
    FlightHeader {
        schema: SCHEMA,
        kind: "flight".to_string(),
        rank: rank.0,
        world_size: plan.mesh().world_size(),
        session: format!("{session:016x}"),
        plan: plan.digest_hex(),
        mesh: plan.mesh().to_string(),
        role: role.map_or(String::new(), |r| r.role.clone()),
        pid,
        start_ticks: read_process(pid).map_or(0, |p| p.started),
        host: host_name(),
        mono_ns: monotonic_ns(),
        wall_ns: u64::try_from(wall).unwrap_or(u64::MAX),
        tessera: env!("CARGO_PKG_VERSION").to_string(),
    }
}

/// Returns the state of the process that wrote a header, or `None` if that process ran on another
/// host.
pub fn process_vitals(header: &FlightHeader) -> Option<ProcessVitals> {
    if header.host != host_name() {
        return None;
    }
    Some(match read_process(header.pid).filter(|p| p.started == header.start_ticks) {
        None => ProcessVitals::Gone,
        Some(process) if process.is_stopped() => ProcessVitals::Stopped,
        Some(process) if process.has_ended() => ProcessVitals::Gone,
        Some(_) => ProcessVitals::Alive,
    })
}

/// Writes the exit status of each process.
///
/// # Errors
/// T0014.
pub(crate) fn write_exits(out: &Path, exits: &[RankExit]) -> Result<(), Diagnostic> {
    let line = |e: &RankExit| {
        let end = ProcessEnd { rank: e.rank, status: e.status, signal: e.signal };
        serde_json::to_string(&end).unwrap_or_default() + "\n"
    };
    let text: String = exits.iter().map(line).collect();
    let folder = out.join(FLIGHT_DIR);
    // The folder is missing if every rank failed before it could open its flight record.
    match std::fs::create_dir(&folder) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(write_error(&folder, &e)),
        _ => write_file(&folder.join(EXITS_FILE), text.as_bytes()),
    }
}

/// Maximum length of a flight record file; longer files are not read.
pub const MAX_FLIGHT_BYTES: u64 = line_offset(RING_LINES - 1) + 2 * HEADER_BYTES as u64;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use tessera_report::flight::FlightCollective;

    use super::*;

    fn open_test_record(dir: &Path) -> FlightRecord {
        let path = dir.join("rank-0.jsonl");
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(&path).unwrap();
        let header = FlightHeader {
            schema: SCHEMA,
            kind: "flight".into(),
            host: host_name(),
            ..FlightHeader::default()
        };
        file.write_all_at(&header.encode_line(), 0).unwrap();
        FlightRecord { file, path, rank: 0, next_line: AtomicU64::new(0), disabled: AtomicBool::new(false) }
    }

    #[test]
    fn lines_of_two_writer_threads_are_never_torn() {
        let dir = tempfile::tempdir().unwrap();
        let record = Arc::new(open_test_record(dir.path()));
        let other = Arc::clone(&record);
        let marks = std::thread::spawn(move || {
            for call_id in 0..3000 {
                other.record_event(flight::FlightEvent::Ready { call_id });
            }
        });
        for pos in 0..3000 {
            let entry = FlightEntry::Collective(FlightCollective {
                pos,
                op: "all_reduce".into(),
                ..FlightCollective::default()
            });
            let n = record.append_line(monotonic_ns(), &entry);
            record.rewrite_line(n, monotonic_ns(), &entry);
        }
        marks.join().unwrap();
        let flight = FlightLog::parse("f", &std::fs::read(&record.path).unwrap()).unwrap();
        assert_eq!((flight.lines.len() as u64, flight.unreadable_lines), (RING_LINES, 0));
        assert_eq!(flight.overwritten_lines, 6000 - RING_LINES);
        // The ring has overwritten line 0, so this call must not write it.
        record.rewrite_line(
            0,
            0,
            &FlightEntry::Mark(FlightMark { event: "late".into(), ..FlightMark::default() }),
        );
        let flight = FlightLog::parse("f", &std::fs::read(&record.path).unwrap()).unwrap();
        assert!(flight.lines.iter().all(|l| l.n >= 6000 - RING_LINES));
    }

    /// Budget: a collective takes three writes, and a chunk of the demo has 80 collectives in about
    /// 200 ms. One percent of that is 8 µs per write. The asserted bound leaves room for
    /// unoptimised builds.
    #[test]
    fn a_line_costs_microseconds() {
        let dir = tempfile::tempdir().unwrap();
        let record = open_test_record(dir.path());
        let mut entry =
            FlightCollective { op: "all_to_all".into(), group: "tp".into(), ..FlightCollective::default() };
        entry.ty = "f32[2160, 5120]".into();
        // CPU time of this thread, which does not depend on the load of the machine.
        let cpu = || {
            let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
        };
        let begun = cpu();
        const WRITES: u32 = 20_000;
        for pos in 0..WRITES {
            entry.pos = pos;
            record.append_line(monotonic_ns(), &FlightEntry::Collective(entry.clone()));
        }
        let each_ns = (cpu() - begun) / u64::from(WRITES);
        assert!(each_ns < 20_000, "{each_ns} ns per line");
        println!("{each_ns} ns per line");
    }

    #[test]
    fn a_restart_sets_aside_the_record_of_the_crash() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank-1.jsonl");
        let kept = |name: &str| std::fs::read(dir.path().join(name)).ok();
        let whole = |session: &str| {
            let header = FlightHeader {
                schema: SCHEMA,
                kind: "flight".into(),
                session: session.into(),
                ..FlightHeader::default()
            };
            let mark = FlightEntry::Mark(FlightMark { event: "joined".into(), ..FlightMark::default() });
            [header.encode_line(), encode_line(0, 1, &mark)].concat()
        };
        // A missing file, an empty file and a file of the same session are no evidence of another
        // session.
        set_aside_record(&path, "ab").unwrap();
        for same in [Vec::new(), whole("ab")] {
            std::fs::write(&path, &same).unwrap();
            set_aside_record(&path, "ab").unwrap();
            assert_eq!(kept("rank-1.jsonl"), Some(same));
        }
        set_aside_record(&path, "cd").unwrap();
        assert_eq!((kept("rank-1.jsonl"), kept("rank-1.ab.jsonl")), (None, Some(whole("ab"))));
        // An unreadable header or an invalid session id must not choose the file name.
        for odd in [b"not a header\n".to_vec(), whole("../../x")] {
            std::fs::write(&path, &odd).unwrap();
            set_aside_record(&path, "cd").unwrap();
            assert_eq!(kept("rank-1.damaged.jsonl"), Some(odd));
        }
        assert_eq!(kept("rank-1.ab.jsonl"), Some(whole("ab")));
    }

    #[test]
    fn a_full_disk_disables_the_record() {
        let path = PathBuf::from("/dev/full");
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let record = FlightRecord {
            file,
            path,
            rank: 0,
            next_line: AtomicU64::new(0),
            disabled: AtomicBool::new(false),
        };
        record.record_event(flight::FlightEvent::Joined);
        assert!(record.disabled.load(Ordering::Relaxed));
        record.record_event(flight::FlightEvent::Hello);
    }

    #[test]
    fn vitals_distinguish_a_reused_pid() {
        let me = std::process::id();
        let started = read_process(me).unwrap().started;
        let header =
            FlightHeader { pid: me, start_ticks: started, host: host_name(), ..FlightHeader::default() };
        assert_eq!(process_vitals(&header), Some(ProcessVitals::Alive));
        assert_eq!(
            process_vitals(&FlightHeader { start_ticks: started + 1, ..header.clone() }),
            Some(ProcessVitals::Gone)
        );
        assert_eq!(process_vitals(&FlightHeader { host: "elsewhere".into(), ..header }), None);
    }
}
