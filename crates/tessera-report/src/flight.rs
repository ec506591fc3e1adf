//! `flight/rank-N.jsonl`: the flight record of a rank, a ring of fixed-width JSON lines that holds
//! the rank's most recent events.
//!
//! A line is written in place as soon as its event happens, so the file is complete after a kill,
//! can be read while the run goes on, and never grows. A collective has one line, which is
//! rewritten whenever its state changes. Every line ends with a checksum of its own text, so that a
//! reader detects a line that is being written.

mod rank_list;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;

pub use rank_list::{read_ranks, write_ranks};

use crate::codes::T0905;
use crate::record::{ChunkRecord, RunRecord, StreamWaits};
use crate::timeline::TimelineSpan;

/// Version of the format that this build writes and reads: [`FlightHeader::schema`].
pub const SCHEMA: u32 = 2;
/// Width of the header line in bytes, newline included.
pub const HEADER_BYTES: usize = 640;
/// Width of every other line in bytes, newline included.
pub const LINE_BYTES: usize = 384;
/// Number of lines in the ring, after which a new line overwrites the oldest.
pub const RING_LINES: u64 = 4096;
/// Maximum length of a list of ranks in bytes. A longer list is left out; the plan contains the
/// members.
const MAX_RANKS_BYTES: usize = 48;
/// Width of the checksum field `,"checksum":"01234567"}` and the newline.
const CHECKSUM_BYTES: usize = 24;

/// The first line of a flight record, which identifies the rank and the run.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FlightHeader {
    /// Version of the flight record's format; this build writes [`SCHEMA`].
    pub schema: u32,
    /// Always `flight`, which marks the line as the header of a flight record.
    pub kind: String,
    /// Rank that wrote the record.
    pub rank: u32,
    /// Number of ranks in the run.
    #[serde(rename = "world")]
    pub world_size: u32,
    /// Session id of the run as 16 hex digits, the same for all ranks.
    pub session: String,
    /// Digest of the sealed plan, hex.
    pub plan: String,
    /// Mesh axes and their sizes, such as `tp=2,pp=1`.
    pub mesh: String,
    /// Role of the rank in the plan, such as `stage0`; empty if the plan gives the rank no role.
    pub role: String,
    /// Id of the rank's process in its operating system, which may reuse it later.
    pub pid: u32,
    /// Start time of the process in the system's own ticks, which distinguishes it from a later
    /// process with the same id.
    #[serde(rename = "started")]
    pub start_ticks: u64,
    /// Name of the process's host. On any other host, an autopsy cannot check whether the process
    /// is alive.
    pub host: String,
    /// Time at which the record was opened, in nanoseconds on the monotonic clock of all other
    /// instants.
    pub mono_ns: u64,
    /// The same instant in nanoseconds since 1970.
    pub wall_ns: u64,
    /// Version of tessera that wrote the record.
    pub tessera: String,
}

/// The fields of a header that every schema has.
#[derive(Deserialize)]
struct SchemaHead {
    kind: String,
    schema: u32,
}

/// One line of the ring: [`LINE_BYTES`] bytes in the file, with a checksum at the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlightLine {
    /// Sequence number of the line; its slot in the ring is the remainder modulo [`RING_LINES`].
    pub n: u64,
    /// Time or start of the event, in nanoseconds on the rank's monotonic clock.
    pub at_ns: u64,
    /// The collective, phase or life-cycle event that the line records.
    #[serde(flatten)]
    pub entry: FlightEntry,
}

/// What one line records. The line of a collective or a phase is rewritten as its state changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum FlightEntry {
    /// A collective that the rank issued, or that the check against the plan refused.
    Collective(FlightCollective),
    /// A phase that the rank began.
    Phase(FlightPhase),
    /// A life-cycle event of the rank.
    Mark(FlightMark),
}

