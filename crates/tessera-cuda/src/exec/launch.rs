//! Builds the device work of a step, and enqueues it.
//!
//! Every address comes from [`LaunchSite`](site::LaunchSite), that is, from memory which the backend
//! owns and frees only after the work on its streams. Extents come from the types of the sealed plan,
//! which also orders the streams. All SAFETY notes of this file rest on these three facts.

#![allow(unsafe_code, reason = "launches on the memory of the backend")]

pub(super) mod attention;
mod copies;
pub(super) mod dispatch;
pub(super) mod elementwise;
pub(super) mod experts;
pub(super) mod frames;
pub(super) mod gemms;
mod heads;
pub(super) mod language;
mod norms;
pub(super) mod paged_attention;
mod relative_attention;
pub(super) mod router;
pub(super) mod site;
pub(super) mod wire;

use tessera_ir::{Activation, DType, Program, views};

use attention::{AttentionWork, attention_key_ranges};
use copies::Transfer;
use dispatch::build_step;
use elementwise::bias_act_launch;
use frames::ConvWork;
use gemms::GemmWork;
use site::LaunchSite;

use super::CudaBackend;
use crate::collectives::Targets;
use crate::driver::{CudaResult, CudaStream, cuda_failure};
use crate::fusion::launch_step::LaunchStep;
use crate::kernel_choice::{AttentionRoute, choose_attention};
use crate::kernels::KernelLaunch;

/// What a step does on the device.
#[derive(Debug)]
pub(super) enum StepWork {
    /// Nothing, or what the enqueuing of collectives and of events does.
    Nothing,
    Kernel(KernelLaunch),
    /// Several launches, each of which reads what those before it wrote.
    Kernels(Vec<KernelLaunch>),
    Gemm(GemmWork),
    Attention(Box<AttentionWork>),
    Conv(Box<ConvWork>),
    Transfers(Vec<Transfer>),
}

impl CudaBackend {
    pub(super) fn launch_step(
        &mut self,
        program: usize,
        step: &LaunchStep,
        targets: Option<&Targets>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let views = &self.programs[program].views;
        match build_step(&LaunchSite::new(self, program), views, step, targets)? {
            StepWork::Nothing => Ok(()),
            StepWork::Kernel(launch) => self.enqueue_launch(&launch, stream),
            StepWork::Kernels(all) => all.iter().try_for_each(|launch| self.enqueue_launch(launch, stream)),
            StepWork::Gemm(work) => self.enqueue_gemm(work, stream),
            StepWork::Attention(work) => self.enqueue_attention(&work, stream),
            StepWork::Conv(work) => self.enqueue_conv(&work, stream),
            StepWork::Transfers(all) => all.iter().try_for_each(|t| enqueue_transfer(*t, stream)),
        }
    }

    /// Enqueues a launch that a function below this module built.
    pub(super) fn enqueue_launch(&mut self, launch: &KernelLaunch, stream: &CudaStream) -> CudaResult<()> {
        // SAFETY: grid and extents come from the types of the values, whose shape rules the sealed plan
        // has passed.
        unsafe { self.kernels.launch(launch, stream) }
    }

    fn enqueue_gemm(&mut self, work: GemmWork, stream: &CudaStream) -> CudaResult<()> {
        let GemmWork { shape: wanted, operands, act } = work;
        let shape = self.gemms.executed_shape(wanted);
        // SAFETY: the operands are values of the program, of the shape's extents. Those of a fused group
        // are contiguous, and `check_cache_rows` keeps redirected rows within their buffer.
        // `unsupported_streams` keeps the GEMMs of a program on one stream.
        unsafe { self.gemms.run_gemm(shape, operands, stream) }?;
        // Bias and activation that the epilogue does not support run in place afterwards.
        let f32 = shape.dtype == DType::F32;
        let left_bias = if f32 || wanted.bias != shape.bias { operands.bias } else { 0 };
        let act_is_left = f32 || act == Some(Activation::Silu) || wanted.gelu != shape.gelu;
        let left_act = act.filter(|_| act_is_left);
        if left_bias == 0 && left_act.is_none() {
            return Ok(());
        }
        let (dtype, extents) = (shape.result_dtype(), (shape.rows * shape.out_columns, shape.out_columns));
        let addresses = (operands.out, left_bias, operands.out);
        self.enqueue_launch(&bias_act_launch(dtype, extents, addresses, left_act.into()), stream)
    }

    fn enqueue_conv(&mut self, work: &ConvWork, stream: &CudaStream) -> CudaResult<()> {
        let Some(own) = &self.sm90_convs else {
            let plain = work.plain.as_ref().map(|plain| self.enqueue_launch(plain, stream));
            return plain.unwrap_or_else(|| cuda_failure("no kernel for a convolution in e4m3"));
        };
        let tile = own.choose_tile(&work.shape, work.dtype, work.has_residual);
        // SAFETY: the operands are values of the program, of the shape's extents.
        unsafe { own.launch_conv(tile, &work.shape, &work.operands, stream) }
    }

    fn enqueue_attention(&mut self, work: &AttentionWork, stream: &CudaStream) -> CudaResult<()> {
        for (shape, at) in &work.parts {
            let route = choose_attention(&self.capabilities, DType::Bf16, shape);
            match &self.sm90_attention {
                Some(flash) if route == AttentionRoute::Sm90 => {
                    // SAFETY: the operands are values of the program, or scratch memory of its extents.
                    // Targets lie in the mapped memory of peers; the stream waits until they are open.
                    unsafe { flash.launch_attention(*shape, *at, work.targets.as_ref(), stream) }
                }
                // SAFETY: as above, and `unsupported_streams` keeps attention on one stream.
                _ => unsafe { self.attentions.run_plan(*shape, *at, stream) },
            }?;
        }
        work.merge.as_ref().map_or(Ok(()), |merge| self.enqueue_launch(merge, stream))
    }

    /// Returns whether attention is a single launch of the sm90 kernel.
    pub(super) fn is_single_sm90_attention(&self, p: &Program, op: &views::Attention) -> bool {
        let dtype = p.type_of(op.q).dtype;
        let is_sm90 = |s| choose_attention(&self.capabilities, dtype, s) == AttentionRoute::Sm90;
        matches!(&attention_key_ranges(p, op)[..], [(shape, _)] if is_sm90(shape))
    }
}

fn enqueue_transfer(transfer: Transfer, stream: &CudaStream) -> CudaResult<()> {
    // SAFETY: both sides are values of the program or the host memory of an output, and the shape rules
    // of the ops keep each range inside of them. The host reads an output only after the run.
    unsafe {
        match transfer {
            Transfer::Copy { to, from, bytes } => stream.copy_async(to, from, bytes as usize),
            Transfer::CopyRows { to, from, bytes, rows } => {
                let ((to, to_pitch), (from, from_pitch)) = (to, from);
                let (to, from) = ((to, to_pitch as usize), (from, from_pitch as usize));
                stream.copy_rows(to, from, bytes as usize, rows as usize)
            }
            Transfer::ZeroRows { at: (at, pitch), bytes, rows } => {
                stream.zero_rows((at, pitch as usize), bytes as usize, rows as usize)
            }
        }
    }
}
