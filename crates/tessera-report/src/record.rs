//! `record.jsonl`: what a run did, one JSON object a line, so that a run that dies still leaves every line
//! before the last.
//!
//! The first line is [`Line::Start`] and names the schema. Fields keep the order they have here. Instants are
//! nanoseconds since the run's start on one clock; the driver maps each rank's clock onto it. Fields are
//! added with a default, which keeps the schema number; anything else raises it.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize, Serializer};
use tessera_base::{Code, Diagnostic};

/// Schema number that [`Line::to_json`] writes and [`Record::parse`] reads.
pub const SCHEMA: u32 = 1;

/// Not a record, or one of another schema.
pub static T0901: Code = Code {
    id: "T0901",
    title: "the record does not begin with a start line of a known schema",
    page: "A record.jsonl begins with one line whose kind is \"start\" and whose schema is a number this build \
knows. Everything after it is read by that schema, so a file that begins otherwise is not guessed at.\n\n\
An empty file means that the run died before it wrote anything: look at the leader's log. A higher schema \
means that a newer tessera wrote it: read it with that one (its version is in the first line). If the first \
line is missing because the file was cut or joined by hand, put it back.",
};

/// A line in the middle does not parse.
pub static T0902: Code = Code {
    id: "T0902",
    title: "a line of the record cannot be read",
    page: "Every line of record.jsonl is one JSON object with a known kind. Only the last line may be cut short, \
because a run that is killed may die while it writes; a broken line before that means that something else \
wrote to the file, two runs shared one folder, or the disk lost data.\n\n\
Give each run its own --out folder. To look at what is left, delete the named line; the rest stays readable.",
};

/// One line of the record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Line {
    /// The first line: what was asked.
    Start(Start),
    /// One chunk came out.
    Chunk(Chunk),
    /// Something happened that a reader should see.
    Event(Event),
    /// The last line: how it ended.
    End(End),
}

impl Line {
    /// The line as it stands in the file, newline included.
    #[must_use]
    pub fn to_json(&self) -> String {
        // The types hold strings, numbers and lists only: no map with odd keys, nothing that can fail.
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }
}

/// What was asked, and of which plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Version of tessera that wrote the record.
    pub tessera: String,
    /// Digest of the sealed plan, hex.
    pub plan: String,
    /// Name of the model.
    pub model: String,
    /// Mesh in words, such as `tp=2,pp=1`.
    pub mesh: String,
    /// Strategy per axis, such as `tp: ulysses`.
    pub strategy: String,
    /// Numerics policy.
    pub numerics: String,
    /// What programs compute in; records of earlier builds do not say, and are of f32.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub dtype: String,
    /// Cache regime: `resident` or `recompute`.
    pub cache: String,
    /// Topology: `mesh`, `pp0` or `pp1`.
    pub topology: String,
    /// The user's seed.
    pub seed: u64,
    /// Prompts by the chunk from which they hold; the first is for chunk 0.
    pub prompts: Vec<PromptAt>,
    /// Chunks asked for; none for an open end.
    pub chunks: Option<u32>,
    /// Frames a second at which the clip plays.
    #[serde(serialize_with = "milli")]
    pub fps: f64,
    /// Frame width in pixels.
    pub width: u32,
    /// Frame height in pixels.
    pub height: u32,
    /// Denoising steps per chunk.
    pub steps: u32,
    /// The command, one word an entry.
    pub command: Vec<String>,
    /// Wall-clock start as the caller writes it; RFC 3339 is the custom.
    pub started_at: String,
    /// Always [`Status::Running`]: a record without an end line says so itself.
    pub status: Status,
    /// The ranks and what each is for, in order of rank.
    #[serde(default)]
    pub ranks: Vec<RankRole>,
    /// What ran it.
    #[serde(default)]
    pub device: Device,
    /// The machine whose times were modelled, in words; none where time was real.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
}

/// What ran a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// Processors of this machine: numbers and time are real.
    #[default]
    Cpu,
    /// A modelled machine: times alone, no number was computed.
    Sim,
    /// GPUs, one a rank of the mesh.
    Cuda,
}

/// A prompt and the chunk from which it holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptAt {
    /// First chunk that uses it.
    pub chunk: u32,
    /// The prompt.
    pub text: String,
}

/// A rank and its role.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRole {
    /// Rank of the process.
    pub rank: u32,
    /// Role in the plan, such as `stage0`.
    pub role: String,
}

