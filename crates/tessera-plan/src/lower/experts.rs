//! Lowers the ops of experts over the axis whose ranks have experts of their own: ep, or tp where the mapping says so.
//!
//! Where tokens are replicated over that axis, no rank has to send any: a rank keeps the slots of its own experts. Where they
//! are sharded, each rank routes its own, and an all-to-all takes the slots of every expert to its rank, with their
//! counts before them. The results return the way they came, or added up per rank, and every rank then needs all
//! tokens again, because attention reads all of them.

use tessera_ir::{Attr, Op, Opcode, StreamKind, ValueId, Wire, views};
use tessera_mesh::{AxisLayout, Reduction, Shard};

use super::{LocalValue, Lowering};
use crate::mapping::{ExpertCombine, TokenPlacement, TokenWire};

impl Lowering<'_> {
    /// Lowers the tokens of a layer: pads them to whole groups and, if they are sharded, keeps those of the rank.
    pub(super) fn lower_expert_tokens(&mut self, op: &Op, v: &views::ExpertTokens, s: usize) {
        let axis = self.sharding.expert_axis;
        let mut x = self.local_value(v.x, s);
        if self.program.type_of(v.x).shape[0] != v.rows {
            x = self.emit_as_is(op, s);
        }
        if self.sharding.expert_ranks > 1 && self.experts.tokens == TokenPlacement::Sharded {
            let b = &mut self.stages[s].builder;
            b.set_attr("axis", axis.name()).set_attr("dim", 0_u64);
            x = b.add_op(Opcode::TakeShard, &[x]);
        }
        self.set_result(op, s, x);
    }

    /// Lowers an op whose result has one part per expert, of which each rank gets its own.
    pub(super) fn lower_to_experts(&mut self, op: &Op, s: usize) {
        let axis = self.sharding.expert_axis;
        let y = self.emit_as_is(op, s);
        if let Some(tokens) = self.expert_shard(y, s) {
            let wire = match (op.opcode, self.experts.wire) {
                (Opcode::ExpertCounts, _) | (_, TokenWire::F32) => None,
                (_, TokenWire::Fp8) => Some(Wire::E4m3),
            };
            let mut attrs: Vec<(&'static str, Attr)> =
                vec![("concat", (tokens.dim as u64).into()), ("split", 0_u64.into())];
            attrs.extend(wire.map(|wire| ("wire", wire.name().into())));
            let ticket = self.issue_collective(s, Opcode::AllToAll, y, attrs, StreamKind::A2a, axis);
            self.stages[s].values.insert(op.results[0], LocalValue::Pending(ticket));
            return;
        }
        let mut y = y;
        if self.sharding.expert_ranks > 1 {
            let b = &mut self.stages[s].builder;
            b.set_attr("axis", axis.name()).set_attr("dim", 0_u64);
            y = b.add_op(Opcode::TakeShard, &[y]);
        }
        self.set_result(op, s, y);
    }

    /// Lowers the weighted sum over experts, for which their results return to the ranks of the tokens.
    pub(super) fn lower_expert_combine(&mut self, op: &Op, v: &views::ExpertCombine, s: usize) {
        let axis = self.sharding.expert_axis;
        let choices = self.local_value(v.experts, s);
        let own_tokens = self.expert_shard(choices, s).is_some();
        let results = self.local_value(v.y, s);
        let y = match (self.expert_shard(results, s), self.experts.combine) {
            (None, _) => self.emit_as_is(op, s),
            (Some(experts), ExpertCombine::Ordered) => {
                let back = match own_tokens {
                    true => {
                        let attrs = [("concat", 0_u64), ("split", 1)];
                        let ticket =
                            self.issue_collective(s, Opcode::AllToAll, results, attrs, StreamKind::A2a, axis);
                        self.wait_for(s, ticket, None)
                    }
                    false => self.gather_over_experts(results, experts, s),
                };
                self.stages[s].values.insert(v.y, LocalValue::Ready(back));
                self.emit_as_is(op, s)
            }
            (Some(_), ExpertCombine::Reduced) => self.add_per_rank(op, v, own_tokens, s),
        };
        let mut y = y;
        if let AxisLayout::Partial { .. } = self.tp_layout(y, s) {
            if self.expert_shard(y, s).is_none() {
                return self.set_reduced_result(op, s, y);
            }
            y = self.all_reduce(y, s);
        }
        match self.expert_shard(y, s) {
            Some(tokens) => {
                let attrs = [("dim", tokens.dim as u64)];
                let ticket = self.issue_collective(s, Opcode::AllGather, y, attrs, StreamKind::A2a, axis);
                self.stages[s].values.insert(op.results[0], LocalValue::Pending(ticket));
            }
            None => self.set_result(op, s, y),
        }
    }

    /// Adds the results of a rank's own experts for all tokens, and then those of all ranks: for its own tokens, or
    /// for all of them.
    fn add_per_rank(&mut self, op: &Op, v: &views::ExpertCombine, own_tokens: bool, s: usize) -> ValueId {
        if own_tokens {
            for value in [v.experts, v.slots, v.weights].into_iter().chain(v.order) {
                let local = self.local_value(value, s);
                if let Some(tokens) = self.expert_shard(local, s) {
                    let whole = self.gather_over_experts(local, tokens, s);
                    self.stages[s].values.insert(value, LocalValue::Ready(whole));
                }
            }
        }
        let (axis, y) = (self.sharding.expert_axis, self.emit_as_is(op, s));
        let mut attrs: Vec<(&'static str, Attr)> = vec![("reduction", Reduction::Sum.name().into())];
        let opcode = match own_tokens {
            true => Opcode::ReduceScatter,
            false => Opcode::AllReduce,
        };
        attrs.extend(own_tokens.then_some(("dim", 0_u64.into())));
        let ticket = self.issue_collective(s, opcode, y, attrs, StreamKind::A2a, axis);
        self.wait_for(s, ticket, None)
    }

    /// Lowers counts per expert or a sum over tokens, which every rank has of its own tokens.
    pub(super) fn lower_expert_statistics(&mut self, op: &Op, s: usize) {
        let y = self.emit_as_is(op, s);
        let axis = self.sharding.expert_axis;
        let layout = self.stages[s].builder.type_of(y).layout.on_axis(axis);
        if let AxisLayout::Partial { reduction, .. } = layout {
            let attrs = [("reduction", reduction.name())];
            let ticket = self.issue_collective(s, Opcode::AllReduce, y, attrs, StreamKind::A2a, axis);
            self.stages[s].values.insert(op.results[0], LocalValue::Pending(ticket));
        } else {
            self.set_result(op, s, y);
        }
    }

    fn gather_over_experts(&mut self, x: ValueId, from: Shard, s: usize) -> ValueId {
        self.gather_over(x, from, (self.sharding.expert_axis, StreamKind::A2a), s)
    }

    /// Gathers a value whose rows are sharded over the axis of the experts, and returns any other as it is.
    pub(super) fn gather_tokens(&mut self, x: ValueId, s: usize) -> ValueId {
        match self.expert_shard(x, s) {
            Some(shard) => self.gather_over_experts(x, shard, s),
            None => x,
        }
    }

    /// Returns how a value is sharded over the axis of the experts.
    fn expert_shard(&self, x: ValueId, s: usize) -> Option<Shard> {
        match self.stages[s].builder.type_of(x).layout.on_axis(self.sharding.expert_axis) {
            AxisLayout::Shard(shard) => Some(shard),
            AxisLayout::Replicated | AxisLayout::Partial { .. } => None,
        }
    }
}
