//! GEMMs of cuBLASLt: their descriptions, the algorithms that it lists for them, and their launches.

#![allow(unsafe_code, reason = "launches of GEMMs on raw addresses")]

use cudarc::cublaslt::sys::{
    cublasLtEpilogue_t, cublasLtMatmulAlgo_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulMatrixScale_t, cublasLtMatmulPreferenceAttributes_t as Preference, cudaDataType,
};
use tessera_ir::DType;

use super::shape::{GemmOperands, GemmShape};
use crate::cublaslt_objects::{
    AlgorithmLimits, GemmDescriptor, GemmLayouts, LtHandle, LtOperands, MatrixLayout,
};
use crate::device_memory::DeviceMemory;
use crate::driver::{CudaResult, CudaStream, cuda_failure};
use crate::dylib::CublasLt;

/// cuBLASLt on one device, with the workspace that all GEMMs share.
#[derive(Debug)]
pub(crate) struct CublasLtGemms {
    lt: CublasLt,
    workspace: DeviceMemory,
    handle: LtHandle,
}

/// cuBLASLt's descriptors of a GEMM.
#[derive(Debug)]
pub(crate) struct LtDescription {
    desc: GemmDescriptor,
    layouts: GemmLayouts,
}

/// CUBLAS_OP_T, which cuBLAS defines but cuBLASLt's bindings do not.
const TRANSPOSED: i32 = 1;

/// The number of algorithms requested from the heuristic.
const MAX_CANDIDATES: usize = 16;

/// NVIDIA's recommendation for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

impl CublasLtGemms {
    pub(crate) fn new(lt: CublasLt) -> CudaResult<CublasLtGemms> {
        let handle = LtHandle::new(lt)?;
        let workspace = DeviceMemory::new(WORKSPACE_BYTES)?;
        Ok(CublasLtGemms { lt, workspace, handle })
    }

    /// Describes a GEMM and lists the algorithms for it, at least one and the best by the heuristic
    /// first. cuBLASLt is column-major: x and out are passed as their transposes, and w becomes the
    /// left operand.
    pub(crate) fn describe_shape(
        &self,
        s: GemmShape,
    ) -> CudaResult<(LtDescription, Vec<cublasLtMatmulAlgo_t>)> {
        let (input, output) = match s.dtype {
            DType::F32 => (cudaDataType::CUDA_R_32F, cudaDataType::CUDA_R_32F),
            DType::Bf16 => (cudaDataType::CUDA_R_16BF, cudaDataType::CUDA_R_16BF),
            DType::E4m3 => (cudaDataType::CUDA_R_8F_E4M3, cudaDataType::CUDA_R_16BF),
            other => return cuda_failure(format!("GEMM does not support {other}")),
        };
        let desc = self.describe_gemm(s, output)?;
        let layout = |ty, rows, columns| MatrixLayout::new(self.lt, ty, rows, columns);
        let layouts = GemmLayouts {
            a: layout(input, s.inner, s.out_columns)?,
            b: layout(input, s.inner, s.rows)?,
            out: layout(output, s.out_columns, s.rows)?,
        };
        let limits = AlgorithmLimits::new(self.lt)?;
        limits.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES)?;
        // No split-K reduction: K is summed in one chain, and a row's bits do not depend on the
        // number of rows.
        limits.set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, 0_u32)?;
        let listed = match self.handle.list_algorithms::<MAX_CANDIDATES>(&desc, &layouts, &limits) {
            Ok(listed) => listed,
            Err(status) => {
                return cuda_failure(format!("cuBLASLt has no algorithm for a GEMM with {s:?}: {status:?}"));
            }
        };
        Ok((LtDescription { desc, layouts }, listed))
    }

    fn describe_gemm(&self, s: GemmShape, output: cudaDataType) -> CudaResult<GemmDescriptor> {
        let desc = GemmDescriptor::new(self.lt)?;
        desc.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, TRANSPOSED)?;
        let epilogue = match (s.bias, s.gelu) {
            (false, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            (true, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (false, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU,
            (true, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS,
        };
        desc.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as u32)?;
        if s.bias {
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, output as i32)?;
        }
        if s.dtype == DType::E4m3 {
            let outer = cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as i32;
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, outer)?;
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, outer)?;
            // The heuristic requires scale pointers; any address is accepted.
            let placeholder = self.workspace.device_address();
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, placeholder)?;
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, placeholder)?;
            // Tensor-core partial sums are promoted less often: an error of a few bf16 ulps for a
            // third of the time.
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, 1_i8)?;
        }
        Ok(desc)
    }

    /// Returns the algorithm with the other CTA swizzling, or `None` if cuBLASLt does not support
    /// it.
    pub(crate) fn with_other_cta_swizzle(
        &self,
        described: &LtDescription,
        algo: &cublasLtMatmulAlgo_t,
    ) -> Option<cublasLtMatmulAlgo_t> {
        self.handle.with_other_cta_swizzle(&described.desc, &described.layouts, algo, WORKSPACE_BYTES)
    }

    /// Launches a GEMM with an algorithm that was listed for its description.
    ///
    /// # Safety
    /// The description must be of this shape. Every operand that the shape has must be an allocation of
    /// the shape's extent on this device, must stay allocated until the stream has completed the GEMM,
    /// and no other stream may write it meanwhile. One stream at a time may use this value, because its
    /// GEMMs share a workspace.
    pub(crate) unsafe fn launch_gemm(
        &self,
        shape: GemmShape,
        described: &LtDescription,
        algo: &cublasLtMatmulAlgo_t,
        operands: GemmOperands,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        if shape.bias {
            described.desc.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias)?;
        }
        if shape.dtype == DType::E4m3 {
            described.desc.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.scales.1)?;
            described.desc.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.scales.0)?;
        }
        let lt_operands = LtOperands {
            a: operands.w,
            b: operands.x,
            beta: if shape.residual { 1.0 } else { 0.0 },
            added: if shape.residual { operands.residual } else { operands.out },
            out: operands.out,
            workspace: (self.workspace.device_address(), self.workspace.byte_len()),
        };
        // SAFETY: the caller guarantees the operands; the layouts are those of the shape,
        // the algorithm was listed for them, and the workspace belongs to this value.
        unsafe { self.handle.launch_gemm(&described.desc, &described.layouts, algo, lt_operands, stream) }
    }
}
