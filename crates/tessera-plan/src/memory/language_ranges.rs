//! Live ranges that let a backend compute several ops of a language model in one launch. Such a launch runs at the
//! place of its last op, so what its first ops read must still be there.

use tessera_ir::{Op, OpView, Opcode, Program, ValueId};

/// Extends the last uses of operands for the fusions of a program with attention over pages:
///
/// - what a sum reads, and the cast before it, until the norm of the sum and the cast behind that,
/// - the row of two matmuls until their results are multiplied,
/// - the heads of queries, keys and values until the last of them is ready for attention.
///
/// The other way, results of a launch in memory of their own, would need as much memory and a second planner.
pub(super) fn extend_for_language_launches(
    p: &Program,
    readers: &[Vec<usize>],
    last_uses: &mut [Option<usize>],
) {
    let attentions = p.ops.iter().enumerate().filter(|(_, op)| op.opcode == Opcode::PagedAttention);
    let attentions: Vec<usize> = attentions.map(|(i, _)| i).collect();
    if attentions.is_empty() {
        return;
    }
    let defs = p.defining_ops();
    let maker = |v: ValueId| defs[v.0 as usize].map(|i| &p.ops[i]);
    let mut extend = |op: &Op, until: usize| {
        for v in op.used_values() {
            let end = &mut last_uses[v.0 as usize];
            *end = (*end).max(Some(until));
        }
    };
    let only_reader = |op: &Op| match op.results.first().map(|v| &readers[v.0 as usize][..]) {
        Some([reader]) => Some(*reader),
        _ => None,
    };
    for (i, op) in p.ops.iter().enumerate() {
        match op.view() {
            Ok(OpView::RmsNorm(norm)) => {
                let until = only_reader(op).filter(|j| p.ops[*j].opcode == Opcode::Cast).unwrap_or(i);
                extend(op, until);
                let sum = maker(norm.x).filter(|sum| sum.opcode == Opcode::Add);
                let Some(sum) = sum.filter(|_| readers[norm.x.0 as usize].first() == Some(&i)) else {
                    continue;
                };
                extend(sum, until);
                let casts = sum.operands.iter().filter_map(|v| maker(*v));
                casts.filter(|cast| cast.opcode == Opcode::Cast).for_each(|cast| extend(cast, until));
            }
            Ok(OpView::Mul(gated)) => {
                let row = |v: ValueId| match maker(v)?.view() {
                    Ok(OpView::Matmul(matmul)) if p.type_of(matmul.x).shape[0] == 1 => Some(matmul.x),
                    _ => None,
                };
                let (gate, up) = (row(gated.x), row(gated.y));
                if let (Some(op), true) = (maker(gated.x), gate.is_some() && gate == up) {
                    extend(op, i);
                }
            }
            _ => {}
        }
    }
    let mut begin = 0;
    for attention in attentions {
        let of_heads = |i: &usize| match p.ops[*i].view() {
            Ok(OpView::HeadNorm(_) | OpView::Rotary(_)) => true,
            Ok(OpView::CacheWrite(v)) => v.pages.is_some(),
            _ => false,
        };
        let heads: Vec<usize> = (begin..attention).filter(of_heads).collect();
        if let Some(last) = heads.last() {
            heads.iter().for_each(|i| extend(&p.ops[*i], *last));
        }
        begin = attention + 1;
    }
}
