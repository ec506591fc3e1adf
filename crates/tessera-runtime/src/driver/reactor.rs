//! The reactor: the event loop's view of every socket of a process, polled by the thread that owns
//! the state machines.
//!
//! The reactor splits incoming bytes into frames and writes outgoing frames, and does not interpret
//! their messages. No peer can block it: unsent frames wait in a bounded queue per peer, and a peer
//! that reads nothing for the write limit has failed. Other threads of the process wake the reactor
//! through a [`Waker`].

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};

use super::byte_stream::ByteStream;
use super::link::{DisconnectReason, Frame, MAX_QUEUED_BYTES, MAX_QUEUED_FRAMES, PeerLink};
use super::system::WakeEvent;
use crate::Limits;
use crate::limits::AwakeClock;

/// Maximum bytes of one read from a socket; all links share the buffer.
const READ_BUFFER_BYTES: usize = 64 << 10;
/// Maximum number of unread messages in an inbox; beyond it, the sending thread blocks.
const INBOX_CAPACITY: usize = 256;

/// Identifies a link for the lifetime of its reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkId(usize);

/// An event that [`Reactor::wait_events`] reports.
#[derive(Debug)]
pub enum ReactorEvent {
    /// A complete frame arrived.
    Frame {
        /// Link on which the frame arrived; the peer may have forwarded the frame of another rank.
        link: LinkId,
        /// The complete frame: its header and its payload.
        frame: Frame,
    },
    /// A link has ended; no further events come from it.
    Disconnected {
        /// The link that ended; its id is not used again.
        link: LinkId,
        /// Why the link ended.
        reason: DisconnectReason,
    },
    /// A watched descriptor became readable. Reported once.
    FdReady(usize),
}

/// Wakes the reactor's thread from another thread.
#[derive(Debug, Clone)]
pub struct Waker(Arc<WakeEvent>);

impl Waker {
    /// Makes the current wait, or the next one, return.
    pub fn wake_reactor(&self) {
        self.0.signal();
    }
}

/// The sending end of a bounded queue to the reactor's thread.
#[derive(Debug)]
pub struct InboxSender<T> {
    queue: SyncSender<T>,
    waker: Waker,
}

impl<T> InboxSender<T> {
    /// Sends a value, blocking while the queue is full; returns false if the receiver is gone.
    pub fn send(&self, value: T) -> bool {
        let sent = self.queue.send(value).is_ok();
        self.waker.wake_reactor();
        sent
    }
}

/// The event loop of a process: it polls the sockets of all links and the watched descriptors.
pub struct Reactor {
    links: Vec<Option<PeerLink>>,
    watched_fds: Vec<(usize, OwnedFd)>,
    waker: Waker,
    start: Instant,
    clock: AwakeClock,
    heartbeat_ns: u64,
    write_limit_ns: u64,
    read_buffer: Vec<u8>,
    /// Links that ended during a write, not yet reported.
    disconnected: VecDeque<(LinkId, DisconnectReason)>,
}

impl Reactor {
    /// Creates a reactor without links. A peer must read something within `ready_ns`.
    ///
    /// # Errors
    /// Returns the operating system's error if no descriptor is available.
    pub fn new(limits: &Limits) -> std::io::Result<Reactor> {
        let event = WakeEvent::new()?;
        Ok(Reactor {
            links: Vec::new(),
            watched_fds: Vec::new(),
            waker: Waker(Arc::new(event)),
            start: Instant::now(),
            clock: AwakeClock::default(),
            heartbeat_ns: limits.heartbeat_ns,
            write_limit_ns: limits.ready_ns,
            read_buffer: vec![0; READ_BUFFER_BYTES],
            disconnected: VecDeque::new(),
        })
    }

    /// Adds a stream as a link. A frame whose origin is not in `origins` breaks the link.
    ///
    /// # Errors
    /// Returns the operating system's error if the descriptor cannot be made non-blocking.
    pub fn add_link(
        &mut self,
        stream: Box<dyn ByteStream>,
        origins: impl IntoIterator<Item = u32>,
    ) -> std::io::Result<LinkId> {
        ioctl_fionbio(stream.fd(), true)?;
        self.links.push(Some(PeerLink::new(stream, origins.into_iter().collect())));
        Ok(LinkId(self.links.len() - 1))
    }

