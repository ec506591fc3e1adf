//! Splits a compile trace into lines: headers of records, and lines of their payloads.

use std::io::{self, BufRead, Read};

use serde_json::Value;

use super::compile_id::CompileId;

/// Maximum bytes of a line. Longer ones are skipped: no record that the analysis reads is as long.
const MAX_LINE_BYTES: u64 = 16 << 20;
/// Maximum characters of a text that a report quotes.
const MAX_TEXT_CHARS: usize = 300;

/// A line of a log.
#[derive(Debug)]
pub(crate) enum TraceLine<'a> {
    /// The header of a record.
    Header(Header),
    /// A line of the payload, without the TAB.
    Payload(&'a str),
    /// A line that is neither, or is too long.
    Strange,
}

/// The header of a record: its time and a JSON object.
#[derive(Debug)]
pub(crate) struct Header {
    /// Seconds since the start of the year, which a log does not name.
    pub(crate) seconds: f64,
    value: Value,
}

/// Reads the lines of a log one at a time.
#[derive(Debug)]
pub(crate) struct LineReader<R> {
    reader: R,
    buffer: Vec<u8>,
    text: String,
    /// Whether the log ends within a line.
    pub(crate) is_cut: bool,
}

impl<R: BufRead> LineReader<R> {
    pub(crate) fn new(reader: R) -> LineReader<R> {
        LineReader { reader, buffer: Vec::new(), text: String::new(), is_cut: false }
    }

    /// Returns the next line, or `None` at the end.
    pub(crate) fn read_line(&mut self) -> io::Result<Option<TraceLine<'_>>> {
        self.buffer.clear();
        let read = self.reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut self.buffer)?;
        if read == 0 {
            return Ok(None);
        }
        if self.buffer.pop_if(|b| *b == b'\n').is_none() {
            let mut rest = read as u64 == MAX_LINE_BYTES;
            self.is_cut = !rest;
            while rest {
                self.buffer.clear();
                let read = self.reader.by_ref().take(1 << 16).read_until(b'\n', &mut self.buffer)?;
                self.is_cut = read == 0;
                rest = read > 0 && self.buffer.last() != Some(&b'\n');
            }
            if !self.is_cut {
                return Ok(Some(TraceLine::Strange));
            }
        }
        if let Some(payload) = self.buffer.strip_prefix(b"\t") {
            self.text = String::from_utf8_lossy(payload).into_owned();
            return Ok(Some(TraceLine::Payload(&self.text)));
        }
        Ok(Some(Header::from_line(&self.buffer).map_or(TraceLine::Strange, TraceLine::Header)))
    }
}

impl Header {
    /// Reads `V1123 22:11:05.888000 968 torch/_inductor/graph.py:25] {…}`.
    fn from_line(line: &[u8]) -> Option<Header> {
        let at = line.windows(3).position(|w| w == b"] {")?;
        let prefix = std::str::from_utf8(&line[..at]).ok()?;
        let value: Value = serde_json::from_slice(&line[at + 2..]).ok()?;
        let seconds = read_time(prefix)?;
        value.is_object().then_some(Header { seconds, value })
    }

    /// Returns the value of a key that names a record, such as `dynamo_start`.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.value.get(key)
    }

    /// Returns the keys of the object.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.value.as_object().into_iter().flat_map(|o| o.keys().map(String::as_str))
    }

    /// Returns a small number of the context, such as `rank`.
    pub(crate) fn number(&self, key: &str) -> Option<u32> {
        self.value.get(key)?.as_u64()?.try_into().ok()
    }

    /// Returns the compile that the record belongs to, or `None` outside of one.
    pub(crate) fn compile_id(&self) -> Option<CompileId> {
        let id = CompileId {
            autograd: self.number("compiled_autograd_id"),
            frame: self.number("frame_id"),
            compile: self.number("frame_compile_id"),
        };
        (id != CompileId::default()).then_some(id)
    }
}

/// Reads the time of `V1123 22:11:05.888000 …`: seconds since the start of a year.
fn read_time(prefix: &str) -> Option<f64> {
    const DAYS_BEFORE: [u32; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let mut words = prefix.split_ascii_whitespace();
    let date = words.next().filter(|w| w.len() == 5)?.get(1..)?;
    let month: usize = date.get(..2)?.parse().ok()?;
    let day: u32 = date.get(2..)?.parse().ok()?;
    let mut clock = words.next()?.split(':');
    let (hours, minutes): (u32, u32) = (clock.next()?.parse().ok()?, clock.next()?.parse().ok()?);
    let seconds: f64 = clock.next()?.parse().ok()?;
    let days = DAYS_BEFORE.get(month.checked_sub(1)?)? + day.min(31);
    let whole = (days * 24 + hours.min(24)) * 3600 + minutes.min(60) * 60;
    seconds.is_finite().then_some(f64::from(whole) + seconds)
}

/// Returns a text as a report quotes it: one line of limited length without control characters.
pub(crate) fn quote_line(text: &str) -> String {
    let cut = text.chars().nth(MAX_TEXT_CHARS).map_or("", |_| "…");
    let shown = text.chars().take(MAX_TEXT_CHARS).map(|c| if c.is_control() { ' ' } else { c });
    shown.collect::<String>().trim().to_string() + cut
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_end_marks_the_log_as_cut_and_a_long_line_is_skipped() {
        let mut reader = LineReader::new(&b"V1123 22:11:05.5 9 a.py:1] {\"rank\": 3}\n\tpay\nV11"[..]);
        let Some(TraceLine::Header(header)) = reader.read_line().unwrap() else { unreachable!() };
        assert_eq!(header.number("rank"), Some(3));
        assert!(matches!(reader.read_line().unwrap(), Some(TraceLine::Payload("pay"))));
        assert!(matches!(reader.read_line().unwrap(), Some(TraceLine::Strange)));
        assert!(reader.is_cut && reader.read_line().unwrap().is_none());

        let mut long = vec![b'x'; MAX_LINE_BYTES as usize + 3];
        long.extend_from_slice(b"\n\tnext\n");
        let mut reader = LineReader::new(&long[..]);
        assert!(matches!(reader.read_line().unwrap(), Some(TraceLine::Strange)));
        assert!(matches!(reader.read_line().unwrap(), Some(TraceLine::Payload("next"))));
        assert!(!reader.is_cut);
    }

    #[test]
    fn times_count_from_the_start_of_the_year() {
        assert_eq!(read_time("V0101 00:00:01.5 9 a.py:1"), Some(86401.5));
        assert_eq!(read_time("V1301 00:00:01.5 9 a.py:1"), None);
        assert_eq!(read_time("warning"), None);
    }
}
