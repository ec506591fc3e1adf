//! Which ops an executor makes one kernel of, and what a kernel of passes moves.

use std::collections::BTreeSet;

use tessera_ir::{Kind, Op, Opcode, Program, ValueId};

use super::Widths;

/// Whether an op is a pass over memory: it reads each number a few times at most and multiplies no matrices.
pub(super) fn is_pass(op: Opcode) -> bool {
    op.row().kind == Kind::Compute
        && !matches!(op, Opcode::Matmul | Opcode::Attention | Opcode::Dot | Opcode::MoeRoute)
        || op == Opcode::CacheWrite
}

/// Whether a pass only moves numbers.
pub(super) fn only_copies(op: Opcode) -> bool {
    use Opcode as O;
    matches!(op, O::CacheWrite | O::TakeRows | O::TakeShard | O::Pad | O::Compact | O::Add | O::Cast)
}

/// Sets of passes that can be one kernel, each in program order. A pass joins the kernel of a neighbour that makes what
/// it reads, if both go over as many rows on one stream and all else that it reads existed before that kernel began: then
/// nothing waits for anything in a circle.
pub(super) fn fused_passes(p: &Program, defs: &[Option<usize>]) -> Vec<Vec<usize>> {
    let mut kernels: Vec<Vec<usize>> = Vec::new();
    let mut kernel_of: Vec<Option<usize>> = vec![None; p.ops.len()];
    for (i, op) in p.ops.iter().enumerate().filter(|(_, op)| is_pass(op.opcode)) {
        let makers: Vec<usize> = op.uses().filter_map(|v| defs[v.0 as usize]).collect();
        let joins = makers.iter().filter_map(|d| kernel_of[*d]).find(|k| {
            let first = kernels[*k][0];
            p.ops[first].stream == op.stream
                && rows(p, &p.ops[first]) == rows(p, op)
                && makers.iter().all(|d| kernel_of[*d] == Some(*k) || *d < first || is_source(&p.ops[*d]))
        });
        let k = joins.unwrap_or_else(|| {
            kernels.push(Vec::new());
            kernels.len() - 1
        });
        kernels[k].push(i);
        kernel_of[i] = Some(k);
    }
    kernels.retain(|k| k.len() > 1);
    kernels
}

/// Sets of products with one left operand that stand side by side and have no activation.
pub(super) fn joined_products(p: &Program) -> Vec<Vec<usize>> {
    let mut sets: Vec<Vec<usize>> = Vec::new();
    let mut open = false;
    for (i, op) in p.ops.iter().enumerate() {
        if is_source(op) {
            continue;
        }
        let plain = op.opcode == Opcode::Matmul && op.str("act").is_none();
        let beside = plain
            && open
            && sets.last().is_some_and(|s| {
                let first = &p.ops[s[0]];
                first.operands[0] == op.operands[0] && first.stream == op.stream
            });
        if beside {
            if let Some(set) = sets.last_mut() {
                set.push(i);
            }
        } else if plain {
            sets.push(vec![i]);
        }
        open = plain;
    }
    sets.retain(|s| s.len() > 1);
    sets
}

/// Bytes that a kernel of passes moves: what it reads that others made, what it makes that others read.
pub(super) fn traffic(p: &Program, widths: &Widths, readers: &[Vec<usize>], set: &[usize]) -> f64 {
    let inside: BTreeSet<usize> = set.iter().copied().collect();
    let made: BTreeSet<ValueId> = set.iter().flat_map(|i| p.ops[*i].results.iter().copied()).collect();
    let mut read: BTreeSet<ValueId> = BTreeSet::new();
    let mut bytes = 0.0;
    for i in set {
        let op = &p.ops[*i];
        read.extend(operands(op).filter(|v| !made.contains(v)));
        if op.opcode == Opcode::CacheWrite {
            bytes += op.operands.first().map_or(0.0, |v| widths.bytes(p, *v));
        }
    }
    let last = set.last().copied().unwrap_or(0);
    let kept = made.iter().filter(|v| {
        readers[v.0 as usize].iter().any(|j| !inside.contains(j)) || p.ops[last].results.contains(v)
    });
    bytes
        + kept.map(|v| widths.bytes(p, *v)).sum::<f64>()
        + read.iter().map(|v| widths.bytes(p, *v)).sum::<f64>()
}

/// Bytes that a pass by itself moves.
pub(super) fn traffic_alone(p: &Program, widths: &Widths, op: &Op) -> f64 {
    let read: f64 = operands(op).map(|v| widths.bytes(p, v)).sum();
    let written = match op.opcode {
        Opcode::CacheWrite => op.operands.first().map_or(0.0, |v| widths.bytes(p, *v)),
        // A pass that takes a piece reads no more than it writes.
        Opcode::TakeRows | Opcode::TakeShard | Opcode::Compact => return 2.0 * results(p, widths, op),
        _ => results(p, widths, op),
    };
    read + written
}

fn results(p: &Program, widths: &Widths, op: &Op) -> f64 {
    op.results.iter().map(|r| widths.bytes(p, *r)).sum()
}

/// What an op reads, without events.
fn operands(op: &Op) -> impl Iterator<Item = ValueId> + '_ {
    op.operands.iter().copied().chain(op.keyed.iter().map(|(_, v)| *v))
}

/// Rows that a pass goes over.
fn rows(p: &Program, op: &Op) -> Option<u64> {
    let v = op.operands.first().or(op.results.first())?;
    p.ty(*v).shape.first().copied()
}

fn is_source(op: &Op) -> bool {
    op.opcode.row().kind == Kind::Source
}
