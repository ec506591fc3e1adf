//! Collectives through one stream to each other member of a lane, for members on several hosts.
//!
//! What an arena does by memory is done by three frames. A member sends its contribution to every peer (`Data`),
//! reads all of them, and tells each peer that its slot is free again (`Finished`); as in an arena, collective number
//! `s` uses slot `s % slots`, so no peer ever sends more than `slots` contributions ahead. `Abort` carries a reason.
//! Contributions are summed by the same functions in the same order, so results have the same bits.
//!
//! A thread of the lane's own keeps streams moving while the caller computes: two lanes whose members wait for each
//! other in turn still get through. A caller that waits moves them itself.
//!
//! A stream that ends is a fault for whoever needs its member, as soon as an abort could have said why. What is no frame in its turn, or does not hash
//! to what its frame says, is a fault too; who may send at all is settled before a stream comes here.

mod frame;
mod peer;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::Timespec;

use crate::arena::{ArenaError, ArenaLayout, MAX_MEMBERS};
use crate::exchange::{Awaited, CommFault, Ticket, clipped};
use peer::{End, Peer};

/// An open stream to one peer, in order and without loss, that never blocks. Small frames should leave at once: over TCP,
/// without Nagle's delay.
pub trait Wire: Send {
    /// Reads what is there; 0 at the end of the stream, `WouldBlock` where nothing is there yet.
    ///
    /// # Errors
    /// Those of the stream.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize>;
    /// Takes some of the bytes; `WouldBlock` where none can be taken yet.
    ///
    /// # Errors
    /// Those of the stream.
    fn write(&mut self, from: &[u8]) -> io::Result<usize>;
    /// Passes on what earlier writes left inside; `false` while some is left.
    ///
    /// # Errors
    /// Those of the stream.
    fn flush(&mut self) -> io::Result<bool>;
    /// Says that no more will be written.
    fn close(&mut self);
    /// What to poll.
    fn as_fd(&self) -> BorrowedFd<'_>;
}

impl Wire for std::net::TcpStream {
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

/// One member's end of a lane of streams.
#[derive(Debug)]
pub struct Tcp {
    shared: Arc<Shared>,
    own: Vec<Own>,
    next: u64,
    spin: Duration,
    fds: Vec<Option<OwnedFd>>,
}

/// Ends every wait on a lane of streams, from any thread.
#[derive(Debug, Clone)]
pub struct Aborter {
    shared: Arc<Shared>,
}

impl Aborter {
    /// Ends every wait here, now and later, and tells the peers. The first reason stays.
    pub fn abort(&self, reason: &str) {
        self.shared.abort(reason);
    }
}

impl Tcp {
    /// An end of a lane as member `me`, from a stream to each other member in order of member; none at `me`'s place.
    /// Streams are made non-blocking.
    ///
    /// # Errors
    /// A layout out of range, streams that are not those of the other members, or the operating system's refusal.
    pub fn new(layout: ArenaLayout, me: usize, wires: Vec<Option<Box<dyn Wire>>>) -> Result<Tcp, ArenaError> {
        layout.bytes()?;
        let fits = wires.len() == layout.members && me < layout.members;
        if !fits || wires.iter().enumerate().any(|(m, w)| w.is_none() != (m == me)) {
            return Err(ArenaError::Claimed { index: me, members: layout.members });
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
        let peers = wires.into_iter().map(|w| w.map(|w| Peer::new(w, layout))).collect();
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from);
        let shared = Arc::new(Shared {
            layout,
            me,
            mover: event()?,
            caller: event()?,
            state: Mutex::new(State {
                peers,
                published: 0,
                aborted: None,
                waiting: false,
                leaving: None,
                moved: true,
                more: false,
            }),
        });
        if layout.members > 1 {
            let moves = Arc::clone(&shared);
            let watched: Vec<_> = fds
                .iter()
                .map(|f| f.as_ref().map(OwnedFd::try_clone).transpose())
                .collect::<Result<_, _>>()?;
            std::thread::Builder::new().name("lane".into()).spawn(move || moves.keep_moving(&watched))?;
        }
        let own = (0..layout.slots).map(|_| Own::default()).collect();
        Ok(Tcp { shared, own, next: 0, spin: SPIN, fds })
    }

    /// This member's index.
    #[must_use]
    pub fn me(&self) -> usize {
        self.shared.me
    }

    /// The layout it was made with.
    #[must_use]
    pub fn layout(&self) -> ArenaLayout {
        self.shared.layout
    }

    /// How long a wait looks before it sleeps.
    pub fn set_spin(&mut self, spin: Duration) {
        self.spin = spin;
    }

