//! Every socket of a process, polled by the one thread that owns the machines.
//!
//! The hub turns bytes into whole frames and frames into bytes, and knows nothing of what they say. No peer can
//! make it wait: what a peer does not read waits in a bounded queue, and a peer that reads nothing for the
//! write limit has failed. Other threads of the process wake it through a [`Waker`].

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, ioctl_fionbio};

use super::link::{Frame, Link, LinkEnd, OUT_BYTES, OUT_FRAMES};
use super::stream::Stream;
use crate::Limits;
use crate::limits::AwakeClock;

/// Bytes taken from a socket at a time.
const SCRATCH: usize = 64 << 10;
/// Messages of other threads that may wait.
const POSTED: usize = 256;

/// Names a link for the life of its hub.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkId(usize);

/// What polling found.
#[derive(Debug)]
pub enum HubEvent {
    /// A whole frame.
    Frame {
        /// Where it came from.
        link: LinkId,
        /// The frame.
        frame: Frame,
    },
    /// A link is over; nothing more comes from it.
    Ended {
        /// The link.
        link: LinkId,
        /// How.
        end: LinkEnd,
    },
    /// A watched descriptor is readable. Told once.
    Watched(usize),
}

/// Wakes the hub's thread from another one.
#[derive(Debug, Clone)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// Makes the wait that is under way, or the next one, return.
    pub fn wake(&self) {
        // A counter that is full wakes as well.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// The sending half of a bounded queue to the hub's thread.
#[derive(Debug)]
pub struct Post<T> {
    queue: SyncSender<T>,
    waker: Waker,
}

impl<T> Clone for Post<T> {
    fn clone(&self) -> Post<T> {
        Post { queue: self.queue.clone(), waker: self.waker.clone() }
    }
}

impl<T> Post<T> {
    /// Waits while the queue is full; false when nobody will ever read it.
    pub fn send(&self, value: T) -> bool {
        let sent = self.queue.send(value).is_ok();
        self.waker.wake();
        sent
    }
}

/// The sockets.
pub struct Hub {
    links: Vec<Option<Link>>,
    watched: Vec<(usize, OwnedFd)>,
    waker: Waker,
    start: Instant,
    clock: AwakeClock,
    beat_ns: u64,
    write_limit_ns: u64,
    scratch: Vec<u8>,
    /// Links that ended while they were written to.
    ended: VecDeque<(LinkId, LinkEnd)>,
}

impl Hub {
    /// A hub without links. A peer has `ready_ns` to read something.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn new(limits: &Limits) -> std::io::Result<Hub> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Hub {
            links: Vec::new(),
            watched: Vec::new(),
            waker: Waker(Arc::new(fd)),
            start: Instant::now(),
            clock: AwakeClock::default(),
            beat_ns: limits.heartbeat_ns,
            write_limit_ns: limits.ready_ns,
            scratch: vec![0; SCRATCH],
            ended: VecDeque::new(),
        })
    }

    /// Takes a stream over. Frames of other origins than these break the link.
    ///
    /// # Errors
    /// When the descriptor cannot be made non-blocking.
    pub fn add(
        &mut self,
        stream: Box<dyn Stream>,
        origins: impl IntoIterator<Item = u32>,
    ) -> std::io::Result<LinkId> {
        ioctl_fionbio(stream.fd(), true)?;
        self.links.push(Some(Link::new(stream, origins.into_iter().collect())));
        Ok(LinkId(self.links.len() - 1))
    }

    /// Tells once when the descriptor is readable, under this number.
    pub fn watch(&mut self, number: usize, fd: OwnedFd) {
        self.watched.push((number, fd));
    }

    /// What other threads wake this one with.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// A bounded queue from other threads, which wakes this one.
    #[must_use]
    pub fn inbox<T>(&self) -> (Post<T>, Receiver<T>) {
        let (queue, inbox) = sync_channel(POSTED);
        (Post { queue, waker: self.waker() }, inbox)
    }

    /// A peer that is allowed to stand still: it is given no deadline, and what is over the bound of its queue is
    /// dropped.
    pub fn set_patient(&mut self, link: LinkId) {
        if let Some(l) = self.link(link) {
            l.patient = true;
        }
    }

    /// Gives a frame to a peer, or queues it. How a link fails is told by the next wait.
    pub fn send(&mut self, link: LinkId, frame: &Frame) {
        self.send_rest(link, frame, 0);
    }

    /// Sends a frame of which so many bytes left by another way. Nothing waits before it.
    pub(crate) fn send_rest(&mut self, link: LinkId, frame: &Frame, sent: usize) {
        let now_ns = self.now_ns();
        let Some(l) = self.link(link).filter(|l| l.unwritable.is_none()) else { return };
        let bytes = l.queued_bytes + frame.bytes().len();
        if !l.queue.is_empty() && (l.queue.len() >= OUT_FRAMES || bytes > OUT_BYTES) {
            if l.patient {
                return;
            }
            let text =
                format!("{} frames with {} bytes wait for it, the limit", l.queue.len(), l.queued_bytes);
            self.links[link.0] = None;
            self.ended.push_back((link, LinkEnd::Stuck(text)));
            return;
        }
        l.queued_bytes = bytes;
        l.queue.push_back(frame.clone());
        // Behind others it leaves when they have left.
        if l.queue.len() == 1 {
            l.sent = sent;
            l.write_out(now_ns);
        }
    }

    /// Sends a frame for which whatever has not begun to leave makes room.
    pub fn send_last(&mut self, link: LinkId, frame: &Frame) {
        if let Some(l) = self.link(link) {
            l.queue.truncate(1);
            l.queued_bytes = l.queue.front().map_or(0, |f| f.bytes().len());
        }
        self.send(link, frame);
    }

    /// Whether nothing waits for this peer.
    #[must_use]
    pub fn idle(&self, link: LinkId) -> bool {
        self.links.get(link.0).and_then(Option::as_ref).is_none_or(|l| !l.wants_write())
    }

    /// Whether everything that was sent has left this process.
    #[must_use]
    pub fn flushed(&self) -> bool {
        self.links.iter().flatten().all(|l| l.unwritable.is_some() || !l.wants_write())
    }

    /// Waits at most `limit` for something to happen, then adds it to `out`.
    pub fn wait(&mut self, limit: Duration, out: &mut Vec<HubEvent>) {
        let eager =
            !self.ended.is_empty() || self.links.iter().flatten().any(|l| l.more || l.unwritable.is_some());
        let limit = if eager { Duration::ZERO } else { limit };
        let mut ready = Vec::new();
        self.poll(limit, &mut ready);
        let now_ns = self.now_ns();
        for (at, flags) in ready {
            match at {
                Polled::Waker => {
                    let mut count = [0; 8];
                    let _ = rustix::io::read(&self.waker.0, &mut count);
                }
                Polled::Watched(number) => {
                    self.watched.retain(|(n, _)| *n != number);
                    out.push(HubEvent::Watched(number));
                }
                Polled::Link(i) => {
                    if flags.contains(PollFlags::OUT)
                        && let Some(l) = &mut self.links[i]
                    {
                        l.write_out(now_ns);
                    }
                    if flags.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                        self.read(i, out);
                    }
                }
            }
        }
        if eager {
            for i in 0..self.links.len() {
                if self.links[i].as_ref().is_some_and(|l| l.more || l.unwritable.is_some()) {
                    self.read(i, out);
                }
            }
        }
        self.overdue(now_ns);
        // What a peer sent comes before its end.
        for (link, end) in self.ended.drain(..) {
            out.push(HubEvent::Ended { link, end });
        }
    }

    /// Goes on sending what is queued for at most `limit`, and reads nothing.
    pub fn flush(&mut self, limit: Duration) {
        let until = Instant::now() + limit;
        while !self.flushed() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let now_ns = self.now_ns();
            let mut fds: Vec<PollFd<'_>> = self
                .links
                .iter()
                .flatten()
                .filter(|l| l.wants_write() && l.unwritable.is_none())
                .map(|l| PollFd::from_borrowed_fd(l.stream.fd(), PollFlags::OUT))
                .collect();
            let _ = poll(&mut fds, Some(&timespec(left)));
            drop(fds);
            for l in self.links.iter_mut().flatten() {
                l.write_out(now_ns);
            }
        }
    }

    fn link(&mut self, link: LinkId) -> Option<&mut Link> {
        self.links.get_mut(link.0).and_then(Option::as_mut)
    }

    /// What is ready. It sleeps at once: looking again first made commits slower even with a core for each rank.
    fn poll(&self, limit: Duration, ready: &mut Vec<(Polled, PollFlags)>) {
        let mut fds = Vec::with_capacity(1 + self.links.len() + self.watched.len());
        let mut names = Vec::with_capacity(fds.capacity());
        let mut ask = |name, fd, flags| {
            names.push(name);
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        };
        ask(Polled::Waker, self.waker.0.as_fd(), PollFlags::IN);
        for (i, l) in self.links.iter().enumerate() {
            let Some(l) = l else { continue };
            let out = l.wants_write() && l.unwritable.is_none();
            ask(
                Polled::Link(i),
                l.stream.fd(),
                if out { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN },
            );
        }
        for (number, fd) in &self.watched {
            ask(Polled::Watched(*number), fd.as_fd(), PollFlags::IN);
        }
        match poll(&mut fds, Some(&timespec(limit))) {
            Ok(0) | Err(Errno::INTR) => return,
            Ok(_) => {}
            // The kernel has no memory for it now: later it may.
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
        let found = names.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        ready.extend(found.map(|(name, fd)| (name, fd.revents())));
    }

    fn read(&mut self, i: usize, out: &mut Vec<HubEvent>) {
        let Some(l) = &mut self.links[i] else { return };
        let link = LinkId(i);
        let end = l.read_in(&mut self.scratch, |frame| out.push(HubEvent::Frame { link, frame }));
        // A peer that cannot be written to and has nothing to say is gone.
        let end = end.or_else(|| if l.more { None } else { l.unwritable.take().map(LinkEnd::Closed) });
        if let Some(end) = end {
            self.links[i] = None;
            self.ended.push_back((link, end));
        }
    }

    fn overdue(&mut self, now_ns: u64) {
        for (i, slot) in self.links.iter_mut().enumerate() {
            let Some(l) = slot else { continue };
            if !l.patient
                && l.stuck_ns.is_some_and(|since| now_ns.saturating_sub(since) > self.write_limit_ns)
            {
                let text = format!(
                    "it read nothing for {} ms while {} bytes waited",
                    self.write_limit_ns / 1_000_000,
                    l.queued_bytes - l.sent
                );
                *slot = None;
                self.ended.push_back((LinkId(i), LinkEnd::Stuck(text)));
            }
        }
    }

    /// Time during which this process did not run is not held against its peers.
    fn now_ns(&mut self) -> u64 {
        self.clock.advance(self.start.elapsed().as_nanos() as u64, self.beat_ns)
    }
}

