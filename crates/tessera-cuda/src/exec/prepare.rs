//! Prepares a loaded program: chooses its kernels, assigns a location to every value, and allocates
//! its buffers, call area and host memory.

use std::collections::btree_map::Entry;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::{WeightSource, declared_graph};
use tessera_ir::{DType, Op, OpView, Program, Slots, StreamKind, ValueId, views};

use super::launch::StepWork;
use super::launch::attention::attention_scratch_bytes;
use super::launch::dispatch::build_step;
use super::launch::experts::fused_pack_scratch_bytes;
use super::launch::language::sample_scratch_bytes;
use super::launch::paged_attention::paged_attention_scratch_bytes;
use super::launch::router::distance_scratch_bytes;
use super::launch::site::{LaunchSite, row_bytes};
use super::list_tables::ListTables;
use super::memory::place_in_order;
use super::reduced_operands::place_reduced_operands;
use super::rope_tables::{RopeTables, plan_rope_tables};
use super::transfer_batches::TransferBatches;
use super::wire_words::place_wire_words;
use super::{ChosenIds, CudaBackend, DeviceBuffer, HostOutput, PreparedProgram, ValueLocation, cuda_error};
use crate::device_memory::{ALIGNMENT, DeviceMemory, PinnedMemory};
use crate::driver::{CudaError, CudaResult, CudaStream, cuda_failure};
use crate::fusion::comm_fusion::plan_comm_offloads;
use crate::fusion::horizontal_fusion::assign_scratch;
use crate::fusion::kernel_fusion::plan_launch_steps;
use crate::fusion::launch_step::LaunchStep;
use crate::kernel_choice::{AttentionRoute, choose_attention};

