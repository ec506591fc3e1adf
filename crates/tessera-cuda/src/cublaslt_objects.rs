//! Owning wrappers of cuBLASLt's objects: the handle, descriptions of a GEMM, of its matrices and of
//! a search for algorithms.
//!
//! Objects of a description copy what they are given, so that only [`LtHandle::launch_gemm`] touches
//! device memory.

#![allow(unsafe_code, reason = "cuBLASLt's own functions")]

use std::ffi::c_void;

use bytemuck::NoUninit;
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtContext, cublasLtMatmulAlgo_t,
    cublasLtMatmulAlgoConfigAttributes_t as Config, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulDescOpaque_t, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatmulPreferenceOpaque_t,
    cublasLtMatrixLayoutOpaque_t, cublasStatus_t, cudaDataType,
};

use crate::driver::{CudaError, CudaResult, CudaStream, cuda_failure};
use crate::dylib::CublasLt;

/// An object of cuBLASLt, destroyed on drop.
#[derive(Debug)]
struct LtObject<T> {
    raw: *mut T,
    // SAFETY: a type only; `drop` states why its argument is valid.
    destroy: unsafe extern "C" fn(*mut T) -> cublasStatus_t,
}

// SAFETY: only the owner of this value uses the object, and cuBLASLt allows any thread to.
unsafe impl<T> Send for LtObject<T> {}

impl<T> LtObject<T> {
    /// Creates an object by a call that writes its address.
    fn new(
        call: &str,
        // SAFETY: a type only; see above.
        destroy: unsafe extern "C" fn(*mut T) -> cublasStatus_t,
        create: impl FnOnce(&mut *mut T) -> cublasStatus_t,
    ) -> CudaResult<LtObject<T>> {
        let mut raw = std::ptr::null_mut();
        check_status(create(&mut raw), call)?;
        Ok(LtObject { raw, destroy })
    }
}

impl<T> Drop for LtObject<T> {
    fn drop(&mut self) {
        // SAFETY: `new` created the object once, and its owner passed the function that destroys it.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// A cuBLASLt handle, with which GEMMs are planned and launched.
#[derive(Debug)]
pub(crate) struct LtHandle {
    lt: CublasLt,
    object: LtObject<cublasLtContext>,
}

/// The description of a GEMM: dtypes, transposes, epilogue, scales.
#[derive(Debug)]
pub(crate) struct GemmDescriptor {
    lt: CublasLt,
    object: LtObject<cublasLtMatmulDescOpaque_t>,
}

/// The layout of one column-major matrix.
#[derive(Debug)]
pub(crate) struct MatrixLayout(LtObject<cublasLtMatrixLayoutOpaque_t>);

/// The limits of a search for algorithms.
#[derive(Debug)]
pub(crate) struct AlgorithmLimits {
    lt: CublasLt,
    object: LtObject<cublasLtMatmulPreferenceOpaque_t>,
}

/// The matrices of a GEMM a · b = out; all three are column-major.
#[derive(Debug)]
pub(crate) struct GemmLayouts {
    pub(crate) a: MatrixLayout,
    pub(crate) b: MatrixLayout,
    pub(crate) out: MatrixLayout,
}

/// Device addresses of a GEMM out = a · b + beta · added, and its workspace with its length in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LtOperands {
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) beta: f32,
    pub(crate) added: u64,
    pub(crate) out: u64,
    pub(crate) workspace: (u64, usize),
}

impl LtHandle {
    pub(crate) fn new(lt: CublasLt) -> CudaResult<LtHandle> {
        // SAFETY: cuBLASLt writes the address of the handle.
        let object = LtObject::new("cublasLtCreate", lt.destroy, |raw| unsafe { (lt.create)(raw) })?;
        Ok(LtHandle { lt, object })
    }

