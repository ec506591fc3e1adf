//! Who may be a peer: a proof of the run's secret, certificates, or both, before anything of a peer is read but a hello
//! of fixed size; and streams that nobody can write into from outside.
//!
//! Both sides send a hello with a fresh nonce. Each then proves, by a keyed hash over both hellos, that it holds the
//! run's secret; over TLS the session's own key goes in as well, so that a proof cannot be carried to another session.
//! Afterwards bytes travel under TLS, or in records whose hashes are keyed by the secret, both nonces and a count, so
//! that a changed, repeated or foreign record ends the stream. Records are not encrypted; TLS is.

mod hello;
mod record;
mod tls;

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use tessera_base::Diagnostic;

use super::stream::Stream;
use crate::tripwire::T0756;
pub use hello::{Claim, HELLO_BYTES, Purpose, read_hello};
pub use record::{RECORD_BYTES, Records};
pub use tls::Tls;

/// Fewest bytes of a secret.
pub const SECRET_BYTES: usize = 32;
/// Longest handshake.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// What every rank of a run knows and nobody else.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// From the contents of a file.
    ///
    /// # Errors
    /// T0756 below [`SECRET_BYTES`] bytes.
    pub fn new(bytes: &[u8]) -> Result<Secret, Diagnostic> {
        if bytes.len() < SECRET_BYTES {
            return Err(Diagnostic::error(&T0756, "the run's secret is too short to keep anybody out")
                .at("secret", format!("{} bytes", bytes.len()))
                .at("least", format!("{SECRET_BYTES} bytes"))
                .hint("make one with `head -c 32 /dev/urandom > secret; chmod 600 secret`"));
        }
        Ok(Secret(blake3::derive_key("tessera 2026-11 secret of a run", bytes)))
    }
}

/// What a rank can prove, and what it asks of its peers.
#[derive(Debug, Clone)]
pub enum Credentials {
    /// The run's secret.
    Secret(Secret),
    /// Certificates, and the secret if there is one.
    Tls(Tls, Option<Secret>),
}

/// A peer that has proved itself.
pub struct Proved {
    /// What it said of itself, which its proof covers.
    pub claim: Claim,
    /// The stream to it, which nobody else can write into.
    pub stream: Box<dyn Stream>,
}

impl std::fmt::Debug for Proved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proved").field("claim", &self.claim).finish_non_exhaustive()
    }
}

/// Proves this process to whom it has connected to, and has it proved in turn.
///
/// # Errors
/// T0756, naming the address and nothing more.
pub fn connect(
    stream: TcpStream,
    credentials: &Credentials,
    mine: &Claim,
    until: Instant,
) -> Result<Proved, Diagnostic> {
    let at = address(&stream);
    let refused = |how: &str| {
        Diagnostic::error(&T0756, format!("the process at {at} and this rank did not prove themselves to each other"))
            .at("here", format!("{mine}, {}", credentials.words()))
            .at(at.clone(), how.to_string())
            .hint("every rank of a run needs the same secret file, or certificates of the same authority; and only one run may listen at an address")
    };
    handshake(stream, credentials, mine, Side::Connects, until).map_err(|(_, e)| refused(&words(&e)))
}

/// Has who connected prove itself, and proves this process in turn.
///
/// # Errors
/// T0756, naming the address, what the peer called itself, and nothing more.
pub fn accept(
    stream: TcpStream,
    credentials: &Credentials,
    mine: &Claim,
    until: Instant,
) -> Result<Proved, Diagnostic> {
    let at = address(&stream);
    handshake(stream, credentials, mine, Side::Accepts, until).map_err(|(claim, e)| {
        let who = claim.map_or(String::new(), |c| format!(", which calls itself {c},"));
        Diagnostic::error(&T0756, format!("a process at {at}{who} did not prove that it belongs to this run"))
            .at(at.clone(), words(&e))
            .at("here", credentials.words())
    })
}

