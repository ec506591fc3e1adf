//! Collectives of one communicator on GPUs. They use P2P memory if all members are on one host and
//! can access each other's memory, otherwise NCCL. Both transports move the same bytes. Only P2P
//! sums are bit-identical to the CPU's collectives, in f32 and apart from the CPU's compensated
//! summation.
//!
//! All members call every function in the same order. Collectives of a group run one after another,
//! on one stream or on streams ordered by events. Groups need separate streams, because a
//! collective waits on the device for the other members. The application supplies the host id and
//! the timeouts.
//!
//! Members that are threads of one process use P2P memory alone, and exchange tables on the host.

#![allow(unsafe_code, reason = "collectives on raw addresses")]

mod copy_plan;
mod kernel_launch;
mod nccl_collectives;
mod p2p_collectives;
mod peer_sharing;
mod signals;
mod store_targets;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tessera_ir::Transport;

use crate::compile::Compiler;
use crate::device_memory::{DeviceMemory, copy_to_device, copy_to_host};
use crate::driver::{CudaEvent, CudaResult, CudaStream, cuda_failure};
use crate::libraries::Libraries;
use crate::nccl::{CommunicatorAborter, NcclCommunicator, UniqueId};
use crate::thread_ranks::ThreadRanks;

use kernel_launch::CollectiveKernels;
use nccl_collectives::NcclCollectives;
use p2p_collectives::PeerMemory;
use signals::HostSignals;

pub(crate) use copy_plan::{CollectiveKind, GroupCollective, NO_OFFSET};
#[cfg(test)]
pub(crate) use kernel_launch::COLLECTIVE_TABLE;
pub(crate) use kernel_launch::Synchronization;
pub(crate) use signals::{DeviceProgress, GroupFault};
pub(crate) use store_targets::{SplitDim, Targets};

/// Transport that a member requests for its group. [`CollectiveGroup::active_transport`] returns
/// `P2p` or `Nccl`, never `Best`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GroupTransport {
    /// P2P memory if all members support it, otherwise NCCL.
    Best,
    /// P2P memory; joining fails without it.
    P2p,
    /// NCCL, even if all members support P2P memory.
    Nccl,
}

/// Settings with which a member joins a group. [`CollectiveGroup::reserve_staging`] may raise
/// `staging_bytes` later.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupConfig {
    /// Requested transport. One member that requests NCCL makes the whole group use NCCL.
    pub(crate) transport: GroupTransport,
    /// Maximum thread blocks of a kernel that copies or reduces.
    pub(crate) max_blocks: u32,
    /// Longest time that a P2P kernel waits for a peer before it reports a fault. NCCL kernels have
    /// no such limit.
    pub(crate) peer_timeout: Duration,
    /// Time that the host waits for peers outside of collectives: to connect, to share memory, or
    /// to exchange a table.
    pub(crate) setup_timeout: Duration,
    /// Identifies this host: two members have the same number exactly when they run on the same
    /// host. 0 means unknown.
    pub(crate) host_id: u64,
    /// Bytes of staging memory for packed data: the maximum of
    /// [`staging_bytes`](GroupCollective::staging_bytes) over all collectives that use NCCL, first for a
    /// group with P2P memory, then for a group without it.
    pub(crate) staging_bytes: [usize; 2],
}

/// How the members of a group exchange tables before they share memory.
#[derive(Debug, Clone)]
pub(crate) enum Rendezvous {
    /// An NCCL communicator with this id, between processes.
    Nccl(UniqueId),
    /// The memory of this process, of which the members are threads; each group has an id of its own.
    Threads(Arc<ThreadRanks>, UniqueId),
}

/// One member of a group. A group is unusable after a fault. Dropping it waits for its work on the
/// device, so abort stuck work first through a [`GroupAborter`]. Drop the graphs that hold its work
/// before the group.
#[derive(Debug)]
pub(crate) struct CollectiveGroup {
    member: usize,
    member_count: usize,
    config: GroupConfig,
    abort: Arc<AtomicBool>,
    peers: Option<PeerMemory>,
    p2p_failure: Option<String>,
    /// Whether the members mapped each other's memory when they joined.
    probed_peers: bool,
    /// Whether a program requests NCCL even if P2P memory is available.
    nccl_requested: bool,
    staging: Option<DeviceMemory>,
    kernels: CollectiveKernels,
    /// `None` for a group of one, and for threads of one process.
    comm: Option<NcclCommunicator>,
    /// What the members share if they are threads of one process, and the id of the group.
    threads: Option<(Arc<ThreadRanks>, UniqueId)>,
    /// Flags that peers write. They drop after the communicator, because all members reach its end
    /// together.
    flags: Option<DeviceMemory>,
    signals: Arc<HostSignals>,
    control_stream: CudaStream,
}

