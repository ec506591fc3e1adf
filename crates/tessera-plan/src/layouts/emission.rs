//! Writes the program of the ranks at the first coordinate: the ops of a plan, and the collectives
//! that change layouts between them.
//!
//! A collective is issued as soon as its operand exists, and its first reader waits for it. If its
//! stream may not overlap compute, both happen where the value is read.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tessera_ir::rules::RuleError;
use tessera_ir::{Builder, Op, Opcode, Program, StreamKind, Type, ValueId};
use tessera_mesh::{Axis, Coord, Layout, Mesh};

use super::StreamOverlap;
use super::redistribution::{MoveOp, plan_moves};
use super::steps::{LayoutPlan, Reading, Step, conversions_by_value};

/// Writes the program of a plan for a role whose name states no coordinate.
///
/// # Errors
/// Every error that a rule reported.
pub(super) fn emit_program(
    plan: &LayoutPlan,
    mesh: &Mesh,
    role: &str,
    overlap: &StreamOverlap,
) -> Result<Program, Vec<RuleError>> {
    let builder = Builder::new_role(&plan.name, role, *mesh, &streams_of(mesh));
    let mut emitter = Emitter {
        plan,
        mesh,
        overlap,
        builder,
        local: BTreeMap::new(),
        in_flight: Vec::new(),
        conversions: conversions_by_value(plan),
        sources: BTreeSet::new(),
    };
    let (sources, steps): (Vec<&Step>, Vec<&Step>) = plan.steps.iter().partition(|s| s.op.is_source());
    sources.iter().for_each(|s| emitter.emit_source(&s.op));
    for (i, step) in steps.iter().enumerate() {
        // A source exists from the start. Its conversion begins one op early: earlier, and the parts
        // of all weights would be in memory at once.
        for near in steps.iter().skip(i).take(2) {
            emitter.start_conversions_of_sources(near);
        }
        emitter.emit_step(step);
    }
    emitter.builder.finish()
}

/// The stream of collectives over an axis.
fn stream_of(axis: Axis) -> StreamKind {
    match axis {
        Axis::Tp | Axis::Dp => StreamKind::TpCollective,
        Axis::Ep => StreamKind::A2a,
        Axis::Pp => StreamKind::Pp,
    }
}

fn streams_of(mesh: &Mesh) -> Vec<StreamKind> {
    let mut streams: Vec<StreamKind> = mesh.active_axes().map(stream_of).collect();
    streams.push(StreamKind::Compute);
    streams.sort_unstable();
    streams.dedup();
    streams
}

/// A value in one layout.
enum LocalValue {
    Ready(ValueId),
    Moving(Conversion),
}

/// A value on its way to another layout.
struct Conversion {
    /// The value so far; while a collective is in flight, its ticket.
    at: ValueId,
    is_in_flight: bool,
    rest: VecDeque<MoveOp>,
}

/// A value and one of its layouts.
type Place = (ValueId, Layout);

struct Emitter<'a> {
    plan: &'a LayoutPlan,
    mesh: &'a Mesh,
    overlap: &'a StreamOverlap,
    builder: Builder,
    local: BTreeMap<Place, LocalValue>,
    /// Conversions with a collective in flight, and its stream.
    in_flight: Vec<(StreamKind, Place)>,
    /// The conversions of each value that begin when it is produced.
    conversions: BTreeMap<ValueId, Vec<Reading>>,
    /// Values that exist before the program starts.
    sources: BTreeSet<ValueId>,
}