/// A collective as this rank issued it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FlightCollective {
    /// Progress of the collective on this rank when the line was last written.
    pub state: CollectiveProgress,
    /// Id of the call, from 1 within a session.
    pub call: u64,
    /// Index of the chunk that the call generates, from 0; 0 in the warm-up.
    pub chunk: u32,
    /// Epoch of the KV caches in which the call runs; each hard cut begins another.
    pub epoch: u32,
    /// Name of the program that the phase runs, such as `denoise.fill3`.
    pub phase: String,
    /// Index of the phase in the call, from 0.
    pub step: u32,
    /// Position in the phase's sequence of collectives on this rank, from 0.
    pub pos: u32,
    /// Number of collectives that the sealed plan has in this phase on this rank.
    #[serde(rename = "planned")]
    pub planned_count: u32,
    /// Name of the group, such as `tp`.
    pub group: String,
    /// Members of the group as [`write_ranks`] writes them; for a transfer, the sender and the
    /// receiver in ascending order.
    pub ranks: String,
    /// Name of the op, such as `all_reduce`.
    pub op: String,
    /// Element type and local extents, such as `f32[4, 8]`.
    #[serde(rename = "type")]
    pub ty: String,
    /// Reduction of the op, such as `sum`; `None` for an op that reduces nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduction: Option<String>,
    /// World rank of the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<u32>,
    /// World rank on the other side of a send or receive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<u32>,
    /// Whether the device started the collective, if the backend can tell.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub started: bool,
    /// Index of the op in the rank's program.
    #[serde(rename = "index")]
    pub op_index: u32,
    /// Whether the collective equals the line of the sealed plan at `pos`.
    pub plan_match: PlanMatch,
    /// The plan's line at this position, if it differs.
    #[serde(default, rename = "expected", skip_serializing_if = "Option::is_none")]
    pub planned_line: Option<String>,
    /// Time at which the collective completed on this rank; 0 before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub end_ns: u64,
    /// Exposed time of the collective in nanoseconds: the time for which the host waited for it and
    /// no other work of this rank hid it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub exposed_ns: u64,
    /// Bytes that the rank passed to the other members; 0 if the backend does not count them.
    #[serde(default, rename = "sent", skip_serializing_if = "is_zero")]
    pub sent_bytes: u64,
}

/// How far one rank has come with a collective; other members may be at another state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveProgress {
    /// The host enqueued the collective and continued.
    #[default]
    Issued,
    /// The host waits for the collective.
    Waiting,
    /// The collective is complete on this rank.
    Done,
    /// The rank did not issue the collective, because the plan does not contain it at this
    /// position.
    Refused,
}

/// Comparison of a collective with the plan's line at its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlanMatch {
    /// The same line, from the same op.
    Yes,
    /// The same line, from another op: an earlier part of the program differs from the sealed
    /// program.
    Moved,
    /// A different line, or no line.
    No,
    /// There was no plan to compare with.
    #[default]
    Unknown,
}

/// A phase as this rank ran it. The line is written when the phase begins and again when it ends.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FlightPhase {
    /// Id of the call, from 1 within a session.
    pub call: u64,
    /// Index of the chunk that the call generates, from 0; 0 in the warm-up.
    pub chunk: u32,
    /// Epoch of the KV caches in which the call runs; each hard cut begins another.
    pub epoch: u32,
    /// Name of the program that the phase runs, such as `denoise.fill3`.
    pub phase: String,
    /// Index of the phase in the call, from 0.
    pub step: u32,
    /// Number of collectives issued, known at the end of the phase.
    pub issued: u32,
    /// Number of collectives that the sealed plan has in this phase on this rank.
    #[serde(rename = "planned")]
    pub planned_count: u32,
    /// Time at which the phase ended, in nanoseconds on the rank's monotonic clock; 0 before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub end_ns: u64,
    /// The first line of the plan that was not issued, if the phase ended without it.
    #[serde(default, rename = "missing", skip_serializing_if = "Option::is_none")]
    pub missing_line: Option<String>,
}

/// A life-cycle event of the rank.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FlightMark {
    /// `joined`, `probed`, `hello`, `called`, `ready`, `commit`, `done`, `failed` or `exit`; readers
    /// ignore other names.
    #[serde(rename = "mark")]
    pub event: String,
    /// Id of the call, if the event belongs to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<u64>,
    /// The rank at which a failure is reported to have begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blamed_rank: Option<u32>,
    /// Id of the failure's diagnostic code, such as `T0744`; `None` for any other event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Class of the failure, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// Whether the rank relays another rank's failure.
    #[serde(default, rename = "relayed", skip_serializing_if = "std::ops::Not::not")]
    pub is_relayed: bool,
    /// Exit status of the process, for a line that records its exit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<i32>,
    /// Details in words, truncated to fit the line.
    #[serde(default, rename = "text", skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

