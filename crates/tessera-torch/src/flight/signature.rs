//! What the members of a group must agree on at one position.

use std::sync::Arc;

use super::dump::FlightEntry;

/// The recorded properties of a collective that all members must share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CallSignature {
    op: Arc<str>,
    dtypes: Vec<Arc<str>>,
    /// Elements of inputs and outputs; `None` where members may differ, as in an uneven all-to-all.
    elements: Option<(u64, u64)>,
}

/// A property in which two collectives differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SignatureField {
    Op,
    Dtype,
    Shape,
}

impl CallSignature {
    pub(super) fn from_entry(entry: &FlightEntry) -> CallSignature {
        let op = normalise_op(&entry.op);
        let volume = |shape: &Vec<u64>| shape.iter().fold(1, |n: u64, extent| n.saturating_mul(*extent));
        let count =
            |shapes: &[Vec<u64>]| shapes.iter().map(volume).fold(0, |n: u64, more| n.saturating_add(more));
        // The same number of elements in another shape is the same collective. The list forms of a
        // gather and a scatter may have another size on each rank.
        let uniform = !matches!(op, "gather" | "scatter" | "all_to_all" | "all_to_all_uneven")
            && !matches!(&*entry.op, "all_gather" | "reduce_scatter" | "all_gather_v");
        let elements = uniform.then(|| (count(&entry.input_shapes), count(&entry.output_shapes)));
        // Only the root of a gather or a scatter passes the list.
        let mut dtypes: Vec<Arc<str>> = entry.input_dtypes.to_vec();
        dtypes.dedup();
        CallSignature { op: if op == &*entry.op { entry.op.clone() } else { op.into() }, dtypes, elements }
    }

    /// Returns the first property in which two collectives differ.
    pub(super) fn find_difference(&self, other: &CallSignature) -> Option<SignatureField> {
        if self.op != other.op {
            return Some(SignatureField::Op);
        }
        if !self.dtypes.is_empty() && !other.dtypes.is_empty() && self.dtypes != other.dtypes {
            return Some(SignatureField::Dtype);
        }
        let differ = matches!((self.elements, other.elements), (Some(a), Some(b)) if a != b);
        differ.then_some(SignatureField::Shape)
    }

    pub(super) fn agrees_with(&self, other: &CallSignature) -> bool {
        self.find_difference(other).is_none()
    }
}

/// Returns one name for the names under which versions of PyTorch record an op.
fn normalise_op(op: &str) -> &str {
    match op {
        "_all_gather_base"
        | "all_gather_single"
        | "all_gather_into_tensor"
        | "_allgather_base"
        | "allgather" => "all_gather",
        "_reduce_scatter_base" | "reduce_scatter_single" | "reduce_scatter_tensor" => "reduce_scatter",
        "allreduce" => "all_reduce",
        "alltoall_base" | "all_to_all_single" | "alltoall" => "all_to_all",
        _ => op,
    }
}
