//! The collectives that lowering inserts: reductions of partial values, resharding over tp, and the
//! events and waits that order them against compute.

use tessera_ir::{Attr, Op, Opcode, StreamKind, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Shard};

use super::{LocalValue, Lowering};

impl Lowering<'_> {
    /// Reshards a value to a layout over tp. `unit` is the number of elements that must stay
    /// together along the new sharded dim.
    pub(super) fn reshard(&mut self, x: ValueId, want: AxisLayout, s: usize, unit: u64) -> ValueId {
        use AxisLayout::{Partial, Replicated, Shard as S};
        match (self.tp_layout(x, s), want) {
            (have, want) if have == want => x,
            (Partial { .. }, want) => {
                let y = self.all_reduce(x, s);
                self.reshard(y, want, s, unit)
            }
            (Replicated, S(to)) => {
                let b = &mut self.stages[s].builder;
                b.set_attr("axis", "tp").set_attr("dim", to.dim as u64).set_attr("unit", unit);
                b.add_op(Opcode::TakeShard, &[x])
            }
            (S(from), S(to)) => {
                let ticket = self.issue_all_to_all(x, from, to, s, unit);
                self.wait_for(s, ticket, None)
            }
            (S(from), _) => self.gather_shards(x, from, s),
            (_, _) => x,
        }
    }

    pub(super) fn all_reduce(&mut self, x: ValueId, s: usize) -> ValueId {
        match self.issue_reduction(x, s) {
            LocalValue::Ready(x) => x,
            LocalValue::Pending(ticket) => self.wait_for(s, ticket, None),
        }
    }

    /// Stores a result; if it is partial, issues its reduction and leaves the wait to the first
    /// reader.
    pub(super) fn set_reduced_result(&mut self, op: &Op, s: usize, y: ValueId) {
        let is_read = !self.analysis.readers[op.results[0].0 as usize].is_empty();
        let held = match self.issue_reduction(y, s) {
            LocalValue::Pending(ticket) if !is_read => LocalValue::Ready(self.wait_for(s, ticket, None)),
            held => held,
        };
        self.stages[s].values.insert(op.results[0], held);
    }

    pub(super) fn issue_all_to_all(
        &mut self,
        x: ValueId,
        from: Shard,
        to: Shard,
        s: usize,
        unit: u64,
    ) -> ValueId {
        let attrs = [("concat", from.dim as u64), ("split", to.dim as u64), ("unit", unit)];
        self.issue_collective(s, Opcode::AllToAll, x, attrs, StreamKind::TpCollective, Axis::Tp)
    }

    /// Issues a collective on its stream after all preceding compute and returns the ticket.
    pub(super) fn issue_collective(
        &mut self,
        s: usize,
        opcode: Opcode,
        operand: ValueId,
        attrs: impl IntoIterator<Item = (&'static str, impl Into<Attr>)>,
        stream: StreamKind,
        axis: Axis,
    ) -> ValueId {
        let b = &mut self.stages[s].builder;
        b.set_stream(StreamKind::Compute);
        let event = b.add_op(Opcode::EventRecord, &[]);
        b.set_attr("axis", axis.name());
        for (k, v) in attrs {
            b.set_attr(k, v);
        }
        b.set_stream(stream).start_after(event);
        b.add_issue(opcode, &[operand])
    }

    pub(super) fn wait_for(&mut self, s: usize, ticket: ValueId, declared: Option<Type>) -> ValueId {
        let b = &mut self.stages[s].builder;
        b.set_stream(StreamKind::Compute);
        b.add_wait(ticket, declared).unwrap_or(ticket)
    }

    /// Issues the reduction of a value, if it is partial.
    fn issue_reduction(&mut self, x: ValueId, s: usize) -> LocalValue {
        let AxisLayout::Partial { reduction: r, .. } = self.tp_layout(x, s) else {
            return LocalValue::Ready(x);
        };
        let attrs = [("reduction", r.name())];
        let stream = StreamKind::TpCollective;
        LocalValue::Pending(self.issue_collective(s, Opcode::AllReduce, x, attrs, stream, Axis::Tp))
    }

    /// Gathers all shards over tp on every rank.
    fn gather_shards(&mut self, x: ValueId, from: Shard, s: usize) -> ValueId {
        self.gather_over(x, from, (Axis::Tp, StreamKind::TpCollective), s)
    }

    /// Gathers all shards over an axis on every rank; pads uneven ones to equal counts first, as NCCL requires.
    pub(super) fn gather_over(
        &mut self,
        x: ValueId,
        from: Shard,
        (axis, stream): (Axis, StreamKind),
        s: usize,
    ) -> ValueId {
        let parts = u64::from(self.mesh.axis_size(axis));
        let mut x = x;
        if let Some(u) = from.uneven {
            let rows = (u.extent / u.unit).div_ceil(parts) * u.unit;
            let b = &mut self.stages[s].builder;
            b.set_attr("axis", axis.name()).set_attr("dim", from.dim as u64).set_attr("rows", rows);
            x = b.add_op(Opcode::Pad, &[x]);
        }
        let attrs = [("dim", from.dim as u64)];
        let ticket = self.issue_collective(s, Opcode::AllGather, x, attrs, stream, axis);
        let mut y = self.wait_for(s, ticket, None);
        if let Some(u) = from.uneven {
            let b = &mut self.stages[s].builder;
            b.set_attr("extent", u.extent).set_attr("parts", parts).set_attr("unit", u.unit);
            if from.dim > 0 {
                b.set_attr("dim", from.dim as u64);
            }
            y = b.add_op(Opcode::Compact, &[y]);
        }
        y
    }
}
