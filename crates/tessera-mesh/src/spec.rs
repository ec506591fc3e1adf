//! Shard specs: which axis shards which dim of a tensor, by the names of both.

use tessera_base::{Code, Diagnostic, format_choices};

use crate::codes::{T0105, T0106, T0107};
use crate::{Axis, AxisLayout, DimName, Layout, Mesh, MeshError, Shard};

/// Names the dims of a tensor that mesh axes shard, one axis per dim. The tensor is replicated on
/// every other axis.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShardSpec {
    /// Each sharded dim with its axis, in the order in which the spec names them.
    pairs: Vec<(DimName, Axis)>,
}

impl ShardSpec {
    /// The spec that shards nothing.
    pub const REPLICATED: ShardSpec = ShardSpec { pairs: Vec::new() };

    /// Creates a spec: axis i of `mesh_axes` shards dim i of `partition`.
    ///
    /// # Errors
    /// T0105 for an unknown dim name, T0101 for an unknown axis, and T0106 for lists of different
    /// lengths or with a repeated entry.
    pub fn new(partition: &[&str], mesh_axes: &[&str]) -> Result<ShardSpec, MeshError> {
        let refuse = |why: String| spec_error(&T0106, why, partition, mesh_axes);
        if partition.len() != mesh_axes.len() {
            return Err(refuse(format!("{} dim names for {} mesh axes", partition.len(), mesh_axes.len())));
        }
        let mut pairs: Vec<(DimName, Axis)> = Vec::new();
        for (name, axis) in partition.iter().zip(mesh_axes) {
            let (name, axis): (DimName, Axis) = (name.parse()?, axis.parse()?);
            for (other_name, other_axis) in &pairs {
                if *other_name == name {
                    return Err(refuse(format!("dim `{name}` is sharded over both {other_axis} and {axis}")));
                }
                if *other_axis == axis {
                    return Err(refuse(format!("axis {axis} shards both `{other_name}` and `{name}`")));
                }
            }
            pairs.push((name, axis));
        }
        Ok(ShardSpec { pairs })
    }

    /// Returns the sharded dims with their axes, in the order in which the spec names them.
    #[must_use]
    pub fn pairs(&self) -> &[(DimName, Axis)] {
        &self.pairs
    }

    /// Returns the layout of a tensor with this global shape. `dims` are the names of its dims, in
    /// order. Shards of an extent that the axis does not divide differ by one element.
    ///
    /// # Errors
    /// T0105 if the tensor has no dim of a name, T0106 if `dims` do not name each dim of the shape
    /// once, and T0107 if an extent is smaller than its axis.
    pub fn to_layout(&self, shape: &[u64], dims: &[DimName], mesh: &Mesh) -> Result<Layout, MeshError> {
        let listed = || format!("({})", dims.iter().map(|d| d.name()).collect::<Vec<_>>().join(", "));
        if dims.len() != shape.len() {
            let why = format!("{} dim names for a tensor of {} dims", dims.len(), shape.len());
            return Err(shape_error(&T0106, why, shape, listed()));
        }
        let mut layout = Layout::REPLICATED;
        for (name, axis) in &self.pairs {
            let mut found = dims.iter().enumerate().filter(|(_, d)| *d == name).map(|(i, _)| i);
            let Some(dim) = found.next() else {
                let names: Vec<&str> = dims.iter().map(|d| d.name()).collect();
                let error = shape_error(&T0105, format!("the tensor has no dim `{name}`"), shape, listed());
                return Err(Box::new(error.with_hint(format!("its dims are {}", format_choices(&names)))));
            };
            if found.next().is_some() {
                let why = format!("two dims of the tensor are called `{name}`");
                return Err(shape_error(&T0106, why, shape, listed()));
            }
            let parts = mesh.axis_size(*axis);
            if parts == 1 {
                continue;
            }
            let Some(shard) = Shard::new(dim, shape[dim], 1, parts) else {
                let why =
                    format!("dim `{name}` of extent {} over {axis} leaves ranks with nothing", shape[dim]);
                let error = shape_error(&T0107, why, shape, listed());
                return Err(Box::new(error.with_label("mesh", format!("{axis}={parts}"))));
            };
            layout = layout.with_axis(*axis, AxisLayout::Shard(shard));
        }
        Ok(layout)
    }
}

fn spec_error(code: &'static Code, why: String, partition: &[&str], mesh_axes: &[&str]) -> MeshError {
    let hint = "give one axis per dim name, each once, such as (\"col\",) and (\"tp\",)";
    Box::new(
        Diagnostic::error(code, why)
            .with_label("partition", format!("({})", partition.join(", ")))
            .with_label("mesh axes", format!("({})", mesh_axes.join(", ")))
            .with_hint(hint),
    )
}

