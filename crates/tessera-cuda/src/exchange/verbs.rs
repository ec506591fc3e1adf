//! Collectives through NCCL: its own verbs where they say all of it, pieces that are packed, sent and unpacked where not.
//!
//! Sums are NCCL's: in an order of its own, and of bf16 with roundings between steps, so their last bits may differ from
//! those of members that meet in one another's memory. A tree is a sum here.

use tessera_mesh::Reduction;

use super::launch::{Kernels, Piece};
use super::moves::{Kind, Move, Rect, STAGING_ALIGN, Scatter, Verb};
use super::words::Words;
use crate::driver::{Done, Memory, Stream, failed};
use crate::nccl::Comm;

/// One member's means for collectives through NCCL.
pub(super) struct Verbs<'a> {
    pub(super) me: usize,
    pub(super) comm: &'a Comm,
    pub(super) kernels: &'a Kernels,
    pub(super) words: &'a Words,
    pub(super) staging: Option<&'a Memory>,
    pub(super) blocks: u32,
}

/// Places in staging memory, one behind the other.
struct Staging {
    next: u64,
    end: u64,
}

impl Verbs<'_> {
    pub(super) fn issue(&self, m: &Move, stream: &Stream) -> Done<()> {
        self.kernels.mark(self.words.arrived_at(), m.op, stream)?;
        match &m.kind {
            Kind::Copy { verb: Verb::AllGather(bytes), .. } => {
                self.comm.all_gather(m.operand, m.result, *bytes, stream)?;
            }
            Kind::Copy { verb: Verb::Broadcast(root, bytes), .. } => {
                let from = if *root == self.me { m.operand } else { m.result };
                self.comm.broadcast(from, m.result, *bytes, *root, stream)?;
            }
            Kind::Copy { to, from, verb: Verb::Pieces } => self.pieces(m, to, from, stream)?,
            Kind::AllReduce { elements, reduction } => {
                self.comm.all_reduce(m.operand, m.result, *elements, (m.dtype, *reduction), stream)?;
            }
            Kind::ReduceScatter { rows, columns, dim, parts, reduction } => {
                match Scatter::of((*rows, *columns), *dim, parts) {
                    None => {
                        let elements = rows * columns / parts.len();
                        self.comm.reduce_scatter(
                            m.operand,
                            m.result,
                            elements,
                            (m.dtype, *reduction),
                            stream,
                        )?;
                    }
                    Some(scatter) => self.scatter(m, scatter, *reduction, stream)?,
                }
            }
        }
        self.kernels.mark(self.words.done_at(), m.op, stream)
    }

    fn pieces(&self, m: &Move, to: &[Rect], from: &[Rect], stream: &Stream) -> Done<()> {
        let mut staging = self.staging();
        let (mut before, mut after) = (Vec::new(), Vec::new());
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for (j, rect) in to.iter().enumerate().filter(|(_, r)| r.bytes() > 0) {
            if j == self.me {
                before.push(Piece::copy(rect, m.operand, m.result)?);
            } else if rect.contiguous().0 {
                sends.push((j, m.operand + rect.from_offset as u64, rect.bytes()));
            } else {
                let at = staging.take(rect.bytes())?;
                let packed = Rect { to_offset: 0, to_pitch: rect.row_bytes, ..*rect };
                before.push(Piece::copy(&packed, m.operand, at)?);
                sends.push((j, at, rect.bytes()));
            }
        }
        for (j, rect) in from.iter().enumerate().filter(|(j, r)| *j != self.me && r.bytes() > 0) {
            if rect.contiguous().1 {
                receives.push((j, m.result + rect.to_offset as u64, rect.bytes()));
            } else {
                let at = staging.take(rect.bytes())?;
                let packed = Rect { from_offset: 0, from_pitch: rect.row_bytes, ..*rect };
                after.push(Piece::copy(&packed, at, m.result)?);
                receives.push((j, at, rect.bytes()));
            }
        }
        self.kernels.pack(&before, self.blocks, stream)?;
        if !sends.is_empty() || !receives.is_empty() {
            self.comm.transfer(&sends, &receives, stream)?;
        }
        self.kernels.pack(&after, self.blocks, stream)
    }

    /// Parts are laid one behind the other, each as long as the largest; what fills them up is reduced too and dropped.
    fn scatter(&self, m: &Move, scatter: Scatter, reduction: Reduction, stream: &Stream) -> Done<()> {
        let Kind::ReduceScatter { rows, columns, dim, parts, .. } = &m.kind else { return Ok(()) };
        let element = m.dtype.bytes() as usize;
        let bytes = scatter.largest * element;
        let mut staging = self.staging();
        let (all, mine) = (staging.take(parts.len() * bytes)?, staging.take(bytes)?);
        let pieces = parts.iter().enumerate().filter(|(_, p)| !p.is_empty()).map(|(j, part)| {
            let len = part.len() * element;
            let rect = if *dim == 0 {
                Rect::run(part.start * columns * element, j * bytes, len * columns)
            } else {
                Rect {
                    from_offset: part.start * element,
                    from_pitch: columns * element,
                    to_offset: j * bytes,
                    to_pitch: len,
                    row_bytes: len,
                    rows: *rows,
                }
            };
            Piece::copy(&rect, m.operand, all)
        });
        self.kernels.pack(&pieces.collect::<Done<Vec<Piece>>>()?, self.blocks, stream)?;
        self.comm.reduce_scatter(all, mine, scatter.largest, (m.dtype, reduction), stream)?;
        let own = parts[self.me].len() * if *dim == 0 { *columns } else { *rows };
        let back = Piece::copy(&Rect::run(0, 0, own * element), mine, m.result)?;
        self.kernels.pack(&[back], self.blocks, stream)
    }

    fn staging(&self) -> Staging {
        let next = self.staging.map_or(0, Memory::at);
        Staging { next, end: self.staging.map_or(0, |s| s.at() + s.bytes() as u64) }
    }
}

impl Staging {
    fn take(&mut self, bytes: usize) -> Done<u64> {
        let at = self.next;
        self.next += bytes.next_multiple_of(STAGING_ALIGN) as u64;
        if self.next > self.end {
            return failed(format!("staging memory is {} bytes short", self.next - self.end));
        }
        Ok(at)
    }
}
