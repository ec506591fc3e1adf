//! Checks every access to temporaries under poisoned memory.
//!
//! Ops run here in program order on one thread, which every order of events permits, so a missing
//! event would go unnoticed. The checker therefore tracks which ops the streams and events order, and
//! counts an access that nothing orders after the write as an access to memory without a value.

use std::collections::BTreeMap;

use tessera_device::dtype::poison_word;
use tessera_device::{Fault, T0803};
use tessera_ir::{DType, Op, Opcode, Program, ValueId};

use super::memory::{SlotPlace, ValueLocation};

/// The state of the slots during one run of a program.
#[derive(Debug)]
pub(super) struct MemoryCheck {
    order: OpOrder,
    /// Op after which each value is no longer used.
    last_uses: Vec<Option<usize>>,
    /// Op at which each op has finished its accesses: for an issued collective its wait.
    ends: Vec<usize>,
    slots: BTreeMap<usize, SlotState>,
}

/// What a slot holds, and which ops have accessed it.
#[derive(Debug, Clone, Default)]
struct SlotState {
    /// Value that the slot holds, with the op that wrote it and its place; `None` if it holds poison.
    holder: Option<(ValueId, usize, SlotPlace)>,
    /// Ops that accessed the slot since the write of the current or last value, that write included.
    accesses: Vec<usize>,
}

/// Which ops have finished before others start: ops of one stream run in order, and events and waits
/// order one stream after another.
#[derive(Debug)]
struct OpOrder {
    stream_count: usize,
    /// Vector clocks: per op and stream, the number of the stream's ops that have finished once the
    /// op has.
    clocks: Vec<u32>,
    /// Stream of each op, and its position there, from 1.
    places: Vec<(usize, u32)>,
}

impl OpOrder {
    fn new(p: &Program) -> OpOrder {
        let stream_count = p.streams.len().max(1);
        let definitions = p.defining_ops();
        let mut order =
            OpOrder { stream_count, clocks: vec![0; p.ops.len() * stream_count], places: Vec::new() };
        let mut last: Vec<Option<usize>> = vec![None; stream_count];
        for (i, op) in p.ops.iter().enumerate() {
            let on = op.stream.0 as usize;
            let ticket = op.operands.first().filter(|_| op.opcode == Opcode::Wait);
            let awaited = op.after.iter().chain(ticket).filter_map(|v| definitions[v.0 as usize]);
            for before in last[on].into_iter().chain(awaited) {
                for s in 0..stream_count {
                    let seen = order.clocks[before * stream_count + s];
                    let own = &mut order.clocks[i * stream_count + s];
                    *own = seen.max(*own);
                }
            }
            let own = &mut order.clocks[i * stream_count + on];
            *own += 1;
            order.places.push((on, *own));
            last[on] = Some(i);
        }
        order
    }

    /// Returns whether `a` has finished whenever `b` starts.
    fn finishes_before(&self, a: usize, b: usize) -> bool {
        let (stream, position) = self.places[a];
        a != b && self.clocks[b * self.stream_count + stream] >= position
    }
}

impl MemoryCheck {
    /// Fills all temporaries with poison, and begins the check of a run.
    pub(super) fn begin_run(p: &Program, temporaries: &mut [f32]) -> MemoryCheck {
        temporaries.fill(make_poison_value());
        let mut ends: Vec<usize> = (0..p.ops.len()).collect();
        let definitions = p.defining_ops();
        for (i, op) in p.ops.iter().enumerate().filter(|(_, op)| op.opcode == Opcode::Wait) {
            if let Some(issue) = op.operands.first().and_then(|t| definitions[t.0 as usize]) {
                ends[issue] = i;
            }
        }
        MemoryCheck { order: OpOrder::new(p), last_uses: p.last_uses(), ends, slots: BTreeMap::new() }
    }

