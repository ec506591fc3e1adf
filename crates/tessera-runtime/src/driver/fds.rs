//! The welcome: a rank's identity and its descriptors, over the socket on its standard input.

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Signal, set_parent_process_death_signal};
use tessera_base::Diagnostic;

use super::T0750;
use super::hub::{Hub, LinkId};
use super::link::Frame;
use super::stream::Stream;
use crate::Failure;
use crate::wire::{Fault, HEADER_BYTES, LAUNCHER, Message, Welcome, decode_body, decode_header};

/// The kernel's limit on descriptors in one message.
pub(crate) const MAX_FDS: usize = 253;
/// How long a rank waits for the launcher to say who it is.
const WELCOME_LIMIT: Duration = Duration::from_secs(60);

/// A rank that knows who it is and holds its links.
pub struct Joined {
    /// Rank, world, session and the door's bytes.
    pub welcome: Welcome,
    /// The door's descriptors, in the order in which the door gave them to the launcher.
    pub extras: Vec<OwnedFd>,
    /// Absent where nobody launched this rank.
    pub(crate) launcher: Option<Box<dyn Stream>>,
    pub(crate) links: Vec<Box<dyn Stream>>,
}

impl Joined {
    /// A rank that found its peers without a launcher. Links: of the leader, one to each rank that it speaks with,
    /// in ascending order; of a worker, one to its leader; of a mesh leader, the leader's and then its members'.
    #[must_use]
    pub fn over(welcome: Welcome, extras: Vec<OwnedFd>, links: Vec<Box<dyn Stream>>) -> Joined {
        Joined { welcome, extras, launcher: None, links }
    }

    /// Tells those who wait for this rank why it does not begin: the leader its launcher, a rank its leader. A rank that
    /// only left would be named as dead. Whether there is anybody to be told.
    pub fn refuse(&mut self, failure: &Failure) -> bool {
        let rank = self.welcome.rank;
        let (stream, message) = match rank {
            0 => (self.launcher.as_mut(), Message::Failed(failure.clone())),
            _ => {
                let fault = Fault { failure: failure.clone(), secondary: false };
                (self.links.first_mut(), Message::Fault(fault))
            }
        };
        let (Some(stream), Ok(frame)) = (stream, Frame::new(rank, &message)) else { return false };
        // A few hundred bytes into an empty socket; whoever does not read them sees this process end.
        stream.write(frame.bytes()).is_ok_and(|n| n == frame.bytes().len())
    }

    /// The links alone, for a process that speaks with its peers in another way.
    #[must_use]
    pub fn into_links(self) -> Vec<Box<dyn Stream>> {
        self.links
    }
}

impl std::fmt::Debug for Joined {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Joined({:?}, {} extras, {} links)", self.welcome, self.extras.len(), self.links.len())
    }
}

/// Reads the welcome from standard input. Called once, first thing, by a process that the launcher spawned.
///
/// From here on the kernel kills the process when the launcher dies. The leader, once its control thread runs, is
/// only woken by it: it has a record to close.
pub fn join() -> Result<Joined, Diagnostic> {
    let launcher = std::io::stdin().as_fd().try_clone_to_owned().map_err(|e| failed("standard input", &e))?;
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| failed("parent-death signal", &e.into()))?;
    receive_welcome(UnixStream::from(launcher))
}

/// The leader sees the launcher's socket close; a leader that is stopped is continued so that it can.
pub(crate) fn outlive_launcher() {
    // Where it cannot be set the kernel goes on to kill, which leaves nobody behind either.
    let _ = set_parent_process_death_signal(Some(Signal::CONT));
}

