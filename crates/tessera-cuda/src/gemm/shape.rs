//! What planning, autotuning and launching of GEMMs share: shapes, operands and the implementations
//! among which they choose.

use std::fmt;

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use tessera_ir::{Activation, DType, Program, views};

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

impl GemmShape {
    /// Returns the shape of a matmul op, without a residual.
    pub(crate) fn from_matmul(p: &Program, v: &views::Matmul) -> GemmShape {
        let (x, w) = (p.type_of(v.x), p.type_of(v.w));
        let fused = x.dtype != DType::F32;
        GemmShape {
            rows: x.shape[0],
            inner: x.shape[1],
            out_columns: w.shape[0],
            dtype: x.dtype,
            bias: fused && v.bias.is_some(),
            gelu: fused && v.act == Some(Activation::GeluTanh),
            residual: false,
        }
    }

    /// Returns the dtype of bias, residual and result.
    pub(crate) fn result_dtype(&self) -> DType {
        if self.dtype == DType::F32 { DType::F32 } else { DType::Bf16 }
    }
}

impl fmt::Display for GemmShape {
    /// Writes `gemm bf16 [4680, 5120] × [5120, 5120]ᵀ, bias`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GemmShape { rows, inner, out_columns, dtype, .. } = self;
        write!(f, "gemm {dtype} [{rows}, {inner}] × [{out_columns}, {inner}]ᵀ")?;
        let parts = [(self.bias, ", bias"), (self.gelu, ", gelu"), (self.residual, ", residual")];
        parts.iter().filter(|(has, _)| *has).try_for_each(|(_, name)| f.write_str(name))
    }
}

/// A GEMM of a 14B video generator at 480×832 on one GPU, as an example.
pub(crate) const VIDEO_GEMM: GemmShape = GemmShape {
    rows: 4680,
    inner: 5120,
    out_columns: 5120,
    dtype: DType::Bf16,
    bias: true,
    gelu: false,
    residual: false,
};

/// Device addresses of the operands and the result of one GEMM; those that its shape does not use
/// are ignored.
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
    /// First column of the range, and the column after its last one.
    pub(crate) columns: (u64, u64),
    pub(crate) address: u64,
    /// Address of the index of the destination row at which the rows begin; 0 to begin at row 0.
    pub(crate) row_address: u64,
}

/// Implementation that runs a GEMM shape, chosen when the shape is planned.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GemmKernel {
    CublasLt(cublasLtMatmulAlgo_t),
    /// This crate's sm90 kernel with this tile.
    Sm90(GemmTile),
}

/// Tile of `tile_rows` × 256 columns of out that a block computes. Each value has its own compiled
/// kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GemmTile {
    /// Rows of out per block: 48, or a multiple of 8 from 96 to 200.
    pub(crate) tile_rows: u64,
    /// Whether the blocks of a cluster share columns and take neighbouring rows; otherwise they
    /// share rows and take neighbouring columns.
    pub(crate) shares_columns: bool,
    pub(crate) epilogue: GemmEpilogue,
}

/// The epilogue after the bias. A residual is added to the rounded result, so that the bits equal
/// those of two separate operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum GemmEpilogue {
    Plain,
    Gelu,
    Residual,
}

/// The sm90 kernel with one tile, as an alternative to cuBLASLt for a shape.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sm90Candidate {
    pub(crate) tile: GemmTile,
    /// Bytes that the kernel stores in place and that would have to be copied from cuBLASLt's
    /// result.
    pub(crate) saved_copy_bytes: u64,
}

/// Multiply-adds from which tuning pays off.
const MIN_MULTIPLY_ADDS: u64 = 5_000_000_000;

/// Returns whether the GEMM is large enough for tuning to pay off.
pub(crate) fn is_worth_tuning(s: &GemmShape) -> bool {
    s.rows * s.out_columns * s.inner >= MIN_MULTIPLY_ADDS && s.dtype != DType::F32
}

/// Maximum rows of an f32 matmul that uses the kernel for few rows, which reads the weights once.
const MAX_FEW_ROWS: u64 = 8;

/// Returns whether a matmul uses the kernel for few rows, which cannot add a residual. In bf16 cuBLASLt is as fast
/// from two rows on.
pub(crate) fn uses_few_rows_kernel(p: &Program, v: &views::Matmul) -> bool {
    let x = p.type_of(v.x);
    match x.dtype {
        DType::F32 => x.shape[0] <= MAX_FEW_ROWS,
        DType::Bf16 => x.shape[0] == 1,
        _ => false,
    }
}
