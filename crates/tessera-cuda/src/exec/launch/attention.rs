//! Launches attention: the sm90 kernel, a cuDNN plan or the fallback kernel, over one or more ranges
//! of keys.

#![allow(unsafe_code, reason = "launches on the memory of the backend")]

use std::ops::Range;

use tessera_ir::{DType, Program, ValueId, views};

use super::kernel_for_dtype;
use crate::attention_cudnn::{AttentionOperands, AttentionShape};
use crate::collectives::Targets;
use crate::device_memory::ALIGNMENT;
use crate::driver::{CudaResult, CudaStream};
use crate::exec::CudaBackend;
use crate::kernel_choice::{AttentionRoute, choose_attention};
use crate::kernel_table::{ATTENTION_BF16, ATTENTION_F32, MERGE_BF16, MergeSplits, PlainAttention};
use crate::kernels::KernelLaunch;

/// Maximum number of key ranges of attention with a bias: before, within and after the biased keys.
pub(in crate::exec) const MAX_KEY_RANGES: usize = 3;

impl CudaBackend {
    pub(super) fn launch_attention(
        &mut self,
        program: usize,
        op: &views::Attention,
        result: ValueId,
        targets: Option<&Targets>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let dtype = p.type_of(op.q).dtype;
        let parts = attention_key_ranges(&p, op);
        let route = |s| choose_attention(&self.capabilities, dtype, s);
        if parts.iter().any(|(s, _)| route(s) == AttentionRoute::Plain) {
            let launch = self.build_plain_attention(program, op, result)?;
            return self.enqueue_launch(&launch, stream);
        }
        let at = |v: ValueId| self.value_address(program, v);
        let operands =
            AttentionOperands { q: at(op.q)?, k: at(op.k)?, v: at(op.v)?, out: at(result)?, lse: 0 };
        match parts[..] {
            [(shape, _)] => self.run_attention(shape, operands, targets, stream),
            _ => self.launch_biased_attention(program, op, &parts, operands, stream),
        }
    }

    /// Returns the launch of the kernel that supports every shape.
    fn build_plain_attention(
        &self,
        program: usize,
        op: &views::Attention,
        result: ValueId,
    ) -> CudaResult<KernelLaunch> {
        let p = &self.programs[program].program;
        let at = |v: ValueId| self.value_address(program, v);
        let s = attention_shape(p, op);
        // Without a bias, no row is biased.
        let biased_rows = op.bias_rows.clone().unwrap_or(0..0);
        let args = PlainAttention {
            q: at(op.q)?.into(),
            k: at(op.k)?.into(),
            v: at(op.v)?.into(),
            bias: self.optional_address(program, op.bias)?.into(),
            bias_begin: biased_rows.start as i32,
            bias_end: biased_rows.end as i32,
            out: at(result)?.into(),
            queries: s.queries as i32,
            keys: s.keys as i32,
            heads: s.heads as i32,
            head: s.head_size as i32,
            scale: 1.0 / (s.head_size as f32).sqrt(),
        };
        let kernel = kernel_for_dtype(p.type_of(op.q), ATTENTION_F32, ATTENTION_BF16);
        let grid = ((s.queries * s.heads).div_ceil(4), 128, (4 * s.head_size * 4) as u32);
        Ok(KernelLaunch::blocks(kernel, grid, args))
    }

    /// Launches attention with a bias. A bias that is constant over a range of keys scales the weight
    /// of that range in the softmax. So attention runs separately over each range, and a kernel merges
    /// the results.
    fn launch_biased_attention(
        &mut self,
        program: usize,
        op: &views::Attention,
        parts: &[(AttentionShape, Range<u64>)],
        whole_operands: AttentionOperands,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let ty = p.type_of(op.q);
        let AttentionOperands { q, k, v, out, .. } = whole_operands;
        let bias = self.optional_address(program, op.bias)?;
        let scratch = self.scratch_address()?;
        let (whole, row) = (ty.byte_size().0, ty.shape[1] * ty.dtype.element_bytes());
        let sums = scratch + (MAX_KEY_RANGES as u64) * whole.next_multiple_of(ALIGNMENT);
        let (mut biased, heads) = (0, parts[0].0.heads);
        for (i, (shape, keys)) in parts.iter().enumerate() {
            if op.bias_rows.as_ref() == Some(keys) {
                biased = i;
            }
            let at = AttentionOperands {
                q,
                k: k + keys.start * row,
                v: v + keys.start * row,
                out: scratch + i as u64 * whole,
                lse: sums + i as u64 * heads * ty.shape[0] * 4,
            };
            self.run_attention(*shape, at, None, stream)?;
        }
        let args = MergeSplits {
            o: scratch.into(),
            lse: sums.into(),
            bias: bias.into(),
            biased_split: biased as i32,
            splits: parts.len() as i32,
            heads: heads as i32,
            head: parts[0].0.head_size as i32,
            rows: ty.shape[0] as i64,
            out: out.into(),
        };
        self.enqueue_launch(&KernelLaunch::elements(MERGE_BF16, ty.element_count(), args), stream)
    }

    /// Returns whether attention is a single launch of the sm90 kernel.
    pub(in crate::exec) fn is_single_sm90_attention(&self, p: &Program, op: &views::Attention) -> bool {
        let dtype = p.type_of(op.q).dtype;
        let is_sm90 = |s| choose_attention(&self.capabilities, dtype, s) == AttentionRoute::Sm90;
        matches!(&attention_key_ranges(p, op)[..], [(shape, _)] if is_sm90(shape))
    }

    /// Launches attention in bf16 over one range of keys.
    fn run_attention(
        &mut self,
        shape: AttentionShape,
        at: AttentionOperands,
        targets: Option<&Targets>,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let route = choose_attention(&self.capabilities, DType::Bf16, &shape);
        match &self.sm90_attention {
            Some(flash) if route == AttentionRoute::Sm90 => {
                // SAFETY: the operands are values of the program, or scratch memory of its extents.
                // Targets lie in the mapped memory of peers; the stream waits until they are open.
                unsafe { flash.launch_attention(shape, at, targets, stream) }
            }
            // SAFETY: as above, and `unsupported_streams` keeps attention on one stream.
            _ => unsafe { self.attentions.run_plan(shape, at, stream) },
        }
    }
}

/// Splits the keys of attention into ranges that run separately: one range without a bias,
/// otherwise the keys before, within and after the biased rows.
pub(in crate::exec) fn attention_key_ranges(
    p: &Program,
    op: &views::Attention,
) -> Vec<(AttentionShape, Range<u64>)> {
    let whole = attention_shape(p, op);
    let keys = whole.keys;
    let Some((_, biased)) = op.key_bias() else { return vec![(whole, 0..keys)] };
    let with_range = |r: Range<u64>| (AttentionShape { keys: r.end - r.start, stores_lse: true, ..whole }, r);
    [0..biased.start, biased.clone(), biased.end..keys]
        .into_iter()
        .filter(|r| !r.is_empty())
        .map(with_range)
        .collect()
}

fn attention_shape(p: &Program, op: &views::Attention) -> AttentionShape {
    let (q, k) = (p.type_of(op.q), p.type_of(op.k));
    AttentionShape {
        queries: q.shape[0],
        keys: k.shape[0],
        heads: q.shape[1] / op.head_dim,
        head_size: op.head_dim,
        stores_lse: false,
    }
}
