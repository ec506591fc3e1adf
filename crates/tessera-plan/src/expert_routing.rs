//! Gives the tokens of a call groups with slots of their own: a transformation of a logical program before it is
//! sharded.
//!
//! A model lets every token find a slot of each expert that it chooses. A mapping may state less: a capacity per group
//! of tokens, bytes that may be rerouted beyond it, and that each rank of ep routes its own tokens. Which tokens are
//! dropped must not depend on the mesh, so all of this is stated here, before any rank is known: the tokens are padded
//! to equal groups, and lowering gives every rank whole groups.
//!
//! The part of a layer that changes is found from its ops: what lies between the rows that are packed and the weighted
//! sum. Everything there has one row per token and gets the padded rows; the sum loses them again.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Builder, Op, OpView, Opcode, Program, ValueId, views};

use crate::codes::T0606;
use crate::copy_op::copy_op;
use crate::mapping::ExpertMapping;

/// Bytes of a channel of a token, by which rerouted bytes are counted: the choice must not depend on the dtype policy.
const CHANNEL_BYTES: u64 = 4;

/// Begins the name of an output with the counts [experts, 4] of a layer; the layer follows.
pub const EXPERT_STATISTICS: &str = "experts.";

/// Rewrites the experts of a program, of which a layer has `experts`, for `groups` token groups; returns a copy of a program without experts.
///
/// # Errors
/// Returns T0606 if an op between the packed rows and the sum does not accept padded rows.
pub(crate) fn route_in_groups(
    p: &Program,
    mapping: &ExpertMapping,
    (experts, groups): (u64, u64),
) -> Result<Program, Diagnostics> {
    let defs = p.defining_ops();
    let layers: Vec<ExpertLayer> =
        (0..p.ops.len()).filter_map(|i| ExpertLayer::find(p, &defs, i, mapping, (experts, groups))).collect();
    if layers.is_empty() {
        return Ok(p.clone());
    }
    let mut pass = RoutingPass {
        program: p,
        layers,
        builder: Builder::new_logical(&p.name),
        values: BTreeMap::new(),
        statistics: Vec::new(),
    };
    for b in &p.buffers {
        pass.builder.declare_buffer(&b.name, b.ty.clone());
    }
    (0..p.ops.len()).for_each(|i| pass.emit_op(i));
    // The last stage returns everything: ranks with outputs return the same ones.
    for (name, value) in std::mem::take(&mut pass.statistics) {
        pass.builder.set_attr("at", "last");
        pass.builder.add_output(&name, value);
    }
    pass.builder.finish().map_err(|es| {
        let diagnostic = |message: String| {
            Diagnostic::error(&T0606, message)
                .with_label(format!("@{}", p.name), "this phase, with groups of tokens")
        };
        es.into_iter().map(|e| diagnostic(e.message).with_note(e.code.title)).collect()
    })
}

/// A layer of experts, and how its tokens find slots.
struct ExpertLayer {
    /// The rows that are packed, and routed.
    rows: ValueId,
    /// The choices before rerouting.
    choices: ValueId,
    /// Index of the op that adds the weighted results of a token's experts.
    sum: usize,
    /// Ops from the rows to the sum, the latter included.
    ops: BTreeSet<usize>,
    /// Places of experts: one for each, and one for each copy.
    places: u64,
    tokens: u64,
    group_tokens: u64,
    padded: u64,
    capacity: u64,
    /// Choices of a group that may move to another expert, if any may.
    reroutes: Option<u64>,
    statistics: bool,
}

impl ExpertLayer {
    /// Returns the layer whose weighted sum is op `sum`.
    fn find(
        p: &Program,
        defs: &[Option<usize>],
        sum: usize,
        mapping: &ExpertMapping,
        (experts, groups): (u64, u64),
    ) -> Option<ExpertLayer> {
        // A program that states groups of its own keeps them.
        let Ok(OpView::ExpertCombine(combine @ views::ExpertCombine { group_tokens: None, .. })) =
            p.ops[sum].view()
        else {
            return None;
        };
        let pack = p.ops.iter().find_map(|op| match op.view() {
            Ok(OpView::ExpertPack(v)) if v.slots == combine.slots => Some((v.x, v.groups)),
            Ok(OpView::ExpertPackFused(v)) if v.experts == combine.experts => Some((v.x, v.groups)),
            _ => None,
        });
        let (rows, places) = pack?;
        let (tokens, k) = (p.type_of(rows).shape[0], p.type_of(combine.experts).shape[1]);
        let group_tokens = tokens.div_ceil(groups).max(1);
        let share = |f: f64| (f * (group_tokens * k) as f64 / experts as f64).ceil().max(1.0);
        // No expert is chosen twice by a token, so more slots than tokens would stay empty.
        let capacity = mapping.capacity_factor.map_or(group_tokens, |f| (share(f) as u64).min(group_tokens));
        let reroutes = mapping.reroute_bytes / (p.type_of(rows).shape[1] * CHANNEL_BYTES);
        Some(ExpertLayer {
            rows,
            choices: combine.experts,
            sum,
            ops: with_distances(p, defs, ops_between(p, defs, rows, sum)),
            places,
            tokens,
            group_tokens,
            padded: group_tokens * groups,
            capacity,
            reroutes: (capacity < group_tokens && reroutes > 0).then_some(reroutes),
            statistics: mapping.statistics,
        })
    }
}

