//! Collectives through one shared-memory region that every member of a communicator maps.
//!
//! Each member owns `slots` slots. Collective number `s` uses slot `s % slots` of every member: a
//! member copies its contribution into its own slot and *publishes* it, then reads all members'
//! slots in place and marks the collective *finished*. A slot is rewritten only after all members
//! have finished with it. A wait spins briefly, then sleeps until a peer wakes it; it always ends, by a
//! deadline or by the abort word, which any member may set.
//!
//! All `unsafe` code on shared memory is in this module. It relies on this invariant: a member
//! writes only its own slots, and only between the moment all members have marked the slot's last
//! use `finished` and its own next `published`. Members are ranks of one run, started from one
//! verified plan; a process that corrupts the mapping on purpose is outside the threat model.

#![allow(unsafe_code)]

use memmap2::{MmapOptions, MmapRaw};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::fstat;
use rustix::thread::sched_yield;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tessera_device::{AbortFn, UsedTransport};

use crate::system::{create_sealed_memory, has_size, is_sealed, memory_id, sleep_while_equal, wake_sleepers};
use crate::transport::{
    CommFault, CommLayout, MAX_MEMBERS, PeerAction, REASON_BYTES, Ticket, Transport, TransportError,
    truncate_reason,
};

/// One member's mapping of an arena.
#[derive(Debug)]
pub struct Arena {
    shared: Arc<ArenaMapping>,
    /// Number of the mapped memory, where the system counts it.
    id: Option<u64>,
    me: usize,
    next_seq: u64,
    spin_policy: SpinPolicy,
}

