//! Where values live: every temporary has a slot, no slot holds two values at once, and it all fits the device.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Bytes, Code, Diagnostic, Diagnostics};
use tessera_ir::{Attr, Opcode, Phase, Program, Slots, Type, ValueId};

use crate::order::Order;
use crate::{graph, say, structure};

/// Phases that see one buffer differently.
pub static T0324: Code = Code {
    id: "T0324",
    title: "phases disagree about a buffer",
    page: "Buffers (caches, the latent) outlive a phase: what one phase writes another reads. All phases of a role must \
declare a buffer of one name with one dtype, local shape and layout, or the reader would take the bytes for something else.",
};
/// No place for a value.
pub static T0325: Code = Code {
    id: "T0325",
    title: "value has no memory slot",
    page: "Every result of a compute op and every result of a collective needs a slot in the phase's memory plan. Only \
tokens, weights, inputs, call scalars and views of buffers do without. The table of slots has one entry per value, and \
each entry names a slot that exists.",
};
/// A slot that does not hold its value.
pub static T0326: Code = Code {
    id: "T0326",
    title: "memory slot is too small",
    page: "The value's local shape times its element size is larger than the slot it was given. Writing it would run over \
the next slot. The memory plan was made for other shapes, or for the piece of another rank.",
};
/// Two values in one slot.
pub static T0327: Code = Code {
    id: "T0327",
    title: "two live values share a memory slot",
    page: "A value lives from the op that begins to write it to its last use. An issued collective reads its operand and \
writes its result at any time between issue and wait, so both live over that whole stretch. A value read by an op may not \
share a slot with that op's result. Across streams, every access to the old value must be ordered by events before the op \
that writes the new one.\n\n\
Give one of them another slot, or add the event.",
};
/// More than the device has.
pub static T0328: Code = Code {
    id: "T0328",
    title: "plan needs more memory than the device has",
    page: "Weights, buffers, inputs and the temporaries of the largest phase together exceed the device. All are counted \
from local shapes; libraries' workspaces and the driver's own use come on top, so leave room.\n\n\
More shards (a larger tp or pp), a smaller dtype for weights or caches, or a shorter cache make it fit.",
};

/// A collective over its own operand.
pub static T0340: Code = Code {
    id: "T0340",
    title: "collective cannot work in place",
    page: "A collective's operand and result share a memory slot. An all_reduce or a broadcast may do so, if nothing else \
reads the operand from the issue on: each element is replaced by its own reduction. A gather, scatter or exchange may not: \
there the operand is a piece that belongs elsewhere in the result (at its rank's offset), so that on all ranks but the \
first, pieces that are still to be sent would be overwritten.\n\nGive the result a slot of its own.",
};

/// What the plan must fit into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Memory of one device in bytes; `None` does not check.
    pub device_bytes: Option<u64>,
    /// Communicators serve one graph at a time, or eager collectives: NCCL_GRAPH_MIXING_SUPPORT=0.
    pub graph_mixing_off: bool,
}

/// Bytes that a rank needs, from local shapes alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RoleMemory {
    /// Distinct weight slices over all phases.
    pub weights: Bytes,
    /// Buffers over all phases.
    pub buffers: Bytes,
    /// Inputs and call scalars of the phase that has most.
    pub inputs: Bytes,
    /// Slots of the phase that has most.
    pub temporaries: Bytes,
}

impl RoleMemory {
    /// All together. Saturates.
    #[must_use]
    pub fn total(&self) -> Bytes {
        sum([self.weights, self.buffers, self.inputs, self.temporaries].map(|b| b.0))
    }
}

