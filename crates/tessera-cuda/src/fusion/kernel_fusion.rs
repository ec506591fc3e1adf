//! Kernel fusion: groups a program's ops into launches. One kernel computes several ops where that
//! saves reading and writing whole rows.
//!
//! A fused step runs at the position of its last op and writes only the values that other steps
//! read. The planned slots may not allow a fusion, so each is checked: the fusion is dropped if
//! some value would not be in its slot when a step reads it.

use std::collections::BTreeMap;

use tessera_ir::{DType, Op, OpKind, OpView, Opcode, Program, Slots, ValueId, views};

use super::language_fusion::language_fusion_from;
use super::launch_step::{FusedGroup, LaunchStep};
use super::slot_check::slots_stay_valid;
use super::{rounds_to_nearest, writes_matrix_rows};
use crate::gemm::shape::uses_few_rows_kernel;

/// Groups the ops of a program into steps, in order. Each of the `joined` groups becomes one step
/// if memory allows it.
pub(crate) fn plan_launch_steps(p: &Program, slots: &Slots, fused_groups: &[FusedGroup]) -> Vec<LaunchStep> {
    let readers = p.value_readers();
    let mut fused: Vec<LaunchStep> = Vec::new();
    let mut taken = vec![false; p.ops.len()];
    for i in 0..p.ops.len() {
        if taken[i] {
            continue;
        }
        let one_of =
            fused_groups.iter().find(|j| j.fused_ops()[0] == i).map(|j| LaunchStep::Fused(j.clone()));
        let Some(step) = one_of.or_else(|| longest_fusion_from(p, &readers, &taken, i)) else { continue };
        let mut tried = fused.clone();
        tried.push(step.clone());
        if slots_stay_valid(p, slots, &order_steps(p, &tried)) {
            step.all_ops().iter().for_each(|o| taken[*o] = true);
            fused = tried;
        }
    }
    order_steps(p, &fused)
}

/// Returns the longest fusion that starts with op `i`.
fn longest_fusion_from(p: &Program, readers: &[Vec<usize>], taken: &[bool], i: usize) -> Option<LaunchStep> {
    let op = &p.ops[i];
    let plain = |j: usize| !taken[j] && p.ops[j].stream == op.stream && p.ops[j].after.is_empty();
    if let Some(step) = language_fusion_from(p, readers, &plain, i) {
        return Some(step);
    }
    // Returns the only reader of an op's result.
    let only = |j: usize| -> Option<usize> {
        let r = *p.ops[j].results.first()?;
        match readers[r.0 as usize][..] {
            [reader] if plain(reader) => Some(reader),
            _ => None,
        }
    };
    let quantized = |norm: usize| {
        only(norm).filter(|j| p.ops[*j].opcode == Opcode::Quantize && rounds_to_nearest(&p.ops[*j]))
    };
    let reads_first = |j: usize, from: usize| p.ops[j].operands.first() == p.ops[from].results.first();
    match op.view().ok()? {
        OpView::GateResidual(add) => {
            let result = *op.results.first()?;
            // The norm of the sum; the sum may have other readers.
            let norm = *readers[result.0 as usize].first()?;
            let can_follow = match p.ops[norm].view().ok()? {
                OpView::NormModulate(v) => have_same_frames(&add, &v),
                OpView::LayerNorm(_) => true,
                _ => false,
            };
            let fits = can_follow && plain(norm) && reads_first(norm, i);
            fits.then_some(LaunchStep::ResidualNorm { add: Some(i), norm, quantize: quantized(norm) })
        }
        OpView::NormModulate(_) | OpView::LayerNorm(_) => {
            let quantize = Some(quantized(i)?);
            Some(LaunchStep::ResidualNorm { add: None, norm: i, quantize })
        }
        OpView::RmsNorm(v) if p.type_of(v.x).shape.len() == 4 => {
            let silu = only(i).filter(|j| p.ops[*j].opcode == Opcode::Silu)?;
            let is_e4m3 = |j: &usize| p.type_of(p.ops[*j].results[0]).dtype == DType::E4m3;
            let is_cast = |j: &usize| p.ops[*j].opcode == Opcode::Cast && rounds_to_nearest(&p.ops[*j]);
            let cast = only(silu).filter(is_cast).filter(is_e4m3);
            Some(LaunchStep::NormSilu { norm: i, silu, cast })
        }
        OpView::TakeRows(v) if p.type_of(v.x).shape.len() == 4 => {
            let write = only(i)?;
            let OpView::CacheWrite(to) = p.ops[write].view().ok()? else { return None };
            let is_same = stays_unchanged(p, Some(v.x), (i, write));
            (is_same && to.row.is_none()).then_some(LaunchStep::FramesWrite { take: i, write })
        }
        OpView::Conv3d(v) => {
            let add = only(i).filter(|j| p.ops[*j].opcode == Opcode::Add)?;
            let twice = p.ops[add].operands[0] == p.ops[add].operands[1];
            (!twice && stays_unchanged(p, v.history, (i, add)))
                .then_some(LaunchStep::ConvResidual { conv: i, add })
        }
        OpView::RmsNorm(_) | OpView::RmsScale(_) => {
            let rope = only(i).filter(|j| p.ops[*j].opcode == Opcode::Rope);
            let last = rope.unwrap_or(i);
            let write = only(last).filter(|j| writes_matrix_rows(p, *j));
            (rope.is_some() || write.is_some()).then_some(LaunchStep::RmsRope {
                norm_or_scale: Some(i),
                rope,
                write,
            })
        }
        OpView::Rope(_) => {
            let write = only(i).filter(|j| writes_matrix_rows(p, *j))?;
            Some(LaunchStep::RmsRope { norm_or_scale: None, rope: Some(i), write: Some(write) })
        }
        OpView::Matmul(v) if v.act.is_none() && !uses_few_rows_kernel(p, &v) => {
            let add = only(i)?;
            let OpView::GateResidual(sum) = p.ops[add].view().ok()? else { return None };
            let fits = sum.m.is_none() && sum.y == op.results[0] && sum.x != op.results[0];
            fits.then_some(LaunchStep::GemmResidual { matmul: i, add })
        }
        _ => None,
    }
}

