//! `record.jsonl`: the record of a run, one JSON object per line, so that a run that dies leaves
//! every line but possibly its last.
//!
//! The first line is [`RecordLine::Start`] and names the schema. Fields are written in declaration
//! order. Instants are nanoseconds since the run's start on one clock; the driver maps each rank's
//! clock onto it. A new field with a default keeps the schema number; any other change raises it.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize, Serializer};
use tessera_base::Diagnostic;

pub use crate::chunk_record::{ChunkRecord, PhaseRecord, PipelineTimes, RankChunk, StreamWaits};
pub use crate::class_work::ClassWork;
use crate::codes::{T0901, T0902};
pub use crate::memory_record::{MEMORY_TOLERANCE_PERCENT, MemoryRecord, PhaseMemory, StartupMemory};
pub use crate::run_kind::{RunDevice, RunKind};

/// Schema number that [`RecordLine::to_json`] writes and [`RunRecord::parse`] reads.
pub const SCHEMA: u32 = 2;

/// One line of `record.jsonl`: a JSON object whose key `kind` names the variant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RecordLine {
    /// The first line: the request and the plan.
    Start(Box<RunStart>),
    /// A finished chunk, written once its frames are delivered.
    Chunk(ChunkRecord),
    /// An event that the reader should see.
    Event(RunEvent),
    /// The last line: the outcome of the run.
    End(RunEnd),
}

impl RecordLine {
    /// Returns the line as JSON, newline included.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Serialisation cannot fail: the types contain only strings, numbers and lists, and no
        // maps.
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }
}

/// The request and the plan that it ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunStart {
    /// Version of the record's format; this build reads and writes only [`SCHEMA`].
    pub schema: u32,
    /// Version of tessera that wrote the record.
    pub tessera: String,
    /// Build and machine of the leader; `None` in a simulated run, and in records of earlier builds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<Box<RunHost>>,
    /// Digest of the sealed plan, hex.
    pub plan: String,
    /// Name of the model, for display.
    pub model: String,
    /// What the run generates. Records of a video leave it out.
    #[serde(default, skip_serializing_if = "RunKind::is_video")]
    pub generates: RunKind,
    /// Mesh axes and their sizes, such as `tp=2,pp=1`.
    pub mesh: String,
    /// Strategy per axis, such as `tp: ulysses`.
    pub strategy: String,
    /// Name of the numerics policy in the mapping under which the plan was made.
    pub numerics: String,
    /// Digest of all weights, 64 hex digits, which depends on the checkpoint alone. Empty if the run
    /// loaded no weights, and in records of earlier builds.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub weights: String,
    /// Dtype in which the programs compute. Records of earlier builds lack it; those runs computed
    /// in f32.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub dtype: String,
    /// Cache regime: `resident` or `recompute`; `pages` for a language model.
    pub cache: String,
    /// Topology: `mesh`, `pp0` or `pp1`.
    pub topology: String,
    /// Seed that the user chose, from which the noise of the run is drawn.
    pub seed: u64,
    /// Prompts, each with the first chunk that uses it; the first prompt is for chunk 0.
    pub prompts: Vec<ScheduledPrompt>,
    /// Number of requested chunks; `None` for an open-ended stream.
    pub chunks: Option<u32>,
    /// Playback frames per second of the clip.
    #[serde(serialize_with = "serialize_milli")]
    pub fps: f64,
    /// Frame width in pixels.
    pub width: u32,
    /// Frame height in pixels.
    pub height: u32,
    /// Denoising steps per chunk.
    pub steps: u32,
    /// Command line, one entry per word.
    pub command: Vec<String>,
    /// Wall-clock start as formatted by the caller, usually in RFC 3339.
    pub started_at: String,
    /// Always [`RunStatus::Running`], so that a record without an end line has the right status.
    pub status: RunStatus,
    /// Ranks and their roles, in order of rank.
    #[serde(default)]
    pub ranks: Vec<RankRole>,
    /// Kind of device that ran the plan.
    #[serde(default)]
    pub device: RunDevice,
    /// Description of the simulated machine; `None` if the times are real.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Where frames and latents go. Empty in a simulated run, and in records of earlier builds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<RunOutput>,
}

