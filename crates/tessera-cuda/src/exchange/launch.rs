//! Launches of exchange.cu: its arguments and how work is cut for it.

#![allow(unsafe_code, reason = "launches of kernels")]

use std::ffi::c_void;

use cudarc::driver::result;
use tessera_ir::DType;
use tessera_mesh::Reduction;

use super::moves::Rect;
use crate::compile::Compiler;
use crate::driver::{Args, Done, Function, Module, Stream, failed};

/// Most members of a group that meets in its members' memory.
pub(super) const MOST: usize = 16;

const THREADS: u32 = 512;
/// Threads of a launch that only meets.
const WARP: u32 = 32;
/// Bytes that are worth a block.
const BLOCK_BYTES: usize = 16 << 10;

/// The kernels, for one place in a group.
#[derive(Debug)]
pub(super) struct Kernels {
    copy: Function,
    open: Function,
    close: Function,
    pack: Function,
    mark: Function,
    /// By dtype, f32 first, and reduction.
    reduce: [[Function; 3]; 2],
    _module: Module,
}

/// As `Head` of exchange.cu.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Head {
    pub(super) flags: [u64; MOST],
    pub(super) host: u64,
    pub(super) patience_ns: u64,
    pub(super) op: u32,
    pub(super) fingerprint: u32,
}

/// As `Rect` of exchange.cu.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Piece {
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

/// As `CopyArgs` of exchange.cu.
#[repr(C)]
struct CopyArgs {
    head: Head,
    pieces: [Piece; MOST],
}

/// As `ReduceArgs` of exchange.cu.
#[repr(C)]
struct ReduceArgs {
    head: Head,
    piece: Piece,
    from: [u64; MOST],
    to: [u64; MOST],
    all: u64,
}

/// What is reduced here, and who gets it.
pub(super) struct Reduce<'a> {
    pub(super) dtype: DType,
    pub(super) reduction: Reduction,
    /// In every operand, and in every result that gets it.
    pub(super) rect: Rect,
    /// Addresses of all operands.
    pub(super) from: &'a [u64],
    /// Addresses of all results.
    pub(super) to: &'a [u64],
    /// Whether all results get it.
    pub(super) all: bool,
}

impl Kernels {
    pub(super) fn new(compiler: &mut Compiler, me: usize, members: usize) -> Done<Kernels> {
        // A larger group packs and marks alone.
        let (me, members) = if members > MOST { (0, 1) } else { (me, members) };
        let defines = [("MEMBERS", members.to_string()), ("ME", me.to_string())];
        let module = compiler.module("exchange", include_str!("../kernels/exchange.cu"), &defines)?;
        let of = |dtype: &str| -> Done<[Function; 3]> {
            let one = |reduction: &str| module.function(&format!("{reduction}_{dtype}"));
            Ok([one("sum")?, one("tree")?, one("max")?])
        };
        Ok(Kernels {
            copy: module.function("copy")?,
            open: module.function("open")?,
            close: module.function("close")?,
            pack: module.function("pack")?,
            mark: module.function("mark")?,
            reduce: [of("f32")?, of("bf16")?],
            _module: module,
        })
    }

    /// A collective of one piece per member.
    pub(super) fn copy(&self, head: Head, pieces: &[Piece], most_blocks: u32, stream: &Stream) -> Done<()> {
        let bytes: usize = pieces.iter().map(Piece::bytes).sum();
        let mut args = CopyArgs { head, pieces: [Piece::default(); MOST] };
        args.pieces[..pieces.len()].copy_from_slice(pieces);
        launch(self.copy, [blocks(bytes, most_blocks), 1], THREADS, &mut args, stream)
    }

    /// Meets the other members before others than these kernels move a collective's pieces.
    pub(super) fn open(&self, mut head: Head, stream: &Stream) -> Done<()> {
        launch(self.open, [1, 1], WARP, &mut head, stream)
    }

    /// Meets them again when all is moved.
    pub(super) fn close(&self, mut head: Head, stream: &Stream) -> Done<()> {
        launch(self.close, [1, 1], WARP, &mut head, stream)
    }

    /// A collective that reduces.
    pub(super) fn reduce(&self, head: Head, r: &Reduce<'_>, most_blocks: u32, stream: &Stream) -> Done<()> {
        let kernels = match r.dtype {
            DType::F32 => &self.reduce[0],
            DType::Bf16 => &self.reduce[1],
            other => return failed(format!("no reduction of {}", other.name())),
        };
        let kernel = match r.reduction {
            Reduction::Sum => kernels[0],
            Reduction::Tree => kernels[1],
            Reduction::Max => kernels[2],
        };
        let element = r.dtype.bytes() as u32;
        let bases = r.from.iter().chain(r.to).fold(0, |all, base| all | base);
        let piece = Piece::of(&r.rect, 0, 0, bases, &[16, element])?;
        let mut args = ReduceArgs { head, piece, from: [0; MOST], to: [0; MOST], all: u64::from(r.all) };
        args.from[..r.from.len()].copy_from_slice(r.from);
        args.to[..r.to.len()].copy_from_slice(r.to);
        let blocks = (piece.per_row * piece.rows).div_ceil(THREADS).clamp(1, most_blocks);
        launch(kernel, [blocks, 1], THREADS, &mut args, stream)
    }

    /// Copies on this device alone.
    pub(super) fn pack(&self, pieces: &[Piece], most_blocks: u32, stream: &Stream) -> Done<()> {
        for some in pieces.chunks(MOST) {
            let most = some.iter().map(Piece::bytes).max().unwrap_or(0);
            let mut args = CopyArgs { head: Head::none(), pieces: [Piece::default(); MOST] };
            args.pieces[..some.len()].copy_from_slice(some);
            launch(self.pack, [blocks(most, most_blocks), some.len() as u32], THREADS, &mut args, stream)?;
        }
        Ok(())
    }

