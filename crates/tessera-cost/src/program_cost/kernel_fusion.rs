//! Kernel fusion of an executor, and the memory traffic of fused elementwise kernels.

use std::collections::BTreeSet;

use tessera_ir::op_traits::KernelClass;
use tessera_ir::{Op, OpKind, OpView, Opcode, Program, ValueId};

use super::value_bytes;

/// Returns whether an op is memory-bound: it reads each value at most a few times and multiplies no
/// matrices.
pub(super) fn is_memory_bound(op: Opcode) -> bool {
    matches!(op.table_row().traits.kernel, KernelClass::Copy | KernelClass::Elementwise)
}

/// Returns sets of elementwise ops that can be fused, each in program order. An op joins the kernel
/// of a producer of its inputs if both cover the same number of rows on one stream and all its
/// other inputs existed before that kernel began. This condition excludes dependency cycles.
pub(super) fn fused_elementwise(p: &Program, defs: &[Option<usize>]) -> Vec<Vec<usize>> {
    let mut kernels: Vec<Vec<usize>> = Vec::new();
    let mut kernel_of: Vec<Option<usize>> = vec![None; p.ops.len()];
    for (i, op) in p.ops.iter().enumerate().filter(|(_, op)| is_memory_bound(op.opcode)) {
        let makers: Vec<usize> = op.used_values().filter_map(|v| defs[v.0 as usize]).collect();
        let joins = makers.iter().filter_map(|d| kernel_of[*d]).find(|k| {
            let first = kernels[*k][0];
            p.ops[first].stream == op.stream
                && row_count(p, &p.ops[first]) == row_count(p, op)
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

/// Returns sets of adjacent matmuls that share a left operand and have no activation.
pub(super) fn mergeable_matmuls(p: &Program) -> Vec<Vec<usize>> {
    let mut sets: Vec<Vec<usize>> = Vec::new();
    let mut open = false;
    for (i, op) in p.ops.iter().enumerate() {
        if is_source(op) {
            continue;
        }
        let plain = matches!(op.view(), Ok(OpView::Matmul(v)) if v.act.is_none());
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

/// Returns the bytes that a fused kernel moves: inputs from other kernels, and outputs that other
/// kernels read.
pub(super) fn kernel_traffic(p: &Program, readers: &[Vec<usize>], set: &[usize]) -> f64 {
    let inside: BTreeSet<usize> = set.iter().copied().collect();
    let made: BTreeSet<ValueId> = set.iter().flat_map(|i| p.ops[*i].results.iter().copied()).collect();
    let mut read: BTreeSet<ValueId> = BTreeSet::new();
    let mut bytes = 0.0;
    for i in set {
        let op = &p.ops[*i];
        read.extend(read_values(op).filter(|v| !made.contains(v)));
        if op.opcode == Opcode::CacheWrite {
            bytes += op.operands.first().map_or(0.0, |v| value_bytes(p, *v));
        }
    }
    let last = set.last().copied().unwrap_or(0);
    let kept = made.iter().filter(|v| {
        readers[v.0 as usize].iter().any(|j| !inside.contains(j)) || p.ops[last].results.contains(v)
    });
    bytes
        + kept.map(|v| value_bytes(p, *v)).sum::<f64>()
        + read.iter().map(|v| value_bytes(p, *v)).sum::<f64>()
}

/// Returns the bytes that an unfused elementwise op moves.
pub(super) fn op_traffic(p: &Program, op: &Op) -> f64 {
    let read: f64 = read_values(op).map(|v| value_bytes(p, v)).sum();
    let written = match op.opcode {
        Opcode::CacheWrite => op.operands.first().map_or(0.0, |v| value_bytes(p, *v)),
        // An op that takes a slice reads no more than it writes.
        Opcode::TakeRows | Opcode::TakeShard | Opcode::Compact | Opcode::Embed | Opcode::HeadColumns => {
            return 2.0 * result_bytes(p, op);
        }
        _ => result_bytes(p, op),
    };
    read + written
}

fn result_bytes(p: &Program, op: &Op) -> f64 {
    op.results.iter().map(|r| value_bytes(p, *r)).sum()
}

/// Returns the values that an op reads, without events.
fn read_values(op: &Op) -> impl Iterator<Item = ValueId> + '_ {
    op.operands.iter().copied().chain(op.keyed.iter().map(|(_, v)| *v))
}

/// Returns the extent of dim 0 of an op's first operand, or of its result if it has no operand.
fn row_count(p: &Program, op: &Op) -> Option<u64> {
    let v = op.operands.first().or(op.results.first())?;
    p.type_of(*v).shape.first().copied()
}

fn is_source(op: &Op) -> bool {
    op.opcode.table_row().kind == OpKind::Source
}
