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
        /// First blocked rank, and the index of its blocked op.
        at: (usize, usize),
    },
    /// Calls in flight on one group that do not match.
    Mismatch {
        /// First field in which the two calls differ.
        field: MismatchField,
        /// Descriptions of the two mismatched calls, one per line.
        trace: String,
        /// Rank and op index of the second call in `trace`.
        at: (usize, usize),
    },
    /// A value may be read before it is ready, or two accesses to one buffer have no order.
    Race {
        /// Descriptions of the two ops, and between them a line that states the conflict.
        trace: String,
        /// Rank and op of the reader, or of the later op in program order.
        at: (usize, usize),
    },
}

/// A field in which two calls in flight on one group differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MismatchField {
    /// The ranks call different collectives, such as an all-reduce and an all-gather.
    Op,
    /// One call is captured and the other is not, or they are in different graphs.
    Graph,
    /// Element type of the data on the wire.
    Dtype,
    /// Reduction operator that combines the ranks' values.
    Reduction,
    /// Root rank, the source of a broadcast.
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

    /// Returns the rank and the op index at which the failure appears; `None` if the set completes.
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
