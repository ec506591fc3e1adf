//! Prepares a loaded program: chooses its kernels, assigns a location to every value, and allocates
//! its buffers, call area and host memory.

use std::collections::btree_map::Entry;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::WeightSource;
use tessera_ir::{DType, Op, OpView, Program, Slots, StreamKind, ValueId, views};

use super::launch::attention::{MAX_KEY_RANGES, attention_key_ranges};
use super::rope_tables::{RopeTables, plan_rope_tables};
use super::transfer_batches::TransferBatches;
use super::{CudaBackend, DeviceBuffer, HostOutput, PreparedProgram, ValueLocation, cuda_error};
use crate::device_memory::{ALIGNMENT, DeviceMemory, PinnedMemory};
use crate::driver::{CudaError, CudaResult, CudaStream};
use crate::fusion::comm_fusion::plan_comm_offloads;
use crate::fusion::horizontal_fusion::assign_scratch;
use crate::fusion::kernel_fusion::plan_launch_steps;
use crate::fusion::launch_step::LaunchStep;
use crate::gemm::shape::{GemmShape, uses_few_rows_kernel};
use crate::kernel_choice::{AttentionRoute, choose_attention};

/// Location of each value of a program, and the memory that these locations need.
struct ValueLayout {
    locations: Vec<ValueLocation>,
    call_area_bytes: u64,
    output_bytes: usize,
}

impl CudaBackend {
    pub(super) fn prepare_program(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        source: &mut dyn WeightSource,
    ) -> Result<PreparedProgram, Diagnostic> {
        let p = &**program;
        let views = CudaBackend::read_views(p)?;
        let broken = |e: CudaError| cuda_error(&format!("@{}", p.name), &e);
        let buffers = self.allocate_buffers(p).map_err(broken)?;
        let joined = self.fuse_horizontally(p, &views, source)?;
        let steps = plan_launch_steps(p, slots, &joined);
        let mut layout = self.locate_values(p, &views, slots, &buffers, source)?;
        self.prepare_gemms(p, &views, &steps).map_err(broken)?;
        let staged_bytes = layout.call_area_bytes as usize;
        let rope_tables = plan_rope_tables(&views, &mut layout.call_area_bytes);
        let call_area = allocate_call_area(layout.call_area_bytes, &rope_tables).map_err(broken)?;
        self.create_streams(p).map_err(broken)?;
        let op_scratch = views.iter().map(|v| op_scratch_bytes(p, v)).max().unwrap_or(0);
        let op_scratch = op_scratch.next_multiple_of(ALIGNMENT as usize);
        let fused_groups =
            steps.iter().filter_map(|s| if let LaunchStep::Fused(j) = s { Some(j) } else { None });
        let (scratch_locations, end) = assign_scratch(p, fused_groups, op_scratch as u64);
        for (v, place) in scratch_locations {
            layout.locations[v.0 as usize] = ValueLocation::Scratch(place);
        }
        Ok(PreparedProgram {
            comm_offloads: plan_comm_offloads(p, slots, &steps),
            steps,
            scratch_bytes: end as usize,
            program: Arc::clone(program),
            views: views.into(),
            locations: layout.locations,
            buffer_indices: buffers,
            rope_tables,
            call_area,
            staged: PinnedMemory::new(staged_bytes).map_err(broken)?,
            staged_bytes,
            host_outputs: PinnedMemory::new(layout.output_bytes).map_err(broken)?,
            graph: None,
            traced_graph: None,
            has_run: false,
        })
    }

    /// Returns the index of the backend's buffer for each buffer of a program.
    fn allocate_buffers(&mut self, p: &Program) -> CudaResult<Vec<usize>> {
        let mut indices = Vec::new();
        for b in &p.buffers {
            let next = self.buffers.len();
            let i = *self.buffer_index.entry(b.name.clone()).or_insert(next);
            if i == next {
                let memory = DeviceMemory::new(b.ty.byte_size().0 as usize)?;
                memory.zero_fill()?;
                self.buffers.push(DeviceBuffer { ty: b.ty.clone(), memory });
            }
            indices.push(i);
        }
        Ok(indices)
    }