/// Handle that ends every wait of a group on this member, from any thread.
#[derive(Debug, Clone)]
pub(crate) struct GroupAborter {
    signals: Arc<HostSignals>,
    nccl_ender: Option<CommunicatorAborter>,
    abort: Arc<AtomicBool>,
}

impl GroupAborter {
    /// Ends waits in kernels and on the host immediately.
    pub(crate) fn stop(&self) {
        self.signals.request_abort();
        self.abort.store(true, Ordering::Release);
    }

    /// Returns whether the group has an NCCL communicator, whose work `stop` does not end.
    pub(crate) fn uses_nccl(&self) -> bool {
        self.nccl_ender.is_some()
    }

    /// Ends current and future waits in kernels, on the host and in NCCL. Returns whether NCCL
    /// aborted in time.
    pub(crate) fn abort_within(&self, bound: Duration) -> bool {
        self.stop();
        self.nccl_ender.as_ref().is_none_or(|e| e.abort_within(bound))
    }
}

impl CollectiveGroup {
    /// Connects to the other members. Blocks until all have joined, the timeout expires or `abort`
    /// is set.
    pub(crate) fn join_members(
        libraries: &Libraries,
        compiler: &mut Compiler,
        rendezvous: &Rendezvous,
        (me, members): (usize, usize),
        terms: GroupConfig,
        abort: Arc<AtomicBool>,
    ) -> CudaResult<CollectiveGroup> {
        if me >= members {
            return cuda_failure(format!("member {me} of {members}"));
        }
        let kernels = CollectiveKernels::new(compiler, me, members)?;
        let words = Arc::new(HostSignals::new()?);
        let control = CudaStream::new(false)?;
        let (mut comm, mut threads) = (None, None);
        match rendezvous {
            _ if members == 1 => {}
            Rendezvous::Threads(ranks, id) => threads = Some((Arc::clone(ranks), *id)),
            Rendezvous::Nccl(id) => {
                let (place, timeout) = ((me, members), terms.setup_timeout);
                comm = Some(NcclCommunicator::init_rank(libraries, id, place, timeout, abort.clone())?);
            }
        }
        let mut group = CollectiveGroup {
            member: me,
            member_count: members,
            config: terms,
            abort,
            peers: None,
            p2p_failure: None,
            probed_peers: false,
            nccl_requested: false,
            staging: None,
            kernels,
            comm,
            threads,
            flags: None,
            signals: words,
            control_stream: control,
        };
        // NCCL connects on first use. Connecting here keeps that delay out of the first call.
        group.all_agree(true)?;
        group.probe_peer_memory()?;
        Ok(group)
    }

    /// Records what a collective needs before memory is shared: its staging bytes, and whether it
    /// uses NCCL.
    pub(crate) fn reserve_staging(&mut self, m: &GroupCollective) {
        let bytes = m.staging_bytes(self.member);
        let [with_peers, without] = &mut self.config.staging_bytes;
        *without = bytes.max(*without);
        if m.transport == Some(Transport::Nccl) {
            *with_peers = bytes.max(*with_peers);
            self.nccl_requested = true;
        }
    }

    /// Sends a word from member 0 to member 1 of a group of two, if NCCL carries its transfers.
    /// NCCL connects on first use, where the host blocks for the other member; inside a program
    /// both might send first and deadlock. Blocks.
    pub(crate) fn connect_nccl(&self) -> CudaResult<()> {
        let Some(comm) = self.comm.as_ref().filter(|_| self.uses_nccl()) else { return Ok(()) };
        let word = DeviceMemory::new(size_of::<u32>())?;
        word.zero_fill()?;
        let there = [(1 - self.member, word.device_address(), size_of::<u32>())];
        let (sends, receives) = if self.member == 0 { (&there[..], &[][..]) } else { (&[][..], &there[..]) };
        // SAFETY: the word has the size of the transfer, is used by this stream only, and is not
        // freed unless the stream has completed it.
        let sent = unsafe { comm.send_and_recv(sends, receives, &self.control_stream) };
        self.wait_for_transfer(sent, "both members of a transfer to connect", word).map(drop)
    }

