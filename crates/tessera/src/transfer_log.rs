//! What ranks report of experts in two tiers, call by call: kept in the memory of this process for ranks that are its
//! threads, and in a file of the run directory for ranks that are processes.
//!
//! A file and no message, because the transfers of a call may be as many as its experts, and nothing in the lockstep
//! depends on them. Each call is one line, written before the rank reports the call as finished.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;
use tessera_device::{ExpertReport, ExpertTransfer, LayerTransfers};
use tessera_ir::StreamKind;
use tessera_mesh::Rank;
use tessera_runtime::wire::CallAction;

use crate::clock::monotonic_ns;
use crate::codes::T0011;
use crate::files::write_error;

/// Calls of each rank that a report covers: the last ones.
pub const REPORTED_CALLS: usize = 4096;

/// What a rank reports of the experts of one call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallTransfers {
    /// The rank.
    pub rank: u32,
    /// Number of the call among those of the calling process, from 1.
    pub call: u64,
    /// Name of the phase in the sealed plan.
    pub program: String,
    /// What each layer with tiers used and fetched.
    pub layers: Vec<LayerTransfers>,
    /// The transfers that ended since the call before.
    pub events: Vec<TransferEvent>,
}

/// A transfer of one matrix of an expert on the stream of transfers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferEvent {
    /// The rank.
    pub rank: u32,
    /// Number of the call with which the transfer was reported.
    pub call: u64,
    /// Name of the stream.
    pub stream: String,
    /// What was moved, such as `prefetch f.w2 expert 5`.
    pub op: String,
    /// Begin in nanoseconds on the monotonic clock of the host.
    pub start_ns: u64,
    /// End in nanoseconds on the monotonic clock of the host.
    pub end_ns: u64,
}

/// Where the ranks of a run keep their reports.
#[derive(Debug, Clone)]
pub(crate) enum TransferPlace {
    /// In the memory of this process.
    Memory(TransferMemory),
    /// In a folder, one file per rank.
    Folder(PathBuf),
}

/// The reports of the ranks that are threads of this process.
#[derive(Debug, Clone, Default)]
pub(crate) struct TransferMemory(Arc<Mutex<BTreeMap<u32, VecDeque<CallTransfers>>>>);

impl TransferMemory {
    /// Returns the reports of the last calls, by call and rank.
    pub(crate) fn list(&self) -> Vec<CallTransfers> {
        let reports = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut list: Vec<CallTransfers> = reports.values().flatten().cloned().collect();
        list.sort_by_key(|report| (report.call, report.rank));
        list
    }

    fn push(&self, report: CallTransfers) {
        let mut reports = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_rank = reports.entry(report.rank).or_default();
        of_rank.push_back(report);
        if of_rank.len() > REPORTED_CALLS {
            of_rank.pop_front();
        }
    }
}

/// Reads the reports of the last calls from the files of a run directory, by call and rank.
///
/// # Errors
/// T0011 for a file that holds something else.
pub(crate) fn read_transfers(out: &Path, ranks: u32) -> Result<Vec<CallTransfers>, Diagnostic> {
    let mut all = Vec::new();
    for rank in (0..ranks).map(Rank) {
        let path = path_of_rank(out, rank);
        let bad = |why: String| Diagnostic::error(&T0011, format!("{}: {why}", path.display()));
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            Err(e) => return Err(bad(e.to_string())),
        };
        let mut lines = VecDeque::new();
        for line in BufReader::new(file).lines() {
            lines.push_back(line.map_err(|e| bad(e.to_string()))?);
            if lines.len() > REPORTED_CALLS {
                lines.pop_front();
            }
        }
        for line in lines {
            all.push(serde_json::from_str::<CallTransfers>(&line).map_err(|e| bad(e.to_string()))?);
        }
    }
    all.sort_by_key(|report| (report.call, report.rank));
    Ok(all)
}

fn path_of_rank(out: &Path, rank: Rank) -> PathBuf {
    out.join(format!("experts-{}.jsonl", rank.0))
}

/// The reports of one rank, which it appends after each call.
#[derive(Debug)]
pub(crate) struct TransferLog {
    rank: Rank,
    sink: TransferSink,
    /// Number of the current call; 0 before the first one, and in a warm-up.
    call: u64,
    is_warmup: bool,
}

#[derive(Debug)]
enum TransferSink {
    Memory(TransferMemory),
    File { file: File, path: PathBuf },
}

impl TransferLog {
    /// Opens the log of a rank.
    ///
    /// # Errors
    /// T0014 if its file cannot be created.
    pub(crate) fn open(place: &TransferPlace, rank: Rank) -> Result<TransferLog, Diagnostic> {
        let sink = match place {
            TransferPlace::Memory(memory) => TransferSink::Memory(memory.clone()),
            TransferPlace::Folder(out) => {
                let path = path_of_rank(out, rank);
                let opened = OpenOptions::new().create(true).write(true).truncate(true).open(&path);
                TransferSink::File { file: opened.map_err(|e| write_error(&path, &e))?, path }
            }
        };
        Ok(TransferLog { rank, sink, call: 0, is_warmup: false })
    }

    /// Begins a call. A warm-up has no number, because no caller requested it.
    pub(crate) fn begin_call(&mut self, action: CallAction) {
        self.is_warmup = action == CallAction::Warmup;
        self.call += u64::from(action == CallAction::Infer);
    }

    /// Appends what a backend reported of the current call.
    ///
    /// # Errors
    /// T0014 if the file cannot be written.
    pub(crate) fn append(&mut self, program: &str, report: ExpertReport) -> Result<(), Diagnostic> {
        if self.is_warmup {
            return Ok(());
        }
        let (rank, call) = (self.rank.0, self.call);
        let (now, now_ns) = (Instant::now(), monotonic_ns());
        let ns_of = |at: Instant| now_ns.saturating_sub((now - at).as_nanos() as u64);
        let event = |transfer: ExpertTransfer| {
            let ExpertTransfer { weight, expert, is_prefetch, begin, end } = transfer;
            let what = if is_prefetch { "prefetch" } else { "fetch" };
            TransferEvent {
                rank,
                call,
                stream: StreamKind::Io.name().to_string(),
                op: format!("{what} {weight} expert {expert}"),
                start_ns: ns_of(begin),
                end_ns: ns_of(end),
            }
        };
        let events = report.transfers.into_iter().map(event).collect();
        let entry = CallTransfers { rank, call, program: program.to_string(), layers: report.layers, events };
        match &mut self.sink {
            TransferSink::Memory(memory) => memory.push(entry),
            TransferSink::File { file, path } => {
                let write_failed = |e: std::io::Error| write_error(path, &e);
                let mut line = serde_json::to_vec(&entry).map_err(|e| write_failed(e.into()))?;
                line.push(b'\n');
                file.write_all(&line).map_err(write_failed)?;
            }
        }
        Ok(())
    }
}