/// Judges a memory plan against its program, which was judged by [`crate::check_program`] before.
#[must_use]
pub fn check_slots(p: &Program, slots: &Slots) -> Diagnostics {
    let malformed = structure::check(p);
    if !malformed.is_empty() {
        return malformed;
    }
    if slots.of.len() != p.values.len() {
        let message =
            format!("{} entries in the table of slots for {} values", slots.of.len(), p.values.len());
        return vec![Diagnostic::error(&T0325, message).at(say::title(p), "its memory plan")];
    }
    let definitions = p.definitions();
    let mut out = Vec::new();
    let mut residents: Vec<Vec<Life>> = vec![Vec::new(); slots.bytes.len()];
    let last = p.last_uses();
    for (i, value) in p.values.iter().enumerate() {
        let (Some(def), false) = (definitions[i], value.ty.is_token()) else { continue };
        let v = ValueId(i as u32);
        let op = &p.ops[def];
        let Some(slot) = slots.of[i] else {
            if !say::is_given(op) && op.opcode != Opcode::CacheRead {
                out.push(say::refuse(&T0325, p, def, format!("{} has no memory slot", say::value(p, v))));
            }
            continue;
        };
        let Some(have) = slots.bytes.get(slot as usize) else {
            let message = format!("{} is in slot {slot} of {}", say::value(p, v), slots.bytes.len());
            out.push(say::refuse(&T0325, p, def, message));
            continue;
        };
        let need = value.ty.bytes();
        if need.0 > *have {
            let message = format!("{} needs {} bytes, slot {slot} has {have}", say::value(p, v), need.0);
            out.push(say::refuse(&T0326, p, def, message).note(value.ty.display(&p.mesh)));
            continue;
        }
        let ticket = op.operands.first().filter(|_| op.opcode == Opcode::Wait);
        let start = match ticket {
            _ if say::is_given(op) => 0,
            Some(t) => definitions[t.0 as usize].unwrap_or(def),
            None => def,
        };
        residents[slot as usize].push(Life { value: v, start, def, end: last[i].unwrap_or(def).max(def) });
    }
    out.extend(aliases(p, &definitions, residents));
    out
}

/// Ops between which a value needs its memory.
#[derive(Clone)]
struct Life {
    value: ValueId,
    start: usize,
    def: usize,
    end: usize,
}

fn aliases(p: &Program, definitions: &[Option<usize>], residents: Vec<Vec<Life>>) -> Diagnostics {
    let order = Order::of(p, definitions, &graph::runs(p));
    let mut uses: Vec<Vec<usize>> = vec![Vec::new(); p.values.len()];
    for (i, op) in p.ops.iter().enumerate() {
        op.uses().for_each(|v| uses[v.0 as usize].push(i));
    }
    let mut out = Vec::new();
    for (slot, mut lives) in residents.into_iter().enumerate() {
        lives.sort_by_key(|l| (l.start, l.def));
        for pair in lives.windows(2) {
            let (a, b) = (&pair[0], &pair[1]);
            let (x, y) = (say::value(p, a.value), say::value(p, b.value));
            if p.ops[b.start].opcode.is_collective() && p.ops[b.start].operands.contains(&a.value) {
                out.extend(in_place(p, &order, &uses[a.value.0 as usize], slot, [a, b]));
                continue;
            }
            if a.end >= b.start {
                let message = format!("slot {slot} holds {x} until op {} and {y} from op {}", a.end, b.start);
                let d = say::refuse(&T0327, p, b.start, message);
                out.push(say::at_op(
                    d,
                    p,
                    a.end,
                    format!("{x} is still in use: {}", say::describe(p, a.end)),
                ));
                continue;
            }
            let touches = uses[a.value.0 as usize].iter().copied().chain([a.def]);
            if let Some(t) = touches.into_iter().find(|t| !order.before(*t, b.start)) {
                let (s, u) = (say::stream(p, &p.ops[t]), say::stream(p, &p.ops[b.start]));
                let message = format!(
                    "slot {slot} passes from {x} to {y} with nothing that orders stream {u} after {s}"
                );
                let d = say::refuse(&T0327, p, b.start, message);
                out.push(
                    say::at_op(d, p, t, format!("touches {x}: {}", say::describe(p, t))).hint(format!(
                        "record an event on {s} after op {t} and start op {} after it",
                        b.start
                    )),
                );
            }
        }
    }
    out
}