    /// Returns the transport in use, once memory is shared.
    pub(crate) fn active_transport(&self) -> GroupTransport {
        if self.peers.is_some() { GroupTransport::P2p } else { GroupTransport::Nccl }
    }

    /// Returns whether a program requests NCCL, once memory is shared.
    pub(crate) fn nccl_is_requested(&self) -> bool {
        self.nccl_requested
    }

    /// Returns whether any collective uses NCCL, once memory is shared.
    pub(crate) fn uses_nccl(&self) -> bool {
        self.active_transport() == GroupTransport::Nccl || self.nccl_requested
    }

    /// Returns why the group does not use P2P memory, if it does not.
    pub(crate) fn p2p_failure(&self) -> Option<&str> {
        self.p2p_failure.as_deref()
    }

    /// Exchanges words with all members, each of which contributes the same number. Returns them in
    /// member order. Blocks.
    pub(crate) fn exchange_table(&mut self, mine: &[u64]) -> CudaResult<Vec<Vec<u64>>> {
        let bytes: Vec<u8> = mine.iter().flat_map(|w| w.to_le_bytes()).collect();
        Ok(self.gather_bytes(&bytes)?.iter().map(|b| words_from_bytes(b)).collect())
    }

    /// Enqueues one collective. Once the enqueued work completes, the whole result is in this
    /// member's memory and its operand may be overwritten. The call neither allocates nor waits for
    /// the device, so it may be captured.
    ///
    /// # Safety
    /// Operand and result must be device allocations of the sizes that the kind gives, or unused. Both
    /// must stay allocated until the stream has completed the collective; meanwhile no other stream
    /// may write the operand or access the result. The offsets that the peers have of them must be
    /// right.
    pub(crate) unsafe fn enqueue_collective(
        &mut self,
        m: &GroupCollective,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        if let CollectiveKind::Copy { sends: to, receives: from, .. } = &m.kind
            && (to.len() != self.member_count || from.len() != self.member_count)
        {
            return cuda_failure(format!(
                "copies for {} members in a group of {}",
                to.len(),
                self.member_count
            ));
        }
        // A group of one has no communicator.
        if let Some(peers) =
            self.peers.as_ref().filter(|_| m.transport != Some(Transport::Nccl) || self.comm.is_none())
        {
            let means = (self.signals.device_address(), self.patience_ns(), self.config.max_blocks);
            // SAFETY: the caller guarantees it; the signals belong to the group.
            return unsafe { peers.enqueue_collective(m, &self.kernels, means, stream) };
        }
        let Some(comm) = &self.comm else { return cuda_failure("the group has not shared its memory") };
        let verbs = NcclCollectives {
            member: self.member,
            comm,
            kernels: &self.kernels,
            signals: &self.signals,
            staging: self.staging.as_ref(),
            max_blocks: self.config.max_blocks,
        };
        // SAFETY: the caller guarantees it; the staging memory belongs to the group, whose collectives
        // run one after another.
        unsafe { verbs.enqueue_collective(m, stream) }
    }

    /// Returns the members' results, to which the producer of an operand may store between
    /// the two [synchronizations](CollectiveGroup::synchronize). Returns `None` with NCCL, or if a part
    /// is not aligned to whole stores.
    pub(crate) fn store_targets(&self, m: &GroupCollective, along: SplitDim) -> CudaResult<Option<Targets>> {
        self.peers.as_ref().map_or(Ok(None), |p| p.store_targets(m, along))
    }

    /// Enqueues a synchronization of a collective that other kernels perform.
    pub(crate) fn synchronize(
        &self,
        which: Synchronization,
        m: &GroupCollective,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let Some(peers) = &self.peers else { return cuda_failure(NO_PEER_MEMORY) };
        let head = peers.launch_head(m, self.signals.device_address(), self.patience_ns());
        // SAFETY: the group keeps its own flags and signals and the mappings of its peers' flags.
        unsafe { self.kernels.launch_synchronization(which, head, stream) }
    }

    /// Enqueues a collective whose parts DMA engines copy, with its synchronizations.
    ///
    /// # Safety
    /// As [`enqueue_collective`](CollectiveGroup::enqueue_collective).
    pub(crate) unsafe fn enqueue_copies(&self, m: &GroupCollective, stream: &CudaStream) -> CudaResult<()> {
        let Some(peers) = &self.peers else { return cuda_failure(NO_PEER_MEMORY) };
        self.synchronize(Synchronization::Open, m, stream)?;
        // SAFETY: the caller guarantees it, and the collective is open.
        unsafe { peers.enqueue_copies(m, stream) }?;
        self.synchronize(Synchronization::Close, m, stream)
    }

