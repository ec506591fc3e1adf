//! The local counterparts of logical values: sources, and values that another stage sends.

use tessera_ir::{Op, OpKind, Opcode, StreamKind, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout};

use super::{LocalValue, Lowering};

impl Lowering<'_> {
    /// Returns the local counterpart of a logical value on stage `s`, in any layout.
    pub(super) fn local_value(&mut self, v: ValueId, s: usize) -> ValueId {
        match self.stages[s].values.get(&v) {
            Some(LocalValue::Ready(x)) => return *x,
            Some(LocalValue::Pending(ticket)) => {
                let ticket = *ticket;
                let x = self.wait_for(s, ticket, None);
                self.stages[s].values.insert(v, LocalValue::Ready(x));
                return x;
            }
            None => {}
        }
        let x = match self.analysis.defs[v.0 as usize].map(|d| &self.program.ops[d]) {
            Some(op) if op.opcode.table_row().kind == OpKind::Source && op.opcode != Opcode::CacheRead => {
                self.lower_source(op, s)
            }
            _ => self.receive_from_owner(v, s),
        };
        self.stages[s].values.insert(v, LocalValue::Ready(x));
        x
    }

    fn lower_source(&mut self, op: &Op, s: usize) -> ValueId {
        let logical = self.program.type_of(op.results[0]).clone();
        let layout = match op.opcode {
            Opcode::Weight => self.sharding.weight_layout(op, &logical.shape),
            _ => AxisLayout::Replicated,
        };
        let mut ty = self.local_type(&logical, layout, s);
        if op.opcode == Opcode::Weight {
            ty = self.with_own_experts(ty, &logical.shape, s);
        }
        let name = op.name.clone().unwrap_or_default();
        let b = &mut self.stages[s].builder;
        b.copy_attrs(op, &["load"]);
        b.set_label(&self.program.value(op.results[0]).name);
        let x = match op.opcode {
            Opcode::Weight => b.add_weight(&name, ty),
            Opcode::Call => b.add_call_scalar(&name, ty),
            _ => b.add_input(&name, ty),
        };
        // An input that holds tokens arrives whole; each rank keeps its own.
        if op.part_hint() == Some("tokens") {
            let want = self.sharding.token_layout(&logical.shape);
            return self.reshard(x, want, s, 1);
        }
        x
    }

    /// Returns the type of a value of this global shape with the experts of this role only, if it has some.
    pub(super) fn with_own_experts(&self, ty: Type, global: &[u64], s: usize) -> Type {
        let AxisLayout::Shard(experts) = self.sharding.expert_layout(global) else { return ty };
        let axis = self.sharding.expert_axis;
        let mut ty = ty.with_axis_layout(axis, AxisLayout::Shard(experts));
        ty.shape[0] = match experts.uneven {
            None => ty.shape[0] / u64::from(self.sharding.expert_ranks),
            Some(u) => {
                let program = self.stages[s].builder.program();
                tessera_ir::rules::role_shard_len(program, axis, u, experts.subgroup_size)
            }
        };
        ty
    }

    /// Sends a value from the stage that holds it to stage `s` and waits for it there.
    fn receive_from_owner(&mut self, v: ValueId, s: usize) -> ValueId {
        let from =
            (0..self.stages.len()).find(|t| *t != s && self.stages[*t].values.contains_key(&v)).unwrap_or(0);
        let x = self.local_value(v, from);
        let ty = self.stages[from].builder.type_of(x).clone();
        let attrs = [("to", s as u64)];
        let ticket = self.issue_collective(from, Opcode::Send, x, attrs, StreamKind::Pp, Axis::Pp);
        self.stages[from].pending_sends.push(ticket);
        let b = &mut self.stages[s].builder;
        // The compute stream is the last that touched the memory which the receive overwrites.
        b.set_stream(StreamKind::Compute);
        let event = b.add_op(Opcode::EventRecord, &[]);
        b.set_attr("axis", "pp").set_attr("from", from as i64).set_stream(StreamKind::Pp).start_after(event);
        let ticket = b.add_recv(ty.clone());
        self.wait_for(s, ticket, Some(ty))
    }

    pub(super) fn local_type(&self, logical: &Type, layout: AxisLayout, s: usize) -> Type {
        let program = self.stages[s].builder.program();
        let mut ty = logical.clone().with_axis_layout(Axis::Tp, layout);
        if let AxisLayout::Shard(shard) = layout {
            ty.shape[shard.dim] = match shard.uneven {
                None => ty.shape[shard.dim] / u64::from(shard.part_count(self.mesh.axis_size(Axis::Tp))),
                Some(u) => tessera_ir::rules::role_shard_len(program, Axis::Tp, u, shard.subgroup_size),
            };
        }
        ty
    }

    pub(super) fn set_result(&mut self, op: &Op, s: usize, x: ValueId) {
        self.stages[s].values.insert(op.results[0], LocalValue::Ready(x));
    }

    pub(super) fn tp_layout(&self, x: ValueId, s: usize) -> AxisLayout {
        self.stages[s].builder.type_of(x).layout.on_axis(Axis::Tp)
    }
}