    /// Checks the temporaries that an op reads and the slot that it writes, before it runs.
    ///
    /// # Errors
    /// T0803 in a [`Fault::Poisoned`].
    pub(super) fn check_op(
        &mut self,
        p: &Program,
        at: usize,
        locations: &[ValueLocation],
        temporaries: &[f32],
    ) -> Result<(), Fault> {
        let op = &p.ops[at];
        for v in op.used_values() {
            let ValueLocation::Slot(place) = locations[v.0 as usize] else { continue };
            let slot = place.slot;
            if let Some(why) = self.find_read_error(p, at, v, slot, &temporaries[place.to_range()]) {
                let name = value_name(p, v);
                return Err(access_error(p, at, &format!("reads {name} from slot {slot}, {why}")));
            }
            self.slots.entry(slot).or_default().accesses.push(at);
        }
        let start = self.write_start(p, at);
        for (_, SlotPlace { slot, .. }) in result_places(op, locations) {
            // A collective may write its result over its own operand.
            let own = |access: usize| access == start || access == at;
            let may_follow =
                |access: &&usize| !own(**access) && !self.order.finishes_before(self.ends[**access], start);
            let accesses = self.slots.get(&slot).map_or(&[][..], |s| &s.accesses);
            if let Some(earlier) = accesses.iter().find(may_follow) {
                let other = describe_op(p, *earlier);
                let why =
                    format!("writes slot {slot}, which {other} may still access: no event orders the two");
                return Err(access_error(p, at, &why));
            }
        }
        Ok(())
    }

    /// Notes the slots that an op has written, and poisons those whose values it used last.
    pub(super) fn end_op(
        &mut self,
        p: &Program,
        at: usize,
        locations: &[ValueLocation],
        temporaries: &mut [f32],
    ) {
        let op = &p.ops[at];
        for (v, place) in result_places(op, locations) {
            let state = SlotState { holder: Some((v, at, place)), accesses: vec![at] };
            self.slots.insert(place.slot, state);
        }
        for state in self.slots.values_mut() {
            if let Some((v, def, place)) = state.holder
                && self.last_uses[v.0 as usize].unwrap_or(def) <= at
            {
                state.holder = None;
                temporaries[place.to_range()].fill(make_poison_value());
            }
        }
    }

    /// Returns why a slot does not hold a value for an op.
    fn find_read_error(
        &self,
        p: &Program,
        at: usize,
        v: ValueId,
        slot: usize,
        values: &[f32],
    ) -> Option<String> {
        match self.slots.get(&slot).and_then(|s| s.holder) {
            None => Some("which no op has written, or which was freed".to_string()),
            Some((other, writer, _)) if other != v => {
                Some(format!("which holds {} since {}", value_name(p, other), describe_op(p, writer)))
            }
            Some((_, writer, _)) if !self.order.finishes_before(writer, at) => Some(format!(
                "which {} may not have written yet: no event orders the two",
                describe_op(p, writer)
            )),
            Some((_, writer, _)) => {
                let element = values.iter().position(|x| x.to_bits() == make_poison_value().to_bits())?;
                Some(format!("of which {} left element {element} unwritten", describe_op(p, writer)))
            }
        }
    }

    /// Returns the op at which the write of an op's result may begin: for a wait, the op that issued
    /// its collective.
    fn write_start(&self, p: &Program, at: usize) -> usize {
        let ticket = p.ops[at].operands.first().filter(|_| p.ops[at].opcode == Opcode::Wait);
        let issue = ticket.and_then(|_| self.ends.iter().position(|end| *end == at));
        issue.unwrap_or(at)
    }
}

fn make_poison_value() -> f32 {
    f32::from_bits(poison_word(DType::F32))
}

fn result_places<'a>(
    op: &'a Op,
    locations: &'a [ValueLocation],
) -> impl Iterator<Item = (ValueId, SlotPlace)> + 'a {
    op.results.iter().filter_map(|r| match locations[r.0 as usize] {
        ValueLocation::Slot(place) => Some((*r, place)),
        _ => None,
    })
}

fn describe_op(p: &Program, at: usize) -> String {
    let op = &p.ops[at];
    let stream = p.streams.get(op.stream.0 as usize).map_or("compute", String::as_str);
    format!("op {at} `{}` on stream {stream}", op.opcode.name())
}

fn value_name(p: &Program, v: ValueId) -> String {
    p.values.get(v.0 as usize).map_or_else(|| format!("value {}", v.0), |x| format!("%{}", x.name))
}

fn access_error(p: &Program, at: usize, why: &str) -> Fault {
    let id = T0803.id;
    Fault::Poisoned(format!("{id}: @{} of {}: {} {why}", p.name, p.role, describe_op(p, at)))
}
