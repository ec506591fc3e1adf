//! Enqueues a program's steps on its streams, under graph capture or for an eager run.

mod attention;
mod norms;

use std::collections::BTreeMap;
use std::ops::Range;

use tessera_ir::{Attr, DType, Op, Opcode, Program, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout};

use attention::attention_key_ranges;

use super::comm_fusion::CommOffload;
use super::kernel_fusion::{LaunchStep, uses_few_rows_kernel};
use super::transfer_batches::TransferBatches;
use super::{CudaBackend, ValueLocation};
use crate::collectives::Targets;
use crate::driver::{CudaError, CudaEvent, CudaResult, CudaStream, GraphExec, KernelArgs, cuda_failure};
use crate::gemm_cublaslt::{self, GemmShape};

/// Callback before and after each step, for timing. Takes the launch op, its stream, and whether
/// the step ends.
pub(super) type StepObserver<'a> = dyn FnMut(usize, &CudaStream, bool) -> CudaResult<()> + 'a;

/// A collective whose data its producer step stores, the step before which it opens, and the event
/// that follows the opening.
struct FusedCollective {
    op: usize,
    producer_step: usize,
    open_step: usize,
    targets: Targets,
    opened_event: Option<CudaEvent>,
}

/// Words that each thread moves, as in elements.cu.
const WORDS_PER_THREAD: u64 = 4;

impl CudaBackend {
    /// Chooses the GEMM kernel of a matmul that is not fused horizontally. `residual` selects the
    /// residual epilogue. Does nothing for other ops.
    pub(super) fn prepare_gemm(&mut self, p: &Program, op: &Op, residual: bool) -> CudaResult<()> {
        if op.opcode != Opcode::Matmul || uses_few_rows_kernel(p, op) {
            return Ok(());
        }
        self.gemms.plan_shape(GemmShape { residual, ..gemm_shape(p, op) }, &mut self.kernels.compiler)
    }

    /// Compiles and prepares the kernels of an op other than a matmul.
    pub(super) fn prepare_op(&mut self, p: &Program, op: &Op) -> CudaResult<()> {
        let Some(x) = op.operands.first().map(|v| p.type_of(*v)) else { return Ok(()) };
        let width = x.shape.last().copied().unwrap_or(1);
        match op.opcode {
            Opcode::LayerNorm
            | Opcode::NormModulate
            | Opcode::GateResidual
            | Opcode::RmsNorm
            | Opcode::RmsScale
            | Opcode::Rope
            | Opcode::RowSquareSum => self.kernels.prepare_rows(width, x.dtype),
            Opcode::Attention => {
                for (shape, _) in attention_key_ranges(p, op) {
                    if shape.is_supported_by_cudnn()
                        && x.dtype == DType::Bf16
                        && !self.uses_sm90_attention(&shape)
                    {
                        self.attentions.prepare_plan(shape)?;
                    }
                }
                Ok(())
            }
            Opcode::Quantize => self.kernels.prepare_rows(width, x.dtype),
            _ => Ok(()),
        }
    }

