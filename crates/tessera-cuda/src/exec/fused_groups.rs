//! Forms horizontally fused groups at load.

use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::WeightSource;
use tessera_ir::{Op, OpView, Opcode, Program, ValueId};

use super::{CudaBackend, cuda_error};
use crate::fusion::horizontal_fusion::{find_fusable_groups, fused_gemm_shape, weight_operands};
use crate::fusion::launch_step::FusedGroup;
use crate::gemm::shape::GemmShape;

impl CudaBackend {
    /// Fuses the candidate groups whose weights are contiguous and for which a GEMM kernel exists.
    /// A cache write is fused only if that kernel can store columns to a second destination.
    pub(super) fn fuse_horizontally(
        &mut self,
        p: &Program,
        views: &[OpView],
        source: &mut dyn WeightSource,
    ) -> Result<Vec<FusedGroup>, Diagnostic> {
        let mut out = Vec::new();
        for one in find_fusable_groups(p) {
            if !self.load_contiguous_weights(p, views, one.fused_ops(), source)? {
                continue;
            }
            match (&one, &views[one.fused_ops()[0]]) {
                (FusedGroup::Qkv { matmuls: made, cache_write: write }, OpView::Matmul(v)) => {
                    let shape = fused_gemm_shape(p, v, made.len());
                    let each = shape.out_columns / made.len() as u64;
                    if self.prepare_fused_gemm(p, made, shape, if write.is_some() { each } else { 0 })? {
                        let write = write.filter(|_| self.gemms.can_redirect(shape, each));
                        out.push(FusedGroup::Qkv { matmuls: Arc::clone(made), cache_write: write });
                    }
                }
                (FusedGroup::Qkv { .. }, _) => {}
                (FusedGroup::Modulations(_), _) => out.push(one),
            }
        }
        Ok(out)
    }

    fn load_contiguous_weights(
        &mut self,
        p: &Program,
        views: &[OpView],
        ops: &[usize],
        source: &mut dyn WeightSource,
    ) -> Result<bool, Diagnostic> {
        let operands: Option<Vec<Vec<ValueId>>> = ops.iter().map(|i| weight_operands(&views[*i])).collect();
        let Some(operands) = operands else { return Ok(false) };
        let defs = p.defining_ops();
        let mut all = true;
        for k in 0..operands[0].len() {
            let made = operands.iter().map(|of_op| defs[of_op[k].0 as usize].map(|d| &p.ops[d]));
            let made: Option<Vec<&Op>> = made.collect();
            let weights = made.filter(|m| m.iter().all(|w| w.opcode == Opcode::Weight));
            all &= match weights {
                Some(weights) => self.weights.load_contiguous(&self.placement, p, &weights, source)?,
                None => false,
            };
        }
        Ok(all)
    }

    /// Prepares a GEMM for the fused matmuls, of which `apart` columns may go to a second
    /// destination. Returns whether one kernel can compute the whole group.
    fn prepare_fused_gemm(
        &mut self,
        p: &Program,
        made: &[usize],
        shape: GemmShape,
        split_columns: u64,
    ) -> Result<bool, Diagnostic> {
        let ty = p.type_of(p.ops[made[0]].results[0]);
        let rows = self.kernels.prepare_rows(ty.shape[1], ty.dtype);
        rows.map_err(|e| cuda_error(&format!("@{}", p.name), &e))?;
        let chosen = self.gemms.plan_with_redirect(shape, split_columns, &mut self.kernels.compiler);
        Ok(chosen.is_ok() && self.gemms.executed_shape(shape) == shape)
    }
}
