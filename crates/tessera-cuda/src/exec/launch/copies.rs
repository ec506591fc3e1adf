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
    /// Fills `rows` rows of `bytes` bytes with zeros; `at` is an address with its pitch.
    ZeroRows {
        at: (u64, u64),
        bytes: u64,
        rows: u64,
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

/// Copies a value and appends zeros to one dim, up to the size of the result.
pub(super) fn build_pad(s: &LaunchSite<'_>, v: &views::Pad, out: ValueId) -> CudaResult<StepWork> {
    let (blocks, [bytes, padded]) = measure_blocks(s, v.dim, [v.x, out]);
    let to: u64 = s.at(out)?;
    let copy = Transfer::CopyRows { to: (to, padded), from: (s.at(v.x)?, bytes), bytes, rows: blocks };
    let zero = Transfer::ZeroRows { at: (to + bytes, padded), bytes: padded - bytes, rows: blocks };
    Ok(StepWork::Transfers(vec![copy, zero]))
}

/// Copies the rows of padded parts without their padding.
pub(super) fn build_compact(s: &LaunchSite<'_>, v: &views::Compact, out: ValueId) -> CudaResult<StepWork> {
    let ty = s.p.type_of(v.x);
    let dim = v.dim as usize;
    let (blocks, [padded, bytes]) = measure_blocks(s, dim, [v.x, out]);
    let (x, out): (u64, u64) = (s.at(v.x)?, s.at(out)?);
    let row = ty.shape[dim + 1..].iter().product::<u64>() * ty.dtype.element_bytes();
    let units = v.extent / v.unit;
    let each = units.div_ceil(v.parts) * v.unit;
    let parts = (0..v.parts).map(|at| {
        let (start, len) = tessera_mesh::split_units(units, v.parts as u32, at as u32);
        let (to, from) = (out + start * v.unit * row, x + at * each * row);
        Transfer::CopyRows { to: (to, bytes), from: (from, padded), bytes: len * v.unit * row, rows: blocks }
    });
    Ok(StepWork::Transfers(parts.collect()))
}

/// Returns how many blocks of two values lie before a dim, and the bytes of a block of each.
fn measure_blocks(s: &LaunchSite<'_>, dim: usize, values: [ValueId; 2]) -> (u64, [u64; 2]) {
    let blocks = s.p.type_of(values[0]).shape[..dim].iter().product::<u64>();
    (blocks, values.map(|v| s.p.type_of(v).byte_size().0 / blocks.max(1)))
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
