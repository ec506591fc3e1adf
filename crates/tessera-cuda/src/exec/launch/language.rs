//! Ops of a language model: rotary embedding, norms of heads, writes to pages, and the choice of the next id.

use tessera_ir::{DType, Op, OpView, Program, ValueId, views};

use super::elementwise::kernel_for_dtype;
use super::site::{LaunchSite, last_extent, row_bytes};
use crate::device_memory::ALIGNMENT;
use crate::driver::{CudaResult, cuda_failure};
use crate::fusion::launch_step::HeadRows;
use crate::kernel_params::DevicePtr;
use crate::kernel_table::{
    HEAD_NORM_BF16, HEAD_NORM_F32, HeadNorm, HeadPart, HeadParts, MAX_HEAD_PARTS, PUT_HEADS_BF16,
    PUT_HEADS_F32, PUT_PAGES_2, PUT_PAGES_4, PUT_PAGES_16, PutHeads, PutPages, ROTARY_BF16, ROTARY_F32,
    Rotary, SAMPLE_CHOOSE, SAMPLE_LARGEST, SAMPLE_UNITS, SampleChoose, SampleLargest, SampleUnits,
};
use crate::kernels::KernelLaunch;

type Built = CudaResult<KernelLaunch>;

/// Parts of a row of logits, and the threads of the blocks that read them, as in language.cu.
const SAMPLE_PARTS: u64 = 32;
const SAMPLE_THREADS: u32 = 512;
const CHOICE_THREADS: u32 = 1024;

/// Threads of a block that writes heads, a warp for each. Few warps spread the heads of one row over the GPU.
const PUT_HEADS_THREADS: u32 = 64;

/// Ids whose probabilities, in the units of language.cu, have a sum below 2^64.
const MAX_VOCABULARY: u64 = 1 << 19;

pub(super) fn build_rotary(s: &LaunchSite<'_>, v: &views::Rotary, out: ValueId) -> Built {
    let ty = s.p.type_of(v.x);
    let pairs = s.p.type_of(v.frequencies).element_count();
    let args = Rotary {
        x: s.at(v.x)?,
        frequencies: f32_address(s, v.frequencies)?,
        start: s.at(v.start)?,
        out: s.at(out)?,
        width: last_extent(ty) as i32,
        head: v.head_dim as i32,
        pairs: pairs as i32,
        interleaved: i32::from(v.interleaved),
        rows_per_sequence: rows_per_sequence(s.p, v.x, v.start) as i32,
        scale: v.scale as f32,
    };
    let kernel = kernel_for_dtype(ty.dtype, ROTARY_F32, ROTARY_BF16);
    Ok(KernelLaunch::blocks(kernel, (ty.shape[0], 256, 8 * pairs as u32), args))
}

pub(super) fn build_head_norm(s: &LaunchSite<'_>, v: &views::HeadNorm, out: ValueId) -> Built {
    let ty = s.p.type_of(v.x);
    let heads = ty.element_count() / v.head_dim;
    let args = HeadNorm {
        x: s.at(v.x)?,
        w: f32_address(s, v.w)?,
        out: s.at(out)?,
        head: v.head_dim as i32,
        eps: v.eps as f32,
        heads: heads as i64,
    };
    Ok(KernelLaunch::elements(kernel_for_dtype(ty.dtype, HEAD_NORM_F32, HEAD_NORM_BF16), 32 * heads, args))
}

/// Returns the address of a vector, which under every dtype policy is f32.
fn f32_address<A: From<u64>>(s: &LaunchSite<'_>, v: ValueId) -> CudaResult<A> {
    match s.p.type_of(v).dtype {
        DType::F32 => s.at(v),
        other => cuda_failure(format!("a vector in {other}, where this backend reads f32")),
    }
}