impl Emitter<'_> {
    fn emit_source(&mut self, op: &Op) {
        let Some(result) = op.results.first().copied() else { return };
        let value = &self.plan.values[result.0 as usize];
        let layout = self.plan.first_layout(result);
        let shape = layout.local_shape(&value.shape, self.mesh, Coord::default());
        let ty = Type { dtype: value.dtype, shape, layout };
        let name = op.name.as_deref().unwrap_or_default();
        let b = self.builder.set_attrs(op.attrs.clone()).set_label(&value.name);
        let x = match op.opcode {
            Opcode::Weight => b.add_weight(name, ty),
            Opcode::Call => b.add_call_scalar(name, ty),
            _ => b.add_input(name, ty),
        };
        self.local.insert((result, layout), LocalValue::Ready(x));
        self.sources.insert(result);
    }

    fn emit_step(&mut self, step: &Step) {
        let op = &step.op;
        let read: Vec<ValueId> = step.reads.iter().map(|r| self.local_value(r)).collect();
        let (operands, keyed) = read.split_at(op.operands.len());
        let b = self.builder.set_attrs(op.attrs.clone());
        for ((name, _), v) in op.keyed.iter().zip(keyed) {
            b.add_keyed(name, *v);
        }
        if let Some(r) = op.results.first() {
            b.set_label(&self.plan.values[r.0 as usize].name);
        }
        let made = match (op.opcode, operands) {
            (Opcode::Output, [x]) => {
                b.add_output(op.name.as_deref().unwrap_or_default(), *x);
                Vec::new()
            }
            (Opcode::Quantize, [x]) => b.add_quantize(*x).to_vec(),
            _ => vec![b.add_op(op.opcode, operands)],
        };
        for (result, x) in op.results.iter().zip(made) {
            self.local.insert((*result, self.plan.first_layout(*result)), LocalValue::Ready(x));
            self.start_conversions(*result);
        }
    }

    fn start_conversions_of_sources(&mut self, step: &Step) {
        for read in &step.reads {
            if self.sources.contains(&read.value) && read.from == self.plan.first_layout(read.value) {
                self.start_conversion(read);
            }
        }
    }

    fn start_conversions(&mut self, v: ValueId) {
        for reading in self.conversions.get(&v).cloned().unwrap_or_default() {
            self.start_conversion(&reading);
        }
    }

    /// Issues the first collective of a conversion, if it may overlap compute.
    fn start_conversion(&mut self, reading: &Reading) {
        let place = (reading.value, reading.to);
        if reading.from == reading.to || self.local.contains_key(&place) {
            return;
        }
        let ops = self.ops_of(reading);
        let first = ops.iter().find(|op| op.opcode.is_collective());
        if first.is_some_and(|op| self.overlap.allows(stream_of(op.axis), StreamKind::Compute)) {
            self.begin(reading, ops);
            self.advance(place, false);
        }
    }

    fn ops_of(&self, reading: &Reading) -> VecDeque<MoveOp> {
        let shape = &self.plan.values[reading.value.0 as usize].shape;
        // The planner has checked that the moves exist.
        let moves = plan_moves(self.mesh, shape, reading.from, reading.to).unwrap_or_default();
        moves.iter().flat_map(|m| m.to_ops(self.mesh, shape)).collect()
    }

    fn begin(&mut self, reading: &Reading, rest: VecDeque<MoveOp>) {
        let at = self.advance((reading.value, reading.from), true);
        let conversion = Conversion { at, is_in_flight: false, rest };
        self.local.insert((reading.value, reading.to), LocalValue::Moving(conversion));
    }

    /// Returns a value in the layout in which an op reads it.
    fn local_value(&mut self, reading: &Reading) -> ValueId {
        let place = (reading.value, reading.to);
        if !self.local.contains_key(&place) {
            let ops = self.ops_of(reading);
            self.begin(reading, ops);
        }
        self.advance(place, true)
    }

    /// Continues a conversion: to its end, or up to the next collective that is in flight. Returns
    /// the value so far.
    fn advance(&mut self, place: Place, to_end: bool) -> ValueId {
        while let Some(LocalValue::Moving(conversion)) = self.local.get_mut(&place) {
            if conversion.is_in_flight {
                if !to_end {
                    return conversion.at;
                }
                self.wait_for(place);
                continue;
            }
            let x = conversion.at;
            match conversion.rest.pop_front() {
                None => {
                    self.local.insert(place, LocalValue::Ready(x));
                }
                Some(op) if op.opcode.is_collective() => self.issue(place, x, &op),
                Some(op) => {
                    let made = op.set_attrs(&mut self.builder).add_op(op.opcode, &[x]);
                    self.set_position(place, made, false);
                }
            }
        }
        match self.local.get(&place) {
            Some(LocalValue::Ready(x)) => *x,
            // Every value is defined before its readers.
            Some(LocalValue::Moving(_)) | None => ValueId(0),
        }
    }

    /// Issues a collective on its stream after all preceding compute, and after the collectives of
    /// streams that it may not overlap.
    fn issue(&mut self, place: Place, x: ValueId, op: &MoveOp) {
        let stream = stream_of(op.axis);
        let in_the_way =
            |(other, _): &&(StreamKind, Place)| *other != stream && !self.overlap.allows(*other, stream);
        let waits: Vec<Place> = self.in_flight.iter().filter(in_the_way).map(|(_, place)| *place).collect();
        waits.into_iter().for_each(|other| self.wait_for(other));
        let event = self.builder.add_op(Opcode::EventRecord, &[]);
        let b = op.set_attrs(&mut self.builder).set_stream(stream).start_after(event);
        let ticket = b.add_issue(op.opcode, &[x]);
        self.set_position(place, ticket, true);
        self.in_flight.push((stream, place));
        if !self.overlap.allows(stream, StreamKind::Compute) {
            self.wait_for(place);
        }
    }

    fn wait_for(&mut self, place: Place) {
        self.in_flight.retain(|(_, other)| *other != place);
        if let Some(LocalValue::Moving(Conversion { at: ticket, is_in_flight: true, .. })) =
            self.local.get(&place)
        {
            let ticket = *ticket;
            let made = self.builder.add_wait(ticket, None).unwrap_or(ticket);
            self.set_position(place, made, false);
        }
    }

    fn set_position(&mut self, place: Place, x: ValueId, in_flight: bool) {
        if let Some(LocalValue::Moving(conversion)) = self.local.get_mut(&place) {
            conversion.at = x;
            conversion.is_in_flight = in_flight;
        }
    }
}
