//! Exchanges whose pieces no launch of their own moves: the kernel that makes an operand writes it where members want it, or copy
//! engines move it while products compute.
//!
//! A result that others write while this rank still computes must lie in a slot that nobody here uses meanwhile. That is not
//! assumed: the steps are walked back over the planned slots from where the result begins to be written, and where they do not
//! allow it the exchange is a launch like any other.

use std::collections::{BTreeMap, BTreeSet};

use tessera_ir::{Op, Opcode, Program, Slots, ValueId};

use super::steps::Step;
use crate::exchange::Along;

/// How the pieces of an exchange are moved. Steps are indices into the program's list of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carried {
    /// By the step that makes the operand. Members meet before step `opens`, which may be an earlier one: what is known to be free
    /// long before does not have to be waited for.
    Maker { maker: usize, opens: usize, along: Along },
    /// By copy engines: products compute from its issue to its wait, and would share the multiprocessors with a kernel.
    Engines,
}

/// The exchanges of a program that are carried so, by op.
pub(super) fn carried(p: &Program, slots: &Slots, steps: &[Step]) -> BTreeMap<usize, Carried> {
    let used = Used::of(p, slots, steps);
    let readers = p.readers();
    let exchanges = steps.iter().enumerate().filter_map(|(k, s)| match s {
        Step::One(i) if may(&p.ops[*i]) => Some((k, *i)),
        _ => None,
    });
    exchanges.filter_map(|(k, i)| Some((i, one(p, &used, &readers, steps, (k, i))?))).collect()
}

fn one(
    p: &Program,
    used: &Used<'_>,
    readers: &[Vec<usize>],
    steps: &[Step],
    (k, i): (usize, usize),
) -> Option<Carried> {
    let op = &p.ops[i];
    let wait = p.wait_of(op)?;
    let waits = steps.iter().position(|s| s.at() == wait)?;
    let computes = |s: &Step| {
        let ops = s.ops();
        ops.iter().any(|o| {
            p.ops[*o].stream != op.stream && matches!(p.ops[*o].opcode, Opcode::Matmul | Opcode::Attention)
        })
    };
    if steps[k..waits].iter().any(computes) {
        return Some(Carried::Engines);
    }
    let operand = op.operands[0];
    if readers[operand.0 as usize] != [i] {
        return None;
    }
    let maker = steps[..k].iter().rposition(|s| p.ops[s.at()].results.contains(&operand))?;
    let along = match (op.int("concat"), &steps[maker]) {
        (Some(0), Step::Turned { write: None, .. }) => Along::Columns,
        (Some(0), Step::One(m)) if is_row_op(p.ops[*m].opcode) => Along::Columns,
        (Some(1), Step::One(m)) if p.ops[*m].opcode == Opcode::Attention => Along::Rows,
        _ => return None,
    };
    // Collectives of a group begin in the program's order, one after the other; a group has one stream.
    let same_lane = |s: &Step| p.ops[s.at()].opcode.is_collective() && p.ops[s.at()].stream == op.stream;
    if steps[maker + 1..k].iter().any(same_lane) {
        return None;
    }
    let slot = used.slot(p.given(op)?)?;
    let free = |k: usize| !used.by_step[k].contains(&slot);
    if !(maker..k).all(free) {
        return None;
    }
    let opens = (0..maker).rev().take_while(|k| free(*k) && !same_lane(&steps[*k])).last().unwrap_or(maker);
    Some(Carried::Maker { maker, opens, along })
}

/// Whether others than its launch may carry it: unless the program says what does.
fn may(op: &Op) -> bool {
    op.opcode == Opcode::AllToAll && op.issue && !op.attrs.contains_key("via")
}

fn is_row_op(op: Opcode) -> bool {
    matches!(op, Opcode::Rope | Opcode::RmsNorm | Opcode::RmsScale)
}

/// The slots that each step reads or writes, those of collectives under way included.
struct Used<'a> {
    slots: &'a Slots,
    by_step: Vec<BTreeSet<u32>>,
}

