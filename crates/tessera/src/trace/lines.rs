//! Lines of a file with their positions, none held longer than it is looked at and none longer than the limit.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Result};
use std::path::Path;

use tessera_base::Span;

use super::MAX_LINE_BYTES;

/// A file, line by line.
pub(super) struct Lines {
    file: BufReader<File>,
    buffer: Vec<u8>,
    at: usize,
}

/// A line.
pub(super) enum Line<'a> {
    /// Without its end. The first loses a byte order mark.
    Whole { bytes: &'a [u8], span: Span },
    /// Passed over.
    TooLong { start: usize, length: usize },
}

const MARK: &[u8] = b"\xef\xbb\xbf";

impl Lines {
    pub(super) fn open(path: &Path) -> Result<Lines> {
        let file = BufReader::with_capacity(1 << 17, File::open(path)?);
        Ok(Lines { file, buffer: Vec::new(), at: 0 })
    }

    /// The next line, `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Line<'_>>> {
        let start = self.at;
        self.buffer.clear();
        // One byte for the end of the line, one that shows that it is too long.
        let read = (&mut self.file).take(MAX_LINE_BYTES as u64 + 2).read_until(b'\n', &mut self.buffer)?;
        if read == 0 {
            return Ok(None);
        }
        self.at += read;
        let ended = self.buffer.last() == Some(&b'\n');
        let mut end = if ended { read - 1 } else { read };
        if end > MAX_LINE_BYTES {
            let mut length = end;
            if !ended {
                length += self.skip()?;
            }
            return Ok(Some(Line::TooLong { start, length }));
        }
        if self.buffer[..end].last() == Some(&b'\r') {
            end -= 1;
        }
        let mark = if start == 0 && self.buffer.starts_with(MARK) { MARK.len().min(end) } else { 0 };
        let span = Span { start: start + mark, end: start + end };
        Ok(Some(Line::Whole { bytes: &self.buffer[mark..end], span }))
    }

    /// Passes over the rest of a line; gives its length.
    fn skip(&mut self) -> Result<usize> {
        let mut length = 0;
        loop {
            let seen = self.file.fill_buf()?;
            let end = seen.iter().position(|b| *b == b'\n');
            let (line, used) = end.map_or((seen.len(), seen.len()), |i| (i, i + 1));
            self.file.consume(used);
            length += line;
            self.at += used;
            if used == 0 || end.is_some() {
                return Ok(length);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_their_places_and_long_ones_are_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let mut text = b"\xef\xbb\xbfab\r\n\nc\n".to_vec();
        text.extend(vec![b'x'; MAX_LINE_BYTES]);
        text.push(b'\n');
        text.extend(vec![b'y'; 3 * MAX_LINE_BYTES + 1]);
        text.extend(b"\nend");
        std::fs::write(&path, &text).unwrap();
        let mut lines = Lines::open(&path).unwrap();
        let mut seen = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            seen.push(match line {
                Line::Whole { bytes, span } => {
                    assert_eq!(&text[span.start..span.end], bytes);
                    (span.start, bytes.len())
                }
                Line::TooLong { start, length } => (start, length),
            });
        }
        let (first, second) = (10, 10 + MAX_LINE_BYTES + 1);
        let end = second + 3 * MAX_LINE_BYTES + 2;
        let expected =
            [(3, 2), (7, 0), (8, 1), (first, MAX_LINE_BYTES), (second, 3 * MAX_LINE_BYTES + 1), (end, 3)];
        assert_eq!(seen, expected);
    }
}
