//! Launches of the kernels in p2p_collectives.cu: their argument structs and their grid sizes.

#![allow(unsafe_code, reason = "launches of kernels")]

use tessera_ir::DType;
use tessera_mesh::Reduction;

use super::copy_plan::CopyRect;
use crate::compile::Compiler;
use crate::driver::{CudaResult, CudaStream, cuda_failure};
use crate::kernel_params::{DevicePtr, KernelParam, LoadedKernel, ParamType, kernel_signatures};

/// Maximum number of members of a group that uses P2P memory.
pub(super) const MAX_MEMBERS: usize = 16;

const THREADS: u32 = 512;
/// Threads of a launch that only synchronizes.
const WARP_THREADS: u32 = 32;
/// Bytes of a copy per thread block, unless that needs more blocks than the launch may use.
const BYTES_PER_BLOCK: usize = 16 << 10;

kernel_signatures! {
    COLLECTIVE_TABLE:

    /// Copies one rectangle per member.
    CopyRects { a: CopyArgs } = COPY "copy", PACK "pack";

    /// Synchronizes with the other members.
    Synchronize { h: LaunchHead } = OPEN "open", CLOSE "close";

    /// Reduces this member's part.
    Reduce { a: ReduceArgs } =
        SUM_F32 "sum_f32", TREE_F32 "tree_f32", MAX_F32 "max_f32",
        SUM_BF16 "sum_bf16", TREE_BF16 "tree_bf16", MAX_BF16 "max_bf16";

    /// Writes an op index to a word of host memory.
    Mark { word: DevicePtr<u32>, op: u32 } = MARK "mark";
}

/// The kernels, compiled for one member of a group.
#[derive(Debug)]
pub(super) struct CollectiveKernels {
    copy: LoadedKernel<CopyRects>,
    open: LoadedKernel<Synchronize>,
    close: LoadedKernel<Synchronize>,
    pack: LoadedKernel<CopyRects>,
    mark: LoadedKernel<Mark>,
    /// Indexed by dtype (f32, then bf16) and by reduction (sum, tree, max).
    reduce: [[LoadedKernel<Reduce>; 3]; 2],
}

/// A synchronization of a collective's members when other kernels or copy engines move the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Synchronization {
    /// After it, the members may write each other's results.
    Open,
    /// Once it completes, the parts of all members have arrived.
    Close,
}

/// Common kernel arguments, with the layout of `Head` in p2p_collectives.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct LaunchHead {
    pub(super) flags: [u64; MAX_MEMBERS],
    pub(super) host: u64,
    pub(super) patience_ns: u64,
    pub(super) op: u32,
    pub(super) fingerprint: u32,
}

/// A rectangle to copy, with the layout of `Rect` in p2p_collectives.cu.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct KernelRect {
    from: u64,
    to: u64,
    from_pitch: u64,
    to_pitch: u64,
    per_row: u32,
    rows: u32,
    width: u32,
    multiplier: u32,
    shift: u32,
    pad: u32,
}

/// Arguments with the layout of `CopyArgs` in p2p_collectives.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct CopyArgs {
    head: LaunchHead,
    pieces: [KernelRect; MAX_MEMBERS],
}

/// Arguments with the layout of `ReduceArgs` in p2p_collectives.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct ReduceArgs {
    head: LaunchHead,
    piece: KernelRect,
    from: [u64; MAX_MEMBERS],
    to: [u64; MAX_MEMBERS],
    to_all_members: u64,
}

impl KernelParam for LaunchHead {
    const TYPE: ParamType = ParamType::Value("Head");
}

impl KernelParam for CopyArgs {
    const TYPE: ParamType = ParamType::Value("CopyArgs");
}

impl KernelParam for ReduceArgs {
    const TYPE: ParamType = ParamType::Value("ReduceArgs");
}

