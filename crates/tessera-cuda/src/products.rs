//! Products, through cuBLASLt or by a kernel of this crate: out = act(x · wᵀ + bias) + residual, rows of x beside rows of out.
//!
//! What makes a shape is the first algorithm that the library lists among those that do not split the contraction, so that a
//! row's bits depend on the row alone, or one that is faster and gives the same bits ([`tuning`](crate::tuning)); one that ends in GELU
//! or adds a residual is always made by the kernel of this crate where that can. Once frozen, a shape that was not seen before is
//! refused.

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

use crate::choices::Choices;
use crate::compile::Compiler;
use crate::driver::{Done, Memory, Stream, failed};
use crate::tables::CublasLt;
use crate::tuning::{self, Rival};
use crate::warpgroups::{COLUMN_STEP, Cut, Ending, Warpgroups};

/// What one product is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Shape {
    /// Rows of x and out.
    pub(crate) rows: u64,
    /// The extent that is summed over.
    pub(crate) inner: u64,
    /// Rows of w, columns of out.
    pub(crate) columns: u64,
    /// Of x and w: f32, bf16 or e4m3. The result is f32 for f32 and bf16 otherwise.
    pub(crate) dtype: DType,
    /// Whether a bias of the result's dtype is added.
    pub(crate) bias: bool,
    /// Whether the tanh form of GELU follows.
    pub(crate) gelu: bool,
    /// Whether a value of the result's shape is added at the end.
    pub(crate) residual: bool,
}

/// A product of a 14B video generator at 480×832 on one GPU.
#[cfg(test)]
pub(crate) const SQUARE: Shape = Shape {
    rows: 4680,
    inner: 5120,
    columns: 5120,
    dtype: DType::Bf16,
    bias: true,
    gelu: false,
    residual: false,
};

/// Where its operands lie.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct At {
    pub(crate) x: u64,
    pub(crate) w: u64,
    pub(crate) bias: u64,
    pub(crate) residual: u64,
    pub(crate) out: u64,
    /// Scales of rows of x and of w, for e4m3.
    pub(crate) scales: (u64, u64),
    /// Columns that lie elsewhere, which the kernel of this crate alone can see to.
    pub(crate) away: Option<Away>,
}

/// Columns of out that lie by themselves, their rows behind one another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Away {
    /// The first of them, and the first that is none.
    pub(crate) columns: (u64, u64),
    pub(crate) to: u64,
    /// Where the number lies of the row at which they begin; 0 for the first.
    pub(crate) row: u64,
}

/// What makes a product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum By {
    Library(cublasLtMatmulAlgo_t),
    /// The kernel of this crate, in such tiles.
    Own(Cut),
}

/// A product as the library sees it, and what makes it.
#[derive(Debug)]
pub(crate) struct Plan {
    desc: cublasLtMatmulDesc_t,
    x: cublasLtMatrixLayout_t,
    w: cublasLtMatrixLayout_t,
    out: cublasLtMatrixLayout_t,
    pub(crate) by: By,
    /// Whether candidates were timed for it.
    timed: bool,
}

/// Products of one device.
#[derive(Debug)]
pub(crate) struct Products {
    lt: CublasLt,
    /// None on a device without the instructions.
    own: Option<Warpgroups>,
    handle: *mut c_void,
    workspace: Memory,
    plans: BTreeMap<Shape, Plan>,
    pub(crate) choices: Choices,
    /// What is run for a shape that the library has no algorithm for: less of it in the epilogue.
    instead: BTreeMap<Shape, Shape>,
    frozen: bool,
}

/// CUBLAS_OP_T, which is cuBLAS's and not among cuBLASLt's names.
const TRANSPOSED: i32 = 1;

/// Algorithms that the library is asked for.
const LISTED: usize = 16;

/// What NVIDIA advises for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

// SAFETY: the library's objects are used by whoever owns this alone.
#[allow(unsafe_code, reason = "raw handles are owned")]
// SAFETY: as above.
unsafe impl Send for Products {}

impl Products {
    pub(crate) fn new(lt: CublasLt, own: Option<Warpgroups>, choices: Choices) -> Done<Products> {
        let mut handle = std::ptr::null_mut();
        check((lt.create)(&mut handle), "cublasLtCreate")?;
        let workspace = Memory::new(WORKSPACE_BYTES)?;
        Ok(Products {
            lt,
            own,
            handle: handle.cast(),
            workspace,
            plans: BTreeMap::new(),
            choices,
            instead: BTreeMap::new(),
            frozen: false,
        })
    }

    /// Chooses what makes a shape.
    pub(crate) fn prepare(&mut self, shape: Shape, compiler: &mut Compiler) -> Done<()> {
        self.prepare_parted(shape, 0, compiler)
    }