impl ExpertLayer {
    /// Sets the attributes that determine slots. `tells_padding` is for ops that give padding no slots.
    fn set_slot_attrs(&self, b: &mut Builder, tells_padding: bool) {
        b.set_attr("capacity", self.capacity).set_attr("group_tokens", self.group_tokens);
        if tells_padding && self.padded != self.tokens {
            b.set_attr("tokens", self.tokens);
        }
    }
}

/// Returns the ops that depend on a value and on which op `last` depends, `last` included.
fn ops_between(p: &Program, defs: &[Option<usize>], from: ValueId, last: usize) -> BTreeSet<usize> {
    let mut behind = BTreeSet::from([from]);
    let mut later = BTreeSet::new();
    for (i, op) in p.ops.iter().enumerate().take(last + 1) {
        if op.used_values().any(|v| behind.contains(&v)) {
            behind.extend(op.results.iter().copied());
            later.insert(i);
        }
    }
    let (mut out, mut pending) = (BTreeSet::new(), vec![last]);
    while let Some(i) = pending.pop() {
        if later.contains(&i) && out.insert(i) {
            pending.extend(p.ops[i].used_values().filter_map(|v| defs[v.0 as usize]));
        }
    }
    out
}

/// Adds the ops that measure distances from logits inside of a layer: they know the homes of tokens by padded rows.
fn with_distances(p: &Program, defs: &[Option<usize>], mut ops: BTreeSet<usize>) -> BTreeSet<usize> {
    let is_inside = |op: &Op| op.used_values().any(|v| defs[v.0 as usize].is_some_and(|d| ops.contains(&d)));
    let measures = |op: &Op| matches!(op.opcode, Opcode::ExpertDistance | Opcode::ExpertDistanceGradient);
    let more: Vec<usize> =
        (0..p.ops.len()).filter(|i| measures(&p.ops[*i]) && is_inside(&p.ops[*i])).collect();
    ops.extend(more);
    ops
}

struct RoutingPass<'a> {
    program: &'a Program,
    layers: Vec<ExpertLayer>,
    builder: Builder,
    /// The new counterpart of each value, by the index of the layer inside of which its rows are padded.
    values: BTreeMap<(Option<usize>, ValueId), ValueId>,
    /// Names and values of the counts that the program returns.
    statistics: Vec<(String, ValueId)>,
}

