//! The welcome message: it carries a rank's identity and its descriptors over the socket on its
//! standard input.

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    recvmsg, sendmsg,
};
use tessera_base::Diagnostic;

use super::byte_stream::ByteStream;
use super::link::Frame;
use super::reactor::{LinkId, Reactor};
use super::system::{ParentTie, RECEIVE_FLAGS, SEND_FLAGS, close_on_exec};
use crate::Failure;
use crate::codes::T0750;
use crate::wire::{FaultReport, HEADER_BYTES, LAUNCHER, Message, Welcome, decode_body, decode_header};

/// Maximum descriptors in one message, a kernel limit.
pub(crate) const MAX_FDS: usize = 253;
/// How long a rank waits for its welcome.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(60);

/// A process after it has joined a run: its rank, and open links to the launcher and to other
/// ranks.
pub struct JoinedRank {
    /// Rank, world size, session and the application's payload.
    pub welcome: Welcome,
    /// The application's descriptors, in the order in which the application gave them to the
    /// launcher.
    pub extra_fds: Vec<OwnedFd>,
    /// Socket to the launcher; `None` if no launcher started this rank.
    pub(crate) launcher: Option<Box<dyn ByteStream>>,
    /// Ends this process with its launcher; `None` if no launcher started this rank.
    pub(super) tie: Option<ParentTie>,
    pub(crate) links: Vec<Box<dyn ByteStream>>,
}

impl JoinedRank {
    /// Builds a rank that found its peers without a launcher. The order of `links` depends on the
    /// rank: the leader has one link per rank that it leads, in ascending order; a worker has one
    /// link, to its leader; a mesh leader has the leader's link and then its members' links.
    #[must_use]
    pub fn from_links(
        welcome: Welcome,
        extra_fds: Vec<OwnedFd>,
        links: Vec<Box<dyn ByteStream>>,
    ) -> JoinedRank {
        JoinedRank { welcome, extra_fds, launcher: None, tie: None, links }
    }

    /// Gives a rank that a launcher started alone the peers that it found by itself, and its place among them. The socket to
    /// the launcher stays.
    #[must_use]
    pub fn with_peers(self, welcome: Welcome, links: Vec<Box<dyn ByteStream>>) -> JoinedRank {
        JoinedRank { welcome, links, ..self }
    }

    /// Reports why this rank does not start: the leader reports to its launcher, any other rank to
    /// its leader. Without this report, peers would see only a closed socket and name the rank as
    /// dead. Returns false if there is no peer to report to, or if the report could not be written.
    pub fn report_refusal(&mut self, failure: &Failure) -> bool {
        let rank = self.welcome.rank;
        let (stream, message) = match rank {
            0 => (self.launcher.as_mut(), Message::Failed(failure.clone())),
            _ => {
                let fault = FaultReport { failure: failure.clone(), secondary: false };
                (self.links.first_mut(), Message::Fault(fault))
            }
        };
        let (Some(stream), Ok(frame)) = (stream, Frame::new(rank, &message)) else { return false };
        // The report is a few hundred bytes into an empty socket. A peer that does not read them
        // still sees this process end.
        stream.write(frame.bytes()).is_ok_and(|n| n == frame.bytes().len())
    }

    /// Returns the links to other ranks, in the order of [`JoinedRank::from_links`], and closes the
    /// socket to the launcher. For a process that sends other messages than the lockstep's.
    #[must_use]
    pub fn into_links(self) -> Vec<Box<dyn ByteStream>> {
        self.links
    }
}

impl std::fmt::Debug for JoinedRank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "JoinedRank({:?}, {} extra descriptors, {} links)",
            self.welcome,
            self.extra_fds.len(),
            self.links.len()
        )
    }
}

/// Reads the welcome from standard input. A process that the launcher spawned must call this once,
/// before anything else.
///
/// From then on, the process ends when the launcher dies. In the leader, the control thread later
/// undoes this, because the leader must still close its record.
///
/// # Errors
/// T0750 if standard input is not the launcher's socket, or if the welcome does not arrive
/// completely.
pub fn join_launch() -> Result<JoinedRank, Diagnostic> {
    let launcher =
        std::io::stdin().as_fd().try_clone_to_owned().map_err(|e| io_diagnostic("standard input", &e))?;
    let tie = ParentTie::tie_to_parent().map_err(|e| io_diagnostic("parent-death signal", &e))?;
    Ok(JoinedRank { tie: Some(tie), ..receive_welcome(UnixStream::from(launcher))? })
}

