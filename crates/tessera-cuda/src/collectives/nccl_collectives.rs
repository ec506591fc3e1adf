//! Collectives over NCCL. A collective that NCCL does not have is packed, sent with grouped sends
//! and receives, and unpacked.
//!
//! NCCL chooses the order of a sum and rounds bf16 between additions, so the last bits may differ
//! from those of the P2P kernels. A tree reduction is a plain NCCL sum.

#![allow(unsafe_code, reason = "operations on raw addresses")]

use tessera_mesh::Reduction;

use super::copy_plan::{CollectiveKind, CopyRect, GroupCollective, NcclCall, PaddedScatter, STAGING_ALIGN};
use super::kernel_launch::{CollectiveKernels, KernelRect};
use super::signals::HostSignals;
use crate::device_memory::DeviceMemory;
use crate::driver::{CudaResult, CudaStream, cuda_failure};
use crate::nccl::NcclCommunicator;

/// Resources of one member for collectives over NCCL.
pub(super) struct NcclCollectives<'a> {
    pub(super) member: usize,
    pub(super) comm: &'a NcclCommunicator,
    pub(super) kernels: &'a CollectiveKernels,
    pub(super) signals: &'a HostSignals,
    pub(super) staging: Option<&'a DeviceMemory>,
    pub(super) max_blocks: u32,
}

/// Bump allocator over staging memory.
struct StagingAllocator {
    next: u64,
    end: u64,
}

