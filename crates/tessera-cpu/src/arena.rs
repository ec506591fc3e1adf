//! Collectives through one piece of shared memory that every member of a group maps.
//!
//! Each member owns `slots` slots. Collective number `s` of the group uses everybody's slot `s % slots`: a
//! member copies its contribution into its own slot and *publishes* it, then reads all the slots in place and
//! says that it has *finished*; a slot is written again once all have finished. Waiting spins a little, then
//! sleeps on a futex; it always ends, by a deadline or by an abort word that anybody may set.
//!
//! All `unsafe` about shared memory is in this module. What it rests on: a member writes only its own slots, and
//! only between everybody's `finished` of the slot's last use and its own `published` of the next. Members
//! are ranks of one run, started from one verified plan; a process that scribbles over the mapping on purpose
//! is outside what any member can defend against.

#![allow(unsafe_code)]

use memmap2::{MmapOptions, MmapRaw};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::thread::{futex, sched_yield};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::exchange::{Awaited, CommFault, REASON_BYTES, Ticket, clipped};

/// Most members of one arena: more than the largest NVLink domain of today, 72, so that one host can stand in for it.
pub const MAX_MEMBERS: usize = 128;

/// Shape of an arena; the same on every member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaLayout {
    /// Members of the group, 1 to [`MAX_MEMBERS`].
    pub members: usize,
    /// Collectives that may be in flight at once, at least 1.
    pub slots: usize,
    /// Most bytes of one member's contribution to one collective.
    pub slot_bytes: usize,
}

impl ArenaLayout {
    /// Size of the whole mapping, in bytes.
    ///
    /// # Errors
    /// [`ArenaError::Layout`] if a number is out of range.
    pub fn bytes(&self) -> Result<usize, ArenaError> {
        let fits = (1..=MAX_MEMBERS).contains(&self.members) && self.slots >= 1 && self.slot_bytes >= 4;
        let data = self.members.checked_mul(self.slots).and_then(|n| n.checked_mul(self.slot_step()));
        match data.and_then(|d| d.checked_add(self.data_offset())) {
            Some(bytes) if fits && bytes <= isize::MAX as usize => Ok(bytes),
            _ => Err(ArenaError::Layout(*self)),
        }
    }

    fn slot_step(&self) -> usize {
        self.slot_bytes.next_multiple_of(128)
    }

    fn data_offset(&self) -> usize {
        let states = self.members.saturating_mul(self.slots).saturating_mul(size_of::<SlotState>());
        (size_of::<Header>() + self.members.saturating_mul(size_of::<Member>())).saturating_add(states)
    }
}

/// Why an arena could not be made or joined.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// Numbers out of range.
    #[error("an arena cannot have this shape: {0:?}")]
    Layout(ArenaLayout),
    /// The descriptor is no arena of this layout: wrong size, not sealed, or another shape inside.
    #[error("the descriptor does not hold an arena of {expected:?}: {found}")]
    Foreign {
        /// What the member was told.
        expected: ArenaLayout,
        /// What it found.
        found: String,
    },
    /// Another member has this index, or the index is beyond the group.
    #[error("member {index} of {members} is already taken or does not exist")]
    Claimed {
        /// The index asked for.
        index: usize,
        /// Size of the group.
        members: usize,
    },
    /// The operating system refused.
    #[error("shared memory: {0}")]
    Io(#[from] std::io::Error),
}

/// One member's end of the arena.
#[derive(Debug)]
pub struct Arena {
    shared: Arc<Shared>,
    me: usize,
    next: u64,
    patience: Patience,
}

/// Sets the abort word, from any thread.
#[derive(Debug, Clone)]
pub struct Aborter {
    shared: Arc<Shared>,
    me: usize,
}

impl Aborter {
    /// Ends every wait on the arena, now and later. The first reason stays.
    pub fn abort(&self, reason: &str) {
        self.shared.abort(self.me, reason);
    }
}