/// This member's part of a reduction, and the results that receive it.
pub(super) struct ReduceLaunch<'a> {
    pub(super) dtype: DType,
    pub(super) reduction: Reduction,
    /// This member's part of every operand, and its place in every result that receives it.
    pub(super) rect: CopyRect,
    /// Device addresses of the operands, by member.
    pub(super) from: &'a [u64],
    /// Device addresses of the results, by member; all are this member's unless `to_all_members`.
    pub(super) to: &'a [u64],
    /// Whether the results of all members receive the reduced part, as in an all-reduce.
    pub(super) to_all_members: bool,
}

impl CollectiveKernels {
    pub(super) fn new(compiler: &mut Compiler, me: usize, members: usize) -> CudaResult<CollectiveKernels> {
        // Groups beyond the maximum use only the packing and progress kernels, which need no peers.
        let (me, members) = if members > MAX_MEMBERS { (0, 1) } else { (me, members) };
        let defines = [("MEMBERS", members.to_string()), ("ME", me.to_string())];
        let module =
            compiler.compile_module("exchange", include_str!("../kernels/p2p_collectives.cu"), &defines)?;
        let load = |kernel| LoadedKernel::new(&module, kernel);
        Ok(CollectiveKernels {
            copy: LoadedKernel::new(&module, COPY)?,
            open: LoadedKernel::new(&module, OPEN)?,
            close: LoadedKernel::new(&module, CLOSE)?,
            pack: LoadedKernel::new(&module, PACK)?,
            mark: LoadedKernel::new(&module, MARK)?,
            reduce: [
                [load(SUM_F32)?, load(TREE_F32)?, load(MAX_F32)?],
                [load(SUM_BF16)?, load(TREE_BF16)?, load(MAX_BF16)?],
            ],
        })
    }

    /// Launches a collective that copies one rectangle per member.
    ///
    /// # Safety
    /// The flags and signals of `head` must be mapped. Each rectangle must lie in memory that is
    /// accessible from this device and stays so until the stream has completed the launch; meanwhile
    /// only this collective may access the destinations, and nothing may write the sources.
    pub(super) unsafe fn launch_copy(
        &self,
        head: LaunchHead,
        pieces: &[KernelRect],
        most_blocks: u32,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let bytes: usize = pieces.iter().map(KernelRect::total_bytes).sum();
        let mut args = CopyArgs { head, pieces: [KernelRect::default(); MAX_MEMBERS] };
        args.pieces[..pieces.len()].copy_from_slice(pieces);
        let grid = [block_count(bytes, most_blocks), 1, 1];
        // SAFETY: the caller guarantees the flags and the rectangles.
        unsafe { self.copy.launch(grid, THREADS, 0, &CopyRects { a: args }, stream) }
    }

    /// Launches a synchronization before or after copies by other kernels or by copy engines.
    ///
    /// # Safety
    /// The flags and signals of `head` must stay mapped until the stream has completed the launch.
    pub(super) unsafe fn launch_synchronization(
        &self,
        which: Synchronization,
        head: LaunchHead,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let kernel = match which {
            Synchronization::Open => &self.open,
            Synchronization::Close => &self.close,
        };
        // SAFETY: the caller guarantees the flags and signals.
        unsafe { kernel.launch([1, 1, 1], WARP_THREADS, 0, &Synchronize { h: head }, stream) }
    }

