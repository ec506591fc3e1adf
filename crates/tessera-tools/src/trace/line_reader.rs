//! Reads the lines of a file with their byte positions, one at a time and with a length limit.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Result};
use std::path::Path;

use tessera::files::open_regular_file;
use tessera_base::Span;

use super::MAX_LINE_BYTES;

/// Reads the lines of a file; `offset` is the position of the next line in the file, in bytes.
pub(super) struct LineReader {
    file: BufReader<File>,
    buffer: Vec<u8>,
    offset: usize,
}

/// A line with its position in the file, in bytes.
pub(super) enum TraceLine<'a> {
    /// A line without its line break, and for the first line without a byte order mark.
    Whole { bytes: &'a [u8], span: Span },
    /// A line above the length limit, which was skipped.
    TooLong { start: usize, length: usize },
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

impl LineReader {
    pub(super) fn open(path: &Path) -> Result<LineReader> {
        let file = BufReader::with_capacity(1 << 17, open_regular_file(path)?);
        Ok(LineReader { file, buffer: Vec::new(), offset: 0 })
    }

    /// Reads the next line; `None` at the end of the file.
    pub(super) fn next(&mut self) -> Result<Option<TraceLine<'_>>> {
        let start = self.offset;
        self.buffer.clear();
        // One extra byte for the line break, and one to detect that the line is too long.
        let read = (&mut self.file).take(MAX_LINE_BYTES as u64 + 2).read_until(b'\n', &mut self.buffer)?;
        if read == 0 {
            return Ok(None);
        }
        self.offset += read;
        let ended = self.buffer.last() == Some(&b'\n');
        let mut end = if ended { read - 1 } else { read };
        if end > MAX_LINE_BYTES {
            let mut length = end;
            if !ended {
                length += self.skip_line()?;
            }
            return Ok(Some(TraceLine::TooLong { start, length }));
        }
        if self.buffer[..end].last() == Some(&b'\r') {
            end -= 1;
        }
        let mark = if start == 0 && self.buffer.starts_with(BYTE_ORDER_MARK) {
            BYTE_ORDER_MARK.len().min(end)
        } else {
            0
        };
        let span = Span { start: start + mark, end: start + end };
        Ok(Some(TraceLine::Whole { bytes: &self.buffer[mark..end], span }))
    }

    /// Skips the rest of a line and returns its length.
    fn skip_line(&mut self) -> Result<usize> {
        let mut length = 0;
        loop {
            let buffered = self.file.fill_buf()?;
            let end = buffered.iter().position(|b| *b == b'\n');
            let (line, used) = end.map_or((buffered.len(), buffered.len()), |i| (i, i + 1));
            self.file.consume(used);
            length += line;
            self.offset += used;
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
    fn lines_have_spans_and_long_lines_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let mut text = b"\xef\xbb\xbfab\r\n\nc\n".to_vec();
        text.extend(vec![b'x'; MAX_LINE_BYTES]);
        text.push(b'\n');
        text.extend(vec![b'y'; 3 * MAX_LINE_BYTES + 1]);
        text.extend(b"\nend");
        std::fs::write(&path, &text).unwrap();
        let mut lines = LineReader::open(&path).unwrap();
        let mut seen = Vec::new();
        while let Some(line) = lines.next().unwrap() {
            seen.push(match line {
                TraceLine::Whole { bytes, span } => {
                    assert_eq!(&text[span.start..span.end], bytes);
                    (span.start, bytes.len())
                }
                TraceLine::TooLong { start, length } => (start, length),
            });
        }
        let (first, second) = (10, 10 + MAX_LINE_BYTES + 1);
        let end = second + 3 * MAX_LINE_BYTES + 2;
        let expected =
            [(3, 2), (7, 0), (8, 1), (first, MAX_LINE_BYTES), (second, 3 * MAX_LINE_BYTES + 1), (end, 3)];
        assert_eq!(seen, expected);
    }
}
