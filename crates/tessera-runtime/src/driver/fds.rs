//! The welcome: a rank's identity and its descriptors, over the socket on its standard input.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Signal, set_parent_process_death_signal};
use tessera_base::Diagnostic;

use super::T0750;
use super::link::{self, LinkEnd};
use crate::wire::{self, HEADER_BYTES, LAUNCHER, Message, Welcome};

/// The kernel's limit on descriptors in one message.
pub(crate) const MAX_FDS: usize = 253;

/// A rank that knows who it is.
#[derive(Debug)]
pub struct Joined {
    /// Rank, world, session and the door's bytes.
    pub welcome: Welcome,
    /// The door's descriptors, in the order in which the door gave them to the launcher.
    pub extras: Vec<OwnedFd>,
    pub(crate) launcher: UnixStream,
    /// One per worker in ascending order of rank for the leader, one to the leader for a worker.
    pub(crate) sockets: Vec<UnixStream>,
}

/// Reads the welcome from standard input. Called once, first thing, by a process that the launcher spawned.
///
/// A worker is killed by the kernel when the launcher dies; the leader is not, because it closes the record.
pub fn join() -> Result<Joined, Diagnostic> {
    let launcher = std::io::stdin().as_fd().try_clone_to_owned().map_err(|e| failed("standard input", &e))?;
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| failed("parent-death signal", &e.into()))?;
    let joined = receive_welcome(UnixStream::from(launcher))?;
    if joined.welcome.rank == 0 {
        set_parent_process_death_signal(None).map_err(|e| failed("parent-death signal", &e.into()))?;
    }
    Ok(joined)
}

pub(crate) fn send_welcome(
    stream: &UnixStream,
    welcome: Welcome,
    fds: &[BorrowedFd<'_>],
) -> Result<(), Diagnostic> {
    if fds.len() > MAX_FDS {
        return Err(Diagnostic::error(&T0750, "more descriptors than one message can carry")
            .at(format!("rank {}", welcome.rank), format!("{} descriptors", fds.len()))
            .at("limit", MAX_FDS.to_string()));
    }
    let frame = wire::encode(LAUNCHER, &Message::Welcome(welcome))?;
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Diagnostic::error(&T0750, "the descriptors do not fit one message"));
    }
    // The descriptors ride on the first bytes; the rest of the frame follows as plain bytes.
    let sent = sendmsg(stream, &[IoSlice::new(&frame[..HEADER_BYTES])], &mut ancillary, SendFlags::NOSIGNAL)
        .map_err(|e| failed("sending the welcome", &e.into()))?;
    link::send(stream, &frame[sent..]).map_err(|e| failed("sending the welcome", &e))
}

pub(crate) fn receive_welcome(mut stream: UnixStream) -> Result<Joined, Diagnostic> {
    let mut head = [0; HEADER_BYTES];
    let mut fds = Vec::new();
    let mut got = 0;
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
    let welcome = match link::receive_rest(&head, &mut stream) {
        Ok((_, Message::Welcome(w))) => w,
        Ok((_, other)) => {
            return Err(Diagnostic::error(
                &T0750,
                format!("a {:?} came instead of the welcome", other.kind()),
            ));
        }
        Err(LinkEnd::Broken(d)) => return Err(d),
        Err(LinkEnd::Closed(how)) => {
            return Err(Diagnostic::error(&T0750, format!("no welcome: {how}")));
        }
    };
    let want = u64::from(welcome.sockets) + u64::from(welcome.extras);
    if fds.len() as u64 != want {
        return Err(Diagnostic::error(&T0750, "the welcome and its descriptors disagree")
            .at("welcome", format!("{want} descriptors"))
            .at("received", format!("{} descriptors", fds.len())));
    }
    let extras = fds.split_off(welcome.sockets as usize);
    let sockets = fds.into_iter().map(UnixStream::from).collect();
    Ok(Joined { welcome, extras, launcher: stream, sockets })
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
        let sender = std::thread::spawn({
            let welcome = welcome.clone();
            move || send_welcome(&here, welcome, &[b.as_fd(), d.as_fd()])
        });
        let mut joined = receive_welcome(there).expect("joined");
        assert_eq!(sender.join().expect("no panic"), Ok(()));
        assert_eq!(joined.welcome, welcome);
        a.write_all(b"x").expect("written");
        let mut byte = [0];
        joined.sockets[0].read_exact(&mut byte).expect("read");
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
