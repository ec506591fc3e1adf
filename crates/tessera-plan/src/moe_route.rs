//! Spells out `moe_route` as the ops of which it consists, before a program is sharded: the choice of experts, slots,
//! packed rows, a matmul per expert, and the weighted sum.
//!
//! Lowering then treats it as the experts of any model. What the op says about communication is a condition on the
//! mapping: tokens travel over `a2a_axis` where `[experts]` shards them, and as 8 bits where `wire` allows it.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Builder, Op, OpView, Opcode, Program, ValueId, views};

use crate::codes::{T0606, T0611};
use crate::copy_op::copy_op;
use crate::mapping::{Mapping, TokenPlacement, TokenWire};

/// Replaces every `moe_route` of a program; returns a copy of a program without one.
///
/// # Errors
/// Returns T0606 for another axis than ep, or T0611 if op and mapping disagree on the form in which tokens travel.
pub(crate) fn spell_out_routes(p: &Program, mapping: &Mapping) -> Result<Program, Diagnostics> {
    if p.ops.iter().all(|op| op.opcode != Opcode::MoeRoute) {
        return Ok(p.clone());
    }
    let mut b = Builder::new_logical(&p.name);
    let mut values: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut ds = Vec::new();
    for buffer in &p.buffers {
        b.declare_buffer(&buffer.name, buffer.ty.clone());
    }
    for op in &p.ops {
        let map = |v: ValueId| values.get(&v).copied().unwrap_or(v);
        let made = match op.view() {
            Ok(OpView::MoeRoute(v)) => {
                ds.extend(check_route(p, &v, mapping));
                emit_route(p, op, &v, &mut b, map)
            }
            Err(e) if op.opcode == Opcode::MoeRoute => {
                ds.push(
                    Diagnostic::error(&T0606, e.to_string()).with_label(format!("@{}", p.name), "this phase"),
                );
                Vec::new()
            }
            _ => copy_op(p, op, &mut b, map, |_| ()),
        };
        values.extend(op.results.iter().copied().zip(made));
    }
    if !ds.is_empty() {
        return Err(ds);
    }
    b.finish().map_err(|es| {
        let diagnostic =
            |e: &str| Diagnostic::error(&T0606, e).with_label(format!("@{}", p.name), "this phase");
        es.into_iter().map(|e| diagnostic(&e.message).with_note(e.code.title)).collect()
    })
}

fn check_route(p: &Program, v: &views::MoeRoute, mapping: &Mapping) -> Option<Diagnostic> {
    let axis = mapping.experts.axis.mesh_axis();
    if v.a2a_axis != axis {
        let message = format!("moe_route over {}: tokens travel to experts over {axis}", v.a2a_axis);
        return Some(
            Diagnostic::error(&T0606, message)
                .with_label(format!("@{}", p.name), "this phase")
                .with_hint(format!("state a2a_axis = \"{axis}\", or experts.axis in the mapping")),
        );
    }
    let ranks = mapping.expert_ranks();
    let is_sharded = mapping.experts.tokens == TokenPlacement::Sharded && v.token_groups > 1;
    if is_sharded && !v.token_groups.is_multiple_of(u64::from(ranks)) {
        let message = format!(
            "moe_route with token_groups = {}, which {axis} = {ranks} does not divide",
            v.token_groups
        );
        return Some(
            Diagnostic::error(&T0611, message)
                .with_label(format!("@{}", p.name), "this phase")
                .with_hint("state a multiple of the ranks, or tokens = \"replicated\""),
        );
    }
    let wire = if v.quantize_fp8 { TokenWire::Fp8 } else { TokenWire::F32 };
    if wire == mapping.experts.wire {
        return None;
    }
    let message = format!(
        "moe_route with quantize_fp8 = {}, but experts.wire = \"{}\"",
        v.quantize_fp8,
        mapping.experts.wire.name()
    );
    Some(
        Diagnostic::error(&T0611, message)
            .with_label(format!("@{}", p.name), "this phase")
            .with_hint(format!("state experts.wire = \"{}\", or change the op", wire.name())),
    )
}

fn emit_route(
    p: &Program,
    op: &Op,
    v: &views::MoeRoute,
    b: &mut Builder,
    map: impl Fn(ValueId) -> ValueId,
) -> Vec<ValueId> {
    let (Some(bank), &[tokens, experts]) = (op.buffer, &p.type_of(v.gates).shape[..]) else {
        return Vec::new();
    };
    let groups = v.token_groups;
    let group_tokens = tokens.div_ceil(groups).max(1);
    let capacity = v.capacity(tokens, experts);
    let padded = group_tokens * groups;
    let mut emit = |opcode: Opcode, operands: &[ValueId], attrs: &[(&str, u64)]| {
        b.copy_attrs(op, &["at"]);
        attrs.iter().for_each(|(name, n)| {
            b.set_attr(name, *n);
        });
        b.add_op(opcode, operands)
    };
    let mut slot_attrs = vec![("capacity", capacity)];
    let mut group_attrs = Vec::new();
    let [mut x, mut gates] = [map(v.x), map(v.gates)];
    if groups > 1 {
        // Groups that are no more than one token still name their size, and so may be sharded.
        [x, gates] = [x, gates].map(|value| emit(Opcode::ExpertTokens, &[value], &[("rows", padded)]));
        group_attrs.push(("group_tokens", group_tokens));
    }
    slot_attrs.extend(&group_attrs);
    let padding = if padded == tokens { vec![] } else { vec![("tokens", tokens)] };
    let with = |a: &[(&'static str, u64)], more: &[(&'static str, u64)]| [a, more].concat();
    let of_experts = [("groups", experts)];
    let chosen = emit(Opcode::TopKExperts, &[gates], &[("top_k", v.top_k)]);
    let weights = emit(Opcode::ExpertGates, &[gates, chosen], &[]);
    let slots = emit(Opcode::ExpertSlots, &[chosen], &with(&slot_attrs, &padding));
    let counts = emit(Opcode::ExpertCounts, &[chosen, slots], &with(&group_attrs, &of_experts));
    let pack_attrs = with(&slot_attrs, &of_experts);
    let rows = match v.pack_fused {
        true => emit(Opcode::ExpertPackFused, &[x, chosen], &with(&pack_attrs, &padding)),
        false => emit(Opcode::ExpertPack, &[x, chosen, slots], &pack_attrs),
    };
    let most = (tokens * v.top_k).min(experts * capacity * groups);
    b.copy_attrs(op, &["at"]);
    let bank = b.read_buffer(bank);
    let mut emit = |opcode: Opcode, operands: &[ValueId], attrs: &[(&str, u64)]| {
        b.copy_attrs(op, &["at"]);
        attrs.iter().for_each(|(name, n)| {
            b.set_attr(name, *n);
        });
        b.add_op(opcode, operands)
    };
    let y = emit(Opcode::GroupedMatmul, &[rows, bank, counts], &[("rows", most)]);
    let sum = emit(Opcode::ExpertCombine, &[y, chosen, slots, weights], &group_attrs);
    match padded == tokens {
        true => vec![sum],
        false => vec![emit(Opcode::TakeRows, &[sum], &[("row", 0), ("rows", tokens)])],
    }
}