/// Sends the welcome over the new link `link`, whose socket is `stream`.
pub(crate) fn send_welcome(
    reactor: &mut Reactor,
    link: LinkId,
    stream: &UnixStream,
    welcome: Welcome,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Diagnostic> {
    if fds.len() > MAX_FDS {
        return Err(Diagnostic::error(&T0750, "one message cannot carry that many descriptors")
            .with_label(format!("rank {}", welcome.rank), format!("{} descriptors", fds.len()))
            .with_label("limit", MAX_FDS.to_string()));
    }
    let frame = Frame::new(LAUNCHER, &Message::Welcome(welcome))?;
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Diagnostic::error(&T0750, "the descriptors do not fit into one message"));
    }
    // The descriptors are attached to the header bytes; the rest of the frame follows as plain
    // bytes.
    let head = IoSlice::new(&frame.bytes()[..HEADER_BYTES]);
    let sent = retry_on_intr(|| sendmsg(stream, &[head], &mut ancillary, SEND_FLAGS))
        .map_err(|e| io_diagnostic("sending the welcome", &e.into()))?;
    reactor.send_remaining(link, &frame, sent);
    Ok(())
}

pub(crate) fn receive_welcome(mut stream: UnixStream) -> Result<JoinedRank, Diagnostic> {
    let mut head = [0; HEADER_BYTES];
    let mut fds = Vec::new();
    let mut received_bytes = 0;
    stream.set_read_timeout(Some(WELCOME_TIMEOUT)).map_err(|e| io_diagnostic("launcher socket", &e))?;
    while received_bytes < HEADER_BYTES {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut part = [IoSliceMut::new(&mut head[received_bytes..])];
        // The kernel interrupts a wait with a time limit when a stopped process continues.
        let message = retry_on_intr(|| recvmsg(&stream, &mut part, &mut ancillary, RECEIVE_FLAGS))
            .map_err(|e| io_diagnostic("receiving the welcome", &e.into()))?;
        if message.bytes == 0 || message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Diagnostic::error(&T0750, "the welcome arrived incomplete")
                .with_label("received", format!("{received_bytes} bytes, then the socket ended")));
        }
        received_bytes += message.bytes;
        for m in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = m {
                for fd in received {
                    close_on_exec(fd.as_fd()).map_err(|e| io_diagnostic("receiving the welcome", &e))?;
                    fds.push(fd);
                }
            }
        }
    }
    let header = decode_header(&head)?;
    let mut body = vec![0; header.body_bytes()];
    stream.read_exact(&mut body).map_err(|e| io_diagnostic("receiving the welcome", &e))?;
    let welcome = match decode_body(&header, &body)? {
        Message::Welcome(w) => w,
        other => {
            return Err(Diagnostic::error(
                &T0750,
                format!("a {:?} message arrived instead of the welcome", other.kind()),
            ));
        }
    };
    let expected_fds = u64::from(welcome.control_sockets) + u64::from(welcome.extra_fds);
    if fds.len() as u64 != expected_fds {
        return Err(Diagnostic::error(&T0750, "the number of descriptors differs from the welcome")
            .with_label("welcome", format!("{expected_fds} descriptors"))
            .with_label("received", format!("{} descriptors", fds.len())));
    }
    let extras = fds.split_off(welcome.control_sockets as usize);
    let links = fds.into_iter().map(|fd| Box::new(UnixStream::from(fd)) as Box<dyn ByteStream>).collect();
    Ok(JoinedRank { welcome, extra_fds: extras, launcher: Some(Box::new(stream)), tie: None, links })
}

pub(crate) fn io_diagnostic(what: &str, e: &std::io::Error) -> Diagnostic {
    Diagnostic::error(&T0750, format!("{what} failed")).with_label("system", e.to_string())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn descriptors_arrive_and_work() {
        let (here, there) = UnixStream::pair().expect("a pair");
        let (mut a, b) = UnixStream::pair().expect("a pair");
        let (mut c, d) = UnixStream::pair().expect("a pair");
        let welcome = Welcome {
            rank: 1,
            world_size: 2,
            session: 9,
            control_sockets: 1,
            extra_fds: 1,
            payload: vec![7; 100_000],
        };
        // The payload is larger than the socket's buffer, so sender and receiver must run
        // concurrently.
        let receiver = std::thread::spawn(move || receive_welcome(there));
        let mut reactor = Reactor::new(&crate::Limits::default()).expect("a reactor");
        let link = reactor.add_link(Box::new(here.try_clone().expect("a clone")), [1]).expect("a link");
        send_welcome(&mut reactor, link, &here, welcome.clone(), &[b.as_fd(), d.as_fd()]).expect("sent");
        reactor.flush(Duration::from_secs(10));
        let mut joined = receiver.join().expect("no panic").expect("joined");
        assert_eq!(joined.welcome, welcome);
        a.write_all(b"x").expect("written");
        let mut byte = [0];
        joined.links[0].read(&mut byte).expect("read");
        assert_eq!(&byte, b"x");
        c.write_all(b"y").expect("written");
        UnixStream::from(joined.extra_fds.remove(0)).read_exact(&mut byte).expect("read");
        assert_eq!(&byte, b"y");
    }

    #[test]
    fn a_rank_without_a_launcher_is_refused() {
        let (here, there) = UnixStream::pair().expect("a pair");
        drop(here);
        assert_eq!(receive_welcome(there).expect_err("refused").code.id, "T0750");
    }
}
