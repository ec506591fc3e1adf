//! Checks memory plans: every temporary has a slot, no slot holds two live values, and everything
//! fits the device.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Bytes, Code, Diagnostic, Diagnostics};
use tessera_ir::{Attr, Opcode, Phase, Program, Slots, Type, ValueId};

use crate::happens_before::HappensBefore;
use crate::{captured_graph, display, structure};

/// Diagnostic for phases that declare one buffer differently.
pub static T0324: Code = Code {
    id: "T0324",
    title: "phases disagree about a buffer",
    page: "Buffers (KV caches, the latent) outlive a phase: one phase writes what another reads. All phases of a role must \
declare a buffer of one name with one dtype, local shape and layout, or the reader would misinterpret the bytes.",
};
/// Diagnostic for a value without a memory slot.
pub static T0325: Code = Code {
    id: "T0325",
    title: "value has no memory slot",
    page: "Every result of a compute op and every result of a collective needs a slot in the phase's memory plan. Only \
tokens, weights, inputs, call scalars and views of buffers need no slot. The slot table has one entry per value, and \
each entry names an existing slot.",
};
/// Diagnostic for a slot that is smaller than its value.
pub static T0326: Code = Code {
    id: "T0326",
    title: "memory slot is too small",
    page: "The value's local shape times its element size is larger than its slot. Writing the value would overwrite \
the next slot. The memory plan was made for other shapes, or for the shard of another rank.",
};
/// Diagnostic for two live values in one slot.
pub static T0327: Code = Code {
    id: "T0327",
    title: "two live values share a memory slot",
    page: "A value lives from the op that begins to write it to its last use. An issued collective reads its operand and \
writes its result at any time between issue and wait, so both live from issue to wait. A value read by an op may not \
share a slot with that op's result. Across streams, events must order every access to the old value before the op \
that writes the new one.\n\n\
Give one of the values another slot, or add the event.",
};
/// Diagnostic for a plan that exceeds the memory of a device.
pub static T0328: Code = Code {
    id: "T0328",
    title: "plan needs more memory than the device has",
    page: "Weights, buffers, inputs and the temporaries of the largest phase together exceed the device memory. All are counted \
from local shapes; the workspaces of libraries and of the driver come on top, so leave room.\n\n\
Use more shards (a larger tp or pp), a smaller dtype for weights or caches, or a shorter cache.",
};

/// Diagnostic for a collective whose result overwrites its own operand.
pub static T0340: Code = Code {
    id: "T0340",
    title: "collective cannot work in place",
    page: "A collective's operand and result share a memory slot. An all_reduce or a broadcast may work in place if nothing else \
reads the operand from the issue on: each element is replaced by its own reduction. A gather, scatter or all-to-all may not: \
the operand is a shard that belongs elsewhere in the result (at its rank's offset), so on all ranks but the \
first the collective would overwrite shards that it has yet to send.\n\nGive the result a slot of its own.",
};

/// The device limits that a sealed plan must respect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceLimits {
    /// Memory of one device in bytes; `None` skips the check.
    pub device_bytes: Option<u64>,
    /// Whether a communicator serves either one graph at a time or eager collectives
    /// (NCCL_GRAPH_MIXING_SUPPORT=0).
    pub graph_mixing_off: bool,
}

/// The device memory of one rank in bytes, computed from local shapes alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RoleMemory {
    /// Bytes of distinct weight shards over all phases.
    pub weights: Bytes,
    /// Bytes of buffers over all phases.
    pub buffers: Bytes,
    /// Bytes of inputs and call scalars in the phase with the largest such total.
    pub inputs: Bytes,
    /// Bytes of slots in the phase with the largest memory plan.
    pub temporaries: Bytes,
}

impl RoleMemory {
    /// Returns the sum of all fields, saturating at `u64::MAX`.
    #[must_use]
    pub fn total_bytes(&self) -> Bytes {
        sum_bytes([self.weights, self.buffers, self.inputs, self.temporaries].map(|b| b.0))
    }
}