    /// Watches a descriptor and reports once, as `number`, that it became readable.
    pub fn watch_fd(&mut self, number: usize, fd: OwnedFd) {
        self.watched_fds.push((number, fd));
    }

    /// Returns a handle with which other threads wake this reactor.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Creates a bounded queue from other threads; each send wakes this reactor.
    #[must_use]
    pub fn new_inbox<T>(&self) -> (InboxSender<T>, Receiver<T>) {
        let (queue, inbox) = sync_channel(INBOX_CAPACITY);
        (InboxSender { queue, waker: self.waker() }, inbox)
    }

    /// Allows the peer of a link to stop reading: the link gets no write deadline, and frames
    /// beyond the queue's bound are dropped.
    pub fn set_best_effort(&mut self, link: LinkId) {
        if let Some(l) = self.link_mut(link) {
            l.best_effort = true;
        }
    }

    /// Sends a frame to a peer, or queues it. If the link fails, the next wait reports that.
    pub fn send(&mut self, link: LinkId, frame: &Frame) {
        self.send_remaining(link, frame, 0);
    }

    /// Sends a frame whose first `sent` bytes were already written to the socket. The queue must be
    /// empty.
    pub(crate) fn send_remaining(&mut self, link: LinkId, frame: &Frame, sent: usize) {
        let now_ns = self.now_ns();
        let Some(l) = self.link_mut(link).filter(|l| l.write_error.is_none()) else { return };
        let bytes = l.queued_bytes + frame.bytes().len();
        if !l.queue.is_empty() && (l.queue.len() >= MAX_QUEUED_FRAMES || bytes > MAX_QUEUED_BYTES) {
            if l.best_effort {
                return;
            }
            let text = format!("its queue is full: {} frames, {} bytes", l.queue.len(), l.queued_bytes);
            self.links[link.0] = None;
            self.disconnected.push_back((link, DisconnectReason::Stalled(text)));
            return;
        }
        l.queued_bytes = bytes;
        l.queue.push_back(frame.clone());
        // A frame behind others is written after them.
        if l.queue.len() == 1 {
            l.written = sent;
            l.write_queued(now_ns);
        }
    }

    /// Sends a frame and first drops every queued frame of which no byte was written yet.
    pub fn send_dropping_queued(&mut self, link: LinkId, frame: &Frame) {
        if let Some(l) = self.link_mut(link) {
            l.queue.truncate(1);
            l.queued_bytes = l.queue.front().map_or(0, |f| f.bytes().len());
        }
        self.send(link, frame);
    }

    /// Whether no bytes are queued for this peer. A link that has ended has no queue, so it is
    /// idle.
    #[must_use]
    pub fn is_idle(&self, link: LinkId) -> bool {
        self.links.get(link.0).and_then(Option::as_ref).is_none_or(|l| !l.wants_write())
    }

    /// Whether no link has bytes left to write. A link that failed during a write does not count.
    #[must_use]
    pub fn is_flushed(&self) -> bool {
        self.links.iter().flatten().all(|l| l.write_error.is_some() || !l.wants_write())
    }