/// State of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Under way, or died before its end line.
    Running,
    /// All that was asked came out.
    Complete,
    /// Stopped by its user.
    Interrupted,
    /// Stopped by a tripwire or an error.
    Failed,
}

/// One chunk of output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Chunk {
    /// Index in the stream, from 0.
    pub chunk: u32,
    /// Which request it serves, from 0; other than its index after a cut that discarded some.
    #[serde(default)]
    pub request: Option<u64>,
    /// Call that made it.
    pub call_id: u64,
    /// Epoch of the caches it ran in.
    pub cache_epoch: u32,
    /// Its first frame in the clip.
    pub start_frame: u64,
    /// Prompt it was made with.
    pub prompt: String,
    /// Seed it was made with.
    pub seed: u64,
    /// Whether a hard cut precedes it.
    pub cut: bool,
    /// Digest of its latents, hex.
    pub latents_digest: String,
    /// Frames it gave.
    pub frames: u32,
    /// When its call was committed, in nanoseconds since the run's start.
    pub start_ns: u64,
    /// From commit to its last frame, in nanoseconds.
    pub wall_ns: u64,
    /// Calls waiting to enter when it was committed.
    pub queue_in: u32,
    /// Results waiting to leave when it was done.
    pub queue_out: u32,
    /// What each rank did, in order of rank.
    pub ranks: Vec<RankChunk>,
    /// How the stages took turns, where the driver tells.
    #[serde(default)]
    pub pipeline: Option<Pipeline>,
}

/// How a chunk went through the two stages of a stream: the leader's own work, and the generator on the mesh.
/// Instants are nanoseconds since the run's start; all of them on the leader's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pipeline {
    /// When the leader had decided the call.
    pub decided_ns: u64,
    /// When the last rank was ready for it.
    pub ready_ns: u64,
    /// When the last rank was done.
    pub done_ns: u64,
    /// From the commit of the chunk before to this one's, in nanoseconds; 0 for the first.
    pub period_ns: u64,
    /// The leader's own work for the chunk, in nanoseconds: context, decode, write.
    pub stage0_ns: u64,
    /// From commit to done, in nanoseconds, less what the leader's own work is known to have held a device of the mesh.
    pub stage1_ns: u64,
    /// How long the mesh had waited when the call was committed, in nanoseconds.
    pub idle_ns: u64,
    /// Time spent on digests by the rank that spent most, in nanoseconds.
    pub digest_ns: u64,
}

impl Pipeline {
    /// See [`crate::overlap::score`].
    #[must_use]
    pub fn score(&self) -> f64 {
        crate::overlap::score(self.stage0_ns, self.stage1_ns, self.period_ns)
    }
}

/// One rank's part of a chunk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankChunk {
    /// Rank of the process.
    pub rank: u32,
    /// Phases in order of their start.
    pub phases: Vec<Phase>,
    /// Digest of the rank's caches after the chunk, hex.
    pub state_digest: String,
    /// Digest of the collectives that it issued, hex.
    pub trace_digest: String,
}

/// One phase on one stream of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Phase {
    /// Name; the part before the first dot is its kind, such as `denoise` of `denoise.1`.
    pub name: String,
    /// Stream it ran on, such as `compute`.
    pub stream: String,
    /// Start in nanoseconds since the run's start.
    pub start_ns: u64,
    /// End, same clock.
    pub end_ns: u64,
    /// Collectives issued in it.
    pub collectives: u32,
    /// When its stream had nothing to do; none where nobody knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<Waits>,
}

/// What of a phase was no work: its stream waited for other ranks, for data on its way, for its host or for its device.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Waits {
    /// All of it together, in nanoseconds.
    pub ns: u64,
    /// The longest waits in order of time, each from when to when, in nanoseconds since the run's start.
    pub longest: Vec<(u64, u64)>,
}

/// A wait shorter than this part of its phase is in the sum alone.
const LONG: u64 = 50;

impl Waits {
    /// What `busy` leaves of a phase. Pieces are from when to when, in any order, and may overlap.
    #[must_use]
    pub fn around(start_ns: u64, end_ns: u64, busy: impl IntoIterator<Item = (u64, u64)>) -> Waits {
        let mut busy: Vec<(u64, u64)> = busy.into_iter().collect();
        busy.sort_unstable();
        let mut out = Waits::default();
        let mut at = start_ns;
        for (from, to) in busy.into_iter().chain([(end_ns, end_ns)]) {
            let from = from.min(end_ns);
            if from > at {
                out.ns += from - at;
                if (from - at).saturating_mul(LONG) >= end_ns - start_ns {
                    out.longest.push((at, from));
                }
            }
            at = at.max(from).max(to);
        }
        out
    }
}