impl RoutingPass<'_> {
    fn emit_op(&mut self, i: usize) {
        let op = &self.program.ops[i];
        let inside = self.layers.iter().position(|l| l.ops.contains(&i));
        if let Some(at) = inside {
            self.pad_rows(at, op);
        }
        let made = match (inside, op.view()) {
            (Some(at), Ok(OpView::TopKExperts(v))) if op.results[0] == self.layers[at].choices => {
                self.emit_choice(at, op, &v)
            }
            _ => self.emit_copy(inside, op),
        };
        self.values.extend(op.results.iter().map(|r| (inside, *r)).zip(made));
        let Some(at) = inside else { return };
        if op.opcode == Opcode::ExpertSlots && self.layers[at].statistics {
            self.emit_statistics(at, op);
        }
        let layer = &self.layers[at];
        if i == layer.sum {
            let (sum, tokens) = (self.values[&(inside, op.results[0])], layer.tokens);
            let whole = match layer.padded == tokens {
                true => sum,
                false => {
                    self.builder.copy_attrs(op, &["at"]).set_attr("row", 0_u64).set_attr("rows", tokens);
                    self.builder.add_op(Opcode::TakeRows, &[sum])
                }
            };
            self.values.insert((None, op.results[0]), whole);
        }
    }

    /// Emits the padded rows of a layer before the first op that reads them.
    fn pad_rows(&mut self, at: usize, op: &Op) {
        let (rows, padded) = (self.layers[at].rows, self.layers[at].padded);
        if self.values.contains_key(&(Some(at), rows)) {
            return;
        }
        let x = self.value(None, rows);
        self.builder.copy_attrs(op, &["at"]).set_attr("rows", padded);
        let x = self.builder.add_op(Opcode::ExpertTokens, &[x]);
        self.values.insert((Some(at), rows), x);
    }

    /// Emits the choice of experts, and its rerouting. Statistics compare both.
    fn emit_choice(&mut self, at: usize, op: &Op, v: &views::TopKExperts) -> Vec<ValueId> {
        let made = self.emit_copy(Some(at), op);
        let layer = &self.layers[at];
        let Some(reroutes) = layer.reroutes else { return made };
        let logits = self.value(Some(at), v.logits);
        let keyed: Vec<(&'static str, ValueId)> =
            op.keyed.iter().map(|(key, value)| (*key, self.value(Some(at), *value))).collect();
        let b = &mut self.builder;
        // A token may only move to an expert of the groups that its gate keeps.
        b.set_attrs(op.attrs.clone()).set_attr("top_k", layer.places / v.groups * v.keep_groups);
        for (key, value) in keyed {
            b.add_keyed(key, value);
        }
        let ranking = b.add_op(Opcode::TopKExperts, &[logits]);
        b.copy_attrs(op, &["at", "top_k"]).set_attr("reroutes", reroutes);
        layer.set_slot_attrs(b, true);
        let moved = self.builder.add_op(Opcode::ExpertReroute, &[ranking]);
        // Slots are those of the experts to which tokens moved; only statistics know the first choice.
        self.values.insert((None, op.results[0]), made[0]);
        vec![moved]
    }

    fn emit_statistics(&mut self, at: usize, op: &Op) {
        let moved = self.value(Some(at), self.layers[at].choices);
        let first = self.values.get(&(None, self.layers[at].choices)).copied().unwrap_or(moved);
        let slots = self.values[&(Some(at), op.results[0])];
        let l = &self.layers[at];
        self.builder.copy_attrs(op, &["at"]).set_attr("groups", l.places);
        if l.padded != l.tokens {
            self.builder.set_attr("tokens", l.tokens);
        }
        let counts = self.builder.add_op(Opcode::ExpertStatistics, &[first, moved, slots]);
        let place = op.placement_hint().and_then(|at| at.strip_prefix("block."));
        let name = place.map_or_else(
            || format!("{EXPERT_STATISTICS}layer{at}"),
            |block| format!("{EXPERT_STATISTICS}{block}"),
        );
        self.statistics.push((name, counts));
    }

    /// Emits an op with the new counterparts of its operands, and inside of a layer with the attributes of its slots.
    fn emit_copy(&mut self, inside: Option<usize>, op: &Op) -> Vec<ValueId> {
        let set_attrs = |b: &mut Builder| match inside.map(|at| &self.layers[at]) {
            None => {}
            Some(layer) => match op.opcode {
                Opcode::ExpertSlots | Opcode::ExpertPackFused => layer.set_slot_attrs(b, true),
                Opcode::ExpertPack => layer.set_slot_attrs(b, false),
                Opcode::ExpertCounts | Opcode::ExpertCombine => {
                    b.set_attr("group_tokens", layer.group_tokens);
                }
                _ => {}
            },
        };
        let map = |v| find_value(&self.values, self.layers.len(), inside, v);
        copy_op(self.program, op, &mut self.builder, map, set_attrs)
    }

    fn value(&self, inside: Option<usize>, v: ValueId) -> ValueId {
        find_value(&self.values, self.layers.len(), inside, v)
    }
}

/// Returns the counterpart of a value for an op inside of a layer, or outside of all.
fn find_value(
    values: &BTreeMap<(Option<usize>, ValueId), ValueId>,
    layers: usize,
    inside: Option<usize>,
    v: ValueId,
) -> ValueId {
    let padded = inside.and_then(|at| values.get(&(Some(at), v)));
    // An output of what a router computes reads a value that exists inside of a layer alone.
    let elsewhere = || (0..layers).find_map(|at| values.get(&(Some(at), v)));
    padded.or_else(|| values.get(&(None, v))).or_else(elsewhere).copied().unwrap_or(v)
}
