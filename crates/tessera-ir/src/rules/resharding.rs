//! Rules of the ops that shard, pad and exchange tensors.

use tessera_mesh::{AxisLayout, Group, Layout, Shard};

use super::{
    AxisGroups, RuleContext, RuleResult, largest_shard, multiply_extents, role_shard_len, rule_error,
};
use crate::codes::{T0210, T0211, T0212, T0213};
use crate::{DType, Type, views};

/// Rows of a halo that each member holds: one above its shard and one below.
pub(super) const HALO_ROWS: u64 = 2;

/// Returns the layout of the halo of frames with this shard of rows.
pub(super) fn halo_layout(rows: Shard) -> AxisLayout {
    AxisLayout::Shard(Shard { uneven: None, ..rows })
}

impl RuleContext<'_> {
    pub(super) fn take_shard_type(&self, v: &views::TakeShard) -> RuleResult<Type> {
        let (over, dim) = (self.axis_groups()?, v.dim);
        self.check_dim(dim)?;
        if self.operands[0].layout.on_axis(over.axis) != AxisLayout::Replicated {
            return rule_error(&T0212, format!("take_shard over {over} of {}", self.display_operand(0)));
        }
        self.sharded_type(self.operands[0].shape.clone(), self.operands[0].layout, over, dim, v.unit)
    }

    /// Returns the type of this role's shard after dim `dim` of a tensor with these extents is
    /// sharded over the groups of the op. For uneven shards, see [`role_shard_len`].
    fn sharded_type(
        &self,
        mut shape: Vec<u64>,
        layout: Layout,
        AxisGroups { axis, subgroup_size, group_size: parts }: AxisGroups,
        dim: usize,
        unit: u64,
    ) -> RuleResult<Type> {
        let Some(shard) = Shard::new(dim, shape[dim], unit, parts) else {
            return rule_error(
                &T0210,
                format!(
                    "dim {dim} of extent {} cannot be sharded in units of {unit} over {parts} ranks",
                    shape[dim]
                ),
            );
        };
        shape[dim] = match shard.uneven {
            None => shape[dim] / u64::from(parts),
            Some(u) => role_shard_len(self.program, axis, u, subgroup_size),
        };
        // On an axis with one rank, the shard is the whole value.
        let on = if parts == 1 {
            AxisLayout::Replicated
        } else {
            AxisLayout::Shard(shard.with_subgroup_size(subgroup_size))
        };
        Ok(self.type_like_first(shape, layout.with_axis(axis, on)))
    }

    pub(super) fn pad_type(&self, v: &views::Pad) -> RuleResult<Type> {
        let (over, dim, rows) = (self.axis_groups()?, v.dim, v.rows);
        self.check_dim(dim)?;
        let mut t = self.operands[0].clone();
        match t.layout.on_axis(over.axis) {
            AxisLayout::Shard(Shard { dim: d, uneven: Some(u), subgroup_size })
                if d == dim
                    && subgroup_size == over.subgroup_size
                    && rows == largest_shard(u, over.group_size) =>
            {
                t.shape[dim] = rows;
                t.layout = t
                    .layout
                    .with_axis(over.axis, AxisLayout::Shard(Shard { dim, uneven: None, subgroup_size }));
                Ok(t)
            }
            _ => rule_error(&T0212, format!("pad over {over} to {rows} rows of {}", self.display_operand(0))),
        }
    }

    pub(super) fn compact_type(&self, v: &views::Compact) -> RuleResult<Type> {
        let &views::Compact { extent, parts, unit, .. } = v;
        let dim = usize::try_from(v.dim).unwrap_or(usize::MAX);
        let mut t = self.operands[0].clone();
        let each = multiply_extents(&[(extent / unit).div_ceil(parts), unit])?;
        if t.shape.get(dim) != Some(&multiply_extents(&[each, parts])?)
            || !extent.is_multiple_of(unit)
            || extent / unit < parts
        {
            return rule_error(
                &T0210,
                format!(
                    "{} does not consist of {parts} shards of {each} rows for {extent} rows in units of {unit}",
                    self.display_operand(0)
                ),
            );
        }
        if let Some(axis) = self.axis_that_shards(&t.layout, dim) {
            return rule_error(
                &T0213,
                format!("the rows to compact are sharded over {axis}: {}", self.display_operand(0)),
            );
        }
        t.shape[dim] = extent;
        Ok(t)
    }

    /// Reports a layout that the op does not support, and any difference between the subgroups of
    /// the layout and of the op.
    fn layout_mismatch<T>(&self, what: &str, over: AxisGroups, have: AxisLayout) -> RuleResult<T> {
        let blocks = match (over.subgroup_size, have.subgroup_size()) {
            (a, b) if a == b || have == AxisLayout::Replicated => "",
            (None, _) => ": the layout applies to subgroups of the axis, the op to the whole axis",
            (Some(_), None) => ": the op applies to subgroups of the axis, the layout to the whole axis",
            (Some(_), Some(_)) => ": the subgroup sizes differ",
        };
        rule_error(&T0212, format!("{what} over {over} of a value that is {have}{blocks}"))
    }

    pub(super) fn all_reduce_type(&self, v: &views::AllReduce) -> RuleResult<Type> {
        let (group, want) = (self.comm_group()?, v.reduction);
        if group == Group::World {
            return self.all_reduce_world_type(AxisLayout::new_partial(want));
        }
        let over = self.axis_groups()?;
        match self.operands[0].layout.on_axis(over.axis) {
            AxisLayout::Partial { reduction, subgroup_size }
                if reduction == want && subgroup_size == over.subgroup_size =>
            {
                let layout = self.operands[0].layout.with_axis(over.axis, AxisLayout::Replicated);
                Ok(Type { layout, ..self.operands[0].clone() })
            }
            have => self.layout_mismatch(&format!("all_reduce({})", want.name()), over, have),
        }
    }

    /// Infers the type of an all_reduce over the world. All ranks must hold terms of one value: it
    /// is partial on every axis, and there are no ranks outside the mesh.
    fn all_reduce_world_type(&self, want: AxisLayout) -> RuleResult<Type> {
        let outside = self.mesh.outside_count();
        if outside > 0 {
            let why = format!("all_reduce over world: its ranks outside the mesh ({outside}) hold no term");
            return rule_error(&T0212, why);
        }
        let layout = self.operands[0].layout;
        match self.mesh.active_axes().find(|a| layout.on_axis(*a) != want) {
            Some(axis) => {
                let have = layout.on_axis(axis);
                rule_error(
                    &T0212,
                    format!("all_reduce over world of a value that is {have} on {axis}, not {want}"),
                )
            }
            None if self.mesh.world_size() == 1 => rule_error(&T0212, "all_reduce over a world of one rank"),
            None => Ok(Type { layout: Layout::REPLICATED, ..self.operands[0].clone() }),
        }
    }

    pub(super) fn all_gather_type(&self, v: &views::AllGather) -> RuleResult<Type> {
        let (over, dim) = (self.axis_groups()?, v.dim);
        self.check_dim(dim)?;
        let t = self.operands[0];
        match t.layout.on_axis(over.axis) {
            AxisLayout::Shard(Shard { dim: d, uneven: None, subgroup_size })
                if d == dim && subgroup_size == over.subgroup_size =>
            {
                let mut out = t.clone();
                out.shape[dim] *= u64::from(over.group_size);
                out.layout = out.layout.with_axis(over.axis, AxisLayout::Replicated);
                Ok(out)
            }
            AxisLayout::Shard(Shard { uneven: Some(_), .. }) => rule_error(
                &T0212,
                format!("all_gather of uneven shards {}; pad them first", self.display_operand(0)),
            ),
            have => self.layout_mismatch(&format!("all_gather of dim {dim}"), over, have),
        }
    }

    pub(super) fn reduce_scatter_type(&self, v: &views::ReduceScatter) -> RuleResult<Type> {
        let (over, dim, want) = (self.axis_groups()?, v.dim, v.reduction);
        self.check_dim(dim)?;
        match self.operands[0].layout.on_axis(over.axis) {
            AxisLayout::Partial { reduction, subgroup_size }
                if reduction == want && subgroup_size == over.subgroup_size =>
            {
                if !self.operands[0].shape[dim].is_multiple_of(u64::from(over.group_size)) {
                    let shown = self.display_operand(0);
                    return rule_error(
                        &T0210,
                        format!("dim {dim} of {shown} is not divisible by {} ranks", over.group_size),
                    );
                }
                self.sharded_type(self.operands[0].shape.clone(), self.operands[0].layout, over, dim, 1)
            }
            have => self.layout_mismatch(&format!("reduce_scatter({})", want.name()), over, have),
        }
    }

    pub(super) fn halo_exchange_type(&self) -> RuleResult<Type> {
        let over = self.axis_groups()?;
        let [t, _, w, c] = self.frame_shape(0)?;
        match self.operands[0].layout.on_axis(over.axis) {
            AxisLayout::Shard(s) if s.dim == 1 && s.subgroup_size == over.subgroup_size => {
                let layout = self.operands[0].layout.with_axis(over.axis, halo_layout(s));
                Ok(self.type_like_first([t, HALO_ROWS, w, c], layout))
            }
            have => self.layout_mismatch("halo_exchange of rows", over, have),
        }
    }

    pub(super) fn all_to_all_type(&self, v: &views::AllToAll) -> RuleResult<Type> {
        let (over, split, concat) = (self.axis_groups()?, v.split, v.concat);
        self.check_dim(split)?;
        self.check_dim(concat)?;
        let t = self.operands[0];
        if let (Some(wire), Some((axis, r))) = (v.wire, t.layout.partial_axis()) {
            return rule_error(
                &T0211,
                format!("{} on the wire of terms that are partial({}) over {axis}", wire.name(), r.name()),
            );
        }
        // A narrower row would have more words on the wire than elements.
        let is_narrow = t.shape.last().is_none_or(|n| *n < 4);
        if v.wire.is_some()
            && (is_narrow
                || t.dtype != DType::F32
                || split + 1 == t.shape.len()
                || concat + 1 == t.shape.len())
        {
            return rule_error(
                &T0210,
                format!(
                    "e4m3 on the wire of {}: expected f32 with whole rows of four elements or more",
                    self.display_operand(0)
                ),
            );
        }
        match t.layout.on_axis(over.axis) {
            AxisLayout::Shard(s)
                if s.dim == concat && split != concat && s.subgroup_size == over.subgroup_size =>
            {
                let mut shape = t.shape.clone();
                shape[concat] = s.global_extent(shape[concat], self.mesh.axis_size(over.axis));
                let layout = t.layout.with_axis(over.axis, AxisLayout::Replicated);
                self.sharded_type(shape, layout, over, split, v.unit)
            }
            have => self.layout_mismatch(&format!("all_to_all of concat {concat}"), over, have),
        }
    }
}
