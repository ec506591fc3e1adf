//! Ops of routers: the choice of experts, the weights of choices, and what a mapping changes of a router's preference.

use tessera_ir::{DType, Program, RouterScore, ValueId, views};

use super::elementwise::kernel_for_floats;
use super::site::{LaunchSite, RowSpan, last_extent};
use crate::driver::{CudaResult, cuda_failure};
use crate::kernel_table::{
    DISTANCE_GRADIENT, DistanceGradient, EXPERT_DRAW, EXPERT_GATES_BF16, EXPERT_GATES_F32, EXPERT_LOCALITY,
    EXPERT_WEIGHTS, ExpertDistances, ExpertDraw, ExpertGates, ExpertLocality, ExpertWeights, MEAN_DISTANCES,
    MeanDistances, RANK_EXPERTS, RankExperts, SUM_DISTANCES, SumDistances, TOP_K_EXPERTS, TopKExperts,
};
use crate::kernels::KernelLaunch;

type Built = CudaResult<KernelLaunch>;

/// Threads of a warp, which computes a token.
const WARP: u64 = 32;

/// Threads of a block that ranks experts, and of the one that adds distances, as in router.cu.
const RANK_THREADS: u32 = 256;
const DISTANCE_THREADS: u32 = 1024;

/// The `ScoreKind` of router.cu for logits that are compared as they are.
const LOGIT_SCORE: i32 = 0;

/// Choices up to which a search for the largest logit per choice is faster than sorting all experts.
const MAX_SEARCHES: u64 = 16;

/// The most experts that are sorted in shared memory, as in experts.cu, and the bytes that every launch may have of it.
pub(super) const MAX_RANKED_EXPERTS: u64 = 4096;
pub(super) const SHARED_BYTES: u64 = 48 << 10;

pub(super) fn build_top_k_experts(s: &LaunchSite<'_>, v: &views::TopKExperts, out: ValueId) -> Built {
    let ty = s.p.type_of(v.logits);
    require_f32(s, v.logits, "logits")?;
    let (tokens, experts) = (ty.shape[0], last_extent(ty));
    let is_plain = v.correction.is_none() && v.groups == 1;
    let rows = s.token_rows(v.logits, v.tokens, (v.start, v.last))?;
    if is_plain && (v.top_k <= MAX_SEARCHES || experts > MAX_RANKED_EXPERTS) {
        let args = TopKExperts {
            logits: s.at(v.logits)?,
            out: s.at(out)?,
            rows,
            experts: experts as i32,
            k: v.top_k as i32,
            tokens: tokens as i32,
        };
        return Ok(KernelLaunch::elements(TOP_K_EXPERTS, WARP * tokens, args).begin_early());
    }
    v.correction.map_or(Ok(()), |c| require_f32(s, c, "corrections"))?;
    // An order and a number of each expert, and a rating of each group.
    let count = experts.next_power_of_two();
    let shared = 10 * count + 8 * v.groups;
    if count > MAX_RANKED_EXPERTS || shared > SHARED_BYTES {
        return cuda_failure(format!("a ranking of {experts} experts with groups = {}", v.groups));
    }
    let args = RankExperts {
        logits: s.at(v.logits)?,
        correction: s.at_optional(v.correction)?,
        out: s.at(out)?,
        rows,
        experts: experts as i32,
        count: count as i32,
        k: v.top_k as i32,
        groups: v.groups as i32,
        keep: v.keep_groups as i32,
        score: if is_plain { LOGIT_SCORE } else { score_kind(v.score) },
    };
    Ok(KernelLaunch::blocks(RANK_EXPERTS, (tokens, RANK_THREADS, shared as u32), args).begin_early())
}

pub(super) fn build_expert_weights(s: &LaunchSite<'_>, v: &views::ExpertWeights, out: ValueId) -> Built {
    let ty = s.p.type_of(v.logits);
    require_f32(s, v.logits, "logits")?;
    let args = ExpertWeights {
        logits: s.at(v.logits)?,
        chosen: s.at(v.experts)?,
        out: s.at(out)?,
        experts: last_extent(ty) as i32,
        k: last_extent(s.p.type_of(v.experts)) as i32,
        score: score_kind(v.score),
        renormalise: i32::from(v.renormalise),
        scale: v.scale,
        tokens: ty.shape[0] as i32,
    };
    Ok(KernelLaunch::elements(EXPERT_WEIGHTS, WARP * ty.shape[0], args).begin_early())
}

pub(super) fn build_expert_gates(s: &LaunchSite<'_>, v: &views::ExpertGates, out: ValueId) -> Built {
    let (gates, chosen) = (s.p.type_of(v.gates), s.p.type_of(v.experts));
    let n = chosen.element_count();
    let args = ExpertGates {
        gates: s.at(v.gates)?,
        chosen: s.at(v.experts)?,
        out: s.at(out)?,
        experts: last_extent(gates) as i32,
        k: last_extent(chosen) as i32,
        n: n as i64,
    };
    let kernel = kernel_for_floats(gates.dtype, EXPERT_GATES_F32, EXPERT_GATES_BF16)?;
    Ok(KernelLaunch::elements(kernel, n, args).begin_early())
}

