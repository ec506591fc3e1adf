//! Changes what the routers of a logical program prefer, as a mapping states it, before the program is sharded.
//!
//! What a router chooses may depend on its logits and on the plan alone. So the place of experts and tokens, the biases
//! and the seeds are attributes and weights of the program, and every rank that holds a token chooses alike.
//!
//! The logits of a router with biases are those that choices and weights read. The penalty of the gate moves the
//! choice and not the weights, as a correction of the model does.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Attr, Builder, DType, Op, OpView, Opcode, Program, RouterScore, Type, ValueId, views};

use crate::ExpertMap;
use crate::codes::T0612;
use crate::copy_op::copy_op;
use crate::mapping::{Mapping, RouterGate, RouterMapping};

/// Name of the weight [experts] with the biases of a mapping. No checkpoint has it; the mapping states it.
pub const ROUTER_BIAS: &str = "mapping.router_bias";

/// Rewrites the routers of a program; returns a copy of a program without experts.
///
/// # Errors
/// Returns T0612 if a router is not of the kind that the mapping's keys describe, or their sizes differ.
pub(crate) fn apply_router_features(
    p: &Program,
    mapping: &Mapping,
    experts: u64,
) -> Result<Program, Diagnostics> {
    let router = &mapping.experts.router;
    let map = match router.reads_locality() {
        true => Some(ExpertMap::new(mapping, experts).map_err(|d| vec![d])?),
        false => None,
    };
    let mut pass = RouterPass {
        program: p,
        router,
        map,
        builder: Builder::new_logical(&p.name),
        values: BTreeMap::new(),
        logits: BTreeMap::new(),
        bias: None,
        terms: Vec::new(),
        diagnostics: check_routers(p, router, experts),
    };
    if !pass.diagnostics.is_empty() {
        return Err(pass.diagnostics);
    }
    for b in &p.buffers {
        pass.builder.declare_buffer(&b.name, b.ty.clone());
    }
    p.ops.iter().for_each(|op| pass.emit_op(op));
    // The last stage returns everything: ranks with outputs return the same ones.
    for (name, value) in std::mem::take(&mut pass.terms) {
        pass.builder.set_attr("at", "last");
        pass.builder.add_output(&name, value);
    }
    pass.builder.finish().map_err(|es| {
        let diagnostic = |message: String| Diagnostic::error(&T0612, message).with_label(at(p), "this phase");
        es.into_iter().map(|e| diagnostic(e.message).with_note(e.code.title)).collect()
    })
}

fn at(p: &Program) -> String {
    format!("@{}", p.name)
}

/// Checks that every router of a program is of the kind that the keys describe.
fn check_routers(p: &Program, router: &RouterMapping, experts: u64) -> Diagnostics {
    let mut ds = Vec::new();
    let mut refuse = |message: String, hint: &str| {
        ds.push(Diagnostic::error(&T0612, message).with_label(at(p), "this phase").with_hint(hint));
    };
    if let Some(file) = &router.bias_file {
        refuse(format!("experts.bias_file = {file:?} was not read"), "state the numbers as `bias`");
    }
    let (stated, most) = (router.bias.len() as u64, router.top_k.map_or(0, |k| k.ceil() as u64));
    if stated > 0 && stated != experts {
        refuse(format!("experts.bias has {stated} numbers for {experts} experts"), "state one per expert");
    }
    if most > experts {
        refuse(
            format!("experts.top_k = {} of {experts} experts", router.top_k.unwrap_or(0.0)),
            "choose no more experts than the model has",
        );
    }
    for op in &p.ops {
        let Ok(OpView::TopKExperts(v)) = op.view() else { continue };
        let weights = p.ops.iter().any(
            |op| matches!(op.view(), Ok(OpView::ExpertWeights(w)) if w.logits == v.logits && w.score == v.score),
        );
        if !weights {
            refuse(
                "a router whose weights are no function of its logits, as those of moe_route".to_string(),
                "leave out the keys of [experts] about routers",
            );
        }
        let is_plain = v.score == RouterScore::Softmax && v.correction.is_none() && v.groups == 1;
        if router.gate == RouterGate::LocalityPenalized && !is_plain {
            refuse(
                format!(
                    "gate = \"{}\" for a model whose gate is no softmax over all experts",
                    router.gate.name()
                ),
                "use bias_locality, which every gate reads",
            );
        }
    }
    ds
}