/// Returns whether a value is at the place of a later op what it is at an op: rows of a buffer change with
/// a write between the two.
fn stays_unchanged(p: &Program, value: Option<ValueId>, (op, later): (usize, usize)) -> bool {
    let read = value.and_then(|v| p.ops.iter().find(|op| op.results.first() == Some(&v)));
    let Some(buffer) = read.and_then(|op| op.buffer) else { return true };
    let writes = |op: &Op| op.opcode == Opcode::CacheWrite && op.buffer == Some(buffer);
    !p.ops[op..later].iter().any(writes)
}

/// Returns whether both ops use the same frame numbering, if the sum has one.
fn have_same_frames(add: &views::GateResidual, norm: &views::NormModulate) -> bool {
    add.frame_rows.is_none_or(|rows| (rows, add.first_row) == (norm.frame_rows, norm.first_row))
}

/// Orders the fused steps and all remaining ops by position, leaving out sources.
fn order_steps(p: &Program, fused_steps: &[LaunchStep]) -> Vec<LaunchStep> {
    let mut at: BTreeMap<usize, LaunchStep> = BTreeMap::new();
    let mut inside = vec![false; p.ops.len()];
    for step in fused_steps {
        step.all_ops().iter().for_each(|o| inside[*o] = true);
        at.insert(step.launch_op(), step.clone());
    }
    let one = |i: usize| match at.get(&i) {
        Some(step) => Some(step.clone()),
        None => (!inside[i] && p.ops[i].opcode.table_row().kind != OpKind::Source)
            .then_some(LaunchStep::Single(i)),
    };
    (0..p.ops.len()).filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    fn program(text: &str) -> Program {
        parse_all(text, "test").expect("a program").remove(0)
    }

    /// Gives every value its own slot, except that the first of each pair shares the slot of the
    /// second.
    fn distinct_slots(p: &Program, shared: &[(u32, u32)]) -> Slots {
        let of = (0..p.values.len() as u32)
            .map(|v| Some(shared.iter().find(|(a, _)| *a == v).map_or(v, |(_, b)| *b)))
            .collect();
        Slots { slot_bytes: vec![1 << 20; p.values.len()], value_slots: of }
    }

    const NORMS: &str = "program @p { %x = input : f32[4, 8] %y = input : f32[4, 8] %w = weight \"w\" : f32[8] \
        %s = toperator.gate_residual %x, %y : f32[4, 8] \
        %n = toperator.layer_norm %s, %w, %w {eps = 1e-6} : f32[4, 8] \
        %r = toperator.rms_norm %n, %w {eps = 1e-6} : f32[4, 8] \
        %z = toperator.add %s, %r : f32[4, 8] output \"z\", %z }";

    #[test]
    fn conversions_that_round_stochastically_join_no_launch() {
        let tail = |attrs: &str| {
            format!(
                "program @p {{ %f = input : f32[4, 16] %w = weight \"w\" : f32[16] %x = toperator.cast %f {{to = \"bf16\"}} \
                 %n = toperator.layer_norm %x, %w, %w {{eps = 1e-6}} %q, %s = toperator.quantize %n{attrs} \
                 %a = input : f32[4, 16] %t = toperator.add %f, %a %r = toperator.rms_norm %t, %w {{eps = 1e-6}} \
                 %b = toperator.cast %r {{{} to = \"bf16\"}} output \"s\", %s output \"t\", %t \
                 %o = toperator.cast %b {{to = \"f32\"}} output \"o\", %o }}",
                attrs.trim_matches([' ', '{', '}']).replace("seed = 1", "seed = 1,")
            )
        };
        let fused_with = |text: &str| {
            let p = program(text);
            let steps = plan_launch_steps(&p, &distinct_slots(&p, &[]), &[]);
            let joins = |step: &LaunchStep| match *step {
                LaunchStep::ResidualNorm { quantize, .. } => quantize.is_some(),
                LaunchStep::ResidualRms { narrow, .. } => narrow.is_some(),
                _ => false,
            };
            steps.iter().filter(|step| joins(step)).count()
        };
        assert_eq!(fused_with(&tail("")), 2);
        assert_eq!(fused_with(&tail(" {rounding = \"stochastic\", seed = 1}")), 0);
    }

    #[test]
    fn a_sum_and_its_norm_are_one_step_unless_memory_forbids_it() {
        let p = program(NORMS);
        let op = |name: &str| p.ops.iter().position(|o| o.opcode.name() == name).expect("an op");
        let fused = LaunchStep::ResidualNorm {
            add: Some(op("gate_residual")),
            norm: op("layer_norm"),
            quantize: None,
        };
        assert!(plan_launch_steps(&p, &distinct_slots(&p, &[]), &[]).contains(&fused));
        // The norm overwrites an operand of the sum: each row is read before it is written.
        let value = |name: &str| p.values.iter().position(|v| v.name == name).expect("a value") as u32;
        assert!(
            plan_launch_steps(&p, &distinct_slots(&p, &[(value("n"), value("y"))]), &[]).contains(&fused)
        );
        // The norm overwrites the sum, which other ops still read.
        assert!(
            !plan_launch_steps(&p, &distinct_slots(&p, &[(value("n"), value("s"))]), &[]).contains(&fused)
        );
    }

    #[test]
    fn a_norm_with_only_a_quantized_reader_is_not_stored_unquantized() {
        let p = program(
            "program @p { %x = input : bf16[4, 32] %y = toperator.silu %x : bf16[4, 32] %w = weight \"w\" : f32[32] \
             %s = toperator.gate_residual %x, %y : bf16[4, 32] \
             %n = toperator.layer_norm %s, %w, %w {eps = 1e-6} : bf16[4, 32] \
             %q, %scale = toperator.quantize %n : e4m3[4, 32], f32[4] \
             %z = toperator.add %s, %s : bf16[4, 32] output \"z\", %z }",
        );
        let op = |name: &str| p.ops.iter().position(|o| o.opcode.name() == name).expect("an op");
        let (add, norm, quantize) = (Some(op("gate_residual")), op("layer_norm"), op("quantize"));
        let fused = LaunchStep::ResidualNorm { add, norm, quantize: Some(quantize) };
        assert!(plan_launch_steps(&p, &distinct_slots(&p, &[]), &[]).contains(&fused));
        // The scales overwrite an operand of the sum before its later rows are read.
        let value = |name: &str| p.values.iter().position(|v| v.name == name).expect("a value") as u32;
        assert!(
            !plan_launch_steps(&p, &distinct_slots(&p, &[(value("scale"), value("y"))]), &[])
                .contains(&fused)
        );
    }

    #[test]
    fn a_sum_and_a_norm_of_other_rows_are_two_steps() {
        let of = |first: u32| {
            let text = format!(
                "program @p {{ %x = input : f32[2, 8] %y = input : f32[2, 8] %m = input : f32[2, 16] \
                %s = toperator.gate_residual %x, %y, %m {{first_row = 2, frame_rows = 2, gate = 0}} : f32[2, 8] \
                %n = toperator.norm_modulate %s, %m {{eps = 1e-6, first_row = {first}, frame_rows = 2, scale = 0, shift = 1}} \
                : f32[2, 8] output \"n\", %n }}"
            );
            let p = program(&text);
            let is_fused = |s: &LaunchStep| matches!(s, LaunchStep::ResidualNorm { .. });
            plan_launch_steps(&p, &distinct_slots(&p, &[]), &[]).iter().any(is_fused)
        };
        assert!(of(2) && !of(1));
    }

    const FRAMES: &str = "buffer @past : f32[2, 4, 4, 8] %x = input : f32[2, 4, 4, 8] \
        %w = weight \"w\" : f32[8, 216] %g = weight \"g\" : f32[8] \
        %n = toperator.rms_norm %x, %g {eps = 1e-6} : f32[2, 4, 4, 8] \
        %a = toperator.silu %n : f32[2, 4, 4, 8] %h = cache.read @past : f32[2, 4, 4, 8] \
        %c = toperator.conv3d %a, %w, history=%h {kernel = [3, 3, 3], pad_after = 1, pad_before = 1} : f32[2, 4, 4, 8]";

    #[test]
    fn a_convolution_and_a_sum_are_one_step_unless_the_history_changes_between_them() {
        let steps = |rest: &str| {
            let p = program(&format!("program @p {{ {FRAMES} {rest} output \"s\", %s }}"));
            let steps = plan_launch_steps(&p, &distinct_slots(&p, &[]), &[]);
            let norms = steps.iter().filter(|s| matches!(s, LaunchStep::NormSilu { .. })).count();
            (norms, steps.iter().filter(|s| matches!(s, LaunchStep::ConvResidual { .. })).count())
        };
        let (sum, write) = ("%s = toperator.add %c, %x : f32[2, 4, 4, 8]", "cache.write @past, %a");
        assert_eq!(steps(&format!("{sum} {write}")), (1, 1));
        assert_eq!(steps(&format!("{write} {sum}")), (1, 0));
    }

    #[test]
    fn frames_go_into_a_buffer_without_a_copy_of_their_own() {
        let p = program(&format!(
            "program @p {{ {FRAMES} output \"c\", %c %l = toperator.take_rows %a {{row = 1, rows = 1}} \
             cache.write @past, %l {{first_row = 1}} }}"
        ));
        let steps = plan_launch_steps(&p, &distinct_slots(&p, &[]), &[]);
        assert!(steps.iter().any(|s| matches!(s, LaunchStep::FramesWrite { .. })), "{steps:?}");
    }

    #[test]
    fn the_sum_of_a_convolution_may_overwrite_its_residual_alone() {
        let p = program(&format!(
            "program @p {{ {FRAMES} %r = toperator.silu %x : f32[2, 4, 4, 8] \
             %s = toperator.add %c, %r : f32[2, 4, 4, 8] output \"s\", %s }}"
        ));
        let value = |name: &str| p.values.iter().position(|v| v.name == name).expect("a value") as u32;
        let is_fused = |shared: &[(u32, u32)]| {
            let steps = plan_launch_steps(&p, &distinct_slots(&p, shared), &[]);
            steps.iter().any(|s| matches!(s, LaunchStep::ConvResidual { .. }))
        };
        assert!(is_fused(&[(value("s"), value("r"))]));
        assert!(!is_fused(&[(value("s"), value("a"))]));
    }

    #[test]
    fn the_few_rows_kernel_gets_no_residual() {
        let fused = |rows: u64| {
            let text = format!(
                "program @p {{ %x = input : f32[{rows}, 8] %y = input : f32[{rows}, 8] %w = weight \"w\" : f32[8, 8] \
                 %p = toperator.matmul %x, %w : f32[{rows}, 8] %s = toperator.gate_residual %y, %p : f32[{rows}, 8] \
                 output \"s\", %s }}"
            );
            let p = program(&text);
            plan_launch_steps(&p, &distinct_slots(&p, &[]), &[])
                .iter()
                .any(|s| matches!(s, LaunchStep::GemmResidual { .. }))
        };
        assert!(!fused(8) && fused(9));
    }

    #[test]
    fn every_op_but_sources_is_in_one_step() {
        let p = program(NORMS);
        let mut seen: Vec<usize> = plan_launch_steps(&p, &distinct_slots(&p, &[]), &[])
            .iter()
            .flat_map(LaunchStep::all_ops)
            .collect();
        seen.sort_unstable();
        let want: Vec<usize> =
            (0..p.ops.len()).filter(|i| p.ops[*i].opcode.table_row().kind != OpKind::Source).collect();
        assert_eq!(seen, want);
    }
}
