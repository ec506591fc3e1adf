//! Collectives over P2P memory: every member maps the exchange memory and the flags of the others.

#![allow(unsafe_code, reason = "memory of other processes")]

use cudarc::driver::sys;
use tessera_mesh::Reduction;

use super::copy_plan::{CollectiveKind, CopyRect, GroupCollective, NO_OFFSET};
use super::kernel_launch::{
    CollectiveKernels, KernelRect, LaunchHead, MAX_MEMBERS, OPENED_FLAG_OFFSET, ReduceLaunch,
};
use super::store_targets::{SplitDim, Targets};
use crate::driver::{CudaResult, CudaStream, cuda_failure};

/// Bytes of a member's flags. They fill a whole driver page: the handle of a smaller allocation
/// would expose its neighbours too.
pub(super) const FLAGS_BYTES: usize = 2 << 20;
/// Offset in the flags at which peers test whether they can write, behind the flags of p2p_collectives.cu.
pub(super) const WRITE_TEST_OFFSET: u64 = 4096;
/// Maximum bytes of a one-shot reduction, in which every member reads all operands. It saves one
/// synchronization.
const ONE_SHOT_BYTES: usize = 64 << 10;

/// CUDA IPC handle, by which another process of the host maps an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IpcHandle(pub(super) [u8; 64]);

/// The exchange memory and the flags of all members, at their addresses in this process. `member`
/// is this rank's own index.
#[derive(Debug)]
pub(super) struct PeerMemory {
    pub(super) member: usize,
    /// Base address of every member's exchange memory.
    pub(super) bases: Vec<u64>,
    /// Bytes of every member's exchange memory.
    pub(super) bytes: Vec<u64>,
    /// Address of every member's flags.
    pub(super) flags: Vec<u64>,
    /// The mappings to which the peers' addresses belong: memory and flags of each peer. Empty in a
    /// group of one.
    #[allow(dead_code, reason = "keeps the mappings open while their addresses are in use")]
    pub(super) mappings: Vec<PeerMapping>,
}

/// An allocation of another member, which this process can access.
#[derive(Debug)]
pub(super) enum PeerMapping {
    /// The address at which this process has mapped the allocation of another.
    OpenedHandle(u64),
    /// The address of an allocation of this process, on another device.
    SameProcess(u64),
}

/// Exports the IPC handle of an allocation of this process.
pub(super) fn export_ipc_handle(at: u64) -> CudaResult<IpcHandle> {
    let mut out = sys::CUipcMemHandle_st { reserved: [0; 64] };
    // SAFETY: the driver checks the address.
    unsafe { sys::cuIpcGetMemHandle(&mut out, at) }.result()?;
    Ok(IpcHandle(out.reserved.map(|b| b as u8)))
}

impl Default for IpcHandle {
    fn default() -> IpcHandle {
        IpcHandle([0; 64])
    }
}

impl PeerMapping {
    pub(super) fn open_handle(handle: &IpcHandle) -> CudaResult<PeerMapping> {
        let handle = sys::CUipcMemHandle_st { reserved: handle.0.map(|b| b as _) };
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut at = 0;
        // SAFETY: the driver checks the handle; `drop` closes the mapping.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut at, handle, flags) }.result()?;
        Ok(PeerMapping::OpenedHandle(at))
    }

    pub(super) fn base_address(&self) -> u64 {
        let (PeerMapping::OpenedHandle(at) | PeerMapping::SameProcess(at)) = self;
        *at
    }
}

impl Drop for PeerMapping {
    fn drop(&mut self) {
        if let PeerMapping::OpenedHandle(at) = self {
            // SAFETY: `open_handle` opened the mapping once.
            let _ = unsafe { sys::cuIpcCloseMemHandle(*at) };
        }
    }
}

