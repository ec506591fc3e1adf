//! Layouts by name: which named dim of a weight is cut over which axis.

use std::str::FromStr;

use tessera_base::{Code, Diagnostic, choices, nearest};

use crate::mesh::MeshError;
use crate::{Axis, AxisLayout, Layout, Mesh, Shard};

/// Unknown dim name.
pub static T0105: Code = Code {
    id: "T0105",
    title: "unknown dim name",
    page: "A weight's dims are named by what a cut of them means: `col` are the output features (each rank computes some \
columns of the result), `row` the input features (each rank computes a term of a sum), `experts` the first dim of an \
expert bank. Other names are refused, because a cut of the wrong dim still multiplies.",
};
/// Names and axes that do not pair up, or a dim the tensor lacks.
pub static T0106: Code = Code {
    id: "T0106",
    title: "shard spec does not fit",
    page: "A shard spec pairs named dims with mesh axes one to one: as many names as axes, none twice, and every named dim \
must exist in the tensor and have at least one unit for each rank. The message shows both sides.",
};

/// A dim of a weight, by what cutting it means. Weights are stored [out, in] and banks [experts, out, in].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DimName {
    /// Output features: column parallel.
    Col,
    /// Input features: row parallel.
    Row,
    /// Experts of a bank.
    Experts,
}

impl DimName {
    /// All names.
    pub const ALL: [DimName; 3] = [DimName::Col, DimName::Row, DimName::Experts];

    /// The spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["col", "row", "experts"][self as usize]
    }

    /// Which dim of a tensor with `dims` dims this is. A vector beside a weight has its output features alone.
    #[must_use]
    pub fn of(self, dims: usize) -> Option<usize> {
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
        DimName::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| {
            let names = DimName::ALL.map(DimName::name);
            let d = Diagnostic::error(&T0105, format!("unknown dim name `{s}`"))
                .hint(format!("the names are {}", choices(&names)));
            Box::new(match nearest(s, names) {
                Some(n) => d.note(format!("closest: `{n}`")),
                None => d,
            })
        })
    }
}

/// Which named dims are cut over which axes. Without any pair the tensor is replicated.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShardSpec {
    pairs: Vec<(DimName, Axis)>,
}

impl ShardSpec {
    /// Pairs names with axes.
    ///
    /// # Errors
    /// T0106 when the lengths differ or a name or axis stands twice.
    pub fn new(partition: &[DimName], mesh_axes: &[Axis]) -> Result<ShardSpec, MeshError> {
        let refuse = |why: &str| -> MeshError {
            let names: Vec<&str> = partition.iter().map(|d| d.name()).collect();
            let axes: Vec<&str> = mesh_axes.iter().map(|a| a.name()).collect();
            Box::new(
                Diagnostic::error(&T0106, why.to_string())
                    .at("partition", format!("{names:?}"))
                    .at("mesh_axes", format!("{axes:?}")),
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

    /// The layout of a tensor of this global shape, cut in whole `unit`s.
    ///
    /// # Errors
    /// T0106 when the tensor lacks a named dim, or a rank would get nothing.
    pub fn layout(&self, shape: &[u64], unit: u64, mesh: &Mesh) -> Result<Layout, MeshError> {
        let mut layout = Layout::REPLICATED;
        for (name, axis) in self.pairs.iter().copied().filter(|(_, a)| mesh.size(*a) > 1) {
            let parts = mesh.size(axis);
            let shard = name.of(shape.len()).and_then(|dim| Shard::of(dim, shape[dim], unit, parts));
            let Some(shard) = shard else {
                return Err(Box::new(
                    Diagnostic::error(&T0106, format!("`{}` of a tensor {shape:?} over {axis}", name.name()))
                        .at("tensor", format!("{shape:?} in units of {unit}"))
                        .at("mesh", mesh.to_string()),
                ));
            };
            layout = layout.with(axis, AxisLayout::Shard(shard));
        }
        Ok(layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_rows_and_experts_cut_what_they_name() {
        let mesh: Mesh = "tp=4,ep=3".parse().unwrap();
        let c = mesh.coord_of(mesh.rank_at(crate::Coord([1, 2, 0, 0])));
        let local = |names: &[DimName], axes: &[Axis], shape: &[u64]| {
            ShardSpec::new(names, axes).unwrap().layout(shape, 1, &mesh).unwrap().local(shape, &mesh, c)
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
    fn what_does_not_pair_up_is_refused() {
        assert_eq!("column".parse::<DimName>().unwrap_err().code.id, "T0105");
        assert_eq!(ShardSpec::new(&[DimName::Col], &[]).unwrap_err().code.id, "T0106");
        assert_eq!(
            ShardSpec::new(&[DimName::Col, DimName::Row], &[Axis::Tp, Axis::Tp]).unwrap_err().code.id,
            "T0106"
        );
        let mesh: Mesh = "tp=4".parse().unwrap();
        let row = ShardSpec::new(&[DimName::Row], &[Axis::Tp]).unwrap();
        assert_eq!(row.layout(&[64], 1, &mesh).unwrap_err().code.id, "T0106");
        assert_eq!(row.layout(&[64, 3], 1, &mesh).unwrap_err().code.id, "T0106");
    }
}
