//! Sharding by dim name: which named dim of a weight is sharded over which axis.

use std::str::FromStr;

use tessera_base::{Diagnostic, named_enum};

use crate::codes::{T0105, T0106};
use crate::mesh::{MeshError, unknown_name};
use crate::{Axis, AxisLayout, Layout, Mesh, Shard};

named_enum! {
    /// A dim of a weight, named after the effect of sharding it. Weights are stored as [out, in] and
    /// expert banks as [experts, out, in].
    pub enum DimName {
        /// Output features: column parallel.
        Col = "col",
        /// Input features: row parallel.
        Row = "row",
        /// First dim of an expert bank: each rank holds whole experts.
        Experts = "experts",
    }
}

impl DimName {
    /// Returns the index of this dim in a tensor with `dims` dims. A vector that accompanies a
    /// weight has only output features.
    #[must_use]
    pub fn dim_index(self, dims: usize) -> Option<usize> {
        match (self, dims) {
            (DimName::Col, 1 | 2) | (DimName::Experts, 3) => Some(0),
            (DimName::Row, 2) | (DimName::Col, 3) => Some(1),
            (DimName::Row, 3) => Some(2),
            _ => None,
        }
    }
}

impl FromStr for DimName {
    type Err = MeshError;
    fn from_str(s: &str) -> Result<DimName, MeshError> {
        let names = DimName::ALL.map(DimName::name);
        DimName::from_name(s).ok_or_else(|| unknown_name(&T0105, "dim name", "names", s, &names))
    }
}

/// Pairs of named dims and the axes that they are sharded over. A spec without pairs means that the
/// tensor is replicated.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShardSpec {
    pairs: Vec<(DimName, Axis)>,
}

impl ShardSpec {
    /// Creates a spec that pairs names with axes.
    ///
    /// # Errors
    /// T0106 if the lengths differ, or if a name or an axis appears twice.
    pub fn new(partition: &[DimName], mesh_axes: &[Axis]) -> Result<ShardSpec, MeshError> {
        let refuse = |why: &str| -> MeshError {
            let names: Vec<&str> = partition.iter().map(|d| d.name()).collect();
            let axes: Vec<&str> = mesh_axes.iter().map(|a| a.name()).collect();
            Box::new(
                Diagnostic::error(&T0106, why.to_string())
                    .with_label("partition", format!("{names:?}"))
                    .with_label("mesh_axes", format!("{axes:?}")),
            )
        };
        if partition.len() != mesh_axes.len() {
            return Err(refuse(&format!("{} dims for {} axes", partition.len(), mesh_axes.len())));
        }
        let twice =
            |n: usize, same: &dyn Fn(usize, usize) -> bool| (0..n).any(|i| (0..i).any(|j| same(i, j)));
        if twice(partition.len(), &|i, j| partition[i] == partition[j]) {
            return Err(refuse("a dim is named twice"));
        }
        if twice(mesh_axes.len(), &|i, j| mesh_axes[i] == mesh_axes[j]) {
            return Err(refuse("an axis is named twice"));
        }
        Ok(ShardSpec { pairs: partition.iter().copied().zip(mesh_axes.iter().copied()).collect() })
    }

    /// Returns the layout of a tensor of this global shape, sharded in multiples of `unit`.
    ///
    /// # Errors
    /// T0106 if the tensor lacks a named dim, or if a rank would get nothing.
    pub fn to_layout(&self, shape: &[u64], unit: u64, mesh: &Mesh) -> Result<Layout, MeshError> {
        let mut layout = Layout::REPLICATED;
        for (name, axis) in self.pairs.iter().copied().filter(|(_, a)| mesh.axis_size(*a) > 1) {
            let parts = mesh.axis_size(axis);
            let shard = name.dim_index(shape.len()).and_then(|dim| Shard::new(dim, shape[dim], unit, parts));
            let Some(shard) = shard else {
                return Err(Box::new(
                    Diagnostic::error(&T0106, format!("`{}` of a tensor {shape:?} over {axis}", name.name()))
                        .with_label("tensor", format!("{shape:?} in units of {unit}"))
                        .with_label("mesh", mesh.to_string()),
                ));
            };
            layout = layout.with_axis(axis, AxisLayout::Shard(shard));
        }
        Ok(layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_dims_are_sharded() {
        let mesh: Mesh = "tp=4,ep=3".parse().unwrap();
        let c = mesh.coord_of(mesh.rank_at(crate::Coord([1, 2, 0, 0])));
        let local = |names: &[DimName], axes: &[Axis], shape: &[u64]| {
            ShardSpec::new(names, axes)
                .unwrap()
                .to_layout(shape, 1, &mesh)
                .unwrap()
                .local_shape(shape, &mesh, c)
        };
        assert_eq!(local(&[DimName::Col], &[Axis::Tp], &[64, 32]), [16, 32]);
        assert_eq!(local(&[DimName::Row], &[Axis::Tp], &[64, 32]), [64, 8]);
        assert_eq!(local(&[DimName::Col], &[Axis::Tp], &[64]), [16]);
        assert_eq!(
            local(&[DimName::Experts, DimName::Col], &[Axis::Ep, Axis::Tp], &[9, 64, 32]),
            [3, 16, 32]
        );
        assert_eq!(local(&[], &[], &[64, 32]), [64, 32]);
    }

    #[test]
    fn unpaired_names_are_rejected() {
        assert_eq!("column".parse::<DimName>().unwrap_err().code.id, "T0105");
        assert_eq!(ShardSpec::new(&[DimName::Col], &[]).unwrap_err().code.id, "T0106");
        assert_eq!(
            ShardSpec::new(&[DimName::Col, DimName::Row], &[Axis::Tp, Axis::Tp]).unwrap_err().code.id,
            "T0106"
        );
        let mesh: Mesh = "tp=4".parse().unwrap();
        let row = ShardSpec::new(&[DimName::Row], &[Axis::Tp]).unwrap();
        assert_eq!(row.to_layout(&[64], 1, &mesh).unwrap_err().code.id, "T0106");
        assert_eq!(row.to_layout(&[64, 3], 1, &mesh).unwrap_err().code.id, "T0106");
    }
}