/// One output of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunOutput {
    /// What the output holds: `clip`, `latents`, `png`, `raw`, `y4m` or `text`.
    pub kind: String,
    /// File or folder, relative to the run folder unless absolute; `-` for standard output, `fd:N`
    /// for an open file descriptor.
    pub to: String,
}

/// What the times of a run depend on besides its plan.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunHost {
    /// Version and digest of the executable.
    pub build: String,
    /// The processors that the run could use, such as `8 x NVIDIA H200`.
    pub machine_shape: String,
}

/// A prompt and the first chunk that uses it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduledPrompt {
    /// First chunk that uses the prompt.
    pub chunk: u32,
    /// The prompt itself, in force until the first chunk of the next entry.
    pub text: String,
    /// Kind of a text that a language model continues, as the user names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
}

/// A rank and the role whose programs the rank runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRole {
    /// Rank in the world, where the ranks outside the mesh come first.
    pub rank: u32,
    /// Role in the plan, such as `stage0`.
    pub role: String,
}

/// Whether a run is in progress, and otherwise how the run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// The run is in progress, or it died before it wrote its end line.
    Running,
    /// The run produced all that was requested.
    Complete,
    /// The user stopped the run.
    Interrupted,
    /// A tripwire or an error stopped the run.
    Failed,
}

/// An event that the reader should see: a prompt change, a cut, a rebase, a stall.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunEvent {
    /// Time of the event, in nanoseconds since the run's start.
    pub at_ns: u64,
    /// Kind of event, in one or two words.
    pub event: String,
    /// What happened, in words, such as `chunk 3 begins epoch 1`.
    pub detail: String,
    /// The start-up report of a rank, for an event `startup`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub startup: Option<RankStartup>,
    /// What a rank had allocated after the warm-up, for an event `memory`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<StartupMemory>,
}

impl RunEvent {
    /// Returns whether the event is a report of a rank's start, which `tessera record startup` shows
    /// and timelines leave out.
    #[must_use]
    pub fn is_startup_report(&self) -> bool {
        self.startup.is_some() || self.memory.is_some()
    }
}

/// What a rank reported once it was loaded, before the first call: its effective settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankStartup {
    /// Rank that made the report.
    pub rank: u32,
    /// Role in the plan, such as `stage0`; empty if the plan gives the rank no role.
    pub role: String,
    /// Key and effective value of each compared property, such as the backend and the watchdogs, in
    /// ascending order of key.
    pub keys: Vec<(String, String)>,
    /// Codes of the armed tripwires.
    pub tripwires: Vec<String>,
}

/// The end line of a record: how the run ended and what it delivered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunEnd {
    /// Complete, interrupted or failed.
    pub status: RunStatus,
    /// Why the run failed; `None` unless the status is failed.
    #[serde(default)]
    pub cause: Option<FailureCause>,
    /// Number of chunks that were delivered to the output.
    pub chunks: u32,
    /// Number of pixel frames in the delivered chunks.
    pub frames: u64,
    /// Duration of the run in nanoseconds.
    pub wall_ns: u64,
    /// Frames per second over the whole run.
    #[serde(serialize_with = "serialize_milli")]
    pub fps: f64,
    /// Whether the output file contains every frame counted here.
    pub output_complete: bool,
    /// Hash of all latents in order, hex.
    pub golden: String,
}

/// The failure that ended a run, as the end line of its record states it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureCause {
    /// Failure class in words, such as `a rank died`.
    pub class: String,
    /// Exit status of tessera for a failure of this class.
    pub exit_code: u8,
    /// Rank at which the failure began, if known.
    pub rank: Option<u32>,
    /// Code of the diagnostic, such as `T0712`.
    pub code: Option<String>,
    /// One sentence about the failure.
    pub message: String,
}

/// A record that was read from a file.
#[derive(Debug, Clone, PartialEq)]
pub struct RunRecord {
    /// First line of the file: the request and the plan that it ran.
    pub start: RunStart,
    /// Chunks in the order of the file; of a long run only the first and the last ones.
    pub chunks: Vec<ChunkRecord>,
    /// Counts of the chunks between the first and the last ones in `chunks`.
    pub omitted: OmittedChunks,
    /// All events, in the order of the file; unlike chunks, none is left out.
    pub events: Vec<RunEvent>,
    /// The end line, if the run wrote it.
    pub end: Option<RunEnd>,
    /// Whether the file ends inside a line, which was left out.
    pub truncated: bool,
}

