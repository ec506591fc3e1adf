//! Names of the dims of a weight.

use std::str::FromStr;

use tessera_base::{Diagnostic, closest_name, format_choices};

use crate::codes::T0105;
use crate::mesh::MeshError;

/// A dim of a weight, named after the effect of sharding it. Weights are stored as [out, in] and
/// expert banks as [experts, out, in].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DimName {
    /// Output features: column parallel.
    Col,
    /// Input features: row parallel.
    Row,
    /// First dim of an expert bank: each rank holds whole experts.
    Experts,
}

impl DimName {
    /// All names.
    pub const ALL: [DimName; 3] = [DimName::Col, DimName::Row, DimName::Experts];

    /// Returns the name in text: `col`, `row` or `experts`.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["col", "row", "experts"][self as usize]
    }

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
        DimName::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| {
            let names = DimName::ALL.map(DimName::name);
            let d = Diagnostic::error(&T0105, format!("unknown dim name `{s}`"))
                .with_hint(format!("the names are {}", format_choices(&names)));
            Box::new(match closest_name(s, names) {
                Some(n) => d.with_note(format!("closest: `{n}`")),
                None => d,
            })
        })
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