/// Builds a cache write to the pages of sequences.
pub(super) fn build_page_write(
    s: &LaunchSite<'_>,
    op: &Op,
    v: &views::CacheWrite,
    (pages, start): (ValueId, ValueId),
) -> Built {
    let ty = s.p.type_of(v.x);
    let (Some(page_rows), Some(buffer)) = (v.page_rows, op.buffer) else {
        return cuda_failure("a write to pages without page_rows or without a buffer");
    };
    let row_bytes = row_bytes(ty);
    let (kernel, word) = match row_bytes {
        b if b.is_multiple_of(16) => (PUT_PAGES_16, 16),
        b if b.is_multiple_of(4) => (PUT_PAGES_4, 4),
        _ => (PUT_PAGES_2, 2),
    };
    let n = ty.byte_size().0 / word;
    let args = PutPages {
        from: s.at(v.x)?,
        to: s.write_address(op, v)?,
        pages: s.at(pages)?,
        start: s.at(start)?,
        page_count: last_extent(s.p.type_of(pages)) as i32,
        page_rows: page_rows as i32,
        pool_pages: (s.p.buffer(buffer).ty.shape[0] / page_rows) as i32,
        rows_per_sequence: rows_per_sequence(s.p, v.x, start) as i32,
        words: (row_bytes / word) as i32,
        n: n as i64,
    };
    Ok(KernelLaunch::elements(kernel, n, args))
}

/// Builds the launch that normalises, rotates and writes the heads of several values. The parts agree on the
/// size of a head, the rotation and the pages.
pub(super) fn build_put_heads(s: &LaunchSite<'_>, op_views: &[OpView], parts: &[HeadRows]) -> Built {
    let mut args = PutHeads {
        frequencies: DevicePtr::NULL,
        start: DevicePtr::NULL,
        pages: DevicePtr::NULL,
        n: 0,
        parts: HeadParts { scale: 1.0, page_rows: 1, ..HeadParts::default() },
    };
    let view = |i: Option<usize>| i.map(|i| &op_views[i]);
    let head_dim = parts.iter().find_map(|part| match (view(part.norm), view(part.rotary)) {
        (Some(OpView::HeadNorm(v)), _) => Some(v.head_dim),
        (_, Some(OpView::Rotary(v))) => Some(v.head_dim),
        _ => None,
    });
    let first = parts.first().and_then(|part| part.ops().next()).map(|i| s.p.ops[i].operands[0]);
    let (Some(head_dim), Some(x), true) = (head_dim, first, parts.len() <= MAX_HEAD_PARTS) else {
        return cuda_failure("a launch for heads of unknown size");
    };
    let (rows, dtype) = (s.p.type_of(x).shape[0], s.p.type_of(x).dtype);
    args.parts.head = head_dim as i32;
    for (part, own) in parts.iter().zip(0..) {
        let of_part = &mut HeadPart::default();
        let Some(first) = part.ops().next() else { continue };
        let x = s.p.ops[first].operands[0];
        (of_part.x, of_part.heads) = (s.at(x)?, (last_extent(s.p.type_of(x)) / head_dim) as i32);
        if let Some(OpView::HeadNorm(v)) = view(part.norm) {
            (of_part.w, of_part.eps) = (f32_address(s, v.w)?, v.eps as f32);
        }
        if let Some(OpView::Rotary(v)) = view(part.rotary) {
            of_part.rotates = 1;
            args.frequencies = f32_address(s, v.frequencies)?;
            (args.parts.pairs, args.parts.scale) =
                (s.p.type_of(v.frequencies).element_count() as i32, v.scale as f32);
            args.start = s.at(v.start)?;
            args.parts.rows_per_sequence = rows_per_sequence(s.p, x, v.start) as i32;
        }
        if let (Some(write), Some(OpView::CacheWrite(v))) = (part.write, view(part.write)) {
            let op = &s.p.ops[write];
            let (Some(pages), Some(start), Some(page_rows), Some(buffer)) =
                (v.pages, v.start, v.page_rows, op.buffer)
            else {
                return cuda_failure("a write to pages without `pages`, `start` or `page_rows`");
            };
            (of_part.in_pages, of_part.out) = (1, s.write_address(op, v)?);
            (args.pages, args.start) = (s.at(pages)?, s.at(start)?);
            args.parts.page_count = last_extent(s.p.type_of(pages)) as i32;
            args.parts.page_rows = page_rows as i32;
            args.parts.pool_pages = (s.p.buffer(buffer).ty.shape[0] / page_rows) as i32;
            args.parts.rows_per_sequence = rows_per_sequence(s.p, x, start) as i32;
        } else if let Some(last) = part.ops().last() {
            of_part.out = s.at(s.p.ops[last].results[0])?;
        }
        args.parts.heads += of_part.heads;
        args.parts.of[own] = *of_part;
    }
    args.n = (rows * args.parts.heads as u64) as i64;
    let warps = u64::from(PUT_HEADS_THREADS / 32);
    let shared_bytes = (warps * head_dim * 4) as u32;
    let kernel = kernel_for_dtype(dtype, PUT_HEADS_F32, PUT_HEADS_BF16);
    let grid = ((args.n as u64).div_ceil(warps), PUT_HEADS_THREADS, shared_bytes);
    Ok(KernelLaunch::blocks(kernel, grid, args).begin_early())
}