    /// Chooses what makes a shape of which so many columns are to lie by themselves: the library leaves that to a copy.
    pub(crate) fn prepare_parted(&mut self, shape: Shape, columns: u64, compiler: &mut Compiler) -> Done<()> {
        if self.plans.contains_key(&self.form(shape)) {
            return Ok(());
        }
        if self.frozen {
            return failed(format!("a product of {shape:?} after warm-up"));
        }
        // An epilogue is not there for every dtype: what it leaves, another pass does.
        let less = [shape, Shape { gelu: false, ..shape }, Shape { gelu: false, bias: false, ..shape }];
        let mut why = None;
        for candidate in less {
            // Where bits are not the library's, rows must not decide: one of few, on a rank of many, has the bits of one of many.
            let ends = candidate.gelu || candidate.residual;
            let own = self.own.as_mut().filter(|_| ends || tuning::is_large(&candidate));
            let cut = own.and_then(|o| o.cut(&candidate).map(|cut| o.prepare(compiler, cut).map(|()| cut)));
            let always = ends && cut.is_some();
            let planned = match cut.transpose() {
                Err(e) if always => Err(e),
                // Else the library's will do where the kernel does not compile.
                cut => {
                    let rival = |cut| Rival { cut, spared_bytes: 2 * candidate.rows * columns };
                    self.plan(candidate, cut.unwrap_or(None).map(rival))
                }
            };
            match planned {
                Err(e) if always => return Err(e),
                Ok(plan) => {
                    self.plans.insert(candidate, plan);
                    if candidate != shape {
                        self.instead.insert(shape, candidate);
                    }
                    return Ok(());
                }
                Err(e) => why = why.or(Some(e)),
            }
        }
        why.map_or(Ok(()), Err)
    }

    /// The form in which a shape is run: its epilogue may do less than was asked.
    pub(crate) fn form(&self, shape: Shape) -> Shape {
        self.instead.get(&shape).copied().unwrap_or(shape)
    }

    /// Whether so many columns of a shape, and multiples of it, may lie by themselves.
    pub(crate) fn parts(&self, shape: Shape, columns: u64) -> bool {
        let own = self.plans.get(&shape).is_some_and(|plan| matches!(plan.by, By::Own(_)));
        own && columns.is_multiple_of(COLUMN_STEP)
    }

    /// Shapes for which candidates were timed by this process; for others there was a choice already.
    pub(crate) fn timed(&self) -> u32 {
        self.plans.values().filter(|p| p.timed).count() as u32
    }