    /// Assigns a location to every value, loads the weights, and prepares the kernels of the ops
    /// except GEMMs.
    fn locate_values(
        &mut self,
        p: &Program,
        views: &[OpView],
        slots: &Slots,
        buffers: &[usize],
        source: &mut dyn WeightSource,
    ) -> Result<ValueLayout, Diagnostic> {
        let locations = vec![ValueLocation::NoStorage; p.values.len()];
        let mut layout = ValueLayout { locations, call_area_bytes: 0, output_bytes: 0 };
        for (op, view) in p.ops.iter().zip(views) {
            for r in op.results.iter().filter(|r| !p.type_of(**r).is_token()) {
                let ty = p.type_of(*r);
                layout.locations[r.0 as usize] = match view {
                    OpView::Weight(_) => {
                        ValueLocation::Weight(self.weights.load(&self.placement, p, op, source)?)
                    }
                    OpView::Input(_) | OpView::Call(_) => {
                        let at = layout.call_area_bytes;
                        layout.call_area_bytes = (at + ty.byte_size().0).next_multiple_of(ALIGNMENT);
                        ValueLocation::CallArea(at)
                    }
                    OpView::CacheRead(v) => locate_cache_rows(p, op, v, buffers)?,
                    // The plan assigns a slot to every value that an op writes.
                    _ => locate_slot(p, op, *r, slots)?,
                };
            }
            if let OpView::Output(v) = view {
                let len = p.type_of(v.x).element_count() as usize;
                let (program, offset) = (self.programs.len(), layout.output_bytes);
                let name = format!("{program}/{}", op.name.clone().unwrap_or_default());
                self.outputs.insert(name, HostOutput { program, offset, len, is_current: false });
                layout.output_bytes += (len * 4).next_multiple_of(ALIGNMENT as usize);
            }
            self.prepare_op(p, op, view).map_err(|e| cuda_error(&format!("@{}", p.name), &e))?;
        }
        Ok(layout)
    }

    fn prepare_gemms(&mut self, p: &Program, views: &[OpView], steps: &[LaunchStep]) -> CudaResult<()> {
        for step in steps {
            match *step {
                LaunchStep::Single(i) => self.prepare_gemm(p, &views[i], false)?,
                LaunchStep::GemmResidual { matmul, .. } => self.prepare_gemm(p, &views[matmul], true)?,
                // The kernels of a fused group were prepared when it was formed.
                LaunchStep::ResidualNorm { .. } | LaunchStep::RmsRope { .. } | LaunchStep::Fused(_) => {}
            }
        }
        Ok(())
    }

    /// Creates the streams of a program that no other program has.
    fn create_streams(&mut self, p: &Program) -> CudaResult<()> {
        for name in p.streams.iter().cloned().chain(TransferBatches::side_stream_names(p)) {
            // Communication streams get a higher priority than compute: peers wait for the
            // transfers.
            let urgent = name != StreamKind::Compute.name();
            if let Entry::Vacant(place) = self.streams.entry(name) {
                place.insert(CudaStream::new(urgent)?);
            }
        }
        Ok(())
    }

    /// Chooses the GEMM kernel of a matmul that is not fused horizontally. `residual` selects the
    /// residual epilogue. Does nothing for other ops.
    fn prepare_gemm(&mut self, p: &Program, view: &OpView, residual: bool) -> CudaResult<()> {
        match view {
            OpView::Matmul(v) if !uses_few_rows_kernel(p, v) => {
                let shape = GemmShape { residual, ..GemmShape::from_matmul(p, v) };
                self.gemms.plan_shape(shape, &mut self.kernels.compiler)
            }
            _ => Ok(()),
        }
    }

