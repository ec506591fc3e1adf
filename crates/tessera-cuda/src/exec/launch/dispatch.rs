//! What runs on the device for each op and each fused step. This is the only place of the crate that
//! names every op, apart from the kinds of collectives. An op is supported if and only if something
//! is built for it here.

use tessera_ir::{Activation, ComputeOp, OpByKind, OpView, SinkOp, SourceOp, ValueId, views};

use super::copies::copy_whole;
use super::elementwise as kernels;
use super::norms::{
    NormView, ResidualRmsOps, RmsView, build_residual_norm, build_residual_rms, build_rms_rope,
};
use super::relative_attention::build_relative_attention;
use super::site::{LaunchSite, last_extent};
use super::{StepWork, attention, copies, experts, frames, gemms, heads, language, paged_attention, router};
use crate::collectives::Targets;
use crate::driver::{CudaResult, cuda_failure};
use crate::exec::comm_groups::check_collective;
use crate::fusion::launch_step::{FusedGroup, LaunchStep};
use crate::kernels::KernelLaunch;

/// Builds the work of a step, given the views of all ops. The result goes to `targets`, if given, in
/// place of its own memory.
///
/// # Errors
/// What the kernels do not support.
pub(in crate::exec) fn build_step(
    s: &LaunchSite<'_>,
    views: &[OpView],
    step: &LaunchStep,
    targets: Option<&Targets>,
) -> CudaResult<StepWork> {
    match *step {
        LaunchStep::Single(i) => build_op(s, i, &views[i], targets),
        LaunchStep::ResidualNorm { add, norm, quantize } => {
            let sum = add.map(|i| {
                view_as(s, views, i, |v| if let OpView::GateResidual(v) = v { Some(v) } else { None })
            });
            let norm = view_as(s, views, norm, NormView::from_op)?;
            build_residual_norm(s, sum.transpose()?, Some(norm), quantize).map(StepWork::Kernel)
        }
        LaunchStep::RmsRope { norm_or_scale, rope, write } => {
            let norm = norm_or_scale.map(|i| view_as(s, views, i, RmsView::from_op));
            let rope =
                rope.map(|i| view_as(s, views, i, |v| if let OpView::Rope(v) = v { Some(v) } else { None }));
            let write = write.map(|i| view_as(s, views, i, cache_write_view));
            let ops = (norm.transpose()?, rope.transpose()?, write.transpose()?);
            build_rms_rope(s, ops, targets).map(StepWork::Kernel)
        }
        LaunchStep::GemmResidual { matmul, add } => match (&views[matmul], &views[add]) {
            (OpView::Matmul(v), OpView::GateResidual(sum)) => {
                gemms::build_gemm(s, v, Some(sum.x), s.p.ops[add].results[0])
            }
            _ => misplaced_error(s, matmul),
        },
        LaunchStep::ConvResidual { conv, add } => match &views[conv] {
            OpView::Conv3d(v) => {
                let (made, sum) = (s.p.ops[conv].results[0], &s.p.ops[add]);
                let residual = sum.operands.iter().copied().find(|v| *v != made);
                let Some(residual) = residual else { return misplaced_error(s, add) };
                frames::build_conv(s, v, made, Some((residual, sum.results[0])))
            }
            _ => misplaced_error(s, conv),
        },
        LaunchStep::NormSilu { norm, silu, cast } => match &views[norm] {
            OpView::RmsNorm(v) => {
                let out = s.p.ops[cast.unwrap_or(silu)].results[0];
                frames::build_norm(s, v, out, true).map(StepWork::Kernel)
            }
            _ => misplaced_error(s, norm),
        },
        LaunchStep::FramesWrite { take, write } => match (&views[take], &views[write]) {
            (OpView::TakeRows(v), OpView::CacheWrite(to)) => {
                copies::build_frames_write(s, v, s.write_address(&s.p.ops[write], to)?)
            }
            _ => misplaced_error(s, take),
        },
        LaunchStep::ResidualRms { widen, add, norm, narrow } => {
            let out = s.p.ops[narrow.unwrap_or(norm)].results[0];
            build_residual_step(s, views, (widen, add, norm), out).map(StepWork::Kernel)
        }
        LaunchStep::RowMatmuls { ref matmuls, mul } => {
            build_row_step(s, views, matmuls, mul).map(StepWork::Kernel)
        }
        LaunchStep::PutHeads(ref parts) => language::build_put_heads(s, views, parts).map(StepWork::Kernel),
        LaunchStep::Fused(ref group) => {
            let first = group.fused_ops()[0];
            match (group, &views[first]) {
                (FusedGroup::Qkv { matmuls, cache_write }, OpView::Matmul(v)) => {
                    let write = cache_write.map(|w| view_as(s, views, w, cache_write_view));
                    gemms::build_qkv(s, v, matmuls, write.transpose()?)
                }
                (FusedGroup::Modulations(ops), OpView::Modulation(v)) => {
                    let result = s.p.ops[first].results[0];
                    kernels::build_modulation(s, v, result, ops.len() as u64).map(StepWork::Kernel)
                }
                _ => misplaced_error(s, first),
            }
        }
    }
}

