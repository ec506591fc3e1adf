//! Communication fusion: collectives without a kernel of their own. Either the kernel that produces
//! an operand stores it directly into the peers' memory, or DMA copy engines move it while GEMMs
//! run.
//!
//! Peers write such a result while this rank still computes, so the result must lie in a slot that
//! no step uses meanwhile. The planner of this file proves that from the planned slots, walking
//! back from the step that starts to write the result. Where the slots do not allow it, the
//! collective gets a normal launch.

use std::collections::{BTreeMap, BTreeSet};

use tessera_ir::{OpView, Opcode, Program, Slots, ValueId, views};

use super::launch_step::LaunchStep;
use crate::collectives::SplitDim;

/// How the data of a collective moves without a kernel of its own. Steps are indices into the
/// program's steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CommOffload {
    /// The step that produces the operand stores it into the peers' results. Members synchronize
    /// before step `open_step`, which may precede the producer: if the result's slot is free early,
    /// the wait costs nothing.
    FusedIntoProducer { producer: usize, open_step: usize, split_dim: SplitDim },
    /// DMA copy engines move the data. GEMMs or attention overlap the collective, and a copy kernel
    /// would take multiprocessors from them.
    CopyEngines,
}

/// Chooses the collectives of a program that run without a kernel of their own, by op.
pub(crate) fn plan_comm_offloads(
    p: &Program,
    slots: &Slots,
    steps: &[LaunchStep],
) -> BTreeMap<usize, CommOffload> {
    let used = SlotUse::from_steps(p, slots, steps);
    let readers = p.value_readers();
    let exchanges = steps.iter().enumerate().filter_map(|(k, s)| match s {
        LaunchStep::Single(i) => Some((k, *i, offloadable_exchange(p, *i)?)),
        _ => None,
    });
    let choose = |(k, i, v): (usize, usize, views::AllToAll)| {
        Some((i, choose_offload(p, &used, &readers, steps, (k, i), &v)?))
    };
    exchanges.filter_map(choose).collect()
}

fn choose_offload(
    p: &Program,
    used: &SlotUse<'_>,
    readers: &[Vec<usize>],
    steps: &[LaunchStep],
    (k, i): (usize, usize),
    v: &views::AllToAll,
) -> Option<CommOffload> {
    let op = &p.ops[i];
    let wait = p.find_wait(op)?;
    let wait_step = steps.iter().position(|s| s.launch_op() == wait)?;
    let computes = |s: &LaunchStep| {
        let ops = s.all_ops();
        ops.iter().any(|o| {
            p.ops[*o].stream != op.stream && matches!(p.ops[*o].opcode, Opcode::Matmul | Opcode::Attention)
        })
    };
    if steps[k..wait_step].iter().any(computes) {
        return Some(CommOffload::CopyEngines);
    }
    // The kernels that store to peers write matrices.
    if readers[v.x.0 as usize] != [i] || p.type_of(v.x).shape.len() != 2 {
        return None;
    }
    let producer = steps[..k].iter().rposition(|s| p.ops[s.launch_op()].results.contains(&v.x))?;
    let split_dim = match (v.concat, &steps[producer]) {
        (0, LaunchStep::RmsRope { write: None, .. }) => SplitDim::Columns,
        (0, LaunchStep::Single(m)) if is_row_kernel(p.ops[*m].opcode) => SplitDim::Columns,
        (1, LaunchStep::Single(m)) if p.ops[*m].opcode == Opcode::Attention => SplitDim::Rows,
        _ => return None,
    };
    // Collectives of a group run in program order on the group's stream, so no other collective may
    // lie in between.
    let same_communicator = |s: &LaunchStep| {
        p.ops[s.launch_op()].opcode.is_collective() && p.ops[s.launch_op()].stream == op.stream
    };
    if steps[producer + 1..k].iter().any(same_communicator) {
        return None;
    }
    let slot = used.slot_of(p.collective_result(op)?)?;
    let free = |k: usize| !used.by_step[k].contains(&slot);
    if !(producer..k).all(free) {
        return None;
    }
    let open_step = (0..producer)
        .rev()
        .take_while(|k| free(*k) && !same_communicator(&steps[*k]))
        .last()
        .unwrap_or(producer);
    Some(CommOffload::FusedIntoProducer { producer, open_step, split_dim })
}

/// Returns a collective that may be offloaded: an issued all-to-all of plain elements for which the program
/// requests no transport.
fn offloadable_exchange(p: &Program, i: usize) -> Option<views::AllToAll> {
    match p.ops[i].view() {
        Ok(OpView::AllToAll(v)) if p.ops[i].issue && v.transport.is_none() && v.wire.is_none() => Some(v),
        _ => None,
    }
}

