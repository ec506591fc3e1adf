//! Signals in pinned memory that the host shares with a group's kernels: the abort request, the
//! progress of the device, and its first fault.

#![allow(unsafe_code, reason = "words shared with a device")]

use std::sync::atomic::Ordering;

use crate::device_memory::PinnedMemory;
use crate::driver::CudaResult;

/// Failure of a group's collective. Members are identified by their index in the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GroupFault {
    /// A peer launched a different collective at this position. No data was moved.
    Mismatch {
        /// Index in the program of this member's collective.
        op: u32,
        /// Lowest index of a peer whose fingerprint differs.
        peer: usize,
        /// Fingerprint of this member's collective.
        mine: u32,
        /// Fingerprint of the peer's collective.
        theirs: u32,
    },
    /// Peers did not arrive or complete within the timeout.
    Timeout {
        /// Index in the program of this member's collective.
        op: u32,
        /// Indices of the missing peers, ascending.
        peers: Vec<usize>,
    },
    /// The host requested an abort while this member waited for peers.
    Aborted {
        /// Index in the program of the collective whose wait ended.
        op: u32,
    },
    /// NCCL reports an error of this member.
    Nccl(String),
    /// NCCL reports that another member has failed or exited.
    Remote(String),
}

/// Progress of the device as op indices; `None` before the first op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceProgress {
    /// Last op that this device began, whether or not its peers have.
    pub(crate) started: Option<u32>,
    /// Last op whose result is complete on this device.
    pub(crate) completed: Option<u32>,
}

/// The signals, with the layout of `Host` in p2p_collectives.cu.
#[derive(Debug)]
pub(super) struct HostSignals(PinnedMemory);

// SAFETY: threads and the device access the memory only through atomic words.
unsafe impl Sync for HostSignals {}

const ABORT: usize = 0;
const STARTED: usize = 32;
const COMPLETED: usize = 33;
const FAULT: usize = 34;
const OP: usize = 35;
const PEERS: usize = 37;
const PEER: usize = 38;
const MINE: usize = 39;
const THEIRS: usize = 40;
const BYTES: usize = 42 * 4;

/// No op has started or completed yet.
const NO_OP: u32 = u32::MAX;

impl HostSignals {
    pub(super) fn new() -> CudaResult<HostSignals> {
        let words = HostSignals(PinnedMemory::new(BYTES)?);
        words.reset_progress();
        Ok(words)
    }

    pub(super) fn reset_progress(&self) {
        self.0.atomic_word(COMPLETED).store(NO_OP, Ordering::Release);
        self.0.atomic_word(STARTED).store(NO_OP, Ordering::Release);
    }

    /// Returns the address at which the group's kernels access the signals.
    pub(super) fn device_address(&self) -> u64 {
        self.0.device_address()
    }

    /// Returns the device address of the word that holds the last started op.
    pub(super) fn started_address(&self) -> u64 {
        self.device_address() + STARTED as u64 * 4
    }

    /// Returns the device address of the word that holds the last completed op.
    pub(super) fn completed_address(&self) -> u64 {
        self.device_address() + COMPLETED as u64 * 4
    }

    /// Requests that every wait of the group's kernels on this device ends.
    pub(super) fn request_abort(&self) {
        self.0.atomic_word(ABORT).store(1, Ordering::SeqCst);
    }

    pub(super) fn read_progress(&self) -> DeviceProgress {
        let word = |at: usize| Some(self.0.atomic_word(at).load(Ordering::Acquire)).filter(|op| *op != NO_OP);
        // Reads the completed op first, so that it never appears to be ahead of the started op.
        let done = word(COMPLETED);
        DeviceProgress { started: word(STARTED), completed: done }
    }

    pub(super) fn read_fault(&self) -> Option<GroupFault> {
        let word = |at: usize| self.0.atomic_word(at).load(Ordering::Acquire);
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
                Some(GroupFault::Timeout { op, peers })
            }
            _ => Some(GroupFault::Aborted { op }),
        }
    }
}