    fn patience_ns(&self) -> u64 {
        u64::try_from(self.config.peer_timeout.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the first fault. NCCL has no timeout on the device, so the host compares
    /// [`read_progress`](CollectiveGroup::read_progress) with its own clock.
    pub(crate) fn find_fault(&self) -> Option<GroupFault> {
        let nccl = || {
            let (why, remote) = self.comm.as_ref()?.async_error()?;
            Some(if remote { GroupFault::Remote(why) } else { GroupFault::Nccl(why) })
        };
        self.signals.read_fault().or_else(nccl)
    }

    /// Resets the progress signals. No work of the group may be in flight.
    pub(crate) fn reset_progress(&self) {
        self.signals.reset_progress();
    }

    /// Returns the ops that the device began and completed last since
    /// [`reset_progress`](CollectiveGroup::reset_progress).
    pub(crate) fn read_progress(&self) -> DeviceProgress {
        self.signals.read_progress()
    }

    /// Returns a handle that ends this group's waits from another thread.
    pub(crate) fn new_aborter(&self) -> GroupAborter {
        GroupAborter {
            signals: self.signals.clone(),
            nccl_ender: self.comm.as_ref().map(NcclCommunicator::aborter),
            abort: self.abort.clone(),
        }
    }

    /// Returns whether all members pass `true`. Also a barrier.
    fn all_agree(&mut self, mine: bool) -> CudaResult<bool> {
        Ok(self.exchange_table(&[u64::from(mine)])?.iter().all(|w| w == &[1]))
    }

    fn gather_bytes(&mut self, mine: &[u8]) -> CudaResult<Vec<Vec<u8>>> {
        if let Some((ranks, id)) = &self.threads {
            let place = (self.member, self.member_count);
            return Ok(ranks.all_gather(&id.0, place, mine, self.config.setup_timeout)?.to_vec());
        }
        let Some(comm) = &self.comm else { return Ok(vec![mine.to_vec()]) };
        if mine.is_empty() {
            return Ok(vec![Vec::new(); self.member_count]);
        }
        let (from, to) = (DeviceMemory::new(mine.len())?, DeviceMemory::new(mine.len() * self.member_count)?);
        copy_to_device(from.slice(0, mine.len())?, mine)?;
        let (here, all) = (from.device_address(), to.device_address());
        // SAFETY: `from` has the bytes of one member and `to` those of all; only this stream uses
        // them, and they are not freed unless it has completed the transfer.
        let gathered = unsafe { comm.all_gather(here, all, mine.len(), &self.control_stream) };
        let (_, to) = self.wait_for_transfer(gathered, "all members to exchange a table", (from, to))?;
        let mut out = vec![0_u8; mine.len() * self.member_count];
        let len = out.len();
        copy_to_host(&mut out, to.slice(0, len)?)?;
        Ok(out.chunks(mine.len()).map(<[u8]>::to_vec).collect())
    }

    /// Waits until a transfer on the control stream completes, and returns the memory that it used.
    fn wait_for_transfer<M>(&self, sent: CudaResult<()>, what: &str, memory: M) -> CudaResult<M> {
        match sent.and_then(|()| self.wait_for_control_stream(what)) {
            Ok(()) => Ok(memory),
            Err(e) => {
                // Freeing the memory would wait for the work that uses it, which may be stuck.
                std::mem::forget(memory);
                Err(e)
            }
        }
    }

    /// Waits until the work enqueued on the control stream has completed; `what` names it in
    /// errors.
    fn wait_for_control_stream(&self, what: &str) -> CudaResult<()> {
        let event = CudaEvent::new()?;
        self.control_stream.record_event(&event)?;
        let deadline = Instant::now() + self.config.setup_timeout;
        while !event.is_complete()? {
            if self.abort.load(Ordering::Acquire) {
                return cuda_failure(format!("aborted while waiting for {what}"));
            }
            if Instant::now() > deadline {
                return cuda_failure(format!(
                    "{} ms timeout while waiting for {what}",
                    self.config.setup_timeout.as_millis()
                ));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

const NO_PEER_MEMORY: &str = "the group has no peer-to-peer memory";

fn words_from_bytes(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w)).collect()
}
