//! A memory plan without reuse: one slot per value that needs memory.

use tessera_ir::{Opcode, Program, Slots};

/// Gives each temporary its own slot.
#[must_use]
pub fn dedicated_slots(p: &Program) -> Slots {
    let mut slots = Slots { slot_bytes: Vec::new(), value_slots: vec![None; p.values.len()] };
    for op in &p.ops {
        if matches!(op.opcode, Opcode::Input | Opcode::Call | Opcode::Weight | Opcode::CacheRead) {
            continue;
        }
        for r in op.results.iter().filter(|r| !p.type_of(**r).is_token()) {
            slots.value_slots[r.0 as usize] = u32::try_from(slots.slot_bytes.len()).ok();
            slots.slot_bytes.push(p.type_of(*r).byte_size().0);
        }
    }
    slots
}