    /// Launches the kernel that reduces this member's part of all operands, in f32 or bf16.
    ///
    /// # Safety
    /// As [`launch_copy`](CollectiveKernels::launch_copy), for the rectangle at each of the addresses.
    pub(super) unsafe fn launch_reduce(
        &self,
        head: LaunchHead,
        r: &ReduceLaunch<'_>,
        most_blocks: u32,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let kernels = match r.dtype {
            DType::F32 => &self.reduce[0],
            DType::Bf16 => &self.reduce[1],
            other => return cuda_failure(format!("no reduction of {}", other.name())),
        };
        let kernel = match r.reduction {
            Reduction::Sum => &kernels[0],
            Reduction::Tree => &kernels[1],
            Reduction::Max => &kernels[2],
        };
        let element = r.dtype.element_bytes() as u32;
        let bases = r.from.iter().chain(r.to).fold(0, |all, base| all | base);
        let piece = KernelRect::with_widths(&r.rect, 0, 0, bases, &[16, element])?;
        let mut args = ReduceArgs {
            head,
            piece,
            from: [0; MAX_MEMBERS],
            to: [0; MAX_MEMBERS],
            to_all_members: u64::from(r.to_all_members),
        };
        args.from[..r.from.len()].copy_from_slice(r.from);
        args.to[..r.to.len()].copy_from_slice(r.to);
        let blocks = (piece.per_row * piece.rows).div_ceil(THREADS).clamp(1, most_blocks);
        // SAFETY: the caller guarantees the flags and the rectangles.
        unsafe { kernel.launch([blocks, 1, 1], THREADS, 0, &Reduce { a: args }, stream) }
    }

    /// Launches copies within this device.
    ///
    /// # Safety
    /// Each rectangle must lie in device memory that stays allocated until the stream has completed
    /// the launch; meanwhile only this launch may access the destinations, and nothing may write the
    /// sources.
    pub(super) unsafe fn launch_pack(
        &self,
        pieces: &[KernelRect],
        most_blocks: u32,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        for some in pieces.chunks(MAX_MEMBERS) {
            let most = some.iter().map(KernelRect::total_bytes).max().unwrap_or(0);
            let mut args =
                CopyArgs { head: LaunchHead::empty_head(), pieces: [KernelRect::default(); MAX_MEMBERS] };
            args.pieces[..some.len()].copy_from_slice(some);
            let grid = [block_count(most, most_blocks), some.len() as u32, 1];
            // SAFETY: the caller guarantees the rectangles; this kernel does not use the head.
            unsafe { self.pack.launch(grid, THREADS, 0, &CopyRects { a: args }, stream) }?;
        }
        Ok(())
    }

    /// Launches a kernel that writes an op index to a word of host memory.
    ///
    /// # Safety
    /// The word must be pinned memory that stays allocated until the stream has completed the launch.
    pub(super) unsafe fn launch_mark(&self, word: u64, op: u32, stream: &CudaStream) -> CudaResult<()> {
        // SAFETY: the caller guarantees the word.
        unsafe { self.mark.launch([1, 1, 1], 32, 0, &Mark { word: word.into(), op }, stream) }
    }
}

/// Offset in a member's flags of the word that signals whether a collective is open.
pub(super) const OPENED_FLAG_OFFSET: u64 = 268;

impl LaunchHead {
    fn empty_head() -> LaunchHead {
        LaunchHead { flags: [0; MAX_MEMBERS], host: 0, patience_ns: 0, op: 0, fingerprint: 0 }
    }
}

impl KernelRect {
    /// Builds a copy between two addresses, with the widest access that alignment allows.
    pub(super) fn from_copy(rect: &CopyRect, from: u64, to: u64) -> CudaResult<KernelRect> {
        KernelRect::with_widths(rect, from, to, 0, &[16, 8, 4, 2, 1])
    }

