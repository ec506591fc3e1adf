//! The possible outcomes of a set of programs.

use std::fmt;

/// The outcome of a set of programs over all orders in which its devices can run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecutionOutcome {
    /// Every op of every rank finishes in every order and reads the intended values.
    Completes,
    /// No step is possible, but some op has not finished.
    Hang {
        /// Blocking op of each rank, one per line.
        state: String,
        /// First blocked rank and its op.
        at: (usize, usize),
    },
    /// Calls in flight on one group that do not match.
    Mismatch {
        /// Field that differs.
        field: MismatchField,
        /// Both calls.
        trace: String,
        /// Rank and op of one side.
        at: (usize, usize),
    },
    /// A value may be read before it is ready, or two accesses to one buffer have no order.
    Race {
        /// Both ops.
        trace: String,
        /// Rank and op of the reader, or of the later op in program order.
        at: (usize, usize),
    },
}

/// A field in which two calls in flight on one group differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MismatchField {
    /// Op name.
    Op,
    /// One call is captured and the other is not, or they are in different graphs.
    Graph,
    /// Element type.
    Dtype,
    /// Reduction.
    Reduction,
    /// Root.
    Root,
    /// Number of elements sent and received.
    Count,
}

impl ExecutionOutcome {
    /// Returns whether a run can go wrong.
    #[must_use]
    pub fn is_failure(&self) -> bool {
        *self != ExecutionOutcome::Completes
    }

    /// Returns the kind of outcome as one word.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            ExecutionOutcome::Completes => "completes",
            ExecutionOutcome::Hang { .. } => "hang",
            ExecutionOutcome::Mismatch { .. } => "mismatch",
            ExecutionOutcome::Race { .. } => "race",
        }
    }

    /// Returns the rank and op at which the failure appears.
    #[must_use]
    pub fn failing_op(&self) -> Option<(usize, usize)> {
        match self {
            ExecutionOutcome::Completes => None,
            ExecutionOutcome::Hang { at, .. }
            | ExecutionOutcome::Mismatch { at, .. }
            | ExecutionOutcome::Race { at, .. } => Some(*at),
        }
    }
}

impl fmt::Display for ExecutionOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExecutionOutcome::Completes => f.write_str("completes"),
            ExecutionOutcome::Hang { state, .. } => write!(f, "hang\n{state}"),
            ExecutionOutcome::Mismatch { field, trace, .. } => write!(f, "mismatch in {field}\n{trace}"),
            ExecutionOutcome::Race { trace, .. } => write!(f, "race\n{trace}"),
        }
    }
}

impl fmt::Display for MismatchField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MismatchField::Op => "op",
            MismatchField::Graph => "capture",
            MismatchField::Dtype => "dtype",
            MismatchField::Reduction => "reduction",
            MismatchField::Root => "root",
            MismatchField::Count => "count",
        })
    }
}