/// Returns how many rows a call brings of each sequence.
pub(super) fn rows_per_sequence(p: &Program, x: ValueId, start: ValueId) -> u64 {
    p.type_of(x).shape[0] / p.type_of(start).element_count().max(1)
}

/// Builds the choice of an id per row: the largest logits, the probabilities, and the choice.
pub(super) fn build_sample(
    s: &LaunchSite<'_>,
    op: usize,
    v: &views::Sample,
    out: ValueId,
) -> CudaResult<Vec<KernelLaunch>> {
    let ty = s.p.type_of(v.logits);
    let (rows, vocabulary) = (ty.shape[0], last_extent(ty));
    if ty.dtype != DType::F32 || vocabulary > MAX_VOCABULARY {
        return cuda_failure(format!("logits of {vocabulary} ids in {}", ty.dtype));
    }
    let scratch = s.scratch_address()?;
    let (logits, largest, units) = (s.at(v.logits)?, scratch.into(), (scratch + largest_bytes(rows)).into());
    let (temperature, vocabulary, n) = (s.at(v.temperature)?, vocabulary as i32, ty.element_count());
    let choose = SampleChoose {
        logits,
        largest,
        units,
        temperature,
        top_k: s.at(v.top_k)?,
        top_p: s.at(v.top_p)?,
        seed: s.at(v.seed)?,
        draw: s.at(v.draw)?,
        out: s.at(out)?,
        host_copy: s.chosen_ids_address(op)?,
        vocabulary,
    };
    let find = SampleLargest { logits, largest, vocabulary };
    let weigh = SampleUnits { logits, largest, temperature, units, vocabulary, n: n as i64 };
    Ok(vec![
        KernelLaunch::blocks(SAMPLE_LARGEST, (rows * SAMPLE_PARTS, SAMPLE_THREADS, 0), find),
        KernelLaunch::elements(SAMPLE_UNITS, n, weigh),
        KernelLaunch::blocks(SAMPLE_CHOOSE, (rows, CHOICE_THREADS, 0), choose),
    ])
}

/// Returns the bytes of scratch that the choice of ids needs: the largest logit of each part, and a probability
/// of each id.
pub(in crate::exec) fn sample_scratch_bytes(p: &Program, v: &views::Sample) -> usize {
    let ty = p.type_of(v.logits);
    (largest_bytes(ty.shape[0]) + 8 * ty.element_count()) as usize
}

fn largest_bytes(rows: u64) -> u64 {
    (8 * rows * SAMPLE_PARTS).next_multiple_of(ALIGNMENT)
}
