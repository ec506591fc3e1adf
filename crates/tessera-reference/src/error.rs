//! The errors that end an evaluation.

use std::fmt;

use tessera_mesh::Rank;

/// The reason why an evaluation ends without outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EvalError {
    /// The number of programs, or a program's mesh, differs from the evaluator's mesh.
    Setup(String),
    /// A rank cannot evaluate an op.
    Op {
        /// Rank whose program contains the op.
        rank: Rank,
        /// Index of the op in the rank's program.
        op: usize,
        /// Name of the op, a colon, and the reason why the op cannot be evaluated.
        message: String,
    },
    /// Members of a group issued different collectives at one position of its sequence.
    Mismatch {
        /// A rank and the collective that it issued.
        here: (Rank, String),
        /// Another member and its collective at the same position.
        there: (Rank, String),
    },
    /// No rank can proceed: each unfinished rank with the collective that it waits for.
    Deadlock(Vec<(Rank, String)>),
}

impl fmt::Display for EvalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EvalError::Setup(m) => f.write_str(m),
            EvalError::Op { rank, op, message } => write!(f, "rank {rank}, op {op}: {message}"),
            EvalError::Mismatch { here, there } => {
                write!(f, "mismatch: rank {} issues {}, rank {} issues {}", here.0, here.1, there.0, there.1)
            }
            EvalError::Deadlock(stuck) => {
                f.write_str("deadlock:")?;
                for (i, (rank, on)) in stuck.iter().enumerate() {
                    write!(f, "{} rank {rank} waits for {on}", if i == 0 { "" } else { ";" })?;
                }
                Ok(())
            }
        }
    }
}

impl std::error::Error for EvalError {}

/// Why one op of a rank cannot be evaluated.
#[derive(Debug)]
pub(crate) enum OpError {
    /// An error of the whole group, which names its ranks itself.
    Group(EvalError),
    /// A reason that concerns only this rank.
    Rank(String),
}

impl From<String> for OpError {
    fn from(why: String) -> OpError {
        OpError::Rank(why)
    }
}

impl From<&str> for OpError {
    fn from(why: &str) -> OpError {
        OpError::Rank(why.to_string())
    }
}
