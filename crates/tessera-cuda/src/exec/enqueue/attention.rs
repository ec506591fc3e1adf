//! Launches attention: the sm90 kernel, a cuDNN plan or the fallback kernel, over one or more ranges
//! of keys.

use std::ops::Range;

use tessera_ir::{DType, Op, Program};

use super::kernel_for_dtype;
use crate::attention_cudnn;
use crate::attention_sm90::AttentionSm90;
use crate::collectives::Targets;
use crate::driver::{CudaResult, CudaStream, KernelArgs};
use crate::exec::prepare::MAX_KEY_RANGES;
use crate::exec::{ALIGNMENT, CudaBackend};

impl CudaBackend {
    pub(super) fn launch_attention(
        &mut self,
        program: usize,
        op: &Op,
        targets: Option<&Targets>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let at = |i: usize| self.value_address(program, op.operands[i]);
        let (q, k, v, out) = (at(0)?, at(1)?, at(2)?, self.value_address(program, op.results[0])?);
        let (ty, bias) = (p.type_of(op.operands[0]), self.keyed_address(program, op, "bias")?);
        let parts = attention_key_ranges(&p, op);
        if ty.dtype != DType::Bf16 || !parts.iter().all(|(s, _)| s.is_supported_by_cudnn()) {
            let (s, _) = attention_shape(&p, op);
            let rows = op.ints_attr("bias_rows").unwrap_or(&[0, 0]);
            let args = KernelArgs::new()
                .with_address(q)
                .with_address(k)
                .with_address(v)
                .with_address(bias)
                .with_int(rows[0])
                .with_int(rows[1])
                .with_address(out);
            let args = args
                .with_int(s.queries as i64)
                .with_int(s.keys as i64)
                .with_int(s.heads as i64)
                .with_int(s.head_size as i64);
            let name = kernel_for_dtype(ty, "attention_f32", "attention_bf16");
            let shared = (4 * s.head_size * 4) as u32;
            let args = args.with_float(1.0 / (s.head_size as f32).sqrt());
            return self.kernels.launch_blocks(
                name,
                (s.queries * s.heads).div_ceil(4),
                128,
                shared,
                args,
                stream,
            );
        }
        if let [(shape, _)] = parts[..] {
            return self.run_attention(
                shape,
                attention_cudnn::AttentionOperands { q, k, v, out, lse: 0 },
                targets,
                stream,
            );
        }
        // A bias that is constant over a range of keys scales the weight of that range in the
        // softmax. So attention runs separately over each range, and a kernel merges the results.
        let scratch = self.scratch_address()?;
        let (whole, row) = (ty.byte_size().0, ty.shape[1] * ty.dtype.element_bytes());
        let sums = scratch + (MAX_KEY_RANGES as u64) * whole.next_multiple_of(ALIGNMENT);
        let rows = op.ints_attr("bias_rows").unwrap_or(&[0, 0]);
        let (mut biased, heads) = (0, parts[0].0.heads);
        for (i, (shape, keys)) in parts.iter().enumerate() {
            if keys.start == rows[0] as u64 && keys.end == rows[1] as u64 {
                biased = i;
            }
            let at = attention_cudnn::AttentionOperands {
                q,
                k: k + keys.start * row,
                v: v + keys.start * row,
                out: scratch + i as u64 * whole,
                lse: sums + i as u64 * heads * ty.shape[0] * 4,
            };
            self.run_attention(*shape, at, None, stream)?;
        }
        let args = KernelArgs::new()
            .with_address(scratch)
            .with_address(sums)
            .with_address(bias)
            .with_int(biased as i64)
            .with_int(parts.len() as i64);
        let args = args
            .with_int(heads as i64)
            .with_int(parts[0].0.head_size as i64)
            .with_long(ty.shape[0] as i64)
            .with_address(out);
        self.kernels.launch_elementwise("merge_bf16", ty.element_count(), args, stream)
    }

    pub(super) fn uses_sm90_attention(&self, shape: &attention_cudnn::AttentionShape) -> bool {
        self.sm90_attention.is_some() && AttentionSm90::is_supported(shape)
    }

    /// Returns whether attention is a single launch of the sm90 kernel.
    pub(super) fn is_single_sm90_attention(&self, p: &Program, op: &Op) -> bool {
        let half = p.type_of(op.operands[0]).dtype == DType::Bf16;
        half && matches!(&attention_key_ranges(p, op)[..], [(shape, _)] if shape.is_supported_by_cudnn() && self.uses_sm90_attention(shape))
    }

    fn run_attention(
        &mut self,
        shape: attention_cudnn::AttentionShape,
        at: attention_cudnn::AttentionOperands,
        targets: Option<&Targets>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        match &self.sm90_attention {
            Some(flash) if AttentionSm90::is_supported(&shape) => {
                flash.launch_attention(shape, at, targets, stream)
            }
            _ => self.attentions.run_plan(shape, at, stream),
        }
    }
}

/// Splits the keys of attention into ranges that run separately: one range without a bias,
/// otherwise the keys before, within and after the biased rows.
pub(super) fn attention_key_ranges(
    p: &Program,
    op: &Op,
) -> Vec<(attention_cudnn::AttentionShape, Range<u64>)> {
    let (whole, keys) = attention_shape(p, op);
    let Some(&[from, to]) = op.ints_attr("bias_rows").filter(|_| op.keyed_operand("bias").is_some()) else {
        return vec![(whole, 0..keys)];
    };
    let (from, to) = (from as u64, to as u64);
    let with_range = |r: Range<u64>| {
        (attention_cudnn::AttentionShape { keys: r.end - r.start, stores_lse: true, ..whole }, r)
    };
    [0..from, from..to, to..keys].into_iter().filter(|r| !r.is_empty()).map(with_range).collect()
}

fn attention_shape(p: &Program, op: &Op) -> (attention_cudnn::AttentionShape, u64) {
    let (q, k) = (p.type_of(op.operands[0]), p.type_of(op.operands[1]));
    let head = op.int_attr("head_dim").unwrap_or(1).max(1) as u64;
    let heads = q.shape[1] / head;
    (
        attention_cudnn::AttentionShape {
            queries: q.shape[0],
            keys: k.shape[0],
            heads,
            head_size: head,
            stores_lse: false,
        },
        k.shape[0],
    )
}
