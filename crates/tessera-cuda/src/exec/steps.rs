//! What is launched for which ops: one kernel for several where that saves reading and writing whole rows.
//!
//! A fused step runs where its last op stands and writes only what others read. Whether memory allows that is not assumed:
//! the steps are walked once over the planned slots, and a fusion under which some value would not be where its reader looks is
//! undone.

use std::collections::{BTreeMap, BTreeSet};

use tessera_ir::{DType, Kind, Op, Opcode, Program, Slots, ValueId};

use super::joined::Joined;

/// One launch, or a few that belong together. Numbers are indices of ops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// An op by itself.
    One(usize),
    /// A residual added, the norm of the sum, and its way into e4m3; at least two of them.
    ResidualNorm { add: Option<usize>, norm: usize, quantize: Option<usize> },
    /// A norm or the second half of one, rotary embedding, and the row's way into a buffer; at least two of them.
    Turned { scale: Option<usize>, rope: Option<usize>, write: Option<usize> },
    /// A product and the residual that it is added to.
    ProductAdd { product: usize, add: usize },
    /// Several ops of one kind as one, at the place of the first; their results lie behind the slots.
    Joined(Joined),
}

impl Step {
    /// Its ops; what writes a product to a cache is the last, whatever stands between.
    pub(super) fn ops(&self) -> Vec<usize> {
        match *self {
            Step::One(i) => vec![i],
            Step::ResidualNorm { add, norm, quantize } => {
                [add, Some(norm), quantize].into_iter().flatten().collect()
            }
            Step::Turned { scale, rope, write } => [scale, rope, write].into_iter().flatten().collect(),
            Step::ProductAdd { product, add } => vec![product, add],
            Step::Joined(ref joined) => joined.ops(),
        }
    }

    /// The op at whose place it runs, and by whose stream.
    pub(super) fn at(&self) -> usize {
        match self {
            Step::Joined(joined) => joined.made()[0],
            _ => self.ops().last().copied().unwrap_or(0),
        }
    }
}

/// The steps of a program, in order; these ops may be one launch.
pub(super) fn steps(p: &Program, slots: &Slots, joined: &[Joined]) -> Vec<Step> {
    let readers = p.readers();
    let mut fused: Vec<Step> = Vec::new();
    let mut taken = vec![false; p.ops.len()];
    for i in 0..p.ops.len() {
        if taken[i] {
            continue;
        }
        let one_of = joined.iter().find(|j| j.made()[0] == i).map(|j| Step::Joined(j.clone()));
        let Some(step) = one_of.or_else(|| begin(p, &readers, &taken, i)) else { continue };
        let mut tried = fused.clone();
        tried.push(step.clone());
        if holds(p, slots, &arranged(p, &tried)) {
            step.ops().iter().for_each(|o| taken[*o] = true);
            fused = tried;
        }
    }
    arranged(p, &fused)
}

/// The longest fusion that an op may begin.
fn begin(p: &Program, readers: &[Vec<usize>], taken: &[bool], i: usize) -> Option<Step> {
    let op = &p.ops[i];
    let plain = |j: usize| !taken[j] && p.ops[j].stream == op.stream && p.ops[j].after.is_empty();
    // The only reader of an op's result.
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
            // The norm that follows; others read the sum too.
            let norm = *readers[result.0 as usize].first()?;
            let fits = matches!(p.ops[norm].opcode, Opcode::NormModulate | Opcode::LayerNorm)
                && plain(norm)
                && reads_first(norm, i)
                && same_frames(op, &p.ops[norm]);
            fits.then_some(Step::ResidualNorm { add: Some(i), norm, quantize: quantized(norm) })
        }
        Opcode::NormModulate | Opcode::LayerNorm => {
            let quantize = Some(quantized(i)?);
            Some(Step::ResidualNorm { add: None, norm: i, quantize })
        }
        Opcode::RmsNorm | Opcode::RmsScale => {
            let rope = only(i).filter(|j| p.ops[*j].opcode == Opcode::Rope);
            let last = rope.unwrap_or(i);
            let write = only(last).filter(|j| writes_rows(p, *j));
            (rope.is_some() || write.is_some()).then_some(Step::Turned { scale: Some(i), rope, write })
        }
        Opcode::Rope => {
            let write = only(i).filter(|j| writes_rows(p, *j))?;
            Some(Step::Turned { scale: None, rope: Some(i), write: Some(write) })
        }
        Opcode::Matmul if op.str("act").is_none() && !few_rows(p, op) => {
            let add = only(i)?;
            let sum = &p.ops[add];
            let fits = sum.opcode == Opcode::GateResidual
                && sum.operands.len() == 2
                && sum.operands[1] == op.results[0]
                && sum.operands[0] != op.results[0];
            fits.then_some(Step::ProductAdd { product: i, add })
        }
        _ => None,
    }
}

/// Whether a product goes to the kernel for few rows, which adds no residual.
pub(super) fn few_rows(p: &Program, op: &Op) -> bool {
    let x = p.ty(op.operands[0]);
    x.dtype == DType::F32 && x.shape[0] <= FEW_ROWS
}

