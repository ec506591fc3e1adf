//! Arbitrary bytes as data from a socket: frames, a peer's hello, records.

use std::io::{Read, Result, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tessera_runtime::Limits;
use tessera_runtime::driver::secure::{HELLO_BYTES, RecordStream, parse_hello};
use tessera_runtime::driver::{ByteStream, Reactor, ReactorEvent};
use tessera_runtime::wire::{
    self, HEADER_BYTES, MAX_FRAME_BYTES, decode, decode_body, decode_header, encode,
};

use super::check_renders;

/// Treats bytes as frames. The decoder must reject them, or the decoded message must encode to the
/// same bytes.
pub(super) fn check_frames(bytes: &[u8]) {
    match decode(bytes) {
        Err(d) => check_renders(&[d], ""),
        Ok((origin, message)) => {
            let again = encode(origin, &message)
                .unwrap_or_else(|d| panic!("a decoded message cannot be encoded: {d:?}"));
            assert!(again == bytes, "a message has two encodings: {message:?}");
        }
    }
    // As from a socket: first a header, then a body of the length that the header gives.
    let mut rest = bytes;
    while let Some((head, body)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = decode_header(head) else { break };
        let length = header.body_bytes();
        assert!(HEADER_BYTES + length <= MAX_FRAME_BYTES, "a header exceeds the limit of a frame");
        let Some((body, after)) = body.split_at_checked(length) else { break };
        if let Err(d) = decode_body(&header, body) {
            check_renders(&[d], "");
        }
        rest = after;
    }
}

/// Maximum number of input bytes of [`check_assembly`]: a socket buffers this many without a
/// reader.
const MAX_SOCKET_BYTES: usize = 32 << 10;

/// Sends bytes to a reactor through a socket. The frames that the reactor delivers must be a prefix
/// of the bytes.
pub(super) fn check_assembly(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(MAX_SOCKET_BYTES)];
    let mut reactor = Reactor::new(&Limits::default()).expect("descriptors are available");
    let (mut sender, receiver) = UnixStream::pair().expect("sockets are available");
    reactor.add_link(Box::new(receiver), 0..4).expect("the reactor accepts a socket");
    let (first, second) = bytes.split_at(bytes.len() / 3);
    sender.write_all(first).expect("the socket's buffer has space");
    let (mut received, mut events, mut ended) = (Vec::new(), Vec::new(), false);
    reactor.wait_events(Duration::ZERO, &mut events);
    // A reactor that rejected the first part has closed the socket.
    let _ = sender.write_all(second);
    drop(sender);
    for _ in 0..1000 {
        for event in events.drain(..) {
            match event {
                ReactorEvent::Frame { frame, .. } => {
                    received.extend_from_slice(frame.bytes());
                    if let Err(d) = frame.decode_message() {
                        check_renders(&[d], "");
                    }
                }
                ReactorEvent::Disconnected { .. } => ended = true,
                ReactorEvent::FdReady(_) => {}
            }
        }
        if ended {
            break;
        }
        reactor.wait_events(Duration::from_millis(10), &mut events);
    }
    assert!(ended, "closing the socket did not end its link");
    assert!(bytes.starts_with(&received), "the frames differ from the bytes that were sent");
}

/// Wraps bytes in a frame with valid checksums, so that the decoder reaches the contents.
pub(super) fn with_checksums(bytes: &[u8]) -> Option<Vec<u8>> {
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

/// Treats bytes as a hello and as records that no peer made. Reading must end without a panic and
/// without content.
pub(super) fn check_handshake(bytes: &[u8]) {
    if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>() {
        let _ = parse_hello(hello);
    }
    let (stranger, nobody) = (SliceStream::new(bytes), SliceStream::new(&[]));
    let (mut records, _) = RecordStream::new_pair(stranger, nobody).expect("randomness is available");
    let mut into = [0; 97];
    assert!(!matches!(records.read(&mut into), Ok(1..)), "the reader accepted a record that no peer made");
}

/// A stream that returns the bytes of a slice, a few at a time.
struct SliceStream<'a> {
    remaining: &'a [u8],
    /// A descriptor that the trait requires. Nothing polls it.
    descriptor: UnixStream,
}

impl SliceStream<'_> {
    fn new(remaining: &[u8]) -> SliceStream<'_> {
        thread_local! {
            static NOTHING: UnixStream = UnixStream::pair().expect("sockets are available").0;
        }
        let descriptor = NOTHING.with(|n| n.try_clone().expect("descriptors are available"));
        SliceStream { remaining, descriptor }
    }
}

impl ByteStream for SliceStream<'_> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        let n = into.len().min(1 + self.remaining.len() % 7);
        self.remaining.read(&mut into[..n])
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        Ok(bytes.len())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
