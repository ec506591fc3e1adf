//! Collectives over one stream to each other member of a communicator, for members on several
//! hosts.
//!
//! Three kinds of frames replace the arena's memory operations. A member sends its contribution to
//! every peer (`Data`), reads all of them, and notifies each peer that its slot is free again
//! (`Finished`). As in an arena, collective number `s` uses slot `s % slots`, so no peer ever sends
//! more than `slots` contributions ahead. `Abort` carries a reason. Contributions are reduced by
//! the same functions in the same order, so results have the same bits.
//!
//! A background thread of the communicator keeps the streams moving while the caller computes, so
//! two communicators whose members wait for each other alternately still make progress. A waiting
//! caller moves the streams itself.
//!
//! A closed stream is a fault for every member that needs the peer, reported only after a grace
//! period in which an abort could deliver the cause. An unexpected frame, or a frame with a wrong
//! checksum, is a fault too. Authentication of peers happens before a stream reaches this module.

mod frame;
mod peer;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::Timespec;

use crate::arena::{ArenaError, ArenaLayout, MAX_MEMBERS};
use crate::transport::{CommFault, PeerAction, Ticket, truncate_reason};
use peer::{PeerConnection, StreamEnd};

/// An open stream to one peer: ordered, lossless and non-blocking. Small frames should leave at
/// once: over TCP, without Nagle's delay.
pub trait PeerStream: Send {
    /// Reads the available bytes; returns 0 at the end of the stream and `WouldBlock` if no byte is
    /// available yet.
    ///
    /// # Errors
    /// Returns the errors of the stream.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize>;
    /// Writes some of the bytes; returns `WouldBlock` if the stream accepts none yet.
    ///
    /// # Errors
    /// Returns the errors of the stream.
    fn write(&mut self, from: &[u8]) -> io::Result<usize>;
    /// Passes on the bytes that earlier writes left buffered inside; returns `false` while some
    /// remain.
    ///
    /// # Errors
    /// Returns the errors of the stream.
    fn flush(&mut self) -> io::Result<bool>;
    /// Closes the write direction.
    fn close(&mut self);
    /// Returns the descriptor to poll.
    fn as_fd(&self) -> BorrowedFd<'_>;
}

impl PeerStream for std::net::TcpStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        io::Read::read(self, into)
    }

    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        io::Write::write(self, from)
    }

    fn flush(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    fn close(&mut self) {
        let _ = self.shutdown(std::net::Shutdown::Write);
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        AsFd::as_fd(self)
    }
}

/// One member's end of a communicator over streams.
#[derive(Debug)]
pub struct TcpTransport {
    shared: Arc<TcpShared>,
    own_slots: Vec<OwnSlot>,
    next_seq: u64,
    spin_time: Duration,
    fds: Vec<Option<OwnedFd>>,
}

/// A handle that aborts a communicator over streams from any thread.
#[derive(Debug, Clone)]
pub struct TcpAborter {
    shared: Arc<TcpShared>,
}

impl TcpAborter {
    /// Ends every present and future wait here, and notifies the peers. Only the first reason is
    /// kept.
    pub fn abort(&self, reason: &str) {
        self.shared.abort(reason);
    }
}

