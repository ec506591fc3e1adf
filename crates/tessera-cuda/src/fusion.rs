//! Which ops of a program one launch computes, and which collectives run inside of other launches.
//!
//! The planners here decide from a program and its planned slots alone, so that tests run them
//! without a GPU.

pub(crate) mod comm_fusion;
pub(crate) mod horizontal_fusion;
pub(crate) mod kernel_fusion;
mod language_fusion;
pub(crate) mod launch_step;
mod slot_check;

use tessera_ir::{Activation, DType, Op, OpView, Opcode, Program, Slots};

use crate::gemm::shape::uses_few_rows_kernel;
use kernel_fusion::plan_launch_steps;

/// Returns the ops that each launch of a program computes, by op index, as the backend fuses them. A
/// GEMM is left out if [`probe_gemms`](tessera_device::Backend::probe_gemms) runs all of it.
#[must_use]
pub fn launched_ops(p: &Program, slots: &Slots) -> Vec<Vec<usize>> {
    let is_whole_gemm = |i: &usize| match p.ops[*i].view() {
        Ok(OpView::Matmul(v)) => {
            let is_planned = p.type_of(v.x).dtype != DType::F32 && !uses_few_rows_kernel(p, &v);
            is_planned && v.act != Some(Activation::Silu)
        }
        _ => false,
    };
    // Horizontal fusion joins launches of one kernel, which stays the same.
    let launches = plan_launch_steps(p, slots, &[]).into_iter().map(|step| step.all_ops());
    launches.filter(|ops| !ops.iter().any(is_whole_gemm)).collect()
}

/// Returns whether a conversion rounds to nearest, as fused kernels do.
fn rounds_to_nearest(op: &Op) -> bool {
    match op.view() {
        Ok(OpView::Cast(v)) => v.stochastic_rounding().is_none(),
        Ok(OpView::Quantize(v)) => v.stochastic_rounding().is_none(),
        _ => true,
    }
}

/// Returns whether the op writes rows of a matrix into a buffer whose rows have the same width.
fn writes_matrix_rows(p: &Program, j: usize) -> bool {
    let op = &p.ops[j];
    let Some(b) = op.buffer else { return false };
    let (from, to) = (p.type_of(op.operands[0]), &p.buffer(b).ty);
    // Rows in pages lie apart.
    let is_in_pages = op.keyed.iter().any(|(name, _)| *name == "pages");
    op.opcode == Opcode::CacheWrite
        && !is_in_pages
        && from.shape.len() == 2
        && from.shape[1..] == to.shape[1..]
}
