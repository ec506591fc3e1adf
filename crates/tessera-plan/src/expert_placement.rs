//! Gives experts the places that a mapping states: a transformation of a logical program before it is sharded.
//!
//! Without it, place and expert are one: rank 0 has the first experts. With choices that were counted in a run, every
//! layer has its own order of experts, and hot ones have several places. The router still chooses experts; an op behind
//! it turns the choice into a place, and slots, packed rows and matrices belong to places. Results are added in the
//! order of experts, so a plan without capacities has the bits of one without copies.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Builder, ExpertTensorNames, Op, OpView, Opcode, Program, ValueId, name_experts};

use crate::Mapping;
use crate::codes::T0611;
use crate::copy_op::copy_op;
use crate::router_features::{sequence_starts, to_integers};

/// Rewrites the experts of a program for the places of a mapping.
///
/// # Errors
/// T0611 if the choices were not read, if they count another number of experts, or if a layer has no weights that can be
/// copied.
pub(crate) fn place_experts(p: &Program, mapping: &Mapping, experts: u64) -> Result<Program, Diagnostics> {
    let layers = layers_of_weights(p);
    let refused = check_choices(p, mapping, experts, &layers);
    if !refused.is_empty() {
        return Err(refused);
    }
    let mut pass = PlacementPass {
        program: p,
        mapping,
        experts,
        layers,
        builder: Builder::new_logical(&p.name),
        values: BTreeMap::new(),
        places: BTreeMap::new(),
    };
    for b in &p.buffers {
        pass.builder.declare_buffer(&b.name, b.ty.clone());
    }
    p.ops.iter().for_each(|op| pass.emit_op(op));
    pass.builder.finish().map_err(|es| {
        let diagnostic = |message: String| {
            Diagnostic::error(&T0611, message).with_label(format!("@{}", p.name), "this phase, with places")
        };
        es.into_iter().map(|e| diagnostic(e.message).with_note(e.code.title)).collect()
    })
}

/// Returns the layer of each weight that holds the matrices of experts.
fn layers_of_weights(p: &Program) -> BTreeMap<ValueId, u64> {
    let layer = |op: &Op| match op.view() {
        Ok(OpView::GroupedMatmul(v)) => Some((v.w, layer_of(op)?)),
        _ => None,
    };
    p.ops.iter().filter_map(layer).collect()
}

/// Returns the number of the layer to which an op belongs.
fn layer_of(op: &Op) -> Option<u64> {
    op.placement_hint()?.strip_prefix("block.")?.parse().ok()
}

fn check_choices(
    p: &Program,
    mapping: &Mapping,
    experts: u64,
    layers: &BTreeMap<ValueId, u64>,
) -> Diagnostics {
    let copies = &mapping.experts.copies;
    let mut ds = Vec::new();
    let mut refuse = |message: String, hint: &str| {
        ds.push(
            Diagnostic::error(&T0611, message)
                .with_label(format!("@{}", p.name), "this phase")
                .with_hint(hint),
        );
    };
    if let Some(file) = &copies.choices_file {
        refuse(format!("experts.choices_file = {file:?} was not read"), "state the numbers as `choices`");
    }
    let used: BTreeSet<u64> = layers.values().copied().collect();
    // Every phase of a model has all of its layers; a program without experts has none.
    if let Some(layer) = copies.choices.keys().find(|layer| !used.is_empty() && !used.contains(layer)) {
        refuse(
            format!("experts.choices count layer {layer}, which has no experts"),
            "use the choices of a run of the same model; layers are numbered from 0",
        );
    }
    let wrong = copies.choices.iter().find(|(_, chosen)| chosen.len() as u64 != experts);
    if let Some((layer, chosen)) = wrong {
        refuse(
            format!("experts.choices of layer {layer} count {} experts of {experts}", chosen.len()),
            "use the choices of a run of the same model",
        );
    }
    if copies.replicas > experts {
        refuse(
            format!("experts.replicas = {} of {experts} experts", copies.replicas),
            "use at most as many copies as experts",
        );
    }
    let is_stored = |v: &ValueId| {
        let named = |op: &Op| op.name.as_deref().is_some_and(|n| ExpertTensorNames::parse(n).is_some());
        p.ops.iter().any(|op| op.opcode == Opcode::Weight && op.results.contains(v) && named(op))
    };
    let matmuls = p.ops.iter().filter(|op| op.opcode == Opcode::GroupedMatmul);
    if matmuls.clone().any(|op| layer_of(op).is_none() || !is_stored(&op.operands[1])) {
        refuse(
            "the matrices of the experts are no weights of single experts, so they cannot be copied"
                .to_string(),
            "leave out `replicas`, `choices` and `choices_file`",
        );
    }
    ds
}

