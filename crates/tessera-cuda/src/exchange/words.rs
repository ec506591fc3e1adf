//! Words that the host and a group's kernels both see: whether all is to end, how far the device is, what went wrong.

#![allow(unsafe_code, reason = "words shared with a device")]

use std::fmt;
use std::sync::atomic::Ordering;

use crate::driver::{Done, Pinned};

/// How a group's collectives ended badly. Members are named by their index in the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GroupFault {
    /// A peer brought another collective to the same position. Nothing was moved.
    Mismatch {
        /// Op of this member.
        op: u32,
        /// First peer that differs.
        peer: usize,
        /// Fingerprint of this member's collective.
        mine: u32,
        /// Fingerprint of the peer's.
        theirs: u32,
    },
    /// Peers did not come in time.
    Timeout {
        /// Op of this member.
        op: u32,
        /// Which.
        peers: Vec<usize>,
        /// What was awaited of them.
        awaited: Awaited,
    },
    /// The host wanted everything to end.
    Aborted {
        /// Op that was waiting.
        op: u32,
    },
    /// NCCL says so.
    Nccl(String),
    /// NCCL says that another member is gone or in trouble.
    Remote(String),
}

/// What a member waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Awaited {
    /// That a peer begins the collective.
    Arrival,
    /// That a peer, who began it, is through.
    End,
}

/// Where the device is: numbers of ops, none before the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Begun last.
    pub(crate) arrived: Option<u32>,
    /// Ended last.
    pub(crate) done: Option<u32>,
}

impl fmt::Display for GroupFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GroupFault::Mismatch { op, peer, mine, theirs } => {
                write!(f, "op {op}: member {peer} brings {theirs:#010x}, this one {mine:#010x}")
            }
            GroupFault::Timeout { op, peers, awaited } => {
                let many = if peers.len() == 1 { "member" } else { "members" };
                let who: Vec<String> = peers.iter().map(usize::to_string).collect();
                let what = match awaited {
                    Awaited::Arrival => "did not reach it",
                    Awaited::End => "did not end it",
                };
                write!(f, "op {op}: {many} {} {what} in time", who.join(", "))
            }
            GroupFault::Aborted { op } => write!(f, "op {op}: ended from outside"),
            GroupFault::Nccl(why) | GroupFault::Remote(why) => f.write_str(why),
        }
    }
}

/// The words, as `Host` of exchange.cu.
#[derive(Debug)]
pub(super) struct Words(Pinned);

// SAFETY: threads and the device meet here in atomic words alone.
unsafe impl Sync for Words {}

const ABORT: usize = 0;
const ARRIVED: usize = 32;
const DONE: usize = 33;
const FAULT: usize = 34;
const OP: usize = 35;
const AWAITED: usize = 36;
const PEERS: usize = 37;
const PEER: usize = 38;
const MINE: usize = 39;
const THEIRS: usize = 40;
const BYTES: usize = 42 * 4;

/// No op yet.
const NONE: u32 = u32::MAX;

impl Words {
    pub(super) fn new() -> Done<Words> {
        let words = Words(Pinned::new(BYTES)?);
        words.rewind();
        Ok(words)
    }

    pub(super) fn rewind(&self) {
        self.0.word(DONE).store(NONE, Ordering::Release);
        self.0.word(ARRIVED).store(NONE, Ordering::Release);
    }

    /// Device address of all of them.
    pub(super) fn at(&self) -> u64 {
        self.0.at()
    }

    /// Device address of the word that says which op was begun.
    pub(super) fn arrived_at(&self) -> u64 {
        self.at() + ARRIVED as u64 * 4
    }

    /// Device address of the word that says which op has ended.
    pub(super) fn done_at(&self) -> u64 {
        self.at() + DONE as u64 * 4
    }

    /// Ends every wait of the group's kernels on this device.
    pub(super) fn abort(&self) {
        self.0.word(ABORT).store(1, Ordering::SeqCst);
    }

    pub(super) fn progress(&self) -> Progress {
        let word = |at: usize| Some(self.0.word(at).load(Ordering::Acquire)).filter(|op| *op != NONE);
        // The end is read first: it never seems ahead of the beginning.
        let done = word(DONE);
        Progress { arrived: word(ARRIVED), done }
    }

    pub(super) fn fault(&self) -> Option<GroupFault> {
        let word = |at: usize| self.0.word(at).load(Ordering::Acquire);
        let kind = word(FAULT);
        let op = word(OP);
        match kind {
            0 => None,
            1 => Some(GroupFault::Mismatch {
                op,
                peer: word(PEER) as usize,
                mine: word(MINE),
                theirs: word(THEIRS),
            }),
            2 => {
                let peers = word(PEERS);
                let peers = (0..32).filter(|m| peers >> m & 1 == 1).collect();
                let awaited = if word(AWAITED) == 0 { Awaited::Arrival } else { Awaited::End };
                Some(GroupFault::Timeout { op, peers, awaited })
            }
            _ => Some(GroupFault::Aborted { op }),
        }
    }
}
