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
mod pump;

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;
use tessera_device::{AbortFn, UsedTransport};

use crate::system::WakeEvent;
use crate::transport::{CommFault, CommLayout, MAX_MEMBERS, PeerAction, Ticket, Transport, TransportError};
use peer::PeerConnection;
pub use peer::PeerStream;
use pump::{TcpShared, TcpState, poll_streams};

/// One member's end of a communicator over streams.
#[derive(Debug)]
pub struct TcpTransport {
    shared: Arc<TcpShared>,
    own_slots: Vec<OwnSlot>,
    next_seq: u64,
    fds: Vec<Option<OwnedFd>>,
}

impl TcpTransport {
    /// Creates the end of member `me`, given a stream to each other member in member order and
    /// `None` at index `me`. The streams become non-blocking.
    ///
    /// # Errors
    /// Fails if the layout is out of range, the streams do not match the other members, or a system
    /// call fails.
    pub fn new(
        layout: CommLayout,
        me: usize,
        wires: Vec<Option<Box<dyn PeerStream>>>,
    ) -> Result<TcpTransport, TransportError> {
        layout.check_ranges()?;
        let fits = wires.len() == layout.members && me < layout.members;
        if !fits || wires.iter().enumerate().any(|(m, w)| w.is_none() != (m == me)) {
            return Err(TransportError::IndexTaken { index: me, members: layout.members });
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
        let shared = Arc::new(TcpShared {
            layout,
            me,
            pump_event: WakeEvent::new()?,
            caller_event: WakeEvent::new()?,
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
        Ok(TcpTransport { shared, own_slots: own, next_seq: 0, fds })
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
            if begun.elapsed() < SPIN_TIME {
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

impl Transport for TcpTransport {
    fn member_index(&self) -> usize {
        self.shared.me
    }

    fn shared_id(&self) -> Option<u64> {
        // Each pair of members has its own stream.
        None
    }

    fn used_transport(&self) -> UsedTransport {
        UsedTransport::Tcp
    }

    fn abort_fn(&self) -> AbortFn {
        let shared = Arc::clone(&self.shared);
        Arc::new(move |reason| shared.abort(reason))
    }

    fn publish(&mut self, fingerprint: u64, data: &[f32], deadline: Instant) -> Result<Ticket, CommFault> {
        let seq = self.next_seq;
        let layout = self.shared.layout;
        layout.check_contribution(seq, data.len())?;
        let slot = layout.slot_of(seq);
        if let Some(last) = seq.checked_sub(layout.slots as u64) {
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

    fn collect(
        &mut self,
        ticket: Ticket,
        deadline: Instant,
        read: &mut dyn FnMut(&[&[f32]]),
    ) -> Result<(), CommFault> {
        let Ticket { seq, fingerprint: mine } = ticket;
        let CommLayout { members, .. } = self.shared.layout;
        let (slot, me) = (self.shared.layout.slot_of(seq), self.shared.me);
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
        read(&views[..members]);
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
        Ok(())
    }
}

impl Drop for TcpTransport {
    /// Sends the queued frames for at most `CLOSE_LINGER`; the background thread closes the
    /// streams.
    fn drop(&mut self) {
        let until = Instant::now() + CLOSE_LINGER;
        let mut state = self.shared.lock();
        state.linger_until = Some(until);
        self.shared.pump_event.signal();
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
const SPIN_TIME: Duration = Duration::from_micros(50);
/// The longest single sleep of a caller.
const MAX_SLEEP: Duration = Duration::from_millis(50);
/// How long a wait for a disconnected peer waits for an abort with the cause.
const ABORT_GRACE: Duration = Duration::from_millis(100);
/// Longest time for which a dropped transport still sends its queued frames.
const CLOSE_LINGER: Duration = Duration::from_secs(1);

enum PeerWait {
    Ready,
    /// The deadline passed; contains the members that had not acted.
    TimedOut(Vec<usize>),
}

/// The last contribution of this member in one slot, as numbers and as the frame that was sent.
#[derive(Debug, Default)]
struct OwnSlot {
    /// The number of the last published collective plus one; `finished` is encoded alike.
    published: u64,
    finished: u64,
    data: Vec<f32>,
    frame: Arc<Vec<u8>>,
}
