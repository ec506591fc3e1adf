//! Checks that the planned slots allow a sequence of steps. A fused step runs at another position
//! than some of its ops, so a value may be overwritten before the step reads it.

use std::collections::{BTreeMap, BTreeSet};

use tessera_ir::{Op, OpKind, Opcode, Program, Slots, ValueId};

use super::launch_step::{FusedGroup, LaunchStep};

/// Returns whether every value is in its slot whenever a step reads it, given these steps in this
/// order. A slot that a collective in flight uses must not be written before its wait.
pub(super) fn slots_stay_valid(p: &Program, slots: &Slots, steps: &[LaunchStep]) -> bool {
    let mut state = SlotState::new(p, slots, steps);
    steps.iter().all(|step| state.accept_step(step))
}

/// What the slots and the scratch memory hold after the steps so far.
struct SlotState<'a> {
    p: &'a Program,
    slots: &'a Slots,
    /// Results of sources have their own memory and use no slot.
    source_values: BTreeSet<ValueId>,
    /// Results of horizontally fused groups lie in scratch memory: rows of GEMMs until the next group
    /// overwrites them, modulation tables until the end.
    grouped: BTreeMap<ValueId, &'a FusedGroup>,
    live_groups: Vec<&'a FusedGroup>,
    holds: BTreeMap<u32, ValueId>,
    /// Slots in use by collectives in flight, with their tickets.
    in_flight: BTreeMap<u32, ValueId>,
}