/// Counts of the chunks that were read and not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OmittedChunks {
    /// Number of chunks whose records were read and not kept.
    pub chunks: u32,
    /// Number of frames in these chunks.
    pub frames: u64,
}

impl RunRecord {
    /// Returns the number of chunks in the file.
    #[must_use]
    pub fn chunk_count(&self) -> u32 {
        self.chunks.len() as u32 + self.omitted.chunks
    }

    /// Returns the number of frames in the file.
    #[must_use]
    pub fn frame_count(&self) -> u64 {
        self.chunks.iter().map(|c| u64::from(c.frames)).sum::<u64>() + self.omitted.frames
    }

    /// Reads a whole file.
    ///
    /// A last line that has no newline and does not parse is left out and sets `truncated`. The
    /// line may end inside a character, which is why the input is bytes.
    ///
    /// # Errors
    /// T0901 if the first line is not a start line of this schema, T0902 for any other
    /// unreadable line.
    pub fn parse(file: &[u8]) -> Result<RunRecord, Diagnostic> {
        let mut reader = RecordReader::new(usize::MAX);
        for line in file.split_inclusive(|b| *b == b'\n') {
            reader.push_line(line)?;
        }
        reader.into_record()
    }

    /// Returns the failure that ended the run, if the end line states one.
    #[must_use]
    pub fn cause(&self) -> Option<&FailureCause> {
        self.end.as_ref()?.cause.as_ref()
    }

    /// Returns the status in the end line, or [`RunStatus::Running`] without an end line.
    #[must_use]
    pub fn status(&self) -> RunStatus {
        self.end.as_ref().map_or(RunStatus::Running, |e| e.status)
    }
}

/// Reads a record line by line, in bounded memory.
#[derive(Debug)]
pub struct RecordReader {
    record: Option<RunRecord>,
    /// Maximum number of chunks to keep.
    max_chunks: usize,
    /// The most recent chunks, used once the first half of the kept chunks is full.
    tail: VecDeque<ChunkRecord>,
    lines: usize,
    bytes: usize,
}

impl RecordReader {
    /// Creates a reader that keeps the start line, all events, the end line and at most
    /// `max_chunks` chunks. Of a longer record it keeps `max_chunks / 2` chunks from the beginning,
    /// rounded up, and `max_chunks / 2` from the end, rounded down.
    #[must_use]
    pub fn new(max_chunks: usize) -> RecordReader {
        RecordReader { record: None, max_chunks, tail: VecDeque::new(), lines: 0, bytes: 0 }
    }

    /// Reads the next line, newline included; the last line may lack it.
    ///
    /// # Errors
    /// T0901 if the first line is not a start line of this schema, T0902 for any other
    /// unreadable line.
    pub fn push_line(&mut self, line: &[u8]) -> Result<(), Diagnostic> {
        self.bytes += line.len();
        self.lines += 1;
        if line.iter().all(u8::is_ascii_whitespace) {
            return Ok(());
        }
        let whole = line.last() == Some(&b'\n');
        let place = format!("record.jsonl:{}", self.lines);
        let Some(record) = &mut self.record else {
            self.record = Some(RunRecord::parse_start_line(line.trim_ascii_end(), &place)?);
            return Ok(());
        };
        match serde_json::from_slice(line) {
            Ok(RecordLine::Start(_)) => {
                return Err(Diagnostic::error(&T0902, "the record has a second start line")
                    .with_label(place, "kind is \"start\"")
                    .with_label("record.jsonl:1", "the first start line is here")
                    .with_hint("give each run its own --out folder"));
            }
            Ok(RecordLine::Chunk(chunk)) if record.chunks.len() < self.max_chunks.div_ceil(2) => {
                record.chunks.push(chunk);
            }
            Ok(RecordLine::Chunk(chunk)) => {
                self.tail.push_back(chunk);
                if self.tail.len() > self.max_chunks / 2
                    && let Some(old) = self.tail.pop_front()
                {
                    record.omitted.chunks += 1;
                    record.omitted.frames += u64::from(old.frames);
                }
            }
            Ok(RecordLine::Event(event)) => record.events.push(event),
            Ok(RecordLine::End(end)) => record.end = Some(end),
            Err(_) if !whole => record.truncated = true,
            Err(error) => {
                return Err(Diagnostic::error(&T0902, "this line of the record cannot be read")
                    .with_label(place, error.to_string())
                    .with_hint("delete the line to read the rest"));
            }
        }
        Ok(())
    }

