//! The record layer: 4 bytes of length, then 16 bytes of a keyed hash over the record's number,
//! length and bytes, then the bytes.

use std::io::{Error, ErrorKind, Result};
use std::os::fd::BorrowedFd;

use super::hello::RecordKeys;
use crate::driver::byte_stream::ByteStream;

/// Maximum bytes of content in one record, besides its length and its keyed hash.
pub const RECORD_BYTES: usize = 64 << 10;
const TAG_BYTES: usize = 16;
const HEAD_BYTES: usize = 4 + TAG_BYTES;

/// A stream that wraps another one in authenticated records: only the other side can have created
/// them, in this order.
pub struct RecordStream<S> {
    inner: S,
    send_mac: RecordMac,
    receive_mac: RecordMac,
    /// The outgoing record, and how many of its bytes were written.
    outgoing: Vec<u8>,
    written: usize,
    /// The incoming record, how many of its bytes arrived, and how many were consumed once it was
    /// complete.
    incoming: Vec<u8>,
    received: usize,
    consumed: Option<usize>,
}

struct RecordMac {
    key: [u8; 32],
    count: u64,
}

impl RecordMac {
    /// Returns the keyed hash of the record with these bytes, and counts the record.
    fn next_tag(&mut self, bytes: &[u8]) -> [u8; TAG_BYTES] {
        let mut hash = blake3::Hasher::new_keyed(&self.key);
        hash.update(&self.count.to_le_bytes());
        hash.update(&(bytes.len() as u32).to_le_bytes());
        hash.update(bytes);
        self.count += 1;
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(&hash.finalize().as_bytes()[..TAG_BYTES]);
        tag
    }
}

impl<S: ByteStream> RecordStream<S> {
    pub(super) fn new(inner: S, keys: RecordKeys) -> RecordStream<S> {
        RecordStream {
            inner,
            send_mac: RecordMac { key: keys.send, count: 0 },
            receive_mac: RecordMac { key: keys.receive, count: 0 },
            outgoing: Vec::new(),
            written: 0,
            incoming: vec![0; HEAD_BYTES + RECORD_BYTES],
            received: 0,
            consumed: None,
        }
    }

    /// Wraps a stream with all-zero keys, for fuzzers that look for input that the record layer
    /// must reject.
    pub fn with_zero_keys(under: S) -> RecordStream<S> {
        RecordStream::new(under, RecordKeys { send: [0; 32], receive: [0; 32] })
    }

    fn record_length(&self) -> Result<usize> {
        let a = &self.incoming;
        let bytes = u32::from_le_bytes([a[0], a[1], a[2], a[3]]) as usize;
        // An empty record would look like the end of the stream.
        if (1..=RECORD_BYTES).contains(&bytes) { Ok(bytes) } else { Err(forged_record_error()) }
    }

    fn copy_plaintext(&mut self, at: usize, into: &mut [u8]) -> Result<usize> {
        let whole = self.record_length()?;
        let n = into.len().min(whole - at);
        into[..n].copy_from_slice(&self.incoming[HEAD_BYTES + at..HEAD_BYTES + at + n]);
        self.consumed = (at + n < whole).then_some(at + n);
        if self.consumed.is_none() {
            self.received = 0;
        }
        Ok(n)
    }

    fn write_outgoing(&mut self) -> Result<()> {
        while self.written < self.outgoing.len() {
            match self.inner.write(&self.outgoing[self.written..])? {
                0 => return Err(ErrorKind::WouldBlock.into()),
                n => self.written += n,
            }
        }
        Ok(())
    }
}

