//! Authenticates peers and protects the streams to them. A peer authenticates with the run's
//! secret, with certificates, or with both. Before that, this process reads nothing from the peer
//! except flights of fixed size (and the TLS handshake). Afterwards, no third party can read the
//! stream or write into it.
//!
//! Both sides run one Noise handshake ([`noise`]), with the run's secret as pre-shared key.
//! Without certificates, the bytes that follow travel in Noise records. With certificates, the
//! handshake runs inside a TLS session: its prologue includes the session's exported key, so that
//! a proof cannot be moved to another session, and the bytes that follow travel under TLS alone.

mod hello;
mod noise;
mod record;
mod refusal;
mod tls;

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use tessera_base::Diagnostic;

use super::byte_stream::ByteStream;
use super::system::limit_unanswered;
use crate::codes::T0756;
pub use hello::{Claim, ConnectionPurpose, HELLO_BYTES, parse_hello};
use noise::SharedKeys;
pub use record::{RECORD_BYTES, RecordStream};
pub use refusal::{Refusal, RefusalKind};
pub use tls::TlsConfig;

/// Minimum length of a secret file, in bytes; [`Secret::new`] refuses a shorter one.
pub const MIN_SECRET_BYTES: usize = 32;
/// Time limit of one handshake, TLS included; a slower peer is refused.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// The shared secret of a run, known to its ranks only: the pre-shared key of their handshakes.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// Derives the secret from the contents of a file, by the key derivation function of BLAKE3.
    /// Its context string separates the key from every other use of the file.
    ///
    /// # Errors
    /// T0756 if there are fewer than [`MIN_SECRET_BYTES`] bytes.
    pub fn new(bytes: &[u8]) -> Result<Secret, Diagnostic> {
        if bytes.len() < MIN_SECRET_BYTES {
            return Err(Diagnostic::error(&T0756, "the run's secret is too short to be safe")
                .with_label("secret", format!("{} bytes", bytes.len()))
                .with_label("minimum", format!("{MIN_SECRET_BYTES} bytes"))
                .with_hint("create one with `head -c 32 /dev/urandom > secret; chmod 600 secret`"));
        }
        Ok(Secret(blake3::derive_key("tessera 2026-11 noise pre-shared key of a run", bytes)))
    }
}

/// A rank's own credentials, which also determine the proof that it requires from peers.
#[derive(Debug, Clone)]
pub enum Credentials {
    /// The run's shared secret alone, without certificates.
    Secret(Secret),
    /// Certificates, and the secret too if peers must prove both.
    Tls(TlsConfig, Option<Secret>),
}

/// A peer that has proved its claim, with the protected stream to it.
pub struct AuthenticatedPeer {
    /// The peer's claim, which its proof covers.
    pub claim: Claim,
    /// The stream to the peer, which no third party can read or write.
    pub stream: Box<dyn ByteStream>,
}

impl std::fmt::Debug for AuthenticatedPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthenticatedPeer").field("claim", &self.claim).finish_non_exhaustive()
    }
}

/// Authenticates this process to the peer that it has connected to, and the peer to this process.
/// The result is `Ok` only if the peer has also admitted this process.
///
/// # Errors
/// A refusal (T0756), which names only the address.
pub fn connect_peer(
    stream: TcpStream,
    credentials: &Credentials,
    claim: &Claim,
    deadline: Instant,
) -> Result<AuthenticatedPeer, Refusal> {
    let side = HandshakeSide::Connector;
    let address = peer_address(&stream);
    run_handshake(stream, credentials, claim, side, deadline)
        .map_err(|(_, e)| Refusal::from_connector(&e, address, *claim, credentials.describe_methods()))
}

/// Authenticates the peer that has connected, and this process to the peer.
///
/// # Errors
/// A refusal (T0756), which names only the address and the rank that the peer claimed.
pub fn accept_peer(
    stream: TcpStream,
    credentials: &Credentials,
    own_claim: &Claim,
    deadline: Instant,
) -> Result<AuthenticatedPeer, Refusal> {
    let side = HandshakeSide::Acceptor;
    let address = peer_address(&stream);
    run_handshake(stream, credentials, own_claim, side, deadline)
        .map_err(|(claim, e)| Refusal::from_acceptor(&e, address, claim, credentials.describe_methods()))
}

