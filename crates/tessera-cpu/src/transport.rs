//! The transport of a communicator: members contribute data and read all contributions, through
//! shared memory on one host or through streams across hosts. All transports have the same
//! semantics and produce the same bits.

use std::time::Instant;

use tessera_device::{AbortFn, UsedTransport};

/// The maximum number of members of a communicator. It exceeds 72, the largest NVLink domain of
/// today, so that one host can stand in for such a domain.
pub const MAX_MEMBERS: usize = 128;

/// One member's end of a communicator.
///
/// Backends hold it as a trait object, because the processes of a run choose between shared memory
/// and streams when they start. A generic backend would be compiled twice and be no faster: a
/// collective takes microseconds, and the indirect calls take no measurable part of them.
pub trait Transport: std::fmt::Debug + Send {
    /// Returns this member's index.
    fn member_index(&self) -> usize;

    /// Returns a number that all members of the communicator share and no other communicator of this
    /// host has; `None` if the transport has none.
    fn shared_id(&self) -> Option<u64>;

    /// Returns what carries the data.
    fn used_transport(&self) -> UsedTransport;

    /// Returns a callback that ends every present and future wait on the communicator, on every
    /// member that can be reached. Only the first reason is kept.
    fn abort_fn(&self) -> AbortFn;

    /// Contributes `data` to the next collective. `fingerprint` identifies the collective that this
    /// member is executing (op, shape, position in the program): see
    /// [`crate::collectives::fingerprint_collective`].
    ///
    /// # Errors
    /// Returns any [`CommFault`] except a mismatch. The communicator is unusable after an error.
    fn publish(&mut self, fingerprint: u64, data: &[f32], deadline: Instant) -> Result<Ticket, CommFault>;

    /// Waits for all contributions, calls `read` once with them in member order, and releases the
    /// slots. Tickets may be collected in any order.
    ///
    /// # Errors
    /// Returns a mismatch, timeout, abort or disconnect, and then does not call `read`.
    ///
    /// # Panics
    /// Panics if the ticket came from another communicator.
    fn collect(
        &mut self,
        ticket: Ticket,
        deadline: Instant,
        read: &mut dyn FnMut(&[&[f32]]),
    ) -> Result<(), CommFault>;

    /// Does [`publish`](Transport::publish) and [`collect`](Transport::collect) in one call.
    ///
    /// # Errors
    /// Returns the errors of both.
    fn publish_and_collect(
        &mut self,
        fingerprint: u64,
        data: &[f32],
        deadline: Instant,
        read: &mut dyn FnMut(&[&[f32]]),
    ) -> Result<(), CommFault> {
        let ticket = self.publish(fingerprint, data, deadline)?;
        self.collect(ticket, deadline, read)
    }
}

/// The dimensions of a communicator, the same on every member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommLayout {
    /// Number of members, 1 to [`MAX_MEMBERS`].
    pub members: usize,
    /// Collectives that may be in flight at once, at least 1. Collective number `s` uses slot
    /// `s % slots` of every member.
    pub slots: usize,
    /// Maximum bytes of one member's contribution to one collective, at least 4.
    pub slot_bytes: usize,
}

impl CommLayout {
    /// Checks that every number is in range and that all slots together can be addressed.
    pub(crate) fn check_ranges(&self) -> Result<(), TransportError> {
        let fits = (1..=MAX_MEMBERS).contains(&self.members) && self.slots >= 1 && self.slot_bytes >= 4;
        let bytes = self.members.checked_mul(self.slots).and_then(|n| n.checked_mul(self.slot_bytes));
        match bytes {
            Some(bytes) if fits && bytes <= isize::MAX as usize => Ok(()),
            _ => Err(TransportError::InvalidLayout(*self)),
        }
    }

    /// Returns the slot that a collective uses.
    pub(crate) fn slot_of(&self, seq: u64) -> usize {
        (seq % self.slots as u64) as usize
    }

    /// Checks that a contribution of `elements` numbers fits a slot.
    pub(crate) fn check_contribution(&self, seq: u64, elements: usize) -> Result<(), CommFault> {
        let bytes = elements.saturating_mul(4);
        if bytes > self.slot_bytes {
            return Err(CommFault::TooLarge { seq, bytes, slot_bytes: self.slot_bytes });
        }
        Ok(())
    }
}

/// The reason why a member's end of a communicator could not be created.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// A number of the layout is out of range.
    #[error("invalid layout of a communicator: {0:?}")]
    InvalidLayout(CommLayout),
    /// The descriptor refers to something else than an arena of this layout: it has the wrong size,
    /// is not sealed, or records different dimensions.
    #[error("the descriptor does not refer to an arena of {expected:?}: {found}")]
    LayoutMismatch {
        /// The layout that this member passed.
        expected: CommLayout,
        /// The first difference, such as `64 bytes instead of 128`.
        found: String,
    },
    /// Another member has claimed this index, the index is not below the member count, or the
    /// streams are not those to the other members.
    #[error("member {index} of {members} is already taken or does not exist")]
    IndexTaken {
        /// The member index that this process tried to claim.
        index: usize,
        /// Number of members; valid indices are below it.
        members: usize,
    },
    /// A system call failed.
    #[error("the operating system refused: {0}")]
    Io(#[from] std::io::Error),
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
        /// Number of the failed collective in the group's sequence, from 0.
        seq: u64,
    },
    /// Peers did not publish or read before the deadline of the collective.
    #[error("collective {seq}: members {missing:?} did not {awaited} in time")]
    Timeout {
        /// The members that had not acted.
        missing: Vec<usize>,
        /// Number of the failed collective in the group's sequence, from 0.
        seq: u64,
        /// The action that the missing members did not perform.
        awaited: PeerAction,
    },
    /// A member, possibly this one, aborted the run.
    #[error("aborted by member {by}: {reason}")]
    Aborted {
        /// Index of the first member whose abort took effect here.
        by: usize,
        /// Its reason, truncated to 240 bytes.
        reason: String,
    },
    /// A peer's stream closed while its contribution or its slot is still needed.
    #[error("collective {seq}: member {peer} disconnected: {how}")]
    Disconnected {
        /// The member whose stream closed.
        peer: usize,
        /// Number of the failed collective in the group's sequence, from 0.
        seq: u64,
        /// The I/O error of the stream, or `its stream closed`.
        how: String,
    },
    /// A peer sent invalid bytes: a damaged, unexpected or oversized frame.
    #[error("collective {seq}: member {peer} sent an invalid frame: {what}")]
    InvalidFrame {
        /// The peer that sent the frame.
        peer: usize,
        /// Number of the failed collective in the group's sequence, from 0.
        seq: u64,
        /// The defect of the frame, such as `an unknown frame kind`.
        what: String,
    },
    /// A contribution is larger than a slot; this member has published nothing of it.
    #[error("collective {seq}: a contribution of {bytes} bytes does not fit a slot of {slot_bytes}")]
    TooLarge {
        /// Number of the failed collective in the group's sequence, from 0.
        seq: u64,
        /// Size of the contribution in bytes: four per element.
        bytes: usize,
        /// Maximum bytes of a contribution, as the layout gives them.
        slot_bytes: usize,
    },
    /// This member has not collected an earlier collective whose slot is needed, and would
    /// therefore wait for itself.
    #[error("collective {seq} needs the slot of collective {uncollected}, which is not collected yet")]
    InFlight {
        /// Number of the failed collective in the group's sequence, from 0.
        seq: u64,
        /// Number of the earlier collective, which this member must collect first.
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