impl FlightHeader {
    /// Encodes the header with its checksum as one line of [`HEADER_BYTES`] bytes; long texts are
    /// truncated.
    #[must_use]
    pub fn encode_line(&self) -> Vec<u8> {
        let mut own = self.clone();
        for text in [&mut own.host, &mut own.role, &mut own.mesh] {
            truncate_text(text, 80);
        }
        frame_line(serde_json::to_vec(&own).unwrap_or_default(), HEADER_BYTES)
            .unwrap_or_else(|_| vec![b' '; HEADER_BYTES])
    }
}

/// Returns the byte offset of line `n` in the file.
#[must_use]
pub const fn line_offset(n: u64) -> u64 {
    HEADER_BYTES as u64 + (n % RING_LINES) * LINE_BYTES as u64
}

/// Encodes a line of [`LINE_BYTES`] bytes. Text that is too long for the line is truncated.
#[must_use]
pub fn encode_line(n: u64, at_ns: u64, entry: &FlightEntry) -> Vec<u8> {
    #[derive(Serialize)]
    struct Written<'a> {
        n: u64,
        at_ns: u64,
        #[serde(flatten)]
        entry: &'a FlightEntry,
    }
    // Serialisation cannot fail: there are only strings and numbers.
    let json = |entry: &FlightEntry| serde_json::to_vec(&Written { n, at_ns, entry }).unwrap_or_default();
    let over = match frame_line(json(entry), LINE_BYTES) {
        Ok(line) => return line,
        Err(over) => over,
    };
    let mut short = entry.clone();
    // A character that is escaped takes several bytes, so the line may still be too long after the
    // first truncation.
    for over in [Some(over), None] {
        shorten_texts(&mut short, over);
        if let Ok(line) = frame_line(json(&short), LINE_BYTES) {
            return line;
        }
    }
    let plain = FlightEntry::Mark(FlightMark { event: "too_long".to_string(), ..FlightMark::default() });
    frame_line(json(&plain), LINE_BYTES).unwrap_or_else(|_| vec![b' '; LINE_BYTES])
}

/// Adds the waits for collectives from the flight records to the phases of a run's record that have
/// none.
pub fn add_collective_waits(record: &mut RunRecord, flights: &[FlightLog]) {
    for chunk in &mut record.chunks {
        for rank in &mut chunk.ranks {
            let Some(flight) = flights.iter().find(|f| f.header.rank == rank.rank) else { continue };
            let mut waits = flight.collective_waits(chunk.call_id);
            let phases = rank.phases.iter_mut().filter(|p| p.stream == "compute");
            for (phase, step) in phases.zip(0..).filter(|(p, _)| p.waits.is_none()) {
                let Some(mut own) = waits.remove(&step) else { continue };
                for (from, to) in &mut own.longest {
                    (*from, *to) = (*from + phase.start_ns, *to + phase.start_ns);
                }
                phase.waits = Some(own);
            }
        }
    }
}

/// Returns the collectives in the flight records as spans on the clock of a run's record, as far back as the rings
/// reach. A collective is placed by its distance from the beginning of its phase, so ranks on other hosts need no
/// common clock.
#[must_use]
pub fn collective_spans(record: &RunRecord, flights: &[FlightLog]) -> Vec<TimelineSpan> {
    let calls: BTreeMap<u64, &ChunkRecord> = record.chunks.iter().map(|c| (c.call_id, c)).collect();
    let mut spans = Vec::new();
    for flight in flights {
        let rank = flight.header.rank;
        let mut begins: BTreeMap<(u64, u32), u64> = BTreeMap::new();
        for line in &flight.lines {
            if let FlightEntry::Phase(p) = &line.entry {
                begins.insert((p.call, p.step), line.at_ns);
            }
        }
        for line in &flight.lines {
            let FlightEntry::Collective(c) = &line.entry else { continue };
            let Some(chunk) = calls.get(&c.call).filter(|_| c.state == CollectiveProgress::Done) else {
                continue;
            };
            let phase = chunk
                .ranks
                .iter()
                .find(|r| r.rank == rank)
                .and_then(|r| r.phases.iter().filter(|p| p.stream == "compute").nth(c.step as usize));
            let (Some(phase), Some(begin)) = (phase, begins.get(&(c.call, c.step))) else { continue };
            let at = |ns: u64| phase.start_ns + ns.saturating_sub(*begin);
            spans.push(TimelineSpan {
                rank,
                stream: format!("collectives {}", c.group),
                name: format!("{} {}", c.op, c.ty),
                chunk: chunk.chunk,
                start_ns: at(line.at_ns),
                end_ns: at(c.end_ns).max(at(line.at_ns)),
                collectives: 1,
                waits: None,
            });
        }
    }
    spans
}