#[derive(Debug, Clone, Copy)]
enum Polled {
    Waker,
    Link(usize),
    Watched(usize),
}

fn timespec(d: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(d.subsec_nanos()) }
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hub({} links)", self.links.iter().flatten().count())
    }
}

/// A borrowed view, so that a test or a probe may poll the hub beside something else.
impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::super::link::IN_STEP;
    use super::*;
    use crate::Digest;
    use crate::wire::{
        self, Abort, Commit, Context, Dtype, HEADER_BYTES, Heartbeat, Message, Tensor, Tensors,
    };
    use crate::worker::T0707;
    use crate::{Failure, FailureClass};

    fn limits() -> Limits {
        Limits { ready_ns: 300_000_000, ..Limits::default() }
    }

    fn hub_and_peer(origins: &[u32]) -> (Hub, LinkId, UnixStream) {
        let mut hub = Hub::new(&limits()).expect("a hub");
        let (here, there) = UnixStream::pair().expect("a pair");
        let link = hub.add(Box::new(here), origins.iter().copied()).expect("added");
        (hub, link, there)
    }

    /// Waits until so many events came.
    fn events(hub: &mut Hub, n: usize) -> Vec<HubEvent> {
        let mut out = Vec::new();
        let until = Instant::now() + Duration::from_secs(20);
        while out.len() < n && Instant::now() < until {
            hub.wait(Duration::from_millis(20), &mut out);
        }
        out
    }

    fn commit(call_id: u64) -> Message {
        Message::Commit(Commit { call_id })
    }

    fn large(bytes: usize) -> Message {
        let tensor = Tensor::new("context", Dtype::F32, &[bytes as u64 / 4], vec![3; bytes]).expect("fits");
        Message::Context(Context { call_id: 1, tensors: Tensors(vec![tensor]) })
    }

    #[test]
    fn frames_arrive_whole_however_they_are_cut() {
        let (mut hub, _, mut peer) = hub_and_peer(&[0, 1]);
        let messages = [commit(1), large(300_000), Message::Stop, commit(2)];
        let bytes: Vec<u8> =
            messages.iter().flat_map(|m| wire::encode(1, m).expect("within limits")).collect();
        let writer = std::thread::spawn(move || {
            for (i, part) in bytes.chunks(7001).enumerate() {
                // Cut inside the header now and then.
                let (a, b) = part.split_at(part.len().min(1 + i % 40));
                peer.write_all(a).expect("written");
                peer.write_all(b).expect("written");
            }
        });
        let got = events(&mut hub, 4);
        writer.join().expect("no panic");
        for (event, message) in got.iter().zip(&messages) {
            let HubEvent::Frame { frame, .. } = event else { panic!("{event:?}") };
            assert_eq!((frame.origin(), frame.message().as_ref()), (1, Ok(message)));
        }
        let closed = events(&mut hub, 1);
        assert!(matches!(&closed[..], [HubEvent::Ended { end: LinkEnd::Closed(_), .. }]), "{closed:?}");
    }

    #[test]
    fn a_frame_is_passed_on_as_it_came() {
        let (mut hub, _, mut above) = hub_and_peer(&[0]);
        let (here, mut below) = UnixStream::pair().expect("a pair");
        let down = hub.add(Box::new(here), [2]).expect("added");
        let sent = wire::encode(0, &commit(9)).expect("within limits");
        above.write_all(&sent).expect("written");
        let HubEvent::Frame { frame, .. } = events(&mut hub, 1).remove(0) else { panic!("a frame") };
        hub.send(down, &frame);
        let mut got = vec![0; sent.len()];
        below.read_exact(&mut got).expect("read");
        assert_eq!(got, sent);
    }

    #[test]
    fn another_origin_breaks_the_link() {
        let (mut hub, link, mut peer) = hub_and_peer(&[1, 2]);
        peer.write_all(&wire::encode(3, &commit(1)).expect("within limits")).expect("written");
        let got = events(&mut hub, 1);
        let [HubEvent::Ended { link: at, end: LinkEnd::Broken(d) }] = &got[..] else { panic!("{got:?}") };
        assert_eq!((*at, d.code.id), (link, "T0707"));
        assert!(d.places.iter().any(|p| p.says.contains("rank 3")), "{d:?}");
    }

    #[test]
    fn a_length_over_the_limit_is_refused_by_the_header() {
        let (mut hub, _, mut peer) = hub_and_peer(&[1]);
        let mut frame = wire::encode(1, &commit(1)).expect("within limits");
        frame[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        peer.write_all(&frame[..HEADER_BYTES]).expect("written");
        let got = events(&mut hub, 1);
        let [HubEvent::Ended { end: LinkEnd::Broken(d), .. }] = &got[..] else { panic!("{got:?}") };
        assert_eq!(d.code.id, "T0703");
    }

    #[test]
    fn memory_follows_what_arrived_and_not_what_was_announced() {
        let (mut hub, _, mut peer) = hub_and_peer(&[1]);
        let frame = wire::encode(1, &large(64 << 20)).expect("within limits");
        peer.write_all(&frame[..100_000]).expect("written");
        assert!(events_within(&mut hub, 100).is_empty());
        let part = hub.links[0].as_ref().and_then(|l| l.part.as_ref()).expect("a part");
        assert!(part.1.len() == 100_000 && part.1.capacity() <= 2 * IN_STEP, "{}", part.1.capacity());
    }

    fn events_within(hub: &mut Hub, ms: u64) -> Vec<HubEvent> {
        let (mut out, until) = (Vec::new(), Instant::now() + Duration::from_millis(ms));
        while Instant::now() < until {
            hub.wait(Duration::from_millis(5), &mut out);
        }
        out
    }

    #[test]
    fn a_peer_that_reads_nothing_fails_alone() {
        let (mut hub, stuck, _silent) = hub_and_peer(&[1]);
        let (here, mut reading) = UnixStream::pair().expect("a pair");
        let well = hub.add(Box::new(here), [2]).expect("added");
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            reading.read_to_end(&mut all).map(|_| all.len())
        });
        let frame = Frame::new(0, &large(1 << 20)).expect("within limits");
        let begun = Instant::now();
        for _ in 0..8 {
            hub.send(stuck, &frame);
            hub.send(well, &frame);
        }
        assert!(begun.elapsed() < Duration::from_millis(250), "a send waited");
        let got = events(&mut hub, 1);
        let [HubEvent::Ended { link, end: LinkEnd::Stuck(why) }] = &got[..] else { panic!("{got:?}") };
        assert!(*link == stuck && why.contains("300 ms"), "{why}");
        hub.flush(Duration::from_secs(10));
        drop(hub);
        assert_eq!(reader.join().expect("no panic").expect("read"), 8 * frame.bytes().len());
    }

    #[test]
    fn a_queue_is_bounded_by_its_frames() {
        let (mut hub, link, _silent) = hub_and_peer(&[1]);
        let first = Frame::new(0, &large(4 << 20)).expect("within limits");
        let small = Frame::new(0, &commit(1)).expect("within limits");
        hub.send(link, &first);
        for _ in 0..OUT_FRAMES {
            hub.send(link, &small);
        }
        let got = events(&mut hub, 1);
        assert!(matches!(&got[..], [HubEvent::Ended { end: LinkEnd::Stuck(_), .. }]), "{got:?}");
    }

    #[test]
    fn a_patient_link_drops_and_says_the_last_word() {
        let (mut hub, link, mut peer) = hub_and_peer(&[1]);
        hub.set_patient(link);
        let first = Frame::new(0, &large(4 << 20)).expect("within limits");
        let small = Frame::new(0, &Message::Heartbeat(Heartbeat { mark: 1 })).expect("within limits");
        hub.send(link, &first);
        for _ in 0..2 * OUT_FRAMES {
            hub.send(link, &small);
        }
        assert!(events_within(&mut hub, 500).is_empty());
        let failure = Failure::new(FailureClass::Drift, None, &T0707, "the last word");
        let last = Frame::new(0, &Message::Abort(Abort { failure })).expect("within limits");
        hub.send_last(link, &last);
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            peer.read_to_end(&mut all).map(|_| all)
        });
        hub.flush(Duration::from_secs(10));
        assert!(hub.flushed());
        drop(hub);
        let all = reader.join().expect("no panic").expect("read");
        assert_eq!(all.len(), first.bytes().len() + last.bytes().len());
        assert_eq!(Digest::of(&all[first.bytes().len()..]), Digest::of(last.bytes()));
    }

    #[test]
    fn what_a_peer_said_is_heard_before_its_end() {
        let (mut hub, link, mut peer) = hub_and_peer(&[1]);
        peer.write_all(&wire::encode(1, &commit(5)).expect("within limits")).expect("written");
        drop(peer);
        hub.send(link, &Frame::new(0, &commit(1)).expect("within limits"));
        let got = events(&mut hub, 2);
        assert!(
            matches!(&got[..], [HubEvent::Frame { .. }, HubEvent::Ended { end: LinkEnd::Closed(_), .. }]),
            "{got:?}"
        );
        assert!(hub.flushed());
    }

    #[test]
    fn another_thread_wakes_it() {
        let (mut hub, _, _peer) = hub_and_peer(&[1]);
        let (post, inbox) = hub.inbox();
        let begun = Instant::now();
        let teller = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            post.send(7)
        });
        hub.wait(Duration::from_secs(20), &mut Vec::new());
        assert!(begun.elapsed() < Duration::from_secs(10));
        assert_eq!(inbox.recv(), Ok(7));
        assert!(teller.join().expect("no panic"));
    }

    #[test]
    fn a_watched_descriptor_is_told_once() {
        let (mut hub, _, _peer) = hub_and_peer(&[1]);
        let (a, mut b) = UnixStream::pair().expect("a pair");
        hub.watch(4, a.into());
        b.write_all(b"x").expect("written");
        assert!(matches!(&events(&mut hub, 1)[..], [HubEvent::Watched(4)]));
        assert!(events_within(&mut hub, 30).is_empty());
    }
}
