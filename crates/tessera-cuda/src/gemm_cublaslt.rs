//! GEMM through cuBLASLt or this crate's sm90 kernel: out = act(x · wᵀ + bias) + residual, with
//! row-major x, w and out.
//!
//! The default algorithm is the top of cuBLASLt's heuristic list without split-K, so that a row's
//! bits depend on the row alone. The autotuner may replace it by a faster one with the same bits
//! ([`autotune`](crate::autotune)). A GEMM with a GELU or residual epilogue always uses the sm90
//! kernel if the kernel supports it. Once frozen, [`Gemms`] refuses new shapes.

use std::collections::BTreeMap;
use std::ffi::c_void;

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulAlgoConfigAttributes_t as Config, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulMatrixScale_t, cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t,
    cublasStatus_t, cudaDataType,
};
use tessera_ir::DType;

use crate::autotune::{self, Sm90Candidate};
use crate::autotune_cache::AutotuneCache;
use crate::compile::Compiler;
use crate::driver::{CudaResult, CudaStream, DeviceMemory, cuda_failure};
use crate::dylib::CublasLt;
use crate::gemm_sm90::{COLUMN_STEP, GemmEpilogue, GemmSm90, GemmTile};

/// The shape, dtype and epilogue of one GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GemmShape {
    /// Rows of x and out.
    pub(crate) rows: u64,
    /// The contracted extent (K).
    pub(crate) inner: u64,
    /// Columns of out, which are the rows of w.
    pub(crate) out_columns: u64,
    /// Dtype of x and w: f32, bf16 or e4m3. The result is f32 for f32 and bf16 otherwise.
    pub(crate) dtype: DType,
    /// Whether a bias of the result's dtype is added.
    pub(crate) bias: bool,
    /// Whether the tanh approximation of GELU follows.
    pub(crate) gelu: bool,
    /// Whether a tensor of the result's shape is added last.
    pub(crate) residual: bool,
}

/// A GEMM of a 14B video generator at 480×832 on one GPU.
#[cfg(test)]
pub(crate) const TEST_SHAPE: GemmShape = GemmShape {
    rows: 4680,
    inner: 5120,
    out_columns: 5120,
    dtype: DType::Bf16,
    bias: true,
    gelu: false,
    residual: false,
};

/// Device addresses of the operands.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GemmOperands {
    pub(crate) x: u64,
    pub(crate) w: u64,
    pub(crate) bias: u64,
    pub(crate) residual: u64,
    pub(crate) out: u64,
    /// Scales per row of x and per row of w, for e4m3.
    pub(crate) scales: (u64, u64),
    /// Columns that are stored elsewhere than in out; only the sm90 kernel supports this.
    pub(crate) redirected: Option<RedirectedColumns>,
}

/// A range of columns of out that is stored as a contiguous matrix of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RedirectedColumns {
    /// The columns, as (first, end).
    pub(crate) columns: (u64, u64),
    pub(crate) address: u64,
    /// Address of the index of the destination row at which the rows begin; 0 to begin at row 0.
    pub(crate) row_address: u64,
}

/// The implementation of a GEMM.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GemmKernel {
    CublasLt(cublasLtMatmulAlgo_t),
    /// This crate's sm90 kernel with this tile.
    Sm90(GemmTile),
}

/// cuBLASLt's descriptors of a GEMM, and the chosen implementation.
#[derive(Debug)]
pub(crate) struct GemmPlan {
    desc: cublasLtMatmulDesc_t,
    x: cublasLtMatrixLayout_t,
    w: cublasLtMatrixLayout_t,
    out: cublasLtMatrixLayout_t,
    pub(crate) kernel: GemmKernel,
    /// Whether candidates were timed for this GEMM.
    was_timed: bool,
}

/// The GEMM plans of one device.
#[derive(Debug)]
pub(crate) struct Gemms {
    lt: CublasLt,
    /// The sm90 kernels; `None` on other devices.
    sm90: Option<GemmSm90>,
    handle: *mut c_void,
    workspace: DeviceMemory,
    plans: BTreeMap<GemmShape, GemmPlan>,
    pub(crate) autotune_cache: AutotuneCache,
    /// Shapes that are executed in place of shapes that cuBLASLt has no algorithm for, with a
    /// smaller epilogue.
    executed_shapes: BTreeMap<GemmShape, GemmShape>,
    frozen: bool,
}

/// CUBLAS_OP_T, which cuBLAS defines but cuBLASLt's bindings do not.
const TRANSPOSED: i32 = 1;