impl NcclCollectives<'_> {
    /// Enqueues one collective.
    ///
    /// # Safety
    /// As [`CollectiveGroup::enqueue_collective`](super::CollectiveGroup::enqueue_collective).
    pub(super) unsafe fn enqueue_collective(
        &self,
        m: &GroupCollective,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        // SAFETY: the words belong to the group's signals, which outlive its work.
        unsafe { self.kernels.launch_mark(self.signals.started_address(), m.op_index, stream) }?;
        match &m.kind {
            CollectiveKind::Copy { nccl_call: NcclCall::AllGather(bytes), .. } => {
                // SAFETY: the caller guarantees operand and result, whose sizes the kind gives.
                unsafe { self.comm.all_gather(m.operand, m.result, *bytes, stream) }?;
            }
            CollectiveKind::Copy { nccl_call: NcclCall::Broadcast(root, bytes), .. } => {
                let from = if *root == self.member { m.operand } else { m.result };
                // SAFETY: the caller guarantees operand and result, whose sizes the kind gives.
                unsafe { self.comm.launch_broadcast(from, m.result, *bytes, *root, stream) }?;
            }
            CollectiveKind::Copy { sends: to, receives: from, nccl_call: NcclCall::SendRecv } => {
                // SAFETY: the caller guarantees operand and result.
                unsafe { self.enqueue_send_recv(m, to, from, stream) }?
            }
            CollectiveKind::AllReduce { elements, reduction } => {
                let reduction = (m.dtype, *reduction);
                // SAFETY: the caller guarantees operand and result, whose sizes the kind gives.
                unsafe { self.comm.reduce(false, (m.operand, m.result, *elements), reduction, stream) }?;
            }
            CollectiveKind::ReduceScatter { rows, columns, dim, parts, reduction } => {
                match PaddedScatter::from_uneven_parts((*rows, *columns), *dim, parts) {
                    None => {
                        let elements = rows * columns / parts.len();
                        let reduction = (m.dtype, *reduction);
                        // SAFETY: the caller guarantees operand and result; equal parts without
                        // padding are what NCCL scatters.
                        unsafe {
                            self.comm.reduce(true, (m.operand, m.result, elements), reduction, stream)
                        }?;
                    }
                    // SAFETY: the caller guarantees operand and result.
                    Some(scatter) => unsafe { self.enqueue_padded_scatter(m, scatter, *reduction, stream) }?,
                }
            }
        }
        // SAFETY: as above.
        unsafe { self.kernels.launch_mark(self.signals.completed_address(), m.op_index, stream) }
    }

    /// Packs, sends, receives and unpacks the parts of a copy.
    ///
    /// # Safety
    /// As [`enqueue_collective`](NcclCollectives::enqueue_collective).
    unsafe fn enqueue_send_recv(
        &self,
        m: &GroupCollective,
        to: &[CopyRect],
        from: &[CopyRect],
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let mut staging = self.staging_allocator();
        let (mut before, mut after) = (Vec::new(), Vec::new());
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for (j, rect) in to.iter().enumerate().filter(|(_, r)| r.total_bytes() > 0) {
            if j == self.member {
                before.push(KernelRect::from_copy(rect, m.operand, m.result)?);
            } else if rect.contiguous_sides().0 {
                sends.push((j, m.operand + rect.from_offset as u64, rect.total_bytes()));
            } else {
                let at = staging.allocate_bytes(rect.total_bytes())?;
                let packed = CopyRect { to_offset: 0, to_pitch: rect.row_bytes, ..*rect };
                before.push(KernelRect::from_copy(&packed, m.operand, at)?);
                sends.push((j, at, rect.total_bytes()));
            }
        }
        for (j, rect) in from.iter().enumerate().filter(|(j, r)| *j != self.member && r.total_bytes() > 0) {
            if rect.contiguous_sides().1 {
                receives.push((j, m.result + rect.to_offset as u64, rect.total_bytes()));
            } else {
                let at = staging.allocate_bytes(rect.total_bytes())?;
                let packed = CopyRect { from_offset: 0, from_pitch: rect.row_bytes, ..*rect };
                after.push(KernelRect::from_copy(&packed, at, m.result)?);
                receives.push((j, at, rect.total_bytes()));
            }
        }
        // SAFETY: copies from the operand to the result or to staging memory; the allocator keeps the
        // destinations apart.
        unsafe { self.kernels.launch_pack(&before, self.max_blocks, stream) }?;
        if !sends.is_empty() || !receives.is_empty() {
            // SAFETY: sends are parts of the operand, receives of the result or of staging memory,
            // which the allocator keeps apart.
            unsafe { self.comm.send_and_recv(&sends, &receives, stream) }?;
        }
        // SAFETY: copies from staging memory to different parts of the result.
        unsafe { self.kernels.launch_pack(&after, self.max_blocks, stream) }
    }

    /// Packs the parts contiguously, each padded to the largest. NCCL reduces the padding too, and
    /// nobody reads it.
    ///
    /// # Safety
    /// As [`enqueue_collective`](NcclCollectives::enqueue_collective).
    unsafe fn enqueue_padded_scatter(
        &self,
        m: &GroupCollective,
        scatter: PaddedScatter,
        reduction: Reduction,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let CollectiveKind::ReduceScatter { rows, columns, dim, parts, .. } = &m.kind else { return Ok(()) };
        let element = m.dtype.element_bytes() as usize;
        let bytes = scatter.part_elements * element;
        let mut staging = self.staging_allocator();
        let (all, mine) = (staging.allocate_bytes(parts.len() * bytes)?, staging.allocate_bytes(bytes)?);
        let pieces = parts.iter().enumerate().filter(|(_, p)| !p.is_empty()).map(|(j, part)| {
            let rect = CopyRect::packed_part((*rows, *columns), *dim, part, element);
            KernelRect::from_copy(&rect, m.operand, all + (j * bytes) as u64)
        });
        let pieces = pieces.collect::<CudaResult<Vec<KernelRect>>>()?;
        // SAFETY: copies the parts of the operand to different places of `all`.
        unsafe { self.kernels.launch_pack(&pieces, self.max_blocks, stream) }?;
        // SAFETY: `all` holds a padded part for each member, and `mine` one, both in staging memory.
        unsafe { self.comm.reduce(true, (all, mine, scatter.part_elements), (m.dtype, reduction), stream) }?;
        let own = parts[self.member].len() * if *dim == 0 { *columns } else { *rows };
        let back = KernelRect::from_copy(&CopyRect::contiguous_run(0, 0, own * element), mine, m.result)?;
        // SAFETY: copies this member's part from staging memory to the result.
        unsafe { self.kernels.launch_pack(&[back], self.max_blocks, stream) }
    }

    fn staging_allocator(&self) -> StagingAllocator {
        let next = self.staging.map_or(0, DeviceMemory::device_address);
        StagingAllocator { next, end: self.staging.map_or(0, |s| s.device_address() + s.byte_len() as u64) }
    }
}

impl StagingAllocator {
    fn allocate_bytes(&mut self, bytes: usize) -> CudaResult<u64> {
        let at = self.next;
        self.next += bytes.next_multiple_of(STAGING_ALIGN) as u64;
        if self.next > self.end {
            return cuda_failure(format!("staging memory is {} bytes short", self.next - self.end));
        }
        Ok(at)
    }
}
