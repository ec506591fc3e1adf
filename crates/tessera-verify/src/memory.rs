//! Checks memory plans: every temporary has a slot, no slot holds two live values, and everything
//! fits the device.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Bytes, Diagnostic, Diagnostics};
use tessera_ir::{ExpertTier, Opcode, Phase, Program, Slots, Type, ValueId, WeightLoad};

use crate::codes::{T0324, T0325, T0326, T0327, T0328, T0340};
use crate::happens_before::HappensBefore;
use crate::{captured_graph, display, structure};

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
    /// Bytes of distinct weight shards over all phases of calls; of experts in two tiers, those of the first.
    pub weights: Bytes,
    /// Bytes of buffers over all phases of calls.
    pub buffers: Bytes,
    /// Bytes of inputs and call scalars in the phase of a call with the largest such total.
    pub inputs: Bytes,
    /// Bytes of slots in the phase of a call with the largest memory plan.
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
            if !op.is_source() && op.opcode != Opcode::CacheRead {
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
            _ if op.is_source() => 0,
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
/// declare differently. Slot sizes are taken as given. `in_calls` tells whether a call has a phase: the
/// memory of any other phase, such as that of a text encoder or a VAE, is the leader's host memory.
pub(crate) fn role_memory(
    phases: &[Phase],
    role: usize,
    in_calls: impl Fn(&str) -> bool,
) -> (RoleMemory, Diagnostics) {
    let mut out = Vec::new();
    let mut weights: BTreeSet<(&str, String, Option<WeightLoad>, Option<ExpertTier>)> = BTreeSet::new();
    let mut buffers: BTreeMap<&str, (&Program, &Type)> = BTreeMap::new();
    let mut memory = RoleMemory::default();
    let (mut weight_bytes, mut buffer_bytes) = (Vec::new(), BTreeMap::new());
    for phase in phases {
        let (p, is_in_call) = (&phase.programs[role], in_calls(&phase.name));
        let mut inputs = Vec::new();
        for op in &p.ops {
            let Some(ty) = op.results.first().map(|r| p.type_of(*r)) else { continue };
            match op.opcode {
                Opcode::Weight if is_in_call => {
                    // Equal shards loaded in the same way are one copy, regardless of the program
                    // that names them.
                    let name = op.name.as_deref().unwrap_or("");
                    let key = (name, ty.display_on(&p.mesh), op.weight_load(), op.expert_tier());
                    if weights.insert(key) {
                        weight_bytes.push(op.weight_bytes(ty).0);
                    }
                }
                Opcode::Input | Opcode::Call => inputs.push(ty.byte_size().0),
                _ => {}
            }
        }
        for b in &p.buffers {
            if is_in_call {
                buffer_bytes.insert(&b.name, b.ty.byte_size().0);
            }
            let (first, ty) = *buffers.entry(&b.name).or_insert((p, &b.ty));
            if *ty != b.ty {
                out.push(
                    Diagnostic::error(&T0324, format!("buffer @{} has two types", b.name))
                        .with_label(display::program_title(first), ty.display_on(&first.mesh))
                        .with_label(display::program_title(p), b.ty.display_on(&p.mesh)),
                );
            }
        }
        if is_in_call {
            let slots = sum_bytes(phase.slots[role].slot_bytes.iter().copied());
            memory.inputs = memory.inputs.max(sum_bytes(inputs));
            memory.temporaries = memory.temporaries.max(slots);
        }
    }
    memory.weights = sum_bytes(weight_bytes);
    memory.buffers = sum_bytes(buffer_bytes.into_values());
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