impl TcpTransport {
    /// Creates the end of member `me`, given a stream to each other member in member order and
    /// `None` at index `me`. The streams become non-blocking.
    ///
    /// # Errors
    /// Fails if the layout is out of range, the streams do not match the other members, or a system
    /// call fails.
    pub fn new(
        layout: ArenaLayout,
        me: usize,
        wires: Vec<Option<Box<dyn PeerStream>>>,
    ) -> Result<TcpTransport, ArenaError> {
        layout.mapping_bytes()?;
        let fits = wires.len() == layout.members && me < layout.members;
        if !fits || wires.iter().enumerate().any(|(m, w)| w.is_none() != (m == me)) {
            return Err(ArenaError::IndexTaken { index: me, members: layout.members });
        }
        let mut fds = Vec::new();
        for wire in &wires {
            let Some(wire) = wire else {
                fds.push(None);
                continue;
            };
            rustix::io::ioctl_fionbio(wire.as_fd(), true).map_err(io::Error::from)?;
            fds.push(Some(wire.as_fd().try_clone_to_owned()?));
        }
        let peers = wires.into_iter().map(|w| w.map(|w| PeerConnection::new(w, layout))).collect();
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from);
        let shared = Arc::new(TcpShared {
            layout,
            me,
            pump_event: event()?,
            caller_event: event()?,
            state: Mutex::new(TcpState {
                peers,
                published: 0,
                aborted: None,
                caller_waiting: false,
                linger_until: None,
                progressed: true,
                has_more: false,
            }),
        });
        if layout.members > 1 {
            let moves = Arc::clone(&shared);
            let watched: Vec<_> = fds
                .iter()
                .map(|f| f.as_ref().map(OwnedFd::try_clone).transpose())
                .collect::<Result<_, _>>()?;
            std::thread::Builder::new().name("lane".into()).spawn(move || moves.run_pump(&watched))?;
        }
        let own = (0..layout.slots).map(|_| OwnSlot::default()).collect();
        Ok(TcpTransport { shared, own_slots: own, next_seq: 0, spin_time: DEFAULT_SPIN, fds })
    }

    /// Returns this member's index.
    #[must_use]
    pub fn member_index(&self) -> usize {
        self.shared.me
    }

    /// Returns the layout that the transport was created with.
    #[must_use]
    pub fn layout(&self) -> ArenaLayout {
        self.shared.layout
    }

    /// Sets how long a wait polls before it sleeps.
    pub fn set_spin(&mut self, spin: Duration) {
        self.spin_time = spin;
    }

    /// Returns a handle that can abort from another thread.
    #[must_use]
    pub fn aborter(&self) -> TcpAborter {
        TcpAborter { shared: Arc::clone(&self.shared) }
    }

    /// Does the same as [`Arena::publish`](crate::arena::Arena::publish).
    ///
    /// # Errors
    /// Returns any [`CommFault`] except a mismatch. The communicator is unusable after an error.
    pub fn publish(
        &mut self,
        fingerprint: u64,
        data: &[f32],
        deadline: Instant,
    ) -> Result<Ticket, CommFault> {
        let ArenaLayout { slots, slot_bytes, .. } = self.shared.layout;
        let seq = self.next_seq;
        let bytes = data.len().saturating_mul(4);
        if bytes > slot_bytes {
            return Err(CommFault::TooLarge { seq, bytes, slot_bytes });
        }
        let slot = (seq % slots as u64) as usize;
        if let Some(last) = seq.checked_sub(slots as u64) {
            self.shared.lock().check_abort()?;
            if self.own_slots[slot].finished <= last {
                return Err(CommFault::InFlight { seq, uncollected: last });
            }
            let free = |p: &PeerConnection| p.finished[slot] > last;
            match self.wait(seq, deadline, &|s| s.iter_peers().all(|(_, p)| free(p)), &|p| !free(p))? {
                PeerWait::Ready => {}
                PeerWait::TimedOut(missing) => {
                    return Err(CommFault::Timeout { missing, seq, awaited: PeerAction::Read });
                }
            }
        }
        let own = &mut self.own_slots[slot];
        own.data.clear();
        own.data.extend_from_slice(data);
        // All members have read the slot's last use, so its frame is in no send queue any more.
        let frame = Arc::make_mut(&mut own.frame);
        frame::write_data_frame(frame, seq, fingerprint, data);
        own.published = seq + 1;
        let frame = Arc::clone(&own.frame);
        let mut state = self.shared.lock();
        state.check_abort()?;
        state.check_invalid_frames(seq)?;
        if state.check_disconnected(seq, &|_| true).is_err() {
            drop(state);
            self.wait(seq, deadline, &|_| false, &|_| true)?;
            state = self.shared.lock();
        }
        state.published = seq + 1;
        for p in state.peers.iter_mut().flatten() {
            p.send(Arc::clone(&frame));
            p.flush();
        }
        self.shared.wake_pump_if_unsent(&state);
        drop(state);
        self.next_seq = seq + 1;
        Ok(Ticket { seq, fingerprint })
    }

    /// Does the same as [`Arena::collect`](crate::arena::Arena::collect).
    ///
    /// # Errors
    /// Returns a mismatch, timeout, abort or disconnect, and then does not call `read`.
    ///
    /// # Panics
    /// Panics if the ticket came from another communicator.
    pub fn collect<R>(
        &mut self,
        ticket: Ticket,
        deadline: Instant,
        read: impl FnOnce(&[&[f32]]) -> R,
    ) -> Result<R, CommFault> {
        let Ticket { seq, fingerprint: mine } = ticket;
        let ArenaLayout { slots, members, .. } = self.shared.layout;
        let (slot, me) = ((seq % slots as u64) as usize, self.shared.me);
        assert!(
            self.own_slots[slot].published == seq + 1 && self.own_slots[slot].finished <= seq,
            "the ticket belongs to another communicator"
        );
        let has_published = |p: &PeerConnection| p.slots[slot].published > seq;
        let find_mismatch = |(m, p): (usize, &PeerConnection)| {
            let theirs = p.slots[slot].fingerprint;
            (has_published(p) && theirs != mine).then_some(CommFault::Mismatch { peer: m, mine, theirs, seq })
        };
        let first_mismatch = |s: &TcpState| s.iter_peers().find_map(find_mismatch);
        // Checks in member order, so that every run reports the same fault although arrivals
        // differ.
        let settled = |s: &TcpState| {
            let first = s.iter_peers().find(|(_, p)| !has_published(p)).map_or(members, |(m, _)| m);
            first == members
                || s.iter_peers().take_while(|(m, _)| *m < first).any(|p| find_mismatch(p).is_some())
        };
        let waited = self.wait(seq, deadline, &settled, &|p| !has_published(p));
        // A peer that published a different collective is a better explanation than an absent or
        // disconnected one.
        if !matches!(waited, Err(CommFault::Aborted { .. }))
            && let Some(fault) = first_mismatch(&self.shared.lock())
        {
            return Err(fault);
        }
        if let PeerWait::TimedOut(missing) = waited? {
            return Err(CommFault::Timeout { missing, seq, awaited: PeerAction::Publish });
        }
        // The data is taken out during the read, so that the streams can progress meanwhile.
        let mut taken: Vec<Vec<f32>> = {
            let mut state = self.shared.lock();
            let take = |p: &mut Option<PeerConnection>| {
                p.as_mut().map_or(Vec::new(), |p| std::mem::take(&mut p.slots[slot].data))
            };
            state.peers.iter_mut().map(take).collect()
        };
        let mut views: [&[f32]; MAX_MEMBERS] = [&[]; MAX_MEMBERS];
        for (m, view) in views.iter_mut().enumerate().take(members) {
            *view = if m == me { &self.own_slots[slot].data } else { &taken[m] };
        }
        let result = read(&views[..members]);
        self.own_slots[slot].finished = seq + 1;
        let done = Arc::new(frame::finished_frame(seq));
        let mut state = self.shared.lock();
        for (p, data) in state.peers.iter_mut().zip(&mut taken) {
            if let Some(p) = p {
                p.slots[slot].data = std::mem::take(data);
                p.slots[slot].free = true;
                p.send(Arc::clone(&done));
                p.flush();
            }
        }
        self.shared.wake_pump_if_unsent(&state);
        Ok(result)
    }

    /// Does [`publish`](TcpTransport::publish) and [`collect`](TcpTransport::collect) in one call.
    ///
    /// # Errors
    /// Returns the errors of both.
    pub fn publish_and_collect<R>(
        &mut self,
        fingerprint: u64,
        data: &[f32],
        deadline: Instant,
        read: impl FnOnce(&[&[f32]]) -> R,
    ) -> Result<R, CommFault> {
        let ticket = self.publish(fingerprint, data, deadline)?;
        self.collect(ticket, deadline, read)
    }

    /// Ends every wait on the communicator, here and on every peer that can be reached. Only the
    /// first reason is kept.
    pub fn abort(&self, reason: &str) {
        self.shared.abort(reason);
    }

    /// Waits until `ready`. Fails if a peer for which `needs` is true has disconnected.
    fn wait(
        &self,
        seq: u64,
        deadline: Instant,
        ready: &dyn Fn(&TcpState) -> bool,
        needs: &dyn Fn(&PeerConnection) -> bool,
    ) -> Result<PeerWait, CommFault> {
        let shared = &*self.shared;
        let begun = Instant::now();
        let mut grace_until: Option<Instant> = None;
        loop {
            let mut state = shared.lock();
            state.caller_waiting = false;
            state.pump_all();
            state.check_abort()?;
            state.check_invalid_frames(seq)?;
            if ready(&state) {
                shared.wake_pump_if_unsent(&state);
                return Ok(PeerWait::Ready);
            }
            let now = Instant::now();
            if let Err(fault) = state.check_disconnected(seq, needs) {
                // The supervisor that watches the processes knows the cause of a process's end and
                // aborts with it.
                let until = *grace_until.get_or_insert(now + ABORT_GRACE);
                if now >= until.min(deadline) {
                    return Err(fault);
                }
            }
            if now >= deadline {
                let missing = state.iter_peers().filter(|(_, p)| needs(p)).map(|(m, _)| m).collect();
                return Ok(PeerWait::TimedOut(missing));
            }
            if begun.elapsed() < self.spin_time {
                drop(state);
                // The awaited member may need this core.
                std::thread::yield_now();
                continue;
            }
            state.caller_waiting = true;
            let (wants, more) = (state.poll_flags(), state.has_more);
            drop(state);
            if !more {
                let until = grace_until.map_or(deadline, |g| g.min(deadline));
                let left = until.saturating_duration_since(now).min(MAX_SLEEP);
                poll_streams(&shared.caller_event, &self.fds, &wants, Some(left));
            }
        }
    }
}

