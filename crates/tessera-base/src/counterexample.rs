//! What a refusal across ranks shows beside its words: who waits for whom, or which two calls do not meet.
//!
//! The same facts stand in the diagnostic's places as text; here they can be drawn and read by programs.

use crate::Span;

/// Proof that ranks would hang or take bytes for something else.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "a diagnostic boxes it as a whole")]
pub enum Counterexample {
    /// Each link waits for the one before it, the first for the last.
    Circle(Vec<Link>),
    /// Two members' calls at one position of a group's sequence.
    Mismatch(Mismatch),
}

/// One rank of a circle: it is inside `holds`, which cannot finish, and reaches `wants` only afterwards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Who.
    pub rank: u32,
    /// In flight and unfinished.
    pub holds: Step,
    /// What the next link's `holds` needs of this rank.
    pub wants: Step,
}

/// The first position at which two members of a group differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// The group, as `tp of ranks 0, 1`.
    pub group: String,
    /// Position in the group's sequence, from 0.
    pub position: usize,
    /// What differs: `op`, `dtype`, `count`, `root`…
    pub field: String,
    /// Both sides; the one that most members agree with first. `None`: the side calls nothing there.
    pub sides: [(u32, Option<Step>); 2],
}

/// A collective as one rank calls it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// In words: op, group, type.
    pub what: String,
    /// Name of the op, as `all_reduce`.
    pub op: String,
    /// Dtype, as `bf16`.
    pub dtype: String,
    /// Shape or count, as `[4, 8]`.
    pub shape: String,
    /// Members of the group, ascending.
    pub ranks: Vec<u32>,
    /// Stream of the rank.
    pub stream: String,
    /// Index in the rank's program or trace, from 0.
    pub index: usize,
    /// The text in which it stands, if any, and where.
    pub source: Option<(String, Span)>,
}
