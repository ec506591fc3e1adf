//! Any bytes as what comes over a socket: frames, a peer's hello, records.

use std::io::{Read, Result, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tessera_runtime::Limits;
use tessera_runtime::driver::secure::{HELLO_BYTES, Records, read_hello};
use tessera_runtime::driver::{Hub, HubEvent, Stream};
use tessera_runtime::wire::{
    self, HEADER_BYTES, MAX_FRAME_BYTES, decode, decode_body, decode_header, encode,
};

use super::told;

/// Bytes as frames: read or refused, and what is read writes back to the same bytes.
pub(super) fn frames(bytes: &[u8]) {
    match decode(bytes) {
        Err(d) => told(&[d], ""),
        Ok((origin, message)) => {
            let again = encode(origin, &message).unwrap_or_else(|d| panic!("read and not written: {d:?}"));
            assert!(again == bytes, "a frame with two forms: {message:?}");
        }
    }
    // As they come from a socket: a header, then as much as it says.
    let mut rest = bytes;
    while let Some((head, body)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = decode_header(head) else { break };
        let length = header.body_bytes();
        assert!(HEADER_BYTES + length <= MAX_FRAME_BYTES, "a header over the limit");
        let Some((body, after)) = body.split_at_checked(length) else { break };
        if let Err(d) = decode_body(&header, body) {
            told(&[d], "");
        }
        rest = after;
    }
}

/// Most bytes of one input of [`assembled`]: what a socket takes without a reader.
const SOCKET_BYTES: usize = 32 << 10;

/// Bytes from a socket, put together by a hub: the frames that come are the bytes that went in, as far as they are
/// frames.
pub(super) fn assembled(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(SOCKET_BYTES)];
    let mut hub = Hub::new(&Limits::default()).expect("descriptors");
    let (mut there, here) = UnixStream::pair().expect("a pair of sockets");
    hub.add(Box::new(here), 0..4).expect("a socket");
    let (first, second) = bytes.split_at(bytes.len() / 3);
    there.write_all(first).expect("room");
    let (mut came, mut events, mut ended) = (Vec::new(), Vec::new(), false);
    hub.wait(Duration::ZERO, &mut events);
    // A hub that gave up on the first part closes.
    let _ = there.write_all(second);
    drop(there);
    for _ in 0..1000 {
        for event in events.drain(..) {
            match event {
                HubEvent::Frame { frame, .. } => {
                    came.extend_from_slice(frame.bytes());
                    if let Err(d) = frame.message() {
                        told(&[d], "");
                    }
                }
                HubEvent::Ended { .. } => ended = true,
                HubEvent::Watched(_) => {}
            }
        }
        if ended {
            break;
        }
        hub.wait(Duration::from_millis(10), &mut events);
    }
    assert!(ended, "a closed socket did not end its link");
    assert!(bytes.starts_with(&came), "other bytes came out than went in");
}

/// Bytes with the sums of a frame made right, so that what is beneath them is reached.
pub(super) fn sealed(bytes: &[u8]) -> Option<Vec<u8>> {
    let (&kind, rest) = bytes.split_first()?;
    let (&cut, rest) = rest.split_first()?;
    let meta = rest.len().min(usize::from(cut) * 4);
    let mut frame = Vec::with_capacity(HEADER_BYTES + rest.len());
    frame.extend_from_slice(&wire::MAGIC);
    frame.extend_from_slice(&wire::WIRE_VERSION.to_le_bytes());
    frame.extend_from_slice(&u16::from(kind).to_le_bytes());
    frame.extend_from_slice(&1u32.to_le_bytes());
    frame.extend_from_slice(&(meta as u32).to_le_bytes());
    frame.extend_from_slice(&((rest.len() - meta) as u32).to_le_bytes());
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    hash.update(&frame);
    hash.update(rest);
    frame.extend_from_slice(&hash.digest().to_le_bytes());
    frame.extend_from_slice(rest);
    Some(frame)
}

/// Bytes as a hello, and as records that nobody made: neither is taken.
pub(super) fn peer(bytes: &[u8]) {
    if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>() {
        let _ = read_hello(hello);
    }
    let mut records = Records::unkeyed(Bytes::of(bytes));
    let mut into = [0; 97];
    let mut taken = 0;
    while let Ok(n @ 1..) = records.read(&mut into) {
        taken += n;
    }
    assert!(taken <= bytes.len(), "more came out than went in");
}

/// A stream that was all there is, given away in pieces.
struct Bytes<'a> {
    left: &'a [u8],
    /// A stream has a descriptor; nobody polls this one.
    nothing: UnixStream,
}

impl Bytes<'_> {
    fn of(left: &[u8]) -> Bytes<'_> {
        thread_local! {
            static NOTHING: UnixStream = UnixStream::pair().expect("a pair of sockets").0;
        }
        let nothing = NOTHING.with(|n| n.try_clone().expect("a descriptor"));
        Bytes { left, nothing }
    }
}

impl Stream for Bytes<'_> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        let n = into.len().min(1 + self.left.len() % 7);
        self.left.read(&mut into[..n])
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        Ok(bytes.len())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.nothing.as_fd()
    }
}
