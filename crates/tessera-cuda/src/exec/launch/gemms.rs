//! GEMMs of matmuls, alone or as the query, key and value of one operand.

use tessera_ir::{Activation, DType, ValueId, views};

use super::StepWork;
use super::elementwise::{PointwiseFunction, build_small_gemm};
use super::site::{LaunchSite, refuse_segments};
use crate::driver::{CudaResult, cuda_failure};
use crate::fusion::horizontal_fusion::fused_gemm_shape;
use crate::gemm::shape::{GemmOperands, GemmShape, RedirectedColumns, uses_few_rows_kernel};
use crate::kernel_table::{
    GATED_ROW_BF16, GatedRow, MAX_ROW_MATRICES, ROW_MATMULS_BF16, RowMatmuls, RowMatrices, RowMatrix,
};
use crate::kernels::KernelLaunch;

/// Columns of results that a block of matmuls of one row computes, and its threads, as in elements.cu.
const ROW_COLUMNS: u64 = 2;
const ROW_BLOCK: u32 = 256;

/// A GEMM as the plan of its shape may execute it, with the activation that follows.
#[derive(Debug, Clone, Copy)]
pub(in crate::exec) struct GemmWork {
    pub(in crate::exec) shape: GemmShape,
    pub(super) operands: GemmOperands,
    pub(super) act: Option<Activation>,
}

/// Builds a matmul whose result, plus the residual if there is one, goes to `out`.
pub(super) fn build_gemm(
    s: &LaunchSite<'_>,
    v: &views::Matmul,
    residual: Option<ValueId>,
    out: ValueId,
) -> CudaResult<StepWork> {
    refuse_segments(v.segments)?;
    refuse_e4m3_extents(s, v)?;
    if uses_few_rows_kernel(s.p, v) {
        let is_f32 = s.p.type_of(v.x).dtype == DType::F32;
        let launch = if is_f32 { build_small_gemm(s, v, out) } else { build_row_matmuls(s, &[(v, out)]) };
        return launch.map(StepWork::Kernel);
    }
    let shape = GemmShape { residual: residual.is_some(), ..GemmShape::from_matmul(s.p, v) };
    let operands = GemmOperands { residual: s.at_optional(residual)?, ..find_operands(s, v, out)? };
    Ok(StepWork::Gemm(GemmWork { shape, operands, act: v.act }))
}

/// Fails for a matmul in e4m3 whose rows do not begin at multiples of 16 bytes, as every kernel for e4m3 needs.
fn refuse_e4m3_extents(s: &LaunchSite<'_>, v: &views::Matmul) -> CudaResult<()> {
    let w = s.p.type_of(v.w);
    let [columns, inner] = [0, 1].map(|dim| w.shape[dim]);
    if w.dtype == DType::E4m3 && !(inner.is_multiple_of(16) && columns.is_multiple_of(8)) {
        return cuda_failure(format!(
            "an e4m3 matmul of {inner} inputs and {columns} outputs, which are not multiples of 16 and 8: plan with --dtype bf16"
        ));
    }
    Ok(())
}

/// Builds the GEMM of several matmuls of one operand, of which `first` is the first. Weights, biases,
/// scales and results of all of them are contiguous.
pub(super) fn build_qkv(
    s: &LaunchSite<'_>,
    first: &views::Matmul,
    matmuls: &[usize],
    cache_write: Option<(usize, &views::CacheWrite)>,
) -> CudaResult<StepWork> {
    let result = |i: usize| s.p.ops[i].results[0];
    let redirected = match cache_write {
        None => None,
        Some((w, v)) => {
            let before = matmuls.iter().take_while(|i| result(**i) != v.x);
            let first_column: u64 = before.map(|i| s.p.type_of(result(*i)).shape[1]).sum();
            Some(RedirectedColumns {
                columns: (first_column, first_column + s.p.type_of(v.x).shape[1]),
                address: s.write_address(&s.p.ops[w], v)?,
                row_address: s.at_optional(v.row)?,
            })
        }
    };
    let shape = fused_gemm_shape(s.p, first, matmuls.len());
    let operands = GemmOperands { redirected, ..find_operands(s, first, result(matmuls[0]))? };
    Ok(StepWork::Gemm(GemmWork { shape, operands, act: None }))
}

/// Builds the launch of matmuls of one row, given with their results.
pub(super) fn build_row_matmuls(
    s: &LaunchSite<'_>,
    matmuls: &[(&views::Matmul, ValueId)],
) -> CudaResult<KernelLaunch> {
    let Some((first, _)) = matmuls.first() else { return cuda_failure("a launch without matmuls") };
    if matmuls.len() > MAX_ROW_MATRICES {
        return cuda_failure(format!("{} matmuls in one launch", matmuls.len()));
    }
    let mut matrices = RowMatrices::default();
    let mut columns = 0;
    for ((v, out), matrix) in matmuls.iter().zip(&mut matrices.of) {
        let shape = GemmShape::from_matmul(s.p, v);
        columns += shape.out_columns;
        *matrix = RowMatrix {
            w: s.at(v.w)?,
            b: s.at_optional(v.bias)?,
            out: s.at(*out)?,
            columns: shape.out_columns as i32,
            act: PointwiseFunction::from(v.act).0,
        };
    }
    let k = GemmShape::from_matmul(s.p, first).inner as i32;
    let grid = (columns.div_ceil(ROW_COLUMNS), ROW_BLOCK, 0);
    let args = RowMatmuls { x: s.at(first.x)?, k, matrices };
    Ok(KernelLaunch::blocks(ROW_MATMULS_BF16, grid, args).begin_early())
}

/// Builds the launch of two matmuls of one row whose results, multiplied, are `out`.
pub(super) fn build_gated_row(
    s: &LaunchSite<'_>,
    gate: &views::Matmul,
    up: &views::Matmul,
    out: ValueId,
) -> CudaResult<KernelLaunch> {
    let shape = GemmShape::from_matmul(s.p, gate);
    let args = GatedRow {
        x: s.at(gate.x)?,
        gate: s.at(gate.w)?,
        up: s.at(up.w)?,
        out: s.at(out)?,
        k: shape.inner as i32,
        act: PointwiseFunction::from(gate.act).0,
    };
    let grid = (shape.out_columns, ROW_BLOCK, 0);
    Ok(KernelLaunch::blocks(GATED_ROW_BF16, grid, args).begin_early())
}

fn find_operands(s: &LaunchSite<'_>, v: &views::Matmul, out: ValueId) -> CudaResult<GemmOperands> {
    Ok(GemmOperands {
        x: s.at(v.x)?,
        w: s.at(v.w)?,
        bias: s.at_optional(v.bias)?,
        residual: 0,
        out: s.at(out)?,
        scales: (s.at_optional(v.x_scale)?, s.at_optional(v.w_scale)?),
        redirected: None,
    })
}