    /// Returns the record that the lines so far make up.
    ///
    /// # Errors
    /// T0901 if there was no start line.
    pub fn into_record(self) -> Result<RunRecord, Diagnostic> {
        let Some(mut record) = self.record else {
            return Err(Diagnostic::error(&T0901, "the record is empty")
                .with_label("record.jsonl", format!("{} bytes, no start line", self.bytes))
                .with_hint("the run died before it wrote its first line: see the leader's log"));
        };
        record.chunks.extend(self.tail);
        Ok(record)
    }
}

impl RunRecord {
    fn parse_start_line(line: &[u8], place: &str) -> Result<RunRecord, Diagnostic> {
        #[derive(Deserialize)]
        struct Head {
            kind: String,
            schema: u32,
        }
        let broken = |message: &str, says: String| Diagnostic::error(&T0901, message).with_label(place, says);
        let head: Head = serde_json::from_slice(line)
            .map_err(|e| broken("the first line is not a start line of a record", e.to_string()))?;
        if head.kind != "start" {
            return Err(broken(
                "the first line is not a start line of a record",
                format!("kind is \"{}\"", head.kind),
            ));
        }
        if head.schema != SCHEMA {
            return Err(broken("the record's schema is not supported", format!("schema {}", head.schema))
                .with_label("this build", format!("reads schema {SCHEMA}"))
                .with_hint("read the record with the tessera version that its first line names"));
        }
        match serde_json::from_slice(line) {
            Ok(RecordLine::Start(start)) => Ok(RunRecord {
                start: *start,
                chunks: Vec::new(),
                omitted: OmittedChunks::default(),
                events: Vec::new(),
                end: None,
                truncated: false,
            }),
            Ok(_) => {
                Err(broken("the first line is not a start line of a record", "different kind".to_string()))
            }
            Err(e) => Err(broken("the first line is not a start line of a record", e.to_string())),
        }
    }
}

