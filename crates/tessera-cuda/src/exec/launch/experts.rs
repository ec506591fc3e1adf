//! Ops that carry tokens to experts: slots, packed rows, a matmul per expert, and the weighted sum.

use tessera_ir::{DType, Program, ValueId, views};

use super::StepWork;
use super::copies::Transfer;
use super::elementwise::{PointwiseFunction, kernel_for_floats};
use super::router::{MAX_RANKED_EXPERTS, SHARED_BYTES};
use super::site::{LaunchSite, last_extent};
use crate::driver::{CudaResult, cuda_failure};
use crate::kernel_params::DevicePtr;
use crate::kernel_table::{
    CombinedSlots, EXPERT_COMBINE_BF16, EXPERT_COMBINE_F32, EXPERT_COUNTS, EXPERT_PACK_BF16, EXPERT_PACK_F32,
    EXPERT_PLACES, EXPERT_REROUTE, EXPERT_SLOTS, EXPERT_STATISTICS, ExpertCombine, ExpertCounts, ExpertPack,
    ExpertPlaces, ExpertReroute, ExpertSlots, ExpertStatistics, GROUPED_MATMUL_BF16, GROUPED_MATMUL_F32,
    GroupedMatmul, ZERO_WORDS, ZeroWords,
};
use crate::kernels::KernelLaunch;

type Built = CudaResult<KernelLaunch>;

/// Threads of a warp, which counts for an expert or computes a column.
const WARP: u64 = 32;

/// The most warps of a block that gives slots to a group of tokens, as in experts.cu.
const MAX_SLOT_WARPS: u64 = 32;

/// Threads of a block that reroutes a group of tokens.
const REROUTE_THREADS: u32 = 256;

/// Columns per block of a grouped matmul: one warp each.
const GROUPED_COLUMNS: u64 = 8;

/// Columns per block of a combine: one thread each.
const COMBINE_COLUMNS: u64 = 128;

/// How the tokens of this rank share the slots of experts.
#[derive(Debug, Clone, Copy)]
struct TokenGroups {
    /// Tokens of this rank, and those of them that are no padding.
    tokens: u64,
    real_tokens: u64,
    /// Tokens of a group, at least 1, and groups.
    size: u64,
    count: u64,
}

impl TokenGroups {
    /// Reads the groups of tokens with a row each in `choices`; by default all tokens are one group, and none is
    /// padding.
    fn new(
        s: &LaunchSite<'_>,
        choices: ValueId,
        group_tokens: Option<u64>,
        tokens: Option<u64>,
    ) -> TokenGroups {
        let span = s.row_span(choices, tokens);
        let size = group_tokens.unwrap_or(span.rows).max(1);
        let count = group_tokens.map_or(1, |n| span.rows / n.max(1));
        TokenGroups { tokens: span.rows, real_tokens: span.real_rows(), size, count }
    }
}

/// Builds the copy of tokens and the zeros behind them.
pub(super) fn build_expert_tokens(
    s: &LaunchSite<'_>,
    v: &views::ExpertTokens,
    out: ValueId,
) -> CudaResult<StepWork> {
    let [bytes, padded] = [v.x, out].map(|value| s.p.type_of(value).byte_size().0);
    let to: u64 = s.at(out)?;
    let padding = padded - bytes;
    Ok(StepWork::Transfers(vec![
        Transfer::Copy { to, from: s.at(v.x)?, bytes },
        Transfer::ZeroRows { at: (to + bytes, padding), bytes: padding, rows: 1 },
    ]))
}

pub(super) fn build_expert_places(s: &LaunchSite<'_>, v: &views::ExpertPlaces, out: ValueId) -> Built {
    let ty = s.p.type_of(v.experts);
    let n = ty.element_count();
    let args = ExpertPlaces {
        chosen: s.at(v.experts)?,
        residents: s.list_address(&v.residents)?,
        out: s.at(out)?,
        rows: s.token_rows(v.experts, v.tokens, (v.start, None))?,
        k: last_extent(ty) as i32,
        places: v.residents.len() as i32,
        n: n as i32,
    };
    Ok(KernelLaunch::elements(EXPERT_PLACES, WARP * n, args).begin_early())
}

pub(super) fn build_expert_slots(s: &LaunchSite<'_>, v: &views::ExpertSlots, out: ValueId) -> Built {
    let groups = TokenGroups::new(s, v.experts, v.group_tokens, v.tokens);
    slots_launch(s, v.experts, v.capacity, &groups, s.at(out)?)
}