impl Arena {
    /// Creates the memory of an arena: a sealed anonymous file whose descriptor is passed to every
    /// member.
    ///
    /// # Errors
    /// Fails if the layout is out of range or a system call fails.
    pub fn create_memfd(layout: CommLayout) -> Result<OwnedFd, TransportError> {
        let bytes = mapping_bytes(&layout)?;
        let fd = create_sealed_memory("tessera-arena", bytes as u64)?;
        let shared = ArenaMapping { map: MmapOptions::new().len(bytes).map_raw(fd.as_raw_fd())?, layout };
        let header = shared.header();
        header.members.store(layout.members as u64, Ordering::Relaxed);
        header.slots.store(layout.slots as u64, Ordering::Relaxed);
        header.slot_bytes.store(layout.slot_bytes as u64, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(fd)
    }

    /// Maps the arena as member `me`. The caller may close the descriptor afterwards.
    ///
    /// # Errors
    /// Fails if the descriptor refers to another layout, the index is taken, or the mapping fails.
    pub fn attach(fd: impl AsFd, layout: CommLayout, me: usize) -> Result<Arena, TransportError> {
        let bytes = mapping_bytes(&layout)?;
        let foreign = |found: String| TransportError::LayoutMismatch { expected: layout, found };
        let size = fstat(&fd).map_err(std::io::Error::from)?.st_size as u64;
        if !has_size(size, bytes as u64) {
            return Err(foreign(format!("{size} bytes instead of {bytes}")));
        }
        if !is_sealed(&fd)? {
            return Err(foreign("the file is not sealed against shrinking".to_string()));
        }
        let id = memory_id(&fd)?;
        // Prefault the pages, so that no page fault falls into a run's first collectives.
        let map = MmapOptions::new().len(bytes).populate().map_raw(fd.as_fd().as_raw_fd())?;
        let shared = ArenaMapping { map, layout };
        let header = shared.header();
        let magic = header.magic.load(Ordering::Acquire);
        let shape = [&header.members, &header.slots, &header.slot_bytes].map(|a| a.load(Ordering::Relaxed));
        let wanted = [layout.members, layout.slots, layout.slot_bytes].map(|n| n as u64);
        if magic != MAGIC || shape != wanted {
            return Err(foreign(format!("magic {magic:#x}, members, slots and slot bytes {shape:?}")));
        }
        let claim = || {
            let word = &shared.member_state(me).claimed;
            word.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        if me >= layout.members || !claim() {
            return Err(TransportError::IndexTaken { index: me, members: layout.members });
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let patience =
            if layout.members > cores { SpinPolicy::OVERSUBSCRIBED } else { SpinPolicy::DEDICATED_CORES };
        Ok(Arena { shared: Arc::new(shared), id, me, next_seq: 0, spin_policy: patience })
    }
}

impl Transport for Arena {
    fn member_index(&self) -> usize {
        self.me
    }

    fn shared_id(&self) -> Option<u64> {
        self.id
    }

    fn used_transport(&self) -> UsedTransport {
        UsedTransport::SharedMemory
    }

    fn abort_fn(&self) -> AbortFn {
        let (shared, me) = (Arc::clone(&self.shared), self.me);
        Arc::new(move |reason| shared.abort(me, reason))
    }

    fn publish(&mut self, fingerprint: u64, data: &[f32], deadline: Instant) -> Result<Ticket, CommFault> {
        let shared = &*self.shared;
        let seq = self.next_seq;
        let CommLayout { slots, members, .. } = shared.layout;
        shared.layout.check_contribution(seq, data.len())?;
        shared.check_abort()?;
        let slot = shared.layout.slot_of(seq);
        if let Some(last) = seq.checked_sub(slots as u64) {
            let is_free = |m: usize| shared.slot_state(m, slot).finished.load(Ordering::Acquire) > last;
            if !is_free(self.me) {
                return Err(CommFault::InFlight { seq, uncollected: last });
            }
            for m in 0..members {
                if shared.wait(self.spin_policy, m, deadline, &|| is_free(m))? == WaitOutcome::TimedOut {
                    let missing = (0..members).filter(|m| !is_free(*m)).collect();
                    return Err(CommFault::Timeout { missing, seq, awaited: PeerAction::Read });
                }
            }
        }
        // SAFETY: only this member writes the slot; `finished` of its last use was read with
        // acquire for every member, so no member reads the slot until `published` below; `&mut
        // self` keeps this member's other threads out. `data` fits the slot, the address is
        // 128-byte aligned, and any bit pattern is a valid f32.
        let into = unsafe { std::slice::from_raw_parts_mut(shared.slot_data(self.me, slot), data.len()) };
        into.copy_from_slice(data);
        let state = shared.slot_state(self.me, slot);
        state.fingerprint.store(fingerprint, Ordering::Relaxed);
        state.len.store(data.len() as u64, Ordering::Relaxed);
        state.published.store(seq + 1, Ordering::Release);
        shared.ring_doorbell(self.me);
        self.next_seq = seq + 1;
        Ok(Ticket { seq, fingerprint })
    }

    fn collect(
        &mut self,
        ticket: Ticket,
        deadline: Instant,
        read: &mut dyn FnMut(&[&[f32]]),
    ) -> Result<(), CommFault> {
        let shared = &*self.shared;
        let Ticket { seq, fingerprint: mine } = ticket;
        let CommLayout { slot_bytes, members, .. } = shared.layout;
        let slot = shared.layout.slot_of(seq);
        // This check guarantees that the member still holds the slot, which keeps peers from
        // overwriting their slots during the read.
        let own = shared.slot_state(self.me, slot);
        assert!(
            own.published.load(Ordering::Relaxed) == seq + 1 && own.finished.load(Ordering::Relaxed) <= seq,
            "the ticket belongs to another arena"
        );
        let has_published = |m: usize| shared.slot_state(m, slot).published.load(Ordering::Acquire) > seq;
        let find_mismatch = |m: usize| {
            let theirs = shared.slot_state(m, slot).fingerprint.load(Ordering::Relaxed);
            (theirs != mine).then_some(CommFault::Mismatch { peer: m, mine, theirs, seq })
        };
        for m in 0..members {
            if shared.wait(self.spin_policy, m, deadline, &|| has_published(m))? == WaitOutcome::TimedOut {
                // A peer that published a different collective is a better explanation than an
                // absent one.
                let fault = (0..members).filter(|m| has_published(*m)).find_map(find_mismatch);
                return Err(fault.unwrap_or_else(|| CommFault::Timeout {
                    missing: (0..members).filter(|m| !has_published(*m)).collect(),
                    seq,
                    awaited: PeerAction::Publish,
                }));
            }
            if let Some(fault) = find_mismatch(m) {
                return Err(fault);
            }
        }
        let mut views: [&[f32]; MAX_MEMBERS] = [&[]; MAX_MEMBERS];
        for (m, view) in views.iter_mut().enumerate().take(members) {
            let len = (shared.slot_state(m, slot).len.load(Ordering::Relaxed) as usize).min(slot_bytes / 4);
            // SAFETY: `published` was read with acquire, so the writes of the contribution are
            // visible; the owner rewrites the slot only after this member's `finished` below, and
            // the views end before it. `len` is within the slot, which is aligned as above.
            *view = unsafe { std::slice::from_raw_parts(shared.slot_data(m, slot), len) };
        }
        read(&views[..members]);
        shared.slot_state(self.me, slot).finished.store(seq + 1, Ordering::Release);
        shared.ring_doorbell(self.me);
        Ok(())
    }
}

const MAGIC: u64 = 0x3161_6e65_7261_7374;
/// The longest single sleep. It bounds the cost of a wake-up that a dying peer never sent.
const MAX_SLEEP: Duration = Duration::from_millis(50);

/// How a wait spins before it sleeps.
#[derive(Debug, Clone, Copy)]
struct SpinPolicy {
    spin: Duration,
    /// Whether to yield the core between polls: with more members than cores, the awaited member
    /// may need it.
    yield_core: bool,
}

impl SpinPolicy {
    const DEDICATED_CORES: SpinPolicy = SpinPolicy { spin: Duration::from_micros(50), yield_core: false };
    const OVERSUBSCRIBED: SpinPolicy = SpinPolicy { spin: Duration::from_micros(5), yield_core: true };
}

#[derive(Debug, PartialEq, Eq)]
enum WaitOutcome {
    Ready,
    TimedOut,
}

// Everything in the mapping except the data is atomic, so references to it are sound whatever the
// peers do. All-zero bytes, which a fresh memfd contains, are a valid initial state.

#[repr(C, align(128))]
struct ArenaHeader {
    magic: AtomicU64,
    members: AtomicU64,
    slots: AtomicU64,
    slot_bytes: AtomicU64,
    /// 0: running, 1: a member is writing the reason, 2: aborted.
    abort: AtomicU32,
    aborted_by: AtomicU32,
    reason_len: AtomicU32,
    reason: [AtomicU8; REASON_BYTES],
}

#[repr(C, align(128))]
struct MemberState {
    claimed: AtomicU32,
    /// Counts everything that this member has published or finished; peers sleep on this word.
    doorbell: AtomicU32,
    /// Number of peers that sleep or are about to. It may stay too high after a peer dies; it only
    /// saves wake-ups.
    waiters: AtomicU32,
}

/// The state of one member's slot. `published` and `finished` contain the collective's number plus
/// one.
#[repr(C, align(128))]
struct SlotState {
    published: AtomicU64,
    fingerprint: AtomicU64,
    len: AtomicU64,
    finished: AtomicU64,
}

/// Returns the size of the whole mapping in bytes: header, member states, slot states, data.
///
/// # Errors
/// Returns [`TransportError::InvalidLayout`] if a number is out of range.
fn mapping_bytes(layout: &CommLayout) -> Result<usize, TransportError> {
    layout.check_ranges()?;
    let data = (layout.members * layout.slots).checked_mul(slot_stride(layout));
    match data.and_then(|d| d.checked_add(data_offset(layout))) {
        Some(bytes) if bytes <= isize::MAX as usize => Ok(bytes),
        _ => Err(TransportError::InvalidLayout(*layout)),
    }
}

fn slot_stride(layout: &CommLayout) -> usize {
    layout.slot_bytes.next_multiple_of(128)
}

fn data_offset(layout: &CommLayout) -> usize {
    let states = layout.members.saturating_mul(layout.slots).saturating_mul(size_of::<SlotState>());
    (size_of::<ArenaHeader>() + layout.members * size_of::<MemberState>()).saturating_add(states)
}

#[derive(Debug)]
struct ArenaMapping {
    map: MmapRaw,
    layout: CommLayout,
}

impl ArenaMapping {
    fn header(&self) -> &ArenaHeader {
        // SAFETY: the mapping is page-aligned, at least `mapping_bytes(&layout)` long and lives as
        // long as `self`; the header is at its start and all its fields are atomic.
        unsafe { &*self.map.as_ptr().cast::<ArenaHeader>() }
    }

    fn member_state(&self, m: usize) -> &MemberState {
        assert!(m < self.layout.members);
        // SAFETY: as for the header; the member states follow it, and `m` is in range.
        unsafe { &*self.map.as_ptr().add(size_of::<ArenaHeader>()).cast::<MemberState>().add(m) }
    }

    fn slot_state(&self, m: usize, slot: usize) -> &SlotState {
        assert!(m < self.layout.members && slot < self.layout.slots);
        let offset = size_of::<ArenaHeader>() + self.layout.members * size_of::<MemberState>();
        // SAFETY: as for the header; the slot states follow the member states, and (m, slot) is in
        // range.
        unsafe { &*self.map.as_ptr().add(offset).cast::<SlotState>().add(m * self.layout.slots + slot) }
    }

    /// Returns the start address of a slot's data, which is 128-byte aligned and `slot_bytes` long.
    fn slot_data(&self, m: usize, slot: usize) -> *mut f32 {
        assert!(m < self.layout.members && slot < self.layout.slots);
        let at = data_offset(&self.layout) + (m * self.layout.slots + slot) * slot_stride(&self.layout);
        // SAFETY: the offset is inside the mapping, which ends with the last slot.
        unsafe { self.map.as_mut_ptr().add(at).cast::<f32>() }
    }

    /// Waits until `ready` returns true, which only an action of member `on` followed by its
    /// doorbell can cause.
    fn wait(
        &self,
        policy: SpinPolicy,
        on: usize,
        deadline: Instant,
        ready: &dyn Fn() -> bool,
    ) -> Result<WaitOutcome, CommFault> {
        if ready() {
            return Ok(WaitOutcome::Ready);
        }
        let start = Instant::now();
        loop {
            for _ in 0..16 {
                if ready() {
                    return Ok(WaitOutcome::Ready);
                }
                std::hint::spin_loop();
            }
            self.check_abort()?;
            if start.elapsed() >= policy.spin {
                break;
            }
            if policy.yield_core {
                sched_yield();
            }
        }
        let member = self.member_state(on);
        loop {
            // Both sides are sequentially consistent: either this load sees the new doorbell value,
            // or the ringing member sees a waiter and wakes it.
            member.waiters.fetch_add(1, Ordering::SeqCst);
            let bell = member.doorbell.load(Ordering::SeqCst);
            let left = deadline.saturating_duration_since(Instant::now());
            let outcome = if ready() {
                Some(Ok(WaitOutcome::Ready))
            } else if let Err(fault) = self.check_abort() {
                Some(Err(fault))
            } else if left.is_zero() {
                Some(Ok(WaitOutcome::TimedOut))
            } else {
                // The loop polls again, whatever ended the sleep.
                sleep_while_equal(&member.doorbell, bell, left.min(MAX_SLEEP));
                None
            };
            member.waiters.fetch_sub(1, Ordering::SeqCst);
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
    }

    /// Wakes all peers that wait for member `m`, so that they poll again.
    fn ring_doorbell(&self, m: usize) {
        let member = self.member_state(m);
        member.doorbell.fetch_add(1, Ordering::SeqCst);
        if member.waiters.load(Ordering::SeqCst) != 0 {
            wake_sleepers(&member.doorbell);
        }
    }

    fn abort(&self, by: usize, reason: &str) {
        let header = self.header();
        if header.abort.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let reason = truncate_reason(reason).as_bytes();
            for (to, from) in header.reason.iter().zip(reason) {
                to.store(*from, Ordering::Relaxed);
            }
            header.reason_len.store(reason.len() as u32, Ordering::Relaxed);
            header.aborted_by.store(by as u32, Ordering::Relaxed);
            header.abort.store(2, Ordering::Release);
        }
        for m in 0..self.layout.members {
            self.ring_doorbell(m);
        }
    }

    fn check_abort(&self) -> Result<(), CommFault> {
        let header = self.header();
        // The run goes on for the few nanoseconds in which another member writes the reason.
        if header.abort.load(Ordering::Acquire) != 2 {
            return Ok(());
        }
        let len = (header.reason_len.load(Ordering::Relaxed) as usize).min(REASON_BYTES);
        let bytes: Vec<u8> = header.reason[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        Err(CommFault::Aborted {
            by: header.aborted_by.load(Ordering::Relaxed) as usize,
            reason: String::from_utf8_lossy(&bytes).into_owned(),
        })
    }
}