    /// `bases` is the bitwise OR of all addresses that the kernel adds to the offsets; it limits
    /// the access width.
    fn with_widths(
        rect: &CopyRect,
        from: u64,
        to: u64,
        bases: u64,
        widths: &[u32],
    ) -> CudaResult<KernelRect> {
        if rect.total_bytes() == 0 {
            return Ok(KernelRect { width: 16, ..KernelRect::default() });
        }
        // Address 0 stands for zeros.
        let from = if rect.is_zero { 0 } else { from + rect.from_offset as u64 };
        let to = to + rect.to_offset as u64;
        let (mut row_bytes, mut rows) = (rect.row_bytes as u64, rect.rows as u64);
        if rect.contiguous_sides() == (true, true) {
            (row_bytes, rows) = (row_bytes * rows, 1);
        }
        let mut all = from | to | row_bytes | bases;
        if rows > 1 {
            all |= (rect.from_pitch | rect.to_pitch) as u64;
        }
        let Some(width) = widths.iter().copied().find(|w| all.is_multiple_of(u64::from(*w))) else {
            return cuda_failure(format!("{rect:?} is not aligned to elements"));
        };
        let per_row = row_bytes / u64::from(width);
        if per_row * rows >= 1 << 31 {
            return cuda_failure(format!("{rect:?} exceeds 2^31 accesses of one launch"));
        }
        let per_row = per_row as u32;
        let (multiplier, shift) = division_constants(per_row);
        Ok(KernelRect {
            from,
            to,
            from_pitch: rect.from_pitch as u64,
            to_pitch: rect.to_pitch as u64,
            per_row,
            rows: rows as u32,
            width,
            multiplier,
            shift,
            pad: 0,
        })
    }

    fn total_bytes(&self) -> usize {
        self.per_row as usize * self.rows as usize * self.width as usize
    }
}

/// Returns the multiplier and shift that divide numbers below 2³¹: `((i * multiplier >> 32) + i) >>
/// shift`.
fn division_constants(by: u32) -> (u32, u32) {
    let shift = by.next_power_of_two().trailing_zeros();
    let multiplier = ((1_u64 << 32) * ((1_u64 << shift) - u64::from(by)) / u64::from(by)) + 1;
    (multiplier as u32, shift)
}

fn block_count(bytes: usize, most: u32) -> u32 {
    bytes.div_ceil(BYTES_PER_BLOCK).clamp(1, most.max(1) as usize) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_constants_divide_exactly() {
        for by in [1_u32, 2, 3, 5, 7, 10, 127, 128, 160, 320, 1000, 65_535, 65_537, 1 << 30, (1 << 31) - 1] {
            let (multiplier, shift) = division_constants(by);
            for i in [0, 1, by - 1, by, by + 1, by.saturating_mul(3) - 1, (1 << 30) + 12_345, (1 << 31) - 1] {
                let i = i.min((1 << 31) - 1);
                let high = ((u64::from(i) * u64::from(multiplier)) >> 32) as u32;
                assert_eq!((high + i) >> shift, i / by, "{i} / {by}");
            }
        }
    }

    #[test]
    fn arguments_have_the_kernel_layout() {
        assert_eq!((size_of::<LaunchHead>(), size_of::<KernelRect>()), (16 * 8 + 24, 56));
        assert_eq!(size_of::<CopyArgs>(), 152 + 16 * 56);
        assert_eq!(size_of::<ReduceArgs>(), 152 + 56 + 2 * 128 + 8);
    }

    #[test]
    fn accesses_are_as_wide_as_alignment_allows() {
        let of = |from_offset: usize, from_pitch: usize, row_bytes: usize, rows: usize| {
            let (to_offset, to_pitch, is_zero) = (0, row_bytes, false);
            let rect = CopyRect { from_offset, from_pitch, to_offset, to_pitch, row_bytes, rows, is_zero };
            KernelRect::from_copy(&rect, 256, 512).map(|p| (p.width, p.per_row, p.rows)).unwrap()
        };
        // Contiguous rows merge into one row.
        assert_eq!(of(0, 6, 6, 8), (16, 3, 1));
        assert_eq!(of(16, 96, 32, 4), (16, 2, 4));
        assert_eq!(of(8, 96, 32, 4), (8, 4, 4));
        assert_eq!(of(0, 36, 32, 4), (4, 8, 4));
        assert_eq!(of(2, 96, 32, 1), (2, 16, 1));
        assert_eq!(of(0, 96, 3, 2), (1, 3, 2));
        let huge =
            CopyRect { from_pitch: 3, to_pitch: 5, row_bytes: 1, rows: 1 << 31, ..CopyRect::default() };
        assert!(KernelRect::from_copy(&huge, 0, 0).is_err());
    }
}