/// Rows up to which a product in f32 goes to the kernel that reads weights once.
const FEW_ROWS: u64 = 8;

/// Whether rows of the op's operand go to a buffer of as wide rows.
pub(super) fn writes_rows(p: &Program, j: usize) -> bool {
    let op = &p.ops[j];
    let Some(b) = op.buffer else { return false };
    let (from, to) = (p.ty(op.operands[0]), &p.buffer(b).ty);
    op.opcode == Opcode::CacheWrite && from.shape.len() == 2 && from.shape[1..] == to.shape[1..]
}

/// Whether both count frames alike, where both do.
fn same_frames(add: &Op, norm: &Op) -> bool {
    let counted = |op: &Op| op.int("frame_rows").map(|rows| (rows, op.int("first").unwrap_or(0)));
    match (counted(add), counted(norm)) {
        (Some(a), Some(b)) => a == b,
        _ => true,
    }
}

/// Every op that launches anything, each fusion at its place.
fn arranged(p: &Program, fused: &[Step]) -> Vec<Step> {
    let mut at: BTreeMap<usize, Step> = BTreeMap::new();
    let mut inside = vec![false; p.ops.len()];
    for step in fused {
        step.ops().iter().for_each(|o| inside[*o] = true);
        at.insert(step.at(), step.clone());
    }
    let one = |i: usize| match at.get(&i) {
        Some(step) => Some(step.clone()),
        None => (!inside[i] && p.ops[i].opcode.row().kind != Kind::Source).then_some(Step::One(i)),
    };
    (0..p.ops.len()).filter_map(one).collect()
}