/// The number of algorithms requested from the heuristic.
const MAX_CANDIDATES: usize = 16;

/// NVIDIA's recommendation for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

// SAFETY: only the owner of this value uses the library's objects.
#[allow(unsafe_code, reason = "raw handles are owned")]
// SAFETY: as above.
unsafe impl Send for Gemms {}

impl Gemms {
    pub(crate) fn new(
        lt: CublasLt,
        sm90: Option<GemmSm90>,
        autotune_cache: AutotuneCache,
    ) -> CudaResult<Gemms> {
        let mut handle = std::ptr::null_mut();
        check_status((lt.create)(&mut handle), "cublasLtCreate")?;
        let workspace = DeviceMemory::new(WORKSPACE_BYTES)?;
        Ok(Gemms {
            lt,
            sm90,
            handle: handle.cast(),
            workspace,
            plans: BTreeMap::new(),
            autotune_cache,
            executed_shapes: BTreeMap::new(),
            frozen: false,
        })
    }

    /// Plans a shape: chooses its implementation unless it is planned already.
    pub(crate) fn plan_shape(&mut self, shape: GemmShape, compiler: &mut Compiler) -> CudaResult<()> {
        self.plan_with_redirect(shape, 0, compiler)
    }

    /// Plans a shape of which `columns` columns will be redirected; cuBLASLt needs an extra copy
    /// for them.
    pub(crate) fn plan_with_redirect(
        &mut self,
        shape: GemmShape,
        redirected_columns: u64,
        compiler: &mut Compiler,
    ) -> CudaResult<()> {
        if self.plans.contains_key(&self.executed_shape(shape)) {
            return Ok(());
        }
        if self.frozen {
            return cuda_failure(format!("a GEMM with the new shape {shape:?} after warm-up"));
        }
        // cuBLASLt does not have every epilogue for every dtype: a separate kernel does the rest.
        let epilogues =
            [shape, GemmShape { gelu: false, ..shape }, GemmShape { gelu: false, bias: false, ..shape }];
        let mut first_error = None;
        for candidate in epilogues {
            // If the kernel's bits differ from cuBLASLt's, the choice must not depend on the number
            // of rows: a rank with few rows must compute the same bits as one with many.
            let has_extra_epilogue = candidate.gelu || candidate.residual;
            let sm90 =
                self.sm90.as_mut().filter(|_| has_extra_epilogue || autotune::is_worth_tuning(&candidate));
            let tile = sm90.and_then(|o| {
                o.choose_tile(&candidate).map(|tile| o.prepare_kernel(compiler, tile).map(|()| tile))
            });
            let is_required = has_extra_epilogue && tile.is_some();
            let planned = match tile.transpose() {
                Err(e) if is_required => Err(e),
                // Otherwise cuBLASLt is the fallback if the kernel does not compile.
                tile => {
                    let to_candidate = |tile| Sm90Candidate {
                        tile,
                        saved_copy_bytes: 2 * candidate.rows * redirected_columns,
                    };
                    self.build_plan(candidate, tile.unwrap_or(None).map(to_candidate))
                }
            };
            match planned {
                Err(e) if is_required => return Err(e),
                Ok(plan) => {
                    self.plans.insert(candidate, plan);
                    if candidate != shape {
                        self.executed_shapes.insert(shape, candidate);
                    }
                    return Ok(());
                }
                Err(e) => first_error = first_error.or(Some(e)),
            }
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Returns the shape that is executed for a requested one; its epilogue may be smaller.
    pub(crate) fn executed_shape(&self, shape: GemmShape) -> GemmShape {
        self.executed_shapes.get(&shape).copied().unwrap_or(shape)
    }

    /// Returns whether this many columns of a planned shape, and multiples of them, can be
    /// redirected.
    pub(crate) fn can_redirect(&self, shape: GemmShape, columns: u64) -> bool {
        let own = self.plans.get(&shape).is_some_and(|plan| matches!(plan.kernel, GemmKernel::Sm90(_)));
        own && columns.is_multiple_of(COLUMN_STEP)
    }

    /// Returns the number of shapes whose candidates this process timed; the others were cached or
    /// too small.
    pub(crate) fn timed_count(&self) -> u32 {
        self.plans.values().filter(|p| p.was_timed).count() as u32
    }

    /// Sets whether new shapes are refused.
    pub(crate) fn set_frozen(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    pub(crate) fn run_gemm(
        &mut self,
        shape: GemmShape,
        operands: GemmOperands,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        match self.plans.get(&shape) {
            Some(plan) => self.launch_plan(shape, plan, operands, stream),
            None => cuda_failure(format!("no algorithm was chosen for a GEMM with {shape:?}")),
        }
    }

    /// Launches a GEMM with the plan's implementation.
    pub(crate) fn launch_plan(
        &self,
        shape: GemmShape,
        plan: &GemmPlan,
        operands: GemmOperands,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let algo = match (&plan.kernel, &self.sm90) {
            (GemmKernel::CublasLt(_), _) if operands.redirected.is_some() => {
                return cuda_failure("cuBLASLt cannot redirect columns of a GEMM");
            }
            (GemmKernel::CublasLt(algo), _) => algo,
            (GemmKernel::Sm90(cut), Some(own)) => return own.launch_gemm(*cut, shape, operands, stream),
            (GemmKernel::Sm90(_), None) => {
                return cuda_failure("this device does not support the sm90 GEMM kernel");
            }
        };
        if shape.bias {
            set_desc_attribute(
                &self.lt,
                plan.desc,
                Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                &operands.bias,
            )?;
        }
        if shape.dtype == DType::E4m3 {
            set_desc_attribute(
                &self.lt,
                plan.desc,
                Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                &operands.scales.1,
            )?;
            set_desc_attribute(
                &self.lt,
                plan.desc,
                Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
                &operands.scales.0,
            )?;
        }
        let (one, beta) = (1.0_f32, if shape.residual { 1.0_f32 } else { 0.0 });
        let number = |v: &f32| std::ptr::from_ref(v).cast::<c_void>();
        let address = |v: u64| v as *const c_void;
        let residual = if shape.residual { operands.residual } else { operands.out };
        check_status(
            (self.lt.matmul)(
                self.handle.cast(),
                plan.desc,
                number(&one),
                address(operands.w),
                plan.w,
                address(operands.x),
                plan.x,
                number(&beta),
                address(residual),
                plan.out,
                operands.out as *mut c_void,
                plan.out,
                algo,
                self.workspace.device_address() as *mut c_void,
                self.workspace.byte_len(),
                stream.as_raw().cast(),
            ),
            "cublasLtMatmul",
        )
    }

    /// Returns the algorithm with the other CTA swizzling, or `None` if cuBLASLt does not support
    /// it.
    pub(crate) fn with_other_cta_swizzle(
        &self,
        plan: &GemmPlan,
        algo: &cublasLtMatmulAlgo_t,
    ) -> Option<cublasLtMatmulAlgo_t> {
        let attribute = Config::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING;
        let (mut swizzle, mut written) = (0_u32, 0);
        let size = size_of::<u32>();
        let read = (self.lt.algo_get)(algo, attribute, (&raw mut swizzle).cast(), size, &mut written);
        let mut other = *algo;
        let swizzle = 1 - swizzle.min(1);
        let set = (self.lt.algo_set)(&mut other, attribute, (&raw const swizzle).cast(), size);
        let mut found = EMPTY_RESULT;
        let GemmPlan { desc, x, w, out, .. } = *plan;
        let taken = (self.lt.algo_check)(self.handle.cast(), desc, w, x, out, out, &other, &mut found);
        let succeeded =
            [read, set, taken, found.state].iter().all(|s| *s == cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        (succeeded && found.workspaceSize <= WORKSPACE_BYTES).then_some(other)
    }

    /// Builds a plan. cuBLASLt is column-major: x and out are passed as their transposes, and w
    /// becomes the left operand.
    pub(crate) fn build_plan(&self, s: GemmShape, sm90: Option<Sm90Candidate>) -> CudaResult<GemmPlan> {
        let lt = &self.lt;
        let (input, output) = match s.dtype {
            DType::F32 => (cudaDataType::CUDA_R_32F, cudaDataType::CUDA_R_32F),
            DType::Bf16 => (cudaDataType::CUDA_R_16BF, cudaDataType::CUDA_R_16BF),
            DType::E4m3 => (cudaDataType::CUDA_R_8F_E4M3, cudaDataType::CUDA_R_16BF),
            other => return cuda_failure(format!("GEMM does not support {other}")),
        };
        let mut desc = std::ptr::null_mut();
        check_status(
            (lt.desc_create)(&mut desc, cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F),
            "cublasLtMatmulDescCreate",
        )?;
        set_desc_attribute(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        let epilogue = match (s.bias, s.gelu) {
            (false, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            (true, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (false, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU,
            (true, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS,
        };
        set_desc_attribute(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as u32))?;
        if s.bias {
            set_desc_attribute(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &(output as i32))?;
        }
        if s.dtype == DType::E4m3 {
            let outer = cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as i32;
            set_desc_attribute(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &outer)?;
            set_desc_attribute(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &outer)?;
            // The heuristic requires scale pointers; any address is accepted.
            let placeholder = self.workspace.device_address();
            set_desc_attribute(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &placeholder)?;
            set_desc_attribute(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &placeholder)?;
            // Tensor-core partial sums are promoted less often: an error of a few bf16 ulps for a
            // third of the time.
            set_desc_attribute(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1_i8)?;
        }
        let layout = |ty: cudaDataType, rows: u64, columns: u64| -> CudaResult<cublasLtMatrixLayout_t> {
            let mut l = std::ptr::null_mut();
            check_status(
                (lt.layout_create)(&mut l, ty, rows, columns, rows as i64),
                "cublasLtMatrixLayoutCreate",
            )?;
            Ok(l)
        };
        let (w, x) = (layout(input, s.inner, s.out_columns)?, layout(input, s.inner, s.rows)?);
        let out = layout(output, s.out_columns, s.rows)?;
        let mut pref = std::ptr::null_mut();
        check_status((lt.pref_create)(&mut pref), "cublasLtMatmulPreferenceCreate")?;
        let limit = |which, value: &dyn AttributeValue| {
            let (at, size) = value.as_raw_bytes();
            check_status((lt.pref_set)(pref, which, at, size), "cublasLtMatmulPreferenceSetAttribute")
        };
        limit(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES)?;
        // No split-K reduction: K is summed in one chain, and a row's bits do not depend on the
        // number of rows.
        limit(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &0_u32)?;
        let mut found: [cublasLtMatmulHeuristicResult_t; MAX_CANDIDATES] = [EMPTY_RESULT; MAX_CANDIDATES];
        let mut count = 0;
        let status = (lt.heuristic)(
            self.handle.cast(),
            desc,
            w,
            x,
            out,
            out,
            pref,
            found.len() as i32,
            found.as_mut_ptr(),
            &mut count,
        );
        (lt.pref_destroy)(pref);
        if status != cublasStatus_t::CUBLAS_STATUS_SUCCESS || count == 0 {
            return cuda_failure(format!("cuBLASLt has no algorithm for a GEMM with {s:?}: {status:?}"));
        }
        let mut plan =
            GemmPlan { desc, x, w, out, kernel: GemmKernel::CublasLt(found[0].algo), was_timed: false };
        let listed: Vec<cublasLtMatmulAlgo_t> = found[..count as usize].iter().map(|f| f.algo).collect();
        match sm90 {
            Some(sm90) if sm90.tile.epilogue != GemmEpilogue::Plain => {
                plan.kernel = GemmKernel::Sm90(sm90.tile)
            }
            _ => plan.was_timed = autotune::tune_plan(self, s, &mut plan, &listed, sm90)?,
        }
        Ok(plan)
    }
}

impl Drop for Gemms {
    fn drop(&mut self) {
        for plan in self.plans.values() {
            (self.lt.desc_destroy)(plan.desc);
            for l in [plan.x, plan.w, plan.out] {
                (self.lt.layout_destroy)(l);
            }
        }
        (self.lt.destroy)(self.handle.cast());
    }
}

const EMPTY_RESULT: cublasLtMatmulHeuristicResult_t = cublasLtMatmulHeuristicResult_t {
    algo: cublasLtMatmulAlgo_t { data: [0; 8] },
    workspaceSize: 0,
    state: cublasStatus_t::CUBLAS_STATUS_SUCCESS,
    wavesCount: 0.0,
    reserved: [0; 4],
};

/// An attribute value that a library copies.
trait AttributeValue {
    fn as_raw_bytes(&self) -> (*const c_void, usize);
}

impl<T: Copy> AttributeValue for T {
    fn as_raw_bytes(&self) -> (*const c_void, usize) {
        (std::ptr::from_ref(self).cast(), size_of::<T>())
    }
}

fn set_desc_attribute(
    lt: &CublasLt,
    desc: cublasLtMatmulDesc_t,
    which: Attribute,
    value: &dyn AttributeValue,
) -> CudaResult<()> {
    let (at, size) = value.as_raw_bytes();
    match (lt.desc_set)(desc, which, at, size) {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => cuda_failure(format!("cublasLtMatmulDescSetAttribute {which:?}: {other:?}")),
    }
}

fn check_status(status: cublasStatus_t, call: &str) -> CudaResult<()> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => cuda_failure(format!("{call}: {other:?}")),
    }
}
