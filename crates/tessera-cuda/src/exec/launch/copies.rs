//! Enqueues the ops that only move bytes within this device or to the host.

#![allow(unsafe_code, reason = "copies within the memory of the backend")]

use std::ops::Range;

use tessera_ir::{CommAxis, Op, ValueId, views};
use tessera_mesh::AxisLayout;

use crate::driver::{CudaError, CudaResult, CudaStream};
use crate::exec::CudaBackend;

impl CudaBackend {
    /// Copies an output to the host.
    pub(super) fn copy_output(
        &self,
        program: usize,
        op: &Op,
        v: &views::Output,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (x, bytes) = self.address_and_bytes(program, v.x)?;
        let at = self.host_output_address(program, op)?;
        // SAFETY: x is a value of the program, of this size, and the host memory of the output was
        // allocated for it. The host reads it only after the run.
        unsafe { stream.copy_async(at, x, bytes as usize) }
    }

    /// Copies a value to another value of the same type.
    pub(super) fn copy_value(
        &self,
        program: usize,
        from: ValueId,
        to: ValueId,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (x, bytes) = self.address_and_bytes(program, from)?;
        let out = self.value_address(program, to)?;
        // SAFETY: operand and result are values of the program with equal types.
        unsafe { stream.copy_async(out, x, bytes as usize) }
    }

    /// Copies rows into a buffer, at a row that the call does not choose.
    pub(super) fn copy_cache_rows(
        &self,
        program: usize,
        op: &Op,
        v: &views::CacheWrite,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (x, bytes) = self.address_and_bytes(program, v.x)?;
        let to = self.write_address(program, op, v)?;
        // SAFETY: the shape rule of the op keeps the rows inside the buffer.
        unsafe { stream.copy_async(to, x, bytes as usize) }
    }

    pub(super) fn copy_taken_rows(
        &self,
        program: usize,
        v: &views::TakeRows,
        result: ValueId,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        self.copy_range(program, (v.x, result), 0, v.row..v.row + v.rows, stream)
    }

    pub(super) fn copy_shard(
        &self,
        program: usize,
        v: &views::TakeShard,
        result: ValueId,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let p = &self.programs[program].program;
        let out_ty = p.type_of(result);
        // The operand may already be sharded over other axes; this op shards it only over its own.
        let shard = match v.axis {
            CommAxis::Axis(axis) => match out_ty.layout.on_axis(axis) {
                AxisLayout::Shard(s) => Some((axis, s)),
                AxisLayout::Replicated | AxisLayout::Partial { .. } => None,
            },
            CommAxis::World => None,
        };
        let (dim, range) = match shard {
            Some((axis, s)) => {
                let (parts, at) = (self.placement.mesh.axis_size(axis), self.placement.coord().on_axis(axis));
                let (start, len) = s.global_range(out_ty.shape[s.dim], parts, at);
                (s.dim, start..start + len)
            }
            // On an axis of one rank, the shard is the whole value.
            None => (0, 0..p.type_of(v.x).shape[0]),
        };
        self.copy_range(program, (v.x, result), dim, range, stream)
    }

    /// Copies a value and appends zeros up to the size of the result.
    pub(super) fn copy_padded(
        &self,
        program: usize,
        v: &views::Pad,
        result: ValueId,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (x, bytes) = self.address_and_bytes(program, v.x)?;
        let (out, padded) = self.address_and_bytes(program, result)?;
        // SAFETY: the result is a value of the program, at least as long as the operand.
        unsafe {
            stream.copy_async(out, x, bytes as usize)?;
            stream.zero_async(out + bytes, (padded - bytes) as usize)
        }
    }

    /// Copies the rows of padded parts without their padding.
    pub(super) fn copy_compacted(
        &self,
        program: usize,
        v: &views::Compact,
        result: ValueId,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let ty = self.programs[program].program.type_of(v.x);
        let (x, out) = (self.value_address(program, v.x)?, self.value_address(program, result)?);
        let row = ty.shape.last().copied().unwrap_or(1) * ty.dtype.element_bytes();
        let units = v.extent / v.unit;
        let each = units.div_ceil(v.parts) * v.unit;
        for at in 0..v.parts {
            let (start, len) = tessera_mesh::split_units(units, v.parts as u32, at as u32);
            let (start, len) = (start * v.unit * row, len * v.unit * row);
            // SAFETY: the shape rule of the op gives the operand `parts` padded parts, and the result
            // `extent` rows, of which each part is a different range.
            unsafe { stream.copy_async(out + start, x + at * each * row, len as usize) }?;
        }
        Ok(())
    }

    /// Copies the part of a value that a range of one dim covers.
    fn copy_range(
        &self,
        program: usize,
        (from, to): (ValueId, ValueId),
        dim: usize,
        range: Range<u64>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let ty = self.programs[program].program.type_of(from);
        let (from, to) = (self.value_address(program, from)?, self.value_address(program, to)?);
        let run = ty.shape[dim + 1..].iter().product::<u64>() * ty.dtype.element_bytes();
        let rows = ty.shape[..dim].iter().product::<u64>();
        let (whole, part) = ((ty.shape[dim] * run) as usize, ((range.end - range.start) * run) as usize);
        let (to, from) = ((to, part), (from + range.start * run, whole));
        // SAFETY: operand and result are values of the program; the shape rule of the op keeps the
        // range inside the operand's dim and gives the result its extent.
        unsafe { stream.copy_rows(to, from, part, rows as usize) }
    }

    fn address_and_bytes(&self, program: usize, v: ValueId) -> CudaResult<(u64, u64)> {
        let bytes = self.programs[program].program.type_of(v).byte_size().0;
        Ok((self.value_address(program, v)?, bytes))
    }

    fn host_output_address(&self, program: usize, op: &Op) -> CudaResult<u64> {
        let name = format!("{program}/{}", op.name.as_deref().unwrap_or_default());
        let o =
            self.outputs.get(&name).ok_or_else(|| CudaError(format!("no host memory for output {name}")))?;
        Ok(self.programs[program].host_outputs.device_address() + o.offset as u64)
    }
}
