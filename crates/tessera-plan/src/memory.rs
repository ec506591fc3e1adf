//! Places for temporaries: values whose lives do not meet share a slot.

use std::collections::BTreeMap;

use tessera_ir::{Kind, Opcode, Program, Slots, ValueId};

/// Assigns slots by one pass over the program: best fit among free slots, else grow the largest free one, else
/// a new one. An issued collective reads its operand until its wait and may write its result from the issue on,
/// so both slots stay taken so long, the result's also where nobody reads it.
#[must_use]
pub fn place(p: &Program) -> Slots {
    let last = p.last_uses();
    let mut slots = Slots { bytes: Vec::new(), of: vec![None; p.values.len()] };
    let mut free: Vec<u32> = Vec::new();
    // Values whose last reader is op i.
    let mut ending: Vec<Vec<u32>> = vec![Vec::new(); p.ops.len()];
    let waits = results_of_waits(p);
    for (i, op) in p.ops.iter().enumerate() {
        let (written, made) = if op.issue {
            waits.get(&op.results[0]).copied().unwrap_or((i, &[]))
        } else {
            (i, &op.results[..])
        };
        for r in made {
            let ty = p.ty(*r);
            if ty.is_token() || matches!(op.opcode.row().kind, Kind::Source) || op.opcode == Opcode::Wait {
                continue;
            }
            let need = ty.bytes().0;
            let slot = take(&mut free, &mut slots.bytes, need);
            slots.of[r.0 as usize] = Some(slot);
            ending[last[r.0 as usize].unwrap_or(written)].push(slot);
        }
        // Freed after the results were placed: an op never writes over its own operand.
        free.append(&mut ending[i]);
    }
    slots
}

/// The wait of each ticket: its place and what it gives.
fn results_of_waits(p: &Program) -> BTreeMap<ValueId, (usize, &[ValueId])> {
    let waits = p.ops.iter().enumerate().filter(|(_, o)| o.opcode == Opcode::Wait);
    waits.map(|(i, o)| (o.operands[0], (i, &o.results[..]))).collect()
}

fn take(free: &mut Vec<u32>, bytes: &mut Vec<u64>, need: u64) -> u32 {
    let fitting =
        (0..free.len()).filter(|i| bytes[free[*i] as usize] >= need).min_by_key(|i| bytes[free[*i] as usize]);
    let any = || (0..free.len()).max_by_key(|i| bytes[free[*i] as usize]);
    match fitting.or_else(any) {
        Some(i) => {
            let slot = free.swap_remove(i);
            let size = &mut bytes[slot as usize];
            *size = (*size).max(need);
            slot
        }
        None => {
            bytes.push(need);
            (bytes.len() - 1) as u32
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::{Builder, DType, Type};
    use tessera_mesh::{Axis, AxisLayout, Reduction};

    #[test]
    fn an_unread_result_keeps_its_slot_until_its_wait() {
        let mut b = Builder::role("p", "r", "tp=2".parse().unwrap(), &["compute", "tp_collective"]);
        let ty = Type::new(DType::F32, [4, 4]);
        let x = b.input("x", ty.clone().on(Axis::Tp, AxisLayout::partial(Reduction::Sum)));
        let y = b.input("y", ty);
        b.attr("axis", "tp").attr("reduction", "sum").stream("tp_collective");
        let ticket = b.issue(Opcode::AllReduce, &[x]);
        let meanwhile = b.stream("compute").op(Opcode::Silu, &[y]);
        let unread = b.wait(ticket, None).unwrap();
        let after = b.op(Opcode::Silu, &[y]);
        let p = b.finish().unwrap();
        let slots = place(&p).of;
        let slot = |v: ValueId| slots[v.0 as usize].unwrap();
        assert_ne!(slot(unread), slot(meanwhile));
        assert!(
            [slot(unread), slot(meanwhile)].contains(&slot(after)),
            "the slot is free again after the wait"
        );
    }
}
