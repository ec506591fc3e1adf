//! `flight/rank-N.jsonl`: the last things that one rank did, as a ring of JSON lines of one width.
//!
//! A line is written where it belongs the moment something happens, so the file is whole after a kill and can be read
//! while the run goes on; it never grows. A collective has one line, which is written again as its state changes. Every
//! line ends with a check of its own text, so a reader that comes in the middle of a write knows it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostic};

use crate::record::{Record, Waits};

/// Schema number of [`Header`].
pub const SCHEMA: u32 = 1;
/// Bytes of the header line, newline included.
pub const HEADER_BYTES: usize = 640;
/// Bytes of every other line, newline included.
pub const LINE_BYTES: usize = 384;
/// Lines of the ring.
pub const LINES: u64 = 4096;
/// Longest list of ranks that is written; a longer one is left out and found in the plan.
const RANKS_BYTES: usize = 48;
/// `,"x":"01234567"}` and the newline.
const TAIL_BYTES: usize = 17;

/// Not a flight record.
pub static T0905: Code = Code {
    id: "T0905",
    title: "file is no flight record",
    page: "A flight record is flight/rank-N.jsonl in a run's folder: a header line with a schema number, then at most 4,096 \
lines of one width. This file begins otherwise, or a newer tessera wrote it. It is left out, and its rank counts as one \
without a record: an autopsy says what can be known from the others.\n\nA rank that died before it joined the run leaves no \
file; a file that is empty was made and never written, which a full disk does.",
};

/// The first line: whose record it is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Header {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Always `flight`.
    pub kind: String,
    /// The rank.
    pub rank: u32,
    /// Ranks of the run.
    pub world: u32,
    /// Session of the run, hex.
    pub session: String,
    /// Digest of the sealed plan, hex.
    pub plan: String,
    /// Mesh, such as `tp=2,pp=1`.
    pub mesh: String,
    /// Role in the plan.
    pub role: String,
    /// Process id.
    pub pid: u32,
    /// When the process started, in the system's own ticks: tells it from a later process of the same number.
    pub started: u64,
    /// Name of the host.
    pub host: String,
    /// Instant of opening, in nanoseconds on the monotonic clock that all other instants are on.
    pub mono_ns: u64,
    /// The same instant in nanoseconds since 1970.
    pub wall_ns: u64,
    /// Version of tessera that wrote it.
    pub tessera: String,
}

/// One line of the ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Number of the line since the beginning; its place in the ring is the remainder by [`LINES`].
    pub n: u64,
    /// When it happened, or began, in nanoseconds on the rank's monotonic clock.
    pub at_ns: u64,
    /// What.
    #[serde(flatten)]
    pub entry: Entry,
}

/// What a line tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Entry {
    /// A collective of a call.
    Collective(Collective),
    /// A phase of a call.
    Phase(Phase),
    /// A step in the rank's life.
    Mark(Mark),
}

/// A collective as this rank issued it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Collective {
    /// How far it came.
    pub state: State,
    /// The call.
    pub call: u64,
    /// The chunk.
    pub chunk: u32,
    /// Epoch of the caches.
    pub epoch: u32,
    /// Program of the phase.
    pub phase: String,
    /// Which phase of the call, from 0.
    pub step: u32,
    /// Position in the phase's sequence on this rank, from 0.
    pub pos: u32,
    /// Length of that sequence in the plan.
    pub of: u32,
    /// Group, such as `tp`.
    pub group: String,
    /// Its members as [`write_ranks`] writes them; of a transfer the sender and the receiver, in ascending order.
    pub ranks: String,
    /// Op, such as `all_reduce`.
    pub op: String,
    /// Element type and local extents, such as `f32[4, 8]`.
    #[serde(rename = "type")]
    pub ty: String,
    /// Reduction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduction: Option<String>,
    /// World rank of the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<u32>,
    /// World rank on the other side of a send or receive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<u32>,
    /// Whether the device began it, where a backend can tell.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub started: bool,
    /// Index of the op in the rank's program.
    pub index: u32,
    /// How it compares with the sealed plan.
    pub plan: Fit,
    /// The plan's line, where it is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wants: Option<String>,
    /// When it was complete on this rank; 0 before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub end_ns: u64,
    /// Of its time, what the host spent waiting for it, in nanoseconds: what no other work of this rank hid.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub exposed_ns: u64,
}

