//! GEMMs of matmuls, alone or as the query, key and value of one operand.

use tessera_ir::{Activation, ValueId, views};

use super::StepWork;
use super::elementwise::build_small_gemm;
use super::site::{LaunchSite, refuse_segments};
use crate::driver::CudaResult;
use crate::fusion::horizontal_fusion::fused_gemm_shape;
use crate::gemm::shape::{GemmOperands, GemmShape, RedirectedColumns, uses_few_rows_kernel};

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
    if uses_few_rows_kernel(s.p, v) {
        return build_small_gemm(s, v, out).map(StepWork::Kernel);
    }
    let shape = GemmShape { residual: residual.is_some(), ..GemmShape::from_matmul(s.p, v) };
    let operands = GemmOperands { residual: s.at_optional(residual)?, ..find_operands(s, v, out)? };
    Ok(StepWork::Gemm(GemmWork { shape, operands, act: v.act }))
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