pub(super) fn build_expert_locality(s: &LaunchSite<'_>, v: &views::ExpertLocality, out: ValueId) -> Built {
    require_f32(s, v.logits, "logits")?;
    let (span, n) = (s.row_span(v.logits, None), s.p.type_of(out).element_count());
    let args = ExpertLocality {
        logits: s.at(v.logits)?,
        home_groups: s.list_address(&v.home_groups)?,
        expert_groups: s.list_address(&v.expert_groups)?,
        out: s.at(out)?,
        experts: last_extent(s.p.type_of(v.logits)) as i32,
        first_row: span.first as i32,
        home_rows: rows_of_home(&span, v.home_groups.len())? as i32,
        weight: v.weight as f32,
        n: n as i64,
    };
    Ok(KernelLaunch::elements(EXPERT_LOCALITY, n, args).begin_early())
}

/// Builds the mean distances of rows, in scratch memory, and their sum.
pub(super) fn build_expert_distance(
    s: &LaunchSite<'_>,
    v: &views::ExpertDistance,
    out: ValueId,
) -> CudaResult<Vec<KernelLaunch>> {
    let span = s.row_span(v.logits, v.tokens);
    let (rows, means) = (span.real_rows(), s.scratch_address()?.into());
    let d = expert_distances(s, v.logits, &span, (&v.distances, &v.expert_homes))?;
    let of_rows = MeanDistances { logits: s.at(v.logits)?, means, d, rows: rows as i32 };
    let factor = v.weight / span.tokens as f64;
    let sum = SumDistances { means, out: s.at(out)?, factor, rows: rows as i32 };
    Ok(vec![
        KernelLaunch::elements(MEAN_DISTANCES, WARP * rows, of_rows).begin_early(),
        KernelLaunch::blocks(SUM_DISTANCES, (1, DISTANCE_THREADS, 0), sum).begin_early(),
    ])
}

/// Returns the bytes of scratch that the distance of tokens needs: a mean for each row.
pub(in crate::exec) fn distance_scratch_bytes(p: &Program, v: &views::ExpertDistance) -> usize {
    8 * p.type_of(v.logits).shape[0] as usize
}

pub(super) fn build_distance_gradient(
    s: &LaunchSite<'_>,
    v: &views::ExpertDistanceGradient,
    out: ValueId,
) -> Built {
    let span = s.row_span(v.logits, v.tokens);
    let args = DistanceGradient {
        logits: s.at(v.logits)?,
        out: s.at(out)?,
        d: expert_distances(s, v.logits, &span, (&v.distances, &v.expert_homes))?,
        factor: v.weight / span.tokens as f64,
        real_rows: span.real_rows() as i32,
        rows: span.rows as i32,
    };
    Ok(KernelLaunch::elements(DISTANCE_GRADIENT, WARP * span.rows, args).begin_early())
}

pub(super) fn build_expert_draw(s: &LaunchSite<'_>, v: &views::ExpertDraw, out: ValueId) -> Built {
    let ty = s.p.type_of(v.choices);
    let &[seed, ep_seed] = &v.seeds[..] else { return cuda_failure(format!("seeds {:?}", v.seeds)) };
    let n = ty.element_count();
    let args = ExpertDraw {
        choices: s.at(v.choices)?,
        out: s.at(out)?,
        rows: s.token_rows(v.choices, v.tokens, (v.start, None))?,
        k: last_extent(ty) as i32,
        layer: v.layer as i64,
        seed: seed as u32,
        ep_seed: ep_seed as u32,
        keep: v.keep,
        n: n as i64,
    };
    Ok(KernelLaunch::elements(EXPERT_DRAW, n, args).begin_early())
}

/// Returns the number of a `ScoreKind` of router.cu.
fn score_kind(score: RouterScore) -> i32 {
    match score {
        RouterScore::Softmax => 1,
        RouterScore::Sigmoid => 2,
    }
}

/// Returns the tables of a distance, and where the rows of this rank lie among homes.
fn expert_distances(
    s: &LaunchSite<'_>,
    logits: ValueId,
    span: &RowSpan,
    (distances, expert_homes): (&[u64], &[u64]),
) -> CudaResult<ExpertDistances> {
    require_f32(s, logits, "logits")?;
    let homes = distances.len().isqrt();
    Ok(ExpertDistances {
        distances: s.list_address(distances)?,
        expert_homes: s.list_address(expert_homes)?,
        experts: expert_homes.len() as i32,
        homes: homes as i32,
        first_row: span.first as i32,
        home_rows: rows_of_home(span, homes)? as i32,
    })
}

/// Returns the rows of the whole tensor that each of some homes has.
fn rows_of_home(span: &RowSpan, homes: usize) -> CudaResult<u64> {
    match homes {
        0 => cuda_failure("tokens without homes"),
        _ => Ok(span.all.div_ceil(homes as u64).max(1)),
    }
}

/// Fails for an operand of a router in another dtype than f32.
fn require_f32(s: &LaunchSite<'_>, v: ValueId, what: &str) -> CudaResult<()> {
    match s.p.type_of(v).dtype {
        DType::F32 => Ok(()),
        other => cuda_failure(format!("{what} of experts in {other}")),
    }
}