/// Builds the launch that gives slots to choices. A block gives those of a group of tokens.
fn slots_launch(
    s: &LaunchSite<'_>,
    choices: ValueId,
    capacity: u64,
    groups: &TokenGroups,
    out: DevicePtr<f32>,
) -> Built {
    let k = last_extent(s.p.type_of(choices));
    let group_choices = groups.size * k;
    let args = ExpertSlots {
        chosen: s.at(choices)?,
        out,
        capacity: clamp_to_i32(capacity),
        group_choices: group_choices as i32,
        real_choices: (groups.real_tokens * k) as i32,
        choices: (groups.tokens * k) as i32,
    };
    let warps = group_choices.div_ceil(WARP).clamp(1, MAX_SLOT_WARPS);
    let blocks = groups.tokens.div_ceil(groups.size);
    Ok(KernelLaunch::blocks(EXPERT_SLOTS, (blocks, (WARP * warps) as u32, 0), args).begin_early())
}

pub(super) fn build_expert_reroute(s: &LaunchSite<'_>, v: &views::ExpertReroute, out: ValueId) -> Built {
    let groups = TokenGroups::new(s, v.ranking, v.group_tokens, v.tokens);
    let ranked = last_extent(s.p.type_of(v.ranking));
    if ranked > MAX_RANKED_EXPERTS {
        return cuda_failure(format!("rerouting among {ranked} experts, of at most {MAX_RANKED_EXPERTS}"));
    }
    let args = ExpertReroute {
        ranking: s.at(v.ranking)?,
        out: s.at(out)?,
        ranked: ranked as i32,
        k: v.top_k as i32,
        capacity: clamp_to_i32(v.capacity),
        reroutes: clamp_to_i32(v.reroutes),
        group_tokens: groups.size as i32,
        real_tokens: groups.real_tokens as i32,
        tokens: groups.tokens as i32,
    };
    let blocks = groups.tokens.div_ceil(groups.size);
    Ok(KernelLaunch::blocks(EXPERT_REROUTE, (blocks, REROUTE_THREADS, 0), args).begin_early())
}

pub(super) fn build_expert_counts(s: &LaunchSite<'_>, v: &views::ExpertCounts, out: ValueId) -> Built {
    let groups = TokenGroups::new(s, v.experts, v.group_tokens, None);
    let choices = s.p.type_of(v.experts);
    let args = ExpertCounts {
        chosen: s.at(v.experts)?,
        slots: s.at(v.slots)?,
        out: s.at(out)?,
        group_choices: (groups.size * last_extent(choices)) as i32,
        choices: choices.element_count() as i32,
        token_groups: groups.count as i32,
        experts: v.groups as i32,
    };
    Ok(KernelLaunch::elements(EXPERT_COUNTS, WARP * v.groups * groups.count, args).begin_early())
}

pub(super) fn build_expert_statistics(
    s: &LaunchSite<'_>,
    v: &views::ExpertStatistics,
    out: ValueId,
) -> Built {
    let groups = TokenGroups::new(s, v.choices, None, v.tokens);
    let args = ExpertStatistics {
        choices: s.at(v.choices)?,
        chosen: s.at(v.experts)?,
        slots: s.at(v.slots)?,
        out: s.at(out)?,
        real_choices: (groups.real_tokens * last_extent(s.p.type_of(v.choices))) as i32,
        experts: v.groups as i32,
    };
    Ok(KernelLaunch::elements(EXPERT_STATISTICS, WARP * v.groups, args).begin_early())
}

/// Builds the zeros of all slots and the copies of the rows to theirs.
pub(super) fn build_expert_pack(
    s: &LaunchSite<'_>,
    v: &views::ExpertPack,
    out: ValueId,
) -> CudaResult<Vec<KernelLaunch>> {
    let groups = TokenGroups::new(s, v.experts, v.group_tokens, None);
    pack_launches(s, (v.x, v.experts, out), s.at(v.slots)?, &groups, [v.capacity, v.groups])
}

/// Builds [`build_expert_pack`] behind the slots, which lie in scratch memory.
pub(super) fn build_expert_pack_fused(
    s: &LaunchSite<'_>,
    v: &views::ExpertPackFused,
    out: ValueId,
) -> CudaResult<Vec<KernelLaunch>> {
    let groups = TokenGroups::new(s, v.experts, v.group_tokens, v.tokens);
    let slots = s.scratch_address()?.into();
    let mut launches = vec![slots_launch(s, v.experts, v.capacity, &groups, slots)?];
    launches.extend(pack_launches(s, (v.x, v.experts, out), slots, &groups, [v.capacity, v.groups])?);
    Ok(launches)
}