impl Drop for TcpTransport {
    /// Sends the queued frames for a short while before closing.
    fn drop(&mut self) {
        let until = Instant::now() + CLOSE_LINGER;
        let mut state = self.shared.lock();
        state.linger_until = Some(until);
        self.shared.signal_event(&self.shared.pump_event);
        loop {
            state.pump_all();
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || state.aborted.is_some() || !state.iter_peers().any(|(_, p)| p.has_unsent()) {
                return;
            }
            state.caller_waiting = true;
            let wants = state.poll_flags();
            drop(state);
            poll_streams(&self.shared.caller_event, &self.fds, &wants, Some(left.min(MAX_SLEEP)));
            state = self.shared.lock();
        }
    }
}

/// How long a wait polls its streams before it sleeps.
const DEFAULT_SPIN: Duration = Duration::from_micros(50);
/// The longest single sleep of a caller.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// How long a wait for a disconnected peer waits for an abort with the cause.
const ABORT_GRACE: Duration = Duration::from_millis(100);
/// How long a dropped end still sends.
const CLOSE_LINGER: Duration = Duration::from_secs(1);

enum PeerWait {
    Ready,
    /// The deadline passed; contains the members that had not acted.
    TimedOut(Vec<usize>),
}

/// A slot of this member.
#[derive(Debug, Default)]
struct OwnSlot {
    /// The number of the last published collective plus one; `finished` is encoded alike.
    published: u64,
    finished: u64,
    data: Vec<f32>,
    frame: Arc<Vec<u8>>,
}

