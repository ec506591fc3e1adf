//! The plan of one GEMM shape, and its launch by the implementation that the plan names.

#![allow(unsafe_code, reason = "launches of GEMMs on raw addresses")]

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;

use super::cublaslt::{CublasLtGemms, LtDescription};
use super::shape::{GemmKernel, GemmOperands, GemmShape};
use super::sm90::GemmSm90;
use crate::driver::{CudaResult, CudaStream, cuda_failure};

/// cuBLASLt's description of a GEMM, and the chosen implementation.
#[derive(Debug)]
pub(crate) struct GemmPlan {
    pub(super) described: LtDescription,
    pub(crate) kernel: GemmKernel,
    /// Position in cuBLASLt's list of the algorithm that was chosen before tuning.
    pub(super) choice: usize,
    /// Whether candidates were timed for this GEMM.
    pub(crate) was_timed: bool,
}

/// The implementations of GEMMs on one device.
#[derive(Debug)]
pub(crate) struct GemmLauncher {
    pub(crate) cublaslt: CublasLtGemms,
    /// The sm90 kernels; `None` on devices without them.
    pub(crate) sm90: Option<GemmSm90>,
}

impl GemmLauncher {
    /// Returns a plan with the first of cuBLASLt's algorithms, or with the second one if there is one
    /// and `takes_second` is set, and all of them.
    pub(crate) fn build_plan(
        &self,
        s: GemmShape,
        takes_second: bool,
    ) -> CudaResult<(GemmPlan, Vec<cublasLtMatmulAlgo_t>)> {
        let (described, listed) = self.cublaslt.describe_shape(s)?;
        let choice = usize::from(takes_second && listed.len() > 1);
        let kernel = GemmKernel::CublasLt(listed[choice]);
        Ok((GemmPlan { described, kernel, choice, was_timed: false }, listed))
    }

    /// Launches a GEMM with the plan's implementation.
    ///
    /// # Safety
    /// The plan must be of this shape. Every operand that the shape has must be an allocation of the
    /// shape's extent on this device, must stay allocated until the stream has completed the GEMM,
    /// and no other stream may write it meanwhile. One stream at a time may use this value, because
    /// its plans share a workspace.
    pub(crate) unsafe fn launch_plan(
        &self,
        shape: GemmShape,
        plan: &GemmPlan,
        operands: GemmOperands,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        match (&plan.kernel, &self.sm90) {
            (GemmKernel::CublasLt(_), _) if operands.redirected.is_some() => {
                cuda_failure("cuBLASLt cannot redirect columns of a GEMM")
            }
            // SAFETY: the plan's description is of its shape; the caller guarantees the rest.
            (GemmKernel::CublasLt(algo), _) => unsafe {
                self.cublaslt.launch_gemm(shape, &plan.described, algo, operands, stream)
            },
            // SAFETY: the caller guarantees the operands.
            (GemmKernel::Sm90(tile), Some(own)) => unsafe { own.launch_gemm(*tile, shape, operands, stream) },
            (GemmKernel::Sm90(_), None) => cuda_failure("this device does not support the sm90 GEMM kernel"),
        }
    }
}
