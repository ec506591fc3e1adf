//! Lowers the ops of experts over ep: each rank computes some of the experts, for all tokens.
//!
//! Tokens are replicated over ep, so no rank has to send any: a rank keeps the slots of its own experts. Their
//! results return by an all-gather and are added by ascending expert, so the bits do not depend on ep.

use tessera_ir::{Op, Opcode, StreamKind, ValueId};
use tessera_mesh::{Axis, AxisLayout};

use super::{LocalValue, Lowering};

impl Lowering<'_> {
    /// Lowers an op whose result has one part per expert, of which each rank of ep keeps its own.
    pub(super) fn lower_to_experts(&mut self, op: &Op, s: usize) {
        let mut y = self.emit_as_is(op, s);
        if self.sharding.ep > 1 {
            let b = &mut self.stages[s].builder;
            b.set_attr("axis", Axis::Ep.name()).set_attr("dim", 0_u64);
            y = b.add_op(Opcode::TakeShard, &[y]);
        }
        self.set_result(op, s, y);
    }

    /// Gathers the results of all experts on every rank of ep.
    pub(super) fn return_from_experts(&mut self, y: ValueId, s: usize) {
        let local = self.local_value(y, s);
        if let AxisLayout::Shard(_) = self.stages[s].builder.type_of(local).layout.on_axis(Axis::Ep) {
            let attrs = [("dim", 0_u64)];
            let ticket = self.issue_collective(s, Opcode::AllGather, local, attrs, StreamKind::A2a, Axis::Ep);
            let whole = self.wait_for(s, ticket, None);
            self.stages[s].values.insert(y, LocalValue::Ready(whole));
        }
    }
}