    /// Waits at most `limit` for events and appends them to `out`.
    pub fn wait_events(&mut self, limit: Duration, out: &mut Vec<ReactorEvent>) {
        let has_pending = !self.disconnected.is_empty()
            || self.links.iter().flatten().any(|l| l.has_more_input || l.write_error.is_some());
        let limit = if has_pending { Duration::ZERO } else { limit };
        let mut ready = Vec::new();
        self.poll_fds(limit, &mut ready);
        let now_ns = self.now_ns();
        for (at, flags) in ready {
            match at {
                PollSource::Waker => self.waker.0.reset(),
                PollSource::Watched(number) => {
                    self.watched_fds.retain(|(n, _)| *n != number);
                    out.push(ReactorEvent::FdReady(number));
                }
                PollSource::Link(i) => {
                    if flags.contains(PollFlags::OUT)
                        && let Some(l) = &mut self.links[i]
                    {
                        l.write_queued(now_ns);
                    }
                    if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                        self.read_link(i, out);
                    }
                }
            }
        }
        if has_pending {
            for i in 0..self.links.len() {
                if self.links[i].as_ref().is_some_and(|l| l.has_more_input || l.write_error.is_some()) {
                    self.read_link(i, out);
                }
            }
        }
        self.drop_overdue_links(now_ns);
        // Frames from a peer are reported before the end of its link.
        for (link, end) in self.disconnected.drain(..) {
            out.push(ReactorEvent::Disconnected { link, reason: end });
        }
    }

    /// Writes queued frames for at most `limit`, and reads nothing.
    pub fn flush(&mut self, limit: Duration) {
        let until = Instant::now() + limit;
        while !self.is_flushed() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let now_ns = self.now_ns();
            let mut fds: Vec<PollFd<'_>> = self
                .links
                .iter()
                .flatten()
                .filter(|l| l.wants_write() && l.write_error.is_none())
                .map(|l| PollFd::from_borrowed_fd(l.stream.fd(), PollFlags::OUT))
                .collect();
            let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
            drop(fds);
            for l in self.links.iter_mut().flatten() {
                l.write_queued(now_ns);
            }
        }
    }

    fn link_mut(&mut self, link: LinkId) -> Option<&mut PeerLink> {
        self.links.get_mut(link.0).and_then(Option::as_mut)
    }

    /// Polls every descriptor and collects those that are ready. The call sleeps at once: a spin
    /// before the sleep made commits slower, even with one core per rank.
    fn poll_fds(&self, limit: Duration, ready: &mut Vec<(PollSource, PollFlags)>) {
        let mut fds = Vec::with_capacity(1 + self.links.len() + self.watched_fds.len());
        let mut sources = Vec::with_capacity(fds.capacity());
        let mut add_fd = |name, fd, flags| {
            sources.push(name);
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        };
        add_fd(PollSource::Waker, self.waker.0.as_fd(), PollFlags::IN);
        for (i, l) in self.links.iter().enumerate() {
            let Some(l) = l else { continue };
            let out = l.wants_write() && l.write_error.is_none();
            add_fd(
                PollSource::Link(i),
                l.stream.fd(),
                if out { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN },
            );
        }
        for (number, fd) in &self.watched_fds {
            add_fd(PollSource::Watched(*number), fd.as_fd(), PollFlags::IN);
        }
        match poll(&mut fds, Timespec::try_from(limit).ok().as_ref()) {
            Ok(0) | Err(Errno::INTR) => return,
            Ok(_) => {}
            // The kernel is out of memory for now; a later call may succeed.
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
        let found = sources.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        ready.extend(found.map(|(name, fd)| (name, fd.revents())));
    }

    fn read_link(&mut self, i: usize, out: &mut Vec<ReactorEvent>) {
        let Some(l) = &mut self.links[i] else { return };
        let link = LinkId(i);
        let end =
            l.read_available(&mut self.read_buffer, |frame| out.push(ReactorEvent::Frame { link, frame }));
        // A peer that cannot be written to and sends nothing more is gone.
        let end = end.or_else(|| {
            if l.has_more_input { None } else { l.write_error.take().map(DisconnectReason::Closed) }
        });
        if let Some(end) = end {
            self.links[i] = None;
            self.disconnected.push_back((link, end));
        }
    }

    fn drop_overdue_links(&mut self, now_ns: u64) {
        for (i, slot) in self.links.iter_mut().enumerate() {
            let Some(link) = slot else { continue };
            if !link.best_effort
                && link
                    .blocked_since_ns
                    .is_some_and(|since| now_ns.saturating_sub(since) > self.write_limit_ns)
            {
                let text = format!(
                    "it read nothing for {} ms while {} bytes waited",
                    self.write_limit_ns / 1_000_000,
                    link.queued_bytes - link.written
                );
                *slot = None;
                self.disconnected.push_back((LinkId(i), DisconnectReason::Stalled(text)));
            }
        }
    }

    /// Returns the time since the start, without the time in which this process was suspended: that
    /// time must not count against its peers.
    fn now_ns(&mut self) -> u64 {
        self.clock.advance_to(self.start.elapsed().as_nanos() as u64, self.heartbeat_ns)
    }
}