impl PeerMemory {
    /// Enqueues one collective.
    ///
    /// # Safety
    /// As [`CollectiveGroup::enqueue_collective`](super::CollectiveGroup::enqueue_collective). `host`
    /// must be the address of the group's signals.
    pub(super) unsafe fn enqueue_collective(
        &self,
        m: &GroupCollective,
        kernels: &CollectiveKernels,
        (host, patience_ns, blocks): (u64, u64, u32),
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let head = self.launch_head(m, host, patience_ns);
        let element = m.dtype.element_bytes() as usize;
        match &m.kind {
            CollectiveKind::Copy { sends: to, .. } => {
                let results = self.result_addresses(m, to)?;
                let pieces = to
                    .iter()
                    .zip(results)
                    .map(|(rect, result)| KernelRect::from_copy(rect, m.operand, result));
                let pieces = pieces.collect::<CudaResult<Vec<KernelRect>>>()?;
                // SAFETY: the caller guarantees the operand; `result_addresses` checks that the
                // results lie in the mapped memory of the peers.
                unsafe { kernels.launch_copy(head, &pieces, blocks, stream) }
            }
            CollectiveKind::AllReduce { elements, reduction } => {
                let bytes = elements * element;
                let one_shot = bytes <= ONE_SHOT_BYTES || self.bases.len() == 1;
                let rect = if one_shot {
                    CopyRect::contiguous_run(0, 0, bytes)
                } else {
                    // Every member must split alike, so the unit depends only on offsets, which all
                    // members know.
                    let offsets = m
                        .peer_operand_offsets
                        .iter()
                        .chain(&m.peer_result_offsets)
                        .fold(bytes as u64, |all, o| all | o);
                    let unit = if offsets.is_multiple_of(16) { 16 } else { element };
                    let (start, len) = split_units(bytes / unit, self.bases.len(), self.member);
                    CopyRect::contiguous_run(start * unit, start * unit, len * unit)
                };
                let extents = (bytes, bytes, !one_shot);
                // SAFETY: the caller guarantees operand and result.
                unsafe { self.enqueue_reduction(m, head, kernels, *reduction, rect, extents, blocks, stream) }
            }
            CollectiveKind::ReduceScatter { rows, columns, dim, parts, reduction } => {
                let Some(part) = parts.get(self.member) else {
                    return cuda_failure(format!("{} parts, none for member {}", parts.len(), self.member));
                };
                let rect = CopyRect::packed_part((*rows, *columns), *dim, part, element);
                let extents = (rows * columns * element, 0, false);
                // SAFETY: the caller guarantees operand and result.
                unsafe { self.enqueue_reduction(m, head, kernels, *reduction, rect, extents, blocks, stream) }
            }
        }
    }

    /// Returns the common arguments of every launch of a collective.
    pub(super) fn launch_head(&self, m: &GroupCollective, host: u64, patience_ns: u64) -> LaunchHead {
        let mut flags = [0; MAX_MEMBERS];
        flags[..self.flags.len()].copy_from_slice(&self.flags);
        LaunchHead { flags, host, patience_ns, op: m.op_index, fingerprint: m.fingerprint }
    }

    /// Returns the destinations to which the producer of this member's operand may store once the
    /// collective is open; `None` if a part is not aligned to whole stores.
    pub(super) fn store_targets(&self, m: &GroupCollective, along: SplitDim) -> CudaResult<Option<Targets>> {
        let CollectiveKind::Copy { sends: to, .. } = &m.kind else { return Ok(None) };
        if to.len() > MAX_MEMBERS {
            return Ok(None);
        }
        let results = self.result_addresses(m, to)?;
        let going = self.flags[self.member] + OPENED_FLAG_OFFSET;
        Ok(Targets::from_rects(to, &results, along, m.dtype.element_bytes(), going))
    }

    /// Enqueues DMA copies of an opened collective. They leave the multiprocessors to other
    /// kernels.
    ///
    /// # Safety
    /// As [`CollectiveGroup::enqueue_copies`](super::CollectiveGroup::enqueue_copies), and the
    /// collective must be open on the stream.
    pub(super) unsafe fn enqueue_copies(&self, m: &GroupCollective, stream: &CudaStream) -> CudaResult<()> {
        let CollectiveKind::Copy { sends: to, .. } = &m.kind else {
            return cuda_failure("copy engines cannot reduce");
        };
        let results = self.result_addresses(m, to)?;
        // Each member starts with a different peer, so that no link carries two copies at once.
        for d in 1..=to.len() {
            let j = (self.member + d) % to.len();
            let (r, result) = (&to[j], results[j]);
            let (to, from) = (result + r.to_offset as u64, m.operand + r.from_offset as u64);
            let (to_rows, from_rows) = ((to, r.to_pitch), (from, r.from_pitch));
            // SAFETY: the caller guarantees the operand, and that the members may write each other's
            // results; `result_addresses` checks that these lie in the mapped memory of the peers.
            unsafe {
                match r.contiguous_sides() {
                    (true, true) => stream.copy_async(to, from, r.total_bytes())?,
                    _ => stream.copy_rows(to_rows, from_rows, r.row_bytes, r.rows)?,
                }
            }
        }
        Ok(())
    }

