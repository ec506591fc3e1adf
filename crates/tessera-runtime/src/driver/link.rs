//! Frames over a stream socket.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use tessera_base::Diagnostic;

use crate::wire::{HEADER_BYTES, Message, decode_body, decode_header};

/// How reading from a peer ended.
#[derive(Debug)]
pub(crate) enum LinkEnd {
    /// The peer closed, or its process is gone.
    Closed(String),
    /// The peer sent something that is not a message.
    Broken(Diagnostic),
}

/// Writes whole frames; a peer that does not read for `limit` is an error.
pub(crate) fn set_write_limit(stream: &UnixStream, limit: Duration) -> std::io::Result<()> {
    stream.set_write_timeout(Some(limit))
}

pub(crate) fn send(mut stream: &UnixStream, frame: &[u8]) -> std::io::Result<()> {
    stream.write_all(frame)
}

/// A frame's origin and message.
pub(crate) fn receive(stream: &mut impl Read) -> Result<(u32, Message), LinkEnd> {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).map_err(|e| closed(&e))?;
    receive_rest(&head, stream)
}

/// Reads the body of a frame whose header came another way.
pub(crate) fn receive_rest(
    head: &[u8; HEADER_BYTES],
    stream: &mut impl Read,
) -> Result<(u32, Message), LinkEnd> {
    let header = decode_header(head).map_err(LinkEnd::Broken)?;
    let mut body = vec![0; header.body_bytes()];
    stream.read_exact(&mut body).map_err(|e| closed(&e))?;
    decode_body(&header, &body).map(|message| (header.origin, message)).map_err(LinkEnd::Broken)
}

/// Reads on a thread until the peer is gone. `deliver` returns false to stop.
pub(crate) fn spawn_reader(
    name: String,
    mut stream: UnixStream,
    deliver: impl Fn(Result<(u32, Message), LinkEnd>) -> bool + Send + 'static,
) -> std::io::Result<()> {
    thread::Builder::new()
        .name(name)
        .spawn(move || {
            loop {
                let message = receive(&mut stream);
                let last = message.is_err();
                if !deliver(message) || last {
                    return;
                }
            }
        })
        .map(|_| ())
}

fn closed(e: &std::io::Error) -> LinkEnd {
    LinkEnd::Closed(match e.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "its socket closed".to_string()
        }
        _ => e.to_string(),
    })
}
