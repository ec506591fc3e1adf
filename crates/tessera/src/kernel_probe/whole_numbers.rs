//! The operands of a probe that must be whole numbers within a limit, because they count or select something.

use std::collections::BTreeMap;

use tessera_ir::{Op, OpView, Program, ValueId};

/// Positions and keys have no limit of their own.
const ANY_POSITION: u64 = 64;
/// Choices of ids: 0 and 1 are legal for every one of them.
const ANY_CHOICE: u64 = 2;

/// Returns the number of values that each source of whole numbers may have, by the name of the source.
pub(super) fn find_limits(program: &Program) -> BTreeMap<&str, u64> {
    let defined = program.defining_ops();
    let mut limits = BTreeMap::new();
    for (value, limit) in program.ops.iter().flat_map(|op| limits_of_op(program, op)) {
        let source = defined[value.0 as usize].map(|i| &program.ops[i]);
        if let Some(name) = source.and_then(|op| op.name.as_deref()) {
            limits.insert(name, limit.max(1));
        }
    }
    limits
}

/// Lists the operands of an op that are whole numbers, with the number of values that each may have.
fn limits_of_op(p: &Program, op: &Op) -> Vec<(ValueId, u64)> {
    let extent = |v: ValueId, dim: usize| p.type_of(v).shape.get(dim).copied().unwrap_or(1);
    match op.view() {
        Ok(OpView::Embed(v)) => vec![(v.ids, extent(v.table, 0))],
        Ok(OpView::Rotary(v)) => vec![(v.start, ANY_POSITION)],
        // Every sequence begins at position 0, so that its rows lie within its pages.
        Ok(OpView::PagedAttention(v)) => vec![(v.pages, extent(v.k, 0) / v.page_rows), (v.start, 1)],
        Ok(OpView::Sample(v)) => {
            [v.draw, v.seed, v.temperature, v.top_k, v.top_p].map(|key| (key, ANY_CHOICE)).to_vec()
        }
        // Every row brings a token unless both numbers say otherwise.
        Ok(OpView::TopKExperts(v)) => {
            let rows = extent(v.logits, 0);
            [v.start.map(|start| (start, ANY_POSITION)), v.last.map(|last| (last, rows))]
                .into_iter()
                .flatten()
                .collect()
        }
        Ok(OpView::ExpertWeights(v)) => vec![(v.experts, extent(v.logits, 1))],
        Ok(OpView::ExpertGates(v)) => vec![(v.experts, extent(v.gates, 1))],
        Ok(OpView::ExpertReroute(v)) => vec![(v.ranking, extent(v.ranking, 1))],
        Ok(OpView::ExpertDraw(v)) => v.start.map(|start| (start, ANY_POSITION)).into_iter().collect(),
        Ok(OpView::ExpertStatistics(v)) => {
            vec![(v.choices, v.groups), (v.experts, v.groups), (v.slots, ANY_CHOICE)]
        }
        Ok(OpView::ExpertPackFused(v)) => vec![(v.experts, v.groups)],
        Ok(OpView::ExpertPlaces(v)) => {
            let start = v.start.map(|start| (start, ANY_POSITION));
            let experts = v.residents.iter().max().map_or(1, |last| last + 1);
            [(v.experts, experts)].into_iter().chain(start).collect()
        }
        Ok(OpView::ExpertSlots(v)) => vec![(v.experts, v.capacity)],
        Ok(OpView::ExpertCounts(v)) => vec![(v.experts, v.groups), (v.slots, ANY_CHOICE)],
        Ok(OpView::GroupedMatmul(v)) => {
            let counts = p.type_of(v.counts).element_count();
            let slots = extent(v.x, 1) / extent(v.counts, 1);
            vec![(v.counts, slots.min(v.rows / counts) + 1)]
        }
        Ok(OpView::ExpertCombine(v)) => {
            let token_groups = v.group_tokens.map_or(1, |n| extent(v.experts, 0).div_ceil(n));
            vec![(v.experts, extent(v.y, 0)), (v.slots, extent(v.y, 1) / token_groups)]
        }
        _ => Vec::new(),
    }
}