    /// Returns the addresses of all results, or 0 for members that receive nothing.
    fn result_addresses(&self, m: &GroupCollective, to: &[CopyRect]) -> CudaResult<Vec<u64>> {
        let one = |(j, rect): (usize, &CopyRect)| match rect.total_bytes() {
            0 => Ok(0),
            _ if j == self.member => Ok(m.result),
            _ => self.peer_address(j, &m.peer_result_offsets, rect.end_offsets().1),
        };
        to.iter().enumerate().map(one).collect()
    }

    /// Enqueues a reduction of one rectangle.
    ///
    /// # Safety
    /// As [`enqueue_collective`](PeerMemory::enqueue_collective).
    #[expect(clippy::too_many_arguments, reason = "a launch needs all of them")]
    unsafe fn enqueue_reduction(
        &self,
        m: &GroupCollective,
        head: LaunchHead,
        kernels: &CollectiveKernels,
        reduction: Reduction,
        rect: CopyRect,
        (operand_bytes, result_bytes, all): (usize, usize, bool),
        blocks: u32,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let members = 0..self.bases.len();
        let from = members
            .clone()
            .map(|j| self.peer_address(j, &m.peer_operand_offsets, operand_bytes))
            .collect::<CudaResult<Vec<u64>>>()?;
        if from[self.member] != m.operand {
            return cuda_failure(format!(
                "the operand is at {:#x}, but peers read it at {:#x}",
                m.operand, from[self.member]
            ));
        }
        let to = if all {
            members
                .map(|j| self.peer_address(j, &m.peer_result_offsets, result_bytes))
                .collect::<CudaResult<Vec<u64>>>()?
        } else {
            vec![m.result; self.bases.len()]
        };
        if to[self.member] != m.result {
            return cuda_failure(format!(
                "the result is at {:#x}, but peers write it at {:#x}",
                m.result, to[self.member]
            ));
        }
        let work =
            ReduceLaunch { dtype: m.dtype, reduction, rect, from: &from, to: &to, to_all_members: all };
        // SAFETY: `peer_address` checks that all operands, and the results of peers, lie in the
        // mapped memory of their members; the caller guarantees this member's own result.
        unsafe { kernels.launch_reduce(head, &work, blocks, stream) }
    }

    /// Returns the address of a member's offset, after checking that `bytes` bytes from there lie
    /// in its exchange memory.
    fn peer_address(&self, member: usize, offsets: &[u64], bytes: usize) -> CudaResult<u64> {
        let Some(offset) = offsets.get(member) else {
            return cuda_failure(format!("{} offsets, none for member {member}", offsets.len()));
        };
        if *offset == NO_OFFSET {
            return cuda_failure(format!(
                "member {member} has no {bytes} bytes of it in its exchange memory"
            ));
        }
        match offset.checked_add(bytes as u64) {
            Some(end) if end <= self.bytes[member] => Ok(self.bases[member] + offset),
            _ => cuda_failure(format!(
                "{bytes} bytes at offset {offset} of member {member} exceed its exchange memory of {} bytes",
                self.bytes[member]
            )),
        }
    }
}

/// Returns the first unit and the number of units of one member.
fn split_units(units: usize, members: usize, me: usize) -> (usize, usize) {
    let (each, more) = (units / members, units % members);
    (me * each + me.min(more), each + usize::from(me < more))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_units_covers_every_unit_once() {
        for (units, members) in [(0, 3), (1, 4), (10, 4), (12, 4), (4097, 16)] {
            let mut next = 0;
            for me in 0..members {
                let (start, len) = split_units(units, members, me);
                assert_eq!(start, next);
                next += len;
            }
            assert_eq!(next, units);
        }
    }
}