struct PlacementPass<'a> {
    program: &'a Program,
    mapping: &'a Mapping,
    experts: u64,
    /// The layer of each weight of experts.
    layers: BTreeMap<ValueId, u64>,
    builder: Builder,
    values: BTreeMap<ValueId, ValueId>,
    /// For choices of experts, their places.
    places: BTreeMap<ValueId, ValueId>,
}

impl PlacementPass<'_> {
    fn emit_op(&mut self, op: &Op) {
        let made = match op.view() {
            Ok(OpView::Weight(_)) if self.layers.contains_key(&op.results[0]) => self.emit_weight(op),
            Ok(OpView::ExpertSlots(v)) => self.emit_on_places(op, v.experts),
            Ok(OpView::ExpertCounts(v)) => self.emit_on_places(op, v.experts),
            Ok(OpView::ExpertPack(v)) => self.emit_on_places(op, v.experts),
            Ok(OpView::ExpertPackFused(v)) => self.emit_on_places(op, v.experts),
            Ok(OpView::ExpertCombine(v)) => self.emit_on_places(op, v.experts),
            _ => {
                let map = |v| find_value(&self.values, v);
                copy_op(self.program, op, &mut self.builder, map, |_| ())
            }
        };
        self.values.extend(op.results.iter().copied().zip(made));
    }

    /// Returns the expert in each place of a layer. `place_experts` runs only if the mapping states choices.
    fn list_residents(&self, layer: u64) -> Vec<u64> {
        self.mapping.list_residents(layer, self.experts).unwrap_or_default()
    }

    /// Emits the weight with a matrix for each place.
    fn emit_weight(&mut self, op: &Op) -> Vec<ValueId> {
        let residents = self.list_residents(self.layers[&op.results[0]]);
        let name = name_experts(op.name.as_deref().unwrap_or_default(), &residents);
        let mut ty = self.program.type_of(op.results[0]).clone();
        ty.shape[0] = residents.len() as u64;
        self.builder.set_attrs(op.attrs.clone());
        self.builder.set_label(&self.program.value(op.results[0]).name);
        vec![self.builder.add_weight(&name, ty)]
    }

    /// Emits an op with the places of choices instead of the experts.
    fn emit_on_places(&mut self, op: &Op, choices: ValueId) -> Vec<ValueId> {
        let places = self.places_of(op, choices);
        let chosen = find_value(&self.values, choices);
        let count = self.mapping.expert_places(self.experts);
        let values = &self.values;
        let map = |v| if v == choices { places } else { find_value(values, v) };
        copy_op(self.program, op, &mut self.builder, map, |b| match op.opcode {
            Opcode::ExpertCounts | Opcode::ExpertPack | Opcode::ExpertPackFused => {
                b.set_attr("groups", count);
            }
            Opcode::ExpertCombine => {
                b.add_keyed("order", chosen);
            }
            _ => {}
        })
    }

    /// Returns the places of choices, which the first op that needs them emits.
    fn places_of(&mut self, op: &Op, choices: ValueId) -> ValueId {
        if let Some(places) = self.places.get(&choices) {
            return *places;
        }
        let residents = layer_of(op).map(|layer| self.list_residents(layer)).unwrap_or_default();
        let chosen = find_value(&self.values, choices);
        // In a decoding step a text has one row, so its position decides which copy it goes to.
        if let Some(start) = sequence_starts(self.program) {
            self.builder.add_keyed("start", find_value(&self.values, start));
        }
        self.builder.copy_attrs(op, &["at"]).set_attr("residents", to_integers(&residents));
        self.builder.set_attr("tokens", self.program.type_of(choices).shape[0]);
        let places = self.builder.add_op(Opcode::ExpertPlaces, &[chosen]);
        self.places.insert(choices, places);
        places
    }
}

fn find_value(values: &BTreeMap<ValueId, ValueId>, v: ValueId) -> ValueId {
    values.get(&v).copied().unwrap_or(v)
}
