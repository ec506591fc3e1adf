//! Where members of a lane bring their contributions and read everybody's: through shared memory on one host, through
//! streams across hosts. Both mean the same and give the same bits.

use std::time::Instant;

use crate::arena::{self, Arena, ArenaLayout};
use crate::tcp::{self, Tcp};

/// One member's end of a lane.
#[derive(Debug)]
pub enum Exchange {
    /// Members are on this host.
    Arena(Arena),
    /// Members may be anywhere.
    Tcp(Tcp),
}

/// Ends every wait on a lane, from any thread.
#[derive(Debug, Clone)]
pub enum Aborter {
    /// Of an arena.
    Arena(arena::Aborter),
    /// Of streams.
    Tcp(tcp::Aborter),
}

impl From<Arena> for Exchange {
    fn from(arena: Arena) -> Exchange {
        Exchange::Arena(arena)
    }
}

impl From<Tcp> for Exchange {
    fn from(tcp: Tcp) -> Exchange {
        Exchange::Tcp(tcp)
    }
}

impl Aborter {
    /// Ends every wait on the lane, on every member that can be reached, now and later. The first reason stays.
    pub fn abort(&self, reason: &str) {
        match self {
            Aborter::Arena(a) => a.abort(reason),
            Aborter::Tcp(a) => a.abort(reason),
        }
    }
}

impl Exchange {
    /// This member's index.
    #[must_use]
    pub fn me(&self) -> usize {
        match self {
            Exchange::Arena(a) => a.me(),
            Exchange::Tcp(t) => t.me(),
        }
    }

    /// Members, slots and the size of a slot.
    #[must_use]
    pub fn layout(&self) -> ArenaLayout {
        match self {
            Exchange::Arena(a) => a.layout(),
            Exchange::Tcp(t) => t.layout(),
        }
    }

    /// A handle that can abort from another thread.
    #[must_use]
    pub fn aborter(&self) -> Aborter {
        match self {
            Exchange::Arena(a) => Aborter::Arena(a.aborter()),
            Exchange::Tcp(t) => Aborter::Tcp(t.aborter()),
        }
    }

    /// Brings `data` to the next collective. `fingerprint` names what this member believes it to be (op,
    /// shape, place in the program): see [`crate::collectives::fingerprint`].
    ///
    /// # Errors
    /// Any [`CommFault`] but a mismatch. After an error the lane is of no further use.
    pub fn publish(
        &mut self,
        fingerprint: u64,
        data: &[f32],
        deadline: Instant,
    ) -> Result<Ticket, CommFault> {
        match self {
            Exchange::Arena(a) => a.publish(fingerprint, data, deadline),
            Exchange::Tcp(t) => t.publish(fingerprint, data, deadline),
        }
    }

    /// Waits for everybody's contribution, hands them to `read` in order of member, and gives the slots back.
    /// Tickets may be collected in any order.
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
        match self {
            Exchange::Arena(a) => a.collect(ticket, deadline, read),
            Exchange::Tcp(t) => t.collect(ticket, deadline, read),
        }
    }

    /// [`publish`](Exchange::publish) and [`collect`](Exchange::collect) in one.
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
}

/// How a collective ended badly. Members are named by their index in the group.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommFault {
    /// A peer brought a different collective to the same position.
    #[error("collective {seq}: member {peer} brings {theirs:#018x}, this one {mine:#018x}")]
    Mismatch {
        /// The first peer that differs.
        peer: usize,
        /// Fingerprint of this member's collective.
        mine: u64,
        /// Fingerprint of the peer's.
        theirs: u64,
        /// Position in the group's sequence.
        seq: u64,
    },
    /// The deadline passed.
    #[error("collective {seq}: members {missing:?} did not {awaited} in time")]
    Timeout {
        /// Who had not come.
        missing: Vec<usize>,
        /// Position in the group's sequence.
        seq: u64,
        /// What was waited for.
        awaited: Awaited,
    },
    /// Somebody ended the run.
    #[error("aborted by member {by}: {reason}")]
    Aborted {
        /// Who.
        by: usize,
        /// In their words, cut to 240 bytes.
        reason: String,
    },
    /// A peer's end of the lane closed, and its contribution or its slot is needed.
    #[error("collective {seq}: member {peer} is gone: {how}")]
    Gone {
        /// Who.
        peer: usize,
        /// Position in the group's sequence.
        seq: u64,
        /// What its stream said last.
        how: String,
    },
    /// A peer sent what no member sends: damaged, out of turn or too long.
    #[error("collective {seq}: member {peer} sent what is no contribution: {what}")]
    Garbled {
        /// Who.
        peer: usize,
        /// Position in the group's sequence.
        seq: u64,
        /// What is wrong with it.
        what: String,
    },
    /// A contribution larger than a slot.
    #[error("collective {seq}: a contribution of {bytes} bytes does not fit a slot of {slot_bytes}")]
    TooLarge {
        /// Position in the group's sequence.
        seq: u64,
        /// Size of the contribution.
        bytes: usize,
        /// Size of a slot.
        slot_bytes: usize,
    },
    /// This member has not collected an earlier collective whose slot is needed, and so would wait for itself.
    #[error("collective {seq} needs the slot of collective {uncollected}, which is not collected yet")]
    InFlight {
        /// Position in the group's sequence.
        seq: u64,
        /// The collective to collect first.
        uncollected: u64,
    },
}

/// What a member did not do in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaited {
    /// Bring its contribution.
    Publish,
    /// Read the contributions of an earlier collective, whose slot is needed.
    Read,
}

impl std::fmt::Display for Awaited {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Awaited::Publish => "publish",
            Awaited::Read => "finish reading",
        })
    }
}

/// A published contribution, to be collected once.
#[derive(Debug)]
#[must_use = "peers wait for the slot of a collective that is never collected"]
pub struct Ticket {
    pub(crate) seq: u64,
    pub(crate) fingerprint: u64,
}

impl Ticket {
    /// Position of the collective in the group's sequence, from 0.
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.seq
    }
}

/// Most bytes of an abort's reason.
pub(crate) const REASON_BYTES: usize = 240;

/// The beginning of a reason that fits.
pub(crate) fn clipped(reason: &str) -> &str {
    let mut end = reason.len().min(REASON_BYTES);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}