/// State of a collective on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Handed over; the host goes on.
    #[default]
    Issued,
    /// The host waits for it.
    Waiting,
    /// Complete on this rank.
    Done,
    /// Not issued, because the plan does not hold it here.
    Refused,
}

/// A collective against the plan's line at its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// The same line, from the same op.
    Yes,
    /// The same line, from another op: something before it is not as sealed.
    Moved,
    /// Another line, or none.
    No,
    /// There was nothing to compare with.
    #[default]
    Unknown,
}

/// A phase as this rank ran it. Written when it begins and again when it ends.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Phase {
    /// The call.
    pub call: u64,
    /// The chunk.
    pub chunk: u32,
    /// Epoch of the caches.
    pub epoch: u32,
    /// Program.
    pub phase: String,
    /// Which phase of the call, from 0.
    pub step: u32,
    /// Collectives issued; known at the end.
    pub issued: u32,
    /// Collectives in the plan.
    pub of: u32,
    /// When it ended; 0 before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub end_ns: u64,
    /// The first line of the plan that was not issued, where the phase ended without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wants: Option<String>,
}

/// A step in the rank's life.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Mark {
    /// `joined`, `hello`, `called`, `ready`, `commit`, `done`, `failed` or `exit`; others are passed over.
    pub mark: String,
    /// The call, where it is of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<u64>,
    /// The rank that a failure is said to have begun at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<u32>,
    /// Id of the failure's code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Class of the failure, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// Whether the failure is another rank's, told on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub echo: bool,
    /// Exit status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<i32>,
    /// The rest, in words; cut to what a line holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

impl Header {
    /// The header line.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut own = self.clone();
        for text in [&mut own.host, &mut own.role, &mut own.mesh] {
            cut(text, 80);
        }
        framed(serde_json::to_vec(&own).unwrap_or_default(), HEADER_BYTES)
            .unwrap_or_else(|_| vec![b' '; HEADER_BYTES])
    }
}

/// Where a line stands in the file, in bytes from its beginning.
#[must_use]
pub const fn offset(n: u64) -> u64 {
    HEADER_BYTES as u64 + (n % LINES) * LINE_BYTES as u64
}

/// A line of [`LINE_BYTES`]. Text that is too long for it is cut.
#[must_use]
pub fn to_bytes(n: u64, at_ns: u64, entry: &Entry) -> Vec<u8> {
    #[derive(Serialize)]
    struct Written<'a> {
        n: u64,
        at_ns: u64,
        #[serde(flatten)]
        entry: &'a Entry,
    }
    // Strings and numbers only: nothing that can fail.
    let json = |entry: &Entry| serde_json::to_vec(&Written { n, at_ns, entry }).unwrap_or_default();
    let over = match framed(json(entry), LINE_BYTES) {
        Ok(line) => return line,
        Err(over) => over,
    };
    let mut short = entry.clone();
    // An escape takes several bytes for one, so a text may still be too long after the first cut.
    for over in [Some(over), None] {
        shorten(&mut short, over);
        if let Ok(line) = framed(json(&short), LINE_BYTES) {
            return line;
        }
    }
    let plain = Entry::Mark(Mark { mark: "too_long".to_string(), ..Mark::default() });
    framed(json(&plain), LINE_BYTES).unwrap_or_else(|_| vec![b' '; LINE_BYTES])
}