/// Something worth a mark: a prompt change, a cut, a rebase, a stall.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, in nanoseconds since the run's start.
    pub at_ns: u64,
    /// What, in one or two words.
    pub what: String,
    /// The rest, in words.
    pub detail: String,
}

/// How the run ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// Complete, interrupted or failed.
    pub status: Status,
    /// Why it failed.
    #[serde(default)]
    pub cause: Option<Cause>,
    /// Chunks that came out.
    pub chunks: u32,
    /// Frames that came out.
    pub frames: u64,
    /// Length of the run in nanoseconds.
    pub wall_ns: u64,
    /// Frames a second over the whole run.
    #[serde(serialize_with = "milli")]
    pub fps: f64,
    /// Whether the output file holds every frame counted here.
    pub output_complete: bool,
    /// Hash of all latents in order, hex.
    pub golden: String,
}

/// Why a run failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// Failure class, such as `peer lost`.
    pub class: String,
    /// Exit status of that class.
    pub exit_code: u8,
    /// Rank at which it began, where one can be named.
    pub rank: Option<u32>,
    /// Code of the diagnostic, such as `T0712`.
    pub code: Option<String>,
    /// One sentence.
    pub message: String,
}

/// A record, read back.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The first line.
    pub start: Start,
    /// Chunks in the order of the file; of a long run its beginning and its end.
    pub chunks: Vec<Chunk>,
    /// Chunks between those two that were read and not kept.
    pub left_out: LeftOut,
    /// Events in the order of the file.
    pub events: Vec<Event>,
    /// The end line, if the run lived to write it.
    pub end: Option<End>,
    /// Whether the file ended inside a line, which was left out.
    pub truncated: bool,
}

/// Chunks that were read and not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LeftOut {
    /// How many.
    pub chunks: u32,
    /// Frames of them.
    pub frames: u64,
}

impl Record {
    /// Chunks in the file.
    #[must_use]
    pub fn chunk_count(&self) -> u32 {
        self.chunks.len() as u32 + self.left_out.chunks
    }

    /// Frames in the file.
    #[must_use]
    pub fn frame_count(&self) -> u64 {
        self.chunks.iter().map(|c| u64::from(c.frames)).sum::<u64>() + self.left_out.frames
    }

    /// Reads a whole file.
    ///
    /// A last line that has no newline and does not parse is left out and noted in `truncated`; it may end
    /// inside a character, hence the bytes.
    ///
    /// # Errors
    /// [`T0901`] where the first line is no start line of this schema, [`T0902`] for any other broken line.
    pub fn parse(file: &[u8]) -> Result<Record, Diagnostic> {
        let mut reader = Reader::new(usize::MAX);
        for line in file.split_inclusive(|b| *b == b'\n') {
            reader.line(line)?;
        }
        reader.end()
    }

    /// How the run stands: its end line's word, or running where there is none.
    #[must_use]
    pub fn status(&self) -> Status {
        self.end.as_ref().map_or(Status::Running, |e| e.status)
    }
}

/// Reads a record line by line, in bounded memory.
#[derive(Debug)]
pub struct Reader {
    record: Option<Record>,
    /// Most chunks that are kept.
    keep: usize,
    /// The newest chunks, once the older half is kept.
    tail: VecDeque<Chunk>,
    lines: usize,
    bytes: usize,
}

impl Reader {
    /// Keeps at most so many chunks, half of them the first and half the last, and every event and the end.
    #[must_use]
    pub fn new(keep: usize) -> Reader {
        Reader { record: None, keep, tail: VecDeque::new(), lines: 0, bytes: 0 }
    }