    /// A handle that can abort from another thread.
    #[must_use]
    pub fn aborter(&self) -> Aborter {
        Aborter { shared: Arc::clone(&self.shared) }
    }

    /// As [`Arena::publish`](crate::arena::Arena::publish).
    ///
    /// # Errors
    /// Any [`CommFault`] but a mismatch. After an error the lane is of no further use.
    pub fn publish(
        &mut self,
        fingerprint: u64,
        data: &[f32],
        deadline: Instant,
    ) -> Result<Ticket, CommFault> {
        let ArenaLayout { slots, slot_bytes, .. } = self.shared.layout;
        let seq = self.next;
        let bytes = data.len().saturating_mul(4);
        if bytes > slot_bytes {
            return Err(CommFault::TooLarge { seq, bytes, slot_bytes });
        }
        let slot = (seq % slots as u64) as usize;
        if let Some(last) = seq.checked_sub(slots as u64) {
            self.shared.lock().check_abort()?;
            if self.own[slot].finished <= last {
                return Err(CommFault::InFlight { seq, uncollected: last });
            }
            let free = |p: &Peer| p.finished[slot] > last;
            match self.wait(seq, deadline, &|s| s.peers().all(|(_, p)| free(p)), &|p| !free(p))? {
                Waited::Ready => {}
                Waited::Late(missing) => {
                    return Err(CommFault::Timeout { missing, seq, awaited: Awaited::Read });
                }
            }
        }
        let own = &mut self.own[slot];
        own.data.clear();
        own.data.extend_from_slice(data);
        // Everybody has read the slot's last use, so its frame is on no way out any more.
        let frame = Arc::make_mut(&mut own.frame);
        frame::data(frame, seq, fingerprint, data);
        own.published = seq + 1;
        let frame = Arc::clone(&own.frame);
        let mut state = self.shared.lock();
        state.check_abort()?;
        state.garbled(seq)?;
        if state.gone(seq, &|_| true).is_err() {
            drop(state);
            self.wait(seq, deadline, &|_| false, &|_| true)?;
            state = self.shared.lock();
        }
        state.published = seq + 1;
        for p in state.peers.iter_mut().flatten() {
            p.send(Arc::clone(&frame));
            p.flush();
        }
        self.shared.left_over(&state);
        drop(state);
        self.next = seq + 1;
        Ok(Ticket { seq, fingerprint })
    }

