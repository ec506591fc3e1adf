//! Connections whose clients can read the last answer.
//!
//! The kernel resets a connection that is closed while bytes of its client are unread. A client that is still sending sees
//! the reset in place of the answer that says why the server ends the connection, and some systems then discard what has
//! arrived before it. So a dropped connection says that nothing more comes, and reads on for a while.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

/// Longest time for which a dropped connection is read.
const LINGERING_TIME: Duration = Duration::from_secs(1);
/// Most bytes that are read from a dropped connection.
const LINGERING_BYTES: usize = 1 << 20;

/// A connection that is read on after it was dropped, until its client closes it or a limit passes.
#[derive(Debug)]
pub(crate) struct LingeringStream {
    /// `None` only while it is dropped.
    stream: Option<TcpStream>,
    /// The connection's place among those of the server; without one it is closed when it is dropped.
    permit: Option<OwnedSemaphorePermit>,
}

impl LingeringStream {
    /// Wraps a connection that holds this place until nothing more is read from it.
    pub(crate) fn new(stream: TcpStream, permit: Option<OwnedSemaphorePermit>) -> LingeringStream {
        LingeringStream { stream: Some(stream), permit }
    }

    fn poll_stream<T>(
        self: Pin<&mut Self>,
        poll: impl FnOnce(Pin<&mut TcpStream>) -> Poll<Result<T>>,
    ) -> Poll<Result<T>> {
        match &mut self.get_mut().stream {
            Some(stream) => poll(Pin::new(stream)),
            None => Poll::Ready(Err(Error::from(ErrorKind::NotConnected))),
        }
    }
}

impl Drop for LingeringStream {
    fn drop(&mut self) {
        let (Some(stream), Some(permit)) = (self.stream.take(), self.permit.take()) else { return };
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                // A client that has gone needs no answer.
                let _ = timeout(LINGERING_TIME, read_on(stream)).await;
                drop(permit);
            });
        }
    }
}

async fn read_on(mut stream: TcpStream) -> Result<()> {
    stream.shutdown().await?;
    let (mut scratch, mut bytes) = ([0; 4096], 0);
    while bytes < LINGERING_BYTES {
        match stream.read(&mut scratch).await? {
            0 => break,
            more => bytes += more,
        }
    }
    Ok(())
}

impl AsyncRead for LingeringStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        self.poll_stream(|stream| stream.poll_read(context, into))
    }
}

impl AsyncWrite for LingeringStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        self.poll_stream(|stream| stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        self.poll_stream(|stream| stream.poll_write_vectored(context, parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        self.poll_stream(|stream| stream.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        self.poll_stream(|stream| stream.poll_shutdown(context))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::sync::Arc;
    use std::time::Instant;

    use tokio::net::TcpListener;
    use tokio::sync::Semaphore;

    use super::*;

    /// Lets a server answer a client and drop the connection before it has read what the client sent. Passes the client's end on.
    fn answer_and_drop(permits: &Arc<Semaphore>, then: impl FnOnce(std::net::TcpStream)) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.write_all(b"more than the server reads").unwrap();
        let permit = Arc::clone(permits).try_acquire_owned().ok();
        runtime.block_on(async move {
            let (stream, _) = listener.accept().await.unwrap();
            stream.readable().await.unwrap();
            let mut stream = LingeringStream::new(stream, permit);
            stream.write_all(b"bye").await.unwrap();
        });
        then(client);
    }

    #[test]
    fn a_client_that_still_sends_reads_the_last_answer() {
        let permits = Arc::new(Semaphore::new(1));
        answer_and_drop(&permits, |mut client| {
            for _ in 0..10 {
                client.write_all(&[7; 1000]).unwrap();
            }
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).unwrap();
            assert_eq!(answer, b"bye");
        });
        // Without a place, the kernel resets the connection.
        let none = Arc::new(Semaphore::new(0));
        answer_and_drop(&none, |mut client| {
            client.read_to_end(&mut Vec::new()).unwrap_err();
        });
    }

    #[test]
    fn a_client_that_stays_gives_its_place_up_in_the_end() {
        let permits = Arc::new(Semaphore::new(1));
        answer_and_drop(&permits, |client| {
            let until = Instant::now() + Duration::from_secs(60);
            while permits.available_permits() == 0 {
                assert!(Instant::now() < until, "the connection is held");
                std::thread::sleep(Duration::from_millis(20));
            }
            drop(client);
        });
    }
}