    /// Takes the next line with its newline; the last may lack it.
    ///
    /// # Errors
    /// [`T0901`] where the first line is no start line of this schema, [`T0902`] for any other broken line.
    pub fn line(&mut self, line: &[u8]) -> Result<(), Diagnostic> {
        self.bytes += line.len();
        self.lines += 1;
        if line.iter().all(u8::is_ascii_whitespace) {
            return Ok(());
        }
        let whole = line.last() == Some(&b'\n');
        let place = format!("record.jsonl:{}", self.lines);
        let Some(record) = &mut self.record else {
            self.record = Some(Record::open(line.trim_ascii_end(), &place)?);
            return Ok(());
        };
        match serde_json::from_slice(line) {
            Ok(Line::Start(_)) => {
                return Err(Diagnostic::error(&T0902, "a second start line")
                    .at(place, "kind is \"start\"")
                    .at("record.jsonl:1", "the record began here")
                    .hint("give each run its own --out folder"));
            }
            Ok(Line::Chunk(chunk)) if record.chunks.len() < self.keep.div_ceil(2) => {
                record.chunks.push(chunk);
            }
            Ok(Line::Chunk(chunk)) => {
                self.tail.push_back(chunk);
                if self.tail.len() > self.keep / 2
                    && let Some(old) = self.tail.pop_front()
                {
                    record.left_out.chunks += 1;
                    record.left_out.frames += u64::from(old.frames);
                }
            }
            Ok(Line::Event(event)) => record.events.push(event),
            Ok(Line::End(end)) => record.end = Some(end),
            Err(_) if !whole => record.truncated = true,
            Err(error) => {
                return Err(Diagnostic::error(&T0902, "this line of the record cannot be read")
                    .at(place, error.to_string())
                    .hint("delete the line to read the rest"));
            }
        }
        Ok(())
    }

    /// What was read.
    ///
    /// # Errors
    /// [`T0901`] where there was nothing.
    pub fn end(self) -> Result<Record, Diagnostic> {
        let Some(mut record) = self.record else {
            return Err(Diagnostic::error(&T0901, "the record is empty")
                .at("record.jsonl", format!("{} bytes, no start line", self.bytes))
                .hint("the run died before its first line: see the leader's log"));
        };
        record.chunks.extend(self.tail);
        Ok(record)
    }
}

impl Record {
    fn open(line: &[u8], place: &str) -> Result<Record, Diagnostic> {
        #[derive(Deserialize)]
        struct Head {
            kind: String,
            schema: u32,
        }
        let broken = |message: &str, says: String| Diagnostic::error(&T0901, message).at(place, says);
        let head: Head = serde_json::from_slice(line)
            .map_err(|e| broken("the first line is no start line of a record", e.to_string()))?;
        if head.kind != "start" {
            return Err(broken(
                "the first line is no start line of a record",
                format!("kind is \"{}\"", head.kind),
            ));
        }
        if head.schema != SCHEMA {
            return Err(broken("the record has another schema", format!("schema {}", head.schema))
                .at("this build", format!("reads schema {SCHEMA}"))
                .hint("read it with the tessera whose version the first line names"));
        }
        match serde_json::from_slice(line) {
            Ok(Line::Start(start)) => Ok(Record {
                start,
                chunks: Vec::new(),
                left_out: LeftOut::default(),
                events: Vec::new(),
                end: None,
                truncated: false,
            }),
            Ok(_) => Err(broken("the first line is no start line of a record", "another kind".to_string())),
            Err(e) => Err(broken("the first line is no start line of a record", e.to_string())),
        }
    }
}

