//! Launches the kernels, library calls and copies of a step.
//!
//! Every address comes from `value_address`, that is, from memory which the backend owns and frees
//! only after the work on its streams. Extents come from the types of the sealed plan, which also
//! orders the streams. All SAFETY notes of this module and those below it rest on these three facts.

#![allow(unsafe_code, reason = "launches on the memory of the backend")]

pub(super) mod attention;
mod copies;
mod elementwise;
mod norms;

use tessera_ir::{Activation, DType, OpView, Type, ValueId};

use elementwise::bias_act_launch;

use super::CudaBackend;
use crate::collectives::Targets;
use crate::driver::{CudaResult, CudaStream, cuda_failure};
use crate::fusion::launch_step::LaunchStep;
use crate::gemm::shape::{GemmOperands, GemmShape, uses_few_rows_kernel};
use crate::kernel_params::Kernel;
use crate::kernels::KernelLaunch;

impl CudaBackend {
    pub(super) fn launch_step(
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
        use OpView as V;
        let (p, views) = self.program_and_views(program);
        let (op, at) = (&p.ops[i], program);
        let result = || op.results[0];
        let launch = match &views[i] {
            V::Matmul(_) => return self.launch_gemm(at, i, None, stream),
            V::GateResidual(_) => return self.launch_residual_norm(at, Some(i), None, None, stream),
            V::LayerNorm(_) | V::NormModulate(_) => {
                return self.launch_residual_norm(at, None, Some(i), None, stream);
            }
            V::RmsNorm(_) | V::RmsScale(_) => {
                return self.launch_rms_rope(at, Some(i), None, None, targets, stream);
            }
            V::Rope(_) => return self.launch_rms_rope(at, None, Some(i), None, targets, stream),
            V::CacheWrite(v) if self.has_own_pitch(at, v.x) => {
                return self.launch_rms_rope(at, None, None, Some(i), targets, stream);
            }
            V::CacheWrite(v) => match v.row {
                None => return self.copy_cache_rows(at, op, v, stream),
                Some(row) => self.build_put_rows_launch(at, op, v, row)?,
            },
            V::Attention(v) => return self.launch_attention(at, v, result(), targets, stream),
            V::Cast(v) if p.type_of(v.x).dtype == p.type_of(result()).dtype => {
                return self.copy_value(at, v.x, result(), stream);
            }
            V::Output(v) => return self.copy_output(at, op, v, stream),
            V::TakeRows(v) => return self.copy_taken_rows(at, v, result(), stream),
            V::TakeShard(v) => return self.copy_shard(at, v, result(), stream),
            V::Pad(v) => return self.copy_padded(at, v, result(), stream),
            V::Compact(v) => return self.copy_compacted(at, v, result(), stream),
            V::RowSquareSum(v) => self.build_row_square_sum(at, v, result())?,
            V::Quantize(v) => self.build_quantize(at, v, &op.results)?,
            V::Add(v) => self.build_add(at, v, result())?,
            V::Silu(v) => self.build_bias_act(at, (v.x, None), Some(Activation::Silu), result())?,
            V::BiasAct(v) => self.build_bias_act(at, (v.x, Some(v.bias)), v.act, result())?,
            V::Modulation(v) => self.build_modulation_launch(at, v, result(), 1)?,
            V::TimeEmbed(v) => self.build_time_embed(at, v, result())?,
            V::Renoise(v) => self.build_renoise(at, v, result())?,
            V::ToX0(v) => self.build_to_x0(at, v, result())?,
            V::SpaceTimeToDepth(v) => self.build_space_to_depth(at, v.x, result(), v.stride, false)?,
            V::DepthToSpaceTime(v) => self.build_space_to_depth(at, v.x, result(), v.stride, true)?,
            V::Softmax(v) => self.build_softmax(at, v, result())?,
            V::Bmm(v) => self.build_bmm(at, v, result())?,
            V::Cast(v) => self.build_cast(at, v, result())?,
            #[rustfmt::skip]
            V::Input(_) | V::Call(_) | V::Weight(_) | V::CacheRead(_) | V::MoeRoute(_) | V::AllReduce(_)
            | V::AllGather(_) | V::ReduceScatter(_) | V::AllToAll(_) | V::Broadcast(_) | V::Send(_)
            | V::Recv(_) | V::Wait(_) | V::EventRecord(_) => {
                return cuda_failure(format!("{} has no kernel", op.opcode.name()));
            }
        };
        self.enqueue_launch(&launch, stream)
    }

