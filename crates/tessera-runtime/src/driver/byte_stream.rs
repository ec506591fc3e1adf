//! A non-blocking byte stream to one peer. The reactor treats Unix sockets, TCP sockets and their
//! encrypted wrappers alike.

use std::io::{Read, Result, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// A stream whose descriptor becomes ready when another attempt is worthwhile. The reactor makes
/// the descriptor non-blocking. A handshake ends before the reactor gets the stream, or runs inside
/// `read` and `flush`.
pub trait ByteStream: Send {
    /// Reads the bytes that have arrived. `WouldBlock`: none for now. 0: the peer closed.
    ///
    /// # Errors
    /// The peer is gone, or its bytes do not belong to this stream.
    fn read(&mut self, into: &mut [u8]) -> Result<usize>;

    /// Writes as many bytes as fit. `WouldBlock`: no room for now.
    ///
    /// # Errors
    /// The peer is gone.
    fn write(&mut self, bytes: &[u8]) -> Result<usize>;

    /// Flushes the bytes that `write` accepted and this stream still buffers. `WouldBlock`: some
    /// are left.
    ///
    /// # Errors
    /// The peer is gone.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    /// Whether this stream has buffered input, so that `read` returns bytes even if the descriptor
    /// is not readable.
    fn holds_input(&self) -> bool {
        false
    }

    /// Whether bytes that `write` accepted are still buffered.
    fn wants_write(&self) -> bool {
        false
    }

    /// Returns the descriptor to poll.
    fn fd(&self) -> BorrowedFd<'_>;
}

macro_rules! impl_byte_stream {
    ($($socket:ty),*) => {$(
        impl ByteStream for $socket {
            fn read(&mut self, into: &mut [u8]) -> Result<usize> {
                Read::read(self, into)
            }

            fn write(&mut self, bytes: &[u8]) -> Result<usize> {
                Write::write(self, bytes)
            }

            fn fd(&self) -> BorrowedFd<'_> {
                self.as_fd()
            }
        }
    )*};
}

impl_byte_stream!(UnixStream, TcpStream);