    /// Lists algorithms within the limits, the best first; returns at most `N`.
    ///
    /// # Errors
    /// The status, if cuBLASLt has none.
    pub(crate) fn list_algorithms<const N: usize>(
        &self,
        desc: &GemmDescriptor,
        layouts: &GemmLayouts,
        limits: &AlgorithmLimits,
    ) -> Result<Vec<cublasLtMatmulAlgo_t>, cublasStatus_t> {
        let mut found: [cublasLtMatmulHeuristicResult_t; N] = [EMPTY_RESULT; N];
        let mut count = 0;
        let (a, b, out) = (layouts.a.0.raw, layouts.b.0.raw, layouts.out.0.raw);
        // SAFETY: all objects are alive; cuBLASLt writes at most `N` results and their number.
        let status = unsafe {
            (self.lt.heuristic)(
                self.object.raw,
                desc.object.raw,
                a,
                b,
                out,
                out,
                limits.object.raw,
                N as i32,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if status != cublasStatus_t::CUBLAS_STATUS_SUCCESS || count <= 0 {
            return Err(status);
        }
        Ok(found.iter().take(count as usize).map(|f| f.algo).collect())
    }

    /// Returns the algorithm with the other CTA swizzling, or `None` if cuBLASLt does not support
    /// it within `workspace_bytes`.
    pub(crate) fn with_other_cta_swizzle(
        &self,
        desc: &GemmDescriptor,
        layouts: &GemmLayouts,
        algo: &cublasLtMatmulAlgo_t,
        workspace_bytes: usize,
    ) -> Option<cublasLtMatmulAlgo_t> {
        let attribute = Config::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING;
        let (mut swizzle, mut written) = (0_u32, 0);
        let size = size_of::<u32>();
        // SAFETY: cuBLASLt reads the algorithm and writes one word and one size of this stack frame.
        let read =
            unsafe { (self.lt.algo_get)(algo, attribute, (&raw mut swizzle).cast(), size, &mut written) };
        let mut other = *algo;
        let swizzle = 1 - swizzle.min(1);
        // SAFETY: cuBLASLt reads one word and writes the algorithm, both of this stack frame.
        let set = unsafe { (self.lt.algo_set)(&mut other, attribute, (&raw const swizzle).cast(), size) };
        let mut found = EMPTY_RESULT;
        let (a, b, out) = (layouts.a.0.raw, layouts.b.0.raw, layouts.out.0.raw);
        // SAFETY: all objects are alive; cuBLASLt reads the algorithm and writes one result.
        let taken = unsafe {
            (self.lt.algo_check)(self.object.raw, desc.object.raw, a, b, out, out, &other, &mut found)
        };
        let succeeded =
            [read, set, taken, found.state].iter().all(|s| *s == cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        (succeeded && found.workspaceSize <= workspace_bytes).then_some(other)
    }

    /// Enqueues a GEMM.
    ///
    /// # Safety
    /// Every address must be an allocation of the extent that its layout gives, on the handle's
    /// device, and so must those that `desc` holds. All must stay allocated until the stream has
    /// completed the GEMM, and no other stream may write them, or use the workspace, meanwhile. The
    /// algorithm must be of this description and these layouts.
    pub(crate) unsafe fn launch_gemm(
        &self,
        desc: &GemmDescriptor,
        layouts: &GemmLayouts,
        algo: &cublasLtMatmulAlgo_t,
        operands: LtOperands,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (one, beta) = (1.0_f32, operands.beta);
        let number = |v: &f32| std::ptr::from_ref(v).cast::<c_void>();
        let address = |v: u64| v as *const c_void;
        // SAFETY: all objects are alive; cuBLASLt reads the two factors during this call, and the
        // caller guarantees the addresses.
        let status = unsafe {
            (self.lt.matmul)(
                self.object.raw,
                desc.object.raw,
                number(&one),
                address(operands.a),
                layouts.a.0.raw,
                address(operands.b),
                layouts.b.0.raw,
                number(&beta),
                address(operands.added),
                layouts.out.0.raw,
                operands.out as *mut c_void,
                layouts.out.0.raw,
                algo,
                operands.workspace.0 as *mut c_void,
                operands.workspace.1,
                stream.as_raw().cast(),
            )
        };
        // The status alone does not name what the driver refused.
        check_status(status, "cublasLtMatmul")
            .map_err(|e| CudaError(format!("{e} on a stream {}", stream.describe_state())))
    }
}

impl GemmDescriptor {
    /// Describes a GEMM that accumulates and scales in f32.
    pub(crate) fn new(lt: CublasLt) -> CudaResult<GemmDescriptor> {
        let (compute, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F);
        // SAFETY: cuBLASLt writes the address of the object.
        let create = |raw: &mut _| unsafe { (lt.desc_create)(raw, compute, scale) };
        let object = LtObject::new("cublasLtMatmulDescCreate", lt.desc_destroy, create)?;
        Ok(GemmDescriptor { lt, object })
    }

    /// Sets an attribute, whose size cuBLASLt compares with that of the value.
    pub(crate) fn set<T: NoUninit>(&self, which: Attribute, value: T) -> CudaResult<()> {
        let at = std::ptr::from_ref(&value).cast::<c_void>();
        // SAFETY: the object is alive, and cuBLASLt copies the bytes of the value. An address among
        // them is used by a launch alone, whose caller guarantees it.
        match unsafe { (self.lt.desc_set)(self.object.raw, which, at, size_of::<T>()) } {
            cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
            other => cuda_failure(format!("cublasLtMatmulDescSetAttribute {which:?}: {other:?}")),
        }
    }
}

impl MatrixLayout {
    /// Describes a column-major matrix without padding between its columns.
    pub(crate) fn new(lt: CublasLt, ty: cudaDataType, rows: u64, columns: u64) -> CudaResult<MatrixLayout> {
        // SAFETY: cuBLASLt writes the address of the object.
        let create = |raw: &mut _| unsafe { (lt.layout_create)(raw, ty, rows, columns, rows as i64) };
        LtObject::new("cublasLtMatrixLayoutCreate", lt.layout_destroy, create).map(MatrixLayout)
    }
}

impl AlgorithmLimits {
    pub(crate) fn new(lt: CublasLt) -> CudaResult<AlgorithmLimits> {
        // SAFETY: cuBLASLt writes the address of the object.
        let create = |raw: &mut _| unsafe { (lt.pref_create)(raw) };
        let object = LtObject::new("cublasLtMatmulPreferenceCreate", lt.pref_destroy, create)?;
        Ok(AlgorithmLimits { lt, object })
    }

    /// Sets a limit, whose size cuBLASLt compares with that of the value.
    pub(crate) fn set<T: NoUninit>(&self, which: Preference, value: T) -> CudaResult<()> {
        let at = std::ptr::from_ref(&value).cast::<c_void>();
        // SAFETY: the object is alive, and cuBLASLt copies the bytes of the value.
        let set = unsafe { (self.lt.pref_set)(self.object.raw, which, at, size_of::<T>()) };
        check_status(set, "cublasLtMatmulPreferenceSetAttribute")
    }
}

const EMPTY_RESULT: cublasLtMatmulHeuristicResult_t = cublasLtMatmulHeuristicResult_t {
    algo: cublasLtMatmulAlgo_t { data: [0; 8] },
    workspaceSize: 0,
    state: cublasStatus_t::CUBLAS_STATUS_SUCCESS,
    wavesCount: 0.0,
    reserved: [0; 4],
};

fn check_status(status: cublasStatus_t, call: &str) -> CudaResult<()> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => cuda_failure(format!("{call}: {other:?}")),
    }
}