    /// As [`Arena::collect`](crate::arena::Arena::collect).
    ///
    /// # Errors
    /// Mismatch, timeout, abort, a peer that is gone; `read` is not called then.
    ///
    /// # Panics
    /// If the ticket came from another lane.
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
            self.own[slot].published == seq + 1 && self.own[slot].finished <= seq,
            "the ticket belongs to another lane"
        );
        let here = |p: &Peer| p.slots[slot].published > seq;
        let differs = |(m, p): (usize, &Peer)| {
            let theirs = p.slots[slot].fingerprint;
            (here(p) && theirs != mine).then_some(CommFault::Mismatch { peer: m, mine, theirs, seq })
        };
        let found = |s: &State| s.peers().find_map(differs);
        // In order of member: the same fault on every run, though arrivals differ.
        let settled = |s: &State| {
            let first = s.peers().find(|(_, p)| !here(p)).map_or(members, |(m, _)| m);
            first == members || s.peers().take_while(|(m, _)| *m < first).any(|p| differs(p).is_some())
        };
        let waited = self.wait(seq, deadline, &settled, &|p| !here(p));
        // A peer that came with something else explains more than one that did not come or is gone.
        if !matches!(waited, Err(CommFault::Aborted { .. }))
            && let Some(fault) = found(&self.shared.lock())
        {
            return Err(fault);
        }
        if let Waited::Late(missing) = waited? {
            return Err(CommFault::Timeout { missing, seq, awaited: Awaited::Publish });
        }
        // Taken out while they are read, so that the streams go on meanwhile.
        let mut taken: Vec<Vec<f32>> = {
            let mut state = self.shared.lock();
            let take = |p: &mut Option<Peer>| {
                p.as_mut().map_or(Vec::new(), |p| std::mem::take(&mut p.slots[slot].data))
            };
            state.peers.iter_mut().map(take).collect()
        };
        let mut views: [&[f32]; MAX_MEMBERS] = [&[]; MAX_MEMBERS];
        for (m, view) in views.iter_mut().enumerate().take(members) {
            *view = if m == me { &self.own[slot].data } else { &taken[m] };
        }
        let result = read(&views[..members]);
        self.own[slot].finished = seq + 1;
        let done = Arc::new(frame::finished(seq));
        let mut state = self.shared.lock();
        for (p, data) in state.peers.iter_mut().zip(&mut taken) {
            if let Some(p) = p {
                p.slots[slot].data = std::mem::take(data);
                p.slots[slot].free = true;
                p.send(Arc::clone(&done));
                p.flush();
            }
        }
        self.shared.left_over(&state);
        Ok(result)
    }

    /// [`publish`](Tcp::publish) and [`collect`](Tcp::collect) in one.
    ///
    /// # Errors
    /// Those of both.
    pub fn exchange<R>(
        &mut self,
        fingerprint: u64,
        data: &[f32],
        deadline: Instant,
        read: impl FnOnce(&[&[f32]]) -> R,
    ) -> Result<R, CommFault> {
        let ticket = self.publish(fingerprint, data, deadline)?;
        self.collect(ticket, deadline, read)
    }

    /// Ends every wait on the lane, here and on every peer that can be reached. The first reason stays.
    pub fn abort(&self, reason: &str) {
        self.shared.abort(reason);
    }

    /// Waits until `ready`, as long as nobody whose doing `needs` is gone.
    fn wait(
        &self,
        seq: u64,
        deadline: Instant,
        ready: &dyn Fn(&State) -> bool,
        needs: &dyn Fn(&Peer) -> bool,
    ) -> Result<Waited, CommFault> {
        let shared = &*self.shared;
        let begun = Instant::now();
        let mut gone: Option<Instant> = None;
        loop {
            let mut state = shared.lock();
            state.waiting = false;
            state.move_all();
            state.check_abort()?;
            state.garbled(seq)?;
            if ready(&state) {
                shared.left_over(&state);
                return Ok(Waited::Ready);
            }
            let now = Instant::now();
            if let Err(fault) = state.gone(seq, needs) {
                // Who watches processes knows more of the end of one, and aborts with it.
                let until = *gone.get_or_insert(now + GRACE);
                if now >= until.min(deadline) {
                    return Err(fault);
                }
            }
            if now >= deadline {
                let missing = state.peers().filter(|(_, p)| needs(p)).map(|(m, _)| m).collect();
                return Ok(Waited::Late(missing));
            }
            if begun.elapsed() < self.spin {
                drop(state);
                // The one waited for may need this core.
                std::thread::yield_now();
                continue;
            }
            state.waiting = true;
            let (wants, more) = (state.wants(), state.more);
            drop(state);
            if !more {
                let until = gone.map_or(deadline, |g| g.min(deadline));
                let left = until.saturating_duration_since(now).min(LONGEST_SLEEP);
                sleep(&shared.caller, &self.fds, &wants, Some(left));
            }
        }
    }
}

impl Drop for Tcp {
    /// Lets go of what is still to be sent, for a short while.
    fn drop(&mut self) {
        let until = Instant::now() + LINGER;
        let mut state = self.shared.lock();
        state.leaving = Some(until);
        self.shared.ring(&self.shared.mover);
        loop {
            state.move_all();
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || state.aborted.is_some() || !state.peers().any(|(_, p)| p.unsent()) {
                return;
            }
            state.waiting = true;
            let wants = state.wants();
            drop(state);
            sleep(&self.shared.caller, &self.fds, &wants, Some(left.min(LONGEST_SLEEP)));
            state = self.shared.lock();
        }
    }
}

/// How long a wait looks at its streams before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// No sleep of a caller is longer.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);
/// How long a wait for a peer that is gone listens for an abort that says why.
const GRACE: Duration = Duration::from_millis(100);
/// How long an end that is dropped still sends.
const LINGER: Duration = Duration::from_secs(1);

enum Waited {
    Ready,
    /// The deadline passed; who was needed.
    Late(Vec<usize>),
}

/// This member's own slot.
#[derive(Debug, Default)]
struct Own {
    /// One more than the number of the collective last brought, as all of these.
    published: u64,
    finished: u64,
    data: Vec<f32>,
    frame: Arc<Vec<u8>>,
}

#[derive(Debug)]
struct Shared {
    layout: ArenaLayout,
    me: usize,
    /// Wakes the lane's thread.
    mover: OwnedFd,
    /// Wakes a caller that waits.
    caller: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// By member; none for this one.
    peers: Vec<Option<Peer>>,
    /// Contributions of this member so far.
    published: u64,
    aborted: Option<(usize, String)>,
    /// Whether a caller sleeps.
    waiting: bool,
    /// Set when the end is dropped: until when streams are kept.
    leaving: Option<Instant>,
    /// Whether anything came that a caller may wait for.
    moved: bool,
    /// Whether a stream has more than its turn allowed: what is left may lie inside it, where no poll sees it.
    more: bool,
}

