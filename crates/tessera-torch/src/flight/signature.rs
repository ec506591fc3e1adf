//! What the members of a group must agree on at one position.

use std::sync::Arc;

use super::dump::FlightEntry;

/// A property in which two collectives differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SignatureField {
    Op,
    Dtype,
    Shape,
}

/// What two collectives must share to be the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MatchBy {
    /// All recorded properties that the members of a group must share.
    Signature,
    /// These, and the stack of the call.
    CallSite,
}

impl MatchBy {
    pub(super) fn are_equal(self, a: &FlightEntry, b: &FlightEntry) -> bool {
        let same_site = self == MatchBy::Signature || a.stack_hash == b.stack_hash;
        same_site && find_difference(a, b).is_none()
    }
}

/// Returns the first recorded property in which two collectives differ although all members must share it.
pub(super) fn find_difference(a: &FlightEntry, b: &FlightEntry) -> Option<SignatureField> {
    // Most collectives are equal in every word.
    if a.op == b.op
        && a.input_shapes == b.input_shapes
        && a.output_shapes == b.output_shapes
        && a.input_dtypes == b.input_dtypes
    {
        return None;
    }
    if normalise_op(&a.op) != normalise_op(&b.op) {
        return Some(SignatureField::Op);
    }
    // Only the root of a gather or a scatter passes the list.
    let dtypes = |e: &FlightEntry| {
        let mut dtypes: Vec<Arc<str>> = e.input_dtypes.to_vec();
        dtypes.dedup();
        dtypes
    };
    let (dtypes_a, dtypes_b) = (dtypes(a), dtypes(b));
    if !dtypes_a.is_empty() && !dtypes_b.is_empty() && dtypes_a != dtypes_b {
        return Some(SignatureField::Dtype);
    }
    let differ = has_equal_sizes(a) && has_equal_sizes(b) && count_elements(a) != count_elements(b);
    differ.then_some(SignatureField::Shape)
}

/// Returns whether all members of such a collective pass the same number of elements. The list forms of
/// a gather and a scatter may have another size on each rank.
fn has_equal_sizes(entry: &FlightEntry) -> bool {
    !matches!(normalise_op(&entry.op), "gather" | "scatter" | "all_to_all" | "all_to_all_uneven")
        && !matches!(&*entry.op, "all_gather" | "reduce_scatter" | "all_gather_v")
}

/// Counts the elements of inputs and outputs. The same number in another shape is the same collective.
fn count_elements(entry: &FlightEntry) -> (u64, u64) {
    let volume = |shape: &Vec<u64>| shape.iter().fold(1, |n: u64, extent| n.saturating_mul(*extent));
    let count =
        |shapes: &[Vec<u64>]| shapes.iter().map(volume).fold(0, |n: u64, more| n.saturating_add(more));
    (count(&entry.input_shapes), count(&entry.output_shapes))
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
