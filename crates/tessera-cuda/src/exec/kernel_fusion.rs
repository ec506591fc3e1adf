//! Kernel fusion: groups a program's ops into launches. One kernel computes several ops where that
//! saves reading and writing whole rows.
//!
//! A fused step runs at the position of its last op and writes only the values that other steps
//! read. The planned slots may not allow a fusion, so each is checked: the fusion is dropped if
//! some value would not be in its slot when a step reads it.

use std::collections::{BTreeMap, BTreeSet};

use tessera_ir::{DType, Op, OpKind, Opcode, Program, Slots, ValueId};

use super::horizontal_fusion::FusedGroup;

/// One launch, or a few that belong together. Numbers are op indices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LaunchStep {
    /// One op that is not fused with others.
    Single(usize),
    /// A residual add, the norm of the sum, and its quantization to e4m3. At least two of them are
    /// present.
    ResidualNorm { add: Option<usize>, norm: usize, quantize: Option<usize> },
    /// RMS norm (or its scaling half), RoPE, and the write of the rows into a buffer. At least two
    /// of them are present.
    RmsRope { norm_or_scale: Option<usize>, rope: Option<usize>, write: Option<usize> },
    /// A matmul and the residual add of its result, fused as the epilogue.
    GemmResidual { matmul: usize, add: usize },
    /// A horizontally fused group, which runs at the position of its first op. Its results lie in
    /// scratch memory.
    Fused(FusedGroup),
}

impl LaunchStep {
    /// Returns the ops of the step. A fused cache write comes last, wherever it is in the program.
    pub(super) fn all_ops(&self) -> Vec<usize> {
        match *self {
            LaunchStep::Single(i) => vec![i],
            LaunchStep::ResidualNorm { add, norm, quantize } => {
                [add, Some(norm), quantize].into_iter().flatten().collect()
            }
            LaunchStep::RmsRope { norm_or_scale: scale, rope, write } => {
                [scale, rope, write].into_iter().flatten().collect()
            }
            LaunchStep::GemmResidual { matmul, add } => vec![matmul, add],
            LaunchStep::Fused(ref joined) => joined.all_ops(),
        }
    }

    /// Returns the op whose position and stream the step uses.
    pub(super) fn launch_op(&self) -> usize {
        match self {
            LaunchStep::Fused(joined) => joined.fused_ops()[0],
            _ => self.all_ops().last().copied().unwrap_or(0),
        }
    }
}

/// Groups the ops of a program into steps, in order. Each of the `joined` groups becomes one step
/// if memory allows it.
pub(super) fn plan_launch_steps(p: &Program, slots: &Slots, fused_groups: &[FusedGroup]) -> Vec<LaunchStep> {
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
    // Returns the only reader of an op's result.
    let only = |j: usize| -> Option<usize> {
        let r = *p.ops[j].results.first()?;
        match readers[r.0 as usize][..] {
            [reader] if plain(reader) => Some(reader),
            _ => None,
        }
    };
    let quantized = |norm: usize| only(norm).filter(|j| p.ops[*j].opcode == Opcode::Quantize);
    let reads_first = |j: usize, from: usize| p.ops[j].operands.first() == p.ops[from].results.first();
    match op.opcode {
        Opcode::GateResidual => {
            let result = *op.results.first()?;
            // The norm of the sum; the sum may have other readers.
            let norm = *readers[result.0 as usize].first()?;
            let fits = matches!(p.ops[norm].opcode, Opcode::NormModulate | Opcode::LayerNorm)
                && plain(norm)
                && reads_first(norm, i)
                && have_same_frames(op, &p.ops[norm]);
            fits.then_some(LaunchStep::ResidualNorm { add: Some(i), norm, quantize: quantized(norm) })
        }
        Opcode::NormModulate | Opcode::LayerNorm => {
            let quantize = Some(quantized(i)?);
            Some(LaunchStep::ResidualNorm { add: None, norm: i, quantize })
        }
        Opcode::RmsNorm | Opcode::RmsScale => {
            let rope = only(i).filter(|j| p.ops[*j].opcode == Opcode::Rope);
            let last = rope.unwrap_or(i);
            let write = only(last).filter(|j| writes_matrix_rows(p, *j));
            (rope.is_some() || write.is_some()).then_some(LaunchStep::RmsRope {
                norm_or_scale: Some(i),
                rope,
                write,
            })
        }
        Opcode::Rope => {
            let write = only(i).filter(|j| writes_matrix_rows(p, *j))?;
            Some(LaunchStep::RmsRope { norm_or_scale: None, rope: Some(i), write: Some(write) })
        }
        Opcode::Matmul if op.str_attr("act").is_none() && !uses_few_rows_kernel(p, op) => {
            let add = only(i)?;
            let sum = &p.ops[add];
            let fits = sum.opcode == Opcode::GateResidual
                && sum.operands.len() == 2
                && sum.operands[1] == op.results[0]
                && sum.operands[0] != op.results[0];
            fits.then_some(LaunchStep::GemmResidual { matmul: i, add })
        }
        _ => None,
    }
}

/// Returns whether a matmul uses the kernel for few rows, which cannot add a residual.
pub(super) fn uses_few_rows_kernel(p: &Program, op: &Op) -> bool {
    let x = p.type_of(op.operands[0]);
    x.dtype == DType::F32 && x.shape[0] <= MAX_FEW_ROWS
}

/// Maximum rows of an f32 matmul that uses the kernel for few rows, which reads the weights once.
const MAX_FEW_ROWS: u64 = 8;

