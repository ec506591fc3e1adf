//! Attention: the sm90 kernel, a cuDNN plan or the fallback kernel, over one or more ranges of keys.

use std::ops::Range;

use tessera_ir::{DType, Program, ValueId, views};

use super::StepWork;
use super::elementwise::kernel_for_dtype;
use super::site::{LaunchSite, last_extent};
use crate::attention_cudnn::{AttentionOperands, AttentionShape};
use crate::collectives::Targets;
use crate::device_memory::ALIGNMENT;
use crate::driver::{CudaResult, cuda_failure};
use crate::kernel_choice::uses_plain_attention;
use crate::kernel_table::{ATTENTION_BF16, ATTENTION_F32, MERGE_BF16, MergeSplits, PlainAttention};
use crate::kernels::KernelLaunch;

/// Maximum number of key ranges of attention with a bias: before, within and after the biased keys.
const MAX_KEY_RANGES: usize = 3;

/// Maximum head size, in elements, of the fallback attention kernel.
const MAX_HEAD_DIM: u64 = 512;

/// Attention in bf16 over each of some ranges of keys, and the kernel that merges their results.
#[derive(Debug)]
pub(in crate::exec) struct AttentionWork {
    pub(in crate::exec) parts: Vec<(AttentionShape, AttentionOperands)>,
    pub(super) merge: Option<KernelLaunch>,
    /// Destinations of the result of a single part.
    pub(super) targets: Option<Targets>,
}

pub(super) fn build_attention(
    s: &LaunchSite<'_>,
    v: &views::Attention,
    out: ValueId,
    targets: Option<&Targets>,
) -> CudaResult<StepWork> {
    if v.head_dim > MAX_HEAD_DIM {
        return cuda_failure(format!("heads of {} elements, above {MAX_HEAD_DIM}", v.head_dim));
    }
    if v.bias.is_some() && v.bias_rows.is_none() {
        return cuda_failure("a bias without bias_rows");
    }
    let (dtype, ranges) = (s.p.type_of(v.q).dtype, attention_key_ranges(s.p, v));
    if ranges.iter().any(|(shape, _)| uses_plain_attention(dtype, shape)) {
        return build_plain_attention(s, v, out).map(StepWork::Kernel);
    }
    let whole = AttentionOperands { q: s.at(v.q)?, k: s.at(v.k)?, v: s.at(v.v)?, out: s.at(out)?, lse: 0 };
    let work = match ranges[..] {
        [(shape, _)] => AttentionWork { parts: vec![(shape, whole)], merge: None, targets: targets.copied() },
        _ => build_biased_attention(s, v, &ranges, whole)?,
    };
    Ok(StepWork::Attention(Box::new(work)))
}

/// Builds the kernel that supports every shape.
pub(super) fn build_plain_attention(
    s: &LaunchSite<'_>,
    v: &views::Attention,
    out: ValueId,
) -> CudaResult<KernelLaunch> {
    let shape = attention_shape(s.p, v);
    // Without a bias, no row is biased.
    let biased_rows = v.bias_rows.clone().unwrap_or(0..0);
    let args = PlainAttention {
        q: s.at(v.q)?,
        k: s.at(v.k)?,
        v: s.at(v.v)?,
        bias: s.at_optional(v.bias)?,
        bias_begin: biased_rows.start as i32,
        bias_end: biased_rows.end as i32,
        out: s.at(out)?,
        queries: shape.queries as i32,
        keys: shape.keys as i32,
        heads: shape.heads as i32,
        head: shape.head_size as i32,
        scale: 1.0 / (shape.head_size as f32).sqrt(),
    };
    let kernel = kernel_for_dtype(s.p.type_of(v.q).dtype, ATTENTION_F32, ATTENTION_BF16);
    let grid = ((shape.queries * shape.heads).div_ceil(4), 128, (4 * shape.head_size * 4) as u32);
    Ok(KernelLaunch::blocks(kernel, grid, args))
}

/// Builds attention with a bias. A bias that is constant over a range of keys scales the weight of that
/// range in the softmax. So attention runs separately over each range, and a kernel merges the results.
fn build_biased_attention(
    s: &LaunchSite<'_>,
    v: &views::Attention,
    ranges: &[(AttentionShape, Range<u64>)],
    whole: AttentionOperands,
) -> CudaResult<AttentionWork> {
    let ty = s.p.type_of(v.q);
    let scratch = s.scratch_address()?;
    let (out_bytes, row) = (ty.byte_size().0, ty.shape[1] * ty.dtype.element_bytes());
    let sums = scratch + (MAX_KEY_RANGES as u64) * out_bytes.next_multiple_of(ALIGNMENT);
    let heads = ranges[0].0.heads;
    let part = |(i, (shape, keys)): (usize, &(AttentionShape, Range<u64>))| {
        let at = AttentionOperands {
            q: whole.q,
            k: whole.k + keys.start * row,
            v: whole.v + keys.start * row,
            out: scratch + i as u64 * out_bytes,
            lse: sums + i as u64 * heads * ty.shape[0] * 4,
        };
        (*shape, at)
    };
    let args = MergeSplits {
        o: scratch.into(),
        lse: sums.into(),
        bias: s.at_optional(v.bias)?,
        biased_split: ranges.iter().rposition(|(_, keys)| v.bias_rows.as_ref() == Some(keys)).unwrap_or(0)
            as i32,
        splits: ranges.len() as i32,
        heads: heads as i32,
        head: ranges[0].0.head_size as i32,
        rows: ty.shape[0] as i64,
        out: whole.out.into(),
    };
    let merge = Some(KernelLaunch::elements(MERGE_BF16, ty.element_count(), args));
    Ok(AttentionWork { parts: ranges.iter().enumerate().map(part).collect(), merge, targets: None })
}

/// Returns the bytes of scratch that an attention needs: only one in bf16 with a bias needs any.
pub(in crate::exec) fn attention_scratch_bytes(p: &Program, v: &views::Attention) -> usize {
    let ty = p.type_of(v.q);
    if v.bias.is_none() || ty.dtype != DType::Bf16 {
        return 0;
    }
    let heads = ty.shape[1] / v.head_dim;
    let outs = (ty.byte_size().0 as usize).next_multiple_of(ALIGNMENT as usize);
    let sums = (heads * ty.shape[0] * 4) as usize;
    MAX_KEY_RANGES * (outs + sums)
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
    // The cells of frames are rows, too.
    let width = last_extent(q);
    AttentionShape {
        queries: q.element_count() / width,
        keys: k.element_count() / width,
        heads: width / op.head_dim,
        head_size: op.head_dim,
        stores_lse: false,
    }
}
