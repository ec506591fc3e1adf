//! The order of a logical program's ops where several are right.
//!
//! A model lists what it computes; when is the planner's to say. A value that one row op alone reads is made right before it:
//! its pass over memory then finds the value in a near cache, backends may do both in one pass, and where the row op's result
//! travels to other ranks, it leaves as early as it can while the next product still computes. Caches that are written one after
//! another are so in the order in which their rows were made: what came first is written while what came last still travels.

use std::borrow::Cow;
use std::collections::BTreeSet;

use tessera_ir::{Opcode, Program};

/// The program with every product and row op that only a norm or an embedding reads moved down to its reader, and neighbouring
/// writes of caches in the order of their making.
pub(crate) fn chained(p: &Program) -> Cow<'_, Program> {
    let readers = p.readers();
    let waits_for = |i: usize| -> Option<usize> {
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
        match waits_for(i) {
            Some(reader) => before[reader].push(i),
            None => put(i, &before, &mut order),
        }
    }
    by_making(p, &mut order);
    if order.iter().copied().eq(0..p.ops.len()) {
        return Cow::Borrowed(p);
    }
    let ops = order.iter().map(|i| p.ops[*i].clone()).collect();
    Cow::Owned(Program { ops, ..p.clone() })
}

/// An op after all that waits for it.
fn put(i: usize, before: &[Vec<usize>], order: &mut Vec<usize>) {
    before[i].iter().for_each(|b| put(*b, before, order));
    order.push(i);
}

/// Puts each run of writes to different caches in the order in which what they write was made.
fn by_making(p: &Program, order: &mut [usize]) {
    let mut made = vec![0; p.values.len()];
    for (place, i) in order.iter().enumerate() {
        p.ops[*i].results.iter().for_each(|r| made[r.0 as usize] = place);
    }
    let writes = |i: &usize| p.ops[*i].opcode == Opcode::CacheWrite;
    for run in order.chunk_by_mut(|a, b| writes(a) && writes(b)) {
        let caches: BTreeSet<_> = run.iter().map(|i| p.ops[*i].buffer).collect();
        if run.len() > 1 && caches.len() == run.len() {
            run.sort_by_key(|i| made[p.ops[*i].operands[0].0 as usize]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    #[test]
    fn what_was_made_first_is_written_first_unless_to_one_cache() {
        let writes = |second: &str| {
            let text = format!(
                "program @p {{ buffer @a : f32[8, 8] buffer @b : f32[8, 8] %x = input : f32[4, 8] %r = call \"r\" : i64 \
                 %v = toperator.silu %x : f32[4, 8] %k = toperator.silu %v : f32[4, 8] \
                 cache.write @a, %k, row=%r cache.write @{second}, %v, row=%r }}"
            );
            let p = parse_all(&text, "test").expect("a program").remove(0);
            let written = |p: &Program| -> Vec<String> {
                let of = p.ops.iter().filter(|o| o.opcode == Opcode::CacheWrite);
                of.map(|o| p.value(o.operands[0]).name.clone()).collect()
            };
            written(&chained(&p))
        };
        assert_eq!(writes("b"), ["v", "k"]);
        assert_eq!(writes("a"), ["k", "v"]);
    }

    #[test]
    fn each_chain_stands_together_and_nothing_is_read_before_it_is_made() {
        let text = "program @p { %x = input : f32[4, 8] %w = weight \"w\" : f32[8, 8] %n = weight \"n\" : f32[8] \
            %s = call : i64 \
            %q = toperator.matmul %x, %w : f32[4, 8] %k = toperator.matmul %x, %w : f32[4, 8] \
            %v = toperator.matmul %x, %w : f32[4, 8] \
            %a = toperator.rms_norm %q, %n {eps = 1e-6} : f32[4, 8] \
            %b = toperator.rms_norm %k, %n {eps = 1e-6} : f32[4, 8] \
            %c = toperator.rope %a, start=%s {grid = [1, 2, 2], head_dim = 8} : f32[4, 8] \
            %d = toperator.rope %b, start=%s {grid = [1, 2, 2], head_dim = 8} : f32[4, 8] \
            output \"c\", %c output \"d\", %d output \"v\", %v }";
        let p = parse_all(text, "test").expect("a program").remove(0);
        let ordered = chained(&p);
        let made: Vec<&str> = ordered
            .ops
            .iter()
            .filter_map(|o| o.results.first())
            .map(|r| p.value(*r).name.as_str())
            .filter(|n| "qkvabcd".contains(*n))
            .collect();
        assert_eq!(made, ["v", "q", "a", "c", "k", "b", "d"]);
        for (i, op) in ordered.ops.iter().enumerate() {
            let defs = ordered.definitions();
            assert!(op.uses().all(|v| defs[v.0 as usize].is_some_and(|d| d < i)), "op {i}");
        }
        assert_eq!(*chained(&ordered), *ordered);
    }
}
