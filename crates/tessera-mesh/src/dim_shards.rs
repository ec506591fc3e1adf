//! Which axis shards which dim of a tensor, whatever the sizes of the axes: what a layout on one mesh and a layout on
//! another have in common.

use std::collections::BTreeMap;

use tessera_base::Diagnostic;

use crate::codes::T0107;
use crate::{Axis, AxisLayout, Layout, Mesh, MeshError, Shard};

/// The sharded dims of a tensor by axis; the tensor is replicated over every other axis.
///
/// A [`Layout`] depends on the sizes of a mesh: it tells even shards from uneven ones, and forgets the unit of even ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DimShards {
    by_axis: BTreeMap<Axis, DimShard>,
}

/// The dim that one axis shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DimShard {
    /// Index of the dim, from 0.
    pub dim: usize,
    /// Number of consecutive elements that stay together (a head, a token); at least 1.
    pub unit: u64,
}

impl DimShards {
    /// Creates the shards from pairs of an axis and its dim. The last pair of an axis counts.
    #[must_use]
    pub fn from_pairs(pairs: impl IntoIterator<Item = (Axis, DimShard)>) -> DimShards {
        DimShards { by_axis: pairs.into_iter().collect() }
    }

    /// Returns what a layout shards. `units` are those of the dims; a dim without one has units of one element. `None` for
    /// a partial value and for shards over subgroups, whose terms and sizes belong to one mesh.
    #[must_use]
    pub fn from_layout(layout: &Layout, units: &[u64]) -> Option<DimShards> {
        let mut by_axis = BTreeMap::new();
        for axis in Axis::ALL {
            match layout.on_axis(axis) {
                AxisLayout::Replicated => {}
                AxisLayout::Shard(Shard { dim, uneven, subgroup_size: None }) => {
                    let unit = uneven.map(|u| u.unit).or(units.get(dim).copied()).unwrap_or(1);
                    by_axis.insert(axis, DimShard { dim, unit });
                }
                AxisLayout::Shard(_) | AxisLayout::Partial { .. } => return None,
            }
        }
        Some(DimShards { by_axis })
    }

    /// Returns the sharded dims in the order of [`Axis::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Axis, DimShard)> + '_ {
        self.by_axis.iter().map(|(axis, shard)| (*axis, *shard))
    }

    /// Returns the layout of a tensor with this global shape on a mesh.
    ///
    /// # Errors
    /// T0107 if the shape lacks a dim, or an extent is no multiple of its unit or has fewer units than its axis has ranks.
    pub fn to_layout(&self, shape: &[u64], mesh: &Mesh) -> Result<Layout, MeshError> {
        let mut layout = Layout::REPLICATED;
        for (axis, DimShard { dim, unit }) in self.iter() {
            let parts = mesh.axis_size(axis);
            let shard = shape.get(dim).and_then(|extent| Shard::new(dim, *extent, unit, parts));
            let Some(shard) = shard else {
                let why = match shape.get(dim) {
                    None => format!("a tensor of {} dims has no dim {dim} to shard over {axis}", shape.len()),
                    Some(extent) => {
                        format!(
                            "dim {dim} of extent {extent} in units of {unit} cannot be shared by {parts} ranks of {axis}"
                        )
                    }
                };
                let d = Diagnostic::error(&T0107, why).with_label("shape", format!("{shape:?}"));
                return Err(Box::new(d.with_label("mesh", mesh.to_string())));
            };
            layout = layout.with_axis(axis, AxisLayout::Shard(shard));
        }
        Ok(layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh(text: &str) -> Mesh {
        text.parse().unwrap()
    }

    #[test]
    fn heads_stay_whole_on_a_mesh_that_divides_the_dim_but_not_the_heads() {
        let heads = DimShards::from_pairs([(Axis::Tp, DimShard { dim: 1, unit: 12 })]);
        let even = heads.to_layout(&[7, 60], &mesh("tp=5")).unwrap();
        // The layout itself has forgotten that a head has 12 columns.
        assert_eq!(DimShards::from_layout(&even, &[1, 12]), Some(heads.clone()));
        assert_ne!(DimShards::from_layout(&even, &[]), Some(heads.clone()));
        let uneven = heads.to_layout(&[7, 60], &mesh("tp=2")).unwrap();
        assert_eq!(DimShards::from_layout(&uneven, &[]), Some(heads.clone()));
        let local =
            |at| uneven.local_shape(&[7, 60], &mesh("tp=2"), crate::Coord::default().with_axis(Axis::Tp, at));
        assert_eq!([local(0), local(1)], [[7, 36], [7, 24]]);
        let refused = heads.to_layout(&[7, 60], &mesh("tp=6")).unwrap_err();
        assert_eq!(refused.code, &T0107);
        assert!(
            refused.message.contains("60 in units of 12 cannot be shared by 6 ranks"),
            "{}",
            refused.message
        );
    }

    #[test]
    fn a_layout_of_one_mesh_alone_has_no_common_part() {
        let terms = Layout::REPLICATED.with_axis(Axis::Tp, AxisLayout::new_partial(crate::Reduction::Sum));
        assert_eq!(DimShards::from_layout(&terms, &[]), None);
        let blocks =
            Shard::new(0, 6, 1, 2).map(|s| AxisLayout::Shard(s.with_subgroup_size(Some(2)))).unwrap();
        assert_eq!(DimShards::from_layout(&Layout::REPLICATED.with_axis(Axis::Dp, blocks), &[]), None);
    }
}