/// Returns an op with its view, which must be of the kind that `read` reads.
fn view_as<'v, T>(
    s: &LaunchSite<'_>,
    views: &'v [OpView],
    i: usize,
    read: impl FnOnce(&'v OpView) -> Option<T>,
) -> CudaResult<(usize, T)> {
    read(&views[i]).map_or_else(|| misplaced_error(s, i), |view| Ok((i, view)))
}

/// Builds the launch of a sum and its RMS norm, given by the ops of a cast before the sum, the sum and the norm.
fn build_residual_step(
    s: &LaunchSite<'_>,
    views: &[OpView],
    (widen, add, norm): (Option<usize>, Option<usize>, usize),
    out: ValueId,
) -> CudaResult<KernelLaunch> {
    let (_, norm) = view_as(s, views, norm, |v| if let OpView::RmsNorm(v) = v { Some(v) } else { None })?;
    let sum = add.map(|add| residual_operands(s, views, add, widen)).transpose()?;
    build_residual_rms(s, &ResidualRmsOps { sum, norm, out })
}

/// Builds the launch of matmuls of one row, and of the op that multiplies the results of two of them.
fn build_row_step(
    s: &LaunchSite<'_>,
    views: &[OpView],
    matmuls: &[usize],
    mul: Option<usize>,
) -> CudaResult<KernelLaunch> {
    let own = matmuls.iter().map(|i| {
        let (i, v) = view_as(s, views, *i, |v| if let OpView::Matmul(v) = v { Some(v) } else { None })?;
        Ok((v, s.p.ops[i].results[0]))
    });
    let own: Vec<(&views::Matmul, ValueId)> = own.collect::<CudaResult<_>>()?;
    match (mul, &own[..]) {
        (Some(mul), [(gate, _), (up, _)]) => gemms::build_gated_row(s, gate, up, s.p.ops[mul].results[0]),
        _ => gemms::build_row_matmuls(s, &own),
    }
}

/// Returns the operands and the result of a sum. What a cast widens takes the place of the cast's result.
fn residual_operands(
    s: &LaunchSite<'_>,
    views: &[OpView],
    add: usize,
    widen: Option<usize>,
) -> CudaResult<(ValueId, ValueId, ValueId)> {
    let (_, v) = view_as(s, views, add, |v| if let OpView::Add(v) = v { Some(v) } else { None })?;
    let total = s.p.ops[add].results[0];
    Ok(match widen.map(|cast| &s.p.ops[cast]) {
        Some(cast) if cast.results[0] == v.x => (v.y, cast.operands[0], total),
        Some(cast) => (v.x, cast.operands[0], total),
        None => (v.x, v.y, total),
    })
}

fn cache_write_view(view: &OpView) -> Option<&views::CacheWrite> {
    if let OpView::CacheWrite(v) = view { Some(v) } else { None }
}

fn misplaced_error<T>(s: &LaunchSite<'_>, i: usize) -> CudaResult<T> {
    cuda_failure(format!("{} in a step of other ops", s.p.ops[i].opcode.name()))
}