/// Three decimals: short decimals read back to the same bits, and JSON has no word for infinity.
fn milli<S: Serializer>(x: &f64, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_f64(if x.is_finite() { (x * 1000.0).round() / 1000.0 } else { 0.0 })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::timeline::tests::sample;

    fn lines(r: &Record) -> String {
        let mut out = Line::Start(r.start.clone()).to_json();
        out.extend(r.chunks.iter().map(|c| Line::Chunk(c.clone()).to_json()));
        out.extend(r.events.iter().map(|e| Line::Event(e.clone()).to_json()));
        out.extend(r.end.iter().map(|e| Line::End(e.clone()).to_json()));
        out
    }

    #[test]
    fn reads_what_it_wrote() {
        let record = sample(3);
        let text = lines(&record);
        assert_eq!(text.lines().count(), 6);
        let back = Record::parse(text.as_bytes()).unwrap();
        assert_eq!(back, record);
        assert_eq!(lines(&back), text);
        assert_eq!(back.status(), Status::Complete);
    }

    #[test]
    fn waits_are_what_work_leaves_of_a_phase() {
        let waits = Waits::around(100, 1100, [(500, 600), (100, 300), (250, 490), (600, 1105)]);
        assert_eq!(waits, Waits { ns: 10, longest: Vec::new() }, "too short to be told apart");
        let waits = Waits::around(100, 1100, [(90, 120), (700, 650), (1000, 1050)]);
        assert_eq!(waits, Waits { ns: 930, longest: vec![(120, 700), (700, 1000), (1050, 1100)] });
        assert_eq!(Waits::around(5, 5, []), Waits::default());
        // A record without them is read as before, and written as before.
        let phase: Phase = serde_json::from_str(
            r#"{"name":"a","stream":"compute","start_ns":1,"end_ns":2,"collectives":0}"#,
        )
        .unwrap();
        assert_eq!(phase.waits, None);
        assert!(!serde_json::to_string(&phase).unwrap().contains("waits"));
    }

    #[test]
    fn fields_keep_their_order() {
        let event = Line::Event(Event { at_ns: 5, what: "cut".into(), detail: "a \"hard\" one\n".into() });
        assert_eq!(
            event.to_json(),
            "{\"kind\":\"event\",\"at_ns\":5,\"what\":\"cut\",\"detail\":\"a \\\"hard\\\" one\\n\"}\n"
        );
        let start = Line::Start(sample(0).start).to_json();
        assert!(start.starts_with("{\"kind\":\"start\",\"schema\":1,\"tessera\":\""), "{start}");
    }

    #[test]
    fn a_record_that_names_no_device_is_of_processors() {
        let mut start = sample(0).start;
        let text = Line::Start(start.clone()).to_json().replace(",\"device\":\"cpu\"", "");
        assert!(!text.contains("device") && !text.contains("machine"), "{text}");
        assert_eq!(Record::parse(text.as_bytes()).unwrap().start, start);
        (start.device, start.machine) = (Device::Sim, Some("hgx-h200, profile ideal".into()));
        let text = Line::Start(start.clone()).to_json();
        assert!(text.contains("\"device\":\"sim\",\"machine\":\"hgx-h200, profile ideal\""), "{text}");
        assert_eq!(Record::parse(text.as_bytes()).unwrap().start, start);
    }

    #[test]
    fn a_cut_last_line_is_left_out_wherever_it_is_cut() {
        let mut record = sample(2);
        record.end = None;
        record.events.clear();
        record.chunks[1].prompt = "a café by the sea".into();
        let text = lines(&record);
        let last = text.trim_end().rfind('\n').unwrap() + 1;
        for cut in last + 1..text.len() - 1 {
            let back = Record::parse(&text.as_bytes()[..cut]).unwrap();
            assert!(back.truncated && back.chunks.len() == 1, "cut at {cut}");
            assert_eq!(back.status(), Status::Running);
        }
        // Only the newline is missing: the line is whole.
        let back = Record::parse(&text.as_bytes()[..text.len() - 1]).unwrap();
        assert!(!back.truncated && back.chunks.len() == 2);
    }

    #[test]
    fn refuses_what_is_not_a_record() {
        let text = lines(&sample(1));
        let id = |bytes: &[u8]| Record::parse(bytes).unwrap_err().code.id;
        assert_eq!(id(b""), "T0901");
        assert_eq!(id(b"{}\n"), "T0901");
        assert_eq!(id(text.split_once('\n').unwrap().1.as_bytes()), "T0901");
        assert_eq!(id(text.replacen("\"schema\":1", "\"schema\":2", 1).as_bytes()), "T0901");
        assert_eq!(id(text.replacen("\"kind\":\"chunk\"", "\"kind\":\"crumb\"", 1).as_bytes()), "T0902");
        assert_eq!(id(format!("{text}{text}").as_bytes()), "T0902");
    }

    #[test]
    fn a_long_run_keeps_its_beginning_and_its_end() {
        let record = sample(100);
        let mut reader = Reader::new(11);
        for line in lines(&record).split_inclusive('\n') {
            reader.line(line.as_bytes()).unwrap();
        }
        let back = reader.end().unwrap();
        let kept: Vec<u32> = back.chunks.iter().map(|c| c.chunk).collect();
        assert_eq!(kept, [0, 1, 2, 3, 4, 5, 95, 96, 97, 98, 99]);
        assert_eq!(back.left_out, LeftOut { chunks: 89, frames: 89 * 12 });
        assert_eq!((back.chunk_count(), back.frame_count()), (100, 1200));
        assert_eq!(back.end, record.end);
    }

    #[test]
    fn rates_that_json_cannot_say_become_zero() {
        let mut record = sample(1);
        record.start.fps = f64::INFINITY;
        let back = Record::parse(lines(&record).as_bytes()).unwrap();
        assert_eq!(back.start.fps, 0.0);
    }
}