/// Settings of every stream between hosts: frames leave at once, and a host that is cut off is noticed within `limit`.
///
/// # Errors
/// The system's.
pub fn tune(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(1))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    sockopt::set_tcp_user_timeout(stream, u32::try_from(limit.as_millis()).unwrap_or(u32::MAX))?;
    Ok(())
}

/// Reads exactly so many bytes before `until`, from a stream that never blocks.
///
/// # Errors
/// Those of the stream, `UnexpectedEof`, or `TimedOut`.
pub fn read_exact(stream: &mut dyn Stream, mut into: &mut [u8], until: Instant) -> io::Result<()> {
    while !into.is_empty() {
        match stream.read(into) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => into = &mut into[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => ready(stream.fd(), PollFlags::IN, until)?,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Writes all of the bytes before `until`, to a stream that never blocks.
///
/// # Errors
/// Those of the stream, or `TimedOut`.
pub fn write_all(stream: &mut dyn Stream, mut from: &[u8], until: Instant) -> io::Result<()> {
    loop {
        let outcome = if from.is_empty() { stream.flush().map(|()| 0) } else { stream.write(from) };
        match outcome {
            Ok(_) if from.is_empty() => return Ok(()),
            Ok(n) => from = &from[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => ready(stream.fd(), PollFlags::OUT, until)?,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

impl Credentials {
    fn words(&self) -> &'static str {
        match self {
            Credentials::Secret(_) => "with a secret and without certificates",
            Credentials::Tls(_, None) => "with certificates and without a secret",
            Credentials::Tls(_, Some(_)) => "with certificates and a secret",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Connects,
    Accepts,
}

/// What a peer called itself so far, and what went wrong.
type Stopped = (Option<Claim>, io::Error);

fn handshake(
    stream: TcpStream,
    credentials: &Credentials,
    mine: &Claim,
    side: Side,
    until: Instant,
) -> Result<Proved, Stopped> {
    let unknown = |e: io::Error| (None, e);
    stream.set_nonblocking(true).map_err(unknown)?;
    let (mut stream, secret, bound) = match credentials {
        Credentials::Secret(secret) => (Under::Plain(stream), Some(secret), [0; 32]),
        Credentials::Tls(tls, secret) => {
            let mut stream = tls.over(stream, side).map_err(unknown)?;
            stream.shake_hands(until).map_err(unknown)?;
            let bound = stream.bound().map_err(unknown)?;
            (Under::Tls(Box::new(stream)), secret.as_ref(), bound)
        }
    };
    let key = match secret {
        Some(secret) => *blake3::keyed_hash(&secret.0, &bound).as_bytes(),
        // Certificates alone: the session's key stands for them.
        None => blake3::derive_key("tessera 2026-11 run without a secret", &bound),
    };
    let (claim, records) = hello::exchange(stream.stream(), mine, side, &key, until)?;
    let stream: Box<dyn Stream> = match stream {
        Under::Plain(stream) => Box::new(Records::new(stream, records)),
        Under::Tls(stream) => stream,
    };
    Ok(Proved { claim, stream })
}

enum Under {
    Plain(TcpStream),
    Tls(Box<tls::Session>),
}

impl Under {
    fn stream(&mut self) -> &mut dyn Stream {
        match self {
            Under::Plain(stream) => stream,
            Under::Tls(stream) => &mut **stream,
        }
    }
}

fn ready(fd: BorrowedFd<'_>, flags: PollFlags, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ErrorKind::TimedOut.into());
    }
    let limit = Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos().into() };
    match poll(&mut [PollFd::from_borrowed_fd(fd, flags)], Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

fn address(stream: &TcpStream) -> String {
    stream.peer_addr().map_or("an unknown address".into(), |a: SocketAddr| a.to_string())
}

/// What of an error may be told: whether the peer was late or ended, not what of its proof was wrong.
fn words(e: &io::Error) -> String {
    match e.kind() {
        ErrorKind::TimedOut => format!("it did not finish within {} s", HANDSHAKE_LIMIT.as_secs()),
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "it closed the connection".into()
        }
        _ => "its proof does not hold".into(),
    }
}