impl<S: ByteStream> ByteStream for RecordStream<S> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        if let Some(at) = self.consumed {
            return self.copy_plaintext(at, into);
        }
        loop {
            let want =
                if self.received < HEAD_BYTES { HEAD_BYTES } else { HEAD_BYTES + self.record_length()? };
            if self.received == want && want > HEAD_BYTES {
                break;
            }
            match self.inner.read(&mut self.incoming[self.received..want])? {
                0 if self.received == 0 => return Ok(0),
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => self.received += n,
            }
        }
        let tag = self.receive_mac.next_tag(&self.incoming[HEAD_BYTES..self.received]);
        let mut differ = 0;
        for (a, b) in tag.iter().zip(&self.incoming[4..HEAD_BYTES]) {
            differ |= a ^ b;
        }
        if std::hint::black_box(differ) != 0 {
            return Err(forged_record_error());
        }
        self.copy_plaintext(0, into)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.write_outgoing()?;
        let bytes = &bytes[..bytes.len().min(RECORD_BYTES)];
        if bytes.is_empty() {
            return Ok(0);
        }
        self.outgoing.clear();
        self.written = 0;
        let tag = self.send_mac.next_tag(bytes);
        self.outgoing.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        self.outgoing.extend_from_slice(&tag);
        self.outgoing.extend_from_slice(bytes);
        match self.write_outgoing() {
            Ok(()) => Ok(bytes.len()),
            // The record is accepted; later calls write the rest of it.
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(bytes.len()),
            Err(e) => Err(e),
        }
    }

    fn flush(&mut self) -> Result<()> {
        self.write_outgoing()?;
        self.inner.flush()
    }

    fn holds_input(&self) -> bool {
        self.consumed.is_some() || self.inner.holds_input()
    }

    fn wants_write(&self) -> bool {
        self.written < self.outgoing.len() || self.inner.wants_write()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.inner.fd()
    }
}

fn forged_record_error() -> Error {
    Error::new(ErrorKind::InvalidData, "a record that the peer did not create")
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (RecordStream<UnixStream>, UnixStream) {
        let (a, b) = UnixStream::pair().expect("a pair");
        a.set_nonblocking(true).expect("non-blocking");
        b.set_nonblocking(true).expect("non-blocking");
        (RecordStream::with_zero_keys(a), b)
    }

    #[test]
    fn bytes_arrive_in_chunks_of_any_size() {
        let (mut a, b) = pair();
        let mut b = RecordStream::with_zero_keys(b);
        let sent: Vec<u8> = (0..1_000_003u32).map(|i| ((i * 31) >> 3) as u8).collect();
        let (mut at, mut got, mut chunk) = (0, Vec::<u8>::new(), 1);
        while got.len() < sent.len() {
            chunk = chunk * 7 % 100_003;
            let end = (at + chunk).min(sent.len());
            match if at < end { a.write(&sent[at..end]) } else { a.flush().map(|()| 0) } {
                Ok(n) => at += n,
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
            }
            let mut into = vec![0; chunk];
            match b.read(&mut into) {
                Ok(n) => got.extend(&into[..n]),
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
            }
        }
        assert!(got == sent && !a.wants_write() && !b.holds_input());
        drop(a);
        assert_eq!(b.read(&mut [0]).expect("the end"), 0);
    }

    #[test]
    fn modified_repeated_dropped_or_truncated_records_are_rejected() {
        let read_mutated = |bend: &dyn Fn(&mut Vec<Vec<u8>>)| -> Result<Vec<u8>> {
            let (mut a, mut raw) = pair();
            let mut records = Vec::new();
            for text in [&b"one"[..], b"two", b"three"] {
                a.write(text).expect("room");
                let mut record = vec![0; HEAD_BYTES + text.len()];
                raw.read_exact(&mut record).expect("whole");
                records.push(record);
            }
            bend(&mut records);
            let (mut b, mut raw) = pair();
            raw.write_all(&records.concat()).expect("room");
            drop(raw);
            let mut got = Vec::new();
            loop {
                let mut into = [0; 16];
                match b.read(&mut into)? {
                    0 => return Ok(got),
                    n => got.extend(&into[..n]),
                }
            }
        };
        assert_eq!(read_mutated(&|_| {}).expect("whole"), b"onetwothree");
        type Bend<'a> = &'a dyn Fn(&mut Vec<Vec<u8>>);
        let mutations: [Bend<'_>; 6] = [
            &|r| r[1][HEAD_BYTES] ^= 1,
            &|r| r[1][0] ^= 1,
            &|r| r[1][3] = 1,
            &|r| r[1] = r[0].clone(),
            &|r| drop(r.remove(1)),
            &|r| r[2].truncate(22),
        ];
        for (i, bend) in mutations.into_iter().enumerate() {
            assert!(read_mutated(bend).is_err(), "bend {i}");
        }
    }
}