/// Builds the work of an op that is not fused with others.
///
/// # Errors
/// As [`build_step`].
pub(in crate::exec) fn build_op(
    s: &LaunchSite<'_>,
    i: usize,
    view: &OpView,
    targets: Option<&Targets>,
) -> CudaResult<StepWork> {
    let op = &s.p.ops[i];
    match view.by_kind() {
        OpByKind::Source(SourceOp::Input(_)) => {
            s.refuse_bf16(op, "inputs and outputs other than f32").map(|()| StepWork::Nothing)
        }
        OpByKind::Source(_) | OpByKind::Order(_) => Ok(StepWork::Nothing),
        OpByKind::Collective(c) => check_collective(op, c).map(|()| StepWork::Nothing),
        OpByKind::Sink(SinkOp::Output(v)) => {
            s.refuse_bf16(op, "inputs and outputs other than f32")?;
            copy_whole(s, v.x, s.output_address(op)?)
        }
        OpByKind::Sink(SinkOp::CacheWrite(v)) if v.pages.is_some() || v.start.is_some() => {
            let (Some(pages), Some(start)) = (v.pages, v.start) else {
                return cuda_failure("a write to pages without `pages` or without `start`");
            };
            language::build_page_write(s, op, v, (pages, start)).map(StepWork::Kernel)
        }
        // Rows that are interleaved with those of other values.
        OpByKind::Sink(SinkOp::CacheWrite(v)) if s.row_pitch(v.x) != last_extent(s.p.type_of(v.x)) => {
            build_rms_rope(s, (None, None, Some((i, v))), targets).map(StepWork::Kernel)
        }
        OpByKind::Sink(SinkOp::CacheWrite(v)) => match v.row {
            None => copy_whole(s, v.x, s.write_address(op, v)?),
            Some(row) => kernels::build_put_rows(s, op, v, row).map(StepWork::Kernel),
        },
        OpByKind::Compute(c) => build_compute(s, i, c, targets),
    }
}