    /// Returns whether the rows of a value are interleaved with those of others.
    fn has_own_pitch(&self, program: usize, v: ValueId) -> bool {
        let ty = self.programs[program].program.type_of(v);
        self.row_pitch(program, v) != ty.shape.last().copied().unwrap_or(1)
    }

    fn launch_gemm(
        &mut self,
        program: usize,
        i: usize,
        add: Option<usize>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (p, views) = self.program_and_views(program);
        let OpView::Matmul(v) = &views[i] else {
            return cuda_failure(format!("{} is not a matmul", p.ops[i].opcode.name()));
        };
        let into = &p.ops[add.unwrap_or(i)];
        let mut shape = GemmShape::from_matmul(&p, v);
        let (x, w) = (self.value_address(program, v.x)?, self.value_address(program, v.w)?);
        let (bias, out) =
            (self.optional_address(program, v.bias)?, self.value_address(program, into.results[0])?);
        if uses_few_rows_kernel(&p, v) {
            let launch = self.build_small_gemm_launch(program, v, out)?;
            return self.enqueue_launch(&launch, stream);
        }
        let residual = match add {
            Some(a) => self.value_address(program, p.ops[a].operands[0])?,
            None => 0,
        };
        shape.residual = add.is_some();
        let (wanted, shape) = (shape, self.gemms.executed_shape(shape));
        let scales = (self.optional_address(program, v.x_scale)?, self.optional_address(program, v.w_scale)?);
        let operands = GemmOperands { x, w, bias, residual, out, scales, redirected: None };
        // SAFETY: the operands are values of the program, of the shape's extents.
        // `unsupported_streams` keeps the GEMMs of a program on one stream.
        unsafe { self.gemms.run_gemm(shape, operands, stream) }?;
        // Bias and activation that the epilogue does not support run in place afterwards.
        let f32 = shape.dtype == DType::F32;
        let left_bias = if f32 || wanted.bias != shape.bias { bias } else { 0 };
        let act_is_left = f32 || v.act == Some(Activation::Silu) || wanted.gelu != shape.gelu;
        let left_act = v.act.filter(|_| act_is_left);
        if left_bias == 0 && left_act.is_none() {
            return Ok(());
        }
        let addresses = (out, left_bias, out);
        let launch = bias_act_launch(p.type_of(into.results[0]), addresses, activation_code(left_act));
        self.enqueue_launch(&launch, stream)
    }

    /// Enqueues a launch that this module or one below it built for an op of the program.
    pub(super) fn enqueue_launch(&mut self, launch: &KernelLaunch, stream: &CudaStream) -> CudaResult<()> {
        // SAFETY: every address of such a launch comes from `value_address` or its kind, and grid and
        // extents from the types of the values, whose shape rules the sealed plan has passed.
        unsafe { self.kernels.launch(launch, stream) }
    }
}

/// Returns the kernels' code of an activation; 0 for none.
fn activation_code(act: Option<Activation>) -> i32 {
    match act {
        None => 0,
        Some(Activation::Silu) => 1,
        Some(Activation::GeluTanh) => 2,
    }
}

/// Selects the f32 or the bf16 kernel by a type.
fn kernel_for_dtype<P>(ty: &Type, single: Kernel<P>, half: Kernel<P>) -> Kernel<P> {
    if ty.dtype == DType::Bf16 { half } else { single }
}
