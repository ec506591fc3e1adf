//! The record layer: 2 bytes of length, big-endian, then a Noise message of that length. Noise
//! counts the messages of each direction, so a repeated, dropped or reordered one does not decrypt.

use std::io::{Error, ErrorKind, Result};
use std::os::fd::BorrowedFd;

use snow::TransportState;

use super::noise::{TAG_BYTES, connect_in_memory};
use crate::driver::byte_stream::ByteStream;

const LENGTH_BYTES: usize = 2;
/// Maximum length of a Noise message, the tag included.
const MESSAGE_BYTES: usize = 65_535;
/// Maximum bytes of content in one record. A longer write becomes several records.
pub const RECORD_BYTES: usize = MESSAGE_BYTES - TAG_BYTES;

/// A stream that wraps another one in encrypted records: only the other side can read them, and
/// only the other side can have created them, in this order.
pub struct RecordStream<S> {
    inner: S,
    noise: TransportState,
    /// The outgoing record, its length, and how many of its bytes were written.
    outgoing: Vec<u8>,
    outgoing_bytes: usize,
    written: usize,
    /// The incoming record, and how many of its bytes arrived.
    incoming: Vec<u8>,
    received: usize,
    /// The content of a record that the reader's buffer did not hold, and how much of it was read.
    content: Vec<u8>,
    consumed: usize,
}

impl<S: ByteStream> RecordStream<S> {
    pub(super) fn new(inner: S, noise: TransportState) -> RecordStream<S> {
        RecordStream {
            inner,
            noise,
            outgoing: Vec::new(),
            outgoing_bytes: 0,
            written: 0,
            incoming: vec![0; LENGTH_BYTES + MESSAGE_BYTES],
            received: 0,
            content: Vec::new(),
            consumed: 0,
        }
    }

    /// Wraps both ends of a connection in this process, for tests and for fuzzers that look for
    /// input that the record layer must reject.
    ///
    /// # Errors
    /// Returns the operating system's error if it provides no randomness.
    pub fn new_pair<T: ByteStream>(one: S, other: T) -> Result<(RecordStream<S>, RecordStream<T>)> {
        let (a, b) = connect_in_memory()?;
        Ok((RecordStream::new(one, a), RecordStream::new(other, b)))
    }

    /// Returns the length of the incoming record's Noise message.
    fn message_length(&self) -> Result<usize> {
        let bytes = usize::from(u16::from_be_bytes([self.incoming[0], self.incoming[1]]));
        // An empty record would look like the end of the stream.
        if bytes > TAG_BYTES { Ok(bytes) } else { Err(forged_record_error()) }
    }

    fn copy_content(&mut self, into: &mut [u8]) -> usize {
        let rest = &self.content[self.consumed..];
        let n = into.len().min(rest.len());
        into[..n].copy_from_slice(&rest[..n]);
        self.consumed += n;
        n
    }

    /// Decrypts the complete incoming record, directly into the reader's buffer if that is large
    /// enough.
    fn open_record(&mut self, into: &mut [u8]) -> Result<usize> {
        let message = &self.incoming[LENGTH_BYTES..self.received];
        let bytes = message.len() - TAG_BYTES;
        let fits = bytes <= into.len();
        if !fits {
            self.content.resize(bytes, 0);
        }
        let target = if fits { &mut into[..bytes] } else { &mut self.content[..] };
        if self.noise.read_message(message, target).is_err() {
            // The record stays, so every later read fails too, and none of it is content.
            self.content.clear();
            self.consumed = 0;
            return Err(forged_record_error());
        }
        self.received = 0;
        if fits {
            return Ok(bytes);
        }
        self.consumed = 0;
        Ok(self.copy_content(into))
    }