/// Whether every value is in its slot when it is read, if these steps run in this order. A slot that a collective in flight
/// reads or writes may not be written until its wait.
fn holds(p: &Program, slots: &Slots, steps: &[Step]) -> bool {
    // What a source brings lies where it came from.
    let brought: BTreeSet<ValueId> = p
        .ops
        .iter()
        .filter(|o| o.opcode.row().kind == Kind::Source)
        .flat_map(|o| o.results.iter().copied())
        .collect();
    // What was made together lies behind the slots: rows of products until the next ones are made, tables for good.
    let mut together: BTreeMap<ValueId, &Joined> = BTreeMap::new();
    for step in steps {
        if let Step::Joined(joined) = step {
            together.extend(joined.made().iter().flat_map(|i| &p.ops[*i].results).map(|r| (*r, joined)));
        }
    }
    let mut made: Vec<&Joined> = Vec::new();
    let planned = |v: &ValueId| !brought.contains(v) && !together.contains_key(v);
    let slot = |v: ValueId| slots.of.get(v.0 as usize).copied().flatten().filter(|_| planned(&v));
    let mut holds: BTreeMap<u32, ValueId> = BTreeMap::new();
    // Slots in flight, and the ticket that frees them.
    let mut flying: BTreeMap<u32, ValueId> = BTreeMap::new();
    for step in steps {
        let ops = step.ops();
        let inner: Vec<ValueId> =
            ops[..ops.len() - 1].iter().flat_map(|o| p.ops[*o].results.iter().copied()).collect();
        let read = ops.iter().flat_map(|o| p.ops[*o].uses()).filter(|v| !inner.contains(v));
        for v in read {
            if p.ty(v).is_token() {
                continue;
            }
            if together.get(&v).is_some_and(|j| !made.contains(j)) {
                return false;
            }
            if let Some(s) = slot(v)
                && holds.get(&s) != Some(&v)
            {
                return false;
            }
        }
        if let Step::Joined(joined) = step {
            made.retain(|other| !joined.replaces(other));
            made.push(joined);
        }
        let last = &p.ops[step.at()];
        let mut wrote: Vec<ValueId> = last.results.clone();
        // Of a sum that is normed, the sum is written as well.
        if let Step::ResidualNorm { add: Some(add), .. } = step {
            wrote.extend(&p.ops[*add].results);
        }
        if last.opcode == Opcode::Wait {
            flying.retain(|_, t| *t != last.operands[0]);
        }
        if last.issue {
            let ticket = last.results[0];
            let results: Vec<ValueId> = p.given(last).into_iter().collect();
            for v in last.operands.iter().chain(&results) {
                if let Some(s) = slot(*v)
                    && flying.insert(s, ticket).is_some_and(|t| t != ticket)
                {
                    return false;
                }
            }
            wrote = results;
        } else {
            let written = wrote.iter().filter(|v| last.opcode != Opcode::Wait && !p.ty(**v).is_token());
            if written.filter_map(|v| slot(*v)).any(|s| flying.contains_key(&s)) {
                return false;
            }
        }
        // Rows are read whole before they are written, so a step may write over an operand of as many bytes; others
        // may not, and two results may not meet.
        if ops.len() > 1 {
            let outer = ops.iter().flat_map(|o| p.ops[*o].uses()).filter(|v| !inner.contains(v));
            let rows = matches!(step, Step::ResidualNorm { .. } | Step::Turned { .. });
            for v in outer {
                for w in &wrote {
                    let meets = slot(v).is_some() && slot(v) == slot(*w) && v != *w;
                    // A table of as many bytes is read for every row.
                    let alike = p.ty(v).shape == p.ty(*w).shape && p.ty(v).bytes() == p.ty(*w).bytes();
                    if meets && !(rows && alike) {
                        return false;
                    }
                }
            }
            let places: Vec<u32> = wrote.iter().filter_map(|w| slot(*w)).collect();
            if places.iter().collect::<BTreeSet<_>>().len() < places.len() {
                return false;
            }
        }
        for v in wrote {
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

    /// A slot for every value, but where the pairs say that two share one.
    fn own(p: &Program, shared: &[(u32, u32)]) -> Slots {
        let of = (0..p.values.len() as u32)
            .map(|v| Some(shared.iter().find(|(a, _)| *a == v).map_or(v, |(_, b)| *b)))
            .collect();
        Slots { bytes: vec![1 << 20; p.values.len()], of }
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
        let fused =
            Step::ResidualNorm { add: Some(op("gate_residual")), norm: op("layer_norm"), quantize: None };
        assert!(steps(&p, &own(&p, &[]), &[]).contains(&fused));
        // The norm over an operand of the sum: each row is read before it is written.
        let value = |name: &str| p.values.iter().position(|v| v.name == name).expect("a value") as u32;
        assert!(steps(&p, &own(&p, &[(value("n"), value("y"))]), &[]).contains(&fused));
        // The norm over the sum itself, which others still read.
        assert!(!steps(&p, &own(&p, &[(value("n"), value("s"))]), &[]).contains(&fused));
    }

    #[test]
    fn a_norm_that_is_only_quantized_is_never_written_wide() {
        let p = program(
            "program @p { %x = input : bf16[4, 32] %y = toperator.silu %x : bf16[4, 32] %w = weight \"w\" : f32[32] \
             %s = toperator.gate_residual %x, %y : bf16[4, 32] \
             %n = toperator.layer_norm %s, %w, %w {eps = 1e-6} : bf16[4, 32] \
             %q, %scale = toperator.quantize %n : e4m3[4, 32], f32[4] \
             %z = toperator.add %s, %s : bf16[4, 32] output \"z\", %z }",
        );
        let op = |name: &str| p.ops.iter().position(|o| o.opcode.name() == name).expect("an op");
        let (add, norm, quantize) = (Some(op("gate_residual")), op("layer_norm"), op("quantize"));
        let fused = Step::ResidualNorm { add, norm, quantize: Some(quantize) };
        assert!(steps(&p, &own(&p, &[]), &[]).contains(&fused));
        // Scales over an operand of the sum are written before another row of it is read.
        let value = |name: &str| p.values.iter().position(|v| v.name == name).expect("a value") as u32;
        assert!(!steps(&p, &own(&p, &[(value("scale"), value("y"))]), &[]).contains(&fused));
    }

    #[test]
    fn a_sum_and_a_norm_of_other_rows_are_two_steps() {
        let of = |first: u32| {
            let text = format!(
                "program @p {{ %x = input : f32[2, 8] %y = input : f32[2, 8] %m = input : f32[2, 16] \
                %s = toperator.gate_residual %x, %y, %m {{first = 2, frame_rows = 2, gate = 0}} : f32[2, 8] \
                %n = toperator.norm_modulate %s, %m {{eps = 1e-6, first = {first}, frame_rows = 2, scale = 0, shift = 1}} \
                : f32[2, 8] output \"n\", %n }}"
            );
            let p = program(&text);
            let is_fused = |s: &Step| matches!(s, Step::ResidualNorm { .. });
            steps(&p, &own(&p, &[]), &[]).iter().any(is_fused)
        };
        assert!(of(2) && !of(1));
    }

    #[test]
    fn a_residual_is_not_left_to_the_kernel_for_few_rows() {
        let fused = |rows: u64| {
            let text = format!(
                "program @p {{ %x = input : f32[{rows}, 8] %y = input : f32[{rows}, 8] %w = weight \"w\" : f32[8, 8] \
                 %p = toperator.matmul %x, %w : f32[{rows}, 8] %s = toperator.gate_residual %y, %p : f32[{rows}, 8] \
                 output \"s\", %s }}"
            );
            let p = program(&text);
            steps(&p, &own(&p, &[]), &[]).iter().any(|s| matches!(s, Step::ProductAdd { .. }))
        };
        assert!(!fused(8) && fused(9));
    }

    #[test]
    fn every_op_but_sources_is_in_one_step() {
        let p = program(NORMS);
        let mut seen: Vec<usize> = steps(&p, &own(&p, &[]), &[]).iter().flat_map(Step::ops).collect();
        seen.sort_unstable();
        let want: Vec<usize> =
            (0..p.ops.len()).filter(|i| p.ops[*i].opcode.row().kind != Kind::Source).collect();
        assert_eq!(seen, want);
    }
}