    /// Compiles and prepares the kernels of an op other than a matmul.
    fn prepare_op(&mut self, p: &Program, op: &Op, view: &OpView) -> CudaResult<()> {
        use OpView as V;
        match view {
            V::LayerNorm(_)
            | V::NormModulate(_)
            | V::GateResidual(_)
            | V::RmsNorm(_)
            | V::RmsScale(_)
            | V::Rope(_)
            | V::RowSquareSum(_)
            | V::Quantize(_) => {
                let x = p.type_of(op.operands[0]);
                self.kernels.prepare_rows(x.shape.last().copied().unwrap_or(1), x.dtype)
            }
            V::Attention(v) => {
                let dtype = p.type_of(v.q).dtype;
                for (shape, _) in attention_key_ranges(p, v) {
                    if choose_attention(&self.capabilities, dtype, &shape) == AttentionRoute::Cudnn {
                        self.attentions.prepare_plan(shape)?;
                    }
                }
                Ok(())
            }
            // Elementwise kernels are compiled when the backend opens, and GEMMs are planned by step.
            #[rustfmt::skip]
            V::Input(_) | V::Call(_) | V::Weight(_) | V::Output(_) | V::CacheRead(_) | V::CacheWrite(_)
            | V::Matmul(_) | V::BiasAct(_) | V::Add(_) | V::Silu(_) | V::Cast(_) | V::Modulation(_)
            | V::Softmax(_) | V::Bmm(_) | V::MoeRoute(_) | V::TimeEmbed(_) | V::Renoise(_) | V::ToX0(_)
            | V::SpaceTimeToDepth(_) | V::DepthToSpaceTime(_) | V::TakeRows(_) | V::TakeShard(_) | V::Pad(_)
            | V::Compact(_) | V::AllReduce(_) | V::AllGather(_) | V::ReduceScatter(_) | V::AllToAll(_)
            | V::Broadcast(_) | V::Send(_) | V::Recv(_) | V::Wait(_) | V::EventRecord(_) => Ok(()),
        }
    }
}

fn locate_cache_rows(
    p: &Program,
    op: &Op,
    v: &views::CacheRead,
    buffers: &[usize],
) -> Result<ValueLocation, Diagnostic> {
    let Some(buffer) = op.buffer else {
        return Err(CudaBackend::unsupported_op_error(p, op, "it names no buffer"));
    };
    let ty = p.type_of(op.results[0]);
    let row_bytes: u64 = ty.shape[1..].iter().product::<u64>() * ty.dtype.element_bytes();
    Ok(ValueLocation::Buffer(buffers[buffer.0 as usize], v.row * row_bytes))
}

fn locate_slot(p: &Program, op: &Op, result: ValueId, slots: &Slots) -> Result<ValueLocation, Diagnostic> {
    match slots.value_slots.get(result.0 as usize).copied().flatten() {
        Some(s) => Ok(ValueLocation::Slot(s as usize)),
        None => Err(CudaBackend::unsupported_op_error(p, op, "the plan assigns its result no slot")),
    }
}

/// Allocates the call area and uploads the tables that do not depend on the call.
fn allocate_call_area(bytes: u64, rope_tables: &[RopeTables]) -> CudaResult<DeviceMemory> {
    let memory = DeviceMemory::new(bytes as usize)?;
    rope_tables.iter().try_for_each(|t| t.upload_static_tables(&memory))?;
    Ok(memory)
}

/// Returns the bytes of scratch that an op needs: only bf16 attention with a bias needs any.
fn op_scratch_bytes(p: &Program, view: &OpView) -> usize {
    let OpView::Attention(v) = view else { return 0 };
    let ty = p.type_of(v.q);
    if v.bias.is_none() || ty.dtype != DType::Bf16 {
        return 0;
    }
    let heads = ty.shape[1] / v.head_dim;
    let outs = (ty.byte_size().0 as usize).next_multiple_of(ALIGNMENT as usize);
    let sums = (heads * ty.shape[0] * 4) as usize;
    MAX_KEY_RANGES * (outs + sums)
}
