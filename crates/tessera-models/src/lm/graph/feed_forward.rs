//! The feed-forward part of a layer: dense, or a choice of experts.

use tessera_ir::{Attr, EVERY_EXPERT, Opcode, ValueId};

use super::{DecoderBuilder, TokenPlaces};
use crate::lm::decoder::ExpertLayers;

/// Begins the name of an output with the experts [rows, k] that each row of a layer chose; the layer follows.
const EXPERT_CHOICES: &str = "routing.";

impl DecoderBuilder<'_> {
    /// Emits a gated feed-forward, whose matrices have names behind `n`.
    pub(super) fn emit_dense(&mut self, n: &str, a: ValueId, inner: u64) -> ValueId {
        let d = self.model.extents.width;
        let gate = self.emit_linear(&format!("{n}.gate_proj"), a, inner, ("col", 1), false, Some("silu"));
        let up = self.emit_linear(&format!("{n}.up_proj"), a, inner, ("col", 1), false, None);
        let h = self.emit_op(Opcode::Mul, &[gate, up]);
        self.emit_linear(&format!("{n}.down_proj"), h, d, ("row", 1), false, None)
    }

    /// Emits the experts of a layer. Every expert has a slot for every token, so no token is dropped.
    pub(super) fn emit_experts(&mut self, n: &str, a: ValueId, e: &ExpertLayers, at: TokenPlaces) -> ValueId {
        let (d, tokens) = (self.model.extents.width, self.builder.type_of(a).shape[0]);
        let (chosen, weights) = self.emit_gate(n, a, e, at);
        self.builder.set_attr("capacity", tokens);
        let slots = self.emit_op(Opcode::ExpertSlots, &[chosen]);
        self.builder.set_attr("groups", e.count);
        let counts = self.emit_op(Opcode::ExpertCounts, &[chosen, slots]);
        self.builder.set_attr("groups", e.count).set_attr("capacity", tokens);
        let rows = self.emit_op(Opcode::ExpertPack, &[a, chosen, slots]);
        let grouped = |g: &mut Self, x, name: &str, [m, k]: [u64; 2], part: &str, act: Option<&str>| {
            let w = g.emit_weight(
                &format!("{n}.{}{EVERY_EXPERT}{name}.weight", e.names.experts),
                &[e.count, m, k],
                part,
                1,
            );
            if let Some(act) = act {
                g.builder.set_attr("act", act);
            }
            g.builder.set_attr("rows", tokens * e.top_k);
            g.emit_op(Opcode::GroupedMatmul, &[x, w, counts])
        };
        let [gate, up, down] = e.names.parts;
        let gate = grouped(self, rows, gate, [e.inner, d], "col", Some("silu"));
        let up = grouped(self, rows, up, [e.inner, d], "col", None);
        let h = self.emit_op(Opcode::Mul, &[gate, up]);
        let y = grouped(self, h, down, [d, e.inner], "row", None);
        let y = self.emit_op(Opcode::ExpertCombine, &[y, chosen, slots, weights]);
        match e.shared_inner {
            0 => y,
            inner => {
                let shared = self.emit_dense(&format!("{n}.mlp.shared_experts"), a, inner);
                self.emit_op(Opcode::Add, &[y, shared])
            }
        }
    }

    /// Emits the choice of experts. Returns the experts of each token and their weights.
    fn emit_gate(&mut self, n: &str, a: ValueId, e: &ExpertLayers, at: TokenPlaces) -> (ValueId, ValueId) {
        let router = format!("{n}.{}", e.names.router);
        let logits = self.emit_linear(&router, a, e.count, ("whole", 1), false, None);
        let score = |g: &mut Self| {
            if e.gate.sigmoid {
                g.builder.set_attr("score", "sigmoid");
            }
        };
        if let Some(name) = e.names.correction {
            let correction = self.emit_weight(&format!("{router}.{name}"), &[e.count], "whole", 1);
            self.builder.add_keyed("correction", correction);
        }
        if e.gate.groups > 1 {
            self.builder.set_attr("groups", e.gate.groups).set_attr("keep_groups", e.gate.keep_groups);
        }
        score(self);
        if let Some(last) = at.last {
            self.builder.add_keyed("last", last);
            self.builder.add_keyed("start", at.start);
            let rows = self.builder.type_of(a).shape[0];
            self.builder.set_attr("tokens", rows);
        }
        self.builder.set_attr("top_k", e.top_k);
        let chosen = self.emit_op(Opcode::TopKExperts, &[logits]);
        // A rank that routes differently can leave every later value equal on all ranks, because a sum over
        // ranks mixes what they compute. So the choices themselves are compared.
        self.builder.set_attr("at", self.location.as_str());
        self.builder.add_output(&format!("{EXPERT_CHOICES}{n}"), chosen);
        if e.gate.renormalise {
            self.builder.set_attr("renormalise", Attr::Bool(true));
        }
        if e.gate.scale != 1.0 {
            self.builder.set_attr("scale", e.gate.scale);
        }
        score(self);
        let weights = self.emit_op(Opcode::ExpertWeights, &[logits, chosen]);
        (chosen, weights)
    }
}
