//! The streams of one member and the background thread that keeps them moving.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::fs::Timespec;

use super::frame;
use super::peer::{PeerConnection, StreamEnd};
use crate::system::WakeEvent;
use crate::transport::{CommFault, CommLayout, truncate_reason};

#[derive(Debug)]
pub(super) struct TcpShared {
    pub(super) layout: CommLayout,
    pub(super) me: usize,
    /// Wakes the background thread.
    pub(super) pump_event: WakeEvent,
    /// Ends the sleep of a caller in a wait or in the final linger.
    pub(super) caller_event: WakeEvent,
    pub(super) state: Mutex<TcpState>,
}

#[derive(Debug)]
pub(super) struct TcpState {
    /// One entry per member; `None` for this member.
    pub(super) peers: Vec<Option<PeerConnection>>,
    /// Number of contributions that this member has published.
    pub(super) published: u64,
    pub(super) aborted: Option<(usize, String)>,
    /// Whether a caller sleeps or is about to, so that the background thread must wake it.
    pub(super) caller_waiting: bool,
    /// Set when the end is dropped: the time until which the streams are kept.
    pub(super) linger_until: Option<Instant>,
    /// Whether anything arrived that a caller may wait for.
    pub(super) progressed: bool,
    /// Whether a stream has more data than its quota: the rest may be buffered inside the
    /// stream, where poll does not see it.
    pub(super) has_more: bool,
}

impl TcpState {
    pub(super) fn iter_peers(&self) -> impl Iterator<Item = (usize, &PeerConnection)> {
        self.peers.iter().enumerate().filter_map(|(m, p)| p.as_ref().map(|p| (m, p)))
    }

    pub(super) fn check_abort(&self) -> Result<(), CommFault> {
        match &self.aborted {
            Some((by, reason)) => Err(CommFault::Aborted { by: *by, reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Returns the fault of the first peer that sent an invalid frame, whether or not that peer is
    /// needed now.
    pub(super) fn check_invalid_frames(&self, seq: u64) -> Result<(), CommFault> {
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
    pub(super) fn check_disconnected(
        &self,
        seq: u64,
        needs: &dyn Fn(&PeerConnection) -> bool,
    ) -> Result<(), CommFault> {
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
    pub(super) fn pump_all(&mut self) {
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

    /// Returns the events to poll for, by member: none for this member and for ended streams.
    pub(super) fn poll_flags(&self) -> Vec<PollFlags> {
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
    pub(super) fn lock(&self) -> MutexGuard<'_, TcpState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the background thread if some frames could not be sent at once.
    pub(super) fn wake_pump_if_unsent(&self, state: &TcpState) {
        if state.iter_peers().any(|(_, p)| p.has_unsent()) {
            self.pump_event.signal();
        }
    }

    pub(super) fn abort(&self, reason: &str) {
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
        self.caller_event.signal();
    }

    /// The background thread: runs until every stream has ended, or until the end is dropped and
    /// its linger time is over.
    pub(super) fn run_pump(&self, fds: &[Option<OwnedFd>]) {
        loop {
            let mut state = self.lock();
            state.progressed = false;
            state.pump_all();
            if state.caller_waiting && (state.progressed || state.aborted.is_some()) {
                self.caller_event.signal();
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

/// Sleeps until a stream is ready for its poll flags or the event is signalled, and resets the
/// event.
pub(super) fn poll_streams(
    event: &WakeEvent,
    fds: &[Option<OwnedFd>],
    flags: &[PollFlags],
    limit: Option<Duration>,
) {
    let mut set = vec![PollFd::new(event, PollFlags::IN)];
    for (fd, want) in fds.iter().zip(flags) {
        if let (Some(fd), false) = (fd, want.is_empty()) {
            set.push(PollFd::new(fd, *want));
        }
    }
    let limit = limit.and_then(|l| Timespec::try_from(l).ok());
    // The caller polls again, whatever ended the sleep.
    let _ = poll(&mut set, limit.as_ref());
    event.reset();
}
