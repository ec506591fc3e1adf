//! Names of the dims of tensors.

use std::fmt;
use std::str::FromStr;

use tessera_base::named_enum;

use crate::codes::T0105;
use crate::mesh::{MeshError, unknown_name};

named_enum! {
    /// A dim of a tensor. Those of a weight are named after the effect of sharding them: weights are
    /// stored as [out, in] and expert banks as [experts, out, in].
    pub enum DimName {
        /// Output features: column parallel.
        Col = "col",
        /// Input features: row parallel.
        Row = "row",
        /// First dim of an expert bank: each rank holds whole experts.
        Experts = "experts",
        /// Attention heads.
        Head = "head",
        /// Independent samples.
        Batch = "batch",
        /// Rows of a sequence.
        Token = "token",
        /// Ids of a vocabulary.
        Vocab = "vocab",
        /// Features of the residual stream.
        Hidden = "hidden",
        /// Layers.
        Depth = "depth",
    }
}

impl DimName {
    /// Returns the index of this dim in a weight with `dims` dims. A vector that accompanies a
    /// weight has only output features. `None` for a dim that a weight of so many dims lacks.
    #[must_use]
    pub fn dim_index(self, dims: usize) -> Option<usize> {
        match (self, dims) {
            (DimName::Col, 1 | 2) | (DimName::Experts, 3) => Some(0),
            (DimName::Row, 2) | (DimName::Col, 3) => Some(1),
            (DimName::Row, 3) => Some(2),
            _ => None,
        }
    }

    /// Returns the names of the dims of a weight that states none; `None` for a number of dims that
    /// no weight has.
    #[must_use]
    pub fn of_weight(dims: usize) -> Option<Vec<DimName>> {
        match dims {
            1 => Some(vec![DimName::Col]),
            2 => Some(vec![DimName::Col, DimName::Row]),
            3 => Some(vec![DimName::Experts, DimName::Col, DimName::Row]),
            _ => None,
        }
    }
}

impl fmt::Display for DimName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DimName {
    type Err = MeshError;
    fn from_str(s: &str) -> Result<DimName, MeshError> {
        let names = DimName::ALL.map(DimName::name);
        DimName::from_name(s).ok_or_else(|| unknown_name(&T0105, "dim name", "names", s, &names))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_denotes_the_dim_that_the_tensor_has() {
        let index =
            |dims: usize| [DimName::Col, DimName::Row, DimName::Experts].map(|name| name.dim_index(dims));
        assert_eq!(index(1), [Some(0), None, None]);
        assert_eq!(index(2), [Some(0), Some(1), None]);
        assert_eq!(index(3), [Some(1), Some(2), Some(0)]);
        assert_eq!(index(4), [None; 3]);
        for dims in 1..4 {
            for (i, name) in DimName::of_weight(dims).unwrap().into_iter().enumerate() {
                assert_eq!(name.dim_index(dims), Some(i));
            }
        }
        assert_eq!((DimName::of_weight(4), DimName::Head.dim_index(1)), (None, None));
        assert_eq!("column".parse::<DimName>().unwrap_err().code.id, "T0105");
    }
}
