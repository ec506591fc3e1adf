//! Cost of an op on one rank: floating-point operations and minimum memory and link traffic.

use tessera_base::{Bytes, Flops};

use crate::op_traits::FlopCount;
use crate::{Op, OpView, Opcode, Program, ValueId, views};

/// Cost of one op on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpWorkload {
    /// Floating-point operations: a multiply-add counts as two, an exponential or a sine as eight.
    pub flops: Flops,
    /// Memory traffic if each operand is read once and each result written once. Views cause no
    /// traffic.
    pub bytes: Bytes,
    /// Payload that a collective passes to the link: the local bytes of its operand.
    pub wire: Bytes,
}

/// Returns the cost of an op from its types in `p`. Collectives and ops that only move data have 0
/// flops.
#[must_use]
pub fn op_workload(p: &Program, op: &Op) -> OpWorkload {
    let elements = |values: &[ValueId]| values.iter().map(|v| p.type_of(*v).element_count()).sum::<u64>();
    let flops = match op.opcode.table_row().traits.flops {
        FlopCount::Zero => 0,
        FlopCount::PerResult(n) => n * elements(&op.results),
        FlopCount::PerOperand(n) => n * elements(&op.operands),
        FlopCount::FromExtents => matrix_flops(p, op).unwrap_or(0),
    };
    let moves = !matches!(
        op.opcode,
        Opcode::CacheRead
            | Opcode::Weight
            | Opcode::Input
            | Opcode::Call
            | Opcode::EventRecord
            | Opcode::Output
    );
    let read: u64 =
        op.operands.iter().chain(op.keyed.iter().map(|(_, v)| v)).map(|v| p.type_of(*v).byte_size().0).sum();
    // A buffer that an op computes with is read in full, like an operand.
    let bank =
        op.buffer.filter(|_| op.opcode == Opcode::MoeRoute).map_or(0, |b| p.buffer(b).ty.byte_size().0);
    let written: u64 = op.results.iter().map(|r| p.type_of(*r).byte_size().0).sum();
    let wire = if op.opcode.is_collective() {
        op.operands.first().map_or(0, |v| p.type_of(*v).byte_size().0)
    } else {
        0
    };
    OpWorkload {
        flops: Flops(flops),
        bytes: Bytes(if moves { read + bank + written } else { 0 }),
        wire: Bytes(wire),
    }
}

/// Returns how many pairs of one of `frames` frames of the result and a frame of the kernel a convolution
/// multiplies: all of them with a history. Without one, the kernel's first frames lie on zeros before the first
/// frame of x, and no kernel needs to multiply these.
fn count_frame_taps(v: &views::Conv3d, frames: u64) -> u64 {
    let step = v.stride.map_or(1, |s| s[0]);
    let absent = |frame: u64| match v.history {
        Some(_) => 0,
        None => v.pad_frames.saturating_sub(frame * step).min(v.kernel[0].saturating_sub(1)),
    };
    (0..frames).map(|frame| v.kernel[0] - absent(frame)).sum()
}

/// Returns the FLOPs of an op that multiplies matrices; `None` for other ops.
fn matrix_flops(p: &Program, op: &Op) -> Option<u64> {
    let extent = |v: ValueId, dim: usize| p.type_of(v).shape.get(dim).copied();
    let out = || Some(p.type_of(*op.results.first()?).element_count());
    match op.view().ok()? {
        OpView::Matmul(v) => Some(2 * extent(v.x, 0)? * extent(v.x, 1)? * extent(v.w, 0)?),
        OpView::Attention(v) => {
            let d = *p.type_of(v.q).shape.last()?;
            let [n, r] = [v.q, v.k].map(|x| p.type_of(x).element_count() / d.max(1));
            Some(4 * n * d * r + 10 * n * r * (d / v.head_dim))
        }
        OpView::Conv3d(v) => {
            let frames = *p.type_of(*op.results.first()?).shape.first()?;
            let per_tap = 2 * out()? / frames.max(1) * extent(v.w, 1)? / v.kernel[0].max(1);
            Some(per_tap * count_frame_taps(&v, frames))
        }
        // Every key may be within the length.
        OpView::RelativeAttention(v) => {
            let (n, d, r) = (extent(v.q, 0)?, extent(v.q, 1)?, extent(v.k, 0)?);
            Some(4 * n * d * r + 11 * n * r * (d / v.head_dim))
        }
        // Every position that the table of pages can hold may be attended to.
        OpView::PagedAttention(v) => {
            let (n, d, m) = (extent(v.q, 0)?, extent(v.q, 1)?, extent(v.pages, 1)? * v.page_rows);
            let keys = v.window.map_or(m, |w| m.min(w.saturating_add(v.sink)));
            let columns = d + d / v.head_dim * v.value_dim.unwrap_or(v.head_dim);
            Some(2 * n * columns * keys + 10 * n * keys * (d / v.head_dim))
        }
        OpView::HeadMatmul(v) => {
            Some(2 * extent(v.x, 0)? * extent(v.w, 0)? / v.head_rows * v.rows * extent(v.w, 1)?)
        }
        OpView::Bmm(v) => Some(2 * out()? * p.type_of(v.x).shape.last()?),
        OpView::GroupedMatmul(v) => Some(2 * v.rows * extent(v.w, 1)? * extent(v.w, 2)?),
        // Assumes that no token is dropped at any of its experts.
        OpView::MoeRoute(v) => Some(2 * out()? * extent(v.x, 1)? * v.top_k),
        _ => None,
    }
}
