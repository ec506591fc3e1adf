//! Chooses the order of a logical program's ops where several orders are correct.
//!
//! A model lists what it computes; the planner decides when. A value that only one row op reads is
//! computed right before that op: the row op's kernel then finds the value in the L1 or L2 cache,
//! backends may fuse both ops, and if the row op's result travels to other ranks, it leaves as
//! early as possible while the next matmul still computes. Consecutive cache writes follow the
//! order in which their rows are computed: the first rows are written while the last ones still
//! travel.

use std::borrow::Cow;
use std::collections::BTreeSet;

use tessera_ir::{Opcode, Program};

/// Returns the program with every matmul and norm that only a norm or a rotary embedding reads
/// moved down to its reader, and with consecutive cache writes sorted by the order of their
/// producers.
pub(crate) fn reorder_chains(p: &Program) -> Cow<'_, Program> {
    let readers = p.value_readers();
    let sole_reader = |i: usize| -> Option<usize> {
        let op = &p.ops[i];
        let [result] = op.results[..] else { return None };
        let [reader] = readers[result.0 as usize][..] else { return None };
        let chain = matches!(op.opcode, Opcode::Matmul | Opcode::RmsNorm);
        let row = matches!(p.ops[reader].opcode, Opcode::RmsNorm | Opcode::Rope);
        (chain && row && p.ops[reader].operands.first() == Some(&result)).then_some(reader)
    };
    let mut before: Vec<Vec<usize>> = vec![Vec::new(); p.ops.len()];
    let mut order = Vec::with_capacity(p.ops.len());
    for i in 0..p.ops.len() {
        match sole_reader(i) {
            Some(reader) => before[reader].push(i),
            None => push_with_producers(i, &before, &mut order),
        }
    }
    sort_cache_writes(p, &mut order);
    if order.iter().copied().eq(0..p.ops.len()) {
        return Cow::Borrowed(p);
    }
    let ops = order.iter().map(|i| p.ops[*i].clone()).collect();
    Cow::Owned(Program { ops, ..p.clone() })
}

/// Appends an op after the ops that are moved down to it.
fn push_with_producers(i: usize, before: &[Vec<usize>], order: &mut Vec<usize>) {
    before[i].iter().for_each(|b| push_with_producers(*b, before, order));
    order.push(i);
}

/// Sorts each run of writes to different caches by the order in which their operands are produced.
fn sort_cache_writes(p: &Program, order: &mut [usize]) {
    let mut produced_at = vec![0; p.values.len()];
    for (position, i) in order.iter().enumerate() {
        p.ops[*i].results.iter().for_each(|r| produced_at[r.0 as usize] = position);
    }
    let writes = |i: &usize| p.ops[*i].opcode == Opcode::CacheWrite;
    for run in order.chunk_by_mut(|a, b| writes(a) && writes(b)) {
        let caches: BTreeSet<_> = run.iter().map(|i| p.ops[*i].buffer).collect();
        if run.len() > 1 && caches.len() == run.len() {
            run.sort_by_key(|i| produced_at[p.ops[*i].operands[0].0 as usize]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    #[test]
    fn cache_writes_follow_production_order_unless_to_one_cache() {
        let writes = |second: &str| {
            let text = format!(
                "program @p {{ buffer @a : f32[8, 8] buffer @b : f32[8, 8] %x = input : f32[4, 8] %r = call \"r\" : i64 \
                 %v = toperator.silu %x : f32[4, 8] %k = toperator.silu %v : f32[4, 8] \
                 cache.write @a, %k, row=%r cache.write @{second}, %v, row=%r }}"
            );
            let p = parse_all(&text, "test").expect("the text is a program").remove(0);
            let written = |p: &Program| -> Vec<String> {
                let of = p.ops.iter().filter(|o| o.opcode == Opcode::CacheWrite);
                of.map(|o| p.value(o.operands[0]).name.clone()).collect()
            };
            written(&reorder_chains(&p))
        };
        assert_eq!(writes("b"), ["v", "k"]);
        assert_eq!(writes("a"), ["k", "v"]);
    }

    #[test]
    fn chains_are_contiguous_and_values_are_defined_before_use() {
        let text = "program @p { %x = input : f32[4, 8] %w = weight \"w\" : f32[8, 8] %n = weight \"n\" : f32[8] \
            %s = call : i64 \
            %q = toperator.matmul %x, %w : f32[4, 8] %k = toperator.matmul %x, %w : f32[4, 8] \
            %v = toperator.matmul %x, %w : f32[4, 8] \
            %a = toperator.rms_norm %q, %n {eps = 1e-6} : f32[4, 8] \
            %b = toperator.rms_norm %k, %n {eps = 1e-6} : f32[4, 8] \
            %c = toperator.rope %a, start=%s {grid = [1, 2, 2], head_dim = 8} : f32[4, 8] \
            %d = toperator.rope %b, start=%s {grid = [1, 2, 2], head_dim = 8} : f32[4, 8] \
            output \"c\", %c output \"d\", %d output \"v\", %v }";
        let p = parse_all(text, "test").expect("the text is a program").remove(0);
        let ordered = reorder_chains(&p);
        let made: Vec<&str> = ordered
            .ops
            .iter()
            .filter_map(|o| o.results.first())
            .map(|r| p.value(*r).name.as_str())
            .filter(|n| "qkvabcd".contains(*n))
            .collect();
        assert_eq!(made, ["v", "q", "a", "c", "k", "b", "d"]);
        for (i, op) in ordered.ops.iter().enumerate() {
            let defs = ordered.defining_ops();
            assert!(op.used_values().all(|v| defs[v.0 as usize].is_some_and(|d| d < i)), "op {i}");
        }
        assert_eq!(*reorder_chains(&ordered), *ordered);
    }
}
