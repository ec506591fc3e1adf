//! The host transports of a communicator: members contribute data and read all contributions
//! through shared memory on one host, or through streams across hosts. Both transports have the
//! same semantics and produce the same bits.

use std::time::Instant;

use crate::arena::{self, Arena, ArenaLayout};
use crate::tcp::{self, TcpTransport};

/// One member's end of a communicator.
#[derive(Debug)]
pub enum HostTransport {
    /// Shared memory; all members are on this host.
    Arena(Arena),
    /// Streams; members may be on any host.
    Tcp(TcpTransport),
}

/// A handle that aborts a communicator from any thread.
#[derive(Debug, Clone)]
pub enum TransportAborter {
    /// The handle of an arena.
    Arena(arena::ArenaAborter),
    /// The handle of a TCP transport.
    Tcp(tcp::TcpAborter),
}

impl From<Arena> for HostTransport {
    fn from(arena: Arena) -> HostTransport {
        HostTransport::Arena(arena)
    }
}

impl From<TcpTransport> for HostTransport {
    fn from(tcp: TcpTransport) -> HostTransport {
        HostTransport::Tcp(tcp)
    }
}

impl TransportAborter {
    /// Ends every present and future wait on the communicator, on every member that can be reached.
    /// Only the first reason is kept.
    pub fn abort(&self, reason: &str) {
        match self {
            TransportAborter::Arena(a) => a.abort(reason),
            TransportAborter::Tcp(a) => a.abort(reason),
        }
    }
}

impl HostTransport {
    /// Returns this member's index.
    #[must_use]
    pub fn member_index(&self) -> usize {
        match self {
            HostTransport::Arena(a) => a.member_index(),
            HostTransport::Tcp(t) => t.member_index(),
        }
    }

    /// Returns the number of members, the number of slots and the size of a slot.
    #[must_use]
    pub fn layout(&self) -> ArenaLayout {
        match self {
            HostTransport::Arena(a) => a.layout(),
            HostTransport::Tcp(t) => t.layout(),
        }
    }

    /// Returns a handle that can abort from another thread.
    #[must_use]
    pub fn aborter(&self) -> TransportAborter {
        match self {
            HostTransport::Arena(a) => TransportAborter::Arena(a.aborter()),
            HostTransport::Tcp(t) => TransportAborter::Tcp(t.aborter()),
        }
    }

    /// Contributes `data` to the next collective. `fingerprint` identifies the collective that this
    /// member is executing (op, shape, position in the program): see
    /// [`crate::collectives::fingerprint_collective`].
    ///
    /// # Errors
    /// Returns any [`CommFault`] except a mismatch. The communicator is unusable after an error.
    pub fn publish(
        &mut self,
        fingerprint: u64,
        data: &[f32],
        deadline: Instant,
    ) -> Result<Ticket, CommFault> {
        match self {
            HostTransport::Arena(a) => a.publish(fingerprint, data, deadline),
            HostTransport::Tcp(t) => t.publish(fingerprint, data, deadline),
        }
    }

    /// Waits for all contributions, passes them to `read` in member order, and releases the slots.
    /// Tickets may be collected in any order.
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
        match self {
            HostTransport::Arena(a) => a.collect(ticket, deadline, read),
            HostTransport::Tcp(t) => t.collect(ticket, deadline, read),
        }
    }

    /// Does [`publish`](HostTransport::publish) and [`collect`](HostTransport::collect) in one
    /// call.
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
}

/// The way in which a collective failed. Members are identified by their index in the group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommFault {
    /// A peer contributed a different collective at the same position.
    #[error("collective {seq}: member {peer} published {theirs:#018x}, this member {mine:#018x}")]
    Mismatch {
        /// The first peer whose fingerprint differs.
        peer: usize,
        /// Fingerprint of this member's collective.
        mine: u64,
        /// Fingerprint of the peer's collective.
        theirs: u64,
        /// Position in the group's sequence.
        seq: u64,
    },
    /// Peers did not publish or read before the deadline of the collective.
    #[error("collective {seq}: members {missing:?} did not {awaited} in time")]
    Timeout {
        /// The members that had not acted.
        missing: Vec<usize>,
        /// Position in the group's sequence.
        seq: u64,
        /// The action that this member waited for.
        awaited: PeerAction,
    },
    /// A member aborted the run.
    #[error("aborted by member {by}: {reason}")]
    Aborted {
        /// The member that aborted.
        by: usize,
        /// Its reason, truncated to 240 bytes.
        reason: String,
    },
    /// A peer's stream closed while its contribution or its slot is still needed.
    #[error("collective {seq}: member {peer} disconnected: {how}")]
    Disconnected {
        /// The member whose stream closed.
        peer: usize,
        /// Position in the group's sequence.
        seq: u64,
        /// The reason that its stream gave.
        how: String,
    },
    /// A peer sent invalid bytes: a damaged, unexpected or oversized frame.
    #[error("collective {seq}: member {peer} sent an invalid frame: {what}")]
    InvalidFrame {
        /// The peer that sent the frame.
        peer: usize,
        /// Position in the group's sequence.
        seq: u64,
        /// The defect of the frame.
        what: String,
    },
    /// A contribution is larger than a slot.
    #[error("collective {seq}: a contribution of {bytes} bytes does not fit a slot of {slot_bytes}")]
    TooLarge {
        /// Position in the group's sequence.
        seq: u64,
        /// Size of the contribution.
        bytes: usize,
        /// Size of a slot.
        slot_bytes: usize,
    },
    /// This member has not collected an earlier collective whose slot is needed, and would
    /// therefore wait for itself.
    #[error("collective {seq} needs the slot of collective {uncollected}, which is not collected yet")]
    InFlight {
        /// Position in the group's sequence.
        seq: u64,
        /// The collective to collect first.
        uncollected: u64,
    },
}

/// An action that a member did not perform in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerAction {
    /// Publishing its contribution to the collective for the other members to read.
    Publish,
    /// Reading the contributions of an earlier collective whose slot is needed.
    Read,
}

impl std::fmt::Display for PeerAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            PeerAction::Publish => "publish",
            PeerAction::Read => "finish reading",
        })
    }
}

/// A handle of a published contribution, to be collected exactly once.
#[derive(Debug)]
#[must_use = "peers wait for the slot of a collective that is never collected"]
pub struct Ticket {
    pub(crate) seq: u64,
    pub(crate) fingerprint: u64,
}

impl Ticket {
    /// Returns the position of the collective in the group's sequence, from 0.
    #[must_use]
    pub fn sequence_number(&self) -> u64 {
        self.seq
    }
}

/// Maximum bytes of an abort's reason.
pub(crate) const REASON_BYTES: usize = 240;

/// Returns the longest prefix of `reason` that fits into [`REASON_BYTES`].
pub(crate) fn truncate_reason(reason: &str) -> &str {
    let mut end = reason.len().min(REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}
