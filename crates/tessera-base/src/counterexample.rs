//! Machine-readable counterexamples for errors that involve several ranks: a wait cycle, or two
//! collectives that do not match.
//!
//! The labels of the diagnostic state the same facts as text. This form can be drawn and parsed.

use crate::Span;

/// Proof that ranks would hang or would misinterpret each other's data.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "a diagnostic boxes it as a whole")]
pub enum Counterexample {
    /// A wait cycle: each edge waits for the previous edge, and the first edge for the last.
    WaitCycle(Vec<WaitEdge>),
    /// Two members issue different collectives at the same position of a group's sequence.
    Mismatch(Mismatch),
}

/// One rank of a wait cycle. The rank is blocked in `blocked_in` and reaches `not_reached` only
/// after that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitEdge {
    /// The rank that waits in `blocked_in`.
    pub rank: u32,
    /// The collective that is in flight and cannot finish.
    pub blocked_in: RankCollective,
    /// The later collective of this rank that the next edge's `blocked_in` needs.
    pub not_reached: RankCollective,
}

/// The first position at which two members of a group differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// Group and its ranks, such as `tp of ranks 0, 1`.
    pub group: String,
    /// Position in the group's sequence of collectives, from 0.
    pub position: usize,
    /// Property that differs: `op`, `dtype`, `count`, `root`…
    pub field: String,
    /// Both ranks with their collectives; the side that agrees with the majority of the members
    /// comes first. `None` if the rank issues nothing at this position.
    pub sides: [(u32, Option<RankCollective>); 2],
}

/// One collective of one rank, as counterexamples show it: a text to print, and the fields in which
/// two ranks may differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankCollective {
    /// Op, reduction, group and type, such as `all_reduce(sum) over tp of bf16[4, 8]`.
    pub description: String,
    /// Name of the op, such as `all_reduce`.
    pub op: String,
    /// Dtype, such as `bf16`.
    pub dtype: String,
    /// Shape, such as `[4, 8]`, or the number of elements if a trace gives no shape.
    pub shape: String,
    /// Members of the group, in ascending order.
    pub ranks: Vec<u32>,
    /// Stream of the rank that the collective runs on.
    pub stream: String,
    /// Index in the rank's program or trace, from 0.
    pub index: usize,
    /// File and position of the collective, if it was read from a text.
    pub source: Option<(String, Span)>,
}