/// Location of each value of a program, and the memory that these locations need.
struct ValueLayout {
    locations: Vec<ValueLocation>,
    call_area_bytes: u64,
    /// Bytes at the begin of the call area that a run copies from the host.
    staged_bytes: u64,
    output_bytes: usize,
    chosen_ids: Vec<ChosenIds>,
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
        self.prepare_steps(p, &views, &steps).map_err(broken)?;
        let staged_bytes = layout.staged_bytes as usize;
        let rope_tables = plan_rope_tables(&views, &mut layout.call_area_bytes);
        let list_tables = ListTables::plan(&views, &mut layout.call_area_bytes);
        let call_area =
            allocate_call_area(layout.call_area_bytes, &rope_tables, &list_tables).map_err(broken)?;
        self.create_streams(p).map_err(broken)?;
        let tiered_layers = self.find_tiered_layers(p, &views, &layout.locations).map_err(broken)?;
        let scratch_of = |v: &OpView| match v {
            OpView::Attention(v) => attention_scratch_bytes(p, v),
            OpView::PagedAttention(v) => paged_attention_scratch_bytes(p, v),
            OpView::Sample(v) => sample_scratch_bytes(p, v),
            OpView::ExpertDistance(v) => distance_scratch_bytes(p, v),
            OpView::ExpertPackFused(v) => fused_pack_scratch_bytes(p, v),
            _ => 0,
        };
        let op_scratch = views.iter().map(scratch_of).max().unwrap_or(0);
        let op_scratch = op_scratch.next_multiple_of(ALIGNMENT as usize);
        let fused_groups =
            steps.iter().filter_map(|s| if let LaunchStep::Fused(j) = s { Some(j) } else { None });
        let (scratch_locations, mut end) = assign_scratch(p, fused_groups, op_scratch as u64);
        let wire_words = place_wire_words(p, &views, &mut end);
        let reduced_operands = place_reduced_operands(p, &views, &layout.locations, &mut end);
        let stays_on_device = self.call_arrays.is_some();
        let device_outputs =
            stays_on_device.then(|| DeviceMemory::new(layout.output_bytes + ALIGNMENT as usize));
        let is_read_by_host = !stays_on_device || !layout.chosen_ids.is_empty();
        let host_output_bytes = if is_read_by_host { layout.output_bytes } else { 0 };
        for (v, place) in scratch_locations {
            layout.locations[v.0 as usize] = ValueLocation::Scratch(place);
        }
        Ok(PreparedProgram {
            comm_offloads: plan_comm_offloads(p, slots, &steps),
            steps,
            scratch_bytes: end as usize,
            slot_offsets: place_in_order(&slots.slot_bytes).0,
            program: Arc::clone(program),
            views: views.into(),
            locations: layout.locations,
            buffer_indices: buffers,
            rope_tables,
            list_tables,
            wire_words,
            reduced_operands,
            tiered_layers,
            call_area,
            staged: PinnedMemory::new(staged_bytes).map_err(broken)?,
            staged_bytes,
            host_outputs: PinnedMemory::new(host_output_bytes).map_err(broken)?,
            device_outputs: device_outputs.transpose().map_err(broken)?,
            device_output_bytes: layout.output_bytes,
            chosen_ids: layout.chosen_ids,
            declared_graph: declared_graph(p)?,
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

    /// Assigns a location to every value, and loads the weights.
    fn locate_values(
        &mut self,
        p: &Program,
        views: &[OpView],
        slots: &Slots,
        buffers: &[usize],
        source: &mut dyn WeightSource,
    ) -> Result<ValueLayout, Diagnostic> {
        let locations = vec![ValueLocation::NoStorage; p.values.len()];
        let mut layout = ValueLayout {
            locations,
            call_area_bytes: 0,
            staged_bytes: 0,
            output_bytes: 0,
            chosen_ids: Vec::new(),
        };
        // The copy from the host that begins a run would overwrite inputs that are on the device already.
        let mut unstaged = Vec::new();
        for (i, (op, view)) in p.ops.iter().zip(views).enumerate() {
            for r in op.results.iter().filter(|r| !p.type_of(**r).is_token()) {
                let ty = p.type_of(*r);
                layout.locations[r.0 as usize] = match view {
                    OpView::Weight(_) => {
                        ValueLocation::Weight(self.weights.load(&self.placement, p, op, source)?)
                    }
                    OpView::Input(_) if self.call_arrays.is_some() => {
                        unstaged.push(*r);
                        ValueLocation::NoStorage
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
            if let OpView::Sample(v) = view {
                let rows = p.type_of(v.logits).shape[0] as usize;
                layout.chosen_ids.push(ChosenIds { op: i, offset: layout.output_bytes, rows });
                layout.output_bytes += (rows * 4).next_multiple_of(ALIGNMENT as usize);
            }
            if let OpView::Output(v) = view {
                let len = p.type_of(v.x).element_count() as usize;
                let (program, offset) = (self.programs.len(), layout.output_bytes);
                let name = format!("{program}/{}", op.name.clone().unwrap_or_default());
                self.outputs.insert(name, HostOutput { program, offset, len, is_current: false });
                layout.output_bytes += (len * 4).next_multiple_of(ALIGNMENT as usize);
            }
        }
        layout.staged_bytes = layout.call_area_bytes;
        for input in unstaged {
            let at = layout.call_area_bytes;
            layout.locations[input.0 as usize] = ValueLocation::CallArea(at);
            layout.call_area_bytes = (at + p.type_of(input).byte_size().0).next_multiple_of(ALIGNMENT);
        }
        Ok(layout)
    }

    /// Compiles and plans what the steps launch. The GEMM of a fused group was planned when the group was formed.
    fn prepare_steps(&mut self, p: &Program, views: &[OpView], steps: &[LaunchStep]) -> CudaResult<()> {
        for step in steps {
            match build_step(&LaunchSite::without_memory(p), views, step, None)? {
                StepWork::Kernel(launch) => self.kernels.prepare_launch(&launch)?,
                StepWork::Kernels(all) => {
                    all.iter().try_for_each(|launch| self.kernels.prepare_launch(launch))?;
                }
                StepWork::Gemm(work) => self.gemms.plan_shape(work.shape, &mut self.kernels.compiler)?,
                StepWork::Attention(work) => {
                    for (shape, _) in &work.parts {
                        if choose_attention(&self.capabilities, DType::Bf16, shape) == AttentionRoute::Cudnn {
                            self.attentions.prepare_plan(*shape)?;
                        }
                    }
                }
                StepWork::Conv(work) => match &mut self.sm90_convs {
                    Some(own) => {
                        let tile = own.choose_tile(&work.shape, work.dtype, work.has_residual);
                        own.prepare_kernel(&mut self.kernels.compiler, tile)?;
                    }
                    None if work.dtype == DType::E4m3 => {
                        return cuda_failure("convolutions in e4m3 need a GPU of sm_90: use --quality exact");
                    }
                    None => {}
                },
                StepWork::Nothing | StepWork::Transfers(_) => {}
            }
        }
        Ok(())
    }

    /// Creates the streams of a program that no other program has.
    fn create_streams(&mut self, p: &Program) -> CudaResult<()> {
        let io = p.ops.iter().any(Op::states_tier).then(|| StreamKind::Io.name().to_string());
        for name in p.streams.iter().cloned().chain(TransferBatches::side_stream_names(p)).chain(io) {
            // Communication streams get a higher priority than compute: peers wait for the
            // transfers.
            let urgent = name != StreamKind::Compute.name();
            if let Entry::Vacant(place) = self.streams.entry(name) {
                place.insert(CudaStream::new(urgent)?);
            }
        }
        Ok(())
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
    Ok(ValueLocation::Buffer(buffers[buffer.0 as usize], v.row * row_bytes(ty)))
}

fn locate_slot(p: &Program, op: &Op, result: ValueId, slots: &Slots) -> Result<ValueLocation, Diagnostic> {
    match slots.value_slots.get(result.0 as usize).copied().flatten() {
        Some(s) => Ok(ValueLocation::Slot(s as usize)),
        None => Err(CudaBackend::unsupported_op_error(p, op, "the plan assigns its result no slot")),
    }
}

/// Allocates the call area and uploads the tables that do not depend on the call.
fn allocate_call_area(
    bytes: u64,
    rope_tables: &[RopeTables],
    list_tables: &ListTables,
) -> CudaResult<DeviceMemory> {
    let memory = DeviceMemory::new(bytes as usize)?;
    rope_tables.iter().try_for_each(|t| t.upload_static_tables(&memory))?;
    list_tables.upload_tables(&memory)?;
    Ok(memory)
}
