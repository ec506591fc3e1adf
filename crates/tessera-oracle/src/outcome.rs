//! What can come of a set of programs.

use std::fmt;

/// What becomes of a set of programs, over all orders in which its devices can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Every op of every rank finishes, in every order, and reads what it should.
    Completes,
    /// No step is possible and something has not finished.
    Hang {
        /// Per rank, what it is held by.
        state: String,
        /// The first rank that is held, and its op.
        at: (usize, usize),
    },
    /// Members in flight on one group that do not fit together.
    Mismatch {
        /// In what.
        field: Field,
        /// Both sides.
        trace: String,
        /// Rank and op of one side.
        at: (usize, usize),
    },
    /// An order in which something is read before it is there, or two orders of accesses to one buffer.
    Race {
        /// Both ops.
        trace: String,
        /// Rank and op of the reader, or of the later one in program order.
        at: (usize, usize),
    },
}

/// What two members in flight on one group differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Field {
    /// The op.
    Op,
    /// One is captured and the other not, or in another graph.
    Graph,
    /// Element type.
    Dtype,
    /// Reduction.
    Reduction,
    /// Root.
    Root,
    /// Elements that one side hands over and the other takes.
    Count,
}

impl Outcome {
    /// Whether a run can go wrong.
    #[must_use]
    pub fn fails(&self) -> bool {
        *self != Outcome::Completes
    }

    /// One word.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Outcome::Completes => "completes",
            Outcome::Hang { .. } => "hang",
            Outcome::Mismatch { .. } => "mismatch",
            Outcome::Race { .. } => "race",
        }
    }

    /// Rank and op that the failure shows at.
    #[must_use]
    pub fn at(&self) -> Option<(usize, usize)> {
        match self {
            Outcome::Completes => None,
            Outcome::Hang { at, .. } | Outcome::Mismatch { at, .. } | Outcome::Race { at, .. } => Some(*at),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Completes => f.write_str("completes"),
            Outcome::Hang { state, .. } => write!(f, "hang\n{state}"),
            Outcome::Mismatch { field, trace, .. } => write!(f, "mismatch in {field}\n{trace}"),
            Outcome::Race { trace, .. } => write!(f, "race\n{trace}"),
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Field::Op => "op",
            Field::Graph => "capture",
            Field::Dtype => "dtype",
            Field::Reduction => "reduction",
            Field::Root => "root",
            Field::Count => "count",
        })
    }
}