    /// Captures what `launch` enqueues as a graph.
    pub(super) fn capture_graph(
        &mut self,
        program: usize,
        launch: impl FnOnce(&mut CudaBackend) -> CudaResult<()>,
    ) -> CudaResult<GraphExec> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        self.main_stream(&p)?.begin_capture()?;
        let launched = launch(self);
        // The capture must end even after an error: the stream is unusable until then.
        let graph = self.main_stream(&p)?.end_capture();
        launched?;
        graph
    }

    /// Enqueues all steps of a program.
    pub(super) fn enqueue_program(&mut self, program: usize, watch: &mut StepObserver<'_>) -> CudaResult<()> {
        // Moves the streams out, because the backend is borrowed mutably below.
        let streams = std::mem::take(&mut self.streams);
        let done = self.enqueue_on_streams(program, &streams, watch);
        self.streams = streams;
        done
    }

    fn enqueue_on_streams(
        &mut self,
        program: usize,
        streams: &BTreeMap<String, CudaStream>,
        watch: &mut StepObserver<'_>,
    ) -> CudaResult<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let stream = |i: usize| -> CudaResult<&CudaStream> {
            p.streams
                .get(i)
                .and_then(|n| streams.get(n))
                .ok_or_else(|| CudaError(format!("@{} has no stream {i}", p.name)))
        };
        let main = stream(0)?;
        let (area, staged, bytes) = {
            let own = &self.programs[program];
            (own.call_area.device_address(), own.staged.device_address(), own.staged_bytes)
        };
        main.copy_async(area, staged, bytes)?;
        for at in 0..self.programs[program].rope_tables.len() {
            if !self.programs[program].rope_tables[at].is_shared {
                self.launch_frame_rope_table(program, at, main)?;
            }
        }
        // The other streams wait until the call area is filled.
        let area_filled = CudaEvent::new()?;
        main.record_event(&area_filled)?;
        for i in 1..p.streams.len() {
            stream(i)?.wait_event(&area_filled)?;
        }
        let mut events: BTreeMap<ValueId, CudaEvent> = BTreeMap::new();
        let steps = self.programs[program].steps.clone();
        let mut fused_collectives = self.find_fused_collectives(program, &steps)?;
        let mut batches = TransferBatches::from_program(&p);
        for (k, step) in steps.iter().enumerate() {
            let at = step.launch_op();
            let op = &p.ops[at];
            let planned = stream(op.stream.0 as usize)?;
            let own = batches.begin_op(at, planned, streams)?;
            for s in fused_collectives.iter_mut().filter(|s| s.open_step == k) {
                let (maker, lane) =
                    (steps[s.producer_step].launch_op(), stream(p.ops[s.op].stream.0 as usize)?);
                let free = CudaEvent::new()?;
                stream(p.ops[maker].stream.0 as usize)?.record_event(&free)?;
                lane.wait_event(&free)?;
                self.launch_collective_open(program, s.op, lane)?;
                lane.record_event(s.opened_event.insert(CudaEvent::new()?))?;
            }
            for e in &op.after {
                if let Some(e) = events.get(e) {
                    own.wait_event(e)?;
                }
            }
            match op.opcode {
                Opcode::EventRecord => {
                    let e = CudaEvent::new()?;
                    own.record_event(&e)?;
                    events.insert(op.results[0], e);
                }
                Opcode::Wait => {
                    let missing = || CudaError(format!("@{} op {at} waits for an unrecorded event", p.name));
                    own.wait_event(events.get(&op.operands[0]).ok_or_else(missing)?)?;
                }
                _ if op.opcode.is_collective() => {
                    watch(at, own, false)?;
                    if fused_collectives.iter().any(|s| s.op == at) {
                        self.launch_collective_close(program, at, own)?;
                    } else {
                        self.launch_collective(program, at, own)?;
                    }
                    watch(at, own, true)?;
                    if op.issue {
                        let e = CudaEvent::new()?;
                        own.record_event(&e)?;
                        events.insert(op.results[0], e);
                    }
                    batches.end_op(at, planned, own)?;
                }
                _ => {
                    let targets = fused_collectives.iter().find(|s| s.producer_step == k);
                    if let Some(opened) = targets.and_then(|s| s.opened_event.as_ref()) {
                        own.wait_event(opened)?;
                    }
                    watch(at, own, false)?;
                    self.launch_step(program, step, targets.map(|s| &s.targets), own)?;
                    watch(at, own, true)?;
                }
            }
        }
        // The program ends on its first stream.
        for i in 1..p.streams.len() {
            let ended = CudaEvent::new()?;
            stream(i)?.record_event(&ended)?;
            main.wait_event(&ended)?;
        }
        Ok(())
    }

    /// Launches the kernel that computes the frame table of this call.
    fn launch_frame_rope_table(&mut self, program: usize, at: usize, stream: &CudaStream) -> CudaResult<()> {
        let own = &self.programs[program];
        let t = &own.rope_tables[at];
        let start =
            own.program.ops[t.op].keyed_operand("start").map_or(Ok(0), |v| self.value_address(program, v))?;
        let (n, out) = (t.frames * t.frame_pairs(), own.call_area.device_address() + t.frame_table);
        let args = KernelArgs::new()
            .with_address(start)
            .with_int(t.frame_stride)
            .with_int(t.frame_pairs() as i64)
            .with_address(out)
            .with_int(n as i64);
        self.kernels.launch_elementwise("rope_frame_table", n, args, stream)
    }

    /// Returns the device address of a value.
    pub(super) fn value_address(&self, program: usize, v: ValueId) -> CudaResult<u64> {
        let own = &self.programs[program];
        Ok(match own.locations[v.0 as usize] {
            ValueLocation::Slot(s) => {
                let slots =
                    self.slot_memory.as_ref().ok_or_else(|| CudaError("no memory for temporaries".into()))?;
                slots.memory.device_address() + slots.slot_offsets[s]
            }
            ValueLocation::Buffer(b, bytes) => self.buffers[b].memory.device_address() + bytes,
            ValueLocation::Weight(w) => self.weights.shard_address(w),
            ValueLocation::CallArea(bytes) => own.call_area.device_address() + bytes,
            ValueLocation::Scratch(bytes, _) => self.scratch_address()? + bytes,
            ValueLocation::NoStorage => return cuda_failure("a token has no address"),
        })
    }

    /// Returns the start address of the scratch memory, which follows the slots.
    fn scratch_address(&self) -> CudaResult<u64> {
        let slots = self.slot_memory.as_ref().ok_or_else(|| CudaError("no memory for temporaries".into()))?;
        Ok(slots.memory.device_address() + slots.scratch_offset)
    }

    /// Returns the row pitch of a value, in elements.
    fn row_pitch(&self, program: usize, v: ValueId) -> u64 {
        let own = &self.programs[program];
        match own.locations[v.0 as usize] {
            ValueLocation::Scratch(_, pitch) => pitch,
            _ => own.program.type_of(v).shape.last().copied().unwrap_or(1),
        }
    }

    pub(super) fn keyed_address(&self, program: usize, op: &Op, name: &str) -> CudaResult<u64> {
        op.keyed_operand(name).map_or(Ok(0), |v| self.value_address(program, v))
    }

    /// Returns the collectives whose data their producer steps store.
    fn find_fused_collectives(
        &self,
        program: usize,
        steps: &[LaunchStep],
    ) -> CudaResult<Vec<FusedCollective>> {
        let own = &self.programs[program];
        let mut out = Vec::new();
        for (op, carried) in &own.comm_offloads {
            let CommOffload::FusedIntoProducer { producer: maker, open_step: opens, split_dim: along } =
                *carried
            else {
                continue;
            };
            // Of the attention kernels, only the sm90 kernel can store to peers.
            let made = &own.program.ops[steps[maker].launch_op()];
            if made.opcode == Opcode::Attention && !self.is_single_sm90_attention(&own.program, made) {
                continue;
            }
            if let Some(targets) = self.store_targets(program, *op, along)? {
                out.push(FusedCollective {
                    op: *op,
                    producer_step: maker,
                    open_step: opens,
                    targets,
                    opened_event: None,
                });
            }
        }
        Ok(out)
    }

    fn launch_step(
        &mut self,
        program: usize,
        step: &LaunchStep,
        targets: Option<&Targets>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        match *step {
            LaunchStep::Single(i) => self.launch_op(program, i, targets, stream),
            LaunchStep::ResidualNorm { add, norm, quantize } => {
                self.launch_residual_norm(program, add, Some(norm), quantize, stream)
            }
            LaunchStep::RmsRope { norm_or_scale: scale, rope, write } => {
                self.launch_rms_rope(program, scale, rope, write, targets, stream)
            }
            LaunchStep::GemmResidual { matmul, add } => self.launch_gemm(program, matmul, Some(add), stream),
            LaunchStep::Fused(ref joined) => self.launch_fused_group(program, joined, stream),
        }
    }

    fn launch_op(
        &mut self,
        program: usize,
        i: usize,
        targets: Option<&Targets>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let op = &p.ops[i];
        let x = |at: usize| self.value_address(program, op.operands[at]);
        let ty = |at: usize| p.type_of(op.operands[at]);
        let width = |at: usize| ty(at).shape.last().copied().unwrap_or(1);
        let int = |name: &str| op.int_attr(name).unwrap_or(0);
        let out = || self.value_address(program, op.results[0]);
        let elements = op.results.first().map_or(0, |r| p.type_of(*r).element_count());
        let act = activation_code(op);
        match op.opcode {
            Opcode::Matmul => self.launch_gemm(program, i, None, stream),
            Opcode::GateResidual => self.launch_residual_norm(program, Some(i), None, None, stream),
            Opcode::LayerNorm | Opcode::NormModulate => {
                self.launch_residual_norm(program, None, Some(i), None, stream)
            }
            Opcode::RmsNorm | Opcode::RmsScale => {
                self.launch_rms_rope(program, Some(i), None, None, targets, stream)
            }
            Opcode::Rope => self.launch_rms_rope(program, None, Some(i), None, targets, stream),
            Opcode::CacheWrite if self.row_pitch(program, op.operands[0]) != width(0) => {
                self.launch_rms_rope(program, None, None, Some(i), targets, stream)
            }
            Opcode::CacheWrite => self.launch_cache_write(program, op, stream),
            Opcode::Output => {
                let at = self.host_output_address(program, op)?;
                stream.copy_async(at, x(0)?, ty(0).byte_size().0 as usize)
            }
            Opcode::Attention => self.launch_attention(program, op, targets, stream),
            Opcode::RowSquareSum => {
                let second = if op.operands.len() > 1 { x(1)? } else { 0 };
                let args = KernelArgs::new()
                    .with_int(ty(0).shape[0] as i64)
                    .with_address(x(0)?)
                    .with_address(second)
                    .with_address(out()?);
                let args = args.with_int(op.operands.len() as i64);
                self.kernels.launch_rows(
                    "row_square_sum",
                    (ty(0).shape[0], width(0), ty(0).dtype),
                    args,
                    stream,
                )
            }
            Opcode::Add => {
                let args = KernelArgs::new()
                    .with_address(x(0)?)
                    .with_address(x(1)?)
                    .with_address(out()?)
                    .with_long(elements as i64);
                self.kernels.launch_elementwise(
                    kernel_for_dtype(ty(0), "add_f32", "add_bf16"),
                    elements,
                    args,
                    stream,
                )
            }
            Opcode::Silu | Opcode::BiasAct => {
                let bias = if op.operands.len() > 1 { x(1)? } else { 0 };
                let act = if op.opcode == Opcode::Silu { SILU } else { act };
                let (x, out) = (x(0)?, out()?);
                self.launch_bias_act(ty(0), (x, bias, out), act, stream)
            }
            Opcode::Modulation => self.launch_modulation(program, op, 1, stream),
            Opcode::TimeEmbed => {
                let wide = p.type_of(op.results[0]).shape.last().copied().unwrap_or(2);
                let args = KernelArgs::new()
                    .with_address(x(0)?)
                    .with_address(out()?)
                    .with_int(wide as i64)
                    .with_long(elements as i64);
                self.kernels.launch_elementwise("time_embed", elements, args, stream)
            }
            Opcode::Renoise => {
                let first = self.first_global_row(op, ty(0)) * width(0);
                let key = |name: &str| self.keyed_address(program, op, name);
                let args = KernelArgs::new()
                    .with_address(x(0)?)
                    .with_address(key("sigma")?)
                    .with_address(key("seed")?)
                    .with_address(key("chunk")?);
                let args = args
                    .with_address(key("draw")?)
                    .with_long(first as i64)
                    .with_address(out()?)
                    .with_long(elements as i64);
                self.kernels.launch_elementwise("renoise", elements, args, stream)
            }
            Opcode::ToX0 => {
                let args = KernelArgs::new()
                    .with_address(x(0)?)
                    .with_address(x(1)?)
                    .with_address(self.keyed_address(program, op, "sigma")?);
                let args = args.with_address(out()?).with_long(elements as i64);
                self.kernels.launch_elementwise("to_x0", elements, args, stream)
            }
            Opcode::SpaceTimeToDepth | Opcode::DepthToSpaceTime => {
                let back = op.opcode == Opcode::DepthToSpaceTime;
                let pixels = if back { p.type_of(op.results[0]) } else { ty(0) };
                let stride = op.ints_attr("stride").unwrap_or(&[1, 1, 1]);
                let (high, wide) = (pixels.shape[1] as i64 / stride[1], pixels.shape[2] as i64 / stride[2]);
                let args =
                    KernelArgs::new().with_address(x(0)?).with_address(out()?).with_int(high).with_int(wide);
                let args = args
                    .with_int(stride[0])
                    .with_int(stride[1])
                    .with_int(stride[2])
                    .with_int(i64::from(back));
                self.kernels.launch_elementwise(
                    "space_to_depth",
                    elements,
                    args.with_long(elements as i64),
                    stream,
                )
            }
            Opcode::Softmax => {
                let args =
                    KernelArgs::new().with_address(x(0)?).with_address(out()?).with_int(width(0) as i64);
                let rows = elements / width(0).max(1);
                self.kernels.launch_blocks(
                    kernel_for_dtype(ty(0), "softmax_f32", "softmax_bf16"),
                    rows,
                    256,
                    0,
                    args,
                    stream,
                )
            }
            Opcode::Bmm => {
                let shape = &ty(0).shape;
                let (n, k) = (shape[shape.len() - 2], width(0));
                let m = p.type_of(op.results[0]).shape.last().copied().unwrap_or(1);
                let transposed = op.attrs.get("transposed") == Some(&Attr::Bool(true));
                let args = KernelArgs::new()
                    .with_address(x(0)?)
                    .with_address(x(1)?)
                    .with_address(out()?)
                    .with_int(n as i64)
                    .with_int(k as i64)
                    .with_int(m as i64);
                let args = args
                    .with_int(i64::from(transposed))
                    .with_float(op.float_attr("scale").unwrap_or(1.0) as f32);
                self.kernels.launch_elementwise("bmm", elements, args.with_long(elements as i64), stream)
            }
            Opcode::TakeRows => {
                let row = int("row") as u64;
                copy_range(stream, (out()?, x(0)?), ty(0), 0, row..row + int("rows") as u64)
            }
            Opcode::TakeShard => {
                let axis = op.mesh_axis().unwrap_or(Axis::Tp);
                let out_ty = p.type_of(op.results[0]);
                // The operand may already be sharded over other axes; this op shards it only over
                // its own.
                let (dim, range) = match out_ty.layout.on_axis(axis) {
                    AxisLayout::Shard(s) => {
                        let (parts, at) =
                            (self.placement.mesh.axis_size(axis), self.placement.coord().on_axis(axis));
                        let (start, len) = s.global_range(out_ty.shape[s.dim], parts, at);
                        (s.dim, start..start + len)
                    }
                    _ => (0, 0..ty(0).shape[0]),
                };
                copy_range(stream, (out()?, x(0)?), ty(0), dim, range)
            }
            Opcode::Pad => {
                let (from, to) = (ty(0).byte_size().0, p.type_of(op.results[0]).byte_size().0);
                stream.copy_async(out()?, x(0)?, from as usize)?;
                stream.zero_async(out()? + from, (to - from) as usize)
            }
            Opcode::Compact => {
                let (extent, parts, unit) =
                    (int("extent") as u64, int("parts") as u64, int("unit").max(1) as u64);
                let row = width(0) * ty(0).dtype.element_bytes();
                let units = extent / unit;
                let each = units.div_ceil(parts.max(1)) * unit;
                for at in 0..parts {
                    let (start, len) = tessera_mesh::split_units(units, parts as u32, at as u32);
                    let (start, len) = (start * unit * row, len * unit * row);
                    stream.copy_async(out()? + start, x(0)? + at * each * row, len as usize)?;
                }
                Ok(())
            }
            Opcode::Cast => {
                let name = match (ty(0).dtype, p.type_of(op.results[0]).dtype) {
                    (DType::F32, DType::Bf16) => "cast_f32_bf16",
                    (DType::Bf16, DType::F32) => "cast_bf16_f32",
                    (a, b) if a == b => {
                        return stream.copy_async(out()?, x(0)?, ty(0).byte_size().0 as usize);
                    }
                    (a, b) => return cuda_failure(format!("no kernel casts from {a} to {b}")),
                };
                let args =
                    KernelArgs::new().with_address(x(0)?).with_address(out()?).with_long(elements as i64);
                self.kernels.launch_elementwise(name, elements, args, stream)
            }
            Opcode::Quantize => {
                let args = KernelArgs::new()
                    .with_int(ty(0).shape[0] as i64)
                    .with_address(x(0)?)
                    .with_address(out()?);
                let args = args.with_address(self.value_address(program, op.results[1])?);
                self.kernels.launch_rows("quantize", (ty(0).shape[0], width(0), ty(0).dtype), args, stream)
            }
            other => cuda_failure(format!("{} has no kernel", other.name())),
        }
    }

    /// Adds the embedding to `tables` consecutive modulation tables, starting with the op's, and
    /// stores the results consecutively.
    pub(super) fn launch_modulation(
        &mut self,
        program: usize,
        op: &Op,
        tables: u64,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let at = |v: ValueId| self.value_address(program, v);
        let (wide, each) =
            (p.type_of(op.operands[0]).element_count(), p.type_of(op.results[0]).element_count());
        let width = p.type_of(op.operands[1]).shape.last().copied().unwrap_or(1);
        let args = KernelArgs::new()
            .with_address(at(op.operands[0])?)
            .with_address(at(op.operands[1])?)
            .with_address(at(op.results[0])?);
        let args = args
            .with_int(wide as i64)
            .with_int(width as i64)
            .with_int(each as i64)
            .with_long((tables * each) as i64);
        self.kernels.launch_elementwise("modulation", tables * each, args, stream)
    }

    fn launch_bias_act(
        &mut self,
        ty: &Type,
        (x, bias, out): (u64, u64, u64),
        act: i64,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let columns = ty.shape.last().copied().unwrap_or(1) as i64;
        let args = KernelArgs::new()
            .with_address(x)
            .with_address(bias)
            .with_address(out)
            .with_int(columns)
            .with_int(act)
            .with_long(ty.element_count() as i64);
        self.kernels.launch_elementwise(
            kernel_for_dtype(ty, "bias_act_f32", "bias_act_bf16"),
            ty.element_count(),
            args,
            stream,
        )
    }

    fn launch_gemm(
        &mut self,
        program: usize,
        i: usize,
        add: Option<usize>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let op = &p.ops[i];
        let into = &p.ops[add.unwrap_or(i)];
        let mut shape = gemm_shape(&p, op);
        let (x, w) =
            (self.value_address(program, op.operands[0])?, self.value_address(program, op.operands[1])?);
        let (bias, out) =
            (self.keyed_address(program, op, "bias")?, self.value_address(program, into.results[0])?);
        if uses_few_rows_kernel(&p, op) {
            let args = KernelArgs::new()
                .with_address(x)
                .with_address(w)
                .with_address(bias)
                .with_address(out)
                .with_int(shape.rows as i64)
                .with_int(shape.inner as i64);
            let args = args.with_int(shape.out_columns as i64).with_int(activation_code(op));
            return self.kernels.launch_blocks(
                "small_gemm",
                shape.out_columns.div_ceil(8),
                256,
                0,
                args,
                stream,
            );
        }
        let residual = match add {
            Some(a) => self.value_address(program, p.ops[a].operands[0])?,
            None => 0,
        };
        shape.residual = add.is_some();
        let (wanted, shape) = (shape, self.gemms.executed_shape(shape));
        let scales =
            (self.keyed_address(program, op, "x_scale")?, self.keyed_address(program, op, "w_scale")?);
        self.gemms.run_gemm(
            shape,
            gemm_cublaslt::GemmOperands { x, w, bias, residual, out, scales, redirected: None },
            stream,
        )?;
        // Bias and activation that the epilogue does not support run in place afterwards.
        let f32 = shape.dtype == DType::F32;
        let left_bias = if f32 || wanted.bias != shape.bias { bias } else { 0 };
        let left_act = if f32 || activation_code(op) == SILU || wanted.gelu != shape.gelu {
            activation_code(op)
        } else {
            0
        };
        if left_bias == 0 && left_act == 0 {
            return Ok(());
        }
        self.launch_bias_act(p.type_of(into.results[0]), (out, left_bias, out), left_act, stream)
    }

    fn buffer_address(&self, program: usize, op: &Op) -> CudaResult<u64> {
        let own = op.buffer.and_then(|b| self.programs[program].buffer_indices.get(b.0 as usize));
        own.map(|i| self.buffers[*i].memory.device_address())
            .ok_or_else(|| CudaError("a write without a buffer".into()))
    }

    /// Returns the address of the first row that an op writes, if the call's row index is 0.
    pub(super) fn write_address(&self, program: usize, op: &Op) -> CudaResult<u64> {
        let ty = self.programs[program].program.type_of(op.operands[0]);
        let row_bytes = ty.shape[1..].iter().product::<u64>() * ty.dtype.element_bytes();
        Ok(self.buffer_address(program, op)? + op.int_attr("first_row").unwrap_or(0) as u64 * row_bytes)
    }

    /// Launches a cache write at the row index of the call, or at a fixed row if the op has none.
    fn launch_cache_write(&mut self, program: usize, op: &Op, stream: &CudaStream) -> CudaResult<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let ty = p.type_of(op.operands[0]);
        let (from, to) = (self.value_address(program, op.operands[0])?, self.write_address(program, op)?);
        let row_bytes = ty.shape[1..].iter().product::<u64>() * ty.dtype.element_bytes();
        let Some(row) = op.keyed_operand("row") else {
            return stream.copy_async(to, from, ty.byte_size().0 as usize);
        };
        let (name, word) = match row_bytes {
            b if b.is_multiple_of(16) => ("put_rows_16", 16),
            b if b.is_multiple_of(4) => ("put_rows_4", 4),
            _ => ("put_rows_2", 2),
        };
        let n = ty.byte_size().0 / word;
        let args = KernelArgs::new()
            .with_address(from)
            .with_address(to)
            .with_address(self.value_address(program, row)?);
        let args = args.with_long((row_bytes / word) as i64).with_long(n as i64);
        self.kernels.launch_elementwise(name, n.div_ceil(WORDS_PER_THREAD), args, stream)
    }

    fn host_output_address(&self, program: usize, op: &Op) -> CudaResult<u64> {
        let name = format!("{program}/{}", op.name.as_deref().unwrap_or_default());
        let o =
            self.outputs.get(&name).ok_or_else(|| CudaError(format!("no host memory for output {name}")))?;
        Ok(self.programs[program].host_outputs.device_address() + o.offset as u64)
    }

    /// Returns the global index of the first row that this rank holds of a value of an op.
    fn first_global_row(&self, op: &Op, ty: &Type) -> u64 {
        let here = ty
            .layout
            .global_ranges(&ty.shape, &self.placement.mesh, self.placement.coord())
            .first()
            .map_or(0, |r| r.0);
        here + op.int_attr("first_row").unwrap_or(0) as u64
    }
}