    fn write_outgoing(&mut self) -> Result<()> {
        while self.written < self.outgoing_bytes {
            match self.inner.write(&self.outgoing[self.written..self.outgoing_bytes])? {
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
        if self.consumed < self.content.len() {
            return Ok(self.copy_content(into));
        }
        loop {
            let want = match self.received {
                0..LENGTH_BYTES => LENGTH_BYTES,
                _ => LENGTH_BYTES + self.message_length()?,
            };
            if self.received == want {
                return self.open_record(into);
            }
            match self.inner.read(&mut self.incoming[self.received..want])? {
                0 if self.received == 0 => return Ok(0),
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => self.received += n,
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.write_outgoing()?;
        let bytes = &bytes[..bytes.len().min(RECORD_BYTES)];
        if bytes.is_empty() {
            return Ok(0);
        }
        let message_bytes = bytes.len() + TAG_BYTES;
        let whole = LENGTH_BYTES + message_bytes;
        if self.outgoing.len() < whole {
            self.outgoing.resize(whole, 0);
        }
        let (length, message) = self.outgoing[..whole].split_at_mut(LENGTH_BYTES);
        length.copy_from_slice(&(message_bytes as u16).to_be_bytes());
        // The only possible failure is a counter that reached its end.
        self.noise.write_message(bytes, message).map_err(|e| Error::other(e.to_string()))?;
        (self.outgoing_bytes, self.written) = (whole, 0);
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
        self.consumed < self.content.len() || self.inner.holds_input()
    }

    fn wants_write(&self) -> bool {
        self.written < self.outgoing_bytes || self.inner.wants_write()
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

    type Records = RecordStream<UnixStream>;

    /// A record stream, and the other end of its socket.
    type End = (Records, UnixStream);

    fn socket_pair() -> (UnixStream, UnixStream) {
        let (a, b) = UnixStream::pair().expect("a pair");
        a.set_nonblocking(true).expect("non-blocking");
        b.set_nonblocking(true).expect("non-blocking");
        (a, b)
    }

    /// Returns both ends of a session, between which the test carries the bytes.
    fn session() -> (End, End) {
        let ((a, raw_a), (b, raw_b)) = (socket_pair(), socket_pair());
        let (a, b) = RecordStream::new_pair(a, b).expect("randomness");
        ((a, raw_a), (b, raw_b))
    }

    /// Writes `text` and returns the record that leaves the socket.
    fn seal((records, raw): &mut End, text: &[u8]) -> Vec<u8> {
        assert_eq!(records.write(text).expect("room"), text.len());
        let mut record = vec![0; LENGTH_BYTES + text.len() + TAG_BYTES];
        raw.read_exact(&mut record).expect("whole");
        record
    }

    /// Reads `bytes` as the whole input, and returns the content before the error, if there is one.
    fn read_all((mut records, mut raw): End, bytes: &[u8], step: usize) -> (Vec<u8>, Option<ErrorKind>) {
        raw.write_all(bytes).expect("room");
        drop(raw);
        let (mut got, mut into) = (Vec::new(), vec![0; step]);
        loop {
            match records.read(&mut into) {
                Ok(0) => return (got, None),
                Ok(n) => got.extend(&into[..n]),
                Err(e) => {
                    let again = records.read(&mut into);
                    assert!(!matches!(again, Ok(1..)), "content after an error");
                    return (got, Some(e.kind()));
                }
            }
        }
    }

    #[test]
    fn bytes_arrive_in_chunks_of_any_size() {
        let (a, b) = socket_pair();
        let (mut a, mut b) = RecordStream::new_pair(a, b).expect("randomness");
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
    fn a_write_above_the_limit_of_noise_becomes_several_records() {
        let (mut a, _b) = session();
        let text = vec![3; 200_000];
        assert_eq!(a.0.write(&text).expect("room"), RECORD_BYTES);
        let mut length = [0; LENGTH_BYTES];
        a.1.read_exact(&mut length).expect("whole");
        assert_eq!(u16::from_be_bytes(length), u16::MAX);
    }

    #[test]
    fn records_hide_their_content() {
        let (mut a, _b) = session();
        let text = b"a prompt that nobody else may read";
        let (one, two) = (seal(&mut a, text), seal(&mut a, text));
        assert!(one[LENGTH_BYTES..] != two[LENGTH_BYTES..], "equal contents show");
        for record in [one, two] {
            assert!(record.windows(8).all(|w| !text.windows(8).any(|t| t == w)), "{record:?}");
        }
    }

    #[test]
    fn every_flipped_bit_of_a_record_is_detected() {
        for step in [1, 16] {
            let bytes = LENGTH_BYTES + 3 + TAG_BYTES;
            for bit in 0..8 * bytes {
                let (mut a, b) = session();
                let first = seal(&mut a, b"one");
                let mut second = seal(&mut a, b"two");
                second[bit / 8] ^= 1 << (bit % 8);
                let (got, error) = read_all(b, &[first, second].concat(), step);
                assert!(got == b"one" && error.is_some(), "bit {bit}: {got:?} {error:?}");
            }
        }
    }

    #[test]
    fn repeated_reordered_dropped_truncated_and_foreign_records_are_rejected() {
        type Change<'a> = (&'a str, &'a dyn Fn(&mut Vec<Vec<u8>>), &'a [u8]);
        let (mut stranger, _stranger_peer) = session();
        let foreign = seal(&mut stranger, b"two");
        let changes: [Change<'_>; 8] = [
            ("repeated", &|r| r[1] = r[0].clone(), b"one"),
            ("reordered", &|r| r.swap(1, 2), b"one"),
            ("dropped", &|r| drop(r.remove(1)), b"one"),
            ("dropped first", &|r| drop(r.remove(0)), b""),
            ("truncated", &|r| r[2].truncate(20), b"onetwo"),
            ("cut inside the length", &|r| r[2].truncate(1), b"onetwo"),
            ("of another session", &|r| r[1] = foreign.clone(), b"one"),
            ("without content", &|r| r[1] = vec![0, TAG_BYTES as u8], b"one"),
        ];
        for step in [1, 16] {
            for (what, change, before) in changes {
                let (mut a, b) = session();
                let mut records: Vec<_> =
                    [&b"one"[..], b"two", b"three"].iter().map(|t| seal(&mut a, t)).collect();
                change(&mut records);
                let (got, error) = read_all(b, &records.concat(), step);
                assert!(got == before && error.is_some(), "{what}: {got:?} {error:?}");
            }
            let (mut a, b) = session();
            let records = [seal(&mut a, b"one"), seal(&mut a, b"two")];
            assert_eq!(read_all(b, &records.concat(), step), (b"onetwo".to_vec(), None));
        }
    }

    #[test]
    fn a_reflected_record_is_rejected() {
        let (mut a, _b) = session();
        let own = seal(&mut a, b"one");
        let (got, error) = read_all(a, &own, 16);
        assert!(got.is_empty() && error == Some(ErrorKind::InvalidData), "{got:?} {error:?}");
    }
}