/// Checks a memory plan against its program, which must have passed [`crate::check_program`].
#[must_use]
pub fn check_slots(p: &Program, slots: &Slots) -> Diagnostics {
    let malformed = structure::check(p);
    if !malformed.is_empty() {
        return malformed;
    }
    if slots.value_slots.len() != p.values.len() {
        let message =
            format!("{} entries in the slot table for {} values", slots.value_slots.len(), p.values.len());
        return vec![
            Diagnostic::error(&T0325, message)
                .with_label(display::program_title(p), "the memory plan of this program"),
        ];
    }
    let definitions = p.defining_ops();
    let mut out = Vec::new();
    let mut residents: Vec<Vec<SlotLifetime>> = vec![Vec::new(); slots.slot_bytes.len()];
    let last = p.last_uses();
    for (i, value) in p.values.iter().enumerate() {
        let (Some(def), false) = (definitions[i], value.ty.is_token()) else { continue };
        let v = ValueId(i as u32);
        let op = &p.ops[def];
        let Some(slot) = slots.value_slots[i] else {
            if !display::is_source(op) && op.opcode != Opcode::CacheRead {
                out.push(display::error_at_op(
                    &T0325,
                    p,
                    def,
                    format!("{} has no memory slot", display::value_name(p, v)),
                ));
            }
            continue;
        };
        let Some(have) = slots.slot_bytes.get(slot as usize) else {
            let message = format!(
                "{} is assigned slot {slot}, but there are {} slots",
                display::value_name(p, v),
                slots.slot_bytes.len()
            );
            out.push(display::error_at_op(&T0325, p, def, message));
            continue;
        };
        let need = value.ty.byte_size();
        if need.0 > *have {
            let message =
                format!("{} needs {} bytes, but slot {slot} has {have}", display::value_name(p, v), need.0);
            out.push(display::error_at_op(&T0326, p, def, message).with_note(value.ty.display_on(&p.mesh)));
            continue;
        }
        let ticket = op.operands.first().filter(|_| op.opcode == Opcode::Wait);
        let start = match ticket {
            _ if display::is_source(op) => 0,
            Some(t) => definitions[t.0 as usize].unwrap_or(def),
            None => def,
        };
        residents[slot as usize].push(SlotLifetime {
            value: v,
            start,
            def,
            end: last[i].unwrap_or(def).max(def),
        });
    }
    out.extend(check_aliases(p, &definitions, residents));
    out
}

/// The range of ops during which a value occupies its slot.
#[derive(Clone)]
struct SlotLifetime {
    value: ValueId,
    start: usize,
    def: usize,
    end: usize,
}

fn check_aliases(
    p: &Program,
    definitions: &[Option<usize>],
    residents: Vec<Vec<SlotLifetime>>,
) -> Diagnostics {
    let order = HappensBefore::new(p, definitions, &captured_graph::captured_graphs(p));
    let mut uses: Vec<Vec<usize>> = vec![Vec::new(); p.values.len()];
    for (i, op) in p.ops.iter().enumerate() {
        op.used_values().for_each(|v| uses[v.0 as usize].push(i));
    }
    let mut out = Vec::new();
    for (slot, mut lives) in residents.into_iter().enumerate() {
        lives.sort_by_key(|l| (l.start, l.def));
        for pair in lives.windows(2) {
            let (a, b) = (&pair[0], &pair[1]);
            let (x, y) = (display::value_name(p, a.value), display::value_name(p, b.value));
            if p.ops[b.start].opcode.is_collective() && p.ops[b.start].operands.contains(&a.value) {
                out.extend(check_in_place(p, &order, &uses[a.value.0 as usize], slot, [a, b]));
                continue;
            }
            if a.end >= b.start {
                let message = format!("slot {slot} holds {x} until op {} and {y} from op {}", a.end, b.start);
                let d = display::error_at_op(&T0327, p, b.start, message);
                out.push(display::with_op_label(
                    d,
                    p,
                    a.end,
                    format!("{x} is still in use: {}", display::describe_op(p, a.end)),
                ));
                continue;
            }
            let accesses = uses[a.value.0 as usize].iter().copied().chain([a.def]);
            if let Some(t) = accesses.into_iter().find(|t| !order.finishes_before(*t, b.start)) {
                let (s, u) = (display::stream_name(p, &p.ops[t]), display::stream_name(p, &p.ops[b.start]));
                let message = format!(
                    "slot {slot} is reused from {x} to {y}, but nothing orders stream {u} after stream {s}"
                );
                let d = display::error_at_op(&T0327, p, b.start, message);
                out.push(
                    display::with_op_label(d, p, t, format!("accesses {x}: {}", display::describe_op(p, t)))
                        .with_hint(format!(
                            "record an event on {s} after op {t} and start op {} after that event",
                            b.start
                        )),
                );
            }
        }
    }
    out
}