    /// Whether from here on no algorithm is chosen.
    pub(crate) fn freeze(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    pub(crate) fn run(&mut self, shape: Shape, at: At, stream: &Stream) -> Done<()> {
        match self.plans.get(&shape) {
            Some(plan) => self.launch(shape, plan, at, stream),
            None => failed(format!("no algorithm was chosen for a product of {shape:?}")),
        }
    }

    /// Launches a product as a plan says.
    pub(crate) fn launch(&self, shape: Shape, plan: &Plan, at: At, stream: &Stream) -> Done<()> {
        let algo = match (&plan.by, &self.own) {
            (By::Library(_), _) if at.away.is_some() => {
                return failed("columns of a product of the library's in a place of their own");
            }
            (By::Library(algo), _) => algo,
            (By::Own(cut), Some(own)) => return own.run(*cut, shape, at, stream),
            (By::Own(_), None) => return failed("a product by a kernel that this device has not"),
        };
        if shape.bias {
            set(&self.lt, plan.desc, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at.bias)?;
        }
        if shape.dtype == DType::E4m3 {
            set(&self.lt, plan.desc, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &at.scales.1)?;
            set(&self.lt, plan.desc, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &at.scales.0)?;
        }
        let (one, beta) = (1.0_f32, if shape.residual { 1.0_f32 } else { 0.0 });
        let number = |v: &f32| std::ptr::from_ref(v).cast::<c_void>();
        let address = |v: u64| v as *const c_void;
        let added = if shape.residual { at.residual } else { at.out };
        check(
            (self.lt.matmul)(
                self.handle.cast(),
                plan.desc,
                number(&one),
                address(at.w),
                plan.w,
                address(at.x),
                plan.x,
                number(&beta),
                address(added),
                plan.out,
                at.out as *mut c_void,
                plan.out,
                algo,
                self.workspace.at() as *mut c_void,
                self.workspace.bytes(),
                stream.raw().cast(),
            ),
            "cublasLtMatmul",
        )
    }

    /// An algorithm with its tiles in another order; none where the library does not take it.
    pub(crate) fn reordered(&self, plan: &Plan, algo: &cublasLtMatmulAlgo_t) -> Option<cublasLtMatmulAlgo_t> {
        let which = Config::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING;
        let (mut order, mut written) = (0_u32, 0);
        let size = size_of::<u32>();
        let read = (self.lt.algo_get)(algo, which, (&raw mut order).cast(), size, &mut written);
        let mut other = *algo;
        let order = 1 - order.min(1);
        let set = (self.lt.algo_set)(&mut other, which, (&raw const order).cast(), size);
        let mut found = EMPTY;
        let Plan { desc, x, w, out, .. } = *plan;
        let taken = (self.lt.algo_check)(self.handle.cast(), desc, w, x, out, out, &other, &mut found);
        let good =
            [read, set, taken, found.state].iter().all(|s| *s == cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        (good && found.workspaceSize <= WORKSPACE_BYTES).then_some(other)
    }

    /// The library counts columns first: out and x are read as their transposes, and w stands on the left.
    pub(crate) fn plan(&self, s: Shape, rival: Option<Rival>) -> Done<Plan> {
        let lt = &self.lt;
        let (input, output) = match s.dtype {
            DType::F32 => (cudaDataType::CUDA_R_32F, cudaDataType::CUDA_R_32F),
            DType::Bf16 => (cudaDataType::CUDA_R_16BF, cudaDataType::CUDA_R_16BF),
            DType::E4m3 => (cudaDataType::CUDA_R_8F_E4M3, cudaDataType::CUDA_R_16BF),
            other => return failed(format!("products in {other}")),
        };
        let mut desc = std::ptr::null_mut();
        check(
            (lt.desc_create)(&mut desc, cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F),
            "cublasLtMatmulDescCreate",
        )?;
        set(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        let epilogue = match (s.bias, s.gelu) {
            (false, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT,
            (true, false) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            (false, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU,
            (true, true) => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS,
        };
        set(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as u32))?;
        if s.bias {
            set(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &(output as i32))?;
        }
        if s.dtype == DType::E4m3 {
            let outer = cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as i32;
            set(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &outer)?;
            set(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &outer)?;
            // The library wants to see scales before it chooses; any address will do.
            let somewhere = self.workspace.at();
            set(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &somewhere)?;
            set(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &somewhere)?;
            // Partial sums of the tensor cores are promoted less often: a few units of bf16's last place, a third of the time.
            set(lt, desc, Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1_i8)?;
        }
        let layout = |ty: cudaDataType, rows: u64, columns: u64| -> Done<cublasLtMatrixLayout_t> {
            let mut l = std::ptr::null_mut();
            check((lt.layout_create)(&mut l, ty, rows, columns, rows as i64), "cublasLtMatrixLayoutCreate")?;
            Ok(l)
        };
        let (w, x) = (layout(input, s.inner, s.columns)?, layout(input, s.inner, s.rows)?);
        let out = layout(output, s.columns, s.rows)?;
        let mut pref = std::ptr::null_mut();
        check((lt.pref_create)(&mut pref), "cublasLtMatmulPreferenceCreate")?;
        let limit = |which, value: &dyn Bytes| {
            let (at, size) = value.bytes();
            check((lt.pref_set)(pref, which, at, size), "cublasLtMatmulPreferenceSetAttribute")
        };
        limit(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES)?;
        // None: the contraction is one chain, and no row's bits depend on how many rows there are.
        limit(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &0_u32)?;
        let mut found: [cublasLtMatmulHeuristicResult_t; LISTED] = [EMPTY; LISTED];
        let mut count = 0;
        let asked = (lt.heuristic)(
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
        if asked != cublasStatus_t::CUBLAS_STATUS_SUCCESS || count == 0 {
            return failed(format!("cuBLASLt has no algorithm for a product of {s:?}: {asked:?}"));
        }
        let mut plan = Plan { desc, x, w, out, by: By::Library(found[0].algo), timed: false };
        let listed: Vec<cublasLtMatmulAlgo_t> = found[..count as usize].iter().map(|f| f.algo).collect();
        match rival {
            Some(rival) if rival.cut.ending != Ending::Plain => plan.by = By::Own(rival.cut),
            _ => plan.timed = tuning::tune(self, s, &mut plan, &listed, rival)?,
        }
        Ok(plan)
    }
}

impl Drop for Products {
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

const EMPTY: cublasLtMatmulHeuristicResult_t = cublasLtMatmulHeuristicResult_t {
    algo: cublasLtMatmulAlgo_t { data: [0; 8] },
    workspaceSize: 0,
    state: cublasStatus_t::CUBLAS_STATUS_SUCCESS,
    wavesCount: 0.0,
    reserved: [0; 4],
};

/// A value that a library copies.
trait Bytes {
    fn bytes(&self) -> (*const c_void, usize);
}

impl<T: Copy> Bytes for T {
    fn bytes(&self) -> (*const c_void, usize) {
        (std::ptr::from_ref(self).cast(), size_of::<T>())
    }
}

fn set(lt: &CublasLt, desc: cublasLtMatmulDesc_t, which: Attribute, value: &dyn Bytes) -> Done<()> {
    let (at, size) = value.bytes();
    match (lt.desc_set)(desc, which, at, size) {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => failed(format!("cublasLtMatmulDescSetAttribute {which:?}: {other:?}")),
    }
}

fn check(status: cublasStatus_t, call: &str) -> Done<()> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => failed(format!("{call}: {other:?}")),
    }
}