struct RouterPass<'a> {
    program: &'a Program,
    router: &'a RouterMapping,
    /// Where experts are, if anything reads it.
    map: Option<ExpertMap>,
    builder: Builder,
    values: BTreeMap<ValueId, ValueId>,
    /// For logits of the program, those with biases.
    logits: BTreeMap<ValueId, ValueId>,
    /// The biases, once a router reads them.
    bias: Option<ValueId>,
    /// Names and values of the terms that the program returns.
    terms: Vec<(String, ValueId)>,
    diagnostics: Diagnostics,
}

impl RouterPass<'_> {
    fn emit_op(&mut self, op: &Op) {
        let made = match op.view() {
            Ok(OpView::TopKExperts(v)) => vec![self.emit_choice(op, &v)],
            Ok(OpView::ExpertWeights(v)) => self.emit_weights(op, &v),
            Ok(OpView::GroupedMatmul(v)) => {
                let rows = self.scale_rows(v.rows);
                self.emit_copy(op, |b| {
                    b.set_attr("rows", rows);
                })
            }
            _ => self.emit_copy(op, |_| ()),
        };
        self.values.extend(op.results.iter().copied().zip(made));
    }

    fn emit_copy(&mut self, op: &Op, set_attrs: impl FnOnce(&mut Builder)) -> Vec<ValueId> {
        let values = &self.values;
        let map = |v: ValueId| values.get(&v).copied().unwrap_or(v);
        copy_op(self.program, op, &mut self.builder, map, set_attrs)
    }

    fn emit_choice(&mut self, op: &Op, v: &views::TopKExperts) -> ValueId {
        let raw = self.values.get(&v.logits).copied().unwrap_or(v.logits);
        self.emit_regularizer(op, raw);
        let mut logits = self.emit_bias(op, raw);
        logits = self.emit_locality(op, logits, self.router.bias_locality);
        self.logits.insert(v.logits, logits);
        let penalised = self.emit_locality(op, logits, self.router.locality_weight);
        let top_k = self.router.top_k.map_or(v.top_k, |k| k.ceil() as u64);
        self.builder.set_attrs(op.attrs.clone()).set_attr("top_k", top_k);
        for (key, value) in &op.keyed {
            self.builder.add_keyed(key, self.values.get(value).copied().unwrap_or(*value));
        }
        let chosen = self.builder.add_op(Opcode::TopKExperts, &[penalised]);
        self.emit_draw(op, chosen)
    }

    fn emit_bias(&mut self, op: &Op, logits: ValueId) -> ValueId {
        if self.router.bias.is_empty() {
            return logits;
        }
        let experts = self.router.bias.len() as u64;
        let b = &mut self.builder;
        let bias = *self.bias.get_or_insert_with(|| {
            b.set_attr("at", "all").set_attr("part", "whole").set_label(ROUTER_BIAS);
            b.add_weight(ROUTER_BIAS, Type::new(DType::F32, [experts]))
        });
        b.copy_attrs(op, &["at"]);
        b.add_op(Opcode::BiasAct, &[logits, bias])
    }

    fn emit_locality(&mut self, op: &Op, logits: ValueId, weight: f64) -> ValueId {
        let Some(map) = self.map.as_ref().filter(|_| weight != 0.0) else { return logits };
        self.builder.copy_attrs(op, &["at"]).set_attr("weight", weight);
        self.builder.set_attr("expert_groups", to_integers(&map.expert_groups()));
        self.builder.set_attr("home_groups", to_integers(&map.rank_groups));
        self.builder.add_op(Opcode::ExpertLocality, &[logits])
    }

    fn emit_regularizer(&mut self, op: &Op, logits: ValueId) {
        let (Some(term), Some(map)) = (self.router.regularizer, &self.map) else { return };
        let layer = self.layer_name(op);
        let parts = [
            (Opcode::ExpertDistance, "regularizer"),
            (Opcode::ExpertDistanceGradient, "regularizer_gradient"),
        ];
        let count = if term.gradient { 2 } else { 1 };
        for (opcode, name) in parts.into_iter().take(count) {
            self.builder.copy_attrs(op, &["at"]).set_attr("weight", term.weight);
            self.builder.set_attr("distances", to_integers(&map.distances()));
            self.builder.set_attr("expert_homes", to_integers(&map.expert_ranks));
            self.builder.set_attr("tokens", self.builder.type_of(logits).shape[0]);
            let value = self.builder.add_op(opcode, &[logits]);
            self.terms.push((format!("{name}.{layer}"), value));
        }
    }

    /// Emits the draw that leaves some tokens an expert less, if the number of experts has a fraction.
    fn emit_draw(&mut self, op: &Op, chosen: ValueId) -> ValueId {
        let Some(keep) = self.router.top_k.map(f64::fract).filter(|keep| *keep > 0.0) else { return chosen };
        let seeds = [self.router.seeds.global, self.router.seeds.ep];
        // The position of a token in its text stands for the call: no text has two rows of one position, and neither
        // its pieces nor its batch move the draw.
        let start = sequence_starts(self.program).and_then(|start| self.values.get(&start));
        let layer = self.layer_name(op).trim_start_matches("layer").parse().unwrap_or(0_u64);
        if let Some(start) = start {
            self.builder.add_keyed("start", *start);
        }
        self.builder.copy_attrs(op, &["at"]).set_attr("keep", keep).set_attr("layer", layer);
        self.builder.set_attr("seeds", to_integers(&seeds));
        self.builder.set_attr("tokens", self.builder.type_of(chosen).shape[0]);
        self.builder.add_op(Opcode::ExpertDraw, &[chosen])
    }

    fn emit_weights(&mut self, op: &Op, v: &views::ExpertWeights) -> Vec<ValueId> {
        let of = |x: ValueId| self.values.get(&x).copied().unwrap_or(x);
        let operands = [self.logits.get(&v.logits).copied().unwrap_or_else(|| of(v.logits)), of(v.experts)];
        self.builder.set_attrs(op.attrs.clone());
        if self.router.gate == RouterGate::LocalityPenalized {
            self.builder.set_attr("renormalise", Attr::Bool(true));
        }
        vec![self.builder.add_op(Opcode::ExpertWeights, &operands)]
    }

    /// Returns the number of slots that tokens fill when each has another number of experts.
    fn scale_rows(&self, rows: u64) -> u64 {
        let k = self.program.ops.iter().find_map(|op| match op.view() {
            Ok(OpView::TopKExperts(v)) => Some(v.top_k),
            _ => None,
        });
        match (self.router.top_k, k) {
            (Some(to), Some(from)) => (rows / from).saturating_mul(to.ceil() as u64),
            _ => rows,
        }
    }

    /// Returns the number of the layer of an op: that of its block or, in a program without blocks, of its router.
    fn layer_name(&self, op: &Op) -> String {
        let routers = self.program.ops.iter().filter(|op| op.opcode == Opcode::TopKExperts);
        let index = routers.take_while(|router| router.results != op.results).count();
        let place = op.placement_hint().and_then(|at| at.strip_prefix("block."));
        place.map_or_else(|| format!("layer{index}"), str::to_string)
    }
}

/// Returns the value with the first position of each sequence in a program of texts.
pub(crate) fn sequence_starts(p: &Program) -> Option<ValueId> {
    p.ops.iter().find_map(|op| match op.view() {
        Ok(OpView::PagedAttention(v)) => Some(v.start),
        _ => None,
    })
}

pub(crate) fn to_integers(list: &[u64]) -> Vec<i64> {
    list.iter().map(|i| i64::try_from(*i).unwrap_or(i64::MAX)).collect()
}
