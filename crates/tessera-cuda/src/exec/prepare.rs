//! Prepares a loaded program: chooses its kernels, assigns a location to every value, and allocates
//! its buffers, call area and host memory.

use std::collections::btree_map::Entry;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::WeightSource;
use tessera_ir::{DType, Op, Opcode, Program, Slots};

use super::comm_fusion::plan_comm_offloads;
use super::kernel_fusion::{LaunchStep, plan_launch_steps};
use super::rope_tables::plan_rope_tables;
use super::transfer_batches::TransferBatches;
use super::{
    ALIGNMENT, CudaBackend, DeviceBuffer, HostOutput, PreparedProgram, ValueLocation, cuda_error,
    horizontal_fusion,
};
use crate::driver::{CudaError, CudaStream, DeviceMemory, PinnedMemory};

/// Maximum number of key ranges of attention with a bias: before, within and after the biased keys.
pub(super) const MAX_KEY_RANGES: usize = 3;

impl CudaBackend {
    pub(super) fn prepare_program(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        source: &mut dyn WeightSource,
    ) -> Result<PreparedProgram, Diagnostic> {
        let p = &**program;
        if let Some(refusal) = CudaBackend::find_unsupported(p) {
            return Err(refusal);
        }
        let broken = |e: CudaError| cuda_error(&format!("@{}", p.name), &e);
        let mut buffers = Vec::new();
        for b in &p.buffers {
            let next = self.buffers.len();
            let i = *self.buffer_index.entry(b.name.clone()).or_insert(next);
            if i == next {
                let memory = DeviceMemory::new(b.ty.byte_size().0 as usize).map_err(broken)?;
                memory.zero_fill().map_err(broken)?;
                self.buffers.push(DeviceBuffer { ty: b.ty.clone(), memory });
            }
            buffers.push(i);
        }
        let joined = self.fuse_horizontally(p, source)?;
        let steps = plan_launch_steps(p, slots, &joined);
        let mut places = vec![ValueLocation::NoStorage; p.values.len()];
        let (mut call_area_bytes, mut output_bytes) = (0_u64, 0_usize);
        for op in &p.ops {
            for r in &op.results {
                let ty = p.type_of(*r);
                places[r.0 as usize] = match op.opcode {
                    _ if ty.is_token() => ValueLocation::NoStorage,
                    Opcode::Weight => {
                        ValueLocation::Weight(self.weights.load(&self.placement, p, op, source)?)
                    }
                    Opcode::Input | Opcode::Call => {
                        let at = call_area_bytes;
                        call_area_bytes = (call_area_bytes + ty.byte_size().0).next_multiple_of(ALIGNMENT);
                        ValueLocation::CallArea(at)
                    }
                    Opcode::CacheRead => {
                        let width: u64 = ty.shape[1..].iter().product::<u64>() * ty.dtype.element_bytes();
                        let row = op.int_attr("row").unwrap_or(0) as u64;
                        ValueLocation::Buffer(op.buffer.map_or(0, |b| buffers[b.0 as usize]), row * width)
                    }
                    _ => match slots.value_slots.get(r.0 as usize).copied().flatten() {
                        Some(s) => ValueLocation::Slot(s as usize),
                        None => {
                            return Err(CudaBackend::unsupported_op_error(
                                p,
                                op,
                                "the plan assigns its result no slot",
                            ));
                        }
                    },
                };
            }
            if op.opcode == Opcode::Output {
                let len = p.type_of(op.operands[0]).element_count() as usize;
                let name = op.name.clone().unwrap_or_default();
                let output =
                    HostOutput { program: self.programs.len(), offset: output_bytes, len, is_current: false };
                self.outputs.insert(format!("{}/{name}", self.programs.len()), output);
                output_bytes += (len * 4).next_multiple_of(ALIGNMENT as usize);
            }
            self.prepare_op(p, op).map_err(broken)?;
        }
        for step in &steps {
            match *step {
                LaunchStep::Single(i) => self.prepare_gemm(p, &p.ops[i], false).map_err(broken)?,
                LaunchStep::GemmResidual { matmul, .. } => {
                    self.prepare_gemm(p, &p.ops[matmul], true).map_err(broken)?;
                }
                _ => {}
            }
        }
        let staged_bytes = call_area_bytes as usize;
        let turns = plan_rope_tables(p, &mut call_area_bytes);
        let memory = DeviceMemory::new(call_area_bytes as usize).map_err(broken)?;
        for t in &turns {
            t.upload_static_tables(&memory).map_err(broken)?;
        }
        for name in p.streams.iter().cloned().chain(TransferBatches::side_stream_names(p)) {
            // Communication streams get a higher priority than compute: peers wait for the
            // transfers.
            let urgent = name != "compute";
            if let Entry::Vacant(place) = self.streams.entry(name) {
                place.insert(CudaStream::new(urgent).map_err(broken)?);
            }
        }
        let op_scratch = p.ops.iter().map(|o| op_scratch_bytes(p, o)).max().unwrap_or(0);
        let op_scratch = op_scratch.next_multiple_of(ALIGNMENT as usize);
        let fused_groups =
            steps.iter().filter_map(|s| if let LaunchStep::Fused(j) = s { Some(j) } else { None });
        let (scratch_locations, end) = horizontal_fusion::assign_scratch(p, fused_groups, op_scratch as u64);
        for (v, place) in scratch_locations {
            places[v.0 as usize] = place;
        }
        Ok(PreparedProgram {
            comm_offloads: plan_comm_offloads(p, slots, &steps),
            steps,
            scratch_bytes: end as usize,
            program: Arc::clone(program),
            locations: places,
            buffer_indices: buffers,
            rope_tables: turns,
            call_area: memory,
            staged: PinnedMemory::new(staged_bytes).map_err(broken)?,
            staged_bytes,
            host_outputs: PinnedMemory::new(output_bytes).map_err(broken)?,
            graph: None,
            traced_graph: None,
            has_run: false,
        })
    }
}

/// Returns the bytes of scratch that an op needs: only bf16 attention with a bias needs any.
fn op_scratch_bytes(p: &Program, op: &Op) -> usize {
    match (op.opcode, op.operands.first()) {
        (Opcode::Attention, Some(q))
            if op.keyed_operand("bias").is_some() && p.type_of(*q).dtype == DType::Bf16 =>
        {
            let (ty, head) = (p.type_of(*q), op.int_attr("head_dim").unwrap_or(1).max(1) as u64);
            let heads = ty.shape[1] / head;
            let outs = (ty.byte_size().0 as usize).next_multiple_of(ALIGNMENT as usize);
            let sums = (heads * ty.shape[0] * 4) as usize;
            MAX_KEY_RANGES * (outs + sums)
        }
        _ => 0,
    }
}
