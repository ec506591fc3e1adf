//! A memory plan that shares nothing: one slot for each value that needs one.

use tessera_ir::{Opcode, Program, Slots};

/// Each temporary in a slot of its own.
#[must_use]
pub fn own_slots(p: &Program) -> Slots {
    let mut slots = Slots { bytes: Vec::new(), of: vec![None; p.values.len()] };
    for op in &p.ops {
        if matches!(op.opcode, Opcode::Input | Opcode::Call | Opcode::Weight | Opcode::CacheRead) {
            continue;
        }
        for r in op.results.iter().filter(|r| !p.ty(**r).is_token()) {
            slots.of[r.0 as usize] = u32::try_from(slots.bytes.len()).ok();
            slots.bytes.push(p.ty(*r).bytes().0);
        }
    }
    slots
}