/// Sets the socket options of a stream between hosts: frames leave without delay, and an
/// unreachable host is detected within `limit`.
///
/// # Errors
/// Returns the operating system's error.
pub fn tune_socket(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    limit_unanswered(stream, limit)
}

/// Fills `into` from a non-blocking stream before `deadline`.
///
/// # Errors
/// Returns the stream's error, `UnexpectedEof` or `TimedOut`.
pub fn read_exact(stream: &mut dyn ByteStream, mut into: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !into.is_empty() {
        match stream.read(into) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => into = &mut into[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => wait_ready(stream.fd(), PollFlags::IN, deadline)?,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes all bytes to a non-blocking stream before `deadline`.
///
/// # Errors
/// Returns the stream's error or `TimedOut`.
pub fn write_all(stream: &mut dyn ByteStream, mut from: &[u8], deadline: Instant) -> io::Result<()> {
    loop {
        let outcome = if from.is_empty() { stream.flush().map(|()| 0) } else { stream.write(from) };
        match outcome {
            Ok(_) if from.is_empty() => return Ok(()),
            Ok(n) => from = &from[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => wait_ready(stream.fd(), PollFlags::OUT, deadline)?,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

impl Credentials {
    fn describe_methods(&self) -> &'static str {
        match self {
            Credentials::Secret(_) => "with a secret and without certificates",
            Credentials::Tls(_, None) => "with certificates and without a secret",
            Credentials::Tls(_, Some(_)) => "with certificates and a secret",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandshakeSide {
    Connector,
    Acceptor,
}

/// The claim that the peer has made so far, if any, and the error.
type HandshakeError = (Option<Claim>, io::Error);

fn run_handshake(
    stream: TcpStream,
    credentials: &Credentials,
    own_claim: &Claim,
    side: HandshakeSide,
    deadline: Instant,
) -> Result<AuthenticatedPeer, HandshakeError> {
    let without_claim = |e: io::Error| (None, e);
    stream.set_nonblocking(true).map_err(without_claim)?;
    let (mut stream, keys) = match credentials {
        Credentials::Secret(secret) => {
            (RawStream::Plain(stream), SharedKeys { psk: secret.0, channel_binding: [0; 32] })
        }
        Credentials::Tls(tls, secret) => {
            let mut stream = tls.open_session(stream, side).map_err(without_claim)?;
            stream.complete_handshake(deadline).map_err(without_claim)?;
            let channel_binding = stream.export_channel_binding().map_err(without_claim)?;
            let psk = match secret {
                Some(secret) => secret.0,
                // With certificates alone, the session's exported key replaces the secret.
                None => blake3::derive_key("tessera 2026-11 run without a secret", &channel_binding),
            };
            (RawStream::Tls(Box::new(stream)), SharedKeys { psk, channel_binding })
        }
    };
    let (claim, records) = noise::exchange_proofs(stream.as_stream(), own_claim, side, &keys, deadline)?;
    let stream: Box<dyn ByteStream> = match stream {
        RawStream::Plain(stream) => Box::new(RecordStream::new(stream, records)),
        RawStream::Tls(stream) => stream,
    };
    Ok(AuthenticatedPeer { claim, stream })
}

enum RawStream {
    Plain(TcpStream),
    Tls(Box<tls::TlsSession>),
}

impl RawStream {
    fn as_stream(&mut self) -> &mut dyn ByteStream {
        match self {
            RawStream::Plain(stream) => stream,
            RawStream::Tls(stream) => &mut **stream,
        }
    }
}

fn wait_ready(fd: BorrowedFd<'_>, flags: PollFlags, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ErrorKind::TimedOut.into());
    }
    let limit = Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() };
    match poll(&mut [PollFd::from_borrowed_fd(fd, flags)], Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn peer_address(stream: &TcpStream) -> String {
    stream.peer_addr().map_or("an unknown address".into(), |a: SocketAddr| a.to_string())
}