const SILU: i64 = 1;
const GELU: i64 = 2;

/// Returns the kernels' code of a matmul's activation; 0 for none.
pub(super) fn activation_code(op: &Op) -> i64 {
    match op.str_attr("act") {
        Some("silu") => SILU,
        Some("gelu_tanh") => GELU,
        _ => 0,
    }
}

/// Selects the f32 or the bf16 kernel by a type.
fn kernel_for_dtype(ty: &Type, single: &'static str, half: &'static str) -> &'static str {
    if ty.dtype == DType::Bf16 { half } else { single }
}

/// Returns the GEMM shape of a matmul op, without a residual.
pub(super) fn gemm_shape(p: &Program, op: &Op) -> GemmShape {
    let (x, w) = (p.type_of(op.operands[0]), p.type_of(op.operands[1]));
    let fused = x.dtype != DType::F32;
    GemmShape {
        rows: x.shape[0],
        inner: x.shape[1],
        out_columns: w.shape[0],
        dtype: x.dtype,
        bias: fused && op.keyed_operand("bias").is_some(),
        gelu: fused && activation_code(op) == GELU,
        residual: false,
    }
}

/// Copies the part of a value that a range of one dim covers.
fn copy_range(
    stream: &CudaStream,
    (to, from): (u64, u64),
    ty: &Type,
    dim: usize,
    range: Range<u64>,
) -> CudaResult<()> {
    let run = ty.shape[dim + 1..].iter().product::<u64>() * ty.dtype.element_bytes();
    let rows = ty.shape[..dim].iter().product::<u64>();
    let (whole, part) = ((ty.shape[dim] * run) as usize, ((range.end - range.start) * run) as usize);
    stream.copy_rows((to, part), (from + range.start * run, whole), part, rows as usize)
}