    /// Writes an op's number into a word of the host.
    pub(super) fn mark(&self, word: u64, op: u32, stream: &Stream) -> Done<()> {
        stream.launch(self.mark, [1, 1, 1], 32, 0, Args::new().at(word).int(i64::from(op as i32)))
    }
}

/// Where the word that says whether a collective was opened lies in a member's flags.
pub(super) const GOING_OFFSET: u64 = 268;

impl Head {
    fn none() -> Head {
        Head { flags: [0; MOST], host: 0, patience_ns: 0, op: 0, fingerprint: 0 }
    }
}

impl Piece {
    /// A rectangle from one address to another, in the widest units that fit.
    pub(super) fn copy(rect: &Rect, from: u64, to: u64) -> Done<Piece> {
        Piece::of(rect, from, to, 0, &[16, 8, 4, 2, 1])
    }

    /// `bases` has the bits of all addresses that offsets will be added to.
    fn of(rect: &Rect, from: u64, to: u64, bases: u64, widths: &[u32]) -> Done<Piece> {
        if rect.bytes() == 0 {
            return Ok(Piece { width: 16, ..Piece::default() });
        }
        let (from, to) = (from + rect.from_offset as u64, to + rect.to_offset as u64);
        let (mut row_bytes, mut rows) = (rect.row_bytes as u64, rect.rows as u64);
        if rect.contiguous() == (true, true) {
            (row_bytes, rows) = (row_bytes * rows, 1);
        }
        let mut all = from | to | row_bytes | bases;
        if rows > 1 {
            all |= (rect.from_pitch | rect.to_pitch) as u64;
        }
        let Some(width) = widths.iter().copied().find(|w| all.is_multiple_of(u64::from(*w))) else {
            return failed(format!("{rect:?} is not aligned to elements"));
        };
        let per_row = row_bytes / u64::from(width);
        if per_row * rows >= 1 << 31 {
            return failed(format!("{rect:?} is more than one launch can count"));
        }
        let per_row = per_row as u32;
        let (multiplier, shift) = quotient(per_row);
        Ok(Piece {
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

    fn bytes(&self) -> usize {
        self.per_row as usize * self.rows as usize * self.width as usize
    }
}

/// Multiplier and shift that divide numbers below 2³¹: `((i * multiplier >> 32) + i) >> shift`.
fn quotient(by: u32) -> (u32, u32) {
    let shift = by.next_power_of_two().trailing_zeros();
    let multiplier = ((1_u64 << 32) * ((1_u64 << shift) - u64::from(by)) / u64::from(by)) + 1;
    (multiplier as u32, shift)
}

fn blocks(bytes: usize, most: u32) -> u32 {
    bytes.div_ceil(BLOCK_BYTES).clamp(1, most.max(1) as usize) as u32
}

fn launch<T>(f: Function, grid: [u32; 2], threads: u32, args: &mut T, stream: &Stream) -> Done<()> {
    let mut pointers = [std::ptr::from_mut(args).cast::<c_void>()];
    let grid = (grid[0], grid[1], 1);
    // SAFETY: the kernel has one parameter, the struct whose words `T` repeats; the driver copies it before it returns.
    Ok(unsafe { result::launch_kernel(f.raw(), grid, (threads, 1, 1), 0, stream.raw(), &mut pointers) }?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quotient_needs_no_division() {
        for by in [1_u32, 2, 3, 5, 7, 10, 127, 128, 160, 320, 1000, 65_535, 65_537, 1 << 30, (1 << 31) - 1] {
            let (multiplier, shift) = quotient(by);
            for i in [0, 1, by - 1, by, by + 1, by.saturating_mul(3) - 1, (1 << 30) + 12_345, (1 << 31) - 1] {
                let i = i.min((1 << 31) - 1);
                let high = ((u64::from(i) * u64::from(multiplier)) >> 32) as u32;
                assert_eq!((high + i) >> shift, i / by, "{i} / {by}");
            }
        }
    }

    #[test]
    fn arguments_lie_as_the_kernel_reads_them() {
        assert_eq!((size_of::<Head>(), size_of::<Piece>()), (16 * 8 + 24, 56));
        assert_eq!(size_of::<CopyArgs>(), 152 + 16 * 56);
        assert_eq!(size_of::<ReduceArgs>(), 152 + 56 + 2 * 128 + 8);
    }

    #[test]
    fn units_are_as_wide_as_addresses_and_rows_allow() {
        let of = |from_offset: usize, from_pitch: usize, row_bytes: usize, rows: usize| {
            let rect = Rect { from_offset, from_pitch, to_offset: 0, to_pitch: row_bytes, row_bytes, rows };
            Piece::copy(&rect, 256, 512).map(|p| (p.width, p.per_row, p.rows)).unwrap()
        };
        // Rows that follow one another are one row.
        assert_eq!(of(0, 6, 6, 8), (16, 3, 1));
        assert_eq!(of(16, 96, 32, 4), (16, 2, 4));
        assert_eq!(of(8, 96, 32, 4), (8, 4, 4));
        assert_eq!(of(0, 36, 32, 4), (4, 8, 4));
        assert_eq!(of(2, 96, 32, 1), (2, 16, 1));
        assert_eq!(of(0, 96, 3, 2), (1, 3, 2));
        let huge = Rect { from_pitch: 3, to_pitch: 5, row_bytes: 1, rows: 1 << 31, ..Rect::default() };
        assert!(Piece::copy(&huge, 0, 0).is_err());
    }
}