#[derive(Debug)]
struct TcpShared {
    layout: ArenaLayout,
    me: usize,
    /// Wakes the background thread.
    pump_event: OwnedFd,
    /// Wakes a waiting caller.
    caller_event: OwnedFd,
    state: Mutex<TcpState>,
}

#[derive(Debug)]
struct TcpState {
    /// One entry per member; `None` for this member.
    peers: Vec<Option<PeerConnection>>,
    /// Number of contributions that this member has published.
    published: u64,
    aborted: Option<(usize, String)>,
    /// Whether a caller sleeps.
    caller_waiting: bool,
    /// Set when the end is dropped: the time until which the streams are kept.
    linger_until: Option<Instant>,
    /// Whether anything arrived that a caller may wait for.
    progressed: bool,
    /// Whether a stream has more data than its quota: the rest may be buffered inside the
    /// stream, where poll does not see it.
    has_more: bool,
}

impl TcpState {
    fn iter_peers(&self) -> impl Iterator<Item = (usize, &PeerConnection)> {
        self.peers.iter().enumerate().filter_map(|(m, p)| p.as_ref().map(|p| (m, p)))
    }

    fn check_abort(&self) -> Result<(), CommFault> {
        match &self.aborted {
            Some((by, reason)) => Err(CommFault::Aborted { by: *by, reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Returns the fault of the first peer that sent an invalid frame, whether or not that peer is
    /// needed now.
    fn check_invalid_frames(&self, seq: u64) -> Result<(), CommFault> {
        let what = |p: &PeerConnection| match &p.stream_end {
            Some(StreamEnd::InvalidFrame(what)) => Some(what.clone()),
            _ => None,
        };
        match self
            .iter_peers()
            .find_map(|(peer, p)| what(p).map(|what| CommFault::InvalidFrame { peer, seq, what }))
        {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// Returns the fault of the first disconnected peer that is needed.
    fn check_disconnected(&self, seq: u64, needs: &dyn Fn(&PeerConnection) -> bool) -> Result<(), CommFault> {
        let how = |p: &PeerConnection| match &p.stream_end {
            Some(StreamEnd::Disconnected(how)) if needs(p) => Some(how.clone()),
            _ => None,
        };
        match self
            .iter_peers()
            .find_map(|(peer, p)| how(p).map(|how| CommFault::Disconnected { peer, seq, how }))
        {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// Sends and receives as much as possible without blocking.
    fn pump_all(&mut self) {
        self.has_more = false;
        for (m, p) in self.peers.iter_mut().enumerate() {
            let Some(p) = p else { continue };
            p.flush();
            if let Some(reason) = p.receive_available(self.published, &mut self.progressed) {
                self.aborted.get_or_insert((m, reason));
            }
            self.has_more |= p.has_more;
        }
    }

    /// Returns the poll flags by member.
    fn poll_flags(&self) -> Vec<PollFlags> {
        let want = |p: &Option<PeerConnection>| match p {
            Some(p) if p.stream_end.is_none() => {
                PollFlags::IN | if p.has_unsent() { PollFlags::OUT } else { PollFlags::empty() }
            }
            _ => PollFlags::empty(),
        };
        self.peers.iter().map(want).collect()
    }
}

impl TcpShared {
    fn lock(&self) -> MutexGuard<'_, TcpState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn signal_event(&self, event: &OwnedFd) {
        // The write can only fail after 2⁶⁴ unread notifications.
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }

    /// Wakes the background thread if some frames could not be sent at once.
    fn wake_pump_if_unsent(&self, state: &TcpState) {
        if state.iter_peers().any(|(_, p)| p.has_unsent()) {
            self.signal_event(&self.pump_event);
        }
    }

    fn abort(&self, reason: &str) {
        let mut state = self.lock();
        if state.aborted.is_none() {
            let reason = truncate_reason(reason).to_string();
            let frame = Arc::new(frame::abort_frame(&reason));
            state.aborted = Some((self.me, reason));
            for p in state.peers.iter_mut().flatten() {
                p.send(Arc::clone(&frame));
                p.flush();
            }
            self.wake_pump_if_unsent(&state);
        }
        drop(state);
        self.signal_event(&self.caller_event);
    }

    /// The background thread: runs until every stream has ended, or until the end is dropped and
    /// its linger time is over.
    fn run_pump(&self, fds: &[Option<OwnedFd>]) {
        loop {
            let mut state = self.lock();
            state.progressed = false;
            state.pump_all();
            if state.caller_waiting && (state.progressed || state.aborted.is_some()) {
                self.signal_event(&self.caller_event);
            }
            let mut left = None;
            if let Some(until) = state.linger_until {
                for p in state.peers.iter_mut().flatten().filter(|p| !p.has_unsent()) {
                    p.close();
                }
                let over = until.saturating_duration_since(Instant::now());
                // After an abort no member needs the remaining frames.
                let ended = state.iter_peers().all(|(_, p)| p.stream_end.is_some());
                if over.is_zero() || ended || state.aborted.is_some() {
                    state.peers.iter_mut().for_each(|p| *p = None);
                    return;
                }
                left = Some(over);
            }
            let (wants, more) = (state.poll_flags(), state.has_more);
            drop(state);
            poll_streams(&self.pump_event, fds, &wants, if more { Some(Duration::ZERO) } else { left });
        }
    }
}

/// Sleeps until a stream is ready for its poll flags or the eventfd is signalled, and resets the
/// eventfd.
fn poll_streams(event: &OwnedFd, fds: &[Option<OwnedFd>], flags: &[PollFlags], limit: Option<Duration>) {
    let mut set = vec![PollFd::new(event, PollFlags::IN)];
    for (fd, want) in fds.iter().zip(flags) {
        if let (Some(fd), false) = (fd, want.is_empty()) {
            set.push(PollFd::new(fd, *want));
        }
    }
    let limit = limit.map(|l| Timespec { tv_sec: l.as_secs() as _, tv_nsec: l.subsec_nanos().into() });
    // The caller polls again, whatever ended the sleep.
    let _ = poll(&mut set, limit.as_ref());
    let _ = rustix::io::read(event, &mut [0u8; 8]);
}
