//! Rules of the ops that cut, pad and exchange pieces.

use tessera_mesh::{AxisLayout, Group, Layout, Shard};

use super::{Cx, Over, Rule, T0210, T0212, T0213, T0215, product, refuse, role_piece, widest};
use crate::Type;

impl Cx<'_> {
    pub(super) fn take_shard(&self) -> Rule<Type> {
        let (over, dim) = (self.over_axis()?, self.tensor_dim("dim")?);
        if self.x[0].layout.on(over.axis) != AxisLayout::Replicated {
            return refuse(&T0212, format!("take_shard over {over} of {}", self.show(0)));
        }
        self.sharded(self.x[0].shape.clone(), self.x[0].layout, over, dim, self.unit()?)
    }

    /// The type after dim `dim` of a tensor with these extents was cut over the op's part of an axis. The piece is
    /// this role's: for uneven shards the role's declared result tells which, see [`role_piece`].
    fn sharded(
        &self,
        mut shape: Vec<u64>,
        layout: Layout,
        Over { axis, ways, parts }: Over,
        dim: usize,
        unit: u64,
    ) -> Rule<Type> {
        let Some(shard) = Shard::of(dim, shape[dim], unit, parts) else {
            return refuse(
                &T0210,
                format!("dim {dim} of extent {} in units of {unit} over {parts} ranks", shape[dim]),
            );
        };
        shape[dim] = match shard.uneven {
            None => shape[dim] / u64::from(parts),
            Some(u) => role_piece(self.program, axis, u, ways),
        };
        // On an axis of one rank the piece is the whole.
        let on = if parts == 1 { AxisLayout::Replicated } else { AxisLayout::Shard(shard.over(ways)) };
        Ok(self.typed(shape, layout.with(axis, on)))
    }

    pub(super) fn pad(&self) -> Rule<Type> {
        let (over, dim, rows) = (self.over_axis()?, self.tensor_dim("dim")?, self.positive("rows")?);
        let mut t = self.x[0].clone();
        match t.layout.on(over.axis) {
            AxisLayout::Shard(Shard { dim: d, uneven: Some(u), ways })
                if d == dim && dim == 0 && ways == over.ways && rows == widest(u, over.parts) =>
            {
                t.shape[0] = rows;
                t.layout = t.layout.with(over.axis, AxisLayout::Shard(Shard { dim, uneven: None, ways }));
                Ok(t)
            }
            _ => refuse(&T0212, format!("pad over {over} to {rows} rows of {}", self.show(0))),
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

    /// A layout that the op does not take, beside what the op is over.
    fn unlike<T>(&self, what: &str, over: Over, have: AxisLayout) -> Rule<T> {
        let blocks = match (over.ways, have.ways()) {
            (a, b) if a == b || have == AxisLayout::Replicated => "",
            (None, _) => ": the layout is over blocks of the axis, the op over all of it",
            (Some(_), None) => ": the op is over blocks of the axis, the layout over all of it",
            (Some(_), Some(_)) => ": their blocks differ",
        };
        refuse(&T0212, format!("{what} over {over} of a value that is {have}{blocks}"))
    }

    pub(super) fn all_reduce(&self) -> Rule<Type> {
        let group = self.group()?;
        let Some(want) = self.op.reduction() else {
            return refuse(&T0215, "all_reduce names no reduction");
        };
        if group == Group::World {
            return self.all_reduce_world(AxisLayout::partial(want));
        }
        let over = self.over_axis()?;
        match self.x[0].layout.on(over.axis) {
            AxisLayout::Partial { reduction, ways } if reduction == want && ways == over.ways => {
                let layout = self.x[0].layout.with(over.axis, AxisLayout::Replicated);
                Ok(Type { layout, ..self.x[0].clone() })
            }
            have => self.unlike(&format!("all_reduce({})", want.name()), over, have),
        }
    }

    /// All ranks hold terms of one value: it is partial on every axis, and nobody stands outside.
    fn all_reduce_world(&self, want: AxisLayout) -> Rule<Type> {
        let outside = self.mesh.outside();
        if outside > 0 {
            let why = format!("all_reduce over world: its ranks outside the mesh ({outside}) hold no term");
            return refuse(&T0212, why);
        }
        let layout = self.x[0].layout;
        match self.mesh.axes().find(|a| layout.on(*a) != want) {
            Some(axis) => {
                let have = layout.on(axis);
                refuse(
                    &T0212,
                    format!("all_reduce over world of a value that is {have} on {axis}, not {want}"),
                )
            }
            None if self.mesh.ranks() == 1 => refuse(&T0212, "all_reduce over a world of one rank"),
            None => Ok(Type { layout: Layout::REPLICATED, ..self.x[0].clone() }),
        }
    }

    pub(super) fn all_gather(&self) -> Rule<Type> {
        let (over, dim) = (self.over_axis()?, self.tensor_dim("dim")?);
        let t = self.x[0];
        match t.layout.on(over.axis) {
            AxisLayout::Shard(Shard { dim: d, uneven: None, ways }) if d == dim && ways == over.ways => {
                let mut out = t.clone();
                out.shape[dim] *= u64::from(over.parts);
                out.layout = out.layout.with(over.axis, AxisLayout::Replicated);
                Ok(out)
            }
            AxisLayout::Shard(Shard { uneven: Some(_), .. }) => {
                refuse(&T0212, format!("all_gather of uneven pieces {}; pad them first", self.show(0)))
            }
            have => self.unlike(&format!("all_gather of dim {dim}"), over, have),
        }
    }

    pub(super) fn reduce_scatter(&self) -> Rule<Type> {
        let (over, dim) = (self.over_axis()?, self.tensor_dim("dim")?);
        let Some(want) = self.op.reduction() else {
            return refuse(&T0215, "reduce_scatter names no reduction");
        };
        match self.x[0].layout.on(over.axis) {
            AxisLayout::Partial { reduction, ways } if reduction == want && ways == over.ways => {
                if !self.x[0].shape[dim].is_multiple_of(u64::from(over.parts)) {
                    let shown = self.show(0);
                    return refuse(&T0210, format!("dim {dim} of {shown} over {} ranks", over.parts));
                }
                self.sharded(self.x[0].shape.clone(), self.x[0].layout, over, dim, 1)
            }
            have => self.unlike(&format!("reduce_scatter({})", want.name()), over, have),
        }
    }

    pub(super) fn all_to_all(&self) -> Rule<Type> {
        let (over, split, concat) =
            (self.over_axis()?, self.tensor_dim("split")?, self.tensor_dim("concat")?);
        let t = self.x[0];
        match t.layout.on(over.axis) {
            AxisLayout::Shard(s) if s.dim == concat && split != concat && s.ways == over.ways => {
                let mut shape = t.shape.clone();
                shape[concat] = s.extent(shape[concat], self.mesh.size(over.axis));
                let layout = t.layout.with(over.axis, AxisLayout::Replicated);
                self.sharded(shape, layout, over, split, self.unit()?)
            }
            have => self.unlike(&format!("all_to_all of concat {concat}"), over, have),
        }
    }
}