impl<'a> SlotState<'a> {
    fn new(p: &'a Program, slots: &'a Slots, steps: &'a [LaunchStep]) -> SlotState<'a> {
        let sources = p.ops.iter().filter(|o| o.opcode.table_row().kind == OpKind::Source);
        let mut grouped = BTreeMap::new();
        for step in steps {
            if let LaunchStep::Fused(group) = step {
                let results = group.fused_ops().iter().flat_map(|i| &p.ops[*i].results);
                grouped.extend(results.map(|r| (*r, group)));
            }
        }
        SlotState {
            p,
            slots,
            source_values: sources.flat_map(|o| o.results.iter().copied()).collect(),
            grouped,
            live_groups: Vec::new(),
            holds: BTreeMap::new(),
            in_flight: BTreeMap::new(),
        }
    }

    /// Adds a step; returns whether the slots allow it.
    fn accept_step(&mut self, step: &'a LaunchStep) -> bool {
        let ops = step.all_ops();
        let results = |o: &usize| self.p.ops[*o].results.iter().copied();
        let inner: Vec<ValueId> = ops[..ops.len() - 1].iter().flat_map(results).collect();
        let used = ops.iter().flat_map(|o| self.p.ops[*o].used_values());
        let operands: Vec<ValueId> = used.filter(|v| !inner.contains(v)).collect();
        if !operands.iter().all(|v| self.is_readable(*v)) {
            return false;
        }
        if let LaunchStep::Fused(group) = step {
            self.live_groups.retain(|other| !group.reuses_scratch_of(other));
            self.live_groups.push(group);
        }
        let last = &self.p.ops[step.launch_op()];
        if last.opcode == Opcode::Wait {
            self.in_flight.retain(|_, ticket| *ticket != last.operands[0]);
        }
        let written = match last.issue {
            true => self.start_collective(last),
            false => self.start_writes(step, last),
        };
        let Some(written) = written else { return false };
        if ops.len() > 1 && !self.are_distinct(step, &operands, &written) {
            return false;
        }
        for v in written {
            if let Some(s) = self.slot_of(v) {
                self.holds.insert(s, v);
            }
        }
        true
    }

    /// Returns the planned slot of a value; `None` for a value that lies elsewhere.
    fn slot_of(&self, v: ValueId) -> Option<u32> {
        let is_planned = !self.source_values.contains(&v) && !self.grouped.contains_key(&v);
        self.slots.value_slots.get(v.0 as usize).copied().flatten().filter(|_| is_planned)
    }

    /// Returns whether a value is still where a step reads it.
    fn is_readable(&self, v: ValueId) -> bool {
        if self.p.type_of(v).is_token() {
            return true;
        }
        let is_live = self.grouped.get(&v).is_none_or(|group| self.live_groups.contains(group));
        is_live && self.slot_of(v).is_none_or(|s| self.holds.get(&s) == Some(&v))
    }

    /// Reserves the slots of an issued collective until its wait, and returns its results. Returns
    /// `None` if another collective in flight uses one of them.
    fn start_collective(&mut self, issue: &Op) -> Option<Vec<ValueId>> {
        let ticket = issue.results[0];
        let results: Vec<ValueId> = self.p.collective_result(issue).into_iter().collect();
        for v in issue.operands.iter().chain(&results) {
            if let Some(s) = self.slot_of(*v)
                && self.in_flight.insert(s, ticket).is_some_and(|t| t != ticket)
            {
                return None;
            }
        }
        Some(results)
    }

    /// Returns the values that a step writes, or `None` if a collective in flight uses the slot of
    /// one of them.
    fn start_writes(&self, step: &LaunchStep, last: &Op) -> Option<Vec<ValueId>> {
        let mut written = last.results.clone();
        let inner_results: Vec<usize> = match step {
            // A fused residual add also writes the sum.
            LaunchStep::ResidualNorm { add: Some(add), .. }
            | LaunchStep::ResidualRms { add: Some(add), .. } => {
                vec![*add]
            }
            LaunchStep::RowMatmuls { matmuls, mul: None } => matmuls[..matmuls.len() - 1].to_vec(),
            LaunchStep::PutHeads(parts) => parts.iter().filter_map(|part| part.ops().last()).collect(),
            _ => Vec::new(),
        };
        let inner_results = inner_results.iter().flat_map(|i| self.p.ops[*i].results.iter().copied());
        written.extend(inner_results.filter(|v| !last.results.contains(v)));
        let mut stored =
            written.iter().filter(|v| last.opcode != Opcode::Wait && !self.p.type_of(**v).is_token());
        let is_in_flight = |v: &ValueId| self.slot_of(*v).is_some_and(|s| self.in_flight.contains_key(&s));
        (!stored.any(is_in_flight)).then_some(written)
    }

    /// Returns whether a fused step overwrites no operand that it still reads and stores its results
    /// apart. Row kernels read a whole row before they write it, so their results may overwrite an
    /// operand of equal size; so may heads overwrite what they were, and the sum of a convolution its residual.
    fn are_distinct(&self, step: &LaunchStep, operands: &[ValueId], written: &[ValueId]) -> bool {
        let is_row_kernel = |v: ValueId, w: ValueId| match step {
            LaunchStep::ResidualNorm { .. }
            | LaunchStep::ResidualRms { .. }
            | LaunchStep::RmsRope { .. }
            | LaunchStep::NormSilu { .. } => true,
            LaunchStep::PutHeads(parts) => parts.iter().any(|part| {
                let ops: Vec<&Op> = part.ops().map(|i| &self.p.ops[i]).collect();
                ops[0].operands[0] == v && ops[ops.len() - 1].results.contains(&w)
            }),
            LaunchStep::ConvResidual { conv, add } => {
                self.p.ops[*add].operands.contains(&v) && !self.p.ops[*conv].used_values().any(|u| u == v)
            }
            LaunchStep::Single(_)
            | LaunchStep::GemmResidual { .. }
            | LaunchStep::RowMatmuls { .. }
            | LaunchStep::FramesWrite { .. }
            | LaunchStep::Fused(_) => false,
        };
        let overwrites = |v: ValueId, w: ValueId| {
            let meets = self.slot_of(v).is_some() && self.slot_of(v) == self.slot_of(w) && v != w;
            // An operand of another shape, such as a table, is read again for later rows.
            let (of_v, of_w) = (self.p.type_of(v), self.p.type_of(w));
            let alike = of_v.shape == of_w.shape && of_v.byte_size() == of_w.byte_size();
            meets && !(is_row_kernel(v, w) && alike)
        };
        if operands.iter().any(|v| written.iter().any(|w| overwrites(*v, *w))) {
            return false;
        }
        let slots: Vec<u32> = written.iter().filter_map(|w| self.slot_of(*w)).collect();
        slots.iter().collect::<BTreeSet<_>>().len() == slots.len()
    }
}