impl Arena {
    /// Makes the memory of an arena: a sealed anonymous file whose descriptor is handed to every member.
    ///
    /// # Errors
    /// A layout out of range, or the operating system's refusal.
    pub fn create(layout: ArenaLayout) -> Result<OwnedFd, ArenaError> {
        let bytes = layout.bytes()?;
        let fd = memfd_create("tessera-arena", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(std::io::Error::from)?;
        ftruncate(&fd, bytes as u64).map_err(std::io::Error::from)?;
        // A file that can shrink would turn a peer's mistake into a SIGBUS here.
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(std::io::Error::from)?;
        let shared = Shared { map: MmapOptions::new().len(bytes).map_raw(fd.as_raw_fd())?, layout };
        let header = shared.header();
        header.members.store(layout.members as u64, Ordering::Relaxed);
        header.slots.store(layout.slots as u64, Ordering::Relaxed);
        header.slot_bytes.store(layout.slot_bytes as u64, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(fd)
    }

    /// Maps the arena as member `me`. The descriptor may be closed afterwards.
    ///
    /// # Errors
    /// If the descriptor holds another layout, the index is taken, or the mapping fails.
    pub fn attach(fd: impl AsFd, layout: ArenaLayout, me: usize) -> Result<Arena, ArenaError> {
        let bytes = layout.bytes()?;
        let foreign = |found: String| ArenaError::Foreign { expected: layout, found };
        let size = fstat(&fd).map_err(std::io::Error::from)?.st_size;
        if size != bytes as i64 {
            return Err(foreign(format!("{size} bytes instead of {bytes}")));
        }
        let seals = fcntl_get_seals(&fd).map_err(std::io::Error::from)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(foreign("a file that may shrink".to_string()));
        }
        // Populated now, so that no page fault falls into a run's first collectives.
        let map = MmapOptions::new().len(bytes).populate().map_raw(fd.as_fd().as_raw_fd())?;
        let shared = Shared { map, layout };
        let header = shared.header();
        let magic = header.magic.load(Ordering::Acquire);
        let shape = [&header.members, &header.slots, &header.slot_bytes].map(|a| a.load(Ordering::Relaxed));
        let wanted = [layout.members, layout.slots, layout.slot_bytes].map(|n| n as u64);
        if magic != MAGIC || shape != wanted {
            return Err(foreign(format!("mark {magic:#x}, members, slots and slot bytes {shape:?}")));
        }
        let claim = || {
            let word = &shared.member(me).claimed;
            word.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        if me >= layout.members || !claim() {
            return Err(ArenaError::Claimed { index: me, members: layout.members });
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let patience = if layout.members > cores { Patience::CROWDED } else { Patience::ALONE };
        Ok(Arena { shared: Arc::new(shared), me, next: 0, patience })
    }

    /// This member's index.
    #[must_use]
    pub fn me(&self) -> usize {
        self.me
    }

    /// The layout it was attached with.
    #[must_use]
    pub fn layout(&self) -> ArenaLayout {
        self.shared.layout
    }

    /// How long a wait spins before it sleeps. The default is 50 µs where every member can have a core, and
    /// almost nothing where not.
    pub fn set_spin(&mut self, spin: Duration) {
        self.patience.spin = spin;
    }

    /// A handle that can abort from another thread.
    #[must_use]
    pub fn aborter(&self) -> Aborter {
        Aborter { shared: Arc::clone(&self.shared), me: self.me }
    }

    /// Brings `data` to the next collective. `fingerprint` names what this member believes it to be (op,
    /// shape, place in the program): see [`crate::collectives::fingerprint`].
    ///
    /// # Errors
    /// Any [`CommFault`] but a mismatch. After an error the arena is of no further use.
    pub fn publish(
        &mut self,
        fingerprint: u64,
        data: &[f32],
        deadline: Instant,
    ) -> Result<Ticket, CommFault> {
        self.publish_with(fingerprint, data.len(), deadline, |slot| slot.copy_from_slice(data))
    }

    /// As [`publish`](Arena::publish), with `fill` writing `len` elements straight into the slot. What the
    /// slot holds before is unspecified.
    ///
    /// # Errors
    /// As [`publish`](Arena::publish).
    pub fn publish_with(
        &mut self,
        fingerprint: u64,
        len: usize,
        deadline: Instant,
        fill: impl FnOnce(&mut [f32]),
    ) -> Result<Ticket, CommFault> {
        let shared = &*self.shared;
        let seq = self.next;
        let ArenaLayout { slots, slot_bytes, members } = shared.layout;
        if len.checked_mul(4).is_none_or(|bytes| bytes > slot_bytes) {
            return Err(CommFault::TooLarge { seq, bytes: len.saturating_mul(4), slot_bytes });
        }
        shared.check_abort()?;
        let slot = (seq % slots as u64) as usize;
        if let Some(last) = seq.checked_sub(slots as u64) {
            let free = |m: usize| shared.state(m, slot).finished.load(Ordering::Acquire) > last;
            if !free(self.me) {
                return Err(CommFault::InFlight { seq, uncollected: last });
            }
            for m in 0..members {
                if shared.wait(self.patience, m, deadline, &|| free(m))? == Waited::Late {
                    let missing = (0..members).filter(|m| !free(*m)).collect();
                    return Err(CommFault::Timeout { missing, seq, awaited: Awaited::Read });
                }
            }
        }
        // SAFETY: the slot is this member's, so nobody else writes it; every member's `finished` of its last
        // use was read with acquire, so nobody reads it until `published` below; `&mut self` keeps this
        // member's other threads out. `len` is within the slot, the address is 128-byte aligned, and any
        // bits are an f32.
        fill(unsafe { std::slice::from_raw_parts_mut(shared.data(self.me, slot), len) });
        let state = shared.state(self.me, slot);
        state.fingerprint.store(fingerprint, Ordering::Relaxed);
        state.len.store(len as u64, Ordering::Relaxed);
        state.published.store(seq + 1, Ordering::Release);
        shared.ring(self.me);
        self.next = seq + 1;
        Ok(Ticket { seq, fingerprint })
    }

    /// Waits for everybody's contribution, hands them to `read` in order of member, and gives the slots back.
    /// Tickets may be collected in any order.
    ///
    /// # Errors
    /// Mismatch, timeout or abort; `read` is not called then.
    ///
    /// # Panics
    /// If the ticket came from another arena.
    pub fn collect<R>(
        &mut self,
        ticket: Ticket,
        deadline: Instant,
        read: impl FnOnce(&[&[f32]]) -> R,
    ) -> Result<R, CommFault> {
        let shared = &*self.shared;
        let Ticket { seq, fingerprint: mine } = ticket;
        let ArenaLayout { slots, slot_bytes, members } = shared.layout;
        let slot = (seq % slots as u64) as usize;
        // Holding the slot is what keeps the peers from writing theirs while they are read.
        let own = shared.state(self.me, slot);
        assert!(
            own.published.load(Ordering::Relaxed) == seq + 1 && own.finished.load(Ordering::Relaxed) <= seq,
            "the ticket belongs to another arena"
        );
        let here = |m: usize| shared.state(m, slot).published.load(Ordering::Acquire) > seq;
        let differs = |m: usize| {
            let theirs = shared.state(m, slot).fingerprint.load(Ordering::Relaxed);
            (theirs != mine).then_some(CommFault::Mismatch { peer: m, mine, theirs, seq })
        };
        for m in 0..members {
            if shared.wait(self.patience, m, deadline, &|| here(m))? == Waited::Late {
                // A peer that came with something else explains more than one that did not come.
                let fault = (0..members).filter(|m| here(*m)).find_map(differs);
                return Err(fault.unwrap_or_else(|| CommFault::Timeout {
                    missing: (0..members).filter(|m| !here(*m)).collect(),
                    seq,
                    awaited: Awaited::Publish,
                }));
            }
            if let Some(fault) = differs(m) {
                return Err(fault);
            }
        }
        let mut views: [&[f32]; MAX_MEMBERS] = [&[]; MAX_MEMBERS];
        for (m, view) in views.iter_mut().enumerate().take(members) {
            let len = (shared.state(m, slot).len.load(Ordering::Relaxed) as usize).min(slot_bytes / 4);
            // SAFETY: `published` was read with acquire, so the writes of the contribution are visible; the
            // owner writes the slot again only after this member's `finished` below, and the views end
            // before it. `len` is within the slot, aligned as above.
            *view = unsafe { std::slice::from_raw_parts(shared.data(m, slot), len) };
        }
        let result = read(&views[..members]);
        shared.state(self.me, slot).finished.store(seq + 1, Ordering::Release);
        shared.ring(self.me);
        Ok(result)
    }

    /// [`publish`](Arena::publish) and [`collect`](Arena::collect) in one.
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

    /// Ends every wait on the arena, on every member, now and later. The first reason stays.
    pub fn abort(&self, reason: &str) {
        self.shared.abort(self.me, reason);
    }
}

const MAGIC: u64 = 0x3161_6e65_7261_7374;
/// No sleep is longer, so that even a wake lost to a dying peer costs little.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// How a wait spends its first moments.
#[derive(Debug, Clone, Copy)]
struct Patience {
    spin: Duration,
    /// Give the core away between looks: with more members than cores, the one waited for may need it.
    yields: bool,
}

impl Patience {
    const ALONE: Patience = Patience { spin: Duration::from_micros(50), yields: false };
    const CROWDED: Patience = Patience { spin: Duration::from_micros(5), yields: true };
}

#[derive(Debug, PartialEq, Eq)]
enum Waited {
    Ready,
    Late,
}

// Everything shared but the data is atomic, so references to it are sound whatever the peers do, and all-zero
// bytes, which a fresh memfd holds, are its start.

#[repr(C, align(128))]
struct Header {
    magic: AtomicU64,
    members: AtomicU64,
    slots: AtomicU64,
    slot_bytes: AtomicU64,
    /// 0 running, 1 somebody is writing the reason, 2 aborted.
    abort: AtomicU32,
    by: AtomicU32,
    reason_len: AtomicU32,
    reason: [AtomicU8; REASON_BYTES],
}

#[repr(C, align(128))]
struct Member {
    claimed: AtomicU32,
    /// Counts everything this member has published or finished; peers sleep on it.
    doorbell: AtomicU32,
    /// How many sleep, or are about to. Not reliable downwards after a death: it only saves wakes.
    waiters: AtomicU32,
}

/// State of one member's slot. `published` and `finished` hold one more than the collective's number.
#[repr(C, align(128))]
struct SlotState {
    published: AtomicU64,
    fingerprint: AtomicU64,
    len: AtomicU64,
    finished: AtomicU64,
}

#[derive(Debug)]
struct Shared {
    map: MmapRaw,
    layout: ArenaLayout,
}

impl Shared {
    fn header(&self) -> &Header {
        // SAFETY: the mapping is page-aligned, at least `layout.bytes()` long and lives as long as `self`;
        // the header is its first part and all atomic.
        unsafe { &*self.map.as_ptr().cast::<Header>() }
    }

    fn member(&self, m: usize) -> &Member {
        assert!(m < self.layout.members);
        // SAFETY: as for the header; the members follow it, and m is one of them.
        unsafe { &*self.map.as_ptr().add(size_of::<Header>()).cast::<Member>().add(m) }
    }

    fn state(&self, m: usize, slot: usize) -> &SlotState {
        assert!(m < self.layout.members && slot < self.layout.slots);
        let offset = size_of::<Header>() + self.layout.members * size_of::<Member>();
        // SAFETY: as for the header; the states follow the members, and (m, slot) is one of them.
        unsafe { &*self.map.as_ptr().add(offset).cast::<SlotState>().add(m * self.layout.slots + slot) }
    }

    /// Where a slot's data begins; 128-byte aligned, `slot_bytes` long.
    fn data(&self, m: usize, slot: usize) -> *mut f32 {
        assert!(m < self.layout.members && slot < self.layout.slots);
        let at = self.layout.data_offset() + (m * self.layout.slots + slot) * self.layout.slot_step();
        // SAFETY: the offset is inside the mapping, whose length is the end of the last slot.
        unsafe { self.map.as_mut_ptr().add(at).cast::<f32>() }
    }

    /// Waits until `ready`, which becomes true by something that member `on` rings for.
    fn wait(
        &self,
        patience: Patience,
        on: usize,
        deadline: Instant,
        ready: &dyn Fn() -> bool,
    ) -> Result<Waited, CommFault> {
        if ready() {
            return Ok(Waited::Ready);
        }
        let start = Instant::now();
        loop {
            for _ in 0..16 {
                if ready() {
                    return Ok(Waited::Ready);
                }
                std::hint::spin_loop();
            }
            self.check_abort()?;
            if start.elapsed() >= patience.spin {
                break;
            }
            if patience.yields {
                sched_yield();
            }
        }
        let member = self.member(on);
        loop {
            // Both sides are sequentially consistent: either the bell is seen rung here, or the ringer sees a
            // waiter and wakes it.
            member.waiters.fetch_add(1, Ordering::SeqCst);
            let bell = member.doorbell.load(Ordering::SeqCst);
            let left = deadline.saturating_duration_since(Instant::now());
            let outcome = if ready() {
                Some(Ok(Waited::Ready))
            } else if let Err(fault) = self.check_abort() {
                Some(Err(fault))
            } else if left.is_zero() {
                Some(Ok(Waited::Late))
            } else {
                let sleep = left.min(LONGEST_SLEEP);
                let sleep = futex::Timespec { tv_sec: 0, tv_nsec: sleep.as_nanos() as _ };
                // Whatever ends the sleep, the loop looks again.
                let _ = futex::wait(&member.doorbell, futex::Flags::empty(), bell, Some(&sleep));
                None
            };
            member.waiters.fetch_sub(1, Ordering::SeqCst);
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
    }

    /// Tells those who wait for member `m` to look again.
    fn ring(&self, m: usize) {
        let member = self.member(m);
        member.doorbell.fetch_add(1, Ordering::SeqCst);
        if member.waiters.load(Ordering::SeqCst) != 0 {
            // It can only fail for an address that is not mapped.
            let _ = futex::wake(&member.doorbell, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    fn abort(&self, by: usize, reason: &str) {
        let header = self.header();
        if header.abort.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let reason = clipped(reason).as_bytes();
            for (to, from) in header.reason.iter().zip(reason) {
                to.store(*from, Ordering::Relaxed);
            }
            header.reason_len.store(reason.len() as u32, Ordering::Relaxed);
            header.by.store(by as u32, Ordering::Relaxed);
            header.abort.store(2, Ordering::Release);
        }
        for m in 0..self.layout.members {
            self.ring(m);
        }
    }

    fn check_abort(&self) -> Result<(), CommFault> {
        let header = self.header();
        // While the reason is being written the run goes on for these few nanoseconds.
        if header.abort.load(Ordering::Acquire) != 2 {
            return Ok(());
        }
        let len = (header.reason_len.load(Ordering::Relaxed) as usize).min(REASON_BYTES);
        let bytes: Vec<u8> = header.reason[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
        Err(CommFault::Aborted {
            by: header.by.load(Ordering::Relaxed) as usize,
            reason: String::from_utf8_lossy(&bytes).into_owned(),
        })
    }
}