fn build_compute(
    s: &LaunchSite<'_>,
    i: usize,
    op: ComputeOp<'_>,
    targets: Option<&Targets>,
) -> CudaResult<StepWork> {
    use ComputeOp as C;
    let results = &s.p.ops[i].results;
    let out = results[0];
    let f32_only = || s.refuse_bf16(&s.p.ops[i], format!("{} in bf16", s.p.ops[i].opcode.name()));
    let launch = match op {
        C::Matmul(v) => return gemms::build_gemm(s, v, None, out),
        C::TakeRows(v) => return copies::build_take_rows(s, v, out),
        C::TakeShard(v) => return copies::build_take_shard(s, v, out),
        C::Pad(v) => return copies::build_pad(s, v, out),
        C::Compact(v) => return copies::build_compact(s, v, out),
        C::Cast(v) if s.p.type_of(v.x).dtype == s.p.type_of(out).dtype => {
            return copy_whole(s, v.x, s.at(out)?);
        }
        C::Conv3d(v) => return frames::build_conv(s, v, out, None),
        C::UpsampleNearest(v) => frames::build_upsample(s, v, out),
        C::ChannelsToFrames(v) => frames::build_channels_to_frames(s, v, out),
        C::Patchify(v) => frames::build_patches(s, (v.x, out), v.patch, false),
        C::Unpatchify(v) => frames::build_patches(s, (v.x, out), v.patch, true),
        C::ScaleShift(v) => frames::build_scale_shift(s, v, out),
        C::Clamp(v) => frames::build_clamp(s, (v.x, out), v.limit, false),
        C::SoftClamp(v) => frames::build_clamp(s, (v.x, out), v.limit, true),
        C::Attention(v) if s.p.type_of(v.q).shape.len() != 2 => frames::build_attention(s, v, out),
        C::Attention(v) => return attention::build_attention(s, v, out, targets),
        C::RmsNorm(v) if s.p.type_of(v.x).shape.len() != 2 => frames::build_norm(s, v, out, false),
        C::PagedAttention(v) => {
            return paged_attention::build_paged_attention(s, v, out).map(StepWork::Kernels);
        }
        C::Sample(v) => return language::build_sample(s, i, v, out).map(StepWork::Kernels),
        C::ExpertTokens(v) => return experts::build_expert_tokens(s, v, out),
        C::ExpertPack(v) => return experts::build_expert_pack(s, v, out).map(StepWork::Kernels),
        C::ExpertPackFused(v) => return experts::build_expert_pack_fused(s, v, out).map(StepWork::Kernels),
        C::ExpertDistance(v) => return router::build_expert_distance(s, v, out).map(StepWork::Kernels),
        C::Rotary(v) => language::build_rotary(s, v, out),
        C::HeadNorm(v) => language::build_head_norm(s, v, out),
        C::HeadColumns(v) => heads::build_head_columns(s, v, out),
        C::HeadJoin(v) => heads::build_head_join(s, v, out),
        C::HeadMatmul(v) => heads::build_head_matmul(s, v, out),
        C::TopKExperts(v) => router::build_top_k_experts(s, v, out),
        C::ExpertWeights(v) => router::build_expert_weights(s, v, out),
        C::ExpertGates(v) => router::build_expert_gates(s, v, out),
        C::ExpertLocality(v) => router::build_expert_locality(s, v, out),
        C::ExpertDistanceGradient(v) => router::build_distance_gradient(s, v, out),
        C::ExpertDraw(v) => router::build_expert_draw(s, v, out),
        C::ExpertReroute(v) => experts::build_expert_reroute(s, v, out),
        C::ExpertPlaces(v) => experts::build_expert_places(s, v, out),
        C::ExpertSlots(v) => experts::build_expert_slots(s, v, out),
        C::ExpertCounts(v) => experts::build_expert_counts(s, v, out),
        C::ExpertStatistics(v) => experts::build_expert_statistics(s, v, out),
        C::GroupedMatmul(v) => experts::build_grouped_matmul(s, v, out),
        C::ExpertCombine(v) => experts::build_expert_combine(s, v, out),
        C::MoeRoute(_) => return cuda_failure("MoE routing as one op"),
        C::GateResidual(v) => build_residual_norm(s, Some((i, v)), None, None),
        C::LayerNorm(v) => build_residual_norm(s, None, Some((i, NormView::Affine(v))), None),
        C::NormModulate(v) => build_residual_norm(s, None, Some((i, NormView::Modulated(v))), None),
        C::RmsNorm(v) => build_rms_rope(s, (Some((i, RmsView::Norm(v))), None, None), targets),
        C::RmsScale(v) => build_rms_rope(s, (Some((i, RmsView::Scale(v))), None, None), targets),
        C::Rope(v) => build_rms_rope(s, (None, Some((i, v)), None), targets),
        C::RowSquareSum(v) => kernels::build_row_square_sum(s, v, out),
        C::Quantize(v) => kernels::build_quantize(s, v, results),
        C::Add(v) => kernels::build_add(s, v, out),
        C::Mul(v) => kernels::build_mul(s, v, out),
        C::Embed(v) => kernels::build_embed(s, v, out),
        C::RelativeAttention(v) => build_relative_attention(s, v, out),
        C::Silu(v) => kernels::build_pointwise(s, v.x, None, Some(Activation::Silu).into(), out),
        C::Relu(v) => kernels::build_pointwise(s, v.x, None, kernels::PointwiseFunction::RELU, out),
        C::BiasAct(v) => kernels::build_pointwise(s, v.x, Some(v.bias), v.act.into(), out),
        C::Cast(v) => kernels::build_cast(s, v, out),
        C::Softmax(v) => kernels::build_softmax(s, v, out),
        C::Bmm(v) => f32_only().and_then(|()| kernels::build_bmm(s, v, out)),
        C::Modulation(v) => f32_only().and_then(|()| kernels::build_modulation(s, v, out, 1)),
        C::TimeEmbed(v) => f32_only().and_then(|()| kernels::build_time_embed(s, v, out)),
        C::Renoise(v) => kernels::build_renoise(s, &s.p.ops[i], v),
        C::ToX0(v) => f32_only().and_then(|()| kernels::build_to_x0(s, v, out)),
        C::Guide(v) => f32_only().and_then(|()| kernels::build_guide(s, v, out)),
        C::SpaceTimeToDepth(v) => {
            f32_only_pixels(s, i, v.patch)?;
            kernels::build_space_to_depth(s, (v.x, out), v.stride, false)
        }
        C::DepthToSpaceTime(v) => {
            f32_only_pixels(s, i, v.patch)?;
            kernels::build_space_to_depth(s, (v.x, out), v.stride, true)
        }
    };
    launch.map(StepWork::Kernel)
}

fn f32_only_pixels(s: &LaunchSite<'_>, i: usize, patch: [u64; 2]) -> CudaResult<()> {
    s.refuse_bf16(&s.p.ops[i], "pixels in bf16")?;
    if patch == [2, 2] { Ok(()) } else { cuda_failure("a patch other than 2 × 2") }
}
