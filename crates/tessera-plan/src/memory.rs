//! Places for temporaries: values whose lives do not meet share a slot.

use std::collections::BTreeMap;

use tessera_ir::{Kind, Opcode, Program, Slots, ValueId};

/// Assigns slots by one pass over the program: best fit among free slots, else grow the largest free one, else
/// a new one. An issued collective reads its operand until its wait and may write its result from the issue on,
/// so both slots stay taken so long.
#[must_use]
pub fn place(p: &Program) -> Slots {
    let last = p.last_uses();
    let mut slots = Slots { bytes: Vec::new(), of: vec![None; p.values.len()] };
    let mut free: Vec<u32> = Vec::new();
    // Values whose last reader is op i.
    let mut ending: Vec<Vec<u32>> = vec![Vec::new(); p.ops.len()];
    let waits = results_of_waits(p);
    for (i, op) in p.ops.iter().enumerate() {
        let made = if op.issue { waits.get(&op.results[0]).copied().unwrap_or(&[]) } else { &op.results[..] };
        for r in made {
            let ty = p.ty(*r);
            if ty.is_token() || matches!(op.opcode.row().kind, Kind::Source) || op.opcode == Opcode::Wait {
                continue;
            }
            let need = ty.bytes().0;
            let slot = take(&mut free, &mut slots.bytes, need);
            slots.of[r.0 as usize] = Some(slot);
            ending[last[r.0 as usize].unwrap_or(i)].push(slot);
        }
        // Freed after the results were placed: an op never writes over its own operand.
        free.append(&mut ending[i]);
    }
    slots
}

/// What the wait of each ticket gives.
fn results_of_waits(p: &Program) -> BTreeMap<ValueId, &[ValueId]> {
    p.ops.iter().filter(|o| o.opcode == Opcode::Wait).map(|o| (o.operands[0], &o.results[..])).collect()
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