/// Rounds to three decimals, which read back to the same bits. A number that is not finite becomes
/// 0, because JSON cannot represent it.
fn serialize_milli<S: Serializer>(x: &f64, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_f64(if x.is_finite() { (x * 1000.0).round() / 1000.0 } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::tests::sample;

    fn record_text(r: &RunRecord) -> String {
        let mut out = RecordLine::Start(Box::new(r.start.clone())).to_json();
        out.extend(r.chunks.iter().map(|c| RecordLine::Chunk(c.clone()).to_json()));
        out.extend(r.events.iter().map(|e| RecordLine::Event(e.clone()).to_json()));
        out.extend(r.end.iter().map(|e| RecordLine::End(e.clone()).to_json()));
        out
    }

    #[test]
    fn records_round_trip() {
        let record = sample(3);
        let text = record_text(&record);
        assert_eq!(text.lines().count(), 6);
        let back = RunRecord::parse(text.as_bytes()).unwrap();
        assert_eq!(back, record);
        assert_eq!(record_text(&back), text);
        assert_eq!(back.status(), RunStatus::Complete);
    }

    #[test]
    fn waits_are_the_gaps_between_busy_intervals() {
        let waits =
            StreamWaits::from_busy_intervals(100, 1100, [(500, 600), (100, 300), (250, 490), (600, 1105)]);
        assert_eq!(waits, StreamWaits { total_ns: 10, longest: Vec::new() }, "too short to be listed");
        let waits = StreamWaits::from_busy_intervals(100, 1100, [(90, 120), (700, 650), (1000, 1050)]);
        assert_eq!(
            waits,
            StreamWaits { total_ns: 930, longest: vec![(120, 700), (700, 1000), (1050, 1100)] }
        );
        assert_eq!(StreamWaits::from_busy_intervals(5, 5, []), StreamWaits::default());
        // A record without waits is read and written as before.
        let phase: PhaseRecord = serde_json::from_str(
            r#"{"name":"a","stream":"compute","start_ns":1,"end_ns":2,"collectives":0}"#,
        )
        .unwrap();
        assert_eq!(phase.waits, None);
        assert!(!serde_json::to_string(&phase).unwrap().contains("waits"));
    }

    #[test]
    fn fields_keep_their_order() {
        let event = RecordLine::Event(RunEvent {
            at_ns: 5,
            event: "cut".into(),
            detail: "a \"hard\" one\n".into(),
            startup: None,
            memory: None,
        });
        assert_eq!(
            event.to_json(),
            "{\"kind\":\"event\",\"at_ns\":5,\"event\":\"cut\",\"detail\":\"a \\\"hard\\\" one\\n\"}\n"
        );
        let start = RecordLine::Start(Box::new(sample(0).start)).to_json();
        assert!(start.starts_with("{\"kind\":\"start\",\"schema\":2,\"tessera\":\""), "{start}");
    }

    #[test]
    fn the_default_device_is_the_cpu() {
        let mut start = sample(0).start;
        let text = RecordLine::Start(Box::new(start.clone())).to_json().replace(",\"device\":\"cpu\"", "");
        assert!(!text.contains("\"device\"") && !text.contains("\"machine\""), "{text}");
        assert_eq!(RunRecord::parse(text.as_bytes()).unwrap().start, start);
        (start.device, start.machine) = (RunDevice::Sim, Some("hgx-h200, profile ideal".into()));
        let text = RecordLine::Start(Box::new(start.clone())).to_json();
        assert!(text.contains("\"device\":\"sim\",\"machine\":\"hgx-h200, profile ideal\""), "{text}");
        assert_eq!(RunRecord::parse(text.as_bytes()).unwrap().start, start);
    }

    #[test]
    fn a_cut_last_line_is_left_out_wherever_it_is_cut() {
        let mut record = sample(2);
        record.end = None;
        record.events.clear();
        record.chunks[1].prompt = "a café by the sea".into();
        let text = record_text(&record);
        let last = text.trim_end().rfind('\n').unwrap() + 1;
        for cut in last + 1..text.len() - 1 {
            let back = RunRecord::parse(&text.as_bytes()[..cut]).unwrap();
            assert!(back.truncated && back.chunks.len() == 1, "cut at {cut}");
            assert_eq!(back.status(), RunStatus::Running);
        }
        // Only the newline is missing: the line is complete.
        let back = RunRecord::parse(&text.as_bytes()[..text.len() - 1]).unwrap();
        assert!(!back.truncated && back.chunks.len() == 2);
    }

    #[test]
    fn rejects_other_files() {
        let text = record_text(&sample(1));
        let id = |bytes: &[u8]| RunRecord::parse(bytes).unwrap_err().code.id;
        assert_eq!(id(b""), "T0901");
        assert_eq!(id(b"{}\n"), "T0901");
        assert_eq!(id(text.split_once('\n').unwrap().1.as_bytes()), "T0901");
        assert_eq!(id(text.replacen("\"schema\":2", "\"schema\":3", 1).as_bytes()), "T0901");
        let old = text.replacen("\"schema\":2", "\"schema\":1", 1);
        let refused = RunRecord::parse(old.as_bytes()).unwrap_err();
        assert_eq!((refused.code, refused.labels[0].message.as_str()), (&T0901, "schema 1"));
        assert_eq!(id(text.replacen("\"kind\":\"chunk\"", "\"kind\":\"crumb\"", 1).as_bytes()), "T0902");
        assert_eq!(id(format!("{text}{text}").as_bytes()), "T0902");
    }

    #[test]
    fn a_long_run_keeps_its_beginning_and_its_end() {
        let record = sample(100);
        let mut reader = RecordReader::new(11);
        for line in record_text(&record).split_inclusive('\n') {
            reader.push_line(line.as_bytes()).unwrap();
        }
        let back = reader.into_record().unwrap();
        let kept: Vec<u32> = back.chunks.iter().map(|c| c.chunk).collect();
        assert_eq!(kept, [0, 1, 2, 3, 4, 5, 95, 96, 97, 98, 99]);
        assert_eq!(back.omitted, OmittedChunks { chunks: 89, frames: 89 * 12 });
        assert_eq!((back.chunk_count(), back.frame_count()), (100, 1200));
        assert_eq!(back.end, record.end);
    }

    #[test]
    fn rates_that_json_cannot_represent_become_zero() {
        let mut record = sample(1);
        record.start.fps = f64::INFINITY;
        let back = RunRecord::parse(record_text(&record).as_bytes()).unwrap();
        assert_eq!(back.start.fps, 0.0);
    }
}
