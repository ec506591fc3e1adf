//! Ops that route tokens to experts.

use tessera_ir::{DType, RouterScore, ValueId, views};

use super::elementwise::{PointwiseFunction, kernel_for_dtype};
use super::site::{LaunchSite, last_extent};
use crate::driver::{CudaResult, cuda_failure};
use crate::kernel_table::{
    EXPERT_COMBINE_BF16, EXPERT_COMBINE_F32, EXPERT_COUNTS, EXPERT_PACK_BF16, EXPERT_PACK_F32, EXPERT_SLOTS,
    EXPERT_WEIGHTS, ExpertCombine, ExpertCounts, ExpertPack, ExpertSlots, ExpertWeights, GROUPED_MATMUL_BF16,
    GROUPED_MATMUL_F32, GroupedMatmul, TOP_K_EXPERTS, TopKExperts, ZERO_WORDS, ZeroWords,
};
use crate::kernels::KernelLaunch;

type Built = CudaResult<KernelLaunch>;

/// Threads of a warp, which computes a token, an expert or a column.
const WARP: u64 = 32;

/// Columns per block of a grouped matmul: one warp each.
const GROUPED_COLUMNS: u64 = 8;

/// Columns per block of a combine: one thread each.
const COMBINE_COLUMNS: u64 = 128;

pub(super) fn build_top_k_experts(s: &LaunchSite<'_>, v: &views::TopKExperts, out: ValueId) -> Built {
    let ty = s.p.type_of(v.logits);
    require_f32(s, v.logits)?;
    if v.start.is_some() {
        return cuda_failure("a choice of experts that leaves out rows");
    }
    if v.correction.is_some() || v.groups > 1 {
        return cuda_failure("a choice of experts by groups or with a correction");
    }
    let args = TopKExperts {
        logits: s.at(v.logits)?,
        out: s.at(out)?,
        experts: last_extent(ty) as i32,
        k: v.top_k as i32,
        tokens: ty.shape[0] as i32,
    };
    Ok(KernelLaunch::elements(TOP_K_EXPERTS, WARP * ty.shape[0], args).begin_early())
}

pub(super) fn build_expert_weights(s: &LaunchSite<'_>, v: &views::ExpertWeights, out: ValueId) -> Built {
    let ty = s.p.type_of(v.logits);
    require_f32(s, v.logits)?;
    if v.score != RouterScore::Softmax || v.scale != 1.0 {
        return cuda_failure("weights of experts by another score than softmax, or scaled");
    }
    let args = ExpertWeights {
        logits: s.at(v.logits)?,
        chosen: s.at(v.experts)?,
        out: s.at(out)?,
        experts: last_extent(ty) as i32,
        k: last_extent(s.p.type_of(v.experts)) as i32,
        renormalise: i32::from(v.renormalise),
        tokens: ty.shape[0] as i32,
    };
    Ok(KernelLaunch::elements(EXPERT_WEIGHTS, WARP * ty.shape[0], args).begin_early())
}

/// Fails for logits of experts in another dtype than f32.
fn require_f32(s: &LaunchSite<'_>, logits: ValueId) -> CudaResult<()> {
    match s.p.type_of(logits).dtype {
        DType::F32 => Ok(()),
        other => cuda_failure(format!("logits of experts in {other}")),
    }
}

pub(super) fn build_expert_slots(s: &LaunchSite<'_>, v: &views::ExpertSlots, out: ValueId) -> Built {
    let n = s.p.type_of(out).element_count();
    let args =
        ExpertSlots { chosen: s.at(v.experts)?, out: s.at(out)?, capacity: v.capacity as i32, n: n as i32 };
    Ok(KernelLaunch::elements(EXPERT_SLOTS, n, args).begin_early())
}