impl<'a> Used<'a> {
    fn of(p: &Program, slots: &'a Slots, steps: &[Step]) -> Used<'a> {
        let mut used = Used { slots, by_step: Vec::with_capacity(steps.len()) };
        let mut flying: BTreeMap<ValueId, Vec<u32>> = BTreeMap::new();
        for step in steps {
            let mut here: BTreeSet<u32> = BTreeSet::new();
            for o in step.ops() {
                let op = &p.ops[o];
                here.extend(op.uses().chain(op.results.iter().copied()).filter_map(|v| used.slot(v)));
                if op.issue {
                    let held = op.operands.iter().copied().chain(p.given(op));
                    let held = held.filter_map(|v| used.slot(v)).collect();
                    flying.insert(op.results[0], held);
                }
            }
            here.extend(flying.values().flatten());
            if p.ops[step.at()].opcode == Opcode::Wait {
                flying.remove(&p.ops[step.at()].operands[0]);
            }
            used.by_step.push(here);
        }
        used
    }

    fn slot(&self, v: ValueId) -> Option<u32> {
        self.slots.of.get(v.0 as usize).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::super::steps::steps;
    use super::*;
    use tessera_ir::parse_all;

    const EXCHANGES: &str = "program @p role(stage0) mesh(tp=2) streams(compute, tp_collective) { \
        %x = input : f32[4, 8] {tp: shard(0)} @compute \
        %w = weight \"w\" : f32[8, 8] {tp: replicated} @compute \
        %n = weight \"n\" : f32[8] {tp: replicated} @compute \
        %s = call : i64 @compute \
        %v = ttile.matmul %x, %w : f32[4, 8] {tp: shard(0)} @compute \
        %ev = event.record @compute \
        %tv = ttile.collective.issue all_to_all %v {axis = \"tp\", concat = 0, split = 1, unit = 4} @tp_collective after(%ev) \
        %k = ttile.matmul %x, %w : f32[4, 8] {tp: shard(0)} @compute \
        %r = ttile.rms_norm %k, %n {eps = 1e-6} : f32[4, 8] {tp: shard(0)} @compute \
        %t = ttile.rope %r, start=%s {grid = [1, 2, 4], head_dim = 4} : f32[4, 8] {tp: shard(0)} @compute \
        %ek = event.record @compute \
        %tk = ttile.collective.issue all_to_all %t {axis = \"tp\", concat = 0, split = 1, unit = 4} @tp_collective after(%ek) \
        %kh = ttile.collective.wait %tk : f32[8, 4] {tp: shard(1)} @compute \
        %vh = ttile.collective.wait %tv : f32[8, 4] {tp: shard(1)} @compute \
        %a = ttile.attention %kh, %kh, %vh {head_dim = 4} : f32[8, 4] {tp: shard(1)} @compute \
        %ea = event.record @compute \
        %ta = ttile.collective.issue all_to_all %a {axis = \"tp\", concat = 1, split = 0, unit = 1} @tp_collective after(%ea) \
        %o = ttile.collective.wait %ta : f32[4, 8] {tp: shard(0)} @compute \
        output \"o\", %o }";

    fn program() -> Program {
        parse_all(EXCHANGES, "test").expect("a program").remove(0)
    }

    /// How each exchange is carried, in order, with a slot for every value but where two share one, by name.
    fn of(shared: &[(&str, &str)]) -> Vec<Option<Carried>> {
        let p = program();
        let value = |name: &str| p.values.iter().position(|v| v.name == name).expect("a value") as u32;
        let own = |v: u32| shared.iter().find(|(a, _)| value(a) == v).map_or(v, |(_, b)| value(b));
        let slots = Slots {
            bytes: vec![1 << 20; p.values.len()],
            of: (0..p.values.len() as u32).map(|v| Some(own(v))).collect(),
        };
        let found = carried(&p, &slots, &steps(&p, &slots, &[]));
        p.collectives().map(|(i, _)| found.get(&i).copied()).collect()
    }

    fn opens(c: Option<Carried>) -> usize {
        match c {
            Some(Carried::Maker { opens, .. }) => opens,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_products_hide_goes_by_engines_and_the_rest_with_its_maker() {
        let found = of(&[]);
        assert_eq!(found[0], Some(Carried::Engines));
        assert!(matches!(found[1], Some(Carried::Maker { along: Along::Columns, .. })));
        assert!(matches!(found[2], Some(Carried::Maker { along: Along::Rows, .. })));
        // Right after the exchange before: nobody uses the results' slots from there on.
        let p = program();
        let slots =
            Slots { bytes: vec![0; p.values.len()], of: (0..p.values.len() as u32).map(Some).collect() };
        let steps = steps(&p, &slots, &[]);
        let after = |i: usize| steps.iter().position(|s| s.at() == i).expect("a step") + 1;
        let issues: Vec<usize> = p.collectives().map(|(i, _)| i).collect();
        assert_eq!((opens(found[1]), opens(found[2])), (after(issues[0]), after(issues[1])));
    }

    #[test]
    fn a_result_over_what_is_still_read_is_moved_by_itself() {
        // Over an operand of attention, and over the product that is normed.
        assert_eq!(of(&[("o", "vh")])[2], None);
        assert_eq!(of(&[("kh", "k")])[1], None);
        // Over what was last read before the maker: members meet only then.
        let late = of(&[("kh", "x")]);
        assert!(opens(late[1]) > opens(of(&[])[1]));
    }
}