/// Sends the welcome over a fresh link of the hub, whose stream this is.
pub(crate) fn send_welcome(
    hub: &mut Hub,
    link: LinkId,
    stream: &UnixStream,
    welcome: Welcome,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Diagnostic> {
    if fds.len() > MAX_FDS {
        return Err(Diagnostic::error(&T0750, "more descriptors than one message can carry")
            .at(format!("rank {}", welcome.rank), format!("{} descriptors", fds.len()))
            .at("limit", MAX_FDS.to_string()));
    }
    let frame = Frame::new(LAUNCHER, &Message::Welcome(welcome))?;
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Diagnostic::error(&T0750, "the descriptors do not fit one message"));
    }
    // The descriptors ride on the first bytes; the rest of the frame follows as plain bytes.
    let head = IoSlice::new(&frame.bytes()[..HEADER_BYTES]);
    let sent = sendmsg(stream, &[head], &mut ancillary, SendFlags::NOSIGNAL)
        .map_err(|e| failed("sending the welcome", &e.into()))?;
    hub.send_rest(link, &frame, sent);
    Ok(())
}

pub(crate) fn receive_welcome(mut stream: UnixStream) -> Result<Joined, Diagnostic> {
    let mut head = [0; HEADER_BYTES];
    let mut fds = Vec::new();
    let mut got = 0;
    stream.set_read_timeout(Some(WELCOME_LIMIT)).map_err(|e| failed("launcher socket", &e))?;
    while got < HEADER_BYTES {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut part = [IoSliceMut::new(&mut head[got..])];
        let message = recvmsg(&stream, &mut part, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
            .map_err(|e| failed("receiving the welcome", &e.into()))?;
        if message.bytes == 0 || message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Diagnostic::error(&T0750, "the welcome did not arrive whole")
                .at("received", format!("{got} bytes, then the socket ended")));
        }
        got += message.bytes;
        for m in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = m {
                fds.extend(received);
            }
        }
    }
    let header = decode_header(&head)?;
    let mut body = vec![0; header.body_bytes()];
    stream.read_exact(&mut body).map_err(|e| failed("receiving the welcome", &e))?;
    let welcome = match decode_body(&header, &body)? {
        Message::Welcome(w) => w,
        other => {
            return Err(Diagnostic::error(
                &T0750,
                format!("a {:?} came instead of the welcome", other.kind()),
            ));
        }
    };
    let want = u64::from(welcome.sockets) + u64::from(welcome.extras);
    if fds.len() as u64 != want {
        return Err(Diagnostic::error(&T0750, "the welcome and its descriptors disagree")
            .at("welcome", format!("{want} descriptors"))
            .at("received", format!("{} descriptors", fds.len())));
    }
    let extras = fds.split_off(welcome.sockets as usize);
    let links = fds.into_iter().map(|fd| Box::new(UnixStream::from(fd)) as Box<dyn Stream>).collect();
    Ok(Joined { welcome, extras, launcher: Some(Box::new(stream)), links })
}

pub(crate) fn failed(what: &str, e: &std::io::Error) -> Diagnostic {
    Diagnostic::error(&T0750, format!("{what} failed")).at("system", e.to_string())
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
        let welcome =
            Welcome { rank: 1, world: 2, session: 9, sockets: 1, extras: 1, payload: vec![7; 100_000] };
        // The payload is larger than a socket's buffer, so both ends must run.
        let receiver = std::thread::spawn(move || receive_welcome(there));
        let mut hub = Hub::new(&crate::Limits::default()).expect("a hub");
        let link = hub.add(Box::new(here.try_clone().expect("a clone")), [1]).expect("a link");
        send_welcome(&mut hub, link, &here, welcome.clone(), &[b.as_fd(), d.as_fd()]).expect("sent");
        hub.flush(Duration::from_secs(10));
        let mut joined = receiver.join().expect("no panic").expect("joined");
        assert_eq!(joined.welcome, welcome);
        a.write_all(b"x").expect("written");
        let mut byte = [0];
        joined.links[0].read(&mut byte).expect("read");
        assert_eq!(&byte, b"x");
        c.write_all(b"y").expect("written");
        UnixStream::from(joined.extras.remove(0)).read_exact(&mut byte).expect("read");
        assert_eq!(&byte, b"y");
    }

    #[test]
    fn a_rank_started_by_hand_is_told_so() {
        let (here, there) = UnixStream::pair().expect("a pair");
        drop(here);
        assert_eq!(receive_welcome(there).expect_err("refused").code.id, "T0750");
    }
}