pub(super) fn build_expert_counts(s: &LaunchSite<'_>, v: &views::ExpertCounts, out: ValueId) -> Built {
    let args = ExpertCounts {
        chosen: s.at(v.experts)?,
        slots: s.at(v.slots)?,
        out: s.at(out)?,
        choices: s.p.type_of(v.experts).element_count() as i32,
        groups: v.groups as i32,
    };
    Ok(KernelLaunch::elements(EXPERT_COUNTS, WARP * v.groups, args).begin_early())
}

/// Builds the zeros of all slots and the copies of the rows to theirs.
pub(super) fn build_expert_pack(
    s: &LaunchSite<'_>,
    v: &views::ExpertPack,
    out: ValueId,
) -> CudaResult<Vec<KernelLaunch>> {
    let (ty, experts) = (s.p.type_of(v.x), s.p.type_of(v.experts));
    // Slots of the plan end at a multiple of a word.
    let words = s.p.type_of(out).byte_size().0.div_ceil(4);
    let args = ExpertPack {
        x: s.at(v.x)?,
        chosen: s.at(v.experts)?,
        slots: s.at(v.slots)?,
        out: s.at(out)?,
        width: last_extent(ty) as i32,
        k: last_extent(experts) as i32,
        capacity: v.capacity as i32,
        groups: v.groups as i32,
    };
    let kernel = kernel_for_dtype(ty.dtype, EXPERT_PACK_F32, EXPERT_PACK_BF16);
    Ok(vec![
        KernelLaunch::elements(ZERO_WORDS, words, ZeroWords { out: s.at(out)?, n: words as i64 })
            .begin_early(),
        KernelLaunch::blocks(kernel, (experts.element_count(), 256, 0), args).begin_early(),
    ])
}

pub(super) fn build_grouped_matmul(s: &LaunchSite<'_>, v: &views::GroupedMatmul, out: ValueId) -> Built {
    let (x, w) = (s.p.type_of(v.x), s.p.type_of(v.w));
    if last_extent(s.p.type_of(v.counts)) > 1 {
        return cuda_failure("counts of slots per group of tokens");
    }
    if s.p.type_of(v.counts).dtype != DType::F32 {
        return cuda_failure("counts of slots in another dtype than f32");
    }
    let args = GroupedMatmul {
        x: s.at(v.x)?,
        w: s.at(v.w)?,
        counts: s.at(v.counts)?,
        out: s.at(out)?,
        groups: x.shape[0] as i32,
        slots: x.shape[1] as i32,
        k: x.shape[2] as i32,
        m: w.shape[1] as i32,
        act: PointwiseFunction::from(v.act).0,
    };
    let filled_groups = x.shape[0].min(v.rows);
    let blocks = filled_groups * w.shape[1].div_ceil(GROUPED_COLUMNS);
    let threads = (WARP * GROUPED_COLUMNS) as u32;
    let kernel = kernel_for_dtype(x.dtype, GROUPED_MATMUL_F32, GROUPED_MATMUL_BF16);
    Ok(KernelLaunch::blocks(kernel, (blocks, threads, 0), args).begin_early())
}

pub(super) fn build_expert_combine(s: &LaunchSite<'_>, v: &views::ExpertCombine, out: ValueId) -> Built {
    let (y, experts) = (s.p.type_of(v.y), s.p.type_of(v.experts));
    let k = last_extent(experts);
    let args = ExpertCombine {
        y: s.at(v.y)?,
        chosen: s.at(v.experts)?,
        slots: s.at(v.slots)?,
        weights: s.at(v.weights)?,
        out: s.at(out)?,
        width: last_extent(y) as i32,
        k: k as i32,
        capacity: y.shape[1] as i32,
        groups: y.shape[0] as i32,
    };
    let kernel = kernel_for_dtype(y.dtype, EXPERT_COMBINE_F32, EXPERT_COMBINE_BF16);
    let blocks = experts.shape[0] * last_extent(y).div_ceil(COMBINE_COLUMNS);
    // A row and a weight of each choice.
    Ok(KernelLaunch::blocks(kernel, (blocks, COMBINE_COLUMNS as u32, 8 * k as u32), args).begin_early())
}
