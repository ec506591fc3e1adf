//! A byte stream to one peer that never blocks: Unix sockets, TCP and whatever is wrapped around them are alike
//! to the hub.

use std::io::{Read, Result, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// A stream whose descriptor tells when it is worth trying again. The hub makes the descriptor non-blocking;
/// a handshake is over before the hub gets the stream, or runs inside `read` and `flush`.
pub trait Stream: Send {
    /// Takes what has arrived. `WouldBlock`: nothing now. 0: the peer closed.
    ///
    /// # Errors
    /// The peer is gone, or what it sent is not this stream's.
    fn read(&mut self, into: &mut [u8]) -> Result<usize>;

    /// Gives as many bytes as there is room for. `WouldBlock`: no room now.
    ///
    /// # Errors
    /// The peer is gone.
    fn write(&mut self, bytes: &[u8]) -> Result<usize>;

    /// Pushes out what `write` took and this stream still holds. `WouldBlock`: some of it is left.
    ///
    /// # Errors
    /// The peer is gone.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    /// Whether bytes wait here although the descriptor is quiet.
    fn holds_input(&self) -> bool {
        false
    }

    /// Whether bytes that `write` took have not left.
    fn wants_write(&self) -> bool {
        false
    }

    /// What to poll.
    fn fd(&self) -> BorrowedFd<'_>;
}

macro_rules! plain {
    ($($socket:ty),*) => {$(
        impl Stream for $socket {
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

plain!(UnixStream, TcpStream);