#[derive(Debug, Clone, Copy)]
enum PollSource {
    Waker,
    Link(usize),
    Watched(usize),
}

impl std::fmt::Debug for Reactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reactor({} links)", self.links.iter().flatten().count())
    }
}

#[cfg(test)]
mod tests {
    use crate::codes::T0707;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::super::link::BUFFER_GROWTH_BYTES;
    use super::super::secure::RecordStream;
    use super::*;
    use crate::Digest;
    use crate::wire::{self, CallContext, Commit, Dtype, HEADER_BYTES, Heartbeat, Message, Tensor, Tensors};
    use crate::{Failure, FailureClass};

    fn limits() -> Limits {
        Limits { ready_ns: 300_000_000, ..Limits::default() }
    }

    fn reactor_and_peer(origins: &[u32]) -> (Reactor, LinkId, UnixStream) {
        let mut reactor = Reactor::new(&limits()).expect("a reactor");
        let (here, there) = UnixStream::pair().expect("a pair");
        let link = reactor.add_link(Box::new(here), origins.iter().copied()).expect("added");
        (reactor, link, there)
    }

    /// Waits until `n` events have arrived, for at most 20 s.
    fn wait_for_events(reactor: &mut Reactor, n: usize) -> Vec<ReactorEvent> {
        let mut out = Vec::new();
        let until = Instant::now() + Duration::from_secs(20);
        while out.len() < n && Instant::now() < until {
            reactor.wait_events(Duration::from_millis(20), &mut out);
        }
        out
    }

    fn commit_message(call_id: u64) -> Message {
        Message::Commit(Commit { call_id })
    }

    fn large_context(bytes: usize) -> Message {
        let tensor = Tensor::new("context", Dtype::F32, &[bytes as u64 / 4], vec![3; bytes]).expect("fits");
        Message::Context(CallContext { call_id: 1, tensors: Tensors(vec![tensor]) })
    }

    #[test]
    fn frames_arrive_whole_however_the_bytes_are_split() {
        let (mut reactor, _, mut peer) = reactor_and_peer(&[0, 1]);
        let messages = [commit_message(1), large_context(300_000), Message::Stop, commit_message(2)];
        let bytes: Vec<u8> =
            messages.iter().flat_map(|m| wire::encode(1, m).expect("within limits")).collect();
        let writer = std::thread::spawn(move || {
            for (i, part) in bytes.chunks(7001).enumerate() {
                // Some chunks split a frame header.
                let (a, b) = part.split_at(part.len().min(1 + i % 40));
                peer.write_all(a).expect("written");
                peer.write_all(b).expect("written");
            }
        });
        let mut got = wait_for_events(&mut reactor, 5);
        writer.join().expect("no panic");
        let closed = got.split_off(4);
        for (event, message) in got.iter().zip(&messages) {
            let ReactorEvent::Frame { frame, .. } = event else { panic!("{event:?}") };
            assert_eq!((frame.origin(), frame.decode_message().as_ref()), (1, Ok(message)));
        }
        assert!(
            matches!(&closed[..], [ReactorEvent::Disconnected { reason: DisconnectReason::Closed(_), .. }]),
            "{closed:?}"
        );
    }

    // proves: C-02
    #[test]
    fn a_frame_that_ends_early_ends_the_link() {
        let frame = wire::encode(1, &large_context(4_000)).expect("within limits");
        for sent in [1, HEADER_BYTES, HEADER_BYTES + 7, frame.len() - 1] {
            let (mut reactor, link, mut peer) = reactor_and_peer(&[1]);
            peer.write_all(&frame[..sent]).expect("written");
            drop(peer);
            let got = wait_for_events(&mut reactor, 1);
            let [ReactorEvent::Disconnected { link: at, .. }] = &got[..] else { panic!("{sent}: {got:?}") };
            assert_eq!(*at, link);
        }
    }

    #[test]
    fn a_frame_is_forwarded_unchanged() {
        let (mut reactor, _, mut above) = reactor_and_peer(&[0]);
        let (here, mut below) = UnixStream::pair().expect("a pair");
        let down = reactor.add_link(Box::new(here), [2]).expect("added");
        let sent = wire::encode(0, &commit_message(9)).expect("within limits");
        above.write_all(&sent).expect("written");
        let ReactorEvent::Frame { frame, .. } = wait_for_events(&mut reactor, 1).remove(0) else {
            panic!("a frame")
        };
        reactor.send(down, &frame);
        let mut got = vec![0; sent.len()];
        below.read_exact(&mut got).expect("read");
        assert_eq!(got, sent);
    }