/// A flight record that was read from a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FlightLog {
    /// First line of the file, which identifies the rank and the run.
    pub header: FlightHeader,
    /// Lines that are still in the ring, oldest first.
    pub lines: Vec<FlightLine>,
    /// Number of lines that were being written, are incomplete, or are of a kind unknown to this
    /// build.
    pub unreadable_lines: usize,
    /// Number of lines that the ring has overwritten.
    pub overwritten_lines: u64,
}

impl FlightLog {
    /// Reads a whole file, which may be cut anywhere after its header.
    ///
    /// # Errors
    /// T0905, with `name` in its message.
    pub fn parse(name: &str, file: &[u8]) -> Result<FlightLog, Diagnostic> {
        let mut texts = file.split(|b| *b == b'\n').map(trim_padding);
        let first = texts.next().unwrap_or_default();
        let refuse = |reason: String| {
            Diagnostic::error(&T0905, format!("{name} is not a flight record")).with_label(name, reason)
        };
        let refuse_schema = |head: &SchemaHead| {
            refuse(format!("kind \"{}\", schema {}", head.kind, head.schema))
                .with_note(format!("this build reads schema {SCHEMA}"))
        };
        let header: FlightHeader = match unframe_line(first).map(serde_json::from_slice) {
            Some(Ok(header)) => header,
            _ if file.is_empty() => return Err(refuse("the file is empty".to_string())),
            Some(Err(e)) => return Err(refuse(e.to_string())),
            None => {
                return Err(match serde_json::from_slice(first) {
                    // The checksum key depends on the schema.
                    Ok(other) => refuse_schema(&other),
                    Err(_) => refuse("the first line is incomplete".to_string()),
                });
            }
        };
        if header.schema != SCHEMA || header.kind != "flight" {
            return Err(refuse_schema(&SchemaHead { kind: header.kind, schema: header.schema }));
        }
        let mut flight = FlightLog { header, ..FlightLog::default() };
        for text in texts.filter(|t| !t.is_empty()) {
            match unframe_line(text).map(serde_json::from_slice) {
                Some(Ok(line)) => flight.lines.push(line),
                _ => flight.unreadable_lines += 1,
            }
        }
        flight.lines.sort_by_key(|l: &FlightLine| l.n);
        flight.overwritten_lines = flight.lines.first().map_or(0, |l| l.n);
        Ok(flight)
    }

    /// Returns the waits for collectives in each phase of a call, by the phase's index; see
    /// [`FlightCollective::exposed_ns`]. Instants count from the beginning of the phase. A phase of
    /// which the ring has lost a part is left out.
    #[must_use]
    pub fn collective_waits(&self, call: u64) -> BTreeMap<u32, StreamWaits> {
        let mut out = BTreeMap::new();
        for line in &self.lines {
            let FlightEntry::Phase(p) = &line.entry else { continue };
            if p.call != call || p.end_ns <= line.at_ns {
                continue;
            }
            let own = self.lines.iter().filter_map(|l| match &l.entry {
                FlightEntry::Collective(c)
                    if (c.call, c.step) == (call, p.step) && c.state == CollectiveProgress::Done =>
                {
                    Some((c.end_ns.saturating_sub(c.exposed_ns).max(l.at_ns), c.end_ns))
                }
                _ => None,
            });
            let mut own: Vec<(u64, u64)> = own.collect();
            if own.len() != p.planned_count as usize {
                continue;
            }
            own.sort_unstable();
            // The time between two waits was work.
            let ends = own.iter().map(|(_, end)| *end);
            let begins = own.iter().map(|(begin, _)| *begin).chain([p.end_ns]);
            let work = [line.at_ns].into_iter().chain(ends).zip(begins);
            let from_begin = |at: u64| at.saturating_sub(line.at_ns);
            let work = work.map(|(from, to)| (from_begin(from), from_begin(to)));
            out.insert(p.step, StreamWaits::from_busy_intervals(0, p.end_ns - line.at_ns, work));
        }
        out
    }