/// Puts what ranks waited for collectives by their flight records into a run's record, where that does not say.
pub fn tell_waits(record: &mut Record, flights: &[Flight]) {
    for chunk in &mut record.chunks {
        for rank in &mut chunk.ranks {
            let Some(flight) = flights.iter().find(|f| f.header.rank == rank.rank) else { continue };
            let mut waits = flight.waits(chunk.call_id);
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

/// A record, read back.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Flight {
    /// Whose.
    pub header: Header,
    /// What is left of it, oldest first.
    pub lines: Vec<Line>,
    /// Lines that were being written, are cut, or of a kind that this build does not know.
    pub torn: usize,
    /// Lines that the ring has written over.
    pub lost: u64,
}

impl Flight {
    /// Reads a whole file, which may be cut anywhere after its header.
    ///
    /// # Errors
    /// [`T0905`]; `name` stands in it.
    pub fn parse(name: &str, file: &[u8]) -> Result<Flight, Diagnostic> {
        let mut texts = file.split(|b| *b == b'\n').map(trimmed);
        let first = texts.next().unwrap_or_default();
        let refuse =
            |says: String| Diagnostic::error(&T0905, format!("{name} is no flight record")).at(name, says);
        let header: Header = match unframed(first).map(serde_json::from_slice) {
            Some(Ok(header)) => header,
            _ if file.is_empty() => return Err(refuse("it is empty".to_string())),
            Some(Err(e)) => return Err(refuse(e.to_string())),
            None => return Err(refuse("its first line is not whole".to_string())),
        };
        if header.schema != SCHEMA || header.kind != "flight" {
            return Err(refuse(format!("kind \"{}\", schema {}", header.kind, header.schema))
                .note(format!("this build reads schema {SCHEMA}")));
        }
        let mut flight = Flight { header, ..Flight::default() };
        for text in texts.filter(|t| !t.is_empty()) {
            match unframed(text).map(serde_json::from_slice) {
                Some(Ok(line)) => flight.lines.push(line),
                _ => flight.torn += 1,
            }
        }
        flight.lines.sort_by_key(|l: &Line| l.n);
        flight.lost = flight.lines.first().map_or(0, |l| l.n);
        Ok(flight)
    }

    /// What each phase of a call waited for collectives, by its step: see [`Collective::exposed_ns`]. Waits count from the
    /// phase's own begin, and a phase of which the ring has lost a part has none.
    #[must_use]
    pub fn waits(&self, call: u64) -> BTreeMap<u32, Waits> {
        let mut out = BTreeMap::new();
        for line in &self.lines {
            let Entry::Phase(p) = &line.entry else { continue };
            if p.call != call || p.end_ns <= line.at_ns {
                continue;
            }
            let own = self.lines.iter().filter_map(|l| match &l.entry {
                Entry::Collective(c) if (c.call, c.step) == (call, p.step) && c.state == State::Done => {
                    Some((c.end_ns.saturating_sub(c.exposed_ns).max(l.at_ns), c.end_ns))
                }
                _ => None,
            });
            let mut own: Vec<(u64, u64)> = own.collect();
            if own.len() != p.of as usize {
                continue;
            }
            own.sort_unstable();
            // What lies between two waits was work.
            let ends = own.iter().map(|(_, end)| *end);
            let begins = own.iter().map(|(begin, _)| *begin).chain([p.end_ns]);
            let work = [line.at_ns].into_iter().chain(ends).zip(begins);
            let from_begin = |at: u64| at.saturating_sub(line.at_ns);
            let work = work.map(|(from, to)| (from_begin(from), from_begin(to)));
            out.insert(p.step, Waits::around(0, p.end_ns - line.at_ns, work));
        }
        out
    }

    /// The last instant of which it tells; that of its opening where it is empty.
    #[must_use]
    pub fn last_ns(&self) -> u64 {
        self.lines.iter().map(Line::last_ns).max().unwrap_or(self.header.mono_ns)
    }
}

impl Line {
    /// When it was last written.
    #[must_use]
    pub fn last_ns(&self) -> u64 {
        match &self.entry {
            Entry::Collective(c) => self.at_ns.max(c.end_ns),
            Entry::Phase(p) => self.at_ns.max(p.end_ns),
            Entry::Mark(_) => self.at_ns,
        }
    }
}

/// Ranks, ascending, as short as they can be said: `0-3`, `0-6:2` for every second one, `1,5,6`. Empty where even that
/// is too long for a line.
#[must_use]
pub fn write_ranks(ranks: &[u32]) -> String {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < ranks.len() {
        let stride = ranks.get(at + 1).map_or(0, |next| next - ranks[at]);
        let mut end = at;
        while stride > 0 && ranks.get(end + 1).is_some_and(|next| next - ranks[end] == stride) {
            end += 1;
        }
        match (end - at, stride) {
            (0, _) => parts.push(ranks[at].to_string()),
            // Two that are apart are no series yet.
            (1, s) if s > 1 => {
                end = at;
                parts.push(ranks[at].to_string());
            }
            (_, 1) => parts.push(format!("{}-{}", ranks[at], ranks[end])),
            (_, s) => parts.push(format!("{}-{}:{s}", ranks[at], ranks[end])),
        }
        at = end + 1;
    }
    Some(parts.join(",")).filter(|t| t.len() <= RANKS_BYTES).unwrap_or_default()
}

/// Reads what [`write_ranks`] wrote; nothing where it is something else or names more ranks than a run can have.
#[must_use]
pub fn read_ranks(text: &str) -> Vec<u32> {
    const MOST: u32 = 65_536;
    let part = |part: &str| -> Option<Vec<u32>> {
        let (range, stride) = match part.split_once(':') {
            Some((range, s)) => (range, s.parse().ok().filter(|s| *s > 0)?),
            None => (part, 1),
        };
        let (from, to): (u32, u32) = match range.split_once('-') {
            Some((a, b)) => (a.parse().ok()?, b.parse().ok()?),
            None => (range.parse().ok()?, range.parse().ok()?),
        };
        (to < MOST && from <= to).then(|| (from..=to).step_by(stride).collect())
    };
    text.split(',').map(part).collect::<Option<Vec<_>>>().map(|p| p.concat()).unwrap_or_default()
}

/// Closes a JSON object with its check and fills it up to a width; how much too long it is where it does not fit.
fn framed(mut json: Vec<u8>, width: usize) -> Result<Vec<u8>, usize> {
    json.pop();
    let room = width - TAIL_BYTES;
    if json.len() > room {
        return Err(json.len() - room);
    }
    let tail = format!(",\"x\":\"{:08x}\"}}", check(&json));
    json.extend_from_slice(tail.as_bytes());
    json.resize(width - 1, b' ');
    json.push(b'\n');
    Ok(json)
}

/// The JSON object of a line whose check holds. The check stays in it as one more field.
fn unframed(line: &[u8]) -> Option<&[u8]> {
    let at = line.len().checked_sub(TAIL_BYTES - 1)?;
    let (json, tail) = line.split_at(at);
    let hex = tail.strip_prefix(b",\"x\":\"")?.strip_suffix(b"\"}")?;
    let said = u32::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?;
    (said == check(json)).then_some(line)
}

/// Without padding, and without what a part of a file has that was never written.
fn trimmed(line: &[u8]) -> &[u8] {
    let empty = |b: &u8| *b == b' ' || *b == 0 || *b == b'\r';
    let from = line.iter().position(|b| !empty(b)).unwrap_or(line.len());
    let to = line.iter().rposition(|b| !empty(b)).map_or(from, |p| p + 1);
    &line[from..to]
}

/// FNV-1a: a few bytes that were not written yet are all it must notice.
fn check(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |h, b| (h ^ u32::from(*b)).wrapping_mul(0x0100_0193))
}

/// Takes `over` bytes from the longest texts, or all of them.
fn shorten(entry: &mut Entry, over: Option<usize>) {
    let mut texts: Vec<&mut String> = match entry {
        Entry::Collective(c) => c.wants.iter_mut().chain([&mut c.ty, &mut c.ranks, &mut c.phase]).collect(),
        Entry::Phase(p) => p.wants.iter_mut().chain([&mut p.phase]).collect(),
        Entry::Mark(m) => m.text.iter_mut().chain(&mut m.class).collect(),
    };
    let Some(mut over) = over else {
        for text in texts {
            *text = text.replace(char::is_control, " ");
            cut(text, 24);
        }
        return;
    };
    for text in &mut texts {
        // The mark of a cut takes three bytes.
        let keep = text.len().saturating_sub(over + 3).max(24);
        let before = text.len();
        cut(text, keep);
        over = over.saturating_sub(before - text.len());
    }
}

/// At most `keep` bytes and a mark that something is gone.
fn cut(text: &mut String, keep: usize) {
    if text.len() > keep + 3 {
        let end = (0..=keep).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Share of the time of collectives that other work of their rank hid: of the rank where it is least, over all that are
/// complete in these records. The overlap ratio; [`crate::overlap::score`] is another measure.
#[must_use]
pub fn overlap_ratio(flights: &[Flight]) -> Option<f64> {
    let ratio = |f: &Flight| {
        let (mut all_ns, mut exposed_ns) = (0u64, 0u64);
        for line in &f.lines {
            if let Entry::Collective(c) = &line.entry
                && c.state == State::Done
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            schema: SCHEMA,
            kind: "flight".into(),
            rank: 1,
            world: 2,
            session: "00000000000000ff".into(),
            plan: "a".repeat(64),
            mesh: "tp=2".into(),
            role: "stage0".into(),
            pid: 77,
            started: 12,
            host: "node-7".into(),
            mono_ns: u64::MAX / 2,
            wall_ns: u64::MAX / 2,
            tessera: "0.1.0".into(),
        }
    }

    fn collective(pos: u32) -> Entry {
        Entry::Collective(Collective {
            state: State::Done,
            call: 1_000_000,
            chunk: 999_999,
            epoch: 12,
            phase: "denoise.fill3".into(),
            step: 3,
            pos,
            of: 48,
            group: "tp".into(),
            ranks: "0-56:8".into(),
            op: "reduce_scatter".into(),
            ty: "bf16[32760, 5120]".into(),
            reduction: Some("sum".into()),
            index: 12_345,
            plan: Fit::Yes,
            end_ns: 1_795_219_200_000_000_000,
            exposed_ns: 12_345_678,
            ..Collective::default()
        })
    }

    #[test]
    fn a_phase_waited_as_long_as_its_collectives_were_in_the_open() {
        let meeting = |pos, at_ns, end_ns, exposed_ns| Line {
            n: u64::from(pos),
            at_ns,
            entry: Entry::Collective(Collective {
                state: State::Done,
                call: 4,
                step: 0,
                pos,
                end_ns,
                exposed_ns,
                ..Collective::default()
            }),
        };
        let phase = |of| Line {
            n: 9,
            at_ns: 50_000,
            entry: Entry::Phase(Phase { call: 4, of, end_ns: 51_000, ..Phase::default() }),
        };
        // Hidden, half hidden, and waited for from its issue on.
        let own =
            [meeting(0, 50_100, 50_200, 0), meeting(1, 50_300, 50_500, 100), meeting(2, 50_600, 50_900, 300)];
        let flight = |of, lines: &[Line]| Flight {
            header: Header { rank: 1, ..header() },
            lines: lines.iter().cloned().chain([phase(of)]).collect(),
            ..Flight::default()
        };
        let whole = flight(3, &own);
        let waits = Waits { ns: 400, longest: vec![(400, 500), (600, 900)] };
        assert_eq!(whole.waits(4), BTreeMap::from([(0, waits)]));
        assert!(whole.waits(5).is_empty() && flight(3, &own[1..]).waits(4).is_empty(), "the ring lost one");
        // In the record they stand where the phase stands there.
        let mut record = crate::timeline::tests::sample(4);
        let before = record.clone();
        tell_waits(&mut record, &[whole]);
        let phases = &record.chunks[3].ranks[1].phases;
        let start_ns = phases[0].start_ns;
        let told = Waits {
            ns: 400,
            longest: vec![(start_ns + 400, start_ns + 500), (start_ns + 600, start_ns + 900)],
        };
        assert_eq!((phases[0].waits.as_ref(), &phases[1].waits), (Some(&told), &None));
        record.chunks[3].ranks[1].phases[0].waits = None;
        assert_eq!(record, before, "nothing else is known");
    }

    fn file(lines: u64) -> Vec<u8> {
        let mut out = header().to_bytes();
        for n in 0..lines {
            let (at, line) =
                (offset(n) as usize, to_bytes(n, 1_795_219_200_000_000_000, &collective(n as u32)));
            assert_eq!(line.len(), LINE_BYTES);
            if out.len() < at + LINE_BYTES {
                out.resize(at + LINE_BYTES, 0);
            }
            out[at..at + LINE_BYTES].copy_from_slice(&line);
        }
        out
    }

    #[test]
    fn reads_what_it_wrote_and_never_grows() {
        let flight = Flight::parse("f", &file(3)).unwrap();
        assert_eq!((flight.header, flight.lines.len(), flight.torn, flight.lost), (header(), 3, 0, 0));
        assert_eq!(flight.lines[2].entry, collective(2));
        let long = file(2 * LINES + 5);
        assert_eq!(long.len() as u64, offset(LINES - 1) + LINE_BYTES as u64);
        let flight = Flight::parse("f", &long).unwrap();
        assert_eq!((flight.lines.len() as u64, flight.lost), (LINES, LINES + 5));
        assert!(flight.lines.windows(2).all(|w| w[0].n + 1 == w[1].n));
    }

    #[test]
    fn a_file_cut_anywhere_keeps_what_is_whole() {
        let whole = file(4);
        for len in HEADER_BYTES..whole.len() {
            let flight = Flight::parse("f", &whole[..len]).unwrap();
            let lines = (len - HEADER_BYTES) / LINE_BYTES;
            assert!(flight.lines.len() == lines || flight.lines.len() == lines + 1, "{len}");
        }
        for len in 0..600 {
            let cut = Flight::parse("f", &whole[..len]);
            assert!(cut.as_ref().is_ok_and(|f| f.lines.is_empty()) || cut.is_err_and(|d| d.code == &T0905));
        }
    }

    #[test]
    fn half_a_write_and_holes_are_passed_over() {
        let mut bytes = file(4);
        let other = to_bytes(1, 5, &Entry::Mark(Mark { mark: "exit".into(), ..Mark::default() }));
        let at = offset(1) as usize;
        bytes[at..at + 40].copy_from_slice(&other[..40]);
        bytes[offset(2) as usize..][..LINE_BYTES].fill(0);
        let flight = Flight::parse("f", &bytes).unwrap();
        assert_eq!(flight.lines.iter().map(|l| l.n).collect::<Vec<_>>(), [0, 3]);
        assert_eq!(flight.torn, 1);
    }

    #[test]
    fn what_is_too_long_is_cut_and_stays_readable() {
        let text = "é\"\n\u{1}".repeat(400);
        let mark = Mark { mark: "failed".into(), text: Some(text.clone()), ..Mark::default() };
        let phase = Phase { phase: text.clone(), wants: Some(text.clone()), ..Phase::default() };
        let call =
            Collective { phase: text.clone(), ty: text.clone(), wants: Some(text), ..Collective::default() };
        for entry in [Entry::Mark(mark), Entry::Phase(phase), Entry::Collective(call)] {
            let line = to_bytes(u64::MAX, u64::MAX, &entry);
            assert_eq!(line.len(), LINE_BYTES);
            let bytes = [header().to_bytes(), line].concat();
            let flight = Flight::parse("f", &bytes).unwrap();
            assert_eq!(flight.lines.len(), 1);
            assert!(!matches!(&flight.lines[0].entry, Entry::Mark(m) if m.mark == "too_long"));
        }
    }

    #[test]
    fn other_files_are_refused() {
        for text in ["", "{}\n", "{\"kind\":\"start\"}\n", "\0\0\0"] {
            assert_eq!(Flight::parse("f", text.as_bytes()).unwrap_err().code, &T0905);
        }
        let newer = Header { schema: 2, ..header() };
        assert_eq!(Flight::parse("f", &newer.to_bytes()).unwrap_err().code, &T0905);
        let long = Header { host: "\u{1}".repeat(300), role: "é".repeat(300), ..header() };
        assert_eq!(long.to_bytes().len(), HEADER_BYTES);
    }

    #[test]
    fn ranks_are_short_and_read_back() {
        for (ranks, text) in [
            (vec![], ""),
            (vec![3], "3"),
            (vec![0, 1, 2, 3], "0-3"),
            (vec![1, 3], "1,3"),
            (vec![0, 8, 16, 24], "0-24:8"),
            (vec![0, 1, 4, 5, 8], "0-1,4-5,8"),
        ] {
            assert_eq!(write_ranks(&ranks), text);
            assert_eq!(read_ranks(text), ranks);
        }
        let odd: Vec<u32> = (0..60).map(|i| i * i * 100).collect();
        assert_eq!(write_ranks(&odd), "");
        for bad in ["x", "3-1", "0-99999999", "1:0", "-", "0-4:0"] {
            assert_eq!(read_ranks(bad), Vec::<u32>::new(), "{bad}");
        }
    }
}