impl State {
    fn peers(&self) -> impl Iterator<Item = (usize, &Peer)> {
        self.peers.iter().enumerate().filter_map(|(m, p)| p.as_ref().map(|p| (m, p)))
    }

    fn check_abort(&self) -> Result<(), CommFault> {
        match &self.aborted {
            Some((by, reason)) => Err(CommFault::Aborted { by: *by, reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// The fault of the first peer that broke the lane: it holds whether its doing is needed or not.
    fn garbled(&self, seq: u64) -> Result<(), CommFault> {
        let what = |p: &Peer| match &p.end {
            Some(End::Garbled(what)) => Some(what.clone()),
            _ => None,
        };
        match self.peers().find_map(|(peer, p)| what(p).map(|what| CommFault::Garbled { peer, seq, what })) {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// The fault of the first peer that is gone although it is needed.
    fn gone(&self, seq: u64, needs: &dyn Fn(&Peer) -> bool) -> Result<(), CommFault> {
        let how = |p: &Peer| match &p.end {
            Some(End::Gone(how)) if needs(p) => Some(how.clone()),
            _ => None,
        };
        match self.peers().find_map(|(peer, p)| how(p).map(|how| CommFault::Gone { peer, seq, how })) {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    /// Sends and receives what can be without waiting.
    fn move_all(&mut self) {
        self.more = false;
        for (m, p) in self.peers.iter_mut().enumerate() {
            let Some(p) = p else { continue };
            p.flush();
            if let Some(reason) = p.receive(self.published, &mut self.moved) {
                self.aborted.get_or_insert((m, reason));
            }
            self.more |= p.more;
        }
    }

    /// What to poll for, by member.
    fn wants(&self) -> Vec<PollFlags> {
        let want = |p: &Option<Peer>| match p {
            Some(p) if p.end.is_none() => {
                PollFlags::IN | if p.unsent() { PollFlags::OUT } else { PollFlags::empty() }
            }
            _ => PollFlags::empty(),
        };
        self.peers.iter().map(want).collect()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self, bell: &OwnedFd) {
        // It can only fail when it has been rung 2⁶⁴ times unheard.
        let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
    }

    /// Hands what could not be sent at once to the lane's thread.
    fn left_over(&self, state: &State) {
        if state.peers().any(|(_, p)| p.unsent()) {
            self.ring(&self.mover);
        }
    }

    fn abort(&self, reason: &str) {
        let mut state = self.lock();
        if state.aborted.is_none() {
            let reason = clipped(reason).to_string();
            let frame = Arc::new(frame::abort(&reason));
            state.aborted = Some((self.me, reason));
            for p in state.peers.iter_mut().flatten() {
                p.send(Arc::clone(&frame));
                p.flush();
            }
            self.left_over(&state);
        }
        drop(state);
        self.ring(&self.caller);
    }

    /// The lane's thread: until every stream has ended or the end was dropped and its time is over.
    fn keep_moving(&self, fds: &[Option<OwnedFd>]) {
        loop {
            let mut state = self.lock();
            state.moved = false;
            state.move_all();
            if state.waiting && (state.moved || state.aborted.is_some()) {
                self.ring(&self.caller);
            }
            let mut left = None;
            if let Some(until) = state.leaving {
                for p in state.peers.iter_mut().flatten().filter(|p| !p.unsent()) {
                    p.close();
                }
                let over = until.saturating_duration_since(Instant::now());
                // After an abort nobody needs what is still on its way.
                let ended = state.peers().all(|(_, p)| p.end.is_some());
                if over.is_zero() || ended || state.aborted.is_some() {
                    state.peers.iter_mut().for_each(|p| *p = None);
                    return;
                }
                left = Some(over);
            }
            let (wants, more) = (state.wants(), state.more);
            drop(state);
            sleep(&self.mover, fds, &wants, if more { Some(Duration::ZERO) } else { left });
        }
    }
}

/// Sleeps until a stream is ready for what is wanted of it or the bell rings; the bell is quiet afterwards.
fn sleep(bell: &OwnedFd, fds: &[Option<OwnedFd>], wants: &[PollFlags], limit: Option<Duration>) {
    let mut set = vec![PollFd::new(bell, PollFlags::IN)];
    for (fd, want) in fds.iter().zip(wants) {
        if let (Some(fd), false) = (fd, want.is_empty()) {
            set.push(PollFd::new(fd, *want));
        }
    }
    let limit = limit.map(|l| Timespec { tv_sec: l.as_secs() as _, tv_nsec: l.subsec_nanos().into() });
    // Whatever ends the sleep, the caller looks again.
    let _ = poll(&mut set, limit.as_ref());
    let _ = rustix::io::read(bell, &mut [0u8; 8]);
}