    /// Returns the time of the last event, or the time of opening for a record without lines.
    #[must_use]
    pub fn last_ns(&self) -> u64 {
        self.lines.iter().map(FlightLine::last_ns).max().unwrap_or(self.header.mono_ns)
    }
}

impl FlightLine {
    /// Returns the end of the collective or phase, or the time of the line if there is no end yet.
    #[must_use]
    pub fn last_ns(&self) -> u64 {
        match &self.entry {
            FlightEntry::Collective(c) => self.at_ns.max(c.end_ns),
            FlightEntry::Phase(p) => self.at_ns.max(p.end_ns),
            FlightEntry::Mark(_) => self.at_ns,
        }
    }
}

/// Appends the checksum to a JSON object and pads the line to `width` bytes. The error is the
/// number of bytes by which the line is too long.
fn frame_line(mut json: Vec<u8>, width: usize) -> Result<Vec<u8>, usize> {
    json.pop();
    let room = width - CHECKSUM_BYTES;
    if json.len() > room {
        return Err(json.len() - room);
    }
    let tail = format!(",\"checksum\":\"{:08x}\"}}", line_checksum(&json));
    json.extend_from_slice(tail.as_bytes());
    json.resize(width - 1, b' ');
    json.push(b'\n');
    Ok(json)
}

/// Returns the JSON object of a line whose checksum is valid. The checksum stays in the object as
/// one more field.
fn unframe_line(line: &[u8]) -> Option<&[u8]> {
    let at = line.len().checked_sub(CHECKSUM_BYTES - 1)?;
    let (json, tail) = line.split_at(at);
    let hex = tail.strip_prefix(b",\"checksum\":\"")?.strip_suffix(b"\"}")?;
    let expected = u32::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?;
    (expected == line_checksum(json)).then_some(line)
}

/// Removes padding, and the zeros of a part of the file that was never written.
fn trim_padding(line: &[u8]) -> &[u8] {
    let empty = |b: &u8| *b == b' ' || *b == 0 || *b == b'\r';
    let from = line.iter().position(|b| !empty(b)).unwrap_or(line.len());
    let to = line.iter().rposition(|b| !empty(b)).map_or(from, |p| p + 1);
    &line[from..to]
}

/// FNV-1a suffices, because the checksum only has to detect a few bytes that are not written yet.
fn line_checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |h, b| (h ^ u32::from(*b)).wrapping_mul(0x0100_0193))
}

/// Removes `over` bytes from the texts of an entry, in order, or shortens all of them if `over` is
/// `None`.
fn shorten_texts(entry: &mut FlightEntry, over: Option<usize>) {
    let mut texts: Vec<&mut String> = match entry {
        FlightEntry::Collective(c) => {
            c.planned_line.iter_mut().chain([&mut c.ty, &mut c.ranks, &mut c.phase]).collect()
        }
        FlightEntry::Phase(p) => p.missing_line.iter_mut().chain([&mut p.phase]).collect(),
        FlightEntry::Mark(m) => m.detail.iter_mut().chain(&mut m.class).collect(),
    };
    let Some(mut over) = over else {
        for text in texts {
            *text = text.replace(char::is_control, " ");
            truncate_text(text, 24);
        }
        return;
    };
    for text in &mut texts {
        // The ellipsis takes three bytes.
        let keep = text.len().saturating_sub(over + 3).max(24);
        let before = text.len();
        truncate_text(text, keep);
        over = over.saturating_sub(before - text.len());
    }
}

