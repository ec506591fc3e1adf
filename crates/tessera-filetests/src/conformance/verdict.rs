//! Compares the results of a backend's ranks with those of the reference.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tessera_device::{Backend, Fault};
use tessera_ir::{DType, OpKind, OpView, Opcode, Program, ValueId};
use tessera_mesh::{Mesh, Rank};
use tessera_reference::{EvalError as Exact, Evaluator, Tensor};

use super::rank_runner::{RankEnd, RankWork, is_unsupported, run_ranks, to_f32, to_scalar};
use super::{BackendUnderTest, NotPassed, Tolerance};
use crate::eval::group_by_phase;
use crate::header::Header;

/// Reference outputs: by phase, then by rank, then by name.
type ExpectedOutputs = Vec<Vec<BTreeMap<String, Tensor>>>;

/// Runs a file's logical programs, or its role programs, and returns the largest error in units of
/// its bound.
pub(super) fn run_programs<B: Backend + 'static>(
    subject: &BackendUnderTest<'_, B>,
    header: &Header,
    programs: &[&Program],
) -> Result<f64, NotPassed> {
    let Some(mesh) = programs.first().map(|p| p.mesh) else { return Ok(0.0) };
    let mut evaluator = Evaluator::new(mesh);
    evaluator.load_weights(header.weights.clone());
    let mut programs_by_phase = Vec::new();
    for (_, phase) in group_by_phase(programs) {
        programs_by_phase.push(header.programs_by_rank(&mesh, &phase).map_err(NotPassed::Failed)?);
    }
    let expected: Result<ExpectedOutputs, Exact> =
        programs_by_phase.iter().map(|c| evaluator.run(c, &header.call)).collect();
    if let Err(fault) = &expected {
        check_observable(fault, header, &evaluator, &programs_by_phase).map_err(NotPassed::Skipped)?;
    }
    let evaluator = Arc::new(evaluator);
    let work: Vec<RankWork> = mesh
        .iter()
        .map(|r| prepare_work(header, &evaluator, &programs_by_phase, r))
        .collect::<Result<_, _>>()
        .map_err(NotPassed::Failed)?;
    let loads: Vec<Vec<Arc<Program>>> = work.iter().map(|w| w.programs.clone()).collect();
    let makers = (subject.open)(&mesh, &loads).map_err(NotPassed::Failed)?;
    let limit = subject.peer_timeout * 5 + Duration::from_secs(5);
    let ends = run_ranks(mesh, makers, work, &evaluator, limit).map_err(|d| {
        let words = format!("{}: {}", d.code.id, d.message);
        if is_unsupported(&d) { NotPassed::Skipped(words) } else { NotPassed::Failed(words) }
    })?;
    match expected {
        Ok(expected) => compare_outputs(&subject.tolerance, &mesh, &programs_by_phase, &expected, &ends)
            .map_err(NotPassed::Failed),
        Err(fault) => {
            check_fault(&fault, subject.detects_mismatch, &ends).map(|()| 0.0).map_err(NotPassed::Failed)
        }
    }
}

/// Checks that a backend can run into this fault; if not, returns the reason.
fn check_observable(
    fault: &Exact,
    header: &Header,
    machine: &Evaluator,
    casts: &[Vec<&Program>],
) -> Result<(), String> {
    // A backend sees only the element count of a call's inputs.
    let is_invisible = |rank: &Rank, op: usize| {
        let here = |c: &Vec<&Program>| {
            let p = *c.get(rank.0 as usize)?;
            let o = p.ops.get(op)?;
            let ty = p.type_of(*o.results.first()?);
            let piece = |name| machine.input_value(name, ty, *rank, &header.call).ok();
            let count = match o.opcode {
                Opcode::Input => o.name.as_deref().and_then(piece).map(|t| t.data().len() as u64),
                _ => None,
            };
            Some(o.opcode.table_row().kind == OpKind::Source && count.is_none_or(|n| n == ty.element_count()))
        };
        casts.iter().find_map(here).unwrap_or(false)
    };
    match fault {
        Exact::Setup(why) => Err(why.clone()),
        Exact::Op { rank, op, message } if is_invisible(rank, *op) => {
            Err(format!("the inputs of a call are checked before a backend sees them: {message}"))
        }
        _ if casts.iter().flatten().any(|p| has_unwaited_issue(p)) => {
            Err("an issue without a wait is rejected before a backend sees it".to_string())
        }
        _ => Ok(()),
    }
}

fn has_unwaited_issue(p: &Program) -> bool {
    let waited = |op: &tessera_ir::Op| {
        p.ops.iter().any(|w| w.opcode == Opcode::Wait && w.operands.first() == op.results.first())
    };
    p.ops.iter().any(|o| o.issue && !waited(o))
}