fn is_row_kernel(op: Opcode) -> bool {
    matches!(op, Opcode::Rope | Opcode::RmsNorm | Opcode::RmsScale)
}

/// The slots that each step reads or writes, including those of collectives in flight.
struct SlotUse<'a> {
    slots: &'a Slots,
    by_step: Vec<BTreeSet<u32>>,
}

impl<'a> SlotUse<'a> {
    fn from_steps(p: &Program, slots: &'a Slots, steps: &[LaunchStep]) -> SlotUse<'a> {
        let mut used = SlotUse { slots, by_step: Vec::with_capacity(steps.len()) };
        let mut in_flight: BTreeMap<ValueId, Vec<u32>> = BTreeMap::new();
        for step in steps {
            let mut step_slots: BTreeSet<u32> = BTreeSet::new();
            for o in step.all_ops() {
                let op = &p.ops[o];
                step_slots.extend(
                    op.used_values().chain(op.results.iter().copied()).filter_map(|v| used.slot_of(v)),
                );
                if op.issue {
                    let ticket_slots = op.operands.iter().copied().chain(p.collective_result(op));
                    let ticket_slots = ticket_slots.filter_map(|v| used.slot_of(v)).collect();
                    in_flight.insert(op.results[0], ticket_slots);
                }
            }
            step_slots.extend(in_flight.values().flatten());
            if p.ops[step.launch_op()].opcode == Opcode::Wait {
                in_flight.remove(&p.ops[step.launch_op()].operands[0]);
            }
            used.by_step.push(step_slots);
        }
        used
    }

    fn slot_of(&self, v: ValueId) -> Option<u32> {
        self.slots.value_slots.get(v.0 as usize).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fusion::kernel_fusion::plan_launch_steps;
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

    /// Plans the collectives of the test program, in order. Every value has its own slot, except
    /// that the first of each pair shares the slot of the second.
    fn plan_with_shared_slots(shared: &[(&str, &str)]) -> Vec<Option<CommOffload>> {
        let p = program();
        let value = |name: &str| p.values.iter().position(|v| v.name == name).expect("a value") as u32;
        let own = |v: u32| shared.iter().find(|(a, _)| value(a) == v).map_or(v, |(_, b)| value(b));
        let slots = Slots {
            slot_bytes: vec![1 << 20; p.values.len()],
            value_slots: (0..p.values.len() as u32).map(|v| Some(own(v))).collect(),
        };
        let found = plan_comm_offloads(&p, &slots, &plan_launch_steps(&p, &slots, &[]));
        p.collective_ops().map(|(i, _)| found.get(&i).copied()).collect()
    }

    fn open_step_of(c: Option<CommOffload>) -> usize {
        match c {
            Some(CommOffload::FusedIntoProducer { open_step: opens, .. }) => opens,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn overlapped_collectives_use_copy_engines_and_others_fuse_into_the_producer() {
        let found = plan_with_shared_slots(&[]);
        assert_eq!(found[0], Some(CommOffload::CopyEngines));
        assert!(matches!(
            found[1],
            Some(CommOffload::FusedIntoProducer { split_dim: SplitDim::Columns, .. })
        ));
        assert!(matches!(found[2], Some(CommOffload::FusedIntoProducer { split_dim: SplitDim::Rows, .. })));
        // Opens right after the previous collective, because no step uses the results' slots from
        // there on.
        let p = program();
        let slots = Slots {
            slot_bytes: vec![0; p.values.len()],
            value_slots: (0..p.values.len() as u32).map(Some).collect(),
        };
        let steps = plan_launch_steps(&p, &slots, &[]);
        let after = |i: usize| steps.iter().position(|s| s.launch_op() == i).expect("a step") + 1;
        let issues: Vec<usize> = p.collective_ops().map(|(i, _)| i).collect();
        assert_eq!((open_step_of(found[1]), open_step_of(found[2])), (after(issues[0]), after(issues[1])));
    }

    #[test]
    fn a_result_in_a_slot_still_in_use_gets_its_own_launch() {
        // The result shares a slot with an operand of attention, then with the input of the norm.
        assert_eq!(plan_with_shared_slots(&[("o", "vh")])[2], None);
        assert_eq!(plan_with_shared_slots(&[("kh", "k")])[1], None);
        // The result shares a slot with a value last read before the producer: members synchronize
        // only then.
        let late = plan_with_shared_slots(&[("kh", "x")]);
        assert!(open_step_of(late[1]) > open_step_of(plan_with_shared_slots(&[])[1]));
    }
}
