//! Forms horizontally fused groups at load, and launches them.

#![allow(unsafe_code, reason = "launches on the memory of the backend")]

use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::WeightSource;
use tessera_ir::{Op, OpView, Opcode, Program, ValueId};

use super::{CudaBackend, PreparedProgram, cuda_error};
use crate::driver::{CudaResult, CudaStream, cuda_failure};
use crate::fusion::horizontal_fusion::{find_fusable_groups, fused_gemm_shape, weight_operands};
use crate::fusion::launch_step::FusedGroup;
use crate::gemm::shape::{GemmOperands, GemmShape, RedirectedColumns};

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

    pub(super) fn launch_fused_group(
        &mut self,
        program: usize,
        one: &FusedGroup,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (p, views) = self.program_and_views(program);
        let first = &p.ops[one.fused_ops()[0]];
        let out = self.value_address(program, first.results[0])?;
        match (one, &views[one.fused_ops()[0]]) {
            (FusedGroup::Qkv { matmuls: made, cache_write: write }, OpView::Matmul(v)) => {
                let shape = fused_gemm_shape(&p, v, made.len());
                let away = write.map(|w| self.cache_write_columns(program, made, w)).transpose()?;
                let at = GemmOperands {
                    x: self.value_address(program, v.x)?,
                    w: self.value_address(program, v.w)?,
                    bias: self.optional_address(program, v.bias)?,
                    residual: 0,
                    out,
                    scales: (
                        self.optional_address(program, v.x_scale)?,
                        self.optional_address(program, v.w_scale)?,
                    ),
                    redirected: away,
                };
                // SAFETY: x is a value of the program; weights, biases and scales of the group are
                // contiguous, and so are its results in scratch memory. The redirected columns go to
                // the buffer of the cache write, within which `check_cache_rows` keeps the row.
                unsafe { self.gemms.run_gemm(shape, at, stream) }
            }
            (FusedGroup::Modulations(ops), OpView::Modulation(v)) => {
                let launch = self.build_modulation_launch(program, v, first.results[0], ops.len() as u64)?;
                self.enqueue_launch(&launch, stream)
            }
            _ => cuda_failure(format!("{} is in a group of other ops", first.opcode.name())),
        }
    }

    /// Returns the range of GEMM columns that the cache write stores, and their destination.
    fn cache_write_columns(
        &self,
        program: usize,
        made: &[usize],
        write: usize,
    ) -> CudaResult<RedirectedColumns> {
        let PreparedProgram { program: p, views, .. } = &self.programs[program];
        let OpView::CacheWrite(v) = &views[write] else {
            return cuda_failure(format!("{} writes no cache", p.ops[write].opcode.name()));
        };
        let wide = |i: &usize| p.type_of(p.ops[*i].results[0]).shape[1];
        let before = made.iter().take_while(|i| p.ops[**i].results[0] != v.x);
        let first: u64 = before.map(wide).sum();
        let columns = (first, first + p.type_of(v.x).shape[1]);
        Ok(RedirectedColumns {
            columns,
            address: self.write_address(program, &p.ops[write], v)?,
            row_address: self.optional_address(program, v.row)?,
        })
    }
}