/// A collective that writes where it reads.
fn in_place(
    p: &Program,
    order: &Order,
    uses: &[usize],
    slot: usize,
    [a, b]: [&Life; 2],
) -> Option<Diagnostic> {
    let op = &p.ops[b.start];
    let (x, y) = (say::value(p, a.value), say::value(p, b.value));
    let message = format!("{} of {x} writes {y} into the same slot {slot}", op.opcode.name());
    if !matches!(op.opcode, Opcode::AllReduce | Opcode::Broadcast) {
        let d = say::refuse(&T0340, p, b.start, message);
        return Some(d.hint(format!("give {y} a slot of its own")));
    }
    let disturbed = |t: &&usize| **t != b.start && !order.before(**t, b.start);
    let t = uses.iter().chain([&a.def]).find(disturbed)?;
    let d = say::refuse(&T0340, p, b.start, message);
    Some(say::at_op(d, p, *t, format!("may still touch {x}: {}", say::describe(p, *t))))
}

/// What a role needs over all phases, and where phases disagree about a buffer. Slots are taken as they are.
pub(crate) fn of_role(phases: &[Phase], role: usize) -> (RoleMemory, Diagnostics) {
    let mut out = Vec::new();
    let mut weights: BTreeSet<(&str, String, String)> = BTreeSet::new();
    let mut buffers: BTreeMap<&str, (&Program, &Type)> = BTreeMap::new();
    let mut memory = RoleMemory::default();
    let mut weight_bytes = Vec::new();
    for phase in phases {
        let p = &phase.programs[role];
        let mut inputs = Vec::new();
        for op in &p.ops {
            let Some(ty) = op.results.first().map(|r| p.ty(*r)) else { continue };
            match op.opcode {
                Opcode::Weight => {
                    // The same slice loaded in the same way is one copy, whatever the program that names it.
                    let name = op.name.as_deref().unwrap_or("");
                    let load = match op.attrs.get("load") {
                        Some(Attr::Str(s)) => s.clone(),
                        _ => String::new(),
                    };
                    if weights.insert((name, ty.display(&p.mesh), load)) {
                        weight_bytes.push(ty.bytes().0);
                    }
                }
                Opcode::Input | Opcode::Call => inputs.push(ty.bytes().0),
                _ => {}
            }
        }
        for b in &p.buffers {
            let (first, ty) = *buffers.entry(&b.name).or_insert((p, &b.ty));
            if *ty != b.ty {
                out.push(
                    Diagnostic::error(&T0324, format!("buffer @{} has two types", b.name))
                        .at(say::title(first), ty.display(&first.mesh))
                        .at(say::title(p), b.ty.display(&p.mesh)),
                );
            }
        }
        memory.inputs = memory.inputs.max(sum(inputs));
        memory.temporaries = memory.temporaries.max(sum(phase.memory[role].bytes.iter().copied()));
    }
    memory.weights = sum(weight_bytes);
    memory.buffers = sum(buffers.values().map(|(_, t)| t.bytes().0));
    (memory, out)
}

/// A role that does not fit.
pub(crate) fn check_limits(role: &str, memory: &RoleMemory, limits: &Limits) -> Option<Diagnostic> {
    let device = limits.device_bytes?;
    let total = memory.total();
    if total.0 <= device {
        return None;
    }
    let RoleMemory { weights, buffers, inputs, temporaries } = memory;
    let message = format!("role {role} needs {total}, the device has {}", Bytes(device));
    Some(
        Diagnostic::error(&T0328, message)
            .at(
                format!("role {role}"),
                format!(
                    "weights {} + buffers {} + inputs {} + temporaries {} = {} bytes",
                    weights.0, buffers.0, inputs.0, temporaries.0, total.0
                ),
            )
            .at("device", format!("{device} bytes: {} too few", total.0 - device))
            .hint("use more shards or stages, a smaller dtype, or a shorter cache"),
    )
}

fn sum(items: impl IntoIterator<Item = u64>) -> Bytes {
    Bytes(items.into_iter().fold(0, u64::saturating_add))
}
