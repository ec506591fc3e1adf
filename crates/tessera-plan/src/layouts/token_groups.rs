//! Lets each rank route its own tokens to experts: a transformation of a program whose tokens are sharded where they choose
//! experts.
//!
//! The slots of an expert go to tokens in their order, so one group of all tokens needs all of them on every rank. Here the
//! tokens of a rank become a group with slots of its own, ⌈slots / ranks⌉ of those that all tokens had. The packed rows are then
//! sharded by groups, and where the experts are sharded over the same axis, the planner finds by itself that an all-to-all
//! brings them there and another one back.
//!
//! Shards of tokens that are not equal stay one group: their tokens are gathered. So do those of a program whose bits may not
//! depend on the mesh, because groups decide which tokens find no slot.

use std::borrow::Cow;
use std::collections::BTreeMap;

use tessera_base::Diagnostics;
use tessera_ir::{Builder, OpView, Program, ValueId};
use tessera_mesh::{AxisLayout, Mesh, Shard};

use super::steps::{LayoutPlan, plan_steps};
use super::{LaidOutProgram, rule_diagnostic};
use crate::copy_op::copy_op;
use crate::mapping::Numerics;

/// Gives the sharded tokens of a program groups of their own; returns a program without such tokens as it is.
///
/// # Errors
/// What [`plan_steps`] finds, or the broken rule of an op that does not take groups.
pub(super) fn group_sharded_tokens<'a>(
    laid_out: &'a LaidOutProgram,
    mesh: &Mesh,
    numerics: Numerics,
) -> Result<Cow<'a, LaidOutProgram>, Diagnostics> {
    let p = &laid_out.program;
    let chooses_experts =
        p.ops.iter().any(|op| matches!(op.view(), Ok(OpView::ExpertSlots(v)) if v.group_tokens.is_none()));
    if !chooses_experts || numerics == Numerics::MeshInvariant {
        return Ok(Cow::Borrowed(laid_out));
    }
    let groups = find_groups(p, mesh, &plan_steps(laid_out, mesh, numerics)?);
    if groups.is_empty() {
        return Ok(Cow::Borrowed(laid_out));
    }
    let mut builder = Builder::new_logical(&p.name);
    let mut values: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for op in &p.ops {
        let attrs =
            op.view().map_or(Vec::new(), |view| attrs_of_groups(p, &view, op.results.first(), &groups));
        let map = |v: ValueId| values.get(&v).copied().unwrap_or(v);
        let made = copy_op(p, op, &mut builder, map, |b| {
            attrs.iter().for_each(|(name, n)| {
                b.set_attr(name, *n);
            });
        });
        values.extend(op.results.iter().copied().zip(made));
    }
    let program = builder
        .finish()
        .map_err(|es| es.iter().map(|e| rule_diagnostic(&p.name, e)).collect::<Diagnostics>())?;
    let stated = laid_out.values.iter().filter_map(|(v, layout)| Some((*values.get(v)?, *layout)));
    Ok(Cow::Owned(LaidOutProgram { program, values: stated.collect(), ..laid_out.clone() }))
}

/// The groups of a layer's tokens.
struct TokenGroups {
    count: u64,
    tokens: u64,
    /// Slots of an expert for each group.
    capacity: u64,
}

/// Finds the slots of choices whose rows a layout plan shards equally, and the groups of their tokens.
fn find_groups(p: &Program, mesh: &Mesh, plan: &LayoutPlan) -> BTreeMap<ValueId, TokenGroups> {
    let mut groups = BTreeMap::new();
    for op in &p.ops {
        let (Ok(OpView::ExpertSlots(v)), Some(slots)) = (op.view(), op.results.first()) else { continue };
        let layout = plan.first_layout(v.experts);
        let parts = mesh.active_axes().find_map(|axis| match layout.on_axis(axis) {
            AxisLayout::Shard(shard @ Shard { dim: 0, uneven: None, .. }) => {
                Some(u64::from(shard.part_count(mesh.axis_size(axis))))
            }
            _ => None,
        });
        let (Some(count), None) = (parts, v.group_tokens) else { continue };
        let tokens = p.type_of(v.experts).shape[0] / count.max(1);
        let capacity = v.capacity.div_ceil(count.max(1)).min(tokens).max(1);
        groups.insert(*slots, TokenGroups { count, tokens, capacity });
    }
    groups
}

/// Returns the attributes by which an op knows of groups; none for an op that reads no slots of them.
fn attrs_of_groups(
    p: &Program,
    view: &OpView,
    result: Option<&ValueId>,
    groups: &BTreeMap<ValueId, TokenGroups>,
) -> Vec<(&'static str, u64)> {
    let of = |slots: Option<&ValueId>| slots.and_then(|slots| groups.get(slots));
    let found = match view {
        OpView::ExpertSlots(_) => {
            of(result).map(|group| vec![("group_tokens", group.tokens), ("capacity", group.capacity)])
        }
        OpView::ExpertPack(v) => {
            of(Some(&v.slots)).map(|group| vec![("group_tokens", group.tokens), ("capacity", group.capacity)])
        }
        OpView::ExpertCounts(v) => of(Some(&v.slots)).map(|group| vec![("group_tokens", group.tokens)]),
        OpView::ExpertCombine(v) => of(Some(&v.slots)).map(|group| vec![("group_tokens", group.tokens)]),
        OpView::GroupedMatmul(v) => {
            let counts =
                p.ops.iter().find(|op| op.results.first() == Some(&v.counts)).map(tessera_ir::Op::view);
            match counts {
                Some(Ok(OpView::ExpertCounts(counts))) => of(Some(&counts.slots)).map(|group| {
                    let choices = p.type_of(counts.experts).shape.iter().product::<u64>();
                    let slots = counts.groups.saturating_mul(group.count).saturating_mul(group.capacity);
                    vec![("rows", choices.min(slots))]
                }),
                _ => None,
            }
        }
        _ => None,
    };
    found.unwrap_or_default()
}