/// Returns the bytes of scratch that packing without stored slots needs: a slot for each choice.
pub(in crate::exec) fn fused_pack_scratch_bytes(p: &Program, v: &views::ExpertPackFused) -> usize {
    4 * p.type_of(v.experts).element_count() as usize
}

fn pack_launches(
    s: &LaunchSite<'_>,
    (x, choices, out): (ValueId, ValueId, ValueId),
    slots: DevicePtr<f32>,
    groups: &TokenGroups,
    [capacity, experts]: [u64; 2],
) -> CudaResult<Vec<KernelLaunch>> {
    let (ty, chosen) = (s.p.type_of(x), s.p.type_of(choices));
    // Slots of the plan end at a multiple of a word.
    let words = s.p.type_of(out).byte_size().0.div_ceil(4);
    let args = ExpertPack {
        x: s.at(x)?,
        chosen: s.at(choices)?,
        slots,
        out: s.at(out)?,
        width: last_extent(ty) as i32,
        k: last_extent(chosen) as i32,
        capacity: capacity as i32,
        group_tokens: groups.size as i32,
        token_groups: groups.count as i32,
        experts: experts as i32,
    };
    let kernel = kernel_for_floats(ty.dtype, EXPERT_PACK_F32, EXPERT_PACK_BF16)?;
    Ok(vec![
        KernelLaunch::elements(ZERO_WORDS, words, ZeroWords { out: s.at(out)?, n: words as i64 })
            .begin_early(),
        KernelLaunch::blocks(kernel, (chosen.element_count(), 256, 0), args).begin_early(),
    ])
}

pub(super) fn build_grouped_matmul(s: &LaunchSite<'_>, v: &views::GroupedMatmul, out: ValueId) -> Built {
    let (x, w, counts) = (s.p.type_of(v.x), s.p.type_of(v.w), s.p.type_of(v.counts));
    if counts.dtype != DType::F32 {
        return cuda_failure("counts of slots in another dtype than f32");
    }
    let (token_groups, parts) = (last_extent(counts), counts.element_count());
    let args = GroupedMatmul {
        x: s.at(v.x)?,
        w: s.at(v.w)?,
        experts: s.expert_addresses(v.w)?,
        counts: s.at(v.counts)?,
        out: s.at(out)?,
        parts: parts as i32,
        token_groups: token_groups as i32,
        slots: (x.shape[1] / token_groups.max(1)) as i32,
        k: x.shape[2] as i32,
        m: w.shape[1] as i32,
        act: PointwiseFunction::from(v.act).0,
    };
    let blocks = parts.min(v.rows) * w.shape[1].div_ceil(GROUPED_COLUMNS);
    let threads = (WARP * GROUPED_COLUMNS) as u32;
    let kernel = kernel_for_floats(x.dtype, GROUPED_MATMUL_F32, GROUPED_MATMUL_BF16)?;
    Ok(KernelLaunch::blocks(kernel, (blocks, threads, 0), args).begin_early())
}

pub(super) fn build_expert_combine(s: &LaunchSite<'_>, v: &views::ExpertCombine, out: ValueId) -> Built {
    let (y, experts) = (s.p.type_of(v.y), s.p.type_of(v.experts));
    let (k, groups) = (last_extent(experts), TokenGroups::new(s, v.experts, v.group_tokens, None));
    let args = ExpertCombine {
        y: s.at(v.y)?,
        chosen: s.at(v.experts)?,
        order: s.at(v.order.unwrap_or(v.experts))?,
        slots: s.at(v.slots)?,
        weights: s.at(v.weights)?,
        out: s.at(out)?,
        width: last_extent(y) as i32,
        k: k as i32,
        of: CombinedSlots {
            first_expert: s.first_global_row(y, 0) as i32,
            experts: y.shape[0] as i32,
            token_groups: groups.count as i32,
            group_tokens: groups.size as i32,
            capacity: (y.shape[1] / groups.count.max(1)) as i32,
        },
    };
    // A row and a weight of each choice.
    let shared = 8 * k;
    if shared > SHARED_BYTES {
        return cuda_failure(format!("a sum over {k} experts of a token"));
    }
    let kernel = kernel_for_floats(y.dtype, EXPERT_COMBINE_F32, EXPERT_COMBINE_BF16)?;
    let blocks = experts.shape[0] * last_extent(y).div_ceil(COMBINE_COLUMNS);
    Ok(KernelLaunch::blocks(kernel, (blocks, COMBINE_COLUMNS as u32, shared as u32), args).begin_early())
}

/// Returns a limit for a kernel, to which a larger number is as good as the largest one.
fn clamp_to_i32(n: u64) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}