fn shape_error(code: &'static Code, why: String, shape: &[u64], dims: String) -> MeshError {
    Box::new(Diagnostic::error(code, why).with_label("shape", format!("{shape:?}")).with_label("dims", dims))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Coord, Uneven};

    fn mesh(text: &str) -> Mesh {
        text.parse().unwrap()
    }

    fn layout_of_weight(spec: &ShardSpec, shape: &[u64], mesh: &Mesh) -> Layout {
        spec.to_layout(shape, &DimName::of_weight(shape.len()).unwrap(), mesh).unwrap()
    }

    fn local_shapes(layout: Layout, shape: &[u64], mesh: &Mesh) -> Vec<Vec<u64>> {
        mesh.iter().map(|r| layout.local_shape(shape, mesh, mesh.coord_of(r))).collect()
    }

    #[test]
    fn column_and_row_parallel_weights_shard_out_and_in() {
        let mesh = mesh("tp=3");
        let column = ShardSpec::new(&["col"], &["tp"]).unwrap();
        let row = ShardSpec::new(&["row"], &["tp"]).unwrap();
        let local = |spec| local_shapes(layout_of_weight(spec, &[7, 6], &mesh), &[7, 6], &mesh);
        assert_eq!(local(&column), [[3, 6], [2, 6], [2, 6]]);
        assert_eq!(local(&row), [[7, 2]; 3]);
        let bias = layout_of_weight(&column, &[7], &mesh);
        assert_eq!(local_shapes(bias, &[7], &mesh), [[3], [2], [2]]);
        assert_eq!(layout_of_weight(&ShardSpec::REPLICATED, &[7, 6], &mesh), Layout::REPLICATED);
    }

    #[test]
    fn the_experts_of_a_bank_are_divided_and_stay_whole() {
        let mesh = mesh("tp=2, ep=4");
        let bank = ShardSpec::new(&["experts", "col"], &["ep", "tp"]).unwrap();
        let layout = layout_of_weight(&bank, &[10, 6, 5], &mesh);
        let local = |ep| layout.local_shape(&[10, 6, 5], &mesh, Coord::default().with_axis(Axis::Ep, ep));
        assert_eq!([0, 1, 2, 3].map(local), [[3, 3, 5], [3, 3, 5], [2, 3, 5], [2, 3, 5]]);
        // On an axis of one rank there is nothing to shard.
        assert_eq!(layout_of_weight(&bank, &[10, 6, 5], &Mesh::default()), Layout::REPLICATED);
    }

    #[test]
    fn heads_that_the_axis_does_not_divide_differ_by_one() {
        let mesh = mesh("tp=12");
        let spec = ShardSpec::new(&["head"], &["tp"]).unwrap();
        let dims = [DimName::Token, DimName::Head, DimName::Hidden];
        let layout = spec.to_layout(&[5, 128, 64], &dims, &mesh).unwrap();
        let AxisLayout::Shard(shard) = layout.on_axis(Axis::Tp) else { panic!("{layout:?}") };
        assert_eq!(
            shard,
            Shard { dim: 1, uneven: Some(Uneven { extent: 128, unit: 1 }), subgroup_size: None }
        );
        let heads: Vec<u64> =
            local_shapes(layout, &[5, 128, 64], &mesh).into_iter().map(|shape| shape[1]).collect();
        assert_eq!(heads, [[11; 8].as_slice(), &[10; 4]].concat());
    }

    #[test]
    fn specs_that_do_not_pair_up_have_specific_codes() {
        let code = |dims: &[&str], axes: &[&str]| ShardSpec::new(dims, axes).unwrap_err().code.id;
        assert_eq!(code(&["column"], &["tp"]), "T0105");
        assert_eq!(code(&["col"], &["mp"]), "T0101");
        assert_eq!(code(&["col", "row"], &["tp"]), "T0106");
        assert_eq!(code(&["col"], &[]), "T0106");
        assert_eq!(code(&["col", "col"], &["tp", "ep"]), "T0106");
        assert_eq!(code(&["col", "row"], &["tp", "tp"]), "T0106");
    }

    #[test]
    fn a_layout_needs_the_dims_that_the_spec_names() {
        let mesh = mesh("tp=4");
        let spec = ShardSpec::new(&["row"], &["tp"]).unwrap();
        let code = |shape: &[u64], dims: &[DimName]| spec.to_layout(shape, dims, &mesh).unwrap_err().code.id;
        assert_eq!(code(&[8], &[DimName::Col]), "T0105");
        assert_eq!(code(&[8, 8], &[DimName::Row]), "T0106");
        assert_eq!(code(&[8, 8], &[DimName::Row, DimName::Row]), "T0106");
        assert_eq!(code(&[8, 3], &[DimName::Col, DimName::Row]), "T0107");
    }
}
