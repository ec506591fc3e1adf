//! Names of the dims of a weight.

use std::str::FromStr;

use tessera_base::named_enum;

use crate::codes::T0105;
use crate::mesh::{MeshError, unknown_name};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_denotes_the_dim_that_the_tensor_has() {
        let index = |dims: usize| DimName::ALL.map(|name| name.dim_index(dims));
        assert_eq!(index(1), [Some(0), None, None]);
        assert_eq!(index(2), [Some(0), Some(1), None]);
        assert_eq!(index(3), [Some(1), Some(2), Some(0)]);
        assert_eq!(index(4), [None; 3]);
        assert_eq!("column".parse::<DimName>().unwrap_err().code.id, "T0105");
    }
}