/// Prepares a rank's programs with unique input names: ranks and ops may take different shards of
/// one tensor, and a backend uses the data of a name unchanged.
fn prepare_work(
    header: &Header,
    machine: &Evaluator,
    casts: &[Vec<&Program>],
    rank: Rank,
) -> Result<RankWork, String> {
    let mut work = RankWork {
        programs: Vec::new(),
        inputs: BTreeMap::new(),
        scalars: header.call.scalars.iter().map(|(k, v)| (k.clone(), to_scalar(v))).collect(),
    };
    for (phase, cast) in casts.iter().enumerate() {
        let mut p = cast[rank.0 as usize].clone();
        for i in 0..p.ops.len() {
            let (Opcode::Input, Some(name)) = (p.ops[i].opcode, p.ops[i].name.clone()) else { continue };
            let own = format!("{name}.{phase}.{i}");
            let piece = machine.input_value(&name, p.type_of(p.ops[i].results[0]), rank, &header.call)?;
            work.inputs.insert(own.clone(), to_f32(&piece));
            p.ops[i].name = Some(own);
        }
        work.programs.push(Arc::new(p));
    }
    Ok(work)
}

fn compare_outputs(
    tolerance: &Tolerance,
    mesh: &Mesh,
    casts: &[Vec<&Program>],
    expected: &ExpectedOutputs,
    ends: &[RankEnd],
) -> Result<f64, String> {
    // A rank that failed on its own explains the ranks that were aborted because of it.
    let is_own_failure = |e: &RankEnd| !matches!(e, RankEnd::Hangs | RankEnd::Fault(Fault::Aborted(_)));
    let mut wrong: Vec<(usize, &RankEnd)> =
        ends.iter().enumerate().filter(|(_, e)| !matches!(e, RankEnd::Done(_))).collect();
    wrong.sort_by_key(|(_, e)| !is_own_failure(e));
    if let Some(first) = wrong.first().and_then(|(r, e)| describe_failure(*r, e)) {
        return Err(first);
    }
    let mut worst = 0.0f64;
    for (phase, cast) in casts.iter().enumerate() {
        let relative = tolerance.relative.max(unit_error(cast)) * count_roundings(cast).sqrt();
        for rank in mesh.iter() {
            let at = rank.0 as usize;
            let RankEnd::Done(got) = &ends[at] else { continue };
            for (name, expected_value) in &expected[phase][at] {
                let Some(got) = got[phase].get(name) else {
                    return Err(format!("rank {rank} has no output \"{name}\""));
                };
                let all = expected[phase].iter().filter_map(|o| o.get(name)).flat_map(Tensor::data);
                let scale = all.fold(0.0f64, |m, x| m.max(x.abs()));
                let difference = max_difference(got, expected_value);
                if difference > relative * scale {
                    let bound = relative * scale;
                    return Err(format!(
                        "rank {rank}: \"{name}\" differs by {difference:e}; the bound is {bound:e}"
                    ));
                }
                if difference > 0.0 {
                    worst = worst.max(difference / (relative * scale));
                }
            }
        }
    }
    Ok(worst)
}

/// Returns the largest difference from the exact elements, rounded to f32. The difference is
/// infinite if the lengths differ or an element is NaN.
fn max_difference(got: &[f32], want: &Tensor) -> f64 {
    if got.len() != want.data().len() {
        return f64::INFINITY;
    }
    let far = |(g, w): (&f32, f32)| if *g == w { 0.0 } else { (f64::from(*g) - f64::from(w)).abs() };
    let all = got.iter().zip(to_f32(want)).map(far);
    all.fold(0.0, |m, d| if d.is_nan() { f64::INFINITY } else { m.max(d) })
}

/// Returns the error of one rounding in the narrowest dtype in which the programs compute, and 0 for f32. The
/// reference rounds only the results of casts and of `quantize`, to e4m3 alone in the latter.
fn unit_error(cast: &[&Program]) -> f64 {
    let rounds_to_bf16 = |p: &&Program| p.values.iter().any(|v| v.ty.dtype == DType::Bf16);
    if cast.iter().any(rounds_to_bf16) { BF16_UNIT } else { 0.0 }
}

/// Distance of neighbouring numbers in bf16 relative to their size: twice the error of one rounding.
const BF16_UNIT: f64 = 1.0 / 128.0;

