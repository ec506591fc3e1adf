//! Records: 4 bytes of length, 16 of a keyed hash over the record's number, its length and its bytes, then the bytes.

use std::io::{Error, ErrorKind, Result};
use std::os::fd::BorrowedFd;

use super::hello::Keys;
use crate::driver::stream::Stream;

/// Most bytes in one record.
pub const RECORD_BYTES: usize = 64 << 10;
const TAG_BYTES: usize = 16;
const HEAD_BYTES: usize = 4 + TAG_BYTES;

/// A stream under another one, in records that only the other side can have made, in the order in which it made them.
pub struct Records<S> {
    under: S,
    out: Direction,
    into: Direction,
    /// A record on its way out, and how much of it left.
    leaving: Vec<u8>,
    left: usize,
    /// What arrived of a record, and how much of its bytes was taken once it was whole.
    arriving: Vec<u8>,
    have: usize,
    taken: Option<usize>,
}

struct Direction {
    key: [u8; 32],
    count: u64,
}

impl Direction {
    /// The tag of the next record.
    fn tag(&mut self, bytes: &[u8]) -> [u8; TAG_BYTES] {
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

impl<S: Stream> Records<S> {
    pub(super) fn new(under: S, keys: Keys) -> Records<S> {
        Records {
            under,
            out: Direction { key: keys.out, count: 0 },
            into: Direction { key: keys.into, count: 0 },
            leaving: Vec::new(),
            left: 0,
            arriving: vec![0; HEAD_BYTES + RECORD_BYTES],
            have: 0,
            taken: None,
        }
    }

    /// Records over a stream whose keys are all zero, for programs that look for bytes it should not take.
    pub fn unkeyed(under: S) -> Records<S> {
        Records::new(under, Keys { out: [0; 32], into: [0; 32] })
    }

    fn length(&self) -> Result<usize> {
        let a = &self.arriving;
        let bytes = u32::from_le_bytes([a[0], a[1], a[2], a[3]]) as usize;
        // An empty record would be an end of the stream that nobody meant.
        if (1..=RECORD_BYTES).contains(&bytes) { Ok(bytes) } else { Err(broken()) }
    }

    fn give(&mut self, at: usize, into: &mut [u8]) -> Result<usize> {
        let whole = self.length()?;
        let n = into.len().min(whole - at);
        into[..n].copy_from_slice(&self.arriving[HEAD_BYTES + at..HEAD_BYTES + at + n]);
        self.taken = (at + n < whole).then_some(at + n);
        if self.taken.is_none() {
            self.have = 0;
        }
        Ok(n)
    }

    fn push(&mut self) -> Result<()> {
        while self.left < self.leaving.len() {
            match self.under.write(&self.leaving[self.left..])? {
                0 => return Err(ErrorKind::WouldBlock.into()),
                n => self.left += n,
            }
        }
        Ok(())
    }
}

impl<S: Stream> Stream for Records<S> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        if let Some(at) = self.taken {
            return self.give(at, into);
        }
        loop {
            let want = if self.have < HEAD_BYTES { HEAD_BYTES } else { HEAD_BYTES + self.length()? };
            if self.have == want && want > HEAD_BYTES {
                break;
            }
            match self.under.read(&mut self.arriving[self.have..want])? {
                0 if self.have == 0 => return Ok(0),
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => self.have += n,
            }
        }
        let tag = self.into.tag(&self.arriving[HEAD_BYTES..self.have]);
        let mut differ = 0;
        for (a, b) in tag.iter().zip(&self.arriving[4..HEAD_BYTES]) {
            differ |= a ^ b;
        }
        if std::hint::black_box(differ) != 0 {
            return Err(broken());
        }
        self.give(0, into)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.push()?;
        let bytes = &bytes[..bytes.len().min(RECORD_BYTES)];
        if bytes.is_empty() {
            return Ok(0);
        }
        self.leaving.clear();
        self.left = 0;
        let tag = self.out.tag(bytes);
        self.leaving.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        self.leaving.extend_from_slice(&tag);
        self.leaving.extend_from_slice(bytes);
        match self.push() {
            Ok(()) => Ok(bytes.len()),
            // It is taken, and leaves by and by.
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(bytes.len()),
            Err(e) => Err(e),
        }
    }

    fn flush(&mut self) -> Result<()> {
        self.push()?;
        self.under.flush()
    }

    fn holds_input(&self) -> bool {
        self.taken.is_some() || self.under.holds_input()
    }

    fn wants_write(&self) -> bool {
        self.left < self.leaving.len() || self.under.wants_write()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.under.fd()
    }
}

fn broken() -> Error {
    Error::new(ErrorKind::InvalidData, "a record that the peer did not make")
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (Records<UnixStream>, UnixStream) {
        let (a, b) = UnixStream::pair().expect("a pair");
        a.set_nonblocking(true).expect("non-blocking");
        b.set_nonblocking(true).expect("non-blocking");
        (Records::unkeyed(a), b)
    }

    #[test]
    fn bytes_arrive_in_pieces_of_any_size() {
        let (mut a, b) = pair();
        let mut b = Records::unkeyed(b);
        let sent: Vec<u8> = (0..1_000_003u32).map(|i| ((i * 31) >> 3) as u8).collect();
        let (mut at, mut got, mut piece) = (0, Vec::<u8>::new(), 1);
        while got.len() < sent.len() {
            piece = piece * 7 % 100_003;
            let end = (at + piece).min(sent.len());
            match if at < end { a.write(&sent[at..end]) } else { a.flush().map(|()| 0) } {
                Ok(n) => at += n,
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
            }
            let mut into = vec![0; piece];
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
    fn what_is_changed_repeated_left_out_or_cut_is_not_read() {
        let taken = |bend: &dyn Fn(&mut Vec<Vec<u8>>)| -> Result<Vec<u8>> {
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
        assert_eq!(taken(&|_| {}).expect("whole"), b"onetwothree");
        type Bend<'a> = &'a dyn Fn(&mut Vec<Vec<u8>>);
        let bends: [Bend<'_>; 6] = [
            &|r| r[1][HEAD_BYTES] ^= 1,
            &|r| r[1][0] ^= 1,
            &|r| r[1][3] = 1,
            &|r| r[1] = r[0].clone(),
            &|r| drop(r.remove(1)),
            &|r| r[2].truncate(22),
        ];
        for (i, bend) in bends.into_iter().enumerate() {
            assert!(taken(bend).is_err(), "bend {i}");
        }
    }
}