/// Returns whether the op writes rows of a matrix into a buffer whose rows have the same width.
pub(super) fn writes_matrix_rows(p: &Program, j: usize) -> bool {
    let op = &p.ops[j];
    let Some(b) = op.buffer else { return false };
    let (from, to) = (p.type_of(op.operands[0]), &p.buffer(b).ty);
    op.opcode == Opcode::CacheWrite && from.shape.len() == 2 && from.shape[1..] == to.shape[1..]
}

/// Returns whether both ops use the same frame numbering, if both have one.
fn have_same_frames(add: &Op, norm: &Op) -> bool {
    let counted =
        |op: &Op| op.int_attr("frame_rows").map(|rows| (rows, op.int_attr("first_row").unwrap_or(0)));
    match (counted(add), counted(norm)) {
        (Some(a), Some(b)) => a == b,
        _ => true,
    }
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

/// Returns whether every value is in its slot whenever a step reads it, given these steps in this
/// order. A slot that a collective in flight uses must not be written before its wait.
fn slots_stay_valid(p: &Program, slots: &Slots, steps: &[LaunchStep]) -> bool {
    // Results of sources have their own memory and use no slot.
    let source_values: BTreeSet<ValueId> = p
        .ops
        .iter()
        .filter(|o| o.opcode.table_row().kind == OpKind::Source)
        .flat_map(|o| o.results.iter().copied())
        .collect();
    // Results of horizontally fused groups lie in scratch memory: rows of GEMMs until the next
    // group overwrites them, modulation tables until the end.
    let mut grouped: BTreeMap<ValueId, &FusedGroup> = BTreeMap::new();
    for step in steps {
        if let LaunchStep::Fused(joined) = step {
            grouped.extend(joined.fused_ops().iter().flat_map(|i| &p.ops[*i].results).map(|r| (*r, joined)));
        }
    }
    let mut live_groups: Vec<&FusedGroup> = Vec::new();
    let planned = |v: &ValueId| !source_values.contains(v) && !grouped.contains_key(v);
    let slot = |v: ValueId| slots.value_slots.get(v.0 as usize).copied().flatten().filter(|_| planned(&v));
    let mut holds: BTreeMap<u32, ValueId> = BTreeMap::new();
    // Slots in use by collectives in flight, with their tickets.
    let mut in_flight: BTreeMap<u32, ValueId> = BTreeMap::new();
    for step in steps {
        let ops = step.all_ops();
        let inner: Vec<ValueId> =
            ops[..ops.len() - 1].iter().flat_map(|o| p.ops[*o].results.iter().copied()).collect();
        let read = ops.iter().flat_map(|o| p.ops[*o].used_values()).filter(|v| !inner.contains(v));
        for v in read {
            if p.type_of(v).is_token() {
                continue;
            }
            if grouped.get(&v).is_some_and(|j| !live_groups.contains(j)) {
                return false;
            }
            if let Some(s) = slot(v)
                && holds.get(&s) != Some(&v)
            {
                return false;
            }
        }
        if let LaunchStep::Fused(joined) = step {
            live_groups.retain(|other| !joined.reuses_scratch_of(other));
            live_groups.push(joined);
        }
        let last = &p.ops[step.launch_op()];
        let mut written_values: Vec<ValueId> = last.results.clone();
        // A fused residual add also writes the sum.
        if let LaunchStep::ResidualNorm { add: Some(add), .. } = step {
            written_values.extend(&p.ops[*add].results);
        }
        if last.opcode == Opcode::Wait {
            in_flight.retain(|_, t| *t != last.operands[0]);
        }
        if last.issue {
            let ticket = last.results[0];
            let results: Vec<ValueId> = p.collective_result(last).into_iter().collect();
            for v in last.operands.iter().chain(&results) {
                if let Some(s) = slot(*v)
                    && in_flight.insert(s, ticket).is_some_and(|t| t != ticket)
                {
                    return false;
                }
            }
            written_values = results;
        } else {
            let written =
                written_values.iter().filter(|v| last.opcode != Opcode::Wait && !p.type_of(**v).is_token());
            if written.filter_map(|v| slot(*v)).any(|s| in_flight.contains_key(&s)) {
                return false;
            }
        }
        // Row kernels read a whole row before they write it, so their results may overwrite an
        // operand of equal size. Other steps must not overwrite an operand, and two results must
        // not share a slot.
        if ops.len() > 1 {
            let outer = ops.iter().flat_map(|o| p.ops[*o].used_values()).filter(|v| !inner.contains(v));
            let rows = matches!(step, LaunchStep::ResidualNorm { .. } | LaunchStep::RmsRope { .. });
            for v in outer {
                for w in &written_values {
                    let meets = slot(v).is_some() && slot(v) == slot(*w) && v != *w;
                    // An operand of another shape, such as a table, is read again for later rows.
                    let alike = p.type_of(v).shape == p.type_of(*w).shape
                        && p.type_of(v).byte_size() == p.type_of(*w).byte_size();
                    if meets && !(rows && alike) {
                        return false;
                    }
                }
            }
            let places: Vec<u32> = written_values.iter().filter_map(|w| slot(*w)).collect();
            if places.iter().collect::<BTreeSet<_>>().len() < places.len() {
                return false;
            }
        }
        for v in written_values {
            if let Some(s) = slot(v) {
                holds.insert(s, v);
            }
        }
    }
    true
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