/// Counts the roundings that can accumulate in a value of these programs; 0 if they only move
/// elements.
fn count_roundings(cast: &[&Program]) -> f64 {
    let count = |p: &&Program| {
        let (mut ops, mut longest) = (0u64, 0u64);
        for op in &p.ops {
            use OpView as V;
            let extent = |v: ValueId, dim: usize| p.type_of(v).shape.get(dim).copied().unwrap_or(1);
            let last_extent = |v: ValueId| p.type_of(v).shape.last().copied().unwrap_or(1);
            let Ok(view) = op.view() else { continue };
            let terms = match view {
                V::Pad(_)
                | V::Compact(_)
                | V::TakeRows(_)
                | V::TakeShard(_)
                | V::Embed(_)
                | V::HeadColumns(_)
                | V::HeadJoin(_)
                | V::Sample(_)
                | V::TopKExperts(_)
                | V::ExpertTokens(_)
                | V::ExpertGates(_)
                | V::ExpertDraw(_)
                | V::ExpertPlaces(_)
                | V::ExpertReroute(_)
                | V::ExpertSlots(_)
                | V::ExpertCounts(_)
                | V::ExpertStatistics(_)
                | V::ExpertPack(_)
                | V::ExpertPackFused(_) => {
                    continue;
                }
                V::SpaceTimeToDepth(_) | V::DepthToSpaceTime(_) => continue,
                V::UpsampleNearest(_) | V::ChannelsToFrames(_) | V::Patchify(_) | V::Unpatchify(_) => {
                    continue;
                }
                V::AllReduce(_) | V::ReduceScatter(_) => {
                    op.comm_group().map_or(1, |g| u64::from(p.mesh.group_size(g)))
                }
                V::Matmul(v) => extent(v.x, 1),
                V::LayerNorm(v) => extent(v.x, 1),
                V::NormModulate(v) => extent(v.x, 1),
                V::RmsNorm(v) => last_extent(v.x),
                V::Conv3d(v) => extent(v.w, 1),
                V::RowSquareSum(v) => extent(v.x, 1),
                V::Softmax(v) => last_extent(v.x),
                V::Bmm(v) => last_extent(v.x),
                V::RelativeAttention(v) => extent(v.k, 0) + v.head_dim,
                V::PagedAttention(v) => extent(v.pages, 1) * v.page_rows + v.head_dim,
                V::HeadMatmul(v) => extent(v.w, 1).max(v.rows),
                V::HeadNorm(v) => v.head_dim,
                V::ExpertWeights(v) => extent(v.logits, 1),
                // Two roundings of the logits and the softmax; sums over tokens are f64.
                V::ExpertDistance(v) => 2 * extent(v.logits, 1),
                V::ExpertDistanceGradient(v) => 2 * extent(v.logits, 1),
                V::GroupedMatmul(v) => extent(v.w, 2),
                V::ExpertCombine(v) => extent(v.experts, 1),
                V::Attention(v) => p.type_of(v.k).element_count() / last_extent(v.k) + v.head_dim,
                _ if op.opcode.table_row().kind == OpKind::Compute => 1,
                _ => continue,
            };
            ops += 1;
            longest = longest.max(terms);
        }
        ops + longest
    };
    cast.iter().map(count).max().unwrap_or(0) as f64
}

/// Describes the failure of a rank that should have succeeded.
fn describe_failure(rank: usize, end: &RankEnd) -> Option<String> {
    match end {
        RankEnd::Done(_) => None,
        RankEnd::Fault(Fault::Failed(why)) => Some(format!("rank {rank} failed: {why}")),
        RankEnd::Fault(Fault::Stalled(why)) => Some(format!("rank {rank} stalled: {why}")),
        RankEnd::Fault(Fault::Aborted(why)) => Some(format!("rank {rank} was aborted: {why}")),
        RankEnd::Fault(Fault::Refused(why)) => Some(format!("rank {rank} had a collective rejected: {why}")),
        RankEnd::Fault(Fault::Poisoned(why)) => {
            Some(format!("rank {rank} read memory without a value: {why}"))
        }
        RankEnd::Panicked(why) => Some(format!("rank {rank} panicked: {why}")),
        RankEnd::Hangs => Some(format!("rank {rank} hangs")),
    }
}

/// Checks that the ranks ended in the reference's fault.
///
/// A fault of one op must show on its rank. A mismatch or a deadlock must show on at least one
/// rank: a backend that matches collectives by position reports two receives that face each other
/// as a mismatch.
fn check_fault(fault: &Exact, compares: bool, ends: &[RankEnd]) -> Result<(), String> {
    let abnormal_end = |(r, e): (usize, &RankEnd)| match e {
        RankEnd::Hangs | RankEnd::Panicked(_) => describe_failure(r, e),
        _ => None,
    };
    if let Some(why) = ends.iter().enumerate().find_map(abnormal_end) {
        return Err(why);
    }
    let failed = |e: &RankEnd| matches!(e, RankEnd::Fault(Fault::Failed(_)));
    let stalled = |e: &RankEnd| matches!(e, RankEnd::Fault(Fault::Stalled(_)));
    let fault_occurred = match fault {
        Exact::Op { rank, .. } => failed(&ends[rank.0 as usize]),
        Exact::Mismatch { .. } if compares => ends.iter().any(failed),
        Exact::Mismatch { .. } | Exact::Deadlock(_) => ends.iter().any(|e| failed(e) || stalled(e)),
        Exact::Setup(_) => true,
    };
    if fault_occurred { Ok(()) } else { Err(format!("the run should have ended with: {fault}")) }
}