/// Checks a collective whose result shares the operand's slot.
fn check_in_place(
    p: &Program,
    order: &HappensBefore,
    uses: &[usize],
    slot: usize,
    [a, b]: [&SlotLifetime; 2],
) -> Option<Diagnostic> {
    let op = &p.ops[b.start];
    let (x, y) = (display::value_name(p, a.value), display::value_name(p, b.value));
    let message = format!("{} of {x} writes {y} into the same slot {slot}", op.opcode.name());
    if !matches!(op.opcode, Opcode::AllReduce | Opcode::Broadcast) {
        let d = display::error_at_op(&T0340, p, b.start, message);
        return Some(d.with_hint(format!("give {y} a slot of its own")));
    }
    let may_access_later = |t: &&usize| **t != b.start && !order.finishes_before(**t, b.start);
    let t = uses.iter().chain([&a.def]).find(may_access_later)?;
    let d = display::error_at_op(&T0340, p, b.start, message);
    Some(display::with_op_label(d, p, *t, format!("may still access {x}: {}", display::describe_op(p, *t))))
}

/// Returns the memory of a role over all phases, and diagnostics for buffers that its phases
/// declare differently. Slot sizes are taken as given.
pub(crate) fn role_memory(phases: &[Phase], role: usize) -> (RoleMemory, Diagnostics) {
    let mut out = Vec::new();
    let mut weights: BTreeSet<(&str, String, String)> = BTreeSet::new();
    let mut buffers: BTreeMap<&str, (&Program, &Type)> = BTreeMap::new();
    let mut memory = RoleMemory::default();
    let mut weight_bytes = Vec::new();
    for phase in phases {
        let p = &phase.programs[role];
        let mut inputs = Vec::new();
        for op in &p.ops {
            let Some(ty) = op.results.first().map(|r| p.type_of(*r)) else { continue };
            match op.opcode {
                Opcode::Weight => {
                    // Equal shards loaded in the same way are one copy, regardless of the program
                    // that names them.
                    let name = op.name.as_deref().unwrap_or("");
                    let load = match op.attrs.get("load") {
                        Some(Attr::Str(s)) => s.clone(),
                        _ => String::new(),
                    };
                    if weights.insert((name, ty.display_on(&p.mesh), load)) {
                        weight_bytes.push(ty.byte_size().0);
                    }
                }
                Opcode::Input | Opcode::Call => inputs.push(ty.byte_size().0),
                _ => {}
            }
        }
        for b in &p.buffers {
            let (first, ty) = *buffers.entry(&b.name).or_insert((p, &b.ty));
            if *ty != b.ty {
                out.push(
                    Diagnostic::error(&T0324, format!("buffer @{} has two types", b.name))
                        .with_label(display::program_title(first), ty.display_on(&first.mesh))
                        .with_label(display::program_title(p), b.ty.display_on(&p.mesh)),
                );
            }
        }
        memory.inputs = memory.inputs.max(sum_bytes(inputs));
        memory.temporaries = memory.temporaries.max(sum_bytes(phase.slots[role].slot_bytes.iter().copied()));
    }
    memory.weights = sum_bytes(weight_bytes);
    memory.buffers = sum_bytes(buffers.values().map(|(_, t)| t.byte_size().0));
    (memory, out)
}

/// Returns a diagnostic if a role exceeds the device memory.
pub(crate) fn check_limits(role: &str, memory: &RoleMemory, limits: &DeviceLimits) -> Option<Diagnostic> {
    let device = limits.device_bytes?;
    let total = memory.total_bytes();
    if total.0 <= device {
        return None;
    }
    let RoleMemory { weights, buffers, inputs, temporaries } = memory;
    let message = format!("role {role} needs {total}, but the device has {}", Bytes(device));
    Some(
        Diagnostic::error(&T0328, message)
            .with_label(
                format!("role {role}"),
                format!(
                    "weights {} + buffers {} + inputs {} + temporaries {} = {} bytes",
                    weights.0, buffers.0, inputs.0, temporaries.0, total.0
                ),
            )
            .with_label("device", format!("{device} bytes: {} too few", total.0 - device))
            .with_hint("use more shards or stages, a smaller dtype, or a shorter cache"),
    )
}

fn sum_bytes(items: impl IntoIterator<Item = u64>) -> Bytes {
    Bytes(items.into_iter().fold(0, u64::saturating_add))
}
