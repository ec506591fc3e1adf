//! Ops that only move bytes within this device or to the host.

use std::ops::Range;

use tessera_ir::{CommAxis, ValueId, views};
use tessera_mesh::AxisLayout;

use super::StepWork;
use super::site::{LaunchSite, row_bytes};
use crate::driver::CudaResult;

/// A copy or a fill, by device addresses and in bytes.
#[derive(Debug, Clone, Copy)]
pub(in crate::exec) enum Transfer {
    Copy {
        to: u64,
        from: u64,
        bytes: u64,
    },
    /// Copies `rows` rows of `bytes` bytes; `to` and `from` are addresses with their pitches.
    CopyRows {
        to: (u64, u64),
        from: (u64, u64),
        bytes: u64,
        rows: u64,
    },
    Zero {
        at: u64,
        bytes: u64,
    },
}

/// Copies a value to an address.
pub(super) fn copy_whole(s: &LaunchSite<'_>, from: ValueId, to: u64) -> CudaResult<StepWork> {
    let bytes = s.p.type_of(from).byte_size().0;
    Ok(StepWork::Transfers(vec![Transfer::Copy { to, from: s.at(from)?, bytes }]))
}

pub(super) fn build_take_rows(s: &LaunchSite<'_>, v: &views::TakeRows, out: ValueId) -> CudaResult<StepWork> {
    copy_range(s, (v.x, out), 0, v.row..v.row + v.rows)
}

/// Copies some frames of a value to an address.
pub(super) fn build_frames_write(s: &LaunchSite<'_>, v: &views::TakeRows, to: u64) -> CudaResult<StepWork> {
    let row = row_bytes(s.p.type_of(v.x));
    let from = s.at::<u64>(v.x)? + v.row * row;
    Ok(StepWork::Transfers(vec![Transfer::Copy { to, from, bytes: v.rows * row }]))
}

pub(super) fn build_take_shard(
    s: &LaunchSite<'_>,
    v: &views::TakeShard,
    out: ValueId,
) -> CudaResult<StepWork> {
    let out_ty = s.p.type_of(out);
    // The operand may already be sharded over other axes; this op shards it only over its own.
    let shard = match v.axis {
        CommAxis::Axis(axis) => match out_ty.layout.on_axis(axis) {
            AxisLayout::Shard(shard) => Some((axis, shard)),
            AxisLayout::Replicated | AxisLayout::Partial { .. } => None,
        },
        CommAxis::World => None,
    };
    let (dim, range) = match shard {
        Some((axis, shard)) => {
            let (parts, at) = (s.placement.mesh.axis_size(axis), s.placement.coord().on_axis(axis));
            let (start, len) = shard.global_range(out_ty.shape[shard.dim], parts, at);
            (shard.dim, start..start + len)
        }
        // On an axis of one rank, the shard is the whole value.
        None => (0, 0..s.p.type_of(v.x).shape[0]),
    };
    copy_range(s, (v.x, out), dim, range)
}

/// Copies a value and appends zeros up to the size of the result.
pub(super) fn build_pad(s: &LaunchSite<'_>, v: &views::Pad, out: ValueId) -> CudaResult<StepWork> {
    let [bytes, padded] = [v.x, out].map(|v| s.p.type_of(v).byte_size().0);
    let to = s.at(out)?;
    Ok(StepWork::Transfers(vec![
        Transfer::Copy { to, from: s.at(v.x)?, bytes },
        Transfer::Zero { at: to + bytes, bytes: padded - bytes },
    ]))
}

/// Copies the rows of padded parts without their padding.
pub(super) fn build_compact(s: &LaunchSite<'_>, v: &views::Compact, out: ValueId) -> CudaResult<StepWork> {
    let ty = s.p.type_of(v.x);
    let (x, out): (u64, u64) = (s.at(v.x)?, s.at(out)?);
    let row = ty.shape.last().copied().unwrap_or(1) * ty.dtype.element_bytes();
    let units = v.extent / v.unit;
    let each = units.div_ceil(v.parts) * v.unit;
    let copy_part = |at: u64| {
        let (start, len) = tessera_mesh::split_units(units, v.parts as u32, at as u32);
        let to = out + start * v.unit * row;
        Transfer::Copy { to, from: x + at * each * row, bytes: len * v.unit * row }
    };
    Ok(StepWork::Transfers((0..v.parts).map(copy_part).collect()))
}

/// Copies the part of a value that a range of one dim covers.
fn copy_range(
    s: &LaunchSite<'_>,
    (from, to): (ValueId, ValueId),
    dim: usize,
    range: Range<u64>,
) -> CudaResult<StepWork> {
    let ty = s.p.type_of(from);
    let (from, to): (u64, u64) = (s.at(from)?, s.at(to)?);
    let run = ty.shape[dim + 1..].iter().product::<u64>() * ty.dtype.element_bytes();
    let (whole, part) = (ty.shape[dim] * run, (range.end - range.start) * run);
    Ok(StepWork::Transfers(vec![Transfer::CopyRows {
        to: (to, part),
        from: (from + range.start * run, whole),
        bytes: part,
        rows: ty.shape[..dim].iter().product(),
    }]))
}