/// Truncates a text to at most `keep` bytes and appends an ellipsis.
fn truncate_text(text: &mut String, keep: usize) {
    if text.len() > keep + 3 {
        let end = (0..=keep).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Returns the overlap ratio: the share of the time of complete collectives that other work of the
/// same rank hid. The result is the minimum over the ranks. [`crate::overlap::overlap_score`] is a
/// different measure.
#[must_use]
pub fn overlap_ratio(flights: &[FlightLog]) -> Option<f64> {
    let ratio = |f: &FlightLog| {
        let (mut all_ns, mut exposed_ns) = (0u64, 0u64);
        for line in &f.lines {
            if let FlightEntry::Collective(c) = &line.entry
                && c.state == CollectiveProgress::Done
                && c.end_ns > line.at_ns
            {
                all_ns += c.end_ns - line.at_ns;
                exposed_ns += c.exposed_ns.min(c.end_ns - line.at_ns);
            }
        }
        (all_ns > 0).then(|| 1.0 - exposed_ns as f64 / all_ns as f64)
    };
    flights.iter().filter_map(ratio).min_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> FlightHeader {
        FlightHeader {
            schema: SCHEMA,
            kind: "flight".into(),
            rank: 1,
            world_size: 2,
            session: "00000000000000ff".into(),
            plan: "a".repeat(64),
            mesh: "tp=2".into(),
            role: "stage0".into(),
            pid: 77,
            start_ticks: 12,
            host: "node-7".into(),
            mono_ns: u64::MAX / 2,
            wall_ns: u64::MAX / 2,
            tessera: "0.1.0".into(),
        }
    }

    fn collective(pos: u32) -> FlightEntry {
        FlightEntry::Collective(FlightCollective {
            state: CollectiveProgress::Done,
            call: 1_000_000,
            chunk: 999_999,
            epoch: 12,
            phase: "denoise.fill3".into(),
            step: 3,
            pos,
            planned_count: 48,
            group: "tp".into(),
            ranks: "0-56:8".into(),
            op: "reduce_scatter".into(),
            ty: "bf16[32760, 5120]".into(),
            reduction: Some("sum".into()),
            op_index: 12_345,
            plan_match: PlanMatch::Yes,
            end_ns: 1_795_219_200_000_000_000,
            exposed_ns: 12_345_678,
            ..FlightCollective::default()
        })
    }

    #[test]
    fn waits_of_a_phase_are_its_exposed_collectives() {
        let collective_line = |pos, at_ns, end_ns, exposed_ns| FlightLine {
            n: u64::from(pos),
            at_ns,
            entry: FlightEntry::Collective(FlightCollective {
                state: CollectiveProgress::Done,
                call: 4,
                step: 0,
                pos,
                end_ns,
                exposed_ns,
                ..FlightCollective::default()
            }),
        };
        let phase = |of| FlightLine {
            n: 9,
            at_ns: 50_000,
            entry: FlightEntry::Phase(FlightPhase {
                call: 4,
                planned_count: of,
                end_ns: 51_000,
                ..FlightPhase::default()
            }),
        };
        // The first collective is hidden, the second half hidden, and the host waits for the third
        // from its issue on.
        let own = [
            collective_line(0, 50_100, 50_200, 0),
            collective_line(1, 50_300, 50_500, 100),
            collective_line(2, 50_600, 50_900, 300),
        ];
        let flight = |of, lines: &[FlightLine]| FlightLog {
            header: FlightHeader { rank: 1, ..header() },
            lines: lines.iter().cloned().chain([phase(of)]).collect(),
            ..FlightLog::default()
        };
        let whole = flight(3, &own);
        let waits = StreamWaits { total_ns: 400, longest: vec![(400, 500), (600, 900)] };
        assert_eq!(whole.collective_waits(4), BTreeMap::from([(0, waits)]));
        assert!(
            whole.collective_waits(5).is_empty() && flight(3, &own[1..]).collective_waits(4).is_empty(),
            "the ring lost a line"
        );
        // In the run record the waits are relative to the phase's start there.
        let mut record = crate::timeline::tests::sample(4);
        let before = record.clone();
        add_collective_waits(&mut record, &[whole]);
        let phases = &record.chunks[3].ranks[1].phases;
        let start_ns = phases[0].start_ns;
        let expected = StreamWaits {
            total_ns: 400,
            longest: vec![(start_ns + 400, start_ns + 500), (start_ns + 600, start_ns + 900)],
        };
        assert_eq!((phases[0].waits.as_ref(), &phases[1].waits), (Some(&expected), &None));
        record.chunks[3].ranks[1].phases[0].waits = None;
        assert_eq!(record, before, "no other phase has known waits");
    }

    fn file(lines: u64) -> Vec<u8> {
        let mut out = header().encode_line();
        for n in 0..lines {
            let (at, line) =
                (line_offset(n) as usize, encode_line(n, 1_795_219_200_000_000_000, &collective(n as u32)));
            assert_eq!(line.len(), LINE_BYTES);
            if out.len() < at + LINE_BYTES {
                out.resize(at + LINE_BYTES, 0);
            }
            out[at..at + LINE_BYTES].copy_from_slice(&line);
        }
        out
    }

    #[test]
    fn the_ring_round_trips_and_never_grows() {
        let flight = FlightLog::parse("f", &file(3)).unwrap();
        assert_eq!(
            (flight.header, flight.lines.len(), flight.unreadable_lines, flight.overwritten_lines),
            (header(), 3, 0, 0)
        );
        assert_eq!(flight.lines[2].entry, collective(2));
        let long = file(2 * RING_LINES + 5);
        assert_eq!(long.len() as u64, line_offset(RING_LINES - 1) + LINE_BYTES as u64);
        let flight = FlightLog::parse("f", &long).unwrap();
        assert_eq!((flight.lines.len() as u64, flight.overwritten_lines), (RING_LINES, RING_LINES + 5));
        assert!(flight.lines.windows(2).all(|w| w[0].n + 1 == w[1].n));
    }

    #[test]
    fn a_truncated_file_keeps_its_complete_lines() {
        let whole = file(4);
        for len in HEADER_BYTES..whole.len() {
            let flight = FlightLog::parse("f", &whole[..len]).unwrap();
            let lines = (len - HEADER_BYTES) / LINE_BYTES;
            assert!(flight.lines.len() == lines || flight.lines.len() == lines + 1, "{len}");
        }
        for len in 0..600 {
            let cut = FlightLog::parse("f", &whole[..len]);
            assert!(cut.as_ref().is_ok_and(|f| f.lines.is_empty()) || cut.is_err_and(|d| d.code == &T0905));
        }
    }

    #[test]
    fn torn_lines_and_holes_are_skipped() {
        let mut bytes = file(4);
        let other = encode_line(
            1,
            5,
            &FlightEntry::Mark(FlightMark { event: "exit".into(), ..FlightMark::default() }),
        );
        let at = line_offset(1) as usize;
        bytes[at..at + 40].copy_from_slice(&other[..40]);
        bytes[line_offset(2) as usize..][..LINE_BYTES].fill(0);
        let flight = FlightLog::parse("f", &bytes).unwrap();
        assert_eq!(flight.lines.iter().map(|l| l.n).collect::<Vec<_>>(), [0, 3]);
        assert_eq!(flight.unreadable_lines, 1);
    }

    #[test]
    fn long_texts_are_truncated() {
        let text = "é\"\n\u{1}".repeat(400);
        let mark = FlightMark { event: "failed".into(), detail: Some(text.clone()), ..FlightMark::default() };
        let phase =
            FlightPhase { phase: text.clone(), missing_line: Some(text.clone()), ..FlightPhase::default() };
        let call = FlightCollective {
            phase: text.clone(),
            ty: text.clone(),
            planned_line: Some(text),
            ..FlightCollective::default()
        };
        for entry in [FlightEntry::Mark(mark), FlightEntry::Phase(phase), FlightEntry::Collective(call)] {
            let line = encode_line(u64::MAX, u64::MAX, &entry);
            assert_eq!(line.len(), LINE_BYTES);
            let bytes = [header().encode_line(), line].concat();
            let flight = FlightLog::parse("f", &bytes).unwrap();
            assert_eq!(flight.lines.len(), 1);
            assert!(!matches!(&flight.lines[0].entry, FlightEntry::Mark(m) if m.event == "too_long"));
        }
    }

    #[test]
    fn other_files_are_rejected() {
        for text in ["", "{}\n", "{\"kind\":\"start\"}\n", "\0\0\0"] {
            assert_eq!(FlightLog::parse("f", text.as_bytes()).unwrap_err().code, &T0905);
        }
        let newer = FlightHeader { schema: SCHEMA + 1, ..header() };
        assert_eq!(FlightLog::parse("f", &newer.encode_line()).unwrap_err().code, &T0905);
        let old = "{\"schema\":1,\"kind\":\"flight\",\"rank\":0,\"x\":\"01234567\"}   \n";
        let refused = FlightLog::parse("f", old.as_bytes()).unwrap_err();
        assert_eq!(refused.labels[0].message, "kind \"flight\", schema 1");
        let long = FlightHeader { host: "\u{1}".repeat(300), role: "é".repeat(300), ..header() };
        assert_eq!(long.encode_line().len(), HEADER_BYTES);
    }
}
