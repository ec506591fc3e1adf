//! Rules of the ops that cut, pad and exchange pieces.

use tessera_mesh::{Axis, AxisLayout, Layout, Shard};

use super::{Cx, Rule, T0210, T0212, T0213, T0215, product, refuse, role_piece, widest};
use crate::Type;

impl Cx<'_> {
    pub(super) fn take_shard(&self) -> Rule<Type> {
        let (axis, dim) = (self.axis()?, self.tensor_dim("dim")?);
        if self.x[0].layout.on(axis) != AxisLayout::Replicated {
            return refuse(&T0212, format!("take_shard of {}", self.show(0)));
        }
        self.sharded(self.x[0].shape.clone(), self.x[0].layout, axis, dim, self.unit()?)
    }

    /// The type after dim `dim` of a tensor with these extents was cut over `axis`. The piece is this role's:
    /// for uneven shards the role's declared result tells which, see [`role_piece`].
    pub(super) fn sharded(
        &self,
        mut shape: Vec<u64>,
        layout: Layout,
        axis: Axis,
        dim: usize,
        unit: u64,
    ) -> Rule<Type> {
        let parts = self.mesh.size(axis);
        let Some(shard) = Shard::of(dim, shape[dim], unit, parts) else {
            return refuse(
                &T0210,
                format!("dim {dim} of extent {} in units of {unit} over {parts} ranks", shape[dim]),
            );
        };
        shape[dim] = match shard.uneven {
            None => shape[dim] / u64::from(parts),
            Some(u) => role_piece(self.program, axis, u),
        };
        // On an axis of one rank the piece is the whole.
        let on = if parts == 1 { AxisLayout::Replicated } else { AxisLayout::Shard(shard) };
        Ok(self.typed(shape, layout.with(axis, on)))
    }

    pub(super) fn pad(&self) -> Rule<Type> {
        let (axis, dim, rows) = (self.axis()?, self.tensor_dim("dim")?, self.positive("rows")?);
        let mut t = self.x[0].clone();
        match t.layout.on(axis) {
            AxisLayout::Shard(Shard { dim: d, uneven: Some(u) })
                if d == dim && dim == 0 && rows == widest(u, self.mesh.size(axis)) =>
            {
                t.shape[0] = rows;
                t.layout = t.layout.with(axis, AxisLayout::Shard(Shard { dim, uneven: None }));
                Ok(t)
            }
            _ => refuse(&T0212, format!("pad to {rows} rows of {}", self.show(0))),
        }
    }

    pub(super) fn compact(&self) -> Rule<Type> {
        let (extent, parts, unit) =
            (self.positive("extent")?, self.positive("parts")?, self.positive("unit")?);
        let mut t = self.x[0].clone();
        let each = product(&[(extent / unit).div_ceil(parts), unit])?;
        if t.shape.first() != Some(&product(&[each, parts])?)
            || !extent.is_multiple_of(unit)
            || extent / unit < parts
        {
            return refuse(
                &T0210,
                format!(
                    "{} is not {parts} pieces of {each} rows for {extent} in units of {unit}",
                    self.show(0)
                ),
            );
        }
        if let Some(axis) = self.shards_dim(&t.layout, 0) {
            return refuse(&T0213, format!("rows to drop are spread over {axis}: {}", self.show(0)));
        }
        t.shape[0] = extent;
        Ok(t)
    }

    pub(super) fn all_reduce(&self) -> Rule<Type> {
        let axis = self.axis()?;
        match (self.x[0].layout.on(axis), self.op.reduction()) {
            (AxisLayout::Partial(have), Some(want)) if have == want => {
                Ok(Type { layout: self.x[0].layout.with(axis, AxisLayout::Replicated), ..self.x[0].clone() })
            }
            (_, None) => refuse(&T0215, "all_reduce names no reduction"),
            (have, Some(want)) => {
                refuse(&T0212, format!("all_reduce({}) over {axis} of a value that is {have}", want.name()))
            }
        }
    }

    pub(super) fn all_gather(&self) -> Rule<Type> {
        let (axis, dim) = (self.axis()?, self.tensor_dim("dim")?);
        let t = self.x[0];
        match t.layout.on(axis) {
            AxisLayout::Shard(Shard { dim: d, uneven: None }) if d == dim => {
                let mut out = t.clone();
                out.shape[dim] *= u64::from(self.mesh.size(axis));
                out.layout = out.layout.with(axis, AxisLayout::Replicated);
                Ok(out)
            }
            AxisLayout::Shard(Shard { uneven: Some(_), .. }) => {
                refuse(&T0212, format!("all_gather of uneven pieces {}; pad them first", self.show(0)))
            }
            have => refuse(&T0212, format!("all_gather over {axis} dim {dim} of a value that is {have}")),
        }
    }

    pub(super) fn reduce_scatter(&self) -> Rule<Type> {
        let (axis, dim) = (self.axis()?, self.tensor_dim("dim")?);
        match (self.x[0].layout.on(axis), self.op.reduction()) {
            (AxisLayout::Partial(have), Some(want)) if have == want => {
                let parts = u64::from(self.mesh.size(axis));
                if !self.x[0].shape[dim].is_multiple_of(parts) {
                    return refuse(&T0210, format!("dim {dim} of {} over {parts} ranks", self.show(0)));
                }
                self.sharded(self.x[0].shape.clone(), self.x[0].layout, axis, dim, 1)
            }
            (_, None) => refuse(&T0215, "reduce_scatter names no reduction"),
            (have, Some(want)) => refuse(
                &T0212,
                format!("reduce_scatter({}) over {axis} of a value that is {have}", want.name()),
            ),
        }
    }

    pub(super) fn all_to_all(&self) -> Rule<Type> {
        let (axis, split, concat) = (self.axis()?, self.tensor_dim("split")?, self.tensor_dim("concat")?);
        let t = self.x[0];
        match t.layout.on(axis) {
            AxisLayout::Shard(s) if s.dim == concat && split != concat => {
                let mut shape = t.shape.clone();
                shape[concat] = s.extent(shape[concat], self.mesh.size(axis));
                self.sharded(shape, t.layout.with(axis, AxisLayout::Replicated), axis, split, self.unit()?)
            }
            have => {
                refuse(&T0212, format!("all_to_all over {axis} concat {concat} of a value that is {have}"))
            }
        }
    }
}