    #[test]
    fn another_origin_breaks_the_link() {
        let (mut reactor, link, mut peer) = reactor_and_peer(&[1, 2]);
        peer.write_all(&wire::encode(3, &commit_message(1)).expect("within limits")).expect("written");
        let got = wait_for_events(&mut reactor, 1);
        let [ReactorEvent::Disconnected { link: at, reason: DisconnectReason::Broken(d) }] = &got[..] else {
            panic!("{got:?}")
        };
        assert_eq!((*at, d.code.id), (link, "T0707"));
        assert!(d.labels.iter().any(|p| p.message.contains("rank 3")), "{d:?}");
    }

    #[test]
    fn a_length_over_the_limit_is_refused_by_the_header() {
        let (mut reactor, _, mut peer) = reactor_and_peer(&[1]);
        let mut frame = wire::encode(1, &commit_message(1)).expect("within limits");
        frame[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        peer.write_all(&frame[..HEADER_BYTES]).expect("written");
        let got = wait_for_events(&mut reactor, 1);
        let [ReactorEvent::Disconnected { reason: DisconnectReason::Broken(d), .. }] = &got[..] else {
            panic!("{got:?}")
        };
        assert_eq!(d.code.id, "T0703");
    }

    // proves: C-06
    #[test]
    fn memory_follows_received_bytes_not_the_announced_length() {
        let (mut reactor, _, mut peer) = reactor_and_peer(&[1]);
        let frame = wire::encode(1, &large_context(64 << 20)).expect("within limits");
        peer.write_all(&frame[..100_000]).expect("written");
        assert!(events_within(&mut reactor, 100).is_empty());
        let part = reactor.links[0].as_ref().and_then(|l| l.partial.as_ref()).expect("a part");
        assert!(
            part.1.len() == 100_000 && part.1.capacity() <= 2 * BUFFER_GROWTH_BYTES,
            "{}",
            part.1.capacity()
        );
    }

    fn events_within(reactor: &mut Reactor, ms: u64) -> Vec<ReactorEvent> {
        let (mut out, until) = (Vec::new(), Instant::now() + Duration::from_millis(ms));
        while Instant::now() < until {
            reactor.wait_events(Duration::from_millis(5), &mut out);
        }
        out
    }

    #[test]
    fn a_peer_that_reads_nothing_fails_alone() {
        let (mut reactor, stuck, _silent) = reactor_and_peer(&[1]);
        let (here, mut reading) = UnixStream::pair().expect("a pair");
        let healthy = reactor.add_link(Box::new(here), [2]).expect("added");
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            reading.read_to_end(&mut all).map(|_| all.len())
        });
        let frame = Frame::new(0, &large_context(1 << 20)).expect("within limits");
        let begun = Instant::now();
        for _ in 0..8 {
            reactor.send(stuck, &frame);
            reactor.send(healthy, &frame);
        }
        assert!(begun.elapsed() < Duration::from_millis(250), "a send waited");
        let got = wait_for_events(&mut reactor, 1);
        let [ReactorEvent::Disconnected { link, reason: DisconnectReason::Stalled(why) }] = &got[..] else {
            panic!("{got:?}")
        };
        assert!(*link == stuck && why.contains("300 ms"), "{why}");
        reactor.flush(Duration::from_secs(10));
        drop(reactor);
        assert_eq!(reader.join().expect("no panic").expect("read"), 8 * frame.bytes().len());
    }

    #[test]
    fn a_queue_is_bounded_by_its_frames() {
        let (mut reactor, link, _silent) = reactor_and_peer(&[1]);
        let first = Frame::new(0, &large_context(4 << 20)).expect("within limits");
        let small = Frame::new(0, &commit_message(1)).expect("within limits");
        reactor.send(link, &first);
        for _ in 0..MAX_QUEUED_FRAMES {
            reactor.send(link, &small);
        }
        let got = wait_for_events(&mut reactor, 1);
        assert!(
            matches!(&got[..], [ReactorEvent::Disconnected { reason: DisconnectReason::Stalled(_), .. }]),
            "{got:?}"
        );
    }

    #[test]
    fn a_best_effort_link_drops_frames_but_sends_the_last_message() {
        let (mut reactor, link, mut peer) = reactor_and_peer(&[1]);
        reactor.set_best_effort(link);
        let first = Frame::new(0, &large_context(4 << 20)).expect("within limits");
        let small = Frame::new(0, &Message::Heartbeat(Heartbeat { progress: 1 })).expect("within limits");
        reactor.send(link, &first);
        for _ in 0..2 * MAX_QUEUED_FRAMES {
            reactor.send(link, &small);
        }
        assert!(events_within(&mut reactor, 500).is_empty());
        let failure = Failure::new(FailureClass::Drift, None, &T0707, "the last word");
        let last = Frame::new(0, &Message::Abort(failure)).expect("within limits");
        reactor.send_dropping_queued(link, &last);
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            peer.read_to_end(&mut all).map(|_| all)
        });
        reactor.flush(Duration::from_secs(10));
        assert!(reactor.is_flushed());
        drop(reactor);
        let all = reader.join().expect("no panic").expect("read");
        assert_eq!(all.len(), first.bytes().len() + last.bytes().len());
        assert_eq!(Digest::hash_bytes(&all[first.bytes().len()..]), Digest::hash_bytes(last.bytes()));
    }

    #[test]
    fn frames_are_reported_before_the_disconnect() {
        let (mut reactor, link, mut peer) = reactor_and_peer(&[1]);
        peer.write_all(&wire::encode(1, &commit_message(5)).expect("within limits")).expect("written");
        drop(peer);
        reactor.send(link, &Frame::new(0, &commit_message(1)).expect("within limits"));
        let got = wait_for_events(&mut reactor, 2);
        assert!(
            matches!(
                &got[..],
                [
                    ReactorEvent::Frame { .. },
                    ReactorEvent::Disconnected { reason: DisconnectReason::Closed(_), .. }
                ]
            ),
            "{got:?}"
        );
        assert!(reactor.is_flushed());
    }

    /// A stream of records returns one record per read. The last frames say why the peer ended.
    #[test]
    fn every_record_is_reported_before_the_disconnect() {
        let mut reactor = Reactor::new(&limits()).expect("a reactor");
        let (here, there) = UnixStream::pair().expect("a pair");
        let (here, mut there) = RecordStream::new_pair(here, there).expect("randomness");
        let link = reactor.add_link(Box::new(here), [1]).expect("added");
        for call_id in 1..=3 {
            let frame = wire::encode(1, &commit_message(call_id)).expect("within limits");
            assert_eq!(there.write(&frame).expect("room"), frame.len());
        }
        drop(there);
        reactor.send(link, &Frame::new(0, &commit_message(1)).expect("within limits"));
        let got = wait_for_events(&mut reactor, 4);
        let frames = got.iter().filter(|e| matches!(e, ReactorEvent::Frame { .. })).count();
        assert!(frames == 3 && got.len() == 4, "{got:?}");
    }

    #[test]
    fn another_thread_wakes_the_reactor() {
        let (mut reactor, _, _peer) = reactor_and_peer(&[1]);
        let (post, inbox) = reactor.new_inbox();
        let begun = Instant::now();
        let sender = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            post.send(7)
        });
        reactor.wait_events(Duration::from_secs(20), &mut Vec::new());
        assert!(begun.elapsed() < Duration::from_secs(10));
        assert_eq!(inbox.recv(), Ok(7));
        assert!(sender.join().expect("no panic"));
    }

    #[test]
    fn a_watched_descriptor_is_reported_once() {
        let (mut reactor, _, _peer) = reactor_and_peer(&[1]);
        let (a, mut b) = UnixStream::pair().expect("a pair");
        reactor.watch_fd(4, a.into());
        b.write_all(b"x").expect("written");
        assert!(matches!(&wait_for_events(&mut reactor, 1)[..], [ReactorEvent::FdReady(4)]));
        assert!(events_within(&mut reactor, 30).is_empty());
    }
}
